"""A layer's first call on few edges runs PyG's own code where that is wanted (on CUDA); later ones run ours."""

import copy

import pytest
import torch
from torch_geometric import nn

import gnnaccel
from gnnaccel import pyg_backend, report
from gnnaccel.lazy import blocks
from gnnaccel.pyg_backend import first_calls

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
    monkeypatch.setattr(blocks, "FEW_AT_FIRST", {"cpu": E * D})


def edges(count=E, seed=1):
    return torch.randint(0, N, (2, count), generator=torch.Generator().manual_seed(seed))


def run(layer, edge_index, *more):
    """Outputs and gradients, and whether the call was left to PyG as one of new edges."""
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(2)).requires_grad_()
    given = (x, x.detach()) if isinstance(layer, nn.FAConv) else (x,)
    report.reset()
    out = layer(*given, edge_index, *more)
    left = any(first_calls.REASON in site.reasons for site in report.snapshot().values())
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


def test_each_layer_sees_a_batch_once(at_first):
    """Two layers that use the edges of a batch once each leave both calls to PyG; one that comes again has all ours."""
    one, two = (pyg_backend.accelerate(nn.SAGEConv(D, D)) for _ in range(2))
    index = edges()
    assert run(one, index)[0] and run(two, index)[0]
    assert not run(two, index)[0] and not run(one, index)[0]
    assert not run(pyg_backend.accelerate(nn.SAGEConv(D, D)), index)[0]
    index[0, 0] = (index[0, 0] + 1) % N  # written into: edges that nobody has seen
    assert run(one, index)[0]


def test_what_is_never_left(at_first, monkeypatch):
    layer = pyg_backend.accelerate(nn.SAGEConv(D, D))
    assert not run(layer, edges(E + 1))[0]  # many
    assert not run(layer, edges().int())[0]
    prepared = edges()
    gnnaccel.prepare(prepared, num_nodes=N)
    assert not run(layer, prepared)[0]
    torch.use_deterministic_algorithms(True)
    assert not run(layer, edges())[0]
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(blocks, "FEW_AT_FIRST", {})
    assert not run(layer, edges())[0]


def test_a_class_changed_by_the_user(at_first):
    """PyG's own forward() is looked up when it is called."""

    class Mine(nn.SAGEConv):
        pass

    layer = pyg_backend.accelerate(Mine(D, D))
    Mine.forward = lambda self, x, edge_index: x * 2
    x = torch.ones(N, D)
    for _ in range(3):
        assert torch.equal(layer(x, edges()), x * 2)
