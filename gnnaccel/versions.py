"""Versions that gnnaccel is run with: by .github/workflows, `make test-pyg` and `make test-wheel`."""

from __future__ import annotations

import platform
import re
import sys

PINNED = {"torch": "2.13.0", "dgl": "2.1.0", "torch_geometric": "2.8.1"}
"""Those of the tests, the examples and the comparisons (pyproject.toml and Makefile)."""
TRIED = {"Python": ("3.10", "3.14"), "torch": ("2.4", "2.13"), "dgl": ("2.1", "2.1"), "torch_geometric": ("2.5", "2.8")}
"""The oldest and the newest that were ever run."""


def untried(name: str, version: str | None = None) -> str | None:
    """Words for a version that gnnaccel was never run with, that of this process if none is given; None for one between
    the oldest and the newest."""
    if version is None:
        running = platform.python_version() if name == "Python" else None
        version = str(running or getattr(sys.modules.get(name), "__version__", TRIED[name][0]))
    oldest, newest = TRIED[name]
    if release(oldest) <= release(version) <= release(newest):
        return None
    usual = oldest if oldest == newest else f"{oldest} to {newest}"
    return f"{name} {version} was never tried: gnnaccel is run with {usual}"


def release(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
