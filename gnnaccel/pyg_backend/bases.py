"""Models of to_hetero_with_bases(): what they make of all edge types at each call is kept with the edges, and their
layers' messages, which a hook of PyG's multiplies by a number for each edge type, are not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import ops, touch
from gnnaccel.graph import modes
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.pyg_backend.touch import HOOKS, MESSAGE_HOOKS, Names, types_of_edges

_PYGS = Names("torch_geometric.nn.to_hetero_with_bases_transformer")
_HOOK = _PYGS.hook
_GROUP, _TYPES = _PYGS.group_edge_placeholder, _PYGS.get_edge_type
_OTHERS = tuple(name for name in HOOKS if name != MESSAGE_HOOKS)


def weighs_messages(conv: Any) -> bool:
    """True for a layer of such a model, whose messages nobody else changes."""
    state = vars(conv)
    hooks = state.get(MESSAGE_HOOKS)
    if not hooks or any(hook is not _HOOK for hook in hooks.values()) or any(map(state.get, _OTHERS)):
        return False
    types = types_of_edges(conv)
    return type(types) is Tensor and types.dim() == 1


def factors(conv: Any) -> Tensor:
    """What the hook multiplies each edge's message by, [E]."""
    weight, types = conv.edge_type_weight.view(-1), types_of_edges(conv)
    if not types.is_cuda or types.numel() <= bounds.BASES_EDGES:
        return weight[types]
    # As a sum over a graph: torch's gradient of an index sorts it, and adds up a type's edges one after the other.
    select = derived.get((types,), ("factors", weight.shape[0]))
    if select is None:
        rows = torch.arange(types.shape[0] + 1, device=types.device)
        select = Graph.from_csr(rows, types, num_cols=weight.shape[0])
        derived.put((types,), ("factors", weight.shape[0]), select)
    return ops.spmm(select, weight.unsqueeze(1)).squeeze(1)


def _grouped(input_dict: dict, type2id: dict, offset_dict: dict | None = None):
    owners = tuple([input_dict[key] for key in type2id])
    if len(owners) < 2 or offset_dict is None or not all(map(_is_index, owners)):
        return _GROUP(input_dict, type2id, offset_dict)
    key = ("edges of all types", tuple(type2id), tuple(offset_dict.items()))
    return _kept(owners, key, lambda: _GROUP(input_dict, type2id, offset_dict))


def _types_of(input_dict: dict, type2id: dict) -> Tensor:
    owners = tuple([input_dict[key] for key in type2id])
    if not all(map(_is_index, owners)):
        return _TYPES(input_dict, type2id)
    return _kept(owners, ("types of all edges", tuple(type2id)), lambda: _TYPES(input_dict, type2id))


REPLACED: dict[Callable, Callable] = {_GROUP: _grouped, _TYPES: _types_of}
"""Functions of PyG's that the models call -> ours, with the same results."""


def _is_index(edges: Any) -> bool:
    return type(edges) is Tensor and edges.dtype is torch.int64 and edges.dim() == 2 and edges.shape[0] == 2


def _kept(owners: tuple, key: tuple, make: Callable[[], Tensor]) -> Tensor:
    if torch.compiler.is_compiling() or touch.transforming() or touch.tracing():
        return make()
    found = derived.get(owners, key)
    if found is not None and found[0]._version == found[1]:  # the model may write into what it gets
        return found[0]
    with modes.outside_inference():
        made = make()
    derived.put(owners, key, (made, made._version))
    return made
