"""Attention whose scores the caller has: their softmax and the aggregation in one op."""

from __future__ import annotations

from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _check
from gnnaccel.ops._edge_factor import edge_factor
from gnnaccel.ops.dot_attention import softmax_sum


def edge_attention(
    graph: Graph,
    scores: Tensor,
    x: Tensor,
    *,
    edge_scale: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """out[v, h] = sum over edges e = (u, v) of a[e, h] * edge_scale[e, h] * x[u, h].

    a = softmax over the edges into v of scores[e, h]: `edge_softmax` and `spmm` in one, without a.

    Parameters
    ----------
    graph : Graph
    scores : Tensor [nnz, H], edge-id order
        float32, float64, bfloat16; float16 on CUDA.
    x : Tensor [num_cols, H, F], same dtype
    edge_scale, dropout, seed
        As in `dot_attention`.

    Returns
    -------
    Tensor [num_rows, H, F]; 0 for rows without edges. A row whose scores are all -inf is NaN, as torch.softmax has it.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape, device or dropout, or an edge_scale that asks for a
        gradient.

    Notes
    -----
    On the CPU one pass over the edges forward and one backward, and beside the inputs and the result two numbers per
    row and head are kept. On CUDA one pass where no gradient is asked for; else it is composed of `edge_softmax` and
    `spmm`, whose backward is faster there, and a is kept. When else it is composed: as `attention`.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x = torch.tensor([[[2.0]], [[4.0]]])
    >>> gnnaccel.ops.edge_attention(g, torch.tensor([[0.0], [-1e9]]), x)[0]
    tensor([[2.]])
    """
    _check.graph("edge_attention", graph)
    _check.feature("edge_attention", "x", x, graph.num_cols, "graph.num_cols, one per source", graph.device)
    if x.dim() != 3:
        raise ValueError(f"edge_attention: x: expected shape [num_cols, heads, features], got {tuple(x.shape)}")
    factor = edge_factor("edge_attention", graph, x.shape[1], edge_scale, dropout, seed)
    return softmax_sum("edge_attention", graph, None, None, x, scores, factor, 1.0)
