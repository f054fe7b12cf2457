"""Graphs cut into parts: what each gets, balance, what is written, and what is refused when it is read."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import arrays, command
from rank_runs import random_graph
from scipy.sparse import random as random_matrix

import gnnaccel
from gnnaccel import data, distributed
from gnnaccel.cli import main
from gnnaccel.graph.network import network_of
from gnnaccel.lower import bounds
from gnnaccel.parts import assign, cut, files


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


@pytest.mark.parametrize("nodes, parts", [(200, 50), (100, 100), (300, 120)])
def test_no_part_is_empty(nodes, parts):
    edges = random_graph(nodes, 6 * nodes)
    label = assign.assign(gnnaccel.as_graph(edges, nodes), parts, "communities", by_nodes=True)
    assert torch.bincount(label, minlength=parts).min() > 0


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
    monkeypatch.setattr(bounds, "PARTS_COUNTED", few)
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


def pairs_of(network, label):
    """Weight of edges between parts, and pairs of a node and another part that has neighbours of it."""
    rows, cols = torch.repeat_interleave(torch.arange(network.num_nodes), network.indptr.diff()), network.cols.long()
    across = label[rows] != label[cols]
    weights = torch.ones(len(cols)) if network.weights is None else network.weights
    return int(weights[across].sum()), len(set(zip(cols[across].tolist(), label[rows[across]].tolist(), strict=True)))


@pytest.mark.parametrize("cols, weights", [("int32", None), ("int32", "int32"), ("int64", "int64"), ("int64", None)])
@pytest.mark.parametrize("parts", [2, 5])
def test_moves_of_single_nodes(cols, weights, parts):
    """They keep to the caps, which parts above them come back to; without one above, no move makes things worse."""
    network, _ = network_of(gnnaccel.as_graph(random_graph(), 60))
    network.cols = network.cols.to(getattr(torch, cols))
    if weights:  # the same both ways
        ends = torch.stack([torch.repeat_interleave(torch.arange(60), network.indptr.diff()), network.cols.long()])
        network.weights = (ends.sum(0) % 5 + 1).to(getattr(torch, weights))
        network.total = float(1 << 40 if weights == "int64" else network.weights.sum())
    size = torch.stack([network.indptr.diff(), torch.ones(60, dtype=torch.int64)])
    caps = (size.sum(1) * 1.15 / parts).ceil().long()
    for label in (torch.zeros(60, dtype=torch.int64), torch.arange(60) % parts, torch.arange(60) * parts // 60):
        for for_rows in (False, True):
            (found,) = assign._swept(network, size, [label], caps, parts, for_rows)
            assert (assign._loads(size, found, parts) <= caps[:, None]).all() and found.min() >= 0
        (kept,) = assign._swept(network, size, [found], caps, parts, False)
        assert pairs_of(network, kept)[0] <= pairs_of(network, found)[0]
        (fewer,) = assign._swept(network, size, [kept], caps, parts, True)
        assert pairs_of(network, fewer)[1] <= pairs_of(network, kept)[1]


def test_parts_grow_into_what_is_connected():
    """Two cliques joined by an edge, begun from either: each is a part."""
    clique = torch.combinations(torch.arange(6)).T
    network, place = network_of(gnnaccel.as_graph(torch.cat([clique, clique + 6, torch.tensor([[0], [6]])], 1), 12))
    for part in assign._grown(network, torch.ones(2, 12, dtype=torch.int64), 2):
        found = part[place.long()]
        assert (found[:6] == found[0]).all() and (found[6:] == 1 - found[0]).all()


@pytest.mark.parametrize(
    "name, parts, metis", [("cora", 2, 279), ("cora", 8, 866), ("citeseer", 4, 187), ("citeseer", 8, 326)]
)
def test_halo_rows_beside_those_of_metis(name, parts, metis):
    """At most 1.15 times as many, with edges within 5% of the mean (benchmarks/results/partitions_epyc.csv)."""
    edges = torch.from_numpy(data.load(name).edge_index)
    graph = gnnaccel.as_graph(edges, int(data.load(name).num_nodes))
    label = assign.assign(graph, parts, "communities")
    across = label[edges[0]] != label[edges[1]]
    assert torch.unique(edges[0][across] * parts + label[edges[1][across]]).numel() <= 1.15 * metis
    count = torch.bincount(label[edges[1]], minlength=parts).double()
    assert count.max() <= 1.05 * count.mean()


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
    words = ("--parts", 2, "--out", "again", "--json", "--method", "range")
    told = command("partition", "small.npz", *words, cwd=tmp_path, fresh=False)
    assert json.loads(told.stdout)["num_edges"] == 160
    for arguments, code, message in (
        (("small.npz", "--parts", 2, "--out", "parts"), 1, "new or empty folder"),
        (("nothing.npz", "--parts", 2, "--out", "other"), 2, "nothing.npz"),
        (("small.npz", "--parts", 99, "--out", "other"), 1, "expected 1 to 40"),
    ):
        done = command("partition", *arguments, cwd=tmp_path, fresh=False)
        assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


def test_command_takes_along_what_a_file_has(tmp_path):
    """Also of a file that is not one to train on: no masks, arrays of edges, one that belongs to neither."""
    whole = arrays()
    kept = {"edge_index": whole["edge_index"], "x": whole["x"], "weight": np.arange(160.0), "mean": np.zeros(3)}
    np.savez(tmp_path / "features.npz", **kept)
    np.savez(tmp_path / "edges.npz", edge_index=whole["edge_index"])
    done = command("partition", "features.npz", "--parts", 2, "--out", "parts", cwd=tmp_path, fresh=False)
    assert "data of nodes: x\ndata of edges: weight" in done.stdout, done.stdout + done.stderr
    assert "left out: mean [3]" in done.stderr
    about, _, _ = files.read_manifest(tmp_path / "parts")
    for rank in range(2):
        table = files.read_part(tmp_path / "parts", rank, about)
        np.testing.assert_array_equal(table[files.NODES]["x"], whole["x"][table[files.GRAPH]["own"]])
        np.testing.assert_array_equal(table[files.EDGES]["weight"], table[files.GRAPH]["edge_ids"])
    done = command("partition", "edges.npz", "--parts", 2, "--out", "bare", cwd=tmp_path, fresh=False)
    assert "data of nodes: none (without x a part has no features" in done.stdout, done.stdout + done.stderr
    del whole["x"]
    np.savez(tmp_path / "labels.npz", **whole)
    done = command("partition", "labels.npz", "--parts", 2, "--out", "stand-ins", cwd=tmp_path, fresh=False)
    assert "the features are stand-ins" in done.stderr


# --- estimates


def test_estimate_counts_what_training_sends(tmp_path):
    """Halo rows are those of the parts that partition() writes; each layer but the first sends them both ways."""
    edges = random_graph(200, 1500)
    rows = distributed.estimate(edges, (1, 2, 5), model="sage", feats=8, hidden=16, classes=3, num_nodes=200)
    assert [row.gpus for row in rows] == [1, 2, 5] and rows[0].exchange_ms == rows[0].mib_sent == 0
    for row in rows[1:]:
        done = distributed.partition(edges, row.gpus, tmp_path / str(row.gpus), num_nodes=200)
        assert row.halo_rows == done.halo_rows
        assert row.mib_sent == pytest.approx(done.halo_rows * 2 * (16 + 3) * 4 / 2**20)
        assert row.epoch_ms == pytest.approx(row.compute_ms + row.exchange_ms) and row.exchange_ms > 0


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_estimate_grows_with_work_and_shrinks_with_means(model):
    edges, options = random_graph(), {"model": model, "num_nodes": 60, "stands_for": (10**8, 10**10)}
    plain = distributed.estimate(edges, (1, 4), **options)
    assert plain[1].compute_ms < plain[0].compute_ms and plain[1].memory_gib < plain[0].memory_gib
    assert plain[1].speedup > 1 and not plain[0].fits
    for change, field in (
        ({"link_gbs": 5.0}, "exchange_ms"),
        ({"latency_us": 1e6}, "exchange_ms"),
        ({"hidden": 512}, "compute_ms"),
        ({"layers": 4}, "memory_gib"),
        ({"feats": 1000}, "memory_gib"),
        ({"stands_for": (10**8, 10**11)}, "epoch_ms"),
        ({"stands_for": (10**9, 10**10)}, "mib_sent"),
    ):
        changed = distributed.estimate(edges, (1, 4), **options | change)
        assert getattr(changed[1], field) > getattr(plain[1], field), change
    assert distributed.estimate(edges, (4,), memory_gib=1e6, **options)[0].fits
    here = distributed.estimate(edges, (1, 2), model=model, num_nodes=60, speed="here")
    assert all(0 < row.epoch_ms < float("inf") for row in here)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": (0, 1)}, "gpus: expected numbers from 1 to 60"),
        ({"gpus": ()}, "gpus: expected numbers from 1 to 60"),
        ({"gpus": (61,)}, "gpus: expected numbers from 1 to 60"),
        ({"hidden": 0}, "hidden: expected an int of at least 1, got 0"),
        ({"model": "gat", "hidden": 30}, "hidden: expected a multiple of 4 heads, got 30"),
        ({"model": "mlp"}, "model: expected one of gcn, sage, gin, gat, got 'mlp'"),
        ({"speed": "a100"}, "speed: expected one of h100, here"),
        ({"method": "halves"}, "method: expected one of communities, metis, range"),
        ({"memory_gib": float("nan")}, "memory_gib: expected a number above 0"),
        ({"link_gbs": -1}, "link_gbs: expected a number above 0, got -1"),
        ({"latency_us": -1}, "latency_us: expected a number of at least 0"),
        ({"stands_for": (0, 5)}, "stands_for: expected nodes and edges of at least 1"),
    ],
)
def test_wrong_arguments_of_estimate(change, message):
    with pytest.raises(ValueError, match=message):
        distributed.estimate(**{"graph_or_data": random_graph(), "num_nodes": 60, "gpus": (1, 2)} | change)


def test_command_estimates(tmp_path):
    np.savez(tmp_path / "small.npz", **arrays())
    words = ("partition", "small.npz", "--estimate", "--gpus")
    told = command(*words, "1,2,4", "--json", cwd=tmp_path, fresh=False)
    found = json.loads(told.stdout)
    assert (found["feats"], found["classes"], found["nodes"]) == (8, 3, 40), told.stderr
    assert [row["gpus"] for row in found["estimates"]] == [1, 2, 4]
    done = command(*words, "1,2", "--memory-gib", "0.1", cwd=tmp_path, fresh=False)
    assert "fits none of these" in done.stdout and "no" in done.stdout, done.stderr
    done = command(*words, "8", "--nodes", "100000000", "--edges", "1000000000", cwd=tmp_path, fresh=False)
    assert "small.npz: 100,000,000 nodes, 1,000,000,000 edges" in done.stdout and done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.npz"], "nothing is written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "2"], "--out: missing (or --estimate"),
        (["--out", "x"], "--parts: missing (or --estimate"),
        (["--out", "x", "--parts", "2", "--gpus", "2"], "--gpus: applies to --estimate alone"),
        (["--estimate", "--parts", "2"], "--parts: writes parts, which --estimate does not"),
        (["--estimate", "--gpus", "2,x"], "--gpus: expected numbers from 1 between commas"),
        (["--estimate", "--nodes", "5"], "--nodes and --edges: expected both or neither"),
    ],
)
def test_options_that_do_not_go_together(arguments, message, capsys):
    assert main(["partition", "cora", *arguments]) == 2
    assert message in "".join(capsys.readouterr())


# --- files


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
