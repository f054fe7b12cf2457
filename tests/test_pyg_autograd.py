"""What torch may do with a step: second order, checkpoints, autocast, transforms, grad modes, in-place writes."""

import copy
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pyg = pytest.importorskip("torch_geometric")
# ruff: noqa: E402
from pyg_compare import LAYERS, D, E, N, backward, edges, grads, rand, same, train
from torch_geometric import nn


@pytest.mark.parametrize("name", LAYERS)
def test_second_order(name):
    """A gradient penalty: gradients of gradients, for inputs and parameters; an error only where PyG has one."""

    def program(wrap):
        layer, x = wrap(LAYERS[name]()), rand(N, D, grad=True)
        wanted = [x, *(p for p in layer.parameters())]
        out = layer(x, edges())
        first = torch.autograd.grad(out.pow(3).sum(), wanted, create_graph=True, allow_unused=True)
        sum(g.pow(2).sum() for g in first if g is not None).backward()
        return out, first, grads(layer, x)

    same(program, accelerated=None)


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
def test_second_order_with_edge_attr(name):
    def program(wrap):
        layer, x, attr = wrap(LAYERS[name](edge_dim=3)), rand(N, D, grad=True), rand(E, 3, grad=True)
        out = layer(x, edges(), edge_attr=attr)
        first = torch.autograd.grad(out.pow(3).sum(), [x, attr], create_graph=True)
        sum(g.pow(2).sum() for g in first).backward()
        return out, first, grads(layer, x, attr)

    same(program, accelerated=None)


@pytest.mark.parametrize("name", ["GCN", "GraphConv"])
def test_second_order_with_edge_weight(name):
    def program(wrap):
        layer, x, weight = wrap(LAYERS[name]()), rand(N, D, grad=True), rand(E).abs().requires_grad_()
        out = layer(x, edges(), weight)
        first = torch.autograd.grad(out.pow(3).sum(), [x, weight], create_graph=True)
        sum(g.pow(2).sum() for g in first).backward()
        return out, first, grads(layer, x, weight)

    same(program)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(name, reentrant):
    """The layer runs twice, with dropout from the same random numbers."""

    def program(wrap):
        layer, x = wrap(LAYERS[name]()), rand(N, D, grad=True)

        def step(x, index):
            return torch.dropout(layer(x, index), 0.5, True)

        out = checkpoint(step, x, edges(), use_reentrant=reentrant)
        backward(out)
        return out, grads(layer, x)

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_accumulated_and_retained(name):
    """Two losses on one graph, then a second graph on top of the gradients."""

    def program(wrap):
        layer, x = wrap(LAYERS[name]()), rand(N, D, grad=True)
        out = layer(x, edges())
        out.pow(2).sum().backward(retain_graph=True)
        first = grads(layer, x)
        out.sum().backward()
        second = grads(layer, x)
        return first, second, train(layer, rand(N, D, seed=4), edges(seed=4))

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_backward_twice_raises_alike(name):
    def program(wrap):
        layer = wrap(LAYERS[name]())
        out = layer(rand(N, D, grad=True), edges())
        out.pow(2).sum().backward()
        try:
            out.pow(2).sum().backward()
        except RuntimeError as error:
            return str(error)
        return None

    same(program)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("part", ["inputs", "parameters", "nothing", "bias"])
