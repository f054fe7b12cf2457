"""A processing order of a graph's rows with locality: rows that read the same columns become neighbours.

Graph clustering based reordering, as of GNNAdvisor (Wang et al., OSDI 2021), with communities found by parallel
Louvain (Blondel et al. 2008; Lu, Halappanavar, Kalyanaraman 2015). A node v moves to the community C with the largest

    e(v, C) - gamma * k_v * K_C / 2m        e: edges between them, k: degree, K: sum of degrees, m: edges,

then communities become the nodes of a smaller graph, and so on. gamma starts where a community of `max_size` nodes
of mean degree is as large as pays, and falls to 1 level by level, so that the hierarchy has groups for each cache.

Only sorts, scans, gathers and integer sums: one code for CPU and CUDA, without random numbers, and with the same result
on each run. Edges are treated as undirected. A rectangular graph is a bipartite one of rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

# Smaller chunks and more passes bought nothing on the graphs of benchmarks/graphs.py (CPU, 2025-11).
_MAX_PASSES = 8
_SETTLED = 0.01  # share of nodes that still move
_CHUNKS = 4  # at least: the nodes of one chunk move at once, knowing nothing of each other's moves
_CHUNK_EDGES = 1 << 24  # bounds the workspace, some 70 bytes for each edge of a chunk
_GAMMA_STEP = 4.0
_WINDOW = 8192  # nonzeros that the warps of one multiprocessor work on at a time


@dataclass
class _Network:
    """An undirected graph: node v's edges are cols[indptr[v]:indptr[v + 1]], without self-loops, weighted or not."""

    indptr: Tensor  # [n + 1], int64
    cols: Tensor
    weights: Tensor | None
    strength: Tensor  # [n], int64: each node's degree in the original graph, or the sum over its members
    total: float  # 2m: the sum of strength

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1


def row_order(graph: Graph, *, max_size: int = 4096, least_gain: float | None = 0.05) -> Tensor | None:
    """Order in which to process the rows, so that rows close to each other read the same columns.

    Rows are sorted by community, coarse to fine, and by falling degree inside the finest ones. Where all edges of a
    square graph run between its first nodes and the others (users and items), each side is sorted by itself.

    Parameters
    ----------
    graph : Graph
        Square or rectangular, directed or not.
    max_size : int
        As in `communities`.
    least_gain : float or None
        Share by which the order must lower the distinct columns per nonzero (1 - `reuse`); None: give it anyway.

    Returns
    -------
    Tensor [num_rows], int64, or None
        A permutation: position -> row. None if it gains too little over the order as given.

    Notes
    -----
    Deterministic. Each level sorts its edges up to 8 times, in chunks; the first level is most of the cost. At
    most some 30 bytes per edge of an undirected graph, and twice that of a directed one, beside the graph. A
    handful of synchronisations per chunk. Nothing is computed where no order can gain.

    Example
    -------
    >>> order = row_order(graph)
    >>> indptr, indices, edge_ids, row_ids = permuted_rows(graph, order)
    """
    most_reads = None
    if least_gain is not None:
        most_reads = (1 - least_gain) * (1 - reuse(graph))
        if _fewest_reads(graph) > most_reads:
            return None
    directions, split = _shape_of(graph)
    levels, place = _hierarchy(graph, directions, max_size, nested=True)
    rank = None
    for label in reversed(levels[1:]):
        rank = _inverse((label if rank is None else rank[label]).argsort(stable=True))
    order = graph.indptr.diff().argsort(descending=True, stable=True)
    if levels:
        label = levels[0][place[order]]
        order = order[(label if rank is None else rank[label]).argsort(stable=True)]
    if split is not None:
        order = order[(order >= split).to(torch.int8).argsort(stable=True)]
    if most_reads is not None and 1 - reuse(graph, order) > most_reads:
        return None
    return order


def communities(graph: Graph, *, max_size: int = 4096) -> Tensor:
    """Community of each node, such that most edges stay inside and its rows fit a cache.

    Parameters
    ----------
    graph : Graph
        Square or rectangular, directed or not.
    max_size : int
        A node joins a community only if its share of edges inside exceeds the community's share of the degrees of
        `max_size` average nodes; so communities of dense graphs have at most that many nodes, usually half.

    Returns
    -------
    Tensor, int64
        Labels 0, 1, ...: [num_rows], or [num_rows + num_cols] for a rectangular graph, rows first. A node without
        edges is a community of its own.

    Notes
    -----
    Deterministic; cost as of `row_order`.

    Example
    -------
    >>> label = communities(graph)
    """
    directions, _ = _shape_of(graph)
    levels, label = _hierarchy(graph, directions, max_size, nested=False)
    for level in levels:
        label = level[label]
    return label


