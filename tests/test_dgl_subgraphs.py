"""DGL's subgraphs between given nodes, ShaDow and SAINT on a GPU, against a plain reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gnnaccel import _library, dgl_backend, report

dgl_backend.shim()
dgl = pytest.importorskip("dgl")

from gnnaccel.dgl_backend import subgraphs  # noqa: E402
from gnnaccel.dgl_backend.block_index import BlockIndex  # noqa: E402

NODES, EDGES = 60, 900
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() or not _library.has_cuda_kernels(), reason="no CUDA GPU or no CUDA half here"
)


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.delenv("GNNACCEL_SAMPLER", raising=False)
    report.reset()
    dgl_backend.enable()
    yield
    dgl_backend.disable()


def graph(idtype=torch.int64, formats=("coo", "csr", "csc")):
    ends = torch.randint(NODES, (2, EDGES), dtype=idtype)
    g = dgl.heterograph({("a", "to", "a"): (ends[0], ends[1])}, num_nodes_dict={"a": NODES}, idtype=idtype)
    g.ndata["x"], g.edata["w"] = torch.arange(NODES), torch.arange(EDGES)
    return g.formats(list(formats))


def check(g, nodes, found):
    """All edges of `g` between the nodes, and features: by their numbers, as DGL's order depends on formats."""
    g, nodes, found = g.to("cpu").formats(["coo", "csr", "csc"]), nodes.cpu(), found.to("cpu")
    assert found.idtype == g.idtype and found.canonical_etypes == g.canonical_etypes
    assert torch.equal(found.ndata[dgl.NID], nodes) and torch.equal(found.ndata["x"], nodes.long())
    ids = found.edata[dgl.EID].long()
    assert torch.equal(found.edata["w"], ids) and found.edata[dgl.EID].dtype == g.idtype
    source, target = g.edges(order="eid")
    wanted = (torch.isin(source, nodes) & torch.isin(target, nodes)).nonzero().view(-1)
    assert torch.equal(ids.sort().values, wanted)
    ends = [nodes[end.long()] for end in found.edges(order="eid")]
    assert torch.equal(ends[0], source[ids]) and torch.equal(ends[1], target[ids])


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("formats", [("coo",), ("csr",), ("csc",)])
def test_what_is_handed_back(idtype, formats):
    g, nodes = graph(idtype, formats), torch.randperm(NODES)[:25].to(idtype)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for some in (nodes, nodes[:1], nodes[:0]):
        check(g, some, subgraphs._induced(g, some, device))


@needs_cuda
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("given", ["ids", "a mask", "a list", "a dictionary"])
def test_node_subgraphs(idtype, given):
    g, nodes = graph(idtype).to("cuda"), torch.randperm(NODES)[:25].sort().values.to(idtype)
    asked = {
        "ids": nodes.cuda(),
        "a mask": torch.zeros(NODES, dtype=torch.bool, device="cuda").index_fill_(0, nodes.cuda().long(), True),
        "a list": nodes.tolist(),
        "a dictionary": {"a": nodes.cuda()},
    }[given]
    for call in (g.subgraph, lambda nodes: dgl.node_subgraph(g, nodes)):
        found = call(asked)
        assert found.device.type == "cuda" and type(found._graph) is BlockIndex and not found._graph._made
        check(g, nodes, found)
    assert dgl.NID not in g.subgraph(asked, store_ids=False).ndata
    assert g.subgraph(asked, output_device="cpu").device.type == "cpu"
    assert report.snapshot()["dgl.node_subgraph"].accelerated == 4


@needs_cuda
def test_what_is_left_to_dgl(monkeypatch):
    g, nodes = graph().to("cuda"), torch.tensor([3, 1, 3], device="cuda")
    assert g.subgraph(nodes).num_nodes() == 3
    assert g.subgraph(nodes[:2], relabel_nodes=False).num_nodes() == NODES
    monkeypatch.setenv("GNNACCEL_SAMPLER", "framework")
    check(g, nodes[:2], g.subgraph(nodes[:2]))
    reasons = {"a node that is there twice", "relabel_nodes=False", "GNNACCEL_SAMPLER=framework"}
    assert reasons == set(report.snapshot()["dgl.node_subgraph"].reasons)
    monkeypatch.delenv("GNNACCEL_SAMPLER")
    with pytest.raises((ValueError, dgl.DGLError)):
        g.subgraph(torch.tensor([NODES], device="cuda"))


PLACES = {"on the GPU": lambda g: g.to("cuda"), "pinned": lambda g: g.pin_memory_() or g, "asked for": lambda g: g}


