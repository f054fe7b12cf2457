"""`gnnaccel inspect`: what a graph is like for the kernels: degrees, shared neighbours, tiles for tensor cores."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from gnnaccel import data
from gnnaccel.cli.output import console, number
from gnnaccel.graph.build import rows_of
from gnnaccel.graph.gate import PAYS_EDGES, PAYS_FROM
from gnnaccel.graph.properties import Properties, properties
from gnnaccel.graph.structure import Graph


def show(dataset: str, as_json: bool, png: Path | None) -> int:
    """Print the properties of the graph called `dataset`; exit code 1 if there is none, with the reason."""
    try:
        named = Path(dataset).suffix in ("", ".npz")  # else a file of another kind
        graph = Graph.load(data.find(dataset) if named else dataset)
    except (ValueError, OSError, ImportError) as error:
        print(f"gnnaccel inspect: {error}", file=sys.stderr)
        return 1
    known = properties(graph)
    if as_json:
        print(json.dumps({"dataset": dataset, **dataclasses.asdict(known)}, indent=2))
    else:
        _print(dataset, known)
    if png is not None:
        _draw(png, graph, dataset, known)
        print(f"chart in {png}", file=sys.stderr)
    return 0


def _print(name: str, known: Properties) -> None:
    out = console()
    frame = box.ROUNDED if sys.stdout.isatty() else box.ASCII
    table = Table(title=f"{name}: destinations as rows, sources as columns", title_justify="left", box=frame)
    table.add_column("")
    table.add_column("", justify="right")
    for label, value in (
        ("nodes", known.nodes),
        ("edges", known.edges),
        ("of these repeated", known.repeated_edges),
        ("in-edges of a node: mean", known.degree_mean),
        ("most", known.degree_max),
        ("standard deviation", known.degree_deviation),
        ("nodes without in-edges", known.empty_rows),
        ("neighbour similarity of consecutive rows", known.similarity),
    ):
        table.add_row(label, number(value))
    out.print(table)
    blocks = Table(title="blocks with an edge in them", title_justify="left", box=frame)
    for column in ("rows x columns", "as they lie", "translated", "fewer by", "density", "edges per column"):
        blocks.add_column(column, justify="right")
    for count in known.tiles:
        cells = (count.plain, count.translated, f"{count.saved:.1%}", f"{count.density:.3f}", f"{count.reuse:.2f}")
        blocks.add_row(f"{count.height} x {count.width}", *map(str, cells))
    out.print(blocks)
    out.print(_advice(known), soft_wrap=True)


def _advice(known: Properties) -> str:
    count = known.tiles[0]
    reuse = f"tensor cores: a column of {count.height} rows serves {count.reuse:.2f} edges"
    if not count.pays:
        return f"{reuse}, and about {PAYS_FROM:g} are needed for tiles to pay (docs/tensor-cores.md)"
    if known.edges < PAYS_EDGES:
        return f"{reuse}, but below {PAYS_EDGES:,} edges tiles do not pay (docs/tensor-cores.md)"
    return f"{reuse}; on CUDA sums and inner products of enough features go by tiles (docs/tensor-cores.md)"


def _draw(path: Path, graph: Graph, name: str, known: Properties) -> None:
    """In-degrees, the adjacency matrix as a density, and the blocks of both kinds, as PNG."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure as Canvas  # no pyplot: no window system is asked for

    canvas = Canvas(figsize=(13, 4), layout="constrained")
    axes: Any = canvas.subplots(1, 3)
    degrees, matrix, tiles = axes
    counts = torch.bincount(graph.indptr.diff().long())
    present = counts.nonzero().flatten()
    degrees.scatter(present + 1, counts[present], s=8)  # + 1: no edges, on a logarithmic axis
    degrees.set(xscale="log", yscale="log", xlabel="in-edges + 1", ylabel="nodes", title="degrees")
    rows = rows_of(graph.indptr)
    bins = min(256, max(graph.num_rows, 1))
    extent = (0, max(graph.num_rows, 1))
    norm = LogNorm() if graph.nnz else None
    matrix.hist2d(graph.indices.numpy(), rows.numpy(), bins=bins, range=(extent, extent), norm=norm)
    matrix.set(xlabel="source", ylabel="destination", title="edges")
    matrix.invert_yaxis()
    matrix.xaxis.get_major_locator().set_params(nbins=5, integer=True)
    places = range(len(known.tiles))
    tiles.bar([p - 0.2 for p in places], [t.plain for t in known.tiles], width=0.4, label="as they lie")
    tiles.bar([p + 0.2 for p in places], [t.translated for t in known.tiles], width=0.4, label="translated")
    tiles.set(ylabel="blocks with an edge", title="blocks", xticks=list(places))
    tiles.set_xticklabels([f"{t.height} x {t.width}" for t in known.tiles])
    tiles.set_ylim(0, 1.25 * max([t.plain for t in known.tiles] + [1]))  # room for the legend
    tiles.legend(ncols=2)
    canvas.suptitle(f"{name}: {known.nodes:,} nodes, {known.edges:,} edges")
    canvas.savefig(path, dpi=120)
