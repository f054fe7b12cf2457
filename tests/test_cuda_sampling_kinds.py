"""The CUDA sampler beyond uniform: trees, times and types against the CPU's, bit for bit; weights by chi-square and by
what a batch must look like; bad input; what waits for the GPU."""

from __future__ import annotations

import contextlib
import itertools
import warnings

import pytest
import sampling_reference as reference
import torch
from cuda_cases import DEVICE, EMULATED
from scipy.stats import chi2

from gnnaccel.lower import bounds
from gnnaccel.sampling import hetero_neighbor_sample, neighbor_sample, neighbors, on_cuda

INDEX = (torch.int32, torch.int64)
KINDS = {("a", "to", "a"): (40, 40), ("a", "of", "b"): (40, 30), ("b", "by", "a"): (30, 40), ("c", "in", "b"): (20, 30)}
SIZES = {"a": 40, "b": 30, "c": 20}
ONE = ("n", "to", "n")
SEEDS = {"b": torch.tensor([1, 3, 29, 1]), "a": torch.tensor([0, 1, 39])}


def relation(num_sources, num_targets, num_edges, times=None):
    """Random edges by destination, a hub and empty rows among them; sources in order of time where they have one."""
    target = torch.randint(num_targets, (num_edges,)).where(torch.rand(num_edges) < 0.7, torch.tensor(1))
    target[target % 7 == 3] = 1
    source = torch.randint(num_sources, (num_edges,))
    order = (source if times is None else times[source]).argsort(stable=True)
    order = order[target[order].argsort(stable=True)]
    indptr = torch.zeros(num_targets + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(target, minlength=num_targets).cumsum(0)
    return indptr, source[order]


def hetero(times=None):
    return {kind: relation(*sizes, 300, (times or {}).get(kind[0])) for kind, sizes in KINDS.items()}


def to(place, value):
    """`value`, or all tensors in it, at a device, or in a dtype if they are of int64 and no times."""
    if isinstance(value, dict):
        return {key: to(place, of_key) for key, of_key in value.items()}
    if isinstance(value, tuple):
        return tuple(to(place, part) for part in value)
    return value.to(place) if isinstance(value, torch.Tensor) else value


def on_cpu(graph, seeds, fanouts, **options):
    with pytest.MonkeyPatch.context() as patch:  # also where tensors of the CPU pass for CUDA ones
        patch.setattr(neighbors, "_is_on_gpu", lambda relations: False)
        return hetero_neighbor_sample(graph, seeds, fanouts, **options)


def on_gpu(graph, seeds, fanouts, **options):
    out = hetero_neighbor_sample(to(DEVICE, graph), to(DEVICE, seeds), fanouts, **to(DEVICE, options))
    assert all(node.device.type == DEVICE.type for node in out.node.values())
    return type(out)(*(None if part is None else to("cpu", part) for part in out))


def same(graph, seeds, fanouts, **options):
    """End the test unless the GPU's sample is the CPU's; returns it."""
    wanted, got = on_cpu(graph, seeds, fanouts, **options), on_gpu(graph, seeds, fanouts, **options)
    for name, want in wanted._asdict().items():
        have = getattr(got, name)
        assert (want is None) == (have is None) and (want is None or list(have) == list(want)), name
        for key, value in (want or {}).items():
            if isinstance(value, torch.Tensor):
                assert have[key].dtype == value.dtype and torch.equal(have[key], value), (name, key)
            else:
                assert have[key] == value, (name, key)
    return got


def one(num_edges=900, dtype=torch.int64, times=None):
    return {ONE: to(dtype, relation(60, 60, num_edges, times))}


# ---- Trees. ----


@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[3, 2], [15, 5, 2], [40, 2], [-1, 3], [2, -1, 1], [0, 3], []])
def test_disjoint_trees(dtype, replace, fanouts, monkeypatch):
    graph, seeds = one(dtype=dtype), {"n": torch.tensor([1, 5, 1, 3, *range(30)], dtype=dtype)}
    same(graph, seeds, fanouts, replace=replace, disjoint=True, seed=3)
    same(graph, seeds, fanouts, replace=replace, disjoint=True, resample=True, seed=4)
    for most in (0, 50, 150):  # tables grow
        monkeypatch.setattr(bounds, "BOUNDED_EDGES", most)
        same(graph, seeds, fanouts, replace=replace, disjoint=True, seed=most)


# ---- Time. ----


