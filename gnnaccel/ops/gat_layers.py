"""GAT layers between two kinds of nodes, of one edge type or of many, as one node of autograd.

All layers attend in one walk: the features of a node stand there once for each layer that reads them, mapped by one
product, and a destination has a row for each layer into it. Scores are products of the nodes' own features with the
maps' inner products with the attention vectors, so that destinations are not mapped at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import Relation, Stack, below_each_other
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.attention import attention, attention_backward_op, attention_op

_DTYPES = (torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda")


class GatLayer(NamedTuple):
    """`attention` over `graph` of linear(x, weight_src) [num_cols, H, C], whose scores are their inner products with
    att_src, and those of linear(y, weight_dst) with att_dst; and a bias.

    graph : Graph
    x : Tensor [num_cols, F]
    y : Tensor [num_rows, G]
    weight_src : Tensor [H * C, F]
    weight_dst : Tensor [H * C, G]
    att_src, att_dst : Tensor [1, H, C]
    bias : Tensor [H * C], or [C] where heads are averaged, or None
    """

    graph: Graph
    x: Tensor
    y: Tensor
    weight_src: Tensor
    weight_dst: Tensor
    att_src: Tensor
    att_dst: Tensor
    bias: Tensor | None


class How(NamedTuple):
    """What layers have in common: the slope of scores below zero, and whether heads stand side by side or are
    averaged."""

    negative_slope: float
    concat: bool


def takes(layers: Sequence[GatLayer]) -> bool:
    """True if `gat_layers` serves these."""
    return all(layer.x.numel() and layer.y.numel() for layer in layers) and _fit(layers)


def _fit(layers: Sequence[GatLayer]) -> bool:
    first = layers[0]
    heads, outputs = first.att_src.shape[1:] if first.att_src.dim() == 3 else (0, 0)
    if first.x.device.type not in _DEVICES or not heads * outputs:
        return False
    for graph, x, y, weight_src, weight_dst, att_src, att_dst, bias in layers:
        if att_src.shape != (1, heads, outputs) or att_dst.shape != att_src.shape:
            return False
        if not are_ends(first.x, heads * outputs, graph, x, y, weight_src, weight_dst, att_src, att_dst, bias):
            return False
    return True


def are_ends(
    like: Tensor, wide: int, graph: Graph, x: Tensor, y: Tensor, weight_src: Tensor, weight_dst: Tensor, *others: Any
) -> bool:
    """True for features of both ends of a graph that are mapped to `wide` numbers by weights of theirs, in one node of
    autograd: all of them, and `others` (tensors, or None), are as `like`."""
    given = [x, y, weight_src, weight_dst, *[t for t in others if t is not None]]
    dtype, device = like.dtype, like.device
    if dtype not in _DTYPES or not _operators.usual(*given):
        return False
    for t in given:  # any() takes longer
        if t.dtype != dtype or t.device != device:
            return False
    if x.shape[0] != graph.num_cols or y.shape[0] != graph.num_rows:
        return False
    if weight_src.shape != (wide, x.shape[1]) or weight_dst.shape != (wide, y.shape[1]):
        return False
    # The maps alone keep no features where these ask for no gradient: they may be written into then.
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return not recorded or (weight_src.requires_grad and weight_dst.requires_grad)


def is_edgeless(layer: GatLayer) -> bool:
    """True if `without_edges` serves this."""
    return not layer.graph.nnz and _fit((layer,))


def without_edges(layer: GatLayer, how: How) -> Tensor:
    """What a layer gives [num_rows, H * C], or [num_rows, C], whose graph has no edges: its bias. Nothing is mapped;
    gradients of all else are zeros, as PyG's are."""
    _, x, y, *parameters, bias = layer
    outputs = layer.att_src.shape[2] * (layer.att_src.shape[1] if how.concat else 1)
    return _Edgeless.apply(outputs, bias, y, x, *parameters)


class _Edgeless(_operators.Function):
    @staticmethod
    def forward(ctx, outputs, bias, y, *others):
        ctx.shapes = [t.shape for t in (y, *others)]
        # What gradients with derivatives of their own depend on, by zeros; a map only where PyG's product keeps it, as
        # its weight may be written into else.
        of_y, of_x, of_src, of_dst, *of_vectors = ctx.needs_input_grad[2:]
        kept = (of_y, of_x, of_src and of_x, of_dst and of_y, *of_vectors)
        ctx.save_for_backward(*[t for t, keep in zip((y, *others), kept, strict=True) if keep])
        out = y.new_zeros(y.shape[0], outputs)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx, grad):
        _, of_bias, *needs = ctx.needs_input_grad
        zeros = [grad.new_zeros(shape) if need else None for shape, need in zip(ctx.shapes, needs, strict=True)]
        if torch.is_grad_enabled():
            nothing = sum([t[:0].sum() for t in ctx.saved_tensors], start=grad[:0].sum())
            zeros = [None if zero is None else zero + nothing for zero in zeros]
        return None, grad.sum(0) if of_bias else None, *zeros


