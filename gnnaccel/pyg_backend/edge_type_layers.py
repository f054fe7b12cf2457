"""What a layer of one edge type does, as far as it is known: what gnnaccel/pyg_backend/edge_types.py puts together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gnnaccel import touch
from gnnaccel.graph.cache import derived, graph_key
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import EdgeList
from gnnaccel.ops.dot_layers import DotLayer
from gnnaccel.ops.gat_layers import GatLayer
from gnnaccel.ops.gatv2_layers import Gatv2Layer
from gnnaccel.ops.own_sums import OwnSum
from gnnaccel.ops.relation_sums import Term
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.attention_forwards import dot_layer, gat_layer, gatv2_layer
from gnnaccel.pyg_backend.rules import REDUCES
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.pyg_backend.update_order import ALLOWED
from gnnaccel.touch import own_buffers, own_parameters, submodules


class Layer(NamedTuple):
    """A layer that is a sum, a map, a bias, and a map of the destinations' `own` features. Bias and `own_weight` may be
    None.

    form : how the term's graph was made of `edges`.
    """

    term: Term
    bias: Tensor | None
    own: Tensor
    own_weight: Tensor | None
    edges: Tensor
    form: str


class Refused(NamedTuple):
    """Why layers are called one by one; None: there is nothing to take together, or edges are new, and may be gone
    after this call."""

    why: str | None


class Attending(NamedTuple):
    layer: GatLayer | Gatv2Layer | DotLayer
    edges: Tensor
    form: str


class Summing(NamedTuple):
    layer: OwnSum
    edges: Tensor
    form: str


_ATTEND = (pyg_nn.GATConv, pyg_nn.GATv2Conv, pyg_nn.TransformerConv)
_PLAIN_SUMS = (pyg_nn.SAGEConv, pyg_nn.GraphConv)
_MADE = (*_PLAIN_SUMS, pyg_nn.GINConv)
_LAYERS = (*_PLAIN_SUMS, pyg_nn.GCNConv, pyg_nn.GINConv, *_ATTEND)
# Layers that are taken together on these devices alone: on the CPU the sums of GINConv take as long (EPYC), and
# GATv2Conv by itself has passes that this has not.
_DEVICES: dict[Any, tuple[str, ...]] = {pyg_nn.GINConv: ("cuda",), pyg_nn.GATv2Conv: ("cuda",)}
_KNOWN: dict[Callable, Any] = {cls.forward: cls for cls in _LAYERS}


@functools.lru_cache(256)
def _kind(cls: Any) -> tuple[Any, short.Guard] | None:
    """The class of PyG's of which layers of class `cls` are, and what guards them; None for others."""
    plain = getattr(cls, "_gnnaccel_plain", None)
    known = None if plain is None else _KNOWN.get(plain.forward)
    if known is None:
        return None
    return known, short.Guard(plain, known, node_dims=(0,)) if known in _ATTEND else short.Guard(plain, known, _SUMS)


def is_known(cls: Any) -> bool:
    return _kind(cls) is not None


def is_attention(known: Any) -> bool:
    return known in _ATTEND


def _is_served(known: Any, some: Tensor) -> bool:
    return known not in _DEVICES or some.device.type in _DEVICES[known]


_SUMS = tuple(REDUCES)


def standing_kind(cls: Any, known: dict[Any, tuple[Any, short.Guard] | None]) -> tuple[Any, short.Guard] | None:
    """`_kind` of a class that nobody has changed, of which `known` has what was found in this call."""
    if cls not in known:
        kind = _kind(cls)
        known[cls] = kind if kind is not None and kind[1].unchanged() else None
    return known[cls]


def layer_of(
    conv: Any,
    standing: tuple[Any, short.Guard],
    x: Tensor,
    own: Tensor,
    edge_index: Any,
    square: bool,
    edge_weight: Any,
    new: str | None,
) -> Layer | Attending | Summing | Refused | None:
    """What a layer does, if it does no more; None if it does. Refused: its edges are new.

    new : for edges that may be new "listed" or "made": a list of them, or a graph, in place of a graph that was made of
    them before.
    """
    (known, guard), state = standing, conv.__dict__
    if new and (edge_weight is not None or known not in (_PLAIN_SUMS if new == "listed" else _MADE)):
        return None
    if known in _ATTEND:
        return None if edge_weight is not None else _attending(conv, known, guard, x, own, edge_index)
    if not guard.allows_layer(conv, edge_index) or short.hooked(conv) or ALLOWED in state:
        return None
    if known is pyg_nn.GINConv:
        return None if edge_weight is not None else _summing(conv, x, own, edge_index, new)
    if edge_weight is not None and not (known is pyg_nn.GraphConv and _are_weights(edge_weight, x, edge_index)):
        return None
    alike = x.dtype == own.dtype and x.device == own.device == edge_index.device
    if not alike or conv.flow != "source_to_target" or state.get(touch.COMPILED_CALL):
        return None
    names: tuple[str, str | None]
    modules, kind = submodules(conv), REDUCES.get(type(submodules(conv).get("aggr_module")))
    key: tuple = graph_key(x.shape[0], own.shape[0], conv.flow)
    if known is pyg_nn.GCNConv:
        usual = square and conv.normalize and not conv.cached and not conv.improved and kind == "sum"
        kind, names = "gcn", ("lin", None)
        if conv.add_self_loops:
            key = ("looped", x.shape[0], conv.flow, True)
    elif known is pyg_nn.SAGEConv:
        usual = not conv.project and not conv.normalize
        names = ("lin_l", "lin_r" if conv.root_weight else None)
    else:
        usual, names = True, ("lin_rel", "lin_root")
    if not usual or kind not in ("sum", "mean", "gcn"):
        return None
    maps = _maps(modules, names, x, own)
    if maps is None:
        return None
    weight, bias, own_weight = maps
    if known is pyg_nn.GCNConv:
        if bias is not None or "bias" not in own_parameters(conv):
            return None
        bias = own_parameters(conv)["bias"]
        if bias is not None and bias.dtype != x.dtype:
            return None
    if new == "listed":
        graph: Any = EdgeList(edge_index, own.shape[0], x.shape[0])
    else:
        graph = _made(edge_index, key) if new else derived.get((edge_index,), key)
    if graph is None:
        return None if new else Refused(None)
    term, form = Term(graph, x, weight, kind, True, edge_weight), "new" if new == "listed" else key[0]
    return Layer(term, bias, own, own_weight, edge_index, form)


