"""Row orders: valid whatever the graph, the same on each run, and able to find communities that were planted."""

import graphs
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from gnnaccel.graph import community, network, reorder
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds

GROUP = 40  # nodes of a planted community


def planted(num_nodes=2000, degree=16, inside=0.8, directed=False, rectangular=False, seed=0):
    """Random graph whose communities of GROUP nodes are spread over the node numbers; and each node's community."""
    rng = np.random.default_rng(seed)
    community = rng.permutation(num_nodes) % (num_nodes // GROUP)
    members = np.argsort(community, kind="stable").reshape(-1, GROUP)
    rows = rng.integers(0, num_nodes, num_nodes * degree // 2)
    near = members[community[rows], rng.integers(0, GROUP, rows.size)]
    cols = np.where(rng.random(rows.size) < inside, near, rng.integers(0, num_nodes, rows.size))
    if rectangular:
        return Graph.from_coo(rows, cols + 7, num_rows=num_nodes, num_cols=num_nodes + 9), torch.tensor(community)
    if not directed:
        rows, cols = np.concatenate([rows, cols]), np.concatenate([cols, rows])
    return Graph.from_coo(rows, cols, num_rows=num_nodes, num_cols=num_nodes), torch.tensor(community)


def star(num_nodes=3000):
    leaves = np.arange(1, num_nodes)
    hub = np.zeros_like(leaves)
    return Graph.from_coo(np.concatenate([leaves, hub]), np.concatenate([hub, leaves]))


def paths(count=300, length=5):
    """Disconnected paths, and as many nodes without edges."""
    first = (np.arange(count)[:, None] * length + np.arange(length - 1)).ravel()
    rows, cols = np.concatenate([first, first + 1]), np.concatenate([first + 1, first])
    return Graph.from_coo(rows, cols, num_rows=2 * count * length, num_cols=2 * count * length)


CASES = {
    "planted": lambda: planted()[0],
    "directed": lambda: planted(directed=True)[0],
    "rectangular": lambda: planted(rectangular=True)[0],
    "star": star,
    "paths": paths,
    "one node": lambda: Graph.from_coo([], [], num_rows=1, num_cols=1),
    "one loop": lambda: Graph.from_coo([0, 0], [0, 0]),
    "only loops": lambda: Graph.from_coo(range(50), range(50)),
    "two sides": lambda: Graph.from_coo([0, 1, 5, 6, 7], [5, 6, 0, 1, 1], num_rows=9, num_cols=9),
    **{name: lambda name=name: graphs.make(name) for name in graphs.NAMES},
    **{f"{name} int64": lambda name=name: graphs.make(name, torch.int64) for name in graphs.NAMES},
}


def num_nodes(graph):
    return graph.num_rows if graph.num_rows == graph.num_cols else graph.num_rows + graph.num_cols


def is_permutation(order, count):
    return order.dtype == torch.int64 and torch.equal(order.sort().values.cpu(), torch.arange(count))


@pytest.mark.parametrize("case", CASES)
def test_any_graph(case, device):
    graph = CASES[case]().to(device)
    order = reorder.row_order(graph, least_gain=None)
    assert order.device == graph.device
    assert is_permutation(order, graph.num_rows)
    label = community.communities(graph)
    assert label.shape == (num_nodes(graph),)
    assert torch.equal(label.unique().cpu(), torch.arange(int(label.max()) + 1 if label.numel() else 0))
    assert torch.equal(order, reorder.row_order(CASES[case]().to(device), least_gain=None))
    assert torch.equal(label, community.communities(CASES[case]().to(device)))


def test_devices_agree(device):
    for case in ("planted", "directed", "rectangular", "power_law"):
        graph = CASES[case]()
        there = reorder.row_order(graph.to(device), least_gain=None)
        assert torch.equal(there.cpu(), reorder.row_order(graph, least_gain=None)), case


@pytest.mark.parametrize("kind", [{}, {"directed": True}, {"rectangular": True}], ids=str)
def test_finds_planted_communities(kind, device):
    graph, home = planted(num_nodes=6000, degree=16, **kind)
    graph, home = graph.to(device), home.to(device)
    given, best = (1 - reorder.hit_rate(graph, o) for o in (None, home.argsort(stable=True)))
    order = reorder.row_order(graph)
    assert order is not None
    found = 1 - reorder.hit_rate(graph, order)
    assert found < best + 0.1 * (given - best)
    if not kind:
        rows = torch.repeat_interleave(torch.arange(graph.num_rows, device=device), graph.indptr.diff())
        inside = home[rows] == home[graph.indices.long()]
        label = community.communities(graph)
        kept = label[rows] == label[graph.indices.long()]
        assert kept[inside].float().mean() > 0.95
        assert kept[~inside].float().mean() < 0.25


def band(num_nodes=12_000, directed=False):
    """A narrow band under mixed node numbers."""
    rng = np.random.default_rng(0)
    rows = np.arange(num_nodes).repeat(16)
    cols = np.clip(rows + rng.integers(-6, 7, rows.size), 0, num_nodes - 1)
    name = rng.permutation(num_nodes)
    rows, cols = name[rows], name[cols]
    if not directed:
        rows, cols = np.append(rows, cols), np.append(cols, rows)
    return Graph.from_coo(rows, cols, num_rows=num_nodes, num_cols=num_nodes)


@pytest.mark.parametrize("directed", [False, True])
def test_cuthill_mckee_finds_a_band(directed, device):
    graph = band(directed=directed).to(device)
    order = reorder.order_by(graph, "rcm")
    assert order is not None and order.device == graph.device and is_permutation(order, graph.num_rows)
    assert 1 - reorder.hit_rate(graph, order) < 0.3 * (1 - reorder.hit_rate(graph))
    at = network.inverse(order)
    rows = torch.repeat_interleave(at, graph.indptr.diff())
    assert int((rows - at[graph.indices.long()]).abs().max()) < 40
    assert reorder.order_by(planted(num_nodes=400)[0].to(device), "rcm") is None


def test_orders_by_degree_and_refusals(device):
    graph = planted(rectangular=True)[0].to(device)
    order = reorder.order_by(graph, "degree")
    assert is_permutation(order, graph.num_rows)
    assert (graph.indptr.diff()[order].diff() <= 0).all()
    with pytest.raises(ValueError, match="'rcm' takes a graph with as many rows as columns"):
        reorder.order_by(graph, "rcm")
    communities = reorder.order_by(planted(num_nodes=6000)[0].to(device), "communities")
    assert torch.equal(communities, reorder.row_order(planted(num_nodes=6000)[0].to(device)))


def test_max_size_bounds_communities(device):
    graph = Graph.from_coo(*np.nonzero(np.random.default_rng(0).random((1200, 1200)) < 0.05)).to(device)
    sizes = [int(community.communities(graph, max_size=m).bincount().max()) for m in (16, 100, 100_000)]
    assert sizes[0] < 40
    assert sizes[0] <= sizes[1] < 200 < sizes[2]
    for call in (community.communities, reorder.row_order):
        with pytest.raises(ValueError, match="max_size"):
            call(planted(num_nodes=20_000)[0], max_size=0)


def test_keeps_an_order_that_is_good_already(device):
    graph, home = planted(num_nodes=6000, inside=1.0)
    place = network.inverse(home.argsort(stable=True))
    rows = torch.repeat_interleave(place, graph.indptr.diff())
    ordered = Graph.from_coo(rows, place[graph.indices.long()], num_rows=6000, num_cols=6000).to(device)
    assert reorder.row_order(graph.to(device)) is not None
    assert reorder.row_order(ordered) is None


def test_returns_at_once_where_no_order_can_gain(monkeypatch, device):
    monkeypatch.setattr(reorder, "hierarchy", None)
    assert reorder.row_order(planted(num_nodes=400)[0].to(device)) is None  # all of it is one window
    assert reorder.row_order(paths(4000).to(device)) is None  # each column is read about once
    assert reorder.row_order(graphs.make("no_edges").to(device)) is None


def test_sides_of_a_bipartite_graph_are_apart(device):
    graph, _ = planted(num_nodes=800, directed=True)
    rows, cols = torch.repeat_interleave(torch.arange(800), graph.indptr.diff()), graph.indices.long() + 800
    both = Graph.from_coo(torch.cat([rows, cols, rows]), torch.cat([cols, rows, rows])).to(device)  # with self-loops
    side = reorder.row_order(both, least_gain=None) >= 800
    assert not side[:800].any() and side[800:].all()


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        (([0, 1, 2], [1, 0, 2]), True),
        (([0, 1, 2], [1, 2, 0]), False),  # in-degrees equal out-degrees
        (([0, 0, 1], [1, 1, 0]), False),  # an edge twice in one direction
        (([0, 0, 1, 1], [1, 1, 0, 0]), True),
        (([], []), True),
    ],
)
def test_is_symmetric(edges, expected, device):
    assert network.is_symmetric(Graph.from_coo(*edges).to(device)) is expected


