"""Graphs derived from PyG's edges: what they hold, when they are made again, and that they die with the edges."""

import copy
import gc

import pytest
import torch

pytest.importorskip("torch_geometric")
from pyg_compare import D, E, N, edges, rand
from torch_geometric import EdgeIndex, nn, utils
from torch_geometric.data import Data
from torch_geometric.nn.conv import MessagePassing

import gnnaccel
from gnnaccel import pyg_backend, schedule
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.pyg_backend.graph import from_edge_index, with_loops


def sparse(layout):
    """The transposed adjacency of edges() without duplicates, with values that are not one."""
    index = utils.coalesce(edges().flip(0))
    adj = torch.sparse_coo_tensor(index, rand(index.shape[1], seed=3).abs() + 0.1, (N, N)).coalesce()
    return adj if layout == torch.sparse_coo else adj.to_sparse(layout=layout)


class Writing(MessagePassing):
    """A layer that writes into the edges a helper gave it: they must be its own every time."""

    def forward(self, x, edge_index):
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        edge_index[0] = (edge_index[0] + 1) % x.size(0)
        return self.propagate(edge_index, x=x)


def test_layer_that_writes_into_derived_edges():
    plain = Writing()
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, index = rand(N, D), edges()
    for _ in range(3):
        torch.testing.assert_close(layer(x, index), plain(x, index))


def test_sparse_values_changed_in_place():
    plain = nn.SAGEConv(D, 5)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x, adj = rand(N, D), sparse(torch.sparse_csr)
    adj.values().fill_(1)
    torch.testing.assert_close(layer(x, adj), plain(x, adj))
    adj.values()[3:9] = 4
    torch.testing.assert_close(layer(x, adj), plain(x, adj))


_PARTS = {
    torch.sparse_csr: (torch.sparse_csr_tensor, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.sparse_csc_tensor, torch.Tensor.row_indices),
}


def _matrix(layout):
    """Three edges of three nodes: a matrix, the tensor of indices it was made of, and its own part of that."""
    if layout is torch.sparse_coo:
        index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        adj = torch.sparse_coo_tensor(index, torch.ones(3), (3, 3), is_coalesced=True)
        return adj, index, adj.indices
    build, part = _PARTS[layout]
    index = torch.tensor([1, 2, 0])
    adj = build(torch.arange(4), index, torch.ones(3), (3, 3))
    return adj, index, lambda: part(adj)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", _PARTS, ids=str)
@pytest.mark.parametrize("wrong", [3, -1, 2**32 + 1, 2**31])
def test_indices_out_of_range(layout, wrong):
    """Of 64 bits: 2^32 + 1 is 1 in 32."""
    adj = _PARTS[layout][0](torch.arange(4), torch.tensor([1, 2, wrong]), torch.ones(3), (3, 3), check_invariants=False)
    with pytest.raises(ValueError, match="indices"):
        gnnaccel.as_graph(adj)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_coo], ids=str)
def test_writes_into_a_sparse_matrix(layout):
    """Noticed where they are made through the matrix. Of one into what the matrix was made of torch does not tell."""
    adj, index, part = _matrix(layout)
    before = gnnaccel.as_graph(adj)
    assert gnnaccel.as_graph(adj) is before
    part()[..., 0] = 0
    changed = gnnaccel.as_graph(adj)
    assert changed is not before
    kept = changed.indices.clone()
    version = adj._version, part()._version
    index[..., 0] = 2
    assert part()[..., 0].eq(2).all() and (adj._version, part()._version) == version  # else: notice it, and say so
    assert torch.equal(gnnaccel.as_graph(adj).indices, kept)  # the graph's own
    gnnaccel.invalidate(adj)
    assert not torch.equal(gnnaccel.as_graph(adj).indices, kept)


@pytest.mark.parametrize("edges_of", [lambda index: index, lambda index: EdgeIndex(index, sparse_size=(3, 3))])
def test_writes_into_edges(edges_of):
    """Of a list of edges torch tells of any, also of those into what an EdgeIndex was made of."""
    index = torch.tensor([[0, 1, 2], [0, 1, 2]])
    given = edges_of(index)
    assert gnnaccel.as_graph(given).indices.tolist() == [0, 1, 2]
    for write, source in ((index, 1), (given, 2)):
        write[0, 0] = source
        assert gnnaccel.as_graph(given).indices.tolist() == [source, 1, 2]


def test_structure_is_derived_once_and_dies_with_the_edges():
    derived.invalidate()
    first, last = pyg_backend.accelerate(nn.GCNConv(D, D)), pyg_backend.accelerate(nn.GATConv(D, 5))
    x, index = rand(N, D, grad=True), edges()
    last(first(x, index), index).sum().backward()
    count = len(derived)
    for _ in range(3):
        last(first(x, index), index).sum().backward()
    assert len(derived) == count
    del index
    gc.collect()
    assert len(derived) == 0


def as_csr(index, nodes):
    return utils.to_torch_csr_tensor(utils.coalesce(index.flip(0)), size=(nodes, nodes))


def as_sparse_tensor(index, nodes):
    torch_sparse = pytest.importorskip("torch_sparse")
    return torch_sparse.SparseTensor.from_edge_index(utils.coalesce(index.flip(0)), sparse_sizes=(nodes, nodes))


