"""What a layer of dgl.nn in a HeteroGraphConv does, as an argument of the ops that take many of them together."""

from __future__ import annotations

from typing import Any

import torch
from dgl.nn.pytorch import GATConv, GINConv, GraphConv, SAGEConv
from torch import Tensor, nn

from gnnaccel.dgl_backend import ops, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.modules import is_watched
from gnnaccel.ops.gat_layers import GatLayer
from gnnaccel.ops.own_sums import OwnSum
from gnnaccel.ops.relation_sums import Term
from gnnaccel.touch import COMPILED_CALL

# Devices on which the sums of GINConv are found together: on the CPU that takes as long as one by one (EPYC).
SUMMING = ("cuda",)
_DTYPES = (torch.float32, torch.float64)
_KINDS = {"none": "sum", "right": "mean", "left": "left", "both": "both"}  # of GraphConv's norm


def found_of(layer: Any, graph: Graph, x: Any, own: Any) -> Term | GatLayer | OwnSum | None:
    """What a layer does but for the bias of a Term and SAGEConv's own map, and what GINConv does with its sums; None
    where it does more, or something else."""
    finder = _FINDERS.get(type(layer))
    if finder is None or is_watched(layer) or vars(layer).get(COMPILED_CALL):
        return None
    if not isinstance(x, Tensor) or not isinstance(own, Tensor) or x.dim() != 2 or x.dtype not in _DTYPES:
        return None
    if x.shape[0] != graph.num_cols or x.device != graph.device or ops.unsupported(x) is not None:
        return None
    return finder(layer, graph, x, own)


def _convolution(layer: Any, graph: Graph, x: Tensor, own: Tensor) -> Term | None:
    kind = _KINDS.get(touch.conv_norm(layer))
    usual = touch.conv_activation(layer) is None and touch.allows_zero_in_degree(layer) and layer.weight is not None
    return _term(graph, x, layer.weight, layer.bias, kind, False) if usual else None


def _sage(layer: Any, graph: Graph, x: Tensor, own: Tensor) -> Term | None:
    if (
        touch.sage_kind(layer) != "mean"
        or layer.activation is not None
        or layer.norm is not None
        or _drops(layer.feat_drop)
    ):
        return None
    maps = layer.fc_neigh, layer.fc_self
    if any(type(m) is not nn.Linear or is_watched(m) for m in maps) or layer.fc_neigh.bias is not None:
        return None
    weight = layer.fc_self.weight
    if not _is_own(own, graph, x) or not _takes(weight, x):
        return None
    if weight.shape != (layer.fc_neigh.weight.shape[0], own.shape[1]):
        return None
    return _term(graph, x, layer.fc_neigh.weight, layer.fc_self.bias, "mean", True)


def _term(graph: Graph, x: Tensor, weight: Tensor, bias: Any, kind: str | None, transposed: bool) -> Term | None:
    if kind is None or not _takes(weight, x) or weight.dim() != 2:
        return None
    term = Term(graph, x, weight, kind, transposed)
    if weight.shape[1 if transposed else 0] != x.shape[1]:
        return None
    return term if bias is None or (_takes(bias, x) and bias.shape == (term.outputs,)) else None


def _attention(layer: Any, graph: Graph, x: Tensor, own: Tensor) -> GatLayer | None:
    if layer.activation is not None or layer.res_fc is not None or _drops(layer.feat_drop) or _drops(layer.attn_drop):
        return None
    if type(layer.leaky_relu) is not nn.LeakyReLU or is_watched(layer.leaky_relu) or not x.numel() or not own.numel():
        return None
    if not (touch.allows_zero_in_degree(layer) or graph.no_empty_rows) or not _is_own(own, graph, x):
        return None
    maps = (layer.fc_src, layer.fc_dst) if hasattr(layer, "fc_src") else (layer.fc, layer.fc)
    if any(type(m) is not nn.Linear or m.bias is not None or is_watched(m) for m in maps):
        return None
    shape = 1, *touch.heads_and_width(layer)
    vectors, bias = (layer.attn_l, layer.attn_r), layer.bias if layer.has_explicit_bias else None
    if any(not _takes(t, x) or t.shape != shape for t in vectors):
        return None
    if bias is not None and (not _takes(bias, x) or bias.shape != (shape[1] * shape[2],)):
        return None
    return GatLayer(graph, x, own, maps[0].weight, maps[1].weight, *vectors, bias)


def _isomorphism(layer: Any, graph: Graph, x: Tensor, own: Tensor) -> OwnSum | None:
    if touch.gin_kind(layer) != "sum" or x.device.type not in SUMMING or not graph.nnz or not _is_own(own, graph, x):
        return None
    eps = layer.eps
    if not _takes(eps, x) or eps.numel() != 1 or eps.requires_grad or own.shape[1] != x.shape[1] or not x.shape[1]:
        return None
    return OwnSum(graph, x, own, eps)


def _is_own(own: Tensor, graph: Graph, x: Tensor) -> bool:
    fits = own.dim() == 2 and own.shape[0] == graph.num_rows and _takes(own, x)
    return fits and ops.unsupported(own) is None


def _drops(drop: nn.Module) -> bool:
    """True for a dropout that may be more than nothing."""
    return type(drop) is not nn.Dropout or (drop.training and drop.p > 0) or is_watched(drop)


def _takes(parameter: Any, x: Tensor) -> bool:
    return isinstance(parameter, Tensor) and parameter.dtype == x.dtype and parameter.device == x.device


_FINDERS = {
    layer: find
    for layer, find in {GraphConv: _convolution, SAGEConv: _sage, GATConv: _attention, GINConv: _isomorphism}.items()
    if touch.unknown_layer(layer.__name__) is None
}
