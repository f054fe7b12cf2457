"""Along the argmax of a maximum or minimum: their values, and the gradients that go to them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.ops._features import operand, reduce_to


def gather_arg(x: Tensor, arg: Tensor, full: tuple[int, ...], fill: bool = True) -> Tensor:
    """x[arg[r, d], d] with x's features broadcast to `full`; where arg is -1 0, without `fill` anything."""
    x = x.reshape(x.shape[0], *(1,) * (len(full) - x.dim() + 1), *x.shape[1:]).expand(x.shape[0], *full)
    if x.shape[0] == 0:
        return x.new_zeros(arg.shape)
    out = x.gather(0, arg.long().clamp(min=0))
    return out.masked_fill(arg < 0, 0) if fill else out


def _scatter_arg_impl(arg, values, num_targets, shape, rows_disjoint):
    full = tuple(values.shape[1:])
    out = values.new_zeros(num_targets, *shape)
    if values.numel() == 0 or out.numel() == 0:
        return out
    if values.dtype in (torch.bfloat16, torch.float16):  # one target may win often: add up in fp32
        return _scatter_arg_impl(arg, values.float(), num_targets, shape, rows_disjoint).to(values.dtype)
    if out.is_cuda and not rows_disjoint and torch.are_deterministic_algorithms_enabled():
        return _scatter_sorted(arg, values, out)
    values, arg = values.contiguous(), arg.contiguous()
    # A target narrower than the values: its rule, or (rare) full width and a sum afterwards.
    _, (_, length, div) = operand(out, full)
    target = out
    if length != math.prod(shape):
        target = values.new_zeros(num_targets, *full)
    sizes = (values.shape[0], math.prod(full), length, div, rows_disjoint)
    codes = (lib.INDEX_TYPES[arg.dtype], lib.DTYPES[values.dtype])
    lib.launch("scatter_arg", out.device, arg.data_ptr(), values.data_ptr(), target.data_ptr(), *sizes, *codes)
    return out if target is out else reduce_to(target, shape)


def _scatter_sorted(arg, values, out):
    """out[arg[r, d], d] += values[r, d] through torch's sort: the CUDA kernel's atomics would add in any order."""
    won = arg >= 0
    feature = torch.arange(out[0].numel(), device=out.device)
    where = arg.clamp(min=0).long().reshape(arg.shape[0], -1) * feature.numel() + feature
    values = torch.where(won, values, 0).reshape(where.shape)
    out.view(-1).index_put_((where,), values, accumulate=True)
    return out


def _scatter_arg_fake(arg, values, num_targets, shape, rows_disjoint):
    return values.new_empty(num_targets, *shape)


def _scatter_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.full = tuple(inputs[1].shape[1:])


def _scatter_backward(ctx, grad):
    (arg,) = ctx.saved_tensors
    return None, gather_arg(grad, arg, ctx.full), None, None, None


scatter_arg_op = _operators.register(
    "scatter_arg",
    "(Tensor arg, Tensor values, SymInt num_targets, SymInt[] shape, bool rows_disjoint) -> Tensor",
    _scatter_arg_impl,
    _scatter_arg_fake,
    backward=_scatter_backward,
    setup_context=_scatter_setup,
)
