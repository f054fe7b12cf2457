"""Rows in another order on the CPU: no bit of a result changes, and what was measured is what serves."""

from __future__ import annotations

import importlib

import pytest
import torch

import gnnaccel
from gnnaccel import _library as lib
from gnnaccel import ops, schedule
from gnnaccel.graph import reorder
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _edge_order
from gnnaccel.planning import orders
from gnnaccel.schedule import worklist

pipeline = importlib.import_module("gnnaccel.planning.prepare")  # the package has a function of that name
INDEX = [torch.int32, torch.int64]
SHAPES = [((16,), None), ((33,), ()), ((2, 8), (2,)), ((5,), (5,)), ((3, 1), (1, 4)), ((2, 3), (1, 3))]
# Empty rows at both ends, rows that are summed in pieces, and one whose pieces run in parallel.
DEGREES = [0, 3, 1500, 0, 7, 17_000, 1, *[4] * 50, 2, 0]


def graph(index=torch.int32, permuted=True) -> Graph:
    generator = torch.Generator().manual_seed(0)
    degrees = torch.tensor(DEGREES)
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), degrees.cumsum(0)])
    nnz = int(indptr[-1])
    indices = torch.randint(40, (nnz,), generator=generator)
    edge_ids = torch.randperm(nnz, generator=generator).to(index) if permuted else None
    return Graph.from_csr(indptr.to(index), indices.to(index), edge_ids, num_cols=40)


def in_order(one: Graph) -> Graph:
    """`one` with its rows, and those of its transposed, in an order of chance."""
    generator = torch.Generator().manual_seed(1)
    for part in (one, one.transposed):
        work = schedule.of(part)
        work.order, work.order_name = torch.randperm(part.num_rows, generator=generator), "chance"
        work.adopt_order(part, dict.fromkeys(worklist.LANES, True))
    return one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("permuted", [True, False])
@pytest.mark.parametrize("index", INDEX)
def test_no_bit_changes(index, permuted, dtype, monkeypatch):
    monkeypatch.setattr(bounds, "SOURCES_MATTER", 0)  # whatever edges bring
    given, other = graph(index, permuted), in_order(graph(index, permuted))
    for x_shape, w_shape in SHAPES:
        x = torch.randn(40, *x_shape).to(dtype).requires_grad_()
        w = None if w_shape is None else torch.randn(given.nnz, *w_shape).to(dtype)

        def results(g, x=x, w=w):
            for reduce in ("sum", "mean", "max", "min"):
                for message in ("copy_lhs",) if w is None else ("mul", "add"):
                    result = ops.spmm(g, x, w, message, reduce, empty_value=2.5, return_arg=True)
                    yield from result
                    yield from torch.autograd.grad(result[0].float().square().sum(), x)

        for i, (got, want) in enumerate(zip(results(other), results(given), strict=True)):
            assert torch.equal(got, want), f"{x_shape} {w_shape} {i}"


@pytest.mark.parametrize("index", INDEX)
def test_fused_sums(index):
    given, other = graph(index), in_order(graph(index))
    x, weight = torch.randn(40, 24, requires_grad=True), torch.rand(given.nnz)
    bias, row_scale, source_scale = torch.randn(24), torch.rand(len(DEGREES)), torch.rand(40)
    kinds = dict(weight=weight, bias=bias, row_scale=row_scale, source_scale=source_scale, relu=True)
    got, want = (ops.graph_conv(g, x, **kinds) for g in (other, given))
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(out.sum(), x) for out in (got, want)), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_weights_and_dots():
    """Which go by the rows as given, beside sums that do not."""
    given, other = graph(), in_order(graph())
    for reduce in ("sum", "mean"):
        found = []
        for g in (other, given):
            x, w = (torch.randn(*s, generator=torch.Generator().manual_seed(2)) for s in ((40, 3, 5), (g.nnz, 3)))
            x, w = x.requires_grad_(), w.requires_grad_()
            y = ops.spmm(g, x, w, reduce=reduce)
            dots = ops.sddmm(g, x, y, "dot", "u", "v")
            found.append((dots, *torch.autograd.grad(dots.square().mean(), (x, w))))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index", INDEX)
def test_values_of_edges_in_order(index, dtype):
    """The twin of CUDA's pass, which no op of the CPU takes."""
    edge_ids = torch.randperm(301).to(index)
    for shape in ((), (1,), (3,), (2, 4), (16,)):
        x = torch.randn(301, *shape).to(dtype)
        ordered, back = _edge_order.try_empty_like(x, 2)
        assert torch.equal(_edge_order.gather_edge_values(x, edge_ids, ordered), x[edge_ids.long()])
        assert torch.equal(_edge_order.scatter_edge_values(ordered, edge_ids, back), x)


def test_no_room_for_another_order(monkeypatch, caplog):
    def refused(*args, **options):
        raise torch.OutOfMemoryError

    _edge_order.say_no_memory.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", refused)
        assert _edge_order.try_empty_like(torch.zeros(3)) == _edge_order.try_empty_like(torch.zeros(3), 2) == []
    assert [r.message for r in caplog.records] == [
        "no memory to bring values of edges in order; kernels look them up, slower"
    ]


