"""Measured plans, and their files: what `tune` found out about a graph, for the processes that come.

A file is of one graph, by a fingerprint of its arrays, of one GPU and of one version of gnnaccel; it says all that, and
ends in a checksum. One that does not fit in every respect is not used, with the reason, and written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from gnnaccel import __version__, schedule
from gnnaccel.graph import files, hashing, network, store
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.store import Stale
from gnnaccel.lower import bounds
from gnnaccel.planning import tune
from gnnaccel.planning.tune import Tuned
from gnnaccel.schedule.worklist import SLICES, THREADS, Arrangement, Kernel, Plan

FORMAT = 2


def obtain(
    parts: Sequence[Graph], num_feats: Sequence[int], folder: Path | None, *, by_tiles: bool, budget_ms: float
) -> tuple[list[Tuned], str]:
    """Let the graphs go by measured plans, from `folder` where it has them, else kept there.

    Returns
    -------
    list of Tuned, str
        Plans of the first of `parts`, and how those of all were come by.
    """
    if torch.are_deterministic_algorithms_enabled():
        return [], "by rule (deterministic mode: what is measured may differ from run to run)"
    first, *others = parts
    if network.is_symmetric(first):  # its transposed has the same rows
        tuned, source = _obtain(first, num_feats, folder, by_tiles, budget_ms)
        for part in others:
            for found in tuned:
                tune.adopt(part, found)
        return tuned, source
    each = [_obtain(part, num_feats, folder, by_tiles, budget_ms / len(parts)) for part in parts]
    return each[0][0], "; ".join(dict.fromkeys(source for _, source in each))


def _obtain(
    graph: Graph, num_feats: Sequence[int], folder: Path | None, by_tiles: bool, budget_ms: float
) -> tuple[list[Tuned], str]:
    if graph.nnz == 0:
        return [], "by rule (no edges)"
    source = "measured"
    if folder is not None:
        try:
            known = {t.num_feats: t for t in load(graph, folder)}
            if known.keys() >= set(num_feats):
                tuned = [known[width] for width in num_feats]
                for found in tuned:
                    tune.adopt(graph, found)
                return tuned, "from disk"
            source = "measured (those on disk are for other numbers of features)"
        except FileNotFoundError:
            pass
        except Stale as reason:
            source = f"measured (those on disk are of no use: {reason})"
    try:
        tuned = tune.measure_each(graph, num_feats, budget_ms=budget_ms, by_tiles=by_tiles)
    except torch.OutOfMemoryError:
        return [], "by rule where there was no memory to measure"
    if folder is not None:
        save(graph, tuned, folder)
    return tuned, source


def path_of(graph: Graph, folder: Path) -> Path:
    """Where the plans of `graph` on its GPU, in the order that its rows have, are kept."""
    gpu = hashlib.sha256(_device(graph).encode()).hexdigest()[:8]
    return folder / f"{hashing.fingerprint(graph)}-{gpu}-{_order(graph)}.json"


def _order(graph: Graph) -> str:
    work = schedule.of(graph)
    return work.order_name or ("given" if work.order is not None else "none")


def _device(graph: Graph) -> str:
    return torch.cuda.get_device_name(graph.device) if graph.indptr.is_cuda else "cpu"


def _signed(content: dict) -> str:
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"content": content, "sha256": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True)


def _about(graph: Graph) -> dict:
    """What has to be the same for plans to be used."""
    return {
        "format": FORMAT,
        "gnnaccel": __version__,
        "device": _device(graph),
        "graph": [graph.num_rows, graph.num_cols, graph.nnz],
        "order": _order(graph),
    }


def save(graph: Graph, tuned: list[Tuned], folder: Path) -> Path:
    """Write the plans of `graph`; those that are there of other numbers of features stay.

    Raises
    ------
    OSError
        Where the folder cannot be made or written; nothing is lost then.
    """
    path = path_of(graph, folder)
    with contextlib.suppress(FileNotFoundError, Stale):
        new = {t.num_feats for t in tuned}
        tuned = [t for t in load(graph, folder) if t.num_feats not in new] + tuned
    plans = [
        asdict(t) | {"plan": [t.plan.cap, t.plan.arrangement.name, t.plan.kernel.name, *t.plan[3:]]} for t in tuned
    ]
    store.write(path, (_signed(_about(graph) | {"plans": plans}) + "\n").encode())
    return path


def load(graph: Graph, folder: Path) -> list[Tuned]:
    """The plans that were saved of `graph`.

    Raises
    ------
    FileNotFoundError
        If there are none. Stale: if they are not to be used, or cannot be read, with the reason.
    """
    try:
        text = files.content(path_of(graph, folder), bounds.PLAN_FILE_BYTES).decode(errors="replace")
        content = json.loads(text)["content"]
        if _signed(content) != text.rstrip("\n"):
            raise Stale("the checksum is not that of the content")
        for key, want in _about(graph).items():
            if type(content.get(key)) is not type(want) or content[key] != want:
                raise Stale(f"{key} is {content.get(key)!r}, not {want!r}")
        return [_tuned(entry) for entry in content["plans"]]
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        raise Stale(f"not a file of plans ({type(error).__name__}: {error})") from error


def _tuned(entry: dict) -> Tuned:
    cap, arrangement, kernel, lanes, threads = entry["plan"]
    values = {f.name: entry[f.name] for f in fields(Tuned)} | {"cap": cap, "slice_lanes": lanes, "threads": threads}
    for name, kind in _KINDS.items():
        if type(values[name]) is not kind:
            raise ValueError(f"{name} is {values[name]!r}")
    plan = Plan(cap, Arrangement[arrangement], Kernel[kernel], lanes, threads)
    fits = lanes in SLICES and threads in THREADS if plan.kernel is Kernel.GROUPS else threads == 0
    if not 1 <= cap <= bounds.PLAN_NUMBERS or lanes not in (0, *SLICES) or not fits:
        raise ValueError(f"no such plan: {entry['plan']}")
    if not 1 <= values["num_feats"] <= bounds.PLAN_NUMBERS or values["row_bytes"] != 4 * values["num_feats"]:
        raise ValueError(f"no such features: {values['num_feats']}")
    if not all(0 < values[name] < math.inf for name in ("model_ms", "best_ms")):
        raise ValueError("no such times")
    return Tuned(**{f.name: values[f.name] for f in fields(Tuned)} | {"plan": plan})


_KINDS = {"num_feats": int, "row_bytes": int, "tiled": bool, "model_ms": float, "best_ms": float, "tried": int}
_KINDS |= {"complete": bool, "cap": int, "slice_lanes": int, "threads": int}
