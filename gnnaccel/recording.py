"""Calls of torch's functions, and of ours, recorded as they are made, so that they can be made again.

Code that computes with tensors and reads no value of theirs makes the same calls for tensors of the same shapes. Who
has seen to that (`gnnaccel.pyg_backend.kept` for message() and what belongs to it) makes the calls again without the
code. A recording knows where each tensor came from: it was given, came out of a call, or is one of those that may be
kept; with any other it fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gnnaccel import touch


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
    """calls : in order. result : what they end in, with slots. graded : slots of tensors that need a gradient."""

    calls: tuple[Call, ...]
    result: Any
    size: int
    graded: frozenset[int]

    def again(self, given: Iterable[Any]) -> Any:
        """The result of the calls on other things than were given before."""
        slots = list(given)
        slots += [None] * (self.size - len(slots))
        for function, args, kwargs, results, is_tensor, _ in self.calls:
            out = function(*_filled(args, slots), **(_filled(kwargs, slots) if kwargs else kwargs))
            if is_tensor:
                slots[results[0]] = out
            else:
                found = touch.pytree.tree_flatten(out)[0]
                for place, value in zip(results, (x for x in found if isinstance(x, Tensor)), strict=True):
                    slots[place] = value
        return _filled(self.result, slots)


def _filled(value: Any, slots: list) -> Any:
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


class _Now(threading.local):
    recorder: Recorder | None = None


_now = _Now()
_COUNTING = frozenset(("batch_norm", "instance_norm"))  # they write statistics, which torch does not count as writes
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


class Recorder(TorchFunctionMode):
    """A context that records.

    given : what stands for itself in slots: tensors, and what ops take beside them.
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
        elif (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__", "__imul__"):
            self.failed = self.failed or f"{name}() writes in place"
        elif kwargs.get("out") is not None:
            self.failed = self.failed or f"{name}() writes into a tensor"
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
            return  # what is made of something unknown is unknown
        places = []
        for x in results:
            self._held.append(x)
            known = self._slots.get(id(x))
            if known is None:
                known = self._slots[id(x)] = self._count
                self._count += 1
            places.append(known)
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

    def finished(self, result: Any) -> Recorded | str:
        """The calls that `result` needs, or why it cannot be made again."""
        if self.failed is not None:
            return self.failed
        ends = self._with_slots(result)
        if ends is None:
            return "a tensor of unknown origin"
        # Of several results none is to be another one, or a view of it: somebody may write into them.
        calls, ends = _once(self._calls, ends) if len(slots_in(ends)) == 1 else (self._calls, ends)
        needed = set(slots_in(ends))
        made, calls = calls, []
        for each in reversed(made):
            if each.draws or needed.intersection(each.results):
                calls.append(each)
                needed.update(slots_in((each.args, each.kwargs)))
        return Recorded(tuple(reversed(calls)), ends, self._count, frozenset(self._graded))


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
        each = each._replace(args=_filled(each.args, slots), kwargs=_filled(each.kwargs, slots))  # type: ignore
        key = (each.function, _frozen(each.args), _frozen(each.kwargs))
        before = None if each.draws else known.get(key)
        if before is None:
            known[key] = each
            found.append(each)
        else:
            slots.update(zip(each.results, map(Slot, before.results), strict=True))
    return found, _filled(ends, slots)  # type: ignore[arg-type]


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
