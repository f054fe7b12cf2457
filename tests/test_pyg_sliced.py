"""Models of whose result on a sampled batch the first rows are taken: those rows as ever, and no others computed."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pyg = pytest.importorskip("torch_geometric")
from reached import by_design  # noqa: E402
from sliced_cases import IN, MODELS, OUT, Input, Keeps, Net, Pair, Reddit, Twice, of_map, sage  # noqa: E402
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import NeighborLoader  # noqa: E402
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, SAGEConv  # noqa: E402

from gnnaccel import ops, pyg_backend, report  # noqa: E402
from gnnaccel.lazy import caller, first_rows  # noqa: E402
from gnnaccel.lazy.first_rows import FirstRows  # noqa: E402
from gnnaccel.lower import bounds  # noqa: E402
from gnnaccel.pyg_backend import sliced  # noqa: E402

NODES, EDGES = 300, 1200
KIND = "pyg.first rows"
DEVICE = "cuda" if torch.cuda.is_available() and ops.has_cuda_kernels() else "cpu"


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """Rows that layers have computed."""
    monkeypatch.setattr(bounds, "SAMPLED_PRODUCTS", 0)
    seen = []
    compute = sliced._Layer.compute

    def counting(self, count, *values):
        out = compute(self, count, *values)
        seen.append(out.shape[0])
        return out

    monkeypatch.setattr(sliced._Layer, "compute", counting)
    report.reset()
    pyg_backend.enable()
    yield seen
    pyg_backend.disable()


@pytest.fixture
def batch():
    return sampled()


def sampled():
    torch.manual_seed(1)
    data = Data(x=torch.rand(NODES, IN, dtype=torch.float64), edge_index=torch.randint(NODES, (2, EDGES)))
    made = next(iter(NeighborLoader(data.to(DEVICE), [3, 2, 2], batch_size=8)))
    made.y = torch.randint(OUT, (8,), device=DEVICE)
    return made


# Of functions with `assert`, pytest looks at the locals: callers of models are functions without.
def first_rows_of(model, batch, end):
    return model(batch.x, batch.edge_index)[:end]


def seeds_of(model, batch, at_once: bool = True):
    if at_once:
        return model(batch.x, batch.edge_index)[: batch.batch_size]
    out = model(batch.x, batch.edge_index)
    return out[: batch.batch_size]


def seeds_behind_it(model, batch):
    out = model(batch.x, batch.edge_index)
    out = out[: batch.batch_size]
    return out


def evaluated(model, batch):
    model.eval()
    return model(batch.x, batch.edge_index)[: batch.batch_size]


def by_eval(model, batch):
    return model(batch.x, batch.edge_index)[: eval("batch.batch_size")]


def beside_eval(model, batch):
    end = eval("batch.batch_size")
    return model(batch.x, batch.edge_index)[:end]


def beside_locals(model, batch):
    held = locals()
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    assert_held(held, batch)
    return out


def beside_a_module(model, batch):
    import builtins as names

    held = names.locals()
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    assert_held(held, batch)
    return out


def beside_another_name(model, batch):
    from builtins import locals as names

    held = names()
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    assert_held(held, batch)
    return out


def beside_a_frame(model, batch):
    import inspect

    held = inspect.stack()[0].frame.f_locals
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    assert_held(held, batch)
    return out


def assert_held(held, batch):
    assert held["batch"] is batch


# Where somebody may look at the locals, all rows: not of model.eval(), as evaluating functions and scripts have it.
@pytest.mark.parametrize(
    ("caller", "leaves_out"),
    [
        (evaluated, True),
        *[(by_eval, False), (beside_eval, False), (beside_locals, False)],
        *[(beside_a_module, False), (beside_another_name, False), (beside_a_frame, False)],
    ],
)
def test_who_looks_at_locals(caller, leaves_out, batch, rows):
    model = sage().double().to(DEVICE)
    got = caller(model, batch)
    assert len(got) == batch.batch_size and (min(rows, default=batch.num_nodes) < batch.num_nodes) == leaves_out


def test_a_script(batch, rows):
    """Its loop is no function, where names are looked up otherwise, and it evaluates further below."""
    model = sage().double().to(DEVICE)
    program = "for batch in batches:\n    out = model(batch.x, batch.edge_index)[:batch.batch_size]\nmodel.eval()\n"
    scope = {"batches": [batch], "model": model}
    exec(compile(program, "train.py", "exec"), scope)
    assert rows[-1] == len(scope["out"]) == batch.batch_size
    torch.testing.assert_close(scope["out"], seeds_of(model, batch, False))


# name -> why some of a model's layers compute all rows, or all of them
ALL_ROWS = {
    "GraphSAGE with a norm of all": r"GraphSAGE: mean\(\)",
    "GraphSAGE with batch norm": r"GraphSAGE: batch_norm\(\)",
    "GraphSAGE with graph norm": r"GraphSAGE: new_zeros\(\)",
    "GraphSAGE with maxima of jumps": r"GraphSAGE: stack\(\)",
    "GraphSAGE, projected": "SAGEConv with options or maps of which a row may need more",
    "GAT with dropout": "GATConv with options or maps of which a row may need more",
    "GCN, improved": "GCNConv with options or maps of which a row may need more",
    "GCN without a norm": "GCNConv with options or maps of which a row may need more",
    "weights": "GraphConv with more than features and edges",
    "GIN with batch norm": r"GIN: batch_norm\(\)",
    "a script's, of GINConv and norms": r"Net: batch_norm\(\)",
    "a script's, with batch norm": r"Net: batch_norm\(\)",
    "a script's, with a module unknown": "InstanceNorm1d, of which it is not known",
    "looked at, then dropout": r"LookedAt: mean\(\)",
    "a slice of it, then dropout": r"LookedAt: __getitem__\(\)",
    "metadata, then dropout": r"LookedAt: __get__\(\)",
    "written into by a view": r"Viewed: __getitem__\(\)",
    "kept": r"forward\(\) sets attributes",
    "a mean of all": r"Mean: mean\(\)",
    "ends apart": "features that are no matrix",
    "pooled": r"Pooled: new_zeros\(\)",
    "a layer switched behind its call": r"forward\(\) sets attributes",
    "an autograd function": "it calls 'Twice'",
}


@pytest.mark.reached(kinds="first rows")
@pytest.mark.parametrize("name", MODELS)
def test_sliced_models(name, batch, rows):
    make, leaves_out = MODELS[name]
    torch.manual_seed(2)
    model = make().double().to(DEVICE)
    seeds_of(model, batch, False)  # by which a script's own class becomes known
    state = {key: value.clone() for key, value in model.state_dict().items()}
    results = []
    for at_once in (False, True):
        model.load_state_dict(state)
        model.zero_grad()
        rows.clear()
        torch.manual_seed(3)
        with by_design(ALL_ROWS.get(name)):
            out = seeds_of(model, batch, at_once)
        assert type(out) is torch.Tensor
        F.cross_entropy(out, batch.y).backward()
        after = torch.rand(3, device=DEVICE)  # as many random numbers were drawn
        results.append((out.detach(), after, [p.grad for p in model.parameters()], model.state_dict()))
        if not at_once:
            assert not rows
    torch.testing.assert_close(results[1], results[0])
    size = batch.num_nodes
    if leaves_out:
        assert rows[0] <= size and all(count < size for count in rows[1:])  # layers of attention map all that they read
    elif leaves_out is None:
        assert min(rows) < size
    else:
        assert all(count == size for count in rows)


class Run:
    """Tells a size as scripts' own objects may."""

    def __init__(self, model):
        self.size, self.model = 8, model

    def __getattr__(self, name):
        return self.__dict__[name.removeprefix("any_")]

    @property
    def written(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        return self.size


@pytest.mark.parametrize("name, leaves_out", [("size", True), ("written", False), ("any_size", False)])
def test_code_that_an_attribute_runs(name, leaves_out, batch, rows):
    """What ends the slice is read between the layers' calls and their work: only where that can change nothing."""
    model = sage().double().to(DEVICE)
    run, size = Run(model), batch.num_nodes
    programs = {
        "size": lambda: model(batch.x, batch.edge_index)[: run.size],
        "written": lambda: model(batch.x, batch.edge_index)[: run.written],
        "any_size": lambda: model(batch.x, batch.edge_index)[: run.any_size],
    }
    want = model(batch.x, batch.edge_index)
    want = want[: run.size].clone()
    rows.clear()
    torch.testing.assert_close(programs[name](), want)
    assert (min(rows, default=size) < size) == leaves_out


def test_locals_that_somebody_holds(batch):
    """The caller's, which are read to find the model; who has asked for them before keeps them."""
    held = []

    def caller_of(model, batch):
        look()
        return model(batch.x, batch.edge_index)[: batch.batch_size]

    def look():
        held.append(sys._getframe(1).f_locals)

    model = sage().double().to(DEVICE)
    caller_of(model, batch)
    assert held[0]["model"] is model and held[0]["batch"] is batch


def test_what_is_left_out(batch, rows):
    seeds_of(sage().double().to(DEVICE), batch).sum().backward()
    one, two, three, _ = batch.num_sampled_nodes
    assert rows == [one + two + three, one + two, one]
    assert report.snapshot()[KIND].accelerated == 1 and not report.snapshot()[KIND].reasons


def with_loops():
    """A batch of nodes with loops, some of them several, and parallel edges."""
    torch.manual_seed(2)
    own = torch.arange(NODES)[torch.rand(NODES) < 0.5].repeat(2)
    ends = torch.cat(
        [torch.randint(NODES, (2, EDGES)), own.expand(2, -1), torch.randint(NODES // 2, (1, 99)).expand(2, -1)], 1
    )
    data = Data(x=torch.rand(NODES, IN, dtype=torch.float64), edge_index=ends)
    return next(iter(NeighborLoader(data.to(DEVICE), [-1, 4, 2], batch_size=8)))


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"bias": False}], ids=str)
def test_a_gcn_with_loops(options, rows):
    """PyG has one loop for those that a node has, and degrees are of the whole batch."""
    batch = with_loops()
    assert (batch.edge_index[0] == batch.edge_index[1]).any()
    model = pyg.nn.GCN(IN, 8, 3, OUT, **options).double().to(DEVICE)
    found = []
    for end in (None, batch.batch_size):
        model.zero_grad()
        out = first_rows_of(model, batch, end)[: batch.batch_size]
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    pyg_backend.disable()
    model.zero_grad()
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    out.square().sum().backward()
    want = [out.detach(), *(p.grad for p in model.parameters())]
    assert rows[-1] == batch.batch_size
    for results in found:
        torch.testing.assert_close(results, want)


