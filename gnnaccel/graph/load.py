"""Graphs from files: NumPy archives, Matrix Market files, and lists of edges."""

from __future__ import annotations

import gzip
import os
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

_LISTS = (".txt", ".tsv", ".csv", ".edges", ".el")
_ENDS = (("edge_index",), ("src_li", "dst_li"), ("indptr", "indices", "shape"))  # what archives name their edges


def load(path: str | os.PathLike) -> Graph:
    """The graph in a file; see `Graph.load`."""
    where = Path(path)
    if not where.is_file():
        raise FileNotFoundError(f"Graph.load: no file {str(path)!r}")
    name = where.name.lower()
    plain = name.removesuffix(".gz")
    try:
        if name.endswith(".npz"):
            return _archive(where)
        if plain.endswith(".mtx"):
            return _matrix_market(where)
        if plain.endswith(_LISTS):
            return _edge_list(where)
    except (ValueError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"Graph.load: {path}: {error}") from error
    raise ValueError(f"Graph.load: {path}: expected a name that ends in .npz, .mtx, {', '.join(_LISTS)} (or these .gz)")


def _archive(path: Path) -> Graph:
    from gnnaccel.graph.structure import Graph

    with np.load(path, allow_pickle=False) as arrays:
        names = set(arrays.files)
        if "edge_index" in names:
            ends = np.asarray(arrays["edge_index"])
            if ends.ndim != 2 or ends.shape[0] != 2:
                raise ValueError(f"edge_index: expected shape [2, E], got {ends.shape}")
            sources, destinations = ends
        elif {"src_li", "dst_li"} <= names:
            sources, destinations = arrays["src_li"], arrays["dst_li"]
        elif {"indptr", "indices", "shape"} <= names:
            if "format" in names and arrays["format"].item() not in (b"csr", "csr"):
                raise ValueError(f"a sparse matrix as {arrays['format'].item()!r}, expected csr")
            return Graph.from_csr(arrays["indptr"], arrays["indices"], num_cols=int(arrays["shape"][1]))
        else:
            wanted = "; ".join(" and ".join(group) for group in _ENDS)
            raise ValueError(f"expected arrays named {wanted}, got {', '.join(sorted(names)) or 'none'}")
        nodes = int(arrays["num_nodes"]) if "num_nodes" in names else None
    return _of_pairs(sources, destinations, nodes)


def _of_pairs(sources, destinations, nodes: int | None) -> Graph:
    from gnnaccel.graph.structure import Graph

    ends = [np.asarray(end) for end in (sources, destinations)]
    if any(end.dtype.kind not in "iu" for end in ends):
        raise ValueError(f"ends of edges: expected integers, got {', '.join(str(end.dtype) for end in ends)}")
    if nodes is None:
        nodes = 1 + max((int(end.max()) for end in ends if end.size), default=-1)
    sources, destinations = (end.astype(np.int64) for end in ends)
    try:
        return Graph.from_coo(destinations, sources, num_rows=nodes, num_cols=nodes)
    except RuntimeError as error:
        if "allocate" not in str(error):  # torch has no type for no memory on the CPU
            raise
        raise ValueError(f"no memory for {nodes:,} nodes, which the largest number or num_nodes asks for") from error


def _matrix_market(path: Path) -> Graph:
    try:
        from scipy.io import mmread
    except ImportError as error:
        raise ImportError("Graph.load: Matrix Market files need SciPy; install scipy") from error
    from gnnaccel.graph.structure import Graph

    matrix = mmread(path)
    if isinstance(matrix, np.ndarray):
        raise ValueError("a dense matrix, expected one in coordinate format")
    return Graph.from_scipy(matrix.tocsr())


def _edge_list(path: Path) -> Graph:
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig") as file, warnings.catch_warnings():
        warnings.filterwarnings("error", "loadtxt: input contained no data")
        lines = (line.replace(",", " ") for line in file)
        try:
            pairs = np.loadtxt(lines, dtype=np.int64, comments=("#", "%"), usecols=(0, 1), ndmin=2)
        except UserWarning:
            raise ValueError("no edges in it") from None
        except ValueError as error:
            raise ValueError(f"{error}; a line that is no edge begins with # or %") from error
    return _of_pairs(pairs[:, 0], pairs[:, 1], None)
