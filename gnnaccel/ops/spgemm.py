"""SpGEMM and SSpMM: sums over a graph of rows that keep k entries (`CBSR`), and their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph import scales
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays, _check
from gnnaccel.ops._arrays import Structure, arrays_of, epilogue_of, needs_grad
from gnnaccel.ops._weight_gradient import weight_gradient
from gnnaccel.ops.cbsr import CBSR
from gnnaccel.ops.expand import aligned, description, expand, places_dtype


def spgemm(graph: Graph, x: CBSR, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """out[r] = sum (or mean) over nonzeros (r, c, e) of weight[e] * x[c], of which only kept entries are read.

    `spmm` and `graph_conv` come here with a CBSR tensor, the latter with its scales, bias and ReLU.

    Parameters
    ----------
    graph : Graph
        num_rows destinations, num_cols sources, nnz edges.
    x : CBSR [num_cols, D]
        Source features, of `maxk`.
    weight : Tensor [nnz], optional
        Edge weights in edge-id order, same dtype.
    reduce : {"sum", "mean"}
        mean divides by the number of nonzeros of the row.

    Returns
    -------
    Tensor [num_rows, D]

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape, device or option.

    Notes
    -----
    nnz * k entries are read, and 16-bit ones added up in float32. The gradient of x is a CBSR tensor of the same places
    (SSpMM). Deterministic, but for that gradient on CUDA: atomics add it up, unless torch.use_deterministic_algorithms
    is on or a source of a graph that lasts has more than 65,536 edges. The gradient of the weight is an `sddmm` of the
    dense tensor. On CUDA D is at most 4096, of float64 2048. Source: MaxK-GNN (Peng et al., ASPLOS 2024).

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]))
    >>> h = gnnaccel.ops.maxk(torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]]), 2)
    >>> gnnaccel.ops.spgemm(g, h)
    tensor([[3., 5., 6.],
            [0., 0., 0.]])
    """
    _check.graph("spgemm", graph)
    if not isinstance(x, CBSR):
        raise TypeError(f"spgemm: x: expected a CBSR tensor, got {type(x).__name__}; make one with gnnaccel.ops.maxk")
    _check.one_of("spgemm", "reduce", reduce, ("sum", "mean"))
    if x.shape[0] != graph.num_cols:
        raise ValueError(f"spgemm: x: expected {graph.num_cols} rows (graph.num_cols), got shape {tuple(x.shape)}")
    if x.device != graph.device:
        raise ValueError(f"spgemm: x: expected device {graph.device} (the graph's), got {x.device}; move one of them")
    if x.is_cuda and x.shape[1] > (most := _most_features(x)):
        raise ValueError(f"spgemm: x: expected at most {most} features on CUDA, got {x.shape[1]}; use spmm")
    if weight is not None:
        given = _wide(weight) if isinstance(weight, Tensor) else weight
        _check.feature("spgemm", "weight", given, graph.nnz, "one per edge", graph.device)
        if weight.dim() != 1:
            raise ValueError(f"spgemm: weight: expected shape [{graph.nnz}], got {tuple(weight.shape)}")
        x, weight = _check.same_dtype("spgemm", x, weight, "x", "weight")  # type: ignore[assignment]
    return sum_of_entries(graph, x, weight, row_scale=scales.mean_scale(graph, x.dtype) if reduce == "mean" else None)


def sum_of_entries(
    graph: Graph, x: CBSR, weight: Tensor | None, *, source_scale=None, row_scale=None, bias=None, relu=False
) -> Tensor:
    """`graph_conv` of checked operands."""
    values = x.entries()
    if source_scale is not None:
        values = (values * source_scale.unsqueeze(1)).to(values.dtype)
    by_source = graph.indptr.is_cuda and (
        torch.are_deterministic_algorithms_enabled()
        or graph.nnz <= bounds.BY_SOURCE_DEGREE * graph.num_cols
        or graph.has_hub_source()  # sums by source are of pieces, whereas atomics add one after the other
    )
    # Of the weight's gradient the derivative runs over the transposed graph.
    arrays = arrays_of(graph, (by_source and needs_grad(values)) or needs_grad(weight), values)
    return _spgemm_op(arrays, values, x.places(), x.shape[1], weight, row_scale, bias, relu, by_source)


def serves(x: CBSR) -> bool:
    """True if `x` should be summed up by its entries, and not as the dense tensor."""
    share = bounds.KEPT_SHARE.get(x.device.type, 0.0)
    return x.is_compressed and x.k <= share * x.shape[1] and (not x.is_cuda or x.shape[1] <= _most_features(x))


def _most_features(x: Tensor) -> int:
    return bounds.MAXK_FEATURES if x.dtype != torch.float64 else bounds.MAXK_FEATURES // 2


def _wide(x: Tensor) -> Tensor:
    """In what a kernel takes: float16 has none on the CPU."""
    return x.float() if x.dtype == torch.float16 and not x.is_cuda else x


def _spgemm_impl(arrays, values, places, num_feats, weight, row_scale, bias, relu, _):
    out = _wide(_spgemm_fake(arrays, values, places, num_feats))
    if out.numel():
        dtype = values.dtype
        weight, bias = (None if t is None else _wide(t).contiguous() for t in (weight, bias))
        values, places = aligned(_wide(values)), aligned(places)
        row_scale = None if row_scale is None else row_scale.contiguous()
        epilogue = epilogue_of(row_scale=row_scale, bias=bias, relu=relu)
        kept = description(values, places, num_feats)
        operands = (*arrays.listed(), kept, lib.pointer(weight), out.data_ptr())
        lib.launch("spgemm", out.device, *operands, lib.DTYPES[out.dtype], epilogue)
        out = out.to(dtype)
    return out


def _spgemm_fake(arrays, values, _places, num_feats, *_):
    return values.new_empty(arrays.num_rows, num_feats)


def _spgemm_context(ctx, inputs, output):
    arrays, values, places, num_feats, weight, row_scale, _, relu, ctx.by_source = inputs
    ctx.set_materialize_grads(False)
    ctx.num_feats = num_feats
    needs_values, _, _, needs_weight, *_ = ctx.wanted
    factors = values if needs_weight else None, weight if needs_values else None
    _arrays.save(ctx, arrays, *factors, places, row_scale, output if relu else None)


def _spgemm_backward(ctx, grad):
    if grad is None:
        return (None,) * 8
    arrays, (values, weight, places, row_scale, out) = _arrays.saved(ctx)
    needs_values, _, _, needs_weight, _, needs_bias, _, _ = ctx.wanted
    if out is not None:
        grad = torch.ops.aten.threshold_backward(grad, out, 0)
    grad_values = grad_weight = grad_bias = None
    if needs_values:
        grad_values = _sspmm_op(arrays, grad, places, weight, row_scale, ctx.by_source)
    if needs_weight:
        grad_weight = _weight_gradient(arrays, expand(values, places, ctx.num_feats), grad, row_scale)
    if needs_bias:
        grad_bias = grad.sum(0)
    return grad_values, None, None, grad_weight, None, grad_bias, None, None


def _weight_gradient(arrays: Structure, x: Tensor, grad: Tensor, row_scale: Tensor | None) -> Tensor:
    """Of the dense sources and the rows' gradient."""
    scaled = grad if row_scale is None else (grad * row_scale.unsqueeze(1)).to(grad.dtype)
    return weight_gradient(arrays, _wide(x), _wide(scaled), (), "mul").to(x.dtype)


