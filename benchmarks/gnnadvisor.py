"""GNNAdvisor's kernel as its authors published it, beside our kernel of neighbour groups and what `prepare` picks.

    git clone https://github.com/YukeWang96/GNNAdvisor_OSDI21
    python benchmarks/gnnadvisor.py --source GNNAdvisor_OSDI21/GNNAdvisor/GNNConv --csv out.csv

Sums of fp32 rows without weights (their `SAG`, which has none), forward, on graphs of graphs.py and .npz files,
prepared. Times are medians of single calls in device time, milliseconds.

- authors_ms, authors: theirs, the zero fill of its output included, with the parameters that its own automatic mode
  (param.py: decider) takes: neighbours of a group / dimension workers / warps of a block.
- groups_ms, groups: ours by `rules.groups_of`, on every graph: neighbours of a group / threads of a block / lanes.
- auto_ms: what `gnnaccel.prepare` leads to.

Its sources are compiled for this torch, which no longer has the `type()` of a tensor that they dispatch on.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch
from advisor import GRAPHS, load
from timing import clocks_under_load, error_of, provenance, sample, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.schedule import rules
from gnnaccel.schedule.groups import Setting
from gnnaccel.schedule.worklist import lanes_of

COLUMNS = ("graph", "nodes", "edges", "width", "authors_ms", "authors", "groups_ms", "groups", "auto_ms",
           "authors_vs_groups", "authors_vs_auto", "authors_error", "rel_error")  # fmt: skip
GEOMEANS = ("authors_vs_groups", "authors_vs_auto")
SHARED_KB, MOST_WARPS, GAP = 100, 8, 100  # GNNA_main.py: --sharedMem; param.py: MAX_warpPerBlock, gap_smem


def compiled(source: Path):
    """The authors' extension."""
    from torch.utils.cpp_extension import load as build

    folder = Path(tempfile.mkdtemp())
    copies = [folder / name for name in ("GNNAdvisor.cpp", "GNNAdvisor_kernel.cu")]
    for copy in copies:
        text = (source / copy.name).read_text().replace(".type().is_cuda()", ".is_cuda()")
        copy.write_text(text.replace(".type(),", ".scalar_type(),"))
    return build("gnnadvisor_authors", [str(copy) for copy in copies], extra_cuda_cflags=["-O3"])


def automatic(graph: Graph, width: int) -> tuple[int, int, int]:
    """Neighbours of a group, dimension workers and warps of a block: `decider` of param.py, for a hidden layer."""
    size = max(1, int(graph.nnz / graph.num_rows))
    wanted_kb = MOST_WARPS * (4 * size + width + 4 * GAP) / 1e3
    warps = int(min(wanted_kb, 0.4 * SHARED_KB) * 1e3 / (4 * size + 4 * width))
    return size, min(width, 32), min(warps, MOST_WARPS)


def parts_of(graph: Graph, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where groups of up to `size` neighbours begin, and their rows: what `build_part` makes one element at a time."""
    indptr = graph.indptr.long()
    count = (indptr.diff() + size - 1) // size
    rows = torch.arange(graph.num_rows, device=graph.device).repeat_interleave(count)
    number = torch.arange(rows.numel(), device=graph.device) - (count.cumsum(0) - count)[rows]
    starts = torch.cat([indptr[rows] + size * number, indptr[-1:]])
    return starts.int(), rows.int()


def measure(authors, name: str, graph: Graph, width: int, budget_ms: float) -> dict:
    torch.manual_seed(width)
    x = torch.rand(graph.num_cols, width, device=graph.device)
    row = dict(graph=name, nodes=graph.num_rows, edges=graph.nnz, width=width)
    part, rows, _ = sample(graph)
    want = reference.spmm(part, x.double(), None, "copy_lhs", "sum")

    size, workers, warps = automatic(graph, width)
    structure = (graph.indptr.int(), graph.indices.int(), torch.ones(graph.num_rows, device=graph.device))
    parts = parts_of(graph, size)

    def theirs():
        return authors.SAG(x, *structure, *parts, size, workers, warps)

    row |= dict(authors=f"{size}/{workers}/{warps}", authors_error=error_of(theirs()[rows], want, 1e-4))
    row["authors_ms"] = time_ms(theirs, budget_ms)[0]

    gnnaccel.prepare(graph, transposed=False)
    arrangement = schedule.of(graph).plan(graph, 4 * width, sums=False).arrangement
    work = schedule.of(graph).arranged(graph, rules.groups_of(graph, lanes_of(4 * width), arrangement))
    given = arrays_of(graph, False, listed=False).ordered(work)

    def ours():
        return spmm_op(given, x, None, "copy_lhs", "sum", 0.0)

    row |= dict(groups="/".join(map(str, Setting.of(work.plan))), rel_error=error_of(ours()[rows], want))
    row["groups_ms"] = time_ms(ours, budget_ms)[0]
    row["auto_ms"] = time_ms(lambda: ops.spmm(graph, x), budget_ms)[0]
    return row | {f"authors_vs_{k}": row["authors_ms"] / row[f"{k}_ms"] for k in ("groups", "auto")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder of the authors' GNNAdvisor_kernel.cu")
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py, or .npz files")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--budget-ms", type=float, default=40.0, help="device time of a figure")
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    options = parser.parse_args()
    authors = compiled(options.source)
    head = provenance(options.commit, clocks_under_load())
    print(*head, sep="\n")
    rows, cells = [], []
    for name in options.graphs:
        given = load(name)
        for width in options.widths:
            graph = Graph(given.indptr, given.indices, given.edge_ids, given.num_cols)
            rows.append(measure(authors, Path(name).stem, graph, width, options.budget_ms))
            cells.append(shown(COLUMNS, rows[-1]))
    for kind in GEOMEANS:
        ratios = [row[kind] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        head.append(f"# {kind}: geometric mean {mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} cells")
        print(head[-1])
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
