"""Layers as one node of autograd each, against compositions of the reference ops in float64."""

import weakref

import pytest
import torch
from oracle import check, rand
from test_attention import GRAPHS, random_graph

from gnnaccel import ops
from gnnaccel.ops import _layers_short, layers, reference
from gnnaccel.ops.heads_attention import heads_attention

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and ops.has_cuda_kernels() else [])]


def square(device="cpu"):
    return random_graph(30, 30, 200, 3).to(device)


def gat(graph, scale):
    factor = None if scale is None else scale.double()
    return lambda *t: ops.gat(graph, *t, edge_scale=scale), lambda *t: reference.gat(graph, *t, 0.2, factor)


def gatv2(graph, scale):
    factor = None if scale is None else scale.double()
    return lambda *t: ops.gatv2(graph, *t, edge_scale=scale), lambda *t: reference.gatv2(graph, *t, 0.2, factor)


def dot(graph, scale):
    factor = None if scale is None else scale.double()
    ours = lambda *t: heads_attention(graph, *t, scale)  # noqa: E731
    return ours, lambda q, *t: reference.dot_attention(graph, q, *t, q.shape[2] ** -0.5, factor)


def gated(graph, _scale):
    return lambda *t: ops.gated_sum(graph, *t), lambda *t: reference.gated_sum(graph, *t)


def inputs(op, graph, heads, feats, dtype, device="cpu"):
    rows, cols = graph.num_rows, graph.num_cols
    shapes = {
        gat: [(cols, heads, feats), (1, heads, feats), (1, heads, feats)],
        gatv2: [(cols, heads, feats), (rows, heads, feats), (heads, feats)],
        dot: [(rows, heads, feats), (cols, heads, feats), (cols, heads, feats)],
        gated: [(cols, feats), (rows, feats), (cols, feats)],
    }[op]
    return [rand(*shape, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "feats"), [(1, 1), (2, 7), (4, 16), (1, 129)])
@pytest.mark.parametrize("op", [gat, gatv2, dot, gated])
@pytest.mark.parametrize("device", DEVICES)
def test_layer_ops_matches_reference(device, op, heads, feats, dtype, scaled):
    torch.manual_seed(0)
    graph = square(device)
    scale = torch.rand(graph.nnz, heads, device=device).to(dtype) if scaled else None
    ours, exact = op(graph, scale)
    # bfloat16 on the CPU goes by the composition, which rounds between its ops.
    given = inputs(op, graph, heads, feats, dtype, device)
    if dtype == torch.bfloat16:
        got, want = ours(*given), exact(*(t.double() for t in given))
        torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.12)
    else:
        check(ours, exact, *given)


@pytest.mark.parametrize("name", sorted(GRAPHS))
@pytest.mark.parametrize("op", [gat, gatv2, dot, gated])
def test_graphs_of_all_kinds(op, name):
    graph = GRAPHS[name]()
    if op is not gat or graph.num_rows == graph.num_cols:
        check(*op(graph, None), *inputs(op, graph, 2, 4, torch.float64))


@pytest.mark.parametrize("op", [gat, gatv2, dot, gated])
def test_derivatives_of_derivatives_of_layer_ops(op):
    graph = random_graph(6, 6, 20, 4)
    leaves = [t.requires_grad_() for t in inputs(op, graph, 2, 3, torch.float64)]
    ours, _ = op(graph, None)
    torch.autograd.gradcheck(ours, leaves)
    torch.autograd.gradgradcheck(ours, leaves)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("op", [gat, gatv2, dot, gated])
