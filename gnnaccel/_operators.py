"""Registration of ops with torch, and the short way into them.

An op registered with torch.library passes torch's dispatcher, which turns its arguments, a graph's arrays one by one,
into values of its own and back once per level (autograd, then the device): 0.1 ms a call from Python, more than the
kernels of a small graph take. So `register` returns a function that calls the implementation, or the derivative's
torch.autograd.Function, itself, and goes through the dispatcher where somebody listens there: torch.compile, tracing,
functorch, dispatch and function modes (but for a default device), torch.profiler, tensor subclasses, other devices. Not
for an ExecutionTraceObserver without a profiler, of which torch does not tell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gnnaccel import _timed, touch

_fragment = torch.library.Library("gnnaccel", "FRAGMENT")
_calls: dict[str, Callable] = {}  # what `register` returned, by the op's name
_ON_CPU = torch.device("cpu")  # which all ops serve
_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN: frozenset[type] = frozenset(
    {Tensor, torch.nn.Parameter, type(None), int, float, bool, str, tuple, list, torch.Size}
)


_unread_calls: list[tuple[list[Callable], Callable]] = []


def leave_unread() -> None:
    """For who has loaded torch._dynamo, which takes a second: have compiled autograd call the derivatives that are
    there without its warning that it cannot read them."""
    for called, backward in _unread_calls:
        called[0] = torch.compiler.disable(backward)
    _unread_calls.clear()


def is_added_up(ctx: Any) -> bool:
    """True in a `backward` that compiled autograd calls, which wants a tensor for each gradient that it has asked for,
    where autograd takes None for zero."""
    return not isinstance(ctx, torch.autograd.function.BackwardCFunction)


def _unread(backward: Callable) -> Callable:
    """`backward` of an autograd.Function, which compiled autograd calls instead of reading what is in it: kernels that
    are started by addresses, and calls that differentiate.

    Nor does it see the autocast of who calls it: kernels read gradients in the dtype of what they are gradients of, and
    a product of matrices within would be of another.
    """

    def unread(ctx, *grads):
        before = touch.set_eval_frame(None)
        try:
            return backward(ctx, *grads)
        finally:
            touch.set_eval_frame(before)

    called = [touch.unread(unread)]
    _unread_calls.append((called, backward))

    @functools.wraps(backward)
    def either(ctx, *grads):
        if torch.compiler.is_dynamo_compiling():
            return called[0](ctx, *grads)
        if touch.any_autocast():
            with touch.no_autocast():
                return backward(ctx, *grads)
        return backward(ctx, *grads)

    return either


class Function(torch.autograd.Function):
    """torch's, with a `backward` that compiled autograd may meet."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        cls.backward = staticmethod(_unread(cls.backward))  # type: ignore[method-assign]
        _timed.timed(cls)


def plain(
    args: tuple,
    features: Iterable[int] = (),
    devices: tuple[str, ...] = ("cpu", "cuda"),
    types: frozenset[type] = _PLAIN,
) -> bool:
    """True if kernels may run on `args`, the first of which has a device, behind the dispatcher's back.

    features : the positions of the tensors that may be lazy. types : those that arguments may have.
    """
    # In this order: torch.compile traces into this function, and knows the answer to the first question.
    if torch.compiler.is_compiling() or not types.issuperset(map(type, args)) or touch.watched():
        return False
    device = args[0].device
    if device != _ON_CPU and device.type not in devices:  # to be asked for its type takes a device longer
        return False
    for k in features:  # noqa: SIM110 - any() takes longer
        if _lazy(args[k]):
            return False
    return True


# Of ops that look up a graph when they run; older torch has no word for it, and would record them.
CAN_LOOK_UP = hasattr(torch.Tag, "cudagraph_unsafe")
_LOOKING_UP = (torch.Tag.cudagraph_unsafe,) if CAN_LOOK_UP else ()
_twins: list[Callable] = []  # what defines the twins of ops
_usual_keys: set[int] = set()  # torch's dispatch keys of tensors that `usual` takes,
_eager_keys: set[int] = set()  # and of those that are not `_lazy`


def usual(*tensors: Tensor) -> bool:
    """True for plain dense tensors whose memory is what they stand for, where nobody listens: kernels may read them.

    Looks once at each kind of tensor, as torch's dispatch keys tell them apart, and remembers the answer.
    """
    if torch.compiler.is_compiling() or touch.watched() or touch.in_forward_mode():
        return False
    for tensor in tensors:  # noqa: SIM110 - all() takes longer
        if not dense(tensor):
            return False
    return True


def waited_for(tensors: Iterable[Any]) -> bool:
    """True if one of them has hooks. Torch calls these with None where a node with several results has no gradient, as
    nothing was made of a result, and not at all where each result has its own node."""
    for x in tensors:  # noqa: SIM110 - any() takes longer
        if type(x) in _TENSORS and x._backward_hooks:
            return True
    return False


