"""Times under --profile: of calls, and of their derivatives, each in the innermost call that it belongs to."""

import json
import threading
import time

import pytest
import torch
from graphs import make
from oracle import rand

from gnnaccel import _timed, ops, report
from gnnaccel.ops.cbsr import compressed


@pytest.fixture(autouse=True)
def timing():
    report.reset()
    report.time_calls(True)
    yield
    report.time_calls(False)
    report.reset()


def backward_ms():
    return {kind: site.backward_ms for kind, site in report.snapshot().items() if site.backward_ms}


def graph_and_x(device="cpu", feats=5):
    graph = make("power_law").to(device)
    return graph, rand(graph.num_cols, feats).to(device).requires_grad_()


def test_derivatives_belong_to_their_calls(device):
    graph, x = graph_and_x(device)
    with report.accelerated("outer"):
        first = ops.spmm(graph, x)
        start = time.perf_counter()
        inner = ops.spmm(graph, x)
        report.record("inner", start)
        with report.accelerated("without"):
            x.relu()
    direct = ops.spmm(graph, x)
    for out, kinds in ((first, {"outer"}), (inner, {"outer", "inner"}), (direct, {"outer", "inner", report.OPS})):
        out.sum().backward()
        assert set(backward_ms()) == kinds


@pytest.mark.parametrize(
    "call",
    [
        lambda graph, x: ops.spmm(graph, x),
        lambda graph, x: ops.edge_softmax(graph, x[:1].expand(graph.nnz, -1)),
        lambda graph, x: ops.spmm(graph, compressed(x.abs(), torch.arange(5, dtype=torch.uint8).expand(len(x), 5), 9)),
    ],
    ids=["spmm", "edge_softmax", "cbsr"],
)
def test_the_same_gradients_with_and_without(call):
    graph, x = graph_and_x()
    with report.accelerated("kind"):
        out = call(graph, x)
    timed = torch.autograd.grad(out.sum(), x)[0]
    assert backward_ms()["kind"] > 0
    report.time_calls(False)
    report.reset()
    plain = torch.autograd.grad(call(graph, x).sum(), x)[0]
    assert torch.equal(timed, plain) and not backward_ms()
    assert not any("unwrapped" in vars(function) for function in _timed._functions)


def test_a_derivative_in_a_derivative_is_counted_once(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(report.time, "perf_counter", lambda: float(next(ticks)))
    site = report._site("kind")
    outer, inner = report.Derivative(), report.Derivative()
    outer.site = inner.site = site
    with outer, inner:  # ticks 2 and 3, 4 and 5
        pass
    assert site.backward_ms == 3000.0


def test_second_derivatives_are_timed_by_call():
    graph, x = graph_and_x()
    weight = rand(graph.nnz).requires_grad_()
    with report.accelerated("kind"):
        out = ops.spmm(graph, x, weight)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert set(backward_ms()) == {"kind"}
    first.square().sum().backward()
    assert set(backward_ms()) == {"kind", report.OPS}  # what is made in a backward pass belongs to no call


def test_threads_have_calls_of_their_own():
    graph, x = graph_and_x()
    begun, made = threading.Event(), threading.Event()

    def other():
        begun.wait()
        with report.accelerated("other"):
            outs.append(ops.spmm(graph, x))
        made.set()

    outs, thread = [], threading.Thread(target=other)
    thread.start()
    with report.accelerated("here"):
        begun.set()
        made.wait()
    thread.join()
    outs[0].sum().backward()
    assert set(backward_ms()) == {"other"}


def test_nothing_is_kept_of_calls_that_are_over():
    graph, x = graph_and_x()
    for _ in range(3):
        with report.accelerated("kind"):
            ops.spmm(graph, x)
    assert not report._thread.derivatives
    for _ in range(2 * report._thread.derivatives.maxlen):
        report.Derivative()
    assert len(report._thread.derivatives) == report._thread.derivatives.maxlen
    with report.accelerated("kind"):
        pass


def test_compiled_and_traced():
    graph, x = graph_and_x()

    def model(x):
        return ops.spmm(graph, x).relu()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        (got,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(model(x).sum(), x)[0])


def test_table_and_plain_data():
    graph, x = graph_and_x()
    with report.accelerated("kind"):
        out = ops.spmm(graph, x)
    (out.sum() + ops.spmm(graph, x).sum()).backward()
    report.fallback("other", "a reason")
    rows = [line.split() for line in report.table().splitlines()]
    (kind,), (direct,), (other,) = ([row for row in rows if row[:1] == [k]] for k in ("kind", report.OPS, "other"))
    assert kind[1:4] == ["1", "0", "0"] and len(kind) == 6 and other == ["other", "0", "0", "1"]
    assert len(direct) == 2 and report.share() == 0.5
    sites = json.loads(json.dumps(report.to_dict()))["sites"]
    assert sites["kind"]["backward_ms"] > 0 and sites["other"]["backward_ms"] == 0


def test_layers_of_pyg(device):
    pyg, backend = pytest.importorskip("torch_geometric.nn"), pytest.importorskip("gnnaccel.pyg_backend")
    edges = torch.randint(30, (2, 200), device=device)
    x = rand(30, 8).to(device).requires_grad_()
    layers = [pyg.GCNConv(8, 4), pyg.GATConv(8, 4), pyg.SAGEConv(8, 4, aggr="max"), pyg.GINEConv(torch.nn.Linear(8, 4))]
    for layer in layers:
        layer = backend.accelerate(layer.to(device, torch.float64))
        rest = (rand(200, 8).to(device),) if isinstance(layer, pyg.GINEConv) else ()
        layer(x, edges, *rest).sum().backward()
    assert {f"pyg.{kind}" for kind in ("GCNConv", "GATConv", "SAGEConv", "GINEConv")} <= set(backward_ms())
