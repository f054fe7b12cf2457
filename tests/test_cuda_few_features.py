"""CUDA kernels of one to four features against gnnaccel.ops.reference: inner products, sums of sources and of edges."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import DTYPES, INDEX, assert_close, build, rand

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

pytestmark = pytest.mark.usefixtures("poisoned")


# Rows that meet the borders of blocks of cuda/sddmm_narrow.cu in every way: hubs over many of them, runs of empty rows
# longer than a block.
NARROW = {
    "hub between": [3, 0, 20_000, 1, 0, *[2] * 200],
    "short rows": [*[1, 2, 3, 0] * 1500, 900, *[4] * 400],
    "empty runs": [*[0] * 6000, 7, *[0] * 12_000, 300, *[0] * 2500],
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_dots_of_few_features(index, dtype, name):
    graph = build(NARROW[name], 500, index)
    for width in (1, 2, 3, 4, 8):
        lhs, rhs = rand(500, width, dtype=dtype), rand(graph.num_rows, width, dtype=dtype)
        want = reference.sddmm(graph, lhs.double(), rhs.double(), "dot", "u", "v")
        assert_close(ops.sddmm(graph, lhs, rhs, "dot"), want, dtype, f"{name} {width}")
    lhs, rhs = rand(graph.nnz, 2, dtype=dtype), rand(graph.num_rows, 2, dtype=dtype)
    want = reference.sddmm(graph, lhs.double(), rhs.double(), "dot", "e", "v")
    out = ops.sddmm(graph, lhs.requires_grad_(), rhs.requires_grad_(), "dot", "e", "v")
    assert_close(out, want, dtype, f"{name} of edges")
    given = rand(graph.nnz, 1, dtype=dtype)
    of_lhs, of_rhs = torch.autograd.grad(out, (lhs, rhs), given)
    products = given.double() * lhs.double()
    want = reference.sddmm(graph, given.double(), rhs.double(), "mul", "e", "v")
    assert_close(of_lhs, want, dtype, f"{name}, gradient of edges")
    want, size = (reference.spmm(graph, None, t, "copy_rhs", "sum") for t in (products, products.abs()))
    assert_close(of_rhs, want, dtype, f"{name}, gradient of rows", size)


# For cuda/spmm_narrow.cu: rows for some lanes, a warp or a block, rows in pieces whose ends meet multiples of 4096 or
# not, runs of empty rows longer than a block; 1, 16 or 32 lanes to a row, as its nonzeros are in the mean.
FEW = {
    "one lane": [0, 30_000, 7, *[0] * 700, *[1, 2, 3, 0, 4, 5, 7, 2] * 41_000, 512, 513, *[0] * 20_000, 8193],
    "some lanes": [12_288, 4096, 8192, 1, 8193, 0, 255, 256, 257, 3, 511, 512, 513, 0, *[2, 30, 40] * 700],
    "a warp": [*[33, 512, 513, 0, 600, 31, 200] * 9, 20_000, 0],
    "no pieces": [5, 0, 8192, 7, 4097, 2, 512, 31, 513, *[30, 10, 60, 0] * 300],
    "tiny": [0, 90, 1, 0, 3, *[2, 1, 0, 5] * 300],
    "even": [*[3, 0, 1, 2, 9] * 2000],
}


@pytest.mark.parametrize(
    "name,prepared",
    [
        ("one lane", False), ("some lanes", False), ("some lanes", True), ("a warp", False), ("no pieces", True),
        ("tiny", True), ("even", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", INDEX, ids=str)
def test_sums_of_few_features(index, dtype, name, prepared):
    graph = build(FEW[name], 5_000, index)
    degree = graph.nnz / graph.num_rows
    least = 16 if graph.nnz < 400_000 and not prepared else 0
    assert least <= degree < (8 if graph.nnz > 1_000_000 else 999), "others are not for that kernel"
    if prepared:
        gnnaccel.prepare(graph)
    for width in (1, 2, 3, 4):
        x, w = rand(graph.num_cols, width, dtype=dtype), rand(graph.nnz, dtype=dtype)
        size = reference.spmm(graph, x.double().abs(), w.double().abs().unsqueeze(1), "mul", "sum")
        got = ops.spmm(graph, x, w)
        assert_close(got, reference.spmm(graph, x.double(), w.double().unsqueeze(1), "mul", "sum"), dtype, "sum", size)
        assert torch.equal(got, ops.spmm(graph, x, w)), "the same bits on every run"
        degree = graph.indptr.diff().clamp(min=1).unsqueeze(1)
        want = reference.spmm(graph, x.double(), None, "copy_lhs", "mean")
        want[graph.indptr.diff() == 0] = 2.5
        bound = reference.spmm(graph, x.double().abs(), None, "copy_lhs", "sum") / degree
        assert_close(ops.spmm(graph, x, reduce="mean", empty_value=2.5), want, dtype, "mean", bound + 2.5)
        scales = torch.promote_types(dtype, torch.float32)
        around = *(rand(n, dtype=scales) for n in (graph.num_cols, graph.num_rows)), rand(width, dtype=dtype)
        wide = [t.double() for t in (w, *around)]
        bound = reference.graph_conv(graph, x.double().abs(), *(t.abs() for t in wide), False)
        got = ops.graph_conv(graph, x, w, source_scale=around[0], row_scale=around[1], bias=around[2], relu=True)
        assert_close(got, reference.graph_conv(graph, x.double(), *wide, True), dtype, "fused", bound)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("name", FEW)
def test_sums_of_edges_of_few_features(name, index, dtype, permuted):
    graph = build(FEW[name], 5_000, index, permuted)
    for width in (1, 2, 3, 4):
        edges = rand(graph.nnz, width, dtype=dtype)
        for reduce in ("sum", "mean"):
            got = ops.spmm(graph, None, edges, "copy_rhs", reduce)
            want, size = (
                reference.spmm(graph, None, t, "copy_rhs", reduce) for t in (edges.double(), edges.double().abs())
            )
            assert_close(got, want, dtype, f"{width} {reduce}", size)
            assert torch.equal(got, ops.spmm(graph, None, edges, "copy_rhs", reduce)), "the same bits on every run"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("name", ["some lanes", "a warp"])
def test_few_features_of_arrays_at_odd_addresses(name, index, dtype):
    """Four indices and weights that lie together are one load where they are aligned to that: the same bits."""
    given = build(FEW[name], 5_000, index)
    weight = rand(given.nnz, dtype=dtype)
    indices, ids, w = (torch.cat([t[:1], t])[1:] for t in (given.indices, given.edge_ids, weight))
    for kind in ((given.indices, None, indices, None), (given.indices, given.edge_ids, given.indices, ids)):
        graphs = [Graph(given.indptr, *arrays, given.num_cols) for arrays in (kind[:2], kind[2:])]
        for width in (1, 2, 3, 4):
            x = rand(given.num_cols, width, dtype=dtype)
            size = reference.spmm(graphs[0], x.double().abs(), weight.double().abs().unsqueeze(1), "mul", "sum")
            want = reference.spmm(graphs[0], x.double(), weight.double().unsqueeze(1), "mul", "sum")
            sums = [ops.spmm(g, x, t) for g, t in ((graphs[0], weight), (graphs[1], weight), (graphs[0], w))]
            assert_close(sums[0], want, dtype, "sum", size)
            assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
            assert torch.equal(*(ops.spmm(g, x) for g in graphs))


@pytest.mark.parametrize("width,shift", [(2, 1), (3, 1), (4, 1), (4, 2), (8, 2)])
def test_few_features_at_an_odd_address(width, shift):
    """Are not for the kernels of few features."""
    graph = build(FEW["some lanes"], 500)
    x = rand(graph.num_cols * width + shift)[shift:].view(-1, width)
    v = rand(graph.num_rows, width)
    wide = x.double(), v.double()
    size = reference.spmm(graph, wide[0].abs(), None, "copy_lhs", "sum")
    assert_close(ops.spmm(graph, x), reference.spmm(graph, wide[0], None, "copy_lhs", "sum"), torch.float32, "", size)
    size = reference.sddmm(graph, *(t.abs() for t in wide), "dot", "u", "v")
    assert_close(ops.sddmm(graph, x, v), reference.sddmm(graph, *wide, "dot", "u", "v"), torch.float32, "", size)
