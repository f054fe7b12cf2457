"""`gnnaccel.renumber` of a DGLGraph."""

from __future__ import annotations

import dgl

from gnnaccel.dgl_backend.structure import to_graph
from gnnaccel.graph.renumber import Renumbering, edge_index_of
from gnnaccel.graph.renumber import renumber as of_graph


def renumber(g: dgl.DGLGraph, ordering: str) -> tuple[dgl.DGLGraph, Renumbering]:
    """`g` with nodes numbered anew; features of nodes and edges go along."""
    if not g.is_homogeneous or g.is_block:
        raise TypeError("renumber: graph_or_data: of DGL expected a graph of one kind of nodes and edges, no block")
    if g.batch_size > 1:
        raise TypeError(f"renumber: graph_or_data: expected one graph, got a batch of {g.batch_size}")
    graph, new = of_graph(to_graph(g), ordering)
    cols, rows = edge_index_of(graph, g.idtype)
    (kind,), (nodes,) = g.canonical_etypes, g.ntypes
    out = dgl.heterograph({kind: (cols, rows)}, num_nodes_dict={nodes: g.num_nodes()}, idtype=g.idtype)
    out.ndata.update({name: new.features(value) for name, value in g.ndata.items()})
    out.edata.update({name: new.edges(value) for name, value in g.edata.items()})
    return out, new
