"""`gnnaccel.renumber` of PyG's Data and EdgeIndex."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.graph.renumber import Renumbering, edge_index_of
from gnnaccel.graph.renumber import renumber as of_graph
from gnnaccel.pyg_backend.graph import to_graph
from gnnaccel.pyg_backend.touch import Batch, Data, EdgeIndex, forget_order

_OF_NODES = {"x", "y", "z", "pos", "batch", "n_id"}  # by PyG's custom, whatever their number
_OF_GRAPHS = {"y"}


def renumber(data, ordering: str) -> tuple[Data | EdgeIndex, Renumbering]:
    """A copy of `data` with nodes numbered anew."""
    if isinstance(data, EdgeIndex):
        graph, new = of_graph(to_graph(data), ordering)
        if not new.is_profitable:
            return data, new
        size = (graph.num_cols, graph.num_rows)
        return EdgeIndex(edge_index_of(graph, data.dtype), sparse_size=size), new
    if not isinstance(data, Data) or isinstance(data, Batch):
        raise TypeError(
            f"renumber: graph_or_data: of PyG expected a Data (no HeteroData, no Batch) or an edge_index, got "
            f"{type(data).__name__}"
        )
    if not isinstance(data.edge_index, Tensor):
        raise TypeError("renumber: graph_or_data: expected a Data with an edge_index, got none")
    kinds = {key: _kind(data, key, value) for key, value in data if key != "edge_index"} | {"edge_index": "other"}
    graph, new = of_graph(to_graph(data), ordering)
    out = copy.copy(data)
    if not new.is_profitable:
        return out, new
    for key, value in data:
        if kinds[key] == "numbers":
            out[key] = _numbers(new, key, value)
        elif kinds[key] != "other":
            out[key] = _taken(value, new.order if kinds[key] == "nodes" else new.edge_order)
    out.edge_index = edge_index_of(graph, data.edge_index.dtype)
    forget_order(out)
    return out, new


def _kind(data: Data, key: str, value: Any) -> str:
    """What an attribute holds: "numbers" of nodes, rows of "nodes" or "edges", or "other" things that stay."""
    if isinstance(value, (Tensor, np.ndarray)):
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise TypeError(f"renumber: graph_or_data: {key} is a sparse tensor, which is not understood; leave it out")
        integers = value.dtype.kind in "iu" if isinstance(value, np.ndarray) else _integers(value)
        if integers and "batch" not in key and _says_numbers(data, key, value):
            return "numbers"
        if data.is_node_attr(key):
            known = key in _OF_NODES or key.endswith("mask")
            if data.num_nodes == data.num_edges and not known:
                raise ValueError(
                    f"renumber: graph_or_data: there are as many edges as nodes, and whose {key} is cannot be told; "
                    "leave it out, and map it by Renumbering.features if it is of nodes"
                )
            return _in_first(data, key, value, "nodes")
        if data.is_edge_attr(key):
            return _in_first(data, key, value, "edges")
        of_others = key.startswith("edge_") or key in _OF_GRAPHS or value.ndim == 0
        if integers and not of_others:
            raise ValueError(
                f"renumber: graph_or_data: {key} holds integers, as many as neither nodes nor edges: whether they are "
                "node numbers cannot be told; leave it out, and map it by Renumbering.nodes if they are"
            )
        return "other"
    if isinstance(value, (list, tuple)) and data.is_node_attr(key):
        return "nodes"
    if isinstance(value, (list, tuple)) and data.is_edge_attr(key):
        return "edges"
    if _lists_integers(value):
        raise ValueError(
            f"renumber: graph_or_data: {key} has lists of integers: whether they are node numbers cannot be told; "
            "leave it out, and map them by Renumbering.nodes if they are"
        )
    if _holds_arrays(value):
        raise TypeError(
            f"renumber: graph_or_data: {key} is a {type(value).__name__} with arrays, which is not understood; "
            "leave it out"
        )
    return "other"


def _in_first(data: Data, key: str, value, kind: str) -> str:
    if data.__cat_dim__(key, value) % value.ndim != 0:
        raise TypeError(f"renumber: graph_or_data: {key} has its {kind} in another dimension than the first")
    return kind


def _integers(value: Tensor) -> bool:
    return not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool)


def _says_numbers(data: Data, key: str, value) -> bool:
    """True if mini-batches would add the number of nodes to it."""
    step = data.__inc__(key, value)
    if isinstance(step, Tensor):
        step = step.unique().tolist()
        return step == [data.num_nodes]
    return isinstance(step, int) and step == data.num_nodes


def _numbers(new: Renumbering, key: str, value):
    numbers = torch.from_numpy(value) if isinstance(value, np.ndarray) else value.as_subclass(Tensor)
    try:
        found = new.nodes(numbers)
    except (TypeError, ValueError) as error:
        raise type(error)(f"renumber: graph_or_data: {key}: {error}") from None
    return found.numpy() if isinstance(value, np.ndarray) else found


def _taken(value, at: Tensor):
    """Rows of a tensor, an array, a list or a tuple."""
    if isinstance(value, Tensor):
        return value.index_select(0, at.to(value.device))
    if isinstance(value, np.ndarray):
        return value[at.cpu().numpy()]
    return type(value)(value[i] for i in at.tolist())


def _lists_integers(value: Any) -> bool:
    """True of lists, tuples and sets with integers in them, also in dictionaries."""
    if isinstance(value, dict):
        return any(map(_lists_integers, value.values()))
    if not isinstance(value, (list, tuple, set, frozenset)):
        return False
    return any(_lists_integers(item) or (isinstance(item, int) and not isinstance(item, bool)) for item in value)


def _holds_arrays(value: Any) -> bool:
    """True of containers of tensors, of torch_sparse's matrices and of TensorFrames."""
    if isinstance(value, dict):
        return any(map(_holds_arrays, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_arrays, value))
    return isinstance(value, (Tensor, np.ndarray)) or type(value).__module__.startswith(("torch_sparse", "torch_frame"))
