"""What it gains to bring values of edges into the order of the nonzeros by a pass of their own (ops/_edge_order.py).

    python benchmarks/edge_order.py --csv out.csv
    python benchmarks/edge_order.py --graphs amazon0505-like --widths 64

Ops that read or write one value per edge and head, over the transposed of graphs of graphs.py, whose nonzeros are not
in the order of edge ids. Prepared graphs, fp32; medians of single calls in device time, milliseconds.

- looked_up_ms: each kernel by itself, looking edges up by their ids.
- auto_ms: as the ops do by themselves.
- unpermuted_ms: on the graph that has its edges in the order of the nonzeros: the floor.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from advisor import load
from timing import clocks_under_load, provenance, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds

GRAPHS = ("arxiv-like", "amazon0505-like", "yeast-like", "proteins-like", "reddit-like", "products-like")
COLUMNS = ("graph", "nodes", "edges", "op", "heads", "width", "looked_up_ms", "auto_ms", "unpermuted_ms",
           "looked_up_vs_auto")  # fmt: skip
HEADS = (1, 4)


def calls(graph: Graph, heads: int, width: int) -> dict[str, Callable[[], object]]:
    shape = (heads, width // heads)
    x = torch.rand(graph.num_cols, *shape, device=graph.device)
    y = torch.rand(graph.num_rows, *shape, device=graph.device)
    vectors = torch.rand(*shape, device=graph.device)
    edges = torch.rand(graph.nnz, heads, device=graph.device)
    weight = edges.unsqueeze(-1)
    found = {
        "spmm": lambda: ops.spmm(graph, x, weight),
        "sddmm": lambda: ops.sddmm(graph, x, y, "dot", "u", "v"),
        "gatv2_scores": lambda: ops.gatv2_scores(graph, x, y, vectors),
        "edge_attention": lambda: ops.edge_attention(graph, edges, x),
    }
    if width <= 64:  # whatever the features are
        found["edge_softmax"] = lambda: ops.edge_softmax(graph, edges)
        found["sddmm add"] = lambda: ops.sddmm(graph, x[..., 0], y[..., 0], "add", "u", "v")
    return found


def measure(graph: Graph, heads: int, width: int, budget_ms: float) -> list[dict]:
    turned = graph.transposed
    plain = Graph(turned.indptr, turned.indices, None, turned.num_cols)
    schedule.of(plain).lists, schedule.of(plain).sums = schedule.of(turned).lists, schedule.of(turned).sums
    most, rows = bounds.EDGE_ORDER_BYTES, []
    for (op, call), floor in zip(calls(turned, heads, width).items(), calls(plain, heads, width).values(), strict=True):
        row = dict(op=op, heads=heads, width=width)
        bounds.EDGE_ORDER_BYTES = 0
        row["looked_up_ms"] = time_ms(call, budget_ms, 3, 20)[0]
        bounds.EDGE_ORDER_BYTES = most
        row["auto_ms"] = time_ms(call, budget_ms, 3, 20)[0]
        row["unpermuted_ms"] = time_ms(floor, budget_ms, 3, 20)[0]
        rows.append(row | dict(looked_up_vs_auto=row["looked_up_ms"] / row["auto_ms"]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py, or .npz files")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--budget-ms", type=float, default=10.0, help="device time of a figure")
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    options = parser.parse_args()
    head = provenance(options.commit, clocks_under_load())
    print(*head, sep="\n")
    rows, cells = [], []
    for name in options.graphs:
        graph = load(name)
        gnnaccel.prepare(graph)
        for width in options.widths:
            for heads in HEADS:
                for row in measure(graph, heads, width, options.budget_ms):
                    rows.append(dict(graph=name, nodes=graph.num_rows, edges=graph.nnz) | row)
                    cells.append(shown(COLUMNS, rows[-1]))
                torch.cuda.empty_cache()
    for op in dict.fromkeys(row["op"] for row in rows):
        ratios = [row["looked_up_vs_auto"] for row in rows if row["op"] == op]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        head.append(f"# {op}: looked_up_vs_auto {mean:.3f} in geometric mean, {min(ratios):.3f} to {max(ratios):.3f}")
        print(head[-1])
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
