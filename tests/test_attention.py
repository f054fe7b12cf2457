"""ops.attention against its definition in float64: values, gradients, second derivatives, dropout masks."""

import pytest
import torch

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference


def random_graph(rows, cols, edges, seed, hub=0):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, max(rows, 1), (edges,), generator=generator)
    row[:hub] = 0
    col = torch.randint(0, max(cols, 1), (edges,), generator=generator)
    return Graph.from_coo(row, col, num_rows=rows, num_cols=cols)


GRAPHS = {
    "random": lambda: random_graph(30, 20, 200, 0),
    "hub": lambda: random_graph(40, 50, 3000, 1, hub=2500),
    "no_edges": lambda: random_graph(5, 6, 0, 2),
    "empty": lambda: random_graph(0, 0, 0, 3),
    "loops": lambda: Graph.from_coo(torch.arange(9), torch.arange(9)),
    "wide_index": lambda: Graph.from_csr(torch.tensor([0, 2, 2, 3]), torch.tensor([1, 0, 4]), num_cols=5),
}
WIDTHS = [(1, 1), (1, 7), (1, 64), (1, 100), (2, 3), (3, 24), (4, 16), (8, 8), (8, 32), (20, 4), (5, 12)]
# Every width on two graphs, two widths on the odd ones.
CASES = [(name, *width) for name in ("random", "hub") for width in WIDTHS]
CASES += [(name, *width) for name in GRAPHS if name not in ("random", "hub") for width in ((1, 7), (4, 16))]


def inputs(graph, heads, feats, dtype, scale=2.0):
    generator = torch.Generator().manual_seed(7)
    shapes = ((graph.num_cols, heads, feats), (graph.num_cols, heads), (graph.num_rows, heads))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) * scale for s in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


SEED = torch.tensor([-(2**62) - 12345])


def factors(kind, graph, heads, dtype):
    """Arguments that an op takes for a factor of the weights, and the factor in float64: None, a mask, a dropout."""
    mask = torch.nn.functional.dropout(torch.ones(graph.nnz, heads, dtype=dtype), 0.5)
    drops = reference.dropout_factor(SEED, 0.3, graph.nnz, heads)
    return {
        "plain": lambda: ({}, None),
        "mask": lambda: (dict(edge_scale=mask), mask.double()),
        "dropout": lambda: (dict(dropout=0.3, seed=SEED), drops),
        "both": lambda: (dict(edge_scale=mask, dropout=0.3, seed=SEED), mask.double() * drops),
    }[kind]()


FACTORS = ["plain", "mask", "dropout", "both"]


@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-11), (torch.bfloat16, 8e-2)])
@pytest.mark.parametrize("name,heads,feats", CASES)
def test_attention_matches_reference(name, heads, feats, dtype, tolerance, kind):
    graph = GRAPHS[name]()
    tensors = inputs(graph, heads, feats, dtype)
    given, factor = factors(kind, graph, heads, dtype)
    out = ops.attention(graph, *tensors, negative_slope=0.2, **given)
    grad = torch.randn(out.shape, dtype=torch.float64)
    grads = torch.autograd.grad(out, tensors, grad.to(dtype))
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = reference.attention(graph, *exact, 0.2, factor)
    expected_grads = torch.autograd.grad(expected, exact, grad.to(dtype).double())
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        size = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * size)


def test_large_scores_and_exact_zero():
    graph = Graph.from_coo(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    x = torch.tensor([[[1.0]], [[3.0]]])
    scores = torch.tensor([[1e4], [0.0]])
    out = ops.attention(graph, x, scores, torch.tensor([[0.0], [-1e4]]))
    expected = reference.attention(graph, x.double(), scores.double(), torch.tensor([[0.0], [-1e4]]).double(), 0.2)
    torch.testing.assert_close(out.double(), expected)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_dropout_by_counter(dropout):
    """Each weight is dropped with this probability, alone, and another seed drops others."""
    keeps = [reference.dropout_factor(torch.tensor([seed]), dropout, 50_000, 4) > 0 for seed in (0, 1)]
    for kept in keeps:
        assert abs(kept.double().mean() - (1 - dropout)) < 4 * (dropout * (1 - dropout) / kept.numel()) ** 0.5
    pairs = [(keeps[0], keeps[1]), (keeps[0][1:], keeps[0][:-1]), (keeps[0][:, 0], keeps[0][:, 1])]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1]
        assert abs(correlation) < 4 / a.numel() ** 0.5


