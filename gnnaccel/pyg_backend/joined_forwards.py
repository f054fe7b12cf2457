"""Forwards of PyG's layers on CUDA whose messages are of several linear maps of the same features: one map of all, and
one op behind it that reads what it gives where it lies. After those of PyG 2.8.

A call that is in any way unusual takes the general forward(), with the same result.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric import nn as pyg_nn
from torch_geometric.nn.aggr import MeanAggregation, SoftmaxAggregation, SumAggregation

from gnnaccel import report
from gnnaccel.graph.csr import Graph
from gnnaccel.modules import is_watched
from gnnaccel.ops import messages
from gnnaccel.ops.joined_sums import FILM, GATED, LE, Parts, joined_sum
from gnnaccel.pyg_backend import short

_GATES = (Parts(GATED, "sum", ("k", "q", "x"), True), Parts(GATED, "sum", ("k", "q", "x"), False))
_FILM = Parts(FILM, "mean", ("beta", "gamma", "x"), False)
_LE = Parts(LE, "sum", ("a", "b"), True)


def _map(x: Tensor, *maps: Any, extra_bias: Tensor | None = None) -> Tensor | None:
    """The linear maps of `x` side by side, `extra_bias` added to the last; None where they are not PyG's own."""
    weights, biases = [], []
    for lin in maps:
        found = short.parameters_of(lin)
        if found is None or found[0].shape[1] != x.shape[1] or found[0].dtype != x.dtype:
            return None
        weights.append(found[0])
        biases.append(found[1])
    if extra_bias is not None:
        if biases[-1] is not None:
            return None
        biases[-1] = extra_bias  # type: ignore[call-overload]
    shifts = None
    if any(b is not None for b in biases):
        shifts = torch.cat([x.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
    return F.linear(x, torch.cat(weights), shifts)


def _graph(guard: short.Guard, conv: Any, x: Any, edge_index: Any) -> Graph | None:
    """The graph of a usual call on CUDA, of features that are those of sources and destinations."""
    if not isinstance(x, Tensor) or not x.is_cuda or not short.is_matrix(x) or not guard.allows(conv, edge_index):
        return None
    if x.dtype == torch.float16 or x.device != edge_index.device or torch.is_autocast_enabled("cuda"):
        return None
    graph = short.graph_of(edge_index, x.shape[0], x.shape[0], conv.flow)
    return graph if graph is not None and messages.is_fused(graph) else None


def gates(conv: Any, kind: str, graph: Graph, x: Tensor) -> Tensor | None:
    """ResGatedGraphConv of a usual call; None where its maps are not PyG's own."""
    if x.dtype == torch.float16 or not messages.is_fused(graph):
        return None
    modules, bias, rooted = conv._modules, conv._parameters["bias"], conv.root_weight
    maps = [modules.get(name) for name in ("lin_key", "lin_query", "lin_value", "lin_skip")[: 3 + rooted]]
    joined = _map(x, *maps, extra_bias=bias if rooted else None)
    if joined is None:
        return None
    start = time.perf_counter()
    out = joined_sum(graph, joined, conv.out_channels, _GATES[not rooted])
    report.record(kind, start)
    return out if rooted or bias is None else out + bias


def _le(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.LEConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        graph = _graph(guard, self, x, edge_index) if edge_weight is None else None
        if graph is not None:
            joined = _map(x, *(self._modules.get(name) for name in ("lin1", "lin2", "lin3")))
            if joined is not None:
                with report.accelerated(guard.kind):
                    return joined_sum(graph, joined, self.out_channels, _LE)
        return general(self, x, edge_index, edge_weight)

    return forward


def _film(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.FiLMConv, (MeanAggregation,))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_type=None):
        modules = self._modules
        usual = self.num_relations <= 1 and type(modules.get("act")) is torch.nn.ReLU and not is_watched(modules["act"])
        graph = _graph(guard, self, x, edge_index) if usual else None
        if graph is not None:
            width = self.out_channels
            skips = _map(x, modules.get("film_skip"), modules.get("lin_skip"))
            joined = None if skips is None else _map(x, self.films[0], self.lins[0])
            if joined is not None and joined.shape[1] == skips.shape[1] == 3 * width:
                beta, gamma, own = skips.split(width, dim=-1)
                own = (gamma * own + beta).relu()
                with report.accelerated(guard.kind):
                    return own + joined_sum(graph, joined, width, _FILM)
        return general(self, x, edge_index, edge_type)

    return forward


_GEN = messages.relu(messages.u("x")), messages.relu(messages.u("x") + messages.e("edge"))


def _gen(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GENConv, (SumAggregation, SoftmaxAggregation))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None, size=None):
        modules = self._modules
        usual = size is None and modules.keys().isdisjoint(("lin_src", "lin_edge", "lin_aggr_out", "lin_dst"))
        usual = usual and "msg_norm" not in modules and (edge_attr is None or short.is_matrix(edge_attr))
        graph = _graph(guard, self, x, edge_index) if usual else None
        if graph is not None and edge_attr is not None:
            alike = edge_attr.shape == (graph.nnz, x.shape[1]) and edge_attr.dtype == x.dtype
            graph = graph if alike and edge_attr.device == x.device else None
        if graph is None:
            return general(self, x, edge_index, edge_attr, size)
        module, operands = modules["aggr_module"], {"x": x}
        if edge_attr is not None:
            operands["edge"] = edge_attr
        message = _GEN[edge_attr is not None] + float(self.eps)
        if type(module) is SumAggregation:
            with report.accelerated(guard.kind):
                out = messages.message_reduce(graph, message, operands)
        elif module.semi_grad or module.channels != 1:
            return general(self, x, edge_index, edge_attr, size)
        else:
            t, score = module.t, message
            if isinstance(t, Tensor):
                operands["t"], score = t, message * messages.c("t")
            elif t != 1:
                score = message * float(t)
            with report.accelerated(guard.kind):
                out = messages.softmax_sum(graph, message, score, operands)
        return modules["mlp"](out + x)

    return forward


_MAKERS = ((pyg_nn.LEConv, _le), (pyg_nn.FiLMConv, _film), (pyg_nn.GENConv, _gen))
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
