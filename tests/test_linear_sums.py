"""Sums with linear maps around them, one node of autograd each, against the reference's sums and torch's maps."""

import pytest
import torch
from graphs import make
from oracle import check, rand
from torch.nn import functional as F

from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import linear_sums, reference

IN, OUT = 6, 4


def again(name="power_law"):
    graph = make(name)
    return Graph(graph.indptr, graph.indices, graph.edge_ids, graph.num_cols)


def behind(graph, reduce="mean"):
    """The map behind the sum, beside that of the features themselves."""

    def ours(x, weight, bias, own_weight):
        return linear_sums.sum_mapped(graph, x, reduce, weight, bias, own_weight)

    def exact(x, weight, bias, own_weight):
        sums = reference.spmm(graph, x, None, "copy_lhs", reduce)
        return F.linear(sums, weight, bias) + F.linear(x[: graph.num_rows], own_weight)

    return ours, exact, [(graph.num_cols, IN), (OUT, IN), (OUT,), (OUT, IN)]


def apart(graph, reduce):
    """The same beside the map of features that the destinations alone have, of another width."""

    def ours(x, own, weight, bias, own_weight):
        return linear_sums.sum_mapped(graph, x, reduce, weight, bias, own_weight, own)

    def exact(x, own, weight, bias, own_weight):
        sums = reference.spmm(graph, x, None, "copy_lhs", reduce)
        return F.linear(sums, weight, bias) + F.linear(own, own_weight)

    return ours, exact, [(graph.num_cols, IN), (graph.num_rows, IN - 1), (OUT, IN), (OUT,), (OUT, IN - 1)]


def before(graph):
    scale = rand(graph.num_rows)

    def ours(x, weight, bias):
        return linear_sums.mapped_sum(graph, x, weight, scale.to(x.dtype), bias)

    def exact(x, weight, bias):
        sums = reference.spmm(graph, F.linear(x, weight) * scale[:, None], None, "copy_lhs", "sum")
        return sums * scale[:, None] + bias

    return ours, exact, [(graph.num_cols, IN), (OUT, IN), (OUT,)]


FORMS = {
    "mean": behind,
    "sum": lambda graph: behind(graph, "sum"),
    "mean, own features": lambda graph: apart(graph, "mean"),
    "sum, own features": lambda graph: apart(graph, "sum"),
    "map first": before,
}


