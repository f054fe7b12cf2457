"""Rows with a matrix for each type of row: sorted by type, mapped type by type, and brought back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators
from gnnaccel.graph import modes
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops._relations import index_dtype
from gnnaccel.ops.segment_matmul import matmul_op
from gnnaccel.ops.spmm import spmm


class Order(NamedTuple):
    """Rows by type. order: their numbers, by type; inverse: the place of each; None both if rows are sorted already.
    ptr : int64 [types + 1]. graph : rows x types, with an edge for each row; or None."""

    order: Tensor | None
    inverse: Tensor | None
    ptr: Tensor
    graph: Graph | None


def typed_matmul(
    op: str, name: str, x: Tensor, types: Tensor, weight: Tensor, bias: Tensor | None = None, stays: bool = True
) -> Tensor:
    """out[i] = x[i] @ weight[types[i]] + bias[types[i]].

    Parameters
    ----------
    op, name : str
        What errors call this and `types`.
    x : Tensor [n, D_in]
    types : Tensor [n], int32 or int64, on the device of x
        In [0, T). Their order is kept as long as they live and are not written into.
    weight : Tensor [T, D_in, D_out], or [T, H, D_in / H, D_out / H] for block-diagonal matrices
        Dtype and device of x.
    bias : Tensor [T, D_out], same dtype, optional
    stays : bool
        False for types that are made anew at each call, of which nothing is worth keeping.

    Returns
    -------
    Tensor [n, D_out]

    Raises
    ------
    IndexError
        For a type outside [0, T), which is named.
    """
    few = x.is_cpu and x.shape[0] * weight.shape[-1] <= bounds.FEW_TYPED_BIASES
    rows = order_of(op, name, types, weight.shape[0], stays, graph=bias is not None and not few)
    if rows.order is None or rows.inverse is None:
        out = matmul_op(x, rows.ptr, weight)
    else:
        out = matmul_op(_permuted(x, rows.order, rows.inverse), rows.ptr, weight)
        out = _permuted(out, rows.inverse, rows.order)
    if bias is None:
        return out
    return out + (bias.index_select(0, types) if few or rows.graph is None else spmm(rows.graph, bias))


def order_of(op: str, name: str, types: Tensor, count: int, stays: bool = True, graph: bool = True) -> Order:
    """The rows by type, kept with `types`; without a `graph` if that is neither asked for nor kept. Raises as
    `typed_matmul`."""
    key = ("rows by type", count)
    if stays and (found := derived.get((types,), key)) is not None:
        return found
    with modes.outside_inference(grad=False):
        found = _ordered(op, name, types.clone() if stays else types, count, stays, graph or stays)
    if stays and _operators.plain((types,)):
        derived.put((types,), key, found)
    return found


def _ordered(op: str, name: str, types: Tensor, count: int, stays: bool, graph: bool) -> Order:
    rows = types.shape[0]
    is_sorted = True
    if rows:
        low, high = torch.aminmax(types)
        # One transfer for all three.
        least, most, is_sorted = torch.stack([low, high, (types[1:] >= types[:-1]).all().to(low.dtype)]).tolist()
        if least < 0 or most >= count:
            bad = least if least < 0 else most
            where = int((types == bad).nonzero()[0])
            raise IndexError(f"{op}: {name}: expected types in [0, {count}), got {bad} at row {where}")
    order = inverse = None
    ascending = types
    if not is_sorted:
        ascending, order = torch.sort(types, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(rows, device=order.device)
    ptr = torch.searchsorted(ascending, torch.arange(count + 1, device=types.device, dtype=types.dtype))
    if stays:  # else a kernel reads it where it is
        ptr = ptr.cpu()
    if not graph:
        return Order(order, inverse, ptr, None)
    dtype = index_dtype(max(rows, count))
    numbers = torch.arange(rows + 1, device=types.device, dtype=dtype)
    return Order(order, inverse, ptr, Graph(numbers, types.to(dtype), None, count))


class _Permuted(_operators.Function):
    """Rows in another order. The gradient is their way back: rows that are copied, none that are added."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, order, inverse):
        return x.index_select(0, order)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, order, inverse = inputs
        ctx.save_for_backward(order, inverse)

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.saved_tensors
        return _permuted(grad, inverse, order), None, None


# Without Function.apply()'s wrapper, which looks for transforms of torch.func, where there are none.
_short = super(torch.autograd.Function, _Permuted).apply  # type: ignore[misc]


def _permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return (_short if _operators.usual(x) else _Permuted.apply)(x, order, inverse)
