"""Sampling: batches against plain Python, probabilities by chi-square, bad input, threads, memory of the table."""

import itertools
import threading

import pytest
import sampling_reference as reference
import torch
from sampling_graphs import INDICES, INDPTR, SEEDS, csc, hetero, lists, p_value, plain
from scipy.stats import chi2

from gnnaccel.lower import bounds
from gnnaccel.sampling import _arrays, hetero_neighbor_sample, induced_subgraph, neighbor_sample


def check_rows(out, graph, fanouts, replace):
    """Every row has as many edges as it should, its own, and without replacement no edge twice."""
    hop_of = {
        name: [hop for hop, n in enumerate(per_hop) for _ in range(n)]
        for name, per_hop in out["num_nodes_per_hop"].items()
    }
    for kind, (indptr, _) in graph.items():
        target = kind[-1]
        rows = {place: [] for place in range(len(out["node"][target]))}
        for k, place in zip(out["edge"][kind], out["col"][kind], strict=True):
            rows[place].append(k)
        assert out["col"][kind] == sorted(out["col"][kind])
        for place, picked in rows.items():
            node, hop = out["node"][target][place], hop_of[target][place]
            degree = indptr[node + 1] - indptr[node]
            assert all(indptr[node] <= k < indptr[node + 1] for k in picked)
            fanout = fanouts[kind][hop] if hop < len(fanouts[kind]) else 0
            if fanout < 0:
                wanted = degree
            elif replace:
                wanted = fanout if degree else 0
            else:
                wanted = min(fanout, degree)
            assert len(picked) == wanted
            assert (fanout >= 0 and replace) or len(set(picked)) == len(picked)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fanouts", [[3, 2], [-1, 4, 1], [0, 5], [70]])
def test_a_batch_is_what_its_edges_say(dtype, replace, disjoint, weighted, fanouts):
    graph = hetero(dtype)
    seeds = {"a": torch.tensor([1, 5, 39, 5]).to(dtype), "b": torch.tensor([1, 3]).to(dtype)}
    weight = {kind: torch.rand(arrays[1].numel()) + 0.1 for kind, arrays in graph.items()} if weighted else None
    out = hetero_neighbor_sample(graph, seeds, fanouts, edge_weight=weight, replace=replace, disjoint=disjoint, seed=3)
    assert {v.dtype for part in (out.node, out.row, out.col, out.edge) for v in part.values()} == {dtype}
    out, by_kind = plain(out), dict.fromkeys(graph, fanouts)
    choose = reference.chosen_in(out["edge"], out["col"])
    assert out == reference.sample(
        lists(graph), {name: s.tolist() for name, s in seeds.items()}, by_kind, choose, disjoint
    )
    check_rows(out, lists(graph), by_kind, replace)


@pytest.mark.parametrize("disjoint", [False, True])
def test_full_neighbourhoods(disjoint):
    indptr, indices = csc(40, 40, 300)
    out = neighbor_sample(indptr, indices, torch.tensor([1, 2, 0]), [-1, -1], disjoint=disjoint)
    graph = {("node", "to", "node"): (indptr.tolist(), indices.tolist())}
    fanouts = {kind: [-1, -1] for kind in graph}
    wanted = reference.sample(graph, {"node": [1, 2, 0]}, fanouts, reference.everything, disjoint)
    for name, value in out._asdict().items():
        if value is None:
            assert wanted[name] is None
        else:
            (expected,) = wanted[name].values()
            assert (value if isinstance(value, list) else value.tolist()) == expected


def test_fan_outs_by_type_and_types_without_edges():
    graph = hetero()
    fanouts = {kind: [i, 1] for i, kind in enumerate(graph)}
    out = hetero_neighbor_sample(graph, {"b": torch.tensor([4, 2])}, fanouts, node_types=["z"])
    check_rows(plain(out), lists(graph), fanouts, False)
    assert out.node["z"].numel() == 0 and out.num_nodes_per_hop["z"] == [0, 0, 0]
    alone = hetero_neighbor_sample({}, {"z": torch.tensor([4, 2])}, [2])
    assert alone.node["z"].tolist() == [4, 2]


