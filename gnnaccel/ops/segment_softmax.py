"""The rows of segments weighted by a softmax of each feature over its segment, and their sums: a readout of a batch of
graphs in one launch for each direction, by a short way, no registered op."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.ops._arrays import gradients


class Segments:
    """Consecutive rows, of offsets that a library made: kernels trust them.

    offsets : Tensor [num_segments + 1], int32 or int64
        Ascending from 0 to `rows`.
    """

    __slots__ = ("csr", "offsets", "rows")

    def __init__(self, offsets: Tensor, rows: int):
        self.offsets, self.rows = offsets, rows
        self.csr = lib.csr(offsets, None, None, 0, rows)

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1


def segment_softmax(x: Tensor, segments: Segments, t: Tensor | float, constant: bool = False) -> Tensor | None:
    """out[s, d] = sum over the rows i of segment s of p[i, d] * x[i, d], p their softmax of t[d] * x[i, d].

    Parameters
    ----------
    x : Tensor [segments.rows, D]
        float32, float64, bfloat16; float16 on CUDA.
    segments : Segments
        On CUDA none of more than `bounds.SOFTMAX_ROWS` rows.
    t : float, or Tensor [1] or [D] of the dtype of x
    constant : bool
        Whether weights count as constants for gradients.

    Returns
    -------
    Tensor [len(segments), D], 0 for empty segments; None for what the kernels do not take: nothing has been done then.

    Notes
    -----
    Keeps three numbers for each segment and feature, from which the backward makes the weights again; 16-bit features
    accumulate in fp32. Deterministic.
    Source: Li et al., DeeperGCN: All You Need to Train Deeper GCNs, 2020.
    """
    given = t if isinstance(t, Tensor) else None
    if not (_operators.usual(x) if given is None else _operators.usual(x, given)):
        return None
    if x.dim() != 2 or x.shape[0] != segments.rows or x.dtype not in lib.DTYPES or not x.numel():
        return None
    if x.device != segments.offsets.device or (x.dtype is torch.float16 and not x.is_cuda):
        return None
    if x.is_cuda and not lib.has_cuda_kernels():
        return None
    if given is None:
        return _record(x, None, float(t), segments, constant)
    if given.dim() != 1 or given.shape[0] not in (1, x.shape[1]) or given.dtype is not x.dtype:
        return None
    if given.device != x.device:
        return None
    return _record(x, given.detach() if constant else given, 1.0, segments, constant)  # what makes a constant is one


class _SegmentSoftmax(_operators.Function):
    @staticmethod
    def forward(ctx, x, t, scale, segments, constant):
        x, width, wide = x.contiguous(), x.shape[1], torch.promote_types(x.dtype, torch.float32)
        factor = None if t is None else t.to(wide).contiguous()
        out, stats = x.new_empty(len(segments), width), x.new_empty(3, len(segments), width, dtype=wide)
        made = (out.data_ptr(), stats.data_ptr(), width, lib.DTYPES[x.dtype])
        lib.launch("segment_softmax", x.device, segments.csr, x.data_ptr(), *_factor(factor, scale), *made)
        if any(ctx.needs_input_grad):
            ctx.segments, ctx.scale, ctx.constant = segments, scale, constant
            ctx.save_for_backward(x, t, factor, stats)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, t, factor, stats = ctx.saved_tensors
        of_x, of_t, *_ = ctx.needs_input_grad
        segments, constant = ctx.segments, ctx.constant
        if torch.is_grad_enabled() or not _operators.usual(grad, x):

            def composed(x, t):
                return _composed(x, ctx.scale if t is None else t, segments, constant)

            return *gradients(composed, (x, t), (of_x, of_t), grad), None, None, None
        # What hooks on saved tensors give back may lie otherwise.
        x, grad, stats, width = x.contiguous(), grad.contiguous(), stats.contiguous(), x.shape[1]
        factor = None if factor is None else factor.contiguous()
        grad_x = torch.empty_like(x)
        grad_t = stats.new_empty(len(segments), width) if of_t else None
        given = (segments.csr, x.data_ptr(), *_factor(factor, ctx.scale), stats.data_ptr(), grad.data_ptr())
        made = (grad_x.data_ptr(), lib.pointer(grad_t), width, constant, lib.DTYPES[x.dtype])
        lib.launch("segment_softmax_backward", x.device, *given, *made)
        if grad_t is not None:
            grad_t = grad_t.sum(0) if t.shape[0] == width > 1 else grad_t.sum()
            grad_t = grad_t.view(t.shape).to(t.dtype)
        return grad_x if of_x else None, grad_t, None, None, None


def _factor(factor: Tensor | None, scale: float) -> tuple:
    """What kernels take for t."""
    return (0, scale, 0) if factor is None else (factor.data_ptr(), 1.0, factor.shape[0])


def _composed(x: Tensor, t: Tensor | float, segments: Segments, constant: bool) -> Tensor:
    """The same in ops of torch's, which have derivatives of any order."""
    counts = segments.offsets.diff()
    index = torch.repeat_interleave(torch.arange(len(segments), device=x.device), counts.long(), output_size=x.shape[0])
    scores, shape = x * t, (len(segments), x.shape[1])
    with torch.no_grad():
        places = index.view(-1, 1).expand_as(scores)
        top = scores.new_zeros(shape).scatter_reduce(0, places, scores, "amax", include_self=False)
    weights = (scores - top.index_select(0, index)).exp()
    weights = weights / weights.new_zeros(shape).index_add(0, index, weights).index_select(0, index)
    return x.new_zeros(shape).index_add(0, index, (weights.detach() if constant else weights) * x)


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_record = super(torch.autograd.Function, _SegmentSoftmax).apply  # type: ignore[misc]
