"""What was derived from a user's tensors: kept as long as they live, forgotten when they change.

A framework that describes a graph by a plain tensor (PyG's ``edge_index``) has no object to hang prepared
structure on. An attribute on the tensor would end up in checkpoints, and an address alone is reused after the
tensor dies. So: a map keyed on the identity of the tensor objects, holding them weakly, that compares a stamp
(version counter, address, shape, device) at every look-up.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph import modes

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class _Entry(NamedTuple):
    owners: tuple[weakref.ref, ...]
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
    evicted. Writes through ``.numpy()`` or ``.data`` bump no version counter and go unseen: call `invalidate`.
    """

    def __init__(self, maxsize: int = 256):
        self._maxsize = maxsize
        self._entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self._keys: dict[int, set[tuple]] = {}  # id of an owner -> its entries
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
        for owner, ref, old in zip(owners, entry.owners, entry.stamps, strict=True):
            if ref() is not owner or stamp(owner) != old:
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
            refs = tuple(weakref.ref(owner, self._forget(id(owner))) for owner in owners)
            self._entries[full] = _Entry(refs, stamps, value)
            for owner in owners:
                self._keys.setdefault(id(owner), set()).add(full)
            while len(self._entries) > self._maxsize:
                self._drop(next(iter(self._entries)))

    def invalidate(self, *owners: Tensor) -> None:
        """Forget what was derived from `owners`, and from what was derived from them; everything if none is given."""
        if not owners:
            with self._lock:
                self._entries.clear()
                self._keys.clear()
            return
        for owner in owners:
            for full in tuple(self._keys.get(id(owner), ())):
                self._drop(full)

    def _forget(self, owner_id: int):
        """A weakref callback that drops the entries of a dead owner. It must not keep the cache alive."""
        cache = weakref.ref(self)

        def callback(ref: weakref.ref) -> None:
            this = cache()
            if this is None:
                return
            # The id may belong to a new tensor by now: only entries that hold this very reference go.
            for full in tuple(this._keys.get(owner_id, ())):
                entry = this._entries.get(full)
                if entry is not None and any(ref is r for r in entry.owners):
                    this._drop(full)

        return callback

    def _drop(self, full: tuple) -> None:
        with self._lock:
            entry = self._entries.pop(full, None)
            for owner_id in full[:-1]:
                keys = self._keys.get(owner_id)
                if keys is not None:
                    keys.discard(full)
                    if not keys:
                        del self._keys[owner_id]
        # Freed outside the lock: it may own tensors whose death drops further entries.
        del entry


derived = TensorCache()
"""The cache every backend shares."""


def invalidate(*tensors: Tensor) -> None:
    """Forget everything that was derived from `tensors` (from all tensors if none is given).

    Needed only after a write that torch cannot see, through ``.numpy()`` or ``.data``.

    Raises
    ------
    TypeError
        If an argument is not a torch.Tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"invalidate: expected torch.Tensor arguments, got {type(tensor).__name__}")
    derived.invalidate(*tensors)
