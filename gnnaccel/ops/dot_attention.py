"""Scaled dot-product attention over the edges of a graph in one op: scores, softmax and aggregation."""

from __future__ import annotations

import math
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
from gnnaccel.ops._edge_order import dense, gather_edge_values, is_profitable, try_empty_like
from gnnaccel.ops._features import aligned_heads, unpadded
from gnnaccel.ops.attention import shorter_by_parts, weighted_sum
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import spmm_op

_INPUTS = f"Tensor? query, Tensor? key, Tensor value, Tensor? edge_bias, {_edge_factor.SCHEMA}"


def dot_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    edge_bias: Tensor | None = None,
    edge_scale: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """out[v, h] = sum over edges e = (u, v) of a[e, h] * edge_scale[e, h] * value[u, h].

    a = softmax over the edges into v of scale * <query[v, h], key[u, h]> + edge_bias[e, h]. Cosine attention (AGNN) is
    this op on normalised features, with its temperature as scale or in the query.

    Parameters
    ----------
    graph : Graph
    query : Tensor [num_rows, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    key, value : Tensor [num_cols, H, F], same dtype
    scale : float, optional
        1 / sqrt(F) if not given, as in torch.nn.functional.scaled_dot_product_attention.
    edge_bias : Tensor [nnz, H], same dtype, optional
        Added to the scores, edge-id order: of edge features, distances, or -inf for edges that do not count.
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
    Tensor [num_rows, H, F]; 0 for rows without edges. A row whose scores are all -inf is NaN, as torch.softmax has it.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape, device or dropout, or an edge_scale that asks for a
        gradient (compose `sddmm`, `edge_softmax` and `spmm` for that).

    Notes
    -----
    Keeps nothing per edge: the backward, one pass over the edges for key and value and one for query, recomputes the
    probabilities from two numbers per row and head. Between its two passes it has [nnz, H] where that is at most
    four times the size of the result, or is the gradient of edge_bias. In bfloat16 on the CPU, for heads of
    more than 1,024 bytes on CUDA, and where a second derivative is asked for, the op is composed of `sddmm`,
    `edge_softmax` and `spmm`, which store [nnz, H]. 16-bit features accumulate in fp32. Deterministic, but a CUDA
    graph's results change once in the last bits when it earns its work list (see `gnnaccel.prepare`).
    Source: Vaswani et al., Attention Is All You Need, 2017; Milakov and Gimelshein, Online normalizer calculation for
    softmax, 2018.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x = torch.tensor([[[2.0]], [[4.0]]])
    >>> gnnaccel.ops.dot_attention(g, torch.zeros(2, 1, 1), x, x)[0]
    tensor([[3.]])
    """
    _check.graph("dot_attention", graph)
    given = {"query": (query, graph.num_rows), "key": (key, graph.num_cols), "value": (value, graph.num_cols)}
    for name, (tensor, count) in given.items():
        per = "graph.num_rows, one per destination" if name == "query" else "graph.num_cols, one per source"
        _check.feature("dot_attention", name, tensor, count, per, graph.device)
        if tensor.dim() != 3:
            raise ValueError(
                f"dot_attention: {name}: expected shape [{count}, heads, features], got {tuple(tensor.shape)}"
            )
        _check.features_of("dot_attention", name, tensor, query.shape[1:])
    scale = max(query.shape[2], 1) ** -0.5 if scale is None else float(scale)
    factor = edge_factor("dot_attention", graph, query.shape[1], edge_scale, dropout, seed)
    return softmax_sum("dot_attention", graph, query, key, value, edge_bias, factor, scale)


def softmax_sum(
    op: str,
    graph: Graph,
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    edge_bias: Tensor | None,
    factor: EdgeFactor,
    scale: float,
) -> Tensor:
    """`dot_attention` of checked features; without query and key the scores are edge_bias."""
    bias_name = "scores" if query is None else "edge_bias"
    if query is None or edge_bias is not None:
        _check.feature(op, bias_name, edge_bias, graph.nnz, "graph.nnz, one per edge", graph.device)
        assert edge_bias is not None
        _check.features_of(op, bias_name, edge_bias, value.shape[1:2])
    others = {"query": query, "key": key, bias_name: edge_bias, "edge_scale": factor.scale}
    for name, other in others.items():
        if other is not None:
            value, _ = _check.same_dtype(op, value, other, "value", name)  # under autocast the widest
    query, key, edge_bias = (None if t is None else t.to(value.dtype) for t in (query, key, edge_bias))
    factor = factor.to(value.dtype)
    # The gradient of the query alone needs no transposed graph: it takes the pass over the rows.
    arrays = arrays_of(graph, needs_grad(key, value, edge_bias), value)
    if not _fuses(graph, query, value, edge_bias):
        return _composed(arrays, query, key, value, edge_bias, factor, scale)
    return dot_attention_op(arrays, query, key, value, edge_bias, *factor, scale)[0]


