"""Training with torch_sparse installed, accelerated against alone: its samplers, batches and models on matrices."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_geometric")
pytest.importorskip("torch_sparse", reason="torch_sparse is not installed: make test-sparse builds it")
from sparse_cases import D, features, indices
from torch_geometric import loader, nn
from torch_geometric import transforms as T
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import trim_to_layer
from torch_sparse import SparseTensor

from gnnaccel import pyg_backend, report

NODES, EDGES, CLASSES = 90, 600, 4


def graph(nodes=NODES, edges=EDGES, seed=0):
    row, col = indices(nodes, nodes, seed, edges)
    x = features(nodes, D, seed=seed).detach()
    y = torch.arange(nodes) % CLASSES
    return Data(x=x, y=y, edge_index=torch.stack([col, row]), train_mask=torch.arange(nodes) % 2 == 0)


class Net(torch.nn.Module):
    """Layers of one kind."""

    def __init__(self, conv=nn.SAGEConv, layers=2):
        super().__init__()
        sizes = [D, *[8] * (layers - 1), CLASSES]
        self.convs = torch.nn.ModuleList([conv(a, b) for a, b in pairwise(sizes)])

    def forward(self, x, edges):
        for conv in self.convs[:-1]:
            x = conv(x, edges).relu()
        return self.convs[-1](x, edges)


def edges_of(batch):
    return batch.adj_t if "adj_t" in batch else batch.edge_index


def train(model, batches, step):
    """Loss of each batch over two epochs, then the parameters. The same seed gives the same batches."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    out = []
    for _ in range(2):
        for batch in batches:
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
            out.append(loss.detach())
    return [*out, *(p.detach() for p in model.parameters())]


def assert_same_training(plain, make_batches, step):
    """The accelerated copy learns the same; nothing of it is left to PyG."""
    plain = plain.double()
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    expected = train(plain, make_batches(), step)
    report.reset()
    got = train(model, make_batches(), step)
    assert len(got) == len(expected) > 4
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
    sites = report.snapshot()
    assert sites and not any(site.left for site in sites.values()), sites


def seeds_loss(model, batch):
    size = batch.batch_size
    return F.cross_entropy(model(batch.x, edges_of(batch))[:size], batch.y[:size])


def nodes_loss(model, batch):
    return F.cross_entropy(model(batch.x, edges_of(batch)), batch.y)


CONVS = {"SAGE": nn.SAGEConv, "GCN": nn.GCNConv, "GAT": nn.GATConv}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [None, T.ToSparseTensor()], ids=["edge_index", "adj_t"])
@pytest.mark.parametrize("conv", CONVS)
def test_neighbor_loader(conv, transform, workers):
    def batches():
        return loader.NeighborLoader(
            graph(), [4, 3], batch_size=20, input_nodes=graph().train_mask, transform=transform, num_workers=workers
        )

    assert_same_training(Net(CONVS[conv]), batches, seeds_loss)


@pytest.mark.parametrize("workers", [0, 2])
def test_neighbor_loader_on_a_matrix(workers):
    """Sampled from adj_t, where the data has no edge_index."""
    data = T.ToSparseTensor()(graph())
    assert_same_training(
        Net(), lambda: loader.NeighborLoader(data, [4, 3], batch_size=20, num_workers=workers), seeds_loss
    )


