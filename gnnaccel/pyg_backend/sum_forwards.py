"""Forwards of PyG's layers that are sums, means or extrema of neighbours' features and nothing else of ours; after
those of PyG 2.8. As forwards.py has them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import ops, report
from gnnaccel.graph.csr import Graph
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.forwards import neighbours
from gnnaccel.pyg_backend.rules import REDUCES
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import own_parameters, submodules


def _simple(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.SimpleConv, tuple(REDUCES))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None, size=None):
        found = None
        if size is None and edge_weight is None and self.combine_root is None and guard.allows(self, edge_index):
            found = neighbours(self, x, edge_index)
        return general(self, x, edge_index, edge_weight, size) if found is None else _reduced(self, guard, *found)

    return forward


def _gated_graph(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GatedGraphConv, tuple(REDUCES))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        modules, weight, found = submodules(self), own_parameters(self).get("weight"), None
        usual = edge_weight is None and type(weight) is torch.nn.Parameter and weight.dim() == 3
        rnn = modules.get("rnn")  # another one, or one that is watched, may give what are no rows of nodes
        usual = usual and type(rnn) is torch.nn.GRUCell and not short.hooked(rnn)
        if usual and type(x) is not tuple and guard.allows(self, edge_index):
            found = neighbours(self, x, edge_index)
        if found is None or weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
            return general(self, x, edge_index, edge_weight)
        lacking = self.out_channels - x.shape[1]
        if lacking < 0:  # PyG says what that does
            return general(self, x, edge_index, edge_weight)
        if lacking:
            x = torch.cat([x, x.new_zeros(x.shape[0], lacking)], dim=1)
        for i in range(self.num_layers):
            x = rnn(_reduced(self, guard, found[0], torch.matmul(x, weight[i])), x)
        return x

    return forward


def _reduced(conv: Any, guard: short.Guard, graph: Graph, x: Tensor) -> Tensor:
    """One propagate()."""
    start = time.perf_counter()
    out = ops.spmm(graph, x, reduce=REDUCES[type(submodules(conv)["aggr_module"])])
    report.record(guard.kind, start)
    return out


_MAKERS = ((pyg_nn.SimpleConv, _simple), (pyg_nn.GatedGraphConv, _gated_graph))
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
