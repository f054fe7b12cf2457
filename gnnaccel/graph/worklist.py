"""Work lists: in what order the CUDA kernels take the rows of a graph, and how they cut the long ones.

Rows of equal length side by side keep the workers of a multiprocessor in step: they run through their sorted
sources together and find each other's in L1 and L2 (cuda/spmm_rows.cu). Rows of one community share sources
besides. Rows longer than `cap` nonzeros become interleaved pieces, so that no worker is left alone with a hub.
Balance and clusters: HP-SpMM (Fan et al.), row lengths: RoDe (Pang et al., 2024).
"""

from __future__ import annotations

import math
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph.reorder import reuse

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

# Nonzeros of a run of a piece: kPieceRun of cuda/kernels.h.
PIECE_RUN = 16
_MIN_CAP, _LEAST_MAX_CAP, _MAX_CAP = 32, 256, 1024
_LEAST_CAP = 64  # where most rows have as many: pieces of small graphs
# Threads that a multiprocessor holds in the kernels that read the list, and how many lanes of 16 bytes rows of features
# have, by which plans differ. Workers have 16 at most.
_THREADS, LANES, _MOST_LANES = 1536, (4, 8, 16, 32, 64), 16
THREADS = (64, 128, 256, 512)  # of a block that takes groups; cuda/spmm_groups.cu has 512 at most
_NARROW = 128  # bytes of a row: up to here balance is worth more than locality
_LONG = 20  # mean degree from which a power of two between lengths matters more than where the hubs are
_HUB, _FEW_HUBS = 4, 0.1  # times the mean degree; share of the nonzeros
_SHORT, _DENSE, _MANY = 8, 256, 1_000_000  # mean degrees; nonzeros
_L2_BYTES = 50 << 20  # of an H200
_BLOCK = 256  # rows that a graph given in a good order keeps together
_LOCAL = 0.85  # sources that such an order reads at most, of those that rows by length read


class Arrangement(Enum):
    """What comes first in a list. Thresholds and choice: docs/performance.md, measured on an H200."""

    LENGTH = "rows by falling length"
    CLUSTERS = "clusters, their rows by falling length"
    HUBS = "hubs by falling length, then clusters"
    BUCKETS = "powers of two of the length, in each of them clusters"


class Kernel(IntEnum):
    """Which kernel is to serve sums and means on CUDA cores: Wish of cuda/kernels.h."""

    ROWS = 0
    BALANCED = 1
    GROUPS = 2


class Plan(NamedTuple):
    """How a list is made for rows of one size, where rows are cut and their order, and what is to read it.

    `cap`: nonzeros of a piece of a long row, or of a group of neighbours. `slice_lanes`: how many lanes of 16 bytes a
    worker has, at most (GNNAdvisor's dimension workers); 0, not with groups: 16, or 32 where it is to stream.
    `threads`: of a block, with groups alone.
    """

    cap: int
    arrangement: Arrangement
    kernel: Kernel = Kernel.ROWS
    slice_lanes: int = 0
    threads: int = 0

    def arranges_as(self, other: Plan) -> bool:
        """True if both make the same list."""
        return self[:2] == other[:2] and self.workers == other.workers

    @property
    def workers(self) -> int:
        """Of a block that takes groups; 0 for other kernels."""
        return self.threads // self.slice_lanes if self.kernel is Kernel.GROUPS else 0

    @property
    def code(self) -> int:
        """What the kernels are told, as one number: that torch.compile traces and autograd keeps."""
        return int(self.clustered) | int(self.kernel) << 1 | self.slice_lanes << 3 | self.workers << 9

    @property
    def clustered(self) -> bool:
        """True if neighbours in the list share sources."""
        return self.arrangement is not Arrangement.LENGTH


def decode(code: int) -> tuple[bool, int, int, int]:
    """Clustered, kernel, lanes, workers of `Plan.code`."""
    return bool(code & 1), code >> 1 & 3, code >> 3 & 63, code >> 9


