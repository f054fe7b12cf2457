"""Sums with the linear maps that layers have around them, as one node of autograd: GCN's map before its sum, SAGE's and
GraphConv's behind it, beside the second map of the features themselves.

On a small graph each function that autograd records takes as long as its kernel. The matrix products are torch's, and
so the results, up to the order in which two sums are added; a second derivative goes through torch's own derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from gnnaccel import _operators, touch
from gnnaccel._precision import product
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import ready, sampled_sums
from gnnaccel.ops._arrays import gradients
from gnnaccel.ops._bias import column_sums, rounded_and_sums
from gnnaccel.ops.graph_conv import SCALED, graph_conv
from gnnaccel.ops.joined_sums import WRITTEN, versions
from gnnaccel.ops.ready_call import takes_wide
from gnnaccel.ops.spmm import FORMS, spmm


def sum_mapped(
    graph: Graph,
    x: Tensor,
    reduce: str,
    weight: Tensor,
    bias: Tensor | None,
    own_weight: Tensor,
    own: Tensor | None = None,
) -> Tensor | None:
    """linear(spmm(graph, x, reduce=reduce), weight, bias) + linear(own, own_weight).

    Parameters
    ----------
    graph : Graph
        Without `own`: its rows are the first of its columns, or all.
    x : Tensor [num_cols, F]
    reduce : {"sum", "mean"}
    weight : Tensor [D, F]
    bias : Tensor [D] or None
    own_weight : Tensor [D, F of own]
    own : Tensor [num_rows, F of own], optional
        x[:num_rows] where it is not given.

    Returns
    -------
    Tensor [num_rows, D], or None where the ops are to be called one by one: nothing has been done then.
    """
    narrow = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    if reduce not in FORMS or not are_maps(x, weight, bias, narrow):
        return None
    if not are_maps(x if own is None else own, own_weight, None, narrow) or own_weight.shape[0] != weight.shape[0]:
        return None
    if x.shape[0] != graph.num_cols or graph.num_rows > (graph.num_cols if own is None else own.shape[0]):
        return None
    if narrow is not None and (graph.num_rows != graph.num_cols or own is not None):
        return None
    if own is not None and (own.shape[0] != graph.num_rows or own.dtype != x.dtype or own.device != x.device):
        return None
    if touch.watched() or touch.in_forward_mode():
        return None
    recorded = is_recorded()
    # The ops alone keep no x where this weight asks for no gradient: it may be written into then.
    if recorded and not own_weight.requires_grad:
        return None
    if narrow is None and own is None and sampled_sums.is_profitable(graph, x, weight):
        return sampled_sums.sum_mapped(graph, x, reduce, weight, bias, own_weight)
    given = (weight, bias, own_weight, graph, reduce, recorded and x.requires_grad)
    return _sum_mapped(x, own, *given) if narrow is None else _narrow_sum_mapped(x, x.to(narrow), *given)


def narrow_dtype(x: Tensor) -> torch.dtype | None:
    """Under autocast to bfloat16, of features that a linear map is to cast, or a result of it: that dtype, in which a
    sum may read and write them too; else None. Not float16, in which gradients that a GradScaler has multiplied, and
    sums, have no room."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    return torch.bfloat16 if torch.get_autocast_dtype(x.device.type) is torch.bfloat16 else None


