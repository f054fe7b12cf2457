"""Batches of PyG's NodeLoader on the GPU, of data in host memory, where the GPU samples (GNNACCEL_SAMPLER=cuda).

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
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from gnnaccel import report
from gnnaccel.pyg_backend.views import View
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
    plain = plain and type(loader.data) is Data and loader.transform_sampler_output is None
    return plain and loader.num_workers == 0 and not loader.pin_memory


class _There:
    """A loader's Data, of which the GPU reads what it can, and on the GPU itself the numbers of the sampler's edges.

    What it cannot read, PyG gathers on the host.
    """

    def __init__(self, data: Data, perm: Tensor | None, device: torch.device):
        self.perm = None if perm is None else perm.to(device, torch.int32 if len(perm) < 2**31 else torch.int64)
        self._made_of = _contents(data)
        self._pinned: list[host_memory.Pinned] = []
        self._versions: list[tuple[Tensor, int]] = []
        self.data, store = copy.copy(data), data._store
        for key, value in dict(store.items()).items():
            if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
                continue
            if key == "edge_index":
                # Of which PyG takes the device and the shape, and, without anything else, the largest number.
                self.data[key] = value.new_full((2, 1), data.num_nodes - 1, device=device).expand(value.shape)
            elif (store.is_node_attr(key) or store.is_edge_attr(key)) and _is_read(value):
                self._read(key, value, device)
        self.is_on_host = all(_is_on_host(value) for value in store.values())
        torch.cuda.current_stream(device).synchronize()  # another stream will read what was made here

    def _read(self, key: str, value: Tensor, device: torch.device) -> None:
        try:
            with torch.cuda.device(device):
                pinned = host_memory.pin(value)
            self.data[key] = host_memory.selectable(value, device)
            self._pinned.append(pinned)
            self._versions.append((value, -1 if value.is_inference() else value._version))
        except (RuntimeError, ValueError) as error:  # a mapping of a file that is not to be written, say
            report.note(_KIND, f"{key!r} is gathered on the host: {error}", logging.WARNING)

    def is_of(self, data: Data) -> bool:
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


def _contents(data: Data) -> dict[str, tuple[Any, int]]:
    return {key: (value, value.data_ptr() if type(value) is Tensor else 0) for key, value in data._store.items()}


def _is_on_host(value: Any) -> bool:
    return value.device.type == "cpu" if isinstance(value, Tensor) else not hasattr(value, "device")


def _is_read(value: Tensor) -> bool:
    return value.is_contiguous() and value.element_size() <= 8 and not value.requires_grad


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
        node = getattr(out, "node", None)
        if not isinstance(node, Tensor) or not node.is_cuda or not suit(self) or _is_on_gpu(self.data):
            return original(self, out)
        there = _there(self, node.device)
        sampler = View(self.node_sampler, edge_permutation=None)
        # Reading over the bus takes as long as a step may take: it goes on beside that of the batch before, where
        # nothing is read that somebody may be writing on the GPU.
        aside = there.is_on_host and there.is_unwritten() and ahead.is_beside(node, out.row, out.col, out.edge)
        with ahead.beside(node.device, is_step=False) if aside else contextlib.nullcontext([]) as made:
            if there.perm is not None and out.edge is not None:
                out.edge = there.perm[out.edge].long()
            batch = original(View(self, data=there.data, node_sampler=sampler, transform=None), out).to(node.device)
            made += [value for value in batch._store.values() if isinstance(value, Tensor) and value.is_cuda]
        if self.transform is None:
            return batch
        batch = self.transform(batch)
        return batch.to(node.device) if isinstance(batch, Data) else batch

    return filter_fn


def passing(original: Callable) -> Callable:
    """PrefetchLoader.non_blocking_transfer, which pins batches first: not those that are on the GPU."""

    def non_blocking_transfer(self, batch):
        there = isinstance(batch, Data) and any(isinstance(v, Tensor) and v.is_cuda for v in batch._store.values())
        return batch.to(self.device_helper.device) if there else original(self, batch)

    return non_blocking_transfer


def _is_on_gpu(data: Data) -> bool:
    edges = next((data[name] for name in ("edge_index", "adj_t", "adj") if name in data), None)
    return isinstance(edges, Tensor) and edges.is_cuda
