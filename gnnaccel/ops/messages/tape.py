"""Programs as the binary takes them (cpp/message_program.h): values in as few registers as can hold them."""

from __future__ import annotations

import collections
import functools
import math
import struct
from typing import NamedTuple

import torch

from gnnaccel import _library as lib
from gnnaccel.program.program import Program

_OPS = (
    *("add", "sub", "mul", "div", "max", "min", "gt", "ge", "eq", "keep"),
    *("add_p", "mul_p", "div_p", "max_p", "min_p", "gt_p", "ge_p", "lt_p", "le_p", "eq_p", "rsub_p", "rdiv_p"),
    *("pow_p", "leaky_relu_p"),
    *("copy", "neg", "abs", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "relu"),
    *("erf", "sin", "cos", "round_bfloat16", "round_float32"),
    *("where", "fill", "expand", "fold", "dot", "scale", "winner", "over_sum", "over_max", "spread"),
)
_CODES = {name: code for code, name in enumerate(_OPS)}  # MessageOp
_TARGETS = {"u": 0, "v": 1, "e": 2, "c": 3, "row": 4}  # MessageTarget
_REDUCES = {"sum": 0, "mean": 1, "max": 2, "min": 3, "none": 4, "row": 5}  # MessageReduce
_IDS = -1  # "dtype" of a leaf of edge ids
_STEP, _LEAF, _OUTPUT = struct.Struct("=10id"), struct.Struct("=3i"), struct.Struct("=4i")
_RESHAPING = ("expand", "fold", "dot", "scale")
_MOVING = (*_RESHAPING, "over_sum", "over_max", "spread")  # these may not write where they read


class Tape:
    """The binary's form of a program; `program` is its MessageProgram, which lives as long as this.

    operands : which of the program's operands each leaf of it reads.
    """

    def __init__(self, program: Program, leaves: tuple[torch.dtype | None, ...], outputs: tuple[torch.dtype, ...]):
        lines = _Lines(program)
        steps, registers, place = _scheduled(lines)
        widths = [math.prod(s.features) for s in program.steps]
        dtypes = [_IDS if dtype is None else lib.DTYPES[dtype] for dtype in leaves]
        self.operands = tuple(n for n, _ in lines.leaves)
        parts = [
            b"".join(steps),
            b"".join(
                _LEAF.pack(_TARGETS[kind], dtypes[n], math.prod(program.leaves[n].features)) for n, kind in lines.leaves
            ),
            b"".join(
                _OUTPUT.pack(place[value], _REDUCES[o.reduce], lib.DTYPES[dtype], widths[o.step])
                for o, value, dtype in zip(program.outputs, lines.outputs, outputs, strict=True)
            ),
        ]
        self._memory = [torch.frombuffer(bytearray(part or b"\0"), dtype=torch.uint8) for part in parts]
        wide = torch.float64 in (*leaves, *outputs)
        overs = [line.level for line in lines.lines if line.op.startswith("over_")]
        self.program = lib.message_program(
            self._memory,
            len(steps),
            len(lines.leaves),
            len(program.outputs),
            registers,
            max(widths),
            len(overs),
            max(overs, default=-1) + 1,
            compute=torch.float64 if wide else torch.float32,
        )


@functools.lru_cache(maxsize=1024)
def tape(program: Program, leaves: tuple[torch.dtype | None, ...], outputs: tuple[torch.dtype, ...]) -> Tape:
    """The tape of a program whose leaves and outputs have these dtypes; None for edge ids."""
    return Tape(program, leaves, outputs)


class _Line(NamedTuple):
    """A step, made of earlier ones (0, 1, ...) or of leaves (-1, -2, ...)."""

    op: str
    args: tuple[int, ...]
    numbers: tuple
    width: int
    of_rows: bool
    level: int  # how many reductions, of one another, come before it


