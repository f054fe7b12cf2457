"""DirGNNConv, which flips its edges at each call: they are flipped once, and what is made of them is found again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.pyg_backend.classes import is_accelerated
from gnnaccel.pyg_backend.helpers import memoised
from gnnaccel.pyg_backend.replaced import Forward
from gnnaccel.pyg_backend.touch import nn as pyg_nn


def _forward(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self, x, edge_index):
        if torch.compiler.is_compiling() or type(edge_index) is not Tensor or not is_accelerated(self.conv_out):
            return original(self, x, edge_index)
        inward, outward = self.conv_in(x, edge_index), self.conv_out(x, _flip(edge_index)[0])
        out = self.alpha * outward + (1 - self.alpha) * inward
        return out + self.lin(x) if self.root_weight else out

    return forward


@memoised
def _flip(edge_index, values=None):
    return edge_index.flip([0]), values


_directed = Forward(pyg_nn.DirGNNConv, _forward)
enable, disable = _directed.enable, _directed.disable
