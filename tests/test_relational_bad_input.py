"""Graphs of several edge types as they come: types without edges or nodes, relations out of range or absent, one that
holds nearly all edges, no bases. Each layer against the framework alone in float64 with gradients, or refused."""

import copy
import warnings

import pytest
import torch
from dgl_compare import dgl
from oracle import rand
from torch_geometric import nn as pyg_nn

import gnnaccel
from gnnaccel import dgl_backend

N, E, R, D, OUT = 20, 90, 5, 6, 4


@pytest.fixture(autouse=True)
def _off():
    torch.manual_seed(0)
    yield
    dgl_backend.disable()


def edges(count=E, sources=N, targets=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, n, (count,), generator=generator) for n in (sources, targets)])


TYPES = {
    "absent": torch.arange(E) % 2 * 3,  # of five relations two have edges
    "skewed": (torch.arange(E) == 40).long() * 4,  # one has 99% of them
    "one": torch.full((E,), 2),
    "none": torch.zeros(0, dtype=torch.int64),
}
PYG = {
    "RGCNConv": lambda: pyg_nn.RGCNConv(D, OUT, R),
    "RGCNConv bases": lambda: pyg_nn.RGCNConv(D, OUT, R, num_bases=2, aggr="add"),
    "RGCNConv blocks": lambda: pyg_nn.RGCNConv(D, OUT, R, num_blocks=2),
    "FastRGCNConv": lambda: pyg_nn.FastRGCNConv(D, OUT, R),
    "RGATConv": lambda: pyg_nn.RGATConv(D, OUT, R, heads=2),
    "RGATConv within": lambda: pyg_nn.RGATConv(D, OUT, R, attention_mechanism="within-relation"),
    "RGATConv blocks": lambda: pyg_nn.RGATConv(D, OUT, R, num_blocks=2, attention_mode="multiplicative-self-attention"),
    "HEATConv": lambda: pyg_nn.HEATConv(D, OUT, 3, R, 2, 3, 2, heads=2),
}


def arguments(name, types, index):
    if name != "HEATConv":
        return index, types
    return index, torch.arange(N) % 3, types, rand(len(types), 3)


def results(call, leaves):
    out = call()
    outs = list(out.values()) if isinstance(out, dict) else [out]
    outs = [o for o in outs if o is not None]
    loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outs)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return outs + [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]


def same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", PYG)
def test_pyg_layers_of_relations(name, types):
    types = TYPES[types]
    given, x = arguments(name, types, edges(len(types))), rand(N, D).requires_grad_()
    plain = PYG[name]().double()
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    want = results(lambda: plain(x, *given), [x, *plain.parameters()])
    for _ in range(2):
        same(results(lambda: layer(x, *given), [x, *layer.parameters()]), want)


@pytest.mark.parametrize("bad", [-1, R, 10**9])
@pytest.mark.parametrize("name", [
    "RGCNConv", "RGCNConv bases", "FastRGCNConv", "RGATConv", "RGATConv within", "HEATConv",
])  # fmt: skip
def test_pyg_relations_out_of_range(name, bad):
    types = TYPES["absent"].clone()
    types[7] = bad
    layer = gnnaccel.accelerate(PYG[name]().double())
    with pytest.raises(IndexError, match=f"got {bad} at (edge|row) 7"):
        layer(rand(N, D), *arguments(name, types, edges()))


@pytest.mark.parametrize("bad", [-1, R, 10**9])
def test_pyg_blocks_leave_relations_out_of_range_out(bad):
    """As PyG does, which looks for the edges of each relation."""
    types, x, plain = TYPES["absent"].clone(), rand(N, D).requires_grad_(), PYG["RGCNConv blocks"]().double()
    types[7] = bad
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    want = results(lambda: plain(x, edges(), types), [x, *plain.parameters()])
    same(results(lambda: layer(x, edges(), types), [x, *layer.parameters()]), want)


