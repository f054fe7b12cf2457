"""What was derived from a user's tensors: kept as long as they live, forgotten when they change.

A framework that describes a graph by a plain tensor (PyG's ``edge_index``) has no object to hang prepared
structure on. An attribute on the tensor would end up in checkpoints, and an address alone is reused after the
tensor dies. So: a map keyed on the identity of the tensor objects, holding them weakly, that compares a stamp
(version counter, address, shape, device) at every look-up.

Nothing is evicted while its tensors live, however many there are. What is made of a value (a graph, of the edges with
self-loops that were made of a user's) goes with it: the value is what it was derived from, and lives in the map alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.graph import modes
from gnnaccel.lower import bounds

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
USED = "used"
"""The key of what is kept with edges that were met: True if there is a graph of them, else the layers that met them."""


def graph_key(num_src: int, num_dst: int, flow: str = "source_to_target") -> tuple:
    """The key of the graph of an edge_index [2, E], in the order of its columns."""
    return ("graph", num_src, num_dst, flow)


class Owner:
    """A tensor that values were derived from, or None once it died or was to be forgotten: what a value may keep.

    All share the one weak reference that the cache has to a tensor, so that there is one to give up: torch swaps the
    contents of two tensors only where nobody refers to them weakly.
    """

    __slots__ = ("ref",)

    def __init__(self, ref: Callable[[], Tensor | None]):
        self.ref = ref


class _Ref(weakref.ref[Tensor]):
    """A weak reference that knows the id of what it referred to when that has died."""

    __slots__ = ("id",)
    id: int


class _Record:
    """A tensor, what it was when values were derived from it, and those that were derived from it alone."""

    __slots__ = ("address", "device", "groups", "handle", "id", "ref", "shape", "values", "version")

    def __init__(self, tensor: Tensor, died: Callable[[_Ref], None]):
        self.id = id(tensor)
        ref = _Ref(tensor, died)
        ref.id = self.id
        self.ref: Callable[[], Tensor | None] = ref
        self.handle: Owner | None = None
        self.values: dict[Hashable, Any] = {}
        self.groups: set[tuple[int, ...]] = set()  # it is a member of
        self.version: int | None = None  # not known, or not to be known

    def note(self, tensor: Tensor) -> None:
        """Remember what `tensor` is now. The parts of `stamp`, without a tuple."""
        if tensor.is_inference():
            self.version = None
            return
        plain = type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided
        self.version, self.address = tensor._version, tensor.data_ptr() if plain else 0
        self.shape, self.device = tensor.shape, tensor.device

    def unchanged(self, tensor: Tensor) -> bool:
        """True if `tensor` is the one that this is of, and what it was. The parts of `stamp`, without a tuple."""
        return (
            self.ref() is tensor
            and self.version is not None
            and tensor._version == self.version
            and (not self.address or tensor.data_ptr() == self.address)
            and tensor.shape == self.shape
            and tensor.device == self.device
        )


class _Group:
    """Several tensors, and the values that were derived from all of them."""

    __slots__ = ("members", "values")

    def __init__(self, members: list[_Record]):
        self.members = members
        self.values: dict[Hashable, Any] = {}


def stamp(tensor: Tensor) -> tuple | None:
    """What changes when `tensor` does; None if that cannot be told (inference tensors have no version counter)."""
    if tensor.is_inference():
        return None
    plain = type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided
    # The address catches `tensor.data = other`, which leaves the version alone.
    return tensor._version, tensor.data_ptr() if plain else 0, tensor.shape, tensor.device


class TensorCache:
    """A weak map from (tensor objects, key) to a value derived from them.

    Parameters
    ----------
    most : int
        Values kept of the same tensors; the oldest goes first. Of different tensors any number is kept.

    Notes
    -----
    A value must not hold on to its owners or to views of them, or they would never die. Writes that bump no version
    counter of the owner go unseen, and need `invalidate`: through ``.numpy()``, ``.data``, or the tensors that a matrix
    of torch.sparse was made of: its parts share their memory, not the counter.
    """

    def __init__(self, most: int = bounds.KEPT_VALUES):
        self._most = most
        self._records: dict[int, _Record] = {}  # by the tensor's id
        self._groups: dict[tuple[int, ...], _Group] = {}  # by the ids
        # A collection inside the locked part may run the callback of a dying owner on the same thread.
        self._lock = threading.RLock()
        this = weakref.ref(self)

        def died(ref: _Ref) -> None:
            cache = this()
            if cache is not None:
                cache._bury(ref)

        self._died = died

    def __len__(self) -> int:
        return len(self.values())

    def values(self) -> list:
        """All values that are kept."""
        with self._lock:
            kept = [record.values for record in self._records.values()]
            kept += [group.values for group in self._groups.values()]
            return [value for values in kept for value in values.values()]

    def get(self, owners: tuple[Tensor, ...], key: Hashable) -> Any:
        """The value stored for `owners` and `key`, or None if there is none or an owner changed since."""
        if len(owners) == 1:  # without a loop: this is on the way of every layer's call
            owner = owners[0]
            record = self._records.get(id(owner))
            if record is None:
                return None
            # As `_Record.unchanged`.
            if (
                record.ref() is owner
                and record.version is not None
                and owner._version == record.version
                and (not record.address or owner.data_ptr() == record.address)
                and owner.shape == record.shape
                and owner.device == record.device
            ):
                return record.values.get(key)
            self._changed(record)
            return None
        group = self._groups.get(tuple(map(id, owners)))
        if group is None:
            return None
        for owner, record in zip(owners, group.members, strict=True):
            if not record.unchanged(owner):
                self._changed(record)
                return None
        return group.values.get(key)

    def put(self, owners: tuple[Tensor, ...], key: Hashable, value: Any) -> None:
        """Store `value`, which was derived from `owners`; not stored where a later change could not be noticed, nor
        where it holds nothing."""
        if modes.faking():
            return
        gone: list = []
        with self._lock:
            members = []
            for owner in owners:
                record = self._current(owner, gone)
                if record is None:
                    return
                members.append(record)
            values = members[0].values if len(members) == 1 else self._values_of(members)
            if key in values:
                gone.append(values.pop(key))
            values[key] = value
            if len(values) > self._most:
                gone.append(values.pop(next(iter(values))))

    def holds(self, tensor: Tensor) -> bool:
        """True if something that is kept was derived from `tensor`, alone or with others."""
        record = self._records.get(id(tensor))
        return record is not None and record.ref() is tensor and bool(record.values or record.groups)

    def mark(self, tensor: Tensor) -> Any:
        """An object that is another once what was derived from `tensor` was dropped; None where nothing ever was."""
        record = self._records.get(id(tensor))
        return record.values if record is not None and record.ref() is tensor else None

    def made_of(self, tensor: Tensor) -> list:
        """All that is kept of `tensor`, alone and with others."""
        with self._lock:
            record = self._records.get(id(tensor))
            if record is None or record.ref() is not tensor:
                return []
            groups = [self._groups[ids] for ids in record.groups if ids in self._groups]
            return [value for values in (record.values, *(each.values for each in groups)) for value in values.values()]

    def owner(self, tensor: Tensor) -> Owner:
        """What a value may keep to find `tensor` again as long as that lives and is not invalidated."""
        gone: list = []
        with self._lock:
            record = self._record(tensor, gone)
            if record.handle is None:
                record.handle = Owner(record.ref)
            return record.handle

    def invalidate(self, *owners: Tensor) -> None:
        """Forget what was derived from `owners`, and from what was derived from them; everything if none is given."""
        gone: list = []
        with self._lock:
            for number in map(id, owners) if owners else tuple(self._records):
                record = self._records.get(number)
                if record is not None:
                    self._drop(record, gone)
                    if record.handle is not None:
                        record.handle.ref = _nobody
                    record.ref = _nobody  # now, and not when the last reader of the record is done

    def _changed(self, record: _Record) -> None:
        """Drop what was derived from a tensor that has changed since."""
        gone: list = []
        with self._lock:
            self._empty(record, gone)

    def _bury(self, ref: _Ref) -> None:
        """Forget a tensor that died."""
        gone: list = []
        with self._lock:
            # The id may belong to a new tensor by now.
            record = self._records.get(ref.id)
            if record is not None and record.ref is ref:
                del self._records[ref.id]
                self._empty(record, gone)

    # What follows is called with the lock held. `gone` receives what was dropped, to be freed by the caller after that:
    # it may own tensors whose death drops further values.

    def _record(self, tensor: Tensor, gone: list) -> _Record:
        """The record of `tensor`, perhaps of what it was before a change."""
        record = self._records.get(id(tensor))
        if record is not None:
            if record.ref() is tensor:
                return record
            self._drop(record, gone)  # of another that had this id and is dying
        record = self._records[id(tensor)] = _Record(tensor, self._died)
        return record

    def _current(self, tensor: Tensor, gone: list) -> _Record | None:
        """The record of `tensor` as it is now, without what was derived from what it was; None if a change of it could
        not be told."""
        record = self._record(tensor, gone)
        if record.version is None or not record.unchanged(tensor):
            if record.values or record.groups:
                self._empty(record, gone)
            record.note(tensor)
        return None if record.version is None else record

    def _values_of(self, members: list[_Record]) -> dict[Hashable, Any]:
        """What was derived from several tensors together."""
        ids = tuple([record.id for record in members])
        group = self._groups.get(ids)
        if group is None:
            group = self._groups[ids] = _Group(members)
            for record in members:
                record.groups.add(ids)
        return group.values

    def _empty(self, record: _Record, gone: list) -> None:
        """Drop what was derived from a tensor, alone and with others."""
        gone.append(record.values)
        record.values = {}
        for ids in tuple(record.groups) if record.groups else ():
            group = self._groups.pop(ids, None)
            for member in () if group is None else group.members:
                member.groups.discard(ids)
            gone.append(group)

    def _drop(self, record: _Record, gone: list) -> None:
        """Forget a tensor."""
        self._records.pop(record.id, None)
        self._empty(record, gone)


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


touch.Patches().put(torch.utils, "swap_tensors", _swapping)  # for good: what the cache holds outlives uninstall()
