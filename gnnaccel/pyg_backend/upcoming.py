"""Which batch a loader of PyG's will be asked for next: the GPU samples it beside the training step on the one before.

Only for loaders whose order of seeds is settled when an epoch begins, as that of torch's own samplers is. A batch that
turns out to be another than was foreseen (the script has drawn random numbers of the CPU in between) is sampled anew,
and after a few of those nothing is foreseen any more.
"""

from __future__ import annotations

import array
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gnnaccel import touch
from gnnaccel.lower import bounds
from gnnaccel.pyg_backend.touch import NeighborSampler, NodeLoader
from gnnaccel.sampling import ahead, begun

_SETTLED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# The one that this thread has taken places from, until their batch is there: a loader may have several iterators.
_current: contextvars.ContextVar[weakref.ref[Epoch] | None] = contextvars.ContextVar("gnnaccel_epoch", default=None)


class _Places:
    """range(n) of which torch's loader takes many elements at once, which are the places of these."""

    def __getitems__(self, places: list[int]) -> list[int]:
        return places


class Epoch:
    """What torch's loader takes the places of its batches from, of which the next can be seen before it is taken."""

    def __init__(self, loader: NodeLoader, places: Iterator[list[int]]):
        self.loader, self._places, self._seen = loader, places, list[list[int]]()
        self._known: tuple[list[int], Tensor] | None = None
        self._begun: begun.Begun | None = None
        self._plan: begun.Plan | None = None
        self._room: Tensor | None = None  # for seeds, where no GPU reads it
        self._missed = 0

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> list[int]:
        places = self._seen.pop() if self._seen else next(self._places)
        _current.set(weakref.ref(self))  # a loader that was made before the plug-in was on does not take it back
        return places

    def as_tensor(self, places: list[int]) -> Tensor | list[int]:
        """The places as the tensor that PyG would make of them, where that is there."""
        known, self._known = self._known, None
        return known[1] if known is not None and (known[0] is places or known[0] == places) else places

    def take(self, *sampled) -> begun.NeighborSample | None:
        """`Begun.result` of what was begun, if that is wanted."""
        now, self._begun = self._begun, None
        if now is None:
            return None
        out = now.result(*sampled)
        if out is None:
            self._room, self._missed = None, self._missed + 1  # which a GPU may still be reading
        else:
            self._missed = 0
        return out

    def begin(self) -> None:
        """Have the batch after this one sampled."""
        sampler, given = self.loader.node_sampler, self.loader.input_data
        if self._begun is not None:  # which nobody has asked for
            self._begun = self._room = None
        if (
            self._missed >= bounds.DROPPED_IN_VAIN
            or not _is_uniform(sampler)
            or given.time is not None
            or not ahead.is_on()
        ):
            return
        if not self._seen:
            places = next(self._places, None)
            if places is None:
                return
            self._seen.append(places)
        try:
            seeds = self._seeds(given.node, self._seen[0])
        except (IndexError, RuntimeError, TypeError):  # as whoever asks for the batch is told
            self._known = self._room = None
            return
        fanouts = sampler.num_neighbors.get_mapped_values()
        self._begun = begun.begin(sampler.colptr, sampler.row, seeds, fanouts, sampler.replace, self._plan)
        if self._begun is None:
            self._room = None
        else:
            self._plan = self._begun.plan

    def _seeds(self, node: Tensor, places: list[int]) -> Tensor:
        """The nodes of these places, pinned. Raises for places that there are not, and without more memory to pin."""
        # In a fifth of the time of torch.tensor().
        there = torch.frombuffer(array.array("q", places), dtype=torch.int64)
        self._known = places, there
        if self._room is None or self._room.shape != there.shape or self._room.dtype != node.dtype:
            self._room = ahead.room(len(places), node.dtype)
        return torch.index_select(node, 0, there, out=self._room)


def _is_uniform(sampler) -> bool:
    """True for a sampler on the GPU of one type of edges, without weights or times."""
    if type(sampler) is not NeighborSampler or not isinstance(getattr(sampler, "colptr", None), Tensor):
        return False
    plain = sampler.subgraph_type.value != "induced" and sampler.edge_weight is None and not sampler.disjoint
    return plain and sampler.colptr.is_cuda


def _is_settled(loader: NodeLoader) -> bool:
    """True if which seeds come next does not depend on what happens meanwhile."""
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) not in _SETTLED:
        return False
    return type(loader.dataset) is range and getattr(loader.sampler, "generator", None) is None


def take(*sampled) -> begun.NeighborSample | None:
    """The sample of these arguments (`begun.Begun.result`), if it was begun for the loader that asks."""
    epoch = _asking()
    return None if epoch is None else epoch.take(*sampled)


def _asking() -> Epoch | None:
    found = _current.get()
    return None if found is None else found()


def watching(original: Callable) -> Callable:
    """NodeLoader._get_iterator, whose iterator's next places can be seen."""

    @functools.wraps(original)
    def _get_iterator(self):
        iterator = original(self)
        inner = getattr(iterator, "iterator", iterator)
        batches = touch.batches_of(inner) if type(inner) is touch.SingleProcessIter and _is_settled(self) else None
        if batches is not None:
            touch.set_batches(inner, Epoch(self, batches))
            if getattr(self.sampler, "data_source", None) is self.dataset:  # no place beyond its end
                touch.set_dataset(inner, _Places())
        return iterator

    return _get_iterator


def beginning(original: Callable) -> Callable:
    """NodeLoader.collate_fn, which has the next batch sampled when one is."""

    @functools.wraps(original)
    def collate_fn(self, index):
        epoch = _asking()
        if epoch is None or epoch.loader is not self:  # asked by somebody else than its iterator
            return original(self, index)
        try:
            out = original(self, epoch.as_tensor(index))
        finally:
            _current.set(None)
        epoch.begin()
        return out

    return collate_fn
