"""torch.compile, TorchScript, torch.export and FX on accelerated models: PyG's results, without a graph break."""

import copy

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import LAYERS, D, E, N, assert_equal, backward, edges, grads, rand, same, train
from torch_geometric import nn
from torch_geometric.nn import models

from gnnaccel import pyg_backend, report


class Transformer(models.basic_gnn.BasicGNN):
    supports_edge_weight, supports_edge_attr = False, True

    def init_conv(self, in_channels, out_channels, **kwargs):
        return nn.TransformerConv(in_channels, out_channels, heads=2, concat=False, **kwargs)


MODELS = {
    "GCN": lambda: models.GCN(D, 8, 2, 3),
    "SAGE": lambda: models.GraphSAGE(D, 8, 2, 3),
    "SAGE max": lambda: models.GraphSAGE(D, 8, 2, 3, aggr="max"),
    "GIN": lambda: models.GIN(D, 8, 2, 3),
    "GAT": lambda: models.GAT(D, 8, 2, 3, heads=2),
    "GATv2": lambda: models.GAT(D, 8, 2, 3, heads=2, v2=True),
    "Transformer": lambda: Transformer(D, 8, 2, 3),
    "EdgeCNN": lambda: models.EdgeCNN(D, 8, 2, 3),
}
SIZES = [(N, E), (N + 7, E + 31), (N - 5, E - 40)]  # of three graphs, so that shapes become symbols


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graphs():
    return [(rand(n, D, seed=n, grad=True), edges(n, n, e, seed=n)) for n, e in SIZES]


def compiles(name, backend):
    """Compiled and accelerated against PyG's own, not compiled: three sizes of graph, forward and backward."""
    torch.set_num_threads(1)
    plain = MODELS[name]()
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)  # fullgraph: a graph break raises
    for x, index in graphs():
        results = []
        for net, call in ((model, run), (plain, plain)):
            net.zero_grad()
            leaf = x.detach().clone().requires_grad_()
            results.append((train(call, leaf, index)["out"], grads(net, leaf)))
        assert_equal(*results)
    assert_equal(train(model, *graphs()[0])["out"], plain(*graphs()[0]))


@pytest.mark.parametrize("name", MODELS)
def test_compiled_whole(name):
    compiles(name, "eager")


# With a forward(), or a part of it, that is ours.
WITH_OURS = {
    name: lambda name=name: getattr(nn, name)(D, D)
    for name in ("ARMAConv", "FiLMConv", "GENConv", "HypergraphConv", "LEConv", "ResGatedGraphConv")
}
WITH_OURS |= {"ChebConv": lambda: nn.ChebConv(D, D, 2), "SignedConv": lambda: nn.SignedConv(D, D, True)}


@pytest.mark.parametrize("name", WITH_OURS)
def test_layers_compiled_whole(name):
    plain = WITH_OURS[name]()
    layer, x, index = pyg_backend.accelerate(copy.deepcopy(plain)), rand(N, D), edges()
    more = (index.flip(0),) if name == "SignedConv" else ()
    run = torch.compile(layer, fullgraph=True, backend="eager")
    assert_equal(run(x, index, *more), plain(x, index, *more))


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_compiled_whole_with_its_backward(name):
    compiles(name, "aot_eager")


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_compiled_after_use(name):
    """Plain calls, compiled calls and toggling in turn: nothing compiled survives as something else."""
    plain = MODELS[name]().double()
    model, x, index = copy.deepcopy(plain), rand(N, D).double(), edges()
    expected = plain(x, index)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for change in (lambda: None, lambda: pyg_backend.accelerate(model), pyg_backend.disable):
        change()
        assert_equal([model(x, index), compiled(x, index), model(x, index)], [expected] * 3)


def test_compiled_parts():
    """A compiled layer inside a model that is not, and a compiled step of the flag's own model with a weight."""

    def program(wrap):
        model = wrap(MODELS["GCN"]())
        model.convs[0] = torch.compile(model.convs[0], backend="eager", dynamic=True)
        x, index = graphs()[0]
        weight = rand(E, grad=True)

        @torch.compile(backend="eager", fullgraph=True, dynamic=True)
        def step(x, index, weight):
            return last(x, index, weight.sigmoid())

        last = wrap(LAYERS["GCN"]())
        out = step(x, index, weight)
        backward(out)
        return out, grads(last, x, weight), train(model, x.detach(), index)

    same(program)


