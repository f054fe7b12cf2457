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

import argparse
import csv
import dataclasses
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from graphs import generate
from timing import provenance, save_table, shown
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import gnnaccel
from gnnaccel import distributed
from gnnaccel.parts import estimate, rates

MODELS = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT}
CLASSES, HEADS = 40, 4
COLUMNS = (
    *("graph", "nodes", "edges", "ranks", "model", "hidden", "layers", "epoch_ms", "estimated_ms", "of_run"),
    *("exchange_ms", "mib_sent", "estimated_mib", "peak_gib", "estimated_gib"),
)
PAPER = (
    *("graph", "nodes", "edges", "model", "hidden", "layers", "link_gbs", "gpus", "epoch_ms", "compute_ms"),
    *("exchange_ms", "speedup", "halo_rows", "mib_sent", "memory_gib", "fits"),
)
PAPERS = "papers100M-like"


def graph_of(name, scale):
    made = generate(name, "cpu", scale)
    return gnnaccel.Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"])


def seconds(run, repeats):
    """Median over repeats of what the slowest rank takes."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.process_time()
        run()
        took = torch.tensor([time.process_time() - start], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item())
    return statistics.median(times)


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


def on_rank(rank, folder, ranks, kind, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{kind}", rank=rank, world_size=ranks)
    base = resident_gib()
    part = distributed.load(f"{folder}/parts", device="cpu")
    torch.manual_seed(0)
    options = {"heads": HEADS} if kind == "gat" else {}
    model = MODELS[kind](args.feats, args.hidden, args.layers, CLASSES, **options)
    model = distributed.wrap(model, part)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def epoch():
        loss = part.mean(F.cross_entropy(model(part.x, part.edge_index), part.y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    epoch()
    epoch()  # features and their halo are there
    before = part.exchange.rows_sent
    sent = []
    original = part.exchange._started
    part.exchange._started = lambda rows, *counts: (sent.append(rows.numel() * 4), original(rows, *counts))[1]
    epoch()
    part.exchange._started = original
    assert ranks == 1 or part.exchange.rows_sent > before
    epoch_s = seconds(epoch, args.repeats)
    peak = torch.tensor([resident_gib()], dtype=torch.float64)
    total = torch.tensor([float(sum(sent))], dtype=torch.float64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    found = mean_over_ranks(dataclasses.replace(rates.measured(part.graph, time.process_time), base_gib=base), ranks)
    again_s = seconds(epoch, args.repeats)  # before and after the rates: other work on the machine moves
    link_gbs, latency_us = link(ranks, args.repeats)
    about = part.statistics
    cut = estimate.Cut(about.nodes, about.edges, about.halo, about.halo)
    described = estimate.Model(kind, args.feats, args.hidden, args.layers, CLASSES, HEADS)
    (guess,) = estimate.estimate([cut], described, found, memory_gib=1e9, link_gbs=link_gbs, latency_us=latency_us)
    if rank == 0:
        row = {
            "graph": args.graph if args.scale == 1 else f"{args.graph} x {args.scale}",
            "nodes": about.num_nodes,
            "edges": about.num_edges,
            "ranks": ranks,
            "model": kind,
            "hidden": args.hidden,
            "layers": args.layers,
            "epoch_ms": (epoch_s + again_s) / 2 * 1e3,
            "mib_sent": total.item() / 2**20,
            "peak_gib": peak.item(),
        }
        torch.save(row | _guessed(guess, (epoch_s + again_s) / 2 * 1e3), f"{folder}/row.pt")
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
    graph = graph_of(args.graph, args.scale)
    x = torch.randn(graph.num_rows, args.feats, generator=torch.Generator().manual_seed(0))
    y = torch.randint(CLASSES, (graph.num_rows,), generator=torch.Generator().manual_seed(0))
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            distributed.partition(graph, ranks, f"{folder}/parts", nodes={"x": x, "y": y})
            for kind in args.models:
                mp.spawn(on_rank, (folder, ranks, kind, args), nprocs=ranks)
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
                model = estimate.Model(row["model"], 128, int(row["hidden"]), int(row["layers"]), CLASSES, HEADS)
                (guess,) = estimate.estimate([cut], model, found, memory_gib=80, link_gbs=186, latency_us=30)
                took = float(row["epoch_ms"])
                measured = {"epoch_ms": took, "mib_sent": float(row["mib_sent"]), "peak_gib": float(row["peak_gib"])}
                kept = {key: row[key] for key in ("graph", "nodes", "edges", "model", "hidden", "layers")}
                yield shown(COLUMNS, kept | {"ranks": ranks} | measured | _guessed(guess, took))


def on_paper(args):
    nodes, edges = 111_059_956, 3_231_371_744  # with each citation in both directions
    graph = graph_of(PAPERS, 1e-3)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="arxiv-like")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--feats", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tables", nargs="+", metavar="FILE", help="of benchmarks/distributed.py on H100s, not runs")
    parser.add_argument("--paper", action="store_true", help=f"of {PAPERS}, not runs")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args()
    note = "no runs: rates of an H100" if args.paper else "1 CPU thread a rank, gloo"
    if args.tables:
        note = f"epoch_ms, mib_sent and peak_gib are those of {', '.join(Path(path).name for path in args.tables)}"
    rows = list(on_paper(args) if args.paper else of_tables(args.tables) if args.tables else runs(args))
    if args.csv:
        save_table(args.csv, provenance(args.commit, note), PAPER if args.paper else COLUMNS, rows)


if __name__ == "__main__":
    main()
