"""The values of a program as CUDA C++: what a lane computes of each edge, and once of each row.

A narrow value that wide ones read is kept as each lane sees it (`View`); a sum over features is a sum over lanes where
they lie so, else a loop.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gnnaccel.program.program import Program

View = tuple[tuple[int, int], ...]  # feature d of a lane reads (d / div) % len, and of that the next
_ONE: View = ((1, 1),)  # of one number: the same for all who read it, so that it is made once

TYPES = {"f32": "float", "f64": "double", "bf16": "Bf16", "f16": "Half", "i32": "int32_t", "i64": "int64_t"}


class Form(NamedTuple):
    """What a program is compiled for.

    leaves, outputs : "f32", "f64" or "bf16" of each; of a leaf of edge ids the index.
    indices : "i32" or "i64".
    vec : features that are read at once; each operand lies so, or vec is 1.
    """

    leaves: tuple[str, ...]
    outputs: tuple[str, ...]
    indices: str
    vec: int


class Scattered(Exception):
    """A value whose numbers do not lie as vectors of `vec` read them."""


_BINARY = {
    "add": "{a} + {b}",
    "sub": "{a} - {b}",
    "mul": "{a} * {b}",
    "div": "{a} / {b}",
    "max": "{a} > {b} || {a} != {a} ? {a} : {b}",  # NaN wins
    "min": "{a} < {b} || {a} != {a} ? {a} : {b}",
    "gt": "{a} > {b} ? A(1) : A(0)",
    "ge": "{a} >= {b} ? A(1) : A(0)",
    "eq": "{a} == {b} ? A(1) : A(0)",
    "keep": "{a} != A(0) ? {b} : A(0)",
    "where": "{a} != A(0) ? {b} : {c}",
}
_OF_NUMBER = {
    "add_p": "{a} + {p}",
    "mul_p": "{a} * {p}",
    "div_p": "{a} / {p}",
    "max_p": "{a} > {p} || {a} != {a} ? {a} : {p}",
    "min_p": "{a} < {p} || {a} != {a} ? {a} : {p}",
    "gt_p": "{a} > {p} ? A(1) : A(0)",
    "ge_p": "{a} >= {p} ? A(1) : A(0)",
    "lt_p": "{a} < {p} ? A(1) : A(0)",
    "le_p": "{a} <= {p} ? A(1) : A(0)",
    "eq_p": "{a} == {p} ? A(1) : A(0)",
    "rsub_p": "{p} - {a}",
    "rdiv_p": "{p} / {a}",
    "pow_p": "pow{f}({a}, {p})",
    "leaky_relu_p": "{a} > A(0) ? {a} : {a} * {p}",
}
_UNARY = {
    "copy": "{a}",
    "neg": "-{a}",
    "abs": "fabs{f}({a})",
    "sign": "static_cast<A>(static_cast<int>({a} > A(0)) - static_cast<int>({a} < A(0)))",
    "exp": "exp{f}({a})",
    "expm1": "expm1{f}({a})",
    "log": "log{f}({a})",
    "log1p": "log1p{f}({a})",
    "sqrt": "sqrt{f}({a})",
    "rsqrt": "A(1) / sqrt{f}({a})",
    "tanh": "tanh{f}({a})",
    "relu": "{a} <= A(0) ? A(0) : {a}",
    "erf": "erf{f}({a})",
    "sin": "sin{f}({a})",
    "cos": "cos{f}({a})",
    "round_float32": "static_cast<A>(static_cast<float>({a}))",
}
_SIGMOID = {"float": "__fdividef(1.0f, 1.0f + expf(-{a}))", "double": "1.0 / (1.0 + exp(-{a}))"}


def _number(value: float) -> str:
    if math.isnan(value):
        return "not_a_number()"
    if math.isinf(value):
        return "infinite()" if value > 0 else "(-infinite())"
    return f"A({value!r})"


class Value(NamedTuple):
    """A value as code: `name` with a number of slots, one for each feature of a lane ("full"), for each of its vectors
    ("once"), or a constant ("")."""

    name: str
    slots: str

    def at(self, r: str, i: str) -> str:
        if not self.slots:
            return self.name
        return f"{self.name}[{r} * VEC + {i}]" if self.slots == "full" else f"{self.name}[{r}]"


class _Loop(NamedTuple):
    """The inside of a sum over features: the feature that is read, and what has been computed for it."""

    feature: str
    lines: list[str]
    known: dict


class Writer:
    """Writes the kernels of a program; `domain` is the number of features that lanes are laid over."""

    def __init__(self, program: Program, form: Form, domain: int, lanes: int, repeats: int):
        self.program, self.form, self.domain, self.lanes, self.repeats = program, form, domain, lanes, repeats
        self.vec = form.vec
        self.wide = "f64" in form.leaves or "f64" in form.outputs
        self.row: list[str] = []  # once for each row
        self.loads: list[str] = []  # once for each edge, before what is computed of it
        self.edge: list[str] = []
        self.known: dict[tuple[int, View], Value] = {}
        self.gathers = 0
        self.meets = False  # lanes meet: all of a warp stay together
        self.names = 0
        self.widths = [math.prod(s.features) for s in program.steps]
        self.of_edge: list[bool] = []  # whether a step's value is of an edge, not of its row
        for step in program.steps:
            if step.op == "leaf":
                leaf = program.leaves[step.numbers[0]]
                self.of_edge.append(leaf.kind in "ue")
            else:
                self.of_edge.append(step.op == "winner" or any(self.of_edge[a] for a in step.args))

    def fresh(self, prefix: str = "x") -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    # Views.

    def lies(self, view: View) -> str:
        """How the numbers of a lane's vector lie: "full" side by side, or "once", all the same."""
        for div, length in view:
            if length == 1 or (div % self.vec == 0 and (div > 1 or self.vec == 1) and self.vec > 1):
                return "once"
            if self.vec > 1 and (div != 1 or length % self.vec):
                raise Scattered
        return "full"

    @staticmethod
    def index(view: View, feature: str) -> str:
        for div, length in view:
            if length == 1:
                return "0"
            feature = feature if div == 1 else f"({feature} / {div}u)"
            feature = f"({feature} % {length}u)"
        return feature

    def narrower(self, view: View, rule: tuple[int, int]) -> View:
        """The view of what `rule` (len, div) expands to something that is seen by `view`."""
        length, div = rule
        return _ONE if length == 1 else (*view, (div, length))

    def whole(self, width: int) -> View:
        """The view of a value by itself."""
        return () if width == self.domain else ((1, width),)

    # Values.

    def value(self, number: int, view: View, loop: _Loop | None = None) -> Value:
        """The code of a step's value as lanes see it, or inside a loop."""
        if view == _ONE:  # the same in every round: a loop inside each would multiply their lengths
            loop = None
        known = self.known if loop is None else loop.known
        found = known.get((number, view))
        if found is None:
            found = known[number, view] = self._value(number, view, loop)
        return found

    def _value(self, number: int, view: View, loop: _Loop | None) -> Value:
        step = self.program.steps[number]
        if step.op == "fill":
            return Value(_number(step.numbers[0]), "")
        if self.widths[number] == 0:  # beside wider ones: nobody reads or writes it
            return Value("A(0)", "")
        if step.op == "reshape":
            return self.value(step.args[0], view, loop)
        if step.op == "expand":
            rule = (int(step.numbers[0]), int(step.numbers[1]))
            return self.value(step.args[0], self.narrower(view, rule), loop)
        if step.op == "leaf":
            return self._leaf(number, view, loop)
        if step.op == "fold":
            return self._fold(number, view, loop)
        args = [self.value(a, view, loop) for a in step.args]
        slots = max((a.slots for a in args), key=("", "once", "full").index)
        return self._compute(number, slots, [*args], loop)

    def _lines(self, number: int, loop: _Loop | None) -> list[str]:
        if loop is not None:
            return loop.lines
        return self.edge if self.of_edge[number] else self.row

    def _declare(self, lines: list[str], slots: str, kind: str = "A") -> str:
        name = self.fresh()
        lines.append(f"{kind} {name}[{'S' if slots == 'full' else 'R'}];")
        return name

    def _each(self, slots: str, line: str) -> str:
        """`line` for each slot, by r and i."""
        loops = "FOR(r, R)" + (" FOR(i, VEC)" if slots == "full" else "")
        return f"{loops} {line}"

    def _compute(self, number: int, slots: str, args: list[Value], loop: _Loop | None) -> Value:
        step = self.program.steps[number]
        real = "double" if self.wide else "float"
        given = {key: arg.at("r", "i") for key, arg in zip("abc", args, strict=False)}
        given["f"] = "" if self.wide else "f"
        if step.op == "winner":
            text = f"{given['a']} == edge ? A(1) : A(0)"
        elif step.op == "sigmoid":
            text = _SIGMOID[real].format(**given)
        elif step.op == "round_bfloat16":
            text = "rounded({a})".format(**given)
        elif step.op == "round_float16":
            text = "rounded_to_half({a})".format(**given)
        elif step.op in _OF_NUMBER:
            text = _OF_NUMBER[step.op].format(p=_number(step.numbers[0]), **given)
        else:
            text = (_BINARY.get(step.op) or _UNARY[step.op]).format(**given)
        lines = self._lines(number, loop)
        if not slots:  # of constants alone
            name = self.fresh()
            lines.append(f"const A {name} = {text};")
            return Value(name, "")
        if loop is not None:
            name = self.fresh()
            lines.append(f"const A {name} = {text};")
            return Value(name, "")
        name = self._declare(lines, slots)
        value = Value(name, slots)
        lines.append(self._each(slots, f"{value.at('r', 'i')} = {text};"))
        return value

    def _leaf(self, number: int, view: View, loop: _Loop | None) -> Value:
        which = self.program.steps[number].numbers[0]
        leaf, kind = self.program.leaves[which], self.form.leaves[which]
        row = {"u": "source", "v": "row", "e": "edge", "c": "I(0)"}[leaf.kind]
        base = f"p.in{which}" if leaf.kind == "c" else f"p.in{which} + static_cast<int64_t>({row}) * p.step{which}"
        get = "" if leaf.ids else "widen"
        if loop is not None:
            name = self.fresh()
            result = "I" if leaf.ids else "A"
            at = self.index(view, loop.feature)
            loop.lines.append(f"const {result} {name} = {get}(__ldg_one({base} + {at}));")
            return Value(name, "")
        slots = self.lies(view)
        count = "S" if slots == "full" else "R"
        in_edge = self.of_edge[number]
        loads = self.loads if in_edge else self.row
        raw = self.fresh("raw")
        if in_edge:
            self.gathers += 1
            loads_from = f"{raw}[u]"
            self.row.append(f"{TYPES[kind]} {raw}[U][{count}];")
        else:
            loads_from = raw
            self.row.append(f"{TYPES[kind]} {raw}[{count}];")
        at = self.index(view, "d[r]")
        if slots == "full":
            # Gradients of a row may be written in its operands' place.
            how = "VEC" if in_edge else "VEC, false"
            loads.append(f"FOR(r, R) load<{how}>({base} + {at}, {loads_from} + r * VEC);")
        else:
            loads.append(f"FOR(r, R) load<1>({base} + {at}, {loads_from} + r);")
        if leaf.ids:
            return Value(loads_from, slots)
        lines = self._lines(number, None)
        name = self._declare(lines, slots)
        value, given = Value(name, slots), Value(loads_from, slots)
        lines.append(self._each(slots, f"{value.at('r', 'i')} = widen({given.at('r', 'i')});"))
        return value

    def _fold(self, number: int, view: View, loop: _Loop | None) -> Value:
        step = self.program.steps[number]
        length, div = int(step.numbers[0]), int(step.numbers[1])
        width = self.widths[step.args[0]]
        if loop is None and width == self.domain and view == self.natural(number) and self.sees_all(number):
            met = self._meet(number, length, div)
            if met is not None:
                return met
        return self._summed(number, length, div, width, view, loop)

    @property
    def slices(self) -> int:
        return -(-self.domain // (self.lanes * self.repeats * self.vec))

    def sees_all(self, number: int) -> bool:
        """True if a worker has all features that a sum over features is of."""
        step = self.program.steps[number]
        length, div = int(step.numbers[0]), int(step.numbers[1])
        return self.slices == 1 or (length > 1 and length * div == self.domain and self.lanes * self.vec % div == 0)

    def natural(self, number: int) -> View:
        """How lanes see a sum over their features."""
        step = self.program.steps[number]
        length, div = int(step.numbers[0]), int(step.numbers[1])
        return _ONE if length == 1 else ((div, length),)

    def _meet(self, number: int, length: int, div: int) -> Value | None:
        """The sum as lanes make it together; None where features do not lie so."""
        step, lines = self.program.steps[number], self._lines(number, None)
        vec, lanes = self.vec, self.lanes
        across: list[int] = []
        if length == 1:
            across = [1 << b for b in range(lanes.bit_length() - 1)]
            slots, one = "once", True
        elif length * div == self.domain and div % vec == 0:
            q = div // vec
            if q & (q - 1) or q > lanes:
                return None
            across = [1 << b for b in range(q.bit_length() - 1)]
            slots, one = ("once" if vec > 1 else self.lies(self.natural(number))), False
        elif div == 1 and length % vec == 0:
            q = length // vec
            if q & (q - 1) or q >= lanes:
                return None
            across = [1 << b for b in range(q.bit_length() - 1, lanes.bit_length() - 1)]
            slots, one = "full", True
        else:
            return None
        arg = self.value(step.args[0], ())
        if not arg.slots:
            return None
        name = self._declare(lines, slots)
        self.meets = self.meets or bool(across)
        x = arg.at("r", "i")
        if slots == "once" and one:
            total = self.fresh("s")
            lines.append(f"A {total} = A(0);")
            lines.append(f"FOR(r, R) FOR(i, VEC) {total} += active[r] ? {x} : A(0);")
            lines += [f"{total} += __shfl_xor_sync(~0u, {total}, {step_});" for step_ in across]
            lines.append(f"FOR(r, R) {name}[r] = {total};")
        elif one:  # over heads: of lanes as far apart, and of a lane's vectors
            total = self.fresh("s")
            lines.append(f"A {total}[VEC];")
            lines.append(f"FOR(i, VEC) {total}[i] = A(0);")
            lines.append(f"FOR(r, R) FOR(i, VEC) {total}[i] += active[r] ? {x} : A(0);")
            lines += [f"FOR(i, VEC) {total}[i] += __shfl_xor_sync(~0u, {total}[i], {step_});" for step_ in across]
            lines.append(f"FOR(r, R) FOR(i, VEC) {name}[r * VEC + i] = {total}[i];")
        else:
            lines.append(f"FOR(r, R) {name}[r] = A(0);")
            lines.append(f"FOR(r, R) FOR(i, VEC) {name}[r] += {x};")
            lines += [f"FOR(r, R) {name}[r] += __shfl_xor_sync(~0u, {name}[r], {step_});" for step_ in across]
        return Value(name, slots)

    def _summed(self, number: int, length: int, div: int, width: int, view: View, loop: _Loop | None) -> Value:
        """The sum as each lane makes it by itself."""
        slots = "" if loop is not None else self.lies(view)
        lines = self._lines(number, loop)
        count, other = width // (length * div), self.fresh("o")
        inner = self.fresh("t")
        feature = self.fresh("f")
        at = self.index(view, loop.feature if loop is not None else ("d[r]" if slots != "full" else "(d[r] + i)"))
        total = self.fresh("s")
        inside = _Loop(feature, [], {})
        body = self.value(self.program.steps[number].args[0], (), inside)
        walk = [
            f"A {total} = A(0);",
            f"for (unsigned {other} = 0; {other} < {count}u; ++{other})",
            f"  for (unsigned {inner} = 0; {inner} < {div}u; ++{inner}) {{",
            f"    const unsigned {feature} = ({other} * {length}u + {at}) * {div}u + {inner};",
            *(f"    {line}" for line in inside.lines),
            f"    {total} += {body.at('r', 'i')};",
            "  }",
        ]
        if loop is not None:
            lines += walk
            return Value(total, "")
        name = self._declare(lines, slots)
        value = Value(name, slots)
        lines.append(self._each(slots, "{"))
        lines += [f"  {line}" for line in walk]
        lines.append(f"  {value.at('r', 'i')} = {total};")
        lines.append("}")
        return value
