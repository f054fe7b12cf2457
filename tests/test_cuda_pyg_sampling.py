"""PyG's loaders that sample on the GPU: batches of data there, and of data on the CPU where the user asks for it."""

from __future__ import annotations

import gc
import logging
import pickle
import warnings

import numpy as np
import pytest
import torch
from cuda_cases import DEVICE, EMULATED

pyg = pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData  # noqa: E402
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, PrefetchLoader  # noqa: E402
from torch_geometric.sampler import BidirectionalNeighborSampler, NeighborSampler, NodeSamplerInput  # noqa: E402

from gnnaccel import pyg_backend, report  # noqa: E402
from gnnaccel.pyg_backend import sampler_places, samplers  # noqa: E402
from gnnaccel.sampling import on_cuda  # noqa: E402

NODES, EDGES = 90, 700
KIND = "pyg.NeighborSampler"
on_gpu = pytest.mark.skipif(bool(EMULATED), reason="asks where tensors are")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    report.reset()
    pyg_backend.enable()
    monkeypatch.setattr(sampler_places, "has_cuda_kernels", lambda: True)  # what an emulation has, too
    calls = []
    begin = on_cuda.begin
    monkeypatch.setattr(on_cuda, "begin", lambda *args: calls.append(1) or begin(*args))
    yield calls
    pyg_backend.disable()


def graph(ordered=False) -> Data:
    ends = torch.randint(NODES, (2, EDGES))
    ends[1, :200] = 3  # a hub
    if ordered:
        ends = ends[:, ends[1].argsort(stable=True)]
    nodes = torch.arange(NODES)
    return Data(x=nodes.float()[:, None], y=nodes, edge_index=ends, edge_attr=torch.arange(EDGES))


def check(batch, data, both=False) -> None:
    data, batch = data.clone().cpu(), batch.clone().cpu()  # which would move them in place
    assert torch.equal(batch.x.flatten().long(), batch.n_id) and torch.equal(batch.y, batch.n_id)
    ends, wanted = batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id]
    if both:  # an edge is there the other way round, too, under its number
        ends, wanted = ends.sort(0).values, wanted.sort(0).values
    assert torch.equal(ends, wanted) and torch.equal(batch.edge_attr, batch.e_id)


@pytest.mark.parametrize("kind", ["directional", "bidirectional"])
def test_data_on_the_gpu(kind, _plugin):
    data = graph().to(DEVICE)
    loader = NeighborLoader(data, [4, -1], input_nodes=data.y < 40, batch_size=16, shuffle=True, subgraph_type=kind)
    for _ in range(2):
        seen = []
        for batch in loader:
            check(batch, data, kind == "bidirectional")
            seen += batch.n_id[: batch.batch_size].tolist()
            assert all(batch[name].device.type == DEVICE.type for name in ("x", "edge_index", "n_id", "e_id"))
        assert sorted(seen) == list(range(40))
    assert len(_plugin) == 6
    site = report.snapshot()[KIND]
    assert site.accelerated == 6 and not site.left and not site.reasons


@on_gpu
@pytest.mark.parametrize("fanouts", [[5, 3], [40], [-1, 2]])
def test_batches_are_the_cpus(fanouts):
    data, batches = graph(ordered=True), []
    for given in (data, data.clone().cuda()):
        torch.manual_seed(3)
        batches.append(list(NeighborLoader(given, fanouts, batch_size=16, shuffle=True, is_sorted=True)))
    for wanted, got in zip(*batches, strict=True):
        assert got.num_sampled_nodes == wanted.num_sampled_nodes
        assert got.num_sampled_edges == wanted.num_sampled_edges
        for name in ("x", "y", "edge_index", "edge_attr", "n_id", "e_id", "input_id"):
            assert torch.equal(got[name].cpu(), wanted[name]), name


def test_links(_plugin):
    data = graph().to(DEVICE)
    loader = LinkNeighborLoader(data, [4, 2], edge_label_index=data.edge_index[:, :60], batch_size=20)
    for batch in loader:
        check(batch, data)
        ends = batch.n_id.cpu()[batch.edge_label_index.cpu()]
        assert torch.equal(ends, data.edge_index.cpu()[:, batch.input_id.cpu()])
    assert len(_plugin) == 3


