"""Every cell of graphs x widths x ops on an NVIDIA GPU, ours beside the best of what there is; the worst cells named.

    python benchmarks/grid.py --csv out.csv
    python benchmarks/grid.py --graphs arxiv-like yeast-like ../data/gowalla_rec.npz --widths 40 41 --ops sddmm spmm
    python benchmarks/grid.py --compare committed.csv out.csv       # what got slower; no GPU
    python benchmarks/grid.py --scale 0.01 --graphs pubmed-like     # dry run, also without a GPU: checks results alone

Graphs are names of graphs.py or files with `edge_index` [2, E] (source, destination) and `num_nodes`. `given_ms` is on
a graph with its work lists in the order given, `prepared_ms` after `prepare(reorder=True)`; best_ms the fastest of
cuSPARSE, torch.sparse and gather + scatter. Times as in cuda_kernels.py. Softmax has `width` heads, up to 16;
attention one head. `--never-pad`: inner products of odd widths without copies in wider rows, to compare.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import cusparse
import graphs
import numpy as np
import torch
from cuda_kernels import Case, Subject, others_ms, own_ms, prepare, sddmm_case, spmm_case
from timing import clocks_under_load, left_out, provenance, relative_error, save_table, shown
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

GRAPHS = ("pubmed-like", "arxiv-like", "artist-like", "blogcatalog-like", "amazon0505-like", "yeast-like",
          "proteins-like", "reddit-like", "products-like")  # fmt: skip
WIDTHS = (1, 2, 3, 7, 8, 10, 16, 31, 32, 41, 64, 100, 121, 128, 256, 602)
COLUMNS = ("graph", "nodes", "edges", "op", "width", "rel_error", "given_ms", "prepared_ms", "best_ms", "best_peer",
           "vs_best", "prepared_vs_given")  # fmt: skip
MOST_HEADS = 16
MOST_BYTES = 20e9  # of messages of gather + scatter: above that it is not run
SLOWER = 1.03


def _rows(subject: Subject, width: int) -> Tensor:
    return torch.randn(subject.graph.num_cols, width, device=subject.graph.device)


def _reduced(subject: Subject, width: int, dtype: torch.dtype, reduce: str) -> Case:
    """A sum, mean or maximum of the sources' rows."""
    graph, x = subject.graph, _rows(subject, width)
    want = reference.spmm(subject.part, x.double(), None, "copy_lhs", reduce)
    degrees = graph.indptr.diff().clamp(min=1)
    weight = torch.ones(graph.nnz, device=graph.device)
    if reduce == "mean":
        weight = (1 / degrees.float()).repeat_interleave(graph.indptr.diff().long())

    def scattered():
        rows, cols = subject.coo
        if reduce == "max":
            index = rows.view(-1, 1).expand(-1, width)
            return lambda: x.new_zeros(graph.num_rows, width).scatter_reduce_(
                0, index, x[cols], "amax", include_self=False
            )
        summed = lambda: x.new_zeros(graph.num_rows, width).index_add_(0, rows, x[cols])  # noqa: E731
        return summed if reduce == "sum" else lambda: summed() / degrees.view(-1, 1)

    peers: dict = {"gather + scatter": scattered}
    if reduce != "max":
        arrays = graph.indptr, graph.indices, weight
        for name, kind in (("cuSPARSE ALG2", cusparse.CSR_ALG2), ("cuSPARSE ALG3", cusparse.CSR_ALG3)):
            peers[name] = lambda kind=kind: cusparse.SpMM(*arrays, x, kind)
    return Case(lambda g: ops.spmm(g, x, reduce=reduce), lambda r: r[subject.picked], want, 1e-5, peers)


