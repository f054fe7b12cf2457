"""What is kept on a graph: built once, shared, and never used after the graph has changed."""

import copy
import gc
import pickle
import pickletools
import warnings
import weakref

import pytest
import torch
from dgl_compare import dgl, graph, hetero_graph, rand, ring

from gnnaccel import dgl_backend, report

import dgl.function as fn  # isort: skip  (after the shim)
import dgl.nn as dglnn  # isort: skip

pytestmark = pytest.mark.usefixtures("dgl_restored")


def results(g, degrees=True):
    """Messages of every kind over a graph with one edge type; features follow from its size alone."""
    x, w = rand(g.num_src_nodes(), 3), rand(g.num_edges(), 1, seed=2)
    leaf = x.clone().requires_grad_()
    out = dgl.ops.u_mul_e_sum(g, leaf, w)
    backward = torch.autograd.grad(out.square().sum(), leaf)[0] if out.numel() else leaf
    softmax = dgl.ops.edge_softmax(g, w)
    both = (g.in_degrees(), g.out_degrees()) if degrees else ()
    return [out, backward, dgl.ops.copy_u_sum(g, x), dgl.ops.copy_e_max(g, w), softmax, *both]


def agrees(g):
    """The same results as DGL alone, with what is already kept and again with what is then kept."""
    dgl_backend.enable()
    got = [results(g), results(g)]
    dgl_backend.disable()
    want = results(g)
    for each in got:
        for a, b in zip(each, want, strict=True):
            torch.testing.assert_close(a.detach(), b.detach())
    dgl_backend.enable()


def _used():
    """A graph whose structure, reverse and degrees are all kept."""
    g = graph(loops=True)
    agrees(g)
    agrees(dgl.reverse(g))
    return g


def _in_place(name, *args):
    def derive(g):
        getattr(g, name)(*args)
        return g

    return derive


_ids = torch.tensor
DERIVED = {
    "node_subgraph": lambda g: dgl.node_subgraph(g, _ids([0, 3, 4, 17, 18, 30])),
    "node_subgraph by mask": lambda g: g.subgraph(torch.arange(40) % 2 == 0),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, torch.arange(0, 300, 7)),
    "edge_subgraph, all nodes": lambda g: dgl.edge_subgraph(g, torch.arange(0, 300, 7), relabel_nodes=False),
    "in_subgraph": lambda g: dgl.in_subgraph(g, _ids([1, 2, 5])),
    "out_subgraph": lambda g: dgl.out_subgraph(g, _ids([1, 2, 5]), relabel_nodes=True),
    "khop_in_subgraph": lambda g: dgl.khop_in_subgraph(g, 4, 1)[0],
    "khop_out_subgraph": lambda g: dgl.khop_out_subgraph(g, _ids([1, 2]), 1)[0],
    "add_edges": lambda g: dgl.add_edges(g, _ids([1, 2]), _ids([3, 4])),
    "add_edges in place": _in_place("add_edges", _ids([1, 2]), _ids([3, 4])),
    "remove_edges": lambda g: dgl.remove_edges(g, _ids([0, 5, 9])),
    "remove_edges in place": _in_place("remove_edges", _ids([0, 5, 9])),
    "add_nodes in place": _in_place("add_nodes", 3),
    "remove_nodes": lambda g: dgl.remove_nodes(g, _ids([0, 7])),
    "remove_nodes in place": _in_place("remove_nodes", _ids([0, 7])),
    "add_self_loop": dgl.add_self_loop,
    "remove_self_loop": dgl.remove_self_loop,
    "reverse": dgl.reverse,
    "reverse twice": lambda g: dgl.reverse(dgl.reverse(g)),
    "add_reverse_edges": dgl.add_reverse_edges,
    "to_simple": lambda g: dgl.to_simple(g),
    "to_bidirected": dgl.to_bidirected,
    "line_graph": lambda g: dgl.line_graph(dgl.in_subgraph(g, _ids([1, 2, 5]))),
    "reorder_graph": lambda g: dgl.reorder_graph(g, "rcmk"),
    "sort_csc_by_tag": lambda g: dgl.sort_csc_by_tag(g, torch.arange(40) % 3),
    "formats csc": lambda g: g.formats("csc"),
    "formats csr": lambda g: g.formats(["csr", "coo"]),
    "create_formats_": lambda g: g.create_formats_() or g,
    "int": lambda g: g.int(),
    "long": lambda g: g.int().long(),
    "clone": lambda g: g.clone(),
    "local_var": lambda g: g.local_var(),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "batch": lambda g: dgl.batch([g, g, dgl.reverse(g)]),
    "unbatch": lambda g: dgl.unbatch(dgl.batch([graph(5, 9), g]))[1],
    "slice_batch": lambda g: dgl.slice_batch(dgl.batch([graph(5, 9), g]), 1),
    "to_block": lambda g: dgl.to_block(dgl.in_subgraph(g, _ids([1, 2, 5])), _ids([1, 2, 5])),
    "compact_graphs": lambda g: dgl.compact_graphs(dgl.in_subgraph(g, _ids([1, 2, 5]))),
    "merge": lambda g: dgl.merge([g, dgl.reverse(g)]),
    "to": lambda g: g.to("cpu"),
    "shared_memory": lambda g: g.shared_memory("gnnaccel_test"),
    "sampled": lambda g: dgl.sampling.sample_neighbors(g, torch.arange(10), 3),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_graph_gets_its_own_structure(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g = _used()
        derived = DERIVED[name](g)
        if name.startswith("formats"):  # DGL alone needs other formats for its backward
            got, want = results(derived, degrees=False), results(g.clone(), degrees=False)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a.detach(), b.detach())
        else:
            agrees(derived)
        agrees(g)
        assert any(site.accelerated for site in report.snapshot().values())