def cpus_and_gpus(monkeypatch, data, *args, **options):
    """Batches of the CPU, and of the same data and seeds with GNNACCEL_SAMPLER=cuda."""
    batches = []
    for choice in ("", "cuda"):
        monkeypatch.setenv(samplers.CHOICE, choice)
        torch.manual_seed(3)
        batches.append(list(NeighborLoader(data, *args, batch_size=16, **options)))
    return batches


LOADERS = {
    "plain": {},
    "sorted": {"is_sorted": True},
    "shuffled": {"shuffle": True},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "not filtered in collate_fn": {"filter_per_worker": False},
    "a transform": {"transform": lambda batch: batch.update({"z": batch.x * 2})},
}


@on_gpu
@pytest.mark.parametrize("name", LOADERS)
def test_the_gpu_for_data_on_the_cpu(name, monkeypatch, _plugin):
    """Batches are there, and as those of the CPU; their features were read where they lie."""
    data = graph(ordered=name == "sorted")
    data.wide, data.flag, data.half = torch.rand(NODES, 130), torch.rand(NODES) > 0.5, torch.rand(NODES, 3).bfloat16()
    data.uneven = torch.rand(5, NODES).t()  # cannot be read so
    data.mean, data.label = torch.rand(7), "a graph"  # of the whole graph
    for wanted, got in zip(*cpus_and_gpus(monkeypatch, data, [4, -1], **LOADERS[name]), strict=True):
        assert got.keys() == wanted.keys() and got.label == "a graph"
        for key, value in wanted.to_dict().items():
            if not isinstance(value, torch.Tensor):
                assert got[key] == value, key
            else:
                assert got[key].is_cuda and got[key].dtype == value.dtype and torch.equal(got[key].cpu(), value), key
    assert len(_plugin) == 6 and not data.x.is_cuda
    gc.collect()
    assert not data.x.is_pinned()  # the loaders are gone


