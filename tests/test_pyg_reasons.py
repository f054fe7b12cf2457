"""What reports say of calls that are left to PyG: the reason that holds, not one that sounds like it."""

import traceback

import pytest
import torch
from torch_geometric import EdgeIndex, nn, utils

from gnnaccel import pyg_backend, report

N, D = 4, 4
EDGES = torch.tensor([[0, 1, 2, 3, 0], [0, 0, 1, 1, 2]])
HALF = "features of torch.float16 on cpu"


def matrix(values=None):
    return utils.to_torch_csc_tensor(EDGES, values, size=(N, N)).t()


class Product(nn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs, index, dim_size=None):
        return utils.scatter(inputs, index, 0, dim_size, reduce="mul")


# layer, edges, dtype of features -> the reasons
CASES = {
    "GCN, half": (nn.GCNConv, lambda: EDGES, torch.float16, {HALF}),
    "SAGE, half, max": (lambda *sizes: nn.SAGEConv(*sizes, aggr="max"), lambda: EDGES, torch.float16, {HALF}),
    "GAT, half": (nn.GATConv, lambda: EDGES, torch.float16, {HALF}),
    "transformer, half": (nn.TransformerConv, lambda: EDGES, torch.float16, {HALF}),
    "EG, half": (lambda *sizes: nn.EGConv(*sizes, num_heads=2), lambda: EDGES, torch.float16, {HALF}),
    "GCN, complex": (nn.GCNConv, lambda: EDGES, torch.complex64, {"features of torch.complex64 on cpu"}),
    "GCN, double": (nn.GCNConv, lambda: EDGES, torch.float64, set()),
    "a reduction that is none of ours": (
        lambda *sizes: Product(),
        lambda: EDGES,
        torch.float32,
        {"reduction 'mul' of dimension 0"},
    ),
    "a gradient to a matrix": (
        nn.GraphConv,
        lambda: matrix(torch.rand(EDGES.shape[1])).requires_grad_(),
        torch.float32,
        {"a gradient to a torch.sparse matrix"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reason(name):
    make, given, dtype, reasons = CASES[name]
    torch.manual_seed(0)
    plain = make(D, D).to(dtype)
    layer, x = pyg_backend.accelerate(plain), torch.randn(N, D).to(dtype)
    report.reset()
    layer(x, given())
    assert {reason for site in report.snapshot().values() for reason in site.reasons} == reasons
    assert any(site.left for site in report.snapshot().values()) == bool(reasons)


# layer, edges, features that PyG refuses
REFUSED = {
    "half by a matrix": (nn.GINConv, matrix, lambda: torch.randn(N, D).half()),
    "half by an EdgeIndex": (
        nn.GraphConv,
        lambda: EdgeIndex(EDGES, sort_order="col", sparse_size=(N, N)),
        lambda: torch.randn(N, D).half(),
    ),
    "too few rows": (nn.GraphConv, matrix, lambda: torch.randn(N - 1, D)),
    "a list": (nn.GraphConv, lambda: EDGES.tolist(), lambda: torch.randn(N, D)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_pyg(name):
    """The error of PyG alone, with none of ours behind it."""
    make, given, features = REFUSED[name]
    x = features()
    plain = (make(torch.nn.Linear(D, D)) if make is nn.GINConv else make(D, D)).to(x.dtype)
    with pytest.raises(Exception) as alone:
        plain(x, given())
    with pytest.raises(type(alone.value)) as ours:
        pyg_backend.accelerate(plain)(x, given())
    assert str(ours.value) == str(alone.value)
    assert "gnnaccel.lazy.reduce.Unsupported" not in "".join(traceback.format_exception(ours.value))
