"""Models on sampled batches of whose result the first rows are taken, ``model(batch.x, batch.edge_index)[:k]``: layers
compute the rows that lead to these, as if the model had called trim_to_layer().

That needs all of
- the caller: the model's result is sliced at once, which its bytecode says (gnnaccel.lazy.caller);
- the edges: a batch of our sampler, whose hops are known;
- the model: PyG's own, or code in which torch sees all that is done to features (gnnaccel.lazy.trust), of modules that
  nobody watches, and layers of which a row needs the edges into its node alone (`_LAYERS`).
Between the layers gnnaccel.lazy.first_rows decides what may be done to some rows alone.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from gnnaccel import in_place, report, settings, subclass, touch
from gnnaccel.graph import hops
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.hops import Hops
from gnnaccel.lazy import caller
from gnnaccel.lazy.first_rows import FirstRows, Given, Step, Trip, state
from gnnaccel.lazy.trust import DATA, Walk
from gnnaccel.lower import bounds
from gnnaccel.ops import sampled_sums
from gnnaccel.pyg_backend import forwards, short
from gnnaccel.pyg_backend.graph import hops_of
from gnnaccel.pyg_backend.rules import REDUCES
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.pyg_backend.update_order import ALLOWED
from gnnaccel.touch import own_buffers, own_parameters, submodules

_KIND = "pyg.first rows"
_MODELS = (pyg_nn.GraphSAGE, pyg_nn.GCN, pyg_nn.GIN, pyg_nn.GAT)
_HAVE_ACT = (*_MODELS, pyg_nn.MLP)  # of whose forward() it is known all but what their `act` does
# Of these nothing is done to a feature but by functions of torch; what mixes rows gets all of them.
_KNOWN = {
    *(nn.Linear, nn.Identity, nn.Dropout, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Embedding),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.PReLU, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.Hardswish, nn.ReLU6, nn.LayerNorm, nn.BatchNorm1d),
    *(pyg_nn.Linear, pyg_nn.BatchNorm, pyg_nn.LayerNorm, pyg_nn.GraphNorm, pyg_nn.PairNorm, pyg_nn.MLP),
    *(pyg_nn.JumpingKnowledge, pyg_nn.models.basic_gnn.TrimToLayer, *REDUCES),
}


_CHANGES = {"train", "load_state_dict", "reset_parameters", "retain_grad"}  # methods of modules, and of tensors


def _always(_conv: Any, _x: Any) -> bool:
    return True


def _maps_no_sources(conv: Any, _x: Any) -> bool:
    return not conv.project


def _draws_nothing(conv: Any, _x: Any) -> bool:
    return not (conv.dropout and conv.training)  # of as many random numbers as there are edges


class _Kind(NamedTuple):
    """What is to be known of a class of layers whose rows need the edges into them alone.

    maps : names of linear maps of x, as wide as the layer's result or, together, its heads; none: as wide as x.
    aggregations : of its guard.
    serves : (conv, x) -> whether a layer's options are known.
    rows : (conv, graph of the batch, hop, x) -> the rows before that hop, of the features that they read; None where
        the layer itself gets the first edges.
    behind : name of a module that maps each of the rows, and is called with them.
    whole : (conv, x, edges) -> all rows before that module; None: the layer's own forward().
    """

    layer: Any
    maps: tuple[str, ...]
    aggregations: tuple[type, ...]
    serves: Callable[[Any, Any], bool]
    rows: Callable | None
    behind: str = ""
    whole: Callable | None = None

    def width(self, conv: Any, x: Any) -> int | None:
        """Of the result; None where the layer is to be called with all rows."""
        if ALLOWED in conv.__dict__ or conv.flow != "source_to_target" or not self.serves(conv, x):
            return None
        width = None if self.maps else x.shape[1]
        for lin in map(submodules(conv).get, self.maps):
            if lin is not None:
                found = short.parameters_of(lin)
                if found is None or found[0].shape[1] != x.shape[1]:
                    return None
                if found[0].dtype != x.dtype or found[0].device != x.device:
                    return None
                width = found[0].shape[0]
        if width is not None and self.rows is None and not conv.concat:
            return width // conv.heads
        return width


_SUM = (pyg_nn.SumAggregation,)
_LAYERS = {
    kind.layer.forward: kind
    for kind in (
        _Kind(pyg_nn.SAGEConv, ("lin_l", "lin_r"), tuple(REDUCES), _maps_no_sources, forwards.sage_rows),
        _Kind(pyg_nn.GraphConv, ("lin_rel", "lin_root"), tuple(REDUCES), _always, forwards.graph_conv_rows),
        _Kind(pyg_nn.GCNConv, ("lin",), _SUM, forwards.has_rows, forwards.gcn_rows),
        _Kind(pyg_nn.GINConv, (), _SUM, forwards.has_sums, forwards.gin_rows, "nn", forwards.gin_sums),
        _Kind(pyg_nn.GATConv, ("lin",), _SUM, _draws_nothing, None),
        _Kind(pyg_nn.GATv2Conv, ("lin_l", "lin_r"), _SUM, _draws_nothing, None),
    )
}


class _Layer(Step):
    """A layer's call; `general`: its forward() on all rows."""

    def __init__(
        self,
        kind: _Kind,
        general: Callable,
        conv: Any,
        x: Any,
        edge_index: Tensor,
        graph: Graph | None,
        sampled: Hops,
        width: int,
    ) -> None:
        inputs = (x,) if isinstance(x, Step) else ()
        parts = submodules(conv).values() if not kind.behind else ()
        held = [own_parameters(conv), own_buffers(conv), *(own_parameters(part) for part in parts if part is not None)]
        parameters = [value for values in held for value in values.values() if value is not None]
        grad = x.requires_grad or any(parameter.requires_grad for parameter in parameters)
        super().__init__(inputs, (x.shape[0], width), x, grad)
        self._kind, self._general, self._conv, self._sampled = kind, general, conv, sampled
        self._x = None if inputs else x
        self._edge_index, self._graph = edge_index, graph
        self._given = Given((edge_index, *parameters, self._x))

    def forget(self):
        super().forget()
        self._x = self._given = self._graph = None

    def _hop(self, rows: int) -> int:
        return sampled_sums.hop_of(rows, self._sampled)

    def rows_read(self, rows):
        hop, nodes = self._hop(rows), self._sampled.nodes
        needed = nodes[hop + 1] if hop < len(nodes) - 1 else self.shape[0]
        return [needed] * len(self.inputs)

    def compute(self, rows, *values):
        self._given.check()
        hop, sampled = self._hop(rows), self._sampled
        x = values[0] if values else self._x
        if hop >= len(sampled.nodes) - 1:
            return (self._kind.whole or self._general)(self._conv, x, self._edge_index)
        x = x[: sampled.nodes[hop + 1]] if x.shape[0] > sampled.nodes[hop + 1] else x
        if self._kind.rows is None:
            return self._general(self._conv, x, self._edge_index[:, : sampled.edges[hop + 1]])
        return self._kind.rows(self._conv, self._graph, hop, x)


