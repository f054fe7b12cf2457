"""Programs of torch.compile that run from CUDA graphs: the edges, features and weights are those of the call.

Without a GPU, what is recorded there runs as it is: the same ops on a graph that comes as values.
"""

import pytest
import test_pyg_compiled
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import D, E, N, assert_equal, edges, rand
from test_pyg_compiled import BIPARTITE, LAYERS, OPS, agree, compiled, counts, pair_of
from torch_geometric import nn
from torch_geometric.nn import models

from gnnaccel import report
from gnnaccel.lower import bounds
from gnnaccel.ops import _packed
from gnnaccel.ops._arrays import Structure
from gnnaccel.ops._described import Described
from gnnaccel.pyg_backend import compiling

_in_float64 = test_pyg_compiled._in_float64  # a fixture for all that is here
CUDA = torch.cuda.is_available()
on_a_gpu = pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")


@pytest.fixture
def as_values(monkeypatch):
    monkeypatch.setattr(compiling, "_found_replayed", lambda device: True)
    monkeypatch.setattr(bounds, "FEW_COMPILED", 0)
    calls, packed = [], _packed._packed
    monkeypatch.setattr(_packed, "_packed", lambda *args: (calls.append(args), packed(*args))[1])
    return calls


def without_loops(num_src=N, num_dst=N, count=E, seed=0):
    """Kernels of the CPU do not take nonzeros that are of no row (tests/test_cuda_packed.py has those of CUDA)."""
    index = edges(num_src, num_dst, count, seed)
    for _ in range(2):
        same = index[0] == index[1]
        index[1, same] = (index[1, same] + 1) % (num_dst - 1)
    return index


@pytest.mark.parametrize("name", LAYERS)
def test_replayed_layer(name, as_values):
    make, rest = LAYERS[name]
    plain, model = pair_of(make)
    run, x, index = compiled(model), rand(N, D), without_loops()
    agree(plain, model, run, x, index, *rest)
    assert counts() == {(True, False)} and as_values
    with torch._dynamo.config.patch(error_on_recompile=True):
        index.copy_(without_loops(seed=5))
        agree(plain, model, run, x, index, *rest)
        agree(plain, model, run, 2 * x, without_loops(seed=9), *rest)


@pytest.mark.parametrize("name", BIPARTITE)
def test_bipartite(name, as_values):
    plain, model = pair_of(BIPARTITE[name])
    agree(plain, model, compiled(model), test_pyg_compiled.PAIR, test_pyg_compiled.BETWEEN.clone())
    assert as_values


@pytest.mark.parametrize("name", ["GCN", "SAGE max", "GATv2"])
def test_sizes_that_change(name, as_values):
    make, _ = LAYERS[name]
    plain, model = pair_of(make)
    run = compiled(model, dynamic=True)
    for recompiles, (n, e) in enumerate([(N, E), (N + 7, E + 31), (N - 5, E - 40)]):
        with torch._dynamo.config.patch(error_on_recompile=recompiles > 0):
            agree(plain, model, run, rand(n, D), without_loops(n, n, e))


def test_without_gradients(as_values):
    """The reversed edges are left away."""
    plain, model = pair_of(LAYERS["GCN"][0])
    run, x, index = compiled(model), rand(N, D), without_loops()
    with torch.no_grad():
        assert_equal(run(x, index), plain(x, index))
    assert [args[1] for args in as_values] == [False]
    agree(plain, model, run, x, index)
    assert {args[1] for args in as_values} == {False, True}


def test_large_graphs(as_values, monkeypatch):
    """They keep their lists of work."""
    monkeypatch.setattr(bounds, "PACKED_EDGES", E - 1)
    plain, model = pair_of(LAYERS["SAGE"][0])
    agree(plain, model, compiled(model), rand(N, D), without_loops())
    assert not as_values


SUMS = {  # ours where Inductor has few numbers to sum up
    "SAGE": False,
    "GraphConv": False,
    "SAGE max": True,
    "GCN": True,
    "GraphConv weight": True,
}


@pytest.mark.parametrize("name", SUMS)
def test_few_numbers(name, as_values, monkeypatch):
    """Sums without weights are Inductor's in a program of CUDA graphs, if they are small."""
    make, rest = LAYERS[name]
    plain, model = pair_of(make)
    monkeypatch.setattr(bounds, "FEW_COMPILED", E * D)
    agree(plain, model, compiled(model), rand(N, D), without_loops(), *rest)
    assert bool(as_values) == SUMS[name] and counts() == {(SUMS[name], not SUMS[name])}
    for edges_now, most in ((without_loops(), E * D - 1), (without_loops().int(), E * D)):
        torch.compiler.reset()
        as_values.clear()
        monkeypatch.setattr(bounds, "FEW_COMPILED", most)
        compiled(model)(rand(N, D), edges_now, *rest)
        assert as_values


