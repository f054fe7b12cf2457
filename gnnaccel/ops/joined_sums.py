"""Layers whose messages are elementwise functions of linear maps, as one node of autograd on CUDA.

The maps of one matrix of features are one product, whose columns kernels read where they lie. The forward pass is one
walk over the edges: it reduces messages, adds what a node has of its own, and leaves the sums over the edges of a
destination that its gradient is to be multiplied by. The backward pass is one walk over the reversed edges, which
writes the gradients to all maps side by side, in place of what these gave where nobody needs it any more, and two
products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators, report, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.modes import are_hooked
from gnnaccel.ops import _arrays, products
from gnnaccel.ops._arrays import Structure, arrays_of
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops.messages import Expression, c, e, generated, is_fused, message_reduce, relu, sigmoid, u, v
from gnnaccel.ops.messages.joined import Forms, Walk, plan_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
WRITTEN = (
    "weights or biases of a layer were written into after the forward pass, and are needed for a second derivative or "
    "a batch of gradients: write into them after the backward pass"
)


class Parts(NamedTuple):
    """A message, and where its operands lie.

    reduce : "sum" or "mean".
    names : of the parts of the joined features, as u and v of `message` and v of `own` have them; e("edge") and
        c("eps") are operands of their own.
    own : what is added to the sums for each node, or None.
    own_of : the same by torch's functions, of a mapping of names.
    """

    message: Expression
    reduce: str
    names: tuple[str, ...]
    own: Expression | None = None
    own_of: Callable[[dict[str, Tensor]], Tensor] | None = None


_GATED = sigmoid(u("q") + v("k")) * u("x")
GATED = Parts(_GATED, "sum", ("k", "q", "x"))
GATED_SKIP = Parts(_GATED, "sum", ("k", "q", "x", "skip"), v("skip"), lambda given: given["skip"])
FILM = Parts(
    relu(v("gamma") * u("x") + v("beta")),
    "mean",
    ("own_beta", "own_gamma", "own", "beta", "gamma", "x"),
    relu(v("own_gamma") * v("own") + v("own_beta")),
    lambda given: (given["own_gamma"] * given["own"] + given["own_beta"]).relu(),
)
LE = Parts(u("a") - v("b"), "sum", ("a", "b", "own"), v("own"), lambda given: given["own"])
GINE = Parts(
    relu(u("x") + e("edge")), "sum", ("x",), v("x") * (1.0 + c("eps")), lambda given: (1 + given["eps"]) * given["x"]
)


@functools.lru_cache(maxsize=64)
def gen(eps: float, of_edges: bool) -> Parts:
    """GENConv's sums."""
    message = relu(u("x") + e("edge") if of_edges else u("x")) + eps
    return Parts(message, "sum", ("x",), v("x"), lambda given: given["x"])


def joined_sum(
    graph: Graph,
    x: Tensor,
    maps: Sequence[tuple[Tensor, Tensor | None]],
    num_feats: int,
    form: Parts,
    edge: Tensor | None = None,
    eps: Tensor | None = None,
) -> Tensor | None:
    """out[v] = the sum or mean of the form's message over the edges, and what it adds, of linear maps of x.

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    x : Tensor [num_rows, F]
        float32, float64, bfloat16.
    maps : sequence of (Tensor, Tensor or None)
        Weights [D, F] and biases [D] that give the form's parts one after another, D a multiple of num_feats; none
        where x is the only part.
    num_feats : int
    form : Parts
    edge : Tensor [nnz, num_feats], optional
        In edge-id order.
    eps : Tensor of one number, optional
        A constant.

    Returns
    -------
    Tensor [num_rows, num_feats], or None where the ops are to be called one by one: nothing has been done then.
    """
    parameters = [p for pair in maps for p in pair]
    if not x.is_cuda or x.dtype not in DTYPES or not is_fused(graph) or not fits(graph, x, num_feats, edge, eps):
        return None
    if not are_maps(x, maps, num_feats, form):
        return None
    given = [t for t in (x, edge, eps, *parameters) if t is not None]
    if not _operators.usual(*given):
        return None
    for t in given:
        if t.dtype != x.dtype or t.device != graph.device:
            return None
    if torch.is_grad_enabled() and eps is not None and eps.requires_grad:
        return None
    if report.timing:
        report.message(f"{form.reduce} of {form.message}")
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    both = keep and any(t is not edge and t.requires_grad for t in given)
    row = x if x.shape[1] == num_feats else x.new_empty((0, num_feats))
    arrays = arrays_of(graph, both, row)
    again = partial(composed, graph, form, num_feats)
    return _joined(arrays, again, form, num_feats, keep, x, edge, eps, *parameters)


