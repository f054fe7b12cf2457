"""An index whose structure is our Graph answers as DGL's own of the same block; on a GPU, or as if the CPU were one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from dgl_compare import dgl
from dgl_structure_cases import tensors_of

from gnnaccel import dgl_backend
from gnnaccel.dgl_backend import bridge, samplers
from gnnaccel.dgl_backend.block_index import BlockIndex, block_index, square_index
from gnnaccel.graph.csr import Graph

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SOURCES, DESTINATIONS, EDGES = 12, 5, 30


@pytest.fixture(autouse=True)
def bridged(monkeypatch):
    dgl_backend.disable()
    monkeypatch.setattr(bridge, "needed", lambda: True)
    dgl_backend.enable()
    yield
    dgl_backend.disable()


def pair(idtype=torch.int64, edges=EDGES):
    """Our block and DGL's, with the same features."""
    torch.manual_seed(0)
    targets = torch.randint(DESTINATIONS - 1, (edges,)).sort().values  # the last one has no edges
    sources = torch.randint(SOURCES, (edges,))
    arrays = Graph.from_coo(targets, sources, num_rows=DESTINATIONS, num_cols=SOURCES).to(DEVICE)
    index = block_index(Graph(arrays.indptr, arrays.indices, None, SOURCES), idtype)
    ours = type(dgl.create_block(([], [])))(index, (["_N"], ["_N"]), ["_E"])
    sizes = {"num_src_nodes": SOURCES, "num_dst_nodes": DESTINATIONS}
    theirs = dgl.create_block((sources, targets), **sizes, idtype=idtype).to(DEVICE)
    for block in (ours, theirs):
        generator = torch.Generator().manual_seed(1)
        block.srcdata["x"] = torch.rand(SOURCES, 3, generator=generator).to(DEVICE)
        block.edata["w"] = torch.rand(edges, 1, generator=generator).to(DEVICE)
    return ours, theirs


def at(*nodes):
    return lambda g: torch.tensor(nodes, dtype=g.idtype, device=g.device)


def in_order(src, dst, ids):
    """Edges in the order of their ids."""
    order = ids.argsort()
    return src[order], dst[order], ids[order]


# What the index answers itself.
OWN = {
    "sizes": lambda g: torch.tensor([g.num_src_nodes(), g.num_dst_nodes(), g.num_edges(), g.number_of_src_nodes("_N")]),
    "types": lambda g: torch.tensor([len(g.ntypes), len(g.etypes), *g._graph.metagraph.find_edge(0)]),
    "no such attribute": lambda g: torch.tensor(hasattr(g._graph, "__deepcopy__")),
    "kind": lambda g: torch.tensor([g.is_block, g.idtype == torch.int32, g.device == DEVICE, g.is_pinned()]),
    "edges": lambda g: in_order(*g.edges(form="all")),
    "edges by id": lambda g: g.edges(form="all", order="eid"),
    "all degrees": lambda g: (g.in_degrees(), g.out_degrees()),
    "update_all": lambda g: summed(g),
    "apply_edges": lambda g: dotted(g),
    "local_scope": lambda g: scoped(g),
    "to its device": lambda g: g.to(DEVICE),
    "a layer": lambda g: dgl.nn.SAGEConv(3, 2, "mean").to(DEVICE)(g, (g.srcdata["x"], g.srcdata["x"][:DESTINATIONS])),
    "degrees of the norm": lambda g: dgl.nn.GraphConv(3, 2, allow_zero_in_degree=True).to(DEVICE)(g, g.srcdata["x"]),
}

# What DGL's C++ answers.
MADE = {
    "some degrees": lambda g: (g.in_degrees(at(3, 0)(g)), g.out_degrees(at(5, 0, 5)(g))),
    "edges by ends": lambda g: g.edges(form="all", order="srcdst")[:2],
    "find_edges": lambda g: g.find_edges(at(3, 5)(g)),
    "in_edges": lambda g: in_order(*g.in_edges(at(0, 1)(g), form="all")),
    "has_edges_between": lambda g: g.has_edges_between(at(0, 1)(g), at(2, 3)(g)),
    "csc": lambda g: g.adj_tensors("csc")[:2],
    "reverse": lambda g: dgl.reverse(dgl.block_to_graph(g)),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "deepcopy": lambda g: copy.deepcopy(g),
    "to the CPU": lambda g: g.to("cpu"),
    "batch": lambda g: dgl.batch([dgl.block_to_graph(g)] * 2),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, at(1, 4)(g), relabel_nodes=False),
    "forgotten": lambda g: dgl_backend.forget(g) or summed(g),
    "dir": lambda g: torch.tensor(len(dir(g._graph)) > 9),
    "is_multigraph": lambda g: torch.tensor(g.is_multigraph),
}


