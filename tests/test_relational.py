"""ops.relational_spmm and segment_matmul against their definitions in float64: values, gradients, modes, bad input."""

import importlib

import graphs
import pytest
import torch
from oracle import check, rand
from torch.autograd import gradcheck, gradgradcheck

from gnnaccel import Graph, ops
from gnnaccel.graph.cache import derived
from gnnaccel.lower import bounds
from gnnaccel.ops import _relations, reference
from gnnaccel.ops.relational import Own, _edges_by_bases, relational_layer

# name -> shape of weight for 6 features, of coefficients, whether there is a norm, reduce
KINDS = {
    "plain": ((5, 6, 4), None, False, "sum"),
    "norm": ((5, 6, 4), None, True, "sum"),
    "mean": ((5, 6, 4), None, False, "mean"),
    "mean_norm": ((5, 6, 4), None, True, "mean"),
    "max": ((5, 6, 4), None, False, "max"),
    "min": ((5, 6, 4), None, False, "min"),
    "bases": ((3, 6, 4), (5, 3), True, "sum"),
    "one_basis_mean": ((1, 6, 4), (5, 1), False, "mean"),
    "blocks": ((5, 3, 2, 1), None, True, "sum"),
    "blocks_mean": ((5, 2, 3, 2), None, False, "mean"),
    "block_bases": ((2, 2, 3, 2), (5, 2), False, "sum"),
}


