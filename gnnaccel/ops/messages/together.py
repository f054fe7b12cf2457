"""Programs on one graph that a recording runs one after the other, run in one walk."""

from __future__ import annotations

import functools
from collections.abc import Callable

from gnnaccel.program.program import Builder, Leaf, Program
from gnnaccel.recording import Call, Recorded, Slot, slots_in


def together(recorded: Recorded, evaluate: Callable) -> Recorded:
    """The recording with calls of evaluate(graph, program, operands, dtype) that do not need each other as one."""
    calls = list(recorded.calls)
    # Of several results each may be differentiated by itself: they have one node if they are of the same tensors.
    graded = None if len(slots_in(recorded.result)) == 1 else recorded.graded
    at = 0
    while at < len(calls):
        if calls[at].function is evaluate:
            later = at + 1
            while later < len(calls):
                both = _both(calls, at, later, evaluate, graded)
                if both is not None:
                    calls[at], calls[later : later + 1] = both, []
                else:
                    later += 1
        at += 1
    return recorded._replace(calls=tuple(calls))


def _both(calls: list[Call], first: int, second: int, evaluate: Callable, graded: frozenset[int] | None) -> Call | None:
    """One call in place of two, where the first is; None if there is none. graded : if both must be of the same tensors
    among these."""
    one, other = calls[first], calls[second]
    if other.function is not evaluate or one.args[0] != other.args[0] or one.args[3] != other.args[3]:
        return None
    made = {place for call in calls[first:second] for place in call.results}
    if made.intersection(slots_in(other.args)):
        return None
    programs = one.args[1], other.args[1]
    if not all(isinstance(x, Slot) for call in (one, other) for x in call.args[2]):
        return None
    if graded is not None and graded.intersection(slots_in(one.args)) != graded.intersection(slots_in(other.args)):
        return None
    joined = join(*programs, tuple(x.number for x in one.args[2]), tuple(x.number for x in other.args[2]))
    if joined is None:
        return None
    program, operands = joined
    args = (one.args[0], program, [Slot(n) for n in operands], one.args[3])
    return Call(evaluate, args, {}, one.results + other.results, False)


@functools.lru_cache(maxsize=256)
def join(
    one: Program, other: Program, operands: tuple[int, ...], others: tuple[int, ...]
) -> tuple[Program, list[int]] | None:
    """The program that has the outputs of two, and what its leaves are; operands: numbers, equal for what is one.

    None for two that a walk cannot make: a maximum has no derivative beside a reduction that edges read back.
    """
    inside = any(step.op.startswith("over_") for program in (one, other) for step in program.steps)
    if inside and any(o.reduce in ("max", "min") for program in (one, other) for o in program.outputs):
        return None
    found: dict[tuple[int, Leaf], int] = {}
    for program, given in ((one, operands), (other, others)):
        for leaf, number in zip(program.leaves, given, strict=True):
            found.setdefault((number, leaf), len(found))
    b = Builder([leaf for _, leaf in found])
    outputs = []
    for program, given in ((one, operands), (other, others)):
        values = b.again(program, [found[key] for key in zip(given, program.leaves, strict=True)])
        outputs += [(values[o.step], o.reduce) for o in program.outputs]
    made, kept = b.program(outputs)
    numbers = [number for number, _ in found]
    return made, [numbers[i] for i in kept]
