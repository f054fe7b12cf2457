"""HGT over several types of nodes and edges (Hu et al., WWW 2020), with two nodes of autograd beside its attention.

A node's keys and values for an edge type are maps of maps: of the node type, then of the edge type by head. The maps
are multiplied instead of the features, so that a node type's keys of all its edge types are one product, and so are its
values. They stand in the rows that the attention gathers from; queries and what is attended likewise, type below type.
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
from gnnaccel.ops import _arrays
from gnnaccel.ops._features import beside_ones, widened, with_bias
from gnnaccel.ops.layers import heads_attention

_KEY, _QUERY, _VALUE, _MAPS = range(4)  # the blocks of a node type's map, and how many there are
# How many times the multiplications of one map after the other the products of maps may take. With 1.3 times as many
# they take 0.87 of the time (EPYC, one thread: 10,000 nodes of a type, 64 features, 4 heads). On CUDA the gradients of
# maps by head, a few values each from all nodes, are what takes long: 27 of 33 ms (H200, 100,000 nodes).
_TIMES = {"cuda": 8, "cpu": 2}
_INT32_MAX = 2**31 - 1
_FEW = 1 << 26  # or how many more, on the side of what calls take


class Group(NamedTuple):
    """Node types of one width, and the edge types that leave them.

    places : list of int
        The node types.
    sources, targets : list of int
        Which of these edge types leave, and which have queries.
    counts : list of int
        Edge types that leave each of `sources`; those of one stand together, [begin, end) of all.
    columns, parts : slice, list of int
        Rows of their keys: for each node those of its edge types. How many are of each of `sources`.
    blocks : Tensor [2, end - begin], int64
        Which of the blocks of the places' maps, [len(places) * 3], an edge type's keys and values are made with.
    """

    places: list[int]
    sources: list[int]
    targets: list[int]
    counts: list[int]
    begin: int
    end: int
    columns: slice
    parts: list[int]
    blocks: Tensor


class Plan(NamedTuple):
    """What of a call depends on the graph and the sizes alone; holds no tensor of a user's.

    graph : Graph
        Destinations of all types below each other, and each source once for each edge type that leaves it.
    targets, rows : list of int
        Node types that have queries, and how many these are of each.
    order : Tensor [number of edge types], int64
        Their numbers among all edge types of the layer, as the groups have them.
    given : list of int
        The same order as places in the call's list of edge types.
    """

    graph: Graph
    groups: list[Group]
    targets: list[int]
    rows: list[int]
    order: Tensor
    given: list[int]
    types: int


class Features(NamedTuple):
    """Node types' features [num_nodes, width], and maps of these [3 * H * D, width] and [3 * H * D]: keys, queries,
    values."""

    x: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]


class Relations(NamedTuple):
    """Edge types' maps of keys and values, [H * R, D, D], that of head h and edge type r being h * R + r; and factors
    of the scores [1, H], of the edge types of the call."""

    keys: Tensor
    values: Tensor
    priors: list[Tensor]


class Ends(NamedTuple):
    """For each target what is made of the attended: linear maps [D_out, H * D] and [D_out] of their gelu, and where
    `skips` is not None, lerp(x, ., sigmoid(skip)) of that."""

    x: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor]
    skips: list[Tensor | None]


def planned(
    edges: Sequence[Tensor],
    types: Sequence[tuple[int, int, int]],
    sizes: Sequence[tuple[int, int]],
    targets: Sequence[int],
) -> Plan | None:
    """The plan of calls with these edges.

    Parameters
    ----------
    edges : sequence of Tensor [2, E]
        Sources and destinations.
    types : sequence of (int, int, int)
        Of each: place of the source type and of the destination type, number among the edge types of the layer.
    sizes : sequence of (int, int)
        Nodes and width of each node type.
    targets : sequence of int
        Node types that are to have queries, in this order: those of `types` and more.

    Returns
    -------
    Plan, or None for an index that is out of range
    """
    device = edges[0].device
    leaving: dict[int, list[int]] = {}
    for number, (source, _, _) in enumerate(types):
        leaving.setdefault(source, []).append(number)
    by_width: dict[int, list[int]] = {}
    for place in sorted({*leaving, *targets}):
        by_width.setdefault(sizes[place][1], []).append(place)
    groups: list[Group] = []
    given: list[int] = []
    columns, cols = [(0, 0)] * len(types), 0  # of an edge type: the first, and how far those of two nodes are apart
    for places in by_width.values():
        begin, first, parts, counts, of = len(given), cols, [], [], []
        for k, place in enumerate(places):
            numbers = leaving.get(place, [])
            for i, number in enumerate(numbers):
                columns[number] = cols + i, len(numbers)
            if numbers:
                parts.append(sizes[place][0] * len(numbers))
                counts.append(len(numbers))
                cols += parts[-1]
            given += numbers
            of += [k * _MAPS] * len(numbers)
        blocks = torch.tensor([[k + which for k in of] for which in (_KEY, _VALUE)], dtype=torch.int64).to(device)
        sources, asking = ([k for k, p in enumerate(places) if p in some] for some in (leaving, targets))
        ends = (begin, len(given), slice(first, cols))
        groups.append(Group(places, sources, asking, counts, *ends, parts, blocks))
    rows, firsts = 0, {}
    for place in targets:
        firsts[place] = rows
        rows += sizes[place][0]
    with torch.inference_mode(False), torch.no_grad():
        found = end_to_end(edges, [(sizes[source][0], sizes[target][0]) for source, target, _ in types])
        if found is None:
            return None
        which, starts, destinations = found
        destinations = placed(destinations, which, [(firsts[target], 1) for _, target, _ in types])
        graph = Graph.from_coo(destinations, placed(starts, which, columns), num_rows=rows, num_cols=cols)
        graph = Graph(graph.indptr, graph.indices, None, cols)  # no edge has anything of its own
        order = torch.tensor([types[number][2] for number in given]).to(device)
    each = [sizes[place][0] for place in targets]
    return Plan(graph, groups, list(targets), each, order, given, len(sizes))


def hgt_layer(plan: Plan, features: Features, relations: Relations, ends: Ends) -> list[Tensor]:
    """out[v] = lerp(x[v], gelu(attended[v]) @ weight.t() + bias, sigmoid(skip)) of each target, attended[v, h] being
    the sum over the edges e = (u, v) of all types r of softmax(score[e, h]) * (value[u, h] @ values[h, r]), and score
    the product of query[v, h] and key[u, h] @ keys[h, r], times prior[r, h] / sqrt(D).

    Parameters
    ----------
    plan : Plan
        Of these sizes.
    features : Features
    relations : Relations
    ends : Ends
        Of plan.targets that the layer has results of.

    Returns
    -------
    list of Tensor [num_nodes, D_out], of the first len(ends.x) of plan.targets
    """
    heads, width = relations.priors[0].shape[1], relations.keys.shape[1]
    given = (*features.x, *features.weights, *features.biases, *relations.priors, relations.keys, relations.values)
    after = (*ends.x, *ends.weights, *ends.biases, *[skip for skip in ends.skips if skip is not None])
    skipping = tuple([skip is not None for skip in ends.skips])
    short = _records(given, features.x) and _records(after, ends.x)
    maps = _maps if short and _folds(plan, features, relations) else _composed_maps
    query, key, value = [t.view(-1, heads, width) for t in maps(plan, *given)]
    attended = heads_attention(plan.graph, query, key, value).view(-1, heads * width)
    return list((_ends if short else _composed_ends)(plan, skipping, attended, *after))


def _records(given: Sequence[Tensor], x: Sequence[Tensor]) -> bool:
    """True if one node of autograd does with these what several would: where parameters ask for no gradient, features
    are not kept, and may be written into."""
    if not _operators.usual(*given):
        return False
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return not recorded or all(t.requires_grad for t in given[len(x) :])


def _folds(plan: Plan, features: Features, relations: Relations) -> bool:
    """True if products of the maps take no longer than one map after the other."""
    width, wide = relations.keys.shape[1], relations.priors[0].shape[1] * relations.keys.shape[1]
    folded = apart = 0
    for group in plan.groups:
        for k, count in zip(group.sources, group.counts, strict=True):
            nodes, inputs = features.x[group.places[k]].shape
            folded += 2 * nodes * wide * count * inputs
            apart += 2 * nodes * wide * (inputs + count * width)
    return folded <= max(apart * _TIMES["cuda" if relations.keys.is_cuda else "cpu"], apart + _FEW)


def _parts(plan: Plan, given: Sequence[Any]) -> tuple[list, list, list, list, Any, Any]:
    """x, weights, biases, priors in the plan's order, keys, values."""
    types = plan.types
    *priors, keys, values = given[3 * types :]
    ordered = [priors[number] for number in plan.given]
    return [*given[:types]], [*given[types : 2 * types]], [*given[2 * types : 3 * types]], ordered, keys, values


