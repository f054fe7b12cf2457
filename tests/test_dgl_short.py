"""DGL's calls reach the chooser of our ops, with what is ready, and by a short way where they are plain ones."""

import importlib
import re

import pytest
import torch
from dgl_compare import assert_same, both, build, compare, dgl, graph, rand

import gnnaccel
from gnnaccel import dgl_backend, tiles
from gnnaccel.dgl_backend.structure import structure
from gnnaccel.lower import bounds
from gnnaccel.ops.ready import Once, Ready, calls_of

import dgl.function as fn  # isort: skip  (after the shim)
import dgl.nn as dglnn  # isort: skip
from dgl.frame import Frame  # isort: skip

pytestmark = pytest.mark.usefixtures("dgl_restored")


@pytest.mark.parametrize("function,of_sources,of_edges,turns", [
    ("copy_u_sum", True, False, True),
    ("u_mul_e_sum", True, False, True),
    ("u_mul_e_sum", False, True, False),
    ("copy_u_max", True, False, False),
    ("u_mul_e_min", True, True, False),
    ("u_add_v", True, False, True),
    ("v_add_e", True, True, False),
])  # fmt: skip
def test_the_transposed_graph_is_made_for_gradients_of_sources_alone(function, of_sources, of_edges, turns):
    dgl_backend.enable()
    g = graph().formats("csc")
    x, w = rand(40, 3).requires_grad_(of_sources), rand(300, 3).requires_grad_(of_edges)
    given = {"copy_u": (x,), "u_mul_e": (x, w), "v_add_e": (x, w), "u_add_v": (x, x.detach())}
    getattr(dgl.ops, function)(g, *given[function.removesuffix("_sum").removesuffix("_max").removesuffix("_min")])
    assert (structure(g._graph)._transposed is not None) == turns


def test_sums_that_are_asked_for_again_are_ready():
    dgl_backend.enable()
    g, x = graph(), rand(40, 3).requires_grad_()
    outs = [dgl.ops.copy_u_mean(g, x) for _ in range(3)]
    assert [type(r) for r in calls_of(structure(g._graph)).values()] == [Ready]
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
    for out, grad in zip(outs, grads, strict=True):
        assert torch.equal(out, outs[0])
        torch.testing.assert_close(grad, grads[0])


@pytest.mark.parametrize("name,of", [("u_mul_e_sum", "spmm"), ("copy_u_mean", "spmm"), ("u_dot_v", "sddmm")])
def test_tiles_are_asked_for(name, of, monkeypatch):
    """On CUDA they serve where they pay; here they are said to, and run in their form for the CPU."""
    module = importlib.import_module(f"gnnaccel.ops.{of}")
    dgl_backend.enable()
    g, x, w = graph(), rand(40, 3), rand(300, 1)
    call = lambda: getattr(dgl.ops, name)(g, x, *{"u_mul_e_sum": (w,), "u_dot_v": (x,)}.get(name, ()))  # noqa: E731
    expected, asked = call(), []
    monkeypatch.setattr(tiles, "are_profitable", lambda *_: True)
    monkeypatch.setattr(module, "serves_sum" if of == "spmm" else "serves_dot", lambda *_: asked.append(1) or True)
    torch.testing.assert_close(call(), expected)
    assert asked


def test_sums_by_tiles_have_the_dimensions_of_a_longer_weight():
    g, x, w = graph(), rand(40, 3), rand(300, 1, 1)
    structure_ = structure(g._graph)
    got, expected = (gnnaccel.ops.spmm(structure_, x, w, kernel=kernel) for kernel in ("tiled", "csr"))
    torch.testing.assert_close(got, expected)


def _twice(call):
    """A graph is known from its first call on."""

    def run(*args):
        call(*args)
        return call(*args)

    return run


def _local(g, data, step, read):
    """The feature that `step` leaves in one of the frames of `g`, of which `data` are set before."""
    with g.local_scope():
        for view, features in data.items():
            getattr(g, view).update(features)
        step(g)
        return {key: value for key, value in getattr(g, read).items() if not key.startswith("_")}


_REDUCES = ("sum", "mean", "max", "min")
_STEPS = {
    **{f"copy_u {r}": lambda g, r=r: g.update_all(fn.copy_u("h", "m"), getattr(fn, r)("m", "h")) for r in _REDUCES},
    **{f"copy_e {r}": lambda g, r=r: g.update_all(fn.copy_e("w", "m"), getattr(fn, r)("m", "n")) for r in _REDUCES},
    **{
        f"u_{op}_e": lambda g, op=op: g.update_all(getattr(fn, f"u_{op}_e")("h", "w", "m"), fn.sum("m", "n"))
        for op in ("add", "sub", "mul", "div")
    },
    "e_mul_u": lambda g: g.update_all(fn.e_mul_u("w", "h", "m"), fn.sum("m", "n")),
    "u_mul_v": lambda g: g.update_all(fn.u_mul_v("h", "k", "m"), fn.max("m", "n")),
    "two steps": lambda g: (
        g.apply_edges(fn.u_add_v("h", "k", "w")),
        g.update_all(fn.copy_e("w", "m"), fn.sum("m", "n")),
    ),
}  # fmt: skip
_STORED = {"e_mul_u", "u_mul_v"}  # by DGL: their messages
_EDGE_STEPS = {
    name: lambda g, f=f: g.apply_edges(f)
    for name, f in {
        "copy_u": fn.copy_u("h", "w"),
        "e_div_u": fn.e_div_u("w", "h", "y"),
        "u_dot_v": fn.u_dot_v("h", "k", "y"),
        "v_sub_e": fn.v_sub_e("k", "w", "y"),
    }.items()
}


