"""Captured modules against the same modules as they are: what is changed between calls is seen, and gradients flow as
ever. On the CPU with a stand-in for CUDA graphs (recorded.py), on a GPU with those."""

import contextlib

import captured_cases
import pytest
import torch
from captured_cases import (
    DEVICE,
    LAYERS,
    Net,
    both,
    evaluate,
    in_both,
    problem,
    site,
    train,
    variants,
)
from torch import nn

import gnnaccel

device = captured_cases.device  # a fixture for all that is here


@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_is_captured(layer):
    env = both(lambda: problem(layer))
    assert variants(env) == 1 and site().accelerated == 11 and site().left == 0 and in_both(env)
    assert env.model.unused.weight.grad is None


def test_evaluation_between_epochs():
    env = both(problem, step=lambda env: train(env) + evaluate(env))
    assert variants(env) == 2 and site().accelerated == 22 and not site().reasons


def at(call, change):
    return lambda env, i: change(env) if i == call else None


def _set(where, name, value):
    return lambda env: setattr(where(env), name, value(env))


def _write(tensor, how):
    def change(env):
        with torch.no_grad():
            how(tensor(env))

    return change


def _unseen(env):
    env.data.edge_index.data.copy_(env.data.edge_index.flip(1).roll(7, 0))  # which no version tells
    gnnaccel.invalidate(env.data.edge_index)


def _reload(env):
    env.model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in env.model.state_dict().items()})


def _address(env):
    env.model.last.lin_l.weight.data = env.model.last.lin_l.weight.data * 0.5


def _double(env):
    env.model.double()
    env.data.x = env.data.x.double()


def _freeze(env):
    env.model.first.requires_grad_(False)


def _of_inputs(env):
    env.data.x.requires_grad_()


def _replaced_forward(env):
    forward = env.model.forward
    env.model.forward = lambda *args: forward(*args) * 2


class Doubled(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


MODEL, DATA = (lambda env: env.model), (lambda env: env.data)
# name -> what is changed before call 8, captures there are then (None: the module is left from there on)
CHANGES = {
    "features replaced": (_set(DATA, "x", lambda e: e.data.x * 2), 2),
    "features written": (_write(lambda e: e.data.x, lambda x: x.mul_(2)), 1),
    "graph replaced": (_set(DATA, "edge_index", lambda e: e.data.edge_index[:, 5:].clone()), 2),
    "graph of one shape": (_set(DATA, "edge_index", lambda e: e.data.edge_index.flip(1).roll(7, 0).clone()), 2),
    "graph written": (_write(lambda e: e.data.edge_index, lambda x: x[0].copy_(x[1].roll(3))), 2),
    "graph written unseen": (_unseen, 2),
    "state loaded": (_reload, 1),
    "a parameter written": (_write(lambda e: e.model.last.lin_l.weight, lambda x: x.mul_(3)), 1),
    "a buffer written": (_write(lambda e: e.model.norm.running_mean, lambda x: x.add_(1)), 1),
    "a parameter's memory": (_address, 2),
    "a number": (_set(MODEL, "scale", lambda e: 3.0), 2),
    "an equal number": (_set(MODEL, "scale", lambda e: float("1.0")), 1),
    "a new attribute": (_set(MODEL, "more", lambda e: 1), 2),
    "an attribute of a layer": (_set(lambda e: e.model.last, "aggr", lambda e: "mean"), 1),
    "a layer": (_set(MODEL, "norm", lambda e: nn.Identity()), 2),
    "a list": (lambda e: e.model.log.append(1), 2),
    "dropout switched off": (_set(MODEL, "dropout", lambda e: 0), 2),
    "a buffer replaced": (lambda e: e.model.norm.register_buffer("running_mean", e.model.norm.running_mean + 1), 2),
    "the momentum of a norm": (_set(lambda e: e.model.norm, "momentum", lambda e: 0.9), 2),
    "the class of a part": (_set(lambda e: e.model.norm, "__class__", lambda e: Doubled), 2),
    "frozen": (_freeze, 2),
    "gradients of features": (_of_inputs, 2),
    "another dtype": (_double, 2),
    "a hook": (lambda e: e.model.first.register_forward_hook(lambda module, args, out: out * 2), None),
    "a hook of the model": (
        lambda e: e.model.register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1])), None),
    "a hook of gradients": (
        lambda e: e.model.norm.register_full_backward_hook(lambda module, given, out: (given[0] * 2,)), None),
    "a hook of a parameter": (lambda e: e.model.last.lin_l.weight.register_hook(lambda grad: grad * 3), 2),
    "forward on the instance": (_replaced_forward, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_calls(name):
    change, captures = CHANGES[name]
    env = both(problem, at(8, change), calls=18)
    if captures is None:
        (reason,) = site().reasons
        assert "hook" in reason and site().left == 10 and site().accelerated == 5
    else:
        assert variants(env) == captures and not site().reasons
        assert site().accelerated == (5 + 7 if captures == 2 else 15)


def test_an_attribute_by_another_name():
    def between(env, i):
        if i == 0:
            env.model.other = 3.0
        elif i == 8:
            env.model.gain = vars(env.model).pop("other")  # which leaves the number of attributes, and what they are

    env = both(lambda: problem(does=lambda model, h: h * getattr(model, "gain", 1.0)), between)
    assert variants(env) == 2


def test_a_hook_that_goes():
    def between(env, i):
        if i == 8:
            env.handle = env.model.first.register_forward_hook(lambda module, args, out: out * 2)
        elif i == 10:
            env.handle.remove()

    env = both(problem, between)
    assert variants(env) == 1 and site().left == 2 and site().accelerated == 9


def test_hooks_of_all_modules():
    handles = []

    def between(env, i):
        if i == 8:
            handles.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 1.5))
        elif i == 10:
            handles.pop().remove()

    both(problem, between)
    assert site().left == 2 and not handles


