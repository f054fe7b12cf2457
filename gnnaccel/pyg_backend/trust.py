"""Whether a layer's own code may be handed lazy features: only where torch sees all that is done to them.

A custom autograd function or a compiled module would take a lazy tensor for an ordinary one. So the code that
message(), aggregate(), update() and edge_update() reach must use torch, PyG and plain Python alone. And it must not
write in place: a slice or another view of a lazy feature shares no memory with it.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from typing import Any

from torch_geometric.nn.conv import MessagePassing

_ROOTS = ("message", "aggregate", "update", "edge_update")
_TRUSTED = ("torch.nn.", "torch_geometric.")  # modules whose forward() writes in place only if told to
_PACKAGES = ("torch", "torch_geometric", "math", "operator", "_operator", "typing", "functools", "builtins")
# Names and attributes of code that looks at tensors themselves: transforms, compilers, their own autograd.
_WORDS = {"autograd", "vmap", "func", "jit", "compile", "checkpoint", "_dynamo", "register_hook", "type", "__class__"}
_OPAQUE = ("torch.autograd", "torch.jit", "torch._dynamo", "torch.utils.cpp_extension", "torch.func")


def distrust(conv: MessagePassing) -> str | None:
    """Why the code of this layer cannot be looked through, or None if it can."""
    plain = vars(type(conv)).get("_gnnaccel_plain", type(conv))
    reason, is_pygs = _of_methods(plain, *[getattr(plain, name, None) for name in _ROOTS])
    if reason is not None:
        return reason
    # Walked at each call: submodules may be replaced, and told to write in place, between two of them.
    found, seen = [conv], {id(conv)}
    for module in found:
        for part in module._modules.values():
            if part is None or id(part) in seen:
                continue
            if not type(part).__module__.startswith(_TRUSTED):
                return f"a submodule of class {type(part).__name__}, which cannot be looked through"
            if not is_pygs and getattr(part, "inplace", False):
                return f"{type(part).__name__} writes in place"
            seen.add(id(part))
            found.append(part)
    return None


@functools.lru_cache(maxsize=1024)
def _of_methods(plain: Any, *methods) -> tuple[str | None, bool]:
    """Why the code of these methods of a class cannot be looked through, and whether all of it is PyG's own.

    PyG's own keeps no view of what it writes to.
    """
    reason = _of_functions(list(methods), plain)
    return reason, all(_is_known(MessagePassing if method is None else method) for method in methods)


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
        reason = _of_code(function.__code__)
        if reason is not None:
            return f"{function.__name__}() {reason}"
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


def _of_code(code: types.CodeType) -> str | None:
    """Why the code itself, without what it calls, cannot be trusted."""
    for name in _names(code):
        if name in _WORDS:
            return f"uses {name!r}"
        if name.endswith("_") and not name.endswith("__"):
            return f"calls {name}(), which writes in place"
    for instruction in dis.get_instructions(code):
        in_place = instruction.opname.startswith(("INPLACE_", "STORE_SUBSCR", "STORE_SLICE"))
        if in_place or (instruction.opname == "BINARY_OP" and instruction.argrepr.endswith("=")):
            return "writes in place"
    keywords = [word for const in code.co_consts if isinstance(const, tuple) for word in const]
    return "writes in place" if "inplace" in keywords else None
