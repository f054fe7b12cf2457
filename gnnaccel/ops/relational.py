"""Sums over edges of several types, each with a matrix of its own, as in R-GCN (Schlichtkrull et al., ESWC 2018)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _check
from gnnaccel.ops._arrays import gradients
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops._relations import Chunk, Relations, relations_of
from gnnaccel.ops.sddmm import sddmm
from gnnaccel.ops.segment_matmul import matmul_op
from gnnaccel.ops.spmm import spmm
from gnnaccel.ops.summed_rows import SummedRows

REDUCES = ("sum", "mean", "max", "min")


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
    of any order. Runs in the dtype of its inputs under autocast too, in the widest of several.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    >>> weight = torch.tensor([[[1.0]], [[10.0]]])
    >>> gnnaccel.ops.relational_spmm(g, torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 1]), weight)
    tensor([[21.],
            [20.]])
    """
    return _checked("relational_spmm", graph, x, edge_type, weight, coefficients, norm, reduce, _NO_OWN)


class Own(NamedTuple):
    """What destinations add: x @ weight, of x [num_rows, F] and weight [F, D_out], and a bias [D_out]; each may be
    None."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


_NO_OWN = Own(None, None, None)


def relational_layer(
    graph: Graph,
    x: Tensor | None,
    edge_type: Tensor,
    weight: Tensor,
    coefficients: Tensor | None,
    reduce: str,
    own: Own,
) -> Tensor:
    """relational_spmm(graph, x, edge_type, weight, coefficients, reduce=reduce) + own.x @ own.weight + own.bias, as one
    node of autograd where that may be: on CUDA each one takes as long as a kernel. `own` of the dtype of x."""
    return _checked("relational_spmm", graph, x, edge_type, weight, coefficients, None, reduce, own)


def _checked(op: str, graph: Graph, x, edge_type, weight, coefficients, norm, reduce: str, own: Own) -> Tensor:
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
    given = (x, weight, coefficients, norm)
    if not torch.is_autocast_enabled(graph.device.type):
        return _relational(graph, relations, *given, own, reduce)
    wide = functools.reduce(torch.promote_types, (t.dtype for t in given if t is not None))
    with torch.autocast(graph.device.type, enabled=False):
        features, matrices, factors, norms, *adds = (None if t is None else t.to(wide) for t in (*given, *own))
        return _relational(graph, relations, features, matrices, factors, norms, Own(*adds), reduce)


def _relational(graph: Graph, relations: Relations, x, weight, coefficients, norm, own: Own, reduce: str) -> Tensor:
    """The op on checked arguments of one dtype."""
    if reduce == "mean":
        norm, reduce = _shared(relations, norm, weight.dtype), "sum"
    if x is None:
        return _plus(_of_identity(graph, relations, weight, coefficients, norm), own)
    if reduce == "sum" and _by_bases(relations, coefficients):
        return _plus(_over_bases(graph, relations, x, weight, coefficients, norm), own)
    given = (x, weight, coefficients, norm, *own)
    there = [t for t in given if t is not None]
    if reduce == "sum" and all(t.dtype == x.dtype for t in there) and _operators.usual(*there):
        if torch.is_grad_enabled() and any(t.requires_grad for t in there):
            return _sum(*given, relations, graph.num_rows)
        matrices = weight if coefficients is None else _of_bases(coefficients, weight)
        return _forward(x, matrices, norm, *own, relations, graph.num_rows)
    return _composed(*given, relations, graph.num_rows, reduce)


def _plus(out: Tensor, own: Own) -> Tensor:
    if own.x is not None and own.weight is not None:
        out = out + own.x @ own.weight
    return out if own.bias is None else out + own.bias


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
    return bases > 0 and relations.num_rows > bounds.BASES_ROWS * bases * max(1, relations.num_cols)


def _edges_by_bases(relations: Relations, coefficients: Tensor) -> bool:
    """True if, without an x, it is better that edges sum rows of the bases than that the relations' matrices are made:
    these are up to four times as large, and each edge reads one row of them, not one of each basis."""
    count, bases = coefficients.shape
    if bases == 0 or bases >= count:
        return False
    return (
        count > 4 * bases
        or count * relations.num_cols * (bases + bounds.MATRIX_KEPT_WORK)
        > bounds.EDGE_READ_WORK * relations.nnz * bases
    )


def _of_bases(coefficients: Tensor, weight: Tensor) -> Tensor:
    """The matrices of the relations."""
    flat = weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
    return (coefficients @ flat).view(coefficients.shape[0], *weight.shape[1:])


def _shared(relations: Relations, norm: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`norm` divided by the number of edges of each edge's relation into its destination."""
    shares = relations.shares(dtype)
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


