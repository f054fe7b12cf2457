"""Forwards of PyG's layers that sum, from forward() straight to one op; after those of PyG 2.8.

Each maker takes the layer's class and its general forward(), which goes through propagate(), and which a call that is
in any way unusual takes. Where the layer adds a bias after its sum, or itself before, the op does that in its pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric import nn as pyg_nn

from gnnaccel import ops, report
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy import blocks
from gnnaccel.lazy.reduce import takes
from gnnaccel.modules import is_watched
from gnnaccel.ops import messages
from gnnaccel.pyg_backend import norms, short
from gnnaccel.pyg_backend.rules import REDUCES
from gnnaccel.pyg_backend.update_order import ALLOWED


def _gcn(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GCNConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None):
        state, modules, parameters = self.__dict__, self._modules, self._parameters
        usual = (
            edge_weight is None and short.is_matrix(x) and x.dtype in norms.DTYPES and guard.allows(self, edge_index)
        )
        if not usual or not self.normalize or ALLOWED in state or "bias" not in parameters:
            return general(self, x, edge_index, edge_weight)
        edges, flow, cache = edge_index, self.flow, self._cached_edge_index
        alike = x.device == edge_index.device and short.are_linear(modules.get("lin"))
        if not alike or torch.is_autocast_enabled(x.device.type):
            return general(self, x, edge_index, edge_weight)
        if cache is not None:
            edges, weight = cache
            graph = short.graph_of(edges, x.shape[0], x.shape[0], flow)
            fits = graph is not None and weight.dim() == 1 and weight.dtype == x.dtype and len(weight) == graph.nnz
            if not fits:
                return general(self, x, edge_index, edge_weight)
        elif self.cached or self.improved:
            return general(self, x, edge_index, edge_weight)
        else:
            found = short.normed(edge_index, x.shape[0], flow, self.add_self_loops, x.dtype)
            if found is None:
                return general(self, x, edge_index, edge_weight)
            graph, scale = found
        h, bias = modules["lin"](x), parameters["bias"]
        with report.accelerated(guard.kind):
            if cache is not None:
                return norms.weighted_sum(graph, h, edges, weight, flow, bias)
            return norms.scaled_sum(graph, h, scale, bias)

    return forward


def _sage(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.SAGEConv, tuple(REDUCES))

    @functools.wraps(general)
    def forward(self, x, edge_index, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        state, modules = self.__dict__, self._modules
        found = None
        if size is None and guard.allows(self, edge_index) and not self.project and ALLOWED not in state:
            found = _neighbours(self, x, edge_index)
        if found is None or "lin_l" not in modules or (self.root_weight and "lin_r" not in modules):
            return general(self, x, edge_index, size)
        with report.accelerated(guard.kind):
            out = ops.spmm(*found, reduce=REDUCES[type(modules["aggr_module"])])
        out = modules["lin_l"](out)
        if self.root_weight and own is not None:
            out = out + modules["lin_r"](own)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    return forward


def _graph_conv(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GraphConv, tuple(REDUCES))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_weight=None, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        modules, found = self._modules, None
        usual = size is None and (edge_weight is None or (takes(edge_weight) and edge_weight.dim() == 1))
        if usual and guard.allows(self, edge_index) and ALLOWED not in self.__dict__:
            found = _neighbours(self, x, edge_index)
        if found is None or not modules.keys() >= {"lin_rel", "lin_root"} or not _fits(edge_weight, *found):
            return general(self, x, edge_index, edge_weight, size)
        with report.accelerated(guard.kind):
            out = ops.spmm(*found, edge_weight, reduce=REDUCES[type(modules["aggr_module"])])
        out = modules["lin_rel"](out)
        return out if own is None else out + modules["lin_root"](own)

    return forward


def _fits(edge_weight: Tensor | None, graph: Graph, x: Tensor) -> bool:
    if edge_weight is None:
        return True
    return edge_weight.shape[0] == graph.nnz and edge_weight.dtype == x.dtype and edge_weight.device == x.device


def _gin(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GINConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        modules, found, eps = self._modules, None, None
        if size is None and guard.allows(self, edge_index) and "nn" in modules:
            found, eps = _neighbours(self, x, edge_index), short.number(self._buffers.get("eps"))
        if found is None or eps is None or own is None or self._buffers["eps"].dtype != own.dtype:
            return general(self, x, edge_index, size)
        graph, source = found
        # A layer's own feature that counts as much as a neighbour's is one more of these.
        more = short.looped(edge_index, len(own), self.flow, "more") if eps == 0 and own is source else None
        with report.accelerated(guard.kind):
            out = ops.spmm(graph if more is None else more, source)
        return modules["nn"](out if more is not None else torch.add(out, own, alpha=1 + eps))

    return forward


_GINE = messages.relu(messages.u("x") + messages.e("edge"))


def _gine(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GINEConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None, size=None):
        own = x[1] if type(x) is tuple and len(x) == 2 else x
        modules, found, eps = self._modules, None, None
        usual = size is None and short.is_matrix(edge_attr) and edge_attr.is_cpu and guard.allows(self, edge_index)
        lin = modules.get("lin")
        if usual and "nn" in modules and (lin is None or short.are_linear(lin)):
            found, eps = _neighbours(self, x, edge_index), short.number(self._buffers.get("eps"))
        unusual = found is None or eps is None or own is None or self._buffers["eps"].dtype != own.dtype
        if unusual or torch.is_autocast_enabled("cpu"):
            return general(self, x, edge_index, edge_attr, size)
        graph, source = found
        edge = edge_attr if lin is None else lin(edge_attr)
        if edge.shape != (graph.nnz, source.shape[1]) or edge.dtype != source.dtype:
            return general(self, x, edge_index, edge_attr, size)
        with report.accelerated(guard.kind):
            out = ops.message_reduce(graph, _GINE, {"x": source, "edge": edge})
        return modules["nn"](torch.add(out, own, alpha=1 + eps))

    return forward


def _res_gated(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.ResGatedGraphConv)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None):
        source, own = x if type(x) is tuple and len(x) == 2 else (x, x)
        modules, parameters, found = self._modules, self._parameters, None
        maps = [modules.get(name) for name in ("lin_key", "lin_query", "lin_value")]
        usual = edge_attr is None and guard.allows(self, edge_index) and self.edge_dim is None
        if usual and "bias" in parameters and short.are_linear(*maps):
            act = modules.get("act")
            if type(act) is torch.nn.Sigmoid and not is_watched(act) and own is not None:
                found = _neighbours(self, (source, own), edge_index)
        # On CUDA gates are stored as long as PyG's messages may be, and made again in blocks beyond that.
        alike = found is not None and source.dtype == own.dtype
        if not alike or torch.is_autocast_enabled(source.device.type) or not _stores(self, *found):
            return general(self, x, edge_index, edge_attr)
        key, query, value = maps[0](own), maps[1](source), maps[2](source)
        with report.accelerated(guard.kind):
            out = ops.gated_sum(found[0], query, key, value)
        bias = parameters["bias"]
        if self.root_weight:
            skip = modules["lin_skip"]
            if bias is not None and type(skip) is pyg_nn.Linear and skip.bias is None and not is_watched(skip):
                return out + F.linear(own, skip.weight, bias)  # the bias costs no pass of its own there
            out = out + skip(own)
        return out if bias is None else out + bias

    return forward


def _stores(conv: Any, graph: Graph, x: Tensor) -> bool:
    """True if a tensor with a row of the layer's width for each edge may be kept, or need not be."""
    return x.is_cpu or graph.nnz * conv.out_channels * x.element_size() <= blocks.STORED_BYTES.get(x.device.type, 0)


def _neighbours(conv: Any, x: Any, edge_index: Tensor) -> tuple[Graph, Tensor] | None:
    """The graph and the features that a sum over sources reads; None where they are not plain matrices."""
    source, own = x if type(x) is tuple and len(x) == 2 else (x, x)
    if not short.is_matrix(source) or source.device != edge_index.device:
        return None
    if own is source:
        graph = short.graph_of(edge_index, source.shape[0], source.shape[0], conv.flow)
    elif not short.is_matrix(own) or own.device != source.device or conv.flow != "source_to_target":
        return None
    else:
        graph = short.graph_of(edge_index, source.shape[0], own.shape[0], conv.flow)
    return None if graph is None else (graph, source)


_MAKERS = (
    (pyg_nn.GCNConv, _gcn),
    (pyg_nn.SAGEConv, _sage),
    (pyg_nn.GraphConv, _graph_conv),
    (pyg_nn.GINConv, _gin),
    (pyg_nn.GINEConv, _gine),
    (pyg_nn.ResGatedGraphConv, _res_gated),
)
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
