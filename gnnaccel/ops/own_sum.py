"""A sum over neighbours and a node's own features, as one op (what a compiled GIN layer runs on the CPU), and as one
node of autograd (what it runs else)."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check, linear_sums
from gnnaccel.ops._arrays import Structure
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
        call, sums = linear_sums.sums_of(graph, x, "sum", both)
        of_x, of_eps, *_ = ctx.needs_input_grad
        factor = _factor(x, eps)
        if of_x or of_eps:
            # eps is for a second derivative alone: it may be written into before a first one.
            ctx.call, ctx.eps, ctx.versions = call, eps, versions((eps,))
            ctx.save_for_backward(x if of_eps else None, factor)
        return _added(sums, x, factor, not isinstance(call, linear_sums.Apart))

    @staticmethod
    def backward(ctx, grad):
        (x, factor), eps = ctx.saved_tensors, ctx.eps
        of_x, of_eps, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() and versions((eps,)) != ctx.versions:
            raise RuntimeError(WRITTEN)
        again, grad = torch.is_grad_enabled(), grad.contiguous()
        grad_x = None
        if of_x:
            here = not again and not isinstance(ctx.call, linear_sums.Apart)
            factor = _factor(grad, eps) if again else factor  # which depends on eps
            grad_x = _added(ctx.call.gradient(grad), grad, factor, here)
        grad_eps = (grad * x).sum(dtype=eps.dtype).view(eps.shape) if of_eps else None
        return grad_x, grad_eps, None, None


def _factor(x: Tensor, eps: Tensor) -> Tensor:
    """1 + eps. Of no dimensions it leaves the dtype of x alone."""
    return (eps if eps.dtype is x.dtype else eps.view(())) + 1


def _added(sums: Tensor, x: Tensor, factor: Tensor, here: bool) -> Tensor:
    """sums + factor * x; `here`: in their place."""
    if here:
        return sums.addcmul_(x, factor)  # which autocast leaves alone too
    return sums + factor * x


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_record = super(torch.autograd.Function, _OwnSum).apply  # type: ignore[misc]


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
