"""Subgraphs and samples by layers in torch's own operations: how a GPU makes them. Any device can, which is how the
tests compare.

What they do is a pass over the rows of the nodes of a batch, which on a GPU takes less than their sizes take to come
to the host: there is nothing for a kernel of ours to win. What counts is how much the host launches and how often it
waits, so all relations go through each pass together: their rows lie one after the other, and nodes of all types have
one numbering.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.lower import bounds
from gnnaccel.sampling import ahead
from gnnaccel.sampling._arrays import Relation

_SHARE_BITS = 40  # of what a node gives away: whole numbers, whose sum is the same in any order
_INFINITE = 0x7FF << 52  # the bits of a double


def serves(array: Tensor) -> bool:
    """Whether what is sampled from this is sampled here."""
    return array.is_cuda


class Problem:
    """Relations of one device and dtype of indices between types of nodes.

    Parameters
    ----------
    op : str
        In whose name errors are.
    relations : list of Relation
    ends : list of (int, int)
        Type of the sources, and of the destinations, of each relation.
    sizes : list of int
        How many nodes there are of each type, -1 where nobody says it.
    """

    def __init__(
        self, op: str, relations: Sequence[Relation], ends: Sequence[tuple[int, int]], sizes: Sequence[int]
    ) -> None:
        self.op, self.relations, self.ends, self.sizes = op, list(relations), list(ends), list(sizes)
        self.dtype, self.device = relations[0].indptr.dtype, relations[0].indptr.device
        # Numbers of several types are below 2^62. Of a type whose number nobody says, any that is left is one.
        most = (1 << 61) // len(sizes) if len(sizes) > 1 else (1 << 63) - 1
        unknown = min(1 << 31, most) if self.dtype == torch.int32 else most
        self.spans = [unknown if size < 0 else size for size in sizes]
        self.bases = [0, *itertools.accumulate(self.spans)]
        self._known = [
            (self.bases[target], relation.num_rows - 1, relation.nnz, self.bases[source], self.spans[source])
            for relation, (source, target) in zip(relations, ends, strict=True)
        ]
        self._of_rows: dict[tuple[int, ...], tuple[int | Tensor, ...]] = {}
        self._columns = [column[:, None] for column in self.sent(self._known)] if len(relations) > 1 else []

    def sent(self, numbers: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """These as tensors of the device, for which nobody waits."""
        there = torch.tensor([number for some in numbers for number in some], dtype=torch.int64, device="cpu")
        there = there if self.device.type == "cpu" else ahead.to_device(there, self.device)
        return there.split([len(some) for some in numbers])

    def of_rows(self, counts: tuple[int, ...]) -> tuple[int | Tensor, ...]:
        """Of each of so many rows of each relation: the first number of a destination, the last row, how many edges
        there are, the first number of a source, and how many sources there are. Of one relation alone they are the same
        for all."""
        if len(counts) == 1:
            return self._known[0]
        if counts not in self._of_rows:
            parts = [column.expand(-1, count) for column, count in zip(self._columns, counts, strict=True)]
            self._of_rows[counts] = torch.cat(parts, 1).unbind()
        return self._of_rows[counts]

    def numbers(self, nodes: Sequence[Tensor]) -> Tensor:
        """Those of the nodes of each type, one after the other."""
        parts = [some.long() for some in nodes]
        return _joined([some + base if base else some for some, base in zip(parts, self.bases, strict=False)])

    def check(self, name: str, nodes: Tensor, of_type: int) -> None:
        """ValueError for nodes that there are not."""
        nodes = nodes.long()
        wrong = (nodes < 0) | (nodes >= self.spans[of_type])
        if bool(wrong.any()):
            self.refuse(name, nodes[wrong][0], self.sizes[of_type])

    def refuse(self, name: str, node: Tensor, size: int) -> None:
        raise ValueError(f"{self.op}: {name}: expected nodes in [0, {size}), got {int(node)}")

    def sources(self, at: Tensor, bounds: Sequence[int]) -> Tensor:
        """Sources, as int64, of the edges at these places, of which each relation has those between two of `bounds`; of
        one edge at least."""
        parts = zip(self.relations, at.split(_sizes(bounds)), strict=True)
        return _joined([relation.indices.index_select(0, some) for relation, some in parts]).long()

    def check_sources(self, ends: Tensor, bounds: Sequence[int]) -> None:
        """ValueError for the first source that there is not, of what `sources` gives."""
        for (source, _), (low, high) in zip(self.ends, itertools.pairwise(bounds), strict=True):
            self.check("indices", ends[low:high], source)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [high - low for low, high in itertools.pairwise(bounds)]


def _of(values: int | Tensor, which: Tensor) -> int | Tensor:
    return values if isinstance(values, int) else values.index_select(0, which)


class _Rows(NamedTuple):
    """Rows of nodes, relation by relation: where each begins, how many edges it has, how many of these count and how
    many do up to its end; between which of those edges, and between which rows, each relation's are."""

    first: Tensor
    size: Tensor
    edges: Tensor
    last: Tensor
    bounds: list[int]
    rows: list[int]