def of_layers(plain: Any, general: Callable | None) -> Callable | None:
    """`general`, the forward() of accelerated layers of class `plain`, for layers that may be asked for some rows."""
    kind = _LAYERS.get(plain.forward)
    if kind is None or general is None:
        return general
    guard = short.Guard(plain, kind.layer, kind.aggregations)

    @functools.wraps(general)
    def forward(self, x, edge_index, *args, **kwargs):
        trip = state.trip
        if trip is None:
            if type(edge_index) is Tensor and not torch.compiler.is_compiling():
                _notice(x, edge_index)
            return general(self, x, edge_index, *args, **kwargs)
        step: Step | str = "with more than features and edges"
        if all(value is None for value in (*args, *kwargs.values())):
            step = _step(kind, guard, general, self, trip, x, edge_index)
            if isinstance(step, Step):
                rows = trip.take(step)
                return submodules(self)[kind.behind](rows) if kind.behind else rows
        reason = f"{plain.__name__} {step}"
        trip.settled = trip.settled or reason
        given = touch.pytree.tree_map_only(
            FirstRows, lambda value: value.ordinary(reason), (x, edge_index, args, kwargs)
        )
        return general(self, *given[:2], *given[2], **given[3])

    return forward


def _step(kind: _Kind, guard: short.Guard, general: Callable, conv: Any, trip: Trip, x: Any, edges: Any) -> Step | str:
    """The layer's call, or why it has all rows."""
    if type(x) is FirstRows:
        if x.trip is not trip:
            return "on the result of another model's call"
        x = x.ordinary("") if x.step.handed else x.step  # which is asked for less
    elif not short.is_matrix(x):
        return "on features that are no matrix"
    if x.device != edges.device or not guard.allows(conv, edges) or not _is_usual(x):
        return "that was changed, or where somebody watches"
    sampled = hops_of(edges)
    if sampled is None or touch.base_of(edges) is not None or len(sampled.nodes) < 2 or sampled.nodes[-1] > x.shape[0]:
        return "on other edges than a batch's"
    width = kind.width(conv, x)
    if width is None:
        return "with options or maps of which a row may need more"
    if x.shape[0] * x.shape[1] * width < bounds.SAMPLED_PRODUCTS:
        return "of few products, where there is nothing to gain"
    graph = None
    if kind.rows is not None or edges.is_cpu:
        graph = short.graph_of(edges, x.shape[0], x.shape[0], conv.flow)
        if graph is None or hops.of(graph) is None:  # a write that torch does not count, through .data or NumPy
            return "on edges that were written into"
    return _Layer(kind, general, conv, x, edges, graph, sampled, width)


