"""Derivatives of programs that reduce over edges inside, as a softmax does: programs of the same language.

A value of a destination that edges read back has as its gradient the sum of what they give. Such a sum is one more
walk over the edges, unless it is a product with a sum that the program has made: the gradient through a softmax reads
the layer's own result.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from gnnaccel.program.derivatives import adjoints
from gnnaccel.program.program import Builder, Leaf, Program, Unfit, Value

_LEAF_OF = {"none": "e", "source": "u"}  # where a gradient of an output is read; else at the destination


class Derivative(NamedTuple):
    """The gradients of a program.

    operands : numbers of its leaves: of the program's leaves, behind them of the gradients of its outputs, behind them
        of its kept values.
    targets : whose gradient each output is; that of a leaf that all edges share is one for each destination, or edge.
    """

    program: Program
    operands: list[int]
    targets: list[int]


def kept_values(program: Program) -> list[tuple[str, int]]:
    """What a derivative can read instead of making it: ("over", step) of a reduction, ("out", output) of a sum."""
    over = [("over", n) for n, step in enumerate(program.steps) if step.op.startswith("over_")]
    return [*over, *(("out", n) for n, output in enumerate(program.outputs) if output.reduce == "sum")]


@functools.lru_cache(maxsize=1024)
def derivative(program: Program, wanted: tuple[bool, ...], given: tuple[bool, ...], keeps: bool) -> Derivative:
    """The program of the gradients to the `wanted` leaves, where outputs that are `given` have one.

    keeps : it reads the `kept_values`, instead of making them again.

    A greatest value that edges read back has no derivative: it is one that a softmax is shifted by.

    Raises
    ------
    Unfit
        For an output that is a maximum or minimum.
    """
    kept = kept_values(program) if keeps else []
    leaves = list(program.leaves)
    for output in program.outputs:
        leaves.append(Leaf(_LEAF_OF.get(output.reduce, "v"), program.steps[output.step].features))
    for what, n in kept:
        step = n if what == "over" else program.outputs[n].step
        leaves.append(Leaf("v", program.steps[step].features))
    b = Builder(leaves)
    values = b.again(program, range(len(program.leaves)))
    results = [_result(b, values[output.step], output.reduce) for output in program.outputs]
    sums = _Sums(b)
    seeds = []
    for number, (value, has) in enumerate(zip(results, given, strict=True)):
        if has:
            seed = b.leaf(len(program.leaves) + number)
            seeds.append((value, sums.of(seed) if seed.of_edge and not value.of_edge else seed))
    found = adjoints(b, seeds, sums.of)
    outputs, targets = [], []
    for number, leaf in enumerate(program.leaves):
        if wanted[number] and number in found:
            reduce = {"e": "none", "u": "source"}.get(leaf.kind, "row")
            outputs.append((found[number], reduce))
            targets.append(number)
    first = len(program.leaves) + len(program.outputs)
    stands = {}
    for place, (what, n) in enumerate(kept):
        value = values[n] if what == "over" else results[n]
        stands[value.number] = b.leaf(first + place)
    made, operands = b.program([(replaced(b, value, stands), reduce) for value, reduce in outputs])
    return Derivative(made, operands, targets)


def _result(b: Builder, value: Value, reduce: str) -> Value:
    """The value of an output: of an edge, or of a destination."""
    if reduce == "sum":
        return b.over("sum", value)
    if reduce == "mean":
        return b.div(b.over("sum", value), b.extremum("max", b.degrees(), 1.0))
    if reduce in ("none", "row", "source"):
        return value
    raise Unfit(f"messages: {reduce} beside a reduction that edges read back")


def replaced(b: Builder, value: Value, stands: dict[int, Value]) -> Value:
    """A value, made of what `stands` for some that it was made of; `stands` grows by what was made."""
    found = stands.get(value.number)
    if found is None:
        args = tuple(replaced(b, a, stands) for a in value.args)
        same = all(x is y for x, y in zip(args, value.args, strict=True))
        found = stands[value.number] = value if same else b.make(value.op, args, value.numbers, value.features)
    return found


class _Sums:
    """Sums over edges, by way of those that a builder has already."""

    def __init__(self, b: Builder):
        self.b = b
        self.known = {}
        for value in b.values():
            if value.op == "over_sum":
                factors, scale = _factors(value.args[0])
                if scale == 1:
                    self.known[_key(factors)] = value

    def of(self, x: Value) -> Value:
        """The sum of `x` over the edges of each destination."""
        b = self.b
        if x.op in ("add", "sub"):
            return getattr(b, x.op)(self.of(x.args[0]), self.of(x.args[1]))
        if x.op == "neg":
            return b.unary("neg", self.of(x.args[0]))
        if not x.of_edge:
            return b.over("sum", x)
        found = self._of_known(x)
        if found is not None:
            return found
        if x.op in ("fold", "reshape"):  # of rows, which are fewer than edges
            inner = self.of(x.args[0])
            return b.fold(inner, x.features) if x.op == "fold" else b.reshape(inner, x.features)
        return b.over("sum", x)

    def _of_known(self, x: Value) -> Value | None:
        """The sum of a product of a destination's values and something whose sum is known."""
        b = self.b
        factors, scale = _factors(x)
        rows, others = _parted(factors)
        found = self.known.get(_key(others))
        if found is not None and found.width == x.width:
            return _times(b, b.reshape(found, x.features), rows, scale, x.features)
        for fold, rule in others:
            if fold.op != "fold" or rule:
                continue
            inside, scale_inside = _factors(fold.args[0])
            rows_inside, others_inside = _parted(inside)
            given = _rule_of(fold)
            # What stands beside a sum over features stands inside of it as well, expanded.
            beside = [(factor, given) for factor, r in others if factor is not fold and not r]
            if not rows_inside or len(beside) != len(others) - 1:
                continue
            found = self.known.get(_key([*others_inside, *beside]))
            if found is not None and found.width == fold.args[0].width:
                full = fold.args[0].features
                product = _times(b, b.reshape(found, full), rows_inside, scale * scale_inside, full)
                return _times(b, b.reshape(b.fold(product, fold.features), x.features), rows, 1.0, x.features)
        return None


