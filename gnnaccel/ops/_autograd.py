"""Registration of derivatives."""

from __future__ import annotations

from collections.abc import Callable

import torch

_library = torch.library.Library("gnnaccel", "FRAGMENT")


def register(name: str, backward: Callable, setup_context: Callable) -> None:
    """Give op gnnaccel::`name` a derivative: ``torch.library.register_autograd`` without its cost.

    That one looks up the defaults of all arguments at every call, 0.1 ms for ours (torch 2.13): more than many calls
    on a small graph take. Ours have no defaults. setup_context(ctx, inputs, output), backward(ctx, *grads) as there.
    """
    op = getattr(torch.ops.gnnaccel, name).default
    tensors = [k for k, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]

    def below(args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    def forward(ctx, *args):
        output = below(args)
        setup_context(ctx, args, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(f"gnnaccel_{name}", (torch.autograd.Function,), members)

    def autograd(*args):
        if torch.is_grad_enabled():
            for k in tensors:
                if args[k] is not None and args[k].requires_grad:
                    return function.apply(*args)  # type: ignore[attr-defined]
        return below(args)

    _library.impl(name, autograd, "Autograd")
