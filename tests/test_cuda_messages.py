"""Programs of messages on CUDA, each a kernel of its own, against their definition in float64."""

import random

import pytest
import torch
from cuda_cases import DEVICE, EMULATED, build
from message_cases import (
    REDUCES,
    SOFTMAXES,
    USUAL,
    compare,
    compare_sums,
    defined,
    graph_of,
    k,
    messages_of,
    operands_of,
    q,
    random_message,
    w,
    x,
)

import gnnaccel
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import messages as m
from gnnaccel.ops.joined_sums import FILM, GATED, GATED_SKIP, GINE, LE, gen, joined_sum
from gnnaccel.ops.messages import generated, nvrtc
from gnnaccel.ops.messages.source import source_of
from gnnaccel.ops.messages.values import Form
from gnnaccel.program.program import FUNCTIONS, program_of

SHAPES = ((3,), (1,), (64,), (2, 16), (4, 7), (8, 1), (41,), (200,), (2, 300))
SEEDS = 60
if EMULATED:  # each program is compiled by a compiler of C++: a sample
    SHAPES, SEEDS = ((64,), (4, 7)), 4


@pytest.fixture(autouse=True)
def poisoned():
    """Outputs and workspaces are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("name", USUAL if not EMULATED else ("gated", "heads", "dot", "sums of features"))
def test_usual_messages(name, reduce):
    for features in SHAPES[: 1 if EMULATED and reduce != "sum" else None]:
        for index in (torch.int32, torch.int64)[: 1 if EMULATED else 2]:
            graph = graph_of(30, 20, 400, dtype=index, device=DEVICE)
            operands = operands_of(graph, USUAL[name], features)
            compare(graph, USUAL[name], operands, reduce, second=reduce != "mean" and not EMULATED)


@pytest.mark.parametrize("reduce", ["sum", "mean", "none"][: 1 if EMULATED else None])
@pytest.mark.parametrize("name", ("attention with edges", "two") if EMULATED else SOFTMAXES)
def test_softmax_over_edges(name, reduce):
    for features in ((7,), (4, 16), (16, 64), (2, 24))[: 1 + (reduce == "sum") if EMULATED else None]:
        graph = graph_of(30, 20, 400, device=DEVICE)
        operands = operands_of(graph, SOFTMAXES[name], features, scale=0.5)
        compare(graph, SOFTMAXES[name], operands, reduce, second=reduce == "sum" and not EMULATED)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", ["attention with edges", "each feature"])
def test_softmax_over_hubs(name, listed):
    graph = build(DEGREES, 60, torch.int64)
    if listed:
        gnnaccel.prepare(graph)
    for features in ((3,), (2, 32))[: 1 if EMULATED else 2]:
        compare(graph, SOFTMAXES[name], operands_of(graph, SOFTMAXES[name], features), "sum")


@pytest.mark.skipif(bool(EMULATED), reason="tensors of the CPU, of which float16 is none")
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)], ids=str
)
@pytest.mark.parametrize("features", [(4, 16), (16, 64), (8, 128), (3, 5)], ids=str)
def test_softmax_of_narrower_types(features, dtype, bound):
    graph = graph_of(25, 25, 500, device=DEVICE)
    message = SOFTMAXES["attention with edges"]
    operands = operands_of(graph, message, features, scale=0.5, dtype=dtype)
    leaves = list(operands.values())
    wide = {name: value.detach().double().requires_grad_() for name, value in operands.items()}
    got, want = ops.message_reduce(graph, message, operands), defined(graph, message, wide, "sum")
    seed = torch.randn_like(got)
    pairs = [(got, want)]
    pairs += zip(
        torch.autograd.grad(got, leaves, seed),
        torch.autograd.grad(want, list(wide.values()), seed.double()),
        strict=True,
    )
    for one, other in pairs:
        assert (one.double() - other).abs().max() <= bound * other.abs().max()


@pytest.mark.skipif(bool(EMULATED), reason="hundreds of programs")
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f != "round"])
def test_each_function(function):
    graph = graph_of(12, 9, 60, device=DEVICE)
    for message in messages_of(function):
        compare(graph, message, operands_of(graph, message, (4, 4)), "sum", second=True)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_programs(seed):
    made = random.Random(seed)
    graph = graph_of(made.randint(3, 40), made.randint(3, 40), made.randint(0, 300), seed, device=DEVICE)
    message = q * 0.1 + random_message(made, made.randint(1, 4))
    features = made.choice(((1,), (5,), (2, 3), (3, 16), (33,), (4, 32)))
    operands = operands_of(graph, message, features, seed, scale=0.5)
    compare(graph, message, operands, made.choice(REDUCES), second=not EMULATED)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_narrower_types(dtype, bound):
    graph = graph_of(25, 25, 500, device=DEVICE)
    for message in (USUAL["gated"], USUAL["norm"], m.gelu(q + k))[: 1 if EMULATED else 3]:
        for features in SHAPES:
            operands = operands_of(graph, message, features, dtype=dtype)
            compare_sums(graph, message, operands, bound)


@pytest.mark.skipif(bool(EMULATED), reason="of the GPU's functions")
def test_functions_of_float32_over_their_range():
    values = torch.cat(
        [torch.linspace(-120, 100, 40_001), torch.logspace(-37, 38, 5000), -torch.logspace(-37, 2, 5000)]
    )
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 88.72, -103.9, -87.4])
    values = torch.cat([values, special]).float().to(DEVICE)
    each = torch.arange(len(values), device=DEVICE)
    graph = Graph.from_coo(each, each)
    for name in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sigmoid", "tanh", "relu", "abs", "sign", "erf"):
        got = ops.message_reduce(graph, m.Expression(name, (x,)), {"x": values[:, None]}, "none")[:, 0]
        want = getattr(torch, name)(values.double())
        torch.testing.assert_close(got.double(), want.float().double(), rtol=1e-6, atol=2e-38, equal_nan=True)


# Rows of no nonzeros, of one, at the borders of pieces and chunks, and hubs.
DEGREES = [0, 3, 0, 127, 128, 129, 256, 257, 0, 1, 700, 5000, *[2] * 40, 0]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("reduce", REDUCES)
def test_hubs(reduce, listed):
    graph = build(DEGREES, 60, torch.int64)
    if listed:  # rows in pieces of it
        gnnaccel.prepare(graph)
    message = m.tanh(q + k) * m.e("w:1")
    for features in ((3,), (2, 32))[: 1 if EMULATED else 2]:
        compare(graph, message, operands_of(graph, message, features), reduce)
    operands = operands_of(graph, message, (32,), dtype=torch.float32)
    first = ops.message_reduce(graph, message, operands, reduce)
    grads = torch.autograd.grad(first.sum(), list(operands.values()))
    again = ops.message_reduce(graph, message, operands, reduce)
    assert torch.equal(first, again)
    for one, other in zip(grads, torch.autograd.grad(again.sum(), list(operands.values())), strict=True):
        assert torch.equal(one, other)


def test_of_equal_messages_the_first_wins():
    graph = Graph.from_coo(*(torch.tensor(t, device=DEVICE) for t in ([0, 0, 0], [2, 1, 0])), num_rows=2, num_cols=3)
    for reduce, message in (("max", x), ("min", -x)):
        values = torch.ones(3, 2, device=DEVICE, requires_grad=True)
        ops.message_reduce(graph, message * 1.0, {"x": values}, reduce).sum().backward()
        assert values.grad.abs().tolist() == [[0, 0], [0, 0], [1, 1]]
    hub = build([0, 3000], 1, permuted=False)
    for width in (1, 4):
        values = torch.ones(3000, width, device=DEVICE, requires_grad=True)
        ops.message_reduce(hub, w * 1.0, {"w": values}, "max").sum().backward()
        assert values.grad[0].sum() == width and not values.grad[1:].any()
    nan = torch.tensor([[1.0], [torch.nan], [2.0]], device=DEVICE)
    assert ops.message_reduce(graph, x * 1.0, {"x": nan}, "max")[0].isnan().all()


def test_several_in_one_walk():
    graph = graph_of(30, 20, 300, device=DEVICE)
    operands = operands_of(graph, USUAL["gated"] + k, (2, 5))
    kinds = ("mean", "max", "min", "sum", "none")
    several = ops.message_reduce(graph, [USUAL["gated"]] * 4 + [q - k], operands, kinds)
    for message, kind, one in zip([USUAL["gated"]] * 4 + [q - k], kinds, several, strict=True):
        torch.testing.assert_close(one, ops.message_reduce(graph, message, operands, kind), rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows, cols", [(0, 0), (4, 0), (0, 4), (3, 3)])
def test_no_edges(rows, cols):
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    graph = Graph.from_coo(none, none, num_rows=rows, num_cols=cols)
    for reduce in REDUCES:
        compare(graph, USUAL["gated"], operands_of(graph, USUAL["gated"], (4,)), reduce)
        compare(graph, USUAL["gated"], operands_of(graph, USUAL["gated"], (0,)), reduce)


def test_no_features_beside_others():
    graph = graph_of(12, 9, 60, device=DEVICE)
    none = torch.zeros(9, 0, dtype=torch.float64, device=DEVICE, requires_grad=True)
    four = torch.randn(9, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    for kinds in (("sum", "sum"), ("max", "none")):
        empty, out = ops.message_reduce(graph, [m.tanh(q), x * 2.0], {"q": none, "x": four}, kinds)
        assert empty.shape == (graph.num_rows, 0) and not out.isnan().any()
        grads = torch.autograd.grad([empty.sum(), out.sum()], [none, four])
        assert grads[0].shape == none.shape and not grads[1].isnan().any()


def test_operands_that_lie_anywhere():
    """At addresses that vectors cannot be read from, and with rows apart."""
    graph = graph_of(20, 20, 200, device=DEVICE)
    flat = torch.randn(20 * 8 + 1, dtype=torch.float64, device=DEVICE)
    moved = flat[1:].view(20, 8).requires_grad_()
    turned = torch.randn(8, 20, dtype=torch.float64, device=DEVICE).t().requires_grad_()
    compare(graph, q * k, {"q": moved, "k": turned}, "sum")
    for start, width in ((4, 8), (3, 8), (0, 6)):  # columns of a wider matrix, which are not copied
        wide = [torch.randn(20, 18, dtype=torch.float64, device=DEVICE) for _ in range(2)]
        columns = [x[:, start : start + width].requires_grad_() for x in wide]
        assert all(generated.in_rows(x) is x for x in columns)
        compare(graph, m.sigmoid(q) * k, dict(zip("qk", columns, strict=True)), "sum")
        compare(graph, m.sigmoid(q) * k, dict(zip("qk", columns, strict=True)), "max")


FORMS = {
    "gates": GATED_SKIP,
    "gates alone": GATED,
    "film": FILM,
    "differences": LE,
    "rectified": GINE,
    "rectified alone": gen(1e-3, False),
    "of edges": gen(1e-3, True),
}


def layer_of(graph, form, width, dtype):
    """What `joined_sum` takes for a form: x, maps, the message's own operands, and all of that which has a gradient."""
    made = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()

    names, of_edges = len(form.names), any(kind == "e" for kind, _ in form.message.leaves)
    x = rand(graph.num_rows, width if names == 1 else 6)
    maps = [] if names == 1 else [(rand(width, 6), None), (rand((names - 1) * width, 6), rand((names - 1) * width))]
    edge = rand(graph.nnz, width) if of_edges else None
    eps = torch.full((1,), 0.3, device=DEVICE, dtype=dtype) if form is GINE else None
    ends = [t for t in (x, edge, *(p for pair in maps for p in pair)) if t is not None]
    return (x, maps, width, form, edge, eps), ends