@pytest.mark.parametrize("name", ["int64", "int32", "bipartite", "block", "zero in-degree"])
@pytest.mark.parametrize("step", [*_STEPS, *_EDGE_STEPS])
def test_built_in_functions_leave_in_the_frames_what_dgl_leaves(step, name, monkeypatch):
    g, read = build(name), "edata" if step in _EDGE_STEPS else "dstdata"
    run = (_STEPS | _EDGE_STEPS)[step]

    def call(h, k, w):
        return _local(g, {"srcdata": {"h": h}, "dstdata": {"k": k}, "edata": {"w": w}}, run, read)

    sizes = g.num_src_nodes(), g.num_dst_nodes(), g.num_edges()
    features = [rand(n, 3, seed=seed) for seed, n in enumerate(sizes)]
    compare(_twice(call), features)
    if step not in _STORED:
        dgl_backend.enable()
        monkeypatch.setattr(dgl.DGLGraph, "__getitem__", None)  # which DGL slices the graph by
        call(*features)


@pytest.mark.parametrize("step", [
    lambda g: g.update_all(fn.copy_u("missing", "m"), fn.sum("m", "n")),
    lambda g: g.update_all(fn.copy_u("h", "m"), fn.sum("other", "n")),
    lambda g: g.update_all(fn.u_mul_e("h", "wide", "m"), fn.sum("m", "n")),
    lambda g: g.update_all(fn.u_mul_e("h", "single", "m"), fn.sum("m", "n")),
    lambda g: g.update_all(fn.copy_u("h", "m"), fn.sum("m", "n"), etype="none"),
    lambda g: g.apply_edges(fn.copy_u("missing", "y")),
    lambda g: g.apply_edges(fn.u_mul_e("h", "wide", "y")),
    lambda g: g.apply_edges(fn.copy_u("h", "y"), etype="none"),
])  # fmt: skip
def test_wrong_calls_raise_what_dgl_raises(step):
    g = graph()
    g.ndata["h"], g.edata["wide"], g.edata["single"] = rand(40, 3), rand(300, 5), rand(300, 3).float()
    dgl_backend.enable()
    dgl.ops.copy_u_sum(g, g.ndata["h"])
    want, got, _ = both(lambda: step(g))
    addresses = re.compile("0x[0-9a-f]+")
    assert [addresses.sub("", text) for text in got] == [addresses.sub("", text) for text in want]
    assert isinstance(want, tuple)


@pytest.mark.parametrize("step", [
    lambda g: g.update_all(fn.copy_u("h", "m"), fn.sum("m", "n"), lambda nodes: {"n": nodes.data["n"] + 1}),
    lambda g: g.update_all(lambda edges: {"m": edges.src["h"]}, fn.sum("m", "n")),
    lambda g: g.update_all(fn.copy_u("h", "m"), lambda nodes: {"n": nodes.mailbox["m"].sum(1)}),
    lambda g: g.update_all(fn.copy_u("h", "m"), fn.mean("m", "n"), etype="_E"),
])  # fmt: skip
def test_other_functions_go_the_way_of_dgl(step):
    g = graph()
    compare(_twice(lambda h: _local(g, {"ndata": {"h": h}}, step, "ndata")), [rand(40, 3)])


def test_features_that_are_fetched_late():
    sub = dgl.node_subgraph(graph(), range(5, 35))
    g = graph()
    g.ndata["h"] = rand(40, 3)

    def call():
        sub = dgl.node_subgraph(g, range(5, 35))
        dgl.ops.copy_u_sum(sub, rand(30, 3))
        sub.update_all(fn.copy_u("h", "m"), fn.sum("m", "n"))
        return sub.ndata["n"]

    assert sub.num_edges()
    compare(call)


class _Watched(dgl.DGLGraph):
    """Counts what it is asked to send."""

    def update_all(self, *args, **kwargs):
        self.sent = getattr(self, "sent", 0) + 1
        return super().update_all(*args, **kwargs)


