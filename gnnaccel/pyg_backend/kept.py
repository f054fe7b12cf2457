"""Calls of propagate() that are made again without running message(), aggregate() and update().

These methods make the same calls of torch and gnnaccel for edges, shapes, switches and attributes that are the same, if
all they read are arguments, attributes and globals that can be compared. So the second call of a kind is recorded
(gnnaccel.recording), and from the third on its calls are made again. A branch is no obstacle, as what it may depend on
is compared; a value that is read of a tensor is one, and so is an attribute that is set.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import bytecode, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.deferred import METADATA
from gnnaccel.lazy.tensor import Lazy
from gnnaccel.lower import bounds
from gnnaccel.modules import is_watched
from gnnaccel.ops.messages.reduce import joined
from gnnaccel.pyg_backend.graph import Edges
from gnnaccel.pyg_backend.touch import collects_otherwise
from gnnaccel.recording import Recorded, Recorder, is_possible

_SCALARS = (type(None), bool, int, float, str, torch.dtype, torch.device)
_TENSORS = (Tensor, torch.nn.Parameter)
_METHODS = ("message", "aggregate", "update", "edge_update")
_AROUND = ("propagate", "edge_updater", "collect", "edge_collect", "_collect", "message_and_aggregate")
_SETS = frozenset(f"set {what}" for what in ("attribute", "global", "free", "name")) | {"delete global", "import"}
_PACKAGES = ("torch", "math", "torch_geometric", "builtins", "typing")
_FORBIDDEN = (print, input, open, setattr, delattr, getattr, hasattr, vars, dir, globals, locals, id, hash, next)
# Attributes whose use a recording would miss: what is in a module, and torch's random numbers.
_UNSEEN = {"modules", "children", "parameters", "buffers", "state_dict", "named_modules", "named_children"}
_UNSEEN |= {"named_parameters", "named_buffers", "manual_seed", "seed", "fork_rng", "set_rng_state", "get_rng_state"}
_KEEPING = {"retain_grad", "register_hook", "grad", "append", "extend", "insert", "setdefault", "update"}
_SEEN, _NEVER = "seen once", "not to be made again"


class _Reads(NamedTuple):
    """What the methods of a class read, and functions of the user's that they call: attributes of anything, by name;
    globals, by namespace and name, or None and a cell of what they close over; and these functions."""

    attributes: frozenset[str]
    free: tuple[tuple[dict | None, Any], ...]
    functions: tuple[types.FunctionType, ...]


class _State(NamedTuple):
    """What was read of a layer.

    guards : (name, value) of its attributes. free : values of globals. parts : its submodules, as `_part` has them.
    needs : tensors that stay the same, and their `_form`.
    """

    guards: tuple[tuple[str, Any], ...]
    free: tuple[Any, ...]
    parts: tuple[tuple, ...]
    needs: tuple[tuple[Tensor, tuple], ...]

    def holds(self, conv: MessagePassing, reads: _Reads) -> bool:
        """True if all of it is what it was."""
        return (
            all(_same(getattr(conv, name, _SEEN), value) for name, value in self.guards)
            and all(map(_same, _values(reads.free), self.free))
            and all(_form(t) == form for t, form in self.needs)
            and all(part == _part(part[0]) and not is_watched(part[0]) for part in self.parts)
        )


@dataclass
class Kept:
    """A recorded call.

    methods : those of the layer's class then. gathered : why messages were stored, or None. used : it was made again.
    """

    recorded: Recorded
    graph: weakref.ref[Graph]
    methods: tuple
    reads: _Reads
    state: _State
    gathered: str | None
    used: bool = False

    def holds(self, conv: MessagePassing, plain: Any, graph: Graph) -> bool:
        """True if the call would be the same again."""
        return self.graph() is graph and self.methods == _methods(plain) and self.state.holds(conv, self.reads)


_calls: weakref.WeakKeyDictionary[MessagePassing, dict] = weakref.WeakKeyDictionary()  # of a layer, by their kinds


class Attempt:
    """One call of `name`, propagate() or edge_updater(): `kept` if it can be made again; with a `recorder` if it is to
    be recorded."""

    def __init__(self, conv: MessagePassing, plain: Any, name: str, edges: Edges, kwargs: dict):
        self.kept: Kept | None = None
        self.recorder: Recorder | None = None
        key = (
            _key(edges, kwargs) if type(edges.edge_index) is Tensor and not edges.is_sparse and is_possible() else None
        )
        if key is None:
            return
        graph, self._edges = edges.graph(), edges.edge_index
        self._graph = graph
        self._found = _calls.setdefault(conv, {})
        self._key = key = (id(graph), name, conv.training, conv.node_dim, *key)
        known = self._found.get(key)
        if isinstance(known, Kept):
            if known.holds(conv, plain, graph):
                self.kept, known.used = known, True
            elif known.used:
                self._record(conv, plain, kwargs)
            else:  # something is another at each call
                self._found[key] = _NEVER
        elif known is _SEEN:
            self._record(conv, plain, kwargs)
        elif known is None:
            for of, call in [*self._found.items()]:
                if isinstance(call, Kept) and call.graph() is None:  # what it holds is no use to anybody
                    del self._found[of]
            if len(self._found) >= bounds.KEPT_CALLS:
                self._found.clear()
            self._found[key] = _SEEN

    def _record(self, conv: MessagePassing, plain: Any, kwargs: dict) -> None:
        self._found[self._key] = _NEVER  # unless `keep` is reached
        reads = _reads_of(plain, _methods(plain))
        state = None if reads is None else _state_of(conv, plain, reads)
        if reads is None or state is None or self._graph.indptr.is_inference():
            return
        self._of = _methods(plain), reads, state
        constants = [tensor for tensor, _ in state.needs]
        given = self.given(kwargs)
        apart = {id(x) for x in (*constants, self._edges)}
        if any(id(x) in apart for x in given):  # which of the two is meant cannot be told
            return
        self.recorder = Recorder(given, constants, Lazy, METADATA)

    def given(self, kwargs: dict) -> list:
        """What the calls are made of."""
        return [self._graph, *_tensors(kwargs)]

    def keep(self, out: Any, gathered: str | None) -> None:
        """The recorded call came to `out`."""
        assert self.recorder is not None
        recorded = self.recorder.finished(out)
        if isinstance(recorded, Recorded):
            self._found[self._key] = Kept(joined(recorded), weakref.ref(self._graph), *self._of, gathered)


def _tensors(kwargs: dict) -> list[Tensor]:
    given = (x for value in kwargs.values() for x in (value if isinstance(value, tuple) else (value,)))
    return [x for x in given if isinstance(x, Tensor)]


def _key(edges: Edges, kwargs: dict) -> tuple | None:
    """What calls are compared by; None of one that cannot be compared."""
    autocast, kind = touch.any_autocast(), edges.edge_index.device.type
    found: list[Any] = [
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, edges.flow, tuple(edges.size)),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
    ]
    if autocast:
        found += (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    for name, value in kwargs.items():
        found.append(name)
        for x in value if isinstance(value, tuple) else (value,):
            if type(x) in _TENSORS:
                found += (x.shape, x.dtype, x.device, x.requires_grad, x.stride(), x.is_inference())
            elif type(x) in _SCALARS:
                found += (type(x), repr(x) if type(x) is float else x)
            else:
                return None
    tensors = [id(x) for x in _tensors(kwargs)]
    if len(set(tensors)) != len(tensors):  # what is done to one tensor twice is recorded once
        found += map(tensors.index, tensors)
    return tuple(found)


def _same(value: Any, before: Any) -> bool:
    if type(before) is float:  # 0.0 is not -0.0
        return type(value) is float and repr(value) == repr(before)
    if type(before) in _SCALARS:
        return type(value) is type(before) and value == before
    if type(before) is tuple:
        return type(value) is tuple and len(value) == len(before) and all(map(_same, value, before))
    return value is before


def _part(module: torch.nn.Module) -> tuple | None:
    """A module, its class and options, and who its parameters, buffers and parts are; None of one that cannot be
    compared."""
    options: list[Any] = [type(module), type(module).forward]
    for name, value in vars(module).items():
        found = _option(value)
        if found is not _NEVER:
            options.append(found)
        elif not name.startswith("_"):  # torch's own: hooks, which `is_watched` sees, and what is below
            return None
    held = [*module.parameters(False), *module.buffers(False), *touch.submodules(module).values()]
    return module, options, list(map(id, held))


def _option(value: Any) -> Any:
    """An option of a module as it is compared; _NEVER of what is not."""
    if type(value) is float:
        return repr(value)
    if type(value) in (tuple, list):
        found = tuple(map(_option, value))
        return _NEVER if _NEVER in found else found
    if type(value) is dict:
        return _option([*value.items()])
    plain = type(value) in _SCALARS or isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
    return value if plain else _NEVER


def _form(x: Tensor) -> tuple:
    """What a recording takes for granted of a tensor that stays the same."""
    return x.requires_grad, x.shape, x.dtype, x.device, x.stride()


def _methods(plain: Any) -> tuple:
    """The methods of a class and its parents."""
    parents = plain.__mro__[: plain.__mro__.index(MessagePassing)]
    return tuple(vars(parent).get(name) for parent in parents for name in _METHODS)


@functools.lru_cache(maxsize=256)
def _reads_of(plain: Any, methods: tuple) -> _Reads | None:
    """What the methods of a class read; None if they set something, or if the class has its own in place of what PyG
    calls around them."""
    attributes: set[str] = set()
    free: list[tuple[dict | None, Any]] = []
    if bytecode.unread() is not None or collects_otherwise(plain):
        return None
    functions: list[Any] = []
    for parent in plain.__mro__[: plain.__mro__.index(MessagePassing)]:  # those that super() finds too
        if not all(_is_pygs(vars(parent)[name]) for name in _AROUND if name in vars(parent)):
            return None
        functions += [vars(parent)[name] for name in _METHODS if name in vars(parent)]
    for function in functions:
        if not isinstance(function, types.FunctionType):
            return None
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(value) not in _SCALARS for value in defaults) or vars(function).keys() - {"__wrapped__"}:
            return None
        of_this: list[tuple[dict | None, Any]] = [(None, cell) for cell in function.__closure__ or ()]
        for code in bytecode.parts_of(function.__code__):
            steps = bytecode.steps_of(code)
            if any(step.kind in _SETS for step in steps):
                return None
            attributes.update(str(step.value) for step in steps if step.kind == "attribute")
            of_this += [(function.__globals__, step.value) for step in steps if step.kind == "global"]
        free += of_this
        found = (value for value in _values(of_this) if isinstance(value, types.FunctionType))
        functions += [value for value in found if not _is_harmless(value) and value not in functions]
    return _Reads(frozenset(attributes), tuple(free), tuple(functions))


def keeps_nothing(plain: Any) -> bool:
    """True if the methods of a class keep no value, and ask for no gradient of one."""
    reads = _reads_of(plain, _methods(plain))
    return reads is not None and reads.attributes.isdisjoint(_KEEPING)


def _is_pygs(function: Any) -> bool:
    """True for a function of PyG's, or one that it has generated."""
    where = getattr(function, "__module__", None) or ""
    return where.startswith("torch_geometric.") or where.endswith(("_propagate", "_edge_updater"))


