"""Programs: expressions whose leaves have shapes, as a list of primitive steps that kernels and derivatives know.

A `Program` is a value: it is compared, kept in tables, and written as text where torch's dispatcher asks for that. A
`Builder` makes one: it broadcasts, writes functions as primitives, and makes what is asked for twice once.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gnnaccel.program.language import Expression
from gnnaccel.program.shapes import broadcast, index_rule

Shape = tuple[int, ...]
REDUCES = ("sum", "mean", "max", "min", "none")  # of messages
# To a row for each destination. Of a softmax's scores: "top", the greatest; "logtotal", the logarithm of the sum of
# exponentials of what they are without it; "soft", a sum weighted by the softmax of `Output.by`.
SOFT = ("top", "logsumexp", "logtotal", "soft")
TO_ROWS = ("sum", "mean", "max", "min", *SOFT)


class Unfit(ValueError):
    """A program that is none: shapes that do not fit, or a function or broadcast that is not in the language."""


class Leaf(NamedTuple):
    """Operand of a program: its kind, the shape of a row, and whether it holds edge ids instead of features."""

    kind: str
    features: Shape
    ids: bool = False


class Step(NamedTuple):
    """One primitive (cpp/message_program.h: MessageOp; and "leaf", and "reshape", which is nothing to a kernel).

    "over_sum", "over_max" and "over_logsumexp" reduce a value over the edges of each destination; each edge reads the
    result back. No kernel knows them: gnnaccel/ops/messages/plan.py splits a program at them.

    args : numbers of earlier steps. numbers : its parameters; of a leaf its number.
    """

    op: str
    args: tuple[int, ...]
    numbers: tuple
    features: Shape


class Output(NamedTuple):
    """The value of a step, reduced over rows by one of REDUCES or TO_ROWS.

    Also "row": the value of a row of destinations, that no edge has a part in; and "source": the sum over the edges of
    each source.
    own : with a sum or mean, the step of what is added to it once for each row; -1: nothing.
    by : with "soft", the step of the scores, in the features of the value.
    """

    step: int
    reduce: str
    own: int = -1
    by: int = -1


class Program:
    """Steps on values of leaves, and what becomes of some of them. Never changed; equal ones are equal.

    text : the program in one line, which `parse` reads.
    """

    __slots__ = ("_hash", "leaves", "outputs", "steps", "text")

    def __init__(self, leaves: tuple[Leaf, ...], steps: tuple[Step, ...], outputs: tuple[Output, ...]):
        self.leaves, self.steps, self.outputs = leaves, steps, outputs
        # Infinite numbers and NaN as words: they have no literals.
        plain = tuple((*s[:2], tuple(n if math.isfinite(n) else str(n) for n in s.numbers), s.features) for s in steps)
        self.text = repr((tuple(map(tuple, leaves)), plain, tuple(map(tuple, outputs))))
        self._hash = hash(self.text)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.text == other.text)

    def __str__(self) -> str:
        """The program for people: a line for each step."""
        lines = []
        for number, step in enumerate(self.steps):
            if step.op == "leaf":
                leaf = self.leaves[step.numbers[0]]
                lines.append(f"%{number} = {leaf.kind}[{step.numbers[0]}] {list(leaf.features)}")
            else:
                given = ", ".join([*(f"%{a}" for a in step.args), *(f"{n:g}" for n in step.numbers)])
                lines.append(f"%{number} = {step.op}({given}) {list(step.features)}")
        own = (f" + %{o.own}" if o.own >= 0 else "" for o in self.outputs)
        return "\n".join([*lines, *(f"{o.reduce}: %{o.step}{more}" for o, more in zip(self.outputs, own, strict=True))])


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """The program of a `Program.text`."""
    leaves, steps, outputs = ast.literal_eval(text)
    read = [(op, args, tuple(float(n) if isinstance(n, str) else n for n in ns), f) for op, args, ns, f in steps]
    return Program(tuple(Leaf(*x) for x in leaves), tuple(Step(*x) for x in read), tuple(Output(*x) for x in outputs))


class Value:
    """A step in the making.

    of_edge : it may differ from edge to edge of a destination.
    """

    __slots__ = ("args", "features", "number", "numbers", "of_edge", "op")

    def __init__(self, op: str, args: tuple[Value, ...], numbers: tuple, features: Shape, number: int, of_edge: bool):
        self.op, self.args, self.numbers, self.features, self.number = op, args, numbers, features, number
        self.of_edge = of_edge

    @property
    def width(self) -> int:
        return math.prod(self.features)


def reached_from(values: Iterable[Value], stops: dict[int, int] | None = None) -> list[Value]:
    """All that values are made of, they themselves too; not what those in `stops` are made of."""
    found: dict[int, Value] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if value.number not in found:
            found[value.number] = value
            if stops is None or value.number not in stops:
                waiting += value.args
    return list(found.values())


Given = Value | float  # an operand: a number stands for itself
_TURNED = {"lt": "gt", "le": "ge"}  # comparisons that are others with their operands changed
_MIRRORED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq"}


class Builder:
    """Makes a program of `leaves`."""

    def __init__(self, leaves: Sequence[Leaf]):
        self.leaves = tuple(leaves)
        self._made: dict[tuple, Value] = {}

    def make(self, op: str, args: tuple[Value, ...], numbers: tuple, features: Shape) -> Value:
        key = (op, tuple(a.number for a in args), repr(numbers), features)  # repr: 0.0 is not -0.0
        found = self._made.get(key)
        if found is None and op in ("add", "mul"):  # the same to the last bit
            found = self._made.get((op, key[1][::-1], *key[2:]))
        if found is None:
            if op == "leaf":
                of_edge = self.leaves[numbers[0]].kind in "ue"
            else:
                of_edge = not op.startswith("over_") and (op == "winner" or any(a.of_edge for a in args))
            found = self._made[key] = Value(op, args, numbers, features, len(self._made), of_edge)
        return found

    def values(self) -> list[Value]:
        """All that was made."""
        return list(self._made.values())

    def leaf(self, number: int) -> Value:
        return self.make("leaf", (), (number,), self.leaves[number].features)

    def fill(self, number: float, features: Shape) -> Value:
        return self.make("fill", (), (float(number),), features)

    def unary(self, op: str, x: Value, *numbers: float) -> Value:
        return self.make(op, (x,), tuple(map(float, numbers)), x.features)

    def reshape(self, x: Value, features: Shape) -> Value:
        if features == x.features:
            return x
        if math.prod(features) != x.width:
            raise Unfit(f"messages: reshape: {list(x.features)} has not as many numbers as {list(features)}")
        return self.make("reshape", (x,), (), features)

    def expand(self, x: Value, features: Shape) -> Value:
        """`x` broadcast to `features`."""
        if x.features == features:
            return x
        if x.width == math.prod(features):
            return self.reshape(x, features)
        return self.make("expand", (x,), _rule(x.features, features), features)

    def fold(self, x: Value, features: Shape) -> Value:
        """The sum of `x` over what `expand` would make of `features`."""
        if x.width == math.prod(features):
            return self.reshape(x, features)
        if x.width == 0:
            return self.fill(0.0, features)
        return self.make("fold", (x,), _rule(features, x.features), features)

    def alike(self, *given: Given) -> tuple[Value, ...]:
        """All broadcast to one shape, numbers too."""
        shape: Shape = ()
        for x in given:
            if isinstance(x, Value):
                shape = _broadcast(shape, x.features)
        return tuple(self.expand(x, shape) if isinstance(x, Value) else self.fill(x, shape) for x in given)

    def _two(self, op: str, x: Given, y: Given) -> Value:
        if not isinstance(x, Value) and not isinstance(y, Value):
            raise Unfit(f"messages: {op}: expected an expression among its operands, got two numbers")
        x, y = self.alike(x, y)
        return self.make(op, (x, y), (), x.features)

    def add(self, x: Given, y: Given) -> Value:
        if isinstance(x, Value) and isinstance(y, Value):
            return self._two("add", x, y)
        x, y = (x, y) if isinstance(x, Value) else (y, x)
        return self._with("add_p", x, y)

    def sub(self, x: Given, y: Given) -> Value:
        if isinstance(x, Value) and isinstance(y, Value):
            return self._two("sub", x, y)
        return self._with("add_p", x, -y) if isinstance(x, Value) else self._with("rsub_p", y, x)  # type: ignore

    def mul(self, x: Given, y: Given) -> Value:
        if isinstance(x, Value) and isinstance(y, Value):
            return self._two("mul", x, y)
        x, y = (x, y) if isinstance(x, Value) else (y, x)
        return x if y == 1 else self._with("mul_p", x, y)  # type: ignore[return-value]

    def div(self, x: Given, y: Given) -> Value:
        if isinstance(x, Value) and isinstance(y, Value):
            return self._two("div", x, y)
        if isinstance(x, Value):
            return x if y == 1 else self._with("div_p", x, y)
        return self._with("rdiv_p", y, x)

    def _with(self, op: str, x: Given, number: Given) -> Value:
        if not isinstance(x, Value):
            raise Unfit(f"messages: {op[:-2]}: expected an expression among its operands, got two numbers")
        return self.unary(op, x, number)  # type: ignore[arg-type]

    def extremum(self, op: str, x: Given, y: Given) -> Value:
        """op "max" or "min"."""
        if isinstance(x, Value) and isinstance(y, Value):
            return self._two(op, x, y)
        return self._with(f"{op}_p", x, y) if isinstance(x, Value) else self._with(f"{op}_p", y, x)

    def compare(self, op: str, x: Given, y: Given) -> Value:
        """1 where it holds, else 0."""
        if isinstance(x, Value) and isinstance(y, Value):
            return self._two(_TURNED[op], y, x) if op in _TURNED else self._two(op, x, y)
        if isinstance(x, Value):
            return self._with(f"{op}_p", x, y)
        return self._with(f"{_MIRRORED[op]}_p", y, x)

    def over(self, reduce: str, x: Value) -> Value:
        """A reduction over the edges of each destination: "sum", "mean", "max" or "logsumexp"."""
        if reduce == "mean":
            return self.div(self.over("sum", x), self.degrees())
        if reduce == "sum" and not x.of_edge and x.op != "fill":
            return self.mul(x, self.degrees())
        return self.make(f"over_{reduce}", (x,), (), x.features)

    def degrees(self) -> Value:
        """The number of edges of each destination."""
        return self.over("sum", self.fill(1.0, ()))

    def keep(self, mask: Value, x: Value) -> Value:
        """x where `mask` is not 0, else 0: of an infinite x too, where a product would be NaN."""
        return self._two("keep", mask, x)

    def where(self, mask: Given, x: Given, y: Given) -> Value:
        mask, x, y = self.alike(mask, x, y)
        return self.make("where", (mask, x, y), (), x.features)

    def program(self, outputs: Sequence[tuple]) -> tuple[Program, list[int]]:
        """The program of `outputs`, each value, reduce and, as in Output, own and by, without what they do not need;
        and which of the leaves it has."""
        needed: dict[int, Value] = {}
        waiting = [x for output in outputs for x in output if isinstance(x, Value)]
        while waiting:
            value = waiting.pop()
            if value.number not in needed:
                needed[value.number] = value
                waiting += value.args
        steps: list[Step] = []
        place: dict[int, int] = {}
        kept: list[int] = []
        for number in sorted(needed):
            value = needed[number]
            place[number] = len(steps)
            numbers = value.numbers
            if value.op == "leaf":
                numbers = (len(kept),)
                kept.append(value.numbers[0])
            steps.append(Step(value.op, tuple(place[a.number] for a in value.args), numbers, value.features))
        found = tuple(
            Output(place[value.number], reduce, *(-1 if own is None else place[own.number] for own in added))
            for value, reduce, *added in outputs
        )
        return Program(tuple(self.leaves[i] for i in kept), tuple(steps), found), kept

    def again(self, program: Program, leaves: Sequence[int]) -> list[Value]:
        """The values of a program's steps; its leaf i is leaves[i] here."""
        values: list[Value] = []
        for step in program.steps:
            if step.op == "leaf":
                values.append(self.leaf(leaves[step.numbers[0]]))
            else:
                values.append(self.make(step.op, tuple(values[a] for a in step.args), step.numbers, step.features))
        return values


