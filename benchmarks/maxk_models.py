"""Training of whole models with MaxK, beside the same models with ReLU, on gnnaccel and on PyG (MaxK-GNN's Figure 9).

    python benchmarks/maxk_models.py --csv out.csv
    python benchmarks/maxk_models.py --graphs reddit-like --models sage gcn gin --k 16 32 --csv out.csv
    python benchmarks/maxk_models.py --dry          # on the CPU, graphs of 1% of the size

The graphs are stand-ins of graphs.py, with random features and labels, as many as the real ones have; layers, hidden
features and dropout are those of the paper's Table 3. An epoch is forward, cross entropy over all nodes, backward and a
step of Adam on the full graph, fp32, in wall time; epoch_ms is the median of those after a warm-up.

- pyg relu: PyG's layers on a torch.sparse_csr_tensor by destination, gnnaccel not switched on. GCNConv is cached.
- nn relu, nn maxk: `gnnaccel.nn.GraphSAGE`, `GCN` and `GIN`, on a graph that `gnnaccel.prepare` made.

Sides run one after the other; one that has not enough memory is left out. peak_gib: most memory allocated during an
epoch, with the graph, features, weights and Adam's state. Logits are checked first: those of nn relu against PyG's,
from the same weights; those of nn maxk against the same model on dense tensors, which rounds otherwise and so may keep
another one of two features that are almost equal.

sums_share is the share of an epoch of nn relu that its sums over the graph take, timed by themselves, forward and
backward; amdahl_limit = 1 / (1 - sums_share) is how much faster than nn relu a model with free sums would be. MaxK can
come out a little above it, as dropout draws for the kept entries alone.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import graphs
import numpy as np
import torch
import torch_geometric
from timing import clocks_under_load, left_out, provenance, relative_error, save_table, shown, time_ms
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph

SETTINGS = {  # features, classes; layers as in the paper's Table 3
    "reddit-like": (602, 41, 4),
    "proteins-like": (8, 2, 3),
    "products-like": (100, 47, 3),
}
MODELS = {  # ours, PyG's layer, how it reduces
    "sage": (gnnaccel.nn.GraphSAGE, lambda width: SAGEConv(width, width), "mean"),
    "gcn": (gnnaccel.nn.GCN, lambda width: GCNConv(width, width, cached=True), "sum"),
    "gin": (gnnaccel.nn.GIN, lambda width: GINConv(nn.Linear(width, width), train_eps=True), "sum"),
}
ERROR_LIMIT = {"relu": 1e-4, "maxk": 1e-2}
WARM_UP = 3
DRY_SCALE, DRY_REPEAT = 0.01, 2
COLUMNS = (
    "graph", "nodes", "edges", "features", "classes", "model", "layers", "hidden", "dropout", "side", "act", "k",
    "epoch_ms", "iqr_ms", "vs_relu", "vs_pyg", "peak_gib", "sums_share", "amdahl_limit", "rel_error",
)  # fmt: skip


@dataclass
class Data:
    """A graph by destination, its features and labels on the device."""

    name: str
    indptr: Tensor
    indices: Tensor
    x: Tensor
    y: Tensor
    classes: int
    layers: int


class PyGModel(nn.Module):
    """The architecture of gnnaccel.nn's models with layers of PyG; parameters come in the same order."""

    def __init__(self, features: int, hidden: int, classes: int, layers: int, dropout: float, make: Callable):
        super().__init__()
        self.first = nn.Linear(features, hidden)
        self.convs = nn.ModuleList(make(hidden) for _ in range(layers))
        self.last = nn.Linear(hidden, classes)
        self.dropout = dropout

    def forward(self, graph: Tensor, x: Tensor) -> Tensor:
        h = self.first(x)
        for conv in self.convs:
            h = conv(F.dropout(h.relu(), self.dropout, self.training), graph)
        return self.last(h)


