"""The loader of gnnaccel/data: the shipped graphs, every way to name a file, and one clear error per broken file."""

import re

import numpy as np
import pytest

from gnnaccel import data

SIZES = {  # nodes, directed edges, features, classes, and nodes to train, validate and test: as gnnaccel/data/README.md
    "cora": (2708, 10556, 1433, 7, 140, 500, 1000),
    "citeseer": (3327, 9104, 3703, 6, 120, 500, 1000),
    "pubmed": (19717, 88648, 500, 3, 60, 500, 1000),
}
MASKS = ("train_mask", "val_mask", "test_mask")


def arrays(**changes):
    """A sound file: four nodes, three edges, dense features. A value of None leaves its key out."""
    sound = dict(
        edge_index=np.array([[0, 1, 2], [1, 2, 3]], np.int32),
        num_nodes=np.array(4),
        x=np.arange(8.0).reshape(4, 2),
        y=np.array([0, 1, 2, -1]),
        train_mask=np.array([True, False, False, False]),
        val_mask=np.array([False, True, False, False]),
        test_mask=np.array([False, False, True, False]),
    )
    return {key: value for key, value in (sound | changes).items() if value is not None}


def csr(**changes):
    """The same with sparse features."""
    features = dict(x_data=np.ones(3), x_indices=[1, 0, 1], x_indptr=[0, 1, 1, 3, 3], x_shape=[4, 2])
    return arrays(x=None, **features | changes)


@pytest.fixture
def save(tmp_path):
    def save(content, name="graph.npz"):
        np.savez(tmp_path / name, **content)
        return tmp_path / name

    return save


@pytest.mark.parametrize("name", data.names())
def test_shipped_graphs_are_as_documented(name):
    graph = data.load(name)
    nodes, edges, features, classes, *split = SIZES[name]
    assert (graph.name, graph.num_nodes, graph.num_classes) == (name, nodes, classes)
    assert (graph.edge_index.shape, graph.edge_index.dtype) == ((2, edges), np.int64)
    assert (graph.x.shape, graph.x.dtype) == ((nodes, features), np.float32)
    assert (graph.y.shape, graph.y.dtype) == ((nodes,), np.int64)
    masks = [getattr(graph, key) for key in MASKS]
    assert [mask.sum() for mask in masks] == split
    assert np.sum(masks, axis=0).max() == 1  # disjoint
    source, destination = graph.edge_index
    assert (source != destination).all()
    forward, reverse = source * nodes + destination, destination * nodes + source
    assert len(np.unique(forward)) == edges and set(forward) == set(reverse)
    assert bool(graph.notes) == (name == "pubmed")


def test_stand_in_features_are_noted_and_always_the_same(save):
    pubmed = data.load("pubmed")
    assert len(pubmed.notes) == 1 and "stand-ins" in pubmed.notes[0]
    assert 0.09 < (pubmed.x != 0).mean() < 0.11
    path = save(arrays(x=None))
    first, second = data.load(path), data.load(path)
    assert first.x.shape == (4, 500) and "stand-ins" in first.notes[0]
    np.testing.assert_array_equal(first.x, second.x)


def test_citeseer_has_unlabelled_nodes_in_no_mask():
    graph = data.load("citeseer")
    unlabelled = graph.y == -1
    assert unlabelled.sum() == 15
    assert not any(getattr(graph, key)[unlabelled].any() for key in MASKS)


def test_a_path_as_text_or_path(save, monkeypatch):
    path = save(arrays())
    monkeypatch.chdir(path.parent)
    for name in (path, str(path), "graph.npz"):
        graph = data.load(name)
        assert (graph.name, graph.num_nodes, graph.num_classes, graph.notes) == ("graph", 4, 3, ())
        assert graph.edge_index.tolist() == [[0, 1, 2], [1, 2, 3]]
        assert graph.x.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert graph.y.tolist() == [0, 1, 2, -1]
        assert graph.train_mask.tolist() == [True, False, False, False]


def test_num_nodes_may_be_absent_and_there_may_be_no_edges(save):
    graph = data.load(save(arrays(num_nodes=None, edge_index=np.zeros((2, 0), np.int64))))
    assert (graph.num_nodes, graph.edge_index.shape) == (4, (2, 0))


def test_sparse_features(save):
    assert data.load(save(csr())).x.tolist() == [[0, 1], [0, 0], [1, 1], [0, 0]]


def test_the_folder_of_the_environment(save, monkeypatch):
    folder = save(arrays(), "mine.npz").parent
    save(arrays(), "cora.npz")
    monkeypatch.setenv(data.DATA, str(folder))
    assert data.find("mine") == folder / "mine.npz"
    assert (data.load("mine").name, data.load("mine").num_nodes) == ("mine", 4)
    assert data.load("cora").num_nodes == 2708  # the package's own come first
    monkeypatch.delenv(data.DATA)
    with pytest.raises(data.UnknownDataset, match=f"mine.*{data.DATA}"):
        data.load("mine")


