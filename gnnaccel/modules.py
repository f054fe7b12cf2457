"""What both plug-ins ask of a torch module before they put something in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gnnaccel import touch


def is_as_made(module: torch.nn.Module, forwards: Mapping[type, Callable]) -> bool:
    """True for a module of one of these classes, not compiled, whose `forward` is still the one beside it."""
    forward = forwards.get(type(module))
    return forward is not None and type(module).forward is forward and not vars(module).get(touch.COMPILED_CALL)


def is_watched(module: torch.nn.Module) -> bool:
    """True if somebody sees or changes the calls of `module`: then it must be called, and nothing in its place."""
    return touch.is_hooked(module) or bool(touch.has_global_hooks())
