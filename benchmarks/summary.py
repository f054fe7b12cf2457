"""What the documentation says of speed, from the tables in benchmarks/results: docs/performance.md, docs/speedups.svg.

    python benchmarks/summary.py            # write both
    python benchmarks/summary.py --check    # exit code 1 if docs/performance.md is not what the tables give

Each block of docs/performance.md between `<!-- summary.py NAME: begin -->` and `end` is one function below, so that no
figure in it is typed by hand; below it stand its table, and the machine, commit and command of that table's head.
"""

from __future__ import annotations

import argparse
import csv
import functools
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grid_table
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "speedups.svg"
Rows = list[dict[str, str]]


def read(name: str) -> tuple[list[str], Rows]:
    """Head lines without their "# ", and rows, of a table."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    return head, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def source(name: str, *more: int) -> list[str]:
    """Where a table comes from: its file, its first two head lines (machine, commit, command) and those numbered."""
    head, _ = read(name)
    command = f"`{head[1]}`" if head[1].startswith(("python", "taskset")) else head[1]
    picked = [head[0], command, *(head[number] for number in more)]
    return ["", f"`benchmarks/results/{name}`: {'; '.join(picked)}."]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]


def short(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pair(alone: float, ours: float) -> str:
    """Two times and how many times faster the second is."""
    return f"{short(alone)} / {short(ours)} ({alone / ours:.{1 if alone >= 10 * ours else 2}f}x)"


def edges(row: dict[str, str]) -> str:
    count = int(row["edges"])
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k"


def _cell(rows: Rows, alone: str, ours: str, **wanted: str) -> str:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return pair(float(found[0][alone]), float(found[0][ours])) if found else ""


def epochs_cell(rows: Rows, side: str, over: str, **wanted: str) -> str:
    """The time of a side and how many times faster than another it is."""
    times = {row["side"]: float(row["epoch_ms"]) for row in rows if all(row[k] == v for k, v in wanted.items())}
    if side not in times or over not in times:
        return ""
    ratio = "" if side == over else f" ({times[over] / times[side]:.{1 if times[over] >= 10 * times[side] else 2}f}x)"
    return short(times[side]) + ratio


def unique(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


# The blocks


def cpu_layers() -> list[str]:
    name = "cpu_layers_epyc.csv"
    rows = read(name)[1]
    graphs = {row["graph"]: f"{row['graph']}, {edges(row)}" for row in sorted(rows, key=lambda row: int(row["edges"]))}
    wanted = [(row["framework"], row["row"]) for row in rows if row["row"][0].isupper() and "cached" not in row["row"]]
    body = [
        [f"{framework} {layer}"]
        + [_cell(rows, "alone_ms", "gnnaccel_ms", graph=graph, framework=framework, row=layer) for graph in graphs]
        for framework, layer in dict.fromkeys(wanted)
    ]
    return markdown(["alone / gnnaccel, ms", *graphs.values()], body) + source(name)


def cpu_layers_avx512() -> list[str]:
    return _one_graph("cpu_layers_xeon.csv")


def cpu_small() -> list[str]:
    return _one_graph("cpu_layers_pubmed_epyc.csv")


def _one_graph(name: str) -> list[str]:
    """Every row of a table of one graph."""
    rows = [row for row in read(name)[1] if "cached" not in row["row"]]
    body = [
        [f"{row['framework']} {row['row']}", pair(float(row["alone_ms"]), float(row["gnnaccel_ms"]))] for row in rows
    ]
    return markdown(["alone / gnnaccel, ms", f"{rows[0]['graph']}, {edges(rows[0])}"], body) + source(name)


def every_layer(machine: str) -> list[str]:
    """How many layers gain and lose, by size of the graph, and which lose most."""
    names = [f"every_layer_{size}{machine}.csv" for size in ("tiny_", "small_", "")]
    tables = [read(name)[1] for name in names]
    sizes = [f"{int(rows[0]['nodes']):,} nodes, {int(rows[0]['edges']):,} edges" for rows in tables]
    body, lines = [], []
    for framework, label in (("dgl", "DGL"), ("pyg", "PyG")):
        cells = []
        for rows in tables:
            ratios = [float(row["ratio"]) for row in rows if row["framework"] == framework]
            slower = sum(ratio > 1.03 for ratio in ratios)
            cells += [f"{1 / statistics.geometric_mean(ratios):.2f}x; {slower} of {len(ratios)}"] if ratios else []
        body += [[label, *cells]] if cells else []
    body.append(["a layer alone to itself", *(_nine_in_ten([float(row["again"]) for row in rows]) for rows in tables)])
    for size, rows in zip(sizes, tables, strict=True):
        worst = sorted(rows, key=lambda row: -float(row["ratio"]))[:8]
        named = (f"{row['framework']} {row['layer']} {1 / float(row['ratio']):.2f}x" for row in worst)
        lines += ["", f"Least on {size}: {'; '.join(named)}."]
    sources = [line for name in names for line in source(name)]
    return [*markdown(["", *sizes], body), *lines, *sources]


def _nine_in_ten(ratios: Sequence[float]) -> str:
    low, high = np.quantile(ratios, (0.05, 0.95))
    return f"{1 / high:.2f}x to {1 / low:.2f}x in nine of ten"


def cpu_memory() -> list[str]:
    name = "cpu_layers_epyc.csv"
    rows = [row for row in read(name)[1] if row["alone_extra_mib"] and row["row"][0].isupper()]
    graphs = {row["graph"]: f"{row['graph']}, {edges(row)}" for row in sorted(rows, key=lambda row: int(row["edges"]))}
    layers = dict.fromkeys((row["framework"], row["row"]) for row in rows)
    body = [
        [f"{framework} {layer}"]
        + [
            _cell(rows, "alone_extra_mib", "gnnaccel_extra_mib", graph=graph, framework=framework, row=layer)
            for graph in graphs
        ]
        for framework, layer in layers
    ]
    return markdown(["alone / gnnaccel, MiB", *graphs.values()], body) + source(name)


def cpu_models() -> list[str]:
    name = "epochs_medium_epyc.csv"
    rows = read(name)[1]
    body = []
    for graph, model in dict.fromkeys((row["graph"], row["model"]) for row in rows):
        of = {row["side"]: float(row["epoch_ms"]) for row in rows if (row["graph"], row["model"]) == (graph, model)}
        size = edges(next(row for row in rows if row["graph"] == graph))
        cells = (pair(of[alone], of[ours]) for alone, ours in (("pyg", "flag"), ("dgl", "dgl-flag")))
        body.append([f"{model.upper()}, {graph}, {size}", *cells])
    return markdown(["an epoch, alone / gnnaccel, ms", "PyG", "DGL"], body) + source(name, 2)


def cpu_compiled() -> list[str]:
    name = "epochs_compiled_epyc.csv"
    rows = read(name)[1]
    sides = {"pyg": "PyG", "compiled": "PyG compiled", "flag": "gnnaccel", "compiled-flag": "gnnaccel compiled"}
    body = [
        [model, *(epochs_cell(rows, side, "pyg", model=model) for side in sides)] for model in unique(rows, "model")
    ]
    return markdown(["epoch, ms", *sides.values()], body) + source(name)


def cuda_compiled() -> list[str]:
    sides = {"compiled": "PyG compiled", "compiled-flag": "gnnaccel compiled", "reduced-flag": "with reduce-overhead"}
    columns = ["epoch, ms", *sides.values(), "peak, MiB (PyG / gnnaccel)", "compiling, CPU seconds"]
    lines: list[str] = []
    for name in ("compiled_h100.csv", "compiled_amazon_h100.csv", "compiled_h200.csv"):
        measured = [row for row in read(name)[1] if row["epoch_ms"]]
        body = []
        for graph, model in dict.fromkeys((row["graph"], row["model"]) for row in measured):
            own = {row["side"]: row for row in measured if (row["graph"], row["model"]) == (graph, model)}
            cells = [epochs_cell(list(own.values()), side, "compiled", graph=graph, model=model) for side in sides]
            alone = [short(float(row["epoch_ms"])) if row else "" for row in map(own.get, sides)]
            pairs = [own[side] for side in ("compiled", "compiled-flag") if side in own]
            both = [" / ".join(short(float(row[key])) for row in pairs) for key in ("peak_mib", "compile_cpu_s")]
            body.append([f"{graph}: {model}", *(cell or time for cell, time in zip(cells, alone, strict=True)), *both])
        lines += [*markdown(columns, body), *source(name, 2), ""]
    return lines[:-1]


def cuda_flag() -> list[str]:
    name = "epochs_h200.csv"
    rows = read(name)[1]
    graphs = unique(rows, "graph")
    body = [
        [model, *(epochs_pair(rows, graph, model, "pyg", "flag") for graph in graphs)]
        for model in unique(rows, "model")
    ]
    return markdown(["PyG alone / gnnaccel, ms", *graphs], body) + source(name, 2)


def epochs_pair(rows: Rows, graph: str, model: str, alone: str, ours: str) -> str:
    times = {row["side"]: float(row["epoch_ms"]) for row in rows if (row["graph"], row["model"]) == (graph, model)}
    return pair(times[alone], times[ours])


def cuda_small() -> list[str]:
    name = "epochs_captured_h100.csv"
    rows = read(name)[1]
    sides = {"pyg": "PyG alone", "flag": "gnnaccel", "captured-flag": "gnnaccel, captured"}
    body = [
        [f"{graph}: {model}", *(epochs_cell(rows, side, "pyg", graph=graph, model=model) for side in sides)]
        for graph in unique(rows, "graph")
        for model in ("gcn", "sage", "gin", "gat", "gatv2", "transformer", "resgated")
    ]
    return markdown(["epoch, ms", *sides.values()], body) + source(name, 2)


def cuda_modules() -> list[str]:
    name = "epochs_modules_h200.csv"
    rows = read(name)[1]
    sides = {"pyg": "PyG alone", "modules-flag": "PyG, with GNNACCEL_CUDA_GRAPHS=1", "dgl-modules-flag": "DGL, with it"}
    body = [
        [f"{rows[0]['graph']}: {model}", *(epochs_cell(rows, side, "pyg", model=model) for side in sides)]
        for model in unique(rows, "model")
    ]
    return markdown(["epoch, ms", *sides.values()], body) + source(name, 2)


def cuda_large() -> list[str]:
    name = "epochs_arxiv_h200.csv"
    rows = read(name)[1]
    body = []
    for model in unique(rows, "model"):
        memory = [
            float(row["peak_mib"])
            for side in ("pyg", "flag")
            for row in rows
            if (row["model"], row["side"]) == (model, side)
        ]
        times = [epochs_cell(rows, side, "pyg", model=model) for side in ("pyg", "flag")]
        body.append([model, *times, pair(*memory)])
    columns = [f"{rows[0]['graph']}, {edges(rows[0])}", "PyG alone, ms", "gnnaccel", "peak memory, MiB"]
    return markdown(columns, body) + source(name, 2)


def cuda_layers() -> list[str]:
    name = "pyg_layers_h100.csv"
    rows = read(name)[1]
    shapes = {(row["device"], row["edges"]): f"{row['device']}, {edges(row)} edges" for row in rows}
    body = [
        [layer, *(_cell(rows, "alone_ms", "gnnaccel_ms", layer=layer, device=d, edges=e) for d, e in shapes)]
        for layer in unique(rows, "layer")
    ]
    return markdown(["alone / gnnaccel, ms", *shapes.values()], body) + source(name, 2)


def cuda_models() -> list[str]:
    names = {"gcn": "pyg_gcn_h200.csv", "agnn": "pyg_models_h200.csv"}
    rows = [row for model, name in names.items() for row in read(name)[1] if row["model"] == model and row["epoch_ms"]]
    sizes = {row["graph"]: row for row in sorted(rows, key=lambda row: int(row["edges"]))}
    body = [
        [f"{graph}, {edges(row)}", *(cell for model in names for cell in _over_formats(rows, graph, model))]
        for graph, row in sizes.items()
    ]
    columns = ["", "GCN, ms", "over PyG's quickest", "AGNN, ms", "over PyG's quickest"]
    return markdown(columns, body) + [line for name in names.values() for line in source(name, 2)]


def _over_formats(rows: Rows, graph: str, model: str) -> tuple[str, str]:
    """Times of PyG and of gnnaccel on edge_index, and how many times as fast it is as PyG's quickest format."""
    own = [row for row in rows if (row["graph"], row["model"]) == (graph, model)]
    times = {(row["side"], row["format"]): float(row["epoch_ms"]) for row in own}
    if ("flag", "edge_index") not in times or ("pyg", "edge_index") not in times:
        return "", ""
    ours, best = times["flag", "edge_index"], min(time for (side, _), time in times.items() if side == "pyg")
    return pair(times["pyg", "edge_index"], ours), f"{best / ours:.2f}x"


