"""Graph attention in one op: scores, softmax and aggregation, in memory linear in the nodes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays, _check, _edge_factor
from gnnaccel.ops._arrays import Structure, arrays_of, needs_grad
from gnnaccel.ops._edge_factor import FUSED_DTYPES, EdgeFactor, edge_factor
from gnnaccel.ops._features import aligned_heads, unpadded
from gnnaccel.ops.edge_softmax import edge_softmax_op
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import spmm_op

_INPUTS = f"Tensor x, Tensor score_src, Tensor score_dst, {_edge_factor.SCHEMA}"

_NARROW = (torch.bfloat16, torch.float16)


def attention(
    graph: Graph,
    x: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    *,
    negative_slope: float = 0.2,
    edge_scale: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Additive attention (GAT): out[v, h] = sum over edges e = (u, v) of a[e, h] * edge_scale[e, h] * x[u, h].

    a = softmax over the edges into v of leaky_relu(score_src[u, h] + score_dst[v, h], negative_slope).

    Parameters
    ----------
    graph : Graph
    x : Tensor [num_cols, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    score_src : Tensor [num_cols, H], same dtype
    score_dst : Tensor [num_rows, H], same dtype
        Under autocast also a wider one: then the result has it, while 16-bit features are gathered as they are on CUDA.
    negative_slope : float
        Slope of leaky_relu below zero; 1 leaves the scores as they are.
    edge_scale : Tensor [nnz, H], same dtype, optional
        Factor after the softmax, edge-id order: a mask. A constant: it gets no gradient.
    dropout : float in [0, 1)
        The part of a that becomes 0, the rest divided by 1 - dropout. Nothing of it is stored, but where the op
        is composed of others (Notes).
    seed : Tensor [1], int64, on the graph's device, optional
        Decides what is dropped, together with the edge's id and the head. Drawn from torch's generator of the device
        if not given.

    Returns
    -------
    Tensor [num_rows, H, F]; 0 for rows without edges.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape, device or dropout, or an edge_scale that asks for a
        gradient (compose `sddmm`, `edge_softmax` and `spmm` for that).

    Notes
    -----
    One kernel per direction, which gathers each edge's features once and stores nothing per edge; the backward
    recomputes the probabilities from one log-sum-exp per row and head, and keeps a second tensor of the size of the
    result. In bfloat16 on the CPU, for wide heads on large CUDA graphs of fewer than 8 edges a row, and where a second
    derivative is asked for, the op is composed of `sddmm`, `edge_softmax` and `spmm`, which store [nnz, H]. 16-bit
    features accumulate in fp32. Deterministic, but a CUDA graph's results change once in the last bits when it earns
    its work list (see `gnnaccel.prepare`).
    Source: Velickovic et al., Graph Attention Networks, ICLR 2018; Milakov and Gimelshein, Online normalizer
    calculation for softmax, 2018.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x = torch.tensor([[[2.0]], [[4.0]]])
    >>> gnnaccel.ops.attention(g, x, torch.zeros(2, 1), torch.zeros(2, 1))[0]
    tensor([[3.]])
    """
    check_scores(graph, x, score_src, score_dst)
    factor = edge_factor("attention", graph, x.shape[1], edge_scale, dropout, seed)
    wide = x.dtype  # of the result: under autocast the widest
    for name, other in {"score_src": score_src, "score_dst": score_dst, "edge_scale": edge_scale}.items():
        if other is not None:
            wide = torch.promote_types(wide, _check.common_dtype("attention", x, other, "x", name))
    if not (x.is_cuda and x.dtype in _NARROW):
        x = x.to(wide)
    factor = factor.to(x.dtype)
    return of_scores(graph, x, score_src.to(wide), score_dst.to(wide), factor, negative_slope).to(wide)


def check_scores(graph: Graph, x: Tensor, score_src: Tensor, score_dst: Tensor) -> None:
    """The errors of `attention` about shapes and devices."""
    _check.graph("attention", graph)
    _check.feature("attention", "x", x, graph.num_cols, "graph.num_cols, one per source", graph.device)
    if x.dim() != 3:
        raise ValueError(f"attention: x: expected shape [num_cols, heads, features], got {tuple(x.shape)}")
    rows = {"score_src": (score_src, graph.num_cols), "score_dst": (score_dst, graph.num_rows)}
    for name, (value, count) in rows.items():
        _check.feature("attention", name, value, count, "rows", graph.device)
        _check.features_of("attention", name, value, (x.shape[1],))


