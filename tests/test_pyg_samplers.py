"""PyG's loaders on our sampling: every option, against the graph itself and, where it is installed, torch_sparse."""

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData  # noqa: E402
from torch_geometric.loader import (  # noqa: E402
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    ShaDowKHopSampler,
)
from torch_geometric.sampler import (  # noqa: E402
    BidirectionalNeighborSampler,
    HGTSampler,
    NegativeSampling,
    NeighborSampler,
    NodeSamplerInput,
)
from torch_geometric.testing import MyFeatureStore, MyGraphStore  # noqa: E402
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE  # noqa: E402

from gnnaccel import pyg_backend, report  # noqa: E402
from gnnaccel.pyg_backend import sampler_places, samplers  # noqa: E402

NODES, EDGES = 80, 500
needs_torch_sparse = pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="torch_sparse is not installed")


@pytest.fixture(autouse=True)
def _plugin():
    report.reset()
    pyg_backend.enable()
    yield
    pyg_backend.disable()


def edges(num_sources, num_targets, num_edges=EDGES, dtype=torch.int64):
    ends = torch.stack([torch.randint(num_sources, (num_edges,)), torch.randint(num_targets, (num_edges,))])
    ends[1, : num_edges // 4] = 3  # a hub
    return ends.to(dtype)


def homogeneous(dtype=torch.int64):
    return Data(
        x=torch.arange(NODES).float()[:, None],
        y=torch.arange(NODES),
        edge_index=edges(NODES, NODES, dtype=dtype),
        edge_attr=torch.arange(EDGES),
        edge_weight=torch.rand(EDGES),
        time=torch.randint(30, (NODES,)),
    )


def heterogeneous():
    data = HeteroData()
    sizes = {"paper": 60, "author": 40, "venue": 10}
    for name, size in sizes.items():
        data[name].x = torch.arange(size)
        data[name].time = torch.randint(30, (size,))
    for kind in (
        ("paper", "cites", "paper"),
        ("author", "writes", "paper"),
        ("paper", "rev_writes", "author"),
        ("venue", "prints", "paper"),
    ):
        data[kind].edge_index = edges(sizes[kind[0]], sizes[kind[-1]])
        data[kind].edge_attr = torch.arange(EDGES)
        data[kind].edge_weight = torch.rand(EDGES)
    return data


def check_batch(batch, data):
    """Nodes and edges of a batch are the graph's, with their attributes."""
    for store, plain in zip(batch.node_stores, data.node_stores, strict=True):
        assert torch.equal(store.x.flatten().long(), store.n_id)
        assert torch.equal(store.time, plain.time[store.n_id])
    for kind in data.edge_types if isinstance(data, HeteroData) else [None]:
        store, plain = (batch, data) if kind is None else (batch[kind], data[kind])
        source, target = (batch, batch) if kind is None else (batch[kind[0]], batch[kind[-1]])
        assert torch.equal(store.edge_attr, store.e_id)
        ends = torch.stack([source.n_id[store.edge_index[0]], target.n_id[store.edge_index[1]]])
        assert torch.equal(ends, plain.edge_index.long()[:, store.e_id])


def all_ours(kind="pyg.NeighborSampler"):
    return report.snapshot()[kind].accelerated > 0 and not any(site.left for site in report.snapshot().values())


def end_workers(loader):
    """Persistent workers end at once if asked to, and after seconds if the garbage collector finds their loader."""
    if loader.persistent_workers:
        loader._iterator._shutdown_workers()


OPTIONS = {
    "plain": {},
    "replace": dict(replace=True),
    "disjoint": dict(disjoint=True),
    "induced": dict(subgraph_type="induced"),
    "weighted": dict(weight_attr="edge_weight"),
    "temporal": dict(time_attr="time"),
    "temporal last": dict(time_attr="time", temporal_strategy="last"),
    "all neighbours": dict(num_neighbors=[-1, -1]),
    "workers": dict(num_workers=2, persistent_workers=True),
    "filtered by workers": dict(num_workers=2, filter_per_worker=True),
    "filtered here": dict(num_workers=1, filter_per_worker=False),
    "transform": dict(transform=lambda batch: setattr(batch, "seen", True) or batch),
}


@pytest.mark.parametrize("make", [homogeneous, lambda: homogeneous(torch.int32), heterogeneous])
@pytest.mark.parametrize("option", OPTIONS)
def test_neighbor_loader(make, option):
    data, kwargs = make(), dict(num_neighbors=[4, 2], batch_size=16) | OPTIONS[option]
    hetero = isinstance(data, HeteroData)
    nodes = torch.randperm(40)[:40]
    loader = NeighborLoader(data, input_nodes=("author", nodes) if hetero else nodes, **kwargs)
    seen = []
    for _ in range(2 if option == "workers" else 1):
        for batch in loader:
            check_batch(batch, data)
            store = batch["author"] if hetero else batch
            seen.append(store.n_id[: store.batch_size])
            if kwargs.get("subgraph_type", "directional") == "directional" and kwargs["num_neighbors"][0] > 0:
                kinds = [batch[kind] for kind in data.edge_types] if hetero else [batch]
                for kind in kinds:
                    assert kind.edge_index.shape[1] == 0 or torch.bincount(kind.edge_index[1].long()).max() <= 4
                    assert torch.equal(kind.edge_index[1], kind.edge_index[1].sort().values)
            if option == "transform":
                assert batch.seen
            if "time_attr" in kwargs:
                for at in batch.node_stores:
                    assert (at.time <= store.time[: store.batch_size][at.batch]).all()
    assert torch.equal(torch.cat(seen)[:40], nodes)
    assert "num_workers" in kwargs or all_ours()
    end_workers(loader)


def test_all_neighbours_are_the_subgraph_around_the_seeds():
    data = homogeneous()
    (batch,) = NeighborLoader(data, [-1, -1], input_nodes=torch.tensor([7, 9]), batch_size=2)
    nodes, _, _, mask = pyg.utils.k_hop_subgraph([7, 9], 2, data.edge_index, num_nodes=NODES)
    assert torch.equal(batch.n_id.sort().values, nodes)
    first = torch.isin(data.edge_index[1], torch.tensor([7, 9]))
    inner = torch.isin(data.edge_index[1], torch.cat([torch.tensor([7, 9]), data.edge_index[0, first]]))
    assert torch.equal(batch.e_id.sort().values, (mask & inner).nonzero().flatten())
    assert batch.num_sampled_nodes[0] == 2 and sum(batch.num_sampled_nodes) == batch.num_nodes
    assert sum(batch.num_sampled_edges) == batch.num_edges


def test_induced_batches_have_every_edge_between_their_nodes():
    data = homogeneous()
    for batch in NeighborLoader(data, [3, 2], batch_size=16, subgraph_type="induced"):
        wanted = torch.isin(data.edge_index, batch.n_id).all(dim=0).nonzero().flatten()
        assert torch.equal(batch.e_id.sort().values, wanted)
    data = heterogeneous()
    for batch in NeighborLoader(data, [3, 2], ("paper", None), batch_size=16, subgraph_type="induced"):
        for kind in data.edge_types:
            source, target = (batch[name].n_id for name in kind[::2])
            index = data[kind].edge_index
            wanted = (torch.isin(index[0], source) & torch.isin(index[1], target)).nonzero().flatten()
            assert torch.equal(batch[kind].e_id.sort().values, wanted)


def test_bidirectional_batches_have_each_edge_both_ways():
    data = homogeneous()
    for batch in NeighborLoader(data, [3, 2], batch_size=16, subgraph_type="bidirectional"):
        ends = batch.n_id[batch.edge_index]
        assert pyg.utils.is_undirected(batch.edge_index)
        assert torch.equal(ends.sort(dim=0).values, data.edge_index[:, batch.e_id].sort(dim=0).values)
    data = heterogeneous()
    for batch in NeighborLoader(data, [3, 2], ("paper", None), batch_size=16, subgraph_type="bidirectional"):
        there, back = batch["author", "paper"].edge_index, batch["paper", "author"].edge_index
        assert sorted(there.t().tolist()) == sorted(back.flip(0).t().tolist()) and there.numel()
    assert all_ours()


@pytest.mark.parametrize("make", [homogeneous, heterogeneous])
@pytest.mark.parametrize("negatives", [None, "binary", NegativeSampling("triplet", 2)])
@pytest.mark.parametrize("option", ["plain", "disjoint", "temporal", "weighted", "induced", "workers"])
def test_link_neighbor_loader(make, negatives, option):
    data, kwargs = make(), OPTIONS[option]
    hetero = isinstance(data, HeteroData)
    index = data["author", "writes", "paper"].edge_index if hetero else data.edge_index
    given = (("author", "writes", "paper"), index) if hetero else index
    if option == "temporal":
        kwargs = kwargs | dict(edge_label_time=torch.full((index.shape[1],), 12))
    loader = LinkNeighborLoader(data, [4, 2], given, neg_sampling=negatives, batch_size=100, **kwargs)
    for batch in loader:
        check_batch(batch, data)
        store = batch["author", "writes", "paper"] if hetero else batch
        source, target = (batch["author"], batch["paper"]) if hetero else (batch, batch)
        if isinstance(negatives, NegativeSampling):
            places = (source if hetero else store).src_index, (target if hetero else store).dst_pos_index
            asked = store.input_id
        else:
            asked = store.input_id
            places = store.edge_label_index[:, : asked.numel()]
        ends = torch.stack([source.n_id[places[0]], target.n_id[places[1]]])
        assert torch.equal(ends, index[:, asked])
        if option == "temporal":
            for at in batch.node_stores:
                assert (at.time[hops_after_seeds(at)] <= 12).all()
    assert option == "workers" or all_ours()
    end_workers(loader)


def hops_after_seeds(store):
    """Nodes that were sampled, and not given: those of a link may be later than it."""
    return slice(int(store.num_sampled_nodes[0]), None)


def test_edge_times():
    data = homogeneous()
    data.when = torch.randint(30, (EDGES,))
    del data.time
    for batch in LinkNeighborLoader(
        data, [4, 2], data.edge_index, edge_label_time=data.when, time_attr="when", batch_size=50
    ):
        assert (batch.when <= data.when[batch.input_id][batch.batch[batch.edge_index[1]]]).all()
        assert batch.num_edges
    data = heterogeneous()
    kinds = data.edge_types
    for kind in kinds:
        data[kind].when = torch.randint(30, (EDGES,))
    for batch in NeighborLoader(
        data, [4, 2], ("paper", torch.arange(60)), input_time=torch.arange(60), time_attr="when", batch_size=20
    ):
        for kind in kinds:
            tree = batch[kind[-1]].batch[batch[kind].edge_index[1]]
            assert (batch[kind].when <= batch["paper"].input_id[tree]).all()


def test_custom_stores():
    index, x = edges(NODES, NODES), torch.arange(NODES).float()[:, None]
    features, graph = MyFeatureStore(), MyGraphStore()
    features.put_tensor(x, group_name=None, attr_name="x", index=None)
    graph.put_edge_index(index, edge_type=None, layout="coo", size=(NODES, NODES))
    for batch in NeighborLoader((features, graph), [-1], torch.arange(10), batch_size=5):
        ends = batch.x.flatten().long()[batch.edge_index]
        wanted = index[:, torch.isin(index[1], batch.x.flatten().long()[:5])]
        assert sorted(ends.t().tolist()) == sorted(wanted.t().tolist())
    features, graph = MyFeatureStore(), MyGraphStore()
    for name, size in (("a", 60), ("b", 40)):
        features.put_tensor(torch.arange(size), group_name=name, attr_name="x", index=None)
    graph.put_edge_index(edges(60, 40), edge_type=("a", "to", "b"), layout="coo", size=(60, 40))
    graph.put_edge_index(edges(40, 60), edge_type=("b", "to", "a"), layout="coo", size=(40, 60))
    for batch in NeighborLoader((features, graph), [3, 2], ("a", torch.arange(10)), batch_size=5):
        assert batch["a"].x[:5].tolist() == batch["a"].n_id[:5].tolist() and batch["b"].x.numel()
    assert all_ours()


def test_directions():
    index = torch.tensor([[0, 0, 2], [1, 2, 3]])
    data, flipped = Data(edge_index=index, num_nodes=4), Data(edge_index=index.flip(0), num_nodes=4)
    start = NodeSamplerInput(input_id=None, node=torch.tensor([2]))
    forward = NeighborSampler(data, [1]).sample_from_nodes(start)
    backward = NeighborSampler(flipped, [1], sample_direction="backward").sample_from_nodes(start)
    assert forward.node.tolist() == backward.node.tolist() == [2, 0]
    assert (forward.row.tolist(), forward.col.tolist()) == (backward.col.tolist(), backward.row.tolist()) == ([1], [0])
    both = BidirectionalNeighborSampler(data, [1]).sample_from_nodes(start)
    assert sorted(zip(both.node[both.row].tolist(), both.node[both.col].tolist(), strict=True)) == [(0, 2), (2, 3)]


@pytest.mark.parametrize("asked", [False, True])
def test_both_directions_on_the_cpu_are_named(asked, monkeypatch):
    def to_cuda(self, *_):  # as of a graph on a GPU
        arrays = {"colptr": self.colptr, "row": self.row}
        setattr(self, sampler_places._HOST, sampler_places.Kept(arrays, False, torch.device("cpu")))

    if asked:
        monkeypatch.setattr(samplers, "to_cuda", to_cuda)
    sampler = BidirectionalNeighborSampler(homogeneous(), [2])
    assert sampler_places._HOST not in vars(sampler.forward_sampler)
    sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=torch.tensor([2])))
    site = report.snapshot()[samplers.KIND]
    assert site.accelerated == 2 and list(site.reasons) == ["sampled on the CPU: BidirectionalNeighborSampler"] * asked


