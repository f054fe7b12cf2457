"""Full-graph training on parts: time of an epoch, what of it the exchange of halo rows takes, how much is sent.

    torchrun --standalone --nproc-per-node 1 benchmarks/distributed.py --graph reddit-like --csv one.csv
    torchrun --standalone --nproc-per-node 2 benchmarks/distributed.py --graph reddit-like --csv two.csv

Each row of a table is one model of PyG's. First the loss of the whole graph on rank 0 alone must be that of the parts
(--no-check leaves that out, where the graph does not fit one GPU). epoch_ms: forward, backward and Adam, median of the
slowest rank. exchange_ms: the exchanges of an epoch by themselves, one after the other. exposed_ms: what an epoch takes
longer than one whose exchanges give rows of zeros at once, which is what overlap leaves of them. mib_sent: by all ranks
in an epoch, gradients included. Features of the first layer are fetched once, and in none of these.
"""

import resource

import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_parts import (
    Exchanges,
    about,
    arguments,
    cut_and_load,
    model_of,
    save,
    slowest_ms,
    threads,
    trained,
    under_torchrun,
    wait,
    whole_graph,
)
from timing import shown

import gnnaccel
from gnnaccel.parts.exchange import Exchange

COLUMNS = (
    *("graph", "nodes", "edges", "parts", "method", "model", "hidden", "layers", "wire", "epoch_ms", "exchange_ms"),
    *("exposed_ms", "mib_sent", "halo_rows", "edge_balance", "loss", "loss_diff", "partition_s", "peak_gib"),
)


def check(kind, args, part, loss):
    """How far the loss of the whole graph on rank 0, without parts, is from that of the parts."""
    graph, x, y = whole_graph(args, part.device)
    rows = torch.repeat_interleave(torch.arange(graph.num_rows, device=part.device), graph.indptr.diff().long())
    edges = torch.stack([graph.indices.long(), rows])
    model = gnnaccel.accelerate(model_of(kind, args, part.device))
    with torch.no_grad():
        return abs(F.cross_entropy(model(x.to(part.device), edges), y.to(part.device)).item() - loss)


def zeros(_exchange, rows, _counts, others):
    found = rows.new_zeros(sum(others), *rows.shape[1:])
    return lambda: found


def measure(kind, args, part):
    loss_of, epoch = trained(kind, args, part)
    with torch.no_grad():
        loss = loss_of().item()
    difference = None
    if args.check:
        difference = check(kind, args, part, loss) if part.rank == 0 else None
        wait(part.device)
        if difference is not None and not difference < 1e-4:
            raise SystemExit(f"{kind}: the loss of the parts is {difference} from that of the whole graph")
    if part.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # rank 0 has had the whole graph
    for _ in range(3):
        epoch()
    epoch_ms = slowest_ms(epoch, part.device, args.repeats)
    peak = torch.cuda.max_memory_allocated() if part.device.type == "cuda" else 0
    with Exchanges() as seen:
        epoch()

    def exchanges():
        for shape, dtype, counts, others in seen.found:
            part.exchange._started(torch.zeros(shape, dtype=dtype, device=part.device), counts, others)()

    exchange_ms = slowest_ms(exchanges, part.device, args.repeats)
    Exchange._started = zeros
    try:
        without_ms = slowest_ms(epoch, part.device, args.repeats)
    finally:
        Exchange._started = seen.original
    assert seen.found or part.world_size == 1
    return {
        "model": kind,
        "epoch_ms": epoch_ms,
        "exchange_ms": exchange_ms if seen.found else 0.0,
        "exposed_ms": epoch_ms - without_ms,
        "mib_sent": seen.mib_of_all(part.device, 2 if args.wire else 4),
        "loss": loss,
        "loss_diff": difference,
        "peak_gib": (peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) / 2**30,
    }


def main():
    parser = arguments(__doc__, "reddit-like", ["gcn", "sage", "gat"])
    parser.add_argument("--wire", choices=["bfloat16"], help="what rows are rounded to on the way")
    parser.add_argument("--no-check", dest="check", action="store_false")
    args, device = under_torchrun(parser)
    part, took = cut_and_load(args, device, getattr(torch, args.wire) if args.wire else None)
    common = about(args, part) | {"wire": args.wire or "", "partition_s": took or None}
    rows = []
    for kind in args.models:
        row = common | measure(kind, args, part)
        if part.rank == 0:
            rows.append(shown(COLUMNS, row))
            save(args, COLUMNS, rows, f"{part.world_size} ranks, {dist.get_backend()}, {threads()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
