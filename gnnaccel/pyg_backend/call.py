"""One propagate() call: what the layer's methods and our helpers inside them know of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.expression import SIDES
from gnnaccel.lazy.reduce import reduced, softmax_sum, takes
from gnnaccel.lazy.tensor import Lazy, Trip, lift, waiting, waits
from gnnaccel.pyg_backend.graph import Edges, Unsupported, columns_of
from gnnaccel.pyg_backend.touch import EdgeIndex, Index


class _Current(threading.local):
    """What the methods of a layer tell each other during one call on this thread.

    hidden : its forward() will not show the attention weights to anybody.
    plainly : the layer whose forward() is PyG's own, with what it calls of that layer.
    why : that is so, if not as its edges are new.
    outcome : [the layer whose forward() runs, whether a call of its was left to PyG for few messages, and whether
        anything of ours ran beside].
    """

    call: Call | None = None
    hidden: bool = False
    plainly: Any = None
    why: str | None = None
    outcome: list | None = None


current = _Current()


def alone(function: Callable, /, *args, **kwargs):
    """`function`, PyG's own, without our helpers: a call around it is one of other edges."""
    outer = current.call
    if outer is None:
        return function(*args, **kwargs)
    current.call = None
    try:
        return function(*args, **kwargs)
    finally:
        current.call = outer


def plainly(function: Callable, conv: Any, why: str, /, *args, **kwargs):
    """function(conv, *args, **kwargs), a forward() of PyG's own, with its own propagate()."""
    outer = current.plainly, current.why
    current.plainly, current.why = conv, why
    try:
        return function(conv, *args, **kwargs)
    finally:
        current.plainly, current.why = outer


def note_outcome(conv: Any, left: bool) -> None:
    """Note that a call of `conv` was left to PyG for its few messages, or took any other way."""
    outcome = current.outcome
    if outcome is not None and outcome[0] is conv:
        outcome[1 if left else 2] = True


