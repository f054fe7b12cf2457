"""From DGL's structure index to our Graph, kept on the index.

An index is frozen for all that matters here: adding or removing edges, reversing, changing formats, dtype or
device, slicing and unpickling all make a new one. So what is derived from it lives in its `_cache`, which DGL
itself keeps out of pickles and clears on legacy mutations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gnnaccel.dgl_backend.device import device_of, host, to_device
from gnnaccel.dgl_backend.touch import ALL, cache_of, index_of, is_all
from gnnaccel.graph import build
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.stack import Stack
from gnnaccel.lower import bounds

_STRUCTURE, _RELATION = "gnnaccel.structure", "gnnaccel.relation"
_REVERSE, _ALL_ROWS, _ENDS = "gnnaccel.reverse", "gnnaccel.all_rows", "gnnaccel.ends"
_COPIES, _SOLE_FORMAT = "sampled_on", "sole_format"
_RECEIVERS, _ALL_ENDS, _STACK = "gnnaccel.receivers", "gnnaccel.all_ends", "gnnaccel.stack"


def structure(gidx) -> Graph:
    """The Graph of an index with one edge type: destinations by rows, sharing DGL's arrays where it can.

    Those are DGL's to keep as they are: `dgl.graph(("csc", ...))` and `adj_tensors` share them with the user too, and a
    write there changes the graph for DGL's own kernels too. Copies would cost every mini-batch block two.
    """
    cell = _cell(gidx)
    if not cell:
        cell.append(_build(gidx))
    return cell[0]


def known_structure(gidx) -> Graph | None:
    """The Graph of an index that has been asked for one, and so has one edge type; no question to DGL's library."""
    cell = cache_of(gidx).get(_STRUCTURE)
    return cell[0] if cell else None


def set_structure(gidx, graph: Graph, ends: tuple[int, int]) -> None:
    """Say of a new index with one edge type between the node types `ends` that `graph` is its Graph."""
    cache_of(gidx).update({_STRUCTURE: [graph], _ENDS: ends, _ALL_ENDS: [ends]})


def ends(gidx) -> tuple[int, int]:
    """The node types of the sources and of the destinations of an index with one edge type."""
    found = cache_of(gidx).get(_ENDS)
    if found is None:
        found = cache_of(gidx)[_ENDS] = tuple(gidx.metagraph.find_edge(0))
    return found


def ends_of(gidx, etype: int) -> tuple[int, int]:
    """The node types of the sources and of the destinations of an edge type."""
    found = cache_of(gidx).get(_ALL_ENDS)
    if found is None:
        found = cache_of(gidx)[_ALL_ENDS] = [
            tuple(gidx.metagraph.find_edge(number)) for number in range(gidx.number_of_etypes())
        ]
    return found[etype]


