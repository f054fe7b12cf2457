"""Sums with maps behind them over a sampled batch: those of any graph, with as much of the work as the gradient needs."""

import pytest
import torch
from oracle import rand
from torch.nn import functional as F

from gnnaccel import ops, sampling
from gnnaccel.graph import hops
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.hops import Hops
from gnnaccel.ops import linear_sums, reference, sampled_sums

IN, OUT, NODES = 6, 4, 200
DEVICE = "cuda" if torch.cuda.is_available() and ops.has_cuda_kernels() else "cpu"


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setattr(sampled_sums, "_LEAST", 0)
    monkeypatch.setattr(sampled_sums, "_LEAST_ASKED", {"cpu": 0, "cuda": 0})


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
def test_against_the_reference(given, until, reduce):
    """With a gradient that is zero behind the nodes of some hop, or in none."""
    graph = sampled(**given)
    nodes = hops.of(graph).nodes
    rows = graph.num_rows if until is None else nodes[min(until, len(nodes) - 1)]
    given = leaves(graph)
    results = []
    for function in (lambda *args: linear_sums.sum_mapped(graph, args[0], reduce, *args[1:]), None):
        out = function(*given) if function else exact(graph, reduce, *given)
        grad = torch.zeros_like(out)
        grad[:rows] = torch.arange(rows * OUT, device=DEVICE).view(rows, OUT).double().sin()
        results.append((out, *torch.autograd.grad(out, given, grad)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_what_is_left_out(monkeypatch):
    """Products of as many rows as have a gradient, and sums of as many as have edges."""
    graph = sampled(seeds=range(4))
    nodes, sums = hops.of(graph).nodes, []
    spmm = sampled_sums.spmm
    monkeypatch.setattr(sampled_sums, "spmm", lambda g, *args, **how: sums.append(g.num_rows) or spmm(g, *args, **how))
    asked = []
    whole = sampled_sums._gradient_of_sums
    monkeypatch.setattr(sampled_sums, "_gradient_of_sums", lambda g, *args: asked.append(g) or whole(g, *args))
    x, *maps = leaves(graph)
    out = linear_sums.sum_mapped(graph, x, "mean", *maps)
    out[: nodes[0]].sum().backward()
    assert sums == [nodes[-2]] and [(g.num_rows, g.num_cols) for g in asked] == [nodes[:2]]
    assert not x.grad[nodes[1] :].any() and x.grad[: nodes[0]].all()


def test_gradients_that_are_not_numbers():
    graph = sampled()
    given = leaves(graph)
    out = linear_sums.sum_mapped(graph, given[0], "sum", *given[1:])
    grad = torch.zeros_like(out)
    grad[-1] = torch.nan
    for found in torch.autograd.grad(out, given[2:], grad):  # that of the map of sums is of rows with edges alone
        assert found.isnan().any()


def test_derivatives_of_derivatives():
    graph = sampled(seeds=(1, 2), fanouts=(2, 2))
    x, *maps = leaves(graph)

    def function(x, *maps):
        return linear_sums.sum_mapped(graph, x, "mean", *maps)[:2]

    assert torch.autograd.gradcheck(function, (x, *maps))
    assert torch.autograd.gradgradcheck(function, (x, *maps))


def test_some_gradients_alone():
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
    assert not sampled_sums.pays(graph, x, maps[0])
    assert ops.spmm(graph, x).shape == (3, IN)
