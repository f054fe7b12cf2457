"""Walks and products that layers of many edge types are made of: what of a call of gnnaccel/ops/relation_layers.py
depends on the graphs and shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import EdgeList, Relation, Stack, below_each_other, end_to_end, placed
from gnnaccel.ops.relation_products import Group, Map, adding, group_of
from gnnaccel.ops.spmm import FORMS


class Walk(NamedTuple):
    """A sum over the edges into all targets whose features have one width; where `reduce` is "factors", one whose edges
    have the constants `weight`, and where it is "weighted", one whose edges have those of `given`, by their ids.

    given : list of (target, term), or of a Tensor of ones
        Where the weights of the edges come from, one behind the other; `weight` is a further factor, or None.
    features : list of int
        Places of these features, which stand end to end.
    sizes : list of int
        Their rows.
    """

    graph: Graph
    reduce: str
    weight: Tensor | None
    given: list[tuple[int, int] | Tensor]
    features: list[int]
    sizes: list[int]


class Product(NamedTuple):
    """Products with rows [first, last) of the sums of one walk."""

    walk: int
    first: int
    last: int
    group: Group


class Plan(NamedTuple):
    """Walks and products; for each target the places of its biases, and of all that it is made of (`used`); and,
    where one product has all targets, what adds up their biases.

    Places are those of the tensors that are given to autograd; the first `features` are features.
    """

    features: int
    walks: list[Walk]
    products: list[Product]
    biases: list[list[int]]
    adding: Graph | None
    used: list[list[int]]


@torch.inference_mode(False)  # what is kept here is for training too
def planned(
    targets: Sequence[Any], places: dict[int, int], features: dict[int, Tensor], kept: Callable[..., Any]
) -> Plan | None:
    """The plan of a call; holds no tensor of it. None for a list of edges with an index out of range."""
    device, anew = targets[0].terms[0].graph.device, type(targets[0].terms[0].graph) is EdgeList
    sizes, at = [x.shape[0] for x in features.values()], len(features)
    walked: dict[tuple, list[tuple[int, list]]] = {}  # by width and kind: the parts of targets
    biases, used = [], []
    for number, (terms, _, of_target, own) in enumerate(targets):
        parts: dict[tuple, list] = {}  # (graph, place of its features, maps)
        first = at
        for n, term in enumerate(terms):
            weighted, form = term.edge_weight is not None, term.kind if term.kind in FORMS else "factors"
            row = (term.graph, places[id(term.x)], [Map(at, term.transposed)], term.kind, n if weighted else None)
            parts.setdefault((term.x.shape[1], "weighted" if weighted else form), []).append(row)
            at += 1
        if own is not None:
            width, maps = own.x.shape[1], [Map(at + k, True) for k in range(len(own.weights))]
            key = next((key for key in parts if key[0] == width), (width, "sum"))
            parts.setdefault(key, []).append(
                ((_loop_edges if anew else _loops)(terms[0].graph), places[id(own.x)], maps, "sum", None)
            )
            at += len(maps)
        for key, rows in parts.items():
            walked.setdefault(key, []).append((number, rows))
        biases.append(list(range(at, at + len(of_target))))
        at += len(of_target)
        used.append([*{place for rows in parts.values() for _, place, *_ in rows}, *range(first, at)])
    outputs = [terms[0].outputs for terms, *_ in targets]
    walks: list[Walk] = []
    made: list[Product] = []
    dtype = targets[0].terms[0].x.dtype
    for (_, reduce), found in walked.items():
        found.sort(key=lambda part: (len(part[1]), outputs[part[0]]))  # those of one shape stand together
        members = list(dict.fromkeys([place for _, rows in found for _, place, *_ in rows]))
        bases, cols = _bases(members, sizes)
        before = 0
        for (wide, outs), group in groupby(found, lambda part: (len(part[1]), outputs[part[0]])):
            some = list(group)
            numbers = [number for number, _ in some]
            counts = [targets[number].terms[0].graph.num_rows for number in numbers]
            slots = [maps for _, rows in some for _, _, maps, *_ in rows]
            one = group_of(numbers, counts, slots, outs, device)
            made.append(Product(len(walks), before, before + sum(counts) * wide, one))
            before = made[-1].last
        widths = [sizes[place] for place in members]
        if anew:
            parts_of = [[(maps[0].place, place) for _, place, maps, *_ in rows] for _, rows in found]
            graph = kept(("walk", str(parts_of), *widths), partial(_walk_of_edges, found, bases, cols))
            if graph is None:
                return None
            walks.append(Walk(graph, reduce, None, [], members, widths))
            continue
        stacks = [Stack([Relation(graph, bases[place]) for graph, place, *_ in rows], cols) for _, rows in found]
        weighted = reduce == "weighted"
        graph = below_each_other([stack.apart_by_id if weighted else stack.apart for stack in stacks])
        kinds = [[kind for *_, kind, _ in rows] for _, rows in found]
        weight, given = None, []
        if reduce == "factors" or (weighted and any(kind != "sum" for each in kinds for kind in each)):
            pairs = zip(stacks, kinds, strict=True)
            weight = torch.cat([stack.factors(each, dtype, by_id=weighted) for stack, each in pairs])
        if weighted:
            for number, rows in found:
                given += [_ones(each, dtype) if n is None else (number, n) for each, *_, n in rows]
        walks.append(Walk(graph, reduce, weight, given, members, widths))
    joined = None
    if len(made) == 1 and any(biases):
        next_one = count()
        sums = [[next(next_one) for _ in biases[number]] for number in made[0].group.targets]
        joined = adding(sums, 1, 1, device)
    return Plan(len(features), walks, made, biases, joined, used)


def _bases(members: list[int], sizes: list[int]) -> tuple[dict[int, int], int]:
    bases, rows = {}, 0
    for place in members:
        bases[place] = rows
        rows += sizes[place]
    return bases, rows


def _loops(graph: Graph) -> Graph:
    each = torch.arange(graph.num_rows + 1, device=graph.device)
    return Graph(each, each[:-1].clone(), None, graph.num_rows)


def _loop_edges(edges: EdgeList) -> EdgeList:
    each = torch.arange(edges.num_rows, device=edges.device)
    return EdgeList(each.expand(2, -1), edges.num_rows, edges.num_rows)


def _walk_of_edges(found: list[tuple[int, list]], bases: dict[int, int], cols: int) -> Graph | None:
    """The rows of all parts, sorted at once; None for an index out of range."""
    lists, rows, columns, first = [], [], [], 0
    for _, parts in found:
        for slot, (edges, place, *_) in enumerate(parts):
            lists.append(edges)
            rows.append((first + slot, len(parts)))
            columns.append((bases[place], 1))
        first += parts[0][0].num_rows * len(parts)
    ends = end_to_end([each.edges for each in lists], [(each.num_cols, each.num_rows) for each in lists])
    if ends is None:
        return None
    which, sources, destinations = ends
    graph = Graph.from_coo(
        placed(destinations, which, rows), placed(sources, which, columns), num_rows=first, num_cols=cols
    )
    return Graph(graph.indptr, graph.indices, None, cols)


def _ones(graph: Graph, dtype: torch.dtype) -> Tensor:
    return torch.ones(graph.nnz, dtype=dtype, device=graph.device)
