"""torch_geometric.distributed without pyg-lib: one hop at a time, on the rank that has a node's edges, by ours.

What a rank asks of which, and how its answers travel, is PyG's own code; it finds our functions where it calls those of
pyg-lib, with their arguments and results: ranks with pyg-lib and ranks with these understand each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gnnaccel import sampling
from gnnaccel.bound import View, rebind
from gnnaccel.pyg_backend.touch import DistLinkNeighborLoader, DistNeighborLoader, DistNeighborSampler

_EDGE = ("source", "to", "target")


def _one_hop(
    colptr, row, seed, num_neighbors, node_time, edge_time, seed_time, edge_weight, _csc, replace, _directed, disjoint,
    temporal_strategy,
):  # fmt: skip
    """pyg::dist_neighbor_sample: seeds, then the neighbours of each, with those of others among them; edges; and how
    many nodes there are when a seed's neighbours begin."""
    one = {"edge_weight": edge_weight, "edge_time": edge_time}
    out = sampling.hetero_neighbor_sample(
        {_EDGE: (colptr, row)},  # whose sources may be of another type
        {_EDGE[-1]: seed},
        [num_neighbors],
        node_time=None if node_time is None else {_EDGE[0]: node_time},
        seed_time=None if seed_time is None else {_EDGE[-1]: seed_time},
        replace=replace,
        disjoint=True,  # a seed that is there twice has neighbours of its own each time
        temporal_strategy=temporal_strategy,
        **{name: None if value is None else {_EDGE: value} for name, value in one.items()},
    )
    target = out.col[_EDGE]
    node = torch.cat((seed, out.node[_EDGE[0]][out.row[_EDGE]]))
    counts = torch.bincount(target, minlength=seed.numel())
    begins = torch.cat((counts.new_zeros(1), counts.cumsum(0))) + seed.numel()
    if disjoint:
        node = torch.stack((torch.cat((torch.arange(seed.numel(), dtype=seed.dtype), target)), node)).t()
    return node, out.edge[_EDGE], begins.tolist()


def _merged(
    nodes: list[Tensor],
    edges: list[Tensor],
    begins: list[list[int]],
    partition_ids: list[int],
    orders: list[int],
    _num_partitions: int,
    _num_neighbors: int,
    batch: Tensor | None,
    disjoint: bool,
):
    """pyg::merge_sampler_outputs: what the partitions have found, in the order of the seeds, without them."""
    heads = [of_part[0] if of_part else 0 for of_part in begins]  # seeds of each, which come first
    found = torch.cat([node[head:] for node, head in zip(nodes, heads, strict=True)])
    firsts, counts, before = [], [], 0
    for of_part, edge, head in zip(begins, edges, heads, strict=True):
        place = torch.tensor(of_part, dtype=torch.int64) - head
        firsts.append(place[:-1] + before)
        counts.append(place.diff())
        before += edge.numel()
    sizes = torch.tensor([count.numel() for count in counts])
    at = (sizes.cumsum(0) - sizes)[torch.tensor(partition_ids, dtype=torch.int64)] + torch.tensor(orders)
    first, count = torch.cat(firsts)[at], torch.cat(counts)[at]
    every = torch.repeat_interleave(first - (count.cumsum(0) - count), count)
    every += torch.arange(every.numel())
    of_seed = batch.repeat_interleave(count) if disjoint and batch is not None else None
    return found[every], torch.cat(edges)[every], of_seed, count.tolist()


def _first_seen(node: Tensor, batch: Tensor | None) -> Tensor:
    """Numbers of nodes (of a tree each, with `batch`) in the order in which they first appear."""
    if batch is not None:
        node = batch * (node.max() + 1 if node.numel() else 1) + node
    different, which = torch.unique(node, return_inverse=True)
    place = torch.arange(node.numel())
    first = torch.full((different.numel(),), node.numel()).scatter_reduce_(0, which, place, "amin")
    number = torch.empty_like(first)
    number[first.argsort()] = place[: first.numel()]
    return number[which]


