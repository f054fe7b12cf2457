"""What HGT makes of the attended: the end of gnnaccel/ops/hgt_layers.py, as one node of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators, touch
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays
from gnnaccel.ops._features import beside_ones, with_bias
from gnnaccel.ops.segment_matmul import matmul_op, weights_op

_matmul, _weights = matmul_op.impl, weights_op.impl  # type: ignore[attr-defined]


def belong_beside(rows: Tensor, types: int) -> bool:
    """True for the rows of so many node types whose gradients are to be brought together."""
    return rows.numel() * rows.element_size() <= bounds.HGT_TOGETHER_BYTES.get(rows.device.type, -1) * types


class _Ends(_operators.Function):
    """Gradients of a target that nothing was made of are None, as if each had a node of its own."""

    @staticmethod
    def forward(ctx, plan, skipping, attended, *given):
        count, inputs = len(skipping), attended.shape[1]
        x, weights, biases = given[:count], given[count : 2 * count], given[2 * count : 3 * count]
        gates = torch.cat(given[3 * count :]).sigmoid() if any(skipping) else None
        active = beside_ones(attended.shape[0], inputs, attended)
        if attended.is_cuda:
            torch.ops.aten.gelu.out(attended, out=active[:, :inputs])
        else:  # where oneDNN writes float32 as if these rows had no others beside them
            active[:, :inputs].copy_(F.gelu(attended))
        maps = with_bias(torch.cat(weights), torch.cat(biases)).view(count, weights[0].shape[0], -1)
        gate = iter(() if gates is None else gates.unbind())
        if count == len(plan.rows):
            outs = [*torch.unsafe_split_with_sizes(_matmul(active, plan.ptr, maps.transpose(1, 2)), plan.rows)]
        else:
            parts = active.split_with_sizes(plan.rows)[:count]
            outs = [part.mm(map_) for part, map_ in zip(parts, maps.transpose(1, 2).unbind(), strict=True)]
        outs = [
            torch.lerp(own, out, next(gate)) if skips else out
            for out, own, skips in zip(outs, x, skipping, strict=True)
        ]
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            ctx.plan, ctx.skipping = plan, skipping
            ctx.save_for_backward(attended, *given, active, maps, gates)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        plan, skipping, needs, count = ctx.plan, ctx.skipping, ctx.needs_input_grad[2:], len(ctx.skipping)
        saved = ctx.saved_tensors  # which a checkpoint gives once
        (attended, *given), (active, maps, gates) = saved[: len(needs)], saved[len(needs) :]
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return None, None, *_second_ends(plan, skipping, (attended, *given), needs, grads)
        reached = {k: grad.contiguous() for k, grad in enumerate(grads) if grad is not None}
        if not reached:
            return (None,) * (2 + len(needs))
        found: list[Any] = [None] * len(given)
        inputs = attended.shape[1]
        # Gates are factors of the maps, and of their gradients: no pass over all rows is made for them.
        factors = None if gates is None else _factors(skipping, gates)
        scaled = (maps if factors is None else maps * factors)[:, :, :inputs].contiguous()
        if len(reached) == len(plan.rows) and belong_beside(active, count):
            grad = torch.cat([*reached.values()])
            of_active, of_maps = _matmul(grad, plan.ptr, scaled), _weights(grad, plan.ptr, active, 0)
        else:
            of_active, of_maps = _one_by_one(plan, reached, active, scaled)
        if gates is not None:
            _of_gates(found, skipping, reached, given[:count], gates, (of_maps * maps).sum((1, 2)))
            of_maps = of_maps.mul_(factors)
        of_weights, of_biases = (
            of_maps[:, :, :inputs].contiguous().unbind(),
            of_maps[:, :, inputs].contiguous().unbind(),
        )
        for k in reached:
            found[count + k], found[2 * count + k] = of_weights[k], of_biases[k]
        found = [torch.ops.aten.gelu_backward(of_active, attended) if needs[0] else None, *found]
        return None, None, *[grad if need else None for grad, need in zip(found, needs, strict=True)]


def _one_by_one(plan: Any, reached: dict[int, Tensor], active: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of rows and of maps, the latter of targets that are reached alone."""
    count, outputs, inputs = scaled.shape
    make = active.new_empty if len(reached) == len(plan.rows) else active.new_zeros
    of_active, of_maps = make((active.shape[0], inputs)), active.new_empty(count, outputs, active.shape[1])
    each = active.split_with_sizes(plan.rows), of_active.split_with_sizes(plan.rows), of_maps.unbind()
    for k, grad in reached.items():
        part, of_part, of_map = (t[k] for t in each)
        torch.mm(grad, scaled[k], out=of_part)
        torch.mm(grad.t(), part, out=of_map)
    return of_active, of_maps


