"""Derivatives of programs, which are programs: no value of an edge is kept, all are computed again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from gnnaccel.lower import bounds
from gnnaccel.program.program import Builder, Leaf, Program, Shape, Value

_SIDES = {"u": "v", "v": "u", "e": "e", "c": "c"}  # of the same edges reversed

# primitive -> function(builder, its value, the gradient to that) -> gradients to its arguments, None for none
_RULES: dict[str, Callable] = {
    "add": lambda b, y, g: (g, g),
    "sub": lambda b, y, g: (g, b.unary("neg", g)),
    "mul": lambda b, y, g: (b.mul(g, y.args[1]), b.mul(g, y.args[0])),
    "div": lambda b, y, g: (b.div(g, y.args[1]), b.unary("neg", b.div(b.mul(g, y), y.args[1]))),
    "max": lambda b, y, g: _of_extremum(b, g, *y.args),
    "min": lambda b, y, g: _of_extremum(b, g, *reversed(y.args)),
    "add_p": lambda b, y, g: (g,),
    "mul_p": lambda b, y, g: (b.mul(g, y.numbers[0]),),
    "div_p": lambda b, y, g: (b.div(g, y.numbers[0]),),
    "max_p": lambda b, y, g: (b.keep(b.compare("ge", y.args[0], y.numbers[0]), g),),
    "min_p": lambda b, y, g: (b.keep(b.compare("le", y.args[0], y.numbers[0]), g),),
    "keep": lambda b, y, g: (None, b.keep(y.args[0], g)),
    "round_bfloat16": lambda b, y, g: (g,),
    "round_float16": lambda b, y, g: (g,),
    "round_float32": lambda b, y, g: (g,),
    "rsub_p": lambda b, y, g: (b.unary("neg", g),),
    "rdiv_p": lambda b, y, g: (b.unary("neg", b.div(b.mul(g, y), y.args[0])),),
    "pow_p": lambda b, y, g: (_of_pow(b, g, y.args[0], y.numbers[0]),),
    "leaky_relu_p": lambda b, y, g: (b.where(b.compare("gt", y.args[0], 0.0), g, b.mul(g, y.numbers[0])),),
    "copy": lambda b, y, g: (g,),
    "neg": lambda b, y, g: (b.unary("neg", g),),
    "abs": lambda b, y, g: (b.mul(g, b.unary("sign", y.args[0])),),
    "exp": lambda b, y, g: (b.mul(g, y),),
    "expm1": lambda b, y, g: (b.mul(g, b.unary("exp", y.args[0])),),
    "log": lambda b, y, g: (b.div(g, y.args[0]),),
    "log1p": lambda b, y, g: (b.div(g, b.add(y.args[0], 1.0)),),
    "sqrt": lambda b, y, g: (b.div(b.mul(g, 0.5), y),),
    "rsqrt": lambda b, y, g: (b.mul(b.mul(g, -0.5), b.mul(b.mul(y, y), y)),),
    "sigmoid": lambda b, y, g: (b.mul(b.mul(g, y), b.sub(1.0, y)),),
    "tanh": lambda b, y, g: (b.mul(g, b.sub(1.0, b.mul(y, y))),),
    "relu": lambda b, y, g: (b.keep(b.compare("gt", y.args[0], 0.0), g),),
    "erf": lambda b, y, g: (b.mul(b.mul(g, 2 / math.sqrt(math.pi)), _exp_of_square(b, y.args[0])),),
    "sin": lambda b, y, g: (b.mul(g, b.unary("cos", y.args[0])),),
    "cos": lambda b, y, g: (b.unary("neg", b.mul(g, b.unary("sin", y.args[0]))),),
    "where": lambda b, y, g: (None, b.where(y.args[0], g, 0.0), b.where(y.args[0], 0.0, g)),
    "reshape": lambda b, y, g: (b.reshape(g, y.args[0].features),),
    "expand": lambda b, y, g: (b.fold(g, y.args[0].features),),
    "fold": lambda b, y, g: (b.expand(g, y.args[0].features),),
    "over_sum": lambda b, y, g: (g,),
    "over_logsumexp": lambda b, y, g: (b.mul(g, b.unary("exp", b.sub(y.args[0], y))),),
}


def _of_extremum(b: Builder, g: Value, x: Value, y: Value) -> tuple[Value, Value]:
    """Of max(x, y), or min(y, x): equal ones share it, as torch has it."""
    tie = b.keep(b.compare("eq", x, y), b.mul(g, 0.5))
    return b.add(b.keep(b.compare("gt", x, y), g), tie), b.add(b.keep(b.compare("gt", y, x), g), tie)


def _of_pow(b: Builder, g: Value, x: Value, exponent: float) -> Value:
    return b.mul(b.mul(g, exponent), b.unary("pow_p", x, exponent - 1))


def _exp_of_square(b: Builder, x: Value) -> Value:
    return b.unary("exp", b.unary("neg", b.mul(x, x)))


def adjoints(
    b: Builder, seeds: list[tuple[Value, Value]], summed: Callable[[Value], Value] | None = None
) -> dict[int, Value]:
    """The gradient to each leaf, by its number, of values whose gradients are the seeds.

    summed : makes what each edge gives to a value of its destination the gradient of that; without it, gradients to
        leaves of destinations are what each edge gives.
    """
    found: dict[int, Value] = {}
    waiting: dict[int, Value] = {}

    def give(value: Value, gradient: Value) -> None:
        before = found.get(value.number)
        found[value.number] = gradient if before is None else b.add(before, gradient)
        waiting[value.number] = value

    for value, seed in seeds:
        give(value, seed)
    leaves = {}
    while waiting:  # who gives a gradient comes after who gets one
        value = waiting.pop(max(waiting))
        gradient = found[value.number]
        if value.op == "leaf":
            leaves[value.numbers[0]] = gradient
            continue
        rule = _RULES.get(value.op)  # comparisons, signs, argmax and numbers have none
        if rule is not None:
            for arg, part in zip(value.args, rule(b, value, gradient), strict=True):
                if part is not None:
                    give(arg, summed(part) if summed and value.of_edge and not arg.of_edge else part)
    return leaves


class Half(NamedTuple):
    """The gradients that one walk makes: a program, its operands, and whose gradients its outputs are.

    operands : numbers of the program's leaves, and behind them of what the backward pass is given: for each output of
        the program its gradient and, for a max or min, its argmax.
    targets : the leaf of each output, and through which shapes its rows go until they are those of the leaf, each by a
        sum over features or a reshape.
    """

    program: Program
    operands: list[int]
    targets: list[tuple[int, list[Shape]]]


def seeded(program: Program, given: tuple[bool, ...]) -> tuple[Builder, list[tuple[Value, Value, Value]]]:
    """A builder with the program's values, and of each output that is `given` a gradient its value, the gradient to
    that on one edge, and the leaf that the gradient is."""
    leaves = list(program.leaves)
    seeds = []  # leaf of the gradient, and of the argmax
    for output, has in zip(program.outputs, given, strict=True):
        if not has:
            seeds.append((-1, -1))
            continue
        features = program.steps[output.step].features
        kind = "e" if output.reduce == "none" else "v"
        leaves.append(Leaf(kind, features))
        seeds.append((len(leaves) - 1, -1))
        if output.reduce in ("max", "min"):
            leaves.append(Leaf("v", features, True))
            seeds[-1] = (len(leaves) - 2, len(leaves) - 1)
    b = Builder(leaves)
    values = b.again(program, range(len(program.leaves)))
    starts = []
    for output, (gradient, argmax) in zip(program.outputs, seeds, strict=True):
        if gradient < 0:
            continue
        seed = b.leaf(gradient)
        if argmax >= 0:
            seed = b.keep(b.make("winner", (b.leaf(argmax),), (), seed.features), seed)
        starts.append((values[output.step], seed, b.leaf(gradient)))
    return b, starts


def _found(program: Program, given: tuple[bool, ...]) -> tuple[Builder, dict[int, Value]]:
    """The gradient to each leaf, of one edge, where outputs that are `given` have one."""
    b, starts = seeded(program, given)
    return b, adjoints(b, [(value, seed) for value, seed, _ in starts])


class Ahead(NamedTuple):
    """A program that also makes what its backward pass would walk over the same edges for.

    The gradient to a row of destinations is a sum over its edges; where each summand is the gradient of the row's
    output times something, that something is summed in the forward pass, which reads the same rows anyway.

    program : the program with those sums behind its outputs.
    targets : of each sum the leaf and the output whose gradients it is the factor between, and through which shapes
        the product goes until it is the leaf's, as in Half.
    """

    program: Program
    targets: list[tuple[int, int, list[Shape]]]


@functools.lru_cache(maxsize=1024)
def ahead(program: Program, wanted: tuple[bool, ...]) -> Ahead | None:
    """The program for a forward pass with gradients to the `wanted` leaves, or None.

    None unless it spares the backward pass its walk over the graph itself: gradients to edges need that anyway.
    """
    here = [i for i, leaf in enumerate(program.leaves) if wanted[i] and leaf.kind != "u"]
    if not here or any(program.leaves[i].kind == "e" for i in here):
        return None
    if any(o.reduce not in ("sum", "mean") or 0 in program.steps[o.step].features for o in program.outputs):
        return None
    b, starts = seeded(program, (True,) * len(program.outputs))
    sums: list[Value] = []
    targets: list[tuple[int, int, list[Shape]]] = []
    for number, (value, seed, gradient) in enumerate(starts):
        found = adjoints(b, [(value, seed)])
        for leaf in here:
            if leaf not in found:
                continue
            each, shapes = _unfolded(found[leaf])
            factor = factor_over(b, each, gradient)
            if factor is None or not factor.of_edge:
                return None
            sums.append(factor)
            targets.append((leaf, number, [each.features, *shapes]))
    if not 0 < len(sums) <= bounds.SUMS_AHEAD:
        return None
    outputs = [(value, o.reduce) for (value, *_), o in zip(starts, program.outputs, strict=True)]
    made, operands = b.program([*outputs, *((factor, "sum") for factor in sums)])
    assert operands == list(range(len(program.leaves)))
    return Ahead(made, targets)


@functools.lru_cache(maxsize=1024)
def constant_factors(program: Program) -> dict[int, float]:
    """The leaves of destinations to which each edge gives the gradient of its row's output times one number, and that
    number: their gradients are the rows' times the degrees. Of a program of one output."""
    b, ((value, seed, gradient),) = seeded(program, (True,))
    if program.outputs[0].reduce not in ("sum", "mean"):
        return {}
    numbers = {}
    for leaf, each in adjoints(b, [(value, seed)]).items():
        factor, sign = factor_over(b, each, gradient) if program.leaves[leaf].kind == "v" else None, 1.0
        while factor is not None and factor.op == "neg":
            factor, sign = factor.args[0], -sign
        if factor is not None and factor.op == "fill" and factor.features == program.leaves[leaf].features:
            numbers[leaf] = sign * factor.numbers[0]
    return numbers