class WorkList(NamedTuple):
    """Rows, or groups of neighbours, in the order in which they are to be worked on; see WorkList in cuda/kernels.h.

    Attributes
    ----------
    items : Tensor [num_items, 4], the graph's index dtype
        Row, its first nonzero of this item, the row's end (of groups: the group's), 0 or 1 + number of the piece.
    steps : Tensor [num_parts]
        From one run of a piece to its next.
    splits : Tensor [num_splits, 4]
        Row, its first piece, number of pieces, degree. Of groups, a piece is what one block has of a row.
    plan : Plan
        How it was made.
    """

    items: Tensor
    steps: Tensor
    splits: Tensor
    plan: Plan


def lanes_of(row_bytes: int) -> int:
    """How many lanes of 16 bytes rows of this size have; the most that a plan is made for if they have more."""
    return next((lanes for lanes in LANES if 16 * lanes >= row_bytes), LANES[-1])


def plan_of(graph: Graph, lanes: int, clustered: bool) -> Plan:
    """How to make the list for rows of `lanes`, and what reads it; `clustered`: an order with locality is known.

    The rules are from benchmarks/advisor.py and cuda_kernels.py on an H200.
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
    return Plan(cap, _arrangement_of(graph, lanes, share, clustered), *_kernel_of(graph, lanes, wide, cache, clustered))


def _arrangement_of(graph: Graph, lanes: int, share: float, clustered: bool) -> Arrangement:
    if not clustered:
        return Arrangement.LENGTH
    short = graph.nnz < _LONG * graph.num_rows
    if 16 * lanes <= _NARROW:
        loose = short and not graph.reordered and _hub_share(graph) < _FEW_HUBS
        return Arrangement.HUBS if loose else Arrangement.BUCKETS
    if share >= _MAX_CAP:  # balance comes by itself
        return Arrangement.CLUSTERS
    return Arrangement.HUBS if short else Arrangement.BUCKETS


def _kernel_of(graph: Graph, lanes: int, wide: bool, cache: int, clustered: bool) -> tuple[Kernel, int]:
    """What reads the list, and the lanes of a worker."""
    # Rows this short leave a worker waiting; one that streams does not. That costs a second launch, which only pays
    # where there is much to stream.
    if wide and graph.nnz < _SHORT * graph.num_rows and graph.nnz >= _MANY:
        return Kernel.BALANCED, 2 * _MOST_LANES
    if lanes == _MOST_LANES and not clustered:
        # Half of a slice of the sources stays in L2 where the whole does not.
        table = 16 * lanes * graph.num_cols
        if 1.1 * cache < table <= 2.2 * cache and graph.nnz < _LONG * graph.num_rows:
            return Kernel.BALANCED, lanes // 2
        # Narrow slices keep more rows in step and a smaller table in the caches.
        if graph.nnz >= _DENSE * max(1, graph.num_rows):
            return Kernel.ROWS, lanes // 2
    return Kernel.ROWS, lanes


def _hub_share(graph: Graph) -> float:
    """Share of the nonzeros that are in rows much longer than the mean. Synchronises."""
    degree = graph.indptr.diff().double()
    return float(degree[degree > _HUB * degree.mean()].sum()) / max(1, graph.nnz)


def _chip(graph: Graph) -> tuple[int, int]:
    """Multiprocessors and bytes of L2 of the graph's GPU; of an H200 for a graph on the CPU."""
    if not graph.indptr.is_cuda:
        return 132, _L2_BYTES
    chip = torch.cuda.get_device_properties(graph.device)
    return chip.multi_processor_count, getattr(chip, "L2_cache_size", _L2_BYTES)  # torch has it from 2.5 on