def arrays_on(graph: Graph, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """indptr, indices and edge ids on `device`, of which the graph keeps copies."""
    indptr, indices, edge_ids = graph.indptr, graph.indices, graph.edge_ids
    if graph.device == device:
        return indptr, indices, edge_ids
    copies = graph.slot(_COPIES, dict)
    if device not in copies:
        ids = None if edge_ids is None else edge_ids.to(device)
        copies[device] = indptr.to(device), indices.to(device), ids
    return copies[device]


def forget_copies(graph: Graph) -> None:
    """Drop those of `arrays_on`."""
    graph.slot(_COPIES, dict).clear()


def known_structures(gidx, etypes: list[int]) -> list[Graph] | None:
    """The Graphs of these edge types, if each has been asked for before; None for an index that may be a new one."""
    found = []
    for etype in etypes:
        graph = known_structure(gidx.get_relation_graph(etype))
        if graph is None:
            return None
        found.append(graph)
    return found


def stack_of(gidx, key: tuple, make: Callable[[], Stack]) -> Stack:
    """What `make` makes of several edge types of an index, once."""
    found = cache_of(gidx).get((_STACK, key))
    if found is None:
        found = cache_of(gidx)[_STACK, key] = make()
    return found


def _cell(gidx) -> list[Graph]:
    """Where an index's Graph is kept, once it is built; indices of the same edges share it."""
    return cache_of(gidx).setdefault(_STRUCTURE, [])


def _build(gidx) -> Graph:
    device = device_of(gidx)
    held = gidx if device is None else host(gidx)
    formats = held.formats()
    created = formats["created"]
    graph = _build_here(held, created) if device is None else _build_on(held, device, created)
    if len(created) == 1 and not formats["not created"]:
        graph.slot(_SOLE_FORMAT, lambda: created[0])
    return graph


def _build_here(gidx, created: list[str]) -> Graph:
    if "csc" in created:
        graph = _from_csr(gidx, by_destination=True)
        if "csr" in created:
            graph._keep_transposed(_from_csr(gidx, by_destination=False))
        return graph
    if "csr" in created:
        return _from_csr(gidx, by_destination=False).transposed
    # A batch, a block or any new graph: DGL's own sort of a small one takes ten times as long.
    num_dst, num_src, dst, src = gidx.adjacency_matrix_tensors(0, True, "coo")
    return Graph.from_coo(dst, src, num_rows=num_dst, num_cols=num_src)


def _build_on(gidx, device: torch.device, created: list[str]) -> Graph:
    """The Graph on a GPU of an index in host memory: what the index has is copied, what it has not is made there."""
    sizes = (gidx.num_edges(0), *(gidx.num_nodes(t) for t in gidx.metagraph.find_edge(0)))
    index = torch.int32 if max(sizes) <= bounds.INT32_MAX else torch.int64

    def copy(tensor):
        return to_device(tensor.to(index), device)

    if "csc" in created or "csr" in created:
        by_destination = "csc" in created
        num_cols, indptr, indices, edge_ids = _csr(gidx, by_destination)
        indices = copy(indices) if indices.numel() else torch.empty(0, dtype=index, device=device)
        graph = Graph(copy(indptr), indices, None if edge_ids is None else copy(edge_ids), num_cols)
        if not by_destination:
            return graph.transposed
        graph.no_empty_rows = bool((indptr.diff() > 0).all())  # here, where nobody waits for a GPU
        return graph
    num_dst, num_src, dst, src = gidx.adjacency_matrix_tensors(0, True, "coo")
    return Graph.from_coo(copy(dst), copy(src), num_rows=num_dst, num_cols=num_src)


def _from_csr(gidx, by_destination: bool) -> Graph:
    num_cols, indptr, indices, edge_ids = _csr(gidx, by_destination)
    return Graph(indptr, indices, edge_ids, num_cols)


def _csr(gidx, by_destination: bool) -> tuple[int, Tensor, Tensor, Tensor | None]:
    """(num_cols, indptr, indices, edge_ids or None) of an index in host memory.

    Raises ValueError for what points out of them: DGL takes any arrays in `dgl.graph(("csr", ...))`.
    """
    _, num_cols, indptr, indices, edge_ids = gidx.adjacency_matrix_tensors(0, by_destination, "csr")
    build.check_offsets("dgl graph: indptr", indptr, indices.numel())
    build.check_range("indices", indices, num_cols, "num_cols")
    if not edge_ids.numel():
        return num_cols, indptr, indices, None
    build.check_range("edge_ids", edge_ids, indices.numel(), "nnz")
    return num_cols, indptr, indices, edge_ids


def all_rows(gidx, norm_by: str) -> Graph:
    """The edges of all edge types by their destination (norm_by "src": source), the nodes of all types end to end.

    Edge ids count through the edge types in order. Its columns say nothing: it serves an edge softmax.
    """
    key = (_ALL_ROWS, norm_by)
    found = cache_of(gidx).get(key)
    if found is None:
        found = cache_of(gidx)[key] = _stack(gidx, by_source=norm_by == "src")
    return found


def _stack(gidx, by_source: bool) -> Graph:
    counts = [gidx.num_nodes(t) for t in range(gidx.number_of_ntypes())]
    rows = []
    for etype in range(gidx.number_of_etypes()):
        graph, end = structure(gidx.get_relation_graph(etype)), gidx.metagraph.find_edge(etype)[0 if by_source else 1]
        graph = graph.transposed if by_source else graph
        first = sum(counts[:end])
        row = torch.arange(first, first + graph.num_rows, device=graph.device)
        row = row.repeat_interleave(graph.indptr.diff().long(), output_size=graph.nnz)
        rows.append(row if graph.edge_ids is None else torch.empty_like(row).scatter_(0, graph.edge_ids.long(), row))
    row = torch.cat(rows)
    return Graph.from_coo(row, torch.zeros_like(row), num_rows=sum(counts), num_cols=1)


def relation_graph(original):
    """Memoised `HeteroGraphIndex.get_relation_graph`."""

    def method(gidx, etype):
        key = (_RELATION, int(etype))
        found = cache_of(gidx).get(key)
        if found is None:
            found = cache_of(gidx)[key] = original(gidx, etype)
            if gidx.number_of_etypes() == 1:  # update_all goes through this index, ops and `prepare` through the other
                cache_of(found)[_STRUCTURE] = _cell(gidx)
        return found

    return method


def reversed_index(original):
    """Memoised `HeteroGraphIndex.reverse`: what is prepared for a reversed graph serves the next one."""

    def method(gidx):
        found = cache_of(gidx).get(_REVERSE)
        if found is None:
            found = cache_of(gidx)[_REVERSE] = original(gidx)
        return found

    return method


def _degrees(name: str, original):
    """`DGLGraph.in_degrees` or `out_degrees` that counts all nodes of an edge type once; layers ask at every call.

    A graph that may have its edges by the other end alone is DGL's to refuse.
    """
    nodes, refused = {"in_degrees": ("v", "csr"), "out_degrees": ("u", "csc")}[name]

    def method(self, *args, **kwargs):
        given = dict(zip((nodes, "etype"), args, strict=False)) | kwargs
        if not given.keys() <= {nodes, "etype"} or not is_all(given.get(nodes, ALL)):
            return original(self, *args, **kwargs)
        index = index_of(self)
        cache, key = cache_of(index), (f"gnnaccel.{name}", self.get_etype_id(given.get("etype")))
        found = cache.get(key)
        if found is None:
            graph = known_structure(index)
            if graph is None and device_of(index) is None and index.number_of_etypes() == 1:
                graph = structure(index)  # DGL's C++ would sort the edges for itself
            if graph is not None and graph.slot(_SOLE_FORMAT, str) != refused:
                degree = (graph if nodes == "v" else graph.transposed).indptr.diff().to(self.idtype)
            else:
                degree = original(self, *args, **kwargs)
            found = cache[key] = degree
        return found.clone()  # the caller may write into it

    return method


in_degrees, out_degrees = (functools.partial(_degrees, name) for name in ("in_degrees", "out_degrees"))


def norm(g, degrees: str, power: float | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Degrees (at least 1) of a graph's nodes to a power, found once per index; None for no power.

    Read by kernels, which accumulate in this dtype: float64 for float64, else float32.
    """
    if power is None:
        return None
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cache, key = cache_of(index_of(g)), ("gnnaccel.norm", degrees, power, dtype)
    found = cache.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = cache[key] = getattr(g, degrees)().to(dtype).clamp(min=1).pow(power)
    return found


def degrees_and_one(g, dtype: torch.dtype) -> torch.Tensor:
    """Edges into each destination and one more, [num_rows, 1], found once per index."""
    cache, key = cache_of(index_of(g)), ("gnnaccel.degrees_and_one", dtype)
    found = cache.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = cache[key] = g.in_degrees().to(dtype).unsqueeze(-1) + 1
    return found


def every_row_has_edges(gidx) -> bool:
    """True if no destination is without in-edges; found once per index."""
    return structure(gidx).no_empty_rows


def receivers(gidx) -> tuple[Tensor | None, Graph]:
    """Which destinations have in-edges (None: all), and a graph with one edge from each of them to itself; found once
    per index."""
    found = cache_of(gidx).get(_RECEIVERS)
    if found is None:
        graph = structure(gidx)
        with torch.inference_mode(False):
            ids = None if graph.no_empty_rows else graph.indptr.diff().nonzero().squeeze(1)
            count = graph.num_rows if ids is None else ids.numel()
            steps = torch.arange(count + 1, dtype=graph.indptr.dtype, device=graph.device)
        found = cache_of(gidx)[_RECEIVERS] = ids, Graph(steps, steps[:-1], None, count)
    return found


def forget(g) -> None:
    """Drop what is cached on the index of a DGLGraph."""
    cache = cache_of(index_of(g))
    for key in [k for k in cache if str(k[0] if isinstance(k, tuple) else k).startswith("gnnaccel.")]:
        del cache[key]


def to_graph(g, etype=None) -> Graph:
    """The Graph of a DGLGraph (or block).

    Parameters
    ----------
    g : dgl.DGLGraph
    etype : str or (str, str, str), optional
        The edge type; needed where there are several.

    Raises
    ------
    ValueError
        If the graph has several edge types and none is named.
    """
    index = index_of(g)
    if index.number_of_etypes() > 1:
        if etype is None:
            raise ValueError(f"as_graph: the graph has several edge types; name one of {g.canonical_etypes}")
        index = index.get_relation_graph(g.get_etype_id(etype))
    return structure(index)
