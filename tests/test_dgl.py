"""The DGL plug-in against DGL alone: the same function, run with the plug-in off and on, in one process."""

import copy
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch

from gnnaccel import dgl_backend, report

dgl_backend.shim()
dgl = pytest.importorskip("dgl")
import dgl.function as fn  # noqa: E402
import dgl.nn as dglnn  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def restored():
    report.reset()
    yield
    dgl_backend.disable()


def graph(num_nodes=40, num_edges=300, idtype=torch.int64, seed=0, loops=False):
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randint(0, num_nodes, (num_edges,), generator=generator) for _ in range(2))
    g = dgl.graph((u, v), num_nodes=num_nodes, idtype=idtype)
    return dgl.add_self_loop(g) if loops else g


def randn(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def distinct(*shape, dtype=torch.float64):
    """No two equal values, in bfloat16 either: of equal ones a max takes either, and DGL not the same on every CPU."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    return (order.to(torch.int16) + 0x3C00).view(torch.bfloat16).view(shape).to(dtype)  # 2^-7 and up, bit by bit


def outcome(call, inputs):
    """Outputs and input gradients of call(*inputs) on fresh leaves."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = call(*leaves)
    outs = [o for o in (out if isinstance(out, tuple | list) else (out,)) if o is not None]
    # Rows without edges are infinite in DGL's raw max and min; they have no gradient worth comparing.
    finite = [torch.where(o.isfinite(), o, torch.zeros_like(o)) for o in outs]
    total = sum((o * randn(*o.shape, seed=7, dtype=o.dtype)).sum() for o in finite)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else []
    return outs + [g for g in grads if g is not None]


def compare(call, inputs=(), tolerance=1e-10):
    """The same results off and on; on, at least one accelerated call. Returns what was counted."""
    dgl_backend.disable()
    expected = outcome(call, inputs)
    dgl_backend.enable()
    report.reset()
    got = outcome(call, inputs)
    counted = report.snapshot()
    assert sum(site.accelerated for site in counted.values()) > 0, "nothing was accelerated"
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return counted


SHAPES = [
    ((5,), (5,)),
    ((4, 3), (4, 1)),
    ((4, 1), (4, 3)),
    ((3,), (2, 3)),
    ((1,), (1,)),
    ((), ()),
    ((2, 1, 3), (2, 4, 1)),
]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_binary_spmm(op, reduce, idtype):
    g = graph(idtype=idtype)
    call = getattr(dgl.ops, f"u_{op}_e_{reduce}")
    for left, right in SHAPES:
        compare(lambda x, y: call(g, x, y), [randn(40, *left), randn(300, *right, seed=2) + 3])


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", [f"copy_{t}_{r}" for t in "ue" for r in ("sum", "mean", "max", "min")])
def test_unary_spmm(name, dtype, tolerance):
    g = graph()
    rows = 40 if name.startswith("copy_u") else 300
    values = distinct if name.endswith(("max", "min")) else randn
    for shape in ((7,), (2, 3), ()):
        compare(lambda x: getattr(dgl.ops, name)(g, x), [values(rows, *shape, dtype=dtype)], tolerance)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot"])
def test_sddmm(op):
    g = graph()
    rows = {"u": 40, "v": 40, "e": 300}
    for left, right in itertools.permutations("uve", 2):
        for shapes in (((5,), (5,)), ((4, 3), (1, 3))):
            inputs = [randn(rows[left], *shapes[0]), randn(rows[right], *shapes[1], seed=2) + 3]
            compare(partial(getattr(dgl.ops, f"{left}_{op}_{right}"), g), inputs)
    for target in "uv":
        compare(partial(getattr(dgl.ops, f"copy_{target}"), g), [randn(40, 3)])


def test_edge_softmax():
    g = graph()
    for shape, norm_by in itertools.product(((1,), (4, 1), (3,)), ("src", "dst")):
        compare(partial(dgl.nn.functional.edge_softmax, g, norm_by=norm_by), [randn(300, *shape)])
    some = torch.arange(0, 300, 2)
    compare(lambda s: dgl.nn.functional.edge_softmax(g, s, eids=some), [randn(150, 2)])


def test_message_passing_and_readout():
    g = dgl.batch([graph(10, 30, seed=s) for s in range(4)])

    def call(x, w):
        with g.local_scope():
            g.ndata["h"], g.edata["w"] = x, w
            g.update_all(fn.u_mul_e("h", "w", "m"), fn.max("m", "o"))
            g.apply_edges(fn.u_dot_v("h", "o", "s"))
            return g.ndata["o"], g.edata["s"], dgl.sum_nodes(g, "o"), dgl.mean_nodes(g, "h"), dgl.max_nodes(g, "h")

    compare(call, [randn(40, 4), randn(120, 1, seed=3)])


def test_user_defined_functions_are_counted():
    g = graph(loops=True)

    def call(x):
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(lambda edges: {"m": edges.src["h"] * 2}, fn.sum("m", "a"))
            g.update_all(fn.copy_u("h", "m"), lambda nodes: {"b": nodes.mailbox["m"].sum(1)})
            return g.ndata["a"], g.ndata["b"]

    counted = compare(call, [randn(40, 4)])
    assert counted["dgl.message function"].left == 1 and counted["dgl.reduce function"].left == 1


LAYERS = {
    "GraphConv both": lambda: dglnn.GraphConv(6, 4, norm="both"),
    "GraphConv right": lambda: dglnn.GraphConv(6, 8, norm="right"),
    "GraphConv none": lambda: dglnn.GraphConv(6, 4, norm="none", weight=True),
    "SAGEConv mean": lambda: dglnn.SAGEConv(6, 4, "mean"),
    "SAGEConv gcn": lambda: dglnn.SAGEConv(6, 4, "gcn"),
    "SAGEConv pool": lambda: dglnn.SAGEConv(6, 4, "pool"),
    "GINConv sum": lambda: dglnn.GINConv(torch.nn.Linear(6, 4), "sum", learn_eps=True),
    "GINConv max": lambda: dglnn.GINConv(torch.nn.Linear(6, 4), "max"),
    "GATConv": lambda: dglnn.GATConv(6, 3, num_heads=4, residual=True),
    "GATConv activation": lambda: dglnn.GATConv(6, 5, num_heads=1, activation=torch.tanh, negative_slope=0.1),
    "GATv2Conv": lambda: dglnn.GATv2Conv(6, 3, num_heads=2),
    "AGNNConv": lambda: dglnn.AGNNConv(),
    "APPNPConv": lambda: dglnn.APPNPConv(k=3, alpha=0.2),
    "ChebConv": lambda: dglnn.ChebConv(6, 4, 2),
    "TAGConv": lambda: dglnn.TAGConv(6, 4, k=2),
    "SGConv": lambda: dglnn.SGConv(6, 4, k=2),
    "DotGatConv": lambda: dglnn.DotGatConv(6, 4, num_heads=2),
    "EdgeConv": lambda: dglnn.EdgeConv(6, 4),
    "ResidualSum": lambda: dglnn.GatedGraphConv(6, 6, n_steps=2, n_etypes=1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(3)
    # DGL alone mixes float32 weights into whatever APPNPConv gets, and refuses them.
    dtype, tolerance = (torch.float32, 1e-4) if name == "APPNPConv" else (torch.float64, 1e-8)
    layer = LAYERS[name]().to(dtype)
    g = graph(loops=True)
    args = (lambda x: (x, torch.tensor([2.0], dtype=dtype))) if name == "ChebConv" else (lambda x: (x,))

    def call(x):
        module = copy.deepcopy(layer)
        out = module(g, *args(x))
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            return (out,)
        grads = torch.autograd.grad(out.square().sum(), parameters, retain_graph=True, allow_unused=True)
        return (out, *(grad.detach() for grad in grads if grad is not None))

    compare(call, [randn(40, 6, dtype=dtype)], tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gat_fuses_with_the_same_random_draws(dropout):
    torch.manual_seed(3)
    layer = dglnn.GATConv(6, 4, num_heads=3, feat_drop=dropout, attn_drop=dropout).double()
    g = graph(loops=True)

    def call(x):
        torch.manual_seed(11)
        return layer(g, x)

    counted = compare(call, [randn(40, 6)])
    assert counted["dgl.GATConv"].accelerated == 1
    counted = compare(lambda x: layer.eval()(g, x, get_attention=True), [randn(40, 6)])
    assert "dgl.GATConv" not in counted


@pytest.mark.parametrize("options", [{}, {"activation": torch.nn.ELU(inplace=True)}, {"residual": True}])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [4, 5])
def test_gat_results_may_be_written_into(width, bias, options):
    layer, g = dglnn.GATConv(6, width, num_heads=2, bias=bias, **options).double(), graph(loops=True)
    write = (lambda out: out) if "activation" in options else torch.relu_
    counted = compare(lambda x: write(layer(g, x)), [randn(40, 6)])
    assert counted["dgl.GATConv"].accelerated == 1


def test_gat_dropout_follows_its_own_mode():
    torch.manual_seed(3)
    layer, g = dglnn.GATConv(6, 4, num_heads=2, attn_drop=0.5).double().eval(), graph(loops=True)
    layer.attn_drop.train()

    def call(x):
        torch.manual_seed(11)
        return layer(g, x)

    compare(call, [randn(40, 6)])
    seen = []
    layer.attn_drop.register_forward_hook(lambda module, given, out: seen.append(given[0].shape))
    assert "dgl.GATConv" not in compare(call, [randn(40, 6)]) and seen


def test_gat_leaves_wrong_features_to_dgl():
    dgl_backend.enable()
    with pytest.raises(dgl.DGLError):
        dglnn.GATConv(6, 4, num_heads=2)(graph(loops=True), torch.zeros(39, 6))


def test_gat_refuses_nodes_without_edges_as_dgl_does():
    g, layer = graph(num_edges=10), dglnn.GATConv(6, 4, num_heads=2)
    dgl_backend.enable()
    with pytest.raises(dgl.DGLError, match="0-in-degree"):
        layer(g, torch.zeros(40, 6))


def hetero_graph():
    edges = {
        ("user", "follows", "user"): (torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])),
        ("user", "plays", "game"): (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 0])),
        ("store", "sells", "game"): (torch.tensor([0, 1]), torch.tensor([1, 1])),
    }
    return dgl.heterograph(edges, {"user": 3, "game": 2, "store": 2})