def test_an_edge_index_of_pygs_class():
    data = homogeneous()
    order = data.edge_index[1].argsort(stable=True)
    plain = Data(x=data.x, edge_index=data.edge_index[:, order])
    plain.edge_index = pyg.EdgeIndex(plain.edge_index, sparse_size=(NODES, NODES), sort_order="col")
    (batch,) = NeighborLoader(plain, [-1], input_nodes=torch.tensor([3]), batch_size=1)
    wanted = data.edge_index[0, data.edge_index[1] == 3]
    assert sorted(batch.n_id[torch.as_tensor(batch.edge_index[0])].tolist()) == sorted(wanted.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_seed_repeats_an_epoch(workers):
    loader = NeighborLoader(homogeneous(), [3, 2], batch_size=16, shuffle=True, num_workers=workers)
    epochs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        epochs.append([batch.e_id.tolist() for batch in loader])
    assert epochs[0] == epochs[1] != epochs[2]
    assert len({tuple(e_id) for e_id in epochs[0]}) == 5  # workers do not repeat each other


# ---- HGT, ShaDow. ----


def test_hgt_loader():
    data = heterogeneous()
    for batch in HGTLoader(data, [5, 5], ("paper", torch.arange(30)), batch_size=10):
        check_batch(batch, data)
        assert batch["paper"].num_nodes == 20 and batch["author"].num_nodes == 10
        for kind in data.edge_types:
            source, target = (batch[name].n_id for name in kind[::2])
            index = data[kind].edge_index
            assert batch[kind].num_edges == (torch.isin(index[0], source) & torch.isin(index[1], target)).sum()
    assert all_ours("pyg.HGTSampler")


@pytest.mark.parametrize("workers", [0, 2])
def test_shadow(workers):
    data = homogeneous()
    del data.time
    loader = ShaDowKHopSampler(data, 2, 3, node_idx=torch.arange(20), batch_size=5, num_workers=workers)
    for number, batch in enumerate(loader):
        roots = torch.arange(5 * number, 5 * number + 5)
        nodes = batch.x.flatten().long()
        assert torch.equal(nodes[batch.root_n_id], roots) and torch.equal(batch.y, roots)
        assert torch.equal(nodes[batch.edge_index], data.edge_index[:, batch.edge_attr])
        assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
        for i in range(5):
            mine = nodes[batch.ptr[i] : batch.ptr[i + 1]]
            within = torch.isin(data.edge_index, mine).all(dim=0).sum()
            assert (batch.batch[batch.edge_index[0]] == i).sum() == within
    assert workers or all_ours("pyg.ShaDowKHopSampler")


def test_shadows_order_is_that_of_torch_sparse():
    row = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])
    col = torch.tensor([1, 2, 3, 0, 2, 0, 1, 3, 0])
    data = Data(edge_index=torch.stack([row, col])[:, torch.randperm(9)], num_nodes=4)
    (batch,) = ShaDowKHopSampler(data, depth=1, num_neighbors=3, node_idx=torch.tensor([0, 3]), batch_size=2)
    # 0 has its sources 1, 2 and 3 around it, 3 has 0 and 2.
    assert batch.ptr.tolist() == [0, 4, 7] and batch.root_n_id.tolist() == [0, 6]
    assert batch.edge_index.tolist() == [[*row.tolist(), 4, 4, 5, 5, 6], [*col.tolist(), 5, 6, 4, 6, 4]]


