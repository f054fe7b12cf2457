"""Mini-batches of every loader, worker processes, and graphs that change between two calls of one model."""

import copy
import gc

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import D, N, edges, rand, same, train
from torch_geometric import loader, nn, utils
from torch_geometric.data import Batch, Data
from torch_geometric.nn import models

from gnnaccel import pyg_backend
from gnnaccel.graph.cache import derived
from gnnaccel.pyg_backend import samplers

SPARSE = pyg.typing.WITH_TORCH_SPARSE
needs_sparse = pytest.mark.skipif(not SPARSE, reason="torch_sparse is not installed")


@pytest.fixture(autouse=True)
def _samplers():
    """Batches are ours with layers of PyG's alone, too: those of one seed are the same."""
    samplers.enable()
    yield
    samplers.disable()


def graph(seed=0):
    return Data(rand(N, D, seed=seed), edges(seed=seed), edge_weight=rand(110, seed=seed).abs(), y=torch.arange(N) % 3)


def graphs(count=7):
    return [graph(seed) for seed in range(count)]


MODELS = {
    "GCN": lambda: models.GCN(D, 8, 2, 3),
    "SAGE": lambda: models.GraphSAGE(D, 8, 2, 3, aggr="max"),
    "GAT": lambda: models.GAT(D, 8, 2, 3, heads=2),
}


def epochs(make_loader, model="GCN", weighted=False, seed=3):
    """Two epochs of training over a loader."""

    def program(wrap):
        net = wrap(MODELS[model]())
        out = []
        torch.manual_seed(seed)
        for _ in range(2):
            for batch in make_loader():
                net.zero_grad()
                more = {"edge_weight": batch.edge_weight} if weighted else {}
                out.append(train(net, batch.x, batch.edge_index, **more))
        return out

    return program


@pytest.mark.parametrize("model", MODELS)
def test_data_loader(model):
    same(epochs(lambda: loader.DataLoader(graphs(), batch_size=3, shuffle=True), model))


LOADERS = {
    "weights": epochs(lambda: loader.DataLoader(graphs(), batch_size=2), weighted=True),
    "list": lambda wrap: _lists(wrap),
    "dynamic batches": epochs(
        lambda: loader.DataLoader(graphs(), batch_sampler=loader.DynamicBatchSampler(graphs(), max_num=60))
    ),
    "imbalanced": epochs(
        lambda: loader.DataLoader(graphs(), batch_size=2, sampler=loader.ImbalancedSampler(torch.arange(7) % 2))
    ),
    "random nodes": epochs(lambda: loader.RandomNodeLoader(graph(), num_parts=3, shuffle=True)),
    "zip": lambda wrap: _zipped(wrap),
}


def _lists(wrap):
    net = wrap(MODELS["SAGE"]())
    out = []
    for batch in loader.DataListLoader(graphs(), batch_size=3):
        joined = Batch.from_data_list(batch)
        out.append(train(net, joined.x, joined.edge_index))
        out.extend(net(item.x, item.edge_index) for item in joined.to_data_list())
    return out


def _zipped(wrap):
    net, out = wrap(MODELS["GAT"]()), []
    parts = [loader.RandomNodeLoader(graph(k), num_parts=2) for k in range(2)]
    for first, second in zip(*parts, strict=True):
        out.append((train(net, first.x, first.edge_index), train(net, second.x, second.edge_index)))
    return out


@pytest.mark.parametrize("name", LOADERS)
def test_loader(name):
    same(LOADERS[name])