@pytest.mark.parametrize("cross", ["sum", "max", "min", "mean", "stack"])
def test_multi_update_all(cross):
    g = hetero_graph()

    def call(user, store, weight):
        with g.local_scope():
            g.nodes["user"].data["h"], g.nodes["store"].data["h"] = user, store
            g.edges["plays"].data["w"] = weight
            g.multi_update_all(
                {
                    "plays": (fn.u_mul_e("h", "w", "m"), fn.sum("m", "o")),
                    "sells": (fn.copy_u("h", "m"), fn.max("m", "o")),
                    "follows": (fn.copy_u("h", "m"), fn.mean("m", "o")),
                },
                cross,
            )
            return g.nodes["game"].data["o"], g.nodes["user"].data["o"]

    compare(call, [randn(3, 4), randn(2, 4, seed=2), randn(4, 1, seed=3)])


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_hetero_ops(reduce):
    # DGL alone fails in the backward pass where a node type is no source: here each is one.
    edges = {e: hetero_graph().edges(etype=e) for e in hetero_graph().canonical_etypes}
    g = dgl.heterograph(edges | {("game", "in", "store"): (torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1]))})
    order = g.ntypes

    def call(user, store, game):
        given = {"user": user, "store": store, "game": game}
        return tuple(getattr(dgl.ops, f"copy_u_{reduce}")(g, [given[n] for n in order]))

    compare(call, [randn(3, 4), randn(2, 4, seed=2), randn(2, 4, seed=3)])


