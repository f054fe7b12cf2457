"""Accelerated layers: a subclass per layer class whose propagate() and edge_updater() try our ops first.

PyG writes a specialised propagate() into every layer class at its first instantiation, so patching the base class
reaches nothing. Instead an instance changes its class to a generated subclass of its own class, with the same
name. Pickles and deep copies of it are made from the original class: a checkpoint loads without gnnaccel.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.conv import GATConv, GraphConv, MessagePassing, TransformerConv

from gnnaccel import ops, report
from gnnaccel.pyg_backend import rules
from gnnaccel.pyg_backend.attention import Deferred
from gnnaccel.pyg_backend.graph import Edges, Unsupported
from gnnaccel.pyg_backend.helpers import Call, bind, current, takes, uses_helpers

_METHODS = ("propagate", "message", "aggregate", "update", "message_and_aggregate", "edge_updater", "edge_update")
_HOOKS = tuple(
    f"_{part}_forward_{when}hooks"
    for part in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
)

_subclasses: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()  # layer class -> ours
_instances: weakref.WeakSet[MessagePassing] = weakref.WeakSet()


def kind_of(plain: Any) -> str:
    """Call site kind in reports."""
    return f"pyg.{plain.__name__}"


def accelerate(conv: MessagePassing) -> None:
    """Give one layer our propagate(); does nothing to one that has it."""
    plain = type(conv)
    if is_accelerated(conv):
        return
    if any("__init_subclass__" in vars(parent) for parent in plain.__mro__[:-1]):
        report.fallback(kind_of(plain), "its class reacts to being subclassed")
        return
    if plain.propagate is plain._orig_propagate is not MessagePassing.propagate:
        report.fallback(kind_of(plain), "own propagate()")
        return
    try:
        ours = _subclasses.get(plain)
        if ours is None:
            ours = _subclasses[plain] = _make_subclass(plain)
        conv.__class__ = ours
    except TypeError as error:  # another metaclass, slots
        report.fallback(kind_of(plain), f"its class cannot be extended ({error})")
        return
    _rebind(conv)
    _instances.add(conv)


def restore(conv: MessagePassing) -> None:
    """Undo `accelerate` on one layer."""
    if is_accelerated(conv):
        conv.__class__ = type(conv)._gnnaccel_plain
        _rebind(conv)
        _instances.discard(conv)


def restore_all() -> None:
    """Undo `accelerate` on every living layer."""
    for conv in list(_instances):
        restore(conv)


def is_accelerated(conv) -> bool:
    """True if this layer has our propagate()."""
    return "_gnnaccel_plain" in vars(type(conv))


def _rebind(conv: MessagePassing) -> None:
    """Toggling explain leaves a bound propagate() on the instance: bind the one of its present class instead."""
    bound = vars(conv).get("propagate")
    cls = type(conv)
    plain = vars(cls).get("_gnnaccel_plain", cls)
    ours = _subclasses.get(plain)
    known = [plain.__dict__.get("_jinja_propagate"), getattr(plain, "_orig_propagate", None)]
    known += [vars(ours)["propagate"]] if ours is not None else []
    if getattr(bound, "__func__", None) in [f for f in known if f is not None]:
        original = conv.explain or conv.decomposed_layers > 1
        function = cls._orig_propagate if original else cls._jinja_propagate
        conv.propagate = function.__get__(conv, MessagePassing)


def _obstacle(conv) -> str | None:
    """Why PyG must run this call itself, whatever its arguments; None if nothing stands against it."""
    state = vars(conv)
    if state.get("_explain"):
        return "explain is on"
    if state.get("_decomposed_layers", 1) > 1:
        return "decomposed_layers > 1"
    for name in _HOOKS:
        if state.get(name):
            return "message passing hooks are registered"
    for name in _METHODS[1:]:
        if name in state:
            return f"{name}() was replaced on the instance"
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "a torch.func transform or forward-mode differentiation"
    return None


@torch.compiler.assume_constant_result
def _note_compiled(kind: str) -> bool:
    """Counts once per compilation: torch.compile traces PyG's own code, which it can fuse."""
    report.fallback(kind, "torch.compile")
    return True


def _original(conv, plain: Any) -> Callable:
    """The propagate() that PyG would run for this layer now."""
    return plain._orig_propagate if conv._explain or conv._decomposed_layers > 1 else plain.propagate


