"""Programs of messages against their definition in plain torch, in float64: values, gradients, gradients of those."""

import importlib
import itertools
import random

import pytest
import torch
from message_cases import (
    REDUCES,
    SOFTMAXES,
    TWO,
    USUAL,
    compare,
    compare_sums,
    defined,
    graph_of,
    k,
    messages_of,
    operands_of,
    options_of,
    q,
    random_message,
    w,
    x,
)

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import messages as m
from gnnaccel.ops import reference
from gnnaccel.ops.messages import walks
from gnnaccel.ops.messages.tape import _OPS
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.program.derivatives import ahead
from gnnaccel.program.program import FUNCTIONS, program_of


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("name", USUAL)
def test_usual_messages(name, reduce):
    for features, index in (((3,), torch.int32), ((2, 16), torch.int64), ((4, 7), torch.int32)):
        graph = graph_of(30, 20, 400, dtype=index)
        compare(graph, USUAL[name], operands_of(graph, USUAL[name], features), reduce, second=reduce != "mean")


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f != "round"])
def test_each_function(function):
    graph = graph_of(12, 9, 60)
    for message in messages_of(function):
        compare(graph, message, operands_of(graph, message, (4, 4)), "sum", second=True)


def test_a_case_for_each_primitive():
    """What the tests above make of the language reaches every operation of the kernel."""
    seen = set()
    for function in FUNCTIONS:
        args = (q > k, x, k) if function == "where" else (x, k) if function in TWO else (x,)
        for options, numbers in itertools.product(options_of(function), (False, True)):
            if numbers and len(args) == 2:
                args = (args[0], 0.7)
            message = m.Expression(function, args, options)
            for swapped in (message, m.Expression(function, args[::-1], options) if len(args) == 2 else message):
                shapes = tuple((leaf, (4, 4)) for leaf in swapped.leaves)
                seen |= {s.op for s in program_of(((swapped, "sum"),), shapes)[0].steps}
    inside = {"dot", "scale", "over_sum", "over_max", "spread"}  # made of others; of programs that reduce inside
    assert set(_OPS) - seen - inside <= {"copy", "expand", "winner", "fill", "keep"}  # of broadcasts and gradients


@pytest.mark.parametrize("seed", range(25))
def test_random_programs(seed, monkeypatch):
    made = random.Random(seed)
    graph = graph_of(made.randint(3, 40), made.randint(3, 40), made.randint(0, 300), seed)
    message = q * 0.1 + random_message(made, made.randint(1, 4))
    features = made.choice(((1,), (5,), (2, 3), (3, 16), (33,)))
    operands = operands_of(graph, message, features, seed, scale=0.5)
    implementation, calls = importlib.import_module("gnnaccel.ops.messages.reduce"), []
    walk = implementation.walk
    monkeypatch.setattr(implementation, "walk", lambda *given, **more: calls.append(given) or walk(*given, **more))
    compare(graph, message, operands, made.choice(REDUCES), second=True)
    assert len(calls) > 1, "the definition ran, forward or backward, in place of the kernel"


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_narrower_types(dtype, bound):
    graph = graph_of(25, 25, 500)
    for message in (USUAL["gated"], USUAL["norm"], USUAL["edges"], m.gelu(q + k), m.log(m.exp(q) + 1.0), m.softplus(q)):
        compare_sums(graph, message, operands_of(graph, message, (2, 24), dtype=dtype), bound)


def test_functions_of_float32_over_their_range():
    """Relative error against float64 of each function whose vectors are our own."""
    values = torch.cat(
        [torch.linspace(-120, 100, 40_001), torch.logspace(-44, 38, 5000), -torch.logspace(-44, 2, 5000)]
    )
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 88.72, -103.9, -87.4])
    values = torch.cat([values, special]).float()
    graph = Graph.from_coo(torch.arange(len(values)), torch.arange(len(values)))
    for name in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "relu", "abs", "sign"):
        got = ops.message_reduce(graph, m.Expression(name, (x,)), {"x": values[:, None]}, "none")[:, 0]
        want = getattr(torch, name)(values.double())
        torch.testing.assert_close(got.double(), want.float().double(), rtol=5e-7, atol=4e-39, equal_nan=True)


