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

from gnnaccel.graph.reorder import WINDOW, reuse

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

# Nonzeros of a run of a piece: kPieceRun of cuda/kernels.h.
PIECE_RUN = 16
_MIN_CAP, _LEAST_MAX_CAP, _MAX_CAP = 32, 256, 1024
_LEAST_CAP = 64  # where most rows have as many: pieces of small graphs
# Threads that a multiprocessor holds in the kernels that read the list, and how many lanes of 16 bytes rows of features
# have, by which plans differ. Workers have 16 at most.
_THREADS, LANES, _MOST_LANES = 1536, (4, 8, 16, 32, 64), 16
SLICES = (4, 8, 16, 32)  # lanes that a worker can have; by rows 16 at most
# Of groups of neighbours: threads of a block (cuda/spmm_groups.cu has 512 at most), neighbours of a group; by rule, the
# fewest of these, and workers of a block; lanes of all nonzeros for each thread on the chip, up to which saving a
# launch is worth it.
THREADS, GROUP_SIZES = (64, 128, 256, 512), (4, 8, 16, 32, 64, 128, 256, 512)
_LEAST_GROUP, _GROUP_WORKERS, _SMALL = 16, 16, 200
_NARROW = 128  # bytes of a row: up to here balance is worth more than locality
_LONG = 20  # mean degree from which a power of two between lengths matters more than where the hubs are
_HUB, _FEW_HUBS = 4, 0.1  # times the mean degree; share of the nonzeros
_SHORT, _DENSE, _MANY = 8, 256, 1_000_000  # mean degrees; nonzeros
_L2_BYTES = 50 << 20  # of an H200
_ON_HOST = 20_000  # rows
_WINDOWS = 4  # of `reorder.reuse`; a graph of fewer lies in the caches whatever its order
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

    @property
    def list_key(self) -> tuple:
        """The same for plans that make the same list."""
        return self.cap, self.arrangement, self.workers

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


def groups_of(graph: Graph, lanes: int, arrangement: Arrangement) -> Plan:
    """The same for groups of neighbours: as long as most rows, or as leaves every worker on the chip something to do.

    Up to four times as long, and in larger blocks, if a block then has all groups of the longest row: no part of a row
    is left to a second kernel. Not with fewer blocks than multiprocessors.
    """
    width = min(lanes, _MOST_LANES)
    processors, _ = _chip(graph)
    share = 1 << round(math.log2(max(1, graph.nnz * width / (processors * _THREADS))))
    usual = 1 << math.ceil(math.log2(max(1, graph.nnz / max(1, graph.num_rows))))
    least = min(max(_LEAST_GROUP, share, usual), GROUP_SIZES[-1])
    size, workers = least, _GROUP_WORKERS
    largest, most = min(4 * least, GROUP_SIZES[-1]), THREADS[-1] // width
    while size * workers < graph.longest_row and (size < largest or workers < most):
        if workers < most and (2 * workers <= size or size == largest):
            workers *= 2
        else:
            size *= 2
    if size * workers < graph.longest_row or graph.nnz < processors * size * workers:
        size, workers = least, _GROUP_WORKERS
    return Plan(size, arrangement, Kernel.GROUPS, width, workers * width)


def groups_pay(graph: Graph, lanes: int, plan: Plan) -> bool:
    """True if groups of neighbours are to serve the sums that `plan`, of whole rows, would cut rows for.

    A second launch takes a third of the time of a sum over a small graph.
    """
    processors, _ = _chip(graph)
    small = graph.nnz * lanes <= _SMALL * processors * _THREADS
    return small and plan.kernel is Kernel.ROWS and graph.longest_row > plan.cap


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

    None also of a small graph.

    Synchronises: it counts sources in a sample (`reorder.reuse`).
    """
    if graph.nnz < _WINDOWS * WINDOW:
        return None
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
    Torch ops on the graph's device, of a few rows on the host, where they take less time than to be launched.
    Synchronises, so that any stream may read the list.
    """
    indptr = graph.indptr.long()
    if graph.num_rows <= _ON_HOST:
        indptr, order = indptr.cpu(), None if order is None else order.cpu()
    rows = _arranged(indptr.diff(), plan.arrangement, order)
    made = (_groups if plan.kernel is Kernel.GROUPS else _pieces)(indptr, rows, plan)
    items, steps, splits = (t.to(graph.device, graph.indptr.dtype).contiguous() for t in made)
    if graph.indptr.is_cuda:
        torch.cuda.current_stream(graph.device).synchronize()
    return WorkList(items, steps, splits, plan)