def _is_fused(conv, plain: Any, edges: Edges) -> bool:
    """True if PyG would call message_and_aggregate(). GraphConv's on an EdgeIndex equals its message()."""
    if not conv.fuse or edges.is_sparse:
        return conv.fuse
    if not conv.SUPPORTS_FUSED_EDGE_INDEX or plain.message_and_aggregate is GraphConv.message_and_aggregate:
        return False
    return isinstance(edges.edge_index, EdgeIndex) and edges.edge_index.is_sorted_by_col


def _with_sizes(conv, edges: Edges, kwargs: dict) -> Edges:
    """`edges` with the sizes that PyG will collect from the lifted features."""
    for name in conv._user_args:
        if name[-2:] in ("_i", "_j"):
            edges.node_feature(kwargs.get(name[:-2]), name[-2:])
    return edges


def _settled(kwargs: dict) -> dict:
    """The arguments with attention weights made, for PyG's own code."""
    if isinstance(kwargs.get("alpha"), Deferred):
        return {**kwargs, "alpha": kwargs["alpha"].weights()}
    return kwargs


def _make_propagate(plain: Any) -> Callable:
    kind = kind_of(plain)

    def propagate(self, edge_index, *args, **kwargs):
        if is_compiling():
            _note_compiled(kind)
            return _original(self, plain)(self, edge_index, *args, **kwargs)
        reason = _obstacle(self) or ("positional arguments to propagate()" if args else None)
        if reason is not None:
            report.fallback(kind, reason)
            return _original(self, plain)(self, edge_index, *args, **_settled(kwargs))
        named = dict(kwargs)
        size = named.pop("size", None)
        by_flow = plain.propagate is MessagePassing.propagate  # else the one that PyG generated
        start = time.perf_counter()
        try:
            edges = Edges(edge_index, size, self.flow, by_flow)
            if not _is_fused(self, plain, edges):
                out = rules.propagate(self, plain, edges, named)
                report.record(kind, start)
                return out
            reason = "own message_and_aggregate()"
        except Unsupported as error:
            reason = str(error)
        kwargs = _settled(kwargs)
        try:
            call = Call(_with_sizes(self, Edges(edge_index, size, self.flow, by_flow), named))
        except Unsupported:
            report.fallback(kind, reason)
            return plain.propagate(self, edge_index, **kwargs)
        with call:
            out = plain.propagate(self, edge_index, **kwargs)
        if call.used:
            report.record(kind if call.edges.is_sparse else kind + " segment", start)
        else:
            report.fallback(kind, reason)
        return out

    # PyG takes a propagate() of this module name for the one that it generated, and leaves it alone.
    propagate.__module__ = f"{plain.__module__}_{plain.__name__}_propagate"
    return propagate


def _make_edge_updater(plain: Any) -> Callable:
    kind = kind_of(plain) + " edge_update"

    def edge_updater(self, edge_index, *args, **kwargs):
        if is_compiling():
            _note_compiled(kind)
            return plain.edge_updater(self, edge_index, *args, **kwargs)
        reason = _obstacle(self) or ("positional arguments to edge_updater()" if args else None)
        if reason is None:
            named = dict(kwargs)
            size = named.pop("size", None)
            by_flow = plain.edge_updater is MessagePassing.edge_updater
            start = time.perf_counter()
            try:
                out = rules.edge_updater(self, plain, Edges(edge_index, size, self.flow, by_flow), named)
                report.record(kind, start)
                return out
            except Unsupported as error:
                reason = str(error)
        report.fallback(kind, reason)
        return plain.edge_updater(self, edge_index, *args, **kwargs)

    edge_updater.__module__ = f"{plain.__module__}_{plain.__name__}_edge_updater"
    return edge_updater


def _make_aggregate(plain: Any) -> Callable:
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        call = current.call
        if call is not None and not is_compiling():
            try:
                return _segment(self, call, inputs, index, dim_size)
            except Unsupported:
                pass
        return plain.aggregate(self, inputs, index, ptr=ptr, dim_size=dim_size)

    return aggregate


def _segment(conv, call: Call, inputs: Tensor, index: Tensor, dim_size: int | None) -> Tensor:
    """Reduce the messages of PyG's own message() over the edges of each destination, without a scatter."""
    reduce = rules.reduction(conv)
    if not takes(inputs) or inputs.dim() < 2 or conv.node_dim % inputs.dim() != 0:
        raise Unsupported("messages that are not [E, ...]")
    graph = call.graph(index, dim_size)
    if graph is None or inputs.shape[0] != graph.nnz:
        raise Unsupported("edges of another graph")
    call.used = True
    return ops.spmm(graph, None, inputs, "copy_rhs", reduce)


