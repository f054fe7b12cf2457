"""Matrix products of groups of rows, each group with a matrix of its own: group by group, by the BLAS that torch has,
or on CUDA, where a group has too little to do for a call of its own, by one launch for all; of bfloat16 by torch's own
grouped product."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, _precision, touch
from gnnaccel.graph import build
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _check
from gnnaccel.ops._arrays import csr_of


def segment_matmul(x: Tensor, ptr: Tensor, weight: Tensor, *, check: bool = True) -> Tensor:
    """out[i] = x[i] @ weight[s] for the rows i of segment s, ptr[s] <= i < ptr[s + 1].

    Parameters
    ----------
    x : Tensor [n, D_in]
        float32, float64, bfloat16; float16 on CUDA.
    ptr : Tensor [S + 1], int32 or int64
        Ascending from 0 to n. To check one that lies on a GPU takes a synchronisation.
    weight : Tensor [S, D_in, D_out], or [S, H, D_in / H, D_out / H] for block-diagonal matrices of H blocks
        Same dtype and device as x.
    check : bool
        Check `ptr`.

    Returns
    -------
    Tensor [n, D_out]

    Raises
    ------
    TypeError, ValueError
        For a wrong type, dtype, shape or device, or offsets that do not describe x.

    Notes
    -----
    A segment without rows costs nothing. On CUDA many segments take one launch (three with the gradients of `weight`),
    few large ones a product of torch's each, and those of bfloat16 with widths that are multiples of 8 torch's grouped
    product where it has a kernel (compute capability 9.0 and 10.x). The same bits on every run. On the CPU rows of
    bfloat16 are added up as torch.mm adds them.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> weight = torch.tensor([[[1.0]], [[10.0]]])
    >>> gnnaccel.ops.segment_matmul(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 2, 3]), weight)
    tensor([[ 1.],
            [ 2.],
            [40.]])
    """
    op = "segment_matmul"
    ptr = build.as_index("ptr", ptr, op)
    rows = x.shape[0] if isinstance(x, Tensor) and x.dim() else -1
    _check.feature(op, "x", x, rows, "rows", x.device if isinstance(x, Tensor) else torch.device("cpu"))
    _check.feature(op, "weight", weight, ptr.shape[0] - 1, "one per segment", x.device)
    x, weight = _check.same_dtype(op, x, weight, "x", "weight")
    _maps(op, x, weight)
    if check and torch.compiler.is_compiling():
        _check.traced_offsets(op, ptr, rows)
    elif check:
        ptr = ptr.clone()
        build.check_offsets(f"{op}: ptr", ptr, rows)
    return matmul_op(x, ptr, weight)


def grouped_matmul(inputs: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """outs[i] = inputs[i] @ others[i].

    Parameters
    ----------
    inputs : sequence of Tensor [n_i, D_i]
    others : sequence of Tensor [D_i, E_i]

    Returns
    -------
    list of Tensor [n_i, E_i]

    Raises
    ------
    ValueError
        For sequences of different lengths.

    Notes
    -----
    Where all matrices have one shape this is one node of autograd, as `segment_matmul` of the inputs put together.
    """
    inputs, others = list(inputs), list(others)
    if len(inputs) != len(others):
        raise ValueError(f"grouped_matmul: others: expected {len(inputs)}, one per input, got {len(others)}")
    alike = len(inputs) > 1 and all(w.dim() == 2 and w.shape == others[0].shape for w in others)
    if not alike or any(x.dim() != 2 or x.dtype != inputs[0].dtype for x in inputs):
        return [x @ w for x, w in zip(inputs, others, strict=True)]
    sizes = [x.shape[0] for x in inputs]
    ptr = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
    return list(segment_matmul(torch.cat(inputs), ptr, torch.stack(others), check=False).split(sizes))


def _maps(op: str, x: Tensor, weight: Tensor) -> None:
    """ValueError unless the matrices of `weight` map rows of x."""
    wide = weight.dim() in (3, 4) and x.dim() == 2
    if not wide or x.shape[1] != weight.shape[-2] * (weight.shape[1] if weight.dim() == 4 else 1):
        raise ValueError(
            f"{op}: weight: expected [S, D_in, D_out] or [S, H, D_in / H, D_out / H] for an x [n, D_in], got "
            f"{tuple(weight.shape)} for {tuple(x.shape)}"
        )


def _segments(ptr: Tensor) -> list[tuple[int, int, int]]:
    """(segment, first row, end) of those that have rows."""
    offsets = ptr.tolist()
    return [(s, a, b) for s, (a, b) in enumerate(itertools.pairwise(offsets)) if a < b]


def _width(weight: Tensor) -> int:
    return weight.shape[-1] * (weight.shape[1] if weight.dim() == 4 else 1)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[n, H * D] -> [H, n, D]."""
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def _pays(segments: int, multiplications: int, dtype: torch.dtype) -> bool:
    """True if one launch takes less than a product of torch's for each segment."""
    full = dtype is torch.float64 or (dtype is torch.float32 and not _precision.allows_tf32())
    return segments * (bounds.SEGMENT_CALL_FULL if full else bounds.SEGMENT_CALL) >= multiplications


