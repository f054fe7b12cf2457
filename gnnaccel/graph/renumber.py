"""Nodes numbered anew, so that those which share neighbours lie side by side, in the graph and in memory.

GNNAdvisor's node renumbering (Wang et al., OSDI 2021, section 6.1). `reorder` lets kernels take rows in such an order
and leaves features where they are; this moves the features too, once, which the user has to know of. Edges are brought
into the order of the new rows and, within a row, of the new sources: the one in which kernels read them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnaccel.graph import build, modes
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.network import inverse
from gnnaccel.graph.reorder import ORDERS, order_by


@dataclass(frozen=True, eq=False)
class Renumbering:
    """What `gnnaccel.renumber` did.

    Attributes
    ----------
    order : Tensor [num_nodes], int64
        The old number of each node, by its new one.
    place : Tensor [num_nodes], int64
        The new number of each node, by its old one.
    edge_order : Tensor [num_edges], int64
        The old position of each edge, by its new one.
    is_profitable : bool
        False if no order was found that gains anything; nodes and edges are as they were then.
    """

    order: Tensor
    place: Tensor
    edge_order: Tensor
    is_profitable: bool

    @property
    def pays(self) -> bool:
        """The old name of is_profitable."""
        warnings.warn(
            "Renumbering.pays is is_profitable now, and will go with the next release", FutureWarning, stacklevel=2
        )
        return self.is_profitable

    def features(self, x: Tensor) -> Tensor:
        """Rows of nodes [num_nodes, *F] (features, labels, masks) in the new order."""
        return _rows(x, self.order, "nodes")

    def results(self, out: Tensor) -> Tensor:
        """Rows of nodes in the new order [num_nodes, *F], such as a model's output, back in the old one."""
        return _rows(out, self.place, "nodes")

    def edges(self, x: Tensor) -> Tensor:
        """Rows of edges [num_edges, *F] (weights, types) in the new order."""
        return _rows(x, self.edge_order, "edges")

    def nodes(self, index: Tensor) -> Tensor:
        """Numbers of nodes, of any shape (the nodes to train on), as the new ones.

        Raises
        ------
        TypeError
            For other dtypes than int32 and int64. ValueError: for a number that no node has.
        """
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"expected node numbers of int32 or int64, got {index.dtype}")
        low, high = (int(end) for end in index.aminmax()) if index.numel() else (0, -1)
        if low < 0 or high >= self.place.numel():
            raise ValueError(f"expected node numbers from 0 to {self.place.numel() - 1}, got {low} to {high}")
        return self.place.to(index.device)[index.long()].to(index.dtype)


def _rows(x: Tensor, at: Tensor, what: str) -> Tensor:
    if x.dim() == 0 or x.shape[0] != at.numel():
        raise ValueError(f"Renumbering: expected a row for each of {at.numel()} {what}, got shape {tuple(x.shape)}")
    return x.index_select(0, at.to(x.device))


def renumber(graph: Graph, ordering: str) -> tuple[Graph, Renumbering]:
    """A square graph with new numbers, whose edges have their ids by rows; `ordering` as of `reorder.order_by`."""
    modes.refuse("renumber")
    if ordering not in ORDERS:
        raise ValueError(f"renumber: ordering: expected one of {', '.join(ORDERS)}, got {ordering!r}")
    if graph.num_rows != graph.num_cols:
        raise ValueError(f"renumber: expected a graph whose sources and destinations are the same nodes, got {graph}")
    with torch.inference_mode(False), torch.no_grad():
        order = order_by(graph, ordering)
        if order is None:
            same, edges = (torch.arange(n, device=graph.device) for n in (graph.num_rows, graph.nnz))
            return graph, Renumbering(same, same, edges, False)
        place = inverse(order)
        rows, cols = (place[ends] for ends in build.pairs_by_id(graph.indptr, graph.indices, graph.edge_ids))
        edges = cols.argsort(stable=True)
        edges = edges[rows[edges].argsort(stable=True)]
        moved = Graph.from_coo(rows[edges], cols[edges], num_rows=graph.num_rows, num_cols=graph.num_cols)
        return Graph(moved.indptr, moved.indices, None, moved.num_cols), Renumbering(order, place, edges, True)


def edge_index_of(graph: Graph, dtype: torch.dtype) -> Tensor:
    """Sources and destinations [2, nnz] of a renumbered graph."""
    return torch.stack(build.pairs_by_id(graph.indptr, graph.indices, graph.edge_ids)[::-1]).to(dtype)
