"""DGL's own layers, with the graph as DGL's examples hand it to them."""

from __future__ import annotations

import dgl
import torch
from dgl.dataloading import DataLoader, NeighborSampler
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


class Batches:
    """Batches of the training nodes and neighbours of theirs: blocks, features, labels of the training nodes."""

    def __init__(self, graph, x, y, nodes, fanouts: list[int], batch_size: int, device: torch.device) -> None:
        graph.ndata["x"], graph.ndata["y"] = x, y
        sampler = NeighborSampler(fanouts, prefetch_node_feats=["x"], prefetch_labels=["y"])
        self.loader = DataLoader(graph, nodes, sampler, device=device, batch_size=batch_size, shuffle=True)

    def __iter__(self):
        for _, _, blocks in self.loader:
            yield list(blocks), blocks[0].srcdata["x"], blocks[-1].dstdata["y"]


def call(conv: nn.Module, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
    """The layer's result, heads side by side."""
    return conv(graph, x).flatten(1)
