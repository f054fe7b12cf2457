"""Layers that users write or subclass, and every kind of aggregation."""

import copy

import pytest
import torch
import torch.nn.functional as F

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import D, E, N, edges, rand, same, train
from reached import by_design
from torch_geometric import nn, utils
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import OptPairTensor

from gnnaccel import pyg_backend, report

WIDE = 18  # more features than are stored per edge


class Doubled(nn.GCNConv):
    """super().message."""

    def message(self, x_j, edge_weight):
        return super().message(x_j, edge_weight) * 2


class OwnAggregate(nn.SAGEConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return utils.scatter(inputs, index, 0, dim_size, "sum") + super().aggregate(inputs, index, ptr, dim_size)


class SharedVectors(nn.GATv2Conv):
    """One attention vector for all heads, which PyG broadcasts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.att = torch.nn.Parameter(torch.rand(1, 1, self.out_channels))


class OwnUpdate(nn.GraphConv):
    def update(self, inputs, x: OptPairTensor):
        return inputs * 2 + x[1]


class OwnPropagate(nn.GCNConv):
    """Repeats the propagation that PyG wrote for its parent."""

    def propagate(self, edge_index, **kwargs):
        return super().propagate(edge_index, **kwargs) + 1


class Scored(nn.GATConv):
    """Its own edge_update on top of GAT's."""

    def edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size):
        return super().edge_update(alpha_j, alpha_i, edge_attr, index, ptr, dim_size) * 0.5


class Mixin:
    """Multiple inheritance: cooperates in forward(), and keeps count."""

    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return super().forward(*args, **kwargs) * self.calls


class Counted(Mixin, nn.SAGEConv):
    pass


class Slotted(MessagePassing):
    """A __setattr__ and __getattr__ of its own, as of configuration classes."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.seen = []
        self.scale = 3.0

    def __setattr__(self, name, value):
        if "seen" in self.__dict__:
            self.seen.append(name)
        super().__setattr__(name, value)

    def __getattr__(self, name):
        return 7.0 if name == "absent" else super().__getattr__(name)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x) * self.scale + self.absent


class Annotated(MessagePassing):
    """TorchScript annotations, Final constants, static and class methods."""

    factor: torch.jit.Final[float] = 1.5

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(D, 5)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # propagate_type: (x: Tensor, weight: Tensor)
        return self.propagate(edge_index, x=self.lin(x), weight=weight, size=None)

    @staticmethod
    def scaled(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    def message(self, x_j: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.scaled(weight.view(-1, 1)) * x_j * self.factor


class Twice(MessagePassing):
    """Two propagations per call with other arguments, one of them reversed by flipping the edges."""

    def forward(self, x, edge_index, weight):
        y = self.propagate(edge_index, x=x, weight=weight)
        return self.propagate(edge_index.flip(0), x=y, weight=None)

    def message(self, x_j, weight):
        return x_j if weight is None else weight.view(-1, 1) * x_j


class Nested(MessagePassing):
    """A layer inside a layer, called from message()'s caller and from update()."""

    def __init__(self):
        super().__init__(aggr="add")
        self.inner = nn.GCNConv(D, D)
        self.attention = nn.GATConv(D, D)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.inner(x, edge_index), edges=edge_index)

    def update(self, inputs, edges):
        return self.attention(inputs, edges)


class Leading(MessagePassing):
    """Features [batch, N, F]: node_dim 1, or the last one with node_dim -1."""

    def __init__(self, node_dim):
        super().__init__(aggr="sum", node_dim=node_dim)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Randomised(MessagePassing):
    """Random numbers and a buffer written in message()."""

    def __init__(self):
        super().__init__(aggr="max")
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        self.total += x_j.detach().sum()
        return torch.nn.functional.dropout(x_j, 0.5, self.training)


class Copy(MessagePassing):
    """The smallest layer: message() is PyG's own copy of x_j."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Weighted(MessagePassing):
    """A user's layer with a weight written in another way, and a branch on None."""

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_j, edge_weight=None):
        if edge_weight is None:
            return x_j
        return torch.mul(x_j, torch.sigmoid(edge_weight).unsqueeze(-1))


