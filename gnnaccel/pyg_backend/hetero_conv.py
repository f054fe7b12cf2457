"""HeteroConv of SAGEConv, GraphConv and GCNConv: the layers of all edge types into a node type as one sum and product.

Where results are summed or averaged across types, the linear maps behind the sums of each type add up in one matrix
product over all types, and the layers' maps of the destinations themselves are added up before they are applied.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.nn.conv import hetero_conv

from gnnaccel import report
from gnnaccel.graph import modes
from gnnaccel.graph.cache import derived
from gnnaccel.ops.dot_layers import DotLayer, dot_layers
from gnnaccel.ops.gat_layers import GatLayer, How, gat_layers, takes
from gnnaccel.ops.ready import ONCE
from gnnaccel.ops.relation_layers import Target, relation_layers
from gnnaccel.ops.relation_sums import Own, Term, is_profitable
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.attention_forwards import dot_layer, gat_layer
from gnnaccel.pyg_backend.classes import is_accelerated
from gnnaccel.pyg_backend.rules import REDUCES
from gnnaccel.pyg_backend.update_order import ALLOWED

KIND = "pyg.HeteroConv"
_DTYPES = (torch.float32, torch.float64)
_originals: list[Callable] = []


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


def enable() -> None:
    """Have every HeteroConv take its accelerated layers together; does nothing the second time."""
    if not _originals:
        _originals.append(pyg_nn.HeteroConv.forward)
        pyg_nn.HeteroConv.forward = _forward(_originals[0])


def disable() -> None:
    """Undo `enable`."""
    if _originals:
        pyg_nn.HeteroConv.forward = _originals.pop()


def _forward(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self, *args_dict, **kwargs_dict):
        if torch.compiler.is_compiling() or not any(is_accelerated(conv) for conv in self.convs._modules.values()):
            return original(self, *args_dict, **kwargs_dict)
        start = time.perf_counter()
        why = _unusual(self, args_dict, kwargs_dict)
        if why is None:
            found = _layers(self, *args_dict, kwargs_dict)
            if not isinstance(found, Refused):
                out = _results(self, found, args_dict, kwargs_dict)
                if out is not None:
                    report.record(KIND, start)
                    return out
            else:
                why = found.why
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
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or modes.faking():
        return "a mode of torch that each layer sees to by itself"
    return modes.RECOMPUTING if modes.recomputing() else None


class Found(NamedTuple):
    """What the layers of a HeteroConv do, by destination type in PyG's order.

    sums : layers that are summed and mapped together. others : (number, layer, edge type) of those to be called, by the
    order of edge types. attending : of GATConv, and of TransformerConv into one type, by what these have in common.
    """

    sums: dict[str, list[Layer]]
    others: dict[str, list[tuple]]
    attending: dict[tuple, dict[str, list[Attending]]]


class Attending(NamedTuple):
    layer: GatLayer | DotLayer
    edges: Tensor
    form: str


def _layers(conv: Any, x_dict: dict, edge_index_dict: dict, kwargs_dict: dict) -> Found | Refused:
    found = Found({}, {}, {})
    calls: dict[int, tuple] = {}
    edge_types, counts = _layout(conv)
    if max(counts.values(), default=0) < 2:
        return Refused(None)  # nothing to be taken together
    if _are_tiny(len(edge_types), x_dict, edge_index_dict) and (kwargs_dict or _may_be_gone(edge_index_dict)):
        return Refused(None)  # where sums whose edges have factors take less one by one, too
    plain_features = {name for name, x in x_dict.items() if short.is_matrix(x) and x.dtype in _DTYPES}
    given = (edge_index_dict, x_dict, *kwargs_dict.values())
    for number, (edge_type, module) in enumerate(zip(edge_types, conv.convs._modules.values(), strict=True)):
        source, _, target = edge_type
        if edge_type not in edge_index_dict and not any(edge_type in values for values in given):
            continue
        together, others = found.sums.setdefault(target, []), found.others.setdefault(target, [])
        layer = None
        if source in plain_features and target in plain_features:
            plain, weight = _is_plain_call(edge_type, x_dict, edge_index_dict, kwargs_dict)
            if plain:
                square, edges = source == target, edge_index_dict[edge_type]
                layer = _layer(module, x_dict[source], x_dict[target], edges, square, weight)
        if isinstance(layer, Refused):
            return layer
        if isinstance(layer, Attending):
            # One walk into several types would give zeros to layers of a type that no loss is made of, and not None.
            slope, into = (module.negative_slope, None) if type(layer.layer) is GatLayer else (None, target)
            key = (slope, into, module.heads, module.out_channels, module.concat, layer.layer.x.dtype)
            found.attending.setdefault(key, {}).setdefault(target, []).append(layer)
        elif layer is not None and counts[target] > 1 and (not together or _alike(together[0], layer)):
            together.append(layer)
        else:
            others.append((number, module, edge_type))
            continue
        calls[id(layer)] = number, module, edge_type
    for target, together in found.sums.items():
        if together and (len(together) == 1 or not is_profitable([layer.term for layer in together])):
            found.others[target] += [calls[id(layer)] for layer in together]
            found.sums[target] = []
    for key, by_target in list(found.attending.items()):
        layers = [each.layer for part in by_target.values() for each in part]
        if len(layers) < 2 or not _attend_together(layers):
            for target, part in found.attending.pop(key).items():
                found.others[target] += [calls[id(each)] for each in part]
    some = found.attending or any(found.sums.values())
    return found if some else Refused("layers that cannot be taken together")


def _attend_together(layers: list) -> bool:
    """True if these layers take less as one."""
    gat = type(layers[0]) is GatLayer
    maps = [layer.weight_src if gat else layer.value.weight for layer in layers]
    work = sum([layer.graph.num_cols * weight.numel() for layer, weight in zip(layers, maps, strict=True)])
    return work <= (_ATTENDING if gat else _MAPPED) and (not gat or takes(layers))


# Multiplications of the maps, from which on rows that are copied cost more than calls: of GATConv, and of
# TransformerConv, whose destinations are mapped too (EPYC, one thread).
_ATTENDING, _MAPPED = 1 << 27, 1 << 24
_TINY = 1 << 18  # features times layers, up to which to join new graphs takes longer than it spares (EPYC)


def _are_tiny(count: int, x_dict: dict, edge_index_dict: dict) -> bool:
    some = next(iter(edge_index_dict.values()), None)
    if type(some) is not Tensor or not some.is_cpu:
        return False
    return count * sum([x.numel() for x in x_dict.values() if isinstance(x, Tensor)]) <= _TINY


def _may_be_gone(edge_index_dict: dict) -> bool:
    """True for the first calls on these graphs: sampled ones may be gone after the layers of one step."""
    some = next(iter(edge_index_dict.values()))
    uses = derived.get((some,), "HeteroConv")
    if uses is None:
        derived.put((some,), "HeteroConv", [1])
        return True
    uses[0] += 1
    return uses[0] <= ONCE + 1


_layouts: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()


def _layout(conv: Any) -> tuple[list[tuple], Counter]:
    """The edge types of a HeteroConv, and how many lead into each node type."""
    names, found = tuple(conv.convs._modules), _layouts.get(conv)
    if found is None or found[0] != names:
        edge_types = list(conv.convs.keys())
        found = _layouts[conv] = names, edge_types, Counter([edge_type[-1] for edge_type in edge_types])
    return found[1], found[2]


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


def _alike(first: Layer, layer: Layer) -> bool:
    x, other = first.term.x, layer.term.x
    if first.term.outputs != layer.term.outputs or x.dtype != other.dtype or x.device != other.device:
        return False
    return first.term.graph.num_rows == layer.term.graph.num_rows


@functools.lru_cache(256)
def _guard(plain: type, known: type) -> short.Guard:
    return short.Guard(plain, known, tuple(REDUCES))


_ATTEND = (pyg_nn.GATConv, pyg_nn.TransformerConv)
_LAYERS = (pyg_nn.SAGEConv, pyg_nn.GraphConv, pyg_nn.GCNConv, *_ATTEND)
_KNOWN: dict[Callable, Any] = {cls.forward: cls for cls in _LAYERS}


def _layer(
    conv: Any, x: Tensor, own: Tensor, edge_index: Any, square: bool, edge_weight: Any
) -> Layer | Attending | Refused | None:
    """What a layer does, if it does no more; None if it does, or another layer. Refused: its edges are new."""
    plain, state = getattr(type(conv), "_gnnaccel_plain", None), conv.__dict__
    known = None if plain is None else _KNOWN.get(plain.forward)
    if plain is not None and known in _ATTEND:
        return None if edge_weight is not None else _attending(conv, known, plain, x, own, edge_index)
    if known is None or not _guard(plain, known).allows(conv, edge_index) or short.hooked(conv) or ALLOWED in state:
        return None
    if edge_weight is not None and not (known is pyg_nn.GraphConv and _are_weights(edge_weight, x, edge_index)):
        return None
    alike = x.dtype == own.dtype and x.device == own.device == edge_index.device
    if not alike or conv.flow != "source_to_target" or state.get("_compiled_call_impl"):
        return None
    names: tuple[str, str | None]
    modules, kind = conv._modules, REDUCES.get(type(conv._modules.get("aggr_module")))
    key: tuple = ("graph", x.shape[0], own.shape[0], conv.flow)
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
        if bias is not None or "bias" not in conv._parameters:
            return None
        bias = conv._parameters["bias"]
        if bias is not None and bias.dtype != x.dtype:
            return None
    graph = derived.get((edge_index,), key)
    if graph is None:
        return Refused(None)
    return Layer(Term(graph, x, weight, kind, True, edge_weight), bias, own, own_weight, edge_index, key[0])


@functools.lru_cache(256)
def _attention_guard(plain: type, known: type) -> short.Guard:
    return short.Guard(plain, known, node_dims=(0,))


def _attending(conv: Any, known: Any, plain: type, x: Tensor, own: Tensor, edge_index: Any) -> Attending | None:
    """What a layer of attention does, if it does no more, on edges that it has had before."""
    if short.hooked(conv) or conv._modules.get("res") is not None or conv.__dict__.get("_compiled_call_impl"):
        return None
    if type(edge_index) is not Tensor or edge_index.device != x.device or own.dtype != x.dtype:
        return None
    looped = known is pyg_nn.GATConv and conv.add_self_loops
    key = ("looped", x.shape[0], conv.flow, True) if looped else ("graph", x.shape[0], own.shape[0], conv.flow)
    graph, guard = derived.get((edge_index,), key), _attention_guard(plain, known)
    if graph is None or own.device != x.device:
        return None
    if known is pyg_nn.GATConv:
        layer = gat_layer(conv, guard, x, own, edge_index, lambda *_: graph)
    else:
        layer = dot_layer(conv, guard, x, own, edge_index, graph)
    return None if layer is None else Attending(layer, edge_index, key[0])


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


def _called(module: Any, edge_type: tuple, args_dict: tuple, kwargs_dict: dict) -> Tensor:
    """The layer of one edge type, called as HeteroConv calls it."""
    args = [given[0] for values in args_dict if (given := _given(values, edge_type))]
    named = {name[:-5]: given[0] for name, values in kwargs_dict.items() if (given := _given(values, edge_type))}
    return module(*args, **named)


def _results(conv: Any, found: Found, args_dict: tuple, kwargs_dict: dict) -> dict[str, Tensor] | None:
    """By destination type; None where layers take less one by one."""
    parts: dict[str, list[Tensor]] = {target: [] for target in found.others}
    counts = {target: len(others) for target, others in found.others.items()}
    groups: list[tuple[dict, list[Tensor]]] = []
    sums = {target: together for target, together in found.sums.items() if together}
    if sums:
        made = relation_layers([_target(together) for together in sums.values()], _keeper(sums))
        if made is None:
            return None
        groups.append((sums, made))
    for (slope, _, heads, channels, concat, _), by_target in found.attending.items():
        targets: Any = [[each.layer for each in together] for together in by_target.values()]
        kept = _keeper(by_target)
        gat = slope is not None
        outs = (
            gat_layers(targets, How(slope, concat), kept) if gat else dot_layers(targets, heads, channels, concat, kept)
        )
        groups.append((by_target, outs))
    for group, outs in groups:
        for (target, together), out in zip(group.items(), outs, strict=True):
            parts[target].append(out)
            counts[target] += len(together)
    called = {}  # in PyG's order, in which they draw random numbers
    for number, module, edge_type in sorted(itertools.chain(*found.others.values()), key=operator.itemgetter(0)):
        called[number] = _called(module, edge_type, args_dict, kwargs_dict)
    results = {}
    for target, others in found.others.items():
        each = [called[number] for number, _, _ in sorted(others, key=operator.itemgetter(0))]
        if not parts[target]:
            results[target] = hetero_conv.group(each, conv.aggr)
            continue
        first, *rest = parts[target] + each
        total = sum(rest, start=first)
        results[target] = total / counts[target] if conv.aggr == "mean" else total
    return results


def _target(layers: list[Layer]) -> Target:
    """What adds up the results of these layers."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    owns = [layer.own_weight for layer in layers if layer.own_weight is not None]
    own = Own(layers[0].own, owns) if owns else None
    return Target([layer.term for layer in layers], _keeper({"": layers}), biases, own)


def _keeper(by_target: dict[str, list]) -> Callable:
    """What keeps with the edges of these layers what is made of them."""
    layers = [layer for together in by_target.values() for layer in together]
    owners, forms = tuple([layer.edges for layer in layers]), tuple([layer.form for layer in layers])

    def kept(key, make):
        key = ("relations", forms, key)
        stack = derived.get(owners, key)
        if stack is None:
            stack = make()
            derived.put(owners, key, stack)
        return stack

    return kept
