"""Models as they are, whose backward pass compiled autograd takes: our derivatives run in it as they are."""

import copy
import warnings

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import D, E, N, edges, rand
from torch.nn import Linear
from torch_geometric import nn

from gnnaccel import pyg_backend, report

compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
if not hasattr(compiled_autograd, "_enable"):
    pytest.skip("this torch has compiled autograd by another name", allow_module_level=True)
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LAYERS = {
    "GCN": (lambda: nn.GCNConv(D, 5), ()),
    "SAGE max": (lambda: nn.SAGEConv(D, 5, aggr="max"), ()),
    "GAT": (lambda: nn.GATConv(D, 5, heads=2), ()),
    "GATv2": (lambda: nn.GATv2Conv(D, 5, heads=2), ()),
    "Transformer": (lambda: nn.TransformerConv(D, 5, heads=2), ()),
    "ResGated": (lambda: nn.ResGatedGraphConv(D, 5), ()),
    "GINE": (lambda: nn.GINEConv(Linear(D, 5)), ("features",)),
    "FiLM": (lambda: nn.FiLMConv(D, 5), ()),
    "LE": (lambda: nn.LEConv(D, 5), ()),
    "GEN": (lambda: nn.GENConv(D, 5, aggr="softmax"), ()),
    "RGCN": (lambda: nn.RGCNConv(D, 5, 3), ("types",)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_under_compiled_autograd(name):
    torch.compiler.reset()
    report.reset()
    make, rest = LAYERS[name]
    torch.manual_seed(0)
    plain = make().to(DEVICE)
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    given = {"features": rand(E, D), "types": torch.arange(E) % 3}
    index, rest = edges().to(DEVICE), [given[each].to(DEVICE) for each in rest]

    def gradients(model, seed):
        x = rand(N, D, seed=seed).to(DEVICE).requires_grad_()
        return torch.autograd.grad(model(x, index, *rest).square().sum(), [x, *model.parameters()])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know")
        for seed in range(3):
            want = gradients(plain, seed)
            with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                got = gradients(ours, seed)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()
