"""Optimizers of captured models: Adam's step becomes torch's fused one, where the choice is left to torch; its results,
its state and all other optimizers stay."""

import copy

import captured_cases
import pytest
import torch
import torch.nn.functional as F
from captured_cases import DEVICE, OF, both, capture, in_both, site, train
from torch import nn

import gnnaccel
from gnnaccel.capture import attaching

device = captured_cases.device  # a fixture for all that is here


def problem(make):
    env = captured_cases.problem(make=make)
    env.model.norm = nn.Identity()  # a bias before a norm has a gradient of rounding errors, which Adam enlarges
    return env


class Ours(torch.optim.Adam):
    pass


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True, weight_decay=0.1),
    "groups": lambda p: torch.optim.Adam([{"params": [x], "lr": 0.01 * i} for i, x in enumerate(p)]),
}
LEFT = {
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "unfused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=False),
    "another class": lambda p: Ours(p, lr=0.01),
    "another optimizer": lambda p: torch.optim.NAdam(p, lr=0.01),
}
if DEVICE == "cpu":  # elsewhere torch takes no such numbers
    LEFT["numbers as tensors"] = lambda p: torch.optim.Adam(p, lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.999)))


def counters(env):
    return [state["step"] for state in env.optimizer.state.values()]


def fused(env):
    """Of groups with parameters that are trained."""
    groups = env.optimizer.param_groups
    return [group.get("fused") for group in groups if any(x.grad is not None for x in group["params"])]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_one_kernel(name):
    env = both(lambda: problem(OPTIMIZERS[name]), calls=20)
    assert in_both(env) and site().accelerated == 17 and all(fused(env))
    assert site(type(env.optimizer).__name__).accelerated == len(fused(env))
    assert all(step.device.type == DEVICE and float(step) == 20 for step in counters(env))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    try:
        problem(LEFT[name])
    except ValueError:
        pytest.skip("torch has no such option yet")
    env = both(lambda: problem(LEFT[name]))
    assert in_both(env) and not any(fused(env)) and all(step.device.type == "cpu" for step in counters(env))


def test_optimizers_of_other_parameters():
    env, other = capture(problem(OPTIMIZERS["Adam"])), problem(OPTIMIZERS["Adam"])
    for _ in range(10):
        train(env)
        train(other)
    assert all(fused(env)) and not any(fused(other))
    gnnaccel.accelerate(env.model, cuda_graphs=False)
    assert attaching.captures_of(env.model) is None
    train(env)  # as it is from now on


def test_schedules():
    def step(env):
        loss = train(env)
        env.schedule.step()
        return loss

    def make():
        env = problem(OPTIMIZERS["Adam"])
        env.schedule = torch.optim.lr_scheduler.OneCycleLR(env.optimizer, max_lr=0.1, total_steps=30)  # betas as well
        return env

    assert all(fused(both(make, step=step, calls=20)))


def test_scaled_losses():
    def step(env):
        env.optimizer.zero_grad()
        loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index), env.data.y)
        env.scaler.scale(loss * env.factor).backward()
        env.scaler.step(env.optimizer)
        env.scaler.update()
        return loss

    def make():
        env = problem(OPTIMIZERS["Adam"])
        env.scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=3)
        return env

    def between(env, i):
        env.factor = float("inf") if i in (7, 11) else 1.0  # such a step is skipped

    env = both(make, between, step=step)
    assert all(fused(env)) and {float(step) for step in counters(env)} == {12.0}


def test_states_go_to_and_fro():
    """A state saved by either kind of optimizer is loaded by the other, and training goes on as it would."""

    def between(env, i):
        if i == 6:
            env.kept = copy.deepcopy((env.model.state_dict(), env.optimizer.state_dict()))
        elif i == 12:
            env.model.load_state_dict(env.kept[0])
            env.optimizer.load_state_dict(env.kept[1])

    env = both(lambda: problem(OPTIMIZERS["Adam"]), between, calls=18)
    assert all(fused(env))
    early = both(lambda: problem(OPTIMIZERS["Adam"]), lambda env, i: between(env, i + 4 if i == 2 else i), calls=18)
    assert all(fused(early))  # whose state was saved before it was captured
    plain = problem(OPTIMIZERS["Adam"])
    plain.model.load_state_dict(env.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(env.optimizer.state_dict()))
    torch.testing.assert_close(
        torch.stack([train(plain) for _ in range(4)]), torch.stack([train(env) for _ in range(4)]), **OF
    )
