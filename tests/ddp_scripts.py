"""Sampled training under DistributedDataParallel as PyG's and DGL's users write it; nothing here knows of gnnaccel.

python ddp_scripts.py pyg|whole|dgl FOLDER [cpu|cuda]: each of two processes, of torchrun or, outside of it, of
mp.spawn, writes its losses, on CPUs by gloo or a GPU each by NCCL. All neighbours are sampled, in the order of nodes,
so that runs compare; whole: PyG's without a loader.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def graph():
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (300,))
    x = F.one_hot(labels, 3).float() + torch.randn(300, 3)
    return torch.randint(0, 300, (2, 2000)), x, labels


def pyg_batches(rank, size, device, whole):
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    edges, x, y = graph()
    share = torch.arange(300).chunk(size)[rank]
    if whole:
        for seeds in share.split(32):
            yield (x.to(device), edges.to(device)), seeds, y[seeds].to(device)
        return
    data = Data(x=x, edge_index=edges, y=y)
    for batch in NeighborLoader(data, num_neighbors=[-1, -1], input_nodes=share, batch_size=32):
        batch = batch.to(device)
        yield (batch.x, batch.edge_index), slice(batch.batch_size), batch.y[: batch.batch_size]


def pyg_model():
    from torch_geometric.nn import GAT

    return GAT(3, 16, 2, 3, heads=2)


def dgl_batches(rank, size, device, whole):
    import dgl

    edges, x, y = graph()
    made = dgl.graph((edges[0], edges[1]), num_nodes=300)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    loader = dgl.dataloading.DataLoader(
        made, torch.arange(300), sampler, device=device, batch_size=32, use_ddp=True, shuffle=False, drop_last=False
    )
    for inputs, seeds, blocks in loader:
        yield (blocks, x[inputs.cpu()].to(device)), slice(None), y[seeds.cpu()].to(device)


def dgl_model():
    import dgl

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = dgl.nn.GATConv(3, 8, 2, allow_zero_in_degree=True)
            self.second = dgl.nn.SAGEConv(16, 3, "mean")

        def forward(self, blocks, x):
            return self.second(blocks[1], self.first(blocks[0], x).flatten(1).relu())

    return Model()


def start(index, place, **meeting):
    """This rank's device."""
    if place == "cpu":
        dist.init_process_group("gloo", **meeting)
        return torch.device("cpu")
    torch.cuda.set_device(index)
    dist.init_process_group("nccl", **meeting)
    return torch.device("cuda", index)


def train(rank, size, device, kind, folder):
    batches, make = (dgl_batches, dgl_model) if kind == "dgl" else (pyg_batches, pyg_model)
    torch.manual_seed(0)
    model = DistributedDataParallel(make().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        for arguments, rows, labels in batches(rank, size, device, kind == "whole"):
            logits = model(*arguments)
            loss = F.cross_entropy(logits[rows], labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.save(losses, f"{folder}/losses{rank}.pt")
    time.sleep(0.5)  # a gloo thread that still drops Python's objects when its group dies waits for ever (torch 2.13)


def spawned(rank, size, kind, folder, place="cpu"):
    device = start(rank, place, init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    train(rank, size, device, kind, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        device = start(int(os.environ["RANK"]), *sys.argv[3:] or ["cpu"])
        train(dist.get_rank(), dist.get_world_size(), device, *sys.argv[1:3])
        dist.destroy_process_group()
    else:
        mp.spawn(spawned, (2, *sys.argv[1:]), nprocs=2)
