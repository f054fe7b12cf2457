"""Node classification with a two-layer GAT in PyTorch Geometric, trained on the full graph.

python pyg_gat.py --data cora --epochs 200
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from graphs import load
from torch_geometric.data import Data
from torch_geometric.nn import GATConv


class GAT(torch.nn.Module):
    """Two layers: eight heads side by side, then one; dropout on the features and on the attention."""

    def __init__(self, in_channels, hidden, num_classes, heads=8, dropout=0.6):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden, heads=heads, dropout=dropout)
        self.conv2 = GATConv(hidden * heads, num_classes, heads=1, dropout=dropout)
        self.dropout = dropout

    def forward(self, x, edge_index):
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)


def train(model, optimizer, data):
    model.train()
    logits = model(data.x, data.edge_index)
    loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, data):
    model.eval()
    predicted = model(data.x, data.edge_index).argmax(dim=1)
    return (predicted[data.test_mask] == data.y[data.test_mask]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cora", help="cora, citeseer or a path.npz")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=8, help="width of each of the eight heads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-losses", metavar="FILE", help="write one training loss per line")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    graph = load(args.data)
    data = Data(
        x=torch.from_numpy(graph.x),
        edge_index=torch.from_numpy(graph.edge_index),
        y=torch.from_numpy(graph.y),
        train_mask=torch.from_numpy(graph.train_mask),
        test_mask=torch.from_numpy(graph.test_mask),
    ).to(args.device)

    model = GAT(data.num_features, args.hidden, graph.num_classes).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

    losses, times = [], []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        losses.append(train(model, optimizer, data))
        times.append(time.perf_counter() - start)
        if epoch % 10 == 0:
            print(f"epoch {epoch:3d}  loss {losses[-1]:.4f}")
    if args.log_losses:
        with open(args.log_losses, "w") as file:
            file.writelines(f"{loss!r}\n" for loss in losses)
    print(f"test accuracy {test(model, data):.4f}, median epoch {statistics.median(times) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