def nodes_of(results: dict[Any, Any], tensors: Callable[[Any], Iterable[Any]]) -> list[dict[Any, Any]]:
    """Which results are to be of one node of autograd: all of them; or each of its own, where one of the `tensors` that
    they are made of is `waited_for`."""
    if len(results) < 2:
        return [results] if results else []
    if torch.is_grad_enabled() and any(waited_for(tensors(each)) for each in results.values()):
        return [{name: each} for name, each in results.items()]
    return [results]


def dense(tensor: Tensor) -> bool:
    """`usual` of one tensor, where it is known that nobody listens."""
    if type(tensor) not in _TENSORS:
        return False
    keys = touch.keys(tensor)
    if keys not in _usual_keys:
        if tensor.layout is not torch.strided or not plain((tensor,), (0,)):
            return False
        _usual_keys.add(keys)
    return True


def _lazy(tensor: Any) -> bool:
    """True for a plain tensor whose memory is not what it stands for, or that has none: negated, one of torch's first
    batched ones (torch.autograd.grad with is_grads_batched), a zero of forward-mode derivatives, a functional one, one
    that a transform of torch.func has left behind. Of a list: if one of them is, or is no plain tensor."""
    if tensor is None:
        return False
    if type(tensor) is list:
        return any(type(t) not in _TENSORS or _lazy(t) for t in tensor)
    keys = touch.keys(tensor)  # which say all of that: each kind of tensor is asked once
    if keys in _eager_keys:
        return False
    lazy = touch.is_lazy(tensor)
    if not lazy:
        _eager_keys.add(keys)
    return lazy


def _unwrapped(value):
    if isinstance(value, list):
        return list(map(_unwrapped, value))
    return touch.unwrapped(value) if isinstance(value, Tensor) else value


