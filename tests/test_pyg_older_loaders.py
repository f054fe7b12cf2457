"""PyG's loaders and models that want a SparseTensor, METIS or walks: GraphSAINT, Cluster-GCN, Node2Vec and others."""

import copy

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import (  # noqa: E402
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    NeighborSampler,
)
from torch_geometric.nn import Node2Vec  # noqa: E402
from torch_geometric.transforms import RootedRWSubgraph  # noqa: E402
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE  # noqa: E402
from torch_geometric.utils import coalesce, is_undirected, to_undirected  # noqa: E402

from gnnaccel import pyg_backend, report  # noqa: E402
from gnnaccel.pyg_backend import sampler_places, samplers, subgraph_loaders  # noqa: E402

NODES = 120
without_torch_sparse = pytest.mark.skipif(WITH_TORCH_SPARSE, reason="torch_sparse samples")


@pytest.fixture(autouse=True)
def _plugin():
    report.reset()
    pyg_backend.enable()
    yield
    pyg_backend.disable()


def graph(*, sort=False):
    index = torch.randint(NODES, (2, 400))
    index = to_undirected(index, num_nodes=NODES) if sort else index
    return Data(x=torch.arange(NODES), edge_index=index, edge_attr=torch.arange(index.shape[1]), num_nodes=NODES)


def is_induced(batch, data):
    """Edges of a batch, whose x are numbers of nodes, are all edges between them, with their attributes."""
    ends = batch.x[batch.edge_index]
    assert torch.equal(ends, data.edge_index[:, batch.edge_attr])
    within = torch.isin(data.edge_index, batch.x).all(0)
    assert batch.edge_attr.sort().values.tolist() == within.nonzero().flatten().tolist()


SAINT = {
    "nodes": lambda data, **kwargs: GraphSAINTNodeSampler(data, 30, **kwargs),
    "edges": lambda data, **kwargs: GraphSAINTEdgeSampler(data, 20, **kwargs),
    "walks": lambda data, **kwargs: GraphSAINTRandomWalkSampler(data, 10, 3, **kwargs),
}


@without_torch_sparse
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SAINT)
def test_graph_saint(name, workers):
    data = graph()
    loader = SAINT[name](data, num_steps=4, sample_coverage=20, log=False, num_workers=workers)
    seen = 0
    for batch in loader:
        is_induced(batch, data)
        assert torch.equal(batch.x, batch.x.unique())
        assert batch.node_norm.shape == (batch.num_nodes,) and batch.edge_norm.shape == (batch.num_edges,)
        assert (batch.node_norm > 0).all() and batch.edge_norm.isfinite().all()
        seen += 1
    assert seen == len(loader) == 4
    assert workers or report.snapshot()["pyg.GraphSAINTSampler"].accelerated


@without_torch_sparse
def test_workers_of_another_loader_leave_a_gpu_alone(monkeypatch):
    """Those that PyG's loader, which has none, knows nothing of."""
    place = sampler_places.Place(torch.device("cpu"), True)  # as if it were a GPU
    monkeypatch.setattr(sampler_places, "of", lambda kind, data, workers: place)
    data = graph()
    loader = SAINT["nodes"](data, num_steps=2)
    for batch in loader:
        is_induced(batch, data)

    def refuse(*_):
        raise AssertionError("a GPU was used")

    monkeypatch.setattr(subgraph_loaders.Rows, "saint_subgraph", refuse)
    around = torch.utils.data.DataLoader(loader, batch_size=1, collate_fn=loader._collate, num_workers=1)
    for batch in around:
        is_induced(batch, data)


@without_torch_sparse
def test_walks_of_graph_saint_stay_at_nodes_without_edges():
    data = Data(x=torch.arange(9), edge_index=torch.tensor([[0, 1], [1, 0]]), edge_attr=torch.arange(2), num_nodes=9)
    for batch in GraphSAINTRandomWalkSampler(data, 20, 3, num_steps=3, log=False):
        is_induced(batch, data)
        assert batch.num_nodes > 2


