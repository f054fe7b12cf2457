"""A network of nodes and weighted edges, and the steps on it that read every edge: making, moving, merging.

On the CPU they are node by node in C++ (cpp/communities.cpp); on CUDA sorts, scans, gathers and integer sums of chunks
of edges. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.hashing import mixed
from gnnaccel.lower import bounds

_DOWN, _UP = 1, 2  # cpp/kernels.h: Moves


@dataclass
class Network:
    """An undirected graph: node v's edges are cols[indptr[v]:indptr[v + 1]], without self-loops, weighted or not."""

    indptr: Tensor  # [n + 1], int64
    cols: Tensor
    weights: Tensor | None
    strength: Tensor  # [n], int64: each node's degree in the original graph, or the sum over its members
    total: float  # 2m: the sum of strength

    @property
    def weight_type(self) -> torch.dtype:
        """That holds every sum of weights."""
        return torch.int32 if self.total <= bounds.INT32_MAX else torch.int64

    @property
    def label_type(self) -> torch.dtype:
        """Of labels while nodes move: on the CPU as narrow as columns, as gathers of them are what it waits for."""
        return self.cols.dtype if self.cols.device.type == "cpu" else torch.int64

    def description(self) -> tuple:
        """As the binary takes it (cpp/kernels.h: Network)."""
        arrays = map(lib.pointer, (self.indptr, self.cols, self.weights, self.strength))
        return (*arrays, self.num_nodes, lib.INDEX_TYPES[self.cols.dtype], lib.INDEX_TYPES[self.weight_type])

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_connected(self) -> int:
        """Nodes with edges. Synchronises."""
        return int((self.indptr.diff() > 0).sum())


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


