"""Batches that a GPU begins before they are asked for, so that nobody waits for their sizes.

A batch that was begun is the one that would be sampled when it is asked for, bit for bit, or it is dropped: of the same
seeds, of a graph that nobody has written into, and of the random number that torch's generator gives then. To begin one
draws nothing from that generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel.sampling import _arrays, ahead, on_cuda
from gnnaccel.sampling._arrays import Relation
from gnnaccel.sampling.neighbors import NeighborSample, of_one

_OP, _NODE = "neighbor_sample", "node"
_KIND = (_NODE, "to", _NODE)
_foreseen = torch.Generator("cpu")


class Plan:
    """What is sampled, but for the seeds: it stays the same over an epoch."""

    __slots__ = ("_arrays", "_how", "_versions", "problem", "waits_once")

    def __init__(self, indptr: Tensor, indices: Tensor, num_seeds: int, num_neighbors: Sequence[int], replace: bool):
        self._arrays, self._how = (indptr, indices), (num_seeds, list(num_neighbors), replace)
        self._versions = (indptr._version, indices._version)
        relation, fanouts = Relation(_OP, indptr, indices, device=indptr.device), _arrays.fanouts(_OP, num_neighbors)
        sizes, how = {_NODE: relation.num_rows}, dict(resample=False, disjoint=False, last=False)
        self.problem = on_cuda.Problem(sizes, {_KIND: relation}, {_KIND: fanouts}, {}, replace, **how)
        self.waits_once = self.problem.waits_once({_NODE: num_seeds})

    def fits(
        self, indptr: Tensor, indices: Tensor, num_seeds: int, num_neighbors: Sequence[int], replace: bool
    ) -> bool:
        """True if it is of these, which nobody has written into since."""
        mine = self._arrays
        if mine[0] is not indptr or mine[1] is not indices or self._how != (num_seeds, list(num_neighbors), replace):
            return False
        return self._versions == (indptr._version, indices._version)


class Begun:
    """A uniform sample that the GPU draws on the sampler's stream (ahead.py), made by `begin`.

    plan : Plan
    """

    __slots__ = ("_batch", "_number", "_seeds", "plan")

    def __init__(self, plan: Plan, seeds: Tensor, number: int, batch: on_cuda.Batch):
        self.plan, self._seeds, self._number, self._batch = plan, seeds, number, batch

    def result(
        self, indptr: Tensor, indices: Tensor, seeds: Tensor, num_neighbors: Sequence[int], replace: bool, number: int
    ) -> NeighborSample | None:
        """The sample of these arguments and this random number; None if that is another. Call it within
        `ahead.beside`. Raises as `neighbor_sample`."""
        fits = self.plan.fits(indptr, indices, seeds.numel(), num_neighbors, replace)
        if number != self._number or not fits or not torch.equal(seeds, self._seeds):
            return None
        return of_one(self._batch.result())


def begin(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    replace: bool,
    like: Plan | None = None,
) -> Begun | None:
    """Begin a sample; None where the host would have to wait in between, and where it cannot be begun: who asks for it
    is told why.

    Parameters
    ----------
    indptr, indices : Tensor
        Of a graph on the GPU, which is there for good.
    seeds : Tensor [num_seeds], int64 or int32
        In host memory; if it is pinned, not to be written into before there is a result.
    num_neighbors : list of int
    replace : bool
    like : Plan, optional
        Of a batch before, which is looked at first.
    """
    if indptr.is_inference() or indices.is_inference():  # of which no write can be told
        return None
    device, count = indptr.device, seeds.numel()
    try:
        plan = like if like is not None and like.fits(indptr, indices, count, num_neighbors, replace) else None
        if plan is None:
            plan = Plan(indptr, indices, count, num_neighbors, replace)
        if not plan.waits_once:
            return None
        number = next_number()
        with ahead.on_its_stream(device):
            there = ahead.to_device(seeds.to(indptr.dtype), device)
            batch = on_cuda.begin(plan.problem, {_NODE: there}, None, number)
            batch.send()
    except (RuntimeError, TypeError, ValueError):
        return None
    return Begun(plan, seeds, number, batch)


def next_number() -> int:
    """What `_arrays.random_seed` draws next from torch's generator, which stays as it is."""
    _foreseen.set_state(torch.default_generator.get_state())
    return int(torch.empty((), dtype=torch.int64, device=_arrays.CPU).random_(generator=_foreseen))
