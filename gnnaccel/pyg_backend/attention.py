"""Attention layers without a message: scores, softmax and weighted sum on [E, H] tensors, never [E, H, F].

Each rule replaces one method of a PyG layer (``message()`` or ``edge_update()``) for a whole propagate() or
edge_updater() call, with the arguments of that call. Algebra keeps features on the nodes:

- GAT: a . [W x_j || W x_i || W_e e] is a sum of three scalars; the edge's is e . (W_e^T a). Where the user does
  not see the weights they are not even made: edge_update() returns `Deferred` and the fused op does the rest.
- Transformer: q_i . (k_j + W_e e) = q_i . k_j + (W_e^T q_i) . e, and
  sum alpha (v_j + W_e e) = sum alpha v_j + W_e (sum alpha e).
- GATv2: a . leaky_relu(l_j + r_i + W_e e) is not separable; it is computed and recomputed in blocks of edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn as pyg_nn

from gnnaccel import ops
from gnnaccel.graph.cache import derived
from gnnaccel.graph.structure import Graph
from gnnaccel.pyg_backend.graph import Edges, Unsupported, values_of
from gnnaccel.pyg_backend.helpers import current, takes

BLOCK_BYTES = 4 << 20  # of one [edges, H, F] block in GATv2 scores: a few of them stay in a core's cache share


def _node(edges: Edges, value, suffix: str, what: str) -> Tensor:
    feature = edges.node_feature(value, suffix)
    if feature is None or not takes(feature):
        raise Unsupported(f"{what} is missing or of an unsupported dtype")
    return feature


def _same(*features: Tensor | None) -> None:
    kinds = {(f.dtype, f.device) for f in features if f is not None}
    if len(kinds) > 1:
        raise Unsupported("features of different dtypes or devices")


def _edge_attr(edges: Edges, value):
    """edge_attr as PyG collects it: from a sparse adjacency with several values per edge if not given."""
    if value is None and edges.is_sparse:
        found = values_of(edges.edge_index)
        value = None if found is None or found.dim() == 1 else found
    if value is None:
        return None
    if not takes(value):
        raise Unsupported("edge_attr of an unsupported dtype")
    return value.view(-1, 1) if value.dim() == 1 else value


def _plain_linear(layer) -> bool:
    """True if `layer` does exactly x @ weight.T, so that its weight may be used elsewhere."""
    return (
        type(layer) in (pyg_nn.Linear, torch.nn.Linear)
        and layer.bias is None
        and isinstance(layer.weight, torch.nn.Parameter)
        and not isinstance(layer.weight, torch.nn.parameter.UninitializedParameter)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
        and "weight" in layer._parameters
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_autocast_enabled("cuda")
    )


def _check_edges(graph: Graph, *values: Tensor | None) -> None:
    if any(value is not None and value.shape[0] != graph.nnz for value in values):
        raise Unsupported("edge features whose number is not that of the edges")


@dataclass(frozen=True)
class Deferred:
    """GAT's attention weights before they are made: stands for [E, H] between edge_updater() and propagate().

    scale : Tensor [E, H] or None
        The dropout mask, already scaled; drawn as PyG draws it.
    """

    graph: Graph
    source: Tensor
    target: Tensor
    slope: float
    scale: Tensor | None

    def weights(self) -> Tensor:
        """The weights after all, [E, H] in edge-id order."""
        scores = F.leaky_relu(ops.sddmm(self.graph, self.source, self.target, "add", "u", "v"), self.slope)
        alpha = ops.edge_softmax(self.graph, scores)
        return alpha if self.scale is None else alpha * self.scale


def gat(conv, edges: Edges, x, alpha) -> Tensor:
    """GATConv: message() and aggregation, out [num_dst, H, C], from attention weights or what stands for them."""
    source = _node(edges, x, "_j", "x")
    edges.node_feature(x, "_i")
    graph = edges.graph()
    if isinstance(alpha, Deferred):
        if alpha.graph is not graph or source.dtype != alpha.source.dtype:
            raise Unsupported("attention weights of other edges or of another dtype")
        out = ops.attention(
            graph, source, alpha.source, alpha.target, negative_slope=alpha.slope, edge_scale=alpha.scale
        )
        # The op keeps its result for the backward, and the caller may write into one that forward() passes on.
        return out.clone() if conv.concat and conv.bias is None and getattr(conv, "res", None) is None else out
    _same(source, alpha)
    if not takes(alpha) or tuple(alpha.shape) != (graph.nnz, *source.shape[1:-1]):
        raise Unsupported("attention weights that are not [E, H]")
    return ops.spmm(graph, source, alpha)


def gat_scores(conv, edges: Edges, alpha, edge_attr=None) -> Tensor | Deferred:
    """GATConv.edge_update: normalised attention [E, H] from per-node scores alpha = (source, destination)."""
    source = _node(edges, alpha, "_j", "alpha")
    target = edges.node_feature(alpha, "_i")
    _same(source, target)
    edge_attr = _edge_attr(edges, edge_attr)
    graph = edges.graph()
    _check_edges(graph, edge_attr)
    if current.hidden and target is not None and graph.nnz and (edge_attr is None or conv.lin_edge is None):
        scale = None
        if conv.dropout > 0 and conv.training:
            scale = F.dropout(source.new_ones(graph.nnz, *source.shape[1:]), p=conv.dropout)
        return Deferred(graph, source, target, conv.negative_slope, scale)
    if target is None:
        scores = ops.sddmm(graph, source, None, "copy_lhs", "u")
    else:
        scores = ops.sddmm(graph, source, target, "add", "u", "v")
    if graph.nnz == 0:
        return scores
    if edge_attr is not None and conv.lin_edge is not None:
        scores = scores + _gat_edge_scores(conv, edge_attr)
    scores = F.leaky_relu(scores, conv.negative_slope)
    return F.dropout(ops.edge_softmax(graph, scores), p=conv.dropout, training=conv.training)


def _gat_edge_scores(conv, edge_attr: Tensor) -> Tensor:
    shape = conv.heads, conv.out_channels
    if _plain_linear(conv.lin_edge):
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
    if edge_attr is not None and not _plain_linear(conv.lin_edge):
        raise Unsupported("lin_edge is not a plain linear layer")
    graph = edges.graph()
    _check_edges(graph, edge_attr)
    dropout = conv.dropout > 0 and conv.training
    hidden = current.hidden and edge_attr is None and not dropout  # nobody sees the order of the weights
    if hidden:
        graph = _ordered(graph)
    # Dividing the query costs N x H x C once; dividing the scores would cost another [E, H] tensor.
    query = query / math.sqrt(conv.out_channels)
    scores = ops.sddmm(graph, key, query, "dot", "u", "v")
    if edge_attr is not None:
        weight = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1)
        folded = torch.einsum("nhc,hcd->nhd", query, weight)
        scores = scores + ops.sddmm(graph, edge_attr.unsqueeze(1), folded, "dot", "e", "v")
    alpha = ops.edge_softmax(graph, scores.squeeze(-1))
    conv._alpha = None if hidden else alpha
    alpha = F.dropout(alpha, p=conv.dropout, training=conv.training)
    out = ops.spmm(graph, value, alpha)
    if edge_attr is not None:
        summed = ops.spmm(_incidence(graph), edge_attr.unsqueeze(1), alpha)
        out = out + torch.einsum("nhd,hcd->nhc", summed, weight)
    return out


def _incidence(graph: Graph) -> Graph:
    """Destinations by edges: its "sources" are the edges themselves, so an SpMM sums edge features by destination."""
    found = derived.get((graph.indptr,), "incidence")
    if found is None:
        with torch.inference_mode(False):
            edge_ids = graph.edge_ids
            if edge_ids is None:
                edge_ids = torch.arange(graph.nnz, dtype=graph.indptr.dtype, device=graph.device)
            # A new tensor for indptr: the entry would otherwise keep its own owner alive.
            found = Graph(graph.indptr.clone(), edge_ids, edge_ids, graph.nnz)
        derived.put((graph.indptr,), "incidence", found)
    return found


def _ordered(graph: Graph) -> Graph:
    """The graph with its edges renumbered in row order: edge tensors that stay inside are then read in sequence."""
    if graph.edge_ids is None:
        return graph
    found = derived.get((graph.indptr,), "ordered")
    if found is None:
        with torch.inference_mode(False):
            found = Graph(graph.indptr.clone(), graph.indices, None, graph.num_cols)  # clone: as in _incidence
        derived.put((graph.indptr,), "ordered", found)
    return found


def agnn(conv, edges: Edges, x, x_norm) -> Tensor:
    """AGNNConv: message() and aggregation; scores are beta times the cosine of the two ends."""
    source = _node(edges, x, "_j", "x")
    left, right = _node(edges, x_norm, "_j", "x_norm"), _node(edges, x_norm, "_i", "x_norm")
    _same(source, left, right, conv.beta)
    if source.dim() != 2:
        raise Unsupported("features that are not [N, F]")
    graph = _ordered(edges.graph())
    scores = conv.beta * ops.sddmm(graph, left, right, "dot", "u", "v").squeeze(-1)
    return ops.spmm(graph, source, ops.edge_softmax(graph, scores))


def gatv2_scores(conv, edges: Edges, x, edge_attr=None) -> Tensor:
    """GATv2Conv.edge_update: normalised attention [E, H]; [E, H, C] exists in blocks of edges only."""
    source, target = _node(edges, x, "_j", "x"), _node(edges, x, "_i", "x")
    edge_attr = _edge_attr(edges, edge_attr)
    _same(source, target, edge_attr, conv.att)
    if edge_attr is not None and (conv.lin_edge is None or not _plain_linear(conv.lin_edge)):
        raise Unsupported("lin_edge is not a plain linear layer")
    graph = edges.graph()
    _check_edges(graph, edge_attr)
    weight = None if edge_attr is None else conv.lin_edge.weight
    scores = _AdditiveScores.apply(graph, source, target, conv.att, edge_attr, weight, conv.negative_slope)
    return F.dropout(ops.edge_softmax(graph, scores), p=conv.dropout, training=conv.training)


def _rows(graph: Graph) -> Tensor:
    """Destination of each nonzero, cached with the graph's own arrays."""
    found = derived.get((graph.indptr,), "rows")
    if found is None:
        with torch.inference_mode(False):
            nodes = torch.arange(graph.num_rows, device=graph.device, dtype=graph.indptr.dtype)
            found = torch.repeat_interleave(nodes, graph.indptr.diff(), output_size=graph.nnz)
        derived.put((graph.indptr,), "rows", found)
    return found


