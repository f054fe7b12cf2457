"""A sum over neighbours and a node's own features, as one op: what a compiled GIN layer runs on the CPU."""

from __future__ import annotations

from torch import Tensor

from gnnaccel import _operators
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops.spmm import spmm_op


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
    devices=("cpu",),
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
