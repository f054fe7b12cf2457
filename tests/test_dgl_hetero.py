"""Ops over several edge types at once where DGL alone fails: an edge type without edges, a node type that is no source.

The reference is DGL alone on one edge type at a time, joined here.
"""

import itertools

import pytest
import torch
from dgl_compare import assert_same, build, compare, dgl, outcome, rand

from gnnaccel import dgl_backend, report
from gnnaccel.dgl_backend import hetero_layers

import dgl.function as fn  # isort: skip  (after the shim)

GRAPHS = ("ring", "hetero", "no first edges", "no middle edges", "fed by no edges", "no edges at all")

pytestmark = pytest.mark.usefixtures("dgl_restored")


def features(g, width=4):
    """Node features by type id, then edge features by type id."""
    nodes = [rand(g.num_nodes(n), width, seed=i) for i, n in enumerate(g.ntypes)]
    return nodes, [rand(g.num_edges(e), width, seed=9 + i) for i, e in enumerate(g.canonical_etypes)]


def single(g, etype):
    """The graph of one edge type, free of what DGL or the plug-in remembers."""
    source, _, target = etype
    nodes = {source: g.num_nodes(source), target: g.num_nodes(target)}
    return dgl.heterograph({etype: g.edges(etype=etype)}, nodes)


def by_type(g, name, nodes, edges):
    """The op's result for each node type: the join of the results of each edge type that has edges."""
    join = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[name.rpartition("_")[2]]
    out, parts = [None] * len(g.ntypes), name.split("_")
    # An edge type without edges adds nothing; where there is no other, the result is 0.
    full = {e[2] for e in g.canonical_etypes if g.num_edges(e)}
    for i, etype in enumerate(g.canonical_etypes):
        source, target = g.get_ntype_id(etype[0]), g.get_ntype_id(etype[2])
        if not g.num_edges(etype):
            if etype[2] not in full:
                out[target] = torch.zeros(g.num_nodes(etype[2]), nodes[0].shape[1], dtype=torch.float64)
            continue
        operands = [side[k] for side, k, used in ((nodes, source, "u" in parts), (edges, i, "e" in parts)) if used]
        part = getattr(dgl.ops, name)(single(g, etype), *operands)
        out[target] = part if out[target] is None else join(out[target], part)
    return [torch.tensor([]) if o is None else o for o in out]


@pytest.mark.parametrize("where", GRAPHS)
@pytest.mark.parametrize("name", [f"{op}_{r}" for op in ("copy_u", "copy_e") for r in ("sum", "max", "min")]
                         + ["u_mul_e_sum", "u_sub_e_sum", "u_mul_e_max"])  # fmt: skip
def test_reductions(name, where):
    g = build(where)
    nodes, edges = features(g)
    lists = [x for x, used in ((nodes, "u" in name.split("_")), (edges, "_e" in name)) if used]
    flat = [t for part in lists for t in part]

    def at_once(*given):
        it = iter(given)
        return list(getattr(dgl.ops, name)(g, *([next(it) for _ in part] for part in lists)))

    def apart(*given):
        it = iter(given)
        values = {id(part): [next(it) for _ in part] for part in lists}
        return by_type(g, name, values.get(id(nodes), nodes), values.get(id(edges), edges))

    _check(at_once, apart, flat)


def _check(at_once, apart, inputs):
    want = outcome(apart, inputs)
    dgl_backend.enable()
    got = outcome(at_once, inputs)
    # Which features have no part in a result differs: autograd gives those no gradient, or zeros.
    for name in set(got) ^ set(want):
        assert (got.pop(name, want.get(name)) == 0).all()
        want.pop(name, None)
    assert_same(got, want, 1e-10)
    counted = report.snapshot()
    assert all(site.left == 0 for site in counted.values()) and any(s.accelerated for s in counted.values())


