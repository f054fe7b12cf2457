"""PyTorch Geometric's own layers, on a plain edge_index."""

from __future__ import annotations

import torch
from models import mlp
from torch import nn
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


def call(conv: nn.Module, edge_index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The layer's result."""
    return conv(x, edge_index)