def _attending(conv: Any, known: Any, guard: short.Guard, x: Tensor, own: Tensor, edge_index: Any) -> Attending | None:
    """What a layer of attention does, if it does no more, on edges that it has had before."""
    if short.hooked(conv) or submodules(conv).get("res") is not None or conv.__dict__.get(touch.COMPILED_CALL):
        return None
    if type(edge_index) is not Tensor or edge_index.device != x.device or own.dtype != x.dtype:
        return None
    if not (x.numel() and own.numel()):
        return None  # it would keep the others from being taken
    looped = known is not pyg_nn.TransformerConv and conv.add_self_loops
    key = ("looped", x.shape[0], conv.flow, True) if looped else graph_key(x.shape[0], own.shape[0], conv.flow)
    graph = derived.get((edge_index,), key)
    if graph is None or own.device != x.device or not _is_served(known, x):
        return None
    if known is pyg_nn.GATConv and not graph.nnz and x.is_cpu:
        return None  # by itself it maps nothing
    if known is pyg_nn.GATv2Conv:
        layer = gatv2_layer(conv, guard, x, own, edge_index, graph)
    elif known is pyg_nn.GATConv:
        layer = gat_layer(conv, guard, x, own, edge_index, lambda *_: graph)
    else:
        layer = dot_layer(conv, guard, x, own, edge_index, graph)
    return None if layer is None else Attending(layer, edge_index, key[0])


def _summing(conv: Any, x: Tensor, own: Tensor, edge_index: Tensor, new: str | None) -> Summing | None:
    """What a GINConv does before its `nn`, on edges that it has had before, or that are `new`."""
    eps = own_buffers(conv).get("eps", own_parameters(conv).get("eps"))
    if not (new or _is_served(pyg_nn.GINConv, x)) or REDUCES.get(type(submodules(conv)["aggr_module"])) != "sum":
        return None
    if type(eps) not in short.FEATURES or eps.numel() != 1 or eps.requires_grad or "nn" not in submodules(conv):
        return None
    alike = x.dtype == own.dtype == eps.dtype and x.device == own.device == edge_index.device == eps.device
    if not alike or x.shape[1] != own.shape[1] or not x.shape[1] or conv.flow != "source_to_target":
        return None
    key = graph_key(x.shape[0], own.shape[0], conv.flow)
    graph: Any = _made(edge_index, key) if new else derived.get((edge_index,), key)
    usual = graph is not None and not conv.__dict__.get(touch.COMPILED_CALL)
    return Summing(OwnSum(graph, x, own, eps), edge_index, "graph") if usual else None


def _made(edge_index: Tensor, key: tuple) -> Graph | EdgeList | None:
    """The graph of edges that may be new; None for an index out of range. Of no edges none is made."""
    _, num_src, num_dst, flow = key
    if edge_index.shape[1]:
        return short.graph_of(edge_index, num_src, num_dst, flow)
    return EdgeList(edge_index, num_dst, num_src)


def _are_weights(edge_weight: Any, x: Tensor, edge_index: Tensor) -> bool:
    """True for a number for each edge, of the features' kind."""
    if type(edge_weight) not in short.FEATURES or edge_weight.shape != edge_index.shape[1:]:
        return False
    return edge_weight.dtype == x.dtype and edge_weight.device == x.device


def _maps(modules: dict, names: tuple, x: Tensor, own: Tensor) -> tuple | None:
    """Weight and bias behind the sums, and the weight for the destinations' own features (None: there is none)."""
    found = short.parameters_of(modules.get(names[0]))
    if found is None or not _fits(found, x):
        return None
    if names[1] is None:
        return *found, None
    others = short.parameters_of(modules.get(names[1]))
    if others is None or others[1] is not None or not _fits(others, own) or others[0].shape[0] != found[0].shape[0]:
        return None
    return *found, others[0]


def _fits(maps: tuple, x: Tensor) -> bool:
    weight, bias = maps
    if weight.dtype != x.dtype or weight.device != x.device or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1])
