"""Neighbour sampling: a batch with its renumbering, beside torch_sparse's and DGL's samplers, or the GPU's beside ours.

    PYTHONPATH=.venv/sparse python benchmarks/sampling.py --scale 0.25 --csv out.csv      # make test-sparse builds it
    python benchmarks/sampling.py --device cuda --csv out.csv

Wall time of a batch in milliseconds, median and least of --count batches, samplers taken in turn on the same seeds.
batch_edges: of a batch, median. DGL samples again, for every layer, the nodes of the layers before it, so its batches
have more edges; vs_dgl compares batches, vs_dgl_edge the time per edge. torch_sparse has one thread whatever it is
given. kind "DGL's blocks" is DGL's sampler as the plug-in runs it. Full neighbourhoods are torch_sparse's,
edge by edge, which is checked before anything is timed.

With --device cuda, one row for each of
    int64, int32    `neighbor_sample` on the GPU (cuda), on the CPU with the first of --threads (cpu), and for int64 a
                    sampler of torch's ops on the GPU (torch; benchmarks/minibatch.py), which samples as DGL does
    weighted, weighted again, disjoint, temporal, last    the same of int64 by weights, without and with replacement, in
                    trees, and by times of edges, of which 40 in each row are early enough
    types           `hetero_neighbor_sample` of a graph as ogbn-mag (five relations), from papers, over two hops
    DGL's blocks    `NeighborSampler` as the plug-in runs it, with GNNACCEL_SAMPLER=cuda and without
    PyG's loader    NeighborLoader of 100 features on data that is on the GPU; of data on the CPU, with
                    GNNACCEL_SAMPLER=cuda (pinned), and batches of the CPU's sampler moved to the GPU, without workers
                    (cpu) and with --workers (workers)
    PyG's, with training    the same, and a step of GraphSAGE, 3 layers of 256, of whose result on the batch the first
                    rows are taken, the seeds', as scripts have it: mean of all batches of a row
    PyG's, trimmed, with training    the same, and the model is told how many nodes and edges each hop has added, with
                    which PyG's trim_to_layer leaves out what a layer need not have
    DGL's loader    DataLoader of a graph on the GPU, of a pinned one (pinned: use_uva), and on the CPU, as PyG's;
                    features and labels are fetched
    DGL's, with training    the same, and a step of 3 SAGEConv
Backward passes run as under the flag, on the thread that calls them (gnnaccel.engine).
vs_ columns: times of the others over that of cuda. The GPU's batches are the CPU's, which is checked first.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable

import graphs
import minibatch
import torch
from timing import clocks_under_load, provenance, save_table, shown
from torch import Tensor

from gnnaccel import dgl_backend, engine, sampling

COLUMNS = (
    "graph", "nodes", "edges", "threads", "kind", "batch_nodes", "batch_edges", "gnnaccel_ms", "gnnaccel_least_ms",
    "torch_sparse_ms", "torch_sparse_least_ms", "dgl_ms", "dgl_least_ms", "dgl_edges", "vs_torch_sparse", "vs_dgl",
    "vs_dgl_edge",
)  # fmt: skip
CUDA_COLUMNS = (
    "graph", "nodes", "edges", "threads", "kind", "batch_nodes", "batch_edges", "cuda_ms", "cuda_least_ms", "cpu_ms",
    "cpu_least_ms", "workers", "workers_ms", "torch_ms", "torch_edges", "pinned_ms", "vs_cpu", "vs_workers", "vs_torch",
)  # fmt: skip
MAG = {"paper": 736_389, "author": 1_134_649, "field": 59_965, "institution": 8_740}
MAG_EDGES = {
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "by", "author"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("field", "of", "paper"): 7_505_078,
    ("institution", "of", "author"): 1_043_998,
}
SIDES = ("cuda", "pinned", "cpu", "workers")
WARM_UP = 10  # batches of a loader
Sampler = Callable[[Tensor], tuple[int, int]]  # seeds -> nodes and edges of the batch


def ours(indptr: Tensor, indices: Tensor, fanouts: list[int], **options) -> Sampler:
    def run(seeds: Tensor) -> tuple[int, int]:
        out = sampling.neighbor_sample(indptr, indices, seeds.to(indptr), fanouts, **options)
        return out.node.numel(), out.edge.numel()

    return run


def of_types(graph: dict, fanouts: list[int]) -> Sampler:
    def run(seeds: Tensor) -> tuple[int, int]:
        seeds = seeds.to(graph["paper", "cites", "paper"][0])
        out = sampling.hetero_neighbor_sample(graph, {"paper": seeds}, fanouts, num_nodes=MAG)
        return tuple(sum(a.numel() for a in part.values()) for part in (out.node, out.edge))

    return run


def mag_like() -> dict:
    """Relations of ogbn-mag's sizes on the GPU, by destination; ends are uniform."""
    graph = {}
    for kind, count in MAG_EDGES.items():
        ends = [torch.randint(MAG[name], (count,), device="cuda") for name in (kind[0], kind[-1])]
        order = ends[1].argsort()
        degrees = torch.bincount(ends[1], minlength=MAG[kind[-1]])
        graph[kind] = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]), ends[0][order]
    return graph


