"""Modules that change their class to a generated subclass of it, with the same name.

Pickles and copies of such a module are made from the original class: a checkpoint loads without gnnaccel.
"""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from gnnaccel import report

_subclasses: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()  # class -> ours
_instances: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a module may have an equality of its own


def extend(module: Module, kind: str, members: Callable[[Any], dict[str, Any]], again: Callable) -> bool:
    """Give a module a subclass of its class; False, counted with its reason, where it cannot have one.

    Parameters
    ----------
    kind : call site kind in reports
    members : class -> what the subclass has of its own; called once for a class
    again : does to a copy of the module what was done to the module
    """
    plain = type(module)
    if any("__init_subclass__" in vars(parent) for parent in plain.__mro__[:-1]):
        report.fallback(kind, "its class reacts to being subclassed")
        return False
    try:
        ours = _subclasses.get(plain)
        if ours is None:
            ours = _subclasses[plain] = _make(plain, kind, members(plain), again)
        set_class(module, ours)
    except TypeError as error:  # another metaclass, slots
        report.fallback(kind, f"its class cannot be extended ({error})")
        return False
    _instances[module] = True
    return True


def restore(module: Module) -> None:
    """Undo `extend`."""
    if is_extended(module):
        set_class(module, plain_of(module))
        _instances.pop(module, None)


def extended() -> list[Module]:
    """Every living module that has such a class."""
    return list(_instances)


def is_extended(module: Module) -> bool:
    """True if this module has such a class."""
    return "_gnnaccel_plain" in vars(type(module))


def plain_of(module: Module) -> Any:
    """The class that a module had before, or has."""
    return vars(type(module)).get("_gnnaccel_plain", type(module))


def again_of(module: Module) -> Callable | None:
    """What `extend` was given as `again`; None for a module that has no such class."""
    return getattr(type(module), "_gnnaccel_again", None)


def subclass_of(plain: type) -> type | None:
    """The subclass that was made of a class, if one was."""
    return _subclasses.get(plain)


def set_class(module: Module, cls: type) -> None:
    """Change the class of a module without its own __setattr__() seeing it."""
    object.__setattr__(module, "__class__", cls)


def _reduce_ex(self, protocol):
    ours = type(self)
    function, args, *rest = super(ours, self).__reduce_ex__(protocol)
    if function is copyreg.__newobj__ and len(args) == 1:
        function, args = copyreg._reconstructor, (ours, object, None)  # the pickler holds __newobj__ to type(self)
    return (function, tuple(ours._gnnaccel_plain if arg is ours else arg for arg in args), *rest)


def _again(self, other, state):
    if state is not None:
        other.__setstate__(state)
    if type(other) is type(self)._gnnaccel_plain:
        type(self)._gnnaccel_again(other)
    return other


def _copy(self):
    if not is_extended(self):  # of a class that somebody has made of ours, as torch's parametrizations do
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        return other
    function, args, *rest = self.__reduce_ex__(4)
    return _again(self, function(*args), dict(rest[0]) if rest and rest[0] is not None else None)


def _deepcopy(self, memo):
    if not is_extended(self):
        other = memo[id(self)] = type(self).__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other
    function, args, *rest = self.__reduce_ex__(4)
    other = memo[id(self)] = function(*copy.deepcopy(args, memo))
    return _again(self, other, copy.deepcopy(rest[0], memo) if rest else None)


def _make(plain: Any, kind: str, members: dict[str, Any], again: Callable) -> type:
    def _prepare_scriptable(self):
        """What torch.jit.script compiles instead: the same module in its original class."""
        other = plain.__new__(plain)
        vars(other).update(vars(self))
        report.fallback(kind, "torch.jit.script")
        return other

    own: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_gnnaccel_plain": plain,
        "_gnnaccel_again": staticmethod(again),
        "__reduce_ex__": _reduce_ex,
    }
    for name, method in (
        ("__copy__", _copy),
        ("__deepcopy__", _deepcopy),
        ("__prepare_scriptable__", _prepare_scriptable),
    ):
        if not hasattr(plain, name):
            own[name] = method
    return type(plain)(plain.__name__, (plain,), own | members)
