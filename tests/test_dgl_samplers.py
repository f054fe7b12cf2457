"""DGL's NeighborSampler on our sampling: the blocks that DGL makes, and what is left to it."""

import contextlib
import copy

import pytest
import torch

from gnnaccel import _library, dgl_backend, report, sampling
from gnnaccel.sampling import host_memory

dgl_backend.shim()
dgl = pytest.importorskip("dgl")

from gnnaccel.dgl_backend import samplers  # noqa: E402

NODES, EDGES = 60, 400


@pytest.fixture(autouse=True)
def _plugin():
    report.reset()
    dgl_backend.enable()
    yield
    dgl_backend.disable()


def graph(idtype=torch.int64, names=("_N", "_E", "_N")):
    ends = torch.randint(NODES, (2, EDGES), dtype=idtype)
    ends[1, :60] = 3  # a hub
    g = dgl.heterograph({names: (ends[0], ends[1])}, num_nodes_dict={names[0]: NODES}, idtype=idtype)
    g.ndata["x"], g.edata["w"] = torch.arange(NODES), torch.arange(EDGES)
    return g


def check_blocks(g, seeds, nodes, blocks):
    """Blocks fit onto each other, and their edges and features are the graph's."""
    assert torch.equal(blocks[0].srcdata[dgl.NID], nodes) and torch.equal(blocks[-1].dstdata[dgl.NID], seeds)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        assert block.idtype == g.idtype and block.canonical_etypes == g.canonical_etypes
        if following is not None:
            assert torch.equal(block.dstdata[dgl.NID], following.srcdata[dgl.NID])
        source, target = (ends.long() for ends in block.edges())
        assert torch.equal(block.srcdata[dgl.NID][: block.num_dst_nodes()], block.dstdata[dgl.NID])
        assert block.srcdata[dgl.NID].unique().numel() == block.num_src_nodes()
        ids = block.edata[dgl.EID].long()
        ends = block.srcdata[dgl.NID][source], block.dstdata[dgl.NID][target]
        assert all(torch.equal(a, b[ids]) for a, b in zip(ends, g.edges(order="eid"), strict=True))
        assert torch.equal(block.srcdata["x"], block.srcdata[dgl.NID].long())
        assert torch.equal(block.edata["w"], ids)


def ours():
    site = report.snapshot()["dgl.NeighborSampler"]
    return site.accelerated > 0 and not site.left


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks(idtype, replace, threads):
    dgl.utils.set_num_threads(threads)
    g, seeds = graph(idtype, ("user", "knows", "user")), torch.tensor([7, 3, 9], dtype=idtype)
    for _ in range(3):
        nodes, out, blocks = dgl.dataloading.NeighborSampler([4, 2], replace=replace).sample(g, seeds)
        assert torch.equal(out, seeds)
        check_blocks(g, seeds, nodes, blocks)
        for block, fanout in zip(blocks, (4, 2), strict=True):
            degree = g.in_degrees(block.dstdata[dgl.NID]).clamp(max=fanout)
            wanted = torch.where(degree > 0, fanout, 0) if replace else degree
            assert torch.equal(block.in_degrees(), wanted.to(block.idtype))
    assert ours()


def test_full_neighbourhoods_are_dgls():
    g, seeds = graph(), torch.tensor([7, 3, 9])
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    nodes, _, blocks = sampler.sample(g, seeds)
    dgl_backend.disable()
    theirs, _, plain = sampler.sample(g, seeds)
    assert torch.equal(nodes.sort().values, theirs.sort().values)
    for block, other in zip(blocks, plain, strict=True):
        assert torch.equal(block.edata[dgl.EID].sort().values, other.edata[dgl.EID].sort().values)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_and_features_that_are_fetched(workers):
    g = graph()
    sampler = dgl.dataloading.NeighborSampler([4, 2], prefetch_node_feats=["x"])
    loader = dgl.dataloading.DataLoader(g, torch.arange(20), sampler, batch_size=6, num_workers=workers)
    seen = []
    for nodes, out, blocks in loader:
        check_blocks(g, out, nodes, blocks)
        seen.append(out)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(20))
    assert workers or ours()


