"""What torch_geometric.distributed calls of pyg-lib, by ours: small cases, and sampling that is not distributed."""

import pytest
import torch

pytest.importorskip("torch_geometric")
from gnnaccel.pyg_backend import dist_sampling

# Node v of a ring of six has v - 1 and v + 1 as neighbours.
PTR = torch.arange(0, 13, 2)
RING = torch.tensor([(v + step) % 6 for v in range(6) for step in (-1, 1)])


def one_hop(seed, count, **options):
    defaults = dict.fromkeys(("node_time", "edge_time", "seed_time", "edge_weight"))
    options = defaults | {"replace": False, "disjoint": False, "temporal_strategy": "uniform"} | options
    return dist_sampling._one_hop(PTR, RING, torch.tensor(seed), count, _csc=True, _directed=True, **options)


def test_all_neighbours_of_each_seed():
    node, edge, begins = one_hop([2, 3, 2], -1)
    assert node.tolist() == [2, 3, 2, 1, 3, 2, 4, 1, 3]
    assert edge.tolist() == [4, 5, 6, 7, 4, 5] and begins == [3, 5, 7, 9]


@pytest.mark.parametrize("replace", [False, True])
def test_some_neighbours_of_each_seed(replace):
    node, edge, begins = one_hop([0, 5], 2 if replace else 1, replace=replace)
    each = 2 if replace else 1
    assert begins == [2, 2 + each, 2 + 2 * each]
    assert torch.equal(node[2:], RING[edge]) and set(edge[:each].tolist()) <= {0, 1}


def test_neighbours_that_are_early_enough():
    ascending = RING.view(-1, 2).sort(1).values.flatten()
    node, _edge, begins = dist_sampling._one_hop(
        *(PTR, ascending, torch.tensor([2, 3]), 2, torch.arange(6), None, torch.tensor([2, 3]), None, True, False),
        *(True, True, "uniform"),
    )
    assert node.tolist() == [[0, 2], [1, 3], [0, 1], [1, 2]] and begins == [2, 3, 4]


def test_what_partitions_find_comes_in_the_order_of_the_seeds():
    nodes = [torch.tensor([2, 7, 8]), torch.tensor([0, 1, 4, 5, 6]), torch.empty(0, dtype=torch.int64)]
    edges = [torch.tensor([17, 18]), torch.tensor([14, 15, 16]), torch.empty(0, dtype=torch.int64)]
    begins, batch = [[1, 3], [2, 4, 5], []], torch.tensor([5, 6, 7])
    node, edge, tree, counts = dist_sampling._merged(nodes, edges, begins, [1, 0, 1], [0, 0, 1], 3, 2, batch, True)
    assert node.tolist() == [4, 5, 7, 8, 6] and edge.tolist() == [14, 15, 17, 18, 16]
    assert tree.tolist() == [5, 5, 6, 6, 7] and counts == [2, 2, 1]


@pytest.mark.parametrize(("disjoint", "sources"), [(False, [2, 1, 0, 3]), (True, [2, 3, 4, 5])])
@pytest.mark.parametrize("csc", [True, False])
def test_local_numbers(disjoint, sources, csc):
    seed, nodes, batch = torch.tensor([2, 3]), torch.tensor([1, 3, 2, 4]), torch.tensor([0, 0, 1, 1])
    expected = [sources, [0, 0, 1, 1]][:: 1 if csc else -1]
    found = dist_sampling._relabelled(seed, nodes, [2, 2], 6, batch if disjoint else None, csc, disjoint)
    assert [part.tolist() for part in found] == expected
    of_types = dist_sampling._relabelled_hetero(
        *(["v"], [("v", "to", "v")], {"v": seed}, {"v": nodes}, {"v__to__v": [[2, 2]]}, {"v": 6}),
        *({"v": batch} if disjoint else None, csc, disjoint),
    )
    assert [part["v__to__v"].tolist() for part in of_types] == expected


def test_trees_are_numbered_in_the_order_of_the_seeds():
    """A link's ends need not come as the node types do: b's seed has tree 0, a's 1, in which it finds itself."""
    empty = torch.empty(0, dtype=torch.int64)
    rows, cols = dist_sampling._relabelled_hetero(
        *(["a", "b"], [("a", "to", "a")], {"b": torch.tensor([7]), "a": torch.tensor([3])}),
        *({"a": torch.tensor([3, 5]), "b": empty}, {"a__to__a": [[2]]}, {}),
        *({"a": torch.tensor([1, 1]), "b": empty}, True, True),
    )
    assert rows["a__to__a"].tolist() == [0, 1] and cols["a__to__a"].tolist() == [0, 0]


def test_nothing_is_found():
    empty = torch.empty(0, dtype=torch.int64)
    row, col = dist_sampling._relabelled(torch.tensor([2, 3]), empty, [], 6, None, True, False)
    assert row.numel() == col.numel() == 0
    rows, cols = dist_sampling._relabelled_hetero(
        *(["a", "b"], [("a", "to", "b")], {"b": torch.tensor([1])}, {"a": empty, "b": empty}),
        *({"a__to__b": [[], []]}, {}, None, True, False),
    )
    assert rows["a__to__b"].numel() == cols["a__to__b"].numel() == 0
