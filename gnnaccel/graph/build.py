"""Making CSR arrays: conversion from COO, transposition, and the one check of indices a graph ever gets."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, touch
from gnnaccel.lower import bounds

_ON_CPU = torch.device("cpu")


def as_index(name: str, value, op: str = "Graph") -> Tensor:
    """`value` as a contiguous 1-D int32 or int64 tensor, or a TypeError / ValueError that names it."""
    if isinstance(value, Tensor):
        tensor = value
    else:
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            got = type(value).__name__
            raise TypeError(f"{op}: {name}: expected a tensor or array of integers, got {got}") from None
        if tensor.numel() == 0 and tensor.dtype == torch.get_default_dtype():
            tensor = tensor.long()  # an empty list has no dtype of its own
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name}: expected int32 or int64, got {tensor.dtype}; convert it with .long()")
    if tensor.dim() != 1 or tensor.layout != torch.strided:
        raise ValueError(f"{op}: {name}: expected a dense 1-D tensor, got shape {tuple(tensor.shape)}")
    if tensor.is_meta:
        raise ValueError(f"{op}: {name}: expected a tensor with values, got one on the meta device")
    return tensor.contiguous()


def as_size(name: str, value) -> int:
    """`value` as a row or column count, or a TypeError / ValueError that names it."""
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"Graph: {name}: expected an int, got {type(value).__name__}") from None
    if size < 0:
        raise ValueError(f"Graph: {name}: expected at least 0, got {size}")
    return size


def common_index_dtype(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None):
    """All three in one dtype (the wider if they differ) on one device."""
    given = [t for t in (indptr, indices, edge_ids) if t is not None]
    if len({t.device for t in given}) > 1:
        raise ValueError(f"Graph: expected all arrays on one device, got {[str(t.device) for t in given]}")
    if len({t.dtype for t in given}) > 1:
        indptr, indices = indptr.long(), indices.long()
        edge_ids = None if edge_ids is None else edge_ids.long()
    return indptr, indices, edge_ids


def given_csr(indptr, indices, edge_ids, num_cols: int | None, *, check: bool = True, copy: bool = True):
    """CSR arrays and num_cols from those of a user; see `Graph.from_csr`."""
    indptr, indices = as_index("indptr", indptr), as_index("indices", indices)
    edge_ids = None if edge_ids is None else as_index("edge_ids", edge_ids)
    if copy:
        indptr, indices = indptr.clone(), indices.clone()
        edge_ids = None if edge_ids is None else edge_ids.clone()
    indptr, indices, edge_ids = common_index_dtype(indptr, indices, edge_ids)
    if num_cols is None:
        top = int(indices.max()) + 1 if indices.numel() else 0
        num_cols = max(indptr.numel() - 1, top, 0)
    num_cols = as_size("num_cols", num_cols)
    if check:
        check_csr(indptr, indices, edge_ids, num_cols)
    return indptr, indices, edge_ids, num_cols


def check_csr(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, num_cols: int) -> None:
    """Raise ValueError unless the arrays describe a CSR matrix with `num_cols` columns."""
    nnz = indices.numel()
    check_offsets("Graph: indptr", indptr, nnz)
    check_range("indices", indices, num_cols, "num_cols")
    if edge_ids is not None:
        if edge_ids.numel() != nnz:
            raise ValueError(f"Graph: edge_ids: expected {nnz} entries (one per nonzero), got {edge_ids.numel()}")
        check_range("edge_ids", edge_ids, nnz, "nnz")
        if nnz and int(torch.bincount(edge_ids, minlength=nnz).max()) > 1:
            raise ValueError("Graph: edge_ids: expected each edge id once, got a repeated one")


def check_offsets(where: str, offsets: Tensor, nnz: int) -> None:
    """Raise ValueError unless `offsets` ascends from 0 to nnz."""
    if offsets.numel() < 1:
        raise ValueError(f"{where}: expected one more entry than rows, got none; no rows have offsets [0]")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != nnz:
        raise ValueError(f"{where}: expected to start at 0 and end at nnz = {nnz}, got {first} and {last}")
    descent = offsets[1:] < offsets[:-1]  # a comparison: the difference of two int32 could wrap around
    if bool(descent.any()):
        raise ValueError(f"{where}: expected ascending offsets, got a descent after row {int(descent.nonzero()[0])}")


def check_range(name: str, index: Tensor, limit: int, limit_name: str) -> None:
    """Raise ValueError unless 0 <= index < limit everywhere."""
    if index.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(index))
    if low < 0 or high >= limit:
        bad = low if low < 0 else high
        where = int((index == bad).nonzero()[0])
        raise ValueError(
            f"Graph: {name}: expected values in [0, {limit}) ({limit_name}), got {bad} at position {where}"
        )


def rows_of(indptr: Tensor) -> Tensor:
    """Row (destination) of each nonzero, int64 [nnz]."""
    indptr = indptr.long()
    return torch.repeat_interleave(torch.arange(indptr.numel() - 1, device=indptr.device), indptr.diff())


def coo_to_csr(rows, cols, num_rows: int | None, num_cols: int | None):
    """CSR arrays and num_cols from COO pairs; see `Graph.from_coo`."""
    rows, cols = as_index("rows", rows), as_index("cols", cols)
    if rows.numel() != cols.numel():
        raise ValueError(f"Graph: expected rows and cols of equal length, got {rows.numel()} and {cols.numel()}")
    if rows.device != cols.device:
        raise ValueError(f"Graph: expected rows and cols on one device, got {rows.device} and {cols.device}")
    if rows.dtype != cols.dtype:
        rows, cols = rows.long(), cols.long()
    if num_rows is None or num_cols is None:
        top = 1 + max((int(t.max()) for t in (rows, cols) if t.numel()), default=-1)
        num_rows = top if num_rows is None else num_rows
        num_cols = top if num_cols is None else num_cols
    num_rows, num_cols = as_size("num_rows", num_rows), as_size("num_cols", num_cols)
    sort = _sort if _operators.plain((rows, cols)) else _coo_to_csr_op
    return (*sort(rows, cols, num_rows, num_cols), num_cols)


def _csr_dtype(num_rows: int, num_cols: int, nnz: int) -> torch.dtype:
    return torch.int32 if max(num_rows, num_cols, nnz) <= bounds.INT32_MAX else torch.int64


def edges_to_csr(edges: Tensor, destinations: int, num_rows: int, num_cols: int, in_order: bool = False):
    """The same of edges [2, nnz], int32 or int64, of which row `destinations` has the rows. `in_order`: they come by
    ascending rows and are in range, as whoever has made them knows, so that nobody has to wait for a GPU to say so."""
    if in_order and edges.is_cuda and _operators.usual(edges):
        rows, cols = edges[destinations], edges[1 - destinations]
        return (*ordered_to_csr(rows, cols, num_rows, num_cols), None, num_cols)
    if (ends := _ends_on_cpu(edges, destinations)) is not None:
        made = _sort_on_cpu(*ends, edges.shape[1], edges.dtype, num_rows, num_cols)
        if made is not None:
            return (*made, num_cols)
    return coo_to_csr(edges[destinations], edges[1 - destinations], num_rows, num_cols)  # says what is wrong, too


def ordered_to_csr(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int) -> tuple[Tensor, Tensor]:
    """indptr and indices of pairs that ascend by rows and are in range, as their maker knows: no GPU is asked."""
    make = _in_order_on_cuda if rows.is_cuda else _sort
    return make(rows.contiguous(), cols.contiguous(), num_rows, num_cols)[:2]


def edges_to_looped_csr(edges: Tensor, destinations: int, num_nodes: int, dropped: bool):
    """The same of these edges between `num_nodes` nodes and, behind them, of one loop for each node; loops among the
    edges are left out if they are to be `dropped`."""
    if (ends := _ends_on_cpu(edges, destinations)) is not None:
        made = _sort_looped_on_cpu(*ends, edges.shape[1], edges.dtype, num_nodes, dropped)
        if made is not None:
            return (*made, num_nodes)
    if dropped:
        edges = edges[:, edges[0] != edges[1]]
    loops = torch.arange(num_nodes, dtype=edges.dtype, device=edges.device).expand(2, num_nodes)
    return edges_to_csr(torch.cat([edges, loops], 1), destinations, num_nodes, num_nodes)


def _ends_on_cpu(edges: Tensor, destinations: int) -> tuple[int, int] | None:
    """Addresses of the rows and of the columns; None where the binary is not to read them there.

    Without the tensors of the two, which would take as long to make as the sort of a small graph.
    """
    if type(edges) is not Tensor or torch.compiler.is_compiling() or touch.watched():
        return None
    if not edges.is_cpu or not edges.is_contiguous():
        return None
    start, row_bytes = edges.data_ptr(), edges.shape[1] * edges.element_size()
    return (start + row_bytes, start) if destinations else (start, start + row_bytes)


def _sort(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int):
    """indptr, indices and edge ids; None for the ids of pairs that come by ascending rows (as samplers give them),
    which need no sorting."""
    rows, cols = rows.contiguous(), cols.contiguous()
    if rows.is_cuda:
        made = _sort_on_cuda(rows, cols, num_rows, num_cols)
    else:
        made = _sort_on_cpu(rows.data_ptr(), cols.data_ptr(), rows.numel(), rows.dtype, num_rows, num_cols)
    if made is None:
        check_range("rows", rows.clone(), num_rows, "num_rows")  # of its own: somebody may still be writing
        check_range("cols", cols.clone(), num_cols, "num_cols")
        raise ValueError("Graph: rows, cols: they were written into while the graph was made of them")
    return made


def _sort_on_cpu(rows_at: int, cols_at: int, nnz: int, in_dtype: torch.dtype, num_rows: int, num_cols: int):
    """`_sort` of pairs at two addresses; None if an index is out of range."""
    dtype = _csr_dtype(num_rows, num_cols, nnz)
    indptr = torch.empty(num_rows + 1, dtype=dtype, device=_ON_CPU)
    indices = indptr.new_empty(nnz)
    edge_ids = torch.empty_like(indices)
    pairs = (rows_at, cols_at, nnz, num_rows, num_cols, lib.INDEX_TYPES[in_dtype])
    into = (indptr.data_ptr(), indices.data_ptr(), edge_ids.data_ptr(), lib.INDEX_TYPES[dtype])
    found = lib.launch("coo_to_csr", _ON_CPU, *pairs, *into)
    return None if found > 0 else (indptr, indices, edge_ids if found == 0 else None)


def _sort_looped_on_cpu(rows_at: int, cols_at: int, nnz: int, in_dtype: torch.dtype, num_nodes: int, dropped: bool):
    """The same with loops: always with edge ids."""
    most = nnz + num_nodes
    dtype = _csr_dtype(num_nodes, num_nodes, most)
    indptr = torch.empty(num_nodes + 1, dtype=dtype, device=_ON_CPU)
    indices = indptr.new_empty(most)
    edge_ids = torch.empty_like(indices)
    kind = lib.INDEX_TYPES[dtype]
    before, into = (rows_at, cols_at, nnz, num_nodes, dropped), (indptr.data_ptr(), indices.data_ptr())
    there = lib.launch(
        "coo_to_looped_csr", _ON_CPU, *before, lib.INDEX_TYPES[in_dtype], *into, edge_ids.data_ptr(), kind
    )
    if there < 0:
        return None
    if there < most:
        indices.resize_(there)
        edge_ids.resize_(there)
    return indptr, indices, edge_ids


def _in_order_on_cuda(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int, found: Tensor | None = None):
    """indptr and indices of pairs that come by ascending rows. `found`: waits, and says there whether a pair is out of
    range, and whether they do not come so."""
    nnz = rows.numel()
    dtype = _csr_dtype(num_rows, num_cols, nnz)
    indptr = torch.empty(num_rows + 1, dtype=dtype, device=rows.device)
    indices = indptr.new_empty(nnz)
    pairs = (rows.data_ptr(), cols.data_ptr(), nnz, num_rows, num_cols, lib.INDEX_TYPES[rows.dtype])
    pointers = (indptr.data_ptr(), indices.data_ptr(), lib.INDEX_TYPES[dtype], lib.pointer(found))
    lib.launch("coo_in_order", rows.device, *pairs, *pointers)
    return indptr, indices


def _sort_on_cuda(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int):
    """`_sort`; None if an index is out of range."""
    nnz, device = rows.numel(), rows.device
    found = torch.empty(2, dtype=torch.int64, device=_ON_CPU)
    indptr, indices = _in_order_on_cuda(rows, cols, num_rows, num_cols, found)  # the one wait: kernels trust a graph
    outside, descends = found.tolist()
    if outside:
        return None
    if not descends:
        return indptr, indices, None
    edge_ids = torch.empty_like(indices)
    pairs = (rows.data_ptr(), cols.data_ptr(), nnz, num_rows, num_cols, lib.INDEX_TYPES[rows.dtype])
    pointers = (indptr.data_ptr(), indices.data_ptr(), edge_ids.data_ptr(), lib.INDEX_TYPES[indices.dtype])
    lib.launch("coo_to_csr", device, *pairs, *pointers)
    return indptr, indices, edge_ids


def _coo_to_csr_impl(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int):
    indptr, indices, edge_ids = _sort(rows, cols, num_rows, num_cols)
    if edge_ids is None:
        edge_ids = torch.arange(indices.numel(), dtype=indices.dtype, device=indices.device)
    return indptr, indices, edge_ids


def _transpose_impl(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, num_cols: int):
    out = indptr.new_empty(num_cols + 1), torch.empty_like(indices), torch.empty_like(indices)
    matrix = lib.csr(indptr, indices, edge_ids, num_cols, indices.shape[0])
    t_indptr, t_indices, t_edge_ids = out
    pointers = (t_indptr.data_ptr(), t_indices.data_ptr(), t_edge_ids.data_ptr())
    lib.launch("transpose", indptr.device, matrix, *pointers)
    return out


def inverse_roots(indptr: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / sqrt of the nonzeros of each row, 0 for an empty one: [num_rows], float32 or float64."""
    if indptr.is_cpu and _operators.usual(indptr):
        scale = torch.empty(indptr.shape[0] - 1, dtype=dtype, device=_ON_CPU)
        kinds = (lib.INDEX_TYPES[indptr.dtype], lib.DTYPES[dtype])
        lib.launch("inverse_roots", _ON_CPU, indptr.data_ptr(), len(scale), kinds[0], scale.data_ptr(), kinds[1])
        return scale
    scale = indptr.diff().to(dtype).pow_(-0.5)
    return scale.masked_fill_(scale == torch.inf, 0.0)


