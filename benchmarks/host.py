"""What Python costs: PyG's layers on a graph so small that kernels take no time, alone and accelerated.

    python benchmarks/host.py [--layers SAGE GIN ...] [--device cuda] [--csv FILE]

Forward, and forward and backward, of one layer in microseconds: the least of many rounds, both sides in turn.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time

import torch
from timing import provenance, save_table
from torch_geometric import nn

import gnnaccel

NODES, EDGES, WIDTH = 12, 40, 16
LAYERS = {
    "GCN": lambda: nn.GCNConv(WIDTH, WIDTH),
    "GCN cached": lambda: nn.GCNConv(WIDTH, WIDTH, cached=True),
    "SAGE": lambda: nn.SAGEConv(WIDTH, WIDTH),
    "GIN": lambda: nn.GINConv(nn.MLP([WIDTH, WIDTH, WIDTH], norm=None)),
    "GraphConv": lambda: nn.GraphConv(WIDTH, WIDTH),
    "GAT": lambda: nn.GATConv(WIDTH, 4, heads=4),
    "GATv2": lambda: nn.GATv2Conv(WIDTH, 4, heads=4),
    "Transformer": lambda: nn.TransformerConv(WIDTH, 4, heads=4),
    "ResGated": lambda: nn.ResGatedGraphConv(WIDTH, WIDTH),
}


def micros(function, calls: int, rounds: int, device: torch.device) -> float:
    """The least mean time of `calls` calls."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def sides(name: str, device: torch.device) -> dict[str, tuple]:
    """(forward, forward and backward) of the layer alone and accelerated, which give the same."""
    torch.manual_seed(0)
    x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
    edge_index = torch.randint(0, NODES, (2, EDGES), device=device)
    plain = LAYERS[name]().to(device)
    found = {}
    for side, layer in (("alone", plain), ("gnnaccel", gnnaccel.accelerate(copy.deepcopy(plain)))):

        def both(layer=layer):
            layer(x, edge_index).sum().backward()

        found[side] = (functools.partial(layer, x, edge_index), both)
    torch.testing.assert_close(found["gnnaccel"][0](), found["alone"][0](), rtol=1e-4, atol=1e-5)
    return found


def main() -> None:
    """Time the layers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--calls", type=int, default=100, help="in one round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--csv", help="file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns, rows = ("layer", "pass", "alone_us", "gnnaccel_us", "ratio"), []
    for name in options.layers:
        found = sides(name, options.device)
        for place, which in enumerate(("forward", "both")):
            least = {side: float("inf") for side in found}
            for _ in range(3):
                for side, functions in found.items():
                    rounds = max(1, options.rounds // 3)
                    least[side] = min(least[side], micros(functions[place], options.calls, rounds, options.device))
            alone, ours = least["alone"], least["gnnaccel"]
            rows.append([name, which, round(alone, 1), round(ours, 1), round(ours / alone, 2)])
            print(f"{name:12} {which:8} alone {alone:7.1f}  gnnaccel {ours:7.1f}  {ours / alone:5.2f}", flush=True)
    if options.csv:
        save_table(options.csv, provenance(), columns, rows)


if __name__ == "__main__":
    main()
