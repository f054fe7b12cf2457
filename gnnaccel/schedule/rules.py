"""Which kernel, cut and arrangement serve the sums over a graph on CUDA, by rule: from the graph's size and degrees.

Set by benchmarks/advisor.py, groups.py and cuda_kernels.py on an H200; `tune` measures instead (docs/advisor.md).
"""

from __future__ import annotations

import math

import torch

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.schedule.worklist import GROUP_SIZES, LANES, THREADS, Arrangement, Kernel, Plan


def plan_of(graph: Graph, lanes: int, clustered: bool, *, reordered: bool = False) -> Plan:
    """How to make the list for rows of `lanes`, and what reads it.

    `clustered`: an order with locality is known; `reordered`: it is not the one that the rows were given in.
    """
    wide, lanes = lanes > bounds.ROW_LANES, min(lanes, bounds.ROW_LANES)
    processors, cache = _chip(graph)
    # Of all nonzeros, for each worker on the chip.
    each = bounds.PIECE_SHARE_NARROW if lanes == LANES[0] else bounds.PIECE_SHARE
    share = each * graph.nnz * lanes / (processors * bounds.PROCESSOR_THREADS)
    # Pieces about as long as most rows keep in step with them; without clusters it pays to leave more rows whole.
    usual = 1 << math.ceil(math.log2(max(1, graph.nnz * (1 if clustered else 2) / max(1, graph.num_rows))))
    most = max(bounds.PIECE_MOST, min(bounds.PIECE_MOST_DENSE, usual))
    least = max(bounds.PIECE_LEAST, min(bounds.PIECE_LEAST_USUAL, usual))
    cap = max(least, min(most, -(-int(share) // 32) * 32))
    arrangement = _arrangement_of(graph, lanes, share, clustered, reordered)
    return Plan(cap, arrangement, *_kernel_of(graph, lanes, wide, cache, clustered))


def groups_of(graph: Graph, lanes: int, arrangement: Arrangement) -> Plan:
    """The same for groups of neighbours: as long as most rows, or as leaves every worker on the chip something to do.

    Up to four times as long, and in larger blocks, if a block then has all groups of the longest row: no part of a row
    is left to a second kernel. Not with fewer blocks than multiprocessors.
    """
    width, shortest, few = min(lanes, bounds.ROW_LANES), bounds.GROUP_LEAST, bounds.GROUP_WORKERS
    processors, _ = _chip(graph)
    share = 1 << round(math.log2(max(1, graph.nnz * width / (processors * bounds.PROCESSOR_THREADS))))
    if lanes > 2 * bounds.ROW_LANES and share > 1:
        width, shortest, few, share = 2 * bounds.ROW_LANES, bounds.GROUP_LEAST_OF_WARP, bounds.GROUP_WARPS, 4 * share
    usual = 1 << math.ceil(math.log2(max(1, graph.nnz / max(1, graph.num_rows))))
    least = min(max(shortest, share, usual), GROUP_SIZES[-1])
    size, workers = least, few
    largest, most = min(4 * least, GROUP_SIZES[-1]), THREADS[-1] // width
    while size * workers < graph.longest_row and (size < largest or workers < most):
        if workers < most and (2 * workers <= size or size == largest):
            workers *= 2
        else:
            size *= 2
    if size * workers < graph.longest_row or graph.nnz < processors * size * workers:
        size, workers = least, few
    return Plan(size, arrangement, Kernel.GROUPS, width, workers * width)


def groups_pay(graph: Graph, lanes: int, plan: Plan) -> bool:
    """True if groups of neighbours are to serve the sums that `plan`, of whole rows, would cut rows for.

    A second launch takes a third of the time of a sum over a small graph.
    """
    processors, _ = _chip(graph)
    small = graph.nnz * lanes <= bounds.GROUPS_SMALL * processors * bounds.PROCESSOR_THREADS
    return small and plan.kernel is Kernel.ROWS and graph.longest_row > plan.cap


def _arrangement_of(graph: Graph, lanes: int, share: float, clustered: bool, reordered: bool) -> Arrangement:
    if not clustered:
        return Arrangement.LENGTH
    short = graph.nnz < bounds.LONG_ROWS_DEGREE * graph.num_rows
    if 16 * lanes <= bounds.NARROW_ROW_BYTES:
        loose = short and not reordered and _hub_share(graph) < bounds.FEW_HUBS
        return Arrangement.HUBS if loose else Arrangement.BUCKETS
    if share >= bounds.PIECE_MOST_DENSE:  # balance comes by itself
        return Arrangement.CLUSTERS
    return Arrangement.HUBS if short else Arrangement.BUCKETS


def _kernel_of(graph: Graph, lanes: int, wide: bool, cache: int, clustered: bool) -> tuple[Kernel, int]:
    """What reads the list, and the lanes of a worker."""
    # Rows this short leave a worker waiting; one that streams does not. That costs a second launch, which only pays
    # where there is much to stream.
    if wide and graph.nnz < bounds.STREAMED_DEGREE * graph.num_rows and graph.nnz >= bounds.STREAMED_EDGES:
        return Kernel.BALANCED, 2 * bounds.ROW_LANES
    if lanes == bounds.ROW_LANES and not clustered:
        # Half of a slice of the sources stays in L2 where the whole does not.
        table = 16 * lanes * graph.num_cols
        least, most = bounds.HALVED_L2
        if least * cache < table <= most * cache and graph.nnz < bounds.LONG_ROWS_DEGREE * graph.num_rows:
            return Kernel.BALANCED, lanes // 2
        # Narrow slices keep more rows in step and a smaller table in the caches.
        if graph.nnz >= bounds.HALVED_DEGREE * max(1, graph.num_rows):
            return Kernel.ROWS, lanes // 2
    return Kernel.ROWS, lanes


def _hub_share(graph: Graph) -> float:
    """Share of the nonzeros that are in rows much longer than the mean. Synchronises."""
    degree = graph.indptr.diff().double()
    return float(degree[degree > bounds.HUB * degree.mean()].sum()) / max(1, graph.nnz)


def _chip(graph: Graph) -> tuple[int, int]:
    """Multiprocessors and bytes of L2 of the graph's GPU; of an H200 for a graph on the CPU."""
    if not graph.indptr.is_cuda:
        return 132, bounds.L2_BYTES
    chip = torch.cuda.get_device_properties(graph.device)
    return chip.multi_processor_count, getattr(chip, "L2_cache_size", bounds.L2_BYTES)  # torch has it from 2.5 on
