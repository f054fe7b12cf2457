"""Memory: no message per edge in the layers that run as SpMM, nothing kept of 1,000 mini-batches, and what is prepared
for a graph dies with it, without Python's garbage collector.
"""

import gc
import itertools
import os
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gnnaccel import dgl_backend, pyg_backend, report
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds

dgl_backend.shim()
dgl = pytest.importorskip("dgl")
nn = pytest.importorskip("torch_geometric").nn
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import NeighborLoader  # noqa: E402
from torch_geometric.utils import subgraph  # noqa: E402

from gnnaccel.dgl_backend.structure import structure  # noqa: E402

NODES, EDGES, WIDTH = 150, 30_000, 64
MESSAGES = EDGES * WIDTH * 4  # bytes of one float32 message per edge
# What is made: a few values per edge (two 64-bit ends are MESSAGES / 16), and features of the nodes.
BOUND = MESSAGES // 8


@pytest.fixture(autouse=True)
def _plugins():
    report.reset()
    dgl_backend.enable()
    yield
    dgl_backend.disable()


def largest_allocation(step):
    """Bytes of the largest piece of memory that torch hands out while step() runs, inside our ops too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    return max(e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]")


def no_fallback():
    return not any(site.left for site in report.snapshot().values()) and report.snapshot()


# ---- Layers that the frameworks, or we, run as SpMM. ----

PYG = {
    "GCNConv": lambda: nn.GCNConv(WIDTH, WIDTH),
    "SAGEConv mean": lambda: nn.SAGEConv(WIDTH, WIDTH),
    "SAGEConv max": lambda: nn.SAGEConv(WIDTH, WIDTH, aggr="max"),
    "SAGEConv min": lambda: nn.SAGEConv(WIDTH, WIDTH, aggr="min"),
    "GINConv": lambda: nn.GINConv(torch.nn.Linear(WIDTH, WIDTH)),
    "GraphConv": lambda: nn.GraphConv(WIDTH, WIDTH),
    "TAGConv": lambda: nn.TAGConv(WIDTH, WIDTH, K=2),
    "SGConv": lambda: nn.SGConv(WIDTH, WIDTH, K=2),
    "APPNP": lambda: nn.APPNP(K=2, alpha=0.1),
    "ChebConv": lambda: nn.ChebConv(WIDTH, WIDTH, K=3),
    "GatedGraphConv": lambda: nn.GatedGraphConv(WIDTH, num_layers=2),
    "GATConv": lambda: nn.GATConv(WIDTH, WIDTH // 4, heads=4, dropout=0.2),
    "GATv2Conv": lambda: nn.GATv2Conv(WIDTH, WIDTH // 4, heads=4, dropout=0.2),
    "SuperGATConv": lambda: nn.SuperGATConv(WIDTH, WIDTH // 4, heads=4, dropout=0.2).eval(),
    "TransformerConv": lambda: nn.TransformerConv(WIDTH, WIDTH // 4, heads=4),
    "AGNNConv": lambda: nn.AGNNConv(),
}


@pytest.mark.parametrize("name", PYG)
def test_pyg_layers_make_no_message_per_edge(name):
    index, x = torch.randint(NODES, (2, EDGES)), torch.randn(NODES, WIDTH, requires_grad=True)
    plain = PYG[name]()

    def step():
        plain(x, index).square().sum().backward()

    assert largest_allocation(step) > 0.9 * MESSAGES  # so this would be seen
    pyg_backend.accelerate(plain)
    assert largest_allocation(step) < BOUND
    assert no_fallback()


DGL = {
    "GraphConv": lambda: dgl.nn.GraphConv(WIDTH, WIDTH),
    "SAGEConv mean": lambda: dgl.nn.SAGEConv(WIDTH, WIDTH, "mean"),
    "SAGEConv pool": lambda: dgl.nn.SAGEConv(WIDTH, WIDTH, "pool"),
    "GINConv sum": lambda: dgl.nn.GINConv(torch.nn.Linear(WIDTH, WIDTH), "sum"),
    "GINConv max": lambda: dgl.nn.GINConv(torch.nn.Linear(WIDTH, WIDTH), "max"),
    "TAGConv": lambda: dgl.nn.TAGConv(WIDTH, WIDTH, k=2),
    "SGConv": lambda: dgl.nn.SGConv(WIDTH, WIDTH, k=2),
    "APPNPConv": lambda: dgl.nn.APPNPConv(2, 0.1),
    "ChebConv": lambda: dgl.nn.ChebConv(WIDTH, WIDTH, 3),
    "GATConv": lambda: dgl.nn.GATConv(WIDTH, WIDTH // 4, 4, attn_drop=0.2),
    "EdgeGATConv": lambda: dgl.nn.EdgeGATConv(WIDTH, 2, WIDTH // 4, 4, attn_drop=0.2),
    "DotGatConv": lambda: dgl.nn.DotGatConv(WIDTH, WIDTH // 4, 4),
    "AGNNConv": lambda: dgl.nn.AGNNConv(),
}


@pytest.mark.parametrize("name", DGL)
def test_dgl_layers_make_no_message_per_edge(name):
    ends = torch.randint(NODES, (2, EDGES - NODES))
    graph = dgl.add_self_loop(dgl.graph((ends[0], ends[1]), num_nodes=NODES))
    x, layer = torch.randn(NODES, WIDTH, requires_grad=True), DGL[name]()
    more = [torch.randn(EDGES, 2)] if name == "EdgeGATConv" else []
    assert largest_allocation(lambda: layer(graph, x, *more).square().sum().backward()) < BOUND
    assert no_fallback()


def test_a_weight_that_is_broadcast_between_its_dimensions_is_not_expanded():
    ends, feats = torch.randint(NODES, (2, EDGES)), (4, 16, 2)
    graph = dgl.graph((ends[0], ends[1]), num_nodes=NODES)
    x, weight = torch.randn(NODES, *feats), torch.randn(EDGES, 4, 1, 2)
    for op in (dgl.ops.u_mul_e_sum, dgl.ops.u_add_e_max):
        assert largest_allocation(lambda op=op: op(graph, x, weight)) < EDGES * 4 * 16 * 2 * 4 // 8
    assert no_fallback()


# ---- Mini-batches. ----


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def living_tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def check_flat(step, batches=1000, warm_up=200, growth_bytes=12 * 2**20):
    """step() again and again without the garbage collector: tensors, cache entries and resident memory stay flat.

    What is prepared of a batch takes some 50 KiB: kept of 800 batches it would be more than three times the bound.
    """
    torch.set_num_threads(1)  # the batches are small
    gc.collect()
    gc.disable()
    try:
        for _ in range(warm_up):
            step()
        before = living_tensors(), len(derived), resident_bytes()
        for _ in range(batches - warm_up):
            step()
        after = living_tensors(), len(derived), resident_bytes()
    finally:
        gc.enable()
    assert after[0] <= before[0] and after[1] <= before[1], (before, after)
    assert after[2] - before[2] < growth_bytes, (before, after)
    assert no_fallback()


def test_a_thousand_batches_of_dgl():
    ends = torch.randint(2000, (2, 12_000))
    graph = dgl.graph((ends[0], ends[1]), num_nodes=2000)
    graph.ndata["feat"] = torch.randn(2000, 16)
    sampler = dgl.dataloading.NeighborSampler([4, 4], prefetch_node_feats=["feat"])
    convs = torch.nn.ModuleList([dgl.nn.SAGEConv(16, 16, "mean"), dgl.nn.GATConv(16, 4, 2, allow_zero_in_degree=True)])
    optimizer = torch.optim.SGD(convs.parameters(), lr=0.01)

    def step():
        seeds = torch.randperm(2000)[:300]
        _, _, blocks = sampler.sample_blocks(graph, seeds)
        x = blocks[0].srcdata["feat"]
        for conv, block in zip(convs, blocks, strict=True):
            x = conv(block, x)
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()

    check_flat(step)


def test_a_thousand_batches_of_pyg():
    index, x = torch.randint(2000, (2, 12_000)), torch.randn(2000, 16)
    convs = torch.nn.ModuleList([nn.GCNConv(16, 16), nn.SAGEConv(16, 16, aggr="max"), nn.GATConv(16, 4, heads=2)])
    pyg_backend.accelerate(convs)
    optimizer = torch.optim.SGD(convs.parameters(), lr=0.01)

    def step():
        nodes = torch.randperm(2000)[:1000]
        edges, _ = subgraph(nodes, index, relabel_nodes=True, num_nodes=2000)
        features = x[nodes]
        for conv in convs:
            features = conv(features, edges)
        optimizer.zero_grad()
        features.square().mean().backward()
        optimizer.step()

    check_flat(step)


def test_a_thousand_batches_of_pygs_loaders():
    """Of sampled batches nothing is kept but the table, one number per node."""
    data = Data(x=torch.randn(2000, 4), edge_index=torch.randint(2000, (2, 12_000)), edge_weight=torch.rand(12_000))
    pyg_backend.enable()
    try:
        options = ({}, dict(disjoint=True), dict(weight_attr="edge_weight"), dict(subgraph_type="induced"))
        loaders = [NeighborLoader(data, [5, 5], batch_size=100, shuffle=True, **kwargs) for kwargs in options]
        batches = itertools.chain.from_iterable(itertools.cycle(loaders))
        check_flat(lambda: next(batches))
    finally:
        pyg_backend.disable()


# ---- What is prepared dies with the graph. ----


def test_the_structure_of_a_dgl_graph_dies_with_it():
    gc.disable()
    try:
        for formats in (["coo", "csr", "csc"], ["csr"], ["csc"], ["coo"]):
            graph = dgl.graph((torch.tensor([0, 1, 2]), torch.tensor([1, 1, 0]))).formats(formats)
            if len(formats) == 3:
                graph.create_formats_()
            kept = structure(graph._graph)
            refs = [weakref.ref(part) for part in (kept, kept.indptr, kept.transposed, kept.transposed.indptr)]
            del kept
            assert all(ref() is not None for ref in refs)
            del graph
            assert [ref() for ref in refs] == [None] * 4, formats
    finally:
        gc.enable()


def test_what_is_derived_of_an_edge_index_dies_with_it():
    layers = [pyg_backend.accelerate(layer()) for layer in PYG.values()]
    for layer in layers:  # what is kept of the layers' own tensors
        layer(torch.randn(NODES, WIDTH), torch.randint(NODES, (2, 500)))
    before = len(derived)
    gc.disable()
    try:
        index, x = torch.randint(NODES, (2, 500)), torch.randn(NODES, WIDTH, requires_grad=True)
        for layer in layers:
            layer(x, index).sum().backward()
        assert len(derived) > before
        del index
        assert len(derived) == before
    finally:
        gc.enable()


def test_hundreds_of_living_graphs_are_prepared_once(monkeypatch):
    made = []
    build = Graph.__init__
    monkeypatch.setattr(Graph, "__init__", lambda self, *args: (made.append(self), build(self, *args))[1])
    layers = [pyg_backend.accelerate(conv(4, 4)) for conv in (nn.GCNConv, nn.GATConv, nn.SAGEConv)]
    x = torch.randn(10, 4, requires_grad=True)
    graphs = [torch.randint(10, (2, 20)) for _ in range(500)]
    outs = []
    monkeypatch.setattr(bounds, "NEW_GRAPH_USES", 3)
    # With a loop at each node, for GCN and GAT, and the edges as they are: two graphs, and their transposed, of which a
    # sum needs none the first times.
    for count in (3, 3, 3, 4, 4):
        outs.append([layer(x, index) for index in graphs for layer in layers])
        torch.stack(outs[-1]).sum().backward()
        assert len(made) == count * len(graphs)
    torch.testing.assert_close(outs[0], outs[1])
    before = len(derived)
    derived.invalidate(*graphs)
    assert before - len(derived) >= 2 * len(graphs)


def test_sizes_without_end_do_not_fill_the_cache():
    conv, index = pyg_backend.accelerate(nn.SAGEConv(4, 4)), torch.randint(10, (2, 20))
    before = len(derived)
    for nodes in range(10, 110):
        conv(torch.randn(nodes, 4), index)
    assert 0 < len(derived) - before <= 64
