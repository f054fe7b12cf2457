"""Induced subgraphs and samples by layers: each way to make them, against plain Python; HGT by chi-square."""

import collections
import itertools
import weakref

import pytest
import torch
from sampling_graphs import INDICES, INDPTR, SEEDS, csc, hetero, p_value, plain
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnnaccel import sampling
from gnnaccel.lower import bounds
from gnnaccel.sampling import by_torch, hetero_neighbor_sample, hgt_sample, induced_subgraph, neighbor_sample


@pytest.fixture(params=["kernels", "torch's operations", "the same in pieces", "the same without a table"])
def way(request, monkeypatch):
    """Each way to make them, on the CPU; a GPU does it in torch's operations."""
    monkeypatch.setattr(by_torch, "serves", lambda array: request.param != "kernels")
    if request.param == "the same in pieces":
        monkeypatch.setattr(bounds, "EDGES_AT_ONCE", 7)
    if request.param == "the same without a table":
        monkeypatch.setattr(bounds, "TABLE_NODES", 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("batched", [False, True])
def test_induced_subgraphs(dtype, batched, way):
    indptr, indices = csc(60, 60, 900, dtype)
    nodes = torch.randperm(60)[:25].to(dtype)
    nodes[24] = nodes[3]
    batch = (torch.arange(25) % 3).to(dtype)
    out = induced_subgraph(indptr, indices, nodes, batch=batch if batched else None)
    place = {}
    for i, v in enumerate(nodes.tolist()):
        place.setdefault((int(batch[i]) if batched else 0, v), i)
    wanted = [
        (place[tree, int(indices[k])], i, k)
        for i, v in enumerate(nodes.tolist())
        for k in range(int(indptr[v]), int(indptr[v + 1]))
        if (tree := int(batch[i]) if batched else 0, int(indices[k])) in place
    ]
    assert list(zip(*(part.tolist() for part in out[1:]), strict=True)) == wanted
    assert torch.equal(out.indptr.diff(), torch.bincount(out.col, minlength=25).to(dtype))


def test_induced_subgraph_between_two_types(way):
    indptr, indices = csc(30, 40, 400)
    out = induced_subgraph(indptr, indices, torch.tensor([1, 7]), sources=torch.tensor([4, 2, 9]), num_sources=30)
    assert torch.equal(indices[out.edge], torch.tensor([4, 2, 9])[out.row])
    full = torch.isin(indices[indptr[1] : indptr[2]], torch.tensor([4, 2, 9])).sum()
    assert out.indptr[1] == full > 0
    far = (1 << 62) + 1  # of a type of which nobody says how many there are
    named = induced_subgraph(indptr, indices + far, torch.tensor([1, 7]), sources=torch.tensor([4, 2, 9]) + far)
    assert all(map(torch.equal, named, out))


def test_ego_subgraphs(way):
    indptr, indices = csc(40, 40, 200)
    node, ptr, root, edges = sampling.ego_subgraphs(indptr, indices, torch.tensor([1, 2, 1]), [-1, -1])
    assert torch.equal(node[root], torch.tensor([1, 2, 1]))
    for i, v in enumerate((1, 2, 1)):
        around = neighbor_sample(indptr, indices, torch.tensor([v]), [-1, -1]).node.sort().values
        assert torch.equal(node[ptr[i] : ptr[i + 1]], around)
        alone = induced_subgraph(indptr, indices, around)
        mine = (edges.col >= ptr[i]) & (edges.col < ptr[i + 1])
        assert torch.equal(edges.row[mine] - ptr[i], alone.row) and torch.equal(edges.edge[mine], alone.edge)


def test_hgt_takes_all_that_is_there_and_all_edges_between(way):
    graph = hetero()
    out = hgt_sample(graph, {"a": torch.tensor([1, 2])}, {name: [100, 100] for name in "abc"})
    wanted = hetero_neighbor_sample(graph, {"a": torch.tensor([1, 2])}, [-1, -1])
    for name in "abc":
        assert out.node[name].sort().values.tolist() == wanted.node[name].sort().values.tolist()
    for kind, arrays in graph.items():
        for ends, side, place in ((arrays[1], kind[0], out.row), (None, kind[-1], out.col)):
            nodes = out.node[side][place[kind]]
            if ends is not None:
                assert torch.equal(ends[out.edge[kind]], nodes)
            else:
                assert torch.equal(torch.searchsorted(arrays[0], out.edge[kind], right=True) - 1, nodes)


def test_hgt_draws_by_the_square_of_what_was_given(way):
    # 3 gets 1/2 + 1/2 of the two seeds, 4 and 5 get 1/2 each: 4 to 1 to 1.
    indptr, indices = torch.tensor([0, 2, 4, 4, 4, 4, 4]), torch.tensor([3, 4, 3, 5])
    graph, found = {("n", "to", "n"): (indptr, indices)}, torch.zeros(6)
    for seed in range(3000):
        found[hgt_sample(graph, {"n": torch.tensor([0, 1])}, {"n": [1]}, seed=seed).node["n"][2]] += 1
    assert p_value(found, torch.tensor([0, 0, 0, 2000.0, 500, 500])) > 0.01


def test_hgt_adds_up_what_was_given_through_several_edge_types(way):
    # Of "b" node 2 gets 1/2 of each of three rows, 0 and 1 get 1/2 of one, 3 gets 1/2 too: 9 to 1 to 1 to 1.
    graph = {
        ("b", "to", "a"): (torch.tensor([0, 2, 4]), torch.tensor([2, 0, 1, 2])),
        ("b", "of", "a"): (torch.tensor([0, 2, 2]), torch.tensor([2, 3])),
        ("c", "of", "a"): (torch.tensor([0, 1, 1]), torch.tensor([5])),
    }
    found = torch.zeros(4)
    for seed in range(2000):
        out = hgt_sample(graph, {"a": torch.tensor([0, 1])}, {"a": [1], "b": [1], "c": [2]}, seed=seed)
        found[out.node["b"][0]] += 1
        assert out.node["a"].tolist() == [0, 1] and out.node["c"].tolist() == [5]
    assert p_value(found, torch.tensor([1, 1, 9, 1]) * 2000 / 12) > 0.01


@pytest.mark.parametrize("degree", [1, 3, 4, 7])
def test_what_a_hub_gives_to_is_any_set_as_likely(degree, monkeypatch):
    monkeypatch.setattr(bounds, "HGT_SHARED", 3)
    monkeypatch.setattr(bounds, "EDGES_AT_ONCE", 20_000)
    places = by_torch.picked(torch.full((10_000,), degree), torch.Generator().manual_seed(1))[:, :degree]
    sets = list(itertools.combinations(range(degree), min(degree, 3)))
    found = torch.zeros(len(sets))
    for drawn, count in collections.Counter(map(tuple, places.tolist())).items():
        found[sets.index(drawn)] = count
    assert len(sets) == 1 or p_value(found, torch.full((len(sets),), 10_000 / len(sets))) > 0.01


class Living(TorchDispatchMode):
    """Counts the bytes of tensors made inside, and the most at once."""

    def __init__(self):
        super().__init__()
        self.bytes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.bytes:
                self.bytes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata)
        return out

    def forget(self, key):
        self.now -= self.bytes.pop(key)


