"""Scaled dot-product attention over the edges of a graph in one op: scores, softmax and aggregation."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.structure import Graph
from gnnaccel.ops import _arrays, _check
from gnnaccel.ops._arrays import Arrays, arrays_of, needs_grad
from gnnaccel.ops._features import aligned_heads
from gnnaccel.ops.attention import FUSED_DTYPES, weighted_sum
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import spmm_op

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? edge_scale"
_MAX_CUDA_HEAD_BYTES = 1024  # what a worker's lanes hold of a head
# The backward writes down the gradients of the scores, [nnz, H], if they are at most so many tensors like the result:
# the gradient of the queries is then a weighted sum, and not another pass that computes them again. On CUDA for wide
# heads: H200, arxiv-like and reddit-like, 0.85 to 0.9 of the time at 256 and 512 bytes a head, 1.1 at 32 to 128.
_FEW = 4
_WIDE_HEAD_BYTES = 256


def dot_attention(
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    edge_scale: Tensor | None = None,
) -> Tensor:
    """out[v, h] = sum over edges e = (u, v) of a[e, h] * edge_scale[e, h] * value[u, h].

    a = softmax over the edges into v of scale * <query[v, h], key[u, h]>. Cosine attention (AGNN) is this op on
    normalised features, with its temperature as scale or in the query.

    Parameters
    ----------
    graph : Graph
    query : Tensor [num_rows, H, F]
        float32, float64, bfloat16; float16 on CUDA.
    key, value : Tensor [num_cols, H, F], same dtype
    scale : float, optional
        1 / sqrt(F) if not given, as in torch.nn.functional.scaled_dot_product_attention.
    edge_scale : Tensor [nnz, H], same dtype, optional
        Factor after the softmax, edge-id order: the (already scaled) mask of an attention dropout. A constant:
        it gets no gradient.

    Returns
    -------
    Tensor [num_rows, H, F]; 0 for rows without edges.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape or device, or an edge_scale that asks for a
        gradient (compose `sddmm`, `edge_softmax` and `spmm` for that).

    Notes
    -----
    Keeps nothing per edge: the backward, one pass over the edges for key and value and one for query, recomputes the
    probabilities from two numbers per row and head. Between its two passes it has [nnz, H] where that is at most
    four times the size of the result, and pays. In bfloat16 on the CPU, for heads of more than 1,024 bytes on
    CUDA, and where a second derivative is asked for, the op is composed of `sddmm`, `edge_softmax` and `spmm`, which
    store [nnz, H]. 16-bit features accumulate in fp32. Deterministic, but a CUDA graph's results change once in the
    last bits when it earns its work list (see `gnnaccel.prepare`).
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
        if tensor.dim() != 3 or tensor.shape[1:] != query.shape[1:]:
            wanted = (
                f"[{count}, heads, features]"
                if name == "query"
                else f"[{count}, {', '.join(map(str, query.shape[1:]))}]"
            )
            raise ValueError(f"dot_attention: {name}: expected shape {wanted}, got {tuple(tensor.shape)}")
    if edge_scale is not None:
        _check.feature("dot_attention", "edge_scale", edge_scale, graph.nnz, "one per edge", graph.device)
        if edge_scale.shape[1:] != query.shape[1:2]:
            raise ValueError(
                f"dot_attention: edge_scale: expected shape [{graph.nnz}, {query.shape[1]}], got "
                f"{tuple(edge_scale.shape)}"
            )
        _check.constant("dot_attention", "edge_scale", edge_scale)
    for name, other in (("key", key), ("value", value), ("edge_scale", edge_scale)):
        if other is not None:
            query, _ = _check.same_dtype("dot_attention", query, other, "query", name)  # under autocast the widest
    key, value = key.to(query.dtype), value.to(query.dtype)
    edge_scale = None if edge_scale is None else edge_scale.to(query.dtype)
    scale = max(query.shape[2], 1) ** -0.5 if scale is None else float(scale)
    # The gradient of the query alone needs no transposed graph: it takes the pass over the rows.
    arrays = arrays_of(graph, needs_grad(key, value), value)
    if not _fuses(query):
        return _composed(arrays, query, key, value, edge_scale, scale)
    return _dot_attention_op(*arrays, query, key, value, edge_scale, scale)[0]


def _fuses(query: Tensor) -> bool:
    if query.dtype not in FUSED_DTYPES["cuda" if query.is_cuda else "cpu"]:
        return False
    return not query.is_cuda or query.shape[2] * query.element_size() <= _MAX_CUDA_HEAD_BYTES


def _composed(arrays: Arrays, query, key, value, edge_scale, scale) -> Tensor:
    scores = sddmm_op(*arrays, key, query * scale, "dot", "u", "v").squeeze(-1)
    return weighted_sum(arrays, scores, value, edge_scale)


def _launch(name: str, arrays: Arrays, query: Tensor, tensors, scale: float) -> None:
    """Run kernel `name`; `tensors` as it takes them, query one of them."""
    heads, width = query.shape[1], query.shape[1] * query.shape[2]
    pointers = (lib.pointer(t) for t in tensors)
    matrix = (*arrays.matrix(), *arrays.work_list())
    lib.launch(name, query.device, *matrix, *pointers, scale, heads, width, lib.DTYPES[query.dtype])


