"""What the host does in a training step on batches of PyG's NeighborLoader that the GPU samples: the time of each part.

    python benchmarks/sampling_parts.py --scale 0.25 --csv out.csv

The graph, loader and model are those of `sampling.py`'s rows "with training". batch_ms: wall time of a batch; the other
columns: microseconds of the host until each part has been launched, waits included; of medians over --count batches
the least of --turns epochs, the ways in turns. A host that has to wait for the GPU does so in `next_us`.

way     flag: as under the flag. no ahead: batches are sampled on the stream that trains when they are asked for
        (GNNACCEL_SAMPLER_AHEAD=0). threads: backward passes on torch's thread (GNNACCEL_BACKWARD=threads)
kind    sliced: ``model(batch.x, batch.edge_index)[: batch.batch_size]``, of which gnnaccel computes no more rows than
        are taken. whole: sliced later, from a variable that keeps it, so that the model works on all nodes in each
        layer. trimmed: it is told what each hop has added
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time

import graphs
import torch
from timing import clocks_under_load, provenance, save_table, shown

from gnnaccel import engine, pyg_backend

PARTS = ("next", "to", "forward", "loss", "zero_grad", "backward", "step")
COLUMNS = ("graph", "nodes", "edges", "kind", "way", "batch_ms", *(f"{part}_us" for part in PARTS))
WAYS = ("flag", "no ahead", "threads")
KINDS = ("whole", "trimmed", "sliced")


def epoch(loader, model, count: int, kind: str, skip: int = 3) -> dict[str, float]:
    """Times of a batch: the mean wall time, medians of the parts."""
    device = next(model.parameters()).device
    optimizer, batches = torch.optim.Adam(model.parameters()), iter(loader)
    parts: list[list[float]] = []
    start = time.perf_counter()
    for number in range(skip + count):
        if number == skip:
            _synchronize()
            start = time.perf_counter()
        at = [time.perf_counter()]
        batch = next(batches)
        at.append(time.perf_counter())
        batch = batch.to(device)
        at.append(time.perf_counter())
        if kind == "sliced":
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
        else:
            hops = {f"num_sampled_{of}_per_hop": batch[f"num_sampled_{of}"] for of in ("nodes", "edges")}
            every = model(batch.x, batch.edge_index, **(hops if kind == "trimmed" else {}))
            out = every[: batch.batch_size]
        at.append(time.perf_counter())
        loss = torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])
        at.append(time.perf_counter())
        optimizer.zero_grad()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        optimizer.step()
        at.append(time.perf_counter())
        if number >= skip:
            parts.append([(end - begin) * 1e6 for begin, end in itertools.pairwise(at)])
    _synchronize()
    row = {"batch_ms": (time.perf_counter() - start) * 1e3 / count}
    return row | {f"{part}_us": statistics.median(of) for part, of in zip(PARTS, zip(*parts, strict=True), strict=True)}


def in_way(way: str, loader, model, args, kind: str) -> dict[str, float]:
    os.environ["GNNACCEL_SAMPLER_AHEAD"] = "0" if way == "no ahead" else ""
    if way != "threads":
        engine.settle()
    try:
        return epoch(loader, model, args.count, kind)
    finally:
        engine.restore()
        del os.environ["GNNACCEL_SAMPLER_AHEAD"]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="products-like", help=f"of {', '.join(graphs.GRAPHS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[15, 10, 5])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--count", type=int, default=20, help="batches of an epoch")
    parser.add_argument("--turns", type=int, default=4, help="epochs of each way")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = provenance(args.commit, f"fan-out {args.fanouts}, {args.batch} seeds", clocks_under_load())
    print(*head, sep="\n", flush=True)
    import torch_geometric as pyg

    pyg_backend.enable()
    made = graphs.generate(args.graph, device, args.scale)
    num_nodes, degrees = made["num_nodes"], made["indptr"].long().diff()
    ends = torch.stack([made["indices"].long(), torch.arange(num_nodes, device=device).repeat_interleave(degrees)])
    x, y = torch.randn(num_nodes, 100, device=device), torch.randint(47, (num_nodes,), device=device)
    data = pyg.data.Data(x=x, y=y, edge_index=ends)
    loader = pyg.loader.NeighborLoader(data, args.fanouts, batch_size=args.batch, shuffle=True, is_sorted=True)
    model = pyg.nn.GraphSAGE(100, 256, len(args.fanouts), 47).to(device)
    cells = []
    for kind in KINDS:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.turns + 1):
            for way, rows in found.items():
                rows.append(in_way(way, loader, model, args, kind))
        for way, rows in found.items():
            row = dict(graph=args.graph, nodes=num_nodes, edges=ends.shape[1], kind=kind, way=way)
            row |= {name: min(times[name] for times in rows[1:]) for name in rows[0]}
            cells.append(shown(COLUMNS, row))
    if args.csv:
        save_table(args.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
