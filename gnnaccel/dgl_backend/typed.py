"""Linear maps with a matrix for each type of row: dgl.ops.segment_mm and gather_mm, and TypedLinear, which is made of
them. On CUDA also where DGL was built without."""

from __future__ import annotations

import torch

from gnnaccel import report
from gnnaccel.dgl_backend.ops import OUT_OF_RANGE, unsupported
from gnnaccel.dgl_backend.short import autocasting
from gnnaccel.ops.segment_matmul import matmul_op
from gnnaccel.ops.typed_matmul import typed_matmul

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_INDICES = (torch.int64, torch.int32)
_DTYPES = (torch.float32, torch.float64)
_ON_CUDA = (*_DTYPES, torch.float16, torch.bfloat16)


def segment_mm(original):
    """segment_mm on `ops.segment_matmul`: one node of autograd, whose gradients are of the inputs' size (DGL's have a
    slice of its own for each segment, which writes all rows)."""

    def segment_mm(a, b, seglen_a):
        if not _are_plain(a, b) or type(seglen_a) is not torch.Tensor or seglen_a.shape != b.shape[:1]:
            return original(a, b, seglen_a)
        lengths = seglen_a.to("cpu", torch.int64)
        if seglen_a.dtype not in _INDICES or int(lengths.sum()) != a.shape[0] or bool((lengths < 0).any()):
            return original(a, b, seglen_a)  # whose result or error this has
        ptr = lengths.new_zeros(len(lengths) + 1)
        torch.cumsum(lengths, 0, out=ptr[1:])
        with report.accelerated("dgl.segment_mm"):
            return matmul_op(a, ptr, b)

    return segment_mm


def gather_mm(original):
    """gather_mm on the rows sorted by their matrix."""

    def gather_mm(a, b, *, idx_b):
        if not _are_plain(a, b) or not _are_types(idx_b, a):
            return original(a, b, idx_b=idx_b)
        try:
            with report.accelerated("dgl.gather_mm"):
                return typed_matmul("gather_mm", "idx_b", a, idx_b, b)
        except IndexError:
            report.fallback("dgl.gather_mm", OUT_OF_RANGE)
            return original(a, b, idx_b=idx_b)

    return gather_mm


def typed_linear_forward(original):
    """TypedLinear.forward with the order of the types found once, and blocks that are multiplied as blocks."""

    def forward(self, x, x_type, sorted_by_type=False):
        if type(x) not in _TENSORS or not _are_types(x_type, x):
            return original(self, x, x_type, sorted_by_type)
        weight = self.get_weight()
        if self.regularizer == "bdd":
            weight = weight.view(self.num_types, self.num_bases, self.submat_in, self.submat_out)
        if not _are_plain(x, weight):
            return original(self, x, x_type, sorted_by_type)
        try:
            with report.accelerated("dgl.TypedLinear"):
                return typed_matmul("TypedLinear", "x_type", x, x_type, weight)
        except IndexError:
            report.fallback("dgl.TypedLinear", OUT_OF_RANGE)
            return original(self, x, x_type, sorted_by_type)

    return forward


def _are_plain(a, b) -> bool:
    """True for rows and matrices of one kind that fit, or blocks."""
    if type(a) not in _TENSORS or type(b) not in _TENSORS or a.dim() != 2 or b.dim() < 3 or autocasting():
        return False
    if unsupported(a, b) is not None:
        return False
    inputs = b.shape[-2] * (b.shape[1] if b.dim() == 4 else 1)
    dtypes = _ON_CUDA if a.is_cuda else _DTYPES
    return a.dtype in dtypes and a.dtype == b.dtype and a.device == b.device and a.shape[1] == inputs


def _are_types(index, rows) -> bool:
    return (
        type(index) is torch.Tensor
        and index.dtype in _INDICES
        and index.shape == rows.shape[:1]
        and index.device == rows.device
    )
