"""Second derivatives, transformations of torch, checkpointing and compilation: as DGL alone does it, or right."""

import pytest
import torch
import torch.autograd.forward_ad as fwd
from dgl_compare import attempt, build, compare, dgl, flatten, rand
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from gnnaccel import dgl_backend, report

import dgl.nn as dglnn  # isort: skip  (after the shim)

U, V, E = (rand(40, 4), rand(40, 4, seed=3), rand(340, 4, seed=2))

pytestmark = pytest.mark.usefixtures("dgl_restored")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def op(name):
    g = build("int64")
    return lambda *x: getattr(dgl.ops, name)(g, *x)


def layer(make):
    def call(x):
        torch.manual_seed(3)
        return make().double()(build("int64"), x)

    return call


def segments(reduce):
    return lambda x: dgl.ops.segment_reduce(torch.tensor([10, 0, 30]), x, reduce)


def at_once(name):
    """An op over all edge types of "ring"; x has the rows of all its node types."""

    def call(x):
        g = build("ring")
        nodes = x[: g.num_nodes()].split([g.num_nodes(n) for n in g.ntypes])
        sides = [list(nodes)] * (2 if name == "u_add_v" else 1)
        return torch.cat(list(getattr(dgl.ops, name)(g, *sides)))

    return call


def second_derivatives(call, *inputs):
    """The gradients of a function of the first gradients, and those."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
    total = sum(g.square().sum() for g in first if g.requires_grad)
    return [*first, *torch.autograd.grad(total, leaves)]


TWICE = {name: (op(name), (U,)) for name in ("copy_u_sum", "copy_u_mean", "copy_u_max")}
TWICE |= {
    name: (op(name), (U, E))
    for name in ("u_mul_e_sum", "u_mul_e_mean", "u_mul_e_max", "u_add_e_sum", "u_add_e_min", "u_div_e_sum")
}
TWICE |= {name: (op(name), (U, V)) for name in ("u_dot_v", "u_mul_v", "u_add_v", "u_div_v")}
TWICE |= {name: (op(name), (E, V)) for name in ("e_mul_v", "e_dot_v", "e_div_u", "e_sub_v")}
TWICE |= {f"segment {r}": (segments(r), (U,)) for r in ("sum", "mean")}
TWICE |= {f"several edge types, {n}": (at_once(n), (U,)) for n in ("copy_u_sum", "u_add_v")}
TWICE["GraphConv"] = layer(lambda: dglnn.GraphConv(4, 3)), (U,)
TWICE["SAGEConv"] = layer(lambda: dglnn.SAGEConv(4, 3, "mean")), (U,)
TWICE["GINConv"] = layer(lambda: dglnn.GINConv(torch.nn.Linear(4, 3), "max")), (U,)


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_agree_with_dgl(name):
    call, inputs = TWICE[name]
    dgl_backend.disable()
    want = second_derivatives(call, *inputs)
    dgl_backend.enable()
    torch.testing.assert_close(second_derivatives(call, *inputs), want)
    assert any(site.accelerated for site in report.snapshot().values())


def dense_softmax(scores):
    """Edge softmax in plain torch on the graph "int64"."""
    rows = build("int64").edges()[1]
    total = torch.zeros(40, *scores.shape[1:], dtype=scores.dtype).index_add(0, rows, scores.exp())
    return scores.exp() / total[rows]


def dense_gat(module):
    def call(x):
        u, v = build("int64").edges()
        h = module.fc(x).view(40, 2, 3)
        left, right = (h * module.attn_l).sum(-1), (h * module.attn_r).sum(-1)
        weights = dense_softmax(torch.nn.functional.leaky_relu(left[u] + right[v], 0.2)).unsqueeze(-1)
        return torch.zeros(40, 2, 3, dtype=x.dtype).index_add(0, v, h[u] * weights) + module.bias.view(1, 2, 3)

    return call


def test_second_derivatives_where_dgl_has_none_or_wrong_ones():
    """DGL's own backward of an edge softmax is a constant to autograd: an error, or second derivatives without it."""
    module = dglnn.GATConv(4, 3, 2).double()
    dgl_backend.enable()
    for got, want, x in (
        (op("edge_softmax"), dense_softmax, E),
        (lambda x: module(build("int64"), x), dense_gat(module), U),
        (segments("max"), lambda x: torch.stack([x[:10].amax(0), x[:0].sum(0), x[10:].amax(0)]), U),
    ):
        torch.testing.assert_close(second_derivatives(got, x), second_derivatives(want, x))


