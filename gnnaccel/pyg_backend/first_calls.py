"""A layer's first call on few edges, which on CUDA runs PyG's own code.

The edges of a sampled batch are used once by each layer. To sort them takes the host longer than PyG's gather and
scatter of few messages, and pays from the second call on.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import is_compiling

from gnnaccel import report
from gnnaccel.graph.cache import derived
from gnnaccel.lazy import blocks
from gnnaccel.pyg_backend.call import current
from gnnaccel.pyg_backend.graph import USED
from gnnaccel.pyg_backend.propagate import kind_of

REASON = "few messages of edges that the layer had not seen"


def first(plain: Any, ours: Callable | None) -> Callable | None:
    """`ours`, the forward() of accelerated layers of class `plain`, behind a look at the edges that it is given; None
    where they have that of their class."""
    names = tuple(inspect.signature(plain.forward).parameters)
    if "edge_index" not in names:
        return ours
    place, kind = names.index("edge_index") - 1, kind_of(plain)
    method = ours or (lambda self, *args, **kwargs: plain.forward(self, *args, **kwargs))

    @functools.wraps(ours or plain.forward)
    def forward(self, *args, **kwargs):
        edges = args[place] if len(args) > place else kwargs.get("edge_index")
        if type(edges) is not Tensor or edges.device.type not in blocks.FEW_AT_FIRST or is_compiling():
            return method(self, *args, **kwargs)
        if not _are_new(self, edges, args, kwargs):
            return method(self, *args, **kwargs)
        report.fallback(kind, REASON)
        outer, current.plainly = current.plainly, True
        try:
            return plain.forward(self, *args, **kwargs)
        finally:
            current.plainly = outer

    return forward


def _are_new(conv: Any, edges: Tensor, args: tuple, kwargs: dict) -> bool:
    """True if a layer gets these edges for the first time, nobody else has twice, and its messages are few.

    Left out: int32, of which torch's scatters have wrong gradients, and sums whose order somebody has asked for.
    """
    users = derived.get((edges,), USED)
    if users is True or edges.dtype != torch.int64 or edges.dim() != 2:
        return False
    given = [x for value in (*args, *kwargs.values()) for x in (value if isinstance(value, tuple) else (value,))]
    width = max((math.prod(x.shape[1:]) for x in given if isinstance(x, Tensor) and x.is_floating_point()), default=1)
    few = edges.shape[1] * width <= blocks.FEW_AT_FIRST[edges.device.type]
    if not few or torch.are_deterministic_algorithms_enabled():
        return False
    if users is None:
        derived.put((edges,), USED, {id(conv)})
    elif id(conv) in users:
        derived.put((edges,), USED, True)
        return False
    else:
        users.add(id(conv))
    return True
