"""Messages as expressions, compiled to programs that one kernel runs for each edge, forward and backward.

tape          a program as the CPU's kernel takes it
device_code   the CUDA C++ that every kernel begins with
values        the values of a program as CUDA C++
source        a program as CUDA C++
nvrtc         compiles that, keeps what came out, and launches it
generated     a program on CUDA
walks         a program as one walk over the edges: the op
plan          how a program that reduces inside is run
layer         that, and its derivative
reduce        `message_reduce`: a program on a graph
"""

from gnnaccel.ops.messages.reduce import computes, is_fused, message_reduce, softmax_sum
from gnnaccel.program.language import (
    Expression,
    abs,
    c,
    clamp,
    cos,
    dot,
    e,
    elu,
    eq,
    erf,
    exp,
    expm1,
    gelu,
    leaky_relu,
    log,
    log1p,
    maximum,
    minimum,
    ne,
    reciprocal,
    relu,
    reshape,
    rsqrt,
    sigmoid,
    sign,
    silu,
    sin,
    softmax,
    softplus,
    sqrt,
    square,
    sum,
    tanh,
    u,
    v,
    where,
)
from gnnaccel.program.program import Unfit

__all__ = [
    "Expression",
    "Unfit",
    "abs",
    "c",
    "clamp",
    "computes",
    "cos",
    "dot",
    "e",
    "elu",
    "eq",
    "erf",
    "exp",
    "expm1",
    "gelu",
    "is_fused",
    "leaky_relu",
    "log",
    "log1p",
    "maximum",
    "message_reduce",
    "minimum",
    "ne",
    "reciprocal",
    "relu",
    "reshape",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softmax",
    "softmax_sum",
    "softplus",
    "sqrt",
    "square",
    "sum",
    "tanh",
    "u",
    "v",
    "where",
]
