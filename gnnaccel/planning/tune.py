"""Which kernel, and with which parameters, serves the sums over a graph on CUDA, measured on the graph itself.

The rules that hold without this are the model: `rules.plan_of` and `groups_of` cut and arrange rows and pick kernel
and slice, `gate` says where tiles pay. `measure` starts from what they say and tries, while there is time, for whole
rows kernels and slices, then arrangements and cuts, then slices again; and groups of neighbours by GNNAdvisor's search
(Wang et al., OSDI 2021), beginning with the rule's and the formula's: before the rows where the rule takes groups.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gnnaccel import schedule, tiles, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.ops.tiled import spmm_tiled
from gnnaccel.schedule.groups import Setting, Size, by_formula, settings
from gnnaccel.schedule.groups import search as evolve
from gnnaccel.schedule.rules import groups_of
from gnnaccel.schedule.worklist import Arrangement, Kernel, Plan, WorkList, lanes_of

MODES = ("heuristic", "measure", "off")


@dataclass(frozen=True)
class Tuned:
    """What `measure` found for features of one width.

    Attributes
    ----------
    num_feats, row_bytes : int
    plan : Plan
        Kept by the graph; that of the model if none was faster by more than noise.
    model_ms, best_ms : float
        Device time of what the model chose and of the best that was tried.
    tiled : bool
        True if tiles are the best; kept as well.
    tried : int
        Plans that were timed.
    complete : bool
        False if the time was up before all were.
    """

    num_feats: int
    row_bytes: int
    plan: Plan
    tiled: bool
    model_ms: float
    best_ms: float
    tried: int
    complete: bool

    @property
    def gap(self) -> float:
        """How many times as long as the best the model's choice takes."""
        return self.model_ms / self.best_ms


def measure(
    graph: Graph, num_feats: int, *, budget_ms: float = 250.0, weighted: bool = True, by_tiles: bool = True
) -> Tuned:
    """Time plans for the sum of rows of `num_feats` float32 features, and keep the best with the graph.

    Parameters
    ----------
    graph : Graph
        On CUDA, with work lists (`prepare`).
    num_feats : int
        The plan serves all rows of as many lanes as `worklist.lanes_of` says, whatever their dtype.
    budget_ms : float
        Wall time; no plan is begun that would end later, if it took as long as the longest one so far.
    weighted : bool
        One weight per edge.
    by_tiles : bool
        Also time tiles, of a graph for which they seem to pay; for float32 alone.

    Notes
    -----
    Synchronises. Allocates features, result and weights, which it frees.
    """
    with torch.cuda.device(graph.device), torch.no_grad():
        found = _measure(graph, num_feats, budget_ms, weighted, by_tiles and tiles.ensure(graph))
    adopt(graph, found)
    return found


def _measure(graph: Graph, num_feats: int, budget_ms: float, weighted: bool, by_tiles: bool) -> Tuned:
    x = torch.zeros(graph.num_cols, num_feats, dtype=torch.float32, device=graph.device)
    weight = torch.zeros(graph.nnz, 1, dtype=torch.float32, device=graph.device) if weighted else None
    row_bytes = num_feats * x.element_size()
    plain = arrays_of(graph, False, listed=False)
    message = "mul" if weighted else "copy_lhs"

    def run(work: WorkList) -> None:
        spmm_op(plain.ordered(work), x, weight, message, "sum", 0.0)

    first = schedule.of(graph).arranged(graph, schedule.of(graph).plan(graph, row_bytes))
    run(first)  # a process's first call loads kernels
    search = _Search(graph, run, time.perf_counter() + budget_ms / 1e3)
    search.consider(first)
    model_ms = listed_ms = search.best_ms
    tiled_ms = math.inf
    tiled = tiles.are_profitable(graph, num_feats)
    if by_tiles:
        tiled_ms = _time_ms(lambda: spmm_tiled(graph, x, weight, False, tf32=False))
        model_ms = tiled_ms if tiled else model_ms
    rows = schedule.of(graph).plan(graph, row_bytes, sums=False)
    groups_first = first.plan.kernel is Kernel.GROUPS
    if groups_first:
        _try_groups(search, graph, num_feats, row_bytes, rows.arrangement)
    for stage in (_slices, _lists, _slices):
        for plan in stage(search.best_of_rows(rows), graph, row_bytes):
            search.time(plan)
    if not groups_first and graph.nnz <= bounds.GROUPS_EDGES:
        _try_groups(search, graph, num_feats, row_bytes, rows.arrangement)
    best = search.best if search.best_ms <= bounds.PLAN_PAYS * listed_ms else first
    best_ms = min(search.best_ms, tiled_ms)
    if by_tiles and best_ms <= bounds.PLAN_PAYS * model_ms:
        tiled = tiled_ms < search.best_ms
    tried = len(search.times) + by_tiles
    return Tuned(num_feats, row_bytes, best.plan, tiled, model_ms, best_ms, tried, not search.out_of_time)


