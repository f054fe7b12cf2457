"""A graph convolution in one pass: scaled sources, their sum, a scale per row, a bias and a ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check, ready
from gnnaccel.ops._arrays import Structure, arrays_of, epilogue_of, needs_grad, scales_first
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops._weight_gradient import weight_gradient
from gnnaccel.ops.cbsr import CBSR
from gnnaccel.ops.spgemm import serves, sum_of_entries
from gnnaccel.ops.spmm import launch


def graph_conv(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    source_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """out[r] = act(row_scale[r] * sum over nonzeros (r, c, e) of weight[e] * source_scale[c] * x[c] + bias).

    What a GCN layer does around its sum, in the kernel that sums: with the reciprocal roots of the degrees as scales
    it is act(D^-1/2 A D^-1/2 x + bias).

    Parameters
    ----------
    graph : Graph
        num_rows destinations, num_cols sources, nnz edges.
    x : Tensor [num_cols, *F]
        float32, float64, bfloat16; float16 on CUDA. Any strides.
    weight : Tensor [nnz], optional
        Edge weights in edge-id order, same dtype.
    source_scale : Tensor [num_cols], optional
    row_scale : Tensor [num_rows], optional
        Constants: they get no gradient. Read in float64 for float64, else in float32.
    bias : Tensor that broadcasts to F, optional
        Same dtype as x.
    relu : bool
        act: negative values become 0, NaN stays. Else the result is as it is.

    Returns
    -------
    Tensor [num_rows, *F]

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape or device, or a scale that asks for a gradient.

    Notes
    -----
    fp16 and bf16 accumulate in fp32 and are rounded once, at the end. The gradient of x is one pass over the transposed
    graph with the scales changed over, that of the weight an `sddmm`; the result is kept where there is a ReLU.
    Deterministic, but a CUDA graph's sums change once in the last bits when it earns its work list (see
    `gnnaccel.prepare`).
    Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, ICLR 2017.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> x = torch.tensor([[2.0], [4.0]])
    >>> gnnaccel.ops.graph_conv(g, x, row_scale=torch.tensor([0.5, 1.0]), bias=torch.tensor([-1.0]), relu=True)
    tensor([[2.],
            [0.]])
    """
    if weight is None and not relu and source_scale is not None and row_scale is not None:
        out = ready.sum_of(graph, x, SCALED, source_scale, row_scale, bias) if type(graph) is Graph else None
        if out is not None:
            return out
    _check.graph("graph_conv", graph)
    _check.feature("graph_conv", "x", x, graph.num_cols, "graph.num_cols, one per source", graph.device)
    if weight is not None:
        _check.feature("graph_conv", "weight", weight, graph.nnz, "one per edge", graph.device)
        if weight.dim() != 1:
            raise ValueError(f"graph_conv: weight: expected shape [{graph.nnz}], got {tuple(weight.shape)}")
        x, weight = _check.same_dtype("graph_conv", x, weight, "x", "weight")
    if bias is not None:
        x, bias = _bias(x, bias)
    scale_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if source_scale is not None:
        source_scale = _scale("source_scale", source_scale, graph.num_cols, graph.device).to(scale_dtype)
    if row_scale is not None:
        row_scale = _scale("row_scale", row_scale, graph.num_rows, graph.device).to(scale_dtype)
    if isinstance(x, CBSR):
        if serves(x):
            return sum_of_entries(
                graph, x, weight, source_scale=source_scale, row_scale=row_scale, bias=bias, relu=relu
            )
        x = x.to_dense()
    arrays = arrays_of(graph, needs_grad(x), x, sums=True)
    return graph_conv_op(arrays, x, weight, source_scale, row_scale, bias, relu)


def _scale(name: str, scale: Tensor, count: int, device: torch.device) -> Tensor:
    """A checked scale."""
    _check.feature("graph_conv", name, scale, count, "rows", device)
    if scale.dim() != 1:
        raise ValueError(f"graph_conv: {name}: expected shape [{count}], got {tuple(scale.shape)}")
    if needs_grad(scale):
        raise ValueError(
            f"graph_conv: {name}: expected a constant, got a tensor that requires a gradient; detach it, or multiply "
            "x or the result by it"
        )
    return scale


def _bias(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """x, and the bias with all its features."""
    if not isinstance(bias, Tensor):
        raise TypeError(f"graph_conv: bias: expected a Tensor, got {type(bias).__name__}")
    if bias.device != x.device:
        raise ValueError(f"graph_conv: bias: expected device {x.device}, got {bias.device}")
    x, bias = _check.same_dtype("graph_conv", x, bias, "x", "bias")
    features = tuple(x.shape[1:])
    try:
        return x, bias.expand(features)
    except RuntimeError:
        raise ValueError(
            f"graph_conv: bias: expected a shape that broadcasts to {features}, got {tuple(bias.shape)}"
        ) from None


def _impl(arrays, x, weight, source_scale, row_scale, bias, relu):
    out = _fake(arrays, x)
    if out.numel():
        if source_scale is not None and scales_first(arrays.nnz, arrays.num_cols, x):
            x, source_scale = _scaled(x, source_scale), None
        tensors = {"source_scale": source_scale, "row_scale": row_scale, "bias": bias}
        tensors = {name: None if t is None else t.contiguous() for name, t in tensors.items()}
        if weight is not None:
            weight = weight.reshape(-1, *(1,) * (x.dim() - 1))
        message = "copy_lhs" if weight is None else "mul"
        epilogue = epilogue_of(**tensors, relu=relu)
        launch(arrays, x, weight, (out,), message, "sum", 0.0, epilogue)
    return out


def _check_scales(arrays, x, weight, source_scale, row_scale, bias, _):
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    scales = (("source_scale", source_scale, arrays.num_cols), ("row_scale", row_scale, arrays.num_rows))
    for name, scale, count in scales:
        if scale is not None and (scale.shape != (count,) or scale.dtype != dtype):
            raise ValueError(f"graph_conv: {name}: expected {dtype} [{count}], got {scale.dtype} {tuple(scale.shape)}")
    for name, value in (("source_scale", source_scale), ("row_scale", row_scale), ("bias", bias)):
        if value is not None and value.device != x.device:
            raise ValueError(f"graph_conv: {name}: expected device {x.device} (the graph's), got {value.device}")
    if weight is not None and weight.dim() != 1:
        raise ValueError(f"graph_conv: weight: expected shape [{arrays.nnz}], got {tuple(weight.shape)}")
    if bias is not None and (bias.shape != x.shape[1:] or bias.dtype != x.dtype):
        raise ValueError(
            f"graph_conv: bias: expected {x.dtype} {tuple(x.shape[1:])}, got {bias.dtype} {tuple(bias.shape)}"
        )


def _fake(arrays, x, *_):
    return x.new_empty(arrays.num_rows, *x.shape[1:])


def _setup_context(ctx, inputs, output):
    arrays, x, weight, source_scale, row_scale, _, relu = inputs
    ctx.set_materialize_grads(False)
    needs_x, needs_weight, *_ = ctx.wanted
    # Each factor is read for the gradient of the other alone; one that nobody needs may be freed or written into.
    factors = x if needs_weight else None, weight if needs_x else None
    _arrays.save(ctx, arrays, *factors, source_scale, row_scale, output if relu else None)


def _backward(ctx, grad):
    if grad is None:
        return None, None, None, None, None, None
    arrays, (x, weight, source_scale, row_scale, out) = _arrays.saved(ctx)
    needs_x, needs_weight, _, _, needs_bias, _ = ctx.wanted
    if out is not None:
        grad = torch.ops.aten.threshold_backward(grad, out, 0)
    grad_x = grad_weight = grad_bias = None
    if needs_x:
        grad_x = graph_conv_op(arrays.transposed(), grad, weight, row_scale, source_scale, None, False)
    if needs_weight:
        grad_weight = weight_gradient(arrays, _scaled(x, source_scale), _scaled(grad, row_scale), (), "mul")
    if needs_bias:
        grad_bias = column_sums(grad)
    return grad_x, grad_weight, None, None, grad_bias, None


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else (x * scale.view(-1, *(1,) * (x.dim() - 1))).to(x.dtype)


graph_conv_op = _operators.register(
    "graph_conv",
    f"({_arrays.SCHEMA}, Tensor x, Tensor? weight, Tensor? source_scale, Tensor? row_scale, Tensor? bias, bool relu) "
    "-> Tensor",
    _impl,
    _fake,
    check=_check.reads("graph_conv", ("x", "cols"), ("weight", "edges"), also=_check_scales),
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)


def _scaled_gradient(arrays, grad, source_scale, row_scale) -> Tensor:
    return graph_conv_op(arrays.transposed(), grad, None, row_scale, source_scale, None, False)


SCALED = ready.Form("scaled", _scaled_gradient)
