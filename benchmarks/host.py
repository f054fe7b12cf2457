"""What Python costs: layers on a graph so small that kernels take no time, the framework alone and accelerated.

    python benchmarks/host.py [--framework dgl] [--rows SAGE GIN ...] [--device cuda] [--csv FILE]

Forward, and forward and backward, of PyG's layers, or of DGL's layers and functions, in microseconds: the least of
many rounds, both sides in turn. Of PyG's layers also with a copy of edge_index at each call. Beside other work take
small rounds, and many: `--calls 12 --rounds 600 --turns 20`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable

import torch
from timing import provenance, save_table

import gnnaccel
from gnnaccel import dgl_backend

NODES, EDGES, WIDTH = 12, 40, 16


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


# Forward, forward and backward, and of PyG that with a new edge_index; the same results on both sides.
Sides = dict[str, tuple[Callable, ...]]
PASSES = ("forward", "both", "both, new edges")


def passes(call: Callable) -> tuple[Callable, Callable]:
    """`call`, and it with its backward pass."""
    return call, lambda: call().sum().backward()


def pyg(device: torch.device) -> dict[str, Callable[[], Sides]]:
    """PyG's layers; an accelerated one is another module."""
    from torch_geometric import nn

    layers = {
        "GCN": lambda: nn.GCNConv(WIDTH, WIDTH),
        "GCN cached": lambda: nn.GCNConv(WIDTH, WIDTH, cached=True),
        "SAGE": lambda: nn.SAGEConv(WIDTH, WIDTH),
        "GIN": lambda: nn.GINConv(nn.MLP([WIDTH, WIDTH, WIDTH], norm=None)),
        "GraphConv": lambda: nn.GraphConv(WIDTH, WIDTH),
        "GAT": lambda: nn.GATConv(WIDTH, 4, heads=4),
        "GATv2": lambda: nn.GATv2Conv(WIDTH, 4, heads=4),
        "Transformer": lambda: nn.TransformerConv(WIDTH, 4, heads=4),
        "ResGated": lambda: nn.ResGatedGraphConv(WIDTH, WIDTH),
        "SG": lambda: nn.SGConv(WIDTH, WIDTH, K=2),
        "TAG": lambda: nn.TAGConv(WIDTH, WIDTH, K=2),
        "APPNP": lambda: nn.APPNP(2, 0.1),
        "AGNN": lambda: nn.AGNNConv(),
    }

    def sides(name: str) -> Sides:
        x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
        edge_index = torch.randint(0, NODES, (2, EDGES), device=device)
        plain = layers[name]().to(device)
        ours = gnnaccel.accelerate(copy.deepcopy(plain))

        def of(layer):
            new = passes(lambda: layer(x, edge_index.clone()))[1]
            return (*passes(lambda: layer(x, edge_index)), *([] if "cached" in name else [new]))

        return {"alone": of(plain), "gnnaccel": of(ours)}

    return {name: functools.partial(sides, name) for name in layers}


