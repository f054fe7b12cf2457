"""Calls of torch's functions, and of ours, recorded as they are made, so that they can be made again.

Code that computes with tensors and reads no value of theirs makes the same calls for tensors of the same shapes. Who
has seen to that (`gnnaccel.pyg_backend.kept` for message() and what belongs to it) makes the calls again without the
code. A recording knows where each tensor came from: it was given, came out of a call, or is one of those that may be
kept; with any other it fails.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnaccel import touch
from gnnaccel.graph.csr import Graph
from gnnaccel.in_place import writes


class Slot(NamedTuple):
    """What was given, or came out of a call."""

    number: int


class Call(NamedTuple):
    """function(*args, **kwargs), with slots in them; results: slots of the tensors that come out; draws: random numbers
    are drawn."""

    function: Callable
    args: tuple
    kwargs: dict
    results: tuple[int, ...]
    is_tensor: bool
    draws: bool = False


class Recorded(NamedTuple):
    """calls : in order. result : what they end in, with slots. size : how many slots there are. graded : slots of
    tensors that need a gradient. given : how many slots are of what was given. graphs : (slot, graph) of each."""

    calls: tuple[Call, ...]
    result: Any
    size: int
    graded: frozenset[int]
    given: int
    graphs: tuple[tuple[int, weakref.ref[Graph]], ...]

    def is_alive(self) -> bool:
        """True if all of its graphs are there."""
        return all(graph() is not None for _, graph in self.graphs)

    def function(self) -> Callable[[Sequence[Any]], Any]:
        """The calls on other things than were given before, as one function of these."""
        names = _Names()
        lines = [f"    {_slot(n)} = {names.of(graph)}()" for n, graph in self.graphs]
        if self.given:
            lines.append(f"    {', '.join(map(_slot, range(self.given)))}, = given")
        last = {
            n: at for at, each in enumerate(self.calls) for n in (*slots_in((each.args, each.kwargs)), *each.results)
        }
        kept = set(slots_in(self.result))
        for at, each in enumerate(self.calls):
            given = [names.text(x) for x in each.args] + [f"{key}={names.text(x)}" for key, x in each.kwargs.items()]
            out = f"{names.of(each.function)}({', '.join(given)})"
            results = ", ".join(map(_slot, each.results))
            lines.append(
                f"    {results} = {out}" if each.is_tensor else f"    {results}, = {names.of(_tensors)}({out})"
            )
            over = sorted(n for n, end in last.items() if end == at and n not in kept)
            if over:
                lines.append(f"    del {', '.join(map(_slot, over))}")
        source = "\n".join(["def again(given):", *lines, f"    return {names.text(self.result)}"])
        exec(compile(source, "<recorded calls>", "exec"), names.space)
        return names.space.pop("again")  # or it would hold itself


def _slot(number: int) -> str:
    return f"s{number}"


class _Names:
    """Names of what is no slot, in the source of a function."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}

    def of(self, value: Any) -> str:
        name = f"c{len(self.space)}"
        self.space[name] = value
        return name

    def text(self, value: Any) -> str:
        kind = type(value)
        if kind is Slot:
            return _slot(value.number)
        if kind not in (tuple, list, dict):
            return self.of(value)
        if kind is dict:
            return "{" + ", ".join(f"{self.of(key)}: {self.text(x)}" for key, x in value.items()) + "}"
        inside = "".join(f"{self.text(x)}, " for x in value)
        return f"[{inside}]" if kind is list else f"({inside})"


def _tensors(out: Any) -> Sequence[Tensor]:
    """The tensors of a result."""
    if type(out) in (tuple, list) and all(isinstance(x, Tensor) for x in out):
        return out
    return [x for x in touch.pytree.tree_flatten(out)[0] if isinstance(x, Tensor)]


class _Now(threading.local):
    recorder: Recorder | None = None


_now = _Now()
_COUNTING = frozenset(("batch_norm", "instance_norm"))  # they write statistics, which torch does not count as writes
# Of these a result has as many rows as the values say, which code may read.
_SIZED = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount", "one_hot"}
_SIZED |= {"repeat_interleave", "tensor_split"}
_MAKING = frozenset(
    f"{new}{kind}{like}" for kind in ("zeros", "ones", "full") for new in ("", "new_") for like in ("", "_like")
)
_EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"))


def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), an op of ours that is one call of a recording."""
    recorder = _now.recorder
    if recorder is None or recorder.paused:
        return function(*args, **kwargs)
    recorder.paused = True
    try:
        out = function(*args, **kwargs)
    finally:
        recorder.paused = False
    recorder.note(function, args, kwargs, out)
    return out


def take(graph: Graph, edges: Iterable[Tensor]) -> None:
    """A recording may read a graph if its edges are of the recording: given, or what stays the same."""
    if _now.recorder is not None:
        _now.recorder.take(graph, edges)


def unseen(function: Callable) -> Callable:
    """A function of ours whose calls of torch are no calls of a recording."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        recorder = _now.recorder
        if recorder is None or recorder.paused:
            return function(*args, **kwargs)
        recorder.paused = True
        try:
            return function(*args, **kwargs)
        finally:
            recorder.paused = False

    return wrapper


