"""The CUDA sampler against the CPU's, bit for bit; probabilities by chi-square; bad input; what waits for the GPU."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from cuda_cases import DEVICE, EMULATED
from scipy.stats import chi2

from gnnaccel import sampling
from gnnaccel.lower import bounds
from gnnaccel.sampling import neighbor_sample, neighbors, on_cuda

KIND = ("n", "to", "n")
INDEX = (torch.int32, torch.int64)
NAMES = ("node", "row", "col", "edge")


def graph(degrees, num_nodes=None, dtype=torch.int64):
    """indptr and indices on the CPU: rows of these degrees, then empty ones; random sources."""
    degrees = torch.as_tensor(degrees)
    num_nodes = num_nodes or degrees.numel()
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1 : degrees.numel() + 1] = degrees.cumsum(0)
    indptr[degrees.numel() + 1 :] = indptr[degrees.numel()]
    return indptr.to(dtype), torch.randint(num_nodes, (int(indptr[-1]),)).to(dtype)


def uneven(dtype=torch.int64):
    """Empty rows, rows of all lengths about the fan-outs of the tests, hubs."""
    return graph(
        [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 34, 64, 65, 130, 700, 0, 3_000, *[6] * 80], 120, dtype
    )


def on_cpu(arrays, seeds, fanouts, **options):
    with pytest.MonkeyPatch.context() as patch:  # also where tensors of the CPU pass for CUDA ones
        patch.setattr(neighbors, "_is_on_gpu", lambda relations: False)
        out = sampling.hetero_neighbor_sample({KIND: arrays}, {"n": seeds}, fanouts, **options)
    parts = (out.node["n"], out.row[KIND], out.col[KIND], out.edge[KIND])
    return parts, out.num_nodes_per_hop["n"], out.num_edges_per_hop[KIND]


def moved(*tensors):
    return [tensor.to(DEVICE) for tensor in tensors]


def same(arrays, seeds, fanouts, **options):
    """End the test unless the GPU's sample is the CPU's; returns it."""
    out = neighbor_sample(*moved(*arrays, seeds), fanouts, **options)
    wanted, nodes, edges = on_cpu(arrays, seeds, fanouts, **options)
    assert (out.num_nodes_per_hop, out.num_edges_per_hop, out.batch) == (nodes, edges, None)
    for name, want in zip(NAMES, wanted, strict=True):
        got = getattr(out, name)
        assert got.device.type == DEVICE.type and got.dtype == want.dtype
        assert torch.equal(got.cpu(), want), name
    return out


@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    "fanouts",
    [
        [3, 2],
        [4],
        [5],
        [8, 8],
        [15, 10, 5],
        [17],
        [32],
        [33],
        [70, 2],
        [1_000],
        [-1],
        [2, -1],
        [-1, 3, -1],
        [0, 5],
        [1, 0],
        [],
    ],
)
def test_samples_are_the_cpus(dtype, replace, fanouts):
    arrays = uneven(dtype)
    for seed in range(3):
        same(arrays, torch.randperm(120)[:50].to(dtype), fanouts, replace=replace, seed=seed)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[15, 10, 5], [3, 40, 2], [-1, 2, -1], [0, 4]])
@pytest.mark.parametrize("dtype", INDEX)
def test_hops_for_all_nodes_so_far(dtype, fanouts, replace, monkeypatch):
    arrays = uneven(dtype)
    for seeds in (torch.randperm(120)[:50].to(dtype), torch.tensor([19, 3, 19, 0], dtype=dtype)):
        same(arrays, seeds, fanouts, replace=replace, resample=True, seed=6)
    monkeypatch.setattr(bounds, "BOUNDED_EDGES", 60)
    same(arrays, seeds, fanouts, replace=replace, resample=True, seed=2**64 - 1)


@pytest.mark.parametrize("replace", [False, True])
def test_seeds_that_repeat_or_have_no_edges(replace):
    arrays = uneven()
    for seeds in ([21, 0, 21, 20, 19, 0, 21], [0, 20], [119] * 40, [], [21]):
        same(arrays, torch.tensor(seeds, dtype=torch.int64), [6, 40, 3], replace=replace, seed=5)


def test_a_graph_without_nodes_or_edges():
    none = torch.empty(0, dtype=torch.int64)
    same((torch.zeros(1, dtype=torch.int64), none), none, [3, -1], seed=1)
    same((torch.zeros(10, dtype=torch.int64), none), torch.tensor([3, 8, 3]), [3, 50, -1], seed=1)


@pytest.mark.parametrize("dtype", INDEX)
def test_few_of_many_nodes_are_hashed(dtype, monkeypatch):
    num_nodes = 200_000
    arrays = graph([*torch.randint(1, 60, (300,)).tolist()], num_nodes, dtype)
    arrays[1][::2] %= 300
    begin, batches = on_cuda.begin, []
    monkeypatch.setattr(on_cuda, "begin", lambda *args: batches.append(begin(*args)) or batches[-1])
    for seed in range(3):
        same(arrays, torch.randperm(300)[:20].to(dtype), [6, 40], seed=seed)
        assert batches[-1].types[0].slots


def test_hops_that_the_host_has_to_ask_for(monkeypatch):
    arrays = uneven()
    seeds = torch.randperm(120)[:30]
    for most in (0, 100, 300, 10_000):
        monkeypatch.setattr(bounds, "BOUNDED_EDGES", most)
        for replace in (False, True):
            same(arrays, seeds, [4, 9, 2], replace=replace, seed=2)
            same(arrays, seeds, [4, -1, 40], replace=replace, seed=2)


def test_every_row_of_a_large_hop():
    """Chains of replaced draws are longest where nearly all of a row is drawn."""
    for degree, fanout in ((33, 32), (17, 16), (6, 5), (40, 36), (200, 190), (1_100, 1_024)):
        arrays = graph([degree] * 60, 64)
        same(arrays, torch.arange(64), [fanout], seed=degree)
        same(arrays, torch.arange(64), [fanout // 2 + 1], seed=degree)


def draws(degree, fanout, replace, batches):
    """How often each edge of a row comes, over batches of 400 seeds that are all its node."""
    indptr, indices = moved(*graph([degree], 2))
    seeds = torch.zeros(400, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(degree, dtype=torch.int64)
    for seed in range(batches):
        out = neighbor_sample(indptr, indices, seeds, [fanout], replace=replace, seed=seed)
        counts += torch.bincount(out.edge.cpu(), minlength=degree)
    return counts


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("degree", "fanout"), [(6, 3), (40, 10), (1_000, 25), (90, 60)])
def test_edges_are_equally_likely(degree, fanout, replace):
    batches = 4 if EMULATED else 40
    counts = draws(degree, fanout, replace, batches).double()
    assert counts.sum() == 400 * batches * fanout
    expected = 400 * batches * fanout / degree
    # Drawn without replacement, counts vary by 1 - fanout / degree less.
    spread = expected * (1 if replace else (degree - fanout) / (degree - 1))
    statistic = float(((counts - expected) ** 2).sum() / spread)
    assert statistic < chi2.ppf(1 - 1e-6, degree - 1)


def test_runs_are_the_same():
    arrays = moved(*uneven())
    seeds = torch.randint(120, (300,), device=DEVICE)
    runs = [neighbor_sample(*arrays, seeds, [20, 40, -1], seed=9) for _ in range(3)]
    for name in NAMES:
        assert all(torch.equal(getattr(runs[0], name), getattr(run, name)) for run in runs)
    torch.manual_seed(4)
    first = neighbor_sample(*arrays, seeds, [4]).edge
    again = neighbor_sample(*arrays, seeds, [4]).edge
    torch.manual_seed(4)
    assert torch.equal(neighbor_sample(*arrays, seeds, [4]).edge, first)
    assert not torch.equal(again, first)


def test_what_is_kept_is_no_larger_than_the_batch():
    indptr, indices = moved(*graph([1] * 50))
    out = neighbor_sample(indptr, indices, torch.arange(40, device=DEVICE), [30, 30])
    for name in NAMES:
        assert getattr(out, name).untyped_storage().nbytes() <= 3 * 8 * 200


# ---- Bad input. ----


def refused(match, *arrays, fanouts=(2,), error=ValueError, **options):
    with pytest.raises(error, match=match):
        neighbor_sample(*(a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arrays), list(fanouts), **options)


@pytest.mark.parametrize("fanouts", [[2], [40], [-1], [2, -1]])
def test_wrong_indices_are_refused_and_not_followed(fanouts, poisoned):
    indptr, indices = torch.tensor([0, 3, 5, 5]), torch.tensor([1, 2, 0, 1, 0])
    for wrong in ([0, 3], [-1, 0], [2**40]):
        refused(r"seeds: expected nodes in \[0, 3\), got", indptr, indices, torch.tensor(wrong), fanouts=fanouts)
    for place, node in ((0, 3), (1, -2), (2, 2**40)):
        wrong = indices.clone()
        wrong[place] = node
        seeds = torch.zeros(9, dtype=torch.int64)
        refused(rf"indices: expected nodes in \[0, 3\), got {node}", indptr, wrong, seeds, fanouts=fanouts)
    for broken in ([0, -3, 5, 5], [4, 2, 5, 5], [0, 2**41, 5, 5], [-1, 3, 5, 5]):
        refused(
            "indptr: expected ascending places", torch.tensor(broken), indices, torch.tensor([0, 1]), fanouts=fanouts
        )


@pytest.mark.parametrize("fanouts", [[-1, -1], [30, 30], [40, 35], [3, 30]])
def test_rows_that_overlap(fanouts, poisoned):
    """More edges from distinct nodes than the graph has, and than there is room for."""
    indptr = torch.tensor([0, 40]).repeat(40)  # every other row is all edges, which come from these rows' nodes
    refused("rows that do not overlap", indptr, 2 * torch.arange(39).repeat(2)[:40], torch.tensor([0]), fanouts=fanouts)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [3, 20, 40, -1])
@pytest.mark.parametrize("dtype", INDEX)
def test_a_graph_that_changes_meanwhile(dtype, fanout, replace, monkeypatch, poisoned):
    """Another stream may write to the graph between two steps: nothing is read or written out of bounds."""
    launch = on_cuda.lib.launch
    monkeypatch.setattr(bounds, "BOUNDED_EDGES", -1)  # so that steps are launched one by one
    for change in (lambda a: a.add_(10**6), lambda a: a.sub_(10**6), lambda a: a.zero_(), lambda a: a.flip(0)):
        indptr, indices, seeds = moved(*uneven(dtype), torch.arange(60).to(dtype))

        def changing(name, *args, indptr=indptr, change=change):
            launch(name, *args)
            if name == "sample_degrees":
                indptr.copy_(change(indptr.clone()))

        monkeypatch.setattr(on_cuda.lib, "launch", changing)
        with contextlib.suppress(ValueError):
            neighbor_sample(indptr, indices, seeds, [fanout, fanout], replace=replace, seed=1)
        monkeypatch.setattr(on_cuda.lib, "launch", launch)


def test_arguments():
    indptr, indices = uneven()
    seeds = torch.tensor([1, 2])
    refused("int32 or int64", indptr.float(), indices, seeds, error=TypeError)
    refused("indices", indptr, indices.int(), seeds, error=TypeError)
    refused("seeds", indptr, indices, seeds.int(), error=TypeError)
    refused("seeds", indptr, indices, [1, 2], error=TypeError)
    refused("one dimension", indptr, indices, seeds[None])
    refused("num_neighbors", indptr, indices, seeds, fanouts=[-2])
    refused("num_neighbors", indptr, indices, seeds, fanouts=[1.5], error=TypeError)
    refused("temporal_strategy", indptr, indices, seeds, temporal_strategy="first")
    refused("seed", indptr, indices, seeds, seed="x", error=TypeError)


@pytest.mark.skipif(bool(EMULATED), reason="has one device")
def test_devices_that_differ():
    indptr, indices = uneven()
    seeds = torch.tensor([1, 2])
    for arrays in ((indptr.cuda(), indices, seeds), (indptr.cuda(), indices.cuda(), seeds)):
        with pytest.raises(
            ValueError, match=r'expected a tensor on cuda:0, as indptr is, got one on cpu; .*\.to\("cuda:0"\)'
        ):
            neighbor_sample(*arrays, [2])
    for arrays in ((indptr, indices.cuda(), seeds), (indptr, indices, seeds.cuda())):
        with pytest.raises(ValueError, match="expected a tensor on the CPU, got one on cuda:0"):
            neighbor_sample(*arrays, [2])
    for other in (
        lambda: sampling.induced_subgraph(indptr.cuda(), indices.cuda(), seeds),
        lambda: sampling.induced_subgraph(indptr, indices, seeds.cuda()),
        lambda: sampling.hgt_sample({KIND: (indptr.cuda(), indices.cuda())}, {"n": seeds}, {"n": [2]}),
    ):
        with pytest.raises(ValueError, match="expected a tensor on"):
            other()


# ---- Streams. ----


@pytest.mark.skipif(bool(EMULATED), reason="has no streams")
def test_a_side_stream():
    arrays = uneven()
    seeds = torch.randperm(120)[:50]
    stream = torch.cuda.Stream()
    large = torch.randn(4_000, 4_000, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(10):
            large = large @ large * 1e-3
        given = moved(*arrays, seeds)  # behind the products: whoever reads it from another stream reads too early
        out = neighbor_sample(*given, [15, 40, -1], seed=3)
    stream.synchronize()
    wanted, *_ = on_cpu(arrays, seeds, [15, 40, -1], seed=3)
    for name, want in zip(NAMES, wanted, strict=True):
        assert torch.equal(getattr(out, name).cpu(), want), name


def waited(call) -> int:
    """How often the host waits in a second call."""
    call()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)


@pytest.mark.skipif(bool(EMULATED), reason="has nothing to wait for")
@pytest.mark.parametrize(("fanouts", "waits"), [([15, 10, 5], 1), ([40, 3], 1), ([-1, 5], 2), ([5, -1], 1)])
def test_the_host_waits_once_and_for_unbounded_hops(fanouts, waits):
    arrays = moved(*uneven(), torch.arange(50))
    assert waited(lambda: neighbor_sample(*arrays, fanouts, seed=1)) == waits


@pytest.mark.skipif(bool(EMULATED), reason="has nothing to wait for")
@pytest.mark.parametrize("hops", [0, 1, 3])
def test_the_host_waits_twice_in_each_hop_of_hgt(hops):
    indptr, indices, seeds = moved(*uneven(), torch.arange(9))
    graph = {("n", name, "n"): (indptr, indices) for name in ("to", "of", "by")}
    assert waited(lambda: sampling.hgt_sample(graph, {"n": seeds}, {"n": [6] * hops})) == 1 + 2 * hops + 2


# ---- Walks, which are torch's operations on either device. ----


@pytest.mark.parametrize("q", [1.0, 0.5])
def test_walks_follow_edges(q):
    indptr, indices = uneven()
    rows = torch.repeat_interleave(torch.arange(120), indptr.diff())
    indices = indices[(rows * 120 + indices).argsort()]
    seeds = torch.arange(120).repeat(20)
    walks = sampling.random_walk(indptr.to(DEVICE), indices.to(DEVICE), seeds.to(DEVICE), 6, q=q, seed=3)
    assert walks.device.type == torch.device(DEVICE).type
    walks = walks.cpu()
    edges = torch.zeros(120, 120, dtype=torch.bool)
    edges[rows, indices] = True
    edges[indptr.diff() == 0] = torch.eye(120, dtype=torch.bool)[indptr.diff() == 0]  # there they stay
    assert torch.equal(walks[:, 0], seeds) and edges[walks[:, :-1], walks[:, 1:]].all()
