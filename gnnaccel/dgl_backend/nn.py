"""dgl.nn.GATConv with its scores, softmax and sum in one op: nothing of the size of the edges but a dropout mask."""

from __future__ import annotations

import inspect
import threading

import torch
from torch import nn

from gnnaccel import ops, report
from gnnaccel.dgl_backend.graph import every_row_has_edges, structure
from gnnaccel.dgl_backend.ops import transformed

_KIND = "dgl.GATConv"


def _fuses(layer, graph, feat, edge_weight, get_attention) -> bool:
    """True for a plain layer; else its own forward runs, on our SDDMM, edge softmax and SpMM, and words its errors."""
    features = feat if isinstance(feat, tuple) else (feat,)
    if edge_weight is not None or get_attention or graph._graph.number_of_etypes() != 1 or len(features) > 2:
        return False
    counts = (graph.number_of_src_nodes(), graph.number_of_dst_nodes())
    device = structure(graph._graph).device
    for value, count in zip(features, counts, strict=False):
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.device != device:
            return False
        if value.shape[0] != count:
            return False
    if type(layer.leaky_relu) is not nn.LeakyReLU or type(layer.attn_drop) is not nn.Dropout:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks for m in (layer.leaky_relu, layer.attn_drop)):
        return False  # they are to see the scores
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or transformed() is not None:
        return False
    return layer._allow_zero_in_degree or every_row_has_edges(graph._graph)


def gat_forward(original):
    """GATConv.forward that calls `ops.attention` where the layer is a plain one."""

    def forward(self, graph, feat, edge_weight=None, get_attention=False):
        if not _fuses(self, graph, feat, edge_weight, get_attention):
            return original(self, graph, feat, edge_weight, get_attention)  # its ops are accelerated and counted
        with report.accelerated(_KIND):
            return _fused(self, graph, feat)

    forward.__doc__ = original.__doc__
    return forward


def layers_that_check_degrees() -> list[type[nn.Module]]:
    """The layers that take an `allow_zero_in_degree`."""
    import dgl

    layers = {v for v in vars(dgl.nn.pytorch).values() if isinstance(v, type) and issubclass(v, nn.Module)}
    return [v for v in layers if "allow_zero_in_degree" in inspect.signature(v.__init__).parameters]


ALLOWS = "_allow_zero_in_degree"  # what these layers look at
_known = threading.local()  # .layers: those whose graph, in a call of this thread, is known to have no such node


def _allows(layer) -> bool:
    if ALLOWS not in vars(layer):
        raise AttributeError(ALLOWS)
    return layer in getattr(_known, "layers", ()) or vars(layer)[ALLOWS]


def _set_allows(layer, value) -> None:
    vars(layer)[ALLOWS] = value


allowance = property(_allows, _set_allows)
"""Stands in for the layers' own attribute, which stays what and where it is."""


def checked_once(original):
    """The forward of a layer that refuses nodes without in-edges, which it looks for at every call: on CUDA it would
    wait for the GPU each time. There the answer is kept with the graph."""

    def forward(self, graph, *args, **kwargs):
        looks = not vars(self).get(ALLOWS, True)
        index = getattr(graph, "_graph", None)
        if not looks or index is None or graph.device.type != "cuda" or index.number_of_etypes() != 1:
            return original(self, graph, *args, **kwargs)
        if not every_row_has_edges(index):
            return original(self, graph, *args, **kwargs)  # which words the error
        before = getattr(_known, "layers", ())
        _known.layers = (*before, self)
        try:
            return original(self, graph, *args, **kwargs)
        finally:
            _known.layers = before

    forward.__doc__ = original.__doc__
    return forward


def _fused(layer, graph, feat):
    heads, width = layer._num_heads, layer._out_feats
    structure_ = structure(graph._graph)
    if isinstance(feat, tuple):
        source, target = layer.feat_drop(feat[0]), layer.feat_drop(feat[1])
        apart = hasattr(layer, "fc_src")
        x_source = (layer.fc_src if apart else layer.fc)(source).view(-1, heads, width)
        x_target = (layer.fc_dst if apart else layer.fc)(target).view(-1, heads, width)
        score_source = ops.head_dots(x_source, layer.attn_l)[0]
        score_target = ops.head_dots(x_target, layer.attn_r)[0]
    else:
        source = target = layer.feat_drop(feat)
        x_source = layer.fc(source).view(-1, heads, width)
        score_source, score_target = ops.head_dots(x_source, torch.cat([layer.attn_l, layer.attn_r])).unbind()
        if graph.is_block:
            score_target, target = score_target[: structure_.num_rows], target[: structure_.num_rows]
    mask = None
    if layer.attn_drop.training and layer.attn_drop.p > 0:
        # The same draw, in the same order, as the layer's own dropout of the attention.
        mask = layer.attn_drop(x_source.new_ones(structure_.nnz, heads, 1)).squeeze(-1)
    slope = layer.leaky_relu.negative_slope
    out = ops.attention(structure_, x_source, score_source, score_target, negative_slope=slope, edge_scale=mask)
    if layer.res_fc is None and not layer.has_explicit_bias:
        out = out.clone()  # the op keeps its result for the backward, and the caller may write into this one
    if layer.res_fc is not None:
        out = out + layer.res_fc(target).view(target.shape[0], -1, width)
    if layer.has_explicit_bias:
        out = out + layer.bias.view(1, heads, width)
    return layer.activation(out) if layer.activation else out
