"""Programs on CUDA: each becomes a kernel of its own (`source`), compiled when it is first run (`nvrtc`)."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops.messages import nvrtc
from gnnaccel.ops.messages.program import Program
from gnnaccel.ops.messages.source import MERGE_THREADS, THREADS, source_of, whole
from gnnaccel.ops.messages.values import Form

_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# As rows_of of cuda/rows.cuh, for rows without a work list.
_MIN_CHUNK, _MAX_CHUNKS = 128, 8192
_MOST_SLICES = 65535
_log = logging.getLogger("gnnaccel")


@functools.cache
def obstacle() -> str | None:
    """Why messages on CUDA cannot run as programs here, said once; None if they can."""
    why = nvrtc.obstacle_of_gpus()
    if why is not None:
        _log.warning("messages on CUDA are stored or made in blocks of edges: %s", why)
    return why


class _Made:
    """A program compiled for one form and GPU."""

    def __init__(self, program: Program, form: Form, device: int):
        source = source_of(program, form)
        assert source is not None
        self.source = source
        module = nvrtc.Module(whole(source, lib.walk_source()), device)
        self.walk = module.kernel("gnnaccel_message_walk")
        self.merge = module.kernel("gnnaccel_message_merge") if source.merge_slices else None


@functools.lru_cache(maxsize=1024)
def _made(program: Program, form: Form, device: int) -> _Made:
    return _Made(program, form, device)


@functools.lru_cache(maxsize=1024)
def _form(program: Program, leaves: tuple, outputs: tuple, index: str, aligned: int) -> Form:
    """The form with the widest reads: of 16 bytes, where operands of addresses divisible by `aligned` allow that."""
    widest = 2 if "f64" in (*leaves, *outputs) else 4
    for vec in (4, 2):
        size = max(8 if kind in ("f64", "i64") else 4 if kind in ("f32", "i32") else 2 for kind in (*leaves, *outputs))
        if vec <= widest and aligned % min(16, vec * size) == 0:
            form = Form(leaves, outputs, index, vec)
            if source_of(program, form) is not None:
                return form
    return Form(leaves, outputs, index, 1)


def in_rows(x: Tensor) -> Tensor:
    """`x` if its rows lie in one piece each, as columns of a wider matrix do; else a copy that is contiguous."""
    if x.is_contiguous():
        return x
    step = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != step:
            return x.contiguous()
        step *= size
    return x


def walk(
    arrays: Structure, program: Program, operands: Sequence[Tensor], outs: Sequence[Tensor], argmax: Sequence[Tensor]
) -> None:
    """Fill the outputs of a program, and the argmax of its maxima and minima if that is wanted.

    operands : one for each leaf, as `in_rows` has it.
    outs : likewise. argmax : of all maxima and minima, or of none.
    """
    device = arrays.device
    addresses = [lib.pointer(x) for x in (*operands, *outs, *argmax)]
    apart = [x.stride(0) if x.dim() else 0 for x in (*operands, *outs)]
    together = 0
    for address in addresses:
        together |= address
    for x, step in zip((*operands, *outs), apart, strict=True):
        if not x.is_contiguous():  # of others the width says how they may be read
            together |= step * x.element_size()
    index = _NAMES[arrays.indptr.dtype]
    form = _form(
        program,
        tuple(index if leaf.ids else _NAMES[x.dtype] for leaf, x in zip(program.leaves, operands, strict=True)),
        tuple(_NAMES[x.dtype] for x in outs),
        index,
        min((together & -together) or 16, 16),
    )
    made = _made(program, form, torch.cuda.current_device() if device.index is None else device.index)
    source = made.source

    order, indices = arrays.order, arrays.indices
    assert indices is not None
    nonzeros = indices.shape[0]
    if order is None:
        chunk = max(_MIN_CHUNK, 1 << max(0, -(-nonzeros // _MAX_CHUNKS) - 1).bit_length())
        splits = -(-nonzeros // chunk) if nonzeros > chunk else 0
        parts, workers = 2 * splits, 2 * splits + arrays.num_rows
        lists = (0, 0, 0)
    else:
        items, steps, of_splits = order[:3]
        chunk, splits, parts, workers = 0, of_splits.shape[0], steps.shape[0], items.shape[0]
        lists = tuple(map(lib.pointer, (items, steps, of_splits)))  # type: ignore[assignment]
    words = [
        *lists,
        lib.pointer(arrays.indptr),
        *(arrays.num_rows, nonzeros, chunk, workers, parts, splits),
        lib.pointer(indices),
        lib.pointer(arrays.edge_ids),
    ]
    for address, step in zip(addresses[: len(operands)], apart, strict=False):
        words += [address, step]
    wide = torch.float64 if "f64" in (*form.leaves, *form.outputs) else torch.float32
    kept = []  # until the launches are on the stream
    of_argmax = iter(addresses[len(operands) + len(outs) :])
    of_outs = zip(outs, addresses[len(operands) :], apart[len(operands) :], strict=False)
    for output, (out, address, step) in zip(program.outputs, of_outs, strict=True):
        extreme = output.reduce in ("max", "min")
        part = pos = None
        if parts and output.reduce != "none":
            shape = (parts, *out.shape[1:])
            part = out.new_empty(shape, dtype=wide)
            pos = arrays.indptr.new_empty(shape) if extreme else None
            kept += [part, pos]
        words += [address, step, next(of_argmax, 0) if extreme else 0, lib.pointer(part), lib.pointer(pos)]
    given = (ctypes.c_uint64 * len(words))(*words)
    in_block = THREADS // (source.lanes * source.others)
    grid = (-(-workers // in_block), source.slices)
    if source.slices > _MOST_SLICES or source.merge_slices > _MOST_SLICES:
        raise ValueError(f"message_reduce: rows of {program.steps[-1].features} are wider than a GPU's grid")
    lib.on_stream(device, made.walk, grid, THREADS, given)
    if made.merge is not None and splits:
        over = (-(-splits // (MERGE_THREADS // 32)), source.merge_slices)
        lib.on_stream(device, made.merge, over, MERGE_THREADS, given)
