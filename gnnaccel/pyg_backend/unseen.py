"""Writes that torch does not count (through ``.data``) into the edges of a sampled batch on a GPU, before a layer reads
them. Layers do not look at edges of which the sampler has said how they come, as they would have to wait for the GPU.
It compares them with a copy instead, and what it has found is read when the next batch is made: a batch too late.
"""

from __future__ import annotations

import collections

import torch
from torch import Tensor

from gnnaccel.graph.cache import derived

_AS_MADE = "as made"
_found: collections.deque[tuple[Tensor, torch.cuda.Event | None]] = collections.deque()  # in the order of launch


class _AsMade:
    """A copy of edges, until it has been compared with them, and the stream that it was made on."""

    __slots__ = ("edges", "stream")

    def __init__(self, edges: Tensor):
        self.edges: Tensor | None = edges
        self.stream = torch.cuda.current_stream(edges.device) if edges.is_cuda else None


def remember(edge_index: Tensor) -> None:
    """Keep what the edges of a batch are."""
    derived.put((edge_index,), _AS_MADE, _AsMade(edge_index.detach().clone()))


def compare(edge_index: Tensor) -> None:
    """Have the GPU see whether they, or those that they are the first of, are that still; once."""
    found = derived.get((edge_index,), _AS_MADE)
    if found is None and edge_index._base is not None:
        found, edge_index = derived.get((edge_index._base,), _AS_MADE), edge_index._base
    if found is None or found.edges is None or (edge_index.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    made, found.edges = found.edges, None
    differ = torch.ne(edge_index.detach(), made).any()
    if not edge_index.is_cuda:
        _found.append((differ, None))
        return
    stream = torch.cuda.current_stream(edge_index.device)
    if stream != found.stream:
        made.record_stream(stream)
    there = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    there.copy_(differ, non_blocking=True)
    _found.append((there, stream.record_event()))


def tell() -> None:
    """Raise RuntimeError if such a write was found; of comparisons that are not done, nothing is told yet."""
    while _found and (_found[0][1] is None or _found[0][1].query()):  # type: ignore[union-attr]
        if bool(_found.popleft()[0]):
            _found.clear()
            raise RuntimeError(
                "gnnaccel: the edge_index of an earlier batch was written into through .data, which torch does not "
                "count, before a layer read it: results of that batch may be wrong. Write into edge_index itself, or "
                "give the layers a new one (batch.edge_index = ...)"
            )