# Which arguments a function is linear in.
_LINEAR = {
    **{op: [True, True] for op in ("add", "sub")},
    **{op: [True] for op in ("neg", "mul_p", "div_p", "reshape")},
    "div": [True, False],
    "keep": [False, True],
}


def factor_over(b: Builder, value: Value, seed: Value) -> Value | None:
    """The factor between `seed` and a value made of it, number by number; None if there is none."""

    @functools.cache
    def holds(x: Value) -> bool:
        return x is seed or any(map(holds, x.args))

    def is_number(x: Value, number: float) -> bool:
        return x.op == "fill" and x.numbers == (number,)

    @functools.cache
    def factor(x: Value) -> Value | None:
        if x is seed:
            return b.fill(1.0, x.features)
        held = [holds(a) for a in x.args]
        parts: list[Value] = []
        for arg, has in zip(x.args, held, strict=True):
            part = factor(arg) if has else arg
            if part is None:
                return None
            parts.append(part)
        if x.op == "mul" and sum(held) == 1:
            of_seed, other = parts if held[0] else reversed(parts)
            return other if is_number(of_seed, 1.0) else b.mul(of_seed, other)
        if x.op == "where" and not held[0]:  # where a derivative has it, the other side is 0
            fits = all(has or is_number(a, 0.0) for a, has in zip(x.args[1:], held[1:], strict=True))
        else:
            fits = held == _LINEAR.get(x.op)
        return b.make(x.op, tuple(parts), x.numbers, x.features) if fits else None

    return factor(value) if holds(value) else None


