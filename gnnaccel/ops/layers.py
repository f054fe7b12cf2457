"""What GAT and GATv2 do between their linear maps and their result, as one node of autograd: scores, softmax and sum.

Each is a composition of public ops, and gives their results; where nothing unusual is going on it runs their
kernels itself, and so hands autograd one function where the composition has three to five.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _layers_short
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops._bias import biased, column_sums, unbiased
from gnnaccel.ops._cores import kept_vectors, second, times, vectors_of
from gnnaccel.ops._edge_factor import edge_factor
from gnnaccel.ops._numbering import numbered, numbered_as
from gnnaccel.ops._usual import asks, inner_bias, is_usual, mixed
from gnnaccel.ops.attention import (
    attention,
    attention_backward_op,
    attention_op,
    check_scores,
    of_scores,
    shorter_by_parts,
)
from gnnaccel.ops.dot_attention import (
    dot_attention_backward_op,
    dot_attention_op,
)
from gnnaccel.ops.edge_attention import edge_attention
from gnnaccel.ops.edge_softmax import edge_softmax_backward_op, edge_softmax_op
from gnnaccel.ops.gatv2 import gatv2_scores, scores_op, sums_op
from gnnaccel.ops.head_dots import head_dots, head_dots_backward_op, head_dots_op
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import spmm_op


def gat(
    graph: Graph,
    x: Tensor,
    att_src: Tensor,
    att_dst: Tensor,
    *,
    negative_slope: float = 0.2,
    edge_scale: Tensor | None = None,
) -> Tensor:
    """GAT on a graph whose sources are its destinations: `attention` with the scores <x[u, h], att_src[h]> and
    <x[v, h], att_dst[h]>.

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    x : Tensor [num_rows, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    att_src, att_dst : Tensor [1, H, F], same dtype
        Under autocast also a wider one, as scores in `attention`.
    negative_slope, edge_scale
        As in `attention`.

    Returns
    -------
    Tensor [num_rows, H, F]

    Raises
    ------
    TypeError, ValueError
        As `attention` and `head_dots`.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x = torch.tensor([[[2.0]], [[4.0]]])
    >>> gnnaccel.ops.gat(g, x, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))[0]
    tensor([[3.]])
    """
    out = narrow_gat(graph, x, att_src, att_dst, negative_slope=negative_slope, edge_scale=edge_scale)
    return out if out.dtype == att_src.dtype else out.to(mixed(x, att_src)[1])


def narrow_gat(
    graph: Graph,
    x: Tensor,
    att_src: Tensor,
    att_dst: Tensor,
    *,
    negative_slope: float,
    edge_scale: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """`gat`, under autocast of the dtype of the kernels, for callers that make it wider themselves; with a bias [H * F]
    of the dtype of the vectors what is made of both, [num_rows, H * F]."""
    narrow = x.dtype != att_src.dtype and torch.is_autocast_enabled(x.device.type)
    if narrow:
        dtype = mixed(x, att_src)[0]
        x, edge_scale = x.to(dtype), None if edge_scale is None else edge_scale.to(dtype)
    composed = partial(_gat_composed, graph, negative_slope=negative_slope, narrow=narrow)
    inputs = (x, att_src, att_dst)
    fits = x.dim() == 3 and x.shape[0] == graph.num_rows == graph.num_cols
    fits = fits and att_src.shape == att_dst.shape == (1, *x.shape[1:]) and x.shape[1:].numel() > 0
    if (
        not fits
        or not is_usual(graph, inputs, edge_scale, narrow)
        or shorter_by_parts(graph, x.shape[2] * x.element_size())
    ):
        return biased(composed(*inputs, edge_scale=edge_scale), bias)
    keep = asks(inputs)
    inside = inner_bias(bias, x, keep)
    out = _gat(*inputs, arrays_of(graph, keep, x), composed, edge_scale, negative_slope, keep, inside)
    return out if bias is inside else biased(out, bias)


def _gat_composed(graph, x, att_src, att_dst, negative_slope, edge_scale, narrow=False) -> Tensor:
    src, dst = head_dots(x, torch.cat((att_src, att_dst))).unbind()
    if not narrow:
        return attention(graph, x, src, dst, negative_slope=negative_slope, edge_scale=edge_scale)
    check_scores(graph, x, src, dst)
    factor = edge_factor("attention", graph, x.shape[1], edge_scale, 0.0, None)
    return of_scores(graph, x, src, dst, factor, negative_slope)


def gatv2(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    vectors: Tensor,
    *,
    negative_slope: float = 0.2,
    edge_scale: Tensor | None = None,
) -> Tensor:
    """GATv2: `edge_attention` over x with the scores of `gatv2_scores`.

    Parameters
    ----------
    graph : Graph
    x : Tensor [num_cols, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    y : Tensor [num_rows, H, F], same dtype
    vectors : Tensor [H, F], same dtype
        Under autocast also a wider one, as in `gat`.
    negative_slope, edge_scale
        As in `gatv2_scores` and `edge_attention`.

    Returns
    -------
    Tensor [num_rows, H, F]

    Raises
    ------
    TypeError, ValueError
        As those.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x = torch.tensor([[[2.0]], [[4.0]]])
    >>> gnnaccel.ops.gatv2(g, x, x, torch.zeros(1, 1))[0]
    tensor([[3.]])
    """
    out = narrow_gatv2(graph, x, y, vectors, negative_slope=negative_slope, edge_scale=edge_scale)
    return out if out.dtype == vectors.dtype else out.to(mixed(x, vectors)[1])


def narrow_gatv2(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    vectors: Tensor,
    *,
    negative_slope: float,
    edge_scale: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """`gatv2`, as `narrow_gat`."""
    if x.dtype != vectors.dtype and torch.is_autocast_enabled(x.device.type):
        dtype = mixed(x, vectors)[0]
        same, x = y is x, x.to(dtype)
        y, vectors = x if same else y.to(dtype), vectors.to(dtype)
        edge_scale = None if edge_scale is None else edge_scale.to(dtype)
    composed = partial(_gatv2_composed, graph, negative_slope=negative_slope)
    inputs = (x, y, vectors)
    fits = x.dim() == 3 and x.shape[0] == graph.num_cols and y.shape == (graph.num_rows, *x.shape[1:])
    fits = fits and vectors.shape == x.shape[1:] and x.shape[1:].numel() > 0
    if not fits or not is_usual(graph, inputs, edge_scale):
        return biased(composed(*inputs, edge_scale=edge_scale), bias)
    keep = asks(inputs)
    inside = inner_bias(bias, x, keep)
    out = _gatv2(*inputs, arrays_of(graph, keep, x), composed, edge_scale, negative_slope, keep, inside)
    return out if bias is inside else biased(out, bias)


def _gatv2_composed(graph, x, y, vectors, negative_slope, edge_scale) -> Tensor:
    scores = gatv2_scores(graph, x, y, vectors, negative_slope=negative_slope)
    return edge_attention(graph, scores, x, edge_scale=edge_scale)


_NOTHING = (None,) * 5  # gradients of the arguments behind the first three


class _Gat(_operators.Function):
    """Of vectors of the dtype of x, or of float32."""

    @staticmethod
    def forward(ctx, x, att_src, att_dst, arrays, composed, edge_scale, slope, keep, bias):
        vectors = torch.cat((att_src, att_dst)).to(lib.accumulator(x))
        ctx.arrays, ctx.composed, ctx.slope = arrays, composed, slope
        if _layers_short.as_they_lie(x, edge_scale):
            scores, out, *kept = _layers_short.gat(arrays, x, vectors, edge_scale, slope, keep)
        else:
            scores = head_dots_op.impl(x, vectors)
            factor = (edge_scale, None, 0.0)
            out, *kept = attention_op.impl(arrays, x, *scores, *factor, slope, keep)
        if keep:
            given = kept_vectors(ctx, ctx.needs_input_grad[:1], att_src, att_dst)
            ctx.save_for_backward(x, *given, vectors, edge_scale, scores, out, *kept)
        return biased(out, bias)

    @staticmethod
    def backward(ctx, grad):
        x, att_src, att_dst, vectors, edge_scale, scores, out, *kept = ctx.saved_tensors
        att_src, att_dst = vectors_of(ctx, att_src, att_dst)
        grad, of_bias = unbiased(grad, x, ctx.needs_input_grad[8])
        rest = (*_NOTHING, of_bias)
        if torch.is_grad_enabled() or not _operators.usual(grad, x):
            return *second(ctx, (x, att_src, att_dst), grad, ctx.needs_input_grad[:3], edge_scale=edge_scale), *rest
        if _layers_short.as_they_lie(x, vectors, edge_scale, scores, out, *kept, grad):
            saved = (scores, out, *kept)
            grad_x, grads = _layers_short.gat_gradients(ctx.arrays, x, vectors, edge_scale, saved, grad, ctx.slope)
            grads = grads if grads.dtype is att_src.dtype else grads.to(att_src.dtype)
            return grad_x, grads[:1], grads[1:], *rest
        given = (x, *scores, edge_scale, None, 0.0, out, *kept, grad, ctx.slope)
        grad_x, *grad_scores = attention_backward_op.impl(ctx.arrays.transposed(), *given)
        grad_x, grad_vectors = head_dots_backward_op.impl(x, vectors, torch.stack(grad_scores), grad_x)
        grad_vectors = grad_vectors.to(att_src.dtype)
        return grad_x, grad_vectors[:1], grad_vectors[1:], *rest


class _Gatv2(_operators.Function):
    @staticmethod
    def forward(ctx, x, y, vectors, arrays, composed, edge_scale, slope, keep, bias):
        ctx.arrays, ctx.composed, ctx.slope = arrays, composed, slope
        ctx.parts = x.is_cuda and keep  # whose backward is the faster there, as in edge_attention
        if not x.is_cuda and _layers_short.as_they_lie(x, y, vectors, edge_scale):
            kept = _, out, _ = _layers_short.gatv2(arrays, x, y, vectors, edge_scale, slope)
            if keep:
                ctx.save_for_backward(x, y, *kept_vectors(ctx, ctx.needs_input_grad[:2], vectors), edge_scale, *kept)
            return biased(out, bias)
        inner, scale, mark = numbered(arrays, edge_scale, keep)
        scores = scores_op.impl(inner, x, y, vectors, slope)
        if ctx.parts:
            kept = [mark, edge_softmax_op.impl(inner, scores.to(lib.accumulator(x)))]
            weight = times(kept[1], scale).to(x.dtype)
            out = spmm_op.impl(inner, x, weight.unsqueeze(-1), "mul", "sum", 0.0)
        else:
            out, stats = dot_attention_op.impl(inner, None, None, x, scores, scale, None, 0.0, 1.0)
            kept = [scores, out, stats]
        if keep:
            ctx.save_for_backward(x, y, *kept_vectors(ctx, ctx.needs_input_grad[:2], vectors), edge_scale, *kept)
        return biased(out, bias)

    @staticmethod
    def backward(ctx, grad):
        x, y, vectors, edge_scale, *kept = ctx.saved_tensors
        (vectors,) = vectors_of(ctx, vectors)
        arrays, needed = ctx.arrays, ctx.needs_input_grad
        # What hooks on saved tensors give back may lie otherwise.
        grad, of_bias = unbiased(grad, y, needed[8])
        rest = (*_NOTHING, of_bias)
        if torch.is_grad_enabled() or not _operators.usual(grad, x):
            return *second(ctx, (x, y, vectors), grad, ctx.needs_input_grad[:3], edge_scale=edge_scale), *rest
        if not x.is_cuda and _layers_short.as_they_lie(x, y, vectors, edge_scale, *kept):
            given = (x, y, vectors, edge_scale)
            return *_layers_short.gatv2_gradients(arrays, given, kept, grad, ctx.slope, needed), *rest
        if ctx.parts:
            mark, weight = kept
            arrays, edge_scale = numbered_as(mark, arrays, edge_scale)
            grad_weight = times(sddmm_op.impl(arrays, x, grad, "dot", "u", "v").squeeze(-1), edge_scale)
            grad_scores = edge_softmax_backward_op.impl(arrays, weight, grad_weight.to(weight.dtype))
            whole = times(weight, edge_scale).to(x.dtype).unsqueeze(-1)
            grad_x = spmm_op.impl(arrays.transposed(), grad, whole, "mul", "sum", 0.0) if needed[0] else None
        else:
            given = (None, None, x, kept[0], edge_scale, None, 0.0, *kept[1:], grad, 1.0, False, True, True)
            *_, grad_x, grad_scores = dot_attention_backward_op.impl(arrays, *given)
        grad_y = grad_vectors = None
        if needed[0]:
            more, _ = sums_op.impl(arrays.transposed(), y, x, vectors, grad_scores, ctx.slope, False)
            grad_x = grad_x.add_(more)
        if needed[1] or needed[2]:
            grad_y, products = sums_op.impl(arrays, x, y, vectors, grad_scores, ctx.slope, needed[2])
            grad_vectors = column_sums(products, y.dtype) if needed[2] else None
        return grad_x, grad_y if needed[1] else None, grad_vectors, *rest


# `keep`: whether there will be a backward pass; ctx.needs_input_grad says so under torch.no_grad too.
# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where these are called.
_gat, _gatv2 = (super(torch.autograd.Function, f).apply for f in (_Gat, _Gatv2))  # type: ignore[misc]