@pytest.mark.parametrize("loops", ["none", "one"])
@pytest.mark.parametrize("both", [False, True])
def test_opcheck(loops, both):
    described = Described(without_loops(), N, N, loops, flipped=both)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.packed_graph.default, (*described.flat(), both), test_utils=checks)
    assert not hasattr(torch.Tag, "cudagraph_unsafe") or torch.Tag.cudagraph_unsafe in OPS.packed_graph.default.tags
    structure = _packed.structure_of(described, both)
    graph = described.graph()
    ids = torch.arange(graph.nnz) if graph.edge_ids is None else graph.edge_ids
    assert structure.indptr.equal(graph.indptr) and structure.indices.equal(graph.indices)
    assert structure.edge_ids.equal(ids.int())
    if both:
        other = structure.transposed()
        assert other.indptr.equal(graph.transposed.indptr) and other.indices.equal(graph.transposed.indices)
        (values,), sizes = other.flat()
        again = Structure.of([values], sizes)
        assert values is structure.flat()[0][0] and again.transposed().indices.equal(graph.indices)
        torch.library.opcheck(OPS.degrees.default, other.flat(), test_utils=checks)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GATv2"])
def test_backward_after_other_edges(name, as_values):
    plain, model = pair_of(LAYERS[name][0])
    run, x = compiled(model), rand(N, D)
    found = []
    for call, module in ((run, model), (plain, plain)):
        outs = [call(x, without_loops(seed=seed)) for seed in (1, 2, 3)]
        found.append([torch.autograd.grad(out.square().sum(), list(module.parameters())) for out in outs])
    assert_equal(*found)


def test_torch_that_would_record_a_look_up(monkeypatch):
    """Where torch has no word for ops that look up, layers in such programs are PyG's."""
    monkeypatch.setattr(compiling, "_replays", lambda context: True)
    monkeypatch.setattr(compiling._operators, "CAN_LOOK_UP", False)
    plain, model = pair_of(LAYERS["SAGE"][0])
    agree(plain, model, compiled(model), rand(N, D), edges())
    assert counts() == {(False, True)}


@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"mode": "max-autotune"}])
def test_modes_are_seen(options, monkeypatch):
    seen, replays = [], compiling._replays
    monkeypatch.setattr(compiling, "_replays", lambda context: (seen.append(replays(context)), seen[-1])[1])
    _, model = pair_of(LAYERS["SAGE"][0])
    with torch.no_grad():
        compiled(model, backend="inductor", **options)(rand(N, D), edges())
    assert set(seen) == {bool(options)}


REPLAYED = {
    "GCN": (lambda: models.GCN(D, 8, 2, 3), False),
    "SAGE": (lambda: models.GraphSAGE(D, 8, 2, 3, aggr="max"), False),
    "GAT": (lambda: models.GAT(D, 8, 2, 3, heads=2), False),
    "GATv2": (lambda: nn.GATv2Conv(D, 4, heads=2), False),
    "Transformer": (lambda: nn.TransformerConv(D, 4, heads=2), False),
    "GCN weight": (lambda: nn.GCNConv(D, 8), True),
}


@on_a_gpu
@pytest.mark.parametrize("name", REPLAYED)
def test_in_cuda_graphs(name):
    make, weighted = REPLAYED[name]
    plain, model = pair_of(make)
    plain, model, x, index = plain.cuda(), model.cuda(), rand(N, D).cuda(), edges(count=90).cuda()
    run = compiled(model, backend="inductor", mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()

    def check():
        # Of loops of one node that differ, PyG takes any on CUDA.
        loops, weight = index[0] == index[1], rand(index.shape[1]).abs().cuda()
        rest = (torch.where(loops, 0.5, weight),) if weighted else ()
        for _ in range(2):
            agree(plain, model, run, x, index, *rest)

    check()
    check()
    with torch._dynamo.config.patch(error_on_recompile=True):
        x = x * 2
        check()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                ours.mul_(0.5)
                theirs.mul_(0.5)
        check()
        index[0] = index[0].flip(0)  # with other loops than before
        check()
        index.copy_(without_loops(count=90))
        check()
        for seed in range(7, 10):
            index = edges(count=90, seed=seed).cuda()
            check()
    x, index = rand(N + 3, D).cuda(), edges(N + 3, N + 3, 95).cuda()
    check()
    assert counts() == {(True, False)}
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    report.reset()


@on_a_gpu
@pytest.mark.parametrize("aggr", ["max", "mean"])
def test_recorded_once(aggr):
    """Neither other edges of as many nor what else lies in memory by then has a step recorded again."""
    _, model = pair_of(lambda: models.GraphSAGE(D, 8, 2, 3, aggr=aggr))
    model, x, index = model.cuda(), rand(N, D).cuda(), edges().cuda()
    run = compiled(model, backend="inductor", mode="reduce-overhead")
    recorded, others = [], []
    for seed in range(12):
        index.copy_(edges(seed=seed))
        for _ in range(2):
            model.zero_grad()
            run(x, index).square().sum().backward()
        others.append(torch.empty(3000 + 100 * seed, device="cuda"))
        recorded.append(torch._dynamo.utils.counters["inductor"]["cudagraph_recorded_non_static_inputs"])
    assert recorded[2] > 0 and recorded[-1] == recorded[2]