def _fuses(graph: Graph, query: Tensor | None, value: Tensor, edge_bias: Tensor | None) -> bool:
    if value.dtype not in FUSED_DTYPES["cuda" if value.is_cuda else "cpu"]:
        return False
    if query is None:
        # A backward in one pass over the columns reads scores and writes their gradients at random: H200,
        # reddit-like:sorted, 10.2 and 14.5 ms at 1x32 and 1x128; by the ops, which walk the rows, 4.8 and 11.9. The
        # ops with weights made again, instead of kept, took 5 to 10 % longer than these.
        head_bytes = value.shape[2] * value.element_size()
        return not (value.is_cuda and (needs_grad(value, edge_bias) or shorter_by_parts(graph, head_bytes)))
    return not value.is_cuda or value.shape[2] * value.element_size() <= bounds.DOT_HEAD_BYTES


def _composed(arrays: Structure, query, key, value, edge_bias, factor: EdgeFactor, scale) -> Tensor:
    scores = edge_bias
    if query is not None:
        dots = sddmm_op(arrays, key, query * scale, "dot", "u", "v").squeeze(-1)
        scores = dots if edge_bias is None else dots + edge_bias
    return weighted_sum(arrays, scores, value, factor)


# The tensors of a DotAttention (types.h), before and after its EdgeFactor.
_BEFORE = ("query", "key", "value", "edge_bias")
_AFTER = ("out", "stats", "ends", "grad_out", "grad_query", "grad_key", "grad_value", "grad_scores")


def _launch(arrays: Structure, scale: float, *, value: Tensor, factor: EdgeFactor, **tensors: Tensor | None) -> None:
    """Run the direction that the tensors given stand for."""
    tensors["value"] = value
    before, after = ([lib.pointer(tensors.get(name)) for name in names] for names in (_BEFORE, _AFTER))
    sizes = (value.shape[1], value.shape[1] * value.shape[2], lib.DTYPES[value.dtype])
    given = (*before, factor.pointers(), *after, scale, *sizes)
    lib.launch("dot_attention", value.device, *arrays.listed(), given)


def _scalars(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=lib.accumulator(x))


def _contiguous(query, key, value, edge_bias, *factor) -> tuple[dict[str, Tensor | None], EdgeFactor]:
    """Inputs as the kernels take them."""
    heads = {"query": query, "key": key, "value": value}
    given = {name: None if t is None else aligned_heads(t) for name, t in heads.items()}
    given["edge_bias"] = None if edge_bias is None else edge_bias.contiguous()
    return given, EdgeFactor._make(factor).contiguous()


def _impl(arrays, *args):
    *inputs, scale = args
    feats = inputs[2].shape[2]
    if arrays.num_rows * inputs[2].shape[1:].numel() == 0:
        return tuple(t.zero_() for t in _outputs(arrays.num_rows, inputs[0], inputs[2]))
    given, factor = _contiguous(*inputs)
    if _moves(arrays, given["edge_bias"], given["value"], factor) and (ordered := try_empty_like(given["edge_bias"])):
        given["edge_bias"] = gather_edge_values(given["edge_bias"], arrays.edge_ids, *ordered)
        arrays = arrays.by_nonzero()
    out, stats = _outputs(arrays.num_rows, given["query"], given["value"])
    _launch(arrays, scale, factor=factor, **given, out=out, stats=stats)
    return unpadded(out, feats), stats


def _moves(arrays: Structure, bias: Tensor | None, value: Tensor, factor: EdgeFactor) -> bool:
    """True if scores are to be brought in order; not beside factors, which go by edge ids: a dropout is of an edge."""
    if bias is None or not factor.is_one:
        return False
    row_bytes = math.prod(value.shape[1:]) * value.element_size()
    return is_profitable(arrays.edge_ids, bias, row_bytes, bias.shape[1] == 1 or dense(arrays.nnz, arrays.num_rows))


def _outputs(num_rows: int, query: Tensor | None, value: Tensor) -> tuple[Tensor, Tensor]:
    kept = 0 if query is None and value.is_cuda else num_rows  # stats, which that backward does not ask for
    return value.new_empty(num_rows, *value.shape[1:]), _scalars(value, kept, value.shape[1], 2)


def _fake(arrays, query, _key, value, *_):
    return _outputs(arrays.num_rows, query, value)


