"""pyg-lib's random walks on ours: Node2Vec and RootedRWSubgraph.

As an op of torch's, which torch.jit.script takes from Node2Vec as it does pyg-lib's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gnnaccel import report, sampling

_NAME = "gnnaccel::random_walk"
torch.library.define(
    _NAME,
    "(Tensor indptr, Tensor indices, Tensor seeds, int length, float p, float q) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(_NAME, ("CPU", "CUDA"))
def _random_walk(
    indptr: Tensor, indices: Tensor, seeds: Tensor, length: int, p: float, q: float
) -> Tensor:  # as pyg::random_walk
    with report.accelerated("pyg.random_walk"):
        starts = seeds.to(indptr.device, indptr.dtype)
        return sampling.random_walk(indptr, indices, starts, length, p=p, q=q).to(seeds.dtype)


@torch.library.register_fake(_NAME)
def _fake(indptr: Tensor, indices: Tensor, seeds: Tensor, length: int, p: float, q: float) -> Tensor:
    return seeds.new_empty((seeds.numel(), length + 1))


random_walk = torch.ops.gnnaccel.random_walk
