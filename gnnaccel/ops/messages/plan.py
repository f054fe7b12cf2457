"""How a program that reduces over edges inside, or to both ends, is run: walks over the edges, and steps on rows.

On CPUs one walk makes all that is of the edges of a destination, which lie in a tile there. On CUDA a walk makes all
reductions that need nothing but what was made before it, and sums that are weighted by a softmax are made in the walk
that finds the softmax's own sums. Sums for sources are made last, over the reversed edges:
what they need of destinations is made before, and so is what is narrow of edges, if fewer bytes are moved then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from gnnaccel.program.layers import replaced
from gnnaccel.program.program import Builder, Leaf, Program, Value, reached_from

_SIDES = {"u": "v", "v": "u", "e": "e", "c": "c"}  # of the same edges reversed
_TINY = 1e-38  # instead of a sum of no weights
_WIDE_BYTES = torch.float32.itemsize  # of what is made on the way


class Action(NamedTuple):
    """A walk over the edges or, `of_rows`, steps on rows of destinations.

    operands, results : slots, which the program's operands take first.
    outputs : of each result the number of the output of the whole program that it is; -1: it is made on the way.
    reversed : it walks over the reversed edges.
    """

    program: Program
    operands: tuple[int, ...]
    results: tuple[int, ...]
    outputs: tuple[int, ...]
    of_rows: bool = False
    reversed: bool = False


class Plan(NamedTuple):
    """What is run for a program.

    outputs : the slot of each output. kept : the slots of `kept_values`, -1 of what is not made.
    """

    actions: tuple[Action, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...]
    slots: int


@functools.lru_cache(maxsize=1024)
def plan_of(program: Program, whole: bool, sizes: tuple[int, ...], keep: tuple[tuple[str, int], ...] = ()) -> Plan:
    """The plan of a program.

    whole : the kernel takes all edges of a destination together; else it makes sums weighted by a softmax, and
        logarithms of sums of exponentials.
    sizes : bytes of a number of each operand.
    keep : what a derivative shall find (`kept_values`).
    """
    return _Planner(program, whole, sizes).plan(keep)


class _Planner:
    def __init__(self, program: Program, whole: bool, sizes: tuple[int, ...]):
        self.leaves, self.whole, self.sizes = program.leaves, whole, sizes
        self.b = b = Builder(program.leaves)
        self.values = b.again(program, range(len(program.leaves)))
        self.results = [(self.values[o.step], o.reduce) for o in program.outputs]
        if whole:
            self._apart()
        self.slot: dict[int, int] = {b.leaf(n).number: n for n in range(len(program.leaves))}
        self.kinds: dict[int, str] = {n: leaf.kind for n, leaf in enumerate(program.leaves)}
        self.features = {n: leaf.features for n, leaf in enumerate(program.leaves)}
        self.actions: list[Action] = []
        self.outputs = [-1] * len(program.outputs)

    def _apart(self) -> None:
        """Logarithms of sums of exponentials as sums; sums weighted by a softmax are divided at last."""
        b, weights = self.b, []
        done: dict[int, Value] = {}
        for value in b.values():
            if value.op == "over_logsumexp":
                shifted = value.args[0]  # by the greatest
                raised = b.unary("exp", replaced(b, shifted, done))
                total = b.over("sum", raised)
                weights.append((b.unary("exp", b.sub(shifted, value)), raised, total))
                done[value.number] = b.unary("log", total)
        for n, (value, reduce) in enumerate(self.results):
            for weight, raised, total in weights if reduce == "sum" else ():
                rest = _without(b, value, weight)
                if rest is not None:
                    total = rest.of(b, b.extremum("max", total, _TINY), alone=True)
                    self.results[n] = b.div(b.over("sum", rest.of(b, raised)), total), "row"
                    break
        self.results = [(replaced(b, value, done), reduce) for value, reduce in self.results]
        self.values = [replaced(b, value, done) for value in self.values]

    def plan(self, keep: Sequence[tuple[str, int]]) -> Plan:
        outputs = self.results
        over = [self.values[n] for what, n in keep if what == "over"]
        here = [(n, value, reduce) for n, (value, reduce) in enumerate(outputs) if reduce != "source"]
        there = [(n, value) for n, (value, reduce) in enumerate(outputs) if reduce == "source"]
        stored = self._stored([value for _, value in there], [value for _, value, _ in here]) if there else []
        rows = self._rows_of_sources([value for _, value in there], stored) if there else []
        if self.whole:
            self._walk_of_all(here, [*rows, *over], stored)
        else:
            rows += [value for value in over if not value.op.startswith("over_")]
            self._rows([value for value in rows if self.level(value) == 0])
            self._walks(here, over, stored, rows)
        if there:
            self._by_source(there)
        kept = tuple(self._kept(what, n) for what, n in keep)
        return Plan(tuple(self.actions), tuple(self.outputs), kept, len(self.kinds))

    def _kept(self, what: str, n: int) -> int:
        return self.outputs[n] if what == "out" else self.slot.get(self.values[n].number, -1)

    # Slots.

    def _new(self, value: Value, kind: str) -> int:
        made = len(self.kinds)
        self.kinds[made], self.features[made] = kind, value.features
        self.slot.setdefault(value.number, made)
        return made

    def _cut(self, outputs: Iterable[tuple], swap: bool = False) -> tuple[Program, tuple[int, ...]]:
        """The program of outputs (value, reduce, own, by) whose leaves are the slots there are, and those."""
        slots: list[int] = []
        b = Builder(())
        done: dict[int, Value] = {}

        def again(value: Value | None) -> Value | None:
            if value is None:
                return None
            found = done.get(value.number)
            if found is None:
                at = self.slot.get(value.number)
                if at is not None:
                    kind = _SIDES[self.kinds[at]] if swap else self.kinds[at]
                    b.leaves = (*b.leaves, Leaf(kind, self.features[at]))
                    slots.append(at)
                    found = b.leaf(len(slots) - 1)
                else:
                    args = tuple(again(a) for a in value.args)
                    found = b.make(value.op, args, value.numbers, value.features)  # type: ignore[arg-type]
                done[value.number] = found
            return found

        made, kept = b.program([(again(v), reduce, *map(again, more)) for v, reduce, *more in outputs])
        return made, tuple(slots[i] for i in kept)

    # Walks over the graph itself.

    @functools.cached_property
    def level(self) -> Callable[[Value], int]:
        @functools.cache
        def level(value: Value) -> int:
            below = max(map(level, value.args), default=0)
            return below + 1 if value.op.startswith("over_") else below

        return level

    def _walk_of_all(self, outputs: list, rows: list[Value], stored: list[Value]) -> None:
        made: list[tuple[Value | None, tuple, int]] = [(None, (value, reduce), n) for n, value, reduce in outputs]
        made += [(value, (value, "row"), -1) for value in dict.fromkeys(rows) if value.number not in self.slot]
        made += [(value, (value, "none"), -1) for value in stored]
        if made:
            self._walk(made)

    def _walks(self, outputs: list, over: list[Value], stored: list[Value], rows: list[Value]) -> None:
        level = self.level
        wanted: dict[int, Value] = {}
        for value in reached_from([*(v for _, v, _ in outputs), *over, *stored, *rows]):
            if value.op.startswith("over_"):
                wanted[value.number] = value
        depth = 1 + max([level(v) for v in [*wanted.values(), *(v for _, v, _ in outputs), *stored]], default=0)
        moved = self._fused(wanted, outputs)
        results = {value.number: n for n, value, reduce in outputs if reduce == "row"}
        for k in range(depth):
            made: list[tuple[Value | None, tuple, int]] = []  # whose slot it is, output of a walk, of the program
            for value in wanted.values():
                soft = moved.get(value.number)
                if (level(value.args[0]) if soft is None else 0) == k:
                    output = (value.args[0], value.op[5:]) if soft is None else (soft[0], soft[1], None, soft[2])
                    made.append((value, output, results.get(value.number, -1)))
            for n, value, reduce in outputs:
                if reduce == "row":
                    continue
                soft = moved.get(~n)
                if (level(value) if soft is None else 0) == k:
                    same = self.b.over("sum", value) if reduce == "sum" and value.of_edge else None
                    if same is not None and same.number in wanted:
                        continue
                    made.append((None, (value, reduce) if soft is None else (soft[0], soft[1], None, soft[2]), n))
            for value in stored:
                if level(value) == k:
                    made.append((value, (value, "none"), -1))
            needed = [v for _, output, _ in made for v in output if isinstance(v, Value)]
            self._rows(self._made_of_rows(needed))
            if made:
                self._walk(made)
            if k + 1 == depth:
                self._rows([*rows, *(v for _, v, reduce in outputs if reduce == "row")])
        for n, value, reduce in outputs:
            if reduce == "row":
                self.outputs[n] = self.slot[value.number]
            elif reduce == "sum" and self.outputs[n] < 0:
                self.outputs[n] = self.slot[self.b.over("sum", value).number]

    def _walk(self, made: list, reversed_: bool = False) -> None:
        program, slots = self._cut([output for _, output, _ in made], reversed_)
        results = []
        for value, (result, reduce, *_), number in made:
            kind = "e" if reduce == "none" else "u" if reversed_ else "v"
            stands = result if value is None else value
            if value is None:  # an output, whose slot is nobody's operand
                results.append(len(self.kinds))
                self.kinds[results[-1]], self.features[results[-1]] = kind, stands.features
                self.outputs[number] = results[-1]
            else:
                results.append(self._new(value, kind))
        numbers = tuple(number for *_, number in made)
        self.actions.append(Action(program, slots, tuple(results), numbers, reversed=reversed_))

    def _made_of_rows(self, values: list[Value]) -> list[Value]:
        """Values of destinations, made of reductions, that edges read."""
        found = {v.number: v for v in values if not v.of_edge and v.number not in self.slot and self._has_over(v)}
        for value in reached_from(values, self.slot):
            for arg in value.args:
                if value.of_edge and not arg.of_edge and arg.number not in self.slot and self._has_over(arg):
                    found[arg.number] = arg
        return [v for v in found.values() if not v.op.startswith("over_")]

    def _has_over(self, value: Value) -> bool:
        return any(v.op.startswith("over_") for v in reached_from([value]))

    def _rows(self, values: list[Value]) -> None:
        values = [v for v in dict.fromkeys(values) if v.number not in self.slot]
        if not values:
            return
        program, slots = self._cut([(value, "row") for value in values])
        results = tuple(self._new(value, "v") for value in values)
        self.actions.append(Action(program, slots, results, (-1,) * len(values), of_rows=True))

    # A softmax's sums in one walk.

    def _fused(self, wanted: dict[int, Value], outputs: list) -> dict[int, tuple[Value, str, Value | None]]:
        """What the walk of a softmax's scores makes at once: by the number of its value, or ~ that of an output, what
        is reduced, how, and of a weighted sum the scores in its features."""
        found: dict[int, tuple[Value, str, Value | None]] = {}
        weights = []
        for value in wanted.values():
            if value.op != "over_logsumexp":
                continue
            scores, top = value.args[0].args
            if self.level(scores) == 0:
                weights.append((self.b.unary("exp", self.b.sub(value.args[0], value)), scores))
                found[top.number] = scores, "top", None
                found[value.number] = scores, "logtotal", None
        sums = [(v.number, v.args[0]) for v in wanted.values() if v.op == "over_sum"]
        sums += [(~n, v) for n, v, reduce in outputs if reduce == "sum"]
        for number, value in sums:
            for weight, scores in weights:
                rest = _without(self.b, value, weight)
                if rest is not None and (rest.factor is None or self.level(rest.factor) == 0):
                    found[number] = rest.alone(self.b), "soft", rest.of(self.b, scores, alone=True)
                    break
        return found

    # Sums for sources.

    def _by_source(self, outputs: list) -> None:
        self._walk([(None, (value, "sum"), n) for n, value in outputs], True)

    def _rows_of_sources(self, outputs: list[Value], stored: list[Value]) -> list[Value]:
        """Values of destinations to be made once, and not on each edge: of reductions, or narrower than what they are
        made of."""
        reached = reached_from(outputs, {v.number: 0 for v in stored})
        looked = [*outputs, *(arg for value in reached if value.of_edge for arg in value.args)]
        found = {}
        for value in looked:
            if not value.of_edge and value.op != "leaf" and value.number not in self.slot:
                read = sum(v.width for v in reached_from([value]) if v.op == "leaf" and self._kind(v) == "v")
                if read > value.width or self._has_over(value):
                    found[value.number] = value
        return list(found.values())

    def _kind(self, leaf: Value) -> str:
        return self.leaves[leaf.numbers[0]].kind

    def _stored(self, outputs: list[Value], here: list[Value]) -> list[Value]:
        """Narrow values of edges that are stored for the walk over the reversed edges."""
        widest = max(v.width for v in outputs)
        found: dict[int, Value] = {}

        def look(value: Value) -> None:
            if not value.of_edge or value.op == "leaf":
                return
            if value.width < widest and value.op not in ("reshape", "expand"):
                found[value.number] = value
                return
            for arg in value.args:
                look(arg)

        for value in outputs:
            look(value)
        cuts = [v for v in found.values() if any(a.op == "leaf" for a in reached_from([v]))]
        if not cuts:
            return []
        # The walk over the graph itself reads for the cuts what it reads anyway, or more.
        rows = {v.number: 0 for v in self._rows_of_sources(outputs, [])}
        apart = self._read(outputs, rows, "v") + self._read(here, {}, "u")
        extra = sum(2 * _WIDE_BYTES * v.width for v in cuts)
        joined = self._read(outputs, {v.number: 0 for v in cuts}, "v") + self._read([*here, *cuts], {}, "u") + extra
        return cuts if joined < apart else []

    def _read(self, values: list[Value], cuts: dict[int, int], gathered: str) -> int:
        """Bytes that an edge's values take to read: rows of `gathered` ends and of the edge itself."""
        leaves = [v for v in reached_from(values, cuts) if v.op == "leaf" and v.number not in cuts]
        return sum(v.width * self.sizes[v.numbers[0]] for v in leaves if self._kind(v) in (gathered, "e"))


