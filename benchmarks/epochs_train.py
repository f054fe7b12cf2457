"""Training of small models in PyG or DGL: the plain script that epochs.py starts, with and without the flag.

    python benchmarks/epochs_train.py --layers pyg plan.json
    python benchmarks/epochs_train.py --layers pyg --capture hand plan.json
    python benchmarks/epochs_train.py --layers pyg --compile reduce-overhead --serve plan.json
    GNNACCEL=1 python benchmarks/epochs_train.py --layers dgl plan.json

It knows nothing of gnnaccel, but for --capture gnnaccel. plan.json: device; threads (0: torch's own number); features,
hidden, classes; losses, how many are kept; cases, each with its name, graph (a .npz with edge_index [2, E], sources
first, and num_nodes), model, warm_up, blocks and epochs (of a block). Features and labels are random, from one seed, as
are the weights, which are the same in PyG and DGL. It prints a line of JSON when a case begins and one when it ends.
--serve (compiled.py): it makes all cases and trains each for an epoch, and then measures the one whose number comes by
standard input, again and again, so that another process can decide whose turn it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MODELS = ("gcn", "gcn-cached", "sage", "gin", "graphconv", "gat", "gatv2", "transformer", "resgated")
DGL_MODELS = ("gcn", "sage", "gin", "gat", "gatv2")  # whose layers have a like in DGL
# Losses that compare with PyG's: DGL's GATv2Conv lacks the bias behind the sum, so it trains differently.
COMPARABLE = {"gatv2": 1}


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


def pyg_conv(model: str, inputs: int, outputs: int) -> nn.Module:
    from torch_geometric import nn as pyg

    return {
        "gcn": lambda: pyg.GCNConv(inputs, outputs),
        "gcn-cached": lambda: pyg.GCNConv(inputs, outputs, cached=True),
        "sage": lambda: pyg.SAGEConv(inputs, outputs),
        "gin": lambda: pyg.GINConv(mlp(inputs, outputs)),
        "graphconv": lambda: pyg.GraphConv(inputs, outputs),
        "gat": lambda: pyg.GATConv(inputs, outputs),
        "gatv2": lambda: pyg.GATv2Conv(inputs, outputs),
        "transformer": lambda: pyg.TransformerConv(inputs, outputs),
        "resgated": lambda: pyg.ResGatedGraphConv(inputs, outputs),
    }[model]()


def dgl_conv(model: str, inputs: int, outputs: int) -> nn.Module:
    from dgl import nn as dgl

    return {
        "gcn": lambda: dgl.GraphConv(inputs, outputs),
        "sage": lambda: dgl.SAGEConv(inputs, outputs, "mean"),
        "gin": lambda: dgl.GINConv(mlp(inputs, outputs), "sum"),
        "gat": lambda: dgl.GATConv(inputs, outputs, 1),
        "gatv2": lambda: dgl.GATv2Conv(inputs, outputs, 1),
    }[model]()


class Net(nn.Module):
    """Two layers of PyG, a ReLU between them; graph: an edge_index or a sparse matrix."""

    def __init__(self, first: nn.Module, last: nn.Module):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor, graph) -> Tensor:
        return self.last(self.first(x, graph).relu(), graph)


class DGLNet(Net):
    """The same of DGL, whose attention layers keep an axis for heads."""

    def forward(self, x: Tensor, graph) -> Tensor:
        return self.last(graph, self.first(graph, x).flatten(1).relu()).flatten(1)


@torch.no_grad()
def set_weights(model: nn.Module, transposed: bool) -> None:
    """Weights from a seed, biases 0: the layers of PyG and DGL list their weights in the same order."""
    rng = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() < 2:
            weight.zero_()
            continue
        target = weight.t() if transposed else weight  # [outputs, inputs], but for DGL's GraphConv
        bound = (6 / (target.shape[-2] + target.shape[-1])) ** 0.5
        target.copy_((torch.rand(target.shape, generator=rng) * 2 - 1) * bound)


def make_net(layers: str, model: str, sizes: tuple[int, int, int]) -> nn.Module:
    in_dgl = layers == "dgl"
    conv = dgl_conv if in_dgl else pyg_conv
    net = (DGLNet if in_dgl else Net)(conv(model, *sizes[:2]), conv(model, *sizes[1:]))
    set_weights(net, in_dgl and model == "gcn")
    return net


def make_graph(layers: str, model: str, edge_index: Tensor, num_nodes: int, device: torch.device):
    """The graph as the layers take it; PyG's add self-loops themselves, for DGL the caller does."""
    if layers == "dgl":
        import dgl

        graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
        return (graph if model in ("sage", "gin") else dgl.add_self_loop(graph)).to(device)
    if layers == "csr":
        from torch_geometric.utils import to_torch_csr_tensor

        return to_torch_csr_tensor(edge_index.flip(0), size=(num_nodes, num_nodes)).to(device)  # rows: destinations
    return edge_index.to(device, copy=True)  # one of its own: what is derived from it is not there yet


