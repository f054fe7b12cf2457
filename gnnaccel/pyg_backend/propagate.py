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
from torch.utils._pytree import tree_map_only
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.conv import GATConv, GraphConv, MessagePassing, TransformerConv
from torch_geometric.typing import SparseTensor

from gnnaccel import report
from gnnaccel.pyg_backend import rules
from gnnaccel.pyg_backend.aggregate import aggregate as run_aggregation
from gnnaccel.pyg_backend.attention import Deferred
from gnnaccel.pyg_backend.call import Call, current
from gnnaccel.pyg_backend.graph import Edges, Unsupported
from gnnaccel.pyg_backend.helpers import bind, uses_helpers
from gnnaccel.pyg_backend.lazy import Lazy
from gnnaccel.pyg_backend.trust import distrust

_FUSED = "own message_and_aggregate()"
_METHODS = ("message", "aggregate", "update", "message_and_aggregate", "edge_updater", "edge_update")
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
        _set_class(conv, ours)
    except TypeError as error:  # another metaclass, slots
        report.fallback(kind_of(plain), f"its class cannot be extended ({error})")
        return
    _rebind(conv)
    _instances.add(conv)


def _set_class(conv: MessagePassing, cls: type) -> None:
    """Change the class of a layer without its own __setattr__() seeing it."""
    object.__setattr__(conv, "__class__", cls)


def restore(conv: MessagePassing) -> None:
    """Undo `accelerate` on one layer."""
    if is_accelerated(conv):
        _set_class(conv, type(conv)._gnnaccel_plain)
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
    for name in _METHODS:
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


def _is_fused(conv, edges: Edges) -> bool:
    """True if PyG will call message_and_aggregate(): no lifted feature is then made."""
    given = edges.edge_index
    sorted_index = conv.SUPPORTS_FUSED_EDGE_INDEX and isinstance(given, EdgeIndex) and given.is_sorted_by_col
    return conv.fuse and (edges.is_sparse or sorted_index)


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
        rule = rules.MESSAGE_RULES.get(plain.message)
        if rule is not None or plain.message in rules.WEIGHTS:
            try:
                edges = Edges(edge_index, size, self.flow, self.node_dim, by_flow)
                if rule is not None:
                    out = rules.propagate(rule, self, plain, edges, named)
                else:
                    out = rules.weighted(self, plain, edges, named)
                report.record(kind, start)
                return out
            except Unsupported as error:
                reason = str(error) if rule is not None else None
        return _in_call(plain.propagate, self, plain, edge_index, size, _settled(kwargs), kind, reason)

    # PyG takes a propagate() of this module name for the one that it generated, and leaves it alone.
    propagate.__module__ = f"{plain.__module__}_{plain.__name__}_propagate"
    return propagate


def _in_call(function: Callable, conv, plain: Any, edge_index, size, kwargs: dict, kind: str, reason: str | None):
    """PyG's own propagate() or edge_updater() with lazy features, our softmax and our aggregation inside."""
    start = time.perf_counter()
    named = {name: value for name, value in kwargs.items() if name != "size"}
    updating = function is plain.edge_updater
    try:
        by_flow = function in (MessagePassing.propagate, MessagePassing.edge_updater)
        edges = Edges(edge_index, size, conv.flow, conv.node_dim, by_flow)
        _note_sizes(edges, conv._edge_user_args if updating else conv._user_args, named)
        doubt = _FUSED if _is_fused(conv, edges) and not updating else distrust(conv)
        call = Call(edges, lazily=doubt is None)
    except Unsupported as error:
        report.fallback(kind, str(error))
        return function(conv, edge_index, **kwargs)
    with call:
        out = function(conv, edge_index, **kwargs)
    out = tree_map_only(Lazy, lambda x: x.rows("a result with one row per edge"), out)
    if not (call.used or (updating and call.lifted)):
        report.fallback(kind, reason or doubt or call.gathered or "its aggregation is none of sums, means and extrema")
    elif call.gathered or doubt not in (None, _FUSED):
        report.record(kind + " segment", start, call.gathered or doubt)
    else:
        report.record(kind, start)
    return out


def _make_edge_updater(plain: Any) -> Callable:
    kind = kind_of(plain) + " edge_update"

    def edge_updater(self, edge_index, *args, **kwargs):
        if is_compiling():
            _note_compiled(kind)
            return plain.edge_updater(self, edge_index, *args, **kwargs)
        reason = _obstacle(self) or ("positional arguments to edge_updater()" if args else None)
        if reason is not None:
            report.fallback(kind, reason)
            return plain.edge_updater(self, edge_index, *args, **kwargs)
        named = dict(kwargs)
        size = named.pop("size", None)
        by_flow = plain.edge_updater is MessagePassing.edge_updater
        start = time.perf_counter()
        rule = rules.EDGE_RULES.get(plain.edge_update)
        if rule is not None:
            try:
                edges = Edges(edge_index, size, self.flow, self.node_dim, by_flow)
                out = rules.call(rule, self, edges, named)
                report.record(kind, start)
                return out
            except Unsupported as error:
                reason = str(error)
        return _in_call(plain.edge_updater, self, plain, edge_index, size, kwargs, kind, reason)

    edge_updater.__module__ = f"{plain.__module__}_{plain.__name__}_edge_updater"
    return edge_updater


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
        # PyG's own ignores the flow.
        usual = isinstance(edge_index, EdgeIndex) and self.flow == "source_to_target"
        if call is None or is_compiling() or not usual:
            return original(self, edge_index, x, edge_weight)
        try:
            return call.spmm(x[0], edge_weight, self.aggr)
        except Unsupported:
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
            found = out.get("index") if isinstance(out, dict) else getattr(out, "index", None)
            current.call.destinations = found
        return out

    return collect


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
    """(out, (edge_index, alpha)) or (out, matrix) with a copy of the edges, which may be shared with later calls."""
    if len(out) == 2 and isinstance(out[1], SparseTensor):
        col = out[1].storage.col()
        given = any(isinstance(value, SparseTensor) and value.storage.col() is col for value in inputs)
        return out if given else (out[0], out[1].clone())
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
    if plain.edge_update is not MessagePassing.edge_update:
        members["edge_updater"] = _make_edge_updater(plain)
    if plain.message_and_aggregate is GraphConv.message_and_aggregate:
        members["message_and_aggregate"] = _make_matmul(plain)
    if plain._index_select is MessagePassing._index_select and plain._lift is MessagePassing._lift:
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
    if plain.forward in _SHOWS_WEIGHTS and plain.message in rules.MESSAGE_RULES:
        members["forward"] = _make_hiding(plain, plain.forward, members.get("forward", plain.forward))
    return type(plain)(plain.__name__, (plain,), members)