def dgl(device: torch.device) -> dict[str, Callable[[], Sides]]:
    """DGL's layers and functions; the plug-in is switched on and off around them."""
    dgl_backend.shim()
    import dgl
    import dgl.function as fn
    from dgl import nn

    mlp = functools.partial(torch.nn.Linear, WIDTH, WIDTH)
    layers = {
        "GraphConv": lambda: nn.GraphConv(WIDTH, WIDTH),
        "SAGE mean": lambda: nn.SAGEConv(WIDTH, WIDTH, "mean"),
        "SAGE gcn": lambda: nn.SAGEConv(WIDTH, WIDTH, "gcn"),
        "SAGE pool": lambda: nn.SAGEConv(WIDTH, WIDTH, "pool"),
        "GIN": lambda: nn.GINConv(torch.nn.Sequential(mlp(), torch.nn.ReLU(), mlp())),
        "GAT": lambda: nn.GATConv(WIDTH, 4, 4),
        "GATv2": lambda: nn.GATv2Conv(WIDTH, 4, 4),
    }

    def update_all(message, reduce, g, x, w):
        with g.local_scope():
            g.ndata["x"], g.edata["w"] = x, w
            g.update_all(message, reduce)
            return g.ndata["y"]

    def apply_edges(g, x, w):
        with g.local_scope():
            g.ndata["x"] = x
            g.apply_edges(fn.u_add_v("x", "x", "y"))
            return g.edata["y"]

    copy_u = fn.copy_u("x", "m")
    functions = {
        "copy_u sum": functools.partial(update_all, copy_u, fn.sum("m", "y")),
        "copy_u mean": functools.partial(update_all, copy_u, fn.mean("m", "y")),
        "u_mul_e sum": functools.partial(update_all, fn.u_mul_e("x", "w", "m"), fn.sum("m", "y")),
        "apply_edges": apply_edges,
        "edge_softmax": lambda g, x, w: dgl.ops.edge_softmax(g, w),
    }

    def sides(name: str) -> Sides:
        u, v = torch.randint(0, NODES, (2, EDGES))
        g = dgl.add_self_loop(dgl.graph((u, v), num_nodes=NODES)).to(device)
        x = torch.randn(NODES, WIDTH, device=device, requires_grad=True)
        w = torch.randn(g.num_edges(), 1, device=device, requires_grad=True)
        if name in functions:
            call = functools.partial(functions[name], g, x, w)
        else:
            call = functools.partial(layers[name]().to(device), g, x)

        return {"alone": passes(call), "gnnaccel": passes(call)}

    return {name: functools.partial(sides, name) for name in (*layers, *functions)}


def turn_to(side: str, framework: str) -> None:
    """DGL is accelerated as a whole."""
    if framework == "dgl":
        dgl_backend.enable() if side == "gnnaccel" else dgl_backend.disable()


def least_of_both(found: Sides, place: int, options) -> dict[str, float]:
    """Microseconds of each side, in turn."""
    least = dict.fromkeys(found, float("inf"))
    for _ in range(options.turns):
        for side, functions in found.items():
            turn_to(side, options.framework)
            rounds = max(1, options.rounds // options.turns)
            least[side] = min(least[side], micros(functions[place], options.calls, rounds, options.device))
    return least


def same(found: Sides, framework: str) -> None:
    """AssertionError unless both sides give the same."""
    results = {}
    for side, functions in found.items():
        turn_to(side, framework)
        for _ in range(3):  # calls may be made ready
            results[side] = functions[0]()
    torch.testing.assert_close(results["gnnaccel"], results["alone"], rtol=1e-4, atol=1e-5)


def main() -> None:
    """Time the layers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="pyg", choices=("pyg", "dgl"))
    parser.add_argument("--rows", nargs="+", help="layers or functions; default: all")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--calls", type=int, default=100, help="in one round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3, help="from one side to the other")
    parser.add_argument("--csv", help="file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {"pyg": pyg, "dgl": dgl}[options.framework](options.device)
    if unknown := set(options.rows or ()) - known.keys():
        parser.error(f"unknown rows {sorted(unknown)}; known: {list(known)}")
    columns, rows = ("layer", "pass", "alone_us", "gnnaccel_us", "ratio"), []
    for name in options.rows or known:
        torch.manual_seed(0)
        found = known[name]()
        same(found, options.framework)
        for place, which in enumerate(PASSES[: len(found["alone"])]):
            least = least_of_both(found, place, options)
            alone, ours = least["alone"], least["gnnaccel"]
            rows.append([name, which, round(alone, 1), round(ours, 1), round(ours / alone, 2)])
            print(f"{name:12} {which:16} alone {alone:7.1f}  gnnaccel {ours:7.1f}  {ours / alone:5.2f}", flush=True)
    if options.csv:
        save_table(options.csv, provenance(), columns, rows)


if __name__ == "__main__":
    main()
