"""Code that writes into tensors: by an operator, a method, an argument. Read from its bytecode, without running it."""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

_OPERATORS = {name for name in vars(operator) if name.startswith("i") and f"__{name}__" in vars(operator)}
_OPERATORS |= {"setitem", "delitem"}
_KEYWORDS = {"inplace", "out"}
_STORED = {"data", "grad", "requires_grad"}  # attributes of a tensor that may be set
_GLOBALS = {"LOAD_NAME", "LOAD_GLOBAL", "STORE_GLOBAL", "IMPORT_NAME", "IMPORT_FROM"}
_OF_OBJECTS = {"LOAD_ATTR", "LOAD_METHOD"}
_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", *_OF_OBJECTS}
# What calls, and how much lies on the stack above its arguments.
_CALLS = {
    ("PRECALL" if "PRECALL" in dis.opmap else "CALL"): 0,
    "CALL_FUNCTION": 0,
    "CALL_METHOD": 0,
    "CALL_KW": 1,
    "CALL_FUNCTION_KW": 1,
}


class Attribute(str):
    """A name that code reads from an object, `self` or another; any other is found by itself, as a global."""

    of_self = False


def is_name(name: str) -> bool:
    """True for the name of a function or method that writes into its argument."""
    if name.startswith("__"):
        return name[2:-2] in _OPERATORS
    return name.endswith("_") or name in _OPERATORS


@functools.lru_cache(maxsize=4096)  # what code says of itself does not change, and a lambda's is asked at every call
def names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names of globals and builtins that this code and the functions in it read, and those of attributes."""
    read, attributes = set(), set()
    for part in _parts(code):
        mine = {i.argval for i in dis.get_instructions(part) if i.opname in _GLOBALS}
        read |= mine
        attributes |= set(part.co_names) - mine
        attributes |= {i.argval for i in dis.get_instructions(part) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(read), frozenset(attributes)


@functools.lru_cache(maxsize=4096)
def of_code(code: types.CodeType) -> str | None:
    """Why this code may write in place by an operator or a keyword; None if it does not."""
    for part in _parts(code):
        for instruction in dis.get_instructions(part):
            name = instruction.opname
            if name.startswith(("INPLACE_", "STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")):
                return "writes in place"
            if name == "BINARY_OP" and instruction.argrepr.endswith("="):
                return "writes in place"
            if name == "STORE_ATTR" and instruction.argval in _STORED:
                return f"sets {instruction.argval!r}"
            if name == "CALL_FUNCTION_EX":
                return "calls a function with * or **"
        words = [word for const in part.co_consts if isinstance(const, tuple) for word in const]
        if not _KEYWORDS.isdisjoint(word for word in words if isinstance(word, str)):
            return "writes in place"
    return None


@functools.lru_cache(maxsize=4096)
def sets_attributes(code: types.CodeType) -> bool:
    """True if this code sets an attribute of anything."""
    return any(step.opname == "STORE_ATTR" for part in _parts(code) for step in dis.get_instructions(part))


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
    for alias, arguments in aliases:
        (attributes if isinstance(alias, Attribute) else names)[alias] = arguments
    usual = _limits() | names
    others = usual | attributes
    for code in codes:
        for name, given in _loaded(code):
            # An attribute of the layer itself is what it is, whatever its name: self.dropout may be a number.
            known = usual if not isinstance(name, Attribute) else attributes if name.of_self else others
            most = known.get(name)
            if most is not None and (given is None or given > most):
                return f"{code.co_name}() may tell {name}() to write in place"
    return None


@functools.lru_cache(maxsize=4096)
def _loaded(code: types.CodeType) -> tuple[tuple[str, int | None], ...]:
    """Each name that the code loads, and how many arguments it is called with."""
    found = []
    for part in _parts(code):
        instructions = list(dis.get_instructions(part))
        for place, instruction in enumerate(instructions):
            if instruction.opname in _LOADS:
                name = instruction.argval
                if instruction.opname in _OF_OBJECTS:
                    name = Attribute(name)
                    name.of_self = bool(place) and _loads_self(instructions[place - 1])
                found.append((name, _arguments(instructions, place)))
    return tuple(found)


def _loads_self(instruction: dis.Instruction) -> bool:
    name = instruction.argval
    return instruction.opname.startswith("LOAD_") and (name[-1] if isinstance(name, tuple) else name) == "self"


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _parts(const)


def _arguments(instructions: list[dis.Instruction], place: int) -> int | None:
    """How many arguments what instruction `place` loads is called with; None if it is not seen to be called."""
    height = 0  # of the stack above what is called
    for instruction in instructions[place + 1 :]:
        name = instruction.opname
        if name == "PUSH_NULL" and height == 0 and sys.version_info >= (3, 13):  # part of what is called; before, of
            continue  # what is called next
        if name in _CALLS and instruction.arg is not None and height == instruction.arg + _CALLS[name]:
            return instruction.arg
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return None
        height += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if height < 0:
            return None
    return None
