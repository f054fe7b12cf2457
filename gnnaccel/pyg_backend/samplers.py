"""PyG's samplers on `gnnaccel.sampling`: whether pyg-lib or torch-sparse are installed or not.

What a sampler of PyG's does around the sampling itself (directions, subgraph types, keys of edge types, negative
edges) is PyG's own code, which finds our functions where it calls one of those packages. ``GNNACCEL_SAMPLER=framework``
leaves the samplers to PyG.

The GPU samples from a graph that is there, or for all that GNNACCEL_SAMPLER=cuda asks it to, in the process that made
the sampler. Workers cannot use the GPU that it uses, and sample on the CPU. Batches of NodeLoader that the GPU was
asked for stay there (gpu_batches.py).
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch_geometric
from torch import Tensor
from torch_geometric.loader import NeighborSampler as FirstNeighborSampler
from torch_geometric.typing import WITH_TORCH_SPARSE

from gnnaccel import report, sampling
from gnnaccel.bound import View, rebind
from gnnaccel.ops import gradient_rows
from gnnaccel.pyg_backend import (
    adjacency,
    clusters,
    compressed,
    dist_sampling,
    gpu_batches,
    sampled_batches,
    touch,
    upcoming,
    walks,
)
from gnnaccel.pyg_backend.sampler_places import Kept, asked_for, at, by_what, kept_of, say, to_cuda, to_host
from gnnaccel.pyg_backend.subgraph_loaders import saint_init, saint_item, shadow_collate, shadow_init
from gnnaccel.pyg_backend.touch import (
    BaseData,
    BidirectionalNeighborSampler,
    ClusterData,
    GraphSAINTSampler,
    HeteroSamplerOutput,
    HGTSampler,
    Index,
    LinkLoader,
    NeighborSampler,
    NodeLoader,
    PrefetchLoader,
    RootedRWSubgraph,
    SamplerOutput,
    ShaDowKHopSampler,
)
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.sampling import _arrays, ahead
from gnnaccel.sampling.choice import CHOICE, is_frameworks
from gnnaccel.touch import Patches

_CPU = torch.device("cpu")
KIND, _HGT = "pyg.NeighborSampler", "pyg.HGTSampler"

# Numbers of nodes by type, of the sampler that is asked: PyG does not tell its packages, which then take any.
_sizes: contextvars.ContextVar[dict[str, int]] = contextvars.ContextVar("gnnaccel_node_counts")

# ---- The functions of pyg-lib and torch-sparse that PyG's samplers call, with their arguments and results. ----


def _plain(value: Any) -> Any:
    """What of an Index is a tensor, contiguous; of a dictionary, those of all its values; anything else as it is."""
    if isinstance(value, dict):
        return {key: _plain(of_key) for key, of_key in value.items()}
    return value.as_tensor() if isinstance(value, Index) else value


def _neighbor_sample(
    colptr, row, seed, num_neighbors, node_time, edge_time, seed_time, edge_weight, _csc, replace, _directed, disjoint,
    temporal_strategy, _return_edge_id,
):  # fmt: skip
    """pyg::neighbor_sample, of a graph in CSC, where that is."""
    colptr, row, seed = _plain(colptr), _plain(row), _plain(seed)
    how = dict(
        edge_weight=edge_weight,
        node_time=node_time,
        edge_time=edge_time,
        disjoint=disjoint,
        temporal_strategy=temporal_strategy,
    )
    if colptr.is_cuda and not seed.is_cuda and (seed_time is None or not seed_time.is_cuda):
        out = _beside_training(colptr, row, seed, num_neighbors, replace, how, seed_time)
    else:
        seed, seed_time = at(colptr.device, seed), at(colptr.device, seed_time)
        out = sampling.neighbor_sample(colptr, row, seed, num_neighbors, seed_time=seed_time, replace=replace, **how)
    node = out.node if out.batch is None else torch.stack((out.batch, out.node)).t()
    return out.row, out.col, node, out.edge, out.num_nodes_per_hop, out.num_edges_per_hop


def _beside_training(
    colptr, row, seed, num_neighbors, replace, how: dict, seed_time: Tensor | None = None
) -> sampling.NeighborSample:
    """A sample of a graph on the GPU, from seeds in host memory: drawn on the sampler's stream, or begun there when the
    batch before it was asked for."""
    number = _arrays.random_seed("neighbor_sample", None)
    with ahead.beside(colptr.device) as made:
        out = upcoming.take(colptr, row, seed, num_neighbors, replace, number) if _is_uniform(**how) else None
        if out is None:
            there, times = _sent(colptr.device, seed), _sent(colptr.device, seed_time)
            how = how | dict(seed_time=times, replace=replace, seed=number)
            out = sampling.neighbor_sample(colptr, row, there, num_neighbors, **how)
        made += [part for part in out[:5] if part is not None]
    return out


def _sent(device: torch.device, value: Any) -> Any:
    """`_at` of host memory, for which nobody waits."""
    if isinstance(value, dict):
        return {key: _sent(device, of_key) for key, of_key in value.items()}
    return value if value is None else ahead.to_device(value, device)


def _is_uniform(edge_weight, node_time, edge_time, disjoint, temporal_strategy) -> bool:
    """True where nothing but the graph says what is drawn, as for all that is begun."""
    return edge_weight is None and node_time is None and edge_time is None and not disjoint


def _by_edge_type(edge_types, values: dict | None) -> dict:
    """By edge type what is given, if at all, by their joined names."""
    names = {"__".join(edge_type): edge_type for edge_type in edge_types}
    return {names[name]: value for name, value in _plain(values or {}).items() if name in names}


def _by_name(values: dict) -> dict:
    return {"__".join(edge_type): value for edge_type, value in values.items()}


def _graph(edge_types, colptr_dict: dict, row_dict: dict) -> dict:
    colptrs, rows = _by_edge_type(edge_types, colptr_dict), _by_edge_type(edge_types, row_dict)
    return {edge_type: (colptrs[edge_type], rows[edge_type]) for edge_type in edge_types}


def _hetero_neighbor_sample(
    node_types, edge_types, colptr_dict, row_dict, seed, num_neighbors, node_time, edge_time, seed_time, edge_weight,
    _csc, replace, _directed, disjoint, temporal_strategy, _return_edge_id,
):  # fmt: skip
    """pyg::hetero_neighbor_sample, of a graph in CSC, where that is."""
    graph, seed = _graph(edge_types, colptr_dict, row_dict), _plain(seed)
    how = dict(
        node_types=node_types,
        num_nodes=_sizes.get(),
        edge_weight=_by_edge_type(edge_types, edge_weight),
        node_time=node_time,
        edge_time=_by_edge_type(edge_types, edge_time),
        replace=replace,
        disjoint=disjoint,
        temporal_strategy=temporal_strategy,
    )
    fanouts = _by_edge_type(edge_types, num_neighbors)
    device = next((colptr.device for colptr, _ in graph.values()), _CPU)
    given = (*seed.values(), *(seed_time or {}).values())
    if any(colptr.is_cuda for colptr, _ in graph.values()) and not any(value.is_cuda for value in given):
        with ahead.beside(device) as made:
            out = sampling.hetero_neighbor_sample(
                graph, _sent(device, seed), fanouts, seed_time=_sent(device, seed_time), **how
            )
            parts = (out.node, out.row, out.col, out.edge, out.batch or {})
            made += [array for part in parts for array in part.values()]
    else:
        out = sampling.hetero_neighbor_sample(graph, at(device, seed), fanouts, seed_time=at(device, seed_time), **how)
    node = out.node
    if out.batch is not None:
        node = {name: torch.stack((out.batch[name], of_type)).t() for name, of_type in node.items()}
    edges = (_by_name(out.row), _by_name(out.col), node, _by_name(out.edge))
    return *edges, out.num_nodes_per_hop, _by_name(out.num_edges_per_hop)


def _induced_neighbor_sample(colptr, row, seed, num_neighbors, replace, _directed):
    """torch_sparse::neighbor_sample without `directed`: all edges between the nodes it finds."""
    colptr, row = _plain(colptr), _plain(row)
    node = sampling.neighbor_sample(
        colptr, row, at(colptr.device, _plain(seed)).to(colptr.dtype), num_neighbors, replace=replace
    ).node
    edges = sampling.induced_subgraph(colptr, row, node)
    return node, edges.row, edges.col, edges.edge


def _induced_hetero_neighbor_sample(
    node_types, edge_types, colptr_dict, row_dict, seed, num_neighbors, _hops, replace, _directed
):
    """torch_sparse::hetero_neighbor_sample without `directed`."""
    graph = _graph(edge_types, colptr_dict, row_dict)
    some = next((colptr for colptr, _ in graph.values()), torch.empty(0, dtype=torch.int64))
    node = sampling.hetero_neighbor_sample(
        graph,
        {name: of_type.to(some.device, some.dtype) for name, of_type in _plain(seed).items()},
        _by_edge_type(edge_types, num_neighbors),
        node_types=node_types,
        num_nodes=_sizes.get(),
        replace=replace,
    ).node
    size = {edge_type[-1]: colptr.numel() - 1 for edge_type, (colptr, _) in graph.items()} | _sizes.get()
    edges = {
        kind: sampling.induced_subgraph(*arrays, node[kind[-1]], sources=node[kind[0]], num_sources=size.get(kind[0]))
        for kind, arrays in graph.items()
    }
    parts = ({kind: getattr(found, part) for kind, found in edges.items()} for part in ("row", "col", "edge"))
    return node, *map(_by_name, parts)


# ---- PyG's methods with these in place. ----

_OPS = View(
    torch.ops,
    pyg=SimpleNamespace(
        neighbor_sample=_neighbor_sample, hetero_neighbor_sample=_hetero_neighbor_sample, random_walk=walks.random_walk
    ),
    torch_sparse=SimpleNamespace(
        neighbor_sample=_induced_neighbor_sample,
        hetero_neighbor_sample=_induced_hetero_neighbor_sample,
        ego_k_hop_sample_adj=adjacency.ego_k_hop_sample_adj,
        ptr2ind=adjacency.ptr2ind,
    ),
)
_TORCH = View(torch, ops=_OPS)
_HANDING = View(torch, ops=View(_OPS, torch_sparse=View(_OPS.torch_sparse, ego_k_hop_sample_adj=adjacency.ego_on_host)))
_HAS_ALL = dict.fromkeys(
    ("WITH_PYG_LIB", "WITH_TORCH_SPARSE", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE"), True
)
_PYG = View(torch_geometric, typing=View(torch_geometric.typing, **_HAS_ALL))
_WALKS = dict(WITH_PYG_LIB=True, torch=_TORCH, index2ptr=compressed.index2ptr)
_ROWS = dict(to_csc=compressed.to_csc, to_hetero_csc=compressed.to_hetero_csc)
_SPARSE = {} if WITH_TORCH_SPARSE else {"SparseTensor": adjacency.Adjacency}


def _hgt_init(original: Callable) -> Callable:
    init = rebind(original, WITH_TORCH_SPARSE=True, **_ROWS)

    def __init__(self, data, num_samples, is_sorted=False, share_memory=False):
        init(self, data, num_samples, is_sorted, share_memory)
        to_cuda(self, _HGT, data, share_memory)

    return __init__


def _hgt_sample(self: HGTSampler, inputs) -> HeteroSamplerOutput:
    kept, some = kept_of(self, _HGT), next(iter(self.colptr_dict.values()))
    graph = _graph(self.edge_types, self.colptr_dict, self.row_dict)
    nodes = inputs.node.to(some.dtype)
    if some.is_cuda and not nodes.is_cuda:
        with ahead.beside(some.device) as arrays:
            out = sampling.hgt_sample(graph, {inputs.input_type: _sent(some.device, nodes)}, self.num_samples)
            arrays += [array for part in (out.node, out.row, out.col, out.edge) for array in part.values()]
    else:
        out = sampling.hgt_sample(graph, {inputs.input_type: nodes.to(some.device)}, self.num_samples)
    made = HeteroSamplerOutput(
        node=out.node, row=out.row, col=out.col, edge=out.edge, batch=None, metadata=(inputs.input_id, inputs.time)
    )
    _hand(made, kept)
    return made


def _hand(out: SamplerOutput | HeteroSamplerOutput, kept: Kept | None) -> None:
    """Bring what was sampled to where it belongs."""
    if kept is not None and kept.is_asked and not gpu_batches.are_wanted():
        for name in ("node", "row", "col", "edge", "batch"):
            setattr(out, name, at(_CPU, getattr(out, name)))


def _convert(values, dtype: torch.dtype, unless: tuple[torch.dtype, ...]):
    """A tensor, or each of a dictionary, in `dtype`, unless it is of one that will do."""
    if isinstance(values, dict):
        return {key: _convert(value, dtype, unless) for key, value in values.items()}
    return values if values is None or values.dtype in unless else values.to(dtype)


def _check_attributes(self: NeighborSampler) -> None:
    """Say at once, and not in the middle of an epoch, what cannot be sampled by; bring the rest into our dtypes."""
    self.edge_weight = at(_CPU, _convert(self.edge_weight, torch.float32, (torch.float32, torch.float64)))
    weights = self.edge_weight if isinstance(self.edge_weight, dict) else {"": self.edge_weight}
    for name, weight in weights.items():
        if weight is not None and not bool(((weight >= 0) & weight.isfinite()).all()):
            of_type = f" of {name}" if name else ""
            raise ValueError(f"NeighborSampler: weight_attr: expected finite weights of at least 0{of_type}")
    if self.edge_weight is not None and self.subgraph_type.value == "induced":
        report.note(KIND, "PyG draws by no weights for subgraph_type='induced'", logging.WARNING)
    for attribute in ("node_time", "edge_time"):
        times = getattr(self, attribute)
        for time in times.values() if isinstance(times, dict) else [times]:
            if time is not None and (time.is_floating_point() or time.is_complex()):
                raise TypeError(f"NeighborSampler: time_attr: expected integers, got {time.dtype}")
        setattr(self, attribute, at(_CPU, _convert(times, torch.int64, (torch.int64,))))


# ---- Where NeighborSampler runs: sampler_places.py. ----


def _neighbor_init(original: Callable) -> Callable:
    init = rebind(original, torch_geometric=_PYG, **_ROWS)
    parameters = inspect.signature(original)

    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        _check_attributes(self)
        given = parameters.bind(self, *args, **kwargs).arguments
        to_cuda(self, KIND, given["data"], given.get("share_memory", False))

    return __init__


def _bidirectional_init(original: Callable) -> Callable:
    """PyG's looks at the nodes that it finds one by one: they had better be in host memory."""

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        halves = (self.forward_sampler, self.backward_sampler)
        if any(kept_of(half, KIND) is not None for half in halves):
            say(KIND, "BidirectionalNeighborSampler")
        for half in halves:
            to_host(half)

    return __init__


