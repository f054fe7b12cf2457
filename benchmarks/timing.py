"""What the CUDA benchmarks share: device times, a sample of rows to check results on, where the figures come from."""

from __future__ import annotations

import csv
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph

HEAD_START = 300_000  # GPU cycles per call that the host gets to queue it, about 0.15 ms


def time_ms(function: Callable, budget_ms: float = 150.0, at_least: int = 7, at_most: int = 200) -> tuple[float, float]:
    """Median and interquartile range of single calls, in device time. Without a GPU, a dry run: wall time of one."""
    function()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3, 0.0
    estimate = float(_single_calls(function, 2).min())
    times = _single_calls(function, max(at_least, min(at_most, int(budget_ms / max(estimate, 1e-3)))))
    low, middle, high = times.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return middle, high - low


def _single_calls(function: Callable, count: int) -> Tensor:
    """Time of each of `count` calls."""
    cycles = HEAD_START * count
    best = None
    for attempt in range(3):
        # The device waits while the host queues the calls: what is timed is the device's work, not Python's.
        torch.cuda._sleep(cycles)
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in marks:
            begin.record()
            function()
            end.record()
        in_time = not marks[0][0].query()
        torch.cuda.synchronize()
        times = torch.tensor([a.elapsed_time(b) for a, b in marks])
        if in_time:
            return times
        # The device began before all was queued, and may have waited for the host inside a call. Calls that are long
        # both times hide that: the host is ahead again after the first.
        best = times if best is None or times.median() < best.median() else best
        if attempt and float(best.median()) > 0.5:
            break
        cycles *= 5
    return best


def median_ms(functions: Sequence[Callable], calls: int | None = None) -> list[float]:
    """Median device time of each of `functions`, called in turns, as `time_ms` but in less time: of as many calls as
    take about 5 ms, 3 to 15. Without a GPU, a dry run: wall time of one.
    """
    turns = itertools.cycle(functions)
    for _ in functions:
        next(turns)()
    if not torch.cuda.is_available():
        return [time_ms(function)[0] for function in functions]
    each = len(functions)
    if calls is None:
        longest = float(_single_calls(lambda: next(turns)(), each).max())
        calls = max(3, min(15, int(5 / max(longest, 1e-3))))
    times = _single_calls(lambda: next(turns)(), calls * each)
    return [float(times[i::each].median()) for i in range(each)]


def peer_ms(function: Callable) -> float | None:
    """Median time of a peer, or None if it cannot run."""
    try:
        return time_ms(function)[0]
    except RuntimeError as error:  # out of memory and no such op are RuntimeErrors
        left_out(error)
        return None


def left_out(error: BaseException | str) -> None:
    """Say on stderr why a peer has no figure, and give back the memory it took."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    print(f"  (peer left out: {first[:110]})", file=sys.stderr, flush=True)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sample(graph: Graph, count: int = 500) -> tuple[Graph, Tensor, Tensor]:
    """A few rows, the longest among them, as a graph of their own; their numbers; their nonzeros."""
    degree = graph.indptr.diff().long()
    picks = torch.randint(graph.num_rows, (count,), device=graph.device)
    rows = torch.cat([degree.argmax().view(1), picks]).unique()
    indptr = torch.cat([rows.new_zeros(1), degree[rows].cumsum(0)])
    inside = torch.arange(int(indptr[-1]), device=graph.device) - indptr[:-1].repeat_interleave(degree[rows])
    nonzeros = graph.indptr.long()[rows].repeat_interleave(degree[rows]) + inside
    return Graph(indptr, graph.indices[nonzeros].long(), None, graph.num_cols), rows, nonzeros


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where a result has one."""
    if got.shape != want.shape:
        raise RuntimeError(f"expected a result of shape {tuple(want.shape)}, got {tuple(got.shape)}")
    return float((got.double() - want).norm() / want.norm())


def error_of(got: Tensor, want: Tensor, limit: float = 1e-5) -> float:
    """Relative error in the Frobenius norm; a result that is wrong ends the benchmark."""
    error = relative_error(got, want)
    if not error < limit:
        raise SystemExit(f"wrong result: relative error {error}")
    return error


def provenance(commit: str | None = None, *notes: str) -> list[str]:
    """Comment lines that say where the numbers come from."""
    commit = commit or _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    where = "no GPU"
    if torch.cuda.is_available():
        driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        where = f"{torch.cuda.get_device_name()}, driver {driver}"
    glibc = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")]
    notes += (" ".join(glibc),) if glibc else ()
    return [
        f"# {where}, torch {torch.__version__}, commit {commit}",
        f"# python {' '.join(a if '/' not in a or a == sys.argv[0] else a.rpartition('/')[2] for a in sys.argv)}",
        *(f"# {note}" for note in notes),
    ]


def clocks_under_load() -> str:
    """Clocks while the GPU copies memory, and how fast it does: a GPU that is throttled or shared shows here."""
    if not torch.cuda.is_available():
        return "dry run without a GPU: times mean nothing"
    source = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = time_ms(lambda: target.copy_(source), 50)[0]
    for _ in range(int(500 / copy_ms)):  # half a second of work, queued ahead
        target.copy_(source)
    clocks = _first_line("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader")
    torch.cuda.synchronize()
    return f"clocks while copying (SM, memory): {clocks}; copy {2 * source.numel() / copy_ms / 1e6:.0f} GB/s"


def _first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def short(value):
    """A cell of a table: four digits of a float, nothing for None."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else value


def shown(columns: Sequence[str], row: dict) -> list:
    """The cells of a row of a table, printed as they come."""
    cells = [short(row.get(column)) for column in columns]
    print(*(f"{column}={cell}" for column, cell in zip(columns, cells, strict=True) if cell != ""), flush=True)
    return cells


def save_table(path: str, head: list[str], columns: Sequence[str], rows: list[list]) -> None:
    """Write CSV with lines of comment before it."""
    with open(path, "w", newline="") as file:
        file.writelines(line + "\n" for line in head)
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])
