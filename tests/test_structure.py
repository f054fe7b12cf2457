"""The one argument that ops have of a graph: made once, kept on the graph, dropped with what it was made of."""

import copy
import gc
import pickle
import traceback
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gnnaccel
from gnnaccel import _C, _library, ops, schedule
from gnnaccel.lower import bounds
from gnnaccel.ops._arrays import Matrix, Structure, arrays_of
from gnnaccel.ops.tiled import Tiled, _structure


def structures_of(graph) -> dict:
    return graph.slot("structures", dict)


def small():
    return gnnaccel.Graph.from_coo(torch.randint(9, (40,)), torch.randint(7, (40,)), num_rows=9, num_cols=7)


def reordered():
    """With an order of its rows that serves features of every width."""
    graph = gnnaccel.Graph.from_coo(torch.randint(60, (400,)), torch.randint(60, (400,)), num_rows=60, num_cols=60)
    for part in (graph, graph.transposed):
        schedule.of(part).order = torch.randperm(60)
        schedule.of(part).adopt_order(part, dict.fromkeys((4, 8, 16, 32, 64), True))
    return graph


def same(a: Structure, b: Structure) -> bool:
    (mine, sizes), (others, other_sizes) = a.flat(), b.flat()
    return sizes == other_sizes and all(x is y for x, y in zip(mine, others, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("make", [small, reordered])
def test_made_once(make, transposed):
    graph = make()
    x = torch.randn(graph.num_cols, 3)
    found = arrays_of(graph, transposed, x)
    assert arrays_of(graph, transposed, x) is found and arrays_of(graph, not transposed, x) is not found
    assert found.matrix() is found.matrix() and found.walked(True) is found.walked(True)
    assert found.by_nonzero() is found.by_nonzero() and found.by_nonzero().edge_ids is None
    if transposed:
        turned = found.transposed()
        assert found.transposed() is turned and turned.indptr is graph.transposed.indptr
        assert same(turned.transposed(), found) and turned.transposed().matrix() is found.matrix()
    else:
        with pytest.raises(RuntimeError, match="transposed"):
            found.transposed()


@pytest.mark.parametrize("make", [small, reordered])
def test_flat_and_back(make):
    graph = make()
    for found in (arrays_of(graph, True), arrays_of(graph, False), Structure(Matrix(torch.tensor([0, 3]), nnz=3))):
        again = Structure.of(*found.flat())
        assert same(again, found) and (again.num_rows, again.device) == (found.num_rows, found.device)
        assert len(found.flat()[0]) == 12 and len(found.flat()[1]) == 4


def test_flat_and_back_with_tiles():
    for backward in (False, True):
        found = _structure(small(), 8, backward)
        again = Tiled.of(*found.flat())
        assert same(again.graph, found.graph) and again.own == found.own and again.other == found.other


def test_calls_build_nothing():
    """Nothing of the binary is made at a second call, forward or backward."""
    graph, made = small(), []
    x = torch.randn(graph.num_cols, 2, 4, requires_grad=True)
    w = torch.rand(graph.nnz, 2, requires_grad=True)
    score = torch.randn(graph.num_cols, 2), torch.randn(graph.num_rows, 2)

    def call():
        results = ops.spmm(graph, x, w), ops.edge_softmax(graph, w), ops.attention(graph, x, *score)
        sum(r.sum() for r in results).backward()

    call()
    csr = _C.Csr
    try:
        _C.Csr = lambda *args: made.append(args) or csr(*args)
        call()
        assert not made
        ops.spmm(small(), x, w)
        assert made
    finally:
        _C.Csr = csr


def test_dropped_with_the_lists():
    graph = reordered()
    x = torch.randn(60, 4)
    found = [arrays_of(graph, transposed, x) for transposed in (False, True)]
    weight = torch.ones(graph.nnz)  # added, by no ready call, which would keep its lists until it is asked for again
    before = ops.spmm(graph, x, weight, "add")
    gone = [weakref.ref(s.order[0]) for s in found]
    del found
    for part in (graph, graph.transposed):
        schedule.of(part).adopt_order(part, {})
    again = arrays_of(graph, True, x)
    assert again.order is None and list(structures_of(graph).values()) == [again]
    assert all(ref() is None for ref in gone)
    torch.testing.assert_close(ops.spmm(graph, x, weight, "add"), before)
    schedule.of(graph.transposed).epoch += 1
    assert arrays_of(graph, True, x) is not again


def test_a_graph_is_freed_at_once():
    graph = small()
    x = torch.randn(graph.num_cols, 2, 4, requires_grad=True)
    gc.disable()
    try:
        for reduce in ("sum", "mean", "max"):
            ops.spmm(graph, x, torch.rand(graph.nnz, 2, requires_grad=True), reduce=reduce).sum().backward()
        ops.sddmm(graph, x, torch.randn(graph.num_rows, 2, 4)).sum().backward()
        refs = [weakref.ref(graph), weakref.ref(graph.indptr), weakref.ref(graph.transposed.indptr)]
        del graph
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_copies_have_their_own(copied):
    graph = small()
    x = torch.randn(graph.num_cols, 3, requires_grad=True)
    out = ops.spmm(graph, x, torch.ones(graph.nnz), "add")
    other = copied(graph)
    assert structures_of(graph) and not structures_of(other)
    assert torch.equal(ops.spmm(other, x, torch.ones(graph.nnz), "add"), out)


def test_nothing_of_a_mode_is_kept():
    graph = small()
    x = torch.randn(graph.num_cols, 3)
    want = ops.spmm(graph, x, torch.ones(graph.nnz), "add")
    structures_of(graph).clear()
    torch.func.grad(lambda x: ops.spmm(graph, x, torch.ones(graph.nnz), "add").sum())(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        ops.spmm(graph, torch.empty(graph.num_cols, 3), torch.empty(graph.nnz), "add")
    torch.compile(lambda x: ops.spmm(graph, x, torch.ones(graph.nnz), "add"), fullgraph=True, backend="aot_eager")(x)
    assert not structures_of(graph)
    assert torch.equal(ops.spmm(graph, x, torch.ones(graph.nnz), "add"), want) and structures_of(graph)


@pytest.mark.parametrize(("grad", "record"), [(False, []), (True, ["run"])])
def test_the_way_of_a_call(grad, record, monkeypatch):
    """That of docs/call.md: these functions and the entry, between a program and a kernel."""
    graph, ways, run = small(), [], _library.launch

    def launch(*args):
        ways.append([frame.name for frame in traceback.extract_stack()])
        return run(*args)

    monkeypatch.setattr(_library, "launch", launch)
    ops.spmm(graph, torch.randn(graph.num_cols, 3, requires_grad=grad), torch.rand(graph.nnz), "add")
    way = ways[-1]  # the transposed graph is made before
    assert way[way.index("spmm") :] == ["spmm", "choose", "call", *record, "_spmm_impl", "launch", "launch"]


@pytest.mark.parametrize(("grad", "record"), [(False, []), (True, ["forward"])])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_way_of_a_ready_call(weighted, grad, record, monkeypatch):
    """That of docs/call.md: no more than these between a program and a kernel."""
    graph, ways, run = small(), [], _library.entry("spmm", torch.device("cpu"))

    def entry(*args):
        ways.append([frame.name for frame in traceback.extract_stack()])
        return run(*args)

    monkeypatch.setitem(_library._CPU, "spmm", entry)
    given = [torch.randn(graph.num_cols, 3, requires_grad=grad), *([torch.rand(graph.nnz)] * weighted)]
    for _ in range(1 + bounds.NEW_GRAPH_USES):
        out = ops.spmm(graph, *given)
    way = ways[-1]
    found = "weighted_sum_of" if weighted else "sum_of"
    assert way[way.index("spmm") : -1] == ["spmm", "made_ready", found, *record, "__call__"]
    if grad:
        out.sum().backward()
        way = ways[-1]
        assert way[way.index("backward", way.index("apply")) : -1] in (
            ["backward", "__call__"],
            ["backward", "gradient", "__call__"],
        )