def test_some_gradients_alone_of_layer_ops(op, wanted):
    graph = square()
    ours, exact = op(graph, None)
    leaves = [t.requires_grad_(bool(w)) for t, w in zip(inputs(op, graph, 2, 8, torch.float64), wanted, strict=True)]
    asked = [t for t in leaves if t.requires_grad]
    for got, want in zip(*(torch.autograd.grad(f(*leaves).square().sum(), asked) for f in (ours, exact)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("op", "node"), [(gat, "_Gat"), (gatv2, "_Gatv2"), (dot, "_Dot"), (gated, "_Messages")])
def test_one_node_where_nobody_listens(op, node):
    """And the composition, with the same result, where somebody does."""
    graph = square()
    ours, _ = op(graph, None)
    leaves = [t.requires_grad_() for t in inputs(op, graph, 2, 8, torch.float64)]
    out = ours(*leaves)
    assert type(out.grad_fn).__name__ == node + "Backward"
    with torch.autograd.profiler.profile():
        watched = ours(*leaves)
    assert node == "_Messages" or type(watched.grad_fn).__name__ != node + "Backward"
    torch.testing.assert_close(out, watched)
    batch = torch.func.vmap(ours)(*(torch.stack([t, 2 * t]) for t in leaves))
    torch.testing.assert_close(batch[0], out)
    grads = torch.func.grad(lambda *t: ours(*t).square().sum(), argnums=(0, 1, 2))(*leaves)
    torch.testing.assert_close(grads, torch.autograd.grad(out.square().sum(), leaves))


def test_wrong_arguments_are_refused_as_by_the_parts():
    graph, x = square(), torch.randn(30, 2, 4)
    with pytest.raises(ValueError, match="vectors"):
        ops.gat(graph, x, torch.randn(1, 2, 3), torch.randn(1, 2, 3))
    with pytest.raises(ValueError, match="gatv2_scores: y"):
        ops.gatv2(graph, x, x[:5], torch.randn(2, 4))
    with pytest.raises(TypeError, match="dtype"):
        ops.gated_sum(graph, x[:, 0], x[:, 0].double(), x[:, 0])


@pytest.mark.parametrize(("place", "name", "feats"), [(layers.attention_op, "impl", 7), (_layers_short, "gat", 8)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_made_for_a_backward_that_will_not_be(mode, place, name, feats, monkeypatch):
    kept, attend = [], getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args: kept.append(args[-1]) or attend(*args))
    graph = square()
    leaves = [t.requires_grad_() for t in inputs(gat, graph, 2, feats, torch.float64)]
    with mode():
        ops.gat(graph, *leaves)
    ops.gat(graph, *leaves)
    assert kept == [False, True]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "rows", [30, 3]
)  # of the latter there are many edges to a row: the query's gradient goes two ways
@pytest.mark.parametrize("op", [gat, gatv2, dot])
def test_the_shortest_way_gives_the_same_bits(op, rows, scaled, monkeypatch):
    graph = random_graph(rows, rows, 200, 3)
    scale = torch.rand(graph.nnz, 2) if scaled else None
    ours, _ = op(graph, scale)
    leaves = [t.requires_grad_() for t in inputs(op, graph, 2, 8, torch.float32)]
    results = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(_layers_short, "as_they_lie", lambda *_: False)
        out = ours(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("op", [gat, gatv2, dot])
def test_edge_scales_are_freed_by_the_backward_pass(op):
    graph = square()
    scale = torch.rand(graph.nnz, 2, dtype=torch.float64)
    ours, _ = op(graph, scale)
    alive = weakref.ref(scale)
    out = ours(*(t.requires_grad_() for t in inputs(op, graph, 2, 8, torch.float64)))
    del ours, scale, _
    assert alive() is not None
    out.sum().backward()
    assert alive() is None


@pytest.mark.parametrize("feats", [7, 8])
@pytest.mark.parametrize("op", ["gat", "gatv2"])
def test_vectors_of_frozen_features_may_be_written_into_before_the_backward_pass(op, feats):
    graph, x = random_graph(20, 20, 60, 0), rand(20, 2, feats)
    vectors = [rand(1, 2, feats).requires_grad_() for _ in range(2 if op == "gat" else 1)]
    ours = (lambda: ops.gat(graph, x, *vectors)) if op == "gat" else (lambda: ops.gatv2(graph, x, x, vectors[0][0]))
    want = torch.autograd.grad(ours().square().sum(), vectors)
    out = ours()
    with torch.no_grad():
        for vector in vectors:
            vector.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), vectors, retain_graph=True), want)
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(out.sum(), vectors, create_graph=True)
