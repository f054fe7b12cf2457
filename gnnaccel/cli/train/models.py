"""Five models of a framework's own layers. What differs between frameworks comes as a module: dgl_layers, pyg_layers.

Such a module makes the graph that its layers take (make_graph), makes a layer (make_conv) and calls it (call), and
draws batches (Batches).
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn


class Convolutions(nn.Module):
    """GCN, SAGE, GIN or GAT: layers with an activation and dropout in between.

    Those of GAT have `heads` heads of the hidden width side by side, the last one a single head.
    """

    def __init__(self, layers: ModuleType, model: str, sizes: list[int], heads: int, dropout: float) -> None:
        super().__init__()
        heads = heads if model == "gat" else 1
        last = len(sizes) - 2
        self.convs = nn.ModuleList(
            layers.make_conv(model, sizes[i] * (heads if i else 1), sizes[i + 1], 1 if i == last else heads)
            for i in range(last + 1)
        )
        self.call = layers.call
        self.activation = nn.ELU() if model == "gat" else nn.ReLU()
        self.dropout = dropout

    def forward(self, graph, x: torch.Tensor) -> torch.Tensor:
        *graphs, last = of_layers(graph, len(self.convs))
        for conv, own in zip(self.convs, graphs, strict=False):
            x = F.dropout(self.activation(self.call(conv, own, x)), self.dropout, self.training)
        return self.call(self.convs[-1], last, x)


class AGNN(nn.Module):
    """Attention by cosine similarity on the hidden width, between two linear layers."""

    def __init__(
        self, layers: ModuleType, inputs: int, hidden: int, classes: int, num_convs: int, dropout: float
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
        self.convs = nn.ModuleList(layers.make_conv("agnn", hidden, hidden, 1) for _ in range(num_convs))
        self.call = layers.call
        self.dropout = dropout

    def forward(self, graph, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.first(x)), self.dropout, self.training)
        for conv, own in zip(self.convs, of_layers(graph, len(self.convs)), strict=True):
            x = self.call(conv, own, x)
        return self.last(x)


def of_layers(graph, count: int) -> list:
    """A graph for each layer: a list has one for each, as DGL's samplers draw them."""
    return graph if isinstance(graph, list) else [graph] * count


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """What GIN applies after its sum."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


def make_model(
    layers: ModuleType, model: str, inputs: int, hidden: int, classes: int, heads: int, num_layers: int, dropout: float
) -> nn.Module:
    """A network whose forward takes a graph and node features [N, inputs], and gives logits [N, classes]."""
    if model == "agnn":
        return AGNN(layers, inputs, hidden, classes, num_layers, dropout)
    return Convolutions(layers, model, [inputs, *[hidden] * (num_layers - 1), classes], heads, dropout)
