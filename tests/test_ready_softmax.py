"""The softmax of edges by its short way: the same bits as the general way, which every unusual call takes."""

import pytest
import torch
from graphs import NAMES, make
from oracle import rand
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gnnaccel import ops
from gnnaccel.ops import reference
from gnnaccel.ops.edge_softmax import choose, made_ready

GRAPH = make("power_law")


@pytest.mark.parametrize("name", [name for name in NAMES if not make(name).nnz])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_nothing_is_made_ready_of_no_edges(name, heads):
    graph = make(name)
    assert made_ready(graph, rand(0, *heads).requires_grad_()) is None
    assert choose(graph, rand(0, *heads)).shape == (0, *heads)


@pytest.mark.parametrize("name", [name for name in NAMES if make(name).nnz])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [(), (1,), (3,), (2, 3)])
def test_ready_softmax_has_the_bits_of_the_general_way(name, dtype, heads):
    graph = make(name)
    scores = rand(graph.nnz, *heads, dtype=dtype).requires_grad_()
    outs = made_ready(graph, scores), choose(graph, scores)
    up = rand(*outs[0].shape, dtype=dtype)
    grads = [torch.autograd.grad(out, scores, up)[0] for out in outs]
    for a, b in (outs, grads):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    assert torch.equal(made_ready(graph, scores.detach()), outs[0])


class _Heard(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_is_unusual_goes_the_general_way():
    scores = rand(GRAPH.nnz, 2)
    cases = {
        "too few": scores[1:],
        "scalar": scores[0, 0],
        "strides": scores.t().contiguous().t(),
        "half": scores.half(),
        "integers": scores.long(),
        "negated": torch._neg_view(scores),
        "no tensor": scores.tolist(),
        "meta": scores.to("meta"),
        "sparse": scores.to_sparse(),
    }
    assert made_ready(GRAPH, scores) is not None
    assert [name for name, given in cases.items() if made_ready(GRAPH, given) is not None] == []
    with _Heard() as mode:
        ops.edge_softmax(GRAPH, scores)
    assert "gnnaccel::edge_softmax" in mode.heard


def test_second_derivatives_of_a_ready_softmax():
    scores, up = rand(GRAPH.nnz, 2, dtype=torch.float64).requires_grad_(), rand(GRAPH.nnz, 2, dtype=torch.float64)
    found = []
    for op in (ops.edge_softmax, reference.edge_softmax):
        (grad,) = torch.autograd.grad((op(GRAPH, scores) * up).square().sum(), scores, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), scores)[0])
    torch.testing.assert_close(*found)


def test_transforms_and_batched_gradients():
    scores = rand(GRAPH.nnz, dtype=torch.float64)
    loss = lambda op: lambda s: (op(GRAPH, s) ** 3).sum()  # noqa: E731
    want = torch.func.grad(loss(reference.edge_softmax))(scores)
    torch.testing.assert_close(torch.func.grad(loss(ops.edge_softmax))(scores), want)
    leaf = scores.clone().requires_grad_()
    out = ops.edge_softmax(GRAPH, leaf)
    ups = rand(2, *out.shape, dtype=torch.float64)
    (batched,) = torch.autograd.grad(out, leaf, ups, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(batched[1], torch.autograd.grad(out, leaf, ups[1])[0])
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda s: ops.edge_softmax(GRAPH, s), (scores,), (scores,))


def test_a_result_written_into_is_noticed():
    leaf = rand(GRAPH.nnz, 2).requires_grad_()
    out = ops.edge_softmax(GRAPH, leaf)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant):
    leaf, grads = rand(GRAPH.nnz, 2).requires_grad_(), []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=use_reentrant)):
        out = run(lambda s: ops.edge_softmax(GRAPH, s * 2), leaf)
        grads.append(torch.autograd.grad(out.square().sum(), leaf)[0] if not use_reentrant else _backward(out, leaf))
    assert torch.equal(*grads)


def _backward(out, leaf):
    leaf.grad = None
    out.square().sum().backward()
    return leaf.grad.clone()


@pytest.mark.parametrize("unpack", [lambda t: t, lambda t: t.t().contiguous().t(), torch.nn.Parameter])
def test_hooks_on_saved_tensors(unpack):
    leaf = rand(GRAPH.nnz, 2).requires_grad_()
    (want,) = torch.autograd.grad(ops.edge_softmax(GRAPH, leaf).square().sum(), leaf)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: unpack(t.clone())):
        (got,) = torch.autograd.grad(ops.edge_softmax(GRAPH, leaf).square().sum(), leaf)
    torch.testing.assert_close(got, want)
