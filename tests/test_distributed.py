"""Graphs in parts: how they are cut and kept, and training on them by several ranks, which ends as in one process or,
where a rank fails, in an error on every rank. Ranks are processes of their own, none without a timeout."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import ROOT, arrays, command
from scipy.sparse import random as random_matrix

import gnnaccel
from gnnaccel import data, distributed
from gnnaccel.graph.network import network_of
from gnnaccel.parts import assign, cut, files

TESTS = ROOT / "tests"
DATA = os.environ.get("GNNACCEL_DATA", "")


def random_graph(num_nodes=60, num_edges=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_nodes, (2, num_edges), generator=generator)


# --- cutting


@pytest.mark.parametrize("method", ["communities", "range", "metis"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_make_up_the_graph(tmp_path, method, parts):
    if method == "metis":
        pytest.importorskip("pymetis")
    edges = random_graph()
    weights, labels = torch.rand(400), torch.randint(0, 7, (61,))
    nodes = {"x": torch.rand(61, 3), "y": labels}
    done = distributed.partition(
        edges, parts, tmp_path / "parts", method, nodes=nodes, edges={"w": weights}, num_nodes=61
    )
    about, statistics, _ = files.read_manifest(tmp_path / "parts")
    assert statistics == done and about["num_classes"] == int(labels.max()) + 1
    tables = [files.read_part(tmp_path / "parts", rank, about) for rank in range(parts)]
    graphs = [table[files.GRAPH] for table in tables]
    assert sorted(np.concatenate([graph["own"] for graph in graphs])) == list(range(61))
    assert sorted(np.concatenate([graph["edge_ids"] for graph in graphs])) == list(range(400))
    crossing = 0
    for rank, (graph, table) in enumerate(zip(graphs, tables, strict=True)):
        own, halo = graph["own"], graph["halo"]
        sources = np.concatenate([own, halo])[graph["indices"]]
        destinations = own[np.repeat(np.arange(len(own)), np.diff(graph["indptr"]))]
        np.testing.assert_array_equal(np.stack([sources, destinations]), edges[:, graph["edge_ids"]])
        np.testing.assert_array_equal(table[files.EDGES]["w"], weights[graph["edge_ids"]])
        for name, value in nodes.items():
            np.testing.assert_array_equal(table[files.NODES][name], value[own])
        crossing += int(np.isin(sources, halo).sum())
        assert (len(own), len(halo), len(sources)) == (done.nodes[rank], done.halo[rank], done.edges[rank])
        assert set(halo) == set(sources) - set(own)
        # What each sends is what the other has room for, in its order.
        taken = np.split(halo, np.cumsum(graph["recv_counts"])[:-1])
        for other, wanted in enumerate(taken):
            theirs = graphs[other]
            sent = np.split(theirs["send"], np.cumsum(theirs["send_counts"])[:-1])[rank]
            np.testing.assert_array_equal(theirs["own"][sent], wanted)
    assert crossing == done.cut and done.halo_rows == sum(done.halo)


@pytest.mark.parametrize("name", ["cora", "citeseer", "generated"])
@pytest.mark.parametrize("parts", [2, 4, 7])
def test_balance_and_cut(name, parts):
    found = data.load(name)
    edges = torch.from_numpy(found.edge_index)
    graph = gnnaccel.Graph.from_coo(edges[1], edges[0], num_rows=found.num_nodes, num_cols=found.num_nodes)
    cuts = {}
    for method in ("communities", "range"):
        label = assign.assign(graph, parts, method)
        cuts[method] = int((label[edges[0]] != label[edges[1]]).sum())
    label = assign.assign(graph, parts, "communities")
    assert torch.equal(label, assign.assign(graph, parts, "communities"))
    edge_count = torch.bincount(label[edges[1]], minlength=parts).double()
    node_count = torch.bincount(label, minlength=parts).double()
    assert edge_count.max() <= 1.05 * edge_count.mean() and node_count.max() <= 1.35 * node_count.mean()
    assert cuts["communities"] < 0.75 * cuts["range"]


@pytest.mark.parametrize("name, parts, most", [("cora", 8, 0.15), ("cora", 50, 0.35), ("citeseer", 150, 0.35)])
def test_balance_by_nodes_and_cut(name, parts, most):
    found = data.load(name)
    edges = torch.from_numpy(found.edge_index)
    graph = gnnaccel.Graph.from_coo(edges[1], edges[0], num_rows=found.num_nodes, num_cols=found.num_nodes)
    label = assign.assign(graph, parts, "communities", by_nodes=True)
    count = torch.bincount(label, minlength=parts).double()
    assert count.max() <= 1.1 * count.mean()
    assert float((label[edges[0]] != label[edges[1]]).double().mean()) < most


def test_planted_communities_are_found():
    size, count = 40, 4
    generator = torch.Generator().manual_seed(0)
    inside = torch.randint(0, size, (2, 1600), generator=generator) + size * torch.randint(
        0, count, (1600,), generator=generator
    )
    across = torch.randint(0, size * count, (2, 40), generator=generator)
    new = torch.randperm(size * count, generator=generator)
    edges = new[torch.cat([inside, across], 1)]
    label = assign.assign(gnnaccel.as_graph(edges, size * count), count, "communities")
    for group in new.view(count, size):
        assert len(label[group].unique()) == 1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("upward", [False, True])
@pytest.mark.parametrize("room", [[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("few", [0, 96])
def test_the_part_that_most_neighbours_are_in(monkeypatch, few, weighted, upward, room):
    monkeypatch.setattr(assign, "_FEW", few)
    graph = gnnaccel.Graph.from_coo(torch.randint(30, (90,)), torch.randint(30, (90,)), num_rows=30, num_cols=30)
    network, _ = network_of(graph)
    network.weights = torch.randint(1, 5, network.cols.shape) if weighted else None
    label, room = torch.randint(5, (30,)), torch.tensor(room).bool()
    inside, outside, target = assign._neighbours(network, label, room, upward)
    for v in range(30):
        count = [0] * 5
        for k in range(int(network.indptr[v]), int(network.indptr[v + 1])):
            count[label[network.cols[k]]] += int(network.weights[k]) if weighted else 1
        own = int(label[v])
        allowed = [part for part in range(5) if room[part] and (part > own if upward else part < own)]
        best = max(allowed, key=lambda part: (count[part], -part), default=own)
        assert (inside[v], target[v]) == (count[own], best)
        assert outside[v] == (count[best] if allowed else -1)


@pytest.mark.parametrize("edges", [torch.empty(2, 0, dtype=torch.int64), torch.tensor([[0] * 30, list(range(30))])])
def test_graphs_without_edges_and_with_one_hub(tmp_path, edges):
    done = distributed.partition(edges, 3, tmp_path / "parts", num_nodes=30)
    assert sum(done.nodes) == 30 and sum(done.edges) == edges.shape[1] and max(done.nodes) < 30


def test_frameworks_graphs_are_cut_with_their_data(tmp_path):
    edges, x, weight = random_graph(), torch.rand(60, 2), torch.rand(400)
    pyg = pytest.importorskip("torch_geometric.data")
    graph = pyg.Data(x=x, edge_index=edges, edge_weight=weight, name="kept out")
    distributed.partition(graph, 2, tmp_path / "pyg")
    distributed.partition(edges, 2, tmp_path / "plain", nodes={"x": x}, edges={"edge_weight": weight}, num_nodes=60)
    sparse = random_matrix(60, 60, 0.1, format="csr", random_state=0)
    assert distributed.partition(sparse, 2, tmp_path / "scipy").num_edges == sparse.nnz
    (about, *_), (other, *_) = (files.read_manifest(tmp_path / kind) for kind in ("pyg", "plain"))
    assert about["files"] == other["files"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": "halves"}, ValueError, "method: expected one of communities, metis, range"),
        ({"parts": 0}, ValueError, "parts: expected 1 to 60"),
        ({"parts": 61}, ValueError, "parts: expected 1 to 60"),
        ({"nodes": {"x": torch.rand(59, 2)}}, ValueError, "nodes: x: expected a row for each of 60, got"),
        ({"edges": {"w": torch.rand(60)}}, ValueError, "edges: w: expected a row for each of 400, got"),
        ({"nodes": {"x": torch.rand(60).bfloat16()}}, TypeError, "nodes: x: NumPy, whose files parts are, has no"),
        ({"nodes": {"rank": torch.rand(60)}}, ValueError, "nodes: 'rank' is what a part itself is asked for"),
        ({"graph_or_data": random_matrix(5, 6, 0.5)}, ValueError, "sources and destinations are the same nodes"),
        ({"graph_or_data": "cora"}, TypeError, "as_graph: obj: expected"),
    ],
)
def test_wrong_arguments_of_partition(tmp_path, change, error, message):
    arguments = {"graph_or_data": gnnaccel.as_graph(random_graph(), 60), "parts": 2, "out": tmp_path / "parts"} | change
    with pytest.raises(error, match=message):
        distributed.partition(**arguments)
    assert not (tmp_path / "parts").exists()


def test_folders_and_packages_that_are_not_there(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("")
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ValueError, match="out: expected a new or empty folder"):
            distributed.partition(random_graph(), 2, out)
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match="pip install pymetis"):
        distributed.partition(random_graph(), 2, tmp_path / "parts", "metis")


def test_a_part_is_written_before_the_next_is_cut(tmp_path, monkeypatch):
    rows = []
    original = files.write_part

    def write_part(folder, rank, tables):
        rows.append(len(tables[files.NODES]["x"]))
        assert not (Path(folder) / files.MANIFEST).exists()
        return original(folder, rank, tables)

    monkeypatch.setattr(files, "write_part", write_part)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((60, 3)))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    done = cut.cut(gnnaccel.as_graph(random_graph(), 60), {"x": x}, {}, 3, "range", tmp_path / "parts")
    assert rows == done.nodes


def test_command(tmp_path):
    np.savez(tmp_path / "small.npz", **arrays())
    done = command("partition", "small.npz", "--parts", 2, "--out", "parts", cwd=tmp_path)
    assert done.returncode == 0 and "data of nodes: x, y, train_mask" in done.stdout, done.stderr
    assert "--nproc-per-node 2" in done.stderr
    told = command(
        "partition", "small.npz", "--parts", 2, "--out", "again", "--json", "--method", "range", cwd=tmp_path
    )
    assert json.loads(told.stdout)["num_edges"] == 160
    for arguments, code, message in (
        (("small.npz", "--parts", 2, "--out", "parts"), 1, "new or empty folder"),
        (("nothing.npz", "--parts", 2, "--out", "other"), 2, "nothing.npz"),
        (("small.npz", "--parts", 99, "--out", "other"), 1, "expected 1 to 40"),
    ):
        done = command("partition", *arguments, cwd=tmp_path)
        assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


# --- ranks


def ranks(count, *arguments, timeout=240, script=TESTS / "part_ranks.py", **environment):
    """Run a program as `count` ranks without torchrun, whose agent ends all when one ends: [(exit code, output)]."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {key: value for key, value in os.environ.items() if "GNNACCEL" not in key}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kept |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} | environment
    words = [sys.executable, "-W", "ignore", str(script), *map(str, arguments)]
    started = [
        subprocess.Popen(
            words,
            env=kept | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        return [(process.communicate(timeout=timeout)[0], process.returncode)[::-1] for process in started]
    finally:
        for process in started:
            process.kill()


def agree(results):
    for code, output in results:
        assert code == 0, output


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small graph of tests/part_ranks.py in two and three parts."""
    pytest.importorskip("torch_geometric")
    import part_ranks

    folder = tmp_path_factory.mktemp("small")
    for parts in (1, 2, 3):
        distributed.partition(part_ranks.small_graph(), parts, folder / str(parts))
    return folder


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


def compare(tmp_path, name, parts, kinds, dtype, epochs, tolerance, device="cpu"):
    import part_ranks

    graph = part_ranks.whole(str(name), dtype)
    distributed.partition(graph, parts, tmp_path / "parts")
    out = tmp_path / "results.pt"
    short = str(dtype).removeprefix("torch.")
    results = ranks(parts, "training", tmp_path / "parts", out, device, short, epochs, *kinds, timeout=600)
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


@pytest.mark.parametrize("program", ["details", "refused"])
def test_two_ranks(small, program):
    agree(ranks(2, program, small / "2"))


def test_parts_that_no_edge_joins(apart):
    pytest.importorskip("torch_geometric")
    agree(ranks(2, "apart", apart))


def test_example_from_a_clean_process(tmp_path):
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
        words = [*torchrun, str(parts), *script, "--epochs", "20", "--device", "cpu", "--log-losses", str(log)]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("test accuracy 0.")
        losses.append([float(line) for line in log.read_text().splitlines()])
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)
    assert len(losses[0]) == 20 and losses[0][-1] < losses[0][0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_two_ranks_train_what_does_not_fit_one(tmp_path):
    generator = torch.Generator().manual_seed(0)
    nodes, half = 60_000, 30_000
    inside = torch.randint(0, half, (2, 400_000), generator=generator)
    inside += half * torch.randint(0, 2, (400_000,), generator=generator)
    edges = torch.cat([inside, torch.randint(0, nodes, (2, 2000), generator=generator)], 1)
    labels = torch.randint(0, 8, (nodes,), generator=generator)
    arrays = {"x": torch.randn(nodes, 128, generator=generator), "y": labels, "train_mask": labels >= 0}
    for parts in (1, 2):
        distributed.partition(edges, parts, tmp_path / str(parts), "range", nodes=arrays, num_nodes=nodes)
    ((code, output),) = ranks(1, "limited", tmp_path / "1", 250)
    assert code != 0 and "can't allocate memory" in output, output
    agree(ranks(2, "limited", tmp_path / "2", 250))


# --- faults: every rank ends, with an error that says what is wrong


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("exits", "another rank has ended", ""),
        ("raises", "another rank has ended", "a fault of this rank's own"),
        ("sleeps", "exchange of halo rows failed", ""),
        ("shapes", r"rank 0 has rows of \(6,\)", r"rank 1 has rows of \(4,\)"),
        ("models", "rank 0 has a model of", "rank 1 has a model of"),
    ],
)
def test_a_rank_that_leaves_the_others(small, how, first, second):
    for (code, output), said in zip(ranks(2, "dies", small / "2", how, timeout=120), (first, second), strict=True):
        assert code != 0 and "went on" not in output
        assert re.search(said, output), output


def change_manifest(folder, **values):
    path = folder / files.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(100)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FAULTS = {
    "no manifest": (lambda folder: (folder / files.MANIFEST).unlink(), "no manifest.json"),
    "manifest cut off": (lambda folder: truncate(folder / files.MANIFEST), "manifest.json: "),
    "other format": (lambda folder: change_manifest(folder, format=99), "format 99, by gnnaccel"),
    "other files": (lambda folder: change_manifest(folder, files=[{"/etc/x": {}}, {}]), "with bytes and sha256, got"),
    "fewer files": (lambda folder: change_manifest(folder, files=[]), "files of 0 parts, expected 2"),
    "a file missing": (lambda folder: (folder / "part-0001/nodes.npz").unlink(), "part-0001/nodes.npz: missing"),
    "a file cut off": (lambda folder: truncate(folder / "part-0001/graph.npz"), "part-0001/graph.npz: damaged"),
    "a bit flipped": (lambda folder: flip(folder / "part-0001/graph.npz"), "part-0001/graph.npz: damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_are_missing_or_damaged(tmp_path, fault):
    damage, message = FAULTS[fault]
    distributed.partition(random_graph(), 2, tmp_path, nodes={"x": torch.rand(60, 2)}, num_nodes=60)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        about, _, _ = files.read_manifest(tmp_path)
        for rank in range(2):
            files.read_part(tmp_path, rank, about)


def test_arrays_that_do_not_fit_each_other_are_refused(tmp_path):
    distributed.partition(random_graph(), 2, tmp_path, num_nodes=60)
    path = tmp_path / "part-0000" / files.GRAPH
    with np.load(path) as file:
        graph = dict(file)
    for name, value in (("send", graph["send"] + 100), ("halo", graph["halo"][1:]), ("indptr", graph["indptr"][1:])):
        said = files.write_part(tmp_path, 0, {files.GRAPH: graph | {name: value}})
        change_manifest(tmp_path, files=[said, {}])
        with pytest.raises(ValueError, match=r"part-0000.graph.npz: its arrays do not fit"):
            files.read_part(tmp_path, 0, files.read_manifest(tmp_path)[0])


def test_what_one_rank_cannot_load_ends_all(small, tmp_path):
    shutil.copytree(small / "2", tmp_path / "parts")
    (tmp_path / "parts/part-0001/nodes.npz").unlink()
    (code, output), (other_code, other_output) = ranks(2, "loads", tmp_path / "parts", timeout=120)
    assert code == other_code == 1
    assert "failed on another rank: rank 1: distributed.load" in output and "nodes.npz: missing" in output
    assert "ValueError: distributed.load" in other_output and "nodes.npz: missing" in other_output


def test_another_number_of_ranks_than_parts(small):
    for code, output in ranks(2, "loads", small / "3", timeout=120):
        assert code == 1 and "3 parts, and 2 ranks: run as many (torchrun --nproc-per-node 3)" in output


def test_outside_torchrun(small):
    script = f"import gnnaccel; gnnaccel.distributed.load({str(small / '2')!r}, device='cpu')"
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=kept | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "run the script by torchrun --nproc-per-node N script.py" in done.stderr


# --- sampled training


def test_unmodified_sampled_script_under_the_flag(tmp_path):
    """DistributedDataParallel and NeighborLoader: what PyG's users run today, with our samplers and kernels."""
    pytest.importorskip("torch_geometric")
    results = ranks(2, tmp_path, script=TESTS / "sampled_ranks.py", GNNACCEL="1", GNNACCEL_PROFILE="1")
    agree(results)
    for _, output in results:
        assert "parameters agree" in output and re.search(r"pyg\.SAGEConv", output), output


# --- CUDA


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for NCCL")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_on_two_gpus_is_that_of_one_process(tmp_path, cora, dtype):
    pytest.importorskip("torch_geometric")
    double = dtype == torch.float64
    kinds = ("gcn", "sage", "gin", "gat", "gin-batch_norm") if double else ("gcn", "sage")
    compare(tmp_path, cora, 2, kinds, dtype, 50, 1e-8 if double else 1e-3, device="cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for NCCL")
def test_a_rank_that_leaves_the_others_on_gpus(small):
    for code, output in ranks(2, "dies", small / "2", "raises", "cuda", timeout=180):
        assert code != 0, output
