"""Programs of messages on CUDA, forward and backward, beside an SpMM and the path that stores messages.

    python benchmarks/cuda_messages.py --csv out.csv
    python benchmarks/cuda_messages.py --graphs arxiv-like --messages gated --shapes 64

Results and gradients are checked first, against the definition in float64. Times are medians of single calls in device
time, in milliseconds; what is compiled is compiled before. rows: operands whose rows each edge gathers, forward.
spmm_ms: a sum of as many features as one of them; vs_spmm: the forward over `rows` times that. stored: the message
made of gathered rows by torch's functions, and our sum of it; blank where it is too much memory.
"""

from __future__ import annotations

import argparse
import itertools

import graphs
import torch
from timing import peer_ms, provenance, relative_error, save_table, shown, time_ms

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import messages as m
from gnnaccel.ops import reference
from gnnaccel.program.program import program_of

GRAPHS = ("arxiv-like", "amazon0505-like:sorted", "artist-like", "proteins-like")
SHAPES = ("64", "41", "128")
q, k, x, w = m.u("q"), m.v("k"), m.u("x"), m.e("w")
MESSAGES = {
    "gated": (m.sigmoid(q + k) * x, "sum"),
    "relu": (m.relu(x + k), "sum"),
    "edge features": (m.relu(x + w), "sum"),
    "edge weight": (m.relu(x - k) * m.e("w:1"), "mean"),
    "distance": (m.exp(-m.sum(m.square(x - k), -1, True)) * q, "sum"),
    "max": (m.leaky_relu(x + k, 0.2), "max"),
}
COLUMNS = ("graph", "nodes", "edges", "message", "reduce", "width", "rows", "forward_ms", "both_ms", "spmm_ms",
           "vs_spmm", "stored_forward_ms", "stored_both_ms", "vs_stored", "rel_error")  # fmt: skip
STORED_LIMIT_BYTES = 8e9  # of one tensor with a row for each edge


def measure(graph: Graph, name: str, width: int, stored: bool) -> dict:
    message, reduce = MESSAGES[name]
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
    shapes = tuple((leaf, (1,) if leaf[1].endswith(":1") else (width,)) for leaf in message.leaves)
    operands = {
        leaf: (torch.randn(rows[leaf[0]], *shape, device=graph.device) * width**-0.5).requires_grad_()
        for leaf, shape in shapes
    }
    named = {leaf[1]: value for leaf, value in operands.items()}
    plain = {key: value.detach() for key, value in named.items()}
    grad = torch.randn(graph.num_rows, width, device=graph.device)
    program, leaves = program_of(((message, reduce),), shapes)

    def ours(given):
        return ops.message_reduce(graph, message, given, reduce)

    def storing(given):
        return reference.message_reduce(graph, program, [given[leaf[1]] for leaf in leaves])[0]

    def both(function, given):
        return torch.autograd.grad(function(given), list(given.values()), grad)

    large = graph.nnz * width * 4 > STORED_LIMIT_BYTES
    error = None
    if not large:
        exact = {key: value.detach().double().requires_grad_() for key, value in named.items()}
        want = (storing(exact).detach(), *torch.autograd.grad(storing(exact), list(exact.values()), grad.double()))
        got = (ours(plain), *both(ours, named))
        error = max(relative_error(a, b) for a, b in zip(got, want, strict=True))
        if not error < 1e-4 and reduce != "max":  # float32 and float64 may disagree on who is the greatest
            raise SystemExit(f"{name} {width}: wrong result: relative error {error}")
        del want, got, exact
    flat, weight = torch.randn(graph.num_cols, width, device=graph.device), torch.rand(graph.nnz, device=graph.device)
    gathers = sum(kind == "u" or (kind == "e" and not key.endswith(":1")) for kind, key in message.leaves)
    row = {
        "reduce": reduce,
        "rows": gathers,
        "forward_ms": time_ms(lambda: ours(plain))[0],
        "both_ms": time_ms(lambda: both(ours, named))[0],
        "spmm_ms": time_ms(lambda: ops.spmm(graph, flat, weight))[0],
        "rel_error": None if error is None else f"{error:.2g}",
    }
    row["vs_spmm"] = row["forward_ms"] / (gathers * row["spmm_ms"])
    if stored and not large:
        row["stored_forward_ms"] = peer_ms(lambda: storing(plain))
        row["stored_both_ms"] = peer_ms(lambda: both(storing, named))
        if row["stored_both_ms"]:
            row["vs_stored"] = row["stored_both_ms"] / row["both_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), help="names of benchmarks/graphs.py")
    parser.add_argument("--messages", nargs="+", default=list(MESSAGES), choices=MESSAGES)
    parser.add_argument("--shapes", nargs="+", type=int, default=list(map(int, SHAPES)), help="features")
    parser.add_argument("--no-peers", action="store_true", help="without the path that stores messages")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(args.commit, "medians of single calls in ms, prepared graphs, float32")
    print("\n".join(head))
    lines = []
    for name in args.graphs:
        made = graphs.generate(name)
        graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
        gnnaccel.prepare(graph, reorder=False)
        for message, width in itertools.product(args.messages, args.shapes):
            row = measure(graph, message, width, not args.no_peers)
            row |= {"graph": name, "nodes": graph.num_rows, "edges": graph.nnz, "message": message, "width": width}
            lines.append(shown(COLUMNS, row))
            torch.cuda.empty_cache()
    if args.csv:
        save_table(args.csv, head, COLUMNS, lines)


if __name__ == "__main__":
    main()
