"""HeteroGraphConv of GraphConv and SAGEConv: the layers of all edge types into a node type as one sum and one product.

Where results are summed or averaged across types, the linear maps behind the sums of each type add up in one matrix
product over all types, and SAGEConv's maps of the destinations themselves are added up before they are applied.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from dgl.nn.pytorch import GraphConv, SAGEConv, hetero
from torch import Tensor, nn

from gnnaccel import report
from gnnaccel.dgl_backend import ops
from gnnaccel.dgl_backend.short import autocasting, is_plain
from gnnaccel.dgl_backend.structure import known_structures, stack_of
from gnnaccel.graph import modes
from gnnaccel.modules import is_watched
from gnnaccel.ops.relation_layers import Target, relation_layers
from gnnaccel.ops.relation_sums import Own, Term, is_profitable, relation_sums

KIND = "dgl.HeteroGraphConv"
_ACROSS = "an aggregate of edge types other than sum and mean"
_KINDS = {"none": "sum", "right": "mean", "left": "left", "both": "both"}  # of GraphConv's norm
_DTYPES = (torch.float32, torch.float64)


def forward(original):
    """HeteroGraphConv.forward."""

    def call(self, g, inputs, mod_args=None, mod_kwargs=None):
        if not is_plain(g) or autocasting() or ops.transformed() is not None or modes.faking():
            return original(self, g, inputs, mod_args, mod_kwargs)  # each layer sees to the mode, and counts it
        start = time.perf_counter()
        why = _obstacle(self, mod_args, mod_kwargs)
        found = None if why is not None else _layers(self, g, inputs)
        if isinstance(found, str):
            why = found
        if why is not None:
            report.record(KIND, start, why)  # each layer is accelerated, or left, and counted by itself
        if found is None or why is not None:
            return original(self, g, inputs, mod_args, mod_kwargs)
        out = {}
        apart = _one_after_another(g, {name: others for name, (_, others) in found.items()})
        walked = {name: together for name, (together, _) in found.items() if together}
        sums = dict(zip(walked, _together(g, list(walked.values())), strict=True))
        for name, (together, others) in found.items():
            results = apart[name]
            if together:
                results.append(sums[name])
            if results:
                total = _added(results)
                count = len(others) + len(together)
                out[name] = total / count if _reducer(self) is hetero._mean_reduce_func and count > 1 else total
        if walked:
            report.record(KIND, start)
        return out

    return call


def _one_after_another(g, others: dict[str, list]) -> dict[str, list]:
    """Results of layers by destination type, which are called in the order of the edge types: some draw numbers."""
    results: dict[str, list] = {name: [] for name in others}
    calls = [(number, name, *call) for name, of_type in others.items() for number, *call in of_type]
    for _, name, etype, layer, pair in sorted(calls, key=lambda call: call[0]):
        results[name].append(layer(g[etype], pair))
    return results


def _added(results: list) -> Tensor:
    """What DGL's stack and its sum are, without the stack."""
    alike = all(isinstance(t, Tensor) and t.shape == results[0].shape for t in results)
    return functools.reduce(torch.add, results) if alike else torch.stack(results).sum(0)


def _obstacle(conv, mod_args, mod_kwargs) -> str | None:
    if _reducer(conv) not in (hetero._sum_reduce_func, hetero._mean_reduce_func):
        return _ACROSS
    if mod_args or mod_kwargs:
        return "arguments of the edge types' layers"
    return modes.RECOMPUTING if modes.recomputing() else None


def _reducer(conv) -> Any:
    """What reduces the stack of results of a conv with one of DGL's own aggregates that makes one."""
    aggregate = conv.agg_fn
    own = type(aggregate) is functools.partial and aggregate.func is hetero._agg_func and not aggregate.args
    return aggregate.keywords.get("fn") if own and len(aggregate.keywords) == 1 else None


def _layers(conv, g, inputs) -> dict | str | None:
    """By destination type, in DGL's order: (edge type's number, term, own features, layer) of those layers to be taken
    together, and (number, edge type, layer, inputs) of the others, as all are of a graph that is new, which may be gone
    after this call. A reason where there are none to be taken together, and None for inputs of which DGL words the
    error."""
    pairs = _pairs(g, inputs)
    if pairs is None:
        return None
    graphs = known_structures(g._graph, [number for number, *_ in pairs])
    if graphs is None:
        return _one_by_one(conv, g, pairs)
    found: dict[str, tuple[list, list]] = {name: ([], []) for name in g.dsttypes}
    for (number, etype, source, target), graph in zip(pairs, graphs, strict=True):
        together, others = found[etype[2]]
        layer = conv._get_module(etype)
        term = _term(layer, graph, source, target)
        alike = term is not None and (not together or _alike(together[0], term, target))
        if alike:
            together.append((number, term, target, layer))
        else:
            others.append((number, etype, layer, (source, target)))
    for name, (together, others) in found.items():
        if together and (len(together) == 1 or not is_profitable([term for _, term, *_ in together])):
            types = {number: (etype, pair) for (number, etype, *pair) in pairs}
            again = [(n, types[n][0], layer, tuple(types[n][1])) for n, _, _, layer in together]
            found[name] = ([], again + others)
    if not any(together for together, _ in found.values()):
        return "layers that cannot be taken together"
    return found