def of_scores(
    graph: Graph, x: Tensor, score_src: Tensor, score_dst: Tensor, factor: EdgeFactor, negative_slope: float
) -> Tensor:
    """`attention`, of the dtype of x: the scores may be of float32 beside 16-bit features."""
    keep = needs_grad(x, score_src, score_dst)
    arrays = arrays_of(graph, keep, x)
    if x.dtype not in FUSED_DTYPES["cuda" if x.is_cuda else "cpu"] or shorter_by_parts(
        graph, x.shape[2] * x.element_size()
    ):
        return _composed(arrays, x, score_src, score_dst, factor, negative_slope)
    scores = (score.to(lib.accumulator(x)) for score in (score_src, score_dst))
    return attention_op(arrays, x, *scores, *factor, negative_slope, keep)[0]


def shorter_by_parts(graph: Graph, head_bytes: int) -> bool:
    """True where the three ops take less time than one: rows so short that a wide head's sum is most of the work, and
    has a faster kernel."""
    short = bounds.BY_PARTS_EDGES <= graph.nnz < bounds.BY_PARTS_DEGREE * graph.num_rows
    return short and head_bytes >= bounds.BY_PARTS_BYTES and graph.indptr.is_cuda


def _composed(arrays: Structure, x, score_src, score_dst, factor: EdgeFactor, negative_slope) -> Tensor:
    scores = sddmm_op(arrays, score_src, score_dst, "add", "u", "v")
    return weighted_sum(arrays, torch.nn.functional.leaky_relu(scores, negative_slope), x, factor)


def weighted_sum(arrays: Structure, scores: Tensor, x: Tensor, factor: EdgeFactor) -> Tensor:
    """Sources weighted by the softmax of scores [nnz, H], times `factor`."""
    weight = factor.multiplied(edge_softmax_op(arrays, scores)).to(x.dtype)
    return spmm_op(arrays, x, weight.unsqueeze(-1), "mul", "sum", 0.0)


def _inputs(x, score_src, score_dst) -> list[Tensor]:
    return [aligned_heads(x), score_src.contiguous(), score_dst.contiguous()]


def _outputs(num_rows, x, keep) -> list[Tensor]:
    """out, lse, out_pos, p_pos of the shapes that the op returns; the last two empty if they are not kept."""
    kept, dtype = num_rows if keep else 0, lib.accumulator(x)
    per_head = [x.new_empty(n, x.shape[1], dtype=dtype) for n in (num_rows, kept)]
    return [x.new_empty(num_rows, *x.shape[1:]), per_head[0], x.new_empty(kept, *x.shape[1:]), per_head[1]]


def _attention_impl(arrays, x, score_src, score_dst, *rest):
    *factor, negative_slope, keep = rest
    num_rows, feats = arrays.num_rows, x.shape[2]
    if x.shape[1:].numel() == 0:
        return tuple(t.zero_() for t in _outputs(num_rows, x, keep))
    inputs, factor = _inputs(x, score_src, score_dst), EdgeFactor._make(factor).contiguous()
    outputs = _outputs(num_rows, inputs[0], keep)
    given, made = map(lib.pointer, inputs), map(lib.pointer, (*outputs[:2], *(outputs[2:] if keep else (None, None))))
    how = (negative_slope, *_sizes(inputs[0]))
    lib.launch("attention", x.device, *arrays.listed(), *given, factor.pointers(), *made, *how)
    return tuple(unpadded(t, feats) if t.dim() == 3 else t for t in outputs)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[1], x.shape[1] * x.shape[2], lib.DTYPES[x.dtype]


