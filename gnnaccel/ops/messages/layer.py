"""Programs that reduce over edges inside, on graphs: one autograd node runs a plan, and the plan of the derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnnaccel import _operators, touch
from gnnaccel.ops import _arrays, reference
from gnnaccel.ops._arrays import Structure, needs_grad
from gnnaccel.ops.messages.plan import plan_of
from gnnaccel.ops.messages.walks import dispatched, walk
from gnnaccel.program.layers import derivative, kept_values
from gnnaccel.program.program import Program

_Kept = tuple[tuple[str, int], ...]


def layer(arrays: Structure, program: Program, operands: list[Tensor], dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    """The outputs of a program of dtypes, one operand for each of its leaves; differentiable.

    arrays : with the reversed edges, where the program reads sources and gradients are recorded.
    """
    run = walk if _operators.usual(*operands) else dispatched
    if needs_grad(*operands):
        return list(_record(run, arrays, program, dtypes, *operands))
    return _run(run, arrays, program, operands, dtypes, ())[0]


def _run(
    run: Callable, arrays: Structure, program: Program, operands: Sequence[Tensor], dtypes: tuple, keep: _Kept
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and what is to be kept."""
    wide = torch.float64 if any(x.dtype == torch.float64 for x in operands) else torch.float32
    plan = plan_of(program, not arrays.indptr.is_cuda, tuple(x.element_size() for x in operands), keep)
    slots: list[Tensor | None] = [*operands, *[None] * (plan.slots - len(operands))]
    for action in plan.actions:
        given = [slots[i] for i in action.operands]
        kinds = tuple(wide if n < 0 else dtypes[n] for n in action.outputs)
        if action.of_rows:
            outs = _rows(arrays, action.program, given, kinds, wide)  # type: ignore[arg-type]
        else:
            outs = run(arrays.transposed() if action.reversed else arrays, action.program, given, kinds)
        for place, out in zip(action.results, outs, strict=False):  # argmax is behind them
            slots[place] = out
    found = [slots[at] for at in plan.outputs]
    return (
        [out if out.dtype == dtype else out.to(dtype) for out, dtype in zip(found, dtypes, strict=True)],  # type: ignore
        [slots[at] for at in plan.kept],  # type: ignore[misc]
    )


def _rows(
    arrays: Structure, program: Program, operands: list[Tensor], dtypes: tuple, wide: torch.dtype
) -> list[Tensor]:
    """The values of destinations that a program is of."""
    values: list[Tensor] = []
    for step in program.steps:
        if step.op == "leaf":
            leaf, operand = program.leaves[step.numbers[0]], operands[step.numbers[0]].to(wide)
            value = operand.expand(arrays.num_rows, *leaf.features) if leaf.kind == "c" else operand
        else:
            value = reference.message_step(step, [values[a] for a in step.args], arrays)
        shape = (arrays.num_rows, *step.features)
        values.append(value if value.shape == shape else value.expand(shape))
    return [values[output.step].to(dtype) for output, dtype in zip(program.outputs, dtypes, strict=True)]


def _read_back(program: Program, wanted: tuple[bool, ...]) -> _Kept:
    """What the derivative reads of the `kept_values`."""
    known = kept_values(program)
    first = len(program.leaves) + len(program.outputs)
    found = derivative(program, wanted, (True,) * len(program.outputs), True)
    return tuple(known[i - first] for i in found.operands if i >= first)


class _Layer(_operators.Function):
    """A program.

    Results that the derivative reads are the caller's to write into: then they are made again.
    """

    @staticmethod
    def forward(ctx, run, arrays, program, dtypes, *operands):
        keep = _read_back(program, ctx.needs_input_grad[4:])
        outs, kept = _run(run, arrays, program, operands, dtypes, keep)
        outs = [
            out.clone() if touch.base_of(out) is not None else out for out in outs
        ]  # views could not be written into
        ctx.program, ctx.keep, ctx.dtypes = program, keep, dtypes
        results = [t.detach() for (what, _), t in zip(keep, kept, strict=True) if what == "out"]
        ctx.results = [(t, t._version if not t.is_inference() else 0) for t in results]
        _arrays.save(ctx, arrays, *operands, *(t for (what, _), t in zip(keep, kept, strict=True) if what == "over"))
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        arrays, saved = _arrays.saved(ctx)
        program: Program = ctx.program
        operands, over = list(saved[: len(program.leaves)]), iter(saved[len(program.leaves) :])
        wanted, again = tuple(ctx.needs_input_grad[4:]), torch.is_grad_enabled()
        if any(g is not None and touch.is_batched(g) for g in grads):
            return None, None, None, None, *reference.message_gradients(arrays, program, operands, wanted, grads)
        made = derivative(program, wanted, tuple(g is not None for g in grads), not again)
        pool: list[Tensor | None] = [*operands, *grads]
        if not again:
            if any(t._version != version for t, version in ctx.results):
                run = walk if _operators.usual(*operands) else dispatched
                kept = dict(zip(ctx.keep, _run(run, arrays, program, operands, ctx.dtypes, ctx.keep)[1], strict=True))
            else:
                results = iter(t for t, _ in ctx.results)
                kept = {each: next(over if each[0] == "over" else results) for each in ctx.keep}
            pool += [kept.get(each) for each in kept_values(program)]
        given = [pool[i] for i in made.operands]
        dtypes = tuple(operands[i].dtype for i in made.targets)
        outs = layer(arrays, made.program, given, dtypes)  # type: ignore[arg-type]
        found: list[Tensor | None] = [None] * len(operands)
        for i, out in zip(made.targets, outs, strict=True):
            found[i] = out.sum(0).reshape(operands[i].shape) if program.leaves[i].kind == "c" else out
        for i, operand in enumerate(operands):
            if wanted[i] and found[i] is None:
                found[i] = torch.zeros_like(operand)
        return None, None, None, None, *found


# Without Function.apply()'s wrapper, which looks for transforms of torch.func: there are none where this is called.
_record = super(torch.autograd.Function, _Layer).apply  # type: ignore[misc]
