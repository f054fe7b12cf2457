"""SpMM and SDDMM on tensor cores, by tiles of the translated graph, beside our kernels for CUDA cores and cuSPARSE.

    python benchmarks/cuda_tiles.py --csv out.csv
    python benchmarks/cuda_tiles.py --graphs blocks:4 arxiv-like:sorted --widths 64 128

blocks:K is a matrix of 4096 rows with K dense blocks of 16 x 16 in each window of 16 rows (TC-GNN, Table 6), blocks:K:P
the same with P per cent of each block, blocks:K:P:N of N rows; other names are those of graphs.py, without repeated
edges. Results are checked first, against float64 where that fits and else against our kernel for CUDA cores. Times are
medians of single calls in device time, in milliseconds. csr: our kernels for CUDA cores, prepared; tiled: tensor
cores; auto: what `ops` take by themselves on a prepared graph; tf32: tiled where torch may use it; cusparse (float32
alone): the better of its SpMM algorithms 2 and 3, or its SDDMM, with preprocessing. authors: TC-GNN's own kernels, as
measured once on an H200. reuse: nonzeros per column of a window of 16 rows; density: of blocks of 16 x 8. translate_ms:
wall time of a translation with everything warm; repaid: calls after which it is won back, over what csr takes.
"""

from __future__ import annotations

import argparse
import math
import time

import cusparse
import graphs
import torch
from timing import peer_ms, provenance, relative_error, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops, tiles
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference
from gnnaccel.tiles.translate import translate

BLOCKS = (
    *(f"blocks:{k}" for k in (1, 2, 4, 8, 16, 32)),
    *(f"blocks:{k}:{p}" for k in (8, 32) for p in (5, 10, 15, 20, 25, 50)),
    *(f"blocks:{k}:{p}:65536" for k in (2, 8) for p in (10, 20, 25, 100)),
)
SORTED = ("arxiv-like:sorted", "amazon0505-like:sorted", "yeast-like", "proteins-like:sorted", "reddit-like:sorted")
AUTHORS = {  # (op, graph): {width: ms}
    ("spmm", "arxiv-like"): {32: 2.0, 128: 2.5},
    ("spmm", "blogcatalog-like"): {32: 3.1, 128: 3.6},
    ("spmm", "yeast-like"): {32: 0.73, 128: 1.2},
    ("spmm", "reddit-like"): {32: 155.0, 128: 184.0},
    ("sddmm", "arxiv-like"): {32: 6.2, 128: 14.5},
}
GRAPHS = (*BLOCKS, *SORTED, "arxiv-like", "blogcatalog-like", "reddit-like")
WIDTHS = (16, 32, 64, 128, 256)
FEW = (16, 64, 128)
CASES = (  # op, dtype, weighted, widths
    ("spmm", torch.float32, False, WIDTHS),
    ("spmm", torch.float32, True, FEW),
    ("spmm", torch.bfloat16, False, FEW),
    ("sddmm", torch.float32, False, FEW),
    ("sddmm", torch.bfloat16, False, FEW),
)
COLUMNS = ("graph", "nodes", "edges", "reuse", "density", "translate_ms", "op", "dtype", "weighted", "width", "csr_ms",
           "tiled_ms", "auto_ms", "tf32_ms", "cusparse_ms", "authors_ms", "csr_vs_tiled", "csr_vs_auto",
           "cusparse_vs_tiled", "authors_vs_auto", "repaid", "rel_error", "tf32_error")  # fmt: skip
BUDGET_MS = 30.0  # of a measurement
EXACT_LIMIT = 3e9  # elements of one message per edge, of a check in float64


def blocks(count: int, percent: int = 100, size: int = 4096) -> Graph:
    """A matrix with `count` blocks of 16 x 16, at random places and filled to `percent`, in each window."""
    windows = size // 16
    generator = torch.Generator().manual_seed(count)
    picks = torch.stack([torch.randperm(windows, generator=generator)[:count].sort().values for _ in range(windows)])
    row = (picks.unsqueeze(-1) * 16 + torch.arange(16)).view(windows, 1, -1)
    indices = row.expand(windows, 16, -1).reshape(size, -1)
    kept = torch.rand(indices.shape, generator=generator) < percent / 100
    indptr = torch.cat([torch.zeros(1), kept.sum(1).cumsum(0)])
    return Graph.from_csr(indptr.int().cuda(), indices[kept].int().cuda(), num_cols=size)


def make(name: str) -> Graph:
    if name.startswith("blocks:"):
        return blocks(*map(int, name.split(":")[1:]))
    made = graphs.generate(name)
    graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
    rows = reference.rows_of(graph.indptr)
    key = torch.unique(rows * graph.num_cols + graph.indices.long())
    indptr = torch.searchsorted(key, torch.arange(graph.num_rows + 1, device=key.device) * graph.num_cols)
    return Graph.from_csr(indptr.int(), (key % graph.num_cols).int(), num_cols=graph.num_cols)


