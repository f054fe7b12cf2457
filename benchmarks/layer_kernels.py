"""Which kernels a training step of one of PyG's layers is made of under gnnaccel, and how long the host takes.

    python benchmarks/layer_kernels.py --rows GINE LEConv --csv out.csv

For each layer of pyg_layers.py, forward and backward, microseconds: a step by itself (median of 21), one of 20 without
a wait between them, the host's part of that, and the kernels of a step as torch.profiler has them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import pyg_layers
import torch
from cpu_layers import versions
from timing import provenance, save_table
from torch.profiler import ProfilerActivity, profile

from gnnaccel import pyg_backend, touch

STEPS = 5  # that are profiled
COLUMNS = ("graph", "layer", "kernel", "count", "us")


def rows_of(name: str, make, arguments) -> list[list]:
    """The rows of one layer."""
    torch.manual_seed(0)
    layer = pyg_backend.accelerate(make().to(arguments[0].device))
    for _ in range(pyg_layers.WARM_UP_OURS["cuda"] + pyg_layers.WARM_UP["cuda"]):
        pyg_layers.step(layer, arguments)

    def seconds(steps: int) -> tuple[float, float]:
        """Until the host is done, and the GPU."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            pyg_layers.step(layer, arguments)
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        return host, time.perf_counter() - start

    alone = statistics.median(seconds(1)[1] for _ in range(21))
    host, both = (each / 20 for each in seconds(20))
    watched, touch.watched = touch.watched, lambda: False  # a profiler changes the way of our ops
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                pyg_layers.step(layer, arguments)
            torch.cuda.synchronize()
    finally:
        touch.watched = watched
    kernels = [(e.device_time_total / STEPS, e.count / STEPS, e.key) for e in found.key_averages()]
    kernels = sorted((k for k in kernels if k[0] > 0), reverse=True)
    total = sum(us for us, *_ in kernels)
    steps = {"step": alone, "step of many": both, "host of that": host}
    return [
        *([name, what, 1, f"{each * 1e6:.0f}"] for what, each in steps.items()),
        [name, "all kernels", "", f"{total:.1f}"],
        *([name, kernel, f"{count:g}", f"{us:.1f}"] for us, count, kernel in kernels),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="arxiv-like", help="a stand-in of graphs.py")
    parser.add_argument("--width", type=int, default=64, help="features")
    parser.add_argument("--rows", nargs="+", default=[], help="only layers with one of these in the name")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    parser.add_argument("--commit", help="named in the table's head; by default what git says")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    pyg_layers.nn.SAGEConv(1, 1)  # PyG generates the code of a class for its first instance
    edge_index, num_nodes = pyg_layers.stand_in(options.graph, "cuda")
    x = torch.randn(num_nodes, options.width, device="cuda", requires_grad=True)
    attr = torch.randn(edge_index.shape[1], options.width, device="cuda")
    table = []
    for name, (make, takes_edges) in pyg_layers.layers(options.width).items():
        if options.rows and not any(text in name for text in options.rows):
            continue
        for row in rows_of(name, make, (x, edge_index, attr) if takes_edges else (x, edge_index)):
            table.append([options.graph, *row])
            print(*(f"{cell!s:.90}" for cell in row), sep="  ", flush=True)
    if options.csv:
        save_table(options.csv, [f"# {versions()}", *provenance(options.commit)], COLUMNS, table)


if __name__ == "__main__":
    main()
