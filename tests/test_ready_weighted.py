"""Weighted sums whose calls are kept: the same bits as the general way, whatever asks for a gradient, in every mode."""

import importlib
from functools import partial

import pytest
import torch
from graphs import NAMES, make
from oracle import check, rand

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import ready, ready_weighted, reference

general = importlib.import_module("gnnaccel.ops.spmm").choose
WANTED = [(True, True), (True, False), (False, True), (False, False)]


def again(graph):
    """A graph of the same arrays that nothing is kept for."""
    return Graph(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols)


def results(out, *leaves):
    asked = [t for t in leaves if t.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out.square().sum(), asked) if asked else ())]


def exact(graph, x, weight):
    return reference.spmm(graph, x, weight.view(-1, 1), "mul", "sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_ready_weighted_sums_against_the_reference(name, dtype):
    for index in (torch.int32, torch.int64):
        graph = again(make(name, index))
        for width in (1, 7, 16, 33):
            x = rand(graph.num_cols, width, dtype=dtype)
            for weight in (rand(graph.nnz, dtype=dtype), rand(graph.nnz, 1, dtype=dtype)):
                check(partial(ops.spmm, graph), partial(exact, graph), x, weight)
        assert bool(ready.calls_of(graph)) == (graph.nnz > 0)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [7, 16])
def test_the_bits_of_the_general_way(width, dtype, wanted):
    graph = again(make("power_law"))
    x = rand(120, width, dtype=dtype).requires_grad_(wanted[0])
    weight = rand(graph.nnz, dtype=dtype).requires_grad_(wanted[1])
    want = results(general(graph, x, weight.view(-1, 1), "mul", "sum"), x, weight)
    for _ in range(2):
        got = results(ops.spmm(graph, x, weight), x, weight)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("wanted", WANTED[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_call_on_a_graph(name, dtype, wanted):
    """Which makes no transposed graph, and gives the bits of those that come later, forward and backward."""
    for index in (torch.int32, torch.int64):
        graph, found = again(make(name, index)), []
        x = rand(graph.num_cols, 8, dtype=dtype).requires_grad_(wanted[0])
        weight = rand(graph.nnz, dtype=dtype).requires_grad_(wanted[1])
        for made in [False] * bounds.NEW_GRAPH_USES + [True] * 2:
            found.append(results(ops.spmm(graph, x, weight), x, weight))
            if 0 < graph.nnz <= bounds.SMALL_GRAPH["cpu"]:
                assert (graph._transposed is not None) == (made and wanted[0])
        for later in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True))


UNUSUAL = {
    "x a view": lambda x, w: (torch.cat([x, x], 1)[:, 1:6], w),
    "x negated": lambda x, w: (torch._neg_view(x), w),
    "weight a view": lambda x, w: (x, torch.stack([w, w], 1)[:, 0]),
    "weight negated": lambda x, w: (x, torch._neg_view(w)),
    "weight of a subclass": lambda x, w: (x, w.as_subclass(type("Mine", (torch.Tensor,), {}))),
    "weight of each feature": lambda x, w: (x, w[:, None] * torch.ones(5, dtype=w.dtype)),
    "heads": lambda x, w: (x.view(-1, 5, 1), w),
    "parameters": lambda x, w: (torch.nn.Parameter(x), torch.nn.Parameter(w)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_input(name):
    graph = again(make("power_law"))
    ops.spmm(graph, rand(120, 5), rand(graph.nnz))
    x, weight = UNUSUAL[name](rand(120, 5), rand(graph.nnz))
    plain = weight.as_subclass(torch.Tensor).clone().contiguous()
    want = reference.spmm(
        graph, x, plain.view(graph.nnz, *plain.shape[1:], *[1] * (x.dim() - plain.dim())), "mul", "sum"
    )
    torch.testing.assert_close(ops.spmm(graph, x, weight).as_subclass(torch.Tensor), want)


def test_derivatives_of_derivatives_of_ready_weighted_sums():
    graph = again(make("loops"))
    leaves = rand(graph.num_cols, 4).requires_grad_(), rand(graph.nnz).requires_grad_()
    for wanted in WANTED[:3]:
        given = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        assert torch.autograd.gradcheck(lambda x, w: ops.spmm(graph, x, w), given, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda x, w: ops.spmm(graph, x, w), given, fast_mode=True)


def test_modes_of_ready_weighted_sums():
    graph = again(make("power_law"))
    given = [rand(120, 8).requires_grad_(), rand(graph.nnz).requires_grad_()]
    out = ops.spmm(graph, *given)
    many = rand(3, *out.shape)
    batched = torch.autograd.grad(out, given, many, is_grads_batched=True)
    for k, each in enumerate(many):
        alone = torch.autograd.grad(ops.spmm(graph, *given), given, each)
        torch.testing.assert_close([t[k] for t in batched], [*alone])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ops.spmm(graph, *given), out.detach())
    want = torch.autograd.grad(ops.spmm(graph, *given).sum(), given)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t(), lambda t: t.t().contiguous().t().t()):
        torch.testing.assert_close(torch.autograd.grad(ops.spmm(graph, *given).sum(), given), want)
    compiled = torch.compile(lambda x, w: ops.spmm(graph, x, w), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), out)


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("written", [0, 1])
def test_what_is_written_into(written, asked):
    """A factor is kept for the gradient of the other alone."""
    graph = again(make("power_law"))
    leaves = [rand(120, 5), rand(graph.nnz)]
    given = [t.requires_grad_() * 1 if k == asked else t for k, t in enumerate(leaves)]
    out = ops.spmm(graph, *given)
    given[written].mul_(2)
    if written == asked:
        torch.autograd.grad(out.sum(), leaves[asked])
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves[asked])


def test_errors_are_those_of_the_op():
    graph = again(make("power_law"))
    with pytest.raises(ValueError, match="spmm: weight: expected 900 rows"):
        ops.spmm(graph, rand(120, 5), rand(7))
    with pytest.raises(TypeError, match="dtype"):
        ops.spmm(graph, rand(120, 5), torch.ones(900, dtype=torch.int64))


@pytest.mark.parametrize("ready_first", [True, False])
def test_checkpointing_while_a_sum_becomes_ready(ready_first, monkeypatch):
    """The general way and the ready one keep the same tensors."""
    made = torch.Generator().manual_seed(0)
    graph = Graph.from_coo(*torch.randint(0, 20, (2, 90), generator=made), num_rows=20, num_cols=20)
    inputs = [torch.randn(20, 8, generator=made).requires_grad_(), torch.randn(90, generator=made).requires_grad_()]
    want = torch.autograd.grad(ops.spmm(graph, *inputs).square().sum(), inputs)
    known, calls = ready_weighted.call_of, []

    def call_of(*given):
        calls.append(given)
        return known(*given) if (len(calls) == 1) is ready_first else None

    monkeypatch.setattr(ready_weighted, "call_of", call_of)
    out = torch.utils.checkpoint.checkpoint(lambda *t: ops.spmm(graph, *t), *inputs, use_reentrant=False)
    for got, one in zip(torch.autograd.grad(out.square().sum(), inputs), want, strict=True):
        torch.testing.assert_close(got, one)
    assert len(calls) == 2
