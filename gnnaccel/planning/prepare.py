"""What is done to a graph ahead of time, on one screen: structure, transpose, order; on CUDA lists, tiles, plans."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gnnaccel import schedule, tiles
from gnnaccel.graph import modes, store
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.reorder import ORDERS
from gnnaccel.lower import bounds
from gnnaccel.planning import orders, plans, tune
from gnnaccel.planning.tune import Tuned
from gnnaccel.tiles import KERNELS, Tiles

WIDTHS = (16, 32, 64, 128, 256)  # features that plans are measured for, unless the caller says
_ORDERED = {"communities": "rows in communities", "rcm": "rows by reverse Cuthill-McKee", "degree": "rows by degree"}


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
    tuned : tuple of Tuned
        With tune="measure": what was measured of the graph, or found on disk, by number of features.
    """

    graph: Graph
    steps: tuple[str, ...]
    time_ms: float
    workspace_bytes: int
    tiles: Tiles | None = None
    tuned: tuple[Tuned, ...] = ()

    def __str__(self) -> str:
        size = self.workspace_bytes / 2**20
        return f"{self.graph}: {', '.join(self.steps)} ready in {self.time_ms:.1f} ms, {size:.1f} MiB"


def prepare(
    build: Callable[[], Graph],
    *,
    transposed: bool = True,
    reorder: bool | str = False,
    kernel: str = "auto",
    mode: str = "heuristic",
    num_feats: Sequence[int] = WIDTHS,
    keep: bool | str | os.PathLike = False,
) -> Prepared:
    """Run the stages that the first steps of training would run; see `gnnaccel.prepare`, whose `tune` is `mode`."""
    modes.refuse("prepare")
    _check(kernel, mode, num_feats, reorder, keep)
    start = time.perf_counter()
    graph = build()
    if mode == "measure" and not graph.indptr.is_cuda:
        raise ValueError(f"prepare: tune: expected a graph on CUDA, got {graph.device}; plans are of CUDA kernels")
    rows = ("communities" if graph.nnz >= bounds.ORDER_EDGES else None) if reorder is True else reorder or None
    folder = None if keep is False else store.folder_of(keep)
    steps, parts = ["structure"], [graph]
    if transposed:
        parts.append(graph.transposed)
        steps.append("transposed")
    arrays = [a for part in parts for a in (part.indptr, part.indices, part.edge_ids) if a is not None]
    if mode != "off" and (graph.indptr.is_cuda or reorder):
        for part in parts:
            schedule.prepare(part, rows, like=None if part is graph else graph, folder=folder)
        if reorder:
            steps.append(_order_step(graph, rows))
        if graph.indptr.is_cuda:
            steps.append("work lists")
        # In deterministic mode CUDA keeps what the rules say: lists cut rows in different places. On the CPU all orders
        # give the same bits.
        by_rule = graph.indptr.is_cuda and (mode == "measure" or torch.are_deterministic_algorithms_enabled())
        if not by_rule and any(schedule.of(part).reordered for part in parts):
            steps.append(f"measured: {orders.choose_orders(parts, num_feats, budget_ms=bounds.MEASURE_MS)}")
    translated = [part for part in parts if kernel == "tiled" or (kernel == "auto" and tiles.ensure(part))]
    if translated:
        arrays += [a for part in translated for a in tiles.of(part).arrays()]
        steps.append("tiles")
    tuned: list[Tuned] = []
    if mode == "measure":
        tuned, source = plans.obtain(parts, num_feats, folder, by_tiles=kernel != "csr", budget_ms=bounds.MEASURE_MS)
        steps.append(f"plans {source}")
    arrays += [a for part in parts for a in schedule.of(part).arrays()]
    if graph.indptr.is_cuda:
        torch.cuda.synchronize(graph.device)
    time_ms = (time.perf_counter() - start) * 1e3
    unique = {id(a): a for a in arrays}.values()
    size = sum(a.numel() * a.element_size() for a in unique)
    of_graph = tiles.of(graph) if graph in translated else None
    return Prepared(graph, tuple(steps), time_ms, size, of_graph, tuple(tuned))


def _order_step(graph: Graph, ordering: str | None) -> str:
    why = f"no {ordering} that pay" if ordering else f"an order is not repaid below {bounds.ORDER_EDGES:,} edges"
    work = schedule.of(graph)
    step = _ORDERED[work.order_name] if work.order_name else f"rows as given ({why})"
    return f"{step}, {work.order_note}" if work.order_note else step


def _check(kernel: str, mode: str, num_feats: Sequence[int], reorder: bool | str, keep) -> None:
    if not isinstance(reorder, bool) and reorder not in ORDERS:
        raise ValueError(f"prepare: reorder: expected True, False or one of {', '.join(ORDERS)}, got {reorder!r}")
    if reorder and mode == "off":
        raise ValueError("prepare: reorder: an order is of work lists, which tune='off' leaves out")
    if keep is None or keep == "":
        raise ValueError(f"prepare: keep: expected True, False or a folder, got {keep!r}")
    if keep is not False and mode != "measure" and not reorder:
        raise ValueError(
            f"prepare: keep: on disk are orders and measured plans, got neither reorder nor tune='measure' but {mode!r}"
        )
    if kernel not in KERNELS:
        raise ValueError(f"prepare: kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    if mode not in tune.MODES:
        raise ValueError(f"prepare: tune: expected one of {', '.join(tune.MODES)}, got {mode!r}")
    if not isinstance(num_feats, Sequence) or not num_feats or not all(isinstance(n, int) and n > 0 for n in num_feats):
        raise ValueError(f"prepare: num_feats: expected numbers of features, at least one, got {num_feats!r}")
