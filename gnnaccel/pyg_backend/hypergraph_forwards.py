"""HypergraphConv's forward: means over the nodes of each hyperedge, and over the hyperedges of each node, by two ops of
one graph and its transpose; after that of PyG 2.8. As forwards.py has them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.experimental import is_experimental_mode_enabled

from gnnaccel import ops, report
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.reduce import takes
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import own_parameters, submodules

_FIXED_SHAPES = "disable_dynamic_shapes"  # a mode of PyG's in which a call without `num_edges` is refused


def _hypergraph(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.HypergraphConv)

    @functools.wraps(general)
    def forward(self, x, hyperedge_index, hyperedge_weight=None, hyperedge_attr=None, num_edges=None):
        given = (x, hyperedge_index, hyperedge_weight, hyperedge_attr, num_edges)
        graph, modules = None, submodules(self)
        usual = short.is_matrix(x) and guard.allows(self, hyperedge_index) and "bias" in own_parameters(self)
        usual = usual and self.flow == "source_to_target"
        if usual and short.are_linear(modules.get("lin")) and not torch.is_autocast_enabled(x.device.type):
            graph = _graph_of(x, hyperedge_index, num_edges)
        if graph is None or not _fit(self, graph, x, hyperedge_weight, hyperedge_attr):
            return general(self, *given)
        lin, heads, width = modules["lin"], self.heads, self.out_channels
        values, alpha = lin(x).view(-1, heads, width), None
        start = time.perf_counter()
        if self.use_attention:
            alpha = _attention(self, graph, values, lin(hyperedge_attr).view(-1, heads, width))
        means = ops.spmm(graph, values, alpha, reduce="mean")
        if hyperedge_weight is None:
            out = ops.spmm(graph.transposed, means, alpha, reduce="mean")
        else:
            share = 1.0 / ops.spmm(graph.transposed, hyperedge_weight.view(-1, 1, 1))
            share = share.masked_fill(share == float("inf"), 0)
            out = ops.spmm(graph.transposed, means, alpha) * share
        report.record(guard.kind, start)
        out = out.view(-1, heads * width) if self.concat else out.mean(dim=1)
        bias = own_parameters(self)["bias"]
        return out if bias is None else out + bias

    return forward


def _graph_of(x: Tensor, hyperedge_index: Tensor, num_edges: Any) -> Graph | None:
    """Nodes as sources, hyperedges as destinations; None for a call that PyG refuses, or may."""
    if x.device != hyperedge_index.device or not hyperedge_index.numel():
        return None
    if num_edges is None:
        if is_experimental_mode_enabled(_FIXED_SHAPES):
            return None
        num_edges = derived.get((hyperedge_index,), ("hyperedges",))
        if num_edges is None:
            num_edges = int(hyperedge_index[1].max()) + 1
            derived.put((hyperedge_index,), ("hyperedges",), num_edges)
    return (
        short.graph_of(hyperedge_index, x.shape[0], num_edges, "source_to_target") if type(num_edges) is int else None
    )


def _fit(conv: Any, graph: Graph, x: Tensor, weight: Any, attr: Any) -> bool:
    """True for a weight and features of each hyperedge, where the layer reads them, as its parameters are."""
    parts = [submodules(conv)["lin"].weight, own_parameters(conv)["bias"], own_parameters(conv).get("att")]
    if weight is not None:
        if not takes(weight) or weight.shape != (graph.num_rows,):
            return False
        parts.append(weight)
    if conv.use_attention:
        if not short.is_matrix(attr) or attr.shape != (graph.num_rows, x.shape[1]):
            return False
        parts.append(attr)
    return all(t.dtype == x.dtype and t.device == x.device for t in parts if t is not None)


def _attention(conv: Any, graph: Graph, values: Tensor, of_edges: Tensor) -> Tensor:
    """The weight of each pair of a node and a hyperedge, in each head [nnz, H]."""
    of_node, of_edge = conv.att.split(conv.out_channels, -1)
    of_node, of_edge = ops.head_dots(values, of_node.contiguous())[0], ops.head_dots(of_edges, of_edge.contiguous())[0]
    scores = F.leaky_relu(ops.sddmm(graph, of_node, of_edge, "add", "u", "v"), conv.negative_slope)
    alpha = ops.edge_softmax(graph, scores, "dst" if conv.attention_mode == "node" else "src")
    return F.dropout(alpha, p=conv.dropout, training=conv.training)


FORWARDS: dict[Callable, Callable] = {pyg_nn.HypergraphConv.forward: _hypergraph}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(pyg_nn.HypergraphConv)
