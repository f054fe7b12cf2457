"""Sums with maps behind them over a sampled batch: those of any graph, with as much of the work as gradients need."""

import pytest
import torch
from oracle import rand
from torch.nn import functional as F

from gnnaccel import ops, sampling
from gnnaccel.graph import hops
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.hops import Hops
from gnnaccel.lower import bounds
from gnnaccel.ops import gradient_rows, linear_sums, reference, sampled_sums

IN, OUT, NODES = 6, 4, 200
DEVICE = "cuda" if torch.cuda.is_available() and ops.has_cuda_kernels() else "cpu"


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setattr(bounds, "SAMPLED_PRODUCTS", 0)
    monkeypatch.setattr(torch.autograd, "backward", gradient_rows.telling(torch.autograd.backward))


def sampled(seeds=(5, 7, 7, 9), fanouts=(3, 4, 2), more=0) -> Graph:
    """A batch's graph, of `more` nodes than it has."""
    degrees = torch.randint(0, 6, (NODES,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    out = sampling.neighbor_sample(indptr, torch.randint(NODES, (int(indptr[-1]),)), torch.tensor(seeds), list(fanouts))
    size = out.node.numel() + more
    graph = Graph.from_coo(out.col, out.row, num_rows=size, num_cols=size).to(DEVICE)
    assert graph.edge_ids is None
    hops.put(graph, Hops.of_counts(out.num_nodes_per_hop, out.num_edges_per_hop))
    return graph


def leaves(graph, dtype=torch.float64):
    shapes = [(graph.num_cols, IN), (OUT, IN), (OUT,), (OUT, IN)]
    return [rand(*shape, dtype=dtype).to(DEVICE).requires_grad_() for shape in shapes]


def exact(graph, reduce, x, weight, bias, own_weight):
    return F.linear(reference.spmm(graph, x, None, "copy_lhs", reduce), weight, bias) + F.linear(x, own_weight)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("until", [0, 1, 2, 3, None])
@pytest.mark.parametrize("given", [{}, {"more": 5}, {"fanouts": (3,)}, {"fanouts": (2, 0, 3)}, {"seeds": range(NODES)}])
def test_sampled_sums_against_the_reference(given, until, reduce):
    """With a loss of the nodes there are before some hop, or of all."""
    graph = sampled(**given)
    nodes = hops.of(graph).nodes
    rows = graph.num_rows if until is None else nodes[min(until, len(nodes) - 1)]
    given, scale = leaves(graph), torch.arange(rows * OUT, device=DEVICE).view(rows, OUT).double().sin()
    results = []
    for function in (lambda *args: linear_sums.sum_mapped(graph, args[0], reduce, *args[1:]), None):
        out = function(*given) if function else exact(graph, reduce, *given)
        for leaf in given:
            leaf.grad = None
        (out[:rows] * scale).sum().backward()
        results.append((out, *(leaf.grad for leaf in given)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_what_is_left_out(monkeypatch):
    """Products of as many rows as have a gradient, and sums of as many as have edges."""
    graph = sampled(seeds=range(4))
    nodes, sums = hops.of(graph).nodes, []
    forward = sampled_sums._sums
    monkeypatch.setattr(sampled_sums, "_sums", lambda g, *args: sums.append(g.num_rows) or forward(g, *args))
    asked = []
    whole = sampled_sums._gradient_of_sums
    monkeypatch.setattr(sampled_sums, "_gradient_of_sums", lambda g, *args: asked.append(g) or whole(g, *args))
    x, *maps = leaves(graph)
    out = linear_sums.sum_mapped(graph, x, "mean", *maps)
    out[: nodes[0]].sum().backward()
    assert sums == [nodes[-2]] and [(g.num_rows, g.num_cols) for g in asked] == [nodes[:2]]
    assert not x.grad[nodes[1] :].any() and x.grad[: nodes[0]].all()


USES = {  # of a result: how many of its rows count, None: all
    "seeds": (lambda out: out[:4], 4),
    "seeds twice": (lambda out: torch.cat([out[:4], out.narrow(0, 0, 3)]), 4),
    "elementwise": (lambda out: F.dropout((out.relu() + 1) * 2, 0.5)[:5], 5),
    "a row each": (lambda out: F.log_softmax(F.layer_norm(out, (OUT,)), 1)[:5], 5),
    "a slice of a slice": (lambda out: out[:9].relu()[:5], 5),
    "a row each, counted from the end": (lambda out: F.softmax(out, -1)[:5], 5),
    "softmax of columns": (lambda out: F.log_softmax(out, 0)[:4], None),
    "softmax of columns, counted from the end": (lambda out: F.softmax(out, -2)[:4], None),
    "a norm of all": (lambda out: F.layer_norm(out, tuple(out.shape))[:4], None),
    "columns": (lambda out: out[:, :2][:5], None),
    "all": (lambda out: out, None),
    "the last ones": (lambda out: out[3:], None),
    "all but the last ones": (lambda out: out[:-3], None),
    "steps": (lambda out: out[:6:2], None),
    "a mask": (lambda out: out[torch.arange(len(out), device=DEVICE) < 4], None),
    "seeds and all": (lambda out: torch.cat([out[:4], out.relu()]), None),
    "other rows": (lambda out: out.flip(0)[:4], None),
    "norms of columns": (lambda out: F.batch_norm(out, None, None, training=True)[:4], None),
    "broadcast": (lambda out: (out * torch.ones(2, len(out), OUT, device=DEVICE))[:1], None),
    "a product": (lambda out: (out.t() @ out)[:2], None),
}


@pytest.mark.parametrize("name", USES)
def test_rows_that_count(name, monkeypatch):
    graph, seen = sampled(), []
    hop_of = sampled_sums.hop_of
    monkeypatch.setattr(sampled_sums, "hop_of", lambda rows, hops: seen.append(rows) or hop_of(rows, hops))
    given = leaves(graph)
    (use, count), results = USES[name], []
    for function in (linear_sums.sum_mapped, lambda g, x, reduce, *maps: exact(g, reduce, x, *maps)):
        torch.manual_seed(5)
        for leaf in given:
            leaf.grad = None
        out = function(graph, given[0] * 1, "mean", *given[1:])
        loss = (use(out) * 3).square().sum()
        loss.backward(retain_graph=True)
        results.append([leaf.grad.clone() for leaf in given])
    assert set(seen) == (set() if count is None else {count})
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


HOOKS = {
    "a tensor's": lambda t: t.register_hook(lambda grad: grad + 1),
    "a node's": lambda t: t.grad_fn.register_hook(lambda grads, _: (grads[0] + 1,)),
    "a node's, before": lambda t: t.grad_fn.register_prehook(lambda grads: (grads[0] + 1,)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_make_something_of_zeros(name):
    graph, results = sampled(), []
    given = leaves(graph)
    for function in (linear_sums.sum_mapped, lambda g, x, reduce, *maps: exact(g, reduce, x, *maps)):
        for leaf in given:
            leaf.grad = None
        middle = function(graph, given[0], "mean", *given[1:]).relu()
        HOOKS[name](middle)
        middle[:4].sum().backward()
        results.append([leaf.grad.clone() for leaf in given])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)
    assert results[0][0].any(1).sum() > 20


def test_a_hook_behind_another_pass():
    """Of a forward pass before it, though another one came since."""
    graph, results = sampled(), []
    for function in (linear_sums.sum_mapped, lambda g, x, reduce, *maps: exact(g, reduce, x, *maps)):
        torch.manual_seed(3)
        given, others = leaves(graph), leaves(graph)
        first = function(graph, given[0], "mean", *given[1:])
        torch.ones((), requires_grad=True).mul(2).backward()
        first.register_hook(lambda grad: grad + 1)
        second = function(graph, others[0], "mean", *others[1:])
        (first[:4].sum() + second[:4].sum()).backward()
        results.append([leaf.grad for leaf in (*given, *others)])
    torch.testing.assert_close(*results)


ROOTS = {
    "a generator": lambda out: ((root for root in [out[:4].sum()]), None),
    "an edge of the graph": lambda out: (
        [out[:4].sum(), torch.autograd.graph.get_gradient_edge(out)],
        [None, torch.ones_like(out)],
    ),
    "only an edge": lambda out: (torch.autograd.graph.get_gradient_edge(out), torch.ones_like(out)),
    "two": lambda out: ([out[:4].sum(), out[2:7].square().sum()], None),
}


@pytest.mark.parametrize("name", ROOTS)
def test_roots(name):
    graph, results = sampled(), []
    for function in (linear_sums.sum_mapped, lambda g, x, reduce, *maps: exact(g, reduce, x, *maps)):
        torch.manual_seed(3)
        given = leaves(graph)
        out = function(graph, given[0], "mean", *given[1:])
        torch.autograd.backward(*ROOTS[name](out))
        results.append([leaf.grad for leaf in given])
    torch.testing.assert_close(*results)


def test_nothing_is_told_of_another_pass():
    graph = sampled()
    x, *maps = leaves(graph)
    out = linear_sums.sum_mapped(graph, x, "mean", *maps)
    out[:4].sum().backward(retain_graph=True)
    (few,), x.grad = [x.grad.clone()], None
    out.sum().backward(retain_graph=True)
    assert x.grad[len(x.grad) // 2 :].any() and not few[hops.of(graph).nodes[1] :].any()
    whole = torch.autograd.grad(out.sum(), x)[0]  # which tells nobody
    torch.testing.assert_close(whole, x.grad)


def test_derivatives_of_derivatives_of_sampled_sums():
    graph = sampled(seeds=(1, 2), fanouts=(2, 2))
    x, *maps = leaves(graph)

    def function(x, *maps):
        return linear_sums.sum_mapped(graph, x, "mean", *maps)[:2]

    assert torch.autograd.gradcheck(function, (x, *maps))
    assert torch.autograd.gradgradcheck(function, (x, *maps))


def test_some_gradients_alone_of_sampled_sums():
    graph = sampled()
    for wanted in range(1, 4):
        given = leaves(graph)
        for k, t in enumerate(given):
            t.requires_grad_(k in (wanted, 3))  # that of the last map is always kept
        out = linear_sums.sum_mapped(graph, given[0], "mean", *given[1:])
        of = [t for t in given if t.requires_grad]
        for got, right in zip(
            torch.autograd.grad(out[:3].sum(), of),
            torch.autograd.grad(exact(graph, "mean", *given)[:3].sum(), of),
            strict=True,
        ):
            torch.testing.assert_close(got, right)


def test_hops_of_the_first_edges():
    whole = Hops.of_counts([2, 3, 0, 4], [3, 0, 7])
    assert (whole.nodes, whole.edges, whole.num_filled) == ((2, 5, 5, 9), (0, 3, 3, 10), 5)
    first = whole.first(3)
    assert (first.nodes, first.edges, first.num_filled) == ((2, 5), (0, 3), 2)
    assert whole.first(4) is None and whole.first(0).num_filled == 0


def test_a_batch_without_edges_goes_the_general_way():
    graph = Graph.from_coo(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), num_rows=3, num_cols=3)
    hops.put(graph, Hops.of_counts([3, 0], [0]))
    x, *maps = (rand(*shape) for shape in ((3, IN), (OUT, IN), (OUT,), (OUT, IN)))
    assert not sampled_sums.is_profitable(graph, x, maps[0])
    assert ops.spmm(graph, x).shape == (3, IN)


def test_graphs_of_too_many_nodes_are_left_after_a_few():
    class Node:
        asked = 0

        @property
        def next_functions(self):
            Node.asked += 1
            return ((Node(), 0),)  # without an end

    assert gradient_rows._consumers_first([Node()]) == {} and Node.asked <= bounds.GRADIENT_NODES + 1


def test_nothing_is_looked_for_before_a_node_was_recorded(monkeypatch):
    asked, ever = [], []
    monkeypatch.setattr(gradient_rows, "_ever", ever)
    monkeypatch.setattr(gradient_rows, "_consumers_first", lambda roots: asked.append(1) or {})
    for _ in range(2):
        torch.autograd.backward(torch.ones(2, requires_grad=True).sum())
    assert not asked
    graph = sampled()
    weights = [rand(OUT, IN).requires_grad_() for _ in range(2)]
    x, *weights = (t.to(DEVICE) for t in (rand(graph.num_cols, IN), *weights))
    out = sampled_sums.sum_mapped(graph, x, "sum", weights[0], None, weights[1])
    torch.autograd.backward(out.sum())
    assert asked and ever
