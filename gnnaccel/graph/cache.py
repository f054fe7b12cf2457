"""What was derived from a user's tensors: kept as long as they live, forgotten when they change.

A framework that describes a graph by a plain tensor (PyG's ``edge_index``) has no object to hang prepared
structure on. An attribute on the tensor would end up in checkpoints, and an address alone is reused after the
tensor dies. So: a map keyed on the identity of the tensor objects, holding them weakly, that compares a stamp
(version counter, address, shape, device) at every look-up.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph import modes

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class Owner:
    """A tensor that values were derived from, or None once it died or was to be forgotten.

    The one weak reference to it that the cache and its values hold, so that there is one to give up: torch swaps the
    contents of two tensors only where nobody refers to them weakly.
    """

    __slots__ = ("__weakref__", "keys", "ref")

    def __init__(self, owner: Tensor, cache: weakref.ref[TensorCache]):
        self.keys = keys = set[tuple]()  # of its entries

        def died(_) -> None:
            this = cache()
            if this is None:
                return
            # An id may belong to a new tensor by now: only entries of this very owner go.
            for full in tuple(keys):
                entry = this._entries.get(full)
                if entry is not None and any(held.keys is keys for held in entry.owners):
                    this._drop(full)

        self.ref: Callable[[], Tensor | None] = weakref.ref(owner, died)


class _Entry(NamedTuple):
    owners: tuple[Owner, ...]
    stamps: tuple
    value: Any


def stamp(tensor: Tensor) -> tuple | None:
    """What changes when `tensor` does; None if that cannot be told (inference tensors have no version counter)."""
    if tensor.is_inference():
        return None
    plain = type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided
    # The address catches `tensor.data = other`, which leaves the version alone.
    return tensor._version, tensor.data_ptr() if plain else 0, tensor.shape, tensor.device


class TensorCache:
    """A bounded, weak map from (tensor objects, key) to a value derived from them.

    Parameters
    ----------
    maxsize : int
        Most entries kept; the least recently used goes first.

    Notes
    -----
    A value must not hold on to its owners or to views of them, or they would never die before they are
    evicted. Writes that bump no version counter of the owner go unseen, and need `invalidate`: through ``.numpy()``,
    ``.data``, or the tensors that a matrix of torch.sparse was made of: its parts share their memory, not the counter.
    """

    def __init__(self, maxsize: int = 256):
        self._maxsize = maxsize
        self._entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self._owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()  # by id
        # A collection inside the locked part may run the callback of a dying owner on the same thread.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, owners: tuple[Tensor, ...], key: Hashable) -> Any:
        """The value stored for `owners` and `key`, or None if there is none or an owner changed since."""
        full = (*map(id, owners), key)
        entry = self._entries.get(full)
        if entry is None:
            return None
        for owner, held, old in zip(owners, entry.owners, entry.stamps, strict=True):
            if held.ref() is not owner or stamp(owner) != old:
                self._drop(full)
                return None
        with contextlib.suppress(KeyError):  # another thread evicted it just now
            self._entries.move_to_end(full)
        return entry.value

    def put(self, owners: tuple[Tensor, ...], key: Hashable, value: Any) -> None:
        """Store `value`, which was derived from `owners`; not stored where a later change could not be noticed, nor
        where it holds nothing."""
        if modes.faking():
            return
        stamps = tuple(stamp(owner) for owner in owners)
        if None in stamps:
            return
        full = (*map(id, owners), key)
        with self._lock:
            held = tuple(map(self.owner, owners))
            self._entries[full] = _Entry(held, stamps, value)
            for one in held:
                one.keys.add(full)
            while len(self._entries) > self._maxsize:
                self._drop(next(iter(self._entries)))

    def owner(self, tensor: Tensor) -> Owner:
        """What a value may keep to find `tensor` again as long as that lives and is not invalidated."""
        with self._lock:
            found = self._owners.get(id(tensor))
            if found is None or found.ref() is not tensor:
                found = self._owners[id(tensor)] = Owner(tensor, weakref.ref(self))
            return found

    def invalidate(self, *owners: Tensor) -> None:
        """Forget what was derived from `owners`, and from what was derived from them; everything if none is given."""
        if not owners:
            with self._lock:
                self._entries.clear()
            return
        for owner in owners:
            held = self._owners.pop(id(owner), None)
            if held is not None and held.ref() is owner:
                for full in tuple(held.keys):
                    self._drop(full)
                held.ref = _nobody

    def _drop(self, full: tuple) -> None:
        with self._lock:
            entry = self._entries.pop(full, None)
            for held in () if entry is None else entry.owners:
                held.keys.discard(full)
        # Freed outside the lock: it may own tensors whose death drops further entries.
        del entry


def _nobody() -> None:
    return None


derived = TensorCache()
"""The cache every backend shares."""


def invalidate(*tensors: Tensor) -> None:
    """Forget everything that was derived from `tensors` (from all tensors if none is given).

    Needed only after a write that torch cannot see: see `TensorCache`.

    Raises
    ------
    TypeError
        If an argument is not a torch.Tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"invalidate: expected torch.Tensor arguments, got {type(tensor).__name__}")
    derived.invalidate(*tensors)


def _swapping(original: Callable) -> Callable:
    """torch.utils.swap_tensors for tensors of the cache too: it refuses what anyone refers to weakly.

    What was derived from them is forgotten. Module.load_state_dict() swaps buffers where torch.__future__ says so.
    """

    @functools.wraps(original)
    def swap_tensors(t1, t2):
        derived.invalidate(t1, t2)
        return original(t1, t2)

    return swap_tensors


torch.utils.swap_tensors = _swapping(torch.utils.swap_tensors)
