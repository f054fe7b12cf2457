"""What gnnaccel asks of torch by private names: each is looked up here, once, on import, and nowhere else.

Private names come and go with torch's versions. Where one is gone, another way to the same answer takes its place,
slower or more careful: `MISSING` says which. One without which nothing can be right raises ImportError, in words.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules import module as _modules
from torch.utils._device import DeviceContext

with contextlib.suppress(ImportError):
    import torch._functorch.utils

MISSING: dict[str, str] = {}
"""Private names that this torch has not -> what gnnaccel does without."""


NAMES: set[str] = set()
"""All that were looked for."""
NEEDED: set[str] = set()
"""Those of them without which there is no other way."""


def _find(path: str, instead: Any, words: str, since: str = "0") -> Any:
    """torch.`path`, or `instead`, which `words` describes. A torch older than `since` is not said to miss it."""
    NAMES.add(f"torch.{path}")
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        if torch.__version__ >= since:
            MISSING[f"torch.{path}"] = words
        return instead


def _read(example: Any, path: str, get: Callable, instead: Callable, words: str) -> Callable:
    """`get`, which reads attributes that instances have and no class; `instead` where `example` lacks one. `path` ends
    with their names, a blank between two."""
    NAMES.add(f"torch.{path}")
    if all(hasattr(example, name) for name in path.rpartition(".")[2].split()):
        return get
    MISSING[f"torch.{path}"] = words
    return instead


def _need(path: str) -> Any:
    """torch.`path`."""
    NEEDED.add(path)
    found = _find(path, None, "nothing: it is needed")
    if found is None:
        raise ImportError(f"torch {torch.__version__} has no torch.{path}, without which gnnaccel cannot run")
    return found


# ---- subclasses of Tensor, and what autograd does below them

plain_functions: Any = _need("_C.DisableTorchFunctionSubclass")
"""A context in which functions of torch treat our subclasses of Tensor as ordinary ones."""
no_functions: Any = _find("_C.DisableTorchFunction", plain_functions, "recording random numbers costs records")
"""A context in which nobody sees functions of torch, modes neither."""
functions_are_overridden = _find("_C._is_torch_function_enabled", None, "layers' calls are not made again from records")
"""() -> False in `plain_functions`."""
_GETTERS = ("_version", "_base", "grad_fn", "is_leaf", "requires_grad")
ASKED = {getattr(Tensor, name).__get__ for name in _GETTERS if hasattr(Tensor, name)}
ASKED |= {Tensor.data_ptr, Tensor.stride, Tensor.storage_offset, Tensor.is_inference, Tensor.is_contiguous}
ASKED |= {torch.result_type}
"""Functions that ask for none of a tensor's values, and give none."""
SWITCHING = frozenset(("_set_grad_enabled",))
"""Names of functions that torch's contexts are made of, and that are not of tensors."""
below_autograd: Any = _need("_C._AutoDispatchBelowAutograd")
"""A context in which ops run their kernels, and nothing is recorded."""

make_wrapper: Callable = _need("Tensor._make_wrapper_subclass")
"""A tensor of a subclass, without memory of its own."""

_use_count = _find("Tensor._use_count", None, "kept messages stay tensors of gnnaccel's own class")


def is_pythons_alone(tensor: Tensor) -> bool:
    """True if nothing but Python's object refers to a tensor, so that it can become another."""
    return _use_count is not None and _use_count(tensor) == 1


_top_mode = _find("overrides._get_current_function_mode", None, "modules inside of others are seen twice")
_pop_mode = _find("overrides._pop_mode_temporarily", None, "modules inside of others are seen twice")


def out_of(mode: Any) -> contextlib.AbstractContextManager:
    """A context without a mode of torch functions, if that is the top one."""
    known = mode is not None and _pop_mode is not None and _top_mode is not None
    return _pop_mode() if known and _top_mode() is mode else contextlib.nullcontext()


def scripted(value: Any) -> Callable | None:
    """The function of Python that one of torch.jit.script's was made of; None for any other thing, and where this torch
    does not keep it."""
    return getattr(value, "_torchdynamo_inline", None) if isinstance(value, torch.jit.ScriptFunction) else None


# ---- transforms of torch.func, forward-mode derivatives, traces

