"""What somebody writes into while we read it, or between two uses: perhaps an error, never memory out of bounds."""

import itertools
import threading
import time

import pytest
import torch

from gnnaccel import ops
from gnnaccel.graph.csr import Graph


def valid(graph):
    """All that kernels trust a graph in."""
    ends = graph.indptr.long()
    steps = bool((ends.diff() >= 0).all()) and int(ends[0]) == 0 and int(ends[-1]) == graph.nnz
    inside = bool(((graph.indices >= 0) & (graph.indices < graph.num_cols)).all())
    ids = graph.edge_ids
    return steps and inside and (ids is None or torch.equal(ids.long().sort().values, torch.arange(graph.nnz)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_pairs_that_another_thread_writes_to(dtype):
    nodes, edges = 1000, 60_000
    good = torch.randint(0, nodes, (2, edges), dtype=dtype)
    pairs, stop = good.clone(), threading.Event()

    def write():
        """Spells of good pairs alone, which are valid however they are torn, and spells with wild values among them:
        whatever the threads' pace, both are met."""
        wild = torch.tensor([-1, nodes, 2**31 - 1, -(2**31)], dtype=dtype)
        for turn in itertools.count():
            if stop.is_set():
                return
            at = torch.randint(0, edges, (2, 64))
            if turn % 128 < 64:
                pairs[0, at[0]] = wild[torch.randint(0, 4, (64,))]
                pairs[1, at[1]] = wild[torch.randint(0, 4, (64,))]
            pairs.copy_(good.roll(int(at[0, 0]), 1))

    writer = threading.Thread(target=write)
    writer.start()
    made, refused, start = 0, 0, time.monotonic()
    try:
        while (spent := time.monotonic() - start) < 3 or (spent < 120 and not (made and refused)):
            try:
                graph = Graph.from_coo(pairs[0], pairs[1], num_rows=nodes, num_cols=nodes)
            except ValueError as error:
                assert "Graph: " in str(error)
                refused += 1
            else:
                assert valid(graph)
                made += 1
    finally:
        stop.set()
        writer.join()
    assert made and refused, (made, refused)  # or it tests nothing


def test_what_the_sort_is_told_of_bad_pairs():
    """Each bad value in each place, alone."""
    for value in (-1, 7, 2**31 + 3, 2**32 + 1, -(2**63)):
        for side in (0, 1):
            for place in (0, 3, 5):
                pairs = torch.arange(12).view(2, 6) % 7
                pairs[side, place] = value
                with pytest.raises(ValueError, match=rf"got {value} at position {place}"):
                    Graph.from_coo(pairs[0], pairs[1], num_rows=7, num_cols=7)
    for shape in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="expected values in"):
            Graph.from_coo(torch.tensor([0]), torch.tensor([0]), num_rows=shape[0], num_cols=shape[1])


def test_places_of_a_cbsr_are_copies():
    h = ops.maxk(torch.randn(50, 16), 4)
    want = h.to_dense()
    h.indices().fill_(255)
    torch.testing.assert_close(h.to_dense(), want)
    graph = Graph.from_coo(torch.arange(50), torch.arange(50))
    torch.testing.assert_close(ops.spgemm(graph, h), want)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_offsets_that_change_before_the_backward(reduce):
    x, offsets = torch.randn(6, 3, requires_grad=True), torch.tensor([0, 2, 2, 6])
    (want,) = torch.autograd.grad(ops.segment_reduce(x, offsets.clone(), reduce).sum(), x)
    out = ops.segment_reduce(x, offsets, reduce)
    offsets.fill_(2**40)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], want)