def test_gradients_of_a_part(name, part):
    def program(wrap):
        layer, x = wrap(LAYERS[name]()), rand(N, D, grad=part == "inputs")
        if part in ("inputs", "nothing"):
            layer.requires_grad_(False)
        if part == "bias":
            for key, parameter in layer.named_parameters():
                parameter.requires_grad_(key == "bias")
        out = layer(x, edges())
        if out.requires_grad:
            backward(out)
        return out, grads(layer, x), out.requires_grad, out.is_leaf

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_grad_modes_mixed(name):
    """no_grad, inference_mode and training on the same edges, in any order, as evaluation during training does."""

    def program(wrap):
        layer, x, index = wrap(LAYERS[name]()), rand(N, D, grad=True), edges()
        out = []
        with torch.inference_mode():
            out.append(layer(x, index))
            made_inside = edges(seed=7)
            out.append(layer(x, made_inside))
        out.append(train(layer, x, index))
        with torch.no_grad():
            out.append(layer(x, index))
            with torch.enable_grad():
                out.append(train(layer, x, index))
        with torch.inference_mode(), torch.inference_mode(False):
            out.append(layer(x, index))
        with torch.no_grad():
            out.append(layer(x, made_inside))
        return out

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_anomaly_mode(name):
    def program(wrap):
        with torch.autograd.detect_anomaly(check_nan=True):
            return train(wrap(LAYERS[name]()), rand(N, D, grad=True), edges())

    same(program)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_of_pyg_layers(name):
    """bfloat16 under autocast: PyG's dtypes, gradients in the parameters' own."""

    def program(wrap):
        layer, x = wrap(LAYERS[name]()), rand(N, D, grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x, edges())
            nested = layer(x.bfloat16(), edges())
            with torch.autocast("cpu", enabled=False):
                inner = layer(x, edges())
        backward([out.float(), inner.float()])
        found = grads(layer, x)
        # Gradients are sums of many rounded numbers: compared by their direction.
        return out.dtype, nested.dtype, inner, [g.dtype for g in found.values() if g is not None], out.bfloat16()

    same(program, dtype=torch.float32)


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("GATv2", "Transformer")])
def test_gradient_under_autocast(name):
    def program(wrap):
        layer, x = wrap(LAYERS[name]()), rand(N, D, grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x, edges())
        backward(out.float())
        return [g.bfloat16() for g in grads(layer, x).values() if g is not None]

    same(program, dtype=torch.float32)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(f(x))),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(lambda v: f(v).sum(0))(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda v: f(v).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda v: f(v).sum())(x[:, :1].expand(N, D))[:2],
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x * 2])),
    "functional jacobian": lambda f, x: torch.autograd.functional.jacobian(lambda v: f(v).sum(0), x),
    "functional hvp": lambda f, x: torch.autograd.functional.hvp(lambda v: f(v).pow(2).sum(), x, x),
    "functional jvp": lambda f, x: torch.autograd.functional.jvp(f, x, x),
    "is_grads_batched": lambda f, x: _batched(f, x),
}


def _batched(f, x):
    x = x.clone().requires_grad_()
    out = f(x).sum(0)
    return torch.autograd.grad(out, x, torch.eye(out.numel()), is_grads_batched=True)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["GCN", "SAGE max", "GIN", "GAT", "GATv2", "Transformer"])
def test_transform(name, transform):
    """They give what PyG gives, or raise where PyG raises."""

    def program(wrap):
        layer, index = wrap(LAYERS[name]()), edges()
        layer(rand(N, D), index)  # the structure is there already
        try:
            out = TRANSFORMS[transform](lambda v: layer(v, index), rand(N, D))
        except Exception as error:
            out = type(error).__name__
        return out, layer(rand(N, D), index)

    same(program)


def test_ensemble_by_vmap():
    def program(wrap):
        layers = [wrap(nn.SAGEConv(D, 5)) for _ in range(3)]
        params, buffers = torch.func.stack_module_state(layers)
        index = edges()

        def run(params, buffers, x):
            return torch.func.functional_call(layers[0], (params, buffers), (x, index))

        return torch.func.vmap(run, in_dims=(0, 0, None))(params, buffers, rand(N, D)), layers[1](rand(N, D), edges())

    same(program)


