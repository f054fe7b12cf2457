"""A script as PyG's users write it for several GPUs: DistributedDataParallel, NeighborLoader on each rank's share of
training nodes. test_distributed_sampled.py runs it under the flag; nothing here knows of gnnaccel."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (300,))
    x = F.one_hot(labels, 3).float() + torch.randn(300, 3)
    data = Data(x=x, edge_index=torch.randint(0, 300, (2, 3000)), y=labels)
    share = torch.arange(300).chunk(dist.get_world_size())[rank]
    loader = NeighborLoader(data, num_neighbors=[5, 5], input_nodes=share, batch_size=32, shuffle=True)
    model = DistributedDataParallel(GraphSAGE(3, 16, 2, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    torch.save(model.state_dict(), f"{sys.argv[1]}/{rank}.pt")
    time.sleep(0.5)  # a gloo thread that still drops Python's objects when its group dies waits for ever (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
