"""Adam's step as one kernel: between two replays it is most of an epoch, in Python and small kernels."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from gnnaccel import report
from gnnaccel.capture.device import Recording

log = logging.getLogger("gnnaccel")

_PLAIN = (Tensor, torch.nn.Parameter)
_CLASSES = (torch.optim.Adam, torch.optim.AdamW)
# Options that say how a step is done, and their values where that is left to torch.
_LEFT = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


def left_to_torch(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The groups of parameters of which torch chooses the implementation, of optimizers that have one kernel."""
    if type(optimizer) not in _CLASSES:
        return []
    return [group for group in optimizer.param_groups if all(group.get(key, 0) is _LEFT[key] for key in _LEFT)]


def fuse(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """Have the steps of `group` be torch's own fused ones from now on, if its parameters allow that.

    The group is then as one made with ``fused=True``: counters of steps lie on the GPU, and each power of beta is of
    float64, as without. Numbers differ from the other implementation's in their last digits.
    """
    states = [optimizer.state.get(x) or {} for x in group["params"]]
    for x, state in zip(group["params"], states, strict=True):
        kept = [value for key, value in state.items() if key != "step" and isinstance(value, Tensor)]
        if type(x) not in _PLAIN or not (Recording.takes(x) and x.is_floating_point() and x.layout is torch.strided):
            return
        if any(value.dtype != x.dtype or value.device != x.device for value in kept):
            return
    if not all(isinstance(beta, float) for beta in group["betas"]):
        return
    for x, state in zip(group["params"], states, strict=True):
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(x.device)
    group["fused"] = True
    kind = f"captured.{type(optimizer).__name__}"
    report.count(kind)
    log.info("%s: steps of %d parameters are one kernel now (fused=True)", kind, len(states))