@pytest.mark.parametrize("name", ["nothing", "nothing.npz", "", "cora.npz", "../cora"])
def test_unknown_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(data.DATA, str(tmp_path))
    with pytest.raises(data.UnknownDataset, match=re.escape(repr(name))):
        data.load(name)


def test_unknown_names_list_what_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv(data.DATA, str(tmp_path))
    with pytest.raises(data.UnknownDataset) as error:
        data.find("nothing")
    assert all(name in str(error.value) for name in (*data.names(), str(tmp_path), "path.npz"))


def test_one_of_several_splits(save):
    masks = {key: np.roll(np.eye(4, 3, dtype=bool), shift, axis=1) for shift, key in enumerate(MASKS)}
    path = save(arrays(**masks))
    for split in range(3):
        graph = data.load(path, split)
        for key in MASKS:
            assert getattr(graph, key).tolist() == masks[key][:, split].tolist()
        assert graph.notes == (f"split {split} of 3",)
    for split in (3, -1):
        with pytest.raises(ValueError, match=f"split: expected 0 to 2, got {split}"):
            data.load(path, split)
    with pytest.raises(ValueError, match="split: expected 0 to 0, got 1"):
        data.load("cora", split=1)


def test_what_a_file_leaves_out_is_drawn(tmp_path):
    def load(**arrays):
        np.savez(tmp_path / "some.npz", **arrays)
        graph = data.load(tmp_path / "some.npz")
        return graph, [set(np.flatnonzero(getattr(graph, key)).tolist()) for key in MASKS]

    edges = np.arange(100).reshape(2, 50)
    graph, (train, val, test) = load(edge_index=edges)
    assert (graph.num_nodes, graph.num_classes, graph.x.shape[0], len(graph.notes)) == (100, 10, 100, 3)
    assert (len(train), len(val), len(test)) == (60, 20, 20) and train | val | test == set(range(100))
    again, masks = load(edge_index=edges)
    assert np.array_equal(again.y, graph.y) and masks == [train, val, test]
    y, given = np.arange(120) % 3 - 1, np.arange(120) == 1
    graph, (train, val, test) = load(edge_index=edges, x=np.ones((120, 3)), y=y, train_mask=given)
    assert (graph.num_nodes, graph.num_classes, graph.x.shape) == (120, 2, (120, 3))
    assert graph.notes == (
        "val_mask, test_mask: not in the file, drawn from the other labelled nodes, from a fixed seed",
    )
    assert train == {1} and {len(val), len(test)} == {39, 40} and train | val | test == set(np.flatnonzero(y >= 0))


