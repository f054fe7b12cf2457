"""Node classification with a two-layer GCN in DGL, trained on the full graph.

python dgl_gcn.py --data cora --epochs 200
"""

import argparse
import statistics
import time

import dgl
import torch
import torch.nn.functional as F
from dgl.nn import GraphConv
from graphs import load


class GCN(torch.nn.Module):
    def __init__(self, in_feats, hidden, num_classes, dropout=0.5):
        super().__init__()
        self.conv1 = GraphConv(in_feats, hidden)
        self.conv2 = GraphConv(hidden, num_classes)
        self.dropout = dropout

    def forward(self, graph, x):
        x = F.dropout(x, self.dropout, self.training)
        x = F.relu(self.conv1(graph, x))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(graph, x)


def train(model, optimizer, graph):
    model.train()
    mask = graph.ndata["train_mask"]
    logits = model(graph, graph.ndata["feat"])
    loss = F.cross_entropy(logits[mask], graph.ndata["label"][mask])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, graph):
    model.eval()
    predicted = model(graph, graph.ndata["feat"]).argmax(dim=1)
    mask = graph.ndata["test_mask"]
    return (predicted[mask] == graph.ndata["label"][mask]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cora", help="cora, citeseer or a path.npz")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-losses", metavar="FILE", help="write one training loss per line")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    data = load(args.data)
    graph = dgl.graph((data.edge_index[0], data.edge_index[1]), num_nodes=len(data.y))
    graph = dgl.add_self_loop(graph)
    graph.ndata["feat"] = torch.from_numpy(data.x)
    graph.ndata["label"] = torch.from_numpy(data.y)
    graph.ndata["train_mask"] = torch.from_numpy(data.train_mask)
    graph.ndata["test_mask"] = torch.from_numpy(data.test_mask)
    graph = graph.to(args.device)

    model = GCN(data.x.shape[1], args.hidden, data.num_classes).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    losses, times = [], []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        losses.append(train(model, optimizer, graph))
        times.append(time.perf_counter() - start)
        if epoch % 10 == 0:
            print(f"epoch {epoch:3d}  loss {losses[-1]:.4f}")
    if args.log_losses:
        with open(args.log_losses, "w") as file:
            file.writelines(f"{loss!r}\n" for loss in losses)
    print(f"test accuracy {test(model, graph):.4f}, median epoch {statistics.median(times) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
