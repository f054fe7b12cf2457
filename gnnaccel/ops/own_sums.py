"""The sums of several layers over graphs of their own, each with a multiple of the rows' own features (GIN), as one
walk: the rows of all layers below each other, over the features of all end to end, with an edge more for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops.linear_sums import sums_of
from gnnaccel.ops.spmm import spmm


class OwnSum(NamedTuple):
    """spmm(graph, x) + (1 + eps) * own.

    graph : Graph
        Where layers are taken one after the other, of no edges, an EdgeList too.
    x : Tensor [num_cols, F]
    own : Tensor [num_rows, F]
    eps : Tensor of one number
        A constant.
    """

    graph: Graph
    x: Tensor
    own: Tensor
    eps: Tensor


class _Plan(NamedTuple):
    """`code` has for each edge which of (1, 1 + eps of each layer) is its factor; `rows` are those of each layer,
    `sizes` those of each tensor of features, and `used` the places of these for each layer."""

    graph: Graph
    code: Tensor
    rows: list[int]
    sizes: list[int]
    used: list[set[int]]


def is_profitable(layers: Sequence[OwnSum]) -> bool:
    """True if these layers take less together: what is copied, the features of all, is less than the calls spared."""
    each = {id(x): x for layer in layers for x in (layer.x, layer.own)}
    copied = sum([x.numel() * x.element_size() for x in each.values()])
    return len(layers) > 1 and copied <= bounds.ONE_NODE_BYTES * len(layers)


def own_sums(layers: Sequence[OwnSum], kept: Callable, each: bool = False) -> list[Tensor]:
    """What each layer is.

    Parameters
    ----------
    layers : sequence of OwnSum
        Of one width, floating dtype and device.
    kept : callable
        kept(key, make) returns what make() has made for these graphs and this key before, or makes it.
    each : bool
        For graphs that may be gone after this call: one after the other, in one node of autograd.

    Returns
    -------
    list of Tensor [num_rows of a layer, F]
    """
    features: dict[int, Tensor] = {}
    for _, x, own, _ in layers:
        features[id(x)], features[id(own)] = x, own
    places = {number: place for place, number in enumerate(features)}
    sizes = [x.shape[0] for x in features.values()]
    ends = [(places[id(x)], places[id(own)]) for _, x, own, _ in layers]
    if each:
        constants = [1 + float(layer.eps) for layer in layers]
        return list(_each([layer.graph for layer in layers], ends, constants, *features.values()))
    plan = kept(("own", tuple(ends), tuple(sizes)), partial(_planned, [layer.graph for layer in layers], ends, sizes))
    with torch.no_grad():
        scales = torch.cat([layers[0].eps.new_zeros(1), *[layer.eps.view(1) for layer in layers]]).add_(1)
        weight = scales.index_select(0, plan.code)
    return list(_OwnSums.apply(plan, weight, *features.values()))


def _planned(graphs: list[Graph], ends: list[tuple[int, int]], sizes: list[int]) -> _Plan:
    device, bases = graphs[0].device, [sum(sizes[:place]) for place in range(len(sizes))]
    with torch.inference_mode(False), torch.no_grad():
        pointers, columns, codes, before = [torch.zeros(1, dtype=torch.int64, device=device)], [], [], 0
        for number, (graph, (source, own)) in enumerate(zip(graphs, ends, strict=True)):
            each = torch.arange(graph.num_rows, device=device)
            indptr = graph.indptr.long()
            rows = torch.repeat_interleave(each, indptr.diff(), output_size=graph.nnz)
            places = rows + torch.arange(graph.nnz, device=device)  # behind the loop of each row before
            loops = indptr[1:] + each
            found = torch.empty(graph.nnz + graph.num_rows, dtype=torch.int64, device=device)
            found[places], found[loops] = graph.indices.long() + bases[source], each + bases[own]
            code = torch.zeros_like(found)
            code[loops] = number + 1
            pointers.append(loops + 1 + before)
            columns.append(found)
            codes.append(code)
            before += found.numel()
        dtype = torch.int32 if max(before, sum(sizes)) <= bounds.INT32_MAX else torch.int64
        whole = Graph(torch.cat(pointers).to(dtype), torch.cat(columns).to(dtype), None, sum(sizes))
        return _Plan(whole, torch.cat(codes), [graph.num_rows for graph in graphs], sizes, [set(pair) for pair in ends])


class _OwnSums(_operators.Function):
    """Gradients of features of which nothing was made are None, as if each layer had a node of its own."""

    @staticmethod
    def forward(ctx, plan, weight, *features):
        out = spmm(plan.graph, features[0] if len(features) == 1 else torch.cat(features), weight)
        outs = torch.unsafe_split_with_sizes(out, plan.rows)
        needs = ctx.needs_input_grad[2:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[out for out, used in zip(outs, plan.used, strict=True) if not any(needs[place] for place in used)]
        )
        ctx.plan, ctx.width = plan, out.shape[1]
        ctx.save_for_backward(weight)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        (weight,), plan, needs = ctx.saved_tensors, ctx.plan, ctx.needs_input_grad[2:]
        like: Any = next((grad for grad in grads if grad is not None), None)
        if like is None:
            return (None,) * (len(needs) + 2)
        pairs = zip(grads, plan.rows, strict=True)
        rows = torch.cat([like.new_zeros(size, ctx.width) if grad is None else grad for grad, size in pairs])
        parts = spmm(plan.graph.transposed, rows, weight).split(plan.sizes)  # with derivatives of its own
        pairs = zip(plan.used, grads, strict=True)
        led = {place for used, grad in pairs if grad is not None for place in used}
        found = [part if need and n in led else None for n, (part, need) in enumerate(zip(parts, needs, strict=True))]
        return None, None, *found


class _OwnEach(_operators.Function):
    """Gradients as of `_OwnSums`."""

    @staticmethod
    def forward(ctx, graphs, ends, constants, *features):
        needs, calls, outs = ctx.needs_input_grad[3:], [], []
        for graph, (source, own), constant in zip(graphs, ends, constants, strict=True):
            if not graph.nnz:
                outs.append(features[own] * constant)
                calls.append(None)
                continue
            call, sums = sums_of(graph, features[source], "sum", needs[source])
            outs.append(sums.add_(features[own], alpha=constant))
            calls.append(call)
        if True in needs:
            ctx.set_materialize_grads(False)
            if False in needs:
                pairs = zip(outs, ends, strict=True)
                ctx.mark_non_differentiable(*[out for out, both in pairs if not any(needs[place] for place in both)])
            ctx.calls, ctx.ends, ctx.constants, ctx.sizes = calls, ends, constants, [x.shape for x in features]
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad[3:]
        found: list[Tensor | None] = [None] * len(needs)
        without = set()  # sources of no edge of some layer
        for call, (source, own), constant, grad in zip(ctx.calls, ctx.ends, ctx.constants, grads, strict=True):
            if grad is None:
                continue
            grad = grad.contiguous()
            if needs[own]:
                part = grad if constant == 1 else grad * constant
                found[own] = part if found[own] is None else found[own] + part
            if needs[source] and call is None:
                without.add(source)
            elif needs[source]:
                part = call.gradient(grad)
                found[source] = part if found[source] is None else found[source] + part
        for place in without:
            if found[place] is None:
                like = next(grad for grad in grads if grad is not None)
                found[place] = like.new_zeros(ctx.sizes[place])
        return None, None, None, *found


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_each = super(torch.autograd.Function, _OwnEach).apply  # type: ignore[misc]
