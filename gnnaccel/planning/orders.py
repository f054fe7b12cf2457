"""Whether an order of the rows that `prepare` found makes the ops faster, timed on the graph itself: it cannot lose.

On the CPU one copy of the edges in that order serves what is faster so. On CUDA rows of each size have two
lists by the rules of `schedule`, in the order found and as given, of which the graph keeps the faster.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gnnaccel import schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops._arrays import Structure, arrays_of
from gnnaccel.ops.sddmm import sddmm_op
from gnnaccel.ops.spmm import max_min_op, spmm_op
from gnnaccel.planning.tune import call_times
from gnnaccel.schedule.worklist import LANES, WorkList, lanes_of


def choose_orders(parts: Sequence[Graph], widths: Sequence[int], *, budget_ms: float) -> str:
    """Find out for which of `widths` sums over `parts` are faster in the orders that `prepare` found.

    Those are served so from now on, all others as given. What was found before stays. Widths for which there is no time
    or no memory are not timed; the first of a graph gets its time all the same. On the CPU those are served as given;
    on CUDA, where they are the widest of large graphs, in the order found. There other ops are timed by themselves, and
    the budget is device time: a process's first calls take the host long, which loads kernels.

    Returns
    -------
    str
        What was found of each of `parts`.
    """
    found: list[tuple[Graph, str]] = []
    for part in parts:
        twin = next((other for other, _ in found if schedule.of(other).order is schedule.of(part).order), None)
        if part.indptr.is_cuda:
            _serve_faster_lists(part, twin, widths, budget_ms / len(parts))
        elif twin is not None:  # a symmetric graph, whose transposed has the same rows
            schedule.of(part).adopt_order(part, dict(schedule.of(twin).faster))
        elif schedule.of(part).order is not None:
            schedule.of(part).adopt_order(part, _faster_in_order(part, widths, budget_ms / len(parts)))
        found.append((part, _said(part, widths)))
    texts = list(dict.fromkeys(text for _, text in found))
    return texts[0] if len(texts) == 1 else f"{texts[0]}; transposed: {texts[1]}"


def _said(graph: Graph, widths: Sequence[int]) -> str:
    if not schedule.of(graph).reordered:
        return "as given"

    def those(verdict: bool | None) -> str:
        return " ".join(str(width) for width in widths if schedule.of(graph).faster.get(lanes_of(4 * width)) is verdict)

    faster, untimed = those(True), those(None)
    said = f"this order is faster with {faster} features" if faster else "this order is no faster"
    return said + (f", not timed with {untimed}" if untimed else "")


def _faster_in_order(graph: Graph, widths: Sequence[int], budget_ms: float) -> dict[int, bool]:
    """`Work.faster` with as many of `widths` as there is time for. Calls in turn, as others may use the CPU too."""
    faster = dict(schedule.of(graph).faster)
    new = {lanes_of(4 * width): width for width in widths if lanes_of(4 * width) not in faster}
    if not new:
        return faster
    given = arrays_of(graph, False, listed=False)
    ways = (given, given.ordered(schedule.of(graph).in_order(graph)))
    start = time.perf_counter()
    for i, (lanes, width) in enumerate(new.items(), 1):
        times: tuple[list[float], list[float]] = ([], [])
        until = start + budget_ms / 1e3 * i / len(new)
        try:
            x = torch.zeros(graph.num_cols, width, dtype=torch.float32, device=graph.device)
            while len(times[0]) < 2 or (len(times[0]) <= 2 * bounds.ORDER_CALLS and time.perf_counter() < until):
                for arrays, way in zip(ways, times, strict=True):
                    begin = time.perf_counter()
                    spmm_op(arrays, x, None, "copy_lhs", "sum", 0.0)
                    way.append(time.perf_counter() - begin)
        except RuntimeError as error:  # what torch raises on the CPU
            if "allocate memory" not in str(error):
                raise
            break
        given_ones, ordered_ones = (way[1:] for way in times)  # the first reads what is in no cache yet
        # Both, as on a busy machine one of them alone finds now and then what is not there.
        faster[lanes] = all(of(ordered_ones) < bounds.PLAN_PAYS * of(given_ones) for of in (min, statistics.median))
        if time.perf_counter() >= start + budget_ms / 1e3:
            break
    return faster


def _serve_faster_lists(graph: Graph, twin: Graph | None, widths: Sequence[int], budget_ms: float) -> None:
    """On CUDA: keep the lists in the order found where they are faster, for sums and for all else, or those as given.

    `twin`: one of the same rows, for which that is known.
    """
    work = schedule.of(graph)
    if not work.reordered:
        return
    if twin is not None:
        known = schedule.of(twin)
        for lanes in known.faster:
            work.serve(lanes, known.lists[lanes], known.sums.get(lanes, known.lists[lanes]))
        work.faster, work.given = dict(known.faster), known.given
        return
    as_given = Graph(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols)
    plain, other = arrays_of(graph, False, listed=False), schedule.of(as_given)
    sizes: dict[int, int] = {}
    for width in (*widths, *(4 * lanes for lanes in LANES)):
        sizes.setdefault(lanes_of(4 * width), width)
    for lanes, width in sizes.items():
        if lanes in work.faster:
            continue
        try:
            with torch.cuda.device_of(graph.indptr), torch.no_grad():
                other.seek_order(as_given)
                other.build(as_given, lanes)
                work.given = other.order
                rows = [each.lists[lanes] for each in (work, other)]
                sums = [each.sums.get(lanes, each.lists[lanes]) for each in (work, other)]
                of_sums, of_rows, spent_ms = _compared(graph, plain, width, sums, rows)
        except torch.OutOfMemoryError:
            break
        # Those that share a list are not to be slower, any of them.
        faster = [
            max(ratios) <= bounds.ORDER_NO_SLOWER and min(ratios) < bounds.PLAN_PAYS for ratios in (of_sums, of_rows)
        ]
        work.faster[lanes] = faster[0]
        rows[1], sums[1] = (each._replace(as_given=True) for each in (rows[1], sums[1]))
        work.serve(lanes, rows[not faster[1]], sums[not faster[0]])
        budget_ms -= spent_ms
        if budget_ms <= 0:
            break


def _compared(
    graph: Graph, plain: Structure, width: int, sums: Sequence[WorkList], rows: Sequence[WorkList]
) -> tuple[list[float], list[float], float]:
    """Times by the first list over those by the second: of sums, with and without weights, by `sums`; of maxima and
    inner products, by `rows`; and ms that the calls took.

    Of `width` features and of fewer that share the lists: an odd number, which is read value by value (cuda/spmm.cu),
    and of the narrowest also half a list's 16 and, of what no kernel of its own serves (cuda/spmm_narrow.cu), 2.
    """
    odd, spent_ms = 2 * lanes_of(4 * width) + 1, 0.0
    of_sums: list[float] = []
    of_rows: list[float] = []

    def compare(found: list[float], lists: Sequence[WorkList], run: Callable[[Structure], object]) -> None:
        nonlocal spent_ms
        ratio, ms = _ratio(plain, lists, run)
        found.append(ratio)
        spent_ms += ms

    weight = torch.ones(graph.nnz, 1, dtype=torch.float32, device=graph.device)
    rng = torch.Generator(graph.device).manual_seed(0)  # maxima of equal values would be quicker
    for feats in dict.fromkeys((width, odd, *((8, 2) if odd < bounds.ORDER_NARROW else ()))):
        x = torch.rand(graph.num_cols, feats, generator=rng, dtype=torch.float32, device=graph.device)
        if feats > 2 or feats == width:
            compare(of_sums, sums, partial(_sum, x=x, weight=None if feats == width else weight))
        compare(of_rows, rows, partial(_largest, x=x))
    ends = torch.zeros(graph.num_rows, width, dtype=torch.float32, device=graph.device)
    x = torch.zeros(graph.num_cols, width, dtype=torch.float32, device=graph.device)
    compare(of_rows, rows, lambda arrays: sddmm_op(arrays, x, ends, "dot", "u", "v"))
    return of_sums, of_rows, spent_ms


def _sum(arrays: Structure, x: Tensor, weight: Tensor | None) -> Tensor:
    return spmm_op(arrays, x, weight, "copy_lhs" if weight is None else "mul", "sum", 0.0)


def _largest(arrays: Structure, x: Tensor) -> Tensor:
    return max_min_op(arrays, x, None, "copy_lhs", "max", 0.0, False)[0]


def _ratio(plain: Structure, lists: Sequence[WorkList], run: Callable[[Structure], object]) -> tuple[float, float]:
    """Time with the first list over that with the second, in turns, so that both meet the same clocks and caches; and
    ms of all calls but the first ones, in which a process loads kernels."""
    ways = [plain.ordered(each) for each in lists]
    turns = itertools.cycle(ways)

    def times(calls: int) -> tuple[float, float, float]:
        found = call_times(lambda: run(next(turns)), 2 * calls)
        return statistics.median(found[::2]), statistics.median(found[1::2]), sum(found)

    times(1)
    mine, theirs, spent_ms = times(1)
    if min(mine, theirs) < bounds.LONG_CALL_MS:
        mine, theirs, more_ms = times(bounds.ORDER_CALLS)
        spent_ms += more_ms
    return mine / theirs, spent_ms
