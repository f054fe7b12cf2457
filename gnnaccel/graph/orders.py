"""Orders on disk: what `reorder.order_by` found for a graph, for the processes that come.

A file is of one graph, by a fingerprint of its arrays, one method and one version of gnnaccel; it says all that, with a
checksum. One that does not fit in every respect is not used, with the reason, and written anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gnnaccel import __version__
from gnnaccel.graph import disk
from gnnaccel.graph.disk import Stale

if TYPE_CHECKING:
    from gnnaccel.graph.structure import Graph

FORMAT = 1


def path_of(graph: Graph, method: str, folder: Path) -> Path:
    """Where the order of the rows of `graph` by `method` is kept."""
    return folder / f"{disk.fingerprint(graph)}-{method}.npz"


def _about(graph: Graph, method: str, order: np.ndarray) -> str:
    size = [graph.num_rows, graph.num_cols, graph.nnz]
    digest = hashlib.sha256(order.tobytes()).hexdigest()
    return json.dumps(
        {"format": FORMAT, "gnnaccel": __version__, "method": method, "graph": size, "sha256": digest}, sort_keys=True
    )


def save(graph: Graph, method: str, order: Tensor | None, folder: Path) -> Path:
    """Write an order of the rows, or that none pays (None).

    Raises
    ------
    OSError
        Where the folder cannot be made or written; nothing is lost then.
    """
    rows = np.empty(0, np.int64) if order is None else order.cpu().numpy().astype(np.int64)
    file = io.BytesIO()
    np.savez_compressed(file, order=rows, about=np.array(_about(graph, method, rows)))
    path = path_of(graph, method, folder)
    disk.write(path, file.getvalue())
    return path


def load(graph: Graph, method: str, folder: Path) -> Tensor | None:
    """The order that was saved, on the graph's device; None if it was found that none pays.

    Raises
    ------
    FileNotFoundError
        If there is none. Stale: if it is not to be used, or cannot be read, with the reason.
    """
    try:
        with np.load(path_of(graph, method, folder), allow_pickle=False) as found:
            rows, about = found["order"], str(found["about"])
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise Stale(f"not a file of an order ({type(error).__name__}: {error})") from error
    if rows.dtype != np.int64 or rows.ndim != 1 or about != _about(graph, method, rows):
        raise Stale("it is of another graph, method or version, or its checksum is not that of its content")
    if rows.size == 0:
        return None
    if rows.size != graph.num_rows or not np.array_equal(np.sort(rows), np.arange(rows.size)):
        raise Stale("it is no order of the rows")
    return torch.from_numpy(rows).to(graph.device)
