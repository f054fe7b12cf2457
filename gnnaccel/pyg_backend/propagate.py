"""One call of an accelerated layer's propagate() or edge_updater(): by a rule, by PyG's own code with lazy features
and our reductions inside, or left to PyG.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import plain as plain_modules
from gnnaccel import report, touch
from gnnaccel.graph import modes
from gnnaccel.kept import Attempt, has_calls
from gnnaccel.lazy.tensor import Lazy
from gnnaccel.lower import bounds, choose
from gnnaccel.pyg_backend import compiling, rules
from gnnaccel.pyg_backend.attention import Deferred
from gnnaccel.pyg_backend.bases import factors, weighs_messages
from gnnaccel.pyg_backend.call import Call, alone, current, note_outcome
from gnnaccel.pyg_backend.graph import Edges, Unsupported, nonzeros_of
from gnnaccel.pyg_backend.kept import attempt as attempted
from gnnaccel.pyg_backend.kept import keeps_nothing
from gnnaccel.pyg_backend.touch import (
    DECOMPOSED,
    EXPLAINED,
    HOOKS,
    UNSEEN,
    edge_user_args,
    nn,
    original_propagate,
    user_args,
)
from gnnaccel.pyg_backend.trust import ROOTS, distrust

_FUSED = "own message_and_aggregate()"
_HOOKED = "message passing hooks are registered"
NEW = "few messages of edges that the layer had not seen"
FEW = "few messages, which PyG's own code stores and reduces the quicker"
_STORING: dict[Callable, dict] = {
    nn.CGConv.message: bounds.COUNTS_STORED,
    nn.FeaStConv.message: bounds.COUNTS_STORED_TWICE,
    nn.FiLMConv.message: bounds.COUNTS_STORED_TWICE,
    nn.GENConv.message: bounds.COUNTS_STORED_TWICE,
    nn.GINEConv.message: bounds.COUNTS_STORED,
    nn.LEConv.message: bounds.COUNTS_STORED_TWICE,
    nn.ResGatedGraphConv.message: bounds.COUNTS_STORED,
}
_STORING_EDGES = nn.TransformerConv.message
# Of layers over edges of several types, for a feature of a node.
_TYPED: dict[Callable, Callable] = {
    nn.RGATConv.message: lambda conv: _matrix_for_each_edge(conv.heads * conv.out_channels * conv.dim),
    nn.HEATConv.message: lambda conv: bounds.COUNTS_HEAT,
    nn.HGTConv.message: lambda conv: bounds.COUNTS_HGT,
}
_METHODS = frozenset(("message", "aggregate", "update", "message_and_aggregate", "edge_updater", "edge_update"))


def _matrix_for_each_edge(numbers: int) -> dict:
    return {"cpu": numbers, "cuda": numbers * bounds.COUNTS_MATRIX_ON_CUDA}


def kind_of(plain: Any) -> str:
    """Call site kind in reports."""
    return f"pyg.{plain.__name__}"


def obstacle(conv) -> str | None:
    """Why PyG must run this call itself, whatever its arguments; None if nothing stands against it."""
    state = vars(conv)
    if state.get(EXPLAINED):
        return "explain is on"
    if state.get(DECOMPOSED, 1) > 1:
        return "decomposed_layers > 1"
    if any(map(state.get, HOOKS)):
        return _HOOKED
    if not state.keys().isdisjoint(_METHODS):
        return f"{min(_METHODS.intersection(state))}() was replaced on the instance"
    if touch.tracing():
        return "torch.jit.trace"
    if modes.proxied():
        return "a trace by make_fx"
    if touch.transforming() or touch.in_forward_mode():
        return "a torch.func transform or forward-mode differentiation"
    return UNSEEN


@torch.compiler.assume_constant_result
def _note_compiled(kind: str) -> bool:
    """Counts once per compilation: torch.compile traces PyG's own code, which it can fuse."""
    report.fallback(kind, "torch.compile")
    return True


def _is_fused(conv, edges: Edges) -> bool:
    """True if PyG will call message_and_aggregate(): no lifted feature is then made."""
    if not conv.fuse or edges.is_sparse:
        return conv.fuse
    given = edges.edge_index
    return getattr(conv, "SUPPORTS_FUSED_EDGE_INDEX", False) and isinstance(given, EdgeIndex) and given.is_sorted_by_col


def _note_sizes(edges: Edges, names, kwargs: dict) -> None:
    """Give `edges` the sizes that PyG will collect from the lifted features; a matrix has its own."""
    if edges.is_sparse:
        return
    for name in names:
        if name[-2:] in ("_i", "_j"):
            edges.node_feature(kwargs.get(name[:-2]), name[-2:])


def _settled(kwargs: dict) -> dict:
    """The arguments with attention weights made, for PyG's own code."""
    if isinstance(kwargs.get("alpha"), Deferred):
        return {**kwargs, "alpha": kwargs["alpha"].weights()}
    return kwargs