def _of_identity(graph, relations, weight, coefficients, norm) -> Tensor:
    """Sums of rows of the matrices themselves."""
    if coefficients is not None and _edges_by_bases(relations, coefficients):
        mapped = weight.transpose(0, 1).contiguous()
        return spmm(graph, mapped, _of_edges(relations, coefficients, norm)).sum(1)
    if coefficients is not None:
        weight = _of_bases(coefficients, weight)
    return spmm(relations.rows_of_matrices(graph), weight.reshape(-1, weight.shape[-1]), norm)


def _composed(x, weight, coefficients, norm, own, own_weight, bias, relations: Relations, num_rows: int, reduce="sum"):
    """The sum, each op by itself."""
    if coefficients is not None:
        weight = _of_bases(coefficients, weight)
    sums, out = reduce == "sum", None
    for chunk in relations.chunks if sums else relations.by_destination:
        before, after = _factors(chunk, norm, relations)
        rows = spmm(chunk.gather, x, before, reduce=reduce)
        mapped = matmul_op(rows, chunk.ptr, weight[chunk.first : chunk.last])
        part = spmm(chunk.scatter, mapped, after)
        out = part if out is None else out + part
    if out is None:  # no edges
        given = [t for t in (x, weight, norm) if t is not None]
        out = x.new_zeros(num_rows, _width(weight)) + sum(t[:0].sum() for t in given)
    return _plus(out, Own(own, own_weight, bias))


def _width(weight: Tensor) -> int:
    return weight.shape[-1] * (weight.shape[1] if weight.dim() == 4 else 1)


def _factors(chunk: Chunk, norm: Tensor | None, relations: Relations) -> tuple[Tensor | None, Tensor | None]:
    """Of the edges of a chunk's two graphs; one of them has a single edge for each row, without a factor."""
    if norm is None:
        return None, None
    factor = relations.shares_of(chunk, norm.dtype)[0] if relations.are_shares(norm) else norm[chunk.edges]
    return (None, factor) if relations.by_source else (factor, None)


def _sources(chunk: Chunk, x: Tensor, factors: Tensor | None, relations: Relations) -> SummedRows:
    return SummedRows(chunk.gather, x, factors, chunk.short or relations.by_source)


def _forward(x, matrices, norm, own, own_weight, bias, relations: Relations, num_rows: int) -> Tensor:
    """The sum of tensors that are `usual`, without a gradient: `_composed` in fewer kernels."""
    out = None
    for chunk in relations.chunks:
        before, after = _factors(chunk, norm, relations)
        mapped = _sources(chunk, x, before, relations).mapped(chunk.ptr, matrices[chunk.first : chunk.last])
        part = spmm(chunk.scatter, mapped, after)
        out = part if out is None else out.add_(part)
    if out is None:
        out = x.new_zeros(num_rows, _width(matrices))
    if own is not None:
        out.addmm_(own, own_weight)
    return out if bias is None else out.add_(bias)


