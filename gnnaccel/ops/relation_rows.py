"""Layers of many edge types into large node types of which most have no edge of a type: the rows that have are mapped,
and no others.

A row is what a destination has of one edge type, the sum of its sources, or its own features. Rows stand end to end,
edge type by edge type, and are mapped by one product with a matrix for each; one sum over a destination's rows, and
over biases that stand behind them, is the result. The gradients are the same read backwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import factor, filled_rows
from gnnaccel.lower import bounds
from gnnaccel.ops.relation_products import Group, Map, added, below, group_of, matrix
from gnnaccel.ops.relation_sums import one_behind_the_other
from gnnaccel.ops.spmm import spmm
from gnnaccel.ops.summed_rows import SummedRows


class RowsPlan(NamedTuple):
    """What of a call depends on the graphs and shapes alone; holds no tensor of a user's.

    features, biases, used : as of `relation_layers`' plan.
    maps : Group
        Its "destination types" are the edge types and, behind each destination's, its own features.
    sizes, rows : list of int
        Rows of each of the features, and of each result.
    gather, spread : Graph [rows, features], [rows, destinations]
    scatter : Graph [destinations, rows and biases]
    totals : (Graph [parts, destinations], Graph [results, parts])
    of_edges, of_rows : Tensor or None
        Constants for the edges of `gather`; where those of a row are one, they are of rows, too.
    short : bool
        Rows have few edges.
    """

    features: int
    biases: list[list[int]]
    used: list[list[int]]
    maps: Group
    sizes: list[int]
    rows: list[int]
    gather: Graph
    spread: Graph
    scatter: Graph
    totals: tuple[Graph, Graph]
    of_edges: Tensor | None
    of_rows: Tensor | None
    short: bool


def pay(targets: Sequence[Any]) -> bool:
    """True where so many rows of features have no edges that it pays on a GPU to leave them out."""
    if not fit(targets):
        return False
    first = targets[0].terms[0]
    each = first.x.shape[1] * first.outputs
    rows = sum([terms[0].graph.num_rows * len(terms) for terms, *_ in targets])
    if rows * each < bounds.FILLED_ROWS_WORK:
        return False
    filled = sum([filled_rows(term.graph) for terms, *_ in targets for term in terms])
    return filled <= bounds.FILLED_ROWS_SHARE * rows and (rows - filled) * each >= bounds.FILLED_ROWS_WORK


def fit(targets: Sequence[Any]) -> bool:
    """True for layers of one shape whose edges have no weights."""
    width, outputs = targets[0].terms[0].x.shape[1], targets[0].terms[0].outputs
    for terms, _, _, own in targets:
        if own is not None and own.x.shape[1] != width:
            return False
        for term in terms:
            if term.x.shape[1] != width or term.outputs != outputs or term.edge_weight is not None:
                return False
    return True


@torch.inference_mode(False)  # what is kept here is for training too
def planned(targets: Sequence[Any], places: dict[int, int], features: dict[int, Tensor]) -> RowsPlan:
    """The plan of a call, whose tensors are these features and then, target by target, weights of the terms, weights of
    its own features, biases."""
    sizes = [x.shape[0] for x in features.values()]
    bases = [0, *itertools.accumulate(sizes)]
    device, dtype = targets[0].terms[0].graph.device, targets[0].terms[0].x.dtype
    kinds = {term.kind for terms, *_ in targets for term in terms}
    starts, sources, ends, counts, factors, slots = [], [], [], [], [], []
    biases, used, at, first, nnz, most = [], [], len(features), 0, 0, 0
    for terms, _, of_target, own in targets:
        each = [(term.graph, term.x, [Map(at + n, term.transposed)], term.kind) for n, term in enumerate(terms)]
        before, at, num_rows = at, at + len(terms), terms[0].graph.num_rows
        if own is not None:
            each.append((_loops(num_rows, device), own.x, [Map(at + k, True) for k in range(len(own.weights))], "sum"))
            at += len(own.weights)
        for graph, x, maps, kind in each:
            degrees = graph.indptr.diff()
            ids = (degrees > 0).nonzero().squeeze(1)
            most = max(most, int(degrees.max()) if ids.numel() else 0)
            starts.append(graph.indptr[:-1].long()[ids] + nnz)
            sources.append(graph.indices.long() + bases[places[id(x)]])
            ends.append(ids + first)
            counts.append(ids.numel())
            slots.append(maps)
            if kinds != {"sum"}:
                factors.append(factor(graph, kind, dtype))
            nnz += graph.nnz
        biases.append(list(range(at, at + len(of_target))))
        at += len(of_target)
        used.append([*{places[id(x)] for _, x, *_ in each}, *range(before, at)])
        first += num_rows
    rows, begins = sum(counts), [0, *itertools.accumulate([terms[0].graph.num_rows for terms, *_ in targets])]
    places_of = torch.cat(ends)
    numbers = torch.arange(rows + sum(map(len, biases)), device=device)
    spans = zip(itertools.pairwise(begins), biases, strict=True)
    added_to = [torch.arange(a, b, device=device) for (a, b), of_target in spans for _ in of_target]
    which = [n.expand(to.numel()) for n, to in zip(numbers[rows:], added_to, strict=True)]
    indptr = torch.cat([*starts, torch.tensor([nnz], device=device)])
    gather = _graph(indptr, torch.cat(sources), bases[-1])
    spread = _graph(torch.arange(rows + 1, device=device), places_of, begins[-1])
    to, of = torch.cat([places_of, *added_to]), torch.cat([numbers[:rows], *which])
    scatter = Graph.from_coo(to, of, num_rows=begins[-1], num_cols=numbers.numel())
    scatter = Graph(scatter.indptr, scatter.indices, None, scatter.num_cols)
    of_edges = torch.cat(factors) if factors else None
    by_row = of_edges is not None and kinds <= {"sum", "mean"}
    outputs = targets[0].terms[0].outputs
    return RowsPlan(
        len(features),
        biases,
        used,
        group_of(list(range(len(slots))), counts, slots, outputs, device),
        sizes,
        [terms[0].graph.num_rows for terms, *_ in targets],
        gather,
        spread,
        scatter,
        _totals(begins, device),
        of_edges,
        of_edges[indptr[:-1]] if of_edges is not None and by_row else None,
        most <= bounds.SHORT_RUN and nnz <= bounds.SHORT_RUN_MEAN * rows,
    )


def _loops(num_rows: int, device: torch.device) -> Graph:
    each = torch.arange(num_rows + 1, device=device)
    return Graph(each, each[:-1].clone(), None, num_rows)


def _totals(begins: list[int], device: torch.device) -> tuple[Graph, Graph]:
    """Of so many rows of each result, in two steps: torch's sum of 400,000 rows of 64 takes 127 us (an H100)."""
    starts = [range(a, b, bounds.TOTALS_ROWS) for a, b in itertools.pairwise(begins)]
    parts = torch.tensor([*itertools.chain(*starts), begins[-1]], device=device)
    ends = torch.tensor([0, *itertools.accumulate(map(len, starts))], device=device)
    every = torch.arange(max(begins[-1], parts.numel()), device=device)
    return _graph(parts, every[: begins[-1]], begins[-1]), _graph(ends, every[: parts.numel() - 1], parts.numel() - 1)


