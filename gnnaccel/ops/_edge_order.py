"""Values of edges in the order of the nonzeros, for kernels that would look each of them up by its edge id.

On CUDA such a look-up fetches, or on its way out rewrites, 32 bytes for 4, once for every slice of the features, and in
the order in which rows are worked on. One pass over the nonzeros as they lie moves less (cuda/edge_order.cu). Times:
docs/advisor.md.
"""

from __future__ import annotations

import functools
import logging
import math

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.lower import bounds


def is_profitable(edge_ids: Tensor | None, x: Tensor, row_bytes: int, alone: bool, slice_bytes: int = 0) -> bool:
    """True if x [nnz, ...] should be brought into the other order by a pass of its own.

    Parameters
    ----------
    edge_ids : Tensor [nnz] or None
    x : Tensor [nnz, ...]
    row_bytes : int
        Of a row of features: a kernel looks each value up once for every slice of it.
    alone : bool
        True if one look-up is enough for a pass to pay, on a graph of many nonzeros. By op and measured
        (benchmarks/edge_order.py).
    slice_bytes : int
        If the kernel's are not the usual ones.
    """
    if edge_ids is None or not edge_ids.is_cuda or not 0 < _edge_bytes(x) <= bounds.EDGE_ORDER_BYTES:
        return False
    if row_bytes > (slice_bytes or bounds.EDGE_ORDER_SLICE):
        return x.shape[0] >= bounds.EDGE_ORDER_EDGES
    return alone and x.shape[0] >= bounds.EDGE_ORDER_MANY


def dense(nnz: int, num_rows: int) -> bool:
    """True of graphs whose rows are so long that the edges of a row lie far apart."""
    return nnz >= bounds.EDGE_ORDER_DEGREE * num_rows


def try_empty_like(x: Tensor, count: int = 1) -> list[Tensor]:
    """`count` contiguous tensors as large as x to have values in order in; none where there is no memory for them."""
    try:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(count)]
    except torch.OutOfMemoryError:
        say_no_memory()
        return []


@functools.cache
def say_no_memory() -> None:
    """Once."""
    logging.getLogger("gnnaccel").warning("no memory to bring values of edges in order; kernels look them up, slower")


def gather_edge_values(x: Tensor, edge_ids: Tensor, out: Tensor) -> Tensor:
    """x [nnz, ...] by edge id -> out [nnz, ...], contiguous, by nonzero: out[k] = x[edge_ids[k]]."""
    return _moved(x.contiguous(), edge_ids, out, False)


def scatter_edge_values(x: Tensor, edge_ids: Tensor, out: Tensor) -> Tensor:
    """x [nnz, ...] by nonzero -> out [nnz, ...], contiguous, by edge id: out[edge_ids[k]] = x[k]."""
    return _moved(x.contiguous(), edge_ids, out, True)


def _moved(x: Tensor, edge_ids: Tensor, out: Tensor, by_id: bool) -> Tensor:
    pointers = (edge_ids.data_ptr(), x.data_ptr(), out.data_ptr())
    lib.launch("edge_order", x.device, *pointers, x.shape[0], _edge_bytes(x), by_id, lib.INDEX_TYPES[edge_ids.dtype])
    return out


def _edge_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()
