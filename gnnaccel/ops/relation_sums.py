"""The sum, over several graphs into the same destinations, of what each one's linear map makes of its sums: a layer per
edge type of a heterogeneous graph, and the sum of their results.

Sums first: one walk gives each destination its sums by graph, side by side, [num_rows, count * F], and one product with
the maps below each other, [count * F, D], maps these and adds the results. Maps first: one product for each tensor of
features maps it for all graphs that read it, and one walk sums over all edges. Where most rows of the graphs have no
edges, sums first, of the rows that have: one walk for these, one product for each graph, and one walk that adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import Filled, Relation, Stack, factor, filled_rows
from gnnaccel.lower import bounds
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops.segment_matmul import matmul_op
from gnnaccel.ops.spmm import FORMS, spmm

Kept = Callable[[Hashable, Callable[[], Any]], Any]


class Term(NamedTuple):
    """What one graph adds: linear(spmm(graph, x, factor(graph, kind)), weight), of a weight [F, D] unless `transposed`.

    graph : Graph
    x : Tensor [num_cols, F]
    weight : Tensor [D, F], or [F, D]
    kind : str
        Of `gnnaccel.graph.stack.factor`.
    transposed : bool
        True for a weight [D, F], as those of torch's linear maps.
    edge_weight : Tensor [nnz], optional
        By edge id: a further factor of each edge.
    """

    graph: Graph
    x: Tensor
    weight: Tensor
    kind: str
    transposed: bool
    edge_weight: Tensor | None = None

    @property
    def outputs(self) -> int:
        """D."""
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def matrix(self) -> Tensor:
        """The weight as [F, D]."""
        return self.weight.t() if self.transposed else self.weight


class Own(NamedTuple):
    """What the destinations add: linear(x, weight) for each of `weights` [D, F]."""

    x: Tensor
    weights: Sequence[Tensor]


def relation_sums(terms: Sequence[Term], kept: Kept, biases: Sequence[Tensor] = (), own: Own | None = None) -> Tensor:
    """The sum of `terms`, of `biases` and of `own`.

    Parameters
    ----------
    terms : sequence of Term
        At least one, of graphs with the same rows, and weights with as many outputs; one floating dtype and device.
    kept : callable
        kept(key, make) returns what make() has made for these graphs and this key before, or makes it.
    biases : sequence of Tensor [D]
    own : Own, optional
        With at least one weight.

    Returns
    -------
    Tensor [num_rows, D]

    Notes
    -----
    Features of one width are worked on together, in the order that does less.
    """
    widths: dict[int, list[int]] = {}
    for i, term in enumerate(terms):
        widths.setdefault(term.x.shape[1], []).append(i)
    later, transposed, sums, weights, rows = [], [], [], [], terms[0].graph.num_rows
    for numbers in widths.values():
        part = [terms[i] for i in numbers]
        filled = _filled(part)
        if _maps_first(part, filled):
            later.append(_mapped_first(part, tuple(numbers), kept))
            continue
        if filled is not None:
            later.append(_filled_rows_mapped(part, tuple(numbers), kept))
            continue
        sums.append(_summed(part, tuple(numbers), kept).view(rows, -1))
        transposed.append([term.transposed for term in part])
        weights += [term.weight for term in part]
    x, owns = own or (None, ())
    if not sums and x is None:
        out = later.pop()
        return sum(later, start=out if not biases else out + (biases[0] if len(biases) == 1 else sum(biases)))
    sizes = (transposed, len(owns), len(biases))
    return sum(later, start=_Mapped.apply(sizes, x, *sums, *weights, *owns, *biases))


def term_by_term(terms: Sequence[Term], biases: Sequence[Tensor], own: Own | None) -> Tensor:
    """`relation_sums` by its definition."""
    parts = [_sum_of(term) @ term.matrix for term in terms]
    parts += [] if own is None else [F.linear(own.x, weight) for weight in own.weights]
    return sum([*parts[1:], *biases], start=parts[0])


def _sum_of(term: Term) -> Tensor:
    graph, weight = term.graph, term.edge_weight
    if weight is None and term.kind in FORMS:
        return spmm(graph, term.x, reduce=term.kind)
    if weight is not None and term.kind == "sum":
        return spmm(graph, term.x, weight)
    in_order = Graph(graph.indptr, graph.indices, None, graph.num_cols)  # as factors are
    factors = factor(graph, term.kind, term.x.dtype)
    if weight is not None:
        factors = factors * (weight if graph.edge_ids is None else weight[graph.edge_ids.long()])
    return spmm(in_order, term.x, factors)


class _Mapped(_operators.Function):
    """Products of sums [num_rows, count * F] with the `count` weights of their graphs, added up, with the biases and
    the products of the destinations' own features: one function for autograd where the ops are a dozen.

    Saves what these would, and computes gradients by torch's ops, which have derivatives.
    """

    @staticmethod
    def forward(ctx, sizes, x, *given):
        transposed, num_owns, num_biases = sizes
        sums, weights, owns, biases = _split(given, transposed, num_owns, num_biases)
        out = _added(biases)
        if x is not None:
            out = F.linear(x, _added(owns), out)
        for each, flags, part in zip(sums, transposed, weights, strict=True):
            maps = torch.cat([w.t() if flag else w for w, flag in zip(part, flags, strict=True)])
            out = each.mm(maps) if out is None else torch.addmm(out, each, maps)
        ctx.sizes = sizes
        needs = ctx.needs_input_grad[2:]
        of_sums, of_weights, of_owns, _ = _split(needs, transposed, num_owns, num_biases)
        keep_sums = [each if any(wanted) else None for each, wanted in zip(sums, of_weights, strict=True)]
        keep_weights = [w if of else None for of, part in zip(of_sums, weights, strict=True) for w in part]
        keep_owns = owns if ctx.needs_input_grad[1] else [None] * num_owns
        ctx.save_for_backward(x if any(of_owns) else None, *keep_sums, *keep_weights, *keep_owns)
        return out

    @staticmethod
    def backward(ctx, grad):
        transposed, num_owns, num_biases = ctx.sizes
        x, *saved = ctx.saved_tensors
        sums, weights, owns, _ = _split(saved, transposed, num_owns, 0)
        of_x, *needs = ctx.needs_input_grad[1:]
        of_sums, of_weights, of_owns, of_biases = _split(needs, transposed, num_owns, num_biases)
        grad_x = grad.mm(_added(owns)) if of_x else None
        grad_sums, grad_weights = [], []
        for each, flags, part, of, wanted in zip(sums, transposed, weights, of_sums, of_weights, strict=True):
            # Not grad.mm(maps.t()): each weight as it lies, side by side.
            rows = torch.cat([w if flag else w.t() for w, flag in zip(part, flags, strict=True)], dim=1) if of else None
            grad_sums.append(None if rows is None else grad.mm(rows))
            if not any(wanted):
                grad_weights += [None] * len(flags)
                continue
            products = each.t().mm(grad).chunk(len(flags))
            pairs = zip(products, flags, wanted, strict=True)
            grad_weights += [(p.t() if flag else p) if want else None for p, flag, want in pairs]
        product = grad.t().mm(x) if any(of_owns) else None
        total = column_sums(grad) if any(of_biases) else None
        grad_owns = [product if of else None for of in of_owns]
        return None, grad_x, *grad_sums, *grad_weights, *grad_owns, *[total if of else None for of in of_biases]


def _split(given: Sequence, transposed: list, num_owns: int, num_biases: int) -> tuple[list, list[list], list, list]:
    """Of one sequence: what belongs to the sums, to the weights of each, to the own weights and to the biases."""
    given, count = list(given), len(transposed)
    weights, at = [], count
    for flags in transposed:
        weights.append(given[at : at + len(flags)])
        at += len(flags)
    return given[:count], weights, given[at : at + num_owns], given[at + num_owns : at + num_owns + num_biases]


def _added(parameters: list[Tensor]) -> Tensor | None:
    if len(parameters) < 2:
        return parameters[0] if parameters else None
    return torch.stack(parameters).sum(0)


def _filled(terms: list[Term]) -> int | None:
    """How many rows of the graphs have edges, if these alone are to be mapped; None if all are."""
    if any(term.edge_weight is not None for term in terms):
        return None
    rows, count = terms[0].graph.num_rows, len(terms)
    filled = sum([filled_rows(term.graph) for term in terms])
    spared = (rows * count - filled) * terms[0].x.shape[1] * terms[0].outputs
    return (
        filled
        if spared > count * bounds.FILLED_SUMS_WORK and filled < bounds.FILLED_SUMS_SHARE * rows * count
        else None
    )


def _maps_first(terms: list[Term], filled: int | None) -> bool:
    """True if products with the sources' features, and sums of results, take less than the other way round."""
    width, outputs = terms[0].x.shape[1], terms[0].outputs
    rows = terms[0].graph.num_rows * len(terms) if filled is None else filled
    edges = sources = 0
    for term in terms:
        edges += term.graph.nnz
        sources += term.graph.num_cols
    return (sources * width + edges * bounds.EDGE_READ_WORK) * outputs < (
        rows * outputs + edges * bounds.EDGE_READ_WORK
    ) * width


