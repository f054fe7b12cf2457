"""What stays a CBSR tensor, and how: rules for torch's ops on one (cbsr.py), below autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.ops import expand  # noqa: F401 (registers collect)
from gnnaccel.ops.cbsr import CBSR, RULES

aten = torch.ops.aten


def _alias(func, x):
    return CBSR(x._parts.values, x._parts.places, x.shape[1], x._parts)


def _same_shape(func, x, size, **_):
    return _alias(func, x) if tuple(size) in (tuple(x.shape), (-1, x.shape[1]), (x.shape[0], -1)) else NotImplemented


def _copied(func, x, **kwargs):
    kwargs.pop("memory_format", None)
    values, places = x._parts.values, x._parts.places
    dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device
    if not dtype.is_floating_point or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    values = touch.to_copy(values, dtype=dtype, device=device, non_blocking=kwargs.get("non_blocking", False))
    return CBSR(values, touch.to_copy(places, device=device), x.shape[1])


def _cloned(func, x, memory_format=None):
    return CBSR(x._parts.values.clone(), x._parts.places, x.shape[1])


def _of_values(func, x, *args):
    return CBSR(func(x._parts.values, *args), x._parts.places, x.shape[1])


def _scaled(func, x, factor):
    """Times or over a finite number, or times a factor per row."""
    if isinstance(factor, Tensor):
        per_row = factor.dim() == 0 or (factor.shape[-1] == 1 and factor.numel() in (1, x.shape[0]))
        if func is not aten.mul.Tensor or isinstance(factor, CBSR) or not per_row or factor.dim() > 2:
            return NotImplemented
        if factor.is_complex():
            return NotImplemented
    elif not isinstance(factor, (int, float)) or not math.isfinite(factor) or (factor == 0 and func is aten.div.Tensor):
        return NotImplemented
    values = func(x._parts.values, factor)
    return CBSR(values, x._parts.places, x.shape[1]) if values.shape == x._parts.values.shape else NotImplemented


def _added(func, x, other, alpha=1):
    """Gradients of several sums over one CBSR meet."""
    if not same_places(x, other) or not isinstance(alpha, (int, float)):
        return NotImplemented
    return CBSR(x._parts.values.add(other._parts.values, alpha=alpha), x._parts.places, x.shape[1])


def _made_alike(func, x, *args, **kwargs):
    """A tensor that takes shape, dtype and device from `x`: from one that takes no memory."""
    return func(x._parts.values.new_empty(()).expand(x.shape), *args, **kwargs)


def same_places(x, other) -> bool:
    """True if both are CBSR known to keep the same places."""
    both = isinstance(x, CBSR) and isinstance(other, CBSR) and x.is_compressed and other.is_compressed
    return both and x.shape == other.shape and x._parts.places is other._parts.places


def _collected(func, x, places):
    return x._parts.values if places is x._parts.places else NotImplemented


_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
RULES |= {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _same_shape,
    aten.expand.default: _same_shape,
    aten.clone.default: _cloned,
    **({} if touch.to_copy is None else {touch.to_copy.default: _copied}),
    aten.neg.default: _of_values,
    aten.relu.default: _of_values,
    aten.mul.Tensor: _scaled,
    aten.mul.Scalar: _scaled,
    aten.div.Tensor: _scaled,
    aten.div.Scalar: _scaled,
    aten.add.Tensor: _added,
    **{getattr(aten, name).default: _made_alike for name in (*_LIKE, *_NEW)},
}
RULES[torch.ops.gnnaccel.collect.default] = _collected
