"""ops.gatv2_scores against its definition in float64: values, gradients, second derivatives, bad arguments."""

import pytest
import torch
from test_attention import GRAPHS, WIDTHS, random_graph

from gnnaccel import ops
from gnnaccel.ops import reference
from gnnaccel.ops._arrays import arrays_of

CASES = [(name, *width) for name in ("random", "hub") for width in (*WIDTHS, (2, 128), (1, 300))]
CASES += [(name, *width) for name in GRAPHS if name not in ("random", "hub") for width in ((1, 7), (4, 16), (2, 0))]


def inputs(graph, heads, feats, dtype):
    generator = torch.Generator().manual_seed(7)
    shapes = ((graph.num_cols, heads, feats), (graph.num_rows, heads, feats), (heads, feats))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name,heads,feats", CASES)
def test_gatv2_scores_matches_reference(name, heads, feats, dtype, tolerance):
    graph = GRAPHS[name]()
    leaves = inputs(graph, heads, feats, dtype)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    got, want = ops.gatv2_scores(graph, *leaves), reference.gatv2_scores(graph, *exact, 0.2)
    upstream = torch.randn(want.shape, dtype=torch.float64)
    got = (got, *torch.autograd.grad(got, leaves, upstream.to(dtype)))
    want = (want, *torch.autograd.grad(want, exact, upstream.to(dtype).double()))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        size = b.abs().max().clamp(min=1) if b.numel() else 1
        torch.testing.assert_close(a.double() / size, b / size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_some_gradients_alone_of_gatv2_scores(wanted):
    graph = random_graph(30, 20, 200, 0)
    leaves = [
        t.detach().requires_grad_(bool(w)) for t, w in zip(inputs(graph, 2, 8, torch.float64), wanted, strict=True)
    ]
    asked = [t for t in leaves if t.requires_grad]
    got = torch.autograd.grad(ops.gatv2_scores(graph, *leaves).square().sum(), asked)
    want = torch.autograd.grad(reference.gatv2_scores(graph, *leaves, 0.2).square().sum(), asked)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_registration_and_derivatives():
    graph = random_graph(6, 5, 20, 4)
    leaves = inputs(graph, 2, 3, torch.float64)
    torch.autograd.gradcheck(lambda *t: ops.gatv2_scores(graph, *t), leaves)
    torch.autograd.gradgradcheck(lambda *t: ops.gatv2_scores(graph, *t), leaves)
    square = random_graph(6, 6, 20, 4)
    x, _, vectors = inputs(square, 2, 3, torch.float64)
    torch.autograd.gradgradcheck(lambda x, a: ops.gatv2_scores(square, x, x, a), (x, vectors))
    torch.library.opcheck(torch.ops.gnnaccel.gatv2_scores, (*arrays_of(graph, True).flat(), *leaves, 0.2))
    weights = torch.randn(graph.nnz, 2, dtype=torch.float64)
    given = [t.detach() for t in leaves]
    for products in (True, False):
        torch.library.opcheck(
            torch.ops.gnnaccel.gatv2_sums, (*arrays_of(graph, True).flat(), *given, weights, 0.2, products)
        )
        options = 0.2, products, True, not products
        torch.library.opcheck(
            torch.ops.gnnaccel.gatv2_scores_backward, (*arrays_of(graph, True).flat(), *given, weights, *options)
        )


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(x=torch.zeros(20, 8)), ValueError, "x: expected shape"),
        (dict(y=torch.zeros(29, 2, 4)), ValueError, "y: expected 30 rows"),
        (dict(y=torch.zeros(30, 2, 5)), ValueError, "y: expected shape"),
        (dict(vectors=torch.zeros(2, 3)), ValueError, "vectors: expected shape"),
        (dict(vectors=torch.zeros(2, 4).double()), TypeError, "vectors"),
        (dict(graph="graph"), TypeError, "gnnaccel.Graph"),
    ],
)
def test_bad_arguments_of_gatv2_scores(change, error, words):
    given = dict(graph=GRAPHS["random"](), x=torch.zeros(20, 2, 4), y=torch.zeros(30, 2, 4), vectors=torch.zeros(2, 4))
    given.update(change)
    with pytest.raises(error, match=words):
        ops.gatv2_scores(given.pop("graph"), *given.values())