# ---- Beside torch_sparse. ----


def both(make_loader, monkeypatch):
    """Batches of ours, and of PyG with torch_sparse."""
    ours = list(make_loader())
    monkeypatch.setenv(samplers.CHOICE, "framework")
    return zip(ours, list(make_loader()), strict=True)


@needs_torch_sparse
@pytest.mark.skipif(WITH_PYG_LIB, reason="PyG uses pyg-lib")
@pytest.mark.parametrize("kind", ["directional", "induced"])
def test_full_neighbourhoods_are_torch_sparses(kind, monkeypatch):
    data = homogeneous()
    seeds = torch.randperm(NODES)[:40]
    for ours, theirs in both(
        lambda: NeighborLoader(data, [-1, -1], seeds, batch_size=8, subgraph_type=kind), monkeypatch
    ):
        for name in ("n_id", "edge_index", "e_id", "x", "edge_attr"):
            assert torch.equal(ours[name], theirs[name]), name


@needs_torch_sparse
@pytest.mark.skipif(WITH_PYG_LIB, reason="PyG uses pyg-lib")
@pytest.mark.parametrize("kind", ["directional", "induced"])
def test_full_heterogeneous_neighbourhoods_are_torch_sparses(kind, monkeypatch):
    data = heterogeneous()
    for ours, theirs in both(
        lambda: NeighborLoader(data, [-1, -1], ("paper", torch.arange(8)), batch_size=4, subgraph_type=kind),
        monkeypatch,
    ):
        for name in data.node_types:
            assert torch.equal(ours[name].n_id.sort().values, theirs[name].n_id.sort().values)
        for edge_type in data.edge_types:
            assert torch.equal(ours[edge_type].e_id.sort().values, theirs[edge_type].e_id.sort().values)