def _coo_to_csr_fake(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int):
    dtype = _csr_dtype(num_rows, num_cols, rows.numel())
    nnz = rows.numel()
    return tuple(rows.new_empty(n, dtype=dtype) for n in (num_rows + 1, nnz, nnz))


def _transpose_fake(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, num_cols: int):
    return indptr.new_empty(num_cols + 1), torch.empty_like(indices), torch.empty_like(indices)


_coo_to_csr_op = _operators.register(
    "coo_to_csr",
    "(Tensor rows, Tensor cols, SymInt num_rows, SymInt num_cols) -> (Tensor, Tensor, Tensor)",
    _coo_to_csr_impl,
    _coo_to_csr_fake,
)
_transpose_op = _operators.register(
    "transpose",
    "(Tensor indptr, Tensor indices, Tensor? edge_ids, SymInt num_cols) -> (Tensor, Tensor, Tensor)",
    _transpose_impl,
    _transpose_fake,
)


def transpose(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None, num_cols: int):
    """indptr, indices and edge ids of the transposed of a graph's arrays; columns keep ascending row order."""
    make = _transpose_impl if _operators.usual(indptr) else _transpose_op
    return make(indptr, indices, edge_ids, num_cols)


def pairs_by_id(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows and columns of the edges, int64, in the order of their ids."""
    rows, cols = rows_of(indptr), indices.long()
    if edge_ids is None:
        return rows, cols
    order = torch.argsort(edge_ids)
    return rows[order], cols[order]


def with_loops(indptr: Tensor, indices: Tensor, edge_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows and columns of a square graph's edges in the order of their ids, and of a loop for each node without one."""
    rows, cols = pairs_by_id(indptr, indices, edge_ids)
    missing = torch.ones(indptr.numel() - 1, dtype=torch.bool, device=indptr.device)
    missing[cols[rows == cols]] = False
    loops = missing.nonzero().flatten()
    return torch.cat([rows, loops]), torch.cat([cols, loops])