def cuda_kernels() -> list[str]:
    name = "cuda_kernels_h200.csv"
    rows = read(name)[1]
    widths = unique(rows, "width")
    body = []
    for op, words in (("spmm", "SpMM, weighted"), ("sddmm", "SDDMM, dot products")):
        for column, how in (("vs_best", "as given"), ("prepared_vs_best", "prepared")):
            cells = []
            for width in widths:
                ratios = [
                    float(row[column]) for row in rows if (row["op"], row["width"]) == (op, width) and row[column]
                ]
                mean = statistics.geometric_mean(ratios)
                cells.append(f"{mean:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
            body.append([f"{words}, {how}", *cells])
    return markdown(["", *(f"{width} features" for width in widths)], body) + source(name)


def cuda_grid() -> list[str]:
    name = "grid_h100.csv"
    cells = grid_table.read(RESULTS / name)[1]
    body = []
    for op in dict.fromkeys(cell[1] for cell in cells):
        found = grid_table.gains(cells, "vs_best", op)
        orders = grid_table.gains(cells, "prepared_vs_given", op)
        mean = f"{statistics.geometric_mean(found.values()):.2f}x"
        slower = sum(gain * grid_table.SLOWER < 1 for gain in found.values())
        worse = sum(gain * grid_table.WORSE < 1 for gain in orders.values())
        gain = f"{statistics.geometric_mean(orders.values()):.2f}x" if orders else ""
        body.append([op, str(len(found)), mean, str(slower), gain, f"{worse} of {len(orders)}"])
    columns = ["", "cells", "of the best peer", "slower by more than 3 %", "by an order", "slower by more than 2 %"]
    lines = markdown(columns, body)
    for column, title in (("vs_best", "Least beside the best peer"), ("prepared_vs_given", "Least by an order")):
        worst = list(grid_table.gains(cells, column).items())[:12]
        said = "; ".join(f"{' '.join(cell)} {gain:.2f}x" for cell, gain in worst)
        lines += ["", f"{title}: {said}."]
    graphs = len({cell[0] for cell in cells})
    return [*lines, "", f"{len(cells)} cells of {graphs} graphs. " + source(name)[1]]


def relational() -> list[str]:
    lines: list[str] = []
    for name, where in (
        ("relations_epyc.csv", "CPU, 1 thread"),
        ("relations_h200.csv", "H200"),
        ("relations_h100.csv", "H100"),
    ):
        rows = [row for row in read(name)[1] if row["alone_ms"]]
        body = [
            [
                f"{row['framework']} {row['row']}",
                row["relations"],
                edges(row),
                pair(float(row["alone_ms"]), float(row["gnnaccel_ms"])),
            ]
            for row in rows
        ]
        lines += [*markdown([where, "relations", "edges", "alone / gnnaccel, ms"], body), *source(name), ""]
    return lines[:-1]


def allocator() -> list[str]:
    names = ("cpu_plans_epyc.csv", "cpu_plans_kept_epyc.csv")
    as_it_is, kept = (
        {(row["graph"], row["width"]): row for row in read(name)[1] if row["way"] == "plain"} for name in names
    )
    body = [
        [
            f"{key[0]}, {edges(row)}, {key[1]} features",
            row["faults"],
            short(float(row["ms"])),
            short(float(kept[key]["ms"])),
        ]
        for key, row in as_it_is.items()
    ]
    columns = ["one sum", "pages asked for", "ms", "ms, freed memory kept"]
    return markdown(columns, body) + source(names[0]) + source(names[1], 3)


BLOCKS: dict[str, Callable[[], list[str]]] = {
    "cpu-layers": cpu_layers,
    "cpu-layers-avx512": cpu_layers_avx512,
    "cpu-memory": cpu_memory,
    "cpu-small": cpu_small,
    "cpu-every-layer": functools.partial(every_layer, "epyc"),
    "cuda-every-layer": functools.partial(every_layer, "h100"),
    "cpu-models": cpu_models,
    "cpu-compiled": cpu_compiled,
    "cuda-compiled": cuda_compiled,
    "cuda-flag": cuda_flag,
    "cuda-small": cuda_small,
    "cuda-modules": cuda_modules,
    "cuda-large": cuda_large,
    "cuda-layers": cuda_layers,
    "cuda-models": cuda_models,
    "cuda-kernels": cuda_kernels,
    "cuda-grid": cuda_grid,
    "relational": relational,
    "allocator": allocator,
}


def filled(page: str) -> str:
    """The page with every block as its table gives it.

    Raises
    ------
    ValueError
        If the page lacks a block or has one that is not known.
    """
    pattern = re.compile(r"<!-- summary\.py (\S+): begin -->\n.*?<!-- summary\.py \1: end -->", re.DOTALL)
    found = [match[1] for match in pattern.finditer(page)]
    if sorted(found) != sorted(BLOCKS):
        raise ValueError(f"expected the blocks {', '.join(sorted(BLOCKS))}, got {', '.join(sorted(found))}")

    def block(match: re.Match) -> str:
        lines = BLOCKS[match[1]]()
        return "\n".join([f"<!-- summary.py {match[1]}: begin -->", *lines, f"<!-- summary.py {match[1]}: end -->"])

    return pattern.sub(block, page)


# The chart of README.md


def bars() -> dict[str, list[tuple[str, float, float]]]:
    """Panels of the chart: label, time alone and with gnnaccel in ms."""
    layers = read("cpu_layers_pubmed_epyc.csv")[1] + read("cpu_layers_epyc.csv")[1]
    small, large, models = (read(f"epochs_{name}.csv")[1] for name in ("h200", "arxiv_h200", "modules_h200"))

    def epoch(rows: Rows, label: str, graph: str, model: str, side: str) -> tuple[str, float, float]:
        times = {row["side"]: float(row["epoch_ms"]) for row in rows if (row["graph"], row["model"]) == (graph, model)}
        return label, times["pyg"], times[side]

    def layer(label: str, graph: str, framework: str, row: str) -> tuple[str, float, float]:
        found = next(r for r in layers if (r["graph"], r["framework"], r["row"]) == (graph, framework, row))
        return label, float(found["alone_ms"]), float(found["gnnaccel_ms"])

    cpu = []
    for graph, words in (
        ("pubmed_nofeat", "PubMed, 89k edges: "),
        ("amazon_computers", "amazon_computers, 492k edges: "),
        ("power-law", "power-law, 2M edges: "),
    ):
        cpu += [
            layer(f"{words}PyG GCN", graph, "PyG", "GCNConv"),
            layer("PyG SAGE", graph, "PyG", "SAGEConv mean"),
            layer("PyG GAT", graph, "PyG", "GATConv 4x16"),
            layer("DGL GCN", graph, "DGL", "GraphConv"),
            layer("DGL GAT", graph, "DGL", "GATConv 4x16"),
        ]
    gpu = [
        epoch(small, "Cora, 11k edges: PyG GCN", "cora", "gcn", "flag"),
        epoch(small, "PyG SAGE", "cora", "sage", "flag"),
        epoch(small, "PyG GAT", "cora", "gat", "flag"),
        epoch(models, "the same, as CUDA graphs: PyG GCN", "cora", "gcn", "modules-flag"),
        epoch(models, "PyG SAGE", "cora", "sage", "modules-flag"),
        epoch(models, "PyG GAT", "cora", "gat", "modules-flag"),
        epoch(large, "arxiv-like, 2.3M edges: PyG GCN", "arxiv-like", "gcn", "flag"),
        epoch(large, "PyG SAGE", "arxiv-like", "sage", "flag"),
        epoch(large, "PyG GAT", "arxiv-like", "gat", "flag"),
    ]
    return {"CPU, AMD EPYC: a layer, forward and backward": cpu, "GPU, NVIDIA H200: an epoch of training": gpu}


def draw(path: Path) -> None:
    """Write the chart: SVG with its text as text, the same bytes for the same tables."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "speedups", "font.size": 9}):
        panels = bars()
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        for axes, (title, found) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            gaps = np.cumsum([0, *(": " in label for label, _, _ in found[1:])])  # a graph's first bar names it
            places = np.arange(len(found)) + 0.6 * gaps
            ratios = [alone / ours for _, alone, ours in found]
            axes.barh(places, [ratio - 1 for ratio in ratios], left=1, color="#0072B2", height=0.7)
            for place, ratio, (_, alone, ours) in zip(places, ratios, found, strict=True):
                text = f"{ratio:.1f}x ({short(alone)} to {short(ours)} ms)"
                axes.annotate(text, (max(ratio, 1), place), (4, 0), textcoords="offset points", va="center", fontsize=8)
            axes.set(xscale="log", xlim=(0.7, 500), title=title, xlabel="times as fast as the framework alone")
            axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
            axes.minorticks_off()
            axes.set_yticks(places, [label for label, _, _ in found])
            axes.axvline(1, color="0.4", linewidth=0.8)
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None, "Title": "Speedups over the framework alone"})
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    new = filled(page)
    if check:
        sys.exit(f"{PAGE} is not what the tables give: run python benchmarks/summary.py" if new != page else 0)
    PAGE.write_text(new, encoding="utf-8")
    draw(CHART)


if __name__ == "__main__":
    main()
