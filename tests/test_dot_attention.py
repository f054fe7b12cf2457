"""ops.dot_attention and ops.edge_attention against their definitions in float64: values, gradients of both orders,
masks, dropout, bad arguments."""

import pytest
import torch
from test_attention import CASES, FACTORS, factors, random_graph
from test_attention import GRAPHS as ALL

from gnnaccel import ops
from gnnaccel.ops import reference
from gnnaccel.ops._arrays import arrays_of


def inputs(graph, heads, feats, dtype):
    generator = torch.Generator().manual_seed(7)
    counts = graph.num_rows, graph.num_cols, graph.num_cols
    made = (torch.randn(n, heads, feats, generator=generator, dtype=torch.float64) for n in counts)
    return [t.to(dtype).requires_grad_() for t in made]


def check(got, tensors, want, exact, tolerance):
    """Values and gradients of an op on `tensors` against those of its definition on `exact`."""
    grad = torch.randn(got.shape, dtype=torch.float64).to(got.dtype)
    results = zip(
        (got, *torch.autograd.grad(got, tensors, grad)),
        (want, *torch.autograd.grad(want, exact, grad.double())),
        strict=True,
    )
    for a, b in results:
        assert a.dtype == got.dtype and a.shape == b.shape
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * size)


def in_double(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def edge_scores(graph, heads, dtype):
    scores = torch.randn(graph.nnz, heads, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return (3 * scores).to(dtype).requires_grad_()


DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-11), (torch.bfloat16, 8e-2)]


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("name,heads,feats", [*CASES, ("random", 2, 0)])
def test_dot_attention_matches_reference(name, heads, feats, dtype, tolerance, kind, biased):
    graph = ALL[name]()
    tensors = inputs(graph, heads, feats, dtype) + [edge_scores(graph, heads, dtype)] * biased
    given, factor = factors(kind, graph, heads, dtype)
    exact = in_double(tensors)
    out = ops.dot_attention(graph, *tensors[:3], **given, **(dict(edge_bias=tensors[3]) if biased else {}))
    want = reference.dot_attention(graph, *exact[:3], max(feats, 1) ** -0.5, factor, exact[3] if biased else None)
    check(out, tensors, want, exact, tolerance)


@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("name,heads,feats", [*CASES, ("random", 2, 0)])
def test_given_scores_match_reference(name, heads, feats, dtype, tolerance, kind):
    graph = ALL[name]()
    tensors = [edge_scores(graph, heads, dtype), inputs(graph, heads, feats, dtype)[2]]
    given, factor = factors(kind, graph, heads, dtype)
    exact = in_double(tensors)
    check(
        ops.edge_attention(graph, *tensors, **given),
        tensors,
        reference.edge_attention(graph, *exact, factor),
        exact,
        tolerance,
    )


def test_scores_of_minus_infinity_hide_edges():
    """Their weight is 0 and so is their gradient; a row of nothing else is NaN, as torch.softmax has it."""
    graph = ALL["random"]()
    scores, (query, key, value) = edge_scores(graph, 2, torch.float64).detach(), inputs(graph, 2, 3, torch.float64)
    hidden = torch.rand(graph.nnz, 2, generator=torch.Generator().manual_seed(3)) < 0.3
    bias = scores.masked_fill(hidden, -torch.inf).requires_grad_()
    nan = reference.edge_attention(graph, bias.detach(), value.detach()).isnan()
    assert not nan.all()
    for op in (
        lambda: ops.edge_attention(graph, bias, value),
        lambda: ops.dot_attention(graph, query, key, value, scale=0.0, edge_bias=bias),
    ):
        out = op()
        assert torch.equal(out.isnan(), nan)
        want = reference.edge_attention(graph, bias.detach(), value.detach())
        torch.testing.assert_close(out, want, equal_nan=True)
        (grad,) = torch.autograd.grad(out[~nan].sum(), bias)
        assert not grad[hidden & ~grad.isnan()].any()


