"""Captured modules of many kinds, in many ways of use, beside other ways of torch; and on a GPU."""

import os
import sys
import weakref
from types import SimpleNamespace

import captured_cases
import forked
import pytest
import torch
import torch.nn.functional as F
from captured_cases import (
    CUDA,
    DEVICE,
    LAYERS,
    OF,
    Net,
    Of,
    both,
    capture,
    conv,
    in_both,
    problem,
    site,
    train,
    variants,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg_nn

import gnnaccel
from gnnaccel import report
from gnnaccel.capture import attaching, captures_of

device = captured_cases.device  # a fixture for all that is here


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


def _forces(model, x, edge_index):
    energy = model.conv(x, edge_index).tanh().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def _weight_norm(module):
    return torch.nn.utils.parametrizations.weight_norm(module)


def _checkpointed(reentrant):
    options = {"use_reentrant": reentrant, "preserve_rng_state": False}

    def call(model, x, edge_index):
        h = model.first(x, edge_index)
        return model.last(checkpoint(lambda h: model.norm(h).tanh(), h, **options), edge_index)

    return lambda: Of(call, first=conv("SAGE", 5, 8), norm=nn.LayerNorm(8), last=conv("SAGE", 8, 3))


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
        lambda: Of(lambda m, edges: m.conv(m.emb.weight, edges), emb=nn.Embedding(20, 5), conv=conv()),
        lambda env: (env.data.edge_index,), None),
    "shared layers": (
        lambda: (lambda conv: Of(lambda m, x, e: m.a(x, e).tanh() + m.b(x * 2, e), a=conv, b=conv))(conv()),
        _usual, None),
    "weights of edges": (
        lambda: Of(lambda m, x, e, w: m.conv(x, e, w), conv=pyg_nn.GraphConv(5, 3)), _weights, None),
    "cached": (lambda: Of(lambda m, x, e: m.conv(x, e), conv=pyg_nn.GCNConv(5, 3, cached=True)), _usual, None),
    "messages seen lazily": (
        lambda: Of(lambda m, x, e: m.conv(x, e), conv=pyg_nn.EdgeConv(nn.Linear(10, 3))), _usual, None),
    "several aggregations": (
        lambda: Of(lambda m, x, e: m.conv(x, e), conv=pyg_nn.SAGEConv(5, 3, aggr=["mean", "max"])), _usual, None),
    "a model of PyG's": (lambda: pyg_nn.GraphSAGE(5, 8, 2, 3, norm="batch", jk="cat"), _usual, None),
    "Sequential of PyG's": (
        lambda: pyg_nn.Sequential("x, edge_index", [(conv("SAGE", 5, 8), "x, edge_index -> x"), nn.ReLU(),
                                                    (conv("SAGE", 8, 3), "x, edge_index -> x")]), _usual, None),
    "Data": (lambda: Of(lambda m, data: m.conv(data.x, data.edge_index), conv=conv()), _data, None),
    "types of nodes": (_of_types, _hetero, None),
    "parts of one result": (
        lambda: Of(lambda m, x, e: (lambda h: {"a": h[:8], "b": h[8:]})(m.conv(x, e)), conv=conv()), _usual, None),
    "a sparse matrix": (lambda: Of(lambda m, x, e: m.conv(x, e), conv=conv()), _matrix, None),
    "an EdgeIndex": (lambda: Of(lambda m, x, e: m.conv(x, e), conv=conv()), _edge_index, None),
    "derivatives inside": (
        lambda: Of(_forces, conv=conv("GraphConv")), lambda env: (env.data.x.requires_grad_(), env.data.edge_index),
        None),
    "a parametrization": (
        lambda: Of(lambda m, x, e: m.conv(m.lin(x), e), lin=_weight_norm(nn.Linear(5, 5)), conv=conv()), _usual, None),
    "a checkpoint": (_checkpointed(False), _usual, None),
    "a reentrant checkpoint": (_checkpointed(True), _usual, "reentrant checkpoint"),
    "lists of weights": (
        lambda: Of(lambda m, x, e: m.conv(m.rnn(x)[0], e), rnn=nn.LSTM(5, 5), conv=conv()), _usual, "_flat_weight"),
    "weights with a hook": (
        lambda: Of(lambda m, x, e: m.conv(m.lin(x), e), lin=torch.nn.utils.weight_norm(nn.Linear(5, 5)), conv=conv()),
        _usual, "a hook"),
    "sparse gradients": (
        lambda: Of(lambda m, edges: m.conv(m.emb(torch.arange(20, device=edges.device)), edges),
                   emb=nn.Embedding(20, 5, sparse=True), conv=conv()),
        lambda env: (env.data.edge_index,), "sparse"),
    "a compiled part": (
        lambda: Of(lambda m, x, e: m.conv(m.lin(x), e), lin=torch.compile(nn.Linear(5, 5), backend="eager"),
                   conv=conv()), _usual, "OptimizedModule"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_captured_models(name):
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


@pytest.mark.parametrize("size", [1, 2])
def test_large_ones_are_left(size, monkeypatch):
    """Where the forward, or the backward beside it, would take more memory than is left for captures."""
    one = property(lambda recording: 1, lambda recording, value: None)
    monkeypatch.setattr(captured_cases.pair.Recording, "memory_bytes", one, raising=False)
    monkeypatch.setattr(captured_cases.pair.Recording, "most_bytes", lambda: size - 1)
    env = both(problem)
    (reason,) = site().reasons
    assert "GPU's memory" in reason and variants(env) == 0 and site().accelerated == (0 if size == 1 else 2)


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


def test_called_in_a_backward():
    def step(env):
        env.optimizer.zero_grad()
        x = env.data.x.clone().requires_grad_()
        checkpoint(env.model, x, env.data.edge_index, use_reentrant=True).square().mean().backward()
        env.optimizer.step()
        return x.grad

    both(problem, step=step)
    assert site().reasons == {"it is called in a backward pass": 14} and site().accelerated == 11


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


@pytest.fixture
def enabled():
    attaching.enable()
    yield
    attaching.disable()


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
    attaching.disable()
    assert captures_of(outer) is None and report.on_call is None


def test_the_variable():
    script = (
        "import torch_geometric, gnnaccel\nfrom gnnaccel import report\n"
        "print(report.on_call is not None)\ngnnaccel.uninstall()\nprint(report.on_call is not None)"
    )
    for value, said in {"1": ["True", "False"], "0": ["False", "False"]}.items():
        env = os.environ | {"GNNACCEL": "1", "GNNACCEL_CUDA_GRAPHS": value}
        words = [sys.executable, "-c", f"import gnnaccel\ngnnaccel.install()\n{script}"]
        done = forked.run(words, env)
        assert done.stdout.split() == said, done.stderr


@pytest.mark.parametrize("make, error, words", [
    (lambda: gnnaccel.accelerate(3, cuda_graphs=True), TypeError, "torch.nn.Module"),
    (lambda: gnnaccel.accelerate(3, cuda_graphs=False), TypeError, "torch.nn.Module"),
    (lambda: gnnaccel.accelerate(Net(), copy_outputs=False), ValueError, "copy_outputs"),
    (lambda: gnnaccel.accelerate(_compiled(), cuda_graphs=True), ValueError, "compiled"),
])  # fmt: skip
def test_bad_arguments_of_captured_models(make, error, words):
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
    kept = weakref.ref(captures_of(env.model)._pairs[0])
    gnnaccel.accelerate(env.model, cuda_graphs=False)
    assert captures_of(env.model) is None and kept() is None
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
def test_memory_is_told():
    env = capture(problem())
    for _ in range(10):
        train(env)
    assert captures_of(env.model).memory_bytes > 0


@pytest.mark.skipif(not CUDA, reason="no CUDA GPU here")
def test_other_streams():
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def step(env):
        env.calls = getattr(env, "calls", 0) + 1
        stream = streams[env.calls % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            env.data.x = -env.data.x  # new memory
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
        env = both(lambda: problem("GAT"), step=train, calls=20)
        assert in_both(env)
    finally:
        torch.autograd.set_multithreading_enabled(before)


def test_a_backward_that_waits_for_the_gpu():
    env = both(lambda: problem(does=lambda model, h: _Waits.apply(h)))
    assert captures_of(env.model).refused.startswith("its backward waits for the GPU: ")


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
