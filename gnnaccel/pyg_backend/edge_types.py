"""The layers of many edge types, called together: what a HeteroConv and a model of to_hetero() have in common.

Where results are summed across types, the linear maps behind the sums of each type add up in one matrix product over
all types, and the layers' maps of the destinations themselves are added up before they are applied. Layers of attention
attend in one walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import touch
from gnnaccel._operators import nodes_of
from gnnaccel.graph import modes
from gnnaccel.graph.cache import derived
from gnnaccel.lower import bounds, choose
from gnnaccel.ops.dot_layers import DotLayer, dot_layers
from gnnaccel.ops.gat_layers import GatLayer, How, gat_layers
from gnnaccel.ops.gat_layers import is_profitable as gats_profit
from gnnaccel.ops.gatv2_layers import Gatv2Layer, gatv2_layers
from gnnaccel.ops.gatv2_layers import takes as gatv2_takes
from gnnaccel.ops.own_sums import is_profitable as sums_profit
from gnnaccel.ops.own_sums import own_sums
from gnnaccel.ops.relation_layers import Target, relation_layers, target_of
from gnnaccel.ops.relation_sums import is_profitable
from gnnaccel.pyg_backend import short
from gnnaccel.pyg_backend.edge_type_layers import (
    Attending,
    Layer,
    Refused,
    Summing,
    is_attention,
    is_known,
    layer_of,
    standing_kind,
)
from gnnaccel.pyg_backend.graph import hops_of

_DTYPES = (torch.float32, torch.float64)
UNUSUAL = "a mode of torch that each layer sees to by itself"


class Operands(NamedTuple):
    """What a layer is given that gets features and edges alone, and perhaps weights of these."""

    x: Any
    own: Any
    edges: Any
    square: bool
    weight: Any = None


class Call(NamedTuple):
    """A layer's call, whose result is one of those that are added up for `target`. No operands: it is given more."""

    module: Any
    target: Hashable
    operands: Operands | None


class Found(NamedTuple):
    """What calls do, by target in the order of the calls.

    sums : layers that are summed and mapped together. others : numbers of the calls that are to be made. attending : of
    GATConv, of GATv2Conv, and of TransformerConv into one type, by what these have in common. summing : of GINConv,
    those of the others, by number, whose sums are found together. each : on graphs that may be gone after this call.
    """

    sums: dict[Hashable, list[Layer]]
    others: dict[Hashable, list[int]]
    attending: dict[tuple, dict[Hashable, list[Attending]]]
    summing: dict[tuple, dict[int, Summing]]
    each: bool = False


class Results(NamedTuple):
    """Of one target: results of layers that were taken together, of how many, and those of the others one by one."""

    parts: list[Tensor]
    together: int
    others: list[Any]


