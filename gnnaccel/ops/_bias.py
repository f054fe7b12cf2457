"""What a layer adds to all its rows, and its gradient, on CUDA at the speed of memory (cuda/bias.cu)."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.lower import bounds

_HALVES = (torch.bfloat16, torch.float16)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, ..] + bias [D] as [N, D]; without a bias x as it is.

    torch takes twice as long where a bias of float32 makes 16-bit features wide: where autograd does not record, and so
    within its functions, that is a kernel.
    """
    if bias is None:
        return x
    x = x.flatten(1)
    return _widened(x, bias) if x.is_cuda and _widens(x, bias) else x + bias


def _widens(x: Tensor, bias: Tensor) -> bool:
    if x.dtype not in _HALVES or bias.dtype is not torch.float32 or torch.is_grad_enabled():
        return False
    if not _operators.usual(x, bias) or not x.numel() or x.shape[1] % 8 or bias.shape != x.shape[1:]:
        return False
    return all(t.is_contiguous() and not t.data_ptr() % 16 for t in (x, bias))


def _widened(x: Tensor, bias: Tensor) -> Tensor:
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
    """The gradients of x, of the shape and dtype of `like`, and of the bias, if `wanted`, from that of
    biased(x, bias)."""
    grad, of_bias = grad.contiguous(), None
    if wanted and grad.dtype is not like.dtype:
        grad, of_bias = rounded_and_sums(grad, like.dtype)
    elif wanted:
        of_bias = column_sums(grad)
    return grad.view(like.shape).to(like.dtype), of_bias


def _serves(x: Tensor) -> bool:
    if not x.is_cuda or x.numel() * x.element_size() < bounds.BIAS_BYTES or torch.is_grad_enabled():
        return False
    return _operators.usual(x) and x.dtype in lib.DTYPES and x.is_contiguous()


def _sums(x: Tensor, rounded: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[1:], dtype=lib.accumulator(x))
    code = lib.DTYPES[x.dtype if rounded is None else rounded.dtype]
    given = (x.data_ptr(), out.data_ptr(), lib.pointer(rounded), code)
    lib.launch("column_sums", x.device, *given, x.shape[0], out.numel(), lib.DTYPES[x.dtype])
    return out
