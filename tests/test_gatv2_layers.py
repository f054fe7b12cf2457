"""GATv2 layers of several edge types as one node of autograd; test_layer_contracts.py has more."""

import pytest
import torch
from test_relation_sums import graph, keeper, values

from gnnaccel.ops.gat_layers import How
from gnnaccel.ops.gatv2_layers import Gatv2Layer, gatv2_layers, takes

SIZES, WIDTHS = (5, 7, 4), (4, 3, 6)
# (source, destination, edges) of each layer; those into one destination stand together.
CASES = {
    "one": [(0, 1, 12)],
    "into one": [(0, 1, 12), (1, 1, 9), (2, 1, 1), (0, 1, 40)],
    "into all": [(0, 1, 12), (2, 1, 9), (1, 0, 8), (0, 0, 300), (1, 2, 5)],
}


def case(name, heads, outputs, concat, biases=True):
    xs = [values(n, width, seed=i) for i, (n, width) in enumerate(zip(SIZES, WIDTHS, strict=True))]
    targets: dict[int, list] = {}
    leaves = [xs[i] for i in sorted({end for source, target, _ in CASES[name] for end in (source, target)})]
    wide = heads * outputs
    for i, (source, target, count) in enumerate(CASES[name]):
        some = biases or i % 2
        maps = []
        for k, end in enumerate((source, target)):
            bias = values(wide, seed=20 + 2 * i + k) if some else None
            maps += [values(wide, WIDTHS[end], seed=10 + 2 * i + k), bias]
        vectors = values(1, heads, outputs, seed=40 + 2 * i)
        bias = values(wide if concat else outputs, seed=70 + i) if some else None
        relation = graph(SIZES[source], count, seed=i, rows=SIZES[target])
        layer = Gatv2Layer(relation, xs[source], xs[target], *maps, vectors, bias)
        targets.setdefault(target, []).append(layer)
        leaves += [t for t in layer[3:] if t is not None]
    return list(targets.values()), leaves


def definition(layer, how):
    """Attention, one destination after the other."""
    relation, x, y, weight_src, bias_src, weight_dst, bias_dst, vectors, bias = layer
    shape = (-1, *vectors.shape[1:])
    mapped = torch.nn.functional.linear(x, weight_src, bias_src).view(shape)
    other = torch.nn.functional.linear(y, weight_dst, bias_dst).view(shape)
    rows = []
    for v, (first, last) in enumerate(zip(relation.indptr[:-1].tolist(), relation.indptr[1:].tolist(), strict=True)):
        sources = mapped[relation.indices[first:last].long()]
        scores = torch.nn.functional.leaky_relu(sources + other[v], how.negative_slope) * vectors
        rows.append((scores.sum(-1).softmax(0).unsqueeze(-1) * sources).sum(0))
    out = torch.stack(rows)
    out = out.flatten(1) if how.concat else out.mean(1)
    return out if bias is None else out + bias


def wanted(targets, how):
    return [sum(definition(layer, how) for layer in layers) for layers in targets]


@pytest.mark.parametrize("frozen", [0, -1])
def test_gradients_that_nobody_asks_for(frozen):
    how = How(0.2, True)
    targets, leaves = case("into all", 2, 2, True)
    some = [leaf for leaf in leaves if leaf is not leaves[frozen]]
    layers = [[layer._replace(x=layer.x.detach()) for layer in part] for part in targets] if not frozen else targets
    if frozen:
        last = layers[-1][-1]
        layers[-1][-1] = last._replace(bias=last.bias.detach())
    made = [function(layers, how, *more) for function, *more in ((gatv2_layers, keeper()[0]), (wanted,))]
    grads = [torch.autograd.grad([o.square().sum() for o in outs], some, allow_unused=True) for outs in made]
    assert [a is None for a in grads[0]] == [b is None for b in grads[1]]
    torch.testing.assert_close(*[[each for each in part if each is not None] for part in grads])


def test_what_is_left_alone():
    (layers,), _ = case("into one", 2, 2, True)
    layer = layers[0]
    assert takes([layer])
    frozen = layer._replace(weight_src=layer.weight_src.detach())  # x may be written into
    others = [
        layer._replace(x=layer.x.float()),
        layer._replace(weight_dst=values(6, 3, seed=1)),
        layer._replace(y=values(3, 3, seed=1)),
        layer._replace(bias_dst=values(3, seed=1)),
        layer._replace(graph=graph(SIZES[0], 0, seed=0, rows=SIZES[1])),
    ]
    for other in (frozen, *others):
        assert not takes([layer, other])
    with torch.no_grad():
        assert takes([layer, frozen])