def measure_each(graph: Graph, widths: Sequence[int], *, budget_ms: float, by_tiles: bool = True) -> list[Tuned]:
    """`measure` for each of these numbers of features, all in this wall time: what one leaves the others get."""
    deadline = time.perf_counter() + budget_ms / 1e3
    found = []
    for i, width in enumerate(widths):
        left_ms = (deadline - time.perf_counter()) * 1e3 / (len(widths) - i)
        found.append(measure(graph, width, budget_ms=left_ms, by_tiles=by_tiles))
    return found


def adopt(graph: Graph, found: Tuned) -> None:
    """Let `graph` go by what was found, now or by an earlier process."""
    if schedule.of(graph).plan(graph, found.row_bytes) != found.plan:
        schedule.of(graph).adopt(found.row_bytes, schedule.of(graph).arranged(graph, found.plan))
    if found.tiled != tiles.are_profitable(graph, found.num_feats):
        schedule.decide_tiles(graph, found.num_feats, found.tiled)


class _Search:
    """The best of the plans considered so far."""

    def __init__(self, graph: Graph, run: Callable[[WorkList], None], deadline: float):
        self.graph, self.run, self.deadline = graph, run, deadline
        self.times: dict[Plan, float] = {}
        self.best_ms = float("inf")
        self.best: WorkList
        self.last: WorkList  # whose list the next plan may share
        self.longest = 0.0  # seconds that a plan has taken, list and calls
        self.out_of_time = False

    def time(self, plan: Plan) -> float:
        """Milliseconds of `plan`; infinitely many when there is no time left to measure it."""
        if plan not in self.times:
            if time.perf_counter() + self.longest > self.deadline:
                self.out_of_time = True
                return math.inf
            start = time.perf_counter()
            same = self.last.plan.list_key == plan.list_key
            self.consider(self.last._replace(plan=plan) if same else schedule.of(self.graph).arranged(self.graph, plan))
            self.longest = max(self.longest, time.perf_counter() - start)
        return self.times[plan]

    def consider(self, work: WorkList) -> None:
        self.last = work
        time_ms = self.times[work.plan] = _time_ms(lambda: self.run(work))
        if time_ms < self.best_ms:
            self.best_ms, self.best = time_ms, work

    def best_of_rows(self, otherwise: Plan) -> Plan:
        """The best so far of those that are not of groups."""
        plans = [plan for plan in self.times if plan.kernel is not Kernel.GROUPS]
        return min(plans, key=self.times.__getitem__, default=otherwise)


def _time_ms(function: Callable[[], object]) -> float:
    """Median device time of a call."""
    first = call_times(function, 1)[0]  # also warms up
    return statistics.median_low(
        call_times(function, bounds.PLAN_FEW_CALLS if first > bounds.LONG_CALL_MS else bounds.PLAN_CALLS)
    )


def call_times(function: Callable[[], object], calls: int) -> list[float]:
    """The device spins until all are queued, so that none waits for the host."""
    touch.spin(bounds.HEAD_START * calls)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for begin, end in marks:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def _try_groups(search: _Search, graph: Graph, num_feats: int, row_bytes: int, arrangement: Arrangement) -> None:
    rule = Setting.of(groups_of(graph, lanes_of(row_bytes), arrangement))
    start = [rule, *by_formula(Size.of(graph, num_feats))[:2]]
    evolve(settings(num_feats), start, lambda s: search.time(s.plan(arrangement)), population=6, rounds=4)


def _slices(best: Plan, graph: Graph, row_bytes: int) -> Iterator[Plan]:
    """Kernels, and how much of a row a worker has."""
    vectors = -(-row_bytes // 16)
    for kernel, most in ((Kernel.ROWS, 16), (Kernel.BALANCED, 32)):
        lanes = 4
        while lanes <= most:
            yield best._replace(kernel=kernel, slice_lanes=lanes)
            if lanes >= vectors:
                break
            lanes *= 2


def _lists(best: Plan, graph: Graph, row_bytes: int) -> Iterator[Plan]:
    """Arrangements and cuts for the kernel that reads them, those near to what is there first."""
    if best.kernel is Kernel.BALANCED:
        best = best._replace(kernel=Kernel.ROWS, slice_lanes=min(best.slice_lanes, 16))
    known = list(Arrangement) if schedule.of(graph).order is not None else [Arrangement.LENGTH]
    for factor in (1, 2, 0.5, 4, 0.25):
        cap = int(best.cap * factor)
        if bounds.PLAN_CAPS[0] <= cap <= bounds.PLAN_CAPS[1]:
            yield from (best._replace(arrangement=arrangement, cap=cap) for arrangement in known)
