"""What of a graph decides which kernels suit it: degrees, neighbours that rows share, tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel import tiles
from gnnaccel.graph import build
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds

SHAPES = ((16, 8), (16, 16), (8, 8))  # of tiles: the first is what the kernel takes


@dataclass(frozen=True)
class TileCount:
    """Blocks of height x width that hold an edge.

    Attributes
    ----------
    plain, translated : int
        Of the matrix as it lies, at multiples of width; and after sparse graph translation (Tiles).
    density : float
        Edges per place of a translated block.
    column_reuse : float
        Edges per distinct column of a window of rows.
    """

    height: int
    width: int
    plain: int
    translated: int
    density: float
    column_reuse: float

    @property
    def saved(self) -> float:
        """The part of the blocks that translation saves."""
        return 1 - self.translated / self.plain if self.plain else 0.0

    @property
    def is_profitable(self) -> bool:
        """True if tiles are faster than the kernels for CUDA cores, unless the graph is small."""
        return self.column_reuse >= bounds.TILES_REUSE


@dataclass(frozen=True)
class Properties:
    """Of a graph with destinations as rows.

    Attributes
    ----------
    repeated_edges : int
        Edges beyond the first of their source and destination.
    degree_deviation : float
        Standard deviation of the in-degrees.
    similarity : float
        Mean, over rows next to each other that both have edges, of the sources that both have by those that any has.
    tiles : tuple of TileCount, one per shape of `SHAPES`
    """

    nodes: int
    edges: int
    repeated_edges: int
    degree_mean: float
    degree_max: int
    degree_deviation: float
    empty_rows: int
    similarity: float
    tiles: tuple[TileCount, ...]


def properties(graph: Graph) -> Properties:
    """Properties of `graph`; takes a few sorts of its edges."""
    degrees = graph.indptr.diff().long()
    rows = build.rows_of(graph.indptr)
    key = torch.unique(rows * max(graph.num_cols, 1) + graph.indices.long())
    exact = degrees.double()
    return Properties(
        nodes=graph.num_rows,
        edges=graph.nnz,
        repeated_edges=graph.nnz - key.numel(),
        degree_mean=float(exact.mean()) if graph.num_rows else 0.0,
        degree_max=int(degrees.max()) if graph.num_rows else 0,
        degree_deviation=float(exact.std(correction=0)) if graph.num_rows else 0.0,
        empty_rows=int((degrees == 0).sum()),
        similarity=_similarity(key, graph.num_rows, max(graph.num_cols, 1)),
        tiles=tuple(_tiles(graph, rows, height, width) for height, width in SHAPES),
    )


def _similarity(key: Tensor, num_rows: int, num_cols: int) -> float:
    """`key`: row * num_cols + column of each distinct edge, ascending."""
    if num_rows < 2 or key.numel() == 0:
        return 0.0
    distinct = torch.bincount(key // num_cols, minlength=num_rows)
    below = key + num_cols  # the same column in the next row
    at = torch.searchsorted(key, below).clamp(max=key.numel() - 1)
    shared = torch.bincount((key // num_cols)[key[at] == below], minlength=num_rows)[:-1]
    both = (distinct[:-1] > 0) & (distinct[1:] > 0)
    if not bool(both.any()):
        return 0.0
    either = distinct[:-1] + distinct[1:] - shared
    return float((shared[both] / either[both]).mean())


def _tiles(graph: Graph, rows: Tensor, height: int, width: int) -> TileCount:
    made = tiles.of(graph, height, width)
    across = -(-max(graph.num_cols, 1) // width)
    plain = torch.unique((rows // height) * across + graph.indices.long() // width).numel()
    return TileCount(height, width, plain, made.num_blocks, made.density, made.column_reuse())
