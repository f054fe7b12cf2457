"""What changes between calls of captured modules and steps, and lies outside of them: the form of what they are given,
modes of torch, state that is loaded, copies. Beside test_captured.py and test_captured_modules.py, in the same way."""

import contextlib
import copy
import functools
import pickle

import captured_cases
import pytest
import recorded
import torch
import torch.nn.functional as F
from captured_cases import CUDA, DEVICE, OF, OF_HALF, both, capture, evaluate, problem, site, train, variants
from torch import nn

import gnnaccel
from gnnaccel import _precision, report
from gnnaccel.capture import steps, variant

of_modules = captured_cases.device  # a fixture for all that is here


@pytest.fixture(autouse=True)
def of_steps(monkeypatch):
    if not CUDA:
        for module in (steps, variant):
            monkeypatch.setattr(module, "Recording", recorded.Recording)


def _turned(tensor):
    """The same numbers in the same shape, column by column."""
    return tensor.t().contiguous().t()


def _twice(env):
    """The parameters in two groups, each of which has its own options."""
    halves = list(env.model.first.parameters()), [p for n, p in env.model.named_parameters() if "first" not in n]
    env.optimizer = torch.optim.SGD([{"params": halves[0], "lr": 0.05}, {"params": halves[1]}], lr=0.1, momentum=0.5)


def _load_optimizer(env):
    state = copy.deepcopy(env.optimizer.state_dict())
    for kept in state["state"].values():
        kept.update({key: value * 0.5 for key, value in kept.items() if isinstance(value, torch.Tensor)})
    env.optimizer.load_state_dict(state)


def _load_model(env):
    state = {key: value * 0.5 if value.is_floating_point() else value for key, value in env.model.state_dict().items()}
    env.model.load_state_dict(state, assign=True)  # other tensors in their place
    env.optimizer = torch.optim.SGD(env.model.parameters(), lr=0.1, momentum=0.5)


def _gradients_elsewhere(env):
    for p in env.model.parameters():
        p.grad = None if p.grad is None else p.grad.clone() * 2


def _edge_index(name):
    edges = {
        "of one shape": lambda e: e.flip(1).roll(7, 0).clone(),
        "of another layout": _turned,
        "of fewer edges": lambda e: e[:, 5:].clone(),
        "int32": lambda e: e.int(),
    }[name]

    def change(env):
        env.data.edge_index = edges(env.data.edge_index)

    return change


def _written(env):
    env.data.edge_index[0].copy_(env.data.edge_index[1].roll(3))


# name -> what is changed before call 8, captures of a step and of a module there are then
CHANGES = {
    "the layout of features": (lambda e: setattr(e.data, "x", _turned(e.data.x)), 2, 2),
    "the strides of features": (lambda e: setattr(e.data, "x", e.data.x.repeat(1, 2)[:, ::2]), 2, 2),
    "graph of one shape": (_edge_index("of one shape"), 2, 2),
    "graph of another layout": (_edge_index("of another layout"), 2, 2),
    "graph of fewer edges": (_edge_index("of fewer edges"), 2, 2),
    "graph of int32": (_edge_index("int32"), 2, 2),
    "graph written": (_written, 2, 2),
    "a state of the optimizer": (_load_optimizer, 2, 1),
    "groups of parameters": (_twice, 2, 1),
    "a state in other tensors": (_load_model, 2, 2),
    "gradients in other memory": (_gradients_elsewhere, 1, 1),
    "a part evaluates": (lambda e: e.model.norm.eval(), 1, 2),  # the step says train()
    "statistics that are not tracked": (lambda e: setattr(e.model.norm, "track_running_stats", False), 2, 2),
    "eps of a norm": (lambda e: setattr(e.model.norm, "eps", 0.5), 2, 2),
}  # fmt: skip


def _step_of(env):
    return lambda: train(env)


def both_steps(between, calls=14, make=problem, make_step=_step_of, around=lambda step: step, of=None):
    """`captured_cases.both` of a whole step, which is called by `around` of it."""
    found, of = [], of or (OF if CUDA else {"rtol": 1e-4, "atol": 1e-5})
    for wrap in (lambda step: step, gnnaccel.captured):
        env = make()
        step = wrap(make_step(env))
        torch.manual_seed(1)
        losses = []
        for i in range(calls):
            between(env, i)
            losses.append(around(step)().detach().clone())
        found.append((torch.stack(losses), [t.detach().clone() for t in env.model.state_dict().values()]))
    for got, want in zip(*found[::-1], strict=True):
        torch.testing.assert_close(got, want, **of)
    return step


@pytest.mark.parametrize("name", CHANGES)
def test_a_step(name):
    change, captures, _ = CHANGES[name]
    step = both_steps(lambda env, i: change(env) if i == 8 else None)
    assert step.variants == captures, report.snapshot()


@pytest.mark.parametrize("name", CHANGES)
def test_a_module(name):
    change, _, captures = CHANGES[name]
    step = _without_train if name == "a part evaluates" else train
    env = both(problem, lambda env, i: change(env) if i == 8 else None, calls=18, step=step)
    assert variants(env) == captures and not site().reasons


def _without_train(env):
    env.optimizer.zero_grad()
    loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index), env.data.y)
    loss.backward()
    env.optimizer.step()
    return loss


@contextlib.contextmanager
def _switched(switch, on, off):
    switch(on)
    try:
        yield
    finally:
        switch(off)


def _set_precision(value):
    torch.backends.cuda.matmul.fp32_precision = value