def _is_usual(x: Any) -> bool:
    """True where nobody looks at each call, and torch does with features what it does by default."""
    return not (
        torch.is_autocast_enabled(x.device.type)
        or torch.is_inference_mode_enabled()
        or touch.watched()
        or touch.in_forward_mode()
    )


# ---- models


def _call(self, *args, **kwargs):
    """__call__() of a model. nn.Module's own is looked up each time: torch.fx replaces it while it traces."""
    if torch.compiler.is_compiling() or not _begins(self, args, kwargs, sys._getframe(1)):
        return torch_module.Module.__call__(self, *args, **kwargs)
    trip = state.trip = Trip()
    try:
        holder = [torch_module.Module.__call__(self, *args, **kwargs)]
    finally:
        state.trip = None
    trip.end(holder)
    report.count(_KIND)
    if trip.settled is not None:
        report.note(_KIND, f"all rows of some layers of {type(self).__name__}: {trip.settled}")
    return holder.pop()


def _begins(model: nn.Module, args: tuple, kwargs: dict, frame: types.FrameType) -> bool:
    if state.trip is not None:
        return False
    edges = next((v for v in (*args, *kwargs.values()) if type(v) is Tensor and v.dtype == torch.int64), None)
    if edges is None or not _is_usual(edges) or hops_of(edges) is None:  # a trace warns of shapes that are compared
        return False
    if not caller.takes_first_rows(frame, model):
        return False
    reason = distrust(model)
    if reason is not None:
        report.note(_KIND, f"all rows of {type(model).__name__}: {reason}")
    return reason is None


def distrust(model: nn.Module) -> str | None:
    """Why the layers of a model are to compute all rows; None if nobody will see which ones they compute."""
    if touch.has_global_hooks():
        return "hooks on all modules"
    waiting, parts, own = [model], {id(model)}, []
    while waiting:
        part = waiting.pop()
        if short.hooked(part) or part.__dict__.get(touch.COMPILED_CALL) is not None:
            return f"somebody watches or replaces calls of {type(part).__name__}"
        if type(part) is pyg_nn.MLP:
            own.append((pyg_nn.MLP, part))  # which holds a function of somebody's, perhaps
        elif type(part) not in _KNOWN:
            kind = subclass.plain_of(part)
            if (reason := _of_kind(kind, kind is not type(part))) is not None:
                return reason
            if kind in _MODELS or not _is_frameworks(kind):
                own.append((kind, part))
        for child in submodules(part).values():
            if child is not None and id(child) not in parts:
                parts.add(id(child))
                waiting.append(child)
    return _of_code(own, parts)


def _of_kind(kind: Any, is_accelerated: bool) -> str | None:
    """`distrust` for the class of a module, whatever its code does."""
    if kind in _MODELS:
        return None
    if issubclass(kind, pyg_nn.MessagePassing):
        known = is_accelerated and kind.forward in _LAYERS
        return None if known else f"{kind.__name__}, of which a row may need more than the edges into it"
    if _is_frameworks(kind):
        return f"{kind.__name__}, of which it is not known what it does to rows"
    if kind.__call__ not in (torch_module.Module.__call__, _call):
        return f"{kind.__name__} has a __call__ of its own"
    return None


