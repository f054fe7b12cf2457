"""What DGL's message passing runs on: gnnaccel's ops, on checked operands. torch_kernels.py has the same in torch."""

from __future__ import annotations

from gnnaccel.ops.edge_softmax import choose as edge_softmax
from gnnaccel.ops.edge_softmax import made_ready as ready_softmax
from gnnaccel.ops.sddmm import choose as sddmm
from gnnaccel.ops.segment import segment_reduce
from gnnaccel.ops.spmm import choose as spmm
from gnnaccel.ops.spmm import made_ready as ready_sum

__all__ = ["edge_softmax", "ready_softmax", "ready_sum", "sddmm", "segment_reduce", "spmm"]
