"""A layer's first call on few edges runs PyG's own code where that is wanted (on CUDA); later ones run ours."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn

import gnnaccel
from gnnaccel import pyg_backend, report
from gnnaccel.lower import bounds, choose
from gnnaccel.pyg_backend.propagate import NEW

N, E, D = 12, 40, 6
LAYERS = {
    "GCN": lambda: nn.GCNConv(D, D),
    "GCN cached": lambda: nn.GCNConv(D, D, cached=True),
    "SAGE": lambda: nn.SAGEConv(D, D),
    "GIN": lambda: nn.GINConv(nn.MLP([D, D, D], norm=None)),
    "GAT": lambda: nn.GATConv(D, D, heads=2),
    "GATv2": lambda: nn.GATv2Conv(D, D),
    "Transformer": lambda: nn.TransformerConv(D, D),
    "ResGated": lambda: nn.ResGatedGraphConv(D, D),
    "APPNP": lambda: nn.APPNP(3, 0.1),
    "GEN": lambda: nn.GENConv(D, D),
    "FA": lambda: nn.FAConv(D),
}


@pytest.fixture
def at_first(monkeypatch):
    monkeypatch.setattr(bounds, "FEW_AT_FIRST", {"cpu": E * D})


def edges(count=E, seed=1):
    return torch.randint(0, N, (2, count), generator=torch.Generator().manual_seed(seed))


def run(layer, edge_index, *more):
    """Outputs and gradients, and whether the call was left to PyG as one of new edges."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(2)).requires_grad_()
    given = (x, x.detach()) if isinstance(layer, nn.FAConv) else (x,)
    report.reset()
    out = layer(*given, edge_index, *more)
    left = any(NEW in site.reasons for site in report.snapshot().values())
    ours = any(site.accelerated for site in report.snapshot().values())
    assert left != ours or not report.snapshot()
    wanted = [x, *layer.parameters()]
    return left, [out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]


