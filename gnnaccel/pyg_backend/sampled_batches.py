"""Batches whose edges are as our sampler has made them: layers find them sorted and checked, and know their hops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel.bound import View
from gnnaccel.graph.hops import Hops
from gnnaccel.pyg_backend.graph import note_hops
from gnnaccel.pyg_backend.touch import (
    Data,
    GlobalStorage,
    NeighborSampler,
    SamplerOutput,
    attributes_of,
    store_of,
    with_attributes,
)
from gnnaccel.sampling.host_memory import Selectable

_MARK, _PINNED = "_gnnaccel_hops", "_gnnaccel_pinned"


def mark(sampler: NeighborSampler, out: Any) -> None:
    """Say of what our sampling has given to `sampler` that it is of these hops, as long as nobody makes it anew."""
    forward = getattr(sampler, "sample_direction", "forward") == "forward"
    if not forward or sampler.subgraph_type.value != "directional" or not isinstance(out, SamplerOutput):
        return
    nodes, edges = out.num_sampled_nodes, out.num_sampled_edges
    if nodes is not None and edges is not None and not out.row.is_inference():  # of which no write can be told
        setattr(out, _MARK, (Hops.of_counts(nodes, edges), *_stamps(out)))


def _stamps(out: SamplerOutput) -> tuple:
    return out.row, out.col, out.row._version, out.col._version


def _hops(out: Any) -> Hops | None:
    sampled, *stamps = getattr(out, _MARK, None) or (None,)
    if sampled is None or any(a is not b for a, b in zip(stamps, _stamps(out), strict=True)):
        return None
    return sampled


def noting(original: Callable, collates: bool = False) -> Callable:
    """filter_fn() of NodeLoader, which `collates` as `collated`, and LinkLoader, which remembers of the batch's
    edge_index what its sampler knew."""

    @functools.wraps(original)
    def filter_fn(self, out):
        sampled = _hops(out)
        if sampled is None or self.transform_sampler_output is not None:
            return original(self, out)
        batch = collated(self.data, out, self.node_sampler.edge_permutation) if collates else None
        if batch is None:
            batch = original(View(self, transform=None), out)
        edge_index = batch.edge_index if isinstance(batch, Data) and "edge_index" in batch else None
        if type(edge_index) is Tensor:
            note_hops(edge_index, sampled)
            _pin(batch, edge_index)
        return batch if self.transform is None else self.transform(batch)

    return filter_fn


_CONSTANTS = (int, float, bool, str)


def collated(data: Any, out: SamplerOutput, perm: Tensor | None) -> Data | None:
    """The batch that NodeLoader.filter_fn() of PyG 2.8 makes of a sample, without its frames; None where it must do so.

    Parameters
    ----------
    data : Data
        Of plain tensors on the sample's device, and constants.
    out : SamplerOutput
    perm : Tensor or None
        Numbers of the sampler's edges among those of the data.
    """
    node, edge, row = out.node, out.edge, out.row
    if type(data) is not Data or type(store_of(data)) is not GlobalStorage or type(out) is not SamplerOutput:
        return None
    if (
        out.batch is not None
        or getattr(out, "orig_row", None) is not None
        or torch.utils.data.get_worker_info() is not None
    ):
        return None
    store, device = store_of(data), node.device
    given: dict[str, Any] = attributes_of(store)
    if (perm is not None and perm.device != device) or given.keys() & {"num_nodes", "adj", "adj_t"}:
        return None
    nodes, edges = node.long(), None
    if edge is not None:
        edges = edge.long() if perm is None else perm[edge.long()]
    made: dict[str, Any] = {}
    for key, value in given.items():
        if type(value) is not Tensor and type(value) is not Selectable:
            if type(value) not in _CONSTANTS:
                return None
            made[key] = value
        elif key == "edge_index":
            if value.device != device:
                return None
            made[key] = torch.stack([row, out.col])
        elif (of_nodes := store.is_node_attr(key)) or store.is_edge_attr(key):
            if value.device != device:
                return None
            places, dim = nodes if of_nodes else edges, data.__cat_dim__(key, value, store)
            if places is not None:
                made[key] = torch.index_select(value, dim, places)
        else:
            made[key] = value
    made.setdefault("n_id", node)
    if edges is not None:
        made.setdefault("e_id", edges)
    seeds, time = out.metadata
    more = dict(batch=None, num_sampled_nodes=out.num_sampled_nodes, num_sampled_edges=out.num_sampled_edges)
    for key, value in (*more.items(), ("input_id", seeds), ("seed_time", time), ("batch_size", seeds.shape[0])):
        if value is not None:
            made[key] = value
        else:
            made.pop(key, None)
    return with_attributes(data, made)


def _pin(batch: Data, edge_index: Tensor) -> None:
    """Pin what of a batch on the GPU PyG leaves in host memory, the seeds' numbers, for `moving`."""
    numbers = batch.get("input_id")
    if edge_index.device.type == "cuda" and type(numbers) is Tensor and numbers.is_cpu and numbers.numel():
        batch.input_id = batch.__dict__[_PINNED] = numbers.pin_memory()


def moving(original: Callable) -> Callable:
    """Data.to(), for which the host need not wait where a batch is on the GPU already: a copy from memory that is not
    pinned would have it wait for all that was launched before."""

    @functools.wraps(original)
    def to(self, device, *args, non_blocking=False):
        pinned = self.__dict__.get(_PINNED)
        ours = pinned is not None and not args and self.get("input_id") is pinned
        if ours and torch.device(device).type == "cuda":
            self.input_id = pinned.to(device, non_blocking=True)
            del self.__dict__[_PINNED]
            if _is_all_on(self, self.input_id.device):
                return self
        return original(self, device, *args, non_blocking=non_blocking)

    return to


def _is_all_on(batch: Any, device: torch.device) -> bool:
    """True for a Data of which Data.to() has nothing to move to a device."""
    if type(batch) is not Data:
        return False
    for key, value in attributes_of(store_of(batch)).items():
        if type(value) is Tensor:
            if value.device != device:
                return False
        elif type(value) not in _CONSTANTS and key not in ("num_sampled_nodes", "num_sampled_edges"):
            return False
    return True


def both_ways(row, col, rev_row, rev_col, edge_id=None, rev_edge_id=None):
    """PyG's to_bidirectional: edges and reversed edges, sorted by destination, each pair of nodes once. Of several
    edges that became one PyG keeps the number of any; here it is that of the last, on the CPU and on the GPU."""
    sources, destinations = torch.cat([row, rev_col]), torch.cat([col, rev_row])
    pairs, order = torch.sort(destinations.long() << 31 | sources.long(), stable=True)  # a batch has fewer nodes
    is_last = torch.ones_like(pairs, dtype=torch.bool)
    torch.ne(pairs[1:], pairs[:-1], out=is_last[:-1])
    kept = order[is_last]
    edge_id = None if edge_id is None else torch.cat([edge_id, rev_edge_id])[kept]
    return sources[kept], destinations[kept], edge_id
