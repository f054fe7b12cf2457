"""Property: whatever is done to a graph between calls, an accelerated model answers as plain PyG does."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyg_compare import LAYERS, D, assert_equal, rand, train
from torch_geometric import utils

from gnnaccel import pyg_backend

NAMES = ("GCN", "SAGE", "SAGE max", "GraphConv", "GIN", "GAT", "GATv2", "Transformer", "ResGated")
WEIGHTED = ("GCN", "GraphConv")


@st.composite
def graphs(draw):
    """(edge_index, number of nodes): empty, without edges, with loops and duplicates, in any order and layout."""
    nodes = draw(st.integers(1, 9))
    node = st.integers(0, nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=18))
    index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()
    return (index.contiguous() if draw(st.booleans()) else index), nodes


def _node(nodes, k):
    return k % nodes


# name -> function of (edge_index, nodes, a random number) that writes into edge_index or returns another one
CHANGES = {
    "write one": lambda i, n, k: i[k % 2, k % i.shape[1]].fill_(_node(n, k)) if i.shape[1] else None,
    "write a row": lambda i, n, k: i[k % 2].fill_(_node(n, k)),
    "write a slice": lambda i, n, k: i[:, : k % (i.shape[1] + 1)].fill_(_node(n, k)),
    "shift": lambda i, n, k: i.add_(k).remainder_(n),
    "copy into": lambda i, n, k: i.copy_(i.flip(1)),
    "shuffle": lambda i, n, k: i.copy_(i[:, torch.randperm(i.shape[1], generator=_generator(k))]),
    "turn": lambda i, n, k: i.flip(0),
    "append": lambda i, n, k: torch.cat([i, i.new_tensor([[_node(n, k)], [_node(n, k + 1)]])], 1),
    "remove first": lambda i, n, k: i[:, 1:],
    "remove all": lambda i, n, k: i[:, :0],
    "keep some": lambda i, n, k: i[:, torch.arange(i.shape[1]) % (2 + k % 3) != 0],
    "loops": lambda i, n, k: utils.add_self_loops(i, num_nodes=n)[0],
    "coalesce": lambda i, n, k: utils.coalesce(i, num_nodes=n),
    "undirected": lambda i, n, k: utils.to_undirected(i, num_nodes=n),
    "clone": lambda i, n, k: i.clone(),
    "view": lambda i, n, k: i.view(2, -1),
    "data": lambda i, n, k: setattr(i, "data", i.data.flip(1)),
    "resize": lambda i, n, k: i.resize_(2, k % (i.shape[1] + 1)) if i.is_contiguous() else None,
    "same": lambda i, n, k: None,
}
WEIGHT_CHANGES = {
    "scale": lambda w, k: w.mul_(1 + k % 3),
    "zero one": lambda w, k: w[: k % 2].zero_(),
    "new": lambda w, k: w.clone() + 1,
    "same": lambda w, k: None,
}


def _generator(k):
    return torch.Generator().manual_seed(k)


steps = st.lists(
    st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from(sorted(WEIGHT_CHANGES)), st.integers(0, 20)), max_size=5
)


@pytest.mark.reached
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(graph=graphs(), steps=steps, name=st.sampled_from(NAMES), mode=st.sampled_from(["train", "eval", "inference"]))
def test_graph_changed_by_any_chain(graph, steps, name, mode):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = LAYERS[name]().double()
    models = plain, pyg_backend.accelerate(copy.deepcopy(plain))
    index, nodes = graph
    weight = rand(index.shape[1]).double().abs() + 0.1
    for change, weight_change, k in [("same", "same", 0), *steps]:
        with torch.no_grad():
            result = CHANGES[change](index, nodes, k)
            index = result if result is not None and result.shape[0] == 2 and result.dim() == 2 else index
            result = WEIGHT_CHANGES[weight_change](weight, k)
            weight = weight if result is None or result.dim() != 1 else result
            if weight.numel() != index.shape[1]:
                weight = rand(index.shape[1], seed=k).double().abs() + 0.1
        results = []
        for model in models:
            more = (weight,) if name in WEIGHTED and k % 2 else ()
            x = rand(nodes, D, seed=k).double().requires_grad_(mode == "train")
            model.zero_grad()
            with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "train"):
                results.append(train(model, x, index, *more) if mode == "train" else model(x, index, *more))
        assert_equal(*reversed(results), where=f"{name} after {change}")
