"""PyG's names, looked up one by one: one that this version has not costs what needs it, and nothing else.

`nn`, `conv` and this module stand for PyG's modules: ``nn.HGTConv``, ``from ...touch import Data``. In place of a class
that is not there they have one of which there are no objects, with methods that nothing calls: tables may name it.
Functions that we call ourselves are imported from PyG as ever.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch_geometric
from torch_geometric.nn.conv import MessagePassing

MISSING: set[str] = set()
"""Names that this version of PyG has not."""


class _Absent(type):
    """Of a class that is not there: all that is asked of it is a function of its own."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name != "__norm__":  # ChebConv's
            raise AttributeError(name)

        def absent(*args, **kwargs):
            raise RuntimeError(f"torch_geometric {torch_geometric.__version__} has no {cls.__name__}")

        setattr(cls, name, absent)
        return absent


class Names:
    """The names of some modules of PyG's, each of the first that has it."""

    def __init__(self, *modules: str):
        self.__modules = modules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for module in self.__modules:
            try:
                found = getattr(importlib.import_module(module), name)
                break
            except (ImportError, AttributeError):
                continue
        else:
            MISSING.add(f"{self.__modules[0]}.{name}")
            found = _Absent(name, (), {})
        setattr(self, name, found)
        return found


nn: Any = Names("torch_geometric.nn", "torch_geometric.nn.models.basic_gnn", "torch_geometric.utils._trim_to_layer")
conv: Any = Names("torch_geometric.nn.conv")
_rest = Names(
    *("torch_geometric", "torch_geometric.sampler", "torch_geometric.loader", "torch_geometric.loader.graph_saint"),
    *("torch_geometric.data", "torch_geometric.data.data", "torch_geometric.data.storage", "torch_geometric.index"),
    *("torch_geometric.transforms", "torch_geometric.distributed"),
)


def __getattr__(name: str) -> Any:
    return getattr(_rest, name)


# ---- private names of MessagePassing

_COLLECTING = ("_check_input", "_index_select", "_lift", "_set_size")
MISSING.update(f"MessagePassing.{name}" for name in {*_COLLECTING, "edge_update"} if not hasattr(MessagePassing, name))
_OWN = [(name, getattr(MessagePassing, name)) for name in _COLLECTING if hasattr(MessagePassing, name)]


def collects_otherwise(plain: Any) -> bool:
    """True for a layer class with its own way to bring features to the edges."""
    for name, method in _OWN:  # noqa: SIM110 - any() takes longer
        if getattr(plain, name) is not method:
            return True
    return False


def lifts(plain: Any) -> bool:
    """True for a layer class that gathers features by the two methods of MessagePassing's that we put ours for."""
    methods = [vars(MessagePassing).get(name) for name in ("_index_select", "_lift")]
    return None not in methods and [plain._index_select, plain._lift] == methods


def edge_update(plain: Any) -> Any:
    """edge_update() of a layer class, None in a version without it."""
    return getattr(plain, "edge_update", None)


def original_propagate(plain: Any) -> Any:
    """propagate() of a layer class as it was before PyG generated one."""
    return getattr(plain, "_orig_propagate", plain.propagate)
