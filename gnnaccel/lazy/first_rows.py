"""Results of which the first rows are computed once somebody takes these, and no more rows of what they are made of.

A `FirstRows` is a tensor that knows the steps that lead to it: layers whose first rows need the first so many rows of
their input (`Step.rows_read`), and functions of each row alone, as activations and linear maps are. ``out[:k]`` has the
rows that all steps need found, last step first, and computes these. Anything else that is done to it has all steps so
far done for all rows at once, and goes on with ordinary tensors: norms over all rows, printing, writes.

Random numbers are drawn when the function is called, and for all rows, so that they and those that follow are the same.
A `Trip` is the time in which there are such tensors: `end` makes ordinary tensors of all that somebody has kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel import touch
from gnnaccel.lazy.deferred import IN_A_LIST, Deferred, references


class Step:
    """What makes a tensor [num_rows, width] of others: `compute` its first rows of theirs.

    Attributes
    ----------
    inputs : tuple of Step
    shape, dtype, device
        Of the result of all rows.
    requires_grad : bool
    grad : bool
        Whether gradients were recorded when it was called, and so are when it is computed.
    value : Tensor or None
        As many rows as were asked for.
    handed : bool
        Somebody has `value`, and may write into it or a view of it: nothing is to be computed from it later.
    """

    def __init__(self, inputs: tuple[Step, ...], shape: Sequence[int], like: Any, requires_grad: bool):
        self.inputs, self.shape, self.dtype, self.device = inputs, tuple(shape), like.dtype, like.device
        self.grad = torch.is_grad_enabled()
        self.requires_grad = requires_grad and self.grad
        self.value: Tensor | None = None
        self.handed = False

    def rows_read(self, rows: int) -> Sequence[int]:
        """How many of the first rows of each input the first `rows` of the result need."""
        return [rows] * len(self.inputs)

    def compute(self, rows: int, *values: Tensor) -> Tensor:
        """At least the first `rows` of the result, of the rows of the inputs that these need."""
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of what `value` was computed from."""
        self.inputs = ()


class Given:
    """Ordinary tensors that a step was given, and will read."""

    def __init__(self, values: Iterable[Any]):
        self._tensors = [(t, t._version) for t in values if isinstance(t, Tensor) and not t.is_inference()]

    def check(self) -> None:
        """Raise RuntimeError where one of them was written into since."""
        for tensor, version in self._tensors:
            if tensor._version != version:
                raise RuntimeError(
                    f"gnnaccel: a tensor of shape {tuple(tensor.shape)} was written into between a layer on a sampled "
                    "batch and the use of its result, in a way that gnnaccel does not recognise beforehand; call "
                    "gnnaccel.uninstall(), and please report it"
                )


class _RowByRow(Step):
    """A function of each row alone; in `args` a _Place stands for what has a row each."""

    def __init__(self, function: Callable, args: Any, kwargs: Any, inputs: tuple[Step, ...], width: int, grad: bool):
        super().__init__(inputs, (inputs[0].shape[0], width), inputs[0], grad)
        self.function, self.args, self.kwargs = function, args, kwargs
        self.given = Given(a.tensor if isinstance(a, _Place) else a for a in args)

    def compute(self, rows, *values):
        self.given.check()
        return self.function(*[a.of(values, rows) if type(a) is _Place else a for a in self.args], **self.kwargs)

    def forget(self):
        super().forget()
        self.args = self.given = None


class _Place:
    """Of an argument: input number `number`, or the first rows of `tensor`."""

    def __init__(self, number: int, tensor: Tensor | None = None):
        self.number, self.tensor = number, tensor

    def of(self, values: Sequence[Tensor], rows: int) -> Tensor:
        return _first(values[self.number] if self.tensor is None else self.tensor, rows)


def _first(value: Tensor, rows: int) -> Tensor:
    return value if value.shape[0] == rows else value[:rows]


