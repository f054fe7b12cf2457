"""Sampling of mini-batches: neighbours hop by hop, edges between given nodes, random walks; of tensors, no framework.

A graph is its edges by destination, as `gnnaccel.Graph` has them: ``indptr`` and ``indices``. Everything runs on the
CPU, on as many threads as torch has, and gives the same batch for the same ``seed`` whatever that number is;
`neighbor_sample` and `hetero_neighbor_sample` also on the GPU, where the same ``seed`` gives the CPU's batch unless
that is drawn by weight, and `random_walk`.
"""

from gnnaccel.sampling.feature_cache import FeatureCache
from gnnaccel.sampling.layerwise import hgt_sample
from gnnaccel.sampling.neighbors import (
    HeteroNeighborSample,
    NeighborSample,
    hetero_neighbor_sample,
    neighbor_sample,
)
from gnnaccel.sampling.subgraphs import Subgraph, ego_subgraphs, induced_subgraph
from gnnaccel.sampling.walks import random_walk

__all__ = [
    "FeatureCache",
    "HeteroNeighborSample",
    "NeighborSample",
    "Subgraph",
    "ego_subgraphs",
    "hetero_neighbor_sample",
    "hgt_sample",
    "induced_subgraph",
    "neighbor_sample",
    "random_walk",
]
