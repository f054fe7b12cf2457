"""Calls of users' code that are made again without running that code.

Code makes the same calls of torch and gnnaccel for edges, shapes, switches and attributes that are the same, if all it
reads are arguments, attributes and globals that can be compared. So the second call of a kind is recorded
(gnnaccel.recording), and from the third on its calls are made again. A branch is no obstacle, as what it may depend on
is compared; a value that is read of a tensor is one, and so is an attribute that is set.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import bytecode, touch
from gnnaccel.bound import is_users
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.deferred import METADATA
from gnnaccel.lazy.tensor import Lazy
from gnnaccel.lower import bounds
from gnnaccel.modules import is_watched
from gnnaccel.ops.messages.reduce import joined
from gnnaccel.recording import Recorded, Recorder

SCALARS = (type(None), bool, int, float, str, torch.dtype, torch.device)
TENSORS = (Tensor, torch.nn.Parameter)
_SETS = frozenset(f"set {what}" for what in ("attribute", "global", "free", "name")) | {"delete global", "import"}
_PACKAGES = ("torch", "math", "torch_geometric", "builtins", "typing")
_FORBIDDEN = (print, input, open, setattr, delattr, getattr, hasattr, vars, dir, globals, locals, id, hash, next)
# Attributes whose use a recording would miss: what is in a module, and torch's random numbers.
_UNSEEN = {"modules", "children", "parameters", "buffers", "state_dict", "named_modules", "named_children"}
_UNSEEN |= {"named_parameters", "named_buffers", "manual_seed", "seed", "fork_rng", "set_rng_state", "get_rng_state"}
_UNSEEN |= {"get_submodule", "get_parameter", "get_buffer", "get_extra_state", "__dict__", "_version"}
_UNSEEN |= {"_modules", "_parameters", "_buffers", "__class__"}
_SEEN, _NEVER = "seen once", "not to be made again"
_OF_ALL = frozenset(vars(torch.nn.Module())) - {"training"}  # what every module has: `_part` and `is_watched` see it


class Reads(NamedTuple):
    """What functions read, and functions of the user's that they call: attributes of anything, by name; globals, by
    namespace and name, or None and a cell of what they close over; and these functions."""

    attributes: frozenset[str]
    free: tuple[tuple[dict | None, Any], ...]
    functions: tuple[types.FunctionType, ...]


class State(NamedTuple):
    """What was read of a module.

    guards : (part of it, name, value) of attributes of its parts that are of the user's classes; None: its own.
    names : how many attributes it has. free : values of globals. parts : its submodules, as `_part` has them.
    needs : tensors that stay the same, and their `_form`.
    """

    guards: tuple[tuple[torch.nn.Module | None, str, Any], ...]
    names: tuple[int, ...]
    free: tuple[Any, ...]
    parts: tuple[tuple, ...]
    needs: tuple[tuple[Tensor, tuple], ...]

    def holds(self, owner: torch.nn.Module, reads: Reads) -> bool:
        """True if all of it is what it was."""
        if self.names != _names(owner):
            return False
        for of, name, value in self.guards:
            if not _same(_attribute(owner if of is None else of, name), value):
                return False
        for value, before in zip(_values(reads.free), self.free, strict=True):
            if not _same(value, before):
                return False
        for tensor, form in self.needs:
            if _form(tensor) != form:
                return False
        return all(part == _part(part[0]) and not is_watched(part[0]) for part in self.parts)


@dataclass
class Kept:
    """A recorded call.

    methods : the code then. gathered : why messages were stored, or None. used : it was made again.
    """

    recorded: Recorded
    again: Callable[[Sequence[Any]], Any]
    methods: tuple
    reads: Reads
    state: State
    gathered: str | None
    used: bool = False

    def holds(self, owner: torch.nn.Module, methods: tuple) -> bool:
        """True if the call would be the same again."""
        return self.methods == methods and self.state.holds(owner, self.reads)


# Of a module, by their kinds.
_calls: weakref.WeakKeyDictionary[torch.nn.Module, dict] = weakref.WeakKeyDictionary()


def has_calls(owner: torch.nn.Module) -> bool:
    """True if a call of a module was one that may be made again."""
    return owner in _calls


class Attempt:
    """One call of some code of a module: `kept` if it can be made again; with a `recorder` if it is to be recorded.

    key : calls that differ by it are not the same. methods : the code, as it is compared.
    read : what gives its reads and the state of the module, or None where something cannot be compared.
    given : tensors that the calls are made of. graph : that of the call, if `key` tells which. apart : tensors beside
        that are no constants.
    """

    def __init__(
        self,
        owner: torch.nn.Module,
        key: tuple,
        methods: tuple,
        read: Callable[[], tuple[Reads, State] | None],
        given: list[Tensor],
        graph: Graph | None = None,
        apart: Iterable[Any] = (),
    ):
        self.kept: Kept | None = None
        self.recorder: Recorder | None = None
        self.given, self._key = given, key
        self._found = _calls.setdefault(owner, {})
        known = self._found.get(key)
        if isinstance(known, Kept):
            if known.recorded.is_alive() and known.holds(owner, methods):
                self.kept, known.used = known, True
            elif known.used:
                self._record(methods, read, graph, apart)
            else:  # something is another at each call
                self._found[key] = _NEVER
        elif known is _SEEN:
            self._record(methods, read, graph, apart)
        elif known is None:
            for of, call in [*self._found.items()]:
                if isinstance(call, Kept) and not call.recorded.is_alive():  # what it holds is no use to anybody
                    del self._found[of]
            if len(self._found) >= bounds.KEPT_CALLS:
                self._found.clear()
            self._found[key] = _SEEN

    def _record(self, methods: tuple, read: Callable, graph: Graph | None, apart: Iterable[Any]) -> None:
        self._found[self._key] = _NEVER  # unless `keep` is reached
        found = read()
        if found is None:
            return
        self._of = methods, found
        constants = [tensor for tensor, _ in found[1].needs]
        ids = {id(x) for x in (*constants, *apart)}
        if any(id(x) in ids for x in self.given):  # which of the two is meant cannot be told
            return
        self.recorder = Recorder(self.given, constants, Lazy, METADATA)
        if graph is not None:
            self.recorder.take(graph, ())

    def keep(self, out: Any, gathered: str | None) -> None:
        """The recorded call came to `out`."""
        assert self.recorder is not None
        recorded = self.recorder.finished(out)
        if isinstance(recorded, Recorded):
            recorded = joined(recorded)
            methods, (reads, state) = self._of
            self._found[self._key] = Kept(recorded, recorded.function(), methods, reads, state, gathered)


def modes_now(device_type: str) -> tuple:
    """Switches of torch that calls are compared by."""
    autocast = touch.any_autocast()
    found: tuple[Any, ...] = (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
    )
    if autocast:
        found += (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
    return found


def form_of(given: Iterable[Any]) -> list | None:
    """What arguments are compared by; None where one cannot be."""
    found: list[Any] = []
    for x in given:
        if type(x) in TENSORS:
            if x.layout is not torch.strided:
                return None
            found += (type(x), x.shape, x.dtype, x.device, x.requires_grad, x.is_leaf, x.stride(), x.is_inference())
        elif type(x) in SCALARS:
            found += (type(x), repr(x) if type(x) is float else x)
        else:
            return None
    return found


def same_twice(tensors: list[Tensor]) -> list[int]:
    """Which tensors are one, if any: what is done to one twice is recorded once."""
    ids = list(map(id, tensors))
    return [] if len(set(ids)) == len(ids) else list(map(ids.index, ids))


def _names(owner: torch.nn.Module) -> tuple[int, ...]:
    """How many things of each kind a module holds: one more may be what code did not find."""
    return (
        len(vars(owner)),
        len(touch.own_parameters(owner)),
        len(touch.own_buffers(owner)),
        len(touch.submodules(owner)),
    )


def _attribute(owner: torch.nn.Module, name: str) -> Any:
    value = getattr(owner, name, _SEEN)
    return value.__func__ if isinstance(value, types.MethodType) and value.__self__ is owner else value


def _same(value: Any, before: Any) -> bool:
    if type(before) is float:  # 0.0 is not -0.0
        return type(value) is float and repr(value) == repr(before)
    if type(before) in SCALARS:
        return type(value) is type(before) and value == before
    if type(before) is tuple:
        return type(value) is tuple and len(value) == len(before) and all(map(_same, value, before))
    return value is before


def _part(module: torch.nn.Module) -> tuple | None:
    """A module, its class and options, and who its parameters, buffers and parts are; None of one that cannot be
    compared."""
    options: list[Any] = [type(module), type(module).forward]
    for name, value in vars(module).items():
        if name in _OF_ALL:
            continue
        found = _option(value)
        if found is not _NEVER:
            options.append(found)
        elif not name.startswith("_") or is_users(type(module)):
            return None
    held = (touch.own_parameters(module), touch.own_buffers(module), touch.submodules(module))
    return module, options, [(name, id(x)) for each in held for name, x in each.items()]


def _option(value: Any) -> Any:
    """An option of a module as it is compared; _NEVER of what is not."""
    kind = type(value)
    if kind in SCALARS:
        return repr(value) if kind is float else value
    if kind in (tuple, list):
        found = tuple(map(_option, value))
        return _NEVER if _NEVER in found else found
    if kind is dict:
        return _option([*value.items()])
    return value if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) else _NEVER


def _form(x: Tensor) -> tuple:
    """What a recording takes for granted of a tensor that stays the same: of indices their values too, as edges may be
    made of them."""
    values = None if x.is_floating_point() or x.is_inference() else (x._version, x.data_ptr())
    hooked = bool(x._backward_hooks)  # which may hold the module for as long as this is held
    return x.requires_grad, x.is_leaf, x.shape, x.dtype, x.device, x.stride(), values, hooked


def reads_of(functions: tuple, own: tuple[type, ...] = ()) -> Reads | None:
    """What functions read, with the methods of classes `own` that they name; None if they set something, or are none
    that can be read."""
    attributes: set[str] = set()
    free: list[tuple[dict | None, Any]] = []
    waiting: list[Any] = [*functions]
    if bytecode.unread() is not None:
        return None
    for function in waiting:
        if not isinstance(function, types.FunctionType):
            return None
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(value) not in SCALARS for value in defaults) or vars(function).keys() - {"__wrapped__"}:
            return None
        read: list[tuple[dict | None, Any]] = [(None, cell) for cell in function.__closure__ or ()]
        named: set[str] = set()
        for code in bytecode.parts_of(function.__code__):
            steps = bytecode.steps_of(code)
            if any(step.kind in _SETS for step in steps):
                return None
            named.update(str(step.value) for step in steps if step.kind == "attribute")
            read += [(function.__globals__, step.value) for step in steps if step.kind == "global"]
        found = [vars(kind).get(name) for name in sorted(named - attributes) for kind in own]
        for where in read:  # what is read of a module of the user's is one more to read
            (value,) = _values([where])
            if isinstance(value, types.ModuleType) and not _is_harmless(value):
                read += [(vars(value), name) for name in sorted(named) if name in vars(value)]
            found.append(value if _is_harmless(value) else _run(value))
        attributes |= named
        free += read
        waiting += [x for x in found if isinstance(x, types.FunctionType) and not _is_harmless(x) and x not in waiting]
    return Reads(frozenset(attributes), tuple(free), tuple(waiting))


def _run(value: Any) -> Any:
    """What runs where code calls `value`: of a scripted function the Python that it was made of."""
    return touch.scripted(value) or value


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


def state_of(
    owner: torch.nn.Module, plain: Any, base: type, reads: Reads, around: dict[str, Any], code: frozenset[str]
) -> State | None:
    """What is read of a module of class `plain`; None if something in it cannot be compared.

    base : names that all of its modules have are those of tensors. around : what is read beside. code : names of
    methods that `reads` is of.
    """
    found_of = _guards(owner, plain, base, reads, code)
    if found_of is None:
        return None
    guards: list[tuple[torch.nn.Module | None, str, Any]] = [(None, *each) for each in (*around.items(), *found_of)]
    free = _values(reads.free)
    known = (*plain.__mro__, *reads.functions)
    for x in free:
        followed = isinstance(x, types.ModuleType) or any(_run(x) is y for y in known)
        if not followed and type(x) not in TENSORS and not _is_harmless(x):
            return None
    values = [x for _, _, value in guards for x in (value if type(value) is tuple else (value,))] + free
    constants = [x for x in values if isinstance(x, Tensor)]
    parts: dict[torch.nn.Module, tuple] = {}
    for module in (value for value in values if isinstance(value, torch.nn.Module)):
        for part in module.modules():
            if part in parts:
                continue
            kind = type(part)
            if not kind.__module__.startswith(("torch.nn.modules.", "torch_geometric.nn.")):
                within = _guards(part, kind, torch.nn.Module, reads, frozenset(("forward",)))
                if within is None or not any(kind.forward is x for x in reads.functions) or _is_called_otherwise(kind):
                    return None
                guards += [(part, *each) for each in within]
            found = _part(part)
            if found is None or is_watched(part) or "forward" in vars(part):
                return None
            parts[part] = found
            constants += [*part.parameters(False), *part.buffers(False)]
    forms = [(t, _form(t)) for t in constants]
    if any(t._backward_hooks for t in constants):  # which may hold the module for as long as they are held
        return None
    return State(tuple(guards), _names(owner), tuple(free), tuple(parts.values()), tuple(forms))


def _guards(
    module: torch.nn.Module, plain: Any, base: type, reads: Reads, code: frozenset[str]
) -> list[tuple[str, Any]] | None:
    """What code finds of a module by the names that it reads; None if something cannot be compared."""
    found = []
    own = plain.__mro__[: plain.__mro__.index(base)]
    for name in reads.attributes:
        if name in _UNSEEN:
            return None
        if hasattr(base, name) and name not in vars(module) and not any(name in vars(cls) for cls in own):
            continue
        if _is_computed(plain, name):
            return None
        value = _attribute(module, name)
        if value is _SEEN or name in code:
            continue
        called = callable(value) and (_is_harmless(value) or any(value is x for x in reads.functions))
        if not called and not _is_comparable(value):
            return None
        found.append((name, value))
    return found


def _is_called_otherwise(kind: type) -> bool:
    """True for a class of modules with code around forward()."""
    return kind.__call__ is not torch.nn.Module.__call__


def _is_computed(plain: Any, name: str) -> bool:
    """True for an attribute that code of the user's makes at each look."""
    found = inspect.getattr_static(plain, name, None)
    return not isinstance(found, types.FunctionType) and hasattr(type(found), "__get__")


def _is_comparable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_comparable, value))
    return type(value) in SCALARS or type(value) in TENSORS or isinstance(value, torch.nn.Module)


def _is_harmless(value: Any) -> bool:
    """True of a global whose use leaves nothing out of a recording: torch, PyG, mathematics, and what is compared."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _PACKAGES
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        where = value.__module__
        if where is None:  # a method of something that is no module, as torch's functions and those of `random` are
            holder = getattr(value, "__self__", None)
            where = "torch" if holder is None else (holder if isinstance(holder, type) else type(holder)).__module__
        return where.partition(".")[0] in _PACKAGES and value not in _FORBIDDEN
    return _is_comparable(value) and not isinstance(value, torch.nn.Module)
