"""Bytes that training steps move to and from the GPU, rows as given and in communities (GNNAdvisor, Figure 12b).

    python benchmarks/dram.py --csv out.csv      # needs ncu (Nsight Compute) and leave to read the counters
    python benchmarks/dram.py --plot out.csv --out docs/figures/dram.svg      # a chart of the sums, without a GPU

One step each of the models of `advisor_studies.py renumbering`, kernel by kernel under ncu, which restores the memory
that a kernel changed but leaves the caches as the kernel before left them; clocks stay free.

- kernels: "all" of the step, torch's linear maps included, or "sums": gnnaccel's.
- read_mb, written_mb: dram__bytes_read.sum and dram__bytes_write.sum, in 10^6 bytes; relative: of both together, to
  rows as given.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import advisor_studies
import torch
from advisor import load
from timing import provenance, save_table, shown

import gnnaccel

COLUMNS = ("graph", "model", "order", "kernels", "read_mb", "written_mb", "relative")
ORDERS = {"as given": False, "communities": "communities"}
COUNTERS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARK = "spin_kernel"  # of torch.cuda._sleep


def cells(names: list[str]) -> Iterator[tuple[str, str, str]]:
    for name in names:
        for model in advisor_studies.MODELS:
            for order in ORDERS:
                yield name, model, order


def profiled(names: list[str]) -> None:
    """What ncu watches: of each cell one step, behind a mark."""
    for name, model, order in cells(names):
        graph = load(name)
        gnnaccel.prepare(graph, reorder=ORDERS[order])
        step = advisor_studies.training_step(graph, model, 512)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counted(names: list[str]) -> list[list[dict[str, str]]]:
    """ncu's lines of each cell."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--metrics", ",".join(COUNTERS), "--profile-from-start", "off"]
        command += ["--clock-control", "none", "--cache-control", "none"]
        command += [sys.executable, __file__, "--profiled", "--graphs", *names]
        status = subprocess.run(command).returncode
        lines = log.read_text().splitlines() if log.exists() else []
    table = [line for line in lines if line.startswith('"')]
    if status or len(table) < 3:
        raise SystemExit("\n".join([f"ncu counted nothing (exit code {status}):", *lines[-10:]]))
    steps: list[list[dict[str, str]]] = []
    for row in csv.DictReader([table[0], *table[2:]]):  # the second line has the units
        if MARK in row["Kernel Name"]:
            steps.append([])
        else:
            steps[-1].append(row)
    return steps


def plot(table: str, out: Path) -> None:
    lines = defaultdict(list)
    for row in advisor_studies.read_table(table):
        if row["kernels"] == "sums":
            lines[f"{row['graph']}, {row['model']}"].append((row["order"], float(row["relative"])))
    advisor_studies.chart(lines, "order of the rows", "bytes, relative to rows as given", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=advisor_studies.GRAPHS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    parser.add_argument("--plot", metavar="CSV", help="draw this table instead")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/dram.svg"))
    options = parser.parse_args()
    if options.plot:
        plot(options.plot, options.out)
        return
    if options.profiled:
        profiled(options.graphs)
        return
    if shutil.which("ncu") is None:
        parser.error("needs ncu (Nsight Compute) in PATH")
    head = provenance(options.commit)
    print(*head, sep="\n")
    steps = counted(options.graphs)
    rows = []
    first: dict[tuple, float] = {}
    for cell, step in zip(cells(options.graphs), steps, strict=True):
        sums = [row for row in step if "gnnaccel" in row["Kernel Name"]]
        for kernels, of in (("sums", sums), ("all", step)):
            read, written = (sum(float(row[counter].replace(",", "")) for row in of) / 1e6 for counter in COUNTERS)
            row = dict(zip(COLUMNS, (*cell, kernels, read, written), strict=False))
            row["relative"] = (read + written) / first.setdefault((*cell[:2], kernels), read + written)
            rows.append(shown(COLUMNS, row))
    if options.csv:
        save_table(options.csv, head, COLUMNS, rows)


if __name__ == "__main__":
    main()