@needs_torch_sparse
def test_shadow_and_hgt_are_torch_sparses(monkeypatch):
    data = homogeneous()
    del data.time
    for ours, theirs in both(lambda: ShaDowKHopSampler(data, 2, EDGES, batch_size=9), monkeypatch):
        for name in ("ptr", "batch", "root_n_id", "edge_index", "x", "y"):
            assert torch.equal(ours[name], theirs[name]), name
    monkeypatch.delenv(samplers.CHOICE)
    data = HeteroData(
        n=dict(x=torch.arange(60)), n__to__n=dict(edge_index=torch.randint(60, (2, 300)), edge_attr=torch.arange(300))
    )
    for ours, theirs in both(lambda: HGTLoader(data, [60, 60], ("n", torch.arange(8)), batch_size=4), monkeypatch):
        assert torch.equal(ours["n"].n_id.sort().values, theirs["n"].n_id.sort().values)
        assert torch.equal(ours["n", "n"].e_id.sort().values, theirs["n", "n"].e_id.sort().values)


@needs_torch_sparse
def test_sparse_tensors():
    from torch_sparse import SparseTensor

    data = homogeneous()
    adj_t = SparseTensor(row=data.edge_index[1], col=data.edge_index[0], value=data.edge_attr, sparse_sizes=(80, 80))
    plain = Data(x=data.x, y=data.y, adj_t=adj_t)
    (batch,) = NeighborLoader(plain, [-1], torch.tensor([3]), batch_size=1)
    row, _, value = batch.adj_t.coo()
    assert (row == 0).all() and value.sort().values.tolist() == (data.edge_index[1] == 3).nonzero().flatten().tolist()
    (batch,) = ShaDowKHopSampler(plain, 1, EDGES, node_idx=torch.tensor([3]), batch_size=1)
    row, col, value = batch.adj_t.coo()
    nodes = batch.x.flatten().long()
    assert torch.equal(nodes[torch.stack([col, row])], data.edge_index[:, value])
    assert all_ours()


