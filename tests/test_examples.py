"""The scripts in examples/: those of a framework have the same losses alone and accelerated, and leave nothing to the
framework; those on gnnaccel's own layers have the losses of the same model in dense matrices."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gnnaccel import data

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PLAIN = {"dgl": "compat", "pyg": "0"}  # DGL's wheel cannot be imported without the compat layer
BATCHES = 5  # of 32 in Cora's 140 training nodes

# Script, epochs, threads, the kinds of call that must be accelerated, calls of each per epoch. Testing adds two.
RUNS = [
    ("dgl_gcn", 50, 1, ["dgl.GraphConv"], 2),
    ("dgl_gat", 4, 1, ["dgl.GATConv"], 2),
    ("dgl_sage_sampled", 3, 2, ["dgl.gspmm copy_lhs.mean"], 2 * BATCHES),
    ("pyg_gcn", 4, 1, ["pyg.GCNConv"], 2),
    ("pyg_gat", 50, 1, ["pyg.GATConv"], 2),
    ("pyg_sage_sampled", 3, 1, ["pyg.SAGEConv"], 2 * BATCHES),
]
OWN = ["agnn", "gcn", "maxk", "maxk_approximation"]  # written with gnnaccel itself
DISTRIBUTED = "pyg_gcn_distributed"  # tests/test_distributed.py


def need(framework):
    package = {"dgl": "dgl", "pyg": "torch_geometric"}[framework]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def program(script, losses, *arguments, **environment):
    """How to run a script as a user would, from any folder, with the flag or without: for subprocess."""
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    words = [sys.executable, "-W", "ignore", str(EXAMPLES / f"{script}.py"), "--log-losses", str(losses), *arguments]
    return {"args": words, "env": kept | environment, "cwd": losses.parent}


def start(script, losses, *arguments, **environment):
    """Start a script in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(**program(script, losses, *arguments, **environment), **pipes)


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip().splitlines()


