"""MaxK in front of the layers of DGL and PyG, and in place of the ReLUs of whole models."""

import copy
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel import ops
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

    def __init__(self, relu=None):
        super().__init__()
        self.first, self.second = pyg_nn.SAGEConv(12, D), pyg_nn.SAGEConv(D, D)
        self.head = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.ReLU(), torch.nn.Linear(D, 3))
        self.act = torch.nn.ReLU() if relu is None else relu

    def forward(self, x, edge_index):
        h = F.dropout(self.act(self.first(x, edge_index)), 0.5, self.training)
        return self.head(self.second(h, edge_index))


class CallsRelu(Net):
    def forward(self, x, edge_index):
        return self.head(self.second(self.act(self.first(x, edge_index)).relu(), edge_index))


def kept(model) -> list[str]:
    """Where a model has MaxK."""
    return [name for name, module in model.named_modules() if isinstance(module, gnnaccel.nn.MaxK)]


@pytest.mark.parametrize("relu", [torch.nn.ReLU(), torch.nn.ReLU(inplace=True)])
def test_accelerate(relu, caplog):
    model, edge_index, x = Net(relu).eval(), edges(), torch.randn(N, 12)
    names = list(model.state_dict())
    assert gnnaccel.accelerate(model, maxk=3) is model
    assert gnnaccel.accelerate(model, maxk=K) is model  # the last one counts
    assert list(model.state_dict()) == names
    assert kept(model) == ["act"]
    assert not model.act.training
    assert not caplog.records
    h = ops.maxk(model.first(x, edge_index), K)
    out = model(x, edge_index)
    torch.testing.assert_close(out, model.head(model.second(h, edge_index)))
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(other(x, edge_index), out)
    out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    model, edge_index, x = gnnaccel.accelerate(Net(), maxk=K).eval(), edges(), torch.randn(N, 12, requires_grad=True)
    want = torch.autograd.grad(model(x, edge_index).square().sum(), x)[0]
    checkpoint(model, x, edge_index, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, want)


def test_relu_that_a_forward_calls(caplog):
    model = gnnaccel.accelerate(CallsRelu(), maxk=K)
    assert kept(model) == ["act"]
    assert "CallsRelu calls relu itself" in caplog.text
    with pytest.raises(ValueError, match="CallsRelu calls relu itself"):
        gnnaccel.accelerate(CallsRelu(torch.nn.ELU()), maxk=K)


def test_which_relus():
    relu = torch.nn.ReLU
    conv = (pyg_nn.GCNConv(D, D), "x, edge_index -> x")
    in_order = pyg_nn.Sequential("x, edge_index", [conv, relu(), conv, relu(), torch.nn.Linear(D, 2)])
    lists = torch.nn.Module()
    lists.acts, lists.convs = torch.nn.ModuleList([relu(), relu()]), torch.nn.ModuleList([pyg_nn.GCNConv(D, D)])
    lists.mlp = torch.nn.Sequential(torch.nn.Linear(3, 3), relu())
    mixed = torch.nn.Module()
    mixed.parts = torch.nn.ModuleList([pyg_nn.GCNConv(D, D), relu(), pyg_nn.GCNConv(D, D), relu()])
    nested = torch.nn.Module()
    nested.net, nested.after = Net(), relu()
    for model, names in (
        (in_order, [list(in_order._modules)[1]]),
        (lists, ["acts.0", "acts.1"]),
        (mixed, ["parts.1"]),
        (nested, ["net.act"]),
    ):
        assert kept(gnnaccel.accelerate(model, maxk=K)) == names


@pytest.mark.parametrize("make", ["GraphSAGE", "GIN", "GCN", "GAT"])
def test_compiled(make):
    """Outputs and gradients as without torch.compile, also where what reads the kept rows is compiled apart."""
    torch.manual_seed(0)
    model, x, edge_index = getattr(pyg_nn, make)(12, D, 2, 5).double(), torch.randn(N, 12).double(), edges()
    gnnaccel.accelerate(model, maxk=K)
    seen = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        out = run(x, edge_index)
        out.square().sum().backward()
        seen.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("make", ["GraphSAGE", "GIN", "GCN"])
