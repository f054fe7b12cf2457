"""Norms of GCNs as factors of the nodes: where they stand for PyG's weights, where they must not, and the results."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")
from pyg_compare import D, N, edges, rand, train
from torch_geometric import nn, typing, utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import gnnaccel
from gnnaccel import ops
from gnnaccel.ops import linear_sums

FORMATS = {
    "edge_index": lambda index: index,
    "csr": lambda index: utils.to_torch_csr_tensor(utils.coalesce(index.flip(0)), size=(N, N)),
    "coo": lambda index: utils.to_torch_coo_tensor(utils.coalesce(index.flip(0)), size=(N, N)),
}
if typing.WITH_TORCH_SPARSE:
    FORMATS["SparseTensor"] = lambda index: typing.SparseTensor.from_edge_index(index, sparse_sizes=(N, N)).t()


class Reversed(nn.GCNConv):
    """The norms of its edges on other edges, as few as these: their own sources' and destinations'."""

    def forward(self, x, edge_index):
        index, norm = gcn_norm(edge_index, None, N)
        return self.propagate(index.flip(0), x=x, edge_weight=norm)


def without_loops() -> torch.Tensor:
    return utils.remove_self_loops(edges())[0]


@pytest.fixture
def factored(monkeypatch):
    """The sums by factors so far."""
    calls = []
    conv, mapped = ops.graph_conv, linear_sums.mapped_sum

    def mapped_sum(*args):
        out = mapped(*args)
        calls.extend([args] * (out is not None))
        return out

    monkeypatch.setattr(ops, "graph_conv", lambda *args, **kwargs: calls.append(args) or conv(*args, **kwargs))
    monkeypatch.setattr(linear_sums, "mapped_sum", mapped_sum)
    return calls


def compare(layer, given, *more, dtype=torch.float64, device="cpu", epochs=3) -> None:
    """Outputs and gradients of an accelerated layer and of the layer itself, in float64 to 1e-12."""
    plain, given = layer.to(device, dtype), given.to(device)
    fast = gnnaccel.accelerate(copy.deepcopy(plain))
    x, near = rand(N, D).to(device, dtype), 1e-12 if dtype == torch.float64 else 1e-5

    def run(model):
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in more]
        return train(model, x.clone().requires_grad_(), given, *leaves)

    for _ in range(epochs):
        expected, got = run(plain), run(fast)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=near, atol=near)
        plain.zero_grad()
        fast.zero_grad()


@pytest.mark.filterwarnings("ignore:Converting sparse tensor")  # PyG of a COO matrix
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("make", "sums"),
    [
        (lambda: nn.GCNConv(D, 5), 1),
        (lambda: nn.GCNConv(D, 5, add_self_loops=False), 1),  # a source without in-edges gives nothing
        (lambda: nn.GCNConv(D, 5, cached=True), 1),
        (lambda: nn.SGConv(D, 5, K=2), 2),
        (lambda: nn.APPNP(K=3, alpha=0.1), 3),
        (lambda: nn.LGConv(), 1),
        (lambda: nn.TAGConv(D, 5, K=2), 2),
    ],
    ids=["GCN", "no loops", "cached", "SG", "APPNP", "LG", "TAG"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_same_results_by_factors(form, make, sums, dtype, device, factored):
    given = FORMATS[form](without_loops())
    compare(make(), given.to(dtype) if form in ("csr", "coo") else given, dtype=dtype, device=device)
    assert len(factored) == 3 * sums


def test_the_other_flow(device, factored):
    compare(nn.GCNConv(D, 5, flow="target_to_source"), edges(), device=device)
    assert len(factored) == 3


@pytest.mark.parametrize(
    ("make", "given", "more"),
    [
        (lambda: nn.GCNConv(D, 5, improved=True), edges, ()),
        (lambda: nn.GCNConv(D, 5), edges, (rand(edges().shape[1]).abs().double(),)),
        (lambda: nn.GCNConv(D, 5), edges, (rand(edges().shape[1]).abs().double().requires_grad_(),)),
        (lambda: nn.GCNConv(D, 5, normalize=False), edges, (rand(edges().shape[1]).double(),)),
        (lambda: nn.GCNConv(D, 5), lambda: FORMATS["csr"](edges()).double(), ()),  # PyG adds up two loops of a node
        (lambda: nn.GCNConv(D, 5), lambda: (FORMATS["csr"](without_loops()) * 2).double(), ()),
        (lambda: Reversed(D, 5), edges, ()),
    ],
    ids=["improved", "weights", "trained weights", "not normalised", "doubled loops", "values of two", "other edges"],
)
def test_other_weights_are_read(make, given, more, factored):
    compare(make(), given(), *more)
    assert not factored


def test_half_precision_has_the_norms_of_pyg(factored):
    layer, x = nn.GCNConv(D, 5).bfloat16(), rand(N, D).bfloat16()
    got, expected = gnnaccel.accelerate(copy.deepcopy(layer))(x, edges()), layer(x, edges())
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert not factored


def test_norms_that_were_written_into_are_read(factored):
    plain, index, x = nn.GCNConv(D, 5, cached=True).double(), edges(), rand(N, D).double()
    fast = gnnaccel.accelerate(copy.deepcopy(plain))
    torch.testing.assert_close(fast(x, index), plain(x, index))
    assert len(factored) == 1
    for layer in (plain, fast):
        layer._cached_edge_index[1][3:9] = 4.0
    torch.testing.assert_close(fast(x, index), plain(x, index))
    assert len(factored) == 1


def test_features_of_more_nodes_than_the_norms_had(factored):
    plain, index = nn.GCNConv(D, 5, cached=True).double(), edges()
    fast = gnnaccel.accelerate(copy.deepcopy(plain))
    for nodes in (N, N + 3, N):
        x = rand(nodes, D).double()
        torch.testing.assert_close(fast(x, index), plain(x, index))
    assert len(factored) == 2


def test_second_derivatives_of_gcn():
    layer = gnnaccel.accelerate(nn.GCNConv(D, 5).double())
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edges()), rand(N, D).double().requires_grad_())


def test_a_cached_norm_that_comes_to_be_trained():
    """Norms that ask for a gradient get theirs, also after calls that took them for constants."""
    plain = nn.GCNConv(D, 5, cached=True).double()
    fast, grads = gnnaccel.accelerate(copy.deepcopy(plain)), []
    for model in (plain, fast):
        for _ in range(2):
            model(rand(N, D).double(), edges())
        index, norm = model._cached_edge_index
        model._cached_edge_index = index, norm.requires_grad_()
        out = model(rand(N, D).double(), edges())
        grads.append(torch.autograd.grad(out.square().sum(), norm)[0])
    torch.testing.assert_close(*grads)


def test_a_cached_norm_that_is_written_into():
    plain = nn.GCNConv(D, 5, cached=True).double()
    fast, outs = gnnaccel.accelerate(copy.deepcopy(plain)), []
    for model in (plain, fast):
        for _ in range(2):
            model(rand(N, D).double(), edges())
        model._cached_edge_index[1].mul_(2)
        outs.append(model(rand(N, D).double(), edges()))
    torch.testing.assert_close(*outs)
