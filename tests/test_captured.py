"""gnnaccel.captured against the same step as it is: what is changed between calls is seen. On the CPU with a stand-in
for the CUDA graph (recorded.py), on a GPU with that."""

import copy
import gc
import pickle
import sys
import types
import weakref
from types import SimpleNamespace

import captured_steps
import pytest
import torch
import torch.nn.functional as F
from captured_steps import CUDA, DEVICE, both, problem, site, to_other_memory, training
from torch import nn

import gnnaccel
from gnnaccel import report
from gnnaccel.capture.device import Recording

device = captured_steps.device  # a fixture for all that is here


OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "groups": lambda p: torch.optim.Adam([{"params": list(p), "lr": 0.02}]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_captured(name):
    step = both(lambda: problem(OPTIMIZERS[name]))
    assert step.variants == 1 and site().accelerated == 11 and site().left == 0


def at(call, change):
    return lambda env, i: change(env) if i == call else None


def _set(where, name, value):
    def change(env):
        setattr(where(env), name, value(env))

    return change


def _evaluate(env):
    env.model.eval()
    with torch.no_grad():
        env.model(env.data.x)


def _in_place(env):
    with torch.no_grad():
        env.data.x.mul_(2)
        env.data.y.copy_(env.data.y.roll(1))


def _reload(env):
    env.model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in env.model.state_dict().items()})


def _rate(env):
    for group in env.optimizer.param_groups:
        group["lr"] *= 0.5


def _decay(env):
    env.optimizer.param_groups[0]["weight_decay"] = 0.1


def _freeze(env):
    env.model.first.requires_grad_(False)
    env.optimizer.zero_grad()


def _hook(env):
    env.model.first.register_forward_hook(lambda module, args, out: out * 2)


def _drop_grads(env):
    env.optimizer.zero_grad()


def _mask(env):
    env.data.mask.logical_not_()


def _cast(env):
    env.model.double()
    env.data.x = env.data.x.double()
    env.optimizer = torch.optim.Adam(env.model.parameters(), lr=0.01)


def _hook_of_tensor(env):
    env.model.last.weight.register_hook(lambda grad: grad * 3)


def _rename(env):
    env.flags["other"] = env.flags.pop("one")


def _number(env):
    env.array *= 2


def _function(env):
    env.weigh.by = 2.0


