"""The functions and methods of DGL that pass messages on graphs with one edge type, and its readouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from dgl_compare import ALL, FRAMEWORK, PARTLY, Case, dgl

import dgl.function as fn  # isort: skip  (after the shim)

WHOLE_MAILBOX = "sort() of a mailbox"
DENSE = "no message passing: dense matrix operations of torch"


# One operand of each pair broadcasts, has no feature dimension, or fewer of them.
_SHAPES = (("5", "5"), ("4 3", "4 1"), ("4 1", "4 3"), ("3", "2 3"), ("", ""), ("2 1 3", "2 4 1"))
_OPS = ("add", "sub", "mul", "div")
_REDUCES = ("sum", "mean", "max", "min")
_PAIRS = [(left, right) for left in "uve" for right in "uve" if left != right]


def _specs(left: str, right: str, shapes) -> tuple[str, ...]:
    return tuple(f"{t} {s}".strip() for pair in shapes for t, s in zip((left, right), pair, strict=True))


def _each(call, size: int):
    """Calls call(g, ...) for each `size` of the inputs."""
    return lambda g, *inputs: [call(g, *inputs[i : i + size]) for i in range(0, len(inputs), size)]


def _ops() -> dict[str, Case]:
    """Every function of dgl.ops on one edge type."""
    found, group = {}, "dgl.ops"
    for reduce in _REDUCES:
        forward = dict(no_backward=("edgeless",)) if reduce in ("max", "min") else {}
        for op in _OPS:
            name = f"u_{op}_e_{reduce}"
            found[name] = Case(group, _each(getattr(dgl.ops, name), 2), _specs("u", "e", _SHAPES), **forward)
        for target in "ue":
            name, inputs = f"copy_{target}_{reduce}", (f"{target} 7", f"{target} 2 3", target)
            found[name] = Case(group, _each(getattr(dgl.ops, name), 1), inputs, **forward)
    for left, right in _PAIRS:
        for op in (*_OPS, "dot"):
            shapes = (("5", "5"), ("4 3", "1 3"), ("3", "2 3")) if op == "dot" else _SHAPES
            name = f"{left}_{op}_{right}"
            found[name] = Case(group, _each(getattr(dgl.ops, name), 2), _specs(left, right, shapes))
    for target in "uv":
        name = f"copy_{target}"
        found[name] = Case(group, _each(getattr(dgl.ops, name), 1), (f"{target} 7", f"{target} 2 3", target))
    found["copy_e"] = Case(group, dgl.ops.copy_e, ("e 3",), expect=FRAMEWORK, reason="returns its argument")
    found["gspmm"] = Case(group, lambda g, x, w: dgl.ops.gspmm(g, "mul", "sum", x, w), ("u 4", "e 1"))
    found["gsddmm"] = Case(group, lambda g, x, y: dgl.ops.gsddmm(g, "dot", x, y, "u", "v"), ("u 4", "v 4"))
    softmax = dgl.ops.edge_softmax
    scores = ("e 1", "e 4 1", "e 3")
    found["edge_softmax"] = Case(group, _each(softmax, 1), (*scores, "e"))
    found["edge_softmax(norm_by='src')"] = Case(group, _each(partial(softmax, norm_by="src"), 1), scores)
    for norm_by in ("dst", "src"):
        found[f"edge_softmax(eids, norm_by='{norm_by}')"] = Case(group, partial(_some_softmax, norm_by), ("e 2",))
    return found | _segments()


def _some_softmax(norm_by, g, scores):
    some = torch.arange(0, g.num_edges(), 2, dtype=g.idtype)
    return dgl.ops.edge_softmax(g, scores[::2], eids=some, norm_by=norm_by)


def _segments() -> dict[str, Case]:
    lengths = torch.tensor([3, 0, 7, 1, 9])
    call = lambda reduce: lambda g, *values: [dgl.ops.segment_reduce(lengths.to(x.device), x, reduce) for x in values]  # noqa: E731
    group, given = "segments", dict(inputs=("k 20 3", "k 20", "k 20 2 4"), graphs=("int64",))
    found = {f"segment_reduce('{r}')": Case(group, call(r), **given) for r in _REDUCES}
    found["segment_softmax"] = Case(
        group, lambda g, *xs: [dgl.ops.segment_softmax(lengths.to(x.device), x) for x in xs], **given
    )
    found["segment_mm"] = Case(
        group, lambda g, a, b: dgl.ops.segment_mm(a, b, lengths), ("k 20 6", "k 5 6 4"), graphs=("int64",),
    )  # fmt: skip
    types = torch.arange(20) % 5
    for width in (4, 16):  # DGL sorts by type from 9 columns on
        found[f"gather_mm({width} columns)"] = Case(
            group, lambda g, a, b: dgl.ops.gather_mm(a, b, idx_b=types.to(a.device)),
            (f"k 20 {width}", f"k 5 {width} 4"), graphs=("int64",),
        )  # fmt: skip
    return found


_CORE = ("copy_u", "copy_e", "u_mul_e", "v_sub_u")  # on every graph; the others differ from them in the operator alone
MESSAGES = ("copy_u", "copy_e", *(f"{a}_{op}_{b}" for a, b in _PAIRS for op in (*_OPS, "dot")))


def _message(name: str):
    """A built-in message function from the fields x (left) and y (right) to m."""
    return getattr(fn, name)("x", "m") if name.startswith("copy") else getattr(fn, name)("x", "y", "m")


def _targets(name: str) -> tuple[str, ...]:
    return (name[-1],) if name.startswith("copy") else (name[0], name[-1])


def _set(g, name: str, values) -> None:
    for target, field, value in zip(_targets(name), "xy", values, strict=False):
        {"u": g.srcdata, "v": g.dstdata, "e": g.edata}[target][field] = value


def _update_all(name: str, method: Callable):
    """All four reductions of messages `name` through method(g, message, reduce function)."""

    def call(g, *values):
        outs = []
        for reduce in _REDUCES:
            with g.local_scope():
                _set(g, name, values)
                method(g, _message(name), getattr(fn, reduce)("m", "o"))
                outs.append(g.dstdata["o"])
        return outs

    return call


def _ids(count: int, g):
    return torch.arange(0, count, 3, dtype=g.idtype)


_METHODS = {
    "update_all": lambda g, m, r: g.update_all(m, r),
    "pull": lambda g, m, r: g.pull(_ids(g.num_dst_nodes(), g), m, r),
    "push": lambda g, m, r: g.push(_ids(g.num_src_nodes(), g), m, r),
    "send_and_recv": lambda g, m, r: g.send_and_recv(_ids(g.num_edges(), g), m, r),
}


def _methods() -> dict[str, Case]:
    """The methods of DGLGraph, with every built-in message and reduce function and with user-defined ones."""
    found, group, forward = {}, "DGLGraph", dict(no_backward=("edgeless",))
    for name in MESSAGES:
        inputs = tuple(f"{target} 4" for target in _targets(name))
        graphs = dict(graphs=ALL if name in _CORE else ("int64", "int32", "bipartite", "edgeless"))
        found[f"update_all({name})"] = Case(
            group, _update_all(name, _METHODS["update_all"]), inputs, **forward, **graphs
        )
        plain = {"expect": FRAMEWORK, "reason": "returns its argument"} if name == "copy_e" else {}
        found[f"apply_edges({name})"] = Case(group, partial(_apply_edges, name, None), inputs, **plain, **graphs)
    for name in _CORE:
        inputs = tuple(f"{target} 4" for target in _targets(name))
        for method in ("pull", "push", "send_and_recv"):
            last = forward if method == "pull" else {}  # without edges the others do nothing
            found[f"{method}({name})"] = Case(group, _update_all(name, _METHODS[method]), inputs, **last)
        if name != "copy_e":
            found[f"apply_edges({name}, edges)"] = Case(group, partial(_apply_edges, name, 3), inputs)
    order = lambda g: [torch.arange(i, 40, 4, dtype=g.idtype) for i in range(4)]  # noqa: E731
    found["prop_nodes"] = Case(group, partial(_propagate, order, "prop_nodes"), ("u 4",), graphs=("int64", "int32"))
    found["prop_edges"] = Case(group, partial(_propagate, order, "prop_edges"), ("u 4",), graphs=("int64", "int32"))
    return found | _user_defined(group)


def _apply_edges(name, step, g, *values):
    with g.local_scope():
        _set(g, name, values)
        edges = "__ALL__" if step is None else torch.arange(0, g.num_edges(), step, dtype=g.idtype)
        g.apply_edges(_message(name), edges)
        return g.edata["m"]


def _propagate(order, method, g, x):
    with g.local_scope():
        g.ndata["x"] = x
        getattr(g, method)(order(g), fn.copy_u("x", "m"), fn.sum("m", "x"))
        return g.ndata["x"]


def _user_defined(group) -> dict[str, Case]:
    message = lambda edges: {"m": edges.src["x"] * edges.data["y"] + edges.dst["z"]}  # noqa: E731
    reduce = lambda nodes: {"o": nodes.mailbox["m"].sort(1)[0][:, 0] + nodes.data["z"]}  # noqa: E731

    mean = lambda nodes: {"o": nodes.mailbox["m"].mean(1) + nodes.data["z"]}  # noqa: E731

    def update(m, r, apply=None):
        def call(g, x, y, z):
            with g.local_scope():
                g.srcdata["x"], g.edata["y"], g.dstdata["z"] = x, y, z
                g.update_all(m, r, apply)
                return g.dstdata["o"]

        return call

    def edges(g, x, y, z):
        with g.local_scope():
            g.srcdata["x"], g.edata["y"], g.dstdata["z"] = x, y, z
            g.apply_edges(message)
            return g.edata["m"]

    def nodes(g, x, y, z):
        with g.local_scope():
            g.dstdata["z"] = z
            g.apply_nodes(lambda nodes: {"o": nodes.data["z"] * 2}, ntype=g.dsttypes[0])
            return g.dstdata["o"]

    inputs, built_in = ("u 4", "e 1", "v 4"), (fn.u_mul_e("x", "y", "m"), fn.sum("m", "o"))
    left = dict(inputs=inputs, expect=FRAMEWORK)
    whole = dict(expect=PARTLY, reason=WHOLE_MAILBOX)
    return {
        "update_all(user-defined message, sum)": Case(group, update(message, built_in[1]), inputs),
        "update_all(u_mul_e, user-defined mean)": Case(group, update(built_in[0], mean), inputs),
        "update_all(user-defined message and mean)": Case(group, update(message, mean), inputs),
        "update_all(u_mul_e, user-defined reduce)": Case(group, update(built_in[0], reduce), inputs, **whole),
        "update_all(user-defined message and reduce)": Case(group, update(message, reduce), inputs, **whole),
        "update_all(u_mul_e, sum, user-defined apply)": Case(
            group, update(*built_in, lambda nodes: {"o": nodes.data["o"] * 2 + nodes.data["z"]}), inputs
        ),
        "apply_edges(user-defined)": Case(group, edges, inputs),
        "apply_nodes(user-defined)": Case(group, nodes, reason="no message passing: a function of the nodes", **left),
    }


def _readout() -> dict[str, Case]:
    """Reductions over the graphs of a batch."""
    found = {}
    graphs = ("batched", "int64", "int32", "edgeless")
    for ends, spec in (("nodes", "u"), ("edges", "e")):
        for op in ("sum", "mean", "max", "softmax", "readout"):
            for weight in (False, True) if op in ("sum", "mean") else (False,):
                name = f"{op}_{ends}" + (" with weights" if weight else "")
                inputs = (f"{spec} 4", f"{spec} 1") if weight else (f"{spec} 4",)
                found[name] = Case("readout", partial(_reduce, f"{op}_{ends}", ends), inputs, graphs=graphs)
        reason = "no message passing: sorts, gathers and repeats of torch"
        left = dict(graphs=graphs, expect=FRAMEWORK, reason=reason)
        found[f"topk_{ends}"] = Case("readout", partial(_topk, f"topk_{ends}", ends), (f"{spec} 4",), **left)
        broadcast = getattr(dgl, f"broadcast_{ends}")
        found[f"broadcast_{ends}"] = Case("readout", broadcast, ("b 4",), **left)
    return found


def _reduce(name, ends, g, x, weight=None):
    with g.local_scope():
        data = g.ndata if ends == "nodes" else g.edata
        data["x"] = x
        if weight is None:
            return getattr(dgl, name)(g, "x")
        data["w"] = weight
        return getattr(dgl, name)(g, "x", "w")


def _topk(name, ends, g, x):
    with g.local_scope():
        (g.ndata if ends == "nodes" else g.edata)["x"] = x
        return getattr(dgl, name)(g, "x", 3, sortby=1)[0], getattr(dgl, name)(g, "x", 2)[0]


def function_cases() -> dict[str, Case]:
    return _ops() | _methods() | _readout()