class _Sum(_operators.Function):
    """The same of "sum", which keeps no row of a chunk from one pass to the other."""

    @staticmethod
    def forward(ctx, x, weight, coefficients, norm, own, own_weight, bias, relations, num_rows):
        ctx.save_for_backward(x, weight, coefficients, norm, own, own_weight, bias)
        ctx.relations, ctx.num_rows, ctx.is_own = relations, num_rows, own is x
        matrices = weight if coefficients is None else _of_bases(coefficients, weight)
        ctx.matrices = None if coefficients is None else matrices
        return _forward(x, matrices, norm, own, own_weight, bias, relations, num_rows)

    @staticmethod
    def backward(ctx, grad):
        given, wanted, relations = ctx.saved_tensors, ctx.needs_input_grad[:7], ctx.relations
        if torch.is_grad_enabled():  # a second derivative is asked for
            found = gradients(lambda *t: _composed(*t, relations, ctx.num_rows), given, wanted, grad)
            return *found, None, None
        grad, (x, weight, coefficients, norm, own, own_weight, _) = grad.contiguous(), given
        of_own, of_own_weight, of_bias = wanted[4:]
        matrices = weight if coefficients is None else ctx.matrices
        found = _gradients(x, matrices, weight, coefficients, norm, grad, relations, wanted)
        grad_own = grad_own_weight = None
        if of_own and ctx.is_own:  # as much as x: its gradient is added there
            found[0].addmm_(grad, own_weight.t())
            grad_own = torch.zeros_like(x) if _operators.is_added_up(ctx) else None
        elif of_own:
            grad_own = grad.mm(own_weight.t())
        if of_own_weight:
            grad_own_weight = own.t().mm(grad)
        return *found, grad_own, grad_own_weight, column_sums(grad) if of_bias else None, None, None


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_sum = super(torch.autograd.Function, _Sum).apply  # type: ignore[misc]


def _gradients(x, matrices, weight, coefficients, norm, grad, relations: Relations, wanted) -> tuple:
    """Of x, weight, coefficients and norm, chunk by chunk, where the relations have `matrices`."""
    of_x, of_weight, of_coefficients, of_norm, *_ = wanted
    of_matrices, by_source = of_weight or of_coefficients, relations.by_source
    heads = matrices.shape[1] if matrices.dim() == 4 else 0
    grad_x: Any = None
    grad_matrices: Any = None
    grad_norm: Any = torch.zeros_like(norm) if of_norm else None
    for chunk in relations.chunks:
        own, (before, after) = matrices[chunk.first : chunk.last], _factors(chunk, norm, relations)
        back = before
        if before is not None and relations.are_shares(norm):  # those of a row are one: it may have it
            before, after, back = None, relations.shares_of(chunk, norm.dtype)[1], None
        rows = _sources(chunk, x, before, relations)
        grads = SummedRows(chunk.spread, grad, after, chunk.short or not by_source)
        grad_rows = grads.mapped(chunk.ptr, own.transpose(-1, -2)) if of_x or (of_norm and not by_source) else None
        if of_matrices:
            part = rows.weights(chunk.ptr, grads, heads)
            if part.shape == matrices.shape:
                grad_matrices = part
            else:
                grad_matrices = torch.zeros_like(matrices) if grad_matrices is None else grad_matrices
                grad_matrices[chunk.first : chunk.last] = part
        if of_x:
            part = spmm(chunk.gather.transposed, grad_rows, back)
            grad_x = part if grad_x is None else grad_x.add_(part)
        if of_norm and by_source:
            grad_norm[chunk.edges] = sddmm(chunk.scatter, rows.mapped(chunk.ptr, own), grad).flatten()
        elif of_norm:
            grad_norm[chunk.edges] = sddmm(chunk.gather, x, grad_rows).flatten()
    if of_x and grad_x is None:
        grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if of_matrices and grad_matrices is None:
        grad_matrices = torch.zeros_like(matrices, memory_format=torch.contiguous_format)
    if coefficients is None or not of_matrices:
        return grad_x, grad_matrices, None, grad_norm
    flat = grad_matrices.reshape(coefficients.shape[0], math.prod(weight.shape[1:]))
    grad_weight = (coefficients.t() @ flat).view(weight.shape) if of_weight else None
    grad_coefficients = flat @ weight.reshape(weight.shape[0], flat.shape[1]).t() if of_coefficients else None
    return grad_x, grad_weight, grad_coefficients, grad_norm