def _make_bound(plain: Any, name: str, function: Any) -> Callable:
    """Method `name` of a layer class, running with our helpers in place of PyG's."""
    ours = bind(function)

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        if is_compiling() or getattr(plain, name) is not function:  # somebody replaced it since
            return getattr(plain, name)(self, *args, **kwargs)
        out = ours(self, *args, **kwargs)
        if name == "forward" and type(out) is tuple:
            out = _own_edges(out, (*args, *kwargs.values()))
        return out

    return method


# forward() of layers that show their attention weights on demand -> position of that argument; None hides them.
_SHOWS_WEIGHTS = {GATConv.forward: 4, TransformerConv.forward: 3}


def _make_hiding(plain: Any, function: Any, method: Callable) -> Callable:
    """A forward() that tells the other methods whether the user will see the attention weights."""
    position = _SHOWS_WEIGHTS[function]

    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        shown = kwargs.get("return_attention_weights", args[position] if len(args) > position else None)
        if shown is not None or is_compiling() or plain.forward is not function:
            return method(self, *args, **kwargs)
        outer, current.hidden = current.hidden, True
        try:
            return method(self, *args, **kwargs)
        finally:
            current.hidden = outer

    return forward


def _own_edges(out: tuple, inputs: tuple) -> tuple:
    """(out, (edge_index, alpha)) with a copy of edge_index, which may be shared with later calls."""
    if len(out) != 2 or type(out[1]) is not tuple or not isinstance(out[1][0], Tensor):
        return out
    edges, *rest = out[1]
    return out if any(edges is value for value in inputs) else (out[0], (edges.clone(), *rest))


def _reduce_ex(self, protocol):
    ours = type(self)
    function, args, *rest = super(ours, self).__reduce_ex__(protocol)
    if function is copyreg.__newobj__ and len(args) == 1:
        function, args = copyreg._reconstructor, (ours, object, None)  # the pickler holds __newobj__ to type(self)
    return (function, tuple(ours._gnnaccel_plain if arg is ours else arg for arg in args), *rest)


def _replicate(self, state) -> MessagePassing:
    plain = type(self)._gnnaccel_plain
    other = plain.__new__(plain)
    other.__setstate__(state)
    accelerate(other)
    return other


def _copy(self):
    return _replicate(self, dict(self.__reduce_ex__(4)[2]))


def _deepcopy(self, memo):
    plain = type(self)._gnnaccel_plain
    other = memo[id(self)] = plain.__new__(plain)
    other.__setstate__(copy.deepcopy(self.__reduce_ex__(4)[2], memo))
    accelerate(other)
    return other


def _prepare_scriptable(self):
    """What torch.jit.script compiles instead: the same layer in its original class."""
    plain = type(self)._gnnaccel_plain
    other = plain.__new__(plain)
    vars(other).update(vars(self))
    _rebind(other)
    report.fallback(kind_of(plain), "torch.jit.script")
    return other


def _make_subclass(plain: Any) -> type:
    propagate = _make_propagate(plain)
    members: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_gnnaccel_plain": plain,
        "propagate": propagate,
        "_orig_propagate": propagate,
        "_jinja_propagate": propagate,
        "__reduce_ex__": _reduce_ex,
    }
    for name, method in (
        ("__copy__", _copy),
        ("__deepcopy__", _deepcopy),
        ("__prepare_scriptable__", _prepare_scriptable),
    ):
        if not hasattr(plain, name):
            members[name] = method
    if plain.aggregate is MessagePassing.aggregate:
        members["aggregate"] = _make_aggregate(plain)
    if plain.edge_update in rules.EDGE_RULES:
        members["edge_updater"] = _make_edge_updater(plain)
    for parent in plain.__mro__[: plain.__mro__.index(MessagePassing)]:
        for name, function in vars(parent).items():
            if name.startswith("__") or name in members:
                continue
            if getattr(plain, name) is function and uses_helpers(function):
                members[name] = _make_bound(plain, name, function)
    if plain.forward in _SHOWS_WEIGHTS and plain.message in rules.MESSAGE_RULES:
        members["forward"] = _make_hiding(plain, plain.forward, members.get("forward", plain.forward))
    return type(plain)(plain.__name__, (plain,), members)
