"""What the documentation says of speed, from the tables in benchmarks/results: docs/performance.md, docs/speedups.svg.

    python benchmarks/summary.py            # write both
    python benchmarks/summary.py --check    # exit code 1 if docs/performance.md is not what the tables give

Each block of docs/performance.md between `<!-- summary.py NAME: begin -->` and `end` is a function of summary_cpu.py or
summary_gpu.py, so that no figure in it is typed by hand; below it stand its table, and the machine, commit and command
of that table's head.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import summary_cpu
import summary_gpu
from summary_tables import ROOT, Rows, read, short

PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "speedups.svg"

BLOCKS: dict[str, Callable[[], list[str]]] = {
    "cpu-layers": summary_cpu.cpu_layers,
    "cpu-layers-avx512": summary_cpu.cpu_layers_avx512,
    "cpu-memory": summary_cpu.cpu_memory,
    "cpu-small": summary_cpu.cpu_small,
    "cpu-every-layer": functools.partial(summary_cpu.every_layer, "epyc"),
    "cpu-new-edges": functools.partial(summary_cpu.every_layer, "epyc", ("new_tiny_", "new_small_")),
    "cuda-every-layer": functools.partial(summary_cpu.every_layer, "h100"),
    "cpu-models": summary_cpu.cpu_models,
    "cpu-compiled": summary_cpu.cpu_compiled,
    "cuda-compiled": summary_gpu.cuda_compiled,
    "cuda-flag": summary_gpu.cuda_flag,
    "cuda-small": summary_gpu.cuda_small,
    "cuda-modules": summary_gpu.cuda_modules,
    "cuda-large": summary_gpu.cuda_large,
    "cuda-layers": summary_gpu.cuda_layers,
    "cuda-models": summary_gpu.cuda_models,
    "cuda-kernels": summary_gpu.cuda_kernels,
    "cuda-grid": summary_gpu.cuda_grid,
    "relational": summary_gpu.relational,
    "allocator": summary_gpu.allocator,
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
