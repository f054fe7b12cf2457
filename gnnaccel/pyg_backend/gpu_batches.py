"""Batches of PyG's NodeLoader on the GPU, of data in host memory, where the GPU samples (GNNACCEL_SAMPLER=cuda).

The loader's tensors are pinned as they lie, and PyG's own collation is given them as tensors of the GPU, which reads
the rows of a batch over the bus. The batch is what `batch.to("cuda")` makes of the one that PyG collates on the host.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from gnnaccel.pyg_backend.views import View
from gnnaccel.sampling import host_memory

_KEPT = "_gnnaccel_there"
# Of the loader that is asking: its batches are to be on the GPU. Samplers may serve other loaders too.
_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("gnnaccel_gpu_batches", default=False)


def are_wanted() -> bool:
    """True where the sampler's results stay on the GPU, whatever the data is on."""
    return _wanted.get()


def suit(loader: NodeLoader) -> bool:
    """True for a loader that makes its batches in the process that uses the GPU, and does no more to them than PyG."""
    plain = type(loader.data) is Data and loader.transform_sampler_output is None
    return plain and loader.num_workers == 0 and not loader.pin_memory


class _There:
    """A loader's Data, of which the GPU reads what it needs, and on the GPU the numbers of the sampler's edges."""

    def __init__(self, data: Data, perm: Tensor | None, device: torch.device):
        self.perm = None if perm is None else perm.to(device, torch.int32 if len(perm) < 2**31 else torch.int64)
        self._made_of = dict(data._store.items())
        self._pinned: list[host_memory.Pinned] = []
        self.data, store = copy.copy(data), data._store
        for key, value in self._made_of.items():
            if type(value) is not Tensor or value.device.type != "cpu" or value.layout != torch.strided:
                continue
            by_rows = store.is_node_attr(key) or store.is_edge_attr(key) or key == "edge_index"
            reads = by_rows and value.is_contiguous() and value.element_size() <= 8
            self.data[key] = self._read(value, device) if reads else value.to(device)

    def _read(self, value: Tensor, device: torch.device) -> Tensor:
        if value.numel() and not value.is_pinned():
            self._pinned.append(host_memory.Pinned(value))
        return host_memory.on_the_bus(value, device)

    def is_of(self, data: Data) -> bool:
        """True if `data` still holds the tensors that it was made of."""
        now = data._store
        return len(now) == len(self._made_of) and all(now.get(key) is value for key, value in self._made_of.items())

    def __reduce__(self):
        return _nothing, ()


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
        if there.perm is not None and out.edge is not None:
            out.edge = there.perm[out.edge].long()
        sampler = View(self.node_sampler, edge_permutation=None)
        batch = original(View(self, data=there.data, node_sampler=sampler), out)
        return batch.to(node.device) if isinstance(batch, Data) else batch

    return filter_fn


def _is_on_gpu(data: Data) -> bool:
    edges = next((data[name] for name in ("edge_index", "adj_t", "adj") if name in data), None)
    return isinstance(edges, Tensor) and edges.is_cuda