def fits(graph: Graph, x: Tensor, num_feats: int, edge: Tensor | None = None, eps: Tensor | None = None) -> bool:
    """True for operands of the right shapes, whose rows lie one behind another."""
    if x.dim() != 2 or not x.is_contiguous() or not x.shape[0] == graph.num_rows == graph.num_cols:
        return False
    if edge is not None and (edge.shape != (graph.nnz, num_feats) or not edge.is_contiguous()):
        return False
    return num_feats > 0 and graph.nnz > 0 and (eps is None or eps.numel() == 1)


def are_maps(x: Tensor, maps: Sequence[tuple[Tensor, Tensor | None]], num_feats: int, form: Parts) -> bool:
    """True if they give all parts of the form and no more: kernels read these unseen."""
    width = 0 if maps else x.shape[1]
    for weight, bias in maps:
        if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.shape[0] % num_feats:
            return False
        if bias is not None and bias.shape != weight.shape[:1]:
            return False
        width += weight.shape[0]
    return width == len(form.names) * num_feats


def composed(graph: Graph, form: Parts, num_feats: int, x: Tensor, edge, eps, *parameters) -> Tensor:
    """The same by ops that can be differentiated again."""
    pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
    parts = [part for pair in pairs for part in F.linear(x, *pair).split(num_feats, 1)] if pairs else [x]
    given = dict(zip(form.names, parts, strict=True))
    if edge is not None:
        given["edge"] = edge
    operands = {name: given[name] for kind, name in form.message.leaves if kind != "c"}
    out = message_reduce(graph, form.message, operands, form.reduce)
    if form.own_of is None:
        return out
    return out + form.own_of({**given, "eps": eps})


_Rows = tuple[int, int, torch.dtype]  # address, numbers from row to row, dtype


def _rows(x: Tensor) -> _Rows:
    return x.data_ptr(), x.stride(0) if x.dim() else 0, x.dtype


def _operands(form: Parts, joined: Tensor, num_feats: int, edge: Tensor | None, eps: Tensor | None) -> dict[str, _Rows]:
    """Of a walk, by name."""
    named = _parts(form.names, joined, num_feats)
    if edge is not None:
        named["edge"] = _rows(edge)
    if eps is not None:
        named["eps"] = (eps.data_ptr(), 0, eps.dtype)
    return named


def _parts(names: tuple[str, ...], joined: Tensor, num_feats: int) -> dict[str, _Rows]:
    """The parts of `joined` by name; as tensors they would take the host longer than a walk of a small graph."""
    address, step, dtype = _rows(joined)
    size = num_feats * joined.element_size()
    return {name: (address + i * size, step, dtype) for i, name in enumerate(names)}


def _start(arrays: Structure, walk: Walk, named: dict[str, _Rows], outs: list[_Rows], together: int) -> None:
    """A walk of operands by name. together : what rows of parts lie apart, in bytes."""
    program, operands = walk
    rows = [*(named[name] for name in operands), *outs]
    addresses = [row[0] for row in rows]
    for address in addresses:
        together |= address
    generated.start(arrays, program, tuple(row[2] for row in rows), tuple(row[1] for row in rows), together, addresses)