@on_gpu
def test_what_happens_to_the_data_meanwhile(monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    data = graph()
    loader = NeighborLoader(data, [4, 2], batch_size=45)
    for step, batch in enumerate(loader):
        assert torch.equal(batch.x.flatten().cpu(), batch.n_id.cpu() * 2.0**step)
        data.x *= 2  # where it lies
    data.x = -torch.arange(NODES).float()[:, None]  # another one
    for batch in loader:
        assert torch.equal(batch.x.flatten().cpu(), -batch.n_id.cpu().float())
    assert data.x.is_pinned()
    data.x.data = -data.x.data  # other memory under the same tensor
    for batch in loader:
        assert torch.equal(batch.x.flatten().cpu(), batch.n_id.cpu().float())
    data.x = -data.x
    batch = next(iter(pickle.loads(pickle.dumps(loader))))
    assert batch.x.is_cuda and torch.equal(batch.x.flatten().cpu(), -batch.n_id.cpu().float())


@on_gpu
@pytest.mark.parametrize("steps", ["0", "1", "2"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_batches_beside_training(where, steps, monkeypatch):
    """While the GPU is busy with other batches, and memory comes back from them."""
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    monkeypatch.setenv("GNNACCEL_SAMPLER_AHEAD", steps)
    data = graph()
    data.wide, busy, wrong = torch.arange(NODES).float()[:, None].repeat(1, 5000), torch.rand(2048, 2048).cuda(), []
    data = data.to(where)
    for _ in range(4):
        for batch in NeighborLoader(data, [4, 3], batch_size=10, shuffle=True, input_nodes=torch.arange(NODES)):
            batch = batch.to("cuda")
            busy = (busy @ busy).clamp(0, 1)
            wrong.append((batch.wide != batch.n_id[:, None]).any() | (batch.y != batch.n_id).any())
            ends = data.edge_index.cuda()[:, batch.e_id]
            wrong.append((batch.n_id[batch.edge_index] != ends).any())
            assert batch.input_id.is_cuda
    assert not torch.stack(wrong).any()


@on_gpu
def test_a_transform_and_features_on_the_gpu(monkeypatch):
    """Of a graph in host memory: what is there may be written into by steps that still run."""
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    data, scale, busy = graph(), torch.ones(1, device="cuda"), torch.rand(2048, 2048).cuda()
    data.kept = torch.zeros(NODES, device="cuda")

    def scaled(batch):
        return batch.update({"z": batch.x * scale})

    for step, batch in enumerate(NeighborLoader(data, [4, 3], batch_size=10, transform=scaled)):
        assert torch.equal(batch.kept, torch.full_like(batch.kept, step))
        assert torch.equal(batch.z, batch.x * scale) and batch.z.is_cuda
        for _ in range(20):
            busy = (busy @ busy).clamp(0, 1)
        data.kept += 1 + 0 * busy[0, 0].clamp(0, 0)
        scale.add_(busy[0, 0].clamp(1, 1))


@on_gpu
def test_two_loaders_of_the_same_data(monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    data = graph()
    loaders = [NeighborLoader(data, [4, 2], batch_size=45) for _ in range(2)]
    for loader in loaders:
        next(iter(loader))
    del loader, loaders[0]
    gc.collect()
    for batch in loaders[0]:
        check(batch, data)
        assert batch.x.is_cuda


@on_gpu
def test_what_the_gpu_does_not_read(monkeypatch, tmp_path):
    """Features with gradients and of files that are mapped: gathered on the host, and on the GPU in the end."""
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    data = graph()
    data.w = torch.rand(NODES, 3, requires_grad=True)
    np.save(tmp_path / "m.npy", np.arange(2.0 * NODES, dtype=np.float32).reshape(NODES, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: it cannot be written into
        data.m = torch.from_numpy(np.load(tmp_path / "m.npy", mmap_mode="r"))
    for batch in NeighborLoader(data, [4, 2], batch_size=45):
        check(batch, data.clone().detach())
        assert batch.w.is_cuda and torch.equal(batch.m.cpu(), data.m[batch.n_id.cpu()]) and batch.m.is_cuda
        batch.w.sum().backward()
    assert data.w.grad is not None and data.w.grad.any()


@on_gpu
def test_other_loaders_and_loaders_of_loaders(monkeypatch):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    data = graph()
    for batch in PrefetchLoader(NeighborLoader(data, [4, 2], batch_size=45)):
        check(batch, data)
        assert batch.x.is_cuda

    class Own(NeighborLoader):
        def filter_fn(self, out):
            return self.data.x[out.node]

    for x in Own(data, [4, 2], batch_size=45):
        assert not x.is_cuda


@on_gpu
@pytest.mark.parametrize("options", [{"pin_memory": True}, {"transform_sampler_output": lambda out: out}])
def test_loaders_that_make_batches_on_the_host(options, monkeypatch, _plugin):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    data = graph()
    for batch in NeighborLoader(data, [4, -1], batch_size=16, **options):
        check(batch, data)
        assert not batch.x.is_cuda and not batch.edge_index.is_cuda
    assert len(_plugin) == 6


@on_gpu
def test_no_gpu_unless_asked(_plugin):
    for batch in NeighborLoader(graph(), [4, -1], batch_size=16):
        assert not batch.edge_index.is_cuda
    data = graph()
    data.x, data.y = data.x.cuda(), data.y.cuda()  # features alone
    for batch in NeighborLoader(data, [4, -1], batch_size=16):
        check(batch, data)
    assert not _plugin


def hetero() -> HeteroData:
    data = HeteroData(a=dict(x=torch.arange(30), time=torch.randint(9, (30,))), b=dict(x=torch.arange(20)))
    data["b"].time = torch.randint(9, (20,))
    for kind, sizes in {("a", "to", "a"): (30, 30), ("b", "of", "a"): (20, 30), ("a", "by", "b"): (30, 20)}.items():
        data[kind].edge_index = torch.stack([torch.randint(size, (200,)) for size in sizes])
        data[kind].weight = (torch.arange(200) % 4).float()
    return data


def check_types(batch, data) -> None:
    data, batch = data.clone().cpu(), batch.clone().cpu()
    for name in data.node_types:
        assert torch.equal(batch[name].x, batch[name].n_id)
    for kind in data.edge_types:
        places = batch[kind].edge_index
        ends = torch.stack([batch[kind[0]].n_id[places[0]], batch[kind[-1]].n_id[places[1]]])
        assert torch.equal(ends, data[kind].edge_index[:, batch[kind].e_id])
        assert torch.equal(batch[kind].weight, data[kind].weight[batch[kind].e_id])


HOW = {
    "weights": {"weight_attr": "weight"},
    "weights, with replacement": {"weight_attr": "weight", "replace": True},
    "trees": {"disjoint": True},
    "times": {"time_attr": "time"},
    "last": {"time_attr": "time", "temporal_strategy": "last"},
    "weights and times": {"time_attr": "time", "weight_attr": "weight"},
    "both ways": {"weight_attr": "weight", "subgraph_type": "bidirectional"},
}


@pytest.mark.parametrize("how", HOW)
def test_weights_trees_and_times(how, _plugin):
    data, options = graph(), HOW[how]
    data.weight, data.time = (torch.arange(EDGES) % 4).float(), torch.randint(9, (NODES,))
    data = data.to(DEVICE)
    for batch in NeighborLoader(data, [7, 2], input_nodes=torch.arange(20), batch_size=10, **options):
        check(batch, data, both=how == "both ways")
        assert batch.edge_index.device.type == DEVICE.type
        assert (batch.get("batch") is None) == (not options.keys() & {"time_attr", "disjoint"})
        if "time_attr" in options:
            assert (batch.time <= data.time[batch.n_id[: batch.batch_size]][batch.batch]).all()
        if "weight_attr" in options and "time_attr" not in options:
            hub = data.edge_index[1, batch.e_id] == 3  # which has more edges than are drawn
            assert (data.weight[batch.e_id][hub] > 0).all()
    assert len(_plugin) == 2 and not report.snapshot()[KIND].reasons


@pytest.mark.parametrize("how", ["plain", *HOW])
def test_several_types(how, _plugin):
    data, options = hetero().to(DEVICE), HOW.get(how, {})
    fanouts = {kind: [3, n] for n, kind in enumerate(data.edge_types)}
    for batch in NeighborLoader(data, fanouts, input_nodes=("a", torch.arange(20)), batch_size=10, **options):
        if how != "both ways":
            check_types(batch, data)
        assert batch["a", "a"].edge_index.device.type == batch["b"].x.device.type == DEVICE.type
    assert len(_plugin) == 2 and not report.snapshot()[KIND].reasons


@pytest.mark.parametrize("negative", [None, "binary", "triplet"])
@pytest.mark.parametrize("timed", [False, True])
def test_links_of_several_types(negative, timed, _plugin):
    data, kind = hetero().to(DEVICE), ("b", "of", "a")
    given = dict(time_attr="time", edge_label_time=torch.full((60,), 5)) if timed else dict(weight_attr="weight")
    links = (kind, data[kind].edge_index[:, :60].cpu())
    for batch in LinkNeighborLoader(
        data, [3, 2], edge_label_index=links, neg_sampling=negative, batch_size=20, **given
    ):
        check_types(batch, data)
        assert batch[kind].edge_index.device.type == DEVICE.type
    assert len(_plugin) == 3 and not report.snapshot()[KIND].reasons


@on_gpu
@pytest.mark.parametrize("how", ["plain", "trees", "times", "last"])
@pytest.mark.parametrize("typed", [False, True])
def test_batches_of_trees_times_and_types_are_the_cpus(how, typed):
    data, batches = hetero() if typed else graph(), []
    nodes, options = torch.arange(20), HOW.get(how, {})
    if "time_attr" not in options:  # a GPU may sort edges to one node into another order than the CPU
        for store in data.edge_stores:
            store.edge_index = store.edge_index[:, store.edge_index[1].argsort(stable=True)]
        options = options | {"is_sorted": True}
    elif not typed:
        data.time = torch.randint(9, (NODES,))
    for given in (data, data.clone().cuda()):
        torch.manual_seed(3)
        start = ("a", nodes) if typed else nodes
        batches.append(list(NeighborLoader(given, [5, 3], input_nodes=start, batch_size=6, shuffle=True, **options)))
    for wanted, got in zip(*batches, strict=True):
        pairs = [(wanted, got)]
        if typed:
            pairs = [(wanted[t], got[t]) for t in (*wanted.node_types, *wanted.edge_types)]
        for want, have in pairs:
            for name, value in want.to_dict().items():
                assert not isinstance(value, torch.Tensor) or torch.equal(have[name].cpu(), value), name


@on_gpu
@pytest.mark.parametrize("typed", [False, True])
def test_the_gpu_by_weight_for_data_on_the_cpu(typed, monkeypatch, _plugin):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    data = hetero() if typed else graph()
    if not typed:
        data.weight = (torch.arange(EDGES) % 4).float()
    nodes = ("a", torch.arange(20)) if typed else torch.arange(20)
    loader = NeighborLoader(data, [7, 2], input_nodes=nodes, batch_size=10, weight_attr="weight", disjoint=True)
    for batch in loader:
        (check_types if typed else check)(batch, data)
        assert (batch["a"] if typed else batch).batch is not None
    assert len(_plugin) == 2
    weights = loader.node_sampler.edge_weight  # another weight from now on
    for weight in weights.values() if typed else [weights]:
        weight.zero_()
    for batch in loader:
        edges = [batch[kind] for kind in data.edge_types] if typed else [batch]
        counts = [torch.bincount(store.edge_index[1]).max() for store in edges if store.edge_index.numel()]
        assert all(count <= 7 for count in counts)


@on_gpu
@pytest.mark.parametrize("chosen", ["", "cuda"])
def test_what_the_cpu_samples_is_said(chosen, monkeypatch, caplog, _plugin):
    monkeypatch.setenv(samplers.CHOICE, chosen)
    caplog.set_level(logging.INFO, "gnnaccel")
    typed = hetero()
    typed["a", "to", "a"].edge_index = typed["a", "to", "a"].edge_index.cuda()
    typed["a", "to", "a"].weight = typed["a", "to", "a"].weight.cuda()
    for batch in NeighborLoader(typed, [3], input_nodes=("a", torch.arange(20)), batch_size=10):
        check_types(batch, typed)
    assert list(report.snapshot()[KIND].reasons) == ["sampled on the CPU: a graph store, or edges in several places"]
    assert not _plugin
    said = [record for record in caplog.records if "sampled on the CPU" in record.getMessage()]
    assert said and {record.levelno for record in said} == {logging.WARNING if chosen else logging.INFO}


@on_gpu
def test_workers_sample_on_the_cpu(monkeypatch, _plugin):
    monkeypatch.setenv(samplers.CHOICE, "cuda")
    torch.zeros(1, device="cuda")  # which a forked worker must not touch
    data = graph()
    for batch in NeighborLoader(data, [4, 2], batch_size=30, num_workers=2):
        check(batch, data)
    assert "sampled on the CPU: num_workers > 0" in report.snapshot()[KIND].reasons
    # A sampler of the user's own does not know of the workers that it will run in.
    sampler = NeighborSampler(data, [4, 2])
    assert sampler.colptr.is_cuda
    from torch_geometric.loader import NodeLoader

    for batch in NodeLoader(data, sampler, batch_size=30, num_workers=2):
        check(batch, data)
    assert sampler.colptr.is_cuda and not _plugin
    for batch in NodeLoader(data, sampler, batch_size=30):
        check(batch, data)
    assert len(_plugin) == 3


def test_directions_and_both(_plugin):
    index = torch.tensor([[0, 0, 2], [1, 2, 3]])
    data = Data(edge_index=index, num_nodes=4).to(DEVICE)
    flipped = Data(edge_index=index.flip(0), num_nodes=4).to(DEVICE)
    start = NodeSamplerInput(input_id=None, node=torch.tensor([2]))
    forward = NeighborSampler(data, [1]).sample_from_nodes(start)
    backward = NeighborSampler(flipped, [1], sample_direction="backward").sample_from_nodes(start)
    assert forward.node.tolist() == backward.node.tolist() == [2, 0]
    assert (forward.row.tolist(), forward.col.tolist()) == (backward.col.tolist(), backward.row.tolist()) == ([1], [0])
    assert len(_plugin) == 2
    both = BidirectionalNeighborSampler(data, [1]).sample_from_nodes(start)
    assert sorted(zip(both.node[both.row].tolist(), both.node[both.col].tolist(), strict=True)) == [(0, 2), (2, 3)]
    assert EMULATED or len(_plugin) == 2


def test_wrong_seeds():
    data = graph().to(DEVICE)
    with pytest.raises(ValueError, match="seeds"):
        next(iter(NeighborLoader(data, [2], torch.tensor([NODES]))))


@on_gpu
def test_a_model_learns():
    data = graph()
    data.edge_index = torch.cat([data.edge_index, torch.arange(NODES).expand(2, -1)], 1)
    label = torch.randint(2, (NODES,))
    data = Data(
        x=torch.cat([torch.randn(NODES, 8), label[:, None] * 2.0], 1), edge_index=data.edge_index, y=label
    ).cuda()
    model = pyg.nn.GraphSAGE(9, 16, 2, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(30):
        for batch in NeighborLoader(data, [5, 5], batch_size=30, shuffle=True):
            size = batch.batch_size
            loss = torch.nn.functional.cross_entropy(model(batch.x, batch.edge_index)[:size], batch.y[:size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (model(data.x, data.edge_index).argmax(1) == data.y).float().mean() > 0.9