_active = _find("_C._are_functorch_transforms_active", None, "it asks for the top transform")
_top = _find("_C._functorch.peek_interpreter_stack", None, "it asks whether any transform is active")
if _active is None and _top is None:
    _need("_C._functorch.peek_interpreter_stack")
transforming: Callable[[], bool] = _active if _top is None else lambda: _top() is not None
"""True inside a transform of torch.func, which wraps the tensors that are made in it."""
sees_transforms: Callable[[], bool] = _active or transforming
"""True where torch's dispatcher hands calls to such a transform first."""

_is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", None, "all tensors in a transform count")
is_wrapped: Callable[[Any], bool] = _is_wrapped or (lambda tensor: transforming())
"""True for the wrapper of a transform's around a tensor."""
_is_tracked = _find("_C._functorch.is_gradtrackingtensor", lambda tensor: False, "no wrapper is taken off")
_inner = _find("_C._functorch.get_unwrapped", None, "no wrapper is taken off")
is_tracked: Callable[[Any], bool] = _is_tracked if _inner is not None else lambda tensor: False
"""True for the wrapper of a derivative of torch.func's around a tensor."""
_is_batched = _find("_C._functorch.is_batchedtensor", lambda tensor: is_wrapped(tensor), "wrapped ones count")
_is_old_batched = _find("_C._functorch.is_legacy_batchedtensor", lambda tensor: False, "there are none")
_is_functional = _find("_is_functional_tensor", lambda tensor: False, "there are none")
_is_zero = _find("Tensor._is_zerotensor", lambda tensor: False, "there are none")
single_level: Callable[[], Any] = _find(
    "_functorch.utils.enable_single_level_autograd_function", contextlib.nullcontext, "nothing"
)
record_forward: Callable[[bool], Any] = _find(
    "autograd.forward_ad._set_fwd_grad_enabled", lambda on: contextlib.nullcontext(), "nothing"
)
_need("autograd.forward_ad._current_level")  # a number that changes
_unpack_dual = _find(
    "_VF._unpack_dual", lambda tensor, level: forward_ad.unpack_dual(tensor, level=level), "it asks torch.autograd"
)


def levels(tensor: Any) -> Iterator[Any]:
    """What the wrappers of a tensor stand around, one after the other; nothing where that cannot be told."""
    while _is_wrapped is not None and _inner is not None and _is_wrapped(tensor):
        tensor = _inner(tensor)
        yield tensor


def unwrapped(tensor: Any) -> Any:
    """A tensor without the wrappers of torch.func's derivatives."""
    while is_tracked(tensor):
        tensor = _inner(tensor)
    return tensor


def is_batched(tensor: Any) -> bool:
    """True for many tensors in one, of vmap or of torch.autograd.grad with is_grads_batched."""
    return _is_batched(tensor) or _is_old_batched(tensor)


def is_lazy(tensor: Tensor) -> bool:
    """True for a tensor whose memory is not what it stands for, or that has none."""
    return (
        tensor.is_neg() or is_wrapped(tensor) or _is_old_batched(tensor) or _is_zero(tensor) or _is_functional(tensor)
    )


