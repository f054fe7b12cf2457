"""From what the runs measured to the figures of the comparison. Pure functions of plain data."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# In the order of the table. Always run: alone, gnnaccel.
SIDES = ("alone", "alone_compiled", "gnnaccel", "gnnaccel_compiled", "gnnaccel_captured")
_FEW = 5  # epochs counted of a run, below which the first ones, in which memory and caches warm up, decide
_SCATTER = 1.5
_CAPTURED = "captured."  # how kinds of calls begin that are captured steps, no message passing


def is_accelerated(side: str) -> bool:
    """True for a side that runs with gnnaccel."""
    return side.startswith("gnnaccel")


def is_compiled(side: str) -> bool:
    """True for a side whose model is given to torch.compile."""
    return side.endswith("_compiled")


def is_captured(side: str) -> bool:
    """True for a side whose training step is captured in a CUDA graph."""
    return side.endswith("_captured")


@dataclass(frozen=True)
class Run:
    """One training run. side: one of SIDES; measured: what the training program wrote; profile: counters."""

    side: str
    pair: int
    measured: dict
    profile: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One row of the results. values: by side, None or absent where a side has no such figure.

    ratios: alone / side, by side: above 1, the side is better than the framework alone.
    """

    key: str
    label: str
    unit: str
    values: Mapping[str, float | None] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, side: str) -> float | None:
        return self.values.get(side)


class Left(NamedTuple):
    """Calls of one kind that a side left to the framework for one reason."""

    side: str
    kind: str
    reason: str
    calls: int


@dataclass(frozen=True)
class Results:
    """All that is shown and saved. speedups: of each pair of runs, by side."""

    sides: tuple[str, ...]
    figures: tuple[Figure, ...]
    left: tuple[Left, ...]
    warnings: tuple[str, ...]
    speedups: Mapping[str, tuple[float, ...]]
    warmup: int

    def __getitem__(self, key: str) -> Figure:
        return next(figure for figure in self.figures if figure.key == key)


