"""Our CUDA ops against torch's own sparse kernels (cuSPARSE) and the gather and index_add that PyG runs.

    python benchmarks/cuda_ops.py --graphs arxiv-like reddit-like --widths 32 128 --csv out.csv

Every result is checked first, against float64 on the longest row and a sample of rows. Times are medians of
single calls between CUDA events with the calls queued ahead (so device time, without the host's), in
milliseconds, inputs on the device, caches as the previous call left them.
A peer that runs out of memory or has no such op is left blank. For graph_conv ("apart") the gather column is our own
SpMM with the rest around it as torch ops.
"""

from __future__ import annotations

import argparse
import csv

import graphs
import torch
from timing import error_of, peer_ms, provenance, sample, time_ms

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

SMALL = ("pubmed-like", "arxiv-like", "artist-like", "amazon0505-like", "yeast-like")
LARGE = ("proteins-like", "reddit-like", "products-like")
COLUMNS = ("graph", "nodes", "edges", "op", "width", "gnnaccel_ms", "spread_ms", "torch_sparse_ms", "gather_ms",
           "vs_torch_sparse", "vs_gather", "rel_error")  # fmt: skip


def cases(graph: Graph, width: int):
    """(op, ours, torch's sparse op or None, gather and scatter, check) for one graph and width."""
    device, nnz = graph.device, graph.nnz
    x, v = torch.randn(graph.num_cols, width, device=device), torch.randn(graph.num_rows, width, device=device)
    weight, scores = torch.rand(nnz, device=device), torch.randn(nnz, 4, device=device)
    rows = reference.rows_of(graph.indptr)
    cols = graph.indices.long()
    part, picked, nonzeros = sample(graph)
    matrix = torch.sparse_csr_tensor(graph.indptr, graph.indices, weight, (graph.num_rows, graph.num_cols))
    pattern = torch.sparse_csr_tensor(graph.indptr, graph.indices, torch.zeros_like(weight), matrix.shape)
    x64, v64, w64 = x.double(), v.double(), weight[nonzeros].double()

    def gathered(reduce):
        if reduce == "max":
            index = rows.view(-1, 1).expand(-1, width)
            return x.new_zeros(graph.num_rows, width).scatter_reduce_(0, index, x[cols], "amax", include_self=False)
        return x.new_zeros(graph.num_rows, width).index_add_(0, rows, x[cols] * weight.view(-1, 1))

    def dots(u, v, edges):
        return (u[cols[edges]] * v[rows[edges]]).sum(-1)

    def softmax_by_scatter():
        index = rows.view(-1, 1).expand(-1, 4)
        top = scores.new_zeros(graph.num_rows, 4).scatter_reduce_(0, index, scores, "amax", include_self=False)
        p = (scores - top[rows]).exp()
        return p / scores.new_zeros(graph.num_rows, 4).index_add_(0, rows, p)[rows]

    def with_gradients(leaf, op):
        return torch.autograd.grad(op(leaf), leaf, v)

    leaf = x.detach().clone().requires_grad_()
    back = graph.transposed
    part_back, back_rows, back_nonzeros = sample(back)
    back_weight = weight[back.edge_ids[back_nonzeros].long()].double()

    yield ("spmm mul sum", lambda: ops.spmm(graph, x, weight), lambda: matrix @ x, lambda: gathered("sum"),
           lambda r: error_of(r[picked], reference.spmm(part, x64, w64.view(-1, 1), "mul", "sum")))  # fmt: skip
    yield ("spmm copy sum", lambda: ops.spmm(graph, x), None, None,
           lambda r: error_of(r[picked], reference.spmm(part, x64, None, "copy_lhs", "sum")))  # fmt: skip
    source_scale, row_scale = torch.rand(graph.num_cols, device=device), torch.rand(graph.num_rows, device=device)
    bias, u64, r64 = torch.randn(width, device=device), source_scale.double(), row_scale[picked].double()
    wants = {
        "relu": (part, x64, None, u64, r64, bias.double(), True),
        "scale": (part, x64, None, u64, None, None, False),
    }

    def layer():  # what a GCN layer does around its sum, one step at a time
        return torch.relu(ops.spmm(graph, x * source_scale[:, None]) * row_scale[:, None] + bias)

    def fused():
        return ops.graph_conv(graph, x, source_scale=source_scale, row_scale=row_scale, bias=bias, relu=True)

    yield ("graph_conv: scales, bias, ReLU; apart", fused, None, layer,
           lambda r: error_of(r[picked], reference.graph_conv(*wants["relu"])))  # fmt: skip
    yield ("graph_conv: source scale; apart", lambda: ops.graph_conv(graph, x, source_scale=source_scale), None,
           lambda: ops.spmm(graph, x * source_scale[:, None]),
           lambda r: error_of(r[picked], reference.graph_conv(*wants["scale"])))  # fmt: skip
    yield ("spmm copy max", lambda: ops.spmm(graph, x, reduce="max"), None, lambda: gathered("max"),
           lambda r: error_of(r[picked], reference.spmm(part, x64, None, "copy_lhs", "max")))  # fmt: skip
    yield ("spmm mul sum, forward and backward to x",
           lambda: with_gradients(leaf, lambda t: ops.spmm(graph, t, weight)), None,
           lambda: with_gradients(leaf, lambda t: t.new_zeros(v.shape).index_add(0, rows, t[cols] * weight[:, None])),
           lambda r: error_of(r[0][back_rows], reference.spmm(part_back, v64, back_weight[:, None], "mul", "sum")),
           )  # fmt: skip
    yield ("sddmm dot", lambda: ops.sddmm(graph, x, v),
           lambda: torch.sparse.sampled_addmm(pattern, v, x.t(), beta=0.0),
           lambda: dots(x, v, slice(None)),
           lambda r: error_of(r[nonzeros], dots(x64, v64, nonzeros)[:, None]))  # fmt: skip
    yield ("edge_softmax 4 heads", lambda: ops.edge_softmax(graph, scores), None, softmax_by_scatter,
           lambda r: error_of(r[nonzeros], reference.edge_softmax(part, scores[nonzeros].double())))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=[*SMALL, *LARGE], help="names of benchmarks/graphs.py")
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--ops", nargs="+", help="only ops whose name contains one of these")
    parser.add_argument("--no-peers", action="store_true", help="time our ops alone")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    note = "fp32, int32 indices; median of single calls in ms; vs_*: how many times faster gnnaccel is"
    head = provenance(args.commit, note)
    print("\n".join(head))
    print(f"{'graph':18s} {'op':42s} {'D':>4s} {'ours':>8s} {'spread':>7s} {'sparse':>8s} {'gather':>8s}   ratios")
    lines = []
    for name in args.graphs:
        made = graphs.generate(name)
        graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
        for width in args.widths:
            for op, ours, sparse, gather, check in cases(graph, width):
                if args.ops and not any(part in op for part in args.ops):
                    continue
                error = check(ours())
                own, spread = time_ms(ours)
                peers = [None if f is None or args.no_peers else peer_ms(f) for f in (sparse, gather)]
                lines.append((name, graph.num_rows, graph.nnz, op, width, own, spread, *peers, error))
                show = ["" if p is None else f"{p:.3f}" for p in peers]
                ratios = " ".join("-" if p is None else f"{p / own:.2f}x" for p in peers)
                print(f"{name:18s} {op:42s} {width:4d} {own:8.3f} {spread:7.3f} {show[0]:>8s} {show[1]:>8s}   {ratios}")
        del graph, made
        torch.cuda.empty_cache()
    if args.csv:
        write_csv(args.csv, head, lines)


def write_csv(path: str, head: list[str], lines: list[tuple]) -> None:
    """The table, with its provenance on top."""

    def show(value):
        return "" if value is None else f"{value:.4g}"

    with open(path, "w", newline="") as file:
        file.write("\n".join(head) + "\n")
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for *names, own, spread, sparse, gather, error in lines:
            ratios = [None if p is None else p / own for p in (sparse, gather)]
            writer.writerow([*names, *(show(v) for v in (own, spread, sparse, gather, *ratios, error))])


if __name__ == "__main__":
    main()
