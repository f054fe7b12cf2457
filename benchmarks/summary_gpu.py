"""The blocks of docs/performance.md on GPUs, and of what both run on (summary.py)."""

from __future__ import annotations

import statistics

import grid_table
from summary_tables import RESULTS, Rows, cell, edges, epochs_cell, markdown, pair, read, short, source, unique


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
        [layer, *(cell(rows, "alone_ms", "gnnaccel_ms", layer=layer, device=d, edges=e) for d, e in shapes)]
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
    name = "grid_h200.csv"
    cells = grid_table.read(RESULTS / name)[1]
    body = []
    for op in dict.fromkeys(row[1] for row in cells):
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
