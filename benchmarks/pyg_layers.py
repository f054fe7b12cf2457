"""PyG's layers beyond plain sums and GAT, alone, compiled and on gnnaccel: forward + backward, on the CPU or on CUDA.

    python benchmarks/pyg_layers.py --device cuda --csv out.csv
    python benchmarks/pyg_layers.py --device cuda --graph arxiv-like --compiled --memory --csv out.csv
    python benchmarks/pyg_layers.py --nodes 2708 --edges 10556 --width 16      # a small graph: overhead

Each layer is checked first: the outputs of all sides must agree; under --autocast gnnaccel's may be no further from
those in float32 than PyG's. Then the sides take turns, and medians are compared.
The graph is random, its in-degrees by a power law, or a stand-in (--graph). What is prepared once per graph is not in
the times, nor is what is compiled. With --compiled PyG also runs under torch.compile. With --memory the table has the
extra peak memory of a step: on CUDA of torch's allocator, on the CPU of the first step of a side in a process of its
own (not of the compiled one). With --autocast all sides run under torch.autocast in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
import warnings

import graphs
import torch
from cpu_layers import extra_memory, versions
from cpu_rows import Side
from timing import provenance, save_table, short
from torch_geometric import nn

from gnnaccel import pyg_backend

SIDES = ("alone", "compiled", "gnnaccel")
WARM_UP = {"cpu": 2, "cuda": 4}  # steps of each side
WARM_UP_OURS = {"cpu": 0, "cuda": 55}  # before that: on CUDA lists of work come with the 51st call of a graph


def graph(num_nodes: int, num_edges: int) -> torch.Tensor:
    """edge_index [2, E]: sources uniform, destinations with probability (rank + 1) ** -0.6."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.arange(1, num_nodes + 1).float().pow(-0.6)
    target = torch.multinomial(weight, num_edges, replacement=True, generator=rng)
    return torch.stack([torch.randint(0, num_nodes, (num_edges,), generator=rng), target])


def stand_in(name: str, device: str) -> tuple[torch.Tensor, int]:
    """edge_index of one of graphs.py, by destinations, and its nodes."""
    made = graphs.generate(name, device)
    rows = torch.arange(made["num_nodes"], device=device).repeat_interleave(made["indptr"].diff().long())
    return torch.stack([made["indices"].long(), rows]), made["num_nodes"]


