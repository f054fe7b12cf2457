"""PyG's descriptions of a graph (edge_index, EdgeIndex, torch.sparse, SparseTensor, Data) as a gnnaccel.Graph.

PyG sends messages from ``edge_index[0]`` to ``edge_index[1]`` (flow "source_to_target"), and gives adjacency
matrices transposed: rows of ``adj_t`` are destinations. Both become a Graph whose rows are destinations.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from gnnaccel import schedule, touch
from gnnaccel.graph import build, hops, modes
from gnnaccel.graph.cache import USED, derived, graph_key
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy.reduce import Unsupported, unserved
from gnnaccel.lower import bounds
from gnnaccel.ops._described import Described
from gnnaccel.pyg_backend.touch import Data, EdgeIndex

INDEX_DTYPES = (torch.int64, torch.int32)
_UNCOALESCED = f"adjacency of layout {torch.sparse_coo}, not coalesced"
_HOPS = "hops"


def owners_of(edges) -> tuple[Tensor, ...]:
    """The tensor objects whose identity stands for `edges` in the cache."""
    if type(edges) is Tensor:
        return (edges,)
    if isinstance(edges, EdgeIndex):
        if not _holds_tensor():
            return (edges,)
        return edges, edges.as_tensor()  # writes bump the counter of one or the other, depending on how they are made
    if isinstance(edges, SparseTensor):
        storage = edges.storage
        # Matrices of one structure (set_value) share these tensors; the row indices are made when first needed.
        return storage.col(), storage._row if storage.has_row() else storage.rowptr()
    return (edges,)


@functools.cache
def _holds_tensor() -> bool:
    """False for PyG 2.5, whose EdgeIndex makes a tensor of its own memory at each call."""
    one = EdgeIndex(torch.zeros(2, 1, dtype=torch.int64))
    return one.as_tensor() is one.as_tensor()


def from_edge_index(edge_index: Tensor, num_src: int, num_dst: int, flow: str = "source_to_target") -> Graph:
    """The cached Graph of an integer edge_index [2, E] with edge ids in its column order.

    Raises
    ------
    ValueError
        For an index out of range; nothing is cached then.
    """
    owners = owners_of(edge_index)
    key = graph_key(num_src, num_dst, flow)
    graph = derived.get(owners, key)
    if graph is None:
        data = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
        destinations = 1 if flow == "source_to_target" else 0
        sampled = hops_of(edge_index) if destinations and num_src == num_dst else None
        if sampled is not None and sampled.nodes[-1] > num_src:
            sampled = None
        with modes.outside_inference():
            graph = Graph(*build.edges_to_csr(data, destinations, num_dst, num_src, sampled is not None))
            # A write that torch does not count (through .data or NumPy) may have come between.
            if (
                sampled is not None
                and graph.edge_ids is None
                and (graph.device.type == "cuda" or hops.are_of(graph, sampled))
            ):
                hops.put(graph, sampled)
            _inherit(graph, owners, key)
        derived.put(owners, key, graph)
        derived.put(owners, USED, True)
    return graph


def note_hops(edge_index: Tensor, sampled: hops.Hops) -> None:
    """Remember of an edge_index that our sampler has made that it is of these hops."""
    if edge_index.shape[1] == sampled.edges[-1]:
        derived.put((edge_index,), _HOPS, sampled)


def hops_of(edge_index: Tensor) -> hops.Hops | None:
    """The hops of an edge_index that is as our sampler has made it, or of the first of them, as PyG's trim_to_layer
    gives them to a layer; None for any other."""
    if type(edge_index) is not Tensor:
        return None
    found = derived.get((edge_index,), _HOPS)
    if found is not None or edge_index.is_inference() or (whole := touch.base_of(edge_index)) is None:
        return found
    found = derived.get((whole,), _HOPS)  # of no sparse matrix, which has no address
    if found is None or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return None
    if edge_index.data_ptr() != whole.data_ptr() or edge_index.stride() != whole.stride():
        return None
    return found.first(edge_index.shape[1])


def with_loops(edge_index: Tensor, num_nodes: int, flow: str, dropped: bool) -> Graph:
    """`from_edge_index` of what PyG's add_self_loops, after its remove_self_loops if loops are to be `dropped`, makes
    of an edge_index that is a plain tensor: kept with that, and prepared as that has been."""
    owners, key = (edge_index,), ("looped", num_nodes, flow, dropped)
    graph = derived.get(owners, key)
    if graph is None:
        graph = _looped(edge_index, num_nodes, flow, dropped)
        derived.put(owners, key, graph)
        derived.put(owners, USED, True)
    return graph


def _looped(edge_index: Tensor, num_nodes: int, flow: str, dropped: bool) -> Graph:
    owners = (edge_index,)
    with modes.outside_inference():
        destinations = 1 if flow == "source_to_target" else 0
        graph = Graph(*build.edges_to_looped_csr(edge_index, destinations, num_nodes, dropped))
        plain = graph_key(num_nodes, num_nodes, flow)
        if (prepared := derived.get(owners, plain)) is not None:
            schedule.inherit(graph, prepared)
        else:
            _inherit(graph, owners, plain)
    return graph


def of_described(edge_index: Tensor, num_src: int, num_dst: int, loops: str, flipped: bool) -> Graph:
    """The cached Graph that a `gnnaccel.ops._described.Described` stands for: the edge of id e is column e of
    edge_index, the loop of node v that of id E + v."""
    flow = "target_to_source" if flipped else "source_to_target"
    if loops == "none":
        return from_edge_index(edge_index, num_src, num_dst, flow)
    owners, dropped, most = (edge_index,), loops == "one", edge_index.shape[1] + num_src
    spaced = derived.get(owners, ("spaced", num_src, flow)) if dropped else None
    if spaced is not None:
        return spaced
    looped = ("looped", num_src, flow, dropped)
    graph = derived.get(owners, looped)
    if graph is None:
        graph = _looped(edge_index, num_src, flow, dropped)
        if graph.nnz == most:
            derived.put(owners, looped, graph)
        derived.put(owners, USED, True)
    if graph.nnz == most:
        return graph
    # Loops were left out, and the edges behind them have moved up. Who compiles has no use for their ids there.
    with modes.outside_inference(grad=False):
        kept = (edge_index[0] != edge_index[1]).nonzero().view(-1)
        loop_ids = torch.arange(edge_index.shape[1], most, device=edge_index.device)
        edge_ids = torch.cat([kept, loop_ids]).to(graph.indices.dtype)
        edge_ids = edge_ids if graph.edge_ids is None else edge_ids[graph.edge_ids]
        spaced = Graph(graph.indptr, graph.indices, edge_ids, graph.num_cols)
        schedule.inherit(spaced, graph)
    derived.put(owners, ("spaced", num_src, flow), spaced)
    return spaced


Described.graph_of = staticmethod(of_described)


def note_origin(edges, origin: tuple[Tensor, ...]) -> None:
    """Remember that a layer made `edges` of those whose owners are `origin`, by adding or removing self-loops."""
    derived.put(owners_of(edges), "origin", tuple(map(derived.owner, origin)))


def _inherit(graph: Graph, owners: tuple[Tensor, ...], key: tuple) -> None:
    """Prepare the new `graph` as the user has prepared what its edges were made of, if that was prepared."""
    while (origin := derived.get(owners, "origin")) is not None:
        owners = tuple(held.ref() for held in origin)
        if any(owner is None for owner in owners):
            return
        prepared = derived.get(owners, key)
        if prepared is not None:
            return schedule.inherit(graph, prepared)


def from_sparse(adj) -> Graph:
    """The cached Graph of an adjacency matrix whose rows are destinations; edge ids in the order of its values.

    Parameters
    ----------
    adj : torch.sparse CSR, CSC or coalesced COO tensor, or torch_sparse.SparseTensor

    Raises
    ------
    Unsupported
        For an uncoalesced COO matrix (its duplicates have yet to be summed) and other layouts.
    """
    owners = owners_of(adj)
    key = ("graph", adj.size(0), adj.size(1))
    graph = derived.get(owners, key)
    if graph is None:
        with modes.outside_inference(grad=False):
            graph = _build_sparse(adj)
            _inherit(graph, owners, key)
        derived.put(owners, key, graph)
    return graph


def _from_csr(indptr: Tensor, indices: Tensor, num_cols: int) -> Graph:
    """Graph from a framework's CSR arrays: copies, with indices of half the bytes where they fit."""
    if indices.dtype == torch.int64 and max(indptr.numel(), indices.numel(), num_cols) <= bounds.INT32_MAX:
        build.check_csr(indptr, indices, None, num_cols)  # before they are narrowed
        indptr, indices = indptr.to(torch.int32), indices.to(torch.int32)
        return Graph.from_csr(indptr, indices, num_cols=num_cols, copy=False)
    return Graph.from_csr(indptr, indices, num_cols=num_cols)


