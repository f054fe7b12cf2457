"""PyTorch Geometric plug-in: its layers run their message passing on gnnaccel's kernels.

``accelerate(model)`` switches on the layers of one model, ``enable()`` those of every layer built from then on.
What a layer cannot run here it runs as before, and `gnnaccel.report` says why.

Results are PyG's up to rounding. The gradient of max and min goes to one of several equal maxima, as with
torch_scatter, where PyG's plain-torch path divides it among them.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
import torch_geometric
from torch.fx import GraphModule
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import _operators, plain
from gnnaccel.pyg_backend import classes as _classes
from gnnaccel.pyg_backend import sliced as _sliced
from gnnaccel.pyg_backend import touch
from gnnaccel.pyg_backend.graph import to_graph
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.pyg_backend.update_order import ALLOWED
from gnnaccel.touch import Patches

__all__ = ["accelerate", "disable", "enable", "to_graph"]

_operators.leave_unread()  # PyG has loaded torch._dynamo
_patches = Patches()  # of MessagePassing
_PARTS = {
    "samplers": "samplers and loaders",
    "batches": "batches of graphs",
    "readouts": "readouts",
    "hetero_conv": "HeteroConv",
    "directed": "DirGNNConv",
    "to_hetero": "models of to_hetero()",
    "typed": "HeteroLinear",
}
"""Modules of this package with enable() and disable(), that nothing else needs, and what of PyG's each is about."""


def _loaded(name: str) -> Any:
    """A part, or None, in words, where this version of PyG has not what it takes."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except Exception as error:
        _left(name, error)
        return None


def _left(name: str, error: Exception) -> None:
    said = "gnnaccel: of PyG %s %s run without acceleration: %s: %s"
    logging.getLogger("gnnaccel").warning(said, torch_geometric.__version__, _PARTS[name], type(error).__name__, error)


_parts: dict[str, Any] = {name: part for name in _PARTS if (part := _loaded(name)) is not None}


def _enable(name: str) -> None:
    """Switch on a part; what fails is undone, and said."""
    if name in _parts:
        try:
            _parts[name].enable()
        except Exception as error:
            _parts.pop(name).disable()
            _left(name, error)


def accelerate(model: torch.nn.Module, *, update_order: bool = False) -> torch.nn.Module:
    """Run the message passing of every PyG layer in `model` (or of the layer itself) on gnnaccel.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place: parameters, state_dict and class names stay as they are.
    update_order : bool
        Let GCNConv, SAGEConv and GraphConv take their linear map and their sum in the order that reads less.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    TypeError
        If `model` is not a torch.nn.Module.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from torch_geometric.nn import GCNConv
    >>> conv = gnnaccel.accelerate(GCNConv(4, 2))
    >>> conv(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([3, 2])
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accelerate: model: expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, pyg_nn.HeteroConv):
            _enable("hetero_conv")
        if isinstance(module, pyg_nn.DirGNNConv):
            _enable("directed")
        if isinstance(module, pyg_nn.HeteroLinear) and "typed" in _parts:
            _parts["typed"].choose(module)
        if isinstance(module, GraphModule) and "to_hetero" in _parts:
            _parts["to_hetero"].install(module)
        if isinstance(module, MessagePassing):
            _enable("to_hetero")  # also for what is to be made of the model
            _classes.accelerate(module)
            if update_order and _classes.is_accelerated(module):
                object.__setattr__(module, ALLOWED, True)
    return model


def _then_accelerate(original):
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        original(self, *args, **kwargs)
        _classes.accelerate(self)

    return wrapper


def enable() -> None:
    """Accelerate every layer that is built or unpickled from now on, samplers, and batches of graphs; does nothing the
    second time.

    Layers that exist already are left alone: pass their model to `accelerate`.
    """
    if _patches:
        return
    for name in ("__init__", "__setstate__"):
        _patches.put(MessagePassing, name, _then_accelerate)
    for part in list(_parts):
        _enable(part)
    _sliced.enable()
    plain.enable()
    if touch.MISSING:
        said = "gnnaccel: PyG %s has not, and what needs it runs without: %s"
        logging.getLogger("gnnaccel").info(said, torch_geometric.__version__, ", ".join(sorted(touch.MISSING)))


def disable() -> None:
    """Undo `enable` and every `accelerate`: all living layers are PyG's own again."""
    _patches.undo()
    for part in _parts.values():
        part.disable()
    _sliced.disable()
    _classes.restore_all()
    plain.disable()
