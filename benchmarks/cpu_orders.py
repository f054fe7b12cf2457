"""Sums over graphs of many kinds on the CPU, as given and after `prepare(reorder=True)`: does an order ever lose?

    python benchmarks/cpu_orders.py --csv out.csv
    python benchmarks/cpu_orders.py --graphs mesh road-like ../shared/data/gowalla_rec.npz --widths 16 64

`gnnaccel.prepare` times the order that it finds beside the rows as given, and keeps it for the numbers of features
with which it is faster. Here that decision is timed once more, in turns: given_ms of a graph that is not prepared,
prepared_ms of one that is, the least CPU time of --rounds calls each. `served`: by the order found, or as given.

Graphs are .npz files with `edge_index` [2, E] and `num_nodes`, stand-ins of graphs.py, or made here: mesh (triangles,
nodes at random), road-like (a grid with holes), bipartite (users and items, both by a power law, symmetric), molecules
and superpixels (a batch of molecules.py), knowledge (few hubs of objects, many relations).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import graphs
import molecules
import numpy as np
import torch
from timing import provenance, save_table, shown
from torch import Tensor

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.schedule.worklist import lanes_of

MADE = ("mesh", "mesh in order", "road-like", "bipartite", "molecules", "superpixels", "knowledge", "communities")
STAND_INS = ("pubmed-like", "arxiv-like", "artist-like", "amazon0505-like", "yeast-like")
COLUMNS = ("graph", "nodes", "edges", "order", "prepare_ms", "width", "served", "given_ms", "prepared_ms", "speedup")


def _undirected(ends: Tensor, mixed: bool) -> tuple[Tensor, int]:
    n = int(ends.max()) + 1
    ends = torch.cat([ends, ends.flip(0)], 1)
    return (torch.randperm(n)[ends] if mixed else ends), n


def _grid(side: int, diagonals: bool) -> Tensor:
    at = torch.arange(side * side).view(side, side)
    pairs = [(at[:, :-1], at[:, 1:]), (at[:-1], at[1:])]
    pairs += [(at[:-1, :-1], at[1:, 1:])] if diagonals else []
    return torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], 1)


def _power_law(count: int, ends: int, exponent: float = 0.7) -> Tensor:
    return torch.multinomial(torch.arange(1, ends + 1).float().pow(-exponent), count, replacement=True)


def made(name: str) -> tuple[Tensor, int]:
    """Edges [2, E] and the number of nodes."""
    if name.startswith("mesh"):
        return _undirected(_grid(400, True), name == "mesh")
    if name == "road-like":
        ends = _grid(500, False)
        return _undirected(ends[:, torch.rand(ends.shape[1]) < 0.75], True)
    if name == "bipartite":
        users, items, count = 40_000, 20_000, 700_000
        return _undirected(torch.stack([_power_law(count, users), users + _power_law(count, items)]), False)
    if name == "knowledge":
        count, n = 800_000, 60_000
        return torch.stack([_power_law(count, n, 0.5), torch.randperm(n)[_power_law(count, n, 0.9)]]), n
    if name == "communities":
        n, count = 80_000, 1_600_000
        rows = torch.randint(n, (count,))
        inside = torch.rand(count) < 0.9
        cols = torch.where(inside, rows // 64 * 64 + torch.randint(64, (count,)), torch.randint(n, (count,)))
        return torch.randperm(n)[torch.stack([rows, cols.clamp(max=n - 1)])], n
    parts, first = [], 0
    for one in molecules.graphs_of(name, 400) * 20:
        parts.append(one["edge_index"] + first)
        first += len(one["x"])
    return torch.cat(parts, 1), first


def load(name: str) -> Graph:
    torch.manual_seed(0)
    if name in MADE:
        ends, n = made(name)
    elif name.endswith(".npz"):
        with np.load(name, allow_pickle=False) as found:
            ends, n = torch.from_numpy(found["edge_index"].astype(np.int64)), int(found["num_nodes"])
    else:
        one = graphs.generate(name, "cpu", 1.0)
        return Graph.from_csr(one["indptr"], one["indices"], num_cols=one["num_nodes"], check=False)
    return Graph.from_coo(ends[1], ends[0], num_rows=n, num_cols=n)


def least_ms(calls: list, rounds: int) -> list[float]:
    """Of calls in turns."""
    times = [float("inf")] * len(calls)
    for turn in range(rounds + 1):
        for which, call in enumerate(calls):
            start = time.process_time()  # of all threads: other work on the machine is not in it
            call()
            if turn:
                times[which] = min(times[which], (time.process_time() - start) * 1e3)
    return times


def rows_of(name: str, widths: list[int], rounds: int) -> list[dict]:
    given, prepared = load(name), load(name)
    done = gnnaccel.prepare(prepared, reorder=True)
    work = schedule.of(prepared)
    rows = []
    for width in widths:
        x = torch.randn(given.num_cols, width)
        assert torch.equal(ops.spmm(given, x), ops.spmm(prepared, x))
        given_ms, prepared_ms = least_ms([lambda: ops.spmm(given, x), lambda: ops.spmm(prepared, x)], rounds)  # noqa: B023
        row = dict(graph=Path(name).stem, nodes=given.num_rows, edges=given.nnz, order=work.order_name or "as given")
        row |= dict(prepare_ms=done.time_ms, width=width, given_ms=given_ms, prepared_ms=prepared_ms)
        row |= dict(served="in order" if work.faster.get(lanes_of(4 * width)) else "as given")
        rows.append(row | dict(speedup=given_ms / prepared_ms))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=[*MADE, *STAND_INS])
    parser.add_argument("--data", help="folder of .npz files to add")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--commit", help="named in the table's head; by default what git says")
    parser.add_argument("--csv", metavar="OUT")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    files = sorted(map(str, Path(args.data).glob("*.npz"))) if args.data else []
    note = f"float32, {args.threads} thread(s); CPU time, least of {args.rounds} calls in turns, ms"
    head = provenance(args.commit, note)
    table: list[list] = []
    for name in [*args.graphs, *files]:
        table += [shown(COLUMNS, row) for row in rows_of(name, args.widths, args.rounds)]
        if args.csv:
            save_table(args.csv, head, COLUMNS, table)


if __name__ == "__main__":
    main()