def _backward_impl(arrays, *args):
    *inputs, out, stats, grad_out, scale, of_query, of_sources, of_bias = args
    feats = inputs[2].shape[2]
    if out.numel() == 0:
        return tuple(t.zero_() for t in _backward_fake(arrays, *args))
    given, factor = _contiguous(*inputs)
    value = given["value"]
    out, grad_out = aligned_heads(out), aligned_heads(grad_out)
    rows, (heads, width) = arrays.num_rows, value.shape[1:]
    ends = _scalars(value, rows, heads, 4)
    pointers = (lib.pointer(t) for t in (out, stats.contiguous(), grad_out, ends))
    lib.launch("dot_attention_ends", value.device, *pointers, rows, heads, heads * width, lib.DTYPES[value.dtype])
    given |= {"ends": ends, "grad_out": grad_out}
    grads: dict[str, Tensor | None] = dict.fromkeys(("grad_query", "grad_key", "grad_value", "grad_scores"))
    if of_sources or of_bias:
        grads["grad_value"] = torch.empty_like(value)
        grads["grad_key"] = None if given["key"] is None else torch.empty_like(value)
        if of_bias or (of_query and arrays.nnz <= bounds.SCORES_KEPT * rows * width):
            grads["grad_scores"] = value.new_empty(arrays.nnz, heads)
        _launch(arrays.transposed(), scale, factor=factor, **given, **grads)
    if of_query and grads["grad_scores"] is not None:
        grad = spmm_op(arrays, given["key"], grads["grad_scores"].unsqueeze(-1), "mul", "sum", 0.0)
        grads["grad_query"] = grad if given["edge_bias"] is None else grad.mul_(scale)
    elif of_query:
        grads["grad_query"] = torch.empty_like(given["query"])
        _launch(arrays, scale, factor=factor, **given, grad_query=grads["grad_query"])
    features = (None if g is None else unpadded(g, feats) for g in list(grads.values())[:3])
    grad_bias = grads["grad_scores"] if of_bias else None
    return tuple(value.new_empty(0) if g is None else g for g in (*features, grad_bias))


def _backward_fake(_arrays, query, key, value, edge_bias, *rest):
    of_query, of_sources, of_bias = rest[-3:]
    wanted = ((query, of_query), (key, of_sources), (value, of_sources), (edge_bias, of_bias))
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and w else value.new_empty(0)
        for t, w in wanted
    )


def _setup_context(ctx, inputs, output):
    arrays, *tensors, ctx.dropout, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    _arrays.save(ctx, arrays, *tensors, *output)


def _backward(ctx, grad_out, _):
    if grad_out is None:
        return (None,) * 8
    arrays, (query, key, value, edge_bias, edge_scale, seed, *output) = _arrays.saved(ctx)
    inputs, factor = (query, key, value, edge_bias), EdgeFactor(edge_scale, seed, ctx.dropout)
    # A second derivative is wanted, or there is no kernel: differentiate the composition instead.
    if torch.is_grad_enabled() or (query is None and value.is_cuda):
        composed = partial(_composed, arrays, factor=factor, scale=ctx.scale)
        grads = _arrays.gradients(composed, inputs, ctx.wanted[:4], grad_out)
    else:
        of_query, of_key, of_value, of_bias = ctx.wanted[:4]
        asked = (of_query, of_key or of_value, of_bias)
        grads = dot_attention_backward_op(arrays, *inputs, *factor, *output, grad_out, ctx.scale, *asked)
        grads = tuple(g if w else None for g, w in zip(grads, ctx.wanted, strict=False))
    return *grads, None, None, None, None


def _check_inputs(graph, query, key, value, edge_bias, edge_scale, seed, *_rest, op="dot_attention"):
    device, dtypes = graph.device, FUSED_DTYPES[graph.device.type]
    heads, feats = _check.heads_of(op, "value", value, graph.num_cols, device, dtypes)
    if (query is None) != (key is None) or (query is None and edge_bias is None):
        raise ValueError(f"{op}: expected query and key, or edge_bias without both")
    if query is not None:
        _check.exactly(op, "query", query, (graph.num_rows, heads, feats), value.dtype, device)
        _check.exactly(op, "key", key, (graph.num_cols, heads, feats), value.dtype, device)
        if value.is_cuda and feats * value.element_size() > bounds.DOT_HEAD_BYTES:
            raise ValueError(
                f"{op}: expected heads of at most {bounds.DOT_HEAD_BYTES} bytes, got {feats} {value.dtype}"
            )
    if edge_bias is not None:
        _check.exactly(op, "edge_bias", edge_bias, (graph.nnz, heads), value.dtype, device)
    _edge_factor.check_factor(op, graph, value, edge_scale, seed)


def _check_saved(graph, query, key, value, edge_bias, edge_scale, seed, dropout, *saved):
    op, (out, stats, grad_out, *_) = "dot_attention_backward", saved
    _check_inputs(graph, query, key, value, edge_bias, edge_scale, seed, dropout, op=op)
    shape = (graph.num_rows, *value.shape[1:])
    _check.exactly(op, "out", out, shape, value.dtype, graph.device)
    _check.exactly(op, "grad_out", grad_out, shape, value.dtype, graph.device)
    _check.exactly(op, "stats", stats, (*shape[:2], 2), lib.accumulator(value), graph.device)


dot_attention_backward_op = _operators.register(
    "dot_attention_backward",
    f"({_arrays.SCHEMA}, {_INPUTS}, Tensor out, Tensor stats, Tensor grad_out, float scale, bool of_query, "
    "bool of_sources, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
    check=_check_saved,
    structure=Structure,
)
# out, and what the backward reads beside it: stats [num_rows, H, 2], the row's maximum and one over its sum.
dot_attention_op = _operators.register(
    "dot_attention",
    f"({_arrays.SCHEMA}, {_INPUTS}, float scale) -> (Tensor, Tensor)",
    _impl,
    _fake,
    check=_check_inputs,
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
