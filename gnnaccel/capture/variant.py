"""One capture of a step: what it was made of, whether a replay does what the step would do, and the replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gnnaccel.capture.device import Recording
from gnnaccel.capture.reach import Reach
from gnnaccel.capture.watch import Masks
from gnnaccel.graph.cache import derived

_TENSOR_RATES = (torch.optim.Adam, torch.optim.AdamW)  # optimizers that read a learning rate from the GPU


class Unfit(Exception):
    """What was recorded, or would be, cannot be replayed."""


class Warm:
    """Calls with the same kinds of arguments that no capture serves."""

    def __init__(self, leaves: list):
        self.leaves = leaves  # of the last one
        self.calls = 0
        self.fixed = [True] * len(leaves)  # whether they were the same objects at each call
        self.masks = Masks([])  # of the call that was watched
        self.values: list = []  # what it returned beside tensors
        self.switched: list[torch.nn.Module] = []  # modules that the step itself sets to train or evaluate


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
        self._reach, self._inputs, self._fixed, self._form, self._modes = reach, inputs, warm.fixed, form, modes
        self._masks = masks = warm.masks  # whose row numbers the graph reads
        self._meta = [meta(x) for x in inputs]
        before, versions, self._places = grads_of(reach), _versions(reach), places_of(reach)
        required, addresses = [x.requires_grad for _, x in reach.tensors], [_address(grad) for _, grad, _ in before]
        # What the host has read, or kept something of: numbers on the CPU, graphs, masks.
        structure = {id(x) for _, x in reach.tensors if is_structure(x) or not Recording.takes(x)} | masks.tensors()
        groups = [group for group in rated_groups(reach.optimizers) if isinstance(group["lr"], float)]
        self.recording = Recording([x for _, x in reach.tensors] + [x for x in inputs if isinstance(x, Tensor)])
        self._rates: list[list] = []
        try:
            for group in groups:
                rate = self.recording.scalar(group["lr"])
                self._rates.append([group, rate, group["lr"]])
                group["lr"] = rate
            rates_made = [rate._version for _, rate, _ in self._rates]
            with masks:
                out = self.recording.record(lambda: step(*args, **kwargs))
            if any(group["lr"] is not rate or rate._version != made for (group, rate, _), made in zip(
                    self._rates, rates_made, strict=True)):  # fmt: skip
                raise Unfit("it changes a learning rate")
        finally:
            for group, _, value in self._rates:
                group["lr"] = value
        self._training = [(vars(module), module.training) for module in warm.switched]  # set by the step
        changed = reach.difference((vars(module), "training") for module in warm.switched) or moved(reach, self._places)
        if changed is not None:
            raise Unfit(f"it changes {changed}")
        leaves, self._out_form = pytree.tree_flatten(out)
        if [x for x in leaves if not isinstance(x, Tensor)] != warm.values:
            raise Unfit("it returns a number that is another at each call")
        if any(x is rate for x in leaves for _, rate, _ in self._rates):
            raise Unfit("it returns a learning rate")
        self._outputs = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        self._written = [x for x, version in versions if x._version != version]
        written = set(map(id, self._written))
        self._named = reach.tensors
        self._tensors = [x for _, x in reach.tensors]
        self._dense = [x for x in self._tensors if x.layout is torch.strided]
        self._addresses, self._shapes = _addresses(self._dense)
        self._sparse = [
            (x, place) for x, place in zip(self._tensors, self._places, strict=True) if x.layout is not torch.strided
        ]
        self._required = required
        # What the step sets itself.
        self._requires = [(x, x.requires_grad) for x, was in zip(self._tensors, required, strict=True)
                          if x.requires_grad is not was]  # fmt: skip
        kept = [(name, x) for name, x in reach.tensors if id(x) in structure - written and not x.is_inference()]
        self._structure = [(name, x, x._version) for name, x in kept]  # what is not to be written into
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
        if form != self._form:
            return "the form of its arguments"
        if modes != self._modes:
            return "a mode of torch (grad, autocast, deterministic, dtype)"
        for i, (now, kept, fixed) in enumerate(zip(leaves, self._inputs, self._fixed, strict=True)):
            if isinstance(kept, Tensor) and not fixed:
                if meta(now) != self._meta[i] or is_structure(now):
                    return f"the shape of argument {i}"
            elif now is not kept and not (fixed_value(kept) and type(now) is type(kept) and now == kept):
                return f"argument {i}"
        changed = self._reach.difference()
        if changed is not None:
            return changed
        required = [x.requires_grad for x in self._tensors]
        lie_elsewhere = _addresses(self._dense) != (self._addresses, self._shapes)
        if lie_elsewhere or required != self._required or any(_place(x) != place for x, place in self._sparse):
            return next(
                (name for (name, x), now, then, place in zip(
                    self._named, required, self._required, self._places, strict=True)
                 if now is not then or _place(x) != place), "a tensor")  # fmt: skip
        for name, tensor, version in self._structure:
            if tensor._version != version:
                return name
        for each in self._grads:
            if each.free:
                continue
            grad = each.tensor.grad
            if grad is not each.required or (grad is not None and grad.data_ptr() != each.address):
                return "a .grad"
        return None

    def replay(self, leaves: list, copy_outputs: bool) -> Any:
        for now, kept, fixed in zip(leaves, self._inputs, self._fixed, strict=True):
            if not fixed and isinstance(kept, Tensor):
                kept.detach().copy_(now.detach())
        for entry in self._rates:
            group, rate, last = entry
            if group["lr"] != last:
                rate.fill_(group["lr"])
                entry[2] = group["lr"]
        self.recording.replay()
        torch.autograd.graph.increment_version(self._written)
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
        return pytree.tree_unflatten(outputs, self._out_form)


def meta(leaf: Any) -> Any:
    """What must be the same of an argument for two calls to be alike."""
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else None
        return type(leaf), leaf.dtype, leaf.device, leaf.shape, strides, leaf.requires_grad
    return leaf if fixed_value(leaf) else (type(leaf), id(leaf))


def fixed_value(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))


def is_structure(value: Any) -> bool:
    """True of a tensor that a graph, or a graph's norms, were made of."""
    return isinstance(value, Tensor) and derived.holds(value)


