"""SpMM and SDDMM beside what there is to beat on an NVIDIA GPU: one command for the whole table.

    python benchmarks/cuda_kernels.py --csv out.csv
    python benchmarks/cuda_kernels.py --quick --graphs arxiv-like yeast-like --ops spmm
    python benchmarks/cuda_kernels.py --scale 0.01            # dry run, also without a GPU: checks results alone

Generates the graphs, checks every result against float64 on the longest row and a sample of rows, then times ours
beside cuSPARSE called directly (cusparse.py), torch.sparse, and the gather and index_add that PyG runs. Fastest
kernels on record (recorded.csv) stand in a column of their own. Times are medians of single calls between CUDA
events with the calls queued ahead (device time), in milliseconds, fp32 and int32, caches as the previous call left
them; preprocessing is not in them. Mini-batch steps are wall time, with building the graph in them (minibatch.py).
The summary printed last has the best public time over ours, and the part of the gather ceiling (kernel_summary.py).
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import cusparse
import graphs
import minibatch
import torch
from kernel_summary import PEERS, complete, summary, write_csv
from timing import clocks_under_load, error_of, left_out, provenance, relative_error, sample, time_ms
from torch import Tensor

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

GRAPHS = ("pubmed-like", "arxiv-like", "arxiv-like:sorted", "artist-like", "blogcatalog-like", "amazon0505-like",
          "amazon0505-like:sorted", "yeast-like", "proteins-like", "reddit-like", "products-like")  # fmt: skip
WIDTHS = (16, 32, 64, 128, 256)
OPS = ("spmm", "sddmm", "minibatch")
PYG_LIMIT_BYTES = 40e9  # of messages: above that PyG's path is not run
own_ms = functools.partial(time_ms, budget_ms=30.0, at_least=5, at_most=100)
others_ms = functools.partial(time_ms, budget_ms=30.0, at_least=3, at_most=100)


def prepare(graph: Graph, reorder: bool) -> tuple[Graph, float]:
    """The graph with its work lists, and the wall time of that; the second time, on a graph that knows nothing.

    reorder: with communities sought first. Without: what any graph gets that is used often.
    """
    for _ in range(2):
        fresh = Graph(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols)
        done = gnnaccel.prepare(fresh, transposed=False, reorder=reorder)
    return fresh, done.time_ms


class Subject:
    """A graph with what the ops on it share."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.weight = torch.rand(graph.nnz, device=graph.device)
        self.part, self.picked, self.nonzeros = sample(graph)

    @functools.cached_property
    def coo(self) -> tuple[Tensor, Tensor]:
        return reference.rows_of(self.graph.indptr), self.graph.indices.long()


@dataclass
class Case:
    """One op at one width. The peers are made when their turn comes, column -> function that makes the call."""

    ours: Callable[[Graph], Tensor]
    sampled: Callable[[Tensor], Tensor]
    want: Tensor
    limit: float
    peers: dict[str, Callable[[], Callable[[], Tensor]]] = field(default_factory=dict)

    def error(self, got: Tensor) -> float:
        return error_of(self.sampled(got), self.want, self.limit)


def spmm_case(subject: Subject, width: int, dtype: torch.dtype) -> Case:
    """Weighted sum of the sources' rows."""
    graph = subject.graph
    x = torch.randn(graph.num_cols, width, device=graph.device).to(dtype)
    weight = subject.weight.to(dtype)
    w64 = weight[subject.nonzeros].double().view(-1, 1)
    want = reference.spmm(subject.part, x.double(), w64, "mul", "sum")
    arrays = (graph.indptr, graph.indices, weight)

    def torch_sparse():
        matrix = torch.sparse_csr_tensor(*arrays, (graph.num_rows, graph.num_cols))
        return lambda: torch.sparse.mm(matrix, x)

    def pyg():
        rows, cols = subject.coo
        return lambda: x.new_zeros(graph.num_rows, width).index_add_(0, rows, x[cols] * weight.view(-1, 1))

    peers: dict = {
        "cusparse_alg2_ms": lambda: cusparse.SpMM(*arrays, x, cusparse.CSR_ALG2),
        "cusparse_alg3_ms": lambda: cusparse.SpMM(*arrays, x, cusparse.CSR_ALG3),
        "torch_sparse_ms": torch_sparse,
        "pyg_ms": pyg,
    }
    return Case(lambda g: ops.spmm(g, x, weight), lambda r: r[subject.picked], want, _limit(dtype), peers)


def sddmm_case(subject: Subject, width: int, dtype: torch.dtype) -> Case:
    """Dot product of the two ends of every edge."""
    graph = subject.graph
    x = torch.randn(graph.num_cols, width, device=graph.device).to(dtype)
    v = torch.randn(graph.num_rows, width, device=graph.device).to(dtype)
    rows = subject.picked[reference.rows_of(subject.part.indptr)]
    want = (x[subject.part.indices].double() * v[rows].double()).sum(-1)

    def torch_sparse():
        pattern = torch.sparse_csr_tensor(graph.indptr, graph.indices, x.new_zeros(graph.nnz), (len(v), len(x)))
        return lambda: torch.sparse.sampled_addmm(pattern, v, x.t(), beta=0.0).values()

    def pyg():
        rows, cols = subject.coo
        return lambda: (x[cols] * v[rows]).sum(-1)

    peers: dict = {
        "cusparse_sddmm_ms": lambda: cusparse.SDDMM(graph.indptr, graph.indices, x, v),
        "torch_sparse_ms": torch_sparse,
        "pyg_ms": pyg,
    }
    return Case(lambda g: ops.sddmm(g, x, v), lambda r: r.view(-1)[subject.nonzeros], want, _limit(dtype), peers)