@pytest.mark.parametrize("degree", [511, 512, 513, 1024, 40_000])
def test_a_hub_keeps_its_digits(degree):
    made = torch.Generator().manual_seed(0)
    values = torch.rand(degree, 3, generator=made)
    graph = Graph.from_coo(torch.ones(degree, dtype=torch.long), torch.arange(degree), num_rows=3)
    for reduce in ("sum", "mean"):
        got = ops.message_reduce(graph, x * 1.5, {"x": values}, reduce)
        want = getattr(values.double() * 1.5, reduce)(0)
        torch.testing.assert_close(got[1].double(), want, rtol=1e-6, atol=0)
        assert not got[0].any() and not got[2].any()


@pytest.mark.parametrize("reduce", REDUCES)
def test_hubs_in_parts(reduce):
    """Rows of more nonzeros than one worker takes (cpp/rows.h: kHubRow), beside and between others."""
    made = torch.Generator().manual_seed(0)
    degrees = torch.tensor([3, 16_384, 0, 16_385, 40_000, 2])
    ends = torch.repeat_interleave(torch.arange(6), degrees)
    ends = ends[torch.randperm(len(ends), generator=made)]
    graph = Graph.from_coo(ends, torch.randint(0, 50, (len(ends),), generator=made), num_rows=6, num_cols=50)
    message = m.tanh(q + k) * w
    compare(graph, message, operands_of(graph, message, (3,)), reduce)
    operands = operands_of(graph, message, (3,), dtype=torch.float32)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(ops.message_reduce(graph, message, operands, reduce))
    torch.set_num_threads(before)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_several_in_one_walk():
    graph = graph_of(30, 20, 300)
    operands = operands_of(graph, USUAL["gated"] + k, (2, 5))
    kinds = ("mean", "max", "min", "sum", "none")
    several = ops.message_reduce(graph, [USUAL["gated"]] * 4 + [q - k], operands, kinds)
    alone = [
        ops.message_reduce(graph, g, operands, r) for g, r in zip([USUAL["gated"]] * 4 + [q - k], kinds, strict=True)
    ]
    for one, other in zip(several, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    leaves = list(operands.values())
    weights = [torch.randn_like(t) for t in several]
    got = torch.autograd.grad(sum((t * s).sum() for t, s in zip(several, weights, strict=True)), leaves)
    want = torch.autograd.grad(sum((t * s).sum() for t, s in zip(alone, weights, strict=True)), leaves)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
    part = ops.message_reduce(graph, [q * x, x - k], operands, "sum")[1]  # the other's gradient is asked for by nobody
    found = torch.autograd.grad(part.sum(), [operands["q"], operands["x"]], allow_unused=True, materialize_grads=True)
    assert not found[0].any() and found[1].any()


def test_results_do_not_depend_on_threads():
    graph = graph_of(400, 300, 30_000)
    operands = operands_of(graph, USUAL["gated"], (64,), dtype=torch.float32)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = ops.message_reduce(graph, USUAL["gated"], operands, "sum")
        found.append((out, *torch.autograd.grad(out.sum(), list(operands.values()))))
    torch.set_num_threads(before)
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, another, rtol=0, atol=0)


def test_of_equal_messages_the_first_wins():
    graph = Graph.from_coo(torch.tensor([0, 0, 0]), torch.tensor([2, 1, 0]), num_rows=2, num_cols=3)
    for reduce, message in (("max", x), ("min", -x)):
        values = torch.ones(3, 2, requires_grad=True)
        ops.message_reduce(graph, message * 1.0, {"x": values}, reduce).sum().backward()
        assert values.grad.abs().tolist() == [[0, 0], [0, 0], [1, 1]]
    nan = torch.tensor([[1.0], [torch.nan], [2.0]])
    assert ops.message_reduce(graph, x, {"x": nan}, "max")[0].isnan().all()


@pytest.mark.parametrize("rows, cols, edges", [(0, 0, 0), (4, 0, 0), (0, 4, 0), (3, 3, 0)])
def test_no_edges(rows, cols, edges):
    graph = Graph.from_coo(torch.zeros(edges, dtype=torch.long), torch.zeros(edges, dtype=torch.long),
                           num_rows=rows, num_cols=cols)  # fmt: skip
    for reduce in REDUCES:
        compare(graph, USUAL["gated"], operands_of(graph, USUAL["gated"], (4,)), reduce)
        compare(graph, USUAL["gated"], operands_of(graph, USUAL["gated"], (0,)), reduce)
    graph = graph_of(5, 5, 20)
    compare(graph, USUAL["gated"], operands_of(graph, USUAL["gated"], (0,)), "sum")


