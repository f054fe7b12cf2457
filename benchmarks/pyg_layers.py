"""PyG's layers beyond plain sums and GAT, alone, compiled and on gnnaccel: forward + backward, on the CPU or on CUDA.

    python benchmarks/pyg_layers.py --device cuda --csv out.csv
    python benchmarks/pyg_layers.py --device cuda --graph arxiv-like --compiled --memory --csv out.csv
    python benchmarks/pyg_layers.py --device cuda --graph arxiv-like --compiled --memory --epochs --csv out.csv
    python benchmarks/pyg_layers.py --nodes 2708 --edges 10556 --width 16      # a small graph: overhead

Each layer is checked first: the outputs of all sides must agree; under --autocast gnnaccel's may be no further from
those in float32 than PyG's. Then the sides take turns, and medians are compared.
The graph is random, its in-degrees by a power law, or a stand-in (--graph). What is prepared once per graph is not in
the times, nor is what is compiled. With --compiled PyG also runs under torch.compile. With --memory the table has the
extra peak memory of a step: on CUDA of torch's allocator, on the CPU of the first step of a side in a process of its
own (not of the compiled one). With --autocast all sides run under torch.autocast in bfloat16.
With --epochs models of two such layers, a ReLU between them, are trained by Adam instead: times are of an epoch, of
some one behind another, memory is the most that one adds, and the differences are the largest relative ones of a side's
first losses from PyG's; queued_ms (of steps with --queued) is an epoch of some whose kernels wait for each other alone,
not for the host. A side that is too large for the GPU, or for --limit, is left out. Processes with the same --lock
compile at the same time, and measure one after the other, when --among of them have compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import graphs
import torch
from cpu_layers import extra_memory, versions
from cpu_rows import Side
from timing import provenance, save_table, short
from torch.nn import functional as F
from torch_geometric import nn

from gnnaccel import pyg_backend

SIDES = ("alone", "compiled", "gnnaccel")
WARM_UP = {"cpu": 2, "cuda": 4}  # steps of each side
WARM_UP_OURS = {"cpu": 0, "cuda": 55}  # before that: on CUDA lists of work come with the 51st call of a graph
BLOCK_MS = 20  # epochs that are timed together
LOSSES = 5  # that are compared


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


class Net(torch.nn.Module):
    """Two layers, a ReLU between them."""

    def __init__(self, make):
        super().__init__()
        self.first, self.last = make(), make()

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x, *others).relu(), *others)


def step_of(layer, arguments):
    """A function that makes a step, and returns the output."""
    return lambda autocast: step(layer, arguments, autocast)


def epoch_of(net: Net, arguments):
    """A function that trains for an epoch, and returns the loss."""
    x, *others = arguments
    x = x.detach()
    labels = torch.arange(x.shape[0], device=x.device) % x.shape[1]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def epoch(autocast: bool) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(net(x, *others), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return epoch


@contextlib.contextmanager
def alone_with(lock: str | None, among: int):
    """Nobody else with this file is in here, and so many have come."""
    if lock is None:
        yield
        return
    with open(lock, "ab", buffering=0) as file:
        file.write(b".")
        while Path(lock).stat().st_size < among:
            time.sleep(0.05)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def checked(sides: dict, options) -> tuple[dict, dict[str, float]]:
    """The sides that fit into memory, after a first step each whose results agree with those of PyG alone; and the
    largest relative differences of their losses."""
    found, exact = {}, None
    for side, run in list(sides.items()):
        try:
            found[side] = [run(options.autocast).float() for _ in range(LOSSES if options.epochs else 1)]
        except torch.OutOfMemoryError:
            del sides[side]
            torch.cuda.empty_cache()
    if options.autocast and not options.epochs:
        # Which the layer alone rounds at each edge: rows of many lie far apart, float32 tells who is right.
        exact = sides["alone"](False)
    want = found.get("alone")
    for side, results in found.items() if want else ():
        if exact is None:
            tolerance = 1e-2 if options.epochs else 1e-3
            for one, other in zip(results, want, strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        else:
            errors = [float((out[0] - exact).abs().max()) for out in (results, want)]
            assert errors[0] <= max(1.5 * errors[1], 1e-2 * float(exact.abs().max())), f"{side}: off by {errors}"
    if not options.epochs or not want:
        return sides, {}
    return sides, {
        side: max(float((one - other).abs() / other.abs()) for one, other in zip(losses, want, strict=True))
        for side, losses in found.items()
    }


def queued_ms(run, autocast: bool, count: int = 3) -> float:
    """Milliseconds of GPU time of a step or epoch: of some that lie in its queue when the first begins."""
    torch.cuda._sleep(200_000_000)  # 0.1 s, in which the host is ahead
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run(autocast)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def measured(make, arguments, options) -> list[dict[str, float]]:
    """Of each side median milliseconds of a step or epoch, in turns, and on CUDA the MiB that one raises its memory by;
    of epochs also queued_ms, and how much losses differ."""
    torch.manual_seed(0)
    device = arguments[0].device
    plain = (Net(make) if options.epochs else make()).to(device)
    layers = {"alone": plain, "gnnaccel": pyg_backend.accelerate(copy.deepcopy(plain))}
    if options.compiled:
        torch._dynamo.reset()
        layers["compiled"] = torch.compile(copy.deepcopy(plain))
        if options.epochs:  # compiled here, where processes do so at the same time
            with contextlib.suppress(torch.OutOfMemoryError):
                step(layers["compiled"], (arguments[0].detach(), *arguments[1:]), options.autocast)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    sides = {side: (epoch_of if options.epochs else step_of)(layer, arguments) for side, layer in layers.items()}
    with alone_with(options.lock, options.among):
        try:
            return timed(sides, device, options)
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()


def timed(sides: dict, device: torch.device, options) -> list[dict[str, float]]:
    sides, differences = checked(sides, options)
    on_cuda, autocast, counts = device.type == "cuda", options.autocast, dict.fromkeys(sides, 1)
    for _ in range(WARM_UP_OURS[device.type]):
        sides["gnnaccel"](autocast)
    times: dict[str, list[float]] = {side: [] for side in sides}
    memory, warm_up = {}, WARM_UP[device.type]
    for turn in range(options.repeat + warm_up):
        for side, run in sides.items():
            if on_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            for _ in range(counts[side]):
                run(autocast)
            if on_cuda:
                torch.cuda.synchronize()
                memory[side] = (torch.cuda.max_memory_allocated() - before) / 2**20
            took = (time.perf_counter() - start) / counts[side] * 1e3
            if turn >= warm_up:
                times[side].append(took)
            elif options.epochs:
                counts[side] = max(1, round(BLOCK_MS / took))
    medians = {side: statistics.median(found) for side, found in times.items()}
    wanted = on_cuda and (options.epochs or options.queued)
    queued = {side: queued_ms(run, autocast) for side, run in sides.items()} if wanted else {}
    return [medians, memory, queued, differences]


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
    parser.add_argument("--epochs", action="store_true", help="train models of two layers")
    parser.add_argument("--queued", action="store_true", help="on CUDA also a step's GPU time, whatever the host's is")
    parser.add_argument("--limit", type=float, metavar="GIB", help="of the GPU's memory")
    parser.add_argument("--lock", metavar="FILE", help="measure while no other process with this file does")
    parser.add_argument("--among", type=int, default=1, metavar="N", help="processes with that file, a new one")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument("--commit", help="named in the table's head; by default what git says")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.limit:
        total = torch.cuda.get_device_properties(options.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(options.limit * 2**30 / total, 1.0))
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
        times, memory, *of_epochs = measured(make, arguments, options)
        if options.memory and not x.is_cuda:
            memory = {side: memory_of(options, name, side == "gnnaccel") for side in ("alone", "gnnaccel")}
        cells = [found.get(side) for found in (times, memory if options.memory else {}) for side in SIDES]
        shape = (options.nodes, options.edges, options.width)
        rows.append([where, options.graph or "random", *shape, name, *map(short, cells)])
        shown = of_epochs if options.epochs else of_epochs[:1] if options.queued else []
        rows[-1] += [short(found.get(side)) for found in shown for side in SIDES]
        print(f"{name:24s}", *(f"{side} {took:.2f} ms {memory.get(side, 0):.0f} MiB" for side, took in times.items()),
              *(f"{took / times['gnnaccel']:.2f}x" for took in times.values()), flush=True)  # fmt: skip
    if options.csv:
        columns = ("device", "graph", "nodes", "edges", "width", "layer")
        figures = ["ms", "mib"] + ["queued_ms"] * (options.epochs or options.queued) + ["loss_diff"] * options.epochs
        columns += tuple(f"{side}_{figure}" for figure in figures for side in SIDES)
        save_table(options.csv, [f"# {versions()}", *provenance(options.commit)], columns, rows)
    return None


if __name__ == "__main__":
    main()
