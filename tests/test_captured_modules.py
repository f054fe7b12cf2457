"""Captured modules against the same modules as they are: what is changed between calls is seen, and gradients flow as
ever. On the CPU with a stand-in for CUDA graphs (recorded.py), on a GPU with those."""

import contextlib
import copy
import gc
import io
import os
import pickle
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import recorded
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gnnaccel
from gnnaccel import report
from gnnaccel.capture import captures_of, guard, modules, obstacles, pair

pyg_nn = pytest.importorskip("torch_geometric.nn")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OF = {"rtol": 1e-4, "atol": 1e-5} if CUDA else {"rtol": 1e-5, "atol": 1e-6}
SCALE = 1.0  # which forward() reads


@pytest.fixture(autouse=True)
def device(monkeypatch):
    report.reset()
    if not CUDA:
        for module in (guard, modules, obstacles, pair):
            monkeypatch.setattr(module, "Recording", recorded.Recording)


LAYERS = {
    "GCN": lambda *sizes: pyg_nn.GCNConv(*sizes),
    "SAGE": lambda *sizes: pyg_nn.SAGEConv(*sizes),
    "GAT": lambda *sizes: pyg_nn.GATConv(*sizes),
    "GraphConv": lambda *sizes: pyg_nn.GraphConv(*sizes),
}


class Net(nn.Module):
    """Two layers with a norm between them; `does` is what else forward() does."""

    def __init__(self, layer="SAGE", dropout=0.0, does=None):
        super().__init__()
        self.first, self.norm, self.last = LAYERS[layer](5, 8), nn.BatchNorm1d(8), LAYERS[layer](8, 3)
        self.unused = nn.Linear(2, 2)
        self.dropout, self.scale, self.extra, self.does, self.log = dropout, 1.0, None, does, []

    def forward(self, x, edge_index):
        h = F.dropout(self.norm(self.first(x, edge_index)).relu(), self.dropout, self.training)
        if self.does is not None:
            h = self.does(self, h)
        return self.last(h, edge_index) * (self.scale * SCALE)


def problem(layer="SAGE", does=None, dropout=0.0, make=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)):
    torch.manual_seed(0)
    model = Net(layer, dropout, does).to(DEVICE)
    data = SimpleNamespace(
        x=torch.randn(20, 5, device=DEVICE),
        edge_index=torch.randint(0, 20, (2, 60), device=DEVICE),
        y=torch.randint(0, 3, (20,), device=DEVICE),
        mask=torch.rand(20, device=DEVICE) < 0.6,
    )
    return SimpleNamespace(model=gnnaccel.accelerate(model), data=data, optimizer=make(model.parameters()), norms=[])


def train(env):
    env.model.train()
    env.optimizer.zero_grad()
    out = env.model(env.data.x, env.data.edge_index)
    loss = F.cross_entropy(out[env.data.mask], env.data.y[env.data.mask])
    loss.backward()
    env.optimizer.step()
    return loss


@torch.no_grad()
def evaluate(env):
    env.model.eval()
    return env.model(env.data.x, env.data.edge_index).square().mean()


def capture(env, **options):
    gnnaccel.accelerate(env.model, cuda_graphs=True, **options)
    return env


