"""Forwards of PyG's layers that are one op: those whose messages are of several linear maps of the same features, and
on CUDA GENConv's sums, which are of the features themselves. After those of PyG 2.8.

A call that is in any way unusual takes the general forward(), with the same result.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gnnaccel import report
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds, choose
from gnnaccel.modules import is_watched
from gnnaccel.ops import messages
from gnnaccel.ops.joined_maps import joined_maps
from gnnaccel.ops.joined_sums import FILM, GATED, GATED_SKIP, LE, Parts, gen, joined_sum
from gnnaccel.ops.mapped_sums import mapped_sum
from gnnaccel.pyg_backend import mlps, short
from gnnaccel.pyg_backend.propagate import are_few
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import own_parameters, submodules


def _maps(
    x: Tensor, modules: Sequence[Any], widths: Sequence[int] | None, extra_bias: Tensor | None = None
) -> list[tuple[Tensor, Tensor | None]] | None:
    """Weights and biases of linear maps of `x` to so many features (None: to any), `extra_bias` as that of the last;
    None where they are not as PyG makes them: of others messages may broadcast the results."""
    found = []
    for i, lin in enumerate(modules):
        pair = short.parameters_of(lin)
        if pair is None or pair[0].shape[1] != x.shape[1] or pair[0].dtype != x.dtype:
            return None
        if widths is not None and len(pair[0]) != widths[i]:
            return None
        found.append(pair)
    if extra_bias is not None:
        if found[-1][1] is not None:
            return None
        found[-1] = (found[-1][0], extra_bias)
    return found


_APART = 3  # maps whose results kernels read: columns of one matrix they would copy in both directions


def side_by_side(x: Tensor, *modules: Any) -> tuple[Tensor, ...] | None:
    """The linear maps of `x` on CUDA by one product; None where they are to be called one by one.

    A product and its gradients for all, and under autocast one cast of x, of the weights and of the biases.
    TransformerConv of 64 features on a million edges, an H200: 41 to 29 kernels a step and no less time in float32, 62
    to 39 and 1.88 to 1.68 ms under autocast. Of the two maps of GATv2Conv copies take longer than what they save.
    """
    if not x.is_cuda:
        return None
    maps = [short.parameters_of(lin) for lin in modules]
    return None if None in maps else joined_maps(x, maps, _APART)  # type: ignore[arg-type]


def _graph(guard: short.Guard, conv: Any, x: Any, edge_index: Any, on_cpu: bool = False) -> Graph | None:
    """The graph of a usual call on CUDA, or with `on_cpu` one of many messages on the CPU, of features that are those
    of sources and destinations."""
    if not isinstance(x, Tensor) or not (x.is_cuda or (on_cpu and x.is_cpu)):
        return None
    if not short.is_matrix(x) or not guard.allows(conv, edge_index):
        return None
    if x.dtype == torch.float16 or x.device != edge_index.device or torch.is_autocast_enabled(x.device.type):
        return None
    if x.is_cpu and choose.are_few(device="cpu", edges=edge_index.shape[1], nodes=x.shape[0], width=conv.out_channels):
        return None
    graph = short.graph_of(edge_index, x.shape[0], x.shape[0], conv.flow)
    return graph if graph is not None and messages.is_fused(graph) else None


def _summed(
    guard: short.Guard, graph: Graph, x: Tensor, maps: list | None, num_feats: int, form: Parts
) -> Tensor | None:
    """The layer of a form; None where its maps are not PyG's own."""
    if maps is None:
        return None
    start = time.perf_counter()
    out = (joined_sum if x.is_cuda else mapped_sum)(graph, x, maps, num_feats, form)
    if out is not None:
        report.record(guard.kind, start)
    return out


def gates(conv: Any, kind: str, graph: Graph, x: Tensor) -> Tensor | None:
    """ResGatedGraphConv of a usual call; None where its maps are not PyG's own."""
    modules, bias, rooted = submodules(conv), own_parameters(conv).get("bias"), conv.root_weight
    names = ("lin_key", "lin_query", "lin_value", "lin_skip")[: 3 + rooted]
    widths = (conv.out_channels,) * len(names)
    maps = _maps(x, [modules.get(name) for name in names], widths, bias if rooted else None)
    if maps is None:
        return None
    start = time.perf_counter()
    out = joined_sum(graph, x, maps, conv.out_channels, GATED_SKIP if rooted else GATED)
    if out is None:
        return None
    report.record(kind, start)
    return out if rooted or bias is None else out + bias


def _le(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.LEConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        graph = _graph(guard, self, x, edge_index, True) if edge_weight is None else None
        if graph is not None:
            modules = [submodules(self).get(name) for name in ("lin1", "lin2", "lin3")]
            maps = _maps(x, modules, (self.out_channels,) * 3)
            out = _summed(guard, graph, x, maps, self.out_channels, LE)
            if out is not None:
                return out
        return general(self, x, edge_index, edge_weight)

    return forward


def _film(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.FiLMConv, (pyg_nn.MeanAggregation,))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_type=None):
        modules = submodules(self)
        usual = self.num_relations <= 1 and type(modules.get("act")) is torch.nn.ReLU and not is_watched(modules["act"])
        graph = _graph(guard, self, x, edge_index, True) if usual else None
        if graph is not None:
            out_channels = self.out_channels
            linear = (modules.get("film_skip"), modules.get("lin_skip"), self.films[0], self.lins[0])
            maps = _maps(x, linear, (2 * out_channels, out_channels) * 2)
            out = _summed(guard, graph, x, maps, out_channels, FILM)
            if out is not None:
                return out
        return general(self, x, edge_index, edge_type)

    return forward


def _gen(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GENConv, (pyg_nn.SumAggregation, pyg_nn.SoftmaxAggregation))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None, size=None):
        modules = submodules(self)
        if torch.compiler.is_compiling():
            return general(self, x, edge_index, edge_attr, size)
        usual = size is None and modules.keys().isdisjoint(("lin_src", "lin_edge", "lin_aggr_out", "lin_dst"))
        usual = usual and "msg_norm" not in modules and type(self.eps) in (int, float)
        usual = usual and (edge_attr is None or short.is_matrix(edge_attr))
        graph = _graph(guard, self, x, edge_index) if usual else None
        if graph is not None and are_few(self, plain, edge_index, {"x": x}, times=bounds.COUNTS_GEN):
            graph = None
        if graph is not None and edge_attr is not None:
            alike = edge_attr.shape == (graph.nnz, x.shape[1]) and edge_attr.dtype == x.dtype
            graph = graph if alike and edge_attr.device == x.device else None
        if graph is None:
            return general(self, x, edge_index, edge_attr, size)
        module, operands, form = modules["aggr_module"], {"x": x}, gen(float(self.eps), edge_attr is not None)
        if type(module) is pyg_nn.SumAggregation:
            start = time.perf_counter()
            out = joined_sum(graph, x, (), x.shape[1], form, edge_attr)
            if out is not None:
                report.record(guard.kind, start)
                return mlps.mapped(modules["mlp"], out)
        if edge_attr is not None:
            operands["edge"] = edge_attr
        message = form.message
        if type(module) is pyg_nn.SumAggregation:
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
        return mlps.mapped(modules["mlp"], out + x)

    return forward


_MAKERS = ((pyg_nn.LEConv, _le), (pyg_nn.FiLMConv, _film), (pyg_nn.GENConv, _gen))
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
