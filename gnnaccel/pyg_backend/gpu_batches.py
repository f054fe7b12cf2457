"""Batches of PyG's NodeLoader on the GPU, of data in host memory, where the GPU samples (GNNACCEL_SAMPLER=cuda): of one
type of nodes and edges, or of many.

The loader's tensors are pinned as they lie, and PyG's own collation is given them as tensors of the GPU, which reads
the rows of a batch over the bus. The batch is what `batch.to("cuda")` makes of the one that PyG collates on the host.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import report
from gnnaccel.bound import View
from gnnaccel.lower import bounds
from gnnaccel.pyg_backend.sampler_places import place_of
from gnnaccel.pyg_backend.touch import BaseStorage, Data, HeteroData, NodeLoader
from gnnaccel.sampling import ahead, host_memory

_KIND, _KEPT = "pyg.NodeLoader", "_gnnaccel_there"
# Of the loader that is asking: its batches are to be on the GPU. Samplers may serve other loaders too.
_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("gnnaccel_gpu_batches", default=False)


def are_wanted() -> bool:
    """True where the sampler's results stay on the GPU, whatever the data is on."""
    return _wanted.get()


def suit(loader: NodeLoader) -> bool:
    """True for a loader that makes its batches in the process that uses the GPU, and does no more to them than PyG."""
    kind = type(loader)
    plain = kind.filter_fn is NodeLoader.filter_fn and kind.collate_fn is NodeLoader.collate_fn
    plain = plain and type(loader.data) in (Data, HeteroData) and loader.transform_sampler_output is None
    return plain and loader.num_workers == 0 and not loader.pin_memory


class _There:
    """A loader's data, of which the GPU reads what it can, and on the GPU itself the numbers of the sampler's edges.

    What it cannot read, PyG gathers on the host.
    """

    def __init__(self, data: Data | HeteroData, perm: Tensor | dict | None, device: torch.device):
        self._perm = _mapped(_numbers, perm, device)
        self._made_of = _contents(data)
        self._pinned: list[host_memory.Pinned] = []
        self._versions: list[tuple[Tensor, int]] = []
        self.data = copy.copy(data)
        for store, there in zip(data.stores, self.data.stores, strict=True):
            self._read_all(store, there, device)
        self.is_on_host = all(_is_on_host(value) for store in data.stores for value in store.values())
        torch.cuda.current_stream(device).synchronize()  # another stream will read what was made here

    def _read_all(self, store: BaseStorage, there: BaseStorage, device: torch.device) -> None:
        """Of one type of nodes or edges, or all there is, or what belongs to no type."""
        is_attributes = [getattr(store, name) for name in ("is_node_attr", "is_edge_attr") if hasattr(store, name)]
        for key, value in dict(store.items()).items():
            if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
                continue
            if key == "edge_index" and is_attributes:
                # Of which PyG takes the device and the shape, and, without anything else, the largest number.
                most = max((store.num_nodes or 0) - 1, 0) if isinstance(self.data, Data) else 0
                there[key] = value.new_full((2, 1), most, device=device).expand(value.shape)
            elif any(is_attribute(key) for is_attribute in is_attributes) and _is_read(value):
                self._read(there, key, value, device)

    def _read(self, there: BaseStorage, key: str, value: Tensor, device: torch.device) -> None:
        try:
            with torch.cuda.device(device):
                pinned = host_memory.pin(value)
            there[key] = host_memory.selectable(value, device)
            self._pinned.append(pinned)
            self._versions.append((value, -1 if value.is_inference() else value._version))
        except (RuntimeError, ValueError) as error:  # a mapping of a file that is not to be written, say
            of_type = f" of {there._key!r}" if there._key is not None else ""
            report.note(_KIND, f"{key!r}{of_type} is gathered on the host: {error}", logging.WARNING)

    def numbers(self, edge: Any) -> Any:
        """Those of the data's edges that the sampler has these numbers of."""
        if not isinstance(edge, dict):
            return edge if edge is None or self._perm is None else self._perm[edge].long()
        perms = self._perm or {}
        return {kind: e if e is None or perms.get(kind) is None else perms[kind][e].long() for kind, e in edge.items()}

    def is_of(self, data: Data | HeteroData) -> bool:
        """True if `data` still holds what it was made of."""
        now = _contents(data)
        return now.keys() == self._made_of.keys() and all(
            value is now[key][0] and address == now[key][1] for key, (value, address) in self._made_of.items()
        )

    def is_unwritten(self) -> bool:
        """True if nobody has written into what the GPU reads since, who might be doing so now."""
        return all(not value.is_inference() and value._version == version for value, version in self._versions)

    def __reduce__(self):
        return _nothing, ()


