"""Loads the binary. The only place that asks whether CUDA is here, and the only one that calls into it.

The binary (``gnnaccel._C``) knows nothing of torch: it takes addresses, sizes and enum values. `launch` turns
tensors into those and runs the CPU or the CUDA entry of the same name on torch's threads or current stream.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnnaccel import settings, touch

try:
    from gnnaccel import _C
except ImportError as error:  # an installation without its binary cannot do anything: say so at once
    raise ImportError(
        f"gnnaccel's compiled library could not be loaded ({error}); reinstall gnnaccel, or build it here with "
        "`pip install -e .` (needs a C++17 compiler)"
    ) from error

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_ON_CPU = torch.device("cpu")
INDEX_TYPES = {torch.int32: 0, torch.int64: 1}
MESSAGES = {"copy_lhs": 0, "copy_rhs": 1, "mul": 2, "add": 3}
REDUCES = {"sum": 0, "mean": 1, "max": 2, "min": 3}
EDGE_OPS = {"copy_lhs": 0, "copy_rhs": 1, "add": 2, "sub": 3, "mul": 4, "div": 5, "dot": 6}
TARGETS = {"u": 0, "v": 1, "e": 2}


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype in which kernels add up values of x: float32 for 16-bit ones."""
    return torch.promote_types(x.dtype, torch.float32)


def has_cuda_kernels() -> bool:
    """True if the binary was built with its CUDA half."""
    return bool(_C.HAS_CUDA)


def same_objects(held: list) -> bool:
    """True if containers hold the very objects that they did: by identity, and without running any Python. Dicts of a
    class that has an order of its own (OrderedDict) are compared in that of a plain one.

    held : list of (dict or list, tuple of its values, tuple of its keys in their order or None)
    """
    return _C.same_objects(held)


def isa() -> str:
    """Instruction set the CPU kernels picked on this machine: "avx512", "avx2" or "baseline"."""
    return _C.isa()


def is_amd() -> bool:
    """Whether the CPU is AMD's, of whose vectors MKL uses half."""
    return _C.is_amd()


@functools.cache
def _share_torch_threads() -> None:
    """Run CPU kernels on the OpenMP pool torch already has; a second pool would fight it for the cores.

    torch's wheels bundle their own libgomp under varying names, so it is looked up in the running process.
    Where torch uses another runtime the binary starts plain threads for large kernels instead.
    """
    try:
        with open("/proc/self/maps") as maps:
            path = next((m.group(1) for m in (re.search(r"(/\S*libgomp\S*)", line) for line in maps) if m), None)
        if path is None:
            return
        gomp = ctypes.CDLL(path)
        _C.use_openmp(ctypes.cast(gomp.GOMP_parallel, ctypes.c_void_p).value)
    except (OSError, AttributeError):
        return


_share_torch_threads()


def _warn_of_missing_cuda() -> None:
    """Say at import that a GPU which torch can use will not be used by us."""
    # device_count() asks the driver's library: is_available() could start CUDA, which forked workers cannot take over.
    if not _C.HAS_CUDA and torch.version.cuda and torch.cuda.device_count():
        logging.getLogger("gnnaccel").warning(
            "gnnaccel was built without its CUDA half, though torch sees a GPU: CUDA tensors are left to the "
            "frameworks; install nvcc (CUDA 12 or later) and reinstall gnnaccel with GNNACCEL_CUDA=ON"
        )


_warn_of_missing_cuda()

if settings.CHECKED not in os.environ and (_complaint := settings.complaint("GNNACCEL_ISA")):
    logging.getLogger("gnnaccel").warning("gnnaccel: %s", _complaint)  # where nothing is switched on, none has said it


def pointer(tensor: Tensor | None) -> int:
    """Address of a contiguous tensor's data; 0 for None.

    Raises RuntimeError for a tensor without memory: one on the meta device, or of FakeTensorMode or a transform.
    """
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise RuntimeError(f"expected a tensor with memory, got a {type(tensor).__name__} of {tuple(tensor.shape)}")
    return address


def csr(indptr: Tensor, indices: Tensor | None, edge_ids: Tensor | None, num_cols: int, nnz: int, longest: int = 0):
    """The binary's object of a CSR matrix (types.h: Csr); whoever has it keeps the tensors alive. longest: nonzeros of
    the longest row, where that is known."""
    arrays = (pointer(indptr), pointer(indices), pointer(edge_ids))
    return _C.Csr(*arrays, indptr.shape[0] - 1, num_cols, nnz, INDEX_TYPES[indptr.dtype], longest)


def work_list(items: Tensor, steps: Tensor, splits: Tensor, *told: int):
    """That of a work list (types.h: WorkList); `told`: what `worklist.decode` gives."""
    arrays = (items, steps, splits)
    return _C.WorkList(*map(pointer, arrays), *(t.shape[0] for t in arrays), *told)


def message_program(arrays: Sequence[Tensor], *counts_and_width: int, compute: torch.dtype):
    """That of a program of messages (message_program.h: MessageProgram); `arrays` are of bytes."""
    return _C.MessageProgram(*map(pointer, arrays), *counts_and_width, DTYPES[compute])


# Kernels by name.
_CPU: dict[str, Callable] = dict(vars(_C))
_CUDA: dict[str, Callable] = {name[: -len("_cuda")]: kernel for name, kernel in _CPU.items() if name.endswith("_cuda")}

if _C.HAS_CUDA:
    # Kernels do not allocate: scratch memory comes from torch, and returns to it in the order of the stream. It is of
    # the current device, which is that of the launch.
    _C.use_memory(functools.partial(torch.empty, dtype=torch.uint8, device="cuda"))


def launch(name: str, device: torch.device, *args):
    """Run kernel `name` on `device`: torch's thread count on the CPU, torch's current stream on CUDA.

    Raises RuntimeError if the device is CUDA and the binary has no CUDA half, or if a launch fails.
    """
    if device == _ON_CPU or device.type == "cpu":  # to be asked for its type takes a device longer
        return _CPU[name](*args, torch.get_num_threads())
    kernel = _CUDA.get(name) or entry(name, device)
    return on_stream(device, kernel, *args)


def on_stream(device: torch.device, start: Callable, *args):
    """start(*args, address of torch's current stream on a CUDA device), that device being the current one meanwhile."""
    # On small graphs the host's time to launch is all there is: torch's own functions for devices and streams would
    # take longer than the rest of this one.
    current = touch.current_device()
    if device.index in (current, None):
        return start(*args, touch.raw_stream(current))
    with torch.cuda.device(device):
        return start(*args, touch.raw_stream(device.index))


def walk_source() -> str:
    """cuda/walk.cuh, for kernels that are compiled at run time."""
    return _C.WALK_SOURCE


def entry(name: str, device: torch.device) -> Callable:
    """Kernel `name` for `device` as `launch` calls it, for callers that keep it: after its arguments it takes the
    number of threads on the CPU, and on CUDA, where it has to be the current device, the stream. Raises as `launch`.
    """
    if device.type == "cpu":
        return _CPU[name]
    if not _C.HAS_CUDA:
        raise RuntimeError(
            f"gnnaccel.{name}: got CUDA tensors, but this gnnaccel was built without its CUDA half; "
            "install nvcc (CUDA 12 or later) and rebuild with GNNACCEL_CUDA=ON, or move the tensors to the CPU"
        )
    return _CUDA[name]
