"""Layers of many edge types that are taken together on CUDA, against PyG on the CPU, in float64."""

import copy

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

pytest.importorskip("torch_geometric")
from torch_geometric import nn

from gnnaccel import pyg_backend, report
from gnnaccel.lower import bounds

DEVICE = torch.device("cuda", 0)
# (nodes of each type, their widths, edges of each relation)
SHAPES = {
    "equal": ((60, 60, 60), (8, 8, 8), 200),
    "unequal": ((50, 73, 400), (8, 8, 8), 300),
    "widths": ((50, 73, 64), (8, 5, 16), 300),
    "many rows": ((150_000, 90_001, 1000), (8, 8, 8), 2000),  # each type's product by itself
    "equal and many": ((20_000, 20_000, 20_000), (8, 8, 8), 5000),
    "no edges": ((5, 1, 60), (8, 8, 8), 0),
}
LAYERS = {
    "SAGE": lambda i, w: nn.SAGEConv(w, 8),
    "SAGE some": lambda i, w: nn.SAGEConv(w, 8, aggr=("sum", "mean")[i % 2], root_weight=i % 3 > 0, bias=i % 3 > 0),
    "Graph": lambda i, w: nn.GraphConv(w, 8),
    "GIN": lambda i, w: nn.GINConv(nn.MLP([w[0], 6, 8], norm=None), eps=0.3 * i),
    "GAT": lambda i, w: nn.GATConv(w, 4, heads=2, add_self_loops=False),
    "GATv2": lambda i, w: nn.GATv2Conv(w, 4 + 4 * (i % 2), heads=2, concat=i % 2 == 0, add_self_loops=False),
    "Transformer": lambda i, w: nn.TransformerConv(w, 8, heads=2, concat=False),
}