def _rows(problem: Problem, nodes: Tensor, counts: tuple[int, ...], most: int | None = None) -> _Rows:
    """The rows of so many of these nodes in each relation, up to `most` edges of each. The host waits once.

    There is a node at least.
    """
    relations = problem.relations
    for relation, count, some in zip(relations, counts, nodes.split(counts), strict=True):
        if count and not relation.num_rows:
            problem.refuse("nodes", some[0], 0)
    _, last_row, nnz, *_ = problem.of_rows(counts)
    inside = nodes.clamp(min=0).clamp(max=last_row)
    places = (inside[:, None] + torch.arange(2, device=nodes.device)).view(-1).split([2 * count for count in counts])
    parts = [relation.indptr.index_select(0, at) for relation, at in zip(relations, places, strict=True)]
    first, end = _joined(parts).long().view(-1, 2).unbind(1)
    size = end - first
    wrong = (torch.minimum(torch.minimum(first, nnz - end), size) < 0) | (inside != nodes)
    edges = size if most is None else size.clamp(max=most)
    last = edges.cumsum(0)
    rows = [0, *itertools.accumulate(counts)]
    *bounds, is_wrong = torch.stack([*(last[row - 1] for row in rows[1:] if row), wrong.any()]).tolist()
    if is_wrong:
        for relation, some in zip(relations, nodes.split(counts), strict=True):
            _refuse_rows(problem.op, relation, some)
    return _Rows(first, size, edges, last, [0] * (len(rows) - len(bounds)) + bounds, rows)


def _refuse_rows(op: str, relation: Relation, nodes: Tensor) -> None:
    """ValueError for the first of these nodes that has no row, or none whose places ascend, if there is one."""
    missing = nodes[(nodes < 0) | (nodes >= relation.num_rows)]
    if missing.numel():
        raise ValueError(f"{op}: nodes: expected nodes in [0, {relation.num_rows}), got {int(missing[0])}")
    first, end = relation.indptr[nodes], relation.indptr[nodes + 1]
    wrong = ((first < 0) | (first > end) | (end > relation.nnz)).nonzero().view(-1)[:1]
    for which in wrong.tolist():
        what = f"got {int(first[which])} and {int(end[which])} for node {int(nodes[which])}"
        raise ValueError(f"{op}: indptr: expected ascending places in indices, {what}")


class Edges(NamedTuple):
    """Edges of a relation: places of their ends among the given nodes, and in the indices."""

    row: Tensor
    col: Tensor
    edge: Tensor


