"""Programs of a layer's two walks: messages, what a node adds to their sums, and the gradients to all of it.

A value that the backward pass would gather rows for again is left by the forward pass where that is smaller: for a
destination the sum over its edges of what its gradient is multiplied by. The sign of an edge's ReLU, four to a byte,
was tried too: GINEConv's walks took 466 us for 503, FiLMConv's 683 for 607 (H200).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from gnnaccel.program.derivatives import adjoints, factor_over, seeded
from gnnaccel.program.language import Expression
from gnnaccel.program.program import Builder, Leaf, Program, Value, program_of, reached_from

Walk = tuple[Program, tuple[str, ...]]  # a program, and the names of its operands


class Forms(NamedTuple):
    """A message of u, v, e("edge") and c("eps"), "sum" or "mean" of it, what is added for each node, of v and c, and
    the names of u and v in the order of their gradients."""

    message: Expression
    reduce: str
    own: Expression | None
    names: tuple[str, ...]


class Plan(NamedTuple):
    """The walks of a layer. Operands are named as the leaves are, and "grad": of the result; "scaled": that by degrees
    for a mean; "degrees"; and `kept`.

    forward : out, and behind it what is `kept` for the backward pass.
    of_parts : over the reversed edges, a gradient for each part.
    of_edge : the gradient to e("edge"), where there is one.
    by_edge : `of_parts` where an edge gives its source the gradient that it has itself, "of edge": as rows that are
        there it takes no gather. None elsewhere.
    in_place : `of_parts` for gradients that are written in place of the parts: without those parts whose rows other
        rows read, whose gradients are products of two operands, to be made `after` it. None where that does not do.
    """

    forward: Walk
    kept: tuple[str, ...] = ()
    of_parts: Walk | None = None
    of_edge: Walk | None = None
    reads_parts: bool = False
    reads_degrees: bool = False
    in_place: Walk | None = None
    after: tuple[tuple[str, tuple[str, ...]], ...] = ()
    by_edge: Walk | None = None


class _Leaves:
    """A builder whose leaves come one by one, by kind and name."""

    def __init__(self, num_feats: int, builder: Builder, names: list[tuple[str, str]]):
        self.width, self.builder, self.names = num_feats, builder, names

    def number(self, kind: str, name: str) -> int:
        if (kind, name) not in self.names:
            self.names.append((kind, name))
            features = (1,) if kind == "c" or name == "degrees" else (self.width,)
            self.builder.leaves = (*self.builder.leaves, Leaf(kind, features))
        return self.names.index((kind, name))

    def leaf(self, kind: str, name: str) -> Value:
        return self.builder.leaf(self.number(kind, name))

    def values(self, program: Program, leaves: list[tuple[str, str]]) -> Value:
        """The value of a program's output."""
        numbers = [self.number(*leaf) for leaf in leaves]
        return self.builder.again(program, numbers)[program.outputs[0].step]

    def walk(self, outputs: list) -> Walk:
        program, kept = self.builder.program(outputs)
        return program, tuple(self.names[i][1] for i in kept)


@functools.lru_cache(maxsize=256)
def plan_of(forms: Forms, num_feats: int, keep: bool) -> Plan:
    """The walks of a layer of so many features, with those of the backward pass if `keep`.

    Raises NotImplementedError for a message whose gradient to destinations is not that of the sum times something.
    """
    message, reduce, own, names = forms
    base, leaves = _program(message, reduce, num_feats)
    b, ((value, seed, gradient),) = seeded(base, (True,))
    scaled = "grad" if reduce == "sum" else "scaled"
    here = _Leaves(num_feats, b, [*leaves, ("v", scaled)])
    owned = None if own is None else _program(own, "row", num_feats)
    first = (value, reduce) if owned is None else (value, reduce, here.values(*owned))
    if not keep:
        return Plan(here.walk([first]))
    found = {leaves[number]: each for number, each in adjoints(b, [(value, seed)]).items()}
    outputs: list = [first]
    kept: list[str] = []
    back = _Leaves(num_feats, Builder([]), [])
    sums, rows = {}, {}
    for (kind, name), each in found.items():
        if kind == "u":
            sums[name] = _copied(here, each, back, {"u": "v", "v": "u", "e": "e", "c": "c"})
        elif kind == "v":
            factor = factor_over(b, each, gradient)
            if factor is None:
                raise NotImplementedError(f"{message}: gradient to v.{name}")
            if factor.of_edge:
                kept.append(f"sum for {name}")
                outputs.append((factor, "sum"))
                times = back.leaf("v", kept[-1])
            else:
                times = back.builder.mul(_copied(here, factor, back, {"v": "v", "c": "c"}), back.leaf("v", "degrees"))
            rows[name] = back.builder.mul(back.leaf("v", scaled), times)
    if owned is not None:
        start = (back.values(*owned), back.leaf("v", "grad"))
        for number, each in adjoints(back.builder, [start]).items():
            kind, name = back.names[number]
            if kind == "v":
                rows[name] = back.builder.add(rows[name], each) if name in rows else each

    def into(sums: dict[str, Value]) -> list[tuple]:
        """The gradients to all parts."""
        added = {name: (rows[name],) if name in rows else () for name in names}
        return [(sums[n], "sum", *added[n]) if n in sums else (rows[n], "row") for n in names]

    of_parts = back.walk(into(sums))
    of_edge = by_edge = None
    for (kind, _), each in found.items():
        if kind == "e":
            of_edge = here.walk([(each, "none")])
            if all(other is each for (kind, _), other in found.items() if kind == "u"):
                by_edge = back.walk(into(dict.fromkeys(sums, back.leaf("e", "of edge"))))
    read = {*of_parts[1], *(of_edge[1] if of_edge else ())}
    reads = (not read.isdisjoint(names), "degrees" in read)
    in_place = _in_place(back, dict(zip(names, into(sums), strict=True)))
    return Plan(here.walk(outputs), tuple(kept), of_parts, of_edge, *reads, *in_place, by_edge)


def _in_place(back: _Leaves, into: dict[str, tuple]) -> tuple[Walk | None, tuple]:
    """`Plan.in_place` and `Plan.after`."""
    sums = [output[0] for output in into.values() if output[1] == "sum"]
    read = [back.names[x.numbers[0]] for x in reached_from(sums) if x.op == "leaf"]
    after: dict[str, tuple[str, ...]] = {}
    for name, (value, reduce, *_) in into.items():
        if ("v", name) in read and reduce == "row":  # by all pieces of a row, of which the first has written it
            return None, ()
        if ("u", name) in read:
            leaves = tuple(back.names[a.numbers[0]][1] for a in value.args if a.op == "leaf")
            if reduce != "row" or value.op != "mul" or len(leaves) != 2 or "degrees" in leaves:
                return None, ()
            after[name] = leaves
    left = [output for name, output in into.items() if name not in after]
    return (back.walk(left) if sums else None), tuple(after.items())


def _program(expression: Expression, reduce: str, num_feats: int) -> tuple[Program, list]:
    shapes = tuple((leaf, (1,) if leaf[0] == "c" else (num_feats,)) for leaf in expression.leaves)
    return program_of(((expression, reduce),), shapes)


def _copied(here: _Leaves, value: Value, there: _Leaves, kinds: dict[str, str]) -> Value:
    """`value` of another builder, its leaves of other kinds."""
    if value.op == "leaf":
        kind, name = here.names[value.numbers[0]]
        return there.leaf(kinds[kind], name)
    args = tuple(_copied(here, a, there, kinds) for a in value.args)
    return there.builder.make(value.op, args, value.numbers, value.features)