def _limit(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2  # bf16 inputs are exact here: this is the rounding of the result


CASES = {"spmm": spmm_case, "sddmm": sddmm_case}


def peer_ms(column: str, case: Case) -> float | None:
    """Median time of a peer, or None if it cannot run or its result is wrong."""
    try:
        call = case.peers[column]()
        error = relative_error(case.sampled(call()), case.want)
        if not error < case.limit:
            raise RuntimeError(f"wrong result: relative error {error}")
        return others_ms(call)[0]
    except RuntimeError as problem:  # out of memory is one
        left_out(f"{PEERS[column]}: {problem}")
        return None


def measure(subject: Subject, op: str, width: int, args: argparse.Namespace, ready: Graph | None) -> dict:
    """All figures of one op at one width, as a row of the table."""
    graph = subject.graph
    dtype = getattr(torch, args.dtype)
    case = CASES[op](subject, width, dtype)
    row: dict = dict(op=op, width=width, dtype=args.dtype, rel_error=case.error(case.ours(graph)))
    row["gnnaccel_ms"], row["spread_ms"] = own_ms(lambda: case.ours(graph))
    if ready is not None:
        case.error(case.ours(ready))
        row["prepared_ms"] = own_ms(lambda: case.ours(ready))[0]
    if dtype != torch.float32:
        full = CASES[op](subject, width, torch.float32)
        full.error(full.ours(graph))
        row["fp32_ms"] = own_ms(lambda: full.ours(graph))[0]
        return row
    for column in case.peers:
        skipped = column == "pyg_ms" and (args.quick or graph.nnz * width * 4 > PYG_LIMIT_BYTES)
        if not (args.no_peers or skipped):
            row[column] = peer_ms(column, case)
    return row


def run_graph(name: str, args: argparse.Namespace, rows: list[dict]) -> None:
    """Adds a row for every op and width on one graph."""
    made = graphs.generate(name, "cuda" if torch.cuda.is_available() else "cpu", args.scale)
    graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
    about: dict = dict(graph=name, nodes=graph.num_rows, edges=graph.nnz, checksum=made["checksum"])
    subject = Subject(graph)
    if graph.indptr.is_cuda:
        subject.graph, about["list_cost_ms"] = prepare(graph, False)
    ready, cost_ms = prepare(graph, True) if args.prepared else (None, None)
    for op in args.ops:
        for width in args.widths if op in CASES else ():
            try:
                measured = measure(subject, op, width, args, ready)
            except SystemExit as wrong:
                raise SystemExit(f"{name} {op} D={width}: {wrong}") from None
            row = complete({**about, "prepare_cost_ms": cost_ms, **measured}, on_record=args.scale == 1)
            rows.append(row)
            best = "" if row["vs_best"] is None else f"{row['vs_best']:6.2f}x over {row['best_kernel']}"
            print(f"{name:22s} {op:5s} D={width:<4d} {row['gnnaccel_ms']:8.4g} ms {best}", file=sys.stderr, flush=True)
    if "minibatch" in args.ops and name == args.graphs[-1]:
        rows.append(complete({"graph": name, **minibatch.measure(graph, peers=not args.no_peers)}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), help="names of graphs.py; default: the 11")
    parser.add_argument("--widths", nargs="+", metavar="D", help=f"default: {' '.join(map(str, WIDTHS))}")
    parser.add_argument("--ops", nargs="+", default=list(OPS), help="of spmm sddmm minibatch (on the last graph named)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: ours, beside "
                        "our own float32; the peers are left out")  # fmt: skip
    parser.add_argument("--prepared", action="store_true", help="also time ours on a graph with a found node order")
    parser.add_argument("--quick", action="store_true", help="D 32 and 128, without PyG's path for spmm and sddmm")
    parser.add_argument("--no-peers", action="store_true", help="time ours alone")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs; figures then compare to nothing")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write, after every graph")
    args = parser.parse_args()
    # Lists may be separated by spaces or commas.
    args.graphs, args.ops = (" ".join(value).replace(",", " ").split() for value in (args.graphs, args.ops))
    widths = " ".join(args.widths or ()).replace(",", " ").split()
    args.widths = [int(width) for width in widths] or ([32, 128] if args.quick else list(WIDTHS))
    unknown = set(args.ops) - set(OPS)
    if unknown:
        parser.error(f"--ops: unknown {sorted(unknown)}; expected some of {' '.join(OPS)}")
    unknown = {name.removesuffix(":sorted") for name in args.graphs} - set(graphs.GRAPHS)
    if unknown:
        parser.error(f"--graphs: unknown {sorted(unknown)}; expected some of {' '.join(graphs.GRAPHS)}, or :sorted")
    return args


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
    torch.manual_seed(0)
    begin = time.perf_counter()
    notes = [f"{args.dtype}, int32 indices; median of single calls in ms; vs_*: how many times faster gnnaccel is"]
    if torch.cuda.is_available() and not args.no_peers:
        try:
            notes.append(f"cuSPARSE {cusparse.version()}")
        except RuntimeError as error:
            notes.append(str(error))
    head = provenance(args.commit, *notes, clocks_under_load())
    print("\n".join(head), flush=True)
    rows: list[dict] = []
    try:
        for name in args.graphs[-1:] if set(args.ops) == {"minibatch"} else args.graphs:
            run_graph(name, args, rows)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if args.csv:
                write_csv(args.csv, head, rows)
    finally:  # a wrong result ends the run, but what was measured before is worth seeing
        if args.csv:
            write_csv(args.csv, head, rows)
        print("\n".join(summary(rows)))
        worst = max((row["rel_error"] for row in rows), default=0.0)
        seconds = time.perf_counter() - begin
        print(f"\n{len(rows)} rows in {seconds:.0f} s; largest relative error of ours {worst:.2g}", flush=True)


if __name__ == "__main__":
    main()
