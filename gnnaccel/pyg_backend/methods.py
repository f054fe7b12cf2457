"""Methods of accelerated layers that take part in a call: PyG's own, with what we put in its place inside."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import SparseTensor

from gnnaccel.pyg_backend import (
    attention_forwards,
    compiled_forwards,
    first_calls,
    flight,
    forwards,
    hetero_forwards,
    hypergraph_forwards,
    joined_forwards,
    left,
    normed_forwards,
    relational_forwards,
    rules,
    short,
    sliced,
    sum_forwards,
    typed_attention,
    update_order,
)
from gnnaccel.pyg_backend.aggregate import aggregate as run_aggregation
from gnnaccel.pyg_backend.call import current
from gnnaccel.pyg_backend.graph import Unsupported
from gnnaccel.pyg_backend.helpers import CHEB_NORM, bind, cheb_norm, uses_helpers
from gnnaccel.pyg_backend.propagate import make_entry, make_original
from gnnaccel.pyg_backend.touch import GENERATED, ORIGINAL, edge_update, lifts
from gnnaccel.pyg_backend.touch import nn as pyg_nn


def make_methods(plain: Any) -> dict[str, Callable]:
    """What accelerated layers of class `plain` have in place of its own methods."""
    propagate = make_entry(plain, "propagate")
    members = {"propagate": propagate, ORIGINAL: make_original(plain), GENERATED: propagate}
    if plain.aggregate is MessagePassing.aggregate:
        members["aggregate"] = _make_aggregate(plain)
    if edge_update(plain) is not edge_update(MessagePassing) and short.is_pygs(plain.edge_updater):
        members["edge_updater"] = make_entry(plain, "edge_updater")
    if plain.message_and_aggregate is pyg_nn.GraphConv.message_and_aggregate:
        members["message_and_aggregate"] = _make_matmul(plain)
    if getattr(plain, "__norm__", None) is CHEB_NORM:
        members["__norm__"] = cheb_norm
    if lifts(plain):
        members["_index_select"] = _make_index_select(plain)
    for name in ("collect", "edge_collect", "_collect"):
        if hasattr(plain, name):
            members[name] = _make_collect(plain, name)
    for parent in plain.__mro__[: plain.__mro__.index(MessagePassing)]:
        for name, function in vars(parent).items():
            if name.startswith("__") or name in members:
                continue
            if getattr(plain, name) is function and uses_helpers(function):
                members[name] = _make_bound(plain, name, function)
    reordered = _REORDERED.get(plain.forward)
    if reordered is not None:
        members["forward"] = reordered(members.get("forward", plain.forward))
    hides = plain.forward in _SHOWS_WEIGHTS and rules.find(plain, "propagate") not in (None, rules.weighted)
    if hides:
        members["forward"] = _make_hiding(plain, plain.forward, members.get("forward", plain.forward))
    if hides or reordered is not None:  # they hand from one method to the next what is ours
        members["forward"] = flight.held(plain, members["forward"])
    tables = (
        *(forwards, joined_forwards, normed_forwards, attention_forwards, relational_forwards, typed_attention),
        *(hetero_forwards, hypergraph_forwards, sum_forwards),
    )
    known = False
    for table in (module.FORWARDS for module in tables):
        if plain.forward in table:
            known = True
            general = _unless_replaced(plain, plain.forward, members.get("forward", plain.forward))
            members["forward"] = table[plain.forward](plain, compiled_forwards.first(plain, general))
    forward = first_calls.first(plain, members.get("forward"))
    if not known or plain.forward in left.ALIKE:
        forward = left.at_once(plain, forward)
    forward = sliced.of_layers(plain, forward)
    if forward is not None:
        members["forward"] = forward
    return members


def _unless_replaced(plain: Any, function: Any, method: Callable) -> Callable:
    """`method`, which is ours for `function`, or the forward() that somebody has put into the class since."""

    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        return (method if plain.forward is function else plain.forward)(self, *args, **kwargs)

    return forward


def _make_aggregate(plain: Any) -> Callable:
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        if current.call is None or is_compiling():
            return plain.aggregate(self, inputs, index, ptr=ptr, dim_size=dim_size)
        return run_aggregation(self.aggr_module, inputs, index, ptr, dim_size, self.node_dim)

    return aggregate


def _make_matmul(plain: Any) -> Callable:
    """GraphConv.message_and_aggregate(), which multiplies by an EdgeIndex where the other layers gather from one."""
    original = bind(plain.message_and_aggregate)

    def message_and_aggregate(self, edge_index, x, edge_weight):
        call = current.call
        # PyG's own ignores the flow, and takes unknown sizes from the edges.
        usual = isinstance(edge_index, EdgeIndex) and self.flow == "source_to_target"
        usual = usual and None not in edge_index.sparse_size()
        if call is None or is_compiling() or not usual:
            return original(self, edge_index, x, edge_weight)
        with contextlib.suppress(Unsupported):
            return call.spmm(x[0], edge_weight, self.aggr)
        return original(self, edge_index, x, edge_weight)

    return message_and_aggregate


def _make_index_select(plain: Any) -> Callable:
    def _index_select(self, src, index):
        if current.call is not None and not is_compiling():
            lazy = current.call.lift(src, index)
            if lazy is not None:
                return lazy
        return plain._index_select(self, src, index)

    return _index_select


def _make_collect(plain: Any, name: str) -> Callable:
    def collect(self, *args, **kwargs):
        out = getattr(plain, name)(self, *args, **kwargs)
        if current.call is not None and not is_compiling():
            given = out if isinstance(out, dict) else out._asdict() if hasattr(out, "_asdict") else {}
            current.call.destinations = given.get("index")
            rows = current.call.rows_of_edges(given)
            out = {**out, **rows} if isinstance(out, dict) else out._replace(**rows) if rows else out
        return out

    return collect


def _make_bound(plain: Any, name: str, function: Any) -> Callable:
    """Method `name` of a layer class, running with our helpers in place of PyG's."""
    ours = bind(function)

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        if is_compiling() or current.plainly is self or getattr(plain, name) is not function:  # or was replaced since
            return getattr(plain, name)(self, *args, **kwargs)
        out = ours(self, *args, **kwargs)
        if name == "forward" and type(out) is tuple:
            out = _own_edges(out, (*args, *kwargs.values()))
        return out

    return method


