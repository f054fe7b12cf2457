"""Fuzz target: calls of DGL with the plug-in on against DGL alone: outputs, all gradients, errors.

Random graphs (one edge type, bipartite, blocks, several edge types; int32 and int64) through a few changes; between
them dgl.ops, the methods of DGLGraph with built-in functions, and the modules of dgl.nn. Values are continuous and
distinct, so that nothing ties but equal edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from dgl_cases import CASES
from dgl_compare import assert_same, both, dgl, make_input
from dgl_function_cases import MESSAGES
from reached import REFUSED

from fuzz.draw import Draw
from gnnaccel import dgl_backend

import dgl.function as fn  # isort: skip  (after the shim)

_REDUCES = ("sum", "mean", "max", "min")
_LAYERS = [n for n, c in CASES.items() if c.group in ("layers", "readout", "readout modules") and c.inputs and c.make]
# Errors of what DGL alone cannot do and the plug-in can: graphs of a format, and gradients of maxima over no edges.
_LIMITS = ("sparse format", "available formats", "index 0 is out of bounds for dimension 0 with size 0")
_NODES = {"user": 4, "game": 3, "store": 2}
_TYPES = (
    ("user", "follows", "user"),
    ("user", "plays", "game"),
    ("store", "sells", "game"),
    ("game", "in", "store"),
    ("game", "likes", "user"),
)


def _homogeneous(draw: Draw):
    nodes = draw.pick((1, 2, draw.randint(3, 10), draw.randint(10, 40)))
    edges = draw.edges(nodes, nodes, most=120)
    return lambda idtype: dgl.graph(edges, num_nodes=nodes, idtype=idtype)


def _bipartite(draw: Draw):
    sources, destinations = draw.randint(1, 20), draw.randint(1, 20)
    edges = draw.edges(sources, destinations, most=100)
    sizes = {"a": sources, "b": destinations}
    return lambda idtype: dgl.heterograph({("a", "to", "b"): edges}, sizes, idtype=idtype)


def _block(draw: Draw):
    whole = _homogeneous(draw)
    picked = draw.random()

    def build(idtype):
        g = whole(idtype)
        some = torch.arange(0, g.num_nodes(), 1 + int(3 * picked), dtype=idtype)
        return dgl.to_block(dgl.in_subgraph(g, some), some)

    return build


def _hetero(draw: Draw):
    sizes = {name: draw.randint(1, 9) for name in _NODES}
    edges = {e: draw.edges(sizes[e[0]], sizes[e[2]], most=40) for e in _TYPES}
    return lambda idtype: dgl.heterograph(edges, sizes, idtype=idtype)


# ---- Changes of a graph of one edge type; `k` is a random number. ----


def _some(count: int, k: int, g) -> torch.Tensor:
    return torch.arange(k % 3, count, 2 + k % 3, dtype=g.idtype)


def _add_edges(g, k):
    ends = [torch.arange(k % 4, dtype=g.idtype) * (k + 1) % max(1, n) for n in (g.num_src_nodes(), g.num_dst_nodes())]
    g.add_edges(*ends)
    return g


def _remove_edges(g, k):
    g.remove_edges(_some(g.num_edges(), k, g))
    return g


CHANGES: dict[str, Callable] = {
    "same": lambda g, k: g,
    "add_edges": _add_edges,
    "remove_edges": _remove_edges,
    "reverse": lambda g, k: dgl.reverse(g),
    "dtype": lambda g, k: g.long() if g.idtype == torch.int32 else g.int(),
    "clone": lambda g, k: g.clone(),
    "local_var": lambda g, k: g.local_var(),
    "edge_subgraph": lambda g, k: g.edge_subgraph(_some(g.num_edges(), k, g), relabel_nodes=False),
    "add_self_loop": lambda g, k: dgl.add_self_loop(g),
    "to_simple": lambda g, k: dgl.to_simple(g),
    "formats": lambda g, k: g.formats((["coo"], ["coo", "csr", "csc"])[k % 2]),
    "batch": lambda g, k: dgl.batch([g, g]) if g.num_edges() < 100 else g,
}


# ---- Calls: (what, function of (graph, seed) that gives outputs and leaves) ----


def _value(seed: int, rows: int, shape, dtype) -> torch.Tensor:
    """Of both signs, none near 0."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(rows, *shape, generator=generator, dtype=torch.float64) + 0.5
    sign = torch.where(torch.rand(rows, *shape, generator=generator) < 0.5, -1.0, 1.0)
    return (value * sign).to(dtype).requires_grad_()


def _rows(g, target: str) -> int:
    return {"u": g.num_src_nodes, "v": g.num_dst_nodes, "e": g.num_edges}[target]()


