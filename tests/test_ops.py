"""Every op against gnnaccel.ops.reference in float64, forward and backward: a covering set, not the full product."""

import functools
import itertools

import graphs
import numpy as np
import pytest
import torch
from oracle import assert_close, check, rand

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
INDEX = [torch.int32, torch.int64]
WIDTHS = [1, 3, 16, 32, 33, 100, 129, 256, 513]
MESSAGES = ["copy_lhs", "copy_rhs", "add", "sub", "mul", "div"]
REDUCES = ["sum", "mean", "max", "min"]
EDGE_OPS = ["copy_lhs", "copy_rhs", "add", "sub", "mul", "div", "dot"]
TARGETS = ["u", "v", "e"]

# Feature shapes of x (or lhs) and weight (or rhs) that broadcast in every way the operand rule knows, and
# in two it does not: a broadcast dimension between two kept ones is expanded before the kernel.
BROADCASTS = [
    ((), ()),
    ((), (5,)),
    ((6,), (1,)),
    ((1,), (6,)),
    ((4, 1), (4, 8)),
    ((4, 8), (4, 1)),
    ((1, 8), (4, 8)),
    ((4, 8), (1, 8)),
    ((8,), (4, 8)),
    ((1, 64), (4, 1)),
    ((4, 1), (4, 64)),
    ((1, 24), (3, 24)),
    ((2, 35), (2, 1)),
    ((3, 1), (1, 5)),
    ((3, 4, 1), (3, 1, 5)),
    ((3, 1, 5), (3, 4, 5)),
    ((1, 4, 1), (3, 4, 5)),
    ((3, 4, 5), (4, 1)),
    ((2, 16), (2, 1)),
    ((2, 3, 16), (2, 3, 1)),
    ((3, 0), (3, 1)),
]


def name_of(value):
    return str(value).removeprefix("torch.")


def graph_on(device, name="power_law", index=torch.int32, order="coo"):
    return graphs.make(name, index, order).to(device)


def selected(graph, x, weight, message, arg_source, arg_edge):
    """What a max or min must return if the argmax are these: a differentiable definition without ties."""
    shape = (arg_source if arg_source.numel() else arg_edge).shape

    def take(value, arg):
        value = value.reshape(value.shape[0], *(1,) * (len(shape) - value.dim()), *value.shape[1:])
        value = value.expand(value.shape[0], *shape[1:])
        if not value.shape[0]:
            return value.new_zeros(shape) + value.sum()  # no values, but a way back to them
        return value.gather(0, arg.long().clamp(min=0))

    lhs = None if message == "copy_rhs" else take(x, arg_source)
    if x is not None and weight is not None:  # spmm appends ones to a weight with fewer dimensions
        weight = weight.reshape(*weight.shape, *(1,) * (x.dim() - weight.dim()))
    rhs = None if message == "copy_lhs" else take(weight, arg_edge)
    empty = (arg_source if lhs is not None else arg_edge) < 0
    return reference._combine(message, lhs, rhs).masked_fill(empty, 0)


def check_spmm(graph, x, weight, message, reduce):
    """One spmm against the reference; x or weight is None where the message does not read it."""
    inputs = [t for t in (x, weight) if t is not None]

    def both(given):
        given = iter(given)
        return (None if x is None else next(given)), (None if weight is None else next(given))

    def expected(*given):
        return reference.spmm(graph, *both(given), message, reduce)

    if reduce in ("sum", "mean"):
        return check(lambda *given: ops.spmm(graph, *both(given), message, reduce), expected, *inputs)
    out, *args = ops.spmm(graph, x, weight, message, reduce, return_arg=True)
    assert_close(out, expected(*(t.double() for t in inputs)), out.dtype)
    return check(
        lambda *given: ops.spmm(graph, *both(given), message, reduce),
        lambda *given: selected(graph, *both(given), message, *args),
        *inputs,
    )


