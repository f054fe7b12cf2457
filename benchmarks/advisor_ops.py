"""How far the rules of the work lists are from the best for the ops that read them beside sums: those in other dtypes,
maxima, dot products of edges, attention, MaxK.

    python benchmarks/advisor_ops.py --csv out.csv
    python benchmarks/advisor_ops.py --graphs arxiv-like DATA/cora.npz --ops sddmm gat --each

The lists' rules and `tune` go by weighted sums in float32. Here each op runs, forward and backward by itself, with the
rules' list (rule_ms) and with lists of every cut and arrangement (best_ms, best), which also the transposed graph then
has. Prepared graphs; medians of single calls in device time, milliseconds; the rules' list first and last, the less of
both. gap: how many times as long as the best the rules take; the last lines have geometric means and worst cells.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from advisor import CAPS, load
from timing import clocks_under_load, provenance, save_table, shown, time_ms
from torch import Tensor

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.schedule import worklist
from gnnaccel.schedule.worklist import Arrangement, Plan

GRAPHS = ("pubmed-like", "arxiv-like", "arxiv-like:sorted", "artist-like", "amazon0505-like:sorted", "yeast-like",
          "reddit-like")  # fmt: skip
COLUMNS = ("graph", "nodes", "edges", "op", "width", "rule_ms", "rule", "best_ms", "best", "gap")
Call = Callable[[], object]


def leaves(graph: Graph, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*shape, device=graph.device).to(dtype).requires_grad_() for shape in shapes]


def calls(name: str, op: Callable[..., Tensor], given: list[Tensor]) -> dict[str, Call]:
    """Its forward and its backward."""
    grad = torch.ones_like(op(*given))

    def forward() -> None:
        with torch.no_grad():
            op(*given)

    def prepared_backward() -> Call:
        out = op(*given)  # lists are those of the forward
        return lambda: torch.autograd.grad(out, given, grad, retain_graph=True)

    return {name: lambda: forward, f"{name} backward": prepared_backward}


def half_sum(graph: Graph, width: int):
    given = leaves(graph, (graph.num_cols, width), dtype=torch.bfloat16)
    weight = torch.rand(graph.nnz, device=graph.device).bfloat16()
    return (lambda x: ops.spmm(graph, x, weight)), given


def maximum(graph: Graph, width: int):
    return (lambda x: ops.spmm(graph, x, reduce="max")), leaves(graph, (graph.num_cols, width))


def sddmm(graph: Graph, width: int):
    given = leaves(graph, (graph.num_cols, width), (graph.num_rows, width))
    return (lambda x, y: ops.sddmm(graph, x, y, "dot", "u", "v")), given


def gat(graph: Graph, width: int):
    heads = 4
    sources, targets = (graph.num_cols, heads), (graph.num_rows, heads)
    return (lambda *given: ops.attention(graph, *given)), leaves(graph, (*sources, width // heads), sources, targets)


def dot(graph: Graph, width: int):
    shape = (4, width // 4)
    given = leaves(graph, (graph.num_rows, *shape), (graph.num_cols, *shape), (graph.num_cols, *shape))
    return (lambda q, k, v: ops.dot_attention(graph, q, k, v)), given


def gatv2(graph: Graph, width: int):
    shape = (4, width // 4)
    given = leaves(graph, (graph.num_cols, *shape), (graph.num_rows, *shape), shape)
    return (lambda *given: ops.gatv2_scores(graph, *given)), given


def maxk(graph: Graph, width: int):
    return (lambda x: ops.spmm(graph, ops.maxk(x, width // 8))), leaves(graph, (graph.num_cols, width))


OPS = {"bf16 sum": half_sum, "max": maximum, "sddmm": sddmm, "gat": gat, "dot attention": dot, "gatv2": gatv2,
       "maxk": maxk}  # fmt: skip


def give(graph: Graph, plan: Plan) -> None:
    """The lists of `plan` for rows of every size, both directions."""
    for part in (graph, graph.transposed):
        arrangement = plan.arrangement if schedule.of(part).order is not None else Arrangement.LENGTH
        work = worklist.build(part, plan._replace(arrangement=arrangement), schedule.of(part).order)
        schedule.of(part).lists = dict.fromkeys(worklist.LANES, work)
        schedule.of(part).sums = {}


def measure(graph: Graph, name: str, width: int, budget_ms: float, each: bool) -> list[dict]:
    torch.manual_seed(width)
    gnnaccel.prepare(graph)
    op, given = OPS[name](graph, width)
    ways = calls(name, op, given)
    parts = (graph, graph.transposed)
    rule = [(schedule.of(part).lists, schedule.of(part).sums) for part in parts]
    plan = schedule.of(graph).plan(graph, given[0].element_size() * width, sums=False)

    def times() -> dict[str, float]:
        return {way: time_ms(made(), budget_ms, 3, 20)[0] for way, made in ways.items()}

    rule_ms = times()
    found: dict[str, dict[str, float]] = {way: {} for way in ways}
    known = list(Arrangement) if schedule.of(graph).order is not None else [Arrangement.LENGTH]
    for tried in (Plan(cap, arrangement) for arrangement in known for cap in CAPS):
        give(graph, tried)
        for way, ms in times().items():
            found[way][f"{tried.arrangement.name.lower()} cap {tried.cap}"] = ms
            if each:
                print(f"  {way} {tried.arrangement.name.lower()} cap {tried.cap}: {ms:.4g} ms")
    for part, (lists, groups) in zip(parts, rule, strict=True):
        schedule.of(part).lists, schedule.of(part).sums = lists, groups
    rule_ms = {way: min(ms, rule_ms[way]) for way, ms in times().items()}
    rows = []
    for way, by_plan in found.items():
        best_ms, best = min((ms, plan) for plan, ms in by_plan.items())
        row = dict(op=way, width=width, rule_ms=rule_ms[way], rule=f"{plan.arrangement.name.lower()} cap {plan.cap}")
        rows.append(row | dict(best_ms=min(best_ms, rule_ms[way]), best=best))
        rows[-1]["gap"] = rows[-1]["rule_ms"] / rows[-1]["best_ms"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py, or .npz files")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--budget-ms", type=float, default=8.0, help="device time of a figure")
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
            for op in options.ops:
                for row in measure(graph, op, width, options.budget_ms, options.each):
                    rows.append(dict(graph=Path(name).stem, nodes=graph.num_rows, edges=graph.nnz) | row)
                    cells.append(shown(COLUMNS, rows[-1]))
                torch.cuda.empty_cache()
    for op in dict.fromkeys(row["op"] for row in rows):
        gaps = [row["gap"] for row in rows if row["op"] == op]
        worst = max((row for row in rows if row["op"] == op), key=lambda row: row["gap"])
        mean = math.exp(sum(map(math.log, gaps)) / len(gaps))
        head.append(f"# {op}: geometric mean {mean:.3f}, worst {max(gaps):.3f} ({worst['graph']}, {worst['width']})")
        print(head[-1])
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
