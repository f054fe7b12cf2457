"""pyg_gcn.py on several GPUs, or processes of a CPU: each trains on its part of the graph, with the same result.

torchrun --nproc-per-node 2 pyg_gcn_distributed.py --data cora --epochs 200
"""

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import load
from pyg_gcn import GCN
from torch_geometric.data import Data

import gnnaccel


def train(model, optimizer, data):
    model.train()
    logits = model(data.x, data.edge_index)
    loss = data.mean(F.cross_entropy(logits[data.train_mask], data.y[data.train_mask], reduction="none"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, data):
    model.eval()
    predicted = model(data.x, data.edge_index).argmax(dim=1)
    return data.mean((predicted == data.y)[data.test_mask].float()).item()


def whole(name):
    """The graph as one process would train on it; where it is partitioned ahead, nobody needs to hold it."""
    graph = load(name)
    arrays = {key: torch.from_numpy(getattr(graph, key)) for key in ("x", "edge_index", "y", "train_mask", "test_mask")}
    return Data(**arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cora", help="cora, citeseer or a path.npz")
    parser.add_argument("--parts", metavar="FOLDER", help="what gnnaccel partition has written, in place of --data")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--device", help="default: a GPU for each rank where there are as many, else the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-losses", metavar="FILE", help="write one training loss per line")
    args = parser.parse_args()

    device = gnnaccel.distributed.join(args.device)
    if args.parts is None:  # cut the graph here; `gnnaccel partition` does that once for many runs
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        if dist.get_rank() == 0:
            print(gnnaccel.distributed.partition(whole(args.data), dist.get_world_size(), folder[0]))
        dist.broadcast_object_list(folder)
        args.parts = folder[0]
    data = gnnaccel.distributed.load(args.parts, device=device)

    torch.manual_seed(args.seed + data.rank)  # dropout differs from part to part; the weights are rank 0's
    model = GCN(data.num_features, args.hidden, data.num_classes, args.dropout).to(data.device)
    model = gnnaccel.distributed.wrap(model, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    losses, times = [], []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        losses.append(train(model, optimizer, data))
        times.append(time.perf_counter() - start)
        if epoch % 10 == 0 and data.rank == 0:
            print(f"epoch {epoch:3d}  loss {losses[-1]:.4f}")
    accuracy = test(model, data)
    if data.rank == 0:
        if args.log_losses:
            with open(args.log_losses, "w") as file:
                file.writelines(f"{loss!r}\n" for loss in losses)
        print(f"test accuracy {accuracy:.4f}, median epoch {statistics.median(times) * 1e3:.2f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
