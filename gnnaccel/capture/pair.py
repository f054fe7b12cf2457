"""One capture of a module: its forward and its backward as two CUDA graphs, and what autograd is told of them.

While the forward is recorded, leaves of their own stand for the parameters, in the same memory: autograd's graph of the
recording belongs to nobody else, and stays. From it the backward is recorded later, and until then run as it is.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators, _precision, touch
from gnnaccel.capture.device import Recording
from gnnaccel.capture.guard import Guard, Unfit, Warm
from gnnaccel.capture.leaves import (
    aliases_of,
    counts,
    overlap,
    saving,
    sources_of,
    stand_in,
    standing_in,
    storage,
    uncached,
    uncast,
    unflatten,
)
from gnnaccel.capture.reach import Reach
from gnnaccel.capture.variant import grads_of, same_grad
from gnnaccel.lower import bounds, choose

_AGAIN = (
    "{}: was captured as CUDA graphs, and gradients through it cannot be differentiated again (create_graph=True): "
    "call gnnaccel.accelerate(model, cuda_graphs=False), or leave GNNACCEL_CUDA_GRAPHS unset"
)
_OVERWRITTEN = "{}: what its captured forward kept for this backward was overwritten by a later call: keep no graph"


class _Token:
    """A forward whose backward may still come: autograd's node of it holds this."""

    __slots__ = ("__weakref__",)


class _Backward(NamedTuple):
    """The recording for one choice of outputs that have gradients."""

    recording: Recording
    given: list[Tensor]  # gradients of outputs are copied into these
    found: list[Tensor]  # gradients of those sources that have one, each laid out as its source
    there: list[bool]  # which sources these are
    written: list[Tensor]
    modes: tuple


