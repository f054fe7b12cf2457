"""Two linear maps with a ReLU, and perhaps a batch norm, between them, on the CPU, against float64; and in layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gnnaccel import _library
from gnnaccel.lower import bounds
from gnnaccel.ops import normed_layers as module
from gnnaccel.ops.normed_layers import normed_layers

pytestmark = pytest.mark.skipif(_library.isa() == "baseline", reason="torch's products are the faster there")
BOUND = 2e-6  # of the largest value


@pytest.fixture(autouse=True)
def on_any_cpu(monkeypatch):
    monkeypatch.setattr(module, "_PAYS", True)
    monkeypatch.setattr(bounds, "NORMED_NUMBERS", (0, 0))


# rows, inner, width, outer: tiles and blocks of rows that are not full, widths of no whole vector
SIZES = [(96, 16, 16, 16), (5, 2, 3, 1), (300, 64, 128, 64), (129, 9, 20, 13), (1500, 33, 65, 47), (97, 70, 300, 100)]


def close(got, want, bound=BOUND):
    error = float((got.detach().double() - want.detach()).abs().max())
    assert error <= bound * float(want.detach().abs().max()), error


def parameters_of(inner, width, outer, biases, norm=True):
    shapes = [(width, inner), (width,) if biases else None, *[(width,) if norm else None] * 2, (outer, width)]
    shapes.append((outer,) if biases else None)
    return [None if shape is None else torch.randn(shape, requires_grad=True) for shape in shapes]


def called(x, parameters, running=None):
    norm = None if parameters[2] is None else parameters[2:4]
    return normed_layers(x, parameters[:2], norm, running, parameters[4:], 1e-5, 0.1)


def defined(x, parameters, running=(None, None)):
    hidden = F.linear(x, *parameters[:2])
    if parameters[2] is not None:
        hidden = F.batch_norm(hidden, *running, *parameters[2:4], True, 0.1, 1e-5)
    return F.linear(hidden.relu(), *parameters[4:])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rows, inner, width, outer", SIZES)
def test_values_statistics_and_gradients(rows, inner, width, outer, biases, norm):
    torch.manual_seed(0)
    parameters, seed = parameters_of(inner, width, outer, biases, norm), torch.randn(rows, outer)
    x = (torch.randn(rows, inner) + 3).requires_grad_()
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, *parameters)]
    running = (torch.zeros(width), torch.ones(width)) if norm else ()
    wide = [t.double() for t in running]
    want, versions = defined(exact[0], exact[1:], wide), [t._version for t in running]
    got = called(x, parameters, running or None)
    close(got, want)
    for one, other, version in zip(running, wide, versions, strict=True):
        close(one, other)
        assert one._version == version  # as with torch's, whose backward pass holds them
    ends = [t for t in (x, *parameters) if t is not None]
    found = torch.autograd.grad(got, ends, seed)
    wants = torch.autograd.grad(want, [t for t in exact if t is not None], seed.double())
    for end, one, other in zip(ends, found, wants, strict=True):
        if norm and end is parameters[1]:
            assert not one.any()  # a norm takes a bias away
        else:
            close(one, other, 1e-5)
    for end, whole in zip(ends, found, strict=True):  # of one alone
        for other in ends:
            other.requires_grad_(other is end)
        assert torch.equal(torch.autograd.grad(called(x, parameters), end, seed)[0], whole)
    with torch.no_grad():
        assert torch.equal(called(x, parameters), got)


@pytest.mark.parametrize("norm", [False, True])
def test_any_number_of_threads_gives_the_same(norm):
    torch.manual_seed(0)
    parameters, x = parameters_of(20, 40, 24, True, norm), torch.randn(3000, 20)
    weights = [t for t in parameters if t is not None and t is not parameters[1]]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out = called(x, parameters)
            found.append([out, *torch.autograd.grad(out.square().sum(), weights)])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_columns_far_from_zero_and_constant_ones():
    torch.manual_seed(0)
    parameters = parameters_of(8, 8, 4, True)
    with torch.no_grad():
        parameters[0].copy_(torch.eye(8))
        parameters[0][0] = 0
    x = torch.randn(1000, 8) + 1000
    exact = [t.detach().double() for t in (x, *parameters)]
    # What is left of the deviations is that much less exact.
    close(called(x, parameters), defined(exact[0], exact[1:]), 1e-4)


@pytest.mark.parametrize("norm", [False, True])
def test_numbers_that_are_none_stay_so(norm):
    parameters, x = parameters_of(8, 8, 4, True, norm), torch.randn(100, 8)
    x[3, 0] = float("nan")
    assert torch.equal(called(x, parameters).isnan(), defined(x, parameters).isnan())


@pytest.mark.parametrize("norm", [False, True])
def test_second_derivatives_and_writes(norm):
    torch.manual_seed(0)
    parameters, x = parameters_of(8, 16, 4, True, norm), torch.randn(40, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(called(x, parameters).square().sum(), x, create_graph=True)
    exact = x.detach().double().requires_grad_()
    want = defined(exact, [None if t is None else t.detach().double() for t in parameters]).square().sum()
    (wide,) = torch.autograd.grad(want, exact, create_graph=True)
    second = torch.autograd.grad(wide.square().sum(), exact)[0]
    close(torch.autograd.grad(grad.square().sum(), x)[0], second, 1e-4)
    out = called(x, parameters)
    with torch.no_grad():
        parameters[5].add_(1)
    torch.autograd.grad(out.sum(), x, retain_graph=True)  # does not read it
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("norm", [False, True])
def test_a_map_that_alone_is_trained_may_be_written_into(norm):
    """No gradient reads it, as with torch."""
    torch.manual_seed(0)
    parameters, x = parameters_of(8, 16, 4, True, norm), torch.randn(40, 8)
    for t in parameters[:4]:
        if t is not None:
            t.requires_grad_(False)
    want = torch.autograd.grad(called(x, parameters).square().sum(), parameters[4:])
    out = called(x, parameters)
    loss = out.square().sum()
    with torch.no_grad():
        parameters[4].fill_(float("nan"))
    assert all(map(torch.equal, torch.autograd.grad(loss, parameters[4:]), want))


@pytest.mark.parametrize("data", [torch.randn(16, 8).double(), torch.randn(16, 8).half(), torch.randn(2, 2)])
@pytest.mark.parametrize("norm", [False, True])
def test_data_of_another_kind_put_in_place_is_torch_s_error(norm, data):
    parameters, x = parameters_of(8, 16, 4, True, norm), torch.randn(40, 8, requires_grad=True)
    out = called(x, parameters)
    parameters[0].data = data
    with pytest.raises(RuntimeError, match=r"dtype|shape"):
        out.sum().backward()


def test_the_gradient_of_a_bias_that_a_norm_takes_away_is_no_number_where_torch_s_is_none():
    parameters, x = parameters_of(8, 16, 4, True), torch.randn(40, 8)
    x[3, 0] = float("inf")
    grads = [torch.autograd.grad(f(x, parameters).sum(), parameters[1])[0] for f in (called, defined)]
    assert torch.equal(grads[0].isnan(), grads[1].isnan()) and grads[0].isnan().any()


def test_what_is_not_taken():
    weight, _, gamma, beta, last, _ = parameters_of(8, 16, 4, False)
    x = torch.randn(40, 8)

    def is_taken(x, weight=weight, gamma=gamma, last=last):
        return normed_layers(x, (weight, None), (gamma, beta), None, (last, None), 1e-5, 0.1) is not None

    assert is_taken(x)
    assert not any(map(is_taken, (x[:1], x.double(), torch.randn(40, 12), torch.randn(8, 40).t())))
    assert not is_taken(x, gamma=gamma[:8]) and not is_taken(x, last=last[:, :8])
    assert not is_taken(torch.randn(4, 2000), weight=torch.randn(16, 2000))


def sequence(*behind):
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 5), *behind)


def models(name):
    """A layer's module, and whether it is one op."""
    pyg = pytest.importorskip("torch_geometric.nn")
    hooked, evaluated = sequence(), sequence()
    hooked[2].register_forward_hook(lambda *_: None)
    evaluated[1].eval()
    return {
        "sequence": (sequence(), True),
        "more behind": (sequence(nn.BatchNorm1d(5), nn.ReLU()), True),
        "a dropout of nothing": (nn.Sequential(*sequence()[:3], nn.Dropout(0.0), nn.Linear(10, 5)), True),
        "no statistics": (
            nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10, track_running_stats=False), *sequence()[2:]),
            True,
        ),
        "PyG's": (pyg.MLP([6, 10, 5]), True),
        "PyG's without a norm": (pyg.MLP([6, 10, 5], norm=None), True),
        "no norm": (nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5), nn.ReLU()), True),
        "a dropout and no norm": (nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.0), nn.Linear(10, 5)), True),
        "two maps": (nn.Sequential(nn.Linear(6, 10), nn.ReLU()), False),
        "PyG's in a sequence": (nn.Sequential(pyg.Linear(6, 10), pyg.BatchNorm(10), *sequence()[2:]), True),
        "no affine maps": (nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10, affine=False), *sequence()[2:]), False),
        "PyG's of three": (pyg.MLP([6, 10, 10, 5]), False),
        "PyG's with another function": (pyg.MLP([6, 10, 5], act="elu"), False),
        "PyG's with a norm behind": (pyg.MLP([6, 10, 5], act_first=True), False),
        "another function": (nn.Sequential(*sequence()[:2], nn.ELU(), nn.Linear(10, 5)), False),
        "cumulative": (nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10, momentum=None), *sequence()[2:]), False),
        "hooked": (hooked, False),
        "compiled": (sequence(), False),
        "without statistics": (sequence(), False),
        "evaluated": (evaluated, False),
    }[name]


