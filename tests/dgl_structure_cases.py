"""What DGL answers about the structure of a graph: name -> function of a graph, for the tests of the bridge to CUDA."""

from __future__ import annotations

import copy
import pickle

import torch
from dgl_compare import dgl, flatten, graph, rand

STRUCTURE = {
    "nodes": lambda g: g.nodes(),
    "edges": lambda g: g.edges(form="all"),
    "edges in order": lambda g: g.edges(form="all", order="srcdst"),
    "degrees": lambda g: (g.in_degrees(), g.out_degrees(), g.in_degrees(torch.tensor([3, 5]))),
    "find_edges": lambda g: g.find_edges(torch.tensor([3, 5])),
    "edge_ids": lambda g: g.edge_ids(*g.find_edges(torch.tensor([3]))),
    "has_edges_between": lambda g: g.has_edges_between(torch.tensor([0, 1]), torch.tensor([2, 3])),
    "has_nodes": lambda g: g.has_nodes(torch.tensor([0, 999])),
    "in_edges": lambda g: g.in_edges(torch.tensor([0, 1]), form="all"),
    "out_edges": lambda g: g.out_edges(torch.tensor([0, 1]), form="all"),
    "predecessors": lambda g: g.predecessors(3),
    "adj_tensors": lambda g: g.adj_tensors("csc"),
    "coo": lambda g: g.adj_tensors("coo"),
    "int": lambda g: g.int(),
    "reverse": lambda g: dgl.reverse(g, copy_edata=True),
    "formats": lambda g: g.formats(["coo", "csr"]),
    "add_self_loop": lambda g: dgl.add_self_loop(g),
    "remove_self_loop": lambda g: dgl.remove_self_loop(g),
    "add_edges": lambda g: dgl.add_edges(g, torch.tensor([0, 1]), torch.tensor([2, 2])),
    "remove_edges": lambda g: dgl.remove_edges(g, torch.tensor([0, 1])),
    "remove_nodes": lambda g: dgl.remove_nodes(g, torch.tensor([0, 1])),
    "to_bidirected": lambda g: dgl.to_bidirected(g.cpu()).to(g.device),
    "add_reverse_edges": lambda g: dgl.add_reverse_edges(g),
    "node_subgraph": lambda g: dgl.node_subgraph(g, torch.arange(1, 30, 2)),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, torch.tensor([1, 4, 7, 8])),
    "in_subgraph": lambda g: dgl.in_subgraph(g, torch.tensor([1, 4])),
    "khop": lambda g: dgl.khop_in_subgraph(g, torch.tensor([1]), 2)[0],
    "to_block": lambda g: dgl.to_block(dgl.in_subgraph(g, torch.tensor([1, 4])), torch.tensor([1, 4])),
    "batch": lambda g: dgl.batch([g, g]),
    "unbatch": lambda g: dgl.unbatch(dgl.batch([g, g]))[1],
    "batch sizes": lambda g: (dgl.batch([g, g]).batch_num_nodes(), dgl.batch([g, g]).batch_num_edges()),
    "line_graph": lambda g: dgl.line_graph(dgl.node_subgraph(g, torch.tensor([1, 4, 7]))),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "copy": lambda g: copy.deepcopy(g),
    "clone": lambda g: g.clone(),
    "filter_nodes": lambda g: g.filter_nodes(lambda nodes: nodes.data["x"][:, 0] > 0),
    "filter_edges": lambda g: g.filter_edges(lambda edges: edges.data["w"][:, 0] > 0),
    "made of tensors": lambda g: dgl.graph(g.edges(), num_nodes=g.num_nodes()),
    "sampled": lambda g: dgl.sampling.sample_neighbors(g, torch.tensor([1, 4]), -1).edges(order="srcdst"),
    "isolated": lambda g: dgl.compact_graphs(dgl.in_subgraph(g, torch.tensor([1]))),
    "metis-like order": lambda g: dgl.reorder_graph(g.cpu(), "rcmk").to(g.device).in_degrees().sort().values,
}


def with_data():
    """The graph to ask, with a node and an edge feature."""
    g = graph()
    g.ndata["x"], g.edata["w"] = rand(g.num_nodes(), 3), rand(g.num_edges(), 2)
    return g


def tensors_of(value):
    """Every tensor of a result; of a graph its edges and its data."""
    if not isinstance(value, dgl.DGLGraph):
        return flatten(value)
    frames = [f for t in value.ntypes for f in sorted(value.nodes[t].data.items())] if not value.is_block else []
    frames += [f for t in value.canonical_etypes for f in sorted(value.edges[t].data.items())]
    return [t for e in value.canonical_etypes for t in value.edges(form="all", etype=e)] + [x for _, x in frames]
