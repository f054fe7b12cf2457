"""`gnnaccel inspect`: what a graph is like for the kernels, and what they would do with it, and why."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gnnaccel import data
from gnnaccel.cli.output import console, number
from gnnaccel.graph.build import rows_of
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.network import inverse
from gnnaccel.graph.reorder import hit_rates
from gnnaccel.lower import bounds
from gnnaccel.planning.advice import Advice, advise
from gnnaccel.planning.properties import Properties, properties


def show(dataset: str, as_json: bool, png: Path | None) -> int:
    """Print the properties of the graph called `dataset`. Exit code 2 for a graph or a chart that cannot be meant, 1
    for a file that cannot be read; with the reason."""
    if png is not None and (png.suffix != ".png" or not png.parent.is_dir()):
        print(f"gnnaccel inspect: --png: expected a file in a folder that is there, with a name that ends in .png, got "
              f"{str(png)!r}", file=sys.stderr)  # fmt: skip
        return 2
    try:
        named = Path(dataset).suffix in ("", ".npz")  # else a file of another kind
        graph = Graph.load(data.find(dataset) if named else dataset)
    except (ValueError, OSError, ImportError) as error:
        print(f"gnnaccel inspect: {error}", file=sys.stderr)
        return 2 if isinstance(error, (data.UnknownDataset, FileNotFoundError)) else 1
    known = properties(graph)
    with Console(stderr=True).status("looking for communities"):
        advice = advise(graph)
    if as_json:
        said = {f.name: getattr(advice, f.name) for f in dataclasses.fields(advice) if f.name != "order"}
        said["communities"] = dataclasses.asdict(advice.communities)
        said["advised"] = [dataclasses.asdict(a) for a in advice.advised]
        print(json.dumps({"dataset": dataset, **dataclasses.asdict(known), "advice": said}, indent=2))
    else:
        _print(dataset, known, advice)
    if png is not None:
        _draw(png, graph, dataset, known, advice)
        print(f"chart in {png}", file=sys.stderr)
    return 0


def _print(name: str, known: Properties, advice: Advice) -> None:
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
        cells = (
            count.plain,
            count.translated,
            f"{count.saved:.1%}",
            f"{count.density:.3f}",
            f"{count.column_reuse:.2f}",
        )
        blocks.add_row(f"{count.height} x {count.width}", *map(str, cells))
    out.print(blocks)
    out.print(_tiles(known), soft_wrap=True)
    out.print(str(advice), soft_wrap=True)


def _tiles(known: Properties) -> str:
    count = known.tiles[0]
    reuse = f"tensor cores: a column of {count.height} rows serves {count.column_reuse:.2f} edges"
    if not count.is_profitable:
        return f"{reuse}, and about {bounds.TILES_REUSE:g} are needed for tiles to pay (docs/tensor-cores.md)"
    if known.edges < bounds.TILES_EDGES:
        return f"{reuse}, but below {bounds.TILES_EDGES:,} edges tiles do not pay (docs/tensor-cores.md)"
    return f"{reuse}; on CUDA sums and inner products of enough features go by tiles (docs/tensor-cores.md)"


def _draw(path: Path, graph: Graph, name: str, known: Properties, advice: Advice) -> None:
    """In-degrees; edges as a density, as they lie and in communities; blocks; reuse of windows. As PNG."""
    from matplotlib.figure import Figure as Canvas  # no pyplot: no window system is asked for

    canvas = Canvas(figsize=(13, 8), layout="constrained")
    axes: Any = canvas.subplots(2, 3)
    (degrees, matrix, ordered), (tiles, windows, empty) = axes
    empty.set_axis_off()
    counts = torch.bincount(graph.indptr.diff().long())
    present = counts.nonzero().flatten()
    degrees.scatter(present + 1, counts[present], s=8)  # + 1: no edges, on a logarithmic axis
    scale = "log" if graph.num_rows else "linear"
    degrees.set(xscale=scale, yscale=scale, xlabel="in-edges + 1", ylabel="nodes", title="degrees")
    rows, cols = rows_of(graph.indptr), graph.indices.long()
    _draw_edges(matrix, graph, rows, cols, "edges")
    place = inverse(advice.order)
    _draw_edges(
        ordered, graph, place[rows], place[cols] if graph.num_rows == graph.num_cols else cols, "in communities"
    )
    places = range(len(known.tiles))
    tiles.bar([p - 0.2 for p in places], [t.plain for t in known.tiles], width=0.4, label="as they lie")
    tiles.bar([p + 0.2 for p in places], [t.translated for t in known.tiles], width=0.4, label="translated")
    tiles.set(ylabel="blocks with an edge", title="blocks", xticks=list(places))
    tiles.set_xticklabels([f"{t.height} x {t.width}" for t in known.tiles])
    tiles.set_ylim(0, 1.25 * max([t.plain for t in known.tiles] + [1]))  # room for the legend
    tiles.legend(ncols=2)
    given, found = hit_rates(graph), hit_rates(graph, advice.order)
    windows.hist([given.numpy(), found.numpy()], bins=20, range=(0, 1), label=["as they lie", "in communities"])
    windows.set(xlabel="reads of sources read before", ylabel="windows of 8192 edges", title="reuse")
    windows.legend()
    canvas.suptitle(f"{name}: {known.nodes:,} nodes, {known.edges:,} edges")
    canvas.savefig(path, dpi=120)


def _draw_edges(axes: Any, graph: Graph, rows: Tensor, cols: Tensor, title: str) -> None:
    from matplotlib.colors import LogNorm

    bins = min(256, max(graph.num_rows, 1))
    extent = [(0, max(n, 1)) for n in (graph.num_cols, graph.num_rows)]
    axes.hist2d(cols.numpy(), rows.numpy(), bins=bins, range=extent, norm=LogNorm(vmin=0.5) if graph.nnz else None)
    axes.set(xlabel="source", ylabel="destination", title=title)
    axes.invert_yaxis()
    axes.xaxis.get_major_locator().set_params(nbins=5, integer=True)
