"""Rows of features of sampled batches: over the bus from host memory, through a cache of the most read, on the GPU.

    python benchmarks/feature_cache.py --scale 0.25 --csv out.csv

Milliseconds to gather the features of a batch's nodes, least of --turns turns, in each of which all ways have the same
--count batches, one after the other. The cache keeps `kept` of all rows, those of the nodes that most edges come from;
`hits`: share of a batch's rows that it has. bus_ms: all rows over the bus. gpu_ms: features on the GPU. host_ms: the
host gathers and copies. file_ms: through a cache of a mapping of a file, whose other rows the host gathers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import graphs
import numpy as np
import torch
from timing import clocks_under_load, provenance, save_table, shown

from gnnaccel import sampling
from gnnaccel.sampling import host_memory

COLUMNS = ("graph", "nodes", "features", "kept", "hits", "batch_nodes", "cache_ms", "file_ms", "bus_ms", "host_ms",
           "gpu_ms", "vs_bus")  # fmt: skip


def seconds(way: Callable, batches: list) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        way(batch)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="products-like", help=f"of {', '.join(graphs.GRAPHS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[15, 10, 5])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--kept", nargs="+", type=float, default=[0.0, 0.1, 0.25, 0.5, 1.0])
    parser.add_argument("--count", type=int, default=10, help="batches")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA GPU here")
    torch.manual_seed(0)
    head = provenance(args.commit, f"fan-out {args.fanouts}, {args.batch} seeds", clocks_under_load())
    print(*head, sep="\n", flush=True)
    made = graphs.generate(args.graph, "cuda", args.scale)
    indptr, indices, num_nodes = made["indptr"].long(), made["indices"].long(), made["num_nodes"]
    scores = indices.bincount(minlength=num_nodes)
    x = torch.randn(num_nodes, args.features)
    order = torch.randperm(num_nodes, device="cuda")
    batches = [
        sampling.neighbor_sample(indptr, indices, order[i * args.batch : (i + 1) * args.batch], args.fanouts).node
        for i in range(args.count)
    ]
    pinned, there = host_memory.pin(x), x.cuda()
    cells = []
    with tempfile.NamedTemporaryFile() as file:
        x.numpy().tofile(file.name)
        mapped = np.memmap(file.name, dtype="float32", mode="r", shape=tuple(x.shape))
        for kept in args.kept:
            size = dict(num_rows=int(kept * num_nodes))
            ways: dict[str, Callable] = {
                "bus": host_memory.on_the_bus(x, there.device).index_select,
                "host": lambda dim, batch: x[batch.cpu()].cuda(),
                "gpu": there.index_select,
            }
            ways = {name: lambda batch, way=way: way(0, batch) for name, way in ways.items()}
            cache = sampling.FeatureCache(x, scores, **size)
            ways |= {"cache": cache.gather, "file": sampling.FeatureCache(mapped, scores, **size).gather}
            for name, way in ways.items():
                if not torch.equal(way(batches[0]), there[batches[0]]):
                    raise SystemExit(f"wrong result: {name}")
            times = {name: [] for name in ways}
            for _ in range(args.turns):
                for name, way in ways.items():
                    times[name].append(seconds(way, batches) * 1e3 / len(batches))
            has = torch.zeros(num_nodes, device="cuda")
            has[cache.rows.cuda()] = 1
            row = dict(graph=args.graph, nodes=num_nodes, features=args.features, kept=kept)
            row |= {"hits": float(torch.cat([has[batch] for batch in batches]).mean())}
            row |= {"batch_nodes": sum(map(len, batches)) // len(batches)}
            row |= {f"{name}_ms": min(values) for name, values in times.items()}
            cells.append(shown(COLUMNS, row | {"vs_bus": row["bus_ms"] / row["cache_ms"]}))
    del pinned
    if args.csv:
        save_table(args.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