FUNCTIONS = {
    "copy_u_sum": op("copy_u_sum"),
    "copy_u_mean": op("copy_u_mean"),
    "u_dot_v": lambda x: op("u_dot_v")(x, x),
    "edge_softmax": lambda x: op("edge_softmax")(op("copy_u")(x)),
    "segment": segments("sum"),
    "GATConv": layer(lambda: dglnn.GATConv(4, 3, 2)),
    "several edge types": at_once("copy_u_sum"),
}


def _forward_mode(call, x):
    with fwd.dual_level():
        return fwd.unpack_dual(call(fwd.make_dual(x, x))).tangent


TRANSFORMS = {
    "grad": lambda call, x: grad(lambda x: call(x).sum())(x),
    "jacrev": lambda call, x: jacrev(call)(x),
    "jvp": lambda call, x: jvp(call, (x,), (x,)),
    "vmap": lambda call, x: vmap(call)(torch.stack([x, x])),
    "forward mode": _forward_mode,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transformations_are_refused_as_dgl_refuses_them(name, transform):
    errors = []
    for switch in (dgl_backend.disable, dgl_backend.enable):
        switch()
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            TRANSFORMS[transform](FUNCTIONS[name], U)
        errors.append(type(caught.value))
    assert errors[0] is errors[1]
    # DGL fails in a layer before it passes a message.
    reasons = {reason for site in report.snapshot().values() for reason in site.reasons}
    assert name == "GATConv" or reasons == {"torch.func, or automatic differentiation in forward mode"}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_checkpointing(name, reentrant):
    call = FUNCTIONS[name]
    dgl_backend.disable()
    want = attempt(call, [U])
    dgl_backend.enable()
    got = attempt(lambda x: checkpoint(call, x, use_reentrant=reentrant), [U])
    torch.testing.assert_close(got, want)


def test_jacobian_and_hessian():
    for name in ("copy_u_mean", "u_dot_v", "GATConv"):
        dgl_backend.disable()
        want = torch.autograd.functional.jacobian(FUNCTIONS[name], U)
        dgl_backend.enable()
        torch.testing.assert_close(torch.autograd.functional.jacobian(FUNCTIONS[name], U), want)
        torch.autograd.functional.hessian(lambda x, name=name: FUNCTIONS[name](x).square().sum(), U[:40])


def test_several_threads_train_at_once():
    from concurrent.futures import ThreadPoolExecutor

    call = FUNCTIONS["GATConv"]
    dgl_backend.enable()
    want = flatten(list(attempt(op("u_mul_e_sum"), [U, E]).values()))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: list(attempt(op("u_mul_e_sum"), [U, E]).values()), range(8)):
            torch.testing.assert_close(got, want)
    compare(call, [U])


def test_compiled_models_break_at_the_same_place():
    """DGL's C calls end a compiled graph with or without the plug-in: the rest is compiled, fullgraph refused."""

    def call(x):
        return dgl.ops.copy_u_mean(build("int64"), torch.relu(x)) * 2

    function = torch.compile(call, backend="eager")
    want = attempt(call, [U])
    dgl_backend.enable()
    torch.testing.assert_close(attempt(function, [U]), want)
    assert report.snapshot()["dgl.gspmm copy_lhs.mean"].accelerated == 1
    for switch in (dgl_backend.disable, dgl_backend.enable):
        switch()
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, backend="eager", fullgraph=True)(U)
