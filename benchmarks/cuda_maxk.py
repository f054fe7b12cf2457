"""Sums of rows that keep k entries (MaxK-GNN), forward and backward, beside our dense SpMM and the authors' kernels.

    python benchmarks/cuda_maxk.py --csv out.csv
    python benchmarks/cuda_maxk.py --graphs reddit-like --k 32 --dtype bfloat16

Graphs are those of graphs.py, prepared. Results are checked first, against our dense kernel on the expanded tensor, in
float64 where that fits. Times are medians of single calls in device time, in milliseconds. maxk: the selection;
read: one pass over x by torch.sum; forward: spgemm; outer, by_source: the two ways of its gradient; backward: the one
that `auto` takes; dense: our SpMM of the dense x, which is what both stand in for (the graphs are symmetric).
authors_*: MaxK-GNN's own kernels, as measured once on an H200.
"""

from __future__ import annotations

import argparse

import graphs
import torch
from timing import error_of, provenance, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.expand import collect, expand
from gnnaccel.ops.maxk import _maxk_op
from gnnaccel.ops.spgemm import _spgemm_op, _sspmm_op

AUTHORS = {  # graph: forward at k = 16, 32, 64, backward at the same, of 256 features
    "pubmed-like": (0.0343, 0.0412, 0.0592, 0.0196, 0.0328, 0.0467),
    "arxiv-like": (0.368, 0.448, 0.758, 0.128, 0.235, 0.369),
    "arxiv-like:sorted": (0.348, 0.413, 0.647, 0.129, 0.232, 0.337),
    "artist-like": (0.156, 0.188, 0.29, 0.0677, 0.14, 0.2),
    "blogcatalog-like": (0.24, 0.29, 0.462, 0.0915, 0.182, 0.28),
    "amazon0505-like": (0.836, 0.958, 1.57, 0.304, 0.561, 0.973),
    "amazon0505-like:sorted": (0.666, 0.755, 1.13, 0.279, 0.471, 0.682),
    "yeast-like": (1.57, 1.6, 1.69, 0.729, 0.892, 1.07),
    "proteins-like": (3.29, 4.82, 8.3, 1.92, 4.62, 6.92),
    "reddit-like": (4.94, 7.38, 13.3, 2.78, 6.79, 13.4),
    "products-like": (15, 16.4, 27.1, 9.43, 14.3, 26),
}
RECORDED = (16, 32, 64)
COLUMNS = ("graph", "nodes", "edges", "dtype", "width", "k", "read_ms", "maxk_ms", "dense_ms", "forward_ms",
           "authors_forward_ms", "outer_ms", "by_source_ms", "backward_ms", "authors_backward_ms", "maxk_vs_read",
           "maxk_share", "forward_vs_dense", "backward_vs_dense", "authors_vs_forward", "authors_vs_backward",
           "rel_error", "backward_error")  # fmt: skip
BUDGET_MS = 40.0
EXACT_LIMIT = 3e9  # nonzeros times features of a check in float64


def measure(graph: Graph, x: torch.Tensor, k: int, dense_ms: float, listed: bool) -> dict:
    width = x.shape[1]
    values, places = _maxk_op(x, k)
    exact = graph.nnz * width < EXACT_LIMIT
    kept = expand(values, places, width)
    wide = kept.double() if exact else kept
    forward, both = (arrays_of(graph, transposed, values, listed=listed) for transposed in (False, True))

    def product():
        return _spgemm_op(forward, values, places, width, None, None, None, False, False)

    def gradient(arrays):
        return lambda: _sspmm_op(arrays, x, places, None, None, arrays is both)

    limit = 1e-5 if x.dtype == torch.float32 else 1e-2
    row = {"rel_error": error_of(product(), ops.spmm(graph, wide), limit)}
    want = collect(ops.spmm(graph.transposed, x.double() if exact else x), places)
    row["backward_error"] = max(error_of(gradient(a)(), want, limit) for a in (forward, both))
    del want, wide, kept
    row["maxk_ms"] = time_ms(lambda: _maxk_op(x, k), BUDGET_MS)[0]
    row["read_ms"] = time_ms(lambda: x.sum(), BUDGET_MS)[0]
    row["forward_ms"] = time_ms(product, BUDGET_MS)[0]
    row["outer_ms"] = time_ms(gradient(forward), BUDGET_MS)[0]
    row["by_source_ms"] = time_ms(gradient(both), BUDGET_MS)[0]
    by_source = graph.nnz <= bounds.BY_SOURCE_DEGREE * graph.num_cols
    row["backward_ms"] = row["by_source_ms" if by_source else "outer_ms"]
    row["maxk_vs_read"] = row["maxk_ms"] / row["read_ms"]
    row["maxk_share"] = row["maxk_ms"] / row["forward_ms"]
    row["forward_vs_dense"] = dense_ms / row["forward_ms"]
    row["backward_vs_dense"] = dense_ms / row["backward_ms"]
    return row


def geometric_mean(values: list[float]) -> float:
    return float(torch.tensor(values).log().mean().exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(AUTHORS), help="names of benchmarks/graphs.py")
    parser.add_argument("--k", nargs="+", type=int, default=list(RECORDED))
    parser.add_argument("--width", type=int, default=256, help="features")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--reorder", action="store_true", help="prepare with an order of the rows, where one pays")
    parser.add_argument("--unlisted", action="store_true", help="without work lists, as in a graph's first 50 uses")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    head = provenance(args.commit, "medians of single calls in ms, prepared graphs")
    print("\n".join(head))
    lines, ratios = [], {"forward": [], "backward": []}
    for name in args.graphs:
        made = graphs.generate(name)
        graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
        del made
        gnnaccel.prepare(graph, reorder=args.reorder)
        x = torch.randn(graph.num_cols, args.width, device="cuda").to(dtype)
        dense_ms = time_ms(lambda x=x, graph=graph: ops.spmm(graph, x), BUDGET_MS)[0]
        for k in args.k:
            row = {"graph": name, "nodes": graph.num_rows, "edges": graph.nnz, "dtype": args.dtype}
            row |= {"width": args.width, "k": k, "dense_ms": dense_ms} | measure(
                graph, x, k, dense_ms, not args.unlisted
            )
            if dtype == torch.float32 and args.width == 256 and k in RECORDED and name in AUTHORS:
                recorded = AUTHORS[name][RECORDED.index(k) :: len(RECORDED)]
                for way, ms in zip(ratios, recorded, strict=True):
                    row |= {f"authors_{way}_ms": ms, f"authors_vs_{way}": ms / row[f"{way}_ms"]}
                    ratios[way].append(ms / row[f"{way}_ms"])
            lines.append(shown(COLUMNS, row))
        torch.cuda.empty_cache()
    for way, found in ratios.items():
        if found:
            head.append(f"# authors vs {way}: geometric mean {geometric_mean(found):.3f}, least {min(found):.3f}")
            print(head[-1])
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
