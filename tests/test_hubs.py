"""Sums over millions of edges of one node are as accurate as others: pieces, not one float32 after the other."""

import functools

import pytest
import torch

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import has_cuda_kernels

EDGES, FEW = 4_000_000, 16  # of the hub; nodes at the other end of its edges
LIMIT = 1e-5
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")),
]


@functools.cache
def fan(device: str, edges: int = EDGES) -> Graph:
    """Destinations of one source each, which is the same for all."""
    sources = torch.zeros(edges, dtype=torch.long, device=device)
    return Graph.from_csr(torch.arange(edges + 1, device=device), sources, num_cols=FEW)


@functools.cache
def hub(side: str, device: str) -> Graph:
    """A hub of EDGES edges as the only source ("source") or as the only destination of FEW others."""
    few, one = torch.arange(EDGES) % FEW, torch.zeros(EDGES, dtype=torch.long)
    rows, cols = (few, one) if side == "source" else (one, few)
    return Graph.from_coo(rows.to(device), cols.to(device), num_rows=FEW, num_cols=FEW)


# name -> function of (graph, dtype, device) that gives the op and its inputs; all terms of sums are positive
CASES = {
    "spmm": lambda g, at: (lambda x: ops.spmm(g, x), at(FEW, 3)),
    "spmm mean": lambda g, at: (lambda x: ops.spmm(g, x, reduce="mean"), at(FEW, 3)),
    "spmm weighted": lambda g, at: (lambda x, w: ops.spmm(g, x, w), at(FEW, 2), at(g.nnz)),
    "spmm added": lambda g, at: (lambda x, w: ops.spmm(g, x, w, "add"), at(FEW, 1), at(g.nnz, 1)),
    "spmm max": lambda g, at: (lambda x: ops.spmm(g, x, reduce="max"), at(FEW, 2)),
    "sddmm dot": lambda g, at: (lambda x, y: ops.sddmm(g, x, y, "dot", "u", "v"), at(FEW, 2), at(FEW, 2)),
    "sddmm mul": lambda g, at: (lambda x, y: ops.sddmm(g, x, y, "mul", "u", "v"), at(FEW, 1), at(FEW, 1)),
    "graph_conv": lambda g, at: (lambda x: ops.graph_conv(g, x, row_scale=at(FEW)), at(FEW, 3)),
    "edge_softmax": lambda g, at: (lambda s: ops.edge_softmax(g, s), at(g.nnz, 1)),
    "attention": lambda g, at: (
        lambda x, a, b: ops.attention(g, x, a, b),
        at(FEW, 1, 4),
        at(FEW, 1),
        at(FEW, 1),
    ),
    "edge_attention": lambda g, at: (lambda s, x: ops.edge_attention(g, s, x), at(g.nnz, 1), at(FEW, 1, 4)),
    "dot_attention": lambda g, at: (lambda q, k, v: ops.dot_attention(g, q, k, v), *[at(FEW, 1, 4) for _ in "qkv"]),
    "gatv2_scores": lambda g, at: (
        lambda x, y, v: ops.gatv2_scores(g, x, y, v),
        at(FEW, 1, 4),
        at(FEW, 1, 4),
        at(1, 4),
    ),
    "spgemm": lambda g, at: (lambda x: ops.spgemm(g, ops.maxk(x, 2)), at(FEW, 8)),
    "spmm of edges": lambda g, at: (lambda w: ops.spmm(g, None, w, "copy_rhs"), at(g.nnz, 1)),
    "segment_reduce": lambda g, at: (
        lambda x: ops.segment_reduce(x, torch.tensor([0, g.nnz], device=x.device)),
        at(g.nnz, 1),
    ),
}


# The same of sums over all rows of a graph
OF_ROWS = {
    "spmm max": lambda g, at: (lambda x: ops.spmm(g, x, reduce="max"), at(FEW, 2)),
    "spmm min, wide": lambda g, at: (
        lambda x: ops.spmm(fan(x.device.type, EDGES // 16), x, reduce="min"),
        at(FEW, 17),
    ),
    "head_dots": lambda g, at: (ops.head_dots, 0.7 * torch.ones_like(at(EDGES, 1, 2)), at(2, 1, 2)),
    "head_dots, wide": lambda g, at: (ops.head_dots, at(EDGES // 16, 2, 16), at(1, 2, 16)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("name", CASES)
def test_hub(name, side, device):
    compare(CASES[name], name, lambda: hub(side, device), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(name, device):
    compare(OF_ROWS[name], name, lambda: fan(device), device)


def compare(case, name, graph_of, device):
    """The results and gradients of float32 with those of float64."""
    if device == "cuda" and not has_cuda_kernels():
        pytest.skip("built without CUDA")
    graph = graph_of()
    found = {}
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator(device).manual_seed(5)

        def at(*shape, dtype=dtype, generator=generator):
            return (torch.rand(*shape, device=device, generator=generator) * 0.5 + 0.25).to(dtype)

        op, *inputs = case(graph, at)
        leaves = [x.requires_grad_() for x in inputs]
        out = op(*leaves)
        # The same gradient everywhere is the worst case: what is lost to rounding is lost in one direction. A softmax
        # has none then.
        upstream = at(*out.shape) if "softmax" in name else torch.full_like(out, 0.3)
        grads = torch.autograd.grad(out, leaves, upstream)
        found[dtype] = [out, *grads]
    for k, (got, want) in enumerate(zip(*map(found.get, found), strict=True)):
        got, want = got.detach(), want.detach()
        # Gradients of scores are differences of terms this large, which cancel where all weights are alike.
        least = 0.5 * FEW if "attention" in name else 0.0
        error = float((got.double() - want).abs().max() / want.abs().max().clamp(min=least))
        assert error <= LIMIT, f"{'result' if k == 0 else f'gradient {k - 1}'}: {error:.2e}"
