"""global_max_pool over batches of graphs: by segments where nodes of a graph are kept together, else PyG's."""

from __future__ import annotations

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


def test_off_again():
    pyg_backend.disable()
    nn.global_max_pool(torch.randn(10, 3), BATCH)
    assert served() == 0
