"""Five models of DGL's own layers, with the graph as DGL's examples hand it to them."""

from __future__ import annotations

import itertools

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import AGNNConv, GATConv, GINConv, GraphConv, SAGEConv
from torch import nn

SELF_LOOPS = ("gcn", "gat", "agnn")  # these models take the node itself as a neighbour; DGL leaves that to the caller


def make_graph(edge_index: torch.Tensor, num_nodes: int, model: str, device: torch.device) -> dgl.DGLGraph:
    """The DGLGraph of edge_index [2, E], sources first, as `model` wants it."""
    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
    if model in SELF_LOOPS:
        graph = dgl.add_self_loop(dgl.remove_self_loop(graph))
    return graph.to(device)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


class Net(nn.Module):
    """GCN, SAGE or GIN: convolutions with ReLU and dropout in between."""

    def __init__(self, model: str, sizes: list[int], dropout: float) -> None:
        super().__init__()
        make = {
            "gcn": GraphConv,
            "sage": lambda inputs, outputs: SAGEConv(inputs, outputs, "mean"),
            "gin": lambda inputs, outputs: GINConv(mlp(inputs, outputs), "sum"),
        }[model]
        self.convs = nn.ModuleList(make(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = dropout

    def forward(self, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(F.relu(conv(graph, x)), self.dropout, self.training)
        return self.convs[-1](graph, x)


class GAT(nn.Module):
    """Graph attention: `heads` heads of the hidden width side by side, one head in the last layer."""

    def __init__(self, sizes: list[int], heads: int, dropout: float) -> None:
        super().__init__()
        inputs = [sizes[0], *(size * heads for size in sizes[1:-1])]
        last = len(sizes) - 2
        self.convs = nn.ModuleList(
            GATConv(inputs[i], sizes[i + 1], 1 if i == last else heads) for i in range(len(inputs))
        )
        self.dropout = dropout

    def forward(self, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(F.elu(conv(graph, x).flatten(1)), self.dropout, self.training)
        return self.convs[-1](graph, x).squeeze(1)


class AGNN(nn.Module):
    """Attention by cosine similarity on the hidden width, between two linear layers."""

    def __init__(self, inputs: int, hidden: int, classes: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
        self.convs = nn.ModuleList(AGNNConv() for _ in range(layers))
        self.dropout = dropout

    def forward(self, graph: dgl.DGLGraph, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.first(x)), self.dropout, self.training)
        for conv in self.convs:
            x = conv(graph, x)
        return self.last(x)


def make_model(
    model: str, inputs: int, hidden: int, classes: int, heads: int, layers: int, dropout: float
) -> nn.Module:
    """A network whose forward takes the graph and node features [N, inputs], and gives logits [N, classes]."""
    if model == "agnn":
        return AGNN(inputs, hidden, classes, layers, dropout)
    sizes = [inputs, *[hidden] * (layers - 1), classes]
    return GAT(sizes, heads, dropout) if model == "gat" else Net(model, sizes, dropout)