@pytest.mark.parametrize("form", [lambda index, nodes: index, as_csr, as_sparse_tensor])
@pytest.mark.parametrize("conv", [nn.GCNConv, nn.GATConv, nn.SAGEConv])
def test_graphs_with_self_loops_are_prepared_as_the_edges_were(conv, form):
    nodes = 600
    index = torch.stack([torch.arange(nodes).repeat(6) // 6 * 37 % nodes, torch.arange(6 * nodes) * 37 % nodes])
    index = form(torch.cat([index, index.flip(0)], 1), nodes)
    plain = conv(D, 64)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    x = rand(nodes, D, grad=True)
    derived.invalidate()
    done = gnnaccel.prepare(index, reorder="degree", num_nodes=nodes)
    schedule.of(done.graph).adopt_order(done.graph, {16: True})  # whatever proved faster here
    got, want = layer(x, index), plain(x, index)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (got, want)))
    graphs = {value for value in derived.values() if isinstance(value, Graph)}
    assert len(graphs) == 1 + (conv is not nn.SAGEConv)
    for graph in graphs:
        assert schedule.of(graph).reordered and schedule.of(graph.transposed).reordered
        assert schedule.of(graph).ordered is not None and schedule.of(graph).faster == {16: True}
    del index, done
    gc.collect()
    assert len(derived) == 0


def _with_loops(index, nodes, dropped):
    index = utils.remove_self_loops(index)[0] if dropped else index
    return utils.add_self_loops(index, num_nodes=nodes)[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("form", ["int64", "int32", "a view", "sorted", "loops", "none", "no nodes", "many"])
def test_loops_are_where_pyg_puts_them(form, dropped, threads):
    nodes = {"no nodes": 0, "many": 3_000}.get(form, N)
    number = {"none": 0, "no nodes": 0, "many": 200_000}.get(form, 90)
    index = torch.randint(0, max(nodes, 1), (2, number), generator=torch.Generator().manual_seed(0))
    index[:, : number // 3] = index[0, : number // 3]  # loops, some of them twice
    if form == "int32":
        index = index.int()
    elif form == "a view":
        index = index.t().contiguous().t()
    elif form == "sorted":
        index = utils.sort_edge_index(index)
    elif form == "loops":
        index = torch.arange(N).expand(2, N).contiguous()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for flow in ("source_to_target", "target_to_source"):
            got = with_loops(index, nodes, flow, dropped)
            want = from_edge_index(_with_loops(index, nodes, dropped), nodes, nodes, flow)
            ids = torch.arange(want.nnz, dtype=want.indices.dtype) if want.edge_ids is None else want.edge_ids
            assert torch.equal(got.indptr, want.indptr) and torch.equal(got.indices, want.indices)
            if got.edge_ids is not None:  # made by torch's operators, which find nothing to be sorted
                assert torch.equal(got.edge_ids, ids)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [-1, 5, 2**32 + 1])
@pytest.mark.parametrize("end", [0, 1])
def test_loops_and_indices_out_of_range(end, wrong):
    index = torch.tensor([[0, 1, 2], [1, 3, 4]])
    index[end, 1] = wrong
    for dropped in (True, False):
        with pytest.raises(ValueError, match="expected values in"):
            with_loops(index, 5, "source_to_target", dropped)
        assert derived.get((index,), ("looped", 5, "source_to_target", dropped)) is None
    index[:, 1] = wrong  # a loop, which PyG drops unseen
    assert torch.equal(with_loops(index, 5, "source_to_target", True).indptr, torch.tensor([0, 1, 3, 4, 5, 7]).int())
    with pytest.raises(ValueError, match="expected values in"):
        with_loops(index, 5, "source_to_target", False)


def test_sparse_structure_dies_with_the_matrix():
    derived.invalidate()
    layer = pyg_backend.accelerate(nn.GCNConv(D, 5))
    for layout in (torch.sparse_csr, torch.sparse_coo):
        adj = sparse(layout)
        layer(rand(N, D), adj)
        assert len(derived)
        del adj
        gc.collect()
        assert len(derived) == 0


def test_evaluation_in_inference_mode_then_training():
    for make in (lambda: nn.GCNConv(D, 5), lambda: nn.GATv2Conv(D, 5), lambda: nn.TransformerConv(D, 5, edge_dim=4)):
        layer = pyg_backend.accelerate(make())
        x, index = rand(N, D), edges()
        more = {"edge_attr": rand(E, 4)} if isinstance(layer, nn.TransformerConv) else {}
        layer.eval()
        with torch.inference_mode():
            expected = layer(x, index, **more).clone()
        out = layer(x, index, **more)
        out.sum().backward()
        torch.testing.assert_close(out, expected)


def _dense(graph):
    out = torch.zeros(graph.num_rows, graph.num_cols)
    rows = torch.repeat_interleave(torch.arange(graph.num_rows), graph.indptr.diff().long())
    return out.index_put_((rows, graph.indices.long()), torch.ones(graph.nnz), accumulate=True)


def test_to_graph():
    index = edges()
    expected = torch.zeros(N, N).index_put_((index[1], index[0]), torch.ones(E), accumulate=True)
    data = Data(x=torch.zeros(N, 1), edge_index=index)
    forms = [data, EdgeIndex(index, sparse_size=(N, N))]
    graphs = [pyg_backend.to_graph(form) for form in forms] + [pyg_backend.to_graph(index, N)]
    for graph in graphs:
        assert torch.equal(_dense(graph), expected)
    assert pyg_backend.to_graph(data) is graphs[0]
    adj = sparse(torch.sparse_csr)
    dense = (adj.to_dense() != 0).float()
    for layout in (torch.sparse_csr, torch.sparse_coo, torch.sparse_csc):
        assert torch.equal(_dense(pyg_backend.to_graph(sparse(layout))), dense)
    with pytest.raises(TypeError, match="to_graph: obj"):
        pyg_backend.to_graph("graph")
    with pytest.raises(ValueError, match=r"shape \[2, E\]"):
        pyg_backend.to_graph(torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="num_rows"):
        pyg_backend.to_graph(index, N - 3)
