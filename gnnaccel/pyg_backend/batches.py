"""Batches of many small graphs: what `Batch.from_data_list`, and so PyG's `DataLoader`, does for each of them, done at
once.

PyG adds to the edges of each graph, asks each graph for its nodes several times, and fills a tensor for each; of
molecules that takes as long as a layer or two. Here an attribute takes one concatenation, and its increments one
addition. The batch is the same, with all that takes it apart again. Attributes that are no plain tensors in host memory
go to PyG's own function; so do whole lists of data whose class has its own idea of concatenation, or of nodes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import batch as _module

from gnnaccel import report
from gnnaccel.pyg_backend.touch import (
    N_KEYS,
    Batch,
    Data,
    GlobalStorage,
    attributes_of,
    collate_values,
    set_counts,
    store_of,
)
from gnnaccel.touch import Patches, new_shared

_KIND = "pyg.Batch"
# What decides how the data of a class is put together, and may be the user's.
_DECIDING = ("__cat_dim__", "__inc__", "__getattr__", "__getattribute__", "num_nodes", "stores", "stores_as")
_TRAITS = operator.attrgetter("dtype", "layout", "is_cpu", "is_nested")
_INDEX_DTYPES = (torch.int64, torch.int32)
_ON_CPU = torch.device("cpu")
_patches = Patches()


@functools.lru_cache(maxsize=256)
def _is_plain(kind: type) -> bool:
    """True for a class whose data PyG puts together as it does Data's."""
    if not issubclass(kind, Data) or issubclass(kind, Batch):
        return False
    return all(inspect.getattr_static(kind, name) is inspect.getattr_static(Data, name) for name in _DECIDING)


def _obstacle(data_list: list, increment: bool, follow_batch) -> str | None:
    """Why a list is PyG's to put together; None if it is ours."""
    kind = type(data_list[0])
    if not increment or follow_batch:
        return "follow_batch" if increment else "increment=False"
    if not _is_plain(kind):  # type: ignore[arg-type]
        return f"data of class {kind.__name__}"
    if set(map(type, data_list)) != {kind} or {type(store_of(data)) for data in data_list} != {GlobalStorage}:
        return "data of several classes"
    return None


def _num_nodes(store: GlobalStorage) -> int | None:
    """`store.num_nodes`, found without asking for the dimension that its features are put together in, which is 0."""
    values = attributes_of(store)
    if "num_nodes" not in values:
        for key, value in values.items():
            if key in N_KEYS:
                return value.shape[0] if type(value) is Tensor and value.layout is torch.strided else store.num_nodes
    return store.num_nodes


def _is_counted(key: str) -> bool:
    """True for an attribute that holds nodes' numbers, as PyG tells from its name."""
    return "index" in key or key == "face"


def _is_ours(key: str, values: list) -> bool:
    """True for plain tensors in host memory; numbers of nodes only where they are such that adding keeps the dtype."""
    if set(map(type, values)) != {Tensor}:
        return False
    traits = set(map(_TRAITS, values))
    if len(traits) > 1:
        return False
    dtype, layout, is_cpu, is_nested = traits.pop()
    plain = layout is torch.strided and is_cpu and not is_nested and 0 not in set(map(Tensor.dim, values))
    return plain and (dtype in _INDEX_DTYPES or not _is_counted(key))


