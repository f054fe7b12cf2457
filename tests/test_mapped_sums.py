"""Layers of several linear maps as one node of autograd on the CPU, against their definition in float64."""

import copy

import pytest
import torch
from message_cases import graph_of
from torch_geometric import nn

from gnnaccel import pyg_backend, report
from gnnaccel.lower import bounds
from gnnaccel.ops.joined_sums import FILM, GATED, GATED_SKIP, LE
from gnnaccel.ops.mapped_sums import mapped_sum

DIFFERENCES = {"differences": LE, "mean of differences": LE._replace(reduce="mean")}
FORMS = {"gated": GATED, "gated with skip": GATED_SKIP, "film": FILM, **DIFFERENCES}
N, F = 40, 6


def layer_of(form, width, dtype):
    """x, maps, and all that has a gradient."""
    made = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_()

    rest = (len(form.names) - 1) * width
    x, maps = rand(N, F), [(rand(width, F), None), (rand(rest, F), rand(rest))]
    return x, maps, [x, *(p for pair in maps for p in pair if p is not None)]


def defined(graph, x, maps, width, form):
    """By rows of every edge."""
    joined = torch.cat([torch.nn.functional.linear(x, *pair) for pair in maps], 1)
    part = dict(zip(form.names, joined.split(width, 1), strict=True))
    rows = torch.arange(N).repeat_interleave(graph.indptr.diff().long())
    u, v = ({name: value[index] for name, value in part.items()} for index in (graph.indices.long(), rows))
    if form is FILM:
        each = (v["gamma"] * u["x"] + v["beta"]).relu()
    elif form in DIFFERENCES.values():
        each = u["a"] - v["b"]
    else:
        each = torch.sigmoid(u["q"] + v["k"]) * u["x"]
    out = x.new_zeros(N, width).index_add(0, rows, each)
    if form.reduce == "mean":
        out = out / graph.indptr.diff().clamp(min=1).view(-1, 1)
    return out if form.own_of is None else out + form.own_of(part)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_of_mapped_sums(form, monkeypatch):
    monkeypatch.setattr(bounds, "MAPPED_SUM_ROWS", 7)  # several blocks
    graph = graph_of(N, N, 300)
    cases = ((8, torch.float64, 1e-9), (F, torch.float64, 1e-9), (5, torch.float32, 1e-4), (8, torch.bfloat16, 0.1))
    for width, dtype, bound in cases:
        *given, ends = layer_of(form, width, torch.float64)
        if dtype == torch.bfloat16:  # the same rounded values
            for end in ends:
                end.data = end.detach().bfloat16().double()
        want = defined(graph, *given, width, form)
        seed = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).bfloat16().double()
        grads = torch.autograd.grad(want, ends, seed, create_graph=True)
        x, maps, starts = layer_of(form, width, dtype)
        got = mapped_sum(graph, x, maps, width, form)
        torch.testing.assert_close(got, want.to(dtype), rtol=bound, atol=bound * float(want.detach().abs().max()))
        kept = torch.autograd.grad(got, starts, seed.to(dtype), retain_graph=True)
        for one, other, true in zip(torch.autograd.grad(got, starts, seed.to(dtype)), kept, grads, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, true.to(dtype), rtol=bound, atol=bound * float(true.detach().abs().max()))
        for end, whole in zip(starts, kept, strict=True):  # of one alone
            for other in starts:
                other.requires_grad_(other is end)
            alone = torch.autograd.grad(mapped_sum(graph, x, maps, width, form), end, seed.to(dtype))[0]
            torch.testing.assert_close(alone, whole, rtol=bound, atol=bound * float(whole.abs().max()))
        with torch.no_grad():
            torch.testing.assert_close(mapped_sum(graph, x, maps, width, form), got)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_second_derivatives_of_mapped_sums(form):
    graph = graph_of(N, N, 300)
    x, maps, starts = layer_of(form, 4, torch.float64)
    found = []
    for out in (mapped_sum(graph, x, maps, 4, form), defined(graph, x, maps, 4, form)):
        first = torch.autograd.grad(out.square().sum(), starts, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), starts))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_hooks_keep_of_the_saved_is_theirs(form):
    graph, kept = graph_of(N, N, 300), []

    def pack(tensor):
        kept.append((tensor, tensor.clone()))
        return tensor

    x, maps, starts = layer_of(form, F, torch.float64)  # results as large as x, whose room its gradient may take
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mapped_sum(graph, x, maps, F, form)
    found = torch.autograd.grad(out.sum(), starts)
    assert kept and all(torch.equal(tensor, before) for tensor, before in kept)
    torch.testing.assert_close(found, torch.autograd.grad(mapped_sum(graph, x, maps, F, form).sum(), starts))


def test_what_is_written_into_between_the_passes():
    """A weight that no first derivative reads may be; one that one reads may not."""
    graph = graph_of(N, N, 300)
    for form, of_x, fails in ((LE, False, False), (LE, True, True), (FILM, False, True)):
        x, maps, starts = layer_of(form, 4, torch.float64)
        x.requires_grad_(of_x)
        out = mapped_sum(graph, x, maps, 4, form)
        with torch.no_grad():
            for _, bias in maps[1:]:
                bias.add_(0.0)
            maps[1][0].add_(0.0)
        wanted = starts if of_x else starts[1:]
        if fails:
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                torch.autograd.grad(out.sum(), wanted)
        else:
            torch.autograd.grad(out.sum(), wanted)


def test_what_is_left_to_other_ops():
    graph = graph_of(N, N, 300)
    x, maps, _ = layer_of(LE, 4, torch.float64)
    assert mapped_sum(graph, x, maps[:1], 4, LE) is None  # not all parts
    assert mapped_sum(graph, x, [], F, LE) is None
    assert mapped_sum(graph, x.float(), maps, 4, LE) is None
    assert mapped_sum(graph_of(N, N + 1, 300), x, maps, 4, LE) is None


@pytest.mark.parametrize("name", ["FiLMConv", "LEConv"])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_of_mapped_sums(name, frozen, monkeypatch):
    """Both run so where messages are many, with PyG's results; their models keep their memory."""
    monkeypatch.setitem(bounds.FEW_MESSAGES, "cpu", 0)
    torch.manual_seed(0)
    plain = getattr(nn, name)(F, 4).double()
    if frozen:
        next(plain.parameters()).requires_grad_(False)
    index, found = torch.randint(0, N, (2, 300)), []
    for layer in (plain, pyg_backend.accelerate(copy.deepcopy(plain))):
        x = torch.randn(N, F, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        report.reset()
        out = layer(x, index)
        assert (layer is plain) == ("_Mapped" not in type(out.grad_fn).__name__)
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        found.append((out, torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*found)
    assert report.snapshot()[f"pyg.{name}"].accelerated == 1
