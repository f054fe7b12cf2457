"""What DGL's message passing runs on: gnnaccel's ops, on checked operands. torch_kernels.py has the same in torch."""

from __future__ import annotations

import torch

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops._arrays import arrays_of, needs_grad
from gnnaccel.ops.cbsr import CBSR
from gnnaccel.ops.edge_softmax import edge_softmax_op
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.segment import segment_reduce
from gnnaccel.ops.spmm import aggregate

__all__ = ["edge_softmax", "sddmm", "segment_reduce", "spmm"]


def spmm(graph: Graph, message: str, reduce: str, lhs, rhs, empty_value: float) -> torch.Tensor:
    """out[r] = reduce over nonzeros (r, c, e) of message(lhs[c], rhs[e])."""
    if isinstance(lhs, CBSR):
        return ops.spmm(graph, lhs, rhs, message, reduce, empty_value=empty_value)
    sums = reduce in ("sum", "mean") and not needs_grad(rhs)  # as in ops.spmm
    arrays = arrays_of(graph, needs_grad(lhs, rhs), lhs, rhs, sums=sums)
    return aggregate(arrays, lhs, rhs, message, reduce, empty_value)


def sddmm(graph: Graph, lhs, rhs, op: str, lhs_target: str, rhs_target: str) -> torch.Tensor:
    """out[e] = op(lhs of its target, rhs of its target) for every edge e."""
    return sddmm_op(arrays_of(graph, needs_grad(lhs, rhs), lhs, rhs), lhs, rhs, op, lhs_target, rhs_target)


def edge_softmax(graph: Graph, scores: torch.Tensor) -> torch.Tensor:
    """Softmax of scores [nnz, *H] over the edges of each row."""
    return edge_softmax_op(arrays_of(graph, False, listed=False), scores)
