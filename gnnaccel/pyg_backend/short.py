"""What lets a layer's forward() go straight to an op, past PyG's collect, its inspector and our rules: a guard of a few
comparisons, and the graph that the op takes, found by one look-up.

The forwards that use it are in forwards.py (sums) and attention_forwards.py. What a guard does not know goes the
general way, through propagate(), with the same result.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import touch
from gnnaccel.graph import scales
from gnnaccel.graph.cache import derived, graph_key
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.reduce import takes
from gnnaccel.pyg_backend.graph import (
    INDEX_DTYPES,
    Unsupported,
    from_edge_index,
    from_sparse,
    nonzeros_of,
    unserved,
    with_loops,
)
from gnnaccel.pyg_backend.helpers import ours
from gnnaccel.pyg_backend.propagate import kind_of, obstacle
from gnnaccel.pyg_backend.touch import GENERATED, collects_otherwise, edge_update
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import own_parameters, submodules

_EDGE_UPDATE = edge_update(MessagePassing)


class Guard:
    """Whether a layer is as its class, and its class as PyG made it, so that `forward` may do the work of all methods.

    Parameters
    ----------
    plain : type
        The layer's own class.
    known : type
        PyG's, whose methods the forward stands for.
    aggregations : tuple of type
        Of the modules that it does the work of.
    node_dims : tuple of int
        The values of node_dim that mean the rows of what propagate() would be given.
    """

    __slots__ = (
        *(
            "_aggregate",
            "_aggregations",
            "_edge_update",
            "_forward",
            "_helpers",
            "_message",
            "_namespace",
            "_node_dims",
            "_update",
        ),
        *("kind", "plain"),
    )

    def __init__(
        self,
        plain: Any,
        known: Any,
        aggregations: tuple[type, ...] = (pyg_nn.SumAggregation,),
        node_dims: tuple[int, ...] = (-2, 0),
    ):
        self.plain, self.kind = plain, kind_of(plain)
        self._forward, self._message, self._aggregate, self._update, self._edge_update, self._helpers = METHODS[known]
        self._namespace = inspect.unwrap(self._forward).__globals__
        self._aggregations, self._node_dims = aggregations, node_dims

    def allows(self, conv: Any, edge_index: Any) -> bool:
        """True if nothing of `conv` or its class was replaced, watched or switched, and it was given an edge_index."""
        return self.allows_layer(conv, edge_index) and self.unchanged()

    def allows_all(self, conv: Any, edges: Collection[Any]) -> bool:
        """The same of a layer that is given several."""
        return self.allows_layer(conv, *edges) and self.unchanged()

    def allows_matrix(self, conv: Any, adj: Any) -> bool:
        """The same of a layer that gathers by an adjacency matrix, of whose values it reads none."""
        if (type(adj) is Tensor and adj.layout is torch.strided) or conv.fuse or conv.flow != "source_to_target":
            return False
        matrix = nonzeros_of(adj)
        # PyG's general propagate() hands out a value of each nonzero as well.
        if matrix is None or matrix.features is not None or self.plain.propagate is MessagePassing.propagate:
            return False
        return self.allows_all(conv, ())

    def unchanged(self) -> bool:
        """True if nothing of the class was replaced, and nobody watches all modules."""
        plain = self.plain
        if plain.message is not self._message or plain.forward is not self._forward:
            return False
        if plain.update is not self._update:
            return False
        if plain.aggregate is not self._aggregate or collects_otherwise(plain):
            return False
        if edge_update(plain) is not self._edge_update:
            return False
        if self._edge_update is not _EDGE_UPDATE and not is_pygs(plain.edge_updater):
            return False
        for name, helper in self._helpers:
            if self._namespace.get(name) is not helper:
                return False
        return not touch.has_global_hooks()

    def allows_layer(self, conv: Any, *edges: Any) -> bool:
        """`allows` of a layer whose class is `unchanged`."""
        if torch.compiler.is_compiling():
            return False
        for edge_index in edges:
            if type(edge_index) is not Tensor or edge_index.dtype not in INDEX_DTYPES:
                return False
        if obstacle(conv) is not None:  # before a shape is compared, of which a trace warns
            return False
        for edge_index in edges:
            if edge_index.dim() != 2 or edge_index.shape[0] != 2:
                return False
            # Not an adjacency matrix of two nodes.
            if edge_index.layout is not torch.strided or not (edge_index.is_cpu or unserved(edge_index.device) is None):
                return False
        if conv.node_dim not in self._node_dims:
            return False
        aggregation = submodules(conv).get("aggr_module")
        if type(aggregation) not in self._aggregations or hooked(aggregation):
            return False
        # PyG binds the class's own propagate() to a layer that it has explained.
        own = conv.__dict__.get("propagate")
        return own is None or getattr(own, "__func__", None) is getattr(type(conv), GENERATED, None)


hooked = touch.is_hooked
"""`is_watched` of a layer's part, where the layer's guard has found that not all modules are."""


def pairs_by_flow(plain: Any) -> bool:
    """True for a class for which PyG could write no propagate() or edge_updater() of its own: the general ones take the
    sources of a pair by the flow, where those take the first (`graph.Edges`)."""
    return plain.propagate is MessagePassing.propagate or plain.edge_updater is MessagePassing.edge_updater


def is_pygs(updater: Any) -> bool:
    """True for the edge_updater() of the base class, or one that PyG has generated; not for a user's own."""
    return updater is MessagePassing.edge_updater or updater.__module__.endswith("_edge_updater")


