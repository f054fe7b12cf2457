"""What is kept of graphs on disk: where, under which name, and written so that nobody reads half a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gnnaccel.graph.network import mixed

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

_CHUNK = 1 << 24  # nonzeros that are hashed at a time: bounds the workspace


class Stale(Exception):
    """A file that is there, but not of use; says why."""


def folder_of(place: bool | str | os.PathLike) -> Path:
    """The folder that is meant: the user's cache for True."""
    if isinstance(place, bool):
        import platformdirs  # here alone: nothing else wants it

        return Path(platformdirs.user_cache_dir("gnnaccel")) / "plans"
    return Path(place)


def fingerprint(graph: Graph) -> str:
    """A number in hex that differs for graphs whose arrays differ; one pass over them, and a synchronisation."""
    sums = torch.stack([_hash(graph.indptr), _hash(graph.indices)]).tolist()
    return hashlib.sha256(repr((graph.num_rows, graph.num_cols, graph.nnz, sums)).encode()).hexdigest()[:32]


def _hash(values: Tensor) -> Tensor:
    """A sum of hashes of values and places, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), _CHUNK):
        part = values[start : start + _CHUNK].long()
        total += mixed(mixed(torch.arange(start, start + part.numel(), device=part.device)) + part).sum()
    return total


def write(path: Path, content: bytes) -> None:
    """Make or replace a file, and its folder: readers see the old one or the new one.

    Raises
    ------
    OSError
        Where that cannot be done; nothing is lost then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # others may read, as of any file; mkstemp lets nobody
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink(missing_ok=True)
        raise
