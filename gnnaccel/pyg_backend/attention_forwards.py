"""Forwards of PyG's attention layers, from forward() straight to one op, and GATConv's scores from one pass over its
features; after those of PyG 2.8."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn.conv import gat_conv as module

from gnnaccel import ops, report
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy import reduce
from gnnaccel.ops import linear_sums
from gnnaccel.ops.dot_layers import DotLayer, Map
from gnnaccel.ops.gat_layers import GatLayer, How, gat_layers, is_edgeless, takes, without_edges
from gnnaccel.ops.gatv2_layers import Gatv2Layer
from gnnaccel.ops.heads_attention import heads_attention
from gnnaccel.ops.layers import narrow_gat, narrow_gatv2
from gnnaccel.ops.super_gat import super_gat
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.attention import attend, dropped, is_half, summed_dtype, super_gat_vectors
from gnnaccel.pyg_backend.helpers import ours
from gnnaccel.pyg_backend.joined_forwards import side_by_side
from gnnaccel.pyg_backend.propagate import obstacle
from gnnaccel.pyg_backend.touch import EdgeIndex, set_alpha
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import own_buffers, own_parameters, submodules

_NODE_DIMS = (0,)  # of [N, heads, channels]


def _gat(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GATConv, node_dims=_NODE_DIMS)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None, size=None, return_attention_weights=None):
        graph, modules, parameters = None, submodules(self), own_parameters(self)
        usual = not torch.compiler.is_compiling() and edge_attr is size is return_attention_weights is None
        if (usual and modules.get("lin") is None) or type(x) is tuple:
            out = _between(self, guard, x, edge_index) if usual else None
            return general(self, x, edge_index, edge_attr, size, return_attention_weights) if out is None else out
        usual = usual and _is_plain_pair(x, edge_index) and short.are_linear(modules.get("lin"))
        vectors = parameters.get("att_src"), parameters.get("att_dst")
        if usual and "bias" in parameters and all(_is_vector(self, v, x) for v in vectors):
            graph = _looped(self, guard, edge_index, x.shape[0], x.shape[0])
        if graph is None:
            return general(self, x, edge_index, edge_attr, size, return_attention_weights)
        res = None if modules.get("res") is None else modules["res"](x)
        h = modules["lin"](x).view(-1, self.heads, self.out_channels)
        start = time.perf_counter()
        scale = dropped(self, vectors[0], graph.nnz)
        bias = _inner_bias(self, res, vectors[0].dtype)
        out = narrow_gat(graph, h, *vectors, negative_slope=self.negative_slope, edge_scale=scale, bias=bias)
        report.record(guard.kind, start)
        return out if bias is not None else _finished(self, out, res, wide=vectors[0].dtype)

    return forward


def _between(conv: Any, guard: short.Guard, x: Any, edge_index: Any) -> Tensor | None:
    """GATConv between two kinds of nodes; None where the general way is to be taken."""
    pair = x if type(x) is tuple and len(x) == 2 else (x, x)
    if not _are_plain(pair, edge_index) or not edge_index.is_cpu or torch.is_autocast_enabled("cpu"):
        return None
    start = time.perf_counter()
    layer = gat_layer(conv, guard, *pair, edge_index, _graph_between)
    if layer is None:
        return None
    edgeless, how = is_edgeless(layer), How(conv.negative_slope, conv.concat)
    if not (edgeless or takes((layer,))):
        return None
    res = None if submodules(conv).get("res") is None else submodules(conv)["res"](pair[1])
    out = without_edges(layer, how) if edgeless else gat_layers([[layer]], how, _made)[0]
    report.record(guard.kind, start)
    return out if res is None else out + res


def _made(key: Any, make: Callable) -> Any:
    return make()


def _graph_between(edge_index: Tensor, num_src: int, num_dst: int, flow: str, loops: bool) -> Graph | None:
    if loops:
        return short.looped(edge_index, num_src, flow, "one")
    return short.graph_of(edge_index, num_src, num_dst, flow)


def gat_layer(conv: Any, guard: short.Guard, x: Tensor, y: Tensor, edge_index: Tensor, graph_of: Callable) -> Any:
    """What a GATConv does with plain features of its sources and destinations, but for what it adds of `res`; None if
    it does anything else. The graph is that of graph_of(edge_index, num_src, num_dst, flow, loops)."""
    modules, parameters = submodules(conv), own_parameters(conv)
    if conv.flow != "source_to_target" or (conv.dropout > 0 and conv.training) or not guard.allows(conv, edge_index):
        return None
    lin = modules.get("lin")
    names = ("lin_src", "lin_dst") if lin is None else ("lin", "lin")
    maps = []
    for name in names:
        found = short.parameters_of(modules.get(name))
        if found is None or found[1] is not None:
            return None
        maps.append(found[0])
    vectors: Any = (parameters.get("att_src"), parameters.get("att_dst"))
    if "bias" not in parameters or not all(_is_vector(conv, v, x) for v in vectors):
        return None
    if conv.add_self_loops and x is not y:
        return None
    graph = graph_of(edge_index, x.shape[0], y.shape[0], conv.flow, conv.add_self_loops)
    return (
        None if graph is None else GatLayer(graph, x, y, maps[0], maps[1], vectors[0], vectors[1], parameters["bias"])
    )


def _gatv2(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.GATv2Conv, node_dims=_NODE_DIMS)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None, return_attention_weights=None):
        graph, modules, parameters = None, submodules(self), own_parameters(self)
        pair = x if type(x) is tuple and len(x) == 2 else (x, x)
        usual = not torch.compiler.is_compiling() and edge_attr is return_attention_weights is None
        usual = usual and parameters.keys() >= {"att", "bias"}
        usual = usual and _are_plain(pair, edge_index)
        if usual and short.are_linear(modules.get("lin_l"), modules.get("lin_r")):
            graph = _looped(self, guard, edge_index, pair[0].shape[0], pair[1].shape[0])
        shape = -1, self.heads, self.out_channels
        fits = graph is not None and _is_vector(self, parameters["att"], pair[0])
        if not fits or (self.share_weights and pair[0] is not pair[1]):
            return general(self, x, edge_index, edge_attr, return_attention_weights)
        source, target = pair
        res = modules.get("res")
        if source is target and (res is None or short.are_linear(res)):
            # One cast for all maps, and one of what their gradients add up to.
            source = target = source.to(linear_sums.narrow_dtype(source) or source.dtype)
        res = None if res is None else res(target)
        left = modules["lin_l"](source).view(shape)
        right = left if self.share_weights else modules["lin_r"](target).view(shape)
        start = time.perf_counter()
        vectors = parameters["att"].view(shape[1:])
        scale = dropped(self, vectors, graph.nnz)
        how = dict(negative_slope=self.negative_slope, edge_scale=scale, bias=_inner_bias(self, res, vectors.dtype))
        out = narrow_gatv2(graph, left, right, vectors, **how)
        report.record(guard.kind, start)
        return out if how["bias"] is not None else _finished(self, out, res, wide=vectors.dtype)

    return forward


_GET_ATTENTION = pyg_nn.SuperGATConv.get_attention


def _super_gat(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.SuperGATConv, node_dims=_NODE_DIMS)

    @functools.wraps(general)
    def forward(self, x, edge_index, neg_edge_index=None, batch=None):
        graph, modules, parameters = None, submodules(self), own_parameters(self)
        # While it trains it attends to other edges as well, beside these.
        usual = not self.training and not torch.compiler.is_compiling() and _is_plain_pair(x, edge_index)
        usual = usual and plain.get_attention is _GET_ATTENTION and "get_attention" not in self.__dict__
        usual = usual and short.are_linear(modules.get("lin")) and not is_half(x)
        vectors = super_gat_vectors(self, x) if usual and parameters.keys() >= {"att_l", "att_r", "bias"} else None
        if vectors is not None:
            graph = _looped(self, guard, edge_index, x.shape[0], x.shape[0])
        if graph is None:
            return general(self, x, edge_index, neg_edge_index, batch)
        h = modules["lin"](x).view(-1, self.heads, self.out_channels)
        start = time.perf_counter()
        wide = summed_dtype(h, vectors)
        bias = _inner_bias(self, None, wide)
        out = super_gat(graph, h, vectors, negative_slope=self.negative_slope, bias=bias)
        report.record(guard.kind, start)
        return out if bias is not None else _finished(self, out, None, wide=wide)

    return forward


def gatv2_layer(conv: Any, guard: short.Guard, x: Tensor, y: Tensor, edge_index: Tensor, graph: Graph) -> Any:
    """What a GATv2Conv does with plain features of its sources and destinations; None if it does more."""
    modules, parameters = submodules(conv), own_parameters(conv)
    if conv.flow != "source_to_target" or (conv.dropout > 0 and conv.training) or not guard.allows(conv, edge_index):
        return None
    if conv.add_self_loops and x is not y:
        return None
    left, right = (short.parameters_of(modules.get(name)) for name in ("lin_l", "lin_r"))
    vectors, width = parameters.get("att"), conv.heads * conv.out_channels
    if left is None or right is None or "bias" not in parameters or not graph.nnz or not _is_vector(conv, vectors, x):
        return None
    bias, wide = parameters["bias"], width if conv.concat else conv.out_channels
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (wide,)):
        return None
    return Gatv2Layer(graph, x, y, *left, *right, vectors, bias)  # type: ignore[arg-type]


def dot_layer(conv: Any, guard: short.Guard, x: Tensor, y: Tensor, edge_index: Tensor, graph: Graph) -> Any:
    """What a TransformerConv does with plain features of its sources and destinations; None if it does more."""
    modules = submodules(conv)
    if conv.flow != "source_to_target" or conv.beta or (conv.dropout > 0 and conv.training):
        return None
    if modules.get("lin_edge") is not None or not guard.allows(conv, edge_index):
        return None
    width = conv.heads * conv.out_channels
    maps: list[Any] = []
    for name, given in (("lin_query", y), ("lin_key", x), ("lin_value", x), ("lin_skip", y)):
        if name == "lin_skip" and not conv.root_weight:
            maps.append(None)
            continue
        found = short.parameters_of(modules.get(name))
        wide = width if name != "lin_skip" or conv.concat else conv.out_channels
        if found is None or found[0].shape != (wide, given.shape[1]) or found[0].dtype != x.dtype:
            return None
        if found[1] is not None and found[1].dtype != x.dtype:
            return None
        maps.append(Map(*found))
    return DotLayer(graph, x, y, *maps)


def _transformer(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.TransformerConv, node_dims=_NODE_DIMS)

    @functools.wraps(general)
    def forward(self, x, edge_index, edge_attr=None, return_attention_weights=None):
        graph, modules = None, submodules(self)
        pair = x if type(x) is tuple and len(x) == 2 else (x, x)
        usual = (
            not torch.compiler.is_compiling()
            and edge_attr is None
            and return_attention_weights is None
            and modules.get("lin_edge") is None
        )
        usual = usual and _are_plain(pair, edge_index) and not _is_half_on_cpu(pair[0])
        maps = [modules.get(name) for name in ("lin_query", "lin_key", "lin_value")]
        if usual and guard.allows(self, edge_index) and short.are_linear(*maps):
            graph = (
                short.graph_of(edge_index, pair[0].shape[0], pair[1].shape[0], self.flow)
                if _flows(self, *pair)
                else None
            )
        if graph is None or self.beta or (self.root_weight and "lin_skip" not in modules):
            return general(self, x, edge_index, edge_attr, return_attention_weights)
        source, target = pair
        shape = -1, self.heads, self.out_channels
        skips = [modules["lin_skip"]] if self.root_weight else []
        joined = side_by_side(source, *maps, *skips) if source is target else None
        if joined is None:
            joined = maps[0](target), maps[1](source), maps[2](source)
        query, key, value = (t.view(shape) for t in joined[:3])
        start = time.perf_counter()
        out = attend(self, graph, query, key, value)
        report.record(guard.kind, start)
        set_alpha(self, None)
        out = out.view(-1, shape[1] * shape[2]) if self.concat else out.mean(dim=1)
        if self.root_weight:
            return out + (joined[3] if len(joined) > 3 else modules["lin_skip"](target))
        return out.clone() if self.concat else out

    return forward


def _agnn(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.AGNNConv)

    @functools.wraps(general)
    def forward(self, x, edge_index):
        beta, graph = own_parameters(self).get("beta", own_buffers(self).get("beta")), None
        usual = not torch.compiler.is_compiling() and _is_plain_pair(x, edge_index) and type(beta) in short.FEATURES
        usual = usual and (x.dtype.itemsize > 2 or not torch.is_autocast_enabled(x.device.type))
        if usual and beta.numel() == 1 and beta.dim() <= 1 and beta.dtype == x.dtype and beta.device == x.device:
            graph = _looped(self, guard, edge_index, x.shape[0], x.shape[0])
        if graph is None:
            return general(self, x, edge_index)
        ends = F.normalize(x, p=2.0, dim=-1)
        start = time.perf_counter()
        heads = [t.unsqueeze(1) for t in (beta * ends, ends, x)]
        out = heads_attention(graph, *heads, scale=1.0).squeeze(1).clone()  # the op keeps its result
        report.record(guard.kind, start)
        return out

    return forward


def _is_half_on_cpu(x: Tensor) -> bool:
    """True where autocast makes maps of x float16 that no op takes."""
    return x.is_cpu and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16


def _flows(conv: Any, source: Tensor, target: Tensor) -> bool:
    return source is target or conv.flow == "source_to_target"


def _is_vector(conv: Any, vector: Tensor | None, x: Tensor) -> bool:
    """True for a parameter with a number for each feature of each head, of the dtype of x, or of float32 beside an x
    that autocast has made narrow."""
    if vector is None or vector.shape != (1, conv.heads, conv.out_channels):
        return False
    if vector.dtype == x.dtype:
        return True
    kind = x.device.type
    narrow = torch.is_autocast_enabled(kind) and x.dtype is torch.get_autocast_dtype(kind)
    return narrow and vector.dtype is torch.float32


def _looped(conv: Any, guard: short.Guard, edge_index, num_src: int, num_dst: int) -> Graph | None:
    """The graph that a layer of the GAT family attends over; None where the general way is to be taken."""
    if not guard.allows(conv, edge_index):
        return None
    if conv.flow != "source_to_target" and (num_src != num_dst or short.pairs_by_flow(guard.plain)):
        return None
    if not conv.add_self_loops:
        return short.graph_of(edge_index, num_src, num_dst, conv.flow)
    if num_src != num_dst:
        return None
    return short.looped(edge_index, num_src, conv.flow, "one")


def _inner_bias(conv: Any, res: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias, where it comes right behind the sums and makes what is of `dtype`: an op may add it."""
    bias = conv.bias  # in replicas of torch.nn.DataParallel no parameter
    return bias if bias is not None and bias.dtype is dtype and conv.concat and res is None else None


