"""Layers that users write or subclass, every form of edges and aggregation, and wrong arguments."""

import contextlib

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import LAYERS, D, E, N, edges, grads, rand, same, train
from torch_geometric import EdgeIndex, nn, utils
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import OptPairTensor


class Doubled(nn.GCNConv):
    """super().message."""

    def message(self, x_j, edge_weight):
        return super().message(x_j, edge_weight) * 2


class OwnAggregate(nn.SAGEConv):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return utils.scatter(inputs, index, 0, dim_size, "sum") + super().aggregate(inputs, index, ptr, dim_size)


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


def run_layer(make, *more):
    def program(wrap):
        layer = wrap(make())
        x = rand(N, D, grad=True)
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
    "own edge_update": run_layer(lambda: Scored(D, 5, heads=2)),
    "mixin": run_layer(lambda: Counted(D, 5)),
    "own attributes": run_layer(Slotted),
    "annotated": run_layer(Annotated, lambda: rand(E)),
    "twice": run_layer(Twice, lambda: rand(E, grad=True)),
    "nested": run_layer(Nested),
    "random": run_layer(Randomised),
}


@pytest.mark.parametrize("name", USERS)
def test_user_layer(name):
    same(USERS[name], accelerated=None if name == "own aggregate" else True)


def test_own_propagate():
    same(run_layer(lambda: OwnPropagate(D, 5)), accelerated=None)


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


def sorted_edges(order, cached):
    def make():
        index = EdgeIndex(edges(), sparse_size=(N, N))
        index = index.sort_by(order).values if order else index
        return index.fill_cache_() if cached else index

    return make


FORMS = {
    "EdgeIndex": sorted_edges(None, False),
    "EdgeIndex row": sorted_edges("row", False),
    "EdgeIndex col": sorted_edges("col", False),
    "EdgeIndex row, cached": sorted_edges("row", True),
    "EdgeIndex col, cached": sorted_edges("col", True),
    "undirected": lambda: EdgeIndex(utils.to_undirected(edges()), sparse_size=(N, N), is_undirected=True),
    "expanded": lambda: edges()[:, :1].expand(2, 9),
    "strided": lambda: torch.cat([edges(), edges()], 1)[:, ::2],
    "rows reversed": lambda: edges().flip(0),
    "coo": lambda: adjacency(torch.sparse_coo),
    "csr": lambda: adjacency(torch.sparse_csr),
    "csc": lambda: adjacency(torch.sparse_csc),
}


def adjacency(layout):
    index = utils.coalesce(edges().flip(0))
    adj = torch.sparse_coo_tensor(index, rand(index.shape[1], seed=3).abs() + 0.1, (N, N)).coalesce()
    return adj if layout == torch.sparse_coo else adj.to_sparse(layout=layout)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["SAGE", "GraphConv", "GAT", "Transformer", "EdgeConv"])
def test_edge_form(name, form, flow):
    """Results or, where PyG has none, its error. EdgeIndex multiplies in float32 alone."""

    def program(wrap):
        layer = wrap(LAYERS[name](flow=flow))
        index = FORMS[form]()
        return train(layer, rand(N, D, grad=True), index), layer(rand(N, D), index)

    with contextlib.suppress(AssertionError):
        same(program, dtype=torch.float32, accelerated=None, raises=True)
        return
    same(program, dtype=torch.float32, accelerated=None)