def _shapes(draw: Draw) -> list[tuple[int, ...]]:
    full = tuple(draw.pick((1, 2, 3, 5, 8, 16, 17)) for _ in range(draw.randint(0, 3)))
    shapes = [tuple(n if draw.chance(0.7) else 1 for n in full) for _ in range(2)]
    short = draw.randrange(2)
    shapes[short] = shapes[short][draw.choice((0, 0, draw.randint(0, len(full)))) :]
    return shapes


def _op(draw: Draw):
    """A function of dgl.ops."""
    shapes = _shapes(draw)
    kind = draw.randrange(4)
    if kind == 0:
        name, targets = f"u_{draw.pick(('add', 'sub', 'mul', 'div'))}_e_{draw.pick(_REDUCES)}", "ue"
    elif kind == 1:
        targets = draw.pick("ue")
        name = f"copy_{targets}_{draw.pick(_REDUCES)}"
    elif kind == 2:
        targets = "".join(draw.sample("uve", 2))
        op = draw.pick(("add", "sub", "mul", "div", "dot"))
        name = f"{targets[0]}_{op}_{targets[1]}"
        shapes = [(*shape, 5) for shape in shapes] if op == "dot" else shapes
    else:
        name, targets = "edge_softmax", "e"
    options = {"norm_by": draw.pick(("dst", "src"))} if name == "edge_softmax" else {}
    call = partial(getattr(dgl.ops, name), **options)
    return f"{name} {targets} {shapes} {options}", targets, shapes, lambda g, *values: call(g, *values)


def _message(name: str):
    return getattr(fn, name)("x", "m") if name.startswith("copy") else getattr(fn, name)("x", "y", "m")


def _method(draw: Draw):
    """A method of DGLGraph with built-in functions, in local_scope."""
    name, reduce = draw.pick(MESSAGES), draw.pick(_REDUCES)
    targets = name[-1] if name.startswith("copy") else name[0] + name[-1]
    shapes = _shapes(draw)
    if "dot" in name:
        shapes = [(*shape, 5) for shape in shapes]
    methods = ("update_all", "update_all", "apply_edges", "pull", "push", "send_and_recv")
    method, k = draw.pick(methods), draw.randrange(6)

    def call(g, *values):
        with g.local_scope():
            for target, field, value in zip(targets, "xy", values, strict=False):
                {"u": g.srcdata, "v": g.dstdata, "e": g.edata}[target][field] = value
            if method == "apply_edges":
                edges = "__ALL__" if k % 2 else _some(g.num_edges(), k, g)
                g.apply_edges(_message(name), edges)
                return g.edata["m"]
            functions = _message(name), getattr(fn, reduce)("m", "o")
            count = {"pull": g.num_dst_nodes, "push": g.num_src_nodes, "send_and_recv": g.num_edges}.get(method)
            some = () if count is None else (_some(count(), k, g),)
            getattr(g, method)(*some, *functions)
            return g.dstdata.get("o", torch.zeros(0))

    return f"{method}({name}, {reduce}) {targets} {shapes}", targets, shapes, call


def _steps(draw: Draw, build: Callable, changes: list[str]):
    """(description, program): calls of ops and methods between changes of a graph."""
    plan = []
    for _ in range(draw.randint(1, 4)):
        change, k = (draw.pick(changes), draw.randrange(50)) if plan else ("same", 0)
        plan.append((change, k, draw.pick((_op, _method))(draw), draw.getrandbits(30)))
    idtype = draw.pick((torch.int32, torch.int64))
    # In float32 two messages may be equal but for rounding, and another one win.
    extreme = any("max" in what or "min" in what for _, _, (what, *_), _ in plan)
    dtype = torch.float64 if extreme or draw.chance(0.6) else torch.float32
    # DGL alone has no backward of a maximum over no edges, and calls the result of one infinite.
    grad = draw.chance(0.85)

    def program():
        g, results = build(idtype), []
        for change, k, (_, targets, shapes, call), seed in plan:
            g = CHANGES[change](g, k)
            values = [_value(seed + i, _rows(g, t), s, dtype) for i, (t, s) in enumerate(zip(targets, shapes))]  # noqa: B905
            out = call(g, *values)
            results.append(out.detach())
            if grad and g.num_edges() and out.requires_grad:
                finite = torch.where(out.isfinite(), out, torch.zeros_like(out))
                finite.backward(_value(seed + 7, finite.shape[0], finite.shape[1:], dtype).detach())
                results += [torch.zeros_like(v) if v.grad is None else v.grad for v in values]
        return results

    text = ", ".join(f"{change}({k}): {what}" for change, k, (what, *_), _ in plan)
    return f"{idtype} {dtype} grad={grad} {text}", program, 1e-9 if dtype == torch.float64 else 2e-4


