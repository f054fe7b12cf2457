"""Work lists: in what order the kernels take the rows of a graph, and how those of CUDA cut the long ones.

Rows of equal length side by side keep the workers of a multiprocessor in step: they run through their sorted
sources together and find each other's in L1 and L2 (cuda/spmm_rows.cu). Rows of one community share sources
besides. Rows longer than `cap` nonzeros become interleaved pieces, so that no worker is left alone with a hub.
Balance and clusters: HP-SpMM (Fan et al.), row lengths: RoDe (Pang et al., 2024).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds

# Nonzeros of a run of a piece: kPieceRun of cuda/kernels.h.
PIECE_RUN = 16
# How many lanes of 16 bytes rows of features have, by which plans differ; that a worker can have, by rows 16 at most.
LANES, SLICES = (4, 8, 16, 32, 64), (4, 8, 16, 32)
# Of groups of neighbours: threads of a block (cuda/spmm_groups.cu has 512 at most), neighbours of a group.
THREADS, GROUP_SIZES = (64, 128, 256, 512), (4, 8, 16, 32, 64, 128, 256, 512)


class Arrangement(Enum):
    """What comes first in a list. Thresholds and choice: docs/kernels.md, measured on an H200."""

    LENGTH = "rows by falling length"
    CLUSTERS = "clusters, their rows by falling length"
    HUBS = "hubs by falling length, then clusters"
    BUCKETS = "powers of two of the length, in each of them clusters"


class Kernel(IntEnum):
    """Which kernel is to serve sums and means on CUDA cores: SpmmKernel of cpp/types.h."""

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
        """What the kernels are told, as one number of 17 bits: that torch.compile traces and autograd keeps."""
        return int(self.clustered) | int(self.kernel) << 1 | self.slice_lanes << 3 | self.workers << 9

    @property
    def clustered(self) -> bool:
        """True if neighbours in the list share sources."""
        return self.arrangement is not Arrangement.LENGTH


def decode(code: int) -> tuple[bool, int, int, int, int]:
    """Clustered, kernel, lanes, workers, longest row of `WorkList.code`; a plan knows of no row."""
    return bool(code & 1), code >> 1 & 3, code >> 3 & 63, code >> 9 & 255, code >> 17


def code_of_longest(nonzeros: int) -> int:
    """What `decode` takes the longest row from."""
    return nonzeros << 17


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
    as_given : bool
        Of rows as they were given, where `prepare` found another order for the graph.
    longest : int
        Nonzeros of the longest row.
    """

    items: Tensor
    steps: Tensor
    splits: Tensor
    plan: Plan
    as_given: bool = False
    longest: int = 0

    @property
    def code(self) -> int:
        """That of the plan, and the longest row."""
        return self.plan.code | code_of_longest(self.longest)


class Ordered(NamedTuple):
    """What a work list is on CUDA, on the CPU: the same nonzeros with their rows in another order, one after the other.

    Attributes
    ----------
    rows : Tensor [num_rows], the graph's index dtype
        Of the graph, one for each row here.
    indptr : Tensor [num_rows + 1]
    edges : Tensor [2, nnz]
        Source and edge id of each nonzero.
    """

    rows: Tensor
    indptr: Tensor
    edges: Tensor
    code: int = 0


def ordered(graph: Graph, order: Tensor) -> Ordered:
    """`graph`, on the CPU, with its rows in `order` [num_rows], int64."""
    indptr = graph.indptr.long()
    degree = indptr.diff()[order]
    starts = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    nonzeros = (indptr[order] - starts[:-1]).repeat_interleave(degree) + torch.arange(graph.nnz, device=order.device)
    ids = nonzeros if graph.edge_ids is None else graph.edge_ids[nonzeros]
    kind = graph.indptr.dtype
    edges = torch.empty(2, graph.nnz, dtype=kind, device=order.device)
    edges[0], edges[1] = graph.indices[nonzeros], ids
    return Ordered(order.to(kind), starts.to(kind), edges)


def lanes_of(row_bytes: int) -> int:
    """How many lanes of 16 bytes rows of this size have; the most that a plan is made for if they have more."""
    return next((lanes for lanes in LANES if 16 * lanes >= row_bytes), LANES[-1])


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
    if graph.num_rows <= bounds.LISTED_ON_HOST:
        indptr, order = indptr.cpu(), None if order is None else order.cpu()
    rows = _arranged(indptr.diff(), plan.arrangement, order)
    made = (_groups if plan.kernel is Kernel.GROUPS else _pieces)(indptr, rows, plan)
    items, steps, splits = (t.to(graph.device, graph.indptr.dtype).contiguous() for t in made)
    if graph.indptr.is_cuda:
        torch.cuda.current_stream(graph.device).synchronize()
    return WorkList(items, steps, splits, plan, longest=graph.longest_row)


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
        hubs = lengths > bounds.HUB * degree.double().mean()
        return order[torch.where(hubs, lengths, 0).argsort(descending=True, stable=True)]
    return order[lengths.clamp(min=1).double().log2().floor().argsort(descending=True, stable=True)]