def test_compile_is_counted():
    """Once for each layer of a compilation: as ours, or as PyG's."""
    model = torch.nn.ModuleList([models.GCN(D, 8, 2, 3), nn.EdgeConv(torch.nn.Linear(6, 3))])
    model = pyg_backend.accelerate(model)

    def run(x, index):
        return model[1](model[0](x, index), index)

    report.reset()
    for _ in range(2):
        torch.compile(run, backend="eager", fullgraph=True)(rand(N, D), edges())
    sites = report.snapshot()
    assert (sites["pyg.GCNConv"].accelerated, sites["pyg.GCNConv"].left) == (2, 0)
    assert (sites["pyg.EdgeConv"].accelerated, sites["pyg.EdgeConv"].reasons) == (0, {"torch.compile": 1})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["GCN", "SAGE", "SAGE max", "GraphConv", "GIN", "GAT", "GATv2", "Transformer"])
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript(name, kind):
    """Where PyG can be scripted or traced; where it cannot, the error is of the same type."""

    def program(wrap):
        layer, x, index = wrap(LAYERS[name]()), rand(N, D, grad=True), edges()
        try:
            if kind == "script":
                run = torch.jit.script(layer)
            else:
                run = torch.jit.trace(layer, (x, index), check_trace=False)
            out = run(x, index)
            backward(out)
            results = out, grads(layer, x), run(rand(N, D, seed=5), edges(seed=5)), sorted(run.state_dict())
        except Exception as error:
            results = type(error).__name__
        return results, layer(x, index)

    same(program)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT"])
def test_export(name):
    def program(wrap):
        model, (x, index) = wrap(MODELS[name]()).eval(), graphs()[0]
        x = x.detach()
        try:
            exported = torch.export.export(model, (x, index))
            assert not any("gnnaccel" in str(node.target) for node in exported.graph.nodes)  # runs without it
            exported = exported.module()
            results = exported(x, index), exported(x * 2, index.flip(0))
        except Exception as error:
            results = type(error).__name__
        return results, model(x, index)

    same(program)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch 2.11 crashes on loading PyG's own package")
def test_ahead_of_time(tmp_path):
    """AOTInductor's package of an accelerated model: PyG's numbers, for any number of edges, without an op of ours."""
    plain = LAYERS["SAGE"]()
    model, (x, index) = pyg_backend.accelerate(copy.deepcopy(plain)).eval(), graphs()[0]
    dynamic = {"x": None, "edge_index": {1: torch.export.Dim("edges", min=2)}}
    exported = torch.export.export(model, (x.detach(), index), dynamic_shapes=dynamic)
    assert not any("gnnaccel" in str(node.target) for node in exported.graph.nodes)
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    where = str(tmp_path / "model.pt2")
    path = torch._inductor.aoti_compile_and_package(exported, package_path=where, inductor_configs=quick)
    run = torch._inductor.aoti_load_package(path)
    with torch.no_grad():
        for given in (index, edges(seed=5), edges(count=E - 30, seed=6)):
            assert_equal(run(x.detach(), given), plain(x.detach(), given))
    assert_equal(model(x, index), plain(x, index))  # and it is ours as before


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT"])
def test_fx_trace_of_a_model(name):
    """PyG's own tracer keeps layers whole; torch's goes into them, and fails or not as with PyG alone."""

    def program(wrap):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.lin = LAYERS[name](), torch.nn.LazyLinear(3)

            def forward(self, x, edge_index):
                return self.lin(self.conv(x, edge_index).relu())

        model, (x, index) = wrap(Net()), graphs()[0]
        expected = model(x, index)
        tracer = nn.fx.Transformer(model)
        traced = torch.fx.GraphModule(model, tracer.graph)
        try:
            other = torch.fx.symbolic_trace(model)(x, index)
        except Exception as error:
            other = type(error).__name__
        return expected, traced(x, index), other

    same(program)
