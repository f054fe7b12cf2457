"""Training on a graph in parts by several ranks, which ends as in one process."""

import difflib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
import torch
from command_line import ROOT, arrays
from rank_runs import agree, cut_small, random_graph, ranks

from gnnaccel import data, distributed
from gnnaccel.parts import ranks as joining

DATA = os.environ.get("GNNACCEL_DATA", "")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small graph of tests/part_ranks.py in parts."""
    pytest.importorskip("torch_geometric")
    return cut_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Two parts that no edge joins."""
    folder = tmp_path_factory.mktemp("apart") / "2"
    rings = torch.stack([torch.arange(20), torch.arange(20).view(2, 10).roll(1, 1).flatten()])
    done = distributed.partition(rings, 2, folder, "range", nodes={"x": torch.rand(20, 6).double()})
    assert done.cut == done.halo_rows == 0
    return folder


def alone(name, kinds, dtype, epochs):
    """The same models in one process, by PyG itself."""
    import part_ranks

    graph, kept = part_ranks.whole(name, dtype), {}
    for kind in kinds:
        model_kind, _, norm = kind.partition("-")
        model = part_ranks.model_of(model_kind, graph.num_features, int(graph.y.max()) + 1, dtype, norm or None)
        losses = part_ranks.train(model, graph, torch.mean, epochs)
        model.eval()
        with torch.no_grad():
            kept[kind] = losses, model(graph.x, graph.edge_index), model
    return graph, kept


def compare(tmp_path, name, parts, kinds, dtype, epochs, tolerance, device="cpu", **environment):
    import part_ranks

    graph = part_ranks.whole(str(name), dtype)
    distributed.partition(graph, parts, tmp_path / "parts")
    out = tmp_path / "results.pt"
    short = str(dtype).removeprefix("torch.")
    arguments = tmp_path / "parts", out, device, short, epochs, *kinds
    results = ranks(parts, "training", *arguments, timeout=600, **environment)
    agree(results)
    kept, (_, expected) = torch.load(out, weights_only=True), alone(str(name), kinds, dtype, epochs)
    for kind, (losses, _logits, model) in expected.items():
        np.testing.assert_allclose(kept[kind]["losses"], losses, rtol=0, atol=tolerance, err_msg=kind)
        assert losses[-1] < losses[0]
        # A checkpoint of parts is one of the plain model.
        model.load_state_dict(kept[kind]["state"])
        with torch.no_grad():
            torch.testing.assert_close(kept[kind]["logits"], model(graph.x, graph.edge_index), rtol=1e-3, atol=1e-4)
    return results


@pytest.fixture(scope="module")
def cora(tmp_path_factory):
    """Cora with its first 100 features, so that training takes no longer than starting to."""
    found, path = data.load("cora"), tmp_path_factory.mktemp("data") / "cora.npz"
    masks = dict(train_mask=found.train_mask, val_mask=found.val_mask, test_mask=found.test_mask)
    np.savez(path, edge_index=found.edge_index, x=found.x[:, :100], y=found.y, **masks)
    return path


@pytest.mark.parametrize("parts", [2, 4])
def test_training_on_cora_is_that_of_one_process(tmp_path, cora, parts):
    """In double precision, where rounding leaves no doubt: Adam makes much of it in single."""
    pytest.importorskip("torch_geometric")
    kinds = ("gcn", "sage", "gin", "gat", "gin-batch_norm")
    compare(tmp_path, cora, parts, kinds, torch.float64, 50, 1e-9)


def test_training_in_single_precision(tmp_path, cora):
    pytest.importorskip("torch_geometric")
    compare(tmp_path, cora, 2, ("gcn", "sage"), torch.float32, 50, 1e-5)


