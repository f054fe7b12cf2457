"""SuperGAT as one node of autograd, against the composition of the reference ops in float64."""

import pytest
import torch
from oracle import check, rand
from test_attention import random_graph
from torch.nn import functional as F

from gnnaccel import Graph
from gnnaccel.ops import reference
from gnnaccel.ops.super_gat import super_gat

NODES, HEADS, FEATS = 9, 2, 4
VECTORS = {"MX": 2, "SD": 0}


def exact(graph, x, vectors, slope=0.2, scale=None):
    scores = reference.sddmm(graph, x, x, "dot", "u", "v").squeeze(-1)
    if vectors:
        of_ends = [(x * vector).sum(-1) for vector in vectors]
        scores = reference.sddmm(graph, *of_ends, "add", "u", "v") * scores.sigmoid()
    else:
        scores = scores * x.shape[2] ** -0.5
    weight = reference.edge_softmax(graph, F.leaky_relu(scores, slope))
    return reference.spmm(graph, x, (weight if scale is None else weight * scale).unsqueeze(-1), "mul", "sum")


def given(kind, dtype=torch.float64, size=1.0):
    torch.manual_seed(0)
    vectors = [size * rand(1, HEADS, FEATS) for _ in range(VECTORS[kind])]
    tensors = [(size * rand(NODES, HEADS, FEATS)), *vectors]
    return random_graph(NODES, NODES, 30, 3), [t.to(dtype).requires_grad_() for t in tensors]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", VECTORS)
def test_super_gat_against_the_reference(kind, dtype, scaled):
    graph, leaves = given(kind, dtype)
    scale = torch.rand(graph.nnz, HEADS, dtype=dtype) if scaled else None
    wide = None if scale is None else scale.double()
    ours = lambda x, *v: super_gat(graph, x, v, edge_scale=scale)  # noqa: E731
    check(ours, lambda x, *v: exact(graph, x, v, scale=wide), *leaves)


@pytest.mark.parametrize("kind", VECTORS)
def test_derivatives_of_derivatives_and_modes(kind):
    graph, leaves = given(kind, size=0.3)
    ours = lambda x, *v: super_gat(graph, x, v)  # noqa: E731
    out = ours(*leaves)
    assert type(out.grad_fn).__name__ == "_AttendedBackward"
    assert torch.autograd.gradcheck(ours, leaves)
    assert torch.autograd.gradgradcheck(ours, leaves)
    many = rand(3, *out.shape)
    batched = torch.autograd.grad(out, leaves, many, is_grads_batched=True)
    for k, each in enumerate(many):
        torch.testing.assert_close([t[k] for t in batched], [*torch.autograd.grad(ours(*leaves), leaves, each)])
    with torch.inference_mode():
        torch.testing.assert_close(ours(*leaves), out.detach())
    with torch.autograd.profiler.profile():  # by ops, one by one
        torch.testing.assert_close(ours(*leaves), out)
    for wanted in range(len(leaves)):
        alone = [t.detach().requires_grad_(k == wanted) for k, t in enumerate(leaves)]
        got = torch.autograd.grad(ours(*alone).sum(), alone[wanted])[0]
        torch.testing.assert_close(got, torch.autograd.grad(ours(*leaves).sum(), leaves)[wanted])


@pytest.mark.parametrize("kind", VECTORS)
def test_under_autocast(kind):
    """Of bfloat16 beside vectors of float32: on the CPU by kernels of float32, where it has no others."""
    graph, leaves = given(kind, size=0.5)
    narrow = [t.detach().to(torch.float32 if k else torch.bfloat16).requires_grad_() for k, t in enumerate(leaves)]
    with torch.autocast("cpu", torch.bfloat16):
        out = super_gat(graph, narrow[0], tuple(narrow[1:]), negative_slope=0.9)
    want = exact(graph, leaves[0], leaves[1:], 0.9)
    assert out.dtype == (torch.float32 if kind == "MX" else torch.bfloat16)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = torch.autograd.grad(out, narrow, upstream.to(out.dtype))
    wants = torch.autograd.grad(want, leaves, upstream.double())
    size = max(float(t.abs().max()) for t in wants)
    for got, leaf, one in zip(grads, narrow, wants, strict=True):
        assert got.dtype == leaf.dtype
        torch.testing.assert_close(got.double(), one, rtol=0, atol=0.03 * size)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.03 * float(want.detach().abs().max()))


def test_what_is_written_into_before_the_backward_pass():
    graph, (x, *vectors) = given("MX")
    x = x.detach()
    want = torch.autograd.grad(super_gat(graph, x, tuple(vectors)).square().sum(), vectors)
    out, again = (super_gat(graph, x, tuple(vectors)) for _ in range(2))
    with torch.no_grad():
        for vector in vectors:
            vector.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), vectors), want)
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(again.sum(), vectors, create_graph=True)
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(again, vectors, torch.ones(2, *again.shape, dtype=again.dtype), is_grads_batched=True)
    super_gat(graph, x, tuple(vectors)).mul_(2).sum().backward()  # the result is not kept


def test_a_gate_that_is_zero_leaves_finite_gradients():
    """Of its score, 0, the slope comes in before the product with a large sum, as in the layer alone."""
    graph = Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), num_rows=2, num_cols=2)
    x = torch.tensor([[[100.0, 0.0, 0.0, 0.0]], [[-100.0, 1e20, 0.0, 0.0]]]).requires_grad_()
    vectors = torch.tensor([[[0.0, 1.0, 0.0, 0.0]]]), torch.zeros(1, 1, 4)
    out = super_gat(graph, x, vectors, negative_slope=0.01)
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
