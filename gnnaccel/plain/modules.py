"""Which modules' forward() runs with lazy rows, and how it is called."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module

from gnnaccel import report, subclass, touch
from gnnaccel.bound import Replacements, is_users
from gnnaccel.graph import modes
from gnnaccel.lazy.in_place import names_of
from gnnaccel.lazy.trust import DATA, Walk
from gnnaccel.lower import choose
from gnnaccel.modules import is_watched
from gnnaccel.plain.rows import FEW, WRITES, Code, Rows

_SCATTERS = frozenset(
    f"{name}{end}" for name in ("index_add", "scatter_add", "scatter_reduce", "scatter") for end in ("", "_")
)
WATCHED = "the first call of a module is watched"
NOTHING = "nothing is reduced over the edges of a node"
_HELD = (Tensor, type(None), bool, int, float, str)  # what forward() may be given, and tuples, lists and dicts of it


REPLACED = Replacements({}, scripted=True)
"""What code finds in place of helpers of a framework, that have a form for `rows_now`, and of scripted functions."""
_patches = touch.Patches()  # of Module
_codes: weakref.WeakKeyDictionary[Module, Code] = weakref.WeakKeyDictionary()


class _Now(threading.local):
    rows: Rows | None = None


_now = _Now()


def rows_now() -> Rows | None:
    """The call of a module that runs on this thread."""
    return _now.rows


def accelerate(model: Module) -> None:
    """Let forward() of every module in `model` that scatters run with lazy rows.

    Raises
    ------
    TypeError
        If `model` is not a torch.nn.Module.
    """
    if not isinstance(model, Module):
        raise TypeError(f"accelerate: model: expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        _accelerate(module)


def _accelerate(module: Module) -> None:
    plain = subclass.plain_of(module)
    if not is_users(plain) or subclass.is_extended(module) or "forward" in vars(module):
        return
    if not isinstance(module, (GraphModule, torch.jit.ScriptModule)) and _scatters(plain, plain.forward):
        subclass.extend(module, _kind(plain), _members, _accelerate)


def _then_accelerate(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        original(self, *args, **kwargs)
        _accelerate(self)

    return wrapper


def enable() -> None:
    """Accelerate every module that is built or unpickled from now on; does nothing the second time."""
    for name in () if _patches else ("__init__", "__setstate__"):
        _patches.put(Module, name, _then_accelerate)


def disable() -> None:
    """Undo `enable` and every `accelerate`."""
    _patches.undo()
    for module in subclass.extended():
        if subclass.again_of(module) is _accelerate:
            subclass.restore(module)


def _kind(plain: Any) -> str:
    return f"torch.{plain.__name__}"


@functools.lru_cache(maxsize=1024)
def _scatters(plain: Any, forward: Any) -> bool:
    """True if the code of forward(), or of what it finds by a name that it reads, names a scatter, and the class is not
    made of one of a framework's."""
    if not all(is_users(base) or base in (Module, object) for base in plain.__mro__):
        return False
    waiting: list[Any] = [forward]
    seen: set[types.FunctionType] = set()
    while waiting:
        function = waiting.pop()
        function = touch.scripted(function) or function
        if not isinstance(function, types.FunctionType) or function in seen or not is_users(function):
            continue
        seen.add(function)
        read, attributes = names_of(function.__code__)
        if not _SCATTERS.isdisjoint(read | attributes):
            return True
        waiting.append(getattr(function, "__wrapped__", None))
        waiting += [function.__globals__.get(name) for name in read] + [
            getattr(plain, name, None) for name in attributes
        ]
    return False


class _Code(Walk):
    """The code of modules, which may write in place: a call of `Rows` sees what torch does."""

    minds_writes = False

    def _parts(self, name, value):
        original = touch.scripted(value)
        return super()._parts(name, value if original is None else original)


@functools.lru_cache(maxsize=1024)
def _found(kinds: tuple, forwards: tuple) -> tuple[str | None, tuple, frozenset[str]]:
    """Why the code of these classes may not be handed lazy rows, or None; that code, and the attributes it reads."""
    walk = _Code(*kinds)
    reason = walk.follow("forward", list(forwards))
    return reason, tuple(walk.codes), frozenset(walk.names)


