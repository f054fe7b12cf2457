"""What the tests of the CUDA kernels share: graphs, values, and the comparison with gnnaccel.ops.reference in float64.

Importing this skips the importing test file where there is no GPU, unless tests/emulation/emulate.py runs it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from gnnaccel import _library, ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

EMULATED = os.environ.get("GNNACCEL_EMULATE")
if EMULATED:
    sys.path.insert(0, str(Path(__file__).parent / "emulation"))
    import emulate

    emulate.pretend(emulate.load(EMULATED))
else:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here", allow_module_level=True)
    if not _library.has_cuda_kernels():
        pytest.skip("this build has no CUDA half", allow_module_level=True)

DEVICE = torch.device("cpu" if EMULATED else "cuda")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INDEX = (torch.int32, torch.int64)
if EMULATED:  # a sample that takes minutes
    DTYPES, INDEX = (torch.float32, torch.bfloat16), (torch.int32,)
WIDTHS = (1, 3, 16, 32, 33, 100, 129, 256, 513)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
EXTREMES = ("max", "min")


def build(degrees, num_cols: int, index=torch.int32, permuted=True) -> Graph:
    """A graph with these row degrees, random sources (so duplicates too) and permuted edge ids."""
    degrees = torch.as_tensor(degrees)
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), degrees.cumsum(0)])
    nnz = int(indptr[-1])
    indices = torch.randint(num_cols, (nnz,))
    edge_ids = torch.randperm(nnz) if permuted else None
    arrays = [None if a is None else a.to(DEVICE, index) for a in (indptr, indices, edge_ids)]
    return Graph.from_csr(*arrays, num_cols=num_cols)


def mixed(index=torch.int32, permuted=True) -> Graph:
    """Rectangular, with empty rows at both ends, runs of them, ordinary rows and rows longer than a chunk."""
    lengths = [0, 0, 5, 1, 300, 0, 128, 129, 2, 700, *[3] * 40, 0, 0, 0, 127, 9, 0]
    return build(lengths, 70, index, permuted)


def rand(*shape, dtype=torch.float32):
    """Values of both signs away from zero, so that they can be divided by."""
    value = torch.rand(shape, dtype=torch.float64, device=DEVICE) + 0.5
    return torch.where(torch.rand(shape, device=DEVICE) < 0.5, -value, value).to(dtype)


def assert_close(got, want, dtype, what="result", scale=None):
    assert got.dtype == dtype and got.shape == want.shape, f"{what}: {got.dtype} {tuple(got.shape)} {tuple(want.shape)}"
    if not got.numel():
        return
    size = want.abs() + (want.abs().max() if scale is None else scale)
    excess = (got.double() - want).abs() - TOLERANCE[dtype] * size
    assert bool((excess <= 0).all()), f"{what}: off by {float(excess.max()):.3g} beyond the bound"


def check(op, expected, *inputs):
    """op and its gradients against expected, called with the same inputs in float64."""
    dtype = inputs[0].dtype
    leaves = [t.detach().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    got, want = op(*leaves), expected(*exact)
    assert_close(got, want, dtype)
    upstream = rand(*want.shape, dtype=dtype)
    got_grads = torch.autograd.grad(got, leaves, upstream)
    want_grads = torch.autograd.grad(want, exact, upstream.double())
    for i, (a, b) in enumerate(zip(got_grads, want_grads, strict=True)):
        assert_close(a, b, dtype, f"gradient of input {i}")


def argmax(graph, x, weight, message, args):
    """The values at the argmax `args`: what max and min are once their choice is made."""

    def take(value, arg):
        padded = value.reshape(value.shape[0], *(1,) * (arg.dim() - value.dim()), *value.shape[1:])
        if not value.shape[0]:  # no values to gather, but a way back to them
            return value.new_zeros(arg.shape) + value.sum()
        return padded.expand(value.shape[0], *arg.shape[1:]).gather(0, arg.long().clamp(min=0))

    left = None if x is None else take(x, args[0])
    right = None if weight is None else take(weight, args[1])
    present = args[0] >= 0 if left is not None else args[1] >= 0
    return torch.where(present, reference._combine(message, left, right), 0.0)


def first_winners(graph, x, weight, reduce, empty_value):
    """Value, source and edge id of each row's winner, by definition: the first NaN, else the first of the greatest."""
    edges = reference.edges_of(graph)
    message = x.double()[graph.indices.long()]
    if weight is not None:
        message = message * weight.double()[edges]
    rank = (message if reduce == "max" else -message).nan_to_num(nan=3e3, posinf=2e3, neginf=-2e3)
    best = reference.segment_reduce(rank, graph.indptr, "max")
    k = torch.arange(graph.nnz, device=rank.device).view(-1, *(1,) * (rank.dim() - 1))
    k = k.where(rank == best[reference.rows_of(graph.indptr)], graph.nnz).double()
    k = reference.segment_reduce(k, graph.indptr, "min", graph.nnz).long()  # nnz: a row without nonzeros
    value = torch.cat([message, message.new_full((1, *message.shape[1:]), empty_value)]).gather(0, k)
    return value, *(torch.cat([names, names.new_full((1,), -1)])[k] for names in (graph.indices.long(), edges))


def check_spmm(graph, x_shape, w_shape, message, reduce, dtype):
    x = None if message == "copy_rhs" else rand(graph.num_cols, *x_shape, dtype=dtype)
    weight = None if message == "copy_lhs" else rand(graph.nnz, *w_shape, dtype=dtype)
    given = [t for t in (x, weight) if t is not None]

    def both(values):
        values = iter(values)
        return (None if x is None else next(values)), (None if weight is None else next(values))

    def op(*values):
        return ops.spmm(graph, *both(values), message, reduce)

    def expected(*values):
        left, right = both(values)
        if left is not None and right is not None:
            right = right.reshape(*right.shape, *(1,) * (left.dim() - right.dim()))
        return reference.spmm(graph, left, right, message, reduce)

    if reduce not in EXTREMES:
        return check(op, expected, *given)
    out, *args = ops.spmm(graph, x, weight, message, reduce, return_arg=True)
    assert_close(out, expected(*(t.double() for t in given)), dtype)

    def chosen(*values):
        left, right = both(values)
        if left is not None and right is not None:
            right = right.reshape(*right.shape, *(1,) * (left.dim() - right.dim()))
        return argmax(graph, left, right, message, args)

    return check(op, chosen, *given)


def check_sddmm(graph, lhs_shape, rhs_shape, op, targets, dtype):
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
    sides = [rand(rows[t], *shape, dtype=dtype) for t, shape in zip(targets, (lhs_shape, rhs_shape), strict=True)]
    used = {"copy_lhs": (0,), "copy_rhs": (1,)}.get(op, (0, 1))

    def call(function, *values):
        both = [None, None]
        for i, value in zip(used, values, strict=True):
            both[i] = value
        return function(graph, *both, op, *targets)

    check(lambda *v: call(ops.sddmm, *v), lambda *v: call(reference.sddmm, *v), *(sides[i] for i in used))
