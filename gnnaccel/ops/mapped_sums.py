"""Layers whose messages are elementwise functions of linear maps, as one node of autograd on the CPU.

Maps that messages read are made one by one, and the gradients to them go into those to features and weights one by one.
What a node has of its own is made in blocks of rows, forward and backward again, so that it is never there as a whole;
nor is a gradient that is the result's times the degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gnnaccel import _operators, report, touch
from gnnaccel.graph.csr import Graph
from gnnaccel.graph.modes import are_hooked
from gnnaccel.lower import bounds
from gnnaccel.ops import _arrays
from gnnaccel.ops._arrays import Structure, arrays_of
from gnnaccel.ops._bias import column_sums
from gnnaccel.ops.joined_sums import DTYPES, WRITTEN, Parts, are_maps, composed, degrees, fits, versions, wide
from gnnaccel.ops.messages import is_fused
from gnnaccel.ops.messages.reduce import gradients_of, walk
from gnnaccel.program.derivatives import Ahead, ahead, constant_factors, gradients
from gnnaccel.program.program import Program, program_of


def mapped_sum(
    graph: Graph, x: Tensor, maps: Sequence[tuple[Tensor, Tensor | None]], num_feats: int, form: Parts
) -> Tensor | None:
    """`joined_sums.joined_sum` on the CPU, of maps alone.

    Parameters
    ----------
    graph : Graph
        As many rows as columns.
    x : Tensor [num_rows, F]
        float32, float64, bfloat16.
    maps : sequence of (Tensor, Tensor or None)
        Weights [D, F] and biases [D] that give the form's parts one after another, D a multiple of num_feats.
    num_feats : int
    form : Parts

    Returns
    -------
    Tensor [num_rows, num_feats], or None where the ops are to be called one by one: nothing has been done then.
    """
    parameters = [p for pair in maps for p in pair]
    if not maps or not x.is_cpu or x.dtype not in DTYPES or not is_fused(graph) or not fits(graph, x, num_feats):
        return None
    if not are_maps(x, maps, num_feats, form):
        return None
    given = [t for t in (x, *parameters) if t is not None]
    if not _operators.usual(*given) or any(t.dtype != x.dtype or not t.is_cpu for t in given):
        return None
    if report.timing:
        report.message(f"{form.reduce} of {form.message}")
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    arrays = arrays_of(graph, keep, listed=False)
    again = partial(composed, graph, form, num_feats)
    return _mapped(arrays, again, _Maps(form, num_feats), keep, x, *parameters)


class _Maps:
    """Where the parts of a form lie in its parameters: weights and biases by turns."""

    def __init__(self, form: Parts, num_feats: int):
        self.form, self.width = form, num_feats
        self.message = [name for name in form.names if any(leaf[1] == name for leaf in form.message.leaves)]
        self.own = [name for name in form.names if name not in self.message]
        shapes = tuple((leaf, (num_feats,)) for leaf in form.message.leaves)
        self.program: Program
        self.program, leaves = program_of(((form.message, form.reduce),), shapes)
        self.leaves = [name for _, name in leaves]

    def places(self, parameters: Sequence[Tensor | None]) -> dict[str, tuple[int, slice]]:
        """The number of each part's weight, and its rows of that."""
        found: dict[str, tuple[int, slice]] = {}
        names = iter(self.form.names)
        for number, weight in enumerate(parameters[::2]):
            for start in range(0, 0 if weight is None else weight.shape[0], self.width):
                found[next(names)] = (2 * number, slice(start, start + self.width))
        return found


