"""Pooling and norms of torch_geometric.nn before, between and after layers, with the plug-in and without."""

import pytest
import torch

pytest.importorskip("torch_geometric")
from pyg_compare import D, N, backward, edges, grads, rand, same, train
from torch_geometric import nn


def features():
    return rand(N, D, grad=True)


def batch_vector():
    return torch.arange(N) // (N // 2)


def pooled(make):
    def program(wrap):
        pool = wrap(make())
        x = features()
        out = pool(x, edges(), batch=batch_vector())
        backward(out[0])
        return [o for o in out if isinstance(o, torch.Tensor)], grads(pool, x)

    return program


POOLS = {
    "SAG GraphConv": pooled(lambda: nn.SAGPooling(D, 0.5)),
    "SAG GAT": pooled(lambda: nn.SAGPooling(D, min_score=0.02, GNN=nn.GATConv)),
    "SAG GCN": pooled(lambda: nn.SAGPooling(D, 0.7, GNN=nn.GCNConv, nonlinearity=torch.sigmoid)),
    "ASA": pooled(lambda: nn.ASAPooling(D, 0.5, dropout=0.1)),
    "ASA GCN": pooled(lambda: nn.ASAPooling(D, 0.5, GNN=nn.GCNConv, add_self_loops=True)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling(name):
    same(POOLS[name])


@pytest.mark.parametrize("name", ["TopK", "Edge", "Mem", "PAN", "Cluster"])
def test_pooling_between_layers(name):
    """Pools without a layer of their own make the edges of the next layer."""

    def program(wrap):
        first, last = wrap(nn.GCNConv(D, 8)), wrap(nn.GATConv(8, 4, heads=2))
        h = first(features(), edges()).relu()
        batch, index = batch_vector(), edges()
        if name == "TopK":
            h, index, *_ = nn.TopKPooling(8, 0.5)(h, index, batch=batch)
        elif name == "Edge":
            h, index, *_ = nn.EdgePooling(8)(h, index, batch)
        elif name == "Cluster":
            h, index, *_ = nn.ClusterPooling(8)(h, index, batch)
        elif name == "PAN":
            pan = wrap(nn.PANConv(8, 8, filter_size=2))
            h, _ = pan(h, index)
            return train(last, h, index), h, grads(pan)
        else:
            h = nn.MemPooling(8, 8, heads=2, num_clusters=4)(h, batch)[0].flatten(0, 1)
            index = edges(h.shape[0], h.shape[0], 20)
        return train(last, h, index), grads(first)

    if name == "PAN":
        pytest.importorskip("torch_sparse", reason="PANConv needs torch_sparse")
    same(program)


NORMS = {
    "BatchNorm": lambda: nn.BatchNorm(8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "LayerNorm nodes": lambda: nn.LayerNorm(8, mode="node"),
    "InstanceNorm": lambda: nn.InstanceNorm(8),
    "GraphNorm": lambda: nn.GraphNorm(8),
    "PairNorm": lambda: nn.PairNorm(),
    "GraphSizeNorm": lambda: nn.GraphSizeNorm(),
    "MessageNorm": lambda: nn.MessageNorm(True),
    "MeanSubtraction": lambda: nn.MeanSubtractionNorm(),
    "DiffGroupNorm": lambda: nn.DiffGroupNorm(8, 2),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_after_layer(name):
    def program(wrap):
        conv, norm, last = wrap(nn.SAGEConv(D, 8)), NORMS[name](), wrap(nn.GINConv(torch.nn.Linear(8, 4)))
        x = features()
        h = conv(x, edges())
        h = norm(h, h.detach() * 2) if name == "MessageNorm" else norm(h)
        return train(last, h, edges()), grads(conv, x), grads(norm)

    same(program)