@pytest.mark.parametrize("hops", [1, 3])
def test_memory_of_what_hubs_give_to(hops, monkeypatch):
    monkeypatch.setattr(by_torch, "serves", lambda array: True)
    monkeypatch.setattr(bounds, "EDGES_AT_ONCE", 10_000)
    num_nodes, batch, degree = 30_000, 2000, 60
    relation = torch.arange(num_nodes + 1) * degree, torch.randint(num_nodes, (num_nodes * degree,))
    graph = {("n", "to", "n"): relation, ("n", "of", "n"): relation}
    with Living() as living:
        hgt_sample(graph, {"n": torch.arange(batch)}, {"n": [batch] * hops}, seed=1)
    assert living.peak < 2 * batch * 3300 * hops, living.peak / (2 * batch * hops)


class Noting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names[op._opname] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("at_once", [7, 1 << 22])
def test_no_operation_makes_the_host_wait_for_a_size(at_once, monkeypatch):
    monkeypatch.setattr(by_torch, "serves", lambda array: True)
    monkeypatch.setattr(bounds, "EDGES_AT_ONCE", at_once)
    with Noting() as seen:
        hgt_sample(hetero(), {"a": torch.tensor([1, 2])}, {name: [9, 9] for name in "abc"}, seed=1)
    assert not {"_unique2", "unique_dim", "nonzero", "masked_select"} & set(seen.names)
    assert seen.names["_local_scalar_dense"] == 1  # whether the seeds are there


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_hgt_repeats_a_seed_and_its_edges_are_of_the_graph(dtype, way):
    graph = hetero(dtype)
    given = {"b": torch.tensor([3, 3, 1], dtype=dtype)}, {"a": [3, 0, 4], "b": [0, 2, 2], "c": [1, 1, 1]}
    out = hgt_sample(graph, *given, seed=5)
    assert plain(hgt_sample(graph, *given, seed=5)) == plain(out)
    for (source, _, target), edges in out.edge.items():
        assert edges.dtype == out.node[source].dtype == dtype
        assert len(out.node[target]) == sum(out.num_nodes_per_hop[target])
    for name, seeds in (("a", 0), ("b", 3), ("c", 0)):
        assert out.node[name][seeds:].unique().numel() == out.node[name].numel() - seeds
    assert out.node["b"][:3].tolist() == [3, 3, 1] and not {1, 3} & set(out.node["b"][3:].tolist())