def stand_in(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        raise Unfit(f"a new {type(tensor).__name__} at each call")
    if tensor.requires_grad:
        raise Unfit("a new tensor at each call that gradients flow to")
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _address(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None and tensor.layout is torch.strided else 0


def _addresses(tensors: list[Tensor]) -> tuple[list[int], list[tuple]]:
    """Where tensors lie, and in what form: by few calls into C."""
    return list(map(Tensor.data_ptr, tensors)), [(x.shape, x.stride()) for x in tensors]


_PARTS = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def _place(tensor: Tensor) -> tuple:
    """Where a tensor, or the parts of a sparse one, lie, and in what form."""
    if tensor.layout is torch.strided:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    parts = [part(tensor.detach()) for part in _PARTS.get(tensor.layout, ())]
    return tuple((x.data_ptr(), x.shape) for x in parts), tensor.shape


def places_of(reach: Reach) -> list[tuple]:
    return [_place(x) for _, x in reach.tensors]


def moved(reach: Reach, places: list[tuple]) -> str | None:
    """The name of a tensor that lies elsewhere than it did."""
    pairs = zip(reach.tensors, places, strict=True)
    return next((name for (name, x), place in pairs if _place(x) != place), None)


def grads_of(reach: Reach) -> list[tuple[Tensor, Tensor | None, int]]:
    """Tensors that gradients flow to, these, and their versions."""
    leaves = [x for _, x in reach.tensors if x.is_leaf and (x.requires_grad or x.grad is not None)]
    return [(x, x.grad, 0 if x.grad is None else x.grad._version) for x in leaves]


def same_grad(tensor: Tensor, grad: Tensor | None, version: int) -> bool:
    return tensor.grad is grad and (grad is None or grad._version == version)


def _versions(reach: Reach) -> list[tuple[Tensor, int]]:
    return [(x, x._version) for _, x in reach.tensors if not x.is_inference()]


def rated_groups(optimizers: list) -> Iterator[dict]:
    for optimizer in optimizers:
        if type(optimizer) in _TENSOR_RATES:
            yield from (group for group in optimizer.param_groups if group.get("capturable"))
