"""The softmax of edges by a short way: two launches, no registered op.

It reads nothing of a graph but its rows, so that there is nothing to be made ready but their description. Whatever is
unusual (a mode, a view, a second derivative) goes the general way, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops._arrays import csr_of
from gnnaccel.ops._edge_order import dense, is_profitable


def softmax_of(graph: Graph, scores: Any, gradient: Callable[[Graph, Tensor, Tensor], Tensor]) -> Tensor | None:
    """Softmax of scores [nnz, *H] over the edges of each row; None where the general way is to be taken, with all its
    checks: nothing has been done then.

    gradient : callable
        gradient(graph, out, grad_out): the gradient of the scores by the registered ops, differentiable.
    """
    indices = graph.indices
    if not _operators.usual(scores) or not scores.dim() or scores.shape[0] != indices.shape[0]:
        return None
    if scores.device != indices.device or not _may_be_read(scores):
        return None
    if scores.is_cuda and is_profitable(graph.edge_ids, scores, 0, dense(graph.nnz, graph.num_rows)):
        return None
    if scores.requires_grad and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return _recorded(scores, graph, gradient)
    return _softmax(graph, scores)


def _may_be_read(x: Tensor) -> bool:
    if not x.is_contiguous() or not x.numel() or x.dtype not in lib.DTYPES:
        return False
    return x.dtype != torch.float16 or x.is_cuda


def _softmax(graph: Graph, scores: Tensor) -> Tensor:
    out, heads = torch.empty_like(scores), scores.numel() // graph.indices.shape[0]
    given = (scores.data_ptr(), out.data_ptr(), heads, lib.DTYPES[scores.dtype])
    lib.launch("edge_softmax", scores.device, csr_of(graph), *given)
    return out


def _backward(graph: Graph, out: Tensor, grad: Tensor) -> Tensor:
    grad_scores, heads = torch.empty_like(out), out.numel() // graph.indices.shape[0]
    given = (out.data_ptr(), grad.data_ptr(), grad_scores.data_ptr(), heads, lib.DTYPES[out.dtype])
    lib.launch("edge_softmax_backward", out.device, csr_of(graph), *given)
    return grad_scores


class _Softmax(_operators.Function):
    @staticmethod
    def forward(ctx, scores, graph, gradient):
        out = _softmax(graph, scores)
        ctx.graph, ctx.gradient = graph, gradient
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        # Hooks on saved tensors may give back another one.
        usual = not torch.is_grad_enabled() and _operators.usual(grad, out)
        if usual and out.dtype == grad.dtype and out.shape == grad.shape and _may_be_read(out):
            return _backward(ctx.graph, out, grad.contiguous()), None, None
        return ctx.gradient(ctx.graph, out, grad), None, None


# Function.apply() looks for transforms of torch.func first, which are not there.
_recorded = super(torch.autograd.Function, _Softmax).apply  # type: ignore[misc]
