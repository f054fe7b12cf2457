"""PyG layers on a torch_sparse.SparseTensor, accelerated against alone: outputs, all gradients, errors, caches."""

import copy
import gc

import pytest
import torch

pytest.importorskip("torch_geometric")
pytest.importorskip("torch_sparse", reason="torch_sparse is not installed: make test-sparse builds it")
import torch_sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_cases import BIPARTITE, CASES, MATRICES, Case, D, M, N, features, indices, matrix, values
from torch_geometric import nn, utils
from torch_geometric.nn.conv import MessagePassing
from torch_sparse import SparseTensor

import gnnaccel
from gnnaccel import pyg_backend, report
from gnnaccel.graph.cache import derived
from gnnaccel.pyg_backend import helpers

# PyG generates propagate() of a class for its first instance, and without the fused path if that one reduces by max.
for first in (nn.SAGEConv, nn.GraphConv):
    first(1, 1)


def leaves(tree):
    """Every tensor in nested tuples, dicts and sparse matrices."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, SparseTensor):
        return [t for t in tree.coo() if t is not None]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [leaf for item in items for leaf in leaves(item)]


def run(layer, call, inputs):
    """Outputs, and gradients of inputs and parameters, from fresh `inputs` () -> (x, adj, the leaves among them)."""
    x, adj, wanted = inputs()
    torch.manual_seed(5)
    outputs = leaves(call(layer, x, adj))
    wanted = [*wanted, *(p for p in layer.parameters() if p.requires_grad)]
    grown = [out for out in outputs if out.requires_grad]
    loss = sum((out * features(*out.shape, seed=9, dtype=out.dtype).detach()).sum() for out in grown)
    return outputs, torch.autograd.grad(loss, wanted, allow_unused=True) if grown else []


def assert_equal(got, expected, dtype):
    tolerance = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


def assert_same(case, inputs, dtype=torch.float64):
    """The accelerated layer does what the layer does, errors included, on the call sites that `case` names."""
    torch.manual_seed(2)
    plain = case.make().to(dtype)
    layer = pyg_backend.accelerate(copy.deepcopy(plain))
    try:
        expected = run(plain, case.call, inputs)
    except Exception as error:
        with pytest.raises(type(error)) as caught:
            run(layer, case.call, inputs)
        assert str(caught.value) == str(error)
        return error
    report.reset()
    got = run(layer, case.call, inputs)
    for a, b in zip(got, expected, strict=True):
        assert_equal(a, b, dtype)
    if case.kinds is not None and leaves(inputs()[1])[0].numel():  # PyG's zeros for no edges carry no gradient: left
        sites = report.snapshot()
        assert {kind for kind, site in sites.items() if site.accelerated} == set(case.kinds), sites
        assert not any(site.left for site in sites.values()), sites
    return None


def inputs_of(case, form, carries, dtype, rows=N):
    """() -> x, adj, leaves. `carries`: "nothing", "values" or "gradients"; rows other than N make x a pair."""

    def make():
        x = features(N, D, dtype=dtype)
        if rows != N:
            x = x, features(rows, 4, dtype=dtype, seed=2)
        value = None
        if carries != "nothing":
            value = values(case.values, len(indices(rows, N)[0]), dtype, grad=carries == "gradients")
        adj = MATRICES[form](value, rows, N)
        return x, adj, [t for t in leaves((x, value)) if t.requires_grad]

    return make


def carried(cases):
    """Each layer with what its matrix can carry."""
    for name, case in cases.items():
        yield name, "values"
        if case.values != "type":
            yield name, "gradients"
        if case.values == "weight":
            yield name, "nothing"


def check(case, form, carries, dtype=torch.float64, rows=N):
    """The case on one kind of matrix; PyG must refuse it where the table says so, and there alone."""
    error = assert_same(case, inputs_of(case, form, carries, dtype, rows), dtype)
    refused = {"always": True, "values": carries != "nothing", "float64": dtype == torch.float64, "": False}
    if form != "empty":  # of which some layers have no maximum
        assert (error is not None) == refused[case.refuses], error


@pytest.mark.parametrize(("name", "carries"), carried(CASES))
@pytest.mark.parametrize("form", MATRICES)
def test_layer_on_a_sparse_tensor(name, carries, form):
    check(CASES[name], form, carries)


@pytest.mark.parametrize("name", CASES)
def test_layer_in_float32(name):
    check(CASES[name], "unsorted", "nothing" if CASES[name].refuses == "values" else "values", torch.float32)


@pytest.mark.parametrize(("name", "carries"), carried(BIPARTITE))
@pytest.mark.parametrize("form", MATRICES)
def test_bipartite(name, carries, form):
    check(BIPARTITE[name], form, carries, rows=M)


class Fused(MessagePassing):
    """A user's layer with PyG's helper in its fused path, as PyG's documentation writes it."""

    def forward(self, x, adj):
        return self.propagate(adj, x=x, edge_weight=None)

    def message(self, x_j, edge_weight=None):
        return x_j if edge_weight is None else x_j * edge_weight.view(-1, 1)

    def message_and_aggregate(self, adj_t, x):
        return utils.spmm(adj_t, x, reduce=self.aggr)


