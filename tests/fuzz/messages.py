"""Random layers written by a random programmer: message() and update() of arithmetic, statistics, no_grad blocks,
writes in place by every spelling, branches on values, kept messages; accelerated against plain PyG.

`case(seed)` writes the source of one layer, runs it both ways and compares outputs, gradients and what it kept.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import math
import operator
import random
import re
import warnings

import torch
import torch.nn.functional as F
from reached import REFUSED, Left
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn, utils
from torch_geometric.nn import aggr
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.resolver import aggregation_resolver

from gnnaccel import pyg_backend
from gnnaccel.lower import bounds

NODES, EDGES = 9, 40

# {} is an operand with a row per edge [E, D]; these keep two equal numbers apart or make none equal.
INJECTIVE = (
    "{}.tanh()",
    "torch.exp(-{}.square() * 0.1) + {}",
    "{} * 0.5",
    "1.5 - {}",
    "{}.sigmoid() + {} * 0.01",
    "F.leaky_relu({}, 0.2)",
    "F.softplus({})",
    "torch.mul({}, 3)",
    "{}.double().to({}.dtype)",
    "{}.flatten(1)",
    "{}[:, None].flatten(1)",
    "{}.contiguous()",
    "{}.clone()",
    "{}.view(-1, D)",
    "{}.reshape({}.size(0), -1)",
    "{}.unsqueeze(1).squeeze(1)",
    "{}.squeeze(1)",
    "torch.cat([{}[:, : D // 2], {}[:, D // 2 :]], -1)",
    "torch.cat({}.split(1, dim=1), dim=1)",
    "same({})",
    "(lambda v: v * 2)({})",
    "{} - {}.mean(-1, keepdim=True) * 0.1",
)
OTHERS = (
    "F.relu({})",
    "self.act({})",
    "{}.abs()",
    "{}.clamp(-0.5, 0.7)",
    "F.dropout({}, self.dropout, False)",
    "{}.softmax(-1)",
    "torch.maximum({}, {})",
    "F.normalize({} + 3, dim=-1)",
    "self.lin({})",
    "F.linear({}, self.lin.weight)",
    "{} @ self.lin.weight",
    "({} * {}).sum(-1, keepdim=True) * {}",
    "{}.norm(dim=-1, keepdim=True) + {}",
    "checkpoint(torch.sin, {}, use_reentrant=False)",
    "torch.where({} > 0, {}, -0.1 * {})",
    "self.mlp(torch.cat([{}, {}], dim=-1))",
    "F.layer_norm({}, (D,), self.param)",
    "self.norm(self.lin({}))",
    "torch.cat([torch.tanh(part) for part in {}.chunk(2, -1)], -1)",
    "torch.cat([{}[:, :1], {} * 2], -1)[:, 1:]",
    "utils.softmax({}, index, num_nodes=size_i) * {}",
)
BINARY = ("{} + {}", "{} - {}", "{} * {}", "{} / (2 + {}.abs())", "torch.add({}, {})", "torch.sub({}, {}, alpha=2)")
WITH = ("{} * w", "w * {}", "{} * self.scale", "{} * self.param", "{} + s.view(-1, 1)", "{} / (1 + w.abs())")
# One number of all rows.
STATISTICS = (
    "{}.std()",
    "{}.mean()",
    "{}.abs().max().detach()",
    "scale_of({})",
    "{}.norm()",
    "{}.detach().square().sum().sqrt()",
    "({} * {}).sum(-1).mean()",
)
BLOCKS = (
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.set_grad_enabled(False):",
    "if float({}.detach().sum()) > 0.3:",
    "for _ in range(2):",
)
# Into a tensor of the message's own; of edges, which torch refuses if they need a gradient.
IN_PLACE = (
    "{0}.mul_(1.5)",
    "{0} += 0.25",
    "{0} *= 2",
    "{0}[:, 0] = 0.5",
    "torch.mul({0}, 2, out={0})",
    "F.relu({0}, True)",
    "F.leaky_relu({0}, 0.1, inplace=True)",
    "{0}.__imul__(2)",
    "operator.iadd({0}, 1)",
    "getattr({0}, 'mul_')(2)",
    "operator.methodcaller('mul_', 2)({0})",
    "Tensor.mul_({0}, 2)",
    "doubled({0})",
    "self.twice({0})",
    "DOUBLERS['double']({0})",
    "functools.partial(Tensor.mul_, {0})(2)",
    "torch.nn.ReLU(True)({0})",
    "{0}.data.mul_(2)",
    "{0}.copy_({0} * 3)",
    "{0}[:, :2].zero_()",
    "torch._foreach_mul_([{0}], 2)",
    "{0}.detach().neg_()",
    "torch.sigmoid_({0})",
)
KEEPING = ("self.kept = {}", "self.kept = {}.detach()", "self.kept = ({}, {} * 2)", "self.kept = {}[:, :1]")
AGGREGATIONS = ("sum", "mean", "std", "softmax", "semi", "powermean", ["sum", "mean"], ["semi", "sum", "std"])
ORDERED = ("max", "min", ["max", "sum"])
# What is left by design, and its reasons. Code that writes in place, or may, is not handed lazy features in its first
# call; later ones are if it was seen to write into none of them.
WRITES = r"in place|uses '(getattr|methodcaller|data)'"
CHECKPOINT = "uses 'checkpoint'"
# A statistic of a lazy feature takes its rows, and so do these functions, and who keeps one.
LOOKS = r"\.(std|mean|max|norm|sum|clone)\(\)|scale_of\(|F\.normalize\(|torch\.where\(|alpha=2"
LOOKED = r"\b(std|mean|max|norm|sum|clone|normalize|gt|where|sub)\(\) takes one row"
KEPT = "keeps a lifted feature"


def same(x):
    return x


@torch.no_grad()
def scale_of(x):
    return x.abs().mean() + 0.1


def doubled(x):
    x.mul_(2)


DOUBLERS = {"double": doubled}
# What the programs may name.
NAMES = dict(
    torch=torch, F=F, Tensor=Tensor, checkpoint=checkpoint, utils=utils, operator=operator, functools=functools
)
NAMES |= dict(functools=functools, same=same, scale_of=scale_of, doubled=doubled, DOUBLERS=DOUBLERS, __name__=__name__)


class _Writer:
    """Writes the source of one layer."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.ordered = rng.random() < 0.2  # reduced by maxima: no two messages of a row may be equal
        self.writes = rng.random() < 0.35
        self.has_written = False
        self.arguments = ["x_j", *(name for name in ("x_i", "ea", "w", "s") if rng.random() < 0.6)]
        self.rows = [name for name in self.arguments if name in ("x_j", "x_i", "ea")]
        self.numbers: list[str] = []
        self.kept = False
        self.count = itertools.count()

    def fill(self, form: str) -> str:
        return form.format(*(self.rng.choice(self.rows) for _ in range(form.count("{}"))))

    def usable(self, forms) -> list[str]:
        """Those that ask for no argument that the message has not."""
        lacking = {name for name in ("w", "s") if name not in self.arguments}
        return [f for f in forms if not lacking & set(f.replace("(", " ").replace(".", " ").split())]

    def row(self) -> str:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.3:
            return self.fill(rng.choice(INJECTIVE))
        if kind < 0.5 and not self.ordered:
            return self.fill(rng.choice(OTHERS))
        if kind < 0.75:
            return self.fill(rng.choice(BINARY[:2] if self.ordered else BINARY))
        return self.fill(rng.choice(self.usable(WITH)))

    def statement(self, depth: int = 0) -> list[str]:
        rng, kind = self.rng, self.rng.random()
        if self.writes and rng.random() < 0.25:
            self.has_written = True
            return [rng.choice(IN_PLACE).format(rng.choice(self.rows))]
        if kind < 0.5:
            name = f"v{next(self.count)}"
            line = f"{name} = {self.row()}"
            if not depth:
                self.rows.append(name)
            return [line]
        if kind < 0.62:
            name = f"k{next(self.count)}"
            line = f"{name} = {self.fill(rng.choice(STATISTICS))}"
            self.numbers += [] if depth else [name]
            return [line]
        if kind < 0.8 and depth < 2:
            return self.block(depth)
        if kind < 0.86 and not depth:
            self.kept = True
            return [self.fill(rng.choice(KEEPING))]
        if kind < 0.88:
            return [self.fill("str(({}.shape, {}.requires_grad, len({})))")]
        if self.numbers and not depth:
            name = f"v{next(self.count)}"
            line = f"{name} = {rng.choice(self.rows)} / (1 + {rng.choice(self.numbers)}.abs())"
            self.rows.append(name)
            return [line]
        return [self.fill("self.total = self.total + {}.detach().mean()")]

    def block(self, depth: int) -> list[str]:
        """Statements inside a block; a name made in it is made before it too, where the block may not run."""
        if self.rng.random() < 0.15:
            name = f"k{next(self.count)}"
            self.numbers.append(name)
            return [
                f"with torch.inference_mode(): {name} = {self.fill('float({}.mean())')}",
                f"{name} = torch.tensor({name})",
            ]
        name = f"v{next(self.count)}"
        before, head = f"{name} = {self.rng.choice(self.rows)}", self.fill(self.rng.choice(BLOCKS))
        inner = [line for _ in range(self.rng.randint(0, 2)) for line in self.statement(depth + 1)]
        inner.append(f"{name} = {self.row()}")
        if not depth:
            self.rows.append(name)
        return [before, head, *("    " + line for line in inner)]

    def source(self) -> str:
        rng = self.rng
        body = [line for _ in range(rng.randint(1, 6)) for line in self.statement()]
        body.append(f"return {self.result()}")
        update = ["return inputs"]
        if self.kept and rng.random() < 0.5:
            update = [
                "kept = self.kept[0] if isinstance(self.kept, tuple) else self.kept",
                "return inputs * kept.mean()",
            ]
        given = ", ".join([*self.arguments, "index", "size_i"])
        lines = [
            "class Layer(Base):",
            f"    def message(self, {given}):",
            *("        " + line for line in body),
            "    def update(self, inputs):",
            *("        " + line for line in update),
        ]
        return "\n".join(lines) + "\n"

    def result(self) -> str:
        newest = self.rows[-1] if self.rng.random() < 0.8 else self.rng.choice(self.rows)
        if self.ordered:
            # Whatever came before, no two messages of a row are alike.
            return f"{newest} + 0.37 * tie * x_j"
        return newest if self.rng.random() < 0.5 else f"{newest} * 0.5 + {self.rng.choice(self.rows)}"


