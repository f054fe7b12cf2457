"""Programs on CUDA: each becomes a kernel of its own (`source`), compiled when it is first run (`nvrtc`)."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.lower import bounds
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops.messages import nvrtc
from gnnaccel.ops.messages.source import MERGE_THREADS, THREADS, source_of, whole
from gnnaccel.ops.messages.values import Form
from gnnaccel.program.program import TO_ROWS, Program

_NAMES = {
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_BYTES = {name: dtype.itemsize for dtype, name in _NAMES.items()}
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
    size = max(_BYTES[kind] for kind in (*leaves, *outputs))
    widest = 2 if size == 8 else 8 if _BYTES[_wide_kind(program, leaves)] == 2 else 4
    for vec in (8, 4, 2):
        if vec <= widest and aligned % min(16, vec * size) == 0:
            form = Form(leaves, outputs, index, vec)
            if source_of(program, form) is not None:
                return form
    return Form(leaves, outputs, index, 1)


def _wide_kind(program: Program, leaves: tuple) -> str:
    """The dtype that most of the numbers an edge reads have."""
    read: dict[str, int] = {}
    for leaf, kind in zip(program.leaves, leaves, strict=True):
        read[kind] = read.get(kind, 0) + math.prod(leaf.features)
    return max(read, key=lambda kind: read[kind], default="f32")


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


class Launch:
    """A program on one structure, of operands that lie in one way: a call that lacks nothing but addresses.

    Holds addresses of the structure's tensors, and is kept by it.
    """

    def __init__(self, arrays: Structure, program: Program, form: Form, apart: tuple[int, ...]):
        """apart : numbers from row to row of operands and outputs."""
        device, order, indices = arrays.device, arrays.order, arrays.indices
        assert indices is not None
        made = _made(program, form, torch.cuda.current_device() if device.index is None else device.index)
        source = made.source
        nonzeros = indices.shape[0]
        if order is None:
            chunk = max(bounds.MESSAGE_CHUNK, 1 << max(0, -(-nonzeros // bounds.MESSAGE_CHUNKS) - 1).bit_length())
            splits = -(-nonzeros // chunk) if nonzeros > chunk else 0
            parts, workers = 2 * splits, 2 * splits + arrays.num_rows
            lists = (0, 0, 0)
        else:
            items, steps, of_splits = order[:3]
            chunk, splits, parts, workers = 0, of_splits.shape[0], steps.shape[0], items.shape[0]
            lists = tuple(map(lib.pointer, (items, steps, of_splits)))  # type: ignore[assignment]
        same = [
            *(*lists, lib.pointer(arrays.indptr)),
            *(arrays.num_rows, nonzeros, chunk, workers, parts, splits),
            *(lib.pointer(indices), lib.pointer(arrays.edge_ids), *apart),
        ]
        self._device, self._outs = device, len(program.outputs)
        self._begin, self._end = len(same), len(same) + len(apart)
        self._words = ctypes.c_uint64 * (self._end + 3 * self._outs)
        self._same = bytes(self._words(*same))
        self._extremes = [o for o, output in enumerate(program.outputs) if output.reduce in ("max", "min")]
        # Pieces of rows, and of extremes where they were found, one behind another in one piece of memory.
        self._places: list[tuple[int, int]] = []
        self._scratch = 0
        index, wide = arrays.indptr.element_size(), 8 if "f64" in (*form.leaves, *form.outputs) else 4
        for o, output in enumerate(program.outputs):
            count = parts * math.prod(program.steps[output.step].features)
            # argmax, part and pos of an extremum's pieces; logs, part and tops of a softmax's (source)
            sizes: tuple = (0, wide if output.reduce in TO_ROWS else 0, index if o in self._extremes else 0)
            if output.reduce in ("soft", "logtotal"):
                sizes = (wide if output.reduce == "soft" else 0, wide, wide)
            for which, size in enumerate(sizes):
                if count and size:
                    self._places.append((self._end + 3 * o + which, self._scratch))
                    self._scratch += -(-count * size // 16) * 16
        in_block = THREADS // (source.lanes * source.others)
        self._walk, self._grid = made.walk, (-(-workers // in_block), source.slices)
        self._merge, self._over = None, (0, 0)
        if source.slices > bounds.GRID_BLOCKS or source.merge_slices > bounds.GRID_BLOCKS:
            raise ValueError(f"message_reduce: rows of {program.steps[-1].features} are wider than a GPU's grid")
        if made.merge is not None and splits:
            self._merge = made.merge
            self._over = (-(-splits // (MERGE_THREADS // 32)), source.merge_slices)

    def __call__(self, addresses: list[int]) -> None:
        """addresses : of operands, outputs, and of the argmax of maxima and minima, if that is wanted."""
        words = self._words.from_buffer_copy(self._same)
        begin, end = self._begin, self._end
        words[begin:end] = addresses[: end - begin]  # type: ignore[assignment]
        for o, address in zip(self._extremes, addresses[end - begin :], strict=False):
            words[end + 3 * o] = address
        if self._scratch:  # kept until the launches are on the stream
            scratch = torch.empty(self._scratch, dtype=torch.uint8, device=self._device)
            base = scratch.data_ptr()
            for place, offset in self._places:
                words[place] = base + offset
        lib.on_stream(self._device, self._walk, self._grid, THREADS, words)
        if self._merge is not None:
            lib.on_stream(self._device, self._merge, self._over, MERGE_THREADS, words)


def walk(
    arrays: Structure, program: Program, operands: Sequence[Tensor], outs: Sequence[Tensor], argmax: Sequence[Tensor]
) -> None:
    """Fill the outputs of a program, and the argmax of its maxima and minima if that is wanted.

    operands : one for each leaf, as `in_rows` has it.
    outs : likewise. argmax : of all maxima and minima, or of none.
    """
    addresses, apart, dtypes, together = [], [], [], 0
    for x in (*operands, *outs):
        address, step = lib.pointer(x), x.stride(0) if x.dim() else 0
        together |= address
        if not x.is_contiguous():  # of others the width says how they may be read
            together |= step * x.element_size()
        addresses.append(address)
        apart.append(step)
        dtypes.append(x.dtype)
    for x in argmax:
        addresses.append(lib.pointer(x))
        together |= addresses[-1]
    start(arrays, program, tuple(dtypes), tuple(apart), together, addresses)


def start(
    arrays: Structure, program: Program, dtypes: tuple, apart: tuple, together: int, addresses: list[int]
) -> None:
    """`walk` of operands and outputs that are known by their dtypes, how far their rows lie apart and their addresses,
    argmax behind them; `together`: a number that is divisible by no more than all of what is read at once is."""
    key = (program, dtypes, apart, min((together & -together) or 16, 16))
    launch = arrays.calls.get(key)
    if launch is None:
        index, count = _NAMES[arrays.indptr.dtype], len(program.leaves)
        leaves = tuple(index if leaf.ids else _NAMES[t] for leaf, t in zip(program.leaves, dtypes, strict=False))
        form = _form(program, leaves, tuple(_NAMES[t] for t in dtypes[count:]), index, key[-1])
        if len(arrays.calls) >= bounds.MESSAGE_CALLS:
            arrays.calls.clear()
        launch = arrays.calls[key] = Launch(arrays, program, form, key[2])
    launch(addresses)