def results_of(model, batch):
    """Of ten rows of a model's result, and its gradients: the second time, and by plain PyG."""
    found = []
    for accelerated in (True, True, False):
        if not accelerated:
            pyg_backend.disable()
        model.zero_grad()
        out = model(batch.x, batch.edge_index)[:10]
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    return found[1:]


def with_map(conv):
    conv.lin = nn.Linear(conv.in_channels, conv.out_channels)


def with_bias(conv):
    bias = conv.bias.detach().double() + 1
    del conv.bias
    conv.bias = bias.to(DEVICE)


def with_biases(conv):
    conv.bias = nn.Parameter(torch.rand(sampled().num_nodes, conv.out_channels))


def with_graph(conv):
    conv._cached_edge_index = (torch.arange(6, device=DEVICE).view(2, 3), torch.rand(3).double().to(DEVICE))


@pytest.mark.parametrize("change", [with_map, with_bias, with_biases, with_graph])
def test_a_gcn_of_other_parts(change, batch, rows):
    """A map with a bias of its own, a bias that is no parameter, one for each node, a graph of another call."""
    model = Net(GCNConv).double().to(DEVICE)
    for conv in model.convs:
        change(conv)
    got, want = results_of(model.double().to(DEVICE), batch)
    torch.testing.assert_close(got, want)
    assert not rows


