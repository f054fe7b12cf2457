"""A generated graph for training runs of a size that ships with no package: "generated"."""

from __future__ import annotations

import numpy as np

NAME = "generated"
NUM_NODES, NUM_FEATURES, NUM_CLASSES = 14_000, 128, 10
_PAIRS = 256_000  # drawn; what is left after loops and repetitions is about half a million edges in both directions
_WITHIN = 0.7  # of the edges, within a class
_NOISE = 3.0  # of the features, in standard deviations of the means of classes


def arrays() -> dict[str, np.ndarray]:
    """The graph in the schema of `gnnaccel.data`: the same one at each call.

    Notes
    -----
    Degrees follow a power law with an exponent of 2.5 (Chung and Lu's model: both ends of an edge are drawn in
    proportion to weights of nodes); seven tenths of the edges stay within a class, and features are the mean of the
    class and noise, so that a model has something to learn. Undirected, without self-loops and repeated edges; nodes
    lie at random. 60 % of the nodes train, 20 % validate, 20 % test.
    """
    random = np.random.default_rng(0)
    weights = (np.arange(NUM_NODES) + 10.0) ** (-1 / 1.5)
    weights = random.permutation(weights)
    y = random.integers(0, NUM_CLASSES, NUM_NODES)
    sources = _drawn(random, weights, _PAIRS)
    targets = _drawn(random, weights, _PAIRS)
    within = random.random(_PAIRS) < _WITHIN
    for label in range(NUM_CLASSES):
        members = np.flatnonzero(y == label)
        ours = within & (y[sources] == label)
        targets[ours] = members[_drawn(random, weights[members], int(ours.sum()))]
    apart = sources != targets
    low, high = np.minimum(sources, targets)[apart], np.maximum(sources, targets)[apart]
    pairs = np.unique(low * NUM_NODES + high)
    low, high = pairs // NUM_NODES, pairs % NUM_NODES
    means = random.standard_normal((NUM_CLASSES, NUM_FEATURES), dtype=np.float32)
    x = means[y] + np.float32(_NOISE) * random.standard_normal((NUM_NODES, NUM_FEATURES), dtype=np.float32)
    x /= np.float32(np.sqrt(NUM_FEATURES * (1 + _NOISE**2)))  # rows of about length 1: no loss that starts far off
    parts = random.permutation(NUM_NODES) * 5 // NUM_NODES  # 0 to 4
    return {
        "edge_index": np.stack([np.concatenate([low, high]), np.concatenate([high, low])]),
        "x": x,
        "y": y,
        "train_mask": parts < 3,
        "val_mask": parts == 3,
        "test_mask": parts == 4,
    }


def _drawn(random: np.random.Generator, weights: np.ndarray, count: int) -> np.ndarray:
    """`count` indices in proportion to `weights`."""
    return np.minimum(np.searchsorted(np.cumsum(weights), random.random(count) * weights.sum()), len(weights) - 1)