def _values(free: Iterable) -> list[Any]:
    found = []
    for where, name in free:
        if where is None:
            found.append(name.cell_contents if name != types.CellType() else None)
        elif name in where:
            found.append(where[name])
        else:
            builtins = where["__builtins__"]
            found.append((builtins if isinstance(builtins, dict) else vars(builtins)).get(name))
    return found


def _state_of(conv: MessagePassing, plain: Any, reads: _Reads) -> _State | None:
    """What is read of a layer; None if something in it cannot be compared."""
    guards: list[tuple[str, Any]] = [("aggr_module", conv.aggr_module)]
    own = plain.__mro__[: plain.__mro__.index(MessagePassing)]
    for name in reads.attributes:
        if name in _UNSEEN:
            return None
        # A name that every layer has is one of tensors here, or of what PyG does around the methods.
        if hasattr(MessagePassing, name) and name not in vars(conv) and not any(name in vars(cls) for cls in own):
            continue
        if _is_computed(plain, name):
            return None
        value = getattr(conv, name, _SEEN)
        if value is not _SEEN and name not in _METHODS:
            guards.append((name, value))
    free = _values(reads.free)
    if not all(_is_comparable(value) for _, value in guards):
        return None
    known = (*plain.__mro__, *reads.functions)
    if not all(type(x) in _TENSORS or _is_harmless(x) or any(x is y for y in known) for x in free):
        return None
    values = [x for _, value in guards for x in (value if type(value) is tuple else (value,))] + free
    constants = [x for x in values if isinstance(x, Tensor)]
    parts = []
    for module in (value for value in values if isinstance(value, torch.nn.Module)):
        for part in module.modules():
            trusted = type(part).__module__.startswith(("torch.nn.modules.", "torch_geometric.nn."))
            if not trusted or is_watched(part) or "forward" in vars(part):
                return None
            found = _part(part)
            if found is None:
                return None
            parts.append(found)
            constants += [*part.parameters(False), *part.buffers(False)]
    return _State(tuple(guards), tuple(free), tuple(parts), tuple((t, _form(t)) for t in constants))


def _is_computed(plain: Any, name: str) -> bool:
    """True for an attribute that code of the user's makes at each look."""
    found = inspect.getattr_static(plain, name, None)
    return not isinstance(found, types.FunctionType) and hasattr(type(found), "__get__")


def _is_comparable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_comparable, value))
    return type(value) in _SCALARS or type(value) in _TENSORS or isinstance(value, torch.nn.Module)


def _is_harmless(value: Any) -> bool:
    """True of a global whose use leaves nothing out of a recording: torch, PyG, mathematics, and what is compared."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _PACKAGES
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        return (value.__module__ or "torch").partition(".")[0] in _PACKAGES and value not in _FORBIDDEN
    return _is_comparable(value) and not isinstance(value, torch.nn.Module)
