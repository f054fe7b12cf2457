"""Every op in plain torch: the definition the kernels are tested against, and documentation.

These functions gather one message per edge and keep no promise of speed. Arguments are as in the public
ops; graphs are anything with ``indptr``, ``indices``, ``edge_ids``, ``num_rows``, ``num_cols``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_of(indptr: Tensor) -> Tensor:
    """Row (destination) of each nonzero, int64 [nnz]."""
    indptr = indptr.long()
    return torch.repeat_interleave(torch.arange(indptr.numel() - 1, device=indptr.device), indptr.diff())


def edges_of(graph) -> Tensor:
    """Edge id of each nonzero, int64 [nnz]."""
    if graph.edge_ids is None:
        return torch.arange(graph.indices.numel(), device=graph.indptr.device)
    return graph.edge_ids.long()


def _pad(x: Tensor, dims: int) -> Tensor:
    """Features broadcast from the right, rows stay in front: ones go between them."""
    return x.reshape(x.shape[0], *(1,) * (dims - x.dim()), *x.shape[1:])


def _combine(op: str, lhs: Tensor | None, rhs: Tensor | None) -> Tensor:
    """op of the operands of each edge; None stands for the one that a copy does not read."""
    if lhs is None or rhs is None or op in ("copy_lhs", "copy_rhs"):
        copied = rhs if op == "copy_rhs" else lhs
        assert copied is not None, f"{op} lacks an operand"
        return copied
    dims = max(lhs.dim(), rhs.dim())
    lhs, rhs = _pad(lhs, dims), _pad(rhs, dims)
    if op == "dot":
        return (lhs * rhs).sum(-1, keepdim=True)
    return getattr(torch, op)(lhs, rhs)  # add, sub, mul or div


def segment_reduce(x: Tensor, offsets: Tensor, reduce: str, empty_value: float = 0.0) -> Tensor:
    """Reduce rows offsets[i]:offsets[i+1] of x [n, *F] to out [len(offsets) - 1, *F]."""
    rows = rows_of(offsets)
    count = offsets.long().diff().view(-1, *[1] * (x.dim() - 1))
    index = rows.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    # include_self=False keeps the start out of the result, but its backward still shares the gradient of a max or
    # min with a start that equals it: NaN equals nothing.
    out = x.new_full((offsets.numel() - 1, *x.shape[1:]), torch.nan)
    name = {"sum": "sum", "mean": "sum", "max": "amax", "min": "amin"}[reduce]
    out = out.scatter_reduce(0, index, x, name, include_self=False)
    if reduce == "mean":
        out = out / count.clamp(min=1).to(out.dtype)
    return torch.where(count == 0, torch.full_like(out, empty_value), out)


def spmm(graph, x: Tensor | None, weight: Tensor | None, message: str, reduce: str, empty_value: float = 0.0) -> Tensor:
    """out[r] = reduce over nonzeros (r, c, e) of message(x[c], weight[e])."""
    if x is not None and weight is not None:
        weight = weight.reshape(*weight.shape, *(1,) * (x.dim() - weight.dim()))
    lhs = None if x is None or message == "copy_rhs" else x[graph.indices.long()]
    rhs = None if weight is None or message == "copy_lhs" else weight[edges_of(graph)]
    return segment_reduce(_combine(message, lhs, rhs), graph.indptr, reduce, empty_value)


def graph_conv(
    graph, x: Tensor, weight: Tensor | None, source_scale, row_scale, bias: Tensor | None, relu: bool
) -> Tensor:
    """act(row_scale * sum over nonzeros (r, c, e) of weight[e] * source_scale[c] * x[c] + bias); None: left out."""
    shape = (-1, *(1,) * (x.dim() - 1))
    if source_scale is not None:
        x = x * source_scale.view(shape)
    out = spmm(graph, x, weight, "copy_lhs" if weight is None else "mul", "sum")
    if row_scale is not None:
        out = out * row_scale.view(shape)
    if bias is not None:
        out = out + bias
    return torch.relu(out) if relu else out


def sddmm(graph, lhs: Tensor | None, rhs: Tensor | None, op: str, lhs_target: str, rhs_target: str) -> Tensor:
    """out[e] = op(lhs of its target, rhs of its target) for every nonzero (r, c, e)."""
    edges = edges_of(graph)
    where = {"u": graph.indices.long(), "v": rows_of(graph.indptr), "e": edges}
    left = None if lhs is None or op == "copy_rhs" else lhs[where[lhs_target]]
    right = None if rhs is None or op == "copy_lhs" else rhs[where[rhs_target]]
    value = _combine(op, left, right)
    return torch.zeros_like(value).index_copy(0, edges, value)


def edge_softmax(graph, scores: Tensor) -> Tensor:
    """Softmax of scores [nnz, *H] over the edges of each row."""
    edges = edges_of(graph)
    s = scores[edges]
    top = segment_reduce(s.detach(), graph.indptr, "max")
    rows = rows_of(graph.indptr)
    p = (s - top[rows]).exp()
    p = p / segment_reduce(p, graph.indptr, "sum")[rows]
    return torch.zeros_like(p).index_copy(0, edges, p)


def head_dots(x: Tensor, vectors: Tensor) -> Tensor:
    """out[v, n, h] = <x[n, h], vectors[v, h]>."""
    return torch.einsum("nhf,vhf->vnh", x, vectors)


def gatv2_scores(graph, x: Tensor, y: Tensor, vectors: Tensor, negative_slope: float) -> Tensor:
    """<vectors[h], leaky_relu(x[u, h] + y[v, h])> of every edge (u, v) and head h."""
    value = torch.nn.functional.leaky_relu(sddmm(graph, x, y, "add", "u", "v"), negative_slope)
    return (value * vectors).sum(-1)


def attention(graph, x: Tensor, score_src: Tensor, score_dst: Tensor, negative_slope: float, edge_scale=None) -> Tensor:
    """Additive attention over x [num_cols, H, F]: the composition of the three ops above."""
    scores = sddmm(graph, score_src, score_dst, "add", "u", "v")
    weight = edge_softmax(graph, torch.nn.functional.leaky_relu(scores, negative_slope))
    if edge_scale is not None:
        weight = weight * edge_scale
    return spmm(graph, x, weight.unsqueeze(-1), "mul", "sum")


def dot_attention(graph, query: Tensor, key: Tensor, value: Tensor, scale: float, edge_scale=None) -> Tensor:
    """Dot-product attention over [.., H, F]: the composition of sddmm, edge_softmax and spmm."""
    weight = edge_softmax(graph, sddmm(graph, key, query, "dot", "u", "v").squeeze(-1) * scale)
    if edge_scale is not None:
        weight = weight * edge_scale
    return spmm(graph, value, weight.unsqueeze(-1), "mul", "sum")
