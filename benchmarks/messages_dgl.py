"""User-written message and reduce functions of DGL on the CPU, DGL alone and on gnnaccel: forward + backward.

    python benchmarks/messages_dgl.py --csv out.csv
    python benchmarks/messages_dgl.py --scale 0.001 --repeat 200    # what a call costs: 100 nodes, 2,000 edges

As cpu_layers.py, whose graph, check, turns and columns it uses: the two sides take turns in one process, and each row
is checked first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from cpu_layers import TOLERANCE, load, markdown, measure, save, versions
from cpu_rows import Case, Row, Side, dgl_graph, dgl_sides, step_of


def _gate(edges):
    return {"m": torch.relu(edges.src["h"] + edges.dst["h"]) * edges.data["w"]}


def _score(edges):
    return {"w": torch.relu(edges.src["h"] + edges.dst["h"]).sum(-1, keepdim=True)}


def _scored(edges):
    return {"m": edges.src["h"], "e": (edges.src["h"] * edges.dst["h"]).sum(-1, keepdim=True)}


def _attend(nodes):
    alpha = torch.softmax(nodes.mailbox["e"], dim=1)
    return {"o": (alpha * nodes.mailbox["m"]).sum(1)}


def _mailbox_sum(nodes):
    return {"o": nodes.mailbox["m"].sum(1)}


def _update(message, reduce, weighted: bool = True) -> Callable[[Case], tuple[Side, Side]]:
    """update_all of a message and a reduce function, each of which takes dgl.function and returns it.

    weighted : the message function reads an edge weight.
    """

    def build(case: Case):
        dgl, graph = dgl_graph(case)
        inputs = [case.x, *([case.features(case.edge_index.shape[1], 1)] if weighted else [])]

        def forward():
            graph.ndata["h"] = inputs[0]
            if weighted:
                graph.edata["w"] = inputs[1]
            graph.update_all(message(dgl.function), reduce(dgl.function))
            return graph.ndata.pop("o")

        return dgl_sides(step_of(forward, inputs, case.grad_out))

    return build


def _scores(case: Case):
    """apply_edges of a message function, whose results then weigh a sum."""
    dgl, graph = dgl_graph(case)
    inputs = [case.x]

    def forward():
        graph.ndata["h"] = inputs[0]
        graph.apply_edges(_score)
        graph.update_all(dgl.function.u_mul_e("h", "w", "m"), dgl.function.sum("m", "o"))
        return graph.ndata.pop("o")

    return dgl_sides(step_of(forward, inputs, case.grad_out))


def _layer(name: str, *arguments, edges: bool = False, **options) -> Callable[[Case], tuple[Side, Side]]:
    def build(case: Case):
        dgl, graph = dgl_graph(case)
        torch.manual_seed(3)
        layer = getattr(dgl.nn, name)(*arguments, **options)
        inputs = [case.x] + ([case.features(case.edge_index.shape[1], case.width)] if edges else [])
        return dgl_sides(step_of(lambda: layer(graph, *inputs), inputs, case.grad_out))

    return build


def rows(width: int) -> list[Row]:
    def gate(fn):
        return _gate

    def copies(fn):
        return fn.copy_u("h", "m")

    def mailbox(fn):
        return _mailbox_sum

    pna = _layer("PNAConv", width, width, ["mean", "max", "std"], ["identity", "amplification"], 2.5)
    return [
        Row("DGL", "relu(src + dst) * w, sum", 10, _update(gate, lambda fn: fn.sum("m", "o"))),
        Row("DGL", "relu(src + dst) * w, mean", None, _update(gate, lambda fn: fn.mean("m", "o"))),
        Row("DGL", "relu(src + dst) * w, mailbox.sum(1)", None, _update(gate, mailbox)),
        Row("DGL", "copy_u, mailbox.sum(1)", None, _update(copies, mailbox, weighted=False)),
        Row("DGL", "softmax in the mailbox", None, _update(lambda fn: _scored, lambda fn: _attend, weighted=False)),
        Row("DGL", "apply_edges of a score", None, _scores),
        Row("DGL", "GINEConv", None, _layer("GINEConv", torch.nn.Linear(width, width), edges=True)),
        Row("DGL", "PNAConv, mean max std", None, pna),
    ]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only rows with one of these in the name")
    parser.add_argument("--repeat", type=int, default=5, help="timed runs of each side (default 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    case, results = load("power-law", options.scale, options.width), []
    for row in rows(options.width):
        if not options.rows or any(text.lower() in row.name.lower() for text in options.rows):
            print(f"{row.name} ...", file=sys.stderr)
            results.append(measure(row, case, options.repeat))
    print(f"{versions()}\n\n{markdown(results)}")
    if options.csv:
        save(options.csv, results)
    return 0 if all(r["error"] <= TOLERANCE for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
