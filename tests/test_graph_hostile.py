"""Hostile arrays never crash the constructors of Graph: a bounded run of the fuzz target, and what it has found."""

import collections
import random

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("torch_geometric")
import scipy.sparse
from fuzz.arrays import one_input

from gnnaccel import Graph


@pytest.mark.filterwarnings("ignore")
def test_random_bytes():
    torch.set_num_threads(1)
    rng, outcomes = random.Random(3), collections.Counter()
    for _ in range(400):
        outcomes[one_input(rng.randbytes(rng.randrange(1, 120)))] += 1
    # The target must reach both sides, or it tests nothing.
    assert outcomes["graph"] > 50 and outcomes["ValueError"] > 20 and outcomes["TypeError"] > 20, outcomes


def blocks():
    return scipy.sparse.bsr_array(np.kron(np.eye(3), np.ones((2, 2))), blocksize=(2, 2))


def broken(form, name, value):
    matrix = blocks().asformat(form)
    setattr(matrix, name, value)
    return matrix


BROKEN = {
    "csr, no indptr": lambda: broken("csr", "indptr", np.zeros(0, np.int32)),
    "csr, short indptr": lambda: broken("csr", "indptr", np.array([0, 12], np.int32)),
    "csc, long indptr": lambda: broken("csc", "indptr", np.array([0, 0, 2, 4, 6, 8, 10, 12], np.int32)),
    "csr, index too large": lambda: broken("csr", "indices", np.full(12, 99, np.int32)),
    # scipy's own check lets these two pass, and its conversion then writes out of bounds.
    "blocks, back to no entries": lambda: broken("bsr", "indptr", np.array([0, 3, 3, 0], np.int32)),
    "blocks, negative end": lambda: broken("bsr", "indptr", np.array([0, 900, 900, -1], np.int32)),
    "blocks, index too large": lambda: broken("bsr", "indices", np.array([0, 1, 2**30], np.int32)),
    "blocks, no data": lambda: broken("bsr", "data", np.zeros((0, 2, 2))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_scipy_matrix(name):
    with pytest.raises(ValueError, match="Graph"):
        Graph.from_scipy(BROKEN[name]())


def test_blocks_that_are_whole():
    graph = Graph.from_scipy(blocks())
    assert (graph.num_rows, graph.num_cols, graph.nnz) == (6, 6, 12)


def test_meta_tensors():
    index = torch.zeros(3, dtype=torch.long, device="meta")
    for make in (Graph.from_coo, Graph.from_csr):
        with pytest.raises(ValueError, match="meta device"):
            make(index, index)
