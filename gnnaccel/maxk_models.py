"""MaxK in place of the ReLUs of a model that exists: what `gnnaccel.accelerate(model, maxk=k)` does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gnnaccel import _operators, ops, report

_RELUS = {F.relu, torch.relu, Tensor.relu}
_IN_PLACE = {F.relu_, torch.relu_, Tensor.relu_}  # the caller goes on with the input
_LAYERS = ("torch_geometric.nn.conv.", "dgl.nn.pytorch.conv.", "gnnaccel.nn.convolution", "gnnaccel.nn.attention")
_KIND = "maxk in place of a ReLU"


class MaxKForward(TorchFunctionMode):
    """One forward of a model in which ReLUs become MaxK.

    That are the calls of torch.relu, torch.nn.functional.relu, Tensor.relu and torch.nn.ReLU on features [N, D] with D
    above k, as long as a layer that sums over a graph (`layers_of`) has not been called in that forward; not those
    inside such a layer (the MLP of a GIN) or behind the last one. A ReLU written into its input stays one, which is
    counted (`gnnaccel.report`).
    """

    def __init__(self, k: int, layers: list[nn.Module]):
        super().__init__()
        self.k = k
        self.to_come = set(map(id, layers))
        self.inside = 0  # of how many layers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (func in _RELUS or func in _IN_PLACE) and self.to_come and not self.inside:
            x = args[0] if args else kwargs.get("input")
            if isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] > self.k and x.is_floating_point():
                in_place = args[1] if len(args) > 1 else kwargs.get("inplace", func in _IN_PLACE)
                if not in_place:
                    with report.accelerated(_KIND):
                        return ops.maxk(x, self.k)
                report.fallback(_KIND, "a ReLU written into its input")
        return func(*args, **kwargs)


_operators.transparent_modes.add(MaxKForward)


class _Hooks:
    """What is called around the forward of a model and of its layers. A class, so that the model can be pickled."""

    def __init__(self, k: int):
        self.k = k

    def enter(self, model: nn.Module, args) -> None:
        MaxKForward(self.k, layers_of(model)).__enter__()

    def leave(self, model: nn.Module, args, output) -> None:
        mode = _current()
        if mode is not None:
            mode.__exit__(None, None, None)

    def enter_layer(self, layer: nn.Module, args) -> None:
        mode = _current()
        if mode is not None:
            mode.inside += 1
            mode.to_come.discard(id(layer))

    def leave_layer(self, layer: nn.Module, args, output) -> None:
        mode = _current()
        if mode is not None:
            mode.inside -= 1


def _current() -> MaxKForward | None:
    """The forward that this thread is in."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, MaxKForward)), None)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers in `model` that sum over a graph: of PyG, DGL and gnnaccel.nn, and of classes derived from these."""
    return [
        module
        for module in model.modules()
        if module is not model and any(c.__module__.startswith(_LAYERS) for c in type(module).__mro__)
    ]


def use_maxk(model: nn.Module, k: int) -> None:
    """Let every forward of `model` be a `MaxKForward` from now on; once more changes k.

    Raises
    ------
    TypeError
        If `model` is no torch.nn.Module, or k no int.
    ValueError
        For a k below 1, or a model without layers that sum over a graph.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"accelerate: maxk: expected an int, got {type(k).__name__}")
    if k < 1:
        raise ValueError(f"accelerate: maxk: expected at least 1, got {k}")
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            "accelerate: maxk: found no layer of PyG, DGL or gnnaccel.nn in the model, which is what tells the ReLUs "
            "in front of sums over a graph; put gnnaccel.nn.MaxK there yourself"
        )
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _Hooks):
            owner.k = k
            return
    hooks = _Hooks(k)
    model.register_forward_pre_hook(hooks.enter)
    model.register_forward_hook(hooks.leave, always_call=True)
    for layer in layers:
        layer.register_forward_pre_hook(hooks.enter_layer)
        layer.register_forward_hook(hooks.leave_layer, always_call=True)