def summed(g):
    g.update_all(dgl.function.u_mul_e("x", "w", "m"), dgl.function.sum("m", "h"))
    return g.dstdata["h"]


def dotted(g):
    g.dstdata["y"] = torch.ones(DESTINATIONS, 3, device=DEVICE)
    g.apply_edges(dgl.function.u_add_v("x", "y", "z"))
    return g.edata["z"]


def scoped(g):
    with g.local_scope():
        g.srcdata["x"] = g.srcdata["x"] * 2
        return summed(g)


def check(name, function, idtype):
    ours, theirs = pair(idtype)
    torch.manual_seed(0)
    got = tensors_of(function(ours))
    torch.manual_seed(0)
    want = tensors_of(function(theirs))
    assert want and len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.device == other.device and one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    assert type(ours._graph) is BlockIndex
    return ours._graph._made


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", OWN)
def test_it_answers(name, idtype):
    assert not check(name, OWN[name], idtype)


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", MADE)
def test_dgl_answers(name, idtype):
    assert check(name, MADE[name], idtype) or (name == "to the CPU" and DEVICE.type == "cpu")


def square(idtype):
    """Our graph of one type of nodes, and DGL's."""
    torch.manual_seed(0)
    targets, sources = torch.randint(SOURCES, (EDGES,)).sort().values, torch.randint(SOURCES, (EDGES,))
    arrays = Graph.from_coo(targets, sources, num_rows=SOURCES, num_cols=SOURCES).to(DEVICE)
    ours = dgl.DGLGraph(square_index(Graph(arrays.indptr, arrays.indices, None, SOURCES), idtype))
    theirs = dgl.graph((sources, targets), num_nodes=SOURCES, idtype=idtype).to(DEVICE)
    for g in (ours, theirs):
        g.ndata["x"], g.edata["w"] = (
            torch.eye(SOURCES, device=DEVICE),
            torch.arange(EDGES, device=DEVICE)[:, None].float(),
        )
    return ours, theirs


OF_GRAPHS = {
    "sizes": lambda g: torch.tensor([g.num_nodes(), g.num_edges(), len(g.ntypes), g.is_block, g.is_homogeneous]),
    "update_all": lambda g: summed(g),
    "a layer": lambda g: dgl.nn.GraphConv(SOURCES, 2, allow_zero_in_degree=True).to(DEVICE)(g, g.ndata["x"]),
    **{name: OWN[name] for name in ("edges", "edges by id", "all degrees", "to its device", "no such attribute")},
    **{name: MADE[name] for name in ("some degrees", "find_edges", "csc", "pickle", "deepcopy", "edge_subgraph")},
    "add_self_loop": lambda g: g.add_self_loop(),
    "to a block": lambda g: in_order(*dgl.to_block(g).edges(form="all")),
    "batch": lambda g: dgl.batch([g, g]),
}


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", OF_GRAPHS)
def test_graphs_of_one_type_of_nodes(name, idtype):
    found = []
    for g in square(idtype):
        torch.manual_seed(0)
        found.append(tensors_of(OF_GRAPHS[name](g)))
    assert found[0] and len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert one.device == other.device and one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_another_kind_of_ids():
    ours, _ = pair(torch.int64)
    narrow = ours.int()
    assert narrow.idtype == torch.int32 and not ours._graph._made and not narrow._graph._made
    assert torch.equal(narrow.edges()[0], ours.edges()[0].int())


def test_a_block_without_edges():
    ours, theirs = pair(edges=0)
    assert ours.num_edges() == 0 and not summed(ours).any()
    assert torch.equal(ours.in_degrees(), theirs.in_degrees()) and ours.to("cpu").num_dst_nodes() == DESTINATIONS


@pytest.mark.parametrize("wrong", [lambda g: g._graph.num_nodes(2), lambda g: g._graph.num_edges(1)])
def test_what_is_not_there_is_dgls_error(wrong):
    for block in pair():
        with pytest.raises(dgl.DGLError):
            wrong(block)