def softmax_case(subject: Subject, width: int, dtype: torch.dtype) -> Case:
    """Softmax of `width` values of each edge over the edges of its destination."""
    graph, scores = subject.graph, torch.randn(subject.graph.nnz, width, device=subject.graph.device)
    want = reference.edge_softmax(subject.part, scores[subject.nonzeros].double())

    def scattered():
        rows, _ = subject.coo
        index = rows.view(-1, 1).expand(-1, width)

        def call():
            top = scores.new_zeros(graph.num_rows, width).scatter_reduce_(0, index, scores, "amax", include_self=False)
            powers = (scores - top[rows]).exp()
            return powers / scores.new_zeros(graph.num_rows, width).index_add_(0, rows, powers)[rows]

        return call

    run = lambda g: ops.edge_softmax(g, scores)  # noqa: E731
    return Case(run, lambda r: r[subject.nonzeros], want, 1e-5, {"gather + scatter": scattered})


def attention_case(subject: Subject, width: int, dtype: torch.dtype) -> Case:
    """Additive attention of one head, forward."""
    graph, x = subject.graph, _rows(subject, width).unsqueeze(1)
    ends = [torch.randn(n, 1, device=graph.device) for n in (graph.num_cols, graph.num_rows)]
    exact = x.double(), ends[0].double(), ends[1][subject.picked].double()
    want = reference.attention(subject.part, *exact, 0.2)

    def scattered():
        rows, cols = subject.coo

        def call():
            scores = torch.nn.functional.leaky_relu(ends[0][cols] + ends[1][rows], 0.2)
            top = scores.new_zeros(graph.num_rows, 1).scatter_reduce_(
                0, rows.view(-1, 1), scores, "amax", include_self=False
            )
            powers = (scores - top[rows]).exp()
            weights = powers / scores.new_zeros(graph.num_rows, 1).index_add_(0, rows, powers)[rows]
            return x.new_zeros(graph.num_rows, width).index_add_(0, rows, x[cols, 0] * weights).unsqueeze(1)

        return call

    run = lambda g: ops.attention(g, x, *ends)  # noqa: E731
    return Case(run, lambda r: r[subject.picked], want, 1e-5, {"gather + scatter": scattered})


CASES: dict[str, Callable[[Subject, int, torch.dtype], Case]] = {
    "spmm": functools.partial(_reduced, reduce="sum"),
    "weighted": spmm_case,
    "mean": functools.partial(_reduced, reduce="mean"),
    "max": functools.partial(_reduced, reduce="max"),
    "sddmm": sddmm_case,
    "softmax": softmax_case,
    "attention": attention_case,
}


