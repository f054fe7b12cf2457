"""DGL's message passing by user-defined functions: they run once, as they are written, on features that are lazy.

A message function gets lifted features (edges.py), and what it returns is reduced without being made where it can be:
by a built-in reduction, or by a user's own that does no more than that (mailbox.py). What cannot be looked through
(trust.py) runs as DGL runs it, counted.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, NamedTuple

import dgl.function as fn
import torch
from dgl import EID, NID
from torch import Tensor

from gnnaccel import report, touch
from gnnaccel.dgl_backend import mailbox, ops
from gnnaccel.dgl_backend.edges import Edges, LiftedColumn, Lifting, fetched
from gnnaccel.dgl_backend.short import autocasting
from gnnaccel.dgl_backend.structure import ends, structure
from gnnaccel.dgl_backend.touch import (
    ALL,
    BinaryMessageFunction,
    CopyMessageFunction,
    TargetCode,
    columns_of,
    core,
    edge_frames,
    index_of,
    is_all,
    node_frames,
)
from gnnaccel.dgl_backend.trust import distrust
from gnnaccel.graph import modes
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy import programs
from gnnaccel.lazy.expression import Apply
from gnnaccel.lazy.reduce import Unsupported, reduced, unserved
from gnnaccel.lazy.tensor import Lazy, Trip
from gnnaccel.lower import bounds, choose

MESSAGE, REDUCE = "dgl.message function", "dgl.reduce function"
_FEW = "few messages, which DGL's own way stores and reduces the quicker"
_FROM_NARROW = "wide messages, made of narrow features edge by edge"
_NO_NODES = "a message function that reads no node features"
_INFINITE = {"max": float("-inf"), "min": float("inf")}


class Originals(NamedTuple):
    """DGL's own functions, kept while ours stand in their places."""

    invoke_edge_udf: Any
    invoke_udf_reduce: Any


def _obstacle(g) -> str | None:
    """Why DGL must run the functions of any call on this graph; None if nothing stands against it."""
    index = index_of(g)
    if (why := ops.transformed()) is not None:
        return why
    if modes.faking() or torch.compiler.is_compiling() or touch.tracing():
        return "a graph that torch traces"
    if index.number_of_etypes() != 1:
        return "a graph with several edge types"
    if index.num_edges(0) == 0:
        return "a graph without edges"
    if not fetched(g):
        return "features that are yet to be fetched"
    return unserved(g.device)


def _are_few(g) -> bool:
    """True if messages as wide as the widest feature are so few that DGL's own way is the quicker."""
    frames = (edge_frames(g)[0], *(node_frames(g)[t] for t in set(ends(index_of(g)))))
    widths = [math.prod(column.shape) for frame in frames for column in columns_of(frame).values()]
    width = max(widths, default=1)
    return choose.are_few(device=g.device.type, edges=g.num_edges(), nodes=g.num_dst_nodes(), width=width)


def stored(value):
    """What a user's function returned, with the rows of lazy features made, in one walk over the edges if possible."""
    return touch.pytree.tree_map_only(Lazy, _rows, value)


def _rows(x: Lazy) -> Tensor:
    whole = x.pending and isinstance(x.expression, Apply)
    if whole and (found := programs.reduced(x.trip.graph, x.expression, "none")) is not None:
        return found[0]
    return x.rows()


class _Call:
    """One call on a graph: the lifted features of its message function, and what is to be reported.

    lifting : None if DGL runs the message function.
    """

    def __init__(self, g, etype, originals: Originals):
        self.g, self.etype, self.originals = g, etype, originals
        self.start = time.perf_counter()
        self.trip: Trip | None = None
        self.lifting: Lifting | None = None

    def messages(self, function, ids: Tensor | None, few: bool = True):
        """What the user's message function returns; lazy features in it where it was handed such.

        few : leave few messages to DGL.
        """
        why = _obstacle(self.g) or (_FEW if few and _are_few(self.g) else None) or distrust(function)
        if why is not None:
            report.fallback(MESSAGE, why)
            return self.originals.invoke_edge_udf(self.g, ALL, self.etype, function, orig_eid=ids)
        return function(Edges(self.g, self.etype, self._open(), ids))

    def built_in(self, function):
        """The messages of a built-in function, lazy; None if they are DGL's to make."""
        if _obstacle(self.g) is not None or type(function) not in (BinaryMessageFunction, CopyMessageFunction):
            return None
        self._open()
        if type(function) is CopyMessageFunction:
            return {function.out_field: self._operand(function.target, function.in_field)}
        lhs, rhs = (
            self._operand(*of) for of in ((function.lhs, function.lhs_field), (function.rhs, function.rhs_field))
        )
        if lhs.dim() != rhs.dim() or lhs.dtype != rhs.dtype or not ops.broadcasts(function.binary_op, lhs, rhs):
            return None
        if function.binary_op == "dot":
            return {function.out_field: (lhs * rhs).sum(-1, keepdim=True)} if lhs.dim() > 1 else None
        return {function.out_field: getattr(torch, function.binary_op)(lhs, rhs)}

    def _open(self) -> Lifting:
        self.trip = Trip(structure(index_of(self.g)))
        self.lifting = Lifting(self.g, self.trip)
        return self.lifting

    def _operand(self, target: int, field: str) -> Tensor:
        if target == TargetCode.EDGE:
            return edge_frames(self.g)[0][field]
        assert self.lifting is not None
        column = columns_of(node_frames(self.g)[ends(index_of(self.g))[target]])[field]
        return LiftedColumn(column, self.lifting, "uv"[target]).data

    def close(self) -> None:
        if self.lifting is not None:
            self.lifting.close()

    def note(self, is_lazy: bool, is_wide: bool) -> None:
        """Count the message function's call.

        is_lazy : something of what it returned was not made, or in one walk over the edges.
        is_wide : something of that was made by the function, of many numbers per edge.
        """
        if self.lifting is None or self.trip is None:
            return
        made = self.trip.gathered or (_FROM_NARROW if is_wide else None)
        if not self.lifting.used:
            report.fallback(MESSAGE, self.lifting.left or _NO_NODES)
        elif made is not None and not is_lazy:
            report.fallback(MESSAGE, made)
        else:
            why = made or self.lifting.left
            report.record(MESSAGE, self.start, why, stored=why is not None)


