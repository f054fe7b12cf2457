"""Infinite, missing and tiny numbers: maxima and minima give their winner's, division what division gives."""

import pytest
import torch

from gnnaccel import ops
from gnnaccel.graph.csr import Graph

VALUES = torch.tensor([0.0, -0.0, 1.5, -2.0, 0.25, torch.inf, -torch.inf, torch.nan])
MESSAGES = {
    "copy_lhs": lambda x, w: x,
    "copy_rhs": lambda x, w: w,
    "mul": lambda x, w: x * w,
    "add": lambda x, w: x + w,
    "sub": lambda x, w: x - w,
    "div": lambda x, w: x / w,
}


def drawn(seed: int, width: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(seed)
    rows, cols = (torch.randint(0, n, (30,), generator=g) for n in (6, 5))
    graph = Graph.from_coo(rows, cols, num_rows=6, num_cols=5)

    def some(*shape):
        special = VALUES[torch.randint(0, len(VALUES), shape, generator=g)]
        return torch.where(torch.rand(shape, generator=g) < 0.3, special, torch.randn(shape, generator=g)).to(dtype)

    return graph, rows, cols, some(5, width), some(30, width)


def by_hand(rows, cols, x, w, message, reduce, upstream):
    """The result and both gradients, winner by winner: the first NaN, else the first of the largest."""
    out, grads = torch.zeros_like(upstream), (torch.zeros_like(x), torch.zeros_like(w))
    for row in range(6):
        edges = (rows == row).nonzero().flatten()
        for d in range(upstream.shape[1] if len(edges) else 0):
            found = MESSAGES[message](x[cols[edges], d], w[edges, d]) * (1 if reduce == "max" else -1)
            nan = found.isnan().nonzero().flatten()
            best = int(nan[0]) if len(nan) else int((found == found.max()).nonzero()[0])
            edge = int(edges[best])
            ends = x[cols[edge], d].clone().requires_grad_(), w[edge, d].clone().requires_grad_()
            value = MESSAGES[message](*ends)
            out[row, d] = value.detach()
            parts = torch.autograd.grad(value, ends, upstream[row, d], allow_unused=True)
            for part, grad, at in zip(parts, grads, (int(cols[edge]), edge), strict=True):
                if part is not None and not (message == "div" and grad is grads[1] and ends[0] == 0):
                    grad[at, d] += part  # but for 0 / 0 and 0 / NaN, whose divisor gets 0
    return out, *grads


# 17 features are one vector register and a rest.
@pytest.mark.parametrize(("width", "dtype", "seeds"), [(3, torch.float64, 40), (17, torch.float32, 8)], ids=str)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("message", MESSAGES)
def test_extremes(message, reduce, width, dtype, seeds):
    for seed in range(seeds):
        graph, rows, cols, x, w = drawn(seed, width, dtype)
        upstream = torch.randn(6, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        leaves = x.requires_grad_(), w.requires_grad_()
        out = ops.spmm(graph, *leaves, message, reduce)
        grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
        want = by_hand(rows, cols, x.detach(), w.detach(), message, reduce, upstream)
        for k, pair in enumerate(zip((out, *grads), want, strict=True)):
            if pair[0] is not None:
                torch.testing.assert_close(*pair, equal_nan=True, msg=lambda m, k=k, s=seed: f"seed {s}, {k}: {m}")


# x, y and the gradient of x / y. The square of 1 / 1e-20 is no float32, but x / y^2 is one where x is small; 1 / 1e-39
# is none either.
SMALL = {
    "1e-20": ([0.0, 1e-25, -3e-30, 2.0], [1e-20, 1e-20, 1e-22, -1e-10], [1.0, 1.0, 1.0, 1.0]),
    "0": ([1e38, 1e30, 3.0, 2.0], [1e30, 1e20, 0.0, 1e10], [1.0, 1.0, 1.0, 1.0]),
    "1e-39": ([0.0, 1e-25, -3e-30, 2.0], [1e-39, 1e-20, -2e-39, 1e10], [1e-30, 1.0, 0.0, 1.0]),
}


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "sddmm"])
@pytest.mark.parametrize("size", SMALL)
def test_division_by_small_numbers(op, size):
    graph = Graph.from_coo(torch.arange(4), torch.arange(4))
    found = {}
    for dtype in (torch.float32, torch.float64):
        x, y = (torch.tensor(v).to(dtype).requires_grad_() for v in SMALL[size][:2])
        upstream = torch.tensor(SMALL[size][2]).to(dtype)
        if op == "sddmm":
            out = ops.sddmm(graph, x, y, "div", "u", "e")
        else:
            out = ops.spmm(graph, x, y, "div", op)
        found[dtype] = [out, *torch.autograd.grad(out, (x, y), upstream)]
    for got, want in zip(found[torch.float32], found[torch.float64], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
