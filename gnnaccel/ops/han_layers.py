"""What HAN attends to (Wang et al., WWW 2019): a GAT for each edge type, of maps that the node types have, as one node
of autograd for all of them.

A destination has a row for each edge type into it. Sources stand once, however many edge types leave them: their
scores, which differ by these, are products of the nodes' own features with the maps' inner products with the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import end_to_end, placed
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops._features import widened, with_bias
from gnnaccel.ops._weight_gradient import weight_gradient
from gnnaccel.ops.dot_attention import dot_attention_backward_op, dot_attention_op
from gnnaccel.ops.edge_attention import edge_attention
from gnnaccel.ops.edge_softmax import edge_softmax_backward_op, edge_softmax_op
from gnnaccel.ops.sddmm import sddmm, sddmm_op
from gnnaccel.ops.spmm import spmm_op

_MADE = 4  # tensors that the forward pass keeps of a node type


class Node(NamedTuple):
    """A node type.

    mapped : (int, int)
        The columns of its features, if edge types leave it.
    sources, targets : (int, int)
        Its scores as a source, for each node those of `leaving`, and rows as a destination, those of `entering`.
    leaving, entering : list of int
        Edge types.
    """

    mapped: tuple[int, int]
    sources: tuple[int, int]
    targets: tuple[int, int]
    leaving: list[int]
    entering: list[int]


class Plan(NamedTuple):
    """What of a call depends on the graph alone; holds no tensor of a user's.

    graph, scores : Graph
        The same edges: of the nodes' features, and of their scores as sources.
    order : Tensor [nnz], int64
        The ids of the nonzeros' edges: their places in the edge types end to end.
    targets : list of int
        Those of `nodes` that edge types lead to.
    """

    graph: Graph
    scores: Graph
    order: Tensor
    nodes: list[Node]
    targets: list[int]


class Maps(NamedTuple):
    """Features [num_nodes, width] of the node types, their maps [H * D, width] and [H * D], and for each edge type the
    vectors [1, H, D] of its sources and of its destinations."""

    x: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]
    sources: list[Tensor]
    targets: list[Tensor]


def planned(edges: Sequence[Tensor], types: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Plan | None:
    """The plan of calls with these edges.

    Parameters
    ----------
    edges : sequence of Tensor [2, E]
        Sources and destinations.
    types : sequence of (int, int)
        Of each: places of the source type and of the destination type.
    sizes : sequence of int
        Nodes of each node type, all of which have edge types.

    Returns
    -------
    Plan, or None for an index that is out of range
    """
    nodes, cols, scores, rows = [], 0, 0, 0
    for place, size in enumerate(sizes):
        leaving = [number for number, (source, _) in enumerate(types) if source == place]
        entering = [number for number, (_, target) in enumerate(types) if target == place]
        mapped = (cols, cols + size * bool(leaving))
        node = Node(
            mapped, (scores, scores + size * len(leaving)), (rows, rows + size * len(entering)), leaving, entering
        )
        nodes.append(node)
        cols, scores, rows = mapped[1], node.sources[1], node.targets[1]
    with torch.inference_mode(False), torch.no_grad():
        found = end_to_end(edges, [(sizes[source], sizes[target]) for source, target in types])
        if found is None:
            return None
        which, sources, targets = found
        features, own, into = [], [], []
        for number, (source, target) in enumerate(types):
            start, end = nodes[source], nodes[target]
            features.append((start.mapped[0], 1))
            own.append((start.sources[0] + start.leaving.index(number), len(start.leaving)))
            into.append((end.targets[0] + end.entering.index(number), len(end.entering)))
        columns, others = placed(sources, which, features), placed(sources, which, own)
        by_id = Graph.from_coo(placed(targets, which, into), columns, num_rows=rows, num_cols=cols)
        ids = by_id.edge_ids
        order = torch.arange(len(which), device=which.device) if ids is None else ids.long()
        graph = Graph(by_id.indptr, by_id.indices, None, cols)
        dtype = graph.indices.dtype if scores <= bounds.INT32_MAX else torch.int64
        of_scores = Graph(by_id.indptr.to(dtype), others[order].to(dtype), None, scores)
    return Plan(graph, of_scores, order, nodes, [place for place, node in enumerate(nodes) if node.entering])


def takes(plan: Plan, maps: Maps, negative_slope: float) -> bool:
    """True if `han_attention` serves these, of one dtype and device and of the plan's sizes."""
    given = [*maps.x, *maps.weights, *maps.biases, *maps.sources, *maps.targets]
    if not plan.graph.nnz or negative_slope < 0 or not _operators.usual(*given):
        return False
    if len(plan.targets) > 1 and _operators.waited_for(given):
        return False
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # The maps alone keep no features where these ask for no gradient: they may be written into then.
    return not recorded or all(t.requires_grad for t in given[len(maps.x) :])


