"""Layers of dot-product attention between two kinds of nodes, of many edge types in one walk, as `gat_layers` has
those of GAT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel.graph.csr import Graph
from gnnaccel.ops.gat_layers import End, ends_of, planned
from gnnaccel.ops.heads_attention import heads_attention


class Map(NamedTuple):
    """linear(., weight, bias), of a weight [D, F] and a bias [D] or None."""

    weight: Tensor
    bias: Tensor | None


class DotLayer(NamedTuple):
    """`dot_attention` over `graph` of linear maps of y [num_rows, G] (query) and x [num_cols, F] (key, value), all
    [H * C]; and of y, `skip`, or None."""

    graph: Graph
    x: Tensor
    y: Tensor
    query: Map
    key: Map
    value: Map
    skip: Map | None


def dot_layers(
    targets: Sequence[Sequence[DotLayer]], heads: int, channels: int, concat: bool, kept: Callable
) -> list[Tensor]:
    """For each target the sum of its layers.

    Parameters
    ----------
    targets : sequence of sequences of DotLayer
        Those of one target have the same `y`. All have `heads` of so many `channels`, one dtype and device.
    concat : bool
        Whether heads stand side by side, or are averaged.
    kept : callable
        As of `gat_layers`.

    Returns
    -------
    list of Tensor [num_rows, H * C], or [num_rows, C]
    """
    features, places, layout = ends_of(targets)
    everything = [layer for layers in targets for layer in layers]
    plan = kept(("dots", tuple(layout)), partial(planned, targets, places, len(features)))
    shape = (-1, heads, channels)

    def mapped(ends: list[End], name: str) -> Tensor:
        parts = [_mapped(features[end.place], [getattr(everything[n], name) for n in end.layers]) for end in ends]
        each = [part.view(shape) for part in parts]
        return each[0] if len(each) == 1 else torch.cat(each)

    query, key, value = mapped(plan.targets, "query"), mapped(plan.sources, "key"), mapped(plan.sources, "value")
    attended, outs = heads_attention(plan.graph, query, key, value), []
    for end in plan.targets:
        out = attended[end.first : end.last].view(-1, len(end.layers), heads * channels).sum(1)
        out = out if concat else out.view(shape).mean(1)
        skips = [skip for n in end.layers if (skip := everything[n].skip) is not None]
        if skips:
            biases = [skip.bias for skip in skips if skip.bias is not None]
            bias = sum(biases[1:], start=biases[0]) if biases else None
            out = out + F.linear(features[end.place], sum([s.weight for s in skips[1:]], start=skips[0].weight), bias)
        outs.append(out)
    return outs


def _mapped(x: Tensor, maps: list[Map]) -> Tensor:
    """All maps of x side by side."""
    if len(maps) == 1:
        return F.linear(x, *maps[0])
    biases = [each.bias for each in maps if each.bias is not None]
    bias = torch.cat(biases) if len(biases) == len(maps) else None
    out = F.linear(x, torch.cat([each.weight for each in maps]), bias)
    if biases and bias is None:
        zeros = [each.weight.new_zeros(each.weight.shape[0]) if each.bias is None else each.bias for each in maps]
        out = out + torch.cat(zeros)
    return out
