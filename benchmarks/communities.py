"""How long an order of the rows takes to find, and what it is worth, beside igraph's Louvain.

    python benchmarks/communities.py --device cpu --threads 1 2 --csv out.csv
    python benchmarks/communities.py --graphs amazon0505-like --igraph          # needs `pip install igraph`

- order_s: `gnnaccel.graph.reorder.row_order`, wall time, median of the calls: all that `prepare(reorder=)` does to find
  an order, the last check that it gains included.
- peak_mib: memory at most during a call beyond what was in use before it: of the process on the CPU (Linux), of torch
  on CUDA.
- reads_given, reads_order: distinct sources that windows of 8192 edges read, for each edge (1 - `reorder.hit_rate`).
- igraph_s: `community_multilevel` alone, on one thread, on a graph that is built already; reads_igraph: with the rows
  sorted by that of its levels that reads least.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import graphs
import torch
from timing import left_out, provenance, save_table, shown

from gnnaccel.graph import reorder
from gnnaccel.graph.csr import Graph

GRAPHS = ("pubmed-like", "arxiv-like", "amazon0505-like", "products-like")
COLUMNS = ("graph", "nodes", "edges", "device", "threads", "order_s", "peak_mib", "reads_given", "reads_order",
           "igraph_s", "reads_igraph")  # fmt: skip


def memory_kib(field: str) -> int:
    """Of this process, as Linux says: VmRSS now, VmHWM at most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def timed(graph: Graph) -> tuple[float, float, torch.Tensor | None]:
    """Seconds, MiB and the order of one call."""
    on_gpu = graph.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what a call takes
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_kib("VmRSS")
    start = time.perf_counter()
    order = reorder.row_order(graph)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else (memory_kib("VmHWM") - before) / 2**10
    return seconds, peak, order


def of_igraph(graph: Graph) -> dict[str, float]:
    try:
        import igraph
    except ImportError as error:
        left_out(error)
        return {}
    rows = torch.repeat_interleave(torch.arange(graph.num_rows), graph.indptr.diff().long().cpu())
    cols = graph.indices.long().cpu()
    once = rows < cols  # the graphs of graphs.py are symmetric
    peer = igraph.Graph(n=graph.num_rows, edges=torch.stack([rows[once], cols[once]], 1).numpy())
    start = time.perf_counter()
    levels = peer.community_multilevel(return_levels=True)
    seconds = time.perf_counter() - start
    orders = [torch.tensor(level.membership, device=graph.device).argsort(stable=True) for level in levels]
    return {"igraph_s": seconds, "reads_igraph": min(1 - reorder.hit_rate(graph, order) for order in orders)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--igraph", action="store_true", help="time it too; minutes on products-like")
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    options = parser.parse_args()
    head = provenance(options.commit)
    print(*head, sep="\n")
    cells = []
    for name in options.graphs:
        made = graphs.generate(name, device="cuda" if torch.cuda.is_available() else "cpu")
        graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
        graph = graph.to(options.device)
        del made
        rows = []
        for threads in options.threads:
            torch.set_num_threads(threads)
            calls = [timed(graph) for _ in range(options.calls + 1)][1:]
            order = calls[0][2]
            row = dict(graph=name, nodes=graph.num_rows, edges=graph.nnz, device=options.device, threads=threads)
            row |= {"order_s": statistics.median(call[0] for call in calls), "peak_mib": max(call[1] for call in calls)}
            row["reads_given"] = 1 - reorder.hit_rate(graph)
            row["reads_order"] = None if order is None else 1 - reorder.hit_rate(graph, order)
            rows.append(row)
        peer = of_igraph(graph) if options.igraph else {}
        cells += [shown(COLUMNS, row | peer) for row in rows]
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
