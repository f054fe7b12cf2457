"""Forwards of layers that do more for each node than they need to: GATConv's scores, and GCNConv's linear map where it
would make a dense tensor of one that keeps few entries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn import Linear
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.nn.conv import GATConv, GCNConv
from torch_geometric.nn.conv import gat_conv as module
from torch_geometric.nn.conv import gcn_conv as gcn_module

from gnnaccel import ops
from gnnaccel.modules import is_watched
from gnnaccel.pyg_backend.helpers import ours
from gnnaccel.pyg_backend.propagate import obstacle
from gnnaccel.pyg_backend.reduce import takes


def gat(original: Callable) -> Callable:
    """GATConv.forward with the two scores of a node from one pass over its features, where sources and destinations are
    the same nodes: PyG's makes and keeps two tensors of the features' size for them. After the forward of PyG 2.8."""

    @functools.wraps(original)
    def forward(self, x, edge_index, edge_attr=None, size=None, return_attention_weights=None):
        if return_attention_weights is not None or not _is_plain(self, x, edge_index):
            return original(self, x, edge_index, edge_attr, size, return_attention_weights)
        res = None if self.res is None else self.res(x)
        x = self.lin(x).view(-1, self.heads, self.out_channels)
        scores = _scores(x, self.att_src, self.att_dst)
        if self.add_self_loops:
            edge_index, edge_attr = ours(module.remove_self_loops)(edge_index, edge_attr)
            edge_index, edge_attr = ours(module.add_self_loops)(
                edge_index, edge_attr, fill_value=self.fill_value, num_nodes=len(x) if size is None else min(size)
            )
        alpha = self.edge_updater(edge_index, alpha=scores, edge_attr=edge_attr, size=size)
        out = self.propagate(edge_index, x=(x, x), alpha=alpha, size=size)
        out = out.view(-1, self.heads * self.out_channels) if self.concat else out.mean(1)
        for term in (res, self.bias):
            if term is not None:
                out = out + term
        return out

    return forward


def gcn(original: Callable) -> Callable:
    """GCNConv.forward that sums up the entries of a CBSR tensor and maps the sums, where entries are fewer than mapped
    features: the two commute. After the forward of PyG 2.8."""

    @functools.wraps(original)
    def forward(self, x, edge_index, edge_weight=None):
        kept = isinstance(x, ops.CBSR) and x.is_compressed and x.k <= self.out_channels
        plain = kept and type(edge_index) in (Tensor, EdgeIndex) and edge_index.layout is torch.strided
        if not plain or is_compiling() or obstacle(self) is not None or not _commutes(self):
            return original(self, x, edge_index, edge_weight)
        if self.normalize:
            cache = self._cached_edge_index
            if cache is None:
                cache = ours(gcn_module.gcn_norm)(
                    edge_index, edge_weight, len(x), self.improved, self.add_self_loops, self.flow, x.dtype
                )
                if self.cached:
                    self._cached_edge_index = cache
            edge_index, edge_weight = cache
        out = self.lin(self.propagate(edge_index, x=x, edge_weight=edge_weight))
        return out if self.bias is None else out + self.bias

    return forward


_LINEAR_PARTS = ("message", "message_and_aggregate", "aggregate", "update", "edge_update")


def _commutes(conv: Any) -> bool:
    """True for a GCNConv whose propagate() sums up weighted rows, and whose linear map is a matrix product alone."""
    if type(conv.aggr_module) not in (SumAggregation, MeanAggregation) or is_watched(conv.aggr_module):
        return False
    plain = type(conv)._gnnaccel_plain
    if any(getattr(plain, part) is not getattr(GCNConv, part) for part in _LINEAR_PARTS):
        return False
    return type(conv.lin) is Linear and conv.lin.bias is None and not is_watched(conv.lin)


def _is_plain(conv: Any, x, edge_index) -> bool:
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.dim() == 2
        and type(edge_index) in (Tensor, EdgeIndex)
        and edge_index.layout is torch.strided
        and getattr(conv, "lin", None) is not None
        and hasattr(conv, "res")
        and not is_compiling()
        and obstacle(conv) is None
    )


def _scores(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """<x[n, h], vector[h]> for each vector [1, H, C]: [N, H] each."""
    same = all(v.dtype == x.dtype and v.device == x.device and v.shape == (1, *x.shape[1:]) for v in vectors)
    if same and takes(x) and not torch.is_autocast_enabled(x.device.type):
        return ops.head_dots(x, torch.cat(vectors)).unbind()
    return tuple((x * v).sum(-1) for v in vectors)


FORWARDS: dict[Callable, Callable] = {GATConv.forward: gat, GCNConv.forward: gcn}
"""forward() -> what makes ours of it."""
