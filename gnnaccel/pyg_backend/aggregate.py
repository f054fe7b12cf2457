"""Aggregation of messages, lazy or not, by PyG's own aggregation modules with our reductions inside.

A module is run through a view: an object of a subclass that shares the module's state and whose reduce() is ours.
So PyG's formulas for variance, standard deviation, powers, softmax, degree scalers and their combinations stay PyG's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gnnaccel.lazy.tensor import Lazy
from gnnaccel.modules import is_watched
from gnnaccel.pyg_backend.call import current
from gnnaccel.pyg_backend.helpers import bind, uses_helpers, wide
from gnnaccel.pyg_backend.touch import nn as aggr
from gnnaccel.touch import submodules


def aggregate(module: aggr.Aggregation, messages: Tensor, index=None, ptr=None, dim_size=None, dim=-2) -> Tensor:
    """What ``module(messages, index, ptr, dim_size, dim)`` returns."""
    if not _may_view(module):
        if isinstance(messages, Lazy):
            messages = messages.rows(f"{type(module).__name__} needs every message", always=True)
        return module(messages, wide(index), ptr=wide(ptr), dim_size=dim_size, dim=dim)
    return _view(module)(messages, index, ptr=ptr, dim_size=dim_size, dim=dim)


_KNOWN = (
    aggr.SumAggregation,
    aggr.MeanAggregation,
    aggr.MaxAggregation,
    aggr.MinAggregation,
    aggr.VarAggregation,
    aggr.StdAggregation,
    aggr.SoftmaxAggregation,
    aggr.PowerMeanAggregation,
    aggr.MultiAggregation,
    aggr.DegreeScalerAggregation,
)


def _may_view(module: aggr.Aggregation) -> bool:
    """True for modules of PyG that reduce by sums, means and extrema, and that nobody watches."""
    if type(module) not in _KNOWN:
        return False
    if any(is_watched(part) for part in module.modules()):
        return False
    return "reduce" not in vars(module)


def _view(module: aggr.Aggregation) -> aggr.Aggregation:
    cls: Any = type(module)
    view: Any = object.__new__(_view_class(cls))
    object.__setattr__(view, "__dict__", module.__dict__)
    return view


@functools.cache
def _view_class(plain: Any) -> type:
    members: dict[str, Any] = {"reduce": _reduce, "__module__": plain.__module__}
    if uses_helpers(plain.forward):
        members["forward"] = bind(plain.forward)
    if plain.forward is _SOFTMAX:
        members["forward"] = _in_two_walks(members.get("forward", plain.forward))
    if issubclass(plain, aggr.MultiAggregation):
        # The fused aggregation would share sums among the modules by scatter; they are one SpMM each.
        members["fused_aggr"] = None
        members["forward"] = _in_one_walk(members.get("forward", plain.forward))
        members["aggrs"] = property(lambda self: [_part(part) for part in submodules(self)["aggrs"]])
    if issubclass(plain, aggr.DegreeScalerAggregation):
        members["aggr"] = property(lambda self: _part(submodules(self)["aggr"]))
    if issubclass(plain, aggr.StdAggregation):
        members["var_aggr"] = property(lambda self: _part(submodules(self)["var_aggr"]))
    return type(plain.__name__, (plain,), members)


# What each module asks of the messages that it is given.
_ASKS = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
    aggr.VarAggregation: "mean",
    aggr.StdAggregation: "mean",
}


def _in_one_walk(forward):
    """forward() of several modules, whose reductions of the same messages are computed at once."""

    @functools.wraps(forward)
    def several(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        fused = submodules(self).get("fused_aggr")
        if fused is not None and index is not None and x.dim() == 2:
            fused.assert_two_dimensional_input(x, dim)
        if isinstance(x, Lazy) and not x.together:
            asked = [_ASKS[type(part)] for part in submodules(self)["aggrs"] if type(part) in _ASKS and _may_view(part)]
            x.together = tuple(dict.fromkeys(asked))
        return forward(self, x, index, ptr, dim_size, dim)

    return several


_SOFTMAX = aggr.SoftmaxAggregation.forward


def _in_two_walks(forward):
    """SoftmaxAggregation's forward(), which makes the weights' sum and the weighted sum at once where messages are not
    stored."""

    @functools.wraps(forward)
    def whole(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        call, t = current.call, self.t
        graded = self.learn or not self.semi_grad or not torch.is_grad_enabled()
        if call is not None and isinstance(x, Lazy) and x.dim() == 2 and dim in (0, -2) and graded:
            scale = t.view(-1, self.channels) if self.channels != 1 else t
            scores = x if isinstance(t, (int, float)) and t == 1 else x * scale
            out = call.softmax_sum(scores, x, index, dim_size)
            if out is not None:
                return out
        return forward(self, x, index, ptr, dim_size, dim)

    return whole


def _part(part: aggr.Aggregation) -> Any:
    """A module inside another one, as a callable."""
    return _view(part) if _may_view(part) else functools.partial(aggregate, part)


def _reduce(self, x, index=None, ptr=None, dim_size=None, dim=-2, reduce="sum"):
    call = current.call
    out = None if call is None else call.reduce(x, index, dim_size, reduce, dim)
    return aggr.Aggregation.reduce(self, x, wide(index), wide(ptr), dim_size, dim, reduce) if out is None else out
