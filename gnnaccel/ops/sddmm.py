"""SDDMM: one value per edge from the features of its two ends (or its own)."""

from __future__ import annotations

import math

from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check
from gnnaccel.ops._arrays import Structure, arrays_of, needs_grad
from gnnaccel.ops._edge_order import is_profitable, scatter_edge_values, try_empty_like
from gnnaccel.ops._features import aligned_heads, operand, padding_is_profitable, reduce_to, result_features
from gnnaccel.ops._inverse import inverse
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.ops.tiled import sddmm_tiled, serves_dot
from gnnaccel.tiles.translate import KERNELS

OPS = ("copy_lhs", "copy_rhs", "add", "sub", "mul", "div", "dot")


def sddmm(
    graph: Graph,
    lhs: Tensor | None,
    rhs: Tensor | None = None,
    op: str = "dot",
    lhs_target: str = "u",
    rhs_target: str = "v",
    *,
    kernel: str = "auto",
    method: str | None = None,
) -> Tensor:
    """Edge values: out[e] = op(lhs[target of e], rhs[target of e]) for every edge e.

    Parameters
    ----------
    graph : Graph
    lhs, rhs : Tensor [rows of the target, *F], same dtype
        Targets "u": graph.num_cols rows (sources), "v": graph.num_rows (destinations), "e": nnz, in edge-id
        order. Feature shapes follow NumPy broadcasting. lhs is not read by "copy_rhs", nor rhs by "copy_lhs".
    op : {"dot", "add", "sub", "mul", "div", "copy_lhs", "copy_rhs"}
        dot multiplies and sums over the last dimension, which stays as 1.
    lhs_target, rhs_target : {"u", "v", "e"}
    kernel : {"auto", "csr", "tiled"}
        As of `spmm`. "tiled" takes the "dot" of sources and destinations with equal features.
    method : str, optional
        The old name of kernel.

    Returns
    -------
    Tensor [nnz, *broadcast features], in edge-id order.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape, device or option.

    Notes
    -----
    fp16 and bf16 compute in fp32. Runs in the dtype of its inputs under autocast too, where two different
    dtypes meet in the wider one. Deterministic. Source: HP-SDDMM (Fan et al.).

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 1]), torch.tensor([1, 0]))
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> gnnaccel.ops.sddmm(g, x, x)
    tensor([[11.],
            [11.]])
    """
    if method is not None:
        _check.renamed("sddmm: method=", "kernel=")
        kernel = method
    _check.graph("sddmm", graph)
    _check.one_of("sddmm", "op", op, OPS)
    _check.one_of("sddmm", "kernel", kernel, KERNELS)
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
    for name, target in (("lhs_target", lhs_target), ("rhs_target", rhs_target)):
        _check.one_of("sddmm", name, target, rows)
    lhs = None if op == "copy_rhs" else lhs
    rhs = None if op == "copy_lhs" else rhs
    if op != "copy_rhs":
        _check.feature("sddmm", "lhs", lhs, rows[lhs_target], f"target {lhs_target!r}", graph.device)
    if op != "copy_lhs":
        _check.feature("sddmm", "rhs", rhs, rows[rhs_target], f"target {rhs_target!r}", graph.device)
    if lhs is not None and rhs is not None:
        lhs, rhs = _check.same_dtype("sddmm", lhs, rhs, "lhs", "rhs")
        _check.broadcastable("sddmm", lhs, rhs, "lhs", "rhs")
        if op == "dot" and (lhs.dim() < 2 or rhs.dim() < 2 or lhs.shape[-1] != rhs.shape[-1]):
            raise ValueError(
                f"sddmm: rhs: dot expects equal last dimensions, got {tuple(lhs.shape)} and {tuple(rhs.shape)}"
            )
    return choose(graph, lhs, rhs, op, lhs_target, rhs_target, kernel)


def choose(graph: Graph, lhs, rhs, op: str, lhs_target: str, rhs_target: str, kernel: str = "auto") -> Tensor:
    """`sddmm` of checked operands: by tiles or along the rows, with the arrays that it and its gradients will read."""
    if lhs is not None and rhs is not None and op == "dot" and {lhs_target, rhs_target} == {"u", "v"}:
        if kernel == "tiled":
            return sddmm_tiled(graph, lhs, rhs, lhs_target == "v", tf32=True)
        if kernel == "auto" and tiles.are_profitable(graph) and serves_dot(graph, lhs, rhs):
            return sddmm_tiled(graph, lhs, rhs, lhs_target == "v", tf32=False)
    if kernel == "tiled":
        raise ValueError(
            "sddmm: kernel: 'tiled' takes the 'dot' of sources and destinations, got "
            f"{op!r} of {lhs_target!r} and {rhs_target!r}"
        )
    sources = (t for t, target in ((lhs, lhs_target), (rhs, rhs_target)) if target == "u")
    arrays = arrays_of(graph, needs_grad(*sources), lhs, rhs, listed=op in ("dot", "mul", "div"))
    return sddmm_op(arrays, lhs, rhs, op, lhs_target, rhs_target)


def _allocate(nnz, lhs, rhs, op, full):
    shape = (*full[:-1], 1) if op == "dot" else full
    return (rhs if lhs is None else lhs).new_empty(nnz, *shape)


