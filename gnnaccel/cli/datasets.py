"""Finding the graph that `--dataset` names: shipped, a file, or one that the framework's own loaders fetch."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np

from gnnaccel import data
from gnnaccel.cli import children
from gnnaccel.cli.train import export

_EXPORT = Path(export.__file__)


def known() -> str:
    """What `--dataset` takes, for messages."""
    folder = os.environ.get(data.DATA)
    here = f"{data.DATA}={folder}" if folder else f"the folder that {data.DATA} names (not set)"
    return (
        f"{', '.join(data.names())} (shipped); generated; a path.npz; NAME of a NAME.npz in {here}; "
        f"or, where the network is reached, {', '.join(export.LOADERS)}"
    )


def load(name: str, framework: str, work: Path) -> data.Dataset:
    """The graph called `name`; `work` is a folder for what is fetched on the way.

    Raises
    ------
    children.Failed
        With exit code 2 if the name or file is not one, 1 if the framework's loader cannot fetch it.
    """
    try:
        return data.load(name)
    except data.UnknownDataset as error:
        loader = name.lower().replace("-", "_")
        if loader not in export.LOADERS:
            reason = f"no file {name!r}" if name.endswith(".npz") else f"unknown graph {name!r}"
            raise children.Failed(f"--dataset: {reason}: expected {known()}", code=2) from error
    except ValueError as error:
        raise children.Failed(f"--dataset: {error}", code=2) from None
    return _fetch(loader, framework, work)


def _fetch(name: str, framework: str, work: Path) -> data.Dataset:
    file = work / f"{name}.npz"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gnnaccel"
    start, env = children.command("compat" if framework == "dgl" else "off")
    words = [*start, str(_EXPORT), f"--framework={framework}", f"--name={name}", f"--folder={cache}", f"--out={file}"]
    print(f"fetching {name} with the loader of {framework}", file=sys.stderr)
    try:
        printed, _ = children.run(words, env, f"the loader of {name}")
    except children.Failed as error:
        raise children.Failed(
            f"--dataset: {name} could not be fetched with the loader of {framework} ({error.last_line}); "
            f"is the network reached? Expected {known()}"
        ) from None
    try:
        found = data.load(file)
    except ValueError as error:
        raise children.Failed(f"--dataset: what the loader of {framework} gives cannot be used: {error}") from None
    notes = [*found.notes, f"fetched with the loader of {framework}"]
    if "split at random" in printed:
        notes.append("it has no split of its own: 60 % of its nodes train, 20 % validate, 20 % test, drawn from seed 0")
    return dataclasses.replace(found, name=name, notes=tuple(notes))


def save(found: data.Dataset, path: Path) -> None:
    """Write what the training programs read."""
    np.savez(
        path,
        edge_index=found.edge_index,
        x=found.x,
        y=found.y,
        train_mask=found.train_mask,
        test_mask=found.test_mask,
        num_classes=found.num_classes,
    )