def test_dgls_seed_repeats_a_batch_with_any_number_of_threads():
    g, sampler = graph(), dgl.dataloading.NeighborSampler([4, 2])
    batches = []
    for seed, threads in ((1, 1), (1, 2), (2, 1)):
        torch.set_num_threads(threads)
        dgl.seed(seed)
        batches.append([block.edata[dgl.EID].tolist() for block in sampler.sample(g, torch.tensor([3, 4]))[2]])
    assert batches[0] == batches[1] != batches[2]


def test_what_is_left_to_dgl(monkeypatch):
    g, seeds = graph(), torch.tensor([7, 3, 9])
    g.edata["p"] = torch.rand(EDGES, 1)
    many = dgl.heterograph({("a", "to", "b"): ([0, 1], [1, 0]), ("b", "to", "a"): ([0, 1], [1, 0])})
    make = dgl.dataloading.NeighborSampler
    cases = {
        "several types": lambda: make([2]).sample(many, {"a": torch.tensor([0])}),
        "out-edges": lambda: make([2], edge_dir="out").sample_blocks(g, seeds),
        "probabilities": lambda: make([2], prob="p").sample(g, seeds),
        "excluded edges": lambda: make([2]).sample(g, seeds, exclude_eids=torch.tensor([1])),
        "seeds that are not": lambda: make([2]).sample(g, {"_N": seeds}),
        "GNNACCEL_SAMPLER=framework": lambda: (
            monkeypatch.setenv("GNNACCEL_SAMPLER", "framework") or make([2]).sample(g, seeds)
        ),
    }
    for words, call in cases.items():
        report.reset()
        with contextlib.suppress(dgl.DGLError):  # DGL's own refusals stay
            call()
        site = report.snapshot()["dgl.NeighborSampler"]
        assert site.left == 1 and not site.accelerated and words in next(iter(site.reasons)), words


# ---- Probabilities and masks. ----


def drawn_by(g, kind, place=None, **options):
    """Ids of the edges that node 3, the hub, draws in a batch, and how many others have of those that may be drawn."""
    name = "mask" if kind.startswith("mask") else "prob"
    seeds = torch.tensor([3, *range(10, 30)], dtype=g.idtype)
    if place is not None:
        seeds = seeds.cuda()
    sampler = dgl.dataloading.NeighborSampler([20], **{name: "p"}, **options)
    nodes, _, blocks = sampler.sample(g, seeds)
    here = g.cpu() if g.device.type == "cuda" else g
    check_blocks(here, seeds.cpu(), nodes.cpu(), [block.to("cpu") for block in blocks])
    return blocks[0].edata[dgl.EID].cpu().long(), blocks[0].edges()[1].cpu().long(), seeds.cpu()


VALUES = {
    "prob": lambda: (torch.rand(EDGES) - 0.4).clamp(min=0),
    "prob of float64": lambda: torch.rand(EDGES, dtype=torch.float64) + 0.1,
    "mask": lambda: torch.rand(EDGES) < 0.6,
    "mask of integers": lambda: (torch.rand(EDGES) < 0.6).to(torch.uint8),
}


def check_drawn_by(g, p, drawn, replace):
    edges, places, seeds = drawn
    target = g.cpu().edges(order="eid")[1].long()
    assert (p[edges] != 0).all()
    for place, node in enumerate(seeds.tolist()):
        mine = edges[places == place]
        there = int(((target == node) & (p != 0)).sum())
        assert mine.numel() == (20 * (there > 0) if replace else min(there, 20))
        assert replace or mine.unique().numel() == mine.numel()


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("kind", VALUES)
def test_probabilities_and_masks(kind, replace, idtype):
    g, p = graph(idtype), VALUES[kind]()
    g.edata["p"] = p
    check_drawn_by(g, p, drawn_by(g, kind, replace=replace), replace)
    p.copy_(VALUES[kind]())  # where it lies
    check_drawn_by(g, p, drawn_by(g, kind, replace=replace), replace)
    g.edata["p"] = p = VALUES[kind]()  # another one
    check_drawn_by(g, p, drawn_by(g, kind, replace=replace), replace)
    assert ours()
    every, _, _ = dgl.dataloading.MultiLayerFullNeighborSampler(1, prob="p").sample(g, torch.tensor([3], dtype=idtype))
    target = g.edges(order="eid")
    wanted = torch.cat([torch.tensor([3]), target[0].long()[(target[1] == 3) & (p != 0)]]).unique()
    assert torch.equal(every.long().sort().values, wanted)