def test_pyg_models(make):
    """Not the ReLUs inside of GIN's layers; layer by layer, as inference() does, too."""
    model, edge_index = getattr(pyg_nn, make)(12, D, 3, 5).eval(), edges()
    gnnaccel.accelerate(model, maxk=K)
    assert kept(model) == ["act"]
    x = torch.randn(N, 12)
    h = model.convs[1](ops.maxk(model.convs[0](x, edge_index), K).to_dense(), edge_index)
    want = model.convs[2](ops.maxk(h, K).to_dense(), edge_index)
    torch.testing.assert_close(model(x, edge_index), want, rtol=1e-4, atol=1e-4)


def test_dgl_model(sums):
    dgl_nn = pytest.importorskip("dgl.nn")

    class Three(torch.nn.Module):
        def __init__(self):
            super().__init__()
            convs = [dgl_nn.GraphConv(12, D), dgl_nn.GraphConv(D, D), dgl_nn.SAGEConv(D, 5, "mean")]
            self.convs, self.relu = torch.nn.ModuleList(convs), torch.nn.ReLU()

        def forward(self, graph, x):
            for conv in self.convs[:-1]:
                x = self.relu(conv(graph, x))
            return self.convs[-1](graph, x)

    model, graph, x = Three(), dgl_graph(), torch.randn(N, 12)
    gnnaccel.accelerate(model, maxk=K)
    model(graph, x).sum().backward()
    assert sums[0] == 1  # the last layer maps to five features first
    gnnaccel.uninstall()
    try:
        with pytest.raises(ValueError, match="install"):
            gnnaccel.accelerate(Three(), maxk=K)
    finally:
        gnnaccel.install()


def test_dgl_reads_memory(tmp_path):
    """What DGL does past its message passing gets the dense tensor."""
    dgl = pytest.importorskip("dgl")
    graph, h = dgl_graph(), ops.maxk(torch.randn(N, D), K)
    graph.ndata["h"] = h
    dgl.save_graphs(str(tmp_path / "g.bin"), [graph])
    assert torch.equal(dgl.load_graphs(str(tmp_path / "g.bin"))[0][0].ndata["h"], h.to_dense())


def test_layers_that_do_not_commute(sums):
    """GCNConv's linear map stays in front of all but sums of weighted rows, and where it is more than a product."""

    class Tanh(pyg_nn.GCNConv):
        def message(self, x_j, edge_weight):
            return torch.tanh(x_j) * edge_weight.view(-1, 1)

    class After(pyg_nn.GCNConv):
        def update(self, out):
            return out.tanh()

    class Relu(pyg_nn.GCNConv):
        def aggregate(self, inputs, index, ptr=None, dim_size=None):
            return super().aggregate(inputs, index, ptr, dim_size).relu()

    biased = pyg_nn.GCNConv(D, D)
    biased.lin = pyg_nn.Linear(D, D, bias=True)
    other = pyg_nn.GCNConv(D, D)
    other.lin = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh())
    edge_index = edges()
    mean = pyg_nn.GCNConv(D, D, aggr="mean")
    same_as_dense(lambda h: mean(h, edge_index), sums, True)
    for conv in (pyg_nn.GCNConv(D, D, aggr="max"), Tanh(D, D), After(D, D), Relu(D, D), biased, other):
        same_as_dense(lambda h, c=conv: c(h, edge_index), sums, False)


def test_arguments():
    for model, k, error in (
        (torch.nn.Linear(3, 3), 2, ValueError),
        (Net(), 0, ValueError),
        (Net(), 1.5, TypeError),
        ("model", 2, TypeError),
    ):
        with pytest.raises(error, match="accelerate"):
            gnnaccel.accelerate(model, maxk=k)
