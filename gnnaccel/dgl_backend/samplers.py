"""DGL's NeighborSampler on `gnnaccel.sampling`: in-neighbours in graphs that have one type of nodes and edges, drawn
uniformly, by probabilities or by masks. Blocks are what DGL's own sampling gives, features included.

Seeds on a GPU, of a graph that is there or pinned: the GPU samples, and blocks stay there (block_index.py). Seeds on
the CPU: DGL's C++ has the blocks in host memory; with GNNACCEL_SAMPLER=cuda the GPU samples, and hands them back.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import dgl
import torch
from torch import Tensor

from gnnaccel import report, sampling
from gnnaccel.dgl_backend.block_index import block_index
from gnnaccel.dgl_backend.structure import arrays_on, to_graph
from gnnaccel.dgl_backend.touch import DGLBlock, no_block_index, utils
from gnnaccel.graph import build
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import has_cuda_kernels
from gnnaccel.sampling.choice import CHOICE, is_cuda, is_frameworks

_KIND = "dgl.NeighborSampler"
IN_HOST_MEMORY = "in host memory: DGL's own library samples"
_DRAWABLE = "dgl_drawable"
_WEIGHTS, _MASKS = (torch.float32, torch.float64), (torch.bool, torch.int8, torch.uint8)


def reason_against(sampler, g, seeds, exclude_eids) -> str | None:
    """Why a batch is left to DGL, or None."""
    if is_frameworks():
        return f"{CHOICE}=framework"
    if not isinstance(g, dgl.DGLGraph):
        return "not a DGLGraph"
    if len(g.ntypes) > 1 or len(g.etypes) > 1 or g.is_block:
        return "a graph of several types"
    if getattr(sampler, "edge_dir", "in") != "in" or exclude_eids is not None:
        return "out-edges or excluded edges"
    if sampler.prob is not None:
        given = g.edata.get(sampler.prob) if isinstance(sampler.prob, str) else None
        if given is None or given.dim() != 1 or given.dtype not in (*_WEIGHTS, *_MASKS):
            return "probabilities that are not a feature of one number an edge"
    if not all(isinstance(fanout, int) and fanout >= -1 for fanout in sampler.fanouts):
        return "fan-outs that are not numbers"
    if not isinstance(seeds, Tensor) or seeds.dim() != 1 or seeds.dtype != g.idtype:
        return "seeds that are not a tensor of the graph's kind"
    if g.device != seeds.device and not (seeds.is_cuda and g.device.type == "cpu" and g.is_pinned()):
        return "seeds on another device than the graph, which is not pinned"
    if seeds.is_cuda and not has_cuda_kernels():
        return "this gnnaccel has no CUDA half"
    if seeds.is_cuda and (lacking := no_block_index()) is not None:
        return lacking
    if sampler.output_device is not None and torch.zeros(0, device=sampler.output_device).device != seeds.device:
        return "an output device"
    return None


def repeats(seeds: Tensor) -> Tensor:
    """Whether a seed is there twice."""
    ordered = seeds.sort().values
    return (ordered[1:] == ordered[:-1]).any()


def _seed() -> int:
    """From DGL's generator, which dgl.seed() sets, and DGL's loader in each worker."""
    return int(dgl.random.choice(1 << 62, 1)[0])


def place(kind: str) -> torch.device:
    """Where samplers of this kind are to sample from what is in host memory. RuntimeError for a GPU that there is
    not."""
    cpu = torch.device("cpu")
    if not is_cuda():
        return cpu
    worker = torch.utils.data.get_worker_info()
    if worker is None and not torch.cuda.is_available():
        raise RuntimeError(f"{kind.removeprefix('dgl.')}: {CHOICE}=cuda, but torch finds no CUDA GPU here")
    reason = "num_workers > 0" if worker else None if has_cuda_kernels() else "this gnnaccel has no CUDA half"
    if reason is None:
        return torch.device("cuda", torch.cuda.current_device())
    if worker is None or worker.id == 0:
        report.note(kind, f"sampled on the CPU: {reason}", logging.WARNING)
    return cpu


class _Layer(NamedTuple):
    """What a block is made of: the nodes of its sources, of which the first are its destinations, and its edges."""

    nodes: Tensor
    num_dst: int
    row: Tensor
    col: Tensor
    edge: Tensor


class Drawable(NamedTuple):
    """The edges that may be drawn, as `arrays_on` has them, and their weights where these differ from each other."""

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None
    weight: Tensor | None = None


def drawable_of(graph: Graph, device: torch.device, prob: Tensor | None) -> Drawable:
    """Those on `device` of a graph, by the probabilities, or the mask, of its edges. DGL draws none whose probability
    is zero, also where there are no others, and takes integers that are no mask for probabilities. Kept until somebody
    writes into them, or has others.

    ValueError for probabilities that are negative, infinite or NaN.
    """
    plain = Drawable(*arrays_on(graph, device))
    if prob is None:
        return plain
    version = -1 if prob.is_inference() else prob._version
    kept: dict[torch.device, tuple[Tensor, tuple, Drawable]] = graph.slot(_DRAWABLE, dict)
    stamp = (prob.data_ptr(), prob.stride(), prob.device, prob.dtype, version)
    if version >= 0 and device in kept and kept[device][1] == stamp:
        return kept[device][2]
    weight = prob.detach().to(device)
    if plain.edge_ids is not None:
        weight = weight.index_select(0, plain.edge_ids)
    of_weight = weight if prob.dtype in _WEIGHTS else None
    if prob.dtype not in (*_WEIGHTS, torch.bool) and bool(((weight != 0) & (weight != 1)).any()):
        of_weight = weight = weight.float()
    if of_weight is not None and not bool(((weight >= 0) & weight.isfinite()).all()):
        raise ValueError("NeighborSampler: prob: expected finite probabilities of at least 0")
    some, found = weight != 0, plain._replace(weight=of_weight)
    if not bool(some.all()):
        before = torch.cat([some.new_zeros(1, dtype=torch.int64), some.cumsum(0)])
        places = some.nonzero().flatten()
        ids = places.to(plain.indptr.dtype) if plain.edge_ids is None else plain.edge_ids[places]
        indptr = before[plain.indptr.long()].to(plain.indptr.dtype)
        found = Drawable(indptr, plain.indices[places], ids, None if of_weight is None else of_weight[places])
    kept[device] = prob, stamp, found  # with the tensor, whose address nobody else has as long as it is there
    return found


def layers_of(
    drawable: Drawable, seeds: Tensor, fanouts: list[int], replace: bool, device: torch.device
) -> list[_Layer]:
    """Of a batch that is sampled on `device` and is where the seeds are: from the seeds on, with the graph's edge ids,
    nodes and edge ids as the seeds' dtype."""
    indptr, indices, edge_ids, weight = drawable
    given = seeds.to(device)
    if given.dtype != indptr.dtype:  # what is out of range must not become another node's number
        given = given.clamp(-1, torch.iinfo(indptr.dtype).max).to(indptr.dtype)
    out = sampling.neighbor_sample(
        indptr, indices, given, fanouts, edge_weight=weight, replace=replace, resample=True, seed=_seed()
    )
    edges = out.edge if edge_ids is None else edge_ids[out.edge]
    node, row, col, edge = (array.to(seeds.device) for array in (out.node, out.row, out.col, edges))
    node, edge = node.to(seeds.dtype), edge.to(seeds.dtype)
    layers, first, num_dst = [], 0, seeds.numel()
    for new_nodes, new_edges in zip(out.num_nodes_per_hop[1:], out.num_edges_per_hop, strict=True):
        these, num_src = slice(first, first + new_edges), num_dst + new_nodes
        layers.append(_Layer(node[:num_src], num_dst, row[these], col[these], edge[these]))
        first, num_dst = these.stop, num_src
    return layers


