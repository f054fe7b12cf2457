"""SpMM: aggregate messages of the sources into the destinations, without storing a message."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays, _check, ready
from gnnaccel.ops._arrays import Structure, arrays_of, epilogue_of, needs_grad, scales_first, sources_matter
from gnnaccel.ops._both_gradients import both_gradients_op, fuses, width
from gnnaccel.ops._edge_order import gather_edge_values, is_profitable, try_empty_like
from gnnaccel.ops._features import operand, reduce_to, result_features
from gnnaccel.ops._inverse import inverse
from gnnaccel.ops._weight_gradient import kept, weight_gradient
from gnnaccel.ops.cbsr import CBSR
from gnnaccel.ops.ready_weighted import weighted_sum_of
from gnnaccel.ops.scatter_arg import gather_arg, scatter_arg_op
from gnnaccel.ops.spgemm import serves, spgemm
from gnnaccel.ops.tiled import serves_sum, spmm_tiled
from gnnaccel.program.shapes import index_rule
from gnnaccel.schedule import worklist
from gnnaccel.tiles.translate import KERNELS

MESSAGES = ("copy_lhs", "copy_rhs", "mul", "add", "sub", "div")
REDUCES = ("sum", "mean", "max", "min")


def spmm(
    graph: Graph,
    x: Tensor | None,
    weight: Tensor | None = None,
    message: str | None = None,
    reduce: str = "sum",
    *,
    empty_value: float = 0.0,
    return_arg: bool = False,
    kernel: str = "auto",
    method: str | None = None,
):
    """Sparse aggregation: out[r] = reduce over nonzeros (r, c, e) of message(x[c], weight[e]).

    Parameters
    ----------
    graph : Graph
        num_rows destinations, num_cols sources, nnz edges.
    x : Tensor [num_cols, *F], or None with message "copy_rhs"
        Source features: float32, float64, bfloat16; float16 on CUDA. Any strides.
    weight : Tensor [nnz, *G], optional
        Edge features in edge-id order, same dtype. Where it has fewer dimensions than x, ones are appended
        ([nnz] is a scalar per edge, [nnz, H] one per head of x [num_cols, H, F]); then NumPy broadcasting.
    message : {"copy_lhs", "copy_rhs", "mul", "add", "sub", "div"}, optional
        Default: "mul" with a weight, else "copy_lhs".
    reduce : {"sum", "mean", "max", "min"}
        mean divides by the number of nonzeros of the row.
    empty_value : float
        Result of a row without nonzeros.
    return_arg : bool
        For max and min: also return the source and the edge id of each winner (the first one in row order; -1
        in an empty row), both [num_rows, *out features] of the graph's index dtype. The one that the message
        does not read (source for "copy_rhs", edge for "copy_lhs") is empty, as both are for sum and mean.
    kernel : {"auto", "csr", "tiled"}
        "tiled": on tensor cores, by the tiles of the graph (`gnnaccel.tiles`, made at the first call): sum and mean of
        "mul" with one weight per edge, or of "copy_lhs", in float32, bfloat16 and float16 on CUDA, float32 and float64
        on the CPU, for checking. As accurate as "csr", but in TF32 where torch.set_float32_matmul_precision allows
        that. "csr": without tiles. "auto": by tiles on CUDA where they pay, as rows next to each other share sources
        (docs/tensor-cores.md), once the graph has its work lists; never in TF32.
    method : str, optional
        The old name of kernel.

    Returns
    -------
    Tensor [num_rows, *broadcast features], or (out, arg_source, arg_edge).

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for a wrong shape, device or option.

    Notes
    -----
    fp16 and bf16 accumulate in fp32. Runs in the dtype of its inputs under autocast too, where two different dtypes
    meet in the wider one. The backward runs over the transposed graph (sum, mean) or along the argmax or argmin: a
    winner gets the gradient times its own other factor, whatever that is, and all others get 0, also where a factor of
    theirs is infinite. NaN wins, as in torch. Of a graph that lasts, gradients of sources are added up in float64 there
    if one has more than 65,536 edges, else one after the other, as by torch's index_add. Deterministic, but for the
    gradient of x of max and min on CUDA: atomics add it up, unless torch.use_deterministic_algorithms is on; and a CUDA
    graph's sums change once in the last bits when it earns its work list (see `gnnaccel.prepare`), not so in that mode.
    Source: HP-SpMM (Fan et al.) for the balance over edges.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), num_rows=3, num_cols=3)
    >>> gnnaccel.ops.spmm(g, torch.tensor([[1.0], [2.0], [4.0]]))
    tensor([[2.],
            [5.],
            [0.]])
    """
    if message is None:
        message = "copy_lhs" if weight is None else "mul"
    if method is not None:
        _check.renamed("spmm: method=", "kernel=")
        kernel = method
    usual = kernel == "auto" and not return_arg and empty_value == 0 and type(graph) is Graph
    if usual and (out := made_ready(graph, x, message, reduce, weight)) is not None:
        return out
    _check.graph("spmm", graph)
    _check.one_of("spmm", "message", message, MESSAGES)
    _check.one_of("spmm", "reduce", reduce, REDUCES)
    _check.one_of("spmm", "kernel", kernel, KERNELS)
    if message == "copy_lhs":
        weight = None
    else:
        _check.feature("spmm", "weight", weight, graph.nnz, "one per edge", graph.device)
    if message == "copy_rhs":
        x = None
    else:
        _check.feature("spmm", "x", x, graph.num_cols, "graph.num_cols, one per source", graph.device)
    if x is not None and weight is not None:
        x, weight = _check.same_dtype("spmm", x, weight, "x", "weight")
        if weight.dim() < x.dim():
            weight = weight.reshape(*weight.shape, *(1,) * (x.dim() - weight.dim()))
        _check.broadcastable("spmm", x, weight, "x", "weight")
        if message == "sub":
            weight, message = -weight, "add"
        elif message == "div":
            return _quotients(graph, x, weight, reduce, empty_value, return_arg=return_arg, kernel=kernel)
    return choose(graph, x, weight, message, reduce, empty_value, return_arg, kernel)


def made_ready(graph: Graph, x, message: str, reduce: str, weight=None) -> Tensor | None:
    """What `spmm` of an x without a check yet gives by a call that is ready, with `empty_value` 0; None: there is none.

    The two frameworks and `spmm` ask here first, then check the arguments, then go to `choose`.
    """
    if message == "copy_lhs":
        return ready.sum_of(graph, x, FORMS[reduce]) if reduce in FORMS else None
    return weighted_sum_of(graph, x, weight, _WEIGHTED) if message == "mul" and reduce == "sum" else None


def choose(
    graph: Graph,
    x,
    weight: Tensor | None,
    message: str,
    reduce: str,
    empty_value: float = 0.0,
    return_arg: bool = False,
    kernel: str = "auto",
):
    """`spmm` of checked operands that broadcast as NumPy's, without "sub" and "div": by tiles or along the rows, with
    the arrays that this call and its gradients will read."""
    adds = reduce in ("sum", "mean")
    plain = adds and not return_arg and empty_value == 0 and message != "add"
    if isinstance(x, CBSR):
        one = weight is None or (weight.dim() == 2 and width(weight) == 1)
        if plain and kernel == "auto" and one and serves(x):
            return spgemm(graph, x, None if weight is None else weight.flatten(), reduce)
        x = x.to_dense()
    if x is not None and weight is not None and x.dim() < weight.dim():  # tiles give a result like x
        x = x.reshape(x.shape[0], *(1,) * (weight.dim() - x.dim()), *x.shape[1:])
    if kernel == "auto" and plain and x is not None and tiles.are_profitable(graph) and serves_sum(graph, x, weight):
        return spmm_tiled(graph, x, weight, reduce == "mean", tf32=False)
    if kernel == "tiled":
        if message not in ("copy_lhs", "mul") or not adds or x is None or empty_value != 0:
            raise ValueError(
                f"spmm: kernel: 'tiled' takes the sum or mean of 'mul' or 'copy_lhs' with empty_value 0, got the "
                f"{reduce} of {message!r} with {empty_value}"
            )
        if return_arg:
            raise ValueError("spmm: kernel: 'tiled' has no argmax to return, got return_arg=True")
        return spmm_tiled(graph, x, weight, reduce == "mean", tf32=True)
    # Only a gradient of the sources runs over the transposed graph; max and min follow their argmax or argmin instead.
    # The gradient of a weight is a dot product of each edge, which reads the list of the rows.
    sums = adds and not needs_grad(weight)
    arrays = arrays_of(graph, adds and needs_grad(x), x, listed=message in ("copy_lhs", "mul"), sums=sums)
    if not adds:
        hub = needs_grad(x) and graph.has_hub_source()
        results = max_min_op(arrays, x, weight, message, reduce, empty_value, hub)
        return results if return_arg else results[0]
    out = spmm_op(arrays, x, weight, message, reduce, empty_value)
    return (out, arrays.indptr.new_empty(0), arrays.indptr.new_empty(0)) if return_arg else out


def _quotients(graph: Graph, x: Tensor, weight: Tensor, reduce: str, empty_value: float, **options):
    """`spmm` of "div", by inverses of the weights."""
    narrow = x.dtype == torch.float16  # whose inverses have little room
    x, weight = (x.float(), weight.float()) if narrow else (x, weight)
    inverses, scale = inverse(weight)
    results = spmm(graph, x, inverses, "mul", reduce, **options)
    out, *argmax = results if isinstance(results, tuple) else (results,)
    out = out if scale is None else out * scale
    if empty_value:
        empty = (graph.indptr.diff() == 0).view(-1, *[1] * (out.dim() - 1))
        out = torch.where(empty, empty_value, out)
    out = out.half() if narrow else out
    return (out, *argmax) if argmax else out


def _spmm_fake(arrays, lhs, rhs, *_):
    return (rhs if lhs is None else lhs).new_empty(arrays.num_rows, *result_features(lhs, rhs))


def _max_min_fake(arrays, lhs, rhs, message, *_):
    out = _spmm_fake(arrays, lhs, rhs)
    args = (arrays.new_index(out.shape if message != other else (0,)) for other in ("copy_rhs", "copy_lhs"))
    return out, *args


def _spmm_impl(arrays, lhs, rhs, message, reduce, empty_value):
    out = _spmm_fake(arrays, lhs, rhs)
    return launch(arrays, lhs, rhs, (out,), message, reduce, empty_value)[0]


def _max_min_impl(arrays, lhs, rhs, message, reduce, empty_value, _):
    results = _max_min_fake(arrays, lhs, rhs, message)
    return launch(arrays, lhs, rhs, results, message, reduce, empty_value)


def launch(arrays, lhs, rhs, results, message, reduce, empty_value, epilogue=()):
    """Fill `results`: out, and of extremes arg_lhs and arg_rhs. `epilogue`: of `epilogue_of`.

    Returns them, or others in their place.
    """
    out = results[0]
    if out.numel() == 0:
        return results
    full = tuple(out.shape[1:])
    if rhs is not None and index_rule(tuple(rhs.shape[1:]), full) is None:
        return _permuted(arrays, lhs, rhs, full, message, reduce, empty_value)
    given = rhs if lhs is None else lhs
    lhs, lhs_operand = operand(lhs, full)
    rhs, rhs_operand = operand(rhs, full)
    num_feats = math.prod(full)
    sums = given.is_cuda and message == "mul" and reduce in ("sum", "mean")
    moves = sums and brings_in_order(arrays, rhs, num_feats)
    if moves and (ordered := try_empty_like(rhs)):
        rhs, arrays = gather_edge_values(rhs, arrays.edge_ids, *ordered), arrays.by_nonzero()
        rhs_operand = (rhs.data_ptr(), *rhs_operand[1:])
    codes = (lib.MESSAGES[message], lib.REDUCES[reduce], lib.DTYPES[given.dtype], empty_value)
    by_sources = lhs is not None and sources_matter(num_feats, 0 if rhs is None else rhs_operand[1])
    argmax = [a.data_ptr() if a.numel() else 0 for a in results[1:]] or (0, 0)
    operands = (*arrays.walked(by_sources), lhs_operand, rhs_operand, out.data_ptr(), *argmax)
    lib.launch("spmm", given.device, *operands, num_feats, *codes, epilogue)
    return results


def _permuted(arrays, lhs, rhs, full, message, reduce, empty_value):
    """For a weight that is broadcast between two of its dimensions: those it has are brought to the end, which copies
    node features; expanding the weight would store a value per edge and feature."""
    padded, _ = kept(rhs.shape[1:], full)
    order = sorted(range(len(full)), key=lambda i: padded[i] != 1)
    back = sorted(range(len(full)), key=lambda i: order[i])

    def permute(t, order):
        t = t.reshape(t.shape[0], *(1,) * (len(full) + 1 - t.dim()), *t.shape[1:])
        return t.permute(0, *(i + 1 for i in order))

    operands = permute(lhs, order), permute(rhs, order), message, reduce, empty_value
    results = _max_min_impl(arrays, *operands, False) if reduce in ("max", "min") else _spmm_impl(arrays, *operands)
    results = results if isinstance(results, tuple) else (results,)
    return tuple(permute(t, back).contiguous() if t.numel() else t for t in results)


def _setup_context(ctx, inputs, output):
    arrays, lhs, rhs, message, reduce, _, *hub = inputs
    ctx.set_materialize_grads(False)
    ctx.hub = any(hub)
    ctx.features = [None if t is None else tuple(t.shape[1:]) for t in (lhs, rhs)]
    ctx.message, ctx.reduce = message, reduce
    # Each factor is read for the gradient of the other alone; one that nobody needs may be freed or written into.
    needs_lhs, needs_rhs, *_ = ctx.wanted
    keep = (lhs if needs_rhs else None, rhs if needs_lhs else None) if message == "mul" else (None, None)
    argmax = output[1:] if isinstance(output, tuple) else ()
    ctx.mark_non_differentiable(*argmax)
    _arrays.save(ctx, arrays, *keep, *argmax)


def _backward(ctx, grad):
    grads = (None, None) if grad is None else _backward_sum(ctx, grad)
    return *grads, None, None, None


def _max_min_backward(ctx, grad, _grad_arg_lhs, _grad_arg_rhs):
    grads = (None, None) if grad is None else _backward_max_min(ctx, grad)
    return *grads, None, None, None, None


def _backward_sum(ctx, grad):
    arrays, (lhs, rhs) = _arrays.saved(ctx)
    needs_lhs, needs_rhs, *_ = ctx.wanted
    lhs_features, rhs_features = ctx.features
    if ctx.reduce == "mean":
        if needs_lhs and not needs_rhs and _divides(arrays, rhs, grad):
            return reduce_to(_mean_gradient_op(arrays.transposed(), grad, rhs), lhs_features), None
        grad = _divided(arrays, grad)
    if needs_lhs and needs_rhs and fuses(lhs, rhs, grad):
        # Both gradients read the same rows of grad: one walk serves them.
        return both_gradients_op(arrays.transposed(), lhs, rhs, grad)
    grad_lhs = grad_rhs = None
    if needs_lhs and lhs_features is not None:
        transposed = arrays.transposed()
        if ctx.message == "mul":
            grad_lhs = spmm_op(transposed, grad, rhs, "mul", "sum", 0.0)
        else:
            grad_lhs = spmm_op(transposed, grad, None, "copy_lhs", "sum", 0.0)
        grad_lhs = reduce_to(grad_lhs, lhs_features)
    if needs_rhs and rhs_features is not None:
        grad_rhs = weight_gradient(arrays, lhs, grad, rhs_features, ctx.message)
    return grad_lhs, grad_rhs


def _divided(arrays: Structure, grad: Tensor) -> Tensor:
    """The gradient of a mean over the number of its row's nonzeros."""
    # In fp32 at least: a count past 65504 has no fp16.
    count = degrees_op(arrays).clamp(min=1).to(torch.promote_types(grad.dtype, torch.float32))
    return (grad / count.view(-1, *[1] * (grad.dim() - 1))).to(grad.dtype)


