"""Attention with maps per relation against its definition in float64: values, gradients, gradients of those."""

import pytest
import torch

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

ROWS, COLS, RELATIONS = 12, 15, 5


def graph_of(edges, device, index=torch.int64, seed=0):
    """With a hub, rows without edges, and a source with many edges of one relation."""
    made = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, ROWS, (edges,), generator=made)
    sources = torch.randint(0, COLS, (edges,), generator=made)
    ends[: edges // 3], sources[edges // 2 :] = 3, 7
    types = torch.randint(0, RELATIONS - 1, (edges,), generator=made)  # the last relation has none
    pair = (t.to(device, index) for t in (ends, sources))
    return Graph.from_coo(*pair, num_rows=ROWS, num_cols=COLS), types.to(device, index)


def given(heads, width, device, dtype=torch.float64):
    made = torch.Generator().manual_seed(1)
    shapes = [(ROWS, heads, width), *[(COLS, heads, width)] * 2, *[(RELATIONS, heads, width, width)] * 2]
    shapes.append((RELATIONS, heads))
    return [torch.randn(s, generator=made, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("heads, width", [(1, 1), (2, 3), (4, 8)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_values_and_gradients_of_relational_attention(heads, width, index, prior, device):
    graph, types = graph_of(90, device, index)
    query, key, value, *maps, weight = given(heads, width, device)
    leaves = [query, key, value, *maps, *([weight] if prior else [])]

    def run(function, second):
        out = function(graph, query, key, value, types, *maps, weight if prior else None)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=second)
        return out, grads, torch.autograd.grad(sum(g.square().sum() for g in grads), leaves) if second else ()

    got, want = (run(f, True) for f in (ops.relational_attention, reference.relational_attention))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert not got[0][0].any()  # no edges
    torch.testing.assert_close(run(ops.relational_attention, False)[:2], want[:2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str)
def test_narrower_types(dtype, bound, device):
    graph, types = graph_of(60, device)
    narrow = given(2, 8, device, dtype)
    query, key, value, *maps, weight = narrow
    got = ops.relational_attention(graph, query, key, value, types, *maps, weight)
    query, key, value, *maps, weight = (x.detach().double() for x in narrow)
    want = reference.relational_attention(graph, query, key, value, types, *maps, weight)
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=10 * bound)


def test_without_edges_and_types_written_into(device):
    none, _ = graph_of(0, device)
    query, key, value, *maps, _ = given(2, 3, device)
    types = torch.zeros(0, dtype=torch.int64, device=device)
    assert not ops.relational_attention(none, query, key, value, types, *maps).any()
    graph, types = graph_of(40, device)
    ops.relational_attention(graph, query, key, value, types, *maps)
    types.fill_(1)
    got = ops.relational_attention(graph, query, key, value, types, *maps)
    torch.testing.assert_close(got, reference.relational_attention(graph, query, key, value, types, *maps))


def test_bad_arguments_of_relational_attention(device):
    graph, types = graph_of(40, device)
    query, key, value, *maps, weight = given(2, 3, device)
    good = [graph, query, key, value, types, *maps, weight]
    cases = [
        (0, None, TypeError, "Graph"),
        (1, query[1:], ValueError, "expected 12 rows"),
        (2, key[:, :1], ValueError, r"key: expected \[15, H, F\] alike"),
        (3, value.float(), TypeError, "the dtype of query"),
        (4, types[1:], ValueError, r"edge_type: expected \[40\]"),
        (4, types + RELATIONS, IndexError, r"relations in \[0, 5\)"),
        (5, maps[0][0], ValueError, "key_maps: expected shape"),
        (6, maps[1][1:], ValueError, "value_maps: expected 5 rows"),
        (7, weight[:, :1], ValueError, "prior: expected shape"),
    ]
    for place, bad, error, words in cases:
        with pytest.raises(error, match=words):
            ops.relational_attention(*good[:place], bad, *good[place + 1 :])