SAMPLED = {
    "neighbours": lambda: loader.NeighborLoader(graph(), [3, 3], batch_size=7),
    "neighbours directed": lambda: loader.NeighborLoader(graph(), [3, 3], batch_size=7, directed=True, replace=True),
    "neighbours induced": lambda: loader.NeighborLoader(graph(), [2, 2], batch_size=7, subgraph_type="induced"),
    "links": lambda: loader.LinkNeighborLoader(
        graph(), [3, 3], edge_label_index=edges(seed=4)[:, :20], neg_sampling_ratio=1.0, batch_size=9
    ),
    "ShaDow": lambda: loader.ShaDowKHopSampler(graph(), depth=2, num_neighbors=3, batch_size=6),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_loader(name):
    same(epochs(SAMPLED[name], "SAGE"))


def test_layerwise_inference():
    def program(wrap):
        net = wrap(MODELS["GAT"]()).eval()
        return net.inference(loader.NeighborLoader(graph(), [-1], batch_size=8)), net(graph().x, graph().edge_index)

    same(program)


CLUSTERED = {
    "SAINT nodes": lambda: loader.GraphSAINTNodeSampler(graph(), batch_size=9, num_steps=3),
    "SAINT edges": lambda: loader.GraphSAINTEdgeSampler(graph(), batch_size=9, num_steps=3),
    "SAINT walks": lambda: loader.GraphSAINTRandomWalkSampler(graph(), batch_size=5, walk_length=2, num_steps=3),
}


@needs_sparse
@pytest.mark.parametrize("name", CLUSTERED)
def test_subgraph_loader(name):
    same(epochs(CLUSTERED[name]))


def test_cluster_loader():
    def program(wrap):
        data = graph()
        parts = loader.ClusterData(data, num_parts=4, log=False)
        net, out = wrap(MODELS["GCN"]()), []
        for batch in loader.ClusterLoader(parts, batch_size=2):
            out.append(train(net, batch.x, batch.edge_index))
        return out

    try:
        program(lambda model: model)
    except ImportError as error:
        pytest.skip(f"PyG: {error}")
    same(program)


class WithLayer(torch.utils.data.Dataset):
    """Runs a layer in the worker itself, as a transform may."""

    def __init__(self, layer):
        self.layer = layer

    def __len__(self):
        return 4

    def __getitem__(self, k):
        data = graph(k)
        with torch.no_grad():
            data.x = self.layer(data.x, data.edge_index)
        return data


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_processes(start):
    """Batches made by two workers, which run an accelerated layer themselves; by spawn it travels as a pickle."""
    torch.set_num_threads(1)
    plain = nn.GCNConv(D, D)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    layer(graph().x, graph().edge_index)  # structure of the parent is there when it forks
    expected = [batch.x for batch in loader.DataLoader(WithLayer(plain), batch_size=2)]
    workers = loader.DataLoader(WithLayer(layer), batch_size=2, num_workers=2, multiprocessing_context=start)
    for batch, want in zip(workers, expected, strict=True):
        torch.testing.assert_close(batch.x, want)
        torch.testing.assert_close(layer(batch.x, batch.edge_index), plain(batch.x, batch.edge_index))


def _add_edges(data):
    data.edge_index = torch.cat([data.edge_index, edges(seed=5)[:, :9]], dim=1)


def _write(data):
    data.edge_index[1, ::3] = 2


def _sort(data):
    data.edge_index = utils.sort_edge_index(data.edge_index, sort_by_row=False)


def _swap(data):
    data.edge_index = data.edge_index.flip(0)


def _write_part(data):
    data.edge_index[:, :20].fill_(3)


def _add_node(data):
    data.x = torch.cat([data.x, rand(2, D, seed=8)])
    data.edge_index = torch.cat([data.edge_index, torch.tensor([[N], [N + 1]])], dim=1)


CHANGES = {
    "edges added": _add_edges,
    "edges removed": lambda data: setattr(data, "edge_index", data.edge_index[:, 7:-7]),
    "all removed": lambda data: setattr(data, "edge_index", data.edge_index[:, :0]),
    "written": _write,
    "written in a view": _write_part,
    "copied into": lambda data: data.edge_index.copy_(edges(seed=6)),
    "sorted": _sort,
    "turned": _swap,
    "resized in place": lambda data: data.edge_index.resize_(2, 50),
    "set to another": lambda data: data.edge_index.set_(edges(seed=7)),
    "new storage": lambda data: setattr(data.edge_index, "data", edges(seed=8)),
    "coalesced": lambda data: data.coalesce(),
    "moved": lambda data: data.to("cpu"),
    "int64 again": lambda data: data.apply(lambda t: t.clone()),
    "shared": lambda data: data.share_memory_(),
    "node added": _add_node,
    "random": lambda data: data.edge_index.random_(0, N),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("model", MODELS)
def test_changed_between_calls(model, change):
    """The second result is that of the changed graph; a clone taken before it keeps the first."""

    def program(wrap):
        net, data = wrap(MODELS[model]()), graph()
        before = train(net, data.x, data.edge_index)
        clone = data.clone()
        CHANGES[change](data)
        after = net(data.x, data.edge_index)
        return before, after, net(clone.x, clone.edge_index), net(copy.copy(data).x, copy.deepcopy(data).edge_index)

    same(program)


def test_weights_changed_between_calls():
    def program(wrap):
        net, data, out = wrap(MODELS["GCN"]()), graph(), []
        for change in (lambda w: w.mul_(2), lambda w: w.zero_(), lambda w: w.add_(1), lambda w: w.requires_grad_()):
            change(data.edge_weight)
            out.append(net(data.x, data.edge_index, data.edge_weight))
        return out

    same(program)


def test_batches_taken_apart():
    def program(wrap):
        net, batch = wrap(MODELS["GAT"]()), Batch.from_data_list(graphs(3))
        out = [net(batch.x, batch.edge_index)]
        out += [net(batch[k].x, batch[k].edge_index) for k in range(3)]
        sub = batch.subgraph(torch.arange(0, 3 * N, 2))
        return *out, net(sub.x, sub.edge_index)

    same(program)


def test_many_batches_leave_nothing_behind():
    derived.invalidate()
    net = pyg_backend.accelerate(MODELS["GCN"]())
    data = graphs(3)
    for _ in range(10):
        for batch in loader.DataLoader(data, batch_size=2):
            net(batch.x, batch.edge_index, batch.edge_weight).sum().backward()
    del batch
    gc.collect()
    assert len(derived) == 0
