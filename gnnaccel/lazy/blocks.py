"""Messages that are no product, evaluated and reduced in blocks of edges: memory linear in nodes.

Where all messages together are small, they are made at once and kept for the backward pass, which is faster. Else the
graph is cut between rows into blocks of about BLOCK_BYTES of messages. The forward pass evaluates an expression
block by block and reduces its rows; the backward pass evaluates it again, once in the order of destinations and once
in that of sources, so that every gradient is a sum of consecutive rows: no scatter, and the same result each time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnnaccel import _operators, _timed, ops, touch
from gnnaccel.graph.cache import derived
from gnnaccel.graph.csr import Graph
from gnnaccel.lazy import programs
from gnnaccel.lazy.expression import (
    LINEAR,
    Apply,
    Expression,
    Leaf,
    gathered,
    has_softmax,
    is_rows,
    mapped,
    own,
    reads_nodes,
    reshaped,
    softmaxed,
    widest_rows,
    without_autocast,
)
from gnnaccel.lower import bounds
from gnnaccel.recording import call


class Slot(NamedTuple):
    """Operand `number` of a program."""

    number: int


class Step(NamedTuple):
    """function(*args, **kwargs), where args may be slots and steps."""

    function: Any
    args: tuple
    kwargs: dict


class Program(NamedTuple):
    """An expression without its tensors.

    kinds : for each operand "u", "v" (rows of nodes), "e" (one row per edge) or "c" (the same for all edges).
    """

    root: Step | Slot
    kinds: str


def compiled(graph: Graph, expression: Expression) -> tuple[Program, list[Tensor]]:
    """The program of an expression, and its operands."""
    slots: dict[tuple[int, str], Slot] = {}
    operands: list[Tensor] = []
    kinds: list[str] = []

    def slot(tensor: Tensor, kind: str) -> Slot:
        found = slots.get((id(tensor), kind))
        if found is None:
            found = slots[id(tensor), kind] = Slot(len(operands))
            operands.append(tensor)
            kinds.append(kind)
        return found

    def read(node, dims: int):
        if isinstance(node, Leaf):
            return slot(node.value, node.side)
        if isinstance(node, Tensor):
            return slot(node, "e" if is_rows(node, graph, "e", dims) and node.shape[0] != 1 else "c")
        if isinstance(node, Apply):
            steps = [a for a in node.args if isinstance(a, (Leaf, Apply))]
            inner = len(steps[0].features) if steps else len(node.features)
            if node.function is reshaped and isinstance(node.args[0], Tensor):
                inner = node.args[0].dim() - 1
            first, rest = (node.args[:1], node.args[1:]) if node.function in LINEAR else (node.args, ())
            args = [read(arg, inner) for arg in first]
            args += [slot(arg, "c") if isinstance(arg, Tensor) else arg for arg in rest]
            return Step(node.function, tuple(args), node.kwargs)
        return node

    root = read(expression, len(expression.features))
    return Program(root, "".join(kinds)), operands


def _run(node, values: list[Tensor], done: dict[int, Tensor]) -> Any:
    if isinstance(node, Slot):
        return values[node.number]
    if not isinstance(node, Step):
        return node
    found = done.get(id(node))
    if found is None:
        found = node.function(*(_run(arg, values, done) for arg in node.args), **node.kwargs)
        done[id(node)] = found
    return found


def _evaluate(program: Program, values: list[Tensor]) -> Tensor:
    return _run(program.root, values, {})


@_timed.timed
class _Unread(torch.autograd.Function):
    """torch.nn.functional.linear for its gradients alone: its result, which nobody reads, is not made."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, weight.shape[0])
        return (
            rows.mm(weight).view(x.shape) if of_x else None,
            rows.t().mm(x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _unread(program: Program, values: list[Tensor]) -> Tensor:
    """What has the gradients of a program's value; a linear map that comes last is left out."""
    root = program.root
    if not isinstance(root, Step) or root.function is not torch.nn.functional.linear or root.kwargs:
        return _evaluate(program, values)
    done: dict[int, Tensor] = {}
    x, weight, bias = (*(_run(arg, values, done) for arg in root.args), None)[:3]
    if weight.dim() != 2 or weight.dtype != x.dtype or (bias is not None and bias.dim() != 1):
        return _evaluate(program, values)
    return _Unread.apply(x, weight, bias)


class Block(NamedTuple):
    """Rows and nonzeros of a graph: complete rows."""

    rows: slice
    edges: slice


def blocks_of(graph: Graph, row_bytes: int) -> list[Block]:
    """The graph cut into blocks of whole rows with at most BLOCK_BYTES of messages (a longer row is a block)."""
    most = max(1, bounds.BLOCK_BYTES.get(graph.device.type, 4 << 20) // max(1, row_bytes))
    most = 1 << (most.bit_length() - 1)  # few different sizes in the cache
    found = derived.get((graph.indptr,), ("blocks", most))
    if found is None:
        ends = graph.indptr.detach().cpu()
        found, row = [], 0
        while row < graph.num_rows:
            start = int(ends[row])
            stop = int(torch.searchsorted(ends, start + most, right=True)) - 1
            stop = max(row + 1, min(stop, graph.num_rows))
            found.append(Block(slice(row, stop), slice(start, int(ends[stop]))))
            row = stop
        derived.put((graph.indptr,), ("blocks", most), found)
    return found


def row_of(graph: Graph) -> Tensor:
    """Row of each nonzero, cached with the graph's own arrays."""
    found = derived.get((graph.indptr,), "rows")
    if found is None:
        with torch.inference_mode(False):
            nodes = torch.arange(graph.num_rows, device=graph.device, dtype=graph.indptr.dtype)
            found = torch.repeat_interleave(nodes, graph.indptr.diff(), output_size=graph.nnz)
        derived.put((graph.indptr,), "rows", found)
    return found


def _values(graph: Graph, block: Block, operands, kinds: str) -> tuple[list[Tensor], Tensor | None]:
    """What each operand is on the nonzeros of a block, and their edge ids. Kinds are relative to `graph`'s rows."""
    ids = None if graph.edge_ids is None else graph.edge_ids[block.edges]
    values = []
    for operand, kind in zip(operands, kinds, strict=True):
        if kind == "u":
            operand = operand.index_select(0, graph.indices[block.edges])
        elif kind == "v":
            operand = operand.index_select(0, row_of(graph)[block.edges])
        elif kind == "e":
            operand = operand[block.edges] if ids is None else operand.index_select(0, ids)
        values.append(operand)
    return values, ids


def _segments(graph: Graph, block: Block, values: Tensor, reduce: str = "sum") -> Tensor:
    """Reduce the nonzeros of a block over its rows."""
    offsets = graph.indptr[block.rows.start : block.rows.stop + 1] - block.edges.start
    return ops.segment_reduce(values.contiguous(), offsets, reduce, check=False)


def _logsumexp(graph: Graph, block: Block, values: Tensor) -> Tensor:
    top = _segments(graph, block, values, "max")
    row = row_of(graph)[block.edges] - block.rows.start
    return top + _segments(graph, block, (values - top.index_select(0, row)).exp()).clamp_min(1e-38).log()


def _edges(graph: Graph, block: Block, ids: Tensor | None) -> Tensor:
    """Edge id of each nonzero of a block."""
    if ids is not None:
        return ids
    return torch.arange(block.edges.start, block.edges.stop, device=graph.device, dtype=graph.indptr.dtype)


def _extremum(graph: Graph, block: Block, values: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """The maxima or minima of a block's rows, and the nonzeros whose they are; -1 in an empty row."""
    offsets = graph.indptr[block.rows.start : block.rows.stop + 1] - block.edges.start
    out, argmax = ops.segment_reduce(values.contiguous(), offsets, reduce, return_arg=True, check=False)
    return out, torch.where(argmax < 0, argmax, argmax + block.edges.start)


def _without_autocast(method):
    """A method whose first argument has a device, without autocast for that."""

    @functools.wraps(method)
    def wrapper(ctx, first, *more):
        with without_autocast(first.device):
            return method(ctx, first, *more)

    return wrapper


class _Blocks(_operators.Function):
    """Evaluate a program on every edge and reduce it over rows ("sum", "mean", "max", "min", "logsumexp") or not at all
    (None)."""

    @staticmethod
    @_without_autocast
    def forward(ctx, graph, program, reduce, features, dtype, *operands):
        ctx.graph, ctx.program, ctx.reduce = graph, program, reduce
        rows = graph.nnz if reduce is None else graph.num_rows
        out = torch.empty(rows, *features, dtype=dtype, device=graph.device)
        kept = out if reduce == "logsumexp" else None  # what the backward pass reads of the results
        if reduce in ("max", "min"):
            kept = torch.empty(rows, *features, dtype=graph.indptr.dtype, device=graph.device)
        for block in blocks_of(graph, _width(features, dtype, operands)):
            values, ids = _values(graph, block, operands, program.kinds)
            message = _evaluate(program, values)
            if reduce is None:
                out[block.edges if ids is None else ids] = message
            elif reduce == "logsumexp":
                out[block.rows] = _logsumexp(graph, block, message)
            elif reduce in ("max", "min"):
                out[block.rows], kept[block.rows] = _extremum(graph, block, message, reduce)
            else:
                out[block.rows] = _segments(graph, block, message, reduce)
        ctx.save_for_backward(kept, *operands)
        return out

    @staticmethod
    @_without_autocast
    def backward(ctx, grad):
        kept, *operands = ctx.saved_tensors
        graph, program, reduce = ctx.graph, ctx.program, ctx.reduce
        needs = ctx.needs_input_grad[5:]
        if torch.is_grad_enabled() or touch.is_batched(grad):
            # A second derivative may follow, or there are many gradients in one: the plain way, with all messages.
            grads = _plain_backward(graph, program, reduce, operands, needs, grad)
            return None, None, None, None, None, *grads
        if reduce == "mean":
            count = graph.indptr.diff().clamp_(min=1).to(grad.dtype)
            grad = grad / count.view(-1, *(1,) * (grad.dim() - 1))
        given = _Given(reduce, grad.contiguous(), kept)
        grads: list[Tensor | None] = [None] * len(operands)
        here = [n and kind != "u" for n, kind in zip(needs, program.kinds, strict=True)]
        there = [n and kind == "u" for n, kind in zip(needs, program.kinds, strict=True)]
        if any(here) and any(there) and _may_scatter(graph, [x for x, t in zip(operands, there, strict=True) if t]):
            _sweep(graph, program.kinds, program, operands, needs, given, "v", grads)
            return None, None, None, None, None, *grads
        if reduce in ("max", "min") and graph.edge_ids is not None and graph.nnz:  # of which the reversed edges know
            edges = graph.edge_ids.index_select(0, kept.clamp_min(0).flatten()).view(kept.shape)
            given = given._replace(kept=torch.where(kept < 0, kept, edges))
        _sweep(graph, program.kinds, program, operands, here, given, "v", grads)
        if any(there):
            swapped = program.kinds.translate(str.maketrans("uv", "vu"))
            _sweep(graph.transposed, swapped, program, operands, there, given, "u", grads)
        return None, None, None, None, None, *grads


def _may_scatter(graph: Graph, sources: list[Tensor]) -> bool:
    """True if gradients to sources may be added up where a sweep by destinations finds them, which spares the sweep by
    sources: on the CPU, where torch adds rows up in the order of edges, whatever the number of threads."""
    if graph.device.type != "cpu" or not all(x.dtype in (torch.float32, torch.float64) for x in sources):
        return False
    longest = derived.get((graph.indptr,), "longest source")
    if longest is None:
        longest = int(graph.indices.long().bincount().max()) if graph.nnz else 0
        derived.put((graph.indptr,), "longest source", longest)
    return longest <= bounds.LONGEST_SCATTERED


class _Given(NamedTuple):
    """What the backward pass was given: the gradient of rows, or of edges if nothing was reduced; and what the forward
    pass kept: results of "logsumexp", nonzeros of the argmax or argmin (edge ids for two sweeps)."""

    reduce: str | None
    grad: Tensor
    kept: Tensor | None


def _width(features, dtype, operands) -> int:
    widest = max([math.prod(features), *(x[:1].numel() if x.dim() else 1 for x in operands)])
    return widest * torch.empty(0, dtype=dtype).element_size()


def _sweep(graph: Graph, kinds: str, program: Program, operands, wanted, given: _Given, side: str, grads) -> None:
    """Fill `grads` of the `wanted` operands. Row sums are of `graph`, whose rows are the original's `side`; those for
    operands of kind "u" are scattered."""
    if not any(wanted):
        return
    for i, operand in enumerate(operands):
        if wanted[i]:
            grads[i] = torch.zeros_like(operand, memory_format=torch.contiguous_format)
    extreme = given.reduce in ("max", "min")
    scattering = any(w and k == "u" for w, k in zip(wanted, kinds, strict=True))
    features = [given.grad, given.kept]
    kind = "e" if given.reduce is None else side
    for block in blocks_of(graph, _width(given.grad.shape[1:], given.grad.dtype, operands)):
        values, ids = _values(graph, block, operands, kinds)
        if extreme and scattering:
            g = _of_winners(given, block)
        else:
            (g, kept), _ = _values(graph, block, features, kind + ("c" if given.kept is None else kind))
        leaves = [v.detach().requires_grad_() if w else v for v, w in zip(values, wanted, strict=True)]
        with torch.enable_grad():
            message = (_evaluate if given.reduce == "logsumexp" else _unread)(program, leaves)
        if given.reduce == "logsumexp":
            g = g * (message.detach() - kept).exp()
        elif extreme and not scattering:
            edges = _edges(graph, block, ids)
            g = torch.where(kept == edges.view(-1, *(1,) * (kept.dim() - 1)), g, 0)
        asked = [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]
        parts = iter(torch.autograd.grad(message, asked, g.to(message.dtype), allow_unused=True))
        for i, kind_ in enumerate(kinds):
            part = next(parts) if wanted[i] else None
            if part is None:
                continue
            if kind_ == "v":
                grads[i][block.rows] += _segments(graph, block, part)
            elif kind_ == "u":
                grads[i].index_add_(0, graph.indices[block.edges].long(), part)
            elif kind_ == "e":
                grads[i][block.edges if ids is None else ids] += part
            else:
                grads[i] += part


def _of_winners(given: _Given, block: Block) -> Tensor:
    """The gradient of each message of a block, 0 but for the extrema."""
    grad, whose = given.grad[block.rows], given.kept[block.rows] - block.edges.start  # type: ignore[index]
    out = grad.new_zeros(block.edges.stop - block.edges.start, *grad.shape[1:])
    has = whose.flatten(1)[:, :1].squeeze(1) >= 0 if whose[0].numel() else whose.new_zeros(len(whose)).bool()
    if not bool(has.all()):  # rows without edges
        grad, whose = grad[has], whose[has]
    return out.scatter_(0, whose.long(), grad)


def _plain_backward(graph, program, reduce, operands, needs, grad) -> Iterator[Tensor | None]:
    """The gradients as functions of everything, differentiable in grad mode."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        return _differentiated(graph, program, reduce, operands, needs, grad, again)


def _differentiated(graph, program, reduce, operands, needs, grad, again) -> Iterator[Tensor | None]:
    operands = [x.view_as(x) for x in operands]  # one tensor may be several operands: each gets its own gradient
    lifted = []
    for operand, kind in zip(operands, program.kinds, strict=True):
        lifted.append(ops.sddmm(graph, operand, None, "copy_lhs", kind) if kind in "uv" else operand)
    message = _evaluate(program, lifted)
    out = message
    if reduce == "logsumexp":
        out = _plain_logsumexp(graph, message)
    elif reduce is not None:
        out = call(ops.spmm, graph, None, message, "copy_rhs", reduce)
    asked = [x for x, n in zip(operands, needs, strict=True) if n]
    found = iter(torch.autograd.grad(out, asked, grad, create_graph=again, allow_unused=True))
    return (next(found) if n else None for n in needs)


def _plain_logsumexp(graph: Graph, message: Tensor) -> Tensor:
    top = call(ops.spmm, graph, None, message.detach(), "copy_rhs", "max")
    shifted = message - ops.sddmm(graph, top, None, "copy_lhs", "v")
    return top + ops.spmm(graph, None, shifted.exp(), "copy_rhs").clamp_min(1e-38).log()


def are_large(graph: Graph, expression: Expression, costly: bool = False) -> bool:
    """True if the rows of an expression, or of a part of it, are more than to be stored; costly: they are to make."""
    most = bounds.STORED_COSTLY_BYTES if costly or _has_map(expression) else bounds.STORED_BYTES
    return _widest(expression) * graph.nnz > most.get(graph.device.type, 0)


def _has_map(expression) -> bool:
    parts = expression.args if isinstance(expression, Apply) else ()
    return isinstance(expression, Apply) and (expression.function in LINEAR or any(map(_has_map, parts)))


def _widest(expression: Expression) -> int:
    """Bytes of an edge's row of the widest part."""
    parts = [arg for arg in expression.args if isinstance(arg, Apply)] if isinstance(expression, Apply) else []
    return max([math.prod(expression.features) * expression.dtype.itemsize, *map(_widest, parts)])


def not_stored(graph: Graph, expression: Expression, costly: bool = False) -> bool:
    """True if the rows of an expression are better made again than stored: large ones, on CUDA what programs make."""
    return are_large(graph, expression, costly) or (
        graph.indptr.is_cuda and programs.translated(graph, expression) is not None
    )


def with_maps_stored(graph: Graph, *expressions: Expression) -> tuple:
    """Expressions with rows for their linear maps of edges, which no walk makes, and for what is mapped."""
    for expression in expressions:
        _store_maps(graph, expression)
    done: dict[int, Any] = {}
    return tuple(_with_stored(expression, done) for expression in expressions)


def _store_maps(graph: Graph, expression) -> None:
    if not isinstance(expression, Apply) or expression.stored is not None or not _has_map(expression):
        return
    for arg in expression.args:
        _store_maps(graph, arg)
    if expression.function in LINEAR and expression.function is not mapped:
        inner, *others = expression.args
        if inner.stored is None:
            walks = widest_rows(graph, inner) >= bounds.WAITS_WITH_ROWS[graph.device.type]
            inner.store((rows_of if walks else gathered)(graph, _with_stored(inner, {})))
        with without_autocast(graph.device):
            expression.store(expression.function(inner.stored, *others, **expression.kwargs))


def _with_stored(expression, done: dict[int, Any]):
    if not isinstance(expression, Apply):
        return expression
    found = done.get(id(expression))
    if found is None:
        if expression.stored is not None:
            found = own(expression.stored)
        elif any(isinstance(arg, Apply) for arg in expression.args):
            args = tuple(_with_stored(arg, done) for arg in expression.args)
            same = all(a is b for a, b in zip(args, expression.args, strict=True))
            found = expression if same else replace(expression, args=args, versions=())
        else:
            found = expression
        done[id(expression)] = found
    return found


def rows_of(graph: Graph, expression) -> Tensor:
    """The rows of an expression, by walks that make all but its linear maps at once, if there is more to make than what
    a kernel of its own does."""
    if not isinstance(expression, Apply):
        return gathered(graph, expression) if isinstance(expression, Leaf) else expression
    parts = [arg for arg in expression.args if isinstance(arg, Apply)]
    if not parts or not reads_nodes(expression):
        return gathered(graph, expression)
    (expression,) = with_maps_stored(graph, expression)
    if not reads_nodes(expression):
        return gathered(graph, expression)
    if (product := dot(graph, expression)) is not None:
        return product
    found = programs.reduced(graph, expression, "none")
    if found is not None:
        return found[0]
    args = [rows_of(graph, arg) if isinstance(arg, (Leaf, Apply)) else arg for arg in expression.args]
    with without_autocast(graph.device):
        return expression.function(*args, **expression.kwargs)


def narrowed(graph: Graph, expression):
    """An expression with what is narrow in it, and softmaxes over edges, stored: a tensor if it is itself."""
    if not isinstance(expression, Apply) or not expression.late:
        return expression
    if math.prod(expression.features) <= bounds.STORED_FEATURES and not has_softmax(expression):
        return rows_of(graph, expression)
    args = tuple(narrowed(graph, arg) for arg in expression.args)
    if expression.function is softmaxed:
        return call(ops.edge_softmax, graph, rows_of(graph, args[0]))
    if not any(isinstance(arg, (Leaf, Apply)) for arg in args):
        with without_autocast(graph.device):
            return expression.function(*args, **expression.kwargs)
    inner = replace(expression, args=args, versions=())
    if math.prod(expression.features) > bounds.STORED_FEATURES or not inner.late:
        return inner
    return edge_values(graph, inner)


def edge_values(graph: Graph, expression: Expression) -> Tensor:
    """The rows of an expression, [E, ...] in edge-id order, without storing much that is wider on the way."""
    product = dot(graph, expression)
    if product is not None:
        return product
    if not isinstance(expression, Apply) or not any(_is_wide(arg, expression) for arg in expression.args):
        return gathered(graph, expression)
    if not not_stored(graph, expression):
        return gathered(graph, expression)
    found = programs.reduced(graph, expression, "none")
    if found is not None:
        return found[0]
    program, operands = compiled(graph, expression)
    return call(_Blocks.apply, graph, program, None, expression.features, expression.dtype, *operands)


def dot(graph: Graph, expression: Expression) -> Tensor | None:
    """The dot products of both ends' features, where an expression is these."""
    if not isinstance(expression, Apply) or expression.function is not torch.sum:
        return None
    inner = expression.args[0]
    if expression.kwargs["dim"] != (-1,) or not isinstance(inner, Apply) or inner.function is not torch.mul:
        return None
    ends = {a.side: a.value for a in inner.args if isinstance(a, Leaf)}
    if len(ends) != 2 or ends["u"].shape[1:] != ends["v"].shape[1:] or ends["u"].dtype != ends["v"].dtype:
        return None
    out = call(ops.sddmm, graph, ends["u"].to(expression.dtype), ends["v"].to(expression.dtype), "dot", "u", "v")
    return out if expression.kwargs["keepdim"] else out.squeeze(-1)


def _is_wide(arg, expression: Apply) -> bool:
    return isinstance(arg, Apply) and math.prod(arg.features) > math.prod(expression.features)


def edge_reduce(graph: Graph, expression: Expression, reduce: str) -> Tensor:
    """Reduce the rows of a large expression over the edges of each destination: [num_rows, ...].

    reduce : "sum", "mean", "max", "min" or "logsumexp". Rows without edges: 0 (for logsumexp: nothing reads them).
    """
    found = programs.logsumexp(graph, expression) if reduce == "logsumexp" else None
    if found is not None:
        return found
    program, operands = compiled(graph, expression)
    return call(_Blocks.apply, graph, program, reduce, expression.features, expression.dtype, *operands)
