"""On which device an index of DGL is, and copies between: what a DGL that was built for the CPU is told (bridge.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.dgl_backend import touch
from gnnaccel.lower import bounds

_DEVICE = "_gnnaccel_device"
_HOST = "gnnaccel.host"


def device_of(thing) -> torch.device | None:
    """The CUDA device that an index or array is said to be on; None for one that is where it is."""
    return getattr(thing, "__dict__", {}).get(_DEVICE)


def place(thing, device: torch.device) -> None:
    """Say of an index or array in host memory that it is on `device`."""
    setattr(thing, _DEVICE, device)


def host(gidx):
    """The same index, said to be in host memory."""
    if device_of(gidx) is None:
        return gidx
    cache = touch.cache_of(gidx)
    found = cache.get(_HOST)
    if found is None:
        found = cache[_HOST] = twin(gidx)
    return found


def twin(gidx):
    """An index of the same C++ structure that carries no device."""
    formats = touch.allowed_formats()(gidx)
    return touch.with_formats().function(gidx, [f for f in ("coo", "csr", "csc") if f in formats])


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from host memory, through pinned memory where it is long: the host does not wait."""
    if tensor.numel() > bounds.PINNED_NUMBERS:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