def han_attention(plan: Plan, maps: Maps, edge_scale: Tensor | None, negative_slope: float) -> list[Tensor]:
    """out[v, r] = `attention` of the edge type r into a node type, over the maps of its sources.

    Parameters
    ----------
    plan : Plan
    maps : Maps
    edge_scale : Tensor [edges of all types, H], optional
        As of `attention`, in the order of plan.order.
    negative_slope : float

    Returns
    -------
    list of Tensor [num_nodes, edge types into it, H * D], for each of plan.targets
    """
    given = (*maps.x, *maps.weights, *maps.biases, *maps.sources, *maps.targets)
    return list(_attend(plan, edge_scale, negative_slope, *given))


def across(results: Sequence[Tensor], weight: Tensor, bias: Tensor, query: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What HAN makes of the results of a node type's edge types: their sum, by weights that are the softmax of the
    means over the nodes of <query, tanh(linear(relu(result), weight, bias))>.

    Parameters
    ----------
    results : sequence of Tensor [num_nodes, edge types, D]
        Of each node type, with nodes.
    weight, bias, query : Tensor [D, D], [D] and [1, D]

    Returns
    -------
    list of (Tensor [num_nodes, D], Tensor [edge types])
    """
    given = (*results, weight, bias, query)
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    short = _operators.usual(*given) and (not recorded or all(t.requires_grad for t in given))
    outs = (_weigh if short else _composed_weights)(*given)
    return list(zip(outs[::2], outs[1::2], strict=True))


def _parts(plan: Plan, given: Sequence[Any]) -> Maps:
    count = len(plan.nodes)
    x, weights, biases = ([*given[k * count : (k + 1) * count]] for k in range(3))
    rest = given[3 * count :]
    return Maps(x, weights, biases, [*rest[: len(rest) // 2]], [*rest[len(rest) // 2 :]])


def _vectors(node: Node, maps: Maps) -> Tensor:
    """Of a node type's scores, those as a source first: [H, V, D]."""
    each = [maps.sources[n] for n in node.leaving] + [maps.targets[n] for n in node.entering]
    return torch.cat(each).transpose(0, 1)


def _folded(vectors: Tensor, weight: Tensor) -> Tensor:
    """Maps of features to scores, [V * H, width]."""
    heads, count, width = vectors.shape
    return torch.bmm(vectors, weight.view(heads, width, -1)).transpose(0, 1).reshape(count * heads, -1)


def _of_scores(node: Node, scores: Sequence[Tensor], heads: int) -> list[tuple[slice, Tensor]]:
    """For each end that a node type is: which rows of `_folded` make its scores, and these, a node's side by side."""
    found, ends = (
        [],
        ((scores[0], node.sources, node.leaving, 0), (scores[1], node.targets, node.entering, len(node.leaving))),
    )
    for of_end, rows, numbers, before in ends:
        if numbers:
            of_end, begin, count = of_end[slice(*rows)], before * heads, len(numbers)
            found.append((slice(begin, begin + count * heads), of_end.view(len(of_end) // count, count * heads)))
    return found


class _Attend(_operators.Function):
    """Gradients of an edge type that nothing was made of are None, as if each had a node of its own."""

    @staticmethod
    def forward(ctx, plan, edge_scale, slope, *given):
        maps, keep = _parts(plan, given), any(ctx.needs_input_grad)
        heads, width = maps.sources[0].shape[1:]
        like = given[0]
        mapped = like.new_empty(plan.graph.num_cols, heads * width)
        scores = like.new_empty(plan.scores.num_cols, heads), like.new_empty(plan.graph.num_rows, heads)
        made: list[Tensor] = []
        for node, x, weight, bias in zip(plan.nodes, *maps[:3], strict=True):
            features, weight = widened(x), with_bias(weight, bias)
            if node.leaving:
                torch.mm(features, weight.t(), out=mapped[slice(*node.mapped)])
            vectors = _vectors(node, maps)
            folded = _folded(vectors, weight)
            for part, into in _of_scores(node, scores, heads):
                torch.mm(features, folded[part].t(), out=into)
            made += [features, weight, vectors, folded]
        arrays, of_scores = (arrays_of(graph, keep, mapped) for graph in (plan.graph, plan.scores))
        mapped = mapped.view(-1, heads, width)
        each = F.leaky_relu_(sddmm_op.impl(of_scores, *scores, "add", "u", "v"), slope)
        ctx.parts = mapped.is_cuda and keep  # whose backward is the faster there, as in edge_attention
        if ctx.parts:
            kept = [each, edge_softmax_op.impl(arrays, each)]
            weight = kept[1] if edge_scale is None else kept[1] * edge_scale
            out = spmm_op.impl(arrays, mapped, weight.unsqueeze(-1), "mul", "sum", 0.0)
        else:
            out, stats = dot_attention_op.impl(arrays, None, None, mapped, each, edge_scale, None, 0.0, 1.0)
            kept = [each, out, stats]
        if keep:
            ctx.set_materialize_grads(False)
            ctx.plan, ctx.slope, ctx.arrays = plan, slope, (arrays, of_scores)
            ctx.save_for_backward(*given, *made, edge_scale, mapped, *kept)
        counts = [len(plan.nodes[place].entering) for place in plan.targets]
        rows = [slice(*plan.nodes[place].targets) for place in plan.targets]
        sizes = [given[place].shape[0] for place in plan.targets]
        outs = zip(rows, sizes, counts, strict=True)
        return tuple([out[part].view(size, count, heads * width) for part, size, count in outs])

    @staticmethod
    def backward(ctx, *grads):
        plan, needs = ctx.plan, ctx.needs_input_grad[3:]
        count = len(needs) + _MADE * len(plan.nodes)
        saved = ctx.saved_tensors  # which a checkpoint gives once
        given, made, (edge_scale, mapped, *kept) = saved[: len(needs)], saved[len(needs) : count], saved[count:]
        reached = [
            n for place, g in zip(plan.targets, grads, strict=True) if g is not None for n in plan.nodes[place].entering
        ]
        needs = _reached(plan, needs, set(reached))
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return None, None, None, *_second(plan, edge_scale, ctx.slope, given, needs, grads)
        arrays, of_scores = ctx.arrays
        heads, width = mapped.shape[1:]
        grad = mapped.new_empty(plan.graph.num_rows, heads, width)
        for place, each in zip(plan.targets, grads, strict=True):
            part = grad[slice(*plan.nodes[place].targets)]
            part.zero_() if each is None else part.view(each.shape).copy_(each)
        if ctx.parts:
            scores, weight = kept
            of_weight = weight_gradient(arrays, mapped, grad, (heads, 1), "mul").squeeze(-1)
            whole = weight if edge_scale is None else weight * edge_scale
            of_weight = of_weight if edge_scale is None else of_weight * edge_scale
            of_each = edge_softmax_backward_op.impl(arrays, weight, of_weight)
            of_mapped = spmm_op.impl(arrays.transposed(), grad, whole.unsqueeze(-1), "mul", "sum", 0.0)
        else:
            scores, *results = kept
            rest = (edge_scale, None, 0.0, *results, grad, 1.0, False, True, True)
            *_, of_mapped, of_each = dot_attention_backward_op.impl(arrays, None, None, mapped, scores, *rest)
        of_each = torch.ops.aten.leaky_relu_backward(of_each, scores, ctx.slope, True)
        of_ends = [
            spmm_op.impl(each, None, of_each, "copy_rhs", "sum", 0.0) for each in (of_scores.transposed(), of_scores)
        ]
        found = _gradients(plan, given, made, needs, of_mapped.view(-1, heads * width), of_ends)
        return None, None, None, *[grad if need else None for grad, need in zip(found, needs, strict=True)]


def _reached(plan: Plan, needs: Sequence[bool], reached: set[int]) -> list[bool]:
    """`needs` of what one of these edge types was made of."""
    nodes = [not reached.isdisjoint([*node.leaving, *node.entering]) for node in plan.nodes]
    edges = [number in reached for number in range((len(needs) - 3 * len(nodes)) // 2)]
    return [need and some for need, some in zip(needs, [*nodes * 3, *edges * 2], strict=True)]


def _gradients(
    plan: Plan, given: Sequence[Tensor], made: Sequence[Tensor], needs: Sequence[bool], of_mapped: Tensor, of_ends: list
) -> list:
    """Gradients of all that is given, from those of mapped features and of the scores."""
    heads, nodes = of_ends[0].shape[1], len(plan.nodes)
    edges = (len(needs) - 3 * nodes) // 2
    found: list[list[Any]] = [[None] * count for count in (nodes, nodes, nodes, edges, edges)]
    of_x, of_weights, of_biases, of_sources, of_targets = found
    for place, node in enumerate(plan.nodes):
        if not needs[nodes + place]:
            continue
        features, weight, vectors, folded = made[_MADE * place : _MADE * (place + 1)]
        width, inputs = vectors.shape[2], slice(given[place].shape[1])
        of_folded, of_weight = torch.empty_like(folded), torch.zeros_like(weight)
        if node.leaving:
            grad = of_mapped[slice(*node.mapped)]
            torch.mm(grad.t(), features, out=of_weight)
            of_x[place] = grad.mm(weight[:, inputs]) if needs[place] else None
        for part, grad in _of_scores(node, of_ends, heads):
            torch.mm(grad.t(), features, out=of_folded[part])
            if needs[place]:
                own, old = folded[part, inputs], of_x[place]
                of_x[place] = grad.mm(own) if old is None else old.addmm_(grad, own)
        of_folded = of_folded.view(-1, heads, of_folded.shape[1]).transpose(0, 1)
        by_head = heads, width, -1
        of_weight.view(by_head).baddbmm_(vectors.transpose(1, 2), of_folded)
        of_vectors = torch.bmm(of_folded, weight.view(by_head).transpose(1, 2)).transpose(0, 1).split(1)
        of_weights[place], of_biases[place] = of_weight[:, inputs].contiguous(), of_weight[:, inputs.stop].contiguous()
        for number, of_vector in zip(node.leaving, of_vectors, strict=False):
            of_sources[number] = of_vector
        for number, of_vector in zip(node.entering, of_vectors[len(node.leaving) :], strict=True):
            of_targets[number] = of_vector
    return [grad for part in found for grad in part]


def _second(plan: Plan, edge_scale: Tensor | None, slope: float, given: Sequence, needs: Sequence, grads: Sequence):
    """Gradients with derivatives of their own, those of the ops that make up the node."""

    def composed(*given):
        outs = _composed(plan, edge_scale, slope, *given)
        return tuple([out for out, grad in zip(outs, grads, strict=True) if grad is not None])

    return _arrays.gradients(composed, given, needs, tuple([grad for grad in grads if grad is not None]))


def _composed(plan: Plan, edge_scale: Tensor | None, slope: float, *given: Tensor) -> list[Tensor]:
    maps = _parts(plan, given)
    heads, width = maps.sources[0].shape[1:]
    mapped: list[Tensor] = []
    scores: tuple[list[Tensor], list[Tensor]] = ([], [])
    for node, *each in zip(plan.nodes, *maps[:3], strict=True):
        features = F.linear(*each).view(-1, heads, width)
        dots = torch.einsum("nhd,hvd->nvh", features, _vectors(node, maps))
        mapped += [features] if node.leaving else []
        for part, of_end in zip(dots.split([len(node.leaving), len(node.entering)], 1), scores, strict=True):
            of_end.append(part.reshape(-1, heads))
    sums = sddmm(plan.scores, torch.cat(scores[0]), torch.cat(scores[1]), "add")
    attend = partial(edge_attention, plan.graph, edge_scale=edge_scale)
    out = attend(F.leaky_relu(sums, slope), torch.cat(mapped))
    rows = [(plan.nodes[place].targets, len(plan.nodes[place].entering)) for place in plan.targets]
    return [out[slice(*part)].reshape(-1, count, heads * width) for part, count in rows]


class _Weigh(_operators.Function):
    """A sum and its weights for each node type, whose gradients are None where nothing was made of either."""

    @staticmethod
    def forward(ctx, *given):
        *results, weight, bias, query = given
        outs, kept, weight_t, query_t = [], [], weight.t(), query.t()
        for result in results:
            active = result.relu()
            hidden = torch.addmm(bias, active.view(-1, active.shape[2]), weight_t).tanh_()
            weights = hidden.mm(query_t).view(active.shape[:2]).mean(0).softmax(0)
            outs += [(active * weights.view(1, -1, 1)).sum(1), weights]
            kept += [active, hidden, weights]
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*given, *kept)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        count = len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        given, kept = saved[:count], saved[count:]
        needs = [a is not None or b is not None for a, b in zip(grads[::2], grads[1::2], strict=True)]
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return _second_weights(given, [*needs, True, True, True], grads)
        weight, _, query = given[-3:]
        of_results: list[Tensor | None] = [None] * len(needs)
        sums: list[list[Tensor]] = []
        for k in [k for k, need in enumerate(needs) if need]:
            grad, of_weights = grads[2 * k : 2 * k + 2]
            active, hidden, weights = kept[3 * k : 3 * k + 3]
            if of_weights is not None:
                of_weights = of_weights - torch.dot(weights, of_weights)
            if grad is None:
                of_active = torch.zeros_like(active)
            else:
                grad = grad.unsqueeze(1)
                of_active, dots = grad * weights.view(1, -1, 1), (active * grad).sum(2)
                # A softmax does not see what all have in common, which is most of it: taken out before the sum.
                found = (dots - dots.mv(weights).unsqueeze(1)).sum(0)
                of_weights = found if of_weights is None else found + of_weights
            of_scores = weights * of_weights / len(active)
            rows = of_scores.expand(active.shape[:2]).reshape(-1, 1)
            inner = torch.ops.aten.tanh_backward(rows.mm(query), hidden)
            flat = active.view(-1, active.shape[2])
            sums.append([inner.t().mm(flat), inner.sum(0), rows.t().mm(hidden)])
            of_active.view(flat.shape).addmm_(inner, weight)
            of_results[k] = torch.ops.aten.threshold_backward(of_active, active, 0)
        return *of_results, *[sum(each[1:], start=each[0]) for each in zip(*sums, strict=True)]


def _composed_weights(*given: Tensor) -> tuple[Tensor, ...]:
    *results, weight, bias, query = given
    outs = []
    for result in results:
        active = result.relu()
        weights = F.linear(F.linear(active, weight, bias).tanh(), query).mean(0).squeeze(1).softmax(0)
        outs += [(active * weights.view(1, -1, 1)).sum(1), weights]
    return tuple(outs)


def _second_weights(given: Sequence[Tensor], needs: Sequence[bool], grads: Sequence) -> tuple:
    def composed(*given):
        return tuple([out for out, grad in zip(_composed_weights(*given), grads, strict=True) if grad is not None])

    return _arrays.gradients(composed, given, needs, tuple([grad for grad in grads if grad is not None]))


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where these are called.
_attend, _weigh = (super(torch.autograd.Function, f).apply for f in (_Attend, _Weigh))  # type: ignore[misc]
