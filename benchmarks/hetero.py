"""Many edge types on the CPU, the framework alone and on gnnaccel, forward + backward, in one process.

    python benchmarks/hetero.py --csv out.csv
    python benchmarks/hetero.py --rows HeteroConv --repeat 30 --threads 2

DGL: multi_update_all (mean of each type, sum across) and HeteroGraphConv over 30 relations between 5 node types. PyG:
HeteroConv of 8 SAGEConv between 4. `before` is gnnaccel with one layer after the other, as it runs those that it
cannot take together. The sides take turns, and the least of --repeat times is compared; each row is checked first.
"""

from __future__ import annotations

import argparse
import copy
import csv
import sys
import time
import warnings
from collections.abc import Callable

import torch
from cpu_layers import TOLERANCE, versions

from gnnaccel import dgl_backend, pyg_backend

COLUMNS = ("row", "nodes_per_type", "edges_per_relation", "width", "threads",
           "alone_ms", "gnnaccel_ms", "before_ms", "speedup", "error")  # fmt: skip
SIZES = ((100, 400, 16), (2_000, 500, 64), (2_000, 3_300, 64), (10_000, 3_300, 64), (5_000, 50_000, 64))
PYG_SIZES = ((100, 400, 16), (2_500, 4_000, 64), (25_000, 4_000, 64), (10_000, 40_000, 64), (100_000, 40_000, 64))
Side = tuple[Callable[[], None], Callable[[], list]]


def relations(count: int, types: int) -> list[tuple[str, str, str]]:
    return [(f"n{i % types}", f"r{i}", f"n{(i + i // types) % types}") for i in range(count)]


def ends(nodes: int, edges: int, seed: int) -> torch.Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def step(outputs: Callable[[], list], inputs: list) -> Callable[[], list]:
    def run():
        out = outputs()
        return [*[o.detach() for o in out], *torch.autograd.grad(out, inputs, [torch.ones_like(o) for o in out])]

    return run


def features(nodes: int, width: int, types: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"n{i}": torch.randn(nodes, width, requires_grad=True) for i in range(types)}


def dgl_sides(what: str, nodes: int, edges: int, width: int) -> dict[str, Side]:
    dgl_backend.shim()
    import dgl

    dgl.utils.set_num_threads(torch.get_num_threads())
    types = relations(30, 5)
    graph = dgl.heterograph(
        {r: tuple(ends(nodes, edges, i)) for i, r in enumerate(types)}, {f"n{i}": nodes for i in range(5)}
    )
    x, inputs = features(nodes, width, 5), []
    if what == "multi_update_all":
        fn = dgl.function

        def outputs():
            for name, value in x.items():
                graph.nodes[name].data["h"] = value
            pair = (fn.copy_u("h", "m"), fn.mean("m", "o"))
            graph.multi_update_all(dict.fromkeys(types, pair), "sum")
            return [graph.nodes[n].data.pop("o") for n in graph.ntypes]
    else:
        make = {"GraphConv": dgl.nn.GraphConv, "SAGEConv": lambda a, b: dgl.nn.SAGEConv(a, b, "mean")}[what]
        conv = dgl.nn.HeteroGraphConv({name: make(width, width) for _, name, _ in types})
        inputs = list(conv.parameters())

        def outputs():
            return list(conv(graph, x).values())

    run = step(outputs, [*x.values(), *inputs])
    return {"alone": (dgl_backend.disable, run), "gnnaccel": (dgl_backend.enable, run), "before": (_apart, run)}


def _apart() -> None:
    """The plug-in without its methods that take edge types together."""
    import dgl

    dgl_backend.disable()
    methods = [(dgl.DGLGraph, "multi_update_all"), (dgl.nn.HeteroGraphConv, "forward")]
    own = [getattr(*method) for method in methods]
    dgl_backend.enable()
    for (holder, name), function in zip(methods, own, strict=True):
        setattr(holder, name, function)


def pyg_sides(what: str, nodes: int, edges: int, width: int) -> dict[str, Side]:
    from torch_geometric import nn

    from gnnaccel.pyg_backend import hetero_conv

    types, x = relations(8, 4), features(nodes, width, 4)
    torch.manual_seed(1)
    plain = nn.HeteroConv({r: getattr(nn, what)(width, width) for r in types})
    sides = {}
    for name, switch in (("alone", _nothing), ("gnnaccel", hetero_conv.enable), ("before", hetero_conv.disable)):
        model = copy.deepcopy(plain)
        model = model if name == "alone" else pyg_backend.accelerate(model)
        given = {r: ends(nodes, edges, i) for i, r in enumerate(types)}
        run = step(lambda m=model, e=given: list(m(x, e).values()), [*x.values(), *model.parameters()])
        sides[name] = switch, run
    return sides


def _nothing() -> None:
    pass


ROWS = {
    "DGL multi_update_all, 30 relations": (dgl_sides, "multi_update_all", SIZES),
    "DGL HeteroGraphConv of 30 GraphConv": (dgl_sides, "GraphConv", SIZES),
    "DGL HeteroGraphConv of 30 SAGEConv": (dgl_sides, "SAGEConv", SIZES),
    "PyG HeteroConv of 8 SAGEConv": (pyg_sides, "SAGEConv", PYG_SIZES),
    "PyG HeteroConv of 8 GraphConv": (pyg_sides, "GraphConv", PYG_SIZES),
}


def measure(row: str, size: tuple, repeat: int) -> dict:
    build, what, _ = ROWS[row]
    sides, results = build(what, *size), {}
    for name, (switch, run) in sides.items():
        switch()
        run()
        results[name] = run()
    pairs = zip(results["alone"], results["gnnaccel"], strict=True)
    error = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-9)) for a, b in pairs)
    times = dict.fromkeys(sides, float("inf"))
    for _ in range(repeat):
        for name, (switch, run) in sides.items():
            switch()
            start = time.perf_counter()
            run()
            times[name] = min(times[name], (time.perf_counter() - start) * 1e3)
    sides["alone"][0]()
    ms = {f"{name}_ms": value for name, value in times.items()}
    values = (row, *size, torch.get_num_threads(), *ms.values(), times["alone"] / times["gnnaccel"], error)
    return dict(zip(COLUMNS, values, strict=True))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="TEXT", help="only rows with one of these in the name"
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", metavar="OUT")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    results = []
    print(versions())
    for row, (_, _, sizes) in ROWS.items():
        if not any(text.lower() in row.lower() for text in options.rows):
            continue
        for size in sizes:
            r = measure(row, size, options.repeat)
            results.append(r)
            sides = "  ".join(f"{name} {r[f'{name}_ms']:8.2f}" for name in ("alone", "gnnaccel", "before"))
            print(f"{row:36} {size!s:22} {sides} ms  {r['speedup']:5.2f}x  error {r['error']:.0e}", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            file.write(f"# {versions()}\n")
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(results)
    return 0 if all(r["error"] <= TOLERANCE for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
