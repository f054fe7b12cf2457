"""What keeps a module, or one call of it, from being replayed: modes of torch, hooks, what it is made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._device import DeviceContext

from gnnaccel import touch
from gnnaccel.capture.device import Recording
from gnnaccel.capture.guard import modes_now
from gnnaccel.graph import modes

SLOT = touch.COMPILED_CALL  # what torch calls in place of a module
COMPILED = "torch._dynamo."
PARALLEL = ("torch.nn.parallel.", "torch.distributed.")
# Hooks that no call of a module runs.
_QUIET = frozenset({
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip


def modes_of_call() -> tuple:
    """`modes_now`, and the default device where it is a mode."""
    return (*modes_now(), *[getattr(mode, "device", None) for mode in touch.function_modes()])


def unusual() -> str | None:
    """Why this call is to run as it is, whatever it is given."""
    if touch.IS_BLIND:
        return "this torch has not the names by which modes are seen"
    if Recording.busy():
        return "it is part of another capture"
    if (
        touch.in_dispatch_mode()
        or touch.transforming()
        or touch.tracing()
        or torch.is_anomaly_enabled()
        or touch.in_forward_mode()
    ):
        return "a mode of torch that sees each operation"
    if touch.graph_task() != -1:
        return "it is called in a backward pass"  # as a reentrant checkpoint does, which is to draw the same numbers
    if modes.recomputing():
        return modes.RECOMPUTING
    for mode in touch.function_modes():
        if type(mode) is not DeviceContext:
            return f"a mode of torch, {type(mode).__name__}"
    return None


def hooked(parts: Iterable[torch.nn.Module]) -> str | None:
    """Why a replay, which runs no hooks, may not stand for a call of a module made of `parts`."""
    if touch.has_global_hooks():
        return "hooks of all modules"
    for part in parts:
        for key, hooks in vars(part).items():
            if key.endswith("_hooks") and key not in _QUIET and isinstance(hooks, dict) and hooks:
                return f"a hook watches {type(part).__name__}"
    return None


def parallel(parts: Iterable[torch.nn.Module]) -> str | None:
    """Why what calls `parts` is not to be captured: one of them waits for other processes, on threads of its own, and
    counts its calls (DistributedDataParallel rebuilds its buckets and times itself by events)."""
    for part in parts:
        if isinstance(part, torch.nn.SyncBatchNorm) or type(part).__module__.startswith(PARALLEL):
            return f"it contains {type(part).__name__}, which speaks to other processes"
    return None


def foreign(parts: Iterable[torch.nn.Module], ours: type) -> str | None:
    """Why a module made of `parts` is not to be captured."""
    for part in parts:
        if (reason := parallel((part,))) is not None:
            return reason
        compiled = vars(part).get(SLOT)
        if type(part).__module__.startswith(COMPILED) or isinstance(part, torch.jit.ScriptModule):
            return f"it contains {type(part).__name__}"
        if compiled is not None and not isinstance(compiled, ours):
            return "part of it is compiled"
    return None