def types_of(graph, count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    types = torch.randint(0, count, (graph.nnz,), generator=generator)
    types[types == 2] = 0  # a relation without edges
    return types


def factors(graph, kind, dtype, features=True):
    shape, coefficients, norm, _ = KINDS[kind]
    given = {"weight": rand(*shape, dtype=dtype)}
    if features:
        given["x"] = rand(graph.num_cols, 6, dtype=dtype)
    if coefficients:
        given["coefficients"] = rand(*coefficients, dtype=dtype)
    if norm:
        given["norm"] = rand(graph.nnz, dtype=dtype)
    return given


def pair(graph, types, given, reduce):
    """The op and its definition as functions of the tensors of `given`."""
    names = list(given)

    def of(function):
        def call(*tensors):
            named = dict(zip(names, tensors, strict=True))
            return function(graph, named.pop("x", None), types, reduce=reduce, **named)

        return call

    return of(ops.relational_spmm), of(reference.relational_spmm)


def _has_exact_last_bits(name, kind, dtype):
    """What is rounded before the maps differs in its last bits."""
    return dtype != torch.bfloat16 or (KINDS[kind][3] == "sum" and name in ("tall", "wide"))


@pytest.mark.parametrize("least_rows", [1, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["no_edges", "one_edge", "empty_rows", "duplicates", "tall", "wide", "power_law"])
@pytest.mark.only(where=_has_exact_last_bits)
def test_relational_sums_matches_reference(name, kind, dtype, least_rows, monkeypatch):
    monkeypatch.setattr(bounds, "RELATION_CHUNK", least_rows)
    reduce = KINDS[kind][3]
    graph = graphs.make(name)
    types = types_of(graph)
    given = factors(graph, kind, torch.float32 if dtype == torch.bfloat16 else dtype)
    op, definition = pair(graph, types, given, reduce)
    if dtype == torch.bfloat16:
        tensors = [t.bfloat16() for t in given.values()]
        got, want = op(*tensors), definition(*(t.double() for t in tensors))
        assert got.dtype == dtype and (got.double() - want).abs().max() <= 0.03 * want.abs().max()
        return
    check(op, definition, *given.values())


@pytest.mark.parametrize("kind", ["plain", "norm", "mean", "bases"])
@pytest.mark.parametrize("name", ["tall", "wide", "duplicates", "no_edges"])
def test_rows_of_matrices_for_nodes_without_features(name, kind):
    graph = graphs.make(name)
    shape, coefficients, norm, reduce = KINDS[kind]
    given = {"weight": rand(shape[0], graph.num_cols, 4)}
    if coefficients:
        given["coefficients"] = rand(*coefficients)
    if norm:
        given["norm"] = rand(graph.nnz)
    check(*pair(graph, types_of(graph), given, reduce), *given.values())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("made", [True, False])
def test_nodes_without_features_by_bases_or_matrices(made, reduce):
    """What is less to do."""
    nodes = 6 if made else 200
    graph = Graph.from_coo(*torch.randint(0, nodes, (2, 400)), num_rows=nodes, num_cols=nodes)
    types, given = torch.randint(0, 5, (400,)), {"weight": rand(3, nodes, 4), "coefficients": rand(5, 3)}
    relations = _relations.relations_of("test", graph, types, 5)
    assert _edges_by_bases(relations, given["coefficients"]) is not made
    check(*pair(graph, types, given, reduce), *given.values())


def test_many_relations_are_summed_by_bases():
    graph = graphs.make("duplicates")
    types = torch.randint(0, 50, (graph.nnz,))
    relations = _relations.relations_of("test", graph, types, 50)
    assert relations.num_rows > 2 * 2 * graph.num_cols  # what decides
    for norm in (None, rand(graph.nnz)):
        given = {"weight": rand(2, 6, 4), "x": rand(graph.num_cols, 6), "coefficients": rand(50, 2)}
        given |= {} if norm is None else {"norm": norm}
        for reduce in ("sum", "mean"):
            check(*pair(graph, types, given, reduce), *given.values())


@pytest.mark.parametrize("kind", ["norm", "mean", "bases", "blocks", "max"])
@pytest.mark.parametrize("name", ["tall", "wide"])
def test_gradients_of_both_orders(name, kind):
    generator = torch.Generator().manual_seed(1)
    rows, cols = (7, 3) if name == "tall" else (3, 7)
    graph = Graph.from_coo(
        torch.randint(0, rows, (20,), generator=generator),
        torch.randint(0, cols, (20,), generator=generator),
        num_rows=rows,
        num_cols=cols,
    )
    given = factors(graph, kind, torch.float64)
    op, _ = pair(graph, types_of(graph), given, KINDS[kind][3])
    leaves = [t.requires_grad_() for t in given.values()]
    assert gradcheck(op, leaves)
    assert gradgradcheck(op, leaves)


def layer(graph, types, kind, one):
    """`relational_layer` with its definition, as functions of tensors; and these. `one`: x is the destinations' own."""
    shape, coefficients, _, reduce = KINDS[kind]
    given = factors(graph, kind, torch.float64)
    given.pop("norm", None)
    own = {} if one else {"own": rand(graph.num_rows, 3)}
    given |= own | {"root": rand(6 if one else 3, shape[-1] * (shape[1] if len(shape) == 4 else 1))}
    given["bias"] = rand(given["root"].shape[1])

    def call(*tensors):
        t = dict(zip(given, tensors, strict=True))
        own = Own(t["x"] if one else t["own"], t["root"], t["bias"])
        types_there = types.to(t["x"].device)
        there = graph.to(t["x"].device)
        return relational_layer(there, t["x"], types_there, t["weight"], t.get("coefficients"), reduce, own)

    def definition(*tensors):
        t = dict(zip(given, tensors, strict=True))
        rest = {"coefficients": t["coefficients"]} if coefficients else {}
        sums = reference.relational_spmm(graph, t["x"], types, t["weight"], reduce=reduce, **rest)
        return sums + (t["x"] if one else t["own"]) @ t["root"] + t["bias"]

    return call, definition, list(given.values())


@pytest.mark.parametrize("one", [True, False], ids=["own is x", "own features"])
@pytest.mark.parametrize("kind", ["plain", "mean", "one_basis_mean", "blocks_mean", "block_bases", "max"])
def test_layer_with_own_features(kind, one):
    generator = torch.Generator().manual_seed(1)
    graph = Graph.from_coo(*torch.randint(0, 6, (2, 30), generator=generator), num_rows=6, num_cols=6)
    call, definition, given = layer(graph, types_of(graph), kind, one)
    check(call, definition, *given)
    leaves = [t.requires_grad_() for t in given]
    assert gradgradcheck(call, leaves)
    for leaf in leaves:  # some gradients alone
        got, want = (torch.autograd.grad(f(*(t if t is leaf else t.detach() for t in leaves)).square().sum(), leaf)[0]
                     for f in (call, definition))  # fmt: skip
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("asked", ["x", "weight", "norm"])
@pytest.mark.parametrize("name", ["tall", "wide"])
def test_some_gradients_alone_of_relational_sums(name, asked):
    graph = graphs.make(name)
    given = factors(graph, "norm", torch.float64)
    given[asked].requires_grad_()
    op, definition = pair(graph, types_of(graph), given, "sum")
    got, want = (torch.autograd.grad(f(*given.values()).square().sum(), given[asked])[0] for f in (op, definition))
    torch.testing.assert_close(got, want)


def test_one_relation_with_nearly_all_edges():
    graph = graphs.make("power_law")
    types = torch.zeros(graph.nnz, dtype=torch.int64)
    types[::100] = 4
    given = factors(graph, "norm", torch.float32)
    check(*pair(graph, types, given, "sum"), *given.values())


def test_no_bases_give_zeros():
    graph = graphs.make("tall")
    x = rand(graph.num_cols, 6).requires_grad_()
    out = ops.relational_spmm(graph, x, types_of(graph), torch.zeros(0, 6, 4).double(), torch.zeros(5, 0).double())
    assert out.shape == (graph.num_rows, 4) and not out.any()
    assert not torch.autograd.grad(out.sum(), x)[0].any()


def test_edges_by_relation_are_kept_until_a_write():
    graph = graphs.make("wide")
    types, x, weight = types_of(graph), rand(graph.num_cols, 6), rand(5, 6, 4)
    key = ("relations", 5, graph.num_cols)

    def run(types=types):
        want = reference.relational_spmm(graph, x, types, weight)
        torch.testing.assert_close(ops.relational_spmm(graph, x, types, weight), want)
        return derived.get((types, graph.indptr), key)

    first = run()
    assert first is not None and run() is first
    types[0] = (types[0] + 1) % 5
    assert run() is not first
    before = len(derived)
    del types, run
    assert len(derived) < before


@pytest.mark.parametrize("kind", ["norm", "mean", "bases", "blocks", "max"])
def test_autocast_leaves_dtypes_alone(kind):
    graph = graphs.make("tall")
    given = factors(graph, kind, torch.float32)
    op, definition = pair(graph, types_of(graph), given, KINDS[kind][3])

    def cast(*tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return op(*tensors)

    check(cast, definition, *given.values())
    given["x"] = given["x"].bfloat16()
    assert cast(*given.values()).dtype == torch.float32


def test_edges_by_relation_go_with_the_graph():
    graph = Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 1, 0]))
    types = torch.tensor([0, 1, 0])
    ops.relational_spmm(graph, rand(2, 6), types, rand(2, 6, 4))
    ops.relational_spmm(graph, None, types, rand(2, 2, 4))
    before = len(derived)
    del graph
    assert len(derived) < before


