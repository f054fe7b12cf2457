"""Layers inside torch.compile: what they do between their linear maps, by ops on the user's own edge_index.

While torch.compile reads a layer, nothing may be looked up, as what it finds becomes a constant of the program. So the
ops here take a `Described`, which names the edges and what the layer makes of them (loops); the graph is looked up, and
made where there is none, each time the program runs. A GCN's norm is two factors of each node, made of its degree.

Only edges that the program was given are taken. Those that it makes itself are left to PyG's code: Inductor may write
other edges into their memory, of which nobody tells.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric import nn as pyg_nn
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.conv import MessagePassing

from gnnaccel import report
from gnnaccel.lazy.reduce import FEATURE_DTYPES
from gnnaccel.ops._described import Described
from gnnaccel.ops.attention import FUSED_DTYPES, attention_op
from gnnaccel.ops.dot_attention import MAX_CUDA_HEAD_BYTES, dot_attention_op
from gnnaccel.ops.edge_softmax import edge_softmax_op
from gnnaccel.ops.gatv2 import scores_op
from gnnaccel.ops.graph_conv import graph_conv_op
from gnnaccel.ops.head_dots import head_dots_op
from gnnaccel.ops.own_sum import own_sum_op
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import degrees_op, extremes_op, spmm_op
from gnnaccel.pyg_backend.graph import INDEX_DTYPES, unserved
from gnnaccel.pyg_backend.rules import REDUCES, WEIGHTS, collects_otherwise

try:
    from torch._dynamo.comptime import comptime
except ImportError:  # another torch
    comptime = None

_FEATURES = (Tensor, torch.nn.Parameter)
_METHODS = ("message", "aggregate", "update", "message_and_aggregate", "edge_updater", "edge_update", "propagate")


def compiling() -> bool:
    """True while torch.compile reads the code, which is not to be exported: an exported program is PyG's own."""
    return torch.compiler.is_dynamo_compiling() and not _exporting()


@torch.compiler.assume_constant_result
def _exporting() -> bool:
    return bool(getattr(torch.compiler, "is_exporting", lambda: False)())


class _Seen(threading.local):
    """What `_look` has found on this thread."""

    given = False


_seen = _Seen()


def _look(context: Any) -> None:
    """While torch.compile reads `is_given`: whether `edges` is an input of the program, as it was given."""
    _seen.given = False
    node = context.get_local("edges").as_proxy().node
    example = node.meta.get("example_value")
    if node.op not in ("placeholder", "get_attr") or example is None or example._version:
        return
    _seen.given = True


@torch.compiler.assume_constant_result
def _found_given() -> bool:
    return _seen.given


def is_given(edges: Tensor) -> bool:
    """True for edges that the compiled program is given, and has not written into."""
    if comptime is None:
        return False
    comptime(_look)
    return _found_given()


@torch.compiler.assume_constant_result
def _counted(kind: str) -> bool:
    """Counts a layer once per compilation."""
    report.count(kind)
    return True


@torch.compiler.assume_constant_result
def _served(device: str) -> bool:
    return unserved(torch.device(device)) is None


@torch.compiler.assume_constant_result
def _watched() -> bool:
    """Hooks of all modules: torch.compile does not look at them either, but compiles other programs with them."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def _is_matrix(x: Any, edge_index: Tensor) -> bool:
    return (
        type(x) in _FEATURES
        and x.dim() == 2
        and x.dtype in FEATURE_DTYPES
        and x.layout is torch.strided
        and x.device == edge_index.device
        and (x.dtype is not torch.float16 or x.is_cuda)
        and not torch.is_autocast_enabled(x.device.type)
    )


def _takes_edges(edge_index: Any) -> bool:
    return (
        type(edge_index) is Tensor
        and edge_index.layout is torch.strided
        and edge_index.dtype in INDEX_DTYPES
        and edge_index.dim() == 2
        and edge_index.shape[0] == 2
        and _served(edge_index.device.type)
        and is_given(edge_index)
    )


def _is_as_made(conv: Any, plain: Any) -> bool:
    """True if no method that our ops stand for was replaced on the layer, and PyG would run the layer itself."""
    if conv._explain or conv._decomposed_layers > 1 or conv.aggr_module is None or _watched():
        return False
    for name in _METHODS:  # noqa: SIM110 - torch.compile reads it
        if name != "propagate" and name in conv.__dict__:
            return False
    return plain.aggregate is MessagePassing.aggregate and plain.update is MessagePassing.update


def _is_quiet(module: Any) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)


class _Layer:
    """What the forwards of one class of layers ask of it. `known`: PyG's class, whose methods they stand for."""

    def __init__(self, plain: Any, known: Any):
        self.plain, self.known, self.kind = plain, known, f"pyg.{plain.__name__}"
        self.forward, self.message, self.edge_update = _METHODS_OF[known]

    def allows(self, conv: Any, edge_index: Any, node_dims: tuple[int, ...] = (-2, 0)) -> bool:
        """True where the layer is as PyG made it, sums, and is given edges."""
        plain = self.plain
        return (
            plain.forward is self.forward
            and plain.message is self.message
            and plain.edge_update is self.edge_update
            and conv.node_dim in node_dims
            and not collects_otherwise(plain)
            and type(conv.aggr_module) is SumAggregation
            and _is_quiet(conv.aggr_module)
            and _is_as_made(conv, plain)
            and _takes_edges(edge_index)
        )


