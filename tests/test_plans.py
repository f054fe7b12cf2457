"""Plans as files: what is kept is found again, and what does not fit is told apart. Without a GPU."""

import json
from dataclasses import replace

import pytest
import torch

import gnnaccel
from gnnaccel import schedule
from gnnaccel.graph import hashing, store
from gnnaccel.graph.csr import Graph
from gnnaccel.planning import plans, tune
from gnnaccel.planning.tune import Tuned
from gnnaccel.schedule import worklist
from gnnaccel.schedule.worklist import Arrangement, Kernel, Plan


def graph(shift=0, nnz=500) -> Graph:
    torch.manual_seed(3)
    rows, cols = torch.randint(40, (nnz,)), torch.randint(50, (nnz,))
    return Graph.from_coo(rows, (cols + shift) % 50, num_rows=40, num_cols=50)


TUNED = [
    Tuned(64, 256, Plan(128, Arrangement.HUBS, Kernel.ROWS, 8), False, 1.5, 1.0, 9, True),
    Tuned(256, 1024, Plan(64, Arrangement.LENGTH, Kernel.BALANCED, 32), True, 1.0, 1.0, 4, False),
    Tuned(32, 128, Plan(16, Arrangement.CLUSTERS, Kernel.GROUPS, 4, 512), False, 1.0, 0.5, 9, True),
]