def leaves(shapes, dtype=torch.float64):
    return [rand(*shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["power_law", "duplicates", "loops", "one_edge"])
def test_linear_sums_against_the_reference(name, form, dtype):
    ours, exact, shapes = FORMS[form](again(name))
    for _ in range(3):  # once, ready with its backward, ready
        check(ours, exact, *(rand(*shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_block(rows, reduce):
    """Its destinations are the first of its sources."""
    ends = torch.randint(max(rows, 1), (20 if rows else 0,)), torch.randint(12, (20 if rows else 0,))
    graph = Graph.from_coo(*ends, num_rows=rows, num_cols=12)
    ours, exact, shapes = behind(graph, reduce)
    for _ in range(3):
        check(ours, exact, *(rand(*shape) for shape in shapes))
    given = leaves(shapes)
    assert not rows or (torch.autograd.gradcheck(ours, given) and torch.autograd.gradgradcheck(ours, given))


@pytest.mark.parametrize(("rows", "cols", "edges"), [(0, 5, 0), (5, 0, 0), (4, 3, 0), (9, 3, 12), (3, 9, 12)])
def test_between_two_kinds_of_nodes(rows, cols, edges):
    ends = [torch.randint(max(count, 1), (edges,)) for count in (rows, cols)]
    ours, exact, shapes = apart(Graph.from_coo(*ends, num_rows=rows, num_cols=cols), "mean")
    for _ in range(3):
        check(ours, exact, *(rand(*shape) for shape in shapes))
    given = leaves(shapes)
    assert not (rows and cols) or (torch.autograd.gradcheck(ours, given) and torch.autograd.gradgradcheck(ours, given))


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_of_derivatives_of_linear_sums(form):
    u, v = torch.tensor([[0, 1, 2, 3, 3, 0], [1, 2, 0, 3, 1, 1]])
    graph = Graph.from_coo(u, v, num_rows=4, num_cols=4)
    ours, _, shapes = FORMS[form](graph)
    given = leaves(shapes)
    assert torch.autograd.gradcheck(ours, given)
    assert torch.autograd.gradgradcheck(ours, given)


@pytest.mark.parametrize("form", FORMS)
def test_some_gradients_alone_of_linear_sums(form):
    ours, exact, shapes = FORMS[form](again())
    for wanted in range(len(shapes)):
        given = [t.requires_grad_(k == wanted) for k, t in enumerate(leaves(shapes))]
        out = ours(*given)
        if out is None:  # the ops would let x be written into
            assert len(given) > 3 and wanted != len(given) - 1
            continue
        got, want = (torch.autograd.grad(t.square().sum(), given[wanted])[0] for t in (out, exact(*given)))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("frozen", range(5))
@pytest.mark.parametrize("form", FORMS)
def test_all_gradients_but_one(form, frozen):
    ours, exact, shapes = FORMS[form](again())
    given = [t.requires_grad_(k != frozen) for k, t in enumerate(leaves(shapes))]
    asked, out = [t for t in given if t.requires_grad], ours(*given)
    if out is not None:
        got, want = (torch.autograd.grad(t.square().sum(), asked) for t in (out, exact(*given)))
        torch.testing.assert_close(got, want)
    assert out is not None or frozen == len(given) - 1


@pytest.mark.parametrize("form", FORMS)
def test_modes_of_linear_sums(form):
    ours, _, shapes = FORMS[form](again())
    given = leaves(shapes)
    out = ours(*given)
    many = rand(3, *out.shape)
    batched = torch.autograd.grad(out, given, many, is_grads_batched=True)
    for k, each in enumerate(many):
        torch.testing.assert_close([t[k] for t in batched], [*torch.autograd.grad(ours(*given), given, each)])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(ours(*given), out.detach())
    with torch.autograd.graph.save_on_cpu():
        packed = torch.autograd.grad(ours(*given).sum(), given)
    torch.testing.assert_close(packed, torch.autograd.grad(ours(*given).sum(), given))


@pytest.mark.parametrize("form", FORMS)
def test_left_to_the_ops_where_somebody_listens(form):
    ours, _, shapes = FORMS[form](again())
    given = leaves(shapes)
    with torch.autograd.profiler.profile():
        assert ours(*given) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(*given) is None
    for wrong in (
        lambda t: t.float(),
        lambda t: t[..., :3],
        lambda t: t.as_subclass(type("Mine", (torch.Tensor,), {})),
    ):
        changed = [*given[:1], wrong(given[1]), *given[2:]]
        assert ours(*changed) is None
    assert type(ours(*given).grad_fn).__name__ in ("_SumMappedBackward", "_MappedSumBackward")


@pytest.mark.parametrize("wide", [True, False], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_under_autocast(reduce, wide):
    """As torch's ops one by one: dtypes, values and gradients of both orders, and what is kept for them."""
    graph, dtype = again("duplicates"), torch.float32 if wide else torch.bfloat16
    shapes = behind(graph)[2]
    x, *maps = (rand(*shape, dtype=dtype if k == 0 else torch.float32) for k, shape in enumerate(shapes))
    given = [x.requires_grad_(), *(t.requires_grad_() for t in maps)]

    def composed(x, weight, bias, own_weight):
        return F.linear(ops.spmm(graph, x, reduce=reduce), weight, bias) + F.linear(x, own_weight)

    def results(function):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(*given)
        upstream = rand(*out.shape, dtype=torch.bfloat16)
        grads = torch.autograd.grad(out, given, upstream, create_graph=True)
        again = torch.autograd.grad(sum(g.float().square().sum() for g in grads), given[:2] + given[3:])
        return [out, *grads, *again]

    torch.manual_seed(0)
    got = results(lambda *t: linear_sums.sum_mapped(graph, t[0], reduce, *t[1:]))
    torch.manual_seed(0)
    for ours, theirs in zip(got, results(composed), strict=True):
        assert ours.dtype == theirs.dtype
        size = float(theirs.detach().float().abs().max())
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=2e-2 * size)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear_sums.sum_mapped(graph, x, reduce, *maps)
    assert type(out.grad_fn).__name__ == "_NarrowSumMappedBackward"
    if wide:
        with torch.no_grad():
            x.add_(1)
        out.sum().backward()


@pytest.mark.parametrize("asks", ["x", "weight", "both"])
@pytest.mark.parametrize("bias", [True, False])
def test_mapped_under_autocast(bias, asks):
    """Near to float64, as near as float32 sums of what autocast maps; of the dtype of x; and a second derivative."""
    graph = again("duplicates")
    scale = rand(graph.num_rows, dtype=torch.float32).abs()
    shapes = ((graph.num_cols, IN), (OUT, IN), *(((OUT,),) if bias else ()))
    x, weight, shift = [rand(*shape, dtype=torch.float32) for shape in shapes] + ([] if bias else [None])
    x.requires_grad_(asks != "weight")
    weight.requires_grad_(asks != "x")
    given = [t for t in (x, weight, shift.requires_grad_() if bias else None) if t is not None and t.requires_grad]

    def exactly(x, weight, shift):
        mapped = F.linear(x, weight)
        return ops.graph_conv(graph, mapped, source_scale=scale.to(x), row_scale=scale.to(x), bias=shift)

    with torch.autocast("cpu", torch.bfloat16):
        out = linear_sums.mapped_sum(graph, x, weight, scale, shift)
    assert type(out.grad_fn).__name__ == "_NarrowMappedSumBackward" and out.dtype == torch.float32
    exact = {id(t): t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, shift) if t is not None}
    want = exactly(*(None if t is None else exact[id(t)] for t in (x, weight, shift)))
    upstream = rand(*out.shape, dtype=torch.float32)
    for create in (False, True):
        grads = torch.autograd.grad(out, given, upstream, create_graph=create, retain_graph=True)
        of_exact = [exact[id(t)] for t in given]
        wants = torch.autograd.grad(want, of_exact, upstream.double(), create_graph=create, retain_graph=True)
        for ours, theirs, like in zip([out, *grads], [want, *wants], [out, *given], strict=True):
            assert ours.dtype == like.dtype
            size = float(theirs.detach().abs().max())
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-2 * size)
    if asks == "both":
        again_ = torch.autograd.grad(sum(g.square().sum() for g in grads), (x, weight))
        wants = torch.autograd.grad(sum(g.square().sum() for g in wants), [exact[id(t)] for t in (x, weight)])
        for ours, theirs in zip(again_, wants, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3e-2 * float(theirs.abs().max()))
    with torch.autocast("cpu", torch.float16):
        assert linear_sums.mapped_sum(graph, x, weight, scale, shift) is None


@pytest.mark.parametrize("form", ["behind", "before"])
def test_parameters_under_autocast_may_be_written_into(form):
    """Before a first derivative, as torch's maps keep what autocast has cast."""
    graph = again("duplicates")
    ours, _, shapes = behind(graph) if form == "behind" else before(graph)
    given = [rand(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*given)
    assert type(out.grad_fn).__name__.startswith("_Narrow")
    grads = torch.autograd.grad(out.sum(), given, retain_graph=True)
    with torch.no_grad():
        for parameter in given[1:]:
            parameter.add_(1)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), given, retain_graph=True), grads))
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(out.sum(), given, create_graph=True)