def test_reuse(device):
    graph, _ = planted(num_nodes=6000)
    order = torch.randperm(6000)
    matrix = sp.csr_matrix((np.ones(graph.nnz), graph.indices.numpy(), graph.indptr.numpy()))
    indices = matrix[order.numpy()].indices
    window = 1000
    windows = indices[: len(indices) // window * window].reshape(-1, window)
    expected = 1 - np.mean([len(np.unique(w)) / window for w in windows])
    graph = graph.to(device)
    assert reorder.hit_rate(graph, order.to(device), window=window) == pytest.approx(expected)
    assert reorder.hit_rate(graph, order.to(device), window=window, samples=20) == pytest.approx(expected, rel=0.1)
    given = reorder.hit_rate(graph, torch.arange(6000, device=device))
    assert given == reorder.hit_rate(graph)
    assert reorder.hit_rate(graphs.make("no_edges")) == 0


def test_pairs_do_not_swap_for_ever(device):
    """Both nodes of a pair, moved at once, would take each other's label."""
    a, b = np.random.default_rng(0).permutation(20_000).reshape(2, -1)
    label = community.communities(Graph.from_coo(np.append(a, b), np.append(b, a)).to(device)).cpu()
    assert torch.equal(label[a], label[b])
    assert label.max() == 9_999


def dense_of(made):
    n = made.num_nodes
    at = torch.repeat_interleave(torch.arange(n), made.indptr.diff().cpu()), made.cols.long().cpu()
    weights = torch.ones_like(at[0]) if made.weights is None else made.weights.long().cpu()
    return torch.zeros(n, n, dtype=torch.int64).index_put_(at, weights, accumulate=True)


def test_levels_hold_the_sums_of_a_dense_product(monkeypatch, device):
    """In tiny chunks: rows longer than one, communities that end inside one."""
    monkeypatch.setattr(bounds, "COMMUNITY_CHUNK_EDGES", 50)
    graph = graphs.make("power_law").to(device)
    made, place = network.network_of(graph)
    place = place.long().cpu()
    rows = torch.repeat_interleave(torch.arange(graph.num_rows), graph.indptr.diff().cpu())
    row, col, one = place[rows], place[graph.indices.long().cpu()], torch.ones_like(rows)
    expected = torch.zeros(graph.num_rows, graph.num_rows, dtype=torch.int64)
    expected.index_put_((row, col), one, accumulate=True).index_put_((col, row), one, accumulate=True)
    expected.fill_diagonal_(0)
    assert torch.equal(dense_of(made), expected)
    assert torch.equal(made.strength.cpu(), expected.sum(1))
    for groups in (40, 9, 1):
        label = torch.randperm(made.num_nodes).remainder(groups).to(device)
        made = network.merged(made, label, groups)
        member = torch.nn.functional.one_hot(label.cpu(), groups)
        expected = (member.T @ expected @ member).fill_diagonal_(0)
        assert torch.equal(dense_of(made), expected)
        assert int(made.strength.sum()) == made.total


# The steps as CUDA takes them, in place of those in C++.
BY_CHUNKS = {"_nodes_of": "_chunks_of", "_move_nodes": "_move_chunk", "_merged_nodes": "_merged_chunks"}


def assert_same_hierarchy(found, wanted):
    assert torch.equal(found[1], wanted[1])
    for mine, other in zip(found[0], wanted[0], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("case", CASES)
def test_nodes_and_chunks_give_the_same_bits(case, monkeypatch):
    monkeypatch.setattr(bounds, "COMMUNITY_CHUNK_EDGES", 1000)
    graph = CASES[case]()
    by_nodes, first = community.hierarchy(graph, 64), network.network_of(graph)[0]
    for name, other in BY_CHUNKS.items():
        monkeypatch.setattr(network, name, getattr(network, other))
    again = network.network_of(graph)[0]
    assert torch.equal(first.strength, again.strength)
    assert torch.equal(dense_of(first), dense_of(again))
    assert_same_hierarchy(by_nodes, community.hierarchy(graph, 64))


@pytest.mark.parametrize("kind", ["directed", "rectangular"])
def test_threads_give_the_same_bits(kind, monkeypatch):
    """Of a graph with work for several in each step."""
    graph = planted(num_nodes=40_000, degree=12, **{kind: True})[0]
    found = []
    for threads in (1, 3, 4):
        torch.set_num_threads(threads)
        found.append(community.hierarchy(graph, 64))
    for name, other in BY_CHUNKS.items():
        monkeypatch.setattr(network, name, getattr(network, other))
    wanted = community.hierarchy(graph, 64)
    for each in found:
        assert_same_hierarchy(each, wanted)


@pytest.mark.parametrize("case", ["planted", "rectangular"])
def test_another_default_device(case):
    graph = CASES[case]()
    want = reorder.row_order(graph, least_gain=None)
    with torch.device("meta"):
        assert torch.equal(reorder.row_order(graph, least_gain=None), want)


@pytest.mark.parametrize("large", [False, True])
def test_merging_nodes_and_chunks(large):
    """Weights beyond 32 bits, and labels of any kind."""
    graph = planted(num_nodes=600)[0]
    made = network.network_of(graph)[0]
    weights = torch.randint(1, 1000, (made.cols.numel(),), dtype=torch.int64 if large else torch.int32)
    made = network.Network(made.indptr, made.cols, weights * 2**32 if large else weights, made.strength, made.total)
    if large:
        made.total = 2.0**40
    for count in (1, 2, 77, 600):
        label = torch.randint(0, count, (600,))
        label[:count] = torch.arange(count)
        order, ends = label.argsort(stable=True), torch.bincount(label, minlength=count).cumsum(0)
        ends = torch.cat([ends.new_zeros(1), ends])
        edges = torch.cat([ends.new_zeros(1), made.indptr.diff()[order].cumsum(0)])[ends]
        results = [f(made, label, order, ends, edges) for f in (network._merged_nodes, network._merged_chunks)]
        for mine, other in zip(*results, strict=True):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)
        assert bool((results[0][2].long() > 2**32).any()) is (large and count > 1)
