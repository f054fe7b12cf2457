"""Batches that are begun before they are asked for: those of a loader that begins none, on streams that do nothing."""

import contextlib
import gc
import weakref

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import NeighborLoader  # noqa: E402

from gnnaccel import pyg_backend, sampling  # noqa: E402
from gnnaccel.lower import bounds  # noqa: E402
from gnnaccel.pyg_backend import samplers, upcoming  # noqa: E402
from gnnaccel.sampling import ahead, begun, on_cuda  # noqa: E402

NODES = 60


class Batch:
    """A batch that the CPU samples where a GPU would be told to."""

    def __init__(self, problem, seeds, seed_time, seed):
        graph = problem.relations[0]
        self._given = (graph.indptr, graph.indices, seeds["node"], problem.fanouts[0], seed)

    def send(self):
        pass

    def result(self):
        indptr, indices, seeds, fanouts, seed = self._given
        out = sampling.neighbor_sample(indptr, indices, seeds, fanouts, seed=seed)
        per_hop = [out.num_nodes_per_hop], [out.num_edges_per_hop]
        return on_cuda.Sample([out.node], None, [out.row], [out.col], [out.edge], *per_hop)


@pytest.fixture(autouse=True)
def began(monkeypatch):
    """What was begun, and whether it was used."""
    found = []

    @contextlib.contextmanager
    def beside(device):
        yield []

    class Noted(begun.Begun):
        __slots__ = ("place",)

        def __init__(self, *given):
            super().__init__(*given)
            self.place = len(found)
            found.append(False)

        def result(self, *sampled):
            out = super().result(*sampled)
            found[self.place] = out is not None
            return out

    def draw(colptr, row, seed, num_neighbors, node_time, edge_time, _seed_time, edge_weight, _csc, replace, *rest):
        how = dict(zip(("edge_weight", "node_time", "edge_time"), (edge_weight, node_time, edge_time), strict=True))
        how |= dict(disjoint=rest[1], temporal_strategy=rest[2])
        out = samplers._beside_training(colptr, row, seed, num_neighbors, replace, how)
        return out.row, out.col, out.node, out.edge, out.num_nodes_per_hop, out.num_edges_per_hop

    monkeypatch.setattr(ahead, "beside", beside)
    monkeypatch.setattr(ahead, "is_on", lambda: True)
    monkeypatch.setattr(ahead, "on_its_stream", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "to_device", lambda tensor, device: tensor)
    monkeypatch.setattr(ahead, "room", lambda count, dtype: torch.empty(count, dtype=dtype))
    monkeypatch.setattr(on_cuda, "begin", Batch)
    monkeypatch.setattr(begun, "Begun", Noted)
    monkeypatch.setattr(upcoming, "_is_uniform", lambda sampler: not sampler.disjoint)
    monkeypatch.setattr(samplers._OPS.pyg, "neighbor_sample", draw)
    pyg_backend.enable()
    yield found
    pyg_backend.disable()


def loader(**options) -> NeighborLoader:
    torch.manual_seed(1)
    data = Data(x=torch.arange(NODES), edge_index=torch.randint(NODES, (2, 500)))
    return NeighborLoader(data, [3, 2], batch_size=16, **options)


def batches(given, meanwhile=lambda step: None) -> list:
    torch.manual_seed(5)
    out = []
    for epoch in range(2):
        for step, batch in enumerate(given):
            out.append((batch.n_id, batch.edge_index, batch.e_id, batch.input_id, batch.x))
            meanwhile(step)
            if epoch == 0 and step == 2:
                break  # the number drawn for a batch that nobody asks for must not be missing
    return [tensor for batch in (*out, (torch.rand(1),)) for tensor in batch]


def alike(got, wanted) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.fixture
def alone(monkeypatch):
    """The batches of a loader that begins none."""

    def run(given, *args):
        with monkeypatch.context() as context:
            context.setattr(upcoming, "_is_settled", lambda loader: False)
            return batches(given, *args)

    return run


