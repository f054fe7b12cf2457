"""Subgraphs and samples by layers in torch's own operations: how a GPU makes them. Any device can, which is how the
tests compare.

What they do is a pass over the rows of the nodes of a batch, which on a GPU takes less than their sizes take to come
to the host: there is nothing for a kernel of ours to win.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gnnaccel.sampling import _arrays
from gnnaccel.sampling._arrays import Relation
from gnnaccel.sampling.neighbors import EdgeType, hetero_neighbor_sample

# Edges that are looked at in one go, at some 40 bytes each: enough of them that a GPU is busy.
MOST_AT_ONCE = 1 << 22
_SHARED = 50  # sources that a node gives something to, of one relation (cpp/layer_sample.cpp)
_SHARE_BITS = 40  # of what a node gives away: whole numbers, whose sum is the same in any order


def serves(array: Tensor) -> bool:
    """Whether what is sampled from this is sampled here."""
    return array.is_cuda


def induced(
    op: str, relation: Relation, nodes: Tensor, sources: Tensor, num_nodes: int, batch: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`subgraphs.induced_subgraph` of checked tensors of one device; num_nodes: of the sources' type, -1 if unknown.

    Returns
    -------
    indptr, row, col, edge : Tensor
        As of `Subgraph`.
    """
    dtype, device = relation.indptr.dtype, relation.indptr.device
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    places = _Places(op, sources, num_nodes, batch)
    for owner, at in _edges(op, relation, nodes):
        ends = relation.indices[at]
        place, is_there = places.of(ends, owner)
        kept = is_there.nonzero().view(-1)
        _check(op, "indices", ends, num_nodes)  # the GPU has come so far by now
        found.append((place[kept].to(dtype), owner[kept].to(dtype), at[kept].to(dtype)))
    none = relation.indptr.new_empty(0)
    row, col, edge = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else (none, none, none)
    starts = torch.arange(nodes.numel() + 1, dtype=dtype, device=device)
    return torch.searchsorted(col, starts).to(dtype), row, col, edge