def _pieces(indptr: Tensor, rows: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Items, steps and splits of whole rows and interleaved pieces."""
    degree = indptr.diff()
    pieces = _ceil_div(degree[rows], plan.cap).clamp_(min=1)
    ends = pieces.cumsum(0)
    place = torch.arange(rows.numel(), device=rows.device)
    place = place.repeat_interleave(pieces, output_size=int(ends[-1]) if rows.numel() else 0)  # of an item's row
    item_rows, count = rows[place], pieces[place]
    number = torch.arange(place.numel(), device=rows.device) - (ends - pieces)[place]
    part = torch.where(count > 1, (count > 1).cumsum(0), 0)
    items = torch.stack([item_rows, indptr[item_rows] + PIECE_RUN * number, indptr[item_rows + 1], part], 1)
    if plan.arrangement is Arrangement.LENGTH:  # pieces among rows of their own length
        length = degree[item_rows].div(count, rounding_mode="floor")
        items = items[torch.argsort(length, descending=True, stable=True)]
    return items, PIECE_RUN * count[count > 1], _splits(degree, rows, pieces)


def _groups(indptr: Tensor, rows: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Items, steps and splits of groups of neighbours, `plan.workers` of them to a block.

    Groups of a row are about equally long. A row lies in one block if its groups fit into one; else in chunks that fill
    blocks, and the rest. A block that the next chunk does not fit into is filled up with empty groups of its last row.
    """
    degree, workers, device = indptr.diff(), plan.workers, rows.device
    groups = _ceil_div(degree[rows], plan.cap).clamp_(min=1)
    chunks = _ceil_div(groups, workers)
    last = chunks.cumsum(0)  # chunks of all rows up to each
    place = torch.arange(rows.numel(), device=device).repeat_interleave(chunks)  # of a chunk's row
    number = torch.arange(place.numel(), device=device) - (last - chunks)[place]
    size = (groups[place] - workers * number).clamp_(max=workers)
    slots = _slots_of(size, workers)
    count = (int(slots[-1]) // workers + 1) * workers if slots.numel() else 0
    room = torch.cat([slots, slots.new_tensor([count])]).diff()
    chunk = torch.arange(slots.numel(), device=device).repeat_interleave(room, output_size=count)  # of a slot
    row, of_row = rows[place[chunk]], groups[place[chunk]]
    # Groups of the chunk before this one.
    inside = torch.minimum(torch.arange(count, device=device) - slots[chunk], size[chunk])
    first = workers * number[chunk] + inside
    begin, end = (indptr[row] + g * degree[row] // of_row for g in (first, first + (inside < size[chunk])))
    cut = chunks[place] > 1
    part = torch.where(cut, cut.cumsum(0), 0)[chunk]
    items = torch.stack([row, begin, end, part], 1)
    splits = _splits(degree, rows, chunks)
    return items, splits.new_full((int(splits[:, 2].sum()),), PIECE_RUN), splits


def _slots_of(size: Tensor, workers: int) -> Tensor:
    """Where chunks of up to `workers` groups begin, in blocks of that many, which none reaches out of."""
    ends = size.cumsum(0)
    begins = ends - size
    # The chunk that the next block begins with, if a block begins with this one; then 2, 4, 8 ... blocks on.
    jump = torch.cat([torch.searchsorted(ends, begins + workers, right=True), ends.new_tensor([ends.numel()])])
    starts, known = jump.new_zeros(1), 0
    while starts.numel() > known:
        known = starts.numel()
        starts = torch.cat([starts, jump[starts]]).unique()
        jump = jump[jump]
    starts = starts[starts < size.numel()]
    block = torch.zeros_like(size).index_fill_(0, starts, 1).cumsum(0) - 1
    return block * workers + begins - begins[starts[block]]


def _splits(degree: Tensor, rows: Tensor, pieces: Tensor) -> Tensor:
    """Of `rows` in several pieces: row, first piece, number of pieces, degree."""
    long = (pieces > 1).nonzero().flatten()
    count, cut = pieces[long], rows[long]
    return torch.stack([cut, count.cumsum(0) - count, count, degree[cut]], 1)


def _ceil_div(a: Tensor, b: int) -> Tensor:
    return (a + b - 1).div(b, rounding_mode="floor")


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