def layer_defined(graph, x, maps, width, form, edge, eps):
    joined = x if not maps else torch.cat([torch.nn.functional.linear(x, *pair) for pair in maps], 1)
    given = dict(zip(form.names, joined.split(width, 1), strict=True))
    operands = {**given, "edge": edge}
    used = {name: operands[name] for _, name in form.message.leaves}
    out = defined(graph, form.message, used, form.reduce)
    return out if form.own_of is None else out + form.own_of({**given, "eps": eps})


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_layers_in_two_walks(form, listed):
    graph = graph_of(20, 20, 300, device=DEVICE)
    if listed:
        graph = build(DEGREES, len(DEGREES), torch.int64)
        gnnaccel.prepare(graph)
    for width, dtype in ((8, torch.float32), (8, torch.float64), (5, torch.float32))[: 1 if EMULATED and listed else 3]:
        given, ends = layer_of(graph, form, width, torch.float64)
        want = layer_defined(graph, *given)
        seed = torch.randn_like(want)
        grads = torch.autograd.grad(want, ends, seed, create_graph=True)
        mine, starts = layer_of(graph, form, width, dtype)
        got = joined_sum(graph, *mine)
        bound = 1e-9 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(got, want.to(dtype), rtol=bound, atol=bound * float(want.detach().abs().max()))
        kept = torch.autograd.grad(got, starts, seed.to(dtype), retain_graph=True)
        for one, other, true in zip(torch.autograd.grad(got, starts, seed.to(dtype)), kept, grads, strict=True):
            assert torch.equal(one, other)  # made in place, and not
            torch.testing.assert_close(one, true.to(dtype), rtol=bound, atol=bound * float(true.detach().abs().max()))
        if dtype == torch.float64 and not listed:
            again = torch.autograd.grad(joined_sum(graph, *mine), starts, seed, create_graph=True)
            second, true = (
                torch.autograd.grad(sum((g**2).sum() for g in first), leaves, materialize_grads=True)
                for first, leaves in ((again, starts), (grads, ends))
            )
            for one, other in zip(second, true, strict=True):
                torch.testing.assert_close(one, other)
        for end, whole in zip(starts, kept, strict=True):  # of one alone
            for other in starts:
                other.requires_grad_(other is end)
            assert torch.equal(torch.autograd.grad(joined_sum(graph, *mine), end, seed.to(dtype))[0], whole)
        with torch.no_grad():
            torch.testing.assert_close(joined_sum(graph, *mine), got)


