"""What torch asks of a registered op: opcheck, derivatives of both orders, torch.compile, autocast."""

import graphs
import pytest
import torch
from oracle import assert_close, rand
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from gnnaccel import ops, touch
from gnnaccel.capture.watch import Masks
from gnnaccel.graph.csr import Graph
from gnnaccel.lower import bounds
from gnnaccel.ops import _check, ready, relu_sum  # noqa: F401 - registers its op
from gnnaccel.ops._arrays import arrays_of
from gnnaccel.ops.graph_conv import _check_scales

STRICT = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
OPS = torch.ops.gnnaccel


def small(name="tall"):
    return graphs.make(name, torch.int64, "coo")


def needs_grad(*shape):
    return rand(*shape).requires_grad_()


def spmm_cases():
    g = small()
    arrays = arrays_of(g, True).flat()
    x, w = needs_grad(g.num_cols, 2, 3), needs_grad(g.nnz, 2, 1)
    for op, reduce in ((OPS.spmm, "sum"), (OPS.spmm, "mean"), (OPS.spmm_max_min, "max")):
        yield op, (*arrays, x, w, "mul", reduce, 0.0, *[False] * (reduce == "max"))
    yield OPS.spmm_max_min, (*arrays, x, None, "copy_lhs", "min", 1.0, True)
    yield OPS.spmm, (*arrays, None, w, "copy_rhs", "sum", 0.0)
    x, w, grad = rand(g.num_cols, 2, 4), rand(g.nnz, 2, 1), rand(g.num_rows, 2, 4)
    yield OPS.spmm_backward, (*arrays_of(g.transposed, False).flat(), x, w, grad)


def graph_conv_cases():
    g = small()
    x, w = needs_grad(g.num_cols, 2, 3), needs_grad(g.nnz)
    scales = rand(g.num_cols), rand(g.num_rows)
    yield OPS.graph_conv, (*arrays_of(g, True).flat(), x, w, *scales, needs_grad(2, 3), True)
    yield OPS.graph_conv, (*arrays_of(g, True).flat(), x, None, None, scales[1], None, False)


def sddmm_cases():
    g = small()
    u, v = needs_grad(g.num_cols, 2, 3), needs_grad(g.num_rows, 2, 3)
    e = needs_grad(g.nnz, 2, 1)
    for op in ("dot", "div", "copy_lhs"):
        yield OPS.sddmm, (*arrays_of(g, True).flat(), u, None if op == "copy_lhs" else v, op, "u", "v")
    yield OPS.sddmm, (*arrays_of(g, True).flat(), e, u, "mul", "e", "u")


def other_cases():
    g = small()
    scores = needs_grad(g.nnz, 2)
    arrays = arrays_of(g, False).flat()
    yield OPS.edge_softmax, (*arrays, scores)
    yield OPS.edge_softmax_backward, (*arrays, scores, needs_grad(g.nnz, 2))
    arg = torch.randint(-1, 5, (7, 2, 3))
    yield OPS.scatter_arg, (arg, needs_grad(7, 2, 3), 5, [2, 3], False)
    disjoint = torch.arange(42).view(7, 2, 3)
    yield OPS.scatter_arg, (disjoint, needs_grad(7, 2, 3), 42, [2, 1], True)
    rows, cols = torch.randint(0, 6, (2, 20))
    yield OPS.coo_to_csr, (rows, cols, 6, 6)
    yield OPS.transpose, (g.indptr, g.indices, g.edge_ids, g.num_cols)
    yield OPS.transpose, (g.indptr, g.indices, None, g.num_cols)


@pytest.mark.parametrize("cases", [spmm_cases, graph_conv_cases, sddmm_cases, other_cases])
def test_opcheck(cases):
    for op, arguments in cases():
        torch.library.opcheck(op.default, arguments, test_utils=sorted(STRICT))


