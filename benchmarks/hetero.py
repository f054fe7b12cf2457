"""Many edge types, the framework alone and on gnnaccel, forward + backward, in one process.

    python benchmarks/hetero.py --csv out.csv
    python benchmarks/hetero.py --rows HeteroConv --repeat 30 --threads 2
    python benchmarks/hetero.py --clock process --csv benchmarks/results/hetero_MACHINE.csv    (cores with other work)
    python benchmarks/hetero.py --device cuda --repeat 20 --csv benchmarks/results/hetero_MACHINE.csv

DGL: multi_update_all (mean of each type, sum across) and HeteroGraphConv over 30 relations between 5 node types. PyG:
HeteroConv of 8 layers between 4 types, two layers that to_hetero() has copied for each of these, HGTConv and HANConv
of 64 features and 4 heads. `before` is gnnaccel with one layer after the other, as it runs those that it cannot take
together. The sides take turns, in another order each time, and the least of --repeat times is compared; on tiny graphs
and on CUDA each side runs once before it is timed, as in a training loop, where what it calls has been called before.
On CUDA: DGL "alone" is DGL on torch's own kernels (GNNACCEL_DGL_KERNELS=torch), as its CPU wheel has none.
gnnaccel_gpu_ms is the time on a GPU that was kept busy until all was launched: what a faster host would leave.

Each row is checked first, against the framework's results in float64: `error` is gnnaccel's distance from these,
`alone_error` the framework's own, and `error_float64` gnnaccel's in float64. A row fails for an `error` that neither
TOLERANCE nor `alone_error` explains: a ReLU of a value that rounds to either side of zero passes a gradient or not, and
on large graphs some of millions do, in the framework as in gnnaccel.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
import warnings
from collections.abc import Callable

import torch
from cpu_layers import TOLERANCE, versions

from gnnaccel import dgl_backend, pyg_backend
from gnnaccel.dgl_backend.compat import KERNELS

COLUMNS = ("row", "nodes_per_type", "edges_per_relation", "width", "threads",
           "alone_ms", "gnnaccel_ms", "before_ms", "speedup", "error", "alone_error", "error_float64",
           "gnnaccel_gpu_ms")  # fmt: skip
SIZES = ((100, 400, 16), (2_000, 500, 64), (2_000, 3_300, 64), (10_000, 3_300, 64), (5_000, 50_000, 64))
PYG_SIZES = ((100, 400, 16), (2_500, 4_000, 64), (25_000, 4_000, 64), (10_000, 40_000, 64), (100_000, 40_000, 64))
CUDA_SIZES = ((100, 400, 16), (10_000, 4_000, 64), (10_000, 40_000, 64), (100_000, 40_000, 64))
TINY = (20, 60, 16)
DEVICE, CLOCK = "cpu", time.perf_counter
TOLERANCE_FLOAT64 = 1e-9
Side = tuple[Callable[[], None], Callable[[], list]]


def relations(count: int, types: int) -> list[tuple[str, str, str]]:
    return [(f"n{i % types}", f"r{i}", f"n{(i + i // types) % types}") for i in range(count)]


def ends(nodes: int, edges: int, seed: int) -> torch.Tensor:
    return torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def step(outputs: Callable[[], list], inputs: list) -> Callable[[], list]:
    def run():
        out = outputs()
        ones = [torch.ones_like(o) for o in out]
        grads = torch.autograd.grad(out, inputs, ones, allow_unused=True)
        return [*[o.detach() for o in out], *(g for g in grads if g is not None)]

    return run


def features(nodes: int, width: int, types: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"n{i}": torch.randn(nodes, width).to(DEVICE, dtype).requires_grad_() for i in range(types)}


def dgl_sides(what: str, nodes: int, edges: int, width: int, dtype: torch.dtype) -> dict[str, Side]:
    dgl_backend.shim()
    import dgl

    dgl.utils.set_num_threads(torch.get_num_threads())
    types = relations(30, 5)
    _dgl_on()
    pairs = {r: tuple(ends(nodes, edges, i).cpu()) for i, r in enumerate(types)}
    graph = dgl.heterograph(pairs, {f"n{i}": nodes for i in range(5)}).to(DEVICE)
    x, inputs = features(nodes, width, 5, dtype), []
    if what == "multi_update_all":
        fn = dgl.function

        def outputs():
            for name, value in x.items():
                graph.nodes[name].data["h"] = value
            pair = (fn.copy_u("h", "m"), fn.mean("m", "o"))
            graph.multi_update_all(dict.fromkeys(types, pair), "sum")
            return [graph.nodes[n].data.pop("o") for n in graph.ntypes]
    else:
        make = {
            "GraphConv": dgl.nn.GraphConv,
            "SAGEConv": lambda a, b: dgl.nn.SAGEConv(a, b, "mean"),
            "GATConv": lambda a, b: dgl.nn.GATConv(a, b, 1, allow_zero_in_degree=True),
            "GINConv": lambda a, b: dgl.nn.GINConv(torch.nn.Linear(a, b)),
        }[what]
        torch.manual_seed(1)
        conv = dgl.nn.HeteroGraphConv({name: make(width, width) for _, name, _ in types}).to(DEVICE, dtype)
        inputs = list(conv.parameters())

        def outputs():
            return list(conv(graph, x).values())

    run = step(outputs, [*x.values(), *inputs])
    return {"alone": (_dgl_off, run), "gnnaccel": (_dgl_on, run), "before": (_apart, run)}


def _dgl_on(kernels: str = "") -> None:
    os.environ[KERNELS] = kernels
    dgl_backend.disable()
    dgl_backend.enable()


def _dgl_off() -> None:
    dgl_backend.disable()
    if DEVICE == "cuda":
        _dgl_on("torch")


def _apart() -> None:
    """The plug-in without its methods that take edge types together."""
    import dgl

    os.environ[KERNELS] = ""
    dgl_backend.disable()
    methods = [(dgl.DGLGraph, "multi_update_all"), (dgl.nn.HeteroGraphConv, "forward")]
    own = [getattr(*method) for method in methods]
    dgl_backend.enable()
    for (holder, name), function in zip(methods, own, strict=True):
        setattr(holder, name, function)


def pyg_sides(what: str, nodes: int, edges: int, width: int, dtype: torch.dtype) -> dict[str, Side]:
    types, x = relations(8, 4), features(nodes, width, 4, dtype)
    weights = {r: torch.rand(edges).to(DEVICE, dtype) for r in types} if what.endswith("weighted") else None
    sides = {}
    for name, switch in (("alone", _nothing), ("gnnaccel", _pyg_on), ("before", _pyg_apart)):
        model = pyg_model(what, width, list(x), types).to(DEVICE)
        model = model if name == "alone" else pyg_backend.accelerate(model)
        given = {r: ends(nodes, edges, i) for i, r in enumerate(types)}
        more = {} if weights is None else {"edge_weight_dict": weights}

        def outputs(m=model, e=given, more=more, x=x):
            results = m(x) if what == "HeteroDictLinear" else m(x, e, **more)
            return [out for out in results.values() if out is not None]

        torch.manual_seed(2)
        with torch.no_grad():  # layers that find their widths, with the same numbers in every dtype
            single = {name: {r: w.float() for r, w in values.items()} for name, values in more.items()}
            outputs(x={kind: value.float() for kind, value in x.items()}, more=single)
        model.to(dtype)
        used = [*x.values(), *(p for p in model.parameters() if p.requires_grad)]
        sides[name] = switch, step(outputs, used)
    return sides


def _pyg_on() -> None:
    from gnnaccel.pyg_backend import hetero_conv, to_hetero

    hetero_conv.enable()
    to_hetero.enable()


def _pyg_apart() -> None:
    from gnnaccel.pyg_backend import hetero_conv, to_hetero

    hetero_conv.disable()
    to_hetero.disable()


def pyg_model(what: str, width: int, names: list, types: list) -> torch.nn.Module:
    from torch_geometric import nn

    torch.manual_seed(1)
    if what in ("HGTConv", "HANConv"):
        return getattr(nn, what)(width, width, (names, types), heads=4)
    if what == "HeteroDictLinear":
        return nn.HeteroDictLinear(width, width, types=names)
    if what.startswith("to_hetero"):
        two = Two(getattr(nn, what.split()[1]), width)
        if what.startswith("to_hetero_with_bases"):
            return nn.to_hetero_with_bases(two, (names, types), num_bases=3, in_channels={"x": width})
        return nn.to_hetero(two, (names, types))
    return nn.HeteroConv({r: pyg_layer(what.split()[0], width) for r in types})


def pyg_layer(name: str, width: int):
    from torch_geometric import nn

    if name == "GINConv":
        return nn.GINConv(torch.nn.Linear(width, width))
    return getattr(nn, name)(
        (width, width), width, **({"add_self_loops": False} if name in ("GATConv", "GATv2Conv") else {})
    )


class Two(torch.nn.Module):
    """What to_hetero() transforms."""

    def __init__(self, layer, width: int):
        super().__init__()
        self.first, self.last = (pyg_layer(layer.__name__, width) for _ in range(2))

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


def _nothing() -> None:
    pass


ROWS = {
    "DGL multi_update_all, 30 relations": (dgl_sides, "multi_update_all", SIZES),
    "DGL HeteroGraphConv of 30 GraphConv": (dgl_sides, "GraphConv", SIZES),
    "DGL HeteroGraphConv of 30 SAGEConv": (dgl_sides, "SAGEConv", SIZES),
    "DGL HeteroGraphConv of 30 GATConv": (dgl_sides, "GATConv", SIZES),
    "DGL HeteroGraphConv of 30 GINConv": (dgl_sides, "GINConv", SIZES),
    "PyG HeteroConv of 8 SAGEConv": (pyg_sides, "SAGEConv", PYG_SIZES),
    "PyG HeteroConv of 8 GraphConv": (pyg_sides, "GraphConv", PYG_SIZES),
    "PyG HeteroConv of 8 GraphConv, edge weights": (pyg_sides, "GraphConv weighted", PYG_SIZES),
    "PyG HeteroConv of 8 GATConv": (pyg_sides, "GATConv", PYG_SIZES),
    "PyG HeteroConv of 8 GATv2Conv": (pyg_sides, "GATv2Conv", PYG_SIZES[:4]),
    "PyG HeteroConv of 8 TransformerConv": (pyg_sides, "TransformerConv", PYG_SIZES[:4]),
    "PyG HeteroConv of 8 GINConv": (pyg_sides, "GINConv", PYG_SIZES),
    "PyG to_hetero of two SAGEConv": (pyg_sides, "to_hetero SAGEConv", PYG_SIZES[:4]),
    "PyG to_hetero of two GraphConv": (pyg_sides, "to_hetero GraphConv", PYG_SIZES[:4]),
    "PyG to_hetero of two GATConv": (pyg_sides, "to_hetero GATConv", PYG_SIZES[:4]),
    "PyG to_hetero of two GINConv": (pyg_sides, "to_hetero GINConv", PYG_SIZES[:4]),
    "PyG to_hetero_with_bases of two SAGEConv": (pyg_sides, "to_hetero_with_bases SAGEConv", PYG_SIZES[:4]),
    "PyG HeteroDictLinear": (pyg_sides, "HeteroDictLinear", PYG_SIZES[:4]),
    "PyG HGTConv": (pyg_sides, "HGTConv", PYG_SIZES[:4]),
    "PyG HANConv": (pyg_sides, "HANConv", PYG_SIZES[:4]),
}


def timed(run: Callable) -> float:
    """Milliseconds, what the GPU does included."""
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else _nothing
    synchronize()
    start = CLOCK()
    run()
    synchronize()
    return (CLOCK() - start) * 1e3


def timed_on_gpu(run: Callable) -> float:
    """Milliseconds between two events that stand behind 20 million cycles of waiting, during which `run` launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def checked(sides: dict[str, Side], calls: int) -> dict[str, list]:
    """The results of each side's last call; the framework's are the same from the first."""
    results = {}
    for name, (switch, run) in sides.items():
        switch()
        for _ in range(0 if name == "alone" else calls):
            run()
        results[name] = run()
    return results