def given_order(graph: Graph) -> Tensor | None:
    """The rows as given, each block of a few hundred by falling length, if neighbours share sources; else None.

    Synchronises: it counts sources in a sample (`reorder.reuse`).
    """
    by_length = graph.indptr.diff().argsort(descending=True, stable=True)
    in_blocks = by_length[torch.argsort(by_length // _BLOCK, stable=True)]
    local = 1 - reuse(graph, in_blocks) <= _LOCAL * (1 - reuse(graph, by_length))
    return in_blocks if local else None


def build(graph: Graph, plan: Plan, order: Tensor | None = None) -> WorkList:
    """The work list of `graph`.

    Parameters
    ----------
    graph : Graph
    plan : Plan
        Rows of more than `cap` nonzeros are cut into equal pieces of at most about that many, which lie interleaved, or
        into groups of neighbours.
    order : Tensor [num_rows], int64
        Rows in an order with locality; None with Arrangement.LENGTH.

    Notes
    -----
    Torch ops on the graph's device; synchronises twice and at the end, so that any stream may read the list.
    """
    index = graph.indptr.dtype
    indptr = graph.indptr.long()
    degree = indptr.diff()
    rows = _arranged(degree, plan.arrangement, order)
    pieces = (degree[rows] + plan.cap - 1).div(plan.cap, rounding_mode="floor").clamp_(min=1)
    ends = pieces.cumsum(0)
    place = torch.arange(rows.numel(), device=rows.device)
    place = place.repeat_interleave(pieces, output_size=int(ends[-1]) if rows.numel() else 0)  # of an item's row
    item_rows, count = rows[place], pieces[place]
    number = torch.arange(place.numel(), device=rows.device) - (ends - pieces)[place]
    if plan.kernel is Kernel.GROUPS:
        begin, end = (indptr[item_rows] + (number + i) * degree[item_rows] // count for i in (0, 1))
        pieces, part = _fragments(ends, pieces, place, plan.workers)
    else:
        begin, end = indptr[item_rows] + PIECE_RUN * number, indptr[item_rows + 1]
        part = torch.where(count > 1, (count > 1).cumsum(0), 0)
    items = torch.stack([item_rows, begin, end, part], 1).to(index)
    if plan.arrangement is Arrangement.LENGTH and plan.kernel is not Kernel.GROUPS:  # pieces among rows of their length
        length = degree[item_rows].div(count, rounding_mode="floor")
        items = items[torch.argsort(length, descending=True, stable=True)]
    first = (pieces > 1).nonzero().flatten()
    long, num_pieces = rows[first], pieces[first]
    stride = torch.ones_like(num_pieces) if plan.kernel is Kernel.GROUPS else num_pieces
    steps = (PIECE_RUN * stride).repeat_interleave(num_pieces)
    splits = torch.stack([long, num_pieces.cumsum(0) - num_pieces, num_pieces, degree[long]], 1).to(index)
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()
    return WorkList(items.contiguous(), steps.to(index), splits.contiguous(), plan)


def _fragments(ends: Tensor, groups: Tensor, place: Tensor, workers: int) -> tuple[Tensor, Tensor]:
    """In how many blocks of `workers` groups each row lies, and of each group 0 or 1 + the number of its fragment.

    ends, groups : Tensor [num_rows]
        Groups of the rows so far, and of each row. place : Tensor [num_groups]: of a group's row.
    """
    first = (ends - groups).div(workers, rounding_mode="floor")
    blocks = (ends - 1).div(workers, rounding_mode="floor") - first + 1
    cut = torch.where(blocks > 1, blocks, 0)
    own = torch.arange(place.numel(), device=place.device).div(workers, rounding_mode="floor") - first[place]
    return blocks, torch.where(cut[place] > 0, (cut.cumsum(0) - cut)[place] + own + 1, 0)


def _arranged(degree: Tensor, arrangement: Arrangement, order: Tensor | None) -> Tensor:
    """The rows in the order of a list."""
    if arrangement is Arrangement.LENGTH or order is None:
        return degree.argsort(descending=True, stable=True)
    lengths = degree[order]
    if arrangement is Arrangement.CLUSTERS:
        return order
    if arrangement is Arrangement.HUBS:
        hubs = lengths > _HUB * degree.double().mean()
        return order[torch.where(hubs, lengths, 0).argsort(descending=True, stable=True)]
    return order[lengths.clamp(min=1).double().log2().floor().argsort(descending=True, stable=True)]
