"""Every layer of DGL and PyG that passes messages, alone and on gnnaccel: what loses is at the end.

    python benchmarks/every_layer.py --csv out.csv
    python benchmarks/every_layer.py --frameworks dgl --rows EdgeGAT NN --nodes 20000 --edges 100000
    python benchmarks/every_layer.py --device cuda
    python benchmarks/every_layer.py --device cuda --nodes 40000 --edges 400000 --all-ours   # whose messages are few
    python benchmarks/every_layer.py --new-edges                            # in a new tensor at each step

Forward and backward of one layer of 64 features, on a random graph. In each round the layer runs alone, on gnnaccel and
alone again: processor time on one thread of the CPU, wall time on CUDA. "ratio" is the median over the rounds of what
gnnaccel takes, of the mean of the two beside it; "again" is that of the layer alone to itself, which tells what a ratio
is worth; times are medians. What is prepared once per graph is not in them; with --new-edges each step is of edges that
nobody has seen, as batches, pools and point clouds make them, and all is in it. Outputs of both sides must agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from timing import provenance, relative_error, save_table
from torch import Tensor, nn

from gnnaccel import dgl_backend, pyg_backend
from gnnaccel.lower import bounds

COLUMNS = ("framework", "layer", "nodes", "edges", "alone_ms", "gnnaccel_ms", "ratio", "again", "error")
WIDTH, HEADS, TYPES = 64, 4, 4
TOLERANCE = 1e-3
# Seconds of a side in a round, if a step takes no more, and rounds.
SECONDS, ROUNDS = {"cpu": 0.02, "cuda": 0.004}, {"cpu": 7, "cuda": 40}
PREPARED = {"cpu": 12, "cuda": 60}  # steps of each side before it is timed; on CUDA lists come with the 51st call
Layer = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]  # makes it, and calls it


def inputs(nodes: int, edges: int, device: str, new_edges: bool = False) -> SimpleNamespace:
    """A graph without self-loops, its `edges()`, one tensor or a new one for each call, and features of all kinds."""
    torch.manual_seed(0)
    index = torch.randint(nodes, (2, edges))
    index[1] += (index[0] == index[1]) * (1 - 2 * (index[1] > 0).long())
    count = torch.bincount(index[1], minlength=nodes)
    made = SimpleNamespace(
        index=index,
        x=torch.randn(nodes, WIDTH),
        e=torch.randn(edges, WIDTH),
        few=torch.randn(edges, HEADS),
        weight=torch.rand(edges),
        kinds=torch.randint(TYPES, (edges,)),
        types=torch.randint(3, (nodes,)),
        place=torch.randn(nodes, 3),
        normal=nn.functional.normalize(torch.randn(nodes, 3)),
        batch=torch.arange(nodes) // 20,
        degrees=torch.bincount(count),
    )
    for name, value in vars(made).items():
        setattr(made, name, value.to(device))
    made.x.requires_grad_()
    made.new_edges, made.edges = new_edges, made.index.clone if new_edges else lambda: made.index
    return made


def mlp(wide: int = WIDTH, out: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(wide, out), nn.ReLU(), nn.Linear(out, out))


def pyg_layers(given: SimpleNamespace) -> dict[str, Layer]:
    from torch_geometric import nn as pyg

    w, x, e, few, edges = WIDTH, given.x, given.e, given.few, given.edges
    head = dict(out_channels=w // HEADS, heads=HEADS)
    kept = [half.contiguous() for half in given.index.chunk(2, 1)]
    halves = (lambda: [half.clone() for half in kept]) if given.new_edges else (lambda: kept)
    on_edges = [e.shape[0], x.shape[0]]
    of_edges = torch.randn(on_edges[1], w, device=x.device)
    scalers = (["mean", "max", "std"], ["identity", "amplification"], given.degrees)
    coordinates = few[:, :3].contiguous()
    found: dict[str, Layer] = {}

    def add(name: str, make: Callable, *others, call: Callable | None = None, **options) -> None:
        found[name] = make, call or (lambda layer: layer(x, edges(), *others, **options))

    for name in ("GCNConv", "SAGEConv", "GraphConv", "ResGatedGraphConv", "TAGConv", "LEConv", "ClusterGCNConv"):
        add(name, partial(getattr(pyg, name), w, w))
    for name in ("FiLMConv", "EGConv", "GeneralConv", "MixHopConv", "SGConv", "HypergraphConv"):
        add(name, partial(getattr(pyg, name), w, w))
    for name in ("GCNConv", "GraphConv"):
        add(f"{name} weights", partial(getattr(pyg, name), w, w), given.weight)
    for aggr in ("max", "std", "median", "softmax", "powermean"):
        add(f"SAGEConv {aggr}", lambda aggr=aggr: pyg.SAGEConv(w, w, aggr))
    add("SAGEConv mean+max+std", lambda: pyg.SAGEConv(w, w, ["mean", "max", "std"]))
    add("SAGEConv project", lambda: pyg.SAGEConv(w, w, project=True))
    add("GCNConv cached", lambda: pyg.GCNConv(w, w, cached=True))
    add("ChebConv", lambda: pyg.ChebConv(w, w, 3))
    add("GatedGraphConv", lambda: pyg.GatedGraphConv(w, 2))
    add("ResGatedGraphConv edges", lambda: pyg.ResGatedGraphConv(w, w, edge_dim=w), e)
    for name in ("GATConv", "GATv2Conv", "TransformerConv"):
        add(name, partial(getattr(pyg, name), w, **head))
        add(f"{name} edges", partial(getattr(pyg, name), w, edge_dim=HEADS, **head), few)
    add("TransformerConv beta", lambda: pyg.TransformerConv(w, beta=True, **head))
    add("AGNNConv", lambda: pyg.AGNNConv())
    add("GINConv", lambda: pyg.GINConv(mlp()))
    add("GINEConv", lambda: pyg.GINEConv(mlp()), e)
    add("GINEConv edge_dim", lambda: pyg.GINEConv(mlp(), edge_dim=HEADS), few)
    add("ARMAConv", lambda: pyg.ARMAConv(w, w, 2, 2))
    add("SSGConv", lambda: pyg.SSGConv(w, w, 0.1, 3))
    add("APPNP", lambda: pyg.APPNP(3, 0.1))
    add("LGConv", lambda: pyg.LGConv())
    add("SimpleConv", lambda: pyg.SimpleConv())
    add("MFConv", lambda: pyg.MFConv(w, w, 5))
    add("RGCNConv", lambda: pyg.RGCNConv(w, w, TYPES), given.kinds)
    add("RGCNConv bases", lambda: pyg.RGCNConv(w, w, TYPES, num_bases=2), given.kinds)
    add("FastRGCNConv", lambda: pyg.FastRGCNConv(w, w, TYPES), given.kinds)
    add("RGATConv", lambda: pyg.RGATConv(w, w // HEADS, TYPES, heads=HEADS), given.kinds)
    add("SignedConv", lambda: pyg.SignedConv(w, w, True), call=lambda layer: layer(x, *halves()))
    add("DNAConv", lambda: pyg.DNAConv(w, 4), call=lambda layer: layer(x.unsqueeze(1).expand(-1, 2, -1), edges()))
    add("PointNetConv", lambda: pyg.PointNetConv(mlp(w + 3), mlp()), call=lambda layer: layer(x, given.place, edges()))
    add("PointTransformerConv", lambda: pyg.PointTransformerConv(w, w), call=lambda m: m(x, given.place, edges()))
    add("PPFConv", lambda: pyg.PPFConv(mlp(w + 4), mlp()), call=lambda m: m(x, given.place, given.normal, edges()))
    add(
        "PointGNNConv",
        lambda: pyg.PointGNNConv(mlp(w, 3), mlp(w + 3), mlp()),
        call=lambda m: m(x, given.place, edges()),
    )
    add("GMMConv", lambda: pyg.GMMConv(w, w, 3, 2), coordinates)
    add("NNConv", lambda: pyg.NNConv(w, 16, nn.Linear(HEADS, w * 16)), few)
    add("CGConv", lambda: pyg.CGConv(w))
    add("CGConv edges", lambda: pyg.CGConv(w, HEADS), few)
    add("EdgeConv", lambda: pyg.EdgeConv(mlp(2 * w)))
    add("FeaStConv", lambda: pyg.FeaStConv(w, w, HEADS))
    hyper = dict(hyperedge_attr=of_edges)
    add("HypergraphConv attention", lambda: pyg.HypergraphConv(w, w, use_attention=True), **hyper)
    add("PNAConv", lambda: pyg.PNAConv(w, w, *scalers))
    add("PNAConv edges", lambda: pyg.PNAConv(w, w, *scalers, edge_dim=HEADS), few)
    add("GENConv", lambda: pyg.GENConv(w, w))
    add("GENConv edges", lambda: pyg.GENConv(w, w, edge_dim=HEADS), few)
    add("GENConv norm", lambda: pyg.GENConv(w, w, msg_norm=True))
    add("GCN2Conv", lambda: pyg.GCN2Conv(w, 0.1), call=lambda layer: layer(x, x, edges()))
    add("FAConv", lambda: pyg.FAConv(w), call=lambda layer: layer(x, x, edges()))
    add("SuperGATConv", lambda: pyg.SuperGATConv(w, **head).eval())
    add("EGConv sum+mean+max", lambda: pyg.EGConv(w, w, ["sum", "mean", "max"]))
    add("PDNConv", lambda: pyg.PDNConv(w, w, HEADS, 16), few)
    add("GeneralConv attention", lambda: pyg.GeneralConv(w, w, attention=True, heads=HEADS))
    heat = (given.types, given.kinds, few)
    add("HEATConv", lambda: pyg.HEATConv(w, w // HEADS, 3, TYPES, 8, HEADS, 8, heads=HEADS), *heat)
    add("GPSConv", lambda: pyg.GPSConv(w, pyg.GINConv(mlp()), heads=HEADS), given.batch)
    add("AntiSymmetricConv", lambda: pyg.AntiSymmetricConv(w))
    add("DirGNNConv", lambda: pyg.DirGNNConv(pyg.SAGEConv(w, w)))
    add("AttentiveFP", lambda: pyg.AttentiveFP(w, w, w, HEADS, 2, 2), few, given.batch)
    add("EdgeCNN", lambda: pyg.EdgeCNN(w, w, 2))
    add("GIN, three layers", lambda: pyg.GIN(w, w, 3, jk="cat"))
    return found


def dgl_layers(given: SimpleNamespace) -> dict[str, Layer]:
    dgl_backend.shim()
    import dgl
    from dgl.nn import pytorch as nets

    w, x, e, few = WIDTH, given.x, given.e, given.few
    g = dgl.graph(tuple(given.index), num_nodes=x.shape[0])
    g = dgl.add_self_loop(g)  # several layers refuse nodes without in-edges
    again = torch.arange(g.num_edges(), device=x.device) % e.shape[0]  # self-loops have the features of the first edges

    e, few, kinds = e[again], few[again], given.kinds[again]
    weight, coordinates = given.weight[again].view(-1, 1), few[:, :3].contiguous()
    head = (w, w // HEADS, HEADS)
    scalers = (["identity", "amplification"], 2.5)
    found: dict[str, Layer] = {}

    def add(name: str, make: Callable, *others, **options) -> None:
        found[name] = make, lambda layer: layer(g, x, *others, **options)

    add("GraphConv", lambda: nets.GraphConv(w, w))
    add("GraphConv weights", lambda: nets.GraphConv(w, w, norm="none"), edge_weight=weight)
    for kind in ("mean", "gcn", "pool"):
        add(f"SAGEConv {kind}", lambda kind=kind: nets.SAGEConv(w, w, kind))
    for kind in ("sum", "max"):
        add(f"GINConv {kind}", lambda kind=kind: nets.GINConv(nn.Linear(w, w), kind))
    add("GINEConv", lambda: nets.GINEConv(nn.Linear(w, w)), e)
    add("GATConv", lambda: nets.GATConv(*head))
    add("GATv2Conv", lambda: nets.GATv2Conv(*head))
    add("EdgeGATConv", lambda: nets.EdgeGATConv(w, w, *head[1:]), e)
    add("EGATConv", lambda: nets.EGATConv(w, w, w // HEADS, w // HEADS, HEADS), e)
    add("AGNNConv", lambda: nets.AGNNConv())
    add("DotGatConv", lambda: nets.DotGatConv(*head))
    add("TAGConv", lambda: nets.TAGConv(w, w))
    add("SGConv", lambda: nets.SGConv(w, w, k=2))
    add("APPNPConv", lambda: nets.APPNPConv(3, 0.1))
    add("ChebConv", lambda: nets.ChebConv(w, w, 2), [2.0])
    add("GCN2Conv", lambda: nets.GCN2Conv(w, 1), x)
    add("GatedGraphConv", lambda: nets.GatedGraphConv(w, w, 2, 1))
    add("GatedGraphConv types", lambda: nets.GatedGraphConv(w, w, 2, TYPES), kinds)
    add("GatedGCNConv", lambda: nets.GatedGCNConv(w, w, w), e)
    add("GMMConv", lambda: nets.GMMConv(w, w, 3, 2), coordinates)
    add("EdgeConv", lambda: nets.EdgeConv(w, w))
    add("NNConv", lambda: nets.NNConv(w, 16, nn.Linear(HEADS, w * 16)), few)
    add("CFConv", lambda: nets.CFConv(w, HEADS, w, w), few)
    add("EGNNConv", lambda: nets.EGNNConv(w, w, w, HEADS), given.place, few)
    add("PNAConv", lambda: nets.PNAConv(w, w, ["mean", "max", "sum"], *scalers))
    add("DGNConv", lambda: nets.DGNConv(w, w, ["dir1-av", "sum"], *scalers), eig_vec=given.place)
    add("RelGraphConv basis", lambda: nets.RelGraphConv(w, w, TYPES, "basis", TYPES), kinds)
    add("RelGraphConv bdd", lambda: nets.RelGraphConv(w, w, TYPES, "bdd", TYPES), kinds)
    add("HGTConv", lambda: nets.HGTConv(w, w // HEADS, HEADS, 3, TYPES, dropout=0.0), given.types, kinds)
    add("TWIRLSConv", lambda: nets.TWIRLSConv(w, w, w, 2))
    add("GroupRevRes", lambda: nets.GroupRevRes(nets.GraphConv(w // 2, w // 2), 2))
    return found


class Sides:
    """One layer alone and on gnnaccel, of the same parameters."""

    def __init__(self, framework: str, layer: Layer, given: SimpleNamespace):
        self._switched = framework == "dgl"  # for as long as a step takes; a layer of PyG's once and for all
        self._call, self._x = layer[1], given.x
        self._layers = []
        for _ in range(2):
            torch.manual_seed(0)
            self._layers.append(layer[0]().to(given.x.device))
        if not self._switched:
            self._layers[1] = pyg_backend.accelerate(self._layers[1])

    def _step(self, ours: bool) -> None:
        self._x.grad = None
        out = self._call(self._layers[ours])
        out = out[0] if isinstance(out, tuple) else out
        if self.out is None:
            self.out = out.detach().double()  # DGL's GroupRevRes frees it in the backward pass
        out.square().sum().backward()

    def round(self, ours: bool, steps: int) -> float:
        """Seconds of a step, of so many behind another; `out` is what the first one gave."""
        clock = time.perf_counter if self._x.is_cuda else time.process_time
        self.out: Tensor | None = None
        if ours and self._switched:
            dgl_backend.enable()
        try:
            self._step(ours)
            if self._x.is_cuda:
                torch.cuda.synchronize()
            start = clock()
            for _ in range(steps):
                self._step(ours)
            if self._x.is_cuda:
                torch.cuda.synchronize()
            return (clock() - start) / steps
        finally:
            if ours and self._switched:
                dgl_backend.disable()


def measured(sides: Sides, rounds: int, device: str) -> tuple[float, float, float, float, float]:
    """Seconds of a step alone and on gnnaccel, the two ratios, and how far outputs are apart."""
    outs, steps = [], 1
    for ours in (False, True):
        once = sides.round(ours, 1)
        outs.append(sides.out)
        sides.round(ours, max(1, min(PREPARED[device], int(3 / max(once, 1e-4)))))
        steps = max(steps, min(200, int(SECONDS[device] / max(sides.round(ours, 1), 1e-5))))
    times = [[sides.round(ours, steps) for ours in (False, True, False)] for _ in range(rounds)]
    alone, ours, _ = (statistics.median(each) for each in zip(*times, strict=True))
    ratio = statistics.median(2 * each / (before + after) for before, each, after in times)
    again = statistics.median(after / before for before, _, after in times)
    return alone, ours, ratio, again, relative_error(outs[1], outs[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", choices=("dgl", "pyg"), help="default: both, PyG alone on CUDA")
    parser.add_argument("--rows", nargs="+", metavar="PART", help="layers whose names contain one of these")
    parser.add_argument("--nodes", type=int, default=2800)
    parser.add_argument("--edges", type=int, default=5800)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, help="default: 7 on the CPU, 40 on CUDA")
    parser.add_argument("--all-ours", action="store_true", help="leave no messages to the framework for being few")
    parser.add_argument("--new-edges", action="store_true", help="in a new tensor at each step; of PyG alone")
    parser.add_argument("--commit", help="what is measured, where the folder is no clone")
    parser.add_argument("--csv", metavar="FILE")
    args = parser.parse_args()
    args.frameworks = args.frameworks or (["pyg"] if args.new_edges or args.device == "cuda" else ["dgl", "pyg"])
    if args.new_edges and "dgl" in args.frameworks:
        parser.error("--new-edges: expected PyG alone, whose layers are given edges, got --frameworks dgl")
    return args


def main() -> int:
    args = arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.all_ours:
        bounds.FEW_MESSAGES = {}
    given = inputs(args.nodes, args.edges, args.device, args.new_edges)
    rows, wrong = [], 0
    for framework in args.frameworks:
        for name, layer in (dgl_layers if framework == "dgl" else pyg_layers)(given).items():
            if args.rows and not any(part in name for part in args.rows):
                continue
            alone, ours, ratio, again, error = measured(
                Sides(framework, layer, given), args.rounds or ROUNDS[args.device], args.device
            )
            wrong += not error <= TOLERANCE
            figures = (f"{alone * 1e3:.4g}", f"{ours * 1e3:.4g}", f"{ratio:.3f}", f"{again:.3f}", f"{error:.1e}")
            rows.append((framework, name, args.nodes, args.edges, *figures))
            print(*(f"{column}={value}" for column, value in zip(COLUMNS, rows[-1], strict=True)), flush=True)
    slower = sorted((float(row[6]), f"{row[0]} {row[1]}") for row in rows if float(row[6]) > 1)
    print(f"{len(slower)} of {len(rows)} slower:", ", ".join(f"{name} {ratio:.2f}" for ratio, name in reversed(slower)))
    if args.csv:
        save_table(args.csv, provenance(args.commit, "float32, forward and backward"), COLUMNS, rows)
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
