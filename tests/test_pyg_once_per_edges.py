"""What layers make of their edges at each call is made once for each edges object, and again when these change."""

import copy
import gc

import pytest
import torch

pytest.importorskip("torch_geometric")
from pyg_compare import D, E, N, edges, rand
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric import nn, utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gnnaccel import pyg_backend
from gnnaccel.graph.cache import derived
from gnnaccel.lower import bounds
from gnnaccel.pyg_backend import directed, helpers


def weights(grad=False):
    return (rand(E, seed=5).abs() + 0.1).double().requires_grad_(grad)


def features():
    return rand(N, D).double().requires_grad_()


# layer, what it is given after features and edges
CASES = {
    "Cheb": (lambda: nn.ChebConv(D, 5, 3), dict),
    "Cheb, rw": (lambda: nn.ChebConv(D, 5, 3, normalization="rw"), dict),
    "Cheb, no norm": (lambda: nn.ChebConv(D, 5, 2, normalization=None), lambda: {"lambda_max": 8.0}),
    "Cheb, a number": (lambda: nn.ChebConv(D, 5, 3), lambda: {"lambda_max": 1.5}),
    "Cheb, a tensor": (lambda: nn.ChebConv(D, 5, 3), lambda: {"lambda_max": torch.tensor(1.5, dtype=torch.float64)}),
    "Cheb, graphs": (
        lambda: nn.ChebConv(D, 5, 3),
        lambda: {
            "batch": torch.arange(N) % 2,
            "lambda_max": torch.tensor([1.5, 1.8], dtype=torch.float64),
        },
    ),
    "Cheb, weights": (lambda: nn.ChebConv(D, 5, 3), lambda: {"edge_weight": weights()}),
    "Cheb, trained weights": (lambda: nn.ChebConv(D, 5, 3), lambda: {"edge_weight": weights(grad=True)}),
    "DirGNN": (lambda: nn.DirGNNConv(nn.SAGEConv(D, 5)), dict),
    "DirGNN, one way, no root": (lambda: nn.DirGNNConv(nn.GATConv(D, 5), 0.0, root_weight=False), dict),
    "ARMA": (lambda: nn.ARMAConv(D, 5, 2, 2), lambda: {"edge_weight": weights()}),
    "ARMA, one stack": (lambda: nn.ARMAConv(D, 5), dict),
}


def pair(name):
    make, given = CASES[name]
    plain = make().double()
    return plain, pyg_backend.accelerate(copy.deepcopy(plain)), given()


