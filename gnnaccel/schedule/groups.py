"""Settings of the kernel of neighbour groups: GNNAdvisor's model, and its evolutionary search.

GNNAdvisor (Wang et al., OSDI 2021, section 7) ranks group size, threads of a block and dimension workers by a formula
(`latency`, under two limits: `fits`), and looks for the best by crossing good ones (`search`). What the formula puts
first takes half as long again as the best on an H200 (docs/advisor.md), so without measuring
`rules.groups_of` decides; `tune` lets the search begin with both, and has it judge by times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.schedule.worklist import GROUP_SIZES, SLICES, THREADS, Arrangement, Kernel, Plan

_ALPHA = 0.15, 0.3  # what the paper lets alpha be, the larger the more degrees deviate
_MAX_THREADS = 1024  # max_tpb: of a block on any GPU


class Setting(NamedTuple):
    """Of `Kernel.GROUPS`: neighbours of a group, threads of a block, 16-byte lanes (dimension workers) of a worker."""

    group_size: int
    threads: int
    lanes: int

    def plan(self, arrangement: Arrangement) -> Plan:
        """Groups of this setting."""
        return Plan(self.group_size, arrangement, Kernel.GROUPS, self.lanes, self.threads)

    @classmethod
    def of(cls, plan: Plan) -> Setting:
        """That of a plan of groups."""
        return cls(plan.cap, plan.threads, plan.slice_lanes)


class Size(NamedTuple):
    """What the model knows of the input: the graph's rows, nonzeros and deviation of degrees, and float32 features."""

    num_rows: int
    nnz: int
    degree_deviation: float
    num_feats: int

    @classmethod
    def of(cls, graph: Graph, num_feats: int) -> Size:
        """Synchronises."""
        return cls(graph.num_rows, graph.nnz, float(graph.indptr.diff().double().std(correction=0)), num_feats)


def settings(num_feats: int) -> list[Setting]:
    """All that differ for so many float32 features."""
    vectors = math.ceil(num_feats / bounds.LANE_NUMBERS)
    lanes = [n for n in SLICES if n == SLICES[0] or n < 2 * vectors]
    return [Setting(gs, tpb, dw) for gs in GROUP_SIZES for tpb in THREADS for dw in lanes]


def latency(setting: Setting, size: Size) -> float:
    """Equation 2, in no unit: settings are compared by it. Infinite where its denominator is 0."""
    gs, tpb, dw = setting
    spread = size.degree_deviation / max(1.0, size.nnz / max(1, size.num_rows))
    alpha = _ALPHA[0] + (_ALPHA[1] - _ALPHA[0]) * min(1.0, spread)
    divisor = gs * abs(dw - size.num_feats / 3) * abs(tpb - math.sqrt(_MAX_THREADS))
    if divisor == 0:
        return math.inf
    return size.nnz * size.num_feats / divisor * (1 + abs(gs - alpha * size.num_rows / max(1, size.nnz)))


def fits(setting: Setting, size: Size) -> bool:
    """Equations 3 and 4: what a thread is given, and what a block keeps in shared memory."""
    gs, tpb, dw = setting
    degree = max(1.0, size.nnz / max(1, size.num_rows))
    return (
        gs * size.num_feats / dw <= bounds.GROUP_PRODUCTS
        and tpb * gs / (degree * dw) * size.num_feats * 4 <= bounds.GROUP_SHARED_BYTES
    )


def by_formula(size: Size) -> list[Setting]:
    """The settings that equations 3 and 4 allow, or all if they allow none, the best by equation 2 first."""
    every = settings(size.num_feats)
    return sorted([s for s in every if fits(s, size)] or every, key=lambda s: latency(s, size))


def search(
    space: Sequence[Setting],
    start: Sequence[Setting],
    cost: Callable[[Setting], float],
    *,
    population: int = 12,
    rounds: int = 12,
    seed: int = 0,
) -> list[Setting]:
    """The settings that an evolutionary search meets, best first.

    Parameters
    ----------
    space : sequence of Setting
        What crossing makes outside of it is dropped.
    start : sequence of Setting
        The first population.
    cost : function of Setting
        Less is better; each setting is asked about once.
    population, rounds : int
        The better half of a population is crossed, each parameter being of one parent or changed to a neighbouring
        value; section 7.2 has 10 to 15 rounds enough.

    Notes
    -----
    The same result for the same arguments.
    """
    rng = random.Random(seed)
    inside = set(space)
    values = [sorted({each[i] for each in space}) for i in range(3)]
    known: dict[Setting, float] = {}

    def ranked(some: set[Setting]) -> list[Setting]:
        for each in sorted(some - known.keys()):
            known[each] = cost(each)
        return sorted(some, key=lambda each: (known[each], each))

    def child(parents: list[Setting]) -> Setting:
        genes = [rng.choice(parents)[i] for i in range(3)]
        i = rng.randrange(3)
        at = values[i].index(genes[i]) + rng.choice((-1, 0, 1))
        genes[i] = values[i][min(max(at, 0), len(values[i]) - 1)]
        return Setting(*genes)

    alive = ranked(set(start))
    for _ in range(rounds):
        parents = alive[: max(1, len(alive) // 2)]
        made = {child(parents) for _ in range(population)} & inside
        alive = ranked(set(parents) | made)[:population]
    return ranked(set(known))
