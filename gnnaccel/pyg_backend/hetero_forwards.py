"""Forwards of PyG's HGTConv and HANConv: one attention over the edges of all types, and linear maps as products for
each node type; after those of PyG 2.8. As forwards.py has them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv import han_conv, hgt_conv

from gnnaccel import report, touch
from gnnaccel.graph.cache import derived
from gnnaccel.ops import han_layers
from gnnaccel.ops.han_layers import han_attention
from gnnaccel.ops.hgt_layers import Ends, Features, Plan, Relations, hgt_layer, planned
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.attention import dropped
from gnnaccel.pyg_backend.touch import nn as pyg_nn
from gnnaccel.touch import own_parameters, submodules

_DTYPES = (torch.float32, torch.float64)
_INSIDE = ("_cat", "_construct_src_node_feat")
_OURS = tuple([getattr(pyg_nn.HGTConv, name) for name in _INSIDE])  # as PyG had them when this package was imported
_GROUP = han_conv.group
_EDGES = hgt_conv.construct_bipartite_edge_index
_FORWARDS = {layer: layer.forward for layer in (pyg_nn.HeteroLinear, pyg_nn.HeteroDictLinear)}


def _hgt(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.HGTConv, node_dims=(0,))

    @functools.wraps(general)
    def forward(self, x_dict, edge_index_dict):
        if torch.compiler.is_compiling():
            return general(self, x_dict, edge_index_dict)
        start = time.perf_counter()
        found = _arguments(self, guard, x_dict, edge_index_dict)
        if found is None:
            return general(self, x_dict, edge_index_dict)
        names, *arguments = found
        results = dict(zip(names, hgt_layer(*arguments), strict=True))
        report.record(guard.kind, start)
        return results

    return forward


def _arguments(conv: Any, guard: short.Guard, x_dict: Any, edge_index_dict: Any) -> tuple | None:
    """Names of the results and the arguments of `hgt_layer`; None where PyG is to see to the call."""
    if type(x_dict) is not dict or not isinstance(edge_index_dict, dict) or not edge_index_dict:
        return None
    if not guard.allows_all(conv, edge_index_dict.values()) or conv.flow != "source_to_target":
        return None
    plain = guard.plain
    if not all(short.is_matrix(x) for x in x_dict.values()):
        return None
    if hgt_conv.construct_bipartite_edge_index is not _EDGES:
        return None
    if any(
        getattr(plain, name) is not ours or name in conv.__dict__ for name, ours in zip(_INSIDE, _OURS, strict=True)
    ):
        return None
    before, after = (_maps(submodules(conv).get(name)) for name in ("kqv_lin", "out_lin"))
    keys, values = (_relation_map(submodules(conv).get(name)) for name in ("k_rel", "v_rel"))
    if before is None or after is None or keys is None or values is None:
        return None
    names = [name for name in before if name in x_dict]
    places = {name: place for place, name in enumerate(names)}
    types = _types(conv, edge_index_dict, places)
    if types is None or len(names) != len(x_dict):
        return None
    weights, biases = [before[name][0] for name in names], [before[name][1] for name in names]
    features = Features([x_dict[name] for name in names], weights, biases)
    priors = [conv.p_rel["__".join(edge_type)] for edge_type in edge_index_dict]
    relations = Relations(keys, values, priors)
    results = [name for name in names if name in conv.dst_node_types]
    if not all(name in after for name in results):
        return None
    skips = [conv.skip[name] if after[name][0].shape[0] == x_dict[name].shape[1] else None for name in results]
    weights, biases = [after[name][0] for name in results], [after[name][1] for name in results]
    ends = Ends([x_dict[name] for name in results], weights, biases, skips)
    if not _fit(conv, features, relations, ends):
        return None
    plan = _plan(edge_index_dict, types, features, [places[name] for name in results])
    return None if plan is None else (results, plan, features, relations, ends)


def _maps(layer: Any) -> dict[str, tuple[Tensor, Tensor]] | None:
    """By node type weight and bias of a HeteroDictLinear that nobody watches or has changed."""
    return _linear_maps(layer.lins) if _is_pygs(layer, pyg_nn.HeteroDictLinear) else None


def _linear_maps(layers: Any) -> dict[str, tuple[Tensor, Tensor]] | None:
    """By node type weight and bias of linear layers that nobody watches or has changed."""
    found = {}
    for name, lin in submodules(layers).items():
        pair = short.parameters_of(lin)
        if pair is None or pair[1] is None:
            return None
        found[name] = pair[0], pair[1]
    return found


def _relation_map(layer: Any) -> Tensor | None:
    if not _is_pygs(layer, pyg_nn.HeteroLinear) or own_parameters(layer).get("bias", layer) is not None:
        return None
    return own_parameters(layer).get("weight")


def _is_pygs(layer: Any, known: Any) -> bool:
    if type(layer) is not known or short.hooked(layer) or layer.__dict__.get(touch.COMPILED_CALL):
        return False
    forward = known.forward
    return forward is _FORWARDS[known] or getattr(forward, "__wrapped__", None) is _FORWARDS[known]


def _types(conv: Any, edge_types: dict, places: dict[str, int]) -> list[tuple[int, int, int]] | None:
    """Of each edge type the places of its ends and its number among the layer's, which has to rise: PyG takes the rows
    of its maps to be sorted."""
    found, last = [], -1
    for edge_type in edge_types:
        number = conv.edge_types_map.get(edge_type, -1)
        if number <= last or edge_type[0] not in places or edge_type[-1] not in places:
            return None
        found.append((places[edge_type[0]], places[edge_type[-1]], number))
        last = number
    return found


def _fit(conv: Any, features: Features, relations: Relations, ends: Ends) -> bool:
    """True for matrices and parameters of one dtype and device, of the shapes that PyG made them with."""
    wide, heads = conv.out_channels, conv.heads
    if not wide:
        return False
    shape = heads * len(conv.edge_types), wide // heads, wide // heads
    if relations.keys.shape != shape or relations.values.shape != shape:
        return False
    if any(prior.shape != (1, heads) for prior in relations.priors):
        return False
    for x, weight, bias in zip(*features, strict=True):
        if weight.shape != (3 * wide, x.shape[1]) or bias.shape != weight.shape[:1] or not x.shape[1]:
            return False
    for weight, bias in zip(ends.weights, ends.biases, strict=True):
        if weight.shape != (wide, wide) or bias.shape != (wide,):
            return False
    skips = [skip for skip in ends.skips if skip is not None]
    if any(skip.shape != (1,) for skip in skips):
        return False
    given = [*features.x, *features.weights, *features.biases, relations.keys, relations.values, *relations.priors]
    return _alike([*given, *ends.weights, *ends.biases, *skips])


def _plan(edge_index_dict: dict, types: list, features: Features, results: list[int]) -> Plan | None:
    """What is kept with the edges; None for an index out of range."""
    sizes = tuple([(x.shape[0], x.shape[1]) for x in features.x])
    # As in PyG, those that have no part in this at all get gradients of zeros.
    alone = sorted(set(range(len(sizes))) - {source for source, _, _ in types} - set(results))
    key = ("HGTConv", tuple(types), sizes, tuple(results))
    device = features.x[0].device
    return _kept(edge_index_dict, device, key, lambda edges: planned(edges, types, sizes, [*results, *alone]))


def _han(plain: Any, general: Callable) -> Callable:
    guard = short.Guard(plain, pyg_nn.HANConv, node_dims=(0,))

    @functools.wraps(general)
    def forward(self, x_dict, edge_index_dict, return_semantic_attention_weights=False):
        if torch.compiler.is_compiling():
            return general(self, x_dict, edge_index_dict, return_semantic_attention_weights)
        start = time.perf_counter()
        found = _han_arguments(self, guard, x_dict, edge_index_dict)
        if found is None:
            return general(self, x_dict, edge_index_dict, return_semantic_attention_weights)
        names, plan, maps = found
        scales = [dropped(self, maps.x[0], edges.shape[1]) for edges in edge_index_dict.values()]
        scale = None if scales[0] is None else torch.cat(scales).index_select(0, plan.order)
        outs = han_attention(plan, maps, scale, self.negative_slope)
        by_name = dict(zip([names[place] for place in plan.targets], _across(self, outs), strict=True))
        report.record(guard.kind, start)
        results, attention = {}, {}
        for name in x_dict:
            results[name], attention[name] = by_name.get(name, (None, None))
        return (results, attention) if return_semantic_attention_weights else results

    return forward


def _across(conv: Any, outs: list[Tensor]) -> Sequence[tuple[Tensor, Tensor | None]]:
    """PyG's group() of results [N, edge types, H * D] of node types, which it has one behind the other."""
    maps, query = short.parameters_of(conv.k_lin), conv.q
    usual = maps is not None and maps[0].shape == (query.shape[1],) * 2 and all(out.numel() for out in outs)
    if usual and maps[1] is not None and _alike([outs[0], query, maps[0], maps[1]]):  # type: ignore[index]
        return han_layers.across(outs, maps[0], maps[1], query)  # type: ignore[index]
    return [_GROUP(list(out.relu().unbind(1)), query, conv.k_lin) for out in outs]


