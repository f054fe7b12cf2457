"""What Python costs: layers on a graph so small that kernels take no time, the framework alone and accelerated.

    python benchmarks/host.py [--framework dgl] [--rows SAGE GIN ...] [--device cuda] [--csv FILE]
    python benchmarks/host.py --epochs --autocast --rows GCNConv SAGEConv GINConv GATConv ...

Forward, and forward and backward, of PyG's layers, or of DGL's layers and functions, in microseconds: the least of
many rounds, both sides in turn; on the CPU time of the processor. Of PyG's layers also with a copy of edge_index at
each call. With --epochs steps that train pyg_layers.py's models of two layers instead. With --autocast PyG's also under
torch.autocast to bfloat16, in turn with those in float32; on the CPU without oneDNN, which takes longer to begin than a
small product takes. Beside other work take small rounds, and many: `--calls 12 --rounds 600 --turns 20`.
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
WIDTH_OF_EPOCHS = 32  # heads that kernels take as they are in bfloat16 too
NARROW = " bfloat16"


def micros(function, calls: int, rounds: int, device: torch.device) -> float:
    """The least mean time of `calls` calls."""
    best, clock = float("inf"), time.perf_counter if device.type == "cuda" else time.process_time
    for _ in range(rounds):
        start = clock()
        for _ in range(calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return best / calls * 1e6


# Forward, forward and backward, and of PyG that with a new edge_index; the same results on both sides.
Sides = dict[str, tuple[Callable, ...]]
PASSES = ("forward", "both", "both, new edges")


def passes(call: Callable) -> tuple[Callable, Callable]:
    """`call`, and it with its backward pass."""
    return call, lambda: call().sum().backward()


def both_dtypes(sides: Callable[[bool], Sides], autocast: bool) -> Sides:
    """Sides in float32, and if so those under autocast."""
    found = sides(False)
    return found | {side + NARROW: functions for side, functions in sides(True).items()} if autocast else found


def epochs(device: torch.device, autocast: bool = False) -> dict[str, Callable[[], Sides]]:
    """Models of two layers of PyG's that train."""
    import pyg_layers

    def sides(make: Callable) -> Sides:
        arguments = torch.randn(NODES, WIDTH_OF_EPOCHS, device=device), torch.randint(0, NODES, (2, EDGES)).to(device)
        plain = pyg_layers.Net(make).to(device)

        def of(cast: bool) -> Sides:
            nets = {"alone": copy.deepcopy(plain), "gnnaccel": gnnaccel.accelerate(copy.deepcopy(plain))}
            steps = {side: pyg_layers.epoch_of(net, arguments) for side, net in nets.items()}
            return {side: (functools.partial(step, cast),) for side, step in steps.items()}

        return both_dtypes(of, autocast)

    known = pyg_layers.layers(WIDTH_OF_EPOCHS)
    return {name: functools.partial(sides, make) for name, (make, takes_edges) in known.items() if not takes_edges}


def pyg(device: torch.device, autocast: bool = False) -> dict[str, Callable[[], Sides]]:
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

        def narrow(layer):
            def call(*given):
                with torch.autocast(device.type, torch.bfloat16):
                    return layer(*given)

            return call

        def of(layer):
            new = passes(lambda: layer(x, edge_index.clone()))[1]
            return (*passes(lambda: layer(x, edge_index)), *([] if "cached" in name else [new]))

        def both(cast):
            return {s: of(narrow(layer) if cast else layer) for s, layer in (("alone", plain), ("gnnaccel", ours))}

        return both_dtypes(both, autocast)

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
    if "alone" + NARROW in results:
        torch.testing.assert_close(results["gnnaccel" + NARROW], results["alone" + NARROW], rtol=3e-2, atol=3e-2)


def main() -> None:
    """Time the layers and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="pyg", choices=("pyg", "dgl"))
    parser.add_argument("--rows", nargs="+", help="layers or functions; default: all")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--calls", type=int, default=100, help="in one round")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3, help="from one side to the other")
    parser.add_argument("--epochs", action="store_true", help="steps of training of two layers of PyG's")
    parser.add_argument("--autocast", action="store_true", help="PyG's layers also in bfloat16")
    parser.add_argument("--csv", help="file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.framework == "dgl":
        if options.epochs or options.autocast:
            parser.error("--epochs and --autocast are of PyG's layers")
        known = dgl(options.device)
    else:
        known = (epochs if options.epochs else pyg)(options.device, options.autocast)
        if options.autocast:
            torch.backends.mkldnn.set_flags(_enabled=False)
    if unknown := set(options.rows or ()) - known.keys():
        parser.error(f"unknown rows {sorted(unknown)}; known: {list(known)}")
    columns, rows = ("layer", "pass", "alone_us", "gnnaccel_us", "ratio"), []
    if options.autocast:
        columns += ("alone_bf16_us", "gnnaccel_bf16_us", "ratio_bf16", "alone_bf16_to_f32", "gnnaccel_bf16_to_f32")
    for name in options.rows or known:
        torch.manual_seed(0)
        found = known[name]()
        same(found, options.framework)
        for place, which in enumerate(("step",) if options.epochs else PASSES[: len(found["alone"])]):
            least = least_of_both(found, place, options)
            alone, ours = least["alone"], least["gnnaccel"]
            rows.append([name, which, round(alone, 1), round(ours, 1), round(ours / alone, 2)])
            shown = f"{name:16} {which:16} alone {alone:7.1f}  gnnaccel {ours:7.1f}  {ours / alone:5.2f}"
            if options.autocast:
                narrow = least["alone" + NARROW], least["gnnaccel" + NARROW]
                ratios = narrow[1] / narrow[0], narrow[0] / alone, narrow[1] / ours
                rows[-1] += [*(round(took, 1) for took in narrow), *(round(ratio, 2) for ratio in ratios)]
                shown += f"  bfloat16 alone {narrow[0]:7.1f}  gnnaccel {narrow[1]:7.1f}  {ratios[0]:5.2f}"
                shown += f"  of float32 {ratios[1]:5.2f} {ratios[2]:5.2f}"
            print(shown, flush=True)
    if options.csv:
        save_table(options.csv, provenance(), columns, rows)


if __name__ == "__main__":
    main()
