"""DGL's own layers, with the graph as DGL's examples hand it to them."""

from __future__ import annotations

import dgl
import torch
from dgl.nn import AGNNConv, GATConv, GINConv, GraphConv, SAGEConv
from models import mlp
from torch import nn

SELF_LOOPS = ("gcn", "gat", "agnn")  # these models take the node itself as a neighbour; DGL leaves that to the caller


def make_graph(edge_index: torch.Tensor, num_nodes: int, model: str, device: torch.device) -> dgl.DGLGraph:
    """The DGLGraph of edge_index [2, E], sources first, as `model` wants it."""
    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
    if model in SELF_LOOPS:
        graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
    return graph.to(device)


def make_conv(model: str, inputs: int, outputs: int, heads: int) -> nn.Module:
    """One layer of `model`; heads counts for "gat" alone."""
    return {
        "gcn": lambda: GraphConv(inputs, outputs),
        "sage": lambda: SAGEConv(inputs, outputs, "mean"),
        "gin": lambda: GINConv(mlp(inputs, outputs), "sum"),
        "gat": lambda: GATConv(inputs, outputs, heads),
        "agnn": AGNNConv,
    }[model]()


def call(conv: nn.Module, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
    """The layer's result, heads side by side."""
    return conv(graph, x).flatten(1)