def warmup_epochs(epochs: int, captured: bool = False) -> int:
    """How many first epochs are left out of the epoch time, never more than half of them.

    Three; with a side that is `captured` four, the fourth being the one in which gnnaccel captures a step.
    """
    return min(4 if captured else 3, epochs // 2)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _figure(key: str, label: str, unit: str, values: Mapping[str, float | None], ratio: bool = False) -> Figure:
    alone = values.get("alone")
    ratios = {side: alone / value for side, value in values.items() if side != "alone" and alone is not None and value}
    return Figure(key, label, unit, dict(values), ratios if ratio else {})


def _times(runs: list[Run], warmup: int) -> list[float]:
    return [time for run in runs for time in run.measured["epoch_time_ms"][warmup:]]


def _median(values: list) -> float | None:
    return statistics.median(values) if values and None not in values else None


def difference(one: list[float], other: list[float]) -> float:
    """Largest difference of two loss curves; infinite if only one of them is finite somewhere, or neither is."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def _calls(side: str, profiles: list[dict]) -> tuple[int, int, list[Left]]:
    """Calls accelerated, calls left, and the reasons of those left, over all profiles of a side."""
    accelerated, left = 0, 0
    reasons: dict[tuple[str, str], int] = {}
    for profile in profiles:
        for kind, site in profile.get("sites", {}).items():
            if not kind.startswith(_CAPTURED):
                accelerated += site["accelerated"]
                left += site["left"]
            for reason, count in site["reasons"].items() if site["left"] else ():  # others: why not wholly accelerated
                reasons[kind, reason] = reasons.get((kind, reason), 0) + count
    return accelerated, left, [Left(side, kind, reason, count) for (kind, reason), count in sorted(reasons.items())]


def _by_side(runs: list[Run]) -> dict[str, list[Run]]:
    found = {side: [run for run in runs if run.side == side] for side in SIDES}
    return {side: own for side, own in found.items() if own}


def _pairs(runs: list[Run], side: str) -> list[tuple[Run, Run]]:
    """Each run of the framework alone with that of `side` beside it."""
    by_pair = {(run.pair, run.side): run for run in runs}
    return [(by_pair[pair, "alone"], by_pair[pair, side]) for pair in sorted({run.pair for run in runs})]


def _time_figures(by_side: dict[str, list[Run]], warmup: int) -> list[Figure]:
    spread = {side: quartiles(_times(runs, warmup)) for side, runs in by_side.items()}
    first = {side: _median([run.measured["epoch_time_ms"][0] for run in runs]) for side, runs in by_side.items()}
    surplus = {side: max(0.0, (first[side] or 0.0) - spread[side][1]) for side in by_side}
    figures = [
        _figure("epoch_time_median", "epoch time, median", "ms", {s: spread[s][1] for s in by_side}, ratio=True),
        _figure("epoch_time_q1", "epoch time, first quartile", "ms", {s: spread[s][0] for s in by_side}),
        _figure("epoch_time_q3", "epoch time, third quartile", "ms", {s: spread[s][2] for s in by_side}),
        _figure("epochs_counted", "epochs counted", "", {s: float(len(_times(by_side[s], warmup))) for s in by_side}),
        _figure("first_epoch_surplus", "first epoch, beyond the median", "ms", surplus),
    ]
    compiled = {
        side: _median([run.measured["compile_time_ms"] for run in runs])
        for side, runs in by_side.items()
        if is_compiled(side)
    }
    captured = {
        side: _capture_time(runs, spread[side][1] or 0.0) for side, runs in by_side.items() if is_captured(side)
    }
    if compiled:
        figures.append(_figure("compile_time", "torch.compile, before the epochs", "ms", compiled))
    if captured:
        figures.append(_figure("capture_time", "capture, beyond a median epoch", "ms", captured))
    return figures


def _capture_time(runs: list[Run], median_ms: float) -> float | None:
    """What the epochs in which a step was captured took beyond the median, per run; None if one was not captured."""
    taken = []
    for run in runs:
        times = [run.measured["epoch_time_ms"][epoch - 1] for epoch in run.measured["capture_epochs"]]
        taken.append(sum(max(0.0, time - median_ms) for time in times) if times else None)
    return _median(taken)


def _loss_figures(runs: list[Run], by_side: dict[str, list[Run]]) -> list[Figure]:
    gaps: dict[str, float | None] = {
        side: max(difference(a.measured["loss"], b.measured["loss"]) for a, b in _pairs(runs, side))
        for side in by_side
        if side != "alone"
    }
    alone = by_side["alone"]
    own = max((difference(alone[0].measured["loss"], run.measured["loss"]) for run in alone[1:]), default=None)
    last = {side: found[0].measured["loss"][-1] for side, found in by_side.items()}
    return [
        _figure("final_loss", "training loss, last epoch", "", last),
        _figure("max_loss_difference", "largest loss difference", "", {"alone": own, **gaps}),
    ]


def _call_figures(by_side: dict[str, list[Run]]) -> tuple[list[Figure], tuple[Left, ...]]:
    found = {s: _calls(s, [run.profile for run in runs]) for s, runs in by_side.items() if is_accelerated(s)}
    share = {side: done / (done + left) if done + left else None for side, (done, left, _) in found.items()}
    return [
        _figure("share_accelerated", "share of calls accelerated", "", share),
        _figure("calls_accelerated", "message-passing calls accelerated", "", {s: float(found[s][0]) for s in found}),
        _figure(
            "calls_left", "message-passing calls left to the framework", "", {s: float(found[s][1]) for s in found}
        ),
    ], tuple(reason for _, _, reasons in found.values() for reason in reasons)


def evaluate(runs: list[Run], prepare_ms: float | None, tolerance: float, dropout: bool = False) -> Results:
    """The figures of all runs of all sides, which have the same number of epochs.

    Parameters
    ----------
    runs : list of Run
        For each pair one run of each side; "alone" and "gnnaccel" among them.
    prepare_ms : float or None
        What `gnnaccel.prepare` took, None where it could not be measured.
    tolerance : float
        Losses further apart than this give a warning.
    dropout : bool
        Whether random numbers are drawn in training: compiled and captured sides draw others, so that their losses
        differ without a fault and give no warning.
    """
    by_side = _by_side(runs)
    warmup = warmup_epochs(len(runs[0].measured["loss"]), any(map(is_captured, by_side)))
    memory: dict[str, float | None] = {}
    for side, own in by_side.items():
        found = _median([run.measured["extra_memory_bytes"] for run in own])
        memory[side] = None if found is None else found / 2**20
    accuracy = {side: _median([run.measured["test_accuracy"] for run in own]) for side, own in by_side.items()}
    call_figures, left = _call_figures(by_side)
    figures = (
        *_time_figures(by_side, warmup),
        _figure("prepare_time", "gnnaccel.prepare, measured apart", "ms", {"gnnaccel": prepare_ms}),
        _figure("peak_memory", "peak memory, beyond data and model", "MiB", memory, ratio=True),
        _figure("test_accuracy", "test accuracy, last epoch", "", accuracy),
        *_loss_figures(runs, by_side),
        *call_figures,
    )
    speedups = {
        side: tuple(
            statistics.median(_times([a], warmup)) / statistics.median(_times([b], warmup))
            for a, b in _pairs(runs, side)
        )
        for side in by_side
        if side != "alone"
    }
    results = Results(tuple(by_side), figures, left, (), speedups, warmup)
    warnings = (*_loss_warnings(results, tolerance, dropout), *_warnings(results, by_side))
    return dataclasses.replace(results, warnings=warnings)


def _scatters(results: Results) -> bool:
    """True if a quarter of a side's epochs took half as long again as another quarter, or the pairs disagree so."""
    low, high = results["epoch_time_q1"], results["epoch_time_q3"]
    ratios = [(high[side] or 0.0) / (low[side] or 1.0) for side in results.sides]
    return max(*ratios, *(max(pairs) / min(pairs) for pairs in results.speedups.values())) > _SCATTER


def _loss_warnings(results: Results, tolerance: float, dropout: bool) -> list[str]:
    found = []
    gaps = results["max_loss_difference"]
    for side in results.sides[1:]:
        gap = gaps[side]
        assert gap is not None
        of = "" if len(results.sides) == 2 else f" of {side.replace('_', ', ')}"
        if math.isinf(gap):
            found.append(f"the losses{of} are not finite")
        elif gap > tolerance and not (dropout and (is_compiled(side) or is_captured(side))):
            sides = "the two sides" if not of else f"alone and{of.removeprefix(' of')}"
            found.append(f"the losses of {sides} differ by up to {gap:.3g}, more than the tolerance of {tolerance:g}")
            if gaps["alone"]:
                found[-1] += f" (two runs of the framework alone differ by up to {gaps['alone']:.3g})"
    return found


def _warnings(results: Results, by_side: dict[str, list[Run]]) -> list[str]:
    found = []
    counted = min(len(run.measured["loss"]) for runs in by_side.values() for run in runs) - results.warmup
    if counted < _FEW:
        epochs = "epoch of each run is" if counted == 1 else "epochs of each run are"
        found.append(f"{counted} {epochs} counted, few to tell a speedup from: take more, such as --epochs 50")
    if _scatters(results):
        found.append("the epoch times scatter widely, as on a busy machine: the speedup is no figure to rely on")
    for side in filter(is_accelerated, results.sides):
        who = "" if len(results.sides) == 2 else f"{side.replace('_', ', ')}: "
        if results["share_accelerated"][side] is None:
            found.append(f"{who}gnnaccel saw no message-passing call: nothing was accelerated")
        elif not results["calls_accelerated"][side]:
            found.append(f"{who}no message-passing call was accelerated")
        if is_captured(side) and not all(run.measured["capture_epochs"] for run in by_side[side]):
            why = [left.reason for left in results.left if left.side == side and left.kind.startswith(_CAPTURED)]
            found.append(f"{who}the step was not captured" + (f": {why[0]}" if why else ""))
    return found
