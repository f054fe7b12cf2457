"""The 25 graphs of grid.py: stand-ins of graphs.py, real ones as files, and four kinds that neither has.

Each of the four is the same on every run of one NumPy version. `recommendation-like`: users and items, hubs on both
sides. `mesh-like`: triangles between the points of a square, numbered at random. `road-like`: a square of streets of
which a third is missing, row by row. `knowledge-like`: directed, with parallel edges and targets of very unequal
degrees.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import graphs
import numpy as np
import torch

from gnnaccel.graph.csr import Graph

REAL = ("cora", "citeseer", "pubmed_nofeat", "proteins", "coauthor_cs", "amazon_photo", "fb15k237", "email_enron",
        "amazon_computers", "tolokers", "dd", "gowalla_rec")  # fmt: skip
MADE = ("pubmed-like", "artist-like", "blogcatalog-like", "arxiv-like", "yeast-like", "amazon0505-like",
        "proteins-like", "reddit-like", "products-like")  # fmt: skip
DATA = Path(__file__).resolve().parent.parent / "shared" / "data"


def _skewed(rng: np.random.Generator, count: int, n: int, power: float) -> np.ndarray:
    """`count` of the numbers below n, in no order, some of them much more often than others."""
    places = (n * rng.random(count) ** power).astype(np.int64)
    return rng.permutation(n)[np.minimum(places, n - 1)]


def _recommendations(rng: np.random.Generator, scale: float) -> tuple[np.ndarray, int]:
    users, items, ratings = (max(40, int(scale * n)) for n in (120_000, 40_000, 2_500_000))
    pairs = np.unique(_skewed(rng, ratings, users, 2.0) * items + _skewed(rng, ratings, items, 2.5))
    user, item = pairs // items, users + pairs % items
    return np.stack([np.concatenate([user, item]), np.concatenate([item, user])]), users + items


def _neighbours(side: int, steps: tuple[tuple[int, int], ...], kept: Callable[[int], np.ndarray]) -> np.ndarray:
    """Edges, both ways, from each point of a square to those these steps away, or as many of them as are kept."""
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    ends = []
    for dx, dy in steps:
        inside = (x + dx < side) & (y + dy < side) & (y + dy >= 0)
        first, second = (x * side + y)[inside], ((x + dx) * side + y + dy)[inside]
        chosen = kept(first.size)
        ends += [(first[chosen], second[chosen]), (second[chosen], first[chosen])]
    return np.stack([np.concatenate(each) for each in zip(*ends, strict=True)])


def _mesh(rng: np.random.Generator, scale: float) -> tuple[np.ndarray, int]:
    side = max(8, int(700 * scale**0.5))
    ends = _neighbours(side, ((0, 1), (1, 0), (1, 1)), lambda n: np.ones(n, dtype=bool))
    return rng.permutation(side * side)[ends], side * side


def _roads(rng: np.random.Generator, scale: float) -> tuple[np.ndarray, int]:
    side = max(8, int(1000 * scale**0.5))
    return _neighbours(side, ((0, 1), (1, 0)), lambda n: rng.random(n) < 2 / 3), side * side


def _knowledge(rng: np.random.Generator, scale: float) -> tuple[np.ndarray, int]:
    n, edges = max(40, int(500_000 * scale)), max(100, int(3_000_000 * scale))
    return np.stack([_skewed(rng, edges, n, 1.5), _skewed(rng, edges, n, 3.0)]), n


KINDS: dict[str, Callable[[np.random.Generator, float], tuple[np.ndarray, int]]] = {
    "recommendation-like": _recommendations,
    "mesh-like": _mesh,
    "road-like": _roads,
    "knowledge-like": _knowledge,
}
GRAPHS = (*REAL, *MADE[:1], *KINDS, *MADE[1:])  # about by size


def load(name: str, scale: float = 1.0, folder: Path = DATA) -> Graph:
    """One of `GRAPHS`, or a file with `edge_index` [2, E] (source, destination) and `num_nodes`.

    `scale`: shrinks the graphs that are generated. `folder`: of the real ones.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name in KINDS:
        ends, n = KINDS[name](np.random.default_rng(7), scale)
    elif name in REAL or name.endswith(".npz"):
        with np.load(folder / f"{name}.npz" if name in REAL else name, allow_pickle=False) as found:
            ends, n = found["edge_index"].astype(np.int64), int(found["num_nodes"])
    else:
        made = graphs.generate(name, device, scale)
        return Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
    source, target = torch.from_numpy(ends).to(device)
    order = (target * n + source).argsort(stable=True)
    indptr = torch.zeros(n + 1, dtype=torch.int32, device=device)
    indptr[1:] = torch.bincount(target, minlength=n).cumsum(0)
    return Graph.from_csr(indptr, source[order].int(), num_cols=n, check=False)
