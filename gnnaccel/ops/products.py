"""Products of float32 features of many nodes with small matrices, and their gradients: on CUDA by kernels of ours, in
which tensor cores come as near as sums of float32, and by torch's products elsewhere. Not differentiable: for ops that
are.

A product of 64 to 256 columns is bound by arithmetic in float32, and by memory here. Where the user has allowed TF32
torch's own are as fast, and used.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _library as lib
from gnnaccel import _precision
from gnnaccel.lower import bounds


def serves(x: Tensor, *others: Tensor | None) -> bool:
    """True if the kernels take the rows of x, and `others`, whose widths are their last dimension: vectors and matrices
    on one device."""
    if x.dtype is not torch.float32 or not x.is_cuda or x.shape[0] < bounds.PRODUCT_ROWS or _precision.allows_tf32():
        return False
    if not lib.has_cuda_kernels() or not _is_new_enough(x.device):
        return False
    for t in (x, *others):
        if t is None:
            continue
        if t.dtype is not torch.float32 or not t.is_contiguous() or t.data_ptr() % 16:
            return False
        for width in t.shape[1:] if t is x else t.shape:
            if width % 4 or not 0 < width <= bounds.PRODUCT_WIDTH:
                return False
    return True


@functools.lru_cache(maxsize=64)
def _is_new_enough(device: torch.device) -> bool:
    is_emulated = device.type == "cpu"
    return is_emulated or torch.cuda.get_device_capability(device) >= bounds.PRODUCT_CAPABILITY


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias.

    Parameters
    ----------
    x : Tensor [N, F]
    weight : Tensor [D, F]
    bias : Tensor [D], optional
    """
    if not serves(x, weight, bias):
        return F.linear(x, weight, bias)
    out = x.new_empty((x.shape[0], weight.shape[0]))
    _product(x, weight, bias, out, False)
    return out


def back(grad: Tensor, weight: Tensor) -> Tensor:
    """grad @ weight, the gradient to x.

    Parameters
    ----------
    grad : Tensor [N, D]
    weight : Tensor [D, F]
    """
    if grad.shape[0] < bounds.PRODUCT_ROWS_BACK or not serves(grad, weight):
        return grad.mm(weight)
    out = grad.new_empty((grad.shape[0], weight.shape[1]))
    _product(grad, weight, None, out, True)
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, transposed: bool) -> None:
    pointers = (x.data_ptr(), weight.data_ptr(), lib.pointer(bias), out.data_ptr())
    lib.launch("linear", x.device, *pointers, x.shape[0], x.shape[1], out.shape[1], transposed)


def of_weight(x: Tensor, grad: Tensor, with_bias: bool) -> tuple[Tensor, Tensor | None] | None:
    """grad.T @ x, and the sum of grad's rows if `with_bias`: the gradients to weight and bias; None where torch's
    products are to be called.

    Parameters
    ----------
    x : Tensor [N, F]
    grad : Tensor [N, D]
    """
    if x.shape[1] * grad.shape[1] > bounds.PRODUCT_WEIGHT or not serves(x) or not serves(grad):
        return None
    weight = x.new_empty((grad.shape[1], x.shape[1]))
    bias = x.new_empty(grad.shape[1]) if with_bias else None
    pointers = (x.data_ptr(), grad.data_ptr(), weight.data_ptr(), lib.pointer(bias))
    lib.launch("linear_weights", x.device, *pointers, x.shape[0], x.shape[1], grad.shape[1])
    return weight, bias
