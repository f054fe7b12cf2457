"""The maps of HGT's node types and edge types: queries, and keys and values of each edge type that leaves a node, as
one node of autograd, of which gnnaccel/ops/hgt_layers.py tells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays
from gnnaccel.ops._features import widened, with_bias

KEY, QUERY, VALUE, MAPS = range(4)  # the blocks of a node type's map, and how many there are


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
    ptr : Tensor, on the CPU
        Where the rows of each target begin.
    filled : gnnaccel.ops.hgt_rows.Filled, optional
        Of a graph whose sources are those alone that have edges of their type; `groups` are of all.
    """

    graph: Graph
    groups: list[Group]
    targets: list[int]
    rows: list[int]
    order: Tensor
    given: list[int]
    types: int
    ptr: Tensor
    filled: Any = None


def parts_of(plan: Plan, given: Sequence[Any]) -> tuple[list, list, list, list, Any, Any]:
    """x, weights, biases, priors in the plan's order, keys, values."""
    types = plan.types
    *priors, keys, values = given[3 * types :]
    ordered = [priors[number] for number in plan.given]
    return [*given[:types]], [*given[types : 2 * types]], [*given[2 * types : 3 * types]], ordered, keys, values


def permuted(plan: Plan, priors: list[Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Transposed maps of keys and of values, of the edge types in the plan's order [2, P, H, D, D], and the factors
    [2, P, H, 1, 1] of these: the priors, and ones."""
    heads, width = priors[0].shape[1], keys.shape[1]
    permuted = torch.stack((keys, values)).view(2, heads, -1, width, width).permute(0, 2, 1, 4, 3)
    factors = torch.cat([*priors, keys.new_ones(len(priors), heads)]).view(2, -1, heads, 1, 1)
    return permuted.index_select(1, plan.order), factors


def joined_maps(group: Group, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Maps of the node types for features that are `widened`, [places, 3, H * D, width]."""
    each = [[given[place] for place in group.places] for given in (weights, biases)]
    joined = with_bias(*map(torch.cat, each))
    return joined.view(len(group.places), MAPS, -1, joined.shape[1])


class _Maps(_operators.Function):
    """Queries [num_rows, H * D], keys and values [num_cols, H * D]."""

    @staticmethod
    def forward(ctx, plan, *given):
        x, weights, biases, priors, keys, values = parts_of(plan, given)
        heads, width = priors[0].shape[1], keys.shape[1]
        wide = heads * width
        query, outs = keys.new_empty(plan.graph.num_rows, wide), keys.new_empty(2, plan.graph.num_cols, wide).unbind()
        queries = dict(zip(plan.targets, query.split_with_sizes(plan.rows), strict=True))
        plain, factors = permuted(plan, priors, keys, values)
        scaled = plain * factors
        kept = [plain, factors, scaled]
        for group in plan.groups:
            joined, features = joined_maps(group, weights, biases), [widened(x[place]) for place in group.places]
            kept += [joined, *features]
            own = joined[:, QUERY].transpose(1, 2).unbind()
            for k in group.targets:
                torch.mm(features[k], own[k], out=queries[group.places[k]])
            if not group.sources:
                continue
            blocks, folded = fold(group, joined, scaled)
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
            return None, *_arrays.gradients(partial(composed_maps, plan), given, needs, tuple(grads))
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
                of_factors(group, of_folded, scaled, blocks, of_scaled, of_joined)
            own, of_own = joined[:, QUERY, :, :inputs].unbind(), of_joined[:, QUERY].unbind()
            for k in group.targets:
                place = group.places[k]
                grad = queries[place]
                torch.mm(grad.t(), features[k], out=of_own[k])
                if needs[place]:
                    of_x[place] = _added(of_x[place], grad, own[k])
            put_parameters(group, of_joined, inputs, of_weights, of_biases)
        of_priors, of_keys, of_values = of_relations(plan, of_scaled, plain, factors, given[-1].shape)
        everything = (*of_x, *of_weights, *of_biases, *of_priors, of_keys, of_values)
        return None, *[grad if need else None for grad, need in zip(everything, needs, strict=True)]


def fold(group: Group, joined: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of the node types' maps [2 * P * H, D, width] that those of P edge types are multiplied with, and the
    products [2, P * H * D, width]."""
    wide, width, inputs = joined.shape[2], scaled.shape[3], joined.shape[3]
    blocks = joined.view(-1, wide, inputs).index_select(0, group.blocks.view(-1)).view(-1, width, inputs)
    maps = scaled[:, group.begin : group.end].reshape(-1, width, width)
    return blocks, torch.bmm(maps, blocks).view(2, -1, inputs)


def of_factors(
    group: Group, of_folded: Tensor, scaled: Tensor, blocks: Tensor, of_scaled: Tensor, of_joined: Tensor
) -> None:
    """Write the gradients of what `fold` multiplies, from that of its products."""
    of_folded, width = of_folded.view(blocks.shape), blocks.shape[1]
    maps = scaled[:, group.begin : group.end].reshape(-1, width, width)
    of_maps = torch.bmm(of_folded, blocks.transpose(1, 2))
    of_scaled[:, group.begin : group.end] = of_maps.view(2, -1, *scaled.shape[2:])
    of_blocks = torch.bmm(maps.transpose(1, 2), of_folded).view(2, -1, of_joined.shape[2], blocks.shape[2])
    into = of_joined[:, ::VALUE].unbind()
    for k, part in zip(group.sources, of_blocks.split_with_sizes(group.counts, 1), strict=True):
        torch.sum(part, 1, out=into[k])


def put_parameters(group: Group, of_joined: Tensor, inputs: int, of_weights: list, of_biases: list) -> None:
    """Gradients of the node types' parameters, of those of their maps."""
    of_joined = of_joined.view(len(group.places), -1, of_joined.shape[3])
    parts = of_joined[:, :, :inputs].contiguous().unbind(), of_joined[:, :, inputs].contiguous().unbind()
    for place, of_weight, of_bias in zip(group.places, *parts, strict=True):
        of_weights[place], of_biases[place] = of_weight, of_bias


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


def of_relations(plan: Plan, of_scaled: Tensor, plain: Tensor, factors: Tensor, shape: torch.Size) -> tuple:
    """Gradients of the priors, in the order of the call, and of the edge types' maps, of this shape."""
    _, _, heads, width, _ = plain.shape
    of_priors: list[Any] = [None] * len(plan.given)
    for number, grad in zip(plan.given, (of_scaled[0] * plain[0]).sum((2, 3)).split(1), strict=True):
        of_priors[number] = grad
    found = plain.new_zeros(2, heads, shape[0] // heads, width, width)
    found.permute(0, 2, 1, 4, 3).index_copy_(1, plan.order, of_scaled.mul_(factors))
    return of_priors, *found.view(2, *shape).unbind()


def composed_maps(plan: Plan, *given: Tensor) -> tuple[Tensor, ...]:
    """`_Maps`, one map after the other."""
    x, weights, biases, priors, keys, values = parts_of(plan, given)
    heads, width = priors[0].shape[1], keys.shape[1]
    mapped = [F.linear(*each).view(-1, MAPS, heads, width) for each in zip(x, weights, biases, strict=True)]
    of_keys, of_values = [t.view(heads, -1, width, width).transpose(0, 1)[plan.order] for t in (keys, values)]
    of_keys = of_keys * torch.cat(priors).view(-1, heads, 1, 1)
    outs = []
    for which, maps in ((KEY, of_keys), (VALUE, of_values)):
        parts = []
        for group in plan.groups:
            each = maps[group.begin : group.end].split(group.counts) if group.counts else ()  # [R, H, D, D]
            for k, part in zip(group.sources, each, strict=True):
                rows = torch.einsum("nhd,rhde->nrhe", mapped[group.places[k]][:, which], part)
                parts.append(rows.reshape(-1, heads * width))
        whole = torch.cat(parts)
        outs.append(whole if plan.filled is None else whole[plan.filled.select])
    queries = [mapped[place][:, QUERY].reshape(-1, heads * width) for place in plan.targets]
    return torch.cat(queries), *outs


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: who calls it has found none.
maps_of = super(torch.autograd.Function, _Maps).apply  # type: ignore[misc]
