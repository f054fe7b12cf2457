"""The edge scores of GATv2, without a value per edge and feature."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check, reference
from gnnaccel.ops._arrays import Structure, arrays_of, needs_grad
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops._described import Described
from gnnaccel.ops._edge_factor import FUSED_DTYPES
from gnnaccel.ops._edge_order import dense, gather_edge_values, is_profitable, scatter_edge_values, try_empty_like
from gnnaccel.ops._features import aligned_heads
from gnnaccel.ops.sddmm import sddmm

_INPUTS = "Tensor x, Tensor y, Tensor vectors"


def gatv2_scores(graph: Graph, x: Tensor, y: Tensor, vectors: Tensor, *, negative_slope: float = 0.2) -> Tensor:
    """Attention scores of GATv2: out[e, h] = <vectors[h], leaky_relu(x[u, h] + y[v, h], negative_slope)>, e = (u, v).

    Parameters
    ----------
    graph : Graph
    x : Tensor [num_cols, H, F]
        Features of the sources: float32, float64, bfloat16; float16 on CUDA.
    y : Tensor [num_rows, H, F], same dtype
    vectors : Tensor [H, F], same dtype
    negative_slope : float
        Slope of leaky_relu below zero.

    Returns
    -------
    Tensor [nnz, H]
        In edge-id order.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape or device.

    Notes
    -----
    One pass over the edges forward; the backward is one for each of x and y, the latter's also for the vectors, with
    one more tensor of its size. In bfloat16 on the CPU, and where a second derivative is asked for, it goes through
    [nnz, H, F]. 16-bit features accumulate in fp32. Deterministic, but a CUDA graph's gradients change once in the last
    bits when it earns its work list (see `gnnaccel.prepare`).
    Source: Brody, Alon and Yahav, How Attentive are Graph Attention Networks?, ICLR 2022.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x, y = torch.tensor([[[2.0]], [[-3.0]]]), torch.tensor([[[1.0]], [[0.0]]])
    >>> gnnaccel.ops.gatv2_scores(g, x, y, torch.tensor([[10.0]]), negative_slope=0.5)
    tensor([[ 30.],
            [-10.]])
    """
    _check.graph("gatv2_scores", graph)
    _check.feature("gatv2_scores", "x", x, graph.num_cols, "graph.num_cols, one per source", graph.device)
    if x.dim() != 3:
        raise ValueError(f"gatv2_scores: x: expected shape [num_cols, heads, features], got {tuple(x.shape)}")
    heads, feats = x.shape[1:]
    _check.feature("gatv2_scores", "y", y, graph.num_rows, "graph.num_rows, one per destination", graph.device)
    _check.feature("gatv2_scores", "vectors", vectors, heads, "heads", graph.device)
    for name, value, shape in (("y", y, (heads, feats)), ("vectors", vectors, (feats,))):
        _check.features_of("gatv2_scores", name, value, shape)
        x, _ = _check.same_dtype("gatv2_scores", x, value, "x", name)  # under autocast x ends up in the widest
    y, vectors = y.to(x.dtype), vectors.to(x.dtype)
    if x.dtype == torch.bfloat16 and not x.is_cuda:
        value = torch.nn.functional.leaky_relu(sddmm(graph, x, y, "add", "u", "v"), negative_slope)
        return (value * vectors).sum(-1)
    return scores_op(arrays_of(graph, needs_grad(x), x), x, y, vectors, negative_slope)


def _scores_impl(arrays, x, y, vectors, slope):
    out = x.new_empty(arrays.nnz, x.shape[1])
    if x.shape[2] == 0:
        return out.zero_()
    if out.numel() == 0:
        return out
    by_row = try_empty_like(out) if _moves(arrays, x, out) else []
    edge_ids, arrays = arrays.edge_ids, arrays.by_nonzero() if by_row else arrays
    made = (*by_row, out)[0]
    x, y, vectors = (aligned_heads(t) for t in (x, y, vectors))
    pointers = (lib.pointer(t) for t in (x, y, vectors, made))
    lib.launch("gatv2_scores", x.device, *arrays.listed(), *pointers, slope, *_sizes(x))
    return scatter_edge_values(made, edge_ids, out) if by_row else out


def _moves(arrays: Structure, x: Tensor, edges: Tensor) -> bool:
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    return is_profitable(arrays.edge_ids, edges, row_bytes, x.shape[1] == 1 and dense(arrays.nnz, arrays.num_rows))


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.shape[1], x.shape[1] * x.shape[2], lib.DTYPES[x.dtype]


def _scores_fake(arrays, x, *_):
    return x.new_empty(arrays.nnz, x.shape[1])


def _sums_impl(arrays, x, y, vectors, weights, slope, products):
    feats = y.shape[2]
    if y.numel() == 0:
        return tuple(t.zero_() for t in _sums_fake(arrays, x, y, products))
    x, y, vectors = (aligned_heads(t) for t in (x, y, vectors))
    weights = weights.to(lib.accumulator(y)).contiguous()
    if _moves(arrays, x, weights) and (ordered := try_empty_like(weights)):
        weights, arrays = gather_edge_values(weights, arrays.edge_ids, *ordered), arrays.by_nonzero()
    outs = torch.empty_like(y), torch.empty_like(y, dtype=lib.accumulator(y)) if products else None
    pointers = (lib.pointer(t) for t in (x, y, vectors, weights, *outs))
    lib.launch("gatv2_sums", y.device, *arrays.listed(), *pointers, slope, *_sizes(y))
    return tuple(y.new_empty(0, dtype=lib.accumulator(y)) if t is None else t[..., :feats].contiguous() for t in outs)


def _sums_fake(_arrays, _x, y, *rest):
    products = rest[-1]
    return y.new_empty(y.shape), y.new_empty(y.shape if products else (0,), dtype=lib.accumulator(y))


def _check_ends(graph, x, y, vectors, *_rest, op="gatv2_scores"):
    heads, feats = _check.heads_of(op, "x", x, graph.num_cols, graph.device, FUSED_DTYPES[graph.device.type])
    _check.exactly(op, "y", y, (graph.num_rows, heads, feats), x.dtype, graph.device)
    _check.exactly(op, "vectors", vectors, (heads, feats), x.dtype, graph.device)


def _check_weights(graph, x, y, vectors, weights, *_rest, op="gatv2_sums"):
    _check_ends(graph, x, y, vectors, op=op)
    dtype = x.dtype if weights.dtype is x.dtype else lib.accumulator(x)  # as the softmax of a layer leaves them
    _check.exactly(op, "weights", weights, (graph.nnz, x.shape[1]), dtype, graph.device)


# The gradients that gatv2_sums of kernels.h describes: of y, and for the vectors a term per row, or nothing.
sums_op = _operators.register(
    "gatv2_sums",
    f"({_arrays.SCHEMA}, {_INPUTS}, Tensor weights, float negative_slope, bool products) -> (Tensor, Tensor)",
    _sums_impl,
    _sums_fake,
    check=_check_weights,
    structure=Structure,
)


def _setup_context(ctx, inputs, output):
    arrays, x, y, vectors, ctx.negative_slope = inputs
    ctx.set_materialize_grads(False)
    _arrays.save(ctx, arrays, x, y, vectors)


def _backward(ctx, grad):
    if grad is None:
        return None, None, None, None
    arrays, (x, y, vectors) = _arrays.saved(ctx)
    if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the definition instead
        arrays = _arrays.made(arrays, False, ()) if type(arrays) is Described else arrays
        graph = Graph(arrays.indptr, arrays.indices, arrays.edge_ids, arrays.num_cols)
        scores = partial(reference.gatv2_scores, graph, negative_slope=ctx.negative_slope)
        return *_arrays.gradients(scores, (x, y, vectors), ctx.wanted[:3], grad), None
    wanted = ctx.wanted[:3]
    grads = _gradients_op(arrays, x, y, vectors, grad, ctx.negative_slope, *wanted)
    return *(g if w else None for g, w in zip(grads, wanted, strict=True)), None


def _gradients_impl(arrays, x, y, vectors, weights, slope, of_x, of_y, of_vectors):
    nothing = y.new_empty(0)
    grad_x = grad_y = grad_vectors = nothing
    weights = weights.to(lib.accumulator(y))  # once for both
    if of_y or of_vectors:
        grad_y, products = sums_op.impl(arrays, x, y, vectors, weights, slope, of_vectors)
        grad_y = grad_y if of_y else nothing
        grad_vectors = column_sums(products, y.dtype) if of_vectors else nothing
        del products  # before there is another tensor of its size
    if of_x:
        grad_x, _ = sums_op.impl(arrays.transposed(), y, x, vectors, weights, slope, False)
    return grad_x, grad_y, grad_vectors


def _gradients_fake(_arrays, x, y, vectors, _weights, _slope, *wanted):
    return tuple(t.new_empty(t.shape if w else (0,)) for t, w in zip((x, y, vectors), wanted, strict=True))


# All gradients at once: torch.compile holds the results of single ones, those for the vectors among them, together.
_gradients_op = _operators.register(
    "gatv2_scores_backward",
    f"({_arrays.SCHEMA}, {_INPUTS}, Tensor weights, float negative_slope, bool of_x, bool of_y, bool of_vectors) -> "
    "(Tensor, Tensor, Tensor)",
    _gradients_impl,
    _gradients_fake,
    check=partial(_check_weights, op="gatv2_scores_backward"),
    structure=Structure,
)


scores_op = _operators.register(
    "gatv2_scores",
    f"({_arrays.SCHEMA}, {_INPUTS}, float negative_slope) -> Tensor",
    _scores_impl,
    _scores_fake,
    check=_check_ends,
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