# ---- Switching, bad input. ----


def test_disabling_restores_everything():
    enabled = {(plain, name): getattr(plain, name) for plain, name, *_ in samplers._METHODS}
    pyg_backend.disable()
    for (plain, name), method in enabled.items():
        assert getattr(plain, name) is not method and getattr(plain, name) is method.__wrapped__
    if not WITH_PYG_LIB and not WITH_TORCH_SPARSE:
        with pytest.raises(ImportError):
            next(iter(NeighborLoader(homogeneous(), [2])))
    pyg_backend.enable()
    pyg_backend.enable()
    pyg_backend.disable()
    assert not hasattr(NeighborSampler._sample, "__wrapped__")


def test_the_frameworks_samplers_by_choice(monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "framework")
    data = heterogeneous()
    for make in (
        lambda: NeighborLoader(homogeneous(), [2], batch_size=20),
        lambda: HGTLoader(data, [2], "paper"),
        lambda: ShaDowKHopSampler(homogeneous(), 1, 2, batch_size=20),
    ):
        if WITH_TORCH_SPARSE:
            next(iter(make()))
        else:
            with pytest.raises(ImportError):
                next(iter(make()))
    seen = report.snapshot()
    assert seen["pyg.NeighborSampler"].left == 1 and not seen["pyg.NeighborSampler"].accelerated
    assert "GNNACCEL_SAMPLER=framework" in seen["pyg.NeighborSampler"].reasons


