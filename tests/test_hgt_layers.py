"""HGT over several types of nodes and edges, against its definition edge by edge, in float64."""

import layer_contracts as contracts
import pytest
import torch
from test_relation_sums import values

from gnnaccel.lower import bounds
from gnnaccel.ops import hgt_layers
from gnnaccel.ops.hgt_layers import Ends, Features, Relations, hgt_layer, planned

SIZES = (5, 7, 4, 0)
WIDTHS = {"one width": (6, 6, 6, 6), "each its own": (4, 6, 3, 6)}
# (source, destination, number of the edge type, edges), results
CASES = {
    "one": ([(0, 1, 0, 12)], [1]),
    "one without edges": ([(0, 1, 2, 0)], [1]),
    "among themselves": ([(1, 1, 1, 30)], [1]),
    "into one": ([(0, 1, 0, 12), (1, 1, 2, 9), (2, 1, 3, 0), (0, 1, 4, 40)], [1]),
    "into all": ([(0, 1, 0, 12), (2, 1, 1, 9), (1, 0, 2, 8), (0, 0, 3, 300), (1, 2, 4, 5)], [0, 1, 2]),
    "no nodes": ([(0, 1, 0, 12), (3, 1, 1, 0), (1, 3, 2, 0)], [0, 1, 3]),
}
RELATIONS = 5


@pytest.fixture(autouse=True, params=["of all", "of those with edges", "queries apart"])
def keys(request, monkeypatch):
    """Which sources have keys and values; those with edges alone, as on a GPU."""
    if request.param != "of all":
        monkeypatch.setattr(hgt_layers, "_ON_ROWS", ("cpu", "cuda"))
        monkeypatch.setattr(bounds, "HGT_TOGETHER_BYTES", {} if request.param == "queries apart" else {"cpu": 1 << 20})
    return request.param


def edges(source, target, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(max(n, 1), (count,), generator=generator) for n in (source, target)])


def case(name, widths, heads=2, width=3, prior=True):
    types, results = CASES[name]
    wide, present = heads * width, list(range(len(SIZES)))
    index = [edges(SIZES[s], SIZES[t], count, i) for i, (s, t, _, count) in enumerate(types)]
    x = [values(SIZES[i], WIDTHS[widths][i], seed=i) for i in present]
    features = Features(
        x,
        [values(3 * wide, WIDTHS[widths][i], seed=10 + i) for i in present],
        [values(3 * wide, seed=20 + i) for i in present],
    )
    maps = [values(heads * RELATIONS, width, width, seed=30 + i) for i in range(2)]
    relations = Relations(*maps, [values(1, heads, seed=40 + i) for i in range(len(types))])
    skips = [values(1, seed=50 + i) if WIDTHS[widths][i] == wide else None for i in results]
    ends = Ends(
        [x[i] for i in results],
        [values(wide, wide, seed=60 + i) for i in results],
        [values(wide, seed=70 + i) for i in results],
        skips,
    )
    alone = set(present) - set(results) - {s for s, _, _, _ in types}
    sizes = [tuple(each.shape) for each in x]
    plan = planned(index, [each[:3] for each in types], sizes, [*results, *sorted(alone)])
    leaves = [*x, *features.weights, *features.biases, *maps, *relations.priors, *ends.weights, *ends.biases]
    return (plan, features, relations, ends), leaves + [s for s in skips if s is not None], (types, results, index)


def definition(arguments, described):
    _, features, relations, ends = arguments
    types, results, index = described
    heads, width = relations.priors[0].shape[1], relations.keys.shape[1]
    parts = [
        (x @ weight.t() + bias).view(-1, 3, heads, width).unbind(1) for x, weight, bias in zip(*features, strict=True)
    ]
    outs = []
    for k, place in enumerate(results):
        rows = []
        for v in range(SIZES[place]):
            scores, sources = [], []
            for (source, target, number, _), each, prior in zip(types, index, relations.priors, strict=True):
                if target == place:
                    numbers = [h * RELATIONS + number for h in range(heads)]
                    u = each[0][each[1] == v]
                    key = torch.einsum("nhd,hde->nhe", parts[source][0][u], relations.keys[numbers])
                    scores.append((key * parts[place][1][v]).sum(-1) * prior / width**0.5)
                    sources.append(torch.einsum("nhd,hde->nhe", parts[source][2][u], relations.values[numbers]))
            if not scores:
                rows.append(relations.keys.new_zeros(heads * width))
                continue
            alpha = torch.cat(scores).softmax(0).unsqueeze(-1)
            rows.append((alpha * torch.cat(sources)).sum(0).flatten())
        attended = torch.stack(rows) if rows else parts[place][1].flatten(1)
        out = torch.nn.functional.gelu(attended) @ ends.weights[k].t() + ends.biases[k]
        if ends.skips[k] is not None:
            gate = ends.skips[k].sigmoid()
            out = gate * out + (1 - gate) * ends.x[k]
        outs.append(out)
    return outs


