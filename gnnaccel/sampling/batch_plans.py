"""What is known of a batch that a GPU samples before it is drawn: its steps, and how large each can become."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import NamedTuple

from gnnaccel.lower import bounds


class Shape(NamedTuple):
    """The numbers of a problem, of which its plans are made: of nodes, ends and edges of relations, edges per hop."""

    sizes: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    fanouts: tuple[tuple[int, ...], ...]
    replace: bool
    resample: bool
    disjoint: bool

    def steps(self, num_seeds: Sequence[int]) -> tuple[list[Step], list[int]]:
        """The steps of a batch that may find edges, and how many come before each hop, and before its end."""
        rows, steps, starts = {t for t, count in enumerate(num_seeds) if count}, list[Step](), list[int]()
        for hop in range(max(map(len, self.fanouts), default=0)):
            starts.append(len(steps))
            new = set()
            for number, ((source, target), fanouts) in enumerate(zip(self.ends, self.fanouts, strict=True)):
                if fanouts[hop] and target in rows:
                    steps.append(Step(hop, number, source, target, fanouts[hop]))
                    new.add(source)
            rows = rows | new if self.resample else new
        return steps, [*starts, len(steps)]


class Step(NamedTuple):
    """The edges of a relation, by number, in a hop; numbers of the types of their nodes."""

    hop: int
    relation: int
    source: int
    target: int
    fanout: int


class Plan(NamedTuple):
    """Steps, how many come before each hop, the most rows and edges of the first, and what is known after these."""

    steps: list[Step]
    starts: list[int]
    bounds: list[tuple[int, int]]
    sizes: Sizes


@functools.lru_cache(maxsize=bounds.BATCH_PLANS)  # plans hold no tensors
def plan(shape: Shape, num_seeds: tuple[int, ...], most_bounded: int) -> Plan:
    """Of a batch of so many seeds of each type; most_bounded: edges that room is made for unseen."""
    steps, starts = shape.steps(num_seeds)
    bounds, sizes = Sizes(shape, num_seeds, most_bounded).bounds(steps)
    return Plan(steps, starts, bounds, sizes)


class Sizes:
    """How many nodes the hops of a batch draw for, at most.

    most : list of int
        In the hop that was reached last, by type.
    """

    def __init__(self, shape: Shape, num_seeds: Sequence[int], most_bounded: int):
        self._shape, self._seeds, self._most_bounded = shape, num_seeds, most_bounded
        self._hop, self.most = 0, list(num_seeds)
        self._new = [0] * len(num_seeds)  # in this hop
        self._others = [0] * len(num_seeds)  # nodes that are no seeds

    def bounds(self, steps: Sequence[Step]) -> tuple[list[tuple[int, int]], Sizes]:
        """How many rows and edges each of these can have, the next ones, up to one that may have many; and what there
        is after them."""
        then, bounds, together = self.at(self._hop), list[tuple[int, int]](), 0
        for step in steps:
            then._reach(step.hop)
            bound = then._edges(step)
            together += bound
            if bound > self._most_bounded or together > 4 * self._most_bounded:
                break
            bounds.append((then.most[step.target], bound))
            then.take(step, bound)
        return bounds, then

    def at(self, hop: int) -> Sizes:
        """A copy, gone on to a hop."""
        then = copy.copy(self)
        then._new, then._others = self._new[:], self._others[:]
        then._reach(hop)
        return then

    def _reach(self, hop: int) -> None:
        """All steps before the hop have been taken."""
        while self._hop < hop:
            self._hop += 1
            pairs = enumerate(zip(self._others, self._new, strict=True))
            others = [self.most_others(t, old + new) for t, (old, new) in pairs]
            if self._shape.resample:
                self.most = [a + b for a, b in zip(self._seeds, others, strict=True)]
            else:
                self.most = [self.most_others(t, new) for t, new in enumerate(self._new)]
            self._others, self._new = others, [0] * len(others)

    def most_others(self, which: int, edges: int) -> int:
        """How many nodes of a type so many edges can add: all but seeds are there once, or once in a tree."""
        size = self._shape.sizes[which]
        return edges if self._shape.disjoint or size < 0 else min(edges, size)

    def _edges(self, step: Step) -> int:
        most, nnz, shape = self.most[step.target], self._shape.counts[step.relation], self._shape
        if step.fanout >= 0 and (shape.replace or shape.disjoint):
            return most * step.fanout
        # Among the seeds a node may be several times, each with edges of its own.
        seeds = self._seeds[step.target] if shape.resample or self._hop == 0 else 0
        if step.fanout < 0:
            return self._most_bounded + 1 if seeds or shape.disjoint else nnz
        return min(most * step.fanout, seeds * step.fanout + nnz)

    def take(self, step: Step, edges: int) -> None:
        """The next step has at most so many edges."""
        self._new[step.source] += edges
