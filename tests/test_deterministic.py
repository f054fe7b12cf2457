"""torch.use_deterministic_algorithms: two runs give the same bits, on every device, and nothing of ours is refused.

Fresh memory holds NaN in this mode, so an element that a kernel leaves out shows as well.
"""

import inspect
import warnings

import pytest
import torch

from gnnaccel import dgl_backend, ops, pyg_backend, report
from gnnaccel.graph.csr import Graph
from gnnaccel.ops.sddmm import OPS
from gnnaccel.ops.spmm import MESSAGES, REDUCES

ROWS, COLS, EDGES, HEADS, FEATS = 300, 200, 30_000, 4, 8
STRICT = {"strict": False, "warn_only": True}  # what is passed as warn_only


def ends(seed=0):
    """Rows and columns of a graph with a hub on either side: the rows' is cut into pieces, the columns' collides."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = (torch.randint(n, (EDGES,), generator=generator) for n in (ROWS, COLS))
    rows[:18_000] = 5
    cols[10_000:25_000] = 7
    return rows, cols


def run_twice(run, device, warn_only=False):
    """run() twice under deterministic algorithms, with one and two threads on the CPU: the same bits each time."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    for threads in (1, 2) if device.type == "cpu" else (1,):
        torch.set_num_threads(threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first, second = run(), run()
        assert not [w for w in caught if "deterministic" in str(w.message)]
        assert len(first) == len(second) > 0
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            assert not a.isnan().any(), f"result {i} is not a number"
            assert torch.equal(a, b), f"result {i}, {threads} threads: off by {(a - b).abs().max()}"


# ---- The ops. Each case is a function of the graph and of those tensors of `inputs` that its arguments name. ----


def inputs(graph):
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "x": (graph.num_cols, HEADS, FEATS),
        "v": (graph.num_rows, HEADS, FEATS),
        "e": (graph.nnz, HEADS, FEATS),
        "w": (graph.nnz, HEADS, 1),
        "s": (graph.num_cols, HEADS),
        "t": (graph.num_rows, HEADS),
        "a": (2, HEADS, FEATS),
        "f": (graph.nnz,),
        "b": (HEADS, FEATS),
    }
    return {name: torch.rand(shape, generator=generator) + 0.5 for name, shape in shapes.items()}


def seed_on(x):
    return torch.tensor([7], device=x.device)


def table():
    """Every op with every option, by name."""
    cases = {}
    for reduce in REDUCES:
        for message in MESSAGES:
            cases[f"spmm {message} {reduce} w"] = lambda g, x, w, m=message, r=reduce: ops.spmm(g, x, w, m, r)
            cases[f"spmm {message} {reduce} e"] = lambda g, x, e, m=message, r=reduce: ops.spmm(g, x, e, m, r)
        cases[f"segment_reduce {reduce}"] = lambda g, e, r=reduce: ops.segment_reduce(e, g.indptr, r)
    for op in OPS:
        cases[f"sddmm {op} u v"] = lambda g, x, v, o=op: ops.sddmm(g, x, v, o)
        cases[f"sddmm {op} v u"] = lambda g, x, v, o=op: ops.sddmm(g, v, x, o, "v", "u")
        cases[f"sddmm {op} u e"] = lambda g, x, e, o=op: ops.sddmm(g, x, e, o, "u", "e")
        cases[f"sddmm {op} u u"] = lambda g, x, o=op: ops.sddmm(g, x, x, o, "u", "u")
    for side in ("dst", "src"):
        cases[f"edge_softmax {side}"] = lambda g, w, n=side: ops.edge_softmax(g, w, n)
    cases["graph_conv"] = lambda g, x, f, b: ops.graph_conv(g, x, f, bias=b, relu=True)
    cases["attention"] = lambda g, x, s, t: ops.attention(g, x, s, t)
    cases["attention scale"] = lambda g, x, s, t, w: ops.attention(g, x, s, t, edge_scale=w.detach().squeeze(-1))
    cases["dot_attention"] = lambda g, v, x, w: ops.dot_attention(g, v, x, 2 * x, edge_scale=w.detach().squeeze(-1))
    cases["edge_attention"] = lambda g, x, w: ops.edge_attention(g, w.squeeze(-1), x, dropout=0.3, seed=seed_on(x))
    cases["gatv2_scores"] = lambda g, x, v, b: ops.gatv2_scores(g, x, v, b)
    cases["head_dots"] = lambda g, x, a: ops.head_dots(x, a)
    return cases


CASES = table()
TWICE = (
    "spmm mul sum w",
    "spmm mul max e",
    "sddmm dot u v",
    "edge_softmax dst",
    "attention",
    "dot_attention",
    "edge_attention",
    "head_dots",
    "graph_conv",
    "gatv2_scores",
)


def leaves_of(case, graph, dtype):
    parameters = inspect.signature(case).parameters.values()
    given = inputs(graph)
    names = [p.name for p in parameters if p.default is p.empty and p.name in given]
    return [given[name].to(graph.device, dtype).requires_grad_() for name in names]


