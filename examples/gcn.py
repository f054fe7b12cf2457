"""Node classification with a two-layer GCN made of gnnaccel's own layers, trained on the full graph.

python gcn.py --data cora --epochs 200
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from graphs import load

import gnnaccel
from gnnaccel.nn import GCNConv


class GCN(torch.nn.Module):
    def __init__(self, in_feats, hidden, num_classes, dropout=0.5, kernel="auto"):
        super().__init__()
        self.conv1 = GCNConv(in_feats, hidden, relu=True, kernel=kernel)
        self.conv2 = GCNConv(hidden, num_classes, kernel=kernel)
        self.dropout = dropout

    def forward(self, graph, x):
        x = F.dropout(x, self.dropout, self.training)
        x = self.conv1(graph, x)
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(graph, x)


def train(model, optimizer, graph, x, y, mask):
    model.train()
    logits = model(graph, x)
    loss = F.cross_entropy(logits[mask], y[mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, graph, x, y, mask):
    model.eval()
    predicted = model(graph, x).argmax(dim=1)
    return (predicted[mask] == y[mask]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cora", help="cora, citeseer or a path.npz")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernel", default="auto", help="tiled: on tensor cores, by a translation of the graph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-losses", metavar="FILE", help="write one training loss per line")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    data = load(args.data)
    x, y = torch.from_numpy(data.x).to(args.device), torch.from_numpy(data.y).to(args.device)
    train_mask, test_mask = (torch.from_numpy(mask).to(args.device) for mask in (data.train_mask, data.test_mask))
    sources, destinations = data.edge_index
    graph = gnnaccel.Graph.from_coo(destinations, sources, num_rows=len(x), num_cols=len(x)).with_self_loops()
    graph = graph.to(args.device)
    print(gnnaccel.prepare(graph, kernel=args.kernel))  # what the first epoch would do otherwise

    model = GCN(x.shape[1], args.hidden, data.num_classes, kernel=args.kernel).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    losses, times = [], []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        losses.append(train(model, optimizer, graph, x, y, train_mask))
        times.append(time.perf_counter() - start)
        if epoch % 10 == 0:
            print(f"epoch {epoch:3d}  loss {losses[-1]:.4f}")
    if args.log_losses:
        with open(args.log_losses, "w") as file:
            file.writelines(f"{loss!r}\n" for loss in losses)
    accuracy = test(model, graph, x, y, test_mask)
    print(f"test accuracy {accuracy:.4f}, median epoch {statistics.median(times) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
