"""What the blocks of summary.py are made with: tables read, cells and tables of Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Rows = list[dict[str, str]]


def read(name: str) -> tuple[list[str], Rows]:
    """Head lines without their "# ", and rows, of a table."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    return head, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def source(name: str, *more: int) -> list[str]:
    """Where a table comes from: its file, its first two head lines (machine, commit, command) and those numbered."""
    head, _ = read(name)
    command = f"`{head[1]}`" if head[1].startswith(("python", "taskset")) else head[1]
    picked = [head[0], command, *(head[number] for number in more)]
    return ["", f"`benchmarks/results/{name}`: {'; '.join(picked)}."]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]


def short(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pair(alone: float, ours: float) -> str:
    """Two times and how many times faster the second is."""
    return f"{short(alone)} / {short(ours)} ({alone / ours:.{1 if alone >= 10 * ours else 2}f}x)"


def edges(row: dict[str, str]) -> str:
    count = int(row["edges"])
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def cell(rows: Rows, alone: str, ours: str, **wanted: str) -> str:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return pair(float(found[0][alone]), float(found[0][ours])) if found else ""


def epochs_cell(rows: Rows, side: str, over: str, **wanted: str) -> str:
    """The time of a side and how many times faster than another it is."""
    times = {row["side"]: float(row["epoch_ms"]) for row in rows if all(row[k] == v for k, v in wanted.items())}
    if side not in times or over not in times:
        return ""
    ratio = "" if side == over else f" ({times[over] / times[side]:.{1 if times[over] >= 10 * times[side] else 2}f}x)"
    return short(times[side]) + ratio


def unique(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
