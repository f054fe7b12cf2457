"""Graphs from files: NumPy archives, Matrix Market files, and lists of edges."""

from __future__ import annotations

import gzip
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gnnaccel.graph import files

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

_LISTS = (".txt", ".tsv", ".csv", ".edges", ".el")
_ENDS = (("edge_index",), ("src_li", "dst_li"), ("indptr", "indices", "shape"))  # what archives name their edges
_ENTRY = 4  # bytes of a Matrix Market file that an entry takes at least: two digits and what ends them


def load(path: str | os.PathLike) -> Graph:
    """The graph in a file; see `Graph.load`."""
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


def _reader(name: str) -> Callable[[Path], Graph] | None:
    plain = name.removesuffix(".gz")
    if name.endswith(".npz"):
        return _archive
    if plain.endswith(".mtx"):
        return _matrix_market
    return _edge_list if plain.endswith(_LISTS) else None


def _archive(path: Path) -> Graph:
    names = files.array_names(path)
    group = next((group for group in _ENDS if names.issuperset(group)), None)
    if group is None:
        wanted = "; ".join(" and ".join(group) for group in _ENDS)
        raise ValueError(f"expected arrays named {wanted}, got {', '.join(sorted(names)) or 'none'}")
    found = files.arrays(path, {*group, "num_nodes", "format"})
    if "indptr" in group:
        return _of_scipy(found)
    nodes = _integers("num_nodes", found["num_nodes"], 1)[0] if "num_nodes" in found else None
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


def _of_scipy(found: dict[str, np.ndarray]) -> Graph:
    from gnnaccel.graph.structure import Graph

    form = found["format"].tolist() if "format" in found else "csr"
    if form not in (b"csr", "csr"):
        raise ValueError(f"a sparse matrix as {form!r}, expected csr")
    rows, cols = _integers("shape", found["shape"], 2)
    if found["indptr"].size != rows + 1:
        raise ValueError(f"indptr: expected {rows + 1} entries for {rows} rows, got {found['indptr'].size}")
    _expect_room(cols)
    return Graph.from_csr(found["indptr"], found["indices"], num_cols=cols, copy=False)


def _expect_room(nodes: int) -> None:
    asked = f"{nodes:,} nodes, which the largest number or the number of nodes in it asks for"
    files.expect_memory(asked, nodes, 8 if nodes >= 2**31 else 4)


def _of_pairs(sources, destinations, nodes: int | None) -> Graph:
    from gnnaccel.graph.structure import Graph

    ends = [np.asarray(end) for end in (sources, destinations)]
    if any(end.dtype.kind not in "iu" for end in ends):
        raise ValueError(f"ends of edges: expected integers, got {', '.join(str(end.dtype) for end in ends)}")
    if nodes is None:
        nodes = 1 + max((int(end.max()) for end in ends if end.size), default=-1)
    _expect_room(nodes)
    sources, destinations = (end.astype(np.int64) for end in ends)
    return Graph.from_coo(destinations, sources, num_rows=nodes, num_cols=nodes)


def _matrix_market(path: Path) -> Graph:
    try:
        from scipy.io import mminfo, mmread
    except ImportError as error:
        raise ImportError("Graph.load: Matrix Market files need SciPy; install scipy") from error
    from gnnaccel.graph.structure import Graph

    rows, cols, entries, form, *_ = mminfo(path)
    if form != "coordinate":
        raise ValueError("a dense matrix, expected one in coordinate format")
    size = path.stat().st_size * (files.DEFLATED if path.name.lower().endswith(".gz") else 1)
    if entries * _ENTRY > size:
        raise ValueError(f"declares {entries:,} entries, which it has no room for")
    files.expect_memory(f"{entries:,} entries", entries, 16)
    for nodes in (rows, cols):
        _expect_room(nodes)
    return Graph.from_scipy(mmread(path).tocsr())


def _edge_list(path: Path) -> Graph:
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig") as file, warnings.catch_warnings():
        warnings.filterwarnings("error", "loadtxt: input contained no data")
        lines = (line.replace(",", " ") for line in files.text_lines(file))
        try:
            pairs = np.loadtxt(lines, dtype=np.int64, comments=("#", "%"), usecols=(0, 1), ndmin=2)
        except UserWarning:
            raise ValueError("no edges in it") from None
        except ValueError as error:
            raise ValueError(f"{error}; a line that is no edge begins with # or %") from error
    return _of_pairs(pairs[:, 0], pairs[:, 1], None)
