"""SuperGAT between its linear map and its bias, as one node of autograd."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gnnaccel import tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops._bias import biased
from gnnaccel.ops._cores import SUPER_GAT, How, attended
from gnnaccel.ops._edge_factor import FUSED_DTYPES
from gnnaccel.ops._usual import BY_PARTS, asks, inner_bias, is_usual, mixed


def super_gat(
    graph: Graph,
    x: Tensor,
    vectors: tuple[Tensor, ...],
    *,
    negative_slope: float = 0.2,
    edge_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """SuperGAT on a graph whose sources are its destinations: `edge_attention` over x. Its scores are the leaky_relu of
    inner products of both ends over the root of F; with vectors of the sums that `gat` has, times the sigmoid of those.

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    x : Tensor [num_rows, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    vectors : two of Tensor [1, H, F], same dtype, or none
        Under autocast also of a wider one, as in `gat`.
    negative_slope, edge_scale
        As in `attention`.
    bias : Tensor [H * F], optional
        Of the dtype of the vectors.

    Returns
    -------
    Tensor [num_rows, H, F], or [num_rows, H * F] with a bias
        Under autocast of the dtype of the kernels, as of `narrow_gat`.

    Raises
    ------
    TypeError, ValueError
        As `sddmm`, `head_dots` and `edge_attention`.
    """
    narrow = False
    if torch.is_autocast_enabled(x.device.type):
        dtype = mixed(x, vectors[0])[0] if vectors else x.dtype
        x, narrow = x.to(dtype), bool(vectors) and vectors[0].dtype != dtype
        edge_scale = None if edge_scale is None else edge_scale.to(dtype)
    composed = partial(_composed, graph, negative_slope, narrow)
    inputs = (x, *vectors)
    fits = x.dim() == 3 and x.shape[0] == graph.num_rows == graph.num_cols and x.shape[1:].numel() > 0
    for vector in vectors:
        fits = fits and vector.shape == (1, *x.shape[1:])
    usual = fits and is_usual(graph, inputs, edge_scale, narrow, FUSED_DTYPES if vectors else BY_PARTS)
    if not usual or (x.is_cuda and tiles.are_profitable(graph)):  # by which inner products are faster
        return biased(composed(*inputs, edge_scale=edge_scale), bias)
    keep = asks(inputs)
    inside = inner_bias(bias, x, keep)
    out = attended(SUPER_GAT, arrays_of(graph, keep, x), composed, edge_scale, negative_slope, keep, inside, 1, *inputs)
    return out if bias is inside else biased(out, bias)


def _composed(graph: Graph, slope: float, narrow: bool, x: Tensor, *vectors: Tensor, edge_scale=None) -> Tensor:
    if narrow:
        vectors = tuple([vector.to(x.dtype) for vector in vectors])
    return SUPER_GAT.composed(graph, (x,), vectors, How(slope, edge_scale))
