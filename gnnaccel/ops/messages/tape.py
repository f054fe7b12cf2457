"""Programs as the binary takes them (cpp/message_program.h): values in as few registers as can hold them."""

from __future__ import annotations

import functools
import math
import struct

import torch

from gnnaccel import _library as lib
from gnnaccel.program.program import Program

_OPS = (
    *("add", "sub", "mul", "div", "max", "min", "gt", "ge", "eq", "keep"),
    *("add_p", "mul_p", "div_p", "max_p", "min_p", "gt_p", "ge_p", "lt_p", "le_p", "eq_p", "rsub_p", "rdiv_p"),
    *("pow_p", "leaky_relu_p"),
    *("copy", "neg", "abs", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "relu"),
    *("erf", "sin", "cos", "round_bfloat16", "round_float32"),
    *("where", "fill", "expand", "fold", "winner"),
)
_CODES = {name: code for code, name in enumerate(_OPS)}  # MessageOp
_TARGETS = {"u": 0, "v": 1, "e": 2, "c": 3}  # MessageTarget
_REDUCES = {"sum": 0, "mean": 1, "max": 2, "min": 3, "none": 4}  # MessageReduce
_IDS = -1  # "dtype" of a leaf of edge ids
_STEP, _LEAF, _OUTPUT = struct.Struct("=8id"), struct.Struct("=3i"), struct.Struct("=4i")
_RESHAPING = ("expand", "fold")  # these may not write where they read


class Tape:
    """The binary's form of a program; `program` is its MessageProgram, which lives as long as this."""

    def __init__(self, program: Program, leaves: tuple[torch.dtype | None, ...], outputs: tuple[torch.dtype, ...]):
        steps, registers, place = _scheduled(program)
        widths = [math.prod(s.features) for s in program.steps]
        parts = [
            b"".join(steps),
            b"".join(
                _LEAF.pack(_TARGETS[leaf.kind], _IDS if dtype is None else lib.DTYPES[dtype], math.prod(leaf.features))
                for leaf, dtype in zip(program.leaves, leaves, strict=True)
            ),
            b"".join(
                _OUTPUT.pack(place[o.step], _REDUCES[o.reduce], lib.DTYPES[dtype], widths[o.step])
                for o, dtype in zip(program.outputs, outputs, strict=True)
            ),
        ]
        self._memory = [torch.frombuffer(bytearray(part or b"\0"), dtype=torch.uint8) for part in parts]
        wide = torch.float64 in (*leaves, *outputs)
        self.program = lib.message_program(
            self._memory,
            len(steps),
            len(program.leaves),
            len(program.outputs),
            registers,
            max(widths),
            compute=torch.float64 if wide else torch.float32,
        )


@functools.lru_cache(maxsize=1024)
def tape(program: Program, leaves: tuple[torch.dtype | None, ...], outputs: tuple[torch.dtype, ...]) -> Tape:
    """The tape of a program whose leaves and outputs have these dtypes; None for edge ids."""
    return Tape(program, leaves, outputs)


def _scheduled(program: Program) -> tuple[list[bytes], int, list[int]]:
    """The steps as bytes, the number of registers, and the register or leaf of each step's value."""
    last = [-1] * len(program.steps)  # the last step that reads a value; a reshape's value is its argument's
    source = list(range(len(program.steps)))
    for number, step in enumerate(program.steps):
        if step.op == "reshape":
            source[number] = source[step.args[0]]
        for arg in step.args:
            last[source[arg]] = number
    for output in program.outputs:
        last[source[output.step]] = len(program.steps)
    steps: list[bytes] = []
    place = [0] * len(program.steps)
    free: list[int] = []
    registers = 0
    for number, step in enumerate(program.steps):
        if step.op == "leaf":
            place[number] = ~step.numbers[0]
            continue
        if step.op == "reshape":
            place[number] = place[step.args[0]]
            continue
        args = [source[a] for a in step.args]
        dying = sorted({place[a] for a in args if last[a] == number and place[a] >= 0})
        if step.op not in _RESHAPING:
            free += dying
        if free:
            out = free.pop()
        else:
            out, registers = registers, registers + 1
        if step.op in _RESHAPING:
            free += dying
        place[number] = out
        a, b, c = (*(place[a] for a in args), 0, 0, 0)[:3]
        len_, div = map(int, step.numbers) if step.op in _RESHAPING else (1, 1)
        p = step.numbers[0] if step.numbers and step.op not in _RESHAPING else 0.0
        read = step.args[0] if step.op == "fold" else number
        width = math.prod(program.steps[read].features)
        steps.append(_STEP.pack(_CODES[step.op], out, a, b, c, width, len_, div, p))
    return steps, registers, place
