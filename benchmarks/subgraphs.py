"""Subgraphs and batches of several types on the GPU, beside gnnaccel's own on the CPU.

    python benchmarks/subgraphs.py --scale 0.25 --csv out.csv

Wall time of a batch in milliseconds, median and least of --count batches, the two in turn. One row for each of
    induced         all edges between as many nodes, of all, as --fanouts reach from --batch seeds
    ShaDow          the same around each seed (`ego_subgraphs`)
    HGT             `hgt_sample` of a graph as ogbn-mag: 128 papers, 512 nodes of each type in each of four hops
    types           PyG's NeighborLoader of that graph, --batch papers, --fanouts, 128 features of each type: of data on
                    the GPU, of data in host memory with GNNACCEL_SAMPLER=cuda (pinned), the same with a quarter of
                    the papers' and authors' rows in a FeatureCache each (cached), and batches of the CPU moved to the
                    GPU; mean of all
    HGTLoader       the same of HGTLoader, as HGT
vs_cpu: the CPU's time over that of the GPU, of data where that is. Edges are checked against the CPU's first.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import graphs
import torch
from sampling import MAG, epoch_ms, mag_like, measure, set_threads, until_done
from timing import clocks_under_load, provenance, save_table, shown
from torch import Tensor

from gnnaccel import dgl_backend, pyg_backend, sampling

COLUMNS = (
    "graph", "nodes", "edges", "threads", "kind", "batch_nodes", "batch_edges", "cuda_ms", "cuda_least_ms",
    "pinned_ms", "cached_ms", "cpu_ms", "cpu_least_ms", "vs_cpu",
)  # fmt: skip
HGT = {name: [512] * 4 for name in MAG}


def induced(indptr: Tensor, indices: Tensor, fanouts: list[int]) -> Callable:
    def run(seeds: Tensor) -> tuple[int, int]:
        return len(seeds), sampling.induced_subgraph(indptr, indices, seeds.to(indptr)).edge.numel()

    return run


def shadow(indptr: Tensor, indices: Tensor, fanouts: list[int]) -> Callable:
    def run(seeds: Tensor) -> tuple[int, int]:
        node, *_, edges = sampling.ego_subgraphs(indptr, indices, seeds.to(indptr), fanouts, seed=1)
        return node.numel(), edges.edge.numel()

    return run


def hgt(graph: dict) -> Callable:
    def run(seeds: Tensor) -> tuple[int, int]:
        some = next(iter(graph.values()))[0]
        out = sampling.hgt_sample(graph, {"paper": seeds[:128].to(some)}, HGT)
        return tuple(sum(array.numel() for array in part.values()) for part in (out.node, out.edge))

    return run


def of_types(batch, _model) -> tuple:
    batch = batch.to("cuda")
    return batch.num_nodes, batch.num_edges, None, None


def typed(args, row: dict, name: str, data) -> dict:
    """Loaders of data of several types."""
    from torch_geometric.loader import HGTLoader, NeighborLoader

    def make(given):
        start = ("paper", torch.arange(MAG["paper"]))
        if name == "types":
            return NeighborLoader(given, args.fanouts, start, batch_size=args.batch, shuffle=True)
        return HGTLoader(given, HGT, start, batch_size=128, shuffle=True, is_sorted=True)

    there = data.clone().to("cuda")
    for side, given, choice in (
        ("cuda", there, ""), ("pinned", data, "cuda"), ("cached", data, "cuda"), ("cpu", data, "")
    ):  # fmt: skip
        os.environ["GNNACCEL_SAMPLER"] = choice
        caches = []
        for kind in ("paper", "author") if side == "cached" else ():
            reads = torch.bincount(data[kind, "writes" if kind == "author" else "cites", "paper"].edge_index[0])
            reads = torch.nn.functional.pad(reads, (0, MAG[kind] - len(reads)))
            caches.append(sampling.FeatureCache(data[kind].x, reads, num_rows=MAG[kind] // 4))
        row[f"{side}_ms"], nodes, edges = epoch_ms(make(given), args.count, of_types)
        if side == "cuda":
            row |= {"batch_nodes": nodes, "batch_edges": edges}
    del os.environ["GNNACCEL_SAMPLER"]
    return row


def check(indptr: Tensor, indices: Tensor, fanouts: list[int]) -> None:
    """End the benchmark unless the GPU finds the CPU's edges."""
    there, seeds = (indptr.cuda(), indices.cuda()), torch.arange(300)
    wanted = sampling.ego_subgraphs(indptr, indices, seeds, fanouts, seed=1)
    got = sampling.ego_subgraphs(*there, seeds.cuda(), fanouts, seed=1)
    if not all(torch.equal(a.cpu(), b) for a, b in zip([*got[:3], *got[3]], [*wanted[:3], *wanted[3]], strict=True)):
        raise SystemExit("wrong result: the GPU's subgraphs are not the CPU's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="products-like", help=f"of {', '.join(graphs.GRAPHS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[10, 5])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--count", type=int, default=20, help="batches")
    parser.add_argument("--kinds", nargs="+", help="rows to measure")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA GPU here")
    dgl_backend.shim()
    torch.manual_seed(0)
    set_threads(args.threads)
    head = provenance(args.commit, f"fan-out {args.fanouts}, {args.batch} seeds", clocks_under_load())
    print(*head, sep="\n", flush=True)
    cells = []

    def show(row: dict) -> None:
        if not args.kinds or row["kind"] in args.kinds:
            cells.append(shown(COLUMNS, row | {"vs_cpu": row["cpu_ms"] / row["cuda_ms"]}))
            if args.csv:  # a run that is cut off leaves what it has
                save_table(args.csv, head, COLUMNS, cells)

    def beside(row: dict, cuda: Callable, cpu: Callable, num_nodes: int, batch: int) -> None:
        count = max(1, min(args.count, num_nodes // batch - 2))  # as many as there are nodes for
        row |= measure({"gnnaccel": until_done(cuda), "cpu": cpu}, num_nodes, batch, count)
        show(row | {"cuda_ms": row["gnnaccel_ms"], "cuda_least_ms": row["gnnaccel_least_ms"]})

    made = graphs.generate(args.graph, "cuda", args.scale)
    there = made["indptr"].long(), made["indices"].long()
    here = tuple(array.cpu() for array in there)
    check(*here, args.fanouts)
    num_nodes = here[0].numel() - 1
    same = dict(graph=args.graph, nodes=num_nodes, edges=here[1].numel(), threads=args.threads)
    reached = sampling.neighbor_sample(*there, torch.arange(args.batch, device="cuda"), args.fanouts).node.numel()
    for kind, make, batch in (("induced", induced, reached), ("ShaDow", shadow, args.batch)):
        beside(same | {"kind": kind}, make(*there, args.fanouts), make(*here, args.fanouts), num_nodes, batch)
    graph = mag_like()
    on_cpu = {kind: tuple(array.cpu() for array in arrays) for kind, arrays in graph.items()}
    same |= dict(graph="mag-like", nodes=sum(MAG.values()), edges=sum(a.numel() for _, a in graph.values()))
    beside(same | {"kind": "HGT"}, hgt(graph), hgt(on_cpu), MAG["paper"], 128)
    from torch_geometric.data import HeteroData

    data = HeteroData({name: dict(x=torch.randn(count, 128)) for name, count in MAG.items()})
    for kind, (indptr, indices) in on_cpu.items():
        targets = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
        data[kind].edge_index = torch.stack([indices, targets])
    pyg_backend.enable()
    for name in ("types", "HGTLoader"):
        if not args.kinds or name in args.kinds:
            show(typed(args, same | {"kind": name}, name, data))


if __name__ == "__main__":
    main()
