"""Full-graph training on parts: time of an epoch, what of it the exchange of halo rows takes, how much is sent.

    torchrun --standalone --nproc-per-node 1 benchmarks/distributed.py --graph reddit-like --csv one.csv
    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --graph reddit-like --csv two.csv

Each row of a table is one model of PyG's. First the loss of the whole graph on rank 0 alone must be that of the parts
(--no-check leaves that out, where the graph does not fit one GPU). epoch_ms: forward, backward and Adam, median of the
slowest rank. exchange_ms: the exchanges of an epoch by themselves, one after the other. exposed_ms: what an epoch takes
longer than one whose exchanges give rows of zeros at once, which is what overlap leaves of them. mib_sent: by all ranks
in an epoch, gradients included. Features of the first layer are fetched once, and in none of these.
"""

import argparse
import resource
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import generate
from timing import provenance, save_table, shown
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

import gnnaccel
from gnnaccel import distributed
from gnnaccel.parts.exchange import Exchange

MODELS = {"gcn": GCN, "sage": GraphSAGE, "gin": GIN, "gat": GAT}
COLUMNS = (
    *("graph", "nodes", "edges", "parts", "method", "model", "hidden", "layers", "wire", "epoch_ms", "exchange_ms"),
    *("exposed_ms", "mib_sent", "halo_rows", "edge_balance", "loss", "loss_diff", "partition_s", "peak_gib"),
)
NUM_CLASSES = 40


def whole_graph(name, scale, device, num_feats):
    """Graph, features and labels of a stand-in."""
    made = generate(name, device, scale)
    graph = gnnaccel.Graph.from_csr(made["indptr"], made["indices"], num_cols=made["num_nodes"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(made["num_nodes"], num_feats, generator=generator)
    return graph, x, torch.randint(NUM_CLASSES, (made["num_nodes"],), generator=generator)


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def slowest(function, device, repeats):
    """Median over repeats of the time that the slowest rank takes."""
    times = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item() * 1e3)
    return statistics.median(times)


def model_of(kind, num_feats, hidden, layers, device):
    torch.manual_seed(0)
    options = {"heads": 4} if kind == "gat" else {}
    return MODELS[kind](num_feats, hidden, layers, NUM_CLASSES, **options).to(device)


def check(kind, args, part, loss):
    """How far the loss of the whole graph on rank 0, without parts, is from that of the parts."""
    graph, x, y = whole_graph(args.graph, args.scale, part.device, args.feats)
    rows = torch.repeat_interleave(torch.arange(graph.num_rows, device=part.device), graph.indptr.diff().long())
    edges = torch.stack([graph.indices.long(), rows])
    model = gnnaccel.accelerate(model_of(kind, args.feats, args.hidden, args.layers, part.device))
    with torch.no_grad():
        return abs(F.cross_entropy(model(x.to(part.device), edges), y.to(part.device)).item() - loss)


def measure(kind, args, part, repeats):
    model = distributed.wrap(model_of(kind, args.feats, args.hidden, args.layers, part.device), part)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def epoch():
        loss = part.mean(F.cross_entropy(model(part.x, part.edge_index), part.y, reduction="none"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    with torch.no_grad():
        loss = part.mean(F.cross_entropy(model(part.x, part.edge_index), part.y, reduction="none")).item()
    difference = None
    if args.check:
        difference = check(kind, args, part, loss) if part.rank == 0 else None
        wait(part.device)
        if difference is not None and not difference < 1e-4:
            raise SystemExit(f"{kind}: the loss of the parts is {difference} from that of the whole graph")
    for _ in range(3):
        epoch()
    epoch_ms = slowest(epoch, part.device, repeats)
    seen = []
    original = Exchange._started

    def noted(self, rows, counts, others):
        seen.append((rows.shape, rows.dtype, counts, others))
        return original(self, rows, counts, others)

    def zeros(self, rows, counts, others):
        found = rows.new_zeros(sum(others), *rows.shape[1:])
        return lambda: found

    def exchanges():
        for shape, dtype, counts, others in seen:
            original(part.exchange, torch.zeros(shape, dtype=dtype, device=part.device), counts, others)()

    try:
        Exchange._started = noted
        before = part.exchange.rows_sent
        epoch()
        Exchange._started = original
        exchange_ms = slowest(exchanges, part.device, repeats)
        Exchange._started = zeros
        without_ms = slowest(epoch, part.device, repeats)
    finally:
        Exchange._started = original
    assert part.exchange.rows_sent > before or part.world_size == 1
    size = 2 if args.wire else 4
    sent = torch.tensor([sum(shape.numel() * size for shape, *_ in seen)], dtype=torch.float64, device=part.device)
    dist.all_reduce(sent)
    peak = torch.cuda.max_memory_allocated() if part.device.type == "cuda" else 0
    return {
        "model": kind,
        "epoch_ms": epoch_ms,
        "exchange_ms": exchange_ms if seen else 0.0,
        "exposed_ms": epoch_ms - without_ms,
        "mib_sent": sent.item() / 2**20,
        "loss": loss,
        "loss_diff": difference,
        "peak_gib": (peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) / 2**30,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="reddit-like")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--models", nargs="+", default=["gcn", "sage", "gat"], choices=MODELS)
    parser.add_argument("--feats", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--method", default="communities")
    parser.add_argument("--wire", choices=["bfloat16"], help="what rows are rounded to on the way")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-check", dest="check", action="store_false")
    parser.add_argument("--device", help="default: a GPU for each rank where there are as many, else the CPU")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--commit", help="where git is not at hand")
    args = parser.parse_args()

    device = distributed.join(args.device, timeout_s=600)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    took = 0.0
    if dist.get_rank() == 0:
        graph, x, y = whole_graph(args.graph, args.scale, device, args.feats)
        start = time.perf_counter()
        print(distributed.partition(graph, dist.get_world_size(), folder[0], args.method, nodes={"x": x, "y": y}))
        took = time.perf_counter() - start
        del graph, x, y
    dist.broadcast_object_list(folder)
    part = distributed.load(folder[0], device=device, wire=getattr(torch, args.wire) if args.wire else None)
    about = part.statistics
    common = {
        "graph": args.graph,
        "nodes": about.num_nodes,
        "edges": about.num_edges,
        "parts": about.parts,
        "method": about.method,
        "hidden": args.hidden,
        "layers": args.layers,
        "wire": args.wire or "",
        "halo_rows": about.halo_rows,
        "edge_balance": about.edge_balance,
        "partition_s": took,
    }
    rows = []
    for kind in args.models:
        row = common | measure(kind, args, part, args.repeats)
        if part.rank == 0:
            rows.append(shown(COLUMNS, row))
    if part.rank == 0 and args.csv:
        note = f"{dist.get_world_size()} ranks, {dist.get_backend()}, {torch.get_num_threads()} CPU threads each"
        save_table(args.csv, provenance(args.commit, note), COLUMNS, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
