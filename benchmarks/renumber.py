"""What an order of the nodes gains: rows as given, rows in communities, features moved too, and the planted order.

    python benchmarks/renumber.py --csv out.csv
    python benchmarks/renumber.py --device cpu --graphs arxiv-like amazon0505-like --widths 64

Sums of fp32 rows, with one weight per edge unless told otherwise, forward, on prepared graphs whose nodes have
scattered numbers, in milliseconds: medians of single calls (device time on CUDA, wall time on the CPU).

- rows_ms: `gnnaccel.prepare(graph, reorder="communities")`, features where they are.
- moved_ms: the graph of `gnnaccel.renumber`; its features and weights are in the new order already.
- planted_ms: the same graph as it was generated, communities side by side (":sorted").

recovered: the share of what the planted order gains (given_ms - planted_ms) that the others do.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import graphs
import torch
from timing import error_of, provenance, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph

GRAPHS = ("arxiv-like", "amazon0505-like", "proteins-like", "reddit-like")
COLUMNS = ("graph", "nodes", "edges", "device", "width", "given_ms", "rows_ms", "moved_ms", "planted_ms",
           "rows_recovered", "moved_recovered", "renumber_ms", "rel_error")  # fmt: skip


def generated(name: str, device: str) -> Graph:
    made = graphs.generate(name, device=device)
    return Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)


def wall_ms(call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def medians(calls: dict, device: str) -> dict[str, float]:
    """Of each call by its name; on the CPU, which others use too, taken in turn."""
    if device == "cuda":
        return {name: time_ms(call, 40)[0] for name, call in calls.items()}
    rounds = [{name: wall_ms(call) for name, call in calls.items()} for _ in range(16)][1:]
    return {name: statistics.median(times[name] for times in rounds) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py that it also has sorted")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--unweighted", action="store_true", help="sums without weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    options = parser.parse_args()
    head = provenance(options.commit, f"{torch.get_num_threads()} threads")
    print(*head, sep="\n")
    cells = []
    for name in options.graphs:
        given, planted = generated(name, options.device), generated(f"{name}:sorted", options.device)
        start = time.perf_counter()
        moved, numbers = gnnaccel.renumber(given)
        if options.device == "cuda":
            torch.cuda.synchronize()
        renumber_ms = (time.perf_counter() - start) * 1e3
        rows = Graph(given.indptr, given.indices, given.edge_ids, given.num_cols)
        kinds = {"given": given, "rows": rows, "moved": moved, "planted": planted}
        for kind, graph in kinds.items():
            gnnaccel.prepare(graph, transposed=False, reorder="communities" if kind == "rows" else False)
        for width in options.widths:
            x = torch.rand(given.num_cols, width, device=given.device)
            weight = None if options.unweighted else torch.rand(given.nnz, device=given.device)
            moved_weight = None if weight is None else numbers.edges(weight)
            features, weights = {"moved": numbers.features(x)}, {"moved": moved_weight}
            row = dict(graph=name, nodes=given.num_rows, edges=given.nnz, device=options.device, width=width)
            calls = {
                kind: functools.partial(ops.spmm, graph, features.get(kind, x), weights.get(kind, weight))
                for kind, graph in kinds.items()
            }
            row |= {f"{kind}_ms": ms for kind, ms in medians(calls, options.device).items()}
            for kind in kinds.keys() - {"given", "planted"}:
                gain = row["given_ms"] - row["planted_ms"]
                row[f"{kind}_recovered"] = (row["given_ms"] - row[f"{kind}_ms"]) / gain
            row["renumber_ms"] = renumber_ms
            got = numbers.results(ops.spmm(moved, features["moved"], moved_weight))
            row["rel_error"] = error_of(got, ops.spmm(given, x, weight).double())
            cells.append(shown(COLUMNS, row))
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
