"""What is done to a graph ahead of time, on one screen: structure, its transpose, on CUDA their work lists."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gnnaccel.graph import worklist
from gnnaccel.graph.structure import Graph


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
    """

    graph: Graph
    steps: tuple[str, ...]
    time_ms: float
    workspace_bytes: int

    def __str__(self) -> str:
        size = self.workspace_bytes / 2**20
        return f"{self.graph}: {', '.join(self.steps)} ready in {self.time_ms:.1f} ms, {size:.1f} MiB"


def prepare(build: Callable[[], Graph], *, transposed: bool = True) -> Prepared:
    """Run the stages that the first step of training would run; see `gnnaccel.prepare`."""
    start = time.perf_counter()
    graph = build()
    steps, parts = ["structure"], [graph]
    if transposed:
        parts.append(graph.transposed)
        steps.append("transposed")
    arrays = [a for part in parts for a in (part.indptr, part.indices, part.edge_ids) if a is not None]
    if graph.device.type == "cuda":
        for part in parts:
            for row_bytes in worklist.widths():
                work = part.work_list(row_bytes, now=True)
                arrays += [] if work is None else [work.items, work.steps, work.splits]
        steps.append("work lists")
        torch.cuda.synchronize(graph.device)
    time_ms = (time.perf_counter() - start) * 1e3
    arrays = list({id(a): a for a in arrays}.values())
    return Prepared(graph, tuple(steps), time_ms, sum(a.numel() * a.element_size() for a in arrays))