def induced(
    problem: Problem, targets: Sequence[Tensor], sources: Sequence[Tensor], batch: Tensor | None = None
) -> list[Edges]:
    """All edges between given nodes, of each relation, in order of their destinations.

    The host waits twice, and where the rows have more edges, once more for each `bounds.EDGES_AT_ONCE` of them.

    Parameters
    ----------
    targets : list of Tensor
        Of each relation where its edges may end.
    sources : list of Tensor
        Of each type where edges may start: nodes that there are.
    batch : Tensor, optional
        Of one relation, whose targets are its sources: edges between nodes of different numbers do not count.
    """
    places = _Places(problem, sources, batch)
    found: list[list[Edges]] = [[] for _ in problem.relations]
    counts = tuple(some.numel() for some in targets)
    if any(counts):
        rows = _rows(problem, _joined(targets), counts)
        *_, base, span = problem.of_rows(counts)
        for owner, at, bounds in _edges(rows):
            ends = problem.sources(at, bounds)
            place, is_there = places.of(ends, _of(base, owner), owner)
            before = is_there.cumsum(0)
            wrong = (ends < 0) | (ends >= _of(span, owner))
            *kept, is_wrong = torch.stack([*(before[bound - 1] for bound in bounds if bound), wrong.any()]).tolist()
            if is_wrong:
                problem.check_sources(ends, bounds)
            kept = [0] * (len(bounds) - len(kept)) + kept
            which = torch.searchsorted(before, torch.arange(1, kept[-1] + 1, device=before.device))
            parts = [values.index_select(0, which).to(problem.dtype) for values in (place, owner, at)]
            for number, (low, high) in enumerate(itertools.pairwise(kept)):
                if low < high:
                    row, col, edge = (part[low:high] for part in parts)
                    found[number].append(Edges(row, col - rows.rows[number] if number else col, edge))
    none = problem.relations[0].indptr.new_empty(0)
    return [Edges(*map(_joined, zip(*some, strict=True))) if some else Edges(none, none, none) for some in found]


def _edges(rows: _Rows) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Of the edges of rows, in order, some at a time: whose row it is, where in indices they are, and where those of
    each relation begin and end among these."""
    last, total = rows.last, rows.bounds[-1]
    start = last - rows.size  # of each row, among these edges
    cuts = {0: 0}  # rows with which some begin, and the edges before these
    if total > bounds.EDGES_AT_ONCE:
        at_once = torch.searchsorted(last, torch.arange(0, total, bounds.EDGES_AT_ONCE, device=last.device), right=True)
        cuts = dict(torch.stack([at_once, start.index_select(0, at_once)], 1).tolist())
    cuts[last.numel()] = total
    shift = rows.first - start
    for (low, begin), (high, end) in itertools.pairwise(cuts.items()):
        if begin == end:
            continue
        whole = low == 0 and high == last.numel()
        owner = torch.repeat_interleave(rows.size if whole else rows.size[low:high], output_size=end - begin)
        owner = owner if low == 0 else owner + low
        at = torch.arange(begin, end, device=last.device) + shift.index_select(0, owner)
        yield owner, at, [min(max(bound - begin, 0), end - begin) for bound in rows.bounds]


class _Places:
    """Where nodes are among given ones of their type, the first time: by a table of all nodes, or by bisection where
    there are too many, nobody says how many, or each batch has its own."""

    def __init__(self, problem: Problem, given: Sequence[Tensor], batch: Tensor | None):
        self._batch, self._span = batch, problem.spans[0]
        counts = [nodes.numel() for nodes in given]
        self._count = most = max(counts)  # no place
        all_places = torch.arange(most, device=problem.device)
        places = _joined([all_places[:count] for count in counts])
        numbers = problem.numbers(given)
        self._table = self._numbers = None
        total = problem.bases[-1]
        if batch is None and min(problem.sizes) >= 0 and total <= bounds.TABLE_NODES:
            self._table, self._total = places.new_full((total,), most), total
            self._table.scatter_reduce_(0, numbers, places, "amin")
        else:
            numbers = numbers if batch is None else batch.long() * self._span + numbers
            self._numbers, order = torch.sort(numbers, stable=True)
            self._places = places[order]

    def of(self, nodes: Tensor, base: int | Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each, whose type's first number is `base`, and whether it has one. `owner`: the given node of
        whose batch it must be."""
        if not self._count:
            return owner, torch.zeros_like(owner, dtype=torch.bool)
        numbers = nodes if isinstance(base, int) and base == 0 else nodes + base
        if self._table is not None:
            place = self._table.index_select(0, numbers.clamp(0, self._total - 1))
            return place, place < self._count
        assert self._numbers is not None
        if self._batch is not None:
            numbers = self._batch.index_select(0, owner).long() * self._span + numbers
        at = torch.searchsorted(self._numbers, numbers).clamp_(max=self._numbers.numel() - 1)
        return self._places.index_select(0, at), self._numbers.index_select(0, at) == numbers


