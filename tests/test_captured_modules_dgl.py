"""Captured modules on DGL's graphs, against the same modules as they are."""

import pytest
import recorded
import torch
from dgl_compare import dgl  # after the shim
from torch import nn

import gnnaccel
from gnnaccel import dgl_backend, report
from gnnaccel.capture import captures_of, guard, modules, obstacles, pair

import dgl.nn as dglnn  # isort: skip

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.usefixtures("dgl_restored")


@pytest.fixture(autouse=True)
def device(dgl_restored, monkeypatch):
    dgl_backend.enable()
    if not CUDA:
        for module in (guard, modules, obstacles, pair):
            monkeypatch.setattr(module, "Recording", recorded.Recording)


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.last = make(5, 8), make(8, 3)

    def forward(self, graph, x):
        return self.last(graph, self.first(graph, x).flatten(1).relu()).flatten(1)


class Own(nn.Module):
    """A layer of a user's, which leaves a feature on the graph or not."""

    def __init__(self, inputs, outputs, leaves=False):
        super().__init__()
        self.lin, self.leaves = nn.Linear(inputs, outputs), leaves

    def forward(self, graph, x):
        with graph.local_scope():
            graph.ndata["h"] = self.lin(x)
            graph.update_all(dgl.function.copy_u("h", "m"), dgl.function.mean("m", "out"))
            out = graph.ndata["out"]
        if self.leaves:
            graph.ndata["left"] = out.detach()
        return out


LAYERS = {
    "GraphConv": dglnn.GraphConv,
    "SAGEConv": lambda *sizes: dglnn.SAGEConv(*sizes, "mean"),
    "GATConv": lambda *sizes: dglnn.GATConv(*sizes, 1),
    "Own": Own,
}


def losses(make, captured, change):
    torch.manual_seed(0)
    edges = torch.randint(0, 20, (2, 60))
    graph = dgl.add_self_loop(dgl.graph((edges[0], edges[1]), num_nodes=20)).to(DEVICE)
    x, model = torch.randn(20, 5, device=DEVICE), Net(make).to(DEVICE)
    if captured:
        gnnaccel.accelerate(model, cuda_graphs=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for i in range(14):
        if i == 8:
            graph = change(graph)
        optimizer.zero_grad()
        loss = model(graph, x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found), model


def add_edges(graph):
    graph.add_edges(torch.tensor([0, 1], device=DEVICE), torch.tensor([5, 6], device=DEVICE))
    return graph


CHANGES = {"nothing": (lambda graph: graph, 1), "edges added": (add_edges, 2), "reversed": (dgl.reverse, 2)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_is_captured(layer, change):
    changed, variants = CHANGES[change]
    want, _ = losses(LAYERS[layer], False, changed)
    report.reset()
    got, model = losses(LAYERS[layer], True, changed)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    seen = report.snapshot()["captured.Net"]
    assert (
        captures_of(model).variants == variants and not seen.left and seen.accelerated == (11 if variants == 1 else 8)
    )


def test_features_left_on_the_graph():
    make = lambda *sizes: Own(*sizes, leaves=True)  # noqa: E731
    want, _ = losses(make, False, lambda graph: graph)
    report.reset()
    got, _ = losses(make, True, lambda graph: graph)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert any("it changes" in reason for reason in report.snapshot()["captured.Net"].reasons)