def test_saved_graphs(tmp_path):
    g = _used()
    dgl.save_graphs(str(tmp_path / "g.bin"), [g])
    (loaded,), _ = dgl.load_graphs(str(tmp_path / "g.bin"))
    agrees(loaded)
    assert torch.equal(loaded.edges()[0], g.edges()[0])


def test_what_is_kept_does_not_travel():
    g = _used()
    again = pickle.loads(pickle.dumps(g))
    assert not [k for k in again._graph._cache if "gnnaccel" in str(k)]
    steps = _pickled(g)
    dgl_backend.disable()
    assert steps == _pickled(graph(loops=True))


def _pickled(g):
    """The steps of a pickle, without the bytes of its tensors: torch writes addresses among them, of any length."""
    steps = pickletools.genops(pickle.dumps(g))
    return [(step.name, None if isinstance(value, bytes) else value) for step, value, _ in steps]


def test_hetero_graphs():
    g = ring()
    nodes = [rand(g.num_nodes(n), 3, seed=i) for i, n in enumerate(g.ntypes)]

    def check(g, nodes=nodes):
        outs = []
        for switch in (dgl_backend.enable, dgl_backend.disable):
            switch()
            at_once = [t for t in dgl.ops.copy_u_sum(g, nodes) if t.numel()]
            scores = {e: rand(g.num_edges(e), 2) for e in g.canonical_etypes}
            softmax = [t for _, t in sorted(dgl.ops.edge_softmax(g, scores).items())]
            one = dgl.ops.copy_u_mean(g["plays"], nodes[g.get_ntype_id("user")])
            outs.append([*at_once, *softmax, one, g.in_degrees(etype="plays")])
        torch.testing.assert_close(*outs)

    check(g)
    g.add_edges(torch.tensor([3]), torch.tensor([2]), etype="plays")
    check(g)
    check(dgl.remove_edges(g, torch.tensor([0]), etype="plays"))
    check(dgl.edge_type_subgraph(g, g.canonical_etypes))
    check(pickle.loads(pickle.dumps(g)))
    homogeneous = dgl.to_homogeneous(g)
    agrees(homogeneous)
    back = dgl.to_heterogeneous(homogeneous, g.ntypes, g.etypes)
    agrees(back["plays"])
    block = dgl.to_block(g, {n: torch.arange(g.num_nodes(n)) for n in g.ntypes})
    agrees(block["plays"])