class OwnMatmul(Fused):
    """The same with torch_sparse's own product, which is not ours to replace."""

    def message_and_aggregate(self, adj_t, x):
        return torch_sparse.matmul(adj_t, x, reduce=self.aggr)


class Unfused(MessagePassing):
    """A user's layer that takes its weights from the matrix."""

    def forward(self, x, adj):
        return self.propagate(adj, x=x, edge_weight=None)

    def message(self, x_j, edge_weight):
        return x_j if edge_weight is None else edge_weight.view(-1, 1) * x_j


@pytest.mark.parametrize("aggr", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("carries", ["nothing", "values", "gradients"])
@pytest.mark.parametrize("layer", [Fused, OwnMatmul, Unfused])
def test_users_layer(layer, carries, aggr):
    case = Case(lambda: layer(aggr=aggr))
    assert assert_same(case, inputs_of(case, "unsorted", carries, torch.float64)) is None
    site = report.snapshot()[f"pyg.{layer.__name__}"]
    assert bool(site.accelerated) == (layer is not OwnMatmul), site


@pytest.mark.parametrize("reduce", ["sum", "add", "mean", "min", "max", "mul"])
@pytest.mark.parametrize("carries", ["nothing", "values", "gradients", "float32", "attr"])
@pytest.mark.parametrize("width", [1, 3, None])
def test_spmm(reduce, carries, width):
    """Our spmm() is PyG's, including what it refuses."""
    kind = "attr" if carries == "attr" else "weight"
    results = []
    for function in (utils.spmm, helpers.spmm):
        count = len(indices(M, N)[0])
        dtype = torch.float32 if carries == "float32" else torch.float64
        value = None if carries == "nothing" else values(kind, count, dtype, grad=carries == "gradients")
        x = features(N, width) if width else features(N)
        wanted = [t for t in (x, value) if t is not None and t.requires_grad]
        try:
            out = function(matrix(value, M, N), x, reduce)
            results.append([out, *torch.autograd.grad((out * features(*out.shape, seed=9)).sum(), wanted)])
        except Exception as error:
            results.append((type(error), str(error)))
    assert type(results[0]) is type(results[1]), results
    if isinstance(results[0], tuple):
        assert results[0] == results[1]
    else:
        assert_equal(results[1], results[0], torch.float64)


STEPPED = {name: CASES[name].make for name in ("GCN", "SAGE", "SAGE max", "GAT", "GATv2", "Transformer", "Graph")}


def pairs():
    """Each layer alone and accelerated."""
    for name, make in STEPPED.items():
        torch.manual_seed(2)
        plain = make().double().eval()
        yield name, plain, pyg_backend.accelerate(copy.deepcopy(plain))


# What a user does to a matrix between two calls: returns the matrix to call with. Those that end in _ change it.
MUTATIONS = {
    "set_value": lambda a: a.set_value(values("weight", a.nnz(), torch.float64, seed=8), layout="coo"),
    "set_value_": lambda a: a.set_value_(values("weight", a.nnz(), torch.float64, seed=7), layout="coo"),
    "no value_": lambda a: a.set_value_(None),
    "value in place_": lambda a: a.set_value_(torch.ones(a.nnz()).double(), layout="coo").mul_(
        torch.arange(N)[:, None]
    ),
    "fill_value": lambda a: a.fill_value(2.0, dtype=torch.float64),
    "transpose": lambda a: a.t(),
    "masked_select": lambda a: torch_sparse.masked_select_nnz(a, torch.arange(a.nnz()) % 3 > 0, layout="coo"),
    "column in place_": lambda a: [a.storage.col().div_(2, rounding_mode="floor"), a][1],
    "value written_": lambda a: [a.storage.value().mul_(3) if a.has_value() else None, a][1],
    "set_diag": lambda a: torch_sparse.set_diag(a),
    "remove_diag": lambda a: torch_sparse.remove_diag(a),
    "permuted": lambda a: a.permute(torch.arange(N).flip(0)),
    "indexed": lambda a: a[torch.arange(N).roll(3)],
    "coalesced": lambda a: a.coalesce(),
    "symmetric": lambda a: a.to_symmetric(),
    "copy": lambda a: a.clone(),
    "same": lambda a: a,
    "another": lambda a: matrix(None, seed=a.nnz()),
}


def check_step(layers, adj, x):
    for name, plain, layer in layers:
        expected, got = plain(x, adj), layer(x, adj)
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation(name):
    layers, x = list(pairs()), features(N, D).detach()
    for value in (None, values("weight", 110, torch.float64)):
        adj = matrix(value)
        check_step(layers, adj, x)
        changed = MUTATIONS[name](adj)
        check_step(layers, changed, x)
        check_step(layers, adj, x)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(sorted(MUTATIONS)), max_size=6), st.integers(0, 1000))
