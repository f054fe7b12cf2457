"""DGL's NeighborSampler on our sampling: the blocks that DGL makes, and what is left to it."""

import contextlib

import pytest
import torch

from gnnaccel import _library, dgl_backend, report, sampling

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
    g.edata["p"] = torch.rand(EDGES)
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


# ---- GNNACCEL_SAMPLER=cuda. ----


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() or not _library.has_cuda_kernels(), reason="no CUDA GPU or no CUDA half here"
)


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
    assert batches[0] == batches[1] and calls == [False] * 3 + [True] * 3
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