def test_a_scale_that_was_written_into():
    graph, scale = again(), rand(120).abs()
    x, weight = leaves([(120, IN), (OUT, IN)])
    out = linear_sums.mapped_sum(graph, x, weight, scale, None)
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_scales_that_cannot_be_ready():
    """The op's own way, in the same node."""
    graph, scale = again(), rand(240)[::2]
    x, weight = leaves([(120, IN), (OUT, IN)])
    out = linear_sums.mapped_sum(graph, x, weight, scale, None)
    want = ops.graph_conv(graph, F.linear(x, weight), source_scale=scale, row_scale=scale)
    torch.testing.assert_close(out, want)
    results = (torch.autograd.grad(t.square().sum(), (x, weight)) for t in (out, want))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("ready_first", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_checkpointing_while_a_graph_earns_other_kernels(form, ready_first, monkeypatch):
    """A call that is made again may find its sum ready, or not ready any more: by tiles, say."""
    ours, exact, shapes = FORMS[form](again())
    inputs = leaves(shapes)
    want = exact(*inputs)
    known, calls = linear_sums.ready.call_of, []

    def call_of(*given):
        calls.append(given)
        return known(*given) if (len(calls) == 1) is ready_first else None

    monkeypatch.setattr(linear_sums.ready, "call_of", call_of)
    got = torch.utils.checkpoint.checkpoint(ours, *inputs, use_reentrant=False)
    torch.testing.assert_close(got, want)
    grads = torch.autograd.grad(got.square().sum(), inputs)
    assert len(calls) >= 2
    for one, other in zip(grads, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        torch.testing.assert_close(one, other)
