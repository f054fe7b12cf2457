"""Graph attention on CUDA: forward and backward beside an SpMM, the ops that a fused one stands for, and PyG's path.

    python benchmarks/cuda_attention.py --csv out.csv
    python benchmarks/cuda_attention.py --graphs arxiv-like:sorted --kinds additive --shapes 1x32 4x16
    python benchmarks/cuda_attention.py --dropout 0.5 --no-peers

Kinds: additive (GAT; one op), gatv2 (its scores, and given), dot (transformers, and AGNN on normalised features; one
op), given (scores per edge; one op). Results and gradients are checked first, against the composed ops in float64 (with
dropout against the same op). Times are medians of single calls in device time, in milliseconds.
composed: by sddmm or gatv2_scores, leaky_relu, edge_softmax, dropout and spmm, which keep [edges, heads]. pyg: gather,
softmax by scatter, gather, scatter, which keep [edges, heads, features]; blank where that is too much memory.
recorded: dgNN's fused GAT forward (float32) and Fused3S's dot-product attention (float16), of one head, on the same
graphs and GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools

import graphs
import torch
from timing import peer_ms, provenance, relative_error, save_table, shown, time_ms
from torch.nn.functional import leaky_relu

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

GRAPHS = ("arxiv-like:sorted", "arxiv-like", "amazon0505-like:sorted", "artist-like", "yeast-like",
          "reddit-like:sorted", "reddit-like")  # fmt: skip
SHAPES = ("1x32", "1x128", "4x16", "8x8", "4x64")
RECORDED = {
    ("additive", "float32", "arxiv-like:sorted"): {"1x32": 1.15, "1x128": 1.23},
    ("additive", "float32", "reddit-like:sorted"): {"1x32": 16.3, "1x128": 16.0},
    ("dot", "float16", "arxiv-like:sorted"): {"1x32": 0.31, "1x128": 0.47},
    ("dot", "float16", "reddit-like:sorted"): {"1x32": 8.6, "1x128": 13.3},
}
COLUMNS = ("graph", "nodes", "edges", "kind", "shape", "dtype", "forward_ms", "kept_ms", "backward_ms", "spmm_ms",
           "sddmm_ms", "forward_vs_spmm", "backward_vs_forward", "composed_forward_ms", "composed_backward_ms",
           "pyg_forward_ms", "pyg_both_ms", "recorded_forward_ms", "rel_error")  # fmt: skip
PYG_LIMIT_BYTES = 20e9  # of one message per edge


def weighted(graph: Graph, x, scores, dropout):
    return ops.spmm(graph, x, torch.nn.functional.dropout(ops.edge_softmax(graph, scores), dropout, dropout > 0))


def composed_additive(graph: Graph, x, source, target, dropout=0.0):
    return weighted(graph, x, leaky_relu(ops.sddmm(graph, source, target, "add", "u", "v"), 0.2), dropout)


def gatv2(graph: Graph, x, y, vectors, **dropout):
    return ops.edge_attention(graph, ops.gatv2_scores(graph, x, y, vectors), x, **dropout)


def composed_gatv2(graph: Graph, x, y, vectors, dropout=0.0):
    return weighted(graph, x, ops.gatv2_scores(graph, x, y, vectors), dropout)


def dot(graph: Graph, value, key, query, **dropout):
    return ops.dot_attention(graph, query, key, value, scale=1.0, **dropout)


def composed_dot(graph: Graph, value, key, query, dropout=0.0):
    return weighted(graph, value, ops.sddmm(graph, key, query, "dot", "u", "v").squeeze(-1), dropout)


def given_scores(graph: Graph, x, scores, **dropout):
    return ops.edge_attention(graph, scores, x, **dropout)


def composed_given(graph: Graph, x, scores, dropout=0.0):
    return weighted(graph, x, scores, dropout)


OURS = {"additive": ops.attention, "gatv2": gatv2, "dot": dot, "given": given_scores}
COMPOSED = {"additive": composed_additive, "gatv2": composed_gatv2, "dot": composed_dot, "given": composed_given}


def inputs(graph: Graph, kind: str, heads: int, feats: int, dtype: torch.dtype) -> list[torch.Tensor]:
    sources, targets = (graph.num_cols, heads, feats), (graph.num_rows, heads, feats)
    shapes = {
        "additive": (sources, sources[:2], targets[:2]),
        "gatv2": (sources, targets, (heads, feats)),
        "dot": (sources, sources, targets),
        "given": (sources, (graph.nnz, heads)),
    }[kind]
    made = [torch.randn(s, device=graph.device).to(dtype) for s in shapes]
    if kind == "dot":
        made[2] *= feats**-0.5
    return made


def plain(kind: str, graph: Graph, rows, cols, x, second, third=None):
    """What PyG's layers run on edge_index."""
    if kind == "additive":
        scores = leaky_relu(second[cols] + third[rows], 0.2)
    elif kind == "gatv2":
        scores = (leaky_relu(x[cols] + second[rows], 0.2) * third).sum(-1)
    elif kind == "dot":
        scores = (second[cols] * third[rows]).sum(-1)
    else:
        scores = second
    index, size = rows.view(-1, 1).expand_as(scores), (graph.num_rows, scores.shape[1])
    top = scores.detach().new_zeros(size).scatter_reduce_(0, index, scores.detach(), "amax", include_self=False)
    p = (scores - top[rows]).exp()
    p = p / (torch.zeros_like(top).index_add(0, rows, p)[rows] + 1e-16)
    return x.new_zeros(graph.num_rows, *x.shape[1:]).index_add(0, rows, x[cols] * p.unsqueeze(-1))