def _permuted(plan: Plan, priors: list[Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Transposed maps of keys and of values, of the edge types in the plan's order [2, P, H, D, D], and the factors
    [2, P, H, 1, 1] of these: the priors, and ones."""
    heads, width = priors[0].shape[1], keys.shape[1]
    permuted = torch.stack((keys, values)).view(2, heads, -1, width, width).permute(0, 2, 1, 4, 3)
    factors = torch.cat([*priors, keys.new_ones(len(priors), heads)]).view(2, -1, heads, 1, 1)
    return permuted.index_select(1, plan.order), factors


def _joined(group: Group, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Maps of the node types for features that are `widened`, [places, 3, H * D, width]."""
    each = [[given[place] for place in group.places] for given in (weights, biases)]
    joined = with_bias(*map(torch.cat, each))
    return joined.view(len(group.places), _MAPS, -1, joined.shape[1])


class _Maps(_operators.Function):
    """Queries [num_rows, H * D], keys and values [num_cols, H * D]."""

    @staticmethod
    def forward(ctx, plan, *given):
        x, weights, biases, priors, keys, values = _parts(plan, given)
        heads, width = priors[0].shape[1], keys.shape[1]
        wide = heads * width
        query, outs = keys.new_empty(plan.graph.num_rows, wide), keys.new_empty(2, plan.graph.num_cols, wide).unbind()
        queries = dict(zip(plan.targets, query.split_with_sizes(plan.rows), strict=True))
        plain, factors = _permuted(plan, priors, keys, values)
        scaled = plain * factors
        kept = [plain, factors, scaled]
        for group in plan.groups:
            joined, features = _joined(group, weights, biases), [widened(x[place]) for place in group.places]
            kept += [joined, *features]
            own = joined[:, _QUERY].transpose(1, 2).unbind()
            for k in group.targets:
                torch.mm(features[k], own[k], out=queries[group.places[k]])
            if not group.sources:
                continue
            blocks = joined.view(-1, wide, joined.shape[3]).index_select(0, group.blocks.view(-1))
            blocks = blocks.view(-1, width, joined.shape[3])
            maps = scaled[:, group.begin : group.end].reshape(-1, width, width)
            folded = torch.bmm(maps, blocks).view(2, -1, joined.shape[3])
            kept += [blocks, folded]
            sizes = [count * wide for count in group.counts]
            for out, weight in zip(outs, folded.transpose(1, 2).unbind(), strict=True):
                each = out[group.columns].split_with_sizes(group.parts), weight.split_with_sizes(sizes, 1)
                for k, size, into, map_ in zip(group.sources, sizes, *each, strict=True):
                    torch.mm(features[k], map_, out=into.view(features[k].shape[0], size))
        if any(ctx.needs_input_grad):
            ctx.plan = plan
            ctx.save_for_backward(*given, *kept)
        return query, *outs

    @staticmethod
    def backward(ctx, *grads):
        plan, needs = ctx.plan, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors
        given, (plain, factors, scaled, *kept) = saved[: len(needs)], saved[len(needs) :]
        if torch.is_grad_enabled() or not _operators.usual(*grads):
            return None, *_arrays.gradients(partial(_composed_maps, plan), given, needs, tuple(grads))
        heads, width = scaled.shape[2:4]
        wide, rest = heads * width, iter(kept)
        of_query, *of_rows = [grad.contiguous() for grad in grads]
        queries = dict(zip(plan.targets, of_query.split_with_sizes(plan.rows), strict=True))
        of_x, of_weights, of_biases = ([None] * plan.types for _ in range(3))  # type: Any
        of_scaled = torch.empty_like(scaled)
        for group in plan.groups:
            joined, features = next(rest), [next(rest) for _ in group.places]
            inputs = given[group.places[0]].shape[1]
            whole = len(group.sources) == len(group.targets) == len(group.places)
            of_joined = torch.empty_like(joined) if whole else torch.zeros_like(joined)
            if group.sources:
                blocks, folded = next(rest), next(rest)
                of_folded = _of_sources(group, features, of_rows, folded, wide, inputs, of_x, needs)
                of_folded = of_folded.view(blocks.shape)
                maps = scaled[:, group.begin : group.end].reshape(-1, width, width)
                of_maps = torch.bmm(of_folded, blocks.transpose(1, 2))
                of_scaled[:, group.begin : group.end] = of_maps.view(2, -1, heads, width, width)
                of_blocks = torch.bmm(maps.transpose(1, 2), of_folded).view(2, -1, wide, joined.shape[3])
                into = of_joined[:, ::_VALUE].unbind()
                for k, part in zip(group.sources, of_blocks.split_with_sizes(group.counts, 1), strict=True):
                    torch.sum(part, 1, out=into[k])
            own, of_own = joined[:, _QUERY, :, :inputs].unbind(), of_joined[:, _QUERY].unbind()
            for k in group.targets:
                place = group.places[k]
                grad = queries[place]
                torch.mm(grad.t(), features[k], out=of_own[k])
                if needs[place]:
                    of_x[place] = _added(of_x[place], grad, own[k])
            of_joined = of_joined.view(len(group.places), _MAPS * wide, -1)
            parts = of_joined[:, :, :inputs].contiguous().unbind(), of_joined[:, :, inputs].contiguous().unbind()
            for place, of_weight, of_bias in zip(group.places, *parts, strict=True):
                of_weights[place], of_biases[place] = of_weight, of_bias
        of_priors, of_keys, of_values = _of_relations(plan, of_scaled, plain, factors, given[-1].shape)
        everything = (*of_x, *of_weights, *of_biases, *of_priors, of_keys, of_values)
        return None, *[grad if need else None for grad, need in zip(everything, needs, strict=True)]


def _of_sources(
    group: Group, features: list, of_rows: list, folded: Tensor, wide: int, inputs: int, of_x: list, needs: Sequence
) -> Tensor:
    """The gradient of the products of the maps, from those of keys and values; those of the features are added to
    `of_x`."""
    of_folded = torch.empty_like(folded)
    sizes = [count * wide for count in group.counts]
    for grad, weight, of_weight in zip(of_rows, folded[:, :, :inputs].unbind(), of_folded.unbind(), strict=True):
        each = (
            grad[group.columns].split_with_sizes(group.parts),
            *[t.split_with_sizes(sizes) for t in (weight, of_weight)],
        )
        for k, size, part, own, of_own in zip(group.sources, sizes, *each, strict=True):
            place = group.places[k]
            part = part.view(features[k].shape[0], size)
            torch.mm(part.t(), features[k], out=of_own)
            if needs[place]:
                of_x[place] = _added(of_x[place], part, own)
    return of_folded


def _added(old: Tensor | None, grad: Tensor, weight: Tensor) -> Tensor:
    return grad.mm(weight) if old is None else old.addmm_(grad, weight)


def _of_relations(plan: Plan, of_scaled: Tensor, plain: Tensor, factors: Tensor, shape: torch.Size) -> tuple:
    """Gradients of the priors, in the order of the call, and of the edge types' maps, of this shape."""
    _, _, heads, width, _ = plain.shape
    of_priors: list[Any] = [None] * len(plan.given)
    for number, grad in zip(plan.given, (of_scaled[0] * plain[0]).sum((2, 3)).split(1), strict=True):
        of_priors[number] = grad
    found = plain.new_zeros(2, heads, shape[0] // heads, width, width)
    found.permute(0, 2, 1, 4, 3).index_copy_(1, plan.order, of_scaled.mul_(factors))
    return of_priors, *found.view(2, *shape).unbind()


def _composed_maps(plan: Plan, *given: Tensor) -> tuple[Tensor, ...]:
    """`_Maps`, one map after the other."""
    x, weights, biases, priors, keys, values = _parts(plan, given)
    heads, width = priors[0].shape[1], keys.shape[1]
    mapped = [F.linear(*each).view(-1, _MAPS, heads, width) for each in zip(x, weights, biases, strict=True)]
    of_keys, of_values = [t.view(heads, -1, width, width).transpose(0, 1)[plan.order] for t in (keys, values)]
    of_keys = of_keys * torch.cat(priors).view(-1, heads, 1, 1)
    outs = []
    for which, maps in ((_KEY, of_keys), (_VALUE, of_values)):
        parts = []
        for group in plan.groups:
            each = maps[group.begin : group.end].split(group.counts) if group.counts else ()  # [R, H, D, D]
            for k, part in zip(group.sources, each, strict=True):
                rows = torch.einsum("nhd,rhde->nrhe", mapped[group.places[k]][:, which], part)
                parts.append(rows.reshape(-1, heads * width))
        outs.append(torch.cat(parts))
    queries = [mapped[place][:, _QUERY].reshape(-1, heads * width) for place in plan.targets]
    return torch.cat(queries), *outs


class _Ends(_operators.Function):
    """Gradients of a target that nothing was made of are None, as if each had a node of its own."""

    @staticmethod
    def forward(ctx, plan, skipping, attended, *given):
        count, inputs = len(skipping), attended.shape[1]
        x, weights, biases = given[:count], given[count : 2 * count], given[2 * count : 3 * count]
        gates = torch.cat(given[3 * count :]).sigmoid() if any(skipping) else None
        active = beside_ones(attended.shape[0], inputs, attended)
        torch.ops.aten.gelu.out(attended, out=active[:, :inputs])
        maps = with_bias(torch.cat(weights), torch.cat(biases)).view(count, weights[0].shape[0], -1)
        outs, gate = [], iter(() if gates is None else gates.unbind())
        parts = active.split_with_sizes(plan.rows)[:count]
        for part, skips, own, map_ in zip(parts, skipping, x, maps.transpose(1, 2).unbind(), strict=True):
            out = part.mm(map_)
            outs.append(torch.lerp(own, out, next(gate)) if skips else out)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            ctx.plan, ctx.skipping = plan, skipping
            ctx.save_for_backward(attended, *given, active, maps, gates)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        plan, skipping, needs, count = ctx.plan, ctx.skipping, ctx.needs_input_grad[2:], len(ctx.skipping)
        saved = ctx.saved_tensors  # which a checkpoint gives once
        (attended, *given), (active, maps, gates) = saved[: len(needs)], saved[len(needs) :]
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return None, None, *_second_ends(plan, skipping, (attended, *given), needs, grads)
        reached = {k: grad.contiguous() for k, grad in enumerate(grads) if grad is not None}
        if not reached:
            return (None,) * (2 + len(needs))
        found: list[Any] = [None] * len(given)
        inputs = attended.shape[1]
        of_active, of_maps = torch.empty_like(attended, memory_format=torch.contiguous_format), torch.empty_like(maps)
        if len(reached) < len(plan.rows):
            of_active.zero_()
        # Gates are factors of the maps, and of their gradients: no pass over all rows is made for them.
        factors = None if gates is None else _factors(skipping, gates)
        scaled = (maps if factors is None else maps * factors)[:, :, :inputs].contiguous()
        each = active.split_with_sizes(plan.rows), of_active.split_with_sizes(plan.rows), of_maps.unbind()
        for k, grad in reached.items():
            part, of_part, of_map = (t[k] for t in each)
            torch.mm(grad, scaled[k], out=of_part)
            torch.mm(grad.t(), part, out=of_map)
        if gates is not None:
            _of_gates(found, skipping, reached, given[:count], gates, (of_maps * maps).sum((1, 2)))
            of_maps = of_maps.mul_(factors)
        of_weights, of_biases = (
            of_maps[:, :, :inputs].contiguous().unbind(),
            of_maps[:, :, inputs].contiguous().unbind(),
        )
        for k in reached:
            found[count + k], found[2 * count + k] = of_weights[k], of_biases[k]
        found = [torch.ops.aten.gelu_backward(of_active, attended) if needs[0] else None, *found]
        return None, None, *[grad if need else None for grad, need in zip(found, needs, strict=True)]


def _factors(skipping: tuple[bool, ...], gates: Tensor) -> Tensor:
    """The gate of each target, or one, [targets, 1, 1]."""
    if not all(skipping):
        rest = iter(gates.split(1))
        gates = torch.cat([next(rest) if skips else gates.new_ones(1) for skips in skipping])
    return gates.view(-1, 1, 1)


def _of_gates(
    found: list, skipping: tuple[bool, ...], reached: dict[int, Tensor], own: Sequence[Tensor], gates: Tensor, dots: Tensor
) -> None:
    """Put into `found` the gradients of own features and of what gates are the sigmoids of; `dots`: the dot products of
    gradients and mapped rows, by target."""
    at = {k: sum(skipping[:k]) for k in reached if skipping[k]}  # places among those that skip
    if not at:
        return
    rest, slopes = (1 - gates).unbind(), (gates * (1 - gates)).unbind()
    of_own = torch._foreach_mul([reached[k] for k in at], [rest[place] for place in at.values()])
    sums = [_dot(reached[k], own[k]) for k in at]
    some = [dots[k] for k in at]
    of_skips = (torch.stack(some) - torch.stack(sums)) * torch.stack([slopes[place] for place in at.values()])
    for k, grad, of_skip in zip(at, of_own, of_skips.split(1), strict=True):
        found[k], found[3 * len(skipping) + at[k]] = grad, of_skip


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """The sum of all products; of a GPU without storing these."""
    if x.is_cuda and x.numel() <= _INT32_MAX and y.is_contiguous():
        return torch.dot(x.view(-1), y.view(-1))
    return (x * y).sum()


def _composed_ends(plan: Plan, skipping: tuple[bool, ...], attended: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """`_Ends`, with a node of autograd for each step."""
    count = len(skipping)
    outs, skips = [], iter(given[3 * count :])
    for k, (part, flag) in enumerate(zip(attended.split(plan.rows), skipping, strict=False)):
        out = F.linear(F.gelu(part), given[count + k], given[2 * count + k])
        outs.append(torch.lerp(given[k], out, next(skips).sigmoid()) if flag else out)
    return tuple(outs)


def _second_ends(plan: Plan, skipping: tuple[bool, ...], given: tuple, needs: Sequence[bool], grads: Sequence) -> tuple:
    """Gradients with derivatives of their own; None for parameters of targets that nothing was made of."""
    reaches = [grad is not None for grad in grads]
    skips = [each for each, flag in zip(reaches, skipping, strict=True) if flag]
    needs = [need and each for need, each in zip(needs, [True, *reaches * 3, *skips], strict=True)]

    def composed(*given):
        outs = _composed_ends(plan, skipping, *given)
        return tuple([out for out, grad in zip(outs, grads, strict=True) if grad is not None])

    return _arrays.gradients(composed, given, needs, tuple([grad for grad in grads if grad is not None]))


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: `_records` has found none.
_maps, _ends = (super(torch.autograd.Function, f).apply for f in (_Maps, _Ends))  # type: ignore[misc]
