"""Reduction of consecutive rows: an SpMM that copies edge features, with offsets for indptr."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel.graph import build
from gnnaccel.ops import _check
from gnnaccel.ops._arrays import Matrix, Structure
from gnnaccel.ops.spmm import max_min_op, spmm_op


def segment_reduce(
    x: Tensor,
    offsets: Tensor,
    reduce: str = "sum",
    *,
    empty_value: float = 0.0,
    return_arg: bool = False,
    check: bool = True,
):
    """out[i] = reduce of the rows offsets[i]:offsets[i + 1] of x.

    Parameters
    ----------
    x : Tensor [n, *F]
        float32, float64, bfloat16; float16 on CUDA.
    offsets : Tensor [num_segments + 1], int32 or int64
        Ascending from 0 to n.
    reduce : {"sum", "mean", "max", "min"}
    empty_value : float
        Result of an empty segment.
    return_arg : bool
        For max and min: also return the row of x that won ([num_segments, *F]; -1 in an empty segment).
    check : bool
        Check the offsets (synchronises on CUDA). Kernels trust them; pass False only for offsets that a
        library made.

    Returns
    -------
    Tensor [num_segments, *F], or (out, arg).

    Raises
    ------
    TypeError, ValueError
        For a wrong type, dtype, shape, device or option, or for offsets that do not describe x (under
        torch.compile: RuntimeError).

    Examples
    --------
    >>> import torch, gnnaccel
    >>> gnnaccel.ops.segment_reduce(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 2, 3]))
    tensor([[3.],
            [4.]])
    """
    offsets = build.as_index("offsets", offsets, "segment_reduce")
    _check.one_of("segment_reduce", "reduce", reduce, ("sum", "mean", "max", "min"))
    rows = x.shape[0] if isinstance(x, Tensor) and x.dim() else -1
    _check.feature("segment_reduce", "x", x, rows, "segment rows", offsets.device)
    if check and torch.compiler.is_compiling():  # a compiled graph cannot branch on data: assert inside it
        _check.traced_offsets("segment_reduce", offsets, rows)
    elif check:
        offsets = offsets.clone()  # kernels trust them, those of the backward pass too, whatever becomes of the user's
        build.check_offsets("segment_reduce: offsets", offsets, rows)
    # Edges in order are their own transposed structure: copy_rhs reads neither indices nor the transposed half.
    arrays = Structure(Matrix(offsets, nnz=rows))
    if reduce in ("sum", "mean"):
        out, argmax = spmm_op(arrays, None, x, "copy_rhs", reduce, empty_value), offsets.new_empty(0)
    else:
        out, _, argmax = max_min_op(arrays, None, x, "copy_rhs", reduce, empty_value, False)
    return (out, argmax) if return_arg else out
