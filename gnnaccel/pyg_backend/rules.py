"""Layers whose message() or edge_update() has a rule of its own: attention, fused beyond what lazy features give, and
the plainest messages, for which lazy features cost more time on small graphs than the sum itself.

Rules are looked up by the method itself, not by the class: a subclass that overrides message() gets no rule of its
parent's, and one that does not keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.scales import mean_scale
from gnnaccel.lazy.reduce import takes
from gnnaccel.modules import is_watched
from gnnaccel.pyg_backend import attention, norms
from gnnaccel.pyg_backend.graph import Edges, Unsupported
from gnnaccel.pyg_backend.touch import EdgeIndex, collects_otherwise, edge_update, user_args
from gnnaccel.pyg_backend.touch import nn as pyg_nn

# message() that is x_j, or x_j times the edge weight of that name where there is one.
WEIGHTS: dict[Callable, str | None] = {
    MessagePassing.message: None,
    pyg_nn.SAGEConv.message: None,
    pyg_nn.GINConv.message: None,
    pyg_nn.MFConv.message: None,
    pyg_nn.SimpleConv.message: "edge_weight",
    pyg_nn.GCNConv.message: "edge_weight",
    pyg_nn.ChebConv.message: "norm",
    pyg_nn.GraphConv.message: "edge_weight",
    pyg_nn.GatedGraphConv.message: "edge_weight",
    pyg_nn.TAGConv.message: "edge_weight",
    pyg_nn.SGConv.message: "edge_weight",
    pyg_nn.SSGConv.message: "edge_weight",
    pyg_nn.APPNP.message: "edge_weight",
    pyg_nn.GCN2Conv.message: "edge_weight",
    pyg_nn.LGConv.message: "edge_weight",
    pyg_nn.ARMAConv.message: "edge_weight",
    pyg_nn.ClusterGCNConv.message: "edge_weight",
    pyg_nn.MixHopConv.message: "edge_weight",
    pyg_nn.PANConv.message: "edge_weight",
    pyg_nn.SignedConv.message: None,
    pyg_nn.WLConvContinuous.message: "edge_weight",
    pyg_nn.LabelPropagation.message: "edge_weight",
}
DTYPES = (torch.float32, torch.float64)
REDUCES = {
    pyg_nn.SumAggregation: "sum",
    pyg_nn.MeanAggregation: "mean",
    pyg_nn.MaxAggregation: "max",
    pyg_nn.MinAggregation: "min",
}


def weighted(conv, plain: Any, edges: Edges, kwargs: dict, factor: Callable[[], Tensor] | None = None) -> Tensor:
    """One propagate() call of a layer whose message() is in WEIGHTS. factor() is multiplied with each edge's message:
    [E], of the dtype of its features."""
    aggregation = conv.aggr_module
    reduce = REDUCES.get(type(aggregation))
    if plain.aggregate is not MessagePassing.aggregate or plain.update is not MessagePassing.update:
        raise Unsupported("own aggregate() or update()")
    if reduce is None or is_watched(aggregation) or edges.is_sparse or isinstance(edges.edge_index, EdgeIndex):
        raise Unsupported("another aggregation, or edges that PyG may multiply by")
    name = WEIGHTS[plain.message]
    x, weight = edges.node_feature(kwargs.get("x"), "_j"), None if name is None else kwargs.get(name)
    stacked = x is not None and x.dim() == 3 and conv.node_dim == -2 and factor is None
    if x is None or not (x.dim() == 2 or stacked) or not takes(x) or conv.node_dim not in (-2, 0):
        raise Unsupported("features that are neither [N, F] nor [K, N, F]")
    for part in user_args(conv):  # their sizes count, and PyG checks them, read or not
        if part[-2:] in ("_i", "_j") and part != "x_j":
            edges.node_feature(kwargs.get(part[:-2]), part[-2:])
    graph = edges.graph()
    if weight is not None:
        if not takes(weight) or weight.dim() != 1 or weight.shape[0] != graph.nnz or weight.dtype != x.dtype:
            raise Unsupported("a weight that is not [E]")
        if weight.device != x.device:
            raise Unsupported("a weight on another device")
    if stacked:
        side_by_side = x.transpose(0, 1).flatten(1)
        out = _sum_of(graph, side_by_side, edges, weight, reduce).unflatten(1, (x.shape[0], x.shape[2]))
        return out.transpose(0, 1).contiguous()
    if factor is not None:
        each = factor()
        if each.shape[0] != graph.nnz or each.dtype != x.dtype or each.device != x.device:
            raise Unsupported("a factor for each edge that are no such numbers")
        weight = each if weight is None else each * weight
        if reduce == "mean" and x.dtype in DTYPES:  # whose sums of few edges have their calls made ready
            return ops.spmm(graph, x, weight) * mean_scale(graph, x.dtype).unsqueeze(1)
        return ops.spmm(graph, x, weight, reduce=reduce)
    return _sum_of(graph, x, edges, weight, reduce)


def sums_as_matrix(conv, edge_index) -> bool:
    """True for what `weighted` left for no reason but that its edges are a matrix: lazy features make the same sum."""
    is_matrix = type(edge_index) is not Tensor or edge_index.layout is not torch.strided
    return is_matrix and type(conv.aggr_module) in REDUCES


def _sum_of(graph: Graph, x: Tensor, edges: Edges, weight: Tensor | None, reduce: str) -> Tensor:
    if weight is not None and reduce == "sum":
        return norms.weighted_sum(graph, x, edges.edge_index, weight, edges.flow)
    return ops.spmm(graph, x, weight, reduce=reduce)


def _attention(rule: Callable) -> Callable:
    """Message, aggregation and update of one propagate() call by a function of (layer, edges, propagate arguments)."""

    def run(conv, plain: Any, edges: Edges, kwargs: dict) -> Tensor:
        if plain.aggregate is not MessagePassing.aggregate:
            raise Unsupported("own aggregate()")
        if plain.update is not MessagePassing.update:
            raise Unsupported("own update()")
        if conv.node_dim not in (-2, 0):
            raise Unsupported(f"node_dim {conv.node_dim}")
        if is_watched(conv.aggr_module):
            raise Unsupported("hooks on the aggregation")
        if type(conv.aggr_module) is not pyg_nn.SumAggregation:
            raise Unsupported(f"attention with aggregation {conv.aggr!r}")
        return _run(rule, conv, edges, kwargs)

    return run


_GET_ATTENTION = pyg_nn.SuperGATConv.get_attention


def _super_gat(conv, plain: Any, edges: Edges, kwargs: dict) -> Tensor:
    """SuperGATConv, whose message() calls a method that others may replace."""
    if plain.get_attention is not _GET_ATTENTION or "get_attention" in vars(conv):
        raise Unsupported("own get_attention()")
    return _attention(attention.super_gat)(conv, plain, edges, kwargs)


def _scores(rule: Callable) -> Callable:
    """One edge_updater() call by a function of (layer, edges, edge_updater arguments)."""
    return lambda conv, plain, edges, kwargs: _run(rule, conv, edges, kwargs)


def _run(rule: Callable, conv, edges: Edges, kwargs: dict):
    try:
        return rule(conv, edges, **kwargs)
    except TypeError as error:
        if "argument" in str(error) and rule.__name__ in str(error):  # PyG has its own words for it
            raise Unsupported("arguments that the layer does not take") from error
        raise


# message() -> rule, which returns what is passed to update().
MESSAGE_RULES: dict[Callable, Callable] = {
    pyg_nn.GATConv.message: _attention(attention.gat),
    pyg_nn.GATv2Conv.message: _attention(attention.gat),
    pyg_nn.SuperGATConv.message: _super_gat,
    pyg_nn.TransformerConv.message: _attention(attention.transformer),
    pyg_nn.AGNNConv.message: _attention(attention.agnn),
    **dict.fromkeys(WEIGHTS, weighted),
}
# edge_update() -> rule
EDGE_RULES: dict[Callable, Callable] = {
    pyg_nn.GATConv.edge_update: _scores(attention.gat_scores),
    pyg_nn.GATv2Conv.edge_update: _scores(attention.gatv2_scores),
}


def find(plain: Any, name: str) -> Callable | None:
    """The rule for "propagate" or "edge_updater" of a layer class as it is now: (conv, plain, edges, kwargs) -> result.

    A rule raises Unsupported where it does not apply; nothing has happened then.
    """
    if collects_otherwise(plain):
        return None
    return MESSAGE_RULES.get(plain.message) if name == "propagate" else EDGE_RULES.get(edge_update(plain))
