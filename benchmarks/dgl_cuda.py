"""Training in DGL on CUDA with DGL's CPU wheel, beside our PyG path on the same graph and model.

    python benchmarks/dgl_cuda.py --csv out.csv
    python benchmarks/dgl_cuda.py --cases minibatch --scale 0.1

Full graph: an epoch (forward, backward, Adam) of GCN, SAGE and GIN of both frameworks, in turns, medians of wall time.
Mini-batch: SAGE of DGL, fan-outs 15 and 10, 1,024 seeds: an epoch of so many batches with training, of the loader alone
(sampling on the host and copies) and of training alone (on batches that are there), which says what overlaps; and how
long the GPU was at work, from a profile.
DGL needs gnnaccel to be imported and to reach CUDA at all: there is no plain DGL to put beside it here.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import time
import warnings

import graphs
import torch
from timing import provenance
from torch import nn
from torch.nn import functional as F

import gnnaccel

gnnaccel.install()
import dgl  # noqa: E402
import torch_geometric.nn as pyg  # noqa: E402

DEVICE = torch.device("cuda")
# graph -> layers, width, models
FULL = {"arxiv-like": (3, 256, ("GCN", "SAGE", "GIN")), "reddit-like": (2, 128, ("GCN", "GAT"))}


def layer_of(framework: str, model: str, inputs: int, outputs: int) -> nn.Module:
    of = {
        ("dgl", "GCN"): lambda: dgl.nn.GraphConv(inputs, outputs),
        ("dgl", "SAGE"): lambda: dgl.nn.SAGEConv(inputs, outputs, "mean"),
        ("dgl", "GIN"): lambda: dgl.nn.GINConv(nn.Linear(inputs, outputs)),
        ("dgl", "GAT"): lambda: dgl.nn.GATConv(inputs, outputs, 1),
        ("pyg", "GCN"): lambda: pyg.GCNConv(inputs, outputs, cached=True),
        ("pyg", "SAGE"): lambda: pyg.SAGEConv(inputs, outputs),
        ("pyg", "GIN"): lambda: pyg.GINConv(nn.Linear(inputs, outputs)),
        ("pyg", "GAT"): lambda: pyg.GATConv(inputs, outputs, add_self_loops=False),
    }
    return of[framework, model]()


class Stack(nn.Module):
    """Layers with ReLU between them."""

    def __init__(self, framework: str, model: str, layers: int, inputs: int, width: int, classes: int):
        super().__init__()
        sizes = [inputs, *[width] * (layers - 1), classes]
        self.layers = nn.ModuleList(layer_of(framework, model, *pair) for pair in itertools.pairwise(sizes))
        self.graph_first = framework == "dgl"

    def forward(self, graph, x):
        for k, layer in enumerate(self.layers):
            x = layer(graph, x) if self.graph_first else layer(x, graph)
            x = x.flatten(1) if k == len(self.layers) - 1 else x.flatten(1).relu()
        return x


def epoch_of(model: nn.Module, graph, x, labels):
    """A function that trains for one epoch."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def epoch():
        optimizer.zero_grad()
        F.cross_entropy(model(graph, x), labels).backward()
        optimizer.step()

    return epoch