@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("fanouts", [[3, 2], [40, 2], [-1, 3]])
def test_times(dtype, replace, strategy, fanouts):
    node_time = torch.randint(20, (60,))
    graph, seeds = one(times=node_time), torch.tensor([1, 1, *range(40)])
    graph = to(dtype, graph)
    edge_time = {ONE: node_time[graph[ONE][1].long()]}
    how = dict(replace=replace, temporal_strategy=strategy, seed=5)
    seed_time = {"n": torch.randint(-1, 21, seeds.shape)}
    seeds = {"n": seeds.to(dtype)}
    same(graph, seeds, fanouts, node_time={"n": node_time}, **how)
    by_node = same(graph, seeds, fanouts, node_time={"n": node_time}, seed_time=seed_time, **how)
    by_edge = same(graph, seeds, fanouts, edge_time=edge_time, seed_time=seed_time, **how)
    assert torch.equal(by_node.edge[ONE], by_edge.edge[ONE]) and by_edge.batch is not None
    latest = seed_time["n"][by_node.batch["n"][by_node.row[ONE].long()].long()]
    assert (node_time[by_node.node["n"].long()][by_node.row[ONE].long()] <= latest).all()


# ---- Types. ----


@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize(
    "fanouts", [[3, 2, 2], [40, 1], [-1, 2], [0, 2], {k: [i, 2 * i - 1, 2] for i, k in enumerate(KINDS)}]
)
def test_types(dtype, disjoint, fanouts, monkeypatch):
    graph, seeds = to(dtype, hetero()), to(dtype, SEEDS)
    for how in ({}, {"replace": True}, {"resample": True}):
        same(graph, seeds, fanouts, disjoint=disjoint, seed=7, **how)
        same(graph, seeds, fanouts, disjoint=disjoint, num_nodes={"c": 20}, node_types=["z", "a"], seed=8, **how)
    for most in (0, 60):
        monkeypatch.setattr(bounds, "BOUNDED_EDGES", most)
        same(graph, {"b": seeds["b"]}, fanouts, disjoint=disjoint, num_nodes=SIZES, seed=9)


def test_types_without_seeds_or_edges():
    none = {
        kind: (torch.zeros(sizes[1] + 1, dtype=torch.int64), torch.empty(0).long()) for kind, sizes in KINDS.items()
    }
    for graph, seeds in itertools.product((hetero(), none), ({}, {"a": torch.empty(0).long()}, {"z": torch.arange(3)})):
        same(graph, seeds, [2, 3], seed=1)
    same(none, SEEDS, [2, -1], seed=1)


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_times_of_some_types(strategy):
    times = {"a": torch.randint(20, (40,)), "b": torch.randint(20, (30,))}
    graph, how = hetero(times), dict(temporal_strategy=strategy, seed=2)
    same(graph, SEEDS, [3, 2], node_time=times, **how)
    seed_time = {name: torch.randint(20, nodes.shape) for name, nodes in SEEDS.items()}
    same(graph, SEEDS, [3, -1], node_time={"a": times["a"]}, seed_time=seed_time, **how)
    edge_time = {kind: times["a"][graph[kind][1]] for kind in list(KINDS)[:2]}
    same(graph, SEEDS, [30, 2], edge_time=edge_time, seed_time=seed_time, **how)


# ---- Weights. ----


