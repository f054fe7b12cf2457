"""Both gradients of a weighted sum by one walk over the transposed graph, on the CPU: they read the same rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.ops import _arrays, _check
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._weight_gradient import kept


def width(x: Tensor) -> int:
    """Features of a row."""
    return math.prod(x.shape[1:])


def fuses(lhs, rhs, grad) -> bool:
    """True if the CPU kernel for both gradients applies: one weight per edge or head, no second derivative."""
    if lhs is None or rhs is None or torch.is_grad_enabled() or grad.device.type != "cpu":
        return False
    if grad.dtype not in (torch.float32, torch.float64) or lhs.shape[1:] != grad.shape[1:] or grad[:1].numel() == 0:
        return False
    full = tuple(grad.shape[1:])
    padded, split = kept(rhs.shape[1:], full)
    return padded[:split] == full[:split] and math.prod(full[split:]) % 4 == 0


def _spmm_backward_cpu(transposed, x, weight, grad):
    x, weight, grad = x.contiguous(), weight.contiguous(), grad.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    pointers = (lib.pointer(t) for t in (x, weight, grad, grad_x, grad_weight))
    lib.launch("spmm_backward", x.device, transposed.matrix(), *pointers, width(weight), width(x), lib.DTYPES[x.dtype])
    return grad_x, grad_weight


def _check_widths(_arrays, x, weight, grad):
    _check.features_of("spmm_backward", "grad", grad, x.shape[1:])
    if weight.numel() and width(x) % width(weight):
        raise ValueError(f"spmm_backward: weight: expected features that divide x's, got {tuple(weight.shape)}")


def _spmm_backward_fake(_transposed, x, weight, _grad):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))


both_gradients_op = _operators.register(
    "spmm_backward",
    f"({_arrays.SCHEMA}, Tensor x, Tensor weight, Tensor grad) -> (Tensor, Tensor)",
    _spmm_backward_cpu,
    _spmm_backward_fake,
    devices=("cpu",),
    check=_check.reads("spmm_backward", ("x", "rows"), ("weight", "edges"), ("grad", "cols"), also=_check_widths),
    structure=Structure,
)
