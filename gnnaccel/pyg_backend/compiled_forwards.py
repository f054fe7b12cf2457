"""Forwards of PyG's layers inside torch.compile, for layers that make edges of their own (loops), norms or scores:
after those of PyG 2.8, by the ops that compiling.py describes.

Each is asked first, and returns None for a call that is PyG's to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gnnaccel.lower import bounds
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._described import Described
from gnnaccel.ops._edge_factor import FUSED_DTYPES
from gnnaccel.ops.attention import attention_op
from gnnaccel.ops.gatv2 import scores_op
from gnnaccel.ops.graph_conv import graph_conv_op
from gnnaccel.ops.head_dots import head_dots_op
from gnnaccel.ops.own_sum import own_sum_op
from gnnaccel.ops.relu_sum import relu_sum_op
from gnnaccel.ops.spmm import degrees_op, spmm_op
from gnnaccel.pyg_backend.compiling import (
    FEATURES,
    compiling,
    counted,
    dotted,
    dropped,
    graph_of,
    is_as_made,
    is_matrix,
    is_quiet,
    is_weight,
    summed,
    takes_edges,
)
from gnnaccel.pyg_backend.touch import collects_otherwise, edge_update, kept_edges, kept_x
from gnnaccel.pyg_backend.touch import nn as pyg_nn

Graph = Described | Structure  # as `graph_of` gives it


class _Layer:
    """What the forwards of one class of layers ask of it. `known`: PyG's class, whose methods they stand for."""

    def __init__(self, plain: Any, known: Any):
        self.plain, self.known, self.kind = plain, known, f"pyg.{plain.__name__}"
        self.forward, self.message, self.edge_update = _METHODS_OF[known]

    def allows(self, conv: Any, edge_index: Any, node_dims: tuple[int, ...] = (-2, 0)) -> bool:
        """True where the layer is as PyG made it, sums, and is given edges."""
        plain = self.plain
        return (
            plain.forward is self.forward
            and plain.message is self.message
            and edge_update(plain) is self.edge_update
            and conv.node_dim in node_dims
            and not collects_otherwise(plain)
            and type(conv.aggr_module) is pyg_nn.SumAggregation
            and is_quiet(conv.aggr_module)
            and is_as_made(conv, plain)
            and takes_edges(edge_index)
        )


# Sums


def _norm(graph: Graph, dtype: torch.dtype) -> Tensor:
    """One over the square root of each row's degree, 0 where it is empty."""
    degrees = degrees_op(graph).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return torch.where(degrees > 0, degrees.rsqrt(), 0.0)