def in_forward_mode() -> bool:
    """True where forward-mode derivatives are taken."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    """True for a tensor with a forward-mode derivative."""
    return in_forward_mode() and _unpack_dual(tensor, level=0)[1] is not None


tracing: Callable[[], Any] = _find("_C._get_tracing_state", torch.jit.is_tracing, "it asks torch.jit")
"""Not None, or True, while torch.jit.trace runs."""

# ---- modes that see each call

_MODES = "calls go by torch's dispatcher, and nothing is captured"
_function_modes = _find("_C._len_torch_function_stack", None, _MODES)
_dispatch_modes = _find("_C._len_torch_dispatch_stack", None, _MODES)
_is_included = _find("_C._dispatch_tls_is_dispatch_key_included", None, _MODES)
_PRE_DISPATCH = _find("_C.DispatchKey.PreDispatch", None, _MODES)
_profiled = _find("autograd._profiler_enabled", None, _MODES)
_any_profiled = _find("autograd.profiler._is_profiler_enabled", None, _MODES)  # a flag that changes
_function_mode = _find("_C._get_function_stack_at", lambda place: None, "any mode counts")
_mode_key = _find("_C._TorchDispatchModeKey", None, "any dispatch mode counts")
_mode_of = _find("_C._get_dispatch_mode", None, "any dispatch mode counts")
IS_BLIND = None in (_function_modes, _dispatch_modes, _is_included, _PRE_DISPATCH, _profiled, _any_profiled)
"""Whether modes may be there that cannot be seen."""


BLIND_MODES: set[type] = {DeviceContext}
"""Classes of function modes to which calls of our ops mean nothing."""


def _is_watched() -> bool:
    if _function_modes() and not BLIND_MODES.issuperset(map(type, function_modes())):
        return True
    return (
        _dispatch_modes() > 0
        or _is_included(_PRE_DISPATCH)
        or (_top() is not None if _top is not None else transforming())
        or bool(tracing())
        or _profiled()  # of this thread
        or torch.autograd.profiler._is_profiler_enabled
    )


watched: Callable[[], bool] = (lambda: True) if IS_BLIND else _is_watched
"""True if calls of ops have to be visible to the dispatcher, or where that cannot be told."""


def function_modes() -> list[Any]:
    """The function modes that are on, the outermost first."""
    return [] if _function_modes is None else [_function_mode(place) for place in range(_function_modes())]


def in_dispatch_mode(kind: str | None = None) -> bool:
    """True under a dispatch mode: any, or torch's own of a kind ("FAKE", "PROXY")."""
    if _dispatch_modes is not None and not _dispatch_modes():
        return False
    if kind is None or _mode_key is None or _mode_of is None:
        return _dispatch_modes is not None
    return _mode_of(getattr(_mode_key, kind)) is not None


# ---- modules

_MODULE = torch.nn.Module()
submodules: Callable[[Any], Any] = _read(
    _MODULE,
    "nn.Module()._modules",
    lambda module: module._modules,
    lambda module: dict(module.named_children()),
    "it asks named_children()",
)
"""The submodules of a module by name; not to be written to."""
own_parameters: Callable[[Any], Any] = _read(
    _MODULE,
    "nn.Module()._parameters",
    lambda module: module._parameters,
    lambda module: dict(module.named_parameters(recurse=False, remove_duplicate=False)),
    "layers with a parameter that is None go the general way",
)
"""The parameters of a module itself by name; not to be written to."""
set_parameter: Callable[[Any, str, Tensor], None] = _read(
    _MODULE,
    "nn.Module()._parameters",
    lambda module, name, parameter: module._parameters.__setitem__(name, parameter),
    setattr,
    "it sets attributes",
)
"""Put another parameter in the place of one of a module's own."""
own_buffers: Callable[[Any], Any] = _read(
    _MODULE,
    "nn.Module()._buffers",
    lambda module: module._buffers,
    lambda module: dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    "layers with a buffer that is None go the general way",
)
"""The buffers of a module itself by name; not to be written to."""

_HOOKED = "it looks at each kind of hook"


def _has_any_hooks(module: Any) -> bool:
    return any(hooks for name, hooks in vars(module).items() if "hooks" in name)


has_forward_hooks: Callable[[Any], bool] = _read(
    _MODULE,
    "nn.Module()._forward_hooks _forward_pre_hooks",
    lambda module: bool(module._forward_hooks or module._forward_pre_hooks),
    _has_any_hooks,
    _HOOKED,
)
"""True if hooks see the calls of a module."""
has_backward_hooks: Callable[[Any], bool] = _read(
    _MODULE,
    "nn.Module()._backward_hooks _backward_pre_hooks",
    lambda module: bool(module._backward_hooks or module._backward_pre_hooks),
    _has_any_hooks,
    _HOOKED,
)
"""True if hooks see the derivatives of a module's calls."""


def _is_hooked(module: Any) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


is_hooked: Callable[[Any], bool] = _read(
    _MODULE,
    "nn.Module()._forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks",
    _is_hooked,
    lambda module: _has_any_hooks(module) or "forward" in vars(module),
    _HOOKED,
)
"""True if somebody sees or changes the calls of this very module."""

