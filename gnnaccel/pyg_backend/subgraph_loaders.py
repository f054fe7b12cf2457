"""PyG's loaders that sample from a SparseTensor of their own, ShaDowKHopSampler and GraphSAINT*, with a GPU to do it.

ShaDowKHopSampler of a graph that is on a GPU has its batches there. Where GNNACCEL_SAMPLER=cuda asks for the GPU, it
samples from a copy of the structure, and hands batches back to the host, as these loaders gather features there. The
nodes of GraphSAINT's batches are drawn on the host, so that a batch is the CPU's; the edges between them are the GPU's
to find.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import sampling
from gnnaccel.bound import View
from gnnaccel.pyg_backend import sampler_places
from gnnaccel.pyg_backend.sampler_places import Place

_KEPT = "_gnnaccel_rows"  # False: the CPU samples
_SHADOW, _SAINT = "pyg.ShaDowKHopSampler", "pyg.GraphSAINTSampler"
_CPU = torch.device("cpu")


class Rows:
    """What these loaders ask of their SparseTensor, with its rows on a GPU. Its values are where `results` belong."""

    def __init__(self, matrix: Any, place: Place):
        self._matrix, (rowptr, col, value) = matrix, matrix.csr()
        self.there = rowptr.to(place.device), col.to(place.device)
        self.results = _CPU if place.is_asked else place.device
        self._value = None if value is None else value.to(self.results)

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return *self.there, self._value

    def saint_subgraph(self, node_idx: Tensor) -> tuple[Any, Tensor]:
        """As of SparseTensor."""
        rowptr, col = self.there
        found = sampling.induced_subgraph(rowptr, col, node_idx.to(rowptr.device))
        row, col, edge = (part.to(self.results) for part in (found.col, found.row, found.edge))
        value, sizes = None if self._value is None else self._value[edge], (node_idx.numel(), node_idx.numel())
        return type(self._matrix)(row=row, col=col, value=value, sparse_sizes=sizes), edge

    def __reduce__(self):
        return _nothing, ()


def _nothing() -> None:
    """Of a loader that is copied or pickled: its own are made when they are needed."""


def _rows(loader: Any, kind: str, name: str) -> Rows | None:
    """The rows of the loader's matrix, called so, on a GPU; None where the CPU samples."""
    kept = loader.__dict__.get(_KEPT)
    if (worker := torch.utils.data.get_worker_info()) is not None:  # of whatever loader: it cannot use this GPU
        if kept and worker.id == 0:
            sampler_places.say(kind, sampler_places.WORKERS)
        return None
    if kept is None:
        place = sampler_places.of(kind, loader.data, loader.num_workers > 0)
        kept = loader.__dict__[_KEPT] = False if place is None else Rows(getattr(loader, name), place)
    return kept or None


def shadow_init(original: Callable) -> Callable:
    """ShaDowKHopSampler.__init__(), which moves to a GPU what that samples from."""

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        _rows(self, _SHADOW, "adj_t")

    return __init__


def shadow_collate(original: Callable, handing: Callable) -> Callable:
    """ShaDowKHopSampler.__collate__(), `original` of the rows that the loader has on a GPU; `handing` where what the
    GPU finds belongs to the host."""

    @functools.wraps(original)
    def __collate__(self, n_id):
        rows = _rows(self, _SHADOW, "adj_t")
        if rows is None:
            return original(self, n_id)
        return (handing if rows.results == _CPU else original)(View(self, adj_t=rows), n_id)

    return __collate__


def saint_init(original: Callable) -> Callable:
    """GraphSAINTSampler.__init__(), which moves to a GPU what that finds edges in."""

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        _rows(self, _SAINT, "adj")

    return __init__


def saint_item(original: Callable) -> Callable:
    """GraphSAINTSampler.__getitem__(), which has a GPU find the edges."""

    @functools.wraps(original)
    def __getitem__(self, idx):
        rows = _rows(self, _SAINT, "adj")
        return original(self if rows is None else View(self, adj=rows), idx)

    return __getitem__
