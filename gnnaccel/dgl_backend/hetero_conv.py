"""HeteroGraphConv of GraphConv, SAGEConv, GATConv and GINConv: the layers of all edge types together.

Where results are summed or averaged across types, the linear maps behind the sums of each type add up in one matrix
product over all types, and SAGEConv's maps of the destinations themselves are added up before they are applied. Layers
of attention attend in one walk, and GINConv's sums are found in one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from dgl.nn.pytorch import GraphConv, SAGEConv
from torch import Tensor

from gnnaccel import report
from gnnaccel._operators import nodes_of
from gnnaccel.dgl_backend import ops
from gnnaccel.dgl_backend.hetero_layers import found_of
from gnnaccel.dgl_backend.short import autocasting, is_plain
from gnnaccel.dgl_backend.structure import known_structures, stack_of
from gnnaccel.dgl_backend.touch import MEAN_OF_TYPES, SUM_OF_TYPES, index_of, layer_of
from gnnaccel.graph import modes
from gnnaccel.ops.gat_layers import GatLayer, How, gat_layers
from gnnaccel.ops.gat_layers import is_profitable as attend_together
from gnnaccel.ops.own_sums import OwnSum, own_sums
from gnnaccel.ops.own_sums import is_profitable as sum_together
from gnnaccel.ops.relation_layers import Target, relation_layers, target_of
from gnnaccel.ops.relation_sums import Term, is_profitable, relation_sums
from gnnaccel.touch import own_parameters, submodules

KIND = "dgl.HeteroGraphConv"
_ACROSS = "an aggregate of edge types other than sum and mean"
_APART = "layers that cannot be taken together"


class Call(NamedTuple):
    """A layer's call: the edge type's number and name, the layer, and the features of sources and destinations."""

    number: int
    etype: tuple
    layer: Any
    pair: tuple


class Part(NamedTuple):
    """A call and what it does."""

    call: Call
    does: Any


class Found(NamedTuple):
    """What calls do. By destination type `sums`, those that are summed and mapped together, and `others`, those that
    are to be made; `attending`, by what these have in common and by destination type; and `summing`, those of GINConv,
    by what they have in common."""

    sums: dict[str, list[Part]]
    others: dict[str, list[Call]]
    attending: dict[tuple, dict[str, list[Part]]]
    summing: dict[tuple, list[Part]]


def forward(original):
    """HeteroGraphConv.forward."""

    def call(self, g, inputs, mod_args=None, mod_kwargs=None):
        if not is_plain(g) or autocasting() or ops.transformed() is not None or modes.faking():
            return original(self, g, inputs, mod_args, mod_kwargs)  # each layer sees to the mode, and counts it
        start = time.perf_counter()
        why = _obstacle(self, mod_args, mod_kwargs)
        found = None if why is not None else _found(self, g, inputs)
        if isinstance(found, str):
            why = found
        if why is not None:
            report.record(KIND, start, why)  # each layer is accelerated, or left, and counted by itself
        if found is None or why is not None:
            return original(self, g, inputs, mod_args, mod_kwargs)
        results, counts = _results(g, found)
        means = _reduces_by(self, MEAN_OF_TYPES)
        out = {}
        for name, parts in results.items():
            if parts:
                total = _added(parts)
                out[name] = total / counts[name] if means and counts[name] > 1 else total
        if any(found.sums.values()) or found.attending or found.summing:
            report.record(KIND, start)
        return out

    return call


def _results(g, found: Found) -> tuple[dict[str, list], dict[str, int]]:
    """Parts of the sum of each destination type, and of how many layers these are."""
    results: dict[str, list] = {name: [] for name in found.others}
    counts = {name: len(calls) for name, calls in found.others.items()}
    for name, result in _one_after_another(g, found):
        results[name].append(result)
    walked = {name: parts for name, parts in found.sums.items() if parts}
    groups = [(by_type, _together(g, list(by_type.values()))) for by_type in nodes_of(walked, _tensors)]
    for (slope, *shape, _), of_form in found.attending.items():
        for by_type in nodes_of(of_form, _tensors):
            layers = [[part.does for part in parts] for parts in by_type.values()]
            kept = _keeper(g, [part for parts in by_type.values() for part in parts])
            groups.append((by_type, [out.view(-1, *shape) for out in gat_layers(layers, How(slope, True), kept)]))
    for by_type, outs in groups:
        for (name, parts), out in zip(by_type.items(), outs, strict=True):
            results[name].append(out)
            counts[name] += len(parts)
    return results, counts


def _tensors(parts: list[Part]) -> list[Any]:
    """What is given to these layers, among other things."""
    found: list[Any] = []
    for part in parts:
        layer = part.call.layer
        found += (*part.does, *part.call.pair, *own_parameters(layer).values())
        for inner in submodules(layer).values():  # parameters() takes ten times as long
            found += () if inner is None else own_parameters(inner).values()
    return found


def _one_after_another(g, found: Found) -> list[tuple[str, Any]]:
    """(destination type, result) of the calls to be made, in the order of the edge types: some draw random numbers."""
    ready: dict[int, Tensor] = {}
    for of_width in found.summing.values():
        for by_number in nodes_of({part.call.number: [part] for part in of_width}, _tensors):
            parts = [part for (part,) in by_number.values()]
            ready.update(zip(by_number, own_sums([part.does for part in parts], _keeper(g, parts)), strict=True))
    results = []
    calls = [call for of_type in found.others.values() for call in of_type]
    for number, etype, layer, pair in sorted(calls, key=lambda call: call.number):
        out = _finished(layer, ready.pop(number)) if number in ready else layer(g[etype], pair)
        results.append((etype[2], out))
    return results


def _finished(layer, out: Tensor) -> Any:
    """What GINConv makes of its sums."""
    out = out if layer.apply_func is None else layer.apply_func(out)
    return out if layer.activation is None else layer.activation(out)


def _added(results: list) -> Tensor:
    """What DGL's stack and its sum are, without the stack."""
    alike = all(isinstance(t, Tensor) and t.shape == results[0].shape for t in results)
    return functools.reduce(torch.add, results) if alike else torch.stack(results).sum(0)


