"""Layers as users write them: PyG alone, torch.compile of that, and gnnaccel; forward and backward, one process.

    python benchmarks/user_layers.py --csv out.csv
    python benchmarks/user_layers.py --device cpu --nodes 20000 --edges 200000 --threads 1 --layers gates

None of these classes is named in gnnaccel. Times are medians in milliseconds of calls that the three sides make in
turns; _mib: the most memory of a forward and backward beyond what was there before. over_compiled: time of
torch.compile over ours; over_pyg: that of PyG. error: the greatest difference of results and gradients from PyG's in
float64, relative to the largest.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from timing import provenance, relative_error, save_table, short
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import gnnaccel

COLUMNS = ("layer", "heads", "width", "dtype", "nodes", "edges", "pyg_ms", "compiled_ms", "ours_ms", "over_compiled",
           "over_pyg", "pyg_mib", "compiled_mib", "ours_mib", "error")  # fmt: skip


class Heads(MessagePassing):
    """Linear maps to heads of a width, and what layers below share."""

    def __init__(self, width: int, heads: int, edge: int, names: str = "qkv", aggr="add"):
        super().__init__(aggr=aggr, node_dim=0)
        self.heads, self.width = heads, width
        for name in names:
            setattr(self, name, nn.Linear(heads * width, heads * width))
        if edge:
            self.edge = nn.Linear(edge, heads * width)

    def split(self, x: Tensor) -> Tensor:
        return x.view(-1, self.heads, self.width)


class EdgeAttention(Heads):
    """Edge features in keys and values."""

    def forward(self, x, edge_index, edge_attr, pos):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.propagate(edge_index, q=q, k=k, v=v, e=self.split(self.edge(edge_attr))).flatten(1)

    def message(self, q_i, k_j, v_j, e, index, ptr, size_i):
        scores = (q_i * (k_j + e)).sum(-1) / math.sqrt(self.width)
        return (v_j + e) * softmax(scores, index, ptr, size_i).unsqueeze(-1)


class BiasedGat(Heads):
    """GAT by hand, with a bias of each edge."""

    def __init__(self, width, heads, edge):
        super().__init__(width, heads, 0, "k")
        self.source, self.target = (nn.Parameter(torch.randn(1, heads, width) / width) for _ in range(2))
        self.bias = nn.Linear(edge, heads)

    def forward(self, x, edge_index, edge_attr, pos):
        h = self.split(self.k(x))
        ends = (h * self.source).sum(-1), (h * self.target).sum(-1)
        return self.propagate(edge_index, h=h, a=ends[0], b=ends[1], bias=self.bias(edge_attr)).flatten(1)

    def message(self, h_j, a_j, b_i, bias, index, ptr, size_i):
        alpha = softmax(F.leaky_relu(a_j + b_i + bias, 0.2), index, ptr, size_i)
        return alpha.unsqueeze(-1) * h_j


class ByHandGatv2(Heads):
    def __init__(self, width, heads, edge):
        super().__init__(width, heads, 0, "qk")
        self.a = nn.Parameter(torch.randn(heads, width) / width)

    def forward(self, x, edge_index, edge_attr, pos):
        return self.propagate(edge_index, q=self.split(self.q(x)), k=self.split(self.k(x))).flatten(1)

    def message(self, q_i, k_j, index, ptr, size_i):
        scores = (F.leaky_relu(q_i + k_j, 0.2) * self.a).sum(-1)
        return k_j * softmax(scores, index, ptr, size_i).unsqueeze(-1)


class PositionAttention(Heads):
    """A bias that is made of relative positions."""

    def __init__(self, width, heads, edge):
        super().__init__(width, heads, 0)
        self.bias = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, heads))

    def forward(self, x, edge_index, edge_attr, pos):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.propagate(edge_index, q=q, k=k, v=v, pos=pos).flatten(1)

    def message(self, q_i, k_j, v_j, pos_i, pos_j, index, ptr, size_i):
        scores = (q_i * k_j).sum(-1) / math.sqrt(self.width) + self.bias(pos_j - pos_i)
        return v_j * softmax(scores, index, ptr, size_i).unsqueeze(-1)


class Gates(Heads):
    """Two sums of one message, divided."""

    def __init__(self, width, heads, edge):
        super().__init__(width, heads, edge)

    def forward(self, x, edge_index, edge_attr, pos):
        return self.propagate(edge_index, q=self.q(x), k=self.k(x), v=self.v(x), e=self.edge(edge_attr))

    def message(self, q_i, k_j, v_j, e):
        gate = torch.sigmoid(q_i + k_j + e)
        return gate * v_j, gate

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        top, gates = (scatter(x, index, 0, dim_size, reduce="sum") for x in inputs)
        return top / (gates + 1e-6)


class Mesh(MessagePassing):
    """An MLP of both ends and the edge, a norm, a residual."""

    def __init__(self, width, heads, edge):
        super().__init__(aggr="add")
        wide = width * heads
        self.mlp = nn.Sequential(nn.Linear(2 * wide + edge, wide), nn.ReLU(), nn.Linear(wide, wide), nn.LayerNorm(wide))
        self.own = nn.Sequential(nn.Linear(2 * wide, wide), nn.ReLU(), nn.Linear(wide, wide))

    def forward(self, x, edge_index, edge_attr, pos):
        return x + self.own(torch.cat([x, self.propagate(edge_index, x=x, edge_attr=edge_attr)], -1))

    def message(self, x_i, x_j, edge_attr):
        return self.mlp(torch.cat([x_i, x_j, edge_attr], -1))


class Equivariant(MessagePassing):
    """Distances, an MLP, coordinates beside features."""

    def __init__(self, width, heads, edge):
        super().__init__(aggr="add")
        wide = width * heads
        self.mlp = nn.Sequential(nn.Linear(2 * wide + 1, wide), nn.SiLU(), nn.Linear(wide, wide), nn.SiLU())
        self.shift = nn.Linear(wide, 1)

    def forward(self, x, edge_index, edge_attr, pos):
        out = self.propagate(edge_index, x=x, pos=pos)
        return torch.cat([x + out[:, :-3], pos + out[:, -3:]], -1)

    def message(self, x_i, x_j, pos_i, pos_j):
        apart = pos_i - pos_j
        m = self.mlp(torch.cat([x_i, x_j, apart.square().sum(-1, keepdim=True)], -1))
        return torch.cat([m, apart * self.shift(m)], -1)


def basis(pos_i: Tensor, pos_j: Tensor) -> Tensor:
    distance = (pos_i - pos_j).square().sum(-1, keepdim=True).add(1e-6).sqrt()
    return torch.exp(-10 * (distance - torch.linspace(0, 2, 16, device=distance.device)).square())


class Filter(MessagePassing):
    """A continuous filter of distances times features."""

    def __init__(self, width, heads, edge):
        super().__init__(aggr="add")
        wide = width * heads
        self.filter = nn.Sequential(nn.Linear(16, wide), nn.Softplus(), nn.Linear(wide, wide))
        self.own = nn.Linear(wide, wide)

    def forward(self, x, edge_index, edge_attr, pos):
        return self.propagate(edge_index, x=self.own(x), pos=pos)

    def message(self, x_j, pos_i, pos_j):
        return x_j * self.filter(basis(pos_i, pos_j))


class Vectors(MessagePassing):
    """Scalars and vectors at once, by filters of distances."""

    def __init__(self, width, heads, edge):
        super().__init__(aggr="add", node_dim=0)
        wide = width * heads
        self.filter, self.own = nn.Linear(16, 2 * wide), nn.Linear(wide, 2 * wide)

    def forward(self, x, edge_index, edge_attr, pos):
        out, vectors = self.propagate(edge_index, x=self.own(x), pos=pos)
        return torch.cat([out, vectors.flatten(1)], -1)

    def message(self, x_j, pos_i, pos_j):
        scalars, gates = (x_j * self.filter(basis(pos_i, pos_j))).chunk(2, -1)
        return scalars, gates.unsqueeze(1) * F.normalize(pos_i - pos_j, dim=-1).unsqueeze(-1)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return tuple(scatter(x, index, 0, dim_size, reduce="sum") for x in inputs)


class WeightedMax(Heads):
    def __init__(self, width, heads, edge):
        super().__init__(width, heads, edge, "k", "max")

    def forward(self, x, edge_index, edge_attr, pos):
        return self.propagate(edge_index, k=self.k(x), e=self.edge(edge_attr))

    def message(self, k_j, e):
        return k_j * torch.sigmoid(e)


class Several(Heads):
    """Mean, max and standard deviation of one message."""

    def __init__(self, width, heads, edge):
        super().__init__(width, heads, edge, "qk", ["mean", "max", "std"])

    def forward(self, x, edge_index, edge_attr, pos):
        return self.propagate(edge_index, q=self.q(x), k=self.k(x), e=self.edge(edge_attr))

    def message(self, q_i, k_j, e):
        return torch.relu(q_i + k_j + e)


class EdgeOutputs(Heads):
    """Rows of edges for the next layer beside the sum."""

    def __init__(self, width, heads, edge):
        super().__init__(width, heads, edge, "qkv")

    def forward(self, x, edge_index, edge_attr, pos):
        q, k, e = self.q(x), self.k(x), self.edge(edge_attr)
        e = self.edge_updater(edge_index, q=q, k=k, e=e)
        return torch.cat([self.propagate(edge_index, v=self.v(x), e=e), e.mean(0, keepdim=True).expand_as(x)], -1)

    def edge_update(self, q_i, k_j, e):
        return torch.relu(q_i + k_j + e)

    def message(self, v_j, e):
        return v_j * torch.sigmoid(e)


class Cosine(Heads):
    """Attention by the cosine of both ends, with a temperature."""

    def __init__(self, width, heads, edge):
        super().__init__(width, heads, 0)
        self.t = nn.Parameter(torch.ones(heads))

    def forward(self, x, edge_index, edge_attr, pos):
        q, k = (F.normalize(self.split(f(x)), dim=-1) for f in (self.q, self.k))
        return self.propagate(edge_index, q=q, k=k, v=self.split(self.v(x))).flatten(1)

    def message(self, q_i, k_j, v_j, index, ptr, size_i):
        return v_j * softmax((q_i * k_j).sum(-1) * self.t, index, ptr, size_i).unsqueeze(-1)


class FeatureSoftmax(Heads):
    """A softmax for each feature, of a gate that reads the edge."""

    def __init__(self, width, heads, edge):
        super().__init__(width, heads, edge)

    def forward(self, x, edge_index, edge_attr, pos):
        return self.propagate(edge_index, q=self.q(x), k=self.k(x), v=self.v(x), e=self.edge(edge_attr))

    def message(self, q_i, k_j, v_j, e, index, ptr, size_i):
        return softmax(torch.tanh(q_i + k_j + e), index, ptr, size_i) * v_j


class Plain(nn.Module):
    """No MessagePassing: rows, and index_add_."""

    def __init__(self, width, heads, edge):
        super().__init__()
        wide = width * heads
        self.k, self.e = nn.Linear(wide, wide), nn.Linear(edge, wide)

    def forward(self, x, edge_index, edge_attr, pos):
        h = self.k(x)
        messages = torch.relu(h[edge_index[0]] + self.e(edge_attr))
        return torch.zeros_like(h).index_add_(0, edge_index[1], messages)


class PlainAttention(nn.Module):
    """No MessagePassing: attention by softmax and scatter of torch_geometric.utils."""

    def __init__(self, width, heads, edge):
        super().__init__()
        wide = width * heads
        self.heads, self.width = heads, width
        self.q, self.k, self.v, self.edge = (nn.Linear(n, wide) for n in (wide, wide, wide, edge))

    def forward(self, x, edge_index, edge_attr, pos):
        of, to = edge_index
        q, k, v, e = (
            t.view(-1, self.heads, self.width) for t in (self.q(x), self.k(x), self.v(x), self.edge(edge_attr))
        )
        scores = (q[to] * (k[of] + e)).sum(-1) / math.sqrt(self.width)
        weights = softmax(scores, to, num_nodes=len(x)).unsqueeze(-1)
        return scatter((v[of] + e) * weights, to, 0, len(x), "sum").flatten(1)


class PlainFilter(nn.Module):
    """No MessagePassing, and each end of the edges in a tensor of its own, as codes for molecules have them."""

    apart = True

    def __init__(self, width, heads, edge):
        super().__init__()
        wide = width * heads
        self.filter = nn.Sequential(nn.Linear(16, wide), nn.Softplus(), nn.Linear(wide, wide))
        self.own = nn.Linear(wide, wide)

    def forward(self, x, edge_index, edge_attr, pos):
        of, to = edge_index
        messages = self.own(x)[of] * self.filter(basis(pos[to], pos[of]))
        return torch.zeros_like(x).index_add(0, to, messages)


LAYERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "edge attention": EdgeAttention,
    "biased GAT": BiasedGat,
    "GATv2 by hand": ByHandGatv2,
    "position attention": PositionAttention,
    "cosine attention": Cosine,
    "softmax per feature": FeatureSoftmax,
    "gates": Gates,
    "mesh": Mesh,
    "equivariant": Equivariant,
    "filter": Filter,
    "scalars and vectors": Vectors,
    "weighted max": WeightedMax,
    "mean, max, std": Several,
    "edge outputs": EdgeOutputs,
    "no MessagePassing": Plain,
    "plain attention": PlainAttention,
    "plain filter": PlainFilter,
}


def inputs(options: argparse.Namespace, width: int) -> SimpleNamespace:
    torch.manual_seed(0)
    n, e, device = options.nodes, options.edges, options.device
    weights = (1 - torch.rand(n, device=device)) ** -0.4  # some nodes have many edges
    ends = torch.stack([torch.multinomial(weights, e, True), torch.randint(n, (e,), device=device)])
    make = {"device": device, "dtype": options.dtype}
    return SimpleNamespace(
        x=torch.randn(n, width, **make), edge_index=ends, edge_attr=torch.randn(e, options.edge_width, **make),
        pos=torch.rand(n, 3, **make),
    )  # fmt: skip


def step(layer: nn.Module, given: SimpleNamespace, double: bool = False) -> list[Tensor]:
    x, edge_attr, pos = (
        (t.double() if double else t.detach()).requires_grad_() for t in (given.x, given.edge_attr, given.pos)
    )
    layer.zero_grad(set_to_none=True)
    out = layer(x, given.edge_index, edge_attr, pos)
    out.backward(given.seed.to(out.dtype)[: out.shape[1]].expand_as(out))
    return [out.detach(), x.grad, edge_attr.grad, *(p.grad for p in layer.parameters())]


def timed(calls: dict[str, Callable], rounds: int, device: str) -> dict[str, float]:
    """Medians of calls that take turns, in milliseconds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) * 1e3)
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def peak(call: Callable, device: str) -> float | None:
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def errors(got: list, want: list) -> float:
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b is not None and float(b.abs().max()) > 1e-9]
    return max(relative_error(torch.zeros_like(b) if a is None else a, b) for a, b in pairs)


