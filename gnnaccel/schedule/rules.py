"""Which kernel, cut and arrangement serve the sums over a graph on CUDA, by rule: from the graph's size and degrees.

Set by benchmarks/advisor.py, groups.py and cuda_kernels.py on an H200; `tune` measures instead (docs/advisor.md).
"""

from __future__ import annotations

import math

import torch

from gnnaccel.graph.csr import Graph
from gnnaccel.schedule.worklist import GROUP_SIZES, HUB, LANES, THREADS, Arrangement, Kernel, Plan

_MIN_CAP, _LEAST_MAX_CAP, _MAX_CAP = 32, 256, 1024
_LEAST_CAP = 64  # where most rows have as many: pieces of small graphs
_THREADS, _MOST_LANES = 1536, 16  # that a multiprocessor holds in these kernels; of a worker by rows
# Of groups of neighbours: the fewest in one, and workers of a block, from which they start; lanes of all nonzeros for
# each thread on the chip, up to which saving a launch is worth it.
_LEAST_GROUP, _GROUP_WORKERS, _SMALL = 16, 16, 200
# The same where a warp takes half of a long row, which pays where each on the chip has something to do.
_LEAST_OF_WARP, _WARPS = 64, 4
_NARROW = 128  # bytes of a row: up to here balance is worth more than locality
_LONG = 20  # mean degree from which a power of two between lengths matters more than where the hubs are
_FEW_HUBS = 0.1  # share of the nonzeros
_STREAMED_DEGREE, _STREAMED_NONZEROS = (
    8,
    1_000_000,
)  # in the mean, below it; at least: wide rows by a worker that streams
_HALVED_DEGREE = 256  # in the mean, from it on: workers of half the lanes
_L2_BYTES = 50 << 20  # of an H200


def plan_of(graph: Graph, lanes: int, clustered: bool, *, reordered: bool = False) -> Plan:
    """How to make the list for rows of `lanes`, and what reads it.

    `clustered`: an order with locality is known; `reordered`: it is not the one that the rows were given in.
    """
    wide, lanes = lanes > _MOST_LANES, min(lanes, _MOST_LANES)
    processors, cache = _chip(graph)
    # Of all nonzeros, for each worker on the chip. The narrowest ones have so little to do for a nonzero that the next
    # piece costs more than waiting for it.
    share = (2.6 if lanes == LANES[0] else 1.3) * graph.nnz * lanes / (processors * _THREADS)
    # Pieces about as long as most rows keep in step with them; without clusters it pays to leave more rows whole.
    usual = 1 << math.ceil(math.log2(max(1, graph.nnz * (1 if clustered else 2) / max(1, graph.num_rows))))
    most = max(_LEAST_MAX_CAP, min(_MAX_CAP, usual))
    least = max(_MIN_CAP, min(_LEAST_CAP, usual))
    cap = max(least, min(most, -(-int(share) // 32) * 32))
    arrangement = _arrangement_of(graph, lanes, share, clustered, reordered)
    return Plan(cap, arrangement, *_kernel_of(graph, lanes, wide, cache, clustered))


def groups_of(graph: Graph, lanes: int, arrangement: Arrangement) -> Plan:
    """The same for groups of neighbours: as long as most rows, or as leaves every worker on the chip something to do.

    Up to four times as long, and in larger blocks, if a block then has all groups of the longest row: no part of a row
    is left to a second kernel. Not with fewer blocks than multiprocessors.
    """
    width, shortest, few = min(lanes, _MOST_LANES), _LEAST_GROUP, _GROUP_WORKERS
    processors, _ = _chip(graph)
    share = 1 << round(math.log2(max(1, graph.nnz * width / (processors * _THREADS))))
    if lanes > 2 * _MOST_LANES and share > 1:
        width, shortest, few, share = 2 * _MOST_LANES, _LEAST_OF_WARP, _WARPS, 4 * share
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
    small = graph.nnz * lanes <= _SMALL * processors * _THREADS
    return small and plan.kernel is Kernel.ROWS and graph.longest_row > plan.cap


def _arrangement_of(graph: Graph, lanes: int, share: float, clustered: bool, reordered: bool) -> Arrangement:
    if not clustered:
        return Arrangement.LENGTH
    short = graph.nnz < _LONG * graph.num_rows
    if 16 * lanes <= _NARROW:
        loose = short and not reordered and _hub_share(graph) < _FEW_HUBS
        return Arrangement.HUBS if loose else Arrangement.BUCKETS
    if share >= _MAX_CAP:  # balance comes by itself
        return Arrangement.CLUSTERS
    return Arrangement.HUBS if short else Arrangement.BUCKETS


def _kernel_of(graph: Graph, lanes: int, wide: bool, cache: int, clustered: bool) -> tuple[Kernel, int]:
    """What reads the list, and the lanes of a worker."""
    # Rows this short leave a worker waiting; one that streams does not. That costs a second launch, which only pays
    # where there is much to stream.
    if wide and graph.nnz < _STREAMED_DEGREE * graph.num_rows and graph.nnz >= _STREAMED_NONZEROS:
        return Kernel.BALANCED, 2 * _MOST_LANES
    if lanes == _MOST_LANES and not clustered:
        # Half of a slice of the sources stays in L2 where the whole does not.
        table = 16 * lanes * graph.num_cols
        if 1.1 * cache < table <= 2.2 * cache and graph.nnz < _LONG * graph.num_rows:
            return Kernel.BALANCED, lanes // 2
        # Narrow slices keep more rows in step and a smaller table in the caches.
        if graph.nnz >= _HALVED_DEGREE * max(1, graph.num_rows):
            return Kernel.ROWS, lanes // 2
    return Kernel.ROWS, lanes


def _hub_share(graph: Graph) -> float:
    """Share of the nonzeros that are in rows much longer than the mean. Synchronises."""
    degree = graph.indptr.diff().double()
    return float(degree[degree > HUB * degree.mean()].sum()) / max(1, graph.nnz)


def _chip(graph: Graph) -> tuple[int, int]:
    """Multiprocessors and bytes of L2 of the graph's GPU; of an H200 for a graph on the CPU."""
    if not graph.indptr.is_cuda:
        return 132, _L2_BYTES
    chip = torch.cuda.get_device_properties(graph.device)
    return chip.multi_processor_count, getattr(chip, "L2_cache_size", _L2_BYTES)  # torch has it from 2.5 on