# Sums


def _norm(graph: Described, dtype: torch.dtype) -> Tensor:
    """One over the square root of each row's degree, 0 where it is empty."""
    degrees = degrees_op(graph).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return torch.where(degrees > 0, degrees.rsqrt(), 0.0)


def _normed_sum(graph: Described, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return graph_conv_op(graph, x, None, scale, scale, bias, False)


def _normed_graph(layer: _Layer, conv: Any, x: Any, edge_index: Any, loops: bool) -> Described | None:
    """The graph that a layer multiplies by the norm of; None for calls that are PyG's."""
    if not layer.allows(conv, edge_index) or not _is_matrix(x, edge_index):
        return None
    if x.dtype not in (torch.float32, torch.float64):  # PyG rounds norms to 16 bits
        return None
    flipped = conv.flow != "source_to_target"
    return Described(edge_index, x.shape[0], x.shape[0], "one" if loops else "none", flipped)


def _weighted_norm(graph: Described, weight: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Weights of the edges of `graph` and its loops, and factors of the nodes, of a GCN with weights of edges."""
    edges, nodes = graph.edges, graph.num_src
    if graph.loops == "one":
        loops = edges[0] == edges[1]
        own = weight.new_full((nodes + 1,), fill)  # the last is of all edges that are no loops
        own = own.index_put((torch.where(loops, edges[0], nodes),), weight)[:nodes]
        weight = torch.cat([torch.where(loops, 0.0, weight), own])
    degrees = spmm_op(graph, None, weight, "copy_rhs", "sum", 0.0)
    roots = torch.where(degrees == 0, 1.0, degrees).pow(-0.5)  # PyG's infinite ones are 0
    return weight, torch.where(degrees == 0, 0.0, roots)


def _gcn(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        if not conv.normalize or conv.cached or conv._cached_edge_index is not None:
            return None  # with norms from elsewhere, it is a weighted sum
        graph = _normed_graph(layer, conv, x, edge_index, conv.add_self_loops)
        if graph is None:
            return None
        if edge_weight is not None and not _is_weight(edge_weight, x, edge_index):
            return None
        _counted(layer.kind)
        h = conv.lin(x)
        if edge_weight is None:  # `improved` then makes no difference
            return _normed_sum(graph, h, _norm(graph, h.dtype), conv.bias)
        weight, factors = _weighted_norm(graph, edge_weight, 2.0 if conv.improved else 1.0)
        factors = factors.view(-1, 1)
        out = factors * spmm_op(graph, factors * h, weight.view(-1, 1), "mul", "sum", 0.0)
        return out if conv.bias is None else out + conv.bias

    return forward


def _is_weight(weight: Any, x: Tensor, edge_index: Tensor) -> bool:
    return (
        type(weight) in _FEATURES
        and weight.dim() == 1
        and weight.shape[0] == edge_index.shape[1]
        and weight.dtype == x.dtype
        and weight.device == x.device
    )


def _sg(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        if edge_weight is not None or conv.cached or conv._cached_x is not None:
            return None
        graph = _normed_graph(layer, conv, x, edge_index, conv.add_self_loops)
        if graph is None:
            return None
        _counted(layer.kind)
        scale = _norm(graph, x.dtype)
        for _ in range(conv.K):
            x = _normed_sum(graph, x, scale)
        return conv.lin(x)

    return forward


def _tag(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        if edge_weight is not None or not conv.normalize:
            return None
        graph = _normed_graph(layer, conv, x, edge_index, False)
        if graph is None:
            return None
        _counted(layer.kind)
        scale, out = _norm(graph, x.dtype), conv.lins[0](x)
        for lin in conv.lins[1:]:
            x = _normed_sum(graph, x, scale)
            out = out + lin(x)
        return out if conv.bias is None else out + conv.bias

    return forward


def _appnp(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_weight=None):
        drops = conv.dropout > 0 and conv.training
        if edge_weight is not None or drops or not conv.normalize or conv.cached:
            return None
        if conv._cached_edge_index is not None:
            return None
        graph = _normed_graph(layer, conv, x, edge_index, conv.add_self_loops)
        if graph is None:
            return None
        _counted(layer.kind)
        scale, own = _norm(graph, x.dtype), x
        for _ in range(conv.K):
            x = _normed_sum(graph, x, scale) * (1 - conv.alpha) + conv.alpha * own
        return x

    return forward


def _gin(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, size=None):
        eps = conv.eps
        if size is not None or not layer.allows(conv, edge_index) or not _is_matrix(x, edge_index):
            return None
        if not x.is_cpu or eps.numel() != 1 or eps.dtype != x.dtype or eps.device != x.device:
            return None  # elsewhere Inductor does better with a sum that it sees
        _counted(layer.kind)
        flipped = conv.flow != "source_to_target"
        return conv.nn(own_sum_op(Described(edge_index, x.shape[0], x.shape[0], "none", flipped), x, eps))

    return forward


# Attention


def _dropped(conv: Any, like: Tensor, graph: Described) -> Tensor | None:
    """What dropout multiplies the weights [E, H] by; None for ones."""
    if not (conv.dropout > 0 and conv.training):
        return None
    return F.dropout(like.new_ones(graph.nnz, like.shape[1]), p=conv.dropout)


def _attended(layer: _Layer, conv: Any, source: Any, target: Any, edge_index: Any) -> Described | None:
    """The graph that a layer of the GAT family attends over; None for calls that are PyG's."""
    if not layer.allows(conv, edge_index, (0,)) or not _is_matrix(source, edge_index):
        return None
    if target is not source and not (_is_matrix(target, edge_index) and target.dtype == source.dtype):
        return None
    if source.dtype not in FUSED_DTYPES[source.device.type]:
        return None
    if conv.flow != "source_to_target" or (conv.add_self_loops and target is not source):
        return None
    return Described(edge_index, source.shape[0], target.shape[0], "one" if conv.add_self_loops else "none")


def _summed(graph: Described, scores: Tensor, x: Tensor, factor: Tensor | None) -> Tensor:
    """Sources weighted by the softmax of scores [nnz, H], times `factor`."""
    if not x.is_cuda:
        return dot_attention_op(graph, None, None, x, scores, factor, None, 0.0, 1.0)[0]
    weight = edge_softmax_op(graph, scores)
    weight = weight if factor is None else weight * factor
    return spmm_op(graph, x, weight.unsqueeze(-1), "mul", "sum", 0.0)


def _dotted(graph: Described, query: Tensor, key: Tensor, value: Tensor, factor: Tensor | None, scale: float) -> Tensor:
    if value.is_cuda and value.shape[2] * value.element_size() > MAX_CUDA_HEAD_BYTES:
        return _summed(graph, sddmm_op(graph, key, query * scale, "dot", "u", "v").squeeze(-1), value, factor)
    return dot_attention_op(graph, query, key, value, None, factor, None, 0.0, scale)[0]


def _finished(conv: Any, out: Tensor, res: Tensor | None) -> Tensor:
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    out = out if res is None else out + res
    return out if conv.bias is None else out + conv.bias


def _gat(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_attr=None, size=None, return_attention_weights=None):
        if edge_attr is not None or size is not None or return_attention_weights is not None or conv.lin is None:
            return None
        if type(x) not in _FEATURES:
            return None
        graph = _attended(layer, conv, x, x, edge_index)
        if graph is None:
            return None
        _counted(layer.kind)
        res = None if conv.res is None else conv.res(x)
        h = conv.lin(x).view(-1, conv.heads, conv.out_channels)
        scores = head_dots_op(h, torch.cat((conv.att_src, conv.att_dst)))
        given = (graph, h, scores[0], scores[1], _dropped(conv, h, graph), None, 0.0)
        return _finished(conv, attention_op(*given, conv.negative_slope, torch.is_grad_enabled())[0], res)

    return forward


def _gatv2(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index, edge_attr=None, return_attention_weights=None):
        if edge_attr is not None or return_attention_weights is not None:
            return None
        source, target = (x, x) if type(x) in _FEATURES else x
        if target is None or (conv.share_weights and target is not source):
            return None
        graph = _attended(layer, conv, source, target, edge_index)
        if graph is None:
            return None
        _counted(layer.kind)
        shape = -1, conv.heads, conv.out_channels
        res = None if conv.res is None else conv.res(target)
        left = conv.lin_l(source).view(shape)
        right = left if conv.share_weights else conv.lin_r(target).view(shape)
        scores = scores_op(graph, left, right, conv.att.view(shape[1:]), conv.negative_slope)
        return _finished(conv, _summed(graph, scores, left, _dropped(conv, left, graph)), res)

    return forward


def _agnn(layer: _Layer) -> Callable:
    def forward(conv, x, edge_index):
        if not layer.allows(conv, edge_index) or not _is_matrix(x, edge_index):
            return None
        if conv.flow != "source_to_target" or x.dtype not in FUSED_DTYPES[x.device.type]:
            return None
        _counted(layer.kind)
        graph = Described(edge_index, x.shape[0], x.shape[0], "one" if conv.add_self_loops else "none")
        ends = F.normalize(x, p=2.0, dim=-1)
        return _dotted(graph, (conv.beta * ends)[:, None], ends[:, None], x[:, None], None, 1.0)[:, 0]

    return forward


_MAKERS = (
    (pyg_nn.GCNConv, _gcn),
    (pyg_nn.SGConv, _sg),
    (pyg_nn.TAGConv, _tag),
    (pyg_nn.APPNP, _appnp),
    (pyg_nn.GINConv, _gin),
    (pyg_nn.GATConv, _gat),
    (pyg_nn.GATv2Conv, _gatv2),
    (pyg_nn.AGNNConv, _agnn),
)
_METHODS_OF = {known: (known.forward, known.message, known.edge_update) for known, _ in _MAKERS}
_FORWARDS = {known.forward: (known, make) for known, make in _MAKERS}


def first(plain: Any, general: Callable) -> Callable:
    """`general`, the forward() of layers of class `plain`, behind that of this module where they are compiled."""
    if plain.forward not in _FORWARDS:
        return general
    known, make = _FORWARDS[plain.forward]
    ours = make(_Layer(plain, known))

    @functools.wraps(general)
    def forward(self, *args, **kwargs):
        if compiling():
            out = ours(self, *args, **kwargs)
            if out is not None:
                return out
        return general(self, *args, **kwargs)

    return forward


# propagate()


def propagate(conv: Any, plain: Any, kind: str, edge_index: Any, kwargs: dict) -> Tensor | None:
    """propagate() of a layer that is being compiled; None where PyG's code is to be read."""
    known = plain.message in WEIGHTS or plain.message is pyg_nn.TransformerConv.message
    if not known or collects_otherwise(plain) or not _is_as_made(conv, plain):
        return None
    reduce = REDUCES.get(type(conv.aggr_module))
    if reduce is None or not _is_quiet(conv.aggr_module) or not _takes_edges(edge_index):
        return None
    if plain.message is pyg_nn.TransformerConv.message:
        return _transformer(conv, kind, edge_index, **kwargs) if reduce == "sum" else None
    x, size, name = kwargs.get("x"), kwargs.get("size"), WEIGHTS[plain.message]
    weight = None if name is None else kwargs.get(name)
    source, target = (x, x) if type(x) in _FEATURES else x if type(x) is tuple and len(x) == 2 else (None, None)
    if size is not None or target is None or conv.node_dim not in (-2, 0) or not _is_matrix(source, edge_index):
        return None
    if target is not source and (not _is_matrix(target, edge_index) or conv.flow != "source_to_target"):
        return None
    for other in conv._user_args:  # what else the layer would bring to the edges counts for the sizes
        if other[-2:] in ("_i", "_j") and other != "x_j":
            return None
    if weight is not None and not _is_weight(weight, source, edge_index):
        return None
    _counted(kind)
    graph = Described(edge_index, source.shape[0], target.shape[0], "none", conv.flow != "source_to_target")
    weight, message = (None, "copy_lhs") if weight is None else (weight.view(-1, 1), "mul")
    if reduce in ("sum", "mean"):
        return spmm_op(graph, source, weight, message, reduce, 0.0)
    return extremes_op(graph, source, weight, message, reduce, 0.0, False)[0]


def _transformer(conv, kind, edge_index, query=None, key=None, value=None, edge_attr=None, size=None) -> Tensor | None:
    heads = (query, key, value)
    if edge_attr is not None or size is not None or conv.flow != "source_to_target" or conv.node_dim != 0:
        return None
    if conv.lin_edge is not None:
        return None
    for x in heads:
        if type(x) is not Tensor or x.dim() != 3 or x.dtype is not value.dtype or x.device != edge_index.device:
            return None
    if value.dtype not in FUSED_DTYPES[value.device.type] or torch.is_autocast_enabled(value.device.type):
        return None
    _counted(kind)
    graph = Described(edge_index, value.shape[0], query.shape[0])
    return _dotted(graph, query, key, value, _dropped(conv, value, graph), conv.out_channels**-0.5)
