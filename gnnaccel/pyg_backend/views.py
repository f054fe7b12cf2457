"""Copies of PyG's functions that see some of their globals, and attributes of these, replaced: PyG's own code stays in
charge of all the rest."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any


class View:
    """A module or another object with some attributes replaced: ``View(torch, ops=View(torch.ops, pyg=ours))``."""

    def __init__(self, seen: Any, **replaced: Any):
        self.__dict__.update(replaced, _seen=seen)

    def __getattr__(self, name: str):
        return getattr(self._seen, name)


class _Globals(dict):
    """The globals of a function with some replaced, looked up at each use: later changes of the others count."""

    def __init__(self, namespace: dict, replaced: Mapping[str, Any]):
        # The interpreter reads these two straight from the dict when the function is made.
        super().__init__({name: namespace[name] for name in ("__name__", "__builtins__") if name in namespace})
        self._namespace = namespace
        self._replaced = replaced

    def __getitem__(self, name: str):
        return self._replaced[name] if name in self._replaced else self._namespace[name]


def rebind(function: Callable, **replaced: Any) -> Callable:
    """A copy of a Python function, method of a class as it stands there, with some of its globals replaced."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__,
        _Globals(function.__globals__, replaced),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
