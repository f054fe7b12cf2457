"""Fuzz target: each op of gnnaccel.ops against its plain-torch definition in float64, forward and backward.

Random graphs, feature shapes that broadcast, layouts, dtypes, and choices of the inputs that want a gradient. A tie of
a maximum or a minimum has no one gradient: cases that could have one are made sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from oracle import assert_close
from torch import Tensor

from fuzz.draw import Draw
from gnnaccel import ops
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import reference

_HUB_EDGES = 20_500  # more than any kernel keeps whole
_BF16_VALUES = 0x0700


@dataclass
class Trial:
    """ops' call and its definition, both of `inputs`; `slack` times the usual error is allowed."""

    what: str
    call: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    inputs: list[Tensor]
    slack: float = 1.0


def _graph(draw: Draw) -> Graph:
    num_rows, num_cols = draw.size(), draw.size()
    src, dst = draw.edges(num_cols, num_rows, most=draw.pick((20, 150, 150, 1500)))
    if draw.chance(0.006) and num_rows and num_cols:
        dst = torch.cat([dst, torch.full((_HUB_EDGES,), draw.randrange(num_rows))])
        src = torch.cat([src, torch.arange(_HUB_EDGES) % num_cols])
    graph = Graph.from_coo(dst, src, num_rows=num_rows, num_cols=num_cols)
    index = draw.pick((torch.int32, torch.int64))
    arrays = [t.to(index) for t in (graph.indptr, graph.indices)]
    edge_ids = None if graph.edge_ids is None or draw.chance(0.3) else graph.edge_ids.to(index)
    graph = Graph.from_csr(*arrays, edge_ids, num_cols=num_cols)
    return graph.transposed if draw.chance(0.2) else graph


def _shapes(draw: Draw) -> list[tuple[int, ...]]:
    """Two feature shapes that broadcast; one of them may have fewer dimensions."""
    if draw.chance(0.5):  # as layers have them: heads and features
        full = draw.pick(((draw.width(),), (draw.randint(1, 9), draw.pick((1, 3, 4, 7, 8, 16, 33)))))
        other = draw.pick((full, (1,) * len(full), (*full[:-1], 1)))
        return draw.sample((full, other), 2)
    full = tuple(draw.pick((1, 2, 3, 5, 8, draw.randint(0, 9))) for _ in range(draw.randint(0, 3)))
    shapes = [tuple(n if draw.chance(0.6) else 1 for n in full) for _ in range(2)]
    short = draw.randrange(2)
    shapes[short] = shapes[short][draw.randint(0, len(full)) :]
    return shapes


