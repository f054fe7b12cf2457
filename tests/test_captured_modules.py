"""Captured modules against the same modules as they are: what is changed between calls is seen, and gradients flow as
ever. On the CPU with a stand-in for CUDA graphs (recorded.py), on a GPU with those."""

import contextlib
import copy
import io
import logging
import pickle
import random
from types import SimpleNamespace

import captured_cases
import pytest
import torch
import torch.nn.functional as F
from captured_cases import (
    DEVICE,
    LAYERS,
    OF,
    Net,
    Of,
    both,
    capture,
    evaluate,
    in_both,
    problem,
    site,
    train,
    variants,
)
from torch import nn
from torch_geometric import nn as pyg_nn

import gnnaccel
from gnnaccel import report
from gnnaccel.capture import captures_of

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
def test_modes(name):
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


def _accumulate(env):
    env.calls = getattr(env, "calls", 0) + 1
    loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index), env.data.y)
    (loss / 4).backward()
    if env.calls % 4 == 0:
        nn.utils.clip_grad_norm_(env.model.parameters(), 0.1)
        env.optimizer.step()
        env.optimizer.zero_grad(set_to_none=env.to_none)
    return loss


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_accumulated_and_clipped(to_none):
    def make():
        env = problem()
        env.to_none = to_none
        return env

    env = both(make, step=_accumulate, calls=30)
    assert site().accelerated == 27 and in_both(env)


def test_gradients_last():
    env = capture(problem())
    kept = []
    for _ in range(10):
        train(env)
        grad = env.model.last.lin_l.weight.grad
        kept.append((grad, grad.clone()))
        env.optimizer.zero_grad(set_to_none=True)
    assert in_both(env) and all(torch.equal(grad, value) for grad, value in kept)
    assert len({grad.data_ptr() for grad, _ in kept}) == 10


def test_scaled_losses():
    def step(env):
        env.optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = F.cross_entropy(env.model(env.data.x, env.data.edge_index).float(), env.data.y)
        env.scaler.scale(loss).backward()
        env.scaler.step(env.optimizer)
        env.scaler.update()
        return loss

    def make():
        env = problem()
        env.scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=3)
        return env

    assert in_both(both(make, step=step, narrow=True)) and site().accelerated == 11


def test_results_last():
    env, own = capture(problem()), capture(problem(), copy_outputs=False)
    kept = [train(env) and env.model(env.data.x, env.data.edge_index) for _ in range(10)]
    values = [x.detach().clone() for x in kept]
    train(env)
    assert all(torch.equal(x, value) for x, value in zip(kept, values, strict=True))
    own.model.eval()
    with torch.no_grad():
        shared = [own.model(own.data.x * i, own.data.edge_index) for i in range(10)]
    assert torch.equal(shared[-1], shared[-2]) and not torch.equal(shared[0], shared[-1])


def _pairs(env):
    """Two forwards before one backward."""
    env.optimizer.zero_grad()
    one = env.model(env.data.x, env.data.edge_index)
    other = env.model(env.data.x, env.data.edge_index)
    loss = (one * other.detach().sigmoid()).square().mean() + F.cross_entropy(other, env.data.y)
    loss.backward()
    env.optimizer.step()
    return loss


def test_forwards_before_a_backward():
    env = both(problem, step=_pairs, calls=14)
    (reason,) = site().reasons
    assert variants(env) == 2 and "waits for its backward" in reason and site().left <= 4

    def step(env):  # the first one's backward comes last
        outs = [env.model(env.data.x * i, env.data.edge_index) for i in range(4)]
        grads = [torch.autograd.grad(out.square().mean(), env.model.first.lin_l.weight)[0] for out in outs]
        return torch.stack(grads)

    assert variants(both(problem, step=step, calls=10)) == 4


def test_a_second_capture_that_fails(monkeypatch):
    env, tried = capture(problem()), []
    for _ in range(8):
        train(env)

    def fails(*args):
        tried.append(args)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(captured_cases.modules, "Pair", fails)
    for _ in range(20):
        _pairs(env)
    assert len(tried) == 2 and variants(env) == 1 and site().accelerated == 5 + 20


