"""Calls of DGL's layers that few make, and that end as with DGL alone: results, errors by type and text, warnings, and
the numbers drawn."""

import warnings

import pytest
import torch
from dgl_compare import assert_same, attempt, compare, dgl, graph, rand

from gnnaccel import dgl_backend

import dgl.nn as dglnn  # isort: skip  (after the shim)

pytestmark = pytest.mark.usefixtures("dgl_restored")


def _bipartite(num_src=5, num_dst=4):
    return dgl.heterograph({("a", "to", "b"): ([0, 1, 4], [1, 1, 3])}, {"a": num_src, "b": num_dst})


def _types(*values):
    return torch.tensor(values)


def _without_edges():
    return dgl.graph(([], []), num_nodes=4)


def _cycle():
    return dgl.graph(([0, 1, 2], [1, 2, 0]))


def _relational(regularizer=None):
    return dglnn.RelGraphConv(4, 4, 3, regularizer, 2)


def _hgt():
    return dglnn.HGTConv(4, 2, 2, 2, 3)


# name -> (layer, its graph or None, features, further arguments)
CALLS = {
    "SAGEConv gcn of two features of the same nodes": (
        lambda: dglnn.SAGEConv((4, 4), 3, "gcn"),
        graph,
        [(rand(40, 4), rand(40, 4, seed=2))],
        (),
    ),
    "RelGraphConv without edges": (_relational, _without_edges, [rand(4, 4)], (_types()[:0].long(),)),
    "HGTConv without edges": (_hgt, _without_edges, [rand(4, 4)], (_types(0, 1, 0, 1), _types()[:0].long())),
    "HGTConv of two node types": (_hgt, _bipartite, [rand(5, 4)], (_types(0, 1, 0, 1, 1), _types(0, 1, 2))),
    "EdgeGATConv of edge features too narrow": (
        lambda: dglnn.EdgeGATConv(4, 3, 2, 1),
        _cycle,
        [rand(3, 4), rand(3, 2)],
        (),
    ),
}
for _last in (-1, 3, -4):
    _of_edges = _types(0, _last, 2)
    CALLS |= {
        f"RelGraphConv {kind} of relation {_last}": (
            lambda kind=kind: _relational(kind),
            _cycle,
            [rand(3, 4)],
            (_of_edges,),
        )
        for kind in (None, "basis", "bdd")
    }
    CALLS |= {
        f"TypedLinear of type {_last}": (lambda: dglnn.TypedLinear(4, 5, 3), None, [rand(3, 4)], (_of_edges,)),
        f"TypedLinear of type {_last}, said to be sorted": (
            lambda: dglnn.TypedLinear(4, 5, 3),
            None,
            [rand(3, 4)],
            (_of_edges.sort().values, True),
        ),
        f"HGTConv of relation {_last}": (_hgt, _cycle, [rand(3, 4)], (_types(0, 1, 1), _of_edges)),
        f"HGTConv of node type {_last}": (_hgt, _cycle, [rand(3, 4)], (_of_edges.clamp(max=3), _types(0, 1, 2))),
    }


def _outcome(make, build, features, more):
    torch.manual_seed(3)
    module = make().double()
    first = () if build is None else (build(),)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = attempt(lambda m, *given: m(*first, *given, *more), features, module)
    return found, [str(w.message) for w in seen], torch.get_rng_state()


@pytest.mark.parametrize("name", CALLS)
def test_layers_end_as_with_dgl_alone(name):
    want, *around = _outcome(*CALLS[name])
    dgl_backend.enable()
    got, *around_now = _outcome(*CALLS[name])
    assert_same(got, want, 1e-10)
    assert around_now[0] == around[0]
    assert torch.equal(around_now[1], around[1])


def test_gather_mm_counts_negative_types_from_the_end():
    x, weight, types = rand(3, 4), rand(3, 4, 2), _types(0, -1, 2)
    want = dgl.ops.gather_mm(x, weight, idx_b=types)
    dgl_backend.enable()
    torch.testing.assert_close(dgl.ops.gather_mm(x, weight, idx_b=types), want)


def test_hetero_layers_draw_in_the_order_of_the_edge_types():
    edges = {
        ("a", "1", "b"): ([0, 1, 2], [0, 1, 1]),
        ("b", "2", "a"): ([0, 1, 0], [0, 1, 2]),
        ("a", "3", "b"): ([2, 1], [0, 1]),
    }
    g = dgl.heterograph(edges, {"a": 3, "b": 2})
    torch.manual_seed(1)
    layers = {e: dglnn.SAGEConv(4, 3, "mean", feat_drop=0.5) for e in g.etypes}
    conv, inputs = dglnn.HeteroGraphConv(layers).double(), {"a": rand(3, 4), "b": rand(2, 4, seed=2)}

    def call():
        torch.manual_seed(5)
        return conv(g, inputs)

    want = call()
    dgl_backend.enable()
    for _ in range(2):
        got = call()
        for name, out in want.items():
            torch.testing.assert_close(got[name], out)


@pytest.mark.parametrize("layer", [
    lambda: dglnn.GATConv(6, 4, 2), lambda: dglnn.GATv2Conv(6, 4, 2), lambda: dglnn.EdgeGATConv(6, 3, 4, 2)
], ids=["GATConv", "GATv2Conv", "EdgeGATConv"])  # fmt: skip
def test_maps_in_double_beside_vectors_in_float(layer):  # what torch.set_default_dtype(torch.float64) makes
    g, module = graph(loops=True), layer()
    for child in module.children():
        child.double()
    more = [rand(g.num_edges(), 3)] if type(module) is dglnn.EdgeGATConv else []
    compare(lambda m, *given: m(g, *given), [rand(40, 6), *more], module)


def _misspelt():
    return {
        "GATConv": lambda: dglnn.GATConv(4, 3, 2)(_cycle(), rand(3, 4), attention=True),
        "GraphConv": lambda: dglnn.GraphConv(4, 3)(_cycle()),
        "SAGEConv": lambda: dglnn.SAGEConv(4, 3, "mean")(_cycle(), rand(3, 4), weights=None),
        "update_all": lambda: _cycle().update_all(),
        "gather_mm": lambda: dgl.ops.gather_mm(rand(3, 4), rand(2, 4, 3), idx_c=None),
        "HeteroGraphConv": lambda: dglnn.HeteroGraphConv({"_E": dglnn.GraphConv(4, 3)})(_cycle()),
    }


@pytest.mark.parametrize("name", _misspelt())
def test_errors_of_calls_name_dgls_functions(name):
    want = attempt(_misspelt()[name])
    assert want[0] == "TypeError"
    dgl_backend.enable()
    assert attempt(_misspelt()[name]) == want