def _edges(op: str, relation: Relation, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the edges in the rows of these nodes, in order, some at a time: which of the nodes, and where in indices."""
    if not nodes.numel():
        return
    inside = nodes.clamp(0, max(relation.num_rows - 1, 0))
    if relation.num_rows:
        first, end = relation.indptr[inside].long(), relation.indptr[inside + 1].long()
    else:
        first = end = torch.zeros_like(nodes, dtype=torch.int64)
    ascending = (first >= 0) & (first <= end) & (end <= relation.nnz)
    last = (end - first).cumsum(0)
    missing, falling, total = torch.stack([(nodes != inside).any(), ~ascending.all(), last[-1]]).tolist()
    if missing or not relation.num_rows:
        wrong = nodes[(nodes < 0) | (nodes >= relation.num_rows)][0]
        raise ValueError(f"{op}: nodes: expected nodes in [0, {relation.num_rows}), got {int(wrong)}")
    if falling:
        which = int((~ascending).nonzero()[0])
        what = f"got {int(first[which])} and {int(end[which])} for node {int(nodes[which])}"
        raise ValueError(f"{op}: indptr: expected ascending places in indices, {what}")
    start = last - (end - first)  # of each row, among these edges
    pieces = [(0, nodes.numel(), total)]
    if total > MOST_AT_ONCE:
        bounds = torch.arange(0, total, MOST_AT_ONCE, device=last.device)
        rows = torch.unique(torch.cat([torch.searchsorted(last, bounds, right=True), bounds.new_tensor([len(last)])]))
        before = torch.cat([last.new_zeros(1), last])[rows]
        rows, before = torch.stack([rows, before]).tolist()
        sizes = [b - a for a, b in itertools.pairwise(before)]
        pieces = list(zip(rows[:-1], rows[1:], sizes, strict=True))
    for low, high, size in pieces:
        if size:
            some = torch.arange(low, high, device=last.device)
            owner = torch.repeat_interleave(some, (end - first)[low:high], output_size=size)
            offset = torch.arange(size, device=last.device) + start[low]
            yield owner, offset + (first - start)[owner]


def _check(op: str, name: str, nodes: Tensor, num_nodes: int) -> None:
    """ValueError for nodes that there are not."""
    wrong = (nodes < 0) if num_nodes < 0 else (nodes < 0) | (nodes >= num_nodes)
    if bool(wrong.any()):
        raise ValueError(f"{op}: {name}: expected nodes in [0, {num_nodes}), got {int(nodes[wrong][0])}")


class _Places:
    """Where nodes are among given ones, the first time: by a table of all nodes, or by bisection where there are too
    many, nobody says how many, or each batch has its own."""

    def __init__(self, op: str, given: Tensor, num_nodes: int, batch: Tensor | None):
        self._batch, self._num_nodes, self._count = batch, num_nodes, given.numel()
        self._table = self._keys = None
        _check(op, "nodes", given, num_nodes)
        if batch is None and 0 <= num_nodes <= _arrays.LARGEST_TABLE:
            places = torch.arange(self._count, device=given.device)
            self._table = places.new_full((num_nodes,), self._count)
            self._table.scatter_reduce_(0, given.long(), places, "amin")
        else:
            self._keys, self._order = torch.sort(self._key(given.long(), batch), stable=True)

    def _key(self, nodes: Tensor, batch: Tensor | None) -> Tensor:
        return nodes if batch is None else batch.long() * max(self._num_nodes, 1) + nodes

    def of(self, nodes: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each, and whether it has one. `owner`: the given node of whose batch it must be."""
        if not self._count:
            return owner, torch.zeros_like(owner, dtype=torch.bool)
        if self._table is not None:
            place = self._table[nodes.long().clamp(0, self._num_nodes - 1)]
            return place, place < self._count
        assert self._keys is not None
        wanted = self._key(nodes.long(), None if self._batch is None else self._batch[owner])
        at = torch.searchsorted(self._keys, wanted).clamp_(max=self._count - 1)
        return self._order[at], self._keys[at] == wanted


def hgt_nodes(
    op: str,
    relations: Mapping[EdgeType, Relation],
    seeds: Mapping[str, Tensor],
    counts: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    seed: int,
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """The nodes of `layerwise.hgt_sample`, and how many each hop added: drawn as likely as the CPU draws them, but
    others.

    Parameters
    ----------
    relations, seeds, counts, sizes
        Of one device and dtype; by all types of nodes what to start from, how many to add, how many there are or -1.
    """
    device = next(iter(seeds.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    graph = {kind: (relation.indptr, relation.indices) for kind, relation in relations.items()}
    known = {name: size for name, size in sizes.items() if size >= 0}
    node, fresh = dict(seeds), dict(seeds)
    per_hop = {name: [nodes.numel()] for name, nodes in seeds.items()}
    given: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in seeds}  # to which nodes, how much
    hops = max(map(len, counts.values()), default=0)
    for hop in range(hops):
        drawn = hetero_neighbor_sample(graph, fresh, [_SHARED], num_nodes=known, seed=(seed + 1 + hop) % 2**63)
        for kind, edges in drawn.edge.items():
            # Edges are in order of the nodes that give.
            degree = torch.bincount(drawn.col[kind], minlength=fresh[kind[-1]].numel())
            share = ((1 << _SHARE_BITS) // degree.clamp(min=1))[drawn.col[kind].long()]
            given[kind[0]].append((relations[kind].indices[edges], share))
        for name in seeds:
            fresh[name] = _chosen(given[name], node[name], counts[name][hop], generator)
            node[name] = torch.cat([node[name], fresh[name]])
            per_hop[name].append(fresh[name].numel())
    return node, per_hop


def _chosen(given: list[tuple[Tensor, Tensor]], node: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """So many nodes that are not among `node` yet, each with the square of what it was given: those whose exponential
    keys are the smallest (Efraimidis and Spirakis)."""
    if not given or not count:
        return node[:0]
    ends, shares = (torch.cat(parts) for parts in zip(*given, strict=True))
    candidates, of_end = torch.unique(ends, return_inverse=True)
    budget = shares.new_zeros(candidates.numel()).index_add_(0, of_end, shares)
    others = torch.isin(candidates, node, invert=True).nonzero().view(-1)
    share = budget[others].double()
    key = torch.empty_like(share).exponential_(generator=generator) / (share * share)
    return candidates[others[key.topk(min(count, len(others)), largest=False).indices]]
