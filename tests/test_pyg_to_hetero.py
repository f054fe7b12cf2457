"""Models of to_hetero() whose layers' copies are called together, against PyG's own way through the same model."""

import copy

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from hetero_cases import NETS, RELATIONS, Net, data, train
from pyg_compare import assert_equal, rand, same
from torch_geometric import nn
from torch_geometric.utils import dropout_edge

from gnnaccel import pyg_backend, report
from gnnaccel.lower import bounds
from gnnaccel.pyg_backend import edge_type_layers

torch.fx.wrap("dropout_edge")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """It is worth it on tiny graphs as well, and on new ones."""
    for name, value in (("TRAINED_WEIGHTS_TINY", 0), ("NEW_GRAPH_USES", -1), ("RELATION_LAYERS_TINY", 0)):
        monkeypatch.setattr(bounds, name, value)
    monkeypatch.setattr(edge_type_layers, "_DEVICES", {})


class Weighted(torch.nn.Module):
    """A layer with edge weights that is called twice, beside results that are added up with another's."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.GraphConv((-1, -1), 8), nn.SAGEConv((-1, -1), 8)

    def forward(self, x, edge_index, edge_weight):
        x = torch.add(self.conv(x, edge_index, edge_weight), self.other(x, edge_index=edge_index))
        return self.conv(x.relu(), edge_index, edge_weight=edge_weight)


def _watch(model):
    model.first[next(iter(model.first))].register_forward_hook(lambda *args: args[2] * 2)


def _other(model):
    model.first[next(iter(model.first))] = torch.nn.Identity()
    model.first[next(iter(model.first))].forward = lambda x, edge_index: x[:, :1].expand(-1, 8)


CHANGES = {
    "nothing": lambda model: None,
    "hook": _watch,
    "another module": _other,
    "half": lambda m: m.first.bfloat16(),
}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", NETS)
def test_layers_of_to_hetero_together(name, aggr):
    def program(wrap):
        graph = data()
        model = nn.to_hetero(Net(NETS[name]), graph.metadata(), aggr=aggr)
        model(graph.x_dict, graph.edge_index_dict)
        model, code = wrap(model), model.code
        twins = [copy.deepcopy(model) for _ in range(2)]
        out = [train(each, graph) for each in (model, model, *twins, model)]
        assert model.code == code
        return out, list(model.state_dict())

    report.reset()
    same(program)
    site = report.snapshot().get("pyg.to_hetero")
    together = site is not None and site.accelerated - sum(site.reasons.values())
    assert bool(together) == (name not in ("SAGE max", "ResGated")) or aggr == "max"


@pytest.mark.parametrize("change", CHANGES)
def test_to_hetero_with_other_parts(change):
    def program(wrap):
        graph = data(8)
        model = nn.to_hetero(Net(NETS["Graph"]), graph.metadata())
        model(graph.x_dict, graph.edge_index_dict)
        model = wrap(model)
        if change != "half":
            CHANGES[change](model)
            return [train(model, graph) for _ in range(3)]
        with torch.autocast("cpu"):
            return [model(graph.x_dict, graph.edge_index_dict) for _ in range(3)]

    same(program)


def test_to_hetero_with_edge_weights_and_missing_relations():
    def program(wrap):
        graph, out = data(8), []
        weights = {r: rand(60, seed=5, grad=True) for r in RELATIONS}
        model = nn.to_hetero(Weighted(), graph.metadata())
        model(graph.x_dict, graph.edge_index_dict, weights)
        model = wrap(model)
        for _ in range(3):
            out.append((train(model, graph, weights), [w.grad for w in weights.values()]))
        some = dict(list(graph.edge_index_dict.items())[1:])
        return out, model(graph.x_dict, some, weights)

    same(program, raises=True)


def test_a_trace_of_a_model_is_of_its_own_graph():
    graph = data(8)

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SAGEConv(8, 8)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv(x, edge_index)

    model = pyg_backend.accelerate(nn.to_hetero(Plain(), graph.metadata()))
    given = graph.x_dict, graph.edge_index_dict
    want = model(*given)
    again = nn.fx.symbolic_trace(model)
    assert_equal(again(*given), want)
    assert [n.target for n in again.graph.nodes if n.op == "call_module"] == [
        n.target for n in model.graph.nodes if n.op == "call_module"
    ]
    pyg_backend.disable()
    report.reset()
    assert_equal(model(*given), want)
    assert "pyg.to_hetero" not in report.snapshot()


BASES = {
    "SAGE": lambda: nn.SAGEConv(8, 8),
    "SAGE sum": lambda: nn.SAGEConv(8, 8, aggr="sum"),
    "SAGE max": lambda: nn.SAGEConv(8, 8, aggr="max"),
    "Graph": lambda: nn.GraphConv(8, 8),
    "GIN": lambda: nn.GINConv(torch.nn.Linear(8, 8)),
    "LE": lambda: nn.LEConv(8, 8),
}


class Layers(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.last = make(), make()

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


class WritesEdges(torch.nn.Module):
    """What PyG makes of all edge types at each call may be written into."""

    def __init__(self):
        super().__init__()
        self.conv = nn.SAGEConv(8, 8)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index.clamp_(max=20))


@pytest.mark.parametrize("name", [*BASES, "writes edges"])
def test_layers_of_models_with_bases(name):
    """On edges that it has had, on others, and on edges written into; copied, and with a hook of somebody's own."""

    def program(wrap):
        graph = data(8)
        net = WritesEdges() if name == "writes edges" else Layers(BASES[name])
        model = nn.to_hetero_with_bases(wrap(net), graph.metadata(), 3, in_channels={"x": 8})
        with torch.no_grad():
            model(graph.x_dict, graph.edge_index_dict)
        out = [train(model, graph) for _ in range(3)]
        graph[RELATIONS[0]].edge_index[1, :30] = 0
        out.append(train(model, graph))
        out.append(copy.deepcopy(model)(graph.x_dict, graph.edge_index_dict))
        graph[RELATIONS[1]].edge_index = torch.empty(2, 0, dtype=torch.long)
        out.append(train(model, graph))
        layer = next(part for part in model.modules() if isinstance(part, nn.MessagePassing))
        layer.register_message_forward_hook(lambda *args: 2 * args[-1])
        return out, train(model, graph), list(model.state_dict())

    same(program, accelerated=None)
    graph = data(8)
    net = WritesEdges() if name == "writes edges" else Layers(BASES[name])
    model = pyg_backend.accelerate(nn.to_hetero_with_bases(net, graph.metadata(), 3, in_channels={"x": 8}))
    train(model, graph)
    report.reset()
    train(model, graph)
    assert not any(site.left for site in report.snapshot().values()) or name == "LE"  # few messages


