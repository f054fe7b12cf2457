"""Reads a graph for node classification from an .npz file.

The file holds NumPy arrays: edge_index [2, E], sources first; features x [N, F], or the parts of a CSR matrix x_data,
x_indices, x_indptr and x_shape; labels y [N]; train_mask, val_mask and test_mask, [N] or [N, splits].
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def find(name):
    """The file of a graph: `name` itself, or NAME.npz in the folder `data` of a package in this repository."""
    if name.endswith(".npz"):
        if not Path(name).is_file():
            raise SystemExit(f"no file {name}")
        return Path(name)
    found = sorted(ROOT.glob(f"*/data/{name}.npz"))
    if not found:
        raise SystemExit(f"no graph {name!r} here: give cora, citeseer or a path.npz")
    return found[0]


def load(name, split=0):
    """edge_index, x (each row divided by its sum, as is usual for bags of words), y, num_classes and the masks.

    split: which one of masks [N, splits]; None: the masks as they are in the file.
    """
    path = find(name)
    with np.load(path) as file:
        arrays = dict(file)
    if "x" in arrays:
        x = arrays["x"].astype(np.float32)
    elif "x_data" in arrays:
        x = np.zeros(arrays["x_shape"], np.float32)
        rows = np.repeat(np.arange(len(x)), np.diff(arrays["x_indptr"]))
        x[rows, arrays["x_indices"]] = arrays["x_data"]
    else:
        raise SystemExit(f"{path} has no node features")
    total = x.sum(axis=1, keepdims=True)
    masks = {key: arrays[key] for key in ("train_mask", "val_mask", "test_mask")}
    return SimpleNamespace(
        edge_index=arrays["edge_index"].astype(np.int64),
        x=x / np.where(total == 0, 1, total),
        y=arrays["y"].astype(np.int64),
        num_classes=int(arrays["y"].max()) + 1,
        **{key: mask if mask.ndim == 1 or split is None else mask[:, split] for key, mask in masks.items()},
    )
