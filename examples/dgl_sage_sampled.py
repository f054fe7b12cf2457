"""Node classification with GraphSAGE in DGL, trained on sampled neighbourhoods in mini-batches.

python dgl_sage_sampled.py --data cora --fanouts 10,10 --batch-size 32
"""

import argparse
import statistics
import time

import dgl
import numpy as np
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader, NeighborSampler
from dgl.nn import SAGEConv
from graphs import load


class SAGE(torch.nn.Module):
    def __init__(self, in_feats, hidden, num_classes, layers, dropout=0.5):
        super().__init__()
        sizes = [in_feats] + [hidden] * (layers - 1) + [num_classes]
        self.convs = torch.nn.ModuleList(SAGEConv(sizes[i], sizes[i + 1], "mean") for i in range(layers))
        self.dropout = dropout

    def forward(self, blocks, x):
        for i, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv(block, F.dropout(x, self.dropout, self.training))
            if i < len(self.convs) - 1:
                x = F.relu(x)
        return x


class OneThread:
    """DGL samples with one thread inside: with several, the batches differ from run to run whatever the seed is."""

    def __enter__(self):
        self.threads = dgl.utils.get_num_threads()
        dgl.utils.set_num_threads(1)

    def __exit__(self, *error):
        dgl.utils.set_num_threads(self.threads)


class ReproducibleSampler(NeighborSampler):
    def sample_blocks(self, *args, **kwargs):
        with OneThread():
            return super().sample_blocks(*args, **kwargs)


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)  # DGL's loader shuffles with NumPy
    with OneThread():
        dgl.seed(number)


def train(model, optimizer, loader):
    """One epoch; returns the loss of each batch."""
    model.train()
    losses = []
    for _input_nodes, _output_nodes, blocks in loader:
        logits = model(blocks, blocks[0].srcdata["feat"])
        loss = F.cross_entropy(logits, blocks[-1].dstdata["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def test(model, graph):
    model.eval()
    predicted = model([graph] * len(model.convs), graph.ndata["feat"]).argmax(dim=1)
    mask = graph.ndata["test_mask"]
    return (predicted[mask] == graph.ndata["label"][mask]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cora", help="cora, citeseer or a path.npz")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--fanouts", default="10,10", help="neighbours per node, one number per layer; -1: all")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw batches; 0: this one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-losses", metavar="FILE", help="write the loss of each batch, one per line")
    args = parser.parse_args()
    seed(args.seed)

    data = load(args.data)
    graph = dgl.graph((data.edge_index[0], data.edge_index[1]), num_nodes=len(data.y))
    graph.ndata["feat"] = torch.from_numpy(data.x)
    graph.ndata["label"] = torch.from_numpy(data.y)
    graph.ndata["train_mask"] = torch.from_numpy(data.train_mask)
    graph.ndata["test_mask"] = torch.from_numpy(data.test_mask)
    graph = graph.to(args.device)

    fanouts = [int(number) for number in args.fanouts.split(",")]
    sampler = ReproducibleSampler(fanouts, prefetch_node_feats=["feat"], prefetch_labels=["label"])
    loader = DataLoader(
        graph,
        graph.ndata["train_mask"].nonzero().flatten(),
        sampler,
        device=args.device,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
    )

    model = SAGE(data.x.shape[1], args.hidden, data.num_classes, len(fanouts)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    losses, times = [], []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        losses += train(model, optimizer, loader)
        times.append(time.perf_counter() - start)
        if epoch % 10 == 0:
            print(f"epoch {epoch:3d}  loss {losses[-1]:.4f}")
    if args.log_losses:
        with open(args.log_losses, "w") as file:
            file.writelines(f"{loss!r}\n" for loss in losses)
    print(f"test accuracy {test(model, graph):.4f}, median epoch {statistics.median(times) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
