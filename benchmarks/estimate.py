"""`gnnaccel partition --estimate` against runs: epochs on parts by 1, 2 and 4 processes, and tables of earlier runs.

    python benchmarks/estimate.py --graph arxiv-like --scale 0.2 --csv FILE
    python benchmarks/estimate.py --tables distributed_1_h100.csv distributed_2_h100.csv --csv FILE
    python benchmarks/estimate.py --paper --csv FILE

Runs: each rank measures the rates of its kernels while all others measure theirs, as they will train beside each other;
the link is timed by all_to_all of large and of empty messages. From the means of these and the sizes of the parts comes
estimated_ms; epoch_ms is the median of the slowest rank's epochs. All in processor time of a rank's process (gloo's
threads too), which other work on the machine takes no part in. of_run: estimated over measured. Memory is the
largest rank's peak, of a process for each model. Tables: of benchmarks/distributed.py, at the rates of an H100.
--paper: no runs; a graph of papers100M's size, halo rows per node as of a stand-in a thousandth as large.
"""

import csv
import dataclasses
import resource
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from on_parts import (
    HEADS,
    MODELS,
    NUM_CLASSES,
    Exchanges,
    about,
    arguments,
    cut,
    save,
    slowest_ms,
    stand_in,
    trained,
)
from timing import shown

from gnnaccel import distributed
from gnnaccel.parts import estimate, rates

COLUMNS = (
    *("graph", "nodes", "edges", "ranks", "model", "hidden", "layers", "epoch_ms", "estimated_ms", "of_run"),
    *("exchange_ms", "mib_sent", "estimated_mib", "peak_gib", "estimated_gib"),
)
PAPER = (
    *("graph", "nodes", "edges", "model", "hidden", "layers", "link_gbs", "gpus", "epoch_ms", "compute_ms"),
    *("exchange_ms", "speedup", "halo_rows", "mib_sent", "memory_gib", "fits"),
)
PAPERS = "papers100M-like"


def seconds(run, repeats):
    return slowest_ms(run, torch.device("cpu"), repeats, time.process_time) / 1e3


def link(ranks, repeats):
    """GB/s that a rank sends while it receives as much, and microseconds of an exchange of nothing."""
    if ranks == 1:
        return 1.0, 0.0
    size = 4_000_000 // (ranks - 1)
    counts = [size] * ranks
    counts[dist.get_rank()] = 0
    rows, empty = torch.ones(sum(counts)), torch.ones(ranks)
    took = seconds(lambda: dist.all_to_all_single(torch.empty_like(rows), rows, counts, counts), repeats)
    nothing = seconds(lambda: dist.all_to_all_single(torch.empty_like(empty), empty), repeats)
    return rows.numel() * 4 / 1e9 / max(took - nothing, 1e-9), nothing * 1e6


def mean_over_ranks(mine, ranks):
    numbers = {k: v for k, v in dataclasses.asdict(mine).items() if type(v) in (int, float)}
    values = torch.tensor(list(numbers.values()), dtype=torch.float64)
    dist.all_reduce(values)
    return dataclasses.replace(mine, **dict(zip(numbers, (values / ranks).tolist(), strict=True)))


