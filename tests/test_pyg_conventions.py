"""What PyG's layers promise beside their results: scripts and traces of a layer that has run, adjacency matrices in odd
states, mixed dtypes, and its own words for wrong input."""

import warnings

import pytest
import torch

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_cases import prepare_pyg
from pyg_compare import D, E, N, edges, rand, same, train
from torch_geometric import EdgeIndex, nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import to_edge_index, to_torch_coo_tensor

prepare_pyg()

RELATIONS = 3


def types(count: int = E) -> torch.Tensor:
    return torch.arange(count) * 7 % RELATIONS


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
@pytest.mark.filterwarnings("ignore:.*(CSR|sparse).*")
def test_transposed_coo(name, aggr):
    """A transposed COO matrix counts as not coalesced, and torch gives no values of it."""

    def program(wrap):
        layer = wrap(getattr(nn, name)(D, 5, aggr=aggr))
        return train(layer, rand(N, D, grad=True), to_torch_coo_tensor(edges(), size=(N, N)).t())

    same(program, dtype=torch.float32, accelerated=False)


@pytest.mark.parametrize("name", ["SAGE", "GCN", "APPNP with dropout"])
@pytest.mark.filterwarnings("ignore:.*(CSR|sparse).*")
def test_coo_that_is_read_between_forward_and_backward(name):
    """to_edge_index() marks the matrix as coalesced: a write, to torch."""
    make = {"SAGE": lambda: nn.SAGEConv(D, 5), "GCN": lambda: nn.GCNConv(D, 5, normalize=False)}
    make = make.get(name, lambda: nn.APPNP(3, 0.1, dropout=0.5))

    def program(wrap):
        adj, x = to_torch_coo_tensor(edges(), rand(E).abs() + 0.1, size=(N, N)), rand(N, D, grad=True)
        out = wrap(make())(x, adj)
        to_edge_index(adj)
        out.sum().backward()
        return out, x.grad

    same(program, dtype=torch.float32)


@pytest.mark.parametrize("options", [{}, {"num_bases": 2}, {"aggr": "max"}], ids=str)
def test_script_of_a_relational_layer_that_has_run(options):
    """PyG's first call sets what the script reads."""

    def program(wrap):
        layer = wrap(nn.RGCNConv(D, 5, RELATIONS, **options))
        call = rand(N, D), edges(), types()
        return layer(*call), torch.jit.script(layer)(*call)

    same(program)


TRACED = {
    "GCN": lambda: nn.GCNConv(D, 5),
    "SAGE": lambda: nn.SAGEConv(D, 5),
    "SG": lambda: nn.SGConv(D, 5),
    "APPNP": lambda: nn.APPNP(2, 0.1),
    "GIN": lambda: nn.GINConv(torch.nn.Linear(D, 5)),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_warns_of_what_pyg_does_alone(name):
    def program(wrap):
        layer, call = wrap(TRACED[name]()), (rand(N, D), edges())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced = torch.jit.trace(layer, call, check_trace=False)
        return sorted({str(w.message) for w in caught if w.category is torch.jit.TracerWarning}), traced(*call)

    same(program, accelerated=False)


def heat() -> nn.HEATConv:
    return nn.HEATConv(D, 5, 2, RELATIONS, 4, 3, 6, heads=2)


def test_traced_types():
    """HeteroLinear too is PyG's own in a trace."""

    def program(wrap):
        call = rand(N, D), edges(), torch.arange(N) % 2, types(), rand(E, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.trace(wrap(heat()), call, check_trace=False)(*call)

    same(program, accelerated=False)


def test_forward_mode_of_types():
    def program(wrap):
        layer, x, call = wrap(heat()), rand(N, D), (edges(), torch.arange(N) % 2, types(), rand(E, 3))
        return torch.func.jvp(lambda x: layer(x, *call), (x,), (rand(N, D, seed=2),))

    same(program, accelerated=False)


def test_types_of_some_of_the_rows():
    """PyG drops the rows whose types are not given, where those that are have yet to be sorted."""

    def program(wrap):
        return train(wrap(heat()), rand(N + 3, D, grad=True), edges(), torch.arange(N) % 2, types(), rand(E, 3))

    same(program, accelerated=None)


def test_integers_with_weights():
    """Norms of float weights, where features are integers: APPNP promotes them."""

    def program(wrap):
        x = torch.arange(N * D).view(N, D) % 5
        return wrap(nn.APPNP(2, 0.1, dropout=0.5))(x, edges(), rand(E).abs()), wrap(nn.APPNP(2, 0.1))(
            x, edges(), rand(E).abs()
        )

    same(program, accelerated=None)


TWO = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "SGConv", "GINConv", "APPNP"])
@pytest.mark.filterwarnings("ignore:.*(CSR|sparse).*")
def test_integers_of_two_nodes(name, layout):
    """An adjacency matrix that has the shape and dtype of an edge_index: results, or PyG's own error."""
    make = {"GINConv": lambda: nn.GINConv(torch.nn.Linear(D, 5)), "APPNP": lambda: nn.APPNP(2, 0.1)}
    make = make.get(name, lambda: getattr(nn, name)(D, 5))

    def program(wrap):
        try:
            return wrap(make())(rand(2, D), TWO.to_sparse(layout=layout))
        except Exception as error:
            return type(error).__name__, str(error)

    same(program, dtype=torch.float32, accelerated=None)


