"""How far the choice of kernels is from the best of them: SpMM by rule, as measured by `tune`, and the best of a grid.

    python benchmarks/advisor.py --csv out.csv
    python benchmarks/advisor.py --graphs arxiv-like DATA/amazon_computers.npz --widths 32 128 --reorder

Sums of fp32 rows with one weight per edge, forward, on graphs of graphs.py and .npz files, prepared. Times are medians
of single calls in device time, milliseconds.

- model_ms: what `gnnaccel.prepare` alone leads to (`ops.spmm`, kernel="auto": tiles where they seem to pay).
- measured_ms: the same call after `prepare(..., tune="measure")`; measure_ms is the wall time that took for this width.
- best_ms, best: the fastest of all kernels with all parameters of the grid, tiles too, timed like the others.

model_gap and measured_gap: how many times as long as the best; the last lines have geometric means and worst cells.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import graphs
import torch
from timing import clocks_under_load, error_of, provenance, sample, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops, schedule, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.planning import tune
from gnnaccel.schedule import groups
from gnnaccel.schedule.worklist import Arrangement, Kernel, Plan

GRAPHS = ("pubmed-like", "arxiv-like", "arxiv-like:sorted", "artist-like", "blogcatalog-like", "amazon0505-like",
          "amazon0505-like:sorted", "yeast-like", "proteins-like", "reddit-like", "products-like")  # fmt: skip
COLUMNS = ("graph", "nodes", "edges", "reorder", "width", "model_ms", "measured_ms", "best_ms", "best", "tiled_ms",
           "model_gap", "measured_gap", "measure_ms", "tried", "complete", "rel_error")  # fmt: skip
CAPS = (32, 64, 128, 256, 512, 1024)
GROUPS_NNZ = 3_000_000  # up to which groups of neighbours are in the grid; beyond they gain little (groups.py)


def grid(graph: Graph, row_bytes: int) -> list[Plan]:
    vectors = -(-row_bytes // 16)
    known = list(Arrangement) if schedule.of(graph).order is not None else [Arrangement.LENGTH]

    def slices(most: int) -> list[int]:
        return [lanes for lanes in (4, 8, 16, 32) if lanes <= most and lanes < 2 * vectors]

    plans = [Plan(256, Arrangement.LENGTH, Kernel.BALANCED, lanes) for lanes in slices(32)]
    plans += [Plan(cap, a, Kernel.ROWS, lanes) for a in known for cap in CAPS for lanes in slices(16)]
    if graph.nnz <= GROUPS_NNZ:
        arrangement = schedule.of(graph).plan(graph, row_bytes).arrangement
        plans += sorted((s.plan(arrangement) for s in groups.settings(row_bytes // 4)), key=lambda p: p.workers)
    return plans


def best_of(graph: Graph, x, weight, budget_ms: float, each: bool) -> tuple[float, str]:
    arrays = arrays_of(graph, False, listed=False)
    found = (math.inf, "")
    works: dict = {}
    for plan in grid(graph, x.shape[1] * x.element_size()):
        key = plan.list_key
        if key not in works:
            works = {key: schedule.of(graph).arranged(graph, plan)}
        work = works[key]._replace(plan=plan)
        given = arrays.ordered(work)
        ms = time_ms(lambda given=given: spmm_op(given, x, weight, "mul", "sum", 0.0), budget_ms, 3, 20)[0]
        name = f"{plan.kernel.name.lower()} x{plan.slice_lanes}"
        if plan.kernel is not Kernel.BALANCED:
            name += f" {plan.arrangement.name.lower()} cap {plan.cap}"
        if plan.kernel is Kernel.GROUPS:
            name += f" threads {plan.threads}"
        if each:
            print(f"  {name}: {ms:.4g} ms")
        found = min(found, (ms, name))
    return found


def load(name: str) -> Graph:
    if name.endswith(".npz"):
        return Graph.load(name).to("cuda")
    made = graphs.generate(name)
    return Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)


def measure(name: str, graph: Graph, width: int, reorder: bool, budget_ms: float, each: bool) -> dict:
    torch.manual_seed(width)
    x = torch.rand(graph.num_cols, width, device=graph.device)
    weight = torch.rand(graph.nnz, 1, device=graph.device)
    gnnaccel.prepare(graph, transposed=False, reorder=reorder)
    row = dict(graph=name, nodes=graph.num_rows, edges=graph.nnz, reorder=reorder, width=width)

    def call():
        return ops.spmm(graph, x, weight)

    part, rows, nonzeros = sample(graph)
    row["model_ms"] = time_ms(call, budget_ms)[0]
    row["best_ms"], row["best"] = best_of(graph, x, weight, budget_ms / 4, each)
    if tiles.ensure(graph):
        row["tiled_ms"] = time_ms(lambda: ops.tiled.spmm_tiled(graph, x, weight, False, tf32=False), budget_ms)[0]
        row["best_ms"], row["best"] = min((row["best_ms"], row["best"]), (row["tiled_ms"], "tiled"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    tuned = tune.measure(graph, width, budget_ms=200.0)  # a second for five widths
    row["measure_ms"] = (time.perf_counter() - start) * 1e3
    row["tried"], row["complete"] = tuned.tried, tuned.complete
    row["measured_ms"] = time_ms(call, budget_ms)[0]
    edges = nonzeros if graph.edge_ids is None else graph.edge_ids[nonzeros].long()
    want = reference.spmm(part, x.double(), weight.double()[edges], "mul", "sum")
    row["rel_error"] = error_of(call()[rows], want)
    row["best_ms"] = min(row["best_ms"], row["model_ms"], row["measured_ms"])
    row["model_gap"], row["measured_gap"] = (row[f"{k}_ms"] / row["best_ms"] for k in ("model", "measured"))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py, or .npz files")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--reorder", action="store_true", help="look for communities first")
    parser.add_argument("--budget-ms", type=float, default=40.0, help="device time of a figure")
    parser.add_argument("--each", action="store_true", help="print every plan of the grid")
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    options = parser.parse_args()
    head = provenance(options.commit, clocks_under_load())
    print(*head, sep="\n")
    rows, cells = [], []
    for name in options.graphs:
        given = load(name)
        for width in options.widths:
            graph = Graph(given.indptr, given.indices, given.edge_ids, given.num_cols)
            rows.append(measure(Path(name).stem, graph, width, options.reorder, options.budget_ms, options.each))
            cells.append(shown(COLUMNS, rows[-1]))
    for kind in ("model_gap", "measured_gap"):
        gaps = [row[kind] for row in rows]
        worst = max(rows, key=lambda row: row[kind])
        mean = math.exp(sum(map(math.log, gaps)) / len(gaps))
        line = f"# {kind}: geometric mean {mean:.3f}, worst {max(gaps):.3f} ({worst['graph']}, {worst['width']})"
        print(line)
        head.append(line)
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
