"""Rows that a graph of short rows sums from features, and their products with matrices: stored where a product of
torch's needs them stored, and only then."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.ops.segment_matmul import Sums, matmul_of_sums, matmul_op, weights_of_sums, weights_op
from gnnaccel.ops.spmm import spmm


class SummedRows:
    """spmm(graph, x, factors) of tensors that are `usual`; without a gradient.

    graph : None: the rows are x.
    short : whether rows have so few edges that a thread is to add one up.
    """

    def __init__(self, graph: Graph | None, x: Tensor, factors: Tensor | None, short: bool):
        self._given, self._x = (graph, x, factors), x
        self.sums = Sums(graph, factors) if graph is not None and short and x.is_cuda else None

    @functools.cached_property
    def stored(self) -> Tensor:
        graph, x, factors = self._given
        return x if graph is None else spmm(graph, x, factors)

    @property
    def x(self) -> Tensor:
        """What `sums` are of; without these the rows."""
        return self.stored if self.sums is None else self._x

    def mapped(self, ptr: Tensor, weight: Tensor, spare: int = 0) -> Tensor:
        """matmul_op(rows, ptr, weight): products with the matrices of their segments; and behind them `spare` rows to
        be written."""
        found = None if self.sums is None else matmul_of_sums(self.sums, self.x, ptr, weight, spare)
        if found is not None:
            return found
        found = matmul_op(self.stored, ptr, weight)
        return torch.cat([found, found.new_empty(spare, found.shape[1])]) if spare else found

    def weights(self, ptr: Tensor, grad: SummedRows, heads: int) -> Tensor:
        """weights_op(rows, ptr, grad's rows, heads): the gradient of these matrices, of that of the products."""
        found = None
        if self.sums is not None or grad.sums is not None:
            found = weights_of_sums(self.sums, self.x, ptr, grad.sums, grad.x, heads)
        return weights_op(self.stored, ptr, grad.stored, heads) if found is None else found
