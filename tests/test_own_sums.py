"""Sums of several layers with their rows' own features in one walk, against their definition."""

import pytest
import torch
from test_relation_sums import graph, keeper, values

from gnnaccel.ops.own_sums import OwnSum, own_sums
from gnnaccel.ops.reference import spmm

SIZES = (5, 7, 4)
RELATIONS = ((0, 1, 9), (1, 1, 8), (2, 0, 7), (1, 2, 0), (2, 2, 300))  # (source, destination, edges)


def case():
    xs = [values(n, 3, seed=i) for i, n in enumerate(SIZES)]
    layers = []
    for i, (source, target, count) in enumerate(RELATIONS):
        eps = torch.tensor(0.5 * i if i % 2 else [-0.25 * i], dtype=torch.float64)
        layers.append(OwnSum(graph(SIZES[source], count, seed=i, rows=SIZES[target]), xs[source], xs[target], eps))
    return layers, xs


def wanted(layers):
    return [spmm(graph, x, None, "copy_lhs", "sum") + (1 + eps) * own for graph, x, own, eps in layers]


@pytest.mark.parametrize("each", [False, True])
def test_other_factors_of_a_kept_plan(each):
    layers, xs = case()
    kept, store = keeper()
    for scale in (1, 2):  # of a plan that is kept, other factors
        layers = [layer._replace(eps=scale * layer.eps) for layer in layers]
        want, got = wanted(layers), own_sums(layers, kept, each)
        torch.testing.assert_close(got, want)
        grads = [values(*out.shape, seed=80 + i).detach() for i, out in enumerate(want)]
        torch.testing.assert_close(torch.autograd.grad(got, xs, grads), torch.autograd.grad(want, xs, grads))
    assert len(store) == (not each)
    got[0].relu_()  # results are no views of each other
    torch.testing.assert_close(got[0], want[0].relu())


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("used", [(0,), (2, 4), ()])
def test_of_what_nothing_is_made_there_are_no_gradients(used, each):
    layers, xs = case()
    xs[2].requires_grad_(False)
    want, got = wanted(layers), own_sums(layers, keeper()[0], each)
    assert [out.requires_grad for out in got] == [out.requires_grad for out in want]
    used = [i for i in used if want[i].requires_grad]
    if used:
        pairs = [torch.autograd.grad([o[i].sum() for i in used], xs[:2], allow_unused=True) for o in (got, want)]
        assert [a is None for a in pairs[0]] == [b is None for b in pairs[1]]
        torch.testing.assert_close(*[[a for a in found if a is not None] for found in pairs])