def test_a_samplers_blocks():
    """What the GPU samples, as blocks of such indices: DGL's NeighborSampler on the CPU gives the same."""
    generator = torch.Generator().manual_seed(2)
    ends = torch.randint(40, (2, 300), generator=generator)
    g = dgl.graph((ends[0], ends[1]), num_nodes=40)
    g.ndata["x"], g.edata["w"] = torch.arange(40), torch.arange(300)
    g = g.to(DEVICE)
    seeds = torch.tensor([7, 3, 9], device=DEVICE)
    nodes = seeds
    for layer, fanout in zip(
        samplers.layers_of(
            samplers.drawable_of(dgl_backend.to_graph(g), DEVICE, None), seeds, [4, 2, -1], False, DEVICE
        ),
        (4, 2, -1),
        strict=True,
    ):
        block = samplers._gpu_block(g, layer)
        assert block.device == DEVICE and block.idtype == g.idtype and block.canonical_etypes == g.canonical_etypes
        source, target, ids = *block.edges(), block.edata[dgl.EID]
        wanted = g.find_edges(ids)
        assert torch.equal(block.srcdata[dgl.NID][source], wanted[0])
        assert torch.equal(block.dstdata[dgl.NID][target], wanted[1])
        assert torch.equal(block.dstdata[dgl.NID], nodes) and torch.equal(block.edata["w"], ids)
        assert torch.equal(block.srcdata["x"], block.srcdata[dgl.NID])
        degree = g.in_degrees()[nodes]
        assert torch.equal(block.in_degrees(), degree if fanout < 0 else degree.clamp(max=fanout))
        assert type(block._graph) is BlockIndex and not block._graph._made
        nodes = block.srcdata[dgl.NID]


def test_blocks_outlive_the_plugin():
    ours, theirs = pair()
    wanted = theirs.find_edges(at(3, 5)(theirs))
    dgl_backend.disable()
    assert ours._graph._made
    for got, want in zip(ours.find_edges(torch.tensor([3, 5])), wanted, strict=True):
        assert torch.equal(got.cpu(), want.cpu())


@pytest.mark.parametrize("exclude", ["self", "reverse_id"])
def test_edge_prediction(exclude):
    """Sampled by DGL, whose filter of edges is CUDA's alone."""
    generator = torch.Generator().manual_seed(2)
    ends = torch.randint(40, (2, 150), generator=generator)
    g = dgl.graph((torch.cat([ends[0], ends[1]]), torch.cat([ends[1], ends[0]])), num_nodes=40).to(DEVICE)
    options = {"reverse_eids": torch.arange(300, device=DEVICE).roll(150)} if exclude == "reverse_id" else {}
    negative = dgl.dataloading.negative_sampler.Uniform(2)
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.NeighborSampler([-1]), exclude=exclude, negative_sampler=negative, **options
    )
    seeds = at(3, 160, 9)(g)
    _, pairs, negatives, blocks = sampler.sample(g, seeds)
    assert pairs.num_edges() == 3 and negatives.num_edges() == 6
    left = [*seeds.tolist(), *((seeds + 150) % 300).tolist()] if exclude == "reverse_id" else seeds.tolist()
    assert blocks[0].num_edges() and not set(left) & set(blocks[0].edata[dgl.EID].tolist())


def test_filters_are_sets():
    ids, test = torch.tensor([3, 2, 9]), torch.tensor([0, 2, 8, 9])
    made = dgl.utils.Filter(ids)
    assert made.find_included_indices(test).tolist() == [1, 3]
    assert made.find_excluded_indices(test).tolist() == [0, 2]


@pytest.mark.parametrize("seed", [2**32 + 3, 3 - 2**32])
def test_seeds_beyond_the_structures_numbers(seed):
    """A structure on a GPU has int32 indices, whatever the graph's own are."""
    arrays = torch.tensor([0, 1, 2, 3, 4]).int(), torch.tensor([1, 2, 3, 0]).int()
    graph = Graph.from_csr(*arrays, num_cols=4).to(DEVICE)
    with pytest.raises(ValueError, match="seeds"):
        samplers.layers_of(
            samplers.drawable_of(graph, DEVICE, None), torch.tensor([seed], device=DEVICE), [2], False, DEVICE
        )
