"""`captured`: a user's whole training step as one CUDA graph, replayed for as long as nothing it reads is another."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import report, touch
from gnnaccel.capture.device import Recording
from gnnaccel.capture.guard import Warm, fixed_value, is_structure, meta, modes_now, moved, places_of, within
from gnnaccel.capture.obstacles import parallel
from gnnaccel.capture.reach import Reach, TooMuch
from gnnaccel.capture.variant import Variant, grads_of, rated_groups, same_grad, stand_in
from gnnaccel.capture.watch import Masks, modules_set
from gnnaccel.lower import bounds, choose

log = logging.getLogger("gnnaccel")


def captured(step: Callable | None = None, *, warmup: int = 3, copy_outputs: bool = True) -> Any:
    """Decorate a training step (or an evaluation) to run as one CUDA graph.

    Parameters
    ----------
    step : callable
        All of a step: ``zero_grad``, forward, loss, ``backward``, optimizer step. It may read what it likes from its
        arguments, its closure and globals. What it returns must be made of tensors and of values that do not change.
    warmup : int
        Calls that run as they are, the last of them watched, before one is captured. At least 2.
    copy_outputs : bool
        False: returned tensors are the graph's own, which the next replay writes into.

    Returns
    -------
    callable
        Called as `step` is. Its tensors are without history: they cannot be differentiated. Attribute `variants`: the
        number of graphs that it has now; `memory_bytes`: GPU memory that they hold.

    Raises
    ------
    TypeError, ValueError
        For a step that cannot be called, or a warmup below 2. What `step` raises.

    Notes
    -----
    Before a replay all that the step can reach is compared with what it was when it was captured: arguments, closure,
    globals, attributes of models and optimizers, addresses of parameters, which of them are trained, hooks, modes
    (training, grad, autocast, deterministic), the structure of graphs. What is another leads to another capture, up to
    four of which are kept; tensors as arguments that are new at each call are copied into the captured ones. Learning
    rates of Adam and AdamW may change. Dropout draws new numbers. What cannot be captured runs as it is and is counted
    with its reason (GNNACCEL_PROFILE): a step that reads a value of a tensor (``loss.item()``: return the loss
    instead), counts or appends, takes from an iterator, draws random numbers on the host, leaves its backward to the
    caller, or whose tensors lie on the CPU.
    A replay runs no Python: what the step prints, and hooks do, happens at captures alone.
    ``.grad`` of parameters is memory of the graph, which the next replay writes into. Optimizers of torch that have the
    option are made capturable.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> @gnnaccel.captured
    ... def step(x):
    ...     optimizer.zero_grad()
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> step(torch.ones(3, 2)).shape
    torch.Size([])
    """
    if step is None:
        return functools.partial(captured, warmup=warmup, copy_outputs=copy_outputs)
    if not callable(step):
        raise TypeError(f"captured: step: expected a callable, got {type(step).__name__}")
    if isinstance(step, (staticmethod, classmethod)):
        raise TypeError(f"captured: step: write @{type(step).__name__} above @captured")
    if warmup < 2:
        raise ValueError(f"captured: warmup: expected at least 2, got {warmup}")
    return _Step(step, warmup, copy_outputs)


class _Step:
    """A step and its captures."""

    def __init__(self, step: Callable, warmup: int, copy_outputs: bool):
        functools.update_wrapper(self, step)
        self._step, self._warmup, self._copy = step, warmup, copy_outputs
        self._kind = f"captured.{getattr(step, '__name__', type(step).__name__)}"
        self._variants: list[Variant] = []
        self._lock = threading.Lock()
        self._warm: dict[tuple, Warm] = {}  # by what calls are given
        self._refused: str | None = None
        self._failed = self._captures = self._replays = self._fresh = 0

    @property
    def variants(self) -> int:
        return len(self._variants)

    @property
    def memory_bytes(self) -> int:
        return sum(variant.recording.memory_bytes for variant in self._variants)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> Any:
        module, name = sys.modules.get(self.__module__), getattr(self, "__qualname__", "")
        with contextlib.suppress(AttributeError):
            if operator.attrgetter(name)(module) is self:
                return name  # as a function is pickled
        return _Step, (self._step, self._warmup, self._copy)

    def __call__(self, *args, **kwargs):
        if self._refused is not None:
            return self._left(self._refused, args, kwargs)
        if getattr(within, "running", False):
            return self._left("it is part of another captured step or module", args, kwargs)
        if not self._lock.acquire(blocking=False):
            return self._left("it is running already", args, kwargs)
        try:
            within.running = True
            return self._run(args, kwargs)
        finally:
            within.running = False
            self._lock.release()

    def _left(self, reason: str, args: tuple, kwargs: dict) -> Any:
        report.fallback(self._kind, reason)
        return self._step(*args, **kwargs)

    def _run(self, args: tuple, kwargs: dict) -> Any:
        if Recording.busy():
            return self._left("it is part of another capture", args, kwargs)
        leaves, form = touch.pytree.tree_flatten((args, kwargs)) if args or kwargs else ([], _NO_ARGUMENTS)
        modes = modes_now()
        changed = None
        for variant in self._variants:
            changed = variant.mismatch(leaves, form, modes)
            if changed is None:
                self._replays += 1
                report.count(self._kind)
                return variant.replay(leaves, self._copy)
        if self._captures * bounds.CAPTURE_EARNED > self._replays + 2 * bounds.CAPTURE_EARNED:
            self._refused = f"{changed} is another time and again"
            return self._left(self._refused, args, kwargs)
        warm = self._noted(leaves, form, modes)
        self._fresh += warm.calls == 1
        if self._fresh > 4 * bounds.CAPTURE_EARNED + self._replays:
            self._refused = "its arguments are others at each call"
            return self._left(self._refused, args, kwargs)
        if warm.calls < self._warmup:
            return self._side(warm, args, kwargs)
        # The last of the calls to warm up is watched; the next one is captured.
        if warm.calls == self._warmup:
            return self._watched(warm, args, kwargs)
        self._warm.clear()  # what comes then, if not a replay, is another step
        return self._capture(warm, form, modes)

    def _noted(self, leaves: list, form: Any, modes: tuple) -> Warm:
        key = (str(form), modes, tuple(map(meta, leaves)))
        warm = self._warm.pop(key, None) or Warm(leaves)
        self._warm[key] = warm  # the last one is the latest
        if len(self._warm) > bounds.CAPTURE_VARIANTS:
            self._warm.pop(next(iter(self._warm)))
        warm.note(leaves)
        return warm

    def _reach(self, warm: Warm, args: tuple, kwargs: dict) -> Reach:
        floating = {id(x) for x, fixed in zip(warm.leaves, warm.fixed, strict=True) if not fixed}
        roots = {"step": self._step}
        roots |= {f"argument {i}": value for i, value in enumerate(args) if id(value) not in floating}
        roots |= {key: value for key, value in kwargs.items() if id(value) not in floating}
        reach = Reach(roots)
        reach.ignore((group, "lr") for group in rated_groups(reach.optimizers) if isinstance(group["lr"], float))
        return reach

    def _side(self, warm: Warm, args: tuple, kwargs: dict) -> Any:
        """A call that warms up, on the stream on which the step is captured."""
        if warm.calls == 1:
            try:
                reach = self._reach(warm, args, kwargs)
            except TooMuch as error:
                self._refused = str(error)
                return self._left(self._refused, args, kwargs)
            self._refused = parallel(reach.modules)
            if self._refused is not None:
                return self._left(self._refused, args, kwargs)
            for optimizer in reach.optimizers:
                _make_capturable(optimizer)
            given = [x for x in warm.leaves if isinstance(x, Tensor)]
            self._refused = Recording.unfit([x for _, x in reach.tensors] + given)
            if self._refused is not None:
                return self._left(self._refused, args, kwargs)
        # In the last of them what is captured runs first: lists of work are made, kernels compiled, and the host waits.
        early = choose.lasting() if warm.calls == self._warmup - 1 else contextlib.nullcontext()
        with Recording.warming(), early:
            return self._step(*args, **kwargs)

    def _watched(self, warm: Warm, args: tuple, kwargs: dict) -> Any:
        try:
            before = self._reach(warm, args, kwargs)
        except TooMuch as error:
            self._refused = str(error)
            return self._left(self._refused, args, kwargs)
        grads = grads_of(before)
        on_cpu = [(name, x, x._version) for name, x in before.tensors if not (Recording.takes(x) or x.is_inference())]
        random = Recording.host_random()
        places, rates = places_of(before), [group["lr"] for group in rated_groups(before.optimizers)]
        moving = warm.moving()
        given = [(x, x._version) for x in moving if not x.is_inference()]
        warm.masks = Masks([x for _, x in before.tensors])
        by_way = choose.lasting()  # that is recorded
        with Recording.warming(), Recording.watching() as seen, modules_set() as warm.switched, warm.masks, by_way:
            out = self._step(*args, **kwargs)
        changed = before.difference((vars(module), "training") for module in warm.switched)
        if changed is None and rates != [group["lr"] for group in rated_groups(before.optimizers)]:
            changed = "a learning rate"
        elsewhere = moved(before, places)
        wrote = next((name for name, x, version in on_cpu if x._version != version), None)
        written = any(x._version != version for x, version in given)
        outputs = [x for x in touch.pytree.tree_leaves(out) if isinstance(x, Tensor)]
        warm.values = [x for x in touch.pytree.tree_leaves(out) if not isinstance(x, Tensor)]
        reason = None
        if seen:
            self._refused = f"it waits for the GPU: {seen[0]}"
        elif changed is not None:
            reason = f"it changes {changed}"
        elif wrote is not None:
            reason = f"it writes {wrote}, a tensor on the CPU"
        elif random != Recording.host_random():
            self._refused = "it draws random numbers on the host"
        elif elsewhere is not None:
            reason = f"it moves {elsewhere} to other memory"
        elif written:
            self._refused = "it writes into an argument that is another tensor at each call"
        elif any(map(is_structure, moving)):
            self._refused = "a graph is among its arguments that is another at each call"
        elif any(not Recording.takes(x) for x in outputs):
            self._refused = "it returns a tensor on the CPU"
        elif not all(isinstance(x, Tensor) or fixed_value(x) for x in touch.pytree.tree_leaves(out)):
            self._refused = "it returns something other than tensors and numbers"
        elif any(x.requires_grad for x in outputs) and all(same_grad(*each) for each in grads):
            self._refused = "it returns what is still to be differentiated"
        if reason is not None:
            self._fail(reason)
        reason = reason or self._refused
        if reason is not None:
            report.fallback(self._kind, reason)
        return out

    def _fail(self, reason: str) -> None:
        self._warm.clear()
        self._failed += 1
        if self._failed >= bounds.CAPTURE_ATTEMPTS:
            self._refused = reason

    def _capture(self, warm: Warm, form: Any, modes: tuple) -> Any:
        grads: list = []
        try:
            # New tensors are copied into one that stays; structure and what does not change is read where it is.
            pairs = zip(warm.leaves, warm.fixed, strict=True)
            inputs = [stand_in(x) if isinstance(x, Tensor) and not fixed else x for x, fixed in pairs]
            args, kwargs = touch.pytree.tree_unflatten(inputs, form)
            reach = self._reach(warm, args, kwargs)
            grads = grads_of(reach)
            variant = Variant(self._step, reach, inputs, warm, form, modes, args, kwargs)
        except Exception as error:
            for parameter, grad, _ in grads:
                parameter.grad = grad
            reason = f"it cannot be captured: {(str(error) or type(error).__name__).splitlines()[0]}"
            self._fail(reason)
            args, kwargs = touch.pytree.tree_unflatten(warm.leaves, form)
            return self._left(reason, args, kwargs)
        self._captures += 1
        self._variants = [*self._variants, variant][-bounds.CAPTURE_VARIANTS :]
        log.info("%s: captured, %.1f MiB", self._kind, variant.recording.memory_bytes / 2**20)
        report.count(self._kind)
        return variant.replay(warm.leaves, self._copy)


_NO_ARGUMENTS = touch.pytree.tree_flatten(((), {}))[1]


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer of torch's keep its counters on the GPU; without its
    warning that not all calls are captured."""
    if not type(optimizer).__module__.startswith("torch."):
        return
    for group in optimizer.param_groups:
        if "capturable" not in group or not all(Recording.takes(p) for p in group["params"]):
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            step = (state or {}).get("step")
            if state is not None and isinstance(step, Tensor) and not Recording.takes(step):
                state["step"] = step.to(parameter.device)
    touch.without_warning(optimizer)
