"""Layers that a short forward serves, changed in ways that it does not know: results, gradients and errors are PyG's."""

import types

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import LAYERS, D, N, edges, rand, same, train
from torch_geometric import nn

MORE = {
    "GCN without bias": lambda: nn.GCNConv(D, 5, bias=False),
    "GCN cached": lambda: nn.GCNConv(D, 5, cached=True),
    "GIN eps": lambda: nn.GINConv(torch.nn.Linear(D, 5), eps=0.3),
}
SHORT = {name: make for name, make in LAYERS.items() if name != "EdgeConv"} | MORE


def changed(name, change, **options):
    """Two steps of the layer as it is made, and two once it was changed, which find what the first have left."""

    def program(wrap):
        layer, index = wrap(SHORT[name]()), edges()
        out = [train(layer, rand(N, D, grad=True), index) for _ in range(2)]
        change(layer)
        return [*out, *(train(layer, rand(N, D, grad=True), index) for _ in range(2))]

    same(program, **options)


def _doubled(self, edge_index, **kwargs):
    return 2 * type(self).propagate(self, edge_index, **kwargs)


@pytest.mark.parametrize("name", SHORT)
def test_propagate_replaced_on_the_layer(name):
    changed(name, lambda layer: setattr(layer, "propagate", types.MethodType(_doubled, layer)))


@pytest.mark.parametrize("name", SHORT)
def test_explained_once(name):
    """PyG binds propagate() to the layer then."""

    def change(layer):
        layer.explain = True
        layer.explain = False

    changed(name, change)
