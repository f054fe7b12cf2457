"""A graph in one tensor, for programs whose kernels are replayed from CUDA graphs.

A replay looks nothing up: it reads from the addresses that it was recorded with. torch.compile copies what a recorded
part is given to these before each replay, so a graph that comes as values, found by a call in front of that part, is
always the one of the call. Its size must be known without looking at the edges: where a layer leaves out loops among
them, nonzeros of no row stand behind the last one, under the ids that no edge has. Kernels of CUDA bear that
(cpp/types.h), those of the CPU do not.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph import modes
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _described
from gnnaccel.ops._arrays import Structure, packed_parts
from gnnaccel.ops._described import Described

MOST_EDGES = 1 << 19  # of a graph that is copied at each call; larger ones gain more by their lists of work
_SLOT = "packed"
_KEPT = 8  # tensors of `_Memory`, of some 8 MB at most


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


def _packed(described: Described, both: bool) -> Tensor:
    graph = described.graph()
    kept: dict[bool, Tensor] | None = None if graph.transient() else graph.slot(_SLOT, dict)
    if kept is not None and both in kept:
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


class _Memory:
    """Copies of tensors, in memory that is given out again, the same first, once nobody holds the copy any more.

    A CUDA graph of a backward pass reads what autograd has kept where it lies, and is recorded anew for another
    address: those of torch's allocator come and go with what else a step allocates.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: OrderedDict[tuple, list[tuple[Tensor, torch.UntypedStorage]]] = OrderedDict()

    def copy(self, tensor: Tensor) -> Tensor:
        """A new tensor for who asked, who may write into it."""
        stream = 0
        if tensor.is_cuda:
            if torch.cuda.is_current_stream_capturing():  # what is allocated here is that graph's
                return tensor.clone()
            stream = torch._C._cuda_getCurrentRawStream(tensor.device.index)
        key = tensor.device, stream, tensor.shape[0]  # memory waits for the work of its stream alone, as torch has it
        with self._lock, modes.outside_inference():
            out = self._free(key, tensor).data  # which counts the writes into it by itself
        return out.copy_(tensor)

    def _free(self, key: tuple, like: Tensor) -> Tensor:
        given = self._given.setdefault(key, [])
        self._given.move_to_end(key)
        for out, storage in given:
            if torch._C._storage_Use_Count(storage._cdata) == 2:  # these two
                return out
        out = torch.empty_like(like)
        given.append((out, out.untyped_storage()))
        while len(self._given) > 1 and sum(map(len, self._given.values())) > _KEPT:
            self._given.popitem(last=False)
        del given[:-_KEPT]
        return out


_memory = _Memory()


def _fake(edges: Tensor, sizes: Any, both: bool) -> Tensor:
    described = Described.of(edges, sizes)
    return edges.new_empty(_parts(described, both)[0][-1], dtype=torch.int32)


# The arrays of the graph, and of the transposed one if `both`, as `packed_parts` has them: a new tensor at each call,
# as who asked may write into it once all is read.
_packed_op = _operators.register(
    "packed_graph",
    f"({_described.SCHEMA}, bool both) -> Tensor",
    lambda edges, sizes, both: _memory.copy(_packed(Described.of(edges, sizes), both)),
    _fake,
    looks_up=True,
)


def structure_of(described: Described, both: bool) -> Structure:
    """What stands for `described` in ops whose calls are replayed; with the transposed matrix if `both`."""
    values = _packed_op(*described.flat(), both)
    return Structure.packed(values, described.num_rows, described.num_cols, described.nnz, int(both))