def _filled_rows_mapped(terms: list[Term], numbers: tuple, kept: Kept) -> Tensor:
    """The terms' sum, of which each graph's rows with edges alone are mapped."""
    features, bases, rows = _joined(terms)

    def make() -> Filled:
        return Filled([Relation(t.graph, base) for t, base in zip(terms, bases, strict=True)], rows)

    filled = kept(("filled", numbers, tuple(bases), rows, terms[0].graph.num_rows), make)
    sums = _sum(filled, filled.rows, one_behind_the_other(features), terms)
    return spmm(filled.spread, matmul_op(sums, filled.ptr, torch.stack([term.matrix for term in terms])))


def _summed(terms: list[Term], numbers: tuple, kept: Kept) -> Tensor:
    """The sums of each destination's edges of each graph, [num_rows * count, F]."""
    features, bases, rows = _joined(terms)

    def make() -> Stack:
        return Stack([Relation(t.graph, base) for t, base in zip(terms, bases, strict=True)], rows)

    stack = kept(("sums", numbers, tuple(bases), rows, terms[0].graph.num_rows), make)
    return _sum(stack, stack.apart, one_behind_the_other(features), terms)


def _joined(terms: list[Term]) -> tuple[list[Tensor], list[int], int]:
    """The distinct features of terms, the row at which those of each term begin when they stand end to end, and how
    many rows there are."""
    places: dict[int, int] = {}
    features, rows = [], 0
    for term in terms:
        if id(term.x) not in places:
            places[id(term.x)] = rows
            features.append(term.x)
            rows += term.x.shape[0]
    return features, [places[id(term.x)] for term in terms], rows


