"""Attention and its gradients by the shortest way to the kernels: features that need no copy, no dropout of an op's
own. The registered ops (attention.py, gatv2.py, dot_attention.py) give the same bits.

What is called `scale` here is an edge_scale, or None. `saved` is what a forward returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops.spmm import spmm_op

_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.float64)  # whose sums are of their own dtype


def as_they_lie(x: Tensor, *others: Tensor | None) -> bool:
    """True of features x [.., H, F] that kernels read where they are, and others beside them."""
    if x.is_cuda:  # in vectors of 16 bytes
        if x.shape[-1] * x.element_size() % 16:
            return False
        return all(t is None or (t.is_contiguous() and not t.data_ptr() % 16) for t in (x, *others))
    if x.shape[-1] % 4 or x.dtype not in _DTYPES or not x.is_contiguous():
        return False
    for t in others:  # noqa: SIM110 - all() takes longer
        if t is not None and not t.is_contiguous():
            return False
    return True


def _place(x: Tensor) -> tuple[torch.device, Tensor]:
    """The device, and a tensor of the dtype of sums."""
    if not x.is_cuda:
        return _CPU, x
    return x.device, x if x.dtype in _DTYPES else x.new_empty(0, dtype=torch.float32)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def gat(arrays: Structure, x: Tensor, vectors: Tensor, scale: Tensor | None, slope: float, keep: bool) -> tuple:
    """scores of sources and destinations, out, lse, and out_pos and p_pos, empty unless they are to be kept; `vectors`
    are those of both scores, [2, H, F]."""
    (rows, heads, feats), dtype = x.shape, lib.DTYPES[x.dtype]
    kept, sizes, (device, like) = rows if keep else 0, (heads, heads * feats, dtype), _place(x)
    scores, lse, p_pos = like.new_empty(2, rows, heads), like.new_empty(rows, heads), like.new_empty(kept, heads)
    out, out_pos = torch.empty_like(x), x.new_empty(kept, heads, feats)
    at, scores_at = x.data_ptr(), scores.data_ptr()
    lib.launch("head_dots", device, at, vectors.data_ptr(), scores_at, rows, 2, *sizes)
    given = (at, scores_at, scores_at + rows * heads * scores.element_size(), (_address(scale), 0, 0.0))
    made = (out.data_ptr(), lse.data_ptr(), out_pos.data_ptr() if keep else 0, p_pos.data_ptr() if keep else 0)
    lib.launch("attention", device, *arrays.listed(), *given, *made, slope, *sizes)
    return scores, out, lse, out_pos, p_pos


def gat_gradients(
    arrays: Structure, x: Tensor, vectors: Tensor, scale: Tensor | None, saved: tuple, grad: Tensor, slope: float
) -> tuple:
    """Gradients of x and of the vectors."""
    scores, *kept = saved
    (rows, heads, feats), dtype = x.shape, lib.DTYPES[x.dtype]
    sizes, step = (heads, heads * feats, dtype), rows * heads * scores.element_size()
    device = x.device if x.is_cuda else _CPU
    grad_x, grad_scores, grad_vectors = map(torch.empty_like, (x, scores, vectors))
    at, scores_at, grads_at = x.data_ptr(), scores.data_ptr(), grad_scores.data_ptr()
    given = (at, scores_at, scores_at + step, (_address(scale), 0, 0.0), *[t.data_ptr() for t in kept], grad.data_ptr())
    made = (grad_x.data_ptr(), grads_at, grads_at + step)
    lib.launch("attention_backward", device, *arrays.transposed().listed(), *given, *made, slope, *sizes)
    sums = (grad_x.data_ptr(), grad_vectors.data_ptr(), True)
    lib.launch("head_dots_backward", device, at, vectors.data_ptr(), grads_at, *sums, rows, 2, *sizes)
    return grad_x, grad_vectors


def dot(arrays: Structure, query: Tensor, key: Tensor, value: Tensor, scale: Tensor | None, factor: float) -> tuple:
    """out and stats of `dot_attention`, whose dot products are multiplied with `factor`."""
    (rows, heads, feats), dtype = query.shape, lib.DTYPES[query.dtype]
    device, like = _place(query)
    out, stats = torch.empty_like(query), like.new_empty(rows, heads, 2)
    before = (query.data_ptr(), key.data_ptr(), value.data_ptr(), 0, (_address(scale), 0, 0.0))
    after = (out.data_ptr(), stats.data_ptr(), 0, 0, 0, 0, 0, 0)
    given = (*before, *after, factor, heads, heads * feats, dtype)
    lib.launch("dot_attention", device, *arrays.listed(), given)
    return out, stats


def dot_gradients(arrays: Structure, inputs: tuple, saved: tuple, grad: Tensor, factor: float, few: int) -> tuple:
    """Gradients of query, key and value; inputs: these and the scale. `few`: as in dot_attention.py."""
    query, key, value, scale = inputs
    out, stats = saved
    (rows, heads, feats), dtype = query.shape, lib.DTYPES[query.dtype]
    (device, like), sizes = _place(query), (heads, heads * feats, dtype)
    ends, stats_at, grad_at = like.new_empty(rows, heads, 4), stats.data_ptr(), grad.data_ptr()
    ends_at, key_at = ends.data_ptr(), key.data_ptr()
    lib.launch("dot_attention_ends", device, out.data_ptr(), stats_at, grad_at, ends_at, rows, *sizes)
    grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
    scores = query.new_empty(arrays.nnz, heads) if arrays.nnz <= few * rows * feats else None
    before = (query.data_ptr(), key_at, value.data_ptr(), 0, (_address(scale), 0, 0.0), 0, 0, ends_at, grad_at)
    after = (0, grad_key.data_ptr(), grad_value.data_ptr(), _address(scores))
    lib.launch("dot_attention", device, *arrays.transposed().listed(), (*before, *after, factor, *sizes))
    if scores is not None and query.is_cuda:  # with an eye to the order of edges
        return spmm_op.impl(arrays, key, scores.unsqueeze(-1), "mul", "sum", 0.0), grad_key, grad_value
    grad_query = torch.empty_like(query)
    query_at = grad_query.data_ptr()
    if scores is None:
        lib.launch("dot_attention", device, *arrays.listed(), (*before, query_at, 0, 0, 0, factor, *sizes))
        return grad_query, grad_key, grad_value
    operands = (key_at, heads * feats, 1), (scores.data_ptr(), heads, feats)
    codes = (lib.MESSAGES["mul"], lib.REDUCES["sum"], dtype)
    lib.launch("spmm", _CPU, arrays.matrix(), 0, *operands, query_at, 0, 0, heads * feats, *codes, 0.0, ())
    return grad_query, grad_key, grad_value


def gatv2(arrays: Structure, x: Tensor, y: Tensor, vectors: Tensor, scale: Tensor | None, slope: float) -> tuple:
    """scores, out and stats."""
    (_, heads, feats), dtype, graph = x.shape, lib.DTYPES[x.dtype], arrays.matrix()
    scores, rows = x.new_empty(arrays.nnz, heads), arrays.num_rows
    out, stats = x.new_empty(rows, heads, feats), x.new_empty(rows, heads, 2)
    sizes, at, scores_at = (heads, heads * feats, dtype), x.data_ptr(), scores.data_ptr()
    lib.launch("gatv2_scores", _CPU, graph, at, y.data_ptr(), vectors.data_ptr(), scores_at, slope, *sizes)
    after = (out.data_ptr(), stats.data_ptr(), 0, 0, 0, 0, 0, 0)
    lib.launch("dot_attention", _CPU, graph, (0, 0, at, scores_at, (_address(scale), 0, 0.0), *after, 1.0, *sizes))
    return scores, out, stats


def gatv2_gradients(arrays: Structure, inputs: tuple, saved: tuple, grad: Tensor, slope: float, needed: tuple) -> list:
    """Gradients of x, y and vectors as far as they are `needed`; inputs: these and the scale."""
    x, y, vectors, scale = inputs
    scores, out, stats = saved
    (_, heads, feats), dtype = x.shape, lib.DTYPES[x.dtype]
    rows, transposed, sizes = arrays.num_rows, arrays.transposed().matrix(), (heads, heads * feats, dtype)
    ends, grad_scores, grad_x = x.new_empty(rows, heads, 4), torch.empty_like(scores), torch.empty_like(x)
    x_at, y_at, vectors_at, weights_at = x.data_ptr(), y.data_ptr(), vectors.data_ptr(), grad_scores.data_ptr()
    grad_at, ends_at, stats_at = grad.data_ptr(), ends.data_ptr(), stats.data_ptr()
    lib.launch("dot_attention_ends", _CPU, out.data_ptr(), stats_at, grad_at, ends_at, rows, *sizes)
    factor, after = (_address(scale), 0, 0.0), (0, 0, ends_at, grad_at, 0, 0, grad_x.data_ptr(), weights_at)
    lib.launch("dot_attention", _CPU, transposed, (0, 0, x_at, scores.data_ptr(), factor, *after, 1.0, *sizes))
    grad_y = grad_vectors = None
    if needed[0]:
        more = torch.empty_like(x)
        lib.launch(
            "gatv2_sums", _CPU, transposed, y_at, x_at, vectors_at, weights_at, more.data_ptr(), 0, slope, *sizes
        )
        grad_x.add_(more)
    if needed[1] or needed[2]:
        grad_y, products = torch.empty_like(y), torch.empty_like(y) if needed[2] else None
        given = (x_at, y_at, vectors_at, weights_at, grad_y.data_ptr(), _address(products))
        lib.launch("gatv2_sums", _CPU, arrays.matrix(), *given, slope, *sizes)
        grad_vectors = None if products is None else products.sum(0)
    return [grad_x if needed[0] else None, grad_y if needed[1] else None, grad_vectors]
