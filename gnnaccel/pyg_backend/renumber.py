"""`gnnaccel.renumber` of PyG's Data."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from gnnaccel.graph.renumber import Renumbering, renumbering
from gnnaccel.pyg_backend.graph import to_graph


def renumber(data, method: str) -> tuple[Data, Renumbering]:
    """A copy of `data` with nodes numbered anew."""
    if not isinstance(data, Data) or isinstance(data, Batch):
        raise TypeError(
            f"renumber: graph_or_data: of PyG expected a Data (no HeteroData, no Batch) or an edge_index, got "
            f"{type(data).__name__}"
        )
    if data.edge_index is None or not isinstance(data.edge_index, Tensor) or data.edge_index.layout != torch.strided:
        raise TypeError(
            "renumber: graph_or_data: expected a Data with an edge_index; a sparse matrix has no edge order"
        )
    kinds = {key: _kind(data, key, value) for key, value in data}
    new = renumbering(to_graph(data), method)
    out = copy.copy(data)
    for key, value in data:
        if kinds[key] == "numbers":
            out[key] = new.nodes(value.as_subclass(Tensor))
        elif kinds[key] == "rows":
            out[key] = new.features(value) if isinstance(value, Tensor) else [value[i] for i in new.order.tolist()]
    return out, new


def _kind(data: Data, key: str, value) -> str:
    """What an attribute holds: "numbers" of nodes, "rows" of nodes, or "other" things that stay as they are."""
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise TypeError(f"renumber: graph_or_data: {key} is a sparse tensor, which is not understood; leave it out")
    if isinstance(value, Tensor) and ("index" in key or key == "face"):  # Data.__inc__ says the same
        return "numbers"
    if data.is_node_attr(key):
        return "rows"
    integers = isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() > 0
    if integers and not data.is_edge_attr(key):
        raise ValueError(
            f"renumber: graph_or_data: {key} holds integers, as many as neither nodes nor edges: whether they are node "
            "numbers cannot be told; leave it out, and map it by Renumbering.nodes if they are"
        )
    return "other"