class _Joined(_operators.Function):
    @staticmethod
    def forward(ctx, arrays: Structure, again, form: Parts, num_feats, keep, x, edge, eps, *parameters):
        weights, biases = parameters[::2], parameters[1::2]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights) if weights else None
        joined = x if weight is None else products.linear(x, weight, _shift(x, weights, biases))
        plan = plan_of(Forms(form.message, form.reduce, form.own, form.names), num_feats, keep)
        named = _operands(form, joined, num_feats, edge, eps)
        out = x.new_empty((x.shape[0], num_feats))
        kept = [x.new_empty((x.shape[0], num_feats), dtype=wide(x)) for _ in plan.kept]
        _start(arrays, plan.forward, named, [_rows(out), *map(_rows, kept)], joined.stride(0) * joined.element_size())
        if keep:
            ctx.arrays, ctx.again, ctx.form, ctx.num_feats, ctx.plan = arrays, again, form, num_feats, plan
            parts = joined if joined is not x and plan.reads_parts else None
            # Parameters that no first derivative reads may be written into.
            ctx.parameters, ctx.versions, ctx.hooked = parameters, versions(parameters), are_hooked()
            ctx.save_for_backward(x, edge, eps, parts, weight if ctx.needs_input_grad[5] else None, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        plan, form, num_feats, parameters = ctx.plan, ctx.form, ctx.num_feats, ctx.parameters
        x, edge, eps, joined, weight, *kept = ctx.saved_tensors
        of_x, of_edge, _, *of_parameters = ctx.needs_input_grad[5:]
        if torch.is_grad_enabled() or not _operators.usual(grad):
            if versions(parameters) != ctx.versions:
                raise RuntimeError(WRITTEN)
            wanted = (of_x, of_edge, False, *of_parameters)
            return *(None,) * 5, *_arrays.gradients(ctx.again, (x, edge, eps, *parameters), wanted, grad)
        grad = grad.contiguous()
        tensors = {"grad": grad, **dict(zip(plan.kept, kept, strict=True))}
        if plan.reads_degrees:
            tensors["degrees"] = degrees(ctx.arrays, grad, least=0)
        if form.reduce == "mean":
            tensors["scaled"] = grad / degrees(ctx.arrays, grad, least=1)
        if joined is None:
            joined = x  # the only part, or no operand
        named = _operands(form, joined, num_feats, edge, eps)
        named |= {name: _rows(tensor) for name, tensor in tensors.items()}
        together = joined.stride(0) * joined.element_size()
        of_edges = None
        if of_edge:
            all_are_edges = ctx.arrays.indices.shape[0] == edge.shape[0]
            of_edges = torch.empty_like(edge) if all_are_edges else torch.zeros_like(edge)
            _start(ctx.arrays, plan.of_edge, named, [_rows(of_edges)], together)
        if not of_x and not any(of_parameters):
            return *(None,) * 6, of_edges, None, *(None,) * len(parameters)
        is_last = not ctx.hooked and not touch.keeps_graph(unknown=True)  # nobody reads again what was saved
        walk, own = plan.of_parts, joined is not x and plan.in_place is not None and is_last
        if own:
            walk = plan.in_place
        elif of_edges is not None and plan.by_edge is not None and x.dtype != torch.bfloat16:  # not of rounded rows
            walk, named["of edge"] = plan.by_edge, _rows(of_edges)
        found = joined if own else x.new_empty((x.shape[0], len(form.names) * num_feats))
        into = _parts(form.names, found, num_feats)
        together |= found.stride(0) * found.element_size()
        after = plan.after if own else ()
        for name, _ in after:
            del into[name]
        _start(ctx.arrays.transposed(), walk, named, list(into.values()), together)
        for name, factors in after:
            at = form.names.index(name) * num_feats
            torch.mul(*(tensors[factor] for factor in factors), out=found[:, at : at + num_feats])
        if not parameters:
            return *(None,) * 5, found, of_edges, None
        of_weight, of_bias = _of_maps(x, found, any(of_parameters[::2]), any(of_parameters[1::2]))
        of_each: list[Tensor | None] = []
        at = 0
        for given, *wanted in zip(parameters[::2], of_parameters[::2], of_parameters[1::2], strict=True):
            end = at + given.shape[0]
            for one, total in zip(wanted, (of_weight, of_bias), strict=True):
                of_each.append(total[at:end] if one and total is not None else None)
            at = end
        return *(None,) * 5, products.back(found, weight) if of_x else None, of_edges, None, *of_each


def _of_maps(x: Tensor, grad: Tensor, of_weight: bool, of_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """The gradients to weight and bias of a map of x."""
    both = products.of_weight(x, grad, of_bias) if of_weight else None
    if both is not None:
        return both
    return grad.t().mm(x) if of_weight else None, column_sums(grad) if of_bias else None


def versions(parameters: Sequence[Tensor | None]) -> list[int | None]:
    """Which change with every write."""
    return [None if p is None or p.is_inference() else p._version for p in parameters]


def wide(x: Tensor) -> torch.dtype:
    """What sums are in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _shift(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases one after another."""
    if len(biases) == 1 or all(b is None for b in biases):
        return biases[0]
    return torch.cat([x.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])


def degrees(arrays: Structure, like: Tensor, least: int) -> Tensor:
    """How many edges each row has, or the least number, [num_rows, 1]: kept with the graph."""
    dtype = wide(like)
    key = ("degrees", dtype, least)
    found = arrays.calls.get(key)
    if found is None:
        found = arrays.indptr.diff().clamp_(min=least).to(dtype).view(-1, 1)
        if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):  # else it has no values before a replay
            arrays.calls[key] = found
    return found


# Without Function.apply()'s wrapper, as in layers.py.
_joined = super(torch.autograd.Function, _Joined).apply  # type: ignore[misc]
