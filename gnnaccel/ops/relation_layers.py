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
from torch.autograd import forward_ad
from torch.nn import functional as F

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import Relation, Stack, below_each_other
from gnnaccel.ops import _arrays, ready
from gnnaccel.ops.linear_sums import Apart
from gnnaccel.ops.relation_sums import Kept, Own, Term, relation_sums
from gnnaccel.ops.spmm import FORMS, spmm

# Multiplications of all maps, up to which the way with the fewest calls is the shortest (EPYC, one thread).
_SMALL = 1 << 24
# Up to which layers on the CPU take less one by one than sums together whose edges have factors.
_TINY = 1 << 22
# Bytes for each destination type whose copy takes a GPU as long as the calls that one node spares (an H200: 0.6 ms).
SPARED = 300 << 20


class Target(NamedTuple):
    """What one destination type gets: arguments of `relation_sums`, whose `kept` is for the graphs of its terms."""

    terms: Sequence[Term]
    kept: Kept
    biases: Sequence[Tensor]
    own: Own | None


def relation_layers(targets: Sequence[Target], kept: Kept) -> list[Tensor] | None:
    """`relation_sums` of each target: on small graphs together, else one after the other. None where the layers that
    these targets stand for take less one by one: nothing has been done then.

    Parameters
    ----------
    targets : sequence of Target
    kept : callable
        As of `relation_sums`, for the graphs of all targets.

    Returns
    -------
    list of Tensor [num_rows of a target, D], or None
    """
    on_cpu = targets[0].terms[0].x.is_cpu
    work = _work(targets) if on_cpu else 0
    few = work <= _SMALL if on_cpu else _bytes(targets) <= SPARED * len(targets)
    if not few or not _alike(targets) or _operators.watched() or forward_ad._current_level >= 0:
        return _composed(targets) if work > _TINY or not on_cpu else None
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
            layout.append((places[id(x)], x.shape, term.kind, term.transposed))
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
    plan = kept(("layers", tuple(layout)), partial(_planned, targets, places, features))
    return list(_layers(plan, targets, *features.values(), *given))


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
        if own is not None and not own.weights:
            return False
        for _, x, _, kind, _, edge_weight in terms:
            if kind not in FORMS or edge_weight is not None or x.dtype != dtype or x.device != device:
                return False
    return True


def _composed(targets: Sequence[Target]) -> list[Tensor]:
    return [relation_sums(terms, kept, biases, own) for terms, kept, biases, own in targets]


class _Walk(NamedTuple):
    """A sum over the edges into all targets whose features have one width.

    features : list of int
        Places of these features, which stand end to end.
    sizes : list of int
        Their rows.
    """

    graph: Graph
    form: ready.Form
    features: list[int]
    sizes: list[int]


class _Part(NamedTuple):
    """The sums of one walk for one target: rows [first, last) of it, `wide` of which are a row of the target's.

    weights : list of (int, bool)
        Places of their maps, and whether these are [D, F].
    owns : list of int
        Places of those of the destinations' own features, whose sum is the last.
    """

    walk: int
    first: int
    last: int
    wide: int
    weights: list[tuple[int, bool]]
    owns: list[int]
    features: frozenset[int]


class _Plan(NamedTuple):
    """Walks, and for each target its parts and the places of its biases, and of all that it is made of (`used`).

    Places are those of the tensors that are given to autograd; the first `features` are features.
    """

    features: int
    walks: list[_Walk]
    targets: list[tuple[list[_Part], list[int]]]
    used: list[list[int]]


