"""A step of torch.compile(model, mode="reduce-overhead") taken apart: where the host's time goes, and the floor.

    python benchmarks/compiled_steps.py --graph cora.npz --models gcn sage gin gat --csv out.csv
    python benchmarks/compiled_steps.py --graph cora.npz --models sage --device cpu       # a dry run

The models of epochs_train.py, PyG's alone and after gnnaccel.accelerate() in one process, in turns; each model in a
process of its own. Side linear: one torch.nn.Linear in place of the model, with the same loss and optimizer: what
torch itself takes for a program of CUDA graphs.

step_ms, least_ms, most_ms: median, least and most of blocks of 40 steps; zero_us to optimizer_us: medians of the host's
time of zero_grad(), the model, the loss, backward() and Adam's step; replays: of CUDA graphs in a step; gpu_us,
kernels: the time and number of all that runs on the GPU in a step, copies included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import epochs_train
import numpy as np
import torch
from timing import provenance, save_table, short
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import gnnaccel

SIZES = (128, 64, 40)
STAGES = ("zero_us", "forward_us", "loss_us", "backward_us", "optimizer_us")
COLUMNS = (
    "graph", "nodes", "edges", "model", "side", "step_ms", "least_ms", "most_ms", *STAGES, "replays", "gpu_us",
    "kernels",
)  # fmt: skip
BLOCKS, STEPS = 7, 40


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZES[0], SIZES[2])

    def forward(self, x, _):
        return self.linear(x)


def step_of(side: str, model: str, x, graph, y, device: str) -> Callable[[list | None], None]:
    """Trains for a step; appends the seconds of its stages to a list that it is given."""
    net = (Linear() if side == "linear" else epochs_train.make_net("pyg", model, SIZES)).to(device)
    net = gnnaccel.accelerate(net) if side == "gnnaccel" else net
    net = torch.compile(net, mode="reduce-overhead" if device == "cuda" else "default")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def step(stages=None):
        at = [time.perf_counter()]
        optimizer.zero_grad()
        at.append(time.perf_counter())
        out = net(x, graph)
        at.append(time.perf_counter())
        loss = F.cross_entropy(out, y)
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        optimizer.step()
        at.append(time.perf_counter())
        if stages is not None:
            stages.append([after - before for before, after in itertools.pairwise(at)])

    return step


def on_the_gpu(step: Callable, steps: int = 20) -> dict:
    """gpu_us, kernels and replays."""
    replays, replay = [], torch.cuda.CUDAGraph.replay
    torch.cuda.CUDAGraph.replay = lambda graph: (replays.append(1), replay(graph))[1]
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
    finally:
        torch.cuda.CUDAGraph.replay = replay
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    gpu_us = sum(event.device_time for event in events) / steps
    return {"gpu_us": gpu_us, "kernels": len(events) / steps, "replays": len(replays) / steps}


def measure(model: str, options: argparse.Namespace) -> list[dict]:
    """The rows of a model."""
    device = options.device
    with np.load(options.graph) as file:
        edge_index, nodes = torch.from_numpy(file["edge_index"]).long(), int(file["num_nodes"])
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, SIZES[0], generator=rng).to(device)
    y = torch.randint(SIZES[2], (nodes,), generator=rng).to(device)
    steps, synchronize = {}, torch.cuda.synchronize if device == "cuda" else lambda: None
    for side in ("pyg", "gnnaccel", "linear"):
        steps[side] = step_of(side, model, x, edge_index.to(device, copy=True), y, device)
        for _ in range(12):  # with all that is recorded
            steps[side]()
    times, stages = {side: [] for side in steps}, {side: [] for side in steps}
    for _ in range(BLOCKS):
        for side, step in steps.items():
            for _ in range(4):
                step()
            synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            synchronize()
            times[side].append((time.perf_counter() - start) / STEPS * 1e3)
            for _ in range(STEPS // 2):
                step(stages[side])
    rows = []
    for side, step in steps.items():
        row = {"graph": Path(options.graph).stem, "nodes": nodes, "edges": edge_index.shape[1], "model": model}
        row |= {"side": side, "step_ms": statistics.median(times[side])}
        row |= {"least_ms": min(times[side]), "most_ms": max(times[side])}
        row |= {
            name: statistics.median(of) * 1e6 for name, of in zip(STAGES, zip(*stages[side], strict=True), strict=True)
        }
        rows.append(row | (on_the_gpu(step) if device == "cuda" else {}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", required=True, help="file.npz with edge_index and num_nodes")
    parser.add_argument("--models", nargs="+", default=["gcn", "sage", "gin", "gat"])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument(
        "--rows", action="store_true", help=argparse.SUPPRESS
    )  # of one model, for the process that asks
    options = parser.parse_args()
    if options.rows:
        for row in measure(options.models[0], options):
            print(">", *(short(row.get(column)) for column in COLUMNS), sep=",", flush=True)
        return
    head, rows = provenance(options.commit), []
    print(*head, sep="\n")
    for model in options.models:
        words = [
            sys.executable,
            __file__,
            "--graph",
            options.graph,
            "--models",
            model,
            "--device",
            options.device,
            "--rows",
        ]
        said = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        rows += [line.split(",")[1:] for line in said if line.startswith(">,")]
        print(*(",".join(row) for row in rows[-3:]), sep="\n", flush=True)
    if options.csv:
        save_table(options.csv, head, COLUMNS, rows)


if __name__ == "__main__":
    main()
