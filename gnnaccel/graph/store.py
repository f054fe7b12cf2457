"""What is kept of graphs on disk: where, under which name, and written so that nobody reads half a file.

The file of an order, as `reorder.order_by` found it, is of one graph, by a fingerprint of its arrays, one method and
one version of gnnaccel; it says all that, with a checksum. One that does not fit in every respect is not used, with the
reason, and written anew. So are those of plans (`gnnaccel.planning.plans`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gnnaccel import __version__
from gnnaccel.graph import files
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.hashing import fingerprint
from gnnaccel.lower import bounds

FORMAT = 1  # of a file of an order


class Stale(Exception):
    """A file that is there, but not of use; says why."""


def folder_of(place: bool | str | os.PathLike) -> Path:
    """The folder that is meant: the user's cache for True."""
    if isinstance(place, bool):
        import platformdirs  # here alone: nothing else wants it

        return Path(platformdirs.user_cache_dir("gnnaccel")) / "plans"
    return Path(place)


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


def order_path(graph: Graph, method: str, folder: Path) -> Path:
    """Where the order of the rows of `graph` by `method` is kept."""
    return folder / f"{fingerprint(graph)}-{method}.npz"


def _dtype(graph: Graph) -> torch.dtype:
    return torch.int32 if graph.num_rows <= bounds.INT32_MAX else torch.int64


def _about(graph: Graph, method: str, order: np.ndarray) -> str:
    size = [graph.num_rows, graph.num_cols, graph.nnz]
    digest = hashlib.sha256(order.tobytes()).hexdigest()
    return json.dumps(
        {"format": FORMAT, "gnnaccel": __version__, "method": method, "graph": size, "sha256": digest}, sort_keys=True
    )


def save_order(graph: Graph, method: str, order: Tensor | None, folder: Path) -> Path:
    """Write an order of the rows, or that none pays (None).

    Raises
    ------
    OSError
        Where the folder cannot be made or written; nothing is lost then.
    """
    rows = np.empty(0, np.int32) if order is None else order.to(_dtype(graph)).cpu().numpy()
    file = io.BytesIO()
    np.savez(file, order=rows, about=np.array(_about(graph, method, rows)))
    path = order_path(graph, method, folder)
    write(path, file.getvalue())
    return path


def load_order(graph: Graph, method: str, folder: Path) -> Tensor | None:
    """The order that was saved, on the graph's device; None if it was found that none pays.

    Raises
    ------
    FileNotFoundError
        If there is none. Stale: if it is not to be used, or cannot be read, with the reason.
    """
    try:
        found = files.arrays(
            io.BytesIO(files.content(order_path(graph, method, folder), 8 * graph.num_rows + bounds.ORDER_FILE_BYTES))
        )
        rows, about = found["order"], str(found["about"])
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged bytes raise what zip files and NumPy can think of
        raise Stale(f"not a file of an order ({type(error).__name__}: {error})") from error
    if rows.dtype not in (np.int32, np.int64) or rows.ndim != 1 or about != _about(graph, method, rows):
        raise Stale("it is of another graph, method or version, or its checksum is not that of its content")
    if rows.size == 0:
        return None
    order = torch.from_numpy(rows).to(graph.device).long()
    places = torch.arange(order.numel(), device=order.device)
    if order.numel() != graph.num_rows or not torch.equal(order.sort().values, places):
        raise Stale("it is no order of the rows")
    return order
