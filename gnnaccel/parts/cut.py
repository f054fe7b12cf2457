"""Cutting a graph and its data into the parts that `assign` has chosen, one part after the other, into a folder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.parts import files
from gnnaccel.parts.assign import assign


def cut(
    graph: Graph,
    nodes: Mapping[str, Any],
    edges: Mapping[str, Any],
    parts: int,
    method: str,
    out: str | os.PathLike,
) -> files.Statistics:
    """Partition a graph and write its parts.

    Parameters
    ----------
    graph : Graph
        Square. Its edge ids are the rows of `edges`.
    nodes, edges : mapping of str to Tensor or array
        Data with a row per node, per edge. Memory-mapped arrays are read a part at a time.
    parts, method
        As of `assign`.
    out : path
        A new or empty folder.

    Raises
    ------
    ValueError
        As `assign`; for a folder that has something else in it. OSError: where it cannot be written.
    """
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"partition: out: expected a new or empty folder, got {os.fspath(out)!r}, which is there")
    label = assign(graph, parts, method).cpu()
    on_cpu = Graph(graph.indptr.cpu(), graph.indices.cpu(), _to_cpu(graph.edge_ids), graph.num_cols)
    return _write(on_cpu, label, nodes, edges, parts, method, folder)


def _to_cpu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.cpu()


def _write(graph: Graph, label: Tensor, nodes, edges, parts: int, method: str, folder: Path) -> files.Statistics:
    order = label.argsort(stable=True)
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(label, minlength=parts).cumsum(0)]).tolist()
    own = [order[begins[p] : begins[p + 1]] for p in range(parts)]
    place = torch.empty_like(order)  # of each node among the own nodes of its part
    for nodes_of in own:
        place[nodes_of] = torch.arange(nodes_of.numel())
    halos = [_halo(graph, order, begins, p) for p in range(parts)]
    contents, num_edges, num_cut = [], [], 0
    dtype = torch.int32 if max(graph.nnz, graph.num_rows) <= bounds.INT32_MAX else torch.int64
    local = torch.empty_like(order)  # a node's number in the part that is being written
    for p, nodes_of in enumerate(own):
        halo, received = halos[p]
        local[nodes_of] = torch.arange(nodes_of.numel())
        local[halo] = torch.arange(nodes_of.numel(), nodes_of.numel() + halo.numel())
        at = _positions(graph, nodes_of)
        sources = local[graph.indices[at]]
        degree = graph.indptr.diff()[nodes_of].long()
        ids = at if graph.edge_ids is None else graph.edge_ids[at].long()
        wanted = [_wanted_of(halos[q], p) if q != p else order[:0] for q in range(parts)]
        table = {
            "own": nodes_of,
            "halo": halo,
            "indptr": torch.cat([degree.new_zeros(1), degree.cumsum(0)]),
            "indices": sources,
            "edge_ids": ids,
            "send": place[torch.cat(wanted)],
            "send_counts": torch.tensor([w.numel() for w in wanted]),
            "recv_counts": received,
        }
        tables = {files.GRAPH: {name: value.to(dtype).numpy() for name, value in table.items()}}
        tables[files.NODES] = {name: _rows(value, nodes_of) for name, value in nodes.items()}
        if edges:
            tables[files.EDGES] = {name: _rows(value, ids) for name, value in edges.items()}
        contents.append(files.write_part(folder, p, tables))
        num_edges.append(at.numel())
        num_cut += int((sources >= nodes_of.numel()).sum())
    statistics = files.Statistics(
        method=method,
        parts=parts,
        num_nodes=graph.num_rows,
        num_edges=graph.nnz,
        nodes=[len(n) for n in own],
        edges=num_edges,
        halo=[len(h) for h, _ in halos],
        cut=num_cut,
    )
    files.write_manifest(folder, statistics, contents, {"num_classes": _classes(nodes)})
    return statistics


def _positions(graph: Graph, rows: Tensor) -> Tensor:
    """Positions in the CSR arrays of the nonzeros of `rows`, one row after the other."""
    degree = graph.indptr.diff()[rows].long()
    starts = graph.indptr[rows].long() - (degree.cumsum(0) - degree)
    return torch.repeat_interleave(starts, degree) + torch.arange(int(degree.sum()))


def _halo(graph: Graph, order: Tensor, bounds: list[int], part: int) -> tuple[Tensor, Tensor]:
    """The nodes of other parts that edges to a part come from, by part and number; and how many there are of each.

    order, bounds : all nodes by part and number, and where each part begins in it.
    """
    first, last = bounds[part], bounds[part + 1]
    seen = torch.zeros(graph.num_cols, dtype=torch.bool)
    seen[graph.indices[_positions(graph, order[first:last])]] = True
    seen = seen[order]
    seen[first:last] = False
    counts = torch.tensor([int(seen[a:b].sum()) for a, b in itertools.pairwise(bounds)])
    return order[seen], counts


def _wanted_of(halo: tuple[Tensor, Tensor], part: int) -> Tensor:
    """What another part wants of the nodes of this one."""
    nodes, counts = halo
    end = int(counts[: part + 1].sum())
    return nodes[end - int(counts[part]) : end]


def _rows(values: Any, at: Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach()[at.to(values.device)].cpu().numpy()
    return np.ascontiguousarray(values[at.numpy()])


def _classes(nodes: Mapping[str, Any]) -> int | None:
    """How many classes integer labels [N] have, which no rank can tell from its own: y, or what DGL calls them."""
    y = next((nodes[name] for name in ("y", "label", "labels") if name in nodes), None)
    if y is None:
        return None
    labels = y if isinstance(y, Tensor) else torch.from_numpy(np.asarray(y))
    if labels.dim() != 1 or labels.is_floating_point() or labels.numel() == 0:
        return None
    return int(labels.max()) + 1
