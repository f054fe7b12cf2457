"""DGL's NeighborSampler on `gnnaccel.sampling`: uniform in-neighbours in graphs of the CPU that have one type of nodes
and edges. Blocks are what DGL's own fused sampling gives, features included.

DGL's C++ has the structure of blocks in host memory; with GNNACCEL_SAMPLER=cuda the GPU samples, and hands it back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import dgl
import torch
from dgl import utils
from torch import Tensor

from gnnaccel import report, sampling
from gnnaccel.dgl_backend.structure import to_graph
from gnnaccel.ops import has_cuda_kernels
from gnnaccel.sampling.choice import CHOICE, is_cuda, is_frameworks

_KIND = "dgl.NeighborSampler"


def _reason(sampler, g, seeds, exclude_eids) -> str | None:
    """Why a batch is left to DGL, or None."""
    if is_frameworks():
        return f"{CHOICE}=framework"
    if not isinstance(g, dgl.DGLGraph) or g.device.type != "cpu":
        return "not a graph on the CPU"
    if len(g.ntypes) > 1 or len(g.etypes) > 1 or g.is_block:
        return "a graph of several types"
    if sampler.edge_dir != "in" or sampler.prob is not None or exclude_eids is not None:
        return "out-edges, probabilities, masks or excluded edges"
    if not all(isinstance(fanout, int) and fanout >= -1 for fanout in sampler.fanouts):
        return "fan-outs that are not numbers"
    if sampler.output_device is not None and torch.device(sampler.output_device).type != "cpu":
        return "an output device"
    if not isinstance(seeds, Tensor) or seeds.dim() != 1 or seeds.device.type != "cpu" or seeds.dtype != g.idtype:
        return "seeds that are not a tensor of the graph's kind"
    if seeds.unique().numel() != seeds.numel():
        return "a seed that is there twice"
    return None


def _seed() -> int:
    """From DGL's generator, which dgl.seed() sets, and DGL's loader in each worker."""
    return int(dgl.random.choice(1 << 62, 1)[0])


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


def _sample(graph, nodes: Tensor, fanout: int, replace: bool, device: torch.device) -> sampling.NeighborSample:
    """A layer of a graph on the CPU, sampled on `device`, which keeps a copy of the graph."""
    indptr, indices = graph.indptr, graph.indices
    if indptr.device != device:
        copies = graph.slot("sampled_on", dict)
        if device not in copies:
            copies[device] = (indptr.to(device), indices.to(device))
        indptr, indices = copies[device]
    out = sampling.neighbor_sample(indptr, indices, nodes.to(device), [fanout], replace=replace, seed=_seed())
    return out._replace(node=out.node.cpu(), row=out.row.cpu(), col=out.col.cpu(), edge=out.edge.cpu())


def _block(g, seeds: Tensor, out: sampling.NeighborSample, edge_ids: Tensor):
    indptr = torch.zeros(seeds.numel() + 1, dtype=g.idtype)
    torch.cumsum(torch.bincount(out.col, minlength=seeds.numel()), 0, out=indptr[1:])
    name = g.ntypes[0]
    block = dgl.create_block(
        {g.canonical_etypes[0]: ("csc", (indptr, out.row, torch.empty(0, dtype=g.idtype)))},
        num_src_nodes={name: out.node.numel()},
        num_dst_nodes={name: seeds.numel()},
        idtype=g.idtype,
    )
    nodes = utils.extract_node_subframes_for_block(g, [out.node], [seeds])
    utils.set_new_frames(block, node_frames=nodes, edge_frames=utils.extract_edge_subframes(g, [edge_ids]))
    return block


def sample_blocks(original: Callable) -> Callable:
    """NeighborSampler.sample_blocks() on our sampling, where it can be."""

    @functools.wraps(original)
    def method(self, g, seed_nodes, exclude_eids=None):
        reason = _reason(self, g, seed_nodes, exclude_eids)
        if reason is not None:
            report.fallback(_KIND, reason)
            return original(self, g, seed_nodes, exclude_eids)
        with report.accelerated(_KIND):
            graph, nodes, blocks, device = to_graph(g), seed_nodes, [], _device()
            for fanout in reversed(self.fanouts):
                out = _sample(graph, nodes, fanout, self.replace, device)
                edge_ids = out.edge if graph.edge_ids is None else graph.edge_ids[out.edge]
                blocks.insert(0, _block(g, nodes, out, edge_ids))
                nodes = out.node
            return nodes, seed_nodes, blocks

    return method