class _AdditiveScores(torch.autograd.Function):
    """scores[e, h] = att[h] . leaky_relu(source[j] + target[i] + weight @ edge_attr[e]), blocks of edges at a time.

    The backward recomputes each block, once in the order of destinations and once in that of sources, so that
    both gradients are sums of consecutive rows: no scatter, and the same result every time.
    """

    @staticmethod
    def forward(ctx, graph, source, target, att, edge_attr, weight, slope):
        ctx.save_for_backward(source, target, att, edge_attr, weight)
        ctx.graph, ctx.slope = graph, slope
        out = source.new_empty(graph.nnz, source.shape[1])
        for block in _blocks(graph, source):
            z, ids = _hidden(graph, block, source, target, edge_attr, weight)
            part = (F.leaky_relu_(z, slope) * att).sum(-1)
            out[block if ids is None else ids] = part
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        source, target, att, edge_attr, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grads = {"att": torch.zeros_like(att) if needs[3] else None}
        grads["edge_attr"] = torch.empty_like(edge_attr) if needs[4] else None
        grads["weight"] = torch.zeros_like(weight) if needs[5] else None
        grad_target = grad_source = None
        if any(needs[i] for i in (2, 3, 4, 5)):
            grad_target = torch.zeros_like(target, memory_format=torch.contiguous_format)
            _one_side(ctx, ctx.graph, (source, target, edge_attr, weight), att, grad, grad_target, grads)
        if needs[1]:
            grad_source = torch.zeros_like(source, memory_format=torch.contiguous_format)
            _one_side(ctx, ctx.graph.transposed, (target, source, edge_attr, weight), att, grad, grad_source, None)
        return None, grad_source, grad_target, grads["att"], grads["edge_attr"], grads["weight"], None


