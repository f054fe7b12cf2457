"""Whether code may be handed lazy features: only where torch sees all that is done to them.

A custom autograd function or a compiled module would take a lazy tensor for an ordinary one. So the code must use
torch, the frameworks and plain Python alone. And it must not write in place, by whichever spelling (in_place.py): an
expression holds the tensors that it will be computed from, and a slice or another view of a lazy feature shares no
memory with it. What is not understood here is not trusted.
"""

from __future__ import annotations

import builtins
import functools
import types
from typing import Any

import torch
from torch import Tensor

from gnnaccel import in_place
from gnnaccel.lower import bounds

_PACKAGES = ("torch", "torch_geometric", "math", "operator", "_operator", "typing", "functools", "builtins")
# Names and attributes of code that looks at tensors themselves: transforms, compilers, their own autograd; at their
# memory; and that reaches what it does not name.
_WORDS = {"autograd", "vmap", "func", "jit", "compile", "checkpoint", "_dynamo", "register_hook", "type", "__class__"}
_WORDS |= {"data", "numpy", "data_ptr", "untyped_storage", "storage", "from_numpy", "ops", "_C", "as_strided"}
_WORDS |= {"getattr", "setattr", "delattr", "eval", "exec", "vars", "globals", "locals", "methodcaller", "attrgetter"}
_PLAIN_DUNDERS = {"__name__", "__len__", "__doc__", "__version__"}
_OPAQUE = ("torch.autograd", "torch.jit", "torch._dynamo", "torch.utils.cpp_extension", "torch.func")
DATA = (type(None), bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, slice, type(Ellipsis))


