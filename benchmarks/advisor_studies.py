"""GNNAdvisor's studies (Wang et al., OSDI 2021, Figures 11 to 13) of this project's kernels and orders.

    python benchmarks/advisor_studies.py --csv studies.csv                      # all of them, on the GPU
    python benchmarks/advisor_studies.py group-size blocks --graphs arxiv-like DATA/amazon_photo.npz
    python benchmarks/advisor_studies.py --plot studies.csv --out docs/figures  # SVG charts of a table, without a GPU

- group-size, threads, dimension-workers (Figure 11): a weighted sum by groups of neighbours, 64 features of fp32 (128
  for dimension workers), one parameter changed, the others 32 neighbours, 256 threads, 16 lanes of 16 bytes.
- renumbering (12a, b): a training step of GCN and GIN, hidden 512, rows as given and in communities; in `note` the
  share of distinct sources in windows of 8192 edges, by which fewer are fetched.
- blocks (12c): the same sum with one worker to a block, which is without a leader and shared memory, and with as many
  as 256 threads make; in `note` the bytes of parts of rows that go through memory instead.
- hidden (13a, b): a training step of GCN and GIN by the number of hidden features.

Times are medians in device time, milliseconds; `relative` is to the first of its line, as in the paper's charts. GCN
has two layers and GIN five, 96 features in, 22 classes, as there.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from advisor import load
from groups import Cell
from timing import clocks_under_load, provenance, save_table, shown, time_ms

import gnnaccel
from gnnaccel import schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.reorder import hit_rate
from gnnaccel.schedule.groups import Setting
from gnnaccel.schedule.worklist import SLICES, THREADS

GRAPHS = ("amazon0505-like", "artist-like", "blogcatalog-like")  # of the paper's third type
COLUMNS = ("study", "graph", "model", "parameter", "value", "ms", "relative", "note")
USUAL = Setting(32, 256, 16)
MODELS = {"GCN": (gnnaccel.nn.GCN, 2), "GIN": (gnnaccel.nn.GIN, 5)}


def fresh(given: Graph) -> Graph:
    return Graph(given.indptr, given.indices, given.edge_ids, given.num_cols)


def swept(given: Graph, width: int, field: str, values) -> Iterator[tuple]:
    graph = fresh(given)
    gnnaccel.prepare(graph, transposed=False)
    cell = Cell(graph, width)
    for value in values:
        plan = cell.groups(USUAL._replace(**{field: value}))
        yield "sum", value, time_ms(cell.call(plan), 30)[0], ""


def group_size(given: Graph) -> Iterator[tuple]:
    yield from swept(given, 64, "group_size", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))


def threads(given: Graph) -> Iterator[tuple]:
    yield from swept(given, 64, "threads", (32, *THREADS))


def dimension_workers(given: Graph) -> Iterator[tuple]:
    yield from swept(given, 128, "lanes", SLICES)


def blocks(given: Graph) -> Iterator[tuple]:
    graph = fresh(given)
    gnnaccel.prepare(graph, transposed=False)
    cell = Cell(graph, 64)
    for value in (USUAL.lanes, USUAL.threads):
        plan = cell.groups(USUAL._replace(threads=value))
        parts = schedule.of(graph).arranged(graph, plan).steps.numel()
        yield (
            "sum",
            value // USUAL.lanes,
            time_ms(cell.call(plan), 30)[0],
            f"{2 * parts * 64 * 4 / 1e6:.2f} MB of parts",
        )


def training_step(graph: Graph, name: str, hidden: int) -> Callable[[], None]:
    make, layers = MODELS[name]
    torch.manual_seed(0)
    model = make(96, hidden, 22, num_layers=layers).to(graph.device)
    x = torch.randn(graph.num_cols, 96, device=graph.device)

    def step():
        model.zero_grad(set_to_none=True)
        model(graph, x).sum().backward()

    return step


def step_ms(graph: Graph, name: str, hidden: int) -> float:
    return time_ms(training_step(graph, name, hidden), 60)[0]


def renumbering(given: Graph) -> Iterator[tuple]:
    for name in MODELS:
        for order in (False, "communities"):
            graph = fresh(given)
            gnnaccel.prepare(graph, reorder=order)
            distinct = 1 - hit_rate(graph, schedule.of(graph).order if order and schedule.of(graph).reordered else None)
            note = f"{distinct:.0%} distinct" if schedule.of(graph).reordered or not order else "no order pays"
            yield name, order or "as given", step_ms(graph, name, 512), note


def hidden(given: Graph) -> Iterator[tuple]:
    graph = fresh(given)
    gnnaccel.prepare(graph)
    for name in MODELS:
        for width in (16, 32, 64, 128, 256, 512):
            yield name, width, step_ms(graph, name, width), ""


STUDIES = {"group-size": group_size, "threads": threads, "dimension-workers": dimension_workers,
           "renumbering": renumbering, "blocks": blocks, "hidden": hidden}  # fmt: skip
AXES = {
    "group-size": "neighbours of a group",
    "threads": "threads of a block",
    "dimension-workers": "lanes of 16 bytes",
    "renumbering": "order of the rows",
    "blocks": "workers of a block",
    "hidden": "hidden features",
}


def read_table(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def chart(lines: dict[str, list[tuple[str, float]]], xlabel: str, ylabel: str, path: Path) -> None:
    """One line for each label, by its points; from 0 up."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "studies", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot(table: str, out: Path) -> None:
    """A chart of each study of a table."""
    lines: dict = defaultdict(lambda: defaultdict(list))
    for row in read_table(table):
        label = row["graph"] if row["model"] == "sum" else f"{row['graph']}, {row['model']}"
        lines[row["study"]][label].append((row["value"], float(row["relative"])))
    for study, of in lines.items():
        chart(of, AXES[study], "time, relative to the first", out / f"{study}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all unless given")
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, help="names of graphs.py, or .npz files")
    parser.add_argument("--commit")
    parser.add_argument("--csv")
    parser.add_argument("--plot", metavar="CSV", help="draw this table instead")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    options = parser.parse_args()
    unknown = set(options.studies) - STUDIES.keys()
    if unknown:
        parser.error(f"no such study: {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    if options.plot:
        plot(options.plot, options.out)
        return
    head = provenance(options.commit, clocks_under_load())
    print(*head, sep="\n")
    cells = []
    for name in options.graphs:
        given = load(name)
        for study in options.studies or STUDIES:
            first: dict[str, float] = {}
            for model, value, ms, note in STUDIES[study](given):
                relative = ms / first.setdefault(model, ms)
                row = dict(study=study, graph=Path(name).stem, model=model, parameter=AXES[study], value=value, ms=ms)
                cells.append(shown(COLUMNS, row | dict(relative=relative, note=note)))
    if options.csv:
        save_table(options.csv, head, COLUMNS, cells)


if __name__ == "__main__":
    main()