def test_chains_of_mutations(chain, seed):
    layers = [pair for pair in pairs() if pair[0] in ("GCN", "SAGE", "GAT")]
    x, adj = features(N, D, seed=seed).detach(), matrix(None, seed=seed)
    for name in chain:
        check_step(layers, adj, x)
        adj = MUTATIONS[name](adj)
    check_step(layers, adj, x)


def test_matrices_that_share_their_columns_alone():
    """The same column tensor under other rows is another graph."""
    col = torch.arange(N)
    layers, x = list(pairs()), features(N, D).detach()
    for rows in (torch.arange(N), torch.arange(N) // 2, torch.zeros(N, dtype=torch.long)):
        check_step(layers, SparseTensor(row=rows, col=col, sparse_sizes=(N, N), is_sorted=True), x)
        rowptr = torch.searchsorted(rows, torch.arange(N + 1))
        check_step(layers, SparseTensor(rowptr=rowptr, col=col, sparse_sizes=(N, N), is_sorted=True), x)


def test_caches_die_with_the_matrix():
    layers, x = list(pairs()), features(N, D)
    gc.collect()
    before = len(derived)
    for value in (None, values("weight", 110, torch.float64), values("weight", 110, torch.float64, grad=True)):
        adj = matrix(value)
        for _, _, layer in layers:
            layer(x, adj).sum().backward(retain_graph=True)
        assert len(derived) > before
        del adj
        gc.collect()
        assert len(derived) == before


@pytest.mark.parametrize("name", ["GAT shown", "GATv2 shown", "Transformer shown", "FA shown"])
def test_returned_matrices_are_the_users_own(name):
    case, x, adj = CASES[name], features(N, D), matrix()
    layer = pyg_backend.accelerate(case.make().double()).eval()
    first, second = (case.call(layer, x, adj)[1] for _ in range(2))
    expected = [part.clone() for part in second.coo()]
    if first.storage.col() is not adj.storage.col():
        for part in first.coo():
            part.detach().zero_()
    third = case.call(layer, x, adj)[1]
    for matrix_ in (second, third):
        for a, b in zip(matrix_.coo(), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_one_structure_for_all_calls(monkeypatch):
    """Layers and steps that use one matrix build its structure once, whatever values it is given meanwhile."""
    built = []
    original = gnnaccel.Graph.from_csr.__func__
    monkeypatch.setattr(
        gnnaccel.Graph, "from_csr", classmethod(lambda cls, *a, **k: built.append(1) or original(cls, *a, **k))
    )
    x = features(N, D)
    names = {"SAGE", "GIN", "Graph", "Transformer"}, {"GCN", "APPNP", "GCN no loops", "GAT", "GATv2", "SG"}
    plain, looped = ([pyg_backend.accelerate(CASES[name].make().double()) for name in group] for group in names)
    for make in (matrix, MATRICES["by rowptr"]):
        adj = make()
        built.clear()
        for step in range(3):
            for layer in plain:
                layer(x, adj.set_value(values("weight", adj.nnz(), torch.float64, seed=step), layout="coo"))
                layer(x, adj)
        assert len(built) <= 2  # PyG may make the missing row indices once, after which they stand for the matrix
        for _ in range(3):
            for layer in looped:
                layer(x, adj)
        assert len(built) <= 2 + 3 * 2  # the matrix with and without self-loops, as gcn_norm and as attention make them


def test_prepare_as_graph_invalidate(monkeypatch):
    value = values("weight", 110, torch.float64)
    adj = matrix(value)
    graph = gnnaccel.as_graph(adj)
    assert gnnaccel.as_graph(adj) is graph is gnnaccel.prepare(adj).graph
    assert (graph.num_rows, graph.num_cols, graph.nnz) == (N, N, adj.nnz())
    row, col, _ = adj.coo()
    rowptr = torch.searchsorted(row, torch.arange(N + 1))
    assert torch.equal(graph.indptr.long(), rowptr) and torch.equal(graph.indices.long(), col)
    wide = gnnaccel.as_graph(matrix(None, M, N))
    assert (wide.num_rows, wide.num_cols) == (M, N)
    with pytest.raises(ValueError, match="num_nodes"):
        gnnaccel.as_graph(adj, num_nodes=N + 1)

    plain = nn.SAGEConv(D, 5).double()
    layer, x = pyg_backend.accelerate(copy.deepcopy(plain)), features(N, D).detach()
    report.reset()
    torch.testing.assert_close(layer(x, adj), plain(x, adj))
    assert report.share() == 1
    adj.storage.col().numpy()[:] = 0  # past torch: nobody can see it
    adj.storage.rowptr().numpy()[:] = rowptr.roll(0).numpy()
    gnnaccel.invalidate(adj)
    assert gnnaccel.as_graph(adj) is not graph
    torch.testing.assert_close(layer(x, adj), plain(x, adj))


def test_refused_as_pyg_refuses():
    """Wrong sizes, another kind of index and a reversed flow give PyG's own errors."""
    wrong = {
        "size": (nn.SAGEConv(D, 5), lambda: (features(N + 1, D, dtype=torch.float32), matrix())),
        "bipartite": (nn.SAGEConv(D, 5), lambda: (features(N, D, dtype=torch.float32), matrix(None, M, N))),
        "attention": (nn.GATConv(D, 5), lambda: (features(N - 2, D, dtype=torch.float32), matrix())),
        "half": (nn.GraphConv(D, 5), lambda: (features(N, D, dtype=torch.float32), matrix(torch.ones(110).half()))),
        "double": (nn.GraphConv(D, 5), lambda: (features(N, D, dtype=torch.float32), matrix(torch.ones(110).double()))),
        "flow": (nn.GATConv(D, 5, flow="target_to_source"), lambda: (features(N, D, dtype=torch.float32), matrix())),
    }
    for name, (plain, make) in wrong.items():
        results = []
        for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
            try:
                results.append(layer(*make()))
            except Exception as error:
                results.append((type(error), str(error)))
        if isinstance(results[0], tuple):
            assert results[0] == results[1], name
        else:
            torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_jit_script():
    for make in (lambda: nn.SAGEConv(D, 5), lambda: nn.GCNConv(D, 5)):
        plain = make()
        layer = pyg_backend.accelerate(copy.deepcopy(plain))
        x, adj = features(N, D, dtype=torch.float32).detach(), matrix()
        torch.testing.assert_close(torch.jit.script(layer)(x, adj), plain(x, adj))


def test_autocast_and_inference_mode():
    for _, plain, layer in pairs():
        x, adj = features(N, D, dtype=torch.float32).detach(), matrix()
        plain, layer = plain.float(), layer.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = []
            for module in (plain, layer):
                try:
                    results.append(module(x, adj))
                except RuntimeError as error:
                    results.append(type(error))
        if isinstance(results[0], type):
            assert results[0] is results[1]
        else:
            assert results[0].dtype == results[1].dtype
            torch.testing.assert_close(*results[::-1], rtol=3e-2, atol=3e-2)
        with torch.inference_mode():
            expected = layer(x, adj).clone()
        out = layer(x.requires_grad_(), adj)
        out.sum().backward()
        torch.testing.assert_close(out, expected)
        assert x.grad is not None
