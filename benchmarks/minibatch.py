"""Steps of mini-batch training: sampled blocks that are used once, so that building the graph is part of the step.

    python benchmarks/minibatch.py --device cuda --graph products-like --csv out.csv

A step is forward and backward of a weighted sum over each block, with building our graphs; its wall time beside that of
PyG's path (gather, then index_add), in turns on the same batches. vs_pyg: how many times faster gnnaccel is.

Neighbours are sampled uniformly without replacement, as PyG's loaders do, into one edge list [2, E] per layer:
sources in the first row, destinations in the second, both renumbered, the destinations first among the sources.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import graphs
import torch
from timing import clocks_under_load, error_of, provenance, save_table, shown
from torch import Tensor

from gnnaccel import engine, ops
from gnnaccel.graph.csr import Graph

COLUMNS = (
    "graph", "nodes", "edges", "width", "gnnaccel_ms", "spread_ms", "pyg_ms", "vs_pyg", "rel_error",
)  # fmt: skip


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
            # Ours with the backward where the flag has it, on the thread that calls it; PyG's where torch has it.
            (engine.settle if name == "gnnaccel_ms" else engine.restore)()
            _synchronize()
            start = time.perf_counter()
            step(layers[name], one)
            _synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    engine.restore()
    nodes, edges = (int(statistics.median(size)) for size in zip(*sizes, strict=True))
    low, _, high = statistics.quantiles(times["gnnaccel_ms"], n=4)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return dict(nodes=nodes, edges=edges, op="minibatch", width=width, dtype="float32", spread_ms=high - low,
                rel_error=error, **medians)  # fmt: skip


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--graph", default="products-like", help=f"of {', '.join(graphs.GRAPHS)}")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--count", type=int, default=60, help="batches")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    head = provenance(args.commit, "fan-out 15 and 10, 1,024 seeds, building included; medians", clocks_under_load())
    print(*head, sep="\n", flush=True)
    made = graphs.generate(args.graph, args.device, args.scale)
    graph = Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"], check=False)
    row = {"graph": args.graph, **measure(graph, args.width, args.count)}
    row["vs_pyg"] = row["pyg_ms"] / row["gnnaccel_ms"]
    cells = shown(COLUMNS, row)
    if args.csv:
        save_table(args.csv, head, COLUMNS, [cells])


if __name__ == "__main__":
    main()
