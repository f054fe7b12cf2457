"""Programs as CUDA C++: a kernel that walks over the edges, and one that merges the pieces of long rows.

A worker is a group of LANES threads that take VEC features each, and of OTHERS such groups that take the edges in
turns where rows are narrow. It has a row or a piece of one (cuda/walk.cuh). What depends on the row alone is computed
before its edges.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from gnnaccel.lower import bounds
from gnnaccel.ops.messages.device_code import HELPERS, PROLOGUE
from gnnaccel.ops.messages.values import TYPES, Form, Scattered, Value, View, Writer
from gnnaccel.program.program import SOFT, TO_ROWS, Program
from gnnaccel.schedule.worklist import PIECE_RUN

THREADS = 256
MERGE_THREADS = 256  # kMergeThreads of cuda/walk.cuh
MOST_FEATURES = bounds.MESSAGE_LANES * bounds.MESSAGE_SLOTS


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


def _lanes_over(domain: int, vec: int) -> int:
    lanes = 1
    while lanes * vec < domain and lanes < bounds.MESSAGE_LANES:
        lanes *= 2
    return lanes


class _Kernel:
    """The whole source of a program in one form."""

    def __init__(self, program: Program, form: Form, domain: int, together: bool):
        """together : lanes hold all features of a row at once, so that they can meet."""
        self.program, self.form = program, form
        lanes = _lanes_over(domain, form.vec)
        repeats = -(-domain // (lanes * form.vec)) if together and not _closed(program, domain, form.vec, lanes) else 1
        self.w = w = Writer(program, form, domain, lanes, repeats)
        self.widths = [w.widths[o.step] for o in program.outputs]
        self.views = [self._view_of(o.step) for o in program.outputs]
        self.values = [w.value(o.step, view) for o, view in zip(program.outputs, self.views, strict=True)]
        self.owns = [None if o.own < 0 else w.value(o.own, ()) for o in program.outputs]
        # The scores of each softmax, as the lanes of its outputs see them; equal ones have one state.
        self.scores: list[Value] = []
        self.softmax_of: dict[int, int] = {}
        for o, output in enumerate(program.outputs):
            if output.reduce in SOFT:
                score = self.values[o] if output.reduce != "soft" else w.value(output.by, self.views[o])
                if score not in self.scores:
                    self.scores.append(score)
                self.softmax_of[o] = self.scores.index(score)
        slots = repeats * form.vec
        self.in_flight = bounds.MESSAGE_EDGES
        if lanes >= bounds.MESSAGE_EDGES_LANES and slots * w.gathers <= 4:  # 16 bytes of an edge
            self.in_flight *= 2
        while self.in_flight > 1 and self.in_flight * slots * max(1, w.gathers) > bounds.MESSAGE_REGISTERS:
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
            if step.op == "fold" and w.widths[step.args[0]] == w.domain and w.widths[at] == width and w.sees_all(at):
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
        merged = [o for o, output in enumerate(program.outputs) if output.reduce in TO_ROWS]
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
            f"using I = {TYPES[form.indices]};",
            HELPERS,
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
            "__device__ __forceinline__ A rounded_to_half(A x) {",
            "  Half narrowed;",
            "  narrow(x, &narrowed);",
            "  return widen(narrowed);",
            "}",
            "struct Params {",
            "  Rows<I> rows;",
            "  const I* indices;",
            "  const I* edge_ids;",
        ]
        # In this order `generated.Launch` has them: what is the same for all calls first.
        lines += [f"  int64_t step{i};" for i in range(len(form.leaves))]  # numbers from row to row
        lines += [f"  int64_t next{o};" for o in range(len(form.outputs))]
        lines += [f"  const {TYPES[kind]}* in{i};" for i, kind in enumerate(form.leaves)]
        lines += [f"  {TYPES[kind]}* out{o};" for o, kind in enumerate(form.outputs)]
        for o, output in enumerate(self.program.outputs):  # of pieces: what there is, whose or how it is weighed
            first, last = ("A* logs", "A* tops") if output.reduce in SOFT else ("I* argmax", "I* pos")
            lines += [f"  {first}{o};", f"  A* part{o};", f"  {last}{o};"]
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
            if output.reduce not in TO_ROWS:
                continue
            count = self._count(o)
            lines.append(f"  A acc{o}[{count}];")
            lines.append(f"  FOR(j, {count}) acc{o}[j] = A(0);")
            if output.reduce in ("max", "min"):
                lines.append(f"  I best{o}[{count}];")
                lines.append(f"  FOR(j, {count}) best{o}[j] = I(-1);")
        for j in range(len(self.scores)):
            count = self._state_count(j)
            lines.append(f"  A top{j}[{count}], all{j}[{count}];")
            lines.append(f"  FOR(j, {count}) top{j}[j] = -infinite(), all{j}[j] = A(0);")
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
            *(f"      {line}" for j in range(len(self.scores)) for line in self._weigh(j)),
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
        if any(output.reduce == "row" or output.own >= 0 for output in program.outputs):
            lines.append("  const bool first = span.part < 0 || span.begin == __ldg(p.rows.indptr + row);")
        for o, output in enumerate(program.outputs):
            if output.reduce in TO_ROWS:
                lines += [f"  {line}" for line in self._write(o)]
            elif output.reduce == "row":
                lines += [f"  {line}" for line in self._write_row(o)]
        return [*lines, "}", ""]

    def _reads(self, kind: str) -> bool:
        return any(leaf.kind == kind for leaf in self.program.leaves)

    def _slots(self, o: int) -> str:
        """How many numbers of an output a lane has: of one that is the same for a whole vector no fewer."""
        return self.w.lies(self.views[o])

    def _count(self, o: int) -> str:
        return "S" if self._slots(o) == "full" else "R"

    def _state_count(self, j: int) -> str:
        return "S" if self.scores[j].slots == "full" else "R"

    def _state(self, o: int) -> tuple[int, str]:
        """The softmax of an output, and where a slot of the output finds its state."""
        j = self.softmax_of[o]
        return j, "r * VEC + i" if self.scores[j].slots == "full" else "r"

    def _weigh(self, j: int) -> list[str]:
        """An edge's score, taken into the greatest one and the sum of exponentials; `up` is what that multiplies the
        sums there are by."""
        score, count = self.scores[j], self._state_count(j)
        each = "FOR(r, R) FOR(i, VEC)" if score.slots == "full" else "FOR(r, R)"
        here = "r * VEC + i" if score.slots == "full" else "r"
        return [
            f"A up{j}[{count}], weight{j}[{count}];",
            f"{each} {{",
            f"  const A x = {score.at('r', 'i')}, before = top{j}[{here}];",
            "  const A most = present[u] && x > before ? x : before;",
            f"  up{j}[{here}] = most == before ? A(1) : power(before - most);",
            f"  weight{j}[{here}] = !present[u] || x == -infinite() ? A(0) : power(x - most);",
            f"  all{j}[{here}] = all{j}[{here}] * up{j}[{here}] + weight{j}[{here}];",
            f"  top{j}[{here}] = most;",
            "}",
        ]

    def _take(self, o: int) -> list[str]:
        """An edge's message, taken into what there is of the row, or written."""
        output, value, slots = self.program.outputs[o], self.values[o], self._slots(o)
        x = value.at("r", "i")
        if output.reduce == "row" or (output.reduce in SOFT and output.reduce != "soft"):
            return []
        each = "FOR(r, R)" + (" FOR(i, VEC)" if slots == "full" else "")
        here = "r * VEC + i" if slots == "full" else "r"
        if output.reduce in ("sum", "mean"):
            return [f"{each} acc{o}[{here}] += present[u] ? {x} : A(0);"]
        if output.reduce == "soft":
            j, at = self._state(o)
            added = f"(present[u] ? weight{j}[{at}] * ({x}) : A(0))"
            return [f"{each} acc{o}[{here}] = acc{o}[{here}] * up{j}[{at}] + {added};"]
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
        to = f"p.out{o} + static_cast<int64_t>(edge) * p.next{o} + {feature}"
        made = self._made(value, slots)
        return [
            f"if (present[u]) FOR(r, R) if ({owner}) {{",
            *(f"  {line}" for line in made),
            f"  store<{'VEC' if slots == 'full' else 1}>({to}, made);",
            "}",
        ]

    @staticmethod
    def _made(value: Value, slots: str) -> list[str]:
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
        for j, score in enumerate(self.scores):
            count = self._state_count(j)
            for step in steps:
                lines += [
                    f"  FOR(j, {count}) {{",
                    f"    const A other_top = __shfl_xor_sync(~0u, top{j}[j], {step});",
                    f"    const A other_all = __shfl_xor_sync(~0u, all{j}[j], {step});",
                    f"    const A most = other_top > top{j}[j] ? other_top : top{j}[j];",
                    f"    const A up = top{j}[j] == most ? A(1) : power(top{j}[j] - most);",
                    "    const A other_up = other_top == most ? A(1) : power(other_top - most);",
                    f"    all{j}[j] = all{j}[j] * up + other_all * other_up;",
                    f"    top{j}[j] = most;",
                    *(line for o in self._softs(j) for line in self._join_soft(o, score, step)),
                    "  }",
                ]
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

    def _softs(self, j: int) -> list[int]:
        return [o for o, whose in self.softmax_of.items() if whose == j and self.program.outputs[o].reduce == "soft"]

    def _join_soft(self, o: int, score: Value, step: int) -> list[str]:
        """The sums of an output that state j weighs."""
        one = f"acc{o}[at] = acc{o}[at] * up + __shfl_xor_sync(~0u, acc{o}[at], {step}) * other_up;"
        if self._count(o) == self._state_count(self.softmax_of[o]):
            return [f"    {{ const int at = j; {one} }}"]
        return [f"    FOR(i, VEC) {{ const int at = j * VEC + i; {one} }}"]

    def _write(self, o: int) -> list[str]:
        output, slots, width = self.program.outputs[o], self._slots(o), self.widths[o]
        owner, feature = self._owner(o)
        full = slots == "full"
        extreme = output.reduce in ("max", "min")
        count = "VEC" if full else "1"
        mine = f"acc{o} + r * VEC" if full else f"acc{o} + r"
        whose = f"best{o}[r * VEC + i]" if full else f"best{o}[r]"
        softmax: list[str] = []
        if output.reduce in SOFT:
            j, at = self._state(o)
            top, log = f"top{j}[{at}]", f"logarithm(all{j}[{at}])"
            made = {"top": top, "logtotal": log, "logsumexp": f"{top} + {log}", "soft": f"({mine})[i] / all{j}[{at}]"}
            empty = "A(0)" if output.reduce == "soft" else "-infinite()"
            value = made[output.reduce]
            softmax = [f"  FOR(i, {count}) ({mine})[i] = span.end > span.begin ? {value} : {empty};"]
        lines = [
            f"FOR(r, R) if ({owner}) {{",
            *softmax,
            "  if (span.part >= 0) {",
            f"    const int64_t to = span.part * {width} + {feature};",
        ]
        own = self.owns[o]
        if own is not None:
            many = "static_cast<A>(__ldg(p.rows.indptr + row + 1) - __ldg(p.rows.indptr + row))"
            times = f" * {many}" if output.reduce == "mean" else ""  # the sum of the pieces is divided by that
            lines.append(f"    if (first) FOR(i, {count}) ({mine})[i] += ({own.at('r', 'i')}){times};")
        lines.append(f"    FOR(i, {count}) p.part{o}[to + i] = ({mine})[i];")
        if extreme:
            lines.append(f"    FOR(i, {count}) p.pos{o}[to + i] = {whose};")
        if output.reduce in ("soft", "logtotal"):
            lines.append(f"    FOR(i, {count}) p.tops{o}[to + i] = {top};")
        if output.reduce == "soft":
            lines.append(f"    FOR(i, {count}) p.logs{o}[to + i] = {log};")
        lines.append("  } else {")
        if output.reduce == "mean":
            lines.append(
                f"    if (span.end > span.begin) FOR(i, {count}) ({mine})[i] /= static_cast<A>(span.end - span.begin);"
            )
        if own is not None:
            lines.append(f"    FOR(i, {count}) ({mine})[i] += {own.at('r', 'i')};")
        lines.append(f"    store<{count}>(p.out{o} + static_cast<int64_t>(row) * p.next{o} + {feature}, {mine});")
        if extreme:
            lines += [
                f"    const int64_t to = static_cast<int64_t>(row) * {width} + {feature};",
                f"    if (p.argmax{o}) FOR(i, {count}) p.argmax{o}[to + i] = "
                f"{whose} >= 0 && p.edge_ids ? __ldg(p.edge_ids + {whose}) : {whose};",
            ]
        return [*lines, "  }", "}"]

    def _write_row(self, o: int) -> list[str]:
        return [
            "if (first) FOR(r, R) if (active[r]) {",
            *(f"  {line}" for line in self._made(self.values[o], "full")),
            f"  store<VEC>(p.out{o} + static_cast<int64_t>(row) * p.next{o} + at[r], made);",
            "}",
        ]

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
                *_read_soft(output.reduce, o, width),
                "    return state;",
                "  }",
                "  __device__ __forceinline__ void add(State& state, const State& other) const {",
            ]
            if extreme:
                lines.append(
                    "    if (is_better(other.value, other.pos, state.value, state.pos, "
                    f"{_greatest(output)})) state = other;"
                )
            elif output.reduce in SOFT:
                lines.append(f"    {_MERGED[output.reduce]}(state, other);")
            else:
                lines.append("    state.value += other.value;")
            lines += [
                "  }",
                "  __device__ __forceinline__ void write(const Pieces<I>& pieces, int64_t d,",
                "                                        const State& state) const {",
                "    double value = state.value;",
            ]
            if output.reduce == "mean":
                lines.append(
                    "    value /= static_cast<double>(__ldg(p.rows.indptr + pieces.row + 1) - "
                    "__ldg(p.rows.indptr + pieces.row));"
                )
            lines.append(f"    narrow(static_cast<A>(value), p.out{o} + pieces.row * p.next{o} + d);")
            if extreme:
                lines.append(
                    f"    if (p.argmax{o}) p.argmax{o}[pieces.row * {width} + d] = "
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


# How two pieces of a softmax's row are joined (device_code).
_MERGED = {"top": "take_top", "logsumexp": "add_logs", "logtotal": "add_totals", "soft": "add_weighed"}


def _read_soft(reduce: str, o: int, width: int) -> list[str]:
    """Of a piece, for a state."""
    found = {"tops": "top", "logs": "log"}
    names = {"soft": ("tops", "logs"), "logtotal": ("tops",)}.get(reduce, ())
    lines = [f"    state.{found[n]} = static_cast<double>(p.{n}{o}[piece * {width} + d]);" for n in names]
    return [*lines, "    state.any = true;"] if reduce in SOFT else []


def _greatest(output) -> str:
    return "true" if output.reduce == "max" else "false"


def _closed(program: Program, domain: int, vec: int, lanes: int, ops: tuple[str, ...] = ("fold",)) -> bool:
    """True if all sums over features are of features that lanes side by side hold, so that a worker needs no others."""
    for step in program.steps:
        if step.op not in ops:
            continue
        length, div = int(step.numbers[0]), int(step.numbers[1])
        if length == 1 or length * div != domain or div % vec or div // vec & (div // vec - 1) or div // vec > lanes:
            return False
    return True


@functools.lru_cache(maxsize=1024)
def source_of(program: Program, form: Form) -> Source | None:
    """The source of a program; None where `form.vec` numbers of an operand do not lie side by side."""
    widths = [math.prod(s.features) for s in program.steps]
    folds = any(s.op == "fold" for s in program.steps)
    outputs = max(widths[o.step] for o in program.outputs)
    together = folds and -(-max(widths) // (bounds.MESSAGE_LANES * form.vec)) * form.vec <= bounds.MESSAGE_SLOTS
    domain = max(widths) if together else outputs
    if domain % form.vec:
        return None
    try:
        return _Kernel(program, form, domain, together).source()
    except Scattered:
        return None


@functools.lru_cache(maxsize=1024)
def is_too_wide(program: Program) -> bool:
    """True for a program of so many features that sums over them, its own or those of a gradient, would be loops in
    each lane: the gradient of what is expanded is such a sum."""
    domain = max(math.prod(s.features) for s in program.steps)
    sums = any(s.op in ("expand", "fold") for s in program.steps)
    return sums and domain > MOST_FEATURES and not _closed(program, domain, 1, bounds.MESSAGE_LANES, ("expand", "fold"))


def whole(source: Source, walk: str) -> str:
    """All that is compiled: `walk` is the text of cuda/walk.cuh."""
    return PROLOGUE + walk.replace("#pragma once", "") + "\n" + source.text