def _finished(conv: Any, out: Tensor, res: Tensor | None, kept: bool = True, wide: torch.dtype | None = None) -> Tensor:
    """What the layer makes of its sums [N, H, C], which an op may have `kept`, of the dtype `wide` (that of the
    attention vectors) or, under autocast, of a narrower one."""
    bias = conv.bias  # in replicas of torch.nn.DataParallel no parameter
    if wide is not None and out.dtype is not wide:
        # A bias makes narrow sums wide in the pass that adds it.
        if conv.concat and res is None and bias is not None and bias.dtype is wide:
            return out.view(-1, conv.heads * conv.out_channels) + bias
        out, kept = out.to(torch.promote_types(out.dtype, wide)), False
    if not conv.concat:
        out = out.mean(dim=1)
    elif kept and bias is None and res is None:
        # The caller may write into what forward() returns, while the op keeps its result.
        return out.clone().view(-1, conv.heads * conv.out_channels)
    else:
        out = out.view(-1, conv.heads * conv.out_channels)
    for term in (res, bias):
        if term is not None:
            out = out + term
    return out


def _are_plain(pair: tuple, edge_index) -> bool:
    """The same of features of sources and of destinations, of one dtype."""
    source, target = pair
    if source is target:
        return _is_plain_pair(source, edge_index)
    return _is_plain_pair(source, edge_index) and _is_plain_pair(target, edge_index) and source.dtype == target.dtype


