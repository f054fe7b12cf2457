"""Tables of grid.py: joined, summed up with their worst cells, compared."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

COLUMNS = ("graph", "nodes", "edges", "op", "width", "rel_error", "given_ms", "prepared_ms", "best_ms", "best_peer",
           "vs_best", "prepared_vs_given")  # fmt: skip
SLOWER, WORSE = 1.03, 1.02  # than a peer or before; than as given
RESOLUTION_MS = 0.0005  # of CUDA's events: a difference of less says nothing
RESULTS = Path(__file__).resolve().parent / "results"
Cell = tuple[str, str, str]
Cells = dict[Cell, dict[str, str]]


def read(path: str | Path) -> tuple[list[str], Cells]:
    """Lines of comment, and rows by graph, op and width."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return [line for line in lines if line.startswith("#")], {(r["graph"], r["op"], r["width"]): r for r in rows}


def gpu(head: Sequence[str]) -> str:
    """The GPU that the lines name."""
    return head[0].removeprefix("# ").partition(",")[0]


def committed(like: str | Path) -> Path:
    """The committed table of the GPU of another.

    Raises
    ------
    ValueError
        Where there is none.
    """
    name = gpu(read(like)[0])
    tables = {gpu(read(path)[0]): path for path in sorted(RESULTS.glob("grid_h?00.csv"))}
    if name not in tables:
        raise ValueError(f"{like}: no table of {name}, but of {', '.join(tables)}: name an older one first")
    return tables[name]


def join(paths: Iterable[str | Path]) -> tuple[list[str], Cells]:
    """Tables as one; cells of later ones stand for those of earlier ones.

    Raises
    ------
    ValueError
        Where they are of different GPUs.
    """
    lines: list[str] = []
    cells: Cells = {}
    for path in paths:
        head, found = read(path)
        if lines and gpu(head) != gpu(lines):
            raise ValueError(f"{path}: expected a table of {gpu(lines)}, got one of {gpu(head)}")
        lines += [line for line in head if line not in lines]
        cells |= found
    return lines, cells


def write(path: str | Path, head: Sequence[str], cells: Cells) -> None:
    """A table that `read` reads."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in head)
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(cells.values())


def gains(cells: Cells, column: str, op: str | None = None) -> dict[Cell, float]:
    """What a column says, of the cells that have it, least first."""
    found = {cell: float(row[column]) for cell, row in cells.items() if row[column] and op in (None, cell[1])}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def worst(cells: Cells, ops: Sequence[str], count: int = 12) -> list[str]:
    """Geometric means by op, and the cells in which ours gains least."""
    lines = []
    for op in ops:
        found = gains(cells, "vs_best", op)
        if found:
            slower = sum(gain * SLOWER < 1 for gain in found.values())
            mean = statistics.geometric_mean(found.values())
            lines.append(f"{op:10s} {mean:6.2f}x of the best peer in {len(found)} cells, slower in {slower}")
    for column, title in (("vs_best", "least beside peers"), ("prepared_vs_given", "least by an order")):
        found = gains(cells, column)
        lines += [f"{title}, of {len(found)} cells:"] if found else []
        lines += [f"  {gain:5.2f}x {' '.join(cell)}" for cell, gain in list(found.items())[:count]]
    return lines


def compare(before: str | Path, after: str | Path) -> list[str]:
    """The cells of `after` that are slower than in `before`, worst first.

    Raises
    ------
    ValueError
        Where the tables are of different GPUs, or have no cell in common.
    """
    (old_head, old), (new_head, new) = read(before), read(after)
    both = [cell for cell in old if cell in new]
    if gpu(old_head) != gpu(new_head) or not both:
        raise ValueError(f"{after}: expected cells of {gpu(old_head)} as in {before}, got {gpu(new_head)}")
    slower, ratios = [], []
    for cell in both:
        for column in ("given_ms", "prepared_ms"):
            was, now = old[cell][column], new[cell][column]
            if was and now:
                ratios.append(float(now) / float(was))
                if ratios[-1] > SLOWER and float(now) - float(was) > RESOLUTION_MS:
                    slower.append((ratios[-1], f"{ratios[-1]:5.2f}x {' '.join(cell)} {column}: {was} -> {now}"))
    print(f"{len(both)} cells in both, {len(new) - len(both)} new, {len(old) - len(both)} not measured again; times "
          f"{statistics.median(ratios):.3f} of those before in the median")  # fmt: skip
    lines = [line for _, line in sorted(slower, reverse=True)]
    print("\n".join([*lines, f"{len(lines)} of {len(ratios)} times slower by more than {SLOWER - 1:.0%}"]))
    return lines
