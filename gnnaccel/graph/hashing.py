"""Hashes of a graph's arrays: by which files of it are named, and edges compared."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds


def mixed(x: Tensor) -> Tensor:
    """A hash of int64 values (multiply and fold twice; products wrap around)."""
    for factor, shift in ((-7046029254386353131, 32), (-4658895280553007687, 29)):
        x = (x + 1).mul_(factor)
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))
    return x


def fingerprint(graph: Graph) -> str:
    """A number in hex that differs for graphs whose arrays differ; one pass over them, and a synchronisation."""
    sums = torch.stack([_hash(graph.indptr), _hash(graph.indices)]).tolist()
    return hashlib.sha256(repr((graph.num_rows, graph.num_cols, graph.nnz, sums)).encode()).hexdigest()[:32]


def _hash(values: Tensor) -> Tensor:
    """A sum of hashes of values and places, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), bounds.HASHED_EDGES):
        part = values[start : start + bounds.HASHED_EDGES].long()
        total += mixed(mixed(torch.arange(start, start + part.numel(), device=part.device)) + part).sum()
    return total