_ALIGNED = 8  # numbers of two bytes in the 16 to which it wants rows aligned


@functools.cache
def _has_grouped(device: int) -> bool:
    capability = torch.cuda.get_device_capability(device)[0]
    return touch.grouped_mm is not None and capability in bounds.GROUPED_CAPABILITIES


def _takes_grouped(x: Tensor, ptr: Tensor, inner: int, outer: int, *others: Tensor) -> bool:
    """True where torch's grouped product does these products, of rows x [n, inner] or with them, and takes less."""
    if x.dtype is not torch.bfloat16 or not x.is_cuda or ptr.shape[0] <= bounds.GROUPED_SEGMENTS or not x.shape[0]:
        return False
    if not inner or not outer or inner % _ALIGNED or outer % _ALIGNED or x.shape[0] > bounds.INT32_MAX:
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not x.dtype:
        return False  # which casts what that product takes
    # The stride of a single row may be any number.
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % _ALIGNED == 0 for t in (x, *others))
    return aligned and _has_grouped(x.device.index)


def _ends(x: Tensor, ptr: Tensor) -> Tensor | None:
    """Where the segments end, as torch's grouped product wants it."""
    return _brought(ptr, x.device, "ends on CUDA", lambda: ptr[1:].to(x.device, torch.int32))


def _brought(ptr: Tensor, device: torch.device, key: str, bring: Callable[[], Tensor]) -> Tensor | None:
    """What bring() makes of `ptr` on a GPU, kept with a `ptr` on the CPU; None in a capture, which may not bring it."""
    if ptr.device.type == device.type:
        return bring()
    found = derived.get((ptr,), key)
    if found is None or found.device != device:
        if torch.cuda.is_current_stream_capturing():
            return None
        found = bring()
        if _operators.plain((ptr,)):
            derived.put((ptr,), key, found)
    return found


