"""gnnaccel.captured of steps that cannot be replayed, or not like that: they run as they are, and are counted with the
reason."""

import copy
import random

import captured_steps
import pytest
import torch
import torch.nn.functional as F
from captured_steps import CUDA, DEVICE, both, problem, site, to_other_memory, training

import gnnaccel
from gnnaccel import report

device = captured_steps.device  # a fixture for all that is here


REFUSED = {
    "a value is read": (lambda env, loss: env.losses.__class__([loss.item()]), "waits for the GPU"),
    "a list grows": (lambda env, loss: env.losses.append(1), "it changes env.losses"),
    "a counter": (lambda env, loss: setattr(env, "count", env.count + 1), "it changes env.count"),
    "memory is moved": (lambda env, loss: to_other_memory(env), "to other memory"),
    "a generator": (lambda env, loss: env.dice.random(), "env.dice"),
    "a random number": (lambda env, loss: random.random(), "on the host"),
    "an iterator": (lambda env, loss: next(env.numbers), "env.numbers"),
    "a tensor is kept": (lambda env, loss: setattr(env, "last", loss), "it changes env.last"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_runs_as_it_is(name):
    does, words = REFUSED[name]

    def make():
        env = problem()
        env.losses, env.count, env.last, env.numbers = [], 0, None, iter(range(100))
        env.dice = random.Random(0)
        return env

    def make_step(env):
        plain = training(env)

        def train():
            loss = plain()
            does(env, loss)
            return loss

        return train

    step = both(make, make_step=make_step)
    (reason,) = site().reasons
    assert words in reason and step.variants == 0 and site().left in (14, 12, 10)


def test_a_loss_that_is_differentiated_outside():
    env = problem()

    @gnnaccel.captured
    def train():
        return F.cross_entropy(env.model(env.data.x), env.data.y)

    for _ in range(6):
        train().backward()
    (reason,) = site().reasons
    assert "differentiated" in reason


def test_arguments():
    env = problem()

    def plain(x, y, *, smooth=0.0):
        env.optimizer.zero_grad()
        loss = F.cross_entropy(env.model(x), y, label_smoothing=smooth)
        loss.backward()
        env.optimizer.step()
        return {"loss": loss, "outs": (loss * 2, 7)}

    def run(step):
        torch.manual_seed(3)
        env.model.load_state_dict(state)
        env.optimizer.state.clear()
        found = []
        for i in range(30):
            rows = 8 if i % 15 < 10 else 9
            x, y = torch.randn(rows, 5, device=DEVICE), torch.randint(0, 3, (rows,), device=DEVICE)
            out = step(x, y, smooth=0.1 if i >= 20 else 0.0)
            assert out["outs"][1] == 7
            found.append(torch.stack([out["loss"].detach(), out["outs"][0].detach()]))
            del x, y
        return torch.stack(found)

    state = copy.deepcopy(env.model.state_dict())
    want = run(plain)
    train = gnnaccel.captured(plain)
    torch.testing.assert_close(run(train), want, rtol=1e-5, atol=1e-6)
    assert train.variants >= 2 and not report.snapshot()["captured.plain"].reasons


@pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")
def test_a_capture_that_fails():
    """What only the capture meets: what it had changed is put back, and random numbers are drawn as before."""
    env = problem(dropout=0.5)
    env.optimizer = torch.optim.SGD(env.model.parameters(), lr=0.1)
    plain = training(env)

    @gnnaccel.captured
    def train():
        loss = plain()
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return loss

    for _ in range(12):
        grad, weight = env.model.last.weight.grad, env.model.last.weight.detach().clone()
        assert train().isfinite() and not torch.equal(env.model.last.weight, weight)
        assert env.model.last.weight.grad is not grad
    assert site().accelerated == 0 and all("cannot be captured" in reason for reason in site().reasons)
    both(problem)  # others can
    assert site().accelerated == 11
