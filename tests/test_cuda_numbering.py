"""Layers that keep values of edges by nonzero: from when, and with the bits of values by edge id."""

import pytest
import torch
from cuda_cases import DEVICE, DTYPES, EMULATED, INDEX, assert_close, build, rand
from test_cuda_lists import fixed
from test_super_gat import exact as super_gat_exact
from torch.utils.checkpoint import checkpoint

from gnnaccel import Graph, ops
from gnnaccel.lower import bounds, choose
from gnnaccel.lower.choose import lasting
from gnnaccel.ops import _numbering, reference
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops._cores import DOT, attended
from gnnaccel.ops.gat_layers import How
from gnnaccel.ops.gatv2_layers import Gatv2Layer, gatv2_layers
from gnnaccel.ops.super_gat import super_gat
from gnnaccel.schedule.worklist import Arrangement

HEADS, FEATS = 2, 4
AT_LAST = bounds.NEW_GRAPH_USES


def pairs(index=torch.int32):
    """Edges in any order, some of them twice, rows without any, and one of many. As many as whole vectors have, whose
    rest torch's sigmoid does otherwise where CUDA is emulated."""
    rows = torch.cat([torch.randint(3, 30, (184,)), torch.full((200,), 5)])
    cols = torch.randint(40, (384,))
    cols[:20], rows[:20] = cols[20:40].clone(), rows[20:40].clone()
    order = torch.randperm(384)
    made = Graph.from_coo(*(t[order].to(DEVICE) for t in (rows, cols)), num_rows=40, num_cols=40)
    return Graph.from_csr(*(t.to(index) for t in (made.indptr, made.indices, made.edge_ids)), num_cols=40)


def by_source(index=torch.int32):
    """Of which the transposed graph's edges have no ids."""
    return pairs(index).transposed


def _dots(graph, scale, q, k, v):
    composed = lambda *t, edge_scale=None: DOT.composed(graph, t, (), ops._cores.How(0.5, edge_scale))  # noqa: E731
    keep = torch.is_grad_enabled()
    return attended(DOT, arrays_of(graph, keep, v), composed, scale, 0.5, keep, None, 3, q, k, v)


# ours, what it is in float64, and the shapes of inputs
LAYERS = {
    "gatv2": (
        lambda g, s, x, y, v: ops.gatv2(g, x, y, v, edge_scale=s),
        lambda g, s, x, y, v: reference.gatv2(g, x, y, v, 0.2, s),
        ((40, HEADS, FEATS), (40, HEADS, FEATS), (HEADS, FEATS)),
    ),
    "super_gat MX": (
        lambda g, s, x, *v: super_gat(g, x, v, edge_scale=s),
        lambda g, s, x, *v: super_gat_exact(g, x, v, 0.2, s),
        ((40, HEADS, FEATS), (1, HEADS, FEATS), (1, HEADS, FEATS)),
    ),
    "super_gat SD": (
        lambda g, s, x: super_gat(g, x, (), edge_scale=s),
        lambda g, s, x: super_gat_exact(g, x, (), 0.2, s),
        ((40, HEADS, FEATS),),
    ),
    "dots": (
        _dots,
        lambda g, s, q, k, v: reference.dot_attention(g, q, k, v, 0.5, s),
        ((40, HEADS, FEATS),) * 3,
    ),
}
of_layers = pytest.mark.parametrize("name", LAYERS)


def given(name, graph, dtype=torch.float32, scaled=True):
    scale = rand(graph.nnz, HEADS, dtype=dtype) if scaled else None
    return scale, [rand(*shape, dtype=dtype).requires_grad_() for shape in LAYERS[name][2]]


def results(name, graph, scale, leaves):
    out = LAYERS[name][0](graph, scale, *leaves)
    upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


def places(graph):
    known = getattr(graph.slots, "numbering", None)
    return None if known is None else known.places


