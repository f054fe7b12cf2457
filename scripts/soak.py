"""A long run: mixed full-graph and mini-batch training in DGL and PyG under gnnaccel, watching memory and fallbacks.

    python scripts/soak.py --minutes 10

Trains the models of examples/ on the graphs that come with gnnaccel and on random graphs; every turn makes its graph
and model anew. Prints resident memory every 30 seconds. Fails if memory grows by more than --bound-mib after the first
fifth of the time, or if a call is left to a framework for a reason that EXPECTED does not name.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import sys
import time
from pathlib import Path

import gnnaccel

gnnaccel.install()  # what GNNACCEL=1 does

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import dgl  # noqa: E402
import dgl_gat  # noqa: E402
import dgl_gcn  # noqa: E402
import dgl_sage_sampled  # noqa: E402
import graphs  # noqa: E402
import numpy as np  # noqa: E402
import pyg_gat  # noqa: E402
import pyg_gcn  # noqa: E402
import pyg_sage_sampled  # noqa: E402
import torch  # noqa: E402
from dgl.dataloading import DataLoader, NeighborSampler  # noqa: E402
from torch_geometric import nn  # noqa: E402
from torch_geometric.data import Data  # noqa: E402

from gnnaccel import report  # noqa: E402
from gnnaccel.graph.cache import derived  # noqa: E402

# Call site kind -> the reasons for which its calls may be left to the framework in this run.
EXPECTED = {
    "dgl.message function": {"a user-defined message function runs as DGL runs it"},
    "dgl.reduce function": {"a user-defined reduce function runs as DGL runs it"},
}
LOADED = {name: graphs.load(name) for name in ("cora", "citeseer")}
STEPS = 10  # of full-graph training in one turn


def random_graph(turn: int):
    """Another random graph for every turn, in the form of a loaded one."""
    random = np.random.default_rng(turn)
    num_nodes, num_edges = random.integers(500, 3000), random.integers(2_000, 30_000)
    part = random.permutation(num_nodes) % 4
    return argparse.Namespace(
        edge_index=random.integers(0, num_nodes, (2, num_edges)),
        x=random.random((num_nodes, 32), np.float32),
        y=random.integers(0, 5, num_nodes),
        num_classes=5,
        train_mask=part == 0,
        test_mask=part == 1,
    )


def data_of(turn: int):
    return (LOADED["cora"], LOADED["citeseer"], random_graph(turn))[turn % 3]


def dgl_graph(data, loops: bool = True):
    sources, destinations = torch.from_numpy(data.edge_index)
    graph = dgl.graph((sources, destinations), num_nodes=len(data.y))
    graph = dgl.add_self_loop(graph) if loops else graph
    for name, value in (("feat", data.x), ("label", data.y), ("train_mask", data.train_mask)):
        graph.ndata[name] = torch.from_numpy(value)
    graph.ndata["test_mask"] = torch.from_numpy(data.test_mask)
    return graph


def pyg_data(data) -> Data:
    return Data(**{name: torch.from_numpy(getattr(data, name)) for name in
                   ("x", "edge_index", "y", "train_mask", "test_mask")})  # fmt: skip


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def full_dgl(turn: int) -> None:
    """GCN or GAT of examples/ on a whole graph."""
    data = data_of(turn)
    graph = dgl_graph(data)
    example, make = ((dgl_gcn, dgl_gcn.GCN), (dgl_gat, dgl_gat.GAT))[turn % 2]
    model = make(data.x.shape[1], 16, data.num_classes)
    optimizer = adam(model)
    for _ in range(STEPS):
        example.train(model, optimizer, graph)
    example.test(model, graph)


def sampled_dgl(turn: int) -> None:
    """An epoch of GraphSAGE on sampled blocks."""
    data = data_of(turn)
    graph = dgl_graph(data, loops=False)
    sampler = NeighborSampler([5, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"])
    nodes = graph.ndata["train_mask"].nonzero().flatten()
    loader = DataLoader(graph, nodes, sampler, batch_size=32, shuffle=True)
    model = dgl_sage_sampled.SAGE(data.x.shape[1], 32, data.num_classes, 2)
    dgl_sage_sampled.train(model, adam(model), loader)


def other_dgl(turn: int) -> None:
    """What the examples have not: several edge types, maxima, edges added and removed, user-defined functions."""
    data = random_graph(turn)
    graph = dgl_graph(data, loops=False)
    ends = graph.edges()
    hetero = dgl.heterograph({("a", "r", "a"): ends, ("a", "s", "a"): ends[::-1]}, {"a": graph.num_nodes()})
    convs = {name: dgl.nn.GraphConv(32, 8, allow_zero_in_degree=True) for name in ("r", "s")}
    layer, pool = dgl.nn.HeteroGraphConv(convs), dgl.nn.SAGEConv(32, 8, "pool")
    x = graph.ndata["feat"].clone().requires_grad_()
    for _ in range(2):
        layer(hetero, {"a": x})["a"].sum().backward()
        pool(graph, x).sum().backward()
        graph.remove_edges(torch.arange(100))
        graph.add_edges(torch.arange(50), torch.arange(50))
    graph.ndata["h"] = x
    graph.update_all(lambda edges: {"m": edges.src["h"]}, lambda nodes: {"h": nodes.mailbox["m"].mean(1)})


def full_pyg(turn: int) -> None:
    """GCN or GAT of examples/ on a whole graph."""
    data = data_of(turn)
    example, make = ((pyg_gcn, pyg_gcn.GCN), (pyg_gat, pyg_gat.GAT))[turn % 2]
    given, model = pyg_data(data), make(data.x.shape[1], 16, data.num_classes)
    optimizer = adam(model)
    for _ in range(STEPS):
        example.train(model, optimizer, given)
    example.test(model, given)


def sampled_pyg(turn: int) -> None:
    """An epoch of GraphSAGE on sampled neighbourhoods."""
    data = data_of(turn)
    with contextlib.redirect_stderr(io.StringIO()):  # it says each time that it samples in plain torch
        loader = pyg_sage_sampled.make_loader(pyg_data(data), [5, 5], 32, 0)
    model = pyg_sage_sampled.SAGE(data.x.shape[1], 32, data.num_classes, 2)
    pyg_sage_sampled.train(model, adam(model), loader, "cpu")


def other_pyg(turn: int) -> None:
    """What the examples have not: other layers, a sum of PyG's own messages, a write into edge_index."""
    given = pyg_data(random_graph(turn))
    layers = (nn.SAGEConv(32, 8, aggr="max"), nn.GATv2Conv(32, 8, heads=2), nn.TransformerConv(32, 8, heads=2),
              nn.GINConv(torch.nn.Linear(32, 8)), nn.EdgeConv(torch.nn.Linear(64, 8)))  # fmt: skip
    for layer in layers:
        layer(given.x, given.edge_index).sum().backward()
        given.edge_index[:, 0] = turn % 500