def test_infinite_features_of_a_node_with_a_loop(rows):
    batch = with_loops()
    ends, counts = batch.edge_index[0, batch.edge_index[0] == batch.edge_index[1]].unique(return_counts=True)
    node = int(ends[counts == 1][0])
    assert node < 20
    batch.x[node, 0] = float("inf")
    model = pyg.nn.GCN(IN, 8, 1, OUT).double().to(DEVICE)
    seeds_of(model, batch)
    got = first_rows_of(model, batch, 20)
    assert rows
    pyg_backend.disable()
    torch.testing.assert_close(got, model(batch.x, batch.edge_index)[:20])


def test_a_function_that_an_mlp_holds(batch):
    """torch cannot see through it, and so it has all rows."""
    mlp = lambda size, width: GINConv(pyg.nn.MLP([size, 8, width], norm=None, act=lambda x: Twice.apply(x)))  # noqa: E731
    got, want = results_of(Net(mlp).double().to(DEVICE), batch)
    torch.testing.assert_close(got, want)


@pytest.mark.skipif(DEVICE == "cuda", reason="what a GPU holds is not read again")
@pytest.mark.parametrize("layer", [SAGEConv, GraphConv, GCNConv, GINConv, GATConv])
def test_edges_written_in_a_way_that_torch_does_not_count(layer, batch, rows):
    batch.edge_index.numpy()[:, -1] = (9, 0)  # an edge of the last hop goes into a seed now
    model = Net(of_map if layer is GINConv else layer).double()
    got, want = results_of(model, batch)
    torch.testing.assert_close(got, want)
    assert not rows


