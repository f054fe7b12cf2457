"""How results are shown and saved: a table for the terminal, CSV and JSON files, a chart."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gnnaccel.cli.results import SIDES, Figure, Results, Run

_PIPE_WIDTH = 160  # nothing is cut off where there is no terminal to be as wide as

_LABEL_WIDTH = 60


def console() -> Console:
    """Standard output; text without markup, and without colour or frames where it is no terminal."""
    wide = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=wide, markup=False, highlight=False, emoji=False)


def number(value: float | None, unit: str = "") -> str:
    """A figure as the table shows it: four digits, whole numbers as they are, nothing for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if unit == "MiB":
        return f"{value:.1f}"
    return f"{value:.0f}" if value == int(value) and not unit else f"{value:.4g}"


def _row(figure: Figure) -> tuple[str, ...]:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}x"
    if figure.key == "share_accelerated":
        return figure.label, "", "" if figure.gnnaccel is None else f"{figure.gnnaccel:.1%}", ratio
    label = f"{figure.label} [{figure.unit}]" if figure.unit else figure.label
    return label, number(figure.alone, figure.unit), number(figure.gnnaccel, figure.unit), ratio


def show(results: Results, title: str, alone: str, notes: list[str]) -> None:
    """Print the table, the calls left with their reasons, warnings and notes."""
    out = console()
    frame = box.ROUNDED if sys.stdout.isatty() else box.ASCII
    table = Table(title=title, title_justify="left", box=frame)
    table.add_column("", max_width=_LABEL_WIDTH)  # a warning is broken into lines
    for name in (alone, "with gnnaccel", "ratio"):
        table.add_column(name, justify="right")
    for figure in results.figures:
        table.add_row(*_row(figure))
    for warning in results.warnings:
        table.add_row(f"WARNING: {warning}", "", "", "", style="bold red")
    out.print(table)
    for kind, reason, calls in results.left:
        out.print(f"left to the framework: {calls}x {kind}: {reason}", soft_wrap=True)
    for note in notes:
        out.print(f"note: {note}", soft_wrap=True)


def save_results(path: Path, results: Results) -> None:
    """The table as CSV: figure, unit, alone, gnnaccel, ratio; then a row per warning and per reason of calls left."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("figure", "unit", *SIDES, "ratio", "text"))
        for figure in results.figures:
            writer.writerow((figure.key, figure.unit, figure.alone, figure.gnnaccel, figure.ratio, ""))
        for warning in results.warnings:
            writer.writerow(("warning", "", "", "", "", warning))
        for kind, reason, calls in results.left:
            writer.writerow(("left_to_framework", "", "", calls, "", f"{kind}: {reason}"))


def save_epochs(path: Path, runs: list[Run], warmup: int) -> None:
    """Each epoch of each run as CSV."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("pair", "side", "epoch", "warmup", "time_ms", "loss"))
        for run in runs:
            curves = zip(run.measured["epoch_time_ms"], run.measured["loss"], strict=True)
            for epoch, (time_ms, loss) in enumerate(curves, start=1):
                writer.writerow((run.pair + 1, run.side, epoch, int(epoch <= warmup), time_ms, loss))


def save_chart(path: Path, runs: list[Run], results: Results, title: str, alone: str) -> None:
    """Epoch times and losses of every run, as PNG."""
    from matplotlib.figure import Figure as Canvas  # no pyplot: no window system is asked for

    names, colours = (
        dict(zip(SIDES, (alone, "with gnnaccel"), strict=True)),
        dict(zip(SIDES, ("C1", "C0"), strict=True)),
    )
    canvas = Canvas(figsize=(10, 4), layout="constrained")
    axes: Any = canvas.subplots(1, 2)
    times, losses = axes
    for side in SIDES:
        for nth, run in enumerate(run for run in runs if run.side == side):
            epochs = range(1, len(run.measured["loss"]) + 1)
            look: dict[str, Any] = {"color": colours[side], "linewidth": 1, "marker": "." if len(epochs) < 10 else ""}
            dashed = "--" if side == "gnnaccel" else "-"  # the losses lie on one another
            label = None if nth else names[side]
            times.plot(epochs, run.measured["epoch_time_ms"], label=label, **look)
            losses.plot(epochs, run.measured["loss"], label=label, linestyle=dashed, **look)
    counted = [time for run in runs for time in run.measured["epoch_time_ms"][results.warmup :]]
    times.set_ylim(0, 1.1 * max(counted))
    if results.warmup:
        times.axvspan(0.5, results.warmup + 0.5, color="0.9", label="warm-up, not counted")
    median = results["epoch_time_median"]
    times.set(
        xlabel="epoch", ylabel="epoch time [ms]", title=f"medians {median.alone:.3g} and {median.gnnaccel:.3g} ms"
    )
    gap = results["max_loss_difference"].gnnaccel
    losses.set(xlabel="epoch", ylabel="training loss", title=f"largest difference {number(gap)}")
    for one in axes:
        one.xaxis.get_major_locator().set_params(integer=True)
    times.legend()
    losses.legend()
    canvas.suptitle(title)
    canvas.savefig(path, dpi=120)
