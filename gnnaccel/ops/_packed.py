"""A graph in one tensor, for programs whose kernels are replayed from CUDA graphs.

A replay looks nothing up: it reads from the addresses that it was recorded with. torch.compile copies what a recorded
part is given to these before each replay, so a graph that comes as values, found by a call in front of that part, is
always the one of the call. Its size must be known without looking at the edges: where a layer leaves out loops among
them, nonzeros of no row stand behind the last one, under the ids that no edge has. Kernels of CUDA bear that
(cpp/types.h), those of the CPU do not.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph import modes
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _described
from gnnaccel.ops._arrays import Matrix, Structure
from gnnaccel.ops._described import Described

MOST_EDGES = 1 << 19  # of a graph that is copied at each call; larger ones gain more by their lists of work
_SLOT = "packed"
_ALIGNED = 4  # numbers of an index: 16 bytes, as of a tensor of its own


def _lengths(described: Described, both: bool) -> list[int]:
    """Of the arrays of the matrix and, if `both`, of the transposed one: indptr, indices, edge ids."""
    nnz = described.nnz
    rows = (described.num_rows, described.num_cols)[: 1 + both]
    return [length for count in rows for length in (count + 1, nnz, nnz)]


def _offsets(lengths: list[int]) -> list[int]:
    """Where the arrays begin, and the end; a zero at least is behind each, as no row ends at nonzero 0."""
    return [0, *accumulate((length // _ALIGNED + 1) * _ALIGNED for length in lengths)]


def _filled(graph: Graph, nnz: int) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, indices and edge ids of `graph`, with `nnz` of the latter."""
    indices, ids = graph.indices, graph.edge_ids
    if ids is None:
        ids = torch.arange(graph.nnz, dtype=indices.dtype, device=indices.device)
    if graph.nnz < nnz:
        assert ids.is_cuda
        free = torch.ones(nnz, dtype=torch.bool, device=ids.device)
        free[ids.long()] = False
        indices = torch.cat([indices, indices.new_zeros(nnz - graph.nnz)])
        ids = torch.cat([ids, free.nonzero().view(-1).to(ids.dtype)])
    return graph.indptr, indices, ids


def _packed(described: Described, both: bool) -> Tensor:
    graph, lengths = described.graph(), _lengths(described, both)
    kept: dict[bool, Tensor] | None = None if graph.transient() else graph.slot(_SLOT, dict)
    if kept is not None and both in kept:
        return kept[both]
    offsets = _offsets(lengths)
    with modes.outside_inference(grad=False):
        out = torch.zeros(offsets[-1], dtype=torch.int32, device=described.device)
        arrays = [part for half in (graph, graph.transposed)[: 1 + both] for part in _filled(half, described.nnz)]
        for offset, length, array in zip(offsets, lengths, arrays, strict=False):
            out[offset : offset + length] = array
    if kept is not None:
        kept[both] = out
    return out


def _fake(edges: Tensor, sizes: Any, both: bool) -> Tensor:
    described = Described.of(edges, sizes)
    return edges.new_empty(_offsets(_lengths(described, both))[-1], dtype=torch.int32)


# The arrays of the graph, and of the transposed one if `both`, as `_lengths` and `_offsets` have them: a new tensor at
# each call, as who asked may write into it once all is read.
_packed_op = _operators.register(
    "packed_graph",
    f"({_described.SCHEMA}, bool both) -> Tensor",
    lambda edges, sizes, both: _packed(Described.of(edges, sizes), both).clone(),
    _fake,
    looks_up=True,
)


def structure_of(described: Described, both: bool) -> Structure:
    """What stands for `described` in ops whose calls are replayed; with the transposed matrix if `both`."""
    values, lengths = _packed_op(*described.flat(), both), _lengths(described, both)
    arrays = [values.narrow(0, *each) for each in zip(_offsets(lengths), lengths, strict=False)]
    indptr, indices, edge_ids, *other = arrays
    own = Matrix(indptr, indices, edge_ids, described.num_cols, described.nnz)
    if not both:
        return Structure(own)
    indptr, indices, edge_ids = other
    return Structure(own, Matrix(indptr, indices, edge_ids, described.num_rows, described.nnz))