def _relabelled(seed, nodes, counts: Sequence[int], _num_nodes, batch, csc: bool, disjoint: bool):
    """pyg::relabel_neighborhood: edges between local numbers; the neighbours of each node follow each other."""
    trees = torch.cat((torch.arange(seed.numel()), batch)) if disjoint else None
    sources = _first_seen(torch.cat((seed, nodes)), trees)[seed.numel() :].to(seed.dtype)
    number = torch.tensor(counts, dtype=torch.int64)
    targets = torch.repeat_interleave(torch.arange(number.numel(), dtype=seed.dtype), number)
    return (sources, targets) if csc else (targets, sources)


def _relabelled_hetero(
    node_types, edge_types, seed_dict, nodes_dict, counts_dict, _num_nodes, batch_dict, csc: bool, disjoint: bool
):
    """pyg::hetero_relabel_neighborhood: hop by hop, and in each by edge type, as they were found."""
    names, empty = {kind: "__".join(kind) for kind in edge_types}, torch.empty(0, dtype=torch.int64)
    local, seen, tree_of, tree = {}, {}, dict.fromkeys(node_types, 0), 0
    for name, seed in seed_dict.items():  # trees are numbered in this order, whatever that of the types is
        tree_of[name], tree = tree, tree + seed.numel()
    for name in node_types:
        seed, trees = seed_dict.get(name, empty), None
        if disjoint:
            trees = torch.cat((torch.arange(tree_of[name], tree_of[name] + seed.numel()), batch_dict[name]))
        local[name], seen[name] = _first_seen(torch.cat((seed, nodes_dict[name])), trees), seed.numel()
    asked = {name: (0, count) for name, count in seen.items()}  # nodes whose neighbours a hop has found
    rows: dict[str, list[Tensor]] = {name: [] for name in names.values()}
    cols: dict[str, list[Tensor]] = {name: [] for name in names.values()}
    for hop in range(max((len(counts) for counts in counts_dict.values()), default=0)):
        for kind, rel in names.items():
            target, source = (kind[2], kind[0]) if csc else (kind[0], kind[2])
            count = torch.tensor(counts_dict[rel][hop], dtype=torch.int64)
            if count.numel():
                begin = asked[target][0]
                cols[rel].append(torch.repeat_interleave(torch.arange(begin, begin + count.numel()), count))
                begin, seen[source] = seen[source], seen[source] + int(count.sum())
                rows[rel].append(local[source][begin : seen[source]])
        for name in node_types:
            known = local[name][: seen[name]]
            asked[name] = asked[name][1], int(known.max()) + 1 if known.numel() else 0
    sources = {rel: torch.cat([empty, *found]) for rel, found in rows.items()}
    targets = {rel: torch.cat([empty, *found]) for rel, found in cols.items()}
    return (sources, targets) if csc else (targets, sources)


_OPS = SimpleNamespace(
    dist_neighbor_sample=_one_hop,
    merge_sampler_outputs=_merged,
    relabel_neighborhood=_relabelled,
    hetero_relabel_neighborhood=_relabelled_hetero,
)
_TORCH = View(torch, ops=View(torch.ops, pyg=_OPS))


def _warn(message: str, **_options: Any) -> None:
    warnings.warn(message, stacklevel=3)


def _with_ours(original: Callable) -> Callable:
    return rebind(original, torch=_TORCH)


def _warning(original: Callable) -> Callable:
    """PyG 2.8 gives warnings.warn an option that it does not have, and ends there."""
    return rebind(original, warn=_warn)


# As samplers._METHODS.
METHODS: list[tuple[type, str, Callable[[Callable], Callable], bool]] = [
    (DistNeighborSampler, "__init__", _warning, False),
    (DistNeighborSampler, "node_sample", _with_ours, False),
    (DistNeighborSampler, "_merge_sampler_outputs", _with_ours, False),
    (DistNeighborSampler, "_sample_one_hop", _with_ours, True),
    (DistNeighborLoader, "__init__", _warning, False),
    (DistLinkNeighborLoader, "__init__", _warning, False),
]