class Recorder(TorchFunctionMode):
    """A context that records.

    given : tensors that stand for themselves in slots, as graphs do that it may `take`.
    constants : tensors that stay the same.
    deferred : a class of tensors that stand for calls (`gnnaccel.lazy`): those are made, and recorded, when it says.
    failed : why this cannot be done again, or None.
    """

    def __init__(self, given: Iterable[Any], constants: Iterable[Tensor], deferred: type, metadata: Mapping | set):
        super().__init__()
        self.given = list(given)
        self.deferred, self.metadata = deferred, metadata
        self._slots = {id(x): n for n, x in enumerate(self.given)}
        self._constants = {id(x): x for x in constants}
        self._held: list = []  # ids are of living things
        self._count = len(self.given)
        self._graphs: list[tuple[int, weakref.ref[Graph]]] = []
        self._fresh: set[int] = set()  # slots of what was made of no other's values, which may be written into
        self._writes = False  # and was
        self._calls: list[Call] = []
        self._modes, self._random = _modes(), _random()
        self._graded = {n for n, x in enumerate(self.given) if isinstance(x, Tensor) and x.requires_grad}
        self._versions = self._written()
        self.paused = False
        self.failed: str | None = None

    def __enter__(self):
        self._outer, _now.recorder = _now.recorder, self
        return super().__enter__()

    def __exit__(self, *exception):
        _now.recorder = self._outer
        return super().__exit__(*exception)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = self.paused or func in self.metadata or func in touch.ASKED or not _overridden()
        plain = plain or getattr(func, "__name__", None) in touch.SWITCHING
        if plain:
            return func(*args, **kwargs)
        if any(isinstance(x, self.deferred) for x in touch.pytree.tree_flatten((args, kwargs))[0]):
            with _Pushed(self):
                return self.deferred.__torch_function__(func, types, args, kwargs)
        if self._random != _random():
            self.failed = self.failed or "random numbers are drawn, or set, unseen"
        out = func(*args, **kwargs)
        self.note(func, args, kwargs, out)
        return out

    def _written(self) -> list[int | None]:
        """How often what stays the same, and what is given, has been written into."""
        held = [*self._constants.values(), *(x for x in self.given if isinstance(x, Tensor))]
        return [None if x.is_inference() else x._version for x in held]

    def note(self, function: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        """A call was made."""
        name = getattr(function, "__name__", str(function))
        results = [x for x in touch.pytree.tree_flatten(out)[0] if isinstance(x, Tensor)]
        if not results:
            self.failed = self.failed or f"{name}() gives no tensor"
        elif name in _EMPTY:
            return  # who writes into it may not be seen
        elif _is_sized(name, args):
            self.failed = self.failed or f"values say how large a result of {name}() is"
        elif writes(function, args, kwargs):
            self._writes = True
            if kwargs.get("out") is not None or not args or self._slots.get(id(args[0])) not in self._fresh:
                self.failed = self.failed or f"{name}() writes in place"
        elif self._modes != _modes():
            self.failed = self.failed or "torch's modes change"
        elif self._versions != self._written():
            self.failed = self.failed or f"{name}() writes into what it is given"
        random, self._random = self._random, _random()
        if self.failed is not None:
            return
        draws = random != self._random or name in _COUNTING
        filled = self._with_slots((args, kwargs))
        if filled is None:
            if draws:
                self.failed = f"{name}() draws random numbers"
            elif not self._fresh.isdisjoint(self._slots.get(id(x), -1) for x in results):
                self.failed = f"{name}() writes a tensor of unknown origin"
            return  # what is made of something unknown is unknown
        places = []
        for x in results:
            self._held.append(x)
            known = self._slots.get(id(x))
            if known is None:
                known = self._slots[id(x)] = self._count
                self._count += 1
            places.append(known)
            if name in _MAKING:
                self._fresh.add(known)
            if x.requires_grad:
                self._graded.add(known)
        self._calls.append(Call(function, filled[0], filled[1], tuple(places), isinstance(out, Tensor), draws))

    def _with_slots(self, value: Any) -> Any:
        """`value` with slots for what is known; None if something in it is not."""
        unknown = []

        def read(x: Any) -> Any:
            if isinstance(x, (tuple, list)) and type(x) in (tuple, list, torch.Size):
                return type(x)(map(read, x)) if type(x) is not torch.Size else x
            if type(x) is dict:
                return {key: read(y) for key, y in x.items()}
            place = self._slots.get(id(x))
            if place is not None:
                return Slot(place)
            if isinstance(x, Tensor):
                if id(x) not in self._constants:
                    unknown.append(x)
            elif not _is_plain(x):
                unknown.append(x)
            return x

        found = read(value)
        return None if unknown else found

    def take(self, graph: Graph, edges: Iterable[Tensor]) -> None:
        """Have a slot for a graph of edges that were given, or stay the same."""
        known = all(self._slots.get(id(x), self._count) < len(self.given) or id(x) in self._constants for x in edges)
        if known and id(graph) not in self._slots:
            self._held.append(graph)
            self._graphs.append((self._count, weakref.ref(graph)))
            self._slots[id(graph)] = self._count
            self._count += 1

    def finished(self, result: Any) -> Recorded | str:
        """The calls that `result` needs, or why it cannot be made again."""
        if self.failed is not None:
            return self.failed
        ends = self._with_slots(result)
        if ends is None:
            return "a tensor of unknown origin"
        # Of several results none is to be another one, or a view of it: somebody may write into them.
        alone = len(slots_in(ends)) == 1 and not self._writes
        calls, ends = _once(self._calls, ends) if alone else (self._calls, ends)
        needed = set(slots_in(ends))
        made, calls = calls, []
        for each in reversed(made):
            writes = self._writes and not self._fresh.isdisjoint(each.results)
            if each.draws or writes or needed.intersection(each.results):
                calls.append(each)
                needed.update(slots_in((each.args, each.kwargs)))
        used = needed.union(slots_in(ends))
        graphs = tuple((slot, graph) for slot, graph in self._graphs if slot in used)
        return Recorded(tuple(reversed(calls)), ends, self._count, frozenset(self._graded), len(self.given), graphs)


def _is_sized(name: str, args: tuple) -> bool:
    """True if values say how large the result of a function is."""
    if name in ("__getitem__", "index"):
        keys = [key for arg in args[1:] for key in (arg if isinstance(arg, (tuple, list)) else (arg,))]
        return any(isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) for key in keys)
    return name in _SIZED or (name == "where" and len(args) == 1)


