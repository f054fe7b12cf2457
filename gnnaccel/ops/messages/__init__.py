"""Messages as expressions, compiled to programs that one kernel runs for each edge, forward and backward.

language      expressions: leaves u, v, e and c, and functions of them
program       an expression with shapes: primitive steps
derivatives   the programs of a program's gradients
tape          a program as the CPU's kernel takes it
device_code   the CUDA C++ that every kernel begins with
values        the values of a program as CUDA C++
source        a program as CUDA C++
nvrtc         compiles that, keeps what came out, and launches it
generated     a program on CUDA
reduce        `message_reduce`: a program on a graph
softmax       `softmax_sum`: sums weighted by a softmax
"""

from gnnaccel.ops.messages.language import (
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
    softplus,
    sqrt,
    square,
    sum,
    tanh,
    u,
    v,
    where,
)
from gnnaccel.ops.messages.program import Unfit
from gnnaccel.ops.messages.reduce import is_fused, message_reduce
from gnnaccel.ops.messages.softmax import softmax_sum

__all__ = [
    "Expression",
    "Unfit",
    "abs",
    "c",
    "clamp",
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
