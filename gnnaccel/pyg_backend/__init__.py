"""PyTorch Geometric plug-in: its layers run their message passing on gnnaccel's kernels.

``accelerate(model)`` switches on the layers of one model, ``enable()`` those of every layer built from then on.
What a layer cannot run here it runs as before, and `gnnaccel.report` says why.

Results are PyG's up to rounding. The gradient of max and min goes to one of several equal maxima, as with
torch_scatter, where PyG's plain-torch path divides it among them.
"""

from __future__ import annotations

import functools

import torch
from torch.fx import GraphModule
from torch_geometric.nn import HeteroLinear
from torch_geometric.nn.conv import DirGNNConv, HeteroConv, MessagePassing

from gnnaccel import _operators
from gnnaccel.pyg_backend import batches as _batches
from gnnaccel.pyg_backend import classes as _classes
from gnnaccel.pyg_backend import directed as _directed
from gnnaccel.pyg_backend import hetero_conv as _hetero_conv
from gnnaccel.pyg_backend import readouts as _readouts
from gnnaccel.pyg_backend import samplers as _samplers
from gnnaccel.pyg_backend import sliced as _sliced
from gnnaccel.pyg_backend import to_hetero as _to_hetero
from gnnaccel.pyg_backend import typed as _typed
from gnnaccel.pyg_backend.graph import to_graph
from gnnaccel.pyg_backend.update_order import ALLOWED

__all__ = ["accelerate", "disable", "enable", "to_graph"]

_operators.leave_unread()  # PyG has loaded torch._dynamo
_originals: dict[str, object] = {}  # methods of MessagePassing that enable() wrapped


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
        if isinstance(module, HeteroConv):
            _hetero_conv.enable()
        if isinstance(module, DirGNNConv):
            _directed.enable()
        if isinstance(module, HeteroLinear):
            _typed.choose(module)
        if isinstance(module, GraphModule):
            _to_hetero.install(module)
        if isinstance(module, MessagePassing):
            _to_hetero.enable()  # also for what is to be made of the model
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
    if _originals:
        return
    for name in ("__init__", "__setstate__"):
        _originals[name] = getattr(MessagePassing, name)
        setattr(MessagePassing, name, _then_accelerate(_originals[name]))
    _samplers.enable()
    _batches.enable()
    _readouts.enable()
    _hetero_conv.enable()
    _directed.enable()
    _to_hetero.enable()
    _typed.enable(every=True)
    _sliced.enable()


def disable() -> None:
    """Undo `enable` and every `accelerate`: all living layers are PyG's own again."""
    for name, original in _originals.items():
        setattr(MessagePassing, name, original)
    _originals.clear()
    _samplers.disable()
    _batches.disable()
    _readouts.disable()
    _hetero_conv.disable()
    _directed.disable()
    _to_hetero.disable()
    _typed.disable()
    _sliced.disable()
    _classes.restore_all()
