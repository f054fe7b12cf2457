"""Warps that share a window of a translated graph (TC-GNN, Figure 9): 1 to 8, and what `Tiles.team_for` takes.

    python benchmarks/cuda_tile_warps.py --csv out.csv

Graphs and times are those of cuda_tiles.py; float32, without weights. paper: its starting rule, a warp to 32 edges of a
window, as the power of two up to 8 next to it.
"""

from __future__ import annotations

import argparse
import functools

import torch
from cuda_tiles import BUDGET_MS, SORTED, make
from timing import provenance, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops
from gnnaccel.lower import bounds
from gnnaccel.tiles.translate import Tiles

GRAPHS = ("blocks:4", "blocks:8", "blocks:32", "blocks:8:25", "blocks:8:25:65536", *SORTED)
TEAMS = (1, 2, 4, 8)
COLUMNS = ("graph", "op", "width", "blocks_per_window", "paper", "ours", *(f"ms_{t}" for t in TEAMS), "ours_vs_best")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS))
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 128], help="features")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(args.commit, "medians of single calls in ms, by warps to a window")
    print("\n".join(head))
    lines = []
    rule = Tiles.team_for
    for name in args.graphs:
        graph = make(name)
        tiles = gnnaccel.prepare(graph, transposed=False, kernel="tiled").tiles
        windows = tiles.window_ptr.numel() - 1
        wanted = graph.nnz // windows // 32
        for width in args.widths:
            x = torch.randn(graph.num_cols, width, device="cuda")
            for op, call in (
                ("spmm", functools.partial(ops.spmm, graph, x, kernel="tiled")),
                ("sddmm", functools.partial(ops.sddmm, graph, x, x, kernel="tiled")),
            ):
                times = {}
                for team in TEAMS:
                    Tiles.team_for = lambda self, features, dots=False, team=team: team
                    times[team] = time_ms(call, BUDGET_MS)[0]
                Tiles.team_for = rule
                row = {"graph": name, "op": op, "width": width, "blocks_per_window": tiles.num_blocks / windows}
                row["paper"] = min(bounds.TILE_TEAM, 1 << max(wanted, 1).bit_length() - 1)
                row["ours"] = tiles.team_for(width, dots=op == "sddmm")
                row |= {f"ms_{team}": ms for team, ms in times.items()}
                row["ours_vs_best"] = times[row["ours"]] / min(times.values())
                lines.append(shown(COLUMNS, row))
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
