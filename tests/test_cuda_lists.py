"""The CUDA kernels that read work lists, each by itself: along a list in every arrangement, and without."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from cuda_cases import DEVICE, DTYPES, EMULATED, EXTREMES, INDEX, assert_close, build, first_winners, mixed, rand

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _edge_order, reference
from gnnaccel.ops._arrays import Matrix, Structure, arrays_of
from gnnaccel.schedule import worklist
from gnnaccel.schedule.worklist import Arrangement, Kernel, Plan

SPMM = importlib.import_module("gnnaccel.ops.spmm")  # the module, not the function of that name
KERNELS = [None, *Arrangement]
OF_SUMS = [*KERNELS, Kernel.GROUPS]
# Features of x and of the weight: every lane count, lanes without features, widths that no vector fits.
SHAPES = [((4,), None), ((8,), ()), ((16,), ()), ((40,), ()), ((64,), ()), ((33,), ()), ((256,), None), ((520,), ()),
          ((2, 32), (2, 1)), ((4, 8), (4, 1)), ((100,), None), ((1,), ()), ((7,), None), ((3, 7), ()), ((101,), None),
          ((131,), ())]  # fmt: skip


def every_kernel(test, kernels=KERNELS):
    """Run a test for every kernel, dtype and index type."""
    for name, values in (("index", INDEX), ("dtype", DTYPES), ("kernel", kernels)):
        test = pytest.mark.parametrize(name, values)(test)
    return test


def every_kernel_of_sums(test):
    return every_kernel(test, OF_SUMS)


class Fixed(schedule.Work):
    """What always answers with one work list (of groups, for sums and means alone), or with none."""

    def __init__(self, given: worklist.WorkList | None):
        super().__init__()
        self.given = given

    def on_cuda(self, graph, row_bytes, sums):
        return self.given if sums or (self.given and self.given.plan.kernel is not Kernel.GROUPS) else None


ITEM, HUB = (16, 1100) if EMULATED else (32, 4000)  # edges of an item, and of a row with more items than a warp merges


class Unready(Graph):
    """A graph whose calls are never made ready."""


def fixed(graph: Graph, kind: Arrangement | Kernel | Plan | None) -> Graph:
    """`graph` with a list of this arrangement, of groups or of a plan, for it and its transposed."""
    if kind is Kernel.GROUPS:
        kind = Plan(7, Arrangement.HUBS, Kernel.GROUPS, 8, 64)
    plan = Plan(ITEM, kind) if isinstance(kind, Arrangement) else kind
    pair = []
    for g in (graph, graph.transposed):
        one = Unready(g.indptr, g.indices, g.edge_ids, g.num_cols)
        order = torch.randperm(one.num_rows, device=DEVICE)
        one.slot("schedule", lambda one=one, order=order: Fixed(plan and worklist.build(one, plan, order)))
        pair.append(one)
    pair[0]._keep_transposed(pair[1])
    return pair[0]


@pytest.fixture(autouse=True)
def poisoned():
    """Outputs and workspaces are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


