"""The structure arguments of the registered ops: a graph as plain tensors, as autograd and torch.compile want it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.graph.structure import Graph

SCHEMA = (
    "Tensor indptr, Tensor? indices, Tensor? edge_ids, Tensor? t_indptr, Tensor? t_indices, Tensor? t_edge_ids, "
    "SymInt num_cols, SymInt nnz, Tensor[] work, Tensor[] t_work, bool clustered"
)


class Arrays(NamedTuple):
    """A graph and, where a gradient runs over it, its transposed (None otherwise); work lists where CUDA has them."""

    indptr: Tensor
    indices: Tensor | None
    edge_ids: Tensor | None
    t_indptr: Tensor | None
    t_indices: Tensor | None
    t_edge_ids: Tensor | None
    num_cols: int
    nnz: int
    work: list[Tensor]
    t_work: list[Tensor]
    clustered: bool

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1

    def turned(self) -> Arrays:
        """The same edges reversed."""
        assert self.t_indptr is not None, "a gradient was asked for that the forward did not expect"
        back, forward = (self.t_indptr, self.t_indices, self.t_edge_ids), (self.indptr, self.indices, self.edge_ids)
        return Arrays(*back, *forward, self.num_rows, self.nnz, self.t_work, self.work, self.clustered)

    def matrix(self) -> tuple:
        """The binary's description of the graph (types.h: Csr)."""
        return lib.csr(self.indptr, self.indices, self.edge_ids, self.num_cols, self.nnz)

    def work_list(self) -> tuple:
        """What the CUDA kernels take after the graph (cuda/bindings.cpp: work_list), in a tuple; nothing on the CPU."""
        if not self.indptr.is_cuda:
            return ()
        if not self.work:
            return ((),)
        sizes = (t.shape[0] for t in self.work)
        return ((*(lib.pointer(t) for t in self.work), *sizes, self.clustered),)


COUNT = len(Arrays._fields)


def split(args: tuple) -> tuple[Arrays, tuple]:
    """The structure arguments of an op, and those that follow."""
    return Arrays(*args[:COUNT]), args[COUNT:]


def arrays_of(graph: Graph, transposed: bool, *features: Tensor | None) -> Arrays:
    """The arguments of a call on `graph` that gathers rows of the widest of `features`.

    The transposed half is there only if `transposed`: where a gradient will need it.
    """
    forward: list[Tensor] = []
    back: list[Tensor] = []
    clustered = False
    t = graph.transposed if transposed else None
    if graph.indptr.is_cuda:
        row_bytes = max((math.prod(x.shape[1:]) * x.element_size() for x in features if x is not None), default=0)
        found = graph.work_list(row_bytes)
        if found is not None:
            forward, clustered = found.tensors, found.clustered
        found = None if t is None else t.work_list(row_bytes)
        if found is not None:
            back, clustered = found.tensors, found.clustered
    t_indptr, t_indices, t_edge_ids = (None, None, None) if t is None else (t.indptr, t.indices, t.edge_ids)
    return Arrays(
        graph.indptr, graph.indices, graph.edge_ids, t_indptr, t_indices, t_edge_ids,
        graph.num_cols, graph.indices.numel(), forward, back, clustered,
    )  # fmt: skip


def save(ctx, arrays: Arrays, *tensors: Tensor | None) -> None:
    """ctx.save_for_backward of `arrays` and `tensors`; `saved` gives them back."""
    ctx.array_sizes = (arrays.num_cols, arrays.nnz, len(arrays.work), len(arrays.t_work), arrays.clustered)
    ctx.save_for_backward(*arrays[:6], *arrays.work, *arrays.t_work, *tensors)


def saved(ctx) -> tuple[Arrays, tuple]:
    """What `save` kept."""
    num_cols, nnz, work, t_work, clustered = ctx.array_sizes
    tensors, rest = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    forward, back = list(rest[:work]), list(rest[work : work + t_work])
    return Arrays._make((*tensors, num_cols, nnz, forward, back, clustered)), rest[work + t_work :]


def needs_grad(*tensors: Tensor | None) -> bool:
    """True if autograd will ask for a gradient of any of `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