NAMES = (
    *("PyG's without a norm", "no norm", "a dropout and no norm", "two maps"),
    *("sequence", "more behind", "a dropout of nothing", "no statistics", "PyG's", "PyG's in a sequence"),
    *("no affine maps", "PyG's of three", "PyG's with another function", "PyG's with a norm behind"),
    *("another function", "cumulative", "hooked", "compiled", "without statistics", "evaluated"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", ["GINConv", "GINEConv"])
def test_pyg_layers_with_norms(layer, name, monkeypatch):
    """As PyG has them, with their statistics."""
    pyg = pytest.importorskip("torch_geometric.nn")
    from gnnaccel import pyg_backend

    torch.manual_seed(0)
    mlp, is_one = models(name)
    plain = getattr(pyg, layer)(mlp)
    if name == "without statistics":  # somebody has taken them away
        mlp[1].running_mean = mlp[1].running_var = None
    ours, exact, calls = pyg_backend.accelerate(copy.deepcopy(plain)), copy.deepcopy(plain).double(), []
    if name == "compiled":
        ours.nn[0]._compiled_call_impl = ours.nn[0]._call_impl  # of which copies know nothing
    monkeypatch.setattr(module, "normed_layers", lambda *given: calls.append(1) or normed_layers(*given))
    edge_index, x, attr = torch.randint(0, 60, (2, 500)), torch.randn(60, 6), torch.randn(500, 6)
    for _ in range(2):
        given, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        more = (attr,) if layer == "GINEConv" else ()
        got = ours(given, edge_index, *more)
        want = exact(wide, edge_index, *(t.double() for t in more))
        close(got, want, 1e-5)
        got.square().sum().backward(), want.square().sum().backward()
        close(given.grad, wide.grad, 1e-5)
    for one, other in zip(ours.buffers(), exact.buffers(), strict=True):
        close(one, other)
    pairs = [(one.grad, other.grad) for one, other in zip(ours.parameters(), exact.parameters(), strict=True)]
    most = max(float(other.abs().max()) for _, other in pairs)
    for one, other in pairs:  # that of a bias before a norm is what rounding leaves
        assert float((one - other).abs().max()) <= 1e-5 * most
    assert len(calls) == (2 if is_one else 0)


def test_a_checkpoint_counts_as_torch_s():
    """It ends its second run at the last saved tensor."""
    pyg = pytest.importorskip("torch_geometric.nn")
    from torch.utils.checkpoint import checkpoint

    from gnnaccel import pyg_backend

    plain, edge_index, counts = pyg.GINConv(sequence()), torch.randint(0, 60, (2, 500)), []
    for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        x = torch.randn(60, 6, requires_grad=True)
        checkpoint(layer, x, edge_index, use_reentrant=False).sum().backward()
        counts.append(int(layer.nn[1].num_batches_tracked))
    assert counts == [2, 2]


@pytest.mark.parametrize("change", ["eps", "no eps", "statistics", "a place left empty"])
def test_changed_modules_raise_as_torch_s(change):
    pyg = pytest.importorskip("torch_geometric.nn")
    from gnnaccel import pyg_backend

    plain, edge_index, errors = pyg.GINConv(sequence()), torch.zeros(2, 3, dtype=torch.long), []
    if change.endswith("eps"):
        plain.nn[1].eps = 0.0 if change == "eps" else None
    elif change == "statistics":
        plain.nn[1].running_mean.requires_grad_()
    else:
        plain.nn[1] = None
    for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        try:
            errors.append(layer(torch.randn(4, 6), edge_index).shape)  # older torch takes an eps of 0
        except (RuntimeError, TypeError, ValueError) as error:
            errors.append((type(error), str(error)))
    assert errors[0] == errors[1]


def test_errors_are_torch_s():
    pyg = pytest.importorskip("torch_geometric.nn")
    from gnnaccel import pyg_backend

    edge_index = torch.zeros(2, 3, dtype=torch.long)
    for x in (torch.randn(1, 6), torch.randn(4, 7)):
        plain = pyg.GINConv(sequence())
        errors = []
        for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                layer(x, edge_index)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]


@pytest.mark.parametrize(
    "norm, rows, taken", [(True, 31, False), (True, 32, True), (False, 62, False), (False, 63, True)]
)
def test_few_rows_are_torch_s(norm, rows, taken, monkeypatch):
    monkeypatch.setattr(bounds, "NORMED_NUMBERS", (1000, 500))
    weight, _, gamma, beta, last, _ = parameters_of(8, 16, 4, False)
    norm = (gamma, beta) if norm else None
    out = normed_layers(torch.randn(rows, 8), (weight, None), norm, None, (last, None), 1e-5, 0.1)
    assert (out is not None) == taken
