"""Node classification with GraphSAGE in PyTorch Geometric, trained on sampled neighbourhoods in mini-batches.

python pyg_sage_sampled.py --data cora --fanouts 10,10 --batch-size 32
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from graphs import load
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv


class SAGE(torch.nn.Module):
    def __init__(self, in_channels, hidden, num_classes, layers, dropout=0.5):
        super().__init__()
        sizes = [in_channels] + [hidden] * (layers - 1) + [num_classes]
        self.convs = torch.nn.ModuleList(SAGEConv(sizes[i], sizes[i + 1]) for i in range(layers))
        self.dropout = dropout

    def forward(self, x, edge_index):
        for i, conv in enumerate(self.convs):
            x = conv(F.dropout(x, self.dropout, self.training), edge_index)
            if i < len(self.convs) - 1:
                x = F.relu(x)
        return x


class PlainSampler:
    """Draws neighbourhoods in plain torch, as NeighborLoader does: uniformly, without replacement.

    Each hop goes out from the nodes that the hop before found first. Called with a list of nodes, it returns their
    batch: these nodes come first in n_id, and edge_index counts in positions of n_id.
    """

    def __init__(self, data, fanouts):
        source, destination = data.edge_index.cpu()
        order = destination.argsort(stable=True)
        counts = torch.bincount(destination, minlength=data.num_nodes)
        self.indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.indices = source[order]
        self.data, self.fanouts = data, fanouts

    def one_hop(self, nodes, fanout):
        """At most `fanout` neighbours of each node (-1: all): their ids, and where in `nodes` each one's node is."""
        degree = self.indptr[nodes + 1] - self.indptr[nodes]
        owner = torch.repeat_interleave(torch.arange(len(nodes)), degree)
        first = degree.cumsum(0) - degree
        rank = torch.arange(len(owner)) - first[owner]
        # Shuffle the edges, then bring those of one node together again: each node's edges are in random order.
        order = torch.randperm(len(owner))
        order = order[owner[order].argsort(stable=True)]
        edges = (self.indptr[nodes][owner] + rank)[order]
        kept = rank < (len(owner) if fanout < 0 else fanout)
        return self.indices[edges[kept]], owner[kept]

    def __call__(self, seeds):
        n_id = frontier = torch.as_tensor(seeds)
        position = torch.full((self.data.num_nodes,), -1)
        position[n_id] = torch.arange(len(n_id))
        rows, cols = [], []
        for fanout in self.fanouts:
            sources, owner = self.one_hop(frontier, fanout)
            cols.append(position[frontier][owner])
            frontier = sources[position[sources] < 0].unique()
            position[frontier] = torch.arange(len(n_id), len(n_id) + len(frontier))
            rows.append(position[sources])
            n_id = torch.cat([n_id, frontier])
        edge_index = torch.stack([torch.cat(rows), torch.cat(cols)])
        x, y = self.data.x[n_id], self.data.y[n_id]
        return Data(x=x, y=y, edge_index=edge_index, n_id=n_id, batch_size=len(seeds))


def make_loader(data, fanouts, batch_size, workers):
    try:
        loader = NeighborLoader(
            data, fanouts, input_nodes=data.train_mask, batch_size=batch_size, shuffle=True, num_workers=workers
        )
        loader([0])  # PyG asks for what it needs when it samples
        return loader
    except ImportError:
        print("NeighborLoader needs pyg_lib or torch_sparse, not installed: sampling in plain torch", file=sys.stderr)
    nodes = data.train_mask.nonzero().flatten().tolist()
    sampler = PlainSampler(data, fanouts)
    return DataLoader(nodes, batch_size=batch_size, shuffle=True, num_workers=workers, collate_fn=sampler)


def train(model, optimizer, loader, device):
    """One epoch; returns the loss of each batch."""
    model.train()
    losses = []
    for batch in loader:
        batch = batch.to(device)
        logits = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(logits, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def test(model, data):
    model.eval()
    predicted = model(data.x, data.edge_index).argmax(dim=1)
    return (predicted[data.test_mask] == data.y[data.test_mask]).float().mean().item()


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
    torch.manual_seed(args.seed)

    graph = load(args.data)
    data = Data(
        x=torch.from_numpy(graph.x),
        edge_index=torch.from_numpy(graph.edge_index),
        y=torch.from_numpy(graph.y),
        train_mask=torch.from_numpy(graph.train_mask),
        test_mask=torch.from_numpy(graph.test_mask),
    )

    fanouts = [int(number) for number in args.fanouts.split(",")]
    loader = make_loader(data, fanouts, args.batch_size, args.workers)

    model = SAGE(data.num_features, args.hidden, graph.num_classes, len(fanouts)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    losses, times = [], []
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        losses += train(model, optimizer, loader, args.device)
        times.append(time.perf_counter() - start)
        if epoch % 10 == 0:
            print(f"epoch {epoch:3d}  loss {losses[-1]:.4f}")
    if args.log_losses:
        with open(args.log_losses, "w") as file:
            file.writelines(f"{loss!r}\n" for loss in losses)
    print(
        f"test accuracy {test(model, data.to(args.device)):.4f}, median epoch {statistics.median(times) * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
