"""Forwards of PyG's attention layers over edges of several types: RGATConv and HEATConv without a matrix or a feature
for an edge; after those of PyG 2.8. As forwards.py has them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import ops, report
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.ops._relations import both_pairs_of
from gnnaccel.ops.segment_matmul import matmul_op
from gnnaccel.ops.typed_matmul import order_of
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.call import note_outcome, plainly
from gnnaccel.pyg_backend.propagate import FEW, are_few
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.pyg_backend.touch import set_alpha
from gnnaccel.touch import submodules

_DTYPES = (torch.float32, torch.float64)
_TYPES = (torch.int64, torch.int32)


def _rgat(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.RGATConv, node_dims=(0,))

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_type=None, edge_attr=None, size=None, return_attention_weights=None):
        graph = None
        unshown = size is None and return_attention_weights is None and self.num_bases != 0  # PyG says what that does
        if unshown and guard.allows(self, edge_index) and _fits(self, edge_attr):
            if are_few(self, plain, edge_index, {"x": x}):
                note_outcome(self, left=True)
                return plainly(plain.forward, self, FEW, x, edge_index, edge_type, edge_attr)
            usual = _are_plain(x, edge_type, edge_attr, edge_index, list(self.parameters()))
            if usual and x.shape[1] == self.in_channels:
                graph = short.graph_of(edge_index, x.shape[0], x.shape[0], self.flow)
        if graph is None or not graph.nnz:
            return general(self, x, edge_index, edge_type, edge_attr, size, return_attention_weights)
        start = time.perf_counter()
        out = _rgat_sums(self, graph, x, edge_type, edge_attr)
        report.record(guard.kind, start)
        set_alpha(self, None)
        return self.update(out)

    return forward


def _are_plain(x, edge_type, edge_attr, edge_index: Tensor, parameters: list[Tensor]) -> bool:
    """True for features, types and attributes as ops take them, all of one dtype and device."""
    if not short.is_matrix(x) or x.dtype not in _DTYPES or torch.is_autocast_enabled(x.device.type):
        return False
    if type(edge_type) is not Tensor or edge_type.dtype not in _TYPES or edge_type.shape != edge_index.shape[1:]:
        return False
    given = [x, *parameters] if edge_attr is None else [x, edge_attr, *parameters]
    if any(type(t) not in short.FEATURES or t.dtype != x.dtype or t.device != x.device for t in given):
        return False
    return edge_index.device == edge_type.device == x.device


def _fits(conv: Any, edge_attr: Tensor | None) -> bool:
    """True for no edge attributes, or those that the layer was made for."""
    if edge_attr is None:
        return True
    if type(edge_attr) not in short.FEATURES:
        return False
    lin = short.parameters_of(submodules(conv).get("lin_edge"))
    width = edge_attr.shape[1] if edge_attr.dim() == 2 else 1 if edge_attr.dim() == 1 else -1
    return lin is not None and lin[1] is None and width == conv.edge_dim


def _rgat_sums(conv: Any, graph: Graph, x: Tensor, edge_type: Tensor, edge_attr: Tensor | None) -> Tensor:
    """[N, heads, out], or [N, heads, dim, out]: what update() takes.

    Sources and destinations are mapped once for each relation that they have edges of; edges have a number for each
    head, as PyG's have, whose dropout draws the same.
    """
    pairs = both_pairs_of("RGATConv", graph, edge_type, conv.num_relations)
    weight, queries = _rgat_weights(conv)
    mapped = matmul_op(ops.spmm(pairs.sources.gather, x), pairs.sources.ptr, weight)
    query = matmul_op(ops.spmm(pairs.targets.gather, x), pairs.targets.ptr, queries)
    additive = conv.attention_mode == "additive-self-attention"
    scores = ops.sddmm(pairs.between, mapped @ conv.k, query, "add" if additive else "mul", "u", "v")
    if edge_attr is not None:
        of_edges = edge_attr.view(edge_attr.shape[0], -1) @ (conv.lin_edge.weight.t() @ conv.e)
        scores = scores + of_edges if additive else scores * of_edges
    if additive:
        scores = F.leaky_relu(scores, conv.negative_slope)
    alpha = ops.edge_softmax(pairs.between if conv.attention_mechanism == "within-relation" else graph, scores)
    if conv.mod == "f-additive":
        alpha = torch.where(alpha > 0, alpha + 1, alpha)
    elif conv.mod is None:
        alpha = F.dropout(alpha, conv.dropout, conv.training)
    heads, edges = mapped.view(-1, conv.heads, conv.out_channels), pairs.sources.graph
    each = alpha.view(-1, conv.heads, conv.dim)
    sums = [ops.spmm(edges, heads, each[:, :, d].contiguous()) for d in range(conv.dim)]
    if conv.mod == "additive":
        whole = conv.w * ops.spmm(edges, heads)
        sums = [part + whole for part in sums]
    out = sums[0] if additive else torch.stack(sums, 2)
    if conv.mod in ("scaled", "f-scaled"):
        degree = graph.indptr.diff().to(x.dtype).unsqueeze(1)
        if conv.mod == "scaled":
            degree = conv.activation(degree @ conv.l1 + conv.b1) @ conv.l2 + conv.b2
        out = out * degree.view(-1, *(1,) * (out.dim() - 2), degree.shape[1])
    return out


def _rgat_weights(conv: Any) -> tuple[Tensor, Tensor]:
    """Matrices of the relations, and the same times q: [relations, in, heads * dim]."""
    count, inputs = conv.num_relations, conv.in_channels
    if conv.num_blocks is not None:
        blocks = conv.weight
        q = conv.q.view(conv.num_blocks, -1, conv.q.shape[1])
        return blocks, (blocks @ q).view(count, inputs, -1)
    weight = conv.weight if conv.num_bases is None else (conv.att @ conv.basis.flatten(1)).view(count, inputs, -1)
    return weight, weight @ conv.q


def _heat(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.HEATConv, node_dims=(0,))

    @functools.wraps(general)
    def forward(self, x, edge_index, node_type, edge_type, edge_attr=None):
        graph, maps = None, _heat_maps(self)
        usual = maps is not None and edge_attr is not None and guard.allows(self, edge_index)
        if usual and _types_rows(self, x, node_type):
            if are_few(self, plain, edge_index, {"x": x}):
                note_outcome(self, left=True)
                return plainly(plain.forward, self, FEW, x, edge_index, node_type, edge_type, edge_attr)
            plain_call = _are_plain(x, edge_type, edge_attr, edge_index, list(self.parameters()))
            if plain_call and edge_attr.dim() == 2 and edge_attr.shape == (edge_index.shape[1], maps[2].shape[1]):
                graph = short.graph_of(edge_index, x.shape[0], x.shape[0], self.flow)
        if graph is None or not graph.nnz:
            return general(self, x, edge_index, node_type, edge_type, edge_attr)
        x = self.hetero_lin(x, node_type)
        start = time.perf_counter()
        out = _heat_sums(self, graph, _edges_of(edge_index, graph, self.flow), x, edge_type, edge_attr, maps)
        report.record(guard.kind, start)
        if self.concat:
            out = out + x.unsqueeze(1) if self.root_weight else out
            return out.view(-1, self.heads * self.out_channels)
        out = out.mean(dim=1)
        return out + x if self.root_weight else out

    return forward


def _types_rows(conv: Any, x: Any, node_type: Any) -> bool:
    """True if hetero_lin gives a row for each of x."""
    lin = submodules(conv).get("hetero_lin")
    if type(lin) is not pyg_nn.HeteroLinear or short.hooked(lin):
        return False
    return isinstance(x, Tensor) and isinstance(node_type, Tensor) and node_type.shape == x.shape[:1]


def _heat_maps(conv: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None:
    """The table of edge types, the weights of att and edge_attr_emb, and those of lin with its bias; None if any is not
    as PyG has it."""
    table = submodules(conv).get("edge_type_emb")
    if type(table) is not torch.nn.Embedding or short.hooked(table) or table.max_norm is not None or table.sparse:
        return None
    if table.padding_idx is not None or table.scale_grad_by_freq:
        return None
    att, emb, lin = (short.parameters_of(submodules(conv).get(name)) for name in ("att", "edge_attr_emb", "lin"))
    if att is None or emb is None or lin is None or att[1] is not None or emb[1] is not None:
        return None
    return table.weight, att[0], emb[0], *lin


def _edges_of(edge_index: Tensor, graph: Graph, flow: str) -> Graph:
    """Destinations x edges, kept with edge_index."""
    key = ("edges of destinations", graph.num_rows, flow)
    found = derived.get((edge_index,), key)
    if found is None:
        ids = graph.edge_ids
        ids = torch.arange(graph.nnz, dtype=graph.indices.dtype, device=graph.device) if ids is None else ids
        found = Graph(graph.indptr.clone(), ids.clone(), ids.clone(), graph.nnz)
        derived.put((edge_index,), key, found)
    return found


def _heat_sums(conv: Any, graph: Graph, edges: Graph, x: Tensor, edge_type: Tensor, edge_attr: Tensor, maps: tuple):
    """[N, heads, out]: PyG's sums of linear maps of [x_j, edge attributes], of which each is mapped by itself."""
    table, att, emb, lin, bias = maps
    attributes = F.leaky_relu(F.linear(edge_attr, emb), conv.negative_slope)
    outputs, wide = conv.out_channels, attributes.shape[1]
    of_target, of_source, of_type, of_attributes = att.split([outputs, outputs, table.shape[1], wide], 1)
    types = order_of("HEATConv", "edge_type", edge_type, table.shape[0]).graph
    scores = ops.sddmm(graph, F.linear(x, of_source), F.linear(x, of_target), "add", "u", "v")
    assert types is not None
    scores = scores + ops.spmm(types, F.linear(F.leaky_relu(table, conv.negative_slope), of_type))
    scores = F.leaky_relu(scores + F.linear(attributes, of_attributes), conv.negative_slope)
    alpha = F.dropout(ops.edge_softmax(graph, scores), conv.dropout, conv.training)
    for_source, for_attributes = lin.split([outputs, wide], 1)
    value, parts = F.linear(x, for_source, bias), []
    for head in alpha.unbind(1):
        weight = head.contiguous()
        parts.append(ops.spmm(graph, value, weight) + F.linear(ops.spmm(edges, attributes, weight), for_attributes))
    return torch.stack(parts, 1)


_MAKERS = ((pyg_nn.RGATConv, _rgat), (pyg_nn.HEATConv, _heat))
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
