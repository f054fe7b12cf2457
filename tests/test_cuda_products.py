"""Products on tensor cores, and layers made of them, against float64."""

import copy

import pytest
import torch
from cuda_cases import DEVICE, EMULATED, build
from torch.nn import functional as F

from gnnaccel.lower import bounds
from gnnaccel.ops import products
from gnnaccel.ops.joined_sums import GATED_SKIP, joined_sum
from gnnaccel.ops.normed_layers import normed_layers

BOUND = 2e-6  # of the largest value


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Outputs and workspaces are filled with NaN."""
    monkeypatch.setattr(bounds, "PRODUCT_ROWS", 2)
    monkeypatch.setattr(bounds, "PRODUCT_ROWS_BACK", 2)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rand(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


def close(got, want, bound=BOUND):
    error = (got.double() - want).abs().max()
    assert error <= bound * want.abs().max(), float(error / want.abs().max())


@pytest.mark.parametrize(
    "rows, inner, outer", [(300, 64, 256), (128, 32, 64), (131, 12, 68), (700, 100, 4), (2, 4, 132)]
)
def test_products(rows, inner, outer):
    x, weight, bias, grad = rand(rows, inner), rand(outer, inner), rand(outer), rand(rows, outer)
    assert products.serves(x, weight, bias)
    for shift in (bias, None):
        close(
            products.linear(x, weight, shift), F.linear(*(t if t is None else t.double() for t in (x, weight, shift)))
        )
    close(products.back(grad, weight), grad.double() @ weight.double())
    found, of_bias = products.of_weight(x, grad, True)
    close(found, grad.double().t() @ x.double())
    close(of_bias, grad.double().sum(0))
    alone, nothing = products.of_weight(x, grad, False)
    assert torch.equal(alone, found)
    assert nothing is None


def test_sums_that_tensor_cores_would_round_down():
    """Values of one sign: each addition would lose half a digit of the last place, always to the same side."""
    rows = 2_000 if EMULATED else 200_000
    x, grad = torch.rand(rows, 4, device=DEVICE) + 1, torch.rand(rows, 8, device=DEVICE) + 1
    found, of_bias = products.of_weight(x, grad, True)
    close(found, grad.double().t() @ x.double(), 1e-6)
    close(of_bias, grad.double().sum(0), 1e-6)
    wide, weight = torch.rand(4, 512, device=DEVICE) + 1, torch.rand(4, 512, device=DEVICE) + 1
    close(products.linear(wide, weight), wide.double() @ weight.double().t(), 1e-6)


def test_what_the_kernels_do_not_take():
    x, weight = rand(30, 8), rand(12, 8)
    assert products.serves(x, weight)
    wrong = ((rand(30, 6), rand(12, 6)), (x, rand(10, 8)), (x, rand(8, 12).t()), (x.double(), weight.double()))
    wrong = (*wrong, (rand(31, 8)[1:].flatten()[1:].new_zeros(241)[1:].view(30, 8), weight), (x, rand(520, 8)))
    for case in wrong:
        assert not products.serves(*case)
        torch.testing.assert_close(products.linear(*case), F.linear(*case))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert not products.serves(x, weight)  # torch's are of TF32 then
    finally:
        torch.set_float32_matmul_precision(before)


def layers_of(inner, width, outer, biases, dtype):
    made = [rand(width, inner), rand(width) if biases else None, rand(width) + 1, rand(width)]
    made += [rand(outer, width), rand(outer) if biases else None]
    return [t if t is None else t.to(dtype) for t in made]


@pytest.mark.parametrize("rows, inner, width, outer, biases", [(300, 64, 128, 64, False), (129, 8, 20, 12, True)])
def test_layers_with_a_norm_between(rows, inner, width, outer, biases):
    weight, bias, gamma, beta, last, last_bias = parameters = layers_of(inner, width, outer, biases, torch.float32)
    x, seed = rand(rows, inner) + 3, rand(rows, outer)
    ends = [t.requires_grad_() for t in (x, *parameters) if t is not None]
    running = [torch.zeros(width, device=DEVICE), torch.ones(width, device=DEVICE)]
    exact = [t.double() for t in running]

    def made():
        return normed_layers(x, (weight, bias), (gamma, beta), running, (last, last_bias), 1e-5, 0.1)

    def defined():
        given = [None if t is None else t.double() for t in (x, *parameters)]
        hidden = F.batch_norm(F.linear(*given[:3]), *exact, *given[3:5], True, 0.1, 1e-5)
        return F.linear(hidden.relu(), *given[5:])

    want = defined()
    versions = [t._version for t in running]
    got = made()
    close(got, want)
    for one, other, version in zip(running, exact, versions, strict=True):
        close(one, other)
        assert one._version == version  # as with torch's, whose backward pass holds them
    grads = torch.autograd.grad(want, ends, seed.double())
    found = torch.autograd.grad(got, ends, seed, retain_graph=True)
    for end, one, other in zip(ends, found, grads, strict=True):
        if end is bias:
            assert not one.any()  # and the other what rounding leaves of that
        else:
            close(one, other, 5e-6)
    for end, whole in zip(ends, found, strict=True):  # of one alone
        for other in ends:
            other.requires_grad_(other is end)
        assert torch.equal(torch.autograd.grad(made(), end, seed)[0], whole)
    with torch.no_grad():
        assert torch.equal(made(), got)


@pytest.mark.parametrize("biases", [False, True])
def test_joined_sums_of_such_maps(biases):
    """ResGatedGraphConv's messages, by products on tensor cores, their gradients in place of what the maps gave."""
    graph = build([0, 30, *[7] * 38], 40)
    rows = torch.arange(40, device=DEVICE).repeat_interleave(graph.indptr.diff().long())
    x, weight, bias = rand(40, 12), rand(32, 12), rand(32) if biases else None
    seed = rand(40, 8)
    ends = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    k, q, value, skip = F.linear(*(None if t is None else t.double() for t in (x, weight, bias))).split(8, 1)
    each = torch.sigmoid(q[graph.indices.long()] + k[rows]) * value[graph.indices.long()]
    want = skip + torch.zeros_like(skip).index_add(0, rows, each)
    grads = torch.autograd.grad(want, ends, seed.double())
    for again in (False, True):
        got = joined_sum(graph, x, [(weight, bias)], 8, GATED_SKIP)
        close(got, want, 1e-5)
        found = torch.autograd.grad(got, ends, seed, retain_graph=again)
        for one, other in zip(found, grads, strict=True):
            close(one, other, 1e-5)


