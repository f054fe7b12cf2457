"""Powers of the degrees of a graph's rows, which layers scale sums with: made once, kept with the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.graph import build, modes
from gnnaccel.graph.csr import Graph

_SLOT = "scales"
_SOURCES = "degrees of sources"


def gcn_scale(graph: Graph, dtype: torch.dtype) -> Tensor:
    """One over the square root of each row's degree, at least 1, as a GCN layer takes it: [num_rows], kept.

    `dtype`: of the features; the result has that of their sums.
    """
    return _power(graph, dtype, -0.5)


def source_scale(graph: Graph, dtype: torch.dtype) -> Tensor:
    """`gcn_scale` of the columns, by how many edges leave each: [num_cols], kept."""
    degrees = getattr(graph.slots, _SOURCES, None)
    if degrees is None:
        return gcn_scale(graph.transposed, dtype)
    return _kept(graph, dtype, "sources", lambda wide: degrees.to(wide).clamp(min=1).pow_(-0.5))


def set_source_degrees(graph: Graph, degrees: Tensor) -> None:
    """Let `source_scale` go by `degrees` [num_cols]: of a part, whose sources have edges to other parts too."""
    graph.slot(_SOURCES, lambda: degrees)


def mean_scale(graph: Graph, dtype: torch.dtype) -> Tensor:
    """One over each row's degree, at least 1, what a mean multiplies a sum with; as `gcn_scale`."""
    return _power(graph, dtype, -1.0)


def norm_scale(graph: Graph, dtype: torch.dtype) -> Tensor:
    """`gcn_scale`, but 0 where a row is empty, as PyG has it."""
    return _kept(graph, dtype, "norm", lambda wide: build.inverse_roots(graph.indptr, wide))


def looped_norm(graph: Graph, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, own), both [num_rows], kept: GCN's matrix of a square graph each of whose nodes has one loop, in place of
    those that it has, is that of the graph with `scale` for rows and sources, and `own` more on the diagonal."""
    scale, own = _kept(graph, dtype, "looped", lambda wide: _looped(graph, wide)).unbind()
    return scale, own


def _looped(graph: Graph, wide: torch.dtype) -> Tensor:
    degrees = graph.indptr.diff()
    rows = torch.arange(graph.num_rows, device=graph.device).repeat_interleave(degrees, output_size=graph.nnz)
    others = torch.zeros(graph.num_rows, dtype=wide, device=graph.device)
    others.index_add_(0, rows, (graph.indices != rows).to(wide))  # edges that are no loops
    scale = (others + 1).pow_(-0.5)
    return torch.stack([scale, (others - degrees + 1) * scale * scale])


def _power(graph: Graph, dtype: torch.dtype, power: float) -> Tensor:
    return _kept(graph, dtype, power, lambda wide: graph.indptr.diff().to(wide).clamp_(min=1).pow_(power))


def _kept(graph: Graph, dtype: torch.dtype, name: float | str, make: Callable[[torch.dtype], Tensor]) -> Tensor:
    """What `make` makes for this dtype, or the float32 that narrower ones are scaled in, kept with the graph."""
    wide = dtype if dtype is torch.float32 else torch.promote_types(dtype, torch.float32)
    kept: dict[tuple[torch.dtype, float | str], Tensor] | None = getattr(graph.slots, _SLOT, None)
    scale = None if kept is None else kept.get((wide, name))
    if scale is None:
        with modes.outside_inference():
            scale = make(wide)
        if not graph.transient():
            made: dict[tuple[torch.dtype, float | str], Tensor] = graph.slot(_SLOT, dict)
            made[wide, name] = scale
    return scale