@pytest.mark.parametrize("function", ["vmap", "grad", "compile", "inference", "checkpoint", "profiler"])
def test_modes_of_relational_sums(function):
    graph = graphs.make("tall")
    types, x, weight = types_of(graph), rand(graph.num_cols, 6), rand(5, 6, 4)
    want = reference.relational_spmm(graph, x, types, weight)

    def op(x, weight):
        return ops.relational_spmm(graph, x, types, weight)

    if function == "vmap":
        got = torch.func.vmap(op, (0, None))(torch.stack([x, 2 * x]), weight)[0]
    elif function == "grad":
        got = torch.func.grad(lambda x: op(x, weight).square().sum() / 2)(x)
        leaf = x.clone().requires_grad_()
        want = torch.autograd.grad(reference.relational_spmm(graph, leaf, types, weight).square().sum() / 2, leaf)[0]
    elif function == "compile":
        got = torch.compile(op, backend="aot_eager")(x, weight)
    elif function == "inference":
        with torch.inference_mode():
            got = op(x, weight)
        leaf = x.clone().requires_grad_()
        assert op(leaf, weight).requires_grad
    elif function == "checkpoint":
        leaf = x.clone().requires_grad_()
        got = torch.utils.checkpoint.checkpoint(op, leaf, weight, use_reentrant=False)
        got.sum().backward()
        assert leaf.grad is not None
        got = got.detach()
    else:
        with torch.profiler.profile():
            got = op(x, weight)
    torch.testing.assert_close(got, want)


def test_segment_matmul():
    for ptr in ([0, 2, 2, 7], [0, 0, 0, 7], [0, 7, 7, 7]):
        ptr = torch.tensor(ptr)
        x, weight = rand(7, 6).requires_grad_(), rand(3, 6, 4).requires_grad_()
        check(lambda x, w: ops.segment_matmul(x, ptr, w), lambda x, w: reference.segment_matmul(x, ptr, w), x, weight)  # noqa: B023
        assert gradgradcheck(lambda x, w: ops.segment_matmul(x, ptr, w), (x, weight))  # noqa: B023
        blocks = rand(3, 2, 3, 2).requires_grad_()
        assert gradcheck(lambda x, w: ops.segment_matmul(x, ptr, w), (x, blocks))  # noqa: B023
        for w in (weight, blocks):
            torch.library.opcheck(torch.ops.gnnaccel.segment_matmul, (x, ptr, w))
    torch.library.opcheck(torch.ops.gnnaccel.segment_matmul_weights, (x, ptr, rand(7, 4).requires_grad_(), 2))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped product")
