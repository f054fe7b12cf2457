"""Training of whole models on gnnaccel beside PyG: the settings of the TC-GNN paper's comparison (its Figure 6).

    python benchmarks/pyg_models.py --device cuda --data-folder FOLDER --csv out.csv
    python benchmarks/pyg_models.py --device cpu --graphs cora artist-like --scale 0.02 --repeat 3      # dry run

GCN has two layers, 16 hidden; AGNN a linear map in, four layers, 32 hidden, a linear map out; no dropout. An epoch is
forward, cross entropy over all labelled nodes, backward and a step of Adam on the full graph, fp32, in wall time.

- pyg: PyG's layers, on each format they take: edge_index or CSR (torch.sparse_csr, by destination); "cached": GCNConv
  keeps the norms of the first epoch; "loops": AGNNConv is given self-loops, which it adds at each call otherwise.
- flag: the same model after `gnnaccel.accelerate` (what GNNACCEL=1 does), on the same formats; "in order": on an
  edge_index that `gnnaccel.prepare(edge_index, reorder=True)` has looked at before the first epoch.
- nn: the same model of `gnnaccel.nn` layers, on a graph with self-loops that `gnnaccel.prepare` made.

All start from the same weights, and their logits are checked first. Then all sides take turns, epoch by epoch; after a
warm-up (long enough for gnnaccel's work lists of graphs that last) come the medians. vs_pyg: time of PyG's quickest
format over this one. peak_mib: most memory during an epoch above what was allocated before; kept_mib: what the side
holds between epochs (its CSR matrix or prepared graph, norms, Adam's state, gradients), without the edge_index and the
features that all share; loss: of the last epoch. The paper has 1.76x for GCN and 2.82x for AGNN, means over its graphs,
on an RTX 3090.

Graphs: cora, citeseer and pubmed ship with gnnaccel (pubmed's features are random). proteins and dd are NAME.npz of
--data-folder, with node_label, graph_ptr and y: features are the node labels one-hot (3 and 82, where the paper has 29
and 89), and a node's label is the class of its graph. The others are stand-ins by graphs.py, with random features and
labels, as many as in the paper's Table 4 (reddit-like is not in it). --scale shrinks the stand-ins alone.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import graphs
import numpy as np
import torch
import torch_geometric
from timing import clocks_under_load, left_out, provenance, relative_error, save_table, short
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import AGNNConv, GCNConv
from torch_geometric.utils import to_torch_csr_tensor

import gnnaccel
from gnnaccel import data, report

SHIPPED = ("cora", "citeseer", "pubmed")
FILES = ("proteins", "dd")
STAND_INS = {  # features, classes
    "artist-like": (100, 12),
    "blogcatalog-like": (128, 39),
    "amazon0505-like": (96, 22),
    "yeast-like": (74, 2),
    "reddit-like": (602, 41),
}
WRONG, IN_ORDER = "WRONG", "edge_index in order"
GCN_HIDDEN, AGNN_HIDDEN, AGNN_LAYERS = 16, 32, 4
WARM_UP = {"cuda": 30, "cpu": 2}  # epochs; CUDA's work lists come with the 51st call of a graph, two and more an epoch
COLUMNS = (
    "graph", "nodes", "edges", "features", "classes", "model", "side", "format", "epoch_ms", "iqr_ms", "vs_pyg",
    "peak_mib", "kept_mib", "loss", "rel_error", "note",
)  # fmt: skip


@dataclass
class Data:
    """A graph, its features and labels (-1: none) on the device."""

    edge_index: Tensor  # [2, E], sources first, without self-loops
    x: Tensor
    y: Tensor
    num_classes: int

    @property
    def num_nodes(self) -> int:
        return len(self.x)

    def with_loops(self) -> Tensor:
        loops = torch.arange(self.num_nodes, device=self.x.device).expand(2, -1)
        return torch.cat([self.edge_index, loops], dim=1)


class GCN(nn.Module):
    """Two layers, of PyG (`special`: cached) or of gnnaccel.nn, whose ReLU is in the pass of the sum."""

    def __init__(self, features: int, classes: int, own: bool, special: bool):
        super().__init__()
        self.own = own
        if own:
            layers = [gnnaccel.nn.GCNConv(features, GCN_HIDDEN, relu=True), gnnaccel.nn.GCNConv(GCN_HIDDEN, classes)]
        else:
            layers = [GCNConv(*shape, cached=special) for shape in ((features, GCN_HIDDEN), (GCN_HIDDEN, classes))]
        self.first, self.last = layers

    def forward(self, x: Tensor, graph) -> Tensor:
        if self.own:
            return self.last(graph, self.first(graph, x))
        return self.last(self.first(x, graph).relu(), graph)


class AGNN(nn.Module):
    """A linear map in, layers of PyG (`special`: the graph has its self-loops) or of gnnaccel.nn, a linear map out."""

    def __init__(self, features: int, classes: int, own: bool, special: bool):
        super().__init__()
        self.own = own
        self.first = nn.Linear(features, AGNN_HIDDEN)
        make = gnnaccel.nn.AGNNConv if own else functools.partial(AGNNConv, add_self_loops=not special)
        self.convs = nn.ModuleList(make() for _ in range(AGNN_LAYERS))
        self.last = nn.Linear(AGNN_HIDDEN, classes)

    def forward(self, x: Tensor, graph) -> Tensor:
        x = self.first(x).relu()
        for conv in self.convs:
            x = conv(graph, x) if self.own else conv(x, graph)
        return self.last(x)


MODELS = {"gcn": (GCN, "cached"), "agnn": (AGNN, "loops")}  # and what its special format is called


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


class Side:
    """A model, the graph in the format it takes and an optimiser; what its epochs took."""

    def __init__(self, name: str, form: str, given: Data, model: nn.Module, graph, kept: int):
        self.name, self.form, self.data, self.model, self.graph, self.kept = name, form, given, model, graph, kept
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.times: list[float] = []
        self.peak, self.loss, self.note = 0, math.nan, ""
        self.error: float | None = None

    @torch.no_grad()
    def logits(self) -> Tensor:
        before = allocated(self.data.x.device)
        out = self.model(self.data.x, self.graph)
        self.kept += allocated(self.data.x.device) - before - out.numel() * out.element_size()
        return out

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.data.x, self.graph), self.data.y, ignore_index=-1)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def epoch(self, counts: bool) -> float:
        """Train for an epoch, return its milliseconds; `counts`: with its time and memory in the table."""
        device = self.data.x.device
        on_cuda = device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        before = allocated(device)
        start = time.perf_counter()
        loss = self.step()
        if on_cuda:
            torch.cuda.synchronize()
        took = (time.perf_counter() - start) * 1e3
        self.loss = float(loss)
        del loss
        self.kept += allocated(device) - before
        if counts:
            self.times.append(took)
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - before if on_cuda else 0)
        return took

    @property
    def epoch_ms(self) -> float:
        return statistics.median(self.times) if self.times else math.inf

    def cells(self, pyg_ms: float) -> list:
        """Its part of a row of the table, from `side` on."""
        if not self.times:
            return [self.name, self.form, *[None] * 6, self.error, self.note]
        low, high = np.quantile(self.times, [0.25, 0.75]).tolist()
        ratio = pyg_ms / self.epoch_ms if math.isfinite(pyg_ms) else None
        memory = [self.peak / 2**20, self.kept / 2**20] if self.data.x.is_cuda else [None, None]
        return [self.name, self.form, self.epoch_ms, high - low, ratio, *memory, self.loss, self.error, self.note]


def sides_of(name: str, given: Data) -> list[Side]:
    """All sides of a model, with the same weights."""
    kind, special_name = MODELS[name]
    device, n = given.x.device, given.num_nodes
    torch.manual_seed(0)
    weights = kind(given.x.shape[1], given.num_classes, own=False, special=False).to(device)

    def side(label: str, form: str, special: bool, sparse: bool) -> Side:
        before = allocated(device)
        model = kind(given.x.shape[1], given.num_classes, own=label == "nn", special=special).to(device)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), weights.parameters(), strict=True):
                mine.copy_(theirs)
        loops = label == "nn" or (special and name == "agnn")
        graph = given.with_loops() if loops else given.edge_index
        if label == "nn":
            sources, destinations = graph
            graph = gnnaccel.Graph.from_coo(destinations, sources, num_rows=n, num_cols=n)
            gnnaccel.prepare(graph)
            del sources, destinations
        elif form == IN_ORDER:
            graph = graph.clone()  # one of its own: what is prepared of an edge_index serves all that use it
            gnnaccel.prepare(graph, num_nodes=n, reorder=True)
        elif sparse:  # rows are destinations, as ToSparseTensor(layout=torch.sparse_csr) has it
            graph = to_torch_csr_tensor(graph.flip(0), size=(n, n))
        if label == "flag":
            gnnaccel.accelerate(model)
        return Side(label, form, given, model, graph, allocated(device) - before)

    made = []
    for label, sparse, special in itertools.product(("pyg", "flag"), (False, True), (False, True)):
        form = ("csr" if sparse else "edge_index") + f" {special_name}" * special
        made.append(side(label, form, special, sparse))
    return [*made, side("flag", IN_ORDER, False, False), side("nn", "prepared", False, False)]


def attempt(side: Side, method: Callable, *arguments):
    """What a method of the side returns; None, with a note and a line that says why, where it cannot run."""
    try:
        return method(*arguments)
    except Exception as error:  # out of memory, or PyG does not take the format
        side.note = (str(error).splitlines() or [""])[0] or type(error).__name__
    side.optimizer.zero_grad()
    side.times.clear()
    left_out(f"{side.name} {side.form}: {side.note}")  # the exception is gone, and with it the memory it held
    return None


def check(sides: list[Side]) -> list[Side]:
    """Those that run and whose logits are those of the first."""
    expected, good = None, []
    for side in sides:
        report.reset()
        got = attempt(side, side.logits)
        if got is None:
            continue
        expected = got if expected is None else expected
        side.error = relative_error(got, expected.double())
        if not torch.allclose(got, expected, rtol=1e-3, atol=1e-3):
            side.note = WRONG
            print(f"  {side.name} {side.form}: WRONG logits, relative error {side.error}", flush=True)
            continue
        left = sum(site.left for site in report.snapshot().values())
        side.note = f"{left} calls left to PyG" if left else ""
        good.append(side)
    return good


def measure(sides: list[Side], repeat: int) -> None:
    """Train all sides in turns."""
    running, warm_up = check(sides), WARM_UP[sides[0].data.x.device.type]
    for turn in range(warm_up + repeat):
        running = [side for side in running if attempt(side, side.epoch, turn >= warm_up) is not None]


def shipped(name: str, device: str) -> Data:
    read = data.load(name)
    edge_index, x, y = (torch.from_numpy(array).to(device) for array in (read.edge_index, read.x, read.y))
    return Data(edge_index, x, y, read.num_classes)


def from_file(path: Path, device: str) -> Data:
    """Features: node labels one-hot; a node's label: the class of its graph."""
    with np.load(path, allow_pickle=False) as file:
        keys = ("edge_index", "node_label", "graph_ptr", "y")
        edge_index, label, ptr, y = (torch.from_numpy(file[key]).long().to(device) for key in keys)
    return Data(edge_index, F.one_hot(label).float(), y.repeat_interleave(ptr.diff()), int(y.max()) + 1)


