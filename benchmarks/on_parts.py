"""What the benchmarks of training on parts share: a stand-in graph cut into parts, models, epochs, their times.

`--parts FOLDER` keeps what is cut: runs of the same graph on as many ranks then load it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import generate
from timing import provenance, save_table
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import gnnaccel
from gnnaccel import distributed
from gnnaccel.parts.exchange import Exchange

MODELS = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT}
NUM_CLASSES, HEADS = 40, 4


def arguments(description: str, graph: str, models: list[str]) -> argparse.ArgumentParser:
    """The options that all have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default=graph)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--models", nargs="+", default=models, choices=MODELS)
    parser.add_argument("--feats", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--method", default="communities")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--parts", metavar="FOLDER", help="keeps the parts, and takes them from there")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--commit", help="where git is not at hand")
    return parser


def under_torchrun(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, torch.device]:
    """Arguments and device of a rank that torchrun has started."""
    parser.add_argument("--device", help="default: a GPU for each rank where there are as many, else the CPU")
    args = parser.parse_args()
    return args, distributed.join(args.device, timeout_s=600)


def name_of(args) -> str:
    return args.graph if args.scale == 1 else f"{args.graph} x {args.scale}"


def stand_in(name: str, device, scale: float) -> gnnaccel.Graph:
    made = generate(name, device, scale)
    return gnnaccel.Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"])


def whole_graph(args, device="cpu"):
    """Graph, features and labels of a stand-in."""
    graph = stand_in(args.graph, device, args.scale)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(graph.num_rows, args.feats, generator=generator)
    return graph, x, torch.randint(NUM_CLASSES, (graph.num_rows,), generator=generator)


def cut(args, ranks: int, device="cpu") -> tuple[str, float]:
    """Folder of the parts of a stand-in, and seconds that partitioning took: 0 where `--parts` had them."""
    folder = Path(
        args.parts or tempfile.mkdtemp(), f"{name_of(args).replace(' ', '')}-{args.feats}-{args.method}-{ranks}"
    )
    if (folder / "manifest.json").exists():
        return str(folder), 0.0
    graph, x, y = whole_graph(args, device)
    start = time.perf_counter()
    print(distributed.partition(graph, ranks, folder, args.method, nodes={"x": x, "y": y}), flush=True)
    return str(folder), time.perf_counter() - start


def cut_and_load(args, device, wire=None):
    """This rank's part, cut by rank 0, and the seconds that took."""
    found = [cut(args, dist.get_world_size(), device) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    folder, took = found[0]
    return distributed.load(folder, device=device, wire=wire), took


def about(args, part) -> dict:
    """The columns that say what was run."""
    found = part.statistics
    return {
        "graph": name_of(args),
        "nodes": found.num_nodes,
        "edges": found.num_edges,
        "parts": found.parts,
        "ranks": found.parts,
        "backend": dist.get_backend(),
        "method": found.method,
        "hidden": args.hidden,
        "layers": args.layers,
        "halo_rows": found.halo_rows,
        "edge_balance": found.edge_balance,
    }


def model_of(kind: str, args, device="cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    options = {"heads": HEADS} if kind == "gat" else {}
    return MODELS[kind](args.feats, args.hidden, args.layers, NUM_CLASSES, **options).to(device)


def trained(kind: str, args, part) -> tuple[Callable, Callable]:
    """Functions without arguments that give the loss on a part, and that of an epoch: forward, backward, Adam."""
    model = distributed.wrap(model_of(kind, args, part.device), part)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss():
        return part.mean(F.cross_entropy(model(part.x, part.edge_index), part.y, reduction="none"))

    def epoch():
        found = loss()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        return found

    return loss, epoch


def wait(device):
    """Until all ranks are here, and their GPUs done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def slowest_ms(function: Callable, device, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median over repeats of the time that the slowest rank takes."""
    times = []
    for _ in range(repeats):
        wait(device)
        start = clock()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor([clock() - start], dtype=torch.float64, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item() * 1e3)
    return statistics.median(times)


class Exchanges:
    """What a rank's exchanges send while this is entered: (shape, dtype, counts, others) of each."""

    def __init__(self):
        self.original, self.found = Exchange._started, []

    def __enter__(self):
        noted = self

        def started(exchange, rows, counts, others):
            noted.found.append((rows.shape, rows.dtype, counts, others))
            return noted.original(exchange, rows, counts, others)

        Exchange._started = started
        return self

    def __exit__(self, *_):
        Exchange._started = self.original

    def mib_of_all(self, device, size: int = 4) -> float:
        """MiB that all ranks sent, of elements of so many bytes."""
        mine = sum(shape.numel() * size for shape, *_ in self.found)
        sent = torch.tensor([mine], dtype=torch.float64, device=device)
        dist.all_reduce(sent)
        return sent.item() / 2**20


def save(args, columns, rows, *notes):
    """The table, by rank 0."""
    if args.csv and rows:
        save_table(args.csv, provenance(args.commit, *notes), columns, rows)


def threads() -> str:
    return f"{torch.get_num_threads()} CPU threads each"
