"""Which part each node of a graph goes to: parts of nearly as many edges and nodes each, with few edges between them.

Multilevel, as METIS is (Karypis and Kumar 1998), with the communities of `gnnaccel.graph.community` in place of matched
pairs: the smallest graph of communities is cut first, from several starts, the best of which are carried on; then,
level by level down to the nodes, those at the borders move to the part that most of their neighbours are in, as long as
both parts stay in balance: one by one (cpp/parts.cpp), or many at a time where that would take too much memory. In the
end those move that leave fewer rows to send. No random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import ops
from gnnaccel.graph.community import hierarchy
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.network import Network, chunks, inverse, network_of
from gnnaccel.lower import bounds

METHODS = ("communities", "metis", "range")


def assign(graph: Graph, parts: int, method: str, *, by_nodes: bool = False) -> Tensor:
    """The part of each node.

    Parameters
    ----------
    graph : Graph
        Square; directed or not.
    parts : int
    method : {"communities", "metis", "range"}
        "metis": by the package pymetis, where it is installed. "range": nodes as they are numbered, cut into ranges.

    Returns
    -------
    Tensor [num_nodes], int64

    Raises
    ------
    ValueError
        For another method, a graph that is not square, or more parts than nodes. ImportError: for "metis" without
        pymetis.

    Notes
    -----
    A node counts as many edges as it receives, which is what its sums read. Edges are balanced within
    PARTS_EDGE_SLACK and nodes within PARTS_NODE_SLACK of the mean (gnnaccel/lower/bounds.py), unless a single node has
    more; a "range" by edges and nodes together alone. `by_nodes`: nodes within PARTS_EDGE_SLACK, or one node; hundreds
    of parts may miss it.
    """
    if method not in METHODS:
        raise ValueError(f"partition: method: expected one of {', '.join(METHODS)}, got {method!r}")
    if graph.num_rows != graph.num_cols:
        raise ValueError(f"partition: expected a graph whose sources and destinations are the same nodes, got {graph}")
    if not 1 <= parts <= max(graph.num_rows, 1):
        raise ValueError(f"partition: parts: expected 1 to {graph.num_rows}, the number of nodes, got {parts}")
    if parts == 1:
        return torch.zeros(graph.num_rows, dtype=torch.int64, device=graph.device)
    if method == "metis":
        return _by_metis(graph, parts, by_nodes)
    if method == "range":
        return _ranges(torch.arange(graph.num_rows, device=graph.device), _sizes(graph, by_nodes), parts)
    return _by_communities(graph, parts, by_nodes)


def _sizes(graph: Graph, by_nodes: bool) -> Tensor:
    """What each node counts as: edges (or nodes again), and nodes; [2, num_nodes]."""
    size = torch.ones(2, graph.num_rows, dtype=torch.int64, device=graph.device)
    if not by_nodes:
        size[0] = graph.indptr.diff()
    return size


def _ranges(order: Tensor, size: Tensor, parts: int) -> Tensor:
    """Consecutive pieces of `order` of equal work, half of which are edges, and half nodes."""
    work = (size / size.sum(1, keepdim=True).clamp(min=1)).sum(0)[order].double()
    middle = work.cumsum(0) - work / 2
    label = torch.empty_like(order)
    label[order] = (middle / work.sum() * parts).long().clamp_(0, parts - 1)
    return label


def _by_metis(graph: Graph, parts: int, by_nodes: bool) -> Tensor:
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            "partition: method='metis' needs the package pymetis (pip install pymetis); 'communities' needs nothing"
        ) from error
    both = _undirected(graph)
    weights = None if by_nodes else (graph.indptr.diff().long().cpu() + 1).tolist()
    adjacency = pymetis.CSRAdjacency(both.indptr.cpu().numpy(), both.indices.cpu().numpy())
    _, label = pymetis.part_graph(parts, adjacency=adjacency, vweights=weights)
    return torch.tensor(label, dtype=torch.int64, device=graph.device)


def _undirected(graph: Graph) -> Graph:
    """Each edge in both directions, without loops; repeated edges stay so."""
    rows = torch.repeat_interleave(torch.arange(graph.num_rows, device=graph.device), graph.indptr.diff().long())
    cols = graph.indices.long()
    apart = rows != cols
    rows, cols = rows[apart], cols[apart]
    n = graph.num_rows
    return Graph.from_coo(torch.cat([rows, cols]), torch.cat([cols, rows]), num_rows=n, num_cols=n)


def _by_communities(graph: Graph, parts: int, by_nodes: bool) -> Tensor:
    network, place = network_of(graph)
    networks, max_size = [network], max(1, graph.num_rows // (bounds.PARTS_COMMUNITIES * parts))
    levels, _ = hierarchy(graph, max_size, made=(network, place), networks=networks)
    place = place.long()
    size = _sizes(graph, by_nodes)
    caps = torch.stack([_cap(size[0], parts, bounds.PARTS_EDGE_SLACK), _cap(size[1], parts, bounds.PARTS_NODE_SLACK)])
    size[:, place] = size.clone()
    sizes, depth = [size], 0
    for label, merged in zip(levels, networks[1:], strict=True):
        sums = size.new_zeros(2, merged.num_nodes).index_add_(1, label, sizes[-1])
        large = (
            (sums * (sums > caps[:, None] / bounds.PARTS_LARGE)).sum(1) > sums.sum(1) * bounds.PARTS_LARGE_SHARE
        ).any()
        if merged.num_nodes < bounds.PARTS_COMMUNITIES * parts or bool(large):
            break
        sizes.append(sums)
        depth += 1
    del networks[depth + 1 :]
    # Communities of communities side by side.
    order = _nested_order(levels[depth:], torch.arange(networks[-1].num_nodes, device=graph.device))
    starts = [_ranges(order, sizes[-1], parts)]
    if networks[-1].num_nodes <= bounds.PARTS_GROWN:
        starts += _grown(networks[-1], sizes[-1], parts)
    for level in reversed(range(depth + 1)):
        if level < depth:
            starts = [start[levels[level]] for start in starts]
        around = networks.pop(), sizes.pop()
        if _can_sweep(around[0], parts):
            starts = _swept(*around, starts, caps, parts, for_rows=not by_nodes and level == 0)
        else:
            starts = [_refined(*around, start, caps, parts) for start in starts]
        few = bounds.PARTS_CARRIED if level and networks[-1].cols.numel() <= bounds.PARTS_CARRIED_EDGES else 1
        starts = _best(*around, starts, caps, parts, few, for_rows=not by_nodes and level == 0)
    return _without_empty(starts[0][place], parts)


def _can_sweep(network: Network, parts: int) -> bool:
    """Whether the sums of each node's edges by part take little memory, beside the edges or at all."""
    return network.num_nodes * parts <= max(bounds.PARTS_SUMS, network.cols.numel() // 2)


def _without_empty(label: Tensor, parts: int) -> Tensor:
    """`label` with nodes of the largest part in each that has none."""
    count = torch.bincount(label, minlength=parts)
    for empty in (count == 0).nonzero().view(-1).tolist():
        largest = int(count.argmax())
        nodes = (label == largest).nonzero().view(-1)
        taken = nodes[: max(1, min(nodes.numel() // 2, label.numel() // parts))]
        label[taken] = empty
        count[largest] -= taken.numel()
        count[empty] = taken.numel()
    return label


def _nested_order(levels: list[Tensor], order: Tensor) -> Tensor:
    """The nodes of a network sorted by their communities in a hierarchy, coarse to fine."""
    rank = None
    for label in reversed(levels):
        rank = inverse((label if rank is None else rank[label]).argsort(stable=True))
    return order if rank is None else inverse(rank)


def _best(
    network: Network, size: Tensor, starts: list[Tensor], caps: Tensor, parts: int, few: int, for_rows: bool
) -> list[Tensor]:
    """The best of several: the least cut, and in the end the fewest rows to send; more by what is over the caps."""
    if len(starts) <= few:
        return starts
    costs = []
    for part in starts:
        over = (_loads(size, part, parts) - caps[:, None]).clamp(min=0).sum(1) / size.sum(1).clamp(min=1)
        costs.append(
            (1 + (_halo_rows if for_rows else _cut)(network, part, parts))
            * (1 + bounds.PARTS_OVERLOAD * float(over.sum()))
        )
    return [starts[i] for i in sorted(range(len(starts)), key=costs.__getitem__)[:few]]


def _cut(network: Network, part: Tensor, _parts: int) -> float:
    part, cut = part.to(torch.int32), 0.0
    for r0, r1, e0, e1 in chunks(network.indptr, bounds.COMMUNITY_CHUNKS):
        mine = torch.repeat_interleave(part[r0:r1], network.indptr[r0 : r1 + 1].diff(), output_size=e1 - e0)
        across = mine != part.index_select(0, network.cols[e0:e1])
        weights = network.weights
        cut += float(across.sum() if weights is None else weights[e0:e1][across].sum(dtype=torch.float64))
    return cut


def _halo_rows(network: Network, part: Tensor, parts: int) -> int:
    """Pairs of a node and another part that has neighbours of it."""
    to, cols = torch.repeat_interleave(part, network.indptr.diff()), network.cols.long()
    across = to != part[cols]
    return torch.unique(cols[across] * parts + to[across]).numel()


def _grown(network: Network, size: Tensor, parts: int) -> list[Tensor]:
    """Some first parts: one grows after the other, by the node that most of its edges lead to, from several nodes."""
    work = (size / size.sum(1, keepdim=True).clamp(min=1)).sum(0).double()
    network, work, n = _on_cpu(network), work.cpu(), work.numel()
    heavy, found = (-work).argsort(stable=True).tolist(), []
    for start in range(min(bounds.PARTS_STARTS, n)):
        part = torch.empty(n, dtype=torch.int64)
        arrays = lib.pointer(work), parts, heavy[start * n // bounds.PARTS_STARTS], lib.pointer(part)
        lib.launch("part_growth", part.device, network.description(), *arrays)
        found.append(part.to(size.device))
    return found


def _on_cpu(network: Network) -> Network:
    if network.indptr.device.type == "cpu":
        return network
    weights = None if network.weights is None else network.weights.cpu()
    indptr, cols, strength = network.indptr.cpu(), network.cols.cpu(), network.strength.cpu()
    return Network(indptr, cols, weights, strength, network.total)


def _cap(weights: Tensor, parts: int, slack: float) -> Tensor:
    return (weights.sum().double() / parts * (1 + slack)).ceil().clamp(min=float(weights.max())).long()


def _loads(size: Tensor, label: Tensor, parts: int) -> Tensor:
    return size.new_zeros(2, parts).index_add_(1, label, size)


def _refined(network: Network, size: Tensor, label: Tensor, caps: Tensor, parts: int) -> Tensor:
    """`label` after passes of moves, in turn to parts of higher and of lower numbers: no two nodes change places."""
    total = float(network.cols.numel() if network.weights is None else network.weights.double().sum())
    best, lowest, before = label, None, None
    for turn in range(bounds.PARTS_PASSES):
        loads = _loads(size, label, parts)
        has_room = loads[0] < caps[0]
        inside, outside, target = _neighbours(network, label, has_room, upward=turn % 2 == 0)
        over = (loads - caps[:, None]).clamp(min=0).sum(1) / size.sum(1).clamp(min=1)
        state = float(over.sum()), total - float(inside.double().sum())
        if lowest is None or state < lowest:
            best, lowest = label, state
        if turn % 2 == 0:
            if before is not None and state[0] >= before[0] and state[1] > before[1] * (1 - bounds.PARTS_WORTH):
                break
            before = state
        label = _moved(label, outside - inside, target, size, caps, parts)
    return best


def _swept(
    network: Network, size: Tensor, labels: list[Tensor], caps: Tensor, parts: int, for_rows: bool
) -> list[Tensor]:
    """Each of `labels` after moves of single nodes, on the host; in the end of those that leave fewer rows to send."""
    network, size, caps = _on_cpu(network), size.cpu().contiguous(), caps.cpu()
    cut, found = (lib.pointer(size), lib.pointer(caps), parts), []
    patience = max(bounds.PARTS_PATIENCE, network.num_nodes // bounds.PARTS_PATIENT)
    for label in labels:
        part = label.to("cpu", copy=True)
        given = network.description(), cut, lib.pointer(part)
        lib.launch("part_sweeps", part.device, *given, bounds.PARTS_SWEEPS, patience)
        if for_rows:
            lib.launch("part_halo_moves", part.device, *given, bounds.PARTS_SWEEPS)
        found.append(part.to(label.device))
    return found


def _neighbours(network: Network, label: Tensor, has_room: Tensor, upward: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Edges of each node inside its part, the most in one part of a higher (lower) number that has room, and which that
    is: of several the lowest, also for a node without edges to any."""
    parts, nodes = has_room.numel(), label.numel()
    if parts <= bounds.PARTS_COUNTED:
        return _neighbours_by_sums(network, label, has_room, upward)
    with_room = has_room.nonzero().view(-1)
    at = torch.searchsorted(with_room, label, right=True) if upward else torch.zeros_like(label)
    target = torch.cat([with_room, with_room.new_full((1,), parts)])[at]
    there = (target < parts) if upward else (target < label)
    target, outside = torch.where(there, target, label), there.long() - 1  # -1: there is none
    inside = torch.zeros_like(label)
    for r0, r1, e0, e1 in chunks(network.indptr, 1):
        starts = network.indptr[r0 : r1 + 1] - e0
        mine = torch.repeat_interleave(label[r0:r1], starts.diff(), output_size=e1 - e0)
        other = label.index_select(0, network.cols[e0:e1])
        weights = None if network.weights is None else network.weights[e0:e1].long()
        same = (mine == other).long() if weights is None else (mine == other) * weights
        sums = torch.cat([same.new_zeros(1), same.cumsum(0)]).index_select(0, starts)
        inside[r0:r1] = sums.diff()
        edges = (other > mine if upward else other < mine).nonzero().view(-1)
        other = other.index_select(0, edges)
        rows = torch.searchsorted(starts, edges, right=True) + (r0 - 1)
        key, order = torch.where(has_room.index_select(0, other), rows * parts + other, nodes * parts).sort()
        pairs, which, count = key.unique_consecutive(return_inverse=True, return_counts=True)
        if weights is not None:
            count = torch.zeros_like(pairs).index_add_(0, which, weights[edges[order]])
        if pairs.numel() and not bool(has_room.all()):  # the last key is that of parts without room
            count = count[pairs < nodes * parts]
            pairs = pairs[: count.numel()]
        rows, other = pairs // parts, pairs % parts
        outside.scatter_reduce_(0, rows, count, "amax")
        most = count == outside[rows]
        lowest = target.new_full((nodes,), parts).scatter_reduce_(0, rows[most], other[most], "amin")
        target = torch.where(lowest < parts, lowest, target)
    return inside.float(), outside.float(), target


def _neighbours_by_sums(
    network: Network, label: Tensor, has_room: Tensor, upward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`_neighbours`, counted by sums over edges, one for so many parts: quick where these are few."""
    edges, parts = network.cols.numel(), has_room.numel()
    narrow = edges <= bounds.INT32_MAX  # no copy of the edges then
    indptr, cols = (network.indptr.to(network.cols.dtype) if narrow else network.indptr), network.cols
    inside = torch.zeros(label.numel(), dtype=torch.float32, device=label.device)
    outside, target = torch.full_like(inside, -1.0), label.clone()
    for first in range(0, parts, bounds.PARTS_COLUMNS):
        numbers = torch.arange(first, min(parts, first + bounds.PARTS_COLUMNS), device=label.device)
        one_hot = (label[:, None] == numbers).to(torch.float32)
        for r0, r1, e0, e1 in chunks(network.indptr, 1 + edges // bounds.PARTS_EDGES):
            rows = Graph(indptr[r0 : r1 + 1] - e0, cols[e0:e1] if narrow else cols[e0:e1].long(), None, label.numel())
            weights = None if network.weights is None else network.weights[e0:e1].float()
            count, own = ops.spmm(rows, one_hot, weights), label[r0:r1, None]
            inside[r0:r1] += torch.linalg.vecdot(count, one_hot[r0:r1])
            refused = numbers <= own if upward else numbers >= own
            most, at = count.masked_fill_(refused.logical_or_(~has_room[numbers]), -1.0).max(1)
            better = most > outside[r0:r1]
            outside[r0:r1] = torch.where(better, most, outside[r0:r1])
            target[r0:r1] = torch.where(better, numbers[at], target[r0:r1])
    return inside, outside, target


def _moved(label: Tensor, gain: Tensor, target: Tensor, size: Tensor, caps: Tensor, parts: int) -> Tensor:
    """`label` with those nodes moved that gain most, as far as their new parts have room; a part that holds more than
    it may also gives away nodes that lose least."""
    loads = _loads(size, label, parts)
    # What a move takes off a part that is over, as a share of what it may hold.
    over = loads > caps[:, None]
    relief = torch.zeros(label.numel(), device=label.device)
    for kind in over.any(1).nonzero().view(-1).tolist():
        relief += over[kind][label] * (size[kind] / caps[kind])
    nodes = (((gain > 0) | (relief > 0)) & (target != label)).nonzero().view(-1)
    worth = torch.where(gain > 0, gain, gain / relief)[nodes]
    nodes = nodes[worth.argsort(descending=True, stable=True)]
    # A part that is over gives away no more, at a loss, than it is over by.
    losing = gain[nodes] <= 0
    given = _running(label[nodes], size[:, nodes], parts) - size[:, nodes]
    excess = (loads - caps[:, None]).clamp(min=0)[:, label[nodes]]
    nodes = nodes[~losing | (given < excess).any(0)]
    # Room: taken in the order of gains.
    room = (caps[:, None] - loads)[:, target[nodes]]
    fits = _running(target[nodes], size[:, nodes], parts) <= room
    nodes = nodes[fits[0] & (fits[1] | (gain[nodes] <= 0))]  # edges in balance come first
    label = label.clone()
    label[nodes] = target[nodes]
    return label


def _running(group: Tensor, values: Tensor, parts: int) -> Tensor:
    """Running sums of each row of `values` within each group, in order."""
    order = group.argsort(stable=True)
    sums = values[:, order].cumsum(1)
    starts = torch.searchsorted(group[order], torch.arange(parts, device=group.device))
    before = torch.cat([sums.new_zeros(len(values), 1), sums], 1)[:, starts]
    out = torch.empty_like(sums)
    out[:, order] = sums - before[:, group[order]]
    return out