JOBS = (full_dgl, sampled_dgl, other_dgl, full_pyg, sampled_pyg, other_pyg)


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def unexpected() -> list[str]:
    """What was left to a framework for a reason that EXPECTED does not name."""
    return [
        f"{kind}: {count}x {reason}"
        for kind, site in report.snapshot().items()
        for reason, count in site.reasons.items()
        if site.left and reason not in EXPECTED.get(kind, ())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--bound-mib", type=float, default=64, help="growth allowed after the first fifth of the time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    start = shown = time.monotonic()
    settled: float | None = None  # memory after warm-up
    highest = 0.0
    for turn in itertools.count():
        for job in JOBS:
            job(turn)
        now = time.monotonic()
        done = now - start >= 60 * given.minutes
        if settled is None and now - start >= 12 * given.minutes:
            settled = highest = resident_mib()
        if settled is not None:
            highest = max(highest, resident_mib())
        if done or now - shown >= 30:
            shown = now
            memory = f"{resident_mib():7.1f} MiB, {len(derived)} entries in the cache"
            print(f"{now - start:5.0f} s  turn {turn + 1:5d}  {memory}", flush=True)
        if done:
            break
    print(report.table())
    assert settled is not None
    failures = [f"left to the framework: {text}" for text in unexpected()]
    if highest - settled > given.bound_mib:
        failures.append(f"memory grew by {highest - settled:.0f} MiB from {settled:.0f} MiB")
    print(f"memory after warm-up {settled:.0f} MiB, highest since {highest:.0f} MiB")
    print("\n".join(failures) or "flat memory, no fallback that was not expected")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