def _neighbor_draw(original: Callable) -> Callable:
    sample = rebind(original, torch=_TORCH, torch_geometric=_PYG)

    def _sample(self, seed, seed_time=None, **kwargs):
        kept = kept_of(self, KIND)
        counts = self.num_nodes if isinstance(self.num_nodes, dict) else {}
        token = _sizes.set({name: count for name, count in counts.items() if count is not None})
        try:
            out = sample(
                by_what(self),
                seed,
                _convert(seed_time, torch.int64, (torch.int64, torch.float32, torch.float64)),
                **kwargs,
            )
        finally:
            _sizes.reset(token)
        _hand(out, kept)
        sampled_batches.mark(self, out)
        return out

    return _sample


def _shadow_init(original: Callable) -> Callable:
    return shadow_init(rebind(original, WITH_TORCH_SPARSE=True, **_SPARSE))


def _shadow_collate(original: Callable) -> Callable:
    return shadow_collate(*(rebind(original, torch=of, **_SPARSE) for of in (_TORCH, _HANDING)))


# Class, method, what makes ours of PyG's, and whether a call is one that report counts.
_METHODS: list[tuple[type, str, Callable[[Callable], Callable], bool]] = [
    (NeighborSampler, "__init__", _neighbor_init, False),
    (NeighborSampler, "_sample", _neighbor_draw, True),
    (NodeLoader, "_get_iterator", upcoming.watching, False),
    (NodeLoader, "collate_fn", lambda original: gpu_batches.wanting(upcoming.beginning(original)), False),
    (
        NodeLoader,
        "filter_fn",
        lambda original: gpu_batches.filtering(sampled_batches.noting(original, collates=True)),
        False,
    ),
    (LinkLoader, "filter_fn", sampled_batches.noting, False),
    (PrefetchLoader, "non_blocking_transfer", gpu_batches.passing, False),
    (BidirectionalNeighborSampler, "__init__", _bidirectional_init, False),
    (SamplerOutput, "to_bidirectional", lambda f: rebind(f, to_bidirectional=sampled_batches.both_ways), False),
    (HGTSampler, "__init__", _hgt_init, False),
    (HGTSampler, "sample_from_nodes", lambda original: _hgt_sample, True),
    (ShaDowKHopSampler, "__init__", _shadow_init, False),
    (ShaDowKHopSampler, "__collate__", _shadow_collate, True),
    (ClusterData, "_metis", clusters.parting, False),
    (pyg_nn.Node2Vec, "__init__", lambda original: rebind(original, **_WALKS), False),
    (RootedRWSubgraph, "extract", lambda original: rebind(original, torch=_TORCH), False),
    *dist_sampling.METHODS,
]
if not WITH_TORCH_SPARSE:  # which samples for these itself
    _METHODS += [
        (GraphSAINTSampler, "__init__", lambda original: saint_init(rebind(original, **_SPARSE)), False),
        (GraphSAINTSampler, "__getitem__", saint_item, True),
        (FirstNeighborSampler, "__init__", lambda original: rebind(original, **_SPARSE), False),
    ]