def is_profitable(layers: Sequence[GatLayer]) -> bool:
    """True if these layers take less together, and `gat_layers` serves them."""
    if len(layers) < 2:
        return False
    work = sum([layer.graph.num_cols * layer.weight_src.numel() for layer in layers])
    return (work <= bounds.GAT_LAYERS_WORK or not layers[0].x.is_cpu) and takes(layers)


def gat_layers(targets: Sequence[Sequence[GatLayer]], how: How, kept: Callable) -> list[Tensor]:
    """For each target the sum of its layers.

    Parameters
    ----------
    targets : sequence of sequences of GatLayer
        Those of one target have the same `y`. All have as many heads and channels; `takes` says yes to all.
    how : How
    kept : callable
        kept(key, make) returns what make() has made for these graphs and this key before, or makes it.

    Returns
    -------
    list of Tensor [num_rows, H * C], or [num_rows, C]
    """
    features, places, layout = ends_of(targets)
    given: list[Tensor | None] = []
    for layers in targets:
        for _, _, _, *parameters, bias in layers:
            given += parameters
            given.append(bias)
    plan = kept(("gat", tuple(layout)), partial(planned, targets, places, len(features)))
    arrays = arrays_of(plan.graph, torch.is_grad_enabled(), features[0])
    return list(_layers(plan, arrays, how, targets, *features, *given))


def ends_of(targets: Sequence[Sequence[Any]]) -> tuple[list[Tensor], dict[int, int], list[tuple]]:
    """The features of the layers' ends, each once; the place of each among these, by id; and what a plan depends on."""
    features: list[Tensor] = []
    places: dict[int, int] = {}
    layout: list[tuple] = []
    for layers in targets:
        for layer in layers:
            for t in (layer.x, layer.y):
                if id(t) not in places:
                    places[id(t)] = len(features)
                    features.append(t)
            layout.append((places[id(layer.x)], places[id(layer.y)], layer.graph.num_rows, layer.graph.num_cols))
        layout.append(())
    return features, places, layout


class End(NamedTuple):
    """Rows [first, last) of what is gathered or attended to: features `place`, `layers` of which a node has a row
    each."""

    place: int
    first: int
    last: int
    layers: list[int]


class Plan(NamedTuple):
    graph: Graph
    features: int
    sources: list[End]
    targets: list[End]


def planned(targets: Sequence[Sequence[Any]], places: dict[int, int], features: int) -> Plan:
    """The plan of a call of layers with a graph, x and y, whose places among the features are given by their ids; holds
    no tensor of it."""
    everything = [layer for layers in targets for layer in layers]
    if len(everything) == 1:
        graph = everything[0].graph
        source = End(places[id(everything[0].x)], 0, graph.num_cols, [0])
        target = End(places[id(everything[0].y)], 0, graph.num_rows, [0])
        return Plan(graph, features, [source], [target])
    readers: dict[int, list[int]] = {}
    for number, layer in enumerate(everything):
        readers.setdefault(id(layer.x), []).append(number)
    sources, relations, cols = [], {}, 0
    for numbers in readers.values():
        rows = everything[numbers[0]].graph.num_cols * len(numbers)
        sources.append(End(places[id(everything[numbers[0]].x)], cols, cols + rows, numbers))
        for i, number in enumerate(numbers):
            relations[number] = Relation(everything[number].graph, cols + i, len(numbers))
        cols += rows
    ends, graphs, first, number = [], [], 0, 0
    for layers in targets:
        numbers = list(range(number, number + len(layers)))
        number += len(layers)
        stack = Stack([relations[n] for n in numbers], cols)
        graphs.append(stack.apart)
        rows = stack.num_rows * stack.count
        ends.append(End(places[id(layers[0].y)], first, first + rows, numbers))
        first += rows
    return Plan(below_each_other(graphs), features, sources, ends)


_SRC, _DST, _ATT_SRC, _ATT_DST, _BIAS, _EACH = range(6)  # the places of a layer's parameters, and how many there are


class _Side(NamedTuple):
    """Ends of features of one width, and what their layers have, below each other: the maps [layers * H * C, F] and the
    vectors [layers, H, C], and the inner products of both, [layers * H, F]. sources: these are what is gathered."""

    ends: list[End]
    sources: bool
    weight: Tensor
    vectors: Tensor
    folded: Tensor

    @property
    def layers(self) -> list[int]:
        return [layer for end in self.ends for layer in end.layers]


