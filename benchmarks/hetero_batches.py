"""Sampled batches of graphs with several edge types, a framework alone and on gnnaccel, with the structure of each.

    python benchmarks/hetero_batches.py --csv benchmarks/results/hetero_batches_MACHINE.csv
    python benchmarks/hetero_batches.py --device cuda --rows PyG
    python benchmarks/hetero_batches.py --rows "HeteroConv of" --seeds 16 32 64 512 --threads 2 --batches 6 --rounds 20

A step is forward and backward on a batch that nobody has seen: edges (PyG) or blocks (DGL) as a sampler hands them on,
so that all that is built from them is in the time; sampling is not. 30,000 nodes in 3 types and 600,000 edges of 12
edge types (of 45 relations where one graph has them), 1,024 seeds (or --seeds), fan-outs 10 and 5, 64 features, two
layers. Milliseconds a step, the medians of --batches batches, which both sides take in turns; with --rounds (PyG's
rows) of the fastest step with each batch. error: largest difference of the two sides' outputs over the largest output.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from timing import provenance, save_table, shown

COLUMNS = ("row", "device", "seeds", "edges", "alone_ms", "gnnaccel_ms", "ratio", "error")
NODES, WIDTH, SEEDS, FANOUTS, RELATIONS = 10_000, 64, 1024, (10, 5), 45
NAMES = ("a", "b", "c")
KINDS = [(NAMES[i % 3], f"r{i}", NAMES[(i + i // 3) % 3]) for i in range(12)]
EDGES = 50_000  # of each edge type
DEVICE = "cpu"


def ends(seed: int, nodes: int = NODES, count: int = EDGES) -> torch.Tensor:
    return torch.randint(nodes, (2, count), generator=torch.Generator().manual_seed(seed))


class Layers(torch.nn.Module):
    """Two layers, and what is called between them."""

    def __init__(self, make: Callable[[], torch.nn.Module]):
        super().__init__()
        self.first, self.last = make(), make()


def pyg_batches(hetero: bool, count: int) -> list:
    """What NeighborLoader gives."""
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.loader import NeighborLoader

    if hetero:
        data = HeteroData({name: {"x": torch.randn(NODES, WIDTH)} for name in NAMES})
        for seed, kind in enumerate(KINDS):
            data[kind].edge_index = ends(seed)
        seeds = ("a", torch.arange(NODES))
    else:
        index = ends(0, 3 * NODES, 12 * EDGES)
        kinds = torch.multinomial(1 / torch.arange(1, RELATIONS + 1), index.shape[1], replacement=True)
        data, seeds = Data(x=torch.randn(3 * NODES, WIDTH), edge_index=index, edge_type=kinds), torch.arange(NODES)
    loader = NeighborLoader(data, list(FANOUTS), seeds, batch_size=SEEDS, shuffle=True)
    found: list = []
    while len(found) < count:
        found += [batch.to(DEVICE) for batch in loader]
    return found[:count]


def pyg_sides(what: str, count: int) -> tuple[list, dict]:
    import torch_geometric
    from torch_geometric import nn

    import gnnaccel

    torch_geometric.seed_everything(0)
    gnnaccel.install()  # its samplers, which need no pyg-lib
    batches = pyg_batches(what not in ("RGCNConv", "RGATConv"), count)
    gnnaccel.uninstall()
    makes = {
        "RGCNConv": lambda: nn.RGCNConv(WIDTH, WIDTH, RELATIONS, num_bases=8),
        "RGATConv": lambda: nn.RGATConv(WIDTH, WIDTH // 4, RELATIONS, heads=4, num_bases=8),
        "HGTConv": lambda: nn.HGTConv(WIDTH, WIDTH, (list(NAMES), KINDS), heads=4),
        "HANConv": lambda: nn.HANConv(WIDTH, WIDTH, (list(NAMES), KINDS), heads=4),
        "SAGEConv": lambda: nn.HeteroConv({kind: nn.SAGEConv((WIDTH, WIDTH), WIDTH) for kind in KINDS}),
        "GraphConv": lambda: nn.HeteroConv({kind: nn.GraphConv((WIDTH, WIDTH), WIDTH) for kind in KINDS}),
        "GINConv": lambda: nn.HeteroConv({kind: nn.GINConv(torch.nn.Linear(WIDTH, WIDTH)) for kind in KINDS}),
        "GATConv": lambda: nn.HeteroConv(
            {kind: nn.GATConv((WIDTH, WIDTH), WIDTH // 4, heads=4, add_self_loops=False) for kind in KINDS}
        ),
    }
    plain = Layers(makes[what]).to(DEVICE)

    def outputs(model, batch):
        if what in ("RGCNConv", "RGATConv"):
            given = batch.edge_index.clone(), batch.edge_type.clone()
            return [model.last(model.first(batch.x, *given).relu(), *given)[:SEEDS]]
        index = {kind: edges.clone() for kind, edges in batch.edge_index_dict.items()}
        h = {name: x.relu() for name, x in model.first(batch.x_dict, index).items()}
        return [model.last(h, index)["a"][:SEEDS]]

    def nothing():
        pass

    ours = gnnaccel.accelerate(copy.deepcopy(plain))
    return batches, {"alone": (nothing, plain, outputs), "gnnaccel": (nothing, ours, outputs)}


def dgl_sides(what: str, count: int) -> tuple[list, dict]:
    from gnnaccel import dgl_backend

    dgl_backend.shim()
    import dgl

    dgl_backend.guard_sampling()
    torch.manual_seed(0)
    sampler = dgl.dataloading.NeighborSampler(list(FANOUTS[::-1]))
    if what in ("RelGraphConv", "HGTConv"):
        index = ends(0, 3 * NODES, 12 * EDGES)
        graph = dgl.graph(tuple(index), num_nodes=3 * NODES)
        graph.edata["t"] = torch.multinomial(1 / torch.arange(1, RELATIONS + 1), index.shape[1], replacement=True)
        graph.ndata["x"] = torch.randn(3 * NODES, WIDTH)
    else:
        graph = dgl.heterograph({kind: tuple(ends(i)) for i, kind in enumerate(KINDS)}, dict.fromkeys(NAMES, NODES))
        for name in NAMES:
            graph.nodes[name].data["x"] = torch.randn(NODES, WIDTH)
    blocks = []
    for _ in range(count):
        seeds = torch.randperm(NODES)[:SEEDS]
        given = seeds if len(graph.ntypes) == 1 else {"a": seeds}
        blocks.append(sampler.sample_blocks(graph, given)[2])
    makes = {
        "RelGraphConv": lambda: dgl.nn.RelGraphConv(WIDTH, WIDTH, RELATIONS, "basis", 8),
        "HGTConv": lambda: dgl.nn.HGTConv(WIDTH, WIDTH // 4, 4, 1, RELATIONS, dropout=0.0),
        "GraphConv": lambda: dgl.nn.HeteroGraphConv(
            {name: dgl.nn.GraphConv(WIDTH, WIDTH, norm="right", allow_zero_in_degree=True) for _, name, _ in KINDS}
        ),
        "SAGEConv": lambda: dgl.nn.HeteroGraphConv(
            {name: dgl.nn.SAGEConv(WIDTH, WIDTH, "mean") for _, name, _ in KINDS}
        ),
    }
    model = Layers(makes[what])

    def outputs(model, pair):
        first, last = pair
        if what == "RelGraphConv":
            h = model.first(first, first.srcdata["x"], first.edata["t"]).relu()
            return [model.last(last, h, last.edata["t"])]
        if what == "HGTConv":
            kinds = torch.zeros(first.num_src_nodes(), dtype=torch.int64)
            h = model.first(first, first.srcdata["x"], kinds, first.edata["t"]).relu()
            return [model.last(last, h, kinds[: last.num_src_nodes()], last.edata["t"])]
        x = first.srcdata["x"]
        h = {name: t.relu() for name, t in model.first(first, x).items()}
        return [model.last(last, h)["a"]]

    return blocks, {
        "alone": (dgl_backend.disable, model, outputs),
        "gnnaccel": (dgl_backend.enable, model, outputs),
    }


ROWS = {
    "PyG RGCNConv, 8 bases": (pyg_sides, "RGCNConv"),
    "PyG RGATConv, 8 bases": (pyg_sides, "RGATConv"),
    "PyG HeteroConv of 12 SAGEConv": (pyg_sides, "SAGEConv"),
    "PyG HeteroConv of 12 GraphConv": (pyg_sides, "GraphConv"),
    "PyG HeteroConv of 12 GINConv": (pyg_sides, "GINConv"),
    "PyG HeteroConv of 12 GATConv": (pyg_sides, "GATConv"),
    "PyG HGTConv": (pyg_sides, "HGTConv"),
    "PyG HANConv": (pyg_sides, "HANConv"),
    "DGL RelGraphConv, 8 bases": (dgl_sides, "RelGraphConv"),
    "DGL HGTConv": (dgl_sides, "HGTConv"),
    "DGL HeteroGraphConv of 12 GraphConv": (dgl_sides, "GraphConv"),
    "DGL HeteroGraphConv of 12 SAGEConv": (dgl_sides, "SAGEConv"),
}


def measure(row: str, count: int, rounds: int) -> dict:
    build, what = ROWS[row]
    batches, sides = build(what, count + 2)
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else (lambda: None)
    times = {name: [float("inf")] * len(batches) for name in sides}
    error, edges = 0.0, 0
    for turn, (number, batch) in enumerate(list(enumerate(batches)) * rounds):
        outs = {}
        swapped = (turn + turn // len(batches)) % 2 == 1  # whoever is first brings the batch into the caches
        for name in sorted(sides, reverse=swapped):
            switch, model, outputs = sides[name]
            switch()
            model.zero_grad()
            synchronize()
            start = time.perf_counter()
            outs[name] = outputs(model, batch)
            sum(out.sum() for out in outs[name]).backward()
            synchronize()
            times[name][number] = min(times[name][number], (time.perf_counter() - start) * 1e3)
        for ours, theirs in zip(outs["gnnaccel"], outs["alone"], strict=True):
            error = max(error, float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()))
        edges += (sum(b.num_edges() for b in batch) if build is dgl_sides else batch.num_edges) if turn == number else 0
    sides["alone"][0]()
    alone, ours = (statistics.median(times[name][2:]) for name in ("alone", "gnnaccel"))
    found = dict(row=row, device=DEVICE, seeds=SEEDS, edges=edges // len(batches), alone_ms=alone, gnnaccel_ms=ours)
    return found | dict(ratio=alone / ours, error=error)


def main(argv=None) -> int:
    global DEVICE, SEEDS, FANOUTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="TEXT", help="only rows with one of these in the name"
    )
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[SEEDS], help="of a batch")
    parser.add_argument("--fanouts", type=int, nargs="+", default=FANOUTS)
    parser.add_argument("--rounds", type=int, default=1, help="steps of each side with each batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: of PyG's rows")
    parser.add_argument("--commit", help="to name in the table, where git is not at hand")
    parser.add_argument("--csv", metavar="OUT")
    options = parser.parse_args(argv)
    DEVICE, FANOUTS = options.device, tuple(options.fanouts)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    cells, wrong = [], 0
    for row, (build, _) in ROWS.items():
        if (DEVICE == "cuda" and build is dgl_sides) or not any(text.lower() in row.lower() for text in options.rows):
            continue
        for seeds in options.seeds:
            SEEDS = seeds
            found = measure(row, options.batches, options.rounds)
            cells.append(shown(COLUMNS, found))
            wrong += found["error"] > 1e-4
    if options.csv:
        save_table(options.csv, provenance(options.commit, f"{options.threads} threads"), COLUMNS, cells)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