def _broadcast(x: Shape, y: Shape) -> Shape:
    try:
        return broadcast(x, y)
    except RuntimeError:
        raise Unfit(f"messages: features of shapes {list(x)} and {list(y)} do not broadcast") from None


def _rule(shape: Shape, full: Shape) -> tuple[int, int]:
    """(len, div) of features `shape` that are read, or summed, as `full` (`index_rule`)."""
    rule = index_rule(shape, full)
    if rule is None:
        raise Unfit(f"messages: {list(shape)} and {list(full)} differ in dimensions that do not lie side by side")
    return rule if rule[0] != 1 else (1, math.prod(full))  # one number: a run of all, not many of one


def _pow(b: Builder, x: Value, exponent: float) -> Value:
    if exponent == 2:
        return b.mul(x, x)
    if exponent == 3:
        return b.mul(b.mul(x, x), x)
    named = {0.5: "sqrt", -0.5: "rsqrt"}
    if exponent in named:
        return b.unary(named[exponent], x)
    if exponent == 0:
        return b.fill(1.0, x.features)
    if exponent in (1, -1):
        return x if exponent == 1 else b.div(1.0, x)
    return b.unary("pow_p", x, exponent)


def _clamp(b: Builder, x: Value, low: float | None, high: float | None) -> Value:
    x = x if low is None else b.extremum("max", x, low)
    return x if high is None else b.extremum("min", x, high)