class Call:
    """A context in which our helpers may use the graph of one propagate(); notes what they did.

    lazily : hand message() features that are not gathered (see lazy.py). waits : narrow values made of them may wait.
    destinations : the index tensor of destinations that PyG handed to the layer's code.
    refused : why one of them could not, if so.
    used : one of our reductions ran.
    """

    __slots__ = ("_ends", "_graph", "_outer", "_trip", "destinations", "edges", "lazily", "refused", "used", "waits")

    def __init__(self, edges: Edges, lazily: bool, waits: bool = False):
        self.edges = edges
        self.lazily, self.waits = lazily, waits
        self.used = False
        self.refused: str | None = None
        self.destinations: Tensor | None = None
        self._ends: tuple[Tensor, Tensor] | None = None
        self._graph: Graph | None = None
        self._outer: Call | None = None
        self._trip: Trip | None = None

    def __enter__(self) -> Call:
        self._outer, current.call = current.call, self
        return self

    def __exit__(self, *exception) -> None:
        current.call = self._outer

    def settle(self) -> None:
        """To be called when nothing of the call is left but what somebody keeps."""
        if self._trip is not None:
            self._trip.settle()

    @property
    def lifted(self) -> bool:
        """True if the layer's code got a lazy feature."""
        return self._trip is not None

    @property
    def gathered(self) -> str | None:
        """Why one row per edge was stored, or None."""
        return None if self._trip is None else self._trip.gathered

    def graph(self, index: Tensor, num_dst: int | None) -> Graph | None:
        """The Graph whose edges end at `index`, or None if that is not this call's edges."""
        if index is not self.destinations and self._side(index) != "v":
            return None
        if self._graph is None:
            side = self.edges.sides[0]
            if self.edges.size[side] is None:
                self.edges.size[side] = num_dst
            self._graph = self.edges.graph()
        return self._graph if num_dst in (None, self._graph.num_rows) else None

    def _side(self, index: Tensor) -> str | None:
        """Which end of the edges `index` holds, "u" or "v"; None where that cannot be told."""
        if self.edges.is_sparse:
            columns = columns_of(self.edges.edge_index)
            return "u" if columns is not None and _same_memory(index, columns) else None
        if self._ends is None:
            edge_index, sides = _unwrapped(self.edges.edge_index), self.edges.sides
            self._ends = edge_index[sides[0]], edge_index[sides[1]]
        i, j = self._ends
        if i.numel() == 0 or i.data_ptr() == j.data_ptr():
            return None
        index = _unwrapped(index)
        return "v" if _same_memory(index, i) else "u" if _same_memory(index, j) else None

    def spmm(self, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
        """Sum, mean or extremum of x (times an edge weight) over the edges of each destination."""
        if not takes(x) or x.dim() != 2 or (weight is not None and (weight.dim() != 1 or weight.dtype != x.dtype)):
            raise Unsupported("operands")
        graph = self.edges.graph()
        if x.shape[0] != graph.num_cols or (weight is not None and weight.shape[0] != graph.nnz):
            raise Unsupported("operands")
        self.used = True
        return ops.spmm(graph, x, weight, reduce="sum" if reduce == "add" else reduce)

    def reduce(self, x, index, dim_size: int | None, reduce: str, dim: int) -> Tensor | None:
        """`x` reduced over the edges of each destination, or None if `index` is not that of this call's edges."""
        if not isinstance(x, Tensor) or not isinstance(index, Tensor):
            return None
        try:
            graph = self.graph(index, dim_size)
            out = None if graph is None else reduced(graph, x, reduce, dim)
        except Unsupported as error:
            self.refused = str(error)
            return None
        self.used |= out is not None
        return out

    def softmax_sum(self, scores, values, index, dim_size: int | None) -> Tensor | None:
        """`values` summed over the edges of each destination with the softmax of `scores` as weights, or None."""
        try:
            graph = self.graph(index, dim_size) if isinstance(index, Tensor) else None
            out = None if graph is None else softmax_sum(graph, scores, values)
        except Unsupported as error:
            self.refused = str(error)
            return None
        self.used |= out is not None
        return out

    def rows_of_edges(self, given: dict) -> dict:
        """Those of the arguments that have a row for each edge, lazy: what is made of them waits for the walk."""
        trip = self._trip
        if trip is None or not trip.waits:
            return {}
        found = {}
        for name, value in given.items():
            of_edges = type(value) in (Tensor, torch.nn.Parameter) and value.shape[:1] == (trip.graph.nnz,)
            if of_edges and self.edges.node_dim in (0, -value.dim()) and (rows := waiting(trip, value)) is not value:
                found[name] = rows
        return found

    def lift(self, src: Tensor, index: Tensor) -> Lazy | None:
        """`src` at one end of the edges, without gathering it; None if PyG must do that (and word its errors)."""
        if not self.lazily or type(src) not in (Tensor, torch.nn.Parameter) or not takes(src) or src.dim() == 0:
            return None
        if not -src.dim() <= self.edges.node_dim < src.dim():
            return None
        axis = self.edges.node_dim % src.dim()
        if self._trip is None:
            try:
                graph = self._graph = self.edges.graph()
            except Unsupported:  # an index out of range: PyG words it
                self.lazily = False
                return None
            if graph.nnz == 0:
                self.lazily = False
                return None
            self._trip = Trip(graph, self.waits and waits(graph))
        graph = self._trip.graph
        side = self._side(index)
        if side is None and self.edges.is_sparse:  # PyG collects two index tensors, and this is not the sources'
            side = "v"
        if side is None or src.shape[axis] != getattr(graph, SIDES[side]) or src.device != graph.device:
            return None
        return lift(self._trip, side, src.movedim(axis, 0) if axis else src, axis)


def _unwrapped(index: Tensor) -> Tensor:
    """The tensor inside PyG's subclasses, which have no memory of their own."""
    return index.as_tensor() if isinstance(index, (EdgeIndex, Index)) else index


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