def _grouped(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor | None:
    """The products of rows by torch's grouped one; None where that has none for them, or takes longer."""
    if weight.dim() != 3 or not _takes_grouped(x, ptr, *weight.shape[1:]):
        return None
    if not weight.is_contiguous() and not weight.transpose(-1, -2).is_contiguous():
        weight = weight.contiguous()
    ends = _ends(x, ptr) if weight.data_ptr() % 16 == 0 else None
    return None if ends is None else touch.grouped_mm(x, weight, offs=ends)


def _weights_pay(ptr: Tensor, rows: int, inner: int, outer: int) -> bool:
    """True where torch's grouped product takes less for the gradients of the matrices than what there is beside it."""
    if ptr.is_cuda:
        return True  # the longest segment is not known
    grouped = (
        int(ptr.diff().max()) * max(inner, bounds.GROUPED_TILE) * max(outer, bounds.GROUPED_TILE) * bounds.GROUPED_PS
    )
    return grouped <= min(
        rows * inner * outer * bounds.SEGMENT_KERNEL_PS, (ptr.shape[0] - 1) * bounds.SEGMENT_PRODUCT_PS
    )


def _weights_grouped(x: Tensor, ptr: Tensor, grad: Tensor) -> Tensor | None:
    """`_grouped` of weights_op."""
    inner, outer = x.shape[1], grad.shape[1]
    if not _takes_grouped(x, ptr, inner, outer, grad) or not _weights_pay(ptr, x.shape[0], inner, outer):
        return None
    ends = _ends(x, ptr)
    if ends is None:
        return None
    out = touch.grouped_mm(x.t(), grad, offs=ends)
    if not ptr.is_cuda and bool((ptr.diff() > 0).all()):
        return out
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0  # of which it may write nothing
    return out.masked_fill_(empty.view(-1, 1, 1), 0)


def _offsets(x: Tensor, rows: int, ptr: Tensor, heads: int, inner: int, outer: int) -> Tensor | None:
    """`ptr` for the kernel, on the device of x, where it is to do the products of `rows` rows with `heads` matrices
    [inner, outer] for each segment; None where torch is to do them one by one."""
    if not x.is_cuda or not lib.has_cuda_kernels() or x.dtype not in lib.DTYPES:
        return None
    if heads * -(-inner // 64) * -(-outer // 64) > bounds.GRID_BLOCKS:
        return None
    if not ptr.is_cuda and not _pays(ptr.shape[0] - 1, rows * heads * inner * outer, x.dtype):
        return None
    return _brought(ptr, x.device, "offsets on CUDA", lambda: ptr.to(x.device, torch.int64).contiguous())


def _dense_pays(x: Tensor, heads: int, inner: int, outer: int) -> bool:
    """True where blocks are so small that a product with whole matrices, zeros and all, takes less."""
    if heads < 2 or not x.is_cuda:
        return False

    def work(inner: int, outer: int) -> int:  # of tiles that a product is made of
        return -(-inner // 16) * -(-outer // 64)

    return work(heads * inner, heads * outer) <= heads * work(inner, outer)


def _dense(weight: Tensor) -> Tensor:
    """Block-diagonal matrices [S, H, I, O] as [S, H * I, H * O]."""
    count, heads, inner, outer = weight.shape
    out = weight.new_zeros(count, heads, inner, heads, outer)
    out.diagonal(dim1=1, dim2=3).copy_(weight.permute(0, 2, 3, 1))
    return out.view(count, heads * inner, heads * outer)


def _blocks(weight: Tensor, heads: int) -> Tensor:
    """The blocks [S, H, I, O] on the diagonals of [S, H * I, H * O]."""
    count, wide, tall = weight.shape
    found = weight.view(count, heads, wide // heads, heads, tall // heads).diagonal(dim1=1, dim2=3)
    return found.permute(0, 3, 1, 2).contiguous()


class Sums(NamedTuple):
    """Rows of a product that are sums: spmm(graph, x, factors), which a kernel reads as it adds them up.

    graph : Graph without edge ids, whose rows are short: a thread adds one up.
    factors : Tensor [nnz], of the dtype of x, or None.
    """

    graph: Graph
    factors: Tensor | None

    def arguments(self) -> tuple:
        """For the kernel."""
        factors = self.factors
        return csr_of(self.graph), 0 if factors is None else lib.pointer(factors)


_NO_SUMS = (None, 0)


def matmul_of_sums(sums: Sums, x: Tensor, ptr: Tensor, weight: Tensor, spare: int = 0) -> Tensor | None:
    """matmul_op(spmm(*sums of x), ptr, weight) by one kernel that stores no sums, of tensors that are `usual`; without
    a gradient. None where sums are to be stored for torch's products: nothing has been done then.

    spare : rows of the result behind these, which are not written."""
    weight = _dense(weight) if weight.dim() == 4 and _dense_pays(x, *weight.shape[1:]) else weight
    return _by_kernel(x.contiguous(), ptr, weight, sums, spare)


def weights_of_sums(
    sums: Sums | None, x: Tensor, ptr: Tensor, grad_sums: Sums | None, grad: Tensor, heads: int
) -> Tensor | None:
    """weights_op(spmm(*sums of x), ptr, spmm(*grad_sums of grad), heads), as `matmul_of_sums`; None for rows that are
    stored."""
    x, grad = x.contiguous(), grad.contiguous()
    if heads and _dense_pays(x, heads, x.shape[1] // heads, grad.shape[1] // heads):
        found = _weights_by_kernel(x, ptr, grad, 0, sums, grad_sums)
        return None if found is None else _blocks(found, heads)
    return _weights_by_kernel(x, ptr, grad, heads, sums, grad_sums)


def _by_kernel(x: Tensor, ptr: Tensor, weight: Tensor, sums: Sums | None = None, spare: int = 0) -> Tensor | None:
    inner, outer = weight.shape[-2:]
    heads = weight.shape[1] if weight.dim() == 4 else 1
    rows = x.shape[0] if sums is None else sums.graph.num_rows
    offsets = _offsets(x, rows, ptr, heads, inner, outer) if inner else None
    if offsets is None:
        return None
    out = x.new_empty(rows + spare, heads * outer)
    transposed = not weight.is_contiguous() and weight.transpose(-1, -2).is_contiguous()
    weight = weight if transposed else weight.contiguous()
    pointers = [lib.pointer(t) for t in (x, offsets, weight, out)]
    sizes = (rows, weight.shape[0], heads, inner, outer, transposed, lib.DTYPES[x.dtype])
    lib.launch("segment_matmul", x.device, *(_NO_SUMS if sums is None else sums.arguments()), *pointers, *sizes)
    return out


def _weights_by_kernel(x, ptr, grad, heads: int, sums: Sums | None = None, grad_sums: Sums | None = None):
    out = _weights_fake(x, ptr, grad, heads)
    each, rows = heads or 1, x.shape[0] if sums is None else sums.graph.num_rows  # as many as of grad
    offsets = _offsets(x, rows, ptr, each, *out.shape[-2:])
    if offsets is None:
        return None
    given = [(*(_NO_SUMS if s is None else s.arguments()), lib.pointer(t)) for s, t in ((sums, x), (grad_sums, grad))]
    sizes = (rows, out.shape[0], each, *out.shape[-2:], lib.DTYPES[x.dtype])
    lib.launch("segment_matmul_weights", x.device, *given[0], lib.pointer(offsets), *given[1], lib.pointer(out), *sizes)
    return out


def _matmul_impl(x, ptr, weight):
    x = x.contiguous()
    if weight.dim() == 4 and _dense_pays(x, *weight.shape[1:]):
        weight = _dense(weight)
    found = _grouped(x, ptr, weight)
    found = _by_kernel(x, ptr, weight) if found is None else found
    if found is not None:
        return found
    # With a place for the result autocast, which is none of this op's, leaves the products alone.
    out = x.new_empty(x.shape[0], _width(weight))
    if not x.shape[1]:
        return out.zero_()
    for s, a, b in _segments(ptr):
        if weight.dim() == 3:
            torch.mm(x[a:b], weight[s], out=out[a:b])
        else:
            torch.bmm(_by_head(x[a:b], weight.shape[1]), weight[s], out=_by_head(out[a:b], weight.shape[1]))
    return out


def _matmul_fake(x, ptr, weight):
    return x.new_empty(x.shape[0], _width(weight))


def _weights_impl(x, ptr, grad, heads):
    x, grad = x.contiguous(), grad.contiguous()
    if heads and _dense_pays(x, heads, x.shape[1] // heads, grad.shape[1] // heads):
        return _blocks(_weights_impl(x, ptr, grad, 0), heads)
    found = None if heads else _weights_grouped(x, ptr, grad)
    found = _weights_by_kernel(x, ptr, grad, heads) if found is None else found
    if found is not None:
        return found
    out = _weights_fake(x, ptr, grad, heads)
    segments = _segments(ptr)
    if len(segments) != out.shape[0]:
        out.zero_()
    for s, a, b in segments:
        if heads:
            torch.bmm(_by_head(x[a:b], heads).transpose(1, 2), _by_head(grad[a:b], heads), out=out[s])
        else:
            torch.mm(x[a:b].t(), grad[a:b], out=out[s])
    return out


def _weights_fake(x, ptr, grad, heads):
    count, wide, tall = ptr.shape[0] - 1, x.shape[1], grad.shape[1]
    return x.new_empty(count, heads, wide // heads, tall // heads) if heads else x.new_empty(count, wide, tall)


def _matmul_context(ctx, inputs, output):
    x, ptr, weight = inputs
    of_x, _, of_weight = ctx.wanted
    ctx.heads = weight.shape[1] if weight.dim() == 4 else 0
    ctx.save_for_backward(x if of_weight else None, ptr, weight if of_x else None)


def _matmul_backward(ctx, grad):
    x, ptr, weight = ctx.saved_tensors
    of_x, _, of_weight = ctx.wanted
    grad_x = matmul_op(grad, ptr, weight.transpose(-1, -2)) if of_x else None
    return grad_x, None, weights_op(x, ptr, grad, ctx.heads) if of_weight else None


def _weights_context(ctx, inputs, output):
    x, ptr, grad, _ = inputs
    of_x, _, of_grad, _ = ctx.wanted
    ctx.save_for_backward(x if of_grad else None, ptr, grad if of_x else None)


def _weights_backward(ctx, outer):
    x, ptr, grad = ctx.saved_tensors
    of_x, _, of_grad, _ = ctx.wanted
    grad_x = matmul_op(grad, ptr, outer.transpose(-1, -2)) if of_x else None
    return grad_x, None, matmul_op(x, ptr, outer) if of_grad else None, None


# segment_matmul of checked arguments.
matmul_op = _operators.register(
    "segment_matmul",
    "(Tensor x, Tensor ptr, Tensor weight) -> Tensor",
    _matmul_impl,
    _matmul_fake,
    backward=_matmul_backward,
    setup_context=_matmul_context,
)
# out[s] = x[rows of s].T @ grad[rows of s], of `heads` blocks each; heads 0: one matrix without that dimension.
weights_op = _operators.register(
    "segment_matmul_weights",
    "(Tensor x, Tensor ptr, Tensor grad, SymInt heads) -> Tensor",
    _weights_impl,
    _weights_fake,
    backward=_weights_backward,
    setup_context=_weights_context,
)
