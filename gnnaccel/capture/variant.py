"""One capture of a step: what it was made of, whether a replay does what the step would do, and the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.capture.device import Recording
from gnnaccel.capture.guard import Guard, Unfit, Warm
from gnnaccel.capture.reach import Reach

_TENSOR_RATES = (torch.optim.Adam, torch.optim.AdamW)  # optimizers that read a learning rate from the GPU


class _Grad(NamedTuple):
    """The .grad of a tensor before and after a captured step."""

    tensor: Tensor
    required: Tensor | None  # before; not looked at where free
    free: bool
    left: Tensor | None  # after
    address: int  # of what is required


class Variant:
    """One capture of a step, and what it is good for."""

    def __init__(self, step: Callable, reach: Reach, inputs: list, warm: Warm, form: Any, modes: tuple,
                 args: tuple, kwargs: dict):  # fmt: skip
        self._inputs, self._fixed = inputs, warm.fixed
        self._guard = Guard(reach, inputs, warm, form, modes)
        before = grads_of(reach)
        addresses = [_address(grad) for _, grad, _ in before]
        groups = [group for group in rated_groups(reach.optimizers) if isinstance(group["lr"], float)]
        self.recording = Recording([x for _, x in reach.tensors] + [x for x in inputs if isinstance(x, Tensor)])
        self._rates: list[list] = []
        try:
            for group in groups:
                rate = self.recording.scalar(group["lr"])
                self._rates.append([group, rate, group["lr"]])
                group["lr"] = rate
            rates_made = [rate._version for _, rate, _ in self._rates]
            with warm.masks:
                out = self.recording.record(lambda: step(*args, **kwargs))
            if any(group["lr"] is not rate or rate._version != made for (group, rate, _), made in zip(
                    self._rates, rates_made, strict=True)):  # fmt: skip
                raise Unfit("it changes a learning rate")
        finally:
            for group, _, value in self._rates:
                group["lr"] = value
        self._training = [(vars(module), module.training) for module in warm.switched]  # set by the step
        changed = self._guard.changed([(vars(module), "training") for module in warm.switched])
        if changed is not None:
            raise Unfit(f"it changes {changed}")
        leaves, self._out_form = touch.pytree.tree_flatten(out)
        if [x for x in leaves if not isinstance(x, Tensor)] != warm.values:
            raise Unfit("it returns a number that is another at each call")
        if any(x is rate for x in leaves for _, rate, _ in self._rates):
            raise Unfit("it returns a learning rate")
        self._outputs = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._requires = self._guard.settle()  # what the step sets itself
        self._grads = []
        for (tensor, grad, _), address in zip(before, addresses, strict=True):
            left = tensor.grad
            if left is grad and _address(grad) != address:
                raise Unfit("it moves a .grad to other memory")
            if grad is None and left is None and not tensor.requires_grad:
                continue
            self._grads.append(_Grad(tensor, grad, grad is not None and left is not grad, left, address))

    def mismatch(self, leaves: list, form: Any, modes: tuple) -> str | None:
        """What is another than when this was captured; None if a replay does what the step would do."""
        changed = self._guard.mismatch(leaves, form, modes)
        if changed is not None:
            return changed
        for each in self._grads:
            if each.free:
                continue
            grad = each.tensor.grad
            if grad is not each.required or (grad is not None and grad.data_ptr() != each.address):
                return "a .grad"
        return None

    def replay(self, leaves: list, copy_outputs: bool) -> Any:
        self.recording.follow()
        for now, kept, fixed in zip(leaves, self._inputs, self._fixed, strict=True):
            if not fixed and isinstance(kept, Tensor):
                kept.detach().copy_(now.detach())
        for entry in self._rates:
            group, rate, last = entry
            if group["lr"] != last:
                rate.fill_(group["lr"])
                entry[2] = group["lr"]
        self.recording.replay()
        torch.autograd.graph.increment_version(self._guard.written)
        for each in self._grads:
            if each.tensor.grad is not each.left:
                each.tensor.grad = each.left
        for tensor, required in self._requires:
            tensor.requires_grad_(required)
        for attributes, training in self._training:
            attributes["training"] = training
        outputs = self._outputs
        if copy_outputs:
            outputs = [x.clone() if isinstance(x, Tensor) else x for x in outputs]
        return touch.pytree.tree_unflatten(outputs, self._out_form)


def stand_in(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        raise Unfit(f"a new {type(tensor).__name__} at each call")
    if tensor.requires_grad:
        raise Unfit("a new tensor at each call that gradients flow to")
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _address(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None and tensor.layout is torch.strided else 0


def grads_of(reach: Reach) -> list[tuple[Tensor, Tensor | None, int]]:
    """Tensors that gradients flow to, these, and their versions."""
    leaves = [x for _, x in reach.tensors if x.is_leaf and (x.requires_grad or x.grad is not None)]
    return [(x, x.grad, 0 if x.grad is None else x.grad._version) for x in leaves]


def same_grad(tensor: Tensor, grad: Tensor | None, version: int) -> bool:
    return tensor.grad is grad and (grad is None or grad._version == version)


def rated_groups(optimizers: list) -> Iterator[dict]:
    for optimizer in optimizers:
        if type(optimizer) in _TENSOR_RATES:
            yield from (group for group in optimizer.param_groups if group.get("capturable"))
