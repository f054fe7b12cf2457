"""The layers of several edge types into several node types as one node of autograd, against `relation_sums`."""

import sys

import layer_contracts as contracts
import pytest
import torch
from test_relation_sums import definition, graph, keeper, values

from gnnaccel.graph.stack import factor
from gnnaccel.lower import bounds
from gnnaccel.ops import relation_layers as module
from gnnaccel.ops import relation_rows
from gnnaccel.ops.relation_layers import Target, relation_layers
from gnnaccel.ops.relation_sums import Own, Term

SIZES, WIDTHS = (5, 7, 4, 6), (4, 4, 3, 4)
# (source, destination, edges) of each relation, and the kinds of the sums.
RELATIONS = ((0, 1, 9), (1, 1, 8), (2, 1, 7), (0, 3, 6), (3, 3, 0), (1, 2, 5), (2, 2, 300))
KINDS = {
    "sum": ("sum",) * 7,
    "mean": ("mean",) * 7,
    "both": ("sum", "mean", "sum", "mean", "mean", "sum", "sum"),
    "factors": ("both", "left", "sum", "mean", "both", "both", "left"),
    "weighted": ("sum",) * 7,
    "some weighted": ("sum", "mean", "sum", "mean", "mean", "sum", "mean"),
}


@pytest.fixture(autouse=True, params=["side by side", "rows"])
def tiny(request, monkeypatch):
    """What takes less one by one is put together as well. rows: of those that have edges alone, as on a GPU."""
    monkeypatch.setattr(bounds, "RELATION_LAYERS_TINY", 0)
    if request.param == "rows":
        monkeypatch.setattr(sys.modules[__name__], "WIDTHS", (4,) * len(SIZES))
        monkeypatch.setattr(bounds, "TOTALS_ROWS", 2)

        def plan_of(targets, *given):
            *given, kept = given
            by_rows = relation_rows.fit(targets)
            return relation_rows.planned(targets, *given) if by_rows else module.planned(targets, *given, kept)

        monkeypatch.setattr(module, "_plan_of", plan_of)


def case(name, relations=RELATIONS, owns=(1, 3), outputs=2):
    """Targets over four node types of two widths, weights of both layouts, and the leaves. Of names with "weighted" the
    edges have weights, or those of some."""
    kinds, every = KINDS[name], 2 if name.startswith("some") else 1
    xs = [values(n, width, seed=i) for i, (n, width) in enumerate(zip(SIZES, WIDTHS, strict=True))]
    targets, leaves = [], list(xs)
    for target in dict.fromkeys(destination for _, destination, _ in relations):
        terms, biases = [], [values(outputs, seed=30 + target + k) for k in range(2)][: target % 3]
        for i, (source, destination, count) in enumerate(relations):
            if destination == target:
                x, turned = xs[source], i % 3 > 0
                weight = values(*((outputs, x.shape[1]) if turned else (x.shape[1], outputs)), seed=10 + i)
                relation = graph(SIZES[source], count, seed=i, rows=SIZES[target])
                weighted = "weighted" in name and i % every == 0
                of_edges = values(count, seed=60 + i).detach() if weighted else None
                terms.append(Term(relation, x, weight, kinds[i], turned, of_edges))
        weights = [values(outputs, WIDTHS[target], seed=50 + k) for k in range(2)]
        own = Own(xs[target], weights) if target in owns else None
        leaves += [*[term.weight for term in terms], *([] if own is None else own.weights), *biases]
        targets.append(Target(terms, keeper()[0], biases, own))
    return targets, leaves


def wanted(targets):
    outs = []
    for terms, _, biases, own in targets:
        weighted = [term for term in terms if term.edge_weight is not None]
        plain = [term for term in terms if term.edge_weight is None]
        out = definition(plain, biases or [0], own or Own(terms[0].x, []))
        outs.append(out + sum(matrix_of(t) @ t.x @ t.matrix for t in weighted))
    return outs


