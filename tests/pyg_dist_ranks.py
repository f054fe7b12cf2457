"""Sampled training by torch_geometric.distributed as PyG's users write it: each process has a part of the graph, asks
the others for neighbours and features, and trains under DistributedDataParallel. Nothing here knows of gnnaccel.

python pyg_dist_ranks.py cut FOLDER KIND: writes the parts of the graph of a KIND, homo or hetero.
python pyg_dist_ranks.py train|whole|draw FOLDER KIND PORT: train prints a rank's losses; whole prints those of the
whole graph, of which each batch's seeds count, as PyG alone has them; draw looks at what few neighbours it gets.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data, HeteroData
from torch_geometric.distributed import (
    DistContext,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    LocalFeatureStore,
    LocalGraphStore,
    Partitioner,
)
from torch_geometric.distributed.partition import load_partition_info
from torch_geometric.nn import GraphSAGE, SAGEConv, to_hetero

SEEDS = "a"  # the type of nodes that are trained on


def graph(kind):
    torch.manual_seed(0)
    if kind == "homo":
        y = torch.randint(0, 3, (200,))
        return Data(x=F.one_hot(y, 3) + torch.randn(200, 3), edge_index=torch.randint(0, 200, (2, 1500)), y=y)
    data = HeteroData()
    for name, count in (("a", 120), ("b", 90)):
        data[name].x = torch.randn(count, 3)
    for source, relation, target in (("a", "to", "b"), ("b", "to", "a"), ("a", "in", "a"), ("b", "of", "a")):
        ends = [torch.randint(0, data[name].num_nodes, (500,)) for name in (source, target)]
        data[source, relation, target].edge_index = torch.stack(ends)
    return data


def labels(data, kind):
    return data.y if kind == "homo" else (data[SEEDS].x.sum(1) > 0).long()


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 16), SAGEConv((-1, -1), 3)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def model_of(data, kind):
    torch.manual_seed(0)
    if kind == "homo":
        return GraphSAGE(3, 16, 2, 3)
    model = to_hetero(Layers(), data.metadata())
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    return model


def parts_of(folder, rank):
    features, edges = LocalFeatureStore.from_partition(folder, rank), LocalGraphStore.from_partition(folder, rank)
    meta, count, index, node_map, edge_map = load_partition_info(folder, rank)
    for store in (features, edges):
        store.partition_idx, store.num_partitions, store.meta = index, count, meta
    edges.node_pb, edges.edge_pb = node_map, edge_map
    features.node_feat_pb, features.edge_feat_pb = node_map, edge_map
    if meta[
        "is_hetero"
    ]:  # PyG looks features up by numbers of nodes of a type, and loads numbers of nodes of all types
        for name, found in torch.load(f"{folder}/part_{rank}/node_feats.pt", weights_only=False).items():
            features.put_global_id(found["id"], group_name=name)
    return features, edges


def share_of(folder, kind, data, rank):
    stores = parts_of(folder, rank)
    seeds = stores[0].get_global_id(None if kind == "homo" else SEEDS)
    stores[0].labels = labels(data, kind)
    return stores, seeds


def loader_of(stores, seeds, kind, make=DistNeighborLoader, **options):
    rank, size = dist.get_rank(), dist.get_world_size()
    options = {"num_neighbors": [-1, -1], "batch_size": 16} | options
    if make is DistNeighborLoader:
        options["input_nodes"] = seeds if kind == "homo" else (SEEDS, seeds)
    return make(
        data=stores,
        shuffle=False,
        drop_last=False,
        current_ctx=DistContext(
            rank=rank, global_rank=rank, world_size=size, global_world_size=size, group_name="training"
        ),
        master_addr=os.environ["MASTER_ADDR"],
        master_port=sys.argv[4],
        **options,
    )


def draw(folder, kind):
    dist.init_process_group("gloo")
    data = graph(kind)
    stores, seeds = share_of(folder, kind, data, dist.get_rank())
    stores[0].labels = None
    edges = set(map(tuple, data.edge_index.t().tolist()))
    asked = data.edge_index[:, dist.get_rank() :: 2][:, :40]
    links = {"make": DistLinkNeighborLoader, "edge_label_index": (None, asked)}
    for options in ({}, {"replace": True}, {"disjoint": True}, links):
        # Both ranks ask for as many batches: neither leaves while the other needs its neighbours.
        for batch in loader_of(stores, seeds[:64], kind, num_neighbors=[4, 2], **options):
            found = batch.n_id[batch.edge_index]
            assert found.shape[1] and edges.issuperset(map(tuple, found.t().tolist())), options
            assert torch.equal(batch.x, data.x[batch.n_id]), options
            assert batch.edge_index[1].bincount().max() <= 4, options
            assert torch.equal(torch.tensor(batch.num_sampled_nodes).sum(), torch.tensor(batch.num_nodes)), options
            if "disjoint" in options:
                assert torch.equal(*batch.batch[batch.edge_index]), options
            else:
                assert batch.n_id.unique().numel() == batch.num_nodes, options
            if "make" in options:
                pairs = batch.n_id[batch.edge_label_index[:, : batch.input_id.numel()]]
                assert torch.equal(pairs, asked[:, batch.input_id]), options
        dist.barrier()
    time.sleep(0.5)
    dist.destroy_process_group()


def train(folder, kind, whole):
    dist.init_process_group("gloo")
    data = graph(kind)
    stores, seeds = share_of(folder, kind, data, dist.get_rank())
    loader = None if whole else loader_of(stores, seeds, kind)
    model = DistributedDataParallel(model_of(data, kind), find_unused_parameters=kind == "hetero")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    y = labels(data, kind)
    count = torch.tensor([len(seeds) // 16])  # ranks take as many steps
    dist.all_reduce(count, dist.ReduceOp.MIN)
    for _ in range(2):
        steps = iter(loader) if loader is not None else iter(seeds.split(16))
        for _ in range(int(count)):
            batch = next(steps)
            if whole:
                out = model(data.x, data.edge_index) if kind == "homo" else model(data.x_dict, data.edge_index_dict)
                out, wanted = (out if kind == "homo" else out[SEEDS])[batch], y[batch]
            elif kind == "homo":
                out, wanted = model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
            else:
                size = batch[SEEDS].batch_size
                out = model(batch.x_dict, batch.edge_index_dict)[SEEDS][:size]
                wanted = batch[SEEDS].y[:size]
            loss = F.cross_entropy(out, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item(), flush=True)
        for _ in steps:  # what others have no step for
            pass
        dist.barrier()
    time.sleep(0.5)  # a gloo thread that still drops Python's objects when its group dies waits for ever (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "cut":
        Partitioner(graph(sys.argv[3]), 2, sys.argv[2]).generate_partition()
    elif sys.argv[1] == "draw":
        draw(*sys.argv[2:4])
    else:
        train(*sys.argv[2:4], sys.argv[1] == "whole")
