"""dgl.nn.GATConv as one op, and layers on sampled blocks and under autocast."""

import copy

import pytest
import torch
from dgl_cases import CASES
from dgl_compare import assert_same, both, compare, dgl, graph, rand, status

from gnnaccel import _library, dgl_backend
from gnnaccel.ops import normed_layers

import dgl.nn as dglnn  # isort: skip  (after the shim)

pytestmark = pytest.mark.usefixtures("dgl_restored")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gat_fuses_with_the_same_random_draws(dropout):
    torch.manual_seed(3)
    layer = dglnn.GATConv(6, 4, num_heads=3, feat_drop=dropout, attn_drop=dropout).double()
    g = graph(loops=True)
    counted = compare(lambda m, x: m(g, x), [rand(40, 6)], layer)
    assert counted["dgl.GATConv"].accelerated == 1
    counted = compare(lambda m, x: m(g, x, get_attention=True), [rand(40, 6)], layer.eval())
    assert "dgl.GATConv" not in counted


@pytest.mark.parametrize("options", [{}, {"activation": torch.nn.ELU(inplace=True)}, {"residual": True}])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [4, 5])
def test_gat_results_may_be_written_into(width, bias, options):
    layer, g = dglnn.GATConv(6, width, num_heads=2, bias=bias, **options).double(), graph(loops=True)
    write = (lambda out: out) if "activation" in options else torch.relu_
    counted = compare(lambda m, x: write(m(g, x)), [rand(40, 6)], layer)
    assert counted["dgl.GATConv"].accelerated == 1


@pytest.mark.parametrize("kind", ["AGNNConv", "DotGatConv"])
def test_dot_attention_layers(kind):
    """One op where they are plain ones, whose result may be written into; DGL's own forward elsewhere."""
    torch.manual_seed(3)
    layer = (dglnn.AGNNConv() if kind == "AGNNConv" else dglnn.DotGatConv(6, 4, 2)).double()
    g = graph(loops=True)
    counted = compare(lambda m, x: torch.relu_(m(g, x)), [rand(40, 6)], layer)
    assert counted[f"dgl.{kind}"].accelerated == 1
    if kind == "AGNNConv":
        layer.beta = torch.nn.Parameter(torch.linspace(0, 3, 6).double())  # a temperature for each feature
        counted = compare(lambda m, x: m(g, x), [rand(40, 6)], layer)
    else:
        counted = compare(lambda m, x: m(g, x, get_attention=True), [rand(40, 6)], layer)
    assert f"dgl.{kind}" not in counted


@pytest.mark.skipif(_library.isa() == "baseline", reason="torch's products are the faster there")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_gin_s_maps_are_one_op(hooked, norm, monkeypatch):
    nn, calls = torch.nn, []
    torch.manual_seed(3)
    between = [nn.BatchNorm1d(9), nn.ReLU()][0 if norm else 1 :]
    layer = dglnn.GINConv(nn.Sequential(nn.Linear(6, 9), *between, nn.Linear(9, 4), nn.ReLU()))
    if hooked:
        layer.apply_func[1].register_forward_hook(lambda *_: None)
    exact, g, x = copy.deepcopy(layer).double(), graph(loops=True), torch.randn(40, 6)
    made = normed_layers.normed_layers
    monkeypatch.setattr(normed_layers, "_PAYS", True)  # on any CPU
    monkeypatch.setattr(normed_layers, "normed_layers", lambda *given: calls.append(1) or made(*given))
    want = exact(g, x.double())
    dgl_backend.enable()
    try:
        got = layer(g, x)
    finally:
        dgl_backend.disable()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for one, other in zip(layer.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5)
    assert len(calls) == (0 if hooked else 1)


@pytest.mark.parametrize("kind", ["Sequential", "Linear", "BatchNorm1d", "ReLU"])
def test_gin_calls_classes_whose_forward_was_replaced(kind, monkeypatch):
    nn = torch.nn
    layer = dglnn.GINConv(nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4)))
    dgl_backend.enable()
    cls, calls = getattr(nn, kind), []
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: calls.append(1) or forward(self, x))
    layer(graph(loops=True), torch.randn(40, 6))
    assert calls