_REORDERED = {**update_order.FORWARDS, pyg_nn.GATConv.forward: attention_forwards.in_one_pass}
# forward() of layers that show their attention weights on demand -> position of that argument; None hides them.
_SHOWS_WEIGHTS = {pyg_nn.GATConv.forward: 4, pyg_nn.GATv2Conv.forward: 3, pyg_nn.TransformerConv.forward: 3}


def _make_hiding(plain: Any, function: Any, method: Callable) -> Callable:
    """A forward() that tells the other methods whether the user will see the attention weights."""
    position = _SHOWS_WEIGHTS[function]

    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        if plain.forward is not function:  # somebody replaced it since
            return plain.forward(self, *args, **kwargs)
        shown = kwargs.get("return_attention_weights", args[position] if len(args) > position else None)
        if is_compiling():
            return method(self, *args, **kwargs)
        outer, current.hidden = current.hidden, shown is None  # that of a layer around this one does not count
        try:
            return method(self, *args, **kwargs)
        finally:
            current.hidden = outer

    return forward


def _own_edges(out: tuple, inputs: tuple) -> tuple:
    """(out, (edge_index, alpha)) or (out, matrix) with a copy of the edges, which may be shared with later calls."""
    if len(out) == 2 and isinstance(out[1], SparseTensor):
        col = out[1].storage.col()
        given = any(isinstance(value, SparseTensor) and value.storage.col() is col for value in inputs)
        return out if given else (out[0], out[1].clone())
    if len(out) != 2 or type(out[1]) is not tuple or not isinstance(out[1][0], Tensor):
        return out
    edges, *rest = out[1]
    return out if any(edges is value for value in inputs) else (out[0], (edges.clone(), *rest))
