"""Sums weighted by the edges, whose calls are made ready once, as those of ready.py: with a gradient of the features,
of the weights, or of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops._features import padding_is_profitable
from gnnaccel.ops.ready import Form, Once, Ready, call_of

_TENSORS = (Tensor, torch.nn.Parameter)
_ON_CPU = torch.device("cpu")
_FUSED_DTYPES = (torch.float32, torch.float64)


def weighted_sum_of(graph: Graph, x: Any, weight: Any, form: Form) -> Tensor | None:
    """Sum over nonzeros (r, c, e) of weight[e] * x[c], of x [num_cols, num_feats] and weight [nnz] or [nnz, 1].

    Returns None where the general way is to be taken, with all its checks: nothing has been done then.
    """
    if type(x) not in _TENSORS or type(weight) not in _TENSORS or torch.compiler.is_compiling():
        return None
    if touch.watched() or touch.in_forward_mode() or weight.dtype != x.dtype:
        return None
    edges = graph.indices.shape[0]
    if (
        not edges
        or weight.shape not in ((edges,), (edges, 1))
        or x.dim() != 2
        or (x.is_cuda and edges >= bounds.EDGE_ORDER_EDGES)
    ):
        return None
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    ready = call_of(graph, x, form, None, None, None, recorded and x.requires_grad)
    if ready is None or not ready.reads(weight):
        return None
    if recorded and (x.requires_grad or weight.requires_grad):
        # The shape that the general way keeps: torch.utils.checkpoint wants the same saved tensors of both.
        return _record(x, weight if weight.dim() == 2 else weight.unsqueeze(1), ready, form)
    return ready.forward(x, None, weight)


class _Weighted(_operators.Function):
    @staticmethod
    def forward(ctx, x, weight, ready, form):
        ctx.ready, ctx.form = ready, form
        # Each factor is read for the gradient of the other alone; one that nobody needs may be written into.
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return ready.forward(x, None, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needed, ready = ctx.needs_input_grad[:2], ctx.ready
        if needed[0] and not torch.is_grad_enabled() and type(grad) is Tensor and not touch.watched():
            grad = grad.contiguous()
            # What hooks on saved tensors give back may lie otherwise.
            if type(ready) is Once:
                if not needed[1] and (grad_x := ready.transposed(grad, weight)) is not None:
                    return grad_x, None, None, None
            elif ready.backward.takes(grad) and ready.reads(weight):
                if not needed[1]:
                    return ready.backward(grad, None, weight), None, None, None
                if ready.forward.takes(x):
                    both = (_by_two_walks if grad.is_cuda else _by_one_walk)(ready, x, weight, grad)
                    if both is not None:
                        return *both, None, None
        grad_x, grad_weight = ctx.form.gradient(ready.structure(needed[0]), x, weight, grad, needed)
        return grad_x, grad_weight, None, None


def _by_one_walk(ready: Ready, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both gradients by one walk over the rows of `grad` on the CPU; None where the general way is to be taken."""
    if grad.dtype not in _FUSED_DTYPES or grad.shape[1] % 4:
        return None
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    pointers = (x.data_ptr(), weight.data_ptr(), grad.data_ptr(), grad_x.data_ptr(), grad_weight.data_ptr())
    sizes = (1, x.shape[1], lib.DTYPES[x.dtype])
    lib.launch("spmm_backward", _ON_CPU, ready.arrays.transposed().matrix(), *pointers, *sizes)
    return grad_x, grad_weight


def _by_two_walks(ready: Ready, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same on CUDA, by the sum over the transposed matrix and a dot product for each edge."""
    feats = x.shape[1]
    if feats == 1 or padding_is_profitable(ready.arrays.nnz, x, grad):
        return None
    assert ready.backward is not None
    grad_x, grad_weight = ready.backward(grad, None, weight), torch.empty_like(weight)
    sources, rows = (x.data_ptr(), feats, 1), (grad.data_ptr(), feats, 1)
    given = (sources, lib.TARGETS["u"], rows, lib.TARGETS["v"], grad_weight.data_ptr())
    codes = (1, feats, lib.EDGE_OPS["dot"], lib.DTYPES[x.dtype])
    lib.launch("sddmm", grad.device, *ready.arrays.listed(), *given, *codes)
    return grad_x, grad_weight


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_record = super(torch.autograd.Function, _Weighted).apply  # type: ignore[misc]