def mapped_sum(graph: Graph, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    """graph_conv(graph, linear(x, weight), source_scale=scale, row_scale=scale, bias=bias), of the dtype of x.

    Under autocast to bfloat16 the map is of that, and what is summed; sums are rounded to it before the bias.

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    x : Tensor [num_cols, F]
    weight : Tensor [D, F]
    scale : Tensor [num_rows], a constant
    bias : Tensor [D] or None

    Returns
    -------
    Tensor [num_rows, D], or None, as of `sum_mapped`.
    """
    if not are_maps(x, weight, bias) or graph.num_rows != graph.num_cols or x.shape[0] != graph.num_cols:
        return None
    if x.device != graph.device:
        return None
    narrow = None
    if torch.is_autocast_enabled(x.device.type):
        narrow = narrow_dtype(x) if x.dtype is torch.float32 else None
        if narrow is None:
            return None
    if touch.watched() or touch.in_forward_mode():
        return None
    both = (x.requires_grad or weight.requires_grad) and torch.is_grad_enabled()
    given = (weight, bias, scale, graph, both and not torch.is_inference_mode_enabled())
    return _mapped_sum(x, *given) if narrow is None else _narrow_mapped_sum(x, x.to(narrow), *given)


def is_recorded() -> bool:
    """True where autograd records."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def are_maps(x: Tensor, weight: Any, bias: Any = None, narrow: torch.dtype | None = None) -> bool:
    """True for a matrix and a bias that map x, of its dtype and device, none of them of a class of somebody's own; with
    the dtype that autocast makes `narrow`, of dtypes that it casts to that."""
    if not _operators.dense(x) or not _operators.dense(weight) or weight.dim() != 2 or x.dim() != 2:
        return False
    if weight.shape[1] != x.shape[1] or weight.device != x.device:
        return False
    dtypes = (x.dtype,) if narrow is None else (torch.float32, narrow)
    if x.dtype not in dtypes or weight.dtype not in dtypes:
        return False
    if bias is None:
        return True
    fits = _operators.dense(bias) and bias.dtype in dtypes and bias.device == x.device
    return fits and bias.shape == weight.shape[:1]


class Apart:
    """A sum that is not ready, with a piece of autograd's graph of its own. Whether it is must not show in what is
    saved: torch.utils.checkpoint makes a call again, by when the graph may have earned other kernels."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor):
        with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):  # the caller's hooks see nothing of it
            self._x = x.detach().requires_grad_()
            self._sums = function(self._x)

    def result(self) -> Tensor:
        return self._sums.detach()

    def gradient(self, grad: Tensor, factor: Tensor | None = None) -> Tensor:
        again = torch.is_grad_enabled()
        found = torch.autograd.grad(self._sums, self._x, grad, retain_graph=True, create_graph=again)[0]
        return found if factor is None else found + factor * grad


class _OfNone:
    """The sum over no edges at all."""

    def __init__(self, graph: Graph):
        self._rows = graph.num_cols

    def gradient(self, grad: Tensor, factor: Tensor | None = None) -> Tensor:
        return grad.new_zeros(self._rows, grad.shape[1]) if factor is None else factor * grad


def sums_of(graph: Graph, x: Tensor, reduce: str, both: bool, factor: Tensor | None = None) -> tuple[Any, Tensor]:
    """spmm(graph, x, reduce=reduce) within a function of autograd, and behind what has its gradient(grad), if a call of
    `both` directions is wanted. With a factor, of a sum of as many rows as columns: plus factor * x, whose gradient is
    gradient(grad, factor=factor)."""
    if not graph.nnz and x.dim() == 2 and x.shape[0] == graph.num_cols:
        return _OfNone(graph), x.new_zeros(graph.num_rows, x.shape[1]) if factor is None else factor * x
    call: Any = ready.call_of(graph, x, FORMS[reduce], None, None, None, both)
    if call is not None:
        return call, call.forward(x, None) if factor is None else call.with_own(x, factor)
    if both:
        call = Apart(lambda x: spmm(graph, x, reduce=reduce), x)
        sums = call.result()
    else:
        sums = spmm(graph, x, reduce=reduce)
    return call, sums if factor is None else sums + factor * x