def test_hgt_samples_hubs_in_part_and_counts_by_hop(way):
    indptr, indices = torch.tensor([0, 200] + [200] * 199), torch.arange(200)
    graph = {("n", "to", "n"): (indptr, indices)}
    out = hgt_sample(graph, {"n": torch.tensor([0])}, {"n": [100, 3]}, seed=1)
    assert out.num_nodes_per_hop["n"][0] == 1 and 49 <= out.num_nodes_per_hop["n"][1] <= 50
    assert out.node["n"].unique().numel() == out.node["n"].numel()


def test_bad_input_of_others(way):
    graph = {("a", "to", "b"): (INDPTR, INDICES)}
    both = dict(seeds={"a": SEEDS, "b": SEEDS}, num_samples={"a": [2, 2], "b": [2, 2]})
    for call, error in (
        (lambda: hetero_neighbor_sample(graph, {"b": SEEDS}, {}), ValueError),
        (lambda: hetero_neighbor_sample(graph, {"b": SEEDS}, [1], edge_weight={("x", "y", "z"): SEEDS}), ValueError),
        (lambda: hetero_neighbor_sample(graph, {"b": SEEDS + 7}, [1]), ValueError),
        (lambda: hetero_neighbor_sample(graph, {"a": SEEDS}, [1], num_nodes={"a": 1}), ValueError),
        (lambda: induced_subgraph(INDPTR, INDICES, torch.tensor([3])), ValueError),
        (lambda: induced_subgraph(INDPTR, INDICES, SEEDS, batch=SEEDS[:1]), ValueError),
        (lambda: induced_subgraph(INDPTR, torch.tensor([1, 9, 2]), SEEDS), ValueError),
        (lambda: induced_subgraph(torch.tensor([0, 2, 1, 3]), INDICES, SEEDS), ValueError),
        (lambda: induced_subgraph(INDPTR, INDICES, SEEDS, sources=SEEDS - 1), ValueError),
        (lambda: induced_subgraph(INDPTR, INDICES, SEEDS, sources=SEEDS, num_sources=2), ValueError),
        (lambda: hgt_sample(graph, {"b": SEEDS}, {"b": [1]}), ValueError),
        (lambda: hgt_sample(graph, {"b": SEEDS}, {"a": [1], "b": [-1]}), ValueError),
        (lambda: hgt_sample(graph, {"b": SEEDS + 7}, {"a": [1], "b": [1]}), ValueError),
        (lambda: hgt_sample({}, {"b": SEEDS}, {"b": [1]}), TypeError),
        (lambda: hgt_sample(graph, {"a": SEEDS - 1}, {"a": [1], "b": [1]}), ValueError),
        (lambda: hgt_sample({**graph, ("b", "to", "a"): (INDPTR, INDICES + 1)}, **both), ValueError),
        (lambda: hgt_sample({**graph, ("b", "to", "a"): (INDPTR, INDICES - 2)}, **both), ValueError),
        (lambda: hgt_sample({**graph, ("b", "to", "a"): (INDPTR + 1, INDICES)}, **both), ValueError),
        (lambda: hgt_sample({**graph, ("b", "to", "a"): (INDPTR[:1], INDICES)}, **both), ValueError),
        (lambda: hgt_sample({**graph, ("b", "of", "a"): (INDPTR[:2], INDICES)}, **both), ValueError),
    ):
        with pytest.raises(error, match=r"sample: |subgraph: "):
            call()


def test_empty_seeds_and_graphs_without_edges(way):
    none = torch.empty(0, dtype=torch.int64)
    out = neighbor_sample(INDPTR, INDICES, none, [2, 2])
    assert out.node.numel() == 0 and out.num_nodes_per_hop == [0, 0, 0] and out.num_edges_per_hop == [0, 0]
    out = neighbor_sample(torch.zeros(4).long(), none, SEEDS, [2])
    assert out.node.tolist() == [0, 1] and out.edge.numel() == 0
    assert induced_subgraph(INDPTR, INDICES, none).indptr.tolist() == [0]
    assert induced_subgraph(INDPTR, INDICES, SEEDS, sources=none).indptr.tolist() == [0, 0, 0]
    assert induced_subgraph(torch.zeros(4).long(), none, SEEDS).indptr.tolist() == [0, 0, 0]
    assert hgt_sample({("a", "to", "a"): (INDPTR, INDICES)}, {}, {"a": [2]}).node["a"].numel() == 0
    assert neighbor_sample(INDPTR, INDICES, SEEDS, []).node.tolist() == [0, 1]
