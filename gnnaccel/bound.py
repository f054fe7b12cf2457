"""Functions that find something else in place of some of their globals.

The code of a function is run with globals that look each name up in the function's own module first and see what is to
be in its place. Nothing in that module is changed: who calls the function itself never meets it, and a global that the
user replaced stays the user's.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from gnnaccel import bytecode, touch

_PACKAGES = ("torch", "torch_geometric", "gnnaccel")


def is_users(value: Any) -> bool:
    """True for a class or function of neither torch nor PyG nor ours."""
    return _package(getattr(value, "__module__", None) or "torch") not in _PACKAGES


def _package(name: str | None) -> str:
    """The package that a module is of."""
    return (name or "").partition(".")[0]


class Replacements:
    """What stands for some globals, also where a function of the user's, that is called, names them.

    functions : function -> what stands for it. modules : names of those that are seen with such functions in them.
    scripted : torch.jit's functions are seen as the functions of Python that they were made of.
    """

    def __init__(self, functions: dict[Callable, Callable], modules: tuple[str, ...] = (), scripted: bool = False):
        self.functions, self.modules, self.scripted = functions, modules, scripted
        self._kept: weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType] = weakref.WeakKeyDictionary()

    def of(self, value: Any, package: str) -> Any:
        """What stands for the value of a global in code of a package, whose other modules are seen the same way."""
        if isinstance(value, types.FunctionType):
            found = self.functions.get(value, value)
            return self._bound(value) if found is value and is_users(value) else found
        if self.scripted and (original := touch.scripted(value)) is not None:
            return self._bound(original)
        seen = isinstance(value, types.ModuleType) and (self._holds(value) or _package(value.__name__) == package)
        return _View(value, self) if seen else value

    def _holds(self, value: Any) -> bool:
        return isinstance(value, types.ModuleType) and value.__name__ in self.modules

    def _bound(self, function: Any) -> types.FunctionType:
        found = self._kept.get(function)
        if found is None:
            if not self.are_named(function):
                return function
            found = self._kept[function] = self.bind(function)
            found.__dict__ = function.__dict__  # it is the same to who asks its attributes
        return found

    def are_named(self, function: Any, seen: tuple = ()) -> bool:
        """True if the code of `function`, of what it decorates, or of a user's function that it calls, names what is
        replaced. seen : functions that are looked through already."""
        if not isinstance(function, types.FunctionType) or function in seen:
            return False
        seen = (*seen, function)
        if self.are_named(_decorated(function), seen):
            return True
        names = [name for code in bytecode.parts_of(function.__code__) for name in code.co_names]
        values = [function.__globals__.get(name) for name in names]
        package = _package(function.__globals__.get("__name__"))
        for module in values[:]:
            if isinstance(module, types.ModuleType) and _package(module.__name__) == package:
                values += [vars(module).get(name) for name in names]
        if self.scripted and any(touch.scripted(value) is not None for value in values):
            return True
        functions = [value for value in values if isinstance(value, types.FunctionType)]
        if any(value in self.functions or (is_users(value) and self.are_named(value, seen)) for value in functions):
            return True
        return any(map(self._holds, values)) and any(each.__name__ in names for each in self.functions)

    def bind(self, function: Any) -> types.FunctionType:
        """A copy of `function`, and of what it decorates, that finds what stands for its globals."""
        closure, inner = function.__closure__, _decorated(function)
        if closure is not None and inner is not None:
            ours = types.CellType(self.bind(inner))
            closure = tuple(ours if cell == types.CellType(inner) else cell for cell in closure)
        package = _package(function.__globals__.get("__name__"))
        return _copied(function, lambda name, space: self.of(space[name], package), closure)


class _Globals(dict):
    """The globals of a function, each found by find(name, namespace) at each look-up (so later changes count)."""

    def __init__(self, namespace: dict, find: Callable[[str, dict], Any]):
        # The interpreter reads these two straight from the dict when the function is made.
        super().__init__({name: namespace[name] for name in ("__name__", "__builtins__") if name in namespace})
        self._namespace, self._find = namespace, find

    def __getitem__(self, name: str) -> Any:
        return self._find(name, self._namespace)


def _copied(function: types.FunctionType, find: Callable[[str, dict], Any], closure: Any) -> types.FunctionType:
    names = _Globals(function.__globals__, find)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def rebind(function: Callable, **replaced: Any) -> Callable:
    """A copy of a Python function, method of a class as it stands there, with some of its globals replaced by name."""
    assert isinstance(function, types.FunctionType)
    return _copied(
        function, lambda name, space: replaced[name] if name in replaced else space[name], function.__closure__
    )


class View:
    """A module or another object with some attributes replaced: ``View(torch, ops=View(torch.ops, pyg=ours))``."""

    def __init__(self, seen: Any, **replaced: Any):
        self.__dict__.update(replaced, _seen=seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)


class _View:
    """A module, seen through replacements."""

    def __init__(self, module: types.ModuleType, replacements: Replacements):
        self._module, self._replacements = module, replacements

    def __getattr__(self, name):
        return self._replacements.of(getattr(self._module, name), _package(self._module.__name__))


def _decorated(function: types.FunctionType) -> types.FunctionType | None:
    """The function that a decorator holds in the closure of `function`, if it is of one."""
    inner = getattr(function, "__wrapped__", None)
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return inner if isinstance(inner, types.FunctionType) and any(value is inner for value in held) else None