class Tutorial(MessagePassing):
    """The GCN of PyG's tutorial: self-loops and normalisation in forward(), by helpers of torch_geometric.utils."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(WIDE, 5)

    def forward(self, x, edge_index):
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        deg = utils.degree(col, x.size(0), dtype=x.dtype)
        norm = deg.pow(-0.5)[row] * deg.pow(-0.5)[col]
        return self.propagate(edge_index, x=self.lin(x), norm=norm)

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Attention(MessagePassing):
    """A user's attention: a softmax over scores that depend on both ends."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = torch.nn.Linear(WIDE, 6)
        self.att = torch.nn.Parameter(torch.randn(2, 3))

    def forward(self, x, edge_index):
        h = self.lin(x).view(-1, 2, 3)
        alpha = (h * self.att).sum(-1)
        return self.propagate(edge_index, x=h, alpha=alpha, score=alpha.detach() * 2).flatten(1)

    def message(self, x_j, alpha_i, alpha_j, score_j, index, ptr, size_i):
        alpha = F.leaky_relu(alpha_i + alpha_j, 0.2) + score_j
        alpha = utils.softmax(alpha, index, ptr, size_i)
        return x_j * alpha.unsqueeze(-1)


class Doubler(nn.SAGEConv):
    """A subclass that overrides message(): its parent's rule must not be used."""

    def message(self, x_j):
        return 2 * x_j * x_j


class EdgeNetwork(MessagePassing):
    """A linear map of both ends: two maps of nodes."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(2 * WIDE, WIDE)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).relu()


class DeepEdgeNetwork(EdgeNetwork):
    """A linear map of what an activation makes of each edge."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr)
        self.second = torch.nn.Linear(WIDE, WIDE + 1)

    def message(self, x_i, x_j):
        return self.second(super().message(x_i, x_j))


class NormedNetwork(DeepEdgeNetwork):
    """A norm of each message, which is a linear map of an edge."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr)
        self.norm = torch.nn.LayerNorm(WIDE + 1)

    def message(self, x_i, x_j):
        return self.norm(super().message(x_i, x_j))


class Beside(NormedNetwork):
    """Wide and narrow messages side by side, both of what was mapped."""

    def message(self, x_i, x_j):
        m = torch.tanh(super().message(x_i, x_j))
        return torch.cat([m, (x_i[:, :3] - x_j[:, :3]) * (m * self.norm(m)).sum(-1, keepdim=True)], -1)


class Edgewise(MessagePassing):
    """What is made of edge features: parts, heads, a function, a linear map."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr)
        self.lin = torch.nn.Linear(WIDE, 2 * WIDE)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j, e):
        gate, shift = self.lin(torch.sigmoid(e)).chunk(2, -1)
        heads = (x_j * gate).view(-1, 2, WIDE // 2) + e.view(-1, 2, WIDE // 2)
        return heads.flatten(1) + shift * e[:, :1]


class SortedNetwork(EdgeNetwork):
    """A message no rule covers: PyG computes it, we reduce it."""

    def message(self, x_i, x_j):
        return super().message(x_i, x_j).sort(-1).values


class OnlyPropagate(MessagePassing):
    """A propagate() that sends no message."""

    def propagate(self, edge_index, x):
        return x * 3

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x)


def run_layer(make, *more, width=D):
    def program(wrap):
        layer = wrap(make())
        x = rand(N, width, grad=True)
        first = train(layer, x, edges(), *(m() for m in more))
        return (
            first,
            layer(x, edges(), *(m() for m in more)),
            list(layer.buffers()),
            getattr(layer, "seen", None),
        )

    return program


USERS = {
    "super().message": run_layer(lambda: Doubled(D, 5)),
    "own aggregate": run_layer(lambda: OwnAggregate(D, 5)),
    "own update": run_layer(lambda: OwnUpdate(D, D)),
    "shared attention vectors": run_layer(lambda: SharedVectors(D, 5, heads=2)),
    "own edge_update": run_layer(lambda: Scored(D, 5, heads=2)),
    "mixin": run_layer(lambda: Counted(D, 5)),
    "own attributes": run_layer(Slotted),
    "annotated": run_layer(Annotated, lambda: rand(E)),
    "twice": run_layer(Twice, lambda: rand(E, grad=True)),
    "nested": run_layer(Nested),
    "random": run_layer(Randomised),
}


@pytest.mark.reached
@pytest.mark.parametrize("name", USERS)
def test_user_layer(name):
    with by_design("writes in place" if name == "random" else None, some=True):  # in its first call
        same(USERS[name], accelerated=None if name == "own aggregate" else True)


