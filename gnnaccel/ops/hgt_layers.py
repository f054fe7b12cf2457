"""HGT over several types of nodes and edges (Hu et al., WWW 2020), with two nodes of autograd beside its attention.

A node's keys and values for an edge type are maps of maps: of the node type, then of the edge type by head. The maps
are multiplied instead of the features, so that a node type's keys of all its edge types are one product, and so are its
values. They stand in the rows that the attention gathers from; queries and what is attended likewise, type below type.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import end_to_end, placed
from gnnaccel.lower import bounds
from gnnaccel.ops.heads_attention import heads_attention
from gnnaccel.ops.hgt_ends import composed_ends, ends_of
from gnnaccel.ops.hgt_maps import KEY, MAPS, VALUE, Group, Plan, composed_maps, maps_of
from gnnaccel.ops.hgt_rows import Filled, filled_maps_of

_ON_ROWS = ("cuda",)  # where a source's keys and values are made only for edge types that it has edges of


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
            of += [k * MAPS] * len(numbers)
        blocks = torch.tensor([[k + which for k in of] for which in (KEY, VALUE)], dtype=torch.int64).to(device)
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
        begins, filled = placed(starts, which, columns), None
        if device.type in _ON_ROWS and len(groups) == 1:
            filled, inverse = _filled(groups[0], given, which, starts, columns, sizes, targets)
            width = sizes[groups[0].places[0]][1]
            some = filled.keys and (
                filled.keys * bounds.HGT_ROWS_TIMES <= cols or cols * width * width <= len(given) * bounds.HGT_ROWS_CALL
            )
            filled, begins, cols = (filled, inverse, filled.keys) if some else (None, begins, cols)
        graph = Graph.from_coo(destinations, begins, num_rows=rows, num_cols=cols)
        graph = Graph(graph.indptr, graph.indices, None, cols)  # no edge has anything of its own
        order = torch.tensor([types[number][2] for number in given]).to(device)
    each = [sizes[place][0] for place in targets]
    ptr = torch.tensor([0, *itertools.accumulate(each)])
    return Plan(graph, groups, list(targets), each, order, given, len(sizes), ptr, filled)


def _filled(
    group: Group,
    given: list[int],
    which: Tensor,
    starts: Tensor,
    columns: Sequence[tuple[int, int]],
    sizes: Sequence[tuple[int, int]],
    targets: Sequence[int],
) -> tuple[Filled, Tensor]:
    """The sources of each edge type that have edges of it; and for each edge which of these is its own."""
    device, most = starts.device, max([nodes for nodes, _ in sizes])
    nodes = [sizes[place][0] for place in group.places]
    bases = dict(zip(group.places, itertools.accumulate(nodes, initial=0), strict=False))
    leaving = [k for k, count in zip(group.sources, group.counts, strict=True) for _ in range(count)]
    numbers = torch.empty(len(given), dtype=torch.int64)
    numbers[given] = torch.arange(len(given))
    pairs, inverse = torch.unique(numbers.to(device)[which] * most + starts, return_inverse=True)
    types, sources = torch.div(pairs, most, rounding_mode="floor"), pairs % most
    counts = torch.bincount(types, minlength=len(given)).tolist()
    select = placed(sources, types, [columns[number] for number in given])
    read = placed(sources, types, [(bases[group.places[k]], 1) for k in leaving])
    own = [torch.arange(bases[place], bases[place] + sizes[place][0], device=device) for place in targets]
    sizes_of_types = [*counts, *counts, *[sizes[place][0] for place in targets]]
    asking = [group.places.index(place) for place in targets]
    return Filled.of(select, torch.cat([read, read, *own]), sizes_of_types, len(given), asking, nodes), inverse


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
    maps = composed_maps
    if short and plan.filled is not None:
        maps = filled_maps_of
    elif short and _folds(plan, features, relations):
        maps = maps_of
    query, key, value = [t.view(-1, heads, width) for t in maps(plan, *given)]
    attended = heads_attention(plan.graph, query, key, value).view(-1, heads * width)
    apart = not short or (len(ends.x) > 1 and _operators.waited_for(after))
    return list((composed_ends if apart else ends_of)(plan, skipping, attended, *after))


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
    return folded <= max(
        apart * bounds.HGT_MAPS_TIMES["cuda" if relations.keys.is_cuda else "cpu"], apart + bounds.HGT_MAPS_WORK
    )
