"""From what the runs measured to the figures of the comparison. Pure functions of plain data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

SIDES = ("alone", "gnnaccel")
_SCATTER = 1.5


@dataclass(frozen=True)
class Run:
    """One training run. side: "alone" or "gnnaccel"; measured: what the training program wrote; profile: counters."""

    side: str
    pair: int
    measured: dict
    profile: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One row of the results. `alone` and `gnnaccel` are numbers, or None where a side has no such figure."""

    key: str
    label: str
    unit: str
    alone: float | None = None
    gnnaccel: float | None = None
    ratio: float | None = None  # alone / gnnaccel: above 1, gnnaccel is better


@dataclass(frozen=True)
class Results:
    """All that is shown and saved. left: (kind of call, reason, calls) left to the framework."""

    figures: tuple[Figure, ...]
    left: tuple[tuple[str, str, int], ...]
    warnings: tuple[str, ...]
    pair_speedups: tuple[float, ...]
    warmup: int

    def __getitem__(self, key: str) -> Figure:
        return next(figure for figure in self.figures if figure.key == key)


def warmup_epochs(epochs: int) -> int:
    """How many first epochs are left out of the epoch time: three, but never more than half of them."""
    return min(3, epochs // 2)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _ratio(alone: float | None, gnnaccel: float | None) -> float | None:
    return alone / gnnaccel if alone is not None and gnnaccel else None


def _figure(key: str, label: str, unit: str, sides: Mapping[str, float | None], ratio: bool = False) -> Figure:
    alone, gnnaccel = (sides[side] for side in SIDES)
    return Figure(key, label, unit, alone, gnnaccel, _ratio(alone, gnnaccel) if ratio else None)


def _times(runs: list[Run], warmup: int) -> list[float]:
    return [time for run in runs for time in run.measured["epoch_time_ms"][warmup:]]


def _median(values: list) -> float | None:
    return statistics.median(values) if values and None not in values else None


def difference(one: list[float], other: list[float]) -> float:
    """Largest difference of two loss curves; infinite if only one of them is finite somewhere, or neither is."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def _calls(profiles: list[dict]) -> tuple[int, int, tuple[tuple[str, str, int], ...]]:
    """Calls accelerated, calls left, and the reasons of those left, over all profiles."""
    accelerated, left = 0, 0
    reasons: dict[tuple[str, str], int] = {}
    for profile in profiles:
        for kind, site in profile.get("sites", {}).items():
            accelerated += site["accelerated"]
            left += site["left"]
            for reason, count in site["reasons"].items() if site["left"] else ():  # others: why not wholly accelerated
                reasons[kind, reason] = reasons.get((kind, reason), 0) + count
    return accelerated, left, tuple((kind, reason, count) for (kind, reason), count in sorted(reasons.items()))


def _pairs(runs: list[Run]) -> list[tuple[Run, Run]]:
    by_pair = {(run.pair, run.side): run for run in runs}
    return [(by_pair[pair, "alone"], by_pair[pair, "gnnaccel"]) for pair in sorted({run.pair for run in runs})]


def _time_figures(by_side: dict[str, list[Run]], warmup: int) -> list[Figure]:
    spread = {side: quartiles(_times(runs, warmup)) for side, runs in by_side.items()}
    first = {side: _median([run.measured["epoch_time_ms"][0] for run in runs]) for side, runs in by_side.items()}
    surplus = {side: max(0.0, (first[side] or 0.0) - spread[side][1]) for side in SIDES}
    return [
        _figure("epoch_time_median", "epoch time, median", "ms", {s: spread[s][1] for s in SIDES}, ratio=True),
        _figure("epoch_time_q1", "epoch time, first quartile", "ms", {s: spread[s][0] for s in SIDES}),
        _figure("epoch_time_q3", "epoch time, third quartile", "ms", {s: spread[s][2] for s in SIDES}),
        _figure("epochs_counted", "epochs counted", "", {s: float(len(_times(by_side[s], warmup))) for s in SIDES}),
        _figure("first_epoch_surplus", "first epoch, beyond the median", "ms", surplus),
    ]


def _loss_figures(runs: list[Run]) -> list[Figure]:
    largest = max(difference(a.measured["loss"], b.measured["loss"]) for a, b in _pairs(runs))
    alone = [run for run in runs if run.side == "alone"]
    own = max((difference(alone[0].measured["loss"], run.measured["loss"]) for run in alone[1:]), default=None)
    last = {side: next(run.measured["loss"][-1] for run in runs if run.side == side) for side in SIDES}
    return [
        _figure("final_loss", "training loss, last epoch", "", last),
        Figure("max_loss_difference", "largest loss difference", "", alone=own, gnnaccel=largest),
    ]


def evaluate(runs: list[Run], prepare_ms: float | None, tolerance: float) -> Results:
    """The figures of all runs of both sides, which have the same number of epochs.

    Parameters
    ----------
    runs : list of Run
        For each pair one run of each side.
    prepare_ms : float or None
        What `gnnaccel.prepare` took, None where it could not be measured.
    tolerance : float
        Losses further apart than this give a warning.
    """
    by_side = {side: [run for run in runs if run.side == side] for side in SIDES}
    warmup = warmup_epochs(len(runs[0].measured["loss"]))
    memory: dict[str, float | None] = {}
    for side in SIDES:
        found = _median([run.measured["extra_memory_bytes"] for run in by_side[side]])
        memory[side] = None if found is None else found / 2**20
    accuracy = {side: _median([run.measured["test_accuracy"] for run in by_side[side]]) for side in SIDES}
    accelerated, left, reasons = _calls([run.profile for run in by_side["gnnaccel"]])
    calls = accelerated + left
    figures = [
        *_time_figures(by_side, warmup),
        Figure("prepare_time", "gnnaccel.prepare, measured apart", "ms", gnnaccel=prepare_ms),
        _figure("peak_memory", "peak memory, beyond data and model", "MiB", memory, ratio=True),
        _figure("test_accuracy", "test accuracy, last epoch", "", accuracy),
        *_loss_figures(runs),
        Figure("share_accelerated", "share of calls accelerated", "", gnnaccel=accelerated / calls if calls else None),
        Figure("calls_accelerated", "message-passing calls accelerated", "", gnnaccel=float(accelerated)),
        Figure("calls_left", "message-passing calls left to the framework", "", gnnaccel=float(left)),
    ]
    pair_speedups = tuple(
        statistics.median(_times([a], warmup)) / statistics.median(_times([b], warmup)) for a, b in _pairs(runs)
    )
    results = Results(tuple(figures), reasons, (), pair_speedups, warmup)
    return Results(tuple(figures), reasons, _warnings(results, calls, tolerance), pair_speedups, warmup)


def _scatters(results: Results) -> bool:
    """True if a quarter of a side's epochs took half as long again as another quarter, or the pairs disagree so."""
    low, high = results["epoch_time_q1"], results["epoch_time_q3"]
    ratios = [(high.alone or 0.0) / (low.alone or 1.0), (high.gnnaccel or 0.0) / (low.gnnaccel or 1.0)]
    return max(*ratios, max(results.pair_speedups) / min(results.pair_speedups)) > _SCATTER


def _warnings(results: Results, calls: int, tolerance: float) -> tuple[str, ...]:
    found = []
    largest = results["max_loss_difference"].gnnaccel
    assert largest is not None
    if math.isinf(largest):
        found.append("the losses are not finite")
    elif largest > tolerance:
        found.append(
            f"the losses of the two sides differ by up to {largest:.3g}, more than the tolerance of {tolerance:g}"
        )
        own = results["max_loss_difference"].alone
        if own:
            found[-1] += f" (two runs of the framework alone differ by up to {own:.3g})"
    if _scatters(results):
        found.append("the epoch times scatter widely, as on a busy machine: the speedup is no figure to rely on")
    if not calls:
        found.append("gnnaccel saw no message-passing call: nothing was accelerated")
    elif not results["calls_accelerated"].gnnaccel:
        found.append("no message-passing call was accelerated")
    return tuple(found)
