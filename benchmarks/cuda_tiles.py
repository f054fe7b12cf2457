"""SpMM on tensor cores, by tiles of the translated graph, beside our kernels for CUDA cores and cuSPARSE.

    python benchmarks/cuda_tiles.py --csv out.csv
    python benchmarks/cuda_tiles.py --graphs blocks:4 arxiv-like:sorted --widths 64 128

blocks:K is a matrix of 4096 rows with K dense blocks of 16 x 16 in each window of 16 rows (TC-GNN, Table 6), blocks:K:P
the same with P per cent of each block; other names are those of graphs.py, without repeated edges. Results are checked
first, against float64 where that fits and else against our kernel for CUDA cores. Times are medians of single calls in
device time, in milliseconds, fp32. auto: `ops.spmm` as it is, prepared; tiled: the same with method="tiled"; tf32:
where torch may use it; cusparse: the better of its algorithms 2 and 3 with preprocessing. reuse: nonzeros per column of
a window of 16 rows; density: of blocks of 16 x 8. translate_ms: wall time of a translation with everything warm.
"""

from __future__ import annotations

import argparse
import time

import cusparse
import graphs
import torch
from timing import peer_ms, provenance, relative_error, save_table, short, time_ms

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.structure import Graph
from gnnaccel.graph.translate import translate
from gnnaccel.ops import reference

GRAPHS = (*(f"blocks:{k}" for k in (1, 2, 4, 8, 16, 32)), *(f"blocks:{k}:{p}" for k in (8, 32) for p in (10, 25, 50)),
          "arxiv-like:sorted", "amazon0505-like:sorted", "yeast-like",
          "proteins-like:sorted", "reddit-like:sorted")  # fmt: skip
WIDTHS = (16, 32, 64, 128, 256)
COLUMNS = ("graph", "nodes", "edges", "reuse", "density", "translate_ms", "width", "weighted", "auto_ms", "tiled_ms",
           "tf32_ms", "cusparse_ms", "auto_vs_tiled", "cusparse_vs_tiled", "rel_error", "tf32_error")  # fmt: skip
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


def measure(graph: Graph, name: str, width: int, weighted: bool) -> dict:
    x = torch.randn(graph.num_cols, width, device="cuda")
    weight = torch.rand(graph.nnz, device="cuda") if weighted else None

    def tiled():
        return ops.spmm(graph, x, weight, method="tiled")

    if graph.nnz * width < EXACT_LIMIT:
        exact = ops.spmm(graph, x.double(), None if weight is None else weight.double())
    else:
        exact = ops.spmm(graph, x, weight).double()
    row = {"rel_error": relative_error(tiled(), exact), "tf32_error": relative_error(tf32(tiled)(), exact)}
    if not (row["rel_error"] < 1e-5 and row["tf32_error"] < 1e-2):
        raise SystemExit(f"{name} {width}: wrong result: relative errors {row}")
    del exact
    row["auto_ms"] = time_ms(lambda: ops.spmm(graph, x, weight))[0]
    row["tiled_ms"] = time_ms(tiled)[0]
    row["tf32_ms"] = time_ms(tf32(tiled))[0]
    values = torch.ones(graph.nnz, device="cuda") if weight is None else weight
    peers = []
    for algorithm in (cusparse.CSR_ALG2, cusparse.CSR_ALG3):
        peers.append(peer_ms(cusparse.SpMM(graph.indptr, graph.indices, values, x, algorithm)))
    found = [p for p in peers if p is not None]
    row["cusparse_ms"] = min(found) if found else None
    row["auto_vs_tiled"] = row["auto_ms"] / row["tiled_ms"]
    row["cusparse_vs_tiled"] = row["cusparse_ms"] / row["tiled_ms"] if found else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--graphs", nargs="+", default=list(GRAPHS), help="blocks:K, blocks:K:P, or names of benchmarks/graphs.py"
    )
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), help="features")
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
        tiles = graph.tiles()
        common = {"graph": name, "nodes": graph.num_rows, "edges": graph.nnz, "reuse": tiles.reuse()}
        common |= {"density": tiles.density, "translate_ms": translation_ms(graph)}
        for width in args.widths:
            for weighted in (False,) if args.unweighted else (False, True):
                row = common | {"width": width, "weighted": int(weighted)} | measure(graph, name, width, weighted)
                lines.append([short(row.get(column)) for column in COLUMNS])
                print(*(f"{c}={v}" for c, v in zip(COLUMNS, lines[-1], strict=True) if v != ""), flush=True)
        torch.cuda.empty_cache()
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