def _build_sparse(adj) -> Graph:
    if isinstance(adj, SparseTensor):
        rowptr, col, _ = adj.csr()
        return _from_csr(rowptr, col, adj.size(1))
    rows, cols = adj.shape[:2]
    if adj.layout == torch.sparse_csr:
        return _from_csr(adj.crow_indices().detach(), adj.col_indices().detach(), cols)
    if adj.layout == torch.sparse_csc:
        return _from_csr(adj.ccol_indices().detach(), adj.row_indices().detach(), rows).transposed
    if adj.layout == torch.sparse_coo and adj.is_coalesced():
        index = adj._indices()
        return Graph.from_coo(index[0], index[1], num_rows=rows, num_cols=cols)
    raise Unsupported(_UNCOALESCED if adj.layout == torch.sparse_coo else f"adjacency of layout {adj.layout}")


def values_of(adj) -> Tensor | None:
    """The values of an adjacency matrix in the order of `from_sparse`'s edge ids; None for none. Raises as that."""
    if isinstance(adj, SparseTensor):
        return adj.storage.value()
    if adj.layout == torch.sparse_coo and not adj.is_coalesced():
        raise Unsupported(_UNCOALESCED)
    values = adj.values()
    # PyG marks COO matrices as coalesced, which counts as a write into what shares their counter of writes.
    return values.data if adj.layout == torch.sparse_coo and not values.requires_grad else values