def resident_gib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def on_rank(rank, folder, parts, ranks, kind, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{kind}", rank=rank, world_size=ranks)
    base = resident_gib()
    part = distributed.load(parts, device="cpu")
    _, epoch = trained(kind, args, part)
    epoch()
    epoch()  # features and their halo are there
    with Exchanges() as seen:
        epoch()
    sent_mib = seen.mib_of_all(part.device)
    assert ranks == 1 or sent_mib
    epoch_s = seconds(epoch, args.repeats)
    peak = torch.tensor([resident_gib()], dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    found = mean_over_ranks(dataclasses.replace(rates.measured(part.graph, time.process_time), base_gib=base), ranks)
    again_s = seconds(epoch, args.repeats)  # before and after the rates: other work on the machine moves
    link_gbs, latency_us = link(ranks, args.repeats)
    sizes = part.statistics
    of_parts = estimate.Cut(sizes.nodes, sizes.edges, sizes.halo, sizes.halo)
    described = estimate.Model(kind, args.feats, args.hidden, args.layers, NUM_CLASSES, HEADS)
    (guess,) = estimate.estimate([of_parts], described, found, memory_gib=1e9, link_gbs=link_gbs, latency_us=latency_us)
    if rank == 0:
        measured = {"model": kind, "epoch_ms": (epoch_s + again_s) / 2 * 1e3, "mib_sent": sent_mib}
        row = about(args, part) | measured | {"peak_gib": peak.item()}
        torch.save(row | _guessed(guess, measured["epoch_ms"]), f"{folder}/row.pt")
    dist.destroy_process_group()


def _guessed(guess, epoch_ms):
    return {
        "estimated_ms": guess.epoch_ms,
        "of_run": guess.epoch_ms / epoch_ms,
        "exchange_ms": guess.exchange_ms,
        "estimated_mib": guess.mib_sent,
        "estimated_gib": guess.memory_gib,
    }


def runs(args):
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            parts, _ = cut(args, ranks)
            for kind in args.models:
                mp.spawn(on_rank, (folder, parts, ranks, kind, args), nprocs=ranks)
                yield shown(COLUMNS, torch.load(f"{folder}/row.pt"))


def of_tables(paths):
    """Rows of benchmarks/distributed.py on H100s, whose base is not in peak_gib (torch's own count)."""
    found = dataclasses.replace(rates.H100, base_gib=0.0)
    for path in paths:
        with open(path) as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                ranks, nodes, edges = int(row["parts"]), int(row["nodes"]), int(row["edges"])
                halo = [int(row["halo_rows"]) / ranks] * ranks
                largest = edges / ranks * float(row["edge_balance"])
                cut = estimate.Cut([nodes / ranks] * ranks, [largest] * ranks, halo, halo)
                model = estimate.Model(row["model"], 128, int(row["hidden"]), int(row["layers"]), NUM_CLASSES, HEADS)
                (guess,) = estimate.estimate([cut], model, found, memory_gib=80, link_gbs=186, latency_us=30)
                took = float(row["epoch_ms"])
                measured = {"epoch_ms": took, "mib_sent": float(row["mib_sent"]), "peak_gib": float(row["peak_gib"])}
                kept = {key: row[key] for key in ("graph", "nodes", "edges", "model", "hidden", "layers")}
                yield shown(COLUMNS, kept | {"ranks": ranks} | measured | _guessed(guess, took))


def on_paper(args):
    nodes, edges = 111_059_956, 3_231_371_744  # with each citation in both directions
    graph = stand_in(PAPERS, "cpu", 1e-3)
    counts = [1, 2, 4, 8, 16, 32, 64]
    cuts = [estimate.cut_of(graph, count, "communities") for count in counts]
    cuts = [cut.scaled(nodes / graph.num_rows, edges / graph.nnz) for cut in cuts]
    for kind in args.models:
        for link_gbs in (186.0, 50.0):
            model = estimate.Model(kind, 128, args.hidden, args.layers, 172, HEADS)
            limits = {"memory_gib": 80, "link_gbs": link_gbs, "latency_us": 30}
            for guess in estimate.estimate(cuts, model, rates.H100, **limits):
                about = {"graph": PAPERS, "nodes": nodes, "edges": edges, "model": kind, "link_gbs": link_gbs}
                yield shown(PAPER, about | vars(args) | dataclasses.asdict(guess) | {"graph": PAPERS})


def main():
    parser = arguments(__doc__, "arxiv-like", list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tables", nargs="+", metavar="FILE", help="of benchmarks/distributed.py on H100s, not runs")
    parser.add_argument("--paper", action="store_true", help=f"of {PAPERS}, not runs")
    args = parser.parse_args()
    note = "no runs: rates of an H100" if args.paper else "1 CPU thread a rank, gloo"
    if args.tables:
        note = f"epoch_ms, mib_sent and peak_gib are those of {', '.join(Path(path).name for path in args.tables)}"
    rows = list(on_paper(args) if args.paper else of_tables(args.tables) if args.tables else runs(args))
    save(args, PAPER if args.paper else COLUMNS, rows, note)


if __name__ == "__main__":
    main()