def _is_plain_pair(x, edge_index) -> bool:
    """True for features that the op takes as they come out of the layer's linear maps, and edges beside them."""
    return type(edge_index) is Tensor and short.is_matrix(x) and x.device == edge_index.device


def in_one_pass(original: Callable) -> Callable:
    """GATConv.forward with the two scores of a node from one pass over its features, where sources and destinations are
    the same nodes: PyG's makes and keeps two tensors of the features' size for them."""

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
        return _finished(self, self.propagate(edge_index, x=(x, x), alpha=alpha, size=size), res, kept=False)

    return forward


def _is_plain(conv: Any, x, edge_index) -> bool:
    return (
        type(x) in short.FEATURES
        and x.dim() == 2
        and type(edge_index) in (Tensor, EdgeIndex)
        and edge_index.layout is torch.strided
        and getattr(conv, "lin", None) is not None
        and hasattr(conv, "res")
        and not torch.compiler.is_compiling()
        and obstacle(conv) is None
    )


def _scores(x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """<x[n, h], vector[h]> for each vector [1, H, C]: [N, H] each."""
    same = all(v.dtype == x.dtype and v.device == x.device and v.shape == (1, *x.shape[1:]) for v in vectors)
    if same and reduce.takes(x) and not torch.is_autocast_enabled(x.device.type):
        return ops.head_dots(x, torch.cat(vectors)).unbind()
    return tuple((x * v).sum(-1) for v in vectors)


_MAKERS = (
    (pyg_nn.GATConv, _gat),
    (pyg_nn.GATv2Conv, _gatv2),
    (pyg_nn.SuperGATConv, _super_gat),
    (pyg_nn.TransformerConv, _transformer),
    (pyg_nn.AGNNConv, _agnn),
)
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
