"""Attention layers without a message: scores, softmax and weighted sum on [E, H] tensors, never [E, H, F].

Each rule replaces one method of a PyG layer (``message()`` or ``edge_update()``) for a whole propagate() or
edge_updater() call, with the arguments of that call. Algebra keeps features on the nodes:

- GAT: a . [W x_j || W x_i || W_e e] is a sum of three scalars; the edge's is e . (W_e^T a). Where the user does
  not see the weights they are not even made: edge_update() returns `Deferred` and a fused op does the rest.
- Transformer: q_i . (k_j + W_e e) = q_i . k_j + (W_e^T q_i) . e, and
  sum alpha (v_j + W_e e) = sum alpha v_j + W_e (sum alpha e).
- GATv2: a . leaky_relu(l_j + r_i) is an op; with W_e e in it, it is computed and recomputed in blocks of edges.
- SuperGAT: inner products and node scores are ops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy import blocks
from gnnaccel.lazy.expression import Apply, Leaf, reshaped
from gnnaccel.lazy.reduce import exponent, exponent_dtype, refusal, takes
from gnnaccel.modules import is_watched
from gnnaccel.ops.heads_attention import heads_attention
from gnnaccel.ops.super_gat import super_gat as super_gat_op
from gnnaccel.pyg_backend.call import current
from gnnaccel.pyg_backend.graph import Edges, Unsupported, values_of
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.pyg_backend.touch import set_alpha
from gnnaccel.touch import own_parameters


def _node(edges: Edges, value, suffix: str, what: str) -> Tensor:
    feature = edges.node_feature(value, suffix)
    if feature is None:
        raise Unsupported(f"{what} is missing")
    if not takes(feature):
        raise Unsupported(refusal(feature))
    return feature


def _same(*features: Tensor | None) -> None:
    given = [f for f in features if f is not None]
    if any(f.dtype != given[0].dtype or f.device != given[0].device for f in given):
        raise Unsupported("features of different dtypes or devices")


def _edge_attr(edges: Edges, value):
    """edge_attr as PyG collects it: from a sparse adjacency with several values per edge if not given."""
    if value is None and edges.is_sparse:
        found = values_of(edges.edge_index)
        value = None if found is None or found.dim() == 1 else found
    if value is None:
        return None
    if not takes(value):
        raise Unsupported(refusal(value))
    return value.view(-1, 1) if value.dim() == 1 else value


def _plain_linear(layer, x: Tensor) -> bool:
    """True if `layer` does exactly x @ weight.T on `x`, so that its weight may be used elsewhere."""
    return (
        type(layer) in (pyg_nn.Linear, torch.nn.Linear)
        and layer.bias is None
        and isinstance(layer.weight, torch.nn.Parameter)
        and not isinstance(layer.weight, torch.nn.parameter.UninitializedParameter)
        and not is_watched(layer)
        and "weight" in own_parameters(layer)
        and x.shape[-1] == layer.weight.shape[1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
    )


def _check_edges(graph: Graph, *values: Tensor | None) -> None:
    if any(value is not None and value.shape[0] != graph.nnz for value in values):
        raise Unsupported("edge features whose number is not that of the edges")


@dataclass(frozen=True)
class Deferred:
    """Attention weights before they are made: stands for [E, H] between edge_updater() and propagate().

    scores : Tensor [E, H], or (Tensor [sources, H], Tensor [destinations, H])
        What the softmax is of; or whose sum it is of, after a leaky_relu of this slope.
    scale : Tensor [E, H] or None
        The dropout mask, already scaled; drawn as PyG draws it.
    """

    graph: Graph
    scores: Tensor | tuple[Tensor, Tensor]
    slope: float
    scale: Tensor | None

    def sum(self, x: Tensor) -> Tensor:
        """The sources' features [N, H, C] weighted and summed up."""
        if isinstance(self.scores, Tensor):
            return ops.edge_attention(self.graph, self.scores, x, edge_scale=self.scale)
        return ops.attention(self.graph, x, *self.scores, negative_slope=self.slope, edge_scale=self.scale)

    def weights(self) -> Tensor:
        """The weights after all, [E, H] in edge-id order."""
        scores = self.scores
        if not isinstance(scores, Tensor):
            scores = F.leaky_relu(ops.sddmm(self.graph, *scores, "add", "u", "v"), self.slope)
        alpha = ops.edge_softmax(self.graph, scores)
        return alpha if self.scale is None else alpha * self.scale