def _block(g, layer: _Layer):
    """A block of the CPU."""
    row = layer.row.to(layer.nodes.dtype)
    indptr = row.new_zeros(layer.num_dst + 1)
    torch.cumsum(torch.bincount(layer.col, minlength=layer.num_dst), 0, out=indptr[1:])
    name = g.ntypes[0]
    block = dgl.create_block(
        {g.canonical_etypes[0]: ("csc", (indptr, row, row.new_empty(0)))},
        num_src_nodes={name: layer.nodes.numel()},
        num_dst_nodes={name: layer.num_dst},
        idtype=row.dtype,
    )
    utils.set_new_frames(block, **_frames(g, layer))
    return block


def _gpu_block(g, layer: _Layer):
    """The same of a batch on a GPU, where the block stays."""
    num_src = layer.nodes.numel()
    arrays = build.ordered_to_csr(layer.col, layer.row, layer.num_dst, num_src)
    index = block_index(Graph(*arrays, None, num_src), layer.nodes.dtype)
    return DGLBlock(index, (g.ntypes, g.ntypes), g.etypes, **_frames(g, layer))


def _frames(g, layer: _Layer) -> dict:
    """Frames of a block: what the graph has of these nodes and edges, read when it is asked for."""
    node_frames = utils.extract_node_subframes_for_block(g, [layer.nodes], [layer.nodes[: layer.num_dst]])
    return {"node_frames": node_frames, "edge_frames": utils.extract_edge_subframes(g, [layer.edge])}


def sample_blocks(original: Callable) -> Callable:
    """NeighborSampler.sample_blocks() on our sampling, where it can be."""

    @functools.wraps(original)
    def method(self, g, seed_nodes, exclude_eids=None):
        reason, start = reason_against(self, g, seed_nodes, exclude_eids), time.perf_counter()
        if reason is None:
            on_gpu, again = seed_nodes.is_cuda, repeats(seed_nodes)
            device, block = (seed_nodes.device, _gpu_block) if on_gpu else (place(_KIND), _block)
            # A GPU says whether seeds are there twice when the host has waited for the sizes of the batch anyway.
            left = not on_gpu and bool(again)
            drawable = drawable_of(to_graph(g), device, None if self.prob is None else g.edata[self.prob])
            layers = None if left else layers_of(drawable, seed_nodes, self.fanouts[::-1], self.replace, device)
            if layers is not None and not (on_gpu and bool(again)):
                blocks = [block(g, layer) for layer in reversed(layers)]
                report.record(_KIND, start)
                return layers[-1].nodes if layers else seed_nodes, seed_nodes, blocks
            reason = "a seed that is there twice"
        report.fallback(_KIND, reason)
        return original(self, g, seed_nodes, exclude_eids)

    return method
