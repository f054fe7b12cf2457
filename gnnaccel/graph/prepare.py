"""What is done to a graph ahead of time, on one screen: structure, its transpose, on CUDA their work lists; tiles."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gnnaccel.graph.structure import Graph
from gnnaccel.graph.translate import KERNEL_SIZE, METHODS, Tiles


@dataclass(frozen=True)
class Prepared:
    """What `prepare` did.

    Attributes
    ----------
    graph : Graph
    steps : tuple of str
        What is ready now, in the order it was built.
    time_ms : float
        Wall time of all steps; next to nothing where they had been done before.
    workspace_bytes : int
        Memory the prepared arrays take.
    tiles : Tiles or None
        Of the graph, where it has been translated.
    """

    graph: Graph
    steps: tuple[str, ...]
    time_ms: float
    workspace_bytes: int
    tiles: Tiles | None = None

    def __str__(self) -> str:
        size = self.workspace_bytes / 2**20
        return f"{self.graph}: {', '.join(self.steps)} ready in {self.time_ms:.1f} ms, {size:.1f} MiB"


def prepare(
    build: Callable[[], Graph], *, transposed: bool = True, reorder: bool = False, method: str = "auto"
) -> Prepared:
    """Run the stages that the first steps of training would run; see `gnnaccel.prepare`."""
    if method not in METHODS:
        raise ValueError(f"prepare: method: expected one of {', '.join(METHODS)}, got {method!r}")
    start = time.perf_counter()
    graph = build()
    if reorder and not graph.indptr.is_cuda:
        raise ValueError(
            f"prepare: reorder: expected a graph on CUDA, got {graph.device}; only CUDA kernels use the order"
        )
    steps, parts = ["structure"], [graph]
    if transposed:
        parts.append(graph.transposed)
        steps.append("transposed")
    arrays = [a for part in parts for a in (part.indptr, part.indices, part.edge_ids) if a is not None]
    if graph.indptr.is_cuda:
        for part in parts:
            works = part.prepare_work(reorder_rows=reorder, like=None if part is graph else graph)
            arrays += [a for work in works for a in work[:3]]
            arrays += [] if part.order is None else [part.order]
        if reorder:
            steps.append("rows in communities" if graph.reordered else "rows as given (no communities that pay)")
        steps.append("work lists")
    translated = [part for part in parts if method == "tiled" or (method == "auto" and part.tiles_serve())]
    if translated:
        arrays += [a for part in translated for a in part.tiles(*KERNEL_SIZE).arrays()]
        steps.append("tiles")
    if graph.indptr.is_cuda:
        torch.cuda.synchronize(graph.device)
    time_ms = (time.perf_counter() - start) * 1e3
    unique = {id(a): a for a in arrays}.values()
    size = sum(a.numel() * a.element_size() for a in unique)
    return Prepared(graph, tuple(steps), time_ms, size, graph.tiles(*KERNEL_SIZE) if graph in translated else None)
