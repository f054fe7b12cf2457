"""Code that writes into tensors: by an operator, a method, an argument. Read from its bytecode, without running it."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from gnnaccel.bytecode import VARIABLES, arguments, parts_of, steps_of, unread

_OPERATORS = {name for name in vars(operator) if name.startswith("i") and f"__{name}__" in vars(operator)}
_OPERATORS |= {"setitem", "delitem"}
_KEYWORDS = {"inplace", "out"}
_STORED = {"data", "grad", "requires_grad"}  # attributes of a tensor that may be set
_GLOBALS = {"name", "global", "set global", "import", "import from"}
_LOADS = {"name", "global", "free", "attribute"}


class Attribute(str):
    """A name that code reads from an object, `self` or another; any other is found by itself, as a global."""

    of_self = False


def is_name(name: str) -> bool:
    """True for the name of a function or method that writes into its argument."""
    if name.startswith("__"):
        return name[2:-2] in _OPERATORS
    return name.endswith("_") or name in _OPERATORS


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of globals and builtins that this code and the functions in it read, and those of attributes."""
    read, attributes = set(), set()
    for part in parts_of(code):
        mine = {step.value for step in steps_of(part) if step.kind in _GLOBALS}
        read |= mine
        attributes |= set(part.co_names) - mine
        attributes |= {step.value for step in steps_of(part) if step.kind == "attribute"}
    return frozenset(read), frozenset(attributes)


@functools.lru_cache(maxsize=4096)
def of_code(code: types.CodeType) -> str | None:
    """Why this code may write in place by an operator or a keyword; None if it does not."""
    if (reason := unread()) is not None:
        return reason
    for part in parts_of(code):
        for step in steps_of(part):
            if step.kind == "in place":
                return "writes in place"
            if step.kind == "set attribute" and step.value in _STORED:
                return f"sets {step.value!r}"
            if step.kind == "call with *":
                return "calls a function with * or **"
        words = [word for const in part.co_consts if isinstance(const, tuple) for word in const]
        if not _KEYWORDS.isdisjoint(word for word in words if isinstance(word, str)):
            return "writes in place"
    return None


@functools.lru_cache(maxsize=4096)
def sets_attributes(code: types.CodeType) -> bool:
    """True if this code sets an attribute of anything."""
    return any(step.kind == "set attribute" for part in parts_of(code) for step in steps_of(part))


def most_arguments(function: Any) -> int | None:
    """How many arguments `function` may be given without one that tells it to write in place; None: any number."""
    return _positions().get(id(function))


@functools.cache
def _positions() -> dict[int, int]:
    """Position of the argument "inplace" of torch's functions and modules, by their ids."""
    found = {}
    for value in (*vars(F).values(), *vars(torch.nn).values()):
        if callable(value):
            try:
                names = list(inspect.signature(value).parameters)
            except (TypeError, ValueError):  # a builtin, whose arguments of this kind are keywords
                continue
            if "inplace" in names:
                found[id(value)] = names.index("inplace")
    return found


@functools.cache
def _limits() -> dict[str, int]:
    """The same by their names, as attributes of a module."""
    found = {}
    for module in (F, torch.nn):
        for name, value in vars(module).items():
            if (most := most_arguments(value)) is not None:
                found[name] = most
    return found


def of_calls(codes: Iterable[types.CodeType], aliases: Iterable[tuple[str, int]]) -> str | None:
    """Why this code may tell a function of torch to write in place by an argument without a keyword.

    aliases : further names, and how many arguments what they stand for may be given.
    """
    names: dict[str, int] = {}
    attributes: dict[str, int] = {}
    for alias, most in aliases:
        (attributes if isinstance(alias, Attribute) else names)[alias] = most
    usual = _limits() | names
    others = usual | attributes
    for code in codes:
        for name, given in _loaded(code):
            # An attribute of the layer itself is what it is, whatever its name: self.dropout may be a number.
            known = usual if not isinstance(name, Attribute) else attributes if name.of_self else others
            allowed = known.get(name)
            if allowed is not None and (given is None or given > allowed):
                return f"{code.co_name}() may tell {name}() to write in place"
    return None


@functools.lru_cache(maxsize=4096)
def _loaded(code: types.CodeType) -> tuple[tuple[str, int | None], ...]:
    """Each name that the code loads, and how many arguments it is called with."""
    found = []
    for part in parts_of(code):
        steps = steps_of(part)
        for place, step in enumerate(steps):
            if step.kind in _LOADS:
                name = step.value
                if step.kind == "attribute":
                    name = Attribute(name)
                    before = steps[place - 1]
                    # What super() gives is another's, though self is read before it (3.12).
                    from_self = before.kind in VARIABLES and before.value == "self"
                    name.of_self = bool(place) and from_self and step.effect >= 0
                found.append((name, arguments(steps, place)))
    return tuple(found)


def writes(function: Any, args: tuple, kwargs: dict) -> bool:
    """True if a call of a function of torch writes into an argument."""
    name = getattr(function, "__name__", "")
    if is_name(name) or name == "__set__" or kwargs.get("inplace") or kwargs.get("out") is not None:
        return True
    most = most_arguments(function)
    return most is not None and len(args) > most