_METHODS += [
    (plain, name, functools.partial(asked_for, kind=f"pyg.{plain.__name__}", reason=reason), not WITH_TORCH_SPARSE)
    for plain, name, reason in (
        (FirstNeighborSampler, "sample", "torch_geometric.loader.NeighborSampler"),
        *([(GraphSAINTSampler, "__getitem__", "torch-sparse is installed, and samples")] if WITH_TORCH_SPARSE else []),
    )
]
_patches = Patches()
# What follows a batch: holder, name, what makes ours of it.
_FOLLOWING: list[tuple[Any, str, Callable[[Callable], Callable]]] = [
    (BaseData, "to", sampled_batches.moving),
    (torch.autograd, "backward", gradient_rows.telling),
]
_followed: list[tuple[Any, str, Callable, Callable]] = []


def _choosing(plain: type, make: Callable[[Callable], Callable], counted: bool, original: Callable) -> Callable:
    """What we make of PyG's `original`, or that where the user chose it."""
    kind, ours = f"pyg.{plain.__name__}", make(original)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if is_frameworks():
            if counted:
                report.fallback(kind, f"{CHOICE}=framework")
            return original(self, *args, **kwargs)
        if not counted:
            return ours(self, *args, **kwargs)
        with report.accelerated(kind):
            return ours(self, *args, **kwargs)

    return method


def enable() -> None:
    """Put our sampling into PyG's samplers; does nothing the second time."""
    if _patches:
        return
    for plain, name, make, counted in _METHODS:
        if getattr(plain, name, None) is None:
            touch.MISSING.add(f"{plain.__name__}.{name}")
        else:
            _patches.put(plain, name, functools.partial(_choosing, plain, make, counted))
    for holder, name, make in _FOLLOWING:
        original = getattr(holder, name)
        _followed.append((holder, name, original, make(original)))
        setattr(holder, name, _followed[-1][-1])


def disable() -> None:
    """Undo `enable`. A loader that only ours could make raises PyG's ImportError from then on."""
    _patches.undo()
    for holder, name, original, ours in _followed:
        if getattr(holder, name) is ours:  # else somebody has wrapped it since, and it does no harm
            setattr(holder, name, original)
    _followed.clear()