def _divides(arrays: Structure, rhs, grad) -> bool:
    """True if the kernel of the sources' gradient divides by the row's count itself, which spares a read and a
    write of `grad`: no second derivative, at most one weight per edge."""
    return (
        not torch.is_grad_enabled()
        and (rhs is None or width(rhs) == 1)
        and not scales_first(arrays.nnz, arrays.num_rows, grad)
    )


def brings_in_order(arrays: Structure, weight: Tensor, num_feats: int) -> bool:
    """True if weights should be brought into the order of the nonzeros before a sum on CUDA."""
    row_bytes = num_feats * weight.element_size()
    if width(weight) == num_feats or num_feats <= bounds.NARROW_SUMS:  # the first: a value of its own for each feature
        return False
    return is_profitable(
        arrays.edge_ids, weight, row_bytes, row_bytes <= bounds.NARROW_SUM_BYTES, 16 * worklist.decode(arrays.plan)[2]
    )


def _mean_gradient_impl(arrays, grad, weight):
    out = grad.new_empty(arrays.num_rows, *grad.shape[1:])
    over_degree = epilogue_of(source_indptr=arrays.transposed().indptr)
    launch(arrays, grad, weight, (out,), "copy_lhs" if weight is None else "mul", "sum", 0.0, over_degree)
    return out