def _attention_backward_impl(transposed, x, score_src, score_dst, *rest):
    *factor, out, lse, out_pos, p_pos, grad_out, slope = rest
    feats = x.shape[2]
    if x.shape[1:].numel() == 0 or score_dst.shape[0] == 0:
        return torch.zeros_like(x), torch.zeros_like(score_src), torch.zeros_like(score_dst)
    inputs, factor = _inputs(x, score_src, score_dst), EdgeFactor._make(factor).contiguous()
    grads = [torch.empty_like(t) for t in inputs]
    saved = (aligned_heads(out), lse.contiguous(), aligned_heads(out_pos), p_pos.contiguous(), aligned_heads(grad_out))
    given, made = map(lib.pointer, inputs), map(lib.pointer, (*saved, *grads))
    how = (slope, *_sizes(grads[0]))
    lib.launch("attention_backward", x.device, *transposed.listed(), *given, factor.pointers(), *made, *how)
    return unpadded(grads[0], feats), grads[1], grads[2]


def _attention_fake(arrays, x, *rest):
    keep = rest[-1]
    return tuple(_outputs(arrays.num_rows, x, keep))


def _attention_backward_fake(_transposed, x, score_src, score_dst, *_):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, score_src, score_dst))


def _setup_context(ctx, inputs, output):
    arrays, *given, ctx.dropout, ctx.negative_slope, ctx.kept = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    _arrays.save(ctx, arrays, *given, *output)


def _backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 8
    if not ctx.kept:
        raise RuntimeError("gnnaccel::attention: called with keep=False, which leaves nothing to differentiate with")
    arrays, (x, score_src, score_dst, edge_scale, seed, *output) = _arrays.saved(ctx)
    factor = EdgeFactor(edge_scale, seed, ctx.dropout)
    if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the composition instead
        composed = partial(_composed, arrays, factor=factor, negative_slope=ctx.negative_slope)
        grads = _arrays.gradients(composed, (x, score_src, score_dst), ctx.wanted[:3], grad_out)
    else:
        given = (x, score_src, score_dst, *factor, *output)
        grads = attention_backward_op(arrays.transposed(), *given, grad_out, ctx.negative_slope)
    return *grads, None, None, None, None, None


def _check_inputs(graph, x, score_src, score_dst, edge_scale, seed, *_rest):
    op = "attention"
    heads, _ = _check.heads_of(op, "x", x, graph.num_cols, graph.device, FUSED_DTYPES[graph.device.type])
    dtype = lib.accumulator(x)
    _check.exactly(op, "score_src", score_src, (graph.num_cols, heads), dtype, graph.device)
    _check.exactly(op, "score_dst", score_dst, (graph.num_rows, heads), dtype, graph.device)
    _edge_factor.check_factor(op, graph, x, edge_scale, seed)


def _check_saved(transposed, x, score_src, score_dst, edge_scale, seed, _dropout, *saved):
    out, lse, out_pos, p_pos, grad_out, _slope = saved
    op, device, rows = "attention_backward", transposed.device, transposed.num_cols
    heads, feats = _check.heads_of(op, "x", x, transposed.num_rows, device, FUSED_DTYPES[device.type])
    dtype = lib.accumulator(x)
    _check.exactly(op, "score_src", score_src, (transposed.num_rows, heads), dtype, device)
    for name, value in {"score_dst": score_dst, "lse": lse, "p_pos": p_pos}.items():
        _check.exactly(op, name, value, (rows, heads), dtype, device)
    for name, value in {"out": out, "out_pos": out_pos, "grad_out": grad_out}.items():
        _check.exactly(op, name, value, (rows, heads, feats), x.dtype, device)
    _edge_factor.check_factor(op, transposed, x, edge_scale, seed)


attention_backward_op = _operators.register(
    "attention_backward",
    f"({_arrays.SCHEMA}, {_INPUTS}, Tensor out, Tensor lse, Tensor out_pos, Tensor p_pos, Tensor grad_out, "
    "float negative_slope) -> (Tensor, Tensor, Tensor)",
    _attention_backward_impl,
    _attention_backward_fake,
    check=_check_saved,
    structure=Structure,
)
# Scores are of `accumulator(x)`. out, and what the backward reads beside it: lse [num_rows, H], and where they are kept
# out_pos (as out) and p_pos (as lse), the parts of out and of the sum of probabilities that come from edges with a
# positive score.
attention_op = _operators.register(
    "attention",
    f"({_arrays.SCHEMA}, {_INPUTS}, float negative_slope, bool keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_impl,
    _attention_fake,
    check=_check_inputs,
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
