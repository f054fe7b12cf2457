"""TransformerConv's linear maps by one product, as on CUDA: tensors of the CPU that say they lie there."""

import copy

import pytest
import torch
from torch_geometric import nn

from gnnaccel import pyg_backend
from gnnaccel.pyg_backend import attention_forwards, joined_forwards

LAYERS = {
    "usual": dict(heads=2),
    "averaged": dict(heads=3, concat=False),
    "no bias": dict(heads=2, bias=False),
    "no root": dict(heads=2, root_weight=False),
    "dropout": dict(heads=2, dropout=0.5),
}


@pytest.mark.parametrize("change", ["nothing", "frozen", "hooked", "one bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_maps_side_by_side_are_the_layers_own(name, change, monkeypatch):
    taken = []

    def noted(*given):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
            taken.append(joined_forwards.side_by_side(*given))
        return taken[-1]

    monkeypatch.setattr(attention_forwards, "side_by_side", noted)
    torch.manual_seed(0)
    plain, x = nn.TransformerConv(5, 4, **LAYERS[name]).double(), torch.randn(9, 5, dtype=torch.float64)
    edges, last = torch.randint(0, 9, (2, 40)), plain.lin_skip if plain.root_weight else plain.lin_value
    if change == "frozen":
        last.weight.requires_grad_(False)
    elif change == "one bias":
        last.bias = None
    found = []
    for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        if change == "hooked":
            last = layer.lin_skip if layer.root_weight else layer.lin_value
            last.register_forward_hook(lambda module, given, out: out * 2)
        torch.manual_seed(1)
        leaves = [x.clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
        out = layer(leaves[0], edges)
        found.append((out, torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)))
    torch.testing.assert_close(*found)
    assert [each is not None for each in taken] == ([True] if change != "hooked" else [False] * len(taken))
