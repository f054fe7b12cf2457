"""What GAT and GATv2 do between their linear maps and their result, as one node of autograd: scores, softmax and sum.

Each is a composition of public ops, and gives their results; where nothing unusual is going on it runs their
kernels itself, and so hands autograd one function where the composition has three to five.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import arrays_of, needs_grad
from gnnaccel.ops.attention import (
    FUSED_DTYPES,
    _attention_backward_op,
    _attention_op,
    attention,
    shorter_by_parts,
)
from gnnaccel.ops.dot_attention import _backward_op as _dot_attention_backward_op
from gnnaccel.ops.dot_attention import _dot_attention_op
from gnnaccel.ops.edge_attention import edge_attention
from gnnaccel.ops.edge_softmax import _edge_softmax_backward_op, edge_softmax_op
from gnnaccel.ops.gatv2 import _scores_op, _sums_op, gatv2_scores
from gnnaccel.ops.head_dots import _head_dots_backward_op, head_dots
from gnnaccel.ops.spmm import spmm_op, weight_gradient


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
    negative_slope, edge_scale
        As in `attention`.

    Returns
    -------
    Tensor [num_rows, H, F]

    Raises
    ------
    TypeError, ValueError
        As `attention` and `head_dots`.
    """
    composed = partial(_gat_composed, graph, negative_slope=negative_slope, edge_scale=edge_scale)
    inputs = (x, att_src, att_dst)
    fits = x.dim() == 3 and x.shape[0] == graph.num_rows == graph.num_cols
    fits = fits and att_src.shape == att_dst.shape == (1, *x.shape[1:]) and x.shape[1:].numel() > 0
    if not fits or not _usual(graph, inputs, edge_scale) or shorter_by_parts(graph, x):
        return composed(*inputs)
    return _run(_Gat, graph, composed, inputs, edge_scale, negative_slope)