def test_one_tensor_as_all_three():
    """Its gradient is the sum of three, of the first and of the second order."""
    graph = random_graph(20, 20, 150, 0)
    x = torch.randn(20, 2, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for out in (ops.dot_attention(graph, x, x, x, scale=0.7), reference.dot_attention(graph, x, x, x, 0.7)):
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        results.append((first.detach(), *torch.autograd.grad(first.square().sum(), x)))
    torch.testing.assert_close(*results)


def test_large_scores():
    """Whole numbers, whose products float32 holds exactly: the gradients are as accurate as those of small scores."""
    graph = random_graph(6, 6, 60, 1)
    torch.manual_seed(0)
    query, key = (torch.randint(-3, 4, (6, 2, 4)) * 32.0 for _ in range(2))
    key[3:] = key[:3]  # equal scores, so that more than one counts
    leaves = [t.requires_grad_() for t in (query * 32, key, torch.randn(6, 2, 4))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    got, want = ops.dot_attention(graph, *leaves, scale=1.0), reference.dot_attention(graph, *exact, 1.0)
    assert float((leaves[0] * leaves[1]).sum(-1).abs().max()) > 1e5
    got, want = (got, *torch.autograd.grad(got.sum(), leaves)), (want, *torch.autograd.grad(want.sum(), exact))
    for a, b in zip(got, want, strict=True):
        size = b.abs().max()
        torch.testing.assert_close(a.double() / size, b / size, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows,cols", [(0, 5), (5, 0), (0, 0)])
def test_no_nodes_on_a_side(rows, cols):
    graph = random_graph(rows, cols, 0, 2)
    tensors = inputs(graph, 2, 3, torch.float32)
    grads = torch.autograd.grad(ops.dot_attention(graph, *tensors).sum(), tensors)
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, tensors, strict=True))


@pytest.mark.parametrize("edges", [200, 3000])  # the larger one does not write the gradients of the scores down
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)])
def test_some_gradients_alone_of_dot_attention(wanted, edges):
    graph = random_graph(30, 20, edges, 0)
    assert (edges > 4 * 30 * 5) == (edges == 3000)
    leaves = [
        t.detach().requires_grad_(bool(w)) for t, w in zip(inputs(graph, 2, 5, torch.float64), wanted, strict=True)
    ]
    asked = [t for t in leaves if t.requires_grad]
    upstream = torch.randn(30, 2, 5, dtype=torch.float64)
    results = []
    for out in (ops.dot_attention(graph, *leaves), reference.dot_attention(graph, *leaves, 5**-0.5)):
        first = torch.autograd.grad(out, asked, upstream, retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), asked, create_graph=True)
        results.append((*first, *torch.autograd.grad(sum(g.square().sum() for g in again), asked)))
    torch.testing.assert_close(*results)


def test_registration_and_second_derivative():
    graph = random_graph(6, 5, 20, 4)
    tensors = inputs(graph, 2, 3, torch.float64)
    torch.autograd.gradcheck(lambda *t: ops.dot_attention(graph, *t), tensors)
    torch.autograd.gradgradcheck(lambda *t: ops.dot_attention(graph, *t), tensors)
    given = [edge_scores(graph, 2, torch.float64), tensors[2]]
    torch.autograd.gradcheck(lambda *t: ops.edge_attention(graph, *t), given)
    torch.autograd.gradgradcheck(lambda *t: ops.edge_attention(graph, *t, dropout=0.3, seed=torch.tensor([1])), given)
    tensors = inputs(graph, 2, 4, torch.float32)
    torch.library.opcheck(
        torch.ops.gnnaccel.dot_attention, (*arrays_of(graph, True).flat(), *tensors, None, None, None, 0.0, 0.5)
    )


def test_results_do_not_depend_on_threads():
    graph = random_graph(300, 200, 20000, 5, hub=3000)
    tensors = inputs(graph, 4, 16, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = ops.dot_attention(graph, *tensors)
            results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(query=torch.zeros(30, 4)), ValueError, "query: expected shape"),
        (dict(query=torch.zeros(20, 2, 4)), ValueError, "expected 30 rows"),
        (dict(key=torch.zeros(20, 2, 5)), ValueError, r"key: expected shape \[20, 2, 4\]"),
        (dict(value=torch.zeros(20, 2, 4).double()), TypeError, "value"),
        (dict(edge_scale=torch.zeros(200, 3)), ValueError, "edge_scale: expected shape"),
        (dict(edge_scale=torch.ones(200, 2, requires_grad=True)), ValueError, "edge_scale: expected a constant"),
        (dict(edge_bias=torch.zeros(200)), ValueError, r"edge_bias: expected shape \[200, 2\]"),
        (dict(edge_bias=torch.zeros(199, 2)), ValueError, "edge_bias: expected 200 rows"),
        (dict(graph="graph"), TypeError, "gnnaccel.Graph"),
    ],
)
def test_bad_arguments_of_dot_attention(change, error, words):
    key = torch.zeros(20, 2, 4)
    given = dict(graph=ALL["random"](), query=torch.zeros(30, 2, 4), key=key, value=key) | change
    with pytest.raises(error, match=words):
        ops.dot_attention(**given)


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(scores=None), TypeError, "scores: expected a torch.Tensor"),
        (dict(scores=torch.zeros(200)), ValueError, r"scores: expected shape \[200, 2\]"),
        (dict(scores=torch.zeros(200, 2).double()), TypeError, "scores"),
        (dict(x=torch.zeros(20, 4)), ValueError, r"x: expected shape \[num_cols, heads, features\]"),
        (dict(x=torch.zeros(30, 2, 4)), ValueError, "x: expected 20 rows"),
        (dict(graph=None), TypeError, "gnnaccel.Graph"),
    ],
)
def test_bad_scores(change, error, words):
    given = dict(graph=ALL["random"](), scores=torch.zeros(200, 2), x=torch.zeros(20, 2, 4)) | change
    with pytest.raises(error, match=words):
        ops.edge_attention(**given)
