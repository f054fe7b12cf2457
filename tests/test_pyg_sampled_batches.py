"""Batches of PyG's loaders that our sampler has made: layers know that their edges are sorted, and where hops end."""

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader  # noqa: E402
from torch_geometric.sampler import NeighborSampler  # noqa: E402
from torch_geometric.utils import trim_to_layer  # noqa: E402

from gnnaccel import ops, pyg_backend  # noqa: E402
from gnnaccel.graph import hops  # noqa: E402
from gnnaccel.graph.csr import Graph  # noqa: E402
from gnnaccel.lower import bounds  # noqa: E402
from gnnaccel.pyg_backend import sampled_batches  # noqa: E402
from gnnaccel.pyg_backend.graph import from_edge_index, hops_of  # noqa: E402

NODES, EDGES = 150, 900
DEVICE = "cuda" if torch.cuda.is_available() and ops.has_cuda_kernels() else "cpu"


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.setattr(bounds, "SAMPLED_PRODUCTS", 0)
    pyg_backend.enable()
    yield
    pyg_backend.disable()


def data(**more) -> Data:
    return Data(
        x=torch.rand(NODES, 5), y=torch.randint(3, (NODES,)), edge_index=torch.randint(NODES, (2, EDGES)), **more
    )


def sampled(given=None, **options):
    loader = NeighborLoader(given or data().to(DEVICE), [4, 3, 2], batch_size=8, **options)
    return next(iter(loader))


def test_edges_and_their_first_hops():
    batch = sampled()
    found = hops_of(batch.edge_index)
    assert [b - a for a, b in zip((0, *found.nodes), found.nodes, strict=False)] == batch.num_sampled_nodes
    assert [b - a for a, b in zip(found.edges, found.edges[1:], strict=False)] == batch.num_sampled_edges
    x, edges = batch.x, batch.edge_index
    for layer in range(3):
        x, edges, _ = trim_to_layer(layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edges)
        assert hops_of(edges).nodes == found.nodes[: 4 - layer] and len(x) == found.nodes[3 - layer]
        graph = from_edge_index(edges, len(x), len(x))
        wanted = Graph.from_coo(edges[1], edges[0], num_rows=len(x), num_cols=len(x))
        assert graph.edge_ids is None and hops.of(graph).nodes == found.nodes[: 4 - layer]
        assert torch.equal(graph.indptr, wanted.indptr) and torch.equal(graph.indices, wanted.indices)
        assert hops.of(from_edge_index(edges.clone(), len(x), len(x))) is None