@pytest.mark.parametrize("where", GRAPHS)
@pytest.mark.parametrize("name", ["u_add_v", "u_dot_v", "v_sub_u", "u_mul_e", "e_div_v", "copy_u"])
def test_edge_values(name, where):
    g = build(where)
    nodes, edges = features(g)
    targets = [name[-1]] if name.startswith("copy") else [name[0], name[-1]]

    def pick(target, i, etype, values):
        source, destination = g.get_ntype_id(etype[0]), g.get_ntype_id(etype[2])
        return values[{"u": source, "v": destination, "e": len(nodes) + i}[target]]

    def at_once(*values):
        sides = [list(values[len(nodes) :]) if t == "e" else list(values[: len(nodes)]) for t in targets]
        return list(getattr(dgl.ops, name)(g, *sides))

    def apart(*values):
        return [
            getattr(dgl.ops, name)(single(g, etype), *(pick(t, i, etype, values) for t in targets))
            for i, etype in enumerate(g.canonical_etypes)
        ]

    _check(at_once, apart, nodes + edges)


@pytest.mark.parametrize("where", GRAPHS)
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_softmax_over_edge_types(norm_by, shape, where):
    g = build(where)
    scores = [rand(g.num_edges(e), *shape, seed=i) for i, e in enumerate(g.canonical_etypes)]

    def at_once(*given):
        out = dgl.ops.edge_softmax(g, dict(zip(g.canonical_etypes, given, strict=True)), norm_by=norm_by)
        return [out[e] for e in g.canonical_etypes]

    def apart(*given):
        """exp(score) over its sum at the edge's node, in plain torch."""
        end = 0 if norm_by == "src" else 2
        total = {n: torch.zeros(g.num_nodes(n), *shape, dtype=torch.float64) for n in g.ntypes}
        ends = [g.edges(etype=e)[end // 2] for e in g.canonical_etypes]
        for etype, rows, x in zip(g.canonical_etypes, ends, given, strict=True):
            total[etype[end]] = total[etype[end]].index_add(0, rows, x.exp())
        each = zip(g.canonical_etypes, ends, given, strict=True)
        return [x.exp() / total[etype[end]][rows] for etype, rows, x in each]

    _check(at_once, apart, scores)


@pytest.mark.parametrize("formats", ["csc", "csr", "coo"])
def test_any_sparse_format(formats):
    g = build("ring")
    nodes, edges = features(g)
    scores = dict(zip(g.canonical_etypes, edges, strict=True))
    dgl_backend.enable()
    for norm_by in ("src", "dst"):
        want = dgl.ops.edge_softmax(g, scores, norm_by=norm_by)
        torch.testing.assert_close(dgl.ops.edge_softmax(g.formats(formats), scores, norm_by=norm_by), want)
    torch.testing.assert_close(dgl.ops.copy_u_sum(g.formats(formats), nodes), dgl.ops.copy_u_sum(g, nodes))


def test_softmax_keeps_one_structure_and_independent_results():
    g = build("ring")
    scores = {e: rand(g.num_edges(e), 2) for e in g.canonical_etypes}
    dgl_backend.enable()
    dgl.ops.edge_softmax(g, scores)
    kept = dgl_backend.structure.all_rows(g._graph, "dst")
    out = dgl.ops.edge_softmax(g, {e: s.requires_grad_() for e, s in scores.items()})
    assert dgl_backend.structure.all_rows(g._graph, "dst") is kept
    for part in out.values():
        part.mul_(2)
    sum(part.sum() for part in out.values()).backward()


def test_update_all_at_once_with_edge_types_without_edges():
    for where, reduce in itertools.product(GRAPHS, ("sum", "max", "min")):
        g = build(where)
        nodes, _ = features(g)

        def at_once(*given, g=g, reduce=reduce):
            with g.local_scope():
                for name, value in zip(g.ntypes, given, strict=True):
                    g.nodes[name].data["h"] = value
                g.update_all(fn.copy_u("h", "m"), getattr(fn, reduce)("m", "o"))
                return [g.nodes[n].data["o"] for n in g.ntypes if "o" in g.nodes[n].data]

        def apart(*given, g=g, reduce=reduce):
            parts = [p for p in by_type(g, f"copy_u_{reduce}", list(given), []) if p.numel()]
            return [torch.where(p.isinf(), 0.0, p) for p in parts]

        dgl_backend.disable()
        _check(at_once, apart, nodes)


def test_equal_values_and_their_gradient():
    edges = {("a", "x", "b"): ([0, 1], [0, 0]), ("c", "y", "b"): ([0, 0], [0, 1]), ("b", "z", "a"): ([0], [0])}
    g = dgl.heterograph(edges, {"a": 2, "b": 2, "c": 1})

    def joined(a, c):  # zeros only: the first edge type wins
        return dgl.ops.copy_u_max(g, [a, torch.zeros(2, 2).double() - 1, c])[1]

    dgl_backend.enable()
    a, c = torch.zeros(2, 2).double().requires_grad_(), torch.zeros(1, 2).double().requires_grad_()
    grads = torch.autograd.grad(joined(a, c).sum(), [a, c])
    assert grads[0].tolist() == [[1, 1], [0, 0]] and grads[1].tolist() == [[1, 1]]


def test_wrong_features_are_left_to_dgl():
    g = build("ring")
    nodes, edges = features(g)
    dgl_backend.enable()
    with pytest.raises(dgl.DGLError):
        dgl.ops.u_mul_e_sum(g, nodes, [e[:, :3] for e in edges])
    assert report.snapshot()["dgl.gspmm_hetero mul.sum"].left == 1
    with pytest.raises(dgl.DGLError):
        dgl.ops.u_dot_e(g, nodes, [e[:, :3] for e in edges])
    assert report.snapshot()["dgl.gsddmm_hetero dot"].left == 1


def test_relational_layers_with_typed_products():
    """RGCN through segment_mm and gather_mm, around one of our sums."""
    g = build("int64")
    weight, types = rand(3, 16, 4), (torch.arange(g.num_edges()) % 3).sort()[0]
    lengths = torch.bincount(types, minlength=3)

    def call(x, w):
        with g.local_scope():
            g.ndata["h"] = x
            g.apply_edges(fn.copy_u("h", "m"))
            g.edata["m"] = dgl.ops.segment_mm(g.edata["m"], w, lengths) + dgl.ops.gather_mm(
                g.edata["m"], w, idx_b=types
            )
            g.update_all(fn.copy_e("m", "m"), fn.mean("m", "o"))
            return g.ndata["o"]

    counted = compare(call, [rand(40, 16), weight])
    assert all(site.left == 0 for site in counted.values())


def test_blocks_of_several_edge_types():
    g = build("ring")
    block = dgl.to_block(dgl.in_subgraph(g, {"user": [0, 2], "game": [1]}), {"user": [0, 2], "game": [1]})
    sources = [rand(block.num_nodes(f"SRC/{n}"), 4, seed=i) for i, n in enumerate(block.srctypes)]
    scores = [rand(block.num_edges(e), 2, seed=i) for i, e in enumerate(block.canonical_etypes)]

    def call(*nodes):
        with block.local_scope():
            for name, value in zip(block.srctypes, nodes, strict=True):
                block.srcnodes[name].data["h"] = value
            each = (fn.copy_u("h", "m"), fn.mean("m", "o"))
            block.multi_update_all({e: each for e in block.canonical_etypes if block.num_edges(e)}, "sum")
            return [block.dstnodes[n].data["o"] for n in block.dsttypes if "o" in block.dstnodes[n].data]

    compare(call, sources)
    dgl_backend.enable()
    report.reset()
    softmax = dgl.ops.edge_softmax(block, dict(zip(block.canonical_etypes, scores, strict=True)))
    for target in block.dsttypes:
        total = torch.zeros(block.num_nodes(f"DST/{target}"), 2, dtype=torch.float64)
        for etype in block.canonical_etypes:
            if etype[2] == target:
                total.index_add_(0, block.edges(etype=etype)[1], softmax[etype])
        fed = sum(block.in_degrees(etype=e) for e in block.canonical_etypes if e[2] == target) > 0
        torch.testing.assert_close(total, fed.double().view(-1, 1).expand(-1, 2))
    assert report.snapshot()["dgl.edge_softmax_hetero"].accelerated == 1


def _skewed():
    """One edge type with nearly all edges, one without any, and a node type without nodes."""
    generator = torch.Generator().manual_seed(1)
    pair = lambda n, m, e: tuple(torch.randint(0, k, (e,), generator=generator) for k in (n, m))  # noqa: E731
    edges = {
        ("a", "most", "b"): pair(6, 9, 600),
        ("b", "few", "b"): pair(9, 9, 4),
        ("a", "none", "b"): ([], []),
        ("c", "empty", "b"): ([], []),
        ("b", "back", "a"): pair(9, 6, 8),
    }
    edges = {e: tuple(torch.as_tensor(x, dtype=torch.int64) for x in pair) for e, pair in edges.items()}
    return dgl.heterograph(edges, {"a": 6, "b": 9, "c": 0})


def _twice(call, g, inputs, module=None):
    """The plug-in's second call on a graph, whose structures the first has made, against DGL alone."""
    want = outcome(call, inputs, module)
    dgl_backend.enable()
    outcome(call, inputs, module)
    report.reset()
    got = outcome(call, inputs, module)
    assert_same(got, want, 1e-10)
    return report.snapshot()


@pytest.mark.parametrize("message", ["copy_u", "u_mul_e", "mixed"])
@pytest.mark.parametrize("cross", ["sum", "mean", "max", "min", "stack"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "sum and mean"])
@pytest.mark.parametrize("where", ["ring", "hetero", "skewed"])
def test_all_edge_types_in_one_walk(where, reduce, cross, message):
    g = _skewed() if where == "skewed" else build(where)
    nodes, edges = features(g)
    types = [e for e in g.canonical_etypes if g.num_edges(e) or reduce in ("sum", "mean", "sum and mean")]

    def call(*given):
        with g.local_scope():
            for name, x in zip(g.ntypes, given, strict=False):
                g.nodes[name].data["h"] = x
            functions = {}
            for i, (etype, w) in enumerate(zip(g.canonical_etypes, given[len(g.ntypes) :], strict=True)):
                g.edges[etype].data["w"] = w
                product = message == "u_mul_e" or (message == "mixed" and i % 2)
                each = ("sum", "mean")[i % 2] if reduce == "sum and mean" else reduce
                make = fn.u_mul_e("h", "w", "m") if product else fn.copy_u("h", "m")
                functions[etype] = (make, getattr(fn, each)("m", "o"))
            g.multi_update_all({e: functions[e] for e in reversed(types)}, cross)
            return [g.nodes[n].data["o"] for n in g.ntypes if "o" in g.nodes[n].data]

    counted = _twice(call, g, nodes + edges)
    assert not counted["dgl.multi_update_all"].reasons and counted["dgl.multi_update_all"].accelerated


@pytest.mark.parametrize("functions, cross, reason", [
    ((fn.copy_e("w", "m"), fn.sum("m", "o")), "sum", "messages other than"),
    ((fn.copy_u("h", "m"), fn.sum("m", "o")), lambda parts: sum(parts), "a reducer across edge types"),
    ((fn.copy_u("h", "m"), fn.max("m", "o")), "max", "without edges"),
])  # fmt: skip
def test_why_edge_types_are_walked_one_by_one(functions, cross, reason):
    g = _skewed()
    nodes, edges = features(g)

    def call(*given):
        with g.local_scope():
            for name, x in zip(g.ntypes, given, strict=False):
                g.nodes[name].data["h"] = x
            for etype, w in zip(g.canonical_etypes, given[len(g.ntypes) :], strict=True):
                g.edges[etype].data["w"] = w
            kinds = [e for e in g.canonical_etypes if e[2] == "b"]
            g.multi_update_all(dict.fromkeys(kinds, functions), cross)
            return [torch.nan_to_num(g.nodes["b"].data["o"])]

    dgl_backend.enable()
    call(*nodes, *edges)
    (why,) = report.snapshot()["dgl.multi_update_all"].reasons
    assert reason in why


def test_a_changed_graph_has_a_stack_of_its_own():
    g = build("ring")
    sums = {e: (fn.copy_u("h", "m"), fn.sum("m", "o")) for e in g.canonical_etypes}

    def call(g):
        for i, name in enumerate(g.ntypes):
            g.nodes[name].data["h"] = rand(g.num_nodes(name), 3, seed=i)
        g.multi_update_all(sums, "sum")
        return [g.nodes[name].data.pop("o") for name in g.ntypes]

    more = dgl.add_edges(g, [0, 1], [0, 2], etype="plays")
    want = [call(g), call(more)]
    dgl_backend.enable()
    for _ in range(2):
        for each, expected in zip((g, more), want, strict=True):
            torch.testing.assert_close(call(each), expected)


LAYERS = {
    "GraphConv": lambda n, f: dgl.nn.GraphConv(f, 5, norm=("both", "right", "left", "none")[n % 4]),
    "GraphConv narrow": lambda n, f: dgl.nn.GraphConv(f, 1, norm="both", bias=n % 2 == 0),
    "SAGEConv": lambda n, f: dgl.nn.SAGEConv(f, 5, "mean", bias=n % 2 == 0),
    "both": lambda n, f: dgl.nn.GraphConv(f, 5) if n % 2 else dgl.nn.SAGEConv(f, 5, "mean"),
    "some": lambda n, f: dgl.nn.SAGEConv(f, 5, ("mean", "gcn")[n == 1], feat_drop=0.5 * (n == 2)),
    "GATConv": lambda n, f: dgl.nn.GATConv(f, 3, 2, allow_zero_in_degree=True, bias=n % 2 == 0),
    "GATConv pair": lambda n, f: dgl.nn.GATConv((f, f), 3, 1, negative_slope=0.1 * (n % 2), allow_zero_in_degree=True),
    "GATConv some": lambda n, f: dgl.nn.GATConv(
        f,
        5,
        1,
        attn_drop=0.5 * (n == 2),
        residual=n == 1,
        activation=torch.relu if n == 5 else None,
        allow_zero_in_degree=True,
    ),
    "GINConv": lambda n, f: dgl.nn.GINConv(torch.nn.Linear(f, 5), init_eps=0.25 * n),
    "GINConv some": lambda n, f: dgl.nn.GINConv(
        (None, torch.nn.Tanh())[n % 2], ("sum", "mean")[n == 1], 0.5, n == 2, (None, torch.relu)[n == 3]
    ),
}


@pytest.mark.parametrize("form", ["dict", "pair", "block"])
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("where", ["ring", "skewed"])
def test_layers_of_all_edge_types_together(where, name, aggregate, form, monkeypatch):
    monkeypatch.setattr(hetero_layers, "SUMMING", ("cpu", "cuda"))
    g = _skewed() if where == "skewed" else build(where)
    torch.manual_seed(2)
    conv = dgl.nn.HeteroGraphConv({e: LAYERS[name](n, 4) for n, e in enumerate(g.etypes)}, aggregate).double()
    if form == "block":
        g = dgl.to_block(g, {n: torch.arange(g.num_nodes(n)) for n in g.ntypes})
    nodes = [rand(g.num_nodes(f"SRC/{n}" if form == "block" else n), 4, seed=i) for i, n in enumerate(g.srctypes)]

    def call(conv, *given):
        inputs = dict(zip(g.srctypes, given, strict=True))
        return conv(g, (inputs, {k: x * 2 for k, x in inputs.items()}) if form == "pair" else inputs)

    site = _twice(call, g, nodes, conv)["dgl.HeteroGraphConv"]
    assert site.accelerated and (not site.reasons)


@pytest.mark.parametrize("change, called", [
    (lambda conv: conv.mods["plays"].register_forward_hook(lambda *a: a[2] * 2), True),
    (lambda conv: setattr(conv.mods["plays"], "_activation", torch.relu), True),
    (lambda conv: setattr(conv, "agg_fn", lambda parts, name: sum(parts) * 3), False),
])  # fmt: skip
def test_changed_layers_are_called(change, called):
    g = build("ring")
    torch.manual_seed(2)
    conv = dgl.nn.HeteroGraphConv({e: dgl.nn.GraphConv(4, 3) for e in g.etypes}).double()
    change(conv)
    nodes, _ = features(g)
    site = _twice(lambda conv, *given: conv(g, dict(zip(g.ntypes, given, strict=True))), g, nodes, conv)
    assert bool(site["dgl.HeteroGraphConv"].reasons) != called  # the others into other types are taken together


@pytest.mark.parametrize("name", ["GraphConv", "SAGEConv", "multi_update_all"])
def test_checkpointing_what_a_second_call_does_another_way(name):
    g = build("ring")
    torch.manual_seed(2)
    layer = LAYERS.get(name, LAYERS["GraphConv"])
    conv = dgl.nn.HeteroGraphConv({e: layer(n, 4) for n, e in enumerate(g.etypes)}).double()

    def call(*given):
        inputs = dict(zip(g.ntypes, given, strict=True))
        if name != "multi_update_all":
            return tuple(conv(g, inputs).values())
        with g.local_scope():
            for n, x in inputs.items():
                g.nodes[n].data["h"] = x
            g.multi_update_all({e: (fn.copy_u("h", "m"), fn.max("m", "o")) for e in g.canonical_etypes}, "sum")
            return tuple(g.nodes[n].data["o"] for n in g.ntypes if "o" in g.nodes[n].data)

    nodes = [x.requires_grad_() for x in features(g)[0]]
    dgl_backend.disable()
    want = torch.autograd.grad([out.square().sum() for out in call(*nodes)], nodes)
    dgl_backend.enable()
    g = build("ring")
    for _ in range(2):
        outs = torch.utils.checkpoint.checkpoint(call, *nodes, use_reentrant=False)
        torch.testing.assert_close(torch.autograd.grad([out.square().sum() for out in outs], nodes), want)


@pytest.mark.parametrize("name", ["GraphConv", "GATConv"])
def test_hooks_are_not_called_without_a_gradient(name):
    g, found = build("ring"), []
    nodes = features(g)[0]
    make = {"GraphConv": lambda n: dgl.nn.GraphConv(4, 4), "GATConv": lambda n: dgl.nn.GATConv(4, 4, 1)}[name]
    conv = dgl.nn.HeteroGraphConv({e: make(n) for n, e in enumerate(g.etypes)}).double()
    for parameter in conv.parameters():
        parameter.register_hook(lambda grad: grad * 2)
    for enable in (dgl_backend.disable, dgl_backend.enable):
        enable()
        found.append([])
        for _ in range(4):
            for target in {e[2] for e in g.canonical_etypes}:
                conv.zero_grad()
                conv(g, dict(zip(g.ntypes, nodes, strict=True)))[target].square().sum().backward()
                found[-1] += [parameter.grad for parameter in conv.parameters()]
    assert [grad is None for grad in found[0]] == [grad is None for grad in found[1]]
    for want, got in zip(*found, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want)