def public_calls():
    """name -> (function of differentiable inputs, the inputs): every op, every way its backward branches."""
    g = graphs.make("duplicates", torch.int64, "coo")
    n, nnz = g.num_cols, g.nnz
    offsets = torch.tensor([0, 3, 3, 7])
    u, v = rand(n), rand(g.num_rows)

    def spmm(message, reduce):
        return lambda x, w: ops.spmm(g, x, w, message, reduce)

    def sddmm(op, *targets):
        return lambda a, b: ops.sddmm(g, a, b, op, *targets)

    calls = {
        "spmm_mul_sum": (spmm("mul", "sum"), [(n, 2, 3), (nnz, 2)]),
        "spmm_mul_mean": (spmm("mul", "mean"), [(n, 2, 1), (nnz, 1, 3)]),
        "spmm_div_sum": (spmm("div", "sum"), [(n, 2), (nnz, 2)]),
        "spmm_sub_mean": (spmm("sub", "mean"), [(n, 2), (nnz, 1)]),
        "spmm_mul_max": (spmm("mul", "max"), [(n, 2, 2), (nnz, 2)]),
        "spmm_add_min": (spmm("add", "min"), [(n, 3), (nnz, 3)]),
        "spmm_copy_sum": (lambda x: ops.spmm(g, x), [(n, 3)]),
        "spmm_edges_mean": (lambda w: ops.spmm(g, None, w, "copy_rhs", "mean"), [(nnz, 3)]),
        "sddmm_dot": (sddmm("dot", "u", "v"), [(n, 2, 3), (n, 2, 3)]),
        "sddmm_dot_broadcast": (sddmm("dot", "v", "u"), [(n, 1, 3), (n, 2, 3)]),
        "sddmm_div": (sddmm("div", "u", "v"), [(n, 2, 3), (n, 3)]),
        "sddmm_mul_edge": (sddmm("mul", "u", "e"), [(n, 2, 3), (nnz, 2, 1)]),
        "sddmm_sub": (sddmm("sub", "v", "u"), [(n, 2, 1), (n, 1, 3)]),
        "sddmm_mul_same": (sddmm("mul", "u", "u"), [(n, 2), (n, 2)]),
        "sddmm_copy": (lambda a: ops.sddmm(g, a, None, "copy_lhs"), [(n, 2)]),
        "edge_softmax": (lambda s: ops.edge_softmax(g, s), [(nnz, 2)]),
        "edge_softmax_src": (lambda s: ops.edge_softmax(g, s, "src"), [(nnz,)]),
        "segment_sum": (lambda x: ops.segment_reduce(x, offsets), [(7, 2)]),
        "segment_max": (lambda x: ops.segment_reduce(x, offsets, "max"), [(7, 2)]),
        "graph_conv": (
            lambda x, w, b: ops.graph_conv(g, x, w, source_scale=u, row_scale=v, bias=b, relu=True),
            [(n, 3), (nnz,), (3,)],
        ),
        "attention": (lambda x, a, b: ops.attention(g, x, a, b), [(n, 2, 3), (n, 2), (n, 2)]),
        "dot_attention": (lambda q, k, v: ops.dot_attention(g, q, k, v), [(n, 2, 3)] * 3),
        "dot_attention_biased": (
            lambda q, k, b: ops.dot_attention(g, q, k, k, edge_bias=b, dropout=0.4, seed=torch.tensor([1])),
            [(n, 2, 3), (n, 2, 3), (nnz, 2)],
        ),
        "edge_attention": (lambda s, x: ops.edge_attention(g, s, x), [(nnz, 2), (n, 2, 3)]),
    }
    return calls


CALLS = public_calls()


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_both_orders(name):
    function, shapes = CALLS[name]
    inputs = [needs_grad(*shape) for shape in shapes]
    assert gradcheck(function, inputs, fast_mode=False)
    assert gradgradcheck(function, inputs)


def _weighed(function, inputs):
    """A number with derivatives of every order."""
    out = function(*inputs)
    return (out * torch.linspace(1, 2, out.numel()).view_as(out)).square().sum()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.tensor(2.0, dtype=x.dtype))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda t: torch.func.grad(f)(t).square().sum())(x),
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(f), in_dims=1)(torch.stack([x, 2 * x], 1)),
    "backward": lambda f, x: torch.autograd.grad(torch.func.grad(f)(x).square().sum(), x)[0],
}


