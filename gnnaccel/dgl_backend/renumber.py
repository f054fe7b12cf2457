"""`gnnaccel.renumber` of a DGLGraph."""

from __future__ import annotations

import dgl

from gnnaccel.dgl_backend.graph import to_graph
from gnnaccel.graph import build
from gnnaccel.graph.renumber import Renumbering, renumbering


def renumber(g: dgl.DGLGraph, method: str) -> tuple[dgl.DGLGraph, Renumbering]:
    """`g` with nodes numbered anew; features of nodes go along, edges keep their ids and features."""
    if not g.is_homogeneous or g.is_block:
        raise TypeError("renumber: graph_or_data: of DGL expected a graph of one kind of nodes and edges, no block")
    if g.batch_size > 1:
        raise TypeError(f"renumber: graph_or_data: expected one graph, got a batch of {g.batch_size}")
    graph = to_graph(g)
    new = renumbering(graph, method)
    rows, cols = (new.nodes(ends) for ends in build.pairs_by_id(graph.indptr, graph.indices, graph.edge_ids))
    (kind,), (nodes,) = g.canonical_etypes, g.ntypes
    out = dgl.heterograph({kind: (cols, rows)}, num_nodes_dict={nodes: g.num_nodes()}, idtype=g.idtype)
    out.ndata.update({name: new.features(value) for name, value in g.ndata.items()})
    out.edata.update(dict(g.edata))
    return out, new