def test_trimmed_layers():
    """A matrix that shrinks from layer to layer, as a sampler orders it: each hop's nodes, with edges from the next."""
    hops, (row, col) = [20, 30, 40], indices(50, 90, count=400)
    adj_t = SparseTensor(row=row, col=torch.where(row < 20, col % 50, col), sparse_sizes=(90, 90))
    x, model = features(90, D), Net(layers=3).double()
    results = []
    for net in (model, pyg_backend.accelerate(copy.deepcopy(model))):
        out, adj = x, adj_t
        for i, conv in enumerate(net.convs):
            out, adj, _ = trim_to_layer(i, hops, [200, 200, 200], out, adj)
            out = conv(out, adj)
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), [x, *net.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("transform", [None, T.ToSparseTensor()], ids=["edge_index", "adj_t"])
def test_cluster_loader(monkeypatch, transform):
    """METIS only chooses the parts, and torch_sparse is built without it by default: they are chosen here."""
    monkeypatch.setattr(loader.ClusterData, "_metis", lambda self, edge_index, num_nodes: torch.arange(num_nodes) % 6)

    def step(model, batch):
        return nodes_loss(model, batch if transform is None else transform(batch))

    parts = loader.ClusterData(graph(), num_parts=6, log=False)
    assert_same_training(Net(nn.GCNConv), lambda: loader.ClusterLoader(parts, batch_size=2, shuffle=True), step)


SAMPLERS = {
    "saint nodes": lambda: loader.GraphSAINTNodeSampler(graph(), batch_size=40, num_steps=3),
    "saint walks": lambda: loader.GraphSAINTRandomWalkSampler(graph(), batch_size=8, walk_length=2, num_steps=3),
    "shadow": lambda: loader.ShaDowKHopSampler(graph(), depth=2, num_neighbors=4, batch_size=30),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_other_samplers(name):
    def step(model, batch):
        if name != "shadow":
            return nodes_loss(model, batch)
        return F.cross_entropy(model(batch.x, batch.edge_index)[batch.root_n_id], batch.y)

    torch.set_num_threads(1)  # with more, torch_sparse's ego-graphs differ from run to run
    assert_same_training(Net(), SAMPLERS[name], step)


def test_neighbor_sampler_of_matrices():
    """PyG's first sampler hands out one bipartite SparseTensor per layer."""
    data = T.ToSparseTensor()(graph())

    def step(model, item):
        size, nodes, layers = item
        x = data.x[nodes]
        for i, (adj, _, shape) in enumerate(layers):
            x = model.convs[i]((x, x[: shape[1]]), adj).relu()
        return F.cross_entropy(x, data.y[nodes[:size]])

    assert_same_training(
        Net(), lambda: loader.NeighborSampler(data.adj_t, sizes=[4, 3], batch_size=30, shuffle=True), step
    )


@pytest.mark.parametrize("conv", [nn.GCNConv, nn.GINConv, nn.GATv2Conv])
def test_batches_of_matrices(conv):
    if conv is nn.GINConv:
        conv = lambda a, b: nn.GINConv(torch.nn.Linear(a, b))  # noqa: E731
    data = [T.ToSparseTensor()(graph(20 + 5 * i, 90, seed=i)) for i in range(5)]
    assert_same_training(Net(conv), lambda: loader.DataLoader(data, batch_size=2), nodes_loss)
    batch = Batch.from_data_list(data)
    model = pyg_backend.accelerate(Net(conv)).double().eval()
    parts = [model(d.x, d.adj_t) for d in data]
    torch.testing.assert_close(model(batch.x, batch.adj_t), torch.cat(parts), rtol=1e-9, atol=1e-10)
    again = batch.to_data_list()[3]
    torch.testing.assert_close(model(again.x, again.adj_t), parts[3], rtol=1e-9, atol=1e-10)


MODELS = {
    "GCN": lambda: nn.models.GCN(D, 8, 3, CLASSES),
    "GCN jumping": lambda: nn.models.GCN(D, 8, 3, CLASSES, jk="cat"),
    "GCN cached": lambda: nn.models.GCN(D, 8, 2, CLASSES, cached=True),
    "SAGE": lambda: nn.models.GraphSAGE(D, 8, 3, CLASSES, norm="batch"),
    "GIN": lambda: nn.models.GIN(D, 8, 3, CLASSES),
    "GAT": lambda: nn.models.GAT(D, 8, 3, CLASSES, heads=2),
    "GATv2": lambda: nn.models.GAT(D, 8, 3, CLASSES, v2=True),
    "PNA": lambda: nn.models.PNA(
        D, 8, 2, CLASSES, aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([1, 2, 3])
    ),
    "EdgeCNN": lambda: nn.models.EdgeCNN(D, 8, 2, CLASSES),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_on_sparse_batches(name):
    data = T.ToSparseTensor()(graph())
    torch.manual_seed(1)
    plain = MODELS[name]().double()
    model = pyg_backend.accelerate(copy.deepcopy(plain))
    expected = train(plain, [data], nodes_loss)
    got = train(model, [data], nodes_loss)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_transforms_of_matrices():
    """T.GCNNorm and values made by T.ToSparseTensor(attr=...)."""
    data = graph()
    data.weight = torch.linspace(0.1, 1, data.num_edges, dtype=torch.float64)
    data = T.Compose([T.ToSparseTensor(attr="weight"), T.GCNNorm()])(data)
    assert data.adj_t.has_value()

    def conv(rows, cols):
        return nn.GCNConv(rows, cols, normalize=False)

    assert_same_training(Net(conv), lambda: [data], nodes_loss)


def hetero():
    data, sizes = HeteroData(), {"a": 60, "b": 45}
    for kind, size in sizes.items():
        data[kind].x = features(size, D, seed=size).detach()
        data[kind].y = torch.arange(size) % CLASSES
    for i, (source, name, target) in enumerate([("a", "to", "b"), ("b", "back", "a"), ("a", "self", "a")]):
        row, col = indices(sizes[target], sizes[source], i, 250)
        data[source, name, target].edge_index = torch.stack([col, row])
    return data


@pytest.mark.parametrize("loaded", [False, True])
def test_hetero(loaded):
    data = hetero()
    plain = nn.to_hetero(Net(lambda a, b: nn.SAGEConv((a, a), b)), data.metadata())

    def batches():
        if not loaded:
            return [T.ToSparseTensor()(hetero())]
        return loader.NeighborLoader(data, [4, 3], input_nodes="a", batch_size=20, transform=T.ToSparseTensor())

    def step(model, batch):
        out = model(batch.x_dict, batch.adj_t_dict)
        size = batch["a"].batch_size if loaded else batch["a"].num_nodes
        return F.cross_entropy(out["a"][:size], batch["a"].y[:size])

    assert_same_training(plain, batches, step)
