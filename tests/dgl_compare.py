"""The graphs, inputs and the one comparison of the DGL tests: a callable with the plug-in off and on, in one process.

Importable without pytest. DGL 2.1.0 needs the shim before its import.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from gnnaccel import dgl_backend, report

dgl_backend.shim()
# Importable without pytest; under it, tests are skipped where there is no DGL.
dgl = sys.modules["pytest"].importorskip("dgl") if "pytest" in sys.modules else importlib.import_module("dgl")

ACCELERATED, PARTLY, FRAMEWORK = "accelerated", "partly", "framework"


def graph(num_nodes=40, num_edges=300, idtype=torch.int64, seed=0, loops=False):
    """A random graph with duplicate edges; `loops` gives each node an in-edge, which many layers insist on."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.randint(0, num_nodes, (num_edges,), generator=generator) for _ in range(2))
    g = dgl.graph((u, v), num_nodes=num_nodes, idtype=idtype)
    return dgl.add_self_loop(g) if loops else g


def _bipartite():
    generator = torch.Generator().manual_seed(5)
    u, v = torch.randint(0, 20, (70,), generator=generator), torch.randint(0, 9, (70,), generator=generator)
    u, v = torch.cat([u, torch.arange(9)]), torch.cat([v, torch.arange(9)])
    return dgl.heterograph({("a", "to", "b"): (u, v)}, {"a": 20, "b": 9})


def _block():
    return dgl.to_block(dgl.in_subgraph(graph(loops=True), [3, 8, 11, 30]), torch.tensor([3, 8, 11, 30]))


def hetero_graph():
    """Three node types, three edge types, duplicates, a node of each kind of degree; "store" is no destination."""
    edges = {
        ("user", "follows", "user"): (torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])),
        ("user", "plays", "game"): (torch.tensor([0, 1, 2, 2]), torch.tensor([0, 0, 1, 0])),
        ("store", "sells", "game"): (torch.tensor([0, 1]), torch.tensor([1, 1])),
    }
    return dgl.heterograph(edges, {"user": 3, "game": 2, "store": 2})


def ring():
    """Each node type is a source and a destination; "user" and "game" each of two edge types."""
    edges = {
        ("user", "plays", "game"): ([0, 1, 2, 2, 3], [0, 0, 1, 0, 1]),
        ("store", "sells", "game"): ([0, 1, 1], [1, 1, 0]),
        ("game", "in", "store"): ([1, 0, 1], [0, 1, 1]),
        ("store", "hires", "user"): ([0, 1, 1], [0, 2, 2]),
        ("game", "likes", "user"): ([0, 1], [2, 1]),
    }
    return dgl.heterograph(edges, {"user": 4, "game": 3, "store": 2})


def _ring_without(*missing):
    edges = {e: ring().edges(etype=e) for e in ring().canonical_etypes}
    none = torch.zeros(0, dtype=torch.int64)
    edges |= {e: (none, none) for e in edges if e[1] in missing}
    return dgl.heterograph(edges, {"user": 4, "game": 3, "store": 2})


_BUILDERS: dict[str, Callable] = {
    "int64": lambda: graph(loops=True),
    "int32": lambda: graph(loops=True, idtype=torch.int32),
    "bipartite": _bipartite,
    "block": _block,
    "batched": lambda: dgl.batch([graph(10, 30, seed=s, loops=True) for s in range(4)]),
    "zero in-degree": lambda: graph(30, 20),
    "edgeless": lambda: dgl.graph(([], []), num_nodes=6),
    "hetero": hetero_graph,
    "ring": ring,
    "no first edges": lambda: _ring_without(ring().etypes[0]),
    "no middle edges": lambda: _ring_without("sells", "likes"),
    "fed by no edges": lambda: _ring_without("in"),
    "no edges at all": lambda: _ring_without(*ring().etypes),
}
# A "batched" graph has as many nodes as "int64", 40, so that layers sized by it fit.
HOMOGENEOUS = ("int64", "int32", "batched", "zero in-degree", "edgeless")
ALL = ("int64", "int32", "bipartite", "block", "batched", "zero in-degree", "edgeless")