def distance(found: list, exact: list) -> float:
    """The largest difference of any tensor, in its largest values."""
    pairs = list(zip(found, exact, strict=True))
    # The gradient of a bias of keys is nothing but rounding, as a softmax does not see it.
    rounding = 1e-5 * max(float(b.abs().max()) for _, b in pairs)
    counted = [(a.to(b), b) for a, b in pairs if max(float(t.abs().max()) for t in (a, b)) > rounding]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in counted)


def measure(row: str, size: tuple, repeat: int) -> dict:
    build, what, _ = ROWS[row]
    exact = build(what, *size, torch.float64)
    exact = checked({name: exact[name] for name in ("alone", "gnnaccel")}, 6)
    error_float64 = distance(exact["gnnaccel"], exact["alone"])
    reference = exact.pop("alone")
    del exact
    sides = build(what, *size, torch.float32)
    again = size[0] <= 100 or DEVICE == "cuda"
    # Graphs have to last before anything is made for them, tiny ones and all on CUDA the longest.
    results = checked(sides, 12 if again else 6)
    error, alone_error = (distance(results[name], reference) for name in ("gnnaccel", "alone"))
    del results, reference
    times = dict.fromkeys(sides, float("inf"))
    for turn in range(repeat):
        for name in [*sides][turn % 3 :] + [*sides][: turn % 3]:
            switch, run = sides[name]
            switch()
            if again:
                run()
            times[name] = min(times[name], timed(run))
    switch, run = sides["gnnaccel"]
    switch()
    on_gpu = min([timed_on_gpu(run) for _ in range(repeat)]) if DEVICE == "cuda" else ""
    sides["alone"][0]()
    ms = {f"{name}_ms": value for name, value in times.items()}
    values = (row, *size, torch.get_num_threads(), *ms.values(), times["alone"] / times["gnnaccel"])
    values += (error, alone_error, error_float64, on_gpu)
    return dict(zip(COLUMNS, values, strict=True))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="TEXT", help="only rows with one of these in the name"
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--most", type=int, default=100_000, help="nodes of a type, in the largest graphs")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--clock", choices=("wall", "process"), default="wall", help="process: CPU time of this process"
    )
    parser.add_argument("--csv", metavar="OUT")
    options = parser.parse_args(argv)
    global DEVICE, CLOCK
    DEVICE, CLOCK = options.device, time.process_time if options.clock == "process" else time.perf_counter
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    results = []
    found = versions()
    found += f"; {torch.cuda.get_device_name()}" if DEVICE == "cuda" else ""
    print(found)
    for row, (_, _, sizes) in ROWS.items():
        if not any(text.lower() in row.lower() for text in options.rows):
            continue
        for size in CUDA_SIZES if DEVICE == "cuda" else (TINY, *sizes):
            if size[0] > options.most:
                continue
            r = measure(row, size, options.repeat)
            results.append(r)
            sides = "  ".join(f"{name} {r[f'{name}_ms']:8.2f}" for name in ("alone", "gnnaccel", "before"))
            errors = " ".join(f"{r[name]:.0e}" for name in COLUMNS[-4:-1])
            print(f"{row:36} {size!s:22} {sides} ms  {r['speedup']:5.2f}x  errors {errors}", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            file.write(f"# {found}\n# python {' '.join(sys.argv)}\n")
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(results)
    return 0 if all(passes(r) for r in results) else 1


def passes(r: dict) -> bool:
    return r["error_float64"] <= TOLERANCE_FLOAT64 and (r["error"] <= TOLERANCE or r["alone_error"] > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
