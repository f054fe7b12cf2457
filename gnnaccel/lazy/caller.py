"""What a calling function does with the result of a call, read from its bytecode: whether ``f(...)[:k]`` is all, or
``out = f(...)`` and ``out = out[:k]`` behind it.

Then the result is on the interpreter's stack and in a variable alone until the slice takes it, and nothing but names,
constants and attributes that run no code of users' are read in between: nobody else can see the result, or change what
it was made of, before.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import sys
import types
from typing import Any

import torch

from gnnaccel.bytecode import VARIABLES, Step, beginning, place_of, steps_of, unread

_CALLS = ("call", "call with *")
# Functions that have them get their dict of locals to look at, by name or from a module of any name; eval() by name
# alone, as model.eval() is none of them.
_LOCALS = {"locals", "vars", "exec", "dir", "builtins", "__builtins__", "_getframe", "currentframe", "f_locals"}
_EVAL = ("name", "global", "import from")


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
    if unread() is not None or not _LOCALS.isdisjoint((*code.co_names, *code.co_freevars)):
        return None
    steps = steps_of(code)
    if "eval" in code.co_names and any(step.value == "eval" and step.kind in _EVAL for step in steps):
        return None
    at = place_of(steps, place)
    if steps[at].kind not in _CALLS:
        return None
    end, first = _end_of_slice(steps, at + 1), beginning(steps, at)
    called = None if end is None or first is None else _read(steps[first:at])
    return None if end is None or called is None else (called, _read(end))


def _read(steps: tuple[Step, ...]) -> _Read | None:
    loads = [step for step in steps if step.kind != "null"]
    if not loads or loads[0].kind not in VARIABLES:
        return None
    attributes = itertools.takewhile(lambda step: step.kind == "attribute", loads[1:])
    return loads[0].value, tuple(step.value for step in attributes)


def _end_of_slice(steps: tuple[Step, ...], start: int) -> tuple[Step, ...] | None:
    """The steps of `end`, a constant or a name and attributes of it, where ``[:end]`` begins at this step, or where the
    variable that the result goes to becomes ``variable[:end]`` with the next statement; else None."""
    rest, variable = steps[start:], None
    if len(rest) > 2 and rest[0].kind in ("set local", "set name"):
        variable = rest[0].value
        if rest[1].kind not in ("local", "name") or rest[1].value != variable:
            return None
        rest = rest[2:]
    if not rest or rest[0].kind != "constant" or rest[0].is_target:
        return None
    if isinstance(rest[0].value, slice):  # of constants
        usual, last = rest[0].value.start is None and rest[0].value.step is None, 1
    else:
        simple = itertools.takewhile(lambda step: step.kind in (*VARIABLES, "constant", "attribute"), rest[1:])
        last = 1 + len(list(simple))
        usual = rest[0].value is None and last > 1
    end = rest[1:last]
    usual = usual and last < len(rest) and not any(step.is_target for step in rest[: last + 1])
    # One name or constant, which is not the variable, and nothing but attributes of it.
    usual = usual and all((step.kind == "attribute") == (place > 0) for place, step in enumerate(end))
    if not usual or (end and variable is not None and end[0].value == variable):
        return None
    if not isinstance(rest[0].value, slice) and rest[last].kind != "slice":
        if rest[last].kind != "build slice" or rest[last].value != 2:
            return None
        last += 1
    if last >= len(rest) or rest[last].kind not in ("slice", "subscript"):
        return None
    if variable is None:
        return end
    stored = rest[last + 1] if last + 1 < len(rest) else None
    return end if stored is not None and stored.kind.startswith("set ") and stored.value == variable else None
