"""Partitions by gnnaccel's communities, by METIS (where pymetis is installed) and by ranges: cut, halo, balance, time.

    python benchmarks/partitions.py --files cora.npz tolokers.npz --graphs products-like --scale 0.1 --csv FILE

halo_rows is what an exchange sends, of_metis that by METIS's of the same graph. time_s: processor time of the process.
memory_of_graph: the most that the process grows by meanwhile, and the graph's arrays, over these. One process, all of
torch's threads.
"""

import argparse
import importlib.util
import time
from pathlib import Path

import torch
from graphs import generate
from timing import provenance, save_table, shown

import gnnaccel
from gnnaccel.parts.assign import assign

COLUMNS = (
    *("graph", "nodes", "edges", "parts", "method", "cut_edges", "halo_rows", "of_metis"),
    *("edge_balance", "node_balance", "time_s", "memory_of_graph"),
)


def memory(name):
    """Bytes, as Linux counts them."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


def measure(name, graph, parts, method):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here
    before, start = memory("VmRSS"), time.process_time()
    label = assign(graph, parts, method)
    took, grown = time.process_time() - start, memory("VmHWM") - before
    arrays = graph.indptr.nbytes + graph.indices.nbytes
    rows = torch.repeat_interleave(torch.arange(graph.num_rows), graph.indptr.diff().long())
    cols = graph.indices.long()
    to = label[rows]
    across = label[cols] != to
    edges, nodes = (torch.bincount(x, minlength=parts).double() for x in (to, label))
    return {
        "graph": name,
        "nodes": graph.num_rows,
        "edges": graph.nnz,
        "parts": parts,
        "method": method,
        "cut_edges": int(across.sum()),
        "halo_rows": torch.unique(cols[across] * parts + to[across]).numel(),
        "edge_balance": float(edges.max() / edges.mean()),
        "node_balance": float(nodes.max() / nodes.mean()),
        "time_s": took,
        "memory_of_graph": 1 + grown / arrays,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="*", default=[], help="graphs that Graph.load reads")
    parser.add_argument("--graphs", nargs="*", default=[], help="stand-ins of benchmarks/graphs.py")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args()
    methods = ["metis"] * (importlib.util.find_spec("pymetis") is not None) + ["communities", "range"]
    rows = []
    for source in (*args.files, *args.graphs):
        if source in args.files:
            name, graph = Path(source).stem, gnnaccel.Graph.load(source)
        else:
            made = generate(source, "cpu", args.scale)
            name = source if args.scale == 1 else f"{source} x {args.scale}"
            graph = gnnaccel.Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"])
        for parts in args.parts:
            metis = None
            for method in methods:
                row = measure(name, graph, parts, method)
                metis = row["halo_rows"] if method == "metis" else metis
                row["of_metis"] = row["halo_rows"] / metis if metis else None
                rows.append(shown(COLUMNS, row))
    if args.csv:
        save_table(args.csv, provenance(args.commit, f"{torch.get_num_threads()} CPU threads"), COLUMNS, rows)


if __name__ == "__main__":
    main()
