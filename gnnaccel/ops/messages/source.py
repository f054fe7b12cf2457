"""Programs as CUDA C++: a kernel that walks over the edges, and one that merges the pieces of long rows.

A worker is a group of LANES threads that take VEC features each, and of OTHERS such groups that take the edges in
turns where rows are narrow. It has a row or a piece of one (cuda/walk.cuh). What depends on the row alone is computed
before its edges. A narrow value that wide ones read is kept as each lane sees it (`View`); a sum over features is a
sum over lanes where they lie so, else a loop.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from gnnaccel.ops.messages.program import Program
from gnnaccel.schedule.worklist import PIECE_RUN

THREADS = 256
MERGE_THREADS = 256  # kMergeThreads of cuda/walk.cuh
_MOST_LANES = 32
_MOST_SLOTS = 64  # features of a lane, for sums over features: more than registers, but loops would be quadratic
MOST_FEATURES = _MOST_LANES * _MOST_SLOTS
_IN_FLIGHT = 4  # edges of a lane

View = tuple[tuple[int, int], ...]  # feature d of a lane reads (d / div) % len, and of that the next
_ONE: View = ((1, 1),)  # of one number: the same for all who read it, so that it is made once

_TYPES = {"f32": "float", "f64": "double", "bf16": "Bf16", "i32": "int32_t", "i64": "int64_t"}
_BYTES = {"f32": 4, "f64": 8, "bf16": 2, "i32": 4, "i64": 8}


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


class Source(NamedTuple):
    """A program as CUDA C++, and how it is to be launched.

    lanes, others : threads of a worker are lanes * others. slices : workers of a row, of other features each.
    merge_slices : of the merging kernel, 0 if there is nothing to merge.
    """

    text: str
    lanes: int
    others: int
    slices: int
    merge_slices: int


class _Scattered(Exception):
    """A value whose numbers do not lie as vectors of `vec` read them."""


_PROLOGUE = """\
#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif
"""

_HELPERS = """\
using namespace gnnaccel::cuda;