def measured(name: str, width: int, heads: int, options: argparse.Namespace) -> dict:
    given = inputs(options, width * heads)
    if getattr(LAYERS[name], "apart", False):
        given.edge_index = tuple(end.clone() for end in given.edge_index)
    given.seed = torch.randn(8 * width * heads, device=options.device, dtype=options.dtype) / 8
    torch.manual_seed(1)
    alone = LAYERS[name](width, heads, options.edge_width).to(options.device, options.dtype)
    sides = {"pyg": alone, "ours": gnnaccel.accelerate(copy.deepcopy(alone))}
    if not options.without_compile:
        torch._dynamo.reset()
        sides["compiled"] = torch.compile(copy.deepcopy(alone))
    row: dict = {"layer": name, "heads": heads, "width": width, "dtype": str(options.dtype).removeprefix("torch."),
                 "nodes": options.nodes, "edges": options.edges}  # fmt: skip
    calls = {}
    want = None
    if options.check:
        want = step(copy.deepcopy(alone).double(), given, True)
    for side, layer in sides.items():
        call = calls[side] = lambda layer=layer: step(layer, given)
        try:
            for _ in range(options.warm):
                got = call()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"# {name}: {side}: {type(error).__name__}: {str(error).splitlines()[0]}")
            del calls[side]
            continue
        if side == "ours" and want is not None:
            row["error"] = errors(got, want)
        row[f"{side}_mib"] = peak(call, options.device)
    for side, value in timed(calls, options.rounds, options.device).items():
        row[f"{side}_ms"] = value
    for side in ("compiled", "pyg"):
        if f"{side}_ms" in row and "ours_ms" in row:
            row[f"over_{side}"] = row[f"{side}_ms"] / row["ours_ms"]
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--edge-width", type=int, default=16)
    parser.add_argument("--shapes", default="4x16", help="heads x width, by commas")
    parser.add_argument("--layers", default=",".join(name.replace(", ", "+") for name in LAYERS))
    parser.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--without-compile", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare with PyG in float64")
    parser.add_argument("--csv")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    print(*COLUMNS, sep="\t")
    for shape in options.shapes.split(","):
        heads, width = map(int, shape.split("x"))
        for name in options.layers.replace("+", "\0").split(","):
            row = measured(name.replace("\0", ", "), width, heads, options)
            rows.append([short(row.get(column, "")) for column in COLUMNS])
            print(*rows[-1], sep="\t", flush=True)
    for side in ("compiled", "pyg"):
        ratios = [float(r[COLUMNS.index(f"over_{side}")]) for r in rows if r[COLUMNS.index(f"over_{side}")] != ""]
        if ratios:
            print(f"# over {side}: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}, least {min(ratios):.2f}")
    if options.csv:
        save_table(options.csv, provenance(), COLUMNS, rows)


if __name__ == "__main__":
    main()
