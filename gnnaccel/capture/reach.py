"""What a function can reach without being handed it: the objects that must be what they were for a replay to be right.

A CUDA graph holds addresses and numbers and runs no Python. So everything that the Python of a step may read is found
once: its closure, the globals that it loads, what these hold, models, optimizers, graphs and their attributes; and
compared by identity before each replay.
"""

from __future__ import annotations

import abc
import argparse
import collections
import contextvars
import functools
import importlib.util
import operator
import os
import random
import sys
import sysconfig
import threading
import types
import typing
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel._library import same_objects
from gnnaccel.bytecode import parts_of, steps_of, unread
from gnnaccel.lower import bounds

_LIBRARIES = frozenset({"torch", "torch_geometric", "torch_sparse", "dgl", "gnnaccel", "numpy", "scipy"})
_OPEN = frozenset({"argparse", "collections", "functools", "types"})  # standard, and hold what users put there
# Names in whose presence all attributes count; and builtins that reach what no name tells.
_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "attrgetter", "asdict", "astuple", "deepcopy", "copy"})
_UNSEEN = frozenset({"globals", "locals", "eval", "exec"})
_STATEFUL: tuple[type, ...] = (
    random.Random, np.random.Generator, np.random.RandomState, torch.Generator, bytearray, memoryview, threading.local,
    contextvars.ContextVar, types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()),
)  # fmt: skip
_PLAIN = (dict, list, tuple, collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter)
_USERS = (object, types.SimpleNamespace, argparse.Namespace, abc.ABC, typing.Generic, typing.Protocol)
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_STORES = ("set global", "set name", "delete global")
_LOADS = ("global", "name", *_STORES)


class TooMuch(Exception):
    """A step that reaches more than can be compared at every call, or what cannot be compared."""