def test_local_scope_shares_the_structure():
    dgl_backend.enable()
    g = graph(loops=True)
    kept = dgl_backend.to_graph(g)
    with g.local_scope():
        g.ndata["h"] = rand(40, 2)
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
        assert dgl_backend.to_graph(g) is kept
    assert "o" not in g.ndata and dgl_backend.to_graph(g.local_var()) is kept


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
    g.ndata["h"] = rand(40, 2)
    g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
    assert dgl_backend.structure.structure(g._graph.get_relation_graph(0)) is prepared


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


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "formats", ["coo", "csr", "csc", ["coo", "csr"], ["coo", "csc"], ["csr", "csc"], ["coo", "csr", "csc"]], ids=str
)
def test_degrees_are_refused_where_dgl_refuses_them(formats, prepared):
    """Those into nodes of a graph that may have its edges by source alone, and the other way round."""

    def of(g, name):
        try:
            return getattr(g, name)().tolist()
        except dgl.DGLError:
            return "refused"

    g = graph()
    expected = [of(g.formats(formats), name) for name in ("in_degrees", "out_degrees")]
    assert ("refused" in expected) == (formats in ("csr", "csc"))
    dgl_backend.enable()
    g = g.formats(formats)
    if prepared:
        dgl_backend.to_graph(g)
    for _ in range(2):
        assert [of(g, name) for name in ("in_degrees", "out_degrees")] == expected


def test_structures_die_with_their_graph():
    dgl_backend.enable()
    g = graph(loops=True)
    results(g)
    results(dgl.reverse(g))
    kept = [weakref.ref(dgl_backend.to_graph(g)), weakref.ref(dgl_backend.to_graph(dgl.reverse(g)))]
    del g
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_mini_batches_leave_nothing_behind():
    from gnnaccel.graph.csr import Graph

    def alive():
        gc.collect()
        return sum(type(o) is Graph for o in gc.get_objects())

    dgl_backend.enable()
    g, layer = graph(200, 2000, loops=True), dglnn.GATConv(4, 3, 2).double()
    x, counts = rand(200, 4), []
    for i in range(300):
        nodes = torch.arange(i % 7, 200, 11)
        block = dgl.to_block(dgl.sampling.sample_neighbors(g, nodes, 3), nodes)
        layer(block, x[block.srcdata[dgl.NID]]).sum().backward()
        if i % 100 == 99:
            counts.append(alive())
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("form", ["csr", "csc"])
@pytest.mark.parametrize(
    ("indptr", "indices", "ids"),
    [
        ([0, 1, 2, 3], [1, -1, 0], []),
        ([0, 1, 2, 3], [1, 2, 0], [0, 1, 2**32 + 2]),
        ([0, 5, 2, 3], [1, 2, 0], []),
    ],
    ids=["negative", "edge id", "offsets"],
)
def test_arrays_that_point_out_of_themselves(form, indptr, indices, ids):
    """DGL takes them, and reads or writes where they point."""
    import gnnaccel

    arrays = (torch.tensor(values, dtype=torch.int64) for values in (indptr, indices, ids))
    g = dgl.graph((form, tuple(arrays)), num_nodes=3)
    with pytest.raises(ValueError, match=r"graph:|Graph:"):
        gnnaccel.as_graph(g)


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", ["graph", "batch", "block"])
def test_new_graphs_are_not_sorted_by_dgl(kind, idtype):
    """Message passing and degrees leave DGL's formats as they are made, and give what DGL gives."""
    dgl_backend.enable()
    g = graph(idtype=idtype)
    if kind == "batch":
        g = dgl.batch([g, graph(5, 9, idtype=idtype), graph(3, 0, idtype=idtype)])
    if kind == "block":
        g = dgl.to_block(g, torch.unique(g.edges()[1]))
    before = g.formats()["created"]
    got = results(g)
    assert g.formats()["created"] == before == ["coo"]
    assert all(degree.dtype == idtype for degree in got[-2:])
    dgl_backend.disable()
    for a, b in zip(got, results(g), strict=True):
        torch.testing.assert_close(a.detach(), b.detach())