def planted(nodes=20_000, size=20, edges=600_000) -> Graph:
    """Communities of `size` nodes with scattered numbers."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(nodes, (edges,), generator=generator)
    target = source // size * size + torch.randint(size, (edges,), generator=generator)
    numbers = torch.randperm(nodes, generator=generator)
    return Graph.from_coo(numbers[source], numbers[target], num_rows=nodes, num_cols=nodes)


def test_compiled():
    other = in_order(graph())
    x = torch.randn(40, 8)
    step = torch.compile(lambda x: ops.spmm(other, x).relu(), backend="eager", fullgraph=True)
    assert torch.equal(step(x), ops.spmm(graph(), x).relu())


@pytest.mark.parametrize("method", [True, "communities", "rcm", "degree"])
def test_prepare(method, monkeypatch):
    monkeypatch.setattr(bounds, "PLAN_PAYS", 1e9)  # all that is measured is faster
    monkeypatch.setattr(bounds, "MEASURE_MS", 20.0)
    one = planted()
    x = torch.randn(one.num_cols, 8)
    want = ops.spmm(one, x)
    done = gnnaccel.prepare(one, reorder=method)
    assert schedule.of(one).reordered and all(schedule.ordered(part) is not None for part in (one, one.transposed))
    assert done.steps[2].startswith("rows ") and done.steps[3].startswith("measured: this order is faster with 16 ")
    assert done.workspace_bytes >= sum(t.numel() * t.element_size() for t in schedule.ordered(one)[:3])
    assert torch.equal(ops.spmm(one, x), want)
    rows = schedule.ordered(one).rows.long()
    assert torch.equal(rows, schedule.of(one).order) and not torch.equal(rows, torch.arange(rows.numel()))
    gnnaccel.prepare(one, reorder="degree")  # another one takes its place
    assert torch.equal(schedule.ordered(one).rows.long(), reorder.order_by(one, "degree"))
    assert torch.equal(ops.spmm(one, x), want)


def test_nothing_is_kept_that_serves_nothing(monkeypatch):
    monkeypatch.setattr(bounds, "PLAN_PAYS", 0.0)
    one = planted()
    plain = gnnaccel.prepare(planted())
    done = gnnaccel.prepare(one, reorder="degree", num_feats=(16,))
    assert done.steps[-1] == "measured: this order is no faster"
    found = [schedule.of(part).order for part in (one, one.transposed)]
    assert done.workspace_bytes == plain.workspace_bytes + sum(o.numel() * o.element_size() for o in found)
    assert schedule.ordered(one) is None and schedule.work_list(one, 64) is None


def test_no_time_left(monkeypatch):
    """One width is timed however long it takes, the others are served as given until they are."""
    monkeypatch.setattr(bounds, "PLAN_PAYS", 1e9)
    monkeypatch.setattr(bounds, "MEASURE_MS", 1e-6)
    one = graph()
    step = gnnaccel.prepare(one, reorder="degree", num_feats=(16, 64)).steps[-1]
    assert step == "measured: this order is faster with 16 features, not timed with 64"
    assert schedule.work_list(one, 4 * 16) is not None and schedule.work_list(one, 4 * 64) is None
    step = gnnaccel.prepare(one, reorder="degree", num_feats=(16, 64)).steps[-1]
    assert step == "measured: this order is faster with 16 64 features"
    assert schedule.work_list(one, 4 * 64) is schedule.ordered(one)


def test_no_memory_to_time(monkeypatch):
    def refused(*args, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    one = graph()
    with monkeypatch.context() as patch:
        patch.setattr(orders.torch, "zeros", refused)
        step = gnnaccel.prepare(one, reorder="degree", num_feats=(16,)).steps[-1]
    assert step == "measured: this order is no faster, not timed with 16" and schedule.work_list(one, 4 * 16) is None


@pytest.mark.parametrize("turned", [True, False])
def test_an_order_of_one_direction_alone(turned, monkeypatch):
    """Rows with communities whose sources are drawn from all, or the reverse."""
    monkeypatch.setattr(bounds, "PLAN_PAYS", 1e9)
    nodes, edges, generator = 20_000, 600_000, torch.Generator().manual_seed(0)
    source = torch.randint(nodes, (edges,), generator=generator)
    target = source // 20 * 20 + torch.randint(20, (edges,), generator=generator)
    scattered = torch.randperm(nodes, generator=generator)[target]
    pair = (source, scattered) if turned else (scattered, source)
    one = Graph.from_coo(*pair, num_rows=nodes, num_cols=nodes)
    done = gnnaccel.prepare(one, reorder="communities", num_feats=(16,))
    parts = [one, one.transposed]
    found = [schedule.of(part).order is not None for part in parts]
    assert found.count(True) == 1, "the graph is not what it is meant to be"
    for part, order in zip(parts, found, strict=True):
        assert (schedule.work_list(part, 4 * 16) is not None) == order and bool(schedule.of(part).faster) == order
    said = ["this order is faster with 16 features" if order else "as given" for order in found]
    assert done.steps[-1] == f"measured: {said[0]}; transposed: {said[1]}"
    x = torch.randn(nodes, 16, requires_grad=True)
    plain = Graph.from_coo(*pair, num_rows=nodes, num_cols=nodes)
    grads = [torch.autograd.grad(ops.spmm(g, x).square().sum(), x)[0] for g in (one, plain)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("default", [torch.float16, torch.float64, torch.device("meta")], ids=str)
def test_whatever_torchs_defaults_are(default, monkeypatch):
    monkeypatch.setattr(bounds, "PLAN_PAYS", 1e9)
    one, dtype = graph(), torch.get_default_dtype()
    torch.set_default_device(default) if isinstance(default, torch.device) else torch.set_default_dtype(default)
    try:
        done = gnnaccel.prepare(one, reorder="degree", num_feats=(16,))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert done.steps[-1] == "measured: this order is faster with 16 features"
    assert schedule.work_list(one, 4 * 16) is schedule.ordered(one)


def test_few_edges_stay_as_given():
    one = graph()
    assert "not repaid" in gnnaccel.prepare(one, reorder=True).steps[-1] and schedule.ordered(one) is None


def test_measuring_decides_by_features(monkeypatch):
    one = planted()
    now = 0.0

    def timed(arrays, x, *_):
        """Half the time in the order, but of 64 features twice."""
        nonlocal now
        now += 1.0 if arrays.order is None else 2.0 if x.shape[1] == 64 else 0.5

    monkeypatch.setattr(orders, "spmm_op", timed)
    monkeypatch.setattr(orders.time, "perf_counter", lambda: now)
    monkeypatch.setattr(bounds, "MEASURE_MS", 1e6)
    done = gnnaccel.prepare(one, reorder="communities", num_feats=(16, 64))
    assert done.steps[-1] == "measured: this order is faster with 16 features"
    monkeypatch.undo()
    assert gnnaccel.prepare(one, reorder="communities", num_feats=(16, 64)).steps[-1] == done.steps[-1]
    for part in (one, one.transposed):
        assert schedule.work_list(part, 4 * 16) is schedule.ordered(part) is not None
        assert [schedule.work_list(part, 4 * width) for width in (64, 256)] == [None, None]  # slower; not measured


@pytest.mark.parametrize(
    ("message", "x_shape", "w_shape", "walks"),
    [
        ("copy_lhs", (8,), None, True),
        ("mul", (32,), (), True),
        ("mul", (16,), (), False),
        ("mul", (4, 32), (4,), True),
        ("mul", (32,), (32,), False),
        ("add", (32,), (32,), False),
        ("copy_rhs", (32,), (32,), False),
    ],
)
@pytest.mark.parametrize("permuted", [True, False])
def test_values_of_edges_decide(permuted, message, x_shape, w_shape, walks, monkeypatch):
    """Edges lie in the order of the rows as given: what reads much of them is not to walk in another."""
    one, seen = in_order(graph(permuted=permuted)), []
    kernel = lib._CPU["spmm"]
    monkeypatch.setitem(lib._CPU, "spmm", lambda *args: seen.append(args) or kernel(*args))
    x = torch.randn(40, *x_shape, requires_grad=True)
    w = None if w_shape is None else torch.randn(one.nnz, *w_shape)
    out = ops.spmm(one, x, w, message)
    addresses = [schedule.ordered(part).rows.data_ptr() for part in (one, one.transposed)]
    assert (addresses[0] in seen[0]) == walks
    if message == "mul":
        out.sum().backward()
        assert (addresses[1] in seen[-1]) == walks


# Seconds of calls as given and in order -> whether the order serves
CALLS = {
    "faster": ([1.0, 1.0, 1.1], [0.9, 0.9, 0.9], True),
    "by the median alone": ([1.0, 0.8, 1.0], [0.9, 0.9, 0.9], False),
    "by the least alone": ([1.0, 1.0, 1.0], [0.5, 1.1, 1.1], False),
    "by noise": ([1.0, 1.0, 1.0], [0.98, 0.98, 0.98], False),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_order_that_is_faster_by_chance_is_dropped(name, monkeypatch):
    given, ordered, serves = CALLS[name]
    seconds = iter([5.0, 5.0, *(x for pair in zip(given, ordered, strict=True) for x in pair)])
    clock = [0.0]
    monkeypatch.setattr(orders.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(orders, "spmm_op", lambda *_: clock.__setitem__(0, clock[0] + next(seconds)))
    one = graph()
    work = schedule.of(one)
    work.order, work.order_name = torch.randperm(one.num_rows), "chance"
    # The budget ends with the last pair of calls.
    budget_ms = 1e3 * (10 + sum(given) + sum(ordered)) - 1
    assert orders._faster_in_order(one, (16,), budget_ms) == {worklist.lanes_of(64): serves}
