"""What could be tuned of sums on the CPU, beside what the kernels do: slices of features, and numbers of threads.

    python benchmarks/cpu_plans.py --csv out.csv
    python benchmarks/cpu_plans.py --graphs DATA/cora.npz arxiv-like --widths 64
    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 python benchmarks/cpu_plans.py --csv kept.csv

Sums of fp32 rows without weights, forward, on graphs of graphs.py and .npz files. Wall time, milliseconds: medians of
calls taken in turn. slices: the features cut into contiguous parts of so many, which are summed one after the other,
without the time of cutting; copied: with it, and with putting the results together; threads: with so many for torch.
gain: how many times as fast as the plain call. faults: pages that the system had to give during a call, median; by the
third command glibc keeps the memory of freed tensors, and there are next to none.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import graphs
import torch
from timing import provenance, save_table, shown

from gnnaccel import ops
from gnnaccel.graph.csr import Graph

GRAPHS = ("arxiv-like", "amazon0505-like", "blogcatalog-like")
SLICES = (32, 64, 128)
COLUMNS = ("graph", "nodes", "edges", "width", "way", "ms", "gain", "faults")


def load(name: str) -> Graph:
    if name.endswith(".npz"):
        return Graph.load(name)
    made = graphs.generate(name, device="cpu")
    return Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)


def sliced(graph: Graph, parts: list[torch.Tensor]) -> None:
    for part in parts:
        ops.spmm(graph, part)


def copied(graph: Graph, x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([ops.spmm(graph, part.contiguous()) for part in x.split(size, 1)], 1)


def threaded(graph: Graph, x: torch.Tensor, threads: int, usual: int) -> None:
    torch.set_num_threads(threads)
    try:
        ops.spmm(graph, x)
    finally:
        torch.set_num_threads(usual)


def ways(graph: Graph, width: int) -> dict[str, Callable[[], object]]:
    x, usual = torch.rand(graph.num_cols, width), torch.get_num_threads()
    found: dict[str, Callable[[], object]] = {"plain": functools.partial(ops.spmm, graph, x)}
    for size in SLICES:
        if size < width:
            parts = [part.contiguous() for part in x.split(size, 1)]
            found[f"slices of {size}"] = functools.partial(sliced, graph, parts)
            found[f"slices of {size} copied"] = functools.partial(copied, graph, x, size)
    threads = usual // 2
    while threads >= 1:
        found[f"threads {threads}"] = functools.partial(threaded, graph, x, threads, usual)
        threads //= 2
    return found


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure(graph: Graph, width: int, rounds: int) -> list[dict]:
    calls = ways(graph, width)
    times: dict[str, list[float]] = {way: [] for way in calls}
    faults: dict[str, list[int]] = {way: [] for way in calls}
    for _ in range(rounds + 1):  # the first is to warm up
        for way, call in calls.items():
            before, start = page_faults(), time.perf_counter()
            call()
            times[way].append((time.perf_counter() - start) * 1e3)
            faults[way].append(page_faults() - before)
    ms = {way: statistics.median(each[1:]) for way, each in times.items()}
    return [
        dict(width=width, way=way, ms=ms[way], gain=ms["plain"] / ms[way], faults=statistics.median(faults[way][1:]))
        for way in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py, or .npz files")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    options = parser.parse_args()
    head = provenance(options.commit, f"{torch.get_num_threads()} threads")
    print(*head, sep="\n")
    cells = []
    for name in options.graphs:
        graph = load(name)
        for width in options.widths:
            for row in measure(graph, width, options.rounds):
                row |= dict(graph=Path(name).stem, nodes=graph.num_rows, edges=graph.nnz)
                cells.append(shown(COLUMNS, row))
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
