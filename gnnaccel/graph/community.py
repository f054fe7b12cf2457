"""Communities of a graph, level by level, by parallel Louvain.

A node v moves to the community C of its neighbours with the largest

    e(v, C) - gamma * k_v * K_C / 2m        e: edges between them, k: degree, K: sum of degrees, m: edges;

then communities become the nodes of a smaller graph, and so on (Blondel et al. 2008; in parallel: Lu, Halappanavar and
Kalyanaraman 2015). gamma starts where no community larger than `max_size` nodes of mean degree pays, and falls to 1
level by level, so that the hierarchy has groups for caches of each size. No random numbers: the same result on each
run, and on each device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.graph import progress
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.network import Network, chunks, merged, move, network_of
from gnnaccel.lower import bounds


def communities(graph: Graph, *, max_size: int = 16384) -> Tensor:
    """Community of each node, such that most edges stay inside and its rows fit a cache.

    Parameters
    ----------
    graph : Graph
        Square or rectangular, directed or not.
    max_size : int
        A node joins a community only if the share of its edges that lead there exceeds (the community's sum of
        degrees) / (that of `max_size` average nodes). So this bounds the size without being one: in dense graphs the
        largest communities have about half as many nodes. Looser groups than that fall apart, rather than in two.

    Returns
    -------
    Tensor, int64
        Labels 0, 1, ...: [num_rows], or [num_rows + num_cols] for a rectangular graph, rows first. A node without
        edges is a community of its own.

    Raises
    ------
    ValueError
        If max_size is less than 1.

    Notes
    -----
    Deterministic; cost as of `reorder.row_order`.
    """
    levels, label = hierarchy(graph, max_size, nested=False)
    for level in levels:
        label = level[label]
    return label


def hierarchy(
    graph: Graph,
    max_size: int,
    *,
    nested: bool = True,
    made: tuple[Network, Tensor] | None = None,
    networks: list[Network] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Labels level by level (a level's nodes are the communities of the one before), and each node's place in it.

    `nested`: go on to ever larger communities, instead of stopping at the first resolution. `made`: what `network_of`
    gave for the graph, where the caller has it. `networks` receives that of each level's communities, where wanted.
    """
    if max_size < 1:
        raise ValueError(f"communities: max_size: expected at least 1, got {max_size}")
    with progress.shown(f"communities of {graph}") as say:
        network, place = network_of(graph) if made is None else made
        gamma = max(1.0, network.num_nodes / max_size)
        levels: list[Tensor] = []
        while network.num_nodes > 1 and network.cols.numel():
            level = f"level {len(levels) + 1}, {network.num_nodes:,} nodes"
            label, count = _local_moves(network, gamma, say, level)
            if network.num_nodes - count > bounds.COMMUNITY_JOINED * network.num_connected:
                say(f"{level}, merging")
                network = merged(network, label, count)
                levels.append(label)
                if networks is not None:
                    networks.append(network)
            elif gamma == 1.0 or not nested:
                break
            if nested:
                gamma = max(1.0, gamma / bounds.COMMUNITY_GAMMA_STEP)
    return levels, place.long()


def _local_moves(network: Network, gamma: float, say: Callable[[str], None], level: str) -> tuple[Tensor, int]:
    """Labels 0..count-1 after passes of moves, starting with each node by itself; and their count."""
    n, few = network.num_nodes, int(bounds.COMMUNITY_SETTLED * network.num_connected)
    label = torch.arange(n, dtype=network.label_type, device=network.cols.device)
    volume = network.strength.clone()
    parts = list(chunks(network.indptr, min(bounds.COMMUNITY_CHUNKS, n)))
    for turn in range(bounds.COMMUNITY_PASSES):
        before = label.clone()
        for done, chunk in enumerate(parts):
            say(f"{level}, pass {turn + 1} of at most {bounds.COMMUNITY_PASSES}, {done / len(parts):.0%}")
            move(network, label, volume, chunk, gamma, turn)
        if int((label != before).sum()) <= few:
            break
    label = label.long()
    present = torch.zeros(n, dtype=torch.int64, device=label.device)
    present[label] = 1
    compact = present.cumsum(0) - 1
    return compact[label], int(compact[-1]) + 1