@pytest.mark.parametrize("name", ["amazon_computers", "tolokers"])
def test_training_on_larger_graphs(tmp_path, name):
    pytest.importorskip("torch_geometric")
    path = Path(DATA, f"{name}.npz")
    if not DATA or not path.is_file():
        pytest.skip(f"GNNACCEL_DATA names no folder with {name}.npz")
    compare(tmp_path, path, 2, ("gcn", "sage", "gat"), torch.float64, 5, 1e-9)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_layers_give_what_they_give_on_the_whole_graph(small, parts):
    agree(ranks(parts, "layers", small / str(parts)))
    agree(ranks(parts, "nn_layers", small / str(parts)))


@pytest.mark.parametrize("program", ["details", "refused"])
def test_two_ranks(small, program):
    agree(ranks(2, program, small / "2"))


def test_parts_that_no_edge_joins(apart):
    pytest.importorskip("torch_geometric")
    agree(ranks(2, "apart", apart))


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_parts_of_a_dgl_graph(tmp_path, idtype):
    from dgl_compare import dgl

    edges = random_graph()
    graph = dgl.graph((edges[0], edges[1]), num_nodes=60, idtype=getattr(torch, idtype))
    graph.ndata["feat"], graph.ndata["label"] = torch.arange(180.0).view(60, 3), torch.arange(60) % 4
    graph.ndata["train_mask"], graph.edata["w"] = torch.arange(60) % 2 == 0, torch.arange(400.0)
    distributed.partition(graph, 2, tmp_path / "parts")
    agree(ranks(2, "dgl_graph", tmp_path / "parts"))
    with pytest.raises((TypeError, ValueError), match="homogeneous"):
        hetero = dgl.heterograph({("a", "to", "b"): (edges[0], edges[1])}, {"a": 60, "b": 60})
        distributed.partition(hetero, 2, tmp_path / "hetero")


