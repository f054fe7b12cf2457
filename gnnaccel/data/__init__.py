"""Graphs to train on: three that ship with the package, a generated one, and any file of the same schema.

The schema, one ``numpy.savez`` file per graph, without pickled objects:

=================================  ======================================================================
edge_index                         integers [2, E], sources first
num_nodes                          scalar N; absent: as many as `y`, else `x`, else the edges have
x, or x_data x_indices             floats [N, F], dense or as a CSR matrix
x_indptr x_shape
y                                  integers [N]; -1: unlabelled, and in no mask; absent: 10 classes at random
train_mask val_mask test_mask      bool [N], or [N, S] for S splits; absent: of the other labelled nodes, at random
=================================  ======================================================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gnnaccel.data import generated
from gnnaccel.graph import files

DATA = "GNNACCEL_DATA"  # a folder searched for NAME.npz after the package's own
_HERE = Path(__file__).parent
_SHIPPED = {"cora": "cora", "citeseer": "citeseer", "pubmed": "pubmed_nofeat"}
_STAND_IN_FEATURES = 500
_STAND_IN_DENSITY = 0.1
_STAND_IN_CLASSES = 10
_SPARSE = ("x_data", "x_indices", "x_indptr", "x_shape")
_MASKS = {"train_mask": 0.6, "val_mask": 0.2, "test_mask": 0.2}  # and their shares of a split that is drawn
_KEYS = ("edge_index", "num_nodes", "x", *_SPARSE, "y", *_MASKS)


class UnknownDataset(ValueError):
    """No shipped graph, file or file in the `GNNACCEL_DATA` folder has this name."""


@dataclass(frozen=True)
class Dataset:
    """A graph with features and labels, for node classification. All arrays are NumPy's.

    edge_index int64 [2, E]: sources, destinations. x float32 [N, F]. y int64 [N], -1 where unlabelled.
    train_mask, val_mask, test_mask bool [N]. notes: what a reader of results on it must know.
    """

    name: str
    num_nodes: int
    num_classes: int
    edge_index: np.ndarray
    x: np.ndarray
    y: np.ndarray
    train_mask: np.ndarray
    val_mask: np.ndarray
    test_mask: np.ndarray
    notes: tuple[str, ...] = ()


def names() -> tuple[str, ...]:
    """Names of the graphs that ship with the package."""
    return tuple(_SHIPPED)


def find(name: str | os.PathLike) -> Path:
    """The file of a graph.

    Parameters
    ----------
    name : str or path
        A shipped name (`names`), a path that ends in .npz, or NAME of a NAME.npz in the folder $GNNACCEL_DATA.

    Raises
    ------
    UnknownDataset
        If there is none; the message lists what there is.
    """
    text = os.fspath(name)
    if text in _SHIPPED:
        return _HERE / f"{_SHIPPED[text]}.npz"
    if text.endswith(".npz"):
        if os.path.isfile(text):
            return Path(text)
        raise UnknownDataset(f"data: no file {text!r}")
    folder = os.environ.get(DATA)
    if folder and (Path(folder) / f"{text}.npz").is_file():
        return Path(folder) / f"{text}.npz"
    here = f"the folder {DATA}={folder}" if folder else f"a folder named by {DATA} (not set)"
    raise UnknownDataset(f"data: unknown graph {text!r}: expected {', '.join(names())}, a path.npz, or one in {here}")


def load(name: str | os.PathLike, split: int = 0) -> Dataset:
    """Read a graph.

    Parameters
    ----------
    name : str or path
        As for `find`, or "generated": about half a million edges between 14,000 nodes, made when it is asked for
        (`gnnaccel.data.generated`).
    split : int
        Which of several splits, where the masks are [N, S].

    Returns
    -------
    Dataset

    Raises
    ------
    UnknownDataset
        If there is no such graph.
    ValueError
        If the file is not of the schema, has no node to train on, or indices out of range.

    Notes
    -----
    PubMed's features are not in the package. "pubmed" has the real graph, labels and split with random features of
    the real shape and density, from a fixed seed: fit for timing and for comparing two runs, not for accuracy.

    Examples
    --------
    >>> from gnnaccel import data
    >>> data.load("cora").x.shape
    (2708, 1433)
    """
    if name == generated.NAME:
        if split:
            raise ValueError(f"split: expected 0, got {split}: the generated graph has one")
        note = "the graph, its features and its labels are generated, from a fixed seed"
        arrays = generated.arrays()
        return Dataset(generated.NAME, generated.NUM_NODES, generated.NUM_CLASSES, notes=(note,), **arrays)
    path = find(name)
    with files.reading("data", path):
        return _dataset(Path(path).stem if os.fspath(name).endswith(".npz") else os.fspath(name), path, split)


def _dataset(name: str, path: Path, split: int) -> Dataset:
    arrays = files.arrays(path, _KEYS)
    if "edge_index" not in arrays:
        raise ValueError("lacks edge_index")
    notes: list[str] = []
    num_nodes = _num_nodes(arrays)
    y = _labels(arrays, num_nodes, notes)
    x = _features(arrays, num_nodes, notes)
    masks = _masks(arrays, y, split, notes)
    if not masks["train_mask"].any():
        raise ValueError("train_mask: no node to train on")
    labelled = np.logical_or.reduce(list(masks.values()))
    if (y[labelled] < 0).any():
        raise ValueError("y: unlabelled nodes (-1) in a mask")
    return Dataset(
        name=name,
        num_nodes=num_nodes,
        num_classes=int(y.max()) + 1,
        edge_index=_checked_edges(arrays["edge_index"], num_nodes),
        x=x,
        y=y.astype(np.int64),
        notes=tuple(notes),
        **masks,
    )


def _num_nodes(arrays: dict[str, np.ndarray]) -> int:
    edges = _edges(arrays["edge_index"])
    if "num_nodes" in arrays:
        count = arrays["num_nodes"]
        if count.ndim or count.dtype.kind not in "iu":
            raise ValueError(f"num_nodes: expected one integer, got {count.dtype} {list(count.shape)}")
        return int(count)
    for key in ("y", "x"):
        if key in arrays and arrays[key].ndim:
            return len(arrays[key])
    if "x_shape" in arrays and arrays["x_shape"].size:
        return int(arrays["x_shape"].flat[0])
    return int(edges.max()) + 1 if edges.size else 0


def _labels(arrays: dict[str, np.ndarray], num_nodes: int, notes: list[str]) -> np.ndarray:
    if "y" not in arrays:
        notes.append(f"the labels are stand-ins: {_STAND_IN_CLASSES} classes at random, from a fixed seed")
        files.expect_memory(f"labels [{num_nodes}]", num_nodes, 8)
        return np.random.default_rng(1).integers(_STAND_IN_CLASSES, size=num_nodes)
    y = arrays["y"]
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(f"y: expected one integer label per node, got {y.dtype} {list(y.shape)}")
    if len(y) != num_nodes:
        raise ValueError(f"y: expected a label for each of {num_nodes} nodes, got {len(y)} labels")
    return y


def _masks(arrays: dict[str, np.ndarray], y: np.ndarray, split: int, notes: list[str]) -> dict[str, np.ndarray]:
    masks = {key: _mask(key, arrays[key], len(y), split) for key in _MASKS if key in arrays}
    if "train_mask" in masks and arrays["train_mask"].ndim == 2:
        notes.append(f"split {split} of {arrays['train_mask'].shape[1]}")
    drawn = [key for key in _MASKS if key not in masks]
    if drawn:
        taken = np.any([y < 0, *masks.values()], axis=0)
        free = np.random.default_rng(0).permutation(np.flatnonzero(~taken))
        ends = np.cumsum([_MASKS[key] for key in drawn])
        for key, nodes in zip(drawn, np.split(free, (len(free) * ends[:-1] / ends[-1]).astype(int)), strict=True):
            masks[key] = np.zeros(len(y), bool)
            masks[key][nodes] = True
        notes.append(f"{', '.join(drawn)}: not in the file, drawn from the other labelled nodes, from a fixed seed")
    return masks


def _edges(edge_index: np.ndarray) -> np.ndarray:
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype.kind not in "iu":
        got = f"{edge_index.dtype} {list(edge_index.shape)}"
        raise ValueError(f"edge_index: expected integers [2, E], got {got}")
    return edge_index


def _checked_edges(edge_index: np.ndarray, num_nodes: int) -> np.ndarray:
    if edge_index.size and not 0 <= edge_index.min() <= edge_index.max() < num_nodes:
        got = f"{edge_index.min()} to {edge_index.max()}"
        raise ValueError(f"edge_index: expected nodes 0 to {num_nodes - 1}, got {got}")
    return np.ascontiguousarray(edge_index, dtype=np.int64)


def _features(arrays: dict[str, np.ndarray], num_nodes: int, notes: list[str]) -> np.ndarray:
    if "x" in arrays:
        x = arrays["x"]
    elif "x_data" in arrays:
        x = _dense(arrays)
    else:
        notes.append(
            f"the features are stand-ins: {_STAND_IN_FEATURES} random ones per node, from a fixed seed; accuracy means "
            "nothing on them"
        )
        random = np.random.default_rng(0)
        shape = (num_nodes, _STAND_IN_FEATURES)
        files.expect_memory(f"features {list(shape)}", num_nodes * _STAND_IN_FEATURES, 8)
        return (random.random(shape, np.float32) * (random.random(shape, np.float32) < _STAND_IN_DENSITY)).astype("f4")
    if x.ndim != 2 or len(x) != num_nodes or x.dtype.kind not in "fiub":
        raise ValueError(f"x: expected numbers [{num_nodes}, F], got {x.dtype} {list(x.shape)}")
    return np.ascontiguousarray(x, dtype=np.float32)


def _dense(arrays: dict[str, np.ndarray]) -> np.ndarray:
    missing = [key for key in _SPARSE if key not in arrays]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)} of the sparse features")
    for key in _SPARSE:
        array, kinds = arrays[key], "fiub" if key == "x_data" else "iu"
        if array.ndim != 1 or array.dtype.kind not in kinds or (key == "x_shape" and len(array) != 2):
            expected = {"x_data": "numbers [nnz]", "x_shape": "two integers"}.get(key, "integers on one axis")
            got = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"{key}: expected {expected}, got {got}")
    data, indices = arrays["x_data"], arrays["x_indices"]
    indptr = arrays["x_indptr"].astype(np.int64)  # differences of unsigned numbers would wrap
    rows, cols = (int(n) for n in arrays["x_shape"])
    counts = np.diff(indptr)
    sound = len(indptr) == rows + 1 and len(data) == len(indices) == indptr[-1] and indptr[0] == 0
    if not sound or (counts < 0).any() or (len(indices) and not 0 <= indices.min() <= indices.max() < cols):
        raise ValueError(f"x: the sparse features are no CSR matrix of shape {[rows, cols]}")
    files.expect_memory(f"features {[rows, cols]}", rows * cols, 4)
    x = np.zeros((rows, cols), np.float32)
    x[np.repeat(np.arange(rows), counts), indices] = data
    return x


def _mask(key: str, mask: np.ndarray, num_nodes: int, split: int) -> np.ndarray:
    if mask.dtype != bool or mask.ndim not in (1, 2) or len(mask) != num_nodes:
        got = f"{mask.dtype} {list(mask.shape)}"
        raise ValueError(f"{key}: expected bool [{num_nodes}] or [{num_nodes}, splits], got {got}")
    splits = mask.shape[1] if mask.ndim == 2 else 1
    if not 0 <= split < splits:
        raise ValueError(f"split: expected 0 to {splits - 1}, got {split}")
    return np.ascontiguousarray(mask[:, split] if mask.ndim == 2 else mask)
