"""What a calling function does with the result of a call, read from its bytecode: whether ``f(...)[:k]`` is all, or
``out = f(...)`` and ``out = out[:k]`` behind it.

Then the result is on the interpreter's stack and in a variable alone until the slice takes it, and nothing but names,
constants and attributes are read in between: nobody else can see the result, or change what it was made of, before.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
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
    name, attributes = found
    value = _variable(frame, name)
    for attribute in attributes:
        held = vars(value) if hasattr(value, "__dict__") else {}
        parts = held.get("_modules", {}) if isinstance(value, torch.nn.Module) else held
        value = parts.get(attribute)
    return value is called


def _variable(frame: types.FrameType, name: str) -> Any:
    code, nothing = frame.f_code, object()
    found = nothing
    if name in code.co_varnames or name in code.co_cellvars or name in code.co_freevars:
        values = frame.f_locals
        found = values.get(name, nothing)
        if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
            values.clear()  # a copy, which would keep everything alive that it has, a batch and its results
    elif not code.co_flags & inspect.CO_OPTIMIZED:
        found = frame.f_locals.get(name, nothing)
    if found is nothing:
        found = frame.f_globals.get(name, getattr(builtins, name, None))
    return found


@functools.lru_cache(maxsize=1024)
def _called(code: types.CodeType, place: int) -> tuple[str, tuple[str, ...]] | None:
    """What the call at this offset calls, a name and attributes of it, if its result is sliced so; else None."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN]
    if not _LOCALS.isdisjoint((*code.co_names, *code.co_freevars)):
        return None
    if "eval" in code.co_names and any(step.argval == "eval" and step.opname.startswith(_EVAL) for step in steps):
        return None
    at = next((i for i, step in enumerate(steps) if step.offset == place), None)
    if at is None or steps[at].opname not in _CALLS or not _is_sliced(steps, at + 1):
        return None
    height = 0
    for first in range(at, -1, -1):
        step = steps[first]
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return None
        height += dis.stack_effect(step.opcode, step.arg)
        if height == 1:
            return _name(steps[first:at])
        if step.is_jump_target:  # to within the statement, which is not the one way to the call then
            return None
    return None


def _name(steps: list[dis.Instruction]) -> tuple[str, tuple[str, ...]] | None:
    loads = [step for step in steps if step.opname != "PUSH_NULL"]
    if not loads or not loads[0].opname.startswith(_NAMES) or not isinstance(loads[0].argval, str):
        return None
    attributes = []
    for step in loads[1:]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        attributes.append(step.argval)
    return loads[0].argval, tuple(attributes)


def _is_sliced(steps: list[dis.Instruction], start: int) -> bool:
    """True if ``[:end]`` begins at this step, or the variable that the result goes to becomes ``variable[:end]`` with
    the next statement, where `end` is made of names, constants and attributes."""
    rest, variable = steps[start:], None
    if len(rest) > 2 and rest[0].opname in ("STORE_FAST", "STORE_NAME"):
        variable = rest[0].argval
        if not rest[1].opname.startswith(("LOAD_FAST", "LOAD_NAME")) or rest[1].argval != variable:
            return False
        rest = rest[2:]
    elif rest and rest[0].opname == "STORE_FAST_LOAD_FAST":
        variable, loaded = rest[0].argval
        if loaded != variable:
            return False
        rest = rest[1:]
    behind = _behind_slice(rest, variable)
    if behind is None or variable is None:
        return behind is not None
    stored = rest[behind].argval if behind < len(rest) and rest[behind].opname.startswith("STORE_") else None
    return (stored[0] if isinstance(stored, tuple) else stored) == variable


def _behind_slice(rest: list[dis.Instruction], variable: str | None) -> int | None:
    """Where it goes on behind ``[:end]``, whose end does not read `variable`; None if these steps are no such slice."""
    if not rest or rest[0].opname != "LOAD_CONST" or rest[0].is_jump_target:
        return None
    if isinstance(rest[0].argval, slice):  # of constants
        given = rest[0].argval
        return 2 if given.start is None and given.step is None and len(rest) > 1 and _is_subscript(rest[1]) else None
    if rest[0].argval is not None:
        return None
    for i, step in enumerate(rest[1:], 1):
        if step.is_jump_target:
            return None
        if step.opname == "BINARY_SLICE":
            return i + 1 if i > 1 else None
        if step.opname == "BUILD_SLICE":
            return i + 2 if i > 1 and step.arg == 2 and i + 1 < len(rest) and _is_subscript(rest[i + 1]) else None
        is_attribute = step.opname == "LOAD_ATTR"
        simple = step.opname.startswith(_NAMES) or step.opname in _MORE
        if not simple or is_attribute == (i == 1) or (not is_attribute and step.argval == variable is not None):
            return None
    return None


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")