class Net(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.last = LAYERS[name](1, (8, 8)), LAYERS[name](2, (8, 8))

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


def case(shape):
    counts, widths, edges = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    x = {}
    for i, (count, width) in enumerate(zip(counts, widths, strict=True)):
        x[f"n{i}"] = torch.randn(count, width, generator=generator, dtype=torch.float64)
    found = {}
    for i in range(7):
        ends = i % 3, (i + i // 3) % 3
        pair = [torch.randint(counts[end], (edges,), generator=generator) for end in ends]
        found[f"n{ends[0]}", f"r{i}", f"n{ends[1]}"] = torch.stack(pair)
    return x, found


def run(model, x, edges, used, again, **more):
    leaves = {name: value.detach().requires_grad_() for name, value in x.items()}
    given = [*leaves.values(), *model.parameters()]
    out = model(leaves, edges, **more)
    weights = {name: torch.arange(value.numel()).sin().to(value).view_as(value) for name, value in out.items()}
    loss = sum((out[name] * weights[name]).sum() for name in used)
    grads = torch.autograd.grad(loss, given, allow_unused=True, create_graph=again)
    if again:
        squares = sum(grad.square().sum() for grad in grads if grad is not None)
        grads += torch.autograd.grad(squares, given, allow_unused=True, materialize_grads=True)
    return list(out.items()), grads


@pytest.mark.parametrize("form", ["sum", "mean", "to_hetero"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_together(shape, name, form):
    if shape == "widths" and (name == "GIN" or form == "to_hetero"):
        pytest.skip("takes features of one width")
    torch.manual_seed(0)
    x, edges = case(shape)
    widths = {kind: value.shape[1] for kind, value in x.items()}
    if form == "to_hetero":
        plain = nn.to_hetero(Net(name), (list(x), list(edges)))
    else:
        layers = {r: LAYERS[name](i, (widths[r[0]], widths[r[2]])) for i, r in enumerate(edges)}
        plain = nn.HeteroConv(layers, aggr=form)
    plain = plain.double()
    model = pyg_backend.accelerate(copy.deepcopy(plain).to(DEVICE))
    there = [{key: value.to(DEVICE) for key, value in each.items()} for each in (x, edges)]
    again = shape == "equal" and name in ("SAGE", "GIN", "GAT", "GATv2")
    report.reset()
    for used in (list(x), ["n1"]):
        want, want_grads = run(plain, x, edges, used, again)
        for _ in range(7):  # graphs that are new may be gone after the layers of one step
            got, grads = run(model, *there, used, again)
        assert [kind for kind, _ in got] == [kind for kind, _ in want]
        assert [grad is None for grad in grads] == [grad is None for grad in want_grads]
        most = max(float(grad.detach().abs().max()) for grad in want_grads if grad is not None and grad.numel())
        for (_, ours), (_, theirs) in zip(got, want, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(grads, want_grads, strict=True):
            if theirs is not None:
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9 * max(most, 1))
    site = report.snapshot()["pyg.to_hetero" if form == "to_hetero" else "pyg.HeteroConv"]
    alone = name == "GATv2" and shape == "no edges"  # attends to nothing
    assert (site.accelerated > sum(site.reasons.values())) != alone


@pytest.mark.parametrize("way", ["rows", "new edges"])
@pytest.mark.parametrize("form", ["sum", "mean", "to_hetero"])
@pytest.mark.parametrize("name", ["SAGE", "SAGE some", "Graph"])
@pytest.mark.parametrize("shape", ["equal", "unequal", "no edges"])
def test_sums_of_rows_with_edges_and_of_new_edges(shape, name, form, way, monkeypatch):
    if way == "rows":
        monkeypatch.setattr(bounds, "FILLED_ROWS_WORK", 0)
        monkeypatch.setattr(bounds, "FILLED_ROWS_SHARE", 2)
    else:
        monkeypatch.setattr(bounds, "NEW_GRAPH_USES", 100)
    test_layers_together(shape, name, form)


@pytest.mark.parametrize("beside", [0, 1 << 20])
@pytest.mark.parametrize("shape", ["equal", "unequal", "widths"])
def test_hgt(shape, beside, monkeypatch):
    monkeypatch.setattr(bounds, "HGT_TOGETHER_BYTES", {"cuda": beside})
    torch.manual_seed(0)
    x, edges = case(shape)
    widths = {kind: value.shape[1] for kind, value in x.items()}
    plain = nn.HGTConv(widths, 8, (list(x), list(edges)), heads=2).double()
    model = pyg_backend.accelerate(copy.deepcopy(plain).to(DEVICE))
    there = [{key: value.to(DEVICE) for key, value in each.items()} for each in (x, edges)]
    for used in (list(x), ["n1"]):
        want, want_grads = run(plain, x, edges, used, shape == "equal")
        for _ in range(2):
            got, grads = run(model, *there, used, shape == "equal")
        for (_, ours), (_, theirs) in zip(got, want, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)
        for ours, theirs in zip(grads, want_grads, strict=True):
            if theirs is not None:
                scale = max(1.0, float(theirs.detach().abs().max()) if theirs.numel() else 1.0)
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-8, atol=1e-8 * scale)


@pytest.mark.parametrize("shape", ["equal", "unequal", "widths", "no edges"])
def test_weighted_layers_together(shape):
    torch.manual_seed(0)
    x, edges = case(shape)
    widths = {kind: value.shape[1] for kind, value in x.items()}
    layers = {r: nn.GraphConv((widths[r[0]], widths[r[2]]), 8, ("add", "mean")[i % 2]) for i, r in enumerate(edges)}
    plain = nn.HeteroConv(layers).double()
    model = pyg_backend.accelerate(copy.deepcopy(plain).to(DEVICE))
    there = [{key: value.to(DEVICE) for key, value in each.items()} for each in (x, edges)]
    some = {r: torch.rand(e.shape[1], dtype=torch.float64) for i, (r, e) in enumerate(edges.items()) if i != 2}
    want, want_grads = run(plain, x, edges, list(x), True, edge_weight_dict=some)
    moved = {r: weight.to(DEVICE) for r, weight in some.items()}
    for again in (*[False] * (2 + bounds.NEW_GRAPH_USES), True):
        got, grads = run(model, *there, list(x), again, edge_weight_dict=moved)
    assert any(out.grad_fn.name() == "_LayersBackward" for _, out in got)
    for (_, ours), (_, theirs) in zip(got, want, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(grads, want_grads, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["SAGE", "SAGE sum", "Graph", "GIN"])
@pytest.mark.parametrize("few", [0, 1 << 13])
def test_models_with_bases(name, few, monkeypatch):
    monkeypatch.setattr(bounds, "BASES_EDGES", few)
    x, edges = case("unequal")
    make = {**LAYERS, "SAGE sum": lambda i, w: nn.SAGEConv(w, 8, aggr="sum")}[name]
    net = Net("SAGE")
    net.first, net.last = make(1, (8, 8)), make(2, (8, 8))
    torch.manual_seed(0)
    plain = nn.to_hetero_with_bases(net, (list(x), list(edges)), num_bases=3).double()
    model = pyg_backend.accelerate(copy.deepcopy(plain).to(DEVICE))
    there = [{key: value.to(DEVICE) for key, value in each.items()} for each in (x, edges)]
    report.reset()
    for again in (*[False] * (1 + bounds.NEW_GRAPH_USES), True):
        want, want_grads = run(plain, x, edges, list(x), again)
        got, grads = run(model, *there, list(x), again)
        for (_, ours), (_, theirs) in zip(got, want, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9)
        most = max(float(grad.abs().max()) for grad in want_grads)
        for ours, theirs in zip(grads, want_grads, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-9 * max(most, 1))
    assert not any(site.left for site in report.snapshot().values())
