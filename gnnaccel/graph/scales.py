"""Powers of the degrees of a graph's rows, which layers scale sums with: made once, kept with the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.graph import modes
from gnnaccel.graph.csr import Graph

_SLOT = "scales"


def gcn_scale(graph: Graph, dtype: torch.dtype) -> Tensor:
    """One over the square root of each row's degree, at least 1, as a GCN layer takes it: [num_rows], kept.

    `dtype`: of the features; the result has that of their sums.
    """
    return _power(graph, dtype, -0.5)


def mean_scale(graph: Graph, dtype: torch.dtype) -> Tensor:
    """One over each row's degree, at least 1, what a mean multiplies a sum with; as `gcn_scale`."""
    return _power(graph, dtype, -1.0)


def norm_scale(graph: Graph, dtype: torch.dtype, no_empty_rows: bool) -> Tensor:
    """`gcn_scale`, but 0 where a row is empty, as PyG has it; not kept. `no_empty_rows`: True if there is none."""
    with modes.outside_inference():
        scale = graph.indptr.diff().to(torch.promote_types(dtype, torch.float32)).pow_(-0.5)
        return scale if no_empty_rows else scale.masked_fill_(scale == torch.inf, 0.0)


def _power(graph: Graph, dtype: torch.dtype, power: float) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    kept: dict[tuple[torch.dtype, float], Tensor] = getattr(graph.slots, _SLOT, {})
    scale = kept.get((wide, power))
    if scale is None:
        with modes.outside_inference():
            scale = graph.indptr.diff().to(wide).clamp_(min=1).pow_(power)
        if not graph.transient():
            made: dict[tuple[torch.dtype, float], Tensor] = graph.slot(_SLOT, dict)
            made[wide, power] = scale
    return scale
