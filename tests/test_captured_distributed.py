"""Captured models and steps beside DistributedDataParallel, in a group of one process: on a GPU also of NCCL."""

import captured_cases
import pytest
import torch
import torch.distributed as dist
from captured_cases import CUDA, OF, capture, evaluate, problem, site, train, variants
from torch.nn.parallel import DistributedDataParallel

import gnnaccel
from gnnaccel import report
from gnnaccel.capture import attaching, captures_of

device = captured_cases.device  # a fixture for all that is here
BACKENDS = ["gloo", *(["nccl"] if CUDA and dist.is_nccl_available() else [])]


@pytest.fixture(params=BACKENDS, autouse=True)
def group(request, tmp_path):
    if CUDA:
        torch.cuda.set_device(0)
    dist.init_process_group(request.param, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(captured, **options):
    """The problem of all captured models, the model in DDP; captured: on its own, before that."""
    env = problem()
    if captured:
        capture(env)
    env.inner, env.model = env.model, DistributedDataParallel(env.model, find_unused_parameters=True, **options)
    return env


def variants_of(env):
    return captures_of(env.inner).variants


def assert_same_parameters(ours, theirs):
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("views", [False, True])
def test_a_captured_module_within(views):
    """Gradients of a replay go through autograd, where DDP waits for them."""
    ours, theirs = wrapped(True, gradient_as_bucket_view=views), wrapped(False, gradient_as_bucket_view=views)
    for i in range(14):
        torch.testing.assert_close(train(ours), train(theirs), **OF)
        if i % 5 == 4:
            torch.testing.assert_close(evaluate(ours), evaluate(theirs), **OF)
    assert_same_parameters(ours, theirs)
    assert site().accelerated >= 11 and variants_of(ours) == 1


def test_gradients_are_reduced():
    """A replay calls the hook of DDP that stands for the other processes' part: here it doubles."""

    def doubled(_, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer().mul(2))
        return future

    ours, theirs = wrapped(True), wrapped(False)
    for env in (ours, theirs):
        env.model.register_comm_hook(None, doubled)
    plain = problem()
    for _ in range(9):
        torch.testing.assert_close(train(ours), train(theirs), **OF)
        train(plain)
    assert_same_parameters(ours, theirs)
    assert variants_of(ours) == 1
    assert not torch.equal(next(ours.model.parameters()), next(plain.model.parameters()))


def test_no_sync():
    """Gradients that are added up without the others, and sent at the last of two."""
    found = []
    for captured in (True, False):
        env = wrapped(captured)
        for i in range(12):
            env.optimizer.zero_grad()
            with env.model.no_sync():
                env.model(env.data.x, env.data.edge_index).square().mean().backward()
            loss = env.model(env.data.x * (i + 1), env.data.edge_index).mean()
            loss.backward()
            env.optimizer.step()
            found.append(loss.detach())
        last = env
    torch.testing.assert_close(torch.stack(found[:12]), torch.stack(found[12:]), **OF)
    assert captures_of(last.inner) is None


def test_the_wrapper_is_left():
    env = wrapped(False)
    gnnaccel.accelerate(env.model, cuda_graphs=True)
    for _ in range(6):
        train(env)
    assert variants(env) == 0
    assert "DistributedDataParallel" in captures_of(env.model).refused


def test_what_the_variable_captures():
    attaching.enable()
    try:
        ours, theirs = wrapped(False), wrapped(False)
        for _ in range(8):
            train(ours)
        assert captures_of(ours.model) is None and variants_of(ours) == 1
    finally:
        attaching.disable()
    for _ in range(8):
        train(theirs)
    assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("captured", [False, True])
def test_a_step(captured):
    """A captured step is left, with the reason; a model within it that is captured is not."""
    ours, theirs = wrapped(captured), wrapped(False)

    @gnnaccel.captured
    def step():
        return train(ours)

    report.reset()
    for _ in range(14):
        torch.testing.assert_close(step(), train(theirs), **OF)
    assert_same_parameters(ours, theirs)
    seen = report.snapshot()["captured.step"]
    assert step.variants == 0 and seen.accelerated == 0
    assert set(seen.reasons) == {"it contains DistributedDataParallel, which speaks to other processes"}
    if captured:
        assert variants_of(ours) == 1 and captures_of(ours.inner)._pairs[-1]._backwards