def measure(graph: Graph, name: str, kind: str, shape: str, dtype: torch.dtype, peers: bool, dropout: float) -> dict:
    heads, feats = map(int, shape.split("x"))
    given = inputs(graph, kind, heads, feats, dtype)
    leaves = [t.clone().requires_grad_() for t in given]
    grad = torch.randn(graph.num_rows, heads, feats, device=graph.device, dtype=dtype)
    ours = OURS[kind]
    if dropout:
        ours = functools.partial(ours, dropout=dropout, seed=torch.ones(1, dtype=torch.int64, device=graph.device))
    composed = functools.partial(COMPOSED[kind], dropout=dropout)

    def backward_of(op):
        out = op(graph, *leaves)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    exact = [t.double().requires_grad_() for t in given]
    want = composed(graph, *exact) if not dropout else ours(graph, *exact)
    want = (want.detach(), *torch.autograd.grad(want, exact, grad.double()))
    got = (ours(graph, *leaves), *backward_of(ours)())
    error = max(relative_error(a.detach(), b) for a, b in zip(got, want, strict=True))
    if not error < (1e-4 if dtype == torch.float32 else 5e-2):
        raise SystemExit(f"{name} {kind} {shape}: wrong result: relative error {error}")
    del want, got, exact
    weight, flat = torch.rand(graph.nnz, device=graph.device).to(dtype), given[0].flatten(1)
    own = flat[: graph.num_rows]
    row = {
        "forward_ms": time_ms(lambda: ours(graph, *given))[0],
        "kept_ms": time_ms(lambda: ours(graph, *leaves))[0],
        "backward_ms": time_ms(backward_of(ours))[0],
        "spmm_ms": time_ms(lambda: ops.spmm(graph, flat, weight))[0],
        "sddmm_ms": time_ms(lambda: ops.sddmm(graph, flat, own, "dot", "u", "v"))[0],
        "rel_error": f"{error:.2g}",
        "recorded_forward_ms": RECORDED.get((kind, str(dtype).removeprefix("torch."), name), {}).get(shape),
    }
    row["composed_forward_ms"] = time_ms(lambda: composed(graph, *given))[0]
    row["composed_backward_ms"] = time_ms(backward_of(composed))[0]
    if peers and graph.nnz * heads * feats * dtype.itemsize < PYG_LIMIT_BYTES:
        ends = reference.rows_of(graph.indptr), graph.indices.long()
        row["pyg_forward_ms"] = peer_ms(lambda: plain(kind, graph, *ends, *given))
        row["pyg_both_ms"] = peer_ms(lambda: torch.autograd.grad(plain(kind, graph, *ends, *leaves), leaves, grad))
    row["forward_vs_spmm"] = row["forward_ms"] / row["spmm_ms"]
    row["backward_vs_forward"] = row["backward_ms"] / row["forward_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), help="names of benchmarks/graphs.py")
    parser.add_argument("--kinds", nargs="+", default=list(OURS), choices=OURS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="heads x features of a head")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--dropout", type=float, default=0.0, help="of the weights; PyG's path is without")
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
        gnnaccel.prepare(graph, reorder=False)
        for kind, shape in itertools.product(args.kinds, args.shapes):
            row = measure(graph, name, kind, shape, getattr(torch, args.dtype), not args.no_peers, args.dropout)
            row |= {"graph": name, "nodes": graph.num_rows, "edges": graph.nnz, "kind": kind, "shape": shape}
            row["dtype"] = args.dtype
            lines.append(shown(COLUMNS, row))
            torch.cuda.empty_cache()
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