# ---- Time. ----


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("fanout", [-1, 3])
@pytest.mark.parametrize("by", ["node", "edge"])
def test_no_neighbour_is_later_than_its_seed(by, fanout, last):
    node_time = {name: torch.randint(20, (n,)) for name, n in (("a", 40), ("b", 30), ("c", 20))}
    seeds = {"a": torch.tensor([1, 5, 1]), "b": torch.tensor([1])}
    seed_time = {"a": torch.tensor([4, 30, 11]), "b": torch.tensor([-1])}
    graph = hetero(times=node_time)
    edge_time = {kind: node_time[kind[0]][indices] for kind, (_, indices) in graph.items()}
    del node_time["c"]  # at any time
    del edge_time["c", "in", "b"]
    given = dict(node_time=node_time) if by == "node" else dict(edge_time=edge_time)
    strategy = "last" if last else "uniform"
    out = plain(
        hetero_neighbor_sample(graph, seeds, [fanout, fanout], seed_time=seed_time, temporal_strategy=strategy, **given)
    )
    of_seed = torch.cat([*seed_time.values()]).tolist()

    def time(kind, k):
        return edge_time[kind][k].item() if kind in edge_time else -1000

    choose = reference.chosen_in(out["edge"], out["col"])
    if last or fanout < 0:
        everything = reference.until(time, of_seed, last)
        exact = lambda kind, *row: choose(kind, *row) if fanout > 0 and kind[0] == "c" else everything(kind, *row)  # noqa: E731
    else:
        exact = choose
    starts = {name: s.tolist() for name, s in seeds.items()}
    assert out == reference.sample(lists(graph), starts, {kind: [fanout] * 2 for kind in graph}, exact, True)
    for kind in edge_time:
        for k, place in zip(out["edge"][kind], out["col"][kind], strict=True):
            assert time(kind, k) <= of_seed[out["batch"][kind[-1]][place]]


def test_seeds_have_the_times_of_their_nodes():
    time = torch.tensor([5, 1, 3, 9])
    indptr, indices = torch.tensor([0, 3, 3, 3, 3]), torch.tensor([1, 2, 3])
    out = neighbor_sample(indptr, indices, torch.tensor([0]), [-1], node_time=time)
    assert out.node.tolist() == [0, 1, 2] and out.batch.tolist() == [0, 0, 0]


def test_weights_and_times_together():
    time, weight = torch.arange(40), torch.tensor([0.0, 1, 3, 4] * 10)
    out = neighbor_sample(
        torch.tensor([0, 40] + [40] * 39), torch.arange(40), torch.zeros(9000, dtype=torch.int64), [1],
        node_time=time, seed_time=torch.full((9000,), 6), edge_weight=weight, seed=3,
    )  # fmt: skip
    expected = torch.where(time <= 6, weight, 0) / weight[:7].sum() * 9000
    assert p_value(torch.bincount(out.edge, minlength=40), expected) > 0.01


def test_types_without_time_are_drawn_uniformly_and_not_by_what_is_last():
    graph = {("a", "to", "b"): (torch.tensor([0, 50]), torch.arange(50))}
    given = dict(node_time={"b": torch.tensor([3])}, temporal_strategy="last", num_nodes={"a": 50})
    drawn = [hetero_neighbor_sample(graph, {"b": torch.tensor([0])}, [5], seed=s, **given) for s in range(9)]
    assert len({tuple(out.edge["a", "to", "b"].tolist()) for out in drawn}) == 9


# ---- Probabilities. ----


def draws(degree, count, trials, weight=None, replace=False):
    """Edges of a row of so many that `trials` destinations draw: [trials, count]."""
    indptr, indices = torch.tensor([0, degree] + [degree] * degree), torch.arange(1, degree + 1)
    seeds = torch.zeros(trials, dtype=torch.int64)
    out = neighbor_sample(indptr, indices, seeds, [count], edge_weight=weight, replace=replace, seed=11)
    return out.edge.view(trials, count)


@pytest.mark.parametrize("degree, count", [(5, 2), (6, 3), (7, 6), (70, 1)])
def test_every_set_is_equally_likely(degree, count):
    sets = list(itertools.combinations(range(degree), count))
    trials = 400 * len(sets)
    drawn = draws(degree, count, trials).sort(dim=1).values
    found = dict.fromkeys(sets, 0)
    for row in map(tuple, drawn.tolist()):
        found[row] += 1
    assert p_value(list(found.values()), [trials / len(sets)] * len(sets)) > 0.01


