"""Graph.load: every kind of file, and files that are not what their names say."""

import gzip

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch

from gnnaccel.graph.csr import Graph

SOURCES, DESTINATIONS = np.array([0, 2, 1, 2, 4]), np.array([1, 1, 0, 3, 2])
NODES = 6  # the last has no edges
LINES = "# source, destination, weight\n" + "".join(
    f"{a} {b} 0.5\n" for a, b in zip(SOURCES, DESTINATIONS, strict=True)
)


def matrix():
    return sp.csr_matrix((np.ones(5), (DESTINATIONS, SOURCES)), shape=(NODES, NODES))


def gzipped(path, text):
    with gzip.open(path, "wt") as file:
        file.write(text)


FILES = {
    "pairs.npz": lambda p: np.savez(p, edge_index=np.stack([SOURCES, DESTINATIONS]), num_nodes=NODES, y=np.zeros(6)),
    "features.npz": lambda p: np.savez(p, edge_index=np.stack([SOURCES, DESTINATIONS]), x=np.zeros((NODES, 2))),
    "tcgnn.npz": lambda p: np.savez(p, src_li=SOURCES, dst_li=DESTINATIONS, num_nodes=NODES),
    "scipy.npz": lambda p: sp.save_npz(p, matrix()),
    "matrix.mtx": lambda p: scipy.io.mmwrite(p, matrix()),
    "list.txt": lambda p: p.write_text(LINES),
    "list.csv": lambda p: p.write_text(LINES.replace(" ", ",")),
    "list.tsv.gz": lambda p: gzipped(p, LINES.replace(" ", "\t")),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format(name, tmp_path):
    path = tmp_path / name
    FILES[name](path)
    graph = Graph.load(path if "list" in name else str(path))
    nodes = 5 if "list" in name else NODES  # a list names no node without edges
    want = Graph.from_coo(DESTINATIONS, SOURCES, num_rows=nodes, num_cols=nodes)
    assert (graph.num_rows, graph.num_cols) == (nodes, nodes)
    assert torch.equal(graph.indptr, want.indptr)
    for row in range(nodes):
        ends = slice(int(want.indptr[row]), int(want.indptr[row + 1]))
        assert sorted(graph.indices[ends].tolist()) == sorted(want.indices[ends].tolist())


@pytest.mark.parametrize(
    "name,make,words",
    [
        ("a.npz", lambda p: p.write_text("nothing"), "a.npz"),
        ("a.npz", lambda p: np.savez(p, x=np.zeros(3)), "expected arrays named edge_index; src_li and dst_li"),
        ("a.npz", lambda p: np.savez(p, edge_index=np.zeros((3, 2), int)), r"edge_index: expected shape \[2, E\]"),
        ("a.npz", lambda p: np.savez(p, edge_index=np.zeros((2, 3))), "expected integers"),
        ("a.npz", lambda p: np.savez(p, edge_index=np.full((2, 1), 7), num_nodes=3), "expected values in"),
        ("a.npz", lambda p: np.savez(p, edge_index=np.full((2, 1), 7), x=np.zeros((3, 2))), "expected values in"),
        ("a.npz", lambda p: sp.save_npz(p, matrix().tocsc()), "expected csr"),
        ("a.mtx", lambda p: p.write_text("nothing"), "a.mtx"),
        ("a.txt", lambda p: p.write_text("0 one\n"), "a.txt"),
        ("a.txt", lambda p: p.write_text("0 -1\n"), "expected values in"),
        ("a.txt", lambda p: p.write_text("src dst\n0 1\n"), "a line that is no edge begins with # or %"),
        ("a.txt", lambda p: p.write_text("# nothing\n\n"), "a.txt: no edges in it"),
        ("a.txt", lambda p: p.write_text("0 1\n1 99999999999999\n"), "no memory for 100,000,000,000,000 nodes"),
        ("a.mtx", lambda p: scipy.io.mmwrite(p, np.ones((3, 3))), "a dense matrix"),
        ("a.npz", lambda p: np.savez(p, indptr=[0, 1], indices=[0]), "indptr and indices and shape"),
        ("a.edges.gz", lambda p: p.write_bytes(b"not gzip"), "a.edges.gz"),
        ("a.parquet", lambda p: p.write_text(""), "expected a name that ends in .npz, .mtx"),
    ],
)
def test_wrong_files(name, make, words, tmp_path):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=words):
        Graph.load(tmp_path / name)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        Graph.load(tmp_path / "a.npz")


@pytest.mark.parametrize("form", ["general", "symmetric", "skew-symmetric"])
@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz"])
def test_matrix_market_as_scipy_reads_it(form, name, tmp_path):
    """With comments, entries that are there twice, values of any kind and empty lines at the end."""
    text = f"%%MatrixMarket matrix coordinate real {form}\n% by hand\n4 4 4\n3 1 -1e9\n2 1 0\n3 1 2.5\n4 2 1\n\n"
    if name.endswith("gz"):
        gzipped(tmp_path / name, text)
    else:
        (tmp_path / name).write_text(text)
    want, graph = scipy.io.mmread(tmp_path / name).tocsr(), Graph.load(tmp_path / name)
    assert (graph.num_rows, graph.num_cols, graph.edge_ids) == (4, 4, None)
    assert graph.indptr.tolist() == want.indptr.tolist() and graph.indices.tolist() == want.indices.tolist()


def test_matrix_market_without_entries(tmp_path):
    (tmp_path / "a.mtx").write_text("%%MatrixMarket matrix coordinate pattern general\n2 3 0\n")
    graph = Graph.load(tmp_path / "a.mtx")
    assert (graph.num_rows, graph.num_cols, graph.nnz) == (2, 3, 0)
