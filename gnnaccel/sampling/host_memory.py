"""Features that stay in host memory: pinned in place, so that the GPU reads the rows of a batch over the bus as it
needs them, and the host neither gathers nor copies nor waits."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.lower import bounds

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_lock = threading.Lock()
_known: weakref.WeakValueDictionary[tuple[int, int], Pinned] = weakref.WeakValueDictionary()  # by address and bytes
_readers: set[torch.device] = set()  # GPUs that have been given any of it
_waiting: list[tuple[int, Tensor]] = []  # to be unpinned when no CUDA graph is captured
# What keeps rows of host memory on a GPU, by address and shape of that memory, and the GPU.
_caches: weakref.WeakValueDictionary[tuple, Any] = weakref.WeakValueDictionary()


class Pinned:
    """Keeps the memory of a tensor where the GPU can read it, for as long as this object lives. `pin` makes it."""

    def __init__(self, tensor: Tensor, of_ours: bool):
        self.tensor = tensor.detach()  # of this memory, whatever the user's tensor is given later
        if of_ours:
            weakref.finalize(self, _unpin, tensor.data_ptr(), self.tensor)


def pin(tensor: Tensor) -> Pinned:
    """Pin the memory of a tensor as it lies, or share in it where that has been done.

    Parameters
    ----------
    tensor : Tensor, of any dtype
        On the CPU and contiguous. The result keeps its memory, or all the memory that it is part of.

    Raises
    ------
    ValueError
        For a tensor that is not contiguous, or not on the CPU. RuntimeError: where CUDA refuses, with its reason.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"pin: expected a contiguous tensor on the CPU, got strides {tensor.stride()} on {tensor.device}"
        )
    extent = _extent(tensor)
    with _lock:
        found = _holder(*extent)
        if found is None:
            _unpin_waiting()
            ours = extent[1] > 0 and not is_pinned(tensor)
            if ours:
                _register(*extent)
            found = Pinned(tensor, ours)
            if ours:
                _known[extent] = found
    return found


def _register(address: int, size: int) -> None:
    error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    if int(error):
        with contextlib.suppress(RuntimeError):  # CUDA would say it again of the next kernel
            torch.zeros(1, device="cuda")
        torch.cuda.check_error(int(error))


def is_pinned(tensor: Tensor) -> bool:
    """True if all the memory of a contiguous tensor is pinned.

    torch looks at the first byte, and takes what lies on the same page as other pinned memory for pinned, too.
    """
    if tensor.device.type != "cpu":
        return False
    start, size = _extent(tensor)
    if any(a - bounds.PAGE_BYTES < start + size and start < a + n + bounds.PAGE_BYTES for a, n in list(_known)):
        return _holder(start, size) is not None
    return not size or (tensor.is_pinned() and tensor.view(-1)[-1:].is_pinned())


