"""`gnnaccel partition --estimate`: what training on so many GPUs would take."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from gnnaccel import data, distributed
from gnnaccel.cli import partition
from gnnaccel.cli.output import console
from gnnaccel.parts import rates

_FEATS, _CLASSES = 128, 40  # where nothing says


def run(name: str, gpus: Sequence[int], feats: int, classes: int, as_json: bool, options: dict[str, Any]) -> int:
    """Print the estimate for the graph called `name`. Exit codes as of `partition.run`."""
    try:
        graph, nodes, _ = partition.read(name)
        if not feats:
            feats = nodes["x"].shape[1] if "x" in nodes and nodes["x"].ndim == 2 else _FEATS
        if not classes:
            labelled = "y" in nodes and nodes["y"].ndim == 1 and nodes["y"].dtype.kind in "iu" and len(nodes["y"])
            classes = max(1, int(nodes["y"].max()) + 1) if labelled else _CLASSES
        rows = distributed.estimate(graph, gpus, feats=feats, classes=classes, **options)
    except (ValueError, OSError, ImportError) as error:
        print(f"gnnaccel partition: {error}", file=sys.stderr)
        return 2 if isinstance(error, (data.UnknownDataset, FileNotFoundError)) else 1
    num_nodes, num_edges = options["stands_for"] or (graph.num_rows, graph.nnz)
    about = {"graph": name, "nodes": num_nodes, "edges": num_edges, "feats": feats, "classes": classes, **options}
    if as_json:
        print(json.dumps({**about, "estimates": [dataclasses.asdict(row) for row in rows]}, indent=2))
    else:
        _print(about, rows)
    return 0


def _print(about: dict[str, Any], rows: Sequence[distributed.Estimate]) -> None:
    title = (
        f"{about['graph']}: {about['nodes']:,} nodes, {about['edges']:,} edges; {about['model']}, {about['layers']} "
        f"layers, {about['feats']} to {about['hidden']} to {about['classes']}"
    )
    frame = box.ROUNDED if sys.stdout.isatty() else box.ASCII
    table = Table(title=title, title_justify="left", box=frame)
    for column in ("GPUs", "epoch ms", "compute", "exchange", "speedup", "halo rows", "MiB sent", "GiB a GPU", "fits"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{value:.4g}" for value in (row.epoch_ms, row.compute_ms, row.exchange_ms, row.speedup))
        table.add_row(
            str(row.gpus),
            *times,
            str(row.halo_rows),
            f"{row.mib_sent:.4g}",
            f"{row.memory_gib:.3g}",
            "yes" if row.fits else "no",
        )
    out = console()
    out.print(table)
    source = rates.H100.source if about["speed"] == "h100" else "measured here"
    out.print(
        f"at rates of {about['speed']} ({source}), {about['memory_gib']:g} GiB and {about['link_gbs']:g} GB/s a GPU; "
        "nothing overlaps, float32, Adam; how far off that is: docs/distributed.md",
        soft_wrap=True,
    )
    fitting = next((row.gpus for row in rows if row.fits), None)
    out.print("fits none of these" if fitting is None else f"fits from {fitting} GPUs on", soft_wrap=True)