def test_second_derivatives_and_writes():
    parameters = layers_of(8, 16, 4, True, torch.float32)
    x = rand(40, 8).requires_grad_()
    first, norm, last = parameters[:2], parameters[2:4], parameters[4:]
    for p in parameters:
        p.requires_grad_()
    out = normed_layers(x, first, norm, None, last, 1e-5, 0.1)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    exact = x.detach().double().requires_grad_()
    wide = [p.detach().double() for p in parameters]
    hidden = F.batch_norm(F.linear(exact, *wide[:2]), None, None, *wide[2:4], True, 0.1, 1e-5)
    (grad,) = torch.autograd.grad(F.linear(hidden.relu(), *wide[4:]).square().sum(), exact, create_graph=True)
    close(second, torch.autograd.grad(grad.square().sum(), exact)[0], 1e-4)
    out = normed_layers(x, first, norm, None, last, 1e-5, 0.1)
    with torch.no_grad():
        norm[1].add_(1)
    torch.autograd.grad(out.sum(), x, retain_graph=True)  # does not read it
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_hooks_may_give_back_other_strides():
    parameters = layers_of(8, 16, 4, True, torch.float32)
    x = rand(40, 8).requires_grad_()
    given = (parameters[:2], parameters[2:4], None, parameters[4:], 1e-5, 0.1)
    want = torch.autograd.grad(normed_layers(x, *given).square().sum(), x)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous().t(), lambda t: t):
        out = normed_layers(x, *given)
    close(torch.autograd.grad(out.square().sum(), x)[0], want)


def test_widths_that_do_not_fit():
    weight, _, gamma, beta, last, _ = layers_of(8, 16, 4, False, torch.float32)
    x = rand(40, 8)
    assert normed_layers(x, (weight, None), (gamma, beta), None, (last, None), 1e-5, 0.1) is not None
    for wrong in ((rand(40, 12), weight, gamma, last), (x, weight, rand(8), last), (x, weight, gamma, rand(4, 8))):
        assert normed_layers(wrong[0], (wrong[1], None), (wrong[2], beta), None, (wrong[3], None), 1e-5, 0.1) is None


@pytest.mark.skipif(bool(EMULATED), reason="the layer has its edges sorted by the GPU's own sort")
def test_gen_conv(monkeypatch):
    """The layer as PyG has it, in training and in evaluation, with its statistics."""
    nn = pytest.importorskip("torch_geometric.nn")
    from gnnaccel import pyg_backend
    from gnnaccel.ops import normed_layers as module

    calls = []
    monkeypatch.setattr(module, "normed_layers", lambda *given: calls.append(1) or normed_layers(*given))
    plain = nn.GENConv(16, 16, aggr="add").to(DEVICE)
    edge_index = torch.randint(0, 60, (2, 500), device=DEVICE)
    x, edge = rand(60, 16), rand(500, 16)
    exact, ours = copy.deepcopy(plain).double(), pyg_backend.accelerate(copy.deepcopy(plain))
    for training in (True, True, False):
        exact.train(training), ours.train(training)
        starts = [x.clone().requires_grad_(), x.double().requires_grad_()]
        got, want = ours(starts[0], edge_index, edge), exact(starts[1], edge_index, edge.double())
        close(got, want, 1e-5)
        got.square().sum().backward(), want.square().sum().backward()
        close(starts[0].grad, starts[1].grad, 1e-5)
    for (name, one), other in zip(ours.named_parameters(), exact.parameters(), strict=True):
        close(one.grad, other.grad, 1e-5), name
    for one, other in zip(ours.buffers(), exact.buffers(), strict=True):
        close(one, other)
    assert len(calls) == 2
    hooked = ours.mlp[2].register_forward_hook(lambda *_: calls.append("seen"))
    ours.train()(x, edge_index, edge)
    assert calls == [1, 1, "seen"]
    hooked.remove()
    for taken in (("running_mean", "running_var"), ("num_batches_tracked",)):  # torch's norm does without
        layers = [copy.deepcopy(layer).train() for layer in (plain, ours)]
        for layer in layers:
            for name in taken:
                setattr(layer.mlp[1], name, None)
        close(layers[1](x, edge_index, edge), layers[0](x, edge_index, edge), 1e-5)
