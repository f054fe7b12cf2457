"""Captured modules: the forward and the backward of a user's model as two CUDA graphs, in a training loop that stays.

torch calls what a module has as `_compiled_call_impl` in place of its own call, and leaves that out of copies and
pickles; a `Captures` is put there. It calls the module as it is until calls are alike, then replays.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from gnnaccel import report, touch
from gnnaccel.capture.device import Recording
from gnnaccel.capture.guard import Warm, fixed_value, is_structure, meta, moved, places_of, within
from gnnaccel.capture.leaves import flatten
from gnnaccel.capture.obstacles import foreign, hooked, modes_of_call, unusual
from gnnaccel.capture.pair import Pair
from gnnaccel.capture.reach import Reach, TooMuch
from gnnaccel.capture.variant import grads_of, same_grad
from gnnaccel.capture.watch import Watch, speaking
from gnnaccel.lower import bounds, choose

log = logging.getLogger("gnnaccel")

_NODES = frozenset({"grad_fn", "register_prehook", "register_multi_grad_hook", "get_gradient_edge"})  # in users' code


class Captures:
    """What is called in place of a module: the module, or one of the captures of it.

    Attributes
    ----------
    variants : int
        Captures that there are now.
    memory_bytes : int
        GPU memory that they hold.
    refused : str or None
        Why nothing is captured any more, or yet.
    """

    def __init__(self, module: torch.nn.Module, copy_outputs: bool = True):
        self.module = weakref.ref(module)
        self.copy_outputs = copy_outputs
        self._whole = touch.without_calls()  # why no call is captured any more
        self._reasons: dict[tuple, str] = {}  # and calls that are alike
        self._failures: dict[tuple, int] = {}
        self._name = type(module).__name__
        self._kind = f"captured.{self._name}"
        self._pairs: list[Pair] = []
        self._warm: dict[tuple, Warm] = {}  # by what calls are given
        self._lock, self._recording = threading.Lock(), False
        self._captures = self._replays = self._fresh = self._crowded = 0

    @property
    def variants(self) -> int:
        return len(self._pairs)

    @property
    def memory_bytes(self) -> int:
        return sum(pair.memory_bytes for pair in self._pairs)

    @property
    def refused(self) -> str | None:
        return self._whole or (next(reversed(self._reasons.values()), None) if not self._pairs else None)

    def free(self) -> None:
        """Drop what was captured."""
        self._pairs, self._warm = [], {}

    def trains(self, tensors: list[Tensor]) -> bool:
        """True if captures have gradients for one of these."""
        return any(not pair.trained.isdisjoint(map(id, tensors)) for pair in self._pairs)

    def is_of(self, module: torch.nn.Module) -> bool:
        return self.module() is module

    def __reduce__(self) -> Any:
        return type(None), ()  # where a class copies all its attributes: a copy is captured on its own, or not

    def __deepcopy__(self, memo: dict) -> None:
        return None

    def __call__(self, *args, **kwargs):
        module = self.module()
        if torch.compiler.is_compiling():
            return touch.call_plainly(module, args, kwargs)
        caller = sys._getframe(1)
        if caller.f_code is touch.PICKS and caller.f_locals["self"] is not module:
            # Another that has all attributes of ours, such as a replica of torch.nn.DataParallel.
            return touch.call_plainly(caller.f_locals["self"], args, kwargs)
        if getattr(within, "running", False):  # part of what is captured, or warms up for it
            return touch.call_plainly(module, args, kwargs)
        reason = self._whole or unusual()
        if reason is not None:
            return self._left(module, reason, args, kwargs)
        if not self._lock.acquire(blocking=False):
            if self._recording:  # when others stand for the parameters
                with self._lock:
                    pass
            return self._left(module, "it is running already", args, kwargs)
        try:
            within.running = True
            return self._run(module, args, kwargs)
        finally:
            within.running = False
            self._lock.release()

    def _left(self, module: torch.nn.Module, reason: str, args: tuple, kwargs: dict) -> Any:
        before, within.noticed = getattr(within, "noticed", False), True
        try:
            report.fallback(self._kind, reason)
            return touch.call_plainly(module, args, kwargs)
        finally:
            within.noticed = before

    def _refuse(self, reason: str) -> str:
        """Capture nothing any more."""
        self._whole = reason
        self.free()
        return reason

    def _leave(self, key: tuple, reason: str, drop: bool = False) -> str:
        """Capture no more calls like those of `key` (an evaluation may do what training does not), and drop those that
        were."""
        self._warm.pop(key, None)
        if drop:
            self._pairs = [pair for pair in self._pairs if pair.warm.key != key]
        self._reasons[key] = reason
        return reason if len(self._reasons) <= bounds.CAPTURE_REASONS else self._refuse(reason)

    def _fail(self, key: tuple, reason: str) -> str:
        self._warm.pop(key, None)
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._leave(key, reason) if self._failures[key] >= bounds.CAPTURE_ATTEMPTS else reason

    def _run(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        leaves, form = flatten(args, kwargs)
        modes = modes_of_call()
        changed, waiting = None, None
        for pair in self._pairs:
            difference = pair.mismatch(leaves, form, modes)
            if difference is not None:
                changed = difference
            elif pair.unfit is not None:
                return self._left(module, self._leave(pair.warm.key, pair.unfit, True), args, kwargs)
            elif pair.busy:
                waiting = pair
            else:
                return self._replay(module, pair, leaves, args, kwargs)
        if waiting is not None:
            return self._beside(module, waiting, leaves, form, modes, args, kwargs)
        key = (module.training, str(form), modes, tuple(map(meta, leaves)))
        reason = self._reasons.get(key) or hooked(module.modules())
        if reason is not None:
            self._warm.pop(key, None)
            return self._left(module, reason, args, kwargs)
        if self._captures * bounds.CAPTURE_EARNED > self._replays + 2 * bounds.CAPTURE_EARNED:
            return self._left(module, self._refuse(f"{changed} is another time and again"), args, kwargs)
        warm = self._warm.pop(key, None) or Warm(leaves, key)
        self._warm[key] = warm  # the last one is the latest
        if len(self._warm) > bounds.CAPTURE_VARIANTS:
            self._warm.pop(next(iter(self._warm)))
        warm.note(leaves)
        self._fresh += warm.calls == 1
        if self._fresh > 4 * bounds.CAPTURE_EARNED + self._replays:
            return self._left(module, self._refuse("its arguments are others at each call"), args, kwargs)
        if warm.calls < bounds.CAPTURE_WARMUP:
            return self._as_it_is(module, warm, args, kwargs)
        if warm.calls == bounds.CAPTURE_WARMUP or warm.reach is None or warm.reach.difference() is not None:
            return self._watched(module, warm, args, kwargs)  # as it is now
        del self._warm[key]
        return self._capture(module, warm, form, modes, args, kwargs)

    def _replay(self, module: torch.nn.Module, pair: Pair, leaves: list, args: tuple, kwargs: dict) -> Any:
        try:
            recorded = pair.record_backward()  # if it is time to
        except Exception as error:
            return self._left(module, self._leave(pair.warm.key, f"its backward {_cannot(error)}", True), args, kwargs)
        if recorded and self.memory_bytes > Recording.most_bytes():
            return self._left(module, self._refuse(self._too_large()), args, kwargs)
        self._replays += 1
        report.count(self._kind)
        return pair.replay(leaves, self.copy_outputs)

    def _beside(self, module: torch.nn.Module, waiting: Pair, leaves: list, form: Any, modes: tuple, args: tuple,
                kwargs: dict) -> Any:  # fmt: skip
        """A call while what an earlier one keeps for its backward must stay."""
        self._crowded += 1
        full = len(self._pairs) >= bounds.CAPTURE_VARIANTS or waiting.warm.key in self._reasons
        if self._crowded <= bounds.CAPTURE_CROWDED or full or hooked(module.modules()):
            return self._left(module, "an earlier call of it waits for its backward", args, kwargs)
        self._crowded = 0
        warm = waiting.warm
        warm.note(leaves)
        return self._capture(module, warm, form, modes, args, kwargs)

    def _reach(self, module: torch.nn.Module, warm: Warm, args: tuple, kwargs: dict) -> Reach:
        """What a call reads; raises TooMuch where that cannot be compared."""
        floating = {id(x) for x, fixed in zip(warm.leaves, warm.fixed, strict=True) if not fixed}
        roots: dict[str, Any] = {"module": module}
        roots |= {f"argument {i}": value for i, value in enumerate(args) if id(value) not in floating}
        roots |= {key: value for key, value in kwargs.items() if id(value) not in floating}
        reach = Reach(roots)
        nodes = reach.names & _NODES
        if nodes:
            raise TooMuch(f"its code names {min(nodes)}, a node of autograd's")
        return reach

    def _as_it_is(self, module: torch.nn.Module, warm: Warm, args: tuple, kwargs: dict) -> Any:
        """A call that warms up."""
        if warm.calls == 1:  # no more than that, as sampled graphs never come to a second one
            tensors = [*module.parameters(), *module.buffers(), *[x for x in warm.leaves if isinstance(x, Tensor)]]
            reason = Recording.unfit(tensors) or foreign(module.modules(), Captures)
            if reason is not None:
                return self._left(module, self._leave(warm.key, reason), args, kwargs)
        # Before the watched one, as lists of work are made on the device, which the host waits for.
        with choose.lasting() if warm.calls == bounds.CAPTURE_WARMUP - 1 else contextlib.nullcontext():
            out = touch.call_plainly(module, args, kwargs)
        self._mind_second_derivatives(out)
        return out

    def _mind_second_derivatives(self, out: Any) -> None:
        this = weakref.ref(self)

        def note(grads: Any) -> None:
            captures = this()
            if captures is not None and torch.is_grad_enabled():
                captures._refuse("its gradients are differentiated again (create_graph=True)")

        for x in touch.pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(note)

    def _watched(self, module: torch.nn.Module, warm: Warm, args: tuple, kwargs: dict) -> Any:
        """The last call that warms up, by the way that is recorded. It is on the present stream, which what accumulates
        gradients keeps from then on."""
        try:
            before = self._reach(module, warm, args, kwargs)
        except TooMuch as error:
            return self._left(module, self._refuse(str(error)), args, kwargs)
        tensors = [x for _, x in before.tensors]
        reason = Recording.unfit(tensors) or hooked(before.modules) or foreign(before.modules, Captures)
        if reason is not None:
            return self._left(module, self._leave(warm.key, reason), args, kwargs)
        grads = grads_of(before)
        on_cpu = [(name, x, x._version) for name, x in before.tensors if not (Recording.takes(x) or x.is_inference())]
        given = [(x, x._version) for x in warm.leaves if isinstance(x, Tensor) and not x.is_inference()]
        required = [x.requires_grad for x in tensors]
        random, places, moving = Recording.host_random(), places_of(before), warm.moving()
        warm.masks = watch = Watch(tensors)
        warm.reach = None
        with Recording.watching() as seen, watch, speaking() as said, choose.lasting():
            out = touch.call_plainly(module, args, kwargs)
        changed, elsewhere = before.difference(), moved(before, places)
        wrote = next((name for name, x, version in on_cpu if x._version != version), None)
        leaves = touch.pytree.tree_leaves(out)
        outputs = [x for x in leaves if isinstance(x, Tensor)]
        warm.values = [x for x in leaves if not isinstance(x, Tensor)]
        given_ids = set(map(id, warm.leaves))
        reason = passing = None
        if any(map(is_structure, moving)):  # before what it entails, as the making of a graph waits for the GPU
            reason = "a graph is among its arguments that is another at each call"
        elif seen:
            reason = f"it waits for the GPU: {seen[0]}"
        elif watch.hooks:
            reason = f"it uses {watch.hooks[0]} of a tensor"
        elif said:
            reason = f"it calls {said[0]}"
        elif changed is not None:
            passing = f"it changes {changed}"
        elif wrote is not None:
            reason = f"it writes {wrote}, a tensor on the CPU"
        elif random != Recording.host_random():
            reason = "it draws random numbers on the host"
        elif elsewhere is not None:
            reason = f"it moves {elsewhere} to other memory"
        elif any(x._version != version for x, version in given):
            reason = "it writes into an argument"
        elif required != [x.requires_grad for x in tensors]:
            reason = "it sets requires_grad"
        elif not all(same_grad(*each) for each in grads):
            reason = "it runs a backward itself"
        elif not all(map(Recording.takes, moving)):
            reason = "a tensor on the CPU is among its arguments that is another at each call"
        elif any(not (x.is_floating_point() or x.is_complex()) for x in moving):
            reason = "a tensor of integers is among its arguments that is another at each call"
        elif any(not Recording.takes(x) for x in outputs if id(x) not in given_ids):
            reason = "it returns a tensor on the CPU"
        elif not all(map(fixed_value, warm.values)):
            reason = "it returns something other than tensors and numbers"
        if passing is not None:
            reason = self._fail(warm.key, passing)
        elif reason is not None:
            self._leave(warm.key, reason)
        if reason is not None:
            report.fallback(self._kind, reason)
        else:
            warm.reach = before
            self._mind_second_derivatives(out)
        return out

    def _too_large(self) -> str:
        return f"its captures would hold {self.memory_bytes / 2**20:.0f} MiB of the GPU's memory"

    def _capture(self, module: torch.nn.Module, warm: Warm, form: Any, modes: tuple, args: tuple, kwargs: dict) -> Any:
        try:
            reach = self._reach(module, warm, args, kwargs)
            reason = hooked(reach.modules)
            if reason is not None:
                return self._left(module, reason, args, kwargs)
            self._recording = True
            pair = Pair(module, self._name, reach, warm, form, modes)
        except Exception as error:
            return self._left(module, self._fail(warm.key, f"it {_cannot(error)}"), args, kwargs)
        finally:
            self._recording = False
        self._captures += 1
        self._pairs = [*self._pairs, pair][-bounds.CAPTURE_VARIANTS :]
        if self.memory_bytes > Recording.most_bytes():
            del pair
            return self._left(module, self._refuse(self._too_large()), args, kwargs)
        log.info("%s: captured, %.1f MiB", self._kind, pair.memory_bytes / 2**20)
        report.count(self._kind)
        leaves = warm.leaves
        warm.forget()
        return pair.replay(leaves, self.copy_outputs)


def _cannot(error: Exception) -> str:
    return f"cannot be captured: {(str(error) or type(error).__name__).splitlines()[0]}"