# name -> (program, call sites that must be accelerated, with nothing left to PyG)
WRITTEN = {
    "copy": (run_layer(Copy, width=WIDE), "pyg.Copy"),
    "copy min": (run_layer(lambda: Copy(aggr="min"), width=WIDE), "pyg.Copy"),
    "without weight": (run_layer(Weighted, width=WIDE), "pyg.Weighted"),
    "weighted": (run_layer(Weighted, lambda: rand(E, grad=True), width=WIDE), "pyg.Weighted"),
    "constant weight": (run_layer(Weighted, lambda: rand(E), width=WIDE), "pyg.Weighted"),
    "tutorial": (run_layer(Tutorial, width=WIDE), "pyg.Tutorial"),
    "attention": (run_layer(Attention, width=WIDE), "pyg.Attention"),
    "own message": (run_layer(lambda: Doubler(WIDE, 5), width=WIDE), "pyg.Doubler"),
    "edge network": (run_layer(EdgeNetwork, width=WIDE), "pyg.EdgeNetwork"),
    "edge network max": (run_layer(lambda: EdgeNetwork("max"), width=WIDE), "pyg.EdgeNetwork"),
    "deep edge network": (run_layer(DeepEdgeNetwork, width=WIDE), "pyg.DeepEdgeNetwork"),
    "deep edge network mean": (run_layer(lambda: DeepEdgeNetwork("mean"), width=WIDE), "pyg.DeepEdgeNetwork"),
    "deep edge network max": (run_layer(lambda: DeepEdgeNetwork("max"), width=WIDE), "pyg.DeepEdgeNetwork"),
    **{
        f"{kind.__name__} {aggr}": (
            run_layer(lambda kind=kind, aggr=aggr: kind(aggr), width=WIDE),
            f"pyg.{kind.__name__}",
        )
        for kind in (NormedNetwork, Beside)
        for aggr in ("sum", "mean", "max")
    },
    "edgewise": (run_layer(Edgewise, lambda: rand(E, WIDE, grad=True), width=WIDE), "pyg.Edgewise"),
    "edgewise max": (run_layer(lambda: Edgewise("max"), lambda: rand(E, WIDE, grad=True), width=WIDE), "pyg.Edgewise"),
    "sorted edge network": (run_layer(SortedNetwork, width=WIDE), "pyg.SortedNetwork segment"),
}


@pytest.mark.reached
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_written_layer(name, dtype):
    program, kind = WRITTEN[name]
    with by_design(r"sort\(\) takes one row" if name == "sorted edge network" else None):
        same(program, dtype=dtype, kinds={kind})


class OwnModule(EdgeNetwork):
    """A module of the user's sees rows of edges."""

    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(WIDE, WIDE)

        def forward(self, rows):
            return torch.sigmoid(self.lin(rows))

    def __init__(self):
        super().__init__()
        self.gate = self.Gate()

    def message(self, x_i, x_j):
        return self.gate(x_i + x_j) * x_j


class OwnScatter(EdgeNetwork):
    """Writes in place: the sum, into what it has made itself."""

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        out = inputs.new_zeros(dim_size, inputs.shape[1])
        out.scatter_add_(0, index.view(-1, 1).expand_as(inputs), inputs)
        return out.index_add_(0, index, 2 * inputs)


class WritesRows(EdgeNetwork):
    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j], -1)).mul_(2)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("kind, walks", [(OwnModule, 3), (OwnScatter, 3), (WritesRows, 0)])
def test_what_its_first_call_is_watched_for(kind, walks, flow):
    plain = kind().double()
    plain.flow = flow
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    report.reset()
    for call in range(4):
        x = rand(N, WIDE).double().requires_grad_()
        results = []
        for each in (layer, plain):
            out = each(x, edges())
            results.append((out, *torch.autograd.grad(out.square().sum(), [x, *each.parameters()], allow_unused=True)))
        torch.testing.assert_close(
            *[[t for t in found if t is not None] for found in results],
            rtol=1e-9,
            atol=1e-9,
            msg=lambda text, call=call: f"call {call}: {text}",
        )
    site = report.snapshot().get(f"pyg.{kind.__name__}", report.Site())
    assert site.accelerated == walks, report.snapshot()


class Activated(Copy):
    def __init__(self):
        super().__init__()
        self.act = torch.nn.ReLU()

    def message(self, x_i, x_j):
        return self.act(x_i + x_j)


