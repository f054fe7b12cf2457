"""Layers of dgl.nn with a forward on larger ops of ours; those that only sum up stand in convolutions.py.

GATConv, AGNNConv, DotGatConv: scores, softmax and sum by `ops.attention` and `ops.dot_attention`. GATv2Conv: the scores
without a value per edge and feature, then `ops.edge_attention`. EdgeGATConv: no value per edge and feature, as the sums
of edge features are mapped and not the features. And what all layers that refuse nodes without in-edges ask at every
call is answered once.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import dgl
import torch
from torch import nn

from gnnaccel import ops, report
from gnnaccel.dgl_backend.convolutions import features_of, plain
from gnnaccel.dgl_backend.ops import unsupported
from gnnaccel.dgl_backend.structure import every_row_has_edges, structure
from gnnaccel.dgl_backend.touch import ALLOWS, heads_and_width, index_of
from gnnaccel.modules import is_watched


def _fuses(layer, graph, features, edge_weight, get_attention) -> bool:
    """True for a GATConv or GATv2Conv whose scores nobody is to see."""
    if edge_weight is not None or get_attention or not features or not plain(layer, graph, features):
        return False
    if any(f.dim() != 2 for f in features):
        return False
    structure_ = structure(index_of(graph))
    if len(features) == 1 and not graph.is_block and structure_.num_cols != structure_.num_rows:
        return False
    if type(layer.leaky_relu) is not nn.LeakyReLU or type(layer.attn_drop) is not nn.Dropout:
        return False
    return not any(is_watched(m) for m in (layer.leaky_relu, layer.attn_drop))


def gat_forward(original):
    """GATConv.forward that calls `ops.gat` or `ops.attention` where the layer is a plain one."""

    def forward(self, graph, feat, edge_weight=None, get_attention=False):
        features = features_of(feat)
        if not _fuses(self, graph, features, edge_weight, get_attention) or not _vectors_fit(self, features[0]):
            return original(self, graph, feat, edge_weight, get_attention)  # its ops are accelerated and counted
        with report.accelerated("dgl.GATConv"):
            return _fused(self, graph, feat)

    return forward


def _vectors_fit(layer, x: torch.Tensor) -> bool:
    """True for vectors of attention of the features' dtype: DGL makes them float32 whatever the default is."""
    return layer.attn_l.dtype == x.dtype == layer.attn_r.dtype


def gatv2_forward(original):
    """GATv2Conv.forward that calls `ops.gatv2`, where the layer is a plain one."""

    def forward(self, graph, feat, get_attention=False):
        features = features_of(feat)
        if not _fuses(self, graph, features, None, get_attention) or not _scores(self, features[0]):
            return original(self, graph, feat, get_attention)
        with report.accelerated("dgl.GATv2Conv"):
            return _gatv2(self, graph, features)

    return forward


def _scores(layer, x: torch.Tensor) -> bool:
    """True if `ops.gatv2_scores` takes the layer's vectors and the dtype."""
    fits = layer.attn.shape == (1, *heads_and_width(layer)) and layer.attn.dtype == x.dtype
    return fits and (x.is_cuda or x.dtype != torch.bfloat16)


def _gatv2(layer, graph, features):
    heads, width = heads_and_width(layer)
    structure_ = structure(index_of(graph))
    if len(features) == 2:
        h_source, h_target = (layer.feat_drop(f) for f in features)
    else:
        h_source = h_target = layer.feat_drop(features[0])
    source = layer.fc_src(h_source).view(-1, heads, width)
    shared = len(features) == 1 and layer.share_weights
    target = source if shared else layer.fc_dst(h_target).view(-1, heads, width)
    if len(features) == 1 and graph.is_block:
        target, h_target = target[: structure_.num_rows], h_target[: structure_.num_rows]
    mask, slope = _mask(layer, source, structure_.nnz, heads), layer.leaky_relu.negative_slope
    out = ops.gatv2(structure_, source, target, layer.attn[0], negative_slope=slope, edge_scale=mask)
    if layer.res_fc is None:
        out = out.clone()  # as in _fused
    else:
        out = out + layer.res_fc(h_target).view(h_target.shape[0], -1, width)
    return layer.activation(out) if layer.activation else out


