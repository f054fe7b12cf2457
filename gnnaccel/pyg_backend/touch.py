"""PyG's names, looked up one by one: one that this version has not costs what needs it, and nothing else.

`nn`, `conv` and this module stand for PyG's modules: ``nn.HGTConv``, ``from ...touch import Data``. In place of a class
that is not there they have one of which there are no objects, with methods that nothing calls: tables may name it.
Functions that we call ourselves are imported from PyG as ever.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
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


def _read(example: Any, owner: str, name: str, get: Callable, instead: Callable) -> Callable:
    """`get`, which reads an attribute that instances have and no class; `instead` where `example` lacks it."""
    if hasattr(example, name):
        return get
    MISSING.add(f"{owner}.{name}")
    return instead


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


ORIGINAL, GENERATED = "_orig_propagate", "_jinja_propagate"
"""Where a layer class has its propagate() as it was written, and the one that PyG generated."""


def original_propagate(plain: Any) -> Any:
    """propagate() of a layer class as it was before PyG generated one."""
    return getattr(plain, ORIGINAL, plain.propagate)


EXPLAINED, DECOMPOSED = "_explain", "_decomposed_layers"
"""Attributes of a layer that is explained, or whose features are taken apart."""
MESSAGE_HOOKS = "_message_forward_hooks"
HOOKS = tuple(
    f"_{part}_forward_{when}hooks"
    for part in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
)
"""Attributes of a layer that hold hooks."""


class _Layer(MessagePassing):
    def _set_jittable_templates(self) -> None:
        """No propagate() is generated: of an example only its attributes count."""


_layer = _Layer()
_kept_elsewhere = [name for name in (EXPLAINED, DECOMPOSED, *HOOKS) if not hasattr(_layer, name)]
MISSING.update(f"MessagePassing().{name}" for name in _kept_elsewhere)
UNSEEN = f"this version of PyG keeps its {_kept_elsewhere[0]} elsewhere" if _kept_elsewhere else None
"""Why no layer can be told to be as it was made, or None."""

user_args: Callable[[Any], list[str]] = _read(
    _layer,
    "MessagePassing()",
    "_user_args",
    lambda conv: conv._user_args,
    lambda conv: conv.inspector.get_flat_param_names(["message", "aggregate", "update"], exclude=conv.special_args),
)
"""Names of what propagate() brings to the edges for a layer's methods."""
edge_user_args: Callable[[Any], list[str]] = _read(
    _layer,
    "MessagePassing()",
    "_edge_user_args",
    lambda conv: conv._edge_user_args,
    lambda conv: conv.inspector.get_param_names("edge_update", exclude=conv.special_args),
)
"""The same of edge_updater()."""


# ---- what layers keep


UNTOLD: Any = object()
"""What a layer keeps where this version of PyG keeps it elsewhere: nothing that is None."""
for _kind, _name in (("SGConv", "_cached_x"), ("SSGConv", "_cached_h"), ("GCNConv", "_cached_edge_index")):
    if _name not in getattr(getattr(conv, _kind), "__annotations__", ()):
        MISSING.add(f"{_kind}().{_name}")


def kept_x(layer: Any) -> Any:
    """The features that an SGConv has kept of its first call, or None."""
    return getattr(layer, "_cached_x", UNTOLD)


def kept_h(layer: Any) -> Any:
    """Those that an SSGConv has kept."""
    return getattr(layer, "_cached_h", UNTOLD)


def kept_edges(layer: Any) -> Any:
    """The edges and their factors that a GCNConv or a layer like it has kept of its first call, or None."""
    return getattr(layer, "_cached_edge_index", UNTOLD)


def keep_edges(layer: Any, edges: Any) -> None:
    layer._cached_edge_index = edges


def set_alpha(layer: Any, alpha: Any) -> None:
    """Leave the attention of a call where the layer's forward() looks for it."""
    layer._alpha = alpha


def types_of_edges(layer: Any) -> Any:
    """The types that a model of to_hetero_with_bases() has left in a layer for its hook; None if there are none."""
    return vars(layer).get("_edge_type")


# ---- data

_data = _rest.Data()
store_of: Callable[[Any], Any] = _read(_data, "Data()", "_store", lambda data: data._store, lambda data: data.stores[0])
"""The storage of a Data."""
attributes_of: Callable[[Any], dict[str, Any]] = _read(
    store_of(_data), "GlobalStorage()", "_mapping", lambda store: store._mapping, lambda store: dict(store.items())
)
"""What a storage holds by name; not to be written to."""


def with_attributes(data: Any, values: dict[str, Any]) -> Any:
    """A copy of a Data that holds these values alone."""
    made = copy.copy(data)
    store = store_of(made)
    if hasattr(store, "_mapping"):
        vars(store)["_mapping"] = values
        return made
    for name in list(store.keys()):
        del store[name]
    for name, value in values.items():
        store[name] = value
    return made


def set_counts(store: Any, counts: list[int]) -> None:
    """Note in the storage of a batch how many nodes each of its graphs has, where they say it themselves."""
    store._num_nodes = counts


def forget_order(data: Any) -> None:
    """Have a Data forget what it was told, as a GraphStore, of the order of its edges."""
    if hasattr(data, "_edge_attrs"):
        data._edge_attrs = {}


def collate_values(*args: Any) -> Any:
    """What PyG makes of the values of one attribute in a list of data; None where that is no function of its own."""
    collate = getattr(importlib.import_module("torch_geometric.data.collate"), "_collate", None)
    return None if collate is None else collate(*args)