def lists(value):
    if isinstance(value, (dict, tuple)):
        return {k: lists(v) for k, v in value.items()} if isinstance(value, dict) else tuple(map(lists, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("fanouts", [[3, 2], [40, 2], [-1, 3], [70, 1]])
def test_a_weighted_batch_is_what_its_edges_say(dtype, replace, disjoint, fanouts, monkeypatch):
    graph, seeds = to(dtype, hetero()), to(dtype, SEEDS)
    weight = {kind: (torch.rand(300) - 0.3).clamp(min=0).double() for kind in list(KINDS)[:3]}
    weight[next(iter(KINDS))] = weight[next(iter(KINDS))].float()
    how = dict(edge_weight=weight, replace=replace, disjoint=disjoint, seed=6)
    out = on_gpu(graph, seeds, fanouts, **how)
    given = lists(out._asdict())
    choose = reference.chosen_in(given["edge"], given["col"])
    per_kind = dict.fromkeys(graph, fanouts)
    assert given == reference.sample(lists(graph), lists(seeds), per_kind, choose, disjoint)
    for kind, (indptr, _) in lists(graph).items():
        rows, hops = {}, [hop for hop, n in enumerate(given["num_nodes_per_hop"][kind[-1]]) for _ in range(n)]
        for k, place in zip(given["edge"][kind], given["col"][kind], strict=True):
            rows.setdefault(place, []).append(k)
        for place, node in enumerate(given["node"][kind[-1]]):
            chosen = rows.get(place, [])
            span = range(indptr[node], indptr[node + 1])
            heavy = sum(weight[kind][k] > 0 for k in span) if kind in weight else len(span)
            fanout = fanouts[hops[place]] if hops[place] < len(fanouts) else 0
            assert all(k in span for k in chosen) and (replace or len(set(chosen)) == len(chosen))
            if fanout < 0 or (not replace and len(span) <= fanout):
                assert chosen == list(span)
            else:
                assert len(chosen) == (fanout * (heavy > 0) if replace else min(fanout, heavy))
                assert kind not in weight or all(weight[kind][k] > 0 for k in chosen)
    monkeypatch.setattr(bounds, "BOUNDED_EDGES", 40)
    assert lists(on_gpu(graph, seeds, fanouts, **how)._asdict()) == given


def draws(count, trials, weight, replace=False):
    """Edges of a row that `trials` destinations draw: [trials, count], in the order in which they are drawn."""
    degree = weight.numel()
    indptr, indices = torch.tensor([0, degree] + [degree] * degree), torch.arange(1, degree + 1)
    given = to(DEVICE, (indptr, indices, torch.zeros(trials, dtype=torch.int64)))
    out = neighbor_sample(*given, [count], edge_weight=weight.to(DEVICE), replace=replace, seed=11)
    return out.edge.view(trials, count).cpu()


def likely(counts, expected):
    """Chi-square, of groups of outcomes large enough for it."""
    counts, expected = torch.as_tensor(counts).double(), torch.as_tensor(expected).double()
    assert counts[expected == 0].sum() == 0 and abs(counts.sum() - expected.sum()) < 1e-6 * expected.sum()
    order = expected.argsort(descending=True)
    group = (expected[order].cumsum(0) / 20).floor().long()
    counts, expected = (
        torch.zeros(int(group[-1]) + 1).double().index_add(0, group, part[order]) for part in (counts, expected)
    )
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert counts.numel() > 1
    return chi2.sf(float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1) > 1e-4


FEW = 10 if EMULATED else 1  # times fewer trials


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_with_replacement(dtype):
    weight = torch.tensor([0.0, 1, 4, 0, 0.5, 2.5, 0], dtype=dtype)
    found = torch.bincount(draws(40, 2_000 // FEW, weight, True).flatten(), minlength=7)
    assert likely(found, 80_000 / FEW * weight.double() / weight.sum())


@pytest.mark.parametrize("weights", [[1.0, 2, 3, 4, 0], [1e-3, 5, 1, 1, 20], [1.0, 2, 1e6, 3, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_without_replacement_are_those_of_one_draw_after_the_other(weights, dtype):
    weight, trials = torch.tensor(weights, dtype=dtype), 40_000 // FEW
    total = sum(weights)
    wanted = {
        (i, j): trials * weights[i] / total * weights[j] / (total - weights[i])
        for i, j in itertools.permutations(range(5), 2)
    }
    found = dict.fromkeys(wanted, 0)
    for pair in draws(2, trials, weight).tolist():
        found[tuple(pair)] += 1
    assert likely(list(found.values()), list(wanted.values()))


@pytest.mark.parametrize(("degree", "count"), [(100, 70), (40, 32), (1_500, 40)])
def test_weights_of_many_draws_without_replacement(degree, count):
    """In rounds of a warp, and of a block: the chance of each is found by draws one after the other in torch."""
    weight, trials = torch.rand(degree) + 0.02, 20_000 // FEW // (8 if degree > 1_000 else 1)
    drawn = draws(count, trials, weight)
    ordered = drawn.sort(dim=1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    found = torch.bincount(drawn.flatten(), minlength=degree)
    expected = torch.bincount(torch.multinomial(weight.expand(trials, -1), count).flatten(), minlength=degree)
    part = (found + expected) / (2 * trials)
    error = (found - expected).double() / (2 * trials * part * (1 - part)).sqrt().clamp(min=1)
    assert error.abs().max() < 5 and 0.5 < error.square().mean() < 1.6


@pytest.mark.parametrize("replace", [False, True])
def test_weights_of_a_hub(replace):
    weight = torch.rand(3_000) ** 4
    weight[:500] = 0  # the parts of some warps have none
    weight[2_900:] = 0
    trials = 300 if EMULATED else 30_000
    drawn = draws(3, trials, weight, replace)  # the first of a row is drawn by its weight among all
    expected = trials * weight.double() / weight.sum()
    assert likely(torch.bincount(drawn[:, 0], minlength=3_000), expected)
    if replace:
        assert likely(torch.bincount(drawn.flatten(), minlength=3_000), 3 * expected)


def test_weights_that_hardly_differ_from_zero_or_reach_the_largest():
    for values in ([5e-324] * 5, [1e-310, 1e300, 1e-310, 1e-300, 0], [1.7e308, 1e-300, 5e-324, 1e-300, 1e-320]):
        weight = torch.tensor(values, dtype=torch.float64)
        heavy = int((weight > 0).sum())
        for row in draws(4, 40, weight).tolist():
            assert len(set(row)) == 4 and all(values[k] > 0 for k in row)
        assert all(values[k] > 0 for k in draws(3, 40, weight, True).flatten().tolist()) and heavy >= 4


def test_edges_of_weight_zero():
    given = to(DEVICE, (torch.tensor([0, 4, 4, 4, 4, 4]), torch.tensor([1, 2, 3, 4]), torch.tensor([0])))

    def edges(weight, count, replace=False):
        weight = torch.tensor(weight, device=DEVICE)
        return neighbor_sample(*given, [count], edge_weight=weight, replace=replace).edge.tolist()

    assert edges([0.0, 0, 1, 0], 2) == [2]  # fewer than asked for
    assert edges([0.0, 0, 0, 0], 2) == edges([0.0, 0, 0, 0], 2, True) == []
    assert edges([0.0, 0, 1, 0], 3, True) == [2, 2, 2]
    assert edges([0.0, 0, 1, 0], 4) == edges([0.0, 0, 0, 0], -1) == [0, 1, 2, 3]  # all, as PyG has it


@pytest.mark.parametrize("replace", [False, True])
def test_weights_and_times_together(replace):
    time, weight = torch.arange(40), torch.tensor([0.0, 1, 3, 4] * 10)
    trials = 9_000 // FEW
    graph = {ONE: (torch.tensor([0, 40] + [40] * 39), torch.arange(40))}
    out = on_gpu(
        graph, {"n": torch.zeros(trials, dtype=torch.int64)}, [1], node_time={"n": time}, edge_weight={ONE: weight},
        seed_time={"n": torch.full((trials,), 6)}, replace=replace, seed=3,
    )  # fmt: skip
    assert likely(torch.bincount(out.edge[ONE], minlength=40), torch.where(time <= 6, weight, 0) / 12 * trials)


def test_runs_are_the_same_and_seeds_make_others():
    graph, weight = one(3_000), {ONE: torch.rand(3_000)}
    seeds = {"n": torch.arange(60)}
    for replace in (False, True):
        how = dict(edge_weight=weight, replace=replace)
        first, again, other = (on_gpu(graph, seeds, [20, 40], seed=seed, **how) for seed in (1, 1, 2))
        assert torch.equal(first.edge[ONE], again.edge[ONE]) and torch.equal(first.node["n"], again.node["n"])
        assert not torch.equal(first.edge[ONE], other.edge[ONE])


# ---- Bad input. ----


def refused(match, graph, seeds, fanouts, error=ValueError, **options):
    with pytest.raises(error, match=match):
        on_gpu(graph, seeds, fanouts, **options)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [2, 40])
def test_wrong_weights(replace, fanout, poisoned):
    for degree in (60, 2_000):
        graph = {ONE: (torch.tensor([0, degree, degree]), torch.ones(degree, dtype=torch.int64))}
        seeds = {"n": torch.tensor([0])}
        for wrong, said in ((float("nan"), "nan"), (-1.0, "-1.0"), (float("inf"), "inf")):
            weight = torch.ones(degree)
            weight[50] = wrong
            how = dict(edge_weight={ONE: weight}, replace=replace)
            refused(f"edge_weight: expected finite numbers .*got {said}.* at place 50", graph, seeds, [fanout], **how)
    weight = torch.full((degree,), 1e308, dtype=torch.float64)
    if replace:
        refused("add up to more", graph, seeds, [fanout], edge_weight={ONE: weight}, replace=True)
    else:
        assert on_gpu(graph, seeds, [fanout], edge_weight={ONE: weight}).edge[ONE].unique().numel() == fanout


def test_wrong_times_and_nodes(poisoned):
    graph = {ONE: (torch.tensor([0, 3, 3, 3]), torch.tensor([2, 1, 0]))}
    seeds, node_time = {"n": torch.tensor([0, 0])}, {"n": torch.tensor([1, 2, 5])}
    refused("ascending order of time", graph, seeds, [-1], node_time=node_time, seed_time={"n": torch.tensor([4, 4])})
    for wrong in ([3], [0, -1], [2**40]):
        refused(r"seeds: expected nodes in \[0, 3\), got", graph, {"n": torch.tensor(wrong)}, [2], node_time=node_time)
        refused(r"seeds: expected nodes in \[0, 3\), got", graph, {"n": torch.tensor(wrong)}, [2], disjoint=True)
    broken = {ONE: (graph[ONE][0], torch.tensor([2, 7, 0]))}
    refused("indices: expected nodes in .* got 7", broken, seeds, [-1], disjoint=True)
    refused("indices: expected nodes in .* got 7", broken, seeds, [2], node_time=node_time)
    typed = hetero()
    wrong = typed | {("a", "of", "b"): (typed["a", "of", "b"][0], typed["a", "of", "b"][1] + 40)}
    refused(r"indices: expected nodes in \[0, 40\), got", wrong, SEEDS, [-1])
    short = typed | {("a", "of", "b"): (typed["a", "of", "b"][0][:11], typed["a", "of", "b"][1])}
    refused("node 29 has no row: there are 10", short, SEEDS, [2])
    refused("seeds of|seed_time of 'b'", typed, SEEDS, [2], node_time={"a": torch.zeros(40, dtype=torch.int64)})
    refused("edge_weight", typed, SEEDS, [2], edge_weight={("a", "of", "b"): torch.ones(3)})
    refused("edge_weight", typed, SEEDS, [2], TypeError, edge_weight={("a", "of", "b"): torch.ones(300).long()})
    refused("node_time", typed, SEEDS, [2], TypeError, node_time={"a": torch.ones(40)})


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [3, 40, -1])
def test_a_graph_that_changes_meanwhile(fanout, replace, monkeypatch, poisoned):
    """Another stream may write into it between two stages: nothing is read or written out of bounds."""
    launch = on_cuda.lib.launch
    monkeypatch.setattr(bounds, "BOUNDED_EDGES", -1)  # so that steps are launched one by one
    changes = (lambda a: a.add_(10**6), lambda a: a.sub_(10**6), lambda a: a.zero_(), lambda a: a.flip(0))
    for change, weighted in itertools.product(changes, (False, True)):
        time = torch.arange(60, device=DEVICE)
        indptr, indices = to(DEVICE, relation(60, 60, 3_000, time.cpu()))
        weight = torch.rand(3_000, device=DEVICE) if weighted else None

        def changing(name, *args, arrays=(indptr, indices, weight), change=change):
            launch(name, *args)
            if name == "sample_degrees":
                for array in arrays:
                    if array is not None:
                        array.copy_(change(array.clone()))

        monkeypatch.setattr(on_cuda.lib, "launch", changing)
        with contextlib.suppress(ValueError):
            seeds = torch.arange(60, device=DEVICE)
            neighbor_sample(
                indptr, indices, seeds, [fanout, fanout], edge_weight=weight, node_time=time, replace=replace, seed=1
            )
        monkeypatch.setattr(on_cuda.lib, "launch", launch)


@pytest.mark.skipif(bool(EMULATED), reason="has one device")
def test_devices_that_differ():
    graph, seeds = to("cuda", one()), {"n": torch.arange(3, device="cuda")}
    for name, value in (
        ("edge_weight", {ONE: torch.rand(900)}),
        ("edge_time", {ONE: torch.zeros(900, dtype=torch.int64)}),
        ("node_time", {"n": torch.zeros(60, dtype=torch.int64)}),
    ):
        with pytest.raises(ValueError, match=f"{name}.*expected a tensor on cuda:0, as indptr is, got one on cpu"):
            hetero_neighbor_sample(graph, seeds, [2], **{name: value})


@pytest.mark.skipif(bool(EMULATED), reason="has nothing to wait for")
@pytest.mark.parametrize(
    ("options", "fanouts", "waits"),
    [
        ({}, [15, 10], 1),
        ({"disjoint": True}, [15, 10], 1),
        ({"disjoint": True}, [15, -1], 2),
        ({"edge_weight": {ONE: torch.rand(900)}}, [15, 40], 1),
        ({"edge_weight": {ONE: torch.rand(900)}, "replace": True}, [15, 10], 1),
        ({"node_time": {"n": torch.zeros(60, dtype=torch.int64)}}, [15, 10], 1),
    ],
)
def test_the_host_waits_once_and_for_unbounded_hops(options, fanouts, waits):
    given = to("cuda", (one(), {"n": torch.arange(30)}))
    options = to("cuda", options)
    hetero_neighbor_sample(*given, fanouts, seed=1, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            hetero_neighbor_sample(*given, fanouts, seed=1, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(warning.message) for warning in seen) == waits