_LINEAR: dict[type, Callable] = {cls: cls.forward for cls in (pyg_nn.Linear, torch.nn.Linear)}


def are_linear(*maps: Any) -> bool:
    """True for linear layers that nobody watches: they give a row for each row, of its dtype, as ops want it that take
    several results of theirs; what somebody has put in their place may give anything."""
    for lin in maps:  # noqa: SIM110 - all() takes longer
        if type(lin) not in _LINEAR or touch.has_forward_hooks(lin) or "forward" in vars(lin):
            return False
    return True


def parameters_of(lin: Any) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a linear map that nobody watches, compiles or has changed: what it does with a matrix is
    torch's linear of these. None for any other. Of layers that a guard allows."""
    if type(lin) not in _LINEAR or hooked(lin) or type(lin).forward is not _LINEAR[type(lin)]:
        return None
    own, parameters = lin.__dict__, own_parameters(lin)
    weight = parameters.get("weight")
    # Not of one that is to find its width, and not of a replica.
    if type(weight) is not torch.nn.Parameter or "bias" not in parameters or own.get(touch.COMPILED_CALL):
        return None
    return weight, parameters["bias"]


METHODS: dict[Any, tuple[Any, Callable, Callable, Callable, Callable, tuple]] = {}
"""forward(), message(), aggregate(), update() and edge_update() of PyG's layers as they were when this package was
imported, and the helpers that forward() calls: (name, function) of those that we have our own of."""


def know(*classes: Any) -> None:
    """Note the methods of these classes of PyG's as they are now."""
    for cls in classes:
        original = inspect.unwrap(cls.forward)
        namespace, names = original.__globals__, original.__code__.co_names
        functions = [(name, namespace[name]) for name in names if isinstance(namespace.get(name), types.FunctionType)]
        helpers = tuple((name, function) for name, function in functions if ours(function) is not function)
        METHODS[cls] = (cls.forward, cls.message, cls.aggregate, cls.update, edge_update(cls), helpers)


FEATURES = (Tensor, torch.nn.Parameter)


def is_matrix(x: Any) -> bool:
    """True for a plain tensor of two dimensions that our ops take."""
    if type(x) not in FEATURES or x.dim() != 2:
        return False
    # Float32 on the CPU without a further call.
    return (x.dtype is torch.float32 and x.is_cpu and x.layout is torch.strided) or takes(x)


def graph_of(edge_index: Tensor, num_src: int, num_dst: int, flow: str) -> Graph | None:
    """`from_edge_index`, or None for an index out of range, which is PyG's to report."""
    graph = derived.get((edge_index,), graph_key(num_src, num_dst, flow))
    if graph is not None:
        return graph
    try:
        return from_edge_index(edge_index, num_src, num_dst, flow)
    except ValueError:
        return None


def graph_of_matrix(adj: Any, source: Tensor, own: Tensor) -> Graph | None:
    """`from_sparse`, or None for features of other sizes or devices, which are PyG's to report."""
    if adj.size(1) != source.shape[0] or adj.size(0) != own.shape[0]:
        return None
    try:
        graph = from_sparse(adj)
    except (Unsupported, ValueError):
        return None
    return graph if graph.device == source.device == own.device else None


def looped(edge_index: Tensor, num_nodes: int, flow: str, how: str) -> Graph | None:
    """The graph with self-loops, kept with `edge_index`; None for an index out of range.

    how : "one" leaves one at each node, where PyG's edges without attributes have any number; "more" adds one to each.
    """
    graph = derived.get((edge_index,), ("looped", num_nodes, flow, how == "one"))
    if graph is not None:
        return graph
    try:
        return with_loops(edge_index, num_nodes, flow, how == "one")
    except ValueError:
        return None


def normed(edge_index: Tensor, num_nodes: int, flow: str, loops: bool, dtype: torch.dtype) -> tuple | None:
    """(graph, scale): the matrix of a GCN is that of the graph with this scale [num_nodes] for rows and for sources."""
    made = looped(edge_index, num_nodes, flow, "one") if loops else graph_of(edge_index, num_nodes, num_nodes, flow)
    return None if made is None else (made, scales.norm_scale(made, dtype))


def number(constant: Tensor) -> float | None:
    """The value of a tensor of one number that nobody trains, where it can be read without waiting: on the CPU. Not to
    be remembered, as writes into `.data` go unseen."""
    return float(constant) if constant.is_cpu and not constant.requires_grad else None
