"""DirGNNConv, which flips its edges at each call: they are flipped once, and what is made of them is found again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.nn import DirGNNConv

from gnnaccel.graph import modes
from gnnaccel.graph.cache import derived, stamp
from gnnaccel.pyg_backend.classes import is_accelerated

_PYGS = DirGNNConv.forward
_originals: list[Callable] = []


def enable() -> None:
    """Have every DirGNNConv of accelerated layers remember its flipped edges; does nothing the second time, or where
    somebody has put another forward() into the class."""
    if not _originals and DirGNNConv.forward is _PYGS:
        _originals.append(DirGNNConv.forward)
        DirGNNConv.forward = _forward(_originals[0])


def disable() -> None:
    """Undo `enable`."""
    if _originals:
        DirGNNConv.forward = _originals.pop()


def _forward(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self, x, edge_index):
        if torch.compiler.is_compiling() or type(edge_index) is not Tensor or not is_accelerated(self.conv_out):
            return original(self, x, edge_index)
        if modes.transforming() or torch._C._get_tracing_state() is not None:
            return original(self, x, edge_index)
        out = (1 - self.alpha) * self.conv_in(x, edge_index) + self.alpha * self.conv_out(x, _flipped(edge_index))
        return out + self.lin(x) if self.root_weight else out

    return forward


def _flipped(edge_index: Tensor) -> Tensor:
    found, written = derived.get((edge_index,), "flipped") or (None, None)
    if found is None or stamp(found) != written:
        with modes.outside_inference(grad=False):
            found = edge_index.flip([0])
        derived.put((edge_index,), "flipped", (found, stamp(found)))
    return found
