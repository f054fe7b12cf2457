"""What users give PyG's loaders on ours: edges out of range, fan-outs of all kinds, changed graphs, lost workers."""

import os
import signal

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import (
    ClusterData,
    GraphSAINTNodeSampler,
    HGTLoader,
    NeighborLoader,
    NeighborSampler,
    ShaDowKHopSampler,
)
from torch_geometric.nn import Node2Vec
from torch_geometric.typing import WITH_TORCH_SPARSE

from gnnaccel import pyg_backend, report

NODES = 60


@pytest.fixture(autouse=True)
def _plugin():
    report.reset()
    pyg_backend.enable()
    yield
    pyg_backend.disable()


def graph(index=None):
    index = torch.randint(NODES, (2, 300)) if index is None else index
    return Data(x=torch.arange(NODES), edge_index=index, edge_attr=torch.arange(index.shape[1]), num_nodes=NODES)


def of_types(index):
    data = HeteroData()
    data["a"].x, data["b"].x = torch.arange(NODES), torch.arange(NODES)
    data["a", "to", "b"].edge_index = index
    data["b", "to", "b"].edge_index = torch.randint(NODES, (2, 300))
    return data


LOADERS = {
    "neighbors": lambda index: NeighborLoader(graph(index), [-1], batch_size=NODES),
    "types": lambda index: NeighborLoader(of_types(index), [-1], "b", batch_size=NODES),
    "induced": lambda index: NeighborLoader(of_types(index), [-1], "b", batch_size=NODES, subgraph_type="induced"),
    "HGT": lambda index: HGTLoader(of_types(index), [NODES], "b", batch_size=NODES),
}
OF_SPARSE_TENSORS = {
    "shadow": lambda index: ShaDowKHopSampler(graph(index), 1, -1, batch_size=NODES),
    "saint": lambda index: GraphSAINTNodeSampler(graph(index), NODES * 20),
    "first": lambda index: NeighborSampler(index, [-1], batch_size=NODES, num_nodes=NODES),
}
OTHERS = {
    "clusters": lambda index: [ClusterData(graph(index), 3, log=False)],
    "walks": lambda index: [Node2Vec(index, 4, 3, 2, num_nodes=NODES).pos_sample(torch.arange(NODES))],
}


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("node", [NODES, -1, 1 << 40])
@pytest.mark.parametrize("name", [*LOADERS, *([] if WITH_TORCH_SPARSE else OF_SPARSE_TENSORS), *OTHERS])
def test_edges_of_nodes_that_there_are_not(name, node, end):
    """Of some of them PyG's own conversion writes beside its result."""
    index = torch.randint(NODES, (2, 300))
    index[end, 20:] = node
    with pytest.raises((ValueError, IndexError), match=r"expected nodes in|out of range"):
        next(iter((LOADERS | OF_SPARSE_TENSORS | OTHERS)[name](index)))


def test_edges_that_are_not_sorted_as_they_are_said_to_be():
    index = torch.randint(NODES, (2, 300))
    with pytest.raises(ValueError, match="is_sorted"):
        NeighborLoader(graph(index), [2], is_sorted=True)
    index = index[:, index[1].argsort(stable=True)]
    (batch,) = NeighborLoader(graph(index), [-1], torch.arange(5), batch_size=5, is_sorted=True)
    assert torch.equal(batch.n_id[batch.edge_index], index[:, batch.e_id])


@pytest.mark.parametrize(
    "fanouts", [(2, 1), [np.int64(2), np.int32(1)], [torch.tensor(2), 1]], ids=["tuple", "np", "t"]
)
def test_kinds_of_fan_outs(fanouts):
    (batch,) = NeighborLoader(graph(), fanouts, torch.arange(9), batch_size=9)
    assert torch.bincount(batch.edge_index[1]).max() <= 2


@pytest.mark.parametrize("fanouts", [[1.5], ["2"], [None], [torch.tensor([1, 2])], np.array([2, 2])], ids=str)
def test_what_is_no_fan_out(fanouts):
    with pytest.raises(TypeError, match="num_neighbors"):
        next(iter(NeighborLoader(graph(), fanouts)))


def test_seeds_that_are_repeated_isolated_and_none():
    data = graph(torch.tensor([[1, 2], [0, 0]]))
    (batch,) = NeighborLoader(data, [2, 2], torch.tensor([0, 5, 0]), batch_size=3)
    assert batch.n_id[:3].tolist() == [0, 5, 0] and sorted(batch.n_id[3:].tolist()) == [1, 2]
    assert torch.equal(batch.x, batch.n_id) and batch.num_edges == 4
    (batch,) = NeighborLoader(data, [0, 3], torch.tensor([0, 5]), batch_size=2)
    assert batch.n_id.tolist() == [0, 5] and batch.num_edges == 0
    assert not list(NeighborLoader(data, [2], torch.zeros(NODES, dtype=torch.bool)))


def test_a_graph_that_is_changed_after_the_loader_was_made():
    """Edges are those of then; features those of now."""
    data = graph()
    before = data.edge_index.clone()
    loader = NeighborLoader(data, [-1], torch.arange(9), batch_size=9)
    data.edge_index[:] = 0
    data.x += 1000
    (batch,) = loader
    assert torch.equal(batch.n_id[batch.edge_index], before[:, batch.e_id]) and torch.equal(batch.x, batch.n_id + 1000)


def test_induced_batches_are_drawn_by_no_weights_and_say_so(caplog):
    data = graph()
    data.weight = torch.rand(300)
    for _ in range(2):
        next(iter(NeighborLoader(data, [2], weight_attr="weight", subgraph_type="induced")))
    assert [record.levelname for record in caplog.records if "no weights" in record.message] == ["WARNING"]


def test_a_worker_that_is_killed():
    loader = NeighborLoader(graph(), [2], batch_size=1, num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises((RuntimeError, OSError, EOFError)):  # as torch has it, by the moment
        list(batches)
    worker.join()
    assert len(list(loader)) == NODES
