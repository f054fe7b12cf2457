"""What of the exchanges of halo rows runs behind the sums inside parts: one epoch, seen by the profiler.

    torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py --graph arxiv-like --scale 0.2 --device cpu

A row for each model, of rank 0. in_flight_ms: time of the epoch in which an exchange is under way, with NCCL that in
which its kernel runs. covered_ms: that part of it in which the rank computes: on a CPU until it begins to wait
for the rows, on CUDA that in which a kernel of its own runs beside. An exchange also takes as long as the slowest rank
keeps the others waiting. idle_ms, on CUDA: time of the epoch in which rank 0's GPU runs no kernel and no copy, of
whichever rank if they share it (--device cuda, with more ranks than GPUs). --trace FOLDER keeps the profiler's traces
(chrome://tracing, Perfetto).
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from on_parts import about, arguments, cut_and_load, save, threads, trained, under_torchrun, wait
from timing import shown
from torch.profiler import ProfilerActivity, profile, record_function

from gnnaccel.parts.exchange import Exchange

COLUMNS = (
    *("graph", "nodes", "edges", "ranks", "backend", "model", "exchanges"),
    *("epoch_ms", "in_flight_ms", "covered_ms", "idle_ms"),
)


class Seen:
    """Exchanges as the host sees them, in ns: when each began, when its rows were there, when the rank began to wait
    for them."""

    def __init__(self):
        self.original, self.found = Exchange._started, []

    def __enter__(self):
        seen = self

        def started(exchange, rows, counts, others):
            about = {"begun": time.time_ns()}
            work, all_to_all = [], dist.all_to_all_single

            def noted(*arguments, **options):
                work.append(all_to_all(*arguments, **options))
                work[0].get_future().then(lambda _: about.update(there=time.time_ns()))
                return work[0]

            dist.all_to_all_single = noted
            try:
                finish = seen.original(exchange, rows, counts, others)
            finally:
                dist.all_to_all_single = all_to_all
            seen.found.append(about)

            def finished():
                about["waits"] = time.time_ns()
                with record_function("waits for halo rows"):
                    return finish()

            return finished

        Exchange._started = started
        return self

    def __exit__(self, *_):
        Exchange._started = self.original


def joined(spans):
    """Spans (start, end) without what they have in common."""
    found = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length_ms(spans):
    return sum(end - start for start, end in joined(spans)) / 1e6


def common_ms(first, second):
    return length_ms(first) + length_ms(second) - length_ms(first + second)


def on_gpu(profiler):
    """Spans in ns of what a rank's GPU did: exchanges by NCCL, its sums over ranks, other kernels, copies."""
    spans = {"exchanges": [], "sums": [], "kernels": [], "copies": []}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
            name = event.name().lower()
            if "nccl" in name:
                kind = "exchanges" if "sendrecv" in name else "sums"
            else:
                kind = "copies" if name.startswith(("memcpy", "memset")) else "kernels"
            spans[kind].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return spans


def busy_together(spans, device):
    """Spans in which this rank's GPU is busy with any rank's work."""
    mine = [span for every in spans.values() for span in every]
    place = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (place, joined(mine)))
    return joined([span for where, found in every if where == place for span in found])


def within(spans, start, end):
    return [(max(a, start), min(b, end)) for a, b in spans if a < end and b > start]


def measure(kind, args, part):
    _, epoch = trained(kind, args, part)
    for _ in range(3):
        epoch()
    cuda = part.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]):
        epoch()  # the profiler's own first time
    wait(part.device)
    with Seen() as seen, profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        start = time.time_ns()
        epoch()
        if cuda:
            torch.cuda.synchronize()
        end = time.time_ns()
    dist.barrier()
    if args.trace and part.rank == 0:
        profiler.export_chrome_trace(str(Path(args.trace, f"{kind}.json")))
    row = {"model": kind, "exchanges": len(seen.found), "epoch_ms": (end - start) / 1e6}
    in_flight = [(one["begun"], one["there"]) for one in seen.found]
    if not cuda:
        covered = [(one["begun"], min(one["there"], one["waits"])) for one in seen.found]
        return row | {"in_flight_ms": length_ms(in_flight), "covered_ms": length_ms(covered), "idle_ms": None}
    spans = on_gpu(profiler)
    in_flight = spans["exchanges"] or in_flight
    busy = within(busy_together(spans, part.device), start, end)
    return row | {
        "in_flight_ms": length_ms(in_flight),
        "covered_ms": common_ms(in_flight, spans["kernels"]),
        "idle_ms": row["epoch_ms"] - length_ms(busy),
    }


def main():
    parser = arguments(__doc__, "arxiv-like", ["gcn", "sage", "gin", "gat"])
    parser.add_argument("--trace", metavar="FOLDER")
    args, device = under_torchrun(parser)
    part, _ = cut_and_load(args, device)
    rows = []
    for kind in args.models:
        row = about(args, part) | measure(kind, args, part)
        if part.rank == 0:
            rows.append(shown(COLUMNS, row))
            save(args, COLUMNS, rows, threads())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