def some(grads):
    """Those that are not zero: the definition has none for edges and nodes that are not there."""
    return [grad for grad in grads if grad is not None and grad.count_nonzero()]


def op(arguments, leaves, described):
    return contracts.Op(lambda: hgt_layer(*arguments), lambda: definition(arguments, described), leaves, has_zeros=True)


def gradients(outs, leaves, grads):
    found = torch.autograd.grad(outs, leaves, grads, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("way", ["folded", "one after the other"])
@pytest.mark.parametrize("heads, width", [(2, 3), (1, 6), (2, 4)])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_of_hgt(name, widths, heads, width, way, monkeypatch):
    if way != "folded":
        monkeypatch.setattr(hgt_layers, "_folds", lambda *_: False)
    contracts.results_and_gradients(op(*case(name, widths, heads, width)))


def test_second_derivatives_of_hgt():
    contracts.second_derivatives(op(*case("into one", "one width")))


def test_gradients_of_several_vectors_at_once_of_hgt():
    contracts.gradients_of_several_vectors_at_once(op(*case("into one", "one width")))


def test_single_precision():
    arguments, leaves, described = case("into all", "one width", 2, 3)
    want = definition(arguments, described)
    grads = [values(*out.shape, seed=80 + i).detach() for i, out in enumerate(want)]
    expected = gradients(want, leaves, grads)
    single = {id(leaf): leaf.detach().float().requires_grad_() for leaf in leaves}

    def cast(part):
        if isinstance(part, torch.Tensor):
            return single[id(part)]
        return [cast(each) for each in part] if type(part) is list else part and type(part)(*map(cast, part))

    got = hgt_layer(arguments[0], *map(cast, arguments[1:]))
    found = gradients(got, list(single.values()), [grad.float() for grad in grads])
    for a, b in zip([*got, *found], [*want, *expected], strict=True):
        most = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4 * max(1.0, most))


def test_which_sources_have_keys(keys):
    plan = case("into all", "one width")[0][0]
    assert (plan.filled is None) == (keys == "of all")


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("used", [(0,), (1, 2), (2,)])
def test_results_that_nothing_is_made_of(used, second):
    """Their maps have no gradients; what is attended is one for all types, and has."""
    arguments, leaves, described = case("into all", "one width")
    found = contracts.gradients_where_some_results_are_used(op(arguments, leaves, described), used, second)
    after = len(arguments[3].weights) * 3
    assert [a is None for a in found[0][-after:]] == [b is None for b in found[1][-after:]]


@pytest.mark.parametrize("frozen", ["keys", "weights", "skips", "x"])
def test_frozen_parameters(frozen):
    arguments, leaves, described = case("into all", "one width")
    plan, features, relations, ends = arguments
    if frozen == "keys":
        relations = relations._replace(keys=relations.keys.detach())
    elif frozen == "weights":
        features = features._replace(weights=[w.detach() for w in features.weights])
    elif frozen == "skips":
        ends = ends._replace(skips=[s.detach() for s in ends.skips])
    else:
        x = [each.detach() for each in features.x]
        features, ends = features._replace(x=x), ends._replace(x=x[: len(ends.x)])
    arguments, found = (plan, features, relations, ends), []
    for outs in (hgt_layer(*arguments), definition(arguments, described)):
        grads = torch.autograd.grad(sum(out.square().sum() for out in outs), leaves, allow_unused=True)
        found.append(some(grads))
    torch.testing.assert_close(*found)


def test_edges_out_of_range_have_no_plan():
    for bad in (torch.tensor([[5], [0]]), torch.tensor([[0], [7]]), torch.tensor([[-1], [0]])):
        assert planned([bad], [(0, 1, 0)], [(5, 3), (7, 3)], [1]) is None


@pytest.mark.parametrize("which", ["x", "weights", "priors"])  # x as what the skips' gradients are made of
def test_writes_between_the_passes_are_noticed(which):
    (plan, features, relations, ends), _, _ = case("into all", "one width")
    if which == "priors":
        changed = relations.priors[0] * 1
        relations = relations._replace(priors=[changed, *relations.priors[1:]])
    else:
        parts = getattr(features, which)
        changed = parts[0] * 1
        features = features._replace(**{which: [changed, *parts[1:]]})
    outs = hgt_layer(plan, features, relations, ends)
    with torch.no_grad():
        changed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(out.sum() for out in outs).backward()