@needs_cuda
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("place", PLACES)
def test_shadow(place, idtype, monkeypatch):
    g, seeds = PLACES[place](graph(idtype)), torch.tensor([7, 3, 9], dtype=idtype)
    if place == "asked for":
        monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    else:
        seeds = seeds.cuda()
    nodes, out, found = dgl.dataloading.ShaDowKHopSampler([4, 3], prefetch_node_feats=["x"]).sample(g, seeds)
    assert torch.equal(nodes[:3], seeds) and torch.equal(out, seeds) and nodes.device == found.device == seeds.device
    assert nodes.unique().numel() == nodes.numel() <= 3 * 5 * 4
    assert isinstance(found.ndata["x"], dgl.frame.LazyFeature)  # as a loader has it fetched
    found.ndata["x"] = g.ndata["x"].to(nodes.device)[nodes.long()]
    check(g, nodes, found)
    site = report.snapshot()["dgl.ShaDowKHopSampler"]
    assert site.accelerated == 1 and not site.left and not site.reasons


@needs_cuda
def test_all_neighbours_are_dgls():
    g, seeds = graph(), torch.tensor([7, 3])
    sampler = dgl.dataloading.ShaDowKHopSampler([-1])
    want, got = sampler.sample(g, seeds), sampler.sample(g.to("cuda"), seeds.cuda())
    assert torch.equal(want[0].sort().values, got[0].cpu().sort().values)
    assert torch.equal(want[2].edata[dgl.EID].sort().values, got[2].edata[dgl.EID].cpu().sort().values)


@needs_cuda
@pytest.mark.parametrize("mode, budget", [("node", 20), ("edge", 30), ("walk", (5, 4))])
def test_saint(mode, budget, monkeypatch):
    monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    g = graph()
    for found in dgl.dataloading.DataLoader(
        g, torch.arange(3), dgl.dataloading.SAINTSampler(mode, budget), batch_size=1
    ):
        check(g, found.ndata[dgl.NID], found)
    assert report.snapshot()["dgl.SAINTSampler"].accelerated == 3


@needs_cuda
@pytest.mark.parametrize("name, how", [("ShaDowKHopSampler", [[3]]), ("SAINTSampler", ["node", 9])])
def test_workers_leave_the_gpu_alone(name, how, monkeypatch):
    monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    torch.zeros(1, device="cuda")
    g = graph()
    for out in dgl.dataloading.DataLoader(
        g, torch.arange(6), getattr(dgl.dataloading, name)(*how), batch_size=3, num_workers=2
    ):
        found = out[2] if isinstance(out, (list, tuple)) else out
        check(g, found.ndata[dgl.NID], found)


LOADERS = {
    "dgl.ShaDowKHopSampler": lambda: dgl.dataloading.ShaDowKHopSampler([3]),
    "dgl.SAINTSampler": lambda: dgl.dataloading.SAINTSampler("node", 9),
    "dgl.LaborSampler": lambda: dgl.dataloading.LaborSampler([3]),
}


@pytest.mark.parametrize("choice", ["", "framework"])
@pytest.mark.parametrize("kind", LOADERS)
def test_what_dgl_samples_in_host_memory_is_counted(kind, choice, monkeypatch):
    monkeypatch.setenv("GNNACCEL_SAMPLER", choice)
    for _ in dgl.dataloading.DataLoader(graph(), torch.arange(6), LOADERS[kind](), batch_size=3):
        pass
    site = report.snapshot()[kind]
    assert (site.accelerated, site.left) == (0, 2)
    (reason,) = site.reasons
    assert "DGL's own library samples" in reason or reason == f"GNNACCEL_SAMPLER={choice}"


@pytest.mark.parametrize("seeds", [[1, 2], {"a": torch.tensor([1])}])
def test_what_dgl_samples_on_a_gpu_is_not_said_to_be_in_host_memory(seeds):
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    sample = subgraphs.shadow_sample(lambda *_: "DGL's")
    assert sample(dgl.dataloading.ShaDowKHopSampler([3]), on_gpu, seeds) == "DGL's"
    (reason,) = report.snapshot()["dgl.ShaDowKHopSampler"].reasons
    assert "host memory" not in reason


def test_subgraphs_of_a_pinned_graph_are_counted(monkeypatch):
    g, nodes = graph(), torch.tensor([3, 1])
    check(g, nodes, g.subgraph(nodes))
    assert "dgl.node_subgraph" not in report.snapshot()
    monkeypatch.setattr(dgl.DGLGraph, "is_pinned", lambda self: True)  # a CPU alone cannot pin
    check(g, nodes, dgl.node_subgraph(g, nodes))
    site = report.snapshot()["dgl.node_subgraph"]
    assert site.left == 1 and list(site.reasons) == ["a pinned graph: DGL finds the edges on the CPU"]


def test_help_is_dgls():
    ours = [f.__doc__ for f in (dgl.node_subgraph, dgl.subgraph.node_subgraph, dgl.DGLGraph.subgraph)]
    dgl_backend.disable()
    assert ours == [f.__doc__ for f in (dgl.node_subgraph, dgl.subgraph.node_subgraph, dgl.DGLGraph.subgraph)]