def test_hetero_ties_errors_and_softmax():
    edges = {("a", "x", "b"): ([0, 1], [0, 0]), ("c", "y", "b"): ([0, 0], [0, 1]), ("b", "z", "a"): ([0], [0])}
    g = dgl.heterograph(edges, {"a": 2, "b": 2, "c": 1})

    def joined(a, c):  # zeros only: the first edge type wins
        dst = dgl.ops.copy_u_max(g, [a, torch.zeros(2, 2).double() - 1, c])
        return dst[1]

    dgl_backend.enable()
    a, c = torch.zeros(2, 2).double().requires_grad_(), torch.zeros(1, 2).double().requires_grad_()
    grads = torch.autograd.grad(joined(a, c).sum(), [a, c])
    assert grads[0].tolist() == [[1, 1], [0, 0]] and grads[1].tolist() == [[1, 1]]
    weights = {e: randn(g.num_edges(e), 1) for e in g.canonical_etypes}
    report.reset()
    dgl.ops.edge_softmax(g, weights)
    assert report.snapshot()["dgl.edge_softmax_hetero"].left == 1


def test_hetero_graph_conv():
    g, torch_seed = hetero_graph(), 4
    torch.manual_seed(torch_seed)
    layer = dglnn.HeteroGraphConv({e: dglnn.SAGEConv(4, 3, "mean") for e in g.etypes}, aggregate="sum").double()

    def call(user, store, game):
        out = layer(g, {"user": user, "store": store, "game": game})
        return out["user"], out["game"]

    compare(call, [randn(3, 4), randn(2, 4, seed=2), randn(2, 4, seed=3)])