def _is_lazy(value) -> bool:
    values = value.values() if isinstance(value, dict) else (value,)
    return any(isinstance(x, Lazy) and x.waiting for x in values)


def _is_wide(value) -> bool:
    """True if something in what a message function returned is made, and wide."""
    made = [x for x in (value.values() if isinstance(value, dict) else ()) if isinstance(x, Tensor) and x.dim()]
    return any(math.prod(x.shape[1:]) > bounds.STORED_FEATURES for x in made if not (isinstance(x, Lazy) and x.waiting))


def edge_function(original):
    """core.invoke_edge_udf, as apply_edges calls it: the rows of what the function returns are stored."""

    originals = Originals(original, core.invoke_udf_reduce)

    def invoke(graph, eid, etype, func, *, orig_eid=None):
        if not is_all(eid):
            report.fallback(MESSAGE, "some of the edges alone")
            return originals.invoke_edge_udf(graph, eid, etype, func, orig_eid=orig_eid)
        call = _Call(graph, etype, originals)
        out = call.messages(func, orig_eid)
        if call.lifting is None:
            return out
        call.note(_is_lazy(out), _is_wide(out))
        out = stored(out)
        call.close()
        return out

    return invoke


def message_passing(original):
    """core.message_passing, where a function of its is the user's."""

    originals = Originals(core.invoke_edge_udf, core.invoke_udf_reduce)

    def run(g, mfunc, rfunc, afunc):
        if core.is_builtin(mfunc) and core.is_builtin(rfunc):
            return original(g, mfunc, rfunc, afunc)
        call = _Call(g, g.canonical_etypes[0], originals)
        if core.is_builtin(rfunc):
            ndata = _by_built_in(call, mfunc, rfunc)
        else:
            ndata = _by_function(call, mfunc, rfunc)
        call.close()
        return ndata if afunc is None else _applied(g, afunc, ndata)

    return run


def _applied(g, afunc, ndata):
    """DGL's last phase: a function of nodes, of what was reduced and of what they had before."""
    for name, value in g.dstdata.items():
        if name not in ndata:
            ndata[name] = value
    return core.invoke_node_udf(g, ALL, g.dsttypes[0], afunc, ndata=ndata, orig_nid=g.dstdata.get(NID, None))


def _by_built_in(call: _Call, mfunc, rfunc):
    """A user's messages, reduced by a built-in function."""
    g, field = call.g, rfunc.msg_field
    data = call.messages(mfunc, g.edata.get(EID, None))
    is_wide, out = _is_wide(data), None
    message = data.get(field) if isinstance(data, dict) else None
    if isinstance(message, Lazy) and message.waiting:
        out = _reduced(message.trip.graph, message, rfunc.name)
    call.note(out is not None, is_wide)
    if out is None:
        return core.invoke_gspmm(g, fn.copy_e(field, field), rfunc, edata=stored(data))
    return {rfunc.out_field: out}


def _reduced(graph: Graph, message: Tensor, reduce: str) -> Tensor | None:
    """What DGL's ops give of the rows of a message: rows without edges hold what a maximum or minimum starts from.

    None for what is theirs to do: extrema of values with NaN, other dtypes and reductions.
    """
    casting = torch.is_autocast_enabled("cuda")  # as DGL's ops do, whatever the device
    if casting and graph.device.type == "cuda" and message.is_floating_point() and message.dtype != torch.float64:
        message = message.to(torch.get_autocast_dtype("cuda"))
    try:
        with torch.autocast("cuda", enabled=False) if casting else contextlib.nullcontext():
            out = reduced(graph, message, reduce)
    except Unsupported:
        return None
    if reduce not in _INFINITE:
        return out
    if ops._has_nan(out):
        return None
    if graph.no_empty_rows:
        return out
    empty = (graph.indptr.diff() == 0).view(-1, *(1,) * (out.dim() - 1))
    return out.masked_fill(empty, _INFINITE[reduce])


def _by_function(call: _Call, mfunc, rfunc):
    """Messages reduced by a user's function, which gets a mailbox that is not made."""
    g, is_users = call.g, not core.is_builtin(mfunc)
    why = "autocast" if autocasting() else _obstacle(g) or distrust(rfunc)
    data = lazy = None
    if is_users:
        # However few: a mailbox that DGL makes takes longer still.
        data = lazy = call.messages(mfunc, g.edata.get(EID, None), few=why is not None)
    elif why is None:
        lazy = call.built_in(mfunc)
    if lazy is None:
        lazy = data = core.invoke_gsddmm(g, mfunc)
    start, is_lazy, is_wide, out = time.perf_counter(), _is_lazy(lazy), _is_wide(lazy), None
    if why is None:
        try:
            out = mailbox.reduce(g, call.trip or Trip(structure(index_of(g))), rfunc, lazy)
            report.record(REDUCE, start)
        except mailbox.Refused as refusal:
            why = str(refusal)
    if is_users:
        call.note(is_lazy and out is not None, is_wide)
    if out is None:
        report.fallback(REDUCE, why or "")
        data = core.invoke_gsddmm(g, mfunc) if data is None else stored(data)
        out = call.originals.invoke_udf_reduce(g, rfunc, data, orig_nid=g.dstdata.get(NID, None))
    return out