class Dense(nn.Module):
    """A MaxK whose result is a plain tensor."""

    def __init__(self, act: nn.Module):
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x).to_dense()


def load(name: str, device: str, scale: float) -> Data:
    features, classes, layers = SETTINGS[name]
    made = graphs.generate(name, device, scale)
    n = made["num_nodes"]
    rng = torch.Generator(device=device).manual_seed(0)
    x = torch.rand(n, features, generator=rng, device=device)
    y = torch.randint(classes, (n,), generator=rng, device=device)
    return Data(name, made["indptr"], made["indices"], x, y, classes, layers)


def measure(model: nn.Module, graph, given: Data, repeat: int) -> dict:
    """Train for some epochs: their times and the memory they take."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    on_cuda = given.x.is_cuda
    times = []
    for epoch in range(WARM_UP + repeat):
        if on_cuda:
            torch.cuda.synchronize()
        if on_cuda and epoch == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(graph, given.x), given.y)
        loss.backward()
        optimizer.step()
        if on_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    if not math.isfinite(float(loss.detach())):
        raise SystemExit(f"{given.name}: the loss is {float(loss.detach())}")
    low, high = np.quantile(times[WARM_UP:], [0.25, 0.75]).tolist()
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else None
    return {"epoch_ms": statistics.median(times[WARM_UP:]), "iqr_ms": high - low, "peak_gib": peak}


@torch.no_grad()
def logits(model: nn.Module, graph, given: Data) -> Tensor:
    """On the CPU, where they take none of the memory that is measured."""
    return model.eval()(graph, given.x).cpu()


def check(got: Tensor, want: Tensor | None, act: str, title: str) -> float | None:
    """Relative error; a wrong result ends the benchmark."""
    if want is None:
        return None
    error = relative_error(got, want.double())
    if not error < ERROR_LIMIT[act]:
        raise SystemExit(f"{title}: wrong logits, relative error {error}")
    return error


def attempt(title: str, function: Callable, *arguments):
    """The result of a side; None, with a line that says why, where it has not enough memory or cannot run."""
    problem, result = "", None
    try:
        result = function(*arguments)
    except RuntimeError as error:  # out of memory is one too
        problem = (str(error).splitlines() or [""])[0] or type(error).__name__
    gc.collect()
    if problem:
        left_out(f"{title}: {problem}")  # the exception is gone, and with it the memory it held
    return result


def pyg_side(name: str, given: Data, weights: list[Tensor], options: argparse.Namespace) -> tuple[dict, Tensor]:
    n = len(given.x)
    ones = torch.ones(len(given.indices), device=given.x.device)
    graph = torch.sparse_csr_tensor(given.indptr, given.indices, ones, size=(n, n), check_invariants=False)
    shape = (given.x.shape[1], options.hidden, given.classes, given.layers, options.dropout)
    model = PyGModel(*shape, MODELS[name][1]).to(given.x.device)
    copy(weights, model)
    found = logits(model, graph, given)
    return measure(model, graph, given, options.repeat), found


def own_model(name: str, given: Data, options: argparse.Namespace, maxk: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    settings = {"num_layers": given.layers, "maxk": maxk, "dropout": options.dropout}
    return MODELS[name][0](given.x.shape[1], options.hidden, given.classes, **settings)


def copy(weights: list[Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), weights, strict=True):
            mine.copy_(theirs)


def relu_side(name: str, graph: Graph, given: Data, want: Tensor | None, options: argparse.Namespace) -> dict:
    model = own_model(name, given, options).to(given.x.device)
    error = check(logits(model, graph, given), want, "relu", f"{name} on {given.name}, ReLU")
    row = measure(model, graph, given, options.repeat)
    del model
    h = torch.rand(graph.num_cols, options.hidden, device=given.x.device)
    reduce = MODELS[name][2]
    turns = [time_ms(lambda turn=turn: ops.spmm(turn, h, reduce=reduce))[0] for turn in (graph, graph.transposed)]
    share = given.layers * sum(turns) / row["epoch_ms"]
    return row | {"sums_share": share, "amdahl_limit": 1 / (1 - share) if share < 1 else math.inf, "rel_error": error}


def maxk_side(name: str, graph: Graph, given: Data, k: int, options: argparse.Namespace) -> dict:
    model = own_model(name, given, options, k).to(given.x.device)
    dense = own_model(name, given, options, k).to(given.x.device)
    dense.acts = nn.ModuleList(Dense(act) for act in dense.acts)
    found = logits(model, graph, given), logits(dense, graph, given)
    del dense
    error = check(*found, "maxk", f"{name} on {given.name}, k = {k}")
    return measure(model, graph, given, options.repeat) | {"rel_error": error}


def sides(name: str, given: Data, options: argparse.Namespace):
    """Measure all sides of a model; yields their part of a row."""
    title = f"{name} on {given.name}"
    found = attempt(f"{title}, PyG", pyg_side, name, given, list(own_model(name, given, options).parameters()), options)
    pyg, want = found or ({}, None)
    pyg_ms = pyg.get("epoch_ms")
    if pyg:
        yield {"side": "pyg", "act": "relu", **pyg, "vs_pyg": 1.0}
    graph = Graph.from_csr(given.indptr, given.indices, num_cols=len(given.x), check=False)
    if name == "gcn":  # which sums up each node itself too; PyG's GCNConv puts in the loops by itself
        graph = graph.with_self_loops()
    print(gnnaccel.prepare(graph), flush=True)
    relu = attempt(f"{title}, ReLU", relu_side, name, graph, given, want, options) or {}
    relu_ms = relu.get("epoch_ms")
    for k in (None, *options.k):
        row = relu if k is None else attempt(f"{title}, k = {k}", maxk_side, name, graph, given, k, options)
        if row:
            limit = {key: relu.get(key) for key in ("sums_share", "amdahl_limit")}
            ratios = {key: ms and ms / row["epoch_ms"] for key, ms in (("vs_relu", relu_ms), ("vs_pyg", pyg_ms))}
            yield {"side": "nn", "act": "maxk" if k else "relu", "k": k, **limit, **row, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(SETTINGS)
    parser.add_argument("--graphs", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--models", nargs="+", default=["sage"], choices=list(MODELS))
    parser.add_argument("--k", nargs="+", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--repeat", type=int, default=21, help="epochs of each side that count")
    parser.add_argument("--dry", action="store_true", help=f"on the CPU, graphs of {DRY_SCALE:.0%}% of the size")
    parser.add_argument("--commit", help="what the table's head is to say")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no GPU: only a --dry run works here")
    device, scale = ("cpu", DRY_SCALE) if options.dry else ("cuda", 1.0)
    if options.dry:
        options.repeat = DRY_REPEAT
    warnings.simplefilter("ignore")  # torch's, that CSR tensors are in beta
    notes = [f"torch_geometric {torch_geometric.__version__}; medians of {options.repeat} epochs after {WARM_UP}"]
    notes += ["dry run on the CPU: times mean nothing" if options.dry else clocks_under_load()]
    head = provenance(options.commit, *notes)
    print(*head, sep="\n", flush=True)
    lines = []
    for graph in options.graphs:
        given = load(graph, device, scale)
        facts = {"graph": graph, "nodes": len(given.x), "edges": len(given.indices), "features": given.x.shape[1]}
        facts |= {"classes": given.classes, "layers": given.layers}
        for model in options.models:
            settings = {"model": model, "hidden": options.hidden, "dropout": options.dropout}
            lines += [shown(COLUMNS, facts | settings | row) for row in sides(model, given, options)]
        del given
        if not options.dry:
            torch.cuda.empty_cache()
        if options.csv:
            save_table(options.csv, head, COLUMNS, lines)  # what there is so far


if __name__ == "__main__":
    main()