def test_parts_without_features_say_so(tmp_path):
    pytest.importorskip("torch_geometric")
    distributed.partition(random_graph(), 1, tmp_path / "parts", nodes={"label": torch.zeros(60)}, num_nodes=60)
    agree(ranks(1, "without_features", tmp_path / "parts"))


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("gpus", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
)
def test_example_from_a_clean_process(tmp_path, device):
    """As its head says, by torchrun; without dropout, which differs from part to part, the losses of pyg_gcn.py."""
    pytest.importorskip("torch_geometric")
    np.savez(tmp_path / "small.npz", **arrays(300, 2000))
    env = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    losses = []
    for parts in (1, 2):
        log = tmp_path / f"losses{parts}"
        script = [str(ROOT / "examples" / "pyg_gcn_distributed.py"), "--data", "small.npz", "--dropout", "0"]
        words = [*torchrun, str(parts), *script, "--epochs", "20", "--log-losses", str(log)]
        words += ["--device", "cpu"] if device == "cpu" else []
        done = forked.run(words, env, tmp_path)  # torchrun; it starts its ranks as it ever does
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("test accuracy 0.")
        losses.append([float(line) for line in log.read_text().splitlines()])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5 if device == "cpu" else 1e-4)
    assert len(losses[0]) == 20 and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("given", "rank", "local", "gpus", "expected"),
    [
        (None, 1, 2, 0, ("cpu", "gloo")),
        (None, 1, 2, 2, ("cuda:1", "nccl")),
        (None, 1, 2, 1, ("cpu", "gloo")),
        ("cuda", 1, 2, 2, ("cuda:1", "nccl")),
        ("cuda", 1, 2, 1, ("cuda:0", "gloo")),
        ("cuda", 3, 4, 2, ("cuda:1", "gloo")),
        ("cuda:1", 0, 1, 2, ("cuda:1", "nccl")),
        ("cpu", 0, 1, 2, ("cpu", "gloo")),
    ],
)
def test_where_a_rank_runs(monkeypatch, given, rank, local, gpus, expected):
    """`local` ranks on a machine of so many GPUs."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    place, backend = joining._place(given)
    assert (str(place), backend) == expected


def test_nccls_group_has_a_stream_before_others(monkeypatch):
    """Or sums that fill the GPU hold back the rows that they were to hide."""
    given = {}
    nccl = SimpleNamespace(Options=lambda **made: SimpleNamespace(_timeout=None, **made))
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "_place", lambda _device: (torch.device("cuda", 1), "nccl"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *names, **more: given.update(more, names=names))
    assert joining.join(timeout_s=7) == torch.device("cuda", 1)
    assert given["names"] == ("nccl",) and given["device_id"] == torch.device("cuda", 1)
    assert given["timeout"] == given["pg_options"]._timeout and given["timeout"].total_seconds() == 7
    assert given["pg_options"].is_high_priority_stream


SINGLE = """
import gnnaccel, sys, torch
import torch.nn.functional as F
from torch_geometric.nn import GCN
data = torch.load("whole.pt", weights_only=False)
torch.manual_seed(0)
model = GCN(data.num_features, 16, 2, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(10):
    logits = model(data.x, data.edge_index)
    loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sys.stdout.write(f"loss {loss.item()}\\n")  # one write, beside another rank's
sys.stdout.write(f"accuracy {(logits.argmax(1) == data.y).float().mean().item()}\\n")
"""
# As docs/distributed.md has them.
CHANGES = {
    """data = torch.load("whole.pt", weights_only=False)""": """data = gnnaccel.distributed.load("parts")""",
    "optimizer = torch.optim": "model = gnnaccel.distributed.wrap(model, data)\noptimizer = torch.optim",
    "F.cross_entropy(": "data.mean(F.cross_entropy(",
    "data.y[data.train_mask])": """data.y[data.train_mask], reduction="none"))""",
    "(logits.argmax(1) == data.y).float().mean().item()": "data.mean((logits.argmax(1) == data.y).float()).item()",
}


def test_a_script_of_one_process_changes_in_under_ten_lines(tmp_path):
    pyg = pytest.importorskip("torch_geometric.data")
    edges = random_graph()
    labels = torch.arange(60) % 4
    whole = pyg.Data(x=torch.eye(60)[:, :8] + labels[:, None], edge_index=edges, y=labels, train_mask=labels < 3)
    torch.save(whole, tmp_path / "whole.pt")
    distributed.partition(whole, 2, tmp_path / "parts")
    changed = SINGLE
    for old, new in CHANGES.items():
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    lines = [line for line in difflib.ndiff(SINGLE.splitlines(), changed.splitlines()) if line.startswith("+ ")]
    assert len(lines) < 10
    env = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for name, script, words in (("single.py", SINGLE, [sys.executable]), ("parts.py", changed, torchrun)):
        (tmp_path / name).write_text(script)
        done = forked.run([*words, name], env, tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(
            np.array([float(number) for number in re.findall(r"^(?:loss|accuracy) (\S+)$", done.stdout, re.M)])
        )
    # Of two ranks' lines, which may come in any order, each is there twice.
    np.testing.assert_allclose(np.sort(found[1]), np.sort(np.repeat(found[0], 2)), rtol=0, atol=1e-5)
    assert len(found[0]) == 11


# --- CUDA


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for NCCL")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_on_two_gpus_is_that_of_one_process(tmp_path, cora, dtype):
    pytest.importorskip("torch_geometric")
    double = dtype == torch.float64
    kinds = ("gcn", "sage", "gin", "gat", "gin-batch_norm") if double else ("gcn", "sage")
    compare(tmp_path, cora, 2, kinds, dtype, 50, 1e-8 if double else 1e-3, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_of_two_ranks_that_share_a_gpu(tmp_path, cora):
    """By gloo, through the host."""
    pytest.importorskip("torch_geometric")
    kinds = ("gcn", "sage", "gin", "gat", "gin-batch_norm")
    compare(tmp_path, cora, 2, kinds, torch.float64, 50, 1e-8, device="cuda", CUDA_VISIBLE_DEVICES="0")
