"""Message passing over several edge types at once."""

from __future__ import annotations

from functools import partial

import torch
from dgl_compare import FRAMEWORK, PARTLY, Case, dgl
from dgl_function_cases import DENSE

import dgl.function as fn  # isort: skip  (after the shim)
import dgl.nn.pytorch as dglnn  # isort: skip

# Of these DGL alone manages one edge type at a time, but its ops over all of them at once only "ring", where each
# type has edges and each node type is a source: test_dgl_hetero.py has the others.
HETERO = ("ring", "hetero", "no first edges", "no middle edges", "fed by no edges", "no edges at all")
AT_ONCE = ("ring",)
NODES = ("game 4", "store 4", "user 4")
REDUCES = ("sum", "max", "min")
ACROSS = "an aggregate of edge types other than sum and mean"  # each layer is accelerated by itself
CROSS = "a reducer across edge types that is not one of DGL's"  # each edge type is accelerated by itself


def hetero_cases() -> dict[str, Case]:
    return _ops() | _updates() | _modules()


def _by_node(g, values):
    """One tensor per node type, in the order of their ids."""
    given = dict(zip(("game", "store", "user"), values, strict=True))
    return [given[name] for name in g.ntypes]


def _ops() -> dict[str, Case]:
    found, group = {}, "dgl.ops, several edge types"
    for reduce in REDUCES:
        op = getattr(dgl.ops, f"copy_u_{reduce}")
        found[f"copy_u_{reduce} (several edge types)"] = Case(group, partial(_copy_u, op), NODES, graphs=AT_ONCE)
        op = getattr(dgl.ops, f"copy_e_{reduce}")
        found[f"copy_e_{reduce} (several edge types)"] = Case(group, partial(_copy_e, op), ("k 40 3",), graphs=AT_ONCE)
    for op in ("mul", "add", "sub", "div"):
        name = f"u_{op}_e_sum"
        found[f"{name} (several edge types)"] = Case(
            group, partial(_u_op_e, getattr(dgl.ops, name)), (*NODES, "k 40 1"), graphs=AT_ONCE
        )
    for name in ("u_add_v", "u_sub_v", "u_mul_v", "u_div_v", "u_dot_v", "v_add_u", "v_dot_u"):
        found[f"{name} (several edge types)"] = Case(group, partial(_u_op_v, name), (*NODES, "k 1"), graphs=AT_ONCE)
    for name in ("u_add_e", "e_mul_v", "e_dot_u"):
        found[f"{name} (several edge types)"] = Case(group, partial(_with_e, name), (*NODES, "k 40 4"), graphs=AT_ONCE)
    found["copy_u (several edge types)"] = Case(
        group, lambda g, *x: dgl.ops.copy_u(g, _by_node(g, x)), NODES, graphs=AT_ONCE
    )
    for norm_by in ("dst", "src"):
        for width in ("", " 2", " 2 3"):
            found[f"edge_softmax(norm_by='{norm_by}'){width and ' of shape' + width} (several edge types)"] = Case(
                group, partial(_softmax, norm_by), (f"k 40{width}",), graphs=AT_ONCE
            )
    return found


def _split(g, x):
    """Consecutive rows of x for the edge types, by type id."""
    counts = [g.num_edges(t) for t in g.canonical_etypes]
    return [part.contiguous() for part in x[: sum(counts)].split(counts)]


def _finite(values):
    return [v for v in values if v is not None and v.numel()]


def _copy_u(op, g, *x):
    return _finite(op(g, _by_node(g, x)))


def _copy_e(op, g, x):
    return _finite(op(g, _split(g, x)))


def _u_op_e(op, g, *x):
    return _finite(op(g, _by_node(g, x[:3]), _split(g, x[3])))


def _u_op_v(name, g, *x):
    return getattr(dgl.ops, name)(g, _by_node(g, x[:3]), [v * 2 for v in _by_node(g, x[:3])])


def _with_e(name, g, *x):
    nodes, edges = _by_node(g, x[:3]), _split(g, x[3])
    left, right = (nodes, edges) if name.endswith("e") else (edges, nodes)
    return getattr(dgl.ops, name)(g, left, right)


def _softmax(norm_by, g, x):
    scores = dict(zip(g.canonical_etypes, _split(g, x), strict=True))
    return dgl.ops.edge_softmax(g, scores, norm_by=norm_by)


def _updates() -> dict[str, Case]:
    found, group = {}, "DGLGraph, several edge types"
    for reduce in REDUCES:
        found[f"update_all(copy_u, {reduce}) (several edge types)"] = Case(
            group, partial(_update_all, fn.copy_u("h", "m"), reduce), (*NODES, "k 40 1"), graphs=(*AT_ONCE, "hetero")
        )
    found["update_all(copy_e, sum) (several edge types)"] = Case(
        group, partial(_update_all, fn.copy_e("w", "m"), "sum"), (*NODES, "k 40 1"), graphs=(*AT_ONCE, "hetero")
    )
    found["update_all(u_mul_e, sum) (several edge types)"] = Case(
        group, partial(_update_all, fn.u_mul_e("h", "w", "m"), "sum"), (*NODES, "k 40 1"), graphs=(*AT_ONCE, "hetero")
    )
    found["apply_edges(u_add_v) (several edge types)"] = Case(group, _apply_edges, NODES, graphs=HETERO)
    for cross in ("sum", "min", "max", "mean", "stack", "user-defined"):
        for reduce in ("sum", "mean", "max", "min"):
            forward = dict(no_backward=HETERO[2:]) if reduce in ("max", "min") else {}
            left = dict(expect=PARTLY, reason=CROSS) if cross == "user-defined" else {}
            found[f"multi_update_all({reduce}, {cross})"] = Case(
                group, partial(_multi, cross, reduce), (*NODES, "k 40 1"), graphs=HETERO, **forward, **left
            )
    found["multi_update_all(user-defined)"] = Case(group, _multi_user_defined, NODES, graphs=HETERO)
    return found