def _mapped(function: Callable, value: Any, *args: Any) -> Any:
    """Of a value, or of each in a dictionary."""
    if isinstance(value, dict):
        return {key: _mapped(function, of_key, *args) for key, of_key in value.items()}
    return function(value, *args)


def _numbers(perm: Tensor | None, device: torch.device) -> Tensor | None:
    return None if perm is None else perm.to(device, torch.int32 if len(perm) <= bounds.INT32_MAX else torch.int64)


def _contents(data: Data | HeteroData) -> dict[tuple, tuple[Any, int]]:
    return {
        (store._key, key): (value, value.data_ptr() if type(value) is Tensor else 0)
        for store in data.stores
        for key, value in store.items()
    }


def _tensors(*values: Any) -> list[Tensor]:
    """All of these, and of dictionaries of them."""
    found = (of for value in values for of in (value.values() if isinstance(value, dict) else [value]))
    return [value for value in found if isinstance(value, Tensor)]


def _of_batch(batch: Any) -> list[Tensor]:
    return [value for store in batch.stores for value in _tensors(*store.values())]


def _is_on_host(value: Any) -> bool:
    return value.device.type == "cpu" if isinstance(value, Tensor) else not hasattr(value, "device")


def _is_read(value: Tensor) -> bool:
    return value.is_contiguous() and value.element_size() <= bounds.ELEMENT_BYTES and not value.requires_grad


def _nothing() -> None:
    """Of a loader that is copied or pickled: its own is made when it is needed."""


def _there(loader: NodeLoader, device: torch.device) -> _There:
    kept = loader.__dict__.get(_KEPT)
    if kept is None or not kept.is_of(loader.data):
        loader.__dict__[_KEPT] = None  # which unpins what it had
        kept = loader.__dict__[_KEPT] = _There(loader.data, loader.node_sampler.edge_permutation, device)
    return kept


def wanting(original: Callable) -> Callable:
    """NodeLoader.collate_fn, which says to its sampler where the batch is to be."""

    def collate_fn(self, index):
        token = _wanted.set(suit(self))
        try:
            return original(self, index)
        finally:
            _wanted.reset(token)

    return collate_fn


def filtering(original: Callable) -> Callable:
    """NodeLoader.filter_fn, which collates a batch that was sampled on the GPU there."""

    def filter_fn(self, out):
        nodes = _tensors(getattr(out, "node", None))
        if not nodes or not nodes[0].is_cuda or not suit(self) or place_of(self.data)[1]:
            return original(self, out)
        device = nodes[0].device
        there = _there(self, device)
        sampler = View(self.node_sampler, edge_permutation=None)
        # Reading over the bus takes as long as a step may take: it goes on beside that of the batch before, where
        # nothing is read that somebody may be writing on the GPU.
        aside = there.is_on_host and there.is_unwritten()
        aside = aside and ahead.is_beside(*nodes, *_tensors(out.row, out.col, out.edge))
        with ahead.beside(device, is_step=False) if aside else contextlib.nullcontext([]) as made:
            out.edge = there.numbers(out.edge)
            batch = original(View(self, data=there.data, node_sampler=sampler, transform=None), out).to(device)
            made += [value for value in _of_batch(batch) if value.is_cuda]
        if self.transform is None:
            return batch
        batch = self.transform(batch)
        return batch.to(device) if isinstance(batch, (Data, HeteroData)) else batch

    return filter_fn


def passing(original: Callable) -> Callable:
    """PrefetchLoader.non_blocking_transfer, which pins batches first: not those that are on the GPU."""

    def non_blocking_transfer(self, batch):
        there = isinstance(batch, (Data, HeteroData)) and any(value.is_cuda for value in _of_batch(batch))
        return batch.to(self.device_helper.device) if there else original(self, batch)

    return non_blocking_transfer
