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
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import ready, sampled_sums
from gnnaccel.ops.graph_conv import SCALED, graph_conv
from gnnaccel.ops.spmm import FORMS, spmm


def sum_mapped(
    graph: Graph, x: Tensor, reduce: str, weight: Tensor, bias: Tensor | None, own_weight: Tensor
) -> Tensor | None:
    """linear(spmm(graph, x, reduce=reduce), weight, bias) + linear(x[:num_rows], own_weight).

    Parameters
    ----------
    graph : Graph
        Its rows are the first of its columns, or all.
    x : Tensor [num_cols, F]
    reduce : {"sum", "mean"}
    weight, own_weight : Tensor [D, F]
    bias : Tensor [D] or None

    Returns
    -------
    Tensor [num_rows, D], or None where the ops are to be called one by one: nothing has been done then.
    """
    if reduce not in FORMS or not _are_maps(x, weight, bias) or torch.is_autocast_enabled(x.device.type):
        return None
    if not _are_maps(x, own_weight) or own_weight.shape != weight.shape:
        return None
    if graph.num_rows > graph.num_cols or x.shape[0] != graph.num_cols:
        return None
    if _operators.watched() or forward_ad._current_level >= 0:
        return None
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # The ops alone keep no x where this weight asks for no gradient: it may be written into then.
    if recorded and not own_weight.requires_grad:
        return None
    if sampled_sums.pays(graph, x, weight):
        return sampled_sums.sum_mapped(graph, x, reduce, weight, bias, own_weight)
    return _sum_mapped(x, weight, bias, own_weight, graph, reduce, recorded and x.requires_grad)


def mapped_sum(graph: Graph, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor | None:
    """graph_conv(graph, linear(x, weight), source_scale=scale, row_scale=scale, bias=bias).

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
    if not _are_maps(x, weight, bias) or graph.num_rows != graph.num_cols or x.shape[0] != graph.num_cols:
        return None
    if x.device != graph.device or torch.is_autocast_enabled(x.device.type):
        return None
    if _operators.watched() or forward_ad._current_level >= 0:
        return None
    both = (x.requires_grad or weight.requires_grad) and torch.is_grad_enabled()
    return _mapped_sum(x, weight, bias, scale, graph, both and not torch.is_inference_mode_enabled())


def _are_maps(x: Tensor, weight: Any, bias: Any = None) -> bool:
    """True for a matrix and a bias that map x, of its dtype and device, none of them of a class of somebody's own."""
    if not _operators.dense(x) or not _operators.dense(weight) or weight.dim() != 2 or x.dim() != 2:
        return False
    if weight.shape[1] != x.shape[1] or weight.dtype != x.dtype or weight.device != x.device:
        return False
    if bias is None:
        return True
    fits = _operators.dense(bias) and bias.dtype == x.dtype and bias.device == x.device
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

    def gradient(self, grad: Tensor) -> Tensor:
        again = torch.is_grad_enabled()
        return torch.autograd.grad(self._sums, self._x, grad, retain_graph=True, create_graph=again)[0]


class _SumMapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, own_weight, graph, reduce, both):
        of_x, of_weight, _, of_own_weight, *_ = ctx.needs_input_grad
        call = ready.call_of(graph, x, FORMS[reduce], None, None, None, both)
        if call is not None:
            sums = call.forward(x, None)
        elif both:
            call = Apart(lambda x: spmm(graph, x, reduce=reduce), x)
            sums = call.result()
        else:
            sums = spmm(graph, x, reduce=reduce)
        own = x if graph.num_rows == graph.num_cols else x[: graph.num_rows]
        out = F.linear(sums, weight, bias).addmm_(own, own_weight.t())
        if of_own_weight:
            ctx.call, ctx.graph, ctx.reduce = call, graph, reduce
            maps = (weight, own_weight) if of_x else (None, None)
            ctx.save_for_backward(x, *maps, sums if of_weight else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, own_weight, sums = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        transposed, rows = grad.t(), grad.shape[0]
        own, grad_x = x if rows == x.shape[0] else x[:rows], None
        if of_x:
            grad_x = ctx.call.gradient(grad.mm(weight))
            if own is x:
                grad_x = torch.addmm(grad_x, grad, own_weight)
            elif torch.is_grad_enabled():
                grad_x = grad_x + F.pad(grad.mm(own_weight), (0, 0, 0, x.shape[0] - rows))
            else:
                grad_x[:rows].addmm_(grad, own_weight)
        if of_weight and torch.is_grad_enabled():  # a second derivative is asked for
            sums = spmm(ctx.graph, x, reduce=ctx.reduce)
        grad_weight = transposed.mm(sums) if of_weight else None
        return grad_x, grad_weight, grad.sum(0) if of_bias else None, transposed.mm(own), None, None, None


class _MappedSum(torch.autograd.Function):
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
        return grad_x, grad_weight, grad.sum(0) if of_bias else None, None, None, None


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where these are called.
_sum_mapped, _mapped_sum = (super(torch.autograd.Function, f).apply for f in (_SumMapped, _MappedSum))  # type: ignore[misc]