def hgt(
    problem: Problem, seeds: Sequence[Tensor], counts: Sequence[Sequence[int]], seed: int
) -> tuple[list[Tensor], list[list[int]], list[Edges]]:
    """`layerwise.hgt_sample`: the nodes of each type, how many each hop added, and the edges of each relation. Other
    nodes than the CPU draws, as likely.

    The host waits once for each type that has seeds, twice in each hop, and for the edges as `induced`.

    Parameters
    ----------
    seeds : list of Tensor
        Of each type what to start from.
    counts : list of list of int
        Of each type how many to add in each hop.
    """
    nodes, per_hop = [], []
    for of_hops, base in zip(zip(*_hops(problem, seeds, counts, seed), strict=True), problem.bases, strict=False):
        nodes.append((_joined(of_hops) - base).to(problem.dtype))
        per_hop.append([some.numel() for some in of_hops])
    return nodes, per_hop, induced(problem, [nodes[target] for _, target in problem.ends], nodes)


def _hops(
    problem: Problem, seeds: Sequence[Tensor], counts: Sequence[Sequence[int]], seed: int
) -> list[Sequence[Tensor]]:
    """The numbers of the nodes of each type in each hop, the seeds first."""
    for which, some in enumerate(seeds):
        if some.numel():
            problem.check("seeds", some, which)
    budget = _Budget(problem, torch.Generator(problem.device).manual_seed(seed))
    numbers = problem.numbers(seeds)
    added = [numbers.split([some.numel() for some in seeds])]
    budget.enter(numbers)
    for of_types in zip(*counts, strict=True):
        given = budget.give(added[-1])
        added.append(budget.take(of_types, given))
    return added