def gat(conv, edges: Edges, x, alpha) -> Tensor:
    """GATConv, GATv2Conv: message() and aggregation, out [num_dst, H, C], from attention weights or what stands for
    them."""
    source = _node(edges, x, "_j", "x")
    edges.node_feature(x, "_i")
    graph = edges.graph()
    if isinstance(alpha, Deferred):
        scores = alpha.scores if isinstance(alpha.scores, Tensor) else alpha.scores[0]
        mixed = source.dtype != scores.dtype and not torch.is_autocast_enabled(source.device.type)
        if alpha.graph is not graph or mixed:
            raise Unsupported("attention weights of other edges or of another dtype")
        return _given(conv, alpha.sum(source))
    if not torch.is_autocast_enabled(source.device.type):  # under which the result is of the wider dtype, as PyG's
        _same(source, alpha)
    if not takes(alpha) or tuple(alpha.shape) != (graph.nnz, *source.shape[1:-1]):
        raise Unsupported("attention weights that are not [E, H]")
    return ops.spmm(graph, source, alpha)


def _given(conv, out: Tensor) -> Tensor:
    """`out` for the caller, who may write into what forward() passes on, while an op keeps its result."""
    return out.clone() if conv.concat and conv.bias is None and getattr(conv, "res", None) is None else out


def gat_scores(conv, edges: Edges, alpha, edge_attr=None) -> Tensor | Deferred:
    """GATConv.edge_update: normalised attention [E, H] from per-node scores alpha = (source, destination)."""
    source = _node(edges, alpha, "_j", "alpha")
    target = edges.node_feature(alpha, "_i")
    _same(source, target)
    edge_attr = _edge_attr(edges, edge_attr)
    graph = edges.graph()
    _check_edges(graph, edge_attr)
    hidden = current.hidden and graph.nnz
    if hidden and target is not None and (edge_attr is None or conv.lin_edge is None):
        return Deferred(graph, (source, target), conv.negative_slope, dropped(conv, source, graph.nnz))
    if target is None:
        scores = ops.sddmm(graph, source, None, "copy_lhs", "u")
    else:
        scores = ops.sddmm(graph, source, target, "add", "u", "v")
    if graph.nnz == 0:
        return scores
    if edge_attr is not None and conv.lin_edge is not None:
        scores = scores + _gat_edge_scores(conv, edge_attr)
    scores = F.leaky_relu(scores, conv.negative_slope)
    return _softmax(conv, graph, scores)


def _softmax(conv, graph: Graph, scores: Tensor) -> Tensor | Deferred:
    """Attention weights [E, H], or what stands for them where nobody is to see them."""
    as_it_is = scores.dtype.itemsize > 2 or not torch.is_autocast_enabled(scores.device.type)
    if current.hidden and graph.nnz and as_it_is:  # else exp() may widen them
        return Deferred(graph, scores, 1.0, dropped(conv, scores, graph.nnz))
    return F.dropout(ops.edge_softmax(graph, scores), p=conv.dropout, training=conv.training)