def stand_in(name: str, device: str, scale: float) -> Data:
    features, classes = STAND_INS[name]
    made = graphs.generate(name, device, scale)
    n = made["num_nodes"]
    targets = torch.arange(n, device=device).repeat_interleave(made["indptr"].diff().long())
    rng = torch.Generator(device=device).manual_seed(0)
    x = torch.rand(n, features, generator=rng, device=device)
    y = torch.randint(classes, (n,), generator=rng, device=device)
    return Data(torch.stack([made["indices"].long(), targets]), x, y, classes)


def load(name: str, options: argparse.Namespace) -> Data | None:
    """The graph on the device; None, with a line that says so, if there is no file of it."""
    if name in SHIPPED:
        return shipped(name, options.device)
    if name in STAND_INS:
        return stand_in(name, options.device, options.scale)
    path = Path(options.data_folder or "", f"{name}.npz")
    if options.data_folder and path.is_file():
        return from_file(path, options.device)
    print(f"{name}: left out, " + (f"no file {path}" if options.data_folder else "no --data-folder"), flush=True)
    return None


def best(sides: list[Side], name: str, plain: bool = False) -> Side:
    """The quickest side called `name`; `plain`: without the formats that are "cached" or have "loops"."""
    of_name = (side for side in sides if side.name == name and not (plain and " " in side.form))
    return min(of_name, key=lambda side: side.epoch_ms)


