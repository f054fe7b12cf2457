"""In what precision torch multiplies matrices: of float32 as the user has set it, and what it makes of 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import touch

# As of torch 2.9 the getter of old raises a RuntimeError where the new attributes (fp32_precision) have been set.
_of = touch.fp32_precision
_HALVES = (torch.bfloat16, torch.float16)
_WRITES_WIDE = hasattr(torch.ops.aten.mm, "dtype")  # on CUDA, as of torch 2.8


def settings() -> tuple:
    """All that products of matrices depend on, to be compared."""
    if _of is None:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return _of("cuda", "matmul"), _of("cuda", "conv"), _of("mkldnn", "matmul")


def allows_tf32() -> bool:
    """True if products on CUDA may be of TF32."""
    return torch.get_float32_matmul_precision() != "highest" if _of is None else _of("cuda", "matmul") == "tf32"


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a.mm(b).to(dtype). Of 16-bit matrices as float32 on CUDA without a result of 16 bits between, and so one pass and
    one rounding less, where nothing is recorded: torch has no derivative of that."""
    wide = dtype is torch.float32 and a.dtype in _HALVES and not torch.is_grad_enabled()
    if wide and _WRITES_WIDE and a.device.type == "cuda":
        return torch.mm(a, b, dtype)  # type: ignore[call-overload]
    return a.mm(b).to(dtype)
