"""PyG's layers on one part of a graph: rows of the halo are fetched where a layer passes messages.

A layer is given features of the part's own nodes. All in-edges of these are here, so that sums, means, extremes and
softmaxes over them are those of the whole graph once the sources' rows are. Two ways, each for layers whose code was
read for it:

* pairs: layers that take features of sources and of destinations apart, ``conv((x_of_all, x_of_own), edge_index)``;
* norms: those of GCN's matrix. A degree is a sum over in-edges, so an own node's is known here, and rows are scaled by
  it before they are sent: D^-1/2 A D^-1/2 x reads no degree of a node of another part.

Any other layer is refused: one that reads rows of x in a way of its own would give wrong numbers without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import add_remaining_self_loops

from gnnaccel import ops, report, subclass, touch
from gnnaccel.graph import build, modes, scales
from gnnaccel.graph.cache import USED, derived, graph_key
from gnnaccel.graph.csr import Graph
from gnnaccel.pyg_backend import classes, short
from gnnaccel.pyg_backend.propagate import kind_of, obstacle
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.pyg_backend.touch import original_propagate


class Part(Protocol):
    """What a layer needs of its part (`gnnaccel.parts.Part`)."""

    edge_index: Tensor
    graph: Graph
    num_nodes: int
    num_halo: int

    def with_halo(self, x: Tensor) -> Tensor:
        """Rows of own nodes -> those of own and halo nodes."""

    def keeps(self, x: Tensor) -> bool:
        """Whether the halo of `x` is here already."""

    def sums(self, graph: Graph) -> Callable[[Tensor], Tensor]:
        """Rows of own nodes -> sums over the edges of `graph`, made while the halo's rows are on their way."""


def _pair(conv: Any, part: Part, x: Tensor, *args, **kwargs):
    return type(conv).forward(conv, (part.with_halo(x), x), part.edge_index, *args, **kwargs)


class _Matrix:
    """GCN's matrix D^-1/2 A D^-1/2 of a part's rows, with loops or without; or A, not normed."""

    def __init__(self, kind: str, part: Part, weight: Tensor | None, loops: bool, normed: bool, dtype: torch.dtype):
        self.kind, self.part, self.scale = kind, part, None
        self.graph, ids = _edges_of(part, loops and normed)
        self.weight = weight
        if weight is not None and ids is not None:
            self.weight = torch.where(ids >= 0, weight[ids.clamp(min=0)], weight.new_ones(()))
        if normed and weight is None:
            self.scale = scales.norm_scale(self.graph, dtype).to(dtype).view(-1, 1)
        elif normed:
            degree = ops.spmm(self.graph, None, self.weight, message="copy_rhs")
            self.scale = torch.where(degree == 0, degree, degree.pow(-0.5)).view(-1, 1)

    def __matmul__(self, x: Tensor) -> Tensor:
        report.count(self.kind)
        x = x if self.scale is None else x * self.scale
        if self.weight is None:
            out = self.part.sums(self.graph)(x)
        else:
            out = ops.spmm(self.graph, self.part.with_halo(x), self.weight)
        return out if self.scale is None else out * self.scale

    def over(self, every: Tensor) -> Tensor:
        """The product with rows of own and halo nodes, which are here; of a matrix without weights."""
        report.count(self.kind)
        if self.scale is None:
            return ops.spmm(self.graph, every)
        key = ("scale with halo", id(self.graph), every.dtype)
        scale = derived.get((self.part.edge_index,), key)
        if scale is None:
            with modes.outside_inference(grad=False):
                scale = self.part.with_halo(self.scale)
            derived.put((self.part.edge_index,), key, scale)
        return ops.spmm(self.graph, every * scale) * self.scale


def _edges_of(part: Part, loops: bool) -> tuple[Graph, Tensor | None]:
    """The graph of a part, and for each of its edges the one of edge_index that it is: with loops, of which -1 are new;
    None: they are the same."""
    if not loops:
        return part.graph, None
    num_all, given = part.num_nodes + part.num_halo, part.edge_index
    found = derived.get((given,), "looped part")
    if found is None:
        with modes.outside_inference(grad=False):
            ids = torch.arange(given.shape[1], device=given.device)
            edges, ids = add_remaining_self_loops(given, ids, -1, part.num_nodes)
            found = Graph(*build.edges_to_csr(edges, 1, part.num_nodes, num_all)), ids
        derived.put((given,), "looped part", found)
    return found


def _matrix_of(conv: Any, part: Part, x: Tensor, weight: Tensor | None, loops: bool, normed: bool = True) -> _Matrix:
    if getattr(conv, "improved", False):
        raise TypeError(f"{type(conv).__name__}: improved=True is not known on parts")
    if type(conv.aggr_module) is not pyg_nn.SumAggregation:
        raise TypeError(f"{type(conv).__name__}: aggr={conv.aggr!r} is not known on parts, expected 'add'")
    if weight is not None and weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    return _Matrix(_kind(conv), part, weight, loops, normed, x.dtype)