_LAYERS = {
    **{f"SAGE {kind}": lambda kind=kind: dglnn.SAGEConv(6, 4, kind) for kind in ("mean", "gcn", "pool")},
    "SAGE wide": lambda: dglnn.SAGEConv(6, 9, "mean", activation=torch.relu, norm=torch.nn.LayerNorm(9)),
    "SAGE gcn wide": lambda: dglnn.SAGEConv(6, 9, "gcn", bias=False, feat_drop=0.5),
    **{f"GIN {kind}": lambda kind=kind: dglnn.GINConv(torch.nn.Linear(6, 4), kind) for kind in ("sum", "mean", "max")},
    "GIN bare": lambda: dglnn.GINConv(None, "sum", init_eps=0.25, learn_eps=True, activation=torch.tanh),
}


@pytest.mark.parametrize("kind", _LAYERS)
@pytest.mark.parametrize(
    "name,pair", [("int64", False), ("block", False), ("bipartite", True), ("zero in-degree", False)]
)
def test_sums_of_layers_need_no_frames(kind, name, pair, monkeypatch):
    torch.manual_seed(3)
    layer, g = _LAYERS[kind]().double(), build(name)
    rows = (g.num_src_nodes(), g.num_dst_nodes()) if pair else (g.num_src_nodes(),)
    x = tuple(rand(n, 6, seed=seed) for seed, n in enumerate(rows))
    compare(_twice(lambda m, *x: m(g, x if pair else x[0])), x, layer)
    dgl_backend.enable()
    monkeypatch.setattr(Frame, "update_column", None)
    layer(g, x if pair else x[0])


def test_layers_see_to_graphs_of_a_subclass():
    g = graph(loops=True)
    watched = _Watched(g._graph, g.ntypes, g.etypes)
    for layer in (dglnn.SAGEConv(6, 4, "mean").double(), dglnn.GINConv(None).double()):
        compare(_twice(lambda m, x: m(watched, x)), [rand(40, 6)], layer)
    assert watched.sent == 8


@pytest.mark.parametrize("make", [lambda: dglnn.SAGEConv(6, 4, "gcn"), lambda: dglnn.GINConv(torch.nn.Linear(6, 4))])
def test_layers_leave_what_is_wrong_to_dgl(make):
    layer, g, two = make().double(), build("int64"), build("bipartite")
    pairs = [(g, rand(39, 6)), (g, rand(40, 6).float()), (g, (rand(40, 6), None)), (g, rand(40, 6)[0]),
             (two, rand(20, 6)), (two, (rand(20, 6), rand(9, 5))), (build("hetero"), rand(3, 6))]  # fmt: skip
    for g, x in pairs:
        want, got, _ = both(lambda m, g=g, x=x: m(g, x), module=layer)
        assert_same(got, want, 0)


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_edge_softmax_of_all_edges_is_ready(norm_by, monkeypatch):
    g, w = graph(), rand(300, 2)
    call = _twice(lambda w: dgl.ops.edge_softmax(g, w, norm_by=norm_by))
    assert compare(call, [w])["dgl.edge_softmax"].accelerated == 2
    dgl_backend.enable()
    monkeypatch.setattr(importlib.import_module("dgl.backend.pytorch.sparse"), "EdgeSoftmax", None)
    call(w)
    with pytest.raises(AttributeError):  # some edges are not
        dgl.ops.edge_softmax(g, w[:9], torch.arange(9))


@pytest.mark.parametrize("x_shape,w_shape", [((), ()), ((3,), ()), ((3,), (1,)), ((2, 3), (2, 1)), ((2, 3), (3,))])
@pytest.mark.parametrize("mode", [torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_shapes_and_autocast(x_shape, w_shape, mode):
    g, steps = graph(), [fn.u_mul_e("h", "w", "m"), fn.u_add_e("h", "w", "m")]
    x, w = rand(40, *x_shape, dtype=torch.float32), rand(300, *w_shape, dtype=torch.float32)

    def call(h, w):
        found = []
        for message in steps:
            with g.local_scope(), mode():
                g.ndata["h"], g.edata["w"] = h, w
                g.update_all(message, fn.mean("m", "n"))
                g.apply_edges(message)
                found += [g.ndata["n"], g.edata["m"]]
        return found

    compare(_twice(call), [x, w], tolerance=1e-5)


def test_later_uses_of_a_graph_make_its_call_ready():
    dgl_backend.enable()
    layer = dglnn.SAGEConv(3, 4, "mean").double()
    for call in (lambda g: g.update_all(fn.copy_u("h", "m"), fn.sum("m", "n")), lambda g: layer(g, g.ndata["h"])):
        g = graph()
        g.ndata["h"] = rand(40, 3)
        before = [*calls_of(structure(g._graph)).values()]
        for kind in [Once] * bounds.NEW_GRAPH_USES + [Ready] * 2:
            call(g)
            made = [r for r in calls_of(structure(g._graph)).values() if r not in before]
            assert [type(r) for r in made] == [kind]
