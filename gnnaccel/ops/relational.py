"""Sums over edges of several types, each with a matrix of its own, as in R-GCN (Schlichtkrull et al., ESWC 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _check
from gnnaccel.ops._arrays import gradients
from gnnaccel.ops._relations import Chunk, Relations, relations_of
from gnnaccel.ops.segment_matmul import matmul_op, weights_op
from gnnaccel.ops.spmm import spmm

REDUCES = ("sum", "mean", "max", "min")
_BASES_PAY = 2  # rows to map for one that bases map: these read as many features of each edge as there are bases


def relational_spmm(
    graph: Graph,
    x: Tensor | None,
    edge_type: Tensor,
    weight: Tensor,
    coefficients: Tensor | None = None,
    norm: Tensor | None = None,
    reduce: str = "sum",
) -> Tensor:
    """out[v] = sum over relations r of (reduce over edges e = (u, v) of type r of norm[e] * x[u]) @ W[r].

    Parameters
    ----------
    graph : Graph
        num_rows destinations, num_cols sources, nnz edges.
    x : Tensor [num_cols, D_in], or None
        float32, float64, bfloat16; float16 on CUDA. None: row u of the identity, so that x[u] @ W[r] is W[r, u].
    edge_type : Tensor [nnz], int32 or int64
        Relation of each edge, by edge id, in [0, R). What is made of it is kept until it or the graph is gone, or it is
        written into.
    weight : Tensor
        W [R, D_in, D_out]; or, for block-diagonal W of H blocks, [R, H, D_in / H, D_out / H]. With coefficients bases V
        [B, ...] of either shape. Same dtype as x.
    coefficients : Tensor [R, B], optional
        W[r] = sum over b of coefficients[r, b] * V[b].
    norm : Tensor [nnz], optional
        By edge id. For sum and mean.
    reduce : {"sum", "mean", "max", "min"}
        Of the edges of one relation into one destination; mean divides by their number. Relations are always summed.
        Without an x: sum or mean.

    Returns
    -------
    Tensor [num_rows, D_out]

    Raises
    ------
    IndexError
        For an edge type outside [0, R), which is named. TypeError, ValueError: for a wrong type, dtype, shape, device
        or option.

    Notes
    -----
    No feature of an edge is stored. Edges of one relation that share a destination (or a source, if these are fewer)
    are mapped together, as many at a time as the graph has nodes; many more of these than nodes times bases: bases map
    the nodes, and the edges sum what they say. A relation without edges costs nothing. Gradients of all but edge_type,
    of any order. Runs in the dtype of its inputs under autocast.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    >>> weight = torch.tensor([[[1.0]], [[10.0]]])
    >>> gnnaccel.ops.relational_spmm(g, torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 1]), weight)
    tensor([[21.],
            [20.]])
    """
    op = "relational_spmm"
    _check.graph(op, graph)
    _check.one_of(op, "reduce", reduce, REDUCES)
    count = _check_maps(op, graph, x, weight, coefficients)
    if norm is not None:
        _check.feature(op, "norm", norm, graph.nnz, "one per edge", graph.device)
        _check.features_of(op, "norm", norm, ())
        _check.same_dtype(op, weight, norm, "weight", "norm")
        if reduce in ("max", "min"):
            raise ValueError(f"{op}: norm: is for sum and mean, got reduce={reduce!r}")
    if x is None and reduce in ("max", "min"):
        raise ValueError(f"{op}: reduce: expected sum or mean without an x, got {reduce!r}")
    relations = relations_of(op, graph, edge_type, count)
    if x is None:
        return _of_identity(graph, relations, weight, coefficients, norm, reduce)
    if reduce == "mean" and (relations.by_source or _by_bases(relations, coefficients)):
        norm, reduce = _shared(relations, norm, weight.dtype), "sum"
    if reduce == "sum" and _by_bases(relations, coefficients):
        return _over_bases(graph, relations, x, weight, coefficients, norm)
    if coefficients is not None:
        weight = _of_bases(coefficients, weight)
    given = (x, weight) if norm is None else (x, weight, norm)
    alone = reduce in ("sum", "mean") and x.dtype == weight.dtype and _operators.usual(*given)
    if alone and torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return _Sum.apply(x, weight, norm, relations, reduce, graph.num_rows)
    return _summed(x, weight, norm, relations, reduce, graph.num_rows)


def _check_maps(op: str, graph: Graph, x: Tensor | None, weight: Tensor, coefficients: Tensor | None) -> int:
    """Check the factors; returns how many relations there are."""
    rows = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else -1
    _check.feature(op, "weight", weight, rows, "relations or bases", graph.device)
    if x is not None:
        _check.feature(op, "x", x, graph.num_cols, "graph.num_cols, one per source", graph.device)
        _check.same_dtype(op, x, weight, "x", "weight")
    blocks = weight.shape[1] if weight.dim() == 4 else 1
    wanted = graph.num_cols if x is None else x.shape[1] if x.dim() == 2 else -1
    dims = (3,) if x is None else (3, 4)
    if weight.dim() not in dims or weight.shape[-2] * blocks != wanted:
        raise ValueError(
            f"{op}: weight: expected [R, D_in, D_out] or [R, H, D_in / H, D_out / H] for an x of "
            f"{None if x is None else tuple(x.shape)} and {graph.num_cols} sources, got {tuple(weight.shape)}"
        )
    if coefficients is None:
        return rows
    count = coefficients.shape[0] if isinstance(coefficients, Tensor) and coefficients.dim() else -1
    _check.feature(op, "coefficients", coefficients, count, "relations", graph.device)
    _check.features_of(op, "coefficients", coefficients, (rows,))
    _check.same_dtype(op, weight, coefficients, "weight", "coefficients")
    return count


def _by_bases(relations: Relations, coefficients: Tensor | None) -> bool:
    """True if it is better to map each node by all bases than each row by its relation's matrix."""
    if coefficients is None:
        return False
    bases = coefficients.shape[1]
    return bases > 0 and relations.num_rows > _BASES_PAY * bases * max(1, relations.num_cols)