def register(
    name: str,
    schema: str,
    impl: Callable,
    fake: Callable,
    *,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    structure: Any = None,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    looks_up: bool = False,
    found: Callable | None = None,
    check: Callable | None = None,
) -> Any:
    """Define op gnnaccel::`name`; returns the function to call it by.

    Parameters
    ----------
    name, schema : str
        The schema is in torch.library's words, without the name; arguments have no defaults.
    impl, fake : callable
        The implementation on all `devices`, and the one that only allocates.
    structure : type, optional
        Class of the first argument, a graph, which has no gradient (`gnnaccel.ops._arrays.Structure`). The dispatcher
        is given the two values of its flat(), which the schema names, and its of() makes it again from them. Where it
        has a `twin`, `define_twins` gives the op one of the name with "_of_edges" behind it, whose first argument is of
        the class twin.kind: twin.made() makes a `structure` of that when the implementation runs.
    backward, setup_context : callable, optional
        setup_context(ctx, inputs, output) as torch.library.register_autograd has it; backward(ctx, *grads) returns the
        gradients of the arguments after the structure, and ctx.wanted says which of these are asked for.
        register_autograd itself looks up the defaults of all arguments at every call, 0.1 ms for ours (torch 2.13).
    check : callable, optional
        Of the arguments of `impl`: raises for those by which kernels would read where nothing is. Called where the op
        is called by its registered name, torch.ops.gnnaccel.`name`; who calls what this returns has checked.
    looks_up : bool
        It looks up a graph when it runs, as all twins do: a replayed CUDA graph would not look again.
    found : callable, optional
        Asked first by compiled programs, with a plain tensor in front: what the op returns, or None if it is to run.
    """

    def checked(*args):
        if check is not None:
            check(*args)
        return impl(*args)

    twin, twin_kind = getattr(structure, "twin", None), None
    if twin is not None:
        twin_kind, both, sums = twin.kind, name.endswith("_backward"), name in ("spmm", "graph_conv")
        words = schema.replace(*twin.schemas)

        def made(described, *args):
            return checked(twin.made(described, both, args, sums), *args)

        options = {"devices": devices, "structure": twin_kind, "backward": backward, "setup_context": setup_context}
        _twins.append(lambda: register(f"{name}_of_edges", words, made, fake, **options))
    full = f"gnnaccel::{name}"
    graphs = 0 if structure is None else 1  # arguments that are one

    def packed(args: tuple) -> tuple:
        return (structure.of(*args[:2]), *args[2:]) if graphs else args

    def flat(args: tuple) -> tuple:
        return (*args[0].flat(), *args[1:]) if graphs else args

    looks_up |= structure is not None and twin is None
    torch.library.define(full, schema, tags=_LOOKING_UP if looks_up else ())
    torch.library.impl(full, tuple(device.upper() for device in devices))(lambda *args: checked(*packed(args)))
    torch.library.register_fake(full)(lambda *args: fake(*packed(args)))
    op = getattr(torch.ops.gnnaccel, name).default
    arguments = touch.schema_of(op).arguments
    features = [k - graphs for k in range(2 * graphs, len(arguments)) if "Tensor" in str(arguments[k].type)]

    def differentiable(forward: Callable) -> tuple[Any, Callable]:
        """The torch.autograd.Function of `forward`, and its apply() without what torch's does about torch.func."""

        def run(ctx, *args):
            output = forward(*args)
            ctx.wanted = ctx.needs_input_grad[graphs:]
            setup_context(ctx, args, output)  # type: ignore[misc]
            return output

        def back(ctx, *grads):
            found = backward(ctx, *grads)  # type: ignore[misc]
            return (None, *found) if graphs else found

        members = {"forward": staticmethod(run), "backward": staticmethod(back)}
        function = type(f"gnnaccel_{name}", (Function,), members)
        return function, super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def batched(info, in_dims, *args):
        """A batch of torch.func.vmap (and jacrev): one example after the other."""
        size, given = info.batch_size, list(args)
        along = [k for k, d in enumerate(in_dims) if isinstance(d, int)]  # of a list of numbers: a list
        examples = [args[k].movedim(in_dims[k], 0) for k in along]
        if size == 0:  # the shapes are those of an example
            examples = [t.new_zeros(1, *t.shape[1:]) for t in examples]
        outs = []
        for example in zip(*examples, strict=True):
            for k, tensor in zip(along, example, strict=True):
                given[k] = tensor
            outs.append(op(*given))
        if isinstance(outs[0], tuple):
            return tuple(torch.stack(parts)[:size] for parts in zip(*outs, strict=True)), (0,) * len(outs[0])
        return torch.stack(outs)[:size], 0

    lists = any(str(a.type) == "List[Tensor]" for a in arguments)  # of features: not to be batched one by one
    if hasattr(torch.library, "register_vmap") and not lists:  # torch 2.5
        torch.library.register_vmap(full, batched)

    def needs_grad(args: tuple) -> bool:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        return any(args[k] is not None and args[k].requires_grad for k in features)

    def refuse_tangents(args: tuple) -> None:
        given = [t for k in features for t in (args[k] if type(args[k]) is list else args[k : k + 1]) if t is not None]
        if any(map(touch.has_tangent, given)):
            raise NotImplementedError(
                f"{full}: has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); use reverse mode"
            )

    types = _PLAIN | {structure} if graphs else _PLAIN

    def together(args: tuple) -> bool:
        """True for tensors on one device: of others, as "meta", the dispatcher knows what is to be done."""
        device = args[0].device
        for k in features:  # noqa: SIM110 - all() takes longer
            if args[k] is not None and (type(args[k]) is list or args[k].device != device):
                return False
        return True

    def short(*args, **options):
        """What compiled programs call, by whose interpreter or code the dispatcher is asked: not where nobody listens
        there."""
        if not options and len(args) == len(arguments) and not torch.is_grad_enabled() and not touch.in_forward_mode():
            given = packed(args)
            if plain(given, features, devices, types) and together(given) and (not graphs or given[0].is_plain):
                return checked(*given)
        return dispatched_op(*args, **options)

    def shortest(*args):
        if type(args[0]) is Tensor and not touch.watched():
            out = found(*args)  # type: ignore[misc]
            if out is not None:
                return out
        return short(*args)

    dispatched_op = getattr(op, "_op", None)
    if dispatched_op is not None:  # what a call of the op calls: 19.5 us of a small spmm become 14.7 (torch 2.13)
        op._op = short if found is None else shortest

    if backward is not None:

        def below(*args):
            refuse_tangents(args)
            with touch.below_autograd():
                return op(*flat(args))

        def recorded(*args):
            if not touch.sees_transforms():
                return below(*args)
            # Function.apply() switches off what the levels below this one record as well.
            with torch.enable_grad(), touch.record_forward(True):
                return below(*args)

        function, record = differentiable(recorded)
        _, direct = differentiable(impl)  # of tensors that torch.func has nothing to do with

        def dispatched(args):
            if not touch.sees_transforms():
                return function.apply(*args)
            # torch.func calls kernels of "Autograd" once per level, with the tensors of that level: what they record is
            # right as it is, where Function.apply() would hand it to the transform once more. Wrappers die with their
            # level, and have nothing to say of integers.
            if graphs:
                args = (structure.of(*map(_unwrapped, args[0].flat())), *args[1:])
            with touch.single_level():
                return record(*args)

        def autograd(*args):
            args = packed(args)
            if needs_grad(args):
                return dispatched(args)
            # What compiled programs call: back through the dispatcher it would take several times as long.
            if not touch.in_forward_mode() and together(args) and plain(args, features, devices, types):
                return checked(*args)
            return below(*args)

        _fragment.impl(name, autograd, "Autograd")

    def call(*args):
        if not plain(args, features, devices, types) or (graphs and not args[0].is_plain):
            if twin_kind is not None and type(args[0]) is twin_kind:
                return _calls[f"{name}_of_edges"](*args)
            return op(*flat(args))
        if touch.in_forward_mode():
            refuse_tangents(args)
        if backward is not None and needs_grad(args):
            return direct(*args)
        return impl(*args)

    call.impl = impl  # type: ignore[attr-defined]  # for who has checked, and records for himself
    _calls[name] = call
    return call


def define_twins() -> None:
    """Define the twins of all ops, for who compiles: not on import, as torch takes 4 ms for an op."""
    waiting, _twins[:] = _twins[:], []
    for define in waiting:
        define()


def named(name: str) -> Callable:
    """What `register` returned for op gnnaccel::`name`, asked for when it is called: ops that are each other's
    derivatives find each other so, whichever module comes first."""
    return _calls[name]
