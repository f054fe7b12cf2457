"""Our CUDA ops against torch's own sparse kernels (cuSPARSE) and the gather and index_add that PyG runs.

    python benchmarks/cuda_ops.py --graphs arxiv-like reddit-like --widths 32 128 --csv out.csv

Every result is checked first, against float64 on the longest row and a sample of rows. Times are medians of
single calls between CUDA events with the calls queued ahead (so device time, without the host's), in
milliseconds, inputs on the device, caches as the previous call left them.
A peer that runs out of memory or has no such op is left blank.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys

import graphs
import torch

from gnnaccel import ops
from gnnaccel.graph.structure import Graph
from gnnaccel.ops import reference

SMALL = ("pubmed-like", "arxiv-like", "artist-like", "amazon0505-like", "yeast-like")
LARGE = ("proteins-like", "reddit-like", "products-like")
COLUMNS = ("graph", "nodes", "edges", "op", "width", "gnnaccel_ms", "spread_ms", "torch_sparse_ms", "gather_ms",
           "vs_torch_sparse", "vs_gather", "rel_error")  # fmt: skip


def time_ms(function, budget_ms: float = 150.0) -> tuple[float, float]:
    """Median and interquartile range of single calls, in device time."""
    for _ in range(3):
        function()

    def measure(count):
        # The device waits while the host queues the calls: what is timed is the device's work, not Python's.
        torch.cuda._sleep(1_500_000 * count)
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for begin, end in marks:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return torch.tensor([a.elapsed_time(b) for a, b in marks])

    estimate = float(measure(3).median())
    times = measure(max(7, min(200, int(budget_ms / max(estimate, 1e-3)))))
    low, middle, high = times.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return middle, high - low


def peer_ms(function):
    """Median time of a peer, or None if it cannot run."""
    try:
        return time_ms(function)[0]
    except (torch.OutOfMemoryError, RuntimeError, NotImplementedError) as error:
        print(f"  (peer left out: {str(error).splitlines()[0][:90]})", file=sys.stderr)
        torch.cuda.empty_cache()
        return None


def sample(graph: Graph, count: int = 500):
    """A few rows, the longest among them, as a graph of their own; their numbers; their nonzeros."""
    degree = graph.indptr.diff().long()
    picks = torch.randint(graph.num_rows, (count,), device=graph.device)
    rows = torch.cat([degree.argmax().view(1), picks]).unique()
    indptr = torch.cat([rows.new_zeros(1), degree[rows].cumsum(0)])
    inside = torch.arange(int(indptr[-1]), device=graph.device) - indptr[:-1].repeat_interleave(degree[rows])
    nonzeros = graph.indptr.long()[rows].repeat_interleave(degree[rows]) + inside
    return Graph(indptr, graph.indices[nonzeros].long(), None, graph.num_cols), rows, nonzeros


def error_of(got, want) -> float:
    """Relative error in the Frobenius norm; a result that is wrong ends the benchmark."""
    error = float((got.double() - want).norm() / want.norm())
    if not error < 1e-5:
        raise SystemExit(f"wrong result: relative error {error}")
    return error


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


def provenance() -> list[str]:
    """Comment lines that say where the numbers come from."""

    def first_line(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "unknown"

    commit = first_line("git", "describe", "--always", "--dirty")
    driver = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return [
        f"# {torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, commit {commit}",
        f"# python {' '.join(a if '/' not in a or a == sys.argv[0] else a.rpartition('/')[2] for a in sys.argv)}",
        "# fp32, int32 indices; median of single calls in ms; vs_*: how many times faster gnnaccel is",
    ]


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
    head = provenance()
    if args.commit:
        head[0] = head[0].rpartition(" ")[0] + " " + args.commit
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