def _blocks(graph: Graph, feature: Tensor):
    """Slices of nonzeros, each an [edges, H, C] block of about BLOCK_BYTES."""
    step = max(1, BLOCK_BYTES // max(1, feature[0].numel() * feature.element_size()) if feature.shape[0] else 1)
    return (slice(k, min(k + step, graph.nnz)) for k in range(0, graph.nnz, step))


def _hidden(graph: Graph, block: slice, source, target, edge_attr, weight):
    """z = source[j] + target[i] + weight @ edge_attr for a block of nonzeros, and their edge ids."""
    ids = None if graph.edge_ids is None else graph.edge_ids[block]
    z = source.index_select(0, graph.indices[block])
    z += target.index_select(0, _rows(graph)[block])
    if edge_attr is not None:
        part = edge_attr[block] if ids is None else edge_attr.index_select(0, ids)
        z += F.linear(part, weight).view_as(z)
    return z, ids


def _one_side(ctx, graph: Graph, operands, att, grad, out, grads) -> None:
    """Add the gradient of the rows' features to `out`; with `grads`, also those of att, edge_attr and weight."""
    edge_attr, weight = operands[2:]
    for block in _blocks(graph, operands[0]):
        z, ids = _hidden(graph, block, *operands)
        g = (grad[block] if ids is None else grad.index_select(0, ids)).unsqueeze(-1)
        if grads is not None and grads["att"] is not None:
            grads["att"] += (F.leaky_relu(z, ctx.slope) * g).sum(0)
        dz = torch.ops.aten.leaky_relu_backward(att * g, z, ctx.slope, False)
        if grads is not None and edge_attr is not None:
            flat = dz.flatten(1)
            part = edge_attr[block] if ids is None else edge_attr.index_select(0, ids)
            if grads["weight"] is not None:
                grads["weight"] += flat.t() @ part
            if grads["edge_attr"] is not None:
                grads["edge_attr"][block if ids is None else ids] = flat @ weight
        _add_rows(graph, block, dz, out)


def _add_rows(graph: Graph, block: slice, values: Tensor, out: Tensor) -> None:
    """out[r] += the sum of `values` (a block of nonzeros) over each row r."""
    rows = _rows(graph)
    first, last = int(rows[block.start]), int(rows[block.stop - 1])
    offsets = (graph.indptr[first : last + 2] - block.start).clamp_(0, block.stop - block.start)
    out[first : last + 1] += ops.segment_reduce(values, offsets, "sum", check=False)
