"""The CUDA kernels against gnnaccel.ops.reference in float64: every dtype, index type and width, hubs that are cut
over blocks, layouts. test_cuda_runtime.py holds what only a GPU has; test_ops.py runs on CUDA as well.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cuda_cases import (
    DEVICE,
    DTYPES,
    EMULATED,
    INDEX,
    WIDTHS,
    assert_close,
    build,
    check,
    check_sddmm,
    check_spmm,
    mixed,
    rand,
)

from gnnaccel import _library, ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference
from gnnaccel.ops.head_dots import head_dots_backward_op

pytestmark = pytest.mark.usefixtures("poisoned")

# message, reduce, and the weight: "" one scalar per edge, "d" one per feature
SPMM = [
    ("copy_lhs", "sum", ""),
    ("copy_lhs", "mean", ""),
    ("copy_lhs", "max", ""),
    ("mul", "sum", ""),
    ("mul", "sum", "d"),
    ("mul", "mean", ""),
    ("mul", "min", "d"),
    ("mul", "max", ""),
    ("add", "sum", "d"),
    ("add", "max", ""),
    ("sub", "mean", "d"),
    ("div", "sum", ""),
    ("copy_rhs", "sum", "d"),
    ("copy_rhs", "min", "d"),
]


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_spmm(width, dtype, index):
    graph = mixed(index)
    for message, reduce, weight in SPMM:
        check_spmm(graph, (width,), (width,) if weight else (), message, reduce, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "x_shape,w_shape", [((4, 16), (4,)), ((3, 5), (3, 1)), ((2, 24), (1, 24)), ((8, 8), (8,)), ((), ())]
)
def test_spmm_heads(x_shape, w_shape, dtype):
    graph = mixed(permuted=False)
    for message, reduce in itertools.product(("mul", "add"), ("sum", "max")):
        check_spmm(graph, x_shape, w_shape, message, reduce, dtype)


SDDMM = [
    ("dot", "u", "v"), ("dot", "v", "u"), ("dot", "u", "e"), ("dot", "u", "u"), ("add", "u", "v"), ("sub", "v", "u"),
    ("mul", "e", "v"), ("mul", "u", "v"), ("div", "u", "e"), ("copy_lhs", "u", "v"), ("copy_rhs", "u", "v"),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_sddmm(width, dtype, index):
    graph = mixed(index)
    for op, *targets in SDDMM:
        check_sddmm(graph, (width,), (width,), op, targets, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lhs,rhs", [((4, 16), (4, 16)), ((3, 5), (3, 5)), ((8, 1), (8, 1)), ((4, 8), (1, 8)), ((6, 32), (6, 32))]
)
def test_sddmm_heads(lhs, rhs, dtype):
    graph = mixed(permuted=False)
    for op in ("dot", "add", "mul"):
        check_sddmm(graph, lhs, rhs, op, ("u", "v"), dtype)


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(), (1,), (3,), (4,), (2, 4), (16,), (33,), (70,)], ids=str)
def test_edge_softmax(heads, dtype, index):
    for graph, norm_by in itertools.product((mixed(index), mixed(index, permuted=False)), ("dst", "src")):
        scores = 4 * rand(graph.nnz, *heads, dtype=dtype)
        turned = graph if norm_by == "dst" else graph.transposed
        check(lambda s: ops.edge_softmax(graph, s, norm_by), lambda s: reference.edge_softmax(turned, s), scores)  # noqa: B023


def test_edge_softmax_extreme_scores():
    graph = build([3, 4000, 2, 0, 4], 10, permuted=False)
    scores = rand(graph.nnz)
    scores[0], scores[10], scores[3] = 1e30, 200.0, -float("inf")
    scores[4003:4005] = -float("inf")
    got, want = ops.edge_softmax(graph, scores), reference.edge_softmax(graph, scores.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-30, equal_nan=True)
    assert bool(got[4003:4005].isnan().all()) and int(got.isnan().sum()) == 2


HUBS = {"one hub": [50_000], "hub between": [4, 0, 50_000, 1, 0], "two": [9_000, 30_000], "many": [200, 400, 900] * 30}
if EMULATED:
    HUBS |= {"one hub": [12_000], "two": [2_500, 8_000], "many": [200, 400, 900] * 10}


@pytest.mark.parametrize("index", INDEX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HUBS)
def test_hubs(name, dtype, index):
    graph = build(HUBS[name], 3_000, index)
    for message, reduce in [("copy_lhs", "sum"), ("mul", "mean"), ("mul", "max"), ("copy_rhs", "min")]:
        for width in (5, 64):
            check_spmm(graph, (width,), (width,) if message == "copy_rhs" else (), message, reduce, dtype)
    check_sddmm(graph, (64,), (64,), "dot", ("u", "v"), dtype)
    for heads in (1, 4, 40):
        scores = rand(graph.nnz, heads, dtype=dtype)
        check(lambda s: ops.edge_softmax(graph, s), lambda s: reference.edge_softmax(graph, s), scores)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 10])
def test_softmax_of_rows_in_pieces(heads, dtype):
    """Of a graph so large that long rows are cut."""
    lengths = [3, 256, 257, 40_000, 0, 4095, 4096, 4097, *[2] * 200_000, 160_000, 1024, 1025, 1]
    graph = build(lengths, 70)
    scores = 4 * rand(graph.nnz, heads, dtype=dtype)
    check(lambda s: ops.edge_softmax(graph, s), lambda s: reference.edge_softmax(graph, s), scores)
    scores = rand(graph.nnz, heads)
    of_hub = graph.edge_ids[graph.indptr[3] : graph.indptr[4]].long()
    scores[of_hub[:5000]] = -float("inf")  # whole pieces of them
    scores[of_hub[9000], 0], scores[of_hub[1], -1] = 1e30, float("nan")
    got, want = ops.edge_softmax(graph, scores), reference.edge_softmax(graph, scores.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-30, equal_nan=True)


# Lengths of rows by how a softmax takes them; of 64 heads all but the last are enough to have a queue.
SOFTMAX_ROWS = {
    "cut": [3, 63, 64, 65, 3000, 0, 127, 128, 129, 256, 257, *[2] * 6000, 5000, 1],
    "queued whole": [*[2] * 6000, 100, 130, 256, 65, 64, *[1] * 200],
    "a block each, cut": [*[40] * 300, 0, 1, 128, 129, 2000, 5000],
    "a block each": [70, 0, 1, 3] * 10 + [500],
    "few, cut": [6000, 4096, 4097, 1],
}


@pytest.mark.parametrize("dtype,known", [*((d, False) for d in DTYPES), (torch.float32, True)], ids=str)
@pytest.mark.parametrize("name", SOFTMAX_ROWS)
def test_softmax_by_lengths_of_rows(name, dtype, known):
    """With the longest row `known` or not: the results are the same bits."""
    graph = build(SOFTMAX_ROWS[name], 70)
    scores = 4 * rand(graph.nnz, 64, dtype=dtype)
    unknown = ops.edge_softmax(graph, scores)
    if known:
        assert graph.longest_row == max(SOFTMAX_ROWS[name])
        assert torch.equal(ops.edge_softmax(graph, scores), unknown) or name == "queued whole"  # one piece or several
    check(lambda s: ops.edge_softmax(graph, s), lambda s: reference.edge_softmax(graph, s), scores)


@pytest.mark.parametrize("degree", [1, 127, 128, 129, 255, 256, 257, 384, 511, 512, 513, 1025])
def test_rows_at_chunk_borders(degree):
    for lead in (0, 1, 127, 128):
        graph = build([lead, degree, 0, degree, degree, 1], 50)
        for reduce in ("sum", "max"):
            check_spmm(graph, (8,), (), "mul", reduce, torch.float32)
        scores = rand(graph.nnz, 2)
        check(lambda s: ops.edge_softmax(graph, s), lambda s: reference.edge_softmax(graph, s), scores)  # noqa: B023


@pytest.mark.parametrize("degrees,num_cols", [([], 0), ([], 5), ([0, 0], 0), ([0, 0, 0], 4), ([1], 1)], ids=str)
def test_empty_graphs(degrees, num_cols):
    graph = build(torch.tensor(degrees, dtype=torch.long), num_cols) if num_cols else Graph.from_csr(
        torch.zeros(len(degrees) + 1, dtype=torch.int32, device=DEVICE),
        torch.zeros(0, dtype=torch.int32, device=DEVICE), num_cols=0)  # fmt: skip
    for message, reduce in itertools.product(("copy_lhs", "mul"), ("sum", "mean", "max")):
        check_spmm(graph, (6,), (), message, reduce, torch.float32)
    check_sddmm(graph, (6,), (6,), "dot", ("u", "v"), torch.float32)
    assert ops.edge_softmax(graph, rand(graph.nnz, 2)).shape == (graph.nnz, 2)


def test_empty_value():
    graph = mixed()
    empty = graph.indptr.diff() == 0
    for reduce in ("sum", "mean", "max", "min"):
        out = ops.spmm(graph, rand(graph.num_cols, 12), reduce=reduce, empty_value=-3.5)
        assert bool((out[empty] == -3.5).all()) and not bool((out[~empty] == -3.5).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ("sum", "mean", "max", "min"))
def test_segment_reduce(reduce, dtype):
    offsets = torch.tensor([0, 0, 3, 500, 500, 512, 9_000], device=DEVICE)
    x = rand(9_000, 20, dtype=dtype)
    got, want = ops.segment_reduce(x, offsets, reduce), reference.segment_reduce(x.double(), offsets, reduce)
    assert_close(got, want, dtype)


def test_ties_and_nan():
    """The first nonzero in row order wins a tie, also across the pieces of a cut row; NaN beats all."""
    graph = build([0, 40_000, 300, 5], 40_305, permuted=False)
    graph.indices.copy_(torch.arange(graph.nnz))
    x = torch.zeros(graph.num_cols, 8, device=DEVICE)
    x[700, 1], x[30_000, 1], x[39_999, 2], x[40_005, 3] = 1, 1, float("nan"), float("nan")
    x[20_000, 2] = float("nan")
    _, source, _ = ops.spmm(graph, x, reduce="max", return_arg=True)
    want = torch.tensor([[-1] * 8, [0, 700, 20_000, *[0] * 5], [40_000] * 3 + [40_005] + [40_000] * 4, [40_300] * 8])
    assert source.cpu().tolist() == want.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_and_alignment(dtype):
    """Transposed, sliced, expanded inputs, and contiguous ones that start at any address."""
    graph = mixed()
    x, weight = rand(graph.num_cols, 32, dtype=dtype), rand(graph.nnz, 32, dtype=dtype)
    want = reference.spmm(graph, x.double(), weight.double(), "mul", "sum")
    want_dot = reference.sddmm(graph, x.double(), weight.double(), "dot", "u", "e")

    def layouts(t):
        yield t.t().contiguous().t()
        yield torch.stack([t, t], -1)[..., 0]
        for shift in (1, 2, 3):
            yield torch.cat([t.new_zeros(shift), t.flatten()])[shift:].view_as(t)

    for a, b in itertools.product(layouts(x), layouts(weight)):
        assert_close(ops.spmm(graph, a, b), want, dtype)
        assert_close(ops.sddmm(graph, a, b, "dot", "u", "e"), want_dot, dtype)
    leaf = x.clone().requires_grad_()
    ops.spmm(graph, leaf, reduce="max").sum().backward()  # a gradient of stride 0
    assert int(leaf.grad.float().sum()) == 32 * int((graph.indptr.diff() > 0).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows,vectors,heads,feats",
    [(5, 2, 4, 16), (0, 2, 4, 16), (700, 1, 3, 7), (9, 2, 1, 40), (3000, 2, 1, 256), (33, 1, 2, 1500)],
)
def test_head_dots(rows, vectors, heads, feats, dtype):
    x, a = rand(rows, heads, feats, dtype=dtype), rand(vectors, heads, feats, dtype=dtype)
    check(ops.head_dots, reference.head_dots, x, a)
    check(ops.head_dots, reference.head_dots, x[:, :, :-1], a[:, :, 1:])  # of other strides, unaligned
    before, upstream = rand(rows, heads, feats, dtype=dtype), rand(vectors, rows, heads)
    given = (x, a.to(_library.accumulator(x)), upstream.to(_library.accumulator(x)))
    want, vectors_alone = head_dots_backward_op.impl(*given)
    summed, of_vectors = head_dots_backward_op.impl(*given, before.clone())  # added to what is there
    assert torch.equal(of_vectors, vectors_alone)
    assert_close(summed, want.double() + before.double(), dtype, scale=want.double().abs() + before.double().abs())
    if x.element_size() == 2:  # vectors as a layer has them under autocast, and their gradient, are not rounded
        a = rand(vectors, heads, feats)
        leaves = [t.detach().requires_grad_() for t in (x, a)]
        exact = [t.detach().double().requires_grad_() for t in (x, a)]
        got, want = ops.head_dots(*leaves), reference.head_dots(*exact)
        upstream = torch.randn_like(got)
        grads = torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, exact, upstream.double())
        assert got.dtype == grads[0][1].dtype == torch.float32 and grads[0][0].dtype == dtype
        for ours, exactly, of in zip(
            (got, *grads[0]), (want, *grads[1]), (torch.float32, dtype, torch.float32), strict=True
        ):
            assert_close(ours, exactly, of)


def test_gradcheck():
    graph = build([0, 3, 1, 140, 0, 2], 5)
    x = torch.randn(5, 2, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    v = torch.randn(6, 2, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w = torch.randn(graph.nnz, 2, 1, dtype=torch.float64, device=DEVICE, requires_grad=True)
    functions = [
        (lambda x, w: ops.spmm(graph, x, w), (x, w)),
        (lambda x, w: ops.spmm(graph, x, w, "add", "mean"), (x, w)),
        (lambda x: ops.spmm(graph, x, reduce="max"), (x,)),
        (lambda x, v: ops.sddmm(graph, x, v), (x, v)),
        (lambda x, v: ops.sddmm(graph, x, v, "div"), (x, v)),
        (lambda w: ops.edge_softmax(graph, w), (w,)),
    ]
    for function, inputs in functions:
        assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 2])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_of_narrow_features_under_autocast(heads, dtype):
    """Scores of float32 stay so beside features of 16 bits, and so does the result."""
    graph = mixed(torch.int32)
    x = rand(graph.num_cols, heads, 12, dtype=dtype).requires_grad_()
    scores = [(2 * rand(n, heads)).requires_grad_() for n in (graph.num_cols, graph.num_rows)]
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = ops.attention(graph, x, *scores)
    exact = [t.detach().double().requires_grad_() for t in (x, *scores)]
    want = reference.attention(graph, *exact, 0.2)
    assert out.dtype == torch.float32
    assert_close(out.to(dtype), want, dtype)
    upstream = rand(*out.shape)
    grads, wanted = (
        torch.autograd.grad(out, (x, *scores), upstream),
        torch.autograd.grad(want, exact, upstream.double()),
    )
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]
    for got, exact_grad in zip(grads, wanted, strict=True):
        # A score's is a difference of inner products with results that were kept in 16 bits.
        assert_close(got.to(dtype), exact_grad, dtype, "gradient", 2 * exact_grad.abs().max())


def test_gat_of_narrow_features_under_autocast():
    graph = build(torch.tensor([3, 0, 40, 7, 1, 9, 2, 5]), 8)
    x = rand(8, 2, 12, dtype=torch.bfloat16).requires_grad_()
    vectors = [rand(1, 2, 12).requires_grad_() for _ in range(2)]
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = ops.gat(graph, x, *vectors)
    exact = [t.detach().double().requires_grad_() for t in (x, *vectors)]
    scores = [(exact[0] * v).sum(-1) for v in exact[1:]]
    want = reference.attention(graph, exact[0], *scores, 0.2)
    assert out.dtype == torch.float32
    # The vectors are rounded to 16 bits, as autocast rounds weights.
    torch.testing.assert_close(out.double(), want, rtol=5e-2, atol=5e-2)
    grads, wanted = torch.autograd.grad(out.sum(), (x, *vectors)), torch.autograd.grad(want.sum(), exact)
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]
    for got, exact_grad in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got.double(), exact_grad, rtol=5e-2, atol=5e-2 * float(exact_grad.abs().max()))


# (rows of each segment, weight's shape but for the segments)
SEGMENTS = {
    "plain": ((200, 0, 0, 1, 128, 37, 129, 0), (6, 4)),
    "vectors": ((5, 300, 0, 64), (20, 72)),
    "tall": ((0, 3, 130, 2), (129, 5)),
    "wide": ((17, 0, 90), (3, 130)),
    "large blocks": ((70, 0, 140), (2, 33, 65)),
    "small blocks": ((70, 0, 140), (3, 2, 4)),
    "one": ((7000,), (8, 4)),
    "one of many": ((*[0, 1] * 40, 2000, *[2] * 30), (4, 4)),
    "no rows": ((0, 0), (4, 4)),
    "no features": ((3, 2), (0, 4)),
    "no results": ((3, 2), (4, 0)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SEGMENTS)
def test_segment_matmul(name, dtype):
    rows, shape = SEGMENTS[name]
    ptr = torch.tensor([0, *itertools.accumulate(rows)], device=DEVICE)
    x, weight = rand(sum(rows), math.prod(shape[:-1]), dtype=dtype), rand(len(rows), *shape, dtype=dtype)
    # A share of the weights' gradient is rounded once, where the gradient is.
    check(lambda x, w: ops.segment_matmul(x, ptr, w), lambda x, w: reference.segment_matmul(x, ptr, w), x, weight)


def test_segment_matmul_of_views_and_offsets_elsewhere():
    ptr = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    x, weight = rand(6, 18)[:, ::2].t(), rand(3, 5, 6).transpose(1, 2)
    for _ in range(2):  # the second time with what the first has kept
        check(lambda x, w: ops.segment_matmul(x, ptr, w, check=False),
              lambda x, w: reference.segment_matmul(x, ptr.to(DEVICE), w), x, weight)  # fmt: skip
    got = [torch.ops.gnnaccel.segment_matmul(x, ptr.to(DEVICE, torch.int64), weight) for _ in range(2)]
    assert torch.equal(*got)
