"""Steps of mini-batch training: sampled blocks that are used once, so that building the graph is part of the step.

Neighbours are sampled uniformly without replacement, as PyG's loaders do, into one edge list [2, E] per layer:
sources in the first row, destinations in the second, both renumbered, the destinations first among the sources.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timing import error_of
from torch import Tensor

from gnnaccel import ops
from gnnaccel.graph.csr import Graph


@dataclass
class Block:
    """Edges between the nodes of one layer and the next."""

    edge_index: Tensor
    weight: Tensor
    num_src: int
    num_dst: int

    def double(self) -> Block:
        return Block(self.edge_index, self.weight.double(), self.num_src, self.num_dst)


@dataclass
class Batch:
    """Blocks, the outermost first; features of its sources; gradient of the seeds' result."""

    blocks: list[Block]
    x: Tensor
    grad: Tensor


def neighbours(indptr: Tensor, indices: Tensor, nodes: Tensor, fan_out: int) -> tuple[Tensor, Tensor]:
    """Up to `fan_out` neighbours of each of `nodes`: positions in `nodes`, ascending, and the neighbours."""
    start = indptr[nodes].long()
    degree = indptr[nodes + 1].long() - start
    owner = torch.repeat_interleave(torch.arange(nodes.numel(), device=nodes.device), degree)
    rank = torch.arange(owner.numel(), device=nodes.device) - (degree.cumsum(0) - degree)[owner]
    # Shuffles each node's neighbours and leaves the nodes in place: so `owner` and `rank` describe the result too.
    order = (owner * 2**31 + torch.randint(2**31, owner.shape, device=nodes.device)).argsort()
    kept = rank < fan_out
    return owner[kept], indices[start[owner[kept]] + rank[order[kept]]].long()


def block(indptr: Tensor, indices: Tensor, nodes: Tensor, fan_out: int) -> tuple[Block, Tensor]:
    """Block of sampled edges into `nodes`, and the nodes they come from: `nodes`, then new ones as they appear."""
    target, source = neighbours(indptr, indices, nodes, fan_out)
    place = torch.full((indptr.numel() - 1,), -1, device=nodes.device)
    place[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    first = torch.full_like(place, source.numel())
    first.scatter_reduce_(0, source, torch.arange(source.numel(), device=nodes.device), "amin")
    new = source[place[source] < 0].unique()
    new = new[first[new].argsort()]
    place[new] = torch.arange(nodes.numel(), nodes.numel() + new.numel(), device=nodes.device)
    edge_index = torch.stack([place[source], target])
    weight = torch.rand(target.numel(), device=nodes.device)
    return Block(edge_index, weight, nodes.numel() + new.numel(), nodes.numel()), torch.cat([nodes, new])


def batch(graph: Graph, width: int, batch_size: int = 1024, fan_outs: tuple[int, ...] = (15, 10)) -> Batch:
    """A random batch of seeds with its sampled neighbourhood."""
    nodes = torch.randperm(graph.num_rows, device=graph.device)[:batch_size]
    grad = torch.randn(nodes.numel(), width, device=graph.device)
    blocks = []
    for fan_out in fan_outs:
        made, nodes = block(graph.indptr, graph.indices, nodes, fan_out)
        blocks.insert(0, made)
    x = torch.randn(nodes.numel(), width, device=graph.device, requires_grad=True)
    return Batch(blocks, x, grad)


def own_layer(block: Block, x: Tensor) -> Tensor:
    """Weighted sum on a graph made for this one use."""
    source, target = block.edge_index
    graph = Graph.from_coo(target, source, num_rows=block.num_dst, num_cols=block.num_src)
    return ops.spmm(graph, x, block.weight)


def pyg_layer(block: Block, x: Tensor) -> Tensor:
    """Weighted sum as PyG runs it: one message per edge, added up with atomics."""
    source, target = block.edge_index
    messages = x[source] * block.weight.view(-1, 1)
    return x.new_zeros(block.num_dst, x.shape[1]).index_add_(0, target, messages)


def step(layer: Callable[[Block, Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """Forward over all blocks and backward to the features; the result and the gradient."""
    out = batch.x
    for one in batch.blocks:
        out = layer(one, out)
    return out.detach(), torch.autograd.grad(out, batch.x, batch.grad)[0]


def measure(graph: Graph, width: int = 128, count: int = 20, peers: bool = True) -> dict:
    """Median wall time of a step over `count` batches, ours and PyG's in turns, checked on three batches before."""
    layers: dict[str, Callable] = {"gnnaccel_ms": own_layer} | ({"pyg_ms": pyg_layer} if peers else {})
    error = 0.0
    for one in [batch(graph, width) for _ in range(3)]:
        exact = Batch([b.double() for b in one.blocks], one.x.detach().double().requires_grad_(), one.grad.double())
        want = step(pyg_layer, exact)
        for layer in layers.values():
            errors = [error_of(got, right) for got, right in zip(step(layer, one), want, strict=True)]
            error = max(error, *errors) if layer is own_layer else error
    times: dict[str, list[float]] = {name: [] for name in layers}
    sizes = []
    for turn in range(count):
        one = batch(graph, width)
        sizes.append((one.x.shape[0], sum(b.weight.numel() for b in one.blocks)))
        for name in list(layers) if turn % 2 else reversed(layers):  # neither always finds the batch in cache
            _synchronize()
            start = time.perf_counter()
            step(layers[name], one)
            _synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    nodes, edges = (int(statistics.median(size)) for size in zip(*sizes, strict=True))
    low, _, high = statistics.quantiles(times["gnnaccel_ms"], n=4)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return dict(nodes=nodes, edges=edges, op="minibatch", width=width, dtype="float32", spread_ms=high - low,
                rel_error=error, **medians)  # fmt: skip


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
