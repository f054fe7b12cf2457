"""A sum over neighbours and a node's own features, as one op (what a compiled GIN layer runs on the CPU), and as one
node of autograd (what it runs else), by itself and with a linear map behind it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators, touch
from gnnaccel._precision import product
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check, linear_sums
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops.joined_sums import WRITTEN, versions
from gnnaccel.ops.spmm import spmm_op


def own_sum(graph: Graph, x: Tensor, eps: Tensor) -> Tensor | None:
    """spmm(graph, x) + (1 + eps) * x.

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    x : Tensor [num_cols, F]
    eps : Tensor of one number
        Of float32, or of the dtype of x.

    Returns
    -------
    Tensor [num_rows, F], or None where the ops are to be called one by one: nothing has been done then.
    """
    if not _operators.usual(x, eps) or x.dim() != 2 or x.shape[0] != graph.num_rows or eps.numel() != 1:
        return None
    if graph.num_rows != graph.num_cols or x.device != graph.device or eps.device != x.device:
        return None
    if not x.is_floating_point() or eps.dtype not in (torch.float32, x.dtype):
        return None
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return _record(x, eps, graph, recorded and x.requires_grad)


class _OwnSum(_operators.Function):
    @staticmethod
    def forward(ctx, x, eps, graph, both):
        of_x, of_eps, *_ = ctx.needs_input_grad
        factor = _factor(x, eps)
        call, sums = linear_sums.sums_of(graph, x, "sum", both, factor)
        if of_x or of_eps:
            # eps is for a second derivative alone: it may be written into before a first one.
            ctx.call, ctx.eps, ctx.versions = call, eps, versions((eps,))
            ctx.save_for_backward(x if of_eps else None, factor)
        return sums

    @staticmethod
    def backward(ctx, grad):
        (x, factor), eps = ctx.saved_tensors, ctx.eps
        of_x, of_eps, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() and versions((eps,)) != ctx.versions:
            raise RuntimeError(WRITTEN)
        again, grad = torch.is_grad_enabled(), grad.contiguous()
        factor = _factor(grad, eps) if again else factor  # which depends on eps
        grad_x = ctx.call.gradient(grad, factor=factor) if of_x else None
        return grad_x, _of_eps(grad, x, eps) if of_eps else None, None, None


def own_sum_mapped(
    graph: Graph, x: Tensor, eps: Tensor | None, weight: Tensor, bias: Tensor | None, narrow: torch.dtype
) -> Tensor | None:
    """linear(spmm(graph, x) + (1 + eps) * x, weight, bias) under autocast.

    Parameters
    ----------
    graph, x, eps
        As of `own_sum`; without eps a node's own features are left out.
    weight : Tensor [D, F]
    bias : Tensor [D] or None
    narrow : torch.dtype
        What autocast makes of the map; the sums are of that too.

    Returns
    -------
    Tensor [num_rows, D], or None, as of `own_sum`.
    """
    if not linear_sums.are_maps(x, weight, bias, narrow):
        return None
    if eps is not None and (not _operators.dense(eps) or eps.numel() != 1 or eps.device != x.device):
        return None
    if x.shape[0] != graph.num_rows or graph.num_rows != graph.num_cols or x.device != graph.device:
        return None
    if touch.watched() or touch.in_forward_mode():
        return None
    both = linear_sums.is_recorded() and x.requires_grad
    return _record_mapped(x, eps, weight, bias, graph, narrow, both)[0]


class _OwnSumMapped(_operators.Function):
    """Its second result is the sums: what a backward pass makes of them leads back here, and so no x is kept."""

    @staticmethod
    def forward(ctx, x, eps, weight, bias, graph, narrow, both):
        of_x, of_eps, of_weight, of_bias, *_ = ctx.needs_input_grad
        source, maps, shift = x.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
        factor = None if eps is None else _factor(source, eps)
        call, sums = linear_sums.sums_of(graph, source, "sum", both, factor)
        if of_x or of_eps or of_weight or of_bias:
            ctx.set_materialize_grads(False)
            ctx.call, ctx.kept, ctx.narrow, ctx.dtype = call, linear_sums.Kept((eps, weight, bias)), narrow, x.dtype
            given = (x if of_eps else None, factor, maps if of_x or of_eps else None)
            ctx.save_for_backward(*given, sums if of_weight else None)
        if not (of_x or of_eps):
            ctx.mark_non_differentiable(sums)
        return F.linear(sums, maps, shift), sums

    @staticmethod
    def backward(ctx, grad, grad_sums):
        (x, factor, maps, sums), (eps, weight, bias) = ctx.saved_tensors, ctx.kept.parameters
        of_x, of_eps, of_weight, of_bias, *_ = ctx.needs_input_grad
        again = torch.is_grad_enabled()
        grad_x = grad_eps = grad_weight = grad_bias = None
        if again:  # by what parameters are now
            ctx.kept.check()
            maps = weight.to(ctx.narrow)
        of_sums = None if grad_sums is None else grad_sums.contiguous()
        if grad is not None:
            grad = grad.contiguous()
            grad_weight = product(grad.t(), sums, weight.dtype) if of_weight else None
            grad_bias = column_sums(grad, bias.dtype) if of_bias else None
            if of_x or of_eps:
                of_sums = grad.mm(maps) if of_sums is None else of_sums + grad.mm(maps)
        if of_x and of_sums is not None:
            factor = _factor(of_sums, eps) if again and eps is not None else factor
            grad_x = ctx.call.gradient(of_sums, factor=factor).to(ctx.dtype)
        if of_eps and of_sums is not None:
            grad_eps = _of_eps(of_sums, x, eps)
        return grad_x, grad_eps, grad_weight, grad_bias, None, None, None


def _factor(x: Tensor, eps: Tensor) -> Tensor:
    """1 + eps. Of no dimensions it leaves the dtype of x alone."""
    return (eps if eps.dtype is x.dtype else eps.view(())) + 1


def _of_eps(grad: Tensor, x: Tensor, eps: Tensor) -> Tensor:
    """The gradient of eps, of products of its dtype: of fewer digits they leave little of a small sum."""
    return ((grad if x.dtype is eps.dtype else grad.to(eps.dtype)) * x).sum(dtype=eps.dtype).view(eps.shape)


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_record, _record_mapped = (super(torch.autograd.Function, f).apply for f in (_OwnSum, _OwnSumMapped))  # type: ignore[misc]


def _sum(arrays: Structure, x: Tensor, eps: Tensor) -> Tensor:
    out = spmm_op.impl(arrays, x, None, "copy_lhs", "sum", 0.0)  # type: ignore[attr-defined]
    return out.add_(x, alpha=1 + float(eps))


def _fake(_arrays, x, *_):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    arrays, x, eps = inputs
    ctx.set_materialize_grads(False)
    _arrays.save(ctx, arrays, x, eps)


def _backward(ctx, grad):
    if grad is None:
        return None, None
    arrays, (x, eps) = _arrays.saved(ctx)
    of_x, of_eps = ctx.wanted
    grad_x = _backward_op(arrays.transposed(), grad, x, eps) if of_x else None
    return grad_x, (grad * x).sum().view(eps.shape) if of_eps else None


# Reads no x. torch.compile keeps what a backward takes, and so x itself, which is often a ReLU's result and serves the
# ReLU's backward as well. Else it keeps a mask of it, which Inductor writes in 8 ns an element on the CPU (torch 2.13):
# longer than both sums of a layer take.
_backward_op = _operators.register(
    "own_sum_backward",
    f"({_arrays.SCHEMA}, Tensor grad, Tensor x, Tensor eps) -> Tensor",
    lambda transposed, grad, _x, eps: _sum(transposed, grad, eps),
    _fake,
    check=_check.reads("own_sum_backward", ("grad", "cols"), ("x", "cols")),
    devices=("cpu",),
    structure=Structure,
    backward=lambda ctx, grad: _double_backward(ctx, grad),
    setup_context=lambda ctx, inputs, _: _arrays.save(ctx, inputs[0], inputs[1], inputs[3]),
)


def _double_backward(ctx, grad):
    transposed, (first, eps) = _arrays.saved(ctx)
    of_grad, _, of_eps = ctx.wanted
    own = own_sum_op(transposed.transposed(), grad, eps) if of_grad else None
    return own, None, (grad * first).sum().view(eps.shape) if of_eps else None


# out[r] = sum of x over the sources of r + (1 + eps) * x[r], of as many rows as columns; eps: one number.
own_sum_op = _operators.register(
    "own_sum",
    f"({_arrays.SCHEMA}, Tensor x, Tensor eps) -> Tensor",
    _sum,
    _fake,
    check=_check.reads("own_sum", ("x", "cols")),
    devices=("cpu",),
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