def _of_part(parameters: Sequence[Tensor | None], place: tuple[int, slice]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a part."""
    number, rows = place
    weight, bias = parameters[number : number + 2]
    assert weight is not None
    return weight[rows], None if bias is None else bias[rows]


def _blocks(num_rows: int, times: int = 1) -> Iterator[slice]:
    """`times` : larger blocks, for what needs little room: threads meet less often."""
    size = times * bounds.MAPPED_SUM_ROWS
    return (slice(start, start + size) for start in range(0, num_rows, size))


class _Sums:
    """The gradients that the layer's inputs have: sums over parts and blocks of rows."""

    def __init__(self, x: Tensor, parameters: Sequence[Tensor | None], values: list, wanted: Sequence[bool]):
        self.x, self.values = x, values  # of those parameters that are read
        self.of_x: Tensor | None = None
        self.room: Tensor | None = None  # for that
        self.of_x_wanted, *of_parameters = wanted
        self.of_parameters = [
            torch.zeros_like(p, dtype=wide(x)) if p is not None and asked else None
            for p, asked in zip(parameters, of_parameters, strict=True)
        ]

    def add(self, place: tuple[int, slice], grad: Tensor, rows: slice | None = None, own: bool = False) -> None:
        """With the gradient to a part, or to some rows of it. own : nobody else reads it."""
        number, columns = place
        x = self.x if rows is None else self.x[rows]
        of_weight, of_bias = self.of_parameters[number : number + 2]
        if of_weight is not None:
            of_weight[columns] += grad.t().mm(x)
        if of_bias is not None:
            of_bias[columns] += column_sums(grad, of_bias.dtype)
        if not self.of_x_wanted:
            return
        weight = self.values[number][columns]
        if self.of_x is None and rows is None and own and self.room is None and grad.shape == self.x.shape:
            for block in _blocks(len(grad), 2):
                grad[block] = grad[block].mm(weight)
            self.of_x = grad
            return
        if self.of_x is None and rows is None:
            self.of_x = grad.mm(weight) if self.room is None else torch.mm(grad, weight, out=self.room)
            return
        if self.of_x is None:
            self.of_x = torch.zeros_like(self.x)
        (self.of_x if rows is None else self.of_x[rows]).addmm_(grad, weight)

    def found(self) -> tuple[Tensor | None, ...]:
        return self.of_x, *(None if total is None else total.to(self.x.dtype) for total in self.of_parameters)


class _Mapped(_operators.Function):
    @staticmethod
    def forward(ctx, arrays: Structure, again: Callable, maps: _Maps, keep: bool, x, *parameters):
        form, places = maps.form, maps.places(parameters)
        of_x, *of_parameters = ctx.needs_input_grad[4:] if keep else (False,) * (1 + len(parameters))
        wanted = tuple(of_x or any(of_parameters[n : n + 2]) for n, _ in map(places.__getitem__, maps.leaves))
        parts = {name: F.linear(x, *_of_part(parameters, places[name])) for name in maps.message}
        operands = [parts.pop(name) if maps.leaves.count(name) == 1 else parts[name] for name in maps.leaves]
        early = ahead(maps.program, wanted) if any(wanted) else None
        made, dtypes = (maps.program, ()) if early is None else (early.program, (wide(x),) * len(early.targets))
        out, *kept = walk(arrays, made, operands, (x.dtype, *dtypes), positions=False)
        if form.own_of is not None:
            for rows in _blocks(x.shape[0]):
                own = {name: F.linear(x[rows], *_of_part(parameters, places[name])) for name in maps.own}
                out[rows] += form.own_of(own)
        if keep:
            numbers = {i: n for i, n in constant_factors(maps.program).items() if wanted[i]}
            left = _left(wanted, early, numbers)
            halves = [half for half in gradients(maps.program, left, (True,)) if half is not None]
            read = {i for half in halves for i in half.operands}
            ctx.arrays, ctx.again, ctx.maps, ctx.early, ctx.wanted = arrays, again, maps, early, left
            ctx.numbers = numbers if early is None else {}
            # Parameters that no first derivative reads may be written into.
            ctx.parameters, ctx.versions, ctx.hooked = parameters, versions(parameters), are_hooked()
            recomputed = [] if _is_part(form) else [places[name][0] for name in maps.own]
            needed = [(of_x and i % 2 == 0) or i - i % 2 in recomputed for i in range(len(parameters))]
            ctx.save_for_backward(
                x,
                *(p if asked else None for p, asked in zip(parameters, needed, strict=True)),
                *(operand if i in read else None for i, operand in enumerate(operands)),
                *kept,
            )
        return out

    @staticmethod
    def backward(ctx, grad):
        maps, early, form, parameters = ctx.maps, ctx.early, ctx.maps.form, ctx.parameters
        of_x, *of_parameters = ctx.needs_input_grad[4:]
        x, *saved = ctx.saved_tensors
        if torch.is_grad_enabled() or not _operators.usual(grad):
            if versions(parameters) != ctx.versions:
                raise RuntimeError(WRITTEN)
            wanted = (of_x, False, False, *of_parameters)
            found = _arrays.gradients(ctx.again, (x, None, None, *parameters), wanted, grad)
            return *(None,) * 4, found[0], *found[3:]
        behind = len(parameters) + len(maps.leaves)
        values, operands, kept = saved[: len(parameters)], saved[len(parameters) : behind], saved[behind:]
        grad = grad.contiguous()
        is_last = not ctx.hooked and not touch.keeps_graph(unknown=True)  # nobody reads again what was saved
        places = maps.places(parameters)
        sums = _Sums(x, parameters, values, (of_x, *of_parameters))
        scaled = grad / degrees(ctx.arrays, grad, least=1) if form.reduce == "mean" else grad
        absent = x.new_empty(()).expand(x.shape[0], maps.width)  # stands for operands that no gradient reads
        operands = [absent if operand is None else operand for operand in operands]
        for kinds in ("v", "u"):  # one walk, and then the other: what they give is not there at the same time
            asked = tuple(w and leaf.kind in kinds for w, leaf in zip(ctx.wanted, maps.program.leaves, strict=True))
            if not any(asked):
                continue
            of_leaves = gradients_of(ctx.arrays, maps.program, operands, asked, [scaled], (True,))
            if kinds == "u" and is_last:
                sums.room = next((t for t in operands if t.shape == x.shape and t.is_contiguous()), None)
            for i in reversed(range(len(of_leaves))):
                if asked[i]:
                    sums.add(places[maps.leaves[i]], of_leaves[i], own=True)
                of_leaves[i] = None
        for (leaf, *_), factor in zip(() if early is None else early.targets, kept, strict=True):
            own = factor.dtype == x.dtype and is_last
            part = torch.mul(scaled, factor, out=factor) if own else (scaled * factor).to(x.dtype)
            sums.add(places[maps.leaves[leaf]], part)
        for leaf, number in ctx.numbers.items():
            counts = degrees(ctx.arrays, grad, least=0)
            for rows in _blocks(len(grad), 2):
                part = (scaled[rows] * (number * counts[rows])).to(x.dtype)
                sums.add(places[maps.leaves[leaf]], part, rows)
        if form.own_of is not None:
            _add_own(sums, maps, places, grad)
        return *(None,) * 4, *sums.found()


def _left(wanted: tuple[bool, ...], early: Ahead | None, numbers: dict[int, float]) -> tuple[bool, ...]:
    """The leaves whose gradients the backward pass walks for."""
    done = [*numbers] if early is None else [leaf for leaf, *_ in early.targets]
    return tuple(asked and i not in done for i, asked in enumerate(wanted))


def _is_part(form: Parts) -> bool:
    """True if what is added is a part as it is, or nothing: its gradient is that of the result."""
    return form.own is None or form.own.function == "leaf"


def _add_own(sums: _Sums, maps: _Maps, places: dict[str, tuple[int, slice]], grad: Tensor) -> None:
    """The gradients through what a node has of its own."""
    if _is_part(maps.form):
        return sums.add(places[maps.own[0]], grad)
    for rows in _blocks(grad.shape[0]):
        made = {name: F.linear(sums.x[rows], *_of_part(sums.values, places[name])) for name in maps.own}
        with torch.enable_grad():
            made = {name: part.detach().requires_grad_() for name, part in made.items()}
            out = maps.form.own_of(made)  # type: ignore[misc]
        parts = torch.autograd.grad(out, list(made.values()), grad[rows])
        for name, part in zip(maps.own, parts, strict=True):
            sums.add(places[name], part, rows)
    return None


# Without Function.apply()'s wrapper, as in layers.py.
_mapped = super(torch.autograd.Function, _Mapped).apply  # type: ignore[misc]
