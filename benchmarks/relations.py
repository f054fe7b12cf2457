"""Layers with a matrix per relation, a framework alone and on gnnaccel: forward and backward.

    python benchmarks/relations.py --fb15k237 DATA/fb15k237.npz --csv out.csv
    python benchmarks/relations.py --framework pyg --rows "RGCNConv, 8 bases"
    python benchmarks/relations.py --framework pyg --device cuda

10,000 nodes, 100,000 random edges (CUDA: ten times as many of both), 64 features, 20 relations; and as many edges of 5
to 200 relations. fb15k237: two layers of DGL's RelGraphConv, 32 wide, 8 bases, gradients of an embedding and
all parameters. Milliseconds, the least of --repeat steps of each side in turn in one process (one step of a framework's
that takes over two seconds); first_ms: the first step, which makes the structure. error: largest difference of the
results of the two sides over the largest result. On CUDA each side runs once before it is timed, as in a training loop,
where what it calls has been called before. mib: by how much a step raises the memory of a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from timing import provenance, save_table, shown

NODES, EDGES, WIDTH, RELATIONS, BASES = 10_000, 100_000, 64, 20, 8
HEADS, NODE_TYPES = 4, 4  # of HGTConv
DEVICE = "cpu"
COLUMNS = ("framework", "row", "relations", "edges", "alone_ms", "gnnaccel_ms", "ratio", "first_ms", "error")
COLUMNS += ("alone_mib", "gnnaccel_mib")


class Row(NamedTuple):
    framework: str
    name: str
    relations: int
    edges: int
    make: Callable[[], tuple[Callable, Callable]]  # steps: alone, accelerated


def _edges(relations: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    return index.to(DEVICE), torch.randint(0, relations, (EDGES,), generator=generator).to(DEVICE)


def _step(forward: Callable, leaves: list) -> torch.Tensor:
    for leaf in leaves:
        leaf.grad = None
    out = forward()
    out.sum().backward()
    return out.detach()


def _pyg(layer: str, relations: int, **options) -> tuple[Callable, Callable]:
    from torch_geometric import nn

    import gnnaccel

    index, types = _edges(relations)
    torch.manual_seed(0)
    x = torch.randn(NODES, WIDTH, device=DEVICE, requires_grad=True)
    alone = getattr(nn, layer)(WIDTH, WIDTH, relations, **options).to(DEVICE)
    ours = getattr(nn, layer)(WIDTH, WIDTH, relations, **options).to(DEVICE)
    ours.load_state_dict(alone.state_dict())
    ours = gnnaccel.accelerate(ours)
    sides = [functools.partial(_step, lambda c=c: c(x, index, types), [x, *c.parameters()]) for c in (alone, ours)]
    return sides[0], sides[1]


def _dgl(index: torch.Tensor, types: torch.Tensor, nodes: int, width: int, layers: int, *arguments):
    from gnnaccel import dgl_backend

    dgl_backend.shim()
    import dgl

    graph = dgl.graph((index[0], index[1]), num_nodes=nodes)
    torch.manual_seed(0)
    x = torch.randn(nodes, width, requires_grad=True)
    relations = int(types.max()) + 1
    if arguments == ("hgt",):
        kinds = torch.randint(0, NODE_TYPES, (nodes,), generator=torch.Generator().manual_seed(1))
        conv = dgl.nn.HGTConv(width, width // HEADS, HEADS, NODE_TYPES, relations, dropout=0.0)
        convs = torch.nn.ModuleList([conv])

        def forward():
            return conv(graph, x, kinds, types)

    else:
        convs = torch.nn.ModuleList([dgl.nn.RelGraphConv(width, width, relations, *arguments) for _ in range(layers)])

        def forward():
            h = x
            for conv in convs:
                h = torch.relu(conv(graph, h, types)) if conv is not convs[-1] else conv(graph, h, types)
            return h

    def side(enabled: bool):
        (dgl_backend.enable if enabled else dgl_backend.disable)()
        try:
            return _step(forward, [x, *convs.parameters()])
        finally:
            dgl_backend.disable()

    return functools.partial(side, False), functools.partial(side, True)


def rows(fb15k237: str | None) -> list[Row]:
    made = []
    kinds = {
        f"RGCNConv, {BASES} bases": ("RGCNConv", dict(num_bases=BASES)),
        "RGCNConv": ("RGCNConv", {}),
        "RGCNConv, 8 blocks": ("RGCNConv", dict(num_blocks=8)),
        "RGCNConv, max": ("RGCNConv", dict(aggr="max")),
        f"FastRGCNConv, {BASES} bases": ("FastRGCNConv", dict(num_bases=BASES)),
        "FastRGCNConv": ("FastRGCNConv", {}),
    }
    for name, (layer, options) in kinds.items():
        counts = (5, 20, 50, 200) if name in ("RGCNConv", f"RGCNConv, {BASES} bases") else (RELATIONS,)
        for count in counts:
            made.append(Row("PyG", name, count, EDGES, functools.partial(_pyg, layer, count, **options)))
    regularizers = {
        f"RelGraphConv, {BASES} bases": ("basis", BASES),
        "RelGraphConv": (),
        "RelGraphConv, 8 blocks": ("bdd", 8),
        f"HGTConv, {HEADS} heads": ("hgt",),
    }
    for name, arguments in regularizers.items():
        for count in (5, 20, 50, 200) if arguments == ("basis", BASES) else (RELATIONS,):
            make = functools.partial(_dgl, *_edges(count), NODES, WIDTH, 1, *arguments)
            made.append(Row("DGL", name, count, EDGES, make))
    if fb15k237:
        data = np.load(fb15k237, allow_pickle=False)
        index, types = (torch.from_numpy(data[k]).long() for k in ("edge_index", "edge_type"))
        make = functools.partial(_dgl, index, types, int(data["num_nodes"]), 32, 2, "basis", BASES)
        made.append(Row("DGL", "fb15k237, two layers", int(types.max()) + 1, index.shape[1], make))
    return made


def timed(step: Callable) -> tuple[float, torch.Tensor]:
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    out = step()
    synchronize()
    return (time.perf_counter() - start) * 1e3, out


def _again(step: Callable) -> float:
    if DEVICE == "cuda":
        step()
    return timed(step)[0]


def measure(row: Row, repeat: int) -> dict:
    alone, ours = row.make()
    first, got = timed(ours)
    least_alone, want = timed(alone)
    found: dict = dict(framework=row.framework, row=row.name, relations=row.relations, edges=row.edges)
    least_ours = float("inf")
    for _ in range(repeat):
        least_ours = min(least_ours, _again(ours))
        if least_alone < 2000:
            least_alone = min(least_alone, _again(alone))
    error = float((got - want).abs().max() / want.abs().max())
    found |= dict(alone_ms=least_alone, gnnaccel_ms=least_ours, ratio=least_alone / least_ours, first_ms=first)
    return found | dict(error=error)


def own_memory(row: Row, side: int) -> float:
    """MiB by which a side's first step raises the memory of this process at its peak."""
    step = row.make()[side]
    torch.randn(64, 64, requires_grad=True).mm(torch.randn(64, 64)).sum().backward()  # threads and tables of torch's
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is what there is now
    before = _peak_mib()
    step()
    return _peak_mib() - before