def test_early_exits():
    def step(env):
        env.out = env.model(env.data.x, env.data.edge_index)  # while the one before is there, without a backward
        return env.out if len(env.norms) % 3 else train(env).expand_as(env.out)

    env = both(problem, lambda env, i: env.norms.append(i), step=step, calls=24)
    assert site().accelerated > 20 and variants(env) == 2


def test_backward_twice():
    def step(env):
        env.optimizer.zero_grad()
        out = env.model(env.data.x, env.data.edge_index)
        F.cross_entropy(out, env.data.y).backward(retain_graph=True)
        out.square().mean().backward()
        env.optimizer.step()
        return out

    env = both(problem, step=step)
    assert site().accelerated == 11 and in_both(env)
    env.optimizer.zero_grad()
    out = env.model(env.data.x, env.data.edge_index).sum()
    out.backward(retain_graph=True)
    again = env.model(env.data.x, env.data.edge_index)  # must not overwrite what is kept
    want = [p.grad.clone() for p in env.model.last.parameters()]
    env.optimizer.zero_grad()
    out.backward()
    torch.testing.assert_close([p.grad for p in env.model.last.parameters()], want, **OF)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    again.sum().backward()


@pytest.mark.parametrize("from_the_start", [True, False])
def test_gradients_of_gradients(from_the_start):
    def step(env):
        env.calls = getattr(env, "calls", 0) + 1
        env.optimizer.zero_grad()
        weight = env.model.first.lin_l.weight
        loss = env.model(env.data.x, env.data.edge_index).square().mean()
        if from_the_start or env.calls == 10:
            loss = loss + torch.autograd.grad(loss, weight, create_graph=True)[0].square().sum()
        loss.backward()
        env.optimizer.step()
        return loss

    if from_the_start:
        both(problem, step=step)
        (reason,) = site().reasons
        assert "create_graph" in reason and site().accelerated == 0
    else:
        with pytest.raises(RuntimeError, match=r"Net: was captured .*create_graph"):
            both(problem, step=step)


@pytest.mark.parametrize("kind", ["leaf", "moving", "moving leaf"])
def test_gradients_to_inputs(kind):
    def step(env):
        env.optimizer.zero_grad()
        if kind == "moving leaf":
            env.data.x = env.data.x.detach().clone().requires_grad_()
        x = env.data.x * 2 if kind == "moving" else env.data.x
        env.model(x, env.data.edge_index).square().mean().backward()
        env.optimizer.step()
        grad = env.data.x.grad.clone()
        env.data.x.grad = None
        return grad

    def make():
        env = problem()
        env.data.x.requires_grad_()
        return env

    env = both(make, step=step)
    assert site().accelerated == 11 and in_both(env)


def test_new_features_at_each_call():
    def between(env, i):
        env.data.x = torch.full((20, 5), 0.1 * i, device=DEVICE) + env.data.x.roll(1, 0)

    env = both(problem, between)
    assert variants(env) == 1 and site().accelerated == 11

    def widths(env, i):
        env.data.x = torch.ones(20 + i % 3, 5, device=DEVICE) * i
        env.data.y, env.data.mask = (torch.ones(20 + i % 3, device=DEVICE, dtype=t) for t in (torch.long, torch.bool))

    assert variants(both(problem, widths, calls=30)) == 3 and site().accelerated > 20


