"""How one propagate() or edge_updater() call runs on our ops: a rule for the method, else a trace of it.

Rules are looked up by the method itself, not by the class: a subclass that overrides message() gets no rule of its
parent's, and one that does not keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import ops
from gnnaccel.pyg_backend import attention
from gnnaccel.pyg_backend.graph import Edges, Unsupported, values_of
from gnnaccel.pyg_backend.helpers import takes
from gnnaccel.pyg_backend.trace import SPECIAL, Plan, run_weight, trace

REDUCES = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max", MinAggregation: "min"}

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

_plans: dict[tuple, Plan | str] = {}  # (message, names, those that are None) -> plan, or the reason there is none


def reduction(conv) -> str:
    """The reduce operation of a layer that aggregates plainly.

    Raises
    ------
    Unsupported
        If aggregate() is the layer's own or its aggregation module is not sum, mean, max or min.
    """
    reduce = REDUCES.get(type(conv.aggr_module))
    if reduce is None:
        raise Unsupported(f"aggregation {conv.aggr!r}")
    module = conv.aggr_module
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise Unsupported("hooks on the aggregation")
    return reduce


def propagate(conv, plain: Any, edges: Edges, kwargs: dict) -> Tensor:
    """Message, aggregation and update of one propagate() call without a message in memory.

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
    reduce = reduction(conv)
    rule = MESSAGE_RULES.get(plain.message)
    if rule is not None:
        if reduce != "sum":
            raise Unsupported(f"attention with aggregation {reduce!r}")
        return _call(rule, conv, edges, kwargs)
    return _traced(conv, plain.message, edges, kwargs, reduce)


def edge_updater(conv, plain: Any, edges: Edges, kwargs: dict) -> Tensor:
    """One edge_updater() call on [E, H] tensors. Raises Unsupported as `propagate`."""
    rule = EDGE_RULES.get(plain.edge_update)
    if rule is None:
        raise Unsupported("own edge_update()")
    return _call(rule, conv, edges, kwargs)


def _call(rule: Callable, conv, edges: Edges, kwargs: dict) -> Tensor:
    try:
        return rule(conv, edges, **kwargs)
    except TypeError as error:
        if "argument" in str(error) and rule.__name__ in str(error):  # PyG has its own words for it
            raise Unsupported("arguments that the layer does not take") from error
        raise


def _traced(conv, message: Callable, edges: Edges, kwargs: dict, reduce: str) -> Tensor:
    names = tuple(conv.inspector.get_param_names("message"))
    values = _collected(conv, edges, kwargs)
    missing = {name for name in names if _is_none(name, values, edges)}
    plan = _plan(message, names, frozenset(missing))
    x = edges.node_feature(values.get(plan.feature[:-2]), "_j")
    # The message() may not read them, but PyG checks and counts all features its arguments name.
    for name in names:
        if name[-2:] in ("_i", "_j") and name not in SPECIAL:
            edges.node_feature(values.get(name[:-2]), name[-2:])
    if x is None or not takes(x):
        raise Unsupported("features of an unsupported dtype")
    if x.dim() < 2 or (x.dim() != 2 and conv.node_dim == -2):
        raise Unsupported(f"features of {x.dim()} dimensions with node_dim {conv.node_dim}")
    if plan.weight is None:
        return ops.spmm(edges.graph(), x, reduce=reduce)
    weight = run_weight(plan, edges, values)
    graph = edges.graph()
    if not isinstance(weight, Tensor) or not takes(weight) or weight.device != x.device:
        raise Unsupported("a weight that is not a floating-point tensor")
    if weight.dim() != x.dim() or weight.shape[0] != graph.nnz:
        raise Unsupported(f"a weight of shape {tuple(weight.shape)}")
    if weight.dtype != x.dtype:  # type promotion, on the nodes
        dtype = torch.promote_types(weight.dtype, x.dtype)
        weight, x = weight.to(dtype), x.to(dtype)
    return ops.spmm(graph, x, weight, reduce=reduce)


def _collected(conv, edges: Edges, kwargs: dict) -> dict:
    """The arguments of propagate(), with what PyG takes from a sparse adjacency where it was not given."""
    if not edges.is_sparse:
        return kwargs
    kwargs = dict(kwargs)
    for name in ("edge_weight", "edge_attr", "edge_type"):
        if name not in conv._user_args:
            continue
        if kwargs.get(name) is None:
            values = values_of(edges.edge_index)
            if values is not None and values.requires_grad:
                raise Unsupported("an adjacency whose values require a gradient")
            if name == "edge_attr" and values is not None and values.dim() == 1:
                values = None
            kwargs[name] = values
        if not edges.pairs_by_flow:  # PyG's specialised propagate() looks at the first of the three alone
            break
    return kwargs


def _is_none(name: str, values: dict, edges: Edges) -> bool:
    if name == "ptr":  # a hint that our kernels do not need
        return True
    if name in SPECIAL:
        return False
    if name[-2:] in ("_i", "_j"):
        return not isinstance(edges.pick(values.get(name[:-2]), name[-2:]), Tensor)
    if name not in values:
        raise Unsupported(f"argument {name!r} of message() is not given")
    return values[name] is None


def _plan(message: Any, names: tuple[str, ...], none: frozenset[str]) -> Plan:
    key = (message, names, none)
    plan = _plans.get(key)
    if plan is None:
        try:
            plan = trace(message, names, none)
        except Unsupported as error:
            plan = str(error)
        if len(_plans) > 4096:  # classes made in a loop
            _plans.clear()
        _plans[key] = plan
    if isinstance(plan, str):
        raise Unsupported(plan)
    return plan