def test_edges_come_as_often_as_their_probability_says():
    g = dgl.graph((torch.arange(1, 6), torch.zeros(5, dtype=torch.int64)))
    g.edata["p"] = torch.tensor([1.0, 2, 0, 4, 1])
    sampler, counts = dgl.dataloading.NeighborSampler([1], prob="p"), torch.zeros(5)
    for _ in range(2_000):
        counts[sampler.sample(g, torch.tensor([0]))[2][0].edata[dgl.EID]] += 1
    wanted = 250 * g.edata["p"]
    assert ours() and ((counts - wanted) ** 2 / wanted.clamp(min=1)).sum() < 27.9  # chi-square, of 4 degrees: 1e-5


def test_integers_that_are_no_mask_are_probabilities():
    """As DGL has it: of 1 : 100 the first comes in one of a hundred batches, and not in every other."""
    g = dgl.graph((torch.arange(1, 3), torch.zeros(2, dtype=torch.int64)))
    for dtype in (torch.uint8, torch.int8):
        g.edata["p"] = torch.tensor([1, 100]).to(dtype)
        sampler = dgl.dataloading.NeighborSampler([1], prob="p")
        drawn = [int(sampler.sample(g, torch.tensor([0]))[2][0].edata[dgl.EID]) for _ in range(200)]
        assert ours() and sum(drawn) > 160


def test_probabilities_that_begin_at_one_address():
    """Two features of one memory are two, though nobody has written into either."""
    g = dgl.graph((torch.arange(1, 6), torch.zeros(5, dtype=torch.int64)))
    both = torch.tensor([[1.0, 0], [0, 1], [0, 0], [0, 0], [0, 0]])
    g.edata["column"], g.edata["flat"] = both[:, 0], both.view(-1)[:5]
    for name in ("column", "flat"):
        _, _, blocks = dgl.dataloading.NeighborSampler([3], prob=name).sample(g, torch.tensor([0]))
        assert blocks[0].edata[dgl.EID].tolist() == g.edata[name].nonzero().flatten().tolist()
    assert ours()


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_wrong_probabilities(wrong):
    g = graph()
    g.edata["p"] = torch.ones(EDGES)
    g.edata["p"][70] = wrong
    with pytest.raises(ValueError, match="prob: expected finite probabilities of at least 0"):
        dgl.dataloading.NeighborSampler([2], prob="p").sample(g, torch.tensor([7]))


# ---- The GPU samples. ----


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() or not _library.has_cuda_kernels(), reason="no CUDA GPU or no CUDA half here"
)


PLACES = {
    "on the GPU": lambda g: g.to("cuda"),
    "pinned": lambda g: g.pin_memory_(),
}


@needs_cuda
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_blocks_stay_on_the_gpu(place, replace, idtype):
    g = PLACES[place](graph(idtype, ("user", "knows", "user")))
    seeds = torch.tensor([7, 3, 9], dtype=idtype, device="cuda")
    sampler = dgl.dataloading.NeighborSampler([-1, 4, 2], replace=replace)
    nodes, out, blocks = sampler.sample(g, seeds)
    assert out is seeds and {block.device for block in blocks} == {seeds.device} and nodes.dtype == idtype
    assert {block.srcdata["x"].device for block in blocks} == {seeds.device}
    check_blocks(g.cpu() if g.device.type == "cuda" else g, seeds.cpu(), nodes.cpu(), [b.to("cpu") for b in blocks])
    assert ours()