GRAPHS = {
    "mixed": mixed,
    "long rows": lambda index: build([0, HUB, 1, 0, 33, 64, 65, 5 * HUB // 8, 7, 0], 90, index, False),
    "one row": lambda index: build([300], 5, index),
    "no edges": lambda index: build([0, 0, 0], 4, index),
}


# Features that no vector fits, of x and of the weight, on a graph that reads them often enough for a copy into some
# that they fit (cuda/spmm_pad.cu); without a list that takes 32 MiB.
PADDED = [((131,), ()), ((10,), ()), ((31,), None), ((5, 27), (5, 1)), ((3, 43), None)]
PADDED_UNLISTED = [((701,), None), ((701,), ()), ((7, 101), (7, 1))]


def read_often(index=torch.int32, hub=12_000) -> Graph:
    return build([0, 3 * hub // 4, 1, 33, hub // 3, 7, 0, hub, 300, 0], 90, index)


def check_sums(graph, x_shape, w_shape, dtype, name):
    x = rand(graph.num_cols, *x_shape, dtype=dtype)
    w = None if w_shape is None else rand(graph.nnz, *w_shape, dtype=dtype)
    wide = None if w is None else w.double().reshape(*w.shape, *(1,) * (x.dim() - w.dim()))
    message = "copy_lhs" if w is None else "mul"
    scale = reference.spmm(graph, x.double().abs(), None if wide is None else wide.abs(), message, "sum")
    for reduce in ("sum", "mean"):
        want = reference.spmm(graph, x.double(), wide, message, reduce)
        want[graph.indptr.diff() == 0] = 2.5
        got = ops.spmm(graph, x, w, reduce=reduce, empty_value=2.5)
        bound = scale / (graph.indptr.diff().clamp(min=1).view(-1, *[1] * len(x_shape)) if reduce == "mean" else 1)
        assert_close(got, want, dtype, f"{name} {x_shape} {w_shape} {reduce}", bound)


@every_kernel_of_sums
def test_sums(kernel, dtype, index):
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for shapes in SHAPES:
            check_sums(graph, *shapes, dtype, name)


def every_padded(test):
    for name, values in (("index", INDEX), ("dtype", DTYPES), ("kernel", [Arrangement.LENGTH, Kernel.GROUPS, None])):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@every_padded
def test_padded_sums(kernel, dtype, index):
    if EMULATED and not kernel and dtype != torch.float32:
        pytest.skip("takes a minute")
    graph = fixed(read_often(index, 1500 if EMULATED and kernel else 12_000), kernel)
    for shapes in PADDED if kernel else PADDED_UNLISTED:
        check_sums(graph, *shapes, dtype, "read often")


@pytest.mark.skipif(bool(EMULATED), reason="asks CUDA for what it has allocated")
@pytest.mark.parametrize(
    ("degree", "x_shape", "w_shape", "kernel", "times"),
    [
        (64, (41,), None, Arrangement.LENGTH, 2),
        (64, (41,), (), Arrangement.LENGTH, 2),
        (25, (10,), (), Arrangement.LENGTH, 2),
        (25, (31,), None, Arrangement.LENGTH, 2),
        (25, (41,), None, Arrangement.LENGTH, 1),  # copies would be a large part of the whole
        (12, (41,), None, Arrangement.LENGTH, 1),
        (12, (41,), (), None, 3),
        (64, (3,), None, Arrangement.LENGTH, 2),
        (12, (3, 7), (3, 1), Arrangement.LENGTH, 3),
        (25, (40,), None, Arrangement.LENGTH, 1),  # vectors fit
        (1, (41,), None, Arrangement.LENGTH, 1),  # sources are hardly read more than once
        (4, (3,), None, Arrangement.LENGTH, 1),  # little is read
        (12, (3,), None, None, 1),
        (12, (24, 1), (24, 1), Arrangement.LENGTH, 1),  # most of each vector would be padding
        (12, (24,), (24,), Arrangement.LENGTH, 1),
    ],
)
def test_what_is_padded(degree, x_shape, w_shape, kernel, times):
    """By memory, as `times` the sources: the results, copies of the sources, copies of both."""
    n = 40_000
    graph = fixed(build([degree] * n, n), kernel)
    x = rand(n, *x_shape)
    w = None if w_shape is None else rand(graph.nnz, *w_shape)
    ops.spmm(graph, x, w)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.spmm(graph, x, w)
    taken = torch.cuda.max_memory_allocated() - before
    size = x.numel() * x.element_size()
    parts = size * -(-degree // 32) if kernel and degree > 32 else 0
    assert times * size <= taken - parts
    # A copy has up to 1.6 times the width; two of them, and the results, take 3.3 sizes.
    assert times == 3 or taken - parts < {1: 1.9, 2: 3.2}[times] * size


def test_sums_of_features_at_an_odd_address():
    for make, kernel in itertools.product((read_often, mixed), (Arrangement.LENGTH, Kernel.GROUPS)):
        graph = fixed(make(torch.int32), kernel)
        x = rand(graph.num_cols * 132 + 1)[1:].view(-1, 132)
        want = reference.spmm(graph, x.double(), None, "copy_lhs", "sum")
        scale = reference.spmm(graph, x.double().abs(), None, "copy_lhs", "sum")
        assert_close(ops.spmm(graph, x), want, torch.float32, "odd address", scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_sums_by_plan(kernel, lanes, dtype):
    """Every kernel with slices of every size, whatever the features."""
    graph = fixed(mixed(INDEX[0]), Plan(32, Arrangement.LENGTH, kernel, lanes, 256))
    for width in (1, 4, 10, 16, 33, 64, 131, 264):
        x, w = rand(graph.num_cols, width, dtype=dtype), rand(graph.nnz, dtype=dtype)
        args = (x.double(), w.double().view(-1, 1))
        scale = reference.spmm(graph, args[0].abs(), args[1].abs(), "mul", "sum")
        want = reference.spmm(graph, *args, "mul", "sum")
        assert_close(ops.spmm(graph, x, w), want, dtype, f"{kernel} {lanes} {width}", scale)
        top = reference.spmm(graph, *args, "mul", "max")
        assert_close(ops.spmm(graph, x, w, reduce="max"), top, dtype, f"max {kernel} {lanes} {width}", top.abs())


@pytest.mark.parametrize("lanes", [4, 8])
def test_maxima_do_not_read_groups(lanes):
    """Of rows that are no whole number of half lines, for which sums leave narrow slices."""
    graph = fixed(mixed(INDEX[0]), Plan(32, Arrangement.LENGTH, Kernel.GROUPS, lanes, 256))
    x = rand(graph.num_cols, 100)
    arrays = arrays_of(graph, False, x, sums=True)
    out = SPMM.max_min_op(arrays, x, None, "copy_lhs", "max", 0.0, False)[0]
    assert_close(out, reference.spmm(graph, x.double(), None, "copy_lhs", "max"), x.dtype, f"{lanes} lanes")


@pytest.fixture
def in_order(monkeypatch):
    """Sets whether values of edges are brought into the order of the nonzeros first, where an op can."""

    room_of = _edge_order.try_empty_like

    def choose(yes: bool, room: bool = True) -> None:
        for op in ("spmm", "sddmm", "edge_softmax", "gatv2", "dot_attention"):
            module = importlib.import_module(f"gnnaccel.ops.{op}")
            name = "brings_in_order" if op == "spmm" else "is_profitable"
            monkeypatch.setattr(module, name, lambda given, *_: yes and getattr(given, "edge_ids", given) is not None)
            monkeypatch.setattr(module, "try_empty_like", lambda x, count=1: room_of(x, count) if room else [])

    return choose


@every_kernel_of_sums
def test_values_in_order_first(kernel, dtype, index, in_order):
    """Which changes no bit of what an op makes of values of edges, or for them."""
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for heads, feats in ((1, 4), (1, 33), (3, 8), (4, 130), (8, 8)):
            x, y = (rand(n, heads, feats, dtype=dtype).requires_grad_() for n in (graph.num_cols, graph.num_rows))
            w = rand(graph.nnz, heads, dtype=dtype)
            vectors, upstream = rand(heads, feats, dtype=dtype), rand(graph.num_rows, heads, feats, dtype=dtype)
            per_edge = rand(graph.nnz, heads, dtype=dtype)

            def results(graph=graph, x=x, y=y, w=w, vectors=vectors, upstream=upstream, per_edge=per_edge):
                for reduce in ("sum", "mean"):
                    out = ops.spmm(graph, x, w, reduce=reduce)
                    yield from (out, *torch.autograd.grad(out, x, upstream))
                for out in (
                    ops.sddmm(graph, x, y, "dot", "u", "v").squeeze(-1),
                    ops.sddmm(graph, x[..., 0], y[..., 0], "sub", "u", "v"),
                    ops.gatv2_scores(graph, x, y, vectors),
                ):
                    yield from (out, *torch.autograd.grad(out, (x, y), per_edge))
                scores = w.clone().requires_grad_()
                out = ops.edge_softmax(graph, scores)
                yield from (out, *torch.autograd.grad(out, scores, per_edge))
                yield ops.edge_attention(graph, w, x.detach())

            in_order(False)
            want = list(results())
            for room in (True, False) if heads == 3 else (True,):
                in_order(True, room)
                for i, (got, exact) in enumerate(zip(results(), want, strict=True)):
                    assert torch.equal(got, exact), f"{name} {heads} {feats} {room}: {i}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDEX)
def test_order_of_edges(index, dtype):
    edge_ids = torch.randperm(3001, device=DEVICE).to(index)
    for shape in ((), (1,), (2,), (3,), (4,), (2, 4), (5,), (16,)):
        x = rand(3001, *shape, dtype=dtype)
        (out,) = _edge_order.try_empty_like(x)
        assert torch.equal(_edge_order.gather_edge_values(x, edge_ids, out), x[edge_ids.long()])
        assert torch.equal(_edge_order.scatter_edge_values(x[edge_ids.long()], edge_ids, out), x)
        odd = rand(3002, *shape, dtype=dtype)[1:]  # an address that only a value divides
        assert torch.equal(_edge_order.gather_edge_values(odd, edge_ids, out), odd[edge_ids.long()])


@pytest.mark.parametrize(
    ("nnz", "heads", "feats", "plan", "want"),
    [
        (2_000_000, 1, 256, None, True),  # in four slices
        (900_000, 1, 256, None, False),  # of few edges
        (2_000_000, 1, 64, None, False),  # in one
        (2_000_000, 1, 64, Plan(32, Arrangement.LENGTH, Kernel.ROWS, 8), True),  # unless the plan says two
        (2_000_000, 8, 256, None, True),  # heads
        (2_000_000, 16, 256, None, False),  # too many
        (5_000_000, 4, 4, None, False),  # a weight for each feature
        (5_000_000, 1, 32, None, True),  # narrow
        (5_000_000, 1, 33, None, False),
        (3_000_000, 1, 16, None, False),
    ],
)
def test_when_weights_are_brought_in_order(nnz, heads, feats, plan, want):
    edge_ids = torch.empty(0, device=DEVICE)
    arrays = Structure(Matrix(torch.empty(1), None, edge_ids, nnz=nnz, plan=plan.code if plan else 0))
    weight = torch.empty(1, heads).expand(nnz, heads)
    assert SPMM.brings_in_order(arrays, weight, feats) is want
    assert not SPMM.brings_in_order(arrays.by_nonzero(), weight, feats)


def few(*shape, dtype):
    """So few values that they tie, some infinite; and one NaN in a thousand."""
    value = torch.randint(-2, 3, shape, device=DEVICE) / 2.0
    chance = torch.rand(shape, device=DEVICE)
    value[chance < 0.02] *= float("inf")  # 0 becomes NaN
    return torch.where(chance > 0.999, float("nan"), value).to(dtype)


def check_extremes(graph, x_shape, w_shape, dtype, name):
    x = few(graph.num_cols, *x_shape, dtype=dtype)
    w = None if w_shape is None else few(graph.nnz, *w_shape, dtype=dtype)
    for plain in (False, True):
        if plain:  # ties and all of -inf, without a NaN that would win them
            x = x.nan_to_num(0, neginf=-float("inf"), posinf=1)
            w = None if w is None else torch.full_like(w, 0.5)
        weight = None if w is None else w.reshape(*w.shape, *(1,) * (x.dim() - w.dim()))
        for reduce in EXTREMES:
            got = ops.spmm(graph, x, w, reduce=reduce, empty_value=2.5, return_arg=True)
            want = first_winners(graph, x, weight, reduce, 2.5)
            for what, a, b in zip(("value", "source", "edge"), got, want, strict=True):
                if w is None and what == "edge":
                    continue
                where = f"{name} {x_shape} {w_shape} {reduce} {what}"
                torch.testing.assert_close(a, b.to(a.dtype), rtol=0, atol=0, equal_nan=True, msg=where)


@every_kernel
def test_extremes(kernel, dtype, index):
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for shapes in SHAPES:
            check_extremes(graph, *shapes, dtype, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", INDEX)
def test_padded_extremes(dtype, index):
    for shapes in PADDED:
        check_extremes(fixed(read_often(index), Arrangement.LENGTH), *shapes, dtype, "read often")


# Every shape of a worker whose loads are narrower than 16 bytes, with one, two and more values a load.
DOT_WIDTHS = (1, 2, 3, 7, 10, 30, 41, 50, 61, 93, 131, 602)


@every_kernel
def test_dots(kernel, dtype, index):
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for width in (*DOT_WIDTHS, 4, 8, 16, 24, 32, 64, 100, 128, 256, 264, 33, 520):
            u, v = rand(graph.num_cols, width, dtype=dtype), rand(graph.num_rows, width, dtype=dtype)
            e = rand(graph.nnz, width, dtype=dtype)
            every = ((u, v, ("u", "v")), (v, u, ("v", "u")), (e, v, ("e", "v")))
            for lhs, rhs, targets in every[:1] if width in DOT_WIDTHS else every:
                want = reference.sddmm(graph, lhs.double(), rhs.double(), "dot", *targets)
                scale = reference.sddmm(graph, lhs.double().abs(), rhs.double().abs(), "dot", *targets)
                got = ops.sddmm(graph, lhs, rhs, "dot", *targets)
                assert_close(got, want, dtype, f"{name} {width} {targets}", scale)


@pytest.mark.parametrize("kernel", [None, Arrangement.LENGTH])
def test_dots_beside_infinite_rows(kernel):
    """Lanes past the end of a row read nothing of the next one."""
    graph = fixed(mixed(torch.int32), kernel)
    for width in (3, 41, 66, 64, 101, 131, 264):
        x, v = rand(graph.num_cols, width), rand(graph.num_rows, width)
        x[1::2], v[1::2] = float("inf"), float("-inf")
        want = reference.sddmm(graph, x.double(), v.double(), "dot", "u", "v")
        got, finite = ops.sddmm(graph, x, v), want.isfinite()
        assert torch.equal(got.isfinite(), finite), width
        torch.testing.assert_close(got[finite], want[finite].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [None, Arrangement.LENGTH])
def test_dots_at_an_odd_address(kernel):
    graph = fixed(mixed(torch.int32), kernel)
    for width, shift in ((64, 1), (64, 2), (256, 1), (41, 1)):
        x = rand(graph.num_cols * width + shift)[shift:].view(-1, width)
        v = rand(graph.num_rows, width)
        want = reference.sddmm(graph, x.double(), v.double(), "dot", "u", "v")
        scale = reference.sddmm(graph, x.double().abs(), v.double().abs(), "dot", "u", "v")
        assert_close(ops.sddmm(graph, x, v), want, torch.float32, f"{width} {shift}", scale)


@pytest.mark.parametrize("heads", [2, 3, 8])
def test_dots_of_heads_of_any_width(heads):
    graph = fixed(mixed(torch.int32), None)
    for feats in (1, 2, 3, 5, 7, 10, 12, 17, 33, 64):
        for dtype in (torch.float32, torch.bfloat16):
            x = rand(graph.num_cols, heads, feats, dtype=dtype)
            v = rand(graph.num_rows, heads, feats, dtype=dtype)
            want = reference.sddmm(graph, x.double(), v.double(), "dot", "u", "v")
            scale = reference.sddmm(graph, x.double().abs(), v.double().abs(), "dot", "u", "v")
            assert_close(ops.sddmm(graph, x, v), want, dtype, f"{heads} {feats}", scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_dots(dtype):
    graph = fixed(read_often(), Arrangement.LENGTH)
    for shape in ((701,), (3, 233)):
        u, v = rand(graph.num_cols, *shape, dtype=dtype), rand(graph.num_rows, *shape, dtype=dtype)
        want = reference.sddmm(graph, u.double(), v.double(), "dot", "u", "v")
        scale = reference.sddmm(graph, u.double().abs(), v.double().abs(), "dot", "u", "v")
        assert_close(ops.sddmm(graph, u, v), want, dtype, f"{shape}", scale)


@pytest.mark.parametrize("kernel", OF_SUMS)
def test_gradients(kernel):
    graph = fixed(mixed(), kernel)
    x, w = (rand(n, *s, dtype=torch.float64).requires_grad_() for n, s in ((graph.num_cols, (8,)), (graph.nnz, ())))
    weight = rand(graph.num_rows, 8, dtype=torch.float64)
    for reduce in ("sum", "mean"):
        got = torch.autograd.grad((ops.spmm(graph, x, w, reduce=reduce) * weight).sum(), (x, w))
        want = torch.autograd.grad((reference.spmm(graph, x, w.view(-1, 1), "mul", reduce) * weight).sum(), (x, w))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@every_kernel_of_sums
def test_gradient_of_a_mean(kernel, dtype, index):
    """Of the sources alone, which the kernel divides by the row's count, but for a weight per head."""
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for x_shape, w_shape in SHAPES:
            x = rand(graph.num_cols, *x_shape, dtype=dtype).requires_grad_()
            w = None if w_shape is None else rand(graph.nnz, *w_shape, dtype=dtype)
            upstream = rand(graph.num_rows, *x_shape, dtype=dtype)
            (got,) = torch.autograd.grad(ops.spmm(graph, x, w, reduce="mean"), x, upstream)
            message, exact = ("copy_lhs", None) if w is None else ("mul", w.double())

            def gradient(upstream, weight, graph=graph, x=x, message=message):
                leaf = x.detach().double().requires_grad_()
                return torch.autograd.grad(reference.spmm(graph, leaf, weight, message, "mean"), leaf, upstream)[0]

            scale = gradient(upstream.double().abs(), None if exact is None else exact.abs())
            assert_close(got, gradient(upstream.double(), exact), dtype, f"{name} {x_shape} {w_shape}", scale)


def test_infinite_sources_stay_in_their_rows():
    graph = build([3, 2, 40, 5], 9)
    for kernel in OF_SUMS:
        own = fixed(graph, kernel)
        x, v = rand(9, 40), rand(4, 40)
        x[4] = float("inf")
        got, want = ops.spmm(own, x), reference.spmm(own, x.double(), None, "copy_lhs", "sum")
        assert torch.equal(got.isinf(), want.isinf()) and torch.equal(got.isnan(), want.isnan()), kernel
        got, want = ops.sddmm(own, x, v), reference.sddmm(own, x.double(), v.double(), "dot", "u", "v")
        assert torch.equal(got.isnan() | got.isinf(), want.isnan() | want.isinf()), kernel


def test_prepare_finds_clusters_and_changes_no_result():
    torch.manual_seed(0)
    groups, size, degree = 100, 60, 30
    label = torch.randperm(groups * size) // size  # nodes of a group lie anywhere
    members = label.argsort().view(groups, size)
    rows = torch.arange(groups * size).repeat_interleave(degree)
    cols = members[label[rows], torch.randint(size, (rows.numel(),))]
    pairs = rows.to(DEVICE), cols.to(DEVICE)
    graph = Graph.from_coo(*pairs, num_rows=groups * size, num_cols=groups * size)
    x, w = rand(graph.num_cols, 64), rand(graph.nnz)
    before = ops.spmm(graph, x, w)
    small = gnnaccel.prepare(graph, reorder=True)
    assert "rows as given (an order is not repaid below 500,000 edges)" in small.steps
    assert not schedule.of(graph).reordered
    done = gnnaccel.prepare(graph, reorder="communities")
    assert schedule.of(graph).reordered and "rows in communities" in done.steps
    assert schedule.of(graph.transposed).order is not None
    assert gnnaccel.prepare(graph, reorder="communities").time_ms < done.time_ms
    torch.testing.assert_close(ops.spmm(graph, x, w), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["communities", "rcm", "degree"])
def test_every_order_serves(method):
    graph = Graph.from_csr(*(t.to(DEVICE) for t in band_arrays()), num_cols=9000)
    x, w = rand(graph.num_cols, 64), rand(graph.nnz)
    before = ops.spmm(graph, x, w)
    done = gnnaccel.prepare(graph, reorder=method, transposed=False)
    assert schedule.of(graph).reordered and done.steps[1].startswith("rows ") and "pay" not in done.steps[1]
    torch.testing.assert_close(ops.spmm(graph, x, w), before, rtol=1e-5, atol=1e-5)
    other = "degree" if method != "degree" else "communities"
    assert gnnaccel.prepare(graph, reorder=other, transposed=False).steps[1] != done.steps[1]
    torch.testing.assert_close(ops.spmm(graph, x, w), before, rtol=1e-5, atol=1e-5)


def band_arrays(num_nodes=9000, width=10):
    """A band under mixed node numbers, with rows of 10 to 18 nonzeros."""
    rows = torch.arange(num_nodes).repeat_interleave(torch.arange(num_nodes) % 9 + 10)
    cols = (rows + torch.randint(-width, width, rows.shape)) % num_nodes
    name = torch.randperm(num_nodes)
    graph = Graph.from_coo(name[rows], name[cols], num_rows=num_nodes, num_cols=num_nodes)
    return graph.indptr, graph.indices


def test_a_graph_earns_its_list():
    torch.use_deterministic_algorithms(False)
    graph = mixed()
    x = rand(graph.num_cols, 16)
    ops.spmm(graph, x, rand(graph.nnz), "add")
    assert not schedule.of(graph).lists
    found = [bool(schedule.of(graph).lists) for _ in range(60) if ops.spmm(graph, x) is not None]
    assert found == sorted(found) and not found[0] and found[-1]


@pytest.mark.parametrize("weighted", [False, True])
def test_the_transpose_earns_its_list_after_calls_without_a_gradient(weighted):
    torch.use_deterministic_algorithms(False)
    graph = mixed()
    x, given = rand(graph.num_cols, 16), [rand(graph.nnz)] if weighted else []
    for _ in range(60):
        ops.spmm(graph, x, *given)
    assert schedule.of(graph).lists and not schedule.of(graph.transposed).lists
    leaf = x.clone().requires_grad_()
    for _ in range(60):
        torch.autograd.grad(ops.spmm(graph, leaf, *given).sum(), leaf)
    assert schedule.of(graph.transposed).lists


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 16, 33])
def test_both_gradients_of_a_weighted_sum_whose_calls_are_kept(width, dtype):
    graph = mixed()
    x, weight = rand(graph.num_cols, width, dtype=dtype), rand(graph.nnz, dtype=dtype)
    given = rand(graph.num_rows, width, dtype=dtype)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = reference.spmm(graph, leaves[0], leaves[1].view(-1, 1), "mul", "sum")
    wants = torch.autograd.grad(exact, leaves, given.double())
    for leaf in (x, weight):
        leaf.requires_grad_()
    for _ in range(6):
        got = torch.autograd.grad(ops.spmm(graph, x, weight), (x, weight), given)
        for a, b in zip(got, wants, strict=True):
            assert_close(a, b, dtype, f"width {width}")


def test_deterministic_mode_uses_prepared_lists_alone():
    graph = mixed()
    x = rand(graph.num_cols, 16)
    first = ops.spmm(graph, x)
    assert all(torch.equal(ops.spmm(graph, x), first) for _ in range(60)) and not schedule.of(graph).lists
    gnnaccel.prepare(graph)
    first = ops.spmm(graph, x)
    assert schedule.of(graph).lists and torch.equal(ops.spmm(graph, x), first)


def test_lists_built_in_inference_mode_serve_training():
    torch.use_deterministic_algorithms(False)
    graph = mixed()
    x = rand(graph.num_cols, 16)
    with torch.inference_mode():
        gnnaccel.prepare(graph)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ops.spmm(graph, leaf).sum(), leaf)
    assert grad.shape == x.shape


def test_checkpointing_while_a_list_is_earned(monkeypatch):
    torch.use_deterministic_algorithms(False)
    for uses in range(1, 9):
        monkeypatch.setattr("gnnaccel.lower.bounds.LASTING_USES", uses)
        graph = build([3, 2, 40, 5], 4)
        out = leaf = rand(4, 16).requires_grad_()
        for _ in range(4):
            out = torch.utils.checkpoint.checkpoint(lambda t, g=graph: ops.spmm(g, t), out, use_reentrant=False)
        torch.autograd.grad(out.sum(), leaf)


def test_many_short_rows():
    """More than a million nonzeros of degree 3, with a hub and empty rows, at widths that have kernels of their own."""
    degrees = torch.full((400_000,), 3)
    degrees[7], degrees[100:200] = 50_000, 0
    for listed in (False, True):
        graph = build(degrees, 5_000)
        if listed:
            gnnaccel.prepare(graph)
        w = rand(graph.nnz)
        for width in (32, 128, 41, 121):
            x, v = rand(graph.num_cols, width), rand(graph.num_rows, width)
            want = reference.spmm(graph, x.double(), w.double().view(-1, 1), "mul", "sum")
            scale = reference.spmm(graph, x.double().abs(), w.double().abs().view(-1, 1), "mul", "sum")
            assert_close(ops.spmm(graph, x, w), want, torch.float32, f"spmm {listed} {width}", scale)
            want = reference.sddmm(graph, x.double(), v.double(), "dot", "u", "v")
            scale = reference.sddmm(graph, x.double().abs(), v.double().abs(), "dot", "u", "v")
            assert_close(ops.sddmm(graph, x, v), want, torch.float32, f"sddmm {listed} {width}", scale)


def check_graph_conv(graph, x_shape, w_shape, given, dtype, name):
    """With the source's scale, the row's and the bias, if `given` names them by u, r and b."""
    x = rand(graph.num_cols, *x_shape, dtype=dtype)
    w = rand(graph.nnz, dtype=dtype) if w_shape == () else None
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    u = rand(graph.num_cols, dtype=exact) if "u" in given else None
    r = rand(graph.num_rows, dtype=exact) if "r" in given else None
    bias = rand(*x_shape, dtype=dtype) if "b" in given else None
    wide = [None if t is None else t.double() for t in (w, u, r, bias)]
    scale = reference.graph_conv(graph, x.double().abs(), *(None if t is None else t.abs() for t in wide), False)
    for relu in (False, True):
        got = ops.graph_conv(graph, x, w, source_scale=u, row_scale=r, bias=bias, relu=relu)
        want = reference.graph_conv(graph, x.double(), *wide, relu)
        assert_close(got, want, dtype, f"{name} {x_shape} {w_shape} {given} {relu}", scale)


@every_kernel_of_sums
def test_graph_conv(kernel, dtype, index):
    """What is fused into a sum, with and without each part; its gradient is the same kernel over the transposed."""
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for shapes, given in zip(SHAPES, itertools.cycle(["urb", "u", "rb", "b", "ub", "r"]), strict=False):
            check_graph_conv(graph, *shapes, given, dtype, name)


@every_padded
def test_padded_graph_conv(kernel, dtype, index):
    wide = 131 if kernel else 701
    for shapes, given in zip([((wide,), None), ((wide,), ())], ["urb", "u"], strict=True):
        check_graph_conv(fixed(read_often(index), kernel), *shapes, given, dtype, "read often")


ATTENTION = [(1, 1), (1, 7), (1, 64), (1, 100), (1, 200), (2, 3), (3, 24), (4, 16), (8, 8), (2, 128), (20, 4), (5, 12)]


def check_attention(run, definition, tensors, where):
    """Values, with and without gradients, and gradients of run(*tensors) against those of its definition in float64."""
    out = run(*tensors)
    dtype, upstream = out.dtype, rand(*out.shape, dtype=out.dtype)
    got = (run(*(t.detach() for t in tensors)), out, *torch.autograd.grad(out, tensors, upstream))
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = definition(*exact)
    want = (want, want, *torch.autograd.grad(want, exact, upstream.double()))
    tolerance = {torch.float32: 3e-5, torch.float64: 1e-11}.get(dtype, 8e-2)
    for part, (a, b) in enumerate(zip(got, want, strict=True)):
        size = b.abs().max().clamp(min=1) if b.numel() else 1
        torch.testing.assert_close(
            a.double() / size, b / size, rtol=0, atol=tolerance, msg=lambda m, at=part: f"{where} {at} {m}"
        )


def factor_of(graph, heads, dtype, kind):
    """Arguments of an op, and the factor of the weights that they stand for in float64."""
    if kind == "mask":
        mask = (rand(graph.nnz, heads) > 0).to(dtype) * 2
        return dict(edge_scale=mask), mask.double()
    if kind == "dropout":
        seed = torch.tensor([2**62 + 99], device=graph.device)
        return dict(dropout=0.5, seed=seed), reference.dropout_factor(seed, 0.5, graph.nnz, heads)
    return {}, None


FACTORS = pytest.mark.parametrize("kind", ["plain", "mask", "dropout"])


@every_kernel
@FACTORS
def test_attention(kernel, dtype, index, kind):
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for heads, feats in ATTENTION:
            shapes = ((graph.num_cols, heads, feats), (graph.num_cols, heads), (graph.num_rows, heads))
            tensors = [(2 * rand(*shape, dtype=dtype)).requires_grad_() for shape in shapes]
            given, factor = factor_of(graph, heads, dtype, kind)
            check_attention(
                lambda *t, g=graph, k=given: ops.attention(g, *t, **k),
                lambda *t, g=graph, f=factor: reference.attention(g, *t, 0.2, f),
                tensors,
                f"{name} {heads} {feats}",
            )


DOT_ATTENTION = [(1, 7), (1, 64), (1, 100), (3, 24), (8, 8), (2, 128), (1, 256)]


@every_kernel
@FACTORS
@pytest.mark.parametrize("scores", ["dots", "biased", "given"])
def test_dot_attention(kernel, dtype, index, kind, scores):
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for heads, feats in DOT_ATTENTION:
            counts = graph.num_cols, graph.num_rows, graph.num_cols
            tensors = [rand(n, heads, feats, dtype=dtype).requires_grad_() for n in counts]
            bias = (2 * rand(graph.nnz, heads, dtype=dtype)).requires_grad_()
            given, factor = factor_of(graph, heads, dtype, kind)

            def run(value, *t, g=graph, k=given):
                if scores == "given":
                    return ops.edge_attention(g, *t, value, **k)
                return ops.dot_attention(g, *t[:2], value, edge_bias=t[2] if scores == "biased" else None, **k)

            def definition(value, *t, g=graph, f=factor, scale=feats**-0.5):
                if scores == "given":
                    return reference.edge_attention(g, *t, value, f)
                return reference.dot_attention(g, *t[:2], value, scale, f, t[2] if scores == "biased" else None)

            used = {"dots": tensors, "biased": [*tensors, bias], "given": [tensors[0], bias]}[scores]
            check_attention(run, definition, used, f"{name} {heads} {feats}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_of_unusual_scores(kernel):
    """Large ones, exact zeros, -inf as a mask, NaN in a row of its own."""
    graph = fixed(mixed(), kernel)
    x = rand(graph.num_cols, 2, 8)
    source, target = rand(graph.num_cols, 2), torch.zeros(graph.num_rows, 2, device=DEVICE)
    source = (source * 64).round() / 64  # which float32 can add to the large ones
    target[::5] = 1e4
    target[1::5] = -1e4
    source[::3] = float("-inf")
    source[1::3] = 0
    row = int(graph.indptr.diff().argmax())
    target[row, 1] = float("nan")
    got = ops.attention(graph, x, source, target, negative_slope=0.25)
    want = reference.attention(graph, x.double(), source.double(), target.double(), 0.25)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4, equal_nan=True)


@every_kernel
def test_gatv2_scores(kernel, dtype, index):
    for name, make in GRAPHS.items():
        graph = fixed(make(index), kernel)
        for heads, feats in (*ATTENTION, (1, 300)):
            shapes = ((graph.num_cols, heads, feats), (graph.num_rows, heads, feats), (heads, feats))
            leaves = [rand(*shape, dtype=dtype).requires_grad_() for shape in shapes]
            exact = [t.detach().double().requires_grad_() for t in leaves]
            got, want = ops.gatv2_scores(graph, *leaves), reference.gatv2_scores(graph, *exact, 0.2)
            upstream = rand(*want.shape, dtype=dtype)
            got = (got, *torch.autograd.grad(got, leaves, upstream))
            want = (want, *torch.autograd.grad(want, exact, upstream.double()))
            for part, a, b in zip(("scores", "x", "y", "vectors"), got, want, strict=True):
                assert_close(a, b, dtype, f"{name} {heads} {feats} {part}", b.abs().max() if b.numel() else None)
