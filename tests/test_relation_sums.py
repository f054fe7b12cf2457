"""Several edge types as one graph: each way of the sum of mapped sums against its definition, in float64."""

import pytest
import torch

from gnnaccel.graph import stack
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import relation_sums as module
from gnnaccel.ops.relation_sums import Own, Term, relation_sums

ROWS, KINDS = 7, ("sum", "mean", "left", "both")
WAYS = ("sums", "maps", "filled")


def graph(cols, count, seed, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    ends = [
        torch.randint(0, n, (count,), generator=generator) if count else torch.zeros(0).long() for n in (rows, cols)
    ]
    return Graph.from_coo(*ends, num_rows=rows, num_cols=cols)


def dense(graph, kind):
    """The matrix of a graph's sum of this kind."""
    found = torch.zeros(graph.num_rows, graph.num_cols, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(graph.num_rows), graph.indptr.diff().long())
    found.index_put_((rows, graph.indices.long()), torch.ones(graph.nnz).double(), accumulate=True)
    into, out = found.sum(1, keepdim=True).clamp(min=1), found.sum(0, keepdim=True).clamp(min=1)
    return {"sum": found, "mean": found / into, "left": found / out, "both": found / (into * out).sqrt()}[kind]


def values(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def case(kinds, counts):
    """Terms over two tensors of features of one width and one of another, with weights of both layouts."""
    xs = [values(5, 4, seed=1), values(9, 4, seed=2), values(6, 3, seed=3)]
    terms, params = [], []
    for i, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        x, turned = xs[i % 3], i % 2 == 0
        weight = values(*((2, x.shape[1]) if turned else (x.shape[1], 2)), seed=10 + i)
        terms.append(Term(graph(len(x), count, seed=i), x, weight, kind, turned))
        params.append(weight)
    biases, own = [values(2, seed=30 + i) for i in range(2)], Own(values(ROWS, 3, seed=4), [values(2, 3, seed=40)] * 2)
    used = [x for x in xs if any(term.x is x for term in terms)]
    return terms, biases, own, [*used, own.x, *params, *biases, own.weights[0]]


def definition(terms, biases, own):
    out = sum(dense(t.graph, t.kind) @ t.x @ (t.weight.t() if t.transposed else t.weight) for t in terms)
    return out + sum(biases) + sum(own.x @ w.t() for w in own.weights)


def keeper():
    store = {}

    def kept(key, make):
        if key not in store:
            store[key] = make()
        return store[key]

    return kept, store


def force(monkeypatch, way):
    monkeypatch.setattr(module, "_maps_first", lambda *_: way == "maps")
    monkeypatch.setattr(module, "_filled", lambda terms: 1 if way == "filled" else None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", [(9, 8, 7, 6, 5), (0, 8, 0, 6, 5), (400, 1, 1, 1, 1), (0, 0, 0, 0, 0)])
@pytest.mark.parametrize("kinds", [("sum",) * 5, ("mean",) * 5, ("both",) * 5, (*KINDS, "sum")])
def test_relation_sums_and_gradients(way, counts, kinds, monkeypatch):
    force(monkeypatch, way)
    terms, biases, own, inputs = case(kinds, counts)
    kept, store = keeper()
    want = definition(terms, biases, own)
    grad = values(*want.shape, seed=50).detach()
    expected = torch.autograd.grad(want, inputs, grad)
    for _ in range(2):  # the second time with what the first has kept
        got = relation_sums(terms, kept, biases, own)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got, inputs, grad), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert {key[0] for key in store} == {way}


@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_of_relation_sums(way, monkeypatch):
    force(monkeypatch, way)
    terms, _, _, inputs = case(("mean", "sum", "both"), (6, 5, 4))
    kept, _ = keeper()

    def call(*given):
        it = iter(given[:3])
        fresh = {id(x): next(it) for x in inputs[:3]}
        weights = given[4:7]
        parts = [t._replace(x=fresh[id(t.x)], weight=w) for t, w in zip(terms, weights, strict=True)]
        return relation_sums(parts, kept, given[7:9], Own(given[3], [given[9]] * 2))

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_a_layer_without_own_features_or_gradients():
    terms, _, _, _ = case(("sum", "sum"), (9, 9))
    kept, _ = keeper()
    with torch.no_grad():
        want = sum(dense(t.graph, t.kind) @ t.x @ (t.weight.t() if t.transposed else t.weight) for t in terms)
        torch.testing.assert_close(relation_sums(terms, kept), want)


def test_which_way_is_chosen():
    def terms(rows, edges, width, outputs):
        x = torch.zeros(rows, width)
        return [
            Term(graph(rows, edges, seed=i, rows=rows), x, torch.zeros(outputs, width), "sum", True) for i in range(3)
        ]

    sparse, full = terms(2000, 100, 64, 64), terms(2000, 20_000, 64, 64)
    assert module._filled(sparse) == sum(stack.filled_rows(t.graph) for t in sparse) and module._filled(full) is None
    assert module._maps_first(terms(2000, 20_000, 64, 8), None) and not module._maps_first(
        terms(2000, 20_000, 8, 64), None
    )
    wide = [t._replace(x=torch.zeros(10_000 + i, 64)) for i, t in enumerate(terms(50, 20, 64, 64))]
    assert not module.is_profitable(wide) and module.is_profitable(full)


def test_gcn_factors():
    g = Graph.from_coo(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 3]), num_rows=4, num_cols=4)
    want = [1 / 2, (2 * 1) ** -0.5, 1.0, 0.0]
    torch.testing.assert_close(stack.factor(g, "gcn", torch.float64), torch.tensor(want, dtype=torch.float64))
