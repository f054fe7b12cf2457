"""What code does, read off its bytecode without running it; the one place that knows Python's instructions.

Instructions differ between the versions of Python. Here they become a few kinds of steps that are the same for all:
who asks what code does looks at these. Code of a version that was not tried is not read at all (`unread`).
"""

from __future__ import annotations

import bisect
import dis
import functools
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from gnnaccel import versions

VARIABLES = ("local", "free", "name", "global")
"""Kinds of steps that read a variable: a function's own, one of a function around it, one of a module or class body, a
global."""

_KINDS = {
    **dict.fromkeys(("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR"), "local"),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "free"),
    **dict.fromkeys(("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), "name"),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"), "attribute"),
    **dict.fromkeys(("LOAD_CONST", "LOAD_SMALL_INT"), "constant"),
    **dict.fromkeys(("STORE_FAST", "STORE_FAST_MAYBE_NULL"), "set local"),
    **dict.fromkeys(("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_KW"), "call"),
    **dict.fromkeys(("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"), "in place"),
    "LOAD_GLOBAL": "global",
    "STORE_DEREF": "set free",
    "STORE_NAME": "set name",
    "STORE_GLOBAL": "set global",
    "DELETE_GLOBAL": "delete global",
    "STORE_ATTR": "set attribute",
    "CALL_FUNCTION_EX": "call with *",
    "IMPORT_NAME": "import",
    "IMPORT_FROM": "import from",
    "PUSH_NULL": "null",
    "BINARY_SLICE": "slice",
    "BINARY_SUBSCR": "subscript",
}
# Two at once, from 3.13 on.
_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("local", "local"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("local", "local"),
    "STORE_FAST_LOAD_FAST": ("set local", "local"),
    "STORE_FAST_STORE_FAST": ("set local", "set local"),
}
_NAMES_ABOVE = {"CALL_KW", "CALL_FUNCTION_KW"}  # of arguments, in a tuple on the stack
_NOTHING = {"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN"}
_NULL_ABOVE = sys.version_info >= (3, 13)  # what is called, else below it


class Step(NamedTuple):
    """One instruction.

    kind : one of `VARIABLES`; "attribute", read from what is on the stack; "constant"; "call", "call with *"; "set" and
        what is set; "in place": an entry or slice set or deleted, an operator like +=; "slice": ``x[a:b]``;
        "subscript": ``x[i]``; "build slice"; "import", "import from"; "null"; or "other".
    value : the name or constant; of calls the number of arguments, of a slice that is built that of its parts.
    offset : where it stands, as in `frame.f_lasti`.
    effect : by how much the stack grows.
    above : of calls, what lies on the stack above what is called.
    jumps, is_target : whether control may go elsewhere from here, and may come from elsewhere.
    """

    kind: str
    value: Any
    offset: int
    effect: int
    above: int = 0
    jumps: bool = False
    is_target: bool = False


@functools.cache
def unread() -> str | None:
    """Why code cannot be read on this Python; None where it can."""
    reason = versions.untried("Python")
    return None if reason is None else f"cannot be read: {reason}"


@functools.lru_cache(maxsize=4096)  # what code says of itself does not change, and a lambda's is asked at every call
def steps_of(code: types.CodeType) -> tuple[Step, ...]:
    """What this code does, without the functions in it."""
    return tuple(_steps(code))


def _steps(code: types.CodeType) -> Iterator[Step]:
    effect, is_target = 0, False  # of what is left out before a step
    for given in dis.get_instructions(code):
        name, value, offset = given.opname, given.argval, given.offset
        effect += dis.stack_effect(given.opcode, given.arg, jump=False)
        is_target |= given.is_jump_target
        if name in _NOTHING or name == "PRECALL":
            continue
        if name in _PAIRS:
            for kind, part in zip(_PAIRS[name], value, strict=True):
                yield Step(kind, part, offset, -1 if kind.startswith("set") else 1, is_target=is_target)
                is_target = False
        else:
            kind, above = _KINDS.get(name, "other"), 0
            if name.startswith("INPLACE_") or (name == "BINARY_OP" and given.argrepr.endswith("=")):
                kind = "in place"
            elif name == "BINARY_OP" and given.argrepr == "[]":
                kind = "subscript"
            elif name == "BUILD_SLICE":
                kind, value = "build slice", given.arg
            elif kind == "call":
                value, above = given.arg, (given.arg or 0) + (name in _NAMES_ABOVE)
            jumps = given.opcode in dis.hasjrel or given.opcode in dis.hasjabs
            yield Step(kind, value, offset, effect, above, jumps, is_target)
        effect, is_target = 0, False


def place_of(steps: tuple[Step, ...], last: int) -> int:
    """The place of the step at which a frame stands, by its `f_lasti`: that may lie behind the step's offset, in its
    cache (3.11, 3.12)."""
    return bisect.bisect_right(steps, last, key=operator.attrgetter("offset")) - 1


def parts_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """This code and that of the functions in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from parts_of(const)


def arguments(steps: tuple[Step, ...], place: int) -> int | None:
    """How many arguments what the step at `place` reads is called with; None if it is not seen to be called."""
    height = 0  # of the stack above what is called
    for step in steps[place + 1 :]:
        if step.kind == "null" and height == 0 and _NULL_ABOVE:
            continue
        if step.kind == "call" and height == step.above:
            return step.value
        if step.jumps:
            return None
        height += step.effect
        if height < 0:
            return None
    return None


def beginning(steps: tuple[Step, ...], call: int) -> int | None:
    """Where the steps begin that read what the call at this place calls, and its arguments; None where control may come
    or go in between."""
    height = 0
    for first in range(call, -1, -1):
        step = steps[first]
        if step.jumps:
            return None
        height += step.effect
        if height == 1:
            return first
        if step.is_target:  # to within the statement, which is not the one way to the call then
            return None
    return None
