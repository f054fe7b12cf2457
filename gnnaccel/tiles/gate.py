"""Whether tiles are the faster way over a graph on a GPU, and the tiles that it has so far."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from gnnaccel.tiles.translate import KERNEL_SIZE, Tiles, translate

if TYPE_CHECKING:
    from gnnaccel.graph.csr import Graph

# Where the kernels for tensor cores are so much faster than those for CUDA cores that translation is repaid within
# about 30 epochs of two layers: docs/tensor-cores.md has the measurements.
PAYS_EDGES = 200_000  # of the graph, at least
PAYS_FROM = 4.0  # of reuse, in windows of 16 rows
_PAYS_DEGREE = 16  # edges of a row, in the mean
_PAYS_FEATURES = {"sum": 64, "dot": 128}  # numbers of a row of features, at least
_DENSE_REUSE, _DENSE_DEGREE = 8.0, 64  # both: sums of 16 numbers too
_SAMPLE, _SAMPLE_EDGES = 256, 1 << 22  # windows that are looked at, and about how many edges they may have


class Tiling:
    """Of one graph, which is an argument where it is needed: so the two do not keep each other alive."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Tiles] = {}  # by height and width
        # By features, of float32: whether sums by tiles were the faster ones.
        self._measured: dict[int, bool] = {}
        self._reuse: float | None = None  # of windows of 16 rows, or an estimate; 0: tiles will not do; None: not asked

    def tiles(self, graph: Graph, height: int, width: int) -> Tiles:
        """Made now, or before; see `Graph.tiles`."""
        if (height, width) not in self._made:
            if graph.transient():
                raise RuntimeError(
                    f"Graph.tiles: {graph} has no tiles of {height} x {width} yet, and torch.compile or a transform is "
                    f"tracing, or a CUDA graph is captured; call graph.tiles({height}, {width}), and "
                    f"graph.transposed.tiles({height}, {width}) for gradients, before"
                )
            with torch.inference_mode(False), torch.no_grad():
                made = translate(graph, height, width)
                if self._reuse and (height, width) == KERNEL_SIZE:
                    self._reuse = made.reuse()  # in place of an estimate
            self._made[height, width] = made
        return self._made[height, width]

    def look(self, graph: Graph) -> None:
        """Estimate, once, whether tiles pay."""
        if self._reuse is not None:
            return
        self._reuse = 0.0
        if graph.nnz < PAYS_EDGES:
            return
        made = self._made.get(KERNEL_SIZE)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._reuse = reuse(graph) if made is None else made.reuse()
        except torch.OutOfMemoryError:
            _warn(graph, "no memory to look for tiles")

    def pays(self, graph: Graph, features: int | None, of: str, dtype: torch.dtype = torch.float32) -> bool:
        """As far as is known; see `Graph.tiles_pay`."""
        known = self._reuse or 0.0
        if of == "sum" and dtype is torch.float32 and features in self._measured:
            return self._measured[features]
        if features is None:
            return known >= PAYS_FROM
        return pays(known, graph.nnz / max(graph.num_rows, 1), features, of)

    def decide(self, features: int, faster: bool) -> None:
        """Serve sums of rows of so many features by tiles from now on, or not."""
        self._measured[features] = faster

    def inherit(self, other: Tiling) -> None:
        """What is known of a graph with nearly the same edges holds here too; tiles are translated when needed."""
        self._measured, self._reuse = dict(other._measured), other._reuse

    def forget_measured(self) -> None:
        """What was measured was beside work lists that are gone."""
        self._measured = {}

    def serves(self, graph: Graph, features: int | None, of: str, dtype: torch.dtype = torch.float32) -> bool:
        """The same for sure: a graph for which tiles seem to pay is translated, which tells."""
        if not self.pays(graph, features, of, dtype):
            return False
        if KERNEL_SIZE not in self._made:
            if graph.transient():
                return False
            try:
                self.tiles(graph, *KERNEL_SIZE)
            except torch.OutOfMemoryError:
                self._reuse = 0.0
                _warn(graph, "no memory for tiles")
            if not self.pays(graph, None, of):
                self._made.pop(KERNEL_SIZE, None)
        return KERNEL_SIZE in self._made and self.pays(graph, features, of, dtype)


def _warn(graph: Graph, what: str) -> None:
    logging.getLogger("gnnaccel").warning("%s: %s; its kernels do without", graph, what)


def reuse(graph: Graph, height: int = 16) -> float:
    """About what `Tiles.reuse` would be, from a sample of the windows; synchronises. Takes a sort of their nonzeros."""
    windows = -(-graph.num_rows // height)
    if graph.nnz == 0:
        return 0.0
    sampled = max(1, min(windows, _SAMPLE, _SAMPLE_EDGES * windows // graph.nnz))
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


def pays(reuse: float, degree: float, features: int, of: str) -> bool:
    """True if the "sum" of rows of `features` numbers, or their "dot", is to go by tiles on a GPU, of a graph that is
    not small; `degree`: edges of a row, in the mean."""
    if reuse < PAYS_FROM or degree < _PAYS_DEGREE:
        return False
    dense = reuse >= _DENSE_REUSE and degree >= _DENSE_DEGREE
    return features >= (16 if dense and of == "sum" else _PAYS_FEATURES[of])