def test_a_choice_that_there_is_not(monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "fast")
    with pytest.raises(ValueError, match="GNNACCEL_SAMPLER=fast"):
        NeighborLoader(homogeneous(), [2])


def test_a_build_without_cuda_samples_on_the_cpu_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sampler_places, "has_cuda_kernels", lambda: False)
    data = homogeneous()
    for _ in range(2):
        for batch in NeighborLoader(data, [2], batch_size=20):
            check_batch(batch, data)
    said = [
        record for record in caplog.records if "sampled on the CPU: this gnnaccel has no CUDA half" in record.message
    ]
    assert len(said) == 1 and said[0].levelname == "WARNING"


def test_a_gpu_that_there_is_not(monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="GNNACCEL_SAMPLER=cuda"):
        NeighborLoader(homogeneous(), [2])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused_at_once(value):
    data = homogeneous()
    data.edge_weight[7] = value
    with pytest.raises(ValueError, match="weight_attr"):
        NeighborLoader(data, [2], weight_attr="edge_weight")


def test_weights_and_times_of_other_types():
    data = homogeneous()
    data.edge_weight, data.time = torch.randint(5, (EDGES,)), data.time.int()
    for kwargs in (dict(weight_attr="edge_weight"), dict(time_attr="time")):
        for batch in NeighborLoader(data, [3, 2], batch_size=20, **kwargs):
            check_batch(batch, data)
    data.time = data.time.float()
    with pytest.raises(TypeError, match="time_attr"):
        NeighborLoader(data, [2], time_attr="time")


def test_pygs_own_refusals_stay():
    data = homogeneous()
    with pytest.raises(ValueError, match="disjoint"):
        next(iter(NeighborLoader(data, [2], subgraph_type="induced", disjoint=True)))
    with pytest.raises(KeyError):
        NeighborLoader(data, [2], time_attr="no")
    with pytest.raises(NotImplementedError):
        HGTSampler(data, [2])
    with pytest.raises(ValueError, match="num_neighbors"):
        next(iter(NeighborLoader(data, [-7])))
    with pytest.raises(ValueError, match="seeds"):
        next(iter(NeighborLoader(data, [2], torch.tensor([NODES]))))


def test_a_model_learns_from_sampled_batches():
    data = homogeneous()
    data.edge_index = torch.cat([data.edge_index, torch.arange(NODES).expand(2, -1)], 1)
    data.x, label = torch.randn(NODES, 8), torch.randint(2, (NODES,))
    data = Data(x=torch.cat([data.x, label[:, None] * 2.0], 1), edge_index=data.edge_index, y=label)
    model = pyg.nn.GraphSAGE(9, 16, 2, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(30):
        for batch in NeighborLoader(data, [5, 5], batch_size=20, shuffle=True):
            loss = torch.nn.functional.cross_entropy(
                model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (model(data.x, data.edge_index).argmax(1) == data.y).float().mean() > 0.9