@pytest.mark.parametrize("degree, count", [(100, 10), (64, 20), (65, 64), (300, 70), (2000, 500)])
def test_every_edge_of_a_hub_is_equally_likely(degree, count):
    trials = 4000
    found = torch.bincount(draws(degree, count, trials).flatten(), minlength=degree).double()
    expected, part = trials * count / degree, count / degree
    statistic = ((found - expected) ** 2).sum() / (expected * (1 - part)) * (degree - 1) / degree
    assert found.sum() == trials * count
    assert 0.01 < chi2.sf(float(statistic), degree - 1) < 0.99


def test_pairs_of_a_hub_are_equally_likely():
    """Of edges next to each other in a row of 100, both are drawn as often as they should be."""
    trials, degree, count = 20_000, 100, 10
    taken = torch.zeros(trials, degree).scatter_(1, draws(degree, count, trials), 1)
    together = (taken[:, :-1] * taken[:, 1:]).sum()
    expected = trials * (degree - 1) * count / degree * (count - 1) / (degree - 1)
    assert abs(together - expected) < 4 * expected**0.5


@pytest.mark.parametrize("degree", [3, 50])
def test_with_replacement_each_draw_is_uniform(degree):
    drawn = draws(degree, 5, 5000, replace=True)
    assert p_value(torch.bincount(drawn.flatten(), minlength=degree), [25_000 / degree] * degree) > 0.01
    both = torch.bincount(drawn[:, 0] * degree + drawn[:, 1], minlength=degree**2)
    assert p_value(both, [5000 / degree**2] * degree**2) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_with_replacement(dtype):
    weight = torch.tensor([0.0, 1, 4, 0, 0.5, 2.5, 0], dtype=dtype)
    found = torch.bincount(draws(7, 4, 5000, weight, replace=True).flatten(), minlength=7)
    assert p_value(found, 20_000 * weight.double() / weight.sum()) > 0.01


# The last are drawn in two ways: one takes nearly all draws, which repeats it until the others are found by keys.
@pytest.mark.parametrize("weights", [[1.0, 2, 3, 4, 0], [1e-3, 5, 1, 1, 20], [1.0, 2, 1e6, 3, 4]])
def test_weights_without_replacement_are_those_of_one_draw_after_the_other(weights):
    total, trials = sum(weights), 20_000
    wanted = {}
    for i, j in itertools.permutations(range(5), 2):
        probability = weights[i] / total * weights[j] / (total - weights[i])
        wanted[min(i, j), max(i, j)] = wanted.get((min(i, j), max(i, j)), 0) + probability
    found = dict.fromkeys(wanted, 0)
    for pair in draws(5, 2, trials, torch.tensor(weights)).sort(dim=1).values.tolist():
        found[tuple(pair)] += 1
    assert p_value(list(found.values()), [trials * wanted[pair] for pair in found]) > 0.01


def test_weights_of_many_draws_without_replacement():
    """Of 100 edges 70 are drawn, by keys; the chance of each is found by draws one after the other in torch."""
    weight = torch.rand(100) + 0.02
    found = torch.bincount(draws(100, 70, 20_000, weight).flatten(), minlength=100)
    expected = torch.bincount(torch.multinomial(weight.expand(20_000, -1), 70).flatten(), minlength=100)
    part = (found + expected) / 40_000
    error = (found - expected).double() / (40_000 * part * (1 - part)).sqrt().clamp(min=1)
    assert error.abs().max() < 4.5 and 0.6 < error.square().mean() < 1.5


def test_weights_of_a_hub():
    weight = torch.rand(3000) ** 4
    found = torch.bincount(draws(3000, 1, 60_000, weight).flatten(), minlength=3000)
    few = weight < 0.05
    expected = 60_000 * weight.double() / weight.sum()
    merged = torch.cat([found[~few].double(), found[few].sum()[None].double()])
    assert p_value(merged, torch.cat([expected[~few], expected[few].sum()[None]])) > 0.01


def test_edges_of_weight_zero():
    indptr, indices = torch.tensor([0, 4, 4, 4, 4, 4]), torch.tensor([1, 2, 3, 4])
    seeds = torch.tensor([0])

    def edges(weight, count, replace=False):
        return neighbor_sample(
            indptr, indices, seeds, [count], edge_weight=torch.tensor(weight), replace=replace
        ).edge.tolist()

    assert edges([0.0, 0, 1, 0], 2) == [2]  # fewer than asked for
    assert edges([0.0, 0, 0, 0], 2) == []
    assert edges([0.0, 0, 0, 0], 2, replace=True) == []
    assert edges([0.0, 0, 1, 0], 3, replace=True) == [2, 2, 2]
    assert edges([0.0, 0, 1, 0], 4) == edges([0.0, 0, 0, 0], -1) == [0, 1, 2, 3]  # all, as PyG has it