def _expected(source: str, has_written: bool, width: int) -> Left | None:
    """How the calls of a layer are to go: left, or its messages made by PyG, if its code has what asks for that."""
    reasons = [WRITES] if has_written else []
    reasons += [CHECKPOINT] if "checkpoint(" in source else []
    lifted = (
        {"x_j", "x_i"} if width > bounds.STORED_FEATURES else set()
    )  # lazy ones; rows of narrower features are gathered anyway
    kept = False
    for line in source.split("def update")[0].splitlines()[2:]:
        line = line.replace(".sum(-1).mean()", "")  # of one number for each edge
        is_lifted = not lifted.isdisjoint(re.findall(r"\w+", line))
        if is_lifted and re.search(LOOKS, line):
            reasons.append(LOOKED)
        if "self.kept = " in line:
            kept = is_lifted and "[:, :1]" not in line
        name = re.match(r"\s*(v\d+) = ", line)
        if name and is_lifted:
            lifted.add(name[1])
    reasons += [KEPT, LOOKED] if kept else []  # update() reads what was kept, before it is known to be
    return Left("|".join(reasons), some=has_written) if reasons else None


class Base(MessagePassing):
    """What all layers have."""

    def __init__(self, width: int, aggregation):
        super().__init__(aggr=aggregation)
        self.lin = torch.nn.Linear(width, width)
        self.mlp = nn.MLP([2 * width, 4, width], norm=None)
        self.param = torch.nn.Parameter(torch.rand(width) + 0.5)
        self.norm = torch.nn.LayerNorm(width)
        self.act = F.relu
        self.scale, self.dropout, self.total, self.kept = 1.25, 0.5, torch.zeros(()), None

    def twice(self, x):
        x *= 2

    def forward(self, x, edge_index, **edges):
        return self.propagate(edge_index, x=x, **edges)


