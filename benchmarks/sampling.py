"""Neighbour sampling on the CPU: a batch with its renumbering, beside torch_sparse's and DGL's samplers.

    PYTHONPATH=.venv/sparse python benchmarks/sampling.py --scale 0.25 --csv out.csv      # make test-sparse builds it

Wall time of a batch in milliseconds, median and least of --count batches, samplers taken in turn on the same seeds.
batch_edges: of a batch, median. DGL samples again, for every layer, the nodes of the layers before it, so its batches
have more edges; vs_dgl compares batches, vs_dgl_edge the time per edge. torch_sparse has one thread whatever it is
given. kind "DGL's blocks" is DGL's sampler as the plug-in runs it. Full neighbourhoods are torch_sparse's,
edge by edge, which is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import graphs
import torch
from timing import provenance, save_table, shown
from torch import Tensor

from gnnaccel import dgl_backend, sampling

COLUMNS = (
    "graph", "nodes", "edges", "threads", "kind", "batch_nodes", "batch_edges", "gnnaccel_ms", "gnnaccel_least_ms",
    "torch_sparse_ms", "torch_sparse_least_ms", "dgl_ms", "dgl_least_ms", "dgl_edges", "vs_torch_sparse", "vs_dgl",
    "vs_dgl_edge",
)  # fmt: skip
Sampler = Callable[[Tensor], tuple[int, int]]  # seeds -> nodes and edges of the batch


def ours(indptr: Tensor, indices: Tensor, fanouts: list[int], **options) -> Sampler:
    def run(seeds: Tensor) -> tuple[int, int]:
        out = sampling.neighbor_sample(indptr, indices, seeds.to(indptr.dtype), fanouts, **options)
        return out.node.numel(), out.edge.numel()

    return run


def torch_sparse(indptr: Tensor, indices: Tensor, fanouts: list[int]) -> Sampler | None:
    try:
        import torch_sparse  # noqa: F401
    except ImportError:
        return None

    def run(seeds: Tensor) -> tuple[int, int]:
        node, _, _, edge = torch.ops.torch_sparse.neighbor_sample(indptr, indices, seeds, fanouts, False, True)
        return node.numel(), edge.numel()

    return run


def dgls(indptr: Tensor, indices: Tensor, fanouts: list[int], ours: bool = False) -> Sampler | None:
    """DGL's sampler, or what the plug-in has in its place."""
    dgl_backend.shim()
    try:
        import dgl
    except ImportError:
        return None
    from gnnaccel.dgl_backend.samplers import sample_blocks

    graph = dgl.graph(("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))))
    sampler = dgl.dataloading.NeighborSampler(fanouts[::-1])
    method = type(sampler).sample_blocks
    method = sample_blocks(method) if ours else method

    def run(seeds: Tensor) -> tuple[int, int]:
        nodes, _, blocks = method(sampler, graph, seeds)
        return nodes.numel(), sum(block.num_edges() for block in blocks)

    return run


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        import dgl

        dgl.utils.set_num_threads(threads)
    except ImportError:
        pass


def check(indptr: Tensor, indices: Tensor) -> None:
    """End the benchmark unless full neighbourhoods are torch_sparse's."""
    seeds = torch.arange(64)
    out = sampling.neighbor_sample(indptr, indices, seeds, [-1, -1])
    peer = torch.ops.torch_sparse.neighbor_sample(indptr, indices, seeds, [-1, -1], False, True)
    for got, want in zip((out.node, out.row, out.col, out.edge), peer, strict=True):
        if not torch.equal(got, want):
            raise SystemExit("wrong result: a full neighbourhood is not torch_sparse's")


def measure(samplers: dict[str, Sampler], num_nodes: int, batch: int, count: int) -> dict:
    times: dict[str, list[float]] = {name: [] for name in samplers}
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in samplers}
    order = torch.randperm(num_nodes)
    for turn in range(count + 2):
        seeds = order[turn * batch : (turn + 1) * batch]
        for name in list(samplers) if turn % 2 else reversed(samplers):  # neither always finds the graph in cache
            start = time.perf_counter()
            size = samplers[name](seeds)
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
                sizes[name].append(size)
    row: dict = {}
    for name, values in times.items():
        row[f"{name}_ms"], row[f"{name}_least_ms"] = statistics.median(values), min(values)
        row[f"{name}_edges"] = int(statistics.median(edges for _, edges in sizes[name]))
    row["batch_nodes"] = int(statistics.median(nodes for nodes, _ in sizes["gnnaccel"]))
    row["batch_edges"] = row["gnnaccel_edges"]
    for name in times:
        if name != "gnnaccel":
            row[f"vs_{name}"] = row[f"{name}_ms"] / row["gnnaccel_ms"]
    if "dgl" in times:
        row["vs_dgl_edge"] = row["vs_dgl"] * row["batch_edges"] / row["dgl_edges"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="products-like", help=f"of {', '.join(graphs.GRAPHS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[15, 10, 5])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--count", type=int, default=20, help="batches")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(args.commit, f"fan-out {args.fanouts}, {args.batch} seeds")
    print(*head, sep="\n", flush=True)
    made = graphs.generate(args.graph, "cpu", args.scale)
    indptr, indices = made["indptr"].long(), made["indices"].long()
    peers = {"torch_sparse": torch_sparse(indptr, indices, args.fanouts), "dgl": dgls(indptr, indices, args.fanouts)}
    if peers["torch_sparse"]:
        check(indptr, indices)
    weight = torch.rand(indices.numel())
    kinds = {
        "int64": ours(indptr, indices, args.fanouts),
        "int32": ours(made["indptr"], made["indices"], args.fanouts),
        "disjoint": ours(indptr, indices, args.fanouts, disjoint=True),
        "weighted": ours(indptr, indices, args.fanouts, edge_weight=weight),
    }
    if peers["dgl"]:
        kinds["DGL's blocks"] = dgls(indptr, indices, args.fanouts, ours=True)
    beside = {"int64": ("torch_sparse", "dgl"), "DGL's blocks": ("dgl",)}
    cells = []
    for threads in args.threads:
        set_threads(threads)
        for kind, sampler in kinds.items():
            others = {name: peers[name] for name in beside.get(kind, ()) if peers[name] is not None}
            row = dict(graph=args.graph, nodes=indptr.numel() - 1, edges=indices.numel(), threads=threads, kind=kind)
            row |= measure({"gnnaccel": sampler, **others}, row["nodes"], args.batch, args.count)
            cells.append(shown(COLUMNS, row))
    if args.csv:
        save_table(args.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