def test_edges_of_all_types_are_kept_with_them():
    graph = data(8)
    net = Layers(BASES["SAGE"])
    seen = []
    model = pyg_backend.accelerate(nn.to_hetero_with_bases(net, graph.metadata(), 2, in_channels={"x": 8}))
    for part in model.modules():
        if isinstance(part, nn.MessagePassing):
            part.register_forward_pre_hook(lambda module, args: seen.append((args[1], module._edge_type)))
    for _ in range(2):
        model(graph.x_dict, graph.edge_index_dict)
    assert len(seen) == 8
    assert all(each[0] is seen[0][0] and each[1] is seen[0][1] for each in seen)
    count = len(seen)
    model({k: torch.cat([x, x]) for k, x in graph.x_dict.items()}, graph.edge_index_dict)
    assert seen[count][0] is not seen[0][0]  # of other sizes


def test_edges_that_are_made_in_a_transform():
    """Of torch.func, which wraps them."""

    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.SAGEConv(8, 8)

        def forward(self, x, edge_index):
            return self.conv(x, dropout_edge(edge_index)[0])

    def program(wrap):
        graph = data(8)
        model = nn.to_hetero(wrap(Dropped()), graph.metadata())
        x = graph.x_dict
        torch.manual_seed(3)

        def loss(first):
            out = model({**x, "paper": first}, graph.edge_index_dict)
            return sum(each.sin().sum() for each in out.values())

        return torch.func.grad(loss)(x["paper"].detach())

    same(program, accelerated=None)