def _layer(draw: Draw):
    """A module of dgl.nn, twice on a random graph of a form that it takes."""
    name = draw.pick(_LAYERS)
    found = CASES[name]
    anything = "bipartite" in found.graphs
    build = draw.pick((_homogeneous, _homogeneous, _bipartite, _block) if anything else (_homogeneous,))(draw)
    idtype, seed, loops = draw.pick((torch.int32, torch.int64)), draw.getrandbits(20), draw.chance(0.7)
    k = draw.randrange(20)

    def program(module, grad=True):
        g, results = build(idtype), []
        if loops and g.is_homogeneous:
            g = dgl.add_self_loop(g)
        for change in ("same", "remove_edges" if k % 2 and not g.is_block else "same"):
            g = CHANGES[change](g, k)
            values = [make_input(g, spec, seed=seed + i, dtype=found.dtype) for i, spec in enumerate(found.inputs)]
            torch.manual_seed(seed)
            results.append(found.call(module, g, *values))
        return results

    torch.manual_seed(seed)
    module = found.make()
    module = module.to(found.dtype) if isinstance(module, torch.nn.Module) else module
    return f"{name} on {build.__qualname__} {idtype} loops={loops} k={k}", program, module, found.tolerance


def _multi(draw: Draw):
    """multi_update_all over several edge types, and update_all of each."""
    build, idtype = _hetero(draw), draw.pick((torch.int32, torch.int64))
    width, seed, cross = (
        draw.pick((1, 3, 4, 8)),
        draw.getrandbits(20),
        draw.pick(("sum", "min", "max", "mean", "stack")),
    )
    chosen = draw.sample(_TYPES, draw.randint(1, len(_TYPES)))
    plan = {e: (draw.pick(("copy_u", "copy_e", "u_mul_e", "u_sub_e", "u_add_v")), draw.pick(_REDUCES)) for e in chosen}

    def program():
        g = build(idtype)
        nodes = {n: _value(seed + i, g.num_nodes(n), (width,), torch.float64) for i, n in enumerate(g.ntypes)}
        edges = {e: _value(seed + 9 + i, g.num_edges(e), (width,), torch.float64) for i, e in enumerate(chosen)}
        with g.local_scope():
            for name, value in nodes.items():
                g.nodes[name].data["h"] = value
            functions = {}
            for e, (message, reduce) in plan.items():
                g.edges[e].data["w"] = edges[e]
                fields = {"copy_u": ("h",), "copy_e": ("w",), "u_add_v": ("h", "h")}.get(message, ("h", "w"))
                functions[e] = getattr(fn, message)(*fields, "m"), getattr(fn, reduce)("m", "o")
            g.multi_update_all(functions, cross)
            outs = [g.nodes[n].data["o"] for n in g.ntypes if "o" in g.nodes[n].data]
        leaves = [*nodes.values(), *edges.values()]
        parts = [(o * _value(seed, o.shape[0], o.shape[1:], torch.float64).detach()).sum() for o in outs]
        # DGL alone invents a gradient for the maximum of a node without edges, which is 0.
        invented = any(plan[e][1] in ("max", "min") and bool((g.in_degrees(etype=e) == 0).any()) for e in plan)
        if invented or not any(p.requires_grad for p in parts):
            return [o.detach() for o in outs]
        found = torch.autograd.grad(sum(parts), leaves, allow_unused=True)
        return [o.detach() for o in outs] + [
            torch.zeros_like(v) if g is None else g for g, v in zip(found, leaves, strict=True)
        ]

    return f"multi_update_all({plan}, {cross}) {idtype} width {width}", program, 1e-9


def case(seed: int) -> str | None:
    """Some calls on one graph, or a module; REFUSED where DGL alone fails."""
    draw = Draw(seed)
    torch.set_num_threads(1)
    kind, module, grad = draw.random(), None, True
    if kind < 0.55:
        builder = draw.pick((_homogeneous, _homogeneous, _bipartite, _block))
        changes = {
            _homogeneous: sorted(CHANGES),
            _bipartite: ["same", "add_edges", "remove_edges", "dtype", "clone", "local_var", "formats"],
            _block: ["same", "dtype", "local_var"],
        }[builder]
        what, program, tolerance = _steps(draw, builder(draw), changes)
        what = f"{builder.__name__} {what}"
    elif kind < 0.85:
        what, program, module, tolerance = _layer(draw)
    else:
        what, program, tolerance = _multi(draw)
    try:
        want, got, _ = both(program, (), module, grad)
        if isinstance(want, tuple) and any(limit in want[1] for limit in _LIMITS):
            return REFUSED
        assert_same(got, want, tolerance, what)
        return REFUSED if isinstance(want, tuple) else None
    finally:
        dgl_backend.disable()