def _mean_gradient_fake(arrays, grad, _):
    return grad.new_empty(arrays.num_rows, *grad.shape[1:])


# out[c] = sum over nonzeros (c, r, e) of the transposed graph of weight[e] * grad[r] / nonzeros of r. No derivative.
_mean_gradient_op = _operators.register(
    "spmm_mean_gradient",
    f"({_arrays.SCHEMA}, Tensor grad, Tensor? weight) -> Tensor",
    _mean_gradient_impl,
    _mean_gradient_fake,
    check=_check.reads("spmm_mean_gradient", ("grad", "cols"), ("weight", "edges")),
    structure=Structure,
)


def _backward_max_min(ctx, grad):
    arrays, (lhs, rhs, arg_lhs, arg_rhs) = _arrays.saved(ctx)
    needs_lhs, needs_rhs, *_ = ctx.wanted
    lhs_features, rhs_features = ctx.features
    full, again = tuple(grad.shape[1:]), torch.is_grad_enabled()  # else nothing reads what nobody won
    grad_lhs = grad_rhs = None
    if needs_lhs and lhs_features is not None:
        value = grad * gather_arg(rhs, arg_rhs, full, again) if ctx.message == "mul" else grad
        # One that wins very many rows would lose digits where one number after the other is added in float32.
        value = value.double() if ctx.hub else value
        grad_lhs = scatter_arg_op(arg_lhs, value, arrays.num_cols, full, False).to(grad.dtype)
        grad_lhs = reduce_to(grad_lhs, lhs_features)
    if needs_rhs and rhs_features is not None:
        value = grad * gather_arg(lhs, arg_lhs, full, again) if ctx.message == "mul" else grad
        grad_rhs = scatter_arg_op(arg_rhs, value, arrays.nnz, rhs_features, True)
    return grad_lhs, grad_rhs