_CALLS = ("_wrapped_call_impl", "_call_impl")
PICKS, CALLS = (
    getattr(_find(f"nn.Module.{name}", None, "models are not captured in CUDA graphs"), "__code__", None)
    for name in _CALLS
)
"""Code of a module's call: what picks what is called, and what calls a module that is not compiled, with its hooks.
None where torch has it not."""


COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module that torch calls in its place: what torch.compile made of it, or we."""
_HAS_SLOT = _find(f"nn.Module.{COMPILED_CALL}", False, "models are not captured in CUDA graphs") is not False


def without_calls() -> str | None:
    """Why no module can be captured; None if nothing stands against it."""
    return f"torch {torch.__version__} calls modules otherwise" if None in (PICKS, CALLS) or not _HAS_SLOT else None


def call_plainly(module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    """Call a module as if it was not compiled."""
    return module.forward(*args, **kwargs) if CALLS is None else module._call_impl(*args, **kwargs)


def is_compiled(module: Any) -> bool:
    """True for what torch.compile() makes of a module."""
    return hasattr(module, "_orig_mod")


def is_replica(module: torch.nn.Module) -> bool:
    """True for what torch.nn.DataParallel makes of a module on another device."""
    return getattr(module, "_is_replica", False)


_find("nn.parallel.DistributedDataParallel._active_ddp_module", None, "a part inside of one is not told")  # it changes


def active_ddp() -> Any:
    """The DistributedDataParallel that is being called, or None."""
    return getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


norms: Any = _find(
    "nn.modules.batchnorm._NormBase",
    tuple(kind for name, kind in vars(torch.nn).items() if "BatchNorm" in name or "InstanceNorm" in name),
    "it knows torch.nn's own",
)
"""Class, or classes, of norms over rows."""

has_global_hooks: Callable[[], bool] = _find(
    "nn.modules.module._has_any_global_hook",
    lambda: any(hooks for name, hooks in vars(_modules).items() if name.startswith("_global_") and "hooks" in name),
    "it looks at each kind of hook",
)
"""True if somebody watches all modules."""
_GLOBAL = ("_global_backward_hooks", "_global_backward_pre_hooks")
_global_backward = [_find(f"nn.modules.module.{name}", None, "any hook on all modules counts") for name in _GLOBAL]


def has_global_backward_hooks() -> bool:
    """True if somebody watches the derivatives of all modules' calls."""
    return has_global_hooks() if None in _global_backward else any(_global_backward)


# ---- kinds of tensors

base_of: Callable[[Tensor], Tensor | None] = _read(
    Tensor, "Tensor._base", lambda tensor: tensor._base, lambda tensor: None, "views are taken for no views"
)
"""The tensor that this one is a view of, if any."""
nnz: Callable[[Tensor], int] = _find("Tensor._nnz", lambda matrix: _values(matrix).shape[0], "it counts the values")
"""How many entries a sparse matrix has."""
raw_values: Callable[[Tensor], Tensor] = _find("Tensor._values", Tensor.values, "it takes values() with a derivative")
"""Their values, without a derivative."""


def _values(matrix: Tensor) -> Tensor:
    return (matrix.coalesce() if matrix.layout is torch.sparse_coo else matrix).values()


new_shared: Callable[..., torch.UntypedStorage] = _find(
    "UntypedStorage._new_shared",
    lambda size, device: torch.UntypedStorage(size, device=device).share_memory_(),
    "it makes ordinary memory first",
)
"""Memory that processes share."""

_dispatch_keys = _find("_C._dispatch_keys", None, "it compares what is public")


def _bits(tensor: Tensor) -> Any:
    return _dispatch_keys(tensor).raw_repr()


def _properties(tensor: Tensor) -> tuple:
    return tensor.device.type, tensor.layout, tensor.is_conj(), tensor.is_inference(), is_lazy(tensor)


keys: Callable[[Tensor], Any] = _properties if _dispatch_keys is None else _bits
"""What is the same for tensors that torch treats alike: device, layout, wrappers, lazy bits."""


# ---- autocast

_any_autocast = _find("_C._is_any_autocast_enabled", None, "it asks for the CPU and CUDA")
_without_autocast = _find("_C._DisableAutocast", None, "it switches off the CPU's and CUDA's")


