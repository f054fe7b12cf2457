"""Layers whose message() or edge_update() has a rule of its own: attention, fused beyond what lazy features give.

Rules are looked up by the method itself, not by the class: a subclass that overrides message() gets no rule of its
parent's, and one that does not keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing

from gnnaccel.pyg_backend import attention
from gnnaccel.pyg_backend.graph import Edges, Unsupported
from gnnaccel.pyg_backend.helpers import is_watched

# message() -> a function of (layer, edges, propagate arguments) that returns what is passed to update().
MESSAGE_RULES: dict[Callable, Callable] = {
    pyg_nn.GATConv.message: attention.gat,
    pyg_nn.TransformerConv.message: attention.transformer,
    pyg_nn.AGNNConv.message: attention.agnn,
}
# edge_update() -> the same for edge_updater().
EDGE_RULES: dict[Callable, Callable] = {
    pyg_nn.GATConv.edge_update: attention.gat_scores,
    pyg_nn.GATv2Conv.edge_update: attention.gatv2_scores,
}


def propagate(rule: Callable, conv, plain: Any, edges: Edges, kwargs: dict) -> Tensor:
    """Message, aggregation and update of one propagate() call by a rule of MESSAGE_RULES.

    Raises
    ------
    Unsupported
        If that cannot be done; nothing has happened then.
    """
    if plain.aggregate is not MessagePassing.aggregate:
        raise Unsupported("own aggregate()")
    if plain.update is not MessagePassing.update:
        raise Unsupported("own update()")
    if conv.node_dim not in (-2, 0):
        raise Unsupported(f"node_dim {conv.node_dim}")
    if is_watched(conv.aggr_module):
        raise Unsupported("hooks on the aggregation")
    if type(conv.aggr_module) is not SumAggregation:
        raise Unsupported(f"attention with aggregation {conv.aggr!r}")
    return call(rule, conv, edges, kwargs)


def call(rule: Callable, conv, edges: Edges, kwargs: dict) -> Tensor:
    """A rule with the arguments of the call. Raises Unsupported as `propagate`."""
    try:
        return rule(conv, edges, **kwargs)
    except TypeError as error:
        if "argument" in str(error) and rule.__name__ in str(error):  # PyG has its own words for it
            raise Unsupported("arguments that the layer does not take") from error
        raise
