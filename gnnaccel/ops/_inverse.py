"""Division by way of inverses, which costs one division for all features of an edge."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _operators


def inverse(y: Tensor) -> tuple[Tensor, Tensor | None]:
    """(inverses [like y], scale [] or None for 1): x / y is (x * inverses) * scale, for every y that is not 0.

    Parameters
    ----------
    y : Tensor
        float32, float64 or bfloat16. The scale, a power of two, is not 1 where an inverse would overflow: where there
        are subnormal numbers. Then the large ones, beyond 1e30 in float32, lose digits.
    """
    info = torch.finfo(y.dtype)
    size = y.detach().abs()
    if not y.numel() or (_operators.plain((y,), (0,), ("cpu",)) and size.amin() >= info.tiny):  # nobody waits for it
        return _reciprocal(y), None
    least = torch.where(size == 0, 1.0, size).amin()
    scale = torch.where(least < info.tiny, 2 / info.eps, 1.0).to(y.dtype)
    return _reciprocal(y * scale), scale


def _context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return (torch.where(grad == 0, grad, -(grad / y) / y),)  # 0 / 0 is none of one that won nowhere


# 1 / y, of which torch takes the gradient by the square of the result, which overflows where the gradient need not.
_reciprocal = _operators.register(
    "reciprocal",
    "(Tensor y) -> Tensor",
    lambda y: y.reciprocal(),
    lambda y: torch.empty_like(y),
    backward=_backward,
    setup_context=_context,
)
