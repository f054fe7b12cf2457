"""Bytecode is read alike on every Python: kinds of steps, arguments of calls, where a statement begins."""

import sys
import types

import pytest

from gnnaccel import bytecode, versions

# An expression of f, a function, x, y, self and k=... -> how many arguments `f` is called with there, None for unseen.
CALLS = {
    "f(x)": 1,
    "f(x, y)": 2,
    "f(x, y, 0.5)": 3,
    "f(x, k=1)": 2,
    "f(x + y * 2, y)": 2,
    "f(x[0], [x, y], {'a': x})": 3,
    "f(f_(x), y.sum(0))": 2,
    "f(*x)": None,
    "f(x if y else 0)": None,
    "[f, x]": None,
    "self.f(x, y)": 2,
    "self.a.f(x, k=y)": 2,
    "x.f": None,
    "x + f(y, (x, y))": 2,
    "y[f(x)]": 1,
}
# A statement -> kinds of steps that it has, of those below.
KINDS = {
    "x = y": set(),
    "x += y": {"in place"},
    "x[0] = y": {"in place"},
    "x[0:1] = y": {"in place"},
    "del x[0]": {"in place"},
    "x[0] += y": {"in place", "subscript"},
    "x @= y": {"in place"},
    "x = y == 1": set(),
    "x.data = y": {"set attribute"},
    "y = x[0]": {"subscript"},
    "import os": {"import"},
    "from os import path": {"import", "import from"},
    "y = f(*x)": {"call with *"},
    "y = f(**x)": {"call with *"},
    "y = f(x)": {"call"},
    "y = x.f(x, k=1)": {"call", "attribute"},
    "y = super().f": {"attribute"},
    "G = 1": {"set global"},
    "y = G": {"global"},
}
LOOKED_AT = {"in place", "subscript", "set attribute", "import", "import from", "call with *", "call", "attribute"}
LOOKED_AT |= {"set global", "global"}


def code_of(body: str) -> types.CodeType:
    source = f"def outer(f, f_, __class__):\n def inner(self, x, y):\n  global G\n  {body}\n return inner\n"
    found = compile(source, "", "exec")
    for _ in range(2):
        found = next(const for const in found.co_consts if isinstance(const, types.CodeType))
    return found


@pytest.mark.parametrize("expression", CALLS)
def test_arguments_of_a_call(expression):
    steps = bytecode.steps_of(code_of(f"return {expression}"))
    place = next(i for i, step in enumerate(steps) if step.value == "f" and step.kind in ("free", "attribute"))
    assert bytecode.arguments(steps, place) == CALLS[expression]


@pytest.mark.parametrize("statement", KINDS)
def test_kinds_of_steps(statement):
    kinds = {step.kind for step in bytecode.steps_of(code_of(statement))} & LOOKED_AT
    if statement == "y = super().f":  # how super is read and called differs
        kinds -= {"global", "call"}
    assert kinds == KINDS[statement]


@pytest.mark.parametrize("call", ["f(x, y)", "f(x, k=y)", "self.a.f(x)", "f(x[0], *y)", "f_(f(x))"])
def test_beginning_of_a_call(call):
    """The steps behind the assignment before it are those of the call."""
    steps = bytecode.steps_of(code_of(f"y = x; y = {call}"))
    at = max(i for i, step in enumerate(steps) if step.kind in ("call", "call with *"))
    first = bytecode.beginning(steps, at)
    assert steps[first - 1].kind == "set local"
    assert next(step.value for step in steps[first:at] if step.kind != "null") in ("f", "f_", "self")


def test_no_beginning_behind_a_jump():
    steps = bytecode.steps_of(code_of("y = f(x if y else 0)"))
    at = next(i for i, step in enumerate(steps) if step.kind == "call")
    assert bytecode.beginning(steps, at) is None


def test_a_frame_at_a_call_stands_at_its_step():
    def look(*args, **kwargs):
        frame = sys._getframe(1)
        steps = bytecode.steps_of(frame.f_code)
        return steps[bytecode.place_of(steps, frame.f_lasti)].kind

    assert [look(), look(1, 2), look(1, k=2), look(*(1, 2))] == ["call", "call", "call", "call with *"]


def test_parts_are_the_functions_within():
    parts = list(bytecode.parts_of(compile("def a():\n def b(): pass\nc = lambda: 0\n", "", "exec")))
    assert [part.co_name for part in parts] == ["<module>", "a", "b", "<lambda>"]


def test_an_untried_python_is_not_read(monkeypatch):
    assert bytecode.unread.__wrapped__() is None
    monkeypatch.setitem(versions.TRIED, "Python", ("3.8", "3.9"))
    assert "never tried" in bytecode.unread.__wrapped__()
