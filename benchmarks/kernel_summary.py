"""Tables of the figures that cuda_kernels.py measured, beside the recorded ones of public kernels.

    python benchmarks/kernel_summary.py out.csv        # prints the summary of a file again

recorded.csv: the fastest public kernels, measured once on an H200 (fp32; several rows may name one cell).
gather_ceiling.csv: rate at which that GPU gathers random rows, by the size of the table and of a row.
"""

from __future__ import annotations

import bisect
import csv
import functools
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).parent
# Column of a peer: what it is called.
PEERS = {
    "cusparse_alg2_ms": "cuSPARSE ALG2",
    "cusparse_alg3_ms": "cuSPARSE ALG3",
    "cusparse_sddmm_ms": "cuSPARSE SDDMM",
    "torch_sparse_ms": "torch.sparse",
    "pyg_ms": "PyG's path",
}
NAMES = ("graph", "op", "dtype", "recorded_kernel", "best_kernel")
COLUMNS = ("graph", "nodes", "edges", "checksum", "op", "width", "dtype", "gnnaccel_ms", "spread_ms", "rel_error",
           "list_cost_ms", "prepared_ms", "prepare_cost_ms", "fp32_ms", *PEERS, "recorded_ms", "recorded_kernel",
           "best_ms", "best_kernel", "vs_best", "prepared_vs_best", "ceiling_ms", "ceiling_fraction")  # fmt: skip