def _planned(targets: Sequence[Target], places: dict[int, int], features: dict[int, Tensor]) -> _Plan:
    """The plan of a call; holds no tensor of it."""
    sizes, at = [x.shape[0] for x in features.values()], len(features)
    members: dict[tuple, list[int]] = {}  # the features of a walk
    found: list[tuple[dict[tuple, list], list[int]]] = []
    for terms, _, biases, own in targets:
        parts: dict[tuple, list] = {}  # (graph, place of its features, places of its maps, transposed)
        for term in terms:
            key = term.x.shape[1], term.kind
            parts.setdefault(key, []).append((term.graph, places[id(term.x)], [at], term.transposed))
            at += 1
        if own is not None:
            width, owns = own.x.shape[1], list(range(at, at + len(own.weights)))
            key = next((key for key in parts if key[0] == width), (width, "sum"))
            parts.setdefault(key, []).append((_loops(terms[0].graph), places[id(own.x)], owns, None))
            at += len(owns)
        for key, rows in parts.items():
            walk = members.setdefault(key, [])
            walk += [place for place in dict.fromkeys(row[1] for row in rows) if place not in walk]
        found.append((parts, list(range(at, at + len(biases)))))
        at += len(biases)
    walks, numbers = [], {key: number for number, key in enumerate(members)}
    stacks: dict[tuple, list[Stack]] = {key: [] for key in members}
    plans: list[tuple[list[_Part], list[int]]] = []
    for parts, of_biases in found:
        plans.append(([], of_biases))
        for key, rows in parts.items():
            first = sum([stack.num_rows * stack.count for stack in stacks[key]])
            bases, cols = _bases(members[key], sizes)
            stack = Stack([Relation(graph, bases[place]) for graph, place, _, _ in rows], cols)
            stacks[key].append(stack)
            maps = [(each[0], transposed) for _, _, each, transposed in rows if transposed is not None]
            owns = [place for _, _, each, transposed in rows if transposed is None for place in each]
            last, used = first + stack.num_rows * stack.count, frozenset(row[1] for row in rows)
            plans[-1][0].append(_Part(numbers[key], first, last, stack.count, maps, owns, used))
    for key in numbers:
        graph = below_each_other([stack.apart for stack in stacks[key]])
        walks.append(_Walk(graph, FORMS[key[1]], members[key], [sizes[place] for place in members[key]]))
    return _Plan(len(features), walks, plans, [_all_of(each, of_biases) for each, of_biases in plans])


def _all_of(parts: list[_Part], biases: list[int]) -> list[int]:
    found = list(biases)
    for part in parts:
        found += [*part.features, *[place for place, _ in part.weights], *part.owns]
    return found


def _bases(members: list[int], sizes: list[int]) -> tuple[dict[int, int], int]:
    bases, rows = {}, 0
    for place in members:
        bases[place] = rows
        rows += sizes[place]
    return bases, rows


def _loops(graph: Graph) -> Graph:
    each = torch.arange(graph.num_rows + 1, device=graph.device)
    return Graph(each, each[:-1].clone(), None, graph.num_rows)