def _mask(layer, like: torch.Tensor, nnz: int, heads: int) -> torch.Tensor | None:
    """The same draw, in the same order, as the layer's own dropout of the attention: [E, H], or None for ones."""
    if not (layer.attn_drop.training and layer.attn_drop.p > 0):
        return None
    return layer.attn_drop(like.new_ones(nnz, heads, 1)).squeeze(-1)


def edge_gat_forward(original):
    """EdgeGATConv.forward with the edge features' maps moved to the nodes, where the layer is a plain one."""

    def forward(self, graph, feat, edge_feat, get_attention=False):
        features = features_of(feat)
        if not _fuses(self, graph, features, None, False) or not _is_mapped_plainly(self, graph, features, edge_feat):
            return original(self, graph, feat, edge_feat, get_attention)
        with report.accelerated("dgl.EdgeGATConv"):
            out, weights = _edge_gat(self, graph, feat, edge_feat)
            return (out, weights.unsqueeze(-1)) if get_attention else out

    return forward


def _is_mapped_plainly(layer, graph, features, edge_feat) -> bool:
    fits = isinstance(edge_feat, torch.Tensor) and edge_feat.dim() == 2 and len(edge_feat) == graph.num_edges()
    if not fits or unsupported(edge_feat) is not None or type(layer.fc_edge) is not nn.Linear:
        return False
    weight, x = layer.fc_edge.weight, features[0]
    if weight.dim() != 2 or edge_feat.shape[1] != weight.shape[1]:
        return False
    same = all(t.dtype == x.dtype and t.device == x.device for t in (edge_feat, weight, layer.attn_edge))
    return same and _vectors_fit(layer, x) and layer.fc_edge.bias is None and not is_watched(layer.fc_edge)


def _edge_gat(layer, graph, feat, edge_feat):
    """Result and weights [E, H]. With maps W of the edges' features f: a . W f = f . (W^T a), and the sum of the
    weighted W f is W times the sum of the weighted f."""
    heads, width = heads_and_width(layer)
    structure_ = structure(index_of(graph))
    source, to_source, to_target, target = _ends(layer, graph, feat)
    maps = layer.fc_edge.weight.view(heads, width, -1)
    to_edge = nn.functional.linear(edge_feat, (maps * layer.attn_edge[0].unsqueeze(-1)).sum(1))
    scores = layer.leaky_relu(ops.sddmm(structure_, to_source, to_target, "add", "u", "v") + to_edge)
    weights = layer.attn_drop(ops.edge_softmax(structure_, scores).unsqueeze(-1)).squeeze(-1)
    summed = ops.spmm(structure_.incidence, edge_feat.unsqueeze(1), weights)
    out = ops.spmm(structure_, source, weights) + torch.einsum("nhd,hfd->nhf", summed, maps)
    if layer.res_fc is not None:
        out = out + layer.res_fc(target).view(target.shape[0], -1, width)
    if layer.bias is not None:
        out = out + layer.bias.view(1, heads, width)
    return (layer.activation(out) if layer.activation else out), weights


def agnn_forward(original):
    """AGNNConv.forward that calls `ops.dot_attention` where the layer is a plain one."""

    def forward(self, graph, feat):
        one = isinstance(self.beta, torch.Tensor) and self.beta.numel() == 1
        if not one or not _is_matrix_of_one_side(self, graph, feat) or unsupported(feat, self.beta) is not None:
            return original(self, graph, feat)
        with report.accelerated("dgl.AGNNConv"):
            unit = nn.functional.normalize(feat, p=2, dim=-1)
            structure_ = structure(index_of(graph))
            query = (self.beta * unit)[: structure_.num_rows]
            out = ops.dot_attention(structure_, *(t.unsqueeze(1) for t in (query, unit, feat)), scale=1.0)
            return out.squeeze(1).clone()  # as in _fused

    return forward


def dotgat_forward(original):
    """DotGatConv.forward that calls `ops.dot_attention` where the layer is a plain one."""

    def forward(self, graph, feat, get_attention=False):
        if get_attention or not hasattr(self, "fc") or not _is_matrix_of_one_side(self, graph, feat):
            return original(self, graph, feat, get_attention)
        with report.accelerated("dgl.DotGatConv"):
            x = self.fc(feat).view(-1, *heads_and_width(self))
            structure_ = structure(index_of(graph))
            return ops.dot_attention(structure_, x[: structure_.num_rows], x, x).clone()  # as in _fused

    return forward


