"""What ResGated does between its linear maps and its result, as one node of autograd: gates and their sum."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import messages
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops._cores import second
from gnnaccel.ops._usual import asks, is_usual
from gnnaccel.ops.sddmm import sddmm, sddmm_op
from gnnaccel.ops.spmm import spmm, spmm_op


def gated_sum(graph: Graph, gate_src: Tensor, gate_dst: Tensor, x: Tensor) -> Tensor:
    """out[v] = sum over edges e = (u, v) of sigmoid(gate_src[u] + gate_dst[v]) * x[u].

    Parameters
    ----------
    graph : Graph
    gate_src, x : Tensor [num_cols, F]
        float32, float64, bfloat16; float16 on CUDA.
    gate_dst : Tensor [num_rows, F], same dtype

    Returns
    -------
    Tensor [num_rows, F]

    Raises
    ------
    TypeError, ValueError
        As `sddmm` and `spmm`.

    Notes
    -----
    `message_reduce`, which stores nothing for edges. On CUDA without NVRTC, and of float16: stores the gates, [nnz, F],
    and in the backward their gradient.
    Source: Bresson and Laurent, Residual Gated Graph ConvNets, 2017.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> gnnaccel.ops.gated_sum(g, torch.zeros(2, 1), torch.zeros(2, 1), torch.tensor([[2.0], [4.0]]))[0]
    tensor([3.])
    """
    composed, inputs = partial(_gated_composed, graph), (gate_src, gate_dst, x)
    fits = x.dim() == 2 and x.shape == gate_src.shape == (graph.num_cols, *x.shape[1:]) and x.shape[1] > 0
    fits = fits and gate_dst.shape == (graph.num_rows, x.shape[1])
    fused = messages.is_fused(graph) and x.dtype != torch.float16
    if fits and fused and gate_src.dtype == gate_dst.dtype == x.dtype:
        return messages.message_reduce(graph, _GATED, {"src": gate_src, "dst": gate_dst, "x": x})
    if not fits or not is_usual(graph, inputs, None):
        return composed(*inputs)
    return _gated(*inputs, arrays_of(graph, asks(inputs), x), composed)


_GATED = messages.sigmoid(messages.u("src") + messages.v("dst")) * messages.u("x")


def _gated_composed(graph, gate_src, gate_dst, x) -> Tensor:
    return spmm(graph, x, sddmm(graph, gate_src, gate_dst, "add").sigmoid())


class _Gated(_operators.Function):
    @staticmethod
    def forward(ctx, gate_src, gate_dst, x, arrays, composed):
        gates = sddmm_op.impl(arrays, gate_src, gate_dst, "add", "u", "v").sigmoid_()
        out = spmm_op.impl(arrays, x, gates, "mul", "sum", 0.0)
        ctx.arrays, ctx.composed = arrays, composed
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(gate_src, gate_dst, x, gates)
        return out

    @staticmethod
    def backward(ctx, grad):
        gate_src, gate_dst, x, gates = ctx.saved_tensors
        if torch.is_grad_enabled() or not _operators.usual(grad, x):
            return *second(ctx, (gate_src, gate_dst, x), grad, ctx.needs_input_grad[:3]), None, None
        arrays, (of_src, of_dst, of_x, *_) = ctx.arrays, ctx.needs_input_grad
        grad_src = grad_dst = None
        if of_src or of_dst:
            grad_gates = sddmm_op.impl(arrays, x, grad, "mul", "u", "v")
            grad_gates = torch.ops.aten.sigmoid_backward(grad_gates, gates)
            grad_src = spmm_op.impl(arrays.transposed(), None, grad_gates, "copy_rhs", "sum", 0.0) if of_src else None
            grad_dst = spmm_op.impl(arrays, None, grad_gates, "copy_rhs", "sum", 0.0) if of_dst else None
        grad_x = spmm_op.impl(arrays.transposed(), grad, gates, "mul", "sum", 0.0) if of_x else None
        return grad_src, grad_dst, grad_x, None, None


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_gated = super(torch.autograd.Function, _Gated).apply  # type: ignore[misc]