class Walk:
    """Follows values to the functions they are, and these to what they name.

    plain : a class, or several; the functions that code finds by their names in them are followed too.
    codes : of the functions that were followed.
    names : of attributes that they read.
    """

    harmless: frozenset[str] = frozenset()  # words that what the code is handed gives another meaning
    minds_writes = True  # False: somebody else sees what the code writes into

    def __init__(self, *plain: Any, codes: tuple[types.CodeType, ...] = ()):
        parents = dict.fromkeys([parent for kind in plain for parent in kind.__mro__])
        self._parents = [parent for parent in parents if parent not in (torch.nn.Module, object)]
        self.codes = list(codes)
        self.names: set[str] = set()
        self.reads: list[tuple[Any, str, Any]] = []  # (namespace, name, value) of what functions found in them
        self._seen: set[int] = set()
        self._aliases: list[tuple[str, int]] = []  # name, arguments it may be given at most

    def follow(self, name: str, values: list) -> str | None:
        """Why the code that `values`, attributes `name` of something, lead to cannot be trusted; None if it can."""
        waiting: list[tuple[str, Any]] = [(in_place.Attribute(name), value) for value in values]
        while waiting:
            name, value = waiting.pop()
            if id(value) in self._seen or isinstance(value, DATA):
                continue
            self._seen.add(id(value))
            parts = self._parts(name, value)
            if isinstance(parts, str):
                return parts
            waiting += parts
        return in_place.of_calls(self.codes, self._aliases) if self.minds_writes else None

    def _parts(self, name: str, value) -> list[tuple[str, Any]] | str:
        """(name, value) of all that `value` leads to, or why it cannot be trusted."""
        if isinstance(value, (tuple, list, set, frozenset, dict)):
            held = [*value, *value.values()] if isinstance(value, dict) else list(value)
            return (
                [(name, item) for item in held]
                if len(held) <= bounds.TRUSTED_ITEMS
                else f"it reads {name!r}, which is long"
            )
        if isinstance(value, types.MethodType):
            return [(name, value.__func__), (name, value.__self__)]
        if isinstance(value, (staticmethod, classmethod)):
            return [(name, value.__func__)]
        if isinstance(value, property):
            return [(name, value.fget)]
        if isinstance(value, functools.partial):
            return [(name, value.func), (name, value.args), (name, value.keywords)]
        if isinstance(value, torch.nn.Module):
            return self._of_module(name, value)
        if is_known(value):
            return self._of_known(name, value)
        if not isinstance(value, types.FunctionType):
            return f"it calls {getattr(value, '__name__', type(value).__name__)!r}, which cannot be looked through"
        return self._of_function(value)

    def _of_module(self, name: str, value: torch.nn.Module) -> list[tuple[str, Any]] | str:
        return f"it reads {name!r}, a module that is no part of it"

    def _of_known(self, name: str, value) -> list[tuple[str, Any]] | str:
        own = getattr(value, "__name__", name)
        if isinstance(value, types.ModuleType):
            return []
        if (reason := _of_name(own, self.minds_writes)) is not None:
            return f"it calls {own}(), which {reason}"
        if (most := in_place.most_arguments(value)) is not None:
            self._aliases.append((name, most))
        # What a function of torch wraps, as torch.no_grad does, is the user's.
        cells = getattr(value, "__closure__", None) or ()
        return [(own, cell.cell_contents) for cell in cells if callable(_content(cell))]

    def _of_function(self, function: types.FunctionType) -> list[tuple[str, Any]] | str:
        code = function.__code__
        closure = dict(zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True))
        closure.pop("__class__", None)  # of super(), whose methods are found by their names below
        if (function.__globals__.get("__name__") or "").split(".")[0] in _PACKAGES:  # a wrapper made by torch
            return [item for item in closure.items() if callable(item[1])]
        read, attributes = in_place.names_of(code)
        reason = _of_code(code, (read | attributes) - self.harmless, self.minds_writes)
        if reason is not None:
            return f"{function.__name__}() {reason}"
        self.codes.append(code)
        self.names |= attributes
        found = [*closure.items(), *(function.__kwdefaults__ or {}).items()]
        found += [(function.__name__, value) for value in function.__defaults__ or ()]
        named = [(name, function.__globals__.get(name, getattr(builtins, name, None))) for name in read]
        self.reads += [(function.__globals__, *each) for each in named if each[0] in function.__globals__]
        for name, value in named:
            if isinstance(value, types.ModuleType) and is_of(value.__name__, function.__globals__.get("__name__")):
                inside = [(each, vars(value)[each]) for each in attributes if each in vars(value)]
                self.reads += [(vars(value), *each) for each in inside]
                found += inside
            else:
                found.append((name, value))
        of_class = [(name, kind) for name in attributes for kind in self._parents if name in vars(kind)]
        self.reads += [(vars(kind), name, vars(kind)[name]) for name, kind in of_class]
        found += [(in_place.Attribute(name), vars(kind)[name]) for name, kind in of_class]
        return found


def _content(cell) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def is_of(name: str, other: str | None) -> bool:
    """True for the names of two modules of one package."""
    return name.partition(".")[0] == (other or "").partition(".")[0]


def is_known(value) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", None))
    if isinstance(value, types.MethodDescriptorType | types.GetSetDescriptorType | types.WrapperDescriptorType):
        name = value.__objclass__.__module__
    if name.startswith(_OPAQUE) and name != "torch.autograd.grad_mode":
        return False
    return name.split(".")[0] in _PACKAGES


def _of_name(name: str, minds_writes: bool) -> str | None:
    """Why code that names this cannot be trusted."""
    if name in _WORDS or (name.startswith("__") and name.endswith("__") and name not in _PLAIN_DUNDERS):
        return "looks at what a tensor is made of, or reaches what it does not name"
    return "writes in place" if minds_writes and in_place.is_name(name) else None


def _of_code(code: types.CodeType, names: frozenset[str], minds_writes: bool) -> str | None:
    """Why the code itself, without what it calls, cannot be trusted."""
    for name in sorted(names):
        if minds_writes and in_place.is_name(name):
            return f"calls {name}(), which writes in place"
        if _of_name(name, minds_writes) is not None:
            return f"uses {name!r}"
    return in_place.of_code(code) if minds_writes else in_place.unread()
