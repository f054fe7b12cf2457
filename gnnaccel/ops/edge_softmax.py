"""Softmax of edge scores over the edges of each destination (or source)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check
from gnnaccel.ops._arrays import Structure, arrays_of
from gnnaccel.ops._edge_order import dense, gather_edge_values, is_profitable, scatter_edge_values, try_empty_like
from gnnaccel.ops.ready_softmax import softmax_of
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import spmm_op


def edge_softmax(graph: Graph, scores: Tensor, norm_by: str = "dst") -> Tensor:
    """out[e] = exp(scores[e] - m) / sum over the edges e' of the same node of exp(scores[e'] - m).

    m is the maximum over those edges, so large scores are safe. A row whose scores are all -inf gives NaN, as
    torch.softmax does.

    Parameters
    ----------
    graph : Graph
    scores : Tensor [nnz, *H], edge-id order
        float32, float64, bfloat16; float16 on CUDA.
    norm_by : {"dst", "src"}
        Normalise over the edges into each destination, or out of each source.

    Returns
    -------
    Tensor [nnz, *H], edge-id order.

    Raises
    ------
    TypeError, ValueError
        For a wrong type, dtype, shape, device or option.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> gnnaccel.ops.edge_softmax(g, torch.zeros(2))
    tensor([0.5000, 0.5000])
    """
    _check.graph("edge_softmax", graph)
    _check.one_of("edge_softmax", "norm_by", norm_by, ("dst", "src"))
    graph = graph if norm_by == "dst" else graph.transposed
    if (out := made_ready(graph, scores)) is not None:
        return out
    _check.feature("edge_softmax", "scores", scores, graph.nnz, "one per edge", graph.device)
    return choose(graph, scores)


def made_ready(graph: Graph, scores) -> Tensor | None:
    """`edge_softmax` by "dst" of scores without a check yet, by the short way; None: they cannot go it."""
    return softmax_of(graph, scores, _gradient)


def _gradient(graph: Graph, out: Tensor, grad: Tensor) -> Tensor:
    return edge_softmax_backward_op(arrays_of(graph, False, listed=False), out, grad)


def choose(graph: Graph, scores: Tensor) -> Tensor:
    """`edge_softmax` of checked scores, by "dst"."""
    return edge_softmax_op(arrays_of(graph, False, listed=False), scores)


def _launch(name: str, arrays: Structure, *inputs: Tensor) -> Tensor:
    out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    edge_ids = arrays.edge_ids
    moves = is_profitable(edge_ids, out, 0, dense(arrays.nnz, arrays.num_rows))
    if edge_ids is not None and moves and (by_row := try_empty_like(out, len(inputs))):
        *ordered, made = out, *by_row  # out is free until the end
        inputs = tuple(gather_edge_values(t, edge_ids, to) for t, to in zip(inputs, ordered, strict=True))
        _run(name, arrays.by_nonzero(), inputs, made)
        return scatter_edge_values(made, edge_ids, out)
    _run(name, arrays, tuple(t.contiguous() for t in inputs), out)
    return out


def _run(name: str, arrays: Structure, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    pointers = (t.data_ptr() for t in (*inputs, out))
    lib.launch(name, out.device, arrays.matrix(), *pointers, math.prod(out.shape[1:]), lib.DTYPES[out.dtype])


def _impl(arrays, scores):
    return _launch("edge_softmax", arrays, scores)


def _backward_impl(arrays, out, grad_out):
    return _launch("edge_softmax_backward", arrays, out, grad_out)


def _fake(_arrays, scores):
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _backward_fake(_arrays, out, _grad_out):
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    _arrays.save(ctx, inputs[0], output)


def _backward(ctx, grad):
    arrays, (out,) = _arrays.saved(ctx)
    return (edge_softmax_backward_op(arrays, out, grad),)


edge_softmax_op = _operators.register(
    "edge_softmax",
    f"({_arrays.SCHEMA}, Tensor scores) -> Tensor",
    _impl,
    _fake,
    check=_check.reads("edge_softmax", ("scores", "edges")),
    structure=Structure,
    backward=_backward,
    setup_context=_setup,
)


def _double_setup(ctx, inputs, output):
    _arrays.save(ctx, *inputs)


def _row_sums(arrays, value):
    """Sum of value over the row of each edge, back on the edges."""
    rows = spmm_op(arrays, None, value, "copy_rhs", "sum", 0.0)
    return sddmm_op(arrays, None, rows, "copy_rhs", "u", "v")


def _double_backward(ctx, cotangent):
    # f = a * (g - s), s = row sum of a * g. With t = row sum of cotangent * a:
    # df/da -> cotangent * (g - s) - t * g;  df/dg -> a * (cotangent - t), the same kernel again.
    arrays, (a, g) = _arrays.saved(ctx)
    s = _row_sums(arrays, a * g)
    t = _row_sums(arrays, cotangent * a)
    grad_a = cotangent * (g - s) - t * g
    return grad_a, edge_softmax_backward_op(arrays, a, cotangent)


def _check_shapes(_graph, out, grad_out):
    _check.features_of("edge_softmax_backward", "grad_out", grad_out, out.shape[1:])


edge_softmax_backward_op = _operators.register(
    "edge_softmax_backward",
    f"({_arrays.SCHEMA}, Tensor out, Tensor grad_out) -> Tensor",
    _backward_impl,
    _backward_fake,
    check=_check.reads("edge_softmax_backward", ("out", "edges"), ("grad_out", "edges"), also=_check_shapes),
    structure=Structure,
    backward=_double_backward,
    setup_context=_double_setup,
)