WRITES = {
    "relu_": lambda out, x: out.relu_(),
    "add_": lambda out, x: out.add_(1),
    "mul_": lambda out, x: out.mul_(out.detach()),
    "item": lambda out, x: out.__setitem__((slice(None), 0), 0),
    "dropout": lambda out, x: torch.nn.functional.dropout(out, 0.5, True, inplace=True),
    "view": lambda out, x: out.view(-1).neg_(),
    "input after": lambda out, x: x.add_(0.5),
    "exp_": lambda out, x: out.exp_(),
}
NO_BIAS = {
    "GCN": lambda: nn.GCNConv(D, 5, bias=False),
    "SAGE": lambda: nn.SAGEConv(D, 5, bias=False, root_weight=False),
    "SAGE max": lambda: nn.SAGEConv(D, 5, aggr="max"),
    "GAT": lambda: nn.GATConv(D, 5, heads=2, bias=False),
    "GAT residual": lambda: nn.GATConv(D, 5, heads=2, bias=False, residual=True),
    "GAT mean": lambda: nn.GATConv(D, 5, heads=2, bias=False, concat=False),
    "GATv2": lambda: nn.GATv2Conv(D, 5, heads=2, bias=False),
    "Transformer": lambda: nn.TransformerConv(D, 5, heads=2, root_weight=False, bias=False),
    "AGNN": lambda: nn.AGNNConv(),
    "Simple": lambda: nn.SimpleConv("sum"),
    "Simple max": lambda: nn.SimpleConv("max"),
    "Simple mean": lambda: nn.SimpleConv("mean"),
    "LG": lambda: nn.LGConv(),
    "APPNP": lambda: nn.APPNP(2, 0.0),
    "EdgeConv": lambda: nn.EdgeConv(torch.nn.Linear(2 * D, 5)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", NO_BIAS)
def test_written_in_place(name, write):
    """The result is the caller's own: writes into it, or into the input, do to gradients what they do in PyG."""

    def program(wrap):
        layer = wrap(NO_BIAS[name]())
        leaf = rand(N, D, grad=True)
        x = leaf * 1.0
        out = layer(x, edges())
        before = out.detach().clone()
        WRITES[write](out, x)
        if "max" in name or name == "EdgeConv":  # PyG saves the result of a maximum and refuses; we have no need to
            return before, out.detach()
        try:
            backward(out)
        except RuntimeError as error:
            return before, out.detach(), "modified by an inplace operation" in str(error)
        return before, out.detach(), grads(layer, leaf)

    same(program)


@pytest.mark.parametrize("name", NO_BIAS)
def test_result_is_no_alias(name):
    """Writing into the result must not reach the input, nor the result of the next call."""

    def program(wrap):
        layer, x, index = wrap(NO_BIAS[name]()).eval(), rand(N, D), edges()
        with torch.no_grad():
            first = layer(x, index)
            first.zero_()
            return x, index, layer(x, index), layer(x[:, :D], index) is first

    same(program)


def test_threads_share_a_model():
    def program(wrap):
        model, results = wrap(nn.models.GAT(D, 8, 2, 3)), {}

        def work(k):
            x = rand(N, D, seed=k, grad=True)
            out = model(x, edges(seed=k % 2))
            (gradient,) = torch.autograd.grad(out.pow(2).sum(), x)
            results[k] = out.detach(), gradient

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[k] for k in range(4)]

    same(program)


@pytest.mark.parametrize("name", ["GCN", "GAT", "Transformer", "EdgeConv"])
def test_training_with_saved_tensor_hooks(name):
    def program(wrap):
        layer = wrap(LAYERS[name]())
        with torch.autograd.graph.save_on_cpu():
            out = train(layer, rand(N, D, grad=True), edges())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return out, train(copy.deepcopy(layer), rand(N, D, grad=True), edges())

    same(program)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ["transposed", "expanded", "sliced", "parameter", "subclass"])
def test_kinds_of_feature_tensor(name, kind):
    def program(wrap):
        layer = wrap(LAYERS[name]())
        x = {
            "transposed": lambda: rand(D, N).t(),
            "expanded": lambda: rand(1, D).expand(N, D),
            "sliced": lambda: rand(2 * N, D + 3)[::2, 1:-2],
            "parameter": lambda: torch.nn.Parameter(rand(N, D)),
            "subclass": lambda: rand(N, D).as_subclass(Tagged),
        }[kind]()
        out = layer(x, edges())
        return out.as_subclass(torch.Tensor), type(out).__name__, train(layer, rand(N, D, grad=True), edges())

    same(program, accelerated=None)


class Tagged(torch.Tensor):
    """A tensor subclass as users make them."""
