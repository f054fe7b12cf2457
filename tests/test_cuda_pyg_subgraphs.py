"""PyG's loaders of subgraphs and of several types on the GPU: batches of the CPU for the same nodes, features in GPU
memory, pinned or in a cache."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from cuda_cases import DEVICE, EMULATED

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import (
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    NeighborLoader,
    PrefetchLoader,
    ShaDowKHopSampler,
)
from torch_geometric.typing import WITH_TORCH_SPARSE

from gnnaccel import pyg_backend, report, sampling
from gnnaccel.pyg_backend import sampler_places, samplers

NODES, EDGES = 60, 500
TYPES = {("a", "to", "a"): (30, 30), ("b", "of", "a"): (20, 30), ("a", "by", "b"): (30, 20), ("c", "in", "b"): (9, 20)}
on_gpu = pytest.mark.skipif(bool(EMULATED), reason="asks where tensors are")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.delenv(samplers.CHOICE, raising=False)
    report.reset()
    pyg_backend.enable()
    monkeypatch.setattr(sampler_places, "has_cuda_kernels", lambda: True)  # what an emulation has, too
    yield
    pyg_backend.disable()


def ends(*sizes, count=EDGES) -> torch.Tensor:
    """Edges in order of their destinations: a GPU may sort those to one node into another order than the CPU."""
    index = torch.stack([torch.randint(size, (count,)) for size in sizes])
    return index[:, index[1].argsort(stable=True)]


def plain() -> Data:
    nodes = torch.arange(NODES)
    return Data(x=nodes.float()[:, None], y=nodes, edge_index=ends(NODES, NODES), edge_attr=torch.arange(EDGES))


def typed() -> HeteroData:
    data = HeteroData(a=dict(x=torch.rand(30, 5)), b=dict(x=torch.rand(20, 3), y=torch.arange(20)), c=dict(num_nodes=9))
    for kind, sizes in TYPES.items():
        data[kind].edge_index, data[kind].edge_attr = ends(*sizes, count=200), torch.rand(200, 2)
    data["b"].half, data.label = torch.rand(20, 4).bfloat16(), "a graph"
    return data


def tensors(batch) -> dict:
    return {(store._key, name): value for store in batch.stores for name, value in store.items()}


def same(got, wanted, device=None) -> None:
    """End the test unless two batches are the same, but for `got` being on a device."""
    got, wanted = tensors(got), tensors(wanted)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert got[key].dtype == value.dtype and torch.equal(got[key].cpu(), value.cpu()), key
            assert device is None or got[key].device.type == device.type, key
        else:
            assert got[key] == value, key


def check_typed(batch, data) -> None:
    """Nodes and edges of the batch are those of the data, and the edges are all between its nodes."""
    for name, nodes in batch.n_id_dict.items():
        assert nodes.unique().numel() == nodes.numel()
        if "x" in data[name]:
            assert torch.equal(batch[name].x.cpu(), data[name].x.cpu()[nodes.cpu()])
    for kind in data.edge_types:
        index, e_id = data[kind].edge_index.cpu(), batch[kind].e_id.cpu()
        nodes = [batch[name].n_id.cpu() for name in kind[::2]]
        places = batch[kind].edge_index.cpu()
        assert torch.equal(torch.stack([nodes[0][places[0]], nodes[1][places[1]]]), index[:, e_id])
        between = torch.isin(index[0], nodes[0]) & torch.isin(index[1], nodes[1])
        assert torch.equal(e_id.sort().values, between.nonzero().view(-1))
        assert torch.equal(batch[kind].edge_attr.cpu(), data[kind].edge_attr.cpu()[e_id])


def noted(kind) -> report.Site:
    return report.snapshot()[kind]


# ---- Subgraphs: of a graph on the GPU, and of one that the GPU is asked to sample from. ----

INDUCED = dict(subgraph_type="induced", batch_size=16, is_sorted=True)
LOADERS = {
    "induced": (plain, lambda data: NeighborLoader(data, [4, 2], **INDUCED), "pyg.NeighborSampler"),
    "induced, all neighbours": (plain, lambda data: NeighborLoader(data, [-1], **INDUCED), "pyg.NeighborSampler"),
    "induced, drawn again": (
        plain, lambda data: NeighborLoader(data, [4, 2], replace=True, **INDUCED), "pyg.NeighborSampler",
    ),
    "induced, several types": (
        typed, lambda data: NeighborLoader(data, [3, 2], input_nodes="a", **INDUCED), "pyg.NeighborSampler",
    ),
    "ShaDow": (plain, lambda data: ShaDowKHopSampler(data, 2, 3, batch_size=7), "pyg.ShaDowKHopSampler"),
    "ShaDow, drawn again": (
        plain, lambda data: ShaDowKHopSampler(data, 1, 9, batch_size=7, replace=True), "pyg.ShaDowKHopSampler",
    ),
    "ShaDow, some nodes": (
        plain,
        lambda data: ShaDowKHopSampler(data, 2, 3, node_idx=torch.arange(NODES) % 5 == 0, batch_size=5),
        "pyg.ShaDowKHopSampler",
    ),
}  # fmt: skip
SAINT = {
    "nodes": lambda data: GraphSAINTNodeSampler(data, 12, num_steps=3, log=False),
    "edges": lambda data: GraphSAINTEdgeSampler(data, 12, num_steps=3, log=False),
    "walks": lambda data: GraphSAINTRandomWalkSampler(data, 5, 3, num_steps=3, log=False),
    "norms": lambda data: GraphSAINTNodeSampler(data, 12, num_steps=3, sample_coverage=2, log=False),
}


def batches(make, data) -> list:
    torch.manual_seed(3)
    return list(make(data))


@on_gpu
@pytest.mark.parametrize("name", LOADERS)
def test_a_graph_on_the_gpu(name):
    made, make, kind = LOADERS[name]
    data = made()
    wanted, got = batches(make, data), batches(make, data.clone().to(DEVICE))
    for one, other in zip(got, wanted, strict=True):
        for store in (one, *one.node_stores):  # which PyG leaves on the CPU
            if store.get("input_id") is not None:
                store.input_id = store.input_id.to(DEVICE)
        same(one, other, DEVICE)
    assert noted(kind).accelerated == 2 * len(wanted) and not noted(kind).reasons


@on_gpu
@pytest.mark.parametrize("name", [*LOADERS, *SAINT])
def test_the_gpu_for_a_graph_on_the_cpu(name, monkeypatch):
    if name in SAINT and WITH_TORCH_SPARSE:
        pytest.skip("torch-sparse samples")
    made, make, kind = LOADERS.get(name, (plain, SAINT.get(name), "pyg.GraphSAINTSampler"))
    data, calls = made(), []
    wanted = batches(make, data)
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    induced = sampling.subgraphs.by_torch.induced
    monkeypatch.setattr(sampling.subgraphs.by_torch, "induced", lambda *a: calls.append(1) or induced(*a))
    for one, other in zip(batches(make, data), wanted, strict=True):
        same(one, other, DEVICE if name.startswith("induced") else torch.device("cpu"))
    assert len(calls) >= len(wanted) and not noted(kind).reasons


@on_gpu
@pytest.mark.parametrize("name", ["ShaDow", "walks", "types"])
def test_workers_and_copies(name, monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    torch.zeros(1, device="cuda")  # which a forked worker must not touch
    make, data, kind = {
        "ShaDow": (ShaDowKHopSampler, plain(), "pyg.ShaDowKHopSampler"),
        "walks": (GraphSAINTRandomWalkSampler, plain(), "pyg.GraphSAINTSampler"),
        "types": (HGTLoader, typed(), "pyg.HGTSampler"),
    }[name]
    if name == "walks" and WITH_TORCH_SPARSE:
        pytest.skip("torch-sparse samples")
    how = {
        "ShaDow": dict(depth=2, num_neighbors=3),
        "walks": dict(batch_size=5, walk_length=3, num_steps=2),
        "types": dict(num_samples=[4, 4], input_nodes="a", batch_size=10),
    }[name]
    for batch in make(data, **how, num_workers=2):
        assert not next(iter(batch.edge_index_dict.values()) if name == "types" else iter([batch.edge_index])).is_cuda
    assert list(noted(kind).reasons) == ["sampled on the CPU: num_workers > 0"]
    if name == "ShaDow":
        loader = make(data, **how, batch_size=9)
        torch.manual_seed(1)
        wanted = list(loader)
        loader = pickle.loads(pickle.dumps(loader))
        torch.manual_seed(1)
        for one, other in zip(loader, wanted, strict=True):
            same(one, other)


# ---- HGT. ----


@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=on_gpu)])
def test_hgt(asked, monkeypatch):
    data = typed()
    monkeypatch.setenv(samplers.CHOICE, "cuda" if asked else "")
    given = data if asked else data.clone().to(DEVICE)
    epochs = []
    for _ in range(2):
        torch.manual_seed(1)
        epochs.append(list(HGTLoader(given, [6, 4], ("a", torch.arange(20)), batch_size=10)))
    for one, other in zip(*epochs, strict=True):
        same(one, other)  # a seed repeats them
        check_typed(one, data)
        assert one["a"].x.device.type == one["a", "to", "a"].edge_index.device.type == DEVICE.type
        assert one["a"].num_nodes == 20 and one["b"].num_nodes == 10 and one["c"].num_nodes <= 9
    assert not noted("pyg.HGTSampler").reasons


@on_gpu
def test_all_that_hgt_can_take_is_the_cpus():
    data, found = typed(), []
    for given in (data, data.clone().to(DEVICE)):
        (batch,) = HGTLoader(given, [100, 100, 100], ("a", torch.arange(4)), batch_size=4)
        check_typed(batch, data)
        found.append({name: nodes.sort().values.tolist() for name, nodes in batch.n_id_dict.items()})
    assert found[0] == found[1]


# ---- Features of several types. ----

OF_TYPES = {
    "uniform": lambda data: NeighborLoader(data, [3, 2], input_nodes="a", batch_size=8),
    "sorted": lambda data: NeighborLoader(data, [3, 2], input_nodes="a", batch_size=8, is_sorted=True),
    "all": lambda data: NeighborLoader(data, [-1], input_nodes=("b", torch.arange(9)), batch_size=4),
    "trees": lambda data: NeighborLoader(data, [3], input_nodes="a", batch_size=8, disjoint=True),
    "both ways": lambda data: NeighborLoader(data, [3], input_nodes="a", batch_size=8, subgraph_type="bidirectional"),
    "a transform": lambda data: NeighborLoader(data, [3], input_nodes="a", batch_size=8, transform=doubled),
    "not filtered in collate_fn": lambda data: NeighborLoader(
        data, [3], input_nodes="a", batch_size=8, filter_per_worker=False
    ),
}


def doubled(batch):
    batch["b"].z = batch["b"].x * 2
    return batch


@on_gpu
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", OF_TYPES)
@pytest.mark.filterwarnings("ignore:Cannot convert to bidirectional")
def test_features_in_host_memory(name, cached, monkeypatch):
    """Batches are there, and as those of the CPU; the GPU has read their features where they lie, or in its cache."""
    data = typed()
    data["a"].uneven, data["c"].x = torch.rand(5, 30).t(), torch.rand(9, 2).double()  # the first cannot be read so
    wanted = batches(OF_TYPES[name], data)
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    cache = sampling.FeatureCache(data["b"].x, torch.arange(20), num_rows=7) if cached else None
    reads = []
    if cached:
        gather = cache.gather
        monkeypatch.setattr(cache, "gather", lambda index: reads.append(1) or gather(index))
    for one, other in zip(batches(OF_TYPES[name], data), wanted, strict=True):
        same(one, other, DEVICE)
    assert len(reads) == (len(wanted) if cached else 0)
    assert not data["a"].x.is_cuda and "pyg.NodeLoader" not in report.snapshot()
    gc.collect()
    assert cached or not data["b"].x.is_pinned()  # the loaders are gone


@on_gpu
@pytest.mark.parametrize("steps", ["0", "2"])
def test_features_that_change_and_loaders_of_loaders(steps, monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    monkeypatch.setenv("GNNACCEL_SAMPLER_AHEAD", steps)
    data, busy = typed(), torch.rand(2048, 2048, device="cuda")
    data["a"].x = torch.arange(30.0)[:, None]
    loader = NeighborLoader(data, [3, 2], input_nodes="a", batch_size=8)
    for step, batch in enumerate(loader):
        assert torch.equal(batch["a"].x.view(-1).cpu(), batch["a"].n_id.cpu() * 2.0**step)
        busy = (busy @ busy).clamp(0, 1)
        data["a"].x *= 2
    data["a"].x = torch.zeros(30, 1)  # another one
    for batch in PrefetchLoader(loader):
        assert batch["a"].x.is_cuda and not batch["a"].x.any()