def by_hand(epoch: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The epoch in a CUDA graph, as PyTorch's notes on them have it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(60):  # with the lists of work that come with the 51st call of a graph
            epoch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = epoch()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def epoch_of(model: nn.Module, x: Tensor, graph, y: Tensor, capture: str | None = None) -> Callable[[], Tensor]:
    """A function that trains for one epoch and returns the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=capture == "hand")

    def epoch() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, graph), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if capture == "gnnaccel":
        import gnnaccel

        return gnnaccel.captured(epoch)
    return by_hand(epoch) if capture == "hand" else epoch


class Trainer:
    """What the cases of a plan share."""

    def __init__(self, layers: str, compiled: str | None, capture: str | None, plan: dict):
        self.layers, self.compiled, self.capture = layers, compiled, capture
        self.keep = 0 if capture == "hand" else plan["losses"]  # it is trained before
        self.device = torch.device(plan["device"])
        self.sizes = plan["features"], plan["hidden"], plan["classes"]
        self.loaded: tuple[str, Tensor, int] | None = None

    def load(self, path: str) -> tuple[Tensor, int]:
        """edge_index int64 on the host and the number of nodes; the last graph is kept."""
        if self.loaded is None or self.loaded[0] != path:
            with np.load(path) as file:
                self.loaded = path, torch.from_numpy(file["edge_index"]).long(), int(file["num_nodes"])
        return self.loaded[1:]

    def start(self, model: str, edge_index: Tensor, num_nodes: int) -> Callable[[], Tensor]:
        """An epoch of a new model on a new graph."""
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(num_nodes, self.sizes[0], generator=rng).to(self.device)
        y = torch.randint(self.sizes[2], (num_nodes,), generator=rng).to(self.device)
        graph = make_graph(self.layers, model, edge_index, num_nodes, self.device)
        net = make_net(self.layers, model, self.sizes).to(self.device)
        net = torch.compile(net, mode=self.compiled) if self.compiled else net
        return epoch_of(net, x, graph, y, self.capture)

    def rehearse(self, model: str) -> None:
        """Two epochs on a ring of 64 nodes: what loads at the first call of a kernel is no graph's preparation."""
        if not self.compiled:  # it would compile for another shape
            ring = torch.arange(64)
            epoch = self.start(model, torch.stack([ring, ring.roll(1)]), 64)
            epoch()
            epoch()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def block(self, epoch: Callable[[], Tensor], count: int, losses: list[Tensor]) -> float:
        """Milliseconds of each of `count` epochs; the first losses are added to `losses`."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            loss = epoch()
            if len(losses) < self.keep:
                losses.append(loss)
        self.synchronize()
        return (time.perf_counter() - start) / count * 1e3

    def measure(self, case: dict) -> dict:
        """Train; epoch_ms: median of the blocks, iqr_ms, first_ms: of the first epoch; peak_mib (CUDA), losses."""
        on_cuda = self.device.type == "cuda"
        edge_index, num_nodes = self.load(case["graph"])
        self.rehearse(case["model"])
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        epoch, losses = self.start(case["model"], edge_index, num_nodes), []
        first_ms = self.block(epoch, 1, losses)
        self.block(epoch, case["warm_up"], losses)
        times = [self.block(epoch, case["epochs"], losses) for _ in range(case["blocks"])]
        low, middle, high = statistics.quantiles(times, n=4)
        comparable = COMPARABLE.get(case["model"]) if self.layers == "dgl" else None
        return {
            "epoch_ms": middle,
            "iqr_ms": high - low,
            "first_ms": first_ms,
            "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20 if on_cuda else None,
            "losses": [float(loss) for loss in losses[:comparable]],
        }


class Served:
    """A case of a server: made, trained for one epoch, and measured when it is asked for."""

    def __init__(self, trainer: Trainer, case: dict):
        self.trainer, self.case, self.losses, self.warm = trainer, case, [], False
        edge_index, num_nodes = trainer.load(case["graph"])
        before = self.allocated()
        self.epoch = trainer.start(case["model"], edge_index, num_nodes)
        wall, used = time.perf_counter(), self.cpu_s()
        first = trainer.block(self.epoch, 1, self.losses)
        trainer.block(self.epoch, 2, self.losses)  # what a mode of torch.compile records then
        self.own = self.allocated() - before
        self.made = {"first_ms": first, "compile_s": time.perf_counter() - wall, "compile_cpu_s": self.cpu_s() - used}

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.trainer.device.type == "cuda" else 0

    def cpu_s(self) -> float:
        """Of this process and the compilers that it has started."""
        both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    def measure(self) -> dict:
        """As `Trainer.measure`; peak_mib: of an epoch that is compiled, with the case's own graph and features."""
        trainer, case, on_cuda = self.trainer, self.case, self.trainer.device.type == "cuda"
        trainer.block(self.epoch, 3 if self.warm else case["warm_up"], self.losses)
        self.warm = True
        resting = self.allocated()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        times = [trainer.block(self.epoch, case["epochs"], self.losses) for _ in range(case["blocks"])]
        low, middle, high = statistics.quantiles(times, n=4)
        peak = torch.cuda.max_memory_allocated() - resting + self.own if on_cuda else 0
        return self.made | {
            "epoch_ms": middle,
            "iqr_ms": high - low,
            "peak_mib": peak / 2**20 if on_cuda else None,
            "losses": [float(loss) for loss in self.losses],
        }


def described(error: Exception) -> dict:
    first = (str(error).strip().splitlines() or [""])[0]
    return {"error": f"{type(error).__name__}: {first}"[:200]}


def serve(trainer: Trainer, cases: list[dict]) -> None:
    """Measure the cases whose numbers come by standard input, until it ends."""
    made: list[Served | None] = []
    for case in cases:
        try:
            made.append(Served(trainer, case))
            say(made=case["name"])
        except Exception as error:  # what does not compile
            made.append(None)
            say(made=case["name"], **described(error))
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
    say(ready=True)
    for line in sys.stdin:
        case = made[int(line)]
        if case is not None:
            try:
                say(end=case.case["name"], **case.measure())
            except Exception as error:
                say(end=case.case["name"], **described(error))


def say(**words) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=["pyg", "csr", "dgl"], required=True, help="csr: PyG's on torch.sparse_csr")
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE", help="torch.compile(model, mode=MODE)")
    parser.add_argument("--serve", action="store_true", help="measure what is asked for by standard input")
    parser.add_argument("--capture", choices=["gnnaccel", "hand"], help="the epoch in a CUDA graph")
    parser.add_argument("plan", help="file.json")
    options = parser.parse_args()
    with open(options.plan, encoding="utf-8") as file:
        plan = json.load(file)
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    __import__("dgl" if options.layers == "dgl" else "torch_geometric")
    say(modules=[name for name in sys.modules if name.count(".") == 1])  # so that who started it sees what it loaded
    trainer = Trainer(options.layers, options.compile, options.capture, plan)
    if options.serve:
        return serve(trainer, plan["cases"])
    for case in plan["cases"]:
        say(begin=case["name"])
        try:
            found = trainer.measure(case)
        except Exception as error:  # out of memory, a format the layer does not take, what does not compile
            found = described(error)
        say(end=case["name"], **found)
        if options.compile:
            torch._dynamo.reset()
        gc.collect()
        trainer.synchronize()  # an error that has spoiled the device ends the process here


if __name__ == "__main__":
    main()
