"""What loaders of PyG's ask of a SparseTensor of torch-sparse, on our sampling, where that package is not installed.

`enable` of samplers.py gives PyG's own methods `Adjacency` for that class: of ShaDowKHopSampler, GraphSAINT* and the
first NeighborSampler, that of torch_geometric.loader.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils.sparse import ptr2index

from gnnaccel import sampling
from gnnaccel.pyg_backend.compressed import check_nodes, index2ptr


class Adjacency:
    """A square or rectangular matrix: row, column and value of each entry, in the order of rows and columns."""

    def __init__(
        self, row=None, rowptr=None, col=None, value=None, sparse_sizes=None, is_sorted=False, trust_data=False
    ):
        self._row = ptr2index(rowptr) if row is None else row.long()
        self._col, self._value, self._sizes = col.long(), value, tuple(sparse_sizes)
        self._is_sorted, self._rowptr = is_sorted, None

    def _sort(self) -> None:
        if self._is_sorted:
            return
        self._is_sorted = True
        check_nodes(self._row, self._sizes[0])
        check_nodes(self._col, self._sizes[1])
        key = self._row * self._sizes[1] + self._col
        if bool((key.diff() < 0).any()):
            order = key.argsort(stable=True)
            self._row, self._col = self._row[order], self._col[order]
            self._value = None if self._value is None else self._value[order]

    # ---- Of SparseTensor. ----

    @property
    def storage(self) -> Adjacency:
        return self

    def t(self) -> Adjacency:
        return Adjacency(self._col, None, self._row, self._value, self._sizes[::-1])

    def sparse_size(self, dim: int) -> int:
        return self._sizes[dim]

    def sparse_sizes(self) -> tuple[int, ...]:
        return self._sizes

    def coo(self) -> tuple[Tensor, Tensor, Tensor | None]:
        self._sort()
        return self._row, self._col, self._value

    def csr(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.rowptr(), self._col, self._value

    def random_walk(self, start: Tensor, walk_length: int) -> Tensor:
        return sampling.random_walk(self.rowptr(), self._col, start, walk_length)

    def saint_subgraph(self, node_idx: Tensor) -> tuple[Adjacency, Tensor]:
        """The entries between these nodes, each of which is there once, and which entries they are."""
        found = sampling.induced_subgraph(self.rowptr(), self._col, node_idx)
        value = None if self._value is None else self._value[found.edge]
        sizes = (node_idx.numel(), node_idx.numel())
        return Adjacency(found.col, None, found.row, value, sizes), found.edge

    def sample_adj(self, subset: Tensor, num_neighbors: int, replace: bool = False) -> tuple[Adjacency, Tensor]:
        """Entries of these rows, so many of each, and the nodes that are their columns: the rows' own first."""
        found = sampling.neighbor_sample(self.rowptr(), self._col, subset, [num_neighbors], replace=replace)
        value = None if self._value is None else self._value[found.edge]
        return Adjacency(found.col, None, found.row, value, (subset.numel(), found.node.numel())), found.node

    # ---- Of its storage. ----

    def row(self) -> Tensor:
        return self.coo()[0]

    def rowptr(self) -> Tensor:
        if self._rowptr is None:
            self._sort()
            self._rowptr = index2ptr(self._row, self._sizes[0])
        return self._rowptr

    def value(self) -> Tensor | None:
        return self.coo()[2]

    def rowcount(self) -> Tensor:
        return self.rowptr().diff()

    def colcount(self) -> Tensor:
        return torch.bincount(self._col, minlength=self._sizes[1])


def ego_k_hop_sample_adj(rowptr, col, seeds, depth, num_neighbors, replace):
    """torch_sparse::ego_k_hop_sample_adj, where the rows are."""
    seeds = seeds.to(rowptr.device)
    node, ptr, root, edges = sampling.ego_subgraphs(rowptr, col, seeds, [num_neighbors] * depth, replace=replace)
    return edges.indptr, edges.row, node, edges.edge, ptr, root


def ego_on_host(*args):
    """The same, brought to the host from where the rows are."""
    return tuple(part.cpu() for part in ego_k_hop_sample_adj(*args))


def ptr2ind(ptr: Tensor, size: int) -> Tensor:
    """torch_sparse::ptr2ind."""
    return ptr2index(ptr, output_size=size)
