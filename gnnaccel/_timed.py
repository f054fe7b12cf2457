"""Derivatives that are timed under --profile, in the row of the call that they belong to."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gnnaccel import report, touch

_functions: list[Any] = []  # torch.autograd.Functions whose derivatives are timed under --profile


def timed(function: Any) -> Any:
    """Have the derivatives of a torch.autograd.Function timed while `report.timing` is on: it is wrapped then, and
    costs nothing otherwise."""
    _functions.append(function)
    if report.timing:
        _wrap(function)
    return function


def _wrap(function: Any) -> None:
    # Where setup_context() is defined, it gets the context that forward() gets else.
    name = "setup_context" if "setup_context" in vars(function) else "forward"
    begin, backward = getattr(function, name), function.backward

    @functools.wraps(begin)
    def noted(ctx, *args):
        if not torch.compiler.is_compiling():
            ctx.derivative = report.Derivative()
        return begin(ctx, *args)

    @functools.wraps(backward)
    def measured(ctx, *grads):
        derivative = None if torch.compiler.is_compiling() else getattr(ctx, "derivative", None)
        if derivative is None or touch.in_dispatch_mode():  # nothing runs: it is traced
            return backward(ctx, *grads)
        with derivative:
            return backward(ctx, *grads)

    function.unwrapped = {name: begin, "backward": backward}
    setattr(function, name, staticmethod(noted))
    function.backward = staticmethod(measured)


def _follow(timing: bool) -> None:
    for function in _functions:
        wrapped = "unwrapped" in vars(function)
        if timing and not wrapped:
            _wrap(function)
        elif wrapped and not timing:
            for name, original in function.unwrapped.items():
                setattr(function, name, staticmethod(original))
            del function.unwrapped


report.on_timing.append(_follow)
