"""`gnnaccel.renumber`: the same graph under other numbers, features along with it; results come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dgl_compare import dgl
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GCNConv

import gnnaccel
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.reorder import hit_rate

METHODS = ["communities", "rcm", "degree"]


def scattered(num_nodes=6000, width=8) -> torch.Tensor:
    """Edges of a band under mixed node numbers, in mixed order."""
    torch.manual_seed(0)
    rows = torch.arange(num_nodes).repeat_interleave(12)
    cols = (rows + torch.randint(1, width, rows.shape)) % num_nodes
    name = torch.randperm(num_nodes)
    return torch.stack([name[cols], name[rows]])[:, torch.randperm(rows.numel())]


EDGES = scattered()
N, E = 6000, EDGES.shape[1]


@pytest.mark.parametrize("method", METHODS)
def test_sums_come_back(method):
    graph = Graph.from_coo(EDGES[1], EDGES[0], num_rows=N, num_cols=N)
    new, numbers = gnnaccel.renumber(graph, method)
    x, w = torch.rand(N, 7, dtype=torch.float64), torch.rand(E, dtype=torch.float64)
    got = numbers.results(gnnaccel.ops.spmm(new, numbers.features(x), numbers.edges(w)))
    torch.testing.assert_close(got, gnnaccel.ops.spmm(graph, x, w), rtol=1e-12, atol=1e-12)
    assert numbers.is_profitable and torch.equal(numbers.place[numbers.order], torch.arange(N))
    assert method == "degree" or hit_rate(new) > hit_rate(graph) + 0.25
    assert torch.equal(numbers.results(numbers.features(x)), x)
    edges = gnnaccel.renumber(EDGES.int(), method)[0]
    assert edges.dtype == torch.int32 and torch.equal(edges.long(), numbers.nodes(EDGES)[:, numbers.edge_order])
    keys = edges[1].long() * N + edges[0]
    assert (keys.diff() >= 0).all() and new.edge_ids is None  # by rows, then by sources


def test_pyg_data_trains_to_the_same():
    data = Data(x=torch.rand(N, 5), edge_index=EDGES, y=torch.randint(3, (N,)), train_mask=torch.rand(N) < 0.3)
    data.edge_weight, data.title, data.edge_label_index = torch.rand(E), "band", EDGES[:, :10]
    new, numbers = gnnaccel.renumber(data)
    assert isinstance(new, Data) and new.title == "band" and data.edge_index is EDGES
    assert torch.equal(new.y, data.y[numbers.order]) and torch.equal(new.train_mask, data.train_mask[numbers.order])
    assert torch.equal(new.edge_weight, data.edge_weight[numbers.edge_order])
    assert torch.equal(new.edge_label_index, numbers.nodes(EDGES[:, :10]))
    conv = GCNConv(5, 4)
    want = conv(data.x, data.edge_index, data.edge_weight)
    torch.testing.assert_close(numbers.results(conv(new.x, new.edge_index, new.edge_weight)), want)


def test_dgl_graphs():
    g = dgl.graph((EDGES[0], EDGES[1]), num_nodes=N)
    g.ndata["h"], g.edata["w"] = torch.rand(N, 3), torch.rand(E)
    new, numbers = gnnaccel.renumber(g)
    assert torch.equal(new.edata["w"], numbers.edges(g.edata["w"])) and torch.equal(
        new.ndata["h"], g.ndata["h"][numbers.order]
    )
    assert torch.equal(torch.stack(new.edges(order="eid")), numbers.nodes(EDGES)[:, numbers.edge_order])
    with pytest.raises(TypeError, match="batch of 2"):
        gnnaccel.renumber(dgl.batch([g, g]))
    with pytest.raises(TypeError, match="one kind"):
        gnnaccel.renumber(dgl.heterograph({("a", "to", "b"): ([0], [0])}))


def test_dgl_keeps_kinds_and_formats_do_not_matter():
    g = dgl.heterograph({("user", "follows", "user"): (EDGES[0].int(), EDGES[1].int())}).formats("csc")
    g.nodes["user"].data["h"] = torch.rand(N, 2, 2)
    new, numbers = gnnaccel.renumber(g, "degree")
    assert new.canonical_etypes == g.canonical_etypes and new.idtype == torch.int32
    assert torch.equal(new.nodes["user"].data["h"], g.nodes["user"].data["h"][numbers.order])
    ends = g.edges(order="srcdst")
    want = set(zip(*(numbers.nodes(e).tolist() for e in ends), strict=True))
    assert set(zip(*(e.tolist() for e in new.edges(order="eid")), strict=True)) == want


class Rooted(Data):
    def __inc__(self, key, value, *args, **kwargs):
        return self.num_nodes if key == "roots" else super().__inc__(key, value, *args, **kwargs)


def test_pyg_attributes_of_every_kind():
    data = Rooted(x=torch.rand(N, 2), edge_index=EDGES.int(), num_nodes=N, roots=torch.arange(E) % N)
    data.refractive_index, data.index_mask = torch.rand(4), torch.rand(N) < 0.5
    data.names, data.pair, data.y = [str(i) for i in range(N)], tuple(range(N)), torch.tensor([3])
    data.array, data.edge_label, data.edge_title = np.random.rand(N, 2), torch.arange(7), "w"
    data.put_edge_index(EDGES, layout="coo", is_sorted=True, size=(N, N))
    new, numbers = gnnaccel.renumber(data)
    order = numbers.order.tolist()
    assert torch.equal(new.roots, numbers.nodes(data.roots)) and new.y is data.y and new.edge_title == "w"
    assert new.names == [data.names[i] for i in order] and new.pair == tuple(data.pair[i] for i in order)
    assert isinstance(new.array, np.ndarray) and np.array_equal(new.array, data.array[order])
    assert new.refractive_index is data.refractive_index and torch.equal(new.index_mask, data.index_mask[order])
    assert new.edge_label is data.edge_label and not new.get_all_edge_attrs()[0].is_sorted
    assert data.get_all_edge_attrs()[0].is_sorted


def test_pyg_edge_index_stays_one():
    new, numbers = gnnaccel.renumber(EdgeIndex(EDGES, sparse_size=(N, N)))
    assert type(new) is EdgeIndex and new.sparse_size() == (N, N)
    assert torch.equal(new.as_tensor(), gnnaccel.renumber(EDGES, num_nodes=N)[0]) and numbers.is_profitable


def test_isolated_nodes():
    numbers = gnnaccel.renumber(EDGES, num_nodes=N + 5)[1]
    assert numbers.features(torch.rand(N + 5, 1)).shape == (N + 5, 1)


def test_no_order_pays():
    edges = torch.randint(3000, (2, 60_000))
    new, numbers = gnnaccel.renumber(edges)
    assert (
        not numbers.is_profitable
        and torch.equal(new, edges)
        and torch.equal(numbers.order, torch.arange(int(edges.max()) + 1))
    )


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: HeteroData(), TypeError, "HeteroData"),
        (lambda: Batch.from_data_list([Data(x=torch.rand(2, 1), edge_index=EDGES[:, :0])] * 2), TypeError, "Batch"),
        (lambda: Data(x=torch.rand(3, 1)), TypeError, "edge_index"),
        (
            lambda: Data(edge_index=EDGES, num_nodes=N, train_idx=torch.arange(5)),
            ValueError,
            "train_idx holds integers",
        ),
        (lambda: Data(edge_index=EDGES, num_nodes=N, train_idx=np.arange(5)), ValueError, "train_idx holds int"),
        (lambda: Data(edge_index=EDGES, num_nodes=N, train=[0, 1]), ValueError, "train has lists of integers"),
        (lambda: Data(edge_index=EDGES, num_nodes=N, split={"a": (0,)}), ValueError, "split has lists of integers"),
        (lambda: Data(edge_index=EDGES, num_nodes=N, parts=[torch.arange(5)]), TypeError, "list with arrays"),
        (
            lambda: Data(edge_index=EDGES, num_nodes=N, my_index=torch.tensor([-1])),
            ValueError,
            "my_index: expected node",
        ),
        (lambda: Data(edge_index=EDGES[:, :N], num_nodes=N, weight=torch.rand(N)), ValueError, "whose weight is"),
        (lambda: Graph.from_coo(EDGES[1], EDGES[0], num_rows=N, num_cols=N + 1), ValueError, "same nodes"),
        (lambda: EDGES.float().to_sparse(), TypeError, "got Tensor"),
        (lambda: "cora", TypeError, "got str"),
    ],
)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        gnnaccel.renumber(make())


def test_wrong_arguments():
    with pytest.raises(ValueError, match="expected one of communities, rcm, degree, got 'metis'"):
        gnnaccel.renumber(EDGES, "metis")
    numbers = gnnaccel.renumber(EDGES, "degree")[1]
    with pytest.raises(ValueError, match="row for each of 6000"):
        numbers.features(torch.rand(5, 2))
    with pytest.raises(TypeError, match="int32 or int64"):
        numbers.nodes(torch.rand(2))
    for wrong in (-1, 6000):
        with pytest.raises(ValueError, match="node numbers from 0 to 5999"):
            numbers.nodes(torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="num_nodes: applies to an edge_index"):
        gnnaccel.renumber(Graph.from_coo(EDGES[1], EDGES[0]), num_nodes=N)
