"""The kernel of neighbour groups with all of its settings, beside the kernel that `prepare` picks by rule.

    python benchmarks/groups.py --csv cells.csv --grid settings.csv
    python benchmarks/groups.py --graphs arxiv-like DATA/amazon_computers.npz --widths 32 128

Sums of fp32 rows with one weight per edge, forward, on graphs of graphs.py and .npz files, prepared. Times are medians
of single calls in device time, milliseconds. Every setting has the arrangement of the rows that the rule has.

- rule_ms: what `gnnaccel.prepare` alone leads to, tiles left out.
- rows_ms: what it would lead to without groups.
- groups_ms, best: the fastest setting: neighbours of a group / threads of a block / lanes of 16 bytes of a worker.
- formula_ms, formula: the setting that GNNAdvisor's equations 2 to 4 put first.
- evolved_ms, evolved_tries: by its evolutionary search over times, and how many settings that timed.
- recorded_ms: the fastest public kernel on record (recorded.csv). GNNAdvisor's own, with its automatic parameters, was
  among those tried and nowhere the fastest, so that these groups are at least recorded_ms / groups_ms times as fast.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import torch
from advisor import GRAPHS, load
from kernel_summary import recorded
from timing import clocks_under_load, error_of, provenance, sample, save_table, shown, time_ms

import gnnaccel
from gnnaccel import schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.schedule import groups
from gnnaccel.schedule.groups import Setting, Size
from gnnaccel.schedule.worklist import Kernel, Plan

COLUMNS = ("graph", "nodes", "edges", "width", "rule_ms", "rule", "rows_ms", "groups_ms", "best", "formula_ms",
           "formula", "evolved_ms", "evolved_tries", "recorded_ms", "recorded_kernel", "rows_vs_rule",
           "rule_vs_groups", "formula_vs_best", "evolved_vs_best", "recorded_vs_groups", "rel_error")  # fmt: skip
GRID = ("graph", "width", "group_size", "threads", "lanes", "ms")
GEOMEANS = ("rows_vs_rule", "rule_vs_groups", "formula_vs_best", "evolved_vs_best", "recorded_vs_groups")


class Cell:
    """Weighted sums of rows of one width over one graph, by any plan."""

    def __init__(self, graph: Graph, width: int):
        torch.manual_seed(width)
        self.graph, self.width = graph, width
        self.x = torch.rand(graph.num_cols, width, device=graph.device)
        self.weight = torch.rand(graph.nnz, 1, device=graph.device)
        self._arrays = arrays_of(graph, False, listed=False)
        self._works: dict = {}

    def call(self, plan: Plan):
        """A function that sums by `plan`."""
        key = plan.list_key
        if key not in self._works:
            self._works = {key: schedule.of(self.graph).arranged(self.graph, plan)}
        given = self._arrays.ordered(self._works[key]._replace(plan=plan))
        return lambda: spmm_op(given, self.x, self.weight, "mul", "sum", 0.0)

    def rule(self) -> Plan:
        return schedule.of(self.graph).plan(self.graph, 4 * self.width)

    def groups(self, setting: Setting) -> Plan:
        return setting.plan(self.rule().arrangement)


def shown_setting(setting: Setting) -> str:
    return "/".join(map(str, setting))


def shown_plan(plan: Plan) -> str:
    if plan.kernel is Kernel.GROUPS:
        return f"groups {shown_setting(Setting.of(plan))}"
    return f"{plan.kernel.name.lower()} x{plan.slice_lanes} cap {plan.cap}"


def measure(name: str, graph: Graph, width: int, budget_ms: float) -> tuple[dict, dict[Setting, float]]:
    gnnaccel.prepare(graph, transposed=False, tune="heuristic")
    cell = Cell(graph, width)
    rule, rows_plan = cell.rule(), schedule.of(graph).plan(graph, 4 * width, sums=False)
    # Settings of one list after another.
    space = sorted(groups.settings(width), key=lambda s: (s.group_size, s.threads // s.lanes))
    times = {s: time_ms(cell.call(cell.groups(s)), budget_ms, 3, 20)[0] for s in space}
    best = min(times, key=times.__getitem__)
    formula = groups.by_formula(Size.of(graph, width))[0]
    evolved = groups.search(space, random.Random(0).sample(space, 12), times.__getitem__)
    row = dict(graph=name, nodes=graph.num_rows, edges=graph.nnz, width=width)
    row |= dict(rule_ms=time_ms(cell.call(rule), 4 * budget_ms)[0], rule=shown_plan(rule))
    row |= dict(rows_ms=time_ms(cell.call(rows_plan), 4 * budget_ms)[0])
    row |= dict(groups_ms=time_ms(cell.call(cell.groups(best)), 4 * budget_ms)[0], best=shown_setting(best))
    row |= dict(formula_ms=times[formula], formula=shown_setting(formula))
    row |= dict(evolved_ms=times[evolved[0]], evolved_tries=len(evolved))
    row["rule_vs_groups"], row["rows_vs_rule"] = row["rule_ms"] / row["groups_ms"], row["rows_ms"] / row["rule_ms"]
    row |= {f"{k}_vs_best": row[f"{k}_ms"] / times[best] for k in ("formula", "evolved")}
    if (name, "spmm", width) in recorded():
        row["recorded_ms"], row["recorded_kernel"] = recorded()[name, "spmm", width]
        row["recorded_vs_groups"] = row["recorded_ms"] / row["groups_ms"]
    part, rows, nonzeros = sample(graph)
    edges = nonzeros if graph.edge_ids is None else graph.edge_ids[nonzeros].long()
    want = reference.spmm(part, cell.x.double(), cell.weight.double()[edges], "mul", "sum")
    row["rel_error"] = error_of(cell.call(cell.groups(best))()[rows], want)
    return row, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py, or .npz files")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--budget-ms", type=float, default=8.0, help="device time of a setting")
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    parser.add_argument("--grid", help="a table of every setting's time")
    options = parser.parse_args()
    head = provenance(options.commit, clocks_under_load())
    print(*head, sep="\n")
    rows, cells, grid = [], [], []
    for name in options.graphs:
        given = load(name)
        for width in options.widths:
            graph = Graph(given.indptr, given.indices, given.edge_ids, given.num_cols)
            row, times = measure(Path(name).stem, graph, width, options.budget_ms)
            rows.append(row)
            cells.append(shown(COLUMNS, row))
            grid += [(row["graph"], width, *s, f"{ms:.4g}") for s, ms in times.items()]
    for kind in GEOMEANS:
        ratios = [row[kind] for row in rows if row.get(kind)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            line = f"# {kind}: geometric mean {mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} cells"
            print(line)
            head.append(line)
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)
    if options.grid:
        save_table(options.grid, head[:3], GRID, grid)


if __name__ == "__main__":
    main()