def torch_sparse(indptr: Tensor, indices: Tensor, fanouts: list[int]) -> Sampler | None:
    try:
        import torch_sparse  # noqa: F401
    except ImportError:
        return None

    def run(seeds: Tensor) -> tuple[int, int]:
        node, _, _, edge = torch.ops.torch_sparse.neighbor_sample(indptr, indices, seeds, fanouts, False, True)
        return node.numel(), edge.numel()

    return run


def dgls(indptr: Tensor, indices: Tensor, fanouts: list[int], ours: bool = False) -> Sampler | None:
    """DGL's sampler, or what the plug-in has in its place."""
    try:
        import dgl
    except ImportError:
        return None
    from gnnaccel.dgl_backend.samplers import sample_blocks

    graph = dgl.graph(("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))))
    sampler = dgl.dataloading.NeighborSampler(fanouts[::-1])
    method = type(sampler).sample_blocks
    method = sample_blocks(method) if ours else method

    def run(seeds: Tensor) -> tuple[int, int]:
        nodes, _, blocks = method(sampler, graph, seeds)
        return nodes.numel(), sum(block.num_edges() for block in blocks)

    return run


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        import dgl

        dgl.utils.set_num_threads(threads)
    except ImportError:
        pass


def check(indptr: Tensor, indices: Tensor) -> None:
    """End the benchmark unless full neighbourhoods are torch_sparse's."""
    seeds = torch.arange(64)
    out = sampling.neighbor_sample(indptr, indices, seeds, [-1, -1])
    peer = torch.ops.torch_sparse.neighbor_sample(indptr, indices, seeds, [-1, -1], False, True)
    for got, want in zip((out.node, out.row, out.col, out.edge), peer, strict=True):
        if not torch.equal(got, want):
            raise SystemExit("wrong result: a full neighbourhood is not torch_sparse's")


def torch_ops(indptr: Tensor, indices: Tensor, fanouts: list[int]) -> Sampler:
    def run(seeds: Tensor) -> tuple[int, int]:
        nodes, edges = seeds.to(indptr), 0
        for fanout in fanouts:
            block, nodes = minibatch.block(indptr, indices, nodes, fanout)
            edges += block.edge_index.shape[1]
        return nodes.numel(), edges

    return run


def by_choice(sampler: Sampler, choice: str) -> Sampler:
    """The same with GNNACCEL_SAMPLER set."""

    def run(seeds: Tensor) -> tuple[int, int]:
        os.environ["GNNACCEL_SAMPLER"] = choice
        try:
            return sampler(seeds)
        finally:
            del os.environ["GNNACCEL_SAMPLER"]

    return run


def until_done(sampler: Sampler) -> Sampler:
    """The same, and the GPU is done when it returns."""

    def run(seeds: Tensor) -> tuple[int, int]:
        size = sampler(seeds)
        torch.cuda.synchronize()
        return size

    return run


def check_cuda(indptr: Tensor, indices: Tensor, fanouts: list[int]) -> None:
    """End the benchmark unless the GPU draws the CPU's batches."""
    seeds = torch.arange(64)
    for given in (fanouts, [-1, 2], [40]):
        wanted = sampling.neighbor_sample(indptr, indices, seeds, given, seed=1)
        got = sampling.neighbor_sample(indptr.cuda(), indices.cuda(), seeds.cuda(), given, seed=1)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(got[:4], wanted[:4], strict=True)):
            raise SystemExit(f"wrong result: with fan-outs {given} the GPU's batch is not the CPU's")


def measure(samplers: dict[str, Sampler], num_nodes: int, batch: int, count: int) -> dict:
    times: dict[str, list[float]] = {name: [] for name in samplers}
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in samplers}
    order = torch.randperm(num_nodes)
    for turn in range(count + 2):
        seeds = order[turn * batch : (turn + 1) * batch]
        for name in list(samplers) if turn % 2 else reversed(samplers):  # neither always finds the graph in cache
            start = time.perf_counter()
            size = samplers[name](seeds)
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
                sizes[name].append(size)
    row: dict = {}
    for name, values in times.items():
        row[f"{name}_ms"], row[f"{name}_least_ms"] = statistics.median(values), min(values)
        row[f"{name}_edges"] = int(statistics.median(edges for _, edges in sizes[name]))
    row["batch_nodes"] = int(statistics.median(nodes for nodes, _ in sizes["gnnaccel"]))
    row["batch_edges"] = row["gnnaccel_edges"]
    for name in times:
        if name != "gnnaccel":
            row[f"vs_{name}"] = row[f"{name}_ms"] / row["gnnaccel_ms"]
    if "dgl" in times:
        row["vs_dgl_edge"] = row["vs_dgl"] * row["batch_edges"] / row["dgl_edges"]
    return row


