"""Sums of messages whose operands come from one linear map: they lie side by side, and so do their gradients, which the
linear map's backward pass then takes in one product each."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators, report
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Structure, arrays_of
from gnnaccel.ops.messages import Expression, generated, is_fused, message_reduce, relu, sigmoid, u, v
from gnnaccel.ops.messages.derivatives import Ahead, Half, ahead, gradients
from gnnaccel.ops.messages.program import Program, program_of
from gnnaccel.ops.messages.reduce import walk

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Parts(NamedTuple):
    """A message, and where its operands lie.

    reduce : "sum" or "mean".
    names : of the operands, in their order; all are of sources or destinations.
    added : whether a part behind them is added to the sums.
    """

    message: Expression
    reduce: str
    names: tuple[str, ...]
    added: bool


GATED = sigmoid(u("q") + v("k")) * u("x")
FILM = relu(v("gamma") * u("x") + v("beta"))
LE = u("a") - v("b")


def joined_sum(graph: Graph, joined: Tensor, num_feats: int, form: Parts) -> Tensor:
    """out[v] = the sum or mean of the form's message over the edges, and what is added, of operands side by side.

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    joined : Tensor [num_rows, parts * num_feats]
        float32, float64, bfloat16. Parts: the form's operands, and what is added.
    num_feats : int
    form : Parts

    Returns
    -------
    Tensor [num_rows, num_feats]

    Raises
    ------
    TypeError, ValueError
        As `message_reduce`.

    Notes
    -----
    On CUDA kernels read the parts where they lie, and write the gradients there; elsewhere it is `message_reduce`.
    """
    fits = joined.dim() == 2 and joined.shape[0] == graph.num_rows == graph.num_cols and graph.nnz > 0
    fits = fits and num_feats > 0 and joined.shape[1] == (len(form.names) + form.added) * num_feats
    usual = fits and joined.is_cuda and joined.dtype in _DTYPES and is_fused(graph) and _operators.usual(joined)
    if not usual or joined.device != graph.device or not joined.is_contiguous():
        return _composed(graph, joined, num_feats, form)
    if report.timing:
        report.message(f"{form.reduce} of {form.message}")
    keep = torch.is_grad_enabled() and joined.requires_grad
    arrays = arrays_of(graph, keep, joined[:, :num_feats])
    return _joined(joined, arrays, partial(_composed, graph, num_feats=num_feats, form=form), num_feats, form, keep)


def _composed(graph: Graph, joined: Tensor, num_feats: int, form: Parts) -> Tensor:
    parts = joined.split(num_feats, dim=1)
    out = message_reduce(graph, form.message, dict(zip(form.names, parts, strict=False)), form.reduce)
    return out + parts[-1] if form.added else out


class _Plan(NamedTuple):
    """Programs of a form.

    places : the part of each leaf.
    early : `ahead` of the program; without it `here` makes the gradients to rows of destinations.
    """

    program: Program
    places: tuple[int, ...]
    early: Ahead | None
    here: Half | None
    there: Half | None


@functools.lru_cache(maxsize=64)
def _plan(form: Parts, num_feats: int) -> _Plan:
    message = form.message
    program, leaves = program_of(((message, form.reduce),), tuple((leaf, (num_feats,)) for leaf in message.leaves))
    everything = (True,) * len(leaves)
    here, there = gradients(program, everything, (True,))
    return _Plan(program, tuple(form.names.index(name) for _, name in leaves), ahead(program, everything), here, there)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, joined, arrays: Structure, composed, num_feats, form, keep):
        plan = _plan(form, num_feats)
        parts = joined.split(num_feats, dim=1)
        operands = [parts[place] for place in plan.places]
        program, dtypes = plan.program, (joined.dtype,)
        if keep and plan.early is not None:
            wide = torch.float64 if joined.dtype == torch.float64 else torch.float32
            program, dtypes = plan.early.program, (joined.dtype, *(wide,) * len(plan.early.targets))
        out, *factors = walk(arrays, program, operands, dtypes)
        if keep:
            ctx.arrays, ctx.composed, ctx.form, ctx.num_feats = arrays, composed, form, num_feats
            ctx.save_for_backward(joined, *factors)
        return out.add_(parts[-1]) if form.added else out

    @staticmethod
    def backward(ctx, grad):
        joined, *factors = ctx.saved_tensors
        usual = not torch.is_grad_enabled() and _operators.usual(grad, joined)
        if not usual or not joined.is_contiguous():
            return *_arrays.gradients(ctx.composed, (joined,), (True,), grad), *(None,) * 5
        form, plan = ctx.form, _plan(ctx.form, ctx.num_feats)
        found = torch.empty_like(joined)
        parts, into = joined.split(ctx.num_feats, dim=1), found.split(ctx.num_feats, dim=1)
        if form.added:
            into[-1].copy_(grad)
        if form.reduce == "mean":
            grad = grad / ctx.arrays.indptr.diff().clamp_(min=1).to(grad.dtype).view(-1, 1)
        given = [*(parts[place] for place in plan.places), generated.in_rows(grad)]
        _fill(ctx.arrays.transposed(), plan.there, plan, given, into)
        if plan.early is None:
            _fill(ctx.arrays, plan.here, plan, given, into)
        else:
            for (leaf, *_), factor in zip(plan.early.targets, factors, strict=True):
                torch.mul(grad, factor, out=into[plan.places[leaf]])
        return found, *(None,) * 5


def _fill(arrays: Structure, half: Half | None, plan: _Plan, given: list[Tensor], into: tuple[Tensor, ...]) -> None:
    """Put the gradients of one half where they belong."""
    if half is not None:
        outs = [into[plan.places[leaf]] for leaf, _ in half.targets]
        generated.walk(arrays, half.program, [given[i] for i in half.operands], outs, [])


# Without Function.apply()'s wrapper, as in layers.py.
_joined = super(torch.autograd.Function, _Joined).apply  # type: ignore[misc]
