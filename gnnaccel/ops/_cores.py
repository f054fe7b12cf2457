"""What attention layers do with mapped features, made of sums, softmax and inner products: kernels of both directions,
and the composition of public ops that gives their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._bias import biased, unbiased
from gnnaccel.ops._numbering import numbered, numbered_as
from gnnaccel.ops.dot_attention import dot_attention
from gnnaccel.ops.edge_attention import edge_attention
from gnnaccel.ops.edge_softmax import edge_softmax_backward_op, edge_softmax_op
from gnnaccel.ops.head_dots import head_dots, head_dots_backward_op, head_dots_op
from gnnaccel.ops.linear_sums import Kept
from gnnaccel.ops.sddmm import sddmm, sddmm_op
from gnnaccel.ops.spmm import spmm_op


class Core(NamedTuple):
    """A layer without its maps and bias.

    Parameters
    ----------
    forward : callable
        forward(arrays, ends, vectors, how, keep) -> out [N, H, F], and what the backward pass reads beside it.
        vectors: [V, H, F], of the dtype of the features, or of float32 beside 16-bit ones.
    gradients : callable
        gradients(arrays, ends, vectors, how, kept, grad, needed) -> list of those of ends, and that of vectors;
        needed: of each of the ends, and of the vectors.
    composed : callable
        composed(graph, ends, vectors, how) -> out, with derivatives of any order; vectors: a tuple of [1, H, F].
    """

    forward: Callable[..., tuple[Tensor, tuple]]
    gradients: Callable[..., tuple[list, Any]]
    composed: Callable[..., Tensor]


class How(NamedTuple):
    """The slope of scores below zero, or what inner products are multiplied by; and the factor [nnz, H] of the weights
    of edges: a constant, or None."""

    number: float
    edge_scale: Tensor | None


# SuperGAT's scores: inner products of both ends, or (with vectors) GAT's sums times the sigmoid of those. Of 16-bit
# features scores that are sums, and their softmax, are of float32.


def _super_gat(arrays: Structure, ends: tuple, vectors: Tensor | None, how: How, keep: bool) -> tuple[Tensor, tuple]:
    (x,), (slope, edge_scale) = ends, how
    products, more = _dots(arrays, x, x), []
    if vectors is None:
        scores = products.mul_(x.shape[2] ** -0.5)
    else:
        sums, gate = sddmm_op.impl(arrays, *head_dots_op.impl(x, vectors), "add", "u", "v"), products.sigmoid_()
        scores, more = sums * gate, [sums, gate]
    weight = edge_softmax_op.impl(arrays, F.leaky_relu(scores, slope))
    out = spmm_op.impl(arrays, x, times(weight, edge_scale).to(x.dtype).unsqueeze(-1), "mul", "sum", 0.0)
    return out, (weight, scores, *more)


def _super_gat_gradients(arrays: Structure, ends: tuple, vectors: Tensor | None, how: How, kept, grad, _needed):
    (x,), (slope, edge_scale), (weight, scores, *more) = ends, how, kept
    transposed = arrays.transposed()
    grad_weight = times(_dots(arrays, x, grad), edge_scale)
    of_scores = edge_softmax_backward_op.impl(arrays, weight, grad_weight.to(weight.dtype))
    of_scores = torch.ops.aten.leaky_relu_backward(of_scores, scores, slope, False)
    whole = times(weight, edge_scale).to(x.dtype).unsqueeze(-1)
    grad_x = spmm_op.impl(transposed, grad, whole, "mul", "sum", 0.0)
    if vectors is None:
        of_products, grad_vectors = of_scores.mul_(x.shape[2] ** -0.5), None
    else:
        sums, gate = more
        of_products = torch.ops.aten.sigmoid_backward(sums.mul(of_scores), gate)
        of_sums = of_scores.mul_(gate)
        of_ends = [spmm_op.impl(each, None, of_sums, "copy_rhs", "sum", 0.0) for each in (transposed, arrays)]
        grad_x, grad_vectors = head_dots_backward_op.impl(x, vectors, torch.stack(of_ends), grad_x)
    of_products = of_products.to(x.dtype).unsqueeze(-1)
    for each in (transposed, arrays):
        grad_x = grad_x.add_(spmm_op.impl(each, x, of_products, "mul", "sum", 0.0))
    return [grad_x], grad_vectors


def _super_gat_composed(graph: Graph, ends: tuple, vectors: tuple, how: How) -> Tensor:
    (x,) = ends
    scores = sddmm(graph, x, x, "dot", "u", "v").squeeze(-1)
    if vectors:
        src, dst = head_dots(x, torch.cat(vectors)).unbind()
        scores = sddmm(graph, src, dst, "add", "u", "v") * scores.sigmoid()
    else:
        scores = scores * x.shape[2] ** -0.5
    return edge_attention(graph, F.leaky_relu(scores, how.number), x, edge_scale=how.edge_scale)


def _dot(arrays: Structure, ends: tuple, _vectors, how: How, _keep: bool) -> tuple[Tensor, tuple]:
    (query, key, value), (factor, edge_scale) = ends, how
    scores = _dots(arrays, key, query * factor)
    weight = edge_softmax_op.impl(arrays, scores)
    return spmm_op.impl(arrays, value, times(weight, edge_scale).unsqueeze(-1), "mul", "sum", 0.0), (weight,)


def _dot_gradients(arrays: Structure, ends: tuple, _vectors, how: How, kept, grad, _needed):
    (query, key, value), (factor, edge_scale), (weight,) = ends, how, kept
    transposed = arrays.transposed()
    grad_weight = times(_dots(arrays, value, grad), edge_scale)
    of_scores = edge_softmax_backward_op.impl(arrays, weight, grad_weight).unsqueeze(-1)
    grad_value = spmm_op.impl(transposed, grad, times(weight, edge_scale).unsqueeze(-1), "mul", "sum", 0.0)
    grad_key = spmm_op.impl(transposed, query * factor, of_scores, "mul", "sum", 0.0)
    grad_query = spmm_op.impl(arrays, key, of_scores, "mul", "sum", 0.0).mul_(factor)
    return [grad_query, grad_key, grad_value], None


def _dot_composed(graph: Graph, ends: tuple, _vectors: tuple, how: How) -> Tensor:
    query, key, value = ends
    return dot_attention(graph, query, key, value, scale=how.number, edge_scale=how.edge_scale)


def _dots(arrays: Structure, x: Tensor, y: Tensor) -> Tensor:
    """Inner products [nnz, H] of sources and destinations."""
    return sddmm_op.impl(arrays, x, y, "dot", "u", "v").squeeze(-1)


def times(weights: Tensor, edge_scale: Tensor | None) -> Tensor:
    return weights if edge_scale is None else weights * edge_scale


SUPER_GAT = Core(_super_gat, _super_gat_gradients, _super_gat_composed)
DOT = Core(_dot, _dot_gradients, _dot_composed)  # of a query, a key and a value


class _Attended(_operators.Function):
    """A core of features and vectors of one dtype, or vectors of float32, and what it makes plus a bias, if there is
    one."""

    @staticmethod
    def forward(ctx, core, arrays, composed, edge_scale, slope, keep, bias, count, *inputs):
        ends = inputs[:count]
        vectors = torch.cat(inputs[count:]) if len(inputs) > count else None
        inner, scale, mark = numbered(arrays, edge_scale, keep)
        out, kept = core.forward(inner, ends, vectors, How(slope, scale), keep)
        if keep:
            ctx.core, ctx.arrays, ctx.composed, ctx.slope = core, arrays, composed, slope
            ctx.counts = len(inputs), count
            given = kept_vectors(ctx, ctx.needs_input_grad[8 : 8 + count], *inputs[count:])
            ctx.save_for_backward(*ends, *given, edge_scale, mark, vectors, *kept)
        return biased(out, bias)

    @staticmethod
    def backward(ctx, grad):
        (number, count), saved = ctx.counts, ctx.saved_tensors
        inputs, (edge_scale, mark, vectors, *kept) = saved[:number], saved[number:]
        inputs = *inputs[:count], *vectors_of(ctx, *inputs[count:])
        needed = ctx.needs_input_grad[8:]
        grad, of_bias = unbiased(grad, inputs[0], ctx.needs_input_grad[6])
        before = (*(None,) * 6, of_bias, None)
        if torch.is_grad_enabled() or not _operators.usual(grad, inputs[0]):
            return *before, *second(ctx, inputs, grad, needed, edge_scale=edge_scale)
        arrays, edge_scale = numbered_as(mark, ctx.arrays, edge_scale)
        needs, how = (*needed[:count], True in needed[count:]), How(ctx.slope, edge_scale)
        given = (arrays, inputs[:count], vectors, how, kept, grad, needs)
        grads, grad_vectors = ctx.core.gradients(*given)
        return *before, *grads, *(() if vectors is None else grad_vectors.split(1))


def kept_vectors(ctx: Any, features: Sequence[bool], *vectors: Tensor) -> tuple[Tensor | None, ...]:
    """What ctx is to save of the vectors. Where none of the features asks for a gradient, their values are for a second
    derivative alone: they may be written into before a first one."""
    ctx.unsaved = None if True in features else Kept(vectors)
    return vectors if ctx.unsaved is None else (None,) * len(vectors)


def vectors_of(ctx: Any, *saved: Tensor) -> tuple[Any, ...]:
    """The vectors, of what was saved of them."""
    return saved if ctx.unsaved is None else ctx.unsaved.parameters


def second(
    ctx: Any, inputs: Sequence[Tensor], grad: Tensor, needed: Sequence[bool], **constants: Tensor | None
) -> tuple:
    """Gradients that can be differentiated again: those of the composition, which ctx holds without the tensors that
    it saves, as those are freed after the backward pass."""
    if getattr(ctx, "unsaved", None) is not None:
        ctx.unsaved.check()
    return _arrays.gradients(partial(ctx.composed, **constants), inputs, needed, grad)


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
attended: Any = super(torch.autograd.Function, _Attended).apply  # type: ignore[misc]
