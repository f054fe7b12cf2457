"""multi_update_all of built-in functions: all edge types into a node type in one walk over their edges.

DGL makes a result for each edge type, stacks these and reduces the stack. Where the reduction across types is that of
each type (or both are sums and means) the edges of all types are one graph, with a row for each destination; elsewhere
with a row for each destination and type, which is the stack without a copy.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import report
from gnnaccel.dgl_backend import ops, touch
from gnnaccel.dgl_backend.short import autocasting, is_plain
from gnnaccel.dgl_backend.structure import ends_of, known_structures, stack_of, structure
from gnnaccel.dgl_backend.touch import (
    ALL,
    BinaryMessageFunction,
    Column,
    CopyMessageFunction,
    SimpleReduceFunction,
    columns_of,
    core,
    edge_frames,
    index_of,
    node_frames,
)
from gnnaccel.graph import modes
from gnnaccel.graph.stack import Relation, Stack

KIND = "dgl.multi_update_all"
_LINEAR, _CROSS = ("sum", "mean"), ("sum", "mean", "max", "min", "stack")
_EXACT = (torch.float32, torch.float64)  # whose reciprocals of degrees are as good as their means
_EMPTY = {"max": float("-inf"), "min": float("inf")}
_USERS = "users"  # functions that are counted by themselves


class Left(Exception):
    """Why the edge types into a node type are worked on one at a time."""


class Call(NamedTuple):
    """What one edge type is to do."""

    etype: Any
    number: int
    message: Any
    reduce: Any
    apply: Any


def multi_update_all(original):
    """DGLGraph.multi_update_all."""

    def method(self, etype_dict, cross_reducer, apply_node_func=None):
        if not is_plain(self) or autocasting() or ops.transformed() is not None:
            return original(self, etype_dict, cross_reducer, apply_node_func)
        groups: dict[int, list[Call]] = {}
        for etype, given in etype_dict.items():
            number, functions = self.get_etype_id(etype), touch.pad_tuple(given, 3)
            if functions is None or etype is None:
                return original(self, etype_dict, cross_reducer, apply_node_func)  # which words the error
            groups.setdefault(ends_of(index_of(self), number)[1], []).append(Call(etype, number, *functions))
        walked = {target: _walked(self, calls, cross_reducer) for target, calls in groups.items()}
        if not any(walked.values()):
            return original(self, etype_dict, cross_reducer, apply_node_func)
        for target, calls in groups.items():
            if walked[target] is None:
                frames = [core.message_passing(self[c.etype], c.message, c.reduce, c.apply) for c in calls]
                merge = touch.reduce_dict_data
                walked[target] = merge(frames, cross_reducer, [c.number for c in calls])
        last = functions[1]  # DGL asks the last edge type of all
        for target, out in walked.items():
            if core.is_builtin(last) and last.name in _EMPTY:
                out = {name: None if x is None else x.masked_fill(x.isinf(), 0) for name, x in out.items()}
            node_frames(self)[target].update(out)
            if apply_node_func is not None:
                self.apply_nodes(apply_node_func, ALL, self.ntypes[target])
        return None

    return method


def _walked(g, calls: list[Call], cross) -> dict[str, Tensor] | None:
    """What the frame of the node type into which all `calls` go is to have; None for what is to go DGL's way."""
    start = time.perf_counter()
    try:
        out = _reduced(g, calls, cross)
    except Left as reason:
        if str(reason) != _USERS:
            report.record(KIND, start, str(reason))
        return None
    if out is None:
        return None
    report.record(KIND, start)
    return {calls[0].reduce.out_field: out}


def _reduced(g, calls: list[Call], cross) -> Tensor | None:
    """The one tensor of a group of edge types; None of a graph that is new, which may be gone after this call."""
    if any(c.apply is not None or type(c.reduce) is not SimpleReduceFunction for c in calls):
        raise Left(_USERS)
    if any(type(c.message) not in (BinaryMessageFunction, CopyMessageFunction) for c in calls):
        raise Left(_USERS)
    if not isinstance(cross, str) or cross not in _CROSS:
        raise Left("a reducer across edge types that is not one of DGL's")
    if any(c.message.name not in ("copy_u", "u_mul_e") for c in calls):
        raise Left("messages other than copies of sources and their products with edge features")
    if len({c.reduce.out_field for c in calls}) > 1 or any(c.message.out_field != c.reduce.msg_field for c in calls):
        raise Left("results of different names")
    if modes.recomputing():
        raise Left(modes.RECOMPUTING)
    reduces = {c.reduce.name for c in calls}
    linear = reduces <= {*_LINEAR}
    if not linear and len(reduces) > 1:
        raise Left("different reductions into one node type")
    index = index_of(g)
    if not linear and not all(index.num_edges(c.number) for c in calls):
        raise Left("a maximum or minimum over an edge type without edges")
    slots, weights = _operands(g, calls)
    graphs = known_structures(index, [c.number for c in calls])
    if graphs is None:
        return None
    if cross == "stack":
        calls = sorted(calls, key=lambda c: c.number)
    return _walk(g, calls, cross, slots, weights)


