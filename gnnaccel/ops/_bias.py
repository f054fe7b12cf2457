"""What a layer adds to all its rows, and its gradient, on CUDA at the speed of memory (cuda/bias.cu)."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators

_LEAST_BYTES = 1 << 22  # from which on two launches take less than torch's one (benchmarks/finished_sums.py)
_HALVES = (torch.bfloat16, torch.float16)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x [N, D] + bias [D], for a result that no graph of autograd needs.

    torch takes twice as long where a bias of float32 makes 16-bit features wide.
    """
    usual = x.is_cuda and x.dtype in _HALVES and bias.dtype is torch.float32 and _operators.usual(x, bias)
    if not usual or x.shape[1] % 8 or not x.is_contiguous() or not bias.is_contiguous() or not x.numel():
        return x + bias
    if x.data_ptr() % 16 or bias.data_ptr() % 16 or bias.shape != x.shape[1:]:
        return x + bias
    out = torch.empty_like(x, dtype=torch.float32)
    lib.launch("add_bias", x.device, *(t.data_ptr() for t in (x, bias, out)), *x.shape, lib.DTYPES[x.dtype])
    return out


def column_sums(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x.sum(0, dtype=dtype), of the dtype of x unless another is asked for.

    For backward passes, of contiguous gradients: others, and those that are to be differentiated, go through torch's,
    which takes two to three times as long on CUDA and, for some widths, 60 to 90 MiB.
    """
    dtype = x.dtype if dtype is None else dtype
    if not _serves(x):
        return x.sum(0, dtype=dtype)
    out = _sums(x, None)
    return out if out.dtype is dtype else out.to(dtype)


def rounded_and_sums(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x.to(dtype) and column_sums(x), x read once."""
    if x.dtype is not torch.float32 or dtype not in _HALVES or not _serves(x):
        return x.to(dtype), column_sums(x)
    rounded = torch.empty_like(x, dtype=dtype)
    return rounded, _sums(x, rounded)


def unbiased(grad: Tensor, like: Tensor, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of out, of the shape and dtype of `like`, and of the bias, if `wanted`, from that of
    add_bias(out.flatten(1), bias)."""
    grad, of_bias = grad.contiguous(), None
    if wanted and grad.dtype is not like.dtype:
        grad, of_bias = rounded_and_sums(grad, like.dtype)
    elif wanted:
        of_bias = column_sums(grad)
    return grad.view(like.shape).to(like.dtype), of_bias


def _serves(x: Tensor) -> bool:
    if not x.is_cuda or x.numel() * x.element_size() < _LEAST_BYTES or torch.is_grad_enabled():
        return False
    return _operators.usual(x) and x.dtype in lib.DTYPES and x.is_contiguous()


def _sums(x: Tensor, rounded: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[1:], dtype=lib.accumulator(x))
    code = lib.DTYPES[x.dtype if rounded is None else rounded.dtype]
    given = (x.data_ptr(), out.data_ptr(), lib.pointer(rounded), code)
    lib.launch("column_sums", x.device, *given, x.shape[0], out.numel(), lib.DTYPES[x.dtype])
    return out