def one_behind_the_other(features: list[Tensor]) -> Tensor:
    return features[0] if len(features) == 1 else torch.cat(features)


def _sum(stack: Stack | Filled, graph: Graph, x: Tensor, terms: list[Term]) -> Tensor:
    """The sum of each row of `graph`, which is one of the stack's."""
    kinds = [term.kind for term in terms]
    one = kinds[0] if len(set(kinds)) == 1 else None
    if type(stack) is Stack and any(term.edge_weight is not None for term in terms):
        weights = [x.new_ones(t.graph.nnz) if t.edge_weight is None else t.edge_weight for t in terms]
        weight = torch.cat(weights)
        if one != "sum":
            weight = weight * stack.factors(kinds, x.dtype, by_id=True)
        return spmm(stack.merged_by_id if graph is stack.merged else stack.apart_by_id, x, weight)
    merged = type(stack) is Stack and graph is stack.merged
    if one == "sum" or (one == "mean" and not merged):
        return spmm(graph, x, reduce=one)
    return spmm(graph, x, stack.factors(kinds, x.dtype))


def _mapped_first(terms: list[Term], numbers: tuple, kept: Kept) -> Tensor:
    by_features: dict[int, list[int]] = {}
    for i, term in enumerate(terms):
        by_features.setdefault(id(term.x), []).append(i)
    relations, mapped, rows = [], [], 0
    outputs = terms[0].outputs
    for group in by_features.values():
        x, matrices = terms[group[0]].x, [terms[i].matrix for i in group]
        y = torch.mm(x, matrices[0] if len(group) == 1 else torch.cat(matrices, dim=1))
        mapped.append(y.view(-1, outputs))  # row u * len(group) + j
        relations += [Relation(terms[i].graph, rows + j, len(group)) for j, i in enumerate(group)]
        rows += x.shape[0] * len(group)
    order = [i for group in by_features.values() for i in group]
    layout = tuple((base, stride) for _, base, stride in relations)
    key = ("maps", tuple(numbers[i] for i in order), layout, rows, terms[0].graph.num_rows)
    stack = kept(key, lambda: Stack(relations, rows))
    return _sum(stack, stack.merged, one_behind_the_other(mapped), [terms[i] for i in order])


def is_profitable(terms: Sequence[Term]) -> bool:
    """False where bringing features end to end copies more than the graphs' own results have, and their edges read;
    and where many edges would have a factor of their own that their graph's layer has none for."""
    features, _, sources = _joined(list(terms))
    rows, edges = terms[0].graph.num_rows * len(terms), sum(term.graph.nnz for term in terms)
    much = edges >= bounds.SCALED_SOURCES_DEGREE * rows and edges * terms[0].x.shape[1] >= bounds.SCALED_SOURCES_NUMBERS
    if much and any(term.kind not in ("sum", "mean") for term in terms):
        return False
    return len(features) == 1 or sources <= rows + edges