def chunks(indptr: Tensor, least: int) -> Iterator[tuple[int, int, int, int]]:
    """Ranges of rows with about equally many edges: first row, end, first edge, end. One synchronisation."""
    num_rows, nnz = indptr.numel() - 1, int(indptr[-1])
    parts = max(least, -(-nnz // bounds.COMMUNITY_CHUNK_EDGES))
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
    hashes = mixed(torch.arange(2 * graph.num_rows, device=graph.device)).view(-1, 2)
    if graph.device.type == "cpu":
        matrix = lib.csr(graph.indptr, graph.indices, None, graph.num_cols, graph.nnz)
        return not lib.launch("edge_skew", graph.device, matrix, lib.pointer(hashes))
    a, b = hashes[:, 0].contiguous(), hashes[:, 1].contiguous()
    skew = torch.zeros((), dtype=torch.int64, device=graph.device)
    for row, col in pairs(graph):
        skew += (a.index_select(0, row) * b.index_select(0, col)).sum()
        skew -= (b.index_select(0, row) * a.index_select(0, col)).sum()
    return not int(skew)


def pairs(graph: Graph) -> Iterator[tuple[Tensor, Tensor]]:
    """Row and column of each nonzero, chunk by chunk."""
    for r0, r1, e0, e1 in chunks(graph.indptr, bounds.COMMUNITY_CHUNKS):
        rows = torch.arange(r0, r1, device=graph.device, dtype=graph.indices.dtype)
        degree = graph.indptr[r0 : r1 + 1].diff()
        yield torch.repeat_interleave(rows, degree, output_size=e1 - e0), graph.indices[e0:e1]


def network_of(graph: Graph) -> tuple[Network, Tensor]:
    """The network of a graph, its nodes in hashed order, and the place of each node in it.

    Edges count in both directions; a rectangular graph is taken as a bipartite one of rows and columns. In hashed order
    a range of nodes is a random sample, which is what a chunk should be.
    """
    square = graph.num_rows == graph.num_cols
    n, device = graph.num_rows + (0 if square else graph.num_cols), graph.device
    order = mixed(torch.arange(n, device=device)).argsort(stable=True)
    place = inverse(order).to(torch.int32 if n <= bounds.INT32_MAX else torch.int64)
    # Each direction with the first node of its rows and of its columns.
    first = 0 if square else graph.num_rows
    directions = [(graph, 0, first)]
    if not is_symmetric(graph):
        directions.append((graph.transposed, first, 0))
    make = _nodes_of if device.type == "cpu" else _chunks_of
    strength, cols = make(directions, order, place)
    return Network(_from_zero(strength), cols, None, strength, float(cols.numel())), place


def _nodes_of(directions: list[tuple[Graph, int, int]], order: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """Degrees and neighbours of the network's nodes, node by node, in C++."""
    degree = torch.zeros_like(order)
    given = []
    for graph, first_row, first_col in directions:
        matrix = lib.csr(graph.indptr, graph.indices, None, graph.num_cols, graph.nnz)
        given.append((matrix, first_row, first_col, lib.pointer(place)))
    kind = lib.INDEX_TYPES[place.dtype]
    for arguments in given:
        lib.launch("network_degrees", place.device, *arguments, lib.pointer(degree), kind)
    begins = _from_zero(degree)
    cols = place.new_empty(int(begins[-1]))
    for arguments in given:  # begins moves on: a node's second direction goes behind its first
        lib.launch("network_edges", place.device, *arguments, lib.pointer(begins), lib.pointer(cols), kind)
    return degree, cols


def _chunks_of(directions: list[tuple[Graph, int, int]], order: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The same by gathers of a chunk of nodes at a time."""
    n, device = order.numel(), order.device
    parts = []  # each direction's indptr over all nodes, and the first node of its columns
    for graph, first_row, first_col in directions:
        counts = torch.zeros(n, dtype=torch.int64, device=device)
        counts[first_row : first_row + graph.num_rows] = graph.indptr.diff()
        parts.append((graph, _from_zero(counts), first_col))
    degree = torch.stack([indptr.diff() for _, indptr, _ in parts])[:, order]
    begins = _from_zero(degree.sum(0))
    strength, cols = degree.sum(0), [place[:0]]
    for r0, r1, e0, e1 in chunks(begins, bounds.COMMUNITY_CHUNKS):
        nodes, start = order[r0:r1], begins[r0:r1] - e0
        sizes = degree[:, r0:r1].sum(1).tolist()
        row, col = place.new_empty(e1 - e0), place.new_empty(e1 - e0)
        for i, (graph, indptr, shift) in enumerate(parts):
            owner, at = edges_of(indptr, nodes, sizes[i])
            target = at + (start - indptr[nodes])[owner]
            row[target] = owner.to(row.dtype) + r0
            col[target] = place[graph.indices.index_select(0, at) + shift]
            start = start + degree[i, r0:r1]
        loops = row[row == col].long()
        if loops.numel():
            col = col[row != col]
            strength.index_add_(0, loops, torch.full_like(loops, -1))
        cols.append(col)
    return strength, torch.cat(cols)


def move(
    network: Network, label: Tensor, volume: Tensor, chunk: tuple[int, int, int, int], gamma: float, turn: int
) -> None:
    """Move each node of the chunk to the best community of its neighbours, all at once; writes into `label`.

    `label` [num_nodes] is of `network.label_type`; `volume` [num_nodes] is the sum of strength over each community, and
    kept so. Ties go to the higher label, and after two passes moves go up or down in turn: two nodes cannot swap for
    ever.
    """
    step = _move_nodes if label.device.type == "cpu" else _move_chunk
    step(network, label, volume, chunk, gamma / network.total, 0 if turn < 2 else _DOWN if turn % 2 else _UP)


def _move_nodes(
    network: Network, label: Tensor, volume: Tensor, chunk: tuple[int, int, int, int], scale: float, allowed: int
) -> None:
    """Node by node, in C++."""
    arrays = lib.pointer(label), lib.pointer(volume)
    lib.launch("community_moves", label.device, network.description(), *arrays, *chunk[:2], scale, allowed)


def _move_chunk(
    network: Network, label: Tensor, volume: Tensor, chunk: tuple[int, int, int, int], scale: float, allowed: int
) -> None:
    """The same by sorting the chunk's edges."""
    r0, r1, e0, e1 = chunk
    node = torch.arange(r1 - r0, device=label.device)
    row = torch.repeat_interleave(node, network.indptr[r0 : r1 + 1].diff(), output_size=e1 - e0)
    weights = None if network.weights is None else network.weights[e0:e1]
    row, target, weight = _summed(row, label.index_select(0, network.cols[e0:e1]), weights, network.num_nodes)
    own, strength = label[r0:r1], network.strength[r0:r1]
    stay = -scale * (strength.double() * (volume[own] - strength).double())
    stays, k = target == own[row], strength[row]
    value = weight.double() - scale * (k.double() * (volume[target] - stays * k).double())
    value += stays * (1e-6 * value.abs() + 1e-9)  # above the rounding of the comparison, which is in float32
    best = _packed(stay, own).scatter_reduce_(0, row, _packed(value, target), "amax") & 0xFFFFFFFF
    if allowed:
        best = (torch.minimum if allowed == _DOWN else torch.maximum)(best, own)
    label[r0:r1] = best
    volume.zero_().index_add_(0, label, network.strength)


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


def merged(network: Network, label: Tensor, count: int) -> Network:
    """The network whose nodes are the communities; edges inside them are dropped, the others summed."""
    order = label.argsort(stable=True)
    begins = _from_zero(network.indptr.diff()[order])
    sizes = torch.zeros(count, dtype=torch.int64, device=label.device).index_add_(0, label, torch.ones_like(label))
    ends = _from_zero(sizes)
    strength = torch.zeros_like(sizes).index_add_(0, label, network.strength)
    merge = _merged_nodes if label.device.type == "cpu" else _merged_chunks
    indptr, cols, weights = merge(network, label, order, ends, begins[ends])
    return Network(indptr, cols, weights, strength, network.total)


def _merged_nodes(
    network: Network, label: Tensor, order: Tensor, ends: Tensor, edges: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """indptr, cols and weights of the merged network, community by community, in C++."""
    count = ends.numel() - 1
    degree = torch.empty_like(ends[1:])
    narrow = label.to(network.label_type)
    members = (*map(lib.pointer, (narrow, order, ends, edges)), count)
    lib.launch("community_degrees", label.device, network.description(), members, lib.pointer(degree))
    indptr = _from_zero(degree)
    cols = network.cols.new_empty(int(indptr[-1]))
    weights = cols.new_empty(cols.numel(), dtype=network.weight_type)
    out = map(lib.pointer, (indptr, cols, weights))
    lib.launch("community_edges", label.device, network.description(), members, *out)
    return indptr, cols, weights


def _merged_chunks(
    network: Network, label: Tensor, order: Tensor, ends: Tensor, edges: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by sorting the edges of a chunk of communities at a time: what a chunk sums is final."""
    count = ends.numel() - 1
    degree = torch.zeros(count, dtype=torch.int64, device=label.device)
    cols, sums = [network.cols[:0]], [torch.zeros(0, dtype=network.weight_type, device=label.device)]
    for c0, c1, e0, e1 in chunks(edges, bounds.COMMUNITY_CHUNKS):
        first, last = torch.stack([ends[c0], ends[c1]]).tolist()
        nodes = order[first:last]
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
        sums.append(weight.to(network.weight_type))
    return _from_zero(degree), torch.cat(cols), torch.cat(sums)
