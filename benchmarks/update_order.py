"""PyG's layers with map and sum in the order that reads less, beside the order that PyG has: forward and backward.

    python benchmarks/update_order.py --csv out.csv
    python benchmarks/update_order.py --device cuda --graph reddit-like --repeat 5

Both sides are accelerated layers with the same weights, the second by `accelerate(..., reorder_linear=True)`. "first":
its input needs no gradient, as that of a first layer. Medians of --repeat calls, taken in turn, wall time, float32.
Checked first: results and gradients agree within 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import graphs
import torch
from timing import provenance, relative_error, save_table, shown
from torch_geometric.nn import GCNConv, GraphConv, SAGEConv

import gnnaccel

LAYERS = (
    ("GCNConv 16 -> 256, first", lambda: GCNConv(16, 256, cached=True), 16, False),
    ("GCNConv 64 -> 256", lambda: GCNConv(64, 256, cached=True), 64, True),
    ("SAGEConv 256 -> 16", lambda: SAGEConv(256, 16), 256, True),
    ("SAGEConv 256 -> 64, first", lambda: SAGEConv(256, 64), 256, False),
    ("GraphConv 128 -> 16", lambda: GraphConv(128, 16), 128, True),
    ("SAGEConv 64 -> 64", lambda: SAGEConv(64, 64), 64, True),
)
COLUMNS = ("graph", "nodes", "edges", "device", "layer", "usual_ms", "turned_ms", "speedup", "rel_error")


def step(conv, x, index, upstream):
    out = conv(x, index)
    wanted = [t for t in (x, *conv.parameters()) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]


def milliseconds(call) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="arxiv-like", help="a name of graphs.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    options = parser.parse_args()
    head = provenance(options.commit, f"{torch.get_num_threads()} threads; medians of {options.repeat} calls")
    made = graphs.generate(options.graph, device=options.device)
    rows = torch.arange(made["num_nodes"], device=options.device).repeat_interleave(made["indptr"].diff().long())
    index = torch.stack([made["indices"].long(), rows])
    gnnaccel.prepare(index)
    cells = []
    for name, make, width, needs_grad in LAYERS:
        torch.manual_seed(0)
        x = torch.randn(made["num_nodes"], width, device=options.device, requires_grad=needs_grad)
        usual = gnnaccel.accelerate(make().to(options.device))
        turned = gnnaccel.accelerate(copy.deepcopy(usual), reorder_linear=True)
        args = (x, index, torch.randn(made["num_nodes"], usual.out_channels, device=options.device))
        found = zip(step(turned, *args), step(usual, *args), strict=True)
        error = max(relative_error(got, want.double()) for got, want in found)
        if not error < 1e-4:
            raise SystemExit(f"{name}: relative error {error}")
        times = [
            [milliseconds(lambda c=c, args=args: step(c, *args)) for c in (usual, turned)]
            for _ in range(options.repeat)
        ]
        a, b = (statistics.median(side) for side in zip(*times, strict=True))
        row = dict(graph=options.graph, nodes=made["num_nodes"], edges=rows.numel(), device=options.device, layer=name)
        cells.append(shown(COLUMNS, row | dict(usual_ms=a, turned_ms=b, speedup=a / b, rel_error=error)))
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
