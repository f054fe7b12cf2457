"""Where PyG's samplers run: on the GPU, with their arrays moved there, or on the CPU, for a reason that is said."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import report
from gnnaccel.bound import View
from gnnaccel.ops import has_cuda_kernels
from gnnaccel.pyg_backend.touch import Data, HeteroData, HGTSampler, NeighborSampler
from gnnaccel.sampling.choice import CHOICE, is_cuda

WORKERS = "num_workers > 0"
_HOST = "_gnnaccel_host"  # of a sampler on the GPU: Kept
_THERE = "_gnnaccel_there"  # of one, too: weights and times, and their copies there; PyG reads its own on the host
_ARRAYS, _BY = (("colptr", "row"), ("colptr_dict", "row_dict")), ("edge_weight", "node_time", "edge_time")


class Kept(NamedTuple):
    """Of a sampler on the GPU: its arrays in host memory, whether results belong there, and which GPU."""

    arrays: dict[str, Any]
    is_asked: bool
    device: torch.device


def kept_of(self: NeighborSampler | HGTSampler, kind: str) -> Kept | None:
    """None for a sampler that is on the CPU, as one is from then on that a worker has."""
    kept = self.__dict__.get(_HOST)
    worker = None if kept is None else torch.utils.data.get_worker_info()
    if worker is None:
        return kept
    if worker.id == 0:
        say(kind, WORKERS)
    self._gnnaccel_left = to_host(self)  # not freed: a forked process must not touch CUDA
    return None


def at(device: torch.device, value: Any) -> Any:
    """A tensor, None, or a dictionary of these, on `device`."""
    if isinstance(value, dict):
        return {key: at(device, of_key) for key, of_key in value.items()}
    return value if value is None else value.to(device)


def place_of(data: Any) -> tuple[torch.device | None, bool]:
    """Where the edges of a Data or HeteroData are, None if not in one place, and for other graphs; and whether that is
    a GPU."""
    if not isinstance(data, (Data, HeteroData)):
        return None, False
    places = []
    for store in data.edge_stores:
        names = [name for name in ("adj", "adj_t", "edge_index") if name in store]
        for edges in (store[name] for name in names[:1]):
            is_tensor = isinstance(edges, Tensor)
            places.append((edges.device, edges.is_cuda) if is_tensor else (edges.device(), edges.is_cuda()))
    if len(set(places)) != 1:
        return None, any(there for _, there in places)
    return places[0]


def say(kind: str, reason: str) -> None:
    level = logging.WARNING if is_cuda() else logging.INFO  # where the user asked for the GPU
    report.note(kind, f"sampled on the CPU: {reason}", level)


class Place(NamedTuple):
    """A GPU to sample on; `is_asked`: of a graph elsewhere, where results belong, too."""

    device: torch.device
    is_asked: bool


def of(kind: str, data: Any, has_workers: bool) -> Place | None:
    """Where a sampler of this data is to sample; None for the CPU, and `say` why, if a GPU was to be expected."""
    device, there = place_of(data)
    if not there and not is_cuda():
        return None
    if not there and not torch.cuda.is_available():
        raise RuntimeError(f"{kind.removeprefix('pyg.')}: {CHOICE}=cuda, but torch finds no CUDA GPU here")
    reason = None
    if device is None:
        reason = "a graph store, or edges in several places"
    elif not has_cuda_kernels():
        reason = "this gnnaccel has no CUDA half"
    elif has_workers:
        reason = WORKERS
    if device is None or reason is not None:
        say(kind, reason or "")
        return None
    return Place(device if there else torch.device("cuda", torch.cuda.current_device()), not there)


def to_cuda(self: NeighborSampler | HGTSampler, kind: str, data: Any, has_workers: bool) -> None:
    """Move to the GPU what the sampler samples from, if that is where it shall be."""
    place = of(kind, data, has_workers)
    if place is None:
        return
    names = (*_ARRAYS[isinstance(data, HeteroData)], "perm")
    kept = {name: getattr(self, name) for name in names}
    for name in names[:2] if place.is_asked else names:  # else edges come back before they meet perm
        setattr(self, name, at(place.device, kept[name]))
    setattr(self, _HOST, Kept(kept, place.is_asked, place.device))
    if by_what(self) is self:
        torch.cuda.current_stream(place.device).synchronize()  # another stream will read them


def asked_for(original: Callable, kind: str, reason: str) -> Callable:
    """A method that samples on the CPU in any case, for a reason that is said where the user asked for the GPU."""

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if is_cuda():
            say(kind, reason)
        return original(self, *args, **kwargs)

    return method


def to_host(self: NeighborSampler | HGTSampler) -> Any:
    """Undo to_cuda; gives the arrays that were there."""
    kept, left = self.__dict__.pop(_HOST, None), [self.__dict__.pop(_THERE, None)]
    for name, array in () if kept is None else kept.arrays.items():
        left.append(getattr(self, name))
        setattr(self, name, array)
    return left


def _stamps(value: Any) -> list[tuple[Tensor, int]]:
    tensors = [] if value is None else list(value.values()) if isinstance(value, dict) else [value]
    return [(tensor, -1 if tensor.is_inference() else tensor._version) for tensor in tensors]


def _is_old(before: list[tuple[Tensor, int]], now: list[tuple[Tensor, int]]) -> bool:
    same = len(before) == len(now) and all(
        a is b and old == new for (a, old), (b, new) in zip(before, now, strict=True)
    )
    return not same


def by_what(self: NeighborSampler) -> Any:
    """The sampler, with its weights and times where it samples, as they are by now."""
    kept = self.__dict__.get(_HOST)
    if kept is None:
        return self
    there, is_new = self.__dict__.setdefault(_THERE, {}), False
    for name in _BY:
        now = _stamps(getattr(self, name, None))
        if name not in there or _is_old(there[name][0], now):
            there[name], is_new = (now, at(kept.device, getattr(self, name, None))), is_new or bool(now)
    if is_new:
        torch.cuda.current_stream(kept.device).synchronize()  # another stream will read them
    copies = {name: value for name, (stamps, value) in there.items() if stamps}
    return View(self, **copies) if copies else self
