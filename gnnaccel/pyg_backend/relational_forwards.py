"""Forwards of PyG's layers with a matrix for each type of edges, by one op; after those of PyG 2.8. As forwards.py has
them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import report
from gnnaccel.graph.csr import Graph
from gnnaccel.ops.relational import Own, relational_layer
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.rules import REDUCES
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import submodules

_SUMS = (pyg_nn.SumAggregation, pyg_nn.MeanAggregation)
_DTYPES = (torch.float32, torch.float64)
_TYPES = (torch.int64, torch.int32)


def _rgcn(known: Any, aggregations: tuple[type, ...]) -> Callable:
    def maker(plain: Any, general: Callable) -> Callable:
        guard = short.Guard(plain, known, aggregations)

        @functools.wraps(general)
        def forward(self, x, edge_index, edge_type=None):
            if not guard.allows(self, edge_index) or not _are_types(edge_type, edge_index):
                return general(self, x, edge_index, edge_type)
            if self.flow != "source_to_target" and isinstance(x, tuple):  # of which PyG takes the ends otherwise
                return general(self, x, edge_index, edge_type)
            reduce, ends = REDUCES[type(submodules(self)["aggr_module"])], _ends(self, x, edge_index.device)
            if ends is None or not _is_usual(self, ends[0], reduce):
                return general(self, x, edge_index, edge_type)
            source, own = ends
            rows = source
            if known is pyg_nn.FastRGCNConv and not source.is_floating_point():  # whose message has the edge's end
                if source.shape[0] > self.in_channels_l:
                    return general(self, x, edge_index, edge_type)
                rows = torch.arange(source.shape[0], device=source.device)
            graph = short.graph_of(edge_index, source.shape[0], own.shape[0], self.flow)
            if graph is None:
                return general(self, x, edge_index, edge_type)
            start = time.perf_counter()
            mapped = self.root is not None and own.is_floating_point()
            try:
                adds = Own(own, self.root, self.bias) if mapped else Own(None, None, None)
                out = _sum(self, graph, rows, edge_type, reduce, adds)
            except IndexError as error:  # where PyG leaves edges of unknown types out, they are left out
                try:
                    return general(self, x, edge_index, edge_type)
                except Exception:
                    raise error from None
            if known is pyg_nn.FastRGCNConv:
                self.fuse = False
            elif self.num_blocks is None:  # an attribute that torch.jit.script asks for, of what PyG finds at each call
                self.__dict__.setdefault("_use_segment_matmul_heuristic_output", False)
            report.record(guard.kind, start)
            if mapped:
                return out
            out = out if self.root is None else out + self.root[own]
            return out if self.bias is None else out + self.bias

        return forward

    return maker


def _are_types(edge_type: Any, edge_index: Tensor) -> bool:
    if type(edge_type) is not Tensor or edge_type.dtype not in _TYPES or edge_type.dim() != 1:
        return False
    return edge_type.shape[0] == edge_index.shape[1] and edge_type.device == edge_index.device


def _ends(conv: Any, x: Any, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Features, or numbers of nodes, of the sources and of the destinations; None where PyG is to see to them."""
    if type(x) is tuple and len(x) != 2:
        return None
    source, own = x if type(x) is tuple else (x, None)
    if source is None:
        source = torch.arange(conv.in_channels_l, device=conv.weight.device)
    own = source if own is None and type(x) is not tuple else own
    ends = source, own
    if any(type(t) not in short.FEATURES or t.device != device for t in ends) or source.dtype != own.dtype:
        return None
    if source.is_floating_point():
        return ends if all(short.is_matrix(t) for t in ends) else None
    return ends if source.dtype is torch.int64 and source.dim() == own.dim() == 1 else None


def _is_usual(conv: Any, source: Tensor, reduce: str) -> bool:
    """True if the op does with these parameters, of one dtype and device, what the layer does with its messages."""
    given = [t for t in (conv.weight, conv.comp, conv.root, conv.bias) if t is not None]
    if any(type(t) not in short.FEATURES or t.device != source.device for t in given):
        return False
    dtype = conv.weight.dtype
    if dtype not in _DTYPES or any(t.dtype != dtype for t in given) or torch.is_autocast_enabled(source.device.type):
        return False
    if conv.num_bases == 0:  # of which PyG says what it does
        return False
    if torch.promote_types(dtype, torch.get_default_dtype()) != dtype:  # which RGCNConv adds to a zero of
        return False
    if source.is_floating_point():
        return source.dtype == dtype and source.shape[1] == conv.in_channels_l
    return conv.num_blocks is None and reduce in ("sum", "mean")


def _sum(conv: Any, graph: Graph, source: Tensor, edge_type: Tensor, reduce: str, own: Own) -> Tensor:
    features, weight = (source, conv.weight) if source.is_floating_point() else (None, conv.weight[:, source])
    return relational_layer(graph, features, edge_type, weight, conv.comp, reduce, own)


_MAKERS = ((pyg_nn.RGCNConv, tuple(REDUCES)), (pyg_nn.FastRGCNConv, _SUMS))
FORWARDS: dict[Callable, Callable] = {layer.forward: _rgcn(layer, kinds) for layer, kinds in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