def _summed(conv: Any, part: Part, x: Tensor) -> Tensor:
    """Sums or means, as of conv, over the sources of own nodes."""
    report.count(_kind(conv))
    mean = type(conv.aggr_module) is pyg_nn.MeanAggregation
    graph, _ = _edges_of(part, loops=False)
    if part.keeps(x):
        return ops.spmm(graph, part.with_halo(x), reduce="mean" if mean else "sum")
    out = part.sums(graph)(x)
    return out / graph.indptr.diff().clamp(min=1).to(out.dtype).view(-1, 1) if mean else out


def _mapped(conv: Any, part: Part, x: Tensor, lin: Any) -> Tensor:
    """lin of `_summed`, in the order that sends the narrower rows."""
    narrows = type(lin) in (pyg_nn.Linear, torch.nn.Linear) and lin.weight.shape[0] < x.shape[1]
    if not narrows or part.keeps(x) or short.hooked(lin):
        return lin(_summed(conv, part, x))
    out = _summed(conv, part, F.linear(x, lin.weight))
    return out if lin.bias is None else out + lin.bias


def _sums_alone(conv: Any, edge_weight: Any = None) -> bool:
    """True for sums and means without weights, which `_summed` has."""
    return type(conv.aggr_module) in (pyg_nn.SumAggregation, pyg_nn.MeanAggregation) and edge_weight is None


def _sage(conv: Any, part: Part, x: Tensor, **nothing: Any) -> Tensor:
    if not _sums_alone(conv) or conv.project:
        return _pair(conv, part, x, **nothing)
    out = _mapped(conv, part, x, conv.lin_l)
    out = out + conv.lin_r(x) if conv.root_weight else out
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def _graph_conv(conv: Any, part: Part, x: Tensor, edge_weight: Tensor | None = None, **nothing: Any) -> Tensor:
    if not _sums_alone(conv, edge_weight):
        return _pair(conv, part, x, edge_weight, **nothing)
    return _mapped(conv, part, x, conv.lin_rel) + conv.lin_root(x)


def _gin(conv: Any, part: Part, x: Tensor, **nothing: Any) -> Tensor:
    if not _sums_alone(conv):
        return _pair(conv, part, x, **nothing)
    return conv.nn(_summed(conv, part, x) + (1 + conv.eps) * x)