def earn(graph):
    choose.age_of(graph).uses = AT_LAST
    results("gatv2", graph, *given("gatv2", graph))
    assert places(graph) is not None


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("make", [pairs, by_source])
@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("dtype", DTYPES)
@of_layers
def test_the_same_bits_before_and_after(name, dtype, index, make, scaled):
    graph = make(index)
    scale, leaves = given(name, graph, dtype, scaled)
    first = results(name, graph, scale, leaves)
    for use in range(2, AT_LAST + 2):
        assert (places(graph) is None) is (use <= AT_LAST)
        for got, want in zip(results(name, graph, scale, leaves), first, strict=True):
            assert torch.equal(got, want), use
    own, other = graph.edge_ids.long(), graph.transposed.edge_ids
    other = torch.arange(graph.nnz, device=DEVICE) if other is None else other.long()
    assert places(graph).dtype == index and torch.equal(own[places(graph).long()], other)
    with torch.no_grad():
        assert_close(LAYERS[name][0](graph, scale, *leaves), first[0].double(), dtype)
    if dtype.itemsize > 2:
        exact = [t.detach().double().requires_grad_() for t in leaves]
        want = LAYERS[name][1](graph, None if scale is None else scale.double(), *exact)
        upstream = torch.linspace(-1, 1, want.numel(), device=DEVICE).view(want.shape).to(dtype).double()
        for got, wide in zip(first, (want, *torch.autograd.grad(want, exact, upstream)), strict=True):
            assert_close(got, wide, dtype)


@pytest.mark.parametrize("kind", [Arrangement.LENGTH, Arrangement.HUBS])
@of_layers
def test_along_lists(name, kind):
    graph = fixed(pairs(), kind)
    scale, leaves = given(name, graph)
    first = results(name, graph, scale, leaves)
    earn(graph)
    for got, want in zip(results(name, graph, scale, leaves), first, strict=True):
        assert torch.equal(got, want)


