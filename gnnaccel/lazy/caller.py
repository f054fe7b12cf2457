"""What a calling function does with the result of a call, read from its bytecode: whether ``f(...)[:k]`` is all, or
``out = f(...)`` and ``out = out[:k]`` behind it.

Then the result is on the interpreter's stack and in a variable alone until the slice takes it, and nothing but names,
constants and attributes that run no code of users' are read in between: nobody else can see the result, or change what
it was made of, before.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import itertools
import sys
import types
from typing import Any

import torch

_NAMES = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")
_MORE = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_ATTR")
_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD", "CALL_FUNCTION_EX")
# Functions that have them get their dict of locals to look at, by name or from a module of any name; eval() by name
# alone, as model.eval() is none of them.
_LOCALS = {"locals", "vars", "exec", "dir", "builtins", "__builtins__", "_getframe", "currentframe", "f_locals"}
_EVAL = ("LOAD_NAME", "LOAD_GLOBAL", "IMPORT_FROM")
_BETWEEN = ("CACHE", "EXTENDED_ARG", "NOP")


def takes_first_rows(frame: types.FrameType, called: Any) -> bool:
    """True if `frame` is at a call of the object `called`, and all that happens to the result is ``[:end]``."""
    found = _called(frame.f_code, frame.f_lasti)
    # A debugger's, which may look at anything.
    if found is None or sys.gettrace() is not None or frame.f_trace is not None:
        return False
    (name, attributes), end = found
    value = _variable(frame, name)
    for attribute in attributes:
        held = vars(value) if hasattr(value, "__dict__") else {}
        parts = held.get("_modules", {}) if isinstance(value, torch.nn.Module) else held
        value = parts.get(attribute)
    return value is called and (not end or _is_plain(_variable(frame, end[0]), end[1]))


def _is_plain(value: Any, attributes: tuple[str, ...]) -> bool:
    """True if to read these attributes, each of the one before, runs no code but torch's and PyG's."""
    for place, attribute in enumerate(attributes):
        kind = type(value)
        found = next((vars(parent)[attribute] for parent in kind.__mro__ if attribute in vars(parent)), None)
        ways: list[Any] = [kind.__getattribute__]
        if isinstance(found, property):
            ways.append(found.fget)
        elif found is not None:
            ways.append(getattr(type(found), "__get__", kind.__getattribute__))
        elif attribute not in getattr(value, "__dict__", {}):
            ways.append(getattr(kind, "__getattr__", None))
        if not all(map(_is_frameworks, ways)):
            return False
        value = getattr(value, attribute, None) if place + 1 < len(attributes) else None
    return True


def _is_frameworks(function: Any) -> bool:
    if isinstance(function, types.WrapperDescriptorType):  # of Python's own classes
        return True
    return str(getattr(function, "__module__", None)).split(".")[0] in ("torch", "torch_geometric")


def _variable(frame: types.FrameType, name: str) -> Any:
    code, nothing = frame.f_code, object()
    found = nothing
    if name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars:
        values = frame.f_locals
        found = values.get(name, nothing)
        # Before 3.13 a copy, which would keep everything alive that it has, a batch and its results; if somebody else
        # has it too, it is his.
        if code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(values) == _UNHELD:
            values.clear()
    elif not code.co_flags & inspect.CO_OPTIMIZED:
        found = frame.f_locals.get(name, nothing)
    if found is nothing:
        found = frame.f_globals.get(name, getattr(builtins, name, None))
    return found


def _unheld() -> int:
    """References to the locals of a frame that nobody has asked for them before; none where they are no copy."""
    values = sys._getframe().f_locals
    return sys.getrefcount(values) if sys.version_info < (3, 13) else -1


_UNHELD = _unheld()
_Read = tuple[str, tuple[str, ...]]  # a name, and attributes of it


@functools.lru_cache(maxsize=1024)
def _called(code: types.CodeType, place: int) -> tuple[_Read, _Read | None] | None:
    """What the call at this offset calls, and what ends the slice of its result (None for a constant); None where
    anything else happens to the result."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN]
    if not _LOCALS.isdisjoint((*code.co_names, *code.co_freevars)):
        return None
    if "eval" in code.co_names and any(step.argval == "eval" and step.opname.startswith(_EVAL) for step in steps):
        return None
    at = next((i for i, step in enumerate(steps) if step.offset == place), None)
    end = None if at is None or steps[at].opname not in _CALLS else _end_of_slice(steps, at + 1)
    if end is None:
        return None
    height = 0
    for first in range(at, -1, -1):  # type: ignore[arg-type]
        step = steps[first]
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return None
        height += dis.stack_effect(step.opcode, step.arg)
        if height == 1:
            called = _read(steps[first:at])
            return None if called is None else (called, _read(end))
        if step.is_jump_target:  # to within the statement, which is not the one way to the call then
            return None
    return None


def _read(steps: list[dis.Instruction]) -> _Read | None:
    loads = [step for step in steps if step.opname != "PUSH_NULL"]
    if not loads or not loads[0].opname.startswith(_NAMES) or not isinstance(loads[0].argval, str):
        return None
    attributes = []
    for step in loads[1:]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        attributes.append(step.argval)
    return loads[0].argval, tuple(attributes)


def _end_of_slice(steps: list[dis.Instruction], start: int) -> list[dis.Instruction] | None:
    """The steps of `end`, a constant or a name and attributes of it, where ``[:end]`` begins at this step, or where the
    variable that the result goes to becomes ``variable[:end]`` with the next statement; else None."""
    rest, variable = steps[start:], None
    if len(rest) > 2 and rest[0].opname in ("STORE_FAST", "STORE_NAME"):
        variable = rest[0].argval
        if not rest[1].opname.startswith(("LOAD_FAST", "LOAD_NAME")) or rest[1].argval != variable:
            return None
        rest = rest[2:]
    elif rest and rest[0].opname == "STORE_FAST_LOAD_FAST":
        variable, loaded = rest[0].argval
        if loaded != variable:
            return None
        rest = rest[1:]
    if not rest or rest[0].opname != "LOAD_CONST" or rest[0].is_jump_target:
        return None
    if isinstance(rest[0].argval, slice):  # of constants
        usual, last = rest[0].argval.start is None and rest[0].argval.step is None, 1
    else:
        simple = itertools.takewhile(lambda step: step.opname.startswith(_NAMES) or step.opname in _MORE, rest[1:])
        last = 1 + len(list(simple))
        usual = rest[0].argval is None and last > 1
    end = rest[1:last]
    usual = usual and last < len(rest) and not any(step.is_jump_target for step in rest[: last + 1])
    # One name or constant, which is not the variable, and nothing but attributes of it.
    usual = usual and all((step.opname == "LOAD_ATTR") == (place > 0) for place, step in enumerate(end))
    if not usual or (end and variable is not None and end[0].argval == variable):
        return None
    if not isinstance(rest[0].argval, slice) and rest[last].opname != "BINARY_SLICE":
        if rest[last].opname != "BUILD_SLICE" or rest[last].arg != 2:
            return None
        last += 1
    if last >= len(rest) or not (rest[last].opname == "BINARY_SLICE" or _is_subscript(rest[last])):
        return None
    if variable is None:
        return end
    stored = rest[last + 1].argval if last + 1 < len(rest) and rest[last + 1].opname.startswith("STORE_") else None
    return end if (stored[0] if isinstance(stored, tuple) else stored) == variable else None


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")
