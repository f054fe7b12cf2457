"""HeteroConv of SAGEConv, GraphConv, GCNConv, GINConv, GATConv, GATv2Conv and TransformerConv: the layers of all edge
types together."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import hetero_conv

from gnnaccel import report
from gnnaccel.pyg_backend import edge_types
from gnnaccel.pyg_backend.classes import is_accelerated
from gnnaccel.pyg_backend.edge_type_layers import Refused
from gnnaccel.pyg_backend.edge_types import Call, Operands
from gnnaccel.pyg_backend.replaced import Forward
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import submodules

KIND = "pyg.HeteroConv"


def _forward(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self, *args_dict, **kwargs_dict):
        if torch.compiler.is_compiling() or not any(is_accelerated(conv) for conv in submodules(self.convs).values()):
            return original(self, *args_dict, **kwargs_dict)
        start = time.perf_counter()
        why = _unusual(self, args_dict, kwargs_dict)
        if why is None:
            named = _calls(self, *args_dict, kwargs_dict)
            calls = [call for _, call in named]
            found = edge_types.found_in(calls)
            if isinstance(found, Refused):
                why = found.why
            else:

                def run(number):
                    edge_type, (module, *_) = named[number]
                    return _called(module, edge_type, args_dict, kwargs_dict)

                results = edge_types.results_of(calls, found, run)
                if results is not None:
                    report.record(KIND, start)
                    return {target: _across(result, self.aggr) for target, result in results.items()}
        if why is not None:
            report.record(KIND, start, why)  # each layer is accelerated, or left, and counted by itself
        return original(self, *args_dict, **kwargs_dict)

    return forward


def _unusual(conv: Any, args_dict: tuple, kwargs_dict: dict) -> str | None:
    if conv.aggr not in ("sum", "mean"):
        return "an aggr of edge types other than sum and mean"
    usual = len(args_dict) == 2 and isinstance(args_dict[0], dict) and isinstance(args_dict[1], dict)
    if not usual or any(not name.endswith("_dict") for name in kwargs_dict):
        return "arguments other than x_dict and edge_index_dict by position"
    return edge_types.unusual()


def _across(result: edge_types.Results, aggr: str) -> Tensor:
    if not result.parts:
        return hetero_conv.group(result.others, aggr)
    first, *rest = result.parts + result.others
    total: Tensor = sum(rest, start=first)  # type: ignore[assignment]
    return total / (result.together + len(result.others)) if aggr == "mean" else total


def _calls(conv: Any, x_dict: dict, edge_index_dict: dict, kwargs_dict: dict) -> list[tuple[tuple, Call]]:
    """The calls that HeteroConv makes, with the edge type of each."""
    found = []
    types = _layout(conv)
    given = (edge_index_dict, x_dict, *kwargs_dict.values())
    for edge_type, module in zip(types, submodules(conv.convs).values(), strict=True):
        source, _, target = edge_type
        if edge_type not in edge_index_dict and not any(edge_type in values for values in given):
            continue
        operands = None
        if source in x_dict and target in x_dict:
            plain, weight = _is_plain_call(edge_type, x_dict, edge_index_dict, kwargs_dict)
            if plain:
                operands = Operands(
                    x_dict[source], x_dict[target], edge_index_dict[edge_type], source == target, weight
                )
        found.append((edge_type, Call(module, target, operands)))
    return found


_layouts: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()


def _layout(conv: Any) -> list[tuple]:
    """The edge types of a HeteroConv."""
    names, found = tuple(submodules(conv.convs)), _layouts.get(conv)
    if found is None or found[0] != names:
        found = _layouts[conv] = names, list(conv.convs.keys())
    return found[1]


def _is_plain_call(edge_type: tuple, x_dict: dict, edge_index_dict: dict, kwargs_dict: dict) -> tuple[bool, Any]:
    """True if the layer of `edge_type` gets node features and edges alone, and perhaps weights of these, and the
    weights."""
    if edge_type in x_dict or edge_type not in edge_index_dict:
        return False, None
    weight = None
    for name, values in kwargs_dict.items():
        if given := _given(values, edge_type):
            if name != "edge_weight_dict" or edge_type not in values:
                return False, None
            weight = given[0]
    return True, weight


def _given(values: dict, edge_type: tuple) -> tuple:
    """(what HeteroConv hands to the layer of `edge_type`,), or () for nothing."""
    source, _, target = edge_type
    if edge_type in values:
        return (values[edge_type],)
    if source == target:
        return (values[source],) if source in values else ()
    return ((values.get(source), values.get(target)),) if source in values or target in values else ()


def _called(module: Any, edge_type: tuple, args_dict: tuple, kwargs_dict: dict) -> Tensor:
    """The layer of one edge type, called as HeteroConv calls it."""
    args = [given[0] for values in args_dict if (given := _given(values, edge_type))]
    named = {name[:-5]: given[0] for name, values in kwargs_dict.items() if (given := _given(values, edge_type))}
    return module(*args, **named)


_hetero = Forward(pyg_nn.HeteroConv, _forward)
enable, disable = _hetero.enable, _hetero.disable
