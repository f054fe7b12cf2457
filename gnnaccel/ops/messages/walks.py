"""A program as one walk over the edges of a graph: the kernel's op."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops.messages import generated
from gnnaccel.ops.messages.tape import tape
from gnnaccel.program.program import Program, parse

_DTYPES = {code: dtype for dtype, code in lib.DTYPES.items()}


def _allocate(
    arrays: Structure, program: Program, dtypes: Sequence[torch.dtype], positions: bool = True
) -> list[Tensor]:
    """The outputs and, with `positions`, the argmax of those that have some."""
    outs, argmax = [], []
    for output, dtype in zip(program.outputs, dtypes, strict=True):
        shape = (arrays.nnz if output.reduce == "none" else arrays.num_rows, *program.steps[output.step].features)
        outs.append(arrays.indptr.new_empty(shape, dtype=dtype))
        if positions and output.reduce in ("max", "min"):
            argmax.append(arrays.indptr.new_empty(shape))
    return outs + argmax


def walk(
    arrays: Structure, program: Program, operands: list[Tensor], dtypes: tuple, positions: bool = True
) -> list[Tensor]:
    """A walk: its outputs and, with `positions`, argmax."""
    outs = _allocate(arrays, program, dtypes, positions)
    if not any(map(Tensor.numel, outs)):
        return outs
    if arrays.indptr.is_cuda:
        operands = [x.contiguous() if leaf.kind == "c" else generated.in_rows(x)
                    for x, leaf in zip(operands, program.leaves, strict=True)]  # fmt: skip
        generated.walk(arrays, program, operands, outs[: len(dtypes)], outs[len(dtypes) :])
        return outs
    operands = [x.contiguous() for x in operands]
    leaves = tuple(None if leaf.ids else x.dtype for leaf, x in zip(program.leaves, operands, strict=True))
    binary = tape(program, leaves, dtypes)
    results = array("Q")
    at = len(dtypes)
    for output, out in zip(program.outputs, outs, strict=False):
        results.append(lib.pointer(out))
        if positions and output.reduce in ("max", "min"):
            results.append(lib.pointer(outs[at]))
            at += 1
        else:
            results.append(0)
    addresses = array("Q", [lib.pointer(operands[i]) for i in binary.operands])
    given = (binary.program, addresses.buffer_info()[0], results.buffer_info()[0])
    lib.launch("message_walk", outs[0].device, arrays.matrix(), *given)
    return outs


def _walk_impl(arrays: Structure, text: str, operands: list[Tensor], dtypes: list[int]) -> list[Tensor]:
    return walk(arrays, parse(text), operands, tuple(_DTYPES[code] for code in dtypes))


def _walk_fake(arrays: Structure, text: str, operands: list[Tensor], dtypes: list[int]) -> list[Tensor]:
    return _allocate(arrays, parse(text), [_DTYPES[code] for code in dtypes])


walk_op = _operators.register(
    "message_walk",
    f"({_arrays.SCHEMA}, str program, Tensor[] operands, int[] dtypes) -> Tensor[]",
    _walk_impl,
    _walk_fake,
    structure=Structure,
)


def dispatched(arrays: Structure, program: Program, operands: list[Tensor], dtypes: tuple) -> list[Tensor]:
    """A walk that torch's dispatcher sees."""
    return walk_op(arrays, program.text, operands, [lib.DTYPES[d] for d in dtypes])