def columns_of(adj) -> Tensor | None:
    """The tensor that PyG hands out as the sources of the edges of an adjacency matrix, if it is the same each time."""
    if isinstance(adj, SparseTensor):
        return adj.storage.col()
    if adj.layout == torch.sparse_csr:
        return adj.col_indices()
    return adj._indices()[1] if adj.layout == torch.sparse_coo else None


class Nonzeros(NamedTuple):
    """Those of an adjacency matrix: the kind of their device, how many, and their values if each has several."""

    kind: str
    number: int
    features: Tensor | None


def nonzeros_of(adj) -> Nonzeros | None:
    """The nonzeros of an adjacency matrix with indices of int64; None for others and what `from_sparse` refuses."""
    if isinstance(adj, SparseTensor):
        kind, count, values = adj.device().type, adj.nnz(), adj.storage.value()
    elif type(adj) is not Tensor:
        return None
    elif adj.layout is torch.sparse_coo and adj.is_coalesced():
        kind, count, values = adj.device.type, touch.nnz(adj), touch.raw_values(adj)
    elif adj.layout is torch.sparse_csr and adj.col_indices().dtype == torch.int64:
        kind, count, values = adj.device.type, touch.nnz(adj), adj.values()
    else:
        return None
    return Nonzeros(kind, count, values if values is not None and values.dim() > 1 else None)


def to_graph(obj, num_nodes: int | None = None) -> Graph:
    """Cached gnnaccel.Graph of a PyG object; rows are destinations, edge ids are PyG's edge order.

    Parameters
    ----------
    obj : Data, Tensor [2, E] of int64 or int32, EdgeIndex, torch.sparse tensor or SparseTensor
        A sparse matrix is read as PyG's transposed adjacency ``adj_t``.
    num_nodes : int, optional
        Number of nodes; default: what `obj` says, else the largest index + 1. Not for sparse matrices.

    Raises
    ------
    TypeError
        For another type, or an edge_index that is not of int64 or int32.
    ValueError
        For a wrong shape or an index out of range.
    """
    if isinstance(obj, Data):
        edges = obj.edge_index if obj.edge_index is not None else obj.get("adj_t")
        if edges is None:
            raise ValueError("to_graph: obj: expected a Data with edge_index or adj_t, got neither")
        return to_graph(edges, obj.num_nodes if num_nodes is None and not _is_sparse(edges) else num_nodes)
    if _is_sparse(obj):
        if num_nodes is not None and obj.size(0) != num_nodes:
            raise ValueError(f"to_graph: num_nodes: the matrix has {obj.size(0)} rows, got {num_nodes}")
        try:
            return from_sparse(obj)
        except Unsupported as error:
            raise ValueError(f"to_graph: obj: {error}; call .coalesce() or .to_sparse_csr() first") from None
    if not isinstance(obj, Tensor):
        raise TypeError(
            "to_graph: obj: expected a Data, edge_index, EdgeIndex, torch.sparse tensor or SparseTensor, got "
            f"{type(obj).__name__}; of a HeteroData pass one edge type's edge_index"
        )
    if obj.dtype not in INDEX_DTYPES:
        raise TypeError(f"to_graph: obj: expected an edge_index of int64 or int32, got {obj.dtype}")
    if obj.dim() != 2 or obj.shape[0] != 2:
        raise ValueError(f"to_graph: obj: expected an edge_index of shape [2, E], got {tuple(obj.shape)}")
    num_dst = num_src = num_nodes
    if num_nodes is None and isinstance(obj, EdgeIndex):
        num_src, num_dst = obj.sparse_size()
    if num_src is None or num_dst is None:
        top = int(obj.max()) + 1 if obj.numel() else 0
        num_src, num_dst = (top if n is None else n for n in (num_src, num_dst))
    return from_edge_index(obj, num_src, num_dst)