def _scalars(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _impl(*args):
    arrays, (query, key, value, edge_scale, scale) = _arrays.split(args)
    feats = query.shape[2]
    stats = _scalars(query, *query.shape[:2], 2)
    if query.numel() == 0:
        return torch.zeros_like(query), stats.zero_()
    query, key, value = map(aligned_heads, (query, key, value))
    edge_scale = None if edge_scale is None else edge_scale.contiguous()
    out = torch.empty_like(query)
    _launch("dot_attention", arrays, query, (query, key, value, edge_scale, out, stats), scale)
    return _unpadded(out, feats), stats


def _unpadded(x: Tensor, feats: int) -> Tensor:
    return x if x.shape[2] == feats else x[..., :feats].contiguous()


def _writes_down(arrays: Arrays, query: Tensor) -> bool:
    rows, _, width = query.shape
    wide = not query.is_cuda or width * query.element_size() >= _WIDE_HEAD_BYTES
    return wide and arrays.nnz <= _FEW * rows * width


def _backward_impl(*args):
    arrays, (query, key, value, edge_scale, out, stats, grad_out, scale, of_query, of_sources) = _arrays.split(args)
    feats = query.shape[2]
    if query.numel() == 0:
        return tuple(map(torch.zeros_like, (query, key, value)))
    query, key, value, out, grad_out = map(aligned_heads, (query, key, value, out, grad_out))
    edge_scale = None if edge_scale is None else edge_scale.contiguous()
    rows, heads, width = query.shape
    ends = _scalars(query, rows, heads, 4)
    given = (lib.pointer(t) for t in (out, stats.contiguous(), grad_out, ends))
    lib.launch("dot_attention_ends", query.device, *given, rows, heads, heads * width, lib.DTYPES[query.dtype])
    inputs = (query, key, value, edge_scale, ends, grad_out)
    grad_query = grad_key = grad_value = grad_dots = None
    if of_sources:
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        if of_query and _writes_down(arrays, query):
            grad_dots = query.new_empty(arrays.nnz, heads)
        columns = (*inputs, grad_key, grad_value, grad_dots)
        _launch("dot_attention_backward_columns", arrays.turned(), query, columns, scale)
    if grad_dots is not None:
        grad_query = spmm_op(*arrays, key, grad_dots.unsqueeze(-1), "mul", "sum", 0.0)
    elif of_query:
        grad_query = torch.empty_like(query)
        _launch("dot_attention_backward_rows", arrays, query, (*inputs, grad_query), scale)
    grads = (grad_query, grad_key, grad_value)
    return tuple(query.new_empty(0) if g is None else _unpadded(g, feats) for g in grads)


def _fake(*args):
    _, (query, *_) = _arrays.split(args)
    return torch.empty_like(query, memory_format=torch.contiguous_format), _scalars(query, *query.shape[:2], 2)


def _backward_fake(*args):
    _, (query, key, value, *_, of_query, of_sources) = _arrays.split(args)
    wanted = ((query, of_query), (key, of_sources), (value, of_sources))
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) if w else t.new_empty(0) for t, w in wanted)


def _setup_context(ctx, inputs, output):
    arrays, (*tensors, ctx.scale) = _arrays.split(inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    _arrays.save(ctx, arrays, *tensors, *output)


def _backward(ctx, grad_out, _):
    if grad_out is None:
        return None, None, None, None, None
    arrays, (query, key, value, edge_scale, out, stats) = _arrays.saved(ctx)
    if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the composition instead
        # Fresh aliases: one tensor may be several of these, and each has a gradient of its own.
        inputs = [t.view_as(t) if w else t.detach() for t, w in zip((query, key, value), ctx.wanted, strict=False)]
        wanted = [t for t in inputs if t.requires_grad]
        result = _composed(arrays, *inputs, edge_scale, ctx.scale)
        found = iter(torch.autograd.grad(result, wanted, grad_out, create_graph=True))
        grads = tuple(next(found) if t.requires_grad else None for t in inputs)
    else:
        of_query, of_sources = ctx.wanted[0], ctx.wanted[1] or ctx.wanted[2]
        saved = (query, key, value, edge_scale, out, stats)
        grads = _backward_op(*arrays, *saved, grad_out, ctx.scale, of_query, of_sources)
        grads = tuple(g if w else None for g, w in zip(grads, ctx.wanted, strict=False))
    return *grads, None, None


_backward_op = _operators.register(
    "dot_attention_backward",
    f"({_arrays.SCHEMA}, {_INPUTS}, Tensor out, Tensor stats, Tensor grad_out, float scale, bool of_query, "
    "bool of_sources) -> (Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
# out, and what the backward reads beside it: stats [num_rows, H, 2], the row's maximum and one over its sum.
_dot_attention_op = _operators.register(
    "dot_attention",
    f"({_arrays.SCHEMA}, {_INPUTS}, float scale) -> (Tensor, Tensor)",
    _impl,
    _fake,
    structure=_arrays.COUNT,
    backward=_backward,
    setup_context=_setup_context,
)
