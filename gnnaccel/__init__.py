"""Kernels for graph neural networks, and plug-ins that run DGL and PyTorch Geometric on them.

Importing this package imports neither torch nor a framework: the names below load what they need on first use.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "Graph": "gnnaccel.graph.csr",
    "as_graph": "gnnaccel.api",
    "prepare": "gnnaccel.api",
    "renumber": "gnnaccel.api",
    "invalidate": "gnnaccel.api",
    "accelerate": "gnnaccel.api",
    "captured": "gnnaccel.capture",
    "install": "gnnaccel.switch",
    "uninstall": "gnnaccel.switch",
}
_MODULES = ("distributed", "nn", "ops", "report", "sampling", "tiles")

__all__ = [
    "Graph",
    "__version__",
    "accelerate",
    "as_graph",
    "captured",
    "distributed",
    "install",
    "invalidate",
    "nn",
    "ops",
    "prepare",
    "renumber",
    "report",
    "sampling",
    "tiles",
    "uninstall",
]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"gnnaccel.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'gnnaccel' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_WHERE[name]), name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython) -> None:
    """``%load_ext gnnaccel``: the same as `install` in the notebook's process."""
    __getattr__("install")()


def unload_ipython_extension(ipython) -> None:
    """``%unload_ext gnnaccel``: the same as `uninstall`."""
    __getattr__("uninstall")()
