"""What a function can reach without being handed it: the objects that must be what they were for a replay to be right.

A CUDA graph holds addresses and numbers and runs no Python. So everything that the Python of a step may read is found
once: its closure, the globals that it loads, what these hold, models, optimizers, graphs and their attributes; and
compared by identity before each replay.
"""

from __future__ import annotations

import argparse
import dis
import functools
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

_MOST = 50_000  # objects; more than a model, its optimizer and its graph hold
_LIBRARIES = frozenset({"torch", "torch_geometric", "torch_sparse", "dgl", "gnnaccel", "numpy", "scipy"})
_OPEN = frozenset({"argparse", "collections", "functools", "types"})  # standard, and hold what users put there
_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "attrgetter", "asdict", "deepcopy", "copy"})
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_STORES = ("STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", *_STORES)


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
    """

    def __init__(self, roots: dict[str, Any]):
        self.tensors: list[tuple[str, Tensor]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._ignored: set[tuple[int, Any]] = set()
        self._named: set[str] | None = None  # attributes that the code names, where that is known
        self._known = False
        names: set[str] = set()
        self._names = names
        self._walk(roots)
        self.tensors, self.optimizers = [], []
        self._named, self._known = None if names & _DYNAMIC else names, True
        self._walk(roots)
        # Compared by a few calls into C.
        self._empty = [mapping for _, mapping, keys, _ in self._maps if not keys]
        filled = [each for each in self._maps if each[2]]
        self._filled = [mapping for _, mapping, _, _ in filled]
        self._lengths = [len(keys) for _, _, keys, _ in filled]
        self._values = [value for each in filled for value in each[3]]

    def _walk(self, roots: dict[str, Any]) -> None:
        self._maps: list[tuple[str, Any, tuple, tuple]] = []  # of all their entries
        self._entries: list[tuple[str, Any, Any, Any]] = []  # of one
        self._absent: list[tuple[str, dict, frozenset]] = []
        self._lists: list[tuple[str, Any, tuple]] = []
        self._cells: list[tuple[str, Any, Any]] = []
        self._held: dict[int, Any] = {}
        stack = list(roots.items())
        while stack:
            name, found = stack.pop()
            if isinstance(found, _VALUES) or id(found) in self._held:
                continue
            self._held[id(found)] = found
            if len(self._held) > _MOST:
                raise TooMuch(f"it reaches more than {_MOST} objects, {name} among them")
            stack.extend(self._look(name, found))

    def ignore(self, entries: Iterable[tuple[dict, Any]]) -> None:
        """Let the entries (dict, key) change."""
        self._ignored.update((id(mapping), key) for mapping, key in entries)

    def difference(self) -> str | None:
        """The name of the first thing that is not what it was; None if all is."""
        same = operator.is_
        if (
            any(self._empty)
            or list(map(len, self._filled)) != self._lengths
            or not all(map(same, chain.from_iterable(map(dict.values, self._filled)), self._values))
        ):
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
        for name, sequence, values in self._lists:
            if len(sequence) != len(values) or not all(map(same, sequence, values)):
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
            return None
        return _entry(name, next(key for key in mapping if key not in set(keys)))

    def _look(self, name: str, found: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(found, Tensor):
            self.tensors.append((name, found))
        elif isinstance(found, dict):
            yield from self._map(name, found)
        elif isinstance(found, (list, tuple)) or type(found).__name__ == "deque":
            if not isinstance(found, tuple):
                self._lists.append((name, found, tuple(found)))
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(found))
        elif isinstance(found, (set, frozenset)):
            yield from ((name, item) for item in found)
        elif isinstance(found, types.MethodType):
            yield name, found.__func__
            yield name, found.__self__
        elif isinstance(found, functools.partial):
            yield from ((name, part) for part in (found.func, found.args, found.keywords))
        elif isinstance(found, types.FunctionType):
            if not _of_library(found.__module__):
                yield from self._function(name, found)
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
            return
        elif hasattr(type(found), "__next__"):
            if not self._known:
                return  # nobody may name it
            raise TooMuch(f"it reaches {name}, whose next value cannot be foreseen")
        else:
            yield from self._object(name, found)

    def _map(self, name: str, found: Any) -> Iterator[tuple[str, Any]]:
        self._maps.append((name, found, tuple(found), tuple(found.values())))
        yield from ((_entry(name, key), value) for key, value in list(found.items()))

    def _object(self, name: str, found: Any) -> Iterator[tuple[str, Any]]:
        kind, package = type(found), type(found).__module__.partition(".")[0]
        if isinstance(found, torch.optim.Optimizer):
            self.optimizers.append(found)
        elif not isinstance(found, torch.nn.Module) and (
            kind.__module__ == "torch_geometric.inspector"  # of what a class of layers is, not of this one
            or package in ("gnnaccel", "numpy", "builtins", "weakref", "_weakref")
            or (package in sys.stdlib_module_names and package not in _OPEN)
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
            if not key.startswith("__") or key == "__call__":
                self._entries.append((f"{name}.{key}", vars(found), key, value))
                value = getattr(value, "fget", value)
                yield f"{name}.{key}", getattr(value, "__func__", value)
        yield from ((name, base) for base in found.__bases__)

    def _function(self, name: str, found: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for key, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=True):
            value = _content(cell)
            self._cells.append((key, cell, value))
            yield key, value
        self._names.update(_attributes(found.__code__))
        for key in _names(found.__code__):
            value = found.__globals__.get(key, _GONE)
            if value is _GONE and not _stored(found.__code__, key):
                continue  # a builtin
            self._entries.append((key, found.__globals__, key, value))
            yield key, value
        yield from ((name, value) for value in (found.__defaults__, found.__kwdefaults__) if value)


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
    package = (module or "").partition(".")[0]
    return package in _LIBRARIES or package in sys.stdlib_module_names


@functools.lru_cache(maxsize=512)
def _globals(code: types.CodeType) -> tuple[tuple[str, bool], ...]:
    """Globals that `code` and the functions in it name, and whether they write them."""
    found: dict[str, bool] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            found[instruction.argval] = found.get(instruction.argval, False) or instruction.opname in _STORES
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for name, stored in _globals(constant):
                found[name] = found.get(name, False) or stored
    return tuple(found.items())


@functools.lru_cache(maxsize=512)
def _attributes(code: types.CodeType) -> frozenset[str]:
    """All names in `code` and the functions in it: of globals, attributes and methods."""
    inner = [_attributes(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _of_user(base: type) -> bool:
    """True of a class whose attributes only code that was looked at reads."""
    return base in (object, types.SimpleNamespace, argparse.Namespace) or not _of_library(base.__module__)


def _names(code: types.CodeType) -> list[str]:
    return [name for name, _ in _globals(code)]


def _stored(code: types.CodeType, name: str) -> bool:
    return dict(_globals(code))[name]