@without_torch_sparse
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sizes", [[3, 2], [-1, -1]])
def test_the_first_neighbor_sampler(sizes, workers):
    data = graph()
    loader = NeighborSampler(data.edge_index, sizes=sizes, batch_size=30, num_nodes=NODES, num_workers=workers)
    for number, (size, nodes, layers) in enumerate(loader):
        assert nodes[:size].tolist() == list(range(30 * number, 30 * number + 30))
        assert torch.equal(nodes.unique(), nodes.sort().values)
        last = nodes.numel()
        for wanted, (index, e_id, (num_sources, num_targets)) in zip(reversed(sizes), layers, strict=True):
            assert num_sources == last and index[0].max() < num_sources and index[1].max() < num_targets
            assert torch.equal(nodes[index], data.edge_index[:, e_id]) and torch.equal(
                e_id.unique(), e_id.sort().values
            )
            degree = torch.bincount(data.edge_index[1], minlength=NODES)[nodes[:num_targets]]
            most = degree if wanted < 0 else degree.clamp(max=wanted)
            assert torch.equal(torch.bincount(index[1], minlength=num_targets), most)
            last = num_targets
        assert last == size
    index, e_id, _ = NeighborSampler(data.edge_index, [2], return_e_id=False).sample([1, 2])[2]
    assert e_id is None and index[1].max() < 2


@pytest.mark.skipif(WITH_PYG_LIB, reason="pyg-lib has METIS")
@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_clusters_without_metis(kind, caplog, tmp_path):
    data = graph(sort=True)
    for _ in range(2):
        parts = ClusterData(data, 6, sparse_format=kind, log=False, save_dir=str(tmp_path))
    sizes = parts.partition.partptr.diff()
    assert sizes.sum() == NODES and sizes.min() > 0 and sizes.max() <= 1.1 * NODES / 6
    for batch in ClusterLoader(parts, batch_size=2, shuffle=True, num_workers=1):
        is_induced(batch, data)
        assert is_undirected(batch.edge_index)
    for k, part in enumerate(parts):
        is_induced(part, data)
        assert part.num_nodes == sizes[k]
    said = [record for record in caplog.records if "no METIS is installed" in record.message]
    assert len(said) == 1 and said[0].levelname == "WARNING"
    assert report.snapshot()["pyg.ClusterData"].accelerated == 1  # the second came from the folder


def test_more_clusters_than_nodes():
    data = Data(x=torch.arange(3), edge_index=torch.tensor([[0, 1], [1, 0]]), edge_attr=torch.arange(2), num_nodes=3)
    sizes = ClusterData(data, 5, log=False).partition.partptr.diff()
    assert sizes.shape == (5,) and sizes.sum() == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("q", [1.0, 0.5])
def test_node2vec(q, workers):
    data = graph()
    model = Node2Vec(data.edge_index, 8, walk_length=6, context_size=4, walks_per_node=2, q=q, num_nodes=NODES)
    copy.deepcopy(model)
    edges = coalesce(torch.cat([data.edge_index, torch.arange(NODES).expand(2, -1)], 1))  # or it stays
    for positive, negative in model.loader(batch_size=40, num_workers=workers):
        assert positive.shape == negative.shape == (40 * 2 * 3, 4)
        steps = torch.stack([positive[:, :-1].flatten(), positive[:, 1:].flatten()])
        assert coalesce(torch.cat([edges, steps], 1)).shape == edges.shape
        assert model.loss(positive, negative).isfinite()
    assert workers or report.snapshot()["pyg.random_walk"].accelerated == 3


def test_node2vec_scripted():
    model = torch.jit.script(Node2Vec(graph().edge_index, 8, walk_length=6, context_size=4, num_nodes=NODES))
    positive, negative = model.sample(torch.arange(5))
    assert model.loss(positive, negative).isfinite()


def test_rooted_walks():
    data = Data(x=torch.randn(4, 1), edge_index=torch.tensor([[0, 1, 2], [1, 2, 1]]), num_nodes=4)
    out = RootedRWSubgraph(walk_length=3, repeat=20)(data)
    nodes = [out.n_id[out.n_sub_batch == root].tolist() for root in range(4)]
    assert nodes == [[0, 1, 2], [1, 2], [1, 2], [3]]


@pytest.mark.skipif(WITH_TORCH_SPARSE or WITH_PYG_LIB, reason="PyG can do without us")
def test_the_frameworks_by_choice(monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "framework")
    data = graph()
    for make in (
        lambda: SAINT["nodes"](data),
        lambda: NeighborSampler(data.edge_index, [2]),
        lambda: ClusterData(data, 4, log=False),
        lambda: Node2Vec(data.edge_index, 8, 4, 2),
    ):
        with pytest.raises(ImportError):
            make()