def layers(width: int) -> dict:
    """name -> (make the layer, whether it takes edge features of that width)."""
    heads = dict(out_channels=width // 4, heads=4)
    degrees = torch.tensor([1, 2, 3])
    return {
        "GCNConv": (lambda: nn.GCNConv(width, width), False),
        "SAGEConv": (lambda: nn.SAGEConv(width, width), False),
        "GINConv": (lambda: nn.GINConv(torch.nn.Linear(width, width)), False),
        "SAGEConv mean+max+std": (lambda: nn.SAGEConv(width, width, aggr=["mean", "max", "std"]), False),
        "EGConv": (lambda: nn.EGConv(width, width), False),
        "GATConv": (lambda: nn.GATConv(width, **heads), False),
        "GATv2Conv": (lambda: nn.GATv2Conv(width, **heads), False),
        "TransformerConv": (lambda: nn.TransformerConv(width, **heads), False),
        "SuperGATConv": (lambda: nn.SuperGATConv(width, **heads).eval(), False),
        "ResGatedGraphConv": (lambda: nn.ResGatedGraphConv(width, width), False),
        "GINEConv": (lambda: nn.GINEConv(torch.nn.Linear(width, width)), True),
        "GENConv softmax": (lambda: nn.GENConv(width, width), False),
        "GENConv sum": (lambda: nn.GENConv(width, width, aggr="add"), True),
        "FiLMConv": (lambda: nn.FiLMConv(width, width), False),
        "LEConv": (lambda: nn.LEConv(width, width), False),
        "PNAConv": (lambda: nn.PNAConv(width, width, ["mean", "max", "min", "std"], ["identity"], degrees), False),
        "FeaStConv": (lambda: nn.FeaStConv(width, width, heads=4), False),
        "CGConv": (lambda: nn.CGConv(width), False),
        "EdgeConv": (lambda: nn.EdgeConv(nn.MLP([2 * width, width, width], norm=None)), False),
    }


def step(layer, arguments, autocast: bool = False) -> torch.Tensor:
    """One forward and backward pass; returns the output."""
    with torch.autocast(arguments[0].device.type, torch.bfloat16, enabled=autocast):
        out = layer(*arguments)
    wanted = [x for x in (*arguments, *layer.parameters()) if x.requires_grad]
    torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    return out


def measured(make, arguments, options) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of a step of each side, in turns; and on CUDA the MiB that one raises its memory by."""
    torch.manual_seed(0)
    device, autocast = arguments[0].device, options.autocast
    plain = make().to(device)
    sides = {"alone": plain, "gnnaccel": pyg_backend.accelerate(copy.deepcopy(plain))}
    if options.compiled:
        torch._dynamo.reset()
        sides["compiled"] = torch.compile(copy.deepcopy(plain))
    want = step(plain, arguments, autocast).float()
    # Which the layer alone rounds at each edge: rows of many lie far apart, float32 tells who is right.
    exact = step(plain, arguments) if autocast else None
    for side, layer in sides.items():
        found = step(layer, arguments, autocast).float()
        if exact is None:
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
        else:
            errors = [float((out - exact).abs().max()) for out in (found, want)]
            assert errors[0] <= max(1.5 * errors[1], 1e-2 * float(exact.abs().max())), f"{side}: off by {errors}"
    del want, exact, found
    for _ in range(WARM_UP_OURS[device.type]):
        step(sides["gnnaccel"], arguments, autocast)
    times: dict[str, list[float]] = {side: [] for side in sides}
    memory, warm_up = {}, WARM_UP[device.type]
    for turn in range(options.repeat + warm_up):
        for side, layer in sides.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            step(layer, arguments, autocast)
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[side] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if turn >= warm_up:
                times[side].append((time.perf_counter() - start) * 1e3)
    return {side: statistics.median(found) for side, found in times.items()}, memory


def memory_of(options, name: str, accelerated: bool) -> float:
    """MiB by which the first step of one side raises the memory of a fresh process."""
    command = [sys.executable, __file__, "--memory-of", name, str(int(accelerated))]
    for option in ("nodes", "edges", "width", "threads", "graph"):
        if getattr(options, option) is not None:
            command += [f"--{option}", str(getattr(options, option))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def own_memory(make, arguments, accelerated: bool) -> float:
    """The same, of this process."""
    layer = pyg_backend.accelerate(make()) if accelerated else make()
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])  # a step on a tiny graph loads code
    step(layer, (arguments[0][:4].detach().requires_grad_(), edge_index, *(a[:4] for a in arguments[2:])))
    return extra_memory(Side(switch=lambda: None, step=lambda: step(layer, arguments)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--graph", choices=graphs.GRAPHS, metavar="NAME", help="a stand-in of graphs.py instead")
    parser.add_argument("--width", type=int, default=64, help="features, a multiple of four")
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="TEXT", help="only layers with one of these in the name"
    )
    parser.add_argument("--compiled", action="store_true", help="also PyG under torch.compile")
    parser.add_argument("--memory", action="store_true", help="also the extra peak memory of each side")
    parser.add_argument("--autocast", action="store_true", help="in bfloat16")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument("--commit", help="named in the table's head; by default what git says")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    nn.SAGEConv(1, 1)  # PyG generates the code of a class for its first instance
    if options.graph:
        edge_index, options.nodes = stand_in(options.graph, options.device)
        options.edges = edge_index.shape[1]
    else:
        edge_index = graph(options.nodes, options.edges).to(options.device)
    x = torch.randn(options.nodes, options.width, device=options.device, requires_grad=True)
    attr = torch.randn(options.edges, options.width, device=options.device)
    if options.memory_of:
        make, takes_edges = layers(options.width)[options.memory_of[0]]
        arguments = (x, edge_index, attr) if takes_edges else (x, edge_index)
        return print(own_memory(make, arguments, options.memory_of[1] == "1"))
    where = torch.cuda.get_device_name() if x.is_cuda else f"CPU, {options.threads} threads"
    about = f"{options.nodes} nodes, {options.edges} edges, {options.width} features; torch {torch.__version__}"
    print(f"{where}; {options.graph or 'random'}: {about}")
    rows = []
    for name, (make, takes_edges) in layers(options.width).items():
        if options.rows and not any(text in name for text in options.rows):
            continue
        arguments = (x, edge_index, attr) if takes_edges else (x, edge_index)
        times, memory = measured(make, arguments, options)
        if options.memory and not x.is_cuda:
            memory = {side: memory_of(options, name, side == "gnnaccel") for side in ("alone", "gnnaccel")}
        cells = [found.get(side) for found in (times, memory if options.memory else {}) for side in SIDES]
        shape = (options.nodes, options.edges, options.width)
        rows.append([where, options.graph or "random", *shape, name, *map(short, cells)])
        print(f"{name:24s}", *(f"{side} {took:.2f} ms {memory.get(side, 0):.0f} MiB" for side, took in times.items()),
              *(f"{took / times['gnnaccel']:.2f}x" for took in times.values()), flush=True)  # fmt: skip
    if options.csv:
        columns = ("device", "graph", "nodes", "edges", "width", "layer")
        columns += (*(f"{side}_ms" for side in SIDES), *(f"{side}_mib" for side in SIDES))
        save_table(options.csv, [f"# {versions()}", *provenance(options.commit)], columns, rows)
    return None


if __name__ == "__main__":
    main()