def _is_matrix_of_one_side(layer, graph, feat) -> bool:
    """True for a plain call whose features [N, F] are those of the sources, of which the destinations are the first."""
    if isinstance(feat, tuple) or not plain(layer, graph, (feat,)) or feat.dim() != 2:
        return False
    return graph.is_block or len(graph.ntypes) == 1


def checks_of_degrees() -> Iterator[tuple[type[nn.Module], str, Any]]:
    """For the layers that take an `allow_zero_in_degree`: what is to stand in them."""
    for layer in {v for v in vars(dgl.nn.pytorch).values() if isinstance(v, type) and issubclass(v, nn.Module)}:
        if "allow_zero_in_degree" in inspect.signature(layer.__init__).parameters:
            yield layer, "forward", _checked_once(layer.forward)
            yield layer, ALLOWS, allowance


_known = threading.local()  # .layers: those whose graph, in a call of this thread, is known to have no such node


def _allows(layer) -> bool:
    if ALLOWS not in vars(layer):
        raise AttributeError(ALLOWS)
    return layer in getattr(_known, "layers", ()) or vars(layer)[ALLOWS]


def _set_allows(layer, value) -> None:
    vars(layer)[ALLOWS] = value


allowance = property(_allows, _set_allows)
"""Stands in for the layers' own attribute, which stays what and where it is."""


def _checked_once(original):
    """The forward of a layer that refuses nodes without in-edges, which it looks for at every call: on CUDA it would
    wait for the GPU each time. There the answer is kept with the graph."""

    def forward(self, graph, *args, **kwargs):
        looks = not vars(self).get(ALLOWS, True)
        if not looks or not isinstance(graph, dgl.DGLGraph) or graph.device.type != "cuda":
            return original(self, graph, *args, **kwargs)
        index = index_of(graph)
        if index.number_of_etypes() != 1 or not every_row_has_edges(index):
            return original(self, graph, *args, **kwargs)  # which words the error
        before = getattr(_known, "layers", ())
        _known.layers = (*before, self)
        try:
            return original(self, graph, *args, **kwargs)
        finally:
            _known.layers = before

    return forward


def _ends(layer, graph, feat):
    """Of a GATConv or EdgeGATConv: heads of the sources, their scores and the destinations', and what a residual of
    these is of."""
    heads, width = heads_and_width(layer)
    if isinstance(feat, tuple):
        source, target = layer.feat_drop(feat[0]), layer.feat_drop(feat[1])
        apart = hasattr(layer, "fc_src")
        x_source = (layer.fc_src if apart else layer.fc)(source).view(-1, heads, width)
        x_target = (layer.fc_dst if apart else layer.fc)(target).view(-1, heads, width)
        return x_source, ops.head_dots(x_source, layer.attn_l)[0], ops.head_dots(x_target, layer.attn_r)[0], target
    source = target = layer.feat_drop(feat)
    x_source = layer.fc(source).view(-1, heads, width)
    to_source, to_target = ops.head_dots(x_source, torch.cat([layer.attn_l, layer.attn_r])).unbind()
    if graph.is_block:
        rows = structure(index_of(graph)).num_rows
        to_target, target = to_target[:rows], target[:rows]
    return x_source, to_source, to_target, target


def _fused(layer, graph, feat):
    heads, width = heads_and_width(layer)
    structure_ = structure(index_of(graph))
    slope, vectors = layer.leaky_relu.negative_slope, (layer.attn_l, layer.attn_r)
    if not isinstance(feat, tuple) and not graph.is_block and all(v.shape == (1, heads, width) for v in vectors):
        target = layer.feat_drop(feat)
        source = layer.fc(target).view(-1, heads, width)
        mask = _mask(layer, source, structure_.nnz, heads)
        out = ops.gat(structure_, source, *vectors, negative_slope=slope, edge_scale=mask)
    else:
        source, to_source, to_target, target = _ends(layer, graph, feat)
        mask = _mask(layer, source, structure_.nnz, heads)
        out = ops.attention(structure_, source, to_source, to_target, negative_slope=slope, edge_scale=mask)
    if layer.res_fc is None and not layer.has_explicit_bias:
        out = out.clone()  # the op keeps its result for the backward, and the caller may write into this one
    if layer.res_fc is not None:
        out = out + layer.res_fc(target).view(target.shape[0], -1, width)
    if layer.has_explicit_bias:
        out = out + layer.bias.view(1, heads, width)
    return layer.activation(out) if layer.activation else out
