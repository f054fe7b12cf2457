"""Where PyG's NeighborSampler runs: on the GPU, with its arrays moved there, or on the CPU, for a reason it says."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NeighborSampler

from gnnaccel import report
from gnnaccel.ops import has_cuda_kernels
from gnnaccel.pyg_backend.views import View
from gnnaccel.sampling.choice import CHOICE, is_cuda

KIND, WORKERS = "pyg.NeighborSampler", "num_workers > 0"
_HOST = "_gnnaccel_host"  # of a sampler on the GPU: Kept
_THERE = "_gnnaccel_there"  # of one, too: weights and times, and their copies there; PyG reads its own on the host
_ARRAYS, _BY = (("colptr", "row"), ("colptr_dict", "row_dict")), ("edge_weight", "node_time", "edge_time")


class Kept(NamedTuple):
    """Of a sampler on the GPU: its arrays in host memory, whether results belong there, and which GPU."""

    arrays: dict[str, Any]
    is_asked: bool
    device: torch.device


def kept_of(self: NeighborSampler) -> Kept | None:
    """None for a sampler that is on the CPU."""
    return self.__dict__.get(_HOST)


def at(device: torch.device, value: Any) -> Any:
    """A tensor, None, or a dictionary of these, on `device`."""
    if isinstance(value, dict):
        return {key: at(device, of_key) for key, of_key in value.items()}
    return value if value is None else value.to(device)


def _place_of(data: Any) -> tuple[torch.device | None, bool]:
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


def _not_on_cuda(self: NeighborSampler, device: torch.device | None, share_memory: bool) -> str | None:
    """Why the GPU cannot sample, or None."""
    if device is None:
        return "a graph store, or edges in several places"
    if not has_cuda_kernels():
        return "this gnnaccel has no CUDA half"
    if share_memory:
        return WORKERS
    if self.subgraph_type.value == "induced":
        return "an induced subgraph"
    return None


def say(reason: str) -> None:
    level = logging.WARNING if is_cuda() else logging.INFO  # where the user asked for the GPU
    report.note(KIND, f"sampled on the CPU: {reason}", level)


def to_cuda(self: NeighborSampler, data: Any, share_memory: bool) -> None:
    """Move to the GPU what the sampler samples from, if that is where it shall be; or say why not."""
    device, there = _place_of(data)
    if not there and not is_cuda():
        return
    if not there and not torch.cuda.is_available():
        raise RuntimeError(f"NeighborSampler: {CHOICE}=cuda, but torch finds no CUDA GPU here")
    reason = _not_on_cuda(self, device, share_memory)
    if reason is not None:
        return say(reason)
    names = (*_ARRAYS[isinstance(data, HeteroData)], "perm")
    kept = {name: getattr(self, name) for name in names}
    target = device if there and device is not None else torch.device("cuda", torch.cuda.current_device())
    for name in names[:2] if not there else names:  # else edges come back before they meet perm
        setattr(self, name, at(target, kept[name]))
    setattr(self, _HOST, Kept(kept, not there, target))
    if by_what(self) is self:
        torch.cuda.current_stream(target).synchronize()  # another stream will read them


def to_host(self: NeighborSampler) -> Any:
    """Undo _to_cuda; gives the arrays that were there."""
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
    kept = kept_of(self)
    if kept is None:
        return self
    there, is_new = self.__dict__.setdefault(_THERE, {}), False
    for name in _BY:
        now = _stamps(getattr(self, name))
        if name not in there or _is_old(there[name][0], now):
            there[name], is_new = (now, at(kept.device, getattr(self, name))), is_new or bool(now)
    if is_new:
        torch.cuda.current_stream(kept.device).synchronize()  # another stream will read them
    copies = {name: value for name, (stamps, value) in there.items() if stamps}
    return View(self, **copies) if copies else self