def _han_arguments(conv: Any, guard: short.Guard, x_dict: Any, edge_index_dict: Any) -> tuple | None:
    """Names of node types, plan and maps of `han_attention`; None where PyG is to see to the call."""
    if type(x_dict) is not dict or not isinstance(edge_index_dict, dict) or not edge_index_dict:
        return None
    if not guard.allows_all(conv, edge_index_dict.values()) or conv.flow != "source_to_target":
        return None
    if han_conv.group is not _GROUP or not all(short.is_matrix(x) for x in x_dict.values()):
        return None
    used = {name for source, _, target in edge_index_dict for name in (source, target)}
    names = [name for name in x_dict if name in used]
    of_names = _linear_maps(conv.proj)
    if len(names) != len(used) or of_names is None or not x_dict.keys() <= of_names.keys():
        return None
    edge_types = ["__".join(edge_type) for edge_type in edge_index_dict]
    weights, biases = [of_names[name][0] for name in names], [of_names[name][1] for name in names]
    vectors = [[ends[name] for name in edge_types] for ends in (conv.lin_src, conv.lin_dst)]
    maps = han_layers.Maps([x_dict[name] for name in names], weights, biases, *vectors)
    if not _han_fit(conv, maps):
        return None
    places = {name: place for place, name in enumerate(names)}
    types = [(places[source], places[target]) for source, _, target in edge_index_dict]
    sizes = [x.shape[0] for x in maps.x]
    key = ("HANConv", tuple(types), tuple(sizes))
    plan = _kept(edge_index_dict, maps.x[0].device, key, lambda edges: han_layers.planned(edges, types, sizes))
    if plan is None or not han_layers.takes(plan, maps, conv.negative_slope):
        return None
    return names, plan, maps


