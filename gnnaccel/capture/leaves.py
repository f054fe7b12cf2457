"""What stands for parameters and arguments while the forward of a module is recorded, and what its backward reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel.capture.guard import Unfit


class Source(NamedTuple):
    """A tensor that gradients are for: a parameter, or the argument of this number; and what stands for it."""

    tensor: Tensor | None
    argument: int
    alias: Tensor


def flatten(args: tuple, kwargs: dict) -> tuple[list, Any]:
    """Arguments as a list, and their form."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if type(leaf) not in _SIMPLE and (isinstance(leaf, tuple) or type(leaf) in touch.pytree.SUPPORTED_NODES):
            return touch.pytree.tree_flatten((args, kwargs))
    return leaves, (len(args), *kwargs)


def unflatten(leaves: list, form: Any) -> tuple[tuple, dict]:
    """The arguments again."""
    if isinstance(form, tuple):
        return tuple(leaves[: form[0]]), dict(zip(form[1:], leaves[form[0] :], strict=True))
    return touch.pytree.tree_unflatten(leaves, form)


_SIMPLE = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


def counts(value: Any) -> bool:
    """True for a tensor that counts its versions."""
    return isinstance(value, Tensor) and not value.is_inference()


def storage(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 if it has none of its own, as sparse ones and subclasses."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, each from its first element to its last, share memory."""
    if not one.numel() or not other.numel():
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    return begin < other_end and other_begin < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor that arguments of this kind are copied into."""
    if type(tensor) is not Tensor:
        raise Unfit(f"it is given a new {type(tensor).__name__} at each call")
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def aliases_of(module: torch.nn.Module) -> dict[int, Tensor]:
    """What stands for the parameters that gradients are for, by their id: with versions of its own."""
    found: dict[int, Tensor] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            if type(parameter) is not torch.nn.Parameter:
                raise Unfit(f"it has a parameter of class {type(parameter).__name__}")
            alias = found[id(parameter)] = torch.nn.Parameter(parameter.data)
            vars(alias).update(vars(parameter))
    return found


@contextlib.contextmanager
def standing_in(module: torch.nn.Module, aliases: dict[int, Tensor]) -> Iterator[None]:
    """The module has the aliases for parameters."""
    held = [(part, name, x) for part in module.modules() for name, x in touch.own_parameters(part).items()]
    held = [(part, name, x) for part, name, x in held if id(x) in aliases]
    try:
        for part, name, x in held:
            touch.set_parameter(part, name, aliases[id(x)])
        yield
    finally:
        for part, name, x in held:
            touch.set_parameter(part, name, x)


def saving(storages: set[int]) -> contextlib.AbstractContextManager:
    """Tensors are saved for the backward as they are, without a check of their versions; `storages` gets where."""

    def pack(tensor: Tensor) -> Tensor:
        storages.add(storage(tensor) or -1)
        return tensor.detach()

    pack.recomputes = False  # type: ignore[attr-defined]
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Autocast casts anew: what it keeps of parameters is of these calls alone."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def uncast() -> Iterator[None]:
    """Outside of autocast."""
    before = [(device, torch.is_autocast_enabled(device)) for device in ("cuda", "cpu")]
    try:
        for device, _ in before:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device, enabled in before:
            torch.set_autocast_enabled(device, enabled)


def sources_of(
    outputs: list[Tensor], aliases: dict[int, Tensor], inputs: list, module: torch.nn.Module
) -> list[Source]:
    """The parameters and arguments that gradients of `outputs` reach."""
    reached, seen, stack = {id(x) for x in outputs if x.grad_fn is None}, set(), [x.grad_fn for x in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise Unfit("its backward runs another one, in a reentrant checkpoint")
        if node.name() == "torch::autograd::AccumulateGrad":
            reached.add(id(node.variable))  # type: ignore[attr-defined]
        stack.extend([following for following, _ in node.next_functions])
    if not reached <= {id(alias) for alias in aliases.values()}:
        raise Unfit("gradients flow to a tensor that is neither a parameter of it nor an argument")
    numbers = {id(x): i for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    parameters = {id(x): x for x in module.parameters()}
    found = []
    for key, alias in aliases.items():
        if id(alias) in reached:
            if key in parameters:
                found.append(Source(parameters[key], -1, alias))
            else:
                found.append(Source(None, numbers[key], alias))
    return found
