"""Sums of rows that keep k entries (MaxK-GNN) on the CPU, forward and backward, beside our dense SpMM.

    python benchmarks/cpu_maxk.py --csv out.csv

A random graph; both sides through the public ops with autograd, in turns, on the same gradient. Results are checked
first. Times are medians in milliseconds, good as ratios; they hold for an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from timing import error_of, provenance, save_table, shown

from gnnaccel import ops
from gnnaccel._library import isa
from gnnaccel.graph.csr import Graph

COLUMNS = ("nodes", "edges", "width", "k", "threads", "isa", "maxk_ms", "topk_ms", "dense_forward_ms", "forward_ms",
           "dense_backward_ms", "backward_ms", "both_vs_dense", "with_maxk_vs_dense")  # fmt: skip


def steps(graph: Graph, x: torch.Tensor, grad: torch.Tensor):
    """(forward, backward) in milliseconds of a sum of x, and its result and gradient."""
    leaf = x.detach().requires_grad_()
    start = time.perf_counter()
    out = ops.spgemm(graph, leaf) if isinstance(leaf, ops.CBSR) else ops.spmm(graph, leaf)
    middle = time.perf_counter()
    out.backward(grad)
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3, out.detach(), leaf.grad


def milliseconds(function) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--k", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(args.commit, "medians in ms")
    print("\n".join(head))
    ends = torch.randint(args.nodes, (2, args.edges))
    graph = Graph.from_coo(ends[0], ends[1], num_rows=args.nodes, num_cols=args.nodes)
    x, grad = torch.randn(args.nodes, args.width), torch.randn(args.nodes, args.width)
    lines = []
    for k in args.k:
        h = ops.maxk(x, k)
        dense = h.to_dense()
        found = [steps(graph, t, grad) for t in (dense, h)]
        error_of(found[1][2], found[0][2])
        places = h.indices().long()
        error_of(found[1][3].values(), found[0][3].gather(1, places))
        del found
        times = {name: [] for name in ("maxk", "topk", "dense_forward", "dense_backward", "forward", "backward")}
        for _ in range(args.repeat):
            for prefix, given in (("dense_", dense), ("", h)):
                forward, backward, *_ = steps(graph, given, grad)
                times[prefix + "forward"].append(forward)
                times[prefix + "backward"].append(backward)
            times["maxk"].append(milliseconds(lambda k=k: ops.maxk(x, k)))
            times["topk"].append(milliseconds(lambda k=k: x.topk(k)))
        row = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
        both, ours = row["dense_forward_ms"] + row["dense_backward_ms"], row["forward_ms"] + row["backward_ms"]
        row |= {"both_vs_dense": both / ours, "with_maxk_vs_dense": both / (ours + row["maxk_ms"])}
        row |= {"nodes": args.nodes, "edges": args.edges, "width": args.width, "k": k}
        row |= {"threads": torch.get_num_threads(), "isa": isa()}
        lines.append(shown(COLUMNS, row))
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