def read_csv(path: Path | str) -> list[dict]:
    """Rows of a table, numbers as floats and empty cells as None; lines that begin with # are left out."""
    with open(path, newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    named = {*NAMES, "kernel"}
    return [
        {key: None if value == "" else value if key in named else float(value) for key, value in row.items()}
        for row in csv.DictReader(lines)
    ]


def write_csv(path: str, head: list[str], rows: list[dict]) -> None:
    """The table, with its provenance on top."""

    def show(key, value):
        return f"{value:.4g}" if isinstance(value, float) else value

    with open(path, "w", newline="") as file:
        file.write("\n".join(head) + "\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: show(key, value) for key, value in row.items()} for row in rows)


@functools.cache
def recorded() -> dict[tuple, tuple[float, str]]:
    """(graph, op, width) -> time and name of the fastest public kernel on record."""
    best: dict[tuple, tuple[float, str]] = {}
    for row in read_csv(HERE / "recorded.csv"):
        cell = (row["graph"], row["op"], int(row["width"]))
        best[cell] = min(best.get(cell, (math.inf, "")), (row["ms"], row["kernel"]))
    return best


@functools.cache
def _rates() -> dict[float, dict[float, float]]:
    """Row bytes -> table size in MB -> GB/s."""
    rates: dict[float, dict[float, float]] = {}
    for row in read_csv(HERE / "gather_ceiling.csv"):
        rates.setdefault(row["row_bytes"], {})[row["table_mb"]] = row["gb_per_s"]
    return rates


def _interpolate(points: dict[float, float], at: float) -> float:
    """Linear in the logarithm of the key; the nearest value outside the range."""
    keys = sorted(points)
    at = min(max(at, keys[0]), keys[-1])
    right = max(1, bisect.bisect_left(keys, at))
    low, high = keys[right - 1], keys[right]
    share = math.log(at / low) / math.log(high / low)
    return points[low] + share * (points[high] - points[low])


def ceiling_ms(nnz: int, num_cols: int, width: int, value_bytes: int = 4) -> float:
    """Time to gather one row of a [num_cols, width] table for each nonzero, at the rate measured for random rows.

    A kernel can be faster: by reading a row once for several nonzeros, out of L1, L2 or shared memory.
    """
    row_bytes = width * value_bytes
    table_mb = num_cols * row_bytes / 1e6
    rate = _interpolate({size: _interpolate(points, table_mb) for size, points in _rates().items()}, row_bytes)
    return nnz * row_bytes / rate / 1e6


def complete(row: dict, on_record: bool = True) -> dict:
    """`row` with all columns: what is on record (of the graphs in full size), best public time, ratios, ceiling."""
    row = {**dict.fromkeys(COLUMNS), **row}
    if row["op"] == "minibatch":
        return row
    own, half = row["gnnaccel_ms"], row["dtype"] == "bfloat16"
    row["ceiling_ms"] = ceiling_ms(row["edges"], row["nodes"], row["width"], 2 if half else 4)
    row["ceiling_fraction"] = row["ceiling_ms"] / own
    if half:  # the public figures are fp32
        return row
    public = [(row[key], name) for key, name in PEERS.items() if row[key] is not None]
    cell = (row["graph"], row["op"], row["width"])
    if on_record and cell in recorded():
        row["recorded_ms"], row["recorded_kernel"] = recorded()[cell]
        public.append((row["recorded_ms"], row["recorded_kernel"] + ", recorded"))
    if public:
        row["best_ms"], row["best_kernel"] = min(public)
        row["vs_best"] = row["best_ms"] / own
        if row["prepared_ms"] is not None:
            row["prepared_vs_best"] = row["best_ms"] / row["prepared_ms"]
    return row


def _geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _table(rows: list[dict], own: str, over: str, cost: bool) -> list[str]:
    """A line per graph: of each width the time, how many times faster than `over`, the fraction of the ceiling."""
    widths = sorted({row["width"] for row in rows})
    cells = {(row["graph"], row["width"]): row for row in rows}
    costs = {row["graph"]: row["prepare_cost_ms"] for row in rows}
    first = f"{'graph':22s}" + (f"{'cost ms':>9s}" if cost else "")
    lines = [first + "".join(f"{f'D={width:g}':>15s}{'':6s}" for width in widths)]
    for graph in costs:
        line = f"{graph:22s}" + (f"{costs[graph]:9.4g}" if cost else "")
        for width in widths:
            row = cells.get((graph, width))
            if row is None or row[own] is None:
                line += f"{'-':>9s}{'':12s}"
                continue
            ratio = "-" if row[over] is None else f"{row[over] / row[own]:.2f}x"
            line += f"{row[own]:9.4g}{ratio:>7s}{row['ceiling_ms'] / row[own]:5.0%}"
        lines.append(line)
    return lines


def _figures(rows: list[dict], own: str, over: str, over_name: str) -> list[str]:
    """Geometric means, the worst cell, and the fraction of the ceiling."""

    def ratios(key: Callable[[dict], float | None]) -> list[tuple[float, dict]]:
        return [(value / row[own], row) for row in rows if (value := key(row)) is not None]

    def cell(row: dict) -> str:
        return f"{row['graph']} D={row['width']:g}"

    lines = []
    main = ratios(lambda row: row[over])
    if main:
        low, row = min(main, key=lambda pair: pair[0])
        won = sum(ratio >= 1 for ratio, _ in main)
        lines.append(f"geomean over {over_name}: {_geomean(r for r, _ in main):.3f}x ({won} of {len(main)} cells won)")
        against = f" ({row['best_kernel']})" if over == "best_ms" else ""
        lines.append(f"worst cell: {low:.3f}x, {cell(row)}: {row[own]:.4g} ms against {row[over]:.4g}{against}")
    groups = {"cuSPARSE": [key for key in PEERS if key.startswith("cusparse")]}
    groups |= {"torch.sparse": ["torch_sparse_ms"], "PyG's path": ["pyg_ms"]}
    groups["the kernels on record"] = ["recorded_ms"]
    parts = []
    for name, keys in groups.items():
        fastest = [min((row[k] for k in keys if row[k] is not None), default=None) for row in rows]
        found = [time / row[own] for time, row in zip(fastest, rows, strict=True) if time is not None]
        if found:
            parts.append(f"{name} {_geomean(found):.2f}x ({len(found)})")
    if parts:
        lines.append("geomean (cells) over " + ", ".join(parts))
    ceiling = ratios(lambda row: row["ceiling_ms"])
    if ceiling:
        low, row = min(ceiling, key=lambda pair: pair[0])
        lines.append(f"fraction of the gather ceiling: geomean {_geomean(r for r, _ in ceiling):.1%}, "
                     f"lowest {low:.0%} ({cell(row)})")  # fmt: skip
    return lines


def summary(rows: list[dict]) -> list[str]:
    """What to print last: a table for each op, with the figures that matter below it."""
    lines = []
    for op in ("spmm", "sddmm"):
        for dtype in ("float32", "bfloat16"):
            some = [row for row in rows if row["op"] == op and row["dtype"] == dtype]
            over, name = ("best_ms", "the best public kernel") if dtype == "float32" else ("fp32_ms", "our own fp32")
            for own, what in (("gnnaccel_ms", "ours"), ("prepared_ms", "ours, prepared")):
                kept = [row for row in some if row[own] is not None]
                if kept:
                    lines.append(f"\n{op}, {dtype}, {what}: ms, times faster than {name}, part of the gather ceiling")
                    lines += _table(kept, own, over, cost=own == "prepared_ms")
                    lines += _figures(kept, own, over, name)
    for row in rows:
        if row["op"] == "minibatch":
            alone = row["pyg_ms"]
            beside = "" if alone is None else f", PyG's path {alone:.4g} ms: {alone / row['gnnaccel_ms']:.2f}x"
            size = f"{row['nodes']:g} nodes and {row['edges']:g} edges in the median"
            lines.append(f"\nmini-batch step, forward and backward, from {row['graph']}, D={row['width']:g} ({size}):")
            lines.append(f"ours {row['gnnaccel_ms']:.4g} ms (spread {row['spread_ms']:.2g}){beside}")
    return lines


if __name__ == "__main__":
    print("\n".join(summary(read_csv(sys.argv[1]))))