@of_layers
def test_derivatives_of_derivatives_of_numbered_sums(name):
    graph = pairs()
    scale, leaves = given(name, graph, torch.float64)
    earn(graph)
    upstream = rand(40, HEADS, FEATS, dtype=torch.float64)

    def second(function):
        grads = torch.autograd.grad(function(graph, scale, *leaves), leaves, upstream, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    ours, exact, _ = LAYERS[name]
    for got, want in zip(second(ours), second(exact), strict=True):
        assert_close(got, want, torch.float64)


@of_layers
def test_checkpoints_while_it_is_earned(name, monkeypatch):
    """A backward pass reads what a later forward saved, which may be in the other order."""
    ours = LAYERS[name][0]
    made = pairs()
    scale, (x, *others) = given(name, made)

    def gradients(graph, call):
        out = x
        for _ in range(3):
            out = call(lambda t: ours(graph, scale, t, *others), out)
        return torch.autograd.grad(out.sum(), (x, *others))

    def again():
        return Graph(made.indptr, made.indices, made.edge_ids, made.num_cols)

    options = dict(use_reentrant=False, preserve_rng_state=False)
    for uses in range(8):
        monkeypatch.setattr(bounds, "NEW_GRAPH_USES", 100)
        want = gradients(again(), lambda f, t: f(t))
        monkeypatch.setattr(bounds, "NEW_GRAPH_USES", uses)
        graph = again()
        for got, exact in zip(gradients(graph, lambda f, t: checkpoint(f, t, **options)), want, strict=True):
            assert torch.equal(got, exact), uses
        assert (places(graph) is None) is (uses > 6)


@of_layers
def test_hooks_and_writes(name):
    graph = pairs()
    scale, leaves = given(name, graph)
    want = results(name, graph, scale, leaves)
    earn(graph)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        for got, exact in zip(results(name, graph, scale, leaves), want, strict=True):
            assert torch.equal(got, exact)
    out = LAYERS[name][0](graph, scale, *leaves)
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_not_made_while_a_cuda_graph_is_captured(monkeypatch):
    graph = pairs()
    scale, leaves = given("gatv2", graph)
    want = results("gatv2", graph, scale, leaves)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(AT_LAST):
            results("gatv2", graph, scale, leaves)
        assert places(graph) is None
    for got, exact in zip(results("gatv2", graph, scale, leaves), want, strict=True):
        assert torch.equal(got, exact)
    kept = places(graph)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        inner, _, mark = _numbering.numbered(arrays_of(graph, True), None, True)
    assert mark and inner.edge_ids is None and inner.transposed().edge_ids is kept


@pytest.mark.skipif(bool(EMULATED), reason="captures a CUDA graph")
@pytest.mark.parametrize("before", [False, True])
@of_layers
def test_captured(name, before):
    """By edge id or by nonzero; and replayed when the graph has dropped its structures."""
    graph = pairs()
    scale, leaves = given(name, graph)
    want = results(name, graph, scale, leaves)
    if not before:
        earn(graph)
    stream, recorded = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(name, graph, scale, leaves)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(recorded):
        got = results(name, graph, scale, leaves)
    assert (places(graph) is None) is before
    earn(graph)
    graph.slots.structures.clear()
    torch.empty(1 << 20, device=DEVICE).fill_(float("nan"))
    for _ in range(2):
        recorded.replay()
        torch.cuda.synchronize()
        for ours, exact in zip(got, want, strict=True):
            assert torch.equal(ours, exact)


@pytest.mark.parametrize("graphs", [[pairs], [pairs, lambda: build([3] * 40, 40, permuted=False), by_source]])
def test_layers_of_several_edge_types(graphs):
    """One node, whose values of edges go from each graph's to those of all."""
    graphs = [make() for make in graphs]
    shapes = [(HEADS * FEATS, 6), (HEADS * FEATS,)] * 2 + [(1, HEADS, FEATS), (HEADS * FEATS,)]
    x = rand(40, 6).requires_grad_()
    made = [[rand(*shape).requires_grad_() for shape in shapes] for _ in graphs]
    leaves, upstream, slots = [x, *[t for each in made for t in each]], rand(40, HEADS * FEATS), {}

    def kept(key, make):
        return slots[key] if key in slots else slots.setdefault(key, make())

    def found(how):
        layers = [Gatv2Layer(graph, x, x, *each) for graph, each in zip(graphs, made, strict=True)]
        (out,) = gatv2_layers([layers], how, kept)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    first = found(How(0.2, True))
    for use in range(2, AT_LAST + 2):
        for got, want in zip(found(How(0.2, True)), first, strict=True):
            assert torch.equal(got, want), use
    (whole,) = slots.values()
    assert all(places(graph) is not None for graph in (whole, *graphs) if graph.edge_ids is not None)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    total, (wide, *rest) = 0.0, exact
    for graph in graphs:
        of_src, bias_src, of_dst, bias_dst, vectors, bias, *rest = rest
        ends = (wide @ weight.t() + b for weight, b in ((of_src, bias_src), (of_dst, bias_dst)))
        each = reference.gatv2(graph, *(end.view(40, HEADS, FEATS) for end in ends), vectors[0], 0.2, None)
        total = total + each.flatten(1) + bias
    for got, want in zip(first, (total, *torch.autograd.grad(total, exact, upstream.double())), strict=True):
        assert_close(got, want, torch.float32)
    with torch.no_grad():
        layers = [Gatv2Layer(graph, x, x, *each) for graph, each in zip(graphs, made, strict=True)]
        assert_close(gatv2_layers([layers], How(0.2, True), kept)[0], total, torch.float32)


def test_without_memory(monkeypatch):
    graph = pairs()
    scale, leaves = given("gatv2", graph)
    want = results("gatv2", graph, scale, leaves)

    def full(*_):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as changed:
        changed.setattr(_numbering, "_places", full)
        for _ in range(1 + AT_LAST):
            results("gatv2", graph, scale, leaves)
    assert places(graph) is None and graph.slots.numbering.refused
    graph.slots.numbering.refused = False
    monkeypatch.setattr(_numbering, "try_empty_like", lambda *_: [])  # for edge_scale
    for got, exact in zip(results("gatv2", graph, scale, leaves), want, strict=True):
        assert torch.equal(got, exact)
    assert places(graph) is not None


def test_of_which_structures():
    graph = pairs()
    arrays = arrays_of(graph, True)
    assert _numbering.numbered(arrays, None, True)[0] is arrays
    with lasting():  # to be captured: at once
        inner, _, mark = _numbering.numbered(arrays, None, True)
    assert mark and inner is not arrays and places(graph) is not None
    inner, _, mark = _numbering.numbered(arrays, None, True)
    assert mark and inner is not arrays and _numbering.numbered(arrays, None, True)[0] is inner
    assert inner.transposed().transposed().edge_ids is None and inner.nnz == graph.nnz
    alone, _, mark = _numbering.numbered(arrays_of(graph, False), None, False)
    assert mark is None and alone.edge_ids is None
    gaps = arrays.numbered_up_to(graph.nnz + 3)
    assert _numbering.numbered(gaps, None, True)[0] is gaps
    in_order = arrays_of(build([2, 0, 3], 4, permuted=False), True)
    assert _numbering.numbered(in_order, None, True) == (in_order, None, None)