def matrix_of(term):
    """The weights of the edges, times their factors, as a matrix."""
    weights, each = term.edge_weight, term.graph
    weights = weights if each.edge_ids is None else weights[each.edge_ids.long()]
    rows = torch.repeat_interleave(torch.arange(each.num_rows), each.indptr.diff().long())
    made = torch.zeros(each.num_rows, each.num_cols, dtype=weights.dtype)
    values_ = weights * factor(each, term.kind, weights.dtype)
    return made.index_put_((rows, each.indices.long()), values_, accumulate=True)


def op(targets, leaves, kept=None):
    kept = kept or keeper()[0]
    return contracts.Op(lambda: relation_layers(targets, kept), lambda: wanted(targets), leaves)


@pytest.mark.parametrize("owns", [(), (2,), (1, 2, 3)])
@pytest.mark.parametrize("kinds", KINDS)
def test_results_and_gradients_of_relation_layers(kinds, owns):
    targets, leaves = case(kinds, owns=owns)
    kept, store = keeper()
    got = contracts.results_and_gradients(op(targets, leaves, kept), calls=5)  # beyond those of which nothing is kept
    assert len({out.grad_fn for out in got}) == 1 and got[0].grad_fn.name() == "_LayersBackward"
    assert len(store) == 1


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 2)])
def test_gradients_where_some_relation_layers_are_used(used, again):
    contracts.gradients_where_some_results_are_used(op(*case("both")), used, again)


@pytest.mark.parametrize("needs", ["features", "weights", "one feature", "one weight", "nothing"])
def test_some_gradients(needs):
    targets, leaves = case("sum")
    chosen = {"features": leaves[:4], "weights": leaves[4:], "one feature": leaves[2:3], "one weight": leaves[5:6]}
    chosen = chosen.get(needs, [])
    for leaf in leaves:
        leaf.requires_grad_(any(leaf is each for each in chosen))
    got, want = relation_layers(targets, keeper()[0]), wanted(targets)
    torch.testing.assert_close(got, want)
    assert [out.requires_grad for out in got] == [out.requires_grad for out in want]
    if chosen:
        pairs = [
            torch.autograd.grad([out.square().sum() for out in outs if out.requires_grad], chosen)
            for outs in (got, want)
        ]
        torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("kinds", ["both", "factors", "some weighted"])
def test_second_derivatives_of_relation_layers(kinds):
    targets, leaves = case(kinds, RELATIONS[:5])
    kept, _ = keeper()

    def call(*given):
        fresh = {id(leaf): each for leaf, each in zip(leaves, given, strict=True)}
        again = []
        for terms, of_target, biases, own in targets:
            terms = [t._replace(x=fresh[id(t.x)], weight=fresh[id(t.weight)]) for t in terms]
            own = None if own is None else Own(fresh[id(own.x)], [fresh[id(w)] for w in own.weights])
            again.append(Target(terms, of_target, [fresh[id(b)] for b in biases], own))
        return tuple(relation_layers(again, kept))

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)
    # First derivatives that have derivatives of their own, on edges that came in no order.
    assert any(term.graph.edge_ids is not None for target in targets for term in target.terms)
    pairs = []
    for outs, again in ((call(*leaves), True), (wanted(targets), False)):
        loss = sum(out.square().sum() for out in outs)
        pairs.append(torch.autograd.grad(loss, leaves, create_graph=again))
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("kinds", KINDS)
def test_what_inference_has_kept_serves_training(kinds):
    targets, leaves = case(kinds)
    kept, _ = keeper()
    with torch.inference_mode():
        relation_layers(targets, kept)
    outs = [[out.square().sum() for out in each] for each in (relation_layers(targets, kept), wanted(targets))]
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves) for each in outs))


def test_layers_of_other_widths_on_the_same_graphs():
    """One behind the other: what is kept of one serves no other."""
    kept, _ = keeper()
    for outputs in (2, 3, 2):
        targets, _ = case("both", outputs=outputs)
        for _ in range(5):
            got = relation_layers(targets, kept)
        torch.testing.assert_close(list(got), wanted(targets))


def test_gradients_of_several_vectors_at_once_of_relation_layers():
    contracts.gradients_of_several_vectors_at_once(op(*case("mean")))