def any_autocast() -> bool:
    """True under autocast of any device."""
    if _any_autocast is not None:
        return _any_autocast()
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@contextlib.contextmanager
def _no_autocast():
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


no_autocast: Callable[[], Any] = _without_autocast or _no_autocast
"""A context without autocast."""

# ---- backward passes

saved_hooks = _find("_C._autograd._top_saved_tensors_default_hooks", lambda ignored: (), "it takes hooks to be there")
"""The hooks of saved tensors that are on, or none."""
graph_task: Callable[[], int] = _find("_C._current_graph_task_id", lambda: -1, "it takes backward passes for none")
"""Number of the backward pass that runs, -1 for none."""
_keeps = _find("_C._autograd._get_current_graph_task_keep_graph", None, "it takes what is safe for granted")
set_eval_frame: Callable[[Any], Any] = _find(
    "_C._dynamo.eval_frame.set_eval_frame", lambda callback: None, "torch._dynamo.disable"
)


def keeps_graph(unknown: bool) -> bool:
    """Whether the backward pass that runs keeps what the graph saved for another one; `unknown` where torch does not
    tell (2.4)."""
    return unknown if _keeps is None else _keeps()


gradient_hooks: Callable[[Tensor], tuple] = _read(
    Tensor,
    "Tensor._backward_hooks _post_accumulate_grad_hooks",
    lambda tensor: (tensor._backward_hooks, tensor._post_accumulate_grad_hooks),
    lambda tensor: (object(), object()),
    "what was captured is not replayed",
)
"""What holds the hooks of a tensor's gradient: the same objects as long as there are no others."""
backward_engine: Any = _find("autograd.Variable._execution_engine", None, "models are not wrapped to follow each other")
"""What runs backward passes; its queue_callback() takes a function to call at the end of the one that runs."""


def backward_class(function: type[torch.autograd.Function]) -> type | None:
    """The class of the nodes of a torch.autograd.Function; None where that is not told."""
    return getattr(function, "_backward_cls", None)


UNTOLD = object()


def saved(node: Any, name: str) -> Any:
    """What a node of autograd keeps of its call; UNTOLD where it does not say."""
    return getattr(node, f"_saved_{name}", UNTOLD)


def shape_of(node: Any) -> Any:
    """Of a node's result; something that no other's is where it does not say."""
    described = getattr(node, "_input_metadata", None)
    return tuple(described[0].shape) if described else object()


with torch.inference_mode(False), torch.enable_grad():
    _x = torch.ones(2, 2, device="cpu", requires_grad=True)
    for _y, _names in (
        (_x[:1], "_input_metadata _saved_dim _saved_start _saved_end _saved_step"),
        (_x.softmax(0), "_saved_dim"),
        (functional.layer_norm(_x, (2,)), "_saved_normalized_shape"),
    ):
        _read(_y.grad_fn, f"autograd.graph.Node().{_names}", saved, saved, "gradients of all rows are computed")

# ---- CUDA, which a torch without it lacks

_HAS_CUDA = torch.backends.cuda.is_built()


def _of_cuda(path: str, instead: Callable, words: str) -> Any:
    return _find(path, instead, words) if _HAS_CUDA else instead


current_device: Callable[[], int] = _of_cuda("_C._cuda_getDevice", torch.cuda.current_device, "it asks torch.cuda")
raw_stream: Callable[[int], int] = _of_cuda(
    "_C._cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream, "it asks torch.cuda"
)
"""Address of the current stream on a CUDA device."""
end_allocation: Callable[[int, Any], None] = _of_cuda(
    "_C._cuda_endAllocateToPool", lambda device, pool: None, "a failed capture keeps its memory"
)