class Trip:
    """The steps that were called since it began, in order, and their results."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.made: list[FirstRows] = []
        self.settled: str | None = None  # by what

    def take(self, step: Step) -> FirstRows:
        """The result of a step whose inputs are steps of this trip."""
        self.steps.append(step)
        out = FirstRows(self, step)
        self.made.append(out)
        return out

    def rows(self, step: Step, rows: int) -> Tensor:
        """The first rows of the result of a step."""
        if step.value is None or step.value.shape[0] < rows:
            self._compute({step: rows})
        assert step.value is not None
        return _first(step.value, rows)

    def settle(self, reason: str) -> None:
        """Compute all rows of all there is."""
        self.settled = self.settled or reason
        self._compute({step: step.shape[0] for step in self.steps})

    def _compute(self, asked: dict[Step, int], kept: dict[Step, FirstRows] | None = None) -> None:
        """kept : those that become ordinary as soon as they are computed, before others are computed from them."""
        todo = []
        for step in reversed(self.steps):
            rows = asked.get(step, 0)
            if rows and (step.value is None or step.value.shape[0] < rows):
                todo.append((step, rows))
                for source, needed in zip(step.inputs, step.rows_read(rows), strict=True):
                    asked[source] = max(asked.get(source, 0), needed)
        for step, rows in reversed(todo):
            read = zip(step.inputs, step.rows_read(rows), strict=True)
            step.value = _computed(step, rows, [_first(source.value, count) for source, count in read])  # type: ignore
            if kept and step in kept:
                kept.pop(step).become_ordinary()

    def end(self, holder: list) -> None:
        """No more steps. What somebody has kept beyond `holder`, a list of one result, becomes an ordinary tensor, and
        so does the result then; else it stays one of these until its first rows are taken."""
        result = holder[0]
        mine = isinstance(result, FirstRows)
        del result
        counts = references(self.made)
        kept = {
            out.step: out
            for out, count in zip(self.made, counts, strict=True)
            if count > IN_A_LIST + (mine and out is holder[0])
        }
        if kept:
            self.settled = self.settled or "somebody keeps the results of a layer"
            if mine:
                kept.setdefault(holder[0].step, holder[0])
            self._compute({step: step.shape[0] for step in self.steps}, kept)
            for step in self.steps:
                step.forget()
            for out in kept.values():  # of what was computed before
                out.become_ordinary()
        self.made.clear()


def _computed(step: Step, rows: int, values: Sequence[Tensor]) -> Tensor:
    """In the modes that the step was called in: those of who wants its result may be others."""
    kind = step.device.type
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(kind):
        with torch.inference_mode(False), torch.autocast(kind, enabled=False), torch.set_grad_enabled(step.grad):
            return step.compute(rows, *values)
    if torch.is_grad_enabled() == step.grad:
        return step.compute(rows, *values)
    with torch.set_grad_enabled(step.grad):
        return step.compute(rows, *values)


class _State(threading.local):
    trip: Trip | None = None  # under way


state = _State()


# torch function -> rule(function, *args, **kwargs): the result, or None where all rows are needed
RULES: dict[Any, Callable] = {}


class FirstRows(Deferred):
    """A tensor [num_rows, width] that exists as steps; see the head of this file."""

    RULES = RULES
    trip: Trip
    step: Step

    @staticmethod
    def __new__(cls, trip: Trip, step: Step):
        self = touch.make_wrapper(
            cls, step.shape, dtype=step.dtype, device=step.device, requires_grad=step.requires_grad
        )
        self.trip, self.step = trip, step
        if step.requires_grad:
            # Reached only where autograd took this object for an input of its own, so that its gradient would be lost.
            with touch.plain_functions():
                self.register_hook(cls.lost)
        return self

    def ordinary(self, reason: str) -> Tensor:
        """All rows, always in the same tensor; all steps so far are done then, before anything is written."""
        self.trip.settle(reason)
        self.step.handed = True
        return self.step.value  # type: ignore[return-value]

    def given(self, reason):
        """From here on it is an ordinary tensor itself if the call is over: an error before the slice has left it."""
        if self.trip is state.trip or not self.is_pythons_alone():
            return self.ordinary(reason)
        self.ordinary(reason)
        self.become_ordinary()
        return self

    def loses_gradient(self):
        return self.step.requires_grad

    @staticmethod
    def lost(_grad=None):
        raise RuntimeError(
            "gnnaccel: the result of a layer on a sampled batch went into code that torch cannot see through, and its "
            "gradient would be lost; call gnnaccel.uninstall(), and please report it"
        )

    def become_ordinary(self) -> None:
        """Be the tensor of all rows, which have been computed."""
        step = self.step
        del self.trip, self.step
        self.become(vars(step), step.grad)


FirstRows.__name__ = FirstRows.__qualname__ = "Tensor"  # errors name the operands' types


# What is an error where it is given is to be one there, and not where the result is used.
_PLAIN = (int, float, tuple, type(None))
_MODES = ("floor", "trunc", "tanh", "none")


def _taken(
    function: Callable,
    args: Sequence,
    kwargs: dict | None = None,
    width: int | None = None,
    own: bool = False,
    dropped: float | None = None,
) -> FirstRows | None:
    """The result of a function of each row alone; None where its arguments are not as expected.

    args : tensors among them broadcast with the first result in them, or have one row for each of its rows.
    width : of the result; None where all broadcast to it.
    own : ordinary tensors are the function's own, as weights are, and have no rows.
    dropped : the function's last argument is what a dropout of this probability multiplies by. It is drawn here, once
        nothing declines any more: who is declined draws again.
    """
    trip, first = state.trip, next((a for a in args if isinstance(a, FirstRows)), None)
    if trip is None or first is None or first.trip is not trip or not first.step.dtype.is_floating_point:
        return None
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(first.step.device.type):
        return None
    kwargs = kwargs or {}
    if not all(isinstance(v, _PLAIN) or (type(v) is str and v in _MODES) for v in kwargs.values()):
        return None
    num_rows = first.step.shape[0]
    inputs: list[Step] = []
    given: list = []
    widths: list[int] = []
    like, grad = first.step, False
    for value in args:
        if not isinstance(value, Tensor):
            if not isinstance(value, _PLAIN):
                return None
            given.append(value)
            continue
        if type(value) is FirstRows:  # whose own attributes take longer
            step = value.step
            if value.trip is not trip or step.handed or step.shape[0] != num_rows or step.dtype != like.dtype:
                return None
            given.append(_Place(len(inputs)))
            inputs.append(step)
            widths.append(step.shape[1])
            grad = grad or step.requires_grad
            continue
        if type(value) not in (Tensor, torch.nn.Parameter) or (value.dim() > 2 and not own):
            return None
        if value.dtype != like.dtype or value.device != like.device or value.layout is not torch.strided:
            return None
        rows = not own and value.dim() == 2 and value.shape[0] == num_rows
        if not (rows or own or value.dim() < 2 or value.shape[0] == 1):
            return None
        given.append(_Place(0, value) if rows else value)
        grad = grad or value.requires_grad
        if not own:
            widths.append(value.shape[-1] if value.dim() else 1)
    if width is None:
        width = max(widths)
        if any(of not in (1, width) for of in widths):
            return None
    if dropped is not None:
        ones = torch.ones((num_rows, width), dtype=like.dtype, device=like.device)
        given.append(_Place(0, F.dropout(ones, dropped)))
    return trip.take(_RowByRow(function, tuple(given), kwargs, tuple(inputs), width, grad))


def _elementwise(function, *args, **kwargs):
    return None if "out" in kwargs else _taken(function, args, kwargs)


def _in_place(function: Callable, x: FirstRows, dropped: float | None = None) -> FirstRows | None:
    """The tensor itself, which is another from here on; steps that have it as their input keep what it was."""
    if x.step.requires_grad and not torch.is_grad_enabled():  # the gradient passes by what is not recorded
        return None
    out = _taken(function, (x,), dropped=dropped)
    if out is None:
        return None
    x.step = out.step
    return x


def _relu_(function, x):
    return _in_place(torch.relu, x) if isinstance(x, FirstRows) else None


def _relu(function, x, inplace=False):
    return _in_place(torch.relu, x) if inplace else _taken(torch.relu, (x,))


def _activation(function, x, *args, **kwargs):
    return None if kwargs.pop("inplace", False) else _taken(function, (x, *args), kwargs)


def _dropout(function, x, p=0.5, training=True, inplace=False):
    if not isinstance(x, FirstRows) or state.trip is not x.trip or not 0 <= p <= 1:
        return None
    if not training or not p:
        return x
    return _in_place(torch.mul, x, p) if inplace else _taken(torch.mul, (x,), dropped=p)


def _layer_norm(function, x, normalized_shape, weight=None, bias=None, eps=1e-5):
    if not isinstance(x, FirstRows) or tuple(normalized_shape) != x.step.shape[1:]:
        return None
    if any(isinstance(t, FirstRows) for t in (weight, bias)):
        return None
    return _taken(function, (x, tuple(normalized_shape), weight, bias, eps), width=x.step.shape[1], own=True)


def _linear(function, x, weight, bias=None):
    if not isinstance(x, FirstRows) or any(isinstance(t, FirstRows) for t in (weight, bias)):
        return None
    if weight.dim() != 2 or weight.shape[1] != x.step.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return _taken(function, (x, weight, bias), width=weight.shape[0], own=True)


def _batch_norm(function, x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    if training or not isinstance(x, FirstRows) or any(isinstance(t, FirstRows) for t in (mean, var, weight, bias)):
        return None
    if mean is None or var is None:
        return None
    return _taken(function, (x, mean, var, weight, bias, False, momentum, eps), width=x.step.shape[1], own=True)


def _softmax(function, x, dim=None, dtype=None, _stacklevel=3):
    return _taken(function, (x, dim)) if dtype is None and isinstance(x, FirstRows) and dim in (1, -1) else None


def _normalize(function, x, p=2.0, dim=1, eps=1e-12, out=None):
    usual = out is None and isinstance(x, FirstRows) and dim in (1, -1)
    return _taken(function, (x, p, dim, eps)) if usual else None


def _cat(function, tensors, dim=0):
    usual = dim in (1, -1) and isinstance(tensors, (tuple, list))
    if not usual or any(not isinstance(t, Tensor) or t.dim() != 2 for t in tensors):
        return None
    if len({t.shape[0] for t in tensors}) > 1 or tensors[0].shape[0] == 1:
        return None
    return _taken(_side_by_side, tuple(tensors), width=sum(t.shape[1] for t in tensors))


def _side_by_side(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, 1)


def _getitem(function, x, index):
    """The first rows, once all steps are known."""
    ended = isinstance(x, FirstRows) and x.trip is not state.trip
    if not ended or type(index) is not slice or index.start not in (None, 0) or index.step not in (None, 1):
        return None
    rows = len(range(*index.indices(x.step.shape[0])))
    return _first(x.trip.rows(x.step, max(rows, 1)), rows)


def _fill() -> None:
    def put(rule: Callable, names: str, *holders: Any) -> None:
        for holder in holders:
            for name in names.split():
                if hasattr(holder, name):
                    RULES[getattr(holder, name)] = rule

    put(_elementwise, "sigmoid tanh", torch, Tensor, F)
    put(_elementwise, "relu", torch, Tensor)
    put(_activation, "leaky_relu elu selu celu gelu silu mish hardswish", F)
    put(_elementwise, "softplus prelu logsigmoid", F)
    put(_elementwise, "add sub mul div", torch, Tensor)
    put(_elementwise, "__add__ __radd__ __sub__ __mul__ __rmul__ __truediv__", Tensor)
    put(_relu, "relu", F)
    put(_relu_, "relu_", torch, Tensor)
    put(_dropout, "dropout", F)
    put(_layer_norm, "layer_norm", F)
    put(_linear, "linear", F)
    put(_batch_norm, "batch_norm", F)
    put(_softmax, "softmax log_softmax", F, torch, Tensor)
    put(_normalize, "normalize", F)
    put(_cat, "cat", torch)
    put(_getitem, "__getitem__", Tensor)


_fill()
