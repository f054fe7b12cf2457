"""Programs on graphs: the kernel's op, its derivative, and the public function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from gnnaccel import _library as lib
from gnnaccel import _operators, recording, report, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.ops import _arrays, _check, reference
from gnnaccel.ops._arrays import Structure, arrays_of, needs_grad
from gnnaccel.ops._features import reduce_to
from gnnaccel.ops.messages import generated
from gnnaccel.ops.messages.layer import layer
from gnnaccel.ops.messages.plan import is_plain
from gnnaccel.ops.messages.source import is_too_wide
from gnnaccel.ops.messages.together import together
from gnnaccel.ops.messages.walks import dispatched, walk
from gnnaccel.ops.spmm import spmm_op
from gnnaccel.program.derivatives import Ahead, Half, ahead, gradients, twins
from gnnaccel.program.language import Expression, softmax
from gnnaccel.program.program import REDUCES, Program, program_of

_COMPUTED = (torch.float32, torch.float64, torch.bfloat16)
_ROWS = {"u": "num_cols", "v": "num_rows", "e": "nnz"}


@overload
def message_reduce(
    graph: Graph,
    message: Expression,
    operands: Mapping[str, Tensor],
    reduce: str = "sum",
    *,
    dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def message_reduce(
    graph: Graph,
    message: Sequence[Expression],
    operands: Mapping[str, Tensor],
    reduce: str | Sequence[str] = "sum",
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]: ...


def message_reduce(
    graph: Graph,
    message: Expression | Sequence[Expression],
    operands: Mapping[str, Tensor],
    reduce: str | Sequence[str] = "sum",
    *,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Messages of an expression, reduced over the edges of each destination: out[v] = reduce of message(u, v, e).

    Parameters
    ----------
    graph : Graph
    message : Expression or sequence of them
        What each edge sends (`gnnaccel.ops.messages`). Of several, all are computed in one walk over the edges.
    operands : mapping from names to tensors
        Of leaves u("name") [num_cols, *F], v("name") [num_rows, *F], e("name") [nnz, *F] in edge-id order, and
        c("name") [*F]; floating-point. Feature shapes broadcast as in NumPy.
    reduce : {"sum", "mean", "max", "min", "none"}, or one for each message
        "none": the messages themselves.
    dtype : torch.dtype, optional
        Of the results; by default the operands' common one. Computes in float32, in float64 if that or an operand is.

    Returns
    -------
    Tensor [num_rows, *F], 0 for destinations without edges; [nnz, *F] in edge-id order for "none". A tuple of them for
    a sequence of messages.

    Raises
    ------
    TypeError
        For a wrong type or dtype. ValueError: for an operand that is missing, or of a wrong shape or device; for shapes
        that do not broadcast; for an option.

    Notes
    -----
    Nothing per edge is stored, but for "none"; in the backward pass messages are computed again. Of equal messages the
    first in the order of the graph is a max or min, and has its gradient. Deterministic, whatever the number of
    threads. On CUDA without NVRTC, of float16, under torch.compile and in transforms of torch.func it runs as its
    definition in `gnnaccel.ops.reference`, which stores one message per edge.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.ops.messages import sigmoid, u, v
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), num_rows=2, num_cols=2)
    >>> x = torch.tensor([[0.0], [2.0]])
    >>> gnnaccel.ops.message_reduce(g, sigmoid(u("gate") + v("gate")) * u("x"), {"gate": 0 * x, "x": x})
    tensor([[1.],
            [0.]])
    """
    _check.graph("message_reduce", graph)
    several = isinstance(message, (list, tuple))
    messages = tuple(message) if several else (message,)  # type: ignore[arg-type]
    reduces = (reduce,) * len(messages) if isinstance(reduce, str) else tuple(reduce)
    if not messages or len(messages) != len(reduces):
        raise ValueError(f"message_reduce: reduce: expected one for each message, got {len(reduces)}")
    if report.timing:
        report.message(
            "; ".join(f"{option} of {expression}" for expression, option in zip(messages, reduces, strict=True))
        )
    if dtype is not None and not computes(dtype, graph.device):
        raise TypeError(f"message_reduce: dtype: expected one of {[str(d) for d in _COMPUTED]}, got {dtype}")
    names: dict[tuple[str, str], None] = {}
    for expression, option in zip(messages, reduces, strict=True):
        if not isinstance(expression, Expression):
            found = type(expression).__name__
            raise TypeError(f"message_reduce: message: expected an expression of gnnaccel.ops.messages, got {found}")
        _check.one_of("message_reduce", "reduce", option, REDUCES)
        names.update(dict.fromkeys(expression.leaves))
    if not any(kind != "c" for kind, _ in names):
        raise ValueError("message_reduce: message: expected a leaf of sources, destinations or edges, got none")
    given, shapes = {}, []
    for kind, name in names:
        given[kind, name], features = _operand(graph, kind, name, operands)
        shapes.append(((kind, name), features))
    program, leaves = program_of(tuple(zip(messages, reduces, strict=True)), tuple(shapes))
    out = evaluate(graph, program, [given[leaf] for leaf in leaves], dtype or _promoted(list(given.values())))
    return tuple(out) if several else out[0]