def test_gin_with_a_place_left_empty_raises_as_dgl_s():
    nn = torch.nn
    layer = dglnn.GINConv(nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4)))
    layer.apply_func[1] = None
    dgl_backend.enable()
    try:
        with pytest.raises(TypeError, match="not callable"):
            layer(graph(loops=True), torch.randn(40, 6))
    finally:
        dgl_backend.disable()


@pytest.mark.parametrize(
    "options", [{}, {"residual": False, "bias": False}, {"attn_drop": 0.5, "activation": torch.relu}]
)
@pytest.mark.parametrize("weights", [False, True])
def test_edge_gat_maps_sums_of_edge_features(options, weights):
    torch.manual_seed(3)
    layer, g = dglnn.EdgeGATConv(6, 3, 4, num_heads=2, **options).double(), graph(loops=True)
    call = lambda m, x, e: m(g, x, e, get_attention=weights)  # noqa: E731
    counted = compare(call, [rand(40, 6), rand(g.num_edges(), 3)], layer)
    assert counted["dgl.EdgeGATConv"].accelerated == 1
    layer.fc_edge.register_forward_hook(lambda *_: None)
    assert "dgl.EdgeGATConv" not in compare(call, [rand(40, 6), rand(g.num_edges(), 3)], layer)


def test_gat_dropout_follows_its_own_mode():
    torch.manual_seed(3)
    layer, g = dglnn.GATConv(6, 4, num_heads=2, attn_drop=0.5).double().eval(), graph(loops=True)
    layer.attn_drop.train()
    compare(lambda m, x: m(g, x), [rand(40, 6)], layer)
    seen = []
    hooked = copy.deepcopy(layer)
    hooked.attn_drop.register_forward_hook(lambda module, given, out: seen.append(given[0].shape))
    assert "dgl.GATConv" not in compare(lambda m, x: m(g, x), [rand(40, 6)], hooked) and seen


def test_gat_leaves_wrong_features_to_dgl():
    dgl_backend.enable()
    with pytest.raises(dgl.DGLError):
        dglnn.GATConv(6, 4, num_heads=2)(graph(loops=True), torch.zeros(39, 6))


def test_gat_refuses_nodes_without_edges_as_dgl_does():
    g, layer = graph(num_edges=10), dglnn.GATConv(6, 4, num_heads=2)
    dgl_backend.enable()
    with pytest.raises(dgl.DGLError, match="0-in-degree"):
        layer(g, torch.zeros(40, 6))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_sampled_blocks(idtype):
    dgl_backend.enable()
    g = graph(200, 4000, idtype=idtype)
    x = rand(200, 5)
    layer = dglnn.SAGEConv(5, 3, "mean").double()
    sampler = dgl.dataloading.NeighborSampler([4, 4])
    loader = dgl.dataloading.DataLoader(g, torch.arange(100, dtype=idtype), sampler, batch_size=25)
    for inputs, _, blocks in loader:
        h = x[inputs.long()]
        for block in blocks:
            u, _ = block.edges()
            assert block.num_edges() == 0 or int(u.max()) < block.num_src_nodes()
        dgl_backend.disable()
        expected = layer(blocks[0], h)
        dgl_backend.enable()
        torch.testing.assert_close(layer(blocks[0], h), expected)


_LAYERS = ("GraphConv(norm='both')", "SAGEConv('mean')", "GATConv(residual=True)", "GATv2Conv", "GINEConv", "EGATConv")
_LAYERS += ("SAGEConv('pool')", "HeteroGraphConv('sum')", "RelGraphConv(regularizer='basis', num_bases=2)")
_IN_16_BITS = {_LAYERS[-1]: "partly"}  # by DGL's own message, whose product is one of 16 bits