def show(title: str, sides: list[Side], pyg_ms: float) -> None:
    print(title)
    for side in sides:
        name, form, took, spread, ratio, peak, kept, loss, error, note = map(short, side.cells(pyg_ms))
        memory = f"  peak {peak} MiB, kept {kept} MiB" if peak else ""
        figures = f"{took:>7} ms (iqr {spread}) {ratio}x{memory}  loss {loss}, relative error {error}"
        print(f"  {name:5}{form:20}{figures if side.times else 'left out:'}  {note}".rstrip(), flush=True)


def summary(speedups: dict[tuple[str, str, bool], list[float]]) -> list[str]:
    """Geometric means over the graphs, of each model and side."""
    return [
        f"{model} {side}: {statistics.geometric_mean(ratios):.2f}x PyG's quickest "
        f"{'of edge_index and CSR as they are' if plain else 'format of all'}, geometric mean of "
        f"{len(ratios)} graph(s) ({min(ratios):.2f} to {max(ratios):.2f})"
        for (model, side, plain), ratios in speedups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*SHIPPED, *FILES, *STAND_INS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(WARM_UP))
    parser.add_argument("--graphs", nargs="+", default=names, choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--data-folder", metavar="FOLDER", help="where proteins.npz and dd.npz are")
    parser.add_argument("--repeat", type=int, default=51, help="epochs of each side that count")
    parser.add_argument("--scale", type=float, default=1.0, help="of the stand-ins, for dry runs")
    parser.add_argument("--commit", help="what the table's head is to say")
    parser.add_argument("--csv", metavar="OUT", help="also write the figures there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    notes = [f"torch_geometric {torch_geometric.__version__}; medians of {options.repeat} epochs, in turns"]
    notes += [clocks_under_load()] if options.device == "cuda" else [f"on the CPU, {torch.get_num_threads()} threads"]
    head = provenance(options.commit, *notes)
    print(*head, sep="\n", flush=True)
    rows, wrong, missing = [], False, []
    speedups: dict[tuple[str, str, bool], list[float]] = {}
    for name in options.graphs:
        given = load(name, options)
        if given is None:
            missing.append(name)
            continue
        facts = [name, given.num_nodes, given.edge_index.shape[1], given.x.shape[1], given.num_classes]
        for model in options.models:
            sides = sides_of(model, given)
            measure(sides, options.repeat)
            pyg_ms = best(sides, "pyg").epoch_ms
            show(f"{model} on {name}: {facts[1]} nodes, {facts[2]} edges, {facts[3]} features", sides, pyg_ms)
            rows += [[*facts, model, *side.cells(pyg_ms)] for side in sides]
            for plain, side in itertools.product((False, True), ("flag", "nn")):
                ratio = best(sides, "pyg", plain).epoch_ms / best(sides, side, plain).epoch_ms
                if math.isfinite(ratio) and ratio > 0:
                    speedups.setdefault((model, side, plain), []).append(ratio)
            wrong = wrong or any(side.note == WRONG for side in sides)
            del sides
    lines = summary(speedups) + ([f"left out, without a file: {', '.join(missing)}"] if missing else [])
    print(*lines, sep="\n")
    if options.csv:
        head += [f"# {line}" for line in lines]
        save_table(options.csv, head, COLUMNS, [[short(cell) for cell in row] for row in rows])
    if wrong:
        raise SystemExit("some logits are wrong")


if __name__ == "__main__":
    main()