@pytest.mark.parametrize("arrangement", Arrangement)
@pytest.mark.parametrize("kernel", Kernel)
@pytest.mark.parametrize("lanes", [0, 4, 32])
def test_codes(arrangement, kernel, lanes):
    groups = kernel is Kernel.GROUPS
    lanes = lanes or 8 if groups else lanes
    plan = Plan(64, arrangement, kernel, lanes, 512 if groups else 0)
    want = (arrangement is not Arrangement.LENGTH, kernel, lanes, 512 // lanes if groups else 0)
    assert worklist.decode(plan.code) == (*want, 0)
    made = worklist.WorkList(*[torch.empty(0)] * 3, plan, longest=2**31 - 1)
    assert worklist.decode(made.code) == (*want, 2**31 - 1)


def test_what_is_saved_is_found(tmp_path):
    folder = tmp_path / "deep" / "er"
    path = plans.save(graph(), TUNED, folder)
    assert plans.load(graph(), folder) == TUNED
    assert list(folder.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644
    other = replace(TUNED[0], best_ms=0.5)
    plans.save(graph(), [other], folder)
    assert plans.load(graph(), folder) == [*TUNED[1:], other]


@pytest.mark.parametrize("other", [graph(1), graph(nnz=499), graph().transposed])
def test_other_graphs_have_other_files(tmp_path, other):
    plans.save(graph(), TUNED, tmp_path)
    with pytest.raises(FileNotFoundError):
        plans.load(other, tmp_path)


def test_fingerprints_see_order_and_every_entry():
    one = graph()
    seen = {hashing.fingerprint(one)}
    for place in (0, 250, 499):
        indices = one.indices.clone()
        indices[place] = (indices[place] + 1) % 50
        seen.add(hashing.fingerprint(Graph(one.indptr, indices, None, 50)))
    seen.add(hashing.fingerprint(Graph(one.indptr, one.indices.flip(0), None, 50)))
    assert len(seen) == 5
    assert hashing.fingerprint(Graph(one.indptr.long(), one.indices.long(), None, 50)) == hashing.fingerprint(one)


def sign(content):
    return plans._signed(content)


def with_plan(plan):
    return lambda text, content: sign(content | {"plans": [content["plans"][0] | {"plan": plan}]})


def with_field(name, value):
    return lambda text, content: sign(content | {"plans": [content["plans"][0] | {name: value}]})


DAMAGES = {
    "cut short": (lambda text, content: text[: len(text) // 2], "not a file of plans"),
    "no JSON": (lambda text, content: "\x00\xff", "not a file of plans"),
    "another kind of JSON": (lambda text, content: "[1, 2]", "not a file of plans"),
    "one digit": (lambda text, content: text.replace("128", "129"), "checksum"),
    "version": (lambda text, content: sign(content | {"gnnaccel": "0.0.1"}), "gnnaccel is '0.0.1'"),
    "GPU": (lambda text, content: sign(content | {"device": "NVIDIA A100"}), "device is"),
    "format": (lambda text, content: sign(content | {"format": 0}), "format is 0"),
    "order": (lambda text, content: sign(content | {"order": "rcm"}), "order is 'rcm'"),
    "true for 1": (lambda text, content: sign(content | {"format": True}), "format is True"),
    "nested": (lambda text, content: "[" * 200_000, "RecursionError"),
    "endless cap": (with_plan([float("inf"), "HUBS", "ROWS", 8, 0]), "cap is inf"),
    "true for a cap": (with_plan([True, "HUBS", "ROWS", 8, 0]), "cap is True"),
    "no tuple": (with_plan(7), "not a file of plans"),
    "features of another kind": (with_field("num_feats", [64]), "num_feats is"),
    "bytes of other features": (with_field("row_bytes", 260), "no such features"),
    "no time": (with_field("best_ms", 0.0), "no such times"),
    "a word for a truth": (with_field("tiled", "no"), "tiled is 'no'"),
    "no plans": (lambda text, content: sign({k: v for k, v in content.items() if k != "plans"}), "not a file of plans"),
    "cap": (with_plan([0, "HUBS", "ROWS", 8, 0]), "no such"),
    "name": (with_plan([64, "X", "ROWS", 8, 0]), "'X'"),
    "lanes": (with_plan([64, "HUBS", "ROWS", 7, 0]), "no such"),
    "threads of rows": (with_plan([64, "HUBS", "ROWS", 8, 256]), "no such"),
    "groups without threads": (with_plan([64, "HUBS", "GROUPS", 8, 0]), "no such"),
    "groups without lanes": (with_plan([64, "HUBS", "GROUPS", 0, 256]), "no such"),
    "too many threads": (with_plan([64, "HUBS", "GROUPS", 8, 1024]), "no such"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_does_not_fit_is_told_apart(tmp_path, name):
    damage, reason = DAMAGES[name]
    path = plans.save(graph(), TUNED, tmp_path)
    text = path.read_text()
    path.write_text(damage(text, json.loads(text)["content"]))
    with pytest.raises(store.Stale, match=reason):
        plans.load(graph(), tmp_path)
    plans.save(graph(), TUNED, tmp_path)
    assert plans.load(graph(), tmp_path) == TUNED


def test_what_cannot_be_read_is_of_no_use(tmp_path):
    plans.path_of(graph(), tmp_path).mkdir()
    with pytest.raises(store.Stale, match="IsADirectoryError"):
        plans.load(graph(), tmp_path)


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_measured_once_for_both_directions(symmetric, monkeypatch):
    torch.manual_seed(0)
    rows, cols = torch.randint(30, (2, 200))
    both = (torch.cat([rows, cols]), torch.cat([cols, rows])) if symmetric else (rows, cols)
    one = Graph.from_coo(*both, num_rows=30, num_cols=30)
    found, measured = replace(TUNED[0], tiled=False), []
    monkeypatch.setattr(tune, "measure", lambda graph, width, **options: measured.append(graph) or found)
    tuned, source = plans.obtain([one, one.transposed], (64,), None, by_tiles=True, budget_ms=1.0)
    assert tuned == [found] and source == "measured"
    assert [g is one for g in measured] == ([True] if symmetric else [True, False])
    if symmetric:
        assert schedule.of(one.transposed).plan(one.transposed, 256) == found.plan


def test_no_folder_to_write_to(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("mine")
    with pytest.raises(OSError):
        plans.save(graph(), TUNED, taken)
    assert taken.read_text() == "mine"


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(tune="best"), "tune: expected one of heuristic, measure, off, got 'best'"),
        (dict(tune="measure"), "tune: expected a graph on CUDA"),
        (dict(keep=True), "keep: on disk are orders and measured plans"),
        (dict(keep="folder", tune="measure"), "tune: expected a graph on CUDA"),
        (dict(reorder="rabbit"), "reorder: expected True, False or one of communities, rcm, degree, got 'rabbit'"),
        (dict(reorder=True, tune="off"), "reorder: an order is of work lists"),
        (dict(num_feats=()), "num_feats: expected numbers"),
        (dict(num_feats=(16, 0)), "num_feats: expected numbers"),
        (dict(num_feats=("16",)), "num_feats: expected numbers"),
        (dict(num_feats=16), "num_feats: expected numbers"),
        (dict(keep=""), "keep: expected True, False or a folder, got ''"),
        (dict(keep=None), "keep: expected True, False or a folder, got None"),
    ],
)
def test_prepare_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        gnnaccel.prepare(graph(), **options)


def test_the_old_name_of_heuristic_is_taken_and_said():
    edges = torch.tensor([[0, 1, 1], [1, 0, 2]])
    with pytest.warns(FutureWarning, match='tune="model" is "heuristic" now') as said:
        done = gnnaccel.prepare(edges, tune="model")
    assert done.steps == gnnaccel.prepare(edges, tune="heuristic").steps and said[0].filename == __file__


GRAPH = gnnaccel.as_graph(torch.tensor([[0, 1, 1], [1, 0, 2]]))
X = torch.tensor([[1.0], [2.0], [4.0]])


@pytest.mark.parametrize(
    ("old", "new", "call"),
    [
        ("prepare: method=", "kernel=", lambda: gnnaccel.prepare(GRAPH, method="tiled").steps.index("tiles")),
        ("renumber: method=", "ordering=", lambda: gnnaccel.renumber(GRAPH, method="degree")),
        ("spmm: method=", "kernel=", lambda: gnnaccel.ops.spmm(GRAPH, X, method="tiled")),
        ("sddmm: method=", "kernel=", lambda: gnnaccel.ops.sddmm(GRAPH, X, X, method="tiled")),
        ("GCNConv: method=", "kernel=", lambda: {"tiled": 1}[gnnaccel.nn.GCNConv(2, 2, method="tiled").kernel]),
        ("AGNNConv: method=", "kernel=", lambda: {"tiled": 1}[gnnaccel.nn.AGNNConv(method="tiled").kernel]),
        ("Renumbering.pays", "is_profitable", lambda: gnnaccel.renumber(GRAPH, "degree")[1].pays),
    ],
)
def test_old_names_are_taken_and_said(old, new, call):
    with pytest.warns(FutureWarning, match=f"{old} is {new} now") as said:
        call()
    assert said[0].filename == __file__