def _of_bases(coefficients: Tensor, weight: Tensor) -> Tensor:
    """The matrices of the relations."""
    flat = weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
    return (coefficients @ flat).view(coefficients.shape[0], *weight.shape[1:])


def _shared(relations: Relations, norm: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`norm` divided by the number of edges of each edge's relation into its destination."""
    shares = relations.shares.to(dtype)
    return shares if norm is None else norm * shares


def _of_edges(relations: Relations, coefficients: Tensor, norm: Tensor | None) -> Tensor:
    """Coefficients of each edge, [nnz, B]: by a graph whose gradient adds them up by relation."""
    found = spmm(relations.of_edges.transposed, coefficients)
    return found if norm is None else found * norm.unsqueeze(1)


def _over_bases(graph, relations, x, weight, coefficients, norm) -> Tensor:
    """Nodes mapped by each basis, then summed with the coefficients of the edges."""
    bases = weight.shape[0]
    ptr = torch.arange(bases + 1) * x.shape[0]
    mapped = matmul_op(x.repeat(bases, 1), ptr, weight).view(bases, x.shape[0], -1).transpose(0, 1).contiguous()
    return spmm(graph, mapped, _of_edges(relations, coefficients, norm)).sum(1)


def _of_identity(graph, relations, weight, coefficients, norm, reduce) -> Tensor:
    """Sums of rows of the matrices themselves."""
    if reduce == "mean":
        norm = _shared(relations, norm, weight.dtype)
    if coefficients is not None and 0 < coefficients.shape[1] < coefficients.shape[0]:
        mapped = weight.transpose(0, 1).contiguous()
        return spmm(graph, mapped, _of_edges(relations, coefficients, norm)).sum(1)
    if coefficients is not None:
        weight = _of_bases(coefficients, weight)
    return spmm(relations.rows_of_matrices(graph), weight.reshape(-1, weight.shape[-1]), norm)


def _gathered(chunk: Chunk, x: Tensor, norm: Tensor | None, relations: Relations, reduce: str) -> Tensor:
    """Rows of a chunk before their map."""
    if relations.by_source and reduce == "sum":
        return spmm(chunk.gather, x)
    return spmm(chunk.gather, x, None if norm is None else norm[chunk.edges], reduce=reduce)


def _scattered(chunk: Chunk, mapped: Tensor, norm: Tensor | None, relations: Relations, reduce: str) -> Tensor:
    if relations.by_source and reduce == "sum" and norm is not None:
        return spmm(chunk.scatter, mapped, norm[chunk.edges])
    return spmm(chunk.scatter, mapped)


def _summed(x, weight, norm, relations: Relations, reduce: str, num_rows: int) -> Tensor:
    """The sum, each op by itself."""
    chunks = relations.chunks if reduce == "sum" else relations.by_destination
    out = None
    for chunk in chunks:
        rows = _gathered(chunk, x, norm, relations, reduce)
        mapped = matmul_op(rows, chunk.ptr, weight[chunk.first : chunk.last])
        part = _scattered(chunk, mapped, norm, relations, reduce)
        out = part if out is None else out + part
    if out is None:
        width = weight.shape[-1] * (weight.shape[1] if weight.dim() == 4 else 1)
        given = x.sum() * 0 + weight.sum() * 0 if x.numel() else weight.sum() * 0
        out = x.new_zeros(num_rows, width) + given
    return out


class _Sum(torch.autograd.Function):
    """The same for sums and means, which keeps no row of a chunk from one pass to the other."""

    @staticmethod
    def forward(ctx, x, weight, norm, relations, reduce, num_rows):
        ctx.save_for_backward(x, weight, norm)
        ctx.relations, ctx.reduce, ctx.num_rows = relations, reduce, num_rows
        return _summed(x, weight, norm, relations, reduce, num_rows)

    @staticmethod
    def backward(ctx, grad):
        given, wanted = ctx.saved_tensors, ctx.needs_input_grad[:3]
        relations, reduce = ctx.relations, ctx.reduce
        if torch.is_grad_enabled():
            found = gradients(lambda *t: _summed(*t, relations, reduce, ctx.num_rows), given, wanted, grad)
            return *found, None, None, None
        return *_gradients(*given, grad.contiguous(), relations, reduce, wanted), None, None, None


def _gradients(x, weight, norm, grad, relations: Relations, reduce: str, wanted) -> tuple:
    """Of x, weight and norm, chunk by chunk."""
    of_x, _, of_norm = wanted
    grad_x, grad_weight, grad_norm = (
        torch.zeros_like(t, memory_format=torch.contiguous_format) if w else None
        for t, w in zip((x, weight, norm), wanted, strict=True)
    )
    heads = weight.shape[1] if weight.dim() == 4 else 0
    behind = relations.by_source and reduce == "sum"  # norms are
    for chunk in relations.chunks if reduce == "sum" else relations.by_destination:
        own = weight[chunk.first : chunk.last]
        leaf = x.detach().requires_grad_(of_x)
        factor = None if norm is None else norm[chunk.edges].detach().requires_grad_(of_norm)
        with torch.enable_grad():
            rows = spmm(chunk.gather, leaf, None if behind else factor, reduce=reduce)
            if behind and of_norm:
                mapped = matmul_op(rows.detach(), chunk.ptr, own.detach())
            else:  # no gradient asks for its values
                mapped = grad.new_empty(rows.shape[0], grad.shape[1])
            part = spmm(chunk.scatter, mapped.requires_grad_(), factor if behind else None)
        asked = [mapped, factor] if behind and of_norm and factor is not None else [mapped]
        grad_mapped, *of_factor = torch.autograd.grad(part, asked, grad)
        if grad_weight is not None:
            grad_weight[chunk.first : chunk.last] = weights_op(rows.detach(), chunk.ptr, grad_mapped, heads)
        asked = [t for t, w in ((leaf, of_x), (factor, of_norm and not behind)) if w and t is not None]
        if asked:
            grad_rows = matmul_op(grad_mapped, chunk.ptr, own.transpose(-1, -2))
            found = torch.autograd.grad(rows, asked, grad_rows)
            if grad_x is not None:
                grad_x += found[0]
            of_factor += found[1:] if of_x else found
        if grad_norm is not None:
            grad_norm[chunk.edges] = of_factor[0]
    return grad_x, grad_weight, grad_norm