def _sddmm_impl(arrays, lhs, rhs, op, lhs_target, rhs_target):
    full = result_features(lhs, rhs)
    out = _allocate(arrays.nnz, lhs, rhs, op, full)
    if math.prod(full) == 0:
        return out.zero_()
    if out.numel() == 0:
        return out
    num_feats = math.prod(out.shape[1:])
    dots = op == "dot" and {lhs_target, rhs_target} == {"u", "v"}
    moves = (
        dots
        and out.is_cuda
        and is_profitable(arrays.edge_ids, out, math.prod(full) * out.element_size(), num_feats == 1)
    )
    if dots and out.is_cuda and padding_is_profitable(arrays.nnz, lhs, rhs):
        lhs, rhs = aligned_heads(lhs), aligned_heads(rhs)
        full = tuple(lhs.shape[1:])
    by_row = try_empty_like(out) if moves else []
    edge_ids, arrays = arrays.edge_ids, arrays.by_nonzero() if by_row else arrays
    lhs, lhs_operand = operand(lhs, full)
    rhs, rhs_operand = operand(rhs, full)
    operands = (lhs_operand, lib.TARGETS[lhs_target], rhs_operand, lib.TARGETS[rhs_target])
    sizes = (num_feats, full[-1] if op == "dot" else 1)
    codes = (lib.EDGE_OPS[op], lib.DTYPES[out.dtype])
    made = (*by_row, out)[0]
    lib.launch("sddmm", out.device, *arrays.listed(), *operands, made.data_ptr(), *sizes, *codes)
    return scatter_edge_values(made, edge_ids, out) if by_row else out


def _sddmm_fake(arrays, lhs, rhs, op, *_):
    return _allocate(arrays.nnz, lhs, rhs, op, result_features(lhs, rhs))


def _setup_context(ctx, inputs, output):
    arrays, lhs, rhs, op, lhs_target, rhs_target = inputs
    ctx.op, ctx.targets = op, (lhs_target, rhs_target)
    ctx.features = [None if t is None else tuple(t.shape[1:]) for t in (lhs, rhs)]
    keep = (lhs, rhs) if op in ("mul", "div", "dot") else (None, None)
    _arrays.save(ctx, arrays, *keep)


def _backward(ctx, grad):
    arrays, (lhs, rhs) = _arrays.saved(ctx)
    needs_lhs, needs_rhs, *_ = ctx.wanted
    op = ctx.op
    grad_lhs = grad_rhs = None
    if needs_lhs and ctx.features[0] is not None:
        factor, scale = inverse(rhs) if op == "div" else (rhs, None)  # None where the op does not multiply
        grad_lhs = _to_target(arrays, grad, factor, ctx.targets[1], ctx.targets[0], ctx.features[0])
        grad_lhs = grad_lhs if scale is None else grad_lhs * scale
    if needs_rhs and ctx.features[1] is not None:
        grad_rhs = _to_target(arrays, grad, lhs, ctx.targets[0], ctx.targets[1], None)
        if op == "div":  # d(l / r) / dr = -l / r / r; r belongs to the target summed over, so it can wait
            divisor = _pad(rhs, grad_rhs)
            grad_rhs = -grad_rhs / divisor / divisor
        if op == "sub":
            grad_rhs = -grad_rhs
        grad_rhs = reduce_to(grad_rhs, ctx.features[1])
    return grad_lhs, grad_rhs, None, None, None


def _to_target(arrays: Structure, grad, factor, factor_target, target, features):
    """Sum of grad[e] * factor[factor_target of e] over the edges e of each row of `target`.

    `features` is the shape to reduce broadcast features to; None leaves them.
    """
    if target == "e":
        if factor is None:
            out = grad
        elif factor_target == "e":
            out = grad * _pad(factor, grad)
        else:
            out = sddmm_op(arrays, grad, factor, "mul", "e", factor_target)
    else:
        forward = arrays.transposed() if target == "u" else arrays
        if factor is None:
            out = spmm_op(forward, None, grad, "copy_rhs", "sum", 0.0)
        elif factor_target == target:
            out = spmm_op(forward, None, grad, "copy_rhs", "sum", 0.0)
            out = out * _pad(factor, out)
        elif factor_target == "e":
            out = spmm_op(forward, None, grad * _pad(factor, grad), "copy_rhs", "sum", 0.0)
        else:
            out = spmm_op(forward, factor, grad, "mul", "sum", 0.0)
    return out if features is None else reduce_to(out, features)


def _pad(x: Tensor, like: Tensor) -> Tensor:
    """x with feature dimensions of size one in front, up to the dimensions of `like`."""
    return x.reshape(x.shape[0], *(1,) * (like.dim() - x.dim()), *x.shape[1:])


_ROWS = {"u": "cols", "v": "rows", "e": "edges"}


def _check_operands(arrays, lhs, rhs, op, lhs_target, rhs_target):
    for name, value, known in (
        ("op", op, lib.EDGE_OPS),
        ("lhs_target", lhs_target, _ROWS),
        ("rhs_target", rhs_target, _ROWS),
    ):
        _check.one_of("sddmm", name, value, known)
    _check.reads("sddmm", ("lhs", _ROWS[lhs_target]), ("rhs", _ROWS[rhs_target]))(arrays, lhs, rhs)
    _check.operands_of("sddmm", op, lhs, rhs)


sddmm_op = _operators.register(
    "sddmm",
    f"({_arrays.SCHEMA}, Tensor? lhs, Tensor? rhs, str op, str lhs_target, str rhs_target) -> Tensor",
    _sddmm_impl,
    _sddmm_fake,
    check=_check_operands,
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