def test_segment_matmul_by_torch(monkeypatch):
    """Torch's grouped product, which serves bfloat16 on CUDA, gives what a product for each segment gives."""
    module = importlib.import_module("gnnaccel.ops.segment_matmul")
    ptr = torch.tensor([0, 0, 9, 17, 17, 30])
    x, weight, grad = (rand(*shape).bfloat16() for shape in ((30, 8), (5, 8, 16), (30, 16)))

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = ops.segment_matmul(leaves[0], ptr, leaves[1])
        return [out, *torch.autograd.grad(out, leaves, grad)]

    want = run()
    used = []
    monkeypatch.setattr(module, "_takes_grouped", lambda *given: used.append(given) or True)
    monkeypatch.setattr(module, "_weights_pay", lambda *_: True)
    for ours, theirs in zip(run(), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert len(used) == 3


class There(torch.Tensor):
    """A tensor that passes for one on CUDA."""

    is_cuda = True


@pytest.mark.parametrize("place, aligned", [(slice(1), False), (slice(2), True), (slice(1, 2), False)])
@pytest.mark.parametrize("width", [32, 33])
def test_rows_that_torch_s_grouped_product_refuses(width, place, aligned, monkeypatch):
    """One row of a wider matrix is contiguous, and as far from a next one as that matrix is wide."""
    module = importlib.import_module("gnnaccel.ops.segment_matmul")
    monkeypatch.setattr(module, "_has_grouped", lambda device: True)
    x = torch.zeros(4, width, dtype=torch.bfloat16)[place, :16].contiguous()
    ptr = torch.tensor([0, *[len(x)] * bounds.GROUPED_SEGMENTS])
    assert module._takes_grouped(x.as_subclass(There), ptr, 16, 24) == (aligned or width == 32)


def test_grouped_matmul():
    for shapes in ([(3, 6, 4), (0, 6, 4), (5, 6, 4)], [(3, 6, 4), (2, 5, 4)], []):
        inputs = [rand(n, k).requires_grad_() for n, k, _ in shapes]
        others = [rand(k, m).requires_grad_() for _, k, m in shapes]
        outs = ops.grouped_matmul(inputs, others)
        torch.testing.assert_close(outs, reference.grouped_matmul(inputs, others))


GRAPH = graphs.make("tall")


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(edge_type=torch.full((GRAPH.nnz,), 5)), IndexError, r"in \[0, 5\), got 5 at edge 0"),
        (dict(edge_type=torch.full((GRAPH.nnz,), -3)), IndexError, r"in \[0, 5\), got -3"),
        (dict(edge_type=torch.zeros(3, dtype=torch.int64)), ValueError, "edge_type: expected"),
        (dict(edge_type=torch.zeros(GRAPH.nnz)), TypeError, "edge_type"),
        (dict(weight=rand(5, 7, 4)), ValueError, "weight: expected"),
        (dict(weight=rand(5, 6)), ValueError, "weight: expected"),
        (dict(weight=rand(5, 6, 4).float()), TypeError, "weight"),
        (dict(coefficients=rand(5, 4)), ValueError, "coefficients: expected"),
        (dict(norm=rand(GRAPH.nnz, 1)), ValueError, "norm: expected"),
        (dict(norm=rand(GRAPH.nnz), reduce="max"), ValueError, "norm: is for sum and mean"),
        (dict(x=None, weight=rand(5, 7, 4), reduce="max"), ValueError, "reduce: expected sum or mean without an x"),
        (dict(reduce="prod"), ValueError, "reduce: expected one of"),
        (dict(x=None), ValueError, "weight: expected"),
        (dict(graph="graph"), TypeError, "gnnaccel.Graph"),
    ],
)
def test_bad_arguments_of_relational_sums(change, error, words):
    given = dict(graph=GRAPH, x=rand(GRAPH.num_cols, 6), edge_type=types_of(GRAPH), weight=rand(5, 6, 4)) | change
    with pytest.raises(error, match=words):
        ops.relational_spmm(**given)


@pytest.mark.parametrize("ptr", [[0, 8], [1, 7], [0, 5, 3, 7]])
def test_segment_matmul_refuses_offsets_of_something_else(ptr):
    with pytest.raises(ValueError, match="segment_matmul"):
        ops.segment_matmul(rand(7, 6), torch.tensor(ptr), rand(len(ptr) - 1, 6, 4))
