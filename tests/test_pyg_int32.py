"""Indices of int32: what PyG's helpers and aggregations give inside our layers is what they give for int64.

Torch 2.13 on the CPU misreads an expanded index of int32 in gather(), and so in the gradient of what PyG scatters.
"""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")
from pyg_compare import D, E, N, edges, rand
from torch_geometric import EdgeIndex, nn, utils
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import WITH_TORCH_SCATTER

from gnnaccel import pyg_backend, report
from gnnaccel.pyg_backend.helpers import ours

# helper, how it is called (with the edges, offsets of their destinations, and a value per edge), shape of a value
HELPERS = {
    **{f"scatter {r}": (utils.scatter, lambda f, i, p, v, r=r: f(v, i[1], 0, N, r), (D,)) for r in ("sum", "mean")},
    **{f"scatter {r}": (utils.scatter, lambda f, i, p, v, r=r: f(v, i[1], 0, N, r), (D,)) for r in ("max", "mul")},
    "scatter, last dimension": (utils.scatter, lambda f, i, p, v: f(v.T, i[1], 1, N), (D,)),
    "softmax": (utils.softmax, lambda f, i, p, v: f(v, i[1], None, N), (D,)),
    "softmax, offsets": (utils.softmax, lambda f, i, p, v: f(v, None, p), (D,)),
    "softmax, both": (utils.softmax, lambda f, i, p, v: f(v, i[1], p, N), (D,)),
    "segment": (utils.segment, lambda f, i, p, v: f(v, p, "mean"), (D,)),
    "degree": (utils.degree, lambda f, i, p, v: f(i[1], N, v.dtype).outer(v[0]), (D,)),
    **{
        f"loops {r}": (utils.add_self_loops, lambda f, i, p, v, r=r: f(i, v, r, N)[1], (D,))
        for r in ("mean", "max", 2.0)
    },
    "remaining loops": (utils.add_remaining_self_loops, lambda f, i, p, v: f(i, v, "mean", N)[1], (D,)),
    "no loops": (utils.remove_self_loops, lambda f, i, p, v: f(i, v)[1], (D,)),
    "gcn_norm": (gcn_norm, lambda f, i, p, v: f(i, v.exp(), N)[1], ()),
    "Laplacian": (utils.get_laplacian, lambda f, i, p, v: f(i, v.exp(), "sym", None, N)[1], ()),
}
FORMS = {"tensor": lambda index: index, "EdgeIndex": lambda index: EdgeIndex(index, sparse_size=(N, N))}


def ordered():
    """edges() by ascending destinations, as some aggregations want them."""
    index = edges()
    return index[:, index[1].argsort(stable=True)]


def gradients(out, *leaves):
    return torch.autograd.grad(out, leaves, rand(*out.shape, seed=4).double())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HELPERS)
def test_helper(name, form):
    helper, call, shape = HELPERS[name]
    if helper is utils.segment and WITH_TORCH_SCATTER:
        pytest.skip("torch_scatter takes int64 alone")
    index = ordered()
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(index[1], minlength=N).cumsum(0)])
    found = []
    for function, dtype in ((helper, torch.int64), (ours(helper), torch.int32)):
        value = rand(E, *shape).double().requires_grad_()
        out = call(function, FORMS[form](index.to(dtype)), offsets.to(dtype), value)
        found.append((out, *gradients(out, value)))
    torch.testing.assert_close(found[1], found[0])


class Product(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sin(x_j) * x_i


# The aggregation, and whether one of our reductions runs in it.
AGGREGATIONS = {
    **{name: (lambda name=name: name, True) for name in ("sum", "max", "std", "softmax", "powermean")},
    "several": (lambda: aggr.MultiAggregation(["sum", "max", "median"]), True),
    "several, products": (lambda: aggr.MultiAggregation(["mul", "std"]), True),
    "scaled": (
        lambda: aggr.DegreeScalerAggregation(["mean"], ["identity", "linear"], torch.tensor([0, 2, 3, 1])),
        True,
    ),
    **{name: (lambda name=name: name, False) for name in ("mul", "median")},
    "by attention": (lambda: aggr.AttentionalAggregation(nn.MLP([D, 1])), False),
    "preserving variance": (aggr.VariancePreservingAggregation, False),
    "deep sets": (lambda: aggr.DeepSetsAggregation(nn.MLP([D, D], norm=None)), False),
    "LSTM": (lambda: aggr.LSTMAggregation(D, 5), False),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation(name):
    make, accelerated = AGGREGATIONS[name]
    torch.manual_seed(0)
    plain = Product(aggr=make()).double()
    found = []
    for layer, dtype in ((plain, torch.int64), (pyg_backend.accelerate(copy.deepcopy(plain)), torch.int32)):
        report.reset()
        x = rand(N, D).double().requires_grad_()
        out = layer(x, ordered().to(dtype))
        found.append((out, *gradients(out, x, *layer.parameters())))
    assert accelerated == any(site.accelerated for site in report.snapshot().values())
    torch.testing.assert_close(found[1], found[0])
