"""ResGatedGraphConv behind one linear map: keys, queries, values and what is added lie side by side, and so do their
gradients, which the linear map's backward pass then takes in one product each."""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch import Tensor

from gnnaccel import _operators, report
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Structure, arrays_of
from gnnaccel.ops.layers import _GATED as GATED
from gnnaccel.ops.layers import gated_sum
from gnnaccel.ops.messages import generated, is_fused
from gnnaccel.ops.messages.derivatives import ahead, gradients
from gnnaccel.ops.messages.program import program_of
from gnnaccel.ops.messages.reduce import walk

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_PLACES = {"dst": 0, "src": 1, "x": 2}  # of the leaves among the parts


def joined_gated_sum(graph: Graph, joined: Tensor, num_feats: int) -> Tensor:
    """out[v] = joined[v, 3F:] + `gated_sum` with gate_dst = joined[:, :F], gate_src = joined[:, F:2F] and
    x = joined[:, 2F:3F].

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    joined : Tensor [num_rows, 4F], or [num_rows, 3F] with nothing to add
        float32, float64, bfloat16; float16 on CUDA.
    num_feats : int
        F

    Returns
    -------
    Tensor [num_rows, F]

    Raises
    ------
    TypeError, ValueError
        As `gated_sum`.

    Notes
    -----
    On CUDA kernels read the parts where they lie, and write the gradients there; elsewhere it is that composition.
    """
    fits = joined.dim() == 2 and joined.shape[0] == graph.num_rows == graph.num_cols and graph.nnz > 0
    fits = fits and num_feats > 0 and joined.shape[1] in (3 * num_feats, 4 * num_feats) and joined.is_contiguous()
    usual = fits and joined.is_cuda and joined.dtype in _DTYPES and is_fused(graph) and _operators.usual(joined)
    if not usual or joined.device != graph.device or torch.compiler.is_compiling():
        return _composed(graph, joined, num_feats)
    if report.timing:
        report.message(f"sum of {GATED}")
    keep = torch.is_grad_enabled() and joined.requires_grad
    arrays = arrays_of(graph, keep, joined[:, :num_feats])
    return _joined(joined, arrays, partial(_composed, graph, num_feats=num_feats), num_feats, keep)


def _composed(graph: Graph, joined: Tensor, num_feats: int) -> Tensor:
    key, query, value, *added = joined.split(num_feats, dim=1)
    out = gated_sum(graph, query, key, value)
    return out + added[0] if added else out


@functools.lru_cache(maxsize=64)
def _programs(num_feats: int):
    """The program, the one that also makes what the gradient of keys is made of, the half for the reversed edges, and
    where the leaves lie among the parts."""
    program, leaves = program_of(((GATED, "sum"),), tuple((leaf, (num_feats,)) for leaf in GATED.leaves))
    early = ahead(program, (True,) * len(leaves))
    _, there = gradients(program, tuple(kind == "u" for kind, _ in leaves), (True,))
    assert early is not None and there is not None
    return program, early.program, there, tuple(_PLACES[name] for _, name in leaves)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, joined, arrays: Structure, composed, num_feats, keep):
        plain, early, _, places = _programs(num_feats)
        parts = joined.split(num_feats, dim=1)
        operands = [parts[place] for place in places]
        dtypes = (joined.dtype,)
        if not keep:
            (out,) = walk(arrays, plain, operands, dtypes)
        else:
            wide = torch.float64 if joined.dtype == torch.float64 else torch.float32
            out, factor = walk(arrays, early, operands, (*dtypes, wide))
            ctx.arrays, ctx.composed, ctx.num_feats = arrays, composed, num_feats
            ctx.save_for_backward(joined, factor)
        return out.add_(parts[3]) if len(parts) == 4 else out

    @staticmethod
    def backward(ctx, grad):
        joined, factor = ctx.saved_tensors
        usual = not torch.is_grad_enabled() and _operators.usual(grad, joined)
        if not usual or not joined.is_contiguous():
            found = _arrays.gradients(ctx.composed, (joined,), (True,), grad)
            return *found, None, None, None, None
        _, _, there, places = _programs(ctx.num_feats)
        found = torch.empty_like(joined)
        parts, into = joined.split(ctx.num_feats, dim=1), found.split(ctx.num_feats, dim=1)
        grad = generated.in_rows(grad)
        given = [*(parts[place] for place in places), grad]
        outs = [into[places[leaf]] for leaf, _ in there.targets]
        generated.walk(ctx.arrays.transposed(), there.program, [given[i] for i in there.operands], outs, [])
        torch.mul(grad, factor, out=into[0])
        for added in into[3:]:
            added.copy_(grad)
        return found, None, None, None, None


# Without Function.apply()'s wrapper, as in layers.py.
_joined = super(torch.autograd.Function, _Joined).apply  # type: ignore[misc]