def test_dropout_draws_from_torch():
    graph = GRAPHS["random"]()
    tensors = inputs(graph, 2, 3, torch.float64)
    torch.manual_seed(5)
    first, second = (ops.attention(graph, *tensors, dropout=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, ops.attention(graph, *tensors, dropout=0.5)) and not torch.equal(first, second)
    assert torch.equal(ops.attention(graph, *tensors, dropout=0.0, seed=SEED), ops.attention(graph, *tensors))


def test_gradcheck_and_second_derivative():
    graph = random_graph(6, 5, 20, 4)
    tensors = inputs(graph, 2, 3, torch.float64, scale=0.7)
    torch.autograd.gradcheck(lambda *t: ops.attention(graph, *t), tensors)
    torch.autograd.gradgradcheck(lambda *t: ops.attention(graph, *t, dropout=0.3, seed=SEED), tensors)


def test_registration():
    graph = random_graph(6, 5, 20, 4)
    from gnnaccel.ops._arrays import arrays_of

    tensors = inputs(graph, 2, 4, torch.float32)
    torch.library.opcheck(
        torch.ops.gnnaccel.attention, (*arrays_of(graph, True).flat(), *tensors, None, None, 0.0, 0.2, True)
    )
    out = torch.ops.gnnaccel.attention(*arrays_of(graph, True).flat(), *tensors, None, None, 0.0, 0.2, False)[0]
    with pytest.raises(RuntimeError, match="keep=False"):
        out.sum().backward()
    torch.testing.assert_close(out, ops.attention(graph, *tensors))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-5), (torch.float64, 1e-11), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows,vectors,heads,feats", [(5, 2, 4, 16), (0, 2, 4, 16), (3000, 1, 3, 7), (9, 3, 1, 40)])
def test_head_dots_match_reference(rows, vectors, heads, feats, dtype, tolerance):
    generator = torch.Generator().manual_seed(2)
    shapes = ((heads, rows, feats), (vectors, heads, feats))  # x is strided
    x, a = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    leaves = [x.transpose(0, 1).requires_grad_(), a.requires_grad_()]
    grad = torch.randn(vectors, rows, heads, generator=generator, dtype=torch.float64).to(dtype)
    out = ops.head_dots(*leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = reference.head_dots(*exact)
    got = (out, *torch.autograd.grad(out, leaves, grad))
    for a, b in zip(got, (want, *torch.autograd.grad(want, exact, grad.double())), strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        size = b.abs().max().clamp(min=1) if b.numel() else 1
        torch.testing.assert_close(a.double() / size, b / size, rtol=0, atol=tolerance)


def test_head_dots_of_vectors_that_are_wider():
    x, a = torch.randn(9, 2, 8).bfloat16().requires_grad_(), torch.randn(2, 2, 8, requires_grad=True)
    out = ops.head_dots(x, a)
    grads = torch.autograd.grad(out.sum(), (x, a))
    assert (out.dtype, *(g.dtype for g in grads)) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), reference.head_dots(x.double(), a.double()), rtol=1e-6, atol=1e-6)
    with pytest.raises(TypeError, match="head_dots: vectors"):
        ops.head_dots(x, a.half())


def test_head_dots_registration_and_bad_arguments():
    x, a = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((6, 2, 3), (2, 2, 3)))
    torch.library.opcheck(torch.ops.gnnaccel.head_dots, (x, a))
    torch.autograd.gradcheck(ops.head_dots, (x, a))
    torch.autograd.gradgradcheck(ops.head_dots, (x, a))
    for wrong, error in (
        (a[0], ValueError),
        (a[:, :1], ValueError),
        (a.float(), TypeError),
        (a.to("meta"), ValueError),
    ):
        with pytest.raises(error, match="head_dots: vectors"):
            ops.head_dots(x, wrong)


def test_results_do_not_depend_on_threads():
    graph = random_graph(300, 200, 20000, 5, hub=3000)
    tensors = inputs(graph, 4, 16, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            out = ops.attention(graph, *tensors)
            x, a = torch.randn(5000, 4, 8, requires_grad=True), torch.randn(2, 4, 8, requires_grad=True)
            dots = ops.head_dots(x, a)
            results.append((out, *torch.autograd.grad(out.sum(), tensors), *torch.autograd.grad(dots.sum(), (x, a))))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(x=lambda g: torch.zeros(20, 4)), ValueError, "x: expected shape"),
        (dict(x=lambda g: torch.zeros(19, 2, 4)), ValueError, "expected 20 rows"),
        (dict(score_src=lambda g: torch.zeros(20, 3)), ValueError, "score_src: expected shape"),
        (dict(score_dst=lambda g: torch.zeros(30, 2).double()), TypeError, "score_dst"),
        (dict(edge_scale=lambda g: torch.ones(g.nnz, 2, requires_grad=True)), ValueError, "edge_scale"),
        (dict(graph=lambda g: "graph"), TypeError, "gnnaccel.Graph"),
        (dict(dropout=lambda g: 1.0), ValueError, r"dropout: expected a part in \[0, 1\)"),
        (dict(dropout=lambda g: 0.5, seed=lambda g: 7), TypeError, "seed: expected an int64 tensor"),
        (dict(dropout=lambda g: 0.5, seed=lambda g: SEED.float()), TypeError, "seed: expected an int64 tensor"),
        (dict(dropout=lambda g: 0.5, seed=lambda g: SEED.to("meta")), ValueError, "seed: expected device"),
    ],
)
def test_bad_arguments_of_attention(change, error, words):
    graph = GRAPHS["random"]()
    given = dict(graph=graph, x=torch.zeros(20, 2, 4), score_src=torch.zeros(20, 2), score_dst=torch.zeros(30, 2))
    given.update({name: make(graph) for name, make in change.items()})
    with pytest.raises(error, match=words):
        ops.attention(**given)
