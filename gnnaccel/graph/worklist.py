"""Work lists: in what order the CUDA kernels take the rows of a graph, and how they cut the long ones.

Rows of equal length side by side keep the workers of a multiprocessor in step: they run through their sorted
sources together and find each other's in L1 and L2 (cuda/spmm_rows.cu). Rows longer than `cap` nonzeros become
interleaved pieces, so that no worker is left alone with a hub. Balance: HP-SpMM (Fan et al.), row lengths: RoDe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

# Nonzeros of a run of a piece: kPieceRun of cuda/kernels.h.
PIECE_RUN = 32
_MIN_CAP, _MAX_CAP = 32, 1024
# Threads that a multiprocessor holds in the kernels that read the list, and the lanes they give to a row.
_THREADS, _LANES = 1536, (4, 8, 16)


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
    clustered : bool
        True if neighbours in the list share sources.
    """

    items: Tensor
    steps: Tensor
    splits: Tensor
    clustered: bool


def widths() -> list[int]:
    """Row sizes in bytes between which `cap_of` tells; one list serves all sizes of one answer."""
    return [16 * lanes for lanes in _LANES]


def cap_of(graph: Graph, row_bytes: int) -> int:
    """Length at which rows are cut for features of `row_bytes`: about a worker's share of all nonzeros."""
    lanes = next((n for n in _LANES if 16 * n >= row_bytes), _LANES[-1])
    processors = torch.cuda.get_device_properties(graph.device).multi_processor_count if graph.indptr.is_cuda else 132
    share = 1.3 * graph.nnz * lanes / (processors * _THREADS)
    return max(_MIN_CAP, min(_MAX_CAP, -(-int(share) // PIECE_RUN) * PIECE_RUN))


def build(graph: Graph, cap: int, order: Tensor | None = None) -> WorkList:
    """The work list of `graph`.

    Parameters
    ----------
    graph : Graph
    cap : int
        Rows of more nonzeros are cut into equal pieces of at most about this many, a multiple of `PIECE_RUN`.
    order : Tensor [num_rows], int64, optional
        Rows in the order to keep, neighbours sharing sources. Default: by falling length.

    Notes
    -----
    Torch ops on the graph's device, with one synchronisation (the number of pieces).
    """
    index = graph.indptr.dtype
    indptr = graph.indptr.long()
    degree = indptr.diff()
    rows = torch.argsort(degree, descending=True, stable=True) if order is None else order
    pieces = (degree[rows] + cap - 1).div(cap, rounding_mode="floor").clamp_(min=1)
    first = pieces.cumsum(0) - pieces
    item_rows = rows.repeat_interleave(pieces)
    count = pieces.repeat_interleave(pieces)
    number = torch.arange(item_rows.numel(), device=rows.device) - first.repeat_interleave(pieces)
    cut = count > 1
    part = torch.where(cut, cut.cumsum(0), 0)
    items = torch.stack([item_rows, indptr[item_rows] + PIECE_RUN * number, indptr[item_rows + 1], part], 1).to(index)
    if order is None:  # pieces among rows of their own length
        length = degree[item_rows].div(count, rounding_mode="floor")
        items = items[torch.argsort(length, descending=True, stable=True)]
    long = rows[pieces > 1]
    num_pieces = pieces[pieces > 1]
    splits = torch.stack([long, num_pieces.cumsum(0) - num_pieces, num_pieces, degree[long]], 1).to(index)
    steps = (PIECE_RUN * count[cut]).to(index)
    return WorkList(items.contiguous(), steps, splits.contiguous(), order is not None)
