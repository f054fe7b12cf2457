"""Graphs from files: NumPy archives, Matrix Market files, and lists of edges."""

from __future__ import annotations

import gzip
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from torch import Tensor

from gnnaccel.graph import build, files
from gnnaccel.lower import bounds

Arrays: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, int]"  # what a Graph is made of

_LISTS = (".txt", ".tsv", ".csv", ".edges", ".el")
ENDS = (("edge_index",), ("src_li", "dst_li"), ("indptr", "indices", "shape"))  # what archives name their edges


def load(path: str | os.PathLike) -> Arrays:
    """CSR arrays and num_cols of the graph in a file, checked; see `Graph.load`."""
    where = Path(path)
    if not where.is_file():
        raise FileNotFoundError(f"Graph.load: no file {str(path)!r}")
    name = where.name.lower()
    reader = _reader(name)
    if reader is None:
        known = f".npz, .mtx, {', '.join(_LISTS)} (or these .gz)"
        raise ValueError(f"Graph.load: {path}: expected a name that ends in {known}")
    with files.reading("Graph.load", path):
        return reader(where)


def _reader(name: str) -> Callable[[Path], Arrays] | None:
    plain = name.removesuffix(".gz")
    if name.endswith(".npz"):
        return _archive
    if plain.endswith(".mtx"):
        return _matrix_market
    return _edge_list if plain.endswith(_LISTS) else None


def _archive(path: Path) -> Arrays:
    names = files.array_names(path)
    group = next((group for group in ENDS if names.issuperset(group)), None)
    if group is None:
        wanted = "; ".join(" and ".join(group) for group in ENDS)
        raise ValueError(f"expected arrays named {wanted}, got {', '.join(sorted(names)) or 'none'}")
    found = files.arrays(path, {*group, "num_nodes", "format"})
    if "indptr" in group:
        return _of_scipy(found)
    nodes = _integers("num_nodes", found["num_nodes"], 1)[0] if "num_nodes" in found else None
    if nodes is None and "x" in names:
        nodes = (files.array_shape(path, "x") or (None,))[0]
    if "src_li" in group:
        return _of_pairs(found["src_li"], found["dst_li"], nodes)
    ends = found["edge_index"]
    if ends.ndim != 2 or ends.shape[0] != 2:
        raise ValueError(f"edge_index: expected shape [2, E], got {ends.shape}")
    return _of_pairs(ends[0], ends[1], nodes)


def _integers(name: str, array: np.ndarray, count: int) -> list[int]:
    if array.dtype.kind not in "iu" or array.size != count:
        raise ValueError(f"{name}: expected {count} integers, got {array.dtype} {list(array.shape)}")
    return array.ravel().tolist()


def _of_scipy(found: dict[str, np.ndarray]) -> Arrays:
    form = found["format"].tolist() if "format" in found else "csr"
    if form not in (b"csr", "csr"):
        raise ValueError(f"a sparse matrix as {form!r}, expected csr")
    rows, cols = _integers("shape", found["shape"], 2)
    if found["indptr"].size != rows + 1:
        raise ValueError(f"indptr: expected {rows + 1} entries for {rows} rows, got {found['indptr'].size}")
    _expect_room(cols)
    return build.given_csr(found["indptr"], found["indices"], None, cols, copy=False)


def _expect_room(nodes: int) -> None:
    asked = f"{nodes:,} nodes, which the largest number or the number of nodes in it asks for"
    files.expect_memory(asked, nodes, 8 if nodes > bounds.INT32_MAX else 4)


def _of_pairs(sources, destinations, nodes: int | None) -> Arrays:
    ends = [np.asarray(end) for end in (sources, destinations)]
    if any(end.dtype.kind not in "iu" for end in ends):
        raise ValueError(f"ends of edges: expected integers, got {', '.join(str(end.dtype) for end in ends)}")
    if nodes is None:
        nodes = 1 + max((int(end.max()) for end in ends if end.size), default=-1)
    _expect_room(nodes)
    sources, destinations = (end.astype(np.int64) for end in ends)
    return build.coo_to_csr(destinations, sources, nodes, nodes)


def _matrix_market(path: Path) -> Arrays:
    """Not by SciPy, whose reader crashes on some damaged files (1.17). Repeated entries are one, as in its matrices."""
    with _opened(path) as file:
        lines = files.text_lines(file)
        words = next(lines, "").lower().split()
        if words[:2] != ["%%matrixmarket", "matrix"] or len(words) != 5:
            raise ValueError("expected a first line of %%MatrixMarket matrix coordinate FIELD SYMMETRY")
        if words[2] != "coordinate":
            raise ValueError(f"a dense matrix ({words[2]}), expected one in coordinate format")
        sizes = next((line.split() for line in lines if line.strip() and not line.startswith("%")), [])
        if len(sizes) != 3:
            raise ValueError(f"expected a line of rows, columns and entries, got {' '.join(sizes)!r}")
        rows, cols, entries = map(int, sizes)
        if min(rows, cols, entries) < 0:
            raise ValueError(f"expected a number of rows, columns and entries, got {' '.join(sizes)!r}")
        pairs = _numbers(lines) if entries else np.empty((0, 2), np.int64)
    if len(pairs) != entries:
        raise ValueError(f"expected {entries:,} entries, got {len(pairs):,}")
    for nodes in (rows, cols):
        _expect_room(nodes)
    if entries and (pairs.min() < 1 or (pairs.max(0) > (rows, cols)).any()):
        raise ValueError(f"expected entries within {rows} rows and {cols} columns, counted from 1")
    pairs -= 1
    if words[4] != "general":
        pairs = np.concatenate([pairs, pairs[pairs[:, 0] != pairs[:, 1], ::-1]])
        if rows != cols:
            raise ValueError(f"{words[4]}, but of {rows} rows and {cols} columns")
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    first = np.ones(len(pairs), bool)
    first[1:] = (pairs[1:] != pairs[:-1]).any(1)
    destinations, sources = pairs[first].T
    indptr = np.concatenate([[0], np.cumsum(np.bincount(destinations, minlength=rows))])
    small = max(len(sources), cols) <= bounds.INT32_MAX
    indptr, sources = (array.astype(np.int32 if small else np.int64) for array in (indptr, sources))
    return build.given_csr(indptr, sources, None, cols, copy=False)


def _opened(path: Path) -> IO[str]:
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    return opened(path, "rt", encoding="utf-8-sig")


def _numbers(lines: Iterable[str]) -> np.ndarray:
    """The first two numbers of each line, int64 [lines, 2]."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "loadtxt: input contained no data")
        try:
            return np.loadtxt(lines, dtype=np.int64, comments=("#", "%"), usecols=(0, 1), ndmin=2)
        except UserWarning:
            raise ValueError("no edges in it") from None


def _edge_list(path: Path) -> Arrays:
    with _opened(path) as file:
        lines = (line.replace(",", " ") for line in files.text_lines(file))
        try:
            pairs = _numbers(lines)
        except ValueError as error:
            raise ValueError(f"{error}; a line that is no edge begins with # or %") from error
    return _of_pairs(pairs[:, 0], pairs[:, 1], None)
