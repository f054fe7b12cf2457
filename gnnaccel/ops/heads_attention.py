"""Attention by inner products of heads, as layers have it: one node of autograd."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _layers_short
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops._cores import DOT, attended, second
from gnnaccel.ops._edge_factor import FUSED_DTYPES
from gnnaccel.ops._usual import BY_PARTS, asks, is_usual
from gnnaccel.ops.dot_attention import dot_attention


def heads_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_scale: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`dot_attention` of features without a bias of the edges or a dropout, by the shortest way.

    Parameters
    ----------
    graph : Graph
    query : Tensor [num_rows, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    key, value : Tensor [num_cols, H, F], same dtype
    edge_scale, scale
        As in `dot_attention`.

    Returns
    -------
    Tensor [num_rows, H, F]

    Raises
    ------
    TypeError, ValueError
        As `dot_attention`.
    """
    composed, inputs = partial(dot_attention, graph, scale=scale), (query, key, value)
    fits = query.dim() == 3 and query.shape[0] == graph.num_rows and query.shape[1:].numel() > 0
    fits = fits and key.shape == value.shape == (graph.num_cols, *query.shape[1:])
    if not fits or not is_usual(graph, inputs, edge_scale, dtypes=BY_PARTS):
        return composed(*inputs, edge_scale=edge_scale)
    keep, factor = asks(inputs), query.shape[2] ** -0.5 if scale is None else scale
    if _layers_short.as_they_lie(query, key, value, edge_scale):
        if not query.is_cuda or query.shape[2] * query.element_size() <= bounds.DOT_HEAD_BYTES:
            return _dot(*inputs, arrays_of(graph, keep, value), composed, edge_scale, keep, factor)
    elif value.dtype not in FUSED_DTYPES["cuda" if value.is_cuda else "cpu"]:
        return attended(
            DOT, arrays_of(graph, keep, value), composed, edge_scale, factor, keep, None, len(inputs), *inputs
        )
    return composed(*inputs, edge_scale=edge_scale)


class _Dot(_operators.Function):
    @staticmethod
    def forward(ctx, query, key, value, arrays, composed, edge_scale, keep, factor):
        out, stats = _layers_short.dot(arrays, query, key, value, edge_scale, factor)
        ctx.arrays, ctx.composed, ctx.factor = arrays, composed, factor
        if keep:
            ctx.save_for_backward(query, key, value, edge_scale, out, stats)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, edge_scale, *kept = ctx.saved_tensors
        inputs, grad = (query, key, value), grad.contiguous()
        usual = not torch.is_grad_enabled() and _operators.usual(grad, query)
        if not usual or not _layers_short.as_they_lie(query, key, value, edge_scale, *kept, grad):
            return *second(ctx, inputs, grad, ctx.needs_input_grad[:3], edge_scale=edge_scale), *(None,) * 5
        found = _layers_short.dot_gradients(
            ctx.arrays, (*inputs, edge_scale), kept, grad, ctx.factor, bounds.SCORES_KEPT
        )
        return *found, *(None,) * 5


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_dot = super(torch.autograd.Function, _Dot).apply  # type: ignore[misc]
