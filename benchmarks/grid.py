"""Every cell of 25 graphs x 16 widths x 7 ops on an NVIDIA GPU, ours beside the best of what there is.

    python benchmarks/grid.py --csv out.csv                  # all that out.csv does not have yet
    python benchmarks/grid.py --csv out.csv --seconds 60     # as much of that as fits; the next call goes on
    python benchmarks/grid.py --graphs arxiv-like cora --widths 40 41 --ops sddmm spmm --csv part.csv
    python benchmarks/grid.py --cells spmm:1 softmax:10 --csv part.csv      # these of every graph
    python benchmarks/grid.py --join part.csv out.csv --csv all.csv         # one table of several; no GPU
    python benchmarks/grid.py --compare out.csv               # what got slower since the committed table of that GPU
    python benchmarks/grid.py --scale 0.01 --graphs pubmed-like --csv x.csv # dry run, also without a GPU

Graphs are those of grid_graphs.py, or files. `given_ms` is on a graph with its work lists in the order given;
`prepared_ms`, in turns with it, after `prepare(reorder=True)`, where that found an order. best_ms: the fastest of
cuSPARSE, torch.sparse and gather + scatter. All are medians of single calls, queued ahead, in device time. cuSPARSE
sums by values of edges, whatever they are, so that one time stands for sums, weighted sums and means. Gather + scatter
is left out where another peer has a time and messages take more than 100 MB, and where they take more than 20 GB.
Softmax has `width` heads, up to 16; attention one head. `--never-pad`: inner products of odd widths without copies in
wider rows, to compare. `--compare` ends with exit code 1 if a cell is slower by more than 3 %.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import cusparse
import grid_graphs
import grid_table
import torch
from cuda_kernels import Case, Subject, sddmm_case, spmm_case
from timing import clocks_under_load, left_out, median_ms, provenance, relative_error, short
from torch import Tensor

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import reference

WIDTHS = (1, 2, 3, 7, 8, 10, 16, 31, 32, 41, 64, 100, 121, 128, 256, 602)
MOST_HEADS = 16
# Of messages of gather + scatter: above the first it is not run where there is another peer, which has been the faster
# one by ten times and more in every such cell of every table; above the second not at all.
MANY_BYTES, MOST_BYTES = 1e8, 20e9
HOPELESS = 2  # times the best peer's time


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

    peers: dict = {}
    if reduce != "max":
        arrays = graph.indptr, graph.indices, weight
        for name, kind in (("cusparse_alg2_ms", cusparse.CSR_ALG2), ("cusparse_alg3_ms", cusparse.CSR_ALG3)):
            peers[name] = lambda kind=kind: cusparse.SpMM(*arrays, x, kind)
    peers["pyg_ms"] = scattered
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
    return Case(run, lambda r: r[subject.nonzeros], want, 1e-5, {"pyg_ms": scattered})


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
    return Case(run, lambda r: r[subject.picked], want, 1e-5, {"pyg_ms": scattered})


CASES: dict[str, Callable[[Subject, int, torch.dtype], Case]] = {
    "spmm": functools.partial(_reduced, reduce="sum"),
    "weighted": spmm_case,
    "mean": functools.partial(_reduced, reduce="mean"),
    "max": functools.partial(_reduced, reduce="max"),
    "sddmm": sddmm_case,
    "softmax": softmax_case,
    "attention": attention_case,
}


NAMES = {
    "cusparse_alg2_ms": "cuSPARSE ALG2",
    "cusparse_alg3_ms": "cuSPARSE ALG3",
    "cusparse_sddmm_ms": "cuSPARSE SDDMM",
    "torch_sparse_ms": "torch.sparse",
    "pyg_ms": "gather + scatter",
}


def best_peer(case: Case, messages: int, known: dict[str, float | None]) -> tuple[float | None, str | None]:
    """The fastest peer whose result is right, and its name. `known`: times of peers that need not be taken again."""
    times: dict[str, float] = {}
    for column, make in case.peers.items():
        if column == "pyg_ms" and messages > (MANY_BYTES if times else MOST_BYTES):
            continue
        if column not in known:
            try:
                known[column] = _peer_ms(case, make, min(times.values(), default=None))
            except RuntimeError as problem:  # out of memory is one
                left_out(f"{NAMES[column]}: {problem}")
                known[column] = None
        if (taken := known[column]) is not None:
            times[column] = taken
    best = min(times, key=times.__getitem__, default=None)
    return (None, None) if best is None else (times[best], NAMES[best])


def _peer_ms(case: Case, make: Callable, best: float | None) -> float | None:
    """Time of a peer; None if it is far from being the best."""
    call = make()
    if not relative_error(case.sampled(call()), case.want) < 10 * case.limit:
        raise RuntimeError("wrong result")
    if best is not None and median_ms([call], 1)[0] > HOPELESS * best:
        return None
    return median_ms([call])[0]


def measure(subject: Subject, ready: Graph | None, op: str, width: int, known: dict) -> dict:
    """A cell, as a row of the table."""
    graph = subject.graph
    case = CASES[op](subject, width, torch.float32)
    row: dict = {"op": op, "width": width, "rel_error": case.error(case.ours(graph))}
    ways = [lambda: case.ours(graph)]
    if ready is not None:
        case.error(case.ours(ready))
        ways.append(lambda: case.ours(ready))
    times = median_ms(ways)
    row["given_ms"] = times[0]
    if ready is not None:
        row |= {"prepared_ms": times[1], "prepared_vs_given": times[0] / times[1]}
    row["best_ms"], row["best_peer"] = best_peer(case, graph.nnz * width * 4, known)
    if row["best_ms"]:
        row["vs_best"] = row["best_ms"] / row["given_ms"]
    return row


def prepared(graph: Graph, reorder: bool) -> Graph:
    """The same graph, prepared, which says on stderr what that found."""
    fresh = Graph(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols)
    print(gnnaccel.prepare(fresh, transposed=False, reorder=reorder), file=sys.stderr, flush=True)
    return fresh


def measure_graph(name: str, wanted: list[tuple[str, int]], args: argparse.Namespace, cells: dict) -> bool:
    """Adds cells of one graph, width by width; False if the time was up before all were there."""
    subject = Subject(grid_graphs.load(name, args.scale, args.data))
    ready = None
    if subject.graph.indptr.is_cuda:
        subject.graph = prepared(subject.graph, False)
    if not args.no_order:
        ready = prepared(subject.graph, True)
        ready = ready if schedule.of(ready).reordered else None
    about = {"graph": Path(name).stem, "nodes": subject.graph.num_rows, "edges": subject.graph.nnz}
    peers: dict[tuple[str, int], dict[str, float | None]] = {}
    for op, width in sorted(wanted, key=lambda cell: cell[1]):
        if time.perf_counter() > args.until:
            return False
        # The same call of cuSPARSE for all of these; gather + scatter is not, and counts where cells are small.
        group = "sums" if op in ("spmm", "weighted", "mean") else op
        known = peers.setdefault((group, width), {})
        known.pop("pyg_ms", None)
        row = about | measure(subject, ready, op, width, known)
        cells[about["graph"], op, str(width)] = {column: str(short(row.get(column))) for column in grid_table.COLUMNS}
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(grid_graphs.GRAPHS))
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--ops", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--cells", nargs="+", metavar="OP:WIDTH", help="of all graphs, in place of --widths and --ops")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink generated graphs")
    parser.add_argument("--data", type=Path, default=grid_graphs.DATA, help="folder of the real graphs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="wall time after which no cell begins")
    parser.add_argument("--no-order", action="store_true", help="leave out prepare(reorder=True)")
    parser.add_argument("--never-pad", action="store_true", help="inner products of odd widths without copies")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to go on with and to write, after every graph")
    parser.add_argument("--join", nargs="+", metavar="TABLE", help="write these as one to --csv; measures nothing")
    parser.add_argument("--compare", nargs="+", metavar="TABLE", help="a table, beside the committed one of its GPU or "
                        "an older one named first; measures nothing")  # fmt: skip
    args = parser.parse_args()
    for cell in args.cells or ():
        op, _, width = cell.partition(":")
        if op not in CASES or not width.isdecimal() or width == "0":
            parser.error(f"--cells: expected an op of {', '.join(CASES)}, a colon and a width, got {cell!r}")
    if args.compare and len(args.compare) > 2:
        parser.error(f"--compare: expected one table or two, got {len(args.compare)}")
    return args


def wanted_of(args: argparse.Namespace, cells: dict) -> dict[str, list[tuple[str, int]]]:
    """By graph, the cells that are not there yet."""
    pairs = [(op, w) for op in args.ops for w in args.widths if op != "softmax" or w <= MOST_HEADS]
    if args.cells:
        pairs = [(op, int(width)) for op, _, width in (cell.partition(":") for cell in args.cells)]
    lacking = {g: [(op, w) for op, w in pairs if (Path(g).stem, op, str(w)) not in cells] for g in args.graphs}
    return {graph: left for graph, left in lacking.items() if left}


def main() -> int:
    args = arguments()
    args.until = time.perf_counter() + args.seconds
    if args.compare:
        *older, new = args.compare
        return min(len(grid_table.compare(older[0] if older else grid_table.committed(new), new)), 1)
    head, cells = grid_table.join(args.join or ([args.csv] if args.csv and Path(args.csv).exists() else []))
    if not args.join:
        if args.never_pad:
            bounds.PADDED_READS = float("inf")
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
        torch.manual_seed(0)
        now = provenance(args.commit, "float32, int32 indices; median of single calls in ms", clocks_under_load())
        if head and grid_table.gpu(now) != grid_table.gpu(head):
            raise SystemExit(
                f"{args.csv}: expected a table of {grid_table.gpu(now)}, got one of {grid_table.gpu(head)}"
            )
        head += [line for line in now if line not in head]
        for name, wanted in wanted_of(args, cells).items():
            begin = time.perf_counter()
            done = measure_graph(name, wanted, args, cells)
            print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            if args.csv:
                grid_table.write(args.csv, head, cells)
            if not done:
                break
        left = wanted_of(args, cells)
        if left:
            print(f"{sum(map(len, left.values()))} cells are left: {' '.join(left)}")
    elif args.csv:
        grid_table.write(args.csv, head, cells)
    print("\n".join((*head, *grid_table.worst(cells, list(CASES)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