def test_arguments_by_name_and_in_containers():
    class Wide(Net):
        def forward(self, inputs, *, edge_index, scale=1.0, gain=None):
            out = super().forward(inputs["x"], edge_index) * scale
            return {"out": out if gain is None else out * gain, "scale": scale, "inputs": inputs["x"]}

    def make():
        env = problem()
        env.model = gnnaccel.accelerate(Wide().to(DEVICE))
        return env

    def step(env):
        env.calls = getattr(env, "calls", 0) + 1
        found = env.model({"x": env.data.x}, edge_index=env.data.edge_index, scale=1.0 + env.calls // 8)
        assert found["inputs"] is env.data.x and found["scale"] == 1.0 + env.calls // 8
        return found["out"]

    assert variants(both(make, step=step)) == 2


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = LAYERS["SAGE"](5, 3), LAYERS["SAGE"](5, 3)

    def forward(self, x, edge_index):
        one = self.one(x, edge_index)
        return one, self.other(x, edge_index), one.argmax(1), one


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_some_results_are_used(used):
    """Parameters that do not reach the loss have no gradient, as without a capture."""

    def make():
        env = problem()
        env.model = gnnaccel.accelerate(Halves().to(DEVICE))
        env.optimizer = torch.optim.SGD(env.model.parameters(), lr=0.1, weight_decay=0.1)
        return env

    def step(env):
        outs = env.model(env.data.x, env.data.edge_index)
        assert not outs[2].requires_grad and outs[3] is outs[0]
        env.optimizer.zero_grad()
        loss = sum(outs[k].square().mean() for k in used)
        loss.backward()
        env.optimizer.step()
        return loss

    env = both(make, step=step)
    assert site("Halves").accelerated == 11 and in_both(env)


def test_writes_between_forward_and_backward():
    env = capture(problem())
    for _ in range(10):
        train(env)
    for name, write in {"parameter": env.model.last.lin_l.weight, "features": env.data.x}.items():
        loss = env.model(env.data.x, env.data.edge_index).sum()
        with torch.no_grad():
            write.mul_(1.0)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
        assert name
    with torch.no_grad():
        env.model.last.lin_l.bias.mul_(1.0)
    train(env)


def test_dropout_draws_new_numbers():
    env = capture(problem(dropout=0.5))
    outs = [env.model(env.data.x, env.data.edge_index).sum().item() for _ in range(12)]
    assert site().accelerated == 9 and len(set(outs)) == 12


def test_a_backward_sees_what_its_forward_has_dropped():
    model = Of(lambda m, x, e: F.dropout(m.conv(x, e), 0.5), conv=pyg_nn.GraphConv(5, 3, bias=False)).to(DEVICE)
    env = problem()
    env.model = gnnaccel.accelerate(model)
    capture(env)
    for _ in range(12):
        x = env.data.x.clone().requires_grad_()
        out = env.model(x, env.data.edge_index).sum()
        out.backward()
        torch.testing.assert_close((x * x.grad).sum(), out, **OF)  # linear in x
    assert site("Of").accelerated == 9 and in_both(env)


def test_copies_and_checkpoints(tmp_path):
    env = capture(problem())
    keys = set(env.model.state_dict())
    for _ in range(8):
        train(env)
    assert set(env.model.state_dict()) == keys
    twin, shallow = copy.deepcopy(env.model), copy.copy(env.model)
    torch.save(env.model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    pickled = pickle.loads(pickle.dumps(env.model))
    buffer = io.BytesIO()
    torch.save(env.model.state_dict(), buffer)
    want = evaluate(env)
    for other in (twin, again, pickled, shallow):
        assert captures_of(other) is None
        torch.testing.assert_close(evaluate(SimpleNamespace(model=other, data=env.data)), want, **OF)
    with torch.no_grad():
        twin.scale, twin.last.lin_l.weight[:] = 2.0, 0
    torch.testing.assert_close(evaluate(env), want, **OF)
    vars(twin).update(vars(env.model) | {"scale": 3.0})  # all its attributes, as replicas have them
    torch.testing.assert_close(evaluate(SimpleNamespace(model=twin, data=env.data)), want * 9, **OF)


def _item(model, h):
    return h * float(h.sum() > -1e9)


def _count(model, h):
    model.extra = (model.extra or 0) + 1
    return h


def _append(model, h):
    model.log.append(1)
    return h


def _keep(model, h):
    model.extra = h.detach()
    return h


def _dice(model, h):
    return h * (1 + 0 * random.random())


def _hooks(model, h):
    h.register_hook(lambda grad: grad * 2)
    return h


def _prints(model, h):
    print("shape", h.shape)
    return h


def _logs(model, h):
    logging.getLogger("of.a.user").warning("here")
    return h


def _reads_grads(model, h):
    grad = model.unused.weight.grad
    return h if grad is None else h * grad.sum()


def _writes(model, h):
    with torch.no_grad():
        model.last.lin_l.weight.clamp_(-1, 1)
    return h


TABLE = torch.ones(8, device=DEVICE, requires_grad=True)


def _foreign(model, h):
    return h * TABLE


def _switches(model, h):
    model.norm.train(not model.norm.training)
    return h


REFUSED = {
    "a value is read": (_item, "waits for the GPU"),
    "a counter": (_count, "it changes module.extra"),
    "a list grows": (_append, "it changes module.log"),
    "a tensor is kept": (_keep, "it changes module.extra"),
    "a random number": (_dice, "on the host"),
    "a hook is set": (_hooks, "register_hook"),
    "it prints": (_prints, "print()"),
    "it logs": (_logs, "of.a.user"),
    "it reads a .grad": (_reads_grads, "it uses grad of a tensor"),
    "a parameter is written": (_writes, "writes into an argument or a parameter"),
    "another's gradient": (_foreign, "neither a parameter of it nor an argument"),
    "a part is switched": (_switches, "training"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_runs_as_it_is(name):
    does, words = REFUSED[name]
    TABLE.grad = None
    env = both(lambda: problem(does=does))
    (reason,) = site().reasons
    assert words in reason and variants(env) == 0 and site().left >= 8 and captures_of(env.model).refused == reason


def _reads_in_evaluation(model, h):
    return h if model.training else h * float(h.sum() > -1e9)


def _reads_for_a_while(model, h):
    return h if model.extra is None else h * float(h.sum() > -1e9)


def test_what_keeps_one_kind_of_calls_leaves_the_others():
    env = both(lambda: problem(does=_reads_in_evaluation), step=lambda env: train(env) + evaluate(env))
    assert variants(env) == 1 and site().accelerated == 11 and site().left == 12

    def between(env, i):
        env.model.extra = 1 if 8 <= i < 14 else None

    report.reset()
    env = both(lambda: problem(does=_reads_for_a_while), between, calls=20)
    assert variants(env) == 1 and site().accelerated == 11 and site().left == 4


def test_hooks_of_parts_that_torch_does_not_know():
    hidden = nn.Identity().to(DEVICE)
    hidden.register_forward_hook(lambda module, args, out: out * 2)
    env = both(lambda: problem(does=lambda model, h: hidden(h)))
    assert "hook" in captures_of(env.model).refused


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.conv, self.what = LAYERS["SAGE"](5, 3), what

    def forward(self, x, edge_index):
        return self.what(self, x, self.conv(x, edge_index))


RETURNS = {
    "a parameter": (lambda m, x, h: (h, m.conv.lin_l.weight), "returns a Parameter"),
    "a view of a parameter": (lambda m, x, h: (h, m.conv.lin_l.weight.t()), "shares memory"),
    "a view of an argument": (lambda m, x, h: (h, x[:3]), "shares memory"),
    "two views": (lambda m, x, h: h.chunk(2), "shares memory"),
    "an object": (lambda m, x, h: (h, m), "something other than tensors"),
    "a number of its own": (lambda m, x, h: (h, len(h)), None),
    "an argument": (lambda m, x, h: (h, x), None),
    "a sparse matrix": (
        lambda m, x, h: (h, torch.eye(3, device=x.device).to_sparse()),
        "waits" if DEVICE == "cuda" else "sparse",
    ),
}


@pytest.mark.parametrize("name", RETURNS)
def test_results(name):
    what, words = RETURNS[name]

    def make():
        env = problem()
        env.model = gnnaccel.accelerate(Returns(what).to(DEVICE))
        return env

    both(make, step=lambda env: env.model(env.data.x, env.data.edge_index)[0])
    reasons = site("Returns").reasons
    assert not reasons if words is None else words in next(iter(reasons)), reasons