def reuse(graph: Graph, order: Tensor | None = None, *, window: int = _WINDOW, samples: int = 256) -> float:
    """Share of nonzeros whose column an earlier nonzero of the same window of consecutive nonzeros has read.

    reuse = 1 - (distinct columns) / nonzeros, mean over windows: the share of gathers that a small cache can save.

    Parameters
    ----------
    graph : Graph
    order : Tensor [num_rows], int64, optional
        Position -> row; default: the order as given.
    window : int
        Nonzeros that share a cache.
    samples : int
        Windows to look at, evenly spread.

    Returns
    -------
    float
        From 0 (no column is read twice) to nearly 1; 0 for a graph without edges.
    """
    nnz = graph.nnz
    if nnz == 0:
        return 0.0
    window = min(window, nnz)
    count = nnz // window
    samples = min(samples, count)
    at = torch.arange(samples, device=graph.device) * count // samples * window
    at = at[:, None] + torch.arange(window, device=graph.device)
    if order is not None:
        degree = graph.indptr.diff().index_select(0, order)
        ends = degree.cumsum(0)
        position = torch.searchsorted(ends, at, right=True)
        at = at - (ends - degree)[position] + graph.indptr[order[position]]
    cols = graph.indices[at].sort(dim=1).values
    return int((cols[:, 1:] == cols[:, :-1]).sum()) / cols.numel()


