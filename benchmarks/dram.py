"""What sums of rows read from the GPU's memory, and write, by its counters (GNNAdvisor's Figure 12b, and 12c).

    python benchmarks/dram.py --csv out.csv
    python benchmarks/dram.py --graphs reddit-like --widths 64

Needs Nsight Compute (`ncu`), under which it starts itself. Sums of fp32 rows with one weight per edge, forward, on
prepared graphs of graphs.py whose nodes have scattered numbers, megabytes of all kernels of one call; ncu empties the
caches before each kernel.

- given: rows as they lie. communities: `gnnaccel.prepare(graph, reorder="communities")`, features where they are.
  renumbered: the graph of `gnnaccel.renumber`, its features moved.
- one worker, blocks: neighbour groups of 32 in blocks of one worker, which is without a leader and shared memory, and
  of 256 threads.
- least_mb: every array once: row pointers, edges, weights, features of the sources that occur, results.

relative: all bytes, to given, or to one worker.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from groups import Cell
from renumber import generated
from timing import provenance, save_table, shown

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.groups import Setting
from gnnaccel.graph.structure import Graph

GRAPHS = ("amazon0505-like", "artist-like", "blogcatalog-like", "proteins-like", "reddit-like")
COLUMNS = ("graph", "width", "way", "read_mb", "written_mb", "least_mb", "relative")
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
FIRSTS = {"given": "given", "communities": "given", "renumbered": "given", "one worker": "one worker",
          "blocks": "one worker"}  # fmt: skip


def ways(given: Graph, width: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls to look at, one after another, so that only one has its lists and features on the GPU."""
    x, weight = torch.rand(given.num_cols, width, device="cuda"), torch.rand(given.nnz, device="cuda")
    for way in ("given", "communities"):
        graph = Graph(given.indptr, given.indices, given.edge_ids, given.num_cols)
        gnnaccel.prepare(graph, transposed=False, reorder="communities" if way == "communities" else False)
        yield way, functools.partial(ops.spmm, graph, x, weight)
    moved, numbers = gnnaccel.renumber(given)
    gnnaccel.prepare(moved, transposed=False, reorder=False)
    yield "renumbered", functools.partial(ops.spmm, moved, numbers.features(x), numbers.edges(weight))
    cell, lanes = Cell(given, width), 16
    for way, threads in (("one worker", lanes), ("blocks", 256)):
        yield way, cell.call(cell.groups(Setting(32, threads, lanes)))


def least(graph: Graph, width: int) -> int:
    row_bytes = 4 * width
    pointers = (graph.num_rows + 1 + graph.nnz) * graph.indices.element_size()
    return pointers + 4 * graph.nnz + row_bytes * (graph.indices.unique().numel() + graph.num_rows)


def run_all(names: list[str], widths: list[int]) -> None:
    """Under ncu: each call twice, the second in a range that is counted."""
    for name in names:
        graph = generated(name, "cuda")
        for width in widths:
            print(f"least\t{name}\t{width}\t{least(graph, width)}", file=sys.stderr, flush=True)
            for way, call in ways(graph, width):
                call()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                with torch.cuda.nvtx.range(f"{name}|{width}|{way}"):
                    call()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()


def counted(names: list[str], widths: list[int]) -> tuple[dict, dict]:
    """Bytes read and written by (graph, width, way), and the least there can be by (graph, width)."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu (Nsight Compute) is not on the PATH")
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--nvtx", "--print-nvtx-rename", "kernel",
               "--csv", "--page", "raw", "--print-units", "base", "--metrics", f"{READ},{WRITTEN}",
               sys.executable, __file__, "--run", "--graphs", *names, "--widths", *map(str, widths)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ncu failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    table = done.stdout[done.stdout.index('"ID"') :]
    moved: dict = defaultdict(lambda: [0.0, 0.0])
    for row in csv.DictReader(io.StringIO(table)):
        if row["ID"]:  # the line below the names has the units
            name, width, way = row["Kernel Name"].split("|")
            for i, metric in enumerate((READ, WRITTEN)):
                moved[name, int(width), way][i] += float(row[metric].replace(",", ""))
    floors = (line.split("\t")[1:] for line in done.stderr.splitlines() if line.startswith("least\t"))
    return moved, {(name, int(width)): int(bytes_) for name, width, bytes_ in floors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)  # what ncu starts
    options = parser.parse_args()
    if options.run:
        run_all(options.graphs, options.widths)
        return
    head = provenance(options.commit)
    print(*head, sep="\n")
    moved, floors = counted(options.graphs, options.widths)
    cells = []
    for (name, width, way), (read, written) in moved.items():
        relative = (read + written) / sum(moved[name, width, FIRSTS[way]])
        row = dict(graph=name, width=width, way=way, read_mb=read / 1e6, written_mb=written / 1e6)
        cells.append(shown(COLUMNS, row | dict(least_mb=floors[name, width] / 1e6, relative=relative)))
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
