"""Which modules' forward() runs with lazy rows, and how it is called."""

from __future__ import annotations

import abc
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
from torch.utils.weak import WeakIdKeyDictionary

from gnnaccel import report, subclass, touch
from gnnaccel.bound import Replacements, is_users
from gnnaccel.bytecode import parts_of, steps_of
from gnnaccel.graph import modes
from gnnaccel.in_place import names_of
from gnnaccel.kept import Attempt, Reads, State, form_of, modes_now, reads_of, same_twice, state_of
from gnnaccel.lazy.trust import DATA, Walk
from gnnaccel.lower import choose
from gnnaccel.modules import is_watched
from gnnaccel.plain.rows import FEW, WRITES, Code, Rows
from gnnaccel.recording import is_possible

_SCATTERS = frozenset(
    f"{name}{end}" for name in ("index_add", "scatter_add", "scatter_reduce", "scatter") for end in ("", "_")
)
WATCHED = "the first call of a module is watched"
NOTHING = "nothing is reduced over the edges of a node"
_BRANCHES = (bool, str, type(None))
_SETS = ("set global", "delete global")
_HELD = (Tensor, type(None), bool, int, float, str)  # what forward() may be given, and tuples, lists and dicts of it

REPLACED = Replacements({}, scripted=True)
"""What code finds in place of helpers of a framework, that have a form for `rows_now`, and of scripted functions."""
_patches = touch.Patches()  # of Module
_waiting: list[weakref.ref[Module]] = []  # modules that were built since the last call of any
_codes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # module -> Code
# class -> code of its forward(), and whether that scatters
_scattering: weakref.WeakKeyDictionary[type, tuple[Any, bool]] = weakref.WeakKeyDictionary()


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
    usual = is_users(plain) and type(plain) in (type, abc.ABCMeta) and "forward" not in vars(module)
    if not usual or subclass.is_extended(module) or isinstance(module, (GraphModule, torch.jit.ScriptModule)):
        return
    if _scatters(plain):
        subclass.extend(module, _kind(plain), _members, _accelerate)