# ---- Seeds of random numbers, threads. ----


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_batch_does_not_depend_on_the_number_of_threads(disjoint, weighted):
    indptr, indices = csc(20_000, 20_000, 400_000)
    seeds = torch.randperm(20_000)[:1500]
    weight = torch.rand(400_000) if weighted else None
    outs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outs.append(neighbor_sample(indptr, indices, seeds, [10, 5, 3], edge_weight=weight, disjoint=disjoint, seed=4))
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            assert (a is b is None) or (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


def test_a_seed_repeats_a_batch_and_torchs_generator_does():
    indptr, indices = csc(40, 40, 300)

    def edges(seed=None):
        return neighbor_sample(indptr, indices, torch.tensor([1]), [8, 3], seed=seed).edge.tolist()

    assert edges(5) == edges(5) != edges(6)
    torch.manual_seed(1)
    first, second = edges(), edges()
    torch.manual_seed(1)
    assert [edges(), edges()] == [first, second] and first != second


def test_threads_of_python_sample_at_once():
    indptr, indices = csc(2000, 2000, 40_000)
    wanted = neighbor_sample(indptr, indices, torch.arange(200), [5, 5], seed=1)
    found = []

    def work():
        for _ in range(20):
            found.append(neighbor_sample(indptr, indices, torch.arange(200), [5, 5], seed=1).node)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 80 and all(torch.equal(node, wanted.node) for node in found)


def test_hashed_and_tabled_nodes_get_the_same_numbers(monkeypatch):
    graph, seeds = hetero(), {"a": torch.tensor([1, 5]), "b": torch.tensor([1])}
    tabled = hetero_neighbor_sample(graph, seeds, [4, 4], seed=2)
    nodes = torch.randperm(40)[:20]
    edges = induced_subgraph(*graph["a", "to", "a"], nodes)
    monkeypatch.setattr(bounds, "TABLE_NODES", 0)
    assert plain(hetero_neighbor_sample(graph, seeds, [4, 4], seed=2)) == plain(tabled)
    assert all(map(torch.equal, induced_subgraph(*graph["a", "to", "a"], nodes), edges))


def test_the_table_forgets_where_its_stamps_end(monkeypatch):
    indptr, indices = csc(40, 40, 300)
    wanted = neighbor_sample(indptr, indices, torch.tensor([1, 2]), [-1]).node.tolist()
    monkeypatch.setattr(_arrays._scratch, "stamp", (1 << 32) - 2)
    for _ in range(3):
        assert neighbor_sample(indptr, indices, torch.tensor([1, 2]), [-1]).node.tolist() == wanted
    assert _arrays._scratch.stamp == 2


# ---- Bad input. ----


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(num_neighbors=[2, -2]), ValueError, "num_neighbors: expected -1"),
        (dict(num_neighbors=3), TypeError, "num_neighbors"),
        (dict(num_neighbors=[1.5]), TypeError, "num_neighbors"),
        (dict(seeds=torch.tensor([3])), ValueError, r"seeds: expected nodes in \[0, 3\), got 3"),
        (dict(seeds=torch.tensor([-1])), ValueError, "seeds"),
        (dict(seeds=torch.tensor([[0]])), ValueError, "seeds: expected one dimension"),
        (dict(seeds=torch.tensor([0], dtype=torch.int32)), TypeError, "seeds: expected torch.int64"),
        (dict(seeds=[0]), TypeError, "seeds"),
        (dict(indptr=INDPTR.float()), TypeError, "indptr"),
        (dict(indptr=torch.tensor([], dtype=torch.int64)), ValueError, "indptr"),
        (dict(indptr=torch.tensor([0, 9, 3, 3])), ValueError, "indptr"),
        (dict(indptr=torch.tensor([0, -1, 3, 3])), ValueError, "indptr"),
        (dict(indices=torch.tensor([1, 3, 2])), ValueError, "indices: expected nodes in .* got 3 at place 1"),
        (dict(indices=torch.tensor([1, -1, 2])), ValueError, "indices"),
        (dict(edge_weight=torch.ones(2)), ValueError, "edge_weight: expected 3"),
        (dict(edge_weight=torch.ones(3).long()), TypeError, "edge_weight"),
        (dict(edge_weight=torch.tensor([1, float("nan"), 1]), num_neighbors=[1]), ValueError, "edge_weight"),
        (dict(edge_weight=torch.tensor([1, -1.0, 1]), num_neighbors=[1]), ValueError, "edge_weight"),
        (dict(edge_weight=torch.tensor([1, float("inf"), 1]), num_neighbors=[1], replace=True), ValueError, "weight"),
        (dict(node_time=torch.zeros(2).long()), ValueError, "node_time.*expected 3"),
        (dict(node_time=torch.zeros(3)), TypeError, "node_time"),
        (
            dict(node_time=torch.tensor([0, 5, 1]), seed_time=torch.tensor([3, 3])),
            ValueError,
            "ascending order",
        ),
        (dict(edge_time=torch.zeros(3).long()), ValueError, "seed_time"),
        (dict(edge_time=torch.zeros(3).long(), node_time=torch.zeros(3).long()), ValueError, "both"),
        (dict(node_time=torch.zeros(3).long(), seed_time=torch.zeros(1).long()), ValueError, "seed_time.*expected 2"),
        (dict(temporal_strategy="first"), ValueError, "temporal_strategy"),
        (dict(seed="x"), TypeError, "seed"),
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_bad_input(change, error, words, threads):
    torch.set_num_threads(threads)
    given = dict(indptr=INDPTR, indices=INDICES, seeds=SEEDS, num_neighbors=[2, 2]) | change
    with pytest.raises(error, match=f"neighbor_sample: .*{words}"):
        neighbor_sample(**given)
    assert neighbor_sample(INDPTR, INDICES, SEEDS, [2, 2]).node.tolist() == [0, 1, 2]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_one_of_many_chunks_ends_the_call(threads):
    torch.set_num_threads(threads)
    indptr, indices = csc(20_000, 20_000, 400_000)
    indices[200_000] = 20_000
    for _ in range(20):
        with pytest.raises(ValueError, match="indices"):
            neighbor_sample(indptr, indices, torch.arange(20_000), [-1])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("replace", [False, True])
