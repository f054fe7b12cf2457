"""Layers of many edge types on graphs that may be gone after this call: one after the other, in one node of autograd.

Nothing is made of all graphs together, which takes longer than one call spares. What is spared is what Python and
autograd spend on each layer, and products: maps of a destination's own features are added up before they are applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.graph.csr import Graph
from gnnaccel.ops import linear_sums


class Sum(NamedTuple):
    """A term: `reduce` of a graph (None: of no edges), and the places of its features and of its weight [D, F]."""

    graph: Graph | None
    reduce: str
    features: int
    weight: int


class Part(NamedTuple):
    """What one destination type of so many rows is made of. own: the place of its own features, and those of their
    maps."""

    rows: int
    sums: list[Sum]
    own: tuple[int, list[int]] | None
    biases: list[int]


class EachPlan(NamedTuple):
    """Of one call; features, used : as of `relation_layers`' plan."""

    features: int
    parts: list[Part]
    used: list[list[int]]


def planned(targets: Sequence[Any]) -> tuple[EachPlan, list[Tensor]]:
    """The plan, and what its places are of: features and then, target by target, weights of the terms, weights of its
    own features, biases."""
    features: dict[int, Tensor] = {}
    for terms, _, _, own in targets:
        for term in terms:
            features[id(term.x)] = term.x
        if own is not None:
            features[id(own.x)] = own.x
    places = {each: place for place, each in enumerate(features)}
    given, parts, used = list(features.values()), [], []
    for terms, _, biases, own in targets:
        first, sums, mine = len(given), [], None
        for term in terms:
            sums.append(Sum(term.graph if term.graph.nnz else None, term.kind, places[id(term.x)], len(given)))
            given.append(term.weight)
        if own is not None:
            mine = places[id(own.x)], list(range(len(given), len(given) + len(own.weights)))
            given += own.weights
        parts.append(Part(terms[0].graph.num_rows, sums, mine, list(range(len(given), len(given) + len(biases)))))
        given += biases
        read = [each.features for each in sums] + ([] if mine is None else [mine[0]])
        used.append([*read, *range(first, len(given))])
    return EachPlan(len(features), parts, used), given


def results(plan: EachPlan, given: Sequence[Any], needs: Sequence[bool]) -> tuple[list[Tensor], list, list]:
    """Of each target; what the gradients are made of, as far as needed; and what has the gradient of each sum."""
    outs: list[Tensor] = []
    kept: list[Tensor | None] = []
    calls: list[Any] = []
    for rows, sums, own, biases in plan.parts:
        bias, out = added([given[place] for place in biases]), None
        if own is not None:
            x, maps = given[own[0]], added([given[place] for place in own[1]])
            out = F.linear(x, maps, bias)
            kept += (x if any(needs[place] for place in own[1]) else None, maps if needs[own[0]] else None)
        for graph, reduce, at, place in sums:
            weight, both = given[place], needs[at]
            if graph is None:
                kept += (None, None)
                calls.append(None)
                continue
            call, summed = linear_sums.sums_of(graph, given[at], reduce, both)
            out = F.linear(summed, weight, bias) if out is None else out.addmm_(summed, weight.t())
            kept += (summed if needs[place] else None, weight if both else None)
            calls.append(call)
        if out is None:  # no edges at all
            some = given[sums[0].weight]
            out = some.new_zeros(rows, some.shape[0]) if bias is None else bias.expand(rows, -1).clone()
        outs.append(out)
    return outs, kept, calls


def gradients(
    plan: EachPlan,
    calls: Sequence,
    saved: Sequence[Any],
    given: Sequence[Any],
    grads: Sequence,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Of all that was given, as far as needed."""
    found: list[Tensor | None] = [None] * len(needs)
    kept, sums_of, without = iter(saved), iter(calls), set()
    for (_, sums, own, biases), grad in zip(plan.parts, grads, strict=True):
        pairs = [(next(kept), next(kept)) for _ in range(len(sums) + (own is not None))]
        of_sums = [next(sums_of) for _ in sums]
        if grad is None:
            continue
        grad = grad.contiguous()
        transposed = grad.t()
        if biases:
            found[biases[0] : biases[-1] + 1] = [grad.sum(0)] * len(biases)
        if own is not None:
            x, maps = pairs.pop(0)
            if x is not None:
                found[own[1][0] : own[1][-1] + 1] = [transposed.mm(x)] * len(own[1])
            if maps is not None:
                _add(found, own[0], grad.mm(maps))
        for (graph, _, at, place), (summed, weight), call in zip(sums, pairs, of_sums, strict=True):
            if graph is None:
                without |= {at, place}
            if summed is not None:
                found[place] = transposed.mm(summed)
            if weight is not None:
                _add(found, at, call.gradient(grad.mm(weight)))
    for place in without:
        if needs[place] and found[place] is None:
            found[place] = torch.zeros_like(given[place])
    return found


def _add(found: list, place: int, part: Tensor) -> None:
    """Add what nobody else has to the gradient of a tensor."""
    found[place] = part if found[place] is None else found[place].add_(part)


def added(parameters: list[Tensor]) -> Tensor | Any:
    """Their sum; None of none."""
    if len(parameters) < 2:
        return parameters[0] if parameters else None
    return parameters[0] + parameters[1] if len(parameters) == 2 else torch.stack(parameters).sum(0)
