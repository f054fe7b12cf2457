"""Plans that are measured on a GPU: results stay right, plans are kept, on the graph and on disk."""

import pytest
import torch
from cuda_cases import DEVICE, EMULATED, build, rand

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.planning import tune
from gnnaccel.schedule.worklist import LANES, Kernel

if EMULATED:
    pytest.skip("nothing to measure without a GPU", allow_module_level=True)

WIDTHS = (16, 64, 200)


def a_graph() -> Graph:
    torch.manual_seed(0)
    return build([3000, 0, 1, 300, *[9] * 4000, *[40] * 300], 5000)


def check(graph: Graph, width: int) -> None:
    x, w = rand(graph.num_cols, width), rand(graph.nnz)
    rows = torch.repeat_interleave(graph.indptr.diff().long())
    edges = torch.arange(graph.nnz, device=DEVICE) if graph.edge_ids is None else graph.edge_ids.long()
    messages = x.double()[graph.indices.long()] * w.double()[edges, None]
    want = messages.new_zeros(graph.num_rows, width).index_add(0, rows, messages)
    torch.testing.assert_close(ops.spmm(graph, x, w).double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reorder", [False, "communities"])
def test_measured_plans_serve(reorder, monkeypatch):
    monkeypatch.setattr(bounds, "MEASURE_MS", 60_000.0)  # a GPU that others use too is slow
    graph = a_graph()
    done = gnnaccel.prepare(graph, reorder=reorder, tune="measure", num_feats=WIDTHS)
    assert done.steps[-1] == "plans measured" and [t.num_feats for t in done.tuned] == list(WIDTHS)
    for found in done.tuned:
        assert found.best_ms <= found.model_ms and found.tried > 3
        assert schedule.of(graph).plan(graph, found.row_bytes) == found.plan
        check(graph, found.num_feats)
        check(graph.transposed, found.num_feats)


def test_groups_serve_sums_alone():
    graph = a_graph()
    gnnaccel.prepare(graph)
    kernels = [schedule.work_list(graph, 64, sums).plan.kernel for sums in (True, False)]
    assert kernels == [Kernel.GROUPS, Kernel.ROWS]
    check(graph, 16)
    rows = schedule.of(graph).arranged(graph, schedule.of(graph).plan(graph, 64, sums=False))
    schedule.of(graph).adopt(64, rows)
    assert schedule.work_list(graph, 64, True).plan.kernel is Kernel.ROWS
    check(graph, 16)


def test_plans_from_disk(tmp_path):
    first = gnnaccel.prepare(a_graph(), tune="measure", num_feats=WIDTHS, keep=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # of the transposed as well
    graph = a_graph()
    again = gnnaccel.prepare(graph, tune="measure", num_feats=WIDTHS, keep=tmp_path)
    assert again.steps[-1] == "plans from disk" and again.tuned == first.tuned
    for found in again.tuned:
        assert schedule.of(graph).plan(graph, found.row_bytes) == found.plan
        check(graph, found.num_feats)
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace('"plans"', '"plams"'))
    stale = gnnaccel.prepare(a_graph(), tune="measure", num_feats=WIDTHS, keep=tmp_path)
    assert "of no use" in stale.steps[-1]
    assert gnnaccel.prepare(a_graph(), tune="measure", num_feats=WIDTHS, keep=tmp_path).steps[-1] == "plans from disk"
    other = gnnaccel.prepare(a_graph(), tune="measure", num_feats=(32,), keep=tmp_path)
    assert "other numbers of features" in other.steps[-1]
    kept = gnnaccel.prepare(a_graph(), tune="measure", num_feats=(*WIDTHS, 32), keep=tmp_path)
    assert kept.steps[-1] == "plans from disk"


@pytest.mark.parametrize("rows,cols", [(0, 0), (5, 7)])
def test_nothing_to_measure(rows, cols):
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    done = gnnaccel.prepare(Graph.from_coo(none, none, num_rows=rows, num_cols=cols), tune="measure")
    assert done.steps[-1] == "plans by rule (no edges)" and not done.tuned


def test_no_memory_to_measure(monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    graph = a_graph()
    monkeypatch.setattr(tune, "_measure", out_of_memory)
    done = gnnaccel.prepare(graph, tune="measure")
    assert done.steps[-1] == "plans by rule where there was no memory to measure" and not done.tuned
    check(graph, 64)


def test_no_measuring_in_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        graph = a_graph()
        done = gnnaccel.prepare(graph, tune="measure")
        assert "deterministic" in done.steps[-1] and not done.tuned
    finally:
        torch.use_deterministic_algorithms(False)


def test_off_leaves_lists_to_be_earned():
    graph = a_graph()
    assert gnnaccel.prepare(graph, tune="off").steps == ("structure", "transposed") and not schedule.of(graph).lists
    check(graph, 64)


def test_captured_graphs_outlive_new_plans():
    """A CUDA graph captured with one plan still reads its list when another has been adopted."""
    graph = a_graph()
    gnnaccel.prepare(graph)
    x = rand(graph.num_cols, 64)
    want = ops.spmm(graph, x)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = ops.spmm(graph, x)
    items = schedule.work_list(graph, 256, sums=True).items
    size = items.numel() * items.element_size()
    del items
    for lanes in LANES:  # all of them, as lists of one plan share their arrays
        plan = schedule.of(graph).lists[lanes].plan
        schedule.of(graph).adopt(16 * lanes, schedule.of(graph).arranged(graph, plan._replace(cap=plan.cap * 2)))
    taken = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(500)]  # freed memory, if any
    out.fill_(float("nan"))
    captured.replay()
    torch.testing.assert_close(out, want)
    assert len(taken) == 500


def test_time_is_limited():
    found = tune.measure(prepared := a_graph(), 64, budget_ms=0.0)
    assert not found.complete and found.tried == 1
    check(prepared, 64)