def _overridden() -> bool:
    assert touch.functions_are_overridden is not None
    return touch.functions_are_overridden()


def is_possible() -> bool:
    """False where torch does not tell what a recorder must know."""
    return touch.functions_are_overridden is not None


class _Pushed:
    """A recorder in force inside of its own handling of a call."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def __enter__(self):
        TorchFunctionMode.__enter__(self._recorder)

    def __exit__(self, *exception):
        TorchFunctionMode.__exit__(self._recorder, *exception)


def _once(calls: list[Call], ends: Any) -> tuple[list[Call], Any]:
    """The calls without those that were made before, which draw no random numbers; and what is made of them."""
    slots = _Same()
    known: dict[Any, Call] = {}
    found = []
    for each in calls:
        each = each._replace(args=_filled(each.args, slots), kwargs=_filled(each.kwargs, slots))
        key = (each.function, _frozen(each.args), _frozen(each.kwargs))
        before = None if each.draws else known.get(key)
        if before is None:
            known[key] = each
            found.append(each)
        else:
            slots.update(zip(each.results, map(Slot, before.results), strict=True))
    return found, _filled(ends, slots)


def _filled(value: Any, slots: Mapping[int, Any]) -> Any:
    kind = type(value)
    if kind is Slot:
        return slots[value.number]
    if kind is tuple:
        return tuple([_filled(x, slots) for x in value])
    if kind is list:
        return [_filled(x, slots) for x in value]
    if kind is dict:
        return {key: _filled(x, slots) for key, x in value.items()}
    return value


class _Same(dict):
    """Slots by their numbers, which stand for others."""

    def __missing__(self, number: int) -> Slot:
        return Slot(number)


def _frozen(value: Any) -> Any:
    """`value` as a key: equal ones are the same."""
    if type(value) in (tuple, list):
        return (type(value), *map(_frozen, value))
    if type(value) is dict:
        return tuple((key, _frozen(x)) for key, x in value.items())
    plain = isinstance(value, (Slot, bool, int, float, str, type(None), torch.dtype, torch.device))
    return (type(value), repr(value)) if plain else ("is", id(value))


def _is_plain(x: Any) -> bool:
    """True for what holds no tensor that a recording would have to know."""
    if isinstance(x, (type(None), bool, int, float, complex, str, slice, torch.dtype, torch.device, torch.layout)):
        return True
    if isinstance(x, (torch.memory_format, type(Ellipsis), torch.Size)) or callable(x):
        return True
    return type(x).__module__.startswith("gnnaccel.program")


def slots_in(value: Any) -> list[int]:
    """Numbers of the slots in a value."""
    if type(value) is Slot:
        return [value.number]
    if isinstance(value, (tuple, list)):
        return [n for x in value for n in slots_in(x)]
    return [n for x in value.values() for n in slots_in(x)] if type(value) is dict else []


def _random() -> tuple:
    """Where torch's random numbers stand."""
    with touch.no_functions():
        return _states()


def _states() -> tuple:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state())
    return tuple(bytes(state.numpy().tobytes()) for state in states)


def _modes() -> tuple:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), touch.any_autocast()
