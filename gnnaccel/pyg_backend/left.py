"""Layers whose last call was left to PyG for its few messages: one like it goes there at once, past what finds that out
and past our methods, whose share of so short a call can be felt."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import is_compiling
from torch_geometric import nn as pyg_nn

from gnnaccel import schedule
from gnnaccel.lazy import blocks
from gnnaccel.pyg_backend.call import current, plainly
from gnnaccel.pyg_backend.propagate import FEW, obstacle

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
        if is_compiling() or plain.forward is not original:
            return forward(self, *args, **kwargs)
        like = _likes.get(self)
        # First of all, as a trace warns where shapes are compared, and its reason is another one.
        if like is not None and obstacle(self) is None and like == _like(args, kwargs):
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
    found: list = [schedule.is_lasting(), torch.are_deterministic_algorithms_enabled(), blocks.FEW]
    found.append(torch.is_grad_enabled())
    for value in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        if isinstance(value, tuple):
            found.append(len(value))
            given: tuple = value
        else:
            given = (value,)
        for each in given:
            if type(each) is Tensor or type(each) is torch.nn.Parameter:
                found += (each.dtype, each.device, each.shape, each.requires_grad)
            elif isinstance(each, _VALUES):
                found.append(each)
            else:
                return None
    return tuple(found)
