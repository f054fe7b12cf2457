"""An entity classifier, R-GCN (Schlichtkrull et al.), trained by a framework alone and on gnnaccel.

    python benchmarks/entities.py --csv benchmarks/results/entities_MACHINE.csv
    python benchmarks/entities.py --device cuda --scale 10

20,000 entities without features, 200,000 random facts of 45 relations whose sizes fall as 1 / rank, and their inverses:
90 types, 400,000 edges. Two layers, 16 wide, 30 bases, 4 classes at random, 10% of the entities labelled, Adam. PyG:
RGCNConv of node numbers; DGL: RelGraphConv of an embedding. Both sides start from the same parameters and take --epochs
epochs, in turns; milliseconds an epoch, the median of those after the first two; first_ms: the first one of gnnaccel.
difference: the largest of two losses of an epoch, over the loss. On CUDA DGL "alone" is DGL on torch's own kernels
(GNNACCEL_DGL_KERNELS=torch), as its CPU wheel has none.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from timing import provenance, save_table, shown
from torch.nn import functional as F

COLUMNS = ("framework", "device", "entities", "relations", "edges", "epochs", "alone_ms", "gnnaccel_ms", "ratio",
           "first_ms", "loss_alone", "loss_gnnaccel", "difference")  # fmt: skip
RELATIONS, HIDDEN, BASES, CLASSES = 45, 16, 30, 4
Epoch = Callable[[], float]


def facts(entities: int, count: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Edges, their types, labels of the entities, and the numbers of those to learn from."""
    generator = torch.Generator().manual_seed(0)
    types = torch.multinomial(1 / torch.arange(1, RELATIONS + 1), count, replacement=True, generator=generator)
    index = torch.randint(0, entities, (2, count), generator=generator)
    labels = torch.randint(0, CLASSES, (entities,), generator=generator)
    learnt = torch.randperm(entities, generator=generator)[: entities // 10]
    index, types = torch.cat([index, index.flip(0)], 1), torch.cat([types, types + RELATIONS])
    return index.to(device), types.to(device), labels.to(device), learnt.to(device)


class OfPyG(torch.nn.Module):
    def __init__(self, entities: int):
        super().__init__()
        from torch_geometric.nn import RGCNConv

        self.first = RGCNConv(entities, HIDDEN, 2 * RELATIONS, num_bases=BASES)
        self.last = RGCNConv(HIDDEN, CLASSES, 2 * RELATIONS, num_bases=BASES)

    def forward(self, index, types):
        return self.last(self.first(None, index, types).relu(), index, types)


class OfDGL(torch.nn.Module):
    def __init__(self, entities: int):
        super().__init__()
        from dgl.nn import RelGraphConv

        self.embedding = torch.nn.Parameter(torch.randn(entities, HIDDEN))
        self.first = RelGraphConv(HIDDEN, HIDDEN, 2 * RELATIONS, "basis", BASES)
        self.last = RelGraphConv(HIDDEN, CLASSES, 2 * RELATIONS, "basis", BASES)

    def forward(self, graph, types):
        return self.last(graph, self.first(graph, self.embedding, types).relu(), types)


def epoch_of(model: torch.nn.Module, given: tuple, labels: torch.Tensor, learnt: torch.Tensor) -> Epoch:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*given)[learnt], labels[learnt])
        loss.backward()
        optimizer.step()
        return loss.item()  # waits for a GPU

    return epoch


def dgl_on(kernels: str = "") -> None:
    """DGL on gnnaccel, or, of `kernels` "torch", on torch's kernels."""
    from gnnaccel import dgl_backend
    from gnnaccel.dgl_backend.compat import KERNELS

    os.environ[KERNELS] = kernels
    dgl_backend.disable()
    dgl_backend.enable()


def train(framework: str, entities: int, count: int, epochs: int, device: str) -> dict:
    from gnnaccel import dgl_backend

    index, types, labels, learnt = facts(entities, count, device)
    torch.manual_seed(0)
    if framework == "PyG":
        import gnnaccel

        models = {"alone": OfPyG(entities).to(device)}
        models["gnnaccel"] = gnnaccel.accelerate(copy.deepcopy(models["alone"]))
        given, switches = (index, types), dict.fromkeys(models, lambda: None)
    else:
        dgl_backend.shim()
        import dgl

        models = {"alone": OfDGL(entities).to(device)}
        models["gnnaccel"] = copy.deepcopy(models["alone"])
        dgl_on()
        ends = index.cpu()
        given = dgl.graph((ends[0], ends[1]), num_nodes=entities).to(device), types
        off = dgl_backend.disable if device == "cpu" else lambda: dgl_on("torch")
        switches = {"alone": off, "gnnaccel": dgl_on}
    sides = {name: epoch_of(model, given, labels, learnt) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(epochs):
        for name, epoch in sides.items():
            switches[name]()
            start = time.perf_counter()
            losses[name].append(epoch())
            times[name].append((time.perf_counter() - start) * 1e3)
    dgl_backend.disable()
    found: dict = dict(framework=framework, device=device, entities=entities, relations=2 * RELATIONS)
    found |= {f"{name}_ms": statistics.median(each[2:]) for name, each in times.items()}
    found |= {f"loss_{name}": each[-1] for name, each in losses.items()}
    pairs = zip(*losses.values(), strict=True)
    found["difference"] = max(abs(a - b) / a for a, b in pairs)
    found |= dict(edges=index.shape[1], epochs=epochs, first_ms=times["gnnaccel"][0])
    return found | dict(ratio=found["alone_ms"] / found["gnnaccel_ms"])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("pyg", "dgl", "both"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="of entities and facts")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--commit", help="to name in the table, where git is not at hand")
    parser.add_argument("--csv", metavar="OUT")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    cells, wrong = [], 0
    for framework in ("PyG", "DGL"):
        if options.framework not in ("both", framework.lower()):
            continue
        sizes = int(20_000 * options.scale), int(200_000 * options.scale)
        found = train(framework, *sizes, options.epochs, options.device)
        cells.append(shown(COLUMNS, found))
        wrong += found["difference"] > 1e-3
    if options.csv:
        save_table(options.csv, provenance(options.commit, f"{options.threads} threads"), COLUMNS, cells)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
