"""update_all and apply_edges of built-in functions, and edge_softmax, on graphs of one edge type: without DGL's layers.

DGL slices the graph, makes views of its frames and checks what comes back, at each call again. Here features go from
the frames to the function of dgl.ops, which is what DGL calls with them, and its result goes back. What is not plain
(other functions, several edge types, a feature that is missing, a subclass of DGLGraph) goes DGL's way, which words
the errors.
"""

from __future__ import annotations

import time

import dgl
import torch
from dgl import DGLGraph

from gnnaccel import report
from gnnaccel.dgl_backend import ops
from gnnaccel.dgl_backend.structure import ends, known_structure, structure
from gnnaccel.dgl_backend.touch import (
    ALL,
    BinaryMessageFunction,
    Column,
    CopyMessageFunction,
    DGLBlock,
    SimpleReduceFunction,
    TargetCode,
    columns_of,
    edge_frames,
    index_of,
    is_all,
    node_frames,
)
from gnnaccel.graph.csr import Graph

_GRAPHS = (DGLGraph, DGLBlock)
_MESSAGES = (BinaryMessageFunction, CopyMessageFunction)


def autocasting() -> bool:
    """True where torch, or DGL's ops, would cast features first."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def is_plain(g) -> bool:
    """True for a graph whose methods are DGL's."""
    return type(g) in _GRAPHS


def copied(g, graph: Graph, x: torch.Tensor, reduce: str) -> torch.Tensor:
    """What update_all(copy_u, `reduce`) gives the destinations of g, whose Graph is `graph`."""
    if reduce in ("sum", "mean") and not autocasting():
        start = time.perf_counter()
        if (out := ops.kernels.ready_sum(graph, x, "copy_lhs", reduce)) is not None:
            report.record(f"dgl.gspmm copy_lhs.{reduce}", start)
            return out
        if (out := ops.known_spmm(graph, "copy_lhs", reduce, x, None)) is not None:
            return out
    return _finite(getattr(dgl.ops, f"copy_u_{reduce}")(g, x), reduce)


def _finite(out: torch.Tensor, reduce: str) -> torch.Tensor:
    return out.masked_fill(out.isinf(), 0) if reduce in ("max", "min") else out


def update_all(original):
    """DGLGraph.update_all."""

    def method(self, message_func, reduce_func, apply_node_func=None, etype=None):
        builtin = type(message_func) in _MESSAGES and type(reduce_func) is SimpleReduceFunction
        plain = builtin and apply_node_func is None and etype is None and is_plain(self)
        out = _reduced(self, message_func, reduce_func) if plain else None
        if out is None:
            return original(self, message_func, reduce_func, apply_node_func, etype)
        node_frames(self)[ends(index_of(self))[1]][reduce_func.out_field] = out
        return None

    return method


def _reduced(g, message_func, reduce_func) -> torch.Tensor | None:
    graph, features = _read(g, message_func)
    if graph is None or message_func.out_field != reduce_func.msg_field:
        return None
    message, reduce = message_func.name, reduce_func.name
    if message == "copy_u":
        return copied(g, graph, features[0], reduce)
    out = None
    if message in ("u_mul_e", "u_add_e") and reduce in ("sum", "mean") and not autocasting():
        out = ops.known_spmm(graph, message_func.binary_op, reduce, *features)
    if out is not None:
        return out
    function = getattr(dgl.ops, f"{message}_{reduce}", None)
    return None if function is None else _finite(function(g, *features), reduce)


def apply_edges(original):
    """DGLGraph.apply_edges."""

    def method(self, func, edges=ALL, etype=None):
        plain = type(func) in _MESSAGES and is_all(edges) and etype is None and is_plain(self)
        graph, features = _read(self, func) if plain else (None, ())
        if graph is None:
            return original(self, func, edges, etype)
        edge_frames(self)[0][func.out_field] = _combined(self, graph, func, features)
        return None

    return method


def _combined(g, graph: Graph, func, features: tuple) -> torch.Tensor:
    out = None
    if type(func) is BinaryMessageFunction and func.binary_op in ("add", "mul", "dot") and not autocasting():
        (lhs, rhs), names = features, TargetCode.CODE2STR
        out = ops.known_sddmm(graph, func.binary_op, lhs, rhs, names[func.lhs], names[func.rhs])
    return getattr(dgl.ops, func.name)(g, *features) if out is None else out


def edge_softmax(original):
    """What dgl.ops.edge_softmax calls for a graph of one edge type."""

    def function(gidx, logits, eids=ALL, norm_by="dst"):
        start, graph = time.perf_counter(), known_structure(gidx)
        if graph is not None and is_all(eids) and not autocasting():
            out = ops.kernels.ready_softmax(graph.transposed if norm_by == "src" else graph, logits)
            if out is not None:
                report.record("dgl.edge_softmax", start)
                return out
        return original(gidx, logits, eids, norm_by)

    return function


def _read(g, func) -> tuple[Graph | None, tuple]:
    """The Graph of a plain graph, and what a built-in message function reads from its frames. None for several edge
    types, a feature that is missing or yet to be fetched, and, of a new graph, features that are not for our ops."""
    index = index_of(g)
    graph = known_structure(index)
    if graph is None and index.number_of_etypes() != 1:
        return None, ()
    if type(func) is CopyMessageFunction:
        named = [(func.target, func.in_field)]
    else:
        named = [(func.lhs, func.lhs_field), (func.rhs, func.rhs_field)]
    columns = [columns_of(_frame(g, target)).get(field) for target, field in named]
    if any(type(c) is not Column for c in columns):
        return None, ()
    features = tuple(c.data for c in columns)
    if graph is None and ops.unsupported(*features) is None:
        graph = structure(index)
    return graph, features


def _frame(g, target: int):
    return edge_frames(g)[0] if target == TargetCode.EDGE else node_frames(g)[ends(index_of(g))[target]]
