"""What MaxK in place of ReLU does to the accuracy of a model and to the time of an epoch, on the full graph.

python maxk.py --data cora --model sage --k 8 32 128 --seeds 5
python maxk.py --data cora pubmed FOLDER/tolokers.npz --model sage gcn gin --device cuda --seeds 5 --csv maxk.csv

MaxK keeps the k largest entries of a row and drops the others; sums over the graph then read k entries of a row and
not all of it. The model with ReLU is always trained too, as that is what the others are compared with. For each comes
the test accuracy of the epoch that was best on the validation nodes (mean and standard deviation over the seeds), the
median time of an epoch of training (forward, backward and a step of Adam; not the test after it), and ReLU's over it.

Sums over the graph take a share p of an epoch with ReLU: measured by themselves, forward and backward, times the
layers, over the time of the epoch. Were they free, an epoch would be 1 / (1 - p) times as fast (Amdahl's law): limit.
Dropout draws for the entries that are kept alone, so that MaxK can come out above it, on the CPU and on small graphs.

pubmed is the real graph with random features: good for the times alone. Of masks [N, splits], seed s takes split s.
"""

import argparse
import contextlib
import csv
import math
import statistics
import time
from pathlib import Path

import graphs
import torch
import torch.nn.functional as F

import gnnaccel.data
from gnnaccel import nn, ops

MODELS = {"sage": nn.GraphSAGE, "gcn": nn.GCN, "gin": nn.GIN}
COLUMNS = (
    "data", "model", "hidden", "layers", "k", "seeds", "test_mean", "test_std", "epoch_ms", "speedup", "amdahl_limit",
)  # fmt: skip
WEIGHT_DECAY = 5e-4


def load(name):
    if name != "pubmed":
        return graphs.load(name, split=None)
    data = gnnaccel.data.load(name)
    print(*data.notes, sep="\n")
    return data


class Problem:
    """A graph with features and labels on the device, and splits into nodes to train, to choose and to test with."""

    def __init__(self, name, device):
        data = load(name)
        self.name, self.num_classes = Path(name).stem, data.num_classes
        self.x, self.y = torch.from_numpy(data.x).to(device), torch.from_numpy(data.y).to(device)
        masks = (data.train_mask, data.val_mask, data.test_mask)
        self.masks = [torch.from_numpy(mask.reshape(len(mask), -1)).to(device) for mask in masks]
        sources, destinations = data.edge_index
        n = len(self.x)
        self.graph = gnnaccel.Graph.from_coo(destinations, sources, num_rows=n, num_cols=n).to(device)

    def split(self, seed):
        return [mask[:, seed % mask.shape[1]].nonzero().flatten() for mask in self.masks]


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(function, device, calls=10, repeat=7):
    """Time of one of several calls that follow each other, as those of an epoch do."""
    times = []
    for _ in range(repeat + 1):  # the first is for warming up
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times[1:])


def sums_ms(graph, hidden, layers):
    """Time that the sums over the graph take in an epoch of the model with ReLU."""
    x = torch.rand(graph.num_cols, hidden, device=graph.device)
    forward = median_ms(lambda: ops.spmm(graph, x), graph.device)
    backward = median_ms(lambda: ops.spmm(graph.transposed, x), graph.device)
    return layers * (forward + backward)


def train(model, optimizer, graph, x, y, nodes):
    model.train()
    loss = F.cross_entropy(model(graph, x)[nodes], y[nodes])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def test(model, graph, x, y, *parts):
    model.eval()
    right = model(graph, x).argmax(dim=1) == y
    return torch.stack([right[nodes].float().mean() for nodes in parts]).tolist()


def run(model, problem, graph, seed, epochs, lr):
    """Train; the test accuracy where the one on the validation nodes is best, and the times of the epochs in ms."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    train_nodes, *others = problem.split(seed)
    best, accuracy, times = -1.0, math.nan, []
    for _ in range(epochs):
        synchronize(graph.device)
        start = time.perf_counter()
        train(model, optimizer, graph, problem.x, problem.y, train_nodes)
        synchronize(graph.device)
        times.append((time.perf_counter() - start) * 1e3)
        validation, tested = test(model, graph, problem.x, problem.y, *others)
        if validation > best:
            best, accuracy = validation, tested
    return accuracy, times


def compare(name, problem, args):
    """Train a model with ReLU and with each k; yields its part of a row of the table, from k on."""
    # GCN sums up each node itself too; the layers take the graph as it is.
    graph = problem.graph.with_self_loops() if name == "gcn" else problem.graph
    gnnaccel.prepare(graph)  # what the first epochs would do otherwise
    of_sums = sums_ms(graph, args.hidden, args.layers)
    relu_ms, limit = math.nan, math.nan
    for k in dict.fromkeys([None, *args.k]):
        accuracies, times = [], []
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            model = MODELS[name](
                problem.x.shape[1],
                args.hidden,
                problem.num_classes,
                num_layers=args.layers,
                maxk=k,
                dropout=args.dropout,
                norm=args.norm,
            ).to(args.device)
            accuracy, took = run(model, problem, graph, seed, args.epochs, args.lr)
            accuracies.append(accuracy)
            times += took
        epoch_ms = statistics.median(times)
        if k is None:
            share = of_sums / epoch_ms
            relu_ms, limit = epoch_ms, 1 / (1 - share) if share < 1 else math.inf
            print(f"  sums over the graph take {of_sums:.2f} ms of an epoch with ReLU, {share:.0%}")
        spread = statistics.stdev(accuracies) if args.seeds > 1 else 0.0
        yield k or "relu", args.seeds, statistics.mean(accuracies), spread, epoch_ms, relu_ms / epoch_ms, limit


def number_kept(text):
    if text == "relu":
        return None
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number from 1 on, or relu, got {text!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["cora"], help="cora, citeseer, pubmed or a path.npz")
    parser.add_argument("--model", nargs="+", default=["sage"], choices=MODELS)
    parser.add_argument("--k", nargs="+", default=[8, 32, 128], type=number_kept, help="entries kept; or relu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--norm", action="store_true", help="a LayerNorm in front of each ReLU or MaxK")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train with the seeds 0 to N - 1")
    parser.add_argument("--csv", metavar="FILE", help="also write the table there")
    args = parser.parse_args()

    with contextlib.ExitStack() as stack:
        table = None
        if args.csv:
            file = stack.enter_context(open(args.csv, "w", newline="", buffering=1))  # line by line
            table = csv.writer(file, lineterminator="\n")
            table.writerow(COLUMNS)
        for data in args.data:
            problem = Problem(data, args.device)
            for name in args.model:
                print(
                    f"{problem.name}, {name}: {args.layers} layers of {args.hidden}, {args.epochs} epochs, "
                    f"{args.seeds} seed(s), {problem.graph}"
                )
                for k, seeds, mean, spread, epoch_ms, speedup, limit in compare(name, problem, args):
                    print(
                        f"  {'ReLU' if k == 'relu' else f'k = {k}':8} test accuracy {mean:.4f} +- {spread:.4f}, "
                        f"median epoch {epoch_ms:.2f} ms, {speedup:.2f}x (limit {limit:.2f}x)",
                        flush=True,
                    )
                    figures = (f"{mean:.4f}", f"{spread:.4f}", f"{epoch_ms:.4g}", f"{speedup:.4g}", f"{limit:.4g}")
                    if table:
                        table.writerow([problem.name, name, args.hidden, args.layers, k, seeds, *figures])


if __name__ == "__main__":
    main()
