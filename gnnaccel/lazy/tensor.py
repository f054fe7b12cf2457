"""Lifted node features that are not gathered until somebody must have them.

PyG hands message() one row per edge of every feature it names (``x_j``, ``x_i``). We hand it a `Lazy`: a tensor that
knows the node feature and the side of the edge it comes from. What message() does to it row by row happens on the
nodes (each once, not once per edge), products and sums of both ends and of edge tensors are kept as expressions, and
when an aggregation asks for them they become one SpMM, one SDDMM, or a loop over blocks of edges. An operation that
is not known here gets the gathered rows and goes on with ordinary tensors. message() itself runs once, as
it is written, whatever it does.

The rows are those that PyG would have made when the feature was lifted: whoever asks for them, and in whichever mode,
gets the values and the gradient of that moment. So what is kept beyond the call is gathered at its end, and a feature
that was written into in between is an error.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.blocks import narrowed, rows_of
from gnnaccel.lazy.deferred import Deferred
from gnnaccel.lazy.expression import (
    Apply,
    Expression,
    Leaf,
    detached,
    gathered,
    own,
    reads_nodes,
    tensors_of,
    widest_rows,
    written,
)
from gnnaccel.lower import bounds
from gnnaccel.ops import messages

# torch function -> rule(function, *args, **kwargs), filled by rules.py and linear_rules.py
RULES: dict[Any, Callable] = {}
LATE: set = set()  # those that leave waiting what is narrow; all others get it as rows
ELEMENTWISE: set = set()  # those among them that work number by number, on what broadcasts


@dataclass
class Trip:
    """The lifted features of one propagate() call share this.

    graph : rows are destinations.
    waits : narrow values may wait for the walk that reads them; else they are stored at once, as they must be if
        somebody keeps them.
    gathered : why one row per edge was stored after all, or None.
    made : the features, as long as they live.
    """

    graph: Graph
    waits: bool = False
    gathered: str | None = None
    made: list[weakref.ref[Lazy]] = field(default_factory=list)

    def holds(self, expression: Expression) -> bool:
        """True if a narrow value waits."""
        least = bounds.WAITS_WITH_ROWS[self.graph.device.type]
        return self.waits and (least == 0 or widest_rows(self.graph, expression) >= least)

    def rows(self, lazy: Lazy, reason: str | None, always: bool) -> Tensor:
        """The rows of a feature that was lifted here. `reason` is noted if they are wide (or `always`)."""
        expression, made = lazy.expression, gathered
        if reads_nodes(expression):
            if self.gathered is None and (always or math.prod(expression.features) > bounds.STORED_FEATURES):
                self.gathered = reason
            if self.holds(expression):
                made, expression = rows_of, narrowed(self.graph, expression)
        found = made(self.graph, expression)
        return found.movedim(0, lazy.axis) if lazy.axis else found

    def settle(self) -> None:
        """Make ordinary tensors of features that somebody keeps beyond the call, in which their nodes may change."""
        made, self.made = [ref() for ref in self.made], []  # what is referred to weakly cannot become another
        while made:
            lazy = made.pop()
            if lazy is not None:
                lazy.rows("message() or update() keeps a lifted feature")
                lazy.become_ordinary()


def waits(graph: Graph) -> bool:
    """True if narrow values of edges may wait for the walk that reads them."""
    return messages.is_fused(graph)


class Lazy(Deferred):
    """A tensor [E, ...] that exists as an expression; see the head of this file."""

    RULES = RULES
    DECLINED = NotImplemented
    # Arguments that the rule does not know, or that torch words an error for.
    UNSUITED = (TypeError, RuntimeError, IndexError, ValueError)

    trip: Trip
    expression: Expression
    axis: int  # of the edges: 0 but for features [K, N, F] of stacks and time steps, whose expressions have it first
    traced: bool  # a gradient goes through it; else its expression has none
    inference: bool  # made under torch.inference_mode
    together: tuple[str, ...]  # the reductions that somebody will ask for one after the other
    reduced: dict[str, Tensor] | None  # what they are, once one was asked for
    _value: Tensor | None

    @staticmethod
    def __new__(cls, trip: Trip, expression: Expression, axis: int = 0):
        grad = any(t.requires_grad for t in tensors_of(expression))
        inference = torch.is_inference_mode_enabled()
        if grad and (inference or not torch.is_grad_enabled()):
            expression, grad = detached(expression), False
        self = touch.make_wrapper(
            cls,
            (*expression.features[:axis], trip.graph.nnz, *expression.features[axis:]),
            dtype=expression.dtype,
            device=trip.graph.device,
            requires_grad=grad,
        )
        self.trip, self.expression, self.axis, self._value = trip, expression, axis, None
        self.traced, self.inference = grad, inference
        self.together, self.reduced = (), None
        trip.made.append(weakref.ref(self))
        if grad:
            # Reached only where autograd took this object for an input of its own, so that its gradient would be lost.
            with touch.plain_functions():
                self.register_hook(cls.lost)
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in RULES and func not in LATE and any(map(_is_late, args)):
            args = tuple(_without_late(arg) for arg in args)
            if not any(map(_is_lazy, args)):
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def late(self) -> bool:
        """True if it is narrow, or something in it is, and waits."""
        return (
            (self.trip.waits and self.axis == 0)
            and (self._value is None and isinstance(self.expression, Apply))
            and self.expression.late
        )

    def without_late(self) -> Tensor:
        """This with what is narrow stored: rows, or a lazy feature."""
        if not self.waiting:
            return self
        with _as_made(self.traced, self.inference):
            expression = narrowed(self.trip.graph, self.expression)
            if isinstance(expression, Tensor):
                self._value = expression
                return expression
            return Lazy(self.trip, expression)

    def ordinary(self, reason):
        return self.rows(reason)

    def given(self, reason):
        return self.rows(f"{reason} takes one row per edge")

    def loses_gradient(self):
        return self.traced

    @staticmethod
    def lost(_grad=None):
        raise RuntimeError(
            "gnnaccel: a lifted feature (such as x_j) went into code that torch cannot see through, and its gradient "
            "would be lost; call gnnaccel.uninstall() or do not accelerate this layer, and please report it"
        )

    @property
    def expression_dims(self) -> int:
        """Dimensions of a row and one for the edges."""
        return len(self.expression.features) + 1

    @property
    def waiting(self) -> bool:
        """True as long as it is an expression: nobody has asked for (and perhaps written into) its rows."""
        if self._value is None and (tensor := written(self.expression)) is not None:
            raise RuntimeError(
                f"gnnaccel: a tensor of shape {tuple(tensor.shape)} was written into after a message had been made of "
                "it, in a way that gnnaccel does not recognise beforehand; call gnnaccel.uninstall() or do not "
                "accelerate this layer, and please report it"
            )
        return self._value is None

    @property
    def pending(self) -> bool:
        """True if it is waiting and has the edges in dimension 0."""
        return self.axis == 0 and self.waiting

    def rows(self, reason: str | None = None, always: bool = False) -> Tensor:
        """The rows, as an ordinary tensor; always the same one. `reason` is noted if they are wide (or `always`)."""
        if self.waiting:
            with _as_made(self.traced, self.inference):
                self._value = self.trip.rows(self, reason, always)
        return self._value  # type: ignore[return-value]

    def become_ordinary(self) -> None:
        """Be the tensor of the rows, which have been gathered, if nobody but Python has this one."""
        if self.is_pythons_alone():
            made, grad = {"value": self._value}, self.traced
            vars(self).clear()
            self.become(made, grad)


def _is_late(arg) -> bool:
    if isinstance(arg, (tuple, list)):
        return any(map(_is_late, arg))
    return isinstance(arg, Lazy) and arg.late


def _is_lazy(arg) -> bool:
    return any(map(_is_lazy, arg)) if isinstance(arg, (tuple, list)) else isinstance(arg, Lazy)


def _without_late(arg):
    if isinstance(arg, (tuple, list)):
        return type(arg)(map(_without_late, arg)) if type(arg) in (tuple, list) else arg
    return arg.without_late() if isinstance(arg, Lazy) and arg.late else arg


@contextlib.contextmanager
def _as_made(grad: bool, inference: bool) -> Iterator[None]:
    """The modes a lazy feature was made in: the caller's may be others."""
    other = inference != torch.is_inference_mode_enabled()
    with torch.inference_mode(inference) if other else contextlib.nullcontext(), torch.set_grad_enabled(grad):
        yield


Lazy.__name__ = Lazy.__qualname__ = "Tensor"  # errors name the operands' types


def lift(trip: Trip, side: str, value: Tensor, axis: int = 0, clean: bool = False) -> Lazy:
    """The rows of `value` [N, ...] at the sources ("u") or destinations ("v"), put into dimension `axis`."""
    return Lazy(trip, Leaf(side, value, clean), axis)


def waiting(trip: Trip, rows: Tensor) -> Tensor:
    """Rows of edges that are there, lazy if what is made of them may wait for a walk."""
    wide = rows.dim() > 1 and math.prod(rows.shape[1:]) > bounds.STORED_FEATURES
    return Lazy(trip, own(rows)) if wide and trip.waits and messages.computes(rows.dtype, rows.device) else rows