def load(name: str, scale: float) -> Graph:
    """A graph of graphs.py, or of a file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name.endswith(".npz"):
        with np.load(name, allow_pickle=False) as found:
            ends, n = torch.from_numpy(found["edge_index"].astype(np.int64)), int(found["num_nodes"])
        order = torch.argsort(ends[1], stable=True)
        indptr = torch.zeros(n + 1, dtype=torch.int32)
        indptr[1:] = torch.bincount(ends[1], minlength=n).cumsum(0)
        return Graph.from_csr(indptr.to(device), ends[0][order].int().to(device), num_cols=n, check=False)
    made = graphs.generate(name, device, scale)
    return Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)


def best_peer(case: Case, messages: int) -> tuple[float | None, str | None]:
    """The fastest peer whose result is right."""
    best: tuple[float | None, str | None] = (None, None)
    for name, make in case.peers.items():
        if name in ("gather + scatter", "pyg_ms") and messages > MOST_BYTES:
            continue
        try:
            call = make()
            if not relative_error(case.sampled(call()), case.want) < 10 * case.limit:
                raise RuntimeError("wrong result")
            taken = others_ms(call)[0]
        except RuntimeError as problem:  # out of memory is one
            left_out(f"{name}: {problem}")
            continue
        if best[0] is None or taken < best[0]:
            best = taken, name.removesuffix("_ms")
    return best


def measure(subject: Subject, ready: Graph | None, op: str, width: int) -> dict:
    """A cell, as a row of the table."""
    graph = subject.graph
    case = CASES[op](subject, width, torch.float32)
    row: dict = {"op": op, "width": width, "rel_error": case.error(case.ours(graph))}
    row["given_ms"] = own_ms(lambda: case.ours(graph))[0]
    if ready is not None:
        case.error(case.ours(ready))
        row["prepared_ms"] = own_ms(lambda: case.ours(ready))[0]
        row["prepared_vs_given"] = row["given_ms"] / row["prepared_ms"]
    row["best_ms"], row["best_peer"] = best_peer(case, graph.nnz * width * 4)
    if row["best_ms"]:
        row["vs_best"] = row["best_ms"] / row["given_ms"]
    return row


def worst(rows: list[dict], count: int = 12) -> list[str]:
    """Geometric means by op, and the cells in which ours gains least."""
    lines = []
    for op in CASES:
        gains = [row["vs_best"] for row in rows if row["op"] == op and row.get("vs_best")]
        if gains:
            mean = math.exp(sum(map(math.log, gains)) / len(gains))
            slower = sum(gain * SLOWER < 1 for gain in gains)
            lines.append(f"{op:10s} {mean:6.2f}x of the best peer in {len(gains)} cells, slower in {slower}")
    for column, title in (("vs_best", "least beside peers"), ("prepared_vs_given", "least by an order")):
        found = sorted((row for row in rows if row.get(column)), key=lambda row: row[column])[:count]
        lines += [f"{title}:"] if found else []
        lines += [f"  {row[column]:5.2f}x {row['graph']} {row['op']} {row['width']}" for row in found]
    return lines


def compare(before: str, after: str) -> int:
    """Print the cells of `after` that are slower than in `before`; their number."""

    def cells(path: str) -> dict:
        with open(path) as file:
            rows = csv.DictReader(line for line in file if not line.startswith("#"))
            return {(row["graph"], row["op"], row["width"]): row for row in rows}

    old, new, slower = cells(before), cells(after), 0
    for cell in old.keys() & new.keys():
        for column in ("given_ms", "prepared_ms"):
            if not (old[cell][column] and new[cell][column]):
                continue
            ratio = float(new[cell][column]) / float(old[cell][column])
            if ratio > SLOWER:
                slower += 1
                print(f"{ratio:5.2f}x {' '.join(cell)} {column}: {old[cell][column]} -> {new[cell][column]}")
    print(f"{slower} slower by more than {SLOWER - 1:.0%}, of {len(old.keys() & new.keys())} cells in both")
    return slower


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS))
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--ops", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--scale", type=float, default=1.0, help="shrink generated graphs")
    parser.add_argument("--no-order", action="store_true", help="leave out prepare(reorder=True)")
    parser.add_argument("--never-pad", action="store_true", help="inner products of odd widths without copies")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write, after every graph")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="two tables; measures nothing")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.compare:
        return min(compare(*args.compare), 1)
    if args.never_pad:
        importlib.import_module("gnnaccel.ops.sddmm")._READ_OFTEN = float("inf")
    warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
    torch.manual_seed(0)
    head = provenance(args.commit, "float32, int32 indices; median of single calls in ms", clocks_under_load())
    rows: list[dict] = []
    table: list[list] = []
    for name in args.graphs:
        subject = Subject(load(name, args.scale))
        ready = None
        if subject.graph.indptr.is_cuda:
            subject.graph = prepare(subject.graph, False)[0]
        if not args.no_order:
            ready = prepare(subject.graph, True)[0]
        for op in args.ops:
            for width in args.widths:
                if op == "softmax" and width > MOST_HEADS:
                    continue
                about = {"graph": Path(name).stem, "nodes": subject.graph.num_rows, "edges": subject.graph.nnz}
                rows.append(about | measure(subject, ready, op, width))
                table.append(shown(COLUMNS, rows[-1]))
        if args.csv:
            save_table(args.csv, head, COLUMNS, table)
    print("\n".join((*head, *worst(rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
