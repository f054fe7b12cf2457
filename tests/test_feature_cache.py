"""Features of which a GPU keeps some rows: a gather gives the rows that an index of the features gives."""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch

from gnnaccel import ops, report
from gnnaccel.sampling import FeatureCache, host_memory

NODES = 120
HAS_GPU = torch.cuda.is_available() and ops.has_cuda_kernels()
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


def indices():
    yield torch.randint(NODES, (50,))
    yield torch.arange(NODES, dtype=torch.int32)
    yield torch.empty(0, dtype=torch.int64)
    yield torch.tensor([7, 7, 7])


def check(cache, features) -> None:
    for index in indices():
        for given in {index, index.to(cache.device)}:
            got = cache[given]
            assert got.device == cache.device and got.dtype == features.dtype
            assert torch.equal(got.cpu(), features[index.long()])


FEATURES = {
    "rows": lambda: torch.rand(NODES, 100),
    "odd rows of halves": lambda: torch.rand(NODES, 7).half(),
    "numbers": lambda: torch.rand(NODES).double(),
    "flags": lambda: torch.rand(NODES, 3) > 0.5,
    "matrices": lambda: torch.randint(9, (NODES, 3, 5)),
    "complex": lambda: torch.rand(NODES, 2).to(torch.complex64),
    "a part": lambda: torch.rand(NODES + 9, 33)[9:],
    "nothing": lambda: torch.rand(NODES, 0),
    "of NumPy": lambda: np.random.rand(NODES, 12),
}


@pytest.mark.parametrize("pin", [None, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FEATURES)
def test_gather(name, device, pin):
    features, scores = FEATURES[name](), torch.rand(NODES)
    wanted = torch.as_tensor(features)
    for kept in (0, 30, NODES, 5 * NODES):
        cache = FeatureCache(features, scores, num_rows=kept, device=device, pin=pin)
        assert len(cache) == NODES and set(cache.rows.tolist()) == set(scores.topk(min(kept, NODES)).indices.tolist())
        check(cache, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_copies(device):
    """One that the host gathers for can be copied; one whose GPU reads the host's memory says that it cannot."""
    features, scores = torch.rand(NODES, 10), torch.rand(NODES)
    cache = FeatureCache(features, scores, num_rows=30, device=device, pin=False)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        check(copied, features)
    cache = FeatureCache(features, scores, num_rows=30, device=device)
    if device == "cpu":
        cache._pinned = object()
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copying(cache)


@pytest.mark.parametrize("device", DEVICES)
def test_a_file(device, tmp_path):
    wanted = torch.rand(NODES, 10)
    wanted.numpy().tofile(tmp_path / "x")
    for mode in ("r", "r+"):
        mapped = np.memmap(tmp_path / "x", dtype="float32", mode=mode, shape=(NODES, 10))
        cache = FeatureCache(mapped, torch.arange(NODES), num_bytes=40 * 20 + 39, device=device)
        assert cache.rows.tolist() == list(range(100, 120)) and cache._pinned is None
        check(cache, wanted)
    mapped[110] = 5
    assert not (cache[torch.tensor([110])] == 5).any()  # what torch does not count
    cache.refresh()
    assert (cache[torch.tensor([110])] == 5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_writes_are_seen(device):
    features = torch.rand(NODES, 4)
    cache = FeatureCache(features, torch.arange(NODES), num_rows=60, device=device)
    features.mul_(2)
    check(cache, features)


WRONG = {  # what is given instead: error
    "no size": (dict(num_rows=None), ValueError, "one of"),
    "both sizes": (dict(num_bytes=8), ValueError, "one of"),
    "less than nothing": (dict(num_rows=-1), ValueError, "0 or more"),
    "scores of others": (dict(scores=torch.rand(3)), ValueError, r"Tensor \[120\]"),
    "no numbers": (dict(scores=torch.full((NODES,), float("nan"))), ValueError, "NaN"),
    "not contiguous": (dict(features=torch.rand(4, NODES).t()), ValueError, "contiguous"),
    "a list": (dict(features=[1.0]), TypeError, "NumPy"),
    "wide numbers": (dict(features=torch.rand(NODES).to(torch.complex128)), TypeError, "8 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    given, error, words = WRONG[name]
    given = dict(features=torch.rand(NODES, 2), scores=torch.rand(NODES), num_rows=3, device="cpu") | given
    with pytest.raises(error, match=words):
        FeatureCache(given.pop("features"), given.pop("scores"), **given)


def test_wrong_indices():
    cache = FeatureCache(torch.rand(NODES, 2), torch.rand(NODES), num_rows=3, device="cpu")
    for index in (torch.rand(3), torch.zeros(2, 2, dtype=torch.int64), [1]):
        with pytest.raises(TypeError, match="int32 or int64"):
            cache[index]


@on_gpu
def test_nobody_waits_and_other_streams():
    features = torch.rand(5000, 100)
    cache = FeatureCache(features, torch.rand(5000), num_rows=1000)
    index = torch.randint(5000, (3000,), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            got = cache[index]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(got.cpu(), features[index.cpu()])
    assert host_memory.is_pinned(features)
    del cache
    gc.collect()
    assert not host_memory.is_pinned(features)


@on_gpu
def test_pygs_loader_reads_through_it(monkeypatch):
    pyg = pytest.importorskip("torch_geometric")
    from gnnaccel import pyg_backend

    monkeypatch.setenv("GNNACCEL_SAMPLER", "cuda")
    report.reset()
    pyg_backend.enable()
    try:
        data = pyg.data.Data(x=torch.rand(NODES, 20), y=torch.arange(NODES), edge_index=torch.randint(NODES, (2, 700)))
        cache = FeatureCache(data.x, data.edge_index[0].bincount(minlength=NODES), num_rows=40)
        calls, gather = [], FeatureCache.gather
        monkeypatch.setattr(FeatureCache, "gather", lambda self, index: calls.append(self) or gather(self, index))
        for step, batch in enumerate(pyg.loader.NeighborLoader(data, [4, 2], batch_size=16)):
            assert type(batch.x) is torch.Tensor and torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
            if step == 3:
                torch.cuda.synchronize()
                data.x.mul_(2)
        assert len(calls) == 8 and calls[0] is cache
    finally:
        pyg_backend.disable()


@on_gpu
def test_dgls_gather_reads_through_it(monkeypatch):
    features = torch.rand(NODES, 20)
    cache = FeatureCache(features, torch.rand(NODES), num_rows=40)
    calls, gather = [], FeatureCache.gather
    monkeypatch.setattr(FeatureCache, "gather", lambda self, index: calls.append(self) or gather(self, index))
    index = torch.randint(NODES, (30,), device="cuda")
    assert torch.equal(host_memory.rows(features, index).cpu(), features[index.cpu()])
    assert calls == [cache]