def _graph(indptr: Tensor, indices: Tensor, num_cols: int) -> Graph:
    narrow = max(indices.numel(), num_cols, indptr.numel()) <= bounds.INT32_MAX
    dtype = torch.int32 if narrow else torch.int64
    return Graph(indptr.to(dtype), indices.to(dtype), None, num_cols)


def results(plan: RowsPlan, given: Sequence[Any]) -> tuple[list[Tensor], tuple[Tensor, ...], None]:
    """Of each target; and what the gradients are made of."""
    x, maps = one_behind_the_other(list(given[: plan.features])), matrix(plan.maps, given)
    biases = [given[place] for of_target in plan.biases for place in of_target]
    mapped = _sources(plan, x, plan.of_edges).mapped(plan.maps.ptr, maps.transpose(1, 2), len(biases))
    if biases:
        torch.cat(biases, out=mapped[-len(biases) :].view(-1))
    return list(torch.unsafe_split_with_sizes(added(plan.scatter, mapped), plan.rows)), (x, maps), None


def gradients(plan: RowsPlan, saved: Sequence[Tensor], grads: Sequence, needs: Sequence[bool]) -> list[Tensor | None]:
    """Of all that was given, as far as needed; of results at least one of which has a gradient."""
    x, maps = saved
    found: list[Tensor | None] = [None] * len(needs)
    grad = below(grads, plan.rows, next(grad for grad in grads if grad is not None), maps.shape[1])
    by_row = plan.of_rows is not None or plan.of_edges is None
    before = None if by_row else plan.of_edges
    ptr, grads_of_rows = plan.maps.ptr, SummedRows(plan.spread, grad, plan.of_rows, True)
    if any(needs[: plan.features]):
        rows, back = grads_of_rows.mapped(ptr, maps), plan.gather.transposed
        whole = added(back, rows) if before is None else spmm(back, rows, before)
        found[: plan.features] = torch.split_with_sizes(whole, plan.sizes)
    if any(needs[each.place] for each in plan.maps.maps):
        parts = grads_of_rows.weights(ptr, _sources(plan, x, before), 0).unbind()
        for place, transposed, slot in plan.maps.maps:
            found[place] = parts[slot] if transposed else parts[slot].t()
    if any(needs[place] for of_target in plan.biases for place in of_target):
        first, second = plan.totals
        for total, of_target in zip(added(second, added(first, grad)).unbind(), plan.biases, strict=True):
            for place in of_target:
                found[place] = total
    return found


def _sources(plan: RowsPlan, x: Tensor, factors: Tensor | None) -> SummedRows:
    return SummedRows(plan.gather, x, factors, plan.short)