class _SumMapped(_operators.Function):
    @staticmethod
    def forward(ctx, x, own, weight, bias, own_weight, graph, reduce, both):
        of_x, of_own, of_weight, _, of_own_weight, *_ = ctx.needs_input_grad
        call, sums = sums_of(graph, x, reduce, both)
        apart = own is not None
        if not apart:
            own = x if graph.num_rows == graph.num_cols else x[: graph.num_rows]
        out = F.linear(sums, weight, bias).addmm_(own, own_weight.t())
        if of_own_weight:
            ctx.call, ctx.graph, ctx.reduce, ctx.apart = call, graph, reduce, apart
            given = (x if of_weight else None, own) if apart else (x, None)
            maps = (weight if of_x else None, own_weight if of_x or of_own else None)
            ctx.save_for_backward(*given, *maps, sums if of_weight else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, own, weight, own_weight, sums = ctx.saved_tensors
        of_x, of_own, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad, again = grad.contiguous(), torch.is_grad_enabled()
        transposed, rows = grad.t(), grad.shape[0]
        grad_x = ctx.call.gradient(grad.mm(weight)) if of_x else None
        grad_own = grad.mm(own_weight) if of_own else None
        if not ctx.apart:
            own = x if rows == x.shape[0] else x[:rows]
            if of_x and again:
                grad_x = grad_x + F.pad(grad.mm(own_weight), (0, 0, 0, x.shape[0] - rows))
            elif of_x:
                grad_x[:rows].addmm_(grad, own_weight)
        if of_weight and again:  # a second derivative is asked for
            sums = spmm(ctx.graph, x, reduce=ctx.reduce)
        grad_weight = transposed.mm(sums) if of_weight else None
        grad_bias = column_sums(grad) if of_bias else None
        return grad_x, grad_own, grad_weight, grad_bias, transposed.mm(own), None, None, None


class _NarrowSumMapped(_operators.Function):
    """The same under autocast: maps in the dtype that autocast casts to, and in bfloat16 the sums, of x cast to it
    (`ends`), which the second map reads anyway; else sums in the dtype of x.
    x itself is not kept, as a layer alone keeps casts. A second derivative has `ends` in its place. Nor are parameters,
    which may be written into before a first one."""

    @staticmethod
    def forward(ctx, x, ends, weight, bias, own_weight, graph, reduce, both):
        narrow, source = ends.dtype, _summed(x, ends)
        call, sums = sums_of(graph, source, reduce, both)
        sums, maps, own_maps = sums.to(narrow), weight.to(narrow), own_weight.to(narrow)
        # Rounded as often as by the layer alone.
        out = F.linear(sums, maps, None if bias is None else bias.to(narrow)).add_(F.linear(ends, own_maps))
        of_x, _, of_weight, _, of_own_weight, *_ = ctx.needs_input_grad
        if of_own_weight:
            ctx.call, ctx.graph, ctx.reduce, ctx.dtypes = call, graph, reduce, (x.dtype, source.dtype)
            ctx.kept = Kept((weight, bias, own_weight))
            narrow_maps = (maps, own_maps) if of_x else (None, None)
            ctx.save_for_backward(ends, *narrow_maps, sums if of_weight else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        ends, maps, own_maps, sums = ctx.saved_tensors
        weight, bias, own_weight = ctx.kept.parameters
        of_x, _, of_weight, of_bias, _, *rest = ctx.needs_input_grad
        rest = [None] * len(rest)
        wide, summed = ctx.dtypes
        if torch.is_grad_enabled():  # a second derivative is asked for
            ctx.kept.check()
            graph, reduce, narrow = ctx.graph, ctx.reduce, ends.dtype

            def composed(ends, weight, bias, own_weight):
                sums = spmm(graph, ends.to(summed), reduce=reduce).to(narrow)
                out = F.linear(sums, weight.to(narrow)) + F.linear(ends, own_weight.to(narrow))
                return out if bias is None else out + bias.to(narrow)

            return None, *gradients(composed, (ends, weight, bias, own_weight), ctx.needs_input_grad[1:5], grad), *rest
        grad = grad.contiguous()
        transposed, grad_x = grad.t(), None
        if of_x:
            of_sums = ctx.call.gradient(grad.mm(maps).to(summed))
            grad_x = of_sums.add_(grad.mm(own_maps)).to(wide)
        grad_weight = product(transposed, sums, weight.dtype) if of_weight else None
        grad_bias = column_sums(grad).to(bias.dtype) if of_bias else None
        return grad_x, None, grad_weight, grad_bias, product(transposed, ends, own_weight.dtype), *rest


class Kept:
    """Parameters for a second derivative alone: they may be written into before a first one."""

    __slots__ = ("_versions", "parameters")

    def __init__(self, parameters: tuple[Tensor | None, ...]):
        self.parameters, self._versions = parameters, versions(parameters)

    def check(self) -> None:
        if versions(self.parameters) != self._versions:
            raise RuntimeError(WRITTEN)


def _summed(x: Tensor, ends: Tensor) -> Tensor:
    """Of x and what autocast makes of it that which is summed."""
    return ends if ends.dtype is torch.bfloat16 else x


class _MappedSum(_operators.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale, graph, both):
        mapped = F.linear(x, weight)
        call = ready.call_of(graph, mapped, SCALED, scale, scale, bias, both)
        if call is not None:
            out = call.forward(mapped, bias)
        elif both:
            call = Apart(lambda x: graph_conv(graph, x, source_scale=scale, row_scale=scale, bias=bias), mapped)
            out = call.result()
        else:
            out = graph_conv(graph, mapped, source_scale=scale, row_scale=scale, bias=bias)
        if any(ctx.needs_input_grad):
            ctx.call = call
            of_x, of_weight, *_ = ctx.needs_input_grad
            ctx.save_for_backward(x if of_weight else None, weight if of_x else None, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors  # raises if one was written into
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if of_x or of_weight:
            mapped = ctx.call.gradient(grad)
            grad_x = mapped.mm(weight) if of_x else None
            grad_weight = mapped.t().mm(x) if of_weight else None
        return grad_x, grad_weight, column_sums(grad) if of_bias else None, None, None, None


class _NarrowMappedSum(_operators.Function):
    """The same under autocast, of `ends`, as in `_NarrowSumMapped`."""

    @staticmethod
    def forward(ctx, x, ends, weight, bias, scale, graph, both):
        maps = weight.to(ends.dtype)
        mapped = F.linear(ends, maps)
        call = ready.call_of(graph, mapped, SCALED, scale, scale, None, both)
        wide = call is not None and takes_wide(mapped, bias)
        if wide:
            out = call.forward(mapped, bias, wide=True)
        elif call is not None:
            out = call.forward(mapped, None)
        elif both:
            call = Apart(lambda x: graph_conv(graph, x, source_scale=scale, row_scale=scale), mapped)
            out = call.result()
        else:
            out = graph_conv(graph, mapped, source_scale=scale, row_scale=scale)
        if any(ctx.needs_input_grad):
            ctx.call, ctx.graph, ctx.dtype = call, graph, x.dtype
            of_x, _, of_weight, *_ = ctx.needs_input_grad
            ctx.kept = Kept((weight, bias))
            ctx.save_for_backward(ends if of_weight else None, maps if of_x else None, scale)
        if wide:
            return out
        return out.to(x.dtype) if bias is None else torch.add(out, bias)  # of the wider dtype

    @staticmethod
    def backward(ctx, grad):
        (ends, maps, scale), (weight, bias) = ctx.saved_tensors, ctx.kept.parameters
        of_x, _, of_weight, of_bias, *rest = ctx.needs_input_grad
        rest = [None] * len(rest)
        if torch.is_grad_enabled():  # a second derivative is asked for
            ctx.kept.check()
            graph, dtype, narrow = ctx.graph, ctx.dtype, torch.bfloat16
            if ends is None:  # the gradient of a sum of x alone, which is linear in it
                ends = weight.new_zeros(graph.num_cols, weight.shape[1], dtype=narrow)

            def composed(ends, weight, bias):
                mapped = F.linear(ends, weight.to(narrow))
                out = graph_conv(graph, mapped, source_scale=scale, row_scale=scale)
                return out.to(dtype) if bias is None else out + bias

            return None, *gradients(composed, (ends, weight, bias), ctx.needs_input_grad[1:4], grad), *rest
        grad, grad_x, grad_weight = grad.contiguous(), None, None
        if of_x or of_weight:
            rounded, grad_bias = rounded_and_sums(grad, torch.bfloat16) if of_bias else (grad.to(torch.bfloat16), None)
            mapped = ctx.call.gradient(rounded)
            grad_x = product(mapped, maps, ctx.dtype) if of_x else None
            grad_weight = product(mapped.t(), ends, weight.dtype) if of_weight else None
        elif of_bias:
            grad_bias = column_sums(grad)
        return grad_x, None, grad_weight, grad_bias, *rest


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where these are called.
_sum_mapped, _narrow_sum_mapped, _mapped_sum, _narrow_mapped_sum = (
    super(torch.autograd.Function, f).apply  # type: ignore[misc]
    for f in (_SumMapped, _NarrowSumMapped, _MappedSum, _NarrowMappedSum)
)