@pytest.mark.parametrize("make", [pyg_nn.RGCNConv, pyg_nn.FastRGCNConv, pyg_nn.RGATConv])
def test_pyg_no_bases(make):
    """What PyG fails with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, that nothing is to be initialised
        layer = gnnaccel.accelerate(make(D, OUT, R, num_bases=0))
    with pytest.raises(RuntimeError):
        layer(torch.randn(N, D), edges(), TYPES["absent"])


HETERO = {"a": N, "b": 7, "none": 0}
KINDS = [
    ("a", "r0", "a"), ("a", "r1", "b"), ("b", "r2", "a"), ("a", "r3", "a"), ("a", "r4", "b"),
    ("none", "r5", "a"), ("a", "r6", "none"), ("b", "r7", "b"),
]  # fmt: skip
COUNTS = {"r0": 300, "r1": 3, "r2": 0, "r3": 1, "r4": 5, "r5": 0, "r6": 0, "r7": 0}  # one has 97% of the edges


def hetero_edges():
    found = {}
    for seed, (source, name, target) in enumerate(KINDS):
        found[source, name, target] = edges(COUNTS[name], max(HETERO[source], 1), max(HETERO[target], 1), seed)
    return found


PYG_HETERO = {
    "SAGEConv": lambda: pyg_nn.HeteroConv({k: pyg_nn.SAGEConv((D, D), OUT) for k in KINDS}),
    "GraphConv": lambda: pyg_nn.HeteroConv({k: pyg_nn.GraphConv((D, D), OUT) for k in KINDS}, aggr="mean"),
    "GATConv": lambda: pyg_nn.HeteroConv({k: pyg_nn.GATConv((D, D), OUT, add_self_loops=False) for k in KINDS}),
    "GINConv": lambda: pyg_nn.HeteroConv({k: pyg_nn.GINConv(torch.nn.Linear(D, OUT)) for k in KINDS}),
    "HGTConv": lambda: pyg_nn.HGTConv(D, OUT, (list(HETERO), KINDS), heads=2),
    "HANConv": lambda: pyg_nn.HANConv(D, OUT, (list(HETERO), KINDS), heads=2),
}


@pytest.mark.parametrize("absent", [(), ("r1", "r3"), ("r0", "r2", "r3", "r5")])
@pytest.mark.parametrize("name", PYG_HETERO)
def test_pyg_types_without_edges_or_nodes(name, absent):
    index = {kind: e for kind, e in hetero_edges().items() if kind[1] not in absent}
    x = {node: rand(count, D).requires_grad_() for node, count in HETERO.items()}
    plain = PYG_HETERO[name]().double()
    layer = gnnaccel.accelerate(copy.deepcopy(plain))
    try:
        want = results(lambda: plain(x, index), [*x.values(), *plain.parameters()])
    except Exception as error:  # what PyG itself has no result of
        with pytest.raises(type(error)):
            layer(x, index)
        return
    for _ in range(3):
        same(results(lambda: layer(x, index), [*x.values(), *layer.parameters()]), want)


DGL = {
    "RelGraphConv": lambda: dgl.nn.RelGraphConv(D, OUT, R),
    "RelGraphConv basis": lambda: dgl.nn.RelGraphConv(D, OUT, R, "basis", 2),
    "RelGraphConv bdd": lambda: dgl.nn.RelGraphConv(D, OUT, R, "bdd", 2, self_loop=False),
    "HGTConv": lambda: dgl.nn.HGTConv(D, 3, 2, 3, R, dropout=0.0),
}


@pytest.mark.parametrize("types", ["absent", "skewed", "one"])
@pytest.mark.parametrize("name", DGL)
def test_dgl_layers_of_relations(name, types):
    g, types, x = dgl.graph(tuple(edges())), TYPES[types], rand(N, D).requires_grad_()
    layer = DGL[name]().double()
    kinds = (torch.arange(N) % 3,) if name == "HGTConv" else ()
    want = results(lambda: layer(g, x, *kinds, types), [x, *layer.parameters()])
    dgl_backend.enable()
    same(results(lambda: layer(g, x, *kinds, types), [x, *layer.parameters()]), want)


def test_dgl_no_bases():
    """DGL's relations have matrices of zeros then, or no blocks to be made of."""
    g, types, x = dgl.graph(tuple(edges())), TYPES["absent"], rand(N, D).requires_grad_()
    layer = dgl.nn.RelGraphConv(D, OUT, R, "basis", 0).double()
    want = results(lambda: layer(g, x, types), [x, *layer.parameters()])
    dgl_backend.enable()
    same(results(lambda: layer(g, x, types), [x, *layer.parameters()]), want)
    with pytest.raises(ZeroDivisionError):
        dgl.nn.RelGraphConv(D, OUT, R, "bdd", 0)


@pytest.mark.parametrize("across", ["sum", "mean", "max"])
@pytest.mark.parametrize("make", ["GraphConv", "SAGEConv", "GATConv", "GINConv"])
def test_dgl_types_without_edges_or_nodes(make, across):
    makes = {
        "GraphConv": lambda: dgl.nn.GraphConv(D, OUT, allow_zero_in_degree=True),
        "SAGEConv": lambda: dgl.nn.SAGEConv(D, OUT, "mean"),
        "GATConv": lambda: dgl.nn.GATConv(D, OUT, 1, allow_zero_in_degree=True),
        "GINConv": lambda: dgl.nn.GINConv(torch.nn.Linear(D, OUT)),
    }
    g = dgl.heterograph({k: tuple(e) for k, e in hetero_edges().items()}, HETERO)
    x = {node: rand(count, D).requires_grad_() for node, count in HETERO.items()}
    layer = dgl.nn.HeteroGraphConv({name: makes[make]() for _, name, _ in KINDS}, across).double()
    leaves = [*x.values(), *layer.parameters()]
    want = results(lambda: layer(g, x), leaves)
    dgl_backend.enable()
    for _ in range(3):
        same(results(lambda: layer(g, x), leaves), want)