def _then_wait(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if is_users(type(self)) and _scatters(type(self)):
            wait_for(self)

    return wrapper


def wait_for(module: Module) -> None:
    """Accelerate a module, whose __init__() runs, before the next call of any."""
    _waiting.append(weakref.ref(module))
    if getattr(Module.__call__, "_gnnaccel", False):
        return
    original = Module.__call__

    @functools.wraps(original)
    def first(self, *args, **kwargs):
        if Module.__call__ is first:
            Module.__call__ = original
        while _waiting:
            built = _waiting.pop()()
            if built is not None and _patches:
                _accelerate(built)
        return original(self, *args, **kwargs)

    first._gnnaccel = True  # type: ignore[attr-defined]
    Module.__call__ = first  # type: ignore[method-assign]


def enable() -> None:
    """Accelerate every module that is built or unpickled from now on; does nothing the second time."""
    for name in () if _patches else ("__init__", "__setstate__"):
        _patches.put(Module, name, _then_wait)


def disable() -> None:
    """Undo `enable` and every `accelerate`."""
    _patches.undo()
    _waiting.clear()
    for module in subclass.extended():
        if subclass.again_of(module) is _accelerate:
            subclass.restore(module)


def _kind(plain: Any) -> str:
    return f"torch.{plain.__name__}"


def _scatters(plain: Any) -> bool:
    """True if the code of forward(), or of what it finds by a name that it reads, names a scatter, and the class is not
    made of one of a framework's."""
    code = getattr(plain.forward, "__code__", None)
    known = _scattering.get(plain)
    if known is None or known[0] is not code:
        known = _scattering[plain] = code, code is not None and _names_scatter(plain)
    return known[1]


def _names_scatter(plain: Any) -> bool:
    if not all(is_users(base) or base in (Module, object) for base in plain.__mro__):
        return False
    waiting: list[Any] = [plain.forward]
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
        waiting += [function.__globals__.get(name) for name in read]
        waiting += [getattr(plain, name, None) for name in attributes]
    return False


class _Code(Walk):
    """The code of modules. It may write in place, as a call of `Rows` sees what torch does, and call functions of
    torch.jit, in whose place others run."""

    minds_writes = False

    def _parts(self, name, value):
        original = touch.scripted(value)
        return super()._parts(name, value if original is None else original)

    def _of_function(self, function):
        sets = any(step.kind in _SETS for part in parts_of(function.__code__) for step in steps_of(part))
        return f"{function.__name__}() sets a global" if sets else super()._of_function(function)


class _Trust:
    """Whether some functions, of some classes, may be handed lazy rows: `reason` says why not."""

    def __init__(self, kinds: list, functions: list):
        self._of = kinds, functions
        walk = _Code(*kinds)
        self.reason = walk.follow("forward", list(functions))
        self._reads, self._codes, self._names = walk.reads, tuple(walk.codes), frozenset(walk.names)

    def holds(self, kinds: list, functions: list) -> bool:
        """True if all that was found is what it was."""
        alike = len(kinds) == len(self._of[0]) and len(functions) == len(self._of[1])
        if not alike or any(a is not b for a, b in zip(kinds + functions, self._of[0] + self._of[1], strict=True)):
            return False
        return all(where.get(name) is value for where, name, value in self._reads)

    def branches(self, states: list[tuple[Any, dict]], given: Iterable[Any]) -> tuple:
        """What forward() may decide by which way it goes, other than by numbers."""
        held = [state[name] for _, state in states for name in sorted(self._names.intersection(state))]
        return tuple([x for x in (*held, *given) if isinstance(x, _BRANCHES)])

    def of_states(self, states: list[tuple[Any, dict]]) -> str | None:
        """Why what instances of these classes hold may not be."""
        for kind, state in states:
            for name in self._names.intersection(state):
                if type(state[name]) in DATA:
                    continue
                if (reason := _Code(kind, codes=self._codes).follow(name, [state[name]])) is not None:
                    return reason
        return None


def _refusal(module: Module, code: Code, methods: Iterable[Any], given: Iterable[Any]) -> str | None:
    """Why these methods of a module, called with what is given, may not be handed lazy rows; None if they may."""
    if not all(map(_is_held, given)):
        return "it is given what may look into tensors"
    kind = subclass.plain_of(module)
    kinds, functions, states = [kind], [*methods], [(kind, vars(module))]
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
            states.append((kind, state))
            if kind not in kinds:
                kinds.append(kind)
                functions.append(kind.forward)
    trust = code.trust
    if trust is None or not trust.holds(kinds, functions):
        trust = code.trust = _Trust(kinds, functions)
    code.mode = module.training, *trust.branches(states, given)
    # For good: to ask again takes longer than a small call.
    trust.reason = trust.reason or trust.of_states(states)
    return trust.reason


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


def _mode() -> str | None:
    """Why no lazy rows may be made now, whatever the code."""
    if touch.tracing():
        return "torch.jit.trace"
    if modes.proxied() or modes.faking():
        return "a trace, or tensors without values"
    if touch.transforming() or touch.in_forward_mode():
        return "a torch.func transform or forward-mode differentiation"
    return "backward hooks on all modules" if touch.has_global_backward_hooks() else None


def obstacle(module: Module, code: Code, methods: Iterable[Any], given: Iterable[Any]) -> str | None:
    """Why methods of a module must run as they are; None if nothing stands against lazy rows in them."""
    if code.writes:
        return WRITES
    if code.idle:
        return NOTHING
    if code.trust is not None and code.trust.reason is not None:
        return code.trust.reason
    reason = _mode()
    if reason is not None:
        return reason
    reason = _refusal(module, code, methods, given)
    if reason is None and code.mode not in code.watched and modes.recomputing():
        return modes.RECOMPUTING  # what is recomputed has to go the way that it went
    return reason


def code_of(module: Module) -> Code:
    """What is known of the code of a module."""
    code = _codes.get(module)
    if code is None:
        code = _codes[module] = Code()
    return code


@contextlib.contextmanager
def traced(module: Module, code: Code, given: Iterable[Any] = ()) -> Iterator[Rows]:
    """A context in which code of a module has lazy rows; the first time it is watched.

    given : tensors among which are those that whoever calls it may write into before the backward pass.
    """
    outer = _now.rows
    rows, mode = Rows(code, code.mode not in code.watched, outer, given), code.mode
    _now.rows = rows
    try:
        with touch.out_of(None if outer is None or outer.watching else outer), rows:
            yield rows
    finally:
        _now.rows = outer
    rows.settle()
    if rows.watching and rows.used:
        code.watched.add(mode)


def _attempt(module: Module, plain: Any, args: tuple, kwargs: dict) -> Attempt | None:
    """One call of a module's forward(), which can be made again without its code; None of one that cannot be compared
    with others."""
    if report.timing or not is_possible() or modes.recomputing():  # what is recomputed has to go the way that it went
        return None
    given = [x for value in (*args, *kwargs.values()) for x in (value if type(value) is tuple else (value,))]
    form = form_of(given)
    if form is None:
        return None
    tensors = [x for x in given if isinstance(x, Tensor)]
    kind = next((x.device.type for x in tensors), "cpu")
    indices = [x for x in tensors if not x.is_floating_point() and not x.is_inference()]
    edges = [(id(x), x._version, x.data_ptr()) for x in indices]
    nested = [len(value) if type(value) is tuple else None for value in (*args, *kwargs.values())]
    key = (*modes_now(kind), module.training, *kwargs, *nested, *edges, *form, *same_twice(tensors))

    def read() -> tuple[Reads, State] | None:
        parts = [part for part in module.modules() if is_users(subclass.plain_of(part))]
        kinds = dict.fromkeys(map(subclass.plain_of, parts))
        own = dict.fromkeys(base for kind in kinds for base in kind.__mro__[: kind.__mro__.index(Module)])
        held = (value for part in parts for value in vars(part).values() if isinstance(value, types.FunctionType))
        functions = dict.fromkeys((*(kind.forward for kind in kinds), *filter(is_users, held)))
        reads = reads_of(tuple(functions), tuple(own))
        state = reads and state_of(module, plain, Module, reads, {}, frozenset(("forward",)))
        return None if reads is None or state is None else (reads, state)

    return Attempt(module, key, (plain.forward,), read, tensors)


def _members(plain: Any) -> dict[str, Any]:
    kind, original = _kind(plain), plain.forward
    bound = REPLACED.bind(original) if REPLACED.are_named(original) else original

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or plain.forward is not original:  # or was replaced since
            return plain.forward(self, *args, **kwargs)
        code = code_of(self)
        few = 0 < _indices((*args, *kwargs.values())) <= code.few and choose.may_be_few()
        start, attempt = time.perf_counter(), None
        if not few and code.watched and not code.writes and _mode() is None:
            attempt = _attempt(self, plain, args, kwargs)
            if attempt is not None and (kept := attempt.kept) is not None:
                out = kept.again(attempt.given)
                report.record(kind, start, kept.gathered, stored=kept.gathered is not None)
                return out
        reason = FEW if few else obstacle(self, code, (original,), (*args, *kwargs.values()))
        if reason is not None:
            report.fallback(kind, reason)
            return original(self, *args, **kwargs)
        recorder = None if attempt is None else attempt.recorder
        with recorder or contextlib.nullcontext(), traced(self, code, (*args, *kwargs.values())) as rows:
            out = rows.ordinary(bound(self, *args, **kwargs))
        if recorder is not None and attempt is not None and rows.used and not rows.watching:
            attempt.keep(out, rows.gathered)
        if not rows.used and rows.reason == FEW:
            code.few = max(code.few, _indices((*args, *kwargs.values())))
        code.idle = rows.watching and not rows.used and rows.reason is None
        if rows.used and not rows.watching:
            report.record(kind, start, rows.gathered, stored=rows.gathered is not None)
        else:
            report.fallback(kind, (rows.used and WATCHED) or rows.reason or NOTHING)
        return out

    return {"forward": forward}
