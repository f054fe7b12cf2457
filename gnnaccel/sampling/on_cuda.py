"""Neighbour sampling on the GPU: the samples of the CPU, bit for bit (cuda/sampling.cu has the steps).

Everything goes to the current stream. The host waits for it once per batch, for the sizes, and once more for each hop
whose edges no small number bounds: one of all neighbours, or of more than MOST_BOUNDED.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel.sampling._arrays import Relation

# Edges of a hop that room is made for unseen, at 32 bytes each and a thread that may find nothing to do. With more of
# them it does not matter how long it takes to ask for their number.
MOST_BOUNDED = 1 << 22
_MOST = 1 << 31  # seeds and edges of a batch: what the table has of one is 32 bits
_SEEDS, _INDPTR, _INDICES = range(3)  # cuda/kernels.h: SampleError


def neighbor_sample(
    graph: Relation, seeds: Tensor, fanouts: Sequence[int], replace: bool, resample: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int], list[int]]:
    """Uniform neighbours of seeds, hop by hop, of a graph on the GPU.

    Parameters
    ----------
    graph : Relation
        Without weights or times.
    seeds : Tensor [num_seeds], of the graph's dtype and device
    fanouts : list of int
    replace, resample : bool
    seed : int
        Of the random numbers.

    Returns
    -------
    node, row, col, edge, num_nodes_per_hop, num_edges_per_hop
        As of `NeighborSample`.

    Raises
    ------
    ValueError
        For nodes out of range, in `seeds` or in the graph, and batches of 2^31 seeds and edges.
    RuntimeError
        If this gnnaccel has no CUDA half.
    """
    return begin(graph, seeds, fanouts, replace, resample, seed).result()


def waits_once(graph: Relation, num_seeds: int, fanouts: Sequence[int], replace: bool, resample: bool) -> bool:
    """True if nothing but the sizes of the whole batch has to be waited for."""
    return len(_Rows(graph, num_seeds, replace, resample).bounds(fanouts)) == len(fanouts)


def begin(graph: Relation, seeds: Tensor, fanouts: Sequence[int], replace: bool, resample: bool, seed: int) -> Batch:
    """Launch what `neighbor_sample` launches, whose results are those of `Batch.result`."""
    rows = _Rows(graph, seeds.numel(), replace, resample)
    bounds = rows.bounds(fanouts)
    batch = Batch(graph, seeds, len(fanouts), sum(bounds), resample, bounded=len(bounds) == len(fanouts))
    csr = lib.csr(graph.indptr, graph.indices, None, graph.num_rows, graph.nnz)
    device = seeds.device
    lib.launch("sample_seeds", device, csr, seeds.data_ptr(), batch.described)
    for hop, fanout in enumerate(fanouts):
        max_rows = rows.most
        offsets = seeds.new_empty(max_rows + 1, dtype=torch.int64)
        how = (fanout, replace)
        lib.launch("sample_degrees", device, csr, batch.described, hop, max_rows, *how, offsets.data_ptr())
        if bounds:
            max_edges = bounds.pop(0)
            rows.take(max_edges)
        else:
            max_edges = int(offsets[-1])
            rows.take(max_edges)
            bounds = rows.bounds(fanouts[hop + 1 :])
            batch.reserve(max_edges + sum(bounds))
        hop_seed = (seed + hop) % 2**64 if resample else seed  # or a node would draw the same again
        sizes, drawn = (hop, max_rows, max_edges), (*how, hop_seed, offsets.data_ptr())
        lib.launch("sample_edges", device, csr, batch.described, *sizes, *drawn)
    return batch


class _Rows:
    """How many nodes the hops of a batch draw for, at most.

    most : int
        The next hop.
    """

    def __init__(self, graph: Relation, num_seeds: int, replace: bool, resample: bool):
        self._num_nodes, self._nnz, self._replace, self._resample = graph.num_rows, graph.nnz, replace, resample
        self.most, self._seeds, self._others, self._first = num_seeds, num_seeds, 0, True

    def bounds(self, fanouts: Sequence[int]) -> list[int]:
        """How many edges each of the next hops can have, up to one that may have many."""
        then, bounds = copy.copy(self), []
        for fanout in fanouts:
            bound = then._edges(fanout)
            if bound > MOST_BOUNDED:
                break
            bounds.append(bound)
            then.take(bound)
        return bounds

    def _edges(self, fanout: int) -> int:
        if fanout >= 0 and self._replace:
            return self.most * fanout
        # Among the seeds a node may be several times, each with edges of its own. All others are there once.
        seeds = self._seeds if self._resample or self._first else 0
        if fanout < 0:
            return MOST_BOUNDED + 1 if seeds else self._nnz
        return min(self.most * fanout, seeds * fanout + self._nnz)

    def take(self, edges: int) -> None:
        """The next hop has at most so many edges."""
        self._first = False
        self._others = min(self._others + edges, self._num_nodes)
        self.most = self._seeds + self._others if self._resample else min(edges, self._num_nodes)


class Batch:
    """Arrays of a batch, which grow, and what the binary is told of them (cuda/kernels.h: SampleBatch)."""

    def __init__(self, graph: Relation, seeds: Tensor, num_hops: int, room: int, resample: bool, bounded: bool):
        self.graph, self.seeds = graph, seeds
        self.num_seeds, self.num_hops, self.num_nodes = seeds.numel(), num_hops, graph.num_rows
        self.room, self.resample = room, resample  # room: for edges
        self.edges = seeds.new_empty((3, room))
        self.nodes = seeds.new_empty(self._most_nodes())
        self.places = seeds.new_empty(self.num_seeds + room, dtype=torch.int32)
        self.state = seeds.new_empty(3 + 2 * num_hops, dtype=torch.int64)
        # The table has a cell for each node of the graph, unless slots for all that the batch may have are less.
        slot_bytes = 4 + seeds.element_size()
        slots = 1 << max(2 * min(self._most_nodes(), self.num_nodes) - 1, 1).bit_length()
        self.slots = slots if bounded and slots * slot_bytes < 4 * self.num_nodes else 0
        table_bytes = self.slots * slot_bytes if self.slots else 4 * self.num_nodes
        self.table = seeds.new_empty(table_bytes, dtype=torch.uint8)
        self.described = self._describe()
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None

    def _most_nodes(self) -> int:
        return self.num_seeds + min(self.room, self.num_nodes)

    def reserve(self, more: int) -> None:
        """Room for `more` edges, and the nodes that they may add."""
        room = self.room + more
        if self.num_seeds + room >= _MOST:
            raise ValueError("neighbor_sample: num_neighbors: a batch of 2^31 seeds and edges, or more")

        def grown(array: Tensor, size: int) -> Tensor:
            out = array.new_empty((*array.shape[:-1], size))
            out[..., : array.shape[-1]] = array
            return out

        self.room = room
        self.edges = grown(self.edges, room)
        self.nodes = grown(self.nodes, self._most_nodes())
        self.places = grown(self.places, self.num_seeds + room)
        self.described = self._describe()

    def _describe(self) -> tuple:
        """The binary's."""
        arrays = (self.nodes, *self.edges.unbind(), self.places, self.table, self.state)
        return (*(array.data_ptr() for array in arrays), self.num_seeds, self.num_hops, self.slots, self.resample)

    def send(self) -> None:
        """Have the GPU send the sizes to the host as soon as it has them: `result` waits for no more than that, and not
        for what is launched in between."""
        sizes = torch.empty(self.state.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        sizes.copy_(self.state, non_blocking=True)
        self._sent = sizes, torch.cuda.current_stream(self.state.device).record_event()

    def result(self) -> tuple:
        """Waits for the GPU."""
        sizes = self.state
        if self._sent is not None:
            sizes, sent = self._sent
            sent.synchronize()
        wrong, *after = sizes.tolist()
        if wrong != -1:
            _refuse(self.graph, self.seeds, wrong >> 56, wrong & (1 << 56) - 1)
        nodes, edges = after[: self.num_hops + 1], after[self.num_hops + 1 :]

        def added(counts: list[int]) -> list[int]:
            return [last - before for before, last in itertools.pairwise(counts)]

        node, row, col, edge = self.nodes[: nodes[-1]], *self.edges[:, : edges[-1]].unbind()
        if self.room > 2 * edges[-1]:  # a batch that is kept shall not keep so much more
            node, row, col, edge = (array.clone() for array in (node, row, col, edge))
        return node, row, col, edge, [nodes[0], *added(nodes)], added(edges)


def _refuse(graph: Relation, seeds: Tensor, what: int, at: int) -> None:
    """ValueError for what a kernel has found at a place; the words are the CPU's."""
    inside = f"expected nodes in [0, {graph.num_rows}), got"
    if what == _SEEDS:
        raise ValueError(f"neighbor_sample: seeds: {inside} {int(seeds[at])}")
    if what == _INDPTR:
        first, end = graph.indptr[at : at + 2].tolist()
        raise ValueError(
            f"neighbor_sample: indptr: expected ascending places in indices, got {first} and {end} for node {at}"
        )
    if what == _INDICES:
        raise ValueError(f"neighbor_sample: indices: {inside} {int(graph.indices[at])} at place {at}")
    raise ValueError("neighbor_sample: indptr: expected rows that do not overlap, which nobody changes meanwhile")
