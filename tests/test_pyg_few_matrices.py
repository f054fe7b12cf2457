"""Edges and the matrix of them take one way, whether their messages are few or many: results are the same bits."""

import copy

import pytest
import torch
from torch_geometric import nn
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from gnnaccel import pyg_backend, report
from gnnaccel.lower import bounds
from gnnaccel.pyg_backend import propagate

N, D, OUT = 12, 16, 16
MOST = {"cpu": 1 << 30}
nn.SAGEConv(1, 1)  # PyG generates propagate() of a class for its first instance: one of "softmax" has no product


def edges(count=60, dtype=torch.long):
    """Edges in the order of a matrix whose rows are destinations, none twice."""
    index = torch.randint(0, N, (2, count), generator=torch.Generator().manual_seed(1))
    return torch.unique(index, dim=1).flip(0).contiguous().to(dtype)


def coo(index, values):
    size = (N, N, *values.shape[1:])
    return torch.sparse_coo_tensor(index.flip(0), values, size, is_coalesced=True)


def csr(index, values):
    offsets = torch.searchsorted(index[1].contiguous(), torch.arange(N + 1)).to(index.dtype)
    return torch.sparse_csr_tensor(offsets, index[0].contiguous(), values, (N, N, *values.shape[1:]))


def sparse_tensor(index, values):
    return SparseTensor(row=index[1], col=index[0], value=values, sparse_sizes=(N, N))


FORMS = {"coo": coo, "csr": csr}
if WITH_TORCH_SPARSE:
    FORMS["SparseTensor"] = sparse_tensor


def numbers(*shape, seed=2, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(layer, *given):
    """Output and gradients of a call on features like these, and whether it was left to PyG for few messages."""
    x = numbers(N, D, dtype=next(layer.parameters()).dtype).requires_grad_()
    report.reset()
    out = layer(x, *given)
    leaves = [leaf for leaf in (x, *layer.parameters()) if leaf.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    reasons = [reason for site in report.snapshot().values() for reason in site.reasons]
    return [out, *(grad for grad in grads if grad is not None)], propagate.FEW in reasons


class Mapped(nn.MessagePassing):
    """A user's layer whose message is its features."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(D, OUT)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))


class Multiplied(Mapped):
    def message_and_aggregate(self, adj_t, x):
        return adj_t @ x


LAYERS = {  # layer, how wide the edge features are that it reads, whether PyG's code is the quicker one of few
    "GEN": (lambda: nn.GENConv(D, OUT, "softmax", msg_norm=True), 0, True),
    "GEN edges": (lambda: nn.GENConv(D, OUT, "softmax", edge_dim=D), D, True),
    "GEN several": (lambda: nn.GENConv(D, OUT, ["softmax", "powermean"], edge_dim=3), 3, True),
    "CG": (lambda: nn.CGConv(D, 3), 3, True),
    "GINE": (lambda: nn.GINEConv(torch.nn.Linear(D, OUT), edge_dim=3), 3, True),
    "FiLM": (lambda: nn.FiLMConv(D, OUT), 0, True),
    "Transformer edges": (lambda: nn.TransformerConv(D, OUT, edge_dim=3), 3, True),
    "ResGated": (lambda: nn.ResGatedGraphConv(D, OUT), 0, True),
    "ResGated edges": (lambda: nn.ResGatedGraphConv(D, OUT, edge_dim=3), 3, True),
    "Edge": (lambda: nn.EdgeConv(torch.nn.Linear(2 * D, OUT)), 0, True),
    "SAGE softmax": (lambda: nn.SAGEConv(D, OUT, "softmax"), 0, True),
    "SAGE sum": (lambda: nn.SAGEConv(D, OUT, "sum"), 0, False),
    "SAGE max": (lambda: nn.SAGEConv(D, OUT, "max"), 0, False),
    "user's": (Mapped, 0, False),
    "user's product": (Multiplied, 0, False),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_one_way_for_few(name, form, monkeypatch):
    """GENConv of edges left to PyG and of their matrix with us rounded differently: 1.3e-7 of 9e-4."""
    make, width, left = LAYERS[name]
    monkeypatch.setattr(bounds, "FEW_MESSAGES", MOST)
    torch.manual_seed(3)
    plain, index = make(), edges()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    attributes = numbers(index.shape[1], width, seed=4) if width else None
    values = attributes if width else torch.ones(index.shape[1])
    want = results(plain.double(), index, *([attributes.double()] if width else []))[0]
    by_edges = results(layer, index, *([attributes] if width else []))
    for _ in range(2):  # the second time it is remembered where a call like it went
        by_matrix = results(layer, FORMS[form](index, values))
        assert by_edges[1] == by_matrix[1] == left
        for a, b, exact in zip(by_edges[0], by_matrix[0], want, strict=True):
            # A user's own product is torch's, whose sums may go in another order than ours.
            assert torch.equal(a, b) or name == "user's product"
            torch.testing.assert_close(b.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("few", [{}, {"cpu": 60 * D}], ids=["many", "few for others"])
def test_one_way_for_gates(form, few, monkeypatch):
    """Of ResGatedGraphConv an eighth as many messages are few: those between are one op for both."""
    monkeypatch.setattr(bounds, "FEW_MESSAGES", few)
    layer, index = pyg_backend.accelerate(nn.ResGatedGraphConv(D, OUT)), edges()
    found = [results(layer, each) for each in (index, FORMS[form](index, torch.ones(index.shape[1])))]
    assert not found[0][1] and not found[1][1]
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_many_after_few(form, monkeypatch):
    """A matrix of the same shape may have more nonzeros, and a layer that was left to PyG looks again."""
    few, many = edges(20), edges(100)
    monkeypatch.setattr(bounds, "FEW_MESSAGES", {"cpu": 40 * D})
    layer = pyg_backend.accelerate(nn.GENConv(D, OUT))
    for index, left in ((few, True), (few, True), (many, False), (few, True)):
        assert results(layer, FORMS[form](index, torch.ones(index.shape[1])))[1] == left


def test_int32_is_ours(monkeypatch):
    """torch's scatters have wrong gradients for it."""
    monkeypatch.setattr(bounds, "FEW_MESSAGES", MOST)
    layer, index = pyg_backend.accelerate(nn.GENConv(D, OUT)), edges(dtype=torch.int32)
    for _ in range(2):
        assert not results(layer, csr(index, torch.ones(index.shape[1])))[1]
        assert results(layer, csr(index.long(), torch.ones(index.shape[1])))[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("few", [{}, MOST], ids=["many", "few"])
@pytest.mark.parametrize("wrong", ["features", "rows", "flow"])
def test_refused_as_by_pyg(wrong, few, form, monkeypatch):
    monkeypatch.setattr(bounds, "FEW_MESSAGES", few)
    index = edges()
    values = numbers(index.shape[1], 3) if wrong == "features" else torch.ones(index.shape[1])
    plain = nn.ResGatedGraphConv(D, OUT, flow="target_to_source" if wrong == "flow" else "source_to_target")
    x, adj, errors = numbers(N - (wrong == "rows"), D), FORMS[form](index, values), []
    for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        with pytest.raises(Exception) as raised:
            layer(x, adj)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]