def test_code_that_changes_between_calls():
    """What a layer's code does is looked at as it is at each call: submodules, their options, its methods."""

    class Own(torch.nn.Module):
        def forward(self, x):
            return x.tanh()

    changes = [
        (lambda layer: None, None),
        (lambda layer: setattr(layer.act, "inplace", True), "ReLU writes in place"),
        (lambda layer: setattr(layer, "act", Own()), "a submodule of class Own, which cannot be looked through"),
        (lambda layer: setattr(layer, "act", torch.nn.ReLU()), None),
        (
            lambda layer: setattr(Activated, "message", lambda self, x_i, x_j: (x_i + x_j).neg_()),
            "<lambda>() calls neg_",
        ),
    ]
    plain, layer = Activated(), pyg_backend.accelerate(Activated())
    message = Activated.message
    try:
        for change, reason in changes:
            change(plain)
            change(layer)
            report.reset()
            torch.testing.assert_close(layer(rand(N, WIDE), edges()), plain(rand(N, WIDE), edges()))
            (site,) = report.snapshot().values()
            assert site.accelerated == 1
            assert [r.startswith(reason or "?") for r in site.reasons] == ([] if reason is None else [True])
    finally:
        Activated.message = message


@pytest.mark.reached
def test_own_propagate():
    with by_design("own propagate"):
        same(run_layer(lambda: OwnPropagate(D, 5)), accelerated=None)
        same(run_layer(OnlyPropagate), accelerated=False)


@pytest.mark.reached
@pytest.mark.parametrize("node_dim,shape", [(1, (2, N, D)), (-1, (D, N)), (0, (N, 2, D)), (-2, (2, N, D)), (0, (N,))])
def test_node_dim(node_dim, shape):
    def program(wrap):
        return train(wrap(Leading(node_dim)), rand(*shape, grad=True), edges())

    same(program, accelerated=None)


AGGREGATIONS = {
    "list": lambda: ["sum", "max", "std"],
    "module": lambda: aggr.MeanAggregation(),
    "softmax": lambda: aggr.SoftmaxAggregation(learn=True),
    "powermean": lambda: aggr.PowerMeanAggregation(learn=True),
    "median": lambda: "median",
    "multi": lambda: aggr.MultiAggregation(["mean", "min"], mode="sum"),
    "lstm": lambda: aggr.LSTMAggregation(D, D),
    "mul": lambda: "mul",
    "var": lambda: "var",
    "quantile": lambda: aggr.QuantileAggregation(0.3),
    "set2set": lambda: aggr.Set2Set(D, 2),
    "sort": lambda: aggr.SortAggregation(3),
    "degree": lambda: aggr.DegreeScalerAggregation(["mean"], ["identity", "linear"], torch.tensor([0, 5, 9, 3])),
}


NEED_EVERY_MESSAGE = ("median", "lstm", "mul", "quantile", "set2set", "sort")


@pytest.mark.reached
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation(name, flow):
    class Layer(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    def program(wrap):
        index = edges()
        # Those that walk sequences want sorted destinations.
        index = index[:, index[1 if flow == "source_to_target" else 0].argsort(stable=True)]
        return train(wrap(Layer(aggr=AGGREGATIONS[name](), flow=flow)), rand(N, D, grad=True), index)

    with by_design("needs every message" if name in NEED_EVERY_MESSAGE else None):
        same(program, accelerated=None)


def test_without_aggregation():
    class Raw(MessagePassing):
        def __init__(self):
            super().__init__(aggr=None)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def aggregate(self, inputs, index):
            return inputs, index

        def update(self, inputs):
            return inputs[0] * 2

    def missing(wrap):
        return train(wrap(nn.GCNConv(D, 5, aggr=None)), rand(N, D, grad=True), edges())

    same(run_layer(Raw), accelerated=None)
    same(missing, raises=True)


def loops(edge_index, num_nodes):
    loops.calls = getattr(loops, "calls", 0) + 1
    return utils.add_self_loops(edge_index, num_nodes=num_nodes)[0]


def weights_of(scores, index, num_nodes):
    return utils.softmax(scores, index, num_nodes=num_nodes)


class ByFunctions(MessagePassing):
    """Helpers of PyG's in functions that its methods call."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(D, WIDE)

    def forward(self, x, edge_index):
        self.looped = loops(edge_index, x.size(0))
        return self.propagate(self.looped, x=self.lin(x))

    def message(self, x_i, x_j, index, size_i):
        return x_j * weights_of((x_i * x_j).sum(-1, keepdim=True), index, size_i)


def test_helpers_in_functions_that_methods_call():
    torch.manual_seed(0)
    plain, x, index = ByFunctions(), rand(N, D), edges()
    ours = pyg_backend.accelerate(copy.deepcopy(plain))
    before, made = getattr(loops, "calls", 0), []
    for _ in range(3):
        torch.testing.assert_close(ours(x, index), plain(x, index), rtol=1e-4, atol=1e-5)
        made.append(ours.looped)
    assert loops.calls == before + 6
    assert made[0] is made[1] is made[2]  # remembered, as in a method
