"""The table of epochs.py: what its sides gave for each case, compared, as rows, as text and as geometric means."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

SMALL = 1_000_000  # edges of a small graph at most
LOSSES, LIMIT = 10, 1e-3  # first epochs whose losses are compared; the largest relative difference
TIMED_OUT = "timed out"
# Without the flag.
ALONE = {"flag": "pyg", "compiled-flag": "compiled", "csr-flag": "csr", "dgl-flag": "dgl", "modules-flag": "pyg"}
COLUMNS = (
    "graph", "nodes", "edges", "model", "side", "epoch_ms", "spread_ms", "iqr_ms", "of_pyg", "of_flag", "first_ms",
    "peak_mib", "loss", "loss_diff", "turns", "note",
)  # fmt: skip


@dataclass
class Case:
    """A model on a graph."""

    graph: str
    model: str
    path: str
    nodes: int
    edges: int

    @property
    def name(self) -> str:
        return f"{self.graph}/{self.model}"

    @property
    def small(self) -> bool:
        return self.edges <= SMALL


@dataclass
class Outcome:
    """What one side gave for one case: a figure for each turn, and why there are no more."""

    turns: list[dict] = field(default_factory=list)
    problem: str = ""
    loss_diff: float | None = None
    failed: bool = False

    @property
    def epoch_ms(self) -> float | None:
        return statistics.median(turn["epoch_ms"] for turn in self.turns) if self.turns else None


Outcomes = dict[tuple[str, str], Outcome]  # by side and name of the case


def judge(outcomes: Outcomes) -> list[str]:
    """Set loss_diff and failed of every outcome; lines that name the failures."""
    lines = []
    for (side, name), outcome in outcomes.items():
        base = outcomes.get(("pyg", name), Outcome())
        outcome.loss_diff = difference(outcome, base) if side != "pyg" else None
        reasons = []
        if outcome.loss_diff is not None and not outcome.loss_diff <= LIMIT:
            reasons.append(f"losses differ by {outcome.loss_diff:.2g}")
        alone = outcomes.get((ALONE.get(side, side), name), Outcome())
        if side in ALONE and outcome.problem and TIMED_OUT not in outcome.problem and not alone.problem:
            reasons.append(outcome.problem)
        outcome.failed = bool(reasons)
        lines += [f"{side} {name}: {reason}" for reason in reasons]
    return lines


def difference(outcome: Outcome, base: Outcome) -> float | None:
    """The largest relative difference of the losses of any turn from those of the base's first."""
    if not outcome.turns or not base.turns:
        return None
    found = [
        abs(mine - theirs) / abs(theirs)
        for turn in outcome.turns
        for mine, theirs in zip(turn["losses"], base.turns[0]["losses"], strict=False)
    ]
    return math.nan if any(map(math.isnan, found)) else max(found, default=None)


def over(outcome: Outcome, base: Outcome | None) -> float | None:
    mine, theirs = outcome.epoch_ms, base.epoch_ms if base else None
    return mine / theirs if mine and theirs else None


def table(outcomes: Outcomes, cases: list[Case]) -> list[dict]:
    """Rows, one for a side of a case."""
    rows = []
    for case in cases:
        for side in (side for side, name in outcomes if name == case.name):
            outcome = outcomes[side, case.name]
            row = {"graph": case.graph, "nodes": case.nodes, "edges": case.edges, "model": case.model, "side": side}
            row |= {"turns": len(outcome.turns), "note": ("FAILED " if outcome.failed else "") + outcome.problem}
            if outcome.turns:
                times, first = [turn["epoch_ms"] for turn in outcome.turns], outcome.turns[0]
                row |= {
                    "epoch_ms": outcome.epoch_ms,
                    "spread_ms": max(times) - min(times),
                    "iqr_ms": statistics.median(turn["iqr_ms"] for turn in outcome.turns),
                    "of_pyg": over(outcome, outcomes.get(("pyg", case.name))),
                    "of_flag": over(outcome, outcomes.get(("flag", case.name))),
                    "first_ms": first["first_ms"],
                    "peak_mib": first["peak_mib"],
                    "loss": first["losses"][-1] if first["losses"] else None,
                    "loss_diff": outcome.loss_diff,
                }
            rows.append(row)
    return rows


def show(rows: list[dict], sides: list[str]) -> None:
    """The table with a column for each side: ms (ratio to PyG alone, peak MiB)."""
    width = 24
    print("\nms an epoch (over PyG alone, peak MiB)")
    print(f"{'':28}", *(f"{side:{width}}" for side in sides))
    by_case: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = row["note"][: width - 1] or "-"
        if row["turns"]:
            ratio = f"{row['of_pyg']:.2f}x" if row["of_pyg"] else ""
            peak = f"{row['peak_mib']:.0f}" if row["peak_mib"] else ""
            inside = ", ".join(filter(None, (ratio, peak)))
            cell = f"{row['epoch_ms']:.3f} ({inside})" + (" FAILED" if row["note"].startswith("FAILED") else "")
        by_case.setdefault(f"{row['graph']}/{row['model']}", {})[row["side"]] = cell
    for name, cells in by_case.items():
        print(f"{name:28}", *(f"{cells.get(side, '-'):{width}}" for side in sides), flush=True)


def summary(outcomes: Outcomes, cases: list[Case], sides: list[str]) -> list[str]:
    """Geometric means over the small graphs, of each side over PyG alone, and of what else the flag is held to."""
    pairs = [(side, "pyg") for side in sides if side != "pyg"] + [
        ("flag", "compiled"), ("compiled-flag", "compiled"), ("compiled-flag", "flag"), ("dgl-flag", "flag"),
        ("modules-flag", "flag"), ("modules-flag", "compiled"), ("modules-flag", "captured-flag"),
    ]  # fmt: skip
    lines = []
    for side, base in pairs:
        ratios = {}
        for case in (case for case in cases if case.small):
            if (ratio := over(outcomes.get((side, case.name), Outcome()), outcomes.get((base, case.name)))) is not None:
                ratios[case.name] = ratio
        if ratios:
            worst = max(ratios, key=lambda name: ratios[name])
            above = sum(ratio > 1 for ratio in ratios.values())
            lines.append(
                f"{side} over {base}, small graphs: {statistics.geometric_mean(ratios.values()):.3f}x in geometric "
                f"mean of {len(ratios)}, {min(ratios.values()):.2f} to {ratios[worst]:.2f} ({worst}), {above} above 1"
            )
    return lines
