"""The blocks of docs/performance.md on CPUs, and those of every layer (summary.py)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from summary_tables import cell, edges, epochs_cell, markdown, pair, read, source, unique


def cpu_layers() -> list[str]:
    name = "cpu_layers_epyc.csv"
    rows = read(name)[1]
    graphs = {row["graph"]: f"{row['graph']}, {edges(row)}" for row in sorted(rows, key=lambda row: int(row["edges"]))}
    wanted = [(row["framework"], row["row"]) for row in rows if row["row"][0].isupper() and "cached" not in row["row"]]
    body = [
        [f"{framework} {layer}"]
        + [cell(rows, "alone_ms", "gnnaccel_ms", graph=graph, framework=framework, row=layer) for graph in graphs]
        for framework, layer in dict.fromkeys(wanted)
    ]
    return markdown(["alone / gnnaccel, ms", *graphs.values()], body) + source(name)


def cpu_layers_avx512() -> list[str]:
    return _one_graph("cpu_layers_xeon.csv")


def cpu_small() -> list[str]:
    return _one_graph("cpu_layers_pubmed_epyc.csv")


def _one_graph(name: str) -> list[str]:
    """Every row of a table of one graph."""
    rows = [row for row in read(name)[1] if "cached" not in row["row"]]
    body = [
        [f"{row['framework']} {row['row']}", pair(float(row["alone_ms"]), float(row["gnnaccel_ms"]))] for row in rows
    ]
    return markdown(["alone / gnnaccel, ms", f"{rows[0]['graph']}, {edges(rows[0])}"], body) + source(name)


def every_layer(machine: str, sizes: Sequence[str] = ("tiny_", "small_", "")) -> list[str]:
    """How many layers gain and lose, by size of the graph, and which lose most."""
    names = [f"every_layer_{size}{machine}.csv" for size in sizes]
    tables = [read(name)[1] for name in names]
    graphs = [f"{int(rows[0]['nodes']):,} nodes, {int(rows[0]['edges']):,} edges" for rows in tables]
    body, lines = [], []
    for framework, label in (("dgl", "DGL"), ("pyg", "PyG")):
        cells = []
        for rows in tables:
            ratios = [float(row["ratio"]) for row in rows if row["framework"] == framework]
            slower = sum(ratio > 1.03 for ratio in ratios)
            cells += [f"{1 / statistics.geometric_mean(ratios):.2f}x; {slower} of {len(ratios)}"] if ratios else []
        body += [[label, *cells]] if cells else []
    body.append(["a layer alone to itself", *(_nine_in_ten([float(row["again"]) for row in rows]) for rows in tables)])
    for graph, rows in zip(graphs, tables, strict=True):
        worst = sorted(rows, key=lambda row: -float(row["ratio"]))[:8]
        named = (f"{row['framework']} {row['layer']} {1 / float(row['ratio']):.2f}x" for row in worst)
        lines += ["", f"Least on {graph}: {'; '.join(named)}."]
    sources = [line for name in names for line in source(name)]
    return [*markdown(["", *graphs], body), *lines, *sources]


def _nine_in_ten(ratios: Sequence[float]) -> str:
    low, high = np.quantile(ratios, (0.05, 0.95))
    return f"{1 / high:.2f}x to {1 / low:.2f}x in nine of ten"


def cpu_memory() -> list[str]:
    name = "cpu_layers_epyc.csv"
    rows = [row for row in read(name)[1] if row["alone_extra_mib"] and row["row"][0].isupper()]
    graphs = {row["graph"]: f"{row['graph']}, {edges(row)}" for row in sorted(rows, key=lambda row: int(row["edges"]))}
    layers = dict.fromkeys((row["framework"], row["row"]) for row in rows)
    body = [
        [f"{framework} {layer}"]
        + [
            cell(rows, "alone_extra_mib", "gnnaccel_extra_mib", graph=graph, framework=framework, row=layer)
            for graph in graphs
        ]
        for framework, layer in layers
    ]
    return markdown(["alone / gnnaccel, MiB", *graphs.values()], body) + source(name)


def cpu_models() -> list[str]:
    name = "epochs_medium_epyc.csv"
    rows = read(name)[1]
    body = []
    for graph, model in dict.fromkeys((row["graph"], row["model"]) for row in rows):
        of = {row["side"]: float(row["epoch_ms"]) for row in rows if (row["graph"], row["model"]) == (graph, model)}
        size = edges(next(row for row in rows if row["graph"] == graph))
        cells = (pair(of[alone], of[ours]) for alone, ours in (("pyg", "flag"), ("dgl", "dgl-flag")))
        body.append([f"{model.upper()}, {graph}, {size}", *cells])
    return markdown(["an epoch, alone / gnnaccel, ms", "PyG", "DGL"], body) + source(name, 2)


def cpu_compiled() -> list[str]:
    name = "epochs_compiled_epyc.csv"
    rows = read(name)[1]
    sides = {"pyg": "PyG", "compiled": "PyG compiled", "flag": "gnnaccel", "compiled-flag": "gnnaccel compiled"}
    body = [
        [model, *(epochs_cell(rows, side, "pyg", model=model) for side in sides)] for model in unique(rows, "model")
    ]
    return markdown(["epoch, ms", *sides.values()], body) + source(name)