class _Rest(NamedTuple):
    """What is left of a product without one of its factors.

    factor : None: nothing. shapes : through which steps, reshapes and an expand, that factor went.
    """

    features: tuple[int, ...]
    factor: Value | None
    shapes: tuple[Value, ...]

    def of(self, b: Builder, value: Value, alone: bool = False) -> Value:
        """The product with `value` in the factor's place; that value `alone`, in the features of the product."""
        for step in self.shapes:
            value = b.make(step.op, (value,), step.numbers, step.features)
        return value if alone or self.factor is None else b.mul(value, self.factor)

    def alone(self, b: Builder) -> Value:
        return b.fill(1.0, self.features) if self.factor is None else self.factor


def _without(b: Builder, value: Value, weight: Value) -> _Rest | None:
    """What is left of a product without its factor `weight`; None if it is none."""
    if value is weight:
        return _Rest(value.features, None, ())
    held = [any(v is weight for v in reached_from([a])) for a in value.args]
    if sum(held) != 1:
        return None
    at = held.index(True)
    inner = _without(b, value.args[at], weight)
    if inner is None:
        return None
    if value.op == "mul":
        other = value.args[1 - at]
        return inner._replace(factor=other if inner.factor is None else b.mul(inner.factor, other))
    if value.op == "div" and at == 0:
        return inner._replace(factor=b.div(inner.alone(b), value.args[1]))
    if value.op in ("mul_p", "div_p", "neg"):
        return inner._replace(factor=b.make(value.op, (inner.alone(b),), value.numbers, value.features))
    if value.op in ("reshape", "expand"):
        rest = None if inner.factor is None else b.make(value.op, (inner.factor,), value.numbers, value.features)
        return _Rest(value.features, rest, (*inner.shapes, value))
    return None


def is_plain(program: Program) -> bool:
    """True for a program that one walk is all of."""
    inside = any(step.op.startswith("over_") for step in program.steps)
    return not inside and all(output.reduce not in ("row", "source") for output in program.outputs)
