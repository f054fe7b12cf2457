"""Neighbour sampling on the GPU (cuda/sampling.cu has the kernels): without weights the CPU's samples, bit for bit.

Everything goes to the current stream. The host waits for it once per batch, for the sizes, and once more for each step
(the edges of one relation in one hop) whose edges no small number bounds: one of all neighbours, or of more than
`bounds.BOUNDED_EDGES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.lower import bounds
from gnnaccel.sampling._arrays import Relation
from gnnaccel.sampling.batch_plans import Plan, Shape, Step, plan

_SEEDS, _INDPTR, _NO_ROW, _INDICES, _WEIGHT, _WEIGHT_SUM, _TIME = range(7)  # cuda/kernels.h: SampleError


class Problem:
    """What is sampled, but for the seeds: relations of one device and dtype of indices, and how many of their edges.

    Parameters
    ----------
    sizes : dict
        Node type -> number of nodes, -1 where nobody says it.
    relations : dict
        (source type, name, destination type) -> Relation.
    fanouts : dict
        Edge type -> numbers of edges, one per hop; as many for each.
    node_time : dict
        Node type -> times, of some or all types.
    replace, resample, disjoint, last : bool
        As of `neighbor_sample`; `last`: the temporal strategy.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        relations: Mapping[tuple[str, str, str], Relation],
        fanouts: Mapping[tuple[str, str, str], Sequence[int]],
        node_time: Mapping[str, Tensor],
        replace: bool,
        resample: bool,
        disjoint: bool,
        last: bool,
    ):
        names = list(sizes)
        self.names, self.sizes = names, tuple(sizes.values())
        self.relations = list(relations.values())
        self.ends = tuple((names.index(kind[0]), names.index(kind[-1])) for kind in relations)
        self.fanouts = tuple(tuple(fanouts[kind]) for kind in relations)
        self.node_time = [node_time.get(name) for name in names]
        self.replace, self.resample, self.disjoint, self.last = replace, resample, disjoint, last
        self.csrs = [lib.csr(r.indptr, r.indices, None, r.num_rows, r.nnz) for r in self.relations]
        counts = tuple(r.nnz for r in self.relations)
        self._shape = Shape(self.sizes, self.ends, counts, self.fanouts, replace, resample, disjoint)

    def waits_once(self, num_seeds: Mapping[str, int]) -> bool:
        """True if nothing but the sizes of the whole batch of so many seeds has to be waited for."""
        plan = self.plan(tuple(num_seeds.get(name, 0) for name in self.names))
        return len(plan.bounds) == len(plan.steps)

    def plan(self, num_seeds: tuple[int, ...]) -> Plan:
        """What is known before of a batch of so many seeds of each type."""
        return plan(self._shape, num_seeds, bounds.BOUNDED_EDGES)


class Sample(NamedTuple):
    """Of each type of nodes, or each relation: as of `HeteroNeighborSample`."""

    nodes: list[Tensor]
    trees: list[Tensor] | None
    rows: list[Tensor]
    cols: list[Tensor]
    edges: list[Tensor]
    nodes_per_hop: list[list[int]]
    edges_per_hop: list[list[int]]


def begin(problem: Problem, seeds: Mapping[str, Tensor], seed_time: Tensor | None, seed: int) -> Batch:
    """Launch a batch's steps: `Batch.result` waits for it.

    Parameters
    ----------
    problem : Problem
    seeds : dict
        Node type -> nodes, of the graph's dtype and device; their trees are numbered in this order.
    seed_time : Tensor, int64, optional
        Of all seeds, if time matters.
    seed : int
        Of the random numbers.

    Raises
    ------
    ValueError
        For batches of 2^31 seeds and edges.
    RuntimeError
        If this gnnaccel has no CUDA half.
    """
    batch = Batch(problem, seeds, seed_time)
    steps, _, bounds, sizes = batch.plan
    known, most, device = steps[: len(bounds)], [edges for _, edges in bounds], batch.state.device
    batch.reserve_nodes(known, most, bounded=len(known) == len(steps))
    for number, of_type in enumerate(batch.types):
        lib.launch("sample_seeds", device, of_type.described, number, batch.described)
    batch.reserve_edges(known, most)  # while the GPU is at work
    number = 0
    while True:
        batch.draw(steps[number : number + len(bounds)], bounds, number, seed)
        number += len(bounds)
        if number == len(steps):
            return batch
        # One that may have many edges: the host asks how many.
        step, sizes = steps[number], sizes.at(steps[number].hop)
        max_rows = sizes.most[step.target]
        rows = batch.state.new_empty(batch.row_numbers(step, max_rows))
        how = batch.described_step(step, number, max_rows, 0, seed, rows.data_ptr())
        lib.launch("sample_degrees", device, *batch.operands(step), how)
        max_edges = int(rows[max_rows])
        sizes.take(step, max_edges)
        bounds, sizes = sizes.bounds(steps[number + 1 :])
        these, most = steps[number : number + 1 + len(bounds)], [max_edges, *(edges for _, edges in bounds)]
        new = batch.reserve_nodes(these, most)
        batch.reserve_edges(these, most)
        for which in new:
            lib.launch("sample_table", device, batch.types[which].described, which, batch.described, number)
        how = batch.described_step(step, number, max_rows, max_edges, seed, rows.data_ptr())
        lib.launch("sample_edges", device, *batch.operands(step), how)
        number += 1