def spmm_inputs(graph, message, x_shape, w_shape, dtype):
    x = None if message == "copy_rhs" else rand(graph.num_cols, *x_shape, dtype=dtype, device=graph.device)
    weight = None if message == "copy_lhs" else rand(graph.nnz, *w_shape, dtype=dtype, device=graph.device)
    return x, weight


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("width", WIDTHS)
def test_spmm_widths(device, width, dtype):
    graph = graph_on(device)
    for message, reduce, w_shape in [("copy_lhs", "sum", ()), ("mul", "sum", ()), ("mul", "mean", (width,))]:
        check_spmm(graph, *spmm_inputs(graph, message, (width,), w_shape, dtype), message, reduce)
    for message, reduce in [("copy_lhs", "max"), ("copy_rhs", "min"), ("copy_rhs", "sum")]:
        check_spmm(graph, *spmm_inputs(graph, message, (width,), (width,), dtype), message, reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "heads,width",
    [(1, 8), (2, 4), (3, 5), (4, 16), (8, 8), (7, 24), (3, 96), (4, 3), (11, 2), (5, 7), (3, 18), (2, 33)],
)
def test_spmm_heads(device, heads, width, dtype):
    graph = graph_on(device)
    for reduce in ("sum", "max"):
        check_spmm(graph, *spmm_inputs(graph, "mul", (heads, width), (heads,), dtype), "mul", reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "x_shape,w_shape",
    [
        ((1,), ()),
        ((2,), (2,)),
        ((3,), ()),
        ((5, 3), (5,)),
        ((4, 3, 2), (1, 3, 1)),  # the weights of three heads, four times
        ((2, 3, 7), (1, 3, 1)),
        ((3, 3), (1, 1)),
    ],
)
def test_spmm_of_narrow_rows_and_heads(device, x_shape, w_shape, dtype):
    """Those that no vector fits, on a row that is summed in pieces too."""
    graph = graph_on(device, "one_hub")
    for message, reduce in [("copy_lhs", "mean"), ("mul", "sum"), ("copy_lhs", "max"), ("copy_rhs", "min")]:
        check_spmm(graph, *spmm_inputs(graph, message, x_shape, w_shape, dtype), message, reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("message", MESSAGES)
def test_spmm_messages(device, message, reduce, dtype):
    graph = graph_on(device, "loops")
    check_spmm(graph, *spmm_inputs(graph, message, (20,), (20,), dtype), message, reduce)


@pytest.mark.parametrize("index", INDEX, ids=name_of)
@pytest.mark.parametrize("order", graphs.ORDERS)
@pytest.mark.parametrize("name", graphs.NAMES)
def test_all_ops_on_every_graph(device, name, order, index):
    """Outputs are poisoned with NaN, so an element that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    graph = graph_on(device, name, index, order)
    pairs = [("copy_lhs", "sum"), ("mul", "mean"), ("copy_rhs", "sum"), ("mul", "max"), ("copy_rhs", "min")]
    for message, reduce in pairs:
        check_spmm(graph, *spmm_inputs(graph, message, (2, 9), (2, 1), torch.float32), message, reduce)
    u, v = rand(graph.num_cols, 2, 9, device=device), rand(graph.num_rows, 2, 9, device=device)
    check_sddmm(graph, u.float(), v.float(), "dot", "u", "v")
    check_sddmm(graph, u, rand(graph.nnz, 2, 1, device=device), "mul", "u", "e")
    for norm_by in ("dst", "src"):
        check_edge_softmax(graph, rand(graph.nnz, 3, dtype=torch.float32, device=device), norm_by)


@pytest.mark.parametrize("message,reduce", [("mul", "sum"), ("add", "mean"), ("mul", "max"), ("div", "min")])
@pytest.mark.parametrize("x_shape,w_shape", BROADCASTS, ids=str)
def test_spmm_broadcasting(device, x_shape, w_shape, message, reduce):
    graph = graph_on(device, "wide")
    w_shape = (1,) * (len(x_shape) - len(w_shape)) + w_shape  # shorter ones are aligned left: test_spmm_heads
    for dtype in DTYPES:
        check_spmm(graph, *spmm_inputs(graph, message, x_shape, w_shape, dtype), message, reduce)


def strided_variants(x):
    """The same values in every layout a caller may hold them in."""
    yield x
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield torch.stack([x, x + 1], dim=-1)[..., 0]
    yield torch.cat([x.flip(0), x])[x.shape[0] :]
    yield x.flip(0).flip(0)


def test_strided_inputs(device):
    graph = graph_on(device)
    x, weight = rand(graph.num_cols, 2, 20), rand(graph.nnz, 2, 1)
    x, weight = x.to(device), weight.to(device)
    want = reference.spmm(graph, x, weight, "mul", "sum")
    for a, w in itertools.product(strided_variants(x), strided_variants(weight)):
        assert_close(ops.spmm(graph, a, w), want, torch.float64)
    wide = x[:, :, :1].expand(-1, -1, 20)  # stride 0
    want = reference.sddmm(graph, wide, x, "dot", "u", "v")
    for a in strided_variants(x):
        check_sddmm(graph, a, wide, "dot", "u", "v")
        assert_close(ops.sddmm(graph, wide, a), want, torch.float64)
    for w in strided_variants(weight):
        assert_close(ops.edge_softmax(graph, w), reference.edge_softmax(graph, weight), torch.float64)
    # A gradient arrives with stride 0 from .sum()
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(ops.spmm(graph, leaf, weight).sum(), leaf)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(reference.spmm(graph, leaf, weight, "mul", "sum").sum(), leaf)
    assert_close(got, want, torch.float64)


def expected_args(graph, value, reduce):
    """Winning nonzero of each row and feature by numpy: the first one, NaN before all; -1 in an empty row."""
    pick = {"max": np.argmax, "min": np.argmin}[reduce]
    indptr = graph.indptr.cpu().numpy()
    out = np.full((graph.num_rows, *value.shape[1:]), -1)
    for row, (begin, end) in enumerate(itertools.pairwise(indptr)):
        if begin < end:
            out[row] = begin + pick(value[begin:end], axis=0)
    return out


@pytest.mark.parametrize("values", ["ties", "nan", "infinite"])
@pytest.mark.parametrize("message", ["copy_lhs", "copy_rhs", "mul", "add"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_winners(device, reduce, message, values):
    """Ties go to the first in row order, NaN wins, infinities are ordinary."""
    for name, width, dtype in [("one_hub", 20, torch.float32), ("empty_rows", 5, torch.bfloat16), ("loops", 1, None)]:
        graph = graph_on(device, name)
        dtype = dtype or torch.float64
        x = torch.randint(-2, 3, (graph.num_cols, width)).to(dtype)
        weight = torch.randint(1, 3, (graph.nnz, width)).to(dtype)
        if values == "nan":
            x[torch.rand(x.shape) < 0.1] = torch.nan
            weight[torch.rand(weight.shape) < 0.01] = torch.nan
        elif values == "infinite":
            x = torch.where(x > 1, torch.inf, torch.where(x < -1, -torch.inf, x))
        x, weight = x.to(device), weight.to(device)
        out, arg_source, arg_edge = ops.spmm(graph, x, weight, message, reduce, empty_value=-7.5, return_arg=True)
        lhs, rhs = x[graph.indices.long()], weight[reference.edges_of(graph)]
        value = reference._combine(message, lhs, rhs)
        winner = expected_args(graph, value.double().cpu().numpy(), reduce)
        empty = torch.from_numpy(winner < 0).to(device)
        winner = torch.from_numpy(winner).clamp(min=0).to(device)
        want = value.gather(0, winner).masked_fill(empty, -7.5)
        torch.testing.assert_close(out, want, equal_nan=True, rtol=0, atol=0)
        for arg, ids in ((arg_source, graph.indices), (arg_edge, reference.edges_of(graph))):
            if arg.numel():
                assert arg.dtype == graph.indices.dtype
                assert torch.equal(arg.long(), ids.long()[winner].masked_fill(empty, -1))
        assert bool(arg_source.numel()) == (message != "copy_rhs")
        assert bool(arg_edge.numel()) == (message != "copy_lhs")


@pytest.mark.parametrize("empty_value", [0.0, 3.5, float("-inf"), float("nan")])
@pytest.mark.parametrize("reduce", REDUCES)
def test_empty_value(device, reduce, empty_value):
    graph = graph_on(device, "empty_rows")
    x = rand(graph.num_cols, 18, dtype=torch.float32, device=device).requires_grad_()
    out = ops.spmm(graph, x, reduce=reduce, empty_value=empty_value)
    want = reference.spmm(graph, x.detach(), None, "copy_lhs", reduce, empty_value)
    torch.testing.assert_close(out, want, equal_nan=True)
    (grad,) = torch.autograd.grad(out.nan_to_num(0, 0, 0).sum(), x)
    assert bool(grad.isfinite().all())


def check_sddmm(graph, lhs, rhs, op, lhs_target, rhs_target):
    inputs = [t for t, unread in ((lhs, "copy_rhs"), (rhs, "copy_lhs")) if op != unread]

    def call(function):
        def run(*given):
            pair = given if len(given) == 2 else (None, *given) if op == "copy_rhs" else (*given, None)
            return function(graph, *pair, op, lhs_target, rhs_target)

        return run

    return check(call(ops.sddmm), call(reference.sddmm), *inputs)


def sddmm_inputs(graph, shapes, targets, dtype):
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
    pairs = zip(targets, shapes, strict=True)
    return [rand(rows[target], *shape, dtype=dtype, device=graph.device) for target, shape in pairs]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("op", EDGE_OPS)
def test_sddmm_ops_and_targets(device, op, dtype):
    graph = graph_on(device, "wide", torch.int64)
    for targets in itertools.product(TARGETS, TARGETS):
        check_sddmm(graph, *sddmm_inputs(graph, [(3, 7), (3, 7)], targets, dtype), op, *targets)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("width", WIDTHS)
def test_sddmm_widths(device, width, dtype):
    graph = graph_on(device)
    for op in ("dot", "mul"):
        check_sddmm(graph, *sddmm_inputs(graph, [(width,)] * 2, "uv", dtype), op, "u", "v")


@pytest.mark.parametrize("heads,width", [(1, 8), (2, 3), (4, 16), (8, 33), (5, 1), (3, 64), (2, 24)])
def test_sddmm_heads(device, heads, width):
    graph = graph_on(device)
    for dtype, lhs in itertools.product(DTYPES, [(heads, width), (1, width), (width,)]):
        check_sddmm(graph, *sddmm_inputs(graph, [lhs, (heads, width)], "vu", dtype), "dot", "v", "u")
        check_sddmm(graph, *sddmm_inputs(graph, [(heads, width), lhs], "ue", dtype), "dot", "u", "e")


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("lhs,rhs", BROADCASTS, ids=str)
def test_sddmm_broadcasting(device, lhs, rhs, op):
    graph = graph_on(device, "tall")
    for targets in ("uv", "ve", "eu", "vv"):
        check_sddmm(graph, *sddmm_inputs(graph, [lhs, rhs], targets, torch.float64), op, *targets)
    for dtype in DTYPES:
        check_sddmm(graph, *sddmm_inputs(graph, [lhs, rhs], "vu", dtype), op, "v", "u")


def check_edge_softmax(graph, scores, norm_by="dst"):
    target = graph if norm_by == "dst" else graph.transposed
    return check(lambda s: ops.edge_softmax(graph, s, norm_by), lambda s: reference.edge_softmax(target, s), scores)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "heads", [(), (1,), (2,), (3,), (4,), (8,), (16,), (29,), (100,), (2, 3), (4, 1), (0,)], ids=str
)
def test_edge_softmax_heads(device, heads, dtype):
    for name, norm_by in [("power_law", "dst"), ("wide", "src"), ("one_hub", "dst")]:
        graph = graph_on(device, name)
        check_edge_softmax(graph, 3 * rand(graph.nnz, *heads, dtype=dtype, device=device), norm_by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_edge_softmax_extreme_scores(device, dtype):
    """As torch.softmax: huge scores do not overflow, -inf gets 0, an all -inf row and a NaN give NaN."""
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32).to(dtype).item()
    rows = [
        [1e4, -1e4, 9999.0],
        [-torch.inf, 0.0, 1.0],
        [-torch.inf] * 3,
        [0.0, torch.nan, 1.0],
        [torch.inf, 0.0, -torch.inf],
        [-80.0, -90.0, 0.0],
        [payload, 0.0, 1.0],
        [1e30, -1e30, 1e30],
    ]
    scores = torch.tensor(rows, dtype=dtype).repeat_interleave(7, 1)
    scores[6, 0:7] = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32).to(dtype)
    indptr = torch.arange(0, scores.numel() + 1, scores.shape[1])
    graph = Graph.from_csr(indptr, torch.zeros(scores.numel(), dtype=torch.int64)).to(device)
    for heads in (1, 2, 3, 4, 8, 21):
        given = torch.stack([scores.roll(h, 0) for h in range(heads)], -1)  # what is odd in one is not in the next
        got = ops.edge_softmax(graph, given.flatten(0, 1).to(device)).cpu().view_as(given)
        want = given.double().softmax(1).to(dtype)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduce", REDUCES)
def test_segment_reduce(device, reduce, dtype):
    for offsets, index in itertools.product(([0], [0, 0, 0], [0, 4, 4, 9, 30], [0, 3]), INDEX):
        offsets = torch.tensor(offsets, dtype=index, device=device)
        for width in ((), (1,), (35,), (2, 3)):
            x = rand(int(offsets[-1]), *width, dtype=dtype, device=device)
            if dtype == torch.bfloat16 and reduce in ("max", "min"):  # ties: the reference splits gradients
                x = torch.rand(x.shape).argsort(0).to(device, dtype)
            given = {"offsets": offsets, "reduce": reduce}
            check(
                functools.partial(ops.segment_reduce, **given), functools.partial(reference.segment_reduce, **given), x
            )
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0], [2.0, torch.nan]], device=device)
    out, arg = ops.segment_reduce(x, torch.tensor([0, 3, 3], device=device), "max", empty_value=-1, return_arg=True)
    torch.testing.assert_close(out.cpu(), torch.tensor([[3.0, torch.nan], [-1.0, -1.0]]), equal_nan=True)
    assert arg.tolist() == [[1, 2], [-1, -1]]


@pytest.mark.parametrize("order", graphs.ORDERS)
def test_fp32_is_accurate(device, order):
    """Relative error under 1e-5 against float64 for each element, on the hub too; bf16 within its last digit."""
    graph = graph_on(device, "one_hub", torch.int32, order)
    for x in (torch.rand(graph.num_cols, 24), torch.full((graph.num_cols, 24), 0.1)):
        x = x.to(device)
        weight = torch.rand(graph.nnz, device=device)
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
            a, w = x.to(dtype), weight.to(dtype)
            for given, message, reduce in [((a, w), "mul", "sum"), ((a, None), "copy_lhs", "mean")]:
                want = reference.spmm(graph, *(t if t is None else t.double() for t in given), message, reduce)
                got = ops.spmm(graph, *given, message, reduce).double()
                assert float(((got - want).abs() / want.abs().clamp(min=1e-30)).max()) <= bound
        scores = torch.rand(graph.nnz, 4, device=device)
        want = reference.edge_softmax(graph, scores.double())
        assert float((ops.edge_softmax(graph, scores) / want - 1).abs().max()) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("x_shape,w_shape", [((8,), ()), ((4, 8), (4,)), ((2, 3, 12), (2, 3, 1)), ((1, 4), (1, 1))])
def test_weighted_sums_over_a_hub_of_sources(device, x_shape, w_shape, dtype):
    """Both gradients of a weighted sum come from one walk over the sources; a source of 20k edges is cut up there."""
    rows = torch.arange(20_000) % 300
    cols = torch.where(torch.arange(20_000) < 18_000, 1, rows % 7)
    graph = Graph.from_coo(rows, cols, num_rows=300, num_cols=9).to(device)
    x, weight = spmm_inputs(graph, "mul", x_shape, w_shape, dtype)
    for reduce in ("sum", "mean"):
        check_spmm(graph, x, weight, "mul", reduce)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = ops.spmm(graph, *leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for other in results[1:]:
        assert device.type != "cpu" or all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_bf16_winner_gradients_accumulate_in_fp32(device):
    """One source that wins in 1000 rows: a bf16 accumulator would stop counting at 256."""
    graph = Graph.from_coo(torch.arange(1000), torch.zeros(1000, dtype=torch.int64), num_rows=1000, num_cols=2)
    x = torch.ones(2, 3, dtype=torch.bfloat16, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.spmm(graph.to(device), x, reduce="max").sum(), x)
    assert grad[0].tolist() == [1000.0] * 3
    assert grad[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("op", ["spmm", "edge_softmax"])
def test_half_on_cuda(device, op):
    if device.type == "cpu":
        with pytest.raises(TypeError, match="float16 runs on CUDA only"):
            ops.segment_reduce(torch.ones(1, dtype=torch.float16), torch.tensor([0, 1]))
        return
    graph = graph_on(device)
    if op == "spmm":
        check_spmm(graph, *spmm_inputs(graph, "mul", (4, 16), (4,), torch.float16), "mul", "sum")
    else:
        check_edge_softmax(graph, rand(graph.nnz, 4, dtype=torch.float16, device=device))
