"""Training on DGL's DistGraph as its users write it: one server, trainers under DistributedDataParallel, each a process
told by DGL's environment variables which it is. Nothing here knows of gnnaccel.

python dist_graph_ranks.py cut FOLDER        writes the graph
python dist_graph_ranks.py train FOLDER      a server (DGL_ROLE) or a trainer (RANK); prints its losses
"""

import faulthandler
import sys

import dgl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = dgl.nn.SAGEConv(5, 16, "mean"), dgl.nn.SAGEConv(16, 3, "mean")

    def forward(self, blocks, x):
        return self.second(blocks[1], F.relu(self.first(blocks[0], x)))


def cut(folder):
    torch.manual_seed(0)
    graph = dgl.graph(tuple(torch.randint(0, 200, (2, 1500))), num_nodes=200)
    graph.ndata["x"], graph.ndata["y"] = torch.randn(200, 5), torch.randint(0, 3, (200,))
    graph.ndata["train_mask"] = torch.ones(200, dtype=torch.bool)
    dgl.distributed.partition_graph(graph, "toy", 1, folder, part_method="random")


def train(folder):
    dgl.distributed.initialize(f"{folder}/ip_config.txt")  # a server never returns from here
    dist.init_process_group("gloo")
    graph = dgl.distributed.DistGraph("toy", part_config=f"{folder}/toy.json")
    mine = dgl.distributed.node_split(graph.ndata["train_mask"], graph.get_partition_book(), force_even=True)
    sampler = dgl.dataloading.NeighborSampler([-1, -1])
    loader = dgl.dataloading.DistNodeDataLoader(graph, mine, sampler, batch_size=25, shuffle=False, drop_last=False)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        for inputs, seeds, blocks in loader:
            loss = F.cross_entropy(model(blocks, graph.ndata["x"][inputs]), graph.ndata["y"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200)  # where it hangs
    {"cut": cut, "train": train}[sys.argv[1]](sys.argv[2])
