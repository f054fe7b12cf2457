"""Which rows of a gradient can be other than zero, told to nodes of autograd before a backward pass begins.

Of a sampled batch the loss is of the seeds: ``model(batch.x, batch.edge_index)[:batch.batch_size]``. That slice is
written in autograd's graph, and so is what happens between it and the layers. `telling` goes through it from the loss
on, and where all ways to a node lead through slices of its first rows, and through nothing but functions of each
element in between, the rest of its gradient is zero: the node finds the number of rows that count in `rows`. Nothing is
read that is on a GPU, and nobody waits.

Hooks on tensors or nodes may make something of a zero: nothing is told where any hook was registered since one of the
nodes was recorded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from gnnaccel import touch
from gnnaccel.lower import bounds

_ALL = sys.maxsize
# Of each element, or each row, alone, and zero of a zero: the gradient of the first input has the zero rows of theirs.
_ELEMENTWISE = frozenset(
    f"{name}Backward{number}"
    for number in "01"
    for name in (
        *("Relu", "LeakyRelu", "Prelu", "Elu", "Gelu", "Silu", "Mish", "Sigmoid", "Tanh", "Softplus", "Threshold"),
        *("Hardtanh", "Hardswish", "NativeDropout", "Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Clone", "Alias"),
        *("NativeLayerNorm", "LogSoftmax", "Softmax"),  # unless it goes over rows
    )
)
_nodes: dict[type, Callable[[Any, int], int]] = {}


def register(kind: type | None, reach: Callable[[Any, int], int]) -> None:
    """Tell nodes of this class, in their attribute `rows`; reach(node, rows): how many rows of its first input these
    have a gradient for. Their attribute `hooks` is what `recorded` gave when they were recorded."""
    if kind is not None:
        _nodes[kind] = reach


_ever: list[bool] = []  # not empty once a node has been recorded: before, no backward pass looks for any


def recorded() -> int:
    """A number that grows with each hook that is registered, for a node that is being recorded."""
    if not _ever:
        _ever.append(True)
    return RemovableHandle.next_id


def telling(original: Callable) -> Callable:
    """torch.autograd.backward, which tells the nodes first. None of what it tells outlives the pass."""

    @functools.wraps(original)
    def backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, *args, **kwargs):
        told: list = []
        if _ever and not create_graph:
            if not isinstance(tensors, (Tensor, GradientEdge)):
                tensors = tuple(tensors)
            roots = tensors if isinstance(tensors, tuple) and not isinstance(tensors, GradientEdge) else (tensors,)
            if all(isinstance(root, Tensor) for root in roots):
                told = _tell(roots)
        try:
            return original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
        finally:
            for node in told:
                node.rows = None

    return backward


def _tell(roots: Sequence[Tensor]) -> list:
    """The nodes that were told."""
    order = _consumers_first([root.grad_fn for root in roots if root.grad_fn is not None])
    now, any_ours = RemovableHandle.next_id, False
    for node in order:
        if type(node) in _nodes:
            any_ours = True
            if node.hooks != now:
                return []
    if not any_ours:
        return []
    rows = dict.fromkeys(order, 0)  # of its result that have a gradient
    for root in roots:
        if root.grad_fn in rows:
            rows[root.grad_fn] = _ALL
    told = []
    for node, producers in order.items():
        count, reach = rows[node], _nodes.get(type(node))
        if reach is not None and count < _ALL:
            node.rows = count
            told.append(node)
        for place, (producer, _) in enumerate(producers):
            if rows.get(producer, _ALL) < _ALL:
                if reach is not None:
                    passed = reach(node, count) if place == 0 and count < _ALL else _ALL
                else:
                    passed = _passed(node, count, producer)
                rows[producer] = max(rows[producer], passed)
    return told


def _passed(node: Any, count: int, producer: Any) -> int:
    """How many rows of the producer's result have a gradient, of a node whose own has for `count`."""
    name = node.name()
    if name == "SliceBackward0":
        dim, start, end, step = (touch.saved(node, of) for of in ("dim", "start", "end", "step"))
        of_first = dim == 0 and not start and step == 1 and isinstance(end, int) and end <= bounds.INT32_MAX
        return min(count, end) if of_first else _ALL
    if count >= _ALL or name not in _ELEMENTWISE or touch.shape_of(node) != touch.shape_of(producer):
        return _ALL
    return _ALL if _mixes_rows(node, name) else count


def _mixes_rows(node: Any, name: str) -> bool:
    dims = len(touch.shape_of(node))
    if "Softmax" in name:
        dim = touch.saved(node, "dim")
        return not isinstance(dim, int) or dim % (1 << 64) in (0, -dims % (1 << 64))  # unsigned there
    if "LayerNorm" not in name:
        return False
    shape = touch.saved(node, "normalized_shape")
    return shape is touch.UNTOLD or len(shape) >= dims


def _consumers_first(roots: Iterable[Any]) -> dict[Any, tuple]:
    """All nodes that have producers, and these, each before those whose results it has taken; none if there are too
    many."""
    order: list = []
    entered: set = set()
    for root in roots:
        if root in entered:
            continue
        entered.add(root)
        producers = root.next_functions
        path = [(root, producers, iter(producers))]
        while path:
            if len(entered) > bounds.GRADIENT_NODES:
                return {}
            node, producers, left = path[-1]
            for producer, _ in left:
                if producer is None or producer in entered:
                    continue
                entered.add(producer)
                if made_of := producer.next_functions:  # not of a leaf, to which nobody has anything to tell
                    path.append((producer, made_of, iter(made_of)))
                    break
            else:
                order.append((node, producers))
                path.pop()
    return dict(reversed(order))
