"""A layer's first call on few edges, which on CUDA runs PyG's own code.

The edges of a sampled batch are used once by each layer. To sort them takes the host longer than PyG's gather and
scatter of few messages, and pays from the second call on.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric import is_compiling

from gnnaccel.graph import modes
from gnnaccel.graph.cache import USED, derived
from gnnaccel.lower import bounds, choose
from gnnaccel.pyg_backend.call import current
from gnnaccel.pyg_backend.graph import hops_of
from gnnaccel.pyg_backend.propagate import obstacle, widest
from gnnaccel.pyg_backend.touch import nn

# Layers whose code in PyG takes as many calls as there are relations, or a matrix for each edge: to sort takes less.
_SLOW = {nn.RGCNConv.forward, nn.FastRGCNConv.forward}


def first(plain: Any, ours: Callable | None) -> Callable | None:
    """`ours`, the forward() of accelerated layers of class `plain`, behind a look at the edges that it is given; None
    where they have that of their class."""
    try:
        names = tuple(inspect.signature(plain.forward).parameters)
    except (TypeError, ValueError):  # of no function of Python
        return ours
    if "edge_index" not in names[1:] or plain.forward in _SLOW:
        return ours
    place = names.index("edge_index") - 1
    method = ours or (lambda self, *args, **kwargs: plain.forward(self, *args, **kwargs))

    @functools.wraps(ours or plain.forward)
    def forward(self, *args, **kwargs):
        edges = args[place] if len(args) > place else kwargs.get("edge_index")
        if type(edges) is not Tensor or edges.device.type not in bounds.FEW_AT_FIRST or is_compiling():
            return method(self, *args, **kwargs)
        if not _are_new(self, edges, args, kwargs):
            return method(self, *args, **kwargs)
        outer, current.plainly = current.plainly, self
        try:
            return plain.forward(self, *args, **kwargs)
        finally:
            current.plainly = outer

    return forward


def _are_new(conv: Any, edges: Tensor, args: tuple, kwargs: dict) -> bool:
    """True if a layer gets these edges for the first time, nobody else has twice, and its messages are few.

    Left out: int32, of which torch's scatters have wrong gradients; sums whose order somebody has asked for;
    checkpoints, which have the same tensors saved by the second call; and calls that are PyG's for another reason.
    """
    if edges.dtype != torch.int64 or edges.dim() != 2:
        return False
    users = derived.get((edges,), USED)
    if users is True or (users is None and hops_of(edges) is not None):  # sorted, or in no need of it
        return False
    if obstacle(conv) is not None or modes.recomputing():
        return False
    width, side = widest((*args, *kwargs.values())), _longest(conv)
    if not choose.are_few(device=edges.device.type, edges=edges.shape[1], width=width, side=side, first=True):
        return False
    if choose.fixed:
        return choose.fixed == "new"
    if users is None:
        derived.put((edges,), USED, {id(conv)})
    elif id(conv) in users:
        derived.put((edges,), USED, True)
        return False
    else:
        users.add(id(conv))
    return True


_sides: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _longest(conv: Any) -> int:
    """The longest side of a parameter of a layer, looked for once: that takes longer than a launch."""
    found = _sides.get(conv)
    if found is None:
        parameters = list(conv.parameters())
        found = max([side for p in parameters if not is_lazy(p) for side in p.shape], default=1)
        if not any(map(is_lazy, parameters)):
            _sides[conv] = found
    return found
