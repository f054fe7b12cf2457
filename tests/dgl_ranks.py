"""A program for torch.distributed.run: DGL's layers on one GPU per rank, under DistributedDataParallel.

Each rank trains on its own half of the nodes; the gradients must be those of all nodes on one device. Two copies of a
graph live side by side in one process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gnnaccel

gnnaccel.install()
import dgl  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            [dgl.nn.GraphConv(8, 16, activation=torch.relu), dgl.nn.SAGEConv(16, 16, "mean"), dgl.nn.GATConv(16, 3, 2)]
        )

    def forward(self, graph, x):
        for conv in self.convs:
            x = conv(graph, x)
        return x.mean(1)


def gradients(model, graph, x, labels, nodes):
    loss = torch.nn.functional.cross_entropy(model(graph, x)[nodes], labels[nodes])
    return torch.autograd.grad(loss, list(model.parameters()))


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    graph = dgl.add_self_loop(dgl.graph(tuple(torch.randint(200, (2, 2000)))))  # DGL's own generator has another seed
    x, labels, model = torch.rand(200, 8).double(), torch.randint(3, (200,)), Model().double()
    for shared in (*graph.edges(), x, labels):
        same = shared.to(device)
        dist.broadcast(same, 0)
        assert torch.equal(same.cpu(), shared), "the ranks draw the same"
    expected = gradients(model, graph, x, labels, torch.arange(200))

    here = graph.to(device)
    parallel = DistributedDataParallel(model.to(device), device_ids=[rank])
    mine = torch.arange(rank, 200, 2, device=device)
    loss = torch.nn.functional.cross_entropy(parallel(here, x.to(device))[mine], labels.to(device)[mine])
    loss.backward()
    for got, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(got.grad.cpu(), want, rtol=1e-9, atol=1e-12)

    if rank == 0:  # the current device is 0: what belongs to 1 must go there all the same
        results = []
        for place in ("cpu", "cuda:0", "cuda:1"):
            on = graph.to(place)
            assert str(on.device) == place
            h = x.to(place).requires_grad_()
            for norm in ("both", "left"):
                h = dgl.nn.GraphConv(8, 8, norm=norm, weight=False, bias=False)(on, h)
            h = (
                h
                + dgl.ops.copy_u_max(on, h)
                + dgl.ops.u_mul_e_sum(on, h, dgl.ops.edge_softmax(on, on.edges()[0].double() * 0.01))
            )
            assert h.device == on.device
            results.append(h.cpu())
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-12)
    dist.barrier()
    dist.destroy_process_group()
    print("rank", rank, "agrees")


if __name__ == "__main__":
    main()