@pytest.mark.parametrize("name", _LAYERS)
def test_layers_under_autocast(name):
    case = CASES[name]
    call, inputs, module = case.bind(case.graphs[0], dtype=torch.float32)

    def autocast(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return call(*args)

    want, got, counted = both(autocast, inputs, module)
    assert_same(got, want, 0.05, name)
    if isinstance(want, dict):  # DGL refuses the mixture of dtypes that some layers make
        assert status(counted)[0] == _IN_16_BITS.get(name, case.expect)


_CALLS = {
    "a hook before the backward of the activation": lambda m: m._activation.register_full_backward_pre_hook(
        lambda module, grad: tuple(2 * g for g in grad)
    ),
    "another forward of the activation": lambda m: setattr(m._activation, "forward", torch.tanh),
}


@pytest.mark.parametrize("change", _CALLS.values(), ids=_CALLS)
def test_watched_activations_are_called(change):
    layer, g = dglnn.GraphConv(6, 4, activation=torch.nn.ReLU()).double(), graph(loops=True)
    change(layer)
    compare(lambda m, x: m(g, x), [rand(40, 6)], layer)


def test_a_watched_leaky_relu_is_called():
    for layer in (dglnn.GATConv(6, 4, 2), dglnn.GATv2Conv(6, 4, 2)):
        layer.leaky_relu.forward = torch.tanh
        counted = compare(lambda m, x: m(graph(loops=True), x), [rand(40, 6)], layer.double())
        assert not counted.keys() & {"dgl.GATConv", "dgl.GATv2Conv"}


@pytest.mark.parametrize("norm", ["none", "both", "left", "right"])
@pytest.mark.parametrize(
    "activation", [None, torch.relu, torch.nn.ReLU(), torch.nn.functional.elu], ids=["none", "relu", "ReLU", "elu"]
)
@pytest.mark.parametrize("inputs", [6, 4, 3])
def test_graph_conv_in_one_op(inputs, activation, norm):
    g = graph(loops=True)
    layer = dglnn.GraphConv(inputs, 4, norm=norm, activation=activation).double()
    torch.nn.init.normal_(layer.bias)
    counted = compare(lambda m, x: m(g, x), [rand(40, inputs)], layer)
    assert counted["dgl.GraphConv"].accelerated == 1
    weights = rand(g.num_edges())
    counted = compare(lambda m, x, w: m(g, x, edge_weight=w), [rand(40, inputs), weights], layer)
    assert counted["dgl.GraphConv"].accelerated == 1


def test_graph_conv_leaves_the_unusual_to_dgl():
    """Broadcasts and promotions, wrong tuples, wrong widths: results or errors are DGL's."""
    g, x = graph(loops=True), rand(40, 6)
    wide = dglnn.GraphConv(1, 5, weight=False).double()
    compare(lambda m, x: m(g, x), [rand(40, 1)], wide)
    mixed = dglnn.GraphConv(6, 4)
    mixed.bias.data = mixed.bias.data.double()
    compare(lambda m, x: m(g, x), [x.float()], mixed)
    for make in (lambda: dglnn.GraphConv(6, 4), lambda: dglnn.GATv2Conv(6, 4, 2), lambda: dglnn.GATConv(6, 4, 2)):
        layer, said = make().double(), []
        for switch in (dgl_backend.disable, dgl_backend.enable):
            switch()
            with pytest.raises(Exception) as error:
                layer(g, (x,))
            said.append(type(error.value))
        assert said[0] is said[1]


def test_gatv2_vectors_that_heads_share():
    layer, g = dglnn.GATv2Conv(6, 4, 2).double(), graph(loops=True)
    layer.attn = torch.nn.Parameter(rand(1, 1, 4))
    compare(lambda m, x: m(g, x), [rand(40, 6)], layer)


def test_edge_weights_that_nobody_differentiates_may_change():
    dgl_backend.enable()
    g, layer = graph(loops=True), dglnn.GraphConv(6, 6, weight=False)
    weights = torch.ones(g.num_edges())
    out = layer(g, torch.ones(40, 6), edge_weight=weights)
    weights.add_(1)
    out.sum().backward()
    assert layer.bias.grad.tolist() == [40.0] * 6