def _layer(source: str, seed: int, width: int, aggregation) -> MessagePassing:
    file = f"<messages {seed} {width}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space = {**NAMES, "Base": Base, "D": width}
    exec(compile(source, file, "exec", dont_inherit=True), space)
    torch.manual_seed(seed)
    return space["Layer"](width, _resolved(aggregation))


def _resolved(name):
    if isinstance(name, list):
        return aggr.MultiAggregation([_resolved(part) for part in name])
    if name in ("semi", "softmax"):
        return aggr.SoftmaxAggregation(**{"semi": {"semi_grad": True}, "softmax": {"learn": True}}[name])
    return aggregation_resolver(name)


def _inputs(seed: int, width: int, arguments, grad: bool):
    g = torch.Generator().manual_seed(seed)
    pairs = torch.randperm(NODES * NODES, generator=g)[:EDGES]
    given = {"ea": (EDGES, width), "w": (EDGES, 1), "s": (EDGES,), "tie": (EDGES, 1)}
    edges = {name: torch.randn(*shape, generator=g) for name, shape in given.items() if name in arguments}
    x = torch.randn(NODES, width, generator=g).requires_grad_()
    for tensor in edges.values():
        tensor.requires_grad_(grad)
    return x, torch.stack([pairs // NODES, pairs % NODES]), edges


def _tensors(kept) -> list[Tensor]:
    return list(kept) if isinstance(kept, tuple) else [] if kept is None else [kept]


def _run(layer, seed, width, arguments, grad, mode):
    """Everything that a run shows, as a list of tensors; which of its results need a gradient."""
    x, index, edges = _inputs(seed, width, arguments, grad)
    seen: list[Tensor] = []
    flags: list[bool] = []
    for _ in range(2):
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, contextlib.nullcontext)
        with context():
            if mode == "checkpoint":
                out = checkpoint(functools.partial(layer, **edges), x, index, use_reentrant=False)
            else:
                out = layer(x, index, **edges)
        seen.append(out.detach())
        kept = _tensors(layer.kept)
        flags += [t.requires_grad for t in (out, *kept)]
        # Each by itself: an `out` that is a view made under no_grad says that it needs a gradient, and hands none on.
        terms = [t.sum() for t in kept if t.requires_grad]
        if out.requires_grad:
            terms.append((out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum())
        if terms:
            sum(terms).backward()
        with torch.no_grad():
            x.mul_(0.5)  # what was kept is of before
        seen += [t.detach() + 0 for t in kept]
    leaves = [x, *edges.values(), *layer.parameters()]
    seen += [torch.zeros(()) if t.grad is None else t.grad for t in leaves]
    # What runs again in a checkpoint's backward is torch's choice: as far as it needs what was saved.
    total = torch.zeros(()) if mode == "checkpoint" else layer.total
    return [*seen, total, *(t.detach() for t in edges.values())], flags


@contextlib.contextmanager
def _small_blocks(on: bool):
    before = dict(bounds.STORED_BYTES), dict(bounds.BLOCK_BYTES)
    if on:
        bounds.STORED_BYTES["cpu"], bounds.BLOCK_BYTES["cpu"] = 0, 1 << 10
    try:
        yield
    finally:
        for settings, old in zip((bounds.STORED_BYTES, bounds.BLOCK_BYTES), before, strict=True):
            settings.update(old)


def case(seed: int) -> Left | str | None:
    """Write, run and compare layer number `seed`; returns what is expected of its calls."""
    rng = random.Random(seed)
    writer = _Writer(rng)
    source = writer.source()
    if writer.ordered:
        writer.arguments.append("tie")
        source = source.replace("index, size_i", "tie, index, size_i")
    width, aggregation = rng.choice((5, 20)), rng.choice(ORDERED if writer.ordered else AGGREGATIONS)
    # A checkpoint runs as much of it again as torch needs, which shows where inputs are written into.
    modes = ("train",) * 4 + ("no_grad", "inference", "train" if writer.writes else "checkpoint")
    mode = rng.choice(modes)
    grad, small = rng.random() < 0.4 and not writer.writes, rng.random() < 0.5
    what = f"messages {seed}: aggr {aggregation}, width {width}, {mode}, blocks {small}\n{source}"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    found = []
    try:
        with warnings.catch_warnings(), _small_blocks(small):
            warnings.simplefilter("ignore")
            for accelerated in (False, True):
                layer = _layer(source, seed, width, aggregation)
                layer = pyg_backend.accelerate(layer) if accelerated else layer
                try:
                    found.append(_run(layer, seed, width, writer.arguments, grad, mode))
                except (RuntimeError, NameError) as error:
                    if not accelerated:  # torch refuses a write into what a gradient needs; a branch made no name
                        return REFUSED
                    raise AssertionError(f"{what}\nraises {error!r}") from error
    finally:
        torch.set_default_dtype(before)
    (want, want_flags), (got, got_flags) = found
    # A view that torch makes under no_grad says that it needs a gradient, of which nothing arrives.
    assert not any(g and not w for g, w in zip(got_flags, want_flags, strict=True)), f"{what}\nneeds a gradient"
    assert len(got) == len(want), f"{what}\n{len(got)} results for {len(want)}"
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = max(1.0, float(b[b.isfinite()].abs().max())) if b.isfinite().any() else 1.0
        close = a.shape == b.shape and torch.allclose(a, b, rtol=1e-7, atol=1e-9 * scale, equal_nan=True)
        assert close, f"{what}\nresult {place}: {a.flatten()[:4]} for {b.flatten()[:4]}"
    assert math.isfinite(sum(float(b.nan_to_num(0, 0, 0).abs().sum()) for b in want))
    return _expected(source, writer.has_written, width)