def _rule_of(fold: Value) -> tuple:
    return tuple(map(int, fold.numbers))


def _parted(factors: list) -> tuple[list, list]:
    """Factors of destinations, and of edges."""
    return [f for f in factors if not f[0].of_edge], [f for f in factors if f[0].of_edge]


def _key(factors: list) -> tuple:
    return tuple(sorted((value.number, rule) for value, rule in factors))


def _factors(value: Value) -> tuple[list[tuple[Value, tuple]], float]:
    """The factors of a product, each with how it is expanded, and a number."""
    if value.op == "mul":
        (left, a), (right, b) = map(_factors, value.args)
        return left + right, a * b
    if value.op in ("mul_p", "div_p"):
        factors, scale = _factors(value.args[0])
        return factors, scale * value.numbers[0] if value.op == "mul_p" else scale / value.numbers[0]
    if value.op == "neg":
        factors, scale = _factors(value.args[0])
        return factors, -scale
    if value.op == "reshape":
        return _factors(value.args[0])
    if value.op == "expand":
        factors, scale = _factors(value.args[0])
        rule = tuple(map(int, value.numbers))
        if all(not r for _, r in factors):
            return [(factor, rule) for factor, _ in factors], scale
    return [(value, ())], 1.0


def _times(b: Builder, value: Value, rows: list, scale: float, features: tuple[int, ...]) -> Value:
    for row, rule in rows:
        row = b.make("expand", (row,), rule, features) if rule else b.reshape(row, features)
        value = b.mul(value, row)
    return b.mul(value, scale)