def _factors(skipping: tuple[bool, ...], gates: Tensor) -> Tensor:
    """The gate of each target, or one, [targets, 1, 1]."""
    if not all(skipping):
        rest = iter(gates.split(1))
        gates = torch.cat([next(rest) if skips else gates.new_ones(1) for skips in skipping])
    return gates.view(-1, 1, 1)


def _of_gates(
    found: list,
    skipping: tuple[bool, ...],
    reached: dict[int, Tensor],
    own: Sequence[Tensor],
    gates: Tensor,
    dots: Tensor,
) -> None:
    """Put into `found` the gradients of own features and of what gates are the sigmoids of; `dots`: the dot products of
    gradients and mapped rows, by target."""
    at = {k: sum(skipping[:k]) for k in reached if skipping[k]}  # places among those that skip
    if not at:
        return
    rest, slopes = (1 - gates).unbind(), (gates * (1 - gates)).unbind()
    of_own = touch.foreach_mul([reached[k] for k in at], [rest[place] for place in at.values()])
    sums = [_dot(reached[k], own[k]) for k in at]
    some = [dots[k] for k in at]
    of_skips = (torch.stack(some) - torch.stack(sums)) * torch.stack([slopes[place] for place in at.values()])
    for k, grad, of_skip in zip(at, of_own, of_skips.split(1), strict=True):
        found[k], found[3 * len(skipping) + at[k]] = grad, of_skip


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """The sum of all products; of a GPU without storing these."""
    if x.is_cuda and x.numel() <= bounds.INT32_MAX and y.is_contiguous():
        return torch.dot(x.view(-1), y.view(-1))
    return (x * y).sum()


def composed_ends(plan: Any, skipping: tuple[bool, ...], attended: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """`_Ends`, with a node of autograd for each step."""
    count = len(skipping)
    outs, skips = [], iter(given[3 * count :])
    for k, (part, flag) in enumerate(zip(attended.split(plan.rows), skipping, strict=False)):
        out = F.linear(F.gelu(part), given[count + k], given[2 * count + k])
        outs.append(torch.lerp(given[k], out, next(skips).sigmoid()) if flag else out)
    return tuple(outs)


def _second_ends(plan: Any, skipping: tuple[bool, ...], given: tuple, needs: Sequence[bool], grads: Sequence) -> tuple:
    """Gradients with derivatives of their own; None for parameters of targets that nothing was made of."""
    reaches = [grad is not None for grad in grads]
    skips = [each for each, flag in zip(reaches, skipping, strict=True) if flag]
    needs = [need and each for need, each in zip(needs, [True, *reaches * 3, *skips], strict=True)]

    def composed(*given):
        outs = composed_ends(plan, skipping, *given)
        return tuple([out for out, grad in zip(outs, grads, strict=True) if grad is not None])

    return _arrays.gradients(composed, given, needs, tuple([grad for grad in grads if grad is not None]))


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: who calls it has found none.
ends_of = super(torch.autograd.Function, _Ends).apply  # type: ignore[misc]
