"""Rows that keep k entries and dense ones into each other: what CBSR tensors (cbsr.py) are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.lower import bounds


def places_dtype(num_feats: int) -> torch.dtype:
    """Of the indices of rows of `num_feats` features."""
    return torch.uint8 if num_feats <= bounds.NARROW_PLACES else torch.uint16


def description(values: Tensor, places: Tensor, num_feats: int) -> tuple:
    """The binary's description of compressed rows (types.h: Compressed)."""
    return (lib.pointer(values), lib.pointer(places), values.shape[1], num_feats)


def aligned(x: Tensor) -> Tensor:
    """x as kernels read entries and places: contiguous, and on CUDA 16-byte aligned."""
    x = x.contiguous()
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


def _expand_impl(values, places, num_feats):
    out = values.new_empty(values.shape[0], num_feats)
    if out.numel():
        values, places = values.contiguous(), places.contiguous()
        kept = description(values, places, num_feats)
        lib.launch("expand", out.device, kept, out.shape[0], out.data_ptr(), lib.DTYPES[out.dtype])
    return out


def _expand_fake(values, places, num_feats):
    return values.new_empty(values.shape[0], num_feats)


def _collect_impl(x, places):
    x, places = x.contiguous(), places.contiguous()
    values = x.new_empty(places.shape)
    if values.numel():
        kept = description(values, places, x.shape[1])
        lib.launch("collect", x.device, x.data_ptr(), x.shape[0], kept, lib.DTYPES[x.dtype])
    return values


def _collect_fake(x, places):
    return x.new_empty(places.shape)


def _expand_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _expand_backward(ctx, grad):
    return collect(grad, ctx.saved_tensors[0]), None, None


def _collect_context(ctx, inputs, output):
    ctx.num_feats = inputs[0].shape[1]
    ctx.save_for_backward(inputs[1])


def _collect_backward(ctx, grad):
    return expand(grad, ctx.saved_tensors[0], ctx.num_feats), None


# [N, k] entries at places of rows of num_feats, others 0.
expand = _operators.register(
    "expand",
    "(Tensor values, Tensor places, SymInt num_feats) -> Tensor",
    _expand_impl,
    _expand_fake,
    backward=_expand_backward,
    setup_context=_expand_context,
)
# values[r, j] = x[r, places[r, j]].
collect = _operators.register(
    "collect",
    "(Tensor x, Tensor places) -> Tensor",
    _collect_impl,
    _collect_fake,
    backward=_collect_backward,
    setup_context=_collect_context,
)
