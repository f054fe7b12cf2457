"""How results are shown and saved: a table for the terminal, CSV and JSON files, a chart."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gnnaccel.cli.results import SIDES, Figure, Results, Run, is_accelerated

_PIPE_WIDTH = 200  # nothing is cut off where there is no terminal to be as wide as
_LABEL_WIDTH = 60
# Of Okabe and Ito, which people who see few colours tell apart.
COLOURS = dict(zip(SIDES, ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73"), strict=True))


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
    whole = (value == int(value) and not unit) or (unit == "ms" and value >= 1000)
    return f"{value:.0f}" if whole else f"{value:.4g}"


def _cell(figure: Figure, side: str) -> str:
    value = figure[side]
    if figure.key == "share_accelerated":
        return "" if value is None else f"{value:.1%}"
    return number(value, figure.unit)


def _row(figure: Figure, sides: tuple[str, ...]) -> tuple[str, ...]:
    label = f"{figure.label} [{figure.unit}]" if figure.unit else figure.label
    cells = [_cell(figure, side) for side in sides]
    ratios = [f"{figure.ratios[side]:.2f}x" if side in figure.ratios else "" for side in sides]
    if len(sides) == 2:
        return label, *cells, ratios[1]
    return label, *(f"{cell} ({ratio})" if ratio else cell for cell, ratio in zip(cells, ratios, strict=True))


def show(results: Results, title: str, names: Mapping[str, str], notes: list[str]) -> None:
    """Print the table, the calls left with their reasons, warnings and notes. names: of the columns, by side."""
    out = console()
    frame = box.ROUNDED if sys.stdout.isatty() else box.ASCII
    table = Table(title=title, title_justify="left", box=frame)
    table.add_column("", max_width=_LABEL_WIDTH)  # a warning is broken into lines
    columns = [names[side] for side in results.sides]
    for name in [*columns, "ratio"] if len(columns) == 2 else columns:
        table.add_column(name, justify="right")
    for figure in results.figures:
        table.add_row(*_row(figure, results.sides))
    for warning in results.warnings:
        table.add_row(f"WARNING: {warning}", style="bold red")
    out.print(table)
    for left in results.left:
        of = f" ({names[left.side]})" if len(results.sides) > 2 else ""
        out.print(f"left to the framework{of}: {left.calls}x {left.kind}: {left.reason}", soft_wrap=True)
    for note in notes:
        out.print(f"note: {note}", soft_wrap=True)


def ratio_column(side: str) -> str:
    """The column of CSV files that has alone / side."""
    return "ratio" if side == "gnnaccel" else f"ratio_{side}"


def save_results(path: Path, results: Results) -> None:
    """The table as CSV: figure, unit, the sides, their ratios, text; a row per warning and per reason of calls left."""
    sides = results.sides
    columns = ("figure", "unit", *sides, *map(ratio_column, sides[1:]), "text")
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for figure in results.figures:
            row: dict[str, Any] = {"figure": figure.key, "unit": figure.unit}
            row |= {side: figure[side] for side in sides}
            row |= {ratio_column(side): ratio for side, ratio in figure.ratios.items()}
            writer.writerow(row)
        for warning in results.warnings:
            writer.writerow({"figure": "warning", "text": warning})
        for left in results.left:
            text = f"{left.kind}: {left.reason}"
            writer.writerow({"figure": "left_to_framework", left.side: left.calls, "text": text})


def save_epochs(path: Path, runs: list[Run], warmup: int) -> None:
    """Each epoch of each run as CSV."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("pair", "side", "epoch", "warmup", "time_ms", "loss"))
        for run in runs:
            curves = zip(run.measured["epoch_time_ms"], run.measured["loss"], strict=True)
            for epoch, (time_ms, loss) in enumerate(curves, start=1):
                writer.writerow((run.pair + 1, run.side, epoch, int(epoch <= warmup), time_ms, loss))


def draw_runs(
    times: Any, losses: Any, runs: Sequence[Run], sides: Sequence[str], warmup: int, names: Mapping[str, str]
) -> None:
    """Draw epoch times and losses of every run into two axes of matplotlib."""
    for side in sides:
        for nth, run in enumerate(run for run in runs if run.side == side):
            epochs = range(1, len(run.measured["loss"]) + 1)
            look: dict[str, Any] = {"color": COLOURS[side], "linewidth": 1, "marker": "." if len(epochs) < 10 else ""}
            dashed = "--" if is_accelerated(side) else "-"  # the losses lie on one another
            label = None if nth else names[side]
            times.plot(epochs, run.measured["epoch_time_ms"], label=label, **look)
            losses.plot(epochs, run.measured["loss"], label=label, linestyle=dashed, **look)
    counted = [time for run in runs for time in run.measured["epoch_time_ms"][warmup:]]
    times.set_ylim(0, 1.1 * max(counted))
    if warmup:
        times.axvspan(0.5, warmup + 0.5, color="0.9", label="warm-up, not counted")
    times.set(xlabel="epoch", ylabel="epoch time [ms]")
    losses.set(xlabel="epoch", ylabel="training loss")
    for one in (times, losses):
        one.xaxis.get_major_locator().set_params(integer=True)
        one.legend()


def save_chart(path: Path, runs: list[Run], results: Results, title: str, names: Mapping[str, str]) -> None:
    """Epoch times and losses of every run, as PNG."""
    from matplotlib.figure import Figure as Canvas  # no pyplot: no window system is asked for

    canvas = Canvas(figsize=(10, 4), layout="constrained")
    axes: Any = canvas.subplots(1, 2)
    draw_runs(axes[0], axes[1], runs, results.sides, results.warmup, names)
    medians = " and ".join(f"{results['epoch_time_median'][side]:.3g}" for side in results.sides)
    axes[0].set_title(f"medians {medians} ms")
    gaps = " and ".join(number(results["max_loss_difference"][side]) for side in results.sides[1:])
    axes[1].set_title(f"largest difference {gaps}")
    canvas.suptitle(title)
    canvas.savefig(path, dpi=120)
