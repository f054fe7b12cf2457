"""Calls of propagate() that are made again without running message(), aggregate() and update() (gnnaccel.kept)."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch_geometric.nn.conv import MessagePassing

from gnnaccel.kept import Attempt, Reads, State, form_of, modes_now, reads_of, same_twice, state_of
from gnnaccel.pyg_backend.graph import Edges
from gnnaccel.pyg_backend.touch import collects_otherwise
from gnnaccel.recording import is_possible

_METHODS = ("message", "aggregate", "update", "edge_update")
_AROUND = ("propagate", "edge_updater", "collect", "edge_collect", "_collect", "message_and_aggregate")
_KEEPING = {"retain_grad", "register_hook", "grad", "append", "extend", "insert", "setdefault", "update"}


def attempt(conv: MessagePassing, plain: Any, name: str, edges: Edges, kwargs: dict) -> Attempt | None:
    """One call of `name`, propagate() or edge_updater(); None of one that cannot be compared with others."""
    if type(edges.edge_index) is not Tensor or edges.is_sparse or not is_possible():
        return None
    key = _key(edges, kwargs)
    if key is None:
        return None
    graph = edges.graph()
    methods = _methods(plain)

    def read() -> tuple[Reads, State] | None:
        reads = None if graph.indptr.is_inference() else _reads_of(plain, methods)
        around = {"aggr_module": conv.aggr_module}
        state = reads and state_of(conv, plain, MessagePassing, reads, around, frozenset(_METHODS))
        return None if reads is None or state is None else (reads, state)

    key = (id(graph), name, conv.training, conv.node_dim, *key)
    return Attempt(conv, key, methods, read, _tensors(kwargs), graph, (edges.edge_index,))


def _tensors(kwargs: dict) -> list[Tensor]:
    given = (x for value in kwargs.values() for x in (value if isinstance(value, tuple) else (value,)))
    return [x for x in given if isinstance(x, Tensor)]


def _key(edges: Edges, kwargs: dict) -> tuple | None:
    """What calls are compared by; None of one that cannot be compared."""
    found: list[Any] = [*modes_now(edges.edge_index.device.type), edges.flow, tuple(edges.size)]
    for name, value in kwargs.items():
        found += (name, len(value) if isinstance(value, tuple) else None)
        form = form_of(value if isinstance(value, tuple) else (value,))
        if form is None:
            return None
        found += form
    return (*found, *same_twice(_tensors(kwargs)))


def _methods(plain: Any) -> tuple:
    """The methods of a class and its parents."""
    parents = plain.__mro__[: plain.__mro__.index(MessagePassing)]
    return tuple(vars(parent).get(name) for parent in parents for name in _METHODS)


@functools.lru_cache(maxsize=256)
def _reads_of(plain: Any, methods: tuple) -> Reads | None:
    """What the methods of a class read; None if they set something, or if the class has its own in place of what PyG
    calls around them."""
    parents = plain.__mro__[: plain.__mro__.index(MessagePassing)]  # those that super() finds too
    if collects_otherwise(plain):
        return None
    if not all(_is_pygs(vars(parent)[name]) for parent in parents for name in _AROUND if name in vars(parent)):
        return None
    return reads_of(tuple(method for method in methods if method is not None))


def keeps_nothing(plain: Any) -> bool:
    """True if the methods of a class keep no value, and ask for no gradient of one."""
    reads = _reads_of(plain, _methods(plain))
    return reads is not None and reads.attributes.isdisjoint(_KEEPING)


def _is_pygs(function: Any) -> bool:
    """True for a function of PyG's, or one that it has generated."""
    where = getattr(function, "__module__", None) or ""
    return where.startswith("torch_geometric.") or where.endswith(("_propagate", "_edge_updater"))
