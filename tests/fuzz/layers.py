"""Fuzz target: layers of PyG with the plug-in against PyG alone, through a few steps of a program each.

Random layers with random options (fuzz.layer_table), graphs in each form that PyG takes, widths, and steps: training,
evaluation, no_grad, inference mode, autocast, checkpoints, edges that change in place. Outputs, all gradients and
errors are compared: in float64 with PyG's; in float32 and under autocast, both are compared with float64.

What has no one gradient is left out: values are continuous, so that no two messages tie but of equal edges, whose
gradients go to the same places.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from itertools import zip_longest

import pyg_cases
import torch
from pyg_compare import assert_equal, backward, grads, tensors
from reached import REFUSED, Left, bounded
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn.aggr import MedianAggregation, MulAggregation
from torch_geometric.nn.conv import MessagePassing

from fuzz.draw import Draw
from fuzz.layer_table import LAYERS, METADATA, TYPES
from gnnaccel import pyg_backend
from gnnaccel.lower import bounds

pyg_cases.prepare_pyg()

_WIDTHS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
_MODES = ("train", "train", "train", "no_grad", "inference", "eval", "checkpoint", "second")
_SEARCH = ("DynamicEdgeConv", "GravNetConv")  # rounding decides which nodes are the nearest
# Layers without maxima and minima: some of their inputs are 0, as after a ReLU. A maximum of zeros ties, and torch's
# scatter_reduce gives a share of its gradient to the zeros that it started from as well: n of n + 1 parts arrive.
_ZEROS = {"GATConv", "GATv2Conv", "AGNNConv", "FAConv", "SuperGATConv", "FeaStConv", "LEConv", "TransformerConv"}
_ZEROS |= {"ResGatedGraphConv", "RGATConv", "HANConv", "HGTConv", "GCNConv", "TAGConv", "SGConv", "RGCNConv"}
_HYPEREDGES = 7
_EVERY_MESSAGE = "needs every message|none of sums, means and extrema"  # why medians and products are left
_FEW = {"FEW_MESSAGES": {"cpu": 1 << 17}}  # under which small graphs are PyG's
# Errors by which torch says that it cannot do what PyG asks of it, where the plug-in asks for something else.
_LIMITS = ("not implemented", "Inference tensors cannot be saved", "version_counter for inference tensor")


@dataclass
class Setup:
    """Everything but the values: sizes, edges and what the call takes."""

    draw: Draw
    arguments: str
    width: int
    zeros: bool = False
    pair: bool = False  # features of sources and destinations apart
    form: str = "tensor"
    num_src: int = 0
    num_dst: int = 0
    edges: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.long))
    others: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.long))
    optional: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = self.draw
        self.num_src = self.num_dst = draw.pick((1, 2, draw.randint(3, 9), draw.randint(10, 30), draw.randint(10, 30)))
        self.pair = "x index" in f" {self.arguments}".replace("xx", "") and draw.chance(0.25)
        if self.pair:
            self.num_dst = draw.randint(1, 20)
        hyper = "hyper" in self.arguments
        ends = (self.num_src, _HYPEREDGES) if hyper else (self.num_src, self.num_dst)
        # Without repeats a row of a maximum that reads edge features has none that differ in rounding alone.
        self.edges, self.others = (torch.stack(draw.edges(*ends, most=90)) for _ in range(2))
        self.optional = {name: draw.chance(0.5) for name in self.arguments.split() if name.endswith("?")}
        plain = not any(word in self.arguments for word in ("attr", "type", "hyper", "index2", "layers", "hetero"))
        self.form = draw.pick(("tensor", "tensor", "strided", "EdgeIndex", "sparse" if plain else "tensor"))
        self.form = "tensor" if "hetero" in self.arguments else self.form
        self.none = self.pair and draw.chance(0.3)
        self.blocks = draw.chance(0.3)

    def __str__(self) -> str:
        return (
            f"({self.arguments}), width {self.width}, {self.num_src} -> {self.num_dst} nodes, {self.edges.shape[1]} "
            f"edges as {self.form}, pair={self.pair}{' without x_dst' if self.none else ''}, optional {self.optional}, "
            f"blocks={self.blocks}, zeros={self.zeros}"
        )

    def index(self, dtype: torch.dtype):
        """The edges as one model is given them, the same object at each call."""
        if self.form == "sparse":
            index = torch.unique(self.edges.flip(0), dim=1)
            values = torch.linspace(0.5, 1.5, index.shape[1], dtype=dtype)
            size = self.num_dst, self.num_src
            return torch.sparse_coo_tensor(index, values, size).coalesce().to_sparse_csr()
        if self.form == "EdgeIndex":
            return EdgeIndex(self.edges.clone(), sparse_size=(self.num_src, self.num_dst))
        return self.edges.t().contiguous().t() if self.form == "strided" else self.edges.clone()

    def call(self, index, dtype: torch.dtype, seed: int) -> tuple[list, dict]:
        """Arguments with the values of `seed`: fresh leaves."""
        generator = torch.Generator().manual_seed(seed)

        def leaf(*shape: int, positive: bool = False) -> Tensor:
            value = torch.randn(*shape, generator=generator, dtype=torch.float64)
            value = value.abs() + 0.1 if positive else value
            return value.to(dtype).requires_grad_(torch.rand(1, generator=generator, dtype=torch.float64).item() < 0.8)

        nodes, count = self.num_src, self.edges.shape[1]
        made, words = [], self.arguments.split()
        for k, word in enumerate(words):
            name, _, width = word.partition(":")
            if name in ("x", "xx"):
                x = leaf(nodes, int(width or self.width))
                if self.zeros:
                    x = torch.where(x > 0, x, 0.0).detach().requires_grad_(x.requires_grad)
                pair = (x, None if self.none else leaf(self.num_dst, self.width))
                made.append(pair if self.pair and name == "x" else x)
            elif name == "hetero":
                sizes = {"a": self.num_src, "b": _HYPEREDGES}
                made.append({kind: leaf(size, self.width) for kind, size in sizes.items()})
                made.append({edge: index % torch.tensor([[sizes[edge[0]]], [sizes[edge[2]]]]) for edge in METADATA[1]})
            elif name in ("index", "hyper"):
                made.append(index)
            elif name == "attr":
                made.append(leaf(count, int(words[k + 1])))
            elif name in ("weight?", "hyperweight?"):
                size = count if name == "weight?" else _HYPEREDGES
                weight = leaf(size, positive=True)
                made.append(weight if self.optional[name] and self.form != "sparse" else None)
            elif not name.isdigit():
                made.append(self._other(name, leaf))
        return made, {"size": (self.num_src, self.num_dst)} if self.none else {}

    def _other(self, name: str, leaf):
        nodes, count = self.num_src, self.edges.shape[1]
        return {
            "index2": lambda: self.others,
            "type": lambda: torch.arange(count) * 7 % TYPES,
            "nodetype": lambda: torch.arange(nodes) % 2,
            "none": lambda: None,
            "lambda": lambda: torch.tensor(1.8, dtype=torch.get_default_dtype()),
            "pos": lambda: leaf(nodes, 3),
            "normal": lambda: torch.nn.functional.normalize(leaf(nodes, 3).detach(), dim=-1),
            "layers": lambda: leaf(nodes, 3, 4 * self.width),
            "hyperattr": lambda: leaf(_HYPEREDGES, self.width),
        }[name]()


def _step(layer, setup: Setup, index, dtype: torch.dtype, mode: str, seed: int) -> dict:
    """Outputs and gradients of one call."""
    args, kwargs = setup.call(index, dtype, seed)
    layer.train(mode != "eval")
    layer.zero_grad()
    torch.manual_seed(seed)
    if mode in ("no_grad", "inference"):
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            return {"out": layer(*args, **kwargs)}
    around = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else contextlib.nullcontext()
    with around:
        out = (
            checkpoint(layer, *args, use_reentrant=False, **kwargs) if mode == "checkpoint" else layer(*args, **kwargs)
        )
    if mode == "second":
        return {"out": out, "gradients": _second(layer, out, args)}
    if any(o.requires_grad for o in tensors(out)):
        backward(out)
    return {"out": out, **grads(layer, args, kwargs)}


def _second(layer, out, args) -> list:
    """Derivatives of a sum of the squared gradients; None and 0 are the same."""
    wanted = [t for t in (*layer.parameters(), *tensors(args)) if t.requires_grad and t.is_leaf]
    parts = [o.square().sum() for o in tensors(out) if o.requires_grad]
    if not parts or not wanted:
        return []
    first = torch.autograd.grad(sum(parts), wanted, create_graph=True, allow_unused=True)
    squares = [g.square().sum() for g in first if g is not None and g.requires_grad]
    if not squares:
        return []
    found = torch.autograd.grad(sum(squares), wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def _program(layer, setup: Setup, dtype: torch.dtype, steps) -> list:
    """What each step gave, up to the first error."""
    torch.set_default_dtype(dtype)  # what PyG makes of nothing, as weights of ones, is of this dtype
    index, results = setup.index(dtype), []
    for mode, seed, change in steps:
        if change and isinstance(index, Tensor) and index.layout is torch.strided and setup.num_src == setup.num_dst:
            with torch.no_grad():
                index.copy_(index.flip(1))
        try:
            results.append(_step(layer, setup, index, dtype, mode, seed))
        except Exception as error:
            results.append((type(error).__name__, str(error)))
            break
    return results


def _errors(tree, exact) -> list[tuple[float, float]]:
    """(largest error, size) of each tensor of a nest against the float64 one."""
    pairs = list(zip(tensors(tree), tensors(exact), strict=True))
    return [
        (float((a.detach().double() - b.detach()).abs().max()), float(b.detach().abs().max()))
        for a, b in pairs
        if a.numel() and a.is_floating_point() and a.layout is torch.strided
    ]


def _same_errors(got: list, want: list, what: str) -> list[int]:
    """Steps that raised are the same, with the same errors; returns the others, up to what torch cannot do for PyG."""
    for k, (ours, theirs) in enumerate(zip_longest(got, want)):
        if isinstance(theirs, tuple):
            if any(limit in theirs[1] for limit in _LIMITS):
                return list(range(k))
            assert ours == theirs, f"{what}: step {k}: {ours}, PyG raises {theirs}"
        else:
            assert isinstance(ours, dict), f"{what}: step {k} raises {ours}"
    return [k for k, step in enumerate(want) if isinstance(step, dict)]


def _as_good(got: dict, plain: dict, exact: dict, allowed: float, what: str) -> None:
    """No further from float64 than PyG is."""
    for i, ((ours, size), (theirs, _)) in enumerate(zip(_errors(got, exact), _errors(plain, exact), strict=True)):
        text = f"{what}: tensor {i} of {list(got)}: error {ours:.3g}, PyG's {theirs:.3g} of {size:.3g}"
        assert not ours > 10 * theirs + allowed * max(1.0, size), text


@contextlib.contextmanager
def _messages_in_blocks():
    """Messages that are no product are made a few edges at a time, as where they are too large to be stored."""
    before = bounds.STORED_BYTES, bounds.BLOCK_BYTES
    bounds.STORED_BYTES, bounds.BLOCK_BYTES = {}, {"cpu": 3000}
    try:
        yield
    finally:
        bounds.STORED_BYTES, bounds.BLOCK_BYTES = before


def _compare(name: str, layer, setup: Setup, dtype, steps, what: str) -> bool:
    """Raises AssertionError for a difference; False if PyG does not run the first of the steps."""
    modes = [mode for mode, *_ in steps]
    plain = copy.deepcopy(layer).to(dtype)
    fast = pyg_backend.accelerate(copy.deepcopy(plain))
    want = _program(plain, setup, dtype, steps)
    with _messages_in_blocks() if setup.blocks else contextlib.nullcontext():
        got = _program(fast, setup, dtype, steps)
    ran = _same_errors(got, want, what)
    if dtype == torch.float64:
        for k in ran:
            assert_equal(got[k], want[k], f"{what}: step {k}")
        return bool(ran)
    full = [("train" if mode == "autocast" else mode, *rest) for mode, *rest in steps]
    exact = _program(copy.deepcopy(layer).double(), setup, torch.float64, full)
    for k in ran:
        if k < len(exact) and isinstance(exact[k], dict):
            _as_good(got[k], want[k], exact[k], 2e-2 if modes[k] == "autocast" else 1e-5, f"{what}: step {k}")
    return bool(ran)


def _expected(layer, setup: Setup, small: bool) -> Left | None:
    """How the calls of a layer are to go; where there are few messages or none, those of some layers are PyG's."""
    is_left = any(isinstance(part, (MedianAggregation, MulAggregation)) for part in layer.modules())
    may_be_few = small or not setup.edges.numel()
    reasons = [_EVERY_MESSAGE] * is_left + ["few messages"] * may_be_few
    return Left("|".join(reasons), some=not is_left) if reasons else None