@pytest.mark.parametrize("edges", [0, 6])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_few_or_no_edges(reduce, edges):
    g = graph(num_edges=edges)

    def op(x):
        return getattr(dgl.ops, f"copy_u_{reduce}")(g, x)

    def update(x):
        with g.local_scope():
            g.ndata["h"] = x
            g.update_all(fn.copy_u("h", "m"), getattr(fn, reduce)("m", "o"))
            return g.ndata["o"]

    for call in (op, update):
        if edges or reduce in ("sum", "mean"):
            compare(call, [randn(40, 3)])
            continue
        compare(lambda x, call=call: call(x.detach()), [randn(40, 3)])
        x = randn(40, 3).requires_grad_()
        call(x).sum().backward()
        assert (x.grad == 0).all(), "DGL alone invents a gradient for node 0; there is none"


@pytest.mark.parametrize("formats", ["csc", "csr", "coo", ["csr", "csc"]])
def test_any_sparse_format(formats):
    g, x, w = graph(), randn(40, 3), randn(300, 1)
    dgl_backend.disable()
    expected = outcome(lambda x, w: dgl.ops.u_mul_e_sum(g, x, w), [x, w])
    dgl_backend.enable()  # on any format, while DGL alone refuses some of the passes on a single one
    for a, b in zip(outcome(lambda x, w: dgl.ops.u_mul_e_sum(g.formats(formats), x, w), [x, w]), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_mutation_reverse_and_pickle_do_not_reuse_the_structure():
    dgl_backend.enable()
    g = graph()
    x = randn(40, 3)
    before = dgl.ops.copy_u_sum(g, x)
    g.add_edges(torch.tensor([1]), torch.tensor([2]))
    after = dgl.ops.copy_u_sum(g, x)
    torch.testing.assert_close(after[2], before[2] + x[1])
    again = pickle.loads(pickle.dumps(g))
    torch.testing.assert_close(dgl.ops.copy_u_sum(again, x), after)
    turned = dgl.ops.copy_u_sum(dgl.reverse(g), x)
    dgl_backend.disable()
    torch.testing.assert_close(turned, dgl.ops.copy_u_sum(dgl.reverse(g), x))


def test_degrees_and_reverses_are_remembered_but_not_shared():
    g, h = graph(), hetero_graph()
    few = torch.tensor([3, 4])

    def degrees():
        both = (g.in_degrees(), g.out_degrees(), g.in_degrees(few), g.out_degrees(u=few), g.in_degrees(v=few))
        return *both, h.in_degrees(etype="plays"), h.out_degrees("__ALL__", "sells"), torch.tensor(g.in_degrees(3))

    expected = degrees()
    dgl_backend.enable()
    for _ in range(2):
        for a, b in zip(degrees(), expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        g.in_degrees().zero_()
    with pytest.raises(dgl.DGLError):
        h.in_degrees()
    assert dgl.reverse(g)._graph is dgl.reverse(g)._graph
    g.add_edges(torch.tensor([1]), torch.tensor([2]))
    assert g.in_degrees()[2] == expected[0][2] + 1
    assert torch.equal(dgl.reverse(g).in_degrees(), g.out_degrees())


def test_the_structure_is_built_once():
    g = hetero_graph()
    dgl_backend.enable()
    first = dgl_backend.to_graph(g, "plays")
    assert dgl_backend.to_graph(g, "plays") is first
    assert dgl_backend.to_graph(g.local_var(), "plays") is first
    with pytest.raises(ValueError, match="several edge types"):
        dgl_backend.to_graph(g)
    g = graph()
    prepared = dgl_backend.to_graph(g)
    g.ndata["h"] = randn(40, 2)
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
    assert dgl_backend.graph.structure(g._graph.get_relation_graph(0)) is prepared


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_sampled_blocks(idtype):
    dgl_backend.enable()
    g = graph(200, 4000, idtype=idtype)
    x = randn(200, 5)
    layer = dglnn.SAGEConv(5, 3, "mean").double()
    sampler = dgl.dataloading.NeighborSampler([4, 4])
    loader = dgl.dataloading.DataLoader(g, torch.arange(100, dtype=idtype), sampler, batch_size=25)
    for inputs, _, blocks in loader:
        h = x[inputs.long()]
        for block in blocks:
            u, _ = block.edges()
            assert block.num_edges() == 0 or int(u.max()) < block.num_src_nodes()
        dgl_backend.disable()
        expected = layer(blocks[0], h)
        dgl_backend.enable()
        torch.testing.assert_close(layer(blocks[0], h), expected)


def test_wrong_arguments_raise_dgl_errors():
    dgl_backend.enable()
    g = graph()
    with pytest.raises(dgl.DGLError):
        dgl.ops.u_mul_e_sum(g, randn(40, 3), randn(300, 3).float())
    with pytest.raises(dgl.DGLError):
        dgl.ops.copy_u_sum(g, randn(39, 3))
    with pytest.raises(ValueError, match="offsets"):
        dgl.ops.segment_reduce(torch.tensor([3, 4]), randn(5, 2))


def test_dgl_runs_alone_where_the_binary_cannot_be_loaded():
    code = """
        import sys
        sys.modules["gnnaccel._C"] = None
        import gnnaccel
        gnnaccel.install()
        import dgl, torch
        print(dgl.ops.copy_u_sum(dgl.graph(([0], [1])), torch.ones(2, 1)).tolist())
    """
    environment = {k: v for k, v in os.environ.items() if "GNNACCEL" not in k}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[[0.0], [1.0]]\n"
    assert "DGL runs without acceleration: ImportError: gnnaccel's compiled library could not be loaded" in done.stderr


def test_disable_restores_everything():
    from dgl.backend.pytorch import sparse
    from dgl.heterograph_index import HeteroGraphIndex

    names = ("GSpMM", "GSDDMM", "EdgeSoftmax", "SegmentReduce", "GSpMM_hetero", "GSDDMM_hetero")
    places = [(sparse, name) for name in names]
    places += [(dgl.ops, "gspmm"), (dglnn.GATConv, "forward"), (dgl.core, "invoke_edge_udf")]
    places += [(HeteroGraphIndex, "reverse"), (HeteroGraphIndex, "get_relation_graph"), (dgl.DGLGraph, "in_degrees")]
    before = [getattr(*place) for place in places]
    dgl_backend.enable()
    dgl_backend.enable()
    assert not any(getattr(*place) is old for place, old in zip(places, before, strict=True))
    dgl_backend.disable()
    assert [getattr(*place) for place in places] == before
