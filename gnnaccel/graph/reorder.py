"""A processing order of a graph's rows with locality: rows that read the same columns become neighbours.

Graph clustering based reordering, as in GNNAdvisor (Wang et al., OSDI 2021): rows are sorted by the communities that
`gnnaccel.graph.community` finds. Rows alone change place; columns keep their numbers, so that features stay as they
are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnaccel.graph.community import hierarchy
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.network import inverse, pairs
from gnnaccel.lower import bounds

ORDERS = ("communities", "rcm", "degree")


def row_order(
    graph: Graph, *, max_size: int | None = None, least_gain: float | None = bounds.ORDER_GAIN
) -> Tensor | None:
    """Order in which to process the rows, so that rows close to each other read the same columns.

    Rows are sorted by community, coarse to fine, and by falling degree inside the finest ones. Where all edges of a
    square graph run between its first nodes and the others (users and items), each side is sorted by itself.

    Parameters
    ----------
    graph : Graph
        Square or rectangular, directed or not.
    max_size : int, optional
        Of the finest groups, as in `community.communities`; further levels make larger ones. Default: 4096, and 16384
        from a mean degree of 128 on, which keeps communities whole, whose rows then run in step by length:
        reddit-like, 64 features on an H200, 2.07 ms with 16384 and 2.41 with 4096.
    least_gain : float or None
        Share by which the order must lower the distinct columns per nonzero (1 - `hit_rate`); None: give it anyway.

    Returns
    -------
    Tensor [num_rows], int64, or None
        A permutation: position -> row. None if it gains too little over the order as given.

    Raises
    ------
    ValueError
        If max_size is less than 1.

    Notes
    -----
    Deterministic. Each level reads its edges seven times (on CUDA it sorts them, in chunks that synchronise); the
    first level is most of the cost. Memory beside the graph: on the CPU 4 to 16 bytes per edge and some 300 per node,
    on CUDA 30 per edge; twice as much and more unless the graph is symmetric, which also needs the transposed. Graphs
    that no order can help return at once. Times and memory: benchmarks/communities.py.
    """
    most_reads = None
    if least_gain is not None:
        most_reads = (1 - least_gain) * (1 - hit_rate(graph))
        if _fewest_reads(graph) > most_reads:
            return None
    if max_size is None:
        max_size = (
            bounds.ORDER_COMMUNITY_DENSE
            if graph.nnz >= bounds.ORDER_DENSE_DEGREE * graph.num_rows
            else bounds.ORDER_COMMUNITY
        )
    levels, place = hierarchy(graph, max_size)
    rank = None
    for label in reversed(levels[1:]):
        rank = inverse((label if rank is None else rank[label]).argsort(stable=True))
    order = graph.indptr.diff().argsort(descending=True, stable=True)
    if levels:
        label = levels[0][place[order]]
        order = order[(label if rank is None else rank[label]).argsort(stable=True)]
    side = _second_side(graph)
    if side is not None:
        order = order[(order >= side).to(torch.int8).argsort(stable=True)]
    if most_reads is not None and 1 - hit_rate(graph, order) > most_reads:
        return None
    return order


def order_by(graph: Graph, ordering: str) -> Tensor | None:
    """Order in which to process the rows.

    Parameters
    ----------
    graph : Graph
    ordering : {"communities", "rcm", "degree"}
        "communities": `row_order`. "rcm": reverse Cuthill-McKee, for a small bandwidth, where that gains as much; on
        the host, by SciPy. "degree": by falling degree, whatever it gains.

    Returns
    -------
    Tensor [num_rows], int64, or None
        As of `row_order`.

    Raises
    ------
    ValueError
        For "rcm" of a rectangular graph. ImportError: for "rcm" without SciPy.
    """
    if ordering == "communities":
        return row_order(graph)
    if ordering == "degree":
        return graph.indptr.diff().argsort(descending=True, stable=True)
    order = _cuthill_mckee(graph)
    if order is None:
        return None
    return order if 1 - hit_rate(graph, order) <= (1 - bounds.ORDER_GAIN) * (1 - hit_rate(graph)) else None


def _cuthill_mckee(graph: Graph) -> Tensor | None:
    if graph.num_rows != graph.num_cols:
        raise ValueError(f"'rcm' takes a graph with as many rows as columns, got {graph}")
    if graph.nnz == 0:
        return None
    try:
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import reverse_cuthill_mckee
    except ImportError as error:
        raise ImportError("prepare: reorder='rcm' needs SciPy; install scipy") from error
    indptr, indices = graph.indptr.cpu().numpy(), graph.indices.cpu().numpy()
    ones = np.ones(indices.size, dtype=np.int32)
    matrix = csr_matrix((ones, indices, indptr), shape=(graph.num_rows, graph.num_cols))
    order = reverse_cuthill_mckee((matrix + matrix.T).tocsr(), symmetric_mode=True)
    return torch.from_numpy(order.astype(np.int64)).to(graph.device)


def given_order(graph: Graph) -> Tensor | None:
    """The rows as given, each block of a few hundred by falling length, if neighbours share sources; else None.

    None also of a small graph.

    Synchronises: it counts sources in a sample (`hit_rate`).
    """
    if graph.nnz < bounds.ORDER_WINDOWS * bounds.ORDER_WINDOW:
        return None
    by_length = graph.indptr.diff().argsort(descending=True, stable=True)
    in_blocks = by_length[torch.argsort(by_length // bounds.ORDER_BLOCK, stable=True)]
    local = 1 - hit_rate(graph, in_blocks) <= bounds.ORDER_LOCAL * (1 - hit_rate(graph, by_length))
    return in_blocks if local else None


def hit_rate(
    graph: Graph, order: Tensor | None = None, *, window: int = bounds.ORDER_WINDOW, samples: int = 256
) -> float:
    """Share of nonzeros whose column an earlier nonzero of the same window of consecutive nonzeros has read.

    hit rate = 1 - (distinct columns) / nonzeros, mean over windows: the share of gathers that a small cache can save.

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
    shares = hit_rates(graph, order, window=window, samples=samples)
    return float(shares.mean()) if shares.numel() else 0.0


def hit_rates(
    graph: Graph, order: Tensor | None = None, *, window: int = bounds.ORDER_WINDOW, samples: int = 256
) -> Tensor:
    """The same of each window: [at most samples], float64."""
    nnz = graph.nnz
    if nnz == 0:
        return graph.indptr.new_empty(0, dtype=torch.float64)
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
    return (cols[:, 1:] == cols[:, :-1]).sum(1).double() / window


def _fewest_reads(graph: Graph) -> float:
    """What no order can fall below: each column that occurs is read once, and one window is all of a small graph."""
    if graph.nnz <= bounds.ORDER_WINDOW:
        return 1.0
    seen = torch.zeros(graph.num_cols, dtype=torch.bool, device=graph.device)
    seen[graph.indices] = True
    return int(seen.sum()) / graph.nnz


def _second_side(graph: Graph) -> int | None:
    """First node of the second side where all edges of a square graph, but loops, run between two ranges of nodes."""
    n = graph.num_rows
    if n != graph.num_cols:
        return None
    lowest, highest = -1, n
    for row, col in pairs(graph):
        loop = row == col
        low = torch.minimum(row, col).masked_fill_(loop, -1).max()
        high = torch.maximum(row, col).masked_fill_(loop, n).min()
        low, high = torch.stack([low, high]).tolist()
        lowest, highest = max(lowest, low), min(highest, high)
        if lowest >= highest:  # as in most graphs, found in the first chunk
            return None
    return highest if 0 <= lowest < highest < n else None