def _gat_composed(graph, x, att_src, att_dst, negative_slope, edge_scale) -> Tensor:
    scores = head_dots(x, torch.cat((att_src, att_dst))).unbind()
    return attention(graph, x, *scores, negative_slope=negative_slope, edge_scale=edge_scale)


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
    negative_slope, edge_scale
        As in `gatv2_scores` and `edge_attention`.

    Returns
    -------
    Tensor [num_rows, H, F]

    Raises
    ------
    TypeError, ValueError
        As those.
    """
    composed = partial(_gatv2_composed, graph, negative_slope=negative_slope, edge_scale=edge_scale)
    inputs = (x, y, vectors)
    fits = x.dim() == 3 and x.shape[0] == graph.num_cols and y.shape == (graph.num_rows, *x.shape[1:])
    fits = fits and vectors.shape == x.shape[1:] and x.shape[1:].numel() > 0
    if not fits or not _usual(graph, inputs, edge_scale):
        return composed(*inputs)
    return _run(_Gatv2, graph, composed, inputs, edge_scale, negative_slope)


def _gatv2_composed(graph, x, y, vectors, negative_slope, edge_scale) -> Tensor:
    scores = gatv2_scores(graph, x, y, vectors, negative_slope=negative_slope)
    return edge_attention(graph, scores, x, edge_scale=edge_scale)


def _usual(graph: Graph, inputs: tuple[Tensor, ...], edge_scale: Tensor | None) -> bool:
    """True where the kernels of one node take plain tensors of one dtype that they serve, and nobody listens."""
    x = inputs[0]
    if not _operators.plain((*inputs, edge_scale), (0, 1, 2)) or _operators.forward_mode():
        return False
    if x.dtype not in FUSED_DTYPES[x.device.type] or x.device != graph.device or not graph.nnz:
        return False
    if edge_scale is not None and (edge_scale.requires_grad or edge_scale.shape != (graph.nnz, x.shape[1])):
        return False
    return all(t is None or (t.dtype == x.dtype and t.device == x.device) for t in (*inputs[1:], edge_scale))


def _run(function, graph: Graph, composed: Callable, inputs: tuple, edge_scale: Tensor | None, slope: float) -> Tensor:
    arrays = arrays_of(graph, needs_grad(*inputs), inputs[0])
    return function.apply(*inputs, arrays, composed, edge_scale, slope)


class _Gat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, att_src, att_dst, arrays, composed, edge_scale, slope):
        keep = any(ctx.needs_input_grad)
        vectors = torch.cat((att_src, att_dst))
        scores = head_dots(x, vectors)
        factor = (edge_scale, None, 0.0)
        out, *kept = _attention_op(arrays, x, *scores, *factor, slope, keep)
        ctx.arrays, ctx.composed, ctx.slope = arrays, composed, slope
        if keep:
            ctx.save_for_backward(x, att_src, att_dst, edge_scale, scores, out, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, att_src, att_dst, edge_scale, scores, out, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_second(ctx, (x, att_src, att_dst), grad), None, None, None, None
        given = (x, *scores, edge_scale, None, 0.0, out, *kept, grad, ctx.slope)
        grad_x, *grad_scores = _attention_backward_op(ctx.arrays.turned(), *given)
        vectors = torch.cat((att_src, att_dst))
        more, grad_vectors = _head_dots_backward_op(x, vectors, torch.stack(grad_scores))
        grads = (grad_x.add_(more), *(g.unsqueeze(0) for g in grad_vectors))
        return *grads, None, None, None, None


class _Gatv2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, vectors, arrays, composed, edge_scale, slope):
        keep = any(ctx.needs_input_grad)
        scores = _scores_op(arrays, x, y, vectors, slope)
        ctx.arrays, ctx.composed, ctx.slope = arrays, composed, slope
        ctx.parts = x.is_cuda and keep  # whose backward is the faster there, as in edge_attention
        if ctx.parts:
            kept = [edge_softmax_op(arrays, scores)]
            weight = _times(kept[0], edge_scale)
            out = spmm_op(arrays, x, weight.unsqueeze(-1), "mul", "sum", 0.0)
        else:
            out, stats = _dot_attention_op(arrays, None, None, x, scores, edge_scale, None, 0.0, 1.0)
            kept = [scores, out, stats]
        if keep:
            ctx.save_for_backward(x, y, vectors, edge_scale, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, y, vectors, edge_scale, *kept = ctx.saved_tensors
        arrays, needed = ctx.arrays, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *_second(ctx, (x, y, vectors), grad), None, None, None, None
        if ctx.parts:
            (weight,) = kept
            grad_weight = weight_gradient(arrays, x, grad, (x.shape[1], 1), "mul").squeeze(-1)
            grad_weight = _times(grad_weight, edge_scale)
            grad_scores = _edge_softmax_backward_op(arrays, weight, grad_weight)
            whole = _times(weight, edge_scale).unsqueeze(-1)
            grad_x = spmm_op(arrays.turned(), grad, whole, "mul", "sum", 0.0) if needed[0] else None
        else:
            given = (None, None, x, kept[0], edge_scale, None, 0.0, *kept[1:], grad, 1.0, False, True, True)
            *_, grad_x, grad_scores = _dot_attention_backward_op(arrays, *given)
        grad_y = grad_vectors = None
        if needed[0]:
            more, _ = _sums_op(arrays.turned(), y, x, vectors, grad_scores, ctx.slope, False)
            grad_x = grad_x.add_(more)
        if needed[1] or needed[2]:
            grad_y, products = _sums_op(arrays, x, y, vectors, grad_scores, ctx.slope, needed[2])
            grad_vectors = products.sum(0).to(y.dtype) if needed[2] else None
        return grad_x, grad_y if needed[1] else None, grad_vectors, None, None, None, None


def _times(weights: Tensor, edge_scale: Tensor | None) -> Tensor:
    return weights if edge_scale is None else weights * edge_scale


def _second(ctx, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple:
    """Gradients that can be differentiated again: those of the composition."""
    return _arrays.gradients(ctx.composed, inputs, ctx.needs_input_grad[:3], grad)
