"""Forwards of layers whose linear map and sum commute, in the order that reads less: where a user allows it
(`accelerate(model, update_order=True)`), or where a linear map would make a dense tensor of one that keeps few entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric import EdgeIndex, is_compiling
from torch_geometric.nn.conv import gcn_conv as gcn_module

from gnnaccel import ops
from gnnaccel.modules import is_watched
from gnnaccel.pyg_backend.helpers import ours
from gnnaccel.pyg_backend.propagate import obstacle
from gnnaccel.pyg_backend.touch import UNTOLD, keep_edges, kept_edges
from gnnaccel.pyg_backend.touch import nn as pyg_nn


def gcn(original: Callable) -> Callable:
    """GCNConv.forward that sums first and maps the sums, where that reads less. After the forward of PyG 2.8."""

    @functools.wraps(original)
    def forward(self, x, edge_index, edge_weight=None):
        kept = isinstance(x, ops.CBSR) and x.is_compressed and x.k <= self.out_channels
        sums_first = kept or (_may_turn(self, x) and _sum_reads(x) < _mapped_reads(x, self.lin))
        if (
            not sums_first
            or is_compiling()
            or not _is_listed(edge_index)
            or not _commutes(self, pyg_nn.GCNConv, self.lin)
        ):
            return original(self, x, edge_index, edge_weight)
        if self.normalize:
            cache = kept_edges(self)
            if cache is UNTOLD:
                return original(self, x, edge_index, edge_weight)
            if cache is None:
                cache = ours(gcn_module.gcn_norm)(
                    edge_index, edge_weight, len(x), self.improved, self.add_self_loops, self.flow, x.dtype
                )
                if self.cached:
                    keep_edges(self, cache)
            edge_index, edge_weight = cache
        out = self.lin(self.propagate(edge_index, x=x, edge_weight=edge_weight))
        return out if self.bias is None else out + self.bias

    return forward


def sage(original: Callable) -> Callable:
    """SAGEConv.forward that maps first and sums up the result, where that reads less. After the forward of PyG 2.8."""

    @functools.wraps(original)
    def forward(self, x, edge_index, size=None):
        source, own = _pair(x)
        if self.project or not _maps_first(self, source, edge_index, pyg_nn.SAGEConv, self.lin_l):
            return original(self, x, edge_index, size)
        out = self.propagate(edge_index, x=(F.linear(source, self.lin_l.weight), own), size=size)
        out = out if self.lin_l.bias is None else out + self.lin_l.bias
        if self.root_weight and own is not None:
            out = out + self.lin_r(own)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    return forward


def graph_conv(original: Callable) -> Callable:
    """GraphConv.forward, as `sage`. After the forward of PyG 2.8."""

    @functools.wraps(original)
    def forward(self, x, edge_index, edge_weight=None, size=None):
        source, own = _pair(x)
        if not _maps_first(self, source, edge_index, pyg_nn.GraphConv, self.lin_rel):
            return original(self, x, edge_index, edge_weight, size)
        mapped = F.linear(source, self.lin_rel.weight)
        out = self.propagate(edge_index, x=(mapped, own), edge_weight=edge_weight, size=size)
        out = out if self.lin_rel.bias is None else out + self.lin_rel.bias
        return out if own is None else out + self.lin_root(own)

    return forward


def _pair(x) -> tuple:
    """Features of sources and destinations; of what a layer does not take, nothing, so that PyG says so."""
    if isinstance(x, Tensor):
        return x, x
    return x if isinstance(x, tuple) and len(x) == 2 else (None, None)


ALLOWED = "_gnnaccel_update_order"  # attribute of a layer that may take map and sum in the cheaper order


def _may_turn(conv: Any, x) -> bool:
    """True if the user allows the other order for this layer, and x is features it can be asked for."""
    if is_compiling() or not vars(conv).get(ALLOWED) or type(x) not in (Tensor, torch.nn.Parameter) or x.dim() != 2:
        return False
    return x.is_floating_point() and not torch.is_autocast_enabled(x.device.type)


def _sum_reads(x: Tensor) -> int:
    """Numbers that sums of x read for each edge, forward and backward; for lin's result: `_mapped_reads`."""
    return x.shape[1] * (1 + (torch.is_grad_enabled() and x.requires_grad))


def _mapped_reads(x: Tensor, lin: Any) -> int:
    return lin.out_channels * (1 + (torch.is_grad_enabled() and (x.requires_grad or lin.weight.requires_grad)))


def _maps_first(conv: Any, x, edge_index, cls: type, lin: Any) -> bool:
    """True for a layer that sums and then maps, if it is to map first."""
    if not _may_turn(conv, x) or not _is_listed(edge_index):
        return False
    return _mapped_reads(x, lin) < _sum_reads(x) and _commutes(conv, cls, lin)


def _is_listed(edge_index) -> bool:
    return type(edge_index) in (Tensor, EdgeIndex) and edge_index.layout is torch.strided


_LINEAR_PARTS = ("message", "message_and_aggregate", "aggregate", "update", "edge_update")


def _commutes(conv: Any, cls: type, lin: Any) -> bool:
    """True for a `cls` whose propagate() sums up weighted rows, and whose linear map is a matrix product that nobody
    watches, as one that is to find its width does; GCNConv's has no bias of its own, which sums would weight."""
    if obstacle(conv) is not None:
        return False
    if type(conv.aggr_module) not in (pyg_nn.SumAggregation, pyg_nn.MeanAggregation) or is_watched(conv.aggr_module):
        return False
    plain = type(conv)._gnnaccel_plain
    if any(getattr(plain, part) is not getattr(cls, part) for part in _LINEAR_PARTS):
        return False
    return type(lin) is pyg_nn.Linear and not is_watched(lin) and (cls is not pyg_nn.GCNConv or lin.bias is None)


FORWARDS: dict[Callable, Callable] = {
    pyg_nn.GCNConv.forward: gcn,
    pyg_nn.SAGEConv.forward: sage,
    pyg_nn.GraphConv.forward: graph_conv,
}
"""forward() -> what makes ours of it."""
