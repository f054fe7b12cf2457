"""Whether tiles are the faster way over a graph on a GPU, and the tiles that it has so far."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.tiles.translate import KERNEL_SIZE, Tiles, translate


@dataclass
class _Known:
    """What is known of one graph, which keeps it."""

    # By height and width.
    made: dict[tuple[int, int], Tiles] = field(default_factory=dict)
    # By features, of float32: whether sums by tiles were the faster ones.
    measured: dict[int, bool] = field(default_factory=dict)
    # Of windows of 16 rows, or an estimate; 0: tiles will not do; None: not asked.
    column_reuse: float | None = None


_SLOT = "tiles"


def of(graph: Graph, height: int = 16, width: int = 8) -> Tiles:
    """Blocks of `height` rows and `width` columns for tensor cores, translated at the first call and kept by the graph.

    Parameters
    ----------
    graph : Graph
    height, width : int, 1 to 1024
        16 x 8 is what `ops.spmm` with kernel="tiled" takes.

    Raises
    ------
    ValueError
        For other sizes. RuntimeError: where torch.compile or a transform is tracing, or a CUDA graph is captured,
        and the graph has no such tiles yet.

    Notes
    -----
    On the graph's device; synchronises once. What the arrays are: `Tiles`.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([2, 2, 30]), num_rows=2, num_cols=31)
    >>> gnnaccel.tiles.of(g).columns
    tensor([[ 2, 30, -1, -1, -1, -1, -1, -1]], dtype=torch.int32)
    """
    known: _Known | None = getattr(graph.slots, _SLOT, None)
    if known is None or (height, width) not in known.made:
        if graph.transient():
            raise RuntimeError(
                f"tiles.of: {graph} has no tiles of {height} x {width} yet, and torch.compile or a transform is "
                f"tracing, or a CUDA graph is captured; call gnnaccel.tiles.of(graph, {height}, {width}), and the same "
                "of graph.transposed for gradients, before"
            )
        known = graph.slot(_SLOT, _Known)
        with torch.inference_mode(False), torch.no_grad():
            made = translate(graph, height, width)
            if known.column_reuse and (height, width) == KERNEL_SIZE:
                known.column_reuse = made.column_reuse()  # in place of an estimate
        known.made[height, width] = made
    return known.made[height, width]


def look(graph: Graph) -> None:
    """Estimate, once, whether tiles pay."""
    known = graph.slot(_SLOT, _Known)
    if known.column_reuse is not None:
        return
    known.column_reuse = 0.0
    if graph.nnz < bounds.TILES_EDGES:
        return
    made = known.made.get(KERNEL_SIZE)
    try:
        with torch.inference_mode(False), torch.no_grad():
            known.column_reuse = column_reuse(graph) if made is None else made.column_reuse()
    except torch.OutOfMemoryError:
        _warn(graph, "no memory to look for tiles")


def are_profitable(
    graph: Graph, features: int | None = None, kind: str = "sum", dtype: torch.dtype = torch.float32
) -> bool:
    """True if CUDA kernels seem to be faster by tiles (docs/tensor-cores.md): estimated with the work lists.

    For the "sum" or the "dot" of rows of `features` numbers; None: for any.
    """
    known: _Known | None = getattr(graph.slots, _SLOT, None)
    if known is None:
        return False
    if kind == "sum" and dtype is torch.float32 and features in known.measured:
        return known.measured[features]
    if features is None:
        return (known.column_reuse or 0.0) >= bounds.TILES_REUSE
    return is_profitable(known.column_reuse or 0.0, graph.nnz / max(graph.num_rows, 1), features, kind)


def ensure(graph: Graph, features: int | None = None, kind: str = "sum", dtype: torch.dtype = torch.float32) -> bool:
    """The same for sure: translates a graph for which tiles seem to pay, where it has not been."""
    if not are_profitable(graph, features, kind, dtype):
        return False
    known = graph.slot(_SLOT, _Known)
    if KERNEL_SIZE not in known.made:
        if graph.transient():
            return False
        try:
            of(graph, *KERNEL_SIZE)
        except torch.OutOfMemoryError:
            known.column_reuse = 0.0
            _warn(graph, "no memory for tiles")
        if not are_profitable(graph, None, kind):
            known.made.pop(KERNEL_SIZE, None)
    return KERNEL_SIZE in known.made and are_profitable(graph, features, kind, dtype)


def decide(graph: Graph, features: int, faster: bool) -> None:
    """Whether sums of rows of `features` numbers go by tiles from now on, as measured, of a translated graph."""
    graph.slot(_SLOT, _Known).measured[features] = faster


def inherit(graph: Graph, other: Graph) -> None:
    """What is known of `other`, with nearly the same edges, holds here too; tiles are translated when needed."""
    known, given = graph.slot(_SLOT, _Known), other.slot(_SLOT, _Known)
    known.measured, known.column_reuse = dict(given.measured), given.column_reuse


def forget_measured(graph: Graph) -> None:
    """What was measured was beside work lists that are gone."""
    graph.slot(_SLOT, _Known).measured.clear()


def _warn(graph: Graph, what: str) -> None:
    logging.getLogger("gnnaccel").warning("%s: %s; its kernels do without", graph, what)


def column_reuse(graph: Graph, height: int = 16) -> float:
    """About what `Tiles.column_reuse` would be, from a sample of the windows, whose nonzeros it sorts; synchronises."""
    windows = -(-graph.num_rows // height)
    if graph.nnz == 0:
        return 0.0
    sampled = max(1, min(windows, bounds.TILES_SAMPLE, bounds.TILES_SAMPLE_EDGES * windows // graph.nnz))
    picks = (
        (torch.arange(sampled, device=graph.device) * 2 + 1) * windows // (2 * sampled)
    )  # each the middle of a share
    rows = (picks.unsqueeze(1) * height + torch.arange(height, device=graph.device)).clamp(max=graph.num_rows)
    begin = graph.indptr[rows].long()  # a row past the last is empty
    count = graph.indptr[(rows + 1).clamp(max=graph.num_rows)].long() - begin
    begin, count = begin.flatten(), count.flatten()
    row = torch.repeat_interleave(torch.arange(count.numel(), device=graph.device), count)
    inside = torch.arange(row.numel(), device=graph.device) - (count.cumsum(0) - count)[row]
    columns = max(graph.num_cols, 1)
    # A column stands in a window as often as a row has it.
    edge, times = torch.unique(row * columns + graph.indices[begin[row] + inside].long(), return_counts=True)
    place, of_edge = torch.unique(edge // columns // height * columns + edge % columns, return_inverse=True)
    most = times.new_zeros(place.numel()).scatter_reduce(0, of_edge, times, "amax")
    return row.numel() / max(int(most.sum()), 1)


def is_profitable(column_reuse: float, degree: float, features: int, kind: str) -> bool:
    """True if the "sum" of rows of `features` numbers, or their "dot", is to go by tiles on a GPU, of a graph that is
    not small; `degree`: edges of a row, in the mean."""
    if column_reuse < bounds.TILES_REUSE or degree < bounds.TILES_DEGREE:
        return False
    narrow = kind == "sum" and column_reuse >= bounds.TILES_NARROW_REUSE and degree >= bounds.TILES_NARROW_DEGREE
    return features >= (bounds.TILES_NARROW_FEATURES if narrow else bounds.TILES_FEATURES[kind])