def _sides(plan: Plan, given: Sequence[Any]) -> list[_Side]:
    found = []
    for sources in (True, False):
        which = (_SRC, _ATT_SRC) if sources else (_DST, _ATT_DST)
        ends = plan.sources if sources else plan.targets
        for _, group in groupby(ends, lambda end: given[end.place].shape[1]):
            some = list(group)
            layers = [layer for end in some for layer in end.layers]
            weight, vectors = (_joined(given, layers, each, plan.features) for each in which)
            rows = vectors.view(-1, 1, vectors.shape[2])
            folded = torch.bmm(rows, weight.view(rows.shape[0], rows.shape[2], -1)).squeeze(1)
            found.append(_Side(some, sources, weight, vectors, folded))
    return found


def _joined(given: Sequence[Any], layers: list[int], which: int, features: int) -> Tensor:
    """Those parameters of some layers, one below the other."""
    each = [given[features + layer * _EACH + which] for layer in layers]
    return each[0] if len(each) == 1 else torch.cat(each)


def _slices(side: _Side, heads: int, outputs: int) -> list[tuple[End, slice, slice]]:
    """Of each end the rows of its layers' maps, and of their inner products with the vectors."""
    found, first = [], 0
    for end in side.ends:
        last = first + len(end.layers) * heads
        found.append((end, slice(first * outputs, last * outputs), slice(first, last)))
        first = last
    return found