def _normed_sum(graph: Graph, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return graph_conv_op(graph, x, None, scale, scale, bias, False)


def _normed_graph(layer: _Layer, conv: Any, x: Any, edge_index: Any, loops: bool) -> Graph | None:
    """The graph that a layer multiplies by the norm of; None for calls that are PyG's."""
    if not layer.allows(conv, edge_index) or not is_matrix(x, edge_index):
        return None
    if x.dtype not in (torch.float32, torch.float64):  # PyG rounds norms to 16 bits
        return None
    flipped = conv.flow != "source_to_target"
    return graph_of(edge_index, x.shape[0], x.shape[0], "one" if loops else "none", flipped)


def _weighted_norm(graph: Graph, edges: Tensor, loops: bool, weight: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Weights of the edges and of the loops that `graph` has with `loops`, and factors of the nodes, of a GCN with
    weights of edges."""
    if loops:
        nodes = graph.num_rows
        are_loops = edges[0] == edges[1]
        own = weight.new_full((nodes + 1,), fill)  # the last is of all edges that are no loops
        own = own.index_put((torch.where(are_loops, edges[0], nodes),), weight)[:nodes]
        weight = torch.cat([torch.where(are_loops, 0.0, weight), own])
    degrees = spmm_op(graph, None, weight, "copy_rhs", "sum", 0.0)
    roots = torch.where(degrees == 0, 1.0, degrees).pow(-0.5)  # PyG's infinite ones are 0
    return weight, torch.where(degrees == 0, 0.0, roots)


def _gcn(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        # With norms that an earlier call has kept it is a weighted sum. None are kept here: the graph is, and a program
        # that keeps them is read anew at the next call.
        if not conv.normalize or kept_edges(conv) is not None or (conv.cached and edge_weight is not None):
            return None
        graph = _normed_graph(layer, conv, x, edge_index, conv.add_self_loops)
        if graph is None:
            return None
        if edge_weight is not None and not is_weight(edge_weight, x, edge_index):
            return None
        counted(layer.kind)
        h = conv.lin(x)
        if edge_weight is None:  # `improved` then makes no difference
            return _normed_sum(graph, h, _norm(graph, h.dtype), conv.bias)
        weight, factors = _weighted_norm(
            graph, edge_index, conv.add_self_loops, edge_weight, 2.0 if conv.improved else 1.0
        )
        factors = factors.view(-1, 1)
        out = factors * spmm_op(graph, factors * h, weight.view(-1, 1), "mul", "sum", 0.0)
        return out if conv.bias is None else out + conv.bias

    return forward


def _sg(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        if edge_weight is not None or conv.cached or kept_x(conv) is not None:
            return None
        graph = _normed_graph(layer, conv, x, edge_index, conv.add_self_loops)
        if graph is None:
            return None
        counted(layer.kind)
        scale = _norm(graph, x.dtype)
        for _ in range(conv.K):
            x = _normed_sum(graph, x, scale)
        return conv.lin(x)

    return forward


def _tag(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        if edge_weight is not None or not conv.normalize:
            return None
        graph = _normed_graph(layer, conv, x, edge_index, False)
        if graph is None:
            return None
        counted(layer.kind)
        scale, out = _norm(graph, x.dtype), conv.lins[0](x)
        for lin in conv.lins[1:]:
            x = _normed_sum(graph, x, scale)
            out = out + lin(x)
        return out if conv.bias is None else out + conv.bias

    return forward


def _appnp(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        drops = conv.dropout > 0 and conv.training
        if edge_weight is not None or drops or not conv.normalize:
            return None
        if kept_edges(conv) is not None:
            return None
        graph = _normed_graph(layer, conv, x, edge_index, conv.add_self_loops)
        if graph is None:
            return None
        counted(layer.kind)
        scale, own = _norm(graph, x.dtype), x
        for _ in range(conv.K):
            x = _normed_sum(graph, x, scale) * (1 - conv.alpha) + conv.alpha * own
        return x

    return forward


def _gin(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, size=None):
        eps = conv.eps
        if size is not None or type(x) not in FEATURES or not x.is_cpu:
            return None  # elsewhere Inductor does better with a sum that it sees
        if not layer.allows(conv, edge_index) or not is_matrix(x, edge_index):
            return None
        if eps.numel() != 1 or eps.dtype != x.dtype or eps.device != x.device:
            return None
        counted(layer.kind)
        flipped = conv.flow != "source_to_target"
        return conv.nn(own_sum_op(graph_of(edge_index, x.shape[0], x.shape[0], "none", flipped), x, eps))

    return forward


def _gine(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_attr=None, size=None):
        if size is not None or edge_attr is None or type(x) not in FEATURES or not x.is_cpu:
            return None
        if not layer.allows(conv, edge_index) or not is_matrix(x, edge_index) or not is_matrix(edge_attr, edge_index):
            return None
        edge = edge_attr if conv.lin is None else conv.lin(edge_attr)
        if edge.shape[0] != edge_index.shape[1] or edge.shape[1] != x.shape[1] or edge.dtype != x.dtype:
            return None
        counted(layer.kind)
        graph = graph_of(edge_index, x.shape[0], x.shape[0], "none", conv.flow != "source_to_target")
        return conv.nn(relu_sum_op(graph, x, edge) + (1 + conv.eps) * x)

    return forward


# Attention


def _attended(layer: _Layer, conv: Any, source: Any, target: Any, edge_index: Any) -> Graph | None:
    """The graph that a layer of the GAT family attends over; None for calls that are PyG's."""
    if not layer.allows(conv, edge_index, (0,)) or not is_matrix(source, edge_index):
        return None
    if target is not source and not (is_matrix(target, edge_index) and target.dtype == source.dtype):
        return None
    if source.dtype not in FUSED_DTYPES[source.device.type]:
        return None
    if conv.flow != "source_to_target" or (conv.add_self_loops and target is not source):
        return None
    return graph_of(edge_index, source.shape[0], target.shape[0], "one" if conv.add_self_loops else "none")


def _finished(conv: Any, out: Tensor, res: Tensor | None) -> Tensor:
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    out = out if res is None else out + res
    return out if conv.bias is None else out + conv.bias


def _gat(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_attr=None, size=None, return_attention_weights=None):
        if edge_attr is not None or size is not None or return_attention_weights is not None or conv.lin is None:
            return None
        if type(x) not in FEATURES:
            return None
        graph = _attended(layer, conv, x, x, edge_index)
        if graph is None:
            return None
        counted(layer.kind)
        res = None if conv.res is None else conv.res(x)
        h = conv.lin(x).view(-1, conv.heads, conv.out_channels)
        scores = head_dots_op(h, torch.cat((conv.att_src, conv.att_dst)))
        given = (graph, h, scores[0], scores[1], dropped(conv, h, graph), None, 0.0)
        return _finished(conv, attention_op(*given, conv.negative_slope, torch.is_grad_enabled())[0], res)

    return forward


def _are_made_again(source: Tensor, target: Tensor, width: int) -> bool:
    """True where the backward pass should make projections [nodes, width] again instead of keeping both: they are most
    of what a GATv2 keeps, and two products of matrices take little beside walks over the edges of a large graph."""
    rows = source.shape[0] + target.shape[0]
    return source.is_cuda and torch.is_grad_enabled() and rows * width * source.element_size() >= bounds.REMADE_BYTES


def _gatv2(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_attr=None, return_attention_weights=None):
        if edge_attr is not None or return_attention_weights is not None:
            return None
        source, target = (x, x) if type(x) in FEATURES else x
        if target is None or (conv.share_weights and target is not source):
            return None
        graph = _attended(layer, conv, source, target, edge_index)
        if graph is None:
            return None
        counted(layer.kind)
        shape = -1, conv.heads, conv.out_channels
        res = None if conv.res is None else conv.res(target)

        def ends():
            left = conv.lin_l(source).view(shape)
            return left, left if conv.share_weights else conv.lin_r(target).view(shape)

        if _are_made_again(source, target, conv.heads * conv.out_channels):
            left, right = checkpoint(ends, use_reentrant=False, preserve_rng_state=False)
        else:
            left, right = ends()
        scores = scores_op(graph, left, right, conv.att.view(shape[1:]), conv.negative_slope)
        return _finished(conv, summed(graph, scores, left, dropped(conv, left, graph)), res)

    return forward


def _agnn(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index):
        if not layer.allows(conv, edge_index) or not is_matrix(x, edge_index):
            return None
        if conv.flow != "source_to_target" or x.dtype not in FUSED_DTYPES[x.device.type]:
            return None
        if conv.beta.dtype != x.dtype:
            return None
        counted(layer.kind)
        graph = graph_of(edge_index, x.shape[0], x.shape[0], "one" if conv.add_self_loops else "none")
        ends = F.normalize(x, p=2.0, dim=-1)
        return dotted(graph, (conv.beta * ends)[:, None], ends[:, None], x[:, None], None, 1.0)[:, 0]

    return forward


_MAKERS = (
    (pyg_nn.GCNConv, _gcn),
    (pyg_nn.SGConv, _sg),
    (pyg_nn.TAGConv, _tag),
    (pyg_nn.APPNP, _appnp),
    (pyg_nn.GINConv, _gin),
    (pyg_nn.GINEConv, _gine),
    (pyg_nn.GATConv, _gat),
    (pyg_nn.GATv2Conv, _gatv2),
    (pyg_nn.AGNNConv, _agnn),
)
_METHODS_OF = {known: (known.forward, known.message, edge_update(known)) for known, _ in _MAKERS}
_FORWARDS = {known.forward: (known, make) for known, make in _MAKERS}


def first(plain: Any, general: Callable) -> Callable:
    """`general`, the forward() of layers of class `plain`, behind that of this module where they are compiled."""
    if plain.forward not in _FORWARDS:
        return general
    known, make = _FORWARDS[plain.forward]
    ours = make(_Layer(plain, known))

    @functools.wraps(general)
    def forward(self, *args, **kwargs):
        if compiling():
            out = ours(self, *args, **kwargs)
            if out is not None:
                return out
        return general(self, *args, **kwargs)

    return forward