def by_autograd(transform, f, x):
    """The same by torch.autograd, whose derivatives of both orders are tested above."""

    def first(t):
        t = t.detach().requires_grad_()
        return torch.autograd.grad(f(t), t)[0]

    def second(t, along):
        t = t.detach().requires_grad_()
        (grad,) = torch.autograd.grad(f(t), t, create_graph=True)
        return torch.autograd.grad(grad, t, along(grad))[0] if grad.requires_grad else torch.zeros_like(t)

    if transform in ("vmap", "vmap of grad"):
        return torch.stack([(f if transform == "vmap" else first)(t) for t in (x, 2 * x)])
    if transform in ("grad of grad", "backward"):
        return second(x, lambda grad: 2 * grad.detach())
    if transform == "jacrev of jacrev":
        units = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
        return torch.stack([second(x, lambda grad, unit=unit: unit) for unit in units]).view(*x.shape, *x.shape)
    return first(x) * (2 if transform == "vjp" else 1)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CALLS)
def test_transforms(name, transform):
    """In each of its inputs, the others being constants."""
    function, shapes = CALLS[name]
    inputs = [rand(*shape) for shape in shapes]
    for k in range(len(inputs)):

        def f(t, k=k):
            return _weighed(function, [*inputs[:k], t, *inputs[k + 1 :]])

        x = inputs[k].clone().requires_grad_(transform == "backward")
        assert_close(TRANSFORMS[transform](f, x), by_autograd(transform, f, inputs[k]), x.dtype)


def test_vmap_over_nothing():
    function, shapes = CALLS["spmm_copy_sum"]
    out = torch.func.vmap(function)(rand(0, *shapes[0]))
    assert out.shape == (0, *function(rand(*shapes[0])).shape)


def test_levels_that_ask_for_different_inputs():
    """The inner one for the weights' derivative, the outer one for the features'; a constant is one for all levels."""
    g = small("duplicates")
    x, w = rand(g.num_cols, 3), rand(g.nnz)

    def inner(x, w):
        return torch.func.grad(lambda v: ops.spmm(g, x, v).square().sum())(w).square().sum()

    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    (first,) = torch.autograd.grad(ops.spmm(g, leaf, weight).square().sum(), weight, create_graph=True)
    (want,) = torch.autograd.grad(first.square().sum(), leaf)
    assert_close(torch.func.grad(inner)(x, w), want, x.dtype)
    with pytest.raises(ValueError, match="row_scale: expected a constant"):
        torch.func.grad(
            lambda s: torch.func.grad(lambda t: ops.graph_conv(g, t, row_scale=s).sum())(x).sum(),
        )(rand(g.num_rows))


def test_functional_call():
    g = small("duplicates")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(rand(3, 3))

        def forward(self, x):
            return ops.spmm(g, x @ self.weight)

    layer, x = Layer(), rand(g.num_cols, 3)
    found = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(
        dict(layer.named_parameters())
    )
    assert_close(found["weight"], torch.autograd.grad(layer(x).square().sum(), layer.weight)[0], x.dtype)


@pytest.mark.parametrize("name", CALLS)
def test_forward_mode_is_refused(name):
    """No op has a forward-mode derivative; without a word it would count as 0."""
    function, shapes = CALLS[name]
    inputs = tuple(torch.ones(shape) for shape in shapes)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(function, inputs, inputs)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        function(*(forward_ad.make_dual(t, t) for t in inputs))
    with forward_ad.dual_level():
        assert torch.equal(function(*inputs), function(*inputs))  # nothing to refuse


def run_with_gradients(function, inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("name", CALLS)
def test_compile_traces_every_op(name):
    function, shapes = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = [rand(*shape) for shape in shapes]
    for got, want in zip(run_with_gradients(compiled, inputs), run_with_gradients(function, inputs), strict=True):
        assert_close(got.detach(), want.detach(), torch.float64)


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("step", ["spmm", "attention"])
def test_compile_with_dynamic_shapes(step, prepared):
    """One compilation serves several feature widths; a graph that is first transposed inside it works too."""
    torch.compiler.reset()
    g = Graph.from_coo(*torch.randint(0, 12, (2, 60)), num_rows=12, num_cols=12)
    if prepared:
        assert g.transposed

    def function(x, w):
        if step == "spmm":
            return ops.spmm(g, x, w, "mul", "max") + ops.spmm(g, x, w, "mul", "mean")
        alpha = ops.edge_softmax(g, ops.sddmm(g, x, x, "dot"))
        return ops.spmm(g, x, alpha * w)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=prepared):
        for width in (5, 9, 14):
            inputs = [rand(12, width), rand(60, 1)]
            pairs = zip(run_with_gradients(compiled, inputs), run_with_gradients(function, inputs), strict=True)
            for got, want in pairs:
                assert_close(got.detach(), want.detach(), torch.float64)


