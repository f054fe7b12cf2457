"""HAN's attention over several types of edges, and across them: definition; test_layer_contracts.py has more."""

import pytest
import torch
from test_hgt_layers import edges, some
from test_relation_sums import values

from gnnaccel.ops.han_layers import Maps, across, han_attention, planned, takes

SIZES, WIDTHS = (5, 7, 4, 0), (4, 6, 3, 6)
# (source, destination, edges)
CASES = {
    "one": [(0, 1, 12)],
    "among themselves": [(0, 0, 30)],
    "into one": [(0, 1, 12), (1, 1, 9), (2, 1, 0), (0, 1, 40)],
    "into all": [(0, 1, 12), (2, 1, 9), (1, 0, 8), (0, 0, 300), (1, 2, 5)],
    "no nodes": [(0, 1, 12), (3, 1, 0), (1, 3, 0)],
}
SLOPE = 0.2


def case(name, heads=2, width=3):
    types = CASES[name]
    used = sorted({end for source, target, _ in types for end in (source, target)})
    index = [edges(SIZES[s], SIZES[t], count, i) for i, (s, t, count) in enumerate(types)]
    maps = Maps(
        [values(SIZES[i], WIDTHS[i], seed=i) for i in used],
        [values(heads * width, WIDTHS[i], seed=10 + i) for i in used],
        [values(heads * width, seed=20 + i) for i in used],
        *[[values(1, heads, width, seed=k + i) for i in range(len(types))] for k in (30, 40)],
    )
    ends = [(used.index(s), used.index(t)) for s, t, _ in types]
    plan = planned(index, ends, [SIZES[i] for i in used])
    scale = torch.rand(sum(each.shape[1] for each in index), heads, dtype=torch.float64)
    return plan, maps, [t for part in maps for t in part], (index, ends, scale)


def definition(maps, described, scaled=True):
    index, ends, scale = described
    heads, width = maps.sources[0].shape[1:]
    mapped = [(x @ w.t() + b).view(-1, heads, width) for x, w, b in zip(*maps[:3], strict=True)]
    outs = {}
    factors = scale.split([each.shape[1] for each in index])
    for each, (source, target), factor, a, b in zip(index, ends, factors, maps.sources, maps.targets, strict=True):
        rows = []
        for v in range(len(mapped[target])):
            into = each[1] == v
            features = mapped[source][each[0][into]]
            scores = (features * a).sum(-1) + (mapped[target][v] * b[0]).sum(-1)
            alpha = torch.nn.functional.leaky_relu(scores, SLOPE).softmax(0)
            alpha = alpha * factor[into] if scaled else alpha
            rows.append((alpha.unsqueeze(-1) * features).sum(0).flatten())
        outs.setdefault(target, []).append(torch.stack(rows) if rows else mapped[target].flatten(1))
    return [torch.stack(outs[target], 1) for target in sorted(outs)]


def test_what_is_left_alone():
    plan, maps, _, _ = case("into one")
    frozen = maps._replace(weights=[maps.weights[0].detach(), *maps.weights[1:]])
    assert takes(plan, maps, 0.0) and not takes(plan, maps, -0.1) and not takes(plan, frozen, SLOPE)
    with torch.no_grad():
        assert takes(plan, frozen, SLOPE)
    assert planned([torch.tensor([[5], [0]])], [(0, 1)], [5, 7]) is None


@pytest.mark.parametrize("which", Maps._fields)
def test_writes_between_the_passes_are_noticed(which):
    plan, maps, _, _ = case("into all")
    parts = getattr(maps, which)
    changed = parts[0] * 1
    outs = han_attention(plan, maps._replace(**{which: [changed, *parts[1:]]}), None, SLOPE)
    with torch.no_grad():
        changed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(out.sum() for out in outs).backward()


def group(results, weight, bias, query):
    outs = []
    for each in results:
        each = torch.stack([part.relu() for part in each.unbind(1)])
        weights = (query * torch.tanh(each @ weight.t() + bias).mean(1)).sum(-1).softmax(0)
        outs.append(((weights.view(-1, 1, 1) * each).sum(0), weights))
    return outs


@pytest.mark.parametrize("used", [(0, 1, 2, 3, 4, 5), (0,), (3,), (2, 4)])
@pytest.mark.parametrize("frozen", [False, True])
def test_across(used, frozen):
    results = [values(n, count, 6, seed=n) for n, count in ((5, 1), (7, 3), (4, 2))]
    maps = [values(6, 6, seed=20), values(6, seed=21), values(1, 6, seed=22)]
    maps = [t.detach() for t in maps] if frozen else maps
    leaves, found = results if frozen else [*results, *maps], []
    for function in (across, group):
        outs = [out for pair in function(results, *maps) for out in pair]
        loss = sum((outs[i].sin() * (1 + i)).sum() for i in used)
        plain = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in some(first)), leaves, allow_unused=True)
        found.append((outs, [[g for g in part if g is not None] for part in (first, plain, second)]))
        found[-1] += ([g is None for g in first] == [g is None for g in plain],)
    torch.testing.assert_close(*[each[:2] for each in found])
    assert found[0][2] and found[1][2]