class Pair:
    """The captured forward of a module, and its backward.

    Parameters
    ----------
    module : torch.nn.Module
    name : str
        For messages.
    reach, warm, form, modes
        As `Guard` has them; `warm` has the arguments.

    Raises
    ------
    Unfit, or what the module and CUDA raise
        Where it cannot be captured. Nothing was run on the GPU.

    Attributes
    ----------
    unfit : str or None
        Why it is not to be used any longer.
    trained : frozenset of int
        Ids of the parameters that it has gradients for.
    """

    def __init__(self, module: torch.nn.Module, name: str, reach: Reach, warm: Warm, form: Any, modes: tuple):
        self.warm, self._name, self._reach = warm, name, reach
        self.unfit: str | None = None
        self._pending: weakref.ref | None = None
        self._last: weakref.ref | None = None
        self._pool = Recording.pool()
        self._rehearsals: dict[tuple, int] = {}  # by which outputs have gradients
        self._backwards: dict[tuple, _Backward] = {}
        differentiated = torch.is_grad_enabled()
        aliases = aliases_of(module) if differentiated else {}
        inputs, handed = [], []
        for leaf, fixed in zip(warm.leaves, warm.fixed, strict=True):
            kept = stand_in(leaf) if isinstance(leaf, Tensor) and not fixed else leaf
            if differentiated and isinstance(kept, Tensor) and kept.requires_grad:
                aliases.setdefault(id(kept), kept if kept is not leaf else kept.data.requires_grad_())
            inputs.append(kept)
            handed.append(aliases.get(id(kept), kept))
        self._parts = reach.modules
        self._classes = [(type(part), type(part).forward) for part in self._parts]
        self.guard = Guard(reach, inputs, warm, form, modes)
        args, kwargs = unflatten(handed, form)
        self._tensors = [x for _, x in reach.tensors] + [x for x in inputs if isinstance(x, Tensor)]
        versions = [(x, x._version) for x in (*aliases.values(), *handed) if counts(x)]
        self._forward = Recording(self._tensors, self._pool)
        self._packed: set[int] = set()  # where what the backward reads lies
        saved = saving(self._packed) if differentiated else contextlib.nullcontext()

        def forward() -> Any:
            with uncached(), warm.masks, standing_in(module, aliases), saved:
                return touch.call_plainly(module, args, kwargs)

        out = self._forward.record(forward)
        changed = self.guard.changed()
        if changed is not None:
            raise Unfit(f"it changes {changed}")
        if any(x._version != version for x, version in versions):
            raise Unfit("it writes into an argument or a parameter")
        if self.guard.settle():
            raise Unfit("it sets requires_grad")
        self._note_outputs(out, handed, [*aliases.values(), *handed, *self._tensors])
        self._sources = sources_of(self._differentiated, aliases, inputs, module)
        self._copied = [  # arguments that are others at each call, and what they are copied into
            (i, x.detach()) for i, x in enumerate(inputs) if isinstance(x, Tensor) and not warm.fixed[i]
        ]
        self._handed = [(j, each.argument) for j, each in enumerate(self._sources) if each.tensor is None]
        self._parameters = [each.tensor for each in self._sources]
        self.trained = frozenset(id(x) for x in self._parameters if x is not None)
        self._checked = [x for _, x in reach.tensors if counts(x) and self.reads(x)]
        self._checked_arguments = [i for i, _ in self._copied if counts(inputs[i]) and self.reads(inputs[i])]

    def reads(self, tensor: Tensor) -> bool:
        """True for a tensor whose memory the backward reads."""
        return storage(tensor) in self._packed

    def _note_outputs(self, out: Any, handed: list, held: list) -> None:
        """What it returns: each tensor once, where what it was given stands, and the form."""
        leaves, self._form = touch.pytree.tree_flatten(out)
        if [x for x in leaves if not isinstance(x, Tensor)] != self.warm.values:
            raise Unfit("it returns a number that is another at each call")
        passed = {id(x): i for i, x in enumerate(handed) if isinstance(x, Tensor)}
        outer = {storage(x) for x in held if isinstance(x, Tensor)} - {0}
        self._unique: list[Tensor] = []  # static tensors
        self._places: list[tuple[str, Any]] = []  # of each leaf
        known: dict[int, int] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._places.append(("value", leaf))
            elif id(leaf) in passed:
                self._places.append(("argument", passed[id(leaf)]))
            else:
                if type(leaf) is not Tensor or leaf.layout is not torch.strided or not Recording.takes(leaf):
                    raise Unfit(f"it returns a {type(leaf).__name__} of {leaf.layout} on {leaf.device}")
                if id(leaf) not in known:
                    if storage(leaf) in outer or any(overlap(leaf, other) for other in self._unique):
                        raise Unfit("it returns what shares memory with another result, an argument or a parameter")
                    known[id(leaf)] = len(self._unique)
                    self._unique.append(leaf)
                self._places.append(("tensor", known[id(leaf)]))
        self._differentiated = [x for x in self._unique if x.requires_grad]
        self._results = [x.detach() for x in self._unique]  # the same memory, without history
        self._has_history = [i for i, x in enumerate(self._unique) if x.requires_grad]
        self.plain = [i for i, x in enumerate(self._unique) if not x.requires_grad]
        self.read = [i for i, x in enumerate(self._unique) if self.reads(x)]
        self._single = len(leaves) == 1 and self._form.is_leaf() and self._places == [("tensor", 0)]

    @property
    def memory_bytes(self) -> int:
        return self._forward.memory_bytes + sum(each.recording.memory_bytes for each in self._backwards.values())

    @property
    def busy(self) -> bool:
        """True while the backward of its last call may still come."""
        return self._pending is not None and self._pending() is not None

    def mismatch(self, leaves: list, form: Any, modes: tuple) -> str | None:
        """What is another than when this was captured; None if a replay does what the module would do."""
        changed = self.guard.mismatch(leaves, form, modes)
        if changed is None and [(type(part), type(part).forward) for part in self._parts] != self._classes:
            return "the class of a module"
        return changed

    def replay(self, leaves: list, copy_outputs: bool) -> Any:
        """The results for arguments `leaves`, of which there is no mismatch."""
        if self._copied:
            Recording.follow()
            for i, kept in self._copied:
                kept.copy_(leaves[i].detach())
        if self._sources:
            given, checked = self._parameters, self._checked
            if self._handed:
                given = given.copy()
                for j, i in self._handed:
                    given[j] = leaves[i]
            if self._checked_arguments:
                checked = [*checked, *[leaves[i] for i in self._checked_arguments]]
            outs = _replay(self, copy_outputs, checked, *given)
        else:
            outs = self.run(copy_outputs)
        if self._single:
            return outs[0]
        found = [outs[x] if kind == "tensor" else leaves[x] if kind == "argument" else x for kind, x in self._places]
        return touch.pytree.tree_unflatten(found, self._form)

    def run(self, copy_outputs: bool) -> tuple[Tensor, ...]:
        """Replay the forward; the results, each tensor once."""
        self._forward.replay()
        if self.guard.written:
            torch.autograd.graph.increment_version(self.guard.written)
        return tuple([x.clone() if copy_outputs else x.detach() for x in self._results])

    def begin(self) -> _Token:
        """A forward whose backward reads what is kept now."""
        token = _Token()
        self._pending = self._last = weakref.ref(token)
        return token

    def gradients(self, token: _Token, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Of the sources, given those of `_unique` (None: there is none)."""
        if torch.is_grad_enabled():
            raise RuntimeError(_AGAIN.format(self._name))
        if self._last is None or self._last() is not token:
            raise RuntimeError(_OVERWRITTEN.format(self._name))
        of_differentiated = [grads[i] for i in self._has_history]
        mask = tuple([grad is not None for grad in of_differentiated])
        if not any(mask):
            found: list[Tensor | None] = [None] * len(self._sources)
        else:
            captured = self._backwards.get(mask)
            there = [grad for grad in of_differentiated if grad is not None]
            if captured is None or captured.modes != _modes_of_backward() or not all(map(_plain, there)):
                found = self._as_it_is(mask, there)
            else:
                found = self._replayed(captured, there)
        if not touch.keeps_graph(unknown=False):
            self._pending = None
        return found

    def _as_it_is(self, mask: tuple, grads: list[Tensor]) -> list[Tensor | None]:
        number = self._rehearsals.get(mask, 0) + 1
        if mask not in self._backwards and len(self._backwards) < bounds.CAPTURE_BACKWARDS:
            self._rehearsals[mask] = number
        early = choose.lasting() if number < bounds.CAPTURE_REHEARSALS else contextlib.nullcontext()
        watch: contextlib.AbstractContextManager[list[str]] = contextlib.nullcontext([])
        if number == bounds.CAPTURE_REHEARSALS:
            watch = Recording.watching()
        before = grads_of(self._reach)
        with early, watch as places:
            found = self._differentiate(mask, grads)
        if places:
            self.unfit = f"its backward waits for the GPU: {places[0]}"
        elif not all(same_grad(*each) for each in before):
            self.unfit = "its backward writes gradients itself"
        return found

    def _differentiate(self, mask: tuple, grads: list[Tensor]) -> list[Tensor | None]:
        outputs = [x for x, there in zip(self._differentiated, mask, strict=True) if there]
        aliases = [each.alias for each in self._sources]
        return list(torch.autograd.grad(outputs, aliases, grads, retain_graph=True, allow_unused=True))

    def _laid_out(self, mask: tuple, grads: list[Tensor]) -> list[Tensor | None]:
        """The same, each strided as what it is for, so that autograd takes a copy of it for .grad without another."""
        found = self._differentiate(mask, grads)
        for i, (x, source) in enumerate(zip(found, self._sources, strict=True)):
            if x is not None and x.layout is torch.strided and x.stride() != source.alias.stride():
                found[i] = torch.empty_like(source.alias, requires_grad=False).copy_(x)
        return found

    def _replayed(self, captured: _Backward, grads: list[Tensor]) -> list[Tensor | None]:
        Recording.follow()
        for kept, grad in zip(captured.given, grads, strict=True):
            kept.copy_(grad)
        captured.recording.replay()
        if captured.written:
            torch.autograd.graph.increment_version(captured.written)
        if not captured.found:
            return [None] * len(captured.there)
        # Into new memory, by one kernel for all: autograd makes them .grad, or the next of them is added to those.
        remaining = iter(touch.foreach_mul(captured.found, 1))
        return [next(remaining) if there else None for there in captured.there]

    def record_backward(self) -> bool:
        """Record the backward passes that have run often enough; True if there were any. To be called while not `busy`.

        Raises
        ------
        Unfit, or what CUDA raises
            Where it cannot be captured.
        """
        if not self._rehearsals:
            return False
        before = len(self._backwards)
        for mask, number in tuple(self._rehearsals.items()):
            if number < bounds.CAPTURE_REHEARSALS:
                continue
            del self._rehearsals[mask]
            outputs = [x for x, there in zip(self._differentiated, mask, strict=True) if there]
            given = [torch.zeros_like(x, requires_grad=False) for x in outputs]
            recording = Recording(self._tensors, self._pool)
            versions = [(x, x._version) for x in self._tensors if counts(x)]
            with uncast():  # as backward passes are run outside of it
                modes = _modes_of_backward()
                found = recording.record(functools.partial(self._laid_out, mask, given))
            if any(x is not None and x.layout is not torch.strided for x in found):
                raise Unfit("its gradients are sparse")
            written = [x for x, version in versions if x._version != version]
            there = [x is not None for x in found]
            self._backwards[mask] = _Backward(
                recording, given, [x for x in found if x is not None], there, written, modes
            )
        return len(self._backwards) > before


class _Replay(torch.autograd.Function):
    """Both graphs as one node of autograd's."""

    @staticmethod
    def forward(ctx, pair: Pair, copy_outputs: bool, checked: list[Tensor], *sources: Tensor):
        outs = pair.run(copy_outputs)
        ctx.set_materialize_grads(False)
        if pair.plain:
            ctx.mark_non_differentiable(*[outs[i] for i in pair.plain])
        own = [] if copy_outputs else [outs[i] for i in pair.read]
        ctx.save_for_backward(*checked, *own)  # so that writes into them before the backward are errors, as without us
        ctx.pair, ctx.token = pair, pair.begin()
        return outs

    @staticmethod
    def backward(ctx, *grads):
        _ = ctx.saved_tensors  # checks
        return None, None, None, *ctx.pair.gradients(ctx.token, grads)


_replay = super(torch.autograd.Function, _Replay).apply  # type: ignore[misc]  # apply() looks at transforms, of which
# there are none here, and unwraps each argument


def _modes_of_backward() -> tuple:
    return (
        torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        *_precision.settings(),
    )


def _plain(grad: Tensor) -> bool:
    return grad.layout is torch.strided and _operators.dense(grad)