X = lambda *shape: rand(*(shape or (N, D)))  # noqa: E731
WRONG = {
    "index too large": lambda c: c(X(), edges() + N),
    "index negative": lambda c: c(X(), edges() - 1),
    "too few rows": lambda c: c(X(N - 5, D), edges()),
    "wrong width": lambda c: c(X(N, D + 1), edges()),
    "float edges": lambda c: c(X(), edges().float()),
    "bool edges": lambda c: c(X(), edges() > 3),
    "one row": lambda c: c(X(), edges()[:1]),
    "three rows": lambda c: c(X(), torch.cat([edges(), edges()[:1]])),
    "flat edges": lambda c: c(X(), edges().flatten()),
    "edges as list": lambda c: c(X(), edges().tolist()),
    "edges as None": lambda c: c(X(), None),
    "edges as string": lambda c: c(X(), "edges"),
    "features as None": lambda c: c(None, edges()),
    "features int": lambda c: c(torch.ones(N, D, dtype=torch.long), edges()),
    "features of other dtype": lambda c: c(X().float(), edges()),
    "features 1-D": lambda c: c(X(N), edges()),
    "features 3-D": lambda c: c(X(2, N, D), edges()),
    "features complex": lambda c: c(X().to(torch.complex128), edges()),
    "features as array": lambda c: c(X().numpy(), edges()),
    "unknown argument": lambda c: c(X(), edges(), nothing=1),
    "too many arguments": lambda c: c(X(), edges(), None, None, None, None, None),
    "missing edges": lambda c: c(X()),
    "wrong size": lambda c: c(X(), edges(), size=(N, N + 2)),
    "size of one": lambda c: c(X(), edges(), size=(N,)),
    "pair of three": lambda c: c((X(), X(), X()), edges()),
    "pair without target": lambda c: c((X(), None), edges()),
    "pair of other size": lambda c: c((X(), X(N - 9, D)), edges()),
    "edge_weight too short": lambda c: c(X(), edges(), rand(E - 1)),
    "edge_weight too wide": lambda c: c(X(), edges(), rand(E, 3)),
    "edge_weight int": lambda c: c(X(), edges(), torch.ones(E, dtype=torch.long)),
    "edge_weight float": lambda c: c(X(), edges(), rand(E).float()),
    "edge_attr too short": lambda c: c(X(), edges(), edge_attr=rand(E - 1, 3)),
    "edge_attr too wide": lambda c: c(X(), edges(), edge_attr=rand(E, 4)),
    "edge_attr 1-D": lambda c: c(X(), edges(), edge_attr=rand(E)),
    "meta features": lambda c: c(X().to("meta"), edges()),
    "uint8 edges": lambda c: c(X(), edges().to(torch.uint8)),
    "int16 edges": lambda c: c(X(), edges().to(torch.int16)),
    "scalar edges": lambda c: c(X(), torch.tensor(3)),
    "empty edges": lambda c: c(X(), torch.empty(2, 0, dtype=torch.long)),
    "no nodes": lambda c: c(X(0, D), torch.empty(2, 0, dtype=torch.long)),
    "no nodes, edges": lambda c: c(X(0, D), edges()),
    "quantised": lambda c: c(torch.quantize_per_tensor(X().float(), 0.1, 0, torch.qint8), edges()),
    "sparse features": lambda c: c(X().to_sparse(), edges()),
    # Forward only: to which of several NaN the gradient of a maximum goes is nobody's promise.
    "nan": lambda c: c(torch.full((N, D), float("nan")), edges()).detach(),
    "infinite": lambda c: c(X() / 0, edges()).detach(),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case):
    """The same error as PyG's, or the same result where it takes the input after all; the layer works afterwards."""
    for name, make in LAYERS.items():
        options = {"edge_dim": 3} if "edge_attr" in case and name in ("GAT", "GATv2", "Transformer") else {}

        def program(wrap, make=make, options=options):
            layer = wrap(make(**options))
            try:
                out = WRONG[case](layer)
                out = train_if_possible(layer, out)
            except Exception as error:
                out = type(error).__name__, str(error)
            good = {"edge_attr": rand(E, 3)} if options else {}
            return out, layer(rand(N, D), edges(), **good)

        try:
            same(program, accelerated=None)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def train_if_possible(layer, out):
    layer.zero_grad()
    if out.requires_grad:
        out.sum().backward()
    return out, grads(layer)
