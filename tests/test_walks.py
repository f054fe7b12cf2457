"""Random walks: along edges, with the probabilities of node2vec by chi-square, repeatable; bad input."""

import pytest
import torch
from scipy.stats import chi2

from gnnaccel.lower import bounds
from gnnaccel.sampling import random_walk

EDGES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4], [1, 2, 3, 0, 2, 0, 1, 4, 0, 5, 2, 2]])
NODES = 6  # of which 5 has no edges of its own, 4 one that is there twice
INDPTR = torch.tensor([0, 3, 5, 8, 10, 12, 12])
INDICES = EDGES[1]


def has(source, target):
    return bool(((EDGES[0] == source) & (EDGES[1] == target)).any())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("p, q", [(1, 1), (0.5, 2)])
def test_walks_follow_edges_and_stay_where_there_are_none(dtype, p, q):
    seeds = torch.arange(NODES).repeat(50).to(dtype)
    walks = random_walk(INDPTR.to(dtype), INDICES.to(dtype), seeds, 7, p=p, q=q)
    assert walks.shape == (seeds.numel(), 8) and walks.dtype == dtype and torch.equal(walks[:, 0], seeds)
    for source, target in set(zip(walks[:, :-1].flatten().tolist(), walks[:, 1:].flatten().tolist(), strict=True)):
        assert has(source, target) or source == target == 5


@pytest.mark.parametrize("rounds", [16, 0])
@pytest.mark.parametrize("p, q", [(1, 1), (0.25, 4), (4, 0.25), (1, 0.5), (0.001, 1), (1, 1e-4), (1e4, 1)])
def test_the_step_after_two_nodes_has_the_weights_of_node2vec(monkeypatch, rounds, p, q):
    monkeypatch.setattr(bounds, "WALK_ROUNDS", rounds)
    count = 40_000
    walks = random_walk(INDPTR, INDICES, torch.zeros(count, dtype=torch.int64), 2, p=p, q=q, seed=5)
    statistic, freedom = 0.0, -1
    for middle in (1, 2, 3):
        weights = torch.tensor([1 / p if x == 0 else 1.0 if has(x, 0) else 1 / q for x in range(NODES)]).double()
        weights *= torch.tensor([has(middle, x) for x in range(NODES)])
        for node in weights.nonzero().flatten().tolist():
            expected = count / 3 * float(weights[node] / weights.sum())
            found = int(((walks[:, 1] == middle) & (walks[:, 2] == node)).sum())
            if expected < 5:
                assert found < 40
                continue
            statistic, freedom = statistic + (found - expected) ** 2 / expected, freedom + 1
    assert statistic < chi2.ppf(1 - 1e-6, freedom)


def test_a_seed_repeats_walks_and_torchs_generator_does():
    seeds = torch.arange(NODES).repeat(20)
    options = dict(p=2.0, q=0.5)
    first, again, other = (random_walk(INDPTR, INDICES, seeds, 9, seed=seed, **options) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads % 2 + 1)
    assert torch.equal(first, random_walk(INDPTR, INDICES, seeds, 9, seed=1, **options))
    torch.set_num_threads(threads)
    runs = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        runs.append([random_walk(INDPTR, INDICES, seeds, 9) for _ in range(2)])
    assert all(map(torch.equal, *runs)) and not torch.equal(*runs[0])


def test_rows_that_do_not_ascend_are_found_after_a_write_too():
    indices = INDICES.clone()
    random_walk(INDPTR, indices, torch.tensor([0]), 3, q=2.0)
    indices[:2] = torch.tensor([2, 1])
    assert random_walk(INDPTR, indices, torch.tensor([0]), 3).shape == (1, 4)
    with pytest.raises(ValueError, match=r"random_walk: indices: .*ascend"):
        random_walk(INDPTR, indices, torch.tensor([0]), 3, q=2.0)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(seeds=torch.tensor([NODES])), ValueError, r"seeds: expected nodes in \[0, 6\), got 6"),
        (dict(seeds=torch.tensor([-1])), ValueError, "seeds"),
        (dict(seeds=torch.tensor([0], dtype=torch.int32)), TypeError, "seeds"),
        (dict(indices=torch.full((12,), 9)), ValueError, "indices: expected nodes in"),
        (dict(indptr=torch.tensor([0, 30, 5, 8, 10, 12, 12])), ValueError, "indptr"),
        (dict(indptr=[0, 1]), TypeError, "indptr"),
        (dict(length=-1), ValueError, "length"),
        (dict(length=1.5), TypeError, "length"),
        (dict(p=0), ValueError, "p: expected"),
        (dict(q=float("nan")), ValueError, "q: expected"),
        (dict(q=-1.0), ValueError, "q: expected"),
    ],
)
def test_bad_input(change, error, words):
    given = dict(indptr=INDPTR, indices=INDICES, seeds=torch.tensor([0, 2]), length=3) | change
    with pytest.raises(error, match=f"random_walk: {words}"):
        random_walk(**given)


@pytest.mark.parametrize("q", [1.0, 2.0])
def test_nothing_to_walk(q):
    none = torch.empty(0, dtype=torch.int64)
    assert random_walk(INDPTR, INDICES, none, 3, q=q).shape == (0, 4)
    assert random_walk(torch.tensor([0, 0]), none, torch.tensor([0]), 2, q=q).tolist() == [[0, 0, 0]]
    assert random_walk(INDPTR, INDICES, torch.tensor([2]), 0, q=q).tolist() == [[2]]