def test_each_hop_draws_for_all_nodes_so_far(dtype, replace):
    indptr, indices = csc(60, 60, 900, dtype)
    seeds, fanouts = torch.tensor([7, 3, 1, 9], dtype=dtype), [3, 5, -1, 2]
    out = neighbor_sample(indptr, indices, seeds, fanouts, replace=replace, resample=True, seed=4)
    assert torch.equal(out.node[:4], seeds) and out.node.unique().numel() == out.node.numel()
    last, nodes, drawn = 0, 4, []
    for fanout, added, count in zip(fanouts, out.num_nodes_per_hop[1:], out.num_edges_per_hop, strict=True):
        row, col, edge = (array[last : last + count] for array in (out.row, out.col, out.edge))
        assert torch.equal(indices[edge.long()], out.node[row.long()]) and bool((col.diff() >= 0).all())
        targets = out.node[:nodes].long()
        degree = indptr[targets + 1] - indptr[targets]
        wanted = degree if fanout < 0 else torch.where(degree > 0, fanout, 0) if replace else degree.clamp(max=fanout)
        assert torch.equal(torch.bincount(col.long(), minlength=nodes), wanted.long())
        assert bool((edge >= indptr[out.node[col.long()].long()]).all())
        assert bool((edge < indptr[out.node[col.long()].long() + 1]).all())
        if not replace or fanout < 0:
            assert edge.unique().numel() == edge.numel()
        drawn.append(edge[col == 2].tolist())  # of the hub
        last, nodes = last + count, nodes + added
        assert int(row.max()) < nodes
    assert drawn[0] != drawn[1][:3] and nodes == out.node.numel() and last == out.edge.numel()
    once = neighbor_sample(indptr, indices, seeds, [3], replace=replace, seed=4)
    assert torch.equal(once.edge, out.edge[: out.num_edges_per_hop[0]])


def test_hops_draw_apart_from_each_other():
    """Of two hops that draw one of four edges, each pair comes as often."""
    indptr, indices = torch.tensor([0, 4, 4, 4, 4, 4]), torch.tensor([1, 2, 3, 4])
    counts = torch.zeros(4, 4)
    for seed in range(1600):
        first, second = neighbor_sample(indptr, indices, torch.tensor([0]), [1, 1], resample=True, seed=seed).edge
        counts[first, second] += 1
    assert float(((counts - 100) ** 2 / 100).sum()) < chi2.ppf(0.9999, 15)