WRONG = {
    "weighted, floating": lambda wrap: wrap(nn.GCNConv(D, 5))(rand(N, D), edges().double(), rand(E).abs()),
    "weighted, one row": lambda wrap: wrap(nn.GCNConv(D, 5))(rand(N, D), edges()[0], rand(E).abs()),
    "weighted, turned": lambda wrap: wrap(nn.APPNP(2, 0.1, dropout=0.5))(rand(N, D), edges().t(), rand(E).abs()),
    "weighted, integers": lambda wrap: wrap(nn.GCNConv(D, 5))(torch.ones(N, D).long(), edges(), rand(E).abs()),
    "one row": lambda wrap: wrap(nn.ARMAConv(D, 5))(rand(N, D), edges()[0]),
    "several aggregations of columns": lambda wrap: wrap(
        nn.SAGEConv(-1, 5, aggr=["mean", "max"], node_dim=-1, root_weight=False)
    )(rand(D, N), edges()),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_in_pygs_words(name):
    same(WRONG[name], accelerated=None, raises=True)


TURNED = {
    "HypergraphConv": lambda layer: layer(rand(N, D), edges(N, 30, 40)),
    "RGCNConv, a pair": lambda layer: layer((rand(7, D), rand(5, D)), edges(5, 5, 30), torch.arange(30) % 3),
}


@pytest.mark.parametrize("name", TURNED)
def test_flow_that_is_turned_afterwards(name):
    """Of layers with a forward() of ours: PyG's results, or its error."""

    def program(wrap):
        layer = wrap(nn.HypergraphConv(D, 5) if name == "HypergraphConv" else nn.RGCNConv(D, 5, 3))
        layer.flow = "target_to_source"
        try:
            return TURNED[name](layer)
        except Exception as error:
            return type(error).__name__, str(error)

    same(program, dtype=torch.float32, accelerated=None)


def test_fused_edge_index_of_unknown_size():
    """GraphConv multiplies by a sorted EdgeIndex, whose size PyG takes from its largest index."""

    def program(wrap):
        index = edges(N, 9)
        index = EdgeIndex(index[:, index[1].argsort()], sort_order="col")
        layer = wrap(nn.GraphConv((D, D), 5))
        return [layer((rand(int(index[0].max()) + 1, D), None), index) for _ in range(2)]

    same(program, dtype=torch.float32, accelerated=None)


class Exponent:
    """A number of somebody's own, which takes part in powers from the right."""

    def __rpow__(self, base):
        return base.abs() ** 1.5


class Powers(MessagePassing):
    def __init__(self, exponent, mapped):
        super().__init__()
        self.exponent, self.mapped = exponent, mapped

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return (x_j + x_i if self.mapped else x_j) ** self.exponent


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("exponent", [Exponent(), int], ids=["own", "none"])
def test_operands_that_torch_does_not_know(exponent, mapped):
    """They have the word, or Python has."""

    def program(wrap):
        return train(wrap(Powers(exponent, mapped)), rand(N, 18, grad=True), edges())

    same(program, accelerated=None, raises=exponent is int)