def _han_fit(conv: Any, maps: han_layers.Maps) -> bool:
    """True for matrices and parameters of one dtype and device, of the shapes that PyG made them with."""
    wide, heads = conv.out_channels, conv.heads
    if not wide or any(vector.shape != (1, heads, wide // heads) for vector in (*maps.sources, *maps.targets)):
        return False
    for x, weight, bias in zip(*maps[:3], strict=True):
        if weight.shape != (wide, x.shape[1]) or bias.shape != (wide,) or not x.shape[1]:
            return False
    return wide % heads == 0 and _alike([t for part in maps for t in part])


def _kept(edge_index_dict: dict, device: torch.device, key: tuple, make: Callable) -> Any:
    """What make(edges) gives, kept with the edges; None where it is of an index out of range."""
    edges = tuple(edge_index_dict.values())
    if any(each.device != device for each in edges):
        return None
    plan = derived.get(edges, key)
    if plan is None:
        plan = make(edges)
        if plan is not None:
            derived.put(edges, key, plan)
    return plan


def _alike(given: list[Tensor]) -> bool:
    """True for plain tensors of one dtype and device, where autocast is off."""
    dtype, device = given[0].dtype, given[0].device
    if dtype not in _DTYPES or torch.is_autocast_enabled(device.type):
        return False
    for t in given:  # noqa: SIM110 - all() takes longer
        if t.dtype != dtype or t.device != device or type(t) not in short.FEATURES:
            return False
    return True


_MAKERS = ((pyg_nn.HGTConv, _hgt), (pyg_nn.HANConv, _han))
FORWARDS: dict[Callable, Callable] = {layer.forward: maker for layer, maker in _MAKERS}
"""forward() of a layer of PyG's -> what makes a short one of a class that has it, and of its general one."""
short.know(*(layer for layer, _ in _MAKERS))