def translation_ms(graph: Graph, repeat: int = 3) -> float:
    times = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        translate(graph)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[1:])[repeat // 2]


def tf32(function):
    """`function` where torch may use TF32."""

    def run():
        torch.set_float32_matmul_precision("high")
        try:
            return function()
        finally:
            torch.set_float32_matmul_precision("highest")

    return run


def cusparse_ms(op: str, graph: Graph, x, weight) -> float | None:
    """The better of its ways."""
    arrays = graph.indptr, graph.indices
    if op == "sddmm":
        return peer_ms(cusparse.SDDMM(*arrays, x, x))
    values = torch.ones(graph.nnz, device="cuda") if weight is None else weight
    found = [peer_ms(cusparse.SpMM(*arrays, values, x, a)) for a in (cusparse.CSR_ALG2, cusparse.CSR_ALG3)]
    return min((ms for ms in found if ms is not None), default=None)


def measure(graph: Graph, name: str, op: str, dtype: torch.dtype, weighted: bool, width: int) -> dict:
    x = torch.randn(graph.num_cols, width, device="cuda").to(dtype)
    weight = torch.rand(graph.nnz, device="cuda").to(dtype) if weighted else None

    def call(kernel: str, x=x, weight=weight):
        if op == "sddmm":
            return ops.sddmm(graph, x, x, kernel=kernel)
        return ops.spmm(graph, x, weight, kernel=kernel)

    def tiled():
        return call("tiled")

    if graph.nnz * width < EXACT_LIMIT:
        exact = call("csr", x.double(), None if weight is None else weight.double())
    else:
        exact = call("csr").double()
    single = dtype == torch.float32
    row = {"rel_error": relative_error(tiled(), exact)}
    if single:
        row["tf32_error"] = relative_error(tf32(tiled)(), exact)
    if not (row["rel_error"] < (1e-5 if single else 1e-2) and row.get("tf32_error", 0) < 1e-2):
        raise SystemExit(f"{name} {op} {dtype} {width}: wrong result: relative errors {row}")
    del exact
    for kernel in ("csr", "tiled", "auto"):
        row[f"{kernel}_ms"] = time_ms(lambda kernel=kernel: call(kernel), BUDGET_MS)[0]
    row["csr_vs_tiled"] = row["csr_ms"] / row["tiled_ms"]
    row["csr_vs_auto"] = row["csr_ms"] / row["auto_ms"]
    if single:
        row["tf32_ms"] = time_ms(tf32(tiled), BUDGET_MS)[0]
        row["cusparse_ms"] = cusparse_ms(op, graph, x, weight)
        if row["cusparse_ms"] is not None:
            row["cusparse_vs_tiled"] = row["cusparse_ms"] / row["tiled_ms"]
    authors = None if weighted or not single else AUTHORS.get((op, name), {}).get(width)
    if authors is not None:
        row |= {"authors_ms": authors, "authors_vs_auto": authors / row["auto_ms"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", nargs="+", default=list(GRAPHS), help="blocks:K[:P[:N]], or names of benchmarks/graphs.py"
    )
    parser.add_argument("--widths", nargs="+", type=int, help="features, in place of those of each case")
    parser.add_argument("--ops", nargs="+", default=["spmm", "sddmm"], help="of these alone")
    parser.add_argument("--unweighted", action="store_true", help="without weights alone")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(args.commit, "medians of single calls in ms, prepared graphs")
    print("\n".join(head))
    lines = []
    for name in args.graphs:
        graph = make(name)
        gnnaccel.prepare(graph, reorder=False)
        made = tiles.of(graph)
        common = {"graph": name, "nodes": graph.num_rows, "edges": graph.nnz, "reuse": made.column_reuse()}
        common |= {"density": made.density, "translate_ms": translation_ms(graph)}
        for op, dtype, weighted, widths in CASES:
            if op not in args.ops or (weighted and args.unweighted):
                continue
            widths = tuple(args.widths or widths)
            if not args.widths and dtype == torch.float32:
                widths = tuple(sorted({*widths, *(AUTHORS.get((op, name)) or ())}))
            for width in widths:
                row = common | {"op": op, "dtype": str(dtype)[6:], "weighted": int(weighted), "width": width}
                row |= measure(graph, name, op, dtype, weighted, width)
                gained = row["csr_ms"] - row["tiled_ms"]
                row["repaid"] = math.ceil(row["translate_ms"] / gained) if gained > 0 else None
                lines.append(shown(COLUMNS, row))
        torch.cuda.empty_cache()
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
