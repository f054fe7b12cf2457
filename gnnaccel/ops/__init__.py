"""Sparse ops of message passing, on the CPU and CUDA, differentiable, registered with torch.library.

Each has a plain-torch definition of the same name in `gnnaccel.ops.reference`.
"""

from gnnaccel._library import has_cuda_kernels
from gnnaccel.ops import cbsr_rules  # noqa: F401 (fills cbsr.RULES)
from gnnaccel.ops.attention import attention
from gnnaccel.ops.cbsr import CBSR
from gnnaccel.ops.dot_attention import dot_attention
from gnnaccel.ops.edge_attention import edge_attention
from gnnaccel.ops.edge_softmax import edge_softmax
from gnnaccel.ops.gated_sum import gated_sum
from gnnaccel.ops.gatv2 import gatv2_scores
from gnnaccel.ops.graph_conv import graph_conv
from gnnaccel.ops.head_dots import head_dots
from gnnaccel.ops.layers import gat, gatv2
from gnnaccel.ops.maxk import maxk
from gnnaccel.ops.messages import message_reduce
from gnnaccel.ops.relational import relational_spmm
from gnnaccel.ops.relational_attention import relational_attention
from gnnaccel.ops.sddmm import sddmm
from gnnaccel.ops.segment import segment_reduce
from gnnaccel.ops.segment_matmul import grouped_matmul, segment_matmul
from gnnaccel.ops.spgemm import spgemm
from gnnaccel.ops.spmm import spmm

__all__ = [
    "CBSR",
    "attention",
    "dot_attention",
    "edge_attention",
    "edge_softmax",
    "gat",
    "gated_sum",
    "gatv2",
    "gatv2_scores",
    "graph_conv",
    "grouped_matmul",
    "has_cuda_kernels",
    "head_dots",
    "maxk",
    "message_reduce",
    "relational_attention",
    "relational_spmm",
    "sddmm",
    "segment_matmul",
    "segment_reduce",
    "spgemm",
    "spmm",
]
