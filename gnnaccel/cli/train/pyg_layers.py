"""PyTorch Geometric's own layers, on a plain edge_index."""

from __future__ import annotations

import torch
from models import mlp
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import AGNNConv, GATConv, GCNConv, GINConv, SAGEConv


def make_graph(edge_index: torch.Tensor, num_nodes: int, model: str, device: torch.device) -> torch.Tensor:
    """edge_index [2, E], sources first; PyG's layers add self-loops themselves."""
    return edge_index.to(device)


def make_conv(model: str, inputs: int, outputs: int, heads: int) -> nn.Module:
    """One layer of `model`; heads counts for "gat" alone."""
    return {
        "gcn": lambda: GCNConv(inputs, outputs),
        "sage": lambda: SAGEConv(inputs, outputs),
        "gin": lambda: GINConv(mlp(inputs, outputs)),
        "gat": lambda: GATConv(inputs, outputs, heads=heads),
        "agnn": AGNNConv,
    }[model]()


class Batches:
    """Batches of the training nodes and neighbours of theirs: edge_index, features, labels of the training nodes, which
    are the first."""

    def __init__(self, edge_index, x, y, nodes, fanouts: list[int], batch_size: int, device: torch.device) -> None:
        data = Data(x=x, y=y, edge_index=edge_index)
        self.loader = NeighborLoader(data, fanouts, input_nodes=nodes, batch_size=batch_size, shuffle=True)
        self.device = device

    def __iter__(self):
        for batch in self.loader:
            batch = batch.to(self.device)
            yield batch.edge_index, batch.x, batch.y[: batch.batch_size]


def call(conv: nn.Module, edge_index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The layer's result."""
    return conv(x, edge_index)
