"""GATv2 layers of many edge types between two kinds of nodes as one node of autograd, as `gat_layers` has those of GAT.

All layers attend in one walk over a graph of blocks: each layer has rows for its sources and for its destinations of
its own, one layer's below the other's. Scores are found layer by layer, as each has vectors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import below_each_other
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Structure, arrays_of
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops._numbering import numbered_alike, numbered_as
from gnnaccel.ops._weight_gradient import weight_gradient
from gnnaccel.ops.edge_softmax import edge_softmax_backward_op, edge_softmax_op
from gnnaccel.ops.gat_layers import How, are_ends, ends_of
from gnnaccel.ops.gatv2 import scores_op, sums_op
from gnnaccel.ops.layers import gatv2
from gnnaccel.ops.spmm import spmm_op


class Gatv2Layer(NamedTuple):
    """`gatv2` over `graph` of x mapped by weight_src and bias_src, and y by weight_dst and bias_dst; and a bias.

    graph : Graph
        With edges.
    x : Tensor [num_cols, F]
    y : Tensor [num_rows, G]
    weight_src : Tensor [H * C, F]
    bias_src, bias_dst : Tensor [H * C] or None
    weight_dst : Tensor [H * C, G]
    vectors : Tensor [1, H, C]
    bias : Tensor [H * C], or [C] where heads are averaged, or None
    """

    graph: Graph
    x: Tensor
    y: Tensor
    weight_src: Tensor
    bias_src: Tensor | None
    weight_dst: Tensor
    bias_dst: Tensor | None
    vectors: Tensor
    bias: Tensor | None


def takes(layers: Sequence[Gatv2Layer]) -> bool:
    """True if `gatv2_layers` serves these."""
    first = layers[0]
    heads, outputs = first.vectors.shape[1:] if first.vectors.dim() == 3 else (0, 0)
    wide = heads * outputs
    if not wide:
        return False
    for graph, x, y, weight_src, bias_src, weight_dst, bias_dst, vectors, bias in layers:
        if vectors.shape != (1, heads, outputs) or not graph.nnz or not x.numel() or not y.numel():
            return False
        if any(t is not None and t.shape != (wide,) for t in (bias_src, bias_dst)):
            return False
        if not are_ends(first.x, wide, graph, x, y, weight_src, weight_dst, bias_src, bias_dst, vectors, bias):
            return False
    return True


def gatv2_layers(targets: Sequence[Sequence[Gatv2Layer]], how: How, kept: Callable) -> list[Tensor]:
    """For each target the sum of its layers.

    Parameters
    ----------
    targets : sequence of sequences of Gatv2Layer
        Those of one target have the same `y`. All have as many heads and channels; `takes` says yes to all.
    how : How
    kept : callable
        kept(key, make) returns what make() has made for these graphs and this key before, or makes it.

    Returns
    -------
    list of Tensor [num_rows, H * C], or [num_rows, C]
    """
    everything = [layer for layers in targets for layer in layers]
    features, places, _ = ends_of(targets)
    given: list[Tensor | None] = [t for layer in everything for t in layer[3:]]
    ends = [(places[id(layer.x)], places[id(layer.y)]) for layer in everything]
    graphs = [layer.graph for layer in everything]
    graph = kept(
        ("gatv2", tuple([(g.num_rows, g.num_cols) for g in graphs])),
        partial(below_each_other, graphs, own_columns=True),
    )
    both = torch.is_grad_enabled()
    whole, *each = [arrays_of(g, both, features[0]) for g in (graph, *graphs)]
    call = _Call(graphs, ends, [len(layers) for layers in targets], len(features), how, both, whole, each)
    return list(_layers(call, *features, *given))


class _Call(NamedTuple):
    """ends : for each layer the places of x and y among the features. counts : how many layers each target has.
    both : whether there may be a backward pass."""

    graphs: list[Graph]
    ends: list[tuple[int, int]]
    counts: list[int]
    features: int
    how: How
    both: bool
    whole: Structure
    each: list[Structure]

    def by_target(self) -> list[range]:
        found, first = [], 0
        for count in self.counts:
            found.append(range(first, first + count))
            first += count
        return found


_SRC, _BIAS_SRC, _DST, _BIAS_DST, _VECTORS, _BIAS, _EACH = range(7)  # a layer's parameters, and how many there are


class _Layers(_operators.Function):
    """Gradients of a target that nothing was made of are None, as if each had a node of its own."""

    @staticmethod
    def forward(ctx, call, *given):
        parameters, like = given[call.features :], given[0]
        (whole, *every), mark = numbered_alike([call.whole, *call.each], call.both)
        heads, outputs = parameters[_VECTORS].shape[1:]
        mapped = [like.new_empty(rows, heads, outputs) for rows in (whole.num_cols, whole.num_rows)]
        sides = _split(call, *mapped)
        scores = []
        for n, (arrays, sources, targets) in enumerate(zip(every, *sides, strict=True)):
            of = parameters[n * _EACH : (n + 1) * _EACH]
            _map(given[call.ends[n][0]], of[_SRC], of[_BIAS_SRC], sources)
            _map(given[call.ends[n][1]], of[_DST], of[_BIAS_DST], targets)
            scores.append(scores_op.impl(arrays, sources, targets, of[_VECTORS][0], call.how.negative_slope))
        weight = edge_softmax_op.impl(whole, torch.cat(scores))
        attended = spmm_op.impl(whole, mapped[0], weight.unsqueeze(-1), "mul", "sum", 0.0)
        outs, first = [], 0
        for numbers in call.by_target():
            rows = call.graphs[numbers[0]].num_rows
            out = attended[first : first + rows * len(numbers)].view(len(numbers), rows, heads * outputs).sum(0)
            out = out if call.how.concat else out.view(rows, heads, outputs).mean(1)
            for n in numbers:
                bias = parameters[n * _EACH + _BIAS]
                out = out if bias is None else out.add_(bias)
            outs.append(out)
            first += rows * len(numbers)
        if True in ctx.needs_input_grad:
            ctx.set_materialize_grads(False)
            ctx.call = call
            ctx.save_for_backward(*mapped, weight, mark, *given)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        sources, targets, weight, mark, *given = ctx.saved_tensors
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return None, *_second(call, given, grads, needs)
        found: list[Tensor | None] = [None] * len(needs)
        reached = [
            n for numbers, grad in zip(call.by_target(), grads, strict=True) if grad is not None for n in numbers
        ]
        slope, parameters = call.how.negative_slope, call.features
        whole, *every = [numbered_as(mark, arrays, None)[0] for arrays in (call.whole, *call.each)]
        rows = _rows(call, grads, targets)
        of_weight = weight_gradient(whole, sources, rows, (sources.shape[1], 1), "mul").squeeze(-1)
        of_scores = edge_softmax_backward_op.impl(whole, weight, of_weight)
        of_sources = spmm_op.impl(whole.transposed(), rows, weight.unsqueeze(-1), "mul", "sum", 0.0)
        each_scores = of_scores.split([graph.nnz for graph in call.graphs])
        sides = zip(*_split(call, sources, targets), _split(call, of_sources, rows)[0], each_scores, strict=True)
        for n, (x, y, of_x, scores) in enumerate(sides):
            if n not in reached:
                continue
            arrays, at = every[n], parameters + n * _EACH
            vectors = given[at + _VECTORS][0]
            more, _ = sums_op.impl(arrays.transposed(), y, x, vectors, scores, slope, False)
            of_x.add_(more)
            of_y, products = sums_op.impl(arrays, x, y, vectors, scores, slope, True)
            found[at + _VECTORS] = column_sums(products).unsqueeze(0)
            ends = ((call.ends[n][0], at + _SRC, of_x), (call.ends[n][1], at + _DST, of_y))
            for place, number, grad in ends:
                _add_gradients(found, needs, given, place, number, grad.view(grad.shape[0], -1))
        for numbers, grad in zip(call.by_target(), grads, strict=True):
            places = [parameters + n * _EACH + _BIAS for n in numbers]
            if grad is not None and any(needs[place] for place in places):
                total = grad.sum(0)
                for place in places:
                    found[place] = total
        return None, *[grad if need else None for grad, need in zip(found, needs, strict=True)]


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: `takes` has found none.
_layers = super(torch.autograd.Function, _Layers).apply  # type: ignore[misc]


def _split(call: _Call, sources: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What rows of sources and of destinations each layer has."""
    by_source = sources.split([graph.num_cols for graph in call.graphs])
    return by_source, targets.split([graph.num_rows for graph in call.graphs])