def permuted_rows(graph: Graph, order: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CSR arrays with the rows in another order; columns keep their numbers.

    Parameters
    ----------
    graph : Graph
    order : Tensor [num_rows], int32 or int64
        A permutation: position -> row. Not checked.

    Returns
    -------
    indptr, indices, edge_ids, row_ids : Tensor, the graph's index dtype
        Position p holds row row_ids[p] of the graph, its nonzeros in the order they had; edge_ids is never None.
    """
    dtype = graph.indptr.dtype
    indptr = torch.zeros_like(graph.indptr)
    torch.cumsum(graph.indptr.diff().index_select(0, order), 0, dtype=dtype, out=indptr[1:])
    _, at = _edges_of(graph.indptr, order, graph.nnz)
    edge_ids = at if graph.edge_ids is None else graph.edge_ids.index_select(0, at)
    return indptr, graph.indices.index_select(0, at), edge_ids, order.to(dtype)


def _edges_of(indptr: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For the `count` nonzeros of `rows`, one row after the other: index into rows, and position in the CSR arrays."""
    starts, degree = indptr.index_select(0, rows), indptr.diff().index_select(0, rows)
    index = torch.arange(rows.numel(), device=rows.device, dtype=indptr.dtype)
    owner = torch.repeat_interleave(index, degree, output_size=count)
    shift = starts - (degree.cumsum(0, dtype=indptr.dtype) - degree)
    return owner, shift.index_select(0, owner).add_(torch.arange(count, device=rows.device, dtype=indptr.dtype))


def _from_zero(counts: Tensor) -> Tensor:
    """Offsets [n + 1] of groups of these sizes."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def _mixed(x: Tensor) -> Tensor:
    """A hash of int64 values (multiply and fold twice; products wrap around)."""
    for factor, shift in ((-7046029254386353131, 32), (-4658895280553007687, 29)):
        x = (x + 1) * factor
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
    return x


def _chunks(indptr: Tensor, least: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of rows with about equally many edges: first row, end, first edge, end. One synchronisation."""
    num_rows, nnz = indptr.numel() - 1, int(indptr[-1])
    parts = max(least, -(-nnz // _CHUNK_EDGES))
    wanted = torch.arange(1, parts, device=indptr.device) * nnz // parts
    cuts = torch.searchsorted(indptr, wanted.to(indptr.dtype))
    both = torch.stack([cuts, indptr[cuts].long()]).tolist() if parts > 1 else [[], []]
    rows, edges = [0, *both[0], num_rows], [0, *both[1], nnz]
    for i in range(parts):
        if edges[i] < edges[i + 1]:
            yield rows[i], rows[i + 1], edges[i], edges[i + 1]


def _fewest_reads(graph: Graph) -> float:
    """What no order can fall below: each column that occurs is read once, and one window is all of a small graph."""
    if graph.nnz <= _WINDOW:
        return 1.0
    seen = torch.zeros(graph.num_cols, dtype=torch.bool, device=graph.device)
    seen[graph.indices] = True
    return int(seen.sum()) / graph.nnz


def _shape_of(graph: Graph) -> tuple[tuple[Graph, ...], int | None]:
    """The graph and, unless it is symmetric, its transposed; and where a square graph splits into two sides.

    Symmetric means that sum of a[row] b[col] equals sum of b[row] a[col] for hashes a and b: by chance once in 2^64.
    """
    if graph.num_rows != graph.num_cols:
        return (graph, graph.transposed), None
    n, device = graph.num_rows, graph.device
    a, b = _mixed(torch.arange(2 * n, device=device)).view(2, n)
    skew = torch.zeros((), dtype=torch.int64, device=device)
    low, high = torch.full_like(skew, -1), torch.full_like(skew, n)
    for r0, r1, e0, e1 in _chunks(graph.indptr, 1):
        rows = torch.arange(r0, r1, device=device, dtype=graph.indices.dtype)
        row = torch.repeat_interleave(rows, graph.indptr[r0 : r1 + 1].diff(), output_size=e1 - e0)
        col = graph.indices[e0:e1]
        skew += (a.index_select(0, row) * b.index_select(0, col)).sum()
        skew -= (b.index_select(0, row) * a.index_select(0, col)).sum()
        loop = row == col
        low = torch.maximum(low, torch.minimum(row, col).masked_fill_(loop, -1).max())
        high = torch.minimum(high, torch.maximum(row, col).masked_fill_(loop, n).min())
    unequal, lowest, highest = torch.stack([skew, low, high]).tolist()
    directions = (graph, graph.transposed) if unequal else (graph,)
    return directions, highest if 0 <= lowest < highest < n else None


def _network(graph: Graph, directions: tuple[Graph, ...]) -> tuple[_Network, Tensor]:
    """The network of a graph, its nodes in hashed order, and the place of each node in it.

    In hashed order a range of nodes is a random sample, which is what a chunk should be.
    """
    square = graph.num_rows == graph.num_cols
    n, device = graph.num_rows + (0 if square else graph.num_cols), graph.device
    order = _mixed(torch.arange(n, device=device)).argsort(stable=True)
    place = _inverse(order).to(torch.int32 if n < 2**31 else torch.int64)
    # Each direction's indptr over all nodes, and the first node of its columns.
    parts = []
    for d in directions:
        first_row, first_col = (0, 0) if square else (0, graph.num_rows) if d is graph else (graph.num_rows, 0)
        counts = torch.zeros(n, dtype=torch.int64, device=device)
        counts[first_row : first_row + d.num_rows] = d.indptr.diff()
        parts.append((d, _from_zero(counts), first_col))
    degree = torch.stack([indptr.diff() for _, indptr, _ in parts])[:, order]
    bounds = _from_zero(degree.sum(0))
    strength, cols = degree.sum(0), [place[:0]]
    for r0, r1, e0, e1 in _chunks(bounds, _CHUNKS):
        nodes, start = order[r0:r1], bounds[r0:r1] - e0
        sizes = degree[:, r0:r1].sum(1).tolist()
        row, col = place.new_empty(e1 - e0), place.new_empty(e1 - e0)
        for i, (d, indptr, shift) in enumerate(parts):
            owner, at = _edges_of(indptr, nodes, sizes[i])
            target = at + (start - indptr[nodes])[owner]
            row[target] = owner.to(row.dtype) + r0
            col[target] = place[d.indices.index_select(0, at) + shift]
            start = start + degree[i, r0:r1]
        loops = row[row == col].long()
        if loops.numel():
            col = col[row != col]
            strength.index_add_(0, loops, torch.full_like(loops, -1))
        cols.append(col)
    edges = torch.cat(cols)
    return _Network(_from_zero(strength), edges, None, strength, float(edges.numel())), place


def _hierarchy(graph: Graph, directions: tuple[Graph, ...], max_size: int, nested: bool) -> tuple[list[Tensor], Tensor]:
    """Labels level by level (a level's nodes are the communities of the one before), and each node's place in it.

    `nested`: go on to ever larger communities, instead of stopping at the first resolution.
    """
    if max_size < 1:
        raise ValueError(f"reorder: max_size: expected at least 1, got {max_size}")
    network, place = _network(graph, directions)
    gamma = max(1.0, network.num_nodes / max_size)
    levels: list[Tensor] = []
    while network.num_nodes > 1 and network.cols.numel():
        label, count = _local_moves(network, gamma)
        settled = count > 0.9 * network.num_nodes
        if count < network.num_nodes:
            network = _merged(network, label, count)
            levels.append(label)
        if settled and (gamma == 1.0 or not nested):
            break
        if nested:
            gamma = max(1.0, gamma / _GAMMA_STEP)
    return levels, place.long()


def _local_moves(network: _Network, gamma: float) -> tuple[Tensor, int]:
    """Labels 0..count-1 after passes of moves, starting with each node by itself; and their count."""
    n = network.num_nodes
    label = torch.arange(n, device=network.cols.device)
    chunks = list(_chunks(network.indptr, min(_CHUNKS, n)))
    for turn in range(_MAX_PASSES):
        before = label.clone()
        for chunk in chunks:
            _move(network, label, chunk, gamma, turn)
        if int((label != before).sum()) <= _SETTLED * n:
            break
    present = torch.zeros(n, dtype=torch.int64, device=label.device)
    present[label] = 1
    compact = present.cumsum(0) - 1
    return compact[label], int(compact[-1]) + 1


def _move(network: _Network, label: Tensor, chunk: tuple[int, int, int, int], gamma: float, turn: int) -> None:
    """Move each node of the chunk to the best community of its neighbours; writes into `label`.

    Ties go to the higher label, and after two passes moves go up or down in turn: two nodes cannot swap for ever.
    """
    r0, r1, e0, e1 = chunk
    node = torch.arange(r1 - r0, device=label.device)
    row = torch.repeat_interleave(node, network.indptr[r0 : r1 + 1].diff(), output_size=e1 - e0)
    weights = None if network.weights is None else network.weights[e0:e1]
    row, target, weight = _summed(row, label.index_select(0, network.cols[e0:e1]), weights, network.num_nodes)
    volume = torch.zeros_like(label).index_add_(0, label, network.strength)
    own, strength = label[r0:r1], network.strength[r0:r1]
    scale = gamma / network.total
    stay = -scale * (strength.double() * (volume[own] - strength).double())
    stays, k = target == own[row], strength[row]
    value = weight.double() - scale * (k.double() * (volume[target] - stays * k).double())
    value += stays * (1e-6 * value.abs() + 1e-9)  # above the rounding of the comparison, which is in float32
    best = _packed(stay, own).scatter_reduce_(0, row, _packed(value, target), "amax") & 0xFFFFFFFF
    if turn >= 2:
        best = torch.minimum(best, own) if turn % 2 else torch.maximum(best, own)
    label[r0:r1] = best


def _packed(value: Tensor, label: Tensor) -> Tensor:
    """int64 that compare as (value rounded to float32, label)."""
    bits = value.float().view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.long() << 32) | label


def _summed(row: Tensor, label: Tensor, weights: Tensor | None, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Equal (row, label) pairs once each, sorted, with their weights summed; label < limit. One synchronisation."""
    bits = max(1, (limit - 1).bit_length())
    key, order = ((row << bits) | label).sort()
    last = (key != torch.cat([key[1:], key.new_full((1,), -1)])).nonzero().squeeze(1)
    up_to = last + 1 if weights is None else weights[order].cumsum(0)[last]
    weight = up_to.diff(prepend=up_to.new_zeros(1))
    key = key[last]
    return key >> bits, key & ((1 << bits) - 1), weight


def _merged(network: _Network, label: Tensor, count: int) -> _Network:
    """The network whose nodes are the communities; edges inside them are dropped, the others summed."""
    order = label.argsort(stable=True)
    bounds = _from_zero(network.indptr.diff()[order])
    sizes = torch.zeros(count, dtype=torch.int64, device=label.device).index_add_(0, label, torch.ones_like(label))
    ends = sizes.cumsum(0)
    # Chunks of whole communities, so that what a chunk sums is final.
    firsts = torch.cat([bounds[:1], bounds[ends]])
    small = torch.int32 if network.total < 2**31 else torch.int64
    degree = torch.zeros(count, dtype=torch.int64, device=label.device)
    cols, sums = [network.cols[:0]], [torch.zeros(0, dtype=small, device=label.device)]
    for c0, c1, e0, e1 in _chunks(firsts, 1):
        span = torch.stack([ends[c0] - sizes[c0], ends[c1 - 1]]).tolist()
        nodes = order[span[0] : span[1]]
        owner, at = _edges_of(network.indptr, nodes, e1 - e0)
        row = label[nodes][owner]
        col = label.index_select(0, network.cols.index_select(0, at))
        leaves = (row != col).nonzero().squeeze(1)
        if leaves.numel() == 0:
            continue
        weights = None if network.weights is None else network.weights[at[leaves]]
        row, col, weight = _summed(row[leaves], col[leaves], weights, count)
        degree.index_add_(0, row, torch.ones_like(row))
        cols.append(col.to(network.cols.dtype))
        sums.append(weight.to(small))
    strength = torch.zeros_like(degree).index_add_(0, label, network.strength)
    indptr = _from_zero(degree)
    return _Network(indptr, torch.cat(cols), torch.cat(sums), strength, network.total)