@functools.cache
def build(name: str):
    """The graph `name`, the same object each time."""
    return _BUILDERS[name]()


def rand(*shape, seed=1, dtype=torch.float64):
    """Values of both signs with a magnitude between 0.5 and 1.5: they can be divided by; no two are equal."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(*shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    sign = torch.where(torch.rand(*shape, generator=generator, device="cpu") < 0.5, -1.0, 1.0)
    return (value * sign).to(dtype)


def distinct(*shape, dtype=torch.float64):
    """No two equal values, in bfloat16 either: of equal ones a max takes either, and DGL not the same on every CPU."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    return (order.to(torch.int16) + 0x3C00).view(torch.bfloat16).view(shape).to(dtype)  # 2^-7 and up, bit by bit


def make_input(g, spec: str, seed: int, dtype):
    """The input that `spec` names: "u 4 3" is [sources, 4, 3]; "v" by destination, "e" by edge, "b" by batched graph.

    "n 6" is what a layer takes as node features: [nodes, 6], or a pair where sources and destinations differ.
    "k 5 6" has no row dimension of the graph: it is [5, 6]. A node or edge type's name stands for its rows.
    """
    where, *shape = spec.split()
    shape = [int(n) for n in shape]
    if where == "n" and (g.is_block or g.srctypes != g.dsttypes):
        return rand(g.num_src_nodes(), *shape, seed=seed, dtype=dtype), rand(
            g.num_dst_nodes(), *shape, seed=seed + 100, dtype=dtype
        )
    if where == "k":
        return rand(*shape, seed=seed, dtype=dtype)
    rows = {"u": g.num_src_nodes, "n": g.num_src_nodes, "v": g.num_dst_nodes, "e": g.num_edges}
    if where in rows:
        count = rows[where]()
    elif where == "b":
        count = g.batch_size
    else:
        count = g.num_nodes(where) if where in g.ntypes else g.num_edges(where)
    return rand(count, *shape, seed=seed, dtype=dtype)


@dataclass(frozen=True)
class Case:
    """call(graph, *inputs), or with a module from `make`: call(module, graph, *inputs), by default its forward.

    `inputs` are specs of make_input; `graphs` names of build, the first being the one to show. `expect` is what the
    report must show for that one: ACCELERATED: something was, nothing was left; PARTLY: `reason` was left to DGL, the
    rest was not; FRAMEWORK: nothing was accelerated, because of `reason`. On the graphs in `no_backward` DGL alone
    fails in the backward pass, or invents a gradient: maxima and minima over no edges.
    """

    group: str
    call: Callable
    inputs: tuple[str, ...] = ()
    make: Callable | None = None
    graphs: tuple[str, ...] = ALL
    expect: str = ACCELERATED
    reason: str = ""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    no_backward: tuple[str, ...] = ()

    def bind(self, name: str, dtype=None) -> tuple[Callable, list, torch.nn.Module | None]:
        """(call, inputs, module) for the graph `name`: what both takes."""
        g, dtype = build(name), dtype or self.dtype
        values = [make_input(g, spec, seed=i + 1, dtype=dtype) for i, spec in enumerate(self.inputs)]
        if self.make is None:
            return partial(self.call, g), values, None
        torch.manual_seed(3)
        module = self.make()
        if isinstance(module, torch.nn.Module):
            module = module.to(dtype)
        return lambda module, *inputs: self.call(module, g, *inputs), values, module