def _map(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    flat = out.view(x.shape[0], -1)
    if bias is None:
        torch.mm(x, weight.t(), out=flat)
    else:
        torch.addmm(bias, x, weight.t(), out=flat)


def _rows(call: _Call, grads: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """The gradient of what is attended, of all layers below each other; zeros where nothing was made of a target."""
    rows, first = torch.empty_like(like), 0
    heads, outputs = like.shape[1:]
    for numbers, grad in zip(call.by_target(), grads, strict=True):
        size = call.graphs[numbers[0]].num_rows
        part = rows[first : first + size * len(numbers)].view(len(numbers), size, heads, outputs)
        first += size * len(numbers)
        if grad is None:
            part.zero_()
        else:
            part.copy_(grad.view(size, heads, outputs) if call.how.concat else (grad / heads).unsqueeze(1))
    return rows


def _add_gradients(found: list, needs: Sequence[bool], given: Sequence, place: int, number: int, grad: Tensor) -> None:
    """Those of a map, whose weight is `number` of what is given and whose bias is the next, from that of its result."""
    if needs[number]:
        found[number] = grad.t().mm(given[place])
    if given[number + 1] is not None and needs[number + 1]:
        found[number + 1] = column_sums(grad)
    if needs[place]:
        old = found[place]
        found[place] = grad.mm(given[number]) if old is None else old.addmm_(grad, given[number])


def _second(call: _Call, given: Sequence[Any], grads: Sequence[Tensor | None], needs: Sequence[bool]) -> list:
    """Gradients with derivatives of their own, those of the layers one by one."""
    pairs = [(numbers, grad) for numbers, grad in zip(call.by_target(), grads, strict=True) if grad is not None]

    def composed(*given):
        outs = []
        for numbers, _ in pairs:
            parts = []
            for n in numbers:
                at, (x, y) = call.features + n * _EACH, call.ends[n]
                parts.append(_one(call.graphs[n], call.how, given[x], given[y], *given[at : at + _EACH]))
            outs.append(sum(parts[1:], start=parts[0]))
        return tuple(outs)

    found = list(_arrays.gradients(composed, given, needs, tuple([grad for _, grad in pairs])))
    reached = {n for numbers, _ in pairs for n in numbers}
    places = {place for n in reached for place in call.ends[n]}
    for place in range(len(found)):
        layer = (place - call.features) // _EACH
        if (place < call.features and place not in places) or (place >= call.features and layer not in reached):
            found[place] = None
    return found


def _one(graph: Graph, how: How, x, y, weight_src, bias_src, weight_dst, bias_dst, vectors, bias) -> Tensor:
    shape = (-1, *vectors.shape[1:])
    ends = F.linear(x, weight_src, bias_src).view(shape), F.linear(y, weight_dst, bias_dst).view(shape)
    out = gatv2(graph, *ends, vectors[0], negative_slope=how.negative_slope)
    out = out.flatten(1) if how.concat else out.mean(1)
    return out if bias is None else out + bias
