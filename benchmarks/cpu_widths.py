"""Sums on the CPU by the width of the features, and of heads: what widths cost that no vector register fits.

    python benchmarks/cpu_widths.py --csv out.csv

One graph of graphs.py (--graph, --scale), all widths in turns; sums are checked on some rows against float64 first.
Times are medians in milliseconds, good as ratios on an idle machine. torch_ms: torch.sparse.mm of the CSR matrix with
values, beside sums with a weight for each edge.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import graphs
import torch
from timing import error_of, provenance, sample, save_table, shown

from gnnaccel import ops
from gnnaccel._library import isa
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

SHAPES = ("1", "2", "3", "4", "5", "7", "8", "16", "40", "41", "47", "48", "121", "4x3", "4x4", "8x7", "8x8", "2x41")
COLUMNS = ("graph", "scale", "edges", "features", "threads", "isa", "sum_ms", "weighted_ms", "max_ms", "torch_ms")


def milliseconds(function) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def sides(graph: Graph, shape: tuple[int, ...], matrix: torch.Tensor) -> dict:
    """The calls to time: name and function. Heads have a weight each."""
    x, weight = torch.randn(graph.num_cols, *shape), torch.rand(graph.nnz, *shape[:-1])
    few, rows, nonzeros = sample(graph)
    wide = weight[nonzeros].view(-1, *shape[:-1], 1).double()
    error_of(ops.spmm(graph, x)[rows], reference.spmm(few, x.double(), None, "copy_lhs", "sum"))
    error_of(ops.spmm(graph, x, weight)[rows], reference.spmm(few, x.double(), wide, "mul", "sum"))
    found = {
        "sum_ms": lambda: ops.spmm(graph, x),
        "weighted_ms": lambda: ops.spmm(graph, x, weight),
        "max_ms": lambda: ops.spmm(graph, x, reduce="max"),
    }
    if len(shape) == 1:
        found["torch_ms"] = lambda: torch.sparse.mm(matrix, x)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="arxiv-like", help="a name of graphs.py")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink it")
    parser.add_argument("--features", nargs="+", default=list(SHAPES), metavar="D or HxF")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(args.commit, "medians in ms")
    print("\n".join(head))
    made = graphs.generate(args.graph, device="cpu", scale=args.scale)
    graph = Graph(made["indptr"], made["indices"], None, made["num_nodes"])
    warnings.filterwarnings("ignore", "Sparse CSR")
    n = graph.num_rows
    matrix = torch.sparse_csr_tensor(graph.indptr, graph.indices, torch.rand(graph.nnz), (n, n))
    shapes = {name: tuple(int(part) for part in name.split("x")) for name in args.features}
    calls = {name: sides(graph, shape, matrix) for name, shape in shapes.items()}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.repeat + 1):
        for name, functions in calls.items():
            for what, function in functions.items():
                times.setdefault((name, what), []).append(milliseconds(function))
    fixed = {
        "graph": args.graph,
        "scale": args.scale,
        "edges": graph.nnz,
        "threads": torch.get_num_threads(),
        "isa": isa(),
    }
    lines = []
    for name, functions in calls.items():
        found = {what: statistics.median(times[name, what][1:]) for what in functions}
        lines.append(shown(COLUMNS, fixed | {"features": name} | found))
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
