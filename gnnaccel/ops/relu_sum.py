"""The sum of a GINE layer as one registered op, without a message per edge: what a compiled one runs on the CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.ops import _arrays, _check, messages
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops.messages.reduce import gradients_of, walk
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.program.program import Program, program_of

_MESSAGE = messages.relu(messages.u("x") + messages.e("edge"))


def _program(x: Tensor) -> tuple[Program, bool]:
    """The program, and whether it takes x before the edges' features."""
    features = tuple(x.shape[1:])
    program, leaves = program_of(((_MESSAGE, "sum"),), tuple((leaf, features) for leaf in _MESSAGE.leaves))
    return program, leaves[0][0] == "u"


def _impl(arrays: Structure, x: Tensor, edge: Tensor) -> Tensor:
    program, in_order = _program(x)
    return walk(arrays, program, [x, edge] if in_order else [edge, x], (x.dtype,))[0]


def _backward_impl(arrays: Structure, x: Tensor, edge: Tensor, grad: Tensor, of_x: bool, of_edge: bool) -> tuple:
    program, in_order = _program(x)
    operands, wanted = [x, edge], (of_x, of_edge)
    if not in_order:
        operands, wanted = operands[::-1], wanted[::-1]
    with torch.no_grad():
        found = gradients_of(arrays, program, operands, wanted, [grad], (True,))
    return tuple(x.new_empty(0) if g is None else g for g in (found if in_order else found[::-1]))


def _backward_fake(_arrays, x: Tensor, edge: Tensor, _grad: Tensor, *wanted: bool) -> tuple:
    return tuple(t.new_empty(t.shape if w else (0,)) for t, w in zip((x, edge), wanted, strict=True))


def _check_features(_arrays, x: Tensor, *others) -> None:
    for other in others:
        if isinstance(other, Tensor):
            _check.features_of("relu_sum", "edge or grad", other, x.shape[1:])


def _composed(arrays, x: Tensor, edge: Tensor) -> Tensor:
    return spmm_op(arrays, None, sddmm_op(arrays, x, edge, "add", "u", "e").relu(), "copy_rhs", "sum", 0.0)


def _setup_context(ctx, inputs, _output):
    ctx.set_materialize_grads(False)
    _arrays.save(ctx, *inputs)


def _backward(ctx, grad):
    if grad is None:
        return None, None
    arrays, inputs = _arrays.saved(ctx)
    if torch.is_grad_enabled():  # a second derivative is wanted
        return _arrays.gradients(partial(_composed, arrays), inputs, ctx.wanted, grad)
    found = _backward_op(arrays, *inputs, grad, *ctx.wanted)
    return tuple(g if w else None for g, w in zip(found, ctx.wanted, strict=True))


_backward_op = _operators.register(
    "relu_sum_backward",
    f"({_arrays.SCHEMA}, Tensor x, Tensor edge, Tensor grad, bool of_x, bool of_edge) -> (Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
    check=_check.reads("relu_sum_backward", ("x", "cols"), ("edge", "edges"), ("grad", "rows"), also=_check_features),
    devices=("cpu",),
    structure=Structure,
)
# out[r] = sum over nonzeros (r, c, e) of relu(x[c] + edge[e]), of features of one shape.
relu_sum_op = _operators.register(
    "relu_sum",
    f"({_arrays.SCHEMA}, Tensor x, Tensor edge) -> Tensor",
    _impl,
    lambda arrays, x, _edge: x.new_empty(arrays.num_rows, *x.shape[1:]),
    check=_check.reads("relu_sum", ("x", "cols"), ("edge", "edges"), also=_check_features),
    devices=("cpu",),
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