MODES = {
    "autocast": lambda: torch.autocast(DEVICE, dtype=torch.bfloat16),
    "deterministic": lambda: _switched(torch.use_deterministic_algorithms, True, False),
    "grad": torch.no_grad,
    "inference": torch.inference_mode,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "saved": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "precision": lambda: _switched(torch.set_float32_matmul_precision, "high", "highest"),
    "device": lambda: torch.device(DEVICE),
}


@contextlib.contextmanager
def _switched(switch, on, off):
    switch(on)
    yield
    switch(off)


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("name", MODES)
def test_modes_of_captured_modules(name):
    """Every other call is made in a mode, after some without."""

    def step(env):
        env.calls = getattr(env, "calls", 0) + 1
        inside = env.calls > 6 and env.calls % 2
        with MODES[name]() if inside else contextlib.nullcontext():
            out = env.model(env.data.x, env.data.edge_index)
        if out.requires_grad:
            out.float().square().mean().backward()
            env.optimizer.step()
            env.optimizer.zero_grad()
        return out.float()

    env = both(problem, step=step, calls=24)
    # What sees each operation sees it; the rest is captured on its own.
    assert variants(env) == (1 if name in ("anomaly", "saved") else 2)
    assert site().left == (9 if name in ("anomaly", "saved") else 0)


def _tripled(forward):
    return lambda *args: forward(*args) * 3


@pytest.mark.parametrize("where, name, value", [
    (vars(captured_cases), "SCALE", 2.0),
    (Net, "forward", _tripled(Net.forward)),
    (nn.BatchNorm1d, "forward", _tripled(nn.BatchNorm1d.forward)),
    (Net, "further", 1),
])  # fmt: skip
def test_globals_and_classes(where, name, value):
    """What is another from call 8 on: an entry of a dict, or an attribute of a class, that may not have been there."""
    patched = pytest.MonkeyPatch()

    def between(env, i):
        if i == 0:
            patched.undo()
        elif i == 8 and isinstance(where, dict):
            patched.setitem(where, name, value)
        elif i == 8:
            patched.setattr(where, name, value, raising=False)

    try:
        both(problem, between)
    finally:
        patched.undo()


def test_there_and_back():
    def between(env, i):
        env.model.scale = 1.0 if i % 10 < 5 else 2.0

    assert variants(both(problem, between, calls=30)) == 2 and site().accelerated == 24

    def further(env, i):
        env.model.scale = float(i // 20)

    assert variants(both(problem, further, calls=120)) == 4


def test_what_changes_all_the_time_is_left():
    env = both(problem, lambda env, i: setattr(env.model, "scale", 1.0 + i // 4), calls=40)
    (reason,) = site().reasons
    assert "scale is another time and again" in reason and variants(env) == 0