# The number of nonzeros of each row, of the graph's index type.
degrees_op = _operators.register(
    "degrees",
    f"({_arrays.SCHEMA}) -> Tensor",
    lambda arrays: arrays.indptr.diff(),
    lambda arrays: arrays.new_index((arrays.num_rows,)),
    structure=Structure,
)


def _check_message(_arrays, lhs, rhs, message, *_):
    if lhs is None or rhs is None:
        _check.operands_of("spmm", message, lhs, rhs)


_READS = (("lhs", "cols"), ("rhs", "edges"))
_INPUTS = f"{_arrays.SCHEMA}, Tensor? lhs, Tensor? rhs, str message, str reduce, float empty_value"
spmm_op = _operators.register(
    "spmm",
    f"({_INPUTS}) -> Tensor",
    _spmm_impl,
    _spmm_fake,
    check=_check.reads("spmm", *_READS, also=_check_message),
    structure=Structure,
    backward=_backward,
    setup_context=_setup_context,
)
max_min_op = _operators.register(
    "spmm_max_min",
    f"({_INPUTS}, bool hub) -> (Tensor, Tensor, Tensor)",
    _max_min_impl,
    _max_min_fake,
    check=_check.reads("spmm_max_min", *_READS, also=_check_message),
    structure=Structure,
    backward=_max_min_backward,
    setup_context=_setup_context,
)


def _sum_gradient(arrays: Structure, grad: Tensor, *_scales) -> Tensor:
    return spmm_op(arrays.transposed(), grad, None, "copy_lhs", "sum", 0.0)


FORMS = {
    "sum": ready.Form("sum", _sum_gradient),
    "mean": ready.Form("mean", lambda arrays, grad, *_: _sum_gradient(arrays, _divided(arrays, grad))),
}


def _weighted_gradient(arrays: Structure, x, weight, grad: Tensor, needed) -> tuple[Tensor | None, Tensor | None]:
    of_x, of_weight = needed
    if of_x and of_weight and fuses(x, weight.view(-1, 1), grad):
        grad_x, grad_weight = both_gradients_op(arrays.transposed(), x, weight.view(-1, 1), grad)
        return grad_x, grad_weight.view(weight.shape)
    grad_x = spmm_op(arrays.transposed(), grad, weight.view(-1, 1), "mul", "sum", 0.0) if of_x else None
    grad_weight = weight_gradient(arrays, x, grad, (1,), "mul") if of_weight else None
    return grad_x, grad_weight


_WEIGHTED = ready.Form("weighted", _weighted_gradient)
