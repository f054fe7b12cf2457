"""Modes of torch in which tensors are not what they seem: what is kept from them, and what is refused in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from gnnaccel import touch


def faking() -> bool:
    """True under torch's FakeTensorMode, as torch.export has it: tensors that are made now hold nothing.

    Not while torch.compile reads the code, which makes the tensors when what it compiled runs.
    """
    return not torch.compiler.is_dynamo_compiling() and touch.in_dispatch_mode("FAKE")


def proxied() -> bool:
    """True while make_fx notes what runs, and as a constant what is no argument: a graph, for any edges to come."""
    return touch.in_dispatch_mode("PROXY")


def recomputing() -> bool:
    """True where hooks see what is saved for a backward pass: torch.utils.checkpoint has the same saved again later,
    when a graph may have what makes another way through the kernels the shorter one. Also with a torch that does not
    tell. Hooks that say `recomputes = False` of themselves keep what they are given."""
    return torch.is_grad_enabled() and are_hooked()


def are_hooked() -> bool:
    """True where hooks get what is saved: what they give back of it is theirs, and may be read by others later."""
    top = touch.saved_hooks(False)
    return top is not None and (not top or getattr(top[0], "recomputes", True))


RECOMPUTING = "hooks of saved tensors, as those of a checkpoint"


def outside_inference(grad: bool = True) -> contextlib.AbstractContextManager:
    """Out of inference mode: what is made there could not be used in a later training step.

    grad : whether gradients may be recorded, where there are any to record: not to care is cheaper.
    """
    if torch.is_inference_mode_enabled():
        return _outside_both()
    return _AS_IT_IS if grad else torch.no_grad()


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _outside_both() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def lasting(*tensors: Tensor | None) -> tuple:
    """`tensors` for use outside the modes they were made in: out of the wrappers of torch.func's derivatives, which die
    with these and have nothing to say of integers, and copies that autograd accepts if made under inference mode."""
    if torch.compiler.is_compiling():
        return tensors
    for tensor in tensors:
        if tensor is not None and (touch.is_tracked(tensor) or tensor.is_inference()):
            return tuple(map(_lasting, tensors))
    return tensors


def _lasting(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    tensor = touch.unwrapped(tensor)
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return touch.unwrapped(tensor.clone())


def refuse(who: str) -> None:
    """Raise RuntimeError in a mode in which a graph cannot be read."""
    if not torch.compiler.is_dynamo_compiling() and (touch.transforming() or faking()):
        raise RuntimeError(f"{who}: call it outside torch.func's transforms, FakeTensorMode and torch.export")
