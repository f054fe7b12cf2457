"""The products of many edge types' sums with their maps, those of one shape together: one matrix that all maps are
brought into at once, one product for all destination types, and likewise for the gradients.

A destination type has its sums side by side, [rows, wide * F], and its maps [D, wide * F]: that of a sum may itself be
the sum of several. Types with as many sums, of one width, and as many outputs stand below each other, whatever their
numbers of rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import ready
from gnnaccel.ops.segment_matmul import matmul_op, weights_op
from gnnaccel.ops.spmm import FORMS, spmm

_matmul, _weights = matmul_op.impl, weights_op.impl  # type: ignore[attr-defined]


class Map(NamedTuple):
    """A map, as the `place` of a weight [D, F], or [F, D] unless `transposed`, of sum number `slot` of a group."""

    place: int
    transposed: bool
    slot: int = 0


class Group(NamedTuple):
    """Products of one shape.

    targets, sizes : the number of each destination type, and its rows.
    ptr : Tensor [len(targets) + 1], on the CPU
        Where the rows of each begin.
    maps : list of Map
        Those of each sum of each type, type by type. total: how many sums there are.
    below : Graph [len(targets) * D * wide, maps * D]
        What of all maps below each other is added up for a row of the matrix [len(targets), D, wide, F].
    """

    targets: list[int]
    sizes: list[int]
    ptr: Tensor
    wide: int
    maps: list[Map]
    total: int
    below: Graph
    rows_alike: bool


def group_of(targets: list[int], sizes: list[int], slots: list[list[Map]], outputs: int, device: Any) -> Group:
    """The products of `targets`, each with as many slots."""
    wide, numbers = len(slots) // len(targets), itertools.count()
    below = adding([[next(numbers) for _ in slot] for slot in slots], outputs, wide, device)
    ptr = torch.tensor([0, *itertools.accumulate(sizes)])
    maps = [each._replace(slot=number) for number, slot in enumerate(slots) for each in slot]
    return Group(targets, sizes, ptr, wide, maps, len(slots), below, len(set(sizes)) == 1)


def adding(slots: list[list[int]], outputs: int, wide: int, device: Any) -> Graph:
    """The graph of sums of rows [numbers * outputs] into rows [len(slots) / wide, outputs, wide]."""
    return _adding(tuple([tuple(slot) for slot in slots]), outputs, wide, device)


@functools.lru_cache(maxsize=64)  # layers of one shape have the same, whatever the batch
@torch.inference_mode(False)
def _adding(slots: tuple[tuple[int, ...], ...], outputs: int, wide: int, device: Any) -> Graph:
    each, found = torch.arange(outputs)[:, None], []
    counts = torch.tensor([len(slot) for slot in slots]).view(-1, 1, wide).expand(-1, outputs, -1)
    for first in range(0, len(slots), wide):
        numbers = [number for slot in slots[first : first + wide] for number in slot]
        found.append((torch.tensor(numbers, dtype=torch.int64) * outputs + each).flatten())
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)])
    indices = torch.cat(found)
    columns = sum(map(len, slots)) * outputs
    return Graph(indptr.to(device, torch.int32), indices.to(device, torch.int32), None, columns)


def added(graph: Graph, x: Tensor) -> Tensor:
    """The graph's sums of rows of x, of which nothing is recorded."""
    call = ready.call_of(graph, x, FORMS["sum"], None, None, None, False)
    return spmm(graph, x) if call is None else call.forward(x, None)


def matrix(group: Group, given: Sequence[Any]) -> Tensor:
    """All maps of a group, [types, D, wide * F]."""
    maps = [given[place] if transposed else given[place].t() for place, transposed, _ in group.maps]
    rows = added(group.below, torch.cat(maps))
    return rows.view(len(group.targets), -1, group.wide * rows.shape[1])


def products(group: Group, sums: Tensor, maps: Tensor) -> Tensor:
    """[rows of all types, D] of their sums [rows of all types, wide * F]."""
    if group.rows_alike:
        return torch.bmm(_by_type(group, sums), maps.transpose(1, 2)).view(sums.shape[0], maps.shape[1])
    return _matmul(sums, group.ptr, maps.transpose(1, 2))


def of_sums(group: Group, grad: Tensor, maps: Tensor) -> Tensor:
    """The gradient of the sums of `products`, of that of its result."""
    if group.rows_alike:
        return torch.bmm(_by_type(group, grad), maps).view(grad.shape[0], maps.shape[2])
    return _matmul(grad, group.ptr, maps)


def of_maps(group: Group, grad: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the maps of all sums, each [D, F]."""
    if group.rows_alike and (grad.is_cpu or group.sizes[0] <= bounds.BATCHED_MAP_ROWS):
        whole = torch.bmm(_by_type(group, grad).transpose(1, 2), _by_type(group, sums))
    else:
        whole = _weights(grad, group.ptr, sums, 0)
    # [types, D, wide, F], each map's gradient to lie as the map does: autograd would copy it elsewhere.
    each = whole.view(len(group.targets), grad.shape[1], group.wide, -1).transpose(1, 2).contiguous()
    return each.view(group.total, grad.shape[1], -1).unbind()


def _by_type(group: Group, rows: Tensor) -> Tensor:
    return rows.view(len(group.sizes), group.sizes[0], rows.shape[1])


def columns(sizes: list[int], grad: Tensor) -> Sequence[Tensor]:
    """The sum over the rows of each type, [D], of which there are `sizes`."""
    if len(set(sizes)) == 1:
        return grad.view(len(sizes), sizes[0], grad.shape[1]).sum(1).unbind()
    return [part.sum(0) for part in grad.split(sizes)]


def below(grads: Sequence[Tensor | None], sizes: list[int], like: Tensor, outputs: int) -> Tensor:
    """Gradients of results of so many rows below each other, zeros where nothing was made of one."""
    each = [like.new_zeros(n, outputs) if grad is None else grad for grad, n in zip(grads, sizes, strict=True)]
    return each[0].contiguous() if len(each) == 1 else torch.cat(each)