def _obstacle(conv, mod_args, mod_kwargs) -> str | None:
    if not (_reduces_by(conv, SUM_OF_TYPES) or _reduces_by(conv, MEAN_OF_TYPES)):
        return _ACROSS
    if mod_args or mod_kwargs:
        return "arguments of the edge types' layers"
    return modes.RECOMPUTING if modes.recomputing() else None


def _reduces_by(conv, how: functools.partial) -> bool:
    """True for a conv that reduces its results by one of DGL's own aggregates."""
    given = conv.agg_fn
    same = type(given) is functools.partial and given.func is how.func and given.args == how.args
    return same and given.keywords == how.keywords


def _found(conv, g, inputs) -> Found | str | None:
    """What the layers do; of a graph that is new, which may be gone after this call, all are to be called. A reason
    where there are none to be taken together, and None for inputs of which DGL words the error."""
    pairs = _pairs(g, inputs)
    if pairs is None:
        return None
    graphs = known_structures(index_of(g), [number for number, *_ in pairs])
    types = list(g.dsttypes)
    found = Found({name: [] for name in types}, {name: [] for name in types}, {}, {})
    for place, (number, etype, *pair) in enumerate(pairs):
        call, name = Call(number, etype, layer_of(conv, etype), tuple(pair)), etype[2]
        does = None if graphs is None else found_of(call.layer, graphs[place], *pair)
        part = Part(call, does)
        if isinstance(does, Term) and (not found.sums[name] or _alike(found.sums[name][0], part)):
            found.sums[name].append(part)
        elif isinstance(does, GatLayer):
            key = call.layer.leaky_relu.negative_slope, *does.att_src.shape[1:], does.x.dtype
            found.attending.setdefault(key, {}).setdefault(name, []).append(part)
        else:
            found.others[name].append(call)
            if isinstance(does, OwnSum):
                found.summing.setdefault((does.x.shape[1], does.x.dtype), []).append(part)
    if graphs is None:
        return found
    for name, parts in found.sums.items():
        if parts and (len(parts) == 1 or not is_profitable([part.does for part in parts])):
            found.others[name] += [part.call for part in parts]
            found.sums[name] = []
    for attending, by_type in list(found.attending.items()):
        if not attend_together([part.does for parts in by_type.values() for part in parts]):
            for name, parts in found.attending.pop(attending).items():
                found.others[name] += [part.call for part in parts]
    for summing, parts in list(found.summing.items()):
        if not sum_together([part.does for part in parts]):
            found.summing.pop(summing)
    together = any(found.sums.values()) or found.attending or found.summing
    return found if together else _APART


def _alike(first: Part, part: Part) -> bool:
    term, other = first.does, part.does
    same = term.outputs == other.outputs and term.x.dtype == other.x.dtype
    return same and term.x.device == other.x.device and first.call.pair[1] is part.call.pair[1]


def _pairs(g, inputs) -> list[tuple] | None:
    """(number, edge type, features of its sources, of its destinations), as HeteroGraphConv reads its inputs."""
    apart = isinstance(inputs, tuple) or g.is_block
    if not isinstance(inputs, tuple):
        sources = inputs
        targets = {k: v[: g.number_of_dst_nodes(k)] for k, v in inputs.items()} if g.is_block else inputs
    elif len(inputs) == 2:
        sources, targets = inputs
    else:
        return None
    found = []
    for number, etype in enumerate(g.canonical_etypes):
        if etype[0] not in sources:
            continue
        if etype[2] not in targets:
            if apart:
                continue
            return None
        found.append((number, etype, sources[etype[0]], targets[etype[2]]))
    return found


def _together(g, by_type: list[list[Part]]) -> list[Tensor]:
    """The sums of the results of the layers of each destination type."""
    targets = [_target(g, parts) for parts in by_type]
    if by_type:
        made = relation_layers(targets, _keeper(g, [part for parts in by_type for part in parts]))
        if made is not None:
            return made
    return [relation_sums(terms, kept, biases, own) for terms, kept, biases, own in targets]


def _target(g, parts: list[Part]) -> Target:
    """What adds up the results of layers of one destination type."""
    layers = [part.call.layer for part in parts]
    weights = [layer.fc_self.weight if type(layer) is SAGEConv else None for layer in layers]
    biases = [layer.bias if type(layer) is GraphConv else layer.fc_self.bias for layer in layers]
    return target_of([part.does for part in parts], _keeper(g, parts), biases, parts[0].call.pair[1], weights)


def _keeper(g, parts: list[Part]) -> Callable:
    """What keeps with the graph what is made of the edge types of these layers."""
    numbers = tuple([part.call.number for part in parts])

    def kept(key, make):
        return stack_of(index_of(g), (numbers, key), make)

    return kept
