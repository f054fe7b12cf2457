"""Sums whose calls are kept: the same bits as the general way, in every mode, and never out of date."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from graphs import NAMES, make
from oracle import check, rand
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel import ops, schedule
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import ready, reference
from gnnaccel.schedule import worklist

CASES = ["sum", "mean", "scaled"]


def scales(graph, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    return [rand(n, dtype=wide, device=graph.device) for n in (graph.num_cols, graph.num_rows)]


def op_of(case, graph, source, row):
    if case == "scaled":
        return lambda x: ops.graph_conv(graph, x, source_scale=source, row_scale=row)
    return lambda x: ops.spmm(graph, x, reduce=case)


def exact(case, graph, source, row):
    if case == "scaled":
        return lambda x: (
            reference.spmm(graph, x * source.double()[:, None], None, "copy_lhs", "sum") * row.double()[:, None]
        )
    return lambda x: reference.spmm(graph, x, None, "copy_lhs", case)


def kept(graph):
    return [*ready.calls_of(graph).values()]


def again(graph):
    """A graph of the same arrays that nothing is kept for."""
    return Graph(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_ready_sums_against_the_reference(name, case, dtype):
    for index in (torch.int32, torch.int64):
        graph = again(make(name, index))
        source, row = scales(graph, dtype)
        for width in (1, 7, 16):
            x = rand(graph.num_cols, width, dtype=dtype)
            for _ in range(2):  # made ready, ready
                out = check(op_of(case, graph, source, row), exact(case, graph, source, row), x)
            assert torch.equal(out, op_of(case, again(graph), source, row)(x))
        assert bool(kept(graph)) == (graph.num_rows > 0 and graph.num_cols > 0)


@pytest.fixture
def used():
    """A graph with ready sums of 5 features, and their scales."""
    graph = again(make("power_law"))
    source, row = scales(graph, torch.float64)
    for case in CASES * (1 + bounds.NEW_GRAPH_USES):
        op_of(case, graph, source, row)(rand(graph.num_cols, 5).requires_grad_()).sum().backward()
    assert [type(call) for call in kept(graph)] == [ready.Ready] * 3
    return graph, source, row


def _view(x):
    return torch.cat([x, x], 1)[:, 1:6]


INPUTS = {
    "a view": _view,
    "an offset": lambda x: torch.cat([x.flatten(), x.new_zeros(1)])[1:].view_as(x),
    "a parameter": torch.nn.Parameter,
    "negated": lambda x: torch._neg_view(x),
    "transposed": lambda x: x.t().contiguous().t(),
    "float32": lambda x: x.float(),
    "a subclass": lambda x: x.as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", INPUTS)
def test_unusual_input(used, case, name):
    graph, source, row = used
    x = INPUTS[name](rand(graph.num_cols, 5))
    if name == "float32":
        source, row = source.float(), row.float()
    plain = torch.Tensor(x.detach()) if name == "a subclass" else x.clone().contiguous()
    got, want = op_of(case, graph, source, row)(x), op_of(case, again(graph), source, row)(plain)
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_derivatives(used, case):
    graph, source, row = used
    op, x = op_of(case, graph, source, row), rand(graph.num_cols, 5).requires_grad_()
    assert torch.autograd.gradcheck(op, (x,))
    assert torch.autograd.gradgradcheck(op, (x,))
    many = torch.eye(5).repeat(graph.num_rows, 1, 1).permute(1, 0, 2).contiguous().double()
    (batched,) = torch.autograd.grad(op(x), x, many, is_grads_batched=True)
    single = [torch.autograd.grad(op(x), x, each)[0] for each in many]
    torch.testing.assert_close(batched, torch.stack(single))
    expanded = torch.ones((), dtype=x.dtype).expand(graph.num_rows, 5)
    torch.testing.assert_close(
        torch.autograd.grad(op(x), x, expanded)[0], torch.autograd.grad(op(x), x, expanded.clone())[0]
    )


@pytest.mark.parametrize("case", CASES)
def test_modes_of_ready_sums(used, case):
    graph, source, row = used
    op, x = op_of(case, graph, source, row), rand(graph.num_cols, 5).requires_grad_()
    want = op(x).detach()
    with torch.no_grad():
        out = op(x)
    assert torch.equal(out, want) and not out.requires_grad
    with torch.inference_mode():
        out = op(x)
        with torch.enable_grad():
            assert not op(x).requires_grad
    assert torch.equal(out, want) and out.is_inference()
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x), torch.autograd.grad(op(x).sum(), x))
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_before_training(case):
    graph = again(make("power_law"))
    source, row = scales(graph, torch.float64)
    with torch.inference_mode():
        for _ in range(1 + bounds.NEW_GRAPH_USES):
            want = op_of(case, graph, source, row)(x := rand(graph.num_cols, 5))
    for _ in range(1 + bounds.NEW_GRAPH_USES):
        out = op_of(case, graph, source, row)(leaf := x.clone().requires_grad_())
        (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert torch.equal(out, want) and [call.backward is None for call in kept(graph)] == [True, False]
    again_grad = torch.autograd.grad(op_of(case, again(graph), source, row)(leaf).sum(), leaf)
    torch.testing.assert_close((grad,), again_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_call_on_a_graph(name, case, dtype):
    """Which makes no transposed graph, and gives the bits of those that come later, forward and backward."""
    for index in (torch.int32, torch.int64):
        graph, results = again(make(name, index)), []
        source, row = scales(graph, dtype)
        x, upstream = rand(graph.num_cols, 5, dtype=dtype).requires_grad_(), rand(graph.num_rows, 5, dtype=dtype)
        for turned in [False] * bounds.NEW_GRAPH_USES + [True] * 2:
            out = op_of(case, graph, source, row)(x)
            results.append((out.detach(), *torch.autograd.grad(out, x, upstream)))
            if graph.nnz <= bounds.SMALL_GRAPH["cpu"] and x.numel() and out.numel():
                assert (graph._transposed is not None) == turned
        for later in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_the_first_call(case):
    source, row = scales(make("power_law"), torch.float64)
    x = rand(120, 5).requires_grad_()

    def op(x):
        return op_of(case, again(make("power_law")), source, row)(x)

    assert torch.autograd.gradcheck(op, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(op, (x,), fast_mode=True)
    expanded = torch.ones((), dtype=x.dtype).expand(120, 5)
    torch.testing.assert_close(
        torch.autograd.grad(op(x), x, expanded)[0], torch.autograd.grad(op(x), x, expanded.clone())[0]
    )
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(*(torch.autograd.grad(op(x).sum(), x)[0] for _ in range(2)))


def test_a_bias_at_the_first_call():
    for bias in (rand(5).requires_grad_(), rand(10)[::2], torch._neg_view(rand(5))):
        graph = again(make("power_law"))
        source, row = scales(graph, torch.float64)
        x = rand(120, 5)
        for _ in range(2):
            out = ops.graph_conv(graph, x, source_scale=source, row_scale=row, bias=bias)
            want = exact("scaled", graph, source, row)(x) + bias
            torch.testing.assert_close(out, want, check_dtype=False)
            if bias.requires_grad:
                grad = torch.autograd.grad(out, bias, torch.ones_like(out))[0]
                assert torch.equal(grad, torch.full_like(grad, 120))


def test_a_forward_that_is_run_again_under_a_checkpoint():
    """The run in the backward pass saves the same as the first, which made the call ready."""
    graph = make("power_law")
    source, row = scales(graph, torch.float64)
    x, upstream = rand(graph.num_cols, 5).requires_grad_(), rand(graph.num_rows, 5)
    for case in CASES:
        new = again(graph)
        (want,) = torch.autograd.grad(op_of(case, new, source, row)(x), x, upstream)
        op = op_of(case, again(graph), source, row)
        for _ in range(2):
            (got,) = torch.autograd.grad(checkpoint(op, x, use_reentrant=False), x, upstream)
            assert torch.equal(got, want)


def test_a_scale_that_was_written_into(used):
    graph, source, row = used
    x = rand(graph.num_cols, 5).requires_grad_()
    out = ops.graph_conv(graph, x, source_scale=source, row_scale=row)
    row.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_prepare_changes_is_seen(used):
    """Rows in another order are other calls."""
    graph, *_ = used
    before = kept(graph)
    gnnaccel.prepare(graph, reorder="degree")
    assert schedule.of(graph).order is not None
    schedule.of(graph).adopt_order(graph, dict.fromkeys(worklist.LANES, True))
    x = rand(graph.num_cols, 5).requires_grad_()
    for _ in range(2):
        check(op_of("sum", graph, None, None), exact("sum", graph, None, None), x.detach())
    assert len({*map(id, kept(graph))} & {*map(id, before)}) == len(before) - 1


def test_errors_are_those_of_the_op(used):
    graph, *_ = used
    with pytest.raises(ValueError, match="spmm: x: expected 120 rows"):
        ops.spmm(graph, rand(7, 5))
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        ops.spmm(graph, [1.0])
    with pytest.raises(TypeError, match="expected a floating-point dtype"):
        ops.spmm(graph, torch.ones(graph.num_cols, 5, dtype=torch.int64))


def test_copies_and_pickles_have_none(used):
    graph, *_ = used
    for other in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert not ready.calls_of(other)
        assert torch.equal(ops.spmm(other, torch.ones(120, 5)), ops.spmm(graph, torch.ones(120, 5)))


def test_many_widths_do_not_pile_up():
    graph = again(make("power_law"))
    for width in range(1, 200):
        for _ in range(2):
            ops.spmm(graph, torch.ones(120, width))
    assert len(ready.calls_of(graph)) <= 32


def test_new_scales_at_each_call_do_not_pile_up(used):
    graph, *_ = used
    before, refs = len(kept(graph)), []
    for _ in range(5):
        source, row = scales(graph, torch.float64)
        refs += [weakref.ref(source), weakref.ref(row)]
        for _ in range(2):
            check(op_of("scaled", graph, source, row), exact("scaled", graph, source, row), rand(120, 5))
    del source, row
    assert len(kept(graph)) == before and sum(ref() is not None for ref in refs) == 2


def test_what_is_ready_dies_with_its_graph():
    gc.disable()
    try:
        graph = again(make("power_law"))
        for _ in range(1 + bounds.NEW_GRAPH_USES):
            ops.spmm(graph, rand(120, 5).requires_grad_()).sum().backward()
        call = weakref.ref(graph), kept(graph)[0]
        del graph
        assert call[0]() is None and call[1].backward is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("case", CASES)
def test_first_sums_of_a_graph_that_lasts_go_back_by_its_own_calls(case, monkeypatch):
    """With the bits that they have else; and a graph that is not asked again has none."""
    source, row = scales(make("power_law"), torch.float64)
    width, seeds, turned = 8, [], []
    plain = ready.Once.transposed
    monkeypatch.setattr(ready.Once, "transposed", lambda *given, **more: turned.append(1) or plain(*given, **more))
    found = []
    for uses in (bounds.NEW_GRAPH_USES, bounds.NEW_GRAPH_USES + 1):
        graph = again(make("power_law"))
        op = op_of(case, graph, source, row)
        torch.manual_seed(0)
        xs = [rand(graph.num_cols, width).requires_grad_() for _ in range(uses)]
        outs = [op(x) for x in xs]
        seeds = seeds or [rand(*out.shape) for out in outs]
        grads = zip(xs, outs, [*seeds, seeds[0]], strict=False)
        found.append([torch.autograd.grad(out, x, seed)[0] for x, out, seed in grads])
    assert len(turned) == bounds.NEW_GRAPH_USES
    assert all(map(torch.equal, found[0], found[1]))