def test_a_statement_of_its_own(batch, rows):
    model = sage().double().to(DEVICE)
    torch.testing.assert_close(seeds_behind_it(model, batch), seeds_of(model, batch, False))
    assert rows[-1] == 8


def test_other_slices(batch, rows):
    model = sage().double().to(DEVICE)
    whole = model(batch.x, batch.edge_index)
    size = len(whole)
    for end in (0, 3, 9, size - 1, size, size + 5, -2, None):
        rows.clear()
        got = first_rows_of(model, batch, end)
        assert rows
        torch.testing.assert_close(got, whole[:end])


def test_what_is_kept_is_an_ordinary_tensor(batch):
    model, plain = Keeps().double().to(DEVICE), Keeps().double().to(DEVICE)
    plain.load_state_dict(model.state_dict())
    for net, at_once in ((plain, False), (model, False), (model, True)):
        seeds_of(net, batch, at_once)
    assert type(model.kept) is torch.Tensor and model.kept.grad_fn is not None
    torch.testing.assert_close(model.kept, plain.kept)
    for net in (model, plain):
        Twice.apply(net.kept).square().sum().backward()
    torch.testing.assert_close(model.convs[0].lin_l.weight.grad, plain.convs[0].lin_l.weight.grad)


def test_results_in_a_list(batch):
    model = Pair().double().to(DEVICE)
    wanted = model(batch.x, batch.edge_index)
    got = first_rows_of(model, batch, 2)
    assert all(type(value) is torch.Tensor for value in got)
    torch.testing.assert_close(got, wanted)


