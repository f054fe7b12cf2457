"""The edges of a graph by relation: what sums with a matrix per relation run over, kept with the types of the edges.

Edges of one relation with the same destination need one product with the relation's matrix and not one each: their
sources are summed first (a "row"). Or those with the same source, which is mapped once. Of the two there is the one
that has fewer rows. Rows are sorted by relation, and worked on in chunks of whole relations that have about as many
rows as the graph has nodes (on CUDA up to a million where it has fewer): so much memory they take, however many edges
there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators
from gnnaccel.graph import build, modes
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds


class Chunk(NamedTuple):
    """Rows of consecutive relations, and the graphs around their product with the relations' matrices."""

    first: int  # of its relations
    last: int  # behind them
    ptr: Tensor  # [last - first + 1] rows of each, on the CPU
    gather: Graph  # rows x sources
    spread: Graph  # rows x destinations
    edges: Tensor  # ids of its edges, in the order of those of the graph that has them; of the other each row has one
    short: bool  # rows have few edges: their sums need not be stored

    @property
    def scatter(self) -> Graph:
        """Destinations x rows."""
        return self.spread.transposed


class _Rows:
    """The edges of a graph sorted by (relation, end), ends being the rows of `graph`."""

    far: Tensor  # [nnz] the other end of each edge, in this order
    edges: Tensor  # int64 [nnz]: its id
    ends: Tensor  # [rows] end of the edges of each row, and
    bounds: Tensor  # [rows + 1] the first of these
    ptr: Tensor  # int64 [count + 1], on the CPU: first row of each relation
    _sizes: Tensor | None

    def __init__(self, graph: Graph, types: Tensor, count: int):
        self.graph, self._sizes = graph, None
        (self._sort_on_cpu if types.is_cpu and _operators.usual(types, graph.indptr) else self._sort)(types, count)
        self.count = self.ends.shape[0]

    def _sort_on_cpu(self, types: Tensor, count: int) -> None:
        graph = self.graph
        indices, nnz = graph.indices, graph.nnz
        self.far, ends, bounds = (torch.empty_like(indices), torch.empty_like(indices), indices.new_empty(nnz + 1))
        # On the CPU whatever device somebody has made the default.
        self.edges, self._sizes = (torch.empty(nnz, dtype=torch.int64, device=types.device) for _ in range(2))
        self.ptr = torch.empty(count + 1, dtype=torch.int64, device=types.device)
        matrix = lib.csr(graph.indptr, indices, graph.edge_ids, graph.num_cols, nnz)
        into = (t.data_ptr() for t in (self.far, self.edges, ends, bounds, self.ptr, self._sizes))
        of_types = types.data_ptr(), count, lib.INDEX_TYPES[types.dtype]
        rows = lib.launch("relation_rows", types.device, matrix, *of_types, *into)
        self.ends, self.bounds = ends[:rows].clone(), bounds[: rows + 1]

    def _sort(self, types: Tensor, count: int) -> None:
        graph = self.graph
        at_edge = types if graph.edge_ids is None else types[graph.edge_ids.long()]
        ends = build.rows_of(graph.indptr).to(at_edge.dtype)
        indptr, ends, order, _ = build.coo_to_csr(at_edge, ends, count, graph.num_rows)
        order = slice(None) if order is None else order.long()
        self.far = graph.indices[order]
        ids = torch.arange(graph.nnz, device=graph.device) if graph.edge_ids is None else graph.edge_ids.long()
        self.edges = ids[order]
        new = torch.ones(graph.nnz, dtype=torch.bool, device=graph.device)
        torch.ne(ends[1:], ends[:-1], out=new[1:])
        starts = indptr[:-1].long()
        new[starts[starts < graph.nnz]] = True
        firsts = new.nonzero().squeeze(1)
        self.ends = ends[firsts]
        self.ptr = torch.searchsorted(firsts, indptr.long()).cpu()
        self.bounds = torch.cat([firsts, firsts.new_tensor([graph.nnz])]).to(graph.indptr.dtype)

    def sizes(self) -> Tensor:
        """How many edges lie in the row of each edge, by edge id: int64 [nnz]."""
        if self._sizes is None:
            length = self.bounds.diff().long()
            self._sizes = torch.empty_like(self.edges).scatter_(0, self.edges, length.repeat_interleave(length))
        return self._sizes

    def chunk(self, first: int, last: int, by_source: bool) -> Chunk:
        a, b = int(self.ptr[first]), int(self.ptr[last])
        firsts = self.bounds[a : b + 1]
        k0, k1 = (int(firsts[0]), int(firsts[-1])) if b > a else (0, 0)
        ends, graph = self.ends[a:b].contiguous(), self.graph
        many = Graph((firsts - k0).contiguous(), self.far[k0:k1].contiguous(), None, graph.num_cols)
        one = Graph(torch.arange(b - a + 1, dtype=ends.dtype, device=ends.device), ends, None, graph.num_rows)
        ptr = (self.ptr[first : last + 1] - a).contiguous()
        gather, spread = (one, many) if by_source else (many, one)
        short = b == a or (k1 - k0 <= bounds.SHORT_RUN_MEAN * (b - a) and int(firsts.diff().max()) <= bounds.SHORT_RUN)
        return Chunk(first, last, ptr, gather, spread, self.edges[k0:k1].contiguous(), short)