def both(make_env, between=lambda env, i: None, calls=14, step=train, **options):
    """What `step` gives with the model as it is and captured, and its state afterwards; `between` is called before call
    i. Returns the environment of the latter."""
    found = []
    for wrap in (lambda env: env, lambda env: capture(env, **options)):
        env = wrap(make_env())
        torch.manual_seed(1)
        results = []
        for i in range(calls):
            between(env, i)
            results.append(step(env).detach().clone())
        state = [t.detach().clone() for t in env.model.state_dict().values()]
        grads = [None if p.grad is None else p.grad.clone() for p in env.model.parameters()]
        found.append((torch.stack(results), state, grads, env))
    (want, want_state, want_grads, _), (got, got_state, got_grads, env) = found
    torch.testing.assert_close(got, want, **OF)
    for ours, theirs in zip(got_state + got_grads, want_state + want_grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    return env


def site(name="Net"):
    return report.snapshot()[f"captured.{name}"]


def variants(env):
    return captures_of(env.model).variants


def in_both(env):
    """Whether the backward of the last capture is one as well."""
    return bool(captures_of(env.model)._pairs[-1]._backwards)


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
    "a part in evaluation": (lambda e: e.model.norm.register_buffer("running_mean", e.model.norm.running_mean + 1), 2),
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


def _global(env):
    global SCALE
    SCALE = 2.0


def _tripled(forward):
    return lambda *args: forward(*args) * 3


@pytest.mark.parametrize("where, name, value", [
    (globals(), "SCALE", 2.0),
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

    both(make, step=step)
    assert site().accelerated == 11


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
    "a sparse matrix": (lambda m, x, h: (h, torch.eye(3, device=x.device).to_sparse()), "sparse"),
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


def _loss(env):
    return env.model(env.data.x, env.data.edge_index).square().mean()


def _jacobian(env):
    found = env.model.eval()
    return torch.autograd.functional.jacobian(lambda x: found(x, env.data.edge_index)[:2].sum(0), env.data.x.clone())


def _batched(env):
    out, eye = env.model(env.data.x, env.data.edge_index)[0], torch.eye(3, device=DEVICE)
    return torch.autograd.grad(out, [env.model.first.lin_l.weight], eye, is_grads_batched=True)[0]


def _written_result(env):
    env.optimizer.zero_grad()
    out = env.model(env.data.x, env.data.edge_index)
    out[3] = 0
    loss = out.mul_(2).square().mean()
    loss.backward()
    env.optimizer.step()
    return loss


def _cut_result(env):
    return env.model(env.data.x, env.data.edge_index).detach_()


def _gradient_of_result(env):
    env.optimizer.zero_grad()
    out = env.model(env.data.x, env.data.edge_index)
    out.register_hook(lambda grad: grad * 2)
    out.retain_grad()
    loss = out.square().mean()
    torch.autograd.grad(loss, out, retain_graph=True)
    loss.backward()
    env.optimizer.step()
    return out.grad


def _for_one_parameter(env):
    env.optimizer.zero_grad()
    loss = _loss(env)
    loss.backward(inputs=[env.model.last.lin_l.weight])
    env.optimizer.step()
    return loss


def _frozen_by_turns(env):
    env.calls = getattr(env, "calls", 0) + 1
    env.model.first.requires_grad_(env.calls % 2 == 0)
    return train(env)


def _retained_by_turns(env):
    env.calls = getattr(env, "calls", 0) + 1
    env.optimizer.zero_grad()
    out = env.model(env.data.x, env.data.edge_index)
    out.square().mean().backward(retain_graph=env.calls % 2 == 0)
    if env.calls % 2 == 0:
        out.sum().backward()
    return torch.cat([p.grad.flatten() for p in env.model.last.parameters()])


STEPS = {
    "jacobian": _jacobian, "batched gradients": _batched, "a result is written": _written_result,
    "a result is cut off": _cut_result, "the gradient of a result": _gradient_of_result,
    "one parameter": _for_one_parameter, "frozen by turns": _frozen_by_turns, "retained by turns": _retained_by_turns,
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_ways_to_use_it(name):
    both(problem, step=STEPS[name], calls=20)
    assert site().accelerated >= 14 and not site().left


def test_results_of_the_graphs_own_memory_are_not_to_be_written():
    env = capture(problem(does=lambda model, h: h.exp()), copy_outputs=False)
    env.model.last = nn.Identity()
    env.model.forward = lambda x, edge_index: env.model.does(env.model, env.model.first(x, edge_index))
    for _ in range(8):
        env.model(env.data.x, env.data.edge_index).sum().backward()
    loss = env.model(env.data.x, env.data.edge_index).mul_(2).sum()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


class Of(nn.Module):
    """A module of parts whose forward is `call`(module, *arguments)."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def _conv(layer="SAGE", *sizes):
    return LAYERS[layer](*(sizes or (5, 3)))


def _forces(model, x, edge_index):
    energy = model.conv(x, edge_index).tanh().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def _weight_norm(module):
    return torch.nn.utils.parametrizations.weight_norm(module)


def _checkpointed(reentrant):
    def call(model, x, edge_index):
        h = model.first(x, edge_index)
        return model.last(checkpoint(lambda h: model.norm(h).tanh(), h, use_reentrant=reentrant), edge_index)

    return lambda: Of(call, first=_conv("SAGE", 5, 8), norm=nn.LayerNorm(8), last=_conv("SAGE", 8, 3))


def _hetero(env):
    x = {"a": env.data.x, "b": env.data.x[:7].clone()}
    kinds = {("a", "to", "b"): env.data.edge_index % 7, ("b", "of", "a"): env.data.edge_index % 7}
    return x, kinds


def _of_types():
    convs = {("a", "to", "b"): pyg_nn.SAGEConv((5, 5), 3), ("b", "of", "a"): pyg_nn.SAGEConv((5, 5), 3)}
    return Of(lambda model, x, edges: model.conv(x, edges), conv=pyg_nn.HeteroConv(convs))


def _data(env):
    from torch_geometric.data import Data

    return (Data(x=env.data.x, edge_index=env.data.edge_index),)


def _matrix(env):
    from torch_geometric.utils import to_torch_csr_tensor

    return env.data.x, to_torch_csr_tensor(env.data.edge_index, size=(20, 20))


def _edge_index(env):
    from torch_geometric import EdgeIndex

    return env.data.x, EdgeIndex(env.data.edge_index, sparse_size=(20, 20))


def _weights(env):
    return env.data.x, env.data.edge_index, torch.rand(60, device=DEVICE).requires_grad_()


def _usual(env):
    return env.data.x, env.data.edge_index


# name -> the model, its arguments (the same objects at each call), why it is left (None: it is captured)
MODELS = {
    "an embedding": (
        lambda: Of(lambda m, edges: m.conv(m.emb.weight, edges), emb=nn.Embedding(20, 5), conv=_conv()),
        lambda env: (env.data.edge_index,), None),
    "shared layers": (
        lambda: (lambda conv: Of(lambda m, x, e: m.a(x, e).tanh() + m.b(x * 2, e), a=conv, b=conv))(_conv()),
        _usual, None),
    "weights of edges": (
        lambda: Of(lambda m, x, e, w: m.conv(x, e, w), conv=pyg_nn.GraphConv(5, 3)), _weights, None),
    "cached": (lambda: Of(lambda m, x, e: m.conv(x, e), conv=pyg_nn.GCNConv(5, 3, cached=True)), _usual, None),
    "a model of PyG's": (lambda: pyg_nn.GraphSAGE(5, 8, 2, 3, norm="batch", jk="cat"), _usual, None),
    "Sequential of PyG's": (
        lambda: pyg_nn.Sequential("x, edge_index", [(_conv("SAGE", 5, 8), "x, edge_index -> x"), nn.ReLU(),
                                                    (_conv("SAGE", 8, 3), "x, edge_index -> x")]), _usual, None),
    "Data": (lambda: Of(lambda m, data: m.conv(data.x, data.edge_index), conv=_conv()), _data, None),
    "types of nodes": (_of_types, _hetero, None),
    "a sparse matrix": (lambda: Of(lambda m, x, e: m.conv(x, e), conv=_conv()), _matrix, None),
    "an EdgeIndex": (lambda: Of(lambda m, x, e: m.conv(x, e), conv=_conv()), _edge_index, None),
    "derivatives inside": (
        lambda: Of(_forces, conv=_conv("GraphConv")), lambda env: (env.data.x.requires_grad_(), env.data.edge_index),
        None),
    "a parametrization": (
        lambda: Of(lambda m, x, e: m.conv(m.lin(x), e), lin=_weight_norm(nn.Linear(5, 5)), conv=_conv()), _usual, None),
    "a checkpoint": (_checkpointed(False), _usual, None),
    "a reentrant checkpoint": (_checkpointed(True), _usual, "reentrant checkpoint"),
    "lists of weights": (
        lambda: Of(lambda m, x, e: m.conv(m.rnn(x)[0], e), rnn=nn.LSTM(5, 5), conv=_conv()), _usual, "_flat_weight"),
    "weights with a hook": (
        lambda: Of(lambda m, x, e: m.conv(m.lin(x), e), lin=torch.nn.utils.weight_norm(nn.Linear(5, 5)), conv=_conv()),
        _usual, "a hook"),
    "sparse gradients": (
        lambda: Of(lambda m, edges: m.conv(m.emb(torch.arange(20, device=edges.device)), edges),
                   emb=nn.Embedding(20, 5, sparse=True), conv=_conv()),
        lambda env: (env.data.edge_index,), "sparse"),
    "a compiled part": (
        lambda: Of(lambda m, x, e: m.conv(m.lin(x), e), lin=torch.compile(nn.Linear(5, 5), backend="eager"),
                   conv=_conv()), _usual, "OptimizedModule"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    make_model, arguments, words = MODELS[name]

    def make():
        env = problem()
        torch.manual_seed(1)
        env.model = gnnaccel.accelerate(make_model().to(DEVICE))
        env.args = arguments(env)
        env.optimizer = torch.optim.SGD(env.model.parameters(), lr=0.01)
        return env

    def step(env):
        env.optimizer.zero_grad()
        found = env.model(*env.args)
        loss = sum(out.square().mean() for out in (found.values() if isinstance(found, dict) else [found]))
        loss.backward()
        env.optimizer.step()
        return loss

    env = both(make, step=step)
    seen = site(type(env.model).__name__)
    if words is None:
        assert seen.accelerated == 11 and not seen.left and in_both(env), (seen, captures_of(env.model).refused)
    else:
        assert any(words in reason for reason in seen.reasons) and variants(env) == 0, seen


def test_sampled_graphs_are_left():
    def between(env, i):
        env.data.edge_index = env.data.edge_index.roll(i, 1)

    both(problem, between)
    (reason,) = site().reasons
    assert "at each call" in reason and site().left >= 9


def test_errors_are_the_modules_own():
    env = capture(problem())
    for i in range(12):
        if i == 7:
            with pytest.raises(RuntimeError):
                env.model(env.data.x[:, :3], env.data.edge_index)
        else:
            train(env)
    assert site().accelerated >= 6 and captures_of(env.model).refused is None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = problem().model
        self.gain = nn.Parameter(torch.ones((), device=DEVICE))

    def forward(self, x, edge_index):
        return self.inner(x, edge_index) * self.gain


@pytest.mark.parametrize("way", ["compile", "in place", "compiled outer", "functional", "checkpoint", "trace"])
def test_beside_other_ways_of_torch(way):
    """Others that call modules in their way still do."""
    env = capture(problem())
    model, given = env.model, (env.data.x, env.data.edge_index)
    model.eval()
    want = model(*given)
    for _ in range(8):
        model(*given)
    calls = {
        "compile": lambda: torch.compile(model, backend="eager")(*given),
        "in place": lambda: model.compile(backend="eager") or model(*given),
        "compiled outer": lambda: torch.compile(lambda *args: model(*args) * 1, backend="eager")(*given),
        "functional": lambda: torch.func.functional_call(model, dict(model.named_parameters()), given),
        "checkpoint": lambda: checkpoint(model, *given, use_reentrant=False),
        "trace": lambda: torch.jit.trace(model, given)(*given),
    }
    for _ in range(3):
        got = calls[way]()
        torch.testing.assert_close(got, want, **OF)
        if got.requires_grad:
            got.sum().backward()


def test_other_parameters_in_its_place():
    env = capture(problem())
    env.model.eval()
    given = (env.data.x, env.data.edge_index)
    for _ in range(8):
        env.model(*given)
    zeros = {name: torch.zeros_like(p) for name, p in env.model.named_parameters()}
    assert not torch.func.functional_call(env.model, zeros, given).any()
    assert env.model(*given).any()


def test_a_module_in_a_captured_module():
    env = problem()
    outer = gnnaccel.accelerate(Scaled(), cuda_graphs=True)
    gnnaccel.accelerate(outer.inner, cuda_graphs=True)
    for _ in range(8):
        outer(env.data.x, env.data.edge_index).sum().backward()
    assert captures_of(outer).variants == 1 and captures_of(outer.inner).variants == 0


def test_distributed(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def make():
            env = problem()
            env.model = nn.parallel.DistributedDataParallel(env.model, find_unused_parameters=True)
            return env

        def step(env):
            captured = env.captured = getattr(env, "captured", None) or env.model.module
            assert captured is env.model.module
            return train(env)

        want = both(make, step=step)  # the wrapper has hooks of its own kind: it is left
        assert captures_of(want.model).variants == 0

        def inner():
            env = make()
            gnnaccel.accelerate(env.model.module, cuda_graphs=True)
            return env

        report.reset()
        env = inner()
        plain = make()
        for _ in range(14):
            torch.testing.assert_close(train(env), train(plain), **OF)
        assert site().accelerated == 11
    finally:
        dist.destroy_process_group()


@pytest.fixture
def enabled():
    modules.enable()
    yield
    modules.disable()


def test_the_outermost_module_is_found(enabled):
    class Outer(Scaled):
        pass

    env = problem()
    outer, alone = gnnaccel.accelerate(Outer()), gnnaccel.accelerate(LAYERS["SAGE"](5, 3).to(DEVICE))
    parallel = nn.parallel.DataParallel(problem().model)
    compiled = torch.compile(problem().model, backend="eager")
    for _ in range(8):
        outer(env.data.x, env.data.edge_index).sum().backward()
        alone(env.data.x, env.data.edge_index)
        compiled(env.data.x, env.data.edge_index)
        if not CUDA:
            parallel(env.data.x, env.data.edge_index)
    assert captures_of(outer).variants == 1
    others = (outer.inner, alone, compiled._orig_mod, parallel, parallel.module)
    assert all(captures_of(other) is None for other in others)
    modules.disable()
    assert captures_of(outer) is None and report.on_call is None


def test_the_variable():
    script = (
        "import torch_geometric, gnnaccel\nfrom gnnaccel import report\n"
        "print(report.on_call is not None)\ngnnaccel.uninstall()\nprint(report.on_call is not None)"
    )
    for value, said in {"1": ["True", "False"], "0": ["False", "False"]}.items():
        env = os.environ | {"GNNACCEL": "1", "GNNACCEL_CUDA_GRAPHS": value}
        words = [sys.executable, "-c", f"import gnnaccel\ngnnaccel.install()\n{script}"]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == said


@pytest.mark.parametrize("make, error, words", [
    (lambda: gnnaccel.accelerate(3, cuda_graphs=True), TypeError, "torch.nn.Module"),
    (lambda: gnnaccel.accelerate(3, cuda_graphs=False), TypeError, "torch.nn.Module"),
    (lambda: gnnaccel.accelerate(Net(), copy_outputs=False), ValueError, "copy_outputs"),
    (lambda: gnnaccel.accelerate(_compiled(), cuda_graphs=True), ValueError, "compiled"),
])  # fmt: skip
def test_bad_arguments(make, error, words):
    with pytest.raises(error, match=words):
        make()


def _compiled():
    model = Net()
    model.compile(backend="eager")
    return model


def test_switched_off():
    env = capture(problem())
    for _ in range(6):
        train(env)
    gnnaccel.accelerate(env.model)
    assert variants(env) == 1
    gnnaccel.accelerate(env.model, cuda_graphs=False)
    assert captures_of(env.model) is None
    train(env)
    assert site().accelerated == 3


def test_on_the_cpu(monkeypatch):
    monkeypatch.undo()
    env = capture(problem())
    env.model.cpu()
    env.data = SimpleNamespace(**{key: value.cpu() for key, value in vars(env.data).items()})
    for _ in range(5):
        train(env)
    (reason,) = site().reasons
    assert "CPU" in reason and site().left == 5


@pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")
def test_memory_is_told_and_freed():
    env = capture(problem())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(10):
        train(env)
    assert captures_of(env.model).memory_bytes > 0
    gnnaccel.accelerate(env.model, cuda_graphs=False)
    env.optimizer.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 2**21


@pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")
def test_other_streams():
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def step(env):
        env.calls = getattr(env, "calls", 0) + 1
        stream = streams[env.calls % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            env.data.x = env.data.x * 0.9 + 0.1  # new memory
            loss = train(env)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    both(problem, step=step, calls=30)
    assert site().accelerated == 27


@pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")
@pytest.mark.parametrize("threads", [True, False])
def test_backward_on_threads_of_torch(threads):
    before = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(threads)
    try:
        env = both(lambda: problem("GAT"), step=_pairs, calls=20)
        assert in_both(env)
    finally:
        torch.autograd.set_multithreading_enabled(before)


@pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")
def test_a_backward_that_waits_for_the_gpu():
    env = both(lambda: problem(does=lambda model, h: _Waits.apply(h)))
    assert "its backward waits for the GPU" in captures_of(env.model).refused


@pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")
def test_beside_captured_steps():
    """Recordings of steps share memory of their own: what is kept between forward and backward is not in it."""
    env, other = capture(problem()), problem()
    step = gnnaccel.captured(lambda: train(other))
    want = problem()
    for _ in range(12):
        env.optimizer.zero_grad()
        out = env.model(env.data.x, env.data.edge_index)
        step()
        F.cross_entropy(out[env.data.mask], env.data.y[env.data.mask]).backward()
        env.optimizer.step()
        train(want)
    assert step.variants == 1 and in_both(env)
    torch.testing.assert_close(env.model.last.lin_l.weight, want.model.last.lin_l.weight, **OF)


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.sum() == grad.sum())