def test_compiled_segment_reduce_still_checks_offsets():
    torch.compiler.reset()
    compiled = torch.compile(ops.segment_reduce, fullgraph=True, backend="aot_eager")
    x = torch.ones(4, 2)
    assert compiled(x, torch.tensor([0, 1, 4]))[:, 0].tolist() == [1, 3]
    for bad in ([0, 1, 400], [0, 3, 1], [-9, 1, 4]):
        with pytest.raises(RuntimeError, match="segment_reduce: offsets"):
            compiled(x, torch.tensor(bad))


def test_gradients_are_asked_for_only_where_needed():
    """A gradient for the edges, or along argmax, must not cost a transposed graph."""
    g = Graph.from_coo(*torch.randint(0, 9, (2, 30)), num_rows=9, num_cols=9)
    x, w = needs_grad(9, 2), needs_grad(30, 1)
    ops.spmm(g, x.detach(), w).sum().backward()
    ops.spmm(g, x, w, "mul", "max").sum().backward()
    ops.sddmm(g, x.detach(), x, "mul", "u", "v").sum().backward()
    with torch.no_grad():
        ops.spmm(g, x, w)
    assert g._transposed is None
    for _ in range(1 + bounds.NEW_GRAPH_USES):  # new graphs are transposed by the kernel's call
        ops.spmm(g, x, w).sum().backward()
    assert g._transposed is not None


def test_autocast_of_ops():
    """Ops run in the dtype they are given; where two meet under autocast, in the wider one, as torch.mul does."""
    g = small()
    x, w = rand(g.num_cols, 4, dtype=torch.bfloat16), rand(g.nnz, 1, dtype=torch.float32)
    with pytest.raises(TypeError, match="spmm: weight: expected the dtype of x"):
        ops.spmm(g, x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.spmm(g, x).dtype == torch.bfloat16
        assert ops.spmm(g, x.float()).dtype == torch.float32
        mixed = ops.spmm(g, x, w)
        assert ops.sddmm(g, x, x.float(), "mul", "u", "u").dtype == torch.float32
        heads = x.float()[:, :, None].requires_grad_()
        out = ops.attention(g, heads, x, rand(g.num_rows, 4, dtype=torch.bfloat16))
        assert out.dtype == torch.float32
        out.sum().backward()
    torch.testing.assert_close(mixed, ops.spmm(g, x.float(), w))
    assert heads.grad.dtype == torch.float32


def test_autocast_around_a_layer():
    """A linear layer in bf16, its gradient back in the parameters' fp32."""
    g = small()
    layer = torch.nn.Linear(6, 4)
    x, w = rand(g.num_cols, 6, dtype=torch.float32), rand(g.nnz, dtype=torch.float32)
    want = ops.spmm(g, layer(x), w)
    with torch.autocast("cpu", torch.bfloat16):
        got = ops.spmm(g, layer(x), w)
    got.sum().backward()
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.1)
    assert layer.weight.grad.dtype == torch.float32


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    pass


def _by_mode(call, x):
    with _Seen() as seen:
        call(x)
    return seen.names


def _by_profiler(call, x):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(x)
    return [event.name.replace("::", ".") + ".default" for event in profile.events()]


def _by_profiler_of_all_threads(call, x):
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        call(x)
    return [event.name.replace("::", ".") + ".default" for event in profile.events()]


def _by_tracing(call, x):
    return [str(node.target) for node in make_fx(call)(x).graph.nodes]


def _by_tracing_autograd(call, x):
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(call(x).sum(), x)[0]

    traced = make_fx(gradient, pre_dispatch=True)(x)
    torch.testing.assert_close(traced(x), gradient(x))
    names = [str(node.target) for node in traced.graph.nodes]
    return names if names.count("gnnaccel.spmm.default") == 2 else []