MODES = {
    "autocast": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
    "deterministic": lambda: _switched(torch.use_deterministic_algorithms, True, False),
    "precision": lambda: _switched(torch.set_float32_matmul_precision, "high", "highest"),
    "default dtype": lambda: _switched(torch.set_default_dtype, torch.float64, torch.float32),
}
NEW_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9
if NEW_PRECISION:
    MODES["precision by its attribute"] = lambda: _switched(_set_precision, "tf32", "ieee")


def _step_in_float32(env):
    def step():
        env.optimizer.zero_grad()
        loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index).float(), env.data.y)
        loss.backward()
        env.optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("name", MODES)
def test_modes_of_a_step(name):
    """Every other call is in the mode from call 6 on: a capture of its own."""
    calls = []

    def around(step):
        def call():
            inside = calls[-1] >= 6 and calls[-1] % 2 == 0
            with MODES[name]() if inside else contextlib.nullcontext():
                return step()

        return call

    of = OF_HALF if CUDA and name == "autocast" else None  # a product of other cuBLAS workspaces rounds otherwise
    step = both_steps(lambda env, i: calls.append(i), calls=20, make_step=_step_in_float32, around=around, of=of)
    assert step.variants == 2


@pytest.mark.skipif(not NEW_PRECISION, reason="torch before 2.9")
def test_a_precision_that_torch_no_longer_tells(request):
    """Its getter of old raises once the new attribute is set: no capture, and no product of ours, asks it."""
    request.addfinalizer(lambda: (_set_precision("ieee"), torch.set_float32_matmul_precision("highest")))
    _set_precision("tf32")
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert _precision.allows_tf32()
    env = both(problem)
    assert variants(env) == 1 and site().accelerated == 11
    x, ptr = torch.randn(6, 3, device=DEVICE), torch.tensor([0, 2, 6], device=DEVICE)
    weight = torch.randn(2, 3, 4, device=DEVICE)
    want = torch.cat([x[:2] @ weight[0], x[2:] @ weight[1]])
    torch.testing.assert_close(gnnaccel.ops.segment_matmul(x, ptr, weight), want, rtol=1e-2, atol=1e-2)


def test_gradients_that_overflow():
    """GradScaler leaves out the steps whose gradients are infinite, of a captured module too."""

    def step(env):
        env.optimizer.zero_grad()
        loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index), env.data.y)
        env.scaler.scale(loss * (1e38 if env.norms and env.norms[-1] % 5 == 4 else 1.0)).backward()
        env.scaler.step(env.optimizer)
        env.scaler.update()
        return torch.tensor(env.scaler.get_scale())

    def make():
        env = problem()
        env.scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
        return env

    env = both(make, lambda env, i: env.norms.append(i), step=step, calls=18)
    assert env.scaler.get_scale() != 1024.0 and site().accelerated >= 10


def test_a_scaler_in_a_step_is_refused():
    scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0)

    def make_step(env):
        def step():
            env.optimizer.zero_grad()
            loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index), env.data.y)
            scaler.scale(loss).backward()
            scaler.step(env.optimizer)
            scaler.update()
            return loss

        return step

    step = both_steps(lambda env, i: None, make_step=make_step)
    assert step.variants == 0 and report.snapshot()["captured.step"].reasons


def test_copies_of_what_a_step_has_trained(tmp_path):
    """torch.save, deepcopy and state_dict between steps give the model as it is then, and go their own way."""
    env = problem()
    step = gnnaccel.captured(_step_of(env))
    for _ in range(8):
        step()
    torch.save(env.model, tmp_path / "model.pt")
    others = [
        copy.deepcopy(env.model),
        torch.load(tmp_path / "model.pt", weights_only=False),
        pickle.loads(pickle.dumps(env.model)),
    ]
    torch.save({"model": env.model.state_dict(), "optimizer": env.optimizer.state_dict()}, tmp_path / "state.pt")
    want = evaluate(env)
    kept = [p.detach().clone() for p in env.model.parameters()]
    for _ in range(4):
        step()
    for other in others:
        torch.testing.assert_close(list(other.parameters()), kept, rtol=0, atol=0, check_device=False)
    state = torch.load(tmp_path / "state.pt")
    env.model.load_state_dict(state["model"])
    env.optimizer.load_state_dict(state["optimizer"])
    torch.testing.assert_close(evaluate(env), want, **OF)
    plain = problem()
    plain.model.load_state_dict(state["model"])
    plain.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # which keeps the tensors it is given
    for _ in range(8):
        torch.testing.assert_close(step(), train(plain).detach(), **OF)


def test_memory_is_the_sum_of_captures(monkeypatch):
    own = functools.partial(property, fset=lambda recording, value: None)
    monkeypatch.setattr(captured_cases.pair.Recording, "memory_bytes", own(lambda recording: 5), raising=False)
    env, other = capture(problem()), problem()
    step = gnnaccel.captured(_step_of(other))
    for _ in range(8):
        train(env)
        evaluate(env)
        step()
    assert gnnaccel.capture.captures_of(env.model).memory_bytes == 15  # two forwards and a backward
    assert step.memory_bytes == 5


def test_clipped_by_value_and_by_hooks_of_the_optimizer():
    def step(env):
        env.optimizer.zero_grad(set_to_none=len(env.norms) % 2 == 0)
        loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index), env.data.y)
        loss.backward()
        nn.utils.clip_grad_value_(env.model.parameters(), 0.01)
        env.optimizer.step()
        return loss

    def make():
        env = problem()
        env.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: env.norms.append(1))
        return env

    assert both(make, step=step).norms and site().accelerated == 11
