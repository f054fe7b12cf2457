"""What layers of many edge types do on a small graph, as one node of autograd: a walk for each width of features, and a
product for each destination type. On such a graph each function that autograd records takes as long as its kernel.

The destinations' own features are one sum more, over loops, beside those of their edge types: all that is mapped for a
destination then stands side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators, touch
from gnnaccel.graph.stack import EdgeList, graph_of
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays, ready, relation_each, relation_rows
from gnnaccel.ops.linear_sums import Apart
from gnnaccel.ops.relation_plans import Plan, Walk, planned
from gnnaccel.ops.relation_products import (
    Group,
    added,
    below,
    columns,
    matrix,
    of_maps,
    of_sums,
    products,
)
from gnnaccel.ops.relation_sums import Kept, Own, Term, one_behind_the_other, relation_sums, term_by_term
from gnnaccel.ops.spmm import FORMS, spmm


class Target(NamedTuple):
    """What one destination type gets: arguments of `relation_sums`, whose `kept` is for the graphs of its terms."""

    terms: Sequence[Term]
    kept: Kept
    biases: Sequence[Tensor]
    own: Own | None


def target_of(
    terms: Sequence[Term], kept: Kept, biases: Sequence[Tensor | None], x: Tensor, weights: Sequence[Tensor | None]
) -> Target:
    """The Target of layers with the biases and the maps of its own features x that they have."""
    some = [weight for weight in weights if weight is not None]
    return Target(terms, kept, [bias for bias in biases if bias is not None], Own(x, some) if some else None)


def relation_layers(targets: Sequence[Target], kept: Kept, each: bool = False) -> list[Tensor] | None:
    """`relation_sums` of each target: on small graphs together, else one after the other. None where the layers that
    these targets stand for take less one by one: nothing has been done then.

    Parameters
    ----------
    targets : sequence of Target
        Of graphs, or all of edge lists: graphs that are new and may be gone after this call.
    kept : callable
        As of `relation_sums`, for the graphs of all targets.
    each : bool
        For graphs that may be gone after this call, and weights [D, F]: term by term (relation_each.py), of terms that
        are sums and means of edges without weights.

    Returns
    -------
    list of Tensor [num_rows of a target, D], or None
    """
    if each:
        if not _alike(targets) or touch.watched() or touch.in_forward_mode():
            return None
        return list(_layers(*_each(targets)))
    on_cpu, new = targets[0].terms[0].x.is_cpu, _are_new(targets)
    work = _work(targets) if on_cpu else 0
    few = (
        work <= bounds.RELATION_LAYERS_WORK
        if on_cpu
        else _bytes(targets) <= bounds.ONE_NODE_BYTES * len(targets) or (not new and relation_rows.pay(targets))
    )
    if not few or not _alike(targets) or touch.watched() or touch.in_forward_mode():
        if new:
            return None
        return _composed(targets) if work > bounds.RELATION_LAYERS_TINY or not on_cpu else None
    features: dict[int, Tensor] = {}
    places: dict[int, int] = {}
    layout: list[tuple] = []
    given: list[Tensor] = []
    for terms, _, biases, own in targets:
        for term in terms:
            x = term.x
            if id(x) not in places:
                places[id(x)] = len(features)
                features[id(x)] = x
            weighted = term.edge_weight is not None
            layout.append((places[id(x)], x.shape, term.outputs, term.kind, term.transposed, weighted, x.dtype))
            given.append(term.weight)
        if own is not None:
            x = own.x
            if id(x) not in places:
                places[id(x)] = len(features)
                features[id(x)] = x
            layout.append((places[id(x)], x.shape, len(own.weights)))
            given += own.weights
        layout.append((terms[0].graph.num_rows, len(biases)))
        given += biases
    plan = kept(("layers", tuple(layout)), partial(_plan_of, targets, places, features, kept))
    if plan is None:
        return None  # for an index out of range
    return list(_layers(plan, targets, *features.values(), *given))


def _each(targets: Sequence[Target]) -> tuple:
    plan, given = relation_each.planned(targets)
    return plan, targets, *given


def _are_new(targets: Sequence[Target]) -> bool:
    return type(targets[0].terms[0].graph) is EdgeList


def _work(targets: Sequence[Target]) -> int:
    """Multiplications of the maps."""
    work = 0
    for terms, _, _, _ in targets:
        work += terms[0].graph.num_rows * terms[0].outputs * sum([term.x.shape[1] for term in terms])
    return work


def _bytes(targets: Sequence[Target]) -> int:
    """What one node copies, and `relation_sums` does not: features end to end, and rows without edges."""
    features: dict[int, int] = {}
    spent = 0
    for terms, _, _, _ in targets:
        for graph, x, *_ in terms:
            width = x.shape[1] * x.element_size()
            features[id(x)] = x.shape[0] * width
            spent += max(graph.num_rows - graph.nnz, 0) * width
    return spent + sum(features.values())


def _alike(targets: Sequence[Target]) -> bool:
    """True if one node of autograd does all of it."""
    first = targets[0].terms[0].x
    dtype, device = first.dtype, first.device
    for terms, _, _, own in targets:
        if (own is not None and not (own.weights and own.x.shape[1])) or not terms[0].outputs:
            return False
        for _, x, _, _, _, edge_weight in terms:
            if not x.shape[1] or x.dtype != dtype or x.device != device:
                return False
            if edge_weight is not None and _is_recorded(edge_weight):
                return False
    return True


def _is_recorded(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _composed(targets: Sequence[Target]) -> list[Tensor]:
    return [relation_sums(terms, kept, biases, own) for terms, kept, biases, own in targets]


def _plan_of(targets: Sequence[Target], places: dict[int, int], features: dict[int, Tensor], kept: Kept) -> Any:
    if not targets[0].terms[0].x.is_cpu and not _are_new(targets) and relation_rows.pay(targets):
        return relation_rows.planned(targets, places, features)
    return planned(targets, places, features, kept)


def _weight_of(walk: Walk, targets: Sequence[Target]) -> Tensor | None:
    """The factor of each edge of a walk."""
    if walk.reduce != "weighted":
        return walk.weight
    parts: list[Any] = [w if isinstance(w, Tensor) else targets[w[0]].terms[w[1]].edge_weight for w in walk.given]
    whole = torch.cat(parts)
    return whole if walk.weight is None else whole.mul_(walk.weight)


def _sum_of(walk: Walk, weight: Tensor | None, x: Tensor) -> Tensor:
    return spmm(walk.graph, x, weight, reduce="sum" if weight is not None else walk.reduce)


class _Layers(_operators.Function):
    """Gradients of a target that nothing was made of are None, as if each had a node of its own."""

    @staticmethod
    def forward(ctx, plan, targets, *given):
        needs = ctx.needs_input_grad[2:]
        if type(plan) is relation_each.EachPlan:
            outs, kept, calls = relation_each.results(plan, given, needs)
        elif type(plan) is relation_rows.RowsPlan:
            outs, kept, calls = relation_rows.results(plan, given)
        else:
            outs, kept, calls = _results(plan, targets, given, needs)
        if True in needs:
            ctx.set_materialize_grads(False)
            if False in needs:
                pairs = zip(outs, plan.used, strict=True)
                ctx.mark_non_differentiable(*[out for out, used in pairs if not any(needs[p] for p in used)])
            ctx.plan, ctx.calls, ctx.targets = plan, calls, targets
            # Those that no first derivative reads may be written into; to save them would take as long as a kernel.
            weights = [term.edge_weight for terms, *_ in targets for term in terms if term.edge_weight is not None]
            ctx.given, ctx.weights = given, weights
            ctx.versions = [_version(x) for x in (*given, *weights)]
            ctx.save_for_backward(*kept)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        plan, needs = ctx.plan, ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return None, None, *_second(ctx, grads)
        if all(grad is None for grad in grads):
            return (None,) * (len(needs) + 2)
        if type(plan) is relation_each.EachPlan:
            found = relation_each.gradients(plan, ctx.calls, saved, ctx.given, grads, needs)
        elif type(plan) is relation_rows.RowsPlan:
            found = relation_rows.gradients(plan, saved, grads, needs)
        else:
            found = _gradients(plan, ctx.calls, saved, grads, needs)
        if None in grads:
            _clear(found, plan, grads)
        if not touch.keeps_graph(unknown=True):
            ctx.given = ctx.weights = ctx.targets = ctx.calls = None  # as autograd drops what is saved
        if False in needs:
            found = [grad if need else None for grad, need in zip(found, needs, strict=True)]
        return None, None, *found


def _results(plan: Plan, targets: Sequence[Target], given: Sequence[Any], needs: Sequence[bool]) -> tuple:
    """Of each target; sums and maps, which the gradients are made of; and for each walk what has its gradient, or
    None."""
    sums: list[Tensor] = []
    calls: list[Any] = []
    for walk in plan.walks:
        x = one_behind_the_other([given[place] for place in walk.features])
        both = any(needs[place] for place in walk.features)
        call: Any = None
        weight = _weight_of(walk, targets)
        if weight is None:
            call = ready.call_of(walk.graph, x, FORMS[walk.reduce], None, None, None, both)
        if call is not None:
            sums.append(call.forward(x, None))
        elif both:
            call = Apart(partial(_sum_of, walk, weight), x)
            sums.append(call.result())
        else:
            sums.append(_sum_of(walk, weight, x))
        calls.append(call if both else None)
    maps = [matrix(each.group, given) for each in plan.products]
    outs: list[Any] = [None] * len(plan.biases)
    for (at, first, last, group), whole in zip(plan.products, maps, strict=True):
        made = products(group, sums[at][first:last].view(-1, whole.shape[2]), whole)
        if plan.adding is not None:
            _add_biases(plan, group, made, given)
        for number, part in zip(group.targets, torch.unsafe_split_with_sizes(made, group.sizes), strict=True):
            outs[number] = part if outs[number] is None else outs[number].add_(part)
    if plan.adding is None:
        for out, biases in zip(outs, plan.biases, strict=True):
            if biases:
                out.add_(relation_each.added([given[place] for place in biases]))
    return outs, (*sums, *maps), calls


def _gradients(plan: Plan, calls: Sequence, saved: Sequence[Tensor], grads: Sequence, needs: Sequence[bool]) -> list:
    """Of all that was given, as far as needed."""
    sums, maps = saved[: len(plan.walks)], saved[len(plan.walks) :]
    found: list[Tensor | None] = [None] * len(needs)
    all_needed, like = False not in needs, next(grad for grad in grads if grad is not None)
    rows: list[list[Tensor]] = [[] for _ in plan.walks]
    for (at, first, last, group), whole in zip(plan.products, maps, strict=True):
        grad = below([grads[number] for number in group.targets], group.sizes, like, whole.shape[1])
        if calls[at] is not None:
            rows[at].append(of_sums(group, grad, whole).view(last - first, whole.shape[2] // group.wide))
        if all_needed or any(needs[each.place] for each in group.maps):
            parts = of_maps(group, grad, sums[at][first:last].view(-1, whole.shape[2]))
            for place, transposed, slot in group.maps:
                found[place] = parts[slot] if transposed else parts[slot].t()
        if plan.adding is not None:
            for number, total in zip(group.targets, columns(group.sizes, grad), strict=True):
                for place in plan.biases[number]:
                    found[place] = total
    if plan.adding is None:
        for grad, biases in zip(grads, plan.biases, strict=True):
            if biases and grad is not None:
                found[biases[0] : biases[-1] + 1] = [grad.sum(0)] * len(biases)
    for walk, call, grads_of in zip(plan.walks, calls, rows, strict=True):
        if call is None:
            continue
        whole = call.gradient(grads_of[0] if len(grads_of) == 1 else torch.cat(grads_of))
        each = (whole,) if len(walk.sizes) == 1 else torch.split_with_sizes(whole, walk.sizes)
        for place, part in zip(walk.features, each, strict=True):
            found[place] = part if found[place] is None else found[place] + part
    return found


def _add_biases(plan: Plan, group: Group, made: Tensor, given: Sequence[Any]) -> None:
    """Add to the results of all targets what their biases add up to."""
    parameters = [given[place] for number in group.targets for place in plan.biases[number]]
    total = added(plan.adding, torch.cat(parameters).view(len(parameters), -1))  # type: ignore[arg-type]
    if group.rows_alike:
        made.view(len(group.sizes), group.sizes[0], made.shape[1]).add_(total.unsqueeze(1))
        return
    for part, bias in zip(made.split(group.sizes), total.unbind(), strict=True):
        part.add_(bias)


def _clear(found: list, plan: Plan, grads: Sequence[Tensor | None]) -> None:
    """None in place of the gradients that nothing has led to."""
    led = {place for used, grad in zip(plan.used, grads, strict=True) if grad is not None for place in used}
    for place in range(len(found)):
        if place not in led:
            found[place] = None


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_layers = super(torch.autograd.Function, _Layers).apply  # type: ignore[misc]


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _second(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    """Gradients with derivatives of their own, those of each target's sums."""
    given, count = ctx.given, ctx.plan.features
    pairs = zip((*given, *ctx.weights), ctx.versions, strict=True)
    if any(version is not None and x._version != version for x, version in pairs):
        raise RuntimeError(
            "features of several edge types, weights of their edges, or parameters of their layers, were written into "
            "after the forward pass, and are needed for a second derivative: write into a copy of them"
        )
    reached = [grad is not None for grad in grads]

    def composed(*given):
        targets = _with(ctx.targets, given, count)
        targets = [
            target._replace(terms=[term._replace(graph=graph_of(term.graph)) for term in target.terms])
            for target in targets
        ]
        pairs = zip(targets, reached, strict=True)
        return tuple([term_by_term(terms, biases, own) for (terms, _, biases, own), reaches in pairs if reaches])

    cotangents = tuple([grad for grad in grads if grad is not None])
    found = list(_arrays.gradients(composed, given, ctx.needs_input_grad[2:], cotangents))
    _clear(found, ctx.plan, grads)
    return tuple(found)


def _with(targets: Sequence[Target], given: Sequence[Tensor], count: int) -> list[Target]:
    """The targets with other tensors, the first `count` of which are the features."""
    rest = iter(given[count:])
    features: dict[int, Tensor] = {}

    def new(x: Tensor) -> Tensor:
        return features.setdefault(id(x), given[len(features)])

    found = []
    for terms, kept, biases, own in targets:
        terms = [term._replace(x=new(term.x), weight=next(rest)) for term in terms]
        own = None if own is None else Own(new(own.x), [next(rest) for _ in own.weights])
        found.append(Target(terms, kept, [next(rest) for _ in biases], own))
    return found
