"""Several linear maps of the same features as one product, and as one node of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators, touch
from gnnaccel._precision import product
from gnnaccel.ops import linear_sums
from gnnaccel.ops._arrays import gradients
from gnnaccel.ops._bias import column_sums


def joined_maps(x: Tensor, maps: Sequence[tuple[Tensor, Tensor | None]], apart: int) -> tuple[Tensor, ...] | None:
    """linear(x, weight, bias) for each of the maps, under autocast in its dtype.

    Parameters
    ----------
    x : Tensor [N, F]
    maps : sequence of (Tensor [D, F], Tensor [D] or None)
    apart : int
        So many of the results are contiguous; the others are columns of a matrix of all, not to be written into.

    Returns
    -------
    tuple of Tensor [N, D], or None where the maps are to be called one by one: nothing has been done then.
    """
    narrow = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    for weight, bias in maps:
        if not linear_sums.are_maps(x, weight, bias, narrow):
            return None
    if touch.watched() or touch.in_forward_mode():
        return None
    # The maps alone keep no x where none of these asks for a gradient: it may be written into then.
    if linear_sums.is_recorded() and not any(weight.requires_grad for weight, _ in maps):
        return None
    ends = None if narrow in (None, x.dtype) else x.to(narrow)
    return _joined(x, ends, narrow, apart, *[t for pair in maps for t in pair])


class _Joined(_operators.Function):
    """`ends`, if given, is what autocast makes of x, and kept in its place, as by the maps alone."""

    @staticmethod
    def forward(ctx, x, ends, narrow, apart, *given):
        weights, biases = given[::2], given[1::2]
        source, joined, shifts = x if ends is None else ends, torch.cat(weights), None
        if any(bias is not None for bias in biases):
            shifts = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        if narrow is not None:
            joined, shifts = joined.to(narrow), None if shifts is None else shifts.to(narrow)
        outs = F.linear(source, joined, shifts).split([len(weight) for weight in weights], dim=-1)
        if any(ctx.needs_input_grad):
            ctx.narrow, ctx.dtype = narrow, x.dtype
            ctx.kept = linear_sums.Kept(given)
            ctx.save_for_backward(source, joined if ctx.needs_input_grad[0] else None)
        return *[out.contiguous() for out in outs[:apart]], *outs[apart:]

    @staticmethod
    def backward(ctx, *grads):
        source, joined = ctx.saved_tensors
        of_x, of_ends, _, _, *wanted = ctx.needs_input_grad
        given, narrow = ctx.kept.parameters, ctx.narrow
        if torch.is_grad_enabled():  # a second derivative is asked for
            ctx.kept.check()

            def composed(source, *given):
                pairs = [t if t is None or narrow is None else t.to(narrow) for t in given]
                return tuple([F.linear(source, w, b) for w, b in zip(pairs[::2], pairs[1::2], strict=True)])

            of_source, *found = gradients(composed, (source, *given), (of_x, *wanted), tuple(grads))
            return *((None, of_source) if of_ends else (of_source, None)), None, None, *found
        grad, found = torch.cat(grads, -1), [None] * len(given)
        widths = [len(weight) for weight in given[::2]]
        found[::2] = product(grad.t(), source, given[0].dtype).split(widths)
        biases = [bias for bias in given[1::2] if bias is not None]
        if biases:
            found[1::2] = column_sums(grad, biases[0].dtype).split(widths)
        found = [t if want else None for t, want in zip(found, wanted, strict=True)]
        return product(grad, joined, ctx.dtype) if of_x else None, None, None, None, *found


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_joined: Any = super(torch.autograd.Function, _Joined).apply  # type: ignore[misc]
