"""Training on batches of small graphs (molecules, superpixels), and readouts over them, alone and with the flag.

    python benchmarks/molecules.py --csv out.csv
    python benchmarks/molecules.py --frameworks pyg --rows GIN GAT --batches fresh --sizes 1 8 128
    python benchmarks/molecules.py --rows readout
    python benchmarks/molecules.py --device cuda --rows GIN GCN GAT

Each side is a process of its own, one started with GNNACCEL=1. They take turns, an epoch each, so that other work on
the machine meets both; times are CPU time, the least of the rounds, in ms a batch: forward, backward and the step of
the optimiser, of a model of four layers and a readout. "fresh": the framework's own loader makes every batch anew, in
the order given, and that is in the time; "kept": the same batches in every epoch. Rows of readouts: one readout on a
kept batch, forward and backward. The first epoch's losses (or a readout's result) of both sides must agree.
With --device cuda kept batches lie on the GPU, fresh ones are moved there, and times are wall times; DGL "alone" is DGL
on torch's own kernels (GNNACCEL_DGL_KERNELS=torch), as its CPU wheel has none.

Molecules: random trees of 10 to 35 atoms, each bound to at most 4, with a ring or two. Superpixels: 60 to 90 points in
the plane, each with edges from its 8 nearest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from timing import provenance, save_table, shown
from torch import Tensor, nn

COLUMNS = ("framework", "set", "row", "batches", "batch_size", "nodes", "edges", "alone_ms", "flag_ms", "speedup",
           "error")  # fmt: skip
WIDTH, EDGE_WIDTH, DEPTH, HEADS = 64, 16, 4, 4
LAYERS = ("GIN", "GINE", "GCN", "GAT")
READOUTS = {
    "pyg": ("sum", "mean", "max", "softmax", "median", "topk", "sag", "set2set", "attention", "sort"),
    "dgl": ("sum", "mean", "max", "softmax", "topk", "set2set", "attention", "sort", "weighted", "segment"),
}
TOLERANCE = 1e-3


# ---- Graphs ----


def molecule(rng: torch.Generator) -> tuple[int, Tensor]:
    """Number of nodes and undirected bonds [2, B]: a tree with rings."""
    size = int(torch.randint(10, 36, (), generator=rng))
    bound, bonds = [0] * size, []
    for atom in range(1, size):
        free = [i for i in range(max(0, atom - 6), atom) if bound[i] < 3]
        other = free[int(torch.randint(len(free), (), generator=rng))]
        bonds.append((other, atom))
        bound[other] += 1
        bound[atom] += 1
    for _ in range(2):
        first = int(torch.randint(size - 5, (), generator=rng))
        if (first, first + 5) not in bonds and max(bound[first], bound[first + 5]) < 4:
            bonds.append((first, first + 5))
            bound[first] += 1
            bound[first + 5] += 1
    return size, torch.tensor(bonds).t()


def superpixels(rng: torch.Generator) -> tuple[int, Tensor]:
    """Number of nodes and edges [2, E] from the 8 nearest of each."""
    size = int(torch.randint(60, 91, (), generator=rng))
    points = torch.rand(size, 2, generator=rng)
    near = torch.cdist(points, points).topk(9, largest=False).indices[:, 1:]
    return size, torch.stack([near.flatten(), torch.arange(size).repeat_interleave(8)])


def graphs_of(name: str, count: int) -> list[dict]:
    """Graphs with features of nodes and edges, and a target."""
    rng, made = torch.Generator().manual_seed(0), []
    for _ in range(count):
        size, ends = molecule(rng) if name == "molecules" else superpixels(rng)
        if name == "molecules":  # both directions of a bond side by side, as datasets of molecules have them
            ends = torch.stack([ends, ends.flip(0)], 2).flatten(1)
        x = torch.randn(size, WIDTH, generator=rng)
        attr = torch.randn(ends.shape[1], EDGE_WIDTH, generator=rng)
        made.append({"x": x, "edge_index": ends, "edge_attr": attr, "y": torch.randn(1, generator=rng)})
    return made


# ---- The two frameworks ----


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class PyG:
    """Batches, models and readouts of PyTorch Geometric."""

    def __init__(self, made: list[dict], size: int):
        from torch_geometric.data import Data
        from torch_geometric.loader import DataLoader

        self.loader = DataLoader([Data(**one) for one in made], batch_size=size)

    def sizes(self, batch) -> tuple[int, int]:
        return batch.num_nodes, batch.num_edges

    def moved(self, batch, device: str):
        return batch.to(device)

    def target(self, batch) -> Tensor:
        return batch.y

    def model(self, row: str) -> tuple[nn.Module, Callable]:
        from torch_geometric import nn as pyg

        make = {
            "GIN": lambda: pyg.GINConv(mlp()),
            "GINE": lambda: pyg.GINEConv(mlp(), edge_dim=EDGE_WIDTH),
            "GCN": lambda: pyg.GCNConv(WIDTH, WIDTH),
            "GAT": lambda: pyg.GATConv(WIDTH, WIDTH // HEADS, heads=HEADS),
        }[row]
        model = nn.ModuleList([*(make() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)])

        def forward(batch) -> Tensor:
            x = batch.x
            for conv in model[:-1]:
                x = (conv(x, batch.edge_index, batch.edge_attr) if row == "GINE" else conv(x, batch.edge_index)).relu()
            return model[-1](pyg.global_mean_pool(x, batch.batch, batch.num_graphs)).squeeze(1)

        return model, forward

    def readout(self, name: str) -> tuple[nn.Module, Callable]:
        from torch_geometric import nn as pyg

        aggregations = {
            "softmax": lambda: pyg.SoftmaxAggregation(learn=True),
            "median": pyg.MedianAggregation,
            "set2set": lambda: pyg.Set2Set(WIDTH, 2),
            "attention": lambda: pyg.AttentionalAggregation(nn.Linear(WIDTH, 1)),
            "sort": lambda: pyg.SortAggregation(4),
        }
        if name in aggregations:
            module = aggregations[name]()
            return module, lambda batch, x: module(x, batch.batch, dim_size=batch.num_graphs)
        if name in ("topk", "sag"):
            module = pyg.TopKPooling(WIDTH, 0.5) if name == "topk" else pyg.SAGPooling(WIDTH, 0.5)
            return module, lambda batch, x: module(x, batch.edge_index, batch.edge_attr, batch.batch)[0]
        function = {"sum": pyg.global_add_pool, "mean": pyg.global_mean_pool, "max": pyg.global_max_pool}[name]
        return nn.Module(), lambda batch, x: function(x, batch.batch, batch.num_graphs)

    def x(self, batch) -> Tensor:
        return batch.x


class DGL:
    """The same of DGL."""

    def __init__(self, made: list[dict], size: int):
        import dgl
        from dgl.dataloading import GraphDataLoader

        pairs = []
        for one in made:
            graph = dgl.graph(tuple(one["edge_index"]), num_nodes=len(one["x"]))
            graph.ndata["x"], graph.edata["a"] = one["x"], one["edge_attr"]
            pairs.append((graph, one["y"]))
        self.loader = GraphDataLoader(pairs, batch_size=size)

    def sizes(self, batch) -> tuple[int, int]:
        return batch[0].num_nodes(), batch[0].num_edges()

    def moved(self, batch, device: str):
        return [part.to(device) for part in batch]

    def target(self, batch) -> Tensor:
        return batch[1].squeeze(1)

    def model(self, row: str) -> tuple[nn.Module, Callable]:
        import dgl
        from dgl import nn as dgl_nn

        make = {
            "GIN": lambda: dgl_nn.GINConv(mlp()),
            "GINE": lambda: dgl_nn.GINEConv(mlp()),
            "GCN": lambda: dgl_nn.GraphConv(WIDTH, WIDTH, allow_zero_in_degree=True),
            "GAT": lambda: dgl_nn.GATConv(WIDTH, WIDTH // HEADS, HEADS, allow_zero_in_degree=True),
        }[row]
        edges = nn.Linear(EDGE_WIDTH, WIDTH) if row == "GINE" else nn.Identity()
        model = nn.ModuleList([*(make() for _ in range(DEPTH)), nn.Linear(WIDTH, 1), edges])

        def forward(batch) -> Tensor:
            graph = batch[0]
            x = graph.ndata["x"]
            for conv in model[:-2]:
                x = conv(graph, x, model[-1](graph.edata["a"])) if row == "GINE" else conv(graph, x)
                x = x.flatten(1).relu()
            with graph.local_scope():
                graph.ndata["h"] = x
                return model[-2](dgl.mean_nodes(graph, "h")).squeeze(1)

        return model, forward

    def readout(self, name: str) -> tuple[nn.Module, Callable]:
        import dgl
        from dgl import nn as dgl_nn

        modules = {
            "set2set": lambda: dgl_nn.Set2Set(WIDTH, 2, 1),
            "attention": lambda: dgl_nn.GlobalAttentionPooling(nn.Linear(WIDTH, 1)),
            "sort": lambda: dgl_nn.SortPooling(4),
            "weighted": lambda: dgl_nn.WeightAndSum(WIDTH),
        }
        if name in modules:
            module = modules[name]()
            return module, lambda batch, x: module(batch[0], x)
        if name == "segment":
            return nn.Module(), lambda batch, x: dgl.ops.segment_reduce(batch[0].batch_num_nodes(), x, "sum")

        def call(batch, x) -> Tensor:
            graph = batch[0]
            with graph.local_scope():
                graph.ndata["h"] = x
                if name == "softmax":
                    return dgl.softmax_nodes(graph, "h")
                return dgl.topk_nodes(graph, "h", 4)[0] if name == "topk" else dgl.readout_nodes(graph, "h", op=name)

        return nn.Module(), call

    def x(self, batch) -> Tensor:
        return batch[0].ndata["x"]


# ---- One side, in a process of its own ----


def serve(options) -> None:
    """Run epochs, one for each line of standard input; time a batch in ms and a number to compare go to the output."""
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    framework, name, row, batches, size, count = options.side
    number = int(size)
    side = {"pyg": PyG, "dgl": DGL}[framework](graphs_of(name, number * int(count)), number)
    torch.manual_seed(0)
    kept = [side.moved(batch, options.device) for batch in side.loader] if batches == "kept" else None
    nodes, edges = side.sizes(kept[0] if kept else next(iter(side.loader)))
    if row.startswith("readout"):
        epoch = readouts(side, row.split()[1], kept, options.device)
    else:
        epoch = training(side, row, kept, options.device)
    print(json.dumps([nodes, edges]), flush=True)
    clock = time.process_time if options.device == "cpu" else time.perf_counter  # epochs end with a number on the host
    for _ in sys.stdin:
        start = clock()
        result = epoch()
        print(json.dumps([(clock() - start) * 1e3 / int(count), result]), flush=True)


def training(side, row: str, kept: list | None, device: str) -> Callable[[], float]:
    model, forward = side.model(row)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)

    def epoch() -> float:
        total = torch.zeros((), device=device)
        for batch in side.loader if kept is None else kept:
            batch = batch if kept else side.moved(batch, device)
            optimizer.zero_grad()
            loss = (forward(batch) - side.target(batch)).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return float(total)

    return epoch


def readouts(side, name: str, kept: list, device: str) -> Callable[[], float]:
    module, call = side.readout(name)
    module.to(device)
    features = [side.x(batch).clone().requires_grad_() for batch in kept]

    def epoch() -> float:
        total = torch.zeros((), device=device)
        for batch, x in zip(kept, features, strict=True):
            out = call(batch, x)
            x.grad = None
            out.square().sum().backward()
            total += x.grad.abs().mean()
        return float(total)

    return epoch


# ---- Both sides ----


class Process:
    """One side."""

    def __init__(self, command: list[str], **settings: str):
        self.child = subprocess.Popen(
            command, env={**os.environ, **settings}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.sizes = self._answer()

    def _answer(self) -> list:
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self.child.wait()}: {' '.join(self.child.args)}")
        return json.loads(line)

    def epoch(self) -> tuple[float, float]:
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        return tuple(self._answer())

    def close(self) -> None:
        self.child.stdin.close()
        self.child.wait()


def measure(options, framework: str, name: str, row: str, batches: str, size: int) -> dict:
    """One row of the table."""
    count = max(options.graphs // size, 2) if size > 8 else 16
    command = [sys.executable, __file__, "--threads", str(options.threads), "--device", options.device]
    command += ["--side", framework, name, row, batches, str(size), str(count)]
    alone = {"GNNACCEL": "compat" if framework == "dgl" else "0"}
    if framework == "dgl" and options.device == "cuda":
        alone = {"GNNACCEL": "1", "GNNACCEL_DGL_KERNELS": "torch"}
    sides = [Process(command, **alone), Process(command, GNNACCEL="1")]
    first = [side.epoch()[1] for side in sides]
    error = abs(first[0] - first[1]) / max(abs(first[0]), 1e-9)
    if not error < TOLERANCE:
        raise SystemExit(f"wrong result: {framework} {row}: {first}")
    least = [float("inf")] * 2
    for turn in range(options.rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            least[which] = min(least[which], sides[which].epoch()[0])
    for side in sides:
        side.close()
    nodes, edges = sides[0].sizes
    about = dict(framework=framework, set=name, row=row, batches=batches, batch_size=size, nodes=nodes, edges=edges)
    return about | dict(alone_ms=least[0], flag_ms=least[1], speedup=least[0] / least[1], error=error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", default=["pyg", "dgl"], choices=["pyg", "dgl"])
    parser.add_argument("--sets", nargs="+", default=["molecules", "superpixels"], choices=["molecules", "superpixels"])
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only rows with one of these in the name")
    parser.add_argument("--batches", nargs="+", default=["kept", "fresh"], choices=["kept", "fresh"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[128], help="graphs in a batch")
    parser.add_argument("--graphs", type=int, default=512, help="graphs in an epoch, of batches of more than 8")
    parser.add_argument("--rounds", type=int, default=15, help="epochs of each side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--commit", help="named in the table's head; by default what git says")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument("--side", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return serve(options)
    clock = "CPU time" if options.device == "cpu" else "wall time"
    note = f"float32, {options.threads} thread(s); {clock}, least of {options.rounds} epochs in turns, ms a batch"
    head = provenance(options.commit, note)
    print(*head, sep="\n", flush=True)
    table = []
    for framework in options.frameworks:
        for row in (*LAYERS, *(f"readout {name}" for name in READOUTS[framework])):
            if options.rows and not any(text.lower() in row.lower() for text in options.rows):
                continue
            for name in options.sets:
                for batches in options.batches:
                    if row.startswith("readout") and batches == "fresh":
                        continue
                    for size in options.sizes:
                        measured = measure(options, framework, name, row, batches, size)
                        table.append(shown(COLUMNS, measured))
        if options.csv:
            save_table(options.csv, head, COLUMNS, table)
    return None


if __name__ == "__main__":
    main()
