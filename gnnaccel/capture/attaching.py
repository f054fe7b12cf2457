"""Which modules are captured: those that are asked for, or the outermost ones that call layers of PyG or DGL."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gnnaccel import report, touch
from gnnaccel.capture import optimizers
from gnnaccel.capture.device import Recording
from gnnaccel.capture.guard import within
from gnnaccel.capture.modules import Captures
from gnnaccel.capture.obstacles import COMPILED, PARALLEL, SLOT
from gnnaccel.lower import bounds

_LAYERS = ("torch_geometric.nn.conv.", "dgl.nn.")
_in_vain = 0  # looks for a module that found none, one after the other
_attached: weakref.WeakSet[Captures] = weakref.WeakSet()
_before_steps: torch.utils.hooks.RemovableHandle | None = None  # `_before_step`, once there is something to capture


def attach(module: torch.nn.Module, *, copy_outputs: bool = True) -> Captures:
    """Have calls of `module` captured and replayed; what it has captured already stays.

    Parameters
    ----------
    module : torch.nn.Module
    copy_outputs : bool
        False: what it returns is the graph's own memory, which the next replay writes into.

    Raises
    ------
    TypeError
        If `module` is not a torch.nn.Module.
    ValueError
        If torch.compile has it already (``module.compile()``).
    """
    global _before_steps
    _check(module)
    there = vars(module).get(SLOT)
    if there is not None and not isinstance(there, Captures):
        raise ValueError(
            "accelerate: cuda_graphs: the model is compiled (model.compile()), whose calls are left to that"
        )
    if there is not None and there.copy_outputs is copy_outputs and there.is_of(module):
        return there
    made = Captures(module, copy_outputs)
    vars(module)[SLOT] = made
    _attached.add(made)
    if _before_steps is None:
        _before_steps = register_optimizer_step_pre_hook(_before_step)
    return made


def _check(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"accelerate: model: expected a torch.nn.Module, got {type(module).__name__}")


def detach(module: torch.nn.Module) -> None:
    """Undo `attach`, and free what was captured; does nothing to another module. TypeError as there."""
    _check(module)
    captures = captures_of(module)
    if captures is not None:
        del vars(module)[SLOT]
        captures.free()
        _attached.discard(captures)
        _mind_steps_no_more()


def captures_of(module: torch.nn.Module) -> Captures | None:
    """The captures of `module`, with `variants`, `memory_bytes` and `refused`; None if it is not to be captured."""
    there = vars(module).get(SLOT)
    return there if isinstance(there, Captures) and there.is_of(module) else None


def enable() -> None:
    """From now on capture modules that call layers of PyG or DGL on a GPU: of those that contain each other the
    outermost one, which a program calls itself. Not layers that are called alone, and nothing inside torch.compile."""
    report.on_call = _notice


def disable() -> None:
    """Undo `enable` and every `attach`."""
    global _in_vain
    report.on_call, _in_vain = None, 0
    for captures in tuple(_attached):
        module = captures.module()
        if module is not None:
            detach(module)
    _mind_steps_no_more()


def _mind_steps_no_more() -> None:
    global _before_steps
    if _before_steps is not None and not _attached:
        _before_steps.remove()
        _before_steps = None


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Before each step of an optimizer: that of a captured model's parameters is one kernel from now on."""
    if torch.compiler.is_compiling():
        return
    for group in optimizers.left_to_torch(optimizer):
        if getattr(within, "running", False) or Recording.busy():
            return  # part of a captured step
        if any(captures.trains(group["params"]) for captures in tuple(_attached)):
            optimizers.fuse(optimizer, group)


def _notice() -> None:
    """A layer of PyG or DGL was called: capture the outermost module that it is called in from now on."""
    global _in_vain
    if getattr(within, "running", False) or getattr(within, "noticed", False) or torch.compiler.is_compiling():
        return
    _in_vain += 1
    if _in_vain > bounds.CAPTURE_LOOKS and _in_vain % bounds.CAPTURE_LOOKS:  # on the CPU, or by calls of layers alone
        return
    found = _outermost(sys._getframe(1))
    if found is not None:
        _in_vain = 0
        attach(found)


def _outermost(frame: Any) -> torch.nn.Module | None:
    """The module to capture of those that are being called; None if there is none."""
    outer: list[torch.nn.Module] = []  # innermost first
    while frame is not None:
        if frame.f_code is touch.CALLS:
            outer.append(frame.f_locals["self"])
        frame = frame.f_back
    while outer and isinstance(outer[-1], torch.nn.parallel.DistributedDataParallel):
        outer.pop()  # its hooks see what the gradients of its module's parameters are, however they came
    others = (COMPILED, *PARALLEL)
    if not outer or any(type(x).__module__.startswith(others) or isinstance(x, torch.nn.DataParallel) for x in outer):
        return None
    found = outer[-1]
    alone = type(found).__module__.startswith(_LAYERS)
    if alone or vars(found).get(SLOT) is not None or touch.is_replica(found):
        return None
    first = next(found.parameters(), None)
    return found if first is not None and Recording.takes(first) else None