def _one_by_one(conv, g, pairs: list[tuple]) -> dict:
    found: dict[str, tuple[list, list]] = {name: ([], []) for name in g.dsttypes}
    for number, etype, source, target in pairs:
        found[etype[2]][1].append((number, etype, conv._get_module(etype), (source, target)))
    return found


def _alike(first: tuple, term: Term, target: Tensor) -> bool:
    _, other, own, _ = first
    same = term.outputs == other.outputs and term.x.dtype == other.x.dtype
    return same and term.x.device == other.x.device and target is own


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


def _term(layer, graph, x, own) -> Term | None:
    """The sum and the map of a layer that does no more, but for a bias and SAGEConv's own map; None for another."""
    if type(layer) not in (GraphConv, SAGEConv) or is_watched(layer) or vars(layer).get("_compiled_call_impl"):
        return None
    if not isinstance(x, Tensor) or not isinstance(own, Tensor) or x.dim() != 2 or x.dtype not in _DTYPES:
        return None
    if x.shape[0] != graph.num_cols or x.device != graph.device or ops.unsupported(x) is not None:
        return None
    if type(layer) is GraphConv:
        weight, bias, kind = layer.weight, layer.bias, _KINDS.get(layer._norm)
        usual = layer._activation is None and layer._allow_zero_in_degree and weight is not None
    else:
        usual = layer._aggre_type == "mean" and _is_plain_sage(layer, own, x, graph)
        weight, bias, kind = (layer.fc_neigh.weight, layer.fc_self.bias, "mean") if usual else (None, None, None)
    if not usual or kind is None or not _takes(weight, x) or weight.dim() != 2:
        return None
    term = Term(graph, x, weight, kind, type(layer) is SAGEConv)
    if weight.shape[1 if term.transposed else 0] != x.shape[1]:
        return None
    return term if bias is None or (_takes(bias, x) and bias.shape == (term.outputs,)) else None


def _takes(parameter, x: Tensor) -> bool:
    return isinstance(parameter, Tensor) and parameter.dtype == x.dtype and parameter.device == x.device


def _is_plain_sage(layer, own, x: Tensor, graph) -> bool:
    if layer.activation is not None or layer.norm is not None:
        return False
    drop, maps = layer.feat_drop, (layer.fc_neigh, layer.fc_self)
    if type(drop) is not nn.Dropout or (drop.training and drop.p > 0) or is_watched(drop):
        return False
    if any(type(m) is not nn.Linear or is_watched(m) for m in maps) or layer.fc_neigh.bias is not None:
        return False
    if own.dim() != 2 or own.shape[0] != graph.num_rows or ops.unsupported(own) is not None:
        return False
    weight = layer.fc_self.weight
    return _takes(own, x) and _takes(weight, x) and weight.shape == (layer.fc_neigh.weight.shape[0], own.shape[1])


def _together(g, by_type: list[list[tuple]]) -> list[Tensor]:
    """The sums of the results of the layers of each destination type."""
    targets = [_target(g, together) for together in by_type]
    if by_type:
        made = relation_layers(targets, _keeper(g, [each for together in by_type for each in together]))
        if made is not None:
            return made
    return [relation_sums(terms, kept, biases, own) for terms, kept, biases, own in targets]


def _target(g, together: list[tuple]) -> Target:
    """What adds up the results of layers of one destination type."""
    owns = [layer.fc_self.weight for *_, layer in together if type(layer) is SAGEConv]
    biases = [layer.bias if type(layer) is GraphConv else layer.fc_self.bias for *_, layer in together]
    own = Own(together[0][2], owns) if owns else None
    terms = [term for _, term, *_ in together]
    return Target(terms, _keeper(g, together), [b for b in biases if b is not None], own)


def _keeper(g, together: list[tuple]) -> Callable:
    """What keeps with the graph what is made of the edge types of these layers."""
    numbers = tuple([number for number, *_ in together])

    def kept(key, make):
        return stack_of(g._graph, (numbers, key), make)

    return kept