def run_alone(script, losses, *arguments, **environment):
    """The framework alone, in a fork (forked.py)."""
    done = forked.run(**program(script, losses, *arguments, **environment))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def read(path):
    return [float(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Cora with its first 100 features, so that runs take no longer than their imports."""
    cora, path = data.load("cora"), tmp_path_factory.mktemp("data") / "small.npz"
    masks = dict(train_mask=cora.train_mask, val_mask=cora.val_mask, test_mask=cora.test_mask)
    np.savez(path, edge_index=cora.edge_index, x=cora.x[:, :100], y=cora.y, **masks)
    return path


@pytest.mark.parametrize(("script", "epochs", "threads", "kinds", "calls"), RUNS, ids=[run[0] for run in RUNS])
def test_losses_equal_and_every_call_accelerated(tmp_path, small, script, epochs, threads, kinds, calls):
    framework = script[:3]
    need(framework)
    arguments = ("--data", str(small), "--epochs", str(epochs), "--seed", "3")
    profile = tmp_path / "profile.json"
    threads = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}  # both runs share the cores
    flags = {"GNNACCEL": "1", "GNNACCEL_PROFILE": str(profile), "GNNACCEL_SAMPLER": "framework"}  # the same batches
    ours = start(script, tmp_path / "ours", *arguments, **flags, **threads)
    alone = run_alone(script, tmp_path / "alone", *arguments, GNNACCEL=PLAIN[framework], **threads)
    for lines in (alone, finish(ours)):
        assert lines[-1].startswith("test accuracy 0.") and lines[-1].endswith(" ms")
    expected, got = read(tmp_path / "alone"), read(tmp_path / "ours")
    assert len(got) == len(expected) == epochs * calls // 2
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert expected[-1] < expected[0]
    sites = json.loads(profile.read_text())["sites"]
    sites = {kind: site for kind, site in sites.items() if not kind.endswith(".NeighborSampler")}  # the framework's
    assert {kind: site["left"] for kind, site in sites.items()} == dict.fromkeys(kinds, 0)
    assert {kind: site["accelerated"] for kind, site in sites.items()} == dict.fromkeys(kinds, epochs * calls + 2)


def test_no_framework_example_mentions_gnnaccel():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in scripts} == {run[0] for run in RUNS} | {"graphs", *OWN, DISTRIBUTED}
    known = [path.stem for path in scripts if "gnnaccel" in path.read_text(encoding="utf-8").lower()]
    assert known == [*OWN, DISTRIBUTED]


def load_example(name, monkeypatch):
    """Import an example under a name of its own; tests/ has a module called graphs too."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    if name != "graphs":
        monkeypatch.setitem(sys.modules, "graphs", load_example("graphs", monkeypatch))
    spec.loader.exec_module(module)
    return module


def dropped(x, rate):
    """Dropout with the draws of features in single precision."""
    return x * F.dropout(torch.ones(x.shape), rate)


def dense_gcn(model, adjacency, x):
    norm = adjacency.sum(1).rsqrt()
    adjacency = norm[:, None] * adjacency * norm
    x = (adjacency @ model.conv1.linear(dropped(x, 0.5)) + model.conv1.bias).relu()
    return adjacency @ model.conv2.linear(dropped(x, 0.5)) + model.conv2.bias


def dense_agnn(model, adjacency, x):
    x = model.first(dropped(x, 0.5)).relu()
    for conv in model.convs:
        direction = F.normalize(x, dim=1)
        scores = conv.beta * (direction @ direction.t())
        x = scores.masked_fill(adjacency == 0, -torch.inf).softmax(1) @ x
    return model.last(dropped(x, 0.5))


@pytest.mark.parametrize(
    ("script", "make", "hidden", "dense"), [("gcn", "GCN", 16, dense_gcn), ("agnn", "AGNN", 32, dense_agnn)]
)
def test_own_layers_train_like_dense_matrices(tmp_path, small, monkeypatch, script, make, hidden, dense):
    epochs = 4
    options = ("--data", str(small), "--epochs", str(epochs), "--seed", "3", "--kernel")
    processes = {kernel: start(script, tmp_path / kernel, *options, kernel) for kernel in ("auto", "tiled")}
    example, graph = load_example(script, monkeypatch), load_example("graphs", monkeypatch).load(str(small))
    torch.manual_seed(3)
    model = getattr(example, make)(100, hidden, graph.num_classes).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    adjacency = torch.eye(len(graph.x), dtype=torch.float64)
    adjacency[graph.edge_index[1], graph.edge_index[0]] = 1
    x, y, mask = (torch.from_numpy(array) for array in (graph.x, graph.y, graph.train_mask))
    expected = []
    for _ in range(epochs):
        loss = F.cross_entropy(dense(model, adjacency, x.double())[mask], y[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert expected[-1] < expected[0]
    for kernel, process in processes.items():
        lines = finish(process)
        assert lines[-1].startswith("test accuracy 0.") and lines[-1].endswith(" ms")
        np.testing.assert_allclose(read(tmp_path / kernel), expected, rtol=0, atol=1e-5, err_msg=kernel)


@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_reader_agrees_with_the_package(name, monkeypatch):
    read, expected = load_example("graphs", monkeypatch).load(name), data.load(name)
    total = expected.x.sum(1, keepdims=True)
    np.testing.assert_allclose(read.x, expected.x / np.maximum(total, 1e-9), rtol=1e-6)
    assert read.num_classes == expected.num_classes
    for key in ("edge_index", "y", "train_mask", "val_mask", "test_mask"):
        np.testing.assert_array_equal(getattr(read, key), getattr(expected, key), err_msg=key)


def test_reader_takes_a_path_and_names_what_is_wrong(tmp_path, monkeypatch):
    graphs = load_example("graphs", monkeypatch)
    mask = np.array([[True, False], [False, True]])
    arrays = dict(edge_index=[[0, 1], [1, 0]], y=[0, 1], train_mask=mask, val_mask=mask, test_mask=mask)
    path = str(tmp_path / "small.npz")
    np.savez(path, x=[[1, 3], [0, 0]], **arrays)
    read = graphs.load(path)
    assert read.x.tolist() == [[0.25, 0.75], [0, 0]]
    assert read.train_mask.tolist() == [True, False]
    np.savez(path, **arrays)
    for name, message in ((path, "no node features"), ("absent", "no graph 'absent'"), ("no.npz", "no file no.npz")):
        with pytest.raises(SystemExit, match=message):
            graphs.load(name)


def test_plain_sampler_draws_without_replacement_and_uniformly(monkeypatch):
    need("pyg")
    from torch_geometric.data import Data

    example = load_example("pyg_sage_sampled", monkeypatch)
    # Node 0 has the neighbours 1 to 6, node 1 has 0 and 2, node 2 has 7; the others have none.
    source = torch.tensor([1, 2, 3, 4, 5, 6, 0, 2, 7])
    destination = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2])
    graph = Data(x=torch.arange(16.0).view(8, 2), y=torch.arange(8), edge_index=torch.stack([source, destination]))
    sampler = example.PlainSampler(graph, [2, 3])
    everything = example.PlainSampler(graph, [-1, -1])([0, 2])
    assert (everything.num_nodes, everything.num_edges) == (8, 9)
    edges = set(zip(source.tolist(), destination.tolist(), strict=True))
    seen = Counter()
    torch.set_num_threads(1)
    for _ in range(300):
        batch = sampler([2, 0])
        assert batch.batch_size == 2 and batch.n_id[:2].tolist() == [2, 0]
        assert len(batch.n_id.unique()) == len(batch.n_id)
        assert torch.equal(batch.x, graph.x[batch.n_id]) and torch.equal(batch.y, batch.n_id)
        drawn = [tuple(edge) for edge in batch.n_id[batch.edge_index].t().tolist()]
        assert len(set(drawn)) == len(drawn) and set(drawn) <= edges
        degrees = Counter(destination for _, destination in drawn)
        assert degrees[2] == 1 and degrees[0] == 2
        assert degrees[1] == (2 if 1 in batch.n_id else 0)  # found in the first hop, expanded in the second
        seen.update(source for source, destination in drawn if destination == 0)
    assert set(seen) == {1, 2, 3, 4, 5, 6} and all(60 < count < 140 for count in seen.values())
