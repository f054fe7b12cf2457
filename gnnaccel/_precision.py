"""In what precision torch may multiply float32 matrices, as the user has set it."""

from __future__ import annotations

from typing import Any

import torch

# As of torch 2.9 the getter of old raises a RuntimeError where the new attributes (fp32_precision) have been set.
_of: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def settings() -> tuple:
    """All that products of matrices depend on, to be compared."""
    if _of is None:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return _of("cuda", "matmul"), _of("cuda", "conv"), _of("mkldnn", "matmul")


def allows_tf32() -> bool:
    """True if products on CUDA may be of TF32."""
    return torch.get_float32_matmul_precision() != "highest" if _of is None else _of("cuda", "matmul") == "tf32"
