"""A small bibliographic graph with several types of nodes and edges, and models for it."""

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import N, backward, edges, grads, rand
from torch_geometric import nn
from torch_geometric.data import HeteroData

COUNTS = {"paper": N, "author": 15, "venue": 4}
WIDTHS = {"paper": 6, "author": 3, "venue": 5}
RELATIONS = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "rev_writes", "author"),
    ("paper", "in", "venue"),
    ("venue", "rev_in", "paper"),
]


def data(widths=None, count=60, seed=0):
    """A small bibliographic graph; `widths` None: each type its own."""
    found = HeteroData()
    for k, (kind, nodes) in enumerate(COUNTS.items()):
        found[kind].x = rand(nodes, WIDTHS[kind] if widths is None else widths, seed=k, grad=True)
    for k, (src, name, dst) in enumerate(RELATIONS):
        found[src, name, dst].edge_index = edges(COUNTS[src], COUNTS[dst], count, seed=seed + k)
        found[src, name, dst].edge_attr = rand(count, 2, seed=k)
    return found


def train(model, graph, *more, **kwargs):
    out = model(graph.x_dict, graph.edge_index_dict, *more, **kwargs)
    backward(out)
    return out, grads(model, graph.x_dict)


class Net(torch.nn.Module):
    """Two layers with a residual: what to_hetero() reads."""

    def __init__(self, make):
        super().__init__()
        self.first, self.last = make(8), make(8)
        self.lin, self.norm = nn.Linear(-1, 8), nn.BatchNorm(8)

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index).relu() + self.lin(x))
        return self.last(x, edge_index)


NETS = {
    "SAGE": lambda n: nn.SAGEConv((-1, -1), n),
    "SAGE max": lambda n: nn.SAGEConv((-1, -1), n, aggr="max"),
    "GAT": lambda n: nn.GATConv((-1, -1), n, add_self_loops=False),
    "GATv2": lambda n: nn.GATv2Conv((-1, -1), n, heads=2, concat=False, add_self_loops=False),
    "Graph": lambda n: nn.GraphConv((-1, -1), n),
    "Transformer": lambda n: nn.TransformerConv((-1, -1), n),
    "ResGated": lambda n: nn.ResGatedGraphConv((-1, -1), n),
}
