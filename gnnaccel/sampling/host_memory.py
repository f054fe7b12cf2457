"""Features that stay in host memory: pinned in place, so that the GPU reads the rows of a batch over the bus as it
needs them, and the host neither gathers nor copies nor waits."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pinned:
    """Keeps the memory of a tensor where the GPU can read it, until `release` or the end of this object.

    Parameters
    ----------
    tensor : Tensor, of any dtype
        On the CPU and contiguous. Its memory is pinned as it lies, and must not be freed before: the object keeps it.

    Raises
    ------
    ValueError
        For a tensor that is not contiguous, or not on the CPU. RuntimeError: where CUDA refuses, with its reason.
    """

    def __init__(self, tensor: Tensor):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"pin: expected a contiguous tensor on the CPU, got strides {tensor.stride()} on {tensor.device}"
            )
        self.tensor = tensor
        self.release = lambda: None
        if tensor.numel():
            address, cudart = tensor.data_ptr(), torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaHostRegister(address, tensor.numel() * tensor.element_size(), 0)))
            self.release = weakref.finalize(self, _unpin, cudart, address, tensor)


def _unpin(cudart, address: int, _tensor: Tensor) -> None:
    torch.cuda.synchronize()  # the GPU may still be reading
    cudart.cudaHostUnregister(address)


class _Interface:
    """Pinned memory, as CUDA's array interface describes it."""

    def __init__(self, tensor: Tensor):
        kind = tensor.element_size()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{kind}" if kind > 1 else "|i1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def on_the_bus(tensor: Tensor, device: torch.device) -> Tensor:
    """Pinned host memory as a tensor of a GPU, which reads and writes it over the bus; nothing is copied.

    Parameters
    ----------
    tensor : Tensor, of any dtype of up to 8 bytes
        In pinned memory, contiguous. It must stay there, and pinned, for as long as the result or the GPU uses it.
    device : torch.device
        A GPU.

    Raises
    ------
    TypeError
        For a dtype of more than 8 bytes. ValueError: for memory that is not pinned.
    """
    if tensor.element_size() not in _BITS:
        raise TypeError(f"on_the_bus: tensor: expected a dtype of up to 8 bytes, got {tensor.dtype}")
    if not tensor.is_contiguous() or (tensor.numel() and not tensor.is_pinned()):
        raise ValueError("on_the_bus: tensor: expected contiguous pinned memory")
    if not tensor.numel():
        return tensor.to(device)
    with torch.cuda.device(device):
        there = torch.as_tensor(_Interface(tensor.view(_BITS[tensor.element_size()])), device=device)
    return there.view(tensor.dtype)


def rows(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[index] on the GPU of `index`, which reads these rows alone: `on_the_bus` has what it takes, and raises.

    Parameters
    ----------
    tensor : Tensor [n, ...]
    index : Tensor [m], int32 or int64, on a GPU

    Returns
    -------
    Tensor [m, ...]
        On that GPU, as soon as its current stream has come so far.
    """
    return on_the_bus(tensor, index.device).index_select(0, index)
