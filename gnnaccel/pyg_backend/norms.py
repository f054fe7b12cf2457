"""The norm of a GCN as factors of the nodes: D^-1/2 A D^-1/2 x reads no weight per edge, where PyG has one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from gnnaccel import ops, tiles, touch
from gnnaccel.graph import scales
from gnnaccel.graph.build import rows_of
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.ops.tiled import serves_sum

# PyG rounds the norms of 16-bit features to these, and its results with them.
DTYPES = (torch.float32, torch.float64)
_UNMADE, _NONE = object(), object()  # in place of factors that nobody has asked for, and of those that there are not


def noted(gcn_norm: Callable) -> Callable:
    """PyG's gcn_norm, which notes that the norms of edges without weights are products of two nodes' factors."""

    @functools.wraps(gcn_norm)
    def wrapper(
        edge_index,
        edge_weight=None,
        num_nodes=None,
        improved=False,
        add_self_loops=True,
        flow="source_to_target",
        dtype=None,
    ):
        found = gcn_norm(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
        weighted = edge_index.has_value() if isinstance(edge_index, SparseTensor) else edge_weight is not None
        doubled = improved and add_self_loops  # loops weigh two
        if not (weighted or doubled or touch.transforming()):
            edges, norm = (found, found.storage.value()) if isinstance(found, SparseTensor) else found
            derived.put(_owners(edges, norm), ("factors", flow), _UNMADE)
        return found

    return wrapper


def _owners(edges: Any, norm: Any) -> tuple[Tensor, ...]:
    """The tensors whose identity stands for the norms of `edges`: a torch.sparse matrix makes new values each time."""
    if type(edges) is Tensor and edges.layout is torch.strided:
        return norm, edges
    if is_torch_sparse_tensor(edges):
        return (edges,)
    return norm, edges.storage.col() if isinstance(edges, SparseTensor) else edges


def move(made: Any, edges: Any, norm: Any) -> None:
    """Have `edges` in the place of equal ones whose norms `noted` has seen."""
    for flow in ("source_to_target", "target_to_source"):
        factors = derived.get(_owners(made, norm), ("factors", flow)) if isinstance(norm, Tensor) else None
        if factors is not None:
            derived.put(_owners(edges, norm), ("factors", flow), factors)


def weighted_sum(
    graph: Graph, x: Tensor, edges, norm: Tensor, flow: str = "source_to_target", bias: Tensor | None = None
) -> Tensor:
    """Sum over edges (c, r) of norm[e] * x[c], plus a bias: by the nodes' factors, if norms of PyG's for these edges
    have some.

    Parameters
    ----------
    edges : Tensor [2, E], torch.sparse tensor or SparseTensor
        What `graph` was made of, with flow `flow`.
    norm : Tensor [nnz]
        In edge-id order, of the dtype of x.
    """
    factors = factors_of(graph, x, edges, norm, flow)
    if factors is None or (tiles.are_profitable(graph) and serves_sum(graph, x, norm)):
        return _plus(ops.spmm(graph, x, norm), bias)
    return scaled_sum(graph, x, factors, bias)


def factors_of(graph: Graph, x: Tensor, edges, norm: Tensor, flow: str) -> Tensor | None:
    """The nodes' factors [num_rows] of norms that are products of two of them; None if that is not known. As
    `weighted_sum`, of an x [num_cols, any] that may have yet to be mapped."""
    if x.dtype not in DTYPES or norm.requires_grad:
        return None
    factors = derived.get(_owners(edges, norm), ("factors", flow))
    if factors is None or factors is _NONE:
        return None
    if factors is _UNMADE:
        if graph.transient():
            return None
        with torch.inference_mode(False), torch.no_grad():
            factors = scales.norm_scale(graph, norm.dtype)
            # A torch.sparse matrix always has values, and adding loops to it may have added up values.
            if is_torch_sparse_tensor(edges) and not _is_product(graph, norm, factors):
                factors = _NONE
        derived.put(_owners(edges, norm), ("factors", flow), factors)
        return factors_of(graph, x, edges, norm, flow)
    # Features may have more rows than at the first call.
    return factors if factors.shape[0] == graph.num_rows == graph.num_cols else None


def scaled_sum(graph: Graph, x: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """scale[r] * sum over edges (c, r) of scale[c] * x[c], plus a bias."""
    if bias is None or (bias.dtype == x.dtype and bias.device == x.device and bias.shape == x.shape[1:]):
        return ops.graph_conv(graph, x, source_scale=scale, row_scale=scale, bias=bias)
    return _plus(ops.graph_conv(graph, x, source_scale=scale, row_scale=scale), bias)


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def _is_product(graph: Graph, norm: Tensor, factors: Tensor) -> bool:
    expected = factors[rows_of(graph.indptr)] * factors[graph.indices]
    given = norm if graph.edge_ids is None else norm[graph.edge_ids]
    return torch.allclose(given, expected, rtol=8 * torch.finfo(norm.dtype).eps, atol=0.0)
