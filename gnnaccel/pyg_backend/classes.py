"""Accelerated layers: a subclass per layer class whose propagate() and edge_updater() try our ops first.

PyG writes a specialised propagate() into every layer class at its first instantiation, so patching the base class
reaches nothing. Instead an instance changes its class (gnnaccel.subclass).
"""

from __future__ import annotations

from typing import Any

from torch_geometric.nn.conv import MessagePassing

from gnnaccel import report, subclass
from gnnaccel.pyg_backend import flight
from gnnaccel.pyg_backend.methods import make_methods
from gnnaccel.pyg_backend.propagate import kind_of
from gnnaccel.pyg_backend.touch import GENERATED, ORIGINAL, original_propagate
from gnnaccel.subclass import is_extended as is_accelerated


def accelerate(conv: MessagePassing) -> None:
    """Give one layer our propagate(); does nothing to one that has it."""
    flight.stay(conv)
    plain: Any = type(conv)
    if is_accelerated(conv):
        return
    if plain.propagate is original_propagate(plain) is not MessagePassing.propagate:
        report.fallback(kind_of(plain), "own propagate()")
    elif subclass.extend(conv, kind_of(plain), _members, accelerate):
        _rebind(conv)


def restore(conv: MessagePassing) -> None:
    """Undo `accelerate` on one layer: now, or when its calls that run in other threads are done."""
    flight.when_idle(conv, lambda: _restore(conv))


def _restore(conv: MessagePassing) -> None:
    if is_accelerated(conv):
        subclass.restore(conv)
        _rebind(conv)


def restore_all() -> None:
    """Undo `accelerate` on every living layer."""
    for conv in subclass.extended():
        if isinstance(conv, MessagePassing):
            restore(conv)


def _rebind(conv: MessagePassing) -> None:
    """Toggling explain leaves a bound propagate() on the instance: bind the one of its present class instead."""
    bound = vars(conv).get("propagate")
    cls, plain = type(conv), subclass.plain_of(conv)
    ours = subclass.subclass_of(plain)
    known = [plain.__dict__.get(GENERATED), original_propagate(plain)]
    known += [vars(ours)["propagate"], vars(ours)[ORIGINAL]] if ours is not None else []
    if getattr(bound, "__func__", None) in [f for f in known if f is not None]:
        original = conv.explain or conv.decomposed_layers > 1
        function = getattr(cls, ORIGINAL if original else GENERATED)
        conv.propagate = function.__get__(conv, MessagePassing)


def _prepare_scriptable(self):
    """What torch.jit.script compiles instead: the same layer in its original class."""
    plain = type(self)._gnnaccel_plain
    other = plain.__new__(plain)
    vars(other).update(vars(self))
    _rebind(other)
    report.fallback(kind_of(plain), "torch.jit.script")
    return other


def _members(plain: Any) -> dict[str, Any]:
    own = {} if hasattr(plain, "__prepare_scriptable__") else {"__prepare_scriptable__": _prepare_scriptable}
    return own | make_methods(plain)
