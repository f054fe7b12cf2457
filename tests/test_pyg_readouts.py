"""Readouts of batches of graphs: by segments where nodes of a graph are kept together, else PyG's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric import nn
from torch_geometric.utils import scatter

from gnnaccel import pyg_backend, report
from gnnaccel.pyg_backend import readouts

BATCH = torch.tensor([0, 0, 0, 1, 1, 3, 3, 3, 3, 4])  # a graph without nodes among them


@pytest.fixture(autouse=True)
def _on():
    pyg_backend.enable()
    report.reset()
    yield
    pyg_backend.disable()


def served() -> int:
    found = report.snapshot().get(readouts._KIND)
    return 0 if found is None else found.accelerated


# name -> (shape of x, batch, size, dtype, whether it is ours)
CASES = {
    "usual": ((10, 5), BATCH, None, torch.float32, True),
    "more graphs": ((10, 5), BATCH, 7, torch.float32, True),
    "float64": ((10, 3), BATCH, 5, torch.float64, True),
    "bfloat16": ((10, 3), BATCH, 5, torch.bfloat16, True),
    "no features": ((10, 0), BATCH, 5, torch.float32, True),
    "one graph": ((10, 3), BATCH * 0, None, torch.float32, True),
    "one number": ((10,), BATCH, 5, torch.float32, True),
    "not in order": ((10, 5), BATCH.flip(0), None, torch.float32, False),
    "other dimension": ((2, 10, 3), BATCH, 5, torch.float32, False),
    "whole numbers": ((10, 5), BATCH, None, torch.int64, False),
    "no nodes": ((0, 5), BATCH[:0], 2, torch.float32, False),
}


@pytest.mark.parametrize("name", CASES)
def test_maxima_are_pyg_s(name):
    shape, batch, size, dtype, ours = CASES[name]
    torch.manual_seed(0)
    x = torch.arange(torch.Size(shape).numel())[torch.randperm(torch.Size(shape).numel())].view(shape).to(dtype)
    x = x.requires_grad_(dtype.is_floating_point)
    want = scatter(x, batch, -1 if x.dim() == 1 else -2, size, "max")
    for _ in range(2):  # what is known of a batch is kept
        out = nn.global_max_pool(x, batch, size)
        assert torch.equal(out, want) and out.dtype == want.dtype
        if x.requires_grad:
            grad = torch.randn_like(want)
            assert torch.equal(*(torch.autograd.grad(o, x, grad, retain_graph=True)[0] for o in (out, want)))
    assert served() == 2 * ours


def test_a_batch_that_is_written_into_is_looked_at_again():
    x, batch = torch.randn(10, 3), BATCH.clone()
    nn.global_max_pool(x, batch)
    batch[5:] = 2
    assert torch.equal(nn.global_max_pool(x, batch), scatter(x, batch, 0, None, "max"))
    batch[0] = 2  # no longer in order
    assert torch.equal(nn.global_max_pool(x, batch), scatter(x, batch, 0, None, "max"))
    assert served() == 2


def test_what_is_not_a_number_wins():
    x = torch.randn(10, 3)
    x[4, 1] = torch.nan
    torch.testing.assert_close(nn.global_max_pool(x, BATCH), scatter(x, BATCH, 0, None, "max"), equal_nan=True)


def test_errors_are_pyg_s():
    x = torch.randn(10, 3)
    for batch, size in ((BATCH, 3), (BATCH - 1, None), (BATCH.view(2, 5), None), (BATCH[:4], 5)):
        raised = []
        for call in (lambda b, s: scatter(x, b, -2, s, "max"), lambda b, s: nn.global_max_pool(x, b, s)):
            try:
                raised.append(call(batch, size).shape)
            except (RuntimeError, ValueError, IndexError) as error:
                raised.append(type(error))
        assert raised[0] == raised[1]


def test_sums_and_means_and_other_ways_are_pyg_s():
    x = torch.randn(10, 3)
    assert torch.equal(nn.global_add_pool(x, BATCH), scatter(x, BATCH, 0, None, "sum"))
    assert torch.equal(nn.global_mean_pool(x, BATCH), scatter(x, BATCH, 0, None, "mean"))
    assert torch.equal(nn.global_max_pool(x, None), x.amax(0, keepdim=True))
    torch.func.vmap(lambda x: x.sum())(x)
    want = torch.func.grad(lambda x: scatter(x, BATCH, 0, 5, "max").sum())(x)
    assert torch.equal(torch.func.grad(lambda x: nn.global_max_pool(x, BATCH, 5).sum())(x), want)
    assert served() == 0


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return nn.global_max_pool(x, batch, 5)


def test_scripts_and_compilers_call_it():
    x = torch.randn(10, 3)
    want = scatter(x, BATCH, 0, None, "max")
    assert torch.equal(torch.jit.script(Model())(x, BATCH), want)
    assert torch.equal(torch.compile(Model(), backend="eager", fullgraph=True)(x, BATCH), want)


# name -> (the module for features of a width, whether it is ours)
SOFTMAXES = {
    "learned": lambda width: nn.SoftmaxAggregation(learn=True),
    "learned each": lambda width: nn.SoftmaxAggregation(learn=True, channels=width),
    "fixed": lambda width: nn.SoftmaxAggregation(t=0.3),
    "one": lambda width: nn.SoftmaxAggregation(),
    "half a gradient": lambda width: nn.SoftmaxAggregation(t=2.0, semi_grad=True),
    "Set2Set": lambda width: nn.Set2Set(width, 2),
    "attention": lambda width: nn.AttentionalAggregation(torch.nn.Linear(width, 1)),
}


@pytest.mark.parametrize("batch", [BATCH, BATCH.flip(0)], ids=["in order", "not in order"])
@pytest.mark.parametrize("size", [None, 5, 7])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes_are_near_to_float64(name, size, batch):
    torch.manual_seed(0)
    module = SOFTMAXES[name](6)
    exact = copy.deepcopy(module).double()
    x = torch.randn(10, 6, requires_grad=True)

    def results(module, x):
        out = module(x, batch, dim_size=size)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    got = results(module, x)
    ours = served()
    pyg_backend.disable()
    for one, other in zip(got, results(exact, x.detach().double().requires_grad_()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert ours == (batch is BATCH) * (2 if name == "Set2Set" else 1)


def test_softmaxes_that_are_pyg_s():
    x, module = torch.randn(10, 6), nn.SoftmaxAggregation(learn=True)
    want = module(x, BATCH.flip(0)).flip(0)[:0].sum() + module(x, BATCH)
    assert served() == 1
    ptr = torch.tensor([0, 3, 5, 5, 9, 10])
    for given in (dict(ptr=ptr), dict(index=BATCH.view(1, -1)[0])):  # as ends of edges, a view
        torch.testing.assert_close(module(x, **given), want)
    torch.testing.assert_close(module(x.T.contiguous(), BATCH, dim=1).T, want)
    seen = []
    hook = module.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(module(x, BATCH), want)
    hook.remove()
    module(x.bfloat16(), BATCH)
    assert seen == [1] and served() == 1
    with pytest.raises(ValueError, match="dim_size"):
        module(x, BATCH, dim_size=3)
    compiled = torch.compile(module, backend="eager", fullgraph=True)(x, BATCH, dim_size=5)
    torch.testing.assert_close(compiled, want)
    attention = nn.AttentionalAggregation(torch.nn.Linear(6, 1))
    compiled = torch.compile(attention, backend="eager", fullgraph=True)(x, BATCH, dim_size=5)
    torch.testing.assert_close(compiled, attention(x, BATCH, dim_size=5))


def test_results_may_be_written_into():
    x = torch.randn(10, 6, requires_grad=True)
    nn.SoftmaxAggregation()(x, BATCH).relu_().sum().backward()
    assert x.grad is not None and served() == 1


def test_off_again():
    pyg_backend.disable()
    nn.global_max_pool(torch.randn(10, 3), BATCH)
    nn.SoftmaxAggregation()(torch.randn(10, 3), BATCH)
    nn.Set2Set(3, 1)(torch.randn(10, 3), BATCH)
    assert served() == 0