def case(seed: int) -> Left | str | None:
    """One layer through some steps, as if its graph were large; once in ten times small ones are PyG's, as they are."""
    small = seed % 10 == 9
    with bounded(_FEW) if small else contextlib.nullcontext():
        return _case(seed, small)


def _case(seed: int, small: bool) -> Left | str | None:
    draw = Draw(seed)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    name = draw.pick(sorted(LAYERS))
    width, outputs = draw.pick(_WIDTHS), draw.pick(_WIDTHS)
    try:
        layer, arguments = LAYERS[name](draw, width, outputs)
    except (AssertionError, ValueError):
        return REFUSED  # options that PyG does not take together
    assert any(isinstance(module, MessagePassing) for module in layer.modules())
    setup = Setup(draw, arguments, width, name in _ZEROS and draw.chance(0.3))
    random = getattr(layer, "dropout", 0) or name == "SuperGATConv"  # drawn otherwise in other dtypes
    dtype = torch.float32 if draw.chance(0.25) and not random and name not in _SEARCH else torch.float64
    modes = (*_MODES[:-1], "autocast", "autocast") if dtype == torch.float32 else _MODES
    if getattr(layer, "cached", False):  # a checkpoint's second run is another one than the first
        modes = [mode for mode in modes if mode != "checkpoint"]
    steps = [(draw.pick(modes), draw.getrandbits(30), draw.chance(0.1)) for _ in range(draw.randint(1, 4))]
    what = f"{layer} {setup}, {dtype}, steps {[(mode, change) for mode, _, change in steps]}"
    try:
        return _expected(layer, setup, small) if _compare(name, layer, setup, dtype, steps, what) else REFUSED
    except AssertionError:
        if dtype == torch.float64:
            raise
        # Rounding in float32 may pass a kink (of a ReLU, a maximum): it does so once, not with every values.
        again = [[(mode, seed + i, change) for mode, seed, change in steps] for i in (1, 2, 3, 4)]
        for other in again[:-1]:
            with contextlib.suppress(AssertionError):
                return _expected(layer, setup, small) if _compare(name, layer, setup, dtype, other, what) else REFUSED
        raise