class Relations:
    """The edges of `graph` by relation; `types` int32 or int64 [nnz] by edge id, checked."""

    def __init__(self, graph: Graph, types: Tensor, count: int):
        self.count, self.num_cols, self.nnz = count, graph.num_cols, graph.nnz
        self.types = types
        self._shares: dict[torch.dtype, Tensor] = {}
        self._in_order: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._rows_of_matrices: Graph | None = None
        least = bounds.RELATION_CHUNK * (bounds.RELATION_CHUNK_ON_CUDA if graph.device.type == "cuda" else 1)
        most = max(graph.num_rows, graph.num_cols, least)
        rows, by_source = _Rows(graph, types, count), _Rows(graph.transposed, types, count)
        self.sizes = rows.sizes()
        self.by_source = by_source.count < bounds.BY_SOURCE_SHARE * rows.count
        self.num_rows = by_source.count if self.by_source else rows.count
        # For extremes, whose rows are of destinations in any case.
        self.by_destination = self._chunks(rows, most, False)
        self.chunks = self._chunks(by_source, most, True) if self.by_source else self.by_destination

    @staticmethod
    def _chunks(rows: _Rows, most: int, by_source: bool) -> list[Chunk]:
        chunks, offsets, first = [], rows.ptr.tolist(), 0
        for last in range(1, len(offsets)):
            following = offsets[last + 1] if last + 1 < len(offsets) else None
            if following is None or following - offsets[first] > most:
                if offsets[last] > offsets[first]:
                    chunks.append(rows.chunk(first, last, by_source))
                first = last
        return chunks

    def shares(self, dtype: torch.dtype) -> Tensor:
        """Of each edge, one over the number of edges of its relation to its destination: [nnz]."""
        if dtype not in self._shares:
            with modes.outside_inference(grad=False):
                self._shares[dtype] = self.sizes.double().reciprocal().to(dtype)
        return self._shares[dtype]

    def are_shares(self, norm: Tensor) -> bool:
        """True for what `shares` gives."""
        return self._shares.get(norm.dtype) is norm

    def shares_of(self, chunk: Chunk, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`shares` of the edges of a chunk, in their order, and, where its rows are of destinations, of its rows."""
        found = self._in_order.get((chunk.first, dtype))
        if found is None:
            with modes.outside_inference(grad=False):
                edges = self.shares(dtype)[chunk.edges]
                of_rows = chunk.gather.indptr.diff().double().reciprocal().to(dtype)
            found = self._in_order[chunk.first, dtype] = edges, of_rows
        return found

    @functools.cached_property
    def of_edges(self) -> Graph:
        """Relations x edges: to add up values of edges by relation."""
        edges = torch.arange(self.nnz, device=self.types.device, dtype=self.types.dtype)
        return Graph.from_coo(self.types, edges, num_rows=self.count, num_cols=self.nnz)

    def rows_of_matrices(self, graph: Graph) -> Graph:
        """Destinations x the rows of all relations' matrices, one for each source."""
        if self._rows_of_matrices is None:
            types = self.types if graph.edge_ids is None else self.types[graph.edge_ids.long()]
            columns = (types.long() * graph.num_cols + graph.indices).to(index_dtype(self.count * graph.num_cols))
            indptr, edge_ids = graph.indptr.to(columns.dtype, copy=True), graph.edge_ids
            edge_ids = None if edge_ids is None else edge_ids.to(columns.dtype, copy=True)
            self._rows_of_matrices = Graph(indptr, columns, edge_ids, self.count * graph.num_cols)
        return self._rows_of_matrices


def index_dtype(most: int) -> torch.dtype:
    """Of indices up to `most`."""
    return torch.int32 if most <= bounds.INT32_MAX else torch.int64


class Pairs:
    """The pairs of a relation and a source that edges of `graph` have, by relation; `types` as of `Relations`.

    ptr : int64 [count + 1], on the CPU: pairs of each relation.
    gather : pairs x sources. graph : destinations x pairs, with the edge ids of the graph.
    """

    def __init__(self, graph: Graph, types: Tensor, count: int):
        rows = _Rows(graph.transposed, types, count)
        dtype, self.ptr = graph.indices.dtype, rows.ptr
        numbers = torch.arange(rows.count + 1, dtype=dtype, device=graph.device)
        self.gather = Graph(numbers, rows.ends.to(dtype), None, graph.num_cols)
        of_edge = torch.empty_like(rows.edges, dtype=dtype)
        of_edge[rows.edges] = numbers[:-1].repeat_interleave(rows.bounds.diff().long())
        columns = of_edge if graph.edge_ids is None else of_edge[graph.edge_ids.long()]
        self.graph = Graph(graph.indptr, columns, graph.edge_ids, rows.count)


class BothPairs:
    """The pairs of a relation and a source, and of a relation and a destination, that edges of `graph` have.

    sources, targets : Pairs
    between : the edges, with their ids, from the first to the second.
    """

    def __init__(self, graph: Graph, types: Tensor, count: int):
        self.sources, self.targets = Pairs(graph, types, count), Pairs(graph.transposed, types, count)
        ends = (self.targets.graph, self.sources.graph)
        rows, cols = (build.pairs_by_id(g.indptr, g.indices, g.edge_ids)[1] for g in ends)
        counts = {"num_rows": self.targets.gather.num_rows, "num_cols": self.sources.gather.num_rows}
        self.between = Graph.from_coo(rows, cols, **counts)


def both_pairs_of(op: str, graph: Graph, types: Tensor, count: int) -> BothPairs:
    """The pairs at both ends of a graph's edges, kept, and raising, as `relations_of`."""
    return _kept("both pairs", BothPairs, op, graph, types, count)


def pairs_of(op: str, graph: Graph, types: Tensor, count: int) -> Pairs:
    """The pairs of a graph's edges, kept, and raising, as `relations_of`."""
    return _kept("pairs", Pairs, op, graph, types, count)


def relations_of(op: str, graph: Graph, types: Tensor, count: int) -> Relations:
    """The relations of a graph's edges, kept as long as graph and types live and neither is written into.

    Raises
    ------
    TypeError, ValueError
        For types that are not int32 or int64 [nnz] on the graph's device; IndexError: for one outside [0, count).
    """
    return _kept("relations", Relations, op, graph, types, count)


def _kept(name: str, make: Callable[[Graph, Tensor, int], Any], op: str, graph: Graph, types: Tensor, count: int):
    key = (name, count, graph.num_cols)
    if isinstance(types, Tensor) and (found := derived.get((types, graph.indptr), key)) is not None:
        return found
    index = build.as_index("edge_type", types, op)
    if index.dim() != 1 or index.shape[0] != graph.nnz:
        raise ValueError(f"{op}: edge_type: expected [{graph.nnz}], one per edge, got {tuple(index.shape)}")
    if index.device != graph.device:
        raise ValueError(f"{op}: edge_type: expected device {graph.device} (the graph's), got {index.device}")
    with modes.outside_inference(grad=False):
        index = index.clone()
        if index.numel():
            low, high = (int(v) for v in torch.aminmax(index))
            if low < 0 or high >= count:
                bad = low if low < 0 else high
                where = int((index == bad).nonzero()[0])
                raise IndexError(
                    f"{op}: edge_type: expected relations in [0, {count}), got {bad} at edge {where}; "
                    "give one matrix (or row of coefficients) for each relation"
                )
        found = make(graph, index, count)
    if not graph.transient() and _operators.plain((types,)):
        derived.put((types, graph.indptr), key, found)
    return found
