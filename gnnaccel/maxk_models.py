"""MaxK in place of the ReLUs of a model that exists: what `gnnaccel.accelerate(model, maxk=k)` does."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gnnaccel import touch
from gnnaccel.nn.maxk import MaxK

_LAYERS = ("torch_geometric.nn.conv.", "dgl.nn.pytorch.conv.", "gnnaccel.nn.convolution", "gnnaccel.nn.attention")
_SEQUENCES = (nn.Sequential, nn.ModuleList)


class _InPlaceOfReLU(MaxK):
    """A MaxK that stands where a ReLU was.

    Under torch.compile the rows go on dense: whoever reads them may be compiled apart, and then torch expects of the
    backward a gradient of the kind that the forward returned, which only a sum over a graph gives (docs/maxk.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        kept = super().forward(x)
        return kept.to_dense() if torch.compiler.is_dynamo_compiling() else kept


def _sums(module: nn.Module) -> bool:
    """True for a layer that sums over a graph: of PyG, DGL or gnnaccel.nn, or of a class derived from one."""
    return any(c.__module__.startswith(_LAYERS) for c in type(module).__mro__)


def _has_sums(module: nn.Module) -> bool:
    return any(_sums(part) for part in module.modules())


def _is_sequence(module: nn.Module) -> bool:
    """True for what calls its parts in their order, or holds parts that somebody calls in their order."""
    return isinstance(module, _SEQUENCES) or type(module).__module__ == "torch_geometric.nn.sequential"


def _found(module: nn.Module, followed: bool) -> Iterator[tuple[nn.Module, str]]:
    """(owner, name) of the ReLUs in `module` that stand in front of a sum.

    followed : a ModuleList of activations may be among the parts; whether a layer that sums stands beside it.
    """
    parts = [(name, part) for name, part in touch.submodules(module).items() if part is not None]
    beside = any(_sums(part) or (isinstance(part, nn.ModuleList) and _has_sums(part)) for _, part in parts)
    for at, (name, part) in enumerate(parts):
        behind = any(_has_sums(later) for _, later in parts[at + 1 :])
        if isinstance(part, (nn.ReLU, _InPlaceOfReLU)):
            if behind if _is_sequence(module) and beside else (beside or followed):
                yield module, name
        elif not _sums(part):
            yield from _found(part, isinstance(part, nn.ModuleList) and beside)


def _calls_relu(module: nn.Module) -> bool:
    """True if a method of the module's own class names relu."""
    if type(module).__module__.startswith(("torch.nn.", "torch_geometric.", "dgl.", "gnnaccel.")):
        return False
    methods = (m for m in vars(type(module)).values() if isinstance(m, types.FunctionType))
    names = {"relu", "relu_"} - set(touch.submodules(module))  # not a part of that name
    return any(names & set(m.__code__.co_names) for m in methods if m.__name__ != "__init__")


def use_maxk(model: nn.Module, k: int) -> None:
    """Put `MaxK` with this k in the place of the torch.nn.ReLU modules that stand in front of sums over a graph.

    These are: in a Sequential (of torch or PyG) that holds layers which sum over a graph, those with such a layer
    behind them; in any other module that has such layers, as parts or in a ModuleList, its own ReLUs and those of its
    ModuleLists. Not those inside such layers (the MLP of a GIN), nor of modules without one (an MLP before or behind).
    What a forward calls itself (torch.relu, torch.nn.functional.relu, Tensor.relu) is code, and stays: a warning names
    it. Once more changes k.

    Raises
    ------
    TypeError
        If `model` is no torch.nn.Module, or k no int.
    ValueError
        For a k below 1, a model without such a ReLU, or one of DGL before `gnnaccel.install`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate: model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"accelerate: maxk: expected an int, got {type(k).__name__}")
    if k < 1:
        raise ValueError(f"accelerate: maxk: expected at least 1, got {k}")
    if any(c.__module__.startswith("dgl.") for m in model.modules() for c in type(m).__mro__):
        backend = sys.modules.get("gnnaccel.dgl_backend")
        if backend is None or not backend.is_enabled():
            raise ValueError("accelerate: maxk: DGL itself cannot read what MaxK gives; call gnnaccel.install() first")
    places = list(_found(model, False))
    calling = sorted({type(m).__name__ for m in model.modules() if not _sums(m) and _calls_relu(m)})
    if not places:
        why = f"; {', '.join(calling)} calls relu itself, which cannot be replaced" if calling else ""
        raise ValueError(
            "accelerate: maxk: found no torch.nn.ReLU beside a layer of PyG, DGL or gnnaccel.nn"
            f"{why}; make it a torch.nn.ReLU, or put gnnaccel.nn.MaxK where a ReLU is"
        )
    for owner, name in places:
        owner.add_module(name, _InPlaceOfReLU(k).train(owner.training))
    if calling:
        logging.getLogger("gnnaccel").warning(
            "accelerate: maxk: %s calls relu itself, which stays a ReLU; %d torch.nn.ReLU became MaxK",
            ", ".join(calling),
            len(places),
        )
