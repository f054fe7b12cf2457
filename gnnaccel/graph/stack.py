"""Several graphs into the same destinations as one: what the edge types of a heterogeneous graph are to a kernel.

The sources of all stand end to end as columns, those of a node type once, however many edge types leave it. Rows are
read two ways, of the same arrays: one for each destination (`merged`), or one for each destination and edge type
(`apart`), row v * count + r.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds


class Relation(NamedTuple):
    """One of the graphs: its source u is column `base` + u * `stride` of the stack."""

    graph: Graph
    base: int
    stride: int = 1


class EdgeList(NamedTuple):
    """Edges [2, E], sources and destinations, of which no graph is made: they may be gone after one call."""

    edges: Tensor
    num_rows: int
    num_cols: int

    @property
    def nnz(self) -> int:
        return self.edges.shape[1]

    @property
    def device(self) -> torch.device:
        return self.edges.device


def graph_of(edges: Graph | EdgeList) -> Graph:
    """The graph of a list of edges, made now; a graph itself."""
    if not isinstance(edges, EdgeList):
        return edges
    sources, destinations = edges.edges
    return Graph.from_coo(destinations, sources, num_rows=edges.num_rows, num_cols=edges.num_cols)


class Stack:
    """The edges of `relations`, which have the same rows.

    Parameters
    ----------
    relations : sequence of Relation
        At least one. A row's edges stand in this order.
    num_cols : int
    """

    def __init__(self, relations: Sequence[Relation], num_cols: int):
        self.graphs = [relation.graph for relation in relations]
        self.count, self.num_rows, self.num_cols = len(self.graphs), self.graphs[0].num_rows, num_cols
        self.sizes = [graph.nnz for graph in self.graphs]
        self._factors: dict[tuple, Tensor] = {}
        nnz = sum(self.sizes)
        narrow = max(nnz, num_cols, self.num_rows * self.count) <= bounds.INT32_MAX
        self._dtype = torch.int32 if narrow else torch.int64
        with torch.inference_mode(False), torch.no_grad():
            self._place(relations, nnz)

    def _place(self, relations: Sequence[Relation], nnz: int) -> None:
        device = self.graphs[0].device
        degrees = torch.stack([graph.indptr.diff().long() for graph in self.graphs], dim=1)  # [num_rows, count]
        indptr = torch.zeros(degrees.numel() + 1, dtype=torch.int64, device=device)
        torch.cumsum(degrees.flatten(), 0, out=indptr[1:])
        starts = indptr[:-1].view(self.num_rows, self.count)
        indices = torch.empty(nnz, dtype=self._dtype, device=device)
        edge_ids, places, before = torch.empty_like(indices), [], 0
        for r, (graph, base, stride) in enumerate(relations):
            first = starts[:, r] - graph.indptr[:-1]
            place = torch.repeat_interleave(first, degrees[:, r], output_size=graph.nnz)
            ids = torch.arange(graph.nnz, device=device)
            place += ids
            indices[place] = (graph.indices.long() * stride + base).to(self._dtype)
            ids = ids if graph.edge_ids is None else graph.edge_ids.long()
            edge_ids[place] = (ids + before).to(self._dtype)
            places.append(place)
            before += graph.nnz
        self._indptr, self._indices, self._edge_ids = indptr.to(self._dtype), indices, edge_ids
        self._places = torch.cat(places)

    @functools.cached_property
    def merged(self) -> Graph:
        """A row for each destination. An edge's id is its place in the stack: for weights of `factors`."""
        return Graph(self._indptr[:: self.count].contiguous(), self._indices, None, self.num_cols)

    @functools.cached_property
    def apart(self) -> Graph:
        """A row for each destination and relation, [num_rows * count]. Edge ids as of `merged`."""
        return Graph(self._indptr, self._indices, None, self.num_cols)

    @functools.cached_property
    def merged_by_id(self) -> Graph:
        """`merged`, an edge's id being that of its own graph, behind all those of the graphs before it."""
        return Graph(self._indptr[:: self.count].contiguous(), self._indices, self._edge_ids, self.num_cols)

    @functools.cached_property
    def apart_by_id(self) -> Graph:
        """`apart` likewise."""
        return Graph(self._indptr, self._indices, self._edge_ids, self.num_cols)

    def factors(self, kinds: Sequence[str], dtype: torch.dtype, by_id: bool = False) -> Tensor:
        """[nnz], a constant for each edge by which a sum over all edges is that of each scaled sum.

        kinds : of `factor`, for each graph.
        by_id : in the order of `merged_by_id`, not of `merged`.
        """
        key = (tuple(kinds), dtype, by_id)
        found = self._factors.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                each = [factor(graph, kind, dtype) for graph, kind in zip(self.graphs, kinds, strict=True)]
                joined = torch.cat(each)
                found = torch.empty_like(joined).index_copy_(0, self._places, joined)
                if by_id:
                    found = torch.empty_like(found).index_copy_(0, self._edge_ids.long(), found)
            self._factors[key] = found
        return found