ONE = np.array([True, False, False, False])
# What is wrong, the file, what the message must say besides the file's name.
BAD = [
    (
        "all labelled nodes in other masks",
        arrays(train_mask=None, val_mask=ONE, test_mask=~ONE),
        ["no node to train on"],
    ),
    ("no labels, too many nodes", dict(edge_index=np.array([[0], [2**50]])), ["labels [1125899906842625]", "memory"]),
    ("no edges key", arrays(edge_index=None), ["lacks edge_index"]),
    ("edge beyond the nodes", arrays(edge_index=[[0, 4], [1, 2]]), ["edge_index", "0 to 3", "0 to 4"]),
    ("negative edge", arrays(edge_index=[[0, 1], [-1, 2]]), ["edge_index", "0 to 3", "-1 to 2"]),
    ("edges [E, 2]", arrays(edge_index=[[0, 1], [1, 2], [2, 3]]), ["edge_index", "[2, E]", "[3, 2]"]),
    ("one row of edges", arrays(edge_index=[0, 1]), ["edge_index", "[2, E]", "[2]"]),
    ("fractional edges", arrays(edge_index=[[0.5], [1.0]]), ["edge_index", "integers", "float64"]),
    ("huge unsigned edge", arrays(edge_index=np.array([[2**64 - 1], [0]], np.uint64)), ["edge_index", "0 to 3"]),
    ("too few labels", arrays(y=[0, 1, 2]), ["y", "each of 4 nodes", "3"]),
    ("num_nodes too large", arrays(num_nodes=np.array(5)), ["each of 5 nodes", "4"]),
    ("labels [N, 1]", arrays(y=[[0], [1], [2], [0]]), ["y", "one integer label per node", "[4, 1]"]),
    ("fractional labels", arrays(y=[0.0, 1.0, 2.0, 0.0]), ["y", "integer", "float64"]),
    ("unlabelled in train", arrays(y=[-1, 1, 2, 0]), ["y", "-1", "mask"]),
    ("unlabelled in test", arrays(y=[0, 1, -1, 0]), ["y", "-1", "mask"]),
    ("too few features", arrays(x=np.zeros((3, 2))), ["x", "[4, F]", "[3, 2]"]),
    ("features [N]", arrays(x=np.zeros(4)), ["x", "[4, F]", "[4]"]),
    ("text features", arrays(x=np.full((4, 1), "a")), ["x", "numbers", "<U1"]),
    ("mask of integers", arrays(val_mask=[0, 1, 0, 0]), ["val_mask", "bool [4]", "int64"]),
    ("mask too short", arrays(test_mask=ONE[:3]), ["test_mask", "bool [4]", "[3]"]),
    ("mask of three axes", arrays(train_mask=ONE.reshape(4, 1, 1)), ["train_mask", "[4, 1, 1]"]),
    ("nothing to train on", arrays(train_mask=~ONE & ONE), ["train_mask", "no node to train on"]),
    ("sparse without indptr", csr(x_indptr=None), ["lacks x_indptr", "sparse features"]),
    ("sparse column too large", csr(x_indices=[1, 0, 2]), ["x:", "CSR", "[4, 2]"]),
    ("sparse negative column", csr(x_indices=[1, -1, 1]), ["x:", "CSR", "[4, 2]"]),
    ("sparse indptr decreases", csr(x_indptr=[0, 2, 1, 3, 3]), ["x:", "CSR"]),
    ("sparse unsigned indptr decreases", csr(x_indptr=np.array([0, 2, 1, 3, 3], np.uint64)), ["x:", "CSR"]),
    ("sparse indptr too short", csr(x_indptr=[0, 1, 3]), ["x:", "CSR"]),
    ("sparse indptr from 1", csr(x_indptr=[1, 1, 1, 3, 3]), ["x:", "CSR"]),
    ("sparse indptr and data differ", csr(x_indptr=[0, 1, 1, 3, 4]), ["x:", "CSR"]),
    ("sparse data and indices differ", csr(x_data=np.ones(2)), ["x:", "CSR"]),
    ("sparse of too few rows", csr(x_indptr=[0, 1, 1, 3], x_shape=[3, 2]), ["x", "[4, F]", "[3, 2]"]),
    ("sparse without indptr entries", csr(x_indptr=np.zeros(0, int)), ["x:", "CSR"]),
    ("sparse fractional indptr", csr(x_indptr=[0, 0.5, 1, 3, 3]), ["x_indptr: expected", "float64"]),
    ("sparse fractional indices", csr(x_indices=[1.0, 0.0, 1.0]), ["x_indices: expected", "float64"]),
    ("sparse negative shape", csr(x_shape=[4, -2]), ["x:", "CSR"]),
    ("sparse shape of one axis", csr(x_shape=[4]), ["x_shape"]),
    ("sparse text", csr(x_data=["a", "b", "c"]), ["x_data: expected", "<U1"]),
    ("sparse data of two axes", csr(x_data=np.ones((3, 2))), ["x_data: expected", "[3, 2]"]),
    ("num_nodes of text", arrays(num_nodes=np.array("four")), ["num_nodes"]),
    ("num_nodes of two numbers", arrays(num_nodes=[4, 4]), ["num_nodes"]),
    ("num_nodes fractional", arrays(num_nodes=np.array(4.5)), ["num_nodes"]),
]


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_content_is_named(save, content, words):
    path = save(content)
    with pytest.raises(ValueError) as error:
        data.load(path)
    message = str(error.value)
    assert str(path) in message and all(word in message for word in words), message


def test_files_that_are_no_npz(tmp_path, save):
    pickled = save(arrays(y=np.array([0, 1, 2, None], dtype=object)), "pickled.npz")
    good = save(arrays(), "good.npz").read_bytes()
    (tmp_path / "text.npz").write_text("source,destination\n0,1\n")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "short.npz").write_bytes(good[: len(good) // 2])
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    (tmp_path / "damaged.npz").write_bytes(good[:150] + b"\xff" * 40 + good[190:])
    for name in ("pickled", "text", "empty", "short", "array", "damaged"):
        path = pickled.with_stem(name)
        with pytest.raises(ValueError) as error:
            data.load(path)
        assert str(path) in str(error.value)


def test_the_generated_graph_is_the_same_sound_graph_each_time():
    found, again = data.load("generated"), data.load("generated")
    assert (found.num_nodes, found.num_classes, found.x.shape) == (14_000, 10, (14_000, 128))
    assert 450_000 < found.edge_index.shape[1] < 520_000 and "generated" in found.notes[0]
    assert all((getattr(found, key) == getattr(again, key)).all() for key in ("edge_index", "x", "y", *MASKS))
    pairs = found.edge_index[0] * found.num_nodes + found.edge_index[1]
    reverse = found.edge_index[1] * found.num_nodes + found.edge_index[0]
    assert len(np.unique(pairs)) == len(pairs) and set(reverse) == set(pairs)
    assert (found.edge_index[0] != found.edge_index[1]).all() and found.edge_index.min() >= 0
    assert [int(getattr(found, key).sum()) for key in MASKS] == [8400, 2800, 2800]
    assert np.bincount(found.edge_index[1]).max() > 20 * np.bincount(found.edge_index[1]).mean()
    with pytest.raises(ValueError, match="expected 0, got 1"):
        data.load("generated", split=1)
