"""Batches of small graphs put together at once: what PyG's own collation gives, and what takes a batch apart again."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader

from gnnaccel import pyg_backend, report


@pytest.fixture(autouse=True)
def _off():
    yield
    pyg_backend.disable()


def graph(seed: int, nodes: int, edges: int, kind: type = Data, **more) -> Data:
    rng = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, max(nodes, 1), (2, edges), generator=rng)
    return kind(x=torch.randn(nodes, 3, generator=rng), edge_index=ends, **more)


class Shifted(Data):
    """Counts the targets of its pairs by a number of its own."""

    def __inc__(self, key, value, *args, **kwargs):
        return 7 if key == "pair_index" else super().__inc__(key, value, *args, **kwargs)


class Named(Data):
    pass


def several(**more) -> list[Data]:
    return [graph(i, n, e, **copy.deepcopy(more)) for i, (n, e) in enumerate([(4, 6), (1, 0), (7, 20), (0, 0), (3, 2)])]


def differing() -> list[Data]:
    first, *rest = several()
    first.extra = torch.ones(2)
    return [*rest, first]


def lacking() -> list[Data]:
    *rest, last = several(y=torch.ones(1))
    del last.y
    return [*rest, last]


# name -> (list of data, arguments, whether it is ours)
CASES = {
    "features and edges": (several, {}, True),
    "one graph": (lambda: several()[:1], {}, True),
    "targets": (lambda: several(y=torch.tensor([1.5])), {}, True),
    "a number": (lambda: several(y=2.5, count=3), {}, True),
    "scalars": (lambda: several(y=torch.tensor(2.0)), {}, True),
    "words and lists": (
        lambda: several(name="a", parts=[torch.ones(2), torch.zeros(1)], at={"b": torch.ones(3)}),
        {},
        True,
    ),
    "int32 edges": (lambda: [d.__class__(x=d.x, edge_index=d.edge_index.int()) for d in several()], {}, True),
    "faces and another index": (
        lambda: several(face=torch.zeros(3, 2).long(), pair_index=torch.ones(4).long()),
        {},
        True,
    ),
    "number of nodes": (lambda: [Data(edge_index=d.edge_index, num_nodes=9) for d in several()], {}, True),
    "positions": (lambda: [Data(pos=d.x, edge_index=d.edge_index) for d in several()], {}, True),
    "excluded": (lambda: several(y=torch.ones(1)), {"exclude_keys": ["y"]}, True),
    "a class of the user's": (lambda: several(kind=Named), {}, True),
    "a sparse matrix": (lambda: several(adj=torch.eye(2).to_sparse()), {}, True),
    "gradients": (lambda: several(w=torch.ones(2, requires_grad=True)), {}, True),
    "mixed dtypes": (lambda: [*several(y=torch.ones(1)), graph(9, 2, 2, y=torch.ones(1).double())], {}, True),
    "empty": (lambda: [graph(0, 0, 0), graph(1, 0, 0)], {}, True),
    "floating-point index": (lambda: several(an_index=torch.ones(2)), {}, True),
    "increments of the user's": (lambda: several(kind=Shifted, pair_index=torch.ones(2).long()), {}, False),
    "attributes behind": (differing, {}, True),
    "followed": (several, {"follow_batch": ["x"]}, False),
    "batches": (lambda: [Batch.from_data_list(several()), Batch.from_data_list(several())], {}, False),
    "called a batch": (lambda: several(x_batch=torch.zeros(2).long()), {}, False),
    "of types": (lambda: [HeteroData(a={"x": torch.ones(2, 1)}), HeteroData(a={"x": torch.ones(3, 1)})], {}, False),
    "several classes": (lambda: [*several(), graph(5, 2, 1, Named)], {}, False),
}


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided:
            return a.layout == b.layout and torch.equal(a.to_dense(), b.to_dense())
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def told(batch) -> dict:
    """All that a batch knows."""
    stores = {str(store._key): dict(store.items()) for store in batch.stores}
    about = batch.num_graphs, batch._slice_dict, batch._inc_dict, batch.num_nodes
    return {"class": type(batch), "stores": stores, "about": about}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_pygs(name):
    make, arguments, is_ours = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = Batch.from_data_list(make(), **arguments)
        given = make()
        pyg_backend.enable()
        before = report.snapshot().get("pyg.Batch", report.Site())
        got = Batch.from_data_list(given, **arguments)
        site = report.snapshot()["pyg.Batch"]
    assert (site.accelerated - before.accelerated, site.left - before.left) == ((1, 0) if is_ours else (0, 1))
    assert same(told(got), told(want))
    if name == "a sparse matrix":
        return  # which PyG cannot take apart
    for one, other in zip(got.to_data_list(), want.to_data_list(), strict=True):
        assert same(one.to_dict(), other.to_dict())


@pytest.mark.parametrize(
    "make", [lacking, list, lambda: [Data(edge_index=torch.ones(2, 1))] * 2], ids=["lacking", "none", "no nodes"]
)
def test_what_pyg_refuses(make):
    def outcome():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return told(Batch.from_data_list(make()))
        except Exception as error:
            return type(error), str(error)

    want = outcome()
    pyg_backend.enable()
    assert str(outcome()) == str(want)


@pytest.mark.parametrize("workers", [0, 1])
def test_loader(workers):
    data = several(y=torch.ones(1))
    want = [told(batch) for batch in DataLoader(data, batch_size=2)]
    pyg_backend.enable()
    got = [told(batch) for batch in DataLoader(data, batch_size=2, num_workers=workers)]
    assert same(got, want)
    batch = next(iter(DataLoader(data, batch_size=5, num_workers=workers)))
    assert batch.x.is_shared() == bool(workers)


def test_given_data_stay_as_they_are():
    data = several()
    before = [copy.deepcopy(d.to_dict()) for d in data]
    pyg_backend.enable()
    batch = Batch.from_data_list(data[:1])
    batch.edge_index += 1
    batch.x.zero_()
    assert same([d.to_dict() for d in data], before)
