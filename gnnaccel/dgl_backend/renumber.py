"""`gnnaccel.renumber` of a DGLGraph."""

from __future__ import annotations

import dgl

from gnnaccel.dgl_backend.graph import to_graph
from gnnaccel.graph.renumber import Renumbering, renumbering


def renumber(g: dgl.DGLGraph, method: str) -> tuple[dgl.DGLGraph, Renumbering]:
    """A graph like `g` with nodes numbered anew; features of nodes go along, edges keep their order and features."""
    if not g.is_homogeneous or g.is_block:
        raise TypeError("renumber: graph_or_data: of DGL expected a graph of one kind of nodes and edges, no block")
    if g.batch_size > 1:
        raise TypeError(f"renumber: graph_or_data: expected one graph, got a batch of {g.batch_size}")
    new = renumbering(to_graph(g), method)
    out = dgl.graph(tuple(new.nodes(ends) for ends in g.edges(order="eid")), num_nodes=g.num_nodes(), idtype=g.idtype)
    out.ndata.update({name: new.features(value) for name, value in g.ndata.items()})
    out.edata.update(dict(g.edata))
    return out, new
