"""Layers of gnnaccel.nn on one part of a graph: rows of the halo are fetched where a layer sums over edges.

A layer is given the part's graph, whose rows are own nodes and whose columns are own nodes, then halo, and features of
own nodes alone. These are the first of the columns, which is where layers look for destinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.nn.attention import AGNNConv, GATConv
from gnnaccel.nn.convolution import GCNConv, GINConv, SAGEConv
from gnnaccel.nn.models import GCN, GIN, GraphSAGE

KNOWN = (AGNNConv, GATConv, GCNConv, GINConv, SAGEConv)
_MADE_OF = (GCN, GIN, GraphSAGE)


class Part(Protocol):
    """What a layer needs of its part (`gnnaccel.parts.Part`)."""

    graph: Graph
    num_nodes: int

    def with_halo(self, x: Tensor) -> Tensor:
        """Rows of own nodes -> those of own and halo nodes."""

    def keeps(self, x: Tensor) -> bool:
        """Whether the halo of `x` is here already."""


def _gcn(conv: GCNConv, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    mapped = conv.narrows(x) and not part.keeps(x)  # the narrower rows are sent, those of a kept halo not at all
    return conv.finished(part.graph, part.with_halo(conv.linear(x) if mapped else x), edge_weight, mapped)


def _sage(conv: SAGEConv, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    mapped = conv.narrows(x) and not part.keeps(x)
    rows = part.with_halo(F.linear(x, conv.linear.weight) if mapped else x)
    out = conv.mean(part.graph, rows, edge_weight, mapped)
    return out if conv.root is None else out + conv.root(x)


def _plain(conv: Any, part: Part, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return type(conv).forward(conv, part.graph, part.with_halo(x), *args, **kwargs)


_RULES: dict[Any, Callable] = {GCNConv.forward: _gcn, SAGEConv.forward: _sage}


class _Forward:
    """The forward() of one layer on one part."""

    def __init__(self, conv: Any, part: Part):
        self.conv, self.part, self.rule = conv, part, _RULES.get(type(conv).forward, _plain)

    def __call__(self, graph: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        name, rows = type(self.conv).__name__, self.part.num_nodes
        if graph is not self.part.graph:
            raise ValueError(
                f"{name}: graph: expected that of the part that wrap() got (part.graph), got "
                f"{graph if isinstance(graph, Graph) else type(graph).__name__}"
            )
        if type(x) is not Tensor or x.dim() != 2 or x.shape[0] != rows:
            got = f"shape {tuple(x.shape)}" if type(x) is Tensor else f"a {type(x).__name__}"
            raise ValueError(f"{name}: x: expected [{rows}, F], rows of this part's nodes, got {got}")
        return self.rule(self.conv, self.part, x, *args, **kwargs)


def _ours(model: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules of gnnaccel.nn, not what is inside its layers."""
    if any(cls.__module__.startswith("gnnaccel.nn.") for cls in type(model).__mro__):
        yield path, model
        if isinstance(model, KNOWN):
            return
    for name, child in model.named_children():
        yield from _ours(child, f"{path}.{name}".lstrip("."))


def check_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of gnnaccel.nn in `model` that sum over edges.

    Raises
    ------
    TypeError
        For a module of gnnaccel.nn that is not known on parts.
    """
    found = []
    for path, module in _ours(model):
        known = any(type(module).forward is layer.forward for layer in KNOWN)
        if known and "forward" not in vars(module):
            found.append(module)
        elif not (isinstance(module, _MADE_OF) and any(type(module).forward is made.forward for made in _MADE_OF)):
            raise TypeError(
                f"wrap: model: {path or 'the model'} is a {type(module).__name__}, which is not known on parts; of "
                f"gnnaccel.nn are {', '.join(layer.__name__ for layer in KNOWN)}, and models made of them with ReLU"
            )
    return found


def wrap_layers(found: Sequence[torch.nn.Module], part: Part) -> None:
    """Make these layers ones that run on `part`."""
    for conv in found:
        object.__setattr__(conv, "forward", _Forward(conv, part))
