"""The edges of a graph by relation and end, by the binary on the CPU and by torch, against their definition."""

import pytest
import torch

from gnnaccel import Graph
from gnnaccel.ops import _relations

CASES = {  # rows, columns, edges, relations
    "usual": (30, 20, 400, 5),
    "one relation": (7, 9, 40, 1),
    "more relations than edges": (10, 10, 12, 100),
    "no edges": (4, 3, 0, 2),
    "no nodes": (0, 0, 0, 3),
}


@pytest.mark.parametrize("sort", ["_sort_on_cpu", "_sort"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_edges_by_relation(name, with_ids, index, sort, monkeypatch):
    num_rows, num_cols, nnz, count = CASES[name]
    torch.manual_seed(0)
    heads, tails = torch.randint(max(num_rows, 1), (nnz,)).sort().values, torch.randint(max(num_cols, 1), (nnz,))
    indptr = torch.searchsorted(heads, torch.arange(num_rows + 1)).to(index)
    ids = torch.randperm(nnz) if with_ids else torch.arange(nnz)
    graph = Graph(indptr, tails.to(index), ids.to(index) if with_ids else None, num_cols)
    types = torch.randint(count, (nnz,)).to(torch.int64 if with_ids else index)
    types[types == 3] = 0  # a relation without edges

    monkeypatch.setattr(_relations._Rows, "_sort_on_cpu", getattr(_relations._Rows, sort))
    rows = _relations._Rows(graph, types, count)

    order = sorted(range(nnz), key=lambda k: (int(types[ids[k]]), int(heads[k])))
    keys = [(int(types[ids[k]]), int(heads[k])) for k in order]
    firsts = [at for at in range(nnz) if at == 0 or keys[at] != keys[at - 1]]
    assert rows.far.tolist() == tails[order].tolist()
    assert rows.edges.tolist() == ids[order].tolist()
    assert rows.ends.tolist() == [keys[at][1] for at in firsts]
    assert rows.bounds.tolist() == [*firsts, nnz]
    assert rows.ptr.tolist() == [sum(keys[at][0] < relation for at in firsts) for relation in range(count + 1)]
    sizes = {int(ids[k]): keys.count(key) for k, key in zip(order, keys, strict=True)}
    assert rows.sizes().tolist() == [sizes[edge] for edge in range(nnz)]
    assert rows.count == len(firsts)
    assert rows.far.dtype == rows.bounds.dtype == graph.indices.dtype
    assert rows.edges.dtype == rows.ptr.dtype == torch.int64


def test_another_default_device():
    graph = Graph(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), None, 2)
    types = torch.tensor([1, 0, 1])
    torch.set_default_device("meta")
    try:
        rows = _relations._Rows(graph, types, 2)
    finally:
        torch.set_default_device(None)
    assert rows.edges.tolist() == [1, 0, 2]
    assert rows.ptr.tolist() == [0, 1, 3]
