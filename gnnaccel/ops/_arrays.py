"""The structure arguments of the registered ops: a graph as plain tensors, as autograd and torch.compile want it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.schedule import worklist

SCHEMA = (
    "Tensor indptr, Tensor? indices, Tensor? edge_ids, Tensor? t_indptr, Tensor? t_indices, Tensor? t_edge_ids, "
    "Tensor? items, Tensor? steps, Tensor? splits, Tensor? t_items, Tensor? t_steps, Tensor? t_splits, "
    "SymInt num_cols, SymInt nnz, int plan, int t_plan"
)


class Arrays(NamedTuple):
    """A graph and, where a gradient runs over it, its transposed; and the order of the rows of each, if it has one.

    items, steps, splits: of a work list on CUDA; on the CPU rows, indptr and edges of `worklist.Ordered`.
    """

    indptr: Tensor
    indices: Tensor | None = None
    edge_ids: Tensor | None = None
    t_indptr: Tensor | None = None
    t_indices: Tensor | None = None
    t_edge_ids: Tensor | None = None
    items: Tensor | None = None
    steps: Tensor | None = None
    splits: Tensor | None = None
    t_items: Tensor | None = None
    t_steps: Tensor | None = None
    t_splits: Tensor | None = None
    num_cols: int = 0
    nnz: int = 0
    plan: int = 0  # worklist.Plan.code
    t_plan: int = 0

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1

    def turned(self) -> Arrays:
        """The same edges reversed."""
        sizes = (self.num_rows, self.nnz, self.t_plan, self.plan)
        return Arrays._make((*self[3:6], *self[:3], *self[9:12], *self[6:9], *sizes))

    def matrix(self) -> tuple:
        """The binary's description of the graph (types.h: Csr)."""
        return lib.csr(self.indptr, self.indices, self.edge_ids, self.num_cols, self.nnz)

    def walked(self, in_order: bool) -> tuple:
        """The same with the order in which its rows are taken: on the CPU they lie in it (cpp/kernels.h: spmm), where
        they are to be `in_order`."""
        if self.indptr.is_cuda:
            return *self.matrix(), *self.work_list()
        if not in_order or self.items is None or self.steps is None or self.splits is None:
            return *self.matrix(), 0
        sources, edge_ids = self.splits.unbind()
        return *lib.csr(self.steps, sources, edge_ids, self.num_cols, self.nnz), self.items.data_ptr()

    def work_list(self) -> tuple:
        """What the CUDA kernels take after the graph (cuda/bindings.cpp: work_list), in a tuple; nothing on the CPU."""
        if not self.indptr.is_cuda:
            return ()
        if self.items is None or self.steps is None or self.splits is None:
            return ((),)
        tensors = (self.items, self.steps, self.splits)
        return ((*(t.data_ptr() for t in tensors), *(t.shape[0] for t in tensors), *worklist.decode(self.plan)),)


COUNT = len(Arrays._fields)


def split(args: tuple) -> tuple[Arrays, tuple]:
    """The structure arguments of an op, and those that follow."""
    return Arrays._make(args[:COUNT]), args[COUNT:]


def arrays_of(
    graph: Graph, transposed: bool, *features: Tensor | None, listed: bool = True, sums: bool = False
) -> Arrays:
    """The arguments of a call on `graph` that gathers rows of the widest of `features`.

    The transposed half is there only if `transposed`: where a gradient will need it. Work lists only if `listed`: where
    a kernel that reads them (for copied or scaled sources, or dot products) will run, forward or backward. `sums`: that
    of sums and means, which may be of groups of neighbours.
    """
    nothing = (None, None, None)
    t = graph.transposed if transposed else None
    work = t_work = None
    if listed and (graph.indptr.is_cuda or any(g is not None and schedule.ordered(g) for g in (graph, t))):
        row_bytes = 0
        for x in features:
            if x is not None:
                row_bytes = max(row_bytes, math.prod(x.shape[1:]) * x.element_size())
        work = schedule.work_list(graph, row_bytes, sums)
        t_work = None if t is None else schedule.work_list(t, row_bytes, sums)
    return Arrays._make(
        (
            *(graph.indptr, graph.indices, graph.edge_ids),
            *(nothing if t is None else (t.indptr, t.indices, t.edge_ids)),
            *(nothing if work is None else work[:3]),
            *(nothing if t_work is None else t_work[:3]),
            *(graph.num_cols, graph.indices.numel()),
            *(0 if w is None else w.code for w in (work, t_work)),
        )
    )


def save(ctx, arrays: Arrays, *tensors: Tensor | None) -> None:
    """Keep `arrays`, and ctx.save_for_backward of `tensors`; `saved` gives them back.

    The structure stays out of what is saved: nobody writes into it, it is no use to hooks that pack saved tensors
    (torch.autograd.graph.save_on_cpu), and torch.utils.checkpoint wants the same saved tensors of a forward and of the
    same forward again, between which a graph may earn a work list or a ready call.
    """
    ctx.arrays = arrays
    ctx.save_for_backward(*tensors)


def saved(ctx) -> tuple[Arrays, tuple]:
    """What `save` kept."""
    return ctx.arrays, ctx.saved_tensors


def needs_grad(*tensors: Tensor | None) -> bool:
    """True if autograd, or a level of torch.func, will ask for a gradient of any of `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and (t.requires_grad or _recorded(t)) for t in tensors)


def _recorded(tensor: Tensor) -> bool:
    """True if a level of torch.func below the present one records what becomes of `tensor`."""
    if torch.compiler.is_compiling():
        return False
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def gradients(function: Callable, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor) -> tuple:
    """Gradients of function(*inputs) that can be differentiated again; None for inputs that are not `wanted`.

    Of each input by itself, also where several are one tensor.
    """

    def of_wanted(*given: Tensor):
        rest = iter(given)
        return function(*(next(rest) if w else t for t, w in zip(inputs, wanted, strict=True)))

    # Not torch.autograd.grad, for which inputs would have to require gradients: no transform lets a tensor be made so.
    _, pull = torch.func.vjp(of_wanted, *(t for t, w in zip(inputs, wanted, strict=True) if w))  # type: ignore[misc]
    found = iter(pull(grad))
    return tuple(next(found) if w else None for w in wanted)


def fused(*, source_scale=None, source_indptr=None, row_scale=None, bias=None, relu=False) -> tuple:
    """The binary's description of what a sum does in the same pass (types.h: Fused), of contiguous tensors."""
    return (*(lib.pointer(t) for t in (source_scale, source_indptr, row_scale, bias)), relu)


_DENSE = 40


def scales_first(arrays: Arrays, x: Tensor) -> bool:
    """True if a scale per source should be multiplied into x [num_cols, *F] first, instead of being looked up at every
    nonzero. H200: looked up 1.07 to 1.2 times the time at mean degrees of 50 to 600, 0.5 to 1.0 at 2 to 32. On the
    CPU, and for 16-bit features, which it would round, it is always looked up.
    """
    return x.is_cuda and x.element_size() > 2 and arrays.nnz > _DENSE * arrays.num_cols
