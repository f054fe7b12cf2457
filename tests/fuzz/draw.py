"""Random choices of a case: numbers, values and graphs that depend on its seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Draw(random.Random):
    """random.Random with the choices that the targets make; torch's generator is seeded along."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random() < probability

    def pick(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        return options[self.randrange(len(options))]

    def size(self) -> int:
        """A number of nodes: mostly small, sometimes none or one."""
        return self.pick(
            (0, 1, 2, self.randint(3, 12), self.randint(3, 12), self.randint(10, 40), self.randint(41, 90))
        )

    def width(self) -> int:
        """A number of features: one, odd ones, those around the width of vectors, wide ones."""
        return self.pick((1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, self.randint(1, 70), self.randint(64, 140)))

    def edges(self, num_src: int, num_dst: int, most: int = 150, repeats: bool = True) -> tuple[Tensor, Tensor]:
        """Sources and destinations, int64: spread evenly or crowded into hubs, with repeats or each pair once."""
        count = self.randint(0, most) if num_src and num_dst else 0
        crowding = self.pick((1, 1, 4, 30))
        dst = (torch.rand(count, generator=self.generator) ** crowding * num_dst).long()
        src = (torch.rand(count, generator=self.generator) ** self.pick((1, 1, 4)) * num_src).long()
        if repeats and self.chance(0.3):
            src, dst = src.repeat(2), dst.repeat(2)
        if not repeats and count:
            pairs = torch.unique(src * num_dst + dst)
            pairs = pairs[torch.randperm(pairs.numel(), generator=self.generator)]
            src, dst = pairs // num_dst, pairs % num_dst
        return src, dst

    def values(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values of both signs with magnitudes between 0.5 and 1.5, so that they can be divided by."""
        value = torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.5
        sign = torch.where(torch.rand(shape, generator=self.generator) < 0.5, -1.0, 1.0)
        return (value * sign).to(dtype)

    def strided(self, x: Tensor) -> Tensor:
        """The same values, mostly in another layout than the contiguous one."""
        kind = self.randrange(6)
        if kind == 0 and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == 1:
            return torch.stack([x, x + 1], dim=-1)[..., 0]
        if kind == 2 and x.dim():
            return torch.cat([x.flip(0), x])[x.shape[0] :]  # contiguous, but not at the start of its memory
        if kind == 3 and x.numel():  # not aligned to its vectors
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        return x
