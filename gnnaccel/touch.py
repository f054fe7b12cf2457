"""What gnnaccel asks of torch by private names: each is looked up here, once, on import, and nowhere else.

Private names come and go with torch's versions. Where one is gone, another way to the same answer takes its place,
slower or more careful: `MISSING` says which. One without which nothing can be right raises ImportError, in words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
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


def _find(path: str, instead: Any, words: str) -> Any:
    """torch.`path`, or `instead`, which `words` describes."""
    NAMES.add(f"torch.{path}")
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
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
below_autograd: Any = _need("_C._AutoDispatchBelowAutograd")
"""A context in which ops run their kernels, and nothing is recorded."""

_use_count = _find("Tensor._use_count", None, "kept messages stay tensors of gnnaccel's own class")


def is_pythons_alone(tensor: Tensor) -> bool:
    """True if nothing but Python's object refers to a tensor, so that it can become another."""
    return _use_count is not None and _use_count(tensor) == 1


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


has_global_hooks: Callable[[], bool] = _find(
    "nn.modules.module._has_any_global_hook",
    lambda: any(hooks for name, hooks in vars(_modules).items() if name.startswith("_global_") and "hooks" in name),
    "it looks at each kind of hook",
)
"""True if somebody watches all modules."""

# ---- kinds of tensors

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