def _sspmm_impl(arrays, grad, places, weight, row_scale, by_source):
    dtype = grad.dtype
    wide, shape = torch.promote_types(dtype, torch.float32), places.shape
    out = grad.new_empty(shape, dtype=wide) if by_source else grad.new_zeros(shape, dtype=wide)
    if out.numel():
        num_feats = grad.shape[1]
        grad, weight = (None if t is None else _wide(t).contiguous() for t in (grad, weight))
        places, row_scale = aligned(places), None if row_scale is None else row_scale.contiguous()
        walked = arrays.transposed() if by_source else arrays
        kept = (0, places.data_ptr(), shape[1], num_feats)
        operands = (grad.data_ptr(), kept, lib.pointer(weight), lib.pointer(row_scale), out.data_ptr(), by_source)
        lib.launch("sspmm", out.device, *walked.listed(), *operands, lib.DTYPES[grad.dtype])
    return out.to(dtype)


def _sspmm_fake(_arrays, grad, places, *_):
    return grad.new_empty(places.shape)


def _sspmm_context(ctx, inputs, output):
    arrays, grad, places, weight, row_scale, ctx.by_source = inputs
    ctx.num_feats = grad.shape[1]
    _arrays.save(ctx, arrays, grad, places, weight, row_scale)


def _sspmm_backward(ctx, grad_values):
    arrays, (grad, places, weight, row_scale) = _arrays.saved(ctx)
    needs_grad_, _, needs_weight, *_ = ctx.wanted
    grad_grad = grad_weight = None
    if needs_grad_:
        fixed = (row_scale, None, False, ctx.by_source)
        grad_grad = _spgemm_op(arrays, grad_values, places, ctx.num_feats, weight, *fixed)
    if needs_weight:
        grad_weight = _weight_gradient(arrays, expand(grad_values, places, ctx.num_feats), grad, row_scale)
    return grad_grad, None, grad_weight, None, None