class _Layers(torch.autograd.Function):
    """Gradients of a target that nothing was made of are None, as if each had a node of its own."""

    @staticmethod
    def forward(ctx, plan, targets, *given):
        needs = ctx.needs_input_grad[2:]
        sums, calls = [], []
        for walk in plan.walks:
            x = _end_to_end([given[place] for place in walk.features])
            both = any(needs[place] for place in walk.features)
            call = ready.call_of(walk.graph, x, walk.form, None, None, None, both)
            if call is not None:
                sums.append(call.forward(x, None))
            elif both:
                call = Apart(partial(spmm, walk.graph, reduce=walk.form.name), x)
                sums.append(call.result())
            else:
                sums.append(spmm(walk.graph, x, reduce=walk.form.name))
            calls.append(call if both else None)
        outs = []
        for parts, biases in plan.targets:
            out = _added([given[place] for place in biases])
            for part in parts:
                rows, maps = _rows(sums[part.walk], part), _side_by_side(given, part)
                fits = out is None or out.dim() == 1
                out = F.linear(rows, maps, out) if fits else torch.addmm(out, rows, maps.t())
            outs.append(out)
        if True in needs:
            ctx.set_materialize_grads(False)
            if False in needs:
                pairs = zip(outs, plan.used, strict=True)
                ctx.mark_non_differentiable(*[out for out, used in pairs if not any(needs[p] for p in used)])
            ctx.plan, ctx.calls, ctx.count, ctx.targets = plan, calls, len(sums), targets
            # Those that no first derivative reads may be written into.
            ctx.features = [(x, None if x.is_inference() else x._version) for x in given[: plan.features]]
            ctx.save_for_backward(*sums, *given[plan.features :])
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        plan, needs = ctx.plan, ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors
        sums, given = saved[: ctx.count], (*[None] * plan.features, *saved[ctx.count :])
        if torch.is_grad_enabled() or not _operators.usual(*[grad for grad in grads if grad is not None]):
            return None, None, *_second(ctx, grads)
        found: list[Tensor | None] = [None] * len(needs)
        grads = [grad if grad is None else grad.contiguous() for grad in grads]
        rows = [None if call is None else torch.empty_like(each) for call, each in zip(ctx.calls, sums, strict=True)]
        reached: set[int] = set()
        for grad, (parts, biases) in zip(grads, plan.targets, strict=True):
            for part in parts:
                of_rows = rows[part.walk]
                if of_rows is not None and grad is None:
                    of_rows[part.first : part.last].zero_()
                elif of_rows is not None:
                    torch.mm(grad, _side_by_side(given, part), out=_rows(of_rows, part))
                    reached |= part.features
            if grad is None:
                continue
            transposed = grad.t()
            for part in parts:
                of_maps = [*[place for place, _ in part.weights], *part.owns]
                if not any(needs[place] for place in of_maps):
                    continue
                products = transposed.mm(_rows(sums[part.walk], part)).chunk(part.wide, dim=1)
                for (place, flag), product in zip(part.weights, products, strict=False):
                    found[place] = product if flag else product.t()
                for place in part.owns:
                    found[place] = products[-1]
            if biases:
                total = grad.sum(0)
                for place in biases:
                    found[place] = total
        for walk, call, of_rows in zip(plan.walks, ctx.calls, rows, strict=True):
            if call is None:
                continue
            whole = call.gradient(of_rows)
            parts = (whole,) if len(walk.sizes) == 1 else torch.split_with_sizes(whole, walk.sizes)
            for place, each in zip(walk.features, parts, strict=True):
                if place in reached:
                    found[place] = each if found[place] is None else found[place] + each
        if not _keeps_graph():
            ctx.features = ctx.targets = ctx.calls = None  # as autograd drops what is saved
        return None, None, *[grad if need else None for grad, need in zip(found, needs, strict=True)]


# Whether autograd is to keep what the graph saved, for another backward (torch 2.4 does not say).
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_layers = super(torch.autograd.Function, _Layers).apply  # type: ignore[misc]


def _second(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    """Gradients with derivatives of their own, those of each target's sums."""
    if any(version is not None and x._version != version for x, version in ctx.features):
        raise RuntimeError(
            "features of several edge types were written into after the forward pass, and are needed for a second "
            "derivative: write into a copy of them"
        )
    given = [x for x, _ in ctx.features] + list(ctx.saved_tensors[ctx.count :])
    reached = [grad is not None for grad in grads]

    def composed(*given):
        targets = _with(ctx.targets, given, len(ctx.features))
        return tuple([_by_terms(target) for target, reaches in zip(targets, reached, strict=True) if reaches])

    return _arrays.gradients(composed, given, ctx.needs_input_grad[2:], tuple([g for g in grads if g is not None]))


def _by_terms(target: Target) -> Tensor:
    terms, _, biases, own = target
    parts = [spmm(term.graph, term.x, reduce=term.kind) @ term.matrix for term in terms]
    parts += [] if own is None else [F.linear(own.x, weight) for weight in own.weights]
    return sum([*parts[1:], *biases], start=parts[0])


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


def _end_to_end(features: list[Tensor]) -> Tensor:
    return features[0] if len(features) == 1 else torch.cat(features)


def _rows(sums: Tensor, part: _Part) -> Tensor:
    """The sums of a part side by side, [rows of the target, count * F]."""
    return sums[part.first : part.last].view(-1, part.wide * sums.shape[1])


def _side_by_side(given: Sequence[Any], part: _Part) -> Tensor:
    """[D, count * F] of maps [D, F], or [F, D]."""
    maps = [given[place] if transposed else given[place].t() for place, transposed in part.weights]
    if part.owns:
        maps.append(_added([given[place] for place in part.owns]))
    return maps[0] if len(maps) == 1 else torch.cat(maps, dim=1)


def _added(parameters: list[Tensor]) -> Tensor | Any:
    if len(parameters) < 2:
        return parameters[0] if parameters else None
    return parameters[0] + parameters[1] if len(parameters) == 2 else torch.stack(parameters).sum(0)
