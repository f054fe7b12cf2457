"""GAT layers of several edge types as one node of autograd; test_layer_contracts.py has more."""

import pytest
import torch
from test_relation_sums import graph, keeper, values

from gnnaccel.ops.gat_layers import GatLayer, How, gat_layers, takes

SIZES, WIDTHS = (5, 7, 4), (4, 3, 6)
# (source, destination, edges) of each layer; those into one destination stand together.
CASES = {
    "one": [(0, 1, 12)],
    "one among themselves": [(1, 1, 12)],
    "one without edges": [(0, 1, 0)],
    "into one": [(0, 1, 12), (1, 1, 9), (2, 1, 0), (0, 1, 40)],
    "into all": [(0, 1, 12), (2, 1, 9), (1, 0, 8), (0, 0, 300), (1, 2, 5)],
}


def case(name, heads, outputs, concat, biases=True):
    xs = [values(n, width, seed=i) for i, (n, width) in enumerate(zip(SIZES, WIDTHS, strict=True))]
    targets: dict[int, list] = {}
    leaves = [xs[i] for i in sorted({end for source, target, _ in CASES[name] for end in (source, target)})]
    for i, (source, target, count) in enumerate(CASES[name]):
        maps = [values(heads * outputs, WIDTHS[end], seed=10 + 2 * i + k) for k, end in enumerate((source, target))]
        vectors = [values(1, heads, outputs, seed=40 + 2 * i + k) for k in range(2)]
        bias = values(heads * outputs if concat else outputs, seed=70 + i) if biases or i % 2 else None
        relation = graph(SIZES[source], count, seed=i, rows=SIZES[target])
        targets.setdefault(target, []).append(GatLayer(relation, xs[source], xs[target], *maps, *vectors, bias))
        leaves += [*maps, *vectors, *([] if bias is None else [bias])]
    return list(targets.values()), leaves


def definition(layer, how):
    """Attention, one edge after the other."""
    relation, x, y, weight_src, weight_dst, att_src, att_dst, bias = layer
    _, heads, outputs = att_src.shape
    mapped, other = (x @ weight_src.t()).view(-1, heads, outputs), (y @ weight_dst.t()).view(-1, heads, outputs)
    rows = []
    for v, (first, last) in enumerate(zip(relation.indptr[:-1].tolist(), relation.indptr[1:].tolist(), strict=True)):
        sources = mapped[relation.indices[first:last].long()]
        scores = (sources * att_src).sum(-1) + (other[v] * att_dst[0]).sum(-1)
        alpha = torch.nn.functional.leaky_relu(scores, how.negative_slope).softmax(0)
        rows.append((alpha.unsqueeze(-1) * sources).sum(0))
    out = torch.stack(rows)
    out = out.flatten(1) if how.concat else out.mean(1)
    return out if bias is None else out + bias


def wanted(targets, how):
    return [sum(definition(layer, how) for layer in layers) for layers in targets]


def test_what_is_left_alone():
    (layers,), _ = case("into one", 2, 2, True)
    layer = layers[0]
    assert takes([layer])
    narrow = layer._replace(x=layer.x.float())
    frozen = layer._replace(weight_src=layer.weight_src.detach())  # x may be written into
    wide = layer._replace(weight_dst=values(6, 3, seed=1))
    short = layer._replace(y=values(3, 3, seed=1))
    for other in (narrow, frozen, wide, short):
        assert not takes([layer, other])
    with torch.no_grad():
        assert takes([layer, frozen])


@pytest.mark.parametrize("which", ["x", "weight_src", "att_dst"])
def test_writes_between_the_passes_are_noticed(which):
    (layers,), _ = case("one", 2, 2, True)
    inputs = layers[0]._replace(**{which: getattr(layers[0], which) * 1})
    (out,) = gat_layers([[inputs]], How(0.2, True), keeper()[0])
    getattr(inputs, which).data  # noqa: B018 - reads
    with torch.no_grad():
        getattr(inputs, which).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
