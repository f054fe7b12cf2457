"""DGL's subgraphs between given nodes, and ShaDowKHopSampler and SAINTSampler, which make them, on a GPU.

Of a graph that is on a GPU, the GPU finds the edges, and the subgraph stays there (block_index.py); its edges are in
order of their destinations, where DGL's order depends on the formats that the graph has. With GNNACCEL_SAMPLER=cuda the
samplers' subgraphs of graphs in host memory are found there, too, and handed back. Everything else is left to DGL, and
counted, but subgraphs of a graph in host memory that nobody pinned, of which nothing was promised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import dgl
import torch
from torch import Tensor

from gnnaccel import report, sampling
from gnnaccel.dgl_backend.block_index import square_index
from gnnaccel.dgl_backend.samplers import IN_HOST_MEMORY, drawable_of, layers_of, place, reason_against, repeats
from gnnaccel.dgl_backend.structure import arrays_on, to_graph
from gnnaccel.dgl_backend.touch import no_block_index, set_edge_lazy_features, set_node_lazy_features, utils
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import has_cuda_kernels
from gnnaccel.sampling.choice import CHOICE, is_cuda, is_frameworks

_PLAIN, _SHADOW, _SAINT = "dgl.node_subgraph", "dgl.ShaDowKHopSampler", "dgl.SAINTSampler"


def _reason(g) -> str | None:
    """Why subgraphs of a graph are left to DGL, or None."""
    if is_frameworks():
        return f"{CHOICE}=framework"
    if len(g.ntypes) > 1 or len(g.etypes) > 1 or g.is_block:
        return "a graph of several types"
    return no_block_index() if has_cuda_kernels() else "this gnnaccel has no CUDA half"


def _induced(g, nodes: Tensor, device: torch.device, store_ids: bool = True):
    """The subgraph between these nodes, each of them there once: found on a GPU, and where the nodes are."""
    indptr, indices, edge_ids = arrays_on(to_graph(g), device)
    there = nodes.to(device).clamp(-1, torch.iinfo(indptr.dtype).max).to(indptr.dtype)
    found = sampling.induced_subgraph(indptr, indices, there)
    ids = (found.edge if edge_ids is None else edge_ids[found.edge]).to(nodes.device, nodes.dtype)
    num_nodes = nodes.numel()
    if nodes.is_cuda:
        index = square_index(Graph(found.indptr, found.row, None, num_nodes), nodes.dtype)
        subgraph = dgl.DGLGraph(index, g.ntypes, g.etypes)
    else:
        rows = [part.to(nodes.device, nodes.dtype) for part in (found.indptr, found.row)]
        edges = {g.canonical_etypes[0]: ("csc", (*rows, nodes[:0]))}
        subgraph = dgl.heterograph(edges, num_nodes_dict={g.ntypes[0]: num_nodes}, idtype=nodes.dtype)
    frames = {
        "node_frames": utils.extract_node_subframes(g, [nodes], store_ids),
        "edge_frames": utils.extract_edge_subframes(g, [ids], store_ids),
    }
    utils.set_new_frames(subgraph, **frames)
    return subgraph


def node_subgraph(original: Callable) -> Callable:
    """dgl.node_subgraph() of a graph on a GPU."""

    def function(graph, nodes, *, relabel_nodes=True, store_ids=True, output_device=None):
        if graph.device.type == "cpu":
            if graph.is_pinned():
                report.fallback(_PLAIN, "a pinned graph: DGL finds the edges on the CPU")
            return original(graph, nodes, relabel_nodes=relabel_nodes, store_ids=store_ids, output_device=output_device)
        start, reason = time.perf_counter(), _reason(graph)
        if reason is None and not relabel_nodes:
            reason = "relabel_nodes=False"
        if reason is None:
            found = _checked(graph, nodes)
            if not bool(repeats(found)):
                subgraph = _induced(graph, found, graph.device, store_ids)
                report.record(_PLAIN, start)
                return subgraph if output_device is None else subgraph.to(output_device)
            reason = "a node that is there twice"
        report.fallback(_PLAIN, reason)
        return original(graph, nodes, relabel_nodes=relabel_nodes, store_ids=store_ids, output_device=output_device)

    return function


def _checked(g, nodes) -> Tensor:
    """Ids of the nodes that DGL is given, of a graph of one type."""
    nodes = nodes.get(g.ntypes[0], []) if isinstance(nodes, Mapping) else nodes
    if isinstance(nodes, Tensor) and nodes.dtype == torch.bool:
        return nodes.to(g.device).nonzero().view(-1).to(g.idtype)
    return utils.prepare_tensor(g, nodes, f'nodes["{g.ntypes[0]}"]')


def shadow_sample(original: Callable) -> Callable:
    """ShaDowKHopSampler.sample() on a GPU: the nodes that our sampler finds, and all edges between these."""

    def sample(self, g, seed_nodes, exclude_eids=None):
        reason: str | None
        seeds_there = isinstance(seed_nodes, Tensor) and seed_nodes.is_cuda
        start, reason, device = time.perf_counter(), IN_HOST_MEMORY, None
        if seeds_there or g.device.type != "cpu" or is_cuda() or is_frameworks():
            reason = reason_against(self, g, seed_nodes, exclude_eids)
        if reason is None:
            device = seed_nodes.device if seeds_there else place(_SHADOW)
            if device.type == "cpu":  # `place` has said why
                reason = IN_HOST_MEMORY
            elif bool(repeats(seed_nodes)):
                reason = "a seed that is there twice"
        if device is None or reason is not None:
            report.fallback(_SHADOW, reason or "")
            return original(self, g, seed_nodes, exclude_eids)
        drawable = drawable_of(to_graph(g), device, None if self.prob is None else g.edata[self.prob])
        layers = layers_of(drawable, seed_nodes, self.fanouts[::-1], self.replace, device)
        nodes = layers[-1].nodes if layers else seed_nodes
        subgraph = _induced(g, nodes, device)
        set_node_lazy_features(subgraph, self.prefetch_node_feats)
        set_edge_lazy_features(subgraph, self.prefetch_edge_feats)
        report.record(_SHADOW, start)
        return nodes, seed_nodes, subgraph

    return sample


def saint_sample(original: Callable) -> Callable:
    """SAINTSampler.sample() where GNNACCEL_SAMPLER=cuda asks a GPU for the edges of a graph in host memory. Of one on a
    GPU, `node_subgraph` makes them."""

    def sample(self, g, indices):
        if g.device.type != "cpu":
            return original(self, g, indices)
        start, reason = time.perf_counter(), _reason(g) if is_cuda() or is_frameworks() else IN_HOST_MEMORY
        device = place(_SAINT) if reason is None else g.device
        if device.type == "cpu":  # `place` has said why
            report.fallback(_SAINT, reason or IN_HOST_MEMORY)
            return original(self, g, indices)
        subgraph = _induced(g, self.sampler(g), device)
        if self.output_device is not None:
            subgraph = subgraph.to(self.output_device)
        set_node_lazy_features(subgraph, self.prefetch_ndata)
        set_edge_lazy_features(subgraph, self.prefetch_edata)
        report.record(_SAINT, start)
        return subgraph

    return sample
