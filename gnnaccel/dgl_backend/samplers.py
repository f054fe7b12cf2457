"""DGL's NeighborSampler on `gnnaccel.sampling`: uniform in-neighbours in graphs that have one type of nodes and edges.
Blocks are what DGL's own sampling gives, features included.

Seeds on a GPU, of a graph that is there or pinned: the GPU samples, and blocks stay there (block_index.py). Seeds on
the CPU: DGL's C++ has the blocks in host memory; with GNNACCEL_SAMPLER=cuda the GPU samples, and hands them back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import dgl
import torch
from dgl import utils
from dgl.heterograph import DGLBlock
from torch import Tensor

from gnnaccel import report, sampling
from gnnaccel.dgl_backend.block_index import block_index
from gnnaccel.dgl_backend.structure import to_graph
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import has_cuda_kernels
from gnnaccel.sampling.choice import CHOICE, is_cuda, is_frameworks

_KIND = "dgl.NeighborSampler"
_SEEDS = 1 << 62


def _reason(sampler, g, seeds, exclude_eids) -> str | None:
    """Why a batch is left to DGL, or None."""
    if is_frameworks():
        return f"{CHOICE}=framework"
    if not isinstance(g, dgl.DGLGraph):
        return "not a DGLGraph"
    if len(g.ntypes) > 1 or len(g.etypes) > 1 or g.is_block:
        return "a graph of several types"
    if sampler.edge_dir != "in" or sampler.prob is not None or exclude_eids is not None:
        return "out-edges, probabilities, masks or excluded edges"
    if not all(isinstance(fanout, int) and fanout >= -1 for fanout in sampler.fanouts):
        return "fan-outs that are not numbers"
    if not isinstance(seeds, Tensor) or seeds.dim() != 1 or seeds.dtype != g.idtype:
        return "seeds that are not a tensor of the graph's kind"
    if g.device != seeds.device and not (seeds.is_cuda and g.device.type == "cpu" and g.is_pinned()):
        return "seeds on another device than the graph, which is not pinned"
    if seeds.is_cuda and not has_cuda_kernels():
        return "this gnnaccel has no CUDA half"
    if sampler.output_device is not None and torch.device(sampler.output_device) != seeds.device:
        return "an output device"
    ordered = seeds.sort().values
    if bool((ordered[1:] == ordered[:-1]).any()):
        return "a seed that is there twice"
    return None


def _seed() -> int:
    """From DGL's generator, which dgl.seed() sets, and DGL's loader in each worker."""
    return int(dgl.random.choice(_SEEDS, 1)[0])


def _device() -> torch.device:
    """Where to sample. RuntimeError for a GPU that there is not."""
    cpu = torch.device("cpu")
    if not is_cuda():
        return cpu
    worker = torch.utils.data.get_worker_info()
    if worker is None and not torch.cuda.is_available():
        raise RuntimeError(f"NeighborSampler: {CHOICE}=cuda, but torch finds no CUDA GPU here")
    reason = "num_workers > 0" if worker else None if has_cuda_kernels() else "this gnnaccel has no CUDA half"
    if reason is None:
        return torch.device("cuda", torch.cuda.current_device())
    if worker is None or worker.id == 0:
        report.note(_KIND, f"sampled on the CPU: {reason}", logging.WARNING)
    return cpu


def _arrays_on(graph: Graph, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """indptr, indices and edge ids on `device`, of which the graph keeps copies."""
    indptr, indices, edge_ids = graph.indptr, graph.indices, graph.edge_ids
    if graph.device == device:
        return indptr, indices, edge_ids
    copies = graph.slot("sampled_on", dict)
    if device not in copies:
        ids = None if edge_ids is None else edge_ids.to(device)
        copies[device] = indptr.to(device), indices.to(device), ids
    return copies[device]


def _sample(graph: Graph, nodes: Tensor, fanout: int, how: dict, device: torch.device) -> sampling.NeighborSample:
    """A layer of a graph, sampled on `device`, with the graph's own edge ids. `how`: options of `neighbor_sample`."""
    indptr, indices, edge_ids = _arrays_on(graph, device)
    out = sampling.neighbor_sample(indptr, indices, nodes.to(device), [fanout], **how)
    return out if edge_ids is None else out._replace(edge=edge_ids[out.edge])


def _block(g, idtype: torch.dtype, seeds: Tensor, out: sampling.NeighborSample):
    """A block of the CPU."""
    out = out._replace(node=out.node.cpu(), row=out.row.cpu(), col=out.col.cpu(), edge=out.edge.cpu())
    indptr = torch.zeros(seeds.numel() + 1, dtype=idtype)
    torch.cumsum(torch.bincount(out.col, minlength=seeds.numel()), 0, out=indptr[1:])
    name = g.ntypes[0]
    block = dgl.create_block(
        {g.canonical_etypes[0]: ("csc", (indptr, out.row, torch.empty(0, dtype=idtype)))},
        num_src_nodes={name: out.node.numel()},
        num_dst_nodes={name: seeds.numel()},
        idtype=idtype,
    )
    utils.set_new_frames(block, **_frames(g, seeds, out.node, out.edge))
    return block


def _gpu_block(g, idtype: torch.dtype, seeds: Tensor, out: sampling.NeighborSample):
    """The same of a sample on a GPU, which stays there."""
    starts = torch.arange(seeds.numel() + 1, dtype=out.col.dtype, device=seeds.device)
    indptr = torch.searchsorted(out.col, starts, out_int32=out.col.dtype == torch.int32)
    index = block_index(Graph(indptr, out.row, None, out.node.numel()), idtype)
    frames = _frames(g, seeds.to(idtype), out.node.to(idtype), out.edge.to(idtype))
    return DGLBlock(index, (g.ntypes, g.ntypes), g.etypes, **frames)


def _frames(g, seeds: Tensor, nodes: Tensor, edge_ids: Tensor) -> dict:
    """Frames of a block: what the graph has of these nodes and edges, read when it is asked for."""
    node_frames = utils.extract_node_subframes_for_block(g, [nodes], [seeds])
    return {"node_frames": node_frames, "edge_frames": utils.extract_edge_subframes(g, [edge_ids])}


def sample_blocks(original: Callable) -> Callable:
    """NeighborSampler.sample_blocks() on our sampling, where it can be."""

    @functools.wraps(original)
    def method(self, g, seed_nodes, exclude_eids=None):
        reason = _reason(self, g, seed_nodes, exclude_eids)
        if reason is not None:
            report.fallback(_KIND, reason)
            return original(self, g, seed_nodes, exclude_eids)
        with report.accelerated(_KIND):
            graph, blocks = to_graph(g), []
            on_gpu = seed_nodes.is_cuda
            device, block = (seed_nodes.device, _gpu_block) if on_gpu else (_device(), _block)
            nodes, seed = seed_nodes.to(graph.indptr.dtype), _seed()
            for layer, fanout in enumerate(reversed(self.fanouts)):
                how = {"replace": self.replace, "seed": (seed + layer) % _SEEDS}
                out = _sample(graph, nodes, fanout, how, device)
                blocks.insert(0, block(g, seed_nodes.dtype, nodes, out))
                nodes = out.node if on_gpu else out.node.cpu()
            return nodes.to(seed_nodes.dtype), seed_nodes, blocks

    return method
