"""`gnnaccel partition`: a graph cut into parts on disk, and what they are like."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from gnnaccel import data, distributed
from gnnaccel.cli.output import console
from gnnaccel.data import generated
from gnnaccel.graph import files, load
from gnnaccel.graph.csr import Graph
from gnnaccel.parts.files import Statistics

ENDS = {*(name for names in load.ENDS for name in names), "num_nodes", "format", "data"}  # of a graph


def run(name: str, parts: int, out: Path, method: str, as_json: bool) -> int:
    """Partition the graph called `name`. Exit code 2 for a graph that is not there, 1 if it cannot be done; with the
    reason."""
    try:
        graph, nodes, edges = read(name)
        done = distributed.partition(graph, parts, out, method, nodes=nodes, edges=edges)
    except (ValueError, OSError, ImportError) as error:
        print(f"gnnaccel partition: {error}", file=sys.stderr)
        return 2 if isinstance(error, (data.UnknownDataset, FileNotFoundError)) else 1
    if as_json:
        ratios = {"edge_balance": done.edge_balance, "node_balance": done.node_balance, "halo_rows": done.halo_rows}
        print(json.dumps({"graph": name, **dataclasses.asdict(done), **ratios}, indent=2))
    else:
        _print(name, done, nodes, edges)
        print(f"parts in {out}: torchrun --nproc-per-node {parts} SCRIPT (docs/distributed.md)", file=sys.stderr)
    return 0


def read(name: str) -> tuple[Graph, dict[str, Any], dict[str, Any]]:
    """The graph, and what its file has beside it of nodes and of edges."""
    if name != generated.NAME and Path(name).suffix not in ("", ".npz"):
        return Graph.load(name), {}, {}
    if name != generated.NAME:
        path = data.find(name)
        if not files.array_names(path) >= {"y", "train_mask", "val_mask", "test_mask"}:
            graph = Graph.load(path)
            return graph, *_beside(path, graph)
    found = data.load(name)
    for note in found.notes:
        print(f"gnnaccel partition: {name}: {note}", file=sys.stderr)
    edges = torch.from_numpy(found.edge_index)
    graph = Graph.from_coo(edges[1], edges[0], num_rows=found.num_nodes, num_cols=found.num_nodes)
    return graph, {key: getattr(found, key) for key in ("x", "y", "train_mask", "val_mask", "test_mask")}, {}


def _beside(path: Path, graph: Graph) -> tuple[dict[str, Any], dict[str, Any]]:
    """Other arrays of a file by their lengths: a row per node, or per edge; by name where there are as many of both."""
    nodes: dict[str, Any] = {}
    edges: dict[str, Any] = {}
    left: list[str] = []
    names = files.array_names(path) - ENDS
    with files.reading("gnnaccel partition", path):
        for key, value in sorted(files.arrays(path, names).items()):
            rows = value.shape[0] if value.ndim else None
            if rows == graph.nnz and (rows != graph.num_rows or key.startswith("edge")):
                edges[key] = value
            elif rows == graph.num_rows:
                nodes[key] = value
            else:
                left.append(f"{key} {list(value.shape)}")
    if left:
        shown = f"{', '.join(left)}: no row for each of {graph.num_rows} nodes or {graph.nnz} edges"
        print(f"gnnaccel partition: left out: {shown}", file=sys.stderr)
    return nodes, edges


def _print(name: str, done: Statistics, nodes: dict[str, Any], edges: dict[str, Any]) -> None:
    frame = box.ROUNDED if sys.stdout.isatty() else box.ASCII
    table = Table(title=f"{name} by {done.method}", title_justify="left", box=frame)
    for column in ("part", "nodes", "in-edges", "halo rows"):
        table.add_column(column, justify="right")
    for part, cells in enumerate(zip(done.nodes, done.edges, done.halo, strict=True)):
        table.add_row(str(part), *map(str, cells))
    out = console()
    out.print(table)
    out.print(str(done), soft_wrap=True)
    without = "" if "x" in nodes else " (without x a part has no features: data.x is for the script to make)"
    out.print(f"data of nodes: {', '.join(nodes) or 'none'}{without}", soft_wrap=True)
    if edges:
        out.print(f"data of edges: {', '.join(edges)}", soft_wrap=True)