def attend(conv, graph: Graph, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by inner products of features of one dtype, with the layer's dropout, of the dtype of PyG's result.

    That is under autocast the dtype of exp(); the features are read as they are.
    """
    if not torch.is_autocast_enabled(query.device.type):
        return heads_attention(graph, query, key, value, dropped(conv, query, graph.nnz))
    weights, scale = exponent_dtype(query), None
    if conv.dropout > 0 and conv.training:
        scale = dropped(conv, query.new_empty(0, dtype=weights), graph.nnz)
        scale = None if scale is None else scale.to(query.dtype)
    return heads_attention(graph, query, key, value, scale).to(torch.promote_types(weights, value.dtype))


def dropped(conv, like: Tensor, edges: int) -> Tensor | None:
    """What dropout multiplies the weights [E, H] by, drawn as PyG draws it; None for ones."""
    if not (conv.dropout > 0 and conv.training):
        return None
    return F.dropout(like.new_ones(edges, conv.heads), p=conv.dropout)


def _gat_edge_scores(conv, edge_attr: Tensor) -> Tensor:
    shape = conv.heads, conv.out_channels
    if _plain_linear(conv.lin_edge, edge_attr):
        folded = (conv.lin_edge.weight.view(*shape, -1) * conv.att_edge.view(*shape, 1)).sum(1)
        return F.linear(edge_attr, folded)
    return (conv.lin_edge(edge_attr).view(-1, *shape) * conv.att_edge).sum(-1)


def transformer(conv, edges: Edges, query, key, value, edge_attr=None) -> Tensor:
    """TransformerConv: message() and aggregation, out [num_dst, H, C]; leaves the attention in conv._alpha."""
    query, key = _node(edges, query, "_i", "query"), _node(edges, key, "_j", "key")
    value = _node(edges, value, "_j", "value")
    edge_attr = _edge_attr(edges, edge_attr)
    _same(query, key, value, edge_attr)
    if (conv.lin_edge is None) != (edge_attr is None) or key.shape[1:] != query.shape[1:]:
        raise Unsupported("edge_attr does not fit the layer")
    if edge_attr is not None and not _plain_linear(conv.lin_edge, edge_attr):
        raise Unsupported("lin_edge is not a plain linear layer")
    graph = edges.graph()
    _check_edges(graph, edge_attr)
    if current.hidden and edge_attr is None and value.shape == key.shape:
        set_alpha(conv, None)
        out = attend(conv, graph, query, key, value)
        return out if conv.root_weight or not conv.concat else out.clone()  # see _given()
    # Dividing the query costs N x H x C once; dividing the scores would cost another [E, H] tensor.
    query = query / math.sqrt(conv.out_channels)
    scores = ops.sddmm(graph, key, query, "dot", "u", "v")
    if edge_attr is not None:
        weight = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
        folded = torch.einsum("nhc,hcd->nhd", query, weight)
        scores = scores + ops.sddmm(graph, edge_attr.unsqueeze(1), folded, "dot", "e", "v")
    alpha = ops.edge_softmax(graph, exponent(scores.squeeze(-1)))
    set_alpha(conv, alpha)
    alpha = F.dropout(alpha, p=conv.dropout, training=conv.training)
    out = ops.spmm(graph, value, alpha)
    if edge_attr is not None:
        summed = ops.spmm(graph.incidence, edge_attr.unsqueeze(1), alpha)
        out = out + torch.einsum("nhd,hcd->nhc", summed, weight)
    return out


def agnn(conv, edges: Edges, x, x_norm) -> Tensor:
    """AGNNConv: message() and aggregation; scores are beta times the cosine of the two ends."""
    source = _node(edges, x, "_j", "x")
    left, right = _node(edges, x_norm, "_j", "x_norm"), _node(edges, x_norm, "_i", "x_norm")
    _same(source, left, right, conv.beta)
    if source.dim() != 2:
        raise Unsupported("features that are not [N, F]")
    graph = edges.graph()
    as_it_is = source.dtype.itemsize > 2 or not torch.is_autocast_enabled(source.device.type)
    if as_it_is and conv.beta.numel() == 1:
        heads = (t.unsqueeze(1) for t in (conv.beta * right, left, source))
        return ops.dot_attention(graph, *heads, scale=1.0).squeeze(1).clone()  # see _given()
    scores = conv.beta * ops.sddmm(graph, left, right, "dot", "u", "v").squeeze(-1)
    return ops.spmm(graph, source, ops.edge_softmax(graph, exponent(scores)))


def gatv2_scores(conv, edges: Edges, x, edge_attr=None) -> Tensor | Deferred:
    """GATv2Conv.edge_update: normalised attention [E, H]; [E, H, C] exists at most in blocks of edges."""
    source, target = _node(edges, x, "_j", "x"), _node(edges, x, "_i", "x")
    edge_attr = _edge_attr(edges, edge_attr)
    _same(source, target, edge_attr, conv.att)
    if torch.is_autocast_enabled(source.device.type):
        raise Unsupported("autocast")  # its casts are found where message() itself runs
    if edge_attr is not None and (conv.lin_edge is None or not _plain_linear(conv.lin_edge, edge_attr)):
        raise Unsupported("lin_edge is not a plain linear layer")
    graph = edges.graph()
    _check_edges(graph, edge_attr)
    plain = conv.att.shape == (1, *source.shape[1:]) and target is not None and target.shape[1:] == source.shape[1:]
    if edge_attr is None and plain and (source.is_cuda or source.dtype != torch.bfloat16):
        scores = ops.gatv2_scores(graph, source, target, conv.att[0], negative_slope=conv.negative_slope)
    else:
        scores = _gatv2_in_blocks(conv, graph, source, target, edge_attr)
    return _softmax(conv, graph, scores)


def super_gat(conv, edges: Edges, x) -> Tensor:
    """SuperGATConv: message() and aggregation; scores are inner products, or additive ones gated by these."""
    source, target = _node(edges, x, "_j", "x"), _node(edges, x, "_i", "x")
    if is_half(source):
        raise Unsupported("autocast to float16")
    vectors = super_gat_vectors(conv, source)
    graph = edges.graph()
    if source is not target or vectors is None:
        raise Unsupported("features of two kinds, or vectors that are not one for each head")
    wide = summed_dtype(source, vectors)
    scale = dropped(conv, source.new_empty(0, dtype=wide), graph.nnz)
    out = super_gat_op(graph, source, vectors, negative_slope=conv.negative_slope, edge_scale=scale)
    return _given(conv, out.to(wide))


def is_half(x: Tensor) -> bool:
    """True where autocast makes maps of x float16, in which inner products of two features have no room."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16


def super_gat_vectors(conv, x: Tensor) -> tuple[Tensor, ...] | None:
    """The vectors of a SuperGATConv beside mapped features x, or features that are to be mapped; None where they are
    not PyG's own."""
    if conv.attention_type != "MX":
        return ()
    autocast = torch.is_autocast_enabled(x.device.type)
    for vector in (conv.att_l, conv.att_r):
        if not isinstance(vector, Tensor) or vector.shape != (1, conv.heads, conv.out_channels):
            return None
        if vector.device != x.device or not (vector.dtype == x.dtype or (autocast and vector.dtype == torch.float32)):
            return None
    return conv.att_l, conv.att_r


def summed_dtype(x: Tensor, vectors: tuple[Tensor, ...]) -> torch.dtype:
    """Of what PyG sums, of mapped features like x."""
    return torch.promote_types(x.dtype, vectors[0].dtype if vectors else exponent_dtype(x))


def _gatv2_in_blocks(conv, graph: Graph, source: Tensor, target: Tensor, edge_attr: Tensor | None) -> Tensor:
    features, dtype = tuple(source.shape[1:]), source.dtype

    def apply(function, *args, to=features, **kwargs):
        return Apply(function, args, kwargs, to, dtype)

    z = apply(torch.add, Leaf("u", source), Leaf("v", target))
    if edge_attr is not None:
        linear = apply(F.linear, edge_attr, conv.lin_edge.weight, to=(math.prod(features),))
        z = apply(torch.add, z, apply(reshaped, linear, features))
    z = apply(torch.mul, apply(F.leaky_relu, z, conv.negative_slope), conv.att)
    return blocks.edge_values(graph, apply(torch.sum, z, dim=-1, to=features[:-1]))