def unusual() -> str | None:
    """Why no layers are to be taken together now."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or modes.faking():
        return UNUSUAL
    if touch.transforming():  # edges made in there have no memory of their own
        return UNUSUAL
    return modes.RECOMPUTING if modes.recomputing() else None


def found_in(calls: Sequence[Call]) -> Found | Refused:
    """Which of the calls are to be taken together."""
    some = next((call.operands.edges for call in calls if call.operands is not None), None)
    targets = [call.target for call in calls]
    on_cpu = type(some) is not Tensor or some.is_cpu
    if some is None or len(calls) < 2 or (on_cpu and len(set(targets)) == len(targets)):
        return Refused(None)  # nothing to be taken together
    if type(some) is not Tensor:
        return Refused("layers that cannot be taken together")
    if sum([call.operands is not None and is_known(type(call.module)) for call in calls]) < 2:
        return Refused("layers that cannot be taken together")
    if on_cpu and _trains_weights(calls) and _size(calls) <= bounds.TRAINED_WEIGHTS_TINY:
        return Refused(None)  # sums whose edges have such weights take less one by one
    fresh, new = _may_be_gone(some), None
    if fresh:
        if _are_sorted_together(calls, some):
            new = "listed"
        elif on_cpu:
            new = "made"
        else:
            return Refused(None)  # to join new graphs takes longer than it spares
    found = Found({}, {}, {}, {}, new == "made")
    plain: dict[int, bool] = {}
    classes: dict[Any, tuple[Any, short.Guard] | None] = {}
    numbers: dict[int, int] = {}
    for number, (module, target, operands) in enumerate(calls):
        together, others = found.sums.setdefault(target, []), found.others.setdefault(target, [])
        layer = None
        if operands is not None and _is_plain(operands.x, plain) and _is_plain(operands.own, plain):
            kind = standing_kind(type(module), classes)
            if kind is not None and fresh and on_cpu and is_attention(kind[0]):
                kind = None  # to join new graphs for one walk takes longer than it spares, at every size
            layer = None if kind is None else layer_of(module, kind, *operands, new)
        if isinstance(layer, Refused):
            return layer
        if isinstance(layer, Attending):
            form = type(layer.layer)
            # One walk into several types would give zeros to layers of a type that no loss is made of, and not None.
            slope, into = (None, target) if form is DotLayer else (module.negative_slope, None)
            key = (form, slope, into, module.heads, module.out_channels, module.concat, layer.layer.x.dtype)
            found.attending.setdefault(key, {}).setdefault(target, []).append(layer)
        elif isinstance(layer, Summing):
            others.append(number)
            found.summing.setdefault((layer.layer.x.shape[1], layer.layer.x.dtype), {})[number] = layer
            continue
        elif layer is not None and (not together or _alike(together[0], layer)):
            together.append(layer)
        else:
            others.append(number)
            continue
        numbers[id(layer)] = number
    count = sum(map(len, found.sums.values()))
    if found.each:
        return found if count + sum(map(len, found.summing.values())) > 1 else Refused(None)
    if new and count < bounds.SORTED_TOGETHER:
        return Refused(None)
    least = 2 if on_cpu or count < 2 else 1  # layers of a target
    for target, together in found.sums.items():
        profits = len(together) >= least and (not on_cpu or is_profitable([layer.term for layer in together]))
        if together and not profits:
            found.others[target] += [numbers[id(layer)] for layer in together]
            found.sums[target] = []
    for key, by_target in list(found.attending.items()):
        layers = [each.layer for part in by_target.values() for each in part]
        if not _attend_together(layers):
            for target, part in found.attending.pop(key).items():
                found.others[target] += [numbers[id(each)] for each in part]
    for key, by_number in list(found.summing.items()):
        if not sums_profit([each.layer for each in by_number.values()]):
            found.summing.pop(key)
    if found.attending or found.summing or any(found.sums.values()):
        return found
    return Refused(None if fresh and on_cpu else "layers that cannot be taken together")


def results_of(calls: Sequence[Call], found: Found, run: Callable[[int], Any]) -> dict[Hashable, Results] | None:
    """By target; run(number) makes one of the calls. None where layers take less one by one: nothing has been done."""
    parts: dict[Hashable, list[Tensor]] = {target: [] for target in found.others}
    counts = dict.fromkeys(found.others, 0)
    groups: list[tuple[dict, list[Tensor]]] = []
    for sums in nodes_of({target: some for target, some in found.sums.items() if some}, _tensors):
        made = relation_layers([_target(together) for together in sums.values()], _keeper(sums), found.each)
        if made is None:
            return None
        groups.append((sums, made))
    for (form, slope, _, heads, channels, concat, _), of_form in found.attending.items():
        for by_target in nodes_of(of_form, _tensors):
            targets: Any = [[each.layer for each in together] for together in by_target.values()]
            kept = _keeper(by_target)
            if form is DotLayer:
                outs = dot_layers(targets, heads, channels, concat, kept)
            else:
                attend = gat_layers if form is GatLayer else gatv2_layers
                outs = attend(targets, How(slope, concat), kept)
            groups.append((by_target, outs))
    for group, outs in groups:
        for (target, together), out in zip(group.items(), outs, strict=True):
            parts[target].append(out)
            counts[target] += len(together)
    ready: dict[int, Tensor] = {}
    for of_width in found.summing.values():
        for by_number in nodes_of({number: [each] for number, each in of_width.items()}, _tensors):
            some = [each for (each,) in by_number.values()]
            made = own_sums([one.layer for one in some], _keeper(by_number), found.each)
            ready.update(zip(by_number, made, strict=True))
    called = {}
    for number in sorted(itertools.chain(*found.others.values())):  # PyG's order, in which they draw random numbers
        called[number] = calls[number].module.nn(ready.pop(number)) if number in ready else run(number)
    return {
        target: Results(parts[target], counts[target], [called[number] for number in sorted(others)])
        for target, others in found.others.items()
    }


def _tensors(layers: Sequence[Layer | Attending | Summing]) -> list[Any]:
    """What is given to these layers, among other things."""
    found: list[Any] = []
    for layer in layers:
        found += (*layer, *(layer.term if isinstance(layer, Layer) else layer.layer))
    return found


def _attend_together(layers: list) -> bool:
    """True if these layers take less as one."""
    if type(layers[0]) is GatLayer:
        return gats_profit(layers)
    if type(layers[0]) is Gatv2Layer:
        return len(layers) > 1 and gatv2_takes(layers)
    if not layers[0].x.is_cpu:
        return len(layers) > 1 and _copied(layers) <= bounds.ONE_NODE_BYTES
    work = sum([layer.graph.num_cols * layer.value.weight.numel() for layer in layers])
    return len(layers) > 1 and work <= bounds.DOT_LAYERS_WORK


def _copied(layers: list[DotLayer]) -> int:
    """Bytes of keys, values and queries."""
    rows = sum([2 * layer.graph.num_cols + layer.graph.num_rows for layer in layers])
    return rows * layers[0].value.weight.shape[0] * layers[0].x.element_size()


def _size(calls: Sequence[Call]) -> int:
    features = {id(x): x for call in calls if call.operands is not None for x in call.operands[:2]}
    return len(calls) * sum([x.numel() for x in features.values() if isinstance(x, Tensor)])


def _trains_weights(calls: Sequence[Call]) -> bool:
    weights = [call.operands.weight for call in calls if call.operands is not None]
    return any(isinstance(weight, Tensor) and weight.requires_grad for weight in weights)


def _may_be_gone(some: Tensor) -> bool:
    """True for the first calls on these graphs: sampled ones may be gone after the layers of one step."""
    age = derived.get((some,), "age")
    if age is None:
        age = choose.Age()
        derived.put((some,), "age", age)
    new = choose.is_new(age)
    age.use()
    return new


_SORTED_ON = ("cuda",)  # where the edges of all types are sorted at once in a first call


def _are_sorted_together(calls: Sequence[Call], some: Tensor) -> bool:
    """True for layers on new edges that are many enough to be worth it; not in a capture, which may not wait."""
    if some.device.type not in _SORTED_ON or len(calls) < bounds.SORTED_TOGETHER or hops_of(some) is not None:
        return False
    return not (some.is_cuda and torch.cuda.is_current_stream_capturing())


def _is_plain(x: Any, known: dict[int, bool]) -> bool:
    found = known.get(id(x))
    if found is None:
        found = known[id(x)] = short.is_matrix(x) and x.dtype in _DTYPES
    return found


def _alike(first: Layer, layer: Layer) -> bool:
    x, other = first.term.x, layer.term.x
    if first.term.outputs != layer.term.outputs or x.dtype != other.dtype or x.device != other.device:
        return False
    return first.term.graph.num_rows == layer.term.graph.num_rows


def _target(layers: list[Layer]) -> Target:
    """What adds up the results of these layers."""
    biases, weights = [layer.bias for layer in layers], [layer.own_weight for layer in layers]
    return target_of([layer.term for layer in layers], _keeper({"": layers}), biases, layers[0].own, weights)


def _keeper(by_target: Any) -> Callable:
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