# name -> what is changed before call 8, how many captures there are then
CHANGES = {
    "features replaced": (_set(lambda e: e.data, "x", lambda e: e.data.x * 2), 2),
    "features written": (_in_place, 1),
    "mask written": (_mask, 2),
    "mask replaced": (_set(lambda e: e.data, "mask", lambda e: ~e.data.mask), 2),
    "evaluation between": (_evaluate, 1),
    "state loaded": (_reload, 1),
    "learning rate": (_rate, 1),
    "weight decay": (_decay, 2),
    "a number of the closure's": (_set(lambda e: e, "factor", lambda e: 0.5), 2),
    "a number of the model's": (_set(lambda e: e.model, "scale", lambda e: 3.0), 2),
    "an equal number": (_set(lambda e: e.model, "scale", lambda e: float("1.0")), 1),
    "a new attribute": (_set(lambda e: e.model, "more", lambda e: 1), 2),
    "an attribute that was not there": (_set(lambda e: e, "late", lambda e: 2.0), 2),
    "a layer": (_set(lambda e: e.model, "last", lambda e: copy.deepcopy(e.model.last)), 2),
    "a parameter's memory": (to_other_memory, 2),
    "frozen": (_freeze, 2),
    "a hook": (_hook, 2),
    "gradients dropped": (_drop_grads, 1),
    "a hook of a tensor": (_hook_of_tensor, 2),
    "a set": (lambda e: e.names.add("late"), 2),
    "a key": (_rename, 2),
    "an array's number": (_number, 2),
    "an attribute of a function": (_function, 2),
    "frozen and trained by the step": (lambda e: e.model.last.bias.requires_grad_(False), 2),
    "another optimizer": (
        _set(lambda e: e, "optimizer", lambda e: torch.optim.Adam(e.model.parameters(), lr=0.1)), 2),
    "another dtype": (_cast, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_calls(name):
    change, captures = CHANGES[name]
    step = both(problem, at(8, change))
    assert step.variants == captures and not site().reasons
    # An evaluation leaves the model in another mode than the step: that call is another step.
    assert site().accelerated == (5 + 3 if captures > 1 else 10 if name == "evaluation between" else 11)


def _trainers(env, kind):
    """Steps that set what they read, or end in another state than they begin in."""
    plain = training(env)

    def evaluates():
        loss = F.cross_entropy(env.model(env.data.x), env.data.y)
        env.optimizer.zero_grad()
        loss.backward()
        env.optimizer.step()
        env.model.eval()
        return loss

    def freezes():
        loss = plain()
        env.model.last.bias.requires_grad_(False)
        return loss

    def imports():
        import settings_of_a_user as settings

        return plain() * settings.factor

    inner = gnnaccel.captured(lambda: env.factor * env.data.x.sum())

    def nested():
        return plain() + inner()

    return {"evaluates": evaluates, "freezes": freezes, "imports": imports, "nested": nested}[kind]


@pytest.mark.parametrize("kind", ["evaluates", "freezes", "imports", "nested"])
def test_states_at_the_start_and_the_end(kind, monkeypatch):
    settings = types.ModuleType("settings_of_a_user")
    monkeypatch.setitem(sys.modules, "settings_of_a_user", settings)

    def between(env, i):
        settings.factor = 1.0 if i < 8 else 2.0
        if i % 3 == 0:
            env.model.train()
            env.model.last.bias.requires_grad_(True)
        if kind == "nested" and i == 8:
            env.factor = 2.0

    both(lambda: problem(lambda p: torch.optim.SGD(p, lr=0.1)), between, calls=24,
         make_step=lambda env: _trainers(env, kind))  # fmt: skip


def test_an_argument_that_is_written():
    def step(x):
        return x.mul_(2).sum()

    train = gnnaccel.captured(step)
    for i in range(10):
        x = torch.full((3,), float(i), device=DEVICE)
        assert train(x).item() == 6 * i and x[0].item() == 2 * i
    (reason,) = report.snapshot()["captured.step"].reasons
    assert "writes into an argument" in reason


def test_pickled_and_copied():
    assert pickle.loads(pickle.dumps(_of_this_module)) is _of_this_module
    again = copy.deepcopy(gnnaccel.captured(torch.nn.Linear(2, 2)))
    assert again(torch.ones(2)).shape == (2,) and again.variants == 0


@gnnaccel.captured
def _of_this_module():
    return 1


def test_an_iterator_that_comes_later():
    def between(env, i):
        if i == 2:
            env.data.extra = iter(range(3))

    def make_step(env):
        plain = training(env)

        def train():
            return plain() * (2 if hasattr(env.data, "extra") else 1)

        return train

    both(problem, between, make_step=make_step)
    (reason,) = site().reasons
    assert "env.data.extra" in reason


def test_modules_of_users():
    """What the step reads of a module that it names."""
    module = types.ModuleType("settings")
    module.factor, module.unread = 1.0, 0

    def make_step(env):
        plain = training(env)

        def train():
            return plain() * module.factor

        return train

    def between(env, i):
        module.factor, module.unread = 2.0 if i >= 8 else 1.0, i

    assert both(problem, between, make_step=make_step).variants == 2


def test_a_schedule_of_learning_rates():
    def make():
        env = problem()
        env.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(env.optimizer, 10)
        return env

    step = both(make, lambda env, i: env.schedule.step() if i else None)
    assert step.variants == 1 and site().accelerated == 11


def test_attributes_that_the_step_does_not_name():
    def make():
        env = problem()
        env.epoch, env.log = 0, []
        return env

    def between(env, i):
        env.epoch += 1
        env.log.append(i)

    assert both(make, between).variants == 1 and site().accelerated == 11


def test_there_and_back():
    """Both forms stay captured; a fifth takes the place of the first."""

    def between(env, i):
        env.model.scale = 1.0 if i % 10 < 5 else 2.0

    assert both(problem, between, calls=30).variants == 2
    assert site().accelerated == 30 - 6

    def further(env, i):
        env.model.scale = float(i // 20)

    assert both(problem, further, calls=120).variants == 4


def test_what_changes_all_the_time_is_left():
    step = both(problem, lambda env, i: setattr(env.model, "scale", 1.0 + i // 4), calls=40)
    (reason,) = site().reasons
    assert reason.endswith("time and again") and "scale" in reason and step.variants <= 4


def test_dropout_draws_new_numbers():
    env = problem(dropout=0.5)

    @gnnaccel.captured
    def train():
        return env.model(env.data.x).detach()

    outs = [train() for _ in range(12)]
    assert site().accelerated == 9
    assert len({out.sum().item() for out in outs}) == 12


def _accumulates(env):
    def train():
        loss = F.cross_entropy(env.model(env.data.x), env.data.y)
        loss.backward()
        return loss

    return train


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_accumulated(to_none):
    seen = []

    def between(env, i):
        if i % 4 == 3:
            env.optimizer.step()
            env.optimizer.zero_grad(set_to_none=to_none)
        seen.append(env.model.last.weight.grad)

    both(problem, between, calls=40, make_step=_accumulates)
    assert site().accelerated >= 20
    if CUDA and not to_none:  # under a dispatch mode torch adds gradients up into new tensors
        assert len({id(x) for x in seen[-10:]}) == 1


def test_zeroed_and_clipped_gradients():
    def make_step(env):
        def train():
            env.optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(env.model(env.data.x), env.data.y)
            loss.backward()
            nn.utils.clip_grad_norm_(env.model.parameters(), 0.1)
            env.optimizer.step()
            return loss

        return train

    both(problem, make_step=make_step)
    assert site().accelerated == 11


def test_results_last():
    env = problem()
    step, own = gnnaccel.captured(training(env)), gnnaccel.captured(training(env), copy_outputs=False)
    losses = [step() for _ in range(10)]
    assert len({loss.item() for loss in losses}) == 10
    shared = [own() for _ in range(10)]
    assert shared[-1] is not losses[-1] and shared[-1].item() == shared[-2].item()


@pytest.mark.skipif(not CUDA, reason="the stand-in frees nothing on a GPU")
def test_an_old_graph_that_is_garbage_while_another_is_made():
    """Freed in the middle of a capture, it would end that with an error."""
    old = SimpleNamespace(graph=torch.cuda.CUDAGraph())
    old.itself = old
    with torch.cuda.graph(old.graph):
        torch.ones(1, device=DEVICE)
    graph, kept = weakref.ref(old.graph), [old]
    del old
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        out = Recording([]).record(lambda: (kept.clear(), [[] for _ in range(5000)], graph()))
        assert out[2] is not None and gc.isenabled()
    finally:
        gc.set_threshold(*before)
    del out
    gc.collect()
    assert graph() is None


def test_an_evaluation_and_a_method():
    class Trainer:
        def __init__(self):
            self.env = problem()

        @gnnaccel.captured
        @torch.no_grad()
        def train(self):
            self.env.model.eval()
            return self.env.model(self.env.data.x)

    trainer = Trainer()
    for _ in range(6):
        got = trainer.train()
        with torch.no_grad():
            torch.testing.assert_close(got, trainer.env.model(trainer.env.data.x))
    assert site().accelerated == 3


def test_errors_are_the_steps_own():
    env = problem()
    env.fail = False

    @gnnaccel.captured
    def train():
        if env.fail:
            raise KeyError("mine")
        return env.model(env.data.x).detach()

    for i in range(12):
        env.fail = i == 7
        if env.fail:
            with pytest.raises(KeyError, match="mine"):
                train()
        else:
            train()
    assert site().accelerated >= 4


@pytest.mark.parametrize("make, error, words", [
    (lambda: gnnaccel.captured(3), TypeError, "callable"),
    (lambda: gnnaccel.captured(print, warmup=1), ValueError, "at least 2"),
])  # fmt: skip
def test_bad_arguments_of_captured_steps(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_on_the_cpu(monkeypatch):
    monkeypatch.undo()
    env = problem()
    env.model.cpu()
    env.data = SimpleNamespace(x=env.data.x.cpu(), y=env.data.y.cpu(), mask=env.data.mask.cpu())
    env.optimizer = torch.optim.Adam(env.model.parameters())
    step = gnnaccel.captured(training(env))
    for _ in range(5):
        step()
    (reason,) = site().reasons
    assert "CPU" in reason and site().left == 5