class _Nodes:
    """Arrays of a type of nodes, which grow, and what the binary is told of them (cuda/kernels.h: SampleNodes)."""

    def __init__(self, problem: Problem, which: int, seeds: Tensor, first_seed: int, num_nodes: int):
        self.seeds, self._time, self._first_seed = seeds, problem.node_time[which], first_seed
        self._num_nodes, self._disjoint = num_nodes, problem.disjoint
        self._is_hashed: bool | None = True if problem.disjoint or problem.sizes[which] < 0 else None
        self.slots, self.edges = 0, 0  # room for edges from here
        self.nodes: Tensor | None = None
        self.places: Tensor | None = None

    def reserve(self, most: int, more: int, bounded: bool) -> bool:
        """Room for `more` edges and for `most` nodes that are no seeds. True if the table is a new one."""
        self.edges += more
        num_seeds = self.seeds.numel()
        if num_seeds + self.edges > bounds.INT32_MAX:  # what the table has of a type is 32 bits
            raise ValueError("neighbor_sample: num_neighbors: a batch of 2^31 seeds and edges, or more")
        shape = (1 + self._disjoint, num_seeds + most)
        self.nodes = nodes = _grown(self.nodes, self.seeds, shape, self.seeds.dtype)
        self.places = _grown(self.places, self.seeds, (num_seeds + self.edges,), torch.int32)
        word_bytes = 8 if self._disjoint else self.seeds.element_size()
        room = num_seeds + most if self._disjoint else min(num_seeds + most, self._num_nodes)
        slots = 1 << max(2 * room - 1, 1).bit_length()
        if self._is_hashed is None:  # a cell for each node of the graph, unless slots for the whole batch are less
            self._is_hashed = bounded and slots * (4 + word_bytes) < 4 * self._num_nodes
            new = not self._is_hashed
        else:
            new = False
        if self._is_hashed and slots > self.slots:
            self.slots, new = slots, True
        if new:
            table_bytes = self.slots * (4 + word_bytes) if self._is_hashed else 4 * self._num_nodes
            self.table = self.seeds.new_empty(table_bytes, dtype=torch.uint8)
        first = nodes.data_ptr()
        trees = first + nodes.stride(0) * nodes.element_size() if self._disjoint else 0
        arrays = (_address(self.seeds), _address(self._time), first, trees, *map(_address, (self.places, self.table)))
        self.described = (*arrays, num_seeds, self._first_seed, self._num_nodes, self.slots)
        return new


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _grown(array: Tensor | None, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`array`, if there is one, with room for this shape, which has a larger last dimension."""
    if array is not None and array.shape == shape:
        return array
    out = like.new_empty(shape, dtype=dtype)
    if array is not None:
        out[..., : array.shape[-1]] = array
    return out


def _unknown(dtype: torch.dtype, num_trees: int) -> int:
    """Of a type whose number nobody says a node is any number that can be one with that of its tree."""
    most = torch.iinfo(dtype).max
    return most if dtype == torch.int32 else most // max(num_trees, 1)


class Batch:
    """Arrays of a batch, and what the binary is told of them (cuda/kernels.h: SampleBatch)."""

    def __init__(self, problem: Problem, seeds: Mapping[str, Tensor], seed_time: Tensor | None):
        self.problem, some = problem, problem.relations[0].indptr
        given, total = dict[str, tuple[Tensor, int]](), 0
        for name, nodes in seeds.items():
            given[name] = nodes, total
            total += nodes.numel()
        if len(given) < len(problem.names):
            none = some.new_empty(0), 0
            given |= {name: none for name in problem.names if name not in given}
        self.plan = problem.plan(tuple([given[name][0].numel() for name in problem.names]))
        self.types = [
            _Nodes(problem, t, *given[name], size if size >= 0 else _unknown(some.dtype, total))
            for t, (name, size) in enumerate(zip(problem.names, problem.sizes, strict=True))
        ]
        self.edges: list[Tensor | None] = [None] * len(problem.relations)
        width = 2 * len(self.types) + len(self.edges)
        self.state = some.new_empty(1 + (len(self.plan.steps) + 1) * width, dtype=torch.int64)
        self._seed_time = seed_time
        index_type = lib.INDEX_TYPES[some.dtype]
        self.described = (
            *(self.state.data_ptr(), _address(seed_time)), len(self.types), len(self.edges), index_type
        )  # fmt: skip
        self._told: list[tuple] = [()] * len(self.edges)
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None

    def reserve_nodes(self, steps: Sequence[Step], edges: Sequence[int], bounded: bool = False) -> list[int]:
        """Room for the nodes that these steps may add. The types whose table is a new one."""
        new, of_type = list[int](), [0] * len(self.types)
        for step, count in zip(steps, edges, strict=True):
            of_type[step.source] += count
        for t, more in enumerate(of_type):
            nodes = self.types[t]
            if (more or bounded or not hasattr(nodes, "described")) and nodes.reserve(
                self.plan.sizes.most_others(t, nodes.edges + more), more, bounded
            ):
                new.append(t)
        return new

    def reserve_edges(self, steps: Sequence[Step], edges: Sequence[int]) -> None:
        """Room for the edges of these steps."""
        problem, of_relation = self.problem, [0] * len(self.edges)
        for step, count in zip(steps, edges, strict=True):
            of_relation[step.relation] += count
        for r, more in enumerate(of_relation):
            if more or not self._told[r]:
                relation, there = problem.relations[r], self.edges[r]
                room = more + (0 if there is None else there.shape[-1])
                self.edges[r] = made = _grown(there, relation.indptr, (3, room), relation.indptr.dtype)
                weight_type = lib.DTYPES[torch.float32 if relation.weight is None else relation.weight.dtype]
                first, size = made.data_ptr(), room * made.element_size()
                arrays = (_address(relation.weight), _address(relation.time), first, first + size, first + 2 * size)
                self._told[r] = (*arrays, r, *problem.ends[r], weight_type)

    def draw(self, steps: Sequence[Step], bounds: Sequence[tuple[int, int]], number: int, seed: int) -> None:
        """Launch steps, from this number on, of which it is known how many rows and edges they may have."""
        if not steps:
            return
        sizes = [self.row_numbers(step, rows) for step, (rows, _) in zip(steps, bounds, strict=True)]
        rows = self.state.new_empty(sum(sizes))
        address, described = rows.data_ptr(), []
        for step, (max_rows, max_edges), size in zip(steps, bounds, sizes, strict=True):
            described.append(self.described_step(step, number, max_rows, max_edges, seed, address))
            address += 8 * size
            number += 1
        types, relations = [of_type.described for of_type in self.types], [step.relation for step in steps]
        given = (self.problem.csrs, types, self._told, self.described, described, relations)
        lib.launch("sample_steps", rows.device, *given)

    def row_numbers(self, step: Step, max_rows: int) -> int:
        """How many numbers a step keeps of its rows (cuda/kernels.h: SampleStep)."""
        weighted = self.problem.relations[step.relation].weight is not None and step.fanout >= 0
        return (4 if weighted else 3) * max_rows + 1 + weighted

    def described_step(self, step: Step, number: int, max_rows: int, max_edges: int, seed: int, rows: int) -> tuple:
        """What the binary is told of a step; rows: address of what it keeps of these."""
        problem, starts = self.problem, self.plan.starts
        first = -1 if problem.resample or step.hop == 0 else starts[step.hop - 1]
        # With resample a node would draw the same again.
        hop_seed = (seed + step.hop) % 2**64 if problem.resample else seed
        where = (number, first, starts[step.hop], max_rows, max_edges)
        return (*where, step.fanout, hop_seed, problem.replace, problem.last, rows)

    def operands(self, step: Step) -> tuple:
        """What the binary takes for a step."""
        source, target = self.types[step.source].described, self.types[step.target].described
        return self.problem.csrs[step.relation], source, target, self._told[step.relation], self.described

    def send(self) -> None:
        """Have the GPU send the sizes to the host as soon as it has them: `result` waits for no more than that, and not
        for what is launched in between."""
        sizes = torch.empty(self.state.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        sizes.copy_(self.state, non_blocking=True)
        self._sent = sizes, torch.cuda.current_stream(self.state.device).record_event()

    def result(self) -> Sample:
        """Waits for the GPU. ValueError for what the kernels have found."""
        sizes = self.state
        if self._sent is not None:
            sizes, sent = self._sent
            sent.synchronize()
        wrong, *counts = sizes.tolist()
        if wrong != -1:
            _refuse(self, wrong >> 56, wrong >> 40 & (1 << 16) - 1, wrong & (1 << 40) - 1)
        num_types, width = len(self.types), 2 * len(self.types) + len(self.edges)
        starts = [start * width for start in self.plan.starts or [0]]
        after = [[counts[start + column] for start in starts] for column in range(width)]  # each hop
        edges_after = after[2 * num_types :]
        nodes = [_cut(of_type.nodes, hops[-1]) for of_type, hops in zip(self.types, after[:num_types], strict=True)]
        edges = [_cut(of_relation, hops[-1]) for of_relation, hops in zip(self.edges, edges_after, strict=True)]
        return Sample(
            [of_type[0] for of_type in nodes],
            [of_type[1] for of_type in nodes] if self.problem.disjoint else None,
            [of_relation[0] for of_relation in edges],
            [of_relation[1] for of_relation in edges],
            [of_relation[2] for of_relation in edges],
            [[hops[0], *_added(hops)] for hops in after[:num_types]],
            [_added(hops) for hops in edges_after],
        )


def _added(of_hops: list[int]) -> list[int]:
    return [last - before for before, last in itertools.pairwise(of_hops)]


def _cut(array: Tensor | None, size: int) -> Sequence[Tensor]:
    """The rows of an array, which have so many elements."""
    assert array is not None
    parts = array.narrow(-1, 0, size).unbind()
    # A batch that is kept shall not keep so much more.
    return [part.clone() for part in parts] if array.shape[-1] > 2 * size + 64 else parts


def _refuse(batch: Batch, what: int, which: int, at: int) -> None:
    """ValueError for what a kernel has found, in a type or a relation, at a place; the words are the CPU's."""
    op, problem = "neighbor_sample", batch.problem
    if what == _SEEDS:
        inside = f"expected nodes in [0, {problem.sizes[which]}), got"
        raise ValueError(f"{op}: seeds: {inside} {int(batch.types[which].seeds[at])}")
    graph = problem.relations[which]
    if what == _INDPTR:
        first, end = graph.indptr[at : at + 2].tolist()
        raise ValueError(f"{op}: indptr: expected ascending places in indices, got {first} and {end} for node {at}")
    if what == _NO_ROW:
        raise ValueError(f"{op}: indptr: node {at} has no row: there are {graph.num_rows}")
    if what == _INDICES:
        inside = f"expected nodes in [0, {problem.sizes[problem.ends[which][0]]}), got"
        raise ValueError(f"{op}: indices: {inside} {int(graph.indices[at])} at place {at}")
    if what == _WEIGHT and graph.weight is not None:
        wanted = "expected finite numbers that are not negative, got"
        raise ValueError(f"{op}: edge_weight: {wanted} {float(graph.weight[at]):f} at place {at}")
    if what == _WEIGHT_SUM:
        raise ValueError(f"{op}: edge_weight: the weights of a row add up to more than a double")
    if what == _TIME:
        wanted = "expected the edges of each destination in ascending order of time, got a later one at place"
        raise ValueError(f"{op}: time: {wanted} {at}")
    raise ValueError(f"{op}: indptr: expected rows that do not overlap, which nobody changes meanwhile")