_PROCESS = os.getpid()
is_bad_fork: Callable[[], bool] = _find(
    "cuda._is_in_bad_fork", lambda: os.getpid() != _PROCESS, "it compares numbers of processes"
)
"""True in a process that may not use CUDA, as its parent did."""
spin: Callable[[int], None] = _find("cuda._sleep", lambda cycles: None, "measured times have the host's in them")
"""Keep the device busy for so many cycles."""


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Of a process group, by its options."""
    if hasattr(options, "_timeout"):
        options._timeout = timeout


# ---- functions on tensors, and operators

pytree: Any = _need("utils._pytree")
"""Tensors in nested lists, tuples and dictionaries."""
nn_functions: Any = _find("_C._nn", functional, "it knows torch.nn.functional's alone")
"""Where activations stand that torch.nn.functional calls."""
to_copy: Any = _find("ops.aten._to_copy", None, "a CBSR tensor of another dtype or device is an ordinary one")
"""The operator behind Tensor.to()."""
foreach_mul: Callable[[list, Any], Any] = _find(
    "_foreach_mul",
    lambda xs, ys: [x * y for x, y in zip(xs, ys if isinstance(ys, (list, tuple)) else [ys] * len(xs), strict=True)],
    "it multiplies one by one",
)
"""Products of many tensors by one kernel."""


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


foreach_copy: Callable[[list[Tensor], list[Tensor]], Any] = _find("_foreach_copy_", _copy_each, "it copies one by one")
"""Copies of many tensors by one kernel."""
grouped_mm: Any = _find("_grouped_mm", None, "its own kernel multiplies groups of rows", since="2.8")
"""Products of groups of rows with a matrix each, or None."""
fp32_precision: Any = _find("_C._get_fp32_precision_getter", None, "it asks for the older setting", since="2.9")
"""What says by backend and op how float32 is multiplied, or None."""


def _assert_now(valid: Tensor, words: str) -> None:
    if not valid:
        raise RuntimeError(words)


assert_later: Callable[[Tensor, str], None] = _find("_assert_async", _assert_now, "it waits for the result")
"""RuntimeError unless a tensor of one number is true, found on its device."""
_need("ops.aten.neg.default._schema")


def schema_of(op: Any) -> Any:
    """The schema of an operator: its arguments and what it writes to."""
    return op._schema


# ---- torch.compile


def unread(function: Callable) -> Callable:
    """Have torch._dynamo leave a function unread, without loading it for that."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "gnnaccel's derivatives run as they are"  # type: ignore[attr-defined]
    return function


def comptime() -> Any:
    """Runs a function while torch.compile reads its call, and gives it what `backend_of` takes; None where that is not
    there. Loads torch._dynamo."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo.comptime")
    words = "of layers in torch.compile PyG's own code is compiled"
    context = "_dynamo.comptime.ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator"
    found = [_find(path, None, words) for path in ("_dynamo.comptime.comptime", context)]
    return None if None in found else found[0]


def backend_of(context: Any) -> Any:
    """The backend of torch.compile that the code is read for."""
    backend = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.compiler_fn
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def codegen_of(graph: torch.fx.Graph) -> Any:
    """How an fx.Graph writes its code; None where it does not say."""
    return getattr(graph, "_codegen", None)


_read(torch.fx.Graph(), "fx.Graph()._codegen", codegen_of, codegen_of, "models of to_hetero() run as they are")

# ---- loaders and optimizers

SingleProcessIter: Any = _find(
    "utils.data.dataloader._SingleProcessDataLoaderIter", None, "loaders draw no batch ahead of its turn"
)
"""The class of a loader's iterator without workers, or None."""


def batches_of(iterator: Any) -> Any:
    """What says which items the next batch of such an iterator has; None where that is not told."""
    return getattr(iterator, "_sampler_iter", None)


def set_batches(iterator: Any, batches: Any) -> None:
    iterator._sampler_iter = batches


def set_dataset(iterator: Any, dataset: Any) -> None:
    if (fetcher := getattr(iterator, "_dataset_fetcher", None)) is not None:
        fetcher.dataset = dataset


def without_warning(optimizer: Any) -> None:
    """Spare an optimizer's warning that its capturable steps run uncaptured, as they do before the capture."""
    with contextlib.suppress(AttributeError):
        optimizer._warned_capturable_if_run_uncaptured = True


# ---- what ours stand in for


class Patches:
    """Functions of torch and the frameworks that ours stand in for, and their undo."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put make(what is there) in the place of an attribute of a class or module."""
        there = getattr(owner, name)
        self._before.append((owner, name, there))
        setattr(owner, name, make(there))

    def undo(self) -> None:
        """Put back what was there, the last first."""
        while self._before:
            setattr(*self._before.pop())
