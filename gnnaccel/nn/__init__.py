"""Layers for programs that use neither DGL nor PyG: ``conv(graph, x)`` with a `gnnaccel.Graph`, taken as it is (add
self-loops to its edges where a model wants them)."""

from gnnaccel.nn.attention import AGNNConv, GATConv
from gnnaccel.nn.convolution import GCNConv, GINConv, SAGEConv
from gnnaccel.nn.maxk import MaxK
from gnnaccel.nn.models import GCN, GIN, GraphSAGE

__all__ = ["GCN", "GIN", "AGNNConv", "GATConv", "GCNConv", "GINConv", "GraphSAGE", "MaxK", "SAGEConv"]