def _extent(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _holder(start: int, size: int) -> Pinned | None:
    """What keeps memory pinned that these bytes are in."""
    holders = (pinned for (a, n), pinned in list(_known.items()) if a <= start and start + size <= a + n)
    return next(holders, None)


def _unpin(address: int, memory: Tensor) -> None:
    if touch.is_bad_fork():  # a forked worker has neither made it, nor may it use CUDA
        return
    _waiting.append((address, memory))
    if not torch.cuda.is_current_stream_capturing():  # which waiting for the GPU would end with an error
        _unpin_waiting()


def _unpin_waiting() -> None:
    while _waiting:
        try:
            address, _memory = _waiting.pop()
        except IndexError:  # another thread has it
            return
        for device in list(_readers):
            torch.cuda.synchronize(device)  # it may still be reading
        torch.cuda.cudart().cudaHostUnregister(address)


class _Interface:
    """Pinned memory, as CUDA's array interface describes it."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: int, memory: Tensor | None = None):
        self._memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": f"<i{kind}" if kind > 1 else "|i1",
            "data": (address, False),
            "version": 3,
        }


def at_address(address: int, num_rows: int, like: Tensor, device: torch.device) -> Tensor:
    """Integers [num_rows, w] of a GPU that begin at an address, as many bytes to a row and a number as `like` has.

    The caller keeps what is read of them, and has pinned what of that is the host's.
    """
    size, width = like.element_size(), like[:1].numel()
    with torch.cuda.device(device):
        there = torch.as_tensor(_Interface(address, (num_rows, width), size))
    if there.device != device:
        raise ValueError(f"at_address: expected memory that {device} reads, got some of {there.device}")
    return there


def on_the_bus(tensor: Tensor, device: torch.device) -> Tensor:
    """Pinned host memory as a tensor of a GPU, which reads and writes it over the bus; nothing is copied.

    Parameters
    ----------
    tensor : Tensor, of any dtype of up to 8 bytes
        In pinned memory, contiguous. It must stay pinned for as long as the result or the GPU uses it.
    device : torch.device
        A GPU: the one that was the current one when the memory was pinned.

    Raises
    ------
    TypeError
        For a dtype of more than 8 bytes. ValueError: for memory that is not pinned, or was for another GPU.
    """
    if tensor.element_size() not in _BITS:
        raise TypeError(f"on_the_bus: tensor: expected a dtype of up to 8 bytes, got {tensor.dtype}")
    if not tensor.is_contiguous() or not is_pinned(tensor):
        raise ValueError("on_the_bus: tensor: expected contiguous pinned memory")
    if not tensor.numel():
        return tensor.to(device)
    with torch.cuda.device(device):
        there = torch.as_tensor(
            _Interface(tensor.data_ptr(), tuple(tensor.shape), tensor.element_size(), tensor.detach())
        )
    if there.device != device:
        raise ValueError(f"on_the_bus: tensor: expected memory pinned for {device}, got some of {there.device}")
    _readers.add(there.device)
    return there.view(tensor.dtype)


def rows(tensor: Tensor, index: Tensor) -> Tensor:
    """tensor[index] on the GPU of `index`, which reads these rows alone: `on_the_bus` has what it takes, and raises.
    A cache of the tensor on that GPU reads the rows that it has there.

    Parameters
    ----------
    tensor : Tensor [n, ...]
    index : Tensor [m], int32 or int64, on a GPU

    Returns
    -------
    Tensor [m, ...]
        On that GPU, as soon as its current stream has come so far.
    """
    cache = cache_of(tensor, index.device)
    return on_the_bus(tensor, index.device).index_select(0, index) if cache is None else cache.gather(index)


def note_cache(tensor: Tensor, device: torch.device, cache: Any) -> None:
    """Have `rows` and `selectable` read this memory through what has a gather(index), as long as that lives."""
    _caches[_key(tensor, device)] = cache
    _readers.add(device)


def cache_of(tensor: Tensor, device: torch.device) -> Any:
    """What `note_cache` was given of this memory, or None."""
    return _caches.get(_key(tensor, device)) if _caches and tensor.is_contiguous() else None


def _key(tensor: Tensor, device: torch.device) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.dtype, device


class Selectable(Tensor):
    """`on_the_bus` of memory that a GPU has a cache of: torch.index_select of its rows goes through that."""

    cache: Any

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with touch.plain_functions():
            if getattr(func, "__name__", None) == "index_select":  # torch's function is no one object
                value, dim, index, out = _selected(*args, **(kwargs or {}))
                if isinstance(value, Selectable) and dim == 0 and out is None:
                    return value.cache.gather(index)
            return func(*args, **(kwargs or {}))


def _selected(input: Any, dim: int, index: Any, *, out: Any = None) -> tuple:
    return input, dim, index, out


def selectable(tensor: Tensor, device: torch.device) -> Tensor:
    """`on_the_bus` for what selects rows by torch.index_select, which a cache of them may answer."""
    there, cache = on_the_bus(tensor, device), cache_of(tensor, device)
    if cache is None:
        return there
    there = there.as_subclass(Selectable)
    there.cache = cache
    return there