def test_features_that_are_written_into():
    """No first derivative reads them; a second one would, and says so."""
    targets, leaves = case("sum")
    scaled = [leaf * 1 for leaf in leaves[:4]]
    fresh = dict(zip(map(id, leaves), scaled, strict=False))
    targets = [
        t._replace(
            terms=[term._replace(x=fresh[id(term.x)]) for term in t.terms],
            own=None if t.own is None else Own(fresh[id(t.own.x)], t.own.weights),
        )
        for t in targets
    ]
    want = torch.autograd.grad([out.square().sum() for out in wanted(targets)], leaves, retain_graph=True)
    got = relation_layers(targets, keeper()[0])
    loss = sum(out.square().sum() for out in got)
    scaled[0].zero_()
    torch.testing.assert_close(torch.autograd.grad(loss, leaves, retain_graph=True), want)
    with pytest.raises(RuntimeError, match="written into after the forward pass"):
        torch.autograd.grad(loss, leaves, create_graph=True)


@pytest.mark.parametrize("kinds", ["sum", "mean"])
def test_an_optimizer_that_steps_between_forward_and_backward(kinds):
    """Gradients are those of the parameters that the forward pass had; a second derivative says that it has others."""
    targets, leaves = case(kinds)
    want = torch.autograd.grad([out.square().sum() for out in wanted(targets)], leaves)
    loss = sum(out.square().sum() for out in relation_layers(targets, keeper()[0]))
    with torch.no_grad():
        for leaf in leaves:
            leaf.add_(1)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves, retain_graph=True), want)
    with pytest.raises(RuntimeError, match="written into after the forward pass"):
        torch.autograd.grad(loss, leaves, create_graph=True)


@pytest.mark.parametrize("why", ["many", "weighted", "dtypes"])
def test_what_is_summed_one_by_one(why, monkeypatch):
    targets, _ = case("sum", RELATIONS[:3])
    first = targets[0].terms[0]
    if why == "many":
        monkeypatch.setattr(bounds, "RELATION_LAYERS_WORK", 0)
    elif why == "weighted":
        targets[0].terms[0] = first._replace(edge_weight=values(9, seed=90))
    else:
        other = case("sum", RELATIONS[5:])[0][0]
        terms = [t._replace(x=t.x.float(), weight=t.weight.float()) for t in other.terms]
        targets.append(Target(terms, keeper()[0], [], None))
    got = relation_layers(targets, keeper()[0])
    assert all(out.grad_fn.name() != "_LayersBackward" for out in got)
    if why in ("many", "dtypes"):
        torch.testing.assert_close(got[0], wanted(targets[:1])[0])


@pytest.mark.parametrize("kinds, made", [("sum", 2), ("factors", 2), ("weighted", 0)])
def test_what_takes_less_by_itself(kinds, made, monkeypatch):
    monkeypatch.setattr(bounds, "RELATION_LAYERS_TINY", 1 << 22)
    targets, _ = case("sum" if kinds == "weighted" else kinds)
    if kinds == "weighted":
        targets[0].terms[0] = targets[0].terms[0]._replace(edge_weight=values(9, seed=90))
    kept, _ = keeper()
    results = [relation_layers(targets, kept) for _ in range(2)]
    assert [out is not None for out in results] == [False] * (2 - made) + [True] * made


@pytest.mark.parametrize("name", ["sum", "both"])
def test_types_without_nodes(name, monkeypatch):
    """Those of a product of their own, and beside others; and own features without numbers."""
    monkeypatch.setattr(sys.modules[__name__], "SIZES", (5, 7, 0, 0))
    relations = ((0, 1, 9), (1, 1, 8), (2, 1, 0), (0, 3, 0), (3, 3, 0), (1, 2, 0))
    targets, leaves = case(name, relations, owns=(1, 2))
    want, got = wanted(targets), relation_layers(targets, keeper()[0])
    torch.testing.assert_close(got, want)
    expected, found = (torch.autograd.grad([out.square().sum() for out in outs], leaves) for outs in (want, got))
    torch.testing.assert_close(found, expected)
    none = values(7, 0, seed=5)
    own = Own(none, [values(2, 0, seed=6)])
    (out,) = relation_layers([targets[0]._replace(own=own)], keeper()[0])
    torch.testing.assert_close(out, wanted([targets[0]._replace(own=Own(leaves[1], []))])[0])
