"""MaxK in front of the layers of DGL and PyG, and in place of the ReLUs of whole models."""

import pickle
import sys

import pytest
import torch
import torch.nn.functional as F

import gnnaccel
from gnnaccel import ops, report
from gnnaccel.ops.cbsr import CBSR

pyg_nn = pytest.importorskip("torch_geometric.nn")

N, D, K = 60, 64, 8


@pytest.fixture(scope="module", autouse=True)
def installed():
    gnnaccel.install()
    yield
    gnnaccel.uninstall()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def sums(monkeypatch):
    """Counts what is summed up by entries."""
    module, count = sys.modules["gnnaccel.ops.spgemm"], [0]
    original = module.sum_of_entries

    def counted(*args, **kwargs):
        count[0] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "sum_of_entries", counted)
    monkeypatch.setattr(sys.modules["gnnaccel.ops.graph_conv"], "sum_of_entries", counted)
    return count


def edges():
    return torch.randint(0, N, (2, 500))


def same_as_dense(layer, sums, by_entries: bool) -> None:
    """layer(h) for a CBSR tensor h: result and gradient of the dense one, by the kernels that it should take."""
    x, found = torch.randn(N, D), []
    for dense in (False, True):
        leaf = x.clone().requires_grad_()
        h = ops.maxk(leaf, K)
        sums[0] = 0
        torch.manual_seed(1)
        out = layer(h.to_dense() if dense else h)
        assert sums[0] == (by_entries and not dense)
        assert dense or h.is_compressed
        out.square().sum().backward()
        found.append((out.detach(), leaf.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


PYG = {
    "GCN": (lambda: pyg_nn.GCNConv(D, D), True),
    "GCN cached": (lambda: pyg_nn.GCNConv(D, D, cached=True), True),
    "GCN to few features": (lambda: pyg_nn.GCNConv(D, 4), False),
    "SAGE": (lambda: pyg_nn.SAGEConv(D, D), True),
    "SAGE max": (lambda: pyg_nn.SAGEConv(D, D, aggr="max"), False),
    "GIN": (lambda: pyg_nn.GINConv(torch.nn.Linear(D, D), train_eps=True), True),
    "GraphConv": (lambda: pyg_nn.GraphConv(D, D), True),
    "GraphConv mean": (lambda: pyg_nn.GraphConv(D, D, aggr="mean"), True),
    "GAT": (lambda: pyg_nn.GATConv(D, D), False),
}


@pytest.mark.parametrize("name", PYG)
def test_pyg_layers(name, sums):
    make, by_entries = PYG[name]
    edge_index, conv = edges(), make()
    same_as_dense(lambda h: conv(h, edge_index), sums, by_entries)


@pytest.mark.parametrize("name", ["GCNConv", "GraphConv"])
def test_pyg_weights(name, sums):
    edge_index, weight, conv = edges(), torch.rand(500), getattr(pyg_nn, name)(D, D)
    same_as_dense(lambda h: conv(h, edge_index, weight), sums, True)


def test_dropout_between(sums):
    edge_index, conv = edges(), pyg_nn.SAGEConv(D, D)
    same_as_dense(lambda h: conv(F.dropout(h, 0.0), edge_index), sums, True)
    assert isinstance(F.dropout(ops.maxk(torch.randn(5, 9), 2), 0.5), CBSR)


def dgl_graph():
    import dgl

    source, target = edges()
    return dgl.add_self_loop(dgl.graph((source, target), num_nodes=N))


def dgl_layer(name):
    import dgl.nn as dgl_nn

    make, by_entries = {
        "GraphConv": (lambda: dgl_nn.GraphConv(D, D), True),
        "GraphConv right": (lambda: dgl_nn.GraphConv(D, D, norm="right"), True),
        "GraphConv to few features": (lambda: dgl_nn.GraphConv(D, 4), False),
        "SAGE mean": (lambda: dgl_nn.SAGEConv(D, D, "mean"), True),
        "SAGE gcn": (lambda: dgl_nn.SAGEConv(D, D, "gcn"), True),
        "SAGE pool": (lambda: dgl_nn.SAGEConv(D, D, "pool"), False),
        "GIN": (lambda: dgl_nn.GINConv(torch.nn.Linear(D, D), "sum", learn_eps=True), True),
        "GIN mean": (lambda: dgl_nn.GINConv(torch.nn.Linear(D, D), "mean"), True),
        "GIN max": (lambda: dgl_nn.GINConv(torch.nn.Linear(D, D), "max"), False),
        "GAT": (lambda: dgl_nn.GATConv(D, 8, 2), False),
    }[name]
    return make(), by_entries


@pytest.mark.parametrize(
    "name",
    [
        *("GraphConv", "GraphConv right", "GraphConv to few features", "SAGE mean", "SAGE gcn", "SAGE pool"),
        *("GIN", "GIN mean", "GIN max", "GAT"),
    ],
)
def test_dgl_layers(name, sums):
    pytest.importorskip("dgl")
    graph, (conv, by_entries) = dgl_graph(), dgl_layer(name)
    same_as_dense(lambda h: conv(graph, h), sums, by_entries)


@pytest.mark.parametrize(
    "message,reduce,by_entries",
    [
        *(("copy_u", "sum", True), ("copy_u", "mean", True), ("u_mul_e", "sum", True), ("u_mul_e", "mean", True)),
        *(("copy_u", "max", False), ("u_add_e", "sum", False), ("udf", "sum", False)),
    ],
)
@pytest.mark.parametrize("weight_shape", [(), (1,)])
def test_dgl_update_all(message, reduce, by_entries, weight_shape, sums):
    fn = pytest.importorskip("dgl.function")
    graph = dgl_graph()
    weight = torch.rand(graph.num_edges(), *weight_shape)
    built_in = {
        "copy_u": lambda: fn.copy_u("h", "m"),
        "u_mul_e": lambda: fn.u_mul_e("h", "w", "m"),
        "u_add_e": lambda: fn.u_add_e("h", "w", "m"),
        "udf": lambda: lambda batch: {"m": batch.src["h"] * 2},
    }[message]

    def layer(h):
        with graph.local_scope():
            graph.ndata["h"], graph.edata["w"] = h, weight
            graph.update_all(built_in(), getattr(fn, reduce)("m", "out"))
            return graph.ndata["out"]

    same_as_dense(layer, sums, by_entries)


class Net(torch.nn.Module):
    """Two sums, a ReLU between them, and a head with a ReLU of its own."""

    def __init__(self, relu):
        super().__init__()
        self.first, self.second = pyg_nn.SAGEConv(12, D), pyg_nn.SAGEConv(D, D)
        self.head = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.ReLU(), torch.nn.Linear(D, 3))
        self.relu = relu

    def forward(self, x, edge_index):
        h = F.dropout(self.relu(self.first(x, edge_index)), 0.5, self.training)
        self.between = type(h)
        return self.head(self.second(h, edge_index))


@pytest.mark.parametrize(
    "relu,replaced",
    [
        *((F.relu, True), (torch.relu, True), (torch.Tensor.relu, True), (torch.nn.ReLU(), True)),
        *((torch.nn.ReLU(inplace=True), False), (torch.relu_, False), (F.elu, False)),
    ],
)
def test_accelerate(relu, replaced):
    model, edge_index, x = Net(relu), edges(), torch.randn(N, 12)
    names = list(model.state_dict())
    assert gnnaccel.accelerate(model, maxk=K) is model
    assert list(model.state_dict()) == names
    report.reset()
    model(x, edge_index).sum().backward()
    assert (model.between is CBSR) == replaced
    site = report.snapshot().get("maxk in place of a ReLU")
    if relu is F.elu:
        assert site is None
    else:
        assert (site.accelerated, site.left) == (int(replaced), int(not replaced))
    assert not torch.overrides._get_current_function_mode_stack()


def test_accelerated_is_a_model_with_maxk():
    model, edge_index, x = Net(F.relu).eval(), edges(), torch.randn(N, 12)
    gnnaccel.accelerate(model, maxk=3)
    gnnaccel.accelerate(model, maxk=K)  # the last one counts
    h = ops.maxk(model.first(x, edge_index), K)
    torch.testing.assert_close(model(x, edge_index), model.head(model.second(h, edge_index)))
    loaded = pickle.loads(pickle.dumps(Net(F.relu).eval()))
    loaded.load_state_dict(model.state_dict())
    gnnaccel.accelerate(loaded, maxk=K)
    torch.testing.assert_close(pickle.loads(pickle.dumps(loaded))(x, edge_index), model(x, edge_index))


@pytest.mark.parametrize("make", ["GraphSAGE", "GIN", "GCN"])
def test_pyg_models(make):
    model, edge_index = getattr(pyg_nn, make)(12, D, 3, 5), edges()
    gnnaccel.accelerate(model, maxk=K)
    report.reset()
    model(torch.randn(N, 12), edge_index).sum().backward()
    assert report.snapshot()["maxk in place of a ReLU"].accelerated == 2  # not the ReLUs inside of GIN's layers


def test_dgl_model():
    dgl_nn = pytest.importorskip("dgl.nn")

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList(
                [dgl_nn.GraphConv(12, D), dgl_nn.GraphConv(D, D), dgl_nn.SAGEConv(D, 5, "mean")]
            )

        def forward(self, graph, x):
            x = self.convs[0](graph, x).relu()
            return self.convs[2](graph, F.relu(self.convs[1](graph, x)))

    model = gnnaccel.accelerate(Three(), maxk=K)
    report.reset()
    model(dgl_graph(), torch.randn(N, 12)).sum().backward()
    assert report.snapshot()["maxk in place of a ReLU"].accelerated == 2


def test_an_error_in_a_forward():
    class Broken(Net):
        def forward(self, x, edge_index):
            self.first(x, edge_index)
            raise KeyError("broken")

    model = gnnaccel.accelerate(Broken(F.relu), maxk=K)
    with pytest.raises(KeyError):
        model(torch.randn(N, 12), edges())
    assert not torch.overrides._get_current_function_mode_stack()


def test_arguments():
    for model, k, error in (
        (torch.nn.Linear(3, 3), 2, ValueError),
        (Net(F.relu), 0, ValueError),
        (Net(F.relu), 1.5, TypeError),
        ("model", 2, TypeError),
    ):
        with pytest.raises(error, match="accelerate"):
            gnnaccel.accelerate(model, maxk=k)