def softmax_sum(
    graph: Graph,
    message: Expression,
    score: Expression,
    operands: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """out[v] = sum over edges of softmax(score) * message, the softmax over the edges of each destination.

    It is `message_reduce` of that product.

    Parameters
    ----------
    graph : Graph
    message, score : Expression
        Of shapes that broadcast; each feature of the score has a softmax of its own.
    operands, dtype
        As in `message_reduce`.

    Returns
    -------
    Tensor [num_rows, *F], 0 for destinations without edges.

    Raises
    ------
    TypeError, ValueError
        As `message_reduce`.

    Examples
    --------
    >>> import torch, gnnaccel
    >>> from gnnaccel.ops.messages import softmax_sum, u
    >>> g = gnnaccel.Graph.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), num_rows=2, num_cols=2)
    >>> x = torch.tensor([[0.0], [2.0]])
    >>> softmax_sum(g, u("x"), 0.0 * u("x"), {"x": x})
    tensor([[1.],
            [0.]])
    """
    return message_reduce(graph, softmax(score) * message, operands, dtype=dtype)


def _operand(graph: Graph, kind: str, name: str, operands: Mapping[str, Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    if name not in operands:
        raise ValueError(f"message_reduce: operands: expected {name!r} among them, got {sorted(operands)}")
    value = operands[name]
    if kind == "c":
        row = value[None] if isinstance(value, Tensor) else value
        _check.feature("message_reduce", name, row, 1, "its own", graph.device)
        return value, tuple(value.shape)
    _check.feature("message_reduce", name, value, getattr(graph, _ROWS[kind]), f"of {kind!r}", graph.device)
    return value, tuple(value.shape[1:])


def evaluate(graph: Graph, program: Program, operands: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The outputs of a program of checked operands, one for each of its leaves."""
    return recording.call(_evaluate, graph, program, operands, dtype)


def _evaluate(graph: Graph, program: Program, operands: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    plain = all(computes(t, graph.device) for t in (dtype, *(x.dtype for x in operands)))
    fused = plain and is_fused(graph) and not (graph.indptr.is_cuda and is_too_wide(program))
    if not fused or torch.compiler.is_compiling() or touch.transforming():
        return [out.to(dtype) for out in reference.message_reduce(graph, program, operands)]
    sources = [x for x, leaf in zip(operands, program.leaves, strict=True) if leaf.kind == "u"]
    arrays = arrays_of(graph, needs_grad(*sources), *sources, listed=graph.indptr.is_cuda)
    run = _walked if is_plain(program) else layer
    return run(arrays, program, operands, (dtype,) * len(program.outputs))


def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """True for a dtype that operands and results of programs may have."""
    return dtype in _COMPUTED or (dtype == torch.float16 and device.type == "cuda")


def joined(recorded: recording.Recorded) -> recording.Recorded:
    """A recording whose programs on one graph run together if they can."""
    return together(recorded, _evaluate)


def is_fused(graph: Graph) -> bool:
    """True if programs run as one walk over the edges of a graph, False if they store messages."""
    if graph.indptr.is_cuda:
        return lib.has_cuda_kernels() and generated.obstacle() is None
    return graph.device.type == "cpu"


def _promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _walked(
    arrays: Structure, program: Program, operands: list[Tensor], dtypes: tuple[torch.dtype, ...]
) -> list[Tensor]:
    """The outputs, differentiable."""
    run = walk if _operators.usual(*operands) else dispatched
    if needs_grad(*operands):
        return list(_record(run, arrays, program, dtypes, *operands)[: len(dtypes)])
    if run is walk:
        return walk(arrays, program, operands, dtypes, positions=False)
    return run(arrays, program, operands, dtypes)[: len(dtypes)]


class _Messages(_operators.Function):
    """A walk and, behind its outputs, the argmax of its maxima and minima."""

    @staticmethod
    def forward(ctx, run, arrays, program, dtypes, *operands):
        early = ahead(program, ctx.needs_input_grad[4:])
        if early is None:
            outs = run(arrays, program, list(operands), dtypes)
            argmax = kept = outs[len(dtypes) :]
        else:  # the factors between gradients of outputs and of rows
            wide = torch.float64 if torch.float64 in (*dtypes, *(x.dtype for x in operands)) else torch.float32
            outs = run(arrays, early.program, list(operands), (*dtypes, *(wide,) * len(early.targets)))
            argmax, kept = [], outs[len(dtypes) :]
            outs = outs[: len(dtypes)]
        ctx.program, ctx.early = program, early
        _arrays.save(ctx, arrays, *operands, *kept)
        if argmax:
            ctx.mark_non_differentiable(*argmax)
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        arrays, kept = _arrays.saved(ctx)
        program: Program = ctx.program
        operands, kept = list(kept[: len(program.leaves)]), kept[len(program.leaves) :]
        of_outputs = iter(kept)
        wanted = tuple(ctx.needs_input_grad[4:])
        grads = grads[: len(program.outputs)]
        if any(g is not None and touch.is_batched(g) for g in grads):
            return None, None, None, None, *reference.message_gradients(arrays, program, operands, wanted, grads)
        seeds: list[Tensor] = []
        by_output: list[Tensor | None] = []
        for output, grad in zip(program.outputs, grads, strict=True):
            argmax = next(of_outputs) if output.reduce in ("max", "min") else None
            if grad is None:
                by_output.append(None)
                continue
            if output.reduce == "mean":
                degrees = arrays.indptr.diff().clamp_(min=1).to(grad.dtype)
                grad = grad / degrees.view(-1, *(1,) * (grad.dim() - 1))
            by_output.append(grad)
            seeds += [grad] if argmax is None else [grad, argmax]
        given = tuple(g is not None for g in grads)
        early = None if torch.is_grad_enabled() else ctx.early  # what it kept has no derivative
        if early is None:
            return None, None, None, None, *gradients_of(arrays, program, operands, wanted, seeds, given)
        done = {leaf for leaf, *_ in early.targets}
        left = tuple(w and i not in done for i, w in enumerate(wanted))
        found = gradients_of(arrays, program, operands, left, seeds, given)
        return None, None, None, None, *_with_early(found, early, operands, by_output, kept)


def _with_early(
    found: list[Tensor | None], early: Ahead, operands: list[Tensor], grads: list[Tensor | None], kept: Sequence[Tensor]
) -> list[Tensor | None]:
    """`found` with the gradients whose factors the forward pass has `kept`."""
    for (leaf, output, shapes), factor in zip(early.targets, kept, strict=True):
        grad, operand = grads[output], operands[leaf]
        if grad is None:
            continue
        grad = grad.reshape(factor.shape)
        of_rows = factor.shape == operand.shape and operand.dim() != len(shapes[-1])
        if of_rows and operand.dtype != factor.dtype:
            part = torch.mul(grad, factor, out=torch.empty_like(factor, dtype=operand.dtype))
        else:
            part = _shaped(grad * factor, shapes, operand).to(operand.dtype)
        before = found[leaf]
        found[leaf] = part if before is None else before + part
    for leaf, *_ in early.targets:
        if found[leaf] is None:
            found[leaf] = torch.zeros_like(operands[leaf])
    return found


def _shaped(out: Tensor, shapes: list, operand: Tensor) -> Tensor:
    """Rows of gradients through the shapes of a Half's target, as the gradient of an operand."""
    shape = operand.shape
    if len(shape) == len(shapes[-1]):  # the same for all edges: no rows
        out = out.sum(0, keepdim=True)
    for features in shapes[1:]:
        same = math.prod(features) == math.prod(out.shape[1:])
        out = out.reshape(out.shape[0], *features) if same else reduce_to(out, features)
    return out if out.shape == shape else out.reshape(shape)


def gradients_of(
    arrays: Structure, program: Program, operands: list[Tensor], wanted: tuple, seeds: list[Tensor], given: tuple
) -> list[Tensor | None]:
    """Gradients of the `wanted` operands of a program. seeds: the gradients of those outputs that have one `given`,
    those of means by the degrees, of extremes with their argmax behind them."""
    found: list[Tensor | None] = [None] * len(operands)
    pairs = [] if arrays.indptr.is_cuda else [p for p in twins(program, wanted, given) if _may_stand(operands, *p)]
    sources = {source for source, _ in pairs}
    alone = tuple(w and i not in sources for i, w in enumerate(wanted))
    here, there = gradients(program, alone, given)
    if here is not None:
        _fill(found, arrays, here, operands, [*operands, *seeds])
    if there is not None:
        _fill(found, arrays.transposed(), there, operands, [*operands, *seeds])
    for source, edge in pairs:  # rows that are there need no messages made again
        found[source] = spmm_op(arrays.transposed(), None, found[edge], "copy_rhs", "sum", 0.0)
    for i, operand in enumerate(operands):
        if wanted[i] and found[i] is None:
            found[i] = torch.zeros_like(operand)
    return found


def _may_stand(operands: list[Tensor], source: int, edge: int) -> bool:
    """True if the gradient to an operand of edges is precise enough to be summed for one of sources."""
    return operands[source].dtype == operands[edge].dtype != torch.bfloat16


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_record = super(torch.autograd.Function, _Messages).apply  # type: ignore[misc]


def _fill(found: list, structure: Structure, half: Half, operands: list[Tensor], given: list[Tensor]) -> None:
    """Put the gradients of one half into `found`."""
    dtypes = tuple(operands[number].dtype for number, _ in half.targets)
    outs = _walked(structure, half.program, [given[i] for i in half.operands], dtypes)
    for (number, shapes), out in zip(half.targets, outs, strict=True):
        found[number] = _shaped(out, shapes, operands[number])
