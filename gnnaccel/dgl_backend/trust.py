"""Whether a user-defined function of edges or nodes may be handed lazy features: what it reaches, wherever it stands.

A function of DGL's is any callable: a lambda, a closure over a model, a method of a module, a partial. So the walk of
gnnaccel.lazy.trust follows objects too: the attributes that the code names, and the forward() of modules it holds.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from gnnaccel import touch
from gnnaccel.dgl_backend.touch import DEGREE_SCALES
from gnnaccel.lazy.trust import DATA, Walk


class _Walk(Walk):
    """Follows objects that hold functions as well.

    owners : objects of whose attributes those are followed that some code names.
    """

    harmless = frozenset(("data",))  # edges.data, nodes.data: of a lazy feature it is that of its rows

    def __init__(self) -> None:
        super().__init__(object)
        self.owners: list[Any] = []
        self._done: set[tuple[int, str]] = set()

    def _parts(self, name: str, value) -> list[tuple[str, Any]] | str:
        if isinstance(value, types.MethodType):
            self.owners.append(value.__self__)
            return [(name, value.__func__)]
        if isinstance(value, types.FunctionType) and value in DEGREE_SCALES:
            return []
        return super()._parts(name, value)

    def _of_module(self, name: str, value: torch.nn.Module) -> list[tuple[str, Any]] | str:
        kind = type(value).__name__
        if touch.is_hooked(value):
            return f"{kind} has hooks, or a forward() of its own"
        if isinstance(value, torch.jit.ScriptModule) or touch.is_compiled(value):
            return f"{kind} is compiled"
        if type(value).__module__.startswith("torch.nn."):
            if getattr(value, "inplace", False):
                return f"{kind} writes in place"
            return [(name, part) for part in value.children()]
        self.owners.append(value)
        # What a closure calls self is read from, not called: its forward() is what calls this function.
        return [] if name == "self" else [(name, type(value).forward)]

    def named(self) -> list[tuple[str, Any]]:
        """(name, value) of attributes of owners that some code names, each once."""
        found = []
        for owner in self.owners:
            held = vars(owner) | vars(owner).get("_modules", {}) if hasattr(owner, "__dict__") else {}
            for name in self.names:
                if (id(owner), name) in self._done:
                    continue
                self._done.add((id(owner), name))
                if name in held:
                    found.append((name, held[name]))
                    continue
                parents = [p for p in type(owner).__mro__ if not p.__module__.startswith(("torch.nn.", "builtins"))]
                found += [(name, vars(parent)[name]) for parent in parents if name in vars(parent)]
        return [(name, value) for name, value in found if not isinstance(value, DATA)]


def distrust(function) -> str | None:
    """Why a callable cannot be looked through; None if it can. Asked at each call: what it holds may be replaced."""
    walk, name, root = _Walk(), getattr(function, "__name__", type(function).__name__), function
    if isinstance(function, torch.nn.Module):
        parts = walk._of_module("self", function)
        if isinstance(parts, str):
            return parts
        root = types.MethodType(type(function).forward, function)
    elif not isinstance(function, (types.FunctionType, types.MethodType, functools.partial)):
        call = vars(type(function)).get("__call__")
        if not isinstance(call, types.FunctionType):
            return f"{name} cannot be looked through"
        root = types.MethodType(call, function)
    waiting = [(name, root)]
    while waiting:
        for name, value in waiting:
            if (reason := walk.follow(name, [value])) is not None:
                return reason
        waiting = walk.named()
    return None
