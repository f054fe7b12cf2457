"""Work lists: in what order the CUDA kernels take the rows of a graph, and how they cut the long ones.

Rows of equal length side by side keep the workers of a multiprocessor in step: they run through their sorted
sources together and find each other's in L1 and L2 (cuda/spmm_rows.cu). Rows of one community share sources
besides. Rows longer than `cap` nonzeros become interleaved pieces, so that no worker is left alone with a hub.
Balance and clusters: HP-SpMM (Fan et al.), row lengths: RoDe (Pang et al., 2024).
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph.reorder import reuse

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

# Nonzeros of a run of a piece: kPieceRun of cuda/kernels.h.
PIECE_RUN = 16
_MIN_CAP, _LEAST_MAX_CAP, _MAX_CAP = 32, 256, 1024
# Threads that a multiprocessor holds in the kernels that read the list, and the lanes they give to a row.
_THREADS, LANES = 1536, (4, 8, 16)
_NARROW = 128  # bytes of a row: up to here balance is worth more than locality
_LONG = 20  # mean degree from which a power of two between lengths matters more than where the hubs are
_HUB = 4  # times the mean degree
_BLOCK = 256  # rows that a graph given in a good order keeps together
_LOCAL = 0.85  # sources that such an order reads at most, of those that rows by length read


class Arrangement(Enum):
    """What comes first in a list. Thresholds and choice: docs/performance.md, measured on an H200."""

    LENGTH = "rows by falling length"
    CLUSTERS = "clusters, their rows by falling length"
    HUBS = "hubs by falling length, then clusters"
    BUCKETS = "powers of two of the length, in each of them clusters"


class Plan(NamedTuple):
    """How a list is made for rows of one size: where rows are cut, and their order."""

    cap: int
    arrangement: Arrangement


class WorkList(NamedTuple):
    """Rows in the order in which they are to be worked on; see WorkList in cuda/kernels.h.

    Attributes
    ----------
    items : Tensor [num_items, 4], the graph's index dtype
        Row, its first nonzero of this item, the row's end, 0 or 1 + number of the piece.
    steps : Tensor [num_parts]
        From one run of a piece to its next.
    splits : Tensor [num_splits, 4]
        Row, its first piece, number of pieces, degree.
    plan : Plan
        How it was made.
    """

    items: Tensor
    steps: Tensor
    splits: Tensor
    plan: Plan

    @property
    def clustered(self) -> bool:
        """True if neighbours in the list share sources."""
        return self.plan.arrangement is not Arrangement.LENGTH


def lanes_of(row_bytes: int) -> int:
    """How many lanes of 16 bytes the kernels give to rows of this size."""
    return next((lanes for lanes in LANES if 16 * lanes >= row_bytes), LANES[-1])


def plan_of(graph: Graph, lanes: int, clustered: bool) -> Plan:
    """How to make the list for rows of `lanes`; `clustered`: an order with locality is known."""
    processors = torch.cuda.get_device_properties(graph.device).multi_processor_count if graph.indptr.is_cuda else 132
    share = 1.3 * graph.nnz * lanes / (processors * _THREADS)  # of all nonzeros, for each worker on the chip
    # Pieces about as long as most rows keep in step with them; without clusters it pays to leave more rows whole.
    usual = 1 << math.ceil(math.log2(max(1, graph.nnz * (1 if clustered else 2) / max(1, graph.num_rows))))
    most = max(_LEAST_MAX_CAP, min(_MAX_CAP, usual))
    cap = max(_MIN_CAP, min(most, -(-int(share) // 32) * 32))
    if not clustered:
        return Plan(cap, Arrangement.LENGTH)
    if 16 * lanes <= _NARROW:
        return Plan(cap, Arrangement.BUCKETS)
    if share >= _MAX_CAP:  # balance comes by itself
        return Plan(cap, Arrangement.CLUSTERS)
    return Plan(cap, Arrangement.BUCKETS if graph.nnz >= _LONG * graph.num_rows else Arrangement.HUBS)


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
        Rows of more than `cap` nonzeros are cut into equal pieces of at most about that many.
    order : Tensor [num_rows], int64
        Rows in an order with locality; None with Arrangement.LENGTH.

    Notes
    -----
    Torch ops on the graph's device; synchronises twice and at the end, so that any stream may read the list.
    """
    cap, arrangement = plan
    index = graph.indptr.dtype
    indptr = graph.indptr.long()
    degree = indptr.diff()
    rows = _arranged(degree, arrangement, order)
    pieces = (degree[rows] + cap - 1).div(cap, rounding_mode="floor").clamp_(min=1)
    ends = pieces.cumsum(0)
    place = torch.arange(rows.numel(), device=rows.device)
    place = place.repeat_interleave(pieces, output_size=int(ends[-1]) if rows.numel() else 0)  # of an item's row
    item_rows, count = rows[place], pieces[place]
    number = torch.arange(place.numel(), device=rows.device) - (ends - pieces)[place]
    cut = count > 1
    part = torch.where(cut, cut.cumsum(0), 0)
    items = torch.stack([item_rows, indptr[item_rows] + PIECE_RUN * number, indptr[item_rows + 1], part], 1).to(index)
    if arrangement is Arrangement.LENGTH:  # pieces among rows of their own length
        length = degree[item_rows].div(count, rounding_mode="floor")
        items = items[torch.argsort(length, descending=True, stable=True)]
    steps = (PIECE_RUN * count[cut]).to(index)
    first = (pieces > 1).nonzero().flatten()
    long, num_pieces = rows[first], pieces[first]
    splits = torch.stack([long, num_pieces.cumsum(0) - num_pieces, num_pieces, degree[long]], 1).to(index)
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()
    return WorkList(items.contiguous(), steps, splits.contiguous(), plan)


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