@pytest.mark.parametrize(
    "listen", [_by_mode, _by_profiler, _by_profiler_of_all_threads, _by_tracing, _by_tracing_autograd]
)
def test_calls_are_seen_by_those_who_listen(listen):
    """Calls go past torch's dispatcher only where nobody would notice."""
    g = small()
    assert "gnnaccel.spmm.default" in listen(lambda x: ops.spmm(g, x), rand(g.num_cols, 3))


def _negated(x):
    return torch.view_as_complex(torch.stack([x, -x], -1)).conj().imag  # memory holds -x


def test_a_default_device_is_nobody_who_listens():
    assert not touch.watched()
    with torch.device("cpu"):
        assert not touch.watched()
        with torch.device("cpu"):
            assert not touch.watched()
            with _Listening():
                assert touch.watched()
        with Masks([]):  # what a capture has on
            assert not touch.watched()


class _Listening(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_tensors_without_memory():
    g = small()
    functional = torch._to_functional_tensor(rand(g.num_cols, 3))
    assert torch._is_functional_tensor(ops.spmm(g, functional))
    assert not ops.spmm(g, torch._efficientzerotensor((g.num_cols, 3))).any()


@pytest.mark.parametrize("make", [_negated, lambda x: x.as_subclass(_Subclass), lambda x: x.to("meta")])
def test_tensors_that_are_not_what_their_memory_holds(make):
    g = small()
    x = rand(g.num_cols, 3)
    given = make(x)
    assert given.is_neg() or given.is_meta or type(given) is _Subclass
    out = OPS.spmm(*arrays_of(g, False).flat(), given, None, "copy_lhs", "sum", 0.0)
    if given.is_meta:
        with pytest.raises(ValueError, match="device"):
            ops.spmm(g, given)
    else:
        got = ops.spmm(g, given)
        assert type(got) is type(out)
        torch.testing.assert_close(got, out, rtol=0, atol=0)
        assert_close(got.as_subclass(torch.Tensor), ops.spmm(g, x), torch.float64)


def test_what_is_kept_with_a_graph_compiles_nothing_anew():
    graph = Graph.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), num_rows=3, num_cols=3)
    x = torch.ones(3, 2)
    summed = torch.compile(lambda x: ops.spmm(graph, x), backend="eager", fullgraph=True)
    want = summed(x)
    graph.slot("of somebody", dict)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(summed(x), want)