CHANGES = {
    "written into": lambda edges: edges.add_(0),
    "another order": lambda edges: edges.flip(1),
    "a part of a hop": lambda edges: edges[:, :3],
    "later edges": lambda edges: edges[:, 1:],
    "turned": lambda edges: edges.flip(0),
    "a copy": lambda edges: edges.clone(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_edges_that_are_no_longer_so(name):
    edges = CHANGES[name](sampled().edge_index)
    assert hops_of(edges) is None


@pytest.mark.parametrize(
    "options",
    [
        {"subgraph_type": "bidirectional"},
        {"subgraph_type": "induced"},
        {"transform_sampler_output": lambda out: out},
        {"transform": lambda batch: batch.update({"edge_index": batch.edge_index.flip(0)})},
    ],
)
def test_batches_that_are_not_as_sampled(options):
    assert hops_of(sampled(**options).edge_index) is None


@pytest.mark.parametrize(
    "options", [{"transform": lambda batch: batch}, {"filter_per_worker": False}, {"replace": True}]
)
def test_batches_that_are(options):
    assert hops_of(sampled(**options).edge_index) is not None


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU nobody waits to look at the edges")
@pytest.mark.parametrize("row", [0, 1])
def test_edges_that_are_written_into_unseen(row):
    batch = sampled()
    batch.edge_index.numpy()[row] = torch.randperm(batch.num_nodes)[batch.edge_index[row]].numpy()
    assert hops_of(batch.edge_index) is not None
    graph = from_edge_index(batch.edge_index, batch.num_nodes, batch.num_nodes)
    assert hops.of(graph) is None
    x = torch.rand(batch.num_nodes, 5, requires_grad=True)
    out = pyg.nn.SAGEConv(5, 4)(x, batch.edge_index)
    out[:8].sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_batches_made_in_inference_mode():
    with torch.inference_mode():
        batch = sampled()
        assert hops_of(batch.edge_index) is None
        assert pyg.nn.SAGEConv(5, 4).to(DEVICE)(batch.x, batch.edge_index).shape == (batch.num_nodes, 4)


def test_where_the_seeds_numbers_are():
    """As PyG leaves them, and where the batch is sent."""
    batch = sampled()
    assert not batch.input_id.is_cuda
    moved = batch.to(DEVICE)
    assert moved.input_id.device.type == DEVICE and moved.input_id.tolist() == list(range(8))
    assert next(iter(NeighborLoader(data(), [2], batch_size=4))).to("cpu", "x").input_id.tolist() == [0, 1, 2, 3]


def test_a_sampler_around_ours():
    class Turned(NeighborSampler):
        def sample_from_nodes(self, inputs):
            out = super().sample_from_nodes(inputs)
            out.row, out.col = out.col, out.row
            return out

    given = data().to(DEVICE)
    for kind, known in ((NeighborSampler, True), (Turned, False)):
        batch = next(iter(NodeLoader(given, kind(given, [3, 2]), batch_size=8)))
        assert (hops_of(batch.edge_index) is not None) == known


def test_links():
    given = data().to(DEVICE)
    batch = next(iter(LinkNeighborLoader(given, [3, 2], edge_label_index=given.edge_index[:, :9], batch_size=9)))
    assert hops_of(batch.edge_index) is not None


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
def test_models_learn_what_they_learn_without(aggr, trimmed):
    model = pyg.nn.GraphSAGE(5, 16, 3, 3, aggr=aggr, norm="batch").to(DEVICE)
    batch = sampled()
    given = {}
    if trimmed:
        given = {f"num_sampled_{what}_per_hop": batch[f"num_sampled_{what}"] for what in ("nodes", "edges")}
    found = []
    for edges in (batch.edge_index, batch.edge_index.clone()):
        out = model(batch.x, edges, **given)[: batch.batch_size]
        model.zero_grad()
        torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
        found.append([out, *(p.grad.clone() for p in model.parameters())])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ids", [False, True])
def test_both_ways_are_pygs(ids):
    """But for which of several edges gives its number to the one that is left: the last."""
    from torch_geometric.sampler.utils import to_bidirectional

    ends = torch.randint(12, (2, 60), device=DEVICE)
    numbers = torch.arange(60, device=DEVICE) if ids else None
    given = (*ends, *ends, numbers, numbers)
    got, wanted = sampled_batches.both_ways(*given), to_bidirectional(*given)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    if not ids:
        assert got[2] is None
        return
    pairs = list(zip(*torch.cat([ends, ends.flip(0)], 1).tolist(), strict=True))
    last = {pair: number % 60 for number, pair in enumerate(pairs)}
    assert got[2].tolist() == [last[pair] for pair in zip(got[0].tolist(), got[1].tolist(), strict=True)]


def attributes() -> dict:
    """Of nodes, of edges, of neither, those that batches have, and what is named like them."""
    return {
        "edge_attr": torch.rand(EDGES, 2),
        "weight": torch.rand(EDGES),
        "mask": torch.rand(NODES) > 0.5,
        "pos": torch.rand(NODES, 3, requires_grad=True),
        "face": torch.randint(NODES, (3, 7)),
        "mean": torch.rand(4),
        "one": torch.tensor(3.0),
        "name": "a graph",
        "size": 3,
    }


OF_DATA = {
    "plain": {},
    "all sorts": attributes(),
    "nodes' numbers": {"n_id": torch.arange(NODES) * 2, "e_id": torch.arange(EDGES) * 3},
    "batches": {"batch": torch.zeros(NODES, dtype=torch.long), "batch_size": 5, "input_id": torch.arange(NODES)},
    "as many edges as nodes": {"edge_index": torch.randint(NODES, (2, NODES)), "edge_flag": torch.arange(NODES)},
}
LEFT = {
    "a list": {"words": ["a"] * NODES},
    "numbers of nodes": {"num_nodes": NODES},
    "an array": {"more": torch.rand(NODES).numpy()},
}


@pytest.mark.parametrize("name", [*OF_DATA, *LEFT])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_batch_is_what_pyg_makes_of_the_sample(name, ordered):
    more = (OF_DATA | LEFT)[name]
    given = data(**{key: value for key, value in more.items() if key != "edge_index"})
    given.edge_index = more.get("edge_index", given.edge_index)
    if ordered:
        given.edge_index = given.edge_index[:, given.edge_index[1].argsort()]
    loader = NeighborLoader(given, [4, 3], batch_size=8, is_sorted=ordered)
    out = loader.node_sampler.sample_from_nodes(loader.input_data[[3, 1, 2]])
    made = sampled_batches.collated(given, out, loader.node_sampler.edge_permutation)
    assert (made is None) == (name in LEFT)
    pyg_backend.disable()
    wanted, got = loader.filter_fn(out) if name != "a list" else None, made
    if wanted is None or got is None:
        return
    assert list(got._store._mapping) == list(wanted._store._mapping) and got.num_nodes == wanted.num_nodes
    assert vars(got).keys() == vars(wanted).keys() and got._store._parent() is got and given.x.shape[0] == NODES
    assert vars(got._store).keys() == vars(wanted._store).keys()
    for key, value in wanted.to_dict().items():
        same = torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
        assert same and type(got[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            assert got[key].requires_grad == value.requires_grad and got[key].dtype == value.dtype, key
