"""Fused additive attention (GAT) on CUDA: forward and backward beside an SpMM, the ops it stands for, and PyG's path.

    python benchmarks/cuda_attention.py --csv out.csv
    python benchmarks/cuda_attention.py --graphs arxiv-like:sorted --shapes 1x32 4x16

Results and gradients are checked first, against the composition of our own sddmm, edge_softmax and spmm in float64
(which the tests compare with the definition). Times are medians of single calls in device time, in milliseconds.
composed: our three ops and a leaky_relu, which keep [edges, heads]. pyg: gather, softmax by scatter, gather, scatter,
which keep [edges, heads, features]; left blank where that is too much memory. recorded: dgNN's fused GAT forward, of
one head, on the same graphs and GPU.
"""

from __future__ import annotations

import argparse
import csv

import graphs
import torch
from timing import peer_ms, provenance, relative_error, time_ms

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.structure import Graph
from gnnaccel.ops import reference

GRAPHS = (
    "arxiv-like:sorted",
    "arxiv-like",
    "amazon0505-like:sorted",
    "artist-like",
    "yeast-like",
    "reddit-like:sorted",
    "reddit-like",
)
SHAPES = ("1x32", "1x128", "4x16", "8x8", "4x64")
RECORDED = {("arxiv-like:sorted", "1x32"): 1.15, ("arxiv-like:sorted", "1x128"): 1.23,
            ("reddit-like:sorted", "1x32"): 16.3, ("reddit-like:sorted", "1x128"): 16.0}  # fmt: skip
COLUMNS = ("graph", "nodes", "edges", "shape", "dtype", "forward_ms", "kept_ms", "backward_ms", "spmm_ms",
           "forward_vs_spmm", "backward_vs_forward", "composed_forward_ms", "composed_backward_ms",
           "pyg_forward_ms", "pyg_both_ms", "recorded_forward_ms", "rel_error")  # fmt: skip


def composed(graph: Graph, x, source, target):
    scores = torch.nn.functional.leaky_relu(ops.sddmm(graph, source, target, "add", "u", "v"), 0.2)
    return ops.spmm(graph, x, ops.edge_softmax(graph, scores))


def plain(graph: Graph, rows, cols, x, source, target):
    """What PyG's GATConv runs on edge_index."""
    scores = torch.nn.functional.leaky_relu(source[cols] + target[rows], 0.2)
    index = rows.view(-1, 1).expand_as(scores)
    top = scores.detach().new_zeros(target.shape).scatter_reduce_(0, index, scores.detach(), "amax", include_self=False)
    p = (scores - top[rows]).exp()
    p = p / (torch.zeros_like(top).index_add_(0, rows, p)[rows] + 1e-16)
    return x.new_zeros(graph.num_rows, *x.shape[1:]).index_add(0, rows, x[cols] * p.unsqueeze(-1))


def measure(graph: Graph, name: str, shape: str, dtype: torch.dtype, peers: bool) -> dict:
    heads, feats = map(int, shape.split("x"))
    shapes = ((graph.num_cols, heads, feats), (graph.num_cols, heads), (graph.num_rows, heads))
    given = [torch.randn(s, device=graph.device, dtype=dtype) for s in shapes]
    leaves = [t.clone().requires_grad_() for t in given]
    grad = torch.randn(graph.num_rows, heads, feats, device=graph.device, dtype=dtype)

    def backward_of(op):
        out = op(graph, *leaves)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    exact = [t.double().requires_grad_() for t in given]
    want = composed(graph, *exact)
    want = (want.detach(), *torch.autograd.grad(want, exact, grad.double()))
    got = (ops.attention(graph, *leaves), *backward_of(ops.attention)())
    error = max(relative_error(a.detach(), b) for a, b in zip(got, want, strict=True))
    if not error < (1e-4 if dtype == torch.float32 else 3e-2):
        raise SystemExit(f"{name} {shape}: wrong result: relative error {error}")
    del want, got, exact
    weight = torch.rand(graph.nnz, device=graph.device, dtype=dtype)
    flat = given[0].flatten(1)
    row = {
        "forward_ms": time_ms(lambda: ops.attention(graph, *given))[0],
        "kept_ms": time_ms(lambda: ops.attention(graph, *leaves))[0],
        "backward_ms": time_ms(backward_of(ops.attention))[0],
        "spmm_ms": time_ms(lambda: ops.spmm(graph, flat, weight))[0],
        "composed_forward_ms": time_ms(lambda: composed(graph, *given))[0],
        "composed_backward_ms": time_ms(backward_of(composed))[0],
        "rel_error": f"{error:.2g}",
        "recorded_forward_ms": RECORDED.get((name, shape)) if dtype == torch.float32 else None,
    }
    if peers and graph.nnz * heads * feats * 4 < 40e9:
        rows, cols = reference.rows_of(graph.indptr), graph.indices.long()
        row["pyg_forward_ms"] = peer_ms(lambda: plain(graph, rows, cols, *given))
        row["pyg_both_ms"] = peer_ms(lambda: torch.autograd.grad(plain(graph, rows, cols, *leaves), leaves, grad))
    row["forward_vs_spmm"] = row["forward_ms"] / row["spmm_ms"]
    row["backward_vs_forward"] = row["backward_ms"] / row["forward_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), help="names of benchmarks/graphs.py")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="heads x features of a head")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--reorder", action="store_true", help="let gnnaccel.prepare look for an order")
    parser.add_argument("--no-peers", action="store_true", help="without PyG's path")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(
        args.commit, "medians of single calls in ms, prepared graphs; kept: a forward that a backward follows"
    )
    print("\n".join(head))
    lines = []
    for name in args.graphs:
        made = graphs.generate(name)
        graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
        gnnaccel.prepare(graph, reorder=args.reorder)
        for shape in args.shapes:
            row = measure(graph, name, shape, getattr(torch, args.dtype), not args.no_peers)
            row |= {"graph": name, "nodes": graph.num_rows, "edges": graph.nnz, "shape": shape, "dtype": args.dtype}
            lines.append([_short(row.get(column)) for column in COLUMNS])
            print(
                *(f"{column}={value}" for column, value in zip(COLUMNS, lines[-1], strict=True) if value != ""),
                flush=True,
            )
            torch.cuda.empty_cache()
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            file.writelines(line + "\n" for line in head)
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


def _short(value):
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    main()