def wall_ms(function) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def full_graph(name: str, repeat: int, scale: float):
    """Rows of one graph: (case, DGL's median, PyG's, ratio)."""
    made = graphs.generate(name, scale=scale)
    nodes, indptr, indices = made["num_nodes"], made["indptr"].long(), made["indices"].long()
    target = torch.repeat_interleave(torch.arange(nodes, device=indptr.device), indptr.diff())
    loops = torch.arange(nodes, device=indptr.device)
    source, target = torch.cat([indices, loops]), torch.cat([target, loops])
    start = time.perf_counter()
    theirs = dgl.graph((source.cpu(), target.cpu()), num_nodes=nodes).to(DEVICE)
    gnnaccel.prepare(theirs)
    moved = time.perf_counter() - start
    ours = torch.stack([source, target]).to(DEVICE)
    gnnaccel.prepare(ours)
    layers, width, models = FULL[name]
    x, labels = torch.randn(nodes, width, device=DEVICE), torch.randint(40, (nodes,), device=DEVICE)
    print(f"{name}: {nodes} nodes, {source.numel()} edges; to CUDA and prepared in {moved:.2f} s", flush=True)
    for model in models:
        torch.manual_seed(0)
        shape = (layers, width, width, 40)
        sides = {
            "dgl": epoch_of(Stack("dgl", model, *shape).to(DEVICE), theirs, x, labels),
            "pyg": epoch_of(Stack("pyg", model, *shape).to(DEVICE), ours, x, labels),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(repeat + 3):
            for side, epoch in sides.items():
                took = wall_ms(epoch)
                if turn >= 3:
                    times[side].append(took)
        dgl_ms, pyg_ms = (statistics.median(times[side]) for side in ("dgl", "pyg"))
        yield f"{name} {model}, {layers} layers, {width} wide", dgl_ms, pyg_ms, dgl_ms / pyg_ms


def gpu_busy_ms(work) -> float:
    """Time in which kernels or copies of `work` ran, overlaps counted once, from torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    ranges = [e.time_range for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy, end = 0.0, 0.0
    for begin, stop in sorted((r.start, r.end) for r in ranges):
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return busy / 1e3


def minibatch(scale: float, batches: int, workers: int):
    """Rows of the mini-batch case: (what, ms per batch, None, None)."""
    made = graphs.generate("products-like", scale=scale)
    nodes, indptr, indices = made["num_nodes"], made["indptr"].cpu().long(), made["indices"].cpu().long()
    graph = dgl.graph(("csc", (indptr, indices, [])), num_nodes=nodes)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(nodes, 100), torch.randint(40, (nodes,))
    sampler = dgl.dataloading.NeighborSampler([15, 10], prefetch_node_feats=["x"], prefetch_labels=["y"])
    seeds = torch.randperm(nodes)[: 1024 * batches]
    loader = dgl.dataloading.DataLoader(
        graph, seeds, sampler, device=DEVICE, batch_size=1024, shuffle=True, num_workers=workers
    )
    layers = nn.ModuleList([dgl.nn.SAGEConv(100, 128, "mean"), dgl.nn.SAGEConv(128, 40, "mean")]).to(DEVICE)
    optimizer = torch.optim.Adam(layers.parameters(), 0.01)

    def train(blocks):
        h = layers[0](blocks[0], blocks[0].srcdata["x"]).relu()
        optimizer.zero_grad()
        F.cross_entropy(layers[1](blocks[1], h), blocks[1].dstdata["y"]).backward()
        optimizer.step()

    kept = [blocks for _, _, blocks in loader]
    for blocks in kept[:3]:
        train(blocks)
    both, load, steps = [], [], []
    for _ in range(3):
        both.append(wall_ms(lambda: [train(blocks) for _, _, blocks in loader]) / batches)
        load.append(wall_ms(lambda: [None for _ in loader]) / batches)
        steps.append(wall_ms(lambda: [train(blocks) for blocks in kept]) / batches)
    measured = {"loader and training": both, "loader alone": load, "training alone": steps}
    rows = {what: statistics.median(times) for what, times in measured.items()}
    if workers == 0:
        busy = gpu_busy_ms(lambda: [train(blocks) for _, _, blocks in loader]) / batches
        rows["loader and training, GPU at work (profiler)"] = busy
        rows["loader and training, GPU waits"] = rows["loader and training"] - busy
    for what, value in rows.items():
        yield f"products-like x{scale:g}, {workers} workers, ms a batch: {what}", value, None, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[*FULL, "minibatch"], help=f"of {' '.join(FULL)} minibatch")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    head = provenance(args.commit, "medians of wall time in ms; ratio: DGL over our PyG path, 1.15 is the target")
    print("\n".join(head), flush=True)
    rows = []
    for case in args.cases:
        runs = [full_graph(case, args.repeat, args.scale)] if case in FULL else []
        if case == "minibatch":
            runs = [minibatch(args.scale, args.batches, workers) for workers in (0, 2)]
        for run in runs:
            for row in run:
                rows.append(row)
                what, dgl_ms, pyg_ms, ratio = row
                beside = "" if ratio is None else f"  PyG {pyg_ms:8.2f}  ratio {ratio:.2f}"
                print(f"{what:60s} {dgl_ms:8.2f} ms{beside}", flush=True)
        torch.cuda.empty_cache()
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            file.write("\n".join(head) + "\n")
            writer = csv.writer(file)
            writer.writerow(("case", "dgl_ms", "pyg_ms", "ratio"))
            for what, *figures in rows:
                writer.writerow((what, *("" if f is None else f"{f:.4g}" for f in figures)))


if __name__ == "__main__":
    main()