def _load(g, x):
    for name, value in zip(("game", "store", "user"), x, strict=False):
        g.nodes[name].data["h"] = value


def _results(g):
    return [g.nodes[n].data["o"] for n in g.ntypes if "o" in g.nodes[n].data]


def _update_all(message, reduce, g, *x):
    with g.local_scope():
        _load(g, x)
        for etype, weight in zip(g.canonical_etypes, _split(g, x[3]), strict=True):
            g.edges[etype].data["w"] = weight
        g.update_all(message, getattr(fn, reduce)("m", "o"))
        return _results(g)


def _apply_edges(g, *x):
    with g.local_scope():
        _load(g, x)
        for etype in g.canonical_etypes:
            g.apply_edges(fn.u_add_v("h", "h", "o"), etype=etype)
        return [g.edges[etype].data["o"] for etype in g.canonical_etypes]


def _multi(cross, reduce, g, *x):
    reducer = (lambda parts: torch.stack(parts).sum(0) * 2) if cross == "user-defined" else cross
    with g.local_scope():
        _load(g, x)
        functions = {}
        for i, (etype, weight) in enumerate(zip(g.canonical_etypes, _split(g, x[3]), strict=True)):
            g.edges[etype].data["w"] = weight
            functions[etype] = (
                fn.u_mul_e("h", "w", "m") if i % 2 else fn.copy_u("h", "m"),
                getattr(fn, reduce)("m", "o"),
            )
        g.multi_update_all(functions, reducer)
        return _results(g)


def _multi_user_defined(g, *x):
    pair = (lambda edges: {"m": edges.src["h"]}, lambda nodes: {"o": nodes.mailbox["m"].mean(1)})
    with g.local_scope():
        _load(g, x)
        g.multi_update_all(dict.fromkeys(g.canonical_etypes, pair), "sum")
        return _results(g)


def _modules() -> dict[str, Case]:
    found, group = {}, "heterogeneous modules"
    types = ("plays", "sells", "in", "hires", "likes", "follows")
    for aggregate in ("sum", "max", "min", "mean", "stack"):
        make = partial(_hetero_conv, types, "SAGEConv", aggregate)
        left = {} if aggregate in ("sum", "mean") else dict(expect=PARTLY, reason=ACROSS)
        found[f"HeteroGraphConv('{aggregate}')"] = Case(group, _call_conv, NODES, make, HETERO, **left)
    for layer in ("GraphConv", "GATConv", "GINConv"):
        make = partial(_hetero_conv, types, layer, "sum")
        left = {} if layer != "GINConv" else dict(expect=PARTLY, reason="layers that cannot be taken together")
        found[f"HeteroGraphConv({layer})"] = Case(group, _call_conv, NODES, make, HETERO, **left)
    linear = lambda m, g, *x: m(dict(zip(("game", "store", "user"), x, strict=True)))  # noqa: E731
    plain = dict(graphs=("ring",), expect=FRAMEWORK, reason=DENSE)
    make = lambda: dglnn.HeteroLinear({"game": 4, "store": 4, "user": 4}, 3)  # noqa: E731
    found["HeteroLinear"] = Case(group, linear, NODES, make, **plain)
    embed = lambda m, g: m({n: torch.arange(g.num_nodes(n)) for n in g.ntypes})  # noqa: E731
    make = lambda: dglnn.HeteroEmbedding({"game": 4, "store": 4, "user": 4}, 3)  # noqa: E731
    found["HeteroEmbedding"] = Case(group, embed, (), make, **plain)
    return found


def _hetero_conv(types, layer, aggregate):
    made = {
        "SAGEConv": lambda: dglnn.SAGEConv(4, 3, "mean"),
        "GraphConv": lambda: dglnn.GraphConv(4, 3, norm="right", allow_zero_in_degree=True),
        "GATConv": lambda: dglnn.GATConv((4, 4), 3, 2, allow_zero_in_degree=True),
        "GINConv": lambda: dglnn.GINConv(torch.nn.Linear(4, 3)),
    }[layer]
    return dglnn.HeteroGraphConv({t: made() for t in types}, aggregate=aggregate)


def _call_conv(module, g, *x):
    inputs = dict(zip(("game", "store", "user"), x, strict=True))
    if isinstance(next(iter(module.mods.values())), dglnn.GATConv):
        return module(g, (inputs, inputs))
    return module(g, inputs)