class _Offsets:
    """Where each of many parts begins, int64 [parts + 1], made once of equal sizes."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, sizes: list[int]) -> Tensor:
        found = self._made.get(key := tuple(sizes))
        if found is None:
            found = self._made[key] = torch.from_numpy(np.array([0, *itertools.accumulate(sizes)], np.int64))
        return found.clone()


def _joined(key: str, values: list[Tensor], counts: list[int], offsets: _Offsets) -> tuple[Tensor, Tensor, Tensor]:
    """One tensor of many, where each begins in it, and what was added to each: the `counts` of nodes before it."""
    dim = -1 if _is_counted(key) else 0
    sizes = [value.shape[dim] for value in values]
    slices = offsets(sizes)
    out = None
    if torch.utils.data.get_worker_info() is not None:  # into shared memory, as PyG's, or it would be copied there
        shape = list(values[0].shape)
        shape[dim] = sum(sizes)
        count = sum(value.numel() for value in values)
        room = new_shared(count * values[0].element_size(), device=_ON_CPU)
        out = values[0].new_empty(0).set_(room, 0, torch.Size(shape))  # type: ignore[call-overload]
    joined = torch.cat(values, dim, out=out)
    if not _is_counted(key):
        return joined, slices, slices.new_zeros(len(values))
    added = offsets(counts)[:-1]
    if len(values) > 1:
        joined += added.to(joined.dtype).repeat_interleave(slices.diff(), output_size=sum(sizes))
    return joined, slices, added


@functools.cache
def _empty() -> Batch:
    """A batch of Data without any, of which copies are made: PyG makes a class for each batch, to find it made."""
    return Batch(_base_cls=Data)


def _together(cls: type, data_list: list, add_batch: bool, exclude_keys) -> tuple | None:
    """PyG's batch, slices and increments of plain data; None where PyG must do it, or word what is wrong."""
    stores: list[GlobalStorage] = [store_of(data) for data in data_list]
    if not stores[0].can_infer_num_nodes:  # PyG warns where it is asked for them, which not every attribute does
        return None
    mappings = list(map(attributes_of, stores))
    counts: list = [_num_nodes(store) for store in stores]
    if set(map(type, counts)) != {int}:
        return None
    excluded = set(exclude_keys or ())
    offsets = _Offsets()
    values_of: dict[str, list] = {}
    for key in mappings[0]:
        if key in excluded or key == "ptr":
            continue
        if "batch" in key:
            return None
        try:
            values_of[key] = [mapping[key] for mapping in mappings]
        except KeyError:
            return None
    kind = type(data_list[0])
    out = copy.copy(_empty()) if cls is Batch and kind is Data else cls(_base_cls=kind)
    store = store_of(out)
    slice_dict: dict[str, Any] = {}
    inc_dict: dict[str, Any] = {}
    for key, values in values_of.items():
        if key == "num_nodes":
            set_counts(store, values)
            store.num_nodes = sum(values)
            continue
        if _is_ours(key, values):
            made = _joined(key, values, counts, offsets)
        else:
            made = collate_values(key, values, data_list, stores, True)
            if made is None:
                return None
            if isinstance(made[0], Tensor) and not made[0].is_cpu:
                return None  # PyG then has all of the batch there
        store[key], slice_dict[key], inc_dict[key] = made
    if add_batch:
        starts = offsets(counts)
        numbers = torch.arange(len(counts), device=_ON_CPU)
        store.batch = numbers.repeat_interleave(starts.diff(), output_size=sum(counts))
        store.ptr = starts
    return out, slice_dict, inc_dict


def _collating(original: Callable) -> Callable:
    """PyG's `collate`, as `Batch.from_data_list` calls it."""

    @functools.wraps(original)
    def collate(cls, data_list, increment=True, add_batch=True, follow_batch=None, exclude_keys=None):
        if not isinstance(data_list, (list, tuple)):
            data_list = list(data_list)
        reason = _obstacle(data_list, increment, follow_batch) if data_list else "no data"
        if reason is None:
            made = _together(cls, data_list, add_batch, exclude_keys)
            if made is not None:
                report.count(_KIND)
                return made
            reason = "attributes that differ, that are called a batch, on a GPU, or tell no number of nodes"
        report.fallback(_KIND, reason)
        return original(cls, data_list, increment, add_batch, follow_batch, exclude_keys)

    return collate


def enable() -> None:
    """Put our collation into PyG's batches; does nothing the second time."""
    if not _patches:
        _patches.put(_module, "collate", _collating)


def disable() -> None:
    """Undo `enable`."""
    _patches.undo()