def raw_calls():
    """name -> (op, the graph, its arguments by name)."""
    g = small()
    forward, both = arrays_of(g, False).flat(), arrays_of(g, True).flat()
    x, y, w = (torch.randn(n, 4) for n in (g.num_cols, g.num_rows, g.nnz))
    scales = {"source_scale": torch.rand(g.num_cols), "row_scale": torch.rand(g.num_rows), "bias": torch.rand(4)}
    backwards = arrays_of(g.transposed, False).flat()
    heads, nodes, edges = (torch.randn(n, 2, 3) for n in (g.num_cols, g.num_rows, g.nnz))
    ends = {"score_src": torch.randn(g.num_cols, 2), "score_dst": torch.randn(g.num_rows, 2)}
    factor = {"edge_scale": torch.rand(g.nnz, 2), "seed": torch.tensor([7]), "dropout": 0.5}
    stats = torch.rand(g.num_rows, 2, 2)
    kept = {"out": nodes, "lse": stats[..., 0], "out_pos": nodes, "p_pos": stats[..., 1], "grad_out": nodes}
    dots = {"query": nodes, "key": heads, "value": heads, "edge_bias": edges[..., 0], **factor}
    wanted = {"of_query": True, "of_sources": True, "of_bias": True}
    projected = {"x": heads, "y": nodes, "vectors": torch.randn(2, 3)}
    scored = projected | {"weights": edges[..., 0], "negative_slope": 0.2}
    return {
        "spmm": (OPS.spmm, both, {"lhs": x, "rhs": w, "message": "mul", "reduce": "sum", "empty_value": 0.0}),
        "copy": (OPS.spmm, both, {"lhs": x, "rhs": None, "message": "copy_lhs", "reduce": "mean", "empty_value": 0.0}),
        "edges": (OPS.spmm, both, {"lhs": None, "rhs": w, "message": "copy_rhs", "reduce": "sum", "empty_value": 0.0}),
        "max": (
            OPS.spmm_max_min,
            both,
            {"lhs": x, "rhs": w, "message": "mul", "reduce": "max", "empty_value": 0.0, "hub": False},
        ),
        "backward": (OPS.spmm_backward, backwards, {"x": x, "weight": w, "grad": y}),
        "mean gradient": (OPS.spmm_mean_gradient, arrays_of(g.transposed, True).flat(), {"grad": y, "weight": w}),
        "graph_conv": (OPS.graph_conv, both, {"x": x, "weight": w[:, 0].clone(), **scales, "relu": True}),
        "dot": (OPS.sddmm, forward, {"lhs": x, "rhs": y, "op": "dot", "lhs_target": "u", "rhs_target": "v"}),
        "sub": (OPS.sddmm, forward, {"lhs": y, "rhs": w, "op": "sub", "lhs_target": "v", "rhs_target": "e"}),
        "relu_sum": (OPS.relu_sum, both, {"x": x, "edge": w}),
        "edge_softmax": (OPS.edge_softmax, forward, {"scores": w}),
        "edge_softmax backward": (OPS.edge_softmax_backward, forward, {"out": w, "grad_out": w + 1}),
        "attention": (OPS.attention, both, {"x": heads, **ends, **factor, "negative_slope": 0.2, "keep": True}),
        "attention backward": (
            OPS.attention_backward,
            backwards,
            {"x": heads, **ends, **factor, **kept, "negative_slope": 0.2},
        ),
        "dot_attention": (OPS.dot_attention, both, {**dots, "scale": 1.0}),
        "dot_attention backward": (
            OPS.dot_attention_backward,
            both,
            {**dots, "out": nodes, "stats": stats, "grad_out": nodes, "scale": 1.0, **wanted},
        ),
        "gatv2_scores": (OPS.gatv2_scores, both, {**projected, "negative_slope": 0.2}),
        "gatv2_sums": (OPS.gatv2_sums, both, {**scored, "products": True}),
        "gatv2 backward": (
            OPS.gatv2_scores_backward,
            both,
            {**scored, "of_x": True, "of_y": True, "of_vectors": True},
        ),
    }


@pytest.mark.parametrize("name", raw_calls())
def test_what_registered_names_refuse(name):
    """Past the public functions, where kernels would read beyond what is there."""
    op, arrays, given = raw_calls()[name]

    def call(**changes):
        arguments = (given | changes).values()
        return op.default(*arrays, *arguments), op(*arrays, *arguments)  # the first is what compiled programs call

    call()
    tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    for key, value in tensors.items():
        for wrong in (value[:-1], value[:0], value.new_empty(() if key != "seed" else (2,))):
            for form in (op.default, op):
                with pytest.raises(ValueError, match=f"{key}: expected|edge or grad: expected"):
                    form(*arrays, *(given | {key: wrong}).values())
        with pytest.raises((TypeError, ValueError), match="expected"):
            call(**{key: value.double() if len(tensors) > 1 else value.int()})
    for graded in (False, True):
        with pytest.raises(TypeError, match="float16"):
            call(**{key: value.half().requires_grad_(graded) for key, value in tensors.items()})
    if "lhs" in given:
        for missing in ("lhs", "rhs"):
            if given[missing] is not None:
                with pytest.raises(ValueError, match="reads it, got None"):
                    call(**{missing: None})


def test_what_is_read_lies_where_the_graph_does():
    """Else the dispatcher takes the kernels of either device. Here tensors of no memory stand for another one."""
    arrays = arrays_of(small(), False)
    elsewhere = torch.randn(arrays.num_cols, 4, device="meta")
    with pytest.raises(ValueError, match="x: expected device cpu"):
        _check.reads("op", ("x", "cols"))(arrays, elsewhere)
    given = {"weight": None, "source_scale": None, "row_scale": None, "bias": None, "relu": False}
    scale = torch.rand(arrays.num_cols, device="meta")
    with pytest.raises(ValueError, match="source_scale: expected device cpu"):
        _check_scales(arrays, torch.randn(arrays.num_cols, 4), *(given | {"source_scale": scale}).values())