def loaders(place, **options):
    """A loader of a graph that is there, and the graph on the CPU."""
    g = graph()
    g.ndata["f"], g.ndata["y"] = torch.rand(NODES, 6), torch.arange(NODES)
    there, seeds = PLACES[place](g), torch.arange(NODES)
    sampler = dgl.dataloading.NeighborSampler([4, 3], **options)
    how = {"use_uva": True} if place == "pinned" else {}
    seeds = seeds if place == "pinned" else seeds.cuda()
    return dgl.dataloading.DataLoader(there, seeds, sampler, device="cuda", batch_size=16, shuffle=True, **how), g


@needs_cuda
@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_training_on_batches_of_the_gpu(place, fetched):
    loader, g = loaders(place, **({"prefetch_node_feats": ["f"], "prefetch_labels": ["y"]} if fetched else {}))
    conv = dgl.nn.SAGEConv(6, 5, "mean").cuda()
    seen = []
    for nodes, out, blocks in loader:
        x, y = blocks[0].srcdata["f"], blocks[-1].dstdata["y"]
        assert x.is_cuda and torch.equal(x.cpu(), g.ndata["f"].cpu()[nodes.cpu()]) and torch.equal(y, out)
        conv.zero_grad()
        got = conv(blocks[0], (x, x[: blocks[0].num_dst_nodes()]))
        got.square().sum().backward()
        there, here = copy.deepcopy(conv).cpu(), blocks[0].to("cpu")
        there.zero_grad()
        want = there(here, (x.cpu(), x.cpu()[: here.num_dst_nodes()]))
        want.square().sum().backward()
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
        for one, other in zip(conv.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-3, atol=1e-4)
        seen.append(out.cpu())
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(NODES)) and ours()


@needs_cuda
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_probabilities_and_masks_on_the_gpu(place, kind, replace):
    g, p = graph(), VALUES[kind]()
    g.edata["p"] = p
    g = PLACES[place](g)
    for _ in range(2):
        check_drawn_by(g, p, drawn_by(g, kind, place, replace=replace), replace)
    assert ours()


@needs_cuda
def test_what_the_gpu_leaves_to_dgl():
    g = graph()
    g.edata["p"] = torch.rand(EDGES)
    g, seeds = g.to("cuda"), torch.tensor([7, 3, 9], device="cuda")
    make = dgl.dataloading.NeighborSampler
    for sampler, given in ((make([2], edge_dir="out"), seeds), (make([2]), seeds.cpu())):
        report.reset()
        with contextlib.nullcontext() if given.is_cuda else contextlib.suppress(dgl.DGLError):
            sampler.sample(g, given)
        site = report.snapshot()["dgl.NeighborSampler"]
        assert site.left == 1 and not site.accelerated


@needs_cuda
def test_pins_are_shared_and_whole():
    tensor = torch.rand(40, 3)
    first, second, part = host_memory.pin(tensor), host_memory.pin(tensor), torch.rand(40, 3)
    assert first is second
    del first
    assert tensor.is_pinned()
    del second
    assert not tensor.is_pinned()
    kept = host_memory.pin(part[:10])
    with pytest.raises(ValueError, match="pinned"):
        host_memory.rows(part, torch.tensor([39], device="cuda"))
    assert torch.equal(host_memory.rows(kept.tensor, torch.tensor([9], device="cuda")).cpu(), part[9:10])
    replaced = torch.rand(40, 3)
    kept = host_memory.pin(replaced)
    before, replaced.data = replaced.clone(), torch.rand(40, 3)
    assert torch.equal(host_memory.rows(kept.tensor, torch.tensor([7], device="cuda")).cpu(), before[7:8])