def _operands(g, calls: list[Call]) -> tuple[dict[tuple[int, str], Tensor], dict[int, Tensor]]:
    """Node features by (node type, name), and edge features by edge type. Left for what one kernel does not take."""
    slots: dict[tuple[int, str], Any] = {}
    weights: dict[int, Tensor] = {}
    for c in calls:
        source, message = ends_of(index_of(g), c.number)[0], c.message
        copies = type(message) is CopyMessageFunction
        slots[source, message.in_field if copies else message.lhs_field] = None
        if not copies:
            weights[c.number] = _column(edge_frames(g)[c.number], message.rhs_field)
    for source, name in slots:
        slots[source, name] = _column(node_frames(g)[source], name)
    given = [*slots.values(), *weights.values()]
    if ops.unsupported(*given) is not None:
        raise Left("features that are not of ours to work on")
    some = next(iter(slots.values()))
    if any(x.shape[1:] != some.shape[1:] for x in slots.values()):
        raise Left("features of different shapes into one node type")
    if weights:
        shape = next(iter(weights.values())).shape[1:]
        fits = len(shape) == some.dim() - 1 and all(a in (1, b) for a, b in zip(shape, some.shape[1:], strict=True))
        if not fits or any(w.shape[1:] != shape for w in weights.values()):
            raise Left("edge features of other shapes than the nodes'")
    return slots, weights


def _column(frame, name: str) -> Tensor:
    column = columns_of(frame).get(name)
    if type(column) is not Column:
        raise Left(_USERS)  # one that is missing or yet to be fetched: DGL's to see to
    return column.data


def _walk(g, calls: list[Call], cross: str, slots: dict, weights: dict) -> Tensor | None:
    reduces = [c.reduce.name for c in calls]
    x = next(iter(slots.values()))
    same = reduces[0] if len({*reduces}) == 1 else None
    merges = len(calls) > 1 and cross != "stack" and (same == cross or (cross in _LINEAR and same not in _EMPTY))
    shares = "mean" in reduces and (merges or same is None)  # means as weighted sums
    if shares and x.dtype not in _EXACT:
        raise Left("means of half precision")
    stack = _stacked(index_of(g), calls, [*slots])
    if len(slots) > 1 and sum(map(len, slots.values())) > len(calls) * stack.num_rows + sum(stack.sizes):
        raise Left("edge types that leave most of their sources out")
    x = x if len(slots) == 1 else torch.cat([*slots.values()])
    weight = _weight(stack, calls, weights, shares, x) if weights or shares else None
    graph = getattr(stack, ("merged" if merges else "apart") + ("_by_id" if weights else ""))
    reduce = "sum" if shares or same is None else same
    ops.on_one_device(graph, x)
    out = _spmm(graph, x, weight, reduce)
    if reduce in _EMPTY and ops._has_nan(out):
        raise Left("a maximum or minimum of values with NaN")
    if merges:
        return out / len(calls) if cross == "mean" else out
    out = out.view(stack.num_rows, stack.count, *out.shape[1:])
    if cross == "stack":
        return out
    if len(calls) == 1:
        return out.squeeze(1)
    out = getattr(out, cross)(1)
    return out.values if cross in _EMPTY else out


def _spmm(graph, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    op = "copy_lhs" if weight is None else "mul"
    out = ops.kernels.ready_sum(graph, x, op, reduce, weight) if reduce in _LINEAR else None
    return ops.run_spmm(graph, op, reduce, x, weight, infinite=True) if out is None else out


def _stacked(index, calls: list[Call], slots: list[tuple[int, str]]) -> Stack:
    """The stack of these edge types, kept with the index; its columns are the nodes of the slots."""
    bases, rows = {}, 0
    for slot in slots:
        bases[slot] = rows
        rows += index.num_nodes(slot[0])
    numbers, starts = [], []
    for c in calls:
        message = c.message
        name = message.in_field if type(message) is CopyMessageFunction else message.lhs_field
        numbers.append(c.number)
        starts.append(bases[ends_of(index, c.number)[0], name])

    def make() -> Stack:
        graphs = [structure(index.get_relation_graph(number)) for number in numbers]
        return Stack([Relation(graph, base) for graph, base in zip(graphs, starts, strict=True)], rows)

    return stack_of(index, (*numbers, *starts, rows), make)


def _weight(stack: Stack, calls: list[Call], weights: dict, shares: bool, x: Tensor) -> Tensor:
    """The factor of each edge, as many dimensions as x: by edge ids where the user has weights, else by place."""
    reduces = [c.reduce.name for c in calls]
    share = stack.factors(reduces, x.dtype, by_id=bool(weights)) if shares else None
    if share is not None:
        share = share.view(-1, *(1,) * (x.dim() - 1))
        if not weights:
            return share
    shape = next(iter(weights.values())).shape[1:]
    given = [weights.get(c.number) for c in calls]
    sizes = stack.sizes
    joined = torch.cat([x.new_ones(n, *shape) if w is None else w for w, n in zip(given, sizes, strict=True)])
    return joined if share is None else joined * share