@pytest.mark.parametrize("name", LAYERS)
def test_the_second_call_is_ours(name, at_first):
    plain = LAYERS[name]()
    layer, index = pyg_backend.accelerate(copy.deepcopy(plain)), edges()
    for number in range(4):
        left, got = run(layer, index)
        assert left == (number == 0) and bool(report.snapshot())
        for one, other in zip(got, run(plain, index)[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert run(layer, index.clone())[0]  # other edges


def test_each_layer_sees_a_batch_once(at_first, monkeypatch):
    """Two layers that use the edges of a batch once each leave both calls to PyG; one that comes again has all ours."""
    one, two = (pyg_backend.accelerate(nn.SAGEConv(D, D)) for _ in range(2))
    index = edges()
    assert run(one, index)[0] and run(two, index)[0]
    assert not run(two, index)[0] and not run(one, index)[0]
    assert not run(pyg_backend.accelerate(nn.SAGEConv(D, D)), index)[0]
    index[0, 0] = (index[0, 0] + 1) % N  # written into: edges that nobody has seen
    assert run(one, index)[0]
    for age in ("new", "lasting"):
        monkeypatch.setattr(choose, "fixed", age)
        other = edges()
        assert [run(one, other)[0] for _ in range(3)] == [age == "new"] * 3


def test_what_is_never_left(at_first, monkeypatch):
    layer = pyg_backend.accelerate(nn.SAGEConv(D, D))
    assert not run(layer, edges(E + 1))[0]  # many
    assert not run(layer, edges().int())[0]
    prepared = edges()
    gnnaccel.prepare(prepared, num_nodes=N)
    assert not run(layer, prepared)[0]
    with choose.lasting():  # to be captured
        assert not run(layer, edges())[0]
    monkeypatch.setattr(bounds, "FEW_AT_FIRST", {})
    assert not run(layer, edges())[0]


@pytest.mark.parametrize("cls", [nn.RGCNConv, nn.FastRGCNConv])
def test_what_pyg_calls_for_each_relation_is_ours_at_once(cls, at_first):
    plain = cls(D, D, 3)
    layer, index = pyg_backend.accelerate(copy.deepcopy(plain)), edges()
    types = torch.arange(E) % 3
    left, got = run(layer, index, types)
    assert not left
    for one, other in zip(got, run(plain, index, types)[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_class_changed_by_the_user(at_first):
    """PyG's own forward() is looked up when it is called."""

    class Mine(nn.SAGEConv):
        pass

    layer = pyg_backend.accelerate(Mine(D, D))
    Mine.forward = lambda self, x, edge_index: x * 2
    x = torch.ones(N, D)
    for _ in range(3):
        assert torch.equal(layer(x, edges()), x * 2)


def left_and_ours(run):
    report.reset()
    out = run()
    sites = report.snapshot().values()
    return out, sum(site.left for site in sites), sum(site.accelerated for site in sites)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["GCN", "GAT", "SAGE", "ResGated"])
def test_checkpoints_save_the_same_again(name, reentrant, at_first):
    plain = LAYERS[name]()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    grads = []
    for conv in (plain, layer):
        x = torch.randn(N, D, generator=torch.Generator().manual_seed(2)).requires_grad_()
        checkpoint(conv, x, edges(), use_reentrant=reentrant).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_transforms_that_wrap_the_edges(at_first):
    plain = nn.SAGEConv(D, D)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, indices = torch.randn(2, N, D), torch.stack([edges(), edges(seed=2)])
    torch.testing.assert_close(torch.vmap(layer)(x, indices), torch.vmap(plain)(x, indices))


class Nesting(nn.MessagePassing):
    """Whose message() calls a layer on other edges."""

    def __init__(self, inner):
        super().__init__(aggr="sum")
        self.inner = inner

    def forward(self, x, edge_index, other):
        return self.propagate(edge_index, x=x, x0=(x, x), other=other)

    def message(self, x_j, x0, other):
        self.result = self.inner(x0[0], other)
        return x_j


@pytest.mark.parametrize("why", ["new edges", "a hook", "explained", "int32"])
@pytest.mark.parametrize("name", ["SAGE", "Transformer", "ResGated", "GEN"])
def test_a_layer_inside_a_message(name, why, at_first):
    """PyG's own code of a layer does not use the edges of a call around it."""
    inner = LAYERS[name]()
    plain = Nesting(inner)
    layer, index, x = pyg_backend.accelerate(copy.deepcopy(plain)), edges(), torch.randn(N, D)
    if why == "a hook":
        layer.inner.register_propagate_forward_hook(lambda *given: None)
    if why == "explained":
        layer.inner.explain = True
        layer.inner.explain = False
    for _ in range(3):
        other = edges(seed=2).int() if why == "int32" else edges(seed=2)
        torch.testing.assert_close(layer(x, index, other), plain(x, index, edges(seed=2)))
        torch.testing.assert_close(layer.inner(x, other), inner(x, other.long()))
        torch.testing.assert_close(layer.result, plain.result)


def test_a_layer_inside_another_has_its_own_first_call(at_first):
    class Inside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.index = nn.GATConv(D, D), edges(seed=3)

        def forward(self, x):
            return self.conv(x, self.index)

    layer = pyg_backend.accelerate(nn.GINConv(Inside()))
    for number in range(3):
        report.reset()
        layer(torch.randn(N, D), edges())
        sites = report.snapshot()
        assert sites["pyg.GINConv"].left == 1 and sites["pyg.GATConv"].left == (number == 0)
        assert sites["pyg.GATConv"].accelerated == (number > 0)


def test_each_propagate_is_counted_once(at_first):
    x = torch.randn(N, D)
    for layer, calls in ((nn.APPNP(3, 0.1), 3), (nn.SAGEConv(D, D), 1)):
        layer, index = pyg_backend.accelerate(layer), edges()
        for number in range(2):
            _, left, ours = left_and_ours(lambda layer=layer, index=index: layer(x, index))
            assert (left, ours) == ((calls, 0) if number == 0 else (0, ours)) and (ours > 0) == (number > 0)
    layer = pyg_backend.accelerate(nn.SAGEConv(D, D))
    layer.register_propagate_forward_hook(lambda *given: None)
    assert left_and_ours(lambda: layer(x, edges()))[1:] == (1, 0)


def test_messages_that_a_layer_widens(at_first):
    """Features of one number, and messages of many: those are counted."""
    index, x = edges(), torch.randn(N, 1)
    assert left_and_ours(lambda: pyg_backend.accelerate(nn.GCNConv(1, 8 * D))(x, index))[2] == 0
    assert left_and_ours(lambda: pyg_backend.accelerate(nn.GCNConv(1, 8 * D + 1))(x, index))[1] == 0
    assert left_and_ours(lambda: pyg_backend.accelerate(nn.GCNConv(-1, D))(x, edges()))[2] == 0
