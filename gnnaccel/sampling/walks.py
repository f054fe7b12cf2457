"""Random walks, and those of the second order of node2vec (Grover and Leskovec, KDD 2016)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gnnaccel.lower import bounds
from gnnaccel.sampling import _arrays
from gnnaccel.sampling._arrays import Relation

_ascending = WeakIdKeyDictionary()  # indices that were found in order, and their version then


def random_walk(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    length: int,
    *,
    p: float = 1.0,
    q: float = 1.0,
    seed: int | None = None,
) -> Tensor:
    """Walks that go on from each node to one of the nodes in its row.

    From the second step on, the next node x after t, v is drawn with a weight of

        1/p  if x is t        1  if row x has t        1/q  otherwise

    Parameters
    ----------
    indptr : Tensor [num_nodes + 1], int32 or int64
        From node v a walk goes on to one of indices[indptr[v]:indptr[v + 1]]: to follow edges, rows are sources.
    indices : Tensor [nnz], same dtype
        If q is not 1, ascending in each row.
    seeds : Tensor [num_walks], same dtype
        Where walks start.
    length : int
        Steps of each walk. At a node with an empty row it stays.
    p, q : float
        Above 0. A small p keeps walks around where they started, a small q leads them away.
    seed : int, optional
        Of the random numbers; default: drawn from torch's generator (`torch.manual_seed`).

    Returns
    -------
    Tensor [num_walks, length + 1], of the dtype of seeds
        The nodes of each walk, the seed first.

    Raises
    ------
    TypeError
        For tensors of the wrong dtype, a length that is no int.
    ValueError
        For wrong shapes, nodes out of range, a negative length, p or q not above 0, rows that do not ascend if q is not
        1, tensors on different devices.

    Notes
    -----
    Runs where the tensors are, in torch's own operations; the CPU and the GPU draw different walks from one seed. Rows
    are looked at as walks reach them; whether they ascend is found out once for a tensor of indices.

    Examples
    --------
    >>> import torch
    >>> from gnnaccel.sampling import random_walk
    >>> indptr, indices = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2])
    >>> random_walk(indptr, indices, torch.tensor([0, 1]), 2)
    tensor([[0, 1, 2],
            [1, 2, 2]])
    """
    op = "random_walk"
    device = _arrays.device_of(indptr)
    graph = Relation(op, indptr, indices, device=device)
    seeds = _arrays.index_array(op, "seeds", seeds, graph.indptr.dtype, device)
    if not isinstance(length, int):
        raise TypeError(f"{op}: length: expected an int, got {length!r}")
    if length < 0:
        raise ValueError(f"{op}: length: expected at least 0, got {length}")
    for name, value in (("p", p), ("q", q)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{op}: {name}: expected a finite number above 0, got {value}")
    if q != 1:
        _check_ascending(op, graph, indices)
    _check_inside(op, "seeds", graph, seeds)
    walks = _Walks(op, graph, torch.Generator(device).manual_seed(_arrays.random_seed(op, seed)))
    nodes = [seeds]
    for step in range(length):
        if step == 0 or (p == 1 and q == 1):
            nodes.append(walks.uniform(nodes[-1]))
        else:
            nodes.append(walks.second_order(nodes[-2], nodes[-1], float(p), float(q)))
    return torch.stack(nodes, 1)


def _check_inside(op: str, name: str, graph: Relation, nodes: Tensor) -> None:
    if nodes.numel():
        least, most = torch.aminmax(nodes)
        if not 0 <= int(least) <= int(most) < graph.num_rows:
            raise ValueError(f"{op}: {name}: expected nodes in [0, {graph.num_rows}), got {least} to {most}")


def _check_ascending(op: str, graph: Relation, given: Tensor) -> None:
    version = None if given.is_inference() else given._version
    if version is not None and _ascending.get(given) == version:
        return
    falls = (graph.indices.diff() < 0).nonzero().view(-1) + 1  # where a row may start, and nothing else
    first = graph.indptr[torch.searchsorted(graph.indptr, falls.to(graph.indptr.dtype)).clamp_(max=graph.num_rows)]
    if bool((first != falls).any()):
        raise ValueError(f"{op}: indices: expected them to ascend in each row, for a q that is not 1; sort them")
    if version is not None:
        _ascending[given] = version


class _Walks:
    """Steps of many walks at a time."""

    def __init__(self, op: str, graph: Relation, generator: torch.Generator):
        self._op, self._graph, self._generator = op, graph, generator

    def _rows(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """First edge and number of edges of each."""
        first, end = self._graph.indptr[nodes], self._graph.indptr[nodes + 1]
        if bool(((first < 0) | (end < first) | (end > self._graph.nnz)).any()):
            raise ValueError(f"{self._op}: indptr: expected ascending places in indices")
        return first, end - first

    def _random(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, dtype=torch.float64, device=like.device, generator=self._generator)

    def _read(self, places: Tensor) -> Tensor:
        found = self._graph.indices[places]
        _check_inside(self._op, "indices", self._graph, found)
        return found

    def uniform(self, nodes: Tensor) -> Tensor:
        """One of the nodes in the row of each, or the node itself where that is empty."""
        first, degree = self._rows(nodes)
        moves = degree > 0
        if not bool(moves.all()):
            out = nodes.clone()
            out[moves] = self.uniform(nodes[moves]) if bool(moves.any()) else nodes[moves]
            return out
        offset = (self._random(degree) * degree).to(degree.dtype).minimum(degree - 1)
        return self._read(first + offset)

    def second_order(self, before: Tensor, nodes: Tensor, p: float, q: float) -> Tensor:
        """The step after `before`, `nodes`: drawn uniformly, and kept with a probability by its weight."""
        out = nodes.clone()
        left = (self._rows(nodes)[1] > 0).nonzero().view(-1)
        largest, less, more = max(1 / p, 1.0, 1 / q), min(1.0, 1 / q), max(1.0, 1 / q)
        for _ in range(bounds.WALK_ROUNDS):
            if not left.numel():
                return out
            drawn, last = self.uniform(nodes[left]), before[left]
            chance = self._random(drawn) * largest
            kept = torch.where(drawn == last, chance < 1 / p, chance < less)
            open_ = ((drawn != last) & (chance >= less) & (chance < more)).nonzero().view(-1)
            if open_.numel():  # the rows of these alone have to be looked at
                kept[open_] = self._have(drawn[open_], last[open_]) if q > 1 else ~self._have(drawn[open_], last[open_])
            out[left[kept]] = drawn[kept]
            left = left[~kept]
        if left.numel():
            out[left] = self._weighted(before[left], nodes[left], p, q)
        return out

    def _weighted(self, before: Tensor, nodes: Tensor, p: float, q: float) -> Tensor:
        first, degree = self._rows(nodes)
        end = degree.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(nodes.numel(), device=nodes.device), degree)
        places = torch.arange(owner.numel(), device=nodes.device) + (first - (end - degree))[owner]
        found = self._read(places)
        ends = self._weights(before[owner], found, p, q).cumsum(0)
        last = ends[end - 1]
        start = torch.cat([last.new_zeros(1), last[:-1]])
        wanted = start + self._random(last) * (last - start)
        return found[torch.searchsorted(ends, wanted, right=True).clamp_(end - degree, end - 1)]

    def _weights(self, before: Tensor, drawn: Tensor, p: float, q: float) -> Tensor:
        weights = torch.full(drawn.shape, 1 / q, dtype=torch.float64, device=drawn.device)
        if q != 1:
            weights[self._have(drawn, before)] = 1.0
        weights[drawn == before] = 1 / p
        return weights

    def _have(self, rows: Tensor, values: Tensor) -> Tensor:
        """True where the row of each holds its value, by bisection."""
        low, degree = self._rows(rows)
        end = low + degree
        high, last = end, max(self._graph.nnz - 1, 0)
        for _ in range(int(degree.max()).bit_length() if degree.numel() else 0):
            middle = (low + high) // 2
            less = (low < high) & (self._graph.indices[middle.clamp(max=last)] < values)
            low, high = torch.where(less, middle + 1, low), torch.where(less, high, middle)
        return (low < end) & (self._graph.indices[low.clamp(max=last)] == values)
