"""Accelerated layers: a subclass per layer class whose propagate() and edge_updater() try our ops first.

PyG writes a specialised propagate() into every layer class at its first instantiation, so patching the base class
reaches nothing. Instead an instance changes its class to a generated subclass of its own class, with the same
name. Pickles and deep copies of it are made from the original class: a checkpoint loads without gnnaccel.
"""

from __future__ import annotations

import copy
import copyreg
import weakref
from typing import Any

from torch_geometric.nn.conv import MessagePassing

from gnnaccel import report
from gnnaccel.pyg_backend import flight
from gnnaccel.pyg_backend.methods import make_methods
from gnnaccel.pyg_backend.propagate import kind_of
from gnnaccel.pyg_backend.touch import GENERATED, ORIGINAL, original_propagate

_subclasses: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()  # layer class -> ours
_instances: weakref.WeakSet[MessagePassing] = weakref.WeakSet()


def accelerate(conv: MessagePassing) -> None:
    """Give one layer our propagate(); does nothing to one that has it."""
    flight.stay(conv)
    plain = type(conv)
    if is_accelerated(conv):
        return
    if any("__init_subclass__" in vars(parent) for parent in plain.__mro__[:-1]):
        report.fallback(kind_of(plain), "its class reacts to being subclassed")
        return
    if plain.propagate is original_propagate(plain) is not MessagePassing.propagate:
        report.fallback(kind_of(plain), "own propagate()")
        return
    try:
        ours = _subclasses.get(plain)
        if ours is None:
            ours = _subclasses[plain] = _make_subclass(plain)
        _set_class(conv, ours)
    except TypeError as error:  # another metaclass, slots
        report.fallback(kind_of(plain), f"its class cannot be extended ({error})")
        return
    _rebind(conv)
    _instances.add(conv)


def _set_class(conv: MessagePassing, cls: type) -> None:
    """Change the class of a layer without its own __setattr__() seeing it."""
    object.__setattr__(conv, "__class__", cls)


def restore(conv: MessagePassing) -> None:
    """Undo `accelerate` on one layer: now, or when its calls that run in other threads are done."""
    flight.when_idle(conv, lambda: _restore(conv))


def _restore(conv: MessagePassing) -> None:
    if is_accelerated(conv):
        _set_class(conv, type(conv)._gnnaccel_plain)
        _rebind(conv)
        _instances.discard(conv)


def restore_all() -> None:
    """Undo `accelerate` on every living layer."""
    for conv in list(_instances):
        restore(conv)


def is_accelerated(conv) -> bool:
    """True if this layer has our propagate()."""
    return "_gnnaccel_plain" in vars(type(conv))


def _rebind(conv: MessagePassing) -> None:
    """Toggling explain leaves a bound propagate() on the instance: bind the one of its present class instead."""
    bound = vars(conv).get("propagate")
    cls = type(conv)
    plain = vars(cls).get("_gnnaccel_plain", cls)
    ours = _subclasses.get(plain)
    known = [plain.__dict__.get(GENERATED), original_propagate(plain)]
    known += [vars(ours)["propagate"], vars(ours)[ORIGINAL]] if ours is not None else []
    if getattr(bound, "__func__", None) in [f for f in known if f is not None]:
        original = conv.explain or conv.decomposed_layers > 1
        function = getattr(cls, ORIGINAL if original else GENERATED)
        conv.propagate = function.__get__(conv, MessagePassing)


def _reduce_ex(self, protocol):
    ours = type(self)
    function, args, *rest = super(ours, self).__reduce_ex__(protocol)
    if function is copyreg.__newobj__ and len(args) == 1:
        function, args = copyreg._reconstructor, (ours, object, None)  # the pickler holds __newobj__ to type(self)
    return (function, tuple(ours._gnnaccel_plain if arg is ours else arg for arg in args), *rest)


def _replicate(self, state) -> MessagePassing:
    plain = type(self)._gnnaccel_plain
    other = plain.__new__(plain)
    other.__setstate__(state)
    accelerate(other)
    return other


def _copy(self):
    return _replicate(self, dict(self.__reduce_ex__(4)[2]))


def _deepcopy(self, memo):
    plain = type(self)._gnnaccel_plain
    other = memo[id(self)] = plain.__new__(plain)
    other.__setstate__(copy.deepcopy(self.__reduce_ex__(4)[2], memo))
    accelerate(other)
    return other


def _prepare_scriptable(self):
    """What torch.jit.script compiles instead: the same layer in its original class."""
    plain = type(self)._gnnaccel_plain
    other = plain.__new__(plain)
    vars(other).update(vars(self))
    _rebind(other)
    report.fallback(kind_of(plain), "torch.jit.script")
    return other


def _make_subclass(plain: Any) -> type:
    members: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_gnnaccel_plain": plain,
        "__reduce_ex__": _reduce_ex,
    }
    for name, method in (
        ("__copy__", _copy),
        ("__deepcopy__", _deepcopy),
        ("__prepare_scriptable__", _prepare_scriptable),
    ):
        if not hasattr(plain, name):
            members[name] = method
    return type(plain)(plain.__name__, (plain,), members | make_methods(plain))
