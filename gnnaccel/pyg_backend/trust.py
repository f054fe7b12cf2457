"""Whether a layer's own code may be handed lazy features: only where torch sees all that is done to them.

A custom autograd function or a compiled module would take a lazy tensor for an ordinary one. So the code that
message(), aggregate(), update() and edge_update() reach must use torch, PyG and plain Python alone.
"""

from __future__ import annotations

import builtins
import functools
import types
from typing import Any

from torch_geometric.nn.conv import MessagePassing

_ROOTS = ("message", "aggregate", "update", "edge_update")
_PACKAGES = ("torch", "torch_geometric", "math", "operator", "_operator", "typing", "functools", "builtins")
_OPAQUE = ("torch.autograd", "torch.jit", "torch._dynamo", "torch.utils.cpp_extension", "torch.func")


def distrust(conv: MessagePassing) -> str | None:
    """Why the code of this layer cannot be looked through, or None if it can."""
    plain = vars(type(conv)).get("_gnnaccel_plain", type(conv))
    reason = _of_class(plain)
    if reason is not None:
        return reason
    for part in conv.modules():
        if part is not conv and not type(part).__module__.startswith(("torch.nn.", "torch_geometric.")):
            return f"a submodule of class {type(part).__name__}, which cannot be looked through"
    return None


@functools.lru_cache(maxsize=1024)
def _of_class(plain: Any) -> str | None:
    return _of_functions([getattr(plain, name, None) for name in _ROOTS], plain)


def _of_functions(functions: list, plain: Any) -> str | None:
    """Follow functions to the functions and methods they name."""
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if id(function) in seen or _is_known(function):
            continue
        seen.add(id(function))
        if not isinstance(function, types.FunctionType):
            return f"it calls {getattr(function, '__name__', function)!r}, which cannot be looked through"
        for cell in function.__closure__ or ():
            functions += [cell.cell_contents] if callable(cell.cell_contents) else []
        for name in _names(function.__code__):
            value = function.__globals__.get(name, getattr(builtins, name, None))
            if callable(value) or isinstance(value, types.ModuleType):
                functions.append(value)
            method = getattr(plain, name, None)
            if callable(method):
                functions.append(method)
    return None


def _is_known(value) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", None))
    if name.startswith(_OPAQUE):
        return False
    return name.split(".")[0] in _PACKAGES


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _names(const)
    return found
