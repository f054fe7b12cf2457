"""Communities of a graph, level by level, by parallel Louvain in plain torch.

A node v moves to the community C of its neighbours with the largest

    e(v, C) - gamma * k_v * K_C / 2m        e: edges between them, k: degree, K: sum of degrees, m: edges;

then communities become the nodes of a smaller graph, and so on (Blondel et al. 2008; in parallel: Lu, Halappanavar and
Kalyanaraman 2015). gamma starts where no community larger than `max_size` nodes of mean degree pays, and falls to 1
level by level, so that the hierarchy has groups for caches of each size.

Only sorts, scans, gathers and integer sums: one code for CPU and CUDA, without random numbers, and with the same result
on each run. Edges count in both directions. A rectangular graph is taken as a bipartite one of rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnaccel.graph import progress

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

# Measured on the graphs of benchmarks/graphs.py and six real ones, by the reuse of the order that results: 4 to 12
# passes, 4 to 16 chunks and settling at 1 to 5 % are within 2 % of each other (CPU, 2026-11).
_MAX_PASSES = 5
_SETTLED = 0.02  # share of connected nodes that still move
_WORTH_A_LEVEL = 0.1  # share of connected nodes that join another
_CHUNKS = 4  # at least: the nodes of one chunk move at once, knowing nothing of each other's moves
_CHUNK_EDGES = 1 << 24  # bounds the workspace, some 100 bytes for each edge of a chunk
_GAMMA_STEP = 4.0


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

    @property
    def num_connected(self) -> int:
        """Nodes with edges. Synchronises."""
        return int((self.indptr.diff() > 0).sum())


def communities(graph: Graph, *, max_size: int = 16384) -> Tensor:
    """Community of each node, such that most edges stay inside and its rows fit a cache.

    Parameters
    ----------
    graph : Graph
        Square or rectangular, directed or not.
    max_size : int
        A node joins a community only if the share of its edges that lead there exceeds (the community's sum of
        degrees) / (that of `max_size` average nodes). So this bounds the size without being one: in dense graphs the
        largest communities have about half as many nodes. Looser groups than that fall apart, rather than in two.

    Returns
    -------
    Tensor, int64
        Labels 0, 1, ...: [num_rows], or [num_rows + num_cols] for a rectangular graph, rows first. A node without
        edges is a community of its own.

    Raises
    ------
    ValueError
        If max_size is less than 1.

    Notes
    -----
    Deterministic; cost as of `reorder.row_order`.

    Example
    -------
    >>> label = communities(graph)
    """
    levels, label = hierarchy(graph, max_size, nested=False)
    for level in levels:
        label = level[label]
    return label


def edges_of(indptr: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For the `count` nonzeros of `rows`, one row after the other: index into rows, and position in the CSR arrays."""
    starts, degree = indptr.index_select(0, rows), indptr.diff().index_select(0, rows)
    index = torch.arange(rows.numel(), device=rows.device, dtype=indptr.dtype)
    owner = torch.repeat_interleave(index, degree, output_size=count)
    shift = starts - (degree.cumsum(0, dtype=indptr.dtype) - degree)
    return owner, shift.index_select(0, owner).add_(torch.arange(count, device=rows.device, dtype=indptr.dtype))


def _from_zero(counts: Tensor) -> Tensor:
    """Offsets [n + 1] of groups of these sizes."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(order.numel(), device=order.device)
    return ranks


def mixed(x: Tensor) -> Tensor:
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


def is_symmetric(graph: Graph) -> bool:
    """Whether the graph is square and has each edge (row, col) as often as (col, row).

    Compares sum of a[row] b[col] with sum of b[row] a[col], a and b hashes: equal by chance once in 2^64.
    """
    if graph.num_rows != graph.num_cols:
        return False
    a, b = mixed(torch.arange(2 * graph.num_rows, device=graph.device)).view(2, -1)
    skew = torch.zeros((), dtype=torch.int64, device=graph.device)
    for row, col in pairs(graph):
        skew += (a.index_select(0, row) * b.index_select(0, col)).sum()
        skew -= (b.index_select(0, row) * a.index_select(0, col)).sum()
    return not int(skew)


def pairs(graph: Graph) -> Iterator[tuple[Tensor, Tensor]]:
    """Row and column of each nonzero, chunk by chunk."""
    for r0, r1, e0, e1 in _chunks(graph.indptr, _CHUNKS):
        rows = torch.arange(r0, r1, device=graph.device, dtype=graph.indices.dtype)
        degree = graph.indptr[r0 : r1 + 1].diff()
        yield torch.repeat_interleave(rows, degree, output_size=e1 - e0), graph.indices[e0:e1]


def _network(graph: Graph) -> tuple[_Network, Tensor]:
    """The network of a graph, its nodes in hashed order, and the place of each node in it.

    In hashed order a range of nodes is a random sample, which is what a chunk should be.
    """
    square = graph.num_rows == graph.num_cols
    n, device = graph.num_rows + (0 if square else graph.num_cols), graph.device
    order = mixed(torch.arange(n, device=device)).argsort(stable=True)
    place = inverse(order).to(torch.int32 if n < 2**31 else torch.int64)
    # Each direction's indptr over all nodes, and the first node of its columns.
    parts = []
    for d in (graph,) if is_symmetric(graph) else (graph, graph.transposed):
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
            owner, at = edges_of(indptr, nodes, sizes[i])
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


def hierarchy(graph: Graph, max_size: int, *, nested: bool = True) -> tuple[list[Tensor], Tensor]:
    """Labels level by level (a level's nodes are the communities of the one before), and each node's place in it.

    `nested`: go on to ever larger communities, instead of stopping at the first resolution.
    """
    if max_size < 1:
        raise ValueError(f"communities: max_size: expected at least 1, got {max_size}")
    with progress.shown(f"communities of {graph}") as say:
        network, place = _network(graph)
        gamma = max(1.0, network.num_nodes / max_size)
        levels: list[Tensor] = []
        while network.num_nodes > 1 and network.cols.numel():
            level = f"level {len(levels) + 1}, {network.num_nodes:,} nodes"
            label, count = _local_moves(network, gamma, say, level)
            if network.num_nodes - count > _WORTH_A_LEVEL * network.num_connected:
                say(f"{level}, merging")
                network = _merged(network, label, count)
                levels.append(label)
            elif gamma == 1.0 or not nested:
                break
            if nested:
                gamma = max(1.0, gamma / _GAMMA_STEP)
    return levels, place.long()


def _local_moves(network: _Network, gamma: float, say: Callable[[str], None], level: str) -> tuple[Tensor, int]:
    """Labels 0..count-1 after passes of moves, starting with each node by itself; and their count."""
    n, few = network.num_nodes, int(_SETTLED * network.num_connected)
    label = torch.arange(n, device=network.cols.device)
    chunks = list(_chunks(network.indptr, min(_CHUNKS, n)))
    for turn in range(_MAX_PASSES):
        before = label.clone()
        for done, chunk in enumerate(chunks):
            say(f"{level}, pass {turn + 1} of at most {_MAX_PASSES}, {done / len(chunks):.0%}")
            _move(network, label, chunk, gamma, turn)
        if int((label != before).sum()) <= few:
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
    for c0, c1, e0, e1 in _chunks(firsts, _CHUNKS):
        span = torch.stack([ends[c0] - sizes[c0], ends[c1 - 1]]).tolist()
        nodes = order[span[0] : span[1]]
        owner, at = edges_of(network.indptr, nodes, e1 - e0)
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
