"""What of the exchanges of halo rows runs behind the sums inside parts: one epoch, seen by the profiler.

    torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py --graph arxiv-like --scale 0.2 --device cpu

A row for each model, of rank 0. in_flight_ms: from the start of an exchange to its end, summed over those of an epoch;
on CUDA the time in which one of NCCL's kernels runs. covered_ms: that part of it in which the rank computes: on a CPU
until it begins to wait for the rows, on CUDA that in which another kernel runs beside. An exchange also takes as long
as the slowest rank keeps the others waiting. --trace FOLDER keeps the profiler's traces (chrome://tracing, Perfetto).
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import MODELS, model_of, whole_graph
from timing import provenance, save_table, shown
from torch.profiler import ProfilerActivity, profile, record_function

from gnnaccel import distributed
from gnnaccel.parts.exchange import Exchange

COLUMNS = (
    "graph",
    "nodes",
    "edges",
    "ranks",
    "backend",
    "model",
    "exchanges",
    "epoch_ms",
    "in_flight_ms",
    "covered_ms",
)


class Seen:
    """Exchanges on a CPU: when each began, when its rows were there, when the rank began to wait for them."""

    def __init__(self):
        self.original, self.found = Exchange._started, []

    def __enter__(self):
        seen = self

        def started(exchange, rows, counts, others):
            about = {"begun": time.perf_counter()}
            work, all_to_all = [], dist.all_to_all_single

            def noted(*arguments, **options):
                work.append(all_to_all(*arguments, **options))
                work[0].get_future().then(lambda _: about.update(there=time.perf_counter()))
                return work[0]

            dist.all_to_all_single = noted
            try:
                finish = seen.original(exchange, rows, counts, others)
            finally:
                dist.all_to_all_single = all_to_all
            seen.found.append(about)

            def finished():
                about["waits"] = time.perf_counter()
                with record_function("waits for halo rows"):
                    return finish()

            return finished

        Exchange._started = started
        return self

    def __exit__(self, *_):
        Exchange._started = self.original

    def times_ms(self):
        in_flight = sum(one["there"] - one["begun"] for one in self.found)
        covered = sum(min(one["there"], one["waits"]) - one["begun"] for one in self.found)
        return 1e3 * in_flight, 1e3 * covered


def on_cuda(profiler):
    """Milliseconds in which a kernel of NCCL's runs, and of these those beside another kernel."""
    kernels = [
        e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    ends = []
    for event in kernels:
        kind = int("nccl" in event.name().lower())
        start = event.start_ns()
        ends += [(start, kind, 1), (start + event.duration_ns(), kind, -1)]
    running, before, in_flight, covered = [0, 0], 0, 0, 0
    for at, kind, step in sorted(ends):
        in_flight += (at - before) * (running[1] > 0)
        covered += (at - before) * (running[1] > 0 and running[0] > 0)
        running[kind] += step
        before = at
    return in_flight / 1e6, covered / 1e6


def measure(kind, args, part):
    model = distributed.wrap(model_of(kind, args.feats, args.hidden, args.layers, part.device), part)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def epoch():
        loss = part.mean(F.cross_entropy(model(part.x, part.edge_index), part.y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        epoch()
    cuda = part.device.type == "cuda"
    dist.barrier()
    with Seen() as seen, profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        epoch()
        took = time.perf_counter() - start
    dist.barrier()
    if args.trace and part.rank == 0:
        profiler.export_chrome_trace(str(Path(args.trace, f"{kind}.json")))
    in_flight, covered = on_cuda(profiler) if cuda else seen.times_ms()
    count = len(seen.found)
    return {
        "model": kind,
        "exchanges": count,
        "epoch_ms": took * 1e3,
        "in_flight_ms": in_flight,
        "covered_ms": covered,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="arxiv-like")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--models", nargs="+", default=["gcn", "sage", "gin", "gat"], choices=MODELS)
    parser.add_argument("--feats", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--device", help="default: a GPU for each rank where there are as many, else the CPU")
    parser.add_argument("--trace", metavar="FOLDER")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args()
    device = distributed.join(args.device, timeout_s=600)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        graph, x, y = whole_graph(args.graph, args.scale, device, args.feats)
        print(distributed.partition(graph, dist.get_world_size(), folder[0], nodes={"x": x, "y": y}))
    dist.broadcast_object_list(folder)
    part = distributed.load(folder[0], device=device)
    about = part.statistics
    common = {
        "graph": args.graph if args.scale == 1 else f"{args.graph} x {args.scale}",
        "nodes": about.num_nodes,
        "edges": about.num_edges,
        "ranks": about.parts,
        "backend": dist.get_backend(),
    }
    rows = []
    for kind in args.models:
        row = common | measure(kind, args, part)
        if part.rank == 0:
            rows.append(shown(COLUMNS, row))
    if part.rank == 0 and args.csv:
        note = f"{torch.get_num_threads()} CPU threads each"
        save_table(args.csv, provenance(args.commit, note), COLUMNS, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