def test_maps_that_do_not_give_all_parts():
    """Whose results a layer would broadcast, or refuse: kernels are not to read beyond them."""
    graph = graph_of(20, 20, 300, device=DEVICE)
    x = torch.randn(20, 6, device=DEVICE)

    def maps(*widths, bias=None):
        return [(torch.randn(w, 6, device=DEVICE), torch.randn(bias or w, device=DEVICE)) for w in widths]

    assert joined_sum(graph, x, maps(8, 8, 8), 8, LE) is not None
    for wrong in (maps(8, 8, 1), maps(4, 4, 4), maps(8, 8), maps(8, 8, 8, 8), maps(12, 12), maps(8, 8, 8, bias=1), []):
        assert joined_sum(graph, x, wrong, 8, LE) is None
    assert joined_sum(graph, x, [(torch.randn(24, 5, device=DEVICE), None)], 8, LE) is None


def test_parameters_that_are_written_into():
    """Gradients of maps of features that have none do not depend on the maps: torch lets them be written into."""
    graph = graph_of(20, 20, 300, device=DEVICE)
    (x, *rest), (_, *parameters) = layer_of(graph, GATED_SKIP, 8, torch.float64)
    outs = [joined_sum(graph, x.detach(), *rest) for _ in range(2)]
    want = torch.autograd.grad(outs[0].sum(), parameters, retain_graph=True)
    with torch.no_grad():
        for p in parameters:
            p.add_(1)
    for got, wanted in zip(torch.autograd.grad(outs[1].sum(), parameters), want, strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(RuntimeError, match="written into"):
        torch.autograd.grad(outs[0].sum(), parameters, create_graph=True)


def test_wide_rows_meet_in_loops():
    """Sums over features of many slots, of more than the lanes of a warp hold, and between others."""
    graph = graph_of(12, 9, 60, device=DEVICE)
    for features, message in (
        ((1500,), m.dot(q, k, keepdim=True) * x),
        ((3, 5, 7), m.sum(q * k, (-2, -1), True) * x),
        ((5, 3), m.sum(m.sum(q * k, -1, True) * x, (-2, -1), True) + w),
        ((2100,), m.dot(q, k, keepdim=True) * x),
    )[: 1 if EMULATED else 3]:
        compare(graph, message, operands_of(graph, message, features), "sum")


def test_the_widest_reads_that_fit():
    """16 bytes at once for rows of whole vectors, less where heads or addresses want it."""
    found = {}
    for features in ((64,), (6,), (4, 2), (41,)):
        shapes = tuple((leaf, features) for leaf in USUAL["gated"].leaves)
        program, _ = program_of(((USUAL["gated"], "sum"),), shapes)
        for aligned in (16, 8, 4):
            found[features, aligned] = generated._form(program, ("f32",) * 3, ("f32",), "i32", aligned).vec
    assert list(found.values()) == [4, 2, 1, 2, 2, 1, 4, 2, 1, 1, 1, 1]


@pytest.mark.skipif(bool(EMULATED), reason="of NVRTC and its files")
class TestKept:
    """Machine code in the user's cache folder."""

    PROGRAM = program_of(((m.relu(x + w), "sum"),), ((("u", "x"), (4,)), (("e", "w"), (4,))))[0]

    @pytest.fixture
    def source(self, tmp_path, monkeypatch):
        monkeypatch.setattr(nvrtc, "folder", lambda: tmp_path / "kernels")
        from gnnaccel import _library
        from gnnaccel.ops.messages.source import whole

        return whole(source_of(self.PROGRAM, Form(("f32", "f32"), ("f32",), "i32", 4)), _library.walk_source())

    def test_compiled_once(self, source, monkeypatch, caplog):
        capability = torch.cuda.get_device_capability()
        first = nvrtc.code_of(source, capability)
        (path,) = nvrtc.folder().iterdir()
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, "compiled", lambda *given: pytest.fail("compiled again"))
            assert nvrtc.code_of(source, capability) == first
        content = path.read_bytes()
        # Written anew as it was: NVRTC itself does not promise the same bytes for the same source.
        monkeypatch.setattr(nvrtc, "compiled", lambda *given: first)
        for bad in (
            content[:-1],
            content[:100],
            b"",
            content[:-5] + b"poison"[:5],
            content.replace(b"kernel", b"kermel", 1),
        ):
            path.write_bytes(bad)
            caplog.clear()
            assert nvrtc.code_of(source, capability) == first and path.read_bytes() == content
            assert "damaged" in caplog.text
        other = path.with_name(f"{nvrtc.key_of(source + '//', capability)}.cubin")
        other.write_bytes(content)  # of another source
        assert nvrtc._kept(other, other.stem) is None

    def test_a_folder_that_cannot_be_written(self, source, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(nvrtc, "folder", lambda: tmp_path / "file" / "kernels")
        assert nvrtc.code_of(source, torch.cuda.get_device_capability())

    def test_sources_on_demand(self, source, monkeypatch, tmp_path):
        monkeypatch.setenv(nvrtc.DUMP, str(tmp_path / "dump"))
        nvrtc.Module(source, torch.cuda.current_device())
        (path,) = (tmp_path / "dump").iterdir()
        assert path.read_text() == source and "relu" in source

    def test_a_source_that_does_not_compile(self):
        with pytest.raises(nvrtc.Failed, match="nonsense"):
            nvrtc.compiled("nonsense", torch.cuda.get_device_capability())


@pytest.mark.skipif(bool(EMULATED), reason="asks CUDA for streams and graphs")
def test_streams_and_graphs():
    graph = graph_of(40, 40, 500, device=DEVICE)
    operands = operands_of(graph, USUAL["gated"], (32,), dtype=torch.float32)
    want = ops.message_reduce(graph, USUAL["gated"], operands)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = ops.message_reduce(graph, USUAL["gated"], operands)
    side.synchronize()
    assert torch.equal(got, want)
    plain = {name: value.detach() for name, value in operands.items()}
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = ops.message_reduce(graph, USUAL["gated"], plain)
    out.zero_()
    recorded.replay()
    assert torch.equal(out, want)


@pytest.mark.skipif(bool(EMULATED), reason="asks CUDA for its memory")
def test_no_memory_for_each_edge():
    graph = graph_of(1000, 1000, 400_000, device=DEVICE)
    gnnaccel.prepare(graph)
    operands = operands_of(graph, USUAL["gated"], (64,), dtype=torch.float32)
    ops.message_reduce(graph, USUAL["gated"], operands).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.message_reduce(graph, USUAL["gated"], operands).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 400_000 * 64 * 4 / 4


def test_without_nvrtc_messages_are_stored(monkeypatch):
    graph = graph_of(12, 9, 60, device=DEVICE)
    monkeypatch.setattr(generated, "obstacle", lambda: "no such library")
    monkeypatch.setattr(generated, "walk", lambda *given: pytest.fail("a program ran"))
    compare(graph, USUAL["gated"], operands_of(graph, USUAL["gated"], (4,)), "sum")