def _peak_mib() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("pyg", "dgl", "both"), default="both")
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="only rows of these names")
    parser.add_argument("--fb15k237", metavar="FILE", help="the file of the two-layer rows")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: of PyG's rows, without mib")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--commit", help="to name in the table, where git is not at hand")
    parser.add_argument("--csv", metavar="OUT")
    parser.add_argument("--own-memory", type=int, nargs=2, metavar=("ROW", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        global DEVICE, NODES, EDGES
        DEVICE, NODES, EDGES = "cuda", 10 * NODES, 10 * EDGES
        if options.framework != "pyg":
            parser.error("--device cuda: for --framework pyg; DGL alone has no CUDA here")
    every = rows(options.fb15k237)
    if options.own_memory:
        number, side = options.own_memory
        print(own_memory(every[number], side))
        return 0
    cells, wrong = [], 0
    for number, row in enumerate(every):
        if options.framework not in ("both", row.framework.lower()) or (options.rows and row.name not in options.rows):
            continue
        found = measure(row, options.repeat)
        for side, name in enumerate(("alone_mib", "gnnaccel_mib")):
            if DEVICE == "cpu" and found["alone_ms"] < 8000:
                given = ["--fb15k237", options.fb15k237] if options.fb15k237 else []
                command = [sys.executable, __file__, "--own-memory", str(number), str(side), *given]
                found[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        cells.append(shown(COLUMNS, found))
        wrong += found["error"] > 1e-4
    if options.csv:
        save_table(
            options.csv,
            provenance(options.commit, f"{options.threads} threads"),
            COLUMNS,
            cells,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