def test_views_and_columns():
    """Operands that are not contiguous, one tensor under two names, features of one dimension and of none."""
    graph = graph_of(20, 20, 200)
    base = torch.randn(8, 20, dtype=torch.float64, requires_grad=True)
    compare(graph, q * k, {"q": base.t(), "k": base.t()}, "sum")
    compare(graph, m.u("x") * m.v("x"), {"x": base.t()}, "sum")
    one = torch.randn(20, dtype=torch.float64, requires_grad=True)
    compare(
        graph,
        q * k + m.c("b"),
        {
            "q": one,
            "k": one.detach().clone().requires_grad_(),
            "b": torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
        },
        "sum",
    )


def test_modes_of_generated_messages():
    """Where torch listens: the op is seen, its fakes have the right shapes, and transforms go through."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    graph = graph_of(6, 6, 20)
    operands = {n: t.detach() for n, t in operands_of(graph, USUAL["gated"], (3,)).items()}
    want = ops.message_reduce(graph, USUAL["gated"], operands)

    names = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seen():
        torch.testing.assert_close(ops.message_reduce(graph, USUAL["gated"], operands), want)
    assert any("message_walk" in name for name in names)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = ops.message_reduce(graph, USUAL["gated"], {n: torch.empty_like(t) for n, t in operands.items()}, "max")
        assert fake.shape == want.shape
    with torch.inference_mode():
        torch.testing.assert_close(ops.message_reduce(graph, USUAL["gated"], operands), want)

    def loss(value):
        return ops.message_reduce(graph, USUAL["gated"], {**operands, "x": value}).square().sum()

    asked = operands["x"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(asked), asked)
    torch.testing.assert_close(torch.func.grad(loss)(operands["x"]), grad)
    torch.testing.assert_close(
        torch.compile(loss, fullgraph=True, backend="aot_eager")(operands["x"]), loss(operands["x"])
    )


def test_bad_programs_are_refused():
    graph = graph_of(6, 5, 20)
    good = {"q": torch.randn(5, 4), "k": torch.randn(6, 4)}
    apart = {"q": torch.randn(5, 2, 1, 3), "k": torch.randn(6, 2, 4, 3)}
    cases = [
        (ValueError, "operands: expected 'x' among", lambda: ops.message_reduce(graph, x * q, good)),
        (ValueError, "expected 6 rows", lambda: ops.message_reduce(graph, k * q, {"q": good["q"], "k": good["q"]})),
        (TypeError, "floating-point", lambda: ops.message_reduce(graph, q, {"q": torch.ones(5, 4, dtype=torch.long)})),
        (ValueError, "do not broadcast", lambda: ops.message_reduce(graph, q + k, {**good, "k": torch.randn(6, 3)})),
        (ValueError, "reduce: expected one of", lambda: ops.message_reduce(graph, q, good, "median")),
        (ValueError, "one for each message", lambda: ops.message_reduce(graph, [q, q], good, ["sum"])),
        (ValueError, "a leaf of sources", lambda: ops.message_reduce(graph, m.c("b") * 2, {"b": torch.ones(3)})),
        (ValueError, "two numbers", lambda: ops.message_reduce(graph, m.Expression("add", (1, 2)) + q, good)),
        (ValueError, "got 'cosh'", lambda: ops.message_reduce(graph, m.Expression("cosh", (q,)), good)),
        (ValueError, "dimensions from -1", lambda: ops.message_reduce(graph, m.sum(q, 1), good)),
        (ValueError, "as many numbers", lambda: ops.message_reduce(graph, m.reshape(q, (3,)), good)),
        (ValueError, "side by side", lambda: ops.message_reduce(graph, q + k, apart)),
        (TypeError, "an expression", lambda: ops.message_reduce(graph, torch.relu, good)),
        (TypeError, "expressions and numbers", lambda: q + torch.ones(3)),
        (TypeError, "gnnaccel.Graph", lambda: ops.message_reduce(None, q, good)),
    ]  # fmt: skip
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()
    assert gnnaccel.ops.message_reduce(graph, q, good).shape == (6, 4)


def test_profile_names_the_programs(monkeypatch):
    from gnnaccel import report

    graph, message = graph_of(6, 6, 20), m.sigmoid(q + k) * x
    operands = operands_of(graph, message, (3,))
    report.reset()
    ops.message_reduce(graph, message, operands)
    assert "kernel" not in report.table()  # nobody asked
    monkeypatch.setattr(report, "timing", True)
    for _ in range(2):
        ops.message_reduce(graph, [message, -q], operands, ["sum", "max"])
    words = "sum of (sigmoid((u.q + v.k)) * u.x); max of neg(u.q)"
    assert report.to_dict()["messages"] == {words: 2}
    report.count("pyg.Some")
    assert f"  2x {words}" in report.table()
    report.reset()
    assert not report.to_dict()["messages"]


def gradient_of(message, values, reduce="sum"):
    """Of the message of one edge with itself, in float64; and what torch.autograd has for the same function."""
    value = torch.tensor([[values]], dtype=torch.float64, requires_grad=True)
    graph = Graph.from_coo(torch.tensor([0]), torch.tensor([0]))
    return torch.autograd.grad(ops.message_reduce(graph, message, {"x": value}, reduce).sum(), value)[0].item()


def test_gradients_where_functions_meet():
    """0 where torch has 0, though a function that is not used there has none or an infinite one."""
    cases = [
        (m.sqrt(m.relu(x)), -1.0, 0.0),
        (m.log(m.clamp(x, 0.0)), -1.0, 0.0),
        (m.softplus(x), 800.0, 1.0),
        (m.elu(x), 800.0, 1.0),
        (m.Expression("logsigmoid", (x,)), 0.0, 0.5),
        (m.Expression("hardswish", (x,)), 3.0, 1.0),
        (m.Expression("hardswish", (x,)), torch.inf, 1.0),
        (m.Expression("hardswish", (x,)), -torch.inf, 0.0),
    ]
    for message, at, want in cases:
        assert gradient_of(message, at) == want, (message, at)
    for reduce in ("max", "min"):
        value = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
        graph = Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), num_rows=1, num_cols=2)
        out = ops.message_reduce(graph, m.relu(x), {"x": value}, reduce).sqrt().sum()
        assert not torch.autograd.grad(out, value)[0].any()


def test_numbers_without_literals_and_signed_zeros():
    graph, one = Graph.from_coo(torch.tensor([0]), torch.tensor([0])), torch.ones(1, 1)
    message = m.where(x > 2.0, x, float("-inf")) * m.where(x > 0, 1.0, float("nan"))
    with torch.profiler.profile():
        assert ops.message_reduce(graph, message, {"x": one}).item() == -torch.inf
    assert ops.message_reduce(graph, x**0, {"x": one * 0}).item() == 1
    for zero in (0.0, -0.0, 0.0):
        assert ops.message_reduce(graph, x / zero, {"x": one}).item() == torch.inf * (1 if str(zero) == "0.0" else -1)


def test_expressions_are_no_booleans():
    for use in (lambda: bool(q > k), lambda: 0.0 < q < 1.0, lambda: max(q, k), lambda: m.where(q == k, q, 1.0)):
        with pytest.raises(TypeError, match=r"neither true nor false|eq\(\)"):
            use()
    graph = graph_of(5, 5, 20)
    operands = {"q": torch.arange(5.0)[:, None], "k": torch.arange(5.0)[:, None]}
    for message in (m.eq(q, k) + m.ne(q, k), m.eq(q, 2.0) + m.ne(2.0, q)):
        assert torch.equal(
            ops.message_reduce(graph, message, operands, "mean"), (graph.indptr.diff() > 0).float()[:, None]
        )


def test_long_and_deep_expressions():
    graph, value = graph_of(5, 5, 20), torch.rand(5, 2, dtype=torch.float64)
    for _ in range(2):  # the second finds the first's program, without comparing trees
        nested, chain = q, q
        for _ in range(40):
            nested = nested * m.sigmoid(nested)
        for _ in range(600):
            chain = chain + 0.001
        for message in (nested, chain):
            compare(graph, message, {"q": value.clone().requires_grad_()}, "sum")


def test_dtypes_of_results():
    graph, value = graph_of(5, 5, 20), torch.rand(5, 4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert ops.message_reduce(graph, q * 2, {"q": value}, dtype=dtype).dtype == dtype
    for dtype in (torch.float16, torch.int32):
        with pytest.raises(TypeError, match="dtype: expected one of"):
            ops.message_reduce(graph, q * 2, {"q": value}, dtype=dtype)


def test_rounding():
    graph = Graph.from_coo(torch.arange(50), torch.arange(50))
    value = torch.randn(50, 3, dtype=torch.float64)
    for name in ("bfloat16", "float32"):
        rounded = ops.message_reduce(graph, m.Expression("round", (q,), (name,)), {"q": value})
        assert torch.equal(rounded, value.to(getattr(torch, name)).double())


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_many_gradients_in_one(reduce):
    graph = graph_of(6, 6, 30)
    operands = operands_of(graph, USUAL["gated"], (3,))
    leaves, seeds = list(operands.values()), torch.randn(4, 6, 3, dtype=torch.float64)
    out = ops.message_reduce(graph, USUAL["gated"], operands, reduce)
    many = torch.autograd.grad(out, leaves, seeds, is_grads_batched=True, retain_graph=True)
    for i, seed in enumerate(seeds):
        for one, other in zip(torch.autograd.grad(out, leaves, seed, retain_graph=True), many, strict=True):
            torch.testing.assert_close(other[i], one)


# message -> whether the gradient to the edges' w serves the sources' x too
TWINS = {
    "sum": (m.relu(x + w), True),
    "shifted": (m.sigmoid(x + w + k) * 2.0, True),
    "difference": (m.tanh(x - w), False),
    "product": (x * w, False),
    "one number": (m.relu(x + m.e("w:1")), False),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "none"])
@pytest.mark.parametrize("name", TWINS)
def test_gradients_of_edges_serve_sources(name, reduce, dtype, monkeypatch):
    message, same = TWINS[name]
    sums = []
    module = importlib.import_module("gnnaccel.ops.messages.reduce")
    monkeypatch.setattr(module, "spmm_op", lambda *args: sums.append(args) or spmm_op(*args))
    graph = graph_of(13, 11, 90)
    operands = operands_of(graph, message, (2, 20), dtype=dtype)
    bound = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    if dtype != torch.bfloat16 or reduce != "max":  # rounded, another one of nearly equal messages wins
        compare(graph, message, operands, reduce, second=dtype == torch.float64, rtol=bound, atol=bound)
        assert bool(sums) == (same and dtype != torch.bfloat16)


AHEAD = {
    "gated": (m.sigmoid(q + k) * x, 1),
    "film": (m.relu(m.u("g") * x + k) * m.v("scale:h"), 2),
    "shared by all": (m.tanh(q * m.c("scale") + k), 2),
    "quotient": (x / (m.square(k) + 1.0), 1),
    "clamped": (m.clamp(q - k, -0.5, 0.5) * x, 1),
}


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("name", AHEAD)
def test_sums_for_the_backward_pass(name, reduce, monkeypatch):
    """The gradient to destinations takes no walk of its own where the forward pass could sum what it is made of."""
    implementation = importlib.import_module("gnnaccel.ops.messages.reduce")
    calls, walk = [], implementation.walk
    monkeypatch.setattr(implementation, "walk", lambda *given, **more: calls.append(given[1]) or walk(*given, **more))
    message, count = AHEAD[name]
    graph = graph_of(30, 20, 400)
    operands = operands_of(graph, message, (2, 5))
    compare(graph, message, operands, reduce)
    assert [len(program.outputs) for program in calls] == [1 + count, sum(kind == "u" for kind, _ in message.leaves)]


def test_sums_for_the_backward_pass_of_several_outputs():
    graph = graph_of(30, 20, 400)
    operands = operands_of(graph, m.sigmoid(q + k) * x, (6,))
    messages = [m.sigmoid(q + k) * x, m.exp(-m.square(q - k))]
    outs = ops.message_reduce(graph, messages, operands, ["sum", "mean"])
    wants = [
        defined(graph, message, operands, reduce) for message, reduce in zip(messages, ("sum", "mean"), strict=True)
    ]
    for chosen in ((0,), (1,), (0, 1)):  # outputs that have a gradient
        pair = (sum((found[i] ** 2).sum() for i in chosen) for found in (outs, wants))
        got, want = (torch.autograd.grad(end, list(operands.values()), retain_graph=True, allow_unused=True,
                                         materialize_grads=True) for end in pair)  # fmt: skip
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


def test_no_sums_for_the_backward_pass():
    """Where the gradient is no product with the output's, takes no edge's features, or edges need the walk anyway."""
    for message in (m.dot(q, k, keepdim=True) * x, q + k, m.sigmoid(q + k) * w):
        shapes = tuple((leaf, (8,)) for leaf in message.leaves)
        program, _ = program_of(((message, "sum"),), shapes)
        assert ahead(program, (True,) * len(shapes)) is None
    program, _ = program_of(((m.sigmoid(q + k), "max"),), ((("u", "q"), (8,)), (("v", "k"), (8,))))
    assert ahead(program, (True, True)) is None


@pytest.mark.parametrize("reduce", ["sum", "mean", "none"])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_over_edges(name, reduce, monkeypatch):
    """What a walk leaves out would be NaN."""
    allocate = walks._allocate

    def poisoned(*given):
        return [out.fill_(float("nan")) if out.is_floating_point() else out for out in allocate(*given)]

    monkeypatch.setattr(walks, "_allocate", poisoned)
    for edges, features in ((400, (7,)), (400, (2, 4)), (1200, (2, 4))):  # at last with a row longer than a tile
        graph = graph_of(30, 20, edges)
        operands = operands_of(graph, SOFTMAXES[name], features, scale=0.5)
        compare(graph, SOFTMAXES[name], operands, reduce, second=True)


@pytest.mark.parametrize("shift", [0.0, 1e6, -1e9])
def test_softmax_of_large_scores(shift):
    """float32: what is added to all scores changes nothing, in gradients neither."""
    graph, message = graph_of(30, 20, 400), m.softmax(m.u("a:h") * 0.0 + shift) * (x + w)
    operands = operands_of(graph, message, (2, 4), dtype=torch.float32)
    compare(graph, message, operands, "sum", rtol=1e-4, atol=1e-5)


def test_results_of_a_softmax_may_be_written_into():
    graph, message = graph_of(30, 20, 400), SOFTMAXES["attention with edges"]
    operands = operands_of(graph, message, (2, 4))
    leaves = list(operands.values())
    want = torch.autograd.grad(ops.message_reduce(graph, message, operands).sum(), leaves)
    out = ops.message_reduce(graph, message, operands)
    out.add_(1.0)
    for one, other in zip(torch.autograd.grad(out.sum(), leaves), want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("features", [(7,), (2, 4)])
def test_softmax_sum(features, learned):
    graph = graph_of(30, 20, 400)
    message = m.relu(q + w) + 0.1
    score = m.tanh(q + k) * (m.c("scale") if learned else 30.0)
    operands = operands_of(graph, message + score, features)
    for shift in (0.0, 1000.0):  # which exp() of scores by themselves would not survive
        got = m.softmax_sum(graph, message, score + shift, operands)
        scores, values = (defined(graph, each, operands, "none") for each in (score + shift, message))
        weights = torch.zeros_like(scores)
        for row in range(graph.num_rows):
            edges = reference.edges_of(graph)[graph.indptr[row] : graph.indptr[row + 1]]
            weights = weights.index_put((edges,), scores[edges].softmax(0))
        want = reference.spmm(graph, None, weights * values, "copy_rhs", "sum")
        torch.testing.assert_close(got, want)
        seed = torch.randn_like(want)
        ends = [torch.autograd.grad(out, list(operands.values()), seed, create_graph=True) for out in (got, want)]
        for one, other in zip(*ends, strict=True):
            torch.testing.assert_close(one, other)
        seconds = [torch.autograd.grad(sum((g**2).sum() for g in found), list(operands.values())) for found in ends]
        for one, other in zip(*seconds, strict=True):
            torch.testing.assert_close(one, other)
    narrow = {name: value.detach().bfloat16() for name, value in operands.items()}
    assert m.softmax_sum(graph, message, score, narrow).dtype == torch.bfloat16
    assert not m.softmax_sum(graph, message, score, operands)[graph.indptr.diff() == 0].any()