def _of_code(own: list[tuple[Any, nn.Module]], parts: set[int]) -> str | None:
    """`distrust` for the code of a model's own modules, and for what they hold. parts : ids of all its modules."""
    reason, names, codes = _of_classes(tuple(dict.fromkeys([kind for kind, _ in own])))
    if reason is not None:
        return reason
    walk = None
    looked: frozenset[str] = frozenset()
    while not names <= looked:  # what a module holds may name more
        for _, part in own:
            held = vars(part)
            for name in (names - looked).intersection(held):
                if type(held[name]) not in DATA:
                    walk = walk or _ModelWalk(*[kind for kind, _ in own], codes=codes, parts=parts)
                    if (reason := walk.follow(name, [held[name]])) is not None:
                        return reason
        looked, names = names, names if walk is None else names | walk.names
    if walk is not None and len(walk.codes) > len(codes) and (reason := _of_walk(walk)) is not None:
        return reason
    if "relu_" in names and not torch.is_grad_enabled():
        # Of a layer's input, where autograd does not forbid it, it would come before the layer's work.
        return "relu_() without gradients, which may write into what a layer reads later"
    return None


class _ModelWalk(Walk):
    """parts : ids of modules that are looked at by themselves."""

    harmless = frozenset({"relu_"})  # first_rows has a rule for it

    def __init__(self, *plain: Any, codes: tuple[types.CodeType, ...] = (), parts: set[int] | frozenset = frozenset()):
        super().__init__(*plain, codes=codes)
        self._parts_of_model = parts

    def _of_module(self, name, value):
        return [] if id(value) in self._parts_of_model else super()._of_module(name, value)


@functools.lru_cache(maxsize=256)
def _of_classes(kinds: tuple) -> tuple[str | None, frozenset[str], tuple[types.CodeType, ...]]:
    walk = _ModelWalk(*kinds)
    reason = walk.follow("a method", [kind.forward for kind in kinds if kind not in _HAVE_ACT])
    if any(kind in _HAVE_ACT for kind in kinds):
        walk.names.add("act")
    return reason or _of_walk(walk), frozenset(walk.names), tuple(walk.codes)


def _of_walk(walk: Walk) -> str | None:
    if any(map(in_place.sets_attributes, walk.codes)):
        return "forward() sets attributes, which layers read later, or which keep their results"
    if found := walk.names & _CHANGES:
        return f"forward() calls {min(found)}(), which changes what layers read later, or what autograd keeps"
    return None


_entered: weakref.WeakSet[type] = weakref.WeakSet()
_seen: set[types.CodeType] = set()  # of forward() that has called a layer on a sampled batch
_enabled = False


def _notice(x: Any, edge_index: Tensor) -> None:
    """Of a layer's call on a sampled batch: from the next one on, the models around it see who calls them."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals is vars(torch_module):
        frame = frame.f_back
    if not _enabled or frame is None or frame.f_code in _seen or touch.watched() or hops_of(edge_index) is None:
        return
    _seen.add(frame.f_code)
    while frame is not None:
        code = frame.f_code
        if frame.f_globals is not vars(torch_module):
            model = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if not isinstance(model, nn.Module):
                return
            kind: Any = type(model) if isinstance(model, pyg_nn.MessagePassing) else subclass.plain_of(model)
            is_own = getattr(kind.forward, "__code__", None) is code
            if is_own and kind.__call__ is torch_module.Module.__call__ and not _is_frameworks(kind):
                enter(kind)
        frame = frame.f_back


def _is_frameworks(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("torch", "torch_geometric", "gnnaccel") or "_gnnaccel_plain" in vars(kind)


def enter(kind: Any) -> None:
    """Have models of a class see who calls them."""
    kind.__call__ = _call
    _entered.add(kind)


def enable() -> None:
    global _enabled
    _enabled = settings.value("GNNACCEL_FIRST_ROWS") != "0"
    for kind in _MODELS if _enabled else ():
        enter(kind)


def disable() -> None:
    global _enabled
    _enabled = False
    for kind in list(_entered):
        if vars(kind).get("__call__") is _call:
            del kind.__call__  # type: ignore[attr-defined]
    _entered.clear()
    _seen.clear()