def below_each_other(graphs: list[Graph], own_columns: bool = False) -> Graph:
    """The rows of all as one graph; edge ids, if they have any, follow each other.

    own_columns : each graph has columns of its own, behind those of the graphs before it; else all have the same.
    """
    if len(graphs) == 1:
        return graphs[0]
    with torch.inference_mode(False), torch.no_grad():
        starts, indices, ids, before, columns = [], [], [], 0, 0
        for graph in graphs:
            starts.append(graph.indptr[:-1].long() + before)
            indices.append(graph.indices.long() + columns)
            own = torch.arange(graph.nnz, device=graph.device) if graph.edge_ids is None else graph.edge_ids.long()
            ids.append(own + before)
            before += graph.nnz
            columns += graph.num_cols if own_columns else 0
        num_cols = columns if own_columns else graphs[0].num_cols
        indptr = torch.cat([*starts, torch.tensor([before], device=graphs[0].device)])
        dtype = torch.int32 if max(before, num_cols) <= bounds.INT32_MAX else torch.int64
        in_order = all(graph.edge_ids is None for graph in graphs)
        edge_ids = None if in_order else torch.cat(ids).to(dtype)
        return Graph(indptr.to(dtype), torch.cat(indices).to(dtype), edge_ids, num_cols)


def end_to_end(edges: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Of all edges of several types, one type after the other: the number of the type, the source and the destination.

    Parameters
    ----------
    edges : sequence of Tensor [2, E]
    sizes : sequence of (int, int)
        How many nodes the sources and the destinations of a type are of.

    Returns
    -------
    Three tensors, int64, or None for an index that is out of range; a GPU is waited for once
    """
    device, counts = edges[0].device, torch.tensor([each.shape[1] for each in edges])
    which = torch.repeat_interleave(counts.to(device), output_size=int(counts.sum()))
    ends = torch.cat([each.long() for each in edges], dim=1)
    limits = torch.tensor(sizes).t().to(device)[:, which]
    if not bool(((ends >= 0) & (ends < limits)).all()):
        return None
    return which, *ends


def placed(ends: Tensor, which: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """Where ends of edges of types `which` stand in a stack: end u of type r at places[r][0] + u * places[r][1]."""
    base, stride = torch.tensor(places).t().to(ends.device)[:, which]
    return ends * stride + base


class Filled:
    """The rows of `relations` that have edges, end to end, relation by relation.

    rows : Graph [filled rows, num_cols]
        The sums of each such row.
    spread : Graph [num_rows, filled rows]
        Which of these belong to each destination.
    ptr : Tensor [number of relations + 1], int64, on the CPU
        Where those of each relation begin.
    """

    def __init__(self, relations: Sequence[Relation], num_cols: int):
        self._graphs = [relation.graph for relation in relations]
        self._factors: dict[tuple, Tensor] = {}
        device, num_rows = self._graphs[0].device, self._graphs[0].num_rows
        with torch.inference_mode(False), torch.no_grad():
            starts, sources, rows, before = [], [], [], 0
            for graph, base, stride in relations:
                ids = (graph.indptr.diff() > 0).nonzero().squeeze(1)
                rows.append(ids)
                starts.append(graph.indptr[:-1].long()[ids] + before)
                sources.append(graph.indices.long() * stride + base)
                before += graph.nnz
            self.ptr = torch.tensor([0, *(ids.numel() for ids in rows)]).cumsum(0)
            dtype = torch.int32 if max(before, num_cols) <= bounds.INT32_MAX else torch.int64
            indptr = torch.cat([*starts, torch.tensor([before], device=device)]).to(dtype)
            self.rows = Graph(indptr, torch.cat(sources).to(dtype), None, num_cols)
            joined = torch.cat(rows)
            places = torch.arange(joined.numel(), device=device)
            self.spread = Graph.from_coo(joined, places, num_rows=num_rows, num_cols=joined.numel())

    def factors(self, kinds: Sequence[str], dtype: torch.dtype) -> Tensor:
        """As of `Stack`, for `rows`."""
        key = (tuple(kinds), dtype)
        if key not in self._factors:
            with torch.inference_mode(False), torch.no_grad():
                each = [factor(graph, kind, dtype) for graph, kind in zip(self._graphs, kinds, strict=True)]
                self._factors[key] = torch.cat(each)
        return self._factors[key]


def filled_rows(graph: Graph) -> int:
    """How many rows of a graph have edges. Found once."""
    return graph.slot("filled_rows", lambda: int((graph.indptr.diff() > 0).sum()))


def factor(graph: Graph, kind: str, dtype: torch.dtype) -> Tensor:
    """[nnz], in the order of the nonzeros, by which an edge (u, v) counts in a sum.

    kind : "sum": 1. "mean": 1 / in(v). "left": 1 / out(u). "both": (in(v) out(u)) ** -0.5. "gcn": of a square graph,
        (in(v) in(u)) ** -0.5, 0 for a u without in-edges.
    """
    ones = torch.ones(graph.nnz, dtype=dtype, device=graph.device)
    if kind == "sum":
        return ones
    degrees, columns = graph.indptr.diff(), graph.indices.long()
    if kind != "left":
        power = -1.0 if kind == "mean" else -0.5
        scale = degrees.clamp(min=1).to(dtype).pow(power)
        ones *= torch.repeat_interleave(scale, degrees.long(), output_size=graph.nnz)
    if kind == "gcn":
        ones *= degrees.to(dtype).pow(-0.5).nan_to_num(posinf=0.0)[columns]
    elif kind != "mean":
        sources = torch.bincount(columns, minlength=graph.num_cols).clamp(min=1).to(dtype)
        ones *= sources.pow(-1.0 if kind == "left" else -0.5)[columns]
    return ones
