"""Message passing on torch's own kernels: what `gnnaccel compare` puts beside ours where DGL has no CUDA itself.

Sums and means of copied or scaled sources, and the gradients of scalar edge weights, are cuSPARSE's (SpMM and SDDMM),
which is what a CUDA build of DGL calls for such sums. The rest gathers and scatters, one message per edge.
"""

from __future__ import annotations

import math

import torch

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference


def _matrix(graph: Graph, values: torch.Tensor) -> torch.Tensor:
    shape = (graph.num_rows, graph.num_cols)
    return torch.sparse_csr_tensor(graph.indptr, graph.indices, values, shape, check_invariants=False)


class _Sum(_operators.Function):
    """out = A x with A the graph's matrix of `weight` [nnz] (None: ones), x [num_cols, D]."""

    @staticmethod
    def _multiply(graph: Graph, weight, x):
        if weight is None:
            values = x.new_ones(graph.nnz)
        else:
            values = weight if graph.edge_ids is None else weight[graph.edge_ids.long()]
        return _matrix(graph, values) @ x

    @staticmethod
    def forward(ctx, graph, weight, x):
        ctx.graph = graph
        ctx.save_for_backward(weight, x if ctx.needs_input_grad[1] else None)
        return _Sum._multiply(graph, weight, x)

    @staticmethod
    def backward(ctx, grad):
        (weight, x), graph = ctx.saved_tensors, ctx.graph
        grad = grad.contiguous()
        grad_x = _Sum._multiply(graph.transposed, weight, grad) if ctx.needs_input_grad[2] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            pattern = _matrix(graph, grad.new_zeros(graph.nnz))
            found = torch.sparse.sampled_addmm(pattern, grad, x.t(), beta=0.0).values()
            edges = reference.edges_of(graph)
            grad_weight = torch.zeros_like(found).index_copy_(0, edges, found)
        return None, grad_weight, grad_x


def ready_sum(graph: Graph, x, message: str, reduce: str, weight=None) -> None:
    """Nothing is ready here."""


def ready_softmax(graph: Graph, scores) -> None:
    """Nor here."""


def spmm(graph: Graph, lhs, rhs, message: str, reduce: str, empty_value: float) -> torch.Tensor:
    """out[r] = reduce over nonzeros (r, c, e) of message(lhs[c], rhs[e])."""
    scalar = rhs is not None and rhs[:1].numel() <= 1
    if reduce in ("sum", "mean") and (message == "copy_lhs" or (message == "mul" and scalar)) and graph.nnz:
        x = lhs.reshape(lhs.shape[0], math.prod(lhs.shape[1:]))
        out = _Sum.apply(graph, rhs.reshape(-1) if message == "mul" else None, x)
        if reduce == "mean":
            out = out / graph.indptr.diff().clamp(min=1).unsqueeze(-1).to(out.dtype)
        return out.reshape(graph.num_rows, *lhs.shape[1:])
    return reference.spmm(graph, lhs, rhs, message, reduce, empty_value)


sddmm = reference.sddmm
edge_softmax = reference.edge_softmax
segment_reduce = reference.segment_reduce
