"""Graphs of sampled batches: edges that come hop by hop, and so what a part of their rows has and reads.

A batch's last nodes have no edges into them, and its first rows, which a loss is of, read few of the others. Who knows
where a hop ends can leave the rest out, and need not look at the edges for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gnnaccel.graph.csr import Graph

_HOPS, _HEADS = "hops", "heads"


class Hops:
    """Where the hops of a sampled batch end.

    Edges of hop k go into nodes that were there before it, and come from nodes that are there after it; the edges of
    all hops ascend by destination, and those of hop k + 1 go into nodes of hop k alone.

    Attributes
    ----------
    nodes : tuple of int
        Nodes there are before the first hop, after it, and so on.
    edges : tuple of int
        The same of edges, from 0 on.
    """

    __slots__ = ("edges", "nodes")

    def __init__(self, nodes: Sequence[int], edges: Sequence[int]):
        self.nodes, self.edges = tuple(nodes), tuple(edges)

    @classmethod
    def of_counts(cls, nodes_per_hop: Sequence[int], edges_per_hop: Sequence[int]) -> Hops:
        """From what each hop added: nodes, the seeds first, and edges."""
        return cls(tuple(accumulate(nodes_per_hop)), (0, *accumulate(edges_per_hop)))

    def first(self, num_edges: int) -> Hops | None:
        """Those of the first edges alone; None if that is not the end of a hop."""
        if num_edges not in self.edges:
            return None
        count = self.edges.index(num_edges)
        return Hops(self.nodes[: count + 1], self.edges[: count + 1])

    @property
    def num_filled(self) -> int:
        """Rows that may have edges: all others have none."""
        return self.nodes[-2] if len(self.edges) > 1 else 0


def are_of(graph: Graph, hops: Hops) -> bool:
    """True if the edges of a graph on the CPU are of these hops."""
    ends = all(int(graph.indptr[nodes]) == edges for nodes, edges in zip(hops.nodes, hops.edges[1:], strict=False))
    reads = zip(hops.nodes[1:], hops.edges[1:], strict=True)
    return ends and all(not edges or int(graph.indices[:edges].max()) < nodes for nodes, edges in reads)


def put(graph: Graph, hops: Hops) -> None:
    """Say of a new graph without edge ids, whose rows and columns are all nodes, that it is of these hops."""
    setattr(graph.slots, _HOPS, hops)


def of(graph: Graph) -> Hops | None:
    """The hops of a graph that is known to be of some."""
    return getattr(graph.slots, _HOPS, None)


def head(graph: Graph, hop: int) -> Graph:
    """The first rows of a graph, as many as there are nodes before hop number `hop`, and the columns that these read;
    kept with the graph."""
    heads: dict[int, Graph] = graph.slot(_HEADS, dict)
    found = heads.get(hop)
    if found is None:
        hops = of(graph)
        assert hops is not None
        rows, last = hops.nodes[hop], min(hop + 1, len(hops.edges) - 1)
        indices = graph.indices[: hops.edges[last]]
        found = Graph(graph.indptr[: rows + 1], indices, None, hops.nodes[last])
        if not graph.transient():
            heads[hop] = found
    return found
