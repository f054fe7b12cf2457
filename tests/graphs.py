"""A table of small graphs, one for each property that has broken a sparse kernel somewhere."""

from __future__ import annotations

import functools

import numpy as np
import torch

from gnnaccel.graph.csr import Graph


def _random(rng, num_rows, num_cols, nnz):
    return rng.integers(0, num_rows, nnz), rng.integers(0, num_cols, nnz), num_rows, num_cols


def _power_law(rng):
    rows = np.minimum(rng.zipf(1.6, 900) - 1, 119)
    return rows, rng.integers(0, 120, 900), 120, 120


def _one_hub(rng):
    # More edges in one row than any kernel keeps whole, between rows that are ordinary or empty.
    rows = np.concatenate([np.full(20_500, 3), rng.integers(0, 9, 60), [3]])
    return rows, rng.integers(0, 50, rows.size), 12, 50


def _empty_rows(rng):
    return rng.choice([2, 3, 11], 40), rng.integers(0, 15, 40), 17, 15


def _loops(rng):
    rows, cols, *size = _random(rng, 20, 20, 60)
    loops = np.arange(20)
    return np.concatenate([rows, loops]), np.concatenate([cols, loops]), *size


def _duplicates(rng):
    rows, cols, *size = _random(rng, 8, 8, 20)
    return np.tile(rows, 3), np.tile(cols, 3), *size


def _none(rng):
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


# name -> rng -> rows, cols, num_rows, num_cols
_BUILDERS = {
    "empty": lambda rng: (*_none(rng), 0, 0),
    "no_rows": lambda rng: (*_none(rng), 0, 5),
    "no_cols": lambda rng: (*_none(rng), 5, 0),
    "no_edges": lambda rng: (*_none(rng), 4, 6),
    "one_edge": lambda rng: (np.array([0]), np.array([0]), 1, 1),
    "empty_rows": _empty_rows,
    "one_hub": _one_hub,
    "loops": _loops,
    "duplicates": _duplicates,
    "tall": lambda rng: _random(rng, 90, 7, 200),
    "wide": lambda rng: _random(rng, 6, 130, 200),
    "power_law": _power_law,
}

NAMES = tuple(_BUILDERS)
SMALL = tuple(name for name in NAMES if name != "one_hub")
ORDERS = ("csr", "coo")  # edge_ids None, or a permutation


@functools.cache
def make(name: str, index: torch.dtype = torch.int32, order: str = "coo") -> Graph:
    """The graph `name` with indices of dtype `index`; `order` "coo" permutes the edge ids, "csr" has none.

    Built with numpy alone, so that it stands whatever gnnaccel's own conversions do.
    """
    rng = np.random.default_rng(sum(map(ord, name)))
    rows, cols, num_rows, num_cols = _BUILDERS[name](rng)
    by_row = np.argsort(rows, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))])
    arrays = [torch.tensor(a).to(index) for a in (indptr, cols[by_row], by_row)]
    return Graph.from_csr(*arrays[:2], arrays[2] if order == "coo" else None, num_cols=num_cols)