class _Lines:
    """The steps of a program, but for reshapes; in one that reduces over edges inside, or has values of destinations,
    what is made of destinations alone is made once for each, and spread where edges read it.

    leaves : (number, kind) of what is read; outputs : the line, or leaf, of each output.
    """

    def __init__(self, program: Program):
        inside = any(step.op.startswith("over_") for step in program.steps)
        inside = inside or any(output.reduce == "row" for output in program.outputs)
        self.leaves: list[tuple[int, str]] = [(n, leaf.kind) for n, leaf in enumerate(program.leaves)]
        self.lines: list[_Line] = []
        self._rows: dict[int, int] = {}  # leaves that are read for each row
        self._spread: dict[int, int] = {}
        kinds = [leaf.kind for leaf in program.leaves]
        of_edge: list[bool] = []
        made: list[int] = []  # the line of each step
        for step in program.steps:
            if step.op == "leaf":
                number = step.numbers[0]
                of_edge.append(kinds[number] in "ue" or program.leaves[number].ids)
                made.append(~number)
                continue
            over = step.op.startswith("over_")
            differs = step.op == "winner" or any(of_edge[a] for a in step.args)
            of_edge.append(not inside or (differs and not over))
            if step.op == "reshape":
                of_edge[-1] = of_edge[step.args[0]]
                made.append(made[step.args[0]])
                continue
            at_edges = of_edge[-1] or over
            args = tuple(self._read(made[a], of_edge[a], at_edges, kinds) for a in step.args)
            read = step.args[0] if step.op == "fold" else len(made)
            width = math.prod(program.steps[read].features)
            made.append(self._add(step.op, args, step.numbers, width, not of_edge[-1]))
        self.outputs = [self._read(made[o.step], of_edge[o.step], o.reduce != "row", kinds) for o in program.outputs]
        self._join()

    def _join(self) -> None:
        """A product that is folded, and a product with what is expanded, as one step."""
        uses = collections.Counter([*self.outputs, *(a for line in self.lines for a in line.args)])
        for number, line in enumerate(self.lines):
            inner = [self.lines[a] if a >= 0 and uses[a] == 1 else None for a in line.args]
            if line.op == "fold" and inner[0] is not None and inner[0].op == "mul" and line.numbers[1] != 1:
                self.lines[number] = line._replace(op="dot", args=inner[0].args)
            elif line.op == "mul":
                for at, part in enumerate(inner):
                    if part is not None and part.op == "expand" and part.numbers[1] != 1:
                        args = line.args[1 - at], part.args[0]
                        self.lines[number] = line._replace(op="scale", args=args, numbers=part.numbers)
                        break

    def _add(self, op: str, args: tuple[int, ...], numbers: tuple, width: int, of_rows: bool) -> int:
        below = [self.lines[a] for a in args if a >= 0]
        level = max((line.level + line.op.startswith("over_") for line in below), default=0)
        self.lines.append(_Line(op, args, numbers, width, of_rows, level))
        return len(self.lines) - 1

    def _read(self, value: int, of_edge: bool, at_edges: bool, kinds: list[str]) -> int:
        """A value where edges, or destinations, read it."""
        if of_edge or (value < 0 and (at_edges or kinds[~value] == "c")):
            return value
        if value < 0:
            if value not in self._rows:
                self._rows[value] = ~len(self.leaves)
                self.leaves.append((~value, "row"))
            return self._rows[value]
        if not at_edges:
            return value
        if value not in self._spread:
            line = self.lines[value]
            width = line.numbers[0] if line.op == "fold" else line.width
            self._spread[value] = self._add("spread", (value,), (), int(width), False)
        return self._spread[value]


def _scheduled(made: _Lines) -> tuple[list[bytes], int, dict[int, int]]:
    """The steps as bytes, the number of registers, and the register of each line's value; of leaves what they are."""
    last = dict.fromkeys(made.outputs, len(made.lines))  # the last line that reads a value
    for number in reversed(range(len(made.lines))):
        if number in last:  # what nothing reads is left out
            last |= {arg: number for arg in made.lines[number].args if arg not in last}
    steps: list[bytes] = []
    place = {~n: ~n for n in range(len(made.leaves))}
    free: list[int] = []
    registers = overs = 0
    for number, line in enumerate(made.lines):
        if number not in last:
            continue
        dying = sorted({place[a] for a in line.args if last[a] == number and a >= 0})
        if line.op not in _MOVING:
            free += dying
        if free:
            out = free.pop()
        else:
            out, registers = registers, registers + 1
        if line.op in _MOVING:
            free += dying
        place[number] = out
        a, b, c = (*(place[a] for a in line.args), 0, 0, 0)[:3]
        len_, div = map(int, line.numbers) if line.op in _RESHAPING else (1, 1)
        if line.op.startswith("over_"):
            len_, overs = overs, overs + 1
        p = line.numbers[0] if line.numbers and line.op not in _RESHAPING else 0.0
        steps.append(_STEP.pack(_CODES[line.op], out, a, b, c, line.width, len_, div, line.of_rows, line.level, p))
    return steps, registers, place