class _Layers(_operators.Function):
    """Gradients of a target that nothing was made of are None, as if each had a node of its own."""

    @staticmethod
    def forward(ctx, plan, arrays, how, targets, *given):
        graph, features, like = plan.graph, plan.features, given[0]
        heads, outputs = given[features + _ATT_SRC].shape[1:]
        mapped = like.new_empty(graph.num_cols, heads * outputs)
        scores_src, scores_dst = like.new_empty(graph.num_cols, heads), like.new_empty(graph.num_rows, heads)
        sides = _sides(plan, given)
        for side in sides:
            scores = scores_src if side.sources else scores_dst
            for end, of_weight, of_folded in _slices(side, heads, outputs):
                x, rows = given[end.place], slice(end.first, end.last)
                torch.mm(x, side.folded[of_folded].t(), out=scores[rows].view(x.shape[0], -1))
                if side.sources:
                    torch.mm(x, side.weight[of_weight].t(), out=mapped[rows].view(x.shape[0], -1))
        needs = ctx.needs_input_grad[4:]
        keep = True in needs
        attended = (mapped.view(-1, heads, outputs), scores_src, scores_dst)
        made = attention_op.impl(arrays, *attended, None, None, 0.0, how.negative_slope, keep)
        outs = []
        for end in plan.targets:
            count, out = len(end.layers), made[0][end.first : end.last]
            out = out.view(-1, count, heads * outputs).sum(1)
            out = out if how.concat else out.view(-1, heads, outputs).mean(1)
            for bias in [given[features + layer * _EACH + _BIAS] for layer in end.layers]:
                out = out if bias is None else out.add_(bias)
            outs.append(out)
        if keep:
            ctx.set_materialize_grads(False)
            ctx.plan, ctx.arrays, ctx.how, ctx.graphs = plan, arrays, how, _graphs(targets)
            ctx.sides = [(side.ends, side.sources) for side in sides]
            kept = [t for side in sides for t in (side.weight, side.vectors, side.folded)]
            ctx.save_for_backward(*attended, *made, *kept, *given)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        plan, needs, features, how = ctx.plan, ctx.needs_input_grad[4:], ctx.plan.features, ctx.how
        mapped, scores_src, scores_dst, out, lse, out_pos, p_pos, *given = ctx.saved_tensors
        kept, given = given[: 3 * len(ctx.sides)], given[3 * len(ctx.sides) :]
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return None, None, None, None, *_second(ctx, given, grads)
        heads, outputs = mapped.shape[1:]
        whole = torch.empty_like(out, memory_format=torch.contiguous_format)
        found: list[Tensor | None] = [None] * len(needs)
        reached: set[int] = set()
        for grad, end in zip(grads, plan.targets, strict=True):
            part = whole[end.first : end.last].view(-1, len(end.layers), heads, outputs)
            if grad is None:
                part.zero_()
                continue
            reached.update(end.layers)
            part.copy_(grad.view(-1, 1, heads, outputs) if how.concat else (grad / heads).view(-1, 1, 1, outputs))
            biases = [features + layer * _EACH + _BIAS for layer in end.layers]
            if any(needs[place] for place in biases):
                total = grad.sum(0)
                for place in biases:
                    found[place] = total
        rest = (scores_src, scores_dst, None, None, 0.0, out, lse, out_pos, p_pos, whole, how.negative_slope)
        of_mapped, of_src, of_dst = attention_backward_op.impl(ctx.arrays.transposed(), mapped, *rest)
        of_mapped = of_mapped.view(-1, heads * outputs)
        for number, (ends, sources) in enumerate(ctx.sides):
            side = _Side(ends, sources, *kept[3 * number : 3 * number + 3])
            _add_gradients(found, given, features, side, of_src if sources else of_dst, of_mapped)
        layers = range(len(needs[features:]) // _EACH)
        if len(reached) < len(layers):
            _clear(found, plan, layers, reached)
        return None, None, None, None, *[grad if need else None for grad, need in zip(found, needs, strict=True)]


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: `takes` has found none.
_layers = super(torch.autograd.Function, _Layers).apply  # type: ignore[misc]


def _add_gradients(
    found: list, given: Sequence[Any], features: int, side: _Side, scores: Tensor, mapped: Tensor
) -> None:
    """Add to `found` what comes from the gradients of one side's scores, and of mapped features."""
    weight, folded, layers = side.weight, side.folded, side.layers
    vectors = side.vectors.view(-1, side.vectors.shape[2], 1)
    by_head = weight.view(*vectors.shape[:2], -1)
    of_folded, of_weight = torch.empty_like(folded), torch.empty_like(weight) if side.sources else None
    for end, rows_of_weight, rows_of_folded in _slices(side, vectors.shape[0] // len(layers), vectors.shape[1]):
        x, rows = given[end.place], slice(end.first, end.last)
        part = scores[rows].view(x.shape[0], -1)
        torch.mm(part.t(), x, out=of_folded[rows_of_folded])
        if of_weight is None:
            of_x = part.mm(folded[rows_of_folded])
        else:
            of_mapped = mapped[rows].view(x.shape[0], -1)
            of_x = of_mapped.mm(weight[rows_of_weight]).addmm_(part, folded[rows_of_folded])
            torch.mm(of_mapped.t(), x, out=of_weight[rows_of_weight])
        old = found[end.place]
        found[end.place] = of_x if old is None else old.add_(of_x)
    of_vectors = torch.bmm(by_head, of_folded.unsqueeze(2))
    if of_weight is None:
        of_weight = torch.bmm(vectors, of_folded.unsqueeze(1))
    else:
        of_weight = of_weight.view(by_head.shape).baddbmm_(vectors, of_folded.unsqueeze(1))
    count, which = len(layers), (_SRC, _ATT_SRC) if side.sources else (_DST, _ATT_DST)
    parts = zip(layers, of_weight.view(weight.shape).chunk(count), of_vectors.view(count, 1, -1).unbind(), strict=True)
    for layer, each, vector in parts:
        place = features + layer * _EACH
        found[place + which[0]] = each
        found[place + which[1]] = vector.view(given[place + which[1]].shape)


def _clear(found: list, plan: Plan, layers: Sequence[int], reached: set[int]) -> None:
    """None in place of the gradients that nothing has led to."""
    used = {end.place for end in (*plan.sources, *plan.targets) if not reached.isdisjoint(end.layers)}
    for place in range(plan.features):
        if place not in used:
            found[place] = None
    for layer in layers:
        if layer not in reached:
            at = plan.features + layer * _EACH
            found[at : at + _EACH] = [None] * _EACH


def _graphs(targets: Sequence[Sequence[GatLayer]]) -> list[list[Graph]]:
    return [[layer.graph for layer in layers] for layers in targets]


def _second(ctx: Any, given: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple:
    """Gradients with derivatives of their own, those of the layers one by one."""
    plan, how, features = ctx.plan, ctx.how, ctx.plan.features
    sources = {layer: end.place for end in plan.sources for layer in end.layers}

    def composed(*given):
        outs = []
        for grad, end, graphs in zip(grads, plan.targets, ctx.graphs, strict=True):
            parts = []
            for layer, graph in zip(end.layers, graphs, strict=True):
                at = features + layer * _EACH
                parameters = given[at : at + _EACH]
                parts.append(_one(graph, how, given[sources[layer]], given[end.place], *parameters))
            if grad is not None:
                outs.append(sum(parts[1:], start=parts[0]))
        return tuple(outs)

    cotangents = tuple([grad for grad in grads if grad is not None])
    found = list(_arrays.gradients(composed, given, ctx.needs_input_grad[4:], cotangents))
    pairs = zip(grads, plan.targets, strict=True)
    reached = {layer for grad, end in pairs if grad is not None for layer in end.layers}
    _clear(found, plan, range(len(given[features:]) // _EACH), reached)
    return tuple(found)


def _one(graph: Graph, how: How, x, y, weight_src, weight_dst, att_src, att_dst, bias) -> Tensor:
    shape = (-1, *att_src.shape[1:])
    mapped = F.linear(x, weight_src).view(shape)
    scores = (mapped * att_src).sum(-1), (F.linear(y, weight_dst).view(shape) * att_dst).sum(-1)
    out = attention(graph, mapped, *scores, negative_slope=how.negative_slope)
    out = out.flatten(1) if how.concat else out.mean(1)
    return out if bias is None else out + bias
