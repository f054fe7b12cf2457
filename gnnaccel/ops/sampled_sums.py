"""Sums with a linear map behind them, beside a map of the features themselves, over a sampled batch: without the work
that no result needs.

Models that are not told of the hops of a batch run each of their layers on all its nodes, most of which are of its last
hop. Those have no edges: nothing is summed and mapped for them. And where the loss is of the seeds, as it is after
``model(batch.x, batch.edge_index)[:batch.batch_size]``, the gradient of a layer's result is zero but for the first hops
(gradient_rows.py): of the backward pass are left all products but those of the rows that count.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators, touch
from gnnaccel.graph import hops
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.hops import Hops
from gnnaccel.lower import bounds
from gnnaccel.ops import gradient_rows, ready
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.spmm import FORMS, spmm


def is_profitable(graph: Graph, x: Tensor, weight: Tensor) -> bool:
    """True for a sampled batch on which `sum_mapped` is to do what `linear_sums.sum_mapped` does."""
    sampled = hops.of(graph)
    return sampled is not None and sampled.edges[-1] > 0 and x.shape[0] * weight.numel() >= bounds.SAMPLED_PRODUCTS


def sum_mapped(graph: Graph, x: Tensor, reduce: str, weight: Tensor, bias: Tensor | None, own_weight: Tensor) -> Tensor:
    """linear(spmm(graph, x, reduce=reduce), weight, bias) + linear(x, own_weight), arguments checked by the caller."""
    return _sum_mapped(x, weight, bias, own_weight, graph, reduce)


def hop_of(rows: int, sampled: Hops) -> int:
    """The first hop before which there are as many nodes; the number of hops, if there are fewer before all of them."""
    return next((hop for hop, count in enumerate(sampled.nodes[:-1]) if count >= rows), len(sampled.nodes) - 1)


def _reach(node, rows: int) -> int:
    """gradient_rows.register: how many rows of x have a gradient, if as many of the result have."""
    sampled = hops.of(node.graph)
    assert sampled is not None
    hop = hop_of(rows, sampled) + 1
    return sampled.nodes[hop] if hop < len(sampled.nodes) else node.num_nodes


def _sums(graph: Graph, x: Tensor, reduce: str) -> Tensor:
    """spmm(graph, x, reduce=reduce), where it is known that nobody listens and none is recorded."""
    call = ready.call_of(graph, x, FORMS[reduce], None, None, None, False)
    return spmm(graph, x, reduce=reduce) if call is None else call.forward(x, None)


def _gradient_of_sums(graph: Graph, x: Tensor, reduce: str, grad: Tensor, into: Tensor | None = None) -> Tensor:
    """That of x [num_cols, F]; `into`, which may be where it is put, or a new tensor."""
    if not torch.is_grad_enabled():
        call = ready.call_of(graph, x, FORMS[reduce], None, None, None, True)
        if call is not None:
            return call.gradient(grad, into)
    return FORMS[reduce].gradient(arrays_of(graph, True, x, sums=True), grad, None, None)


class _SumMapped(_operators.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, own_weight, graph, reduce):
        sampled = hops.of(graph)
        sums = _sums(hops.head(graph, len(sampled.nodes) - 2), x[: sampled.nodes[-1]], reduce)
        out = F.linear(x, own_weight, bias)
        out[: sampled.num_filled].addmm_(sums, weight.t())
        of_x, of_weight, _, of_own_weight, *_ = ctx.needs_input_grad
        if of_own_weight:
            ctx.graph, ctx.reduce, ctx.rows, ctx.num_nodes = graph, reduce, None, x.shape[0]
            ctx.hooks = gradient_rows.recorded()
            maps = (weight, own_weight) if of_x else (None, None)
            ctx.save_for_backward(x, *maps, sums if of_weight else None)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, own_weight, sums = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # a second derivative is asked for
        sampled = hops.of(ctx.graph)
        last = len(sampled.nodes) - 2
        hop = last + 1 if again or ctx.rows is None else hop_of(ctx.rows, sampled)
        grad = (grad if hop > last else grad[: sampled.nodes[hop]]).contiguous()
        some = hops.head(ctx.graph, min(hop, last))  # rows that have edges and a gradient
        of_some, sources = grad[: some.num_rows], x[: some.num_cols]
        grad_x = grad_weight = None
        if of_weight:
            sums = spmm(some, sources, reduce=ctx.reduce) if again else sums[: some.num_rows]
            grad_weight = of_some.t().mm(sums)
        if of_x:
            into = None
            if not again and hop <= last:
                grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
                into = grad_x[: some.num_cols]
            part = _gradient_of_sums(some, sources, ctx.reduce, of_some.mm(weight), into)
            if again:
                grad_x = grad.mm(own_weight) + F.pad(part, (0, 0, 0, x.shape[0] - part.shape[0]))
            elif hop > last:
                grad_x = grad.mm(own_weight)
                grad_x[: part.shape[0]] += part
            else:
                if part is not into:
                    into.copy_(part)
                into[: grad.shape[0]].addmm_(grad, own_weight)
                grad_x[some.num_cols :] = 0
        grad_bias = grad.sum(0) if of_bias else None
        return grad_x, grad_weight, grad_bias, grad.t().mm(x[: grad.shape[0]]), None, None


_sum_mapped = super(torch.autograd.Function, _SumMapped).apply  # type: ignore[misc] # as of linear_sums
gradient_rows.register(touch.backward_class(_SumMapped), _reach)
