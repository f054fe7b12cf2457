"""Attention over edges of several types, each with maps of its own, as in HGT (Hu et al., WWW 2020)."""

from __future__ import annotations

from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _check
from gnnaccel.ops._relations import pairs_of
from gnnaccel.ops.dot_attention import dot_attention
from gnnaccel.ops.segment_matmul import matmul_op
from gnnaccel.ops.spmm import spmm


def relational_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_type: Tensor,
    key_maps: Tensor,
    value_maps: Tensor,
    prior: Tensor | None = None,
) -> Tensor:
    """out[v, h] = sum over edges e = (u, v) of relation r of a[e, h] * value[u, h] @ value_maps[r, h].

    a = softmax over all edges into v of prior[r, h] / sqrt(F) * <query[v, h], key[u, h] @ key_maps[r, h]>.

    Parameters
    ----------
    graph : Graph
    query : Tensor [num_rows, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    key, value : Tensor [num_cols, H, F], same dtype
    edge_type : Tensor [nnz], int32 or int64
        Relation of each edge, by edge id, in [0, R). What is made of it is kept until it or the graph is gone, or it is
        written into.
    key_maps, value_maps : Tensor [R, H, F, F], same dtype
    prior : Tensor [R, H], same dtype, optional
        1 if not given.

    Returns
    -------
    Tensor [num_rows, H, F]; 0 for rows without edges.

    Raises
    ------
    IndexError
        For an edge type outside [0, R), which is named. TypeError, ValueError: for a wrong type, dtype, shape or
        device.

    Notes
    -----
    A source is mapped once for each relation that it has edges of, not once for each edge, and nothing is kept for
    edges. Gradients of all but edge_type, of any order.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x, maps = torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[[1.0]]], [[[2.0]]]])
    >>> gnnaccel.ops.relational_attention(g, 0 * x, x, x, torch.tensor([0, 1]), maps, maps)[0]
    tensor([[3.5000]])
    """
    op = "relational_attention"
    _check.graph(op, graph)
    for name, x, rows in (
        ("query", query, graph.num_rows),
        ("key", key, graph.num_cols),
        ("value", value, graph.num_cols),
    ):
        _check.feature(op, name, x, rows, "nodes", graph.device)
        if x.dim() != 3 or x.shape[1:] != query.shape[1:]:
            raise ValueError(f"{op}: {name}: expected [{rows}, H, F] alike, got {tuple(x.shape)}")
    heads, width = query.shape[1:]
    count = key_maps.shape[0] if isinstance(key_maps, Tensor) and key_maps.dim() else -1
    for name, x in (("key_maps", key_maps), ("value_maps", value_maps)):
        _check.feature(op, name, x, count, "relations", graph.device)
        _check.features_of(op, name, x, (heads, width, width))
    if prior is not None:
        _check.feature(op, "prior", prior, count, "relations", graph.device)
        _check.features_of(op, "prior", prior, (heads,))
    others = {"key": key, "value": value, "key_maps": key_maps, "value_maps": value_maps, "prior": prior}
    for name, other in others.items():
        if other is not None and other.dtype != query.dtype:
            raise TypeError(f"{op}: {name}: expected the dtype of query ({query.dtype}), got {other.dtype}")
    pairs = pairs_of(op, graph, edge_type, count)
    if prior is not None:
        key_maps = key_maps * prior[:, :, None, None]

    def mapped(x: Tensor, maps: Tensor) -> Tensor:
        rows = spmm(pairs.gather, x.reshape(x.shape[0], heads * width))
        return matmul_op(rows, pairs.ptr, maps).view(rows.shape[0], heads, width)

    return dot_attention(pairs.graph, query, mapped(key, key_maps), mapped(value, value_maps))