OPTIONS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "short ones left out": {"shuffle": True, "drop_last": True},
    "some nodes": {"input_nodes": torch.arange(7, 50), "shuffle": True},
    "filtered outside": {"filter_per_worker": False, "shuffle": True},
    "of one rank": {"sampler": torch.utils.data.DistributedSampler(range(NODES), num_replicas=1, rank=0)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_are_those_of_nothing_begun(name, alone, began):
    wanted = alone(loader(**OPTIONS[name]))
    assert not began
    assert alike(batches(loader(**OPTIONS[name])), wanted)
    assert len(began) - 1 <= sum(began) >= 4  # all but the one that the break has left


def test_numbers_that_the_script_draws(alone, began):
    wanted = alone(loader(shuffle=True), lambda step: torch.rand(3))
    assert alike(batches(loader(shuffle=True), lambda step: torch.rand(3)), wanted)
    assert began and not any(began)


def test_nothing_more_is_begun_where_none_is_used(began):
    given = loader()
    for _ in range(3):
        torch.rand(1)
    many = NeighborLoader(given.data, [2], batch_size=4)
    for _ in many:
        torch.rand(1)
    assert began == [False] * bounds.DROPPED_IN_VAIN


def written(given):
    given.node_sampler.row.zero_()


def of_another_fanout(given):
    given.node_sampler.num_neighbors = [1, 2]


def of_other_seeds(given):
    given.input_data.node.copy_(given.input_data.node.flip(0))


def of_weights(given):
    given.node_sampler.edge_weight = (torch.arange(500) % 2).float()


@pytest.mark.parametrize("change", [written, of_another_fanout, of_other_seeds, of_weights])
def test_what_changes_before_the_next_batch(change, alone, began):
    def meanwhile(given):
        return lambda step: change(given) if step == 0 else None

    first, second = loader(), loader()
    wanted = alone(first, meanwhile(first))
    assert alike(batches(second, meanwhile(second)), wanted)
    assert began.count(False) >= 2


class Own(torch.utils.data.Sampler):
    def __init__(self, places):
        self.places = places

    def __iter__(self):
        return iter(self.places)

    def __len__(self):
        return len(self.places)


SAMPLERS = {
    "of a user": {"sampler": Own(range(NODES))},
    "of batches": {"batch_sampler": Own([[1, 2], [3], [4, 5]])},
    "with a generator": {"shuffle": True, "generator": torch.Generator()},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_orders_that_are_not_settled(name, began):
    data = Data(x=torch.arange(NODES), edge_index=torch.randint(NODES, (2, 500)))
    options = dict(SAMPLERS[name])
    if name != "of batches":
        options["batch_size"] = 16
    assert len(list(NeighborLoader(data, [3, 2], **options))) > 2
    assert not began


def epochs_at_once(given):
    yield from (batch for pair in zip(given, given, strict=True) for batch in pair)


def one_made_late(given):
    first = iter(given)
    yield next(first)
    second = iter(given)  # whose order is drawn with its first batch
    yield next(first)
    torch.rand(1)
    yield from (next(second), *first, *second)


def asked_beside_it(given):
    later = iter(given)
    yield given([3, 4])
    torch.rand(1)
    for step, batch in enumerate(later):
        yield batch
        if step == 1:
            yield given(torch.tensor([5, 6]))


@pytest.mark.parametrize("order", [epochs_at_once, one_made_late, asked_beside_it])
def test_who_asks(order, alone, began):
    wanted = alone(order(loader(shuffle=True)))
    assert alike(batches(order(loader(shuffle=True))), wanted) and began


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler'")  # PyG's own, until the plug-in is on
def test_a_loader_that_was_there_before_goes_with_its_data():
    pyg_backend.disable()
    given = loader()
    pyg_backend.enable()
    assert next(iter(given)).num_nodes
    there = weakref.ref(given.data)
    del given
    gc.collect()  # a loader refers to its own collate_fn
    assert there() is None


@pytest.mark.parametrize(
    "sampler",
    [
        torch.utils.data.SubsetRandomSampler([-1, -2, 3] * 10),  # from the end
        torch.utils.data.SequentialSampler(range(NODES + 5)),  # beyond it: all batches before that arrive
    ],
)
def test_places_that_are_none(sampler, alone, began):
    def until_error(given):
        try:
            yield from given
        except IndexError as error:
            assert "range object" in str(error)

    wanted, got = (run(until_error(loader(sampler=sampler))) for run in (alone, batches))
    assert alike(got, wanted)


def test_the_next_number_is_not_drawn():
    torch.manual_seed(7)
    foreseen = [begun.next_number() for _ in range(2)]
    assert foreseen == [samplers._arrays.random_seed("", None)] * 2
    assert foreseen[0] != begun.next_number()