def _unfolded(value: Value) -> tuple[Value, list[Shape]]:
    """What a gradient is the sum over features of, and the shapes that those sums have: of rows, which are fewer."""
    shapes: list[Shape] = []
    while value.op in ("fold", "reshape"):
        shapes.insert(0, value.features)
        value = value.args[0]
    return value, shapes


@functools.lru_cache(maxsize=1024)
def twins(program: Program, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[tuple[int, int], ...]:
    """Pairs of `wanted` leaves, of sources and of edges, whose gradients on each edge are the same, as of u + e."""
    _, found = _found(program, given)
    kinds: dict[str, dict[int, int]] = {"u": {}, "e": {}}
    for number, leaf in enumerate(program.leaves):
        if wanted[number] and leaf.kind in kinds and number in found and found[number].features == leaf.features:
            kinds[leaf.kind][number] = found[number].number
    edges = {value: number for number, value in kinds["e"].items()}
    return tuple((number, edges[value]) for number, value in kinds["u"].items() if value in edges)


@functools.lru_cache(maxsize=1024)
def gradients(program: Program, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> tuple[Half | None, Half | None]:
    """Programs of the gradients to the `wanted` leaves, where outputs that are `given` have one.

    The first is for the graph itself: gradients to rows of destinations, edges and what all edges share (these summed
    over each row). The second is for the transposed graph: those to rows of sources. None: nothing to do.
    """
    b, found = _found(program, given)
    halves: list[Half | None] = []
    for there in (False, True):
        outputs, targets = [], []
        for number, leaf in enumerate(program.leaves):
            if wanted[number] and (leaf.kind == "u") is there and number in found:
                value = found[number]
                shapes: list[Shape] = []
                if leaf.kind != "e":
                    value, shapes = _unfolded(value)
                outputs.append((value, "none" if leaf.kind == "e" else "sum"))
                targets.append((number, [value.features, *shapes]))
        if not outputs:
            halves.append(None)
            continue
        half, operands = b.program(outputs)
        if there:
            sides = tuple(leaf._replace(kind=_SIDES[leaf.kind]) for leaf in half.leaves)
            half = Program(sides, half.steps, half.outputs)
        halves.append(Half(half, operands, targets))
    return halves[0], halves[1]