namespace {

struct Bf16 {
  uint16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ void narrow(A x, float* to) { *to = static_cast<float>(x); }
__device__ __forceinline__ void narrow(A x, double* to) { *to = static_cast<double>(x); }
__device__ __forceinline__ void narrow(A x, Bf16* to) {
  const float value = static_cast<float>(x);
  const uint32_t bits = __float_as_uint(value);
  to->bits = static_cast<uint16_t>(value != value ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
__device__ __forceinline__ A infinite() { return static_cast<A>(__uint_as_float(0x7F800000u)); }
__device__ __forceinline__ A not_a_number() { return static_cast<A>(__uint_as_float(0x7FC00000u)); }

template <int BYTES>
struct Raw;
template <>
struct Raw<2> {
  using type = uint16_t;
};
template <>
struct Raw<4> {
  using type = uint32_t;
};
template <>
struct Raw<8> {
  using type = uint2;
};
template <>
struct Raw<16> {
  using type = uint4;
};

// N numbers, by as few loads or stores as there are.
template <int N, typename T>
__device__ __forceinline__ void load(const T* from, T* to) {
  constexpr int bytes = N * static_cast<int>(sizeof(T)), step = bytes < 16 ? bytes : 16, count = step / sizeof(T);
  using R = typename Raw<step>::type;
#pragma unroll
  for (int i = 0; i < bytes / step; ++i) {
    union Both {
      R raw;
      T values[count];
      __device__ __forceinline__ Both() {}
    } both;
    both.raw = __ldg(reinterpret_cast<const R*>(from) + i);
#pragma unroll
    for (int j = 0; j < count; ++j) to[i * count + j] = both.values[j];
  }
}
template <int N, typename T>
__device__ __forceinline__ void store(T* to, const A* from) {
  constexpr int bytes = N * static_cast<int>(sizeof(T)), step = bytes < 16 ? bytes : 16, count = step / sizeof(T);
  using R = typename Raw<step>::type;
#pragma unroll
  for (int i = 0; i < bytes / step; ++i) {
    union Both {
      R raw;
      T values[count];
      __device__ __forceinline__ Both() {}
    } both;
#pragma unroll
    for (int j = 0; j < count; ++j) narrow(from[i * count + j], both.values + j);
    reinterpret_cast<R*>(to)[i] = both.raw;
  }
}

// What two pieces, or lanes, of a row have found; pos: the nonzero of an extremum, -1 of none.
struct PieceState {
  double value;
  int64_t pos;
  __device__ __forceinline__ void clear() {
    value = 0;
    pos = -1;
  }
};
template <typename V>
__device__ __forceinline__ bool is_better(V x, int64_t pos, V than, int64_t than_pos, bool greatest) {
  if (pos < 0 || than_pos < 0) return pos >= 0;
  if (x != x || than != than) return x != x && (than == than || pos < than_pos);
  return (greatest ? x > than : x < than) || (x == than && pos < than_pos);
}
"""

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


class _Value(NamedTuple):
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


class _Writer:
    """Writes the kernels of a program; `domain` is the number of features that lanes are laid over."""

    def __init__(self, program: Program, form: Form, domain: int, lanes: int, repeats: int):
        self.program, self.form, self.domain, self.lanes, self.repeats = program, form, domain, lanes, repeats
        self.vec = form.vec
        self.wide = "f64" in form.leaves or "f64" in form.outputs
        self.row: list[str] = []  # once for each row
        self.loads: list[str] = []  # once for each edge, before what is computed of it
        self.edge: list[str] = []
        self.known: dict[tuple[int, View], _Value] = {}
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
                raise _Scattered
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

    def value(self, number: int, view: View, loop: _Loop | None = None) -> _Value:
        """The code of a step's value as lanes see it, or inside a loop."""
        if view == _ONE:  # the same in every round: a loop inside each would multiply their lengths
            loop = None
        known = self.known if loop is None else loop.known
        found = known.get((number, view))
        if found is None:
            found = known[number, view] = self._value(number, view, loop)
        return found

    def _value(self, number: int, view: View, loop: _Loop | None) -> _Value:
        step = self.program.steps[number]
        if step.op == "fill":
            return _Value(_number(step.numbers[0]), "")
        if self.widths[number] == 0:  # beside wider ones: nobody reads or writes it
            return _Value("A(0)", "")
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

    def _compute(self, number: int, slots: str, args: list[_Value], loop: _Loop | None) -> _Value:
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
        elif step.op in _OF_NUMBER:
            text = _OF_NUMBER[step.op].format(p=_number(step.numbers[0]), **given)
        else:
            text = (_BINARY.get(step.op) or _UNARY[step.op]).format(**given)
        lines = self._lines(number, loop)
        if not slots:  # of constants alone
            name = self.fresh()
            lines.append(f"const A {name} = {text};")
            return _Value(name, "")
        if loop is not None:
            name = self.fresh()
            lines.append(f"const A {name} = {text};")
            return _Value(name, "")
        name = self._declare(lines, slots)
        value = _Value(name, slots)
        lines.append(self._each(slots, f"{value.at('r', 'i')} = {text};"))
        return value

    def _leaf(self, number: int, view: View, loop: _Loop | None) -> _Value:
        which = self.program.steps[number].numbers[0]
        leaf, kind = self.program.leaves[which], self.form.leaves[which]
        width = self.widths[number]
        row = {"u": "source", "v": "row", "e": "edge", "c": "I(0)"}[leaf.kind]
        base = f"p.in{which}" if leaf.kind == "c" else f"p.in{which} + static_cast<int64_t>({row}) * {width}"
        get = "" if leaf.ids else "widen"
        if loop is not None:
            name = self.fresh()
            result = "I" if leaf.ids else "A"
            at = self.index(view, loop.feature)
            loop.lines.append(f"const {result} {name} = {get}(__ldg_one({base} + {at}));")
            return _Value(name, "")
        slots = self.lies(view)
        count = "S" if slots == "full" else "R"
        in_edge = self.of_edge[number]
        loads = self.loads if in_edge else self.row
        raw = self.fresh("raw")
        if in_edge:
            self.gathers += 1
            loads_from = f"{raw}[u]"
            self.row.append(f"{_TYPES[kind]} {raw}[U][{count}];")
        else:
            loads_from = raw
            self.row.append(f"{_TYPES[kind]} {raw}[{count}];")
        at = self.index(view, "d[r]")
        if slots == "full":
            loads.append(f"FOR(r, R) load<VEC>({base} + {at}, {loads_from} + r * VEC);")
        else:
            loads.append(f"FOR(r, R) load<1>({base} + {at}, {loads_from} + r);")
        if leaf.ids:
            return _Value(loads_from, slots)
        lines = self._lines(number, None)
        name = self._declare(lines, slots)
        value, given = _Value(name, slots), _Value(loads_from, slots)
        lines.append(self._each(slots, f"{value.at('r', 'i')} = widen({given.at('r', 'i')});"))
        return value

    def _fold(self, number: int, view: View, loop: _Loop | None) -> _Value:
        step = self.program.steps[number]
        length, div = int(step.numbers[0]), int(step.numbers[1])
        width = self.widths[step.args[0]]
        if loop is None and width == self.domain and self.slices == 1 and view == self.natural(number):
            met = self._meet(number, length, div)
            if met is not None:
                return met
        return self._summed(number, length, div, width, view, loop)

    @property
    def slices(self) -> int:
        return -(-self.domain // (self.lanes * self.repeats * self.vec))

    def natural(self, number: int) -> View:
        """How lanes see a sum over their features."""
        step = self.program.steps[number]
        length, div = int(step.numbers[0]), int(step.numbers[1])
        return _ONE if length == 1 else ((div, length),)

    def _meet(self, number: int, length: int, div: int) -> _Value | None:
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
        return _Value(name, slots)

    def _summed(self, number: int, length: int, div: int, width: int, view: View, loop: _Loop | None) -> _Value:
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
            return _Value(total, "")
        name = self._declare(lines, slots)
        value = _Value(name, slots)
        lines.append(self._each(slots, "{"))
        lines += [f"  {line}" for line in walk]
        lines.append(f"  {value.at('r', 'i')} = {total};")
        lines.append("}")
        return value


def _lanes_over(domain: int, vec: int) -> int:
    lanes = 1
    while lanes * vec < domain and lanes < _MOST_LANES:
        lanes *= 2
    return lanes


class _Kernel:
    """The whole source of a program in one form."""

    def __init__(self, program: Program, form: Form, domain: int, together: bool):
        """together : lanes hold all features of a row at once, so that they can meet."""
        self.program, self.form = program, form
        lanes = _lanes_over(domain, form.vec)
        repeats = -(-domain // (lanes * form.vec)) if together else 1
        self.w = w = _Writer(program, form, domain, lanes, repeats)
        self.widths = [w.widths[o.step] for o in program.outputs]
        self.views = [self._view_of(o.step) for o in program.outputs]
        self.values = [w.value(o.step, view) for o, view in zip(program.outputs, self.views, strict=True)]
        slots = repeats * form.vec
        self.in_flight = _IN_FLIGHT
        while self.in_flight > 1 and self.in_flight * slots * max(1, w.gathers) > 64:
            self.in_flight //= 2
        self.others = max(1, min(8 // lanes, PIECE_RUN // self.in_flight))

    def _view_of(self, number: int) -> View:
        """How lanes see an output: as a sum over features that it is made of, if they can."""
        w = self.w
        width = w.widths[number]
        if width == w.domain:
            return ()
        steps, waiting, seen = self.program.steps, [number], set()
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            step = steps[at]
            if step.op == "fold" and w.widths[step.args[0]] == w.domain and w.slices == 1 and w.widths[at] == width:
                return w.natural(at)
            if step.op not in ("expand", "fold"):
                waiting += step.args
        return w.whole(width)

    def _owner(self, o: int) -> tuple[str, str]:
        """Whether vector r of a lane is to be written, and as which feature."""
        view = self.views[o]
        if not view:
            return "active[r]", "at[r]"
        div, length = view[0]
        if length == 1 and self.widths[o] == 1:
            return "at[r] == 0u", "0u"
        if div == 1:
            return f"at[r] < {length}u", "at[r]"
        return f"at[r] % {div}u == 0u && at[r] / {div}u < {length}u", f"at[r] / {div}u"

    def source(self) -> Source:
        program, form, w = self.program, self.form, self.w
        threads_of_worker = w.lanes * self.others
        merged = [o for o, output in enumerate(program.outputs) if output.reduce != "none"]
        together = w.meets or self.others > 1
        lines = [f"// {line}" for line in str(program).splitlines()]
        lines += [f"// of {', '.join(form.leaves)} to {', '.join(form.outputs)}"]
        lines += self._parameters()
        lines += self._walk(together, threads_of_worker)
        merge_slices = 0
        if merged:
            text, merge_slices = self._merge(merged)
            lines += text
        return Source("\n".join(lines) + "\n", w.lanes, self.others, w.slices, merge_slices)

    def _parameters(self) -> list[str]:
        form, w = self.form, self.w
        lines = [
            f"using A = {'double' if w.wide else 'float'};",
            f"using I = {_TYPES[form.indices]};",
            _HELPERS,
            f"constexpr int LANES = {w.lanes}, OTHERS = {self.others}, R = {w.repeats}, VEC = {w.vec}, S = R * VEC, "
            f"U = {self.in_flight};",
            '#define FOR(name, count) _Pragma("unroll") for (int name = 0; name < count; ++name)',
            "template <typename T>",
            "__device__ __forceinline__ T __ldg_one(const T* from) {",
            "  T value;",
            "  load<1>(from, &value);",
            "  return value;",
            "}",
            "__device__ __forceinline__ A rounded(A x) {",
            "  Bf16 narrowed;",
            "  narrow(x, &narrowed);",
            "  return widen(narrowed);",
            "}",
            "struct Params {",
            "  Rows<I> rows;",
            "  const I* indices;",
            "  const I* edge_ids;",
        ]
        lines += [f"  const {_TYPES[kind]}* in{i};" for i, kind in enumerate(form.leaves)]
        for o, kind in enumerate(form.outputs):
            lines += [f"  {_TYPES[kind]}* out{o};", f"  I* winners{o};", f"  A* part{o};", f"  I* pos{o};"]
        return [*lines, "};", "", "}  // namespace", ""]

    def _walk(self, together: bool, threads: int) -> list[str]:
        program, w = self.program, self.w
        lines = [
            f'extern "C" __global__ void __launch_bounds__({THREADS}) gnnaccel_message_walk(const Params p) {{',
            "  const int lane = threadIdx.x % LANES, other = threadIdx.x / LANES % OTHERS;",
            f"  const Span<I> span = span_of(p.rows, static_cast<int64_t>(blockIdx.x) * {THREADS // threads} + "
            f"threadIdx.x / {threads});",
        ]
        if not together:
            lines.append("  if (!span.present) return;")
        lines += [
            "  const I row = span.row;",
            "  unsigned at[R], d[R];",
            "  bool active[R];",
            "  FOR(r, R) {",
            "    at[r] = ((blockIdx.y * R + r) * LANES + lane) * VEC;",
            f"    active[r] = at[r] < {w.domain}u;",
            "    d[r] = active[r] ? at[r] : 0u;",
            "  }",
            *(f"  {line}" for line in w.row),
        ]
        for o, output in enumerate(program.outputs):
            if output.reduce == "none":
                continue
            count = self._count(o)
            lines.append(f"  A acc{o}[{count}];")
            lines.append(f"  FOR(j, {count}) acc{o}[j] = A(0);")
            if output.reduce in ("max", "min"):
                lines.append(f"  I best{o}[{count}];")
                lines.append(f"  FOR(j, {count}) best{o}[j] = I(-1);")
        lines += [
            "  I k = span.begin;",
            "  while (__any_sync(~0u, k < span.end)) {" if together else "  while (k < span.end) {",
            "    I nonzero[U], sources[U], edges[U];",
            "    bool present[U];",
            "    FOR(u, U) {",
            "      const I ahead = u * OTHERS + other;",
            "      present[u] = ahead < span.end - k;",
            "      nonzero[u] = present[u] ? k + ahead : I(0);",
            "    }",
            f"    FOR(u, U) sources[u] = {'__ldg(p.indices + nonzero[u])' if self._reads('u') else 'I(0)'};",
            "    FOR(u, U) edges[u] = p.edge_ids ? __ldg(p.edge_ids + nonzero[u]) : nonzero[u];",
            "    FOR(u, U) {",
            "      const I source = sources[u], edge = edges[u];",
            *(f"      {line}" for line in w.loads),
            "    }",
            "    FOR(u, U) {",
            "      const I source = sources[u], edge = edges[u];",
            *(f"      {line}" for line in w.edge),
            *(f"      {line}" for o in range(len(program.outputs)) for line in self._take(o)),
            "    }",
            "    const I left = span.end - k;",
            "    const I next = (k - span.begin + U * OTHERS) % kPieceRun ? I(U * OTHERS) : U * OTHERS + span.skip;",
            "    k = left > next ? k + next : span.end;",
            "  }",
        ]
        if together:
            lines += self._join()
            lines.append("  if (!span.present || other) return;")
        for o, output in enumerate(program.outputs):
            if output.reduce != "none":
                lines += [f"  {line}" for line in self._write(o)]
        return [*lines, "}", ""]

    def _reads(self, kind: str) -> bool:
        return any(leaf.kind == kind for leaf in self.program.leaves)

    def _slots(self, o: int) -> str:
        """How many numbers of an output a lane has: of one that is the same for a whole vector no fewer."""
        return self.w.lies(self.views[o])

    def _count(self, o: int) -> str:
        return "S" if self._slots(o) == "full" else "R"

    def _take(self, o: int) -> list[str]:
        """An edge's message, taken into what there is of the row, or written."""
        output, value, slots = self.program.outputs[o], self.values[o], self._slots(o)
        x = value.at("r", "i")
        each = "FOR(r, R)" + (" FOR(i, VEC)" if slots == "full" else "")
        here = "r * VEC + i" if slots == "full" else "r"
        if output.reduce in ("sum", "mean"):
            return [f"{each} acc{o}[{here}] += present[u] ? {x} : A(0);"]
        if output.reduce in ("max", "min"):
            sign = ">" if output.reduce == "max" else "<"
            a, b = f"acc{o}[{here}]", f"best{o}[{here}]"
            return [
                f"{each} {{",
                f"  const A x = {x};",
                f"  if (present[u] && ({b} < I(0) || x {sign} {a} || (x != x && {a} == {a}))) {{",
                f"    {a} = x;",
                f"    {b} = nonzero[u];",
                "  }",
                "}",
            ]
        owner, feature = self._owner(o)
        to = f"p.out{o} + static_cast<int64_t>(edge) * {self.widths[o]} + {feature}"
        made = self._made(value, slots)
        return [
            f"if (present[u]) FOR(r, R) if ({owner}) {{",
            *(f"  {line}" for line in made),
            f"  store<{'VEC' if slots == 'full' else 1}>({to}, made);",
            "}",
        ]

    @staticmethod
    def _made(value: _Value, slots: str) -> list[str]:
        if slots == "full":
            return ["A made[VEC];", f"FOR(i, VEC) made[i] = {value.at('r', 'i')};"]
        return ["A made[1];", f"made[0] = {value.at('r', '0')};"]

    def _join(self) -> list[str]:
        """What the groups of a worker have found, in all of them."""
        lines = []
        steps, step = [], self.w.lanes
        while step < self.w.lanes * self.others:
            steps.append(step)
            step *= 2
        for o, output in enumerate(self.program.outputs):
            count = self._count(o)
            for step in steps:
                if output.reduce in ("sum", "mean"):
                    lines.append(f"  FOR(j, {count}) acc{o}[j] += __shfl_xor_sync(~0u, acc{o}[j], {step});")
                elif output.reduce in ("max", "min"):
                    lines += [
                        f"  FOR(j, {count}) {{",
                        f"    const A x = __shfl_xor_sync(~0u, acc{o}[j], {step});",
                        f"    const I whose = __shfl_xor_sync(~0u, best{o}[j], {step});",
                        f"    if (is_better(x, whose, acc{o}[j], best{o}[j], {_greatest(output)})) {{",
                        f"      acc{o}[j] = x;",
                        f"      best{o}[j] = whose;",
                        "    }",
                        "  }",
                    ]
        return lines

    def _write(self, o: int) -> list[str]:
        output, slots, width = self.program.outputs[o], self._slots(o), self.widths[o]
        owner, feature = self._owner(o)
        full = slots == "full"
        extreme = output.reduce in ("max", "min")
        count = "VEC" if full else "1"
        mine = f"acc{o} + r * VEC" if full else f"acc{o} + r"
        whose = f"best{o}[r * VEC + i]" if full else f"best{o}[r]"
        lines = [
            f"FOR(r, R) if ({owner}) {{",
            "  if (span.part >= 0) {",
            f"    const int64_t to = span.part * {width} + {feature};",
            f"    FOR(i, {count}) p.part{o}[to + i] = ({mine})[i];",
        ]
        if extreme:
            lines.append(f"    FOR(i, {count}) p.pos{o}[to + i] = {whose};")
        lines += ["  } else {", f"    const int64_t to = static_cast<int64_t>(row) * {width} + {feature};"]
        if output.reduce == "mean":
            lines.append(
                f"    if (span.end > span.begin) FOR(i, {count}) ({mine})[i] /= static_cast<A>(span.end - span.begin);"
            )
        lines.append(f"    store<{count}>(p.out{o} + to, {mine});")
        if extreme:
            lines.append(
                f"    if (p.winners{o}) FOR(i, {count}) p.winners{o}[to + i] = "
                f"{whose} >= 0 && p.edge_ids ? __ldg(p.edge_ids + {whose}) : {whose};"
            )
        return [*lines, "  }", "}"]

    def _merge(self, merged: list[int]) -> tuple[list[str], int]:
        lines, slices = ["namespace {", ""], 0
        cases: list[str] = []
        for o in merged:
            output, width = self.program.outputs[o], self.widths[o]
            extreme = output.reduce in ("max", "min")
            pos = f"static_cast<int64_t>(p.pos{o}[piece * {width} + d])" if extreme else "int64_t(-1)"
            lines += [
                f"struct Job{o} {{",
                "  using State = PieceState;",
                "  const Params& p;",
                "  __device__ __forceinline__ State read(int64_t piece, int64_t d) const {",
                "    State state;",
                f"    state.value = static_cast<double>(p.part{o}[piece * {width} + d]);",
                f"    state.pos = {pos};",
                "    return state;",
                "  }",
                "  __device__ __forceinline__ void add(State& state, const State& other) const {",
            ]
            if extreme:
                lines.append(
                    "    if (is_better(other.value, other.pos, state.value, state.pos, "
                    f"{_greatest(output)})) state = other;"
                )
            else:
                lines.append("    state.value += other.value;")
            lines += [
                "  }",
                "  __device__ __forceinline__ void write(const Pieces<I>& pieces, int64_t d,",
                "                                        const State& state) const {",
                f"    const int64_t to = pieces.row * {width} + d;",
                "    double value = state.value;",
            ]
            if output.reduce == "mean":
                lines.append(
                    "    value /= static_cast<double>(__ldg(p.rows.indptr + pieces.row + 1) - "
                    "__ldg(p.rows.indptr + pieces.row));"
                )
            lines.append(f"    narrow(static_cast<A>(value), p.out{o} + to);")
            if extreme:
                lines.append(
                    f"    if (p.winners{o}) p.winners{o}[to] = "
                    "p.edge_ids ? __ldg(p.edge_ids + state.pos) : static_cast<I>(state.pos);"
                )
            lines += ["  }", "};", ""]
            mine = -(-width // 32)
            cases += [
                f"  {'} else ' if cases else ''}if (slice < {slices + mine}u) {{",
                f"    merge_rows(p.rows, int64_t({width}), int64_t(slice - {slices}u), Job{o}{{p}}, shared);",
            ]
            slices += mine
        lines += [
            "}  // namespace",
            "",
            f'extern "C" __global__ void __launch_bounds__({MERGE_THREADS}) gnnaccel_message_merge(const Params p) {{',
            f"  __shared__ PieceState shared[{MERGE_THREADS // 32}][32];",
            "  const unsigned slice = blockIdx.y;",
            *cases,
            "  }",
            "}",
        ]
        return lines, slices


def _greatest(output) -> str:
    return "true" if output.reduce == "max" else "false"


@functools.lru_cache(maxsize=1024)
def source_of(program: Program, form: Form) -> Source | None:
    """The source of a program; None where `form.vec` numbers of an operand do not lie side by side."""
    widths = [math.prod(s.features) for s in program.steps]
    folds = any(s.op == "fold" for s in program.steps)
    outputs = max(widths[o.step] for o in program.outputs)
    together = folds and -(-max(widths) // (_MOST_LANES * form.vec)) * form.vec <= _MOST_SLOTS
    domain = max(widths) if together else outputs
    if domain % form.vec:
        return None
    try:
        return _Kernel(program, form, domain, together).source()
    except _Scattered:
        return None


@functools.lru_cache(maxsize=1024)
def is_too_wide(program: Program) -> bool:
    """True for a program of so many features that sums over them, its own or those of a gradient, would be loops in
    each lane: the gradient of what is expanded is such a sum."""
    sums = any(s.op in ("expand", "fold") for s in program.steps)
    return sums and max(math.prod(s.features) for s in program.steps) > MOST_FEATURES


def whole(source: Source, walk: str) -> str:
    """All that is compiled: `walk` is the text of cuda/walk.cuh."""
    return _PROLOGUE + walk.replace("#pragma once", "") + "\n" + source.text
