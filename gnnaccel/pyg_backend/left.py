"""Layers whose last call was left to PyG for its few messages: one like it goes there at once, past what finds that out
and past our methods, whose share of so short a call can be felt."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gnnaccel import touch
from gnnaccel.lower import bounds, choose
from gnnaccel.pyg_backend.call import current, plainly
from gnnaccel.pyg_backend.graph import nonzeros_of
from gnnaccel.pyg_backend.propagate import FEW
from gnnaccel.pyg_backend.touch import nn as pyg_nn

# Of layers with a forward() of ours, those that note it where something else of ours runs beside PyG's propagate().
ALIKE = frozenset(
    layer.forward
    for layer in (
        *(pyg_nn.FiLMConv, pyg_nn.GENConv, pyg_nn.GINEConv, pyg_nn.HEATConv, pyg_nn.LEConv, pyg_nn.ResGatedGraphConv),
        *(pyg_nn.RGATConv, pyg_nn.SAGEConv, pyg_nn.TransformerConv),
    )
)
_VALUES = (type(None), bool, int, float, str)
_likes: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()  # layer -> what its last call was given


def at_once(plain: Any, forward: Callable | None) -> Callable | None:
    """`forward`, ours of accelerated layers of class `plain`, behind a look at how the last call of a layer went."""
    if forward is None:
        return forward
    original = plain.forward

    @functools.wraps(forward)
    def method(self, *args, **kwargs):
        if torch.compiler.is_compiling() or plain.forward is not original:
            return forward(self, *args, **kwargs)
        like = _likes.get(self)
        # A trace warns where shapes are compared. Whatever else stands against our code, this is PyG's.
        if like is not None and not touch.tracing() and like == _like(args, kwargs):
            return plainly(original, self, FEW, *args, **kwargs)
        outer, current.outcome = current.outcome, [self, False, False]
        try:
            out = forward(self, *args, **kwargs)
        finally:
            (_, left, others), current.outcome = current.outcome, outer
        if left and not others:
            like = _like(args, kwargs)
            if like is not None:
                _likes[self] = like
        elif like is not None:
            _likes.pop(self, None)
        return out

    return method


def _like(args: tuple, kwargs: dict) -> tuple | None:
    """What decides whether messages are few: shapes, dtypes, gradients and torch's switches; None for what has none."""
    found: list = [
        choose.is_lasting(),
        torch.are_deterministic_algorithms_enabled(),
        bounds.FEW_MESSAGES,
        torch.is_grad_enabled(),
    ]
    for value in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            found += (value.dtype, value.device, value.shape, value.requires_grad)
            if value.layout is not torch.strided:  # whose shape says nothing of its edges
                found += (value.layout, touch.nnz(value), nonzeros_of(value) is None)
        elif isinstance(value, tuple):
            inner = _like(value, {})
            if inner is None:
                return None
            found.append(inner)
        elif isinstance(value, _VALUES):
            found.append(value)
        else:
            return None
    return tuple(found)