# What exp() is taken of is bounded where its result is not used: no infinity gets into a derivative.
def _elu(b: Builder, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Value:
    below = b.mul(b.unary("expm1", b.mul(b.extremum("min", x, 0.0), input_scale)), alpha)
    return b.mul(b.where(b.compare("gt", x, 0.0), x, below), scale)


def _softplus(b: Builder, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    scaled = b.mul(x, beta)
    bounded = b.unary("log1p", b.unary("exp", b.extremum("min", scaled, threshold)))
    return b.where(b.compare("gt", scaled, threshold), x, b.div(bounded, beta))


def _logsigmoid(b: Builder, x: Value) -> Value:
    below, above = b.extremum("min", x, 0.0), b.unary("neg", b.extremum("max", x, 0.0))
    low = b.sub(below, b.unary("log1p", b.unary("exp", below)))
    return b.where(b.compare("gt", x, 0.0), b.unary("neg", b.unary("log1p", b.unary("exp", above))), low)


def _hardswish(b: Builder, x: Value) -> Value:
    inside = _clamp(b, x, -3.0, 3.0)
    middle = b.div(b.mul(inside, b.add(inside, 3.0)), 6.0)
    return b.where(b.compare("ge", x, 3.0), x, b.where(b.compare("gt", x, -3.0), middle, 0.0))


def _gelu(b: Builder, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        cubic = b.add(x, b.mul(_pow(b, x, 3), 0.044715))
        inner = b.unary("tanh", b.mul(cubic, math.sqrt(2 / math.pi)))
    elif approximate == "none":
        inner = b.unary("erf", b.mul(x, math.sqrt(0.5)))
    else:
        raise Unfit(f"messages: gelu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    return b.mul(b.mul(x, 0.5), b.add(inner, 1.0))


def _sum(b: Builder, x: Value, dims: tuple[int, ...], keepdim: bool) -> Value:
    count = len(x.features)
    if not all(isinstance(d, int) and -count <= d < 0 for d in dims):
        raise Unfit(f"messages: sum: expected dimensions from -{count} to -1, got {dims}")
    where = {d + count for d in dims}
    kept = tuple(1 if i in where else n for i, n in enumerate(x.features))
    folded = b.fold(x, kept)
    return folded if keepdim else b.reshape(folded, tuple(n for i, n in enumerate(kept) if i not in where))


def _softmax(b: Builder, x: Value) -> Value:
    """Over the edges of each destination. The greatest score is apart, so that a sum loses nothing beside it; it needs
    no derivative, as a softmax is the same of shifted scores."""
    if not x.of_edge:
        return b.add(b.div(1.0, b.extremum("max", b.degrees(), 1.0)), b.mul(x, 0.0))  # of which it is a function
    shifted = b.sub(x, b.over("max", x))
    return b.unary("exp", b.sub(shifted, b.over("logsumexp", shifted)))


def _named(op: str) -> Callable:
    return lambda b, x: b.unary(op, x)


# function of the language -> function(builder, *args, *options) of primitives
FUNCTIONS: dict[str, Callable] = {
    "add": Builder.add,
    "sub": Builder.sub,
    "mul": Builder.mul,
    "div": Builder.div,
    "maximum": lambda b, x, y: b.extremum("max", x, y),
    "minimum": lambda b, x, y: b.extremum("min", x, y),
    "where": Builder.where,
    **{op: (lambda b, x, y, op=op: b.compare(op, x, y)) for op in ("gt", "ge", "lt", "le", "eq")},
    **{
        op: _named(op)
        for op in (
            *("neg", "abs", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "relu"),
            *("erf", "sin", "cos"),
        )
    },
    "ne": lambda b, x, y: b.sub(1.0, b.compare("eq", x, y)),
    "square": lambda b, x: b.mul(x, x),
    "reciprocal": lambda b, x: b.div(1.0, x),
    "pow": _pow,
    "clamp": _clamp,
    "leaky_relu": lambda b, x, slope=0.01: b.unary("leaky_relu_p", x, slope),
    "elu": _elu,
    "celu": lambda b, x, alpha=1.0: _elu(b, x, alpha, 1.0, 1.0 / alpha),
    "selu": lambda b, x: _elu(b, x, 1.6732632423543772, 1.0507009873554805),
    "gelu": _gelu,
    "silu": lambda b, x: b.mul(x, b.unary("sigmoid", x)),
    "mish": lambda b, x: b.mul(x, b.unary("tanh", _softplus(b, x))),
    "softplus": _softplus,
    "softsign": lambda b, x: b.div(x, b.add(b.unary("abs", x), 1.0)),
    "logsigmoid": _logsigmoid,
    "hardswish": _hardswish,
    "hardtanh": lambda b, x, low=-1.0, high=1.0: _clamp(b, x, low, high),
    "round": lambda b, x, dtype: b.unary(f"round_{dtype}", x),
    "softmax": _softmax,
    "sum": _sum,
    "reshape": Builder.reshape,
}


@functools.lru_cache(maxsize=1024)
def program_of(expressions: tuple[tuple[Expression, str], ...], shapes: tuple[tuple, ...]) -> tuple[Program, list]:
    """The program of (expression, reduce) pairs, and the kind and name of each of its leaves.

    shapes : ((kind, name), features) of the leaves.
    """
    given: Mapping[tuple, Shape] = dict(shapes)
    names = list(given)
    b = Builder([Leaf(kind, given[kind, name]) for kind, name in names])
    done: dict[Expression, Given] = {}

    def made(node: Expression) -> Given:
        if node.function == "leaf":
            return b.leaf(names.index(node.options))
        function = FUNCTIONS.get(node.function)
        if function is None:
            raise Unfit(f"messages: expected one of {sorted(FUNCTIONS)}, got {node.function!r}")
        return function(b, *(done[a] if isinstance(a, Expression) else a for a in node.args), *node.options)

    waiting = [expression for expression, _ in expressions]
    while waiting:  # parts before what is made of them
        node = waiting[-1]
        parts = [arg for arg in node.args if isinstance(arg, Expression) and arg not in done]
        if parts:
            waiting += parts
        else:
            done[waiting.pop()] = made(node)
    outputs = []
    for expression, reduce in expressions:
        found = done[expression]
        assert isinstance(found, Value)
        outputs.append((found, reduce))
    program, kept = b.program(outputs)
    return program, [names[i] for i in kept]
