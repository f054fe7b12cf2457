"""The gradient of what a layer adds to all its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators

_LEAST = 1 << 18  # values, from which on two launches take less than torch's one


def column_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x.sum(0, dtype=dtype), of dtype x unless another is asked for.

    On CUDA by a kernel that reads many rows at its memory's speed, where torch takes three times as long and, for some
    widths, 60 to 90 MiB (benchmarks/column_sums.py). Inside a backward pass: a gradient of these goes through torch's.
    """
    dtype = x.dtype if dtype is None else dtype
    if not x.is_cuda or x.numel() < _LEAST or torch.is_grad_enabled() or not _operators.usual(x):
        return x.sum(0, dtype=dtype)
    if x.dtype not in lib.DTYPES or not x.is_contiguous():
        return x.sum(0, dtype=dtype)
    out = x.new_empty(x.shape[1:], dtype=lib.accumulator(x))
    lib.launch("column_sums", x.device, x.data_ptr(), out.data_ptr(), x.shape[0], out.numel(), lib.DTYPES[x.dtype])
    return out if out.dtype is dtype else out.to(dtype)