def _check_places(op: str, arrays, places: Tensor, num_feats: int, row_scale: Tensor | None) -> None:
    rows, dtype = arrays.num_cols, places_dtype(num_feats)
    if places.dim() != 2 or places.shape[0] != rows or places.dtype != dtype:
        raise ValueError(f"{op}: places: expected {dtype} [{rows}, k], got {places.dtype} {tuple(places.shape)}")
    if row_scale is not None and row_scale.shape != (arrays.num_rows,):
        raise ValueError(f"{op}: row_scale: expected shape [{arrays.num_rows}], got {tuple(row_scale.shape)}")


def _check_sspmm(arrays, grad, places, _weight, row_scale, _by_source) -> None:
    _check_places("sspmm", arrays, places, grad.shape[1], row_scale)


def _check_spgemm(arrays, values, places, num_feats, _weight, row_scale, bias, *_) -> None:
    _check_places("spgemm", arrays, places, num_feats, row_scale)
    _check.features_of("spgemm", "values", values, places.shape[1:])
    if bias is not None and bias.shape != (num_feats,):
        raise ValueError(f"spgemm: bias: expected shape [{num_feats}], got {tuple(bias.shape)}")


_sspmm_op = _operators.register(
    "sspmm",
    f"({_arrays.SCHEMA}, Tensor grad, Tensor places, Tensor? weight, Tensor? row_scale, bool by_source) -> Tensor",
    _sspmm_impl,
    _sspmm_fake,
    check=_check.reads("sspmm", ("grad", "rows"), None, ("weight", "edges"), half=True, also=_check_sspmm),
    structure=Structure,
    backward=_sspmm_backward,
    setup_context=_sspmm_context,
)
_spgemm_op = _operators.register(
    "spgemm",
    f"({_arrays.SCHEMA}, Tensor values, Tensor places, SymInt num_feats, Tensor? weight, Tensor? row_scale, "
    "Tensor? bias, bool relu, bool by_source) -> Tensor",
    _spgemm_impl,
    _spgemm_fake,
    check=_check.reads("spgemm", ("values", "cols"), None, None, ("weight", "edges"), half=True, also=_check_spgemm),
    structure=Structure,
    backward=_spgemm_backward,
    setup_context=_spgemm_context,
)
