"""Loads the binary. The only place that asks whether CUDA is here, and the only one that calls into it.

The binary (``gnnaccel._C``) knows nothing of torch: it takes addresses, sizes and enum values. `launch` turns
tensors into those and runs the CPU or the CUDA entry of the same name on torch's threads or current stream.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re

import torch
from torch import Tensor

try:
    from gnnaccel import _C
except ImportError as error:  # an installation without its binary cannot do anything: say so at once
    raise ImportError(
        f"gnnaccel's compiled library could not be loaded ({error}); reinstall gnnaccel, or build it here with "
        "`pip install -e .` (needs a C++17 compiler)"
    ) from error

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
INDEX_TYPES = {torch.int32: 0, torch.int64: 1}
MESSAGES = {"copy_lhs": 0, "copy_rhs": 1, "mul": 2, "add": 3}
REDUCES = {"sum": 0, "mean": 1, "max": 2, "min": 3}
EDGE_OPS = {"copy_lhs": 0, "copy_rhs": 1, "add": 2, "sub": 3, "mul": 4, "div": 5, "dot": 6}
TARGETS = {"u": 0, "v": 1, "e": 2}


def has_cuda_kernels() -> bool:
    """True if the binary was built with its CUDA half."""
    return bool(_C.HAS_CUDA)


def isa() -> str:
    """Instruction set the CPU kernels picked on this machine: "avx512", "avx2" or "baseline"."""
    return _C.isa()


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


def csr(indptr: Tensor, indices: Tensor | None, edge_ids: Tensor | None, num_cols: int, nnz: int) -> tuple:
    """The binary's description of a CSR matrix (types.h: Csr)."""
    return (
        pointer(indptr),
        pointer(indices),
        pointer(edge_ids),
        indptr.numel() - 1,
        num_cols,
        nnz,
        INDEX_TYPES[indptr.dtype],
    )


def launch(name: str, device: torch.device, *args):
    """Run kernel `name` on `device`: torch's thread count on the CPU, torch's current stream on CUDA.

    Raises RuntimeError if the device is CUDA and the binary has no CUDA half, or if a launch fails.
    """
    if device.type == "cpu":
        return getattr(_C, name)(*args, torch.get_num_threads())
    if not _C.HAS_CUDA:
        raise RuntimeError(
            f"gnnaccel.{name}: got CUDA tensors, but this gnnaccel was built without its CUDA half; "
            "install nvcc (CUDA 12 or later) and rebuild with GNNACCEL_CUDA=ON, or move the tensors to the CPU"
        )
    # On small graphs the host's time to launch is all there is: entering a device and asking for its stream object
    # would take longer than the rest of this function.
    if device.index == torch.cuda.current_device():
        return _launch_cuda(name, device, args)
    with torch.cuda.device(device):
        return _launch_cuda(name, device, args)


def _launch_cuda(name: str, device: torch.device, args: tuple):
    entry, size_of = _cuda_entries(name)
    workspace = None
    if size_of is not None:
        # Kernels do not allocate: scratch memory comes from torch, and returns to it in the order of the stream.
        size = size_of(*args)
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        args = (*args, pointer(workspace), size)
    index = torch.cuda.current_device() if device.index is None else device.index
    return entry(*args, torch._C._cuda_getCurrentRawStream(index))


def entry(name: str, device: torch.device, args: tuple) -> tuple:
    """Kernel `name` for `device` as `launch` calls it with `args`, and the bytes of scratch memory that it wants then
    (0 on the CPU), for callers that keep them.

    On the CPU it takes the number of threads after `args`; on CUDA, where it has to be the current device, an address
    and the number of bytes of scratch memory, and the stream.
    """
    if device.type == "cpu":
        return getattr(_C, name), 0
    function, size_of = _cuda_entries(name)
    assert size_of is not None
    return function, size_of(*args)


@functools.cache
def _cuda_entries(name: str) -> tuple:
    """Kernel `name` for CUDA, and the function that tells its workspace, or None."""
    return getattr(_C, name + "_cuda"), getattr(_C, name + "_cuda_workspace_bytes", None)