HOOKS = {
    "of the model": lambda model, seen: model.register_forward_hook(lambda m, args, out: seen.append(out)),
    "of a layer": lambda model, seen: model.convs[0].register_forward_hook(lambda m, args, out: seen.append(out)),
    "of a map": lambda model, seen: model.convs[0].lin_l.register_forward_hook(lambda m, args, out: seen.append(out)),
    "of a part, before": lambda model, seen: model.act.register_forward_pre_hook(lambda m, args: seen.append(args[0])),
    "of all": lambda model, seen: nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(out)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_see_all_rows(name, batch, rows):
    seen = []
    model = sage().double().to(DEVICE)
    handle = HOOKS[name](model, seen)
    try:
        seeds_of(model, batch)
    finally:
        handle.remove()
    assert seen and all(type(out) is torch.Tensor for out in seen) and not rows


USES = {
    "a sum": lambda out: out.sum(),
    "a product": lambda out: (2 * out).sum(),
    "a write": lambda out: out.mul_(3).sum(),
    "a slice": lambda out: out[:5].sum() + out[3:].sum(),
    "without gradients first": lambda out: (torch.no_grad()(torch.sum)(out), out.sum())[1],
    "a function of one's own": lambda out: Doubled.apply(out.mul_(1)).sum() + Doubled.apply(out).sum(),
    "a trip through NumPy": lambda out: out.sum() + float(out.detach().cpu().numpy().sum()),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("name", USES)
def test_an_error_between_the_call_and_the_slice(name, batch):
    """Who handles it has what the model has given: all rows, as an ordinary tensor once they are asked for."""
    model = sage().double().to(DEVICE)

    def left(end):
        try:
            out = model(batch.x, batch.edge_index)
            out = out[: end.missing]
        except AttributeError:
            pass
        return out

    found = []
    for make in (lambda: left(batch), lambda: model(batch.x, batch.edge_index)):
        model.zero_grad()
        out = make()
        assert isinstance(out, FirstRows) == (not found)
        used = USES[name](out)
        assert type(out) is torch.Tensor and out.grad_fn is not None
        used.backward()
        found.append([used.detach(), out.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)


def test_other_places(batch, rows):
    """Nobody slices at once, or it is not the model's result, or not a batch's edges."""
    model = sage().double().to(DEVICE)
    whole = model(batch.x, batch.edge_index)
    for got, wanted in others(model, batch, whole):
        assert type(got) is torch.Tensor and not rows
        torch.testing.assert_close(got, wanted)


def others(model, batch, whole):
    yield list(map(model, [batch.x], [batch.edge_index]))[:1][0], whole
    yield (lambda: model(batch.x, batch.edge_index))()[:5], whole[:5]
    yield model(batch.x, batch.edge_index)[1:], whole[1:]
    yield model(batch.x, batch.edge_index)[:5, :2], whole[:5, :2]
    yield model(batch.x, batch.edge_index.clone())[:5], whole[:5]


def test_evaluation_without_gradients(batch, rows):
    model = sage().double().to(DEVICE).eval()
    with torch.no_grad():
        out = seeds_of(model, batch)
    assert rows[-1] == 8 and not out.requires_grad
    rows.clear()
    written = Input().double().to(DEVICE)
    with torch.no_grad():
        wanted = seeds_of(written, batch, False)
        torch.testing.assert_close(seeds_of(written, batch), wanted)
    assert not rows
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        rows.clear()
        seeds_of(model, batch)
    assert not rows


def test_classes_are_given_back(batch):
    model = Reddit().double().to(DEVICE)
    seeds_of(model, batch)
    assert "__call__" in vars(Reddit) and "__call__" in vars(pyg.nn.GraphSAGE)
    pyg_backend.disable()
    assert "__call__" not in vars(Reddit) and "__call__" not in vars(pyg.nn.GraphSAGE)


def test_all_rows_by_the_environment(rows, monkeypatch):
    for choice in ("1", "0"):
        pyg_backend.disable()
        monkeypatch.setenv("GNNACCEL_FIRST_ROWS", choice)
        pyg_backend.enable()
        model, batch = Reddit().double().to(DEVICE), sampled()
        for _ in range(2):
            seeds_of(model, batch)
        assert bool(rows) == (choice == "1")
        rows.clear()


class Called:
    def __call__(self, *args, **kwargs):
        self.seen = caller.takes_first_rows(sys._getframe(1), self)
        return [1, 2, 3]


def test_callers():
    yes, no = called()
    assert len(yes) == 6 and all(yes) and not any(no)


def called():
    f, n, pair = Called(), 2, types.SimpleNamespace(f=None, n=2)
    pair.f = f
    yes, no = [], []
    f(1)[:n], yes.append(f.seen)
    f(1, k=pair.n)[: pair.n], yes.append(f.seen)
    pair.f(f"{n}")[:7], yes.append(f.seen)
    for _ in range(2):
        sum(f(1)[:n]), yes.append(f.seen)
    out = f(1)
    out = out[:n]
    yes.append(f.seen)
    kept = f(1)
    out = kept[:n]
    no.append(f.seen)
    out = f(1)
    out = (out[:n], out)
    no.append(f.seen)
    out = f(1)
    out = out[:n] if n == 2 else out
    no.append(f.seen)
    out = kept = f(1)
    out = out[:n]
    no.append(f.seen)
    f(1), no.append(f.seen)
    f(1)[n:], no.append(f.seen)
    f(1)[0], no.append(f.seen)
    f(1)[: len("ab")], no.append(f.seen)
    f(1)[:n:2], no.append(f.seen)
    f(1 if n else 2)[:n], no.append(f.seen)
    (f(1) if n else f(2))[:n], no.append(f.seen)
    (lambda: f(1))()[:n], no.append(f.seen)
    list(map(f, [1]))[:n], no.append(f.seen)
    return yes, no


def test_a_step_whose_input_was_written_into():
    trip = first_rows.state.trip = first_rows.Trip()
    try:
        given = torch.ones(5, 2)

        class Source(first_rows.Step):
            def compute(self, rows):
                return torch.arange(10.0).view(5, 2)[:rows]

        out = trip.take(Source((), (5, 2), given, False)) + given
    finally:
        first_rows.state.trip = None
    assert isinstance(out, FirstRows) and out.shape == (5, 2)
    given.add_(1)
    with pytest.raises(RuntimeError, match="was written into"):
        out[:2]