class _Budget:
    """What nodes of all types were given, as whole numbers, and which of them are in the batch.

    Each gift has a key, twice the number of its node and one more; a node in the batch has one without it, so that it
    comes before its gifts when all are sorted.
    """

    def __init__(self, problem: Problem, generator: torch.Generator):
        self._problem, self._generator = problem, generator
        self._keys: list[Tensor] = []
        self._shares: list[Tensor] = []
        # A key for each type and each positive double, but for as many of its last bits as types take.
        num_types = len(problem.sizes)
        self._bits = max(num_types - 1, 1).bit_length()
        first = [which << (63 - self._bits) for which in range(num_types)]
        limits = [key + more for key in first for more in (0, _INFINITE >> self._bits)]
        self._bases, self._first, self._limits, self._before = problem.sent(
            [[2 * base for base in problem.bases[1:-1]], first, limits, [-2]]
        )

    def enter(self, numbers: Tensor) -> None:
        """Nodes that are in the batch from now on."""
        self._keys.append(numbers * 2)
        self._shares.append(torch.zeros_like(numbers))

    def give(self, numbers: Sequence[Tensor]) -> _Given | None:
        """The nodes of each type that have these numbers give to their sources."""
        problem = self._problem
        targets = [numbers[target] for _, target in problem.ends]
        counts = tuple(some.numel() for some in targets)
        if not any(counts):
            return None
        first_target, _, _, first_source, num_sources = problem.of_rows(counts)
        rows = _rows(problem, _joined(targets) - first_target, counts, most=bounds.HGT_SHARED)
        if not rows.bounds[-1]:
            return None
        drawn = picked(rows.size, self._generator).add_(rows.first[:, None])
        has = torch.arange(bounds.HGT_SHARED, device=drawn.device) < rows.edges[:, None]
        which = torch.searchsorted(has.view(-1).cumsum(0), torch.arange(1, rows.bounds[-1] + 1, device=drawn.device))
        owner = which // bounds.HGT_SHARED
        ends = problem.sources(drawn.view(-1).index_select(0, which), rows.bounds)
        self._keys.append(torch.add(1, ends + _of(first_source, owner), alpha=2))
        self._shares.append(torch.div(1 << _SHARE_BITS, rows.edges.index_select(0, owner), rounding_mode="floor"))
        return _Given(ends, rows.bounds, ((ends < 0) | (ends >= _of(num_sources, owner))).any())

    def take(self, counts: Sequence[int], given: _Given | None) -> Sequence[Tensor]:
        """The numbers of so many nodes of each type that are not in the batch yet, each with the square of what it was
        given: those whose exponential keys are the smallest (Efraimidis and Spirakis). They are in the batch from now
        on."""
        # A hop of many hubs has millions of gifts, so that what has been used of these goes at once.
        keys, order = _joined(self._keys).sort()
        self._keys = [keys]
        share = _joined(self._shares).index_select(0, order)
        del order
        self._shares = [share]
        # The first gift to each node has the sum of all.
        until = share.cumsum(0)
        last = torch.searchsorted(keys, keys | 1, right=True).sub_(1)
        weight = until.index_select(0, last).sub_(until).add_(share).double()
        del until, last
        weight = torch.empty_like(weight).exponential_(generator=self._generator).div_(weight).div_(weight)
        weight.masked_fill_((keys & 1 == 0) | (keys.diff(prepend=self._before) < 2), torch.inf)
        of_type = torch.searchsorted(self._bases, keys, right=True)
        sorted_keys = (weight.view(torch.int64) >> self._bits).add_(self._first.index_select(0, of_type))
        del weight, of_type
        ordered, order = sorted_keys.sort()
        told = [torch.searchsorted(ordered, self._limits)]
        limits = torch.cat(told if given is None else [*told, given.wrong[None]]).tolist()
        if given is not None and limits.pop():
            self._problem.check_sources(given.ends, given.bounds)
        starts, ends = limits[::2], limits[1::2]
        taken = [order[low : min(low + n, high)] for low, high, n in zip(starts, ends, counts, strict=True)]
        fresh = keys.index_select(0, _joined(taken)) >> 1
        self.enter(fresh)
        return fresh.split([some.numel() for some in taken])


class _Given(NamedTuple):
    """Who was given something, relation by relation between bounds, and whether somebody is wrong."""

    ends: Tensor
    bounds: list[int]
    wrong: Tensor


def picked(size: Tensor, generator: torch.Generator) -> Tensor:
    """Places [rows, _SHARED] in rows of these sizes that are different, ascending and any as likely; all of a row, and
    others, if it has no more.

    An urn has a ball of each of n - k + 1 colours. A ball is drawn, and put back with another of its colour, k times:
    any multiset of colours is as likely (Polya). Sorted, and 0, 1, 2, ... added to them, the colours are k of n.
    """
    order = torch.arange(bounds.HGT_SHARED, device=size.device)
    parts = []
    for some in size.split(max(bounds.EDGES_AT_ONCE // bounds.HGT_SHARED, 1)):
        colours = (some - (bounds.HGT_SHARED - 1)).clamp_(min=1)[:, None]
        # Of 2^63 numbers: of n balls some are likelier by n / 2^63 than others.
        ball = torch.empty((some.numel(), bounds.HGT_SHARED), dtype=torch.int64, device=size.device)
        ball.random_(generator=generator).remainder_(colours + order)
        added = ball - colours  # by which draw this one came into the urn; before all if negative
        source = torch.where(added < 0, order, added)
        for _ in range((bounds.HGT_SHARED - 1).bit_length()):
            source = source.gather(1, source)
        parts.append(ball.gather(1, source).sort(1).values + order)
    return _joined(parts)
