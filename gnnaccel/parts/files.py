"""Parts of a graph on disk: a folder with a manifest, and one folder per part.

    manifest.json      version, sizes, statistics, and of each file its bytes and SHA-256
    part-0000/graph.npz    own, halo: global numbers of the part's nodes and of those whose rows it reads;
                           indptr, indices: its nodes' in-edges, sources numbered own first, then halo;
                           edge_ids: global; send, send_counts, recv_counts: rows that go to and come from each part
    part-0000/nodes.npz    x, y, masks, ...: rows of own
    part-0000/edges.npz    edge_weight, edge_attr, ...: rows in the order of indices

NumPy archives, not compressed: NumPy is here anyway, and a reader needs nothing of ours to open them. A part is written
before the next is cut; a rank reads its own folder alone. The manifest is written last: a folder without one is none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gnnaccel import __version__
from gnnaccel.graph import files, store
from gnnaccel.lower import bounds

FORMAT = 1
MANIFEST = "manifest.json"
GRAPH, NODES, EDGES = "graph.npz", "nodes.npz", "edges.npz"
ARRAYS = ("own", "halo", "indptr", "indices", "edge_ids", "send", "send_counts", "recv_counts")
_BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a partition is like. Lists have an entry per part.

    nodes, edges, halo : rows owned, in-edges of these, and rows that come from other parts for each exchange.
    cut : edges whose source is in another part.
    """

    method: str
    parts: int
    num_nodes: int
    num_edges: int
    nodes: list[int]
    edges: list[int]
    halo: list[int]
    cut: int

    @property
    def edge_balance(self) -> float:
        """Edges of the largest part over the mean; 1 is perfect."""
        return _balance(self.edges)

    @property
    def node_balance(self) -> float:
        """Nodes of the largest part over the mean."""
        return _balance(self.nodes)

    @property
    def halo_rows(self) -> int:
        """Rows that an exchange sends, over all parts."""
        return sum(self.halo)

    def __str__(self) -> str:
        share = self.cut / max(self.num_edges, 1)
        copied = self.halo_rows / max(self.num_nodes, 1)
        return (
            f"{self.parts} parts of {self.num_nodes:,} nodes and {self.num_edges:,} edges by {self.method}: "
            f"{self.cut:,} edges cut ({share:.1%}), {self.halo_rows:,} halo rows ({copied:.2f} per node), largest part "
            f"{self.edge_balance:.3f} x the mean in edges, {self.node_balance:.3f} x in nodes"
        )


def _balance(counts: list[int]) -> float:
    return max(counts) * len(counts) / max(sum(counts), 1)


def part_folder(folder: Path, rank: int) -> Path:
    """Where a part's files are."""
    return folder / f"part-{rank:04d}"


def write_part(folder: Path, rank: int, tables: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, Any]]:
    """Write the archives of one part; what the manifest says of them.

    Raises
    ------
    OSError
        Where that cannot be done.
    """
    where, about = part_folder(folder, rank), {}
    where.mkdir(parents=True, exist_ok=True)
    for name, arrays in tables.items():
        with open(where / name, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        about[name] = {"bytes": (where / name).stat().st_size, "sha256": _digest(where / name)}
    return about


def write_manifest(folder: Path, statistics: Statistics, contents: list[dict], extra: Mapping[str, Any]) -> None:
    """Write what makes the folder one of a partition."""
    about = {
        "format": FORMAT,
        "gnnaccel": __version__,
        "statistics": dataclasses.asdict(statistics),
        "files": contents,
        **extra,
    }
    store.write(folder / MANIFEST, json.dumps(about, indent=1).encode())


def read_manifest(folder: str | os.PathLike) -> tuple[dict[str, Any], Statistics, str]:
    """The manifest, its statistics, and its digest.

    Raises
    ------
    ValueError
        If there is none, or it is of another format; says what to do.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"distributed.load: {os.fspath(folder)}: no {MANIFEST}: expected a folder that gnnaccel partition has "
            "written to its end"
        )
    with files.reading("distributed.load", path):
        content = files.content(path, bounds.MANIFEST_BYTES)
        about = json.loads(content)
        if about.get("format") != FORMAT:
            raise ValueError(
                f"a partition of format {about.get('format')}, by gnnaccel {about.get('gnnaccel')}; this is gnnaccel "
                f"{__version__}, which reads format {FORMAT}: partition the graph again"
            )
        statistics = Statistics(**about["statistics"])
        if len(about["files"]) != statistics.parts:
            raise ValueError(f"files of {len(about['files'])} parts, expected {statistics.parts}")
        for name, said in (item for part in about["files"] for item in part.items()):
            if name not in (GRAPH, NODES, EDGES) or not said.keys() >= {"bytes", "sha256"}:
                raise ValueError(f"expected {GRAPH}, {NODES} and {EDGES} with bytes and sha256, got {name}")
    return about, statistics, hashlib.sha256(content).hexdigest()


def read_part(folder: Path, rank: int, about: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of one part by archive, each file against its checksum.

    Raises
    ------
    ValueError
        For a file that is missing or not what the manifest says, with its path.
    """
    tables = {}
    for name, said in about["files"][rank].items():
        path = part_folder(folder, rank) / name
        if not path.is_file():
            raise ValueError(f"distributed.load: {path}: missing; copy it here, or partition the graph again")
        with files.reading("distributed.load", path):
            if path.stat().st_size != said["bytes"] or _digest(path) != said["sha256"]:
                raise ValueError("damaged, or of another partition: its checksum is not that of the manifest")
            tables[name] = files.arrays(path)
    with files.reading("distributed.load", part_folder(folder, rank) / GRAPH):
        _check(tables.get(GRAPH, {}), len(about["files"]))
    return tables


def _check(graph: Mapping[str, np.ndarray], parts: int) -> None:
    missing = [name for name in ARRAYS if name not in graph]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    own, halo = len(graph["own"]), len(graph["halo"])
    fits = len(graph["indptr"]) == own + 1 and len(graph["indices"]) == len(graph["edge_ids"])
    fits = fits and len(graph["send_counts"]) == len(graph["recv_counts"]) == parts
    fits = fits and graph["recv_counts"].sum() == halo and graph["send_counts"].sum() == len(graph["send"])
    sent = graph["send"]
    if not fits or (sent.size and not 0 <= sent.min() <= sent.max() < own):
        raise ValueError("its arrays do not fit each other")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