def _inputs(draw: Draw, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [draw.strided(draw.values(*shape, dtype=dtype)) for shape in shapes]


def _distinct(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of which no two in a column are equal, in any dtype, for up to _BF16_VALUES rows."""
    if dtype != torch.bfloat16:
        return draw.values(*shape, dtype=dtype)
    order = torch.rand(shape, generator=draw.generator).argsort(0) % _BF16_VALUES
    return (order.to(torch.int16) + 0x3C00).view(torch.bfloat16).view(shape)  # 2^-7 and up, bit by bit


def _may_tie(graph: Graph, x, weight, message: str, reduce: str) -> bool:
    """True if two messages of a row lie so near to each other that rounding decides which of them wins."""
    if reduce in ("sum", "mean") or message.startswith("copy") or x.dtype == torch.float64:
        return False
    messages = reference.spmm(
        _edges_as_rows(graph), x.double(), weight.double()[reference.edges_of(graph)], message, "sum"
    )
    best = reference.segment_reduce(messages, graph.indptr, reduce)
    near = (messages - best[reference.rows_of(graph.indptr)]).abs() <= 1e-4
    return bool((reference.segment_reduce(near.double(), graph.indptr, "sum") > 1).any())


def _edges_as_rows(graph: Graph) -> Graph:
    return Graph.from_csr(torch.arange(graph.nnz + 1), graph.indices.long(), num_cols=graph.num_cols)


def _spmm(draw: Draw, graph: Graph, dtype) -> Trial:
    message = draw.pick(("copy_lhs", "copy_rhs", "mul", "mul", "mul", "add", "sub", "div"))
    reduce = draw.pick(("sum", "mean", "max", "min"))
    x_shape, w_shape = _shapes(draw)
    # Fewer dimensions of a weight are aligned on the left: a number per edge, or per edge and head.
    w_shape = (1,) * (len(x_shape) - len(w_shape)) + w_shape
    while draw.chance(0.5) and w_shape and w_shape[-1] == 1 and len(w_shape) <= len(x_shape):
        w_shape = w_shape[:-1]
    if dtype == torch.bfloat16 and reduce in ("max", "min") and not message.startswith("copy"):
        reduce = "mean"  # eight bits tie
    shapes = (graph.num_cols, *x_shape), (graph.nnz, *w_shape)
    x, weight = (draw.strided(_distinct(draw, shape, dtype)) for shape in shapes)
    if _may_tie(graph, x, weight, message, reduce) or (dtype == torch.bfloat16 and graph.nnz > _BF16_VALUES):
        reduce = "sum"
    empty = draw.pick((0.0, 0.0, 0.0, -2.5))
    what = f"spmm {message} {reduce} empty_value={empty}"
    slack = 4.0 if message == "div" and dtype == torch.bfloat16 else 1.0  # a rounded reciprocal, squared
    options = dict(message=message, reduce=reduce, empty_value=empty)
    kernel = {}
    by_tiles = message == "copy_lhs" or (message == "mul" and weight[:1].numel() == 1)
    if draw.chance(0.2) and by_tiles and reduce in ("sum", "mean") and empty == 0 and dtype != torch.bfloat16:
        kernel = dict(kernel="tiled")
    if message == "copy_lhs":
        definition = lambda x: reference.spmm(graph, x, None, **options)  # noqa: E731
        return Trial(what, lambda x: ops.spmm(graph, x, **options, **kernel), definition, [x])
    if message == "copy_rhs":
        call = lambda f: lambda w: f(graph, None, w, **options)  # noqa: E731
        return Trial(what, call(ops.spmm), call(reference.spmm), [weight])
    call, definition = partial(ops.spmm, graph, **options, **kernel), partial(reference.spmm, graph, **options)
    return Trial(what, call, definition, [x, weight], slack)


def _sddmm(draw: Draw, graph: Graph, dtype) -> Trial:
    op, targets = (
        draw.pick(("copy_lhs", "copy_rhs", "add", "sub", "mul", "div", "dot", "dot")),
        draw.choices("uve", k=2),
    )
    shapes = _shapes(draw)
    if op == "dot":
        depth = draw.width()
        shapes = [(*shape[-2:], depth) for shape in shapes]
    rows = {"u": graph.num_cols, "v": graph.num_rows, "e": graph.nnz}
    inputs = _inputs(draw, dtype, *((rows[t], *s) for t, s in zip(targets, shapes, strict=True)))
    unread = {"copy_lhs": 1, "copy_rhs": 0}.get(op)

    def with_pair(function):
        def call(*given):
            pair = given if unread is None else (given[0], None) if unread else (None, given[0])
            return function(graph, *pair, op, *targets)

        return call

    given = [t for i, t in enumerate(inputs) if i != unread]
    return Trial(f"sddmm {op} {targets}", with_pair(ops.sddmm), with_pair(reference.sddmm), given)


def _edge_softmax(draw: Draw, graph: Graph, dtype) -> Trial:
    shape = draw.pick(((), (1,), (draw.randint(0, 20),), (draw.randint(1, 4), draw.randint(1, 4))))
    norm_by = draw.pick(("dst", "src"))
    target = graph if norm_by == "dst" else graph.transposed
    scores = draw.strided(4 * draw.values(graph.nnz, *shape, dtype=dtype))
    call = lambda s: ops.edge_softmax(graph, s, norm_by)  # noqa: E731
    return Trial(f"edge_softmax {norm_by}", call, lambda s: reference.edge_softmax(target, s), [scores], 4)


def _heads(draw: Draw) -> tuple[int, int]:
    return draw.randint(1, 9), draw.pick((1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 64, draw.width()))


def _with_zeros(draw: Draw, inputs: list[Tensor]) -> list[Tensor]:
    """Sometimes half of the values 0, as after a ReLU: sums that lie in the kink of leaky_relu."""
    if draw.chance(0.6):
        return inputs
    return [t * (torch.rand(t.shape, generator=draw.generator) < 0.5) for t in inputs]


def _factor(draw: Draw, graph: Graph, heads: int, dtype) -> tuple[dict, Tensor | None]:
    """Arguments that an op takes for a factor of the weights, and the factor in float64."""
    options, factor = {}, None
    if draw.chance(0.3):
        options["edge_scale"] = draw.strided(draw.values(graph.nnz, heads, dtype=dtype))
        factor = options["edge_scale"].double()
    if draw.chance(0.3):
        seed = torch.tensor([draw.getrandbits(62)])
        dropout = draw.pick((0.1, 0.5, 0.9))
        options |= dict(dropout=dropout, seed=seed)
        drops = reference.dropout_factor(seed, dropout, graph.nnz, heads)
        factor = drops if factor is None else factor * drops
    return options, factor


def _attention(draw: Draw, graph: Graph, dtype) -> Trial:
    heads, width = _heads(draw)
    options, factor = _factor(draw, graph, heads, dtype)
    slope = draw.pick((0.2, 0.0, 1.0, 0.01))
    inputs = _inputs(draw, dtype, (graph.num_cols, heads, width), (graph.num_cols, heads), (graph.num_rows, heads))
    inputs[1:] = _with_zeros(draw, inputs[1:])
    call = lambda *t: ops.attention(graph, *t, negative_slope=slope, **options)  # noqa: E731
    what = f"attention slope={slope} {list(options)}"
    return Trial(what, call, lambda *t: reference.attention(graph, *t, slope, factor), inputs, 8)


def _dot_attention(draw: Draw, graph: Graph, dtype) -> Trial:
    heads, width = _heads(draw)
    options, factor = _factor(draw, graph, heads, dtype)
    scale = draw.pick((None, 0.3, -0.1))
    rows = graph.num_rows, graph.num_cols, graph.num_cols
    inputs = _inputs(draw, dtype, *((n, heads, width) for n in rows))
    if draw.chance(0.3):
        inputs += _inputs(draw, dtype, (graph.nnz, heads))
    exact = width**-0.5 if scale is None else scale

    def call(query, key, value, bias=None):
        return ops.dot_attention(graph, query, key, value, scale=scale, edge_bias=bias, **options)

    def definition(query, key, value, bias=None):
        return reference.dot_attention(graph, query, key, value, exact, factor, bias)

    return Trial(f"dot_attention scale={scale} {list(options)}", call, definition, inputs, 8)


def _edge_attention(draw: Draw, graph: Graph, dtype) -> Trial:
    heads, width = _heads(draw)
    options, factor = _factor(draw, graph, heads, dtype)
    inputs = _inputs(draw, dtype, (graph.nnz, heads), (graph.num_cols, heads, width))
    call = partial(ops.edge_attention, graph, **options)
    what = f"edge_attention {list(options)}"
    return Trial(what, call, lambda s, x: reference.edge_attention(graph, s, x, factor), inputs, 8)


def _gatv2_scores(draw: Draw, graph: Graph, dtype) -> Trial:
    heads, width = _heads(draw)
    slope = draw.pick((0.2, 0.0, 1.0, 0.01))
    shapes = (graph.num_cols, heads, width), (graph.num_rows, heads, width), (heads, width)
    inputs = _inputs(draw, dtype, *shapes)
    if dtype != torch.float64:  # sums far from where leaky_relu has its kink
        inputs[0] = inputs[0] * 4
    inputs[:2] = _with_zeros(draw, inputs[:2])
    call = partial(ops.gatv2_scores, graph, negative_slope=slope)
    return Trial(f"gatv2_scores slope={slope}", call, lambda *t: reference.gatv2_scores(graph, *t, slope), inputs, 4)


def _graph_conv(draw: Draw, graph: Graph, dtype) -> Trial:
    shape = draw.pick(((draw.width(),), _heads(draw), ()))
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    scales = [
        draw.strided(draw.values(n, dtype=precise)) if draw.chance(0.5) else None
        for n in (graph.num_cols, graph.num_rows)
    ]
    bias_shape = shape[draw.randint(0, len(shape)) :] if draw.chance(0.5) else None
    weighted, relu = draw.chance(0.5), draw.chance(0.4) and dtype == torch.float64  # rounding may pass a kink
    names, shapes = ["x"], [(graph.num_cols, *shape)]
    if weighted:
        names, shapes = [*names, "weight"], [*shapes, (graph.nnz,)]
    if bias_shape is not None:
        names, shapes = [*names, "bias"], [*shapes, bias_shape]
    source_scale, row_scale = scales

    def call(*given):
        return ops.graph_conv(
            graph, **dict(zip(names, given, strict=True)), source_scale=source_scale, row_scale=row_scale, relu=relu
        )

    def definition(*given):
        exact = dict(zip(names, given, strict=True))
        wide = [None if s is None else s.double() for s in scales]
        return reference.graph_conv(graph, exact["x"], exact.get("weight"), *wide, exact.get("bias"), relu)

    what = f"graph_conv {names} source_scale={source_scale is not None} row_scale={row_scale is not None} relu={relu}"
    return Trial(what, call, definition, _inputs(draw, dtype, *shapes), 2)


def _segment_reduce(draw: Draw, graph: Graph, dtype) -> Trial:
    reduce, empty = draw.pick(("sum", "mean", "max", "min")), draw.pick((0.0, 1.5))
    shape = draw.pick(((), (draw.width(),), (3, 4)))
    if dtype == torch.bfloat16 and graph.nnz > _BF16_VALUES:
        reduce = "sum"
    x = draw.strided(_distinct(draw, (graph.nnz, *shape), dtype))
    call = lambda f: lambda x: f(x, graph.indptr, reduce, empty_value=empty)  # noqa: E731
    return Trial(f"segment_reduce {reduce}", call(ops.segment_reduce), call(reference.segment_reduce), [x])


def _head_dots(draw: Draw, graph: Graph, dtype) -> Trial:
    heads, width = _heads(draw)
    inputs = _inputs(draw, dtype, (graph.num_rows, heads, width), (draw.randint(1, 4), heads, width))
    return Trial("head_dots", ops.head_dots, reference.head_dots, inputs, 2)


def _maxk(draw: Draw, graph: Graph, dtype) -> Trial:
    """The k largest of each row, summed over the graph by its entries."""
    width = max(1, draw.width())
    k, reduce = draw.randint(1, width), draw.pick(("sum", "mean"))
    shapes = [(graph.num_cols, width)] + ([(graph.nnz,)] if draw.chance(0.5) else [])

    def call(x, weight=None):
        kept = ops.maxk(x, k)
        return ops.spgemm(graph, kept, weight, reduce) if dense else ops.spmm(graph, kept, weight, reduce=reduce)

    def definition(x, weight=None):
        message = "copy_lhs" if weight is None else "mul"
        return reference.spmm(graph, reference.maxk(x, k), weight, message, reduce)

    dense = draw.chance(0.5)
    return Trial(f"maxk k={k} {reduce} spgemm={dense}", call, definition, _inputs(draw, dtype, *shapes), 2)


OPS = (
    _spmm,
    _spmm,
    _sddmm,
    _edge_softmax,
    _attention,
    _dot_attention,
    _edge_attention,
    _gatv2_scores,
    _graph_conv,
    _segment_reduce,
    _head_dots,
    _maxk,
)


def _gradients(out: Tensor, leaves: list[Tensor], upstream: Tensor, second: bool) -> list[Tensor]:
    """Of the leaves that want one; `second`: then those of a weighted sum of these."""
    wanted = [t for t in leaves if t.requires_grad]
    grads = list(torch.autograd.grad(out, wanted, upstream, create_graph=second))
    total = sum((g * g.detach().abs().sqrt()).sum() for g in grads if g.requires_grad) if second else 0
    if second:  # what is linear in all that want a gradient has none, which is 0
        found = isinstance(total, Tensor) and total.requires_grad
        more = torch.autograd.grad(total, wanted, allow_unused=True) if found else [None] * len(wanted)
        grads += [torch.zeros_like(t) if g is None else g for g, t in zip(more, wanted, strict=True)]
    return grads


def _turned(draw: Draw, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What becomes of a result, so that its gradient arrives contiguous, transposed or with a stride of 0."""
    kind = draw.randrange(6)
    if kind == 0:
        return lambda t: t.transpose(0, -1) if t.dim() > 1 else t
    if kind == 1 and dtype != torch.bfloat16:  # which would round what was rounded
        return lambda t: t.sum(-1, keepdim=True) if t.dim() > 1 else t
    return lambda t: t


def case(seed: int) -> None:
    """One op on one graph."""
    draw = Draw(seed)
    torch.set_num_threads(draw.pick((1, 1, 2)))
    if draw.chance(0.5):  # outputs and workspaces hold NaN when a kernel gets them
        torch.use_deterministic_algorithms(True, warn_only=True)
    dtype = draw.pick((torch.float32, torch.float64, torch.float64, torch.bfloat16))
    graph = _graph(draw)
    trial = draw.pick(OPS)(draw, graph, dtype)
    dtype = trial.inputs[0].dtype
    turned = _turned(draw, dtype)
    second = dtype == torch.float64 and draw.chance(0.2)
    wanted = [draw.chance(0.7) for _ in trial.inputs]
    shapes = ", ".join(f"{tuple(t.shape)} {t.stride()} {w}" for t, w in zip(trial.inputs, wanted, strict=True))
    what = (
        f"{trial.what}, {graph!r} {graph.indices.dtype} edge_ids={graph.edge_ids is not None}, {dtype}, inputs "
        f"(shape, strides, wants a gradient) {shapes}, second={second}"
    )
    leaves = [t.detach().requires_grad_(w) for t, w in zip(trial.inputs, wanted, strict=True)]
    exact = [t.detach().double().requires_grad_(w) for t, w in zip(trial.inputs, wanted, strict=True)]
    got, want = turned(trial.call(*leaves)), turned(trial.definition(*exact))
    slack = trial.slack * (100 if second else 4 if graph.nnz > _HUB_EDGES else 1)
    # Terms added up in an element, of which all may cancel: so many roundings, in 16 bits of the terms as well.
    # Of few sources the terms are alike, and so are their roundings.
    alike = dtype == torch.bfloat16 or graph.num_cols < 8
    terms = max(1.0, graph.nnz / max(1, graph.num_rows)) ** (1.0 if alike else 0.5)
    assert_close(got, want, dtype, what, slack, size={torch.float32: terms, torch.bfloat16: 1.0}.get(dtype, 0.0))
    assert got.requires_grad == any(wanted), f"{what}: requires_grad {got.requires_grad}"
    if any(wanted):
        upstream = draw.values(*want.shape, dtype=dtype)
        pairs = _gradients(got, leaves, upstream, second), _gradients(want, exact, upstream.double(), second)
        # One by one in float32, the edges of a source in few rows err as one does: those of the busiest source count.
        back = graph.busiest_source if dtype == torch.float32 and graph.num_rows < 8 else 1.0
        for i, (a, b) in enumerate(zip(*pairs, strict=True)):
            size = max(1.0, back, terms * want.numel() / max(1, b.numel()))
            assert_close(a, b, dtype, f"{what}: gradient {i}", slack, size)