def _is_sparse(obj) -> bool:
    return isinstance(obj, SparseTensor) or (isinstance(obj, Tensor) and is_torch_sparse_tensor(obj))


def _check_device(edges) -> torch.device | None:
    if isinstance(edges, SparseTensor):
        device = edges.device()
    else:
        device = edges.device if isinstance(edges, Tensor) else None  # a proxy of torch.fx answers anything
    if device is not None and (reason := unserved(device)):
        raise Unsupported(reason)
    return device


class Edges:
    """The edges of one propagate() call: where they come from, how many nodes there are on each side.

    Sizes are collected as PyG does: from the `size` argument, then from the features that are lifted; a side
    that stays unknown is as large as the other.
    """

    __slots__ = ("device", "edge_index", "flow", "is_sparse", "node_dim", "pairs_by_flow", "size")

    def __init__(self, edge_index, size, flow: str, node_dim: int, pairs_by_flow: bool = False):
        self.edge_index = edge_index
        self.node_dim = node_dim
        self.flow = flow
        self.pairs_by_flow = pairs_by_flow
        kind = type(edge_index)
        self.is_sparse = False
        self.device = _check_device(edge_index)
        if (kind is Tensor and edge_index.layout is torch.strided) or kind is EdgeIndex:
            if edge_index.dtype not in INDEX_DTYPES or edge_index.dim() != 2 or edge_index.shape[0] != 2:
                raise Unsupported(f"edge_index of {edge_index.dtype}, shape {tuple(edge_index.shape)}")
            if kind is EdgeIndex:
                self.size = [edge_index.num_rows, edge_index.num_cols]
            else:
                self.size = [None, None] if size is None else list(size)
        elif _is_sparse(edge_index):
            if flow == "target_to_source":
                raise Unsupported('an adjacency matrix with flow "target_to_source"')
            self.is_sparse = True
            self.size = [edge_index.size(1), edge_index.size(0)]
        else:
            raise Unsupported(f"edges given as {kind.__name__}")

    @property
    def sides(self) -> tuple[int, int]:
        """Positions of destinations (i) and sources (j) in `size` and in feature tuples."""
        return (1, 0) if self.flow == "source_to_target" else (0, 1)

    def side(self, suffix: str) -> int:
        """Position of the side that PyG's argument suffix "_i" or "_j" names."""
        i, j = self.sides
        return i if suffix == "_i" else j

    def node_feature(self, value, suffix: str) -> Tensor | None:
        """The feature that PyG would lift for an argument that ends in `suffix`; notes the sizes."""
        picked = value
        if isinstance(value, (tuple, list)):
            if len(value) != 2:
                raise Unsupported(f"a tuple of {len(value)} features")
            # PyG's specialised propagate() takes the first of a pair for "_j" whatever the flow; its base one does not.
            picked = value[self.side(suffix) if self.pairs_by_flow else suffix == "_i"]
            for dim, item in enumerate(value):
                if isinstance(item, Tensor):
                    self._set_size(dim, item)
            crossed = self.flow == "target_to_source" and not self.pairs_by_flow
            if crossed and None not in self.size and self.size[0] != self.size[1]:
                raise Unsupported('features of two sizes with flow "target_to_source"')
        elif isinstance(value, Tensor):
            self._set_size(self.side(suffix), value)
        return picked if isinstance(picked, Tensor) else None

    def _set_size(self, dim: int, feature: Tensor) -> None:
        if feature.device != self.device:
            raise Unsupported(f"features on {feature.device} and edges on {self.device}")
        shape = feature.shape
        rows = shape[self.node_dim] if -len(shape) <= self.node_dim < len(shape) else -1
        if self.size[dim] is None:
            self.size[dim] = rows
        elif self.size[dim] != rows:
            raise Unsupported(f"{rows} feature rows where {self.size[dim]} nodes are expected")

    def num_nodes(self, side: int) -> int:
        """Number of nodes on one side."""
        number = self.size[side] if self.size[side] is not None else self.size[1 - side]
        if number is None:
            raise Unsupported("no node feature to tell the number of nodes")
        return number

    def graph(self) -> Graph:
        """The Graph of these edges (call once the features were seen)."""
        try:
            if self.is_sparse:
                if not self.pairs_by_flow and getattr(self.edge_index, "layout", None) is torch.sparse_csc:
                    raise Unsupported("an adjacency in CSC layout")  # PyG's specialised propagate() refuses it
                return from_sparse(self.edge_index)
            i, j = self.sides
            return from_edge_index(self.edge_index, self.num_nodes(j), self.num_nodes(i), self.flow)
        except ValueError as error:  # PyG reports bad indices in its own words
            raise Unsupported(str(error)) from error