def flatten(value) -> list:
    """The tensors in a nest of tuples, lists and dicts, in order; None is left out."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for key in sorted(value, key=str) for t in flatten(value[key])]
    if isinstance(value, list | tuple):
        return [t for v in value for t in flatten(v)]
    return []


def outcome(call, inputs=(), module=None, grad=True):
    """{"what": tensor} of call(module, *inputs) (call(*inputs) without a module): outputs and all gradients.

    Fresh leaves and a fresh copy of the module, so that nothing is carried over from one run to the next.
    """
    module = copy.deepcopy(module)
    leaf = lambda x: x.detach().clone().requires_grad_(grad and x.is_floating_point())  # noqa: E731
    fresh = [tuple(map(leaf, x)) if isinstance(x, tuple) else leaf(x) for x in inputs]
    torch.manual_seed(11)
    with torch.set_grad_enabled(grad):
        outs = flatten(call(*fresh) if module is None else call(module, *fresh))
    named = {f"input {i}": x for i, x in enumerate(flatten(fresh)) if x.requires_grad}
    if isinstance(module, torch.nn.Module):
        named |= {name: p for name, p in module.named_parameters() if p.requires_grad}
    result = {f"output {i}": o.detach().clone() for i, o in enumerate(outs)}
    # Rows without edges are infinite in DGL's raw max and min; they have no gradient worth comparing.
    parts = [torch.where(o.isfinite(), o, torch.zeros_like(o)) for o in outs if o.requires_grad]
    if parts:
        total = sum((o * rand(*o.shape, seed=7, dtype=o.dtype).to(o.device)).sum() for o in parts)
        total.backward()  # not torch.autograd.grad, which GroupRevRes refuses
        result |= {f"gradient of {n}": x.grad for n, x in named.items() if x.grad is not None}
    return result


def attempt(call, inputs=(), module=None, grad=True):
    """`outcome`, or the type and first line of the error that came instead."""
    try:
        return outcome(call, inputs, module, grad)
    except Exception as error:  # whatever DGL raises is what the plug-in is to raise
        return type(error).__name__, str(error).strip().partition("\n")[0]


def assert_same(got, want, tolerance, what=""):
    """The same outputs and gradients, or the same error."""
    if not isinstance(want, dict) or not isinstance(got, dict):
        assert got == want, f"{what}: {got} where DGL alone gives {want}"
        return
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} for {sorted(want)}"
    for name, value in want.items():
        assert got[name].dtype == value.dtype, f"{what}: {name} has dtype {got[name].dtype}"
        torch.testing.assert_close(
            got[name],
            value,
            rtol=tolerance,
            atol=tolerance * max(1.0, _largest(value)),
            equal_nan=True,
            msg=lambda text, name=name: f"{what}: {name}: {text}",
        )


def _largest(x) -> float:
    finite = x[x.isfinite()] if x.is_floating_point() else x
    return float(finite.abs().max()) if finite.numel() and not math.isnan(float(finite.abs().max())) else 0.0


def both(call, inputs=(), module=None, grad=True):
    """Outcomes with the plug-in off and on, and what was counted while it was on."""
    dgl_backend.disable()
    want = attempt(call, inputs, module, grad)
    dgl_backend.enable()
    report.reset()
    try:
        return want, attempt(call, inputs, module, grad), report.snapshot()
    finally:
        dgl_backend.disable()


def compare(call, inputs=(), module=None, tolerance=1e-10):
    """The same results off and on; on, at least one accelerated call. Returns what was counted."""
    want, got, counted = both(call, inputs, module)
    assert isinstance(want, dict), f"DGL alone fails: {want}"
    assert_same(got, want, tolerance)
    assert sum(site.accelerated for site in counted.values()) > 0, "nothing was accelerated"
    return counted


def status(counted) -> tuple[str, str]:
    """(ACCELERATED, PARTLY or FRAMEWORK, the reasons for what was left) of what the report counted."""
    reasons = "; ".join(sorted({reason for site in counted.values() for reason in site.reasons}))
    if not any(site.accelerated for site in counted.values()):
        return FRAMEWORK, reasons
    return (PARTLY if reasons else ACCELERATED), reasons