def derivatives(case, graph, leaves, order):
    """The result of a case and its gradients; with order 2 also the gradients of those."""

    def weights(t):
        return torch.linspace(-1, 1, t.numel(), device=t.device).to(t.dtype).view_as(t)

    results = [case(graph, *leaves)]
    for _ in range(order):
        values = [t for t in results if t is not None and t.requires_grad]
        total = sum((t * weights(t)).sum() for t in values)
        results += torch.autograd.grad(total, leaves, create_graph=order > 1, allow_unused=True)
    return [t.detach() for t in results if t is not None]


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("name", CASES)
def test_ops(device, name, bits):
    half = torch.bfloat16 if device.type == "cpu" else torch.float16
    rows, cols = ends()
    graph = Graph.from_coo(rows, cols, num_rows=ROWS, num_cols=COLS).to(device)
    leaves = leaves_of(CASES[name], graph, torch.float32 if bits == 32 else half)
    order = 2 if name in TWICE else 1
    run_twice(lambda: derivatives(CASES[name], graph, leaves, order), device)


def test_structure(device):
    rows, cols = (t.to(device) for t in ends())

    def run():
        graph = Graph.from_coo(rows, cols, num_rows=ROWS, num_cols=COLS)
        turned = graph.transposed
        return [graph.indptr, graph.indices, graph.edge_ids, turned.indptr, turned.indices, turned.edge_ids]

    run_twice(run, device)


def test_the_mode_changes_results_by_rounding_alone(device):
    """On CUDA it takes the gradient of a maximum from atomics to a sort."""
    rows, cols = ends()
    graph = Graph.from_coo(rows, cols, num_rows=ROWS, num_cols=COLS).to(device)
    case = CASES["spmm mul max e"]
    leaves = leaves_of(case, graph, torch.float64)
    free = derivatives(case, graph, leaves, 1)
    torch.use_deterministic_algorithms(True)
    for a, b in zip(free, derivatives(case, graph, leaves, 1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# ---- Training under the plug-ins. ----


def train(model, forward, steps=3):
    """Losses of a few steps, and the parameters and their gradients after them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = forward(model).square().mean()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    return results + [t.detach().clone() for p in model.parameters() for t in (p, p.grad) if t is not None]


WIDTH = 12
PYG = {
    "GCN": lambda nn: nn.GCN(WIDTH, 16, 2, 8),
    "SAGE max": lambda nn: nn.GraphSAGE(WIDTH, 16, 2, 8, aggr="max"),
    "GIN": lambda nn: nn.GIN(WIDTH, 16, 2, 8),
    "GAT": lambda nn: nn.GAT(WIDTH, 16, 2, 8, heads=2, dropout=0.3),
    "GATv2": lambda nn: nn.GAT(WIDTH, 16, 2, 8, v2=True, heads=2),
    "Transformer": lambda nn: nn.TransformerConv(WIDTH, 8, heads=2),
    "AGNN": lambda nn: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), nn.AGNNConv()),
    "EdgeConv max": lambda nn: nn.EdgeConv(torch.nn.Linear(2 * WIDTH, 8)),
}


@pytest.mark.parametrize("mode", STRICT)
@pytest.mark.parametrize("name", PYG)
def test_training_pyg(device, name, mode):
    nn = pytest.importorskip("torch_geometric").nn
    rows, cols = ends()
    index = torch.stack([cols, rows])[:, ::4].contiguous().to(device)
    x = torch.randn(ROWS, WIDTH, device=device)

    def forward(model):
        if isinstance(model, torch.nn.Sequential):
            return model[1](model[0](x), index)
        return model(x, index)

    def run():
        torch.manual_seed(2)
        return train(pyg_backend.accelerate(PYG[name](nn)).to(device), forward)

    report.reset()
    run_twice(run, device, STRICT[mode])
    assert any(site.accelerated for site in report.snapshot().values())


DGL = {
    "GraphConv": lambda nn: nn.GraphConv(WIDTH, 8),
    "SAGEConv mean": lambda nn: nn.SAGEConv(WIDTH, 8, "mean"),
    "SAGEConv pool": lambda nn: nn.SAGEConv(WIDTH, 8, "pool"),
    "GINConv max": lambda nn: nn.GINConv(torch.nn.Linear(WIDTH, 8), "max"),
    "GATConv": lambda nn: nn.GATConv(WIDTH, 8, 2, attn_drop=0.3),
    "GATv2Conv": lambda nn: nn.GATv2Conv(WIDTH, 8, 2),
    "DotGatConv": lambda nn: nn.DotGatConv(WIDTH, 8, 2),
    "AGNNConv": lambda nn: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), nn.AGNNConv()),
    "GatedGraphConv": lambda nn: nn.GatedGraphConv(WIDTH, 16, 2, 1),
    "EdgeConv": lambda nn: nn.EdgeConv(WIDTH, 8),
}


@pytest.mark.parametrize("mode", STRICT)
@pytest.mark.parametrize("name", DGL)
def test_training_dgl(name, mode):
    dgl_backend.shim()
    dgl = pytest.importorskip("dgl")
    rows, cols = ends()
    graph = dgl.add_self_loop(dgl.graph((cols[::4], rows[::4]), num_nodes=ROWS))
    x = torch.randn(ROWS, WIDTH)

    def forward(model):
        if isinstance(model, torch.nn.Sequential):
            return model[1](graph, model[0](x))
        return model(graph, x)

    def run():
        torch.manual_seed(2)
        return train(DGL[name](dgl.nn), forward)

    report.reset()
    dgl_backend.enable()
    try:
        run_twice(run, torch.device("cpu"), STRICT[mode])
    finally:
        dgl_backend.disable()
    assert any(site.accelerated for site in report.snapshot().values())
