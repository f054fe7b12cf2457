"""Five models of PyTorch Geometric's own layers, on a plain edge_index."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import AGNNConv, GATConv, GCNConv, GINConv, SAGEConv


def make_graph(edge_index: torch.Tensor, num_nodes: int, model: str, device: torch.device) -> torch.Tensor:
    """edge_index [2, E], sources first; PyG's layers add self-loops themselves."""
    return edge_index.to(device)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


class Net(nn.Module):
    """GCN, SAGE or GIN: convolutions with ReLU and dropout in between."""

    def __init__(self, model: str, sizes: list[int], dropout: float) -> None:
        super().__init__()
        make = {
            "gcn": GCNConv,
            "sage": SAGEConv,
            "gin": lambda inputs, outputs: GINConv(mlp(inputs, outputs)),
        }[model]
        self.convs = nn.ModuleList(make(a, b) for a, b in itertools.pairwise(sizes))
        self.dropout = dropout

    def forward(self, edge_index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(F.relu(conv(x, edge_index)), self.dropout, self.training)
        return self.convs[-1](x, edge_index)


class GAT(nn.Module):
    """Graph attention: `heads` heads of the hidden width side by side, one head in the last layer."""

    def __init__(self, sizes: list[int], heads: int, dropout: float) -> None:
        super().__init__()
        inputs = [sizes[0], *(size * heads for size in sizes[1:-1])]
        last = len(sizes) - 2
        self.convs = nn.ModuleList(
            GATConv(inputs[i], sizes[i + 1], heads=1 if i == last else heads) for i in range(len(inputs))
        )
        self.dropout = dropout

    def forward(self, edge_index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(F.elu(conv(x, edge_index)), self.dropout, self.training)
        return self.convs[-1](x, edge_index)


class AGNN(nn.Module):
    """Attention by cosine similarity on the hidden width, between two linear layers."""

    def __init__(self, inputs: int, hidden: int, classes: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
        self.convs = nn.ModuleList(AGNNConv() for _ in range(layers))
        self.dropout = dropout

    def forward(self, edge_index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.first(x)), self.dropout, self.training)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.last(x)


def make_model(
    model: str, inputs: int, hidden: int, classes: int, heads: int, layers: int, dropout: float
) -> nn.Module:
    """A network whose forward takes edge_index and node features [N, inputs], and gives logits [N, classes]."""
    if model == "agnn":
        return AGNN(inputs, hidden, classes, layers, dropout)
    sizes = [inputs, *[hidden] * (layers - 1), classes]
    return GAT(sizes, heads, dropout) if model == "gat" else Net(model, sizes, dropout)