def epoch_ms(loader, count: int, take: Callable, model=None) -> tuple[float, int, int]:
    """Mean time of a batch over `count` of them, and their mean size; every batch ends on the GPU.

    take(batch, model): the number of its nodes and edges, what the model says of its seeds, and their labels.
    """
    optimizer = None if model is None else torch.optim.Adam(model.parameters())
    nodes = edges = done = 0
    start = time.perf_counter()
    for number, batch in enumerate(loader):
        if number == WARM_UP:  # what is made once is there, blocks of memory too, and workers are at work
            torch.cuda.synchronize()
            start = time.perf_counter()
        *sizes, out, labels = take(batch, model)
        if optimizer is not None:
            loss = torch.nn.functional.cross_entropy(out, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if number >= WARM_UP:
            nodes, edges, done = nodes + sizes[0], edges + sizes[1], done + 1
        if done == count:
            break
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / done, nodes // done, edges // done


def of_pyg(batch, model, trimmed: bool = False):
    batch, told = batch.to("cuda"), {}
    if trimmed:
        told = {f"num_sampled_{of}_per_hop": batch[f"num_sampled_{of}"] for of in ("nodes", "edges")}
    out = None if model is None else model(batch.x, batch.edge_index, **told)[: batch.batch_size]
    return batch.num_nodes, batch.num_edges, out, batch.y[: batch.batch_size]


def of_dgl(batch, model):
    nodes, _, blocks = batch
    x, labels = blocks[0].srcdata["x"], blocks[-1].dstdata["y"]
    return nodes.numel(), sum(block.num_edges() for block in blocks), model and model(blocks, x), labels


def measure_loaders(indptr: Tensor, indices: Tensor, args, trained: bool, trimmed: bool) -> dict:
    """Loaders of PyG: of data on the GPU, and of data on the CPU with and without workers."""
    import torch_geometric as pyg
    from torch_geometric.loader import NeighborLoader

    from gnnaccel import pyg_backend

    pyg_backend.enable()
    num_nodes = indptr.numel() - 1
    ends = torch.stack([indices, torch.repeat_interleave(torch.arange(num_nodes), indptr.diff())])
    data = pyg.data.Data(x=torch.randn(num_nodes, 100), y=torch.randint(47, (num_nodes,)), edge_index=ends)
    model = pyg.nn.GraphSAGE(100, 256, len(args.fanouts), 47).cuda() if trained else None
    sides = {
        "cuda": (data.clone().to("cuda"), 0, ""),
        "pinned": (data, 0, "cuda"),
        "cpu": (data, 0, ""),
        "workers": (data, args.workers, ""),
    }
    row: dict = {"workers": args.workers} if "workers" in args.sides else {}
    engine.settle()  # as the flag does
    for name, (given, workers, choice) in sides.items():
        if name not in args.sides:
            continue
        os.environ["GNNACCEL_SAMPLER"] = choice
        loader = NeighborLoader(
            given, args.fanouts, batch_size=args.batch, shuffle=True, is_sorted=True, num_workers=workers
        )
        row[f"{name}_ms"], nodes, edges = epoch_ms(
            loader, args.count, functools.partial(of_pyg, trimmed=trimmed), model
        )
        if name == "cuda":
            row |= {"batch_nodes": nodes, "batch_edges": edges}
    del os.environ["GNNACCEL_SAMPLER"]
    engine.restore()
    pyg_backend.disable()
    return row


def measure_dgls_loaders(indptr: Tensor, indices: Tensor, args, trained: bool) -> dict:
    """Loaders of DGL: of a graph on the GPU, of a pinned one (use_uva), of one on the CPU with and without workers."""
    import dgl

    dgl_backend.enable()

    class Sage(torch.nn.Module):
        def __init__(self):
            super().__init__()
            widths = [100, *[256] * (len(args.fanouts) - 1), 47]
            self.layers = torch.nn.ModuleList(dgl.nn.SAGEConv(*pair, "mean") for pair in itertools.pairwise(widths))

        def forward(self, blocks, x):
            for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
                x = layer(block, x) if number == 0 else layer(block, x.relu())
            return x

    def graph():
        g = dgl.graph(("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))))
        g.ndata["x"], g.ndata["y"] = features
        return g

    num_nodes = indptr.numel() - 1
    features = torch.randn(num_nodes, 100), torch.randint(47, (num_nodes,))
    model, seeds = Sage().cuda() if trained else None, torch.arange(num_nodes)
    sampler = dgl.dataloading.NeighborSampler(args.fanouts[::-1], prefetch_node_feats=["x"], prefetch_labels=["y"])
    sides = {
        "cuda": (graph().to("cuda"), seeds.cuda(), {}),
        "pinned": (graph(), seeds, {"use_uva": True}),
        "cpu": (graph(), seeds, {}),
        "workers": (graph(), seeds, {"num_workers": args.workers}),
    }
    row: dict = {"workers": args.workers} if "workers" in args.sides else {}
    engine.settle()
    for name, (given, nodes, how) in sides.items():
        if name not in args.sides:
            continue
        loader = dgl.dataloading.DataLoader(
            given, nodes, sampler, device="cuda", batch_size=args.batch, shuffle=True, **how
        )
        row[f"{name}_ms"], mean_nodes, mean_edges = epoch_ms(loader, args.count, of_dgl, model)
        if name == "cuda":
            row |= {"batch_nodes": mean_nodes, "batch_edges": mean_edges}
    engine.restore()
    dgl_backend.disable()
    return row


def cuda_rows(indptr: Tensor, indices: Tensor, args) -> list[list]:
    check_cuda(indptr, indices, args.fanouts)
    set_threads(args.threads[0])
    same = dict(graph=args.graph, nodes=indptr.numel() - 1, edges=indices.numel(), threads=args.threads[0])
    cells = []

    def wanted(kind: str) -> bool:
        return not args.kinds or any(kind.startswith(start) for start in args.kinds)

    def show(kind: str, row: dict) -> None:
        for other in ("cpu", "workers", "torch", "pinned"):
            if f"{other}_ms" in row:
                row[f"vs_{other}"] = row[f"{other}_ms"] / row["cuda_ms"]
        cells.append(shown(CUDA_COLUMNS, same | {"kind": kind} | row))

    def show_samplers(kind: str, cuda: Sampler, num_nodes: int = same["nodes"], **others: Sampler) -> None:
        samplers = {name: until_done(sampler) for name, sampler in {"gnnaccel": cuda, **others}.items()}
        row = measure(samplers, num_nodes, args.batch, args.count)
        show(kind, row | {"cuda_ms": row["gnnaccel_ms"], "cuda_least_ms": row["gnnaccel_least_ms"]})

    for dtype in (torch.int64, torch.int32):
        if not wanted(str(dtype).removeprefix("torch.")):
            continue
        arrays = (indptr.to(dtype), indices.to(dtype))
        there = tuple(array.cuda() for array in arrays)
        beside = {"torch": torch_ops(*there, args.fanouts)} if dtype == torch.int64 else {}
        kind = str(dtype).removeprefix("torch.")
        show_samplers(kind, ours(*there, args.fanouts), cpu=ours(*arrays, args.fanouts), **beside)
    weight = torch.rand(indices.numel())
    time_in_row = torch.arange(indices.numel()) - torch.repeat_interleave(indptr[:-1], indptr.diff())
    times = dict(edge_time=time_in_row, seed_time=torch.full((args.batch,), 39))
    for kind, options in {
        "weighted": dict(edge_weight=weight),
        "weighted again": dict(edge_weight=weight, replace=True),
        "disjoint": dict(disjoint=True),
        "temporal": times,
        "last": times | dict(temporal_strategy="last"),
    }.items():
        if wanted(kind):
            there = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in options.items()}
            cuda = ours(indptr.cuda(), indices.cuda(), args.fanouts, **there)
            show_samplers(kind, cuda, cpu=ours(indptr, indices, args.fanouts, **options))
    if wanted("types"):
        typed = mag_like()
        here = {kind: tuple(array.cpu() for array in arrays) for kind, arrays in typed.items()}
        cuda, cpu = (of_types(graph, args.fanouts[:2]) for graph in (typed, here))
        same |= dict(graph="mag-like", nodes=sum(MAG.values()), edges=sum(a.numel() for _, a in typed.values()))
        show_samplers("types", cuda, num_nodes=MAG["paper"], cpu=cpu)
        same |= dict(graph=args.graph, nodes=indptr.numel() - 1, edges=indices.numel())
    dgl = dgls(indptr, indices, args.fanouts, ours=True)
    if dgl is not None and wanted("DGL's blocks"):
        show_samplers("DGL's blocks", by_choice(dgl, "cuda"), cpu=dgl)
    for kind in ("PyG's loader", "PyG's, with training", "PyG's, trimmed, with training"):
        if wanted(kind):
            show(kind, measure_loaders(indptr, indices, args, "training" in kind, "trimmed" in kind))
    for kind in ("DGL's loader", "DGL's, with training"):
        if dgl is not None and wanted(kind):
            show(kind, measure_dgls_loaders(indptr, indices, args, "training" in kind))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="products-like", help=f"of {', '.join(graphs.GRAPHS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graph")
    parser.add_argument("--fanouts", nargs="+", type=int, default=[15, 10, 5])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=4, help="of PyG's loader, with --device cuda")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=SIDES, help="loaders to measure, with --device cuda"
    )
    parser.add_argument("--kinds", nargs="+", help="rows to measure, by how they begin, with --device cuda")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--count", type=int, default=20, help="batches")
    parser.add_argument("--commit", help="commit to name in the header, where git is not at hand")
    parser.add_argument("--csv", help="file to write")
    args = parser.parse_args()
    dgl_backend.shim()  # before anything imports DGL
    torch.manual_seed(0)
    notes = [f"fan-out {args.fanouts}, {args.batch} seeds"]
    if args.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch finds no CUDA GPU here")
        notes.append(clocks_under_load())
    head = provenance(args.commit, *notes)
    print(*head, sep="\n", flush=True)
    made = graphs.generate(args.graph, args.device, args.scale)
    indptr, indices = made["indptr"].long().cpu(), made["indices"].long().cpu()
    if args.device == "cuda":
        cells = cuda_rows(indptr, indices, args)
        if args.csv:
            save_table(args.csv, head, CUDA_COLUMNS, cells)
        return
    peers = {"torch_sparse": torch_sparse(indptr, indices, args.fanouts), "dgl": dgls(indptr, indices, args.fanouts)}
    if peers["torch_sparse"]:
        check(indptr, indices)
    weight = torch.rand(indices.numel())
    kinds = {
        "int64": ours(indptr, indices, args.fanouts),
        "int32": ours(made["indptr"], made["indices"], args.fanouts),
        "disjoint": ours(indptr, indices, args.fanouts, disjoint=True),
        "weighted": ours(indptr, indices, args.fanouts, edge_weight=weight),
    }
    if peers["dgl"]:
        kinds["DGL's blocks"] = dgls(indptr, indices, args.fanouts, ours=True)
    beside = {"int64": ("torch_sparse", "dgl"), "DGL's blocks": ("dgl",)}
    cells = []
    for threads in args.threads:
        set_threads(threads)
        for kind, sampler in kinds.items():
            others = {name: peers[name] for name in beside.get(kind, ()) if peers[name] is not None}
            row = dict(graph=args.graph, nodes=indptr.numel() - 1, edges=indices.numel(), threads=threads, kind=kind)
            row |= measure({"gnnaccel": sampler, **others}, row["nodes"], args.batch, args.count)
            cells.append(shown(COLUMNS, row))
    if args.csv:
        save_table(args.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