def agree(plain, layer, x, index, given):
    found, trained = [], [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    for each in (plain, layer):
        out = each(x, index, **given)
        leaves = [x, *each.parameters(), *trained]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", CASES)
def test_results_of_calls_and_after_writes(name):
    plain, layer, given = pair(name)
    x, index = features(), edges()
    for _ in range(3):
        agree(plain, layer, x, index, given)
    index[0, :7] = (index[0, :7] + 1) % N
    agree(plain, layer, x, index, given)
    if "edge_weight" in given:
        with torch.no_grad():
            given["edge_weight"][:9] *= 2
        agree(plain, layer, x, index, given)


@pytest.mark.parametrize("name", ["Cheb", "Cheb, weights", "DirGNN"])
def test_made_once_and_dies_with_the_edges(name, monkeypatch):
    derived.invalidate()
    _, layer, given = pair(name)
    x, index = features(), edges()
    layer(x, index, **given)
    count = len(derived)
    monkeypatch.setattr(utils.laplacian, "scatter", None)  # of the norm: not to be called again
    monkeypatch.setattr(torch.Tensor, "flip", None)
    for _ in range(2):
        layer(x, index, **given).sum().backward()
    assert len(derived) == count > 0
    del index, given
    gc.collect()
    assert len(derived) == 0


def test_what_others_put_in_place_of_pygs_is_called(monkeypatch):
    class Mine(nn.ChebConv):
        def __norm__(self, edge_index, *args, **kwargs):
            return edge_index, torch.full((edge_index.shape[1],), 0.5, dtype=torch.float64)

    x, index = features(), edges()
    plain = Mine(D, 5, 3).double()
    agree(plain, pyg_backend.accelerate(copy.deepcopy(plain)), x, index, {})
    plain, layer, _ = pair("Cheb")
    layer(x, index)
    monkeypatch.setattr(nn.ChebConv, "__norm__", Mine.__norm__)
    agree(plain, layer, x, index, {})


def test_a_helper_that_somebody_replaces(monkeypatch):
    plain, layer, _ = pair("Cheb, a number")
    given, x, index = {"lambda_max": 3.0}, features(), edges()
    agree(plain, layer, x, index, given)
    with monkeypatch.context() as patched:
        scope, original = nn.ChebConv.__norm__.__globals__, nn.ChebConv.__norm__.__globals__["get_laplacian"]

        def halved(*args):
            found, values = original(*args)
            return found, values / 2

        patched.setitem(scope, "get_laplacian", halved)
        agree(plain, layer, x, index, given)
    agree(plain, layer, x, index, given)


def test_a_forward_that_somebody_puts_into_the_class(monkeypatch):
    plain, layer, _ = pair("DirGNN")
    x, index, original = features(), edges(), nn.DirGNNConv.forward
    agree(plain, layer, x, index, {})
    monkeypatch.setattr(nn.DirGNNConv, "forward", lambda self, x, edge_index: original(self, x, edge_index) * 2)
    theirs = nn.DirGNNConv.forward
    agree(plain, layer, x, index, {})
    directed.disable()
    assert nn.DirGNNConv.forward is theirs
    directed.enable()
    assert nn.DirGNNConv.forward is theirs


TRACED = {
    "Cheb": lambda: nn.ChebConv(D, 5, 2),
    "CG": lambda: nn.CGConv(D),
    "DirGNN": lambda: nn.DirGNNConv(nn.CGConv(D), root_weight=False),
    "GCN": lambda: nn.GCNConv(D, 5),
    "SAGE": lambda: nn.SAGEConv(D, 5),
    "GAT": lambda: nn.GATConv(D, 5),
    "GIN": lambda: nn.GINConv(nn.MLP([D, D, D], norm=None)),
    "Transformer": lambda: nn.TransformerConv(D, 5),
}


@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize("name", TRACED)
def test_a_trace_holds_nothing_that_is_remembered(name, few, monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": few})
    plain = TRACED[name]()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index, other = rand(N, D), edges(), edges().roll(1, 1).flip(0)
    for _ in range(2):
        layer(x, index)
    traced = make_fx(layer)(x, index)
    torch.testing.assert_close(traced(x, other), make_fx(plain)(x, index)(x, other))


def test_inference_mode_then_training():
    for name in ("Cheb", "DirGNN"):
        plain, layer, _ = pair(name)
        x, index = features(), edges()
        with torch.inference_mode():
            torch.testing.assert_close(layer(x, index), plain(x, index))
        agree(plain, layer, x, index, {})


@pytest.mark.parametrize("first", range(3))
def test_edges_are_one_object_whatever_the_values(first):
    """Made with the first of three kinds of values, and values alone with the others; no call is made twice."""
    calls = []

    def original(edge_index, edge_attr=None, num_nodes=None):
        calls.append(edge_attr)
        return utils.add_self_loops(edge_index, edge_attr, num_nodes=num_nodes)

    loops, index, kinds = helpers.memoised(original), edges(), [None, weights(), weights(grad=True)]
    kinds = kinds[first:] + kinds[:first]
    found = [loops(index, values, N) for values in kinds]
    assert len(calls) == 3 and len({id(e) for e, _ in found}) == 1
    again = [loops(index, values, N) for values in kinds]
    assert len(calls) == 4 and {id(e) for e, _ in again} == {id(found[0][0])}  # values with a gradient are made anew
    want = utils.add_self_loops(index, num_nodes=N)[0]
    for values, (made, attr), (_, same) in zip(kinds, found, again, strict=True):
        assert torch.equal(made, want)
        attrs = [] if values is None else [utils.add_self_loops(index, values, num_nodes=N)[1]] * 2
        assert all(map(torch.equal, (attr, same), attrs)) and (values is not None or attr is same is None)
    index[0, 0] = (index[0, 0] + 1) % N
    assert loops(index, kinds[0], N)[0] is not found[0][0]


def test_factors_stay_where_edges_had_weights_first():
    index, layer = edges(), pyg_backend.accelerate(nn.SGConv(D, 5).double())
    layer(features(), index, weights())
    found, norm = helpers.ours(gcn_norm)(index, None, N, False, True, "source_to_target", torch.float64)
    assert derived.get((norm, found), ("factors", "source_to_target")) is not None


@pytest.mark.parametrize("grad", [False, True])
def test_what_looped_edges_were_made_of_where_they_had_weights_first(grad):
    """Of the edges alone, by which the graph finds how these were prepared."""
    index = edges()
    made, _ = helpers.ours(gcn_norm)(index, weights(grad), N, False, True, "source_to_target", torch.float64)
    assert [owner.ref() is index for owner in derived.get((made,), "origin")] == [True]