def widest(values: Iterable) -> int:
    """The most features of a tensor among `values` and the tuples in them."""
    return max((math.prod(x.shape[1:]) for x in _tensors(values) if x.is_floating_point()), default=1)


def _tensors(values: Iterable) -> list[Tensor]:
    """The tensors among `values` and in the tuples there."""
    given = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in given if isinstance(x, Tensor)]


def are_few(conv: Any, plain: Any, edge_index, kwargs: dict, others: dict | None = None, times: float = 1) -> bool:
    """True if messages of the width of the features, or so many times it, are few enough for PyG's own code: those of
    layers that store them, and with `others`, what each number of theirs counts, those of any other.

    The same for an edge_index and for the matrix of its edges: two ways would round differently.

    Left out: int32, of which torch's scatters have wrong gradients, sums whose order somebody has asked for, and what
    is to be captured in a CUDA graph, where the host's time is no reason. So is a matrix that PyG multiplies by, as
    our kernel then does.
    """
    matrix = None
    if type(edge_index) is not Tensor or edge_index.layout is not torch.strided:
        matrix = None if conv.fuse and others is not bounds.COUNTS_UPDATED else nonzeros_of(edge_index)
        if matrix is None:
            return False
        if matrix.features is not None and kwargs.get("edge_attr") is None:
            kwargs = {**kwargs, "edge_attr": matrix.features}  # as PyG reads them
    message, counts, typed = plain.message, others, None
    if others is not bounds.COUNTS_UPDATED:
        typed = _TYPED.get(message)
        counts = typed(conv) if typed is not None else _STORING.get(message, others)
        if message is _STORING_EDGES and kwargs.get("edge_attr") is not None:
            counts = bounds.COUNTS_STORED
    if counts is None:
        return False
    if matrix is not None:
        kind, edges = matrix.kind, matrix.number
    elif edge_index.dtype == torch.int64 and edge_index.dim() == 2:
        kind, edges = edge_index.device.type, edge_index.shape[1]
    else:
        return False
    if kind not in counts:
        return False
    given = _tensors(kwargs.values())
    if typed is not None:
        return choose.are_few(device=kind, edges=edges, width=widest(given) * counts[kind] * times)
    nodes, width, axis = 0, 1, conv.node_dim
    for x in given:
        if x.is_floating_point() and -x.dim() <= axis < x.dim():
            rows = x.shape[axis]
            width = max(width, x.numel() // max(rows, 1))
            nodes = nodes if rows == edges else max(nodes, rows)
    return choose.are_few(device=kind, edges=edges, nodes=nodes, width=width * counts[kind] * times)


def _watched(conv, plain: Any, edges: Edges, kwargs: dict) -> contextlib.AbstractContextManager | None:
    """A context in which methods that may write into tensors have lazy rows all the same, as it is seen what they write
    into; None where more stands against that."""
    if type(edges.edge_index) is not Tensor:
        return None
    code = plain_modules.code_of(conv)
    methods = [method for name in ROOTS if (method := getattr(plain, name, None)) is not None]
    if plain_modules.obstacle(conv, code, methods, kwargs.values()) is not None:
        return None
    code.destinations = edges.sides[0]
    return plain_modules.traced(conv, code)


def make_entry(plain: Any, name: str) -> Callable:
    """The "propagate" or "edge_updater" of accelerated layers of class `plain`."""
    kind = kind_of(plain) + " edge_update" * (name == "edge_updater")

    def entry(self, edge_index, *args, **kwargs):
        if current.plainly is self:
            report.fallback(kind, current.why or NEW)
            return alone(getattr(plain, name), self, edge_index, *args, **kwargs)
        if is_compiling():
            if name == "propagate" and not args and compiling.compiling():
                out = compiling.propagate(self, plain, kind, edge_index, kwargs)
                if out is not None:
                    return out
            _note_compiled(kind)
            return getattr(plain, name)(self, edge_index, *args, **kwargs)
        reason = obstacle(self) or (f"positional arguments to {name}()" if args else None)
        weighed = reason is _HOOKED and not args and name == "propagate" and weighs_messages(self)
        reason = None if weighed else reason
        if reason is not None:
            report.fallback(kind, reason)
            return alone(getattr(plain, name), self, edge_index, *args, **_settled(kwargs))
        named = dict(kwargs)
        size = named.pop("size", None)
        attempt, start = None, time.perf_counter()
        again = not report.timing and not weighed
        if again and has_calls(self) and not isinstance(named.get("alpha"), Deferred):
            attempt = _attempted(self, plain, name, edge_index, size, named)
            if attempt is not None and (kept := attempt.kept) is not None:
                note_outcome(self, left=False)
                out = kept.again(attempt.given)
                stored = kept.gathered is not None
                report.record(kind + " segment" * stored, start, kept.gathered, stored)
                return out
        rule = rules.find(plain, name)
        if weighed:
            rule = functools.partial(rules.weighted, factor=lambda: factors(self)) if rule is rules.weighted else None
        few = name == "propagate" and rule is not None and are_few(self, plain, edge_index, kwargs)
        if rule is not None and not few:
            try:
                out = rule(self, plain, _edges(self, plain, name, edge_index, size), named)
                report.record(kind, start)
                note_outcome(self, left=False)
                return out
            except Unsupported as error:
                reason = str(error) if rule is not rules.weighted and not weighed else None
        summed = rule is rules.weighted and rules.sums_as_matrix(self, edge_index)
        others = bounds.COUNTS_PROPAGATED if name == "propagate" else bounds.COUNTS_UPDATED
        if few or (not summed and are_few(self, plain, edge_index, kwargs, others)):
            report.fallback(kind, FEW)
            note_outcome(self, left=True)
            return alone(getattr(plain, name), self, edge_index, **_settled(kwargs))
        note_outcome(self, left=False)
        if attempt is None and again:
            attempt = _attempted(self, plain, name, edge_index, size, _settled(named))
        return _in_call(self, plain, name, edge_index, size, _settled(kwargs), kind, reason, attempt)

    # PyG takes a function of this module name for the one that it generated, and leaves it alone.
    entry.__module__ = f"{plain.__module__}_{plain.__name__}_{name}"
    entry.__name__ = entry.__qualname__ = name
    return entry


def make_original(plain: Any) -> Callable:
    """The "_orig_propagate" of accelerated layers of class `plain`, which PyG gives to a layer that is explained or
    decomposed: PyG's own, counted."""
    kind = kind_of(plain)

    original = original_propagate(plain)

    @functools.wraps(original)
    def propagate(self, edge_index, *args, **kwargs):
        if not is_compiling():
            report.fallback(kind, obstacle(self) or "PyG's general propagate() is bound to the layer")
        return alone(original, self, edge_index, *args, **_settled(kwargs))

    return propagate


def _edges(conv, plain: Any, name: str, edge_index, size) -> Edges:
    """The edges of one call; the code that PyG generated and that of its base class pick features differently."""
    by_flow = getattr(plain, name) is getattr(MessagePassing, name)
    return Edges(edge_index, size, conv.flow, conv.node_dim, by_flow)


def _sized(conv, plain: Any, name: str, edge_index, size, kwargs: dict) -> Edges:
    """The edges of one call, with the sizes that its features have."""
    edges = _edges(conv, plain, name, edge_index, size)
    _note_sizes(edges, edge_user_args(conv) if name == "edge_updater" else user_args(conv), kwargs)
    return edges


def _attempted(conv, plain: Any, name: str, edge_index, size, kwargs: dict) -> Attempt | None:
    """The call, if it may be one that can be made again."""
    try:
        return attempted(conv, plain, name, _sized(conv, plain, name, edge_index, size, kwargs), kwargs)
    except Unsupported:
        return None


def _in_call(
    conv, plain: Any, name: str, edge_index, size, kwargs: dict, kind: str, reason: str | None, attempt: Attempt | None
):
    """PyG's own propagate() or edge_updater() with lazy features, our softmax and our aggregation inside."""
    start = time.perf_counter()
    function = getattr(plain, name)
    updating = name == "edge_updater"
    call = watched = None
    try:
        edges = _sized(conv, plain, name, edge_index, size, kwargs)
        doubt = _FUSED if _is_fused(conv, edges) and not updating else distrust(conv)
        call = Call(edges, doubt is None, waits=doubt is None and keeps_nothing(plain))
        watched = _watched(conv, plain, edges, kwargs) if doubt not in (None, _FUSED) else None
    except Unsupported as error:
        report.fallback(kind, str(error))
    if call is None:  # out of the handler: an error that PyG raises has none of ours behind it
        return alone(function, conv, edge_index, **kwargs)
    recorder = None if attempt is None else attempt.recorder
    with call, recorder or contextlib.nullcontext(), watched or contextlib.nullcontext() as rows:
        out = function(conv, edge_index, **kwargs)
        if type(out) is not Tensor:
            out = touch.pytree.tree_map_only(Lazy, lambda x: x.rows("a result with one row per edge"), out)
        if rows is not None:
            rows.used |= call.used
    call.settle()
    if rows is not None and rows.used and not rows.watching:
        report.record(kind + " segment" * (rows.gathered is not None), start, rows.gathered, rows.gathered is not None)
        return out
    of_ours = call.used or (updating and call.lifted)
    if recorder is not None and attempt is not None and of_ours and doubt is None:
        attempt.keep(out, call.gathered)
    if not of_ours:
        reason = reason or call.refused or doubt or call.gathered
        report.fallback(kind, reason or "its aggregation is none of sums, means and extrema")
    elif call.gathered or doubt not in (None, _FUSED):
        report.record(kind + " segment", start, call.gathered or doubt, stored=True)
    else:
        report.record(kind, start)
    return out