def _gcn(conv: Any, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    matrix = _matrix_of(conv, part, x, edge_weight, conv.add_self_loops, conv.normalize)
    if edge_weight is None and part.keeps(x):  # nothing is sent then, forward or backward
        out = matrix.over(conv.lin(part.with_halo(x)))
    else:
        out = matrix @ conv.lin(x)
    return out if conv.bias is None else out + conv.bias


def _sg(conv: Any, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    matrix = _matrix_of(conv, part, x, edge_weight, conv.add_self_loops)
    for _ in range(conv.K):
        x = matrix @ x
    return conv.lin(x)


def _ssg(conv: Any, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    matrix, out = _matrix_of(conv, part, x, edge_weight, conv.add_self_loops), x * conv.alpha
    for _ in range(conv.K):
        x = matrix @ x
        out = out + (1 - conv.alpha) / conv.K * x
    return conv.lin(out)


def _tag(conv: Any, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    matrix = _matrix_of(conv, part, x, edge_weight, False, conv.normalize)
    first, *others = conv.lins
    out = first(x)
    for lin in others:
        x = matrix @ x
        out = out + lin(x)
    return out if conv.bias is None else out + conv.bias


def _appnp(conv: Any, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    if conv.dropout > 0 and conv.training:
        raise TypeError("APPNP: dropout of edges is not known on parts, expected dropout=0")
    matrix, own = _matrix_of(conv, part, x, edge_weight, conv.add_self_loops, conv.normalize), x
    for _ in range(conv.K):
        x = (matrix @ x) * (1 - conv.alpha) + conv.alpha * own
    return x


def _lg(conv: Any, part: Part, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    return _matrix_of(conv, part, x, edge_weight, False, conv.normalize) @ x


_PAIRS = (
    *("CGConv", "EdgeConv", "FeaStConv", "FiLMConv", "GATConv", "GATv2Conv", "GENConv", "GINConv", "GINEConv"),
    *("GeneralConv", "GraphConv", "LEConv", "MFConv", "NNConv", "ResGatedGraphConv", "SAGEConv"),
    *("SimpleConv", "TransformerConv", "WLConvContinuous"),
)
_PAIRED = {getattr(pyg_nn, name).forward for name in _PAIRS}
# Those whose sums are ours from end to end, where nobody has changed what they are made of.
_SUMMED: dict[Any, tuple[Any, Callable]] = {
    layer.forward: (layer, rule)
    for layer, rule in (
        *((pyg_nn.SAGEConv, _sage), (pyg_nn.GraphConv, _graph_conv), (pyg_nn.GINConv, _gin)),
        *((pyg_nn.GCNConv, _gcn), (pyg_nn.SGConv, _sg), (pyg_nn.SSGConv, _ssg), (pyg_nn.TAGConv, _tag)),
        *((pyg_nn.APPNP, _appnp), (pyg_nn.LGConv, _lg)),
    )
}
_MADE_OF = ("message", "aggregate", "update", "message_and_aggregate", "edge_update")
KNOWN = (*_PAIRS, "GCNConv", "SGConv", "SSGConv", "TAGConv", "APPNP", "LGConv")
# PyG's modules that give a row for each row, and those that only call others.
_BY_ROWS = (
    *(pyg_nn.BasicGNN, pyg_nn.BatchNorm, pyg_nn.JumpingKnowledge, pyg_nn.LayerNorm, pyg_nn.Linear, pyg_nn.MLP),
    *(pyg_nn.MessageNorm, pyg_nn.Sequential, pyg_nn.DeepGCNLayer, pyg_nn.TrimToLayer),
)


class _Forward:
    """The forward() of one layer on one part."""

    def __init__(self, conv: Any, part: Part, rule: Callable):
        self.conv, self.part, self.rule = conv, part, rule

    def __call__(self, x: Any, edge_index: Any, *args, **kwargs):
        self._check(x, edge_index, kwargs)
        rule = self.rule
        if rule is not _pair and (reason := obstacle(self.conv)) is not None:
            if _plain(self.conv).forward not in _PAIRED:
                raise TypeError(f"{type(self.conv).__name__}: {reason}, which is not known on parts")
            rule = _pair
        return rule(self.conv, self.part, x, *args, **kwargs)

    def _check(self, x: Any, edge_index: Any, kwargs: dict) -> None:
        name, given = type(self.conv).__name__, self.part.edge_index
        same = isinstance(edge_index, Tensor) and edge_index.layout is torch.strided
        if not same or edge_index.data_ptr() != given.data_ptr() or edge_index.shape != given.shape:
            raise ValueError(
                f"{name}: edge_index: expected that of the part that wrap() got (part.edge_index), got other edges"
            )
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != self.part.num_nodes:
            got = f"a {type(x).__name__}" if not isinstance(x, Tensor) else f"shape {tuple(x.shape)}"
            raise ValueError(f"{name}: x: expected [{self.part.num_nodes}, F], rows of this part's nodes, got {got}")
        if kwargs.get("size") is not None:
            raise ValueError(f"{name}: size: expected None, which a part knows by itself, got {kwargs['size']}")
        if touch.active_ddp() is not None:
            raise RuntimeError(
                "gnnaccel.distributed: the model is also in DistributedDataParallel, whose work wrap() does: leave "
                "one of the two out"
            )


def _kind(conv: Any) -> str:
    return kind_of(_plain(conv))


def _plain(module: Any) -> Any:
    return subclass.plain_of(module)


def _others(model: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules of PyG that are no part of a layer that passes messages, and these layers."""
    if any(cls.__module__.partition(".")[0] == "torch_geometric" for cls in _plain(model).__mro__):
        yield path, model
        if isinstance(model, MessagePassing):
            return
    for name, child in model.named_children():
        yield from _others(child, f"{path}.{name}".lstrip("."))


def _rule_of(plain: Any) -> Callable | None:
    """How layers of this class run on a part; None if that is not known."""
    if plain.propagate is original_propagate(plain) is not MessagePassing.propagate:
        return None  # the user's own
    layer, rule = _SUMMED.get(plain.forward, (None, None))
    if layer is not None and all(getattr(plain, name) is getattr(layer, name) for name in _MADE_OF):
        return rule
    return _pair if plain.forward in _PAIRED else None


def check_layers(model: torch.nn.Module, pairs: Sequence[type] = ()) -> list[tuple[Any, Callable]]:
    """The layers in `model` that pass messages, each with what runs it on a part.

    Raises
    ------
    TypeError
        For layers that are not known on parts.
    """
    found: list[tuple[Any, Callable]] = []
    for path, module in _others(model):
        where = f"wrap: model: {path or 'the model'} is a {type(module).__name__}"
        if isinstance(module, MessagePassing):
            rule = _pair if isinstance(module, tuple(pairs)) else _rule_of(_plain(module))
            if rule is None or "forward" in vars(module):
                raise TypeError(
                    f"{where}, whose messages are not known on parts; known are {', '.join(sorted(KNOWN))}. A layer of "
                    "your own that takes (x of sources, x of destinations): wrap(model, part, pairs=(ThatLayer,))"
                )
            if module.flow != "source_to_target":
                raise TypeError(f"{where} of flow {module.flow!r}, expected 'source_to_target'")
            found.append((module, rule))
        elif isinstance(module, pyg_nn.LayerNorm) and module.mode != "node":
            raise TypeError(f"{where} over the whole graph, which is not known on parts: LayerNorm(mode='node')")
        elif not isinstance(module, _BY_ROWS):
            raise TypeError(f"{where}, which may read more than the rows of one part, and is not known there")
    return found


def wrap_layers(found: Sequence[tuple[Any, Callable]], part: Part) -> None:
    """Make these layers ones that run on `part`, on our kernels."""
    # What PyG's edges stand for is here already.
    derived.put((part.edge_index,), graph_key(part.graph.num_cols, part.graph.num_rows), part.graph)
    derived.put((part.edge_index,), USED, True)
    for conv, rule in found:
        classes.accelerate(conv)
        object.__setattr__(conv, "forward", _Forward(conv, part, rule))
