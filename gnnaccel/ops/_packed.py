"""A graph in one tensor, for programs whose kernels are replayed from CUDA graphs.

A replay looks nothing up: it reads from the addresses that it was recorded with. torch.compile copies what a recorded
part is given to these before each replay, so a graph that comes as values, found by a call in front of that part, is
always the one of the call. Its size must be known without looking at the edges: where a layer leaves out loops among
them, nonzeros of no row stand behind the last one, under the ids that no edge has. Kernels of CUDA bear that
(cpp/types.h), those of the CPU do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph import modes
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _described
from gnnaccel.ops._arrays import Structure, packed_parts
from gnnaccel.ops._described import Described

_SLOT = "packed"


def _parts(described: Described, both: bool) -> tuple[list[int], list[int]]:
    return packed_parts(described.num_rows, described.num_cols, described.nnz, both)


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


def _key(sizes: Any, both: bool) -> tuple:
    return (_SLOT, both, *sizes)


def _packed(described: Described, both: bool) -> Tensor:
    graph = described.graph()
    kept: dict[bool, Tensor] | None = None if graph.transient() else graph.slot(_SLOT, dict)
    if kept is not None and both in kept:
        derived.put((described.edges,), _key(described.flat()[1], both), kept[both])  # for `_found`
        return kept[both]
    offsets, lengths = _parts(described, both)
    with modes.outside_inference(grad=False):
        out = torch.zeros(offsets[-1], dtype=torch.int32, device=described.device)
        arrays = [part for half in (graph, graph.transposed)[: 1 + both] for part in _filled(half, described.nnz)]
        for offset, length, array in zip(offsets, lengths, arrays, strict=False):
            out[offset : offset + length] = array
    if kept is not None:
        kept[both] = out
    return out


def _found(edges: Tensor, sizes: Any, both: bool) -> Tensor | None:
    """What the op returns where all is there: the shortest way, as each step goes it."""
    kept = derived.get((edges,), _key(sizes, both))
    return None if kept is None else kept.clone()


def _fake(edges: Tensor, sizes: Any, both: bool) -> Tensor:
    described = Described.of(edges, sizes)
    return edges.new_empty(_parts(described, both)[0][-1], dtype=torch.int32)


# The arrays of the graph, and of the transposed one if `both`, as `packed_parts` has them: a new tensor at each call,
# as who asked may write into it once all is read.
_packed_op = _operators.register(
    "packed_graph",
    f"({_described.SCHEMA}, bool both) -> Tensor",
    lambda edges, sizes, both: _packed(Described.of(edges, sizes), both).clone(),
    _fake,
    looks_up=True,
    found=_found,
)


def structure_of(described: Described, both: bool) -> Structure:
    """What stands for `described` in ops whose calls are replayed; with the transposed matrix if `both`."""
    values = _packed_op(*described.flat(), both)
    return Structure.packed(values, described.num_rows, described.num_cols, described.nnz, int(both))