class Reach:
    """What `roots` reach, as it is now. Of objects of users' own classes: attributes that the code names.

    Parameters
    ----------
    roots : dict of name to object

    Attributes
    ----------
    tensors : list of (name, Tensor), each once
    optimizers : list of torch.optim.Optimizer
    modules : list of torch.nn.Module
    names : set of str
        All that the code in it names.
    """

    def __init__(self, roots: dict[str, Any]):
        self.tensors: list[tuple[str, Tensor]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.modules: list[torch.nn.Module] = []
        self._ignored: set[tuple[int, Any]] = set()
        self._named: set[str] | None = None  # attributes that the code names, where that is known
        self._known = False
        names: set[str] = set()
        self.names = names
        roots = roots | {"hooks of all modules": _global_hooks()}
        self._walk(roots)
        self.tensors, self.optimizers, self.modules = [], [], []
        if names & {"environ", "getenv"}:
            roots["os.environ"] = vars(os.environ)
        self._named, self._known = None if names & _DYNAMIC else names, True
        self._walk(roots)
        # Compared by one call into C.
        self._plain: list[tuple[Any, tuple, tuple | None]] = [
            (mapping, values, keys) for _, mapping, keys, values in self._maps
        ]
        self._plain += [(held, values, None) for _, held, values in self._lists if isinstance(held, list)]
        # A dict of a class of its own may have an order of its own.
        self._ordered = [(mapping, keys) for mapping, _, keys in self._plain if keys and type(mapping) is not dict]
        self._queues = [each for each in self._lists if not isinstance(each[1], list)]

    def _walk(self, roots: dict[str, Any]) -> None:
        self._maps: list[tuple[str, Any, tuple, tuple]] = []  # of all their entries
        self._entries: list[tuple[str, Any, Any, Any]] = []  # of one
        self._attributes: set[int] = set()  # ids of maps that are those of an object
        self._hooked: list[tuple[str, Tensor, tuple]] = []
        self._sets: list[tuple[str, set, frozenset]] = []
        self._arrays: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._absent: list[tuple[str, Mapping, frozenset]] = []
        self._lists: list[tuple[str, Any, tuple]] = []
        self._cells: list[tuple[str, Any, Any]] = []
        self._held: dict[int, Any] = {}
        stack = list(roots.items())
        while stack:
            name, found = stack.pop()
            if isinstance(found, _VALUES) or id(found) in self._held:
                continue
            self._held[id(found)] = found
            if len(self._held) > bounds.CAPTURE_REACH:
                raise TooMuch(f"it reaches more than {bounds.CAPTURE_REACH} objects, {name} among them")
            stack.extend(self._look(name, found))

    def ignore(self, entries: Iterable[tuple[dict, Any]]) -> None:
        """Let the entries (dict, key) change."""
        self._ignored.update((id(mapping), key) for mapping, key in entries)

    def difference(self, ignored: Iterable[tuple[dict, Any]] = ()) -> str | None:
        """The name of what is not what it was, but for entries (dict, key) `ignored`; None if all is."""
        if ignored:
            kept = set(self._ignored)
            self.ignore(ignored)
            try:
                return self.difference()
            finally:
                self._ignored = kept
        as_it_was = same_objects(self._plain) and all(all(map(operator.is_, *each)) for each in self._ordered)
        if not as_it_was:
            for each in self._maps:
                changed = self._of_map(*each)
                if changed is not None:
                    return changed
        for name, mapping, key, value in self._entries:
            now = mapping.get(key, _GONE)
            if now is not value and not _equal(now, value):
                return name
        for name, attributes, absent in self._absent:
            if not absent.isdisjoint(attributes):
                return _entry(name, next(key for key in attributes if key in absent))
        for name, tensor, (backward, accumulated) in self._hooked:
            now = touch.gradient_hooks(tensor)
            if now[0] is not backward or now[1] is not accumulated:
                return name
        for name, held, members in self._sets:
            if held != members:
                return name
        for name, array, copied in self._arrays:
            if array.shape != copied.shape or array.dtype != copied.dtype or array.tobytes() != copied.tobytes():
                return name
        for name, sequence, values in self._queues if as_it_was else self._lists:
            if len(sequence) != len(values) or not all(map(operator.is_, sequence, values)):
                if len(sequence) == len(values) and all(map(_equal, sequence, values)):
                    continue
                return name
        for name, cell, value in self._cells:
            now = _content(cell)
            if now is not value and not _equal(now, value):
                return name
        return None

    def _of_map(self, name: str, mapping: Any, keys: tuple, values: tuple) -> str | None:
        for key, value in zip(keys, values, strict=True):
            now = mapping.get(key, _GONE)
            if now is not value and not _equal(now, value) and (id(mapping), key) not in self._ignored:
                return _entry(name, key)
        if len(mapping) == len(keys):
            if id(mapping) in self._attributes:
                return None
            return None if all(map(_equal, mapping, keys)) else f"the order of {name}"
        known = set(keys)
        return _entry(name, next(key for key in mapping if key not in known))

    def _look(self, name: str, found: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(found, Tensor):
            self.tensors.append((name, found))
            if found.is_leaf:
                kept = touch.gradient_hooks(found)
                self._hooked.append((f"{name}'s hooks", found, kept))
                yield f"{name}'s hooks", kept
                self._attributes.add(id(vars(found)))
                yield name, vars(found)
        elif isinstance(found, dict):
            yield from self._map(name, found)
            yield from self._more(name, found)
        elif isinstance(found, (list, tuple, collections.deque)):
            if not isinstance(found, tuple):
                self._lists.append((name, found, tuple(found)))
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(found))
            yield from self._more(name, found)
        elif isinstance(found, (set, frozenset)):
            if isinstance(found, set):
                self._sets.append((name, found, frozenset(found)))
            yield from ((name, item) for item in found)
        elif isinstance(found, np.ndarray):
            if self._known and found.nbytes > bounds.CAPTURE_ARRAY_BYTES:
                raise TooMuch(f"it reaches {name}, a large array of NumPy's")
            self._arrays.append((name, found, found.copy() if self._known else found))
        elif isinstance(found, weakref.ref):
            yield name, found()
        elif type(found).__module__ == "gnnaccel.capture.steps":
            yield name, found._step  # a captured step that this one calls
        elif isinstance(found, types.MethodType):
            yield name, found.__func__
            yield name, found.__self__
        elif isinstance(found, functools.partial):
            yield from ((name, part) for part in (found.func, found.args, found.keywords))
        elif isinstance(found, types.FunctionType):
            if not _of_library(found.__module__):
                # Methods of accelerated layers pass for the user's: of these, what they wrap.
                ours = str(found.__globals__.get("__name__")).partition(".")[0] == "gnnaccel"
                yield from self._closure(found) if ours else self._function(name, found)
        elif isinstance(found, type):
            if not _of_library(found.__module__):
                yield from self._class(name, found)
        elif isinstance(found, types.ModuleType):
            if not _of_library(found.__name__):
                variables = vars(found)
                for key in list(variables) if self._named is None else self._named & variables.keys():
                    self._entries.append((f"{name}.{key}", variables, key, variables[key]))
                    yield f"{name}.{key}", variables[key]
        elif isinstance(found, types.BuiltinFunctionType):
            if not isinstance(found.__self__, (types.ModuleType, type)):
                yield name, found.__self__
        elif isinstance(found, _STATEFUL) or hasattr(type(found), "__next__"):
            if self._known:  # else nobody may name it
                raise TooMuch(f"it reaches {name}, whose next value cannot be foreseen")
        else:
            yield from self._object(name, found)

    def _more(self, name: str, found: Any) -> Iterator[tuple[str, Any]]:
        """What an object of a subclass of a container holds besides."""
        if type(found) not in _PLAIN:
            yield from self._object(name, found)

    def _map(self, name: str, found: Any) -> Iterator[tuple[str, Any]]:
        self._maps.append((name, found, tuple(found), tuple(found.values())))
        yield from ((_entry(name, key), value) for key, value in list(found.items()))

    def _object(self, name: str, found: Any) -> Iterator[tuple[str, Any]]:
        kind, package = type(found), type(found).__module__.partition(".")[0]
        if isinstance(found, torch.optim.Optimizer):
            self.optimizers.append(found)
        elif isinstance(found, torch.nn.Module):
            self.modules.append(found)
        elif (
            kind.__module__ == "torch_geometric.inspector"  # of what a class of layers is, not of this one
            or package in ("gnnaccel", "numpy", "builtins")
            or (package in sys.stdlib_module_names and package not in _OPEN and _is_library(package))
        ):
            return  # opaque: the same as long as it is the same object
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict) and id(attributes) not in self._held:
            if self._named is not None and all(_of_user(base) for base in kind.__mro__):
                for key in self._named & attributes.keys():
                    self._entries.append((f"{name}.{key}", attributes, key, attributes[key]))
                    yield f"{name}.{key}", attributes[key]
                self._absent.append((name, attributes, frozenset(self._named - attributes.keys())))
            else:
                self._held[id(attributes)] = attributes
                self._attributes.add(id(attributes))
                yield from self._map(name, attributes)
        for base in kind.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if slot not in ("__dict__", "__weakref__") and hasattr(found, slot):
                    view = _Slot(found)
                    self._entries.append((f"{name}.{slot}", view, slot, getattr(found, slot)))
                    yield f"{name}.{slot}", getattr(found, slot)
        yield name, kind

    def _class(self, name: str, found: type) -> Iterator[tuple[str, Any]]:
        for key, value in list(vars(found).items()):
            if key not in ("__dict__", "__weakref__", "__doc__", "__module__"):
                self._entries.append((f"{name}.{key}", vars(found), key, value))
                for part in ("fget", "func", "__func__"):  # properties, cached ones, static methods
                    value = getattr(value, part, None) or value
                yield f"{name}.{key}", value
        if self._named is not None:
            self._absent.append((name, vars(found), frozenset(self._named - vars(found).keys())))
        yield from ((name, base) for base in found.__bases__)

    def _closure(self, found: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for key, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=True):
            value = _content(cell)
            self._cells.append((key, cell, value))
            yield key, value

    def _function(self, name: str, found: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if (reason := unread()) is not None:
            raise TooMuch(f"{name} {reason}")
        yield from self._closure(found)
        self.names.update(_attributes(found.__code__))
        for imported in _imports(found.__code__):
            for whole in (imported, f"{found.__globals__.get('__package__')}.{imported}"):
                yield whole, sys.modules.get(whole)
        for key in _names(found.__code__):
            value = found.__globals__.get(key, _GONE)
            if key in _UNSEEN and value is _GONE and self._known:
                raise TooMuch(f"it calls {key}()")
            if value is _GONE and not _stored(found.__code__, key):
                continue  # a builtin
            self._entries.append((key, found.__globals__, key, value))
            yield key, value
        for key in ("__code__", "__defaults__", "__kwdefaults__"):
            self._entries.append((f"{name}.{key}", _Slot(found), key, getattr(found, key)))
        yield from ((name, value) for value in (found.__defaults__, found.__kwdefaults__) if value)
        yield from self._map(name, found.__dict__)


class _Gone:
    pass


_GONE = _Gone()


class _Slot:
    """An object's slots, read as a map."""

    def __init__(self, owner: Any):
        self._owner = owner

    def get(self, key: str, default: Any) -> Any:
        return getattr(self._owner, key, default)


def _entry(name: str, key: Any) -> str:
    return f"{name}.{key}" if isinstance(key, str) else f"{name}[{type(key).__name__}]"


def _equal(one: Any, other: Any) -> bool:
    """True for equal values of one type that cannot change; of all else, for the same object."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return isinstance(one, _VALUES) and (one == other or (one != one and other != other))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


def _of_library(module: str | None) -> bool:
    return _is_library((module or "").partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _is_library(package: str) -> bool:
    if package in _LIBRARIES or package not in sys.stdlib_module_names:
        return package in _LIBRARIES
    # A user's own may have the name of one of Python's.
    if package in sys.modules:
        where = getattr(sys.modules[package], "__file__", None)
    else:
        spec = importlib.util.find_spec(package)
        where = spec.origin if spec is not None and spec.has_location else None
    return where is None or where.startswith(sysconfig.get_path("stdlib"))


def _global_hooks() -> dict[str, Any]:
    return {k: v for k, v in vars(torch.nn.modules.module).items() if k.startswith("_global_") and isinstance(v, dict)}


@functools.lru_cache(maxsize=512)
def _imports(code: types.CodeType) -> frozenset[str]:
    """Modules that `code` and the functions in it import."""
    steps = chain.from_iterable(map(steps_of, parts_of(code)))
    return frozenset(step.value for step in steps if step.kind == "import" and step.value)


@functools.lru_cache(maxsize=512)
def _globals(code: types.CodeType) -> tuple[tuple[str, bool], ...]:
    """Globals that `code` and the functions in it name, and whether they write them."""
    found: dict[str, bool] = {}
    for step in chain.from_iterable(map(steps_of, parts_of(code))):
        if step.kind in _LOADS:
            found[step.value] = found.get(step.value, False) or step.kind in _STORES
    return tuple(found.items())


@functools.lru_cache(maxsize=512)
def _attributes(code: types.CodeType) -> frozenset[str]:
    """All names in `code` and the functions in it: of globals, attributes and methods."""
    found: set[str] = set()
    for part in parts_of(code):
        words = chain(part.co_consts, *(each for each in part.co_consts if isinstance(each, tuple)))
        found.update(part.co_names)
        found.update(each for each in words if isinstance(each, str) and each.isidentifier())  # by hasattr, match
    return frozenset(found)


def _of_user(base: type) -> bool:
    """True of a class whose attributes only code that was looked at reads."""
    return base in _USERS or not _of_library(base.__module__)


def _names(code: types.CodeType) -> list[str]:
    return [name for name, _ in _globals(code)]


def _stored(code: types.CodeType, name: str) -> bool:
    return dict(_globals(code))[name]