@needs_cuda
def test_pinned_graphs():
    g = graph()
    x = g.ndata["x"]
    assert g.pin_memory_() is g and g.is_pinned() and x.is_pinned() and g.device.type == "cpu"
    assert not g.clone().formats(["csc"]).is_pinned()
    assert torch.equal(g.find_edges(torch.tensor([5], device="cuda"))[0].cpu(), g.find_edges(torch.tensor([5]))[0])
    g.unpin_memory_()
    assert not g.is_pinned() and not x.is_pinned()
    with pytest.raises(dgl.DGLError, match="must be on CPU"):
        g.to("cuda").pin_memory_()
    loader = {"graph_sampler": dgl.dataloading.NeighborSampler([2]), "use_uva": True, "gpu_cache": {"node": {"x": 9}}}
    with pytest.raises(dgl.DGLError, match="gpu_cache"):
        dgl.dataloading.DataLoader(graph(), torch.arange(9), device="cuda", **loader)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 2, 5), (50, 0)])
def test_rows_over_the_bus(shape, dtype):
    tensor = torch.randint(0, 9, shape).to(dtype)
    pinned = host_memory.pin(tensor)
    for index in (
        torch.tensor([3, 0, 49, 3]),
        torch.tensor([], dtype=torch.int64),
        torch.arange(50, dtype=torch.int32),
    ):
        got = host_memory.rows(tensor, index.cuda())
        assert got.is_cuda and torch.equal(got.cpu(), tensor[index.long()])
    del got
    torch.cuda.synchronize()
    del pinned
    if tensor.numel():
        with pytest.raises(ValueError, match="pinned"):
            host_memory.rows(tensor, index.cuda())
    with pytest.raises(ValueError, match="contiguous"):
        host_memory.pin(torch.rand(4, 4).t())


@needs_cuda
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
def test_the_gpu_draws_the_cpus_blocks(idtype, monkeypatch):
    g, seeds = graph(idtype), torch.tensor([7, 3, 9], dtype=idtype)
    sampler = dgl.dataloading.NeighborSampler([4, 40, 2])
    calls, sample = [], sampling.neighbor_sample
    monkeypatch.setattr(sampling, "neighbor_sample", lambda *a, **k: calls.append(a[0].is_cuda) or sample(*a, **k))
    batches = []
    for choice in ("", "cuda"):
        monkeypatch.setenv("GNNACCEL_SAMPLER", choice)
        dgl.seed(4)
        nodes, _, blocks = sampler.sample(g, seeds)
        check_blocks(g, seeds, nodes, blocks)
        batches.append([nodes.tolist(), *(block.edata[dgl.EID].tolist() for block in blocks)])
    assert batches[0] == batches[1] and calls == [False, True]
    assert ours()


@needs_cuda
def test_workers_leave_the_gpu_alone(monkeypatch):
    monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    torch.zeros(1, device="cuda")
    g = graph()
    loader = dgl.dataloading.DataLoader(
        g, torch.arange(20), dgl.dataloading.NeighborSampler([4, 2]), batch_size=6, num_workers=2
    )
    for nodes, out, blocks in loader:
        check_blocks(g, out, nodes, blocks)


def test_a_gpu_that_there_is_not(monkeypatch):
    monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="GNNACCEL_SAMPLER=cuda"):
        dgl.dataloading.NeighborSampler([2]).sample(graph(), torch.tensor([3]))


def test_a_build_without_cuda_samples_on_the_cpu(monkeypatch):
    monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(samplers, "has_cuda_kernels", lambda: False)
    g, seeds = graph(), torch.tensor([7, 3])
    nodes, _, blocks = dgl.dataloading.NeighborSampler([2]).sample(g, seeds)
    check_blocks(g, seeds, nodes, blocks)
    assert "sampled on the CPU: this gnnaccel has no CUDA half" in report.snapshot()["dgl.NeighborSampler"].reasons


def test_disabling_restores_the_sampler():
    method = dgl.dataloading.NeighborSampler.sample_blocks
    dgl_backend.disable()
    assert dgl.dataloading.NeighborSampler.sample_blocks is method.__wrapped__
