"""The CUDA kernels against gnnaccel.ops.reference in float64: every dtype, index type and width, and what only a
GPU has (streams, graph capture, hubs cut over blocks). test_ops.py runs on CUDA as well and holds the rest.

Outputs and workspaces are poisoned: under deterministic algorithms torch fills fresh memory with NaN.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from gnnaccel import _library, ops
from gnnaccel.graph.structure import Graph
from gnnaccel.ops import reference

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)
if not _library.has_cuda_kernels():
    pytest.skip("this build has no CUDA half", allow_module_level=True)

DEVICE = torch.device("cuda")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INDEX = (torch.int32, torch.int64)
WIDTHS = (1, 3, 16, 32, 33, 100, 129, 256, 513)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
EXTREMES = ("max", "min")


@pytest.fixture(autouse=True)
def _poisoned():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


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


def winners(graph, x, weight, message, args):
    """The values at the winners `args`: what max and min are once their choice is made."""

    def take(value, arg):
        padded = value.reshape(value.shape[0], *(1,) * (arg.dim() - value.dim()), *value.shape[1:])
        if not value.shape[0]:  # no values to gather, but a way back to them
            return value.new_zeros(arg.shape) + value.sum()
        return padded.expand(value.shape[0], *arg.shape[1:]).gather(0, arg.long().clamp(min=0))

    left = None if x is None else take(x, args[0])
    right = None if weight is None else take(weight, args[1])
    present = args[0] >= 0 if left is not None else args[1] >= 0
    return torch.where(present, reference._combine(message, left, right), 0.0)


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
        return winners(graph, left, right, message, args)

    return check(op, chosen, *given)


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


def run_everything(graph, x, weight, scores):
    """Every kernel once, with gradients: a list of results."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, scores)]
    alpha = ops.edge_softmax(graph, leaves[2])
    outs = [
        ops.spmm(graph, leaves[0], leaves[1]),
        ops.spmm(graph, leaves[0], reduce="mean"),
        ops.spmm(graph, leaves[0].view(-1, 4, 8), alpha),
        ops.spmm(graph, leaves[0], leaves[1], reduce="max"),
        ops.sddmm(graph, leaves[0], leaves[0][: graph.num_rows]),
    ]
    total = sum(o.square().sum() for o in outs)
    return [o.detach() for o in outs] + list(torch.autograd.grad(total, leaves))


def everything_inputs():
    graph = build([9_000, 0, 3, 300, *[7] * 100], 200)
    return graph, rand(200, 32), rand(graph.nnz), rand(graph.nnz, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_on_every_run(dtype):
    graph, *inputs = everything_inputs()
    inputs = [t.to(dtype) for t in inputs]
    first = run_everything(graph, *inputs)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run_everything(graph, *inputs), strict=True))


def test_atomic_path_is_close():
    """Without deterministic algorithms the gradient of a max goes by atomics."""
    torch.use_deterministic_algorithms(False)
    graph, *inputs = everything_inputs()
    got = run_everything(graph, *inputs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for a, b in zip(got, run_everything(graph, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_side_stream():
    """Work goes to the current stream: inputs still being made there, results read there."""
    torch.use_deterministic_algorithms(False)  # the fill of fresh memory would hide a wrong stream
    graph, *inputs = everything_inputs()
    want = run_everything(graph, *inputs)
    stream = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)  # tens of milliseconds that the inputs wait for
        late = [t + (0 * a.sum()).to(t.dtype) for t in inputs]
        got = run_everything(graph, *late)
    stream.synchronize()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()))


def test_cuda_graph_capture():
    """Everything, gradients included, is captured once and replayed on new values."""
    torch.use_deterministic_algorithms(False)
    graph, *inputs = everything_inputs()
    static = [t.clone() for t in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_everything(graph, *static)  # builds the transposed graph; capture must find it ready
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = run_everything(graph, *static)
    for _ in range(2):
        fresh = [torch.randn_like(t) for t in inputs]
        for t, f in zip(static, fresh, strict=True):
            t.copy_(f)
        for r in results:
            r.fill_(float("nan"))
        captured.replay()
        for got, want in zip(results, run_everything(graph, *fresh), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_nothing_synchronises():
    graph, *inputs = everything_inputs()
    torch.use_deterministic_algorithms(False)
    run_everything(graph, *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_everything(graph, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


def test_conversions_match_the_cpu():
    rows, cols = torch.randint(50, (400,)), torch.randint(70, (400,))
    here = Graph.from_coo(rows, cols, num_rows=50, num_cols=70)
    there = Graph.from_coo(rows.cuda(), cols.cuda(), num_rows=50, num_cols=70)
    for a, b in ((here, there), (here.transposed, there.transposed)):
        for name in ("indptr", "indices", "edge_ids"):
            assert torch.equal(getattr(a, name), getattr(b, name).cpu()), name


def test_offsets_beyond_32_bits():
    """Edge features of more than 2^31 elements, with 32-bit indices."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    torch.use_deterministic_algorithms(False)  # no need to fill 10 GB twice
    nnz, width, num_cols = 36_000_000, 64, 1000
    indptr = torch.tensor([0, 10, nnz - 10_000, nnz], dtype=torch.int32, device=DEVICE)
    indices = torch.randint(num_cols, (nnz,), dtype=torch.int32, device=DEVICE)
    graph = Graph(indptr, indices, None, num_cols)
    x, v = rand(num_cols, width, dtype=torch.float16), rand(3, width, dtype=torch.float16)
    edges = ops.sddmm(graph, x, v, "add")
    assert edges.numel() > 2**31
    tail = indices[-10_000:].long()
    assert torch.equal(edges[-10_000:], (x[tail].float() + v[2].float()).half())
    out = ops.spmm(graph, None, edges, "copy_rhs", "mean")
    assert_close(out[2], edges[-10_000:].double().mean(0), torch.float16)
    top, _, arg = ops.spmm(graph, None, edges, "copy_rhs", "max", return_arg=True)
    assert torch.equal(edges[arg.long()[2], torch.arange(width, device=DEVICE)], top[2])
    assert torch.equal(top[2], edges[-10_000:].amax(0))