def _refusal(module: Module, methods: Iterable[Any], given: Iterable[Any]) -> str | None:
    """Why these methods of a module, called with what is given, may not be handed lazy rows; None if they may."""
    if not all(map(_is_held, given)):
        return "it is given what may look into tensors"
    if touch.has_global_backward_hooks():
        return "backward hooks on all modules"
    kind = subclass.plain_of(module)
    kinds, functions, states = {kind: None}, [*methods], [(kind, vars(module))]
    for part in module.modules():
        if part is module:
            continue
        state, kind = vars(part), subclass.plain_of(part)
        if is_watched(part) or touch.has_backward_hooks(part):
            return "a hook watches a part of it"
        if "forward" in state or state.get(touch.COMPILED_CALL) or isinstance(part, torch.jit.ScriptModule):
            return f"forward() of {type(part).__name__} was replaced or compiled"
        if subclass.is_extended(part) and subclass.again_of(part) is not _accelerate:
            return "it holds layers of a framework, which are accelerated by themselves"
        if is_users(kind):
            kinds[kind] = None
            functions.append(kind.forward)
            states.append((kind, state))
    reason, codes, names = _found(tuple(kinds), tuple(functions))
    if reason is not None:
        return reason
    for kind, state in states:
        for name in names.intersection(state):
            if type(state[name]) in DATA:
                continue
            if (reason := _Code(kind, codes=codes).follow(name, [state[name]])) is not None:
                return reason
    return None


def _is_held(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_held, value))
    if isinstance(value, dict):
        return all(map(_is_held, value.values()))
    return isinstance(value, (*_HELD, torch.dtype, torch.device)) or type(value).__module__.startswith(
        "torch_geometric.data."
    )


def _indices(given: Iterable[Any]) -> int:
    """How many numbers the longest tensor of indices has that forward() is given."""
    most = 0
    for value in given:
        if isinstance(value, Tensor):
            most = most if value.is_floating_point() else max(most, value.numel())
        elif isinstance(value, (tuple, list)):
            most = max(most, _indices(value))
        elif isinstance(value, dict):
            most = max(most, _indices(value.values()))
        elif isinstance(edges := getattr(value, "edge_index", None), Tensor):
            most = max(most, edges.numel())
    return most


def obstacle(module: Module, code: Code, methods: Iterable[Any], given: Iterable[Any]) -> str | None:
    """Why methods of a module must run as they are; None if nothing stands against lazy rows in them."""
    if code.writes:
        return WRITES
    if touch.tracing():
        return "torch.jit.trace"
    if modes.proxied() or modes.faking():
        return "a trace, or tensors without values"
    if touch.transforming() or touch.in_forward_mode():
        return "a torch.func transform or forward-mode differentiation"
    if module.training not in code.watched and modes.recomputing():
        return modes.RECOMPUTING  # what is recomputed has to go the way that it went
    return _refusal(module, methods, given)


def code_of(module: Module) -> Code:
    """What is known of the code of a module."""
    code = _codes.get(module)
    if code is None:
        code = _codes[module] = Code()
    return code


@contextlib.contextmanager
def traced(module: Module, code: Code) -> Iterator[Rows]:
    """A context in which code of a module has lazy rows; the first time it is watched."""
    rows = Rows(code, module.training not in code.watched)
    outer, _now.rows = _now.rows, rows
    try:
        with touch.out_of(outer), rows:
            yield rows
    finally:
        _now.rows = outer
    rows.settle()
    if rows.watching and rows.used:
        code.watched.add(module.training)


def _members(plain: Any) -> dict[str, Any]:
    kind, original = _kind(plain), plain.forward
    bound = REPLACED.bind(original) if REPLACED.are_named(original) else original

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or plain.forward is not original:  # or was replaced since
            return plain.forward(self, *args, **kwargs)
        code = code_of(self)
        few = 0 < _indices((*args, *kwargs.values())) <= code.few and choose.may_be_few()
        reason = FEW if few else obstacle(self, code, (original,), (*args, *kwargs.values()))
        if reason is not None:
            report.fallback(kind, reason)
            return original(self, *args, **kwargs)
        start = time.perf_counter()
        with traced(self, code) as rows:
            out = rows.ordinary(bound(self, *args, **kwargs))
        if rows.reason == FEW and not rows.used:
            code.few = max(code.few, _indices((*args, *kwargs.values())))
        if rows.used and not rows.watching:
            report.record(kind, start, rows.gathered, stored=rows.gathered is not None)
        else:
            report.fallback(kind, (rows.used and WATCHED) or rows.reason or NOTHING)
        return out

    return {"forward": forward}
